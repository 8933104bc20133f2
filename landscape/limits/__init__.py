"""Linear stability near a minimum: the largest stable step, under delay and momentum.

Along an eigenvector of the Hessian with eigenvalue λ a learning rate η acts by h = ηλ alone. Plain steps with
delay τ follow x_{t+1} = x_t − h x_{t−τ}; momentum and mixing add terms, and always the characteristic
polynomial is p₀(z) + h p₁(z). Training stays at the minimum while all its roots lie in the unit disc: for h
up to the limits computed here (Delay-2019; derived in docs/explanation/stability.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import (
    BelowOne,
    Count,
    Natural,
    NonNegative,
    OneOf,
    Positive,
    check_fields,
    checked,
)

__all__ = ["Hyperparameters", "limits", "lr_that_keeps_minima", "max_stable_step"]

#: v ← m v − ηg, x ← x + v; Nesterov's as torch.optim.SGD has it; and the shifted v_{t+1} = m v_{t−τ} − ηg.
FORMS = ("ordinary", "nesterov", "shifted")
Form = Annotated[str, OneOf(FORMS)]
MixingForm = Annotated[str, OneOf(FORMS[:2])]
Order = Annotated[str, OneOf(("awc", "atc"))]
# Points on a half of the unit circle in the search of a crossing: a fixed number, and more per coefficient.
_POINTS, _POINTS_PER_COEFFICIENT = 8192, 512


@checked()
def max_stable_step(
    delay: Natural = 0,
    momentum: BelowOne = 0.0,
    form: Form = "ordinary",
    noise: NonNegative = 0.0,
    batch: Count = 1,
) -> float:
    """The largest h = ηλ at which training with delayed gradients and momentum is stable on one quadratic.

    Up to this h, all roots of the characteristic polynomial lie in the unit disc
    (docs/explanation/stability.md). This polynomial is z^τ (z − 1)(z − m) + h p₁(z), where p₁(z) is z for
    "ordinary" and (1 + m) z − m for "nesterov"; for "shifted" it is (z^{τ+1} − m)(z − 1) + h z.

    Args:
        delay: τ, the age of the gradients in steps. For m = 0 the limit is 2 sin(π/(2(2τ + 1))).
        momentum: m. For τ = 0 the limit is 2(1 + m), except for "nesterov".
        form: "ordinary", "nesterov" or "shifted".
        noise: s²/λ², the relative variance of one sample's curvature. With noise, the limit is that of
            stability in mean square, h² ‖G‖² noise/B < 1, where ‖G‖² is the sum of squares of the impulse
            response from the noise to the weights. For τ = m = 0: (1 − h)² + h² noise/B < 1 (Wu, Ma, E 2018).
        batch: B, samples per step; minibatches are independent.

    Returns:
        h without a unit.

    Raises:
        InputError: a negative delay, m outside [0, 1), an unknown form, negative noise or no sample.

    Example:
        >>> from landscape.limits import max_stable_step
        >>> round(max_stable_step(), 4), round(max_stable_step(delay=1, momentum=0.9), 4)
        (2.0, 0.1)
    """
    p0, p1 = polynomials(delay, momentum, form)
    limit = first_crossing(p0, p1)
    if not noise:
        return limit

    low, high = 0.0, limit
    for _ in range(60):  # bisection, to rounding
        h = (low + high) / 2
        if noise / batch * h**2 * _impulse_power(p0 + h * p1, p1) >= 1:
            high = h
        else:
            low = h
    return low


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters that decide which minima are stable, except the learning rate.

    Attributes:
        delay, momentum, form: as in :func:`max_stable_step`.
        batch: samples per step.

    Example:
        >>> from landscape.limits import Hyperparameters
        >>> round(Hyperparameters(delay=3).limit(), 4)
        0.445
    """

    delay: Natural = 0
    momentum: BelowOne = 0.0
    form: Form = "ordinary"
    batch: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def limit(self, noise: float = 0.0) -> float:
        """The largest stable ηλ (:func:`max_stable_step`).

        Args:
            noise: s²/λ², the relative variance of one sample's curvature.

        Returns:
            The limit, without a unit.

        Raises:
            InputError: a hyperparameter or a noise that is not allowed.

        Example:
            >>> from landscape.limits import Hyperparameters
            >>> Hyperparameters(momentum=0.9).limit() == 2 * (1 + 0.9)
            True
        """
        return max_stable_step(self.delay, self.momentum, self.form, noise, self.batch)


@checked()
def lr_that_keeps_minima(
    lr: Positive, before: Hyperparameters, after: Hyperparameters, noise: NonNegative = 0.0
) -> float:
    """The learning rate under ``after`` with the same stable minima as ``lr`` under ``before``.

    A minimum is stable if λ < limit/η. So η' = η limit(after)/limit(before). For long delays without momentum
    this is η' ∝ 1/τ, the rule of the paper Delay-2019. Without noise, η' does not depend on the batch. With
    much noise, η' ∝ batch (Wu, Ma, E 2018).

    Args:
        lr: η, the learning rate under ``before``.
        before: the hyperparameters for which ``lr`` is known.
        after: the hyperparameters for which η' is wanted.
        noise: s²/λ², the relative variance of one sample's curvature.

    Returns:
        η', the learning rate under ``after``.

    Raises:
        InputError: an lr that is not positive, or hyperparameters that are not allowed.

    Example:
        >>> from landscape.limits import Hyperparameters, lr_that_keeps_minima
        >>> round(lr_that_keeps_minima(0.1, Hyperparameters(), Hyperparameters(delay=1)), 4)
        0.05
    """
    return lr * after.limit(noise) / before.limit(noise)


@checked()
def limits(delays: Sequence[Natural], momentum: BelowOne) -> Array:
    """The largest stable ηλ for each delay: without momentum, and in two forms with it (Delay-2019).

    Args:
        delays: K delays τ ≥ 0, in steps.
        momentum: m, 0 ≤ m < 1.

    Returns:
        (3, K): without momentum, with ordinary and with shifted momentum.

    Raises:
        InputError: a negative delay, or a momentum outside [0, 1).

    Example:
        >>> from landscape.limits import limits
        >>> limits([0, 1], momentum=0.9).round(4).tolist()  # none, ordinary, shifted
        [[2.0, 1.0], [3.8, 0.1], [3.8, 0.19]]
    """
    settings = ((0.0, "ordinary"), (momentum, "ordinary"), (momentum, "shifted"))
    return np.array([[max_stable_step(tau, m, form) for tau in delays] for m, form in settings])


def polynomials(
    delay: int, momentum: float, form: str, omega: complex = 1.0, mixed: bool = False
) -> tuple[Array, Array]:
    """(p₀, p₁), coefficients from the highest power z^{τ+2} down; ``mixed``: the momentum is mixed, too."""
    size = delay + 3
    if form == "shifted":
        high = np.zeros(delay + 2, dtype=complex)
        high[0], high[-1] = 1.0, -momentum
        p0 = np.convolve(high, [1.0, -1.0])
    else:
        p0 = np.zeros(size, dtype=complex)
        decay = momentum * omega if mixed else momentum
        p0[:3] = np.convolve([1.0, -omega], [1.0, -decay])
    p1 = np.zeros(size, dtype=complex)
    p1[-2:] = (1 + momentum, -decay) if form == "nesterov" else (1.0, 0.0)
    return p0, p1


def first_crossing(p0: Array, p1: Array) -> float:
    """The smallest h > 0 at which p₀ + h p₁ has a root on the unit circle; infinity if there is none.

    z is a root for h = −p₀(z)/p₁(z). Where a root crosses the circle, this ratio is therefore real and
    positive. The result is 0 if a root is outside the circle for every small h > 0.
    """
    count = _POINTS + _POINTS_PER_COEFFICIENT * len(p0)
    angles = np.linspace(-np.pi, np.pi, 2 * count + 1)  # 0 and ±π are among them

    def ratio(angle: Array) -> Array:
        z = np.exp(1j * angle)
        with np.errstate(divide="ignore", invalid="ignore"):  # p₁ may be 0 at z = 1, which is no crossing
            return -np.polyval(p0, z) / np.polyval(p1, z)

    # Bisection between neighboring angles at which the imaginary part has different signs.
    signs = np.sign(ratio(angles).imag)
    changes = np.flatnonzero(signs[:-1] * signs[1:] < 0)
    low, high = angles[changes], angles[changes + 1]
    sign_at_low = np.sign(ratio(low).imag)
    for _ in range(60):  # to rounding
        middle = (low + high) / 2
        is_low = np.sign(ratio(middle).imag) == sign_at_low
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    # For real polynomials the ratio is real at the angles 0 and π, also without a change of sign.
    ratios_at_0_and_pi = ratio(np.array([0.0, np.pi]))
    is_real = np.abs(ratios_at_0_and_pi.imag) < 1e-9
    ratios = np.concatenate([ratio((low + high) / 2).real, ratios_at_0_and_pi.real[is_real]])
    crossings = ratios[ratios > 1e-9]
    limit = float(crossings.min()) if len(crossings) else np.inf
    # No root crosses the circle for h between 0 and ``limit``, and so one of these h stands for all.
    h = min(limit, 1.0) * 1e-3
    largest_root = np.abs(np.roots(p0 + h * p1)).max()
    return limit if largest_root <= 1 + 1e-9 else 0.0


def _impulse_power(p: Array, p1: Array) -> float:
    """Σ_k G_k² of G(z) = p₁(z)/p(z), p monic and stable: cPcᵀ, P = A P Aᵀ + bbᵀ, A the companion matrix."""
    a = np.zeros((len(p) - 1,) * 2)
    a[0] = -p[1:].real
    a[1:, :-1] = np.eye(len(a) - 1)
    b = np.zeros((len(a), 1))
    b[0] = 1.0
    c = p1[1:].real
    if np.abs(np.linalg.eigvals(a)).max() >= 1:
        return np.inf
    from scipy.linalg import solve_discrete_lyapunov  # only here: it would slow down every import

    return float(c @ solve_discrete_lyapunov(a, b @ b.T) @ c)


@checked()
def max_mixing_step(
    omegas: Any,
    momentum: BelowOne = 0.0,
    form: MixingForm = "ordinary",
    order: Order = "awc",
    delay: Natural = 0,
    mixed: bool = False,
) -> float:
    """The largest stable h = ηλ of learners that mix by a fixed matrix M, on one quadratic.

    Each eigenvalue ω of M has a mode: the combination of the learners that M multiplies by ω. The mean of the
    learners is the mode ω = 1. In AWC order (see ``order``), the characteristic polynomial of a mode is
    z^τ (z − ω)(z − m) + h p₁; in ATC order, it is z^τ (z − ω)(z − m) + h ω p₁. Here p₁ is z for "ordinary"
    momentum, and (1 + m) z − m for "nesterov".

    For real ω and ordinary momentum without delay, the limit in AWC order is (1 + ω_min)(1 + m). In ATC order
    without momentum and delay, the condition is |ω(1 − h)| < 1.

    Args:
        omegas: the eigenvalues of M without that of the mean, 1, whose limit always counts.
        momentum, form: m, 0 ≤ m < 1, of "ordinary" or "nesterov" momentum.
        order: "awc" (gradient at the learner's weights before mixing) or "atc" (step, then mix).
        delay: τ, the age of the gradients in steps.
        mixed: whether M also mixes the momentum. Then z − mω replaces z − m, Nesterov's p₁ is
            (1 + m) z − mω, and (1 + ω_min)(1 + mω_min) replaces (1 + ω_min)(1 + m).

    Raises:
        InputError: |ω| > 1, a negative delay, a momentum outside [0, 1), or an unknown form or order.

    Example:
        >>> from landscape.limits import max_mixing_step
        >>> round(max_mixing_step([0.2, -0.2]), 4)  # a ring of six with two neighbors per side
        0.8
    """

    def mode(omega: complex, m: float, _p1_of_mean: Array) -> tuple[Array, Array]:
        p0, p1 = polynomials(delay, m, form, omega, mixed)  # with ``mixed``, p₁ depends on ω, too
        mode_p1 = omega * p1 if order == "atc" else p1
        return p0, mode_p1

    return _max_mode_step(omegas, momentum, form, mode, delay)


@checked()
def max_tracking_step(
    omegas: Any, momentum: BelowOne = 0.0, form: MixingForm = "ordinary", order: Order = "awc"
) -> float:
    """The largest stable h = ηλ of gradient tracking with a mixing matrix M, on one quadratic.

    Each eigenvalue ω of M has a mode: the combination of the learners that M multiplies by ω. In AWC order, a
    mode has the characteristic polynomial (z − ω)² (z − m) + h (z − 1) p₁; in ATC order, it has
    (z − ω)² (z − m) + h (z − 1) ω² p₁. Here p₁ is z for "ordinary" momentum, and (1 + m) z − m for
    "nesterov". The mean of the learners moves like a single learner. For real ω without momentum, the limit
    in AWC order is at most (1 + ω_min)²/2, at which z = −1 is a root.

    Args:
        omegas: the eigenvalues of M without that of the mean, 1, whose limit always counts.
        momentum, form: m, 0 ≤ m < 1, of "ordinary" or "nesterov" momentum.
        order: "awc" or "atc", as in :func:`max_mixing_step`.

    Raises:
        InputError: |ω| > 1, a momentum outside [0, 1), or an unknown form or order.

    Example:
        >>> from landscape.limits import max_tracking_step
        >>> round(max_tracking_step([0.2, -0.2]), 4)  # a ring of six with two neighbors per side
        0.32
    """

    def mode(omega: complex, m: float, p1: Array) -> tuple[Array, Array]:
        p0 = np.poly([omega, omega, m])
        factor = omega**2 if order == "atc" else 1
        return p0, np.convolve(p1, [1, -1]) * factor

    return _max_mode_step(omegas, momentum, form, mode)


@checked()
def max_d2_step(omegas: Any, momentum: BelowOne = 0.0, form: MixingForm = "ordinary") -> float:
    """The largest stable ηλ of D² on one quadratic, over the eigenvalues ``omegas`` > −1/3 of M.

    The mode of ω has the characteristic polynomial (z² − 2ωz + ω)(z − m) + hω (z − 1) p₁. Here p₁ is z for
    "ordinary" momentum, and (1 + m) z − m for "nesterov". Without momentum, no such mode has a lower limit
    than the mean of the learners, 2.

    Args:
        omegas: the eigenvalues of the mixing matrix other than the simple 1.
        momentum, form: "ordinary" or "nesterov" momentum, 0 ≤ m < 1.

    Raises:
        InputError: |ω| > 1, a momentum outside [0, 1), or an unknown form.

    Example:
        >>> from landscape.limits import max_d2_step
        >>> max_d2_step([0.2, -0.2]), max_d2_step([-0.5])
        (2.0, 0.0)
    """

    def mode(omega: complex, m: float, p1: Array) -> tuple[Array, Array]:
        return np.convolve([1, -2 * omega, omega], [1, -m]), omega * np.convolve(p1, [1, -1])

    return _max_mode_step(omegas, momentum, form, mode)


Mode = Callable[[complex, float, Array], tuple[Array, Array]]


def _max_mode_step(omegas: Any, momentum: float, form: str, mode: Mode, delay: int = 0) -> float:
    """The smallest limit of the mean's steps, and of the modes.

    ``mode`` maps ω, m and the momentum's p₁ to the two polynomials of a mode, which it adds as p₀ + h p₁.
    """
    limits, p1 = [max_stable_step(delay, momentum, form)], polynomials(0, momentum, form)[1]
    modes = np.asarray(omegas, dtype=complex)
    if not (np.abs(modes) <= 1 + 1e-9).all():
        raise InputError("omegas", omegas, allowed="eigenvalues of a mixing matrix, of absolute value ≤ 1")
    for omega in np.unique(np.round(modes, 12)):
        mode_p0, mode_p1 = mode(omega, momentum, p1)
        if mode_p1.any():  # else the mode vanishes for any h
            limits.append(first_crossing(mode_p0, mode_p1))
    return min(limits)


def max_noloco_step(
    period: int, outer_lr: float, outer_momentum: float, omegas: Any, drawn: bool = False
) -> float:
    """The largest stable h = ηλ of NoLoCo on one quadratic.

    An outer step follows after H plain steps. In the mode of an eigenvalue ω of the mixing matrix M, the
    weights are φ and the outer momentum is δ. H plain steps multiply φ by c = (1 − h)^H. The outer step is
    δ ← μδ + ν (ωcφ − φ), φ ← φ + δ. The mean of the learners is the mode ω = 1.

    Args:
        period: H, the number of plain steps.
        outer_lr, outer_momentum: ν and μ.
        omegas: the eigenvalues of M without that of the mean, 1.
        drawn: whether M is a projection that is drawn for each outer step. The expectation of M multiplies
            deviations from the mean by ``omegas[0]``. The limit is then that of stability in mean square.

    Example:
        >>> from landscape.limits import max_noloco_step
        >>> round(max_noloco_step(1, 1.0, 0.0, [0.5]), 6)  # each outer step is φ ← ω (1 − h) φ
        2.0
    """
    # An outer step multiplies (φ, δ) by the matrix ``unmixed`` + ω c ``mixed``.
    unmixed = np.array([[1 - outer_lr, outer_momentum], [-outer_lr, outer_momentum]])
    mixed = np.array([[outer_lr, 0.0], [outer_lr, 0.0]])
    fixed_modes = [1.0] if drawn else [1.0, *np.atleast_1d(omegas)]  # ω that are no random numbers

    def radius(h: float) -> float:  # spectral radius of the map of an outer step; it must be at most 1
        c = (1 - h) ** period
        maps = [unmixed + omega * c * mixed for omega in fixed_modes]
        largest = max(float(np.abs(np.linalg.eigvals(matrix)).max()) for matrix in maps)
        if not drawn:
            return largest
        return max(largest, _second_moment_growth(c * mixed, unmixed, float(np.real(omegas[0]))))

    # The mean is stable for 1 − 2(1 + μ)/ν < c < 1. At this h, c is at least 1 for even H. For odd H, c is at
    # most −2(1 + μ)/ν, and so below the lower limit.
    unstable_for_any_period = 1 + max(1.0, 2 * (1 + outer_momentum) / outer_lr)
    return first_unstable(radius, unstable_for_any_period)


def max_random_worker_step(workers: int) -> float:
    """The largest h = ηλ that is stable in mean square if each step uses the gradient of a random worker.

    There are N ``workers``. A worker computes its gradient at the weights that it received when its previous
    gradient was used: the delay has a geometric distribution with mean N − 1 steps. On one quadratic the
    weights are x, and worker k has the copy c_k. A step draws a worker d, and sets x' = x − h c_d, c_d' = x'.
    The second moments E x², E x c_k, E c_k² and E c_j c_k (j ≠ k) follow a linear map.

    Example:
        >>> from landscape.limits import max_random_worker_step
        >>> max_random_worker_step(1)
        2.0
    """
    n = workers
    if n == 1:
        return 2.0

    def radius(h: float) -> float:
        q = (n - 1) / n  # the probability that worker k is not drawn
        # A moment is a combination of (E x², E x c_k, E c_k², E c_j c_k) before the step, with coefficients:
        xx = np.array([1.0, -2 * h, h**2, 0.0])  # E x'²
        xc = np.array([0.0, 1.0, 0.0, -h])  # E x' c_k for k ≠ d
        cc = np.array([0.0, 0.0, 1.0, 0.0])  # E c_k²
        pairs = np.array([0.0, 0.0, 0.0, 1.0])  # E c_j c_k
        # The rows give the same four moments after the step; c_k' is x' for k = d, and otherwise c_k.
        rows = [xx, xx / n + q * xc, xx / n + q * cc, 2 / n * xc + (1 - 2 / n) * pairs]
        return float(np.abs(np.linalg.eigvals(np.array(rows))).max())

    return first_unstable(radius, 2.0)  # 2 is the limit without delay


def max_matching_step(rho: float, delay: int = 0) -> float:
    """The largest h = ηλ stable in mean square if learners average in random pairs.

    Gradients are late by τ = ``delay`` steps. The deviations x of the learners from their mean follow
    x(t+1) = M_t x(t) − h x(t−τ). M_t is a projection drawn for each step, and E M_t multiplies deviations by
    ``rho``. The second moments of x(t), …, x(t−τ) follow a linear map. The mean has the limit without mixing.

    Example:
        >>> from landscape.limits import max_matching_step
        >>> round(max_matching_step(0.5), 3)
        1.366
    """

    def radius(h: float) -> float:
        mixed, unmixed = np.zeros((delay + 1, delay + 1)), np.eye(delay + 1, k=-1)
        mixed[0, 0] = 1.0
        unmixed[0, delay] = -h
        return _second_moment_growth(mixed, unmixed, rho)

    mean = max_stable_step(delay)
    return min(mean, first_unstable(radius, mean))


def _second_moment_growth(mixed: Array, unmixed: Array, rho: float) -> float:
    """The growth of E⟨sᵢ, sⱼ⟩ in a step s ← M ``mixed`` s + ``unmixed`` s of vectors s (d, …).

    M is a projection drawn for each step, with E M = ``rho``: E⟨M a, M b⟩ = E⟨M a, b⟩ = ρ⟨a, b⟩. The
    matrices ``mixed`` and ``unmixed`` are (d, d). The growth is the largest |eigenvalue| of the moments' map.
    """
    once = np.kron(mixed, mixed) + np.kron(mixed, unmixed) + np.kron(unmixed, mixed)
    moments = rho * once + np.kron(unmixed, unmixed)
    i, j = np.triu_indices(len(mixed))  # of the symmetric matrix of moments, each once
    upper, lower = i * len(mixed) + j, j * len(mixed) + i
    symmetric = moments[np.ix_(upper, upper)] + (i != j) * moments[np.ix_(upper, lower)]
    return float(np.abs(np.linalg.eigvals(symmetric)).max())


@checked()
def max_matching_momentum_step(
    rho: float, momentum: BelowOne, form: MixingForm = "ordinary", order: Order = "awc", mixed: bool = False
) -> float:
    """The largest h = ηλ stable in mean square for learners with momentum, averaged in random pairs.

    Averaging multiplies the deviations x from the mean by a projection M, which is drawn for each step. The
    gradient is λx. The momentum, multiplied by η, is v' = m v + h x. The update is u = v' for "ordinary"
    momentum, and u = h x + m v' for "nesterov". A step is x' = M x − u in AWC order, M (x − u) in ATC order.
    The second moments of x and v follow a linear map. The result is at most the limit of a single learner.

    Args:
        rho: ρ. The expectation of M multiplies deviations from the mean by ρ.
        momentum, form: m, 0 ≤ m < 1, of "ordinary" or "nesterov" momentum.
        order: "awc" or "atc", as in :func:`max_mixing_step`.
        mixed: whether M also mixes the momentum, after u is computed. The next step then has M v' as its v.

    Raises:
        InputError: a momentum outside [0, 1), or an unknown form or order.

    Example:
        >>> from landscape.limits import max_matching_momentum_step, max_matching_step
        >>> round(max_matching_momentum_step(0.5, 0.0), 3), round(max_matching_step(0.5), 3)
        (1.366, 1.366)
    """

    def radius(h: float) -> float:
        # x, v' and u as combinations of x and v: two coefficients each.
        x, new_v = np.array([1.0, 0.0]), np.array([h, momentum])
        u = new_v if form == "ordinary" else np.array([h, 0.0]) + momentum * new_v
        # The next step's (x, v) is M ``mixed_part`` (x, v) + ``unmixed_part`` (x, v).
        mixed_part, unmixed_part = np.array([x, [0.0, 0.0]]), np.array([-u, new_v])
        if order == "atc":
            mixed_part[0], unmixed_part[0] = x - u, 0.0
        if mixed:
            mixed_part[1], unmixed_part[1] = new_v, 0.0
        return _second_moment_growth(mixed_part, unmixed_part, rho)

    limit_of_mean = max_stable_step(0, momentum, form)  # the mean moves like a single learner
    return min(limit_of_mean, first_unstable(radius, limit_of_mean))


def first_unstable(radius: Callable[[float], float], top: float, points: int = 400) -> float:
    """The smallest h in (0, ``top``] at which the continuous ``radius``(h) rises above 1; else ``top``.

    A range of h with a radius above 1 is found if it is wider than ``top``/``points``.
    """

    def above(h: float) -> bool:
        return radius(h) > 1 + 1e-12

    for low, high in pairwise(np.linspace(0, top, points + 1)):
        if above(high):
            while low < (middle := (low + high) / 2) < high:  # bisection: SciPy's root finders import slowly
                low, high = (low, middle) if above(middle) else (middle, high)
            return float(low)
    return top


@checked()
def max_period_step(
    period: int,
    momentum: BelowOne = 0.0,
    form: MixingForm = "ordinary",
    omegas: Any = (1.0,),
    order: Order = "awc",
    buffers: Literal["keep", "reset", "average"] = "keep",
    outer: Literal["none", "slowmo", "nesterov"] = "none",
    outer_lr: float = 1.0,
    outer_momentum: BelowOne = 0.0,
) -> float:
    """The largest stable h = ηλ of learners that take ``period`` steps between averages of all learners.

    An ``outer`` step may follow each average (see landscape.training.algorithms). The state of the mean is
    x (weights), v (momentum), x_old (weights after the last outer step) and u (outer momentum). The
    ``period`` steps and the outer step map this state linearly; the map's spectral radius must be at most 1.

    Between averages the learners mix by a matrix with eigenvalues ``omegas`` (1: no mixing). For ``order``,
    see :func:`max_mixing_step`. An average sets x = 0 in all modes except the mean. ``buffers`` says what the
    average does with v. With "keep", all modes keep their v, which must not grow over a period. With
    "average", only the mean keeps v, and with "reset" v = 0.
    """
    m = momentum

    def step(h: float, omega: complex) -> Array:
        """The matrix (2, 2) by which a step multiplies a mode's (x, v)."""
        # x, the new v, the direction and the new x as combinations of x and v: two coefficients each.
        x, new_v = np.array([1.0, 0.0]), np.array([h, m], dtype=complex)
        direction = new_v if form == "ordinary" else np.array([h, 0]) + m * new_v
        new_x = omega * (x - direction) if order == "atc" else omega * x - direction
        return np.array([new_x, new_v])

    # The outer step: its new values are linear combinations of (x, v, x_old, u), given by coefficients (4,).
    x, v, x_old, u = np.eye(4)
    new_x, new_u = x, u
    if outer != "none":
        new_u = outer_momentum * u + x_old - x
        outer_direction = new_u if outer == "slowmo" else x_old - x + outer_momentum * new_u
        new_x = x_old - outer_lr * outer_direction
    new_v = 0 * v if buffers == "reset" else v
    outer_map = np.array([new_x, new_v, new_x, new_u])  # the new x is also the new x_old

    def radius(h: float) -> float:
        steps_map = np.eye(4, dtype=complex)
        steps_map[:2, :2] = np.linalg.matrix_power(step(h, 1.0), period)
        largest = float(np.abs(np.linalg.eigvals(outer_map @ steps_map)).max())
        if m and buffers == "keep":
            for omega in np.atleast_1d(omegas):
                v_to_v = np.linalg.matrix_power(step(h, omega), period)[1, 1]  # the average removes x
                largest = max(largest, float(abs(v_to_v)))
        return largest

    # The search ends above two known limits: 2(1 + m) without outer steps, and 2(1 + μ)/ν for m = 0 and an
    # outer step after each step; ν and μ are ``outer_lr`` and ``outer_momentum``.
    return first_unstable(radius, 1 + 2 * (1 + m) * max(1.0, (1 + outer_momentum) / outer_lr))
