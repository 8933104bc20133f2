"""Linear stability near a minimum: the largest stable step, under delay and momentum.

Along an eigenvector of the Hessian with eigenvalue λ a learning rate η acts by h = ηλ alone. Plain steps with
delay τ follow x_{t+1} = x_t − h x_{t−τ}; momentum and mixing add terms, and always the characteristic
polynomial is p₀(z) + h p₁(z). Training stays at the minimum while all its roots lie in the unit disc: for h
up to the limits computed here (Delay-2019; derived in docs/explanation/stability.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import below_one, choose, positive

__all__ = ["Hyperparameters", "limits", "lr_that_keeps_minima", "max_stable_step"]

#: v ← m v − ηg, x ← x + v; Nesterov's as torch.optim.SGD has it; and the shifted v_{t+1} = m v_{t−τ} − ηg.
FORMS = ("ordinary", "nesterov", "shifted")
# Points of the unit circle for the search of the first crossing, and additional ones for each step of delay.
_POINTS, _POINTS_A_STEP = 8192, 512


def max_stable_step(
    delay: int = 0, momentum: float = 0.0, form: str = "ordinary", noise: float = 0.0
) -> float:
    """The largest stable ηλ with gradients ``delay`` τ steps old and ``momentum`` m.

    The polynomials, with h = ηλ: ordinary z^τ (z − 1)(z − m) + h z, which is z times z^{τ+1} − (1+m) z^τ +
    m z^{τ−1} + h (docs/explanation/stability.md); nesterov the same with h ((1+m) z − m); shifted (z^{τ+1} −
    m)(z − 1) + h z. Without momentum the limit is 2 sin(π/(2(2τ+1))); without delay 2(1+m).

    Args:
        delay: τ ≥ 0, in steps.
        momentum: m, 0 ≤ m < 1.
        form: "ordinary", "nesterov" or "shifted".
        noise: s²/(λ²B) > 0 asks for stability in mean square, if the minibatch's curvature along the
            eigenvector has mean λ and variance s²/B, independent from step to step (Wu, Ma, E 2018, for
            τ = m = 0: (1−h)² + h² s²/(λ²B) < 1; here q‖G‖² < 1 with q = h² × noise and ‖G‖² the sum of
            squares of the impulse response from the noise to the weights).

    Returns:
        The largest h = ηλ at which all roots lie in the closed unit disc, without a unit.

    Raises:
        InputError: a negative delay, m outside [0, 1), an unknown form or negative noise.

    Example:
        >>> from landscape.limits import max_stable_step
        >>> round(max_stable_step(), 4), round(max_stable_step(delay=1, momentum=0.9), 4)
        (2.0, 0.1)
    """
    check(delay, momentum, form)
    positive("noise", noise, least=0)
    p0, p1 = polynomials(delay, momentum, form)
    limit = first_crossing(p0, p1)
    if not noise:
        return limit

    def growth(h: float) -> float:
        return noise * h**2 * _impulse_power(p0 + h * p1, p1)

    low, high = 0.0, limit
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if growth(middle) >= 1 else (middle, high)
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

    delay: int = 0
    momentum: float = 0.0
    form: str = "ordinary"
    batch: int = 1

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
        return max_stable_step(self.delay, self.momentum, self.form, noise / self.batch)


def lr_that_keeps_minima(
    lr: float, before: Hyperparameters, after: Hyperparameters, noise: float = 0.0
) -> float:
    """The learning rate under ``after`` that leaves the same minima accessible as ``lr`` under ``before``.

    Minima stay that are stable, λ < limit/η: so η' = η limit(after)/limit(before). For long delays and no
    momentum that is η ∝ 1/τ (Delay-2019). The batch matters through the noise of the curvature: where it is 0
    not at all, where it dominates as η ∝ batch (Wu, Ma, E 2018).

    Args:
        lr: η under ``before``, > 0.
        before, after: the hyperparameters then and now.
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
    positive("lr", lr)
    return lr * after.limit(noise) / before.limit(noise)


def limits(delays: Sequence[int], momentum: float) -> Array:
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
    if not np.iterable(delays):
        raise InputError(f"delays: {delays!r} is not allowed, it must be a sequence of whole numbers ≥ 0")
    settings = ((0.0, "ordinary"), (momentum, "ordinary"), (momentum, "shifted"))
    return np.array([[max_stable_step(tau, m, form) for tau in delays] for m, form in settings])


def check(delay: int, momentum: float, form: str) -> None:
    """Raise InputError unless these are a delay, a momentum and one of FORMS."""
    if isinstance(delay, bool) or delay != int(delay) or delay < 0:
        raise InputError(f"delay: {delay} is not allowed, it must be a whole number ≥ 0")
    below_one("momentum", momentum)
    choose("form", form, FORMS)


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
        kept = momentum * omega if mixed else momentum
        p0[:3] = np.convolve([1.0, -omega], [1.0, -kept])
    p1 = np.zeros(size, dtype=complex)
    p1[-2:] = (1 + momentum, -kept) if form == "nesterov" else (1.0, 0.0)
    return p0, p1


def first_crossing(p0: Array, p1: Array) -> float:
    """The smallest h > 0 at which p₀ + h p₁ has a root on the unit circle: −p₀/p₁ real and positive there.

    0 if a root is outside already for the smallest h.
    """
    count = _POINTS + _POINTS_A_STEP * len(p0)
    angles = np.linspace(-np.pi, np.pi, 2 * count + 1)  # 0 and ±π are among them

    def ratio(theta: Array) -> Array:
        z = np.exp(1j * theta)
        with np.errstate(divide="ignore", invalid="ignore"):  # p₁ may be 0 at z = 1, which is no crossing
            return -np.polyval(p0, z) / np.polyval(p1, z)

    values = ratio(angles)
    change = np.flatnonzero(np.sign(values.imag[:-1]) * np.sign(values.imag[1:]) < 0)
    low, high = angles[change], angles[change + 1]
    side = np.sign(ratio(low).imag)
    for _ in range(60):
        middle = (low + high) / 2
        left = np.sign(ratio(middle).imag) == side
        low, high = np.where(left, middle, low), np.where(left, high, middle)
    ratios = np.concatenate([ratio((low + high) / 2).real, ratio(np.array([0.0, np.pi])).real])
    # At the angles 0 and π the ratio is real for real polynomials, but not for all others.
    real = np.abs(np.concatenate([np.zeros(len(change)), ratio(np.array([0.0, np.pi])).imag])) < 1e-9
    crossings = ratios[real & (ratios > 1e-9)]
    limit = float(crossings.min()) if len(crossings) else np.inf
    inside = np.abs(np.roots(p0 + min(limit, 1.0) * 1e-3 * p1)).max() if limit else np.inf
    return limit if inside <= 1 + 1e-9 else 0.0


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
