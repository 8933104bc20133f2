"""Topologies and matrices from files: doubly stochastic, their spectra in closed form, and limits where they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from matplotlib.quiver import Quiver

import landscape
from landscape import InputError
from landscape.core import registry
from landscape.core.hdf5 import Array
from landscape.plots.tables import draw_topologies
from landscape.testing import check_topology
from landscape.training.topology import Mixing

ALL = (
    "full", "ring(1)", "ring(3)", "torus", "torus(2x4)", "hypercube", "random-matching", "star", "exponential",
    "one-peer-exponential", "base", "base(3)", "hyper-hypercube(2)", "k-peer-exponential(2)", "d-equistatic(3)",
    "u-equistatic(2, 1)",
)  # fmt: skip


def fits(spec: str, n: int) -> bool:
    """Whether ``spec`` exists for ``n`` learners, said another way than by the code."""
    rules = {
        "ring(1)": n >= 3,
        "ring(3)": n >= 7,
        "torus": any(n % d == 0 for d in range(2, n)),
        "torus(2x4)": n == 8,
        "hypercube": bin(n).count("1") == 1,
        "hyper-hypercube(2)": 6**9 % n == 0,  # no prime factor but 2 and 3
        "d-equistatic(3)": n > 1,
        "u-equistatic(2, 1)": n > 1,
    }
    return rules.get(spec, True)


@settings(max_examples=30)
@given(st.integers(1, 24), st.sampled_from(ALL))
def test_every_topology_passes_the_checks_or_is_refused(n: int, spec: str) -> None:
    """Doubly stochastic, the same on every process, with the gap and ω_min of the dense matrices."""
    if fits(spec, n):
        check_topology(spec, n)
        assert "\n" not in Mixing(spec, n, 0).describe()
        return
    with pytest.raises(InputError, match=f"not allowed with {n} learners") as caught:
        Mixing(spec, n, 0)
    assert "\n" not in str(caught.value)


def ring(n: int, k: int = 1) -> list[float]:
    return [
        (1 + sum(2 * np.cos(2 * np.pi * i * j / n) for i in range(1, k + 1))) / (2 * k + 1)
        for j in range(1, n)
    ]


def torus(r: int, c: int) -> list[float]:
    def around(size: int, j: int) -> float:  # with two on a circle both neighbors are the same learner
        return (1 if size == 2 else 2) * np.cos(2 * np.pi * j / size)

    neighbors = 1 + (1 if r == 2 else 2) + (1 if c == 2 else 2)
    pairs = itertools.product(range(r), range(c))
    return [(1 + around(r, i) + around(c, j)) / neighbors for i, j in pairs if i or j]


CLOSED = {
    **{(f"ring({k})", n): ring(n, k) for n in (5, 6, 12) for k in (1, 2)},
    ("torus", 16): torus(4, 4),
    ("torus", 15): torus(3, 5),
    ("torus", 6): torus(2, 3),
    ("torus(2x8)", 16): torus(2, 8),
    **{("hypercube", 2**d): [1 - 2 * k / (d + 1) for k in range(1, d + 1)] for d in (1, 3, 5)},
    ("star", 7): [1 - 1 / 7, 0.0],  # 1/n on the hub and n − 1 leaves: the leaves disagree by 1 − 1/n
    ("full", 9): [0.0],
}


@pytest.mark.parametrize(("spec", "n"), CLOSED)
def test_spectra_in_closed_form(spec: str, n: int) -> None:
    mixing, eigenvalues = Mixing(spec, n, 0), CLOSED[spec, n]
    assert mixing.gap == pytest.approx(1 - np.abs(eigenvalues).max(), abs=1e-10)
    assert mixing.omega_min == pytest.approx(min(eigenvalues), abs=1e-10)
    assert mixing.stability_limit == pytest.approx(1 + min(eigenvalues), abs=1e-10)
    assert f"ω_min {mixing.omega_min:.4g}" in mixing.describe()


@pytest.mark.parametrize(
    ("a", "inner", "n"), [(0.75, "ring(1)", 6), (1 / 3, "full", 6), (0.3, "exponential", 7), (1.0, "star", 5)]
)
def test_lazy_mixing_moves_every_eigenvalue_toward_one(a: float, inner: str, n: int) -> None:
    lazy, plain = Mixing(f"lazy({a!r}, {inner})", n, 0), Mixing(inner, n, 0)
    np.testing.assert_allclose(lazy.matrix(1), (1 - a) * np.eye(n) + a * plain.matrix(1), atol=1e-15)
    key = lambda v: np.sort_complex(np.round(v, 9))  # noqa: E731
    np.testing.assert_allclose(key(lazy.modes[0]), key(1 - a * (1 - plain.modes[0])), atol=1e-8)
    assert growth(lazy, 0.98 * lazy.stability_limit) < 0
    assert growth(lazy, 1.02 * lazy.stability_limit) > 0


@pytest.mark.parametrize("n", [2, 4, 6, 10, 16, 30])
def test_the_static_exponential_graphs_gap(n: int) -> None:
    """2/(1 + ⌈log₂ n⌉) for even n (Ying et al. 2021, Proposition 1)."""
    assert Mixing("exponential", n, 0).gap == pytest.approx(2 / (1 + np.ceil(np.log2(n))), abs=1e-10)


@given(st.integers(1, 70), st.integers(1, 100))
def test_one_peer_exponential_averages_exactly_for_powers_of_two_only(n: int, start: int) -> None:
    mixing = Mixing("one-peer-exponential", n, 0)
    product = np.eye(n)
    for step in range(start, start + len(mixing.cycle)):
        m = mixing.matrix(step)
        assert n == 1 or set((m > 0).sum(1)) == {2}  # half from oneself, half from one other
        product = m @ product
    exact = bool(np.abs(product - 1 / n).max() < 1e-12)
    assert exact == (bin(n).count("1") == 1)
    assert (mixing.gap == 1) == exact


def averages_after(spec: str, n: int, degree: int) -> int | None:
    """The steps after which the product of the matrices is 11ᵀ/n; no learner has more than ``degree`` others."""
    mixing, product = Mixing(spec, n, 0), np.eye(n)
    for m in mixing.cycle:
        assert (m > 0).sum(1).max() <= degree + 1
        product = m @ product
    exact = bool(np.abs(product - 1 / n).max() < 1e-12)
    assert mixing.rounds == (len(mixing.cycle) if exact else None)
    assert (mixing.gap == 1) == exact
    return mixing.rounds


@pytest.mark.parametrize("k", [1, 2, 3])
def test_finite_time_graphs_average_exactly(k: int) -> None:
    """Base-(k+1) for every n, in the number of steps of its theorem (Takezawa et al. 2023, Theorem 1)."""
    for n in range(2, 65):
        rounds = averages_after(f"base({k})", n, k)
        assert rounds is not None
        assert rounds <= 2 * np.log(n) / np.log(k + 1) + 2
        smooth = all(n % p or p <= k + 1 for p in range(2, n + 1) if all(p % q for q in range(2, p)))
        assert not smooth or averages_after(f"hyper-hypercube({k})", n, k) == rounds
        power = n in {a * (k + 1) ** i for a in range(1, k + 2) for i in range(7)}
        assert (averages_after(f"k-peer-exponential({k})", n, k) is not None) == power


def test_topologies_side_by_side() -> None:
    found = landscape.topologies(learners=6, parameters=10)
    assert {"full", "base", "hyper-hypercube(2)"} <= found.keys()
    assert "hypercube" not in found  # six is no power of two
    ring = {"gap": 1 / 3, "omega_min": -1 / 3, "limit": 2 / 3, "rounds": None, "bytes": 2 * 40.0}
    assert found["ring(1)"] == pytest.approx(ring, abs=1e-10)
    assert found["base"]["bytes"] == pytest.approx(40 * (4 + 4 + 4 + 6) / 6 / 4)
    with pytest.raises(InputError, match="mixings: 'hypercube' is not allowed with 6 learners"):
        landscape.topologies(["hypercube"], learners=6)


def test_topologies_as_graphs(tmp_path: Path) -> None:
    """Lines where two take equal shares, arrows where one takes, a panel for each step, eight at most."""
    cycles = {spec: Mixing(spec, 6, 0).cycle for spec in ("ring(1)", "exponential", "base")}
    figure = draw_topologies(cycles | {"long": cycles["base"] * 3})
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == [
        "ring(1)", "exponential", *(f"base\nstep {t} of 4" for t in range(1, 5)), *(f"long\nstep {t} of 12" for t in range(1, 9)),
    ]  # fmt: skip
    found = [
        {kind: next(c for c in ax.collections if type(c) is kind) for kind in (LineCollection, Quiver)}
        for ax in figure.axes if ax.get_visible() and ax.get_title()
    ]  # fmt: skip
    lines, arrows = ([len(one[kind].get_array()) for one in found] for kind in (LineCollection, Quiver))
    assert (lines[:3], arrows[:3]) == ([6, 6, 2], [0, 6, 0])  # 2 and −2 = 4 after a learner are mutual
    taken = found[0][LineCollection].get_segments()
    angle = np.pi / 2 - 2 * np.pi * np.arange(6) / 6
    np.testing.assert_allclose(taken[0], np.column_stack([np.cos(angle), np.sin(angle)])[[0, 1]])
    np.testing.assert_allclose(found[0][LineCollection].get_array(), 1 / 3)
    landscape.topologies(["random-matching"], learners=3, picture=tmp_path / "t.svg")
    assert "step 3 of 3" in (tmp_path / "t.svg").read_text()
    with pytest.raises(InputError, match="picture: .*t.gif"):
        landscape.topologies(["full"], picture=tmp_path / "t.gif")
    with pytest.raises(InputError, match="mixings: there must be at least one"):
        landscape.topologies([], picture=tmp_path / "t.png")


def test_base_of_six_learners_is_that_of_the_paper() -> None:
    """The pairs that the authors' own program gives (github.com/yukiTakezawa/BaseGraph)."""
    pairs = [[(i, i + 3) for i in range(3)]]
    expected = [[(0, 1), (3, 4)], [(1, 2), (4, 5)], [(0, 1), (3, 4)], *pairs]
    found = [
        [(i, int(j)) for i in range(6) for j in np.flatnonzero(m[i]) if j > i]
        for m in Mixing("base", 6, 0).cycle
    ]
    assert found == expected


def test_equitopo_is_the_mean_of_shifts() -> None:
    """D-EquiStatic (Song et al. 2022): entries (1 − 1/n)c/m off the diagonal, c the draws of that shift."""
    n, m = 9, 5
    (matrix,) = Mixing(f"d-equistatic({m}, 4)", n, 0).cycle
    counts = np.bincount(np.random.default_rng(4).integers(1, n, m), minlength=n)
    np.testing.assert_allclose(matrix[2], np.roll(counts * (1 - 1 / n) / m, 2) + np.eye(n)[2] / n, atol=1e-15)
    (both,) = Mixing(f"u-equistatic({m}, 4)", n, 0).cycle
    np.testing.assert_allclose(both, (matrix + matrix.T) / 2, atol=1e-15)
    assert Mixing("d-equistatic(40)", 256, 0).gap > 0.5  # and a ring's of 256 learners is 2e-4


LIMITS = [
    ("full", 5), ("ring(2)", 6), ("star", 6), ("exponential", 8), ("exponential", 7), ("one-peer-exponential", 8),
    ("one-peer-exponential", 6), ("base", 6), ("base(2)", 10), ("hyper-hypercube(2)", 6), ("d-equistatic(3)", 7),
    ("u-equistatic(3)", 8),
]  # fmt: skip


def growth(mixing: Mixing, sharpness: float, order: str = "awc") -> float:
    """By how much the spread of learners on ½ h w² grows over the last 600 of 1,200 noiseless steps."""
    w = np.random.default_rng(0).standard_normal(mixing.learners)
    w, size = w - w.mean(), []
    for t in range(1, 1201):
        m = mixing.matrix(t)
        w = m @ w - sharpness * w if order == "awc" else m @ (w - sharpness * w)
        w -= w.mean()
        size.append(float(np.linalg.norm(w)))
        w /= size[-1] or 1.0
    return float(np.sum(np.log(np.maximum(size[600:], 1e-300))))


@pytest.mark.parametrize(("spec", "n"), LIMITS)
def test_learners_drift_apart_above_the_limit_and_not_below(spec: str, n: int) -> None:
    mixing = Mixing(spec, n, 0)
    assert growth(mixing, 0.98 * mixing.stability_limit) < 0
    assert growth(mixing, 1.02 * mixing.stability_limit) > 0
    assert growth(mixing, 1.96, "atc") < 0


@pytest.mark.parametrize("n", [3, 4, 9, 16])
def test_random_matching_is_stable_in_mean_square_up_to_its_limit(n: int) -> None:
    mixing = Mixing("random-matching", n, 1)
    drawn = [mixing.matrix(t) for t in range(1, 3001)]
    for factor, grows in ((0.97, False), (1.03, True)):
        h = factor * mixing.stability_limit
        second = np.mean([(m - h * np.eye(n)).T @ (m - h * np.eye(n)) for m in drawn], axis=0)
        left = np.trace((np.eye(n) - 1 / n) @ second) / (n - 1)  # of the mean square disagreement, a step
        assert bool(left > 1) == grows
    assert np.all([np.linalg.norm(m - 0.99 * np.eye(n), 2) < 1 for m in drawn[:50]])  # 1 + ω_min, every draw


@pytest.mark.parametrize(("matrices", "words"), [
    (lambda n: [np.eye(n)[:1]], r"need \(4, 4\)"),
    (lambda n: np.eye(n).tolist(), r"need \(4, 4\)"),
    (lambda n: [], "at least one matrix"),
    (lambda n: [np.full((n, n), np.nan)], "finite"),
    (lambda n: [np.tri(n)], "doubly stochastic"),
])  # fmt: skip
def test_an_own_topology(matrices: Callable[[int], Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.topologies, "_entries", dict(registry.topologies._entries))

    @registry.topologies.add("two-steps")
    def two_steps(n: int, k: int = 1) -> list[Array]:
        """two-steps, two-steps(k): two steps along a ring."""
        return [m @ m for m in Mixing(f"ring({k})", n, 0).cycle]

    registry.topologies.add("wrong")(matrices)
    found = np.sort(Mixing("two-steps(2)", 6, 0).modes.real)
    np.testing.assert_allclose(found, np.sort(Mixing("ring(2)", 6, 0).modes.real ** 2), atol=1e-12)
    with pytest.raises(InputError, match=f"'wrong' is not allowed with 4 learners, .*{words}"):
        Mixing("wrong", 4, 0)
    with pytest.raises(InputError, match=r"two-steps, two-steps\(k\), wrong"):
        Mixing("two-step", 4, 0)
    registry.topologies.add("bare")(lambda n, form: matrices(n) if form != "2" else [np.eye(n)])
    assert Mixing("bare(2)", 4, 0).gap == 0  # a text, without an annotation


@pytest.mark.parametrize("n", [4, 5])
def test_matchings_pair_everyone_once_and_average_to_the_expected_matrix(n: int) -> None:
    mixing = Mixing("random-matching", n, 3)
    drawn = [mixing.matrix(t) for t in range(1, 4001)]
    for m in drawn[:50]:
        assert np.array_equal(m, m.T)
        assert sorted((m == 0.5).sum(1)) == ([2] * 4 if n == 4 else [0, 2, 2, 2, 2])
        assert min(np.linalg.eigvalsh(m)) == pytest.approx(mixing.omega_min, abs=1e-12)
    eigenvalues = np.linalg.eigvalsh(np.mean(drawn, axis=0))
    np.testing.assert_allclose(eigenvalues, [*mixing.modes[0].real, 1], atol=0.03)


def test_a_matrix_from_a_file(tmp_path: Path) -> None:
    m = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]])
    np.savetxt(tmp_path / "m.csv", m, delimiter=",")
    np.savetxt(tmp_path / "m.txt", m)
    np.save(tmp_path / "m.npy", m)
    for name in ("m.csv", "m.txt", "m.npy"):
        np.testing.assert_allclose(Mixing(str(tmp_path / name), 3, 0).matrix(1), m)
    (tmp_path / "third.csv").write_text("0.3333,0.3333,0.3333\n" * 3)
    np.testing.assert_allclose(Mixing(str(tmp_path / "third.csv"), 3, 0).matrix(1), 1 / 3, rtol=1e-12)
