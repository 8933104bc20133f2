"""Gradients of weights that are some steps old: with a server, and between pairs of learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.devices import double
from landscape.core.errors import InputError
from landscape.core.options import BelowOne, Natural
from landscape.limits import max_stable_step
from landscape.limits.rules import max_matching_step, max_mixing_step, max_random_delay_step
from landscape.training.algorithms.base import Rule
from landscape.training.algorithms.dpsgd import DPSGD

#: The age of the gradients at a step: the mean over the learners.
DELAY = {"delay": "steps"}


@registry.algorithms.add("async-sgd")
class AsyncSGD(Rule):
    """x ← x − α g(c_k), c_k ← x: of τ+1 workers one delivers at each step, its gradient at its copy c_k (P,).

    The copy is of the server's weights when the worker last delivered, so that the gradient is as many steps
    old as others delivered since. A worker's minibatch is shared by the n learners, so that nB samples make
    an update; with one learner this is the textbook's. Momentum in its ordinary form, v ← m v + g on the
    server, is the optimizer's.

    Args:
        delay: τ, the age of gradients; there are τ + 1 workers. Unit: steps.
        schedule: "round-robin": the workers deliver in turn, all gradients are exactly τ old (Delay-2019's
            x_{t+1} = x_t − αg(x_{t−τ})). "random": each step draws the worker, the delay is geometric with
            mean τ. "measured": τ + 1 processes deliver at their own pace to one more, the server, for one
            learner. Source: Delay-2019.
        shifted: Momentum m of Delay-2019's shifted form, with one buffer a worker: v_k ← m v_k + g(c_k),
            x ← x − α v_k. Source: ours; 0 is none.
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
        self,
        learners: int,
        seed: int,
        delay: Natural,
        schedule: Literal["round-robin", "random", "measured"] = "round-robin",
        shifted: BelowOne = 0.0,
        staleness_aware: bool = False,
    ) -> None:
        super().__init__(learners, seed)
        self.measured = schedule == "measured"
        if self.measured and learners > 1:
            raise InputError(
                f"learners: {learners} is not allowed with algorithm.schedule 'measured', it must be 1"
            )
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
        """The worker that delivers at ``step``, 0…τ; with the measured schedule the last that delivered."""
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
            if self.deliver is None:
                raise InputError(
                    f"algorithm.schedule: 'measured' is not allowed in one process (--nproc {self.delay + 2})"
                )
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
        """The age of the gradient of ``step``, in steps."""
        return step - 1 - int(self.shared["fetched"][self._worker])

    def record(self, step: int) -> dict[str, float]:
        return {"delay": self._delay(step)}

    def follows_mean_direction(self, step: int) -> bool:
        """A measured schedule does not: its server has the gradient, but not the minibatch."""
        return not (self.shifted or self.staleness_aware or self.measured)

    def communication_cost(self, step: int) -> tuple[float, int]:
        return 2.0, 0  # its gradient to the server, weights back; no worker waits for another

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """The limit is one in mean square for the random schedule, and unknown for the measured one."""
        drawn = self.schedule == "random" and self.delay
        plain = not (self.shifted or momentum or self.staleness_aware)
        if (self.measured and self.delay) or (self.shifted and momentum) or (drawn and not plain):
            return None
        if drawn:
            return max_random_delay_step(self.delay + 1)
        m, kind = (self.shifted, "shifted") if self.shifted else (momentum, form)
        return max_stable_step(self.delay, m, kind) * (max(1, self.delay) if self.staleness_aware else 1)

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        if not self.measured:
            return super().describe(momentum, form)
        return f"{self.delay + 1} workers at their own pace: such a run cannot be repeated to the bit"


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
        """The limit for random pairs is one in mean square; it is known for the fixed schedule only."""
        if not self.delay:
            return super().stability_limit(momentum, form)
        if self.schedule == "random" or len(self.mixing.cycle) > 1:
            return None
        if self.mixing.cycle or self.learners == 1:
            return max_mixing_step(self.mixing.modes[0], momentum, form, "awc", self.delay)
        return None if momentum else max_matching_step(float(self.mixing.modes.real[0, 0]), self.delay)

    def describe(self, momentum: float | None = 0.0, form: str = "ordinary") -> str:
        if not self.delay:
            return super().describe(momentum, form)
        stable = Rule.describe(self, momentum, form) or "the limit is not known"
        return self.mixing.describe("awc", f"with gradients {self.delay} steps old {stable}")
