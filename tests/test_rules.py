"""Mixing matrices from files, and the step decomposition against what defines it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import landscape
from landscape import FailedError, InputError, Problem
from landscape.gradients.learners import Stack
from landscape.train import algorithms, decomposition
from landscape.train.decomposition import Decomposer
from landscape.train.processes.comm import Comm
from landscape.train.topology.mixing import Mixing, expected_matching


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
    with pytest.raises(InputError, match=match):
        Mixing(str(tmp_path / "m.csv"), 2, 0)


def test_matrices_that_cannot_be_read(tmp_path: Path) -> None:
    pickled = tmp_path / "p.npy"
    np.save(pickled, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for path in (tmp_path / "none.csv", pickled):
        with pytest.raises(FailedError, match=f"{path.name} cannot be read"):
            Mixing(str(path), 1, 0)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from(["awc", "atc"]), st.floats(0.01, 2.0))
def test_identities_hold_in_float32(seed: int, order: str, lr: float) -> None:
    torch.manual_seed(seed)
    model = landscape.models.build("mlp", widths=[5, 6, 3])
    x, y = torch.randn(40, 5), torch.randint(3, (40,))
    problem = Problem(model, torch.nn.functional.cross_entropy, (x, y))
    stack = Stack(problem)
    weights = problem.theta + 0.3 * torch.randn(4, problem.layout.size)
    indices = torch.randint(40, (4, 7))
    rule = algorithms.make("dpsgd", {"order": order}, learners=4, seed=seed)
    rule.begin(weights, 1)
    own = torch.empty_like(weights)
    stack.gradients(rule.gradient_points(weights), x[indices], y[indices], out=own)
    mean = weights.mean(0)
    part = Decomposer(stack, problem, Comm(4)).begin(weights, x[indices], y[indices], own, 1)
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
    stack, at = Stack(problem), problem.theta + 0.05 * torch.randn(4, problem.layout.size).double()
    drawn = torch.randint(problem.samples, (4, 200))
    x, y = problem.gather(drawn)
    own = torch.empty_like(at)
    stack.gradients(at, x, y, out=own)

    def columns(samples: int, step: int) -> dict[str, float]:
        found = Decomposer(stack, stack.problem, Comm(len(at)), samples).begin(at, x, y, own, step)
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
