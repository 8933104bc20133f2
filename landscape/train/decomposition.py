"""Every step as effective learning rate and noise (DPSGD-2020, Eq. 3 and 4), for any update rule.

With the displacement d = w_a(t+1) − w_a(t) and g = ∇L(w_a(t)): α_e = −⟨d, g⟩/‖g‖², η = d + α_e g, Δ = ‖η‖².
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.options import InputError
from landscape.problem import Problem
from landscape.stack import Stack
from landscape.train.randomness import generator
from landscape.vector import average

# Independent estimates of g that a sample is cut into; half serve ⟨·, g⟩, half ‖g‖², so that the two are
# independent (ours; enough for a standard error within about 20%).
GROUPS = 16


@dataclass(frozen=True)
class Gradient:
    """∇L(w_a) as rows of independent estimates (k, P) float64; one row if it is exact."""

    loss: float
    rows: Tensor

    @property
    def exact(self) -> bool:
        return len(self.rows) == 1

    def dot(self, v: Tensor) -> tuple[float, float]:
        """⟨v, g⟩ and its standard error."""
        each = self.rows[: max(1, len(self.rows) // 2)] @ v
        return _mean_and_error(each)

    def norm2(self) -> tuple[float, float]:
        """‖g‖² and its standard error; estimated without bias from pairs of independent estimates.

        NaN where g is exactly zero, since nothing can be projected on it.
        """
        if self.exact:
            return float(self.rows[0] @ self.rows[0]) or float("nan"), 0.0
        half = self.rows[len(self.rows) // 2 :]
        k, total = len(half), half.sum(0)
        # Leave-one-out means of the pairwise products, whose spread gives the jackknife error.
        squares = half.square().sum(1)
        pairs = (float(total @ total) - float(squares.sum())) / (k * (k - 1))
        rest = total - half
        left = (rest.square().sum(1) - (squares.sum() - squares)) / ((k - 1) * (k - 2))
        return pairs, float(((k - 1) / k * (left - left.mean()).square().sum()).sqrt())

    def perpendicular(self, a: Tensor, b: Tensor) -> float:
        """⟨P⊥a, P⊥b⟩ with P⊥ the projector orthogonal to g."""
        norm2 = self.norm2()[0]
        if self.exact:
            g = self.rows[0]
            return float((a - (a @ g) / norm2 * g) @ (b - (b @ g) / norm2 * g))
        return float(a @ b) - self.dot(a)[0] * self.dot(b)[0] / norm2


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    if len(values) == 1:
        return float(values[0]), 0.0
    return float(values.mean()), float(values.std(correction=1) / len(values) ** 0.5)


def estimate_gradient(problem: Problem, theta: Tensor, samples: int, seed: int, step: int) -> Gradient:
    """g at ``theta``: exact over the whole training set if ``samples`` is 0, else from that many samples."""
    if samples == 0:
        loss, gradient = problem.loss_and_gradient(theta)
        return Gradient(loss, gradient.double()[None])
    if samples % GROUPS:
        raise InputError(f"decompose.samples: {samples} is not allowed, it must be a multiple of {GROUPS}")
    draw = generator(seed, "decompose", step)
    indices = torch.randint(problem.samples, (GROUPS, samples // GROUPS), generator=draw)
    pairs = [problem.subset(i.to(problem.device)).loss_and_gradient(theta) for i in indices]
    rows = torch.stack([gradient.double() for _, gradient in pairs])
    return Gradient(sum(loss for loss, _ in pairs) / GROUPS, rows)


class StepDecomposition:
    """What is known before a step is finished: g, g_S and δ at w_a; :meth:`columns` adds the displacement.

    ``weights`` (n, P) are those at the start of the step, ``own`` (n, P) the learners' minibatch gradients
    where the rule took them; those at the mean, on the same minibatches (x, y), are computed here. Eq. 4
    splits the noise of steps −α × gradient, so that its terms are NaN if the steps are not ``plain`` (with
    momentum, weight decay, LARS or LAMB); α_e and Δ come from the displacement and hold for all.
    """

    def __init__(
        self,
        stack: Stack,
        weights: Tensor,
        x: Tensor,
        y: Tensor,
        own: Tensor,
        samples: int,
        seed: int,
        step: int,
        plain: bool = True,
    ) -> None:
        theta = average(weights)
        self._mean = weights.mean(0, dtype=torch.float64)  # a difference of two is not to be lost in rounding
        self._gradient = estimate_gradient(stack.problem, theta, samples, seed, step)
        self._parts: tuple[Tensor, Tensor] | None = None
        if plain:
            at_mean = torch.empty_like(own)
            stack.gradients(theta.expand_as(own), x, y, out=at_mean)
            self._parts = at_mean.mean(0, dtype=torch.float64), (own.double() - at_mean.double()).mean(0)

    def columns(self, new: Tensor, lr: float) -> dict[str, float]:
        """The history's columns for the step that led to the weights ``new`` (n, P) with learning rate α."""
        g, d = self._gradient, new.mean(0, dtype=torch.float64) - self._mean
        dot, dot_se = g.dot(d)
        norm2, norm2_se = g.norm2()
        displacement2 = float(d @ d)
        alpha_e = -dot / norm2
        eta = d + alpha_e * g.rows[0] if g.exact else None
        columns = {
            "train_loss": g.loss,
            "alpha_e": alpha_e,
            "alpha_e_se": (dot_se**2 + (alpha_e * norm2_se) ** 2) ** 0.5 / abs(norm2),
            "grad_norm2": norm2,
            "grad_norm2_se": norm2_se,
            "displacement2": displacement2,
            "delta": float(eta @ eta) if eta is not None else displacement2 - alpha_e**2 * norm2,
        }
        if self._parts is None:
            return columns
        (s, delta), scale = self._parts, lr**2
        return columns | {
            "delta_s": scale * g.perpendicular(s, s),
            "delta_2": scale * g.perpendicular(delta, delta),
            "delta_2_full": scale * float(delta @ delta),
            "delta_cross": 2 * scale * g.perpendicular(s, delta),
        }
