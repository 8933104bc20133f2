"""Decentralized SGD for data that differ between learners: gradient tracking and D²."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.limits import max_stable_step
from landscape.limits.rules import max_d2_step, max_tracking_step
from landscape.training.algorithms.base import Rule
from landscape.training.processes.comm import Exchange
from landscape.training.topology.mixing import Mixing

# In place of a limit that is None.
UNKNOWN = "the limit is not known"


@registry.algorithms.add("gradient-tracking")
class GradientTracking(Rule):
    """Each learner moves along y_j, its estimate of the learners' mean direction, instead of its own u_j.

    AWC order is DIGing (Nedić, Olshevsky and Shi 2017): y_j ← Σ_k M_jk y_k + u_j − u_j(t−1),
    w_j ← Σ_k M_jk w_k − α y_j. ATC order is GT-DSGD (Xin, Khan and Kar 2021): y_j ← Σ_k M_jk
    (y_k + u_k − u_k(t−1)), w_j ← Σ_k M_jk (w_k − α y_k). y and u(0) are 0 at first, so the mean of y_j is
    that of u_j, and w_a moves by −α times it.

    Where the optimizer has momentum, u is the momentum (Momentum Tracking, Takezawa et al. 2023). With the
    same M in every step that is momentum of the tracked gradient (GT-DSGDm).

    Args:
        mixing: The mixing matrix, as for dpsgd. Source: DPSGD-2020, Figure 2(a).
        order: "awc" or "atc", as for dpsgd. Source: DPSGD-2020, Eq. 2.
    """

    label, color = "gradient tracking", "#AA4499"

    def __init__(
        self, learners: int, seed: int, mixing: str = "full", order: Literal["awc", "atc"] = "awc"
    ) -> None:
        super().__init__(learners, seed)
        self.mixing, self.order = Mixing(mixing, learners, seed), order
        self._mixed = Exchange(torch.empty(0), lambda: torch.empty(0))

    def start(self, weights: Tensor) -> None:
        self.state = {"tracker": torch.zeros_like(weights), "direction": torch.zeros_like(weights)}

    def begin(self, weights: Tensor, step: int) -> None:
        if self.order == "awc":  # one message has both
            both = torch.cat([weights, self.state["tracker"]], 1)
            self._mixed = self.comm.mix(both, self.mixing, step)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new, change = self._new_weights(weights), directions - self.state["direction"]
        if self.order == "awc":
            mixed = self._mixed()
            tracker = mixed[:, weights.shape[1] :] + change
            torch.sub(mixed[:, : weights.shape[1]], tracker, alpha=lr, out=new)
        else:
            tracker = self.comm.mix(self.state["tracker"] + change, self.mixing, step)().clone()
            new.copy_(self.comm.mix(torch.sub(weights, tracker, alpha=lr), self.mixing, step)())
        self.state = {"tracker": tracker, "direction": directions.clone()}
        return new

    def communication_cost(self, step: int) -> tuple[float, int]:
        return 2 * self.mixing.degree(step), 1 if self.order == "awc" else 2

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is known where the matrix is the same in every step."""
        if self.learners == 1:
            return max_stable_step(0, momentum, form)
        if len(self.mixing.cycle) != 1:
            return None
        return max_tracking_step(self.mixing.modes[0], momentum, form, self.order)

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        return self.mixing.describe(self.order, super().describe(momentum, form) or UNKNOWN)


@registry.algorithms.add("d2")
class D2(Rule):
    """D²: w_j ← Σ_k M_jk (2 w_k − w_k(t−1) − α u_k + α(t−1) u_k(t−1)), at first Σ_k M_jk (w_k − α u_k).

    The rule is Algorithm 1 of Tang et al. 2018, who need a symmetric M with ω_min > −1/3: its disagreement
    modes evolve by z² − 2ωz + ω for α = 0. What differs between the learners' gradients cancels, and w_a
    moves by −α times the mean direction.

    Args:
        mixing: A mixing matrix that is the same in every step, as for dpsgd. Source: DPSGD-2020, Figure 2(a).
    """

    label, color = "D²", "#117733"

    def __init__(self, learners: int, seed: int, mixing: str = "full") -> None:
        super().__init__(learners, seed)
        self.mixing = Mixing(mixing, learners, seed)
        refused, m = f"algorithm.mixing: '{mixing}' is not allowed with d2", self.mixing.cycle
        if len(m) != 1 or not np.allclose(m[0], m[0].T, rtol=0, atol=1e-9):
            raise InputError(f"{refused}, the matrix must be symmetric and the same in every step")
        if (least := self.mixing.omega_min) <= -1 / 3 + 1e-9:
            raise InputError(
                f"{refused} and {learners} learners, its smallest eigenvalue {least:.4g} must be above "
                "-1/3; lazy(a, FORM) raises it"
            )

    def start(self, weights: Tensor) -> None:
        self.state = {"stepped": weights.clone()}

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        stepped = torch.sub(weights, directions, alpha=lr)
        ahead = stepped + weights - self.state["stepped"]
        self.state = {"stepped": stepped}
        return self._new_weights(weights).copy_(self.comm.mix(ahead, self.mixing, step)())

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.mixing.degree(step), 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        return max_d2_step(self.mixing.modes[0], momentum, form)

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        return self.mixing.describe("atc", super().describe(momentum, form) or UNKNOWN)
