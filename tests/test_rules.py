"""Mixing matrices from files, and the step decomposition against what defines it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import landscape
from landscape import LandscapeError, OperationError, Problem
from landscape.core import registry
from landscape.gradients.learners import Stack
from landscape.training import algorithms, decomposition, optimizer
from landscape.training.algorithms.ssgd import SSGD
from landscape.training.decomposition import Decomposer, GradientEstimator
from landscape.training.optimizer import Optimizer
from landscape.training.processes.comm import Comm
from landscape.training.recipes import recipe
from landscape.training.run import launch
from landscape.training.run.loop import Trainer
from landscape.training.run.randomness import _NUMBERED, RESERVED, _stream, generator
from landscape.training.topology.mixing import Mixing, expected_matching


@pytest.mark.parametrize("n", [4, 5])
def test_matchings_pair_everyone_once_and_average_to_the_expected_matrix(n: int) -> None:
    mixing = Mixing("random-matching", n, 3)
    drawn = [mixing.matrix(t) for t in range(1, 4001)]
    for m in drawn[:50]:
        assert np.array_equal(m, m.T)
        assert sorted((m == 0.5).sum(1)) == ([2] * 4 if n == 4 else [0, 2, 2, 2, 2])
        assert min(np.linalg.eigvalsh(m)) == pytest.approx(mixing.omega_min, abs=1e-12)
    np.testing.assert_allclose(np.mean(drawn, axis=0), expected_matching(n), atol=0.03)


def test_a_matrix_from_a_file(tmp_path: Path) -> None:
    m = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    np.savetxt(tmp_path / "m.csv", m, delimiter=",")
    np.savetxt(tmp_path / "m.txt", m)
    np.save(tmp_path / "m.npy", m)
    for name in ("m.csv", "m.txt", "m.npy"):
        np.testing.assert_allclose(Mixing(str(tmp_path / name), 3, 0).matrix(1), m)
    (tmp_path / "third.csv").write_text("0.3333,0.3333,0.3333\n" * 3)
    np.testing.assert_allclose(Mixing(str(tmp_path / "third.csv"), 3, 0).matrix(1), 1 / 3, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0.5,0.5\n0.5,0.6\n", "row 2 sums to 1.1"),
        ("0.5,0.5\n0.4,0.6\n", "column 2 sums to 1.1"),
        ("1.5,-0.5\n-0.5,1.5\n", "every entry must be finite and ≥ 0"),
        ("1,0\n0,nan\n", "finite"),
        ("1,0,0\n0,1,0\n", r"\(2, 3\) matrix, 2 learners need \(2, 2\)"),
        ("a,b\n", "cannot be read as a matrix"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*input contained no data")
def test_bad_matrices(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(LandscapeError, match=match):
        Mixing(str(tmp_path / "m.csv"), 2, 0)


def test_matrices_that_cannot_be_read(tmp_path: Path) -> None:
    pickled = tmp_path / "p.npy"
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for path in (tmp_path / "none.csv", pickled):
        with pytest.raises(OperationError, match=f"{path.name} cannot be read"):
            Mixing(str(path), 1, 0)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from(["awc", "atc"]), st.floats(0.01, 2.0))
def test_identities_hold_in_float32(seed: int, order: str, lr: float) -> None:
    torch.manual_seed(seed)
    model = landscape.models.build("mlp", widths=[5, 6, 3])
    x, y = torch.randn(40, 5), torch.randint(3, (40,))
    problem = Problem(model, torch.nn.functional.cross_entropy, (x, y))
    stack = Stack(problem)
    weights = problem.weights + 0.3 * torch.randn(4, problem.layout.size)
    indices = torch.randint(40, (4, 7))
    rule = algorithms.make("dpsgd", {"order": order}, learners=4, seed=seed)
    rule.begin(weights, 1)
    own = torch.empty_like(weights)
    stack.gradients(rule.gradient_points(weights), x[indices], y[indices], out=own)
    mean = weights.mean(0)
    part = Decomposer(stack, GradientEstimator(problem, Comm(4))).begin(
        weights, x[indices], y[indices], own, 1
    )
    new = rule.finish(weights, own, lr, 1)
    c = part(new, lr)
    assert c["alpha_e"] ** 2 * c["grad_norm2"] + c["delta"] == pytest.approx(c["displacement2"], rel=1e-5)
    split = c["delta_s"] + c["delta_2"] + c["delta_cross"]
    assert split == pytest.approx(c["delta"], rel=1e-5, abs=1e-5 * c["displacement2"])
    assert c["train_loss"] == pytest.approx(problem.loss(mean), rel=1e-5)
    assert c["delta_2"] <= c["delta_2_full"] * (1 + 1e-6)


def test_the_decomposition_by_a_sample_is_right_on_average_and_its_errors_are_of_the_right_size() -> None:
    """Against g on all samples; with the square of an estimate, or errors that do not cancel, Δ is lost."""
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[6, 8, 3], activation="tanh")
    data = landscape.data.load("synthetic", samples=3000, dimension=6, classes=3)
    problem = Problem(model, data.loss, data.train, dtype=torch.float64)
    stack, at = Stack(problem), problem.weights + 0.05 * torch.randn(4, problem.layout.size).double()
    drawn = torch.randint(problem.samples, (4, 200))
    x, y = problem.gather(drawn)
    own = torch.empty_like(at)
    stack.gradients(at, x, y, out=own)

    def columns(samples: int, step: int) -> dict[str, float]:
        g = GradientEstimator(stack.problem, Comm(len(at)), samples)
        found = Decomposer(stack, g).begin(at, x, y, own, step)
        return found(at - 0.5 * own, 0.5)

    truth, draws = columns(0, 0), [columns(512, step) for step in range(80)]
    for name in ("alpha_e", "grad_norm2", "delta", "delta_s", "delta_2", "delta_cross"):
        values, errors = (np.array([c[name + end] for c in draws]) for end in ("", "_se"))
        assert truth[f"{name}_se"] == 0
        assert abs(values.mean() - truth[name]) < 3.5 * values.std() / 80**0.5, name
        assert 0.8 < (errors**2).mean() ** 0.5 / values.std() < 1.4, name


def test_pairs_estimate_products_and_their_covariance_without_bias() -> None:
    torch.manual_seed(0)
    a, b = (0.3 + torch.randn(20000, 6, dtype=torch.float64) for _ in range(2))
    h, q = (v[:, :, None] * v[:, None, :] for v in (a, a + b))
    found, other = decomposition.mean(h), decomposition.mean(q)
    assert float(found.mean()) == pytest.approx(0.09, abs=4 * float(found.std()) / 20000**0.5)
    expected = float(torch.cov(torch.stack([found, other]))[0, 1])
    assert float(decomposition.covariance(h, q).mean()) == pytest.approx(expected, rel=0.05)
    assert float(decomposition.covariance(h, h).mean()) == pytest.approx(float(found.var()), rel=0.05)
    assert bool(decomposition.quotient(h, -h)[0][found > 0].isnan().all())


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


def with_signs(**more: Any) -> list[str]:
    return ["optimizer.name=signs", "lr=0.01", "checkpoint.every=10", *(f"{k}={v}" for k, v in more.items())]


def test_a_recipe_names_them_and_the_file_has_their_columns(tiny: Path, tmp_path: Path) -> None:
    chosen = recipe.read(str(tiny), ["algorithm={name='jittered', width=0.2}", *with_signs()])
    end = launch.launch(chosen, tmp_path / "run")
    assert "width = 0.2" in chosen.to_toml()
    draws = [0.2 * torch.rand(1, generator=generator(0, "jitter", t)).item() for t in range(1, 31)]
    np.testing.assert_allclose(end.history["jitter"], draws)
    with h5py.File(tmp_path / "run" / "last.h5") as file:
        assert file["history/jitter"].attrs["unit"] == "1"
    with pytest.raises(LandscapeError, match=r"algorithm: 'widht'.*'width'"):
        recipe.read(str(tiny), ["algorithm={name='jittered', widht=0.2}"])
    (tmp_path / "half").mkdir()
    (tmp_path / "run" / "step-0000010.h5").rename(tmp_path / "half" / "last.h5")
    resumed = launch.launch(None, tmp_path / "half", resume=True)
    assert torch.equal(resumed.weights, end.weights)
    np.testing.assert_array_equal(resumed.history["jitter"], end.history["jitter"])


def test_a_column_that_is_not_declared_is_not_dropped_in_silence(tiny: Path) -> None:
    trainer = Trainer(recipe.read(str(tiny), ["algorithm={name='undeclared'}"]))
    with pytest.raises(OperationError, match="'undeclared'.*'jitter'"):
        trainer.run()


def test_what_the_loop_has_is_not_declared_again() -> None:
    with pytest.raises(LandscapeError, match="column 'loss'"):
        type("Bad", (SSGD,), {"columns": {"loss": "1"}})
    with pytest.raises(LandscapeError, match="purpose 'batch'"):
        type("Bad", (SSGD,), {"purposes": ("batch",)})
    with pytest.raises(OperationError, match=r"SSGD.*'jitter'"):
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
    with pytest.raises(OperationError, match="'nameless'"):
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
