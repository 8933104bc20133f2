"""Stability limits against roots, closed forms, exact second moments and the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from landscape.limits import (
    FORMS,
    Hyperparameters,
    limits,
    lr_that_keeps_minima,
    max_d2_step,
    max_matching_momentum_step,
    max_matching_step,
    max_mixing_step,
    max_noloco_step,
    max_period_step,
    max_random_worker_step,
    max_stable_step,
    max_tracking_step,
    polynomials,
)
from landscape.training.experiments import stability
from tests import problems
from tests.conftest import Command

# DESIGN, formulas: τ = 1, 3, 7, 31 without momentum, with m = 0.9, and shifted.
TABLE = [[1.0000, 0.4450, 0.2091, 0.0499], [0.1000, 0.0348, 0.0158, 0.0042], [0.1900, 0.0648, 0.0279, 0.0063]]


def edge(limit: float, *operators: Callable[[float], Any], width: float = 1e-3) -> None:
    """Just above ``limit`` one of the matrices has an eigenvalue outside the unit circle, just below none has."""
    for factor in (1 - width, 1 + width):
        worst = max(np.abs(np.linalg.eigvals(make(factor * limit))).max() for make in operators)
        assert (worst > 1) == (factor > 1)


def companion(p: Any) -> np.ndarray:
    """The matrix whose eigenvalues are the roots of ``p``."""
    rows = np.eye(len(p) - 1, k=-1, dtype=np.asarray(p).dtype)
    rows[0] = -np.asarray(p[1:]) / p[0]
    return rows


def moments(steps: Sequence[np.ndarray]) -> np.ndarray:
    """The operator on second moments where one of ``steps`` is drawn at random."""
    return np.mean([np.kron(step, step) for step in steps], axis=0)


def averages() -> list[np.ndarray]:
    """The averages of two pairs of four learners."""
    found = []
    for a, b, c, e in ([0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2]):
        m = np.zeros((4, 4))
        m[np.ix_([a, b], [a, b])] = m[np.ix_([c, e], [c, e])] = 0.5
        found.append(m)
    return found


RHO = float(np.linalg.eigvalsh(np.mean(averages(), 0))[0])


@given(st.integers(0, 12), st.floats(0, 0.97), st.sampled_from(FORMS))
def test_all_roots_are_inside_below_the_limit_and_one_is_outside_above(
    delay: int, m: float, form: str
) -> None:
    limit = max_stable_step(delay, m, form)
    p0, p1 = polynomials(delay, m, form)
    edge(limit, lambda h: companion(p0 + h * p1), width=1e-6)
    if m == 0:
        assert limit == pytest.approx(2 * math.sin(math.pi / (2 * (2 * delay + 1))), rel=1e-10)
    assert np.abs(np.roots(p0 + 0.5 * limit * p1)).max() < 1


@given(st.floats(-0.95, 0.95), st.floats(0, 0.95))
def test_mixing_with_momentum(omega: float, m: float) -> None:
    """Schur's conditions on z² − (ω + m − h) z + mω, and in ATC order on z² − (ω(1 − h) + m) z + mω."""
    assert max_mixing_step([omega], m) == pytest.approx(min(2 * (1 + m), (1 + omega) * (1 + m)), rel=1e-9)
    if abs(omega) > 1e-3:
        atc = (1 + omega) * (1 + m) / omega if omega > 0 else (1 - m) * (1 - 1 / omega)
        expected = min(2 * (1 + m), atc)
        assert max_mixing_step([omega], m, order="atc") == pytest.approx(expected, rel=1e-7)


@given(
    st.floats(-0.95, 0.95), st.floats(0, 0.95), st.sampled_from(FORMS[:2]), st.sampled_from(["awc", "atc"])
)
def test_mixed_momentum_against_the_two_by_two_map(omega: float, m: float, form: str, order: str) -> None:
    """A mode's (x, v): v' = m v + h x, x' = ω x − u or ω(x − u), v ← ω v'."""
    limit = max_mixing_step([omega], m, form, order, mixed=True)

    def step(h: float, mode: float) -> np.ndarray:
        v = np.array([h, m])
        u = v if form == "ordinary" else np.array([h, 0]) + m * v
        return np.array([mode * np.array([1.0, 0]) - (u if order == "awc" else mode * u), mode * v])

    edge(limit, lambda h: step(h, 1.0), lambda h: step(h, omega), width=0.01)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize(("form", "m"), [("ordinary", 0.9), ("ordinary", 0.3), ("nesterov", 0.9)])
def test_random_pairs_with_momentum_against_all_second_moments(
    form: str, m: float, order: str, mixed: bool
) -> None:
    eye, zero, apart = np.eye(4), np.zeros((4, 4)), np.eye(4) - 1 / 4  # apart: the disagreement

    def step(h: float, mix: np.ndarray) -> np.ndarray:
        v, x = np.hstack([h * eye, m * eye]), np.hstack([eye, zero])
        u = v if form == "ordinary" else np.hstack([h * eye, zero]) + m * v
        x = mix @ x - u if order == "awc" else mix @ (x - u)
        return np.vstack([apart @ x, apart @ (mix @ v if mixed else v)])

    def mean(h: float) -> np.ndarray:  # the mean has a limit of its own
        return np.eye(1) * h / max_stable_step(0, m, form)

    limit = max_matching_momentum_step(RHO, m, form, order, mixed)
    edge(limit, mean, lambda h: moments([step(h, mix) for mix in averages()]))


@given(st.complex_numbers(max_magnitude=0.9), st.integers(0, 5), st.floats(0, 0.9))
def test_complex_modes_with_delay(omega: complex, delay: int, m: float) -> None:
    (p0, p1), (q0, q1) = (polynomials(delay, m, "ordinary", mode) for mode in (1.0, omega))
    limit = max_mixing_step([omega], m, delay=delay)
    edge(limit, lambda h: companion(p0 + h * p1), lambda h: companion(q0 + h * q1), width=0.01)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("delay", "momentum"), [(0, 0.0), (0, 0.6), (2, 0.0), (3, 0.5)])
def test_noisy_curvature_against_the_second_moments_operator(delay: int, momentum: float, form: str) -> None:
    noise = 0.7
    limit = max_stable_step(delay, momentum, form, noise)
    if (delay, momentum) == (0, 0.0):
        assert limit == pytest.approx(2 / (1 + noise))  # Wu et al.: (1−h)² + noise·h² = 1
    assert max_stable_step(delay, momentum, form, 4 * noise, batch=4) == pytest.approx(limit)
    p0, p1 = (p.real for p in polynomials(delay, momentum, form))
    d = np.zeros((len(p0) - 1,) * 2)
    d[0] = -p1[1:]
    edge(limit, lambda h: moments([companion(p0 + h * p1)]) + noise * h**2 * np.kron(d, d))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_random_worker_against_all_second_moments(workers: int) -> None:
    def step(h: float, k: int) -> np.ndarray:
        m = np.eye(workers + 1)
        m[0, k] -= h
        m[k] = m[0]
        return m

    edge(max_random_worker_step(workers), lambda h: moments([step(h, k) for k in range(1, workers + 1)]))


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_random_pairs_against_all_second_moments(delay: int) -> None:
    def step(h: float, mix: np.ndarray) -> np.ndarray:
        step = np.eye(4 * (delay + 1), k=-4)
        step[:4, :4] += mix
        step[:4, -4:] -= h * np.eye(4)
        return step

    edge(max_matching_step(RHO, delay), lambda h: moments([step(h, mix) for mix in averages()]))


def test_steps_between_averages_in_closed_form() -> None:
    assert max_period_step(1) == pytest.approx(2)
    assert max_period_step(16) == pytest.approx(2)
    assert max_period_step(1, 0.5) == pytest.approx(3)
    assert max_period_step(1, 0.5, buffers="reset") == pytest.approx(2)
    # SlowMo after one step is heavy ball; after H odd, 1 + (2(1+β)/a − 1)^(1/H), after H even SGD's 2.
    slow = {"outer": "slowmo", "outer_lr": 0.5, "outer_momentum": 0.5}
    assert max_period_step(1, **slow) == pytest.approx(2 * 1.5 / 0.5)  # type: ignore[arg-type]
    assert max_period_step(3, **slow) == pytest.approx(1 + 5 ** (1 / 3))  # type: ignore[arg-type]
    assert max_period_step(4, **slow) == pytest.approx(2)  # type: ignore[arg-type]


@pytest.mark.parametrize("period", [1, 3, 4, 15])
@pytest.mark.parametrize(("outer_lr", "outer_momentum"), [(0.7, 0.9), (0.2, 0.5), (1.0, 0.0), (1.6, 0.9)])
def test_diloco_in_closed_form(period: int, outer_lr: float, outer_momentum: float) -> None:
    """Nesterov's limit on g = ν(1 − (1 − h)^H): 0 < g < 2(1 + μ)/(1 + 2μ)."""
    r = 2 * (1 + outer_momentum) / (1 + 2 * outer_momentum) / outer_lr
    if r < 1:
        expected = 1 - (1 - r) ** (1 / period)
    elif period % 2:
        expected = 1 + (r - 1) ** (1 / period)
    else:
        expected = 2.0
    found = max_period_step(period, outer="nesterov", outer_lr=outer_lr, outer_momentum=outer_momentum)
    assert found == pytest.approx(expected, rel=1e-6)


def test_rates_that_keep_the_accessible_minima() -> None:
    far, near = Hyperparameters(delay=63), Hyperparameters(delay=31)
    assert lr_that_keeps_minima(0.1, near, far) == pytest.approx(0.1 * 63 / 127, rel=1e-3)  # ∝ 1/(2τ + 1)
    assert lr_that_keeps_minima(0.1, Hyperparameters(), Hyperparameters(momentum=0.9)) == pytest.approx(0.19)
    many = Hyperparameters(batch=400)
    assert lr_that_keeps_minima(0.1, Hyperparameters(batch=100), many) == pytest.approx(0.1)
    assert lr_that_keeps_minima(0.1, Hyperparameters(batch=100), many, noise=1e6) == pytest.approx(
        0.4, rel=1e-3
    )


def test_a_minimum_against_the_limits() -> None:
    found = stability(problems.quadratic([0.5, 4.0]), [0, 3], 0.9, lr=0.3, own_limit=2.0)
    assert found.lambda_max == pytest.approx(4.0)
    np.testing.assert_allclose(found.rates, limits([0, 3], 0.9) / 4.0)
    assert len(found.plot().axes) == 1
    diagonal = torch.tensor([1.0, 16.0], dtype=torch.float64)
    h = problems.quadratic([0.5, 4.0]).model.get_buffer("hessian") / torch.outer(diagonal, diagonal).sqrt()
    seen = stability(problems.quadratic([0.5, 4.0]), [0], lr=0.3, precondition=diagonal)
    assert seen.lambda_max == pytest.approx(float(torch.linalg.eigvalsh(h)[-1]), rel=1e-6)
    assert (seen.precondition, math.isnan(seen.lr)) == ("given", True)
    maximum = stability(problems.quadratic([-1.0, -2.0]), [0], 0.9)
    assert np.isinf(maximum.rates).all()
    assert maximum.plot()


def test_the_command(command: Command, tiny: Path, tmp_path: Path) -> None:
    code, out, _ = command("stability")
    assert code == 0
    for row in TABLE:
        assert all(f"{value:.4f}" in out for value in row)
    assert "0.003091" in command("stability", "--lr", 0.124, "--delay", 31)[1]  # 0.124 × 0.0499/2
    assert command("train", tiny, "-o", tmp_path / "run", "-q")[0] == 0
    checkpoint, picture = tmp_path / "run" / "last.h5", tmp_path / "edge.png"
    code, out, err = command("stability", checkpoint, "--delay", "0,2,8", "--plot", picture)
    assert (code, out.split()[-2:]) == (0, [f"{tmp_path}/run/last-stability.h5", str(picture)]), err
    assert re.search(r"lr·λ_max +[\d.]+   lr 0.2, ", out)
    assert "limit 0.6667\n" in out  # ring(1) of 4: 1 + ω_min = 1 − 1/3
    assert picture.stat().st_size > 10_000
    for arguments, match in (
        (("--plot", picture), "--plot, -o, --precondition: not allowed without a CKPT"),
        ((checkpoint, "--lr", 1), "--lr, --noise: not allowed with a CKPT"),
    ):
        code, _, err = command("stability", *arguments)
        assert code == 2
        assert match in err


@pytest.mark.parametrize("period", [1, 3])
def test_noloco_is_stable_in_mean_square_up_to_its_limit(period: int) -> None:
    """The second moments of (φ, δ) of four learners, averaged over the three ways to pair them."""
    lr, momentum, apart = 0.7, 0.5, np.eye(4) - 1 / 4

    def step(h: float, mix: np.ndarray) -> np.ndarray:
        outer = lr * ((1 - h) ** period * mix - apart) @ apart
        one = np.block([[apart + outer, momentum * apart], [outer, momentum * apart]])
        return np.kron(np.eye(2), apart) @ one

    limit = max_noloco_step(period, lr, momentum, [RHO], drawn=True)
    edge(limit, lambda h: moments([step(h, mix) for mix in averages()]), width=0.02)


@pytest.mark.parametrize("omega", [-0.6, -0.3, 0.3, 0.8])
@pytest.mark.parametrize("m", [0.0, 0.5])
@pytest.mark.parametrize("rule", ["awc", "atc", "d2"])
def test_rules_for_data_that_differ_against_their_linear_maps(omega: float, m: float, rule: str) -> None:
    """One mode with momentum v: of (w, v, y, u) for gradient tracking, of (w, v, last w, last u) for D²."""
    if rule == "d2" and omega < -1 / 3:
        assert max_d2_step([omega], m) == 0
        with pytest.raises(ValueError, match="omegas: .* of absolute value ≤ 1"):
            max_d2_step([omega, np.nan], m)
        return
    limit = max_d2_step([omega], m) if rule == "d2" else max_tracking_step([omega], m, order=rule)

    def radius(h: float) -> float:
        w, v, third, u = np.eye(4)
        new = m * v + w  # the momentum, which is u of this step
        if rule == "d2":
            rows = omega * (2 * w - third - h * (new - u)), new, w, new
        else:
            y = omega * third + new - u if rule == "awc" else omega * (third + new - u)
            rows = (omega * w - h * y if rule == "awc" else omega * (w - h * y)), new, y, new
        return float(np.abs(np.linalg.eigvals(np.array(rows))).max())

    assert radius(0.99 * limit) < 1
    assert radius(1.01 * limit) > 1 or limit == max_stable_step(0, m)
