"""Local steps with an average every so many: local SGD, and outer steps of all learners or of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, Natural, Positive
from landscape.limits.rules import max_paired_outer_step, max_period_step
from landscape.training.algorithms.base import Rule
from landscape.training.algorithms.dpsgd import DPSGD
from landscape.training.optimizer.base import OptimizerMemory
from landscape.training.topology.mixing import Mixing

Buffers = Literal["keep", "reset", "average"]


@registry.algorithms.add("local-sgd")
class LocalSGD(Rule):
    """w_j ← w_j − α u_j at every step, and w_j ← w_a after every ``period`` H of them (LocalSGD-2021).

    H = 1 is synchronous SGD. torch's PeriodicModelAverager averages first after *one* local step: its
    warmup_steps = start + H − 1 gives the steps of this rule.

    Args:
        period: H, the number of local steps between averages of all learners. Unit: steps.
        start: So many synchronous steps first (post-local SGD, Lin et al. 2020); the first average of local
            steps is that of step start + H. Unit: steps. Source: ours; 0 is plain local SGD.
        nodes: So many nodes of equally many learners, which average among themselves (hierarchical local SGD,
            Lin et al. 2020). Source: ours; 1 is plain local SGD.
        node_period: Steps between the averages within a node; it must divide ``period``. Unit: steps. Source:
            ours; 0 is every step, as 1.
        mixing: Steps in between are DPSGD's with this mixing matrix (gossip with periodic averaging, Chen et
            al. 2021); "none": there is no exchange between averages. Source: LocalSGD-2021.
        order: The order of these mixed steps, as for dpsgd. Source: DPSGD-2020, Eq. 2.
        buffers: What happens to the optimizer's state at an average of all: it is kept, reset to zero, or
            averaged, too. Source: torch's PostLocalSGDOptimizer.
    """

    label, color = "local SGD", "#E69F00"
    needs: Mapping[str, str] = {
        "start": "learners > 1 and period > 1 or learners > 1 and an optimizer other than plain SGD",
        "nodes": "nodes < learners and node_period < period and period > 1 and start < steps",
        "node_period": "nodes > 1",
        "mixing": "learners > 1 and period > 1 and start < steps",
        "order": "mixing != none",
        "buffers": "an optimizer with a state and start + period <= steps and learners > 1"
        " or an optimizer with a state and start + period <= steps and buffers != average",
    }
    lr_is_factor = True
    #: The outer step at the average of a period, with its rate and its momentum.
    outer: ClassVar[Literal["none", "slowmo", "nesterov"]] = "none"
    outer_lr, outer_momentum = 1.0, 0.0

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        start: Natural = 0,
        nodes: int = 1,
        node_period: Natural = 0,
        mixing: str = "none",
        order: Literal["awc", "atc"] = "awc",
        buffers: Buffers = "keep",
    ) -> None:
        super().__init__(learners, seed)
        if nodes < 1 or learners % nodes:
            raise InputError(f"algorithm.nodes: {nodes} is not allowed, it must divide {learners} learners")
        if nodes > 1 and mixing != "none":
            raise InputError(
                f"algorithm.nodes and algorithm.mixing: {nodes} and '{mixing}' are not allowed together"
            )
        if nodes > 1 and period % max(1, node_period):
            raise InputError(
                f"algorithm.node_period: {node_period} is not allowed, it must divide the period {period}"
            )
        self.period, self.first, self.buffers, self.node_period = period, start, buffers, max(1, node_period)
        self.nodes = Mixing(f"nodes({nodes})", learners, seed) if nodes > 1 else None
        self.base = DPSGD(learners, seed, mixing, order) if mixing != "none" else None
        self._averaged = 0

    def _ends_period(self, step: int) -> bool:
        """Say whether ``step`` ends a period of local steps with the average of all."""
        return step > self.first and (step - self.first) % self.period == 0

    def begin(self, weights: Tensor, step: int) -> None:
        self.synchronous = step <= self.first
        if self.base:
            self.base.comm = self.comm
            if not self.synchronous:
                self.base.begin(weights, step)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        if self.base and step > self.first:
            new = self.base.finish(weights, directions, lr, step)
        else:
            new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        if self._ends_period(step) or step <= self.first:
            mean = self.comm.fresh_mean(new, "outer")
            return new.copy_(self._outer(mean, lr) if self._ends_period(step) else self._anchored(mean))
        if self.nodes and (step - self.first) % self.node_period == 0:
            new.copy_(self.comm.mix(new, self.nodes, step)())
        return new

    def _outer(self, mean: Tensor, lr: float) -> Tensor:
        """The weights (P,) from which all learners go on, given their mean after a period."""
        return mean

    def _anchored(self, mean: Tensor) -> Tensor:
        """``mean`` (P,) after a synchronous step, from which an outer step may have to start."""
        return mean

    def update_optimizer_state(self, optimizer: OptimizerMemory, step: int) -> None:
        # After synchronous steps all have the optimizer of the mean gradient.
        average = step == self.first or (self._ends_period(step) and self.buffers == "average")
        averaged = {k: t for k, t in optimizer.state.items() if average and k not in optimizer.counters}
        self._averaged = len(averaged)
        if average:
            means = {k: self.comm.fresh_mean(t, "buffers").expand_as(t).clone() for k, t in averaged.items()}
            optimizer.state = optimizer.state | means
        elif self._ends_period(step) and self.buffers == "reset":
            optimizer.reset()

    def communication_cost(self, step: int) -> tuple[float, int]:
        if step <= self.first:
            return self.all_reduce, 1
        vectors, rounds = self.base.communication_cost(step) if self.base else (0.0, 0)
        if self._ends_period(step):
            return vectors + self.all_reduce * (1 + self._averaged), rounds + 1
        if self.nodes and (step - self.first) % self.node_period == 0:
            size = np.count_nonzero(self.nodes.matrix(step)[0])  # learners of a node
            return 2 * (size - 1) / size, 1
        return vectors, rounds

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        omegas, order = [1.0], "awc"
        if self.base and self.learners > 1:
            if momentum and self.buffers == "keep" and len(self.base.mixing.cycle) != 1:
                return None
            omegas, order = self.base.mixing.modes[0], self.base.order
        outer = self.outer, self.outer_lr, self.outer_momentum
        limit = max_period_step(self.period, momentum, form, omegas, order, self.buffers, *outer)
        if not self.nodes or not momentum or self.buffers != "keep":
            return limit
        # Disagreement within a node loses x at its averages, and keeps v.
        return None if self.outer != "none" else min(limit, max_period_step(self.node_period, momentum, form))


class OuterStep(LocalSGD):
    """Local SGD whose averages are the gradients of an outer optimizer, at the ``anchor`` x_old."""

    needs: Mapping[str, str] = {key: need for key, need in LocalSGD.needs.items() if key != "start"}

    def start(self, weights: Tensor) -> None:
        self.shared = {"anchor": weights[0].clone(), "slow_momentum": torch.zeros_like(weights[0])}

    def _anchored(self, mean: Tensor) -> Tensor:
        self.shared = self.shared | {"anchor": mean.clone()}
        return mean

    def _outer(self, mean: Tensor, lr: float) -> Tensor:
        moved = self.shared["anchor"] - mean
        slow = self.outer_momentum * self.shared["slow_momentum"]
        if self.outer == "nesterov":
            slow += moved
            anchor = self.shared["anchor"] - self.outer_lr * (moved + self.outer_momentum * slow)
        else:
            if lr:  # at the very end of a cosine schedule it is 0, and so is the step
                slow += moved / lr
            anchor = self.shared["anchor"] - self.outer_lr * lr * slow
        self.shared = {"anchor": anchor, "slow_momentum": slow}
        return anchor

    def follows_mean_direction(self, step: int) -> bool:
        return not self._ends_period(step)


@registry.algorithms.add("slowmo")
class SlowMo(OuterStep):
    """SlowMo: after ``period`` steps average to x̄, then u ← βu + (x_old − x̄)/γ, x_old ← x_old − a γ u.

    γ is the learning rate of the period's last step (Wang et al. 2020, Algorithm 1; LocalSGD-2021). a = 1 and
    β = 0 is local SGD, whose options it has.

    Args:
        slow_lr: a. Source: ours; with a = 1 the outer step without momentum is the average itself.
        slow_momentum: β. Source: ours.
    """

    label, color = "SlowMo", "#CC79A7"
    lr_is_factor = False
    outer = "slowmo"

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        slow_lr: Positive = 1.0,
        slow_momentum: BelowOne = 0.5,
        start: Natural = 0,
        nodes: int = 1,
        node_period: Natural = 0,
        mixing: str = "none",
        order: Literal["awc", "atc"] = "awc",
        buffers: Buffers = "keep",
    ) -> None:
        super().__init__(learners, seed, period, start, nodes, node_period, mixing, order, buffers)
        self.outer_lr, self.outer_momentum = slow_lr, slow_momentum


@registry.algorithms.add("diloco")
class DiLoCo(OuterStep):
    """DiLoCo: after ``period`` steps Δ = x_old − x̄, v ← μv + Δ, x_old ← x_old − ν (Δ + μv), Nesterov's.

    The rule is Algorithm 1 of Douillard et al. 2023. Their inner optimizer is AdamW, whose state is kept;
    here it is the recipe's. ``period``, ``start`` and ``buffers`` are those of local SGD.

    Args:
        outer_lr: ν. Source: Douillard et al. 2023.
        outer_momentum: μ. Source: Douillard et al. 2023.
    """

    label, color = "DiLoCo", "#332288"
    outer = "nesterov"

    def __init__(
        self,
        learners: int,
        seed: int,
        period: Count,
        outer_lr: Positive = 0.7,
        outer_momentum: BelowOne = 0.9,
        start: Natural = 0,
        buffers: Buffers = "keep",
    ) -> None:
        super().__init__(learners, seed, period, start, buffers=buffers)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum


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
        mixing: Who averages with whom at the end of a period, as for dpsgd; a cycle goes on by one matrix
            from period to period. Source: Kolehmainen et al. 2025.
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
        slow = torch.add(
            self.outer_momentum * self.state["slow_momentum"], mixed - anchor, alpha=self.outer_lr
        )
        self.state = {"anchor": anchor + slow, "slow_momentum": slow}
        return new.copy_(self.state["anchor"])

    def follows_mean_direction(self, step: int) -> bool:
        return step % self.period != 0

    def communication_cost(self, step: int) -> tuple[float, int]:
        ends = step % self.period == 0
        return (self.mixing.degree(step // self.period), 1) if ends else (0.0, 0)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is known without momentum, for one matrix, and for random pairs in mean square."""
        if momentum or len(self.mixing.cycle) > 1:
            return None
        modes, drawn = self.mixing.modes[0], not self.mixing.cycle and self.learners > 1
        return max_paired_outer_step(self.period, self.outer_lr, self.outer_momentum, modes, drawn)
