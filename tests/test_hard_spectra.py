"""No eigenvalue is missed in silence: spectra that are hard for Krylov spaces, against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from landscape.curvature.lanczos import NEAR_ZERO, Eigenpairs, ends_of, lanczos
from tests.conftest import slow_but

SIZE = 240  # more than the basis: it is not gone through whole
BULK = np.linspace(-0.05, 0.1, SIZE)


def topped(*top: float) -> np.ndarray:
    """The bulk with these in place of its largest."""
    return np.concatenate((BULK[: SIZE - len(top)], np.array(top)))


def normal(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SIZE)


SPECTRA: dict[str, np.ndarray] = {
    **{f"pair {gap:g}": topped(5, 4, 3, 2, 2 - gap, 1) for gap in (1e-1, 1e-2, 1e-3, 1e-5, 1e-8)},
    **{f"first pair {gap:g}": topped(5, 5 - gap, 3, 2, 1.5, 1) for gap in (1e-1, 1e-2, 1e-3, 1e-5)},
    **{f"three pairs {gap:g}": topped(3, 3 - gap, 2, 2 - gap, 1, 1 - gap) for gap in (1e-2, 1e-4, 1e-6)},
    **{f"{n} copies of the largest": topped(*[1.0] * n, 0.5, 0.4, 0.3, 0.2) for n in range(2, 8)},
    **{f"{n} copies of the fifth": topped(5, 4, 3, 2, *[1.0] * n) for n in range(2, 5)},
    "copies twice": topped(2, 2, 1, 1, 0.5, 0.5),
    **{f"{n} in [{low}, 1]": topped(*np.linspace(low, 1, n)) for low in (0.8, 0.95, 0.99) for n in (8, 50)},
    "copies of zero": np.concatenate((np.zeros(SIZE - 3), [1, 2, 3])),
    "copies of zero, saddle": np.concatenate((np.zeros(SIZE - 6), [-3, -2, -1, 1, 2, 3])),
    "uniform": np.linspace(0, 1, SIZE),
    "positive definite": np.linspace(0.1, 1, SIZE),
    "negative definite": -np.linspace(0.1, 1, SIZE),
    "+1 and -0.98": np.concatenate((np.linspace(-0.98, -0.5, 40), np.zeros(SIZE - 80), np.linspace(0.5, 1, 40))),
    "+1 and -0.98 alone": np.concatenate(([-0.98], np.linspace(-0.1, 0.1, SIZE - 2), [1.0])),
    "semicircle": np.cos(np.pi * (np.arange(SIZE) + 0.5) / SIZE),
    **{f"power {power:g}": np.arange(1, SIZE + 1) ** -power for power in (0.5, 1.0, 2.0)},
    **{f"normal {seed}": normal(seed) for seed in range(4)},
    **{f"squares {seed}": normal(seed) ** 2 for seed in range(2)},
    "large negative": np.concatenate((topped(5, 4, 3, 2, 1)[1:], [-1000])),
    "tiny steps": topped(*(1 - 1e-4 * np.arange(12))),
}  # fmt: skip
STARTS = ("random", "without the first")


def made(values: np.ndarray, missing: str) -> tuple[Tensor, Tensor]:
    """A dense matrix with these eigenvalues, and where to start."""
    generator = torch.Generator().manual_seed(7)
    q = torch.linalg.qr(torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)).Q
    start = torch.randn(SIZE, dtype=torch.float64, generator=generator)
    if missing != "random":
        column = q[:, np.argmax(values)]
        start = start - (1 - 1e-9) * (start @ column) * column
    return (q * torch.from_numpy(np.asarray(values, float))) @ q.T, start


def top_five(name: str, missing: str) -> tuple[Eigenpairs, np.ndarray]:
    """What is found, and the dense spectrum, descending."""
    matrix, start = made(SPECTRA[name], missing)
    dense = torch.linalg.eigvalsh(matrix).flip(0).numpy()
    return lanczos(lambda v: matrix @ v, start, high=5), dense


@pytest.mark.parametrize("missing", STARTS)
@pytest.mark.parametrize("name", slow_but([*SPECTRA][::2], SPECTRA))
def test_none_of_the_top_five_is_missed(name: str, missing: str) -> None:
    pairs, dense = top_five(name, missing)
    assert pairs.converged
    slack = np.maximum(1e-2 * np.abs(dense[:5]), NEAR_ZERO * np.abs(dense).max())
    assert bool((pairs.values.numpy() >= dense[:5] - slack).all())
    tiny = 1e-12 * np.abs(dense).max()
    assert pairs.bounds[1] >= dense[5] - tiny
    assert pairs.checks < pairs.hvps / 2
    if pairs.verified:
        assert pairs.bounds[1] <= dense[4] + slack[4] + tiny


@pytest.mark.parametrize("name", ["4 copies of the largest", "positive definite", "normal 3"])
def test_a_search_in_single_precision_goes_on_with_what_it_missed(name: str) -> None:
    matrix, start = (t.float() for t in made(SPECTRA[name], "random"))
    pairs = lanczos(lambda v: matrix @ v, start, high=5)
    np.testing.assert_allclose(pairs.values, np.sort(SPECTRA[name])[::-1][:5], rtol=1e-2)


def test_what_is_verified_says_so() -> None:
    apart = ["pair 0.001", "first pair 0.001", "2 copies of the fifth", "copies of zero", "power 1"]
    assert [name for name in apart if top_five(name, "random")[0].verified] == apart
    crowded, dense = top_five("50 in [0.95, 1]", "random")
    assert not crowded.verified  # the sixth is nearer than a few products can tell
    assert crowded.bounds[1] > dense[0]


def test_a_search_cut_short_is_not_verified() -> None:
    matrix, start = made(SPECTRA["pair 0.001"], "random")
    whole = lanczos(lambda v: matrix @ v, start, high=5)
    cut = lanczos(lambda v: matrix @ v, start, high=5, max_products=whole.hvps - 5 - whole.checks)
    assert not cut.verified
    assert cut.checks == 0


@pytest.mark.parametrize("name", slow_but([*SPECTRA][1::2], SPECTRA))
def test_one_start_bounds_both_ends(name: str) -> None:
    matrix, start = made(SPECTRA[name], "random")
    dense = torch.linalg.eigvalsh(matrix)
    found = ends_of(lanczos(lambda v: matrix @ v, start, low=1))
    low, high = found.bounds
    tiny = 1e-12 * float(dense.abs().max())
    assert low <= float(dense[0]) + tiny
    assert high >= float(dense[-1]) - tiny
    assert low > 2 * dense[0] - dense[-1]  # bounds that say something
    assert high < 2 * dense[-1] - dense[0]


def test_bounds_fail_as_rarely_as_they_say() -> None:
    """A few steps from random starts on a spectrum whose largest eigenvalue lies far out, and is seen late."""
    diagonal = torch.cat((torch.linspace(0, 1, 399), torch.tensor([1.05]))).double()
    missed = 0
    for seed in range(300):
        start = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found = lanczos(lambda v: v * diagonal, start, tol=0.2, max_products=6)
        missed += found.bounds[1] < 1.05
    assert missed <= 9  # 3 are expected at most; half of b may be random only, hence fewer
