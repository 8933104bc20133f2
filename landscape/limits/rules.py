"""Stability of distributed rules on one quadratic: mixing, random delays, and steps between averages.

As in :mod:`landscape.limits`, h = ηλ; each function returns the largest stable h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.limits import FORMS, check, first_crossing, max_stable_step, polynomials


def max_mixing_step(
    omegas: Any,
    momentum: float = 0.0,
    form: str = "ordinary",
    order: str = "awc",
    delay: int = 0,
    mixed: bool = False,
) -> float:
    """The largest stable ηλ of learners that mix by a fixed matrix with other eigenvalues ``omegas`` than 1.

    Each takes its own steps, with its own momentum, on one quadratic. A mode evolves by z^τ (z − ω)(z − m) +
    h p₁, p₁ that of ``form`` "ordinary" or "nesterov" in AWC order, and ω times that in ATC order; the mean
    is the mode ω = 1. Without delay, for real ω in AWC order, the limit is (1 + ω_min)(1 + m), without
    momentum 1 + ω_min; in ATC order without momentum |ω(1 − h)| < 1. Where the momentum is mixed with the
    weights, v ← M v after each step, mω stands for m in p₀ (and in Nesterov's p₁): (1 + ω)(1 + mω) in AWC
    order.

    Args:
        omegas: the eigenvalues of the mixing matrix other than the simple 1.
        momentum, form: "ordinary" or "nesterov" momentum, 0 ≤ m < 1.
        order: "awc" (gradient at the learner's weights before mixing) or "atc" (step, then mix).
        delay: of the gradients, in steps.
        mixed: whether the momentum is mixed with the weights.

    Raises:
        InputError: a negative delay, a momentum outside [0, 1), or an unknown form or order.

    Example:
        >>> from landscape.limits.rules import max_mixing_step
        >>> round(max_mixing_step([0.2, -0.2]), 4)  # a ring of six with two neighbors per side
        0.8
    """
    check(delay, momentum, choose("form", form, FORMS[:2]))
    choose("order", order, ("awc", "atc"))
    limits = [max_stable_step(delay, momentum, form)]
    for omega in np.unique(np.round(np.asarray(omegas, dtype=complex), 12)):
        if order == "atc" and omega == 0:
            continue  # such a mode is gone after one step
        p0, p1 = polynomials(delay, momentum, form, omega, mixed)
        limits.append(first_crossing(p0, omega * p1 if order == "atc" else p1))
    return min(limits)


def max_tracking_step(
    omegas: Any, momentum: float = 0.0, form: str = "ordinary", order: str = "awc"
) -> float:
    """The largest stable ηλ of gradient tracking on one quadratic, over the eigenvalues ``omegas`` of M.

    A disagreement mode evolves by (z − ω)² (z − m) + h (z − 1) p₁, p₁ that of ``form`` in AWC order, and ω²
    times that in ATC order; the mean takes plain steps. Without momentum, for real ω in AWC order, z = −1
    gives (1 + ω_min)²/2 at most.

    Args:
        omegas: the eigenvalues of the mixing matrix other than the simple 1.
        momentum, form: "ordinary" or "nesterov" momentum, 0 ≤ m < 1.
        order: "awc" or "atc".

    Raises:
        InputError: a momentum outside [0, 1), or an unknown form or order.

    Example:
        >>> from landscape.limits.rules import max_tracking_step
        >>> round(max_tracking_step([0.2, -0.2]), 4)  # a ring of six with two neighbors per side
        0.32
    """
    choose("order", order, ("awc", "atc"))

    def mode(omega: complex, m: float, p1: Array) -> tuple[Array, Array]:
        return np.poly([omega, omega, m]), np.convolve(p1, [1, -1]) * (omega**2 if order == "atc" else 1)

    return _max_mode_step(omegas, momentum, form, mode)


def max_d2_step(omegas: Any, momentum: float = 0.0, form: str = "ordinary") -> float:
    """The largest stable ηλ of D² on one quadratic, over the eigenvalues ``omegas`` > −1/3 of M.

    A disagreement mode evolves by (z² − 2ωz + ω)(z − m) + hω (z − 1) p₁, p₁ that of ``form``; without
    momentum none has a lower limit than the mean's plain steps, 2.

    Args:
        omegas: the eigenvalues of the mixing matrix other than the simple 1.
        momentum, form: "ordinary" or "nesterov" momentum, 0 ≤ m < 1.

    Raises:
        InputError: a momentum outside [0, 1), or an unknown form.

    Example:
        >>> from landscape.limits.rules import max_d2_step
        >>> max_d2_step([0.2, -0.2]), max_d2_step([-0.5])
        (2.0, 0.0)
    """

    def mode(omega: complex, m: float, p1: Array) -> tuple[Array, Array]:
        return np.convolve([1, -2 * omega, omega], [1, -m]), omega * np.convolve(p1, [1, -1])

    return _max_mode_step(omegas, momentum, form, mode)


def _max_mode_step(
    omegas: Any, momentum: float, form: str, mode: Callable[[complex, float, Array], tuple[Array, Array]]
) -> float:
    """The smallest limit of the mean's steps and of ``mode``s p₀ + h p₁, from ω, m and the momentum's p₁."""
    check(0, momentum, choose("form", form, FORMS[:2]))
    limits, p1 = [max_stable_step(0, momentum, form)], polynomials(0, momentum, form)[1]
    for omega in np.unique(np.round(np.asarray(omegas, dtype=complex), 12)):
        fixed, changing = mode(omega, momentum, p1)
        if changing.any():  # otherwise the mode is gone after some steps
            limits.append(first_crossing(fixed, changing))
    return min(limits)


def max_paired_outer_step(
    period: int, outer_lr: float, outer_momentum: float, omegas: Any, drawn: bool = False
) -> float:
    """The largest stable ηλ of NoLoCo on one quadratic, ``period`` H plain steps between outer steps.

    With c = (1 − h)^H and the mode ω of M, δ ← μδ + ν (ωcφ − φ), φ ← φ + δ; the mean is the mode ω = 1.

    Args:
        period: H, in steps.
        outer_lr, outer_momentum: ν and μ.
        omegas: the eigenvalues of the mixing matrix other than the simple 1.
        drawn: whether M is a projection drawn anew each time, with E M = ``omegas`` orthogonal to the mean;
            the limit is then one in mean square.

    Example:
        >>> from landscape.limits.rules import max_paired_outer_step
        >>> round(max_paired_outer_step(1, 1.0, 0.0, [0.5]), 6)  # averages of plain steps, in ATC order
        2.0
    """
    kept = np.array([[1 - outer_lr, outer_momentum], [-outer_lr, outer_momentum]])
    mixed = np.array([[outer_lr, 0.0], [outer_lr, 0.0]])

    def radius(h: float) -> float:
        c = (1 - h) ** period
        maps = [kept + omega * c * mixed for omega in (1.0, *(() if drawn else np.atleast_1d(omegas)))]
        largest = max(float(np.abs(np.linalg.eigvals(one)).max()) for one in maps)
        return max(largest, _second_moments(c * mixed, kept, float(np.real(omegas[0])))) if drawn else largest

    return first_unstable(radius, 1 + max(1.0, 2 * (1 + outer_momentum) / outer_lr))


def max_random_delay_step(workers: int) -> float:
    """The largest ηλ stable in mean square where each step one of ``workers`` N at random delivers.

    Its gradient is of the weights it got when it last delivered, so that the delay is geometric with mean
    N − 1. With c the workers' copies, x' = x − h c_K and c_K' = x' for K uniform, the second moments
    E x², E x c_k, E c_k² and E c_j c_k (j ≠ k) follow a linear map. N = 1: 2.

    Example:
        >>> from landscape.limits.rules import max_random_delay_step
        >>> max_random_delay_step(1)
        2.0
    """
    n = workers
    if n == 1:
        return 2.0

    def radius(h: float) -> float:
        q = (n - 1) / n
        x2 = np.array([1.0, -2 * h, h**2, 0.0])
        xc = np.array([0.0, 1.0, 0.0, -h])  # E x' c_k of a worker that did not deliver
        same = np.array([0.0, 0.0, 1.0, 0.0])
        others = np.array([0.0, 0.0, 0.0, 1.0])
        rows = [x2, x2 / n + q * xc, x2 / n + q * same, 2 / n * xc + (1 - 2 / n) * others]
        return float(np.abs(np.linalg.eigvals(np.array(rows))).max())

    return first_unstable(radius, 2.0)


def max_matching_step(rho: float, delay: int = 0) -> float:
    """The largest ηλ stable in mean square where learners average in random pairs, gradients ``delay`` τ old.

    x(t+1) = M_t x(t) − h x(t−τ) in the space orthogonal to the mean, M_t a projection drawn anew with
    E M_t = ``rho`` there, so that the second moments of x(t), …, x(t−τ) follow a linear map. The mean,
    ω = 1, has the limit without mixing.

    Example:
        >>> from landscape.limits.rules import max_matching_step
        >>> round(max_matching_step(0.5), 3)
        1.366
    """

    def radius(h: float) -> float:
        mixed, kept = np.zeros((delay + 1, delay + 1)), np.eye(delay + 1, k=-1)
        mixed[0, 0] = 1.0
        kept[0, delay] = -h
        return _second_moments(mixed, kept, rho)

    mean = max_stable_step(delay)
    return min(mean, first_unstable(radius, mean))


def _second_moments(mixed: Array, kept: Array, rho: float) -> float:
    """The growth of E⟨sᵢ, sⱼ⟩ in a step s ← M ``mixed`` s + ``kept`` s of vectors s (d, …): a linear map.

    M is a projection drawn anew, with E M = ``rho``: E⟨M a, M b⟩ = E⟨M a, b⟩ = ρ⟨a, b⟩. ``mixed`` and
    ``kept`` are (d, d). The growth is the largest |eigenvalue|.
    """
    once = np.kron(mixed, mixed) + np.kron(mixed, kept) + np.kron(kept, mixed)
    moments = rho * once + np.kron(kept, kept)
    i, j = np.triu_indices(len(mixed))  # of the symmetric matrix of moments, each once
    upper, lower = i * len(mixed) + j, j * len(mixed) + i
    symmetric = moments[np.ix_(upper, upper)] + (i != j) * moments[np.ix_(upper, lower)]
    return float(np.abs(np.linalg.eigvals(symmetric)).max())


def max_matching_momentum_step(
    rho: float, momentum: float, form: str = "ordinary", order: str = "awc", mixed: bool = False
) -> float:
    """The largest ηλ stable in mean square where learners with momentum m average in random pairs.

    With v the momentum in units of weights, v' = m v + h x, u = v' (Nesterov: h x + m v'), and M a projection
    drawn anew with E M = ``rho`` orthogonal to the mean: x' = M x − u in AWC order, x' = M (x − u) in ATC
    order, and v' ← M v' where the momentum is ``mixed``. The second moments of x and v follow a linear map.
    The mean has the limit without mixing.

    Args:
        rho: E M orthogonal to the mean.
        momentum, form: "ordinary" or "nesterov" momentum, 0 ≤ m < 1.
        order: "awc" or "atc".
        mixed: whether the momentum is mixed with the weights.

    Raises:
        InputError: a momentum outside [0, 1), or an unknown form or order.

    Example:
        >>> from landscape.limits.rules import max_matching_momentum_step, max_matching_step
        >>> round(max_matching_momentum_step(0.5, 0.0), 3), round(max_matching_step(0.5), 3)
        (1.366, 1.366)
    """
    check(0, momentum, choose("form", form, FORMS[:2]))
    choose("order", order, ("awc", "atc"))

    def radius(h: float) -> float:
        x, v = np.array([1.0, 0.0]), np.array([h, momentum])
        u, none = v if form == "ordinary" else np.array([h, 0.0]) + momentum * v, np.zeros(2)
        parts = (x - u, none) if order == "atc" else (x, -u)
        own = (v, none) if mixed else (none, v)
        return _second_moments(np.array([parts[0], own[0]]), np.array([parts[1], own[1]]), rho)

    mean = max_stable_step(0, momentum, form)
    return min(mean, first_unstable(radius, mean))


def first_unstable(radius: Callable[[float], float], top: float, points: int = 400) -> float:
    """The smallest h in (0, ``top``] from which on ``radius``(h), continuous, is above 1; ``top`` if none is.

    Such ranges of h are seen if they are wider than ``top``/``points``.
    """
    from scipy.optimize import brentq  # only here: it would slow down every import

    def above(h: float) -> float:
        return radius(h) - 1 - 1e-12

    grid = np.linspace(0, top, points + 1)
    first = next((k for k, h in enumerate(grid) if k and above(h) > 0), None)
    return top if first is None else float(brentq(above, grid[first - 1], grid[first]))


def max_period_step(
    period: int,
    momentum: float = 0.0,
    form: str = "ordinary",
    omegas: Any = (1.0,),
    order: str = "awc",
    buffers: Literal["keep", "reset", "average"] = "keep",
    outer: Literal["none", "slowmo", "nesterov"] = "none",
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
) -> float:
    """The largest stable ηλ of ``period`` steps between averages of all learners, then perhaps an outer step.

    The mean's (x, v, x_old, u) goes through ``period`` steps with ``momentum`` in ``form`` and the average's
    outer step (see landscape.training.algorithms): a linear map, whose spectral radius must be below 1. Modes
    of disagreement ``omegas`` (1: no mixing in between) lose x at the average, and v only if ``buffers`` are
    reset or averaged: v must not grow over a period.
    """
    check(0, momentum, choose("form", form, FORMS[:2]))
    a, b, m = outer_lr, outer_momentum, momentum

    def step(h: float, omega: complex) -> Array:
        """(x, v) after a step."""
        v = np.array([h, m], dtype=complex)
        direction = v if form == "ordinary" else np.array([h, 0]) + m * v
        x = np.array([1.0, 0.0])
        moved = omega * (x - direction) if order == "atc" else omega * x - direction
        return np.array([moved, v])

    x, v, old, u = np.eye(4)
    slow = b * u + old - x if outer != "none" else u
    new = {"none": x, "slowmo": old - a * slow, "nesterov": old - a * (old - x + b * slow)}[outer]
    averaged = np.array([new, 0 * v if buffers == "reset" else v, new, slow])

    def radius(h: float) -> float:
        inner = np.eye(4, dtype=complex)
        inner[:2, :2] = np.linalg.matrix_power(step(h, 1.0), period)
        largest = float(np.abs(np.linalg.eigvals(averaged @ inner)).max())
        if m and buffers == "keep":
            for omega in np.atleast_1d(omegas):
                largest = max(largest, float(abs(np.linalg.matrix_power(step(h, omega), period)[1, 1])))
        return largest

    return first_unstable(radius, 1 + 2 * (1 + m) * max(1.0, (1 + b) / a))
