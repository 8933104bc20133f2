"""Decentralized SGD: mixing with neighbors, push-sum, gradient tracking, D², pairs, and older gradients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from landscape import limits
from landscape.core import registry
from landscape.core.devices import double
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import BelowOne, Count, Natural, NonNegative, Positive
from landscape.training.algorithms import Rule
from landscape.training.optimizer.base import OptimizerMemory
from landscape.training.processes.comm import Exchange
from landscape.training.topology import Mixing, is_file, read_matrix


@registry.algorithms.add("dpsgd")
class DPSGD(Rule):
    """Each learner computes its gradient at its own weights, and averages its weights with its neighbors'.

    Args:
        mixing: The mixing matrix M: a topology by name, such as full, ring(2) or random-matching, or a .csv,
            .txt or .npy file with a doubly stochastic matrix. Source: DPSGD-2020, Figure 2(a).
        order: "awc" (adapt with combine): w_j ← Σ_k M_jk w_k − α ∇L^{μ_j}(w_j); "atc" (adapt then combine):
            w_j ← Σ_k M_jk (w_k − α ∇L^{μ_k}(w_k)). Source: DPSGD-2020, Eq. 2.
        buffers: "keep": each learner keeps its own state of the optimizer. "mix": the states are averaged
            like the weights, v_j ← Σ_k M_jk v_k after the step, by the matrix of the step; with momentum in
            ATC order this is DmSGD (Yu et al. 2019; Ying et al. 2021, Algorithm 1). Source: DPSGD-2020's
            update.
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
        """Return, in AWC order, w_j − α u_j + Σ_k M_jk (w_k − w_j), by three passes over memory.

        A subclass with another :meth:`finish` has another result.
        """
        uses_this_finish = self.order == "awc" and type(self).finish is DPSGD.finish
        if uses_this_finish and self.lr_is_factor and points.data_ptr() == weights.data_ptr():
            return self._mixed.add_to(moved)
        return super().finish_moved(weights, points, moved, lr, step)

    def update_optimizer_state(self, optimizer: OptimizerMemory, step: int) -> None:
        if self.buffers == "mix":
            self._mixed_buffers = self._average_state(
                optimizer, lambda t: self.comm.mix(t, self.mixing, step)()
            )

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.mixing.degree(step) * (1 + self._mixed_buffers), 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Return the limit; without momentum it is that of the mixing, in mean square for random matching."""
        if not momentum:
            return self.mixing.stability_limit if self.order == "awc" else limits.max_stable_step()
        mixed = self.buffers == "mix"
        if not self.mixing.cycle and self.learners > 1:
            rho = float(self.mixing.modes.real[0, 0])
            return limits.max_matching_momentum_step(rho, momentum, form, self.order, mixed)
        fixed = len(self.mixing.cycle) == 1 or self.learners == 1
        modes = self.mixing.modes[0]
        return limits.max_mixing_step(modes, momentum, form, self.order, mixed=mixed) if fixed else None


@registry.algorithms.add("single-merge")
class SingleMerge(DPSGD):
    """DPSGD, and once, after step ``at``, the average of all: w_j ← w_a (Zhu et al. 2025).

    The paper merges at the end: ``at`` is then the number of steps of the run. A shorter run has no merge.

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

    def communication_cost(self, step: int) -> tuple[float, int]:
        vectors, rounds = super().communication_cost(step)
        return (vectors + self.all_reduce, rounds + 1) if step == self.at else (vectors, rounds)


@registry.algorithms.add("dsgd-ac")
class DSGDAC(DPSGD):
    """w_j ← (1−γ_t) w_j + γ_t Σ_k M_jk w_k − α_t ∇L^{μ_j}(w_j), γ_t = (α_t/α_0)^p: less mixing as α falls.

    The spread then remains while the rate falls (Wang and Johansson 2026, "DSGD-AC"). α_0 is the schedule's
    rate after the warm-up. With α_t = α_0 the rule is DPSGD in AWC order.

    Args:
        mixing: The mixing matrix, as for dpsgd. Source: DPSGD-2020, Figure 2(a).
        power: The power p. Source: ours.
        start: Number of steps at the start that mix fully, γ_t = 1, as in the warm-up of the authors'
            program. Unit: steps. Source: ours; 0 is the rule at every step.
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
    z, which the paper evaluates: z_i ← Σ_j Q_ij (z_j − α u_j/w_j), where the rows of Q_ij = P_ij w_j/w_i' sum
    to 1. The push-sum weights w (n,) are part of the state.

    Args:
        graph: "random": each learner keeps half and sends half to another one, drawn at each step. A .csv,
            .txt or .npy file: P itself. Otherwise a mixing by name (one-peer-exponential, exponential,
            ring(k), …), which is doubly stochastic, so that the push-sum weights w remain 1. Source: Assran
            et al. 2019.
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
            self.fixed = read_matrix("algorithm.graph", Path(graph), learners, axes=(0,))
            components, _ = connected_components(self.fixed > 0, directed=True, connection="strong")
            if components > 1:
                words = f"connected, it has {components} components"
                raise InputError("algorithm.graph", graph, allowed=words)
        elif graph != "random":
            self.mixing = Mixing(graph, learners, seed, where="algorithm.graph")

    def start(self, weights: Tensor) -> None:
        self.shared = {"push_weights": torch.ones(self.learners, dtype=torch.float64)}

    def matrix(self, step: int) -> Array:
        """Return the matrix (n, n) of ``step`` in float64; column j has the shares of learner j."""
        if self.mixing:
            return self.mixing.matrix(step)
        if self.fixed is not None:
            return self.fixed
        n = self.learners
        p = np.eye(n)
        if n > 1:
            senders = np.arange(n)
            offsets = torch.randint(1, n, (n,), generator=self.generator("push", step)).numpy()
            p *= 0.5
            p[(senders + offsets) % n, senders] = 0.5
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
        """Return the limit of DPSGD in ATC order if w stays 1, or that of a fixed graph with the final w.

        On one quadratic x ← P (x − ηλ x/w): learners of little weight w take the largest steps.
        """
        if self.mixing and not momentum:
            return limits.max_stable_step()
        if self.mixing and len(self.mixing.cycle) == 1:
            return limits.max_mixing_step(self.mixing.modes[0], momentum, form, "atc")
        if self.fixed is None or momentum:
            return None
        p, w = self.fixed, np.linalg.matrix_power(self.fixed, 2**20).sum(1)
        if not np.allclose(p @ w, w):
            return None  # w does not converge on this graph
        return limits.first_unstable(
            lambda h: float(np.abs(np.linalg.eigvals(p - h * p / w)).max()), 2 * w.max()
        )


@registry.algorithms.add("gradient-tracking")
class GradientTracking(Rule):
    """Each learner moves along y_j, its estimate of the learners' mean direction, instead of its own u_j.

    AWC order is DIGing (Nedić, Olshevsky and Shi 2017): y_j ← Σ_k M_jk y_k + u_j − u_j(t−1),
    w_j ← Σ_k M_jk w_k − α y_j. ATC order is GT-DSGD (Xin, Khan and Kar 2021): y_j ← Σ_k M_jk
    (y_k + u_k − u_k(t−1)), w_j ← Σ_k M_jk (w_k − α y_k). y and u(0) are 0 at first, so that the mean of y_j
    equals the mean of u_j, and w_a moves by −α times this mean.

    If the optimizer has momentum, u is the momentum (Momentum Tracking, Takezawa et al. 2023). With the same
    M in every step the rule is momentum of the tracked gradient (GT-DSGDm).

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
        if self.order == "awc":  # one message has weights and trackers
            rows = torch.cat([weights, self.state["tracker"]], 1)
            self._mixed = self.comm.mix(rows, self.mixing, step)

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
        """Return the limit if the matrix is the same in every step; otherwise None."""
        if self.learners == 1:
            return limits.max_stable_step(0, momentum, form)
        if len(self.mixing.cycle) != 1:
            return None
        return limits.max_tracking_step(self.mixing.modes[0], momentum, form, self.order)


@registry.algorithms.add("d2")
class D2(Rule):
    """D²: w_j ← Σ_k M_jk (2 w_k − w_k(t−1) − α u_k + α(t−1) u_k(t−1)), at first Σ_k M_jk (w_k − α u_k).

    The rule is Algorithm 1 of Tang et al. 2018, who need a symmetric M with ω_min > −1/3: its disagreement
    modes evolve by z² − 2ωz + ω for α = 0. The differences of the learners' gradients cancel, and w_a moves
    by −α times the mean direction.

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
        if not self.mixing.omega_min > -1 / 3 + 1e-9:
            words = f"{refused}, its smallest eigenvalue {self.mixing.omega_min:.4g} must be above -1/3"
            raise InputError(words, otherwise="lazy(a, FORM), which raises it")

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
        return limits.max_d2_step(self.mixing.modes[0], momentum, form)


@registry.algorithms.add("noloco")
class NoLoCo(Rule):
    """NoLoCo: after ``period`` H steps δ_j ← μδ_j + ν (w̄ − φ̄) + γ (φ̄ − φ_j), φ_j ← φ_j + δ_j, w_j ← φ_j.

    w̄ and φ̄ are means over learner j and its random partner, φ_j are its weights at the end of the last
    period (Kolehmainen et al. 2025, modified Nesterov momentum). γ = ν as in the authors' program, so that
    only w_j has to be sent: δ_j ← μδ_j + ν (w̄ − φ_j). An odd learner is its own partner.

    Args:
        period: H. Unit: steps.
        outer_lr: ν. Source: the authors' program.
        outer_momentum: μ. Source: the authors' program.
        mixing: Who averages with whom at the end of a period, as for dpsgd; each period takes the next matrix
            of a cycle. Source: Kolehmainen et al. 2025.
    """

    label, color = "NoLoCo", "#44AA99"
    needs: Mapping[str, str] = {"mixing": "learners > 1"}
    lr_is_factor = True

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        outer_lr: Positive = 0.7,
        outer_momentum: BelowOne = 0.5,
        mixing: str = "random-matching",
    ) -> None:
        super().__init__(learners, seed)
        self.period, self.mixing = period, Mixing(mixing, learners, seed)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum

    def start(self, weights: Tensor) -> None:
        self.state = {"anchor": weights.clone(), "slow_momentum": torch.zeros_like(weights)}

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        if step % self.period:
            return new
        anchor = self.state["anchor"]
        mixed = self.comm.mix(new, self.mixing, step // self.period)()
        slow = self.outer_momentum * self.state["slow_momentum"]
        slow.add_(mixed - anchor, alpha=self.outer_lr)
        self.state = {"anchor": anchor + slow, "slow_momentum": slow}
        return new.copy_(self.state["anchor"])

    def follows_mean_direction(self, step: int) -> bool:
        return step % self.period != 0

    def communication_cost(self, step: int) -> tuple[float, int]:
        ends = step % self.period == 0
        return (self.mixing.degree(step // self.period), 1) if ends else (0.0, 0)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Return the limit without momentum for one matrix, or in mean square for random pairs, or None."""
        if momentum or len(self.mixing.cycle) > 1:
            return None
        modes, random = self.mixing.modes[0], not self.mixing.cycle and self.learners > 1
        return limits.max_noloco_step(self.period, self.outer_lr, self.outer_momentum, modes, random)


#: The age of the gradients at a step: the mean over the learners.
DELAY = {"delay": "steps"}


@registry.algorithms.add("ad-psgd")
class ADPSGD(DPSGD):
    """w_j(t+1) = Σ_k M_jk(t) w_k(t) − α ∇L^{μ_j}(w_j(t−d)): pairs average while gradients are under way.

    AD-PSGD (Lian et al. 2018): X ← X W_k − γ ∂g(X̂_k), W_k averaging one random pair and X̂_k older weights.
    There one learner acts at a time, at its own pace; here all act in each step, paired at random, which is
    the same with n events a step and no learner left behind. τ = 0 is DPSGD in AWC order.

    Args:
        delay: τ, the age of gradients. Unit: steps. Source: ours; a gradient is begun one exchange ago.
        schedule: "fixed": d is τ for all; "random": each learner draws d from 0…τ at each step (bounded
            staleness, Assumption 1 of Lian et al. 2018). Source: ours.
        mixing: The mixing matrix, as for dpsgd. Source: Lian et al. 2018.
    """

    label, color = "AD-PSGD", "#56B4E9"
    needs: Mapping[str, str] = {"schedule": "delay > 0", "mixing": "learners > 1"}
    columns = DELAY
    purposes = ("delay",)

    def __init__(
        self,
        learners: int,
        seed: int,
        delay: Natural = 1,
        schedule: Literal["fixed", "random"] = "fixed",
        mixing: str = "random-matching",
    ) -> None:
        super().__init__(learners, seed, mixing)
        self.delay, self.schedule = delay, schedule
        self._slots, self._mean_delay = torch.empty(0), 0.0

    def start(self, weights: Tensor) -> None:
        self.state = {"past": weights[:, None].repeat(1, self.delay + 1, 1)}

    def begin(self, weights: Tensor, step: int) -> None:
        super().begin(weights, step)
        size = self.delay + 1
        self.state["past"][:, (step - 1) % size] = weights
        longest = min(self.delay, step - 1)
        delays = torch.full((self.learners,), longest)
        if self.schedule == "random":
            draw = self.generator("delay", step)
            delays = torch.randint(longest + 1, (self.learners,), generator=draw)
        self._mean_delay = float(double(delays).mean())
        self._slots = (step - 1 - delays[self.comm.local]) % size

    def gradient_points(self, weights: Tensor) -> Tensor:
        slots = self._slots.to(weights.device)
        return self.state["past"][torch.arange(len(weights), device=weights.device), slots]

    def record(self, step: int) -> dict[str, float]:
        return {"delay": self._mean_delay}

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Return the limit of the fixed schedule, in mean square for random pairs; otherwise None."""
        if not self.delay:
            return super().stability_limit(momentum, form)
        if self.schedule == "random" or len(self.mixing.cycle) > 1:
            return None
        if self.mixing.cycle or self.learners == 1:
            return limits.max_mixing_step(self.mixing.modes[0], momentum, form, "awc", self.delay)
        return None if momentum else limits.max_matching_step(float(self.mixing.modes.real[0, 0]), self.delay)
