"""Decentralized SGD: mixing with neighbors, adaptive consensus, push-sum, gradient tracking and D²."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import Count, Natural, NonNegative
from landscape.limits import max_stable_step
from landscape.limits.rules import (
    first_unstable,
    max_d2_step,
    max_matching_momentum_step,
    max_mixing_step,
    max_tracking_step,
)
from landscape.training.algorithms.base import Rule
from landscape.training.optimizer.base import OptimizerMemory
from landscape.training.processes.comm import Exchange
from landscape.training.topology.mixing import Mixing, is_file, read_matrix


@registry.algorithms.add("dpsgd")
class DPSGD(Rule):
    """Each learner takes its gradient at its own weights and averages with its neighbors.

    Args:
        mixing: The mixing matrix M: a topology by name, such as full, ring(2) or random-matching, or a .csv,
            .txt or .npy file with a doubly stochastic matrix. Source: DPSGD-2020, Figure 2(a).
        order: "awc" (adapt with combine): w_j ← Σ_k M_jk w_k − α ∇L^{μ_j}(w_j); "atc" (adapt then combine):
            w_j ← Σ_k M_jk (w_k − α ∇L^{μ_k}(w_k)). Source: DPSGD-2020, Eq. 2.
        buffers: "keep": the optimizer's state of each learner is its own. "mix": it is averaged with the
            weights, v_j ← Σ_k M_jk v_k after the step, by the matrix of the step; with momentum in ATC order
            that is DmSGD (Yu et al. 2019; Ying et al. 2021, Algorithm 1). Source: DPSGD-2020's update.
    """

    label, color = "DPSGD", "#009E73"
    needs: Mapping[str, str] = {
        "mixing": "learners > 1",
        "order": "learners > 1 and mixing != none",
        "buffers": "an optimizer with a state and learners > 1 and mixing != none",
    }
    lr_is_factor = True

    def __init__(
        self,
        learners: int,
        seed: int,
        mixing: str = "full",
        order: Literal["awc", "atc"] = "awc",
        buffers: Literal["keep", "mix"] = "keep",
    ) -> None:
        super().__init__(learners, seed)
        self.mixing, self.order, self.buffers = Mixing(mixing, learners, seed), order, buffers
        self._mixed_buffers = 0
        self._mixed = Exchange(torch.empty(0), lambda: torch.empty(0))

    def begin(self, weights: Tensor, step: int) -> None:
        if self.order == "awc":
            self._mixed = self.comm.mix(weights, self.mixing, step)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        if self.order == "awc":
            return torch.sub(self._mixed(), directions, alpha=lr, out=self._new_weights(weights))
        stepped = torch.sub(weights, directions, alpha=lr)
        return self._new_weights(weights).copy_(self.comm.mix(stepped, self.mixing, step)())

    def finish_moved(self, weights: Tensor, points: Tensor, moved: Tensor, lr: float, step: int) -> Tensor:
        """The result in AWC order is w_j − α u_j + Σ_k M_jk (w_k − w_j): three passes over memory."""
        if self.order == "awc" and self.lr_is_factor and points.data_ptr() == weights.data_ptr():
            return self._mixed.add_to(moved)
        return super().finish_moved(weights, points, moved, lr, step)

    def update_optimizer_state(self, optimizer: OptimizerMemory, step: int) -> None:
        mixed = [k for k in optimizer.state if k not in optimizer.counters] if self.buffers == "mix" else []
        self._mixed_buffers = len(mixed)
        if mixed:
            optimizer.state = optimizer.state | {
                k: self.comm.mix(optimizer.state[k], self.mixing, step)().clone() for k in mixed
            }

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.mixing.degree(step) * (1 + self._mixed_buffers), 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit without momentum is that of the mixing; random matching has one in mean square."""
        if not momentum:
            return self.mixing.stability_limit if self.order == "awc" else max_stable_step()
        mixed = self.buffers == "mix"
        if not self.mixing.cycle and self.learners > 1:
            rho = float(self.mixing.modes.real[0, 0])
            return max_matching_momentum_step(rho, momentum, form, self.order, mixed)
        fixed = len(self.mixing.cycle) == 1 or self.learners == 1
        modes = self.mixing.modes[0]
        return max_mixing_step(modes, momentum, form, self.order, mixed=mixed) if fixed else None

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        if momentum == 0:
            return self.mixing.describe(self.order)
        stable = super().describe(momentum, form) or "the limit with this optimizer is not known"
        return self.mixing.describe(self.order, stable)


@registry.algorithms.add("single-merge")
class SingleMerge(DPSGD):
    """DPSGD, and once, after step ``at``, the average of all: w_j ← w_a (Zhu et al. 2025).

    Their merge is at the end: ``at`` is then the number of steps of the run. A run that ends before has none.

    Args:
        at: The step after which all learners average. Unit: steps.
        mixing: The mixing matrix of all other steps, as for dpsgd. Source: DPSGD-2020, section 4.
        order: As for dpsgd. Source: DPSGD-2020, Eq. 2.
    """

    label, color = "single merge", "#661100"

    def __init__(
        self,
        learners: int,
        seed: int,
        at: Count,
        mixing: str = "random-matching",
        order: Literal["awc", "atc"] = "awc",
    ) -> None:
        super().__init__(learners, seed, mixing, order)
        self.at = at

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = super().finish(weights, directions, lr, step)
        return new.copy_(self.comm.fresh_mean(new, "merged")) if step == self.at else new

    def finish_moved(self, weights: Tensor, points: Tensor, moved: Tensor, lr: float, step: int) -> Tensor:
        return Rule.finish_moved(self, weights, points, moved, lr, step)  # which merges

    def communication_cost(self, step: int) -> tuple[float, int]:
        vectors, rounds = super().communication_cost(step)
        return (vectors + self.all_reduce, rounds + 1) if step == self.at else (vectors, rounds)


@registry.algorithms.add("dsgd-ac")
class DSGDAC(DPSGD):
    """w_j ← (1−γ_t) w_j + γ_t Σ_k M_jk w_k − α_t ∇L^{μ_j}(w_j), γ_t = (α_t/α_0)^p: less mixing as α falls.

    So the spread stays while the rate goes down (Wang and Johansson 2026, "DSGD-AC"). α_0 is the schedule's
    rate after the warm-up. While α_t = α_0 it is DPSGD in AWC order.

    Args:
        mixing: The mixing matrix, as for dpsgd. Source: DPSGD-2020, Figure 2(a).
        power: The power p. Source: ours.
        start: So many steps mix fully, γ_t = 1, as in the warm-up of the authors' program. Unit: steps.
            Source: ours; 0 is the rule at every step.
    """

    label, color = "DSGD-AC", "#999933"
    needs: Mapping[str, str] = {
        "mixing": "learners > 1",
        "power": "a rate that changes and learners > 1",
        "start": "a rate that changes and power > 0 and learners > 1",
    }
    lr_is_factor = False
    uses_peak_lr = True

    def __init__(
        self, learners: int, seed: int, mixing: str = "full", power: NonNegative = 1.0, start: Natural = 0
    ) -> None:
        super().__init__(learners, seed, mixing)
        self.power, self.first = power, start

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        gamma = (lr / self.peak_lr) ** self.power if step > self.first else 1.0
        new = torch.lerp(weights, self._mixed(), gamma, out=self._new_weights(weights))
        return new.sub_(directions, alpha=lr)


@registry.algorithms.add("sgp")
class SGP(Rule):
    """x_i ← Σ_j P_ij (x_j − α ∇L^{μ_j}(z_j)), w_i ← Σ_j P_ij w_j, z_i = x_i/w_i (Assran et al. 2019, Alg. 1).

    P's columns sum to 1: learner j sends shares of its vector, and needs no answer. The learners' weights are
    z, which the paper evaluates. They move by z_i ← Σ_j Q_ij (z_j − α u_j/w_j) with Q_ij = P_ij w_j/w_i',
    whose rows sum to 1; w (n,) is state.

    Args:
        graph: "random": each learner keeps half and sends half to one other, drawn at each step. A .csv, .txt
            or .npy file: P itself. Else a mixing by name (one-peer-exponential, exponential, ring(k), …),
            which is doubly stochastic, so that the push-sum weights w stay 1. Source: Assran et al. 2019.
    """

    label, color = "SGP", "#882255"
    purposes = ("push",)
    lr_is_factor = True

    needs: Mapping[str, str] = {"graph": "learners > 1"}

    def __init__(self, learners: int, seed: int, graph: str = "one-peer-exponential") -> None:
        super().__init__(learners, seed)
        self.graph = graph
        self.mixing, self.fixed = None, None
        if is_file(graph):
            self.fixed = read_matrix("algorithm.graph", Path(graph), learners, sums=("column",))
            parts, _ = connected_components(self.fixed > 0, directed=True, connection="strong")
            if parts > 1:
                raise InputError(
                    f"algorithm.graph: {graph} must be strongly connected, it has {parts} components"
                )
        elif graph != "random":
            self.mixing = Mixing(graph, learners, seed, where="algorithm.graph")

    def start(self, weights: Tensor) -> None:
        self.shared = {"push_weights": torch.ones(self.learners, dtype=torch.float64)}

    def matrix(self, step: int) -> Array:
        """P (n, n) float64 of ``step``; column j has the shares of learner j."""
        if self.mixing:
            return self.mixing.matrix(step)
        if self.fixed is not None:
            return self.fixed
        n = self.learners
        p = np.eye(n)
        if n > 1:
            hop = torch.randint(1, n, (n,), generator=self.generator("push", step)).numpy()
            p *= 0.5
            p[(np.arange(n) + hop) % n, np.arange(n)] = 0.5
        return p

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        w, p = self.shared["push_weights"], self.matrix(step)
        local_w = w[self.comm.local, None].to(weights)
        stepped = torch.addcdiv(weights, directions, local_w.expand_as(directions), value=-lr)
        new = torch.from_numpy(p) @ w
        q = p * w.numpy() / new.numpy()[:, None]
        result = self._new_weights(weights).copy_(self.comm.combine(stepped, q)())
        self.shared = {"push_weights": new}
        return result

    def follows_mean_direction(self, step: int) -> bool:
        return self.mixing is not None  # otherwise w_a is not the mean of x, which moves by −α mean u

    def communication_cost(self, step: int) -> tuple[float, int]:
        p = self.matrix(step)
        return (np.count_nonzero(p) - np.count_nonzero(np.diag(p))) / self.learners, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is that of DPSGD in ATC order where w stays 1; on a fixed graph w is where it settles.

        On one quadratic x ← P (x − ηλ x/w): learners of little weight w take the largest steps.
        """
        if self.mixing and not momentum:
            return max_stable_step()
        if self.mixing and len(self.mixing.cycle) == 1:
            return max_mixing_step(self.mixing.modes[0], momentum, form, "atc")
        if self.fixed is None or momentum:
            return None
        p, w = self.fixed, np.linalg.matrix_power(self.fixed, 2**20).sum(1)
        if not np.allclose(p @ w, w):
            return None  # w does not converge on this graph
        return first_unstable(lambda h: float(np.abs(np.linalg.eigvals(p - h * p / w)).max()), 2 * w.max())


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
    needs: Mapping[str, str] = dict.fromkeys(("mixing", "order"), "learners > 1")

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
    needs: Mapping[str, str] = {"mixing": "learners > 1"}

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
