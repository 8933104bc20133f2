"""Runs that start from another run's weights, and full-batch gradients."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import landscape
from landscape import FailedError, InputError
from landscape.core import hdf5
from landscape.train.recipes import recipe
from landscape.train.recipes.recipe import Init
from landscape.train.run import launch
from landscape.train.run.loop import Trainer
from tests.conftest import Command
from tests.test_buffers import BASE as NORMS
from tests.test_training import same_bits


@pytest.fixture
def first(tiny: Path, tmp_path: Path) -> Path:
    launch.launch(recipe.read(str(tiny)), tmp_path / "first")
    return tmp_path / "first" / "last.h5"


def test_all_learners_start_at_the_mean_and_the_recipe_says_of_what(
    tiny: Path, first: Path, tmp_path: Path
) -> None:
    settings = [f"init.checkpoint={first}", "seed=7", "learners=5"]
    launch.launch(recipe.read(str(tiny), settings), tmp_path / "second")
    start = landscape.load(tmp_path / "second" / "step-0000000.h5")
    torch.testing.assert_close(start.weights, landscape.load(first).mean.expand(5, -1), rtol=0, atol=0)
    written = recipe.read(str(tmp_path / "second" / "recipe.toml"))
    assert written.init == Init(str(first), hdf5.sha256(first))
    assert recipe.from_values(recipe.parse(start.recipe, "")) == written
    assert recipe.read(str(tiny)).init == Init()


def test_such_a_run_is_resumed_to_the_bit_without_the_file(tiny: Path, first: Path, tmp_path: Path) -> None:
    # The bound on the spread is a multiple of ‖w_a‖² at the start, which only the file that is gone could tell.
    chosen = recipe.read(str(tiny), [f"init.checkpoint={first}", "diverge.consensus=1e-9"])
    whole = launch.launch(chosen, tmp_path / "whole")
    assert (whole.diverged, whole.diverged_at) == ("learners", 10)
    calm = recipe.read(str(tiny), [f"init.checkpoint={first}"])
    other = launch.launch(calm, tmp_path / "calm")
    first.unlink()
    for done, end in ((tmp_path / "whole", whole), (tmp_path / "calm", other)):
        for path in sorted(done.glob("step-*.h5"))[::2]:
            folder = tmp_path / f"{done.name}-{path.stem}"
            folder.mkdir()
            shutil.copy(path, folder / "last.h5")
            same_bits(end, launch.launch(None, folder, resume=True))
    # A RECIPE that says nothing of the SHA-256 is the same; another file is not.
    same_bits(other, launch.launch(calm, tmp_path / "calm", resume=True))
    with pytest.raises(FailedError, match=r"resuming it with checkpoint = \"\" is not allowed"):
        launch.launch(recipe.read(str(tiny)), tmp_path / "calm", resume=True)
    trainer = Trainer(chosen, checkpoint=landscape.load(tmp_path / "whole" / "step-0000000.h5"))
    assert trainer.divergence.start_norm2 == pytest.approx(float(trainer.weights[0] @ trainer.weights[0]))


def test_batchnorms_statistics_come_along(tmp_path: Path) -> None:
    end = launch.launch(recipe.from_values(NORMS), tmp_path / "first")
    init = {"init": {"checkpoint": str(tmp_path / "first" / "last.h5")}}
    trainer = Trainer(recipe.from_values(NORMS | init | {"seed": 3}))
    assert end.mean_buffers
    for name, value in end.mean_buffers.items():
        torch.testing.assert_close(trainer.buffers.local[name], value.expand(3, *value.shape))
    torch.testing.assert_close(trainer.weights, end.mean.expand(3, -1))


def test_what_cannot_be_started_from_is_said_in_a_line(
    command: Command, tiny: Path, first: Path, tmp_path: Path
) -> None:
    for settings, code, match in (
        (
            [f"init.checkpoint={first}", "model.widths=[6,9,3]"],
            1,
            "last.h5: its weights do not fit the model",
        ),
        ([f"init.checkpoint={tmp_path}/none.h5"], 1, "none.h5"),
        ([f"init.checkpoint={first}", "init.sha256='00ff'"], 1, "the recipe's init.sha256 is 00ff"),
        (["init.sha256='00ff'"], 2, "init.sha256: not allowed without init.checkpoint"),
        (["sampling=all"], 2, "sampling: 'all' is not allowed with batch 40, it must be 200"),
        (["sampling=some"], 2, "sampling: 'some' is not allowed"),
    ):
        words = [word for setting in settings for word in ("--set", setting)]
        found, _, err = command("train", tiny, *words, "-o", tmp_path / "run", "-q")
        assert found == code
        assert match in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_all_samples_at_each_step_are_gradient_descent(tiny: Path) -> None:
    settings = ["algorithm={name='ssgd'}", "sampling=all", "batch=200", "dtype=float64", "steps=10"]
    trainer = Trainer(recipe.read(str(tiny), settings))
    theta = trainer.train.theta
    for _ in range(10):
        theta = theta - 0.2 * trainer.train.gradient(theta)
    torch.testing.assert_close(trainer.run().mean, theta, rtol=1e-12, atol=1e-12)


def test_only_the_first_training_images(tmp_path: Path) -> None:
    from tests.test_recipe_and_data import write_mnist

    write_mnist(tmp_path)
    whole, part = (landscape.data.load("mnist", data_dir=tmp_path, samples=n) for n in (0, 12))
    assert isinstance(whole.train, tuple)
    assert isinstance(part.train, tuple)
    assert torch.equal(part.train[0], whole.train[0][:12])
    assert part.fingerprint != whole.fingerprint
    with pytest.raises(InputError, match=r"data.samples: 31 is not allowed, it must be 0 \(all\) to 30"):
        landscape.data.load("mnist", data_dir=tmp_path, samples=31)
