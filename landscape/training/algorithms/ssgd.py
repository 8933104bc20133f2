"""Rules whose learners are equal: SSGD, SSGD* with noise, and averages of one worker's weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, NonNegative, Positive
from landscape.limits import first_crossing, max_stable_step, polynomials
from landscape.limits.rules import max_period_step
from landscape.training.algorithms.base import Rule
from landscape.training.algorithms.local_sgd import OuterStep


@registry.algorithms.add("ssgd")
class SSGD(Rule):
    """w_j ← w_a − α ∇L^{μ_j}(w_a) (DPSGD-2020, Eq. 1): every learner starts each step from the mean.

    With one learner it is plain SGD.
    """

    label, color = "SSGD", "#D55E00"
    synchronous = True
    at_mean = True
    lr_is_factor = True

    def gradient_points(self, weights: Tensor) -> Tensor:
        return self.comm.mean(weights).expand_as(weights)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        return torch.sub(self.gradient_points(weights), directions, alpha=lr, out=self._new_weights(weights))

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        return max_stable_step(0, momentum, form)


@registry.algorithms.add("ssgd*")
class SSGDNoise(SSGD):
    """w_j ← w_a − α ∇L^{μ_j}(w_a) + ξ, ξ ~ N(0, σ²I) drawn anew each step (DPSGD-2020, section 2.1).

    The paper does not say whether each learner has noise of its own. Here all learners add the same ξ, so
    that the mean, the synchronized model, has noise of standard deviation ``sigma`` whatever n is.

    Args:
        sigma: Standard deviation σ of the noise on each weight.
    """

    label, color = "SSGD*", "#0072B2"
    purposes = ("noise",)

    def __init__(self, learners: int, seed: int, sigma: NonNegative) -> None:
        super().__init__(learners, seed)
        self.sigma = sigma

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        draw = torch.randn(weights.shape[1], generator=self.generator("noise", step))
        return super().finish(weights, directions, lr, step) + self.sigma * draw.to(weights)


@registry.algorithms.add("snoo")
class SNOO(OuterStep):
    """SNOO: DiLoCo's outer step for one worker: after K steps s = w − w̃, b ← μb + s, w ← w − ν (μb + s).

    w̃ are the weights after K steps of the optimizer from w (Kallusky et al. 2025, "Step-K Nesterov Outer
    Optimizer"). With one learner it is DiLoCo; μ = 0 is Lookahead.

    Args:
        period: K. Unit: steps.
        outer_lr: ν. Source: Douillard et al. 2023, as for diloco.
        outer_momentum: μ. Source: Douillard et al. 2023, as for diloco.
    """

    label, color = "SNOO", "#DDCC77"
    outer = "nesterov"
    synchronous = True

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        outer_lr: Positive = 0.7,
        outer_momentum: BelowOne = 0.9,
    ) -> None:
        super().__init__(learners, seed, period)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum

    def begin(self, weights: Tensor, step: int) -> None:
        """There is nothing to send; of local SGD, whose steps are not synchronous, this says so."""

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        mean = self.comm.fresh_mean(new, "outer")
        return new.copy_(self._outer(mean, lr) if self._ends_period(step) else mean)

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        outer = self.outer, self.outer_lr, self.outer_momentum
        return max_period_step(self.period, momentum, form, (), "awc", "keep", *outer)


@registry.algorithms.add("gpa")
class GPA(Rule):
    """Generalized primal averaging: z ← z − α u(y), x ← μ_x x + (1 − μ_x) z, y = μ_y x + (1 − μ_y) z.

    The learners' weights are x; gradients are taken at y (Defazio et al. 2025, GPA). μ_x = 0 is SGD. For μ_x
    = μ_y = μ, y follows Nesterov's method with momentum μ: SNOO's weights with K = 1, ν = 1 − μ. An
    optimizer's weight decay is of y; the authors' program decays z unless told otherwise.

    Args:
        mu_x: μ_x. Source: the authors' program, for DiLoCo's 32 local steps.
        mu_y: μ_y. Source: the authors' program.
    """

    label, color = "GPA", "#CC6677"
    needs: Mapping[str, str] = {"mu_y": "mu_x > 0"}
    synchronous = True
    lr_is_factor = True

    def __init__(
        self,
        learners: int,
        seed: int,
        mu_x: BelowOne = 0.9967,
        mu_y: NonNegative = 0.7,
    ) -> None:
        super().__init__(learners, seed)
        if mu_y > 1:
            raise InputError(f"algorithm.mu_y: {mu_y} is not allowed, it must be at most 1")
        self.mu_x, self.mu_y = mu_x, mu_y

    def start(self, weights: Tensor) -> None:
        self.shared = {"z": weights[0].clone()}

    def gradient_points(self, weights: Tensor) -> Tensor:
        return torch.lerp(self.shared["z"], weights, self.mu_y)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        z = torch.sub(self.shared["z"], self.comm.fresh_mean(directions, "directions"), alpha=lr)
        self.shared = {"z": z}
        return torch.lerp(z.expand_as(weights), weights, self.mu_x, out=self._new_weights(weights))

    def follows_mean_direction(self, step: int) -> bool:
        return False

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The roots of (ζ − 1)(ζ − m)(ζ − μ_x) + h p₁ ((1 − μ_x μ_y)ζ − (1 − μ_y)μ_x) must be below 1."""
        p0, p1 = polynomials(0, momentum, form)
        at_y = [1 - self.mu_x * self.mu_y, -(1 - self.mu_y) * self.mu_x]
        return first_crossing(np.convolve(p0, [1, -self.mu_x]), np.convolve(p1, at_y))
