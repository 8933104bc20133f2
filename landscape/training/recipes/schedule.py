"""The schedule of a run's learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from landscape.core.errors import InputError
from landscape.core.options import Natural, NonNegative, Positive


@dataclass(frozen=True)
class Schedule:
    """lr(t) = lr · scaling · warm-up · factor^(milestones passed) · anneal^(units since warm-up) · cosine.

    Every part is off by default: Figure 2's constant rate. Lengths are in ``unit``, steps or epochs (passes
    over the training set, t·nB/samples after step t), so that at step t, p(t) is t in that unit.
    DPSGD-2020's speech recipe is unit "epochs", base_batch 256, warmup 10, anneal 1/√2 = 0.7071 (as we read
    it).

    Attributes:
        unit: The unit of the lengths below. Source: ours.
        base_batch: b of the linear scaling rule: the rate is × nB/b, and ``lr`` is the rate for batch b. 0:
            no scaling. Unit: samples. Source: ours; the rule is DPSGD-2020's, section 4.
        warmup: W: the rate is × p/W until p = W. Unit: ``schedule.unit``. Source: ours; the linear ramp is
            DPSGD-2020's, section 4.2, from where it starts is ours.
        milestones: The rate is × ``factor`` for each milestone m with p > m. Unit: ``schedule.unit``. Source:
            ours; none.
        factor: The factor at a milestone. Source: DPSGD-2020, section 4.1.
        anneal: The rate is × ``anneal`` at the start of each unit after the warm-up, the first included.
            Source: ours; 1 changes nothing.
        cosine: C: the rate is × ½(1 + cos πx), x = (p(t) − p(1) − W)/C from 0 to 1, to zero C units after the
            warm-up; 0: no cosine. Its length is its own, not ``steps``, so that a run may be made longer.
            Unit: ``schedule.unit``. Source: ours.
    """

    unit: Literal["steps", "epochs"] = "steps"
    base_batch: Natural = 0
    warmup: NonNegative = 0.0
    milestones: list[float] = field(default_factory=list)
    factor: Positive = 0.1
    anneal: Positive = 1.0
    cosine: NonNegative = 0.0

    def __post_init__(self) -> None:
        if any(not 0 <= m < math.inf for m in self.milestones):
            raise InputError(
                f"schedule.milestones: {self.milestones} is not allowed, they must be finite numbers ≥ 0"
            )

    def peak_lr(self, lr: float, batch: int) -> float:
        """The rate after the warm-up: ``lr`` scaled to the total ``batch`` nB."""
        return lr * batch / self.base_batch if self.base_batch else lr

    def at(self, lr: float, step: int, batch: int, samples: int) -> float:
        """The rate of one step.

        Args:
            lr: α of the recipe.
            step: counted from 1.
            batch: the total batch nB.
            samples: those of the training set.
        """

        def position(t: int) -> float:
            return t * batch / samples if self.unit == "epochs" else t

        p = position(step)
        rate = self.peak_lr(lr, batch)
        if p < self.warmup:
            rate *= p / self.warmup
        rate *= self.factor ** sum(p > m for m in self.milestones)
        rate *= self.anneal ** math.ceil(max(0.0, p - self.warmup))
        if self.cosine:
            x = (p - position(1) - self.warmup) / self.cosine
            rate *= (1 + math.cos(math.pi * min(1.0, max(0.0, x)))) / 2
        return float(rate)
