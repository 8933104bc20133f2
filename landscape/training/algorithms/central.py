"""Rules that average all learners, at every step or after a period, and those of one worker or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from landscape import limits
from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Count, Natural, NonNegative, Positive, Within
from landscape.training.algorithms import Rule
from landscape.training.algorithms.dpsgd import DELAY, DPSGD
from landscape.training.optimizer.base import OptimizerMemory
from landscape.training.topology import Mixing

Buffers = Literal["keep", "reset", "average"]


@registry.algorithms.add("local-sgd")
class LocalSGD(Rule):
    """w_j ← w_j − α u_j at every step, and w_j ← w_a after every ``period`` H of them (LocalSGD-2021).

    H = 1 is synchronous SGD. torch's PeriodicModelAverager averages first after *one* local step: with
    warmup_steps = start + H − 1 it makes the steps of this rule.

    Args:
        period: H, the number of local steps between averages of all learners. Unit: steps.
        start: Number of synchronous steps at the start (post-local SGD, Lin et al. 2020); the first average
            of local steps is that of step start + H. Unit: steps. Source: ours; 0 is plain local SGD.
        nodes: Number of nodes, whose equal numbers of learners average among themselves (hierarchical local
            SGD, Lin et al. 2020). Source: ours; 1 is plain local SGD.
        node_period: Steps between the averages within a node; it must divide ``period``. Unit: steps. Source:
            ours; 0 is every step, as 1.
        mixing: The mixing matrix of DPSGD's steps between averages (gossip with periodic averaging, Chen et
            al. 2021); "none": there is no exchange between averages. Source: LocalSGD-2021.
        order: The order of these mixed steps, as for dpsgd. Source: DPSGD-2020, Eq. 2.
        buffers: Whether an average of all learners keeps the optimizer's state, resets it to zero, or
            averages it, too. Source: torch's PostLocalSGDOptimizer.
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
        self, learners: int, seed: int, period: Count, start: Natural = 0, nodes: Count = 1,
        node_period: Natural = 0, mixing: str = "none", order: Literal["awc", "atc"] = "awc",
        buffers: Buffers = "keep",
    ) -> None:  # fmt: skip
        super().__init__(learners, seed)
        if nodes > 1 and mixing != "none":
            raise InputError("algorithm.nodes, algorithm.mixing: only one of the two is allowed")
        if nodes > 1 and period % max(1, node_period):
            raise InputError("algorithm.node_period", node_period, allowed=f"a divisor of period = {period}")
        self.period, self.first, self.buffers, self.node_period = period, start, buffers, max(1, node_period)
        self.nodes = Mixing(f"nodes({nodes})", learners, seed, "algorithm.nodes") if nodes > 1 else None
        self.base = DPSGD(learners, seed, mixing, order) if mixing != "none" else None
        self._averaged = 0

    def _ends_period(self, step: int) -> bool:
        """Return whether ``step`` ends a period of local steps with the average of all."""
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
            return new.copy_(self._outer(self.comm.fresh_mean(new, "outer"), lr, step))
        if self.nodes and (step - self.first) % self.node_period == 0:
            new.copy_(self.comm.mix(new, self.nodes, step)())
        return new

    def _outer(self, mean: Tensor, lr: float, step: int) -> Tensor:
        """Return the weights (P,) from which all continue, given the mean after a period or a first step."""
        return mean

    def update_optimizer_state(self, optimizer: OptimizerMemory, step: int) -> None:
        self._averaged = 0
        # After synchronous steps all have the optimizer of the mean gradient.
        if step == self.first or (self._ends_period(step) and self.buffers == "average"):
            self._averaged = self._average_state(optimizer, lambda t: self.comm.fresh_mean(t, "buffers"))
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
        limit = limits.max_period_step(self.period, momentum, form, omegas, order, self.buffers, *outer)
        if not self.nodes or not momentum or self.buffers != "keep":
            return limit
        if self.outer != "none":
            return None
        # Disagreement within a node loses x at its averages, and keeps v.
        return min(limit, limits.max_period_step(self.node_period, momentum, form))


class OuterStep(LocalSGD):
    """Local SGD whose averages are the gradients of an outer optimizer, at the ``anchor`` x_old."""

    needs: Mapping[str, str] = {key: need for key, need in LocalSGD.needs.items() if key != "start"}

    def start(self, weights: Tensor) -> None:
        self.shared = {"anchor": weights[0].clone(), "slow_momentum": torch.zeros_like(weights[0])}

    def _outer(self, mean: Tensor, lr: float, step: int) -> Tensor:
        if step <= self.first:
            self.shared = self.shared | {"anchor": mean.clone()}
            return mean
        displacement = self.shared["anchor"] - mean
        slow = self.outer_momentum * self.shared["slow_momentum"]
        if self.outer == "nesterov":
            slow += displacement
            anchor = self.shared["anchor"] - self.outer_lr * (displacement + self.outer_momentum * slow)
        else:
            if lr:  # the rate and the step are 0 at the end of a cosine schedule
                slow += displacement / lr
            anchor = self.shared["anchor"] - self.outer_lr * lr * slow
        self.shared = {"anchor": anchor, "slow_momentum": slow}
        return anchor

    def follows_mean_direction(self, step: int) -> bool:
        return not self._ends_period(step)


@registry.algorithms.add("slowmo")
class SlowMo(OuterStep):
    """SlowMo: after ``period`` steps average to x̄, then u ← βu + (x_old − x̄)/γ, x_old ← x_old − a γ u.

    γ is the learning rate of the period's last step (Wang et al. 2020, Algorithm 1; LocalSGD-2021). With
    a = 1 and β = 0 the rule is local SGD.

    Args:
        slow_lr: a. Source: ours; with a = 1 the outer step without momentum is the average itself.
        slow_momentum: β. Source: ours.
    """

    label, color = "SlowMo", "#CC79A7"
    lr_is_factor = False
    outer = "slowmo"

    def __init__(
        self, learners: int, seed: int, period: Count, slow_lr: Positive = 1.0, slow_momentum: BelowOne = 0.5,
        start: Natural = 0, nodes: Count = 1, node_period: Natural = 0, mixing: str = "none",
        order: Literal["awc", "atc"] = "awc", buffers: Buffers = "keep",
    ) -> None:  # fmt: skip
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
        self, learners: int, seed: int, period: Count, outer_lr: Positive = 0.7,
        outer_momentum: BelowOne = 0.9, start: Natural = 0, buffers: Buffers = "keep",
    ) -> None:  # fmt: skip
        super().__init__(learners, seed, period, start, buffers=buffers)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum


@registry.algorithms.add("async-sgd")
class AsyncSGD(Rule):
    """x ← x − α g(c_k), c_k ← x: one of τ+1 workers delivers at each step, its gradient at its copy c_k (P,).

    The copy has the server's weights of the worker's last delivery: the age of the gradient is the number of
    deliveries since. The n learners share a worker's minibatch, so that nB samples make an update; with one
    learner this is the textbook's rule. Momentum in its ordinary form, v ← m v + g on the server, belongs to
    the optimizer.

    Args:
        delay: τ, the age of gradients; there are τ + 1 workers. Unit: steps.
        schedule: "round-robin": the workers deliver in turn, and the age of all gradients is τ (Delay-2019's
            x_{t+1} = x_t − αg(x_{t−τ})). "random": each step draws the worker, and the delay is geometric
            with mean τ. "measured": τ + 1 processes deliver at their own pace to a further process, the
            server, for one learner. Source: Delay-2019.
        shifted: Momentum m of Delay-2019's shifted form, with one buffer per worker: v_k ← m v_k + g(c_k),
            x ← x − α v_k. Source: ours; 0 is no momentum.
        staleness_aware: The rate of a gradient d steps old is α/max(1, d) (Zhang et al. 2016). Source: ours.
    """

    label, color = "async SGD", "#000000"
    columns = DELAY
    purposes = ("delay",)
    synchronous = True
    needs: Mapping[str, str] = {
        "schedule": "delay > 0",
        "staleness_aware": "delay > 1 or schedule != round-robin",
    }

    def __init__(
        self, learners: int, seed: int, delay: Natural,
        schedule: Literal["round-robin", "random", "measured"] = "round-robin", shifted: BelowOne = 0.0,
        staleness_aware: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(learners, seed)
        self.measured = schedule == "measured"
        if self.measured and learners > 1:
            raise InputError("learners", learners, allowed="1 with algorithm.schedule 'measured'")
        self.delay, self.schedule = delay, schedule
        self.shifted, self.staleness_aware = shifted, staleness_aware
        self.lr_is_factor = not shifted  # the momentum is of directions, without the rate of their step
        self._worker = 0
        #: Of the measured schedule: sends waiting workers their copies; the worker that delivers next.
        self.deliver: Callable[[], int] | None = None

    def start(self, weights: Tensor) -> None:
        workers, first = self.delay + 1, weights[0]
        self.shared = {"copies": first.repeat(workers, 1), "fetched": torch.zeros(workers, dtype=torch.int64)}
        if self.shifted:
            self.shared |= {"momentum": torch.zeros_like(self.shared["copies"])}
            self.shared |= {"last_momentum": torch.zeros_like(first)}
        if self.measured:
            self.shared |= {"last": torch.tensor(0)}

    def worker(self, step: int) -> int:
        """Return the worker, 0…τ, that delivers at ``step``, or the last one with the measured schedule."""
        if self.measured:
            return int(self.shared["last"])
        if self.schedule == "round-robin":
            return (step - 1) % (self.delay + 1)
        return int(torch.randint(self.delay + 1, (1,), generator=self.generator("delay", step)))

    def begin(self, weights: Tensor, step: int) -> None:
        if step > 1:  # the worker that delivered last gets the present weights
            last = self.worker(step - 1)
            self.shared["copies"][last] = self.comm.mean(weights)
            self.shared["fetched"][last] = step - 1
            if self.shifted:
                self.shared["momentum"][last] = self.shared["last_momentum"]
        if self.measured:
            if self.deliver is None:  # a Trainer of one process, which launch.check_processes has not seen
                words = "'measured' needs several processes; give train(…, nproc=)"
                raise InputError(f"algorithm.schedule: {words}")
            self.shared = self.shared | {"last": torch.tensor(self.deliver())}
        self._worker = self.worker(step)

    def gradient_points(self, weights: Tensor) -> Tensor:
        return self.shared["copies"][self._worker].expand_as(weights)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        x, new = self.comm.mean(weights), self._new_weights(weights)
        if self.staleness_aware:
            lr /= max(1, self._delay(step))
        if not self.shifted:
            return torch.sub(x, directions, alpha=lr, out=new)
        mean = self.comm.fresh_mean(directions, "directions")
        v = torch.add(mean, self.shared["momentum"][self._worker], alpha=self.shifted)
        self.shared = self.shared | {"last_momentum": v}
        return new.copy_(torch.sub(x, v, alpha=lr))

    def _delay(self, step: int) -> int:
        """Return the age of the gradient of ``step``, in steps."""
        return step - 1 - int(self.shared["fetched"][self._worker])

    def record(self, step: int) -> dict[str, float]:
        return {"delay": self._delay(step)}

    def follows_mean_direction(self, step: int) -> bool:
        """Return whether the step follows the mean; a measured schedule's server lacks the minibatch."""
        return not (self.shifted or self.staleness_aware or self.measured)

    def communication_cost(self, step: int) -> tuple[float, int]:
        return 2.0, 0  # its gradient to the server, weights back; no worker waits for another

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Return the limit: in mean square for the random schedule, unknown for the measured one."""
        random = self.schedule == "random" and self.delay
        plain = not (self.shifted or momentum or self.staleness_aware)
        if (self.measured and self.delay) or (self.shifted and momentum) or (random and not plain):
            return None
        if random:
            return limits.max_random_worker_step(self.delay + 1)
        m, kind = (self.shifted, "shifted") if self.shifted else (momentum, form)
        factor = max(1, self.delay) if self.staleness_aware else 1
        return limits.max_stable_step(self.delay, m, kind) * factor

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        if not self.measured:
            return super().describe(momentum, form)
        return f"{self.delay + 1} workers at their own pace: such a run cannot be repeated to the bit"


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

    def finish_moved(self, weights: Tensor, points: Tensor, moved: Tensor, lr: float, step: int) -> Tensor:
        """Return ``moved``, the optimizer's mean, unless a subclass has a :meth:`finish` of its own."""
        if type(self).finish is SSGD.finish:
            return moved
        return super().finish_moved(weights, points, moved, lr, step)

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        return limits.max_stable_step(0, momentum, form)


@registry.algorithms.add("ssgd*")
class SSGDNoise(SSGD):
    """w_j ← w_a − α ∇L^{μ_j}(w_a) + ξ, ξ ~ N(0, σ²I) drawn anew each step (DPSGD-2020, section 2.1).

    The paper does not say whether the learners' noise differs. Here all learners add the same ξ, so that the
    mean, the synchronized model, has noise of standard deviation ``sigma`` for any n.

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
        """Send nothing, and stay synchronous, which the steps of local SGD are not."""

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        mean = self.comm.fresh_mean(new, "outer")
        return new.copy_(self._outer(mean, lr, step) if self._ends_period(step) else mean)

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        outer = self.outer, self.outer_lr, self.outer_momentum
        return limits.max_period_step(self.period, momentum, form, (), "awc", "keep", *outer)


@registry.algorithms.add("gpa")
class GPA(Rule):
    """Generalized primal averaging: z ← z − α u(y), x ← μ_x x + (1 − μ_x) z, y = μ_y x + (1 − μ_y) z.

    The learners' weights are x; gradients are taken at y (Defazio et al. 2025, GPA). μ_x = 0 is SGD. For μ_x
    = μ_y = μ, y follows Nesterov's method with momentum μ: SNOO's weights with K = 1, ν = 1 − μ. An
    optimizer's weight decay is of y; the authors' program decays z by default.

    Args:
        mu_x: μ_x. Source: the authors' program, for DiLoCo's 32 local steps.
        mu_y: μ_y. Source: the authors' program.
    """

    label, color = "GPA", "#CC6677"
    needs: Mapping[str, str] = {"mu_y": "mu_x > 0"}
    synchronous = True
    lr_is_factor = True

    def __init__(
        self, learners: int, seed: int, mu_x: BelowOne = 0.9967, mu_y: Annotated[float, Within(0, 1)] = 0.7
    ) -> None:
        super().__init__(learners, seed)
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
        """Return the smallest h with |ζ| = 1.

        ζ is a root of (ζ − 1)(ζ − m)(ζ − μ_x) + h p₁ ((1 − μ_x μ_y)ζ − (1 − μ_y)μ_x).
        """
        p0, p1 = limits.polynomials(0, momentum, form)
        at_y = [1 - self.mu_x * self.mu_y, -(1 - self.mu_y) * self.mu_x]
        return limits.first_crossing(np.convolve(p0, [1, -self.mu_x]), np.convolve(p1, at_y))
