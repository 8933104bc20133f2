"""Update rules and optimizers of plugins: by name, with columns and random purposes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import landscape
from landscape import FailedError, InputError
from landscape.core import registry
from landscape.train import optimizer
from landscape.train.algorithms.ssgd import SSGD
from landscape.train.optimizer import Optimizer
from landscape.train.recipes import recipe
from landscape.train.run import launch
from landscape.train.run.loop import Trainer
from landscape.train.run.randomness import _NUMBERED, RESERVED, _stream, generator


class Jittered(SSGD):
    """SSGD with a rate that is drawn anew each step."""

    columns: ClassVar[Mapping[str, str]] = {"jitter": "1"}
    purposes = ("jitter",)

    def __init__(self, learners: int, seed: int, width: float = 0.1) -> None:
        super().__init__(learners, seed)
        self.width, self._jitter = width, 0.0

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        self._jitter = self.width * float(torch.rand(1, generator=self.generator("jitter", step)))
        return super().finish(weights, directions, lr * (1 + self._jitter), step)

    def record(self, step: int) -> dict[str, float]:
        return {"jitter": self._jitter}


class Undeclared(Jittered):
    columns: ClassVar[Mapping[str, str]] = {}


class Signs(Optimizer):
    """The sign of the gradient."""

    linear = False

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        return gradients.sign()


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three are there by name, and nowhere else afterwards."""
    registry.algorithms.names()
    optimizer.names()
    monkeypatch.setattr(registry.algorithms, "_entries", dict(registry.algorithms._entries))
    monkeypatch.setattr(registry.optimizers, "_entries", dict(registry.optimizers._entries))
    registry.algorithms.add("jittered")(Jittered)
    registry.algorithms.add("undeclared")(Undeclared)
    registry.optimizers.add("signs")(Signs)


def settings(**more: Any) -> list[str]:
    return ["optimizer.name=signs", "lr=0.01", "checkpoint.every=10", *(f"{k}={v}" for k, v in more.items())]


def test_a_recipe_names_them_and_the_file_has_their_columns(tiny: Path, tmp_path: Path) -> None:
    chosen = recipe.read(str(tiny), ["algorithm={name='jittered', width=0.2}", *settings()])
    end = launch.launch(chosen, tmp_path / "run")
    assert "width = 0.2" in chosen.to_toml()
    draws = [0.2 * torch.rand(1, generator=generator(0, "jitter", t)).item() for t in range(1, 31)]
    np.testing.assert_allclose(end.history["jitter"], draws)
    with h5py.File(tmp_path / "run" / "last.h5") as file:
        assert file["history/jitter"].attrs["unit"] == "1"
    with pytest.raises(InputError, match=r"algorithm: 'widht'.*'width'"):
        recipe.read(str(tiny), ["algorithm={name='jittered', widht=0.2}"])
    (tmp_path / "half").mkdir()
    (tmp_path / "run" / "step-0000010.h5").rename(tmp_path / "half" / "last.h5")
    resumed = launch.launch(None, tmp_path / "half", resume=True)
    assert torch.equal(resumed.weights, end.weights)
    np.testing.assert_array_equal(resumed.history["jitter"], end.history["jitter"])


def test_a_column_that_is_not_declared_is_not_dropped_in_silence(tiny: Path) -> None:
    trainer = Trainer(recipe.read(str(tiny), ["algorithm={name='undeclared'}"]))
    with pytest.raises(FailedError, match="'undeclared'.*'jitter'"):
        trainer.run()


def test_what_the_loop_has_is_not_declared_again() -> None:
    with pytest.raises(InputError, match="column 'loss'"):
        type("Bad", (SSGD,), {"columns": {"loss": "1"}})
    with pytest.raises(InputError, match="purpose 'batch'"):
        type("Bad", (SSGD,), {"purposes": ("batch",)})
    with pytest.raises(FailedError, match=r"SSGD.*'jitter'"):
        SSGD(2, 0).generator("jitter", 1)


def test_files_with_columns_that_nobody_knows_here_are_read_kept_and_resumed(
    tiny: Path, tmp_path: Path
) -> None:
    chosen = recipe.read(str(tiny), ["steps=20"])
    launch.launch(chosen, tmp_path)
    for name in ("last.h5", "step-0000020.h5"):
        with h5py.File(tmp_path / name, "r+") as file:
            column = file.create_dataset("history/foreign", data=np.arange(20.0))
            column.attrs["unit"] = "furlong"
    run = landscape.load(tmp_path / "last.h5")
    assert run.units["foreign"] == "furlong"
    np.testing.assert_array_equal(run.history["foreign"], np.arange(20.0))
    run.save(tmp_path / "copy.h5")
    assert landscape.load(tmp_path / "copy.h5").units == run.units
    longer = launch.launch(recipe.read(str(tiny), ["steps=25"]), tmp_path, resume=True)
    np.testing.assert_array_equal(longer.history["foreign"][:20], np.arange(20.0))
    assert np.isnan(longer.history["foreign"][20:]).all()
    assert landscape.load(tmp_path / "last.h5").units["foreign"] == "furlong"
    run.history["nameless"] = np.zeros(20)
    with pytest.raises(FailedError, match="'nameless'"):
        run.save(tmp_path / "bad.h5")


def test_streams_keep_their_numbers_and_those_by_name_collide_with_none() -> None:
    assert [_NUMBERED[name] for name in ("init", "batch", "noise", "mixing", "decompose")] == [0, 1, 2, 3, 4]
    assert [_NUMBERED[name] for name in ("delay", "push", "augment", "dropout", "monitor")] == [5, 6, 7, 8, 9]
    assert set(RESERVED) < set(_NUMBERED)
    for name in ("jitter", "another", "é", ""):
        words = _stream(name)
        assert len(words) == 4
        assert all(2**31 <= word < 2**32 for word in words)  # no seed and no number is so large
    assert len({generator(0, name, 1).initial_seed() for name in ("jitter", "another", *_NUMBERED)}) == 12
