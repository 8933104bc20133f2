"""Recipes, the settings of a run: their tables, and how one is made of the values of its keys."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from landscape.core import options, registry
from landscape.core.errors import InputError
from landscape.core.options import Natural, NonNegative, Positive, Within

# Number of independent estimates of g from a sample (our choice: a standard error is then within about 20%).
GROUPS = 16


def _in_groups(where: str, samples: int) -> None:
    if samples % GROUPS:
        raise InputError(where, samples, allowed=f"a multiple of {GROUPS}")


GroupedSamples = Annotated[Natural, _in_groups]


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
    milestones: list[NonNegative] = field(default_factory=list)
    factor: Positive = 0.1
    anneal: Positive = 1.0
    cosine: NonNegative = 0.0

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


@dataclass(frozen=True)
class Decompose:
    """The decomposition of steps into effective learning rate and noise: its interval and its samples.

    Attributes:
        every: The interval of decomposed steps; 0: none. Unit: steps. Source: ours; every 10th step costs
            about as much as the training itself at Figure 2's size, and resolves its curves.
        samples: Number of training samples from which g is estimated; 0: all, so that g is exact. Unit:
            samples. Source: ours; 0 is the definition.
        split: Record the terms of Eq. 4, too. They take one more gradient where learners have weights of
            their own. Source: ours.
    """

    every: options.Natural = 10
    samples: GroupedSamples = 0
    split: bool = True


@dataclass(frozen=True)
class Evaluate:
    """The evaluation of w_a on the test set.

    Attributes:
        every: The interval of evaluations of loss and accuracy; 0: only at the end. Unit: steps. Source:
            ours.
        bn_samples: Training samples, always the same ones, on which BatchNorm's statistics are re-estimated
            at w_a before an evaluation. Unit: samples. Source: ours; a statistic over 5,000 samples has a
            standard error of 1.4%.
    """

    every: options.Natural = 100
    bn_samples: options.Several = 5000


@dataclass(frozen=True)
class Save:
    """The writing of checkpoints along the run; one is always written at the end.

    Attributes:
        every: The interval of the files step-NNNNNNN.h5; 0: only at the end. Unit: steps. Source:
            ours.
    """

    every: options.Natural = 500


def _is_registered(where: str, instrument: str) -> None:
    registry.instruments[instrument]  # refuses another name


@dataclass(frozen=True)
class Monitor:
    """The measurements along the run besides its steps, at w_a and at the learners' weights.

    Attributes:
        sharpness: The interval of measurements of λ_max of the loss at w_a; 0: none. Unit: steps. Source:
            ours; at Figure 2's settings every 50 steps cost about an eighth of the run.
        samples: Training samples for Hessians, always the same ones; 0: all. Unit: samples. Source: ours; at
            Figure 2's settings λ_max on 2,000 samples is within 10% of that on 10,000.
        k: Number of leading eigenvectors, for the share of the learners' spread that lies along them.
            Source: ours.
        instruments: Names of instruments that measure every ``every`` steps, such as "batch-sharpness".
            Source: ours.
        every: How often the instruments measure. Unit: steps. Source: ours.
        draws: Minibatches that an instrument draws each time. Source: ours; a standard error from 16 is right
            to 18%.
        rho: Radius of "worst-sharpness" and "average-sharpness", which need one. Source: ours.
        window: The last measured w_a whose mean is the average of "average". Source: ours; each costs a
            gradient and a Hessian product each time.
    """

    sharpness: options.Natural = 0
    samples: options.Natural = 2000
    k: options.Count = 3
    instruments: list[Annotated[str, _is_registered]] = field(default_factory=list)
    every: options.Count = 50
    draws: options.Several = 16
    rho: options.NonNegative = 0.0
    window: Annotated[int, Within(2, 32)] = 4  # the most that landscape.average takes


@dataclass(frozen=True)
class Diverge:
    """The bounds beyond which a run counts as diverged.

    Attributes:
        loss: The mean has diverged if its loss is not finite or above this. Unit: nat. Source: ours; runs at
            Figure 2(a)'s rate peaked at 1,272 in a burst and came back.
        consensus: The learners have diverged if for ten steps in a row the consensus distance exceeds this
            many times the larger of ‖w_a‖² now and at the start, while the mean's loss is still below
            ``diverge.loss``. Source: ours; where one learner throws the mean along the ratio stays near n −
            1, and only disagreement that grows by itself stays far beyond.
    """

    loss: options.Positive = 1e4
    consensus: options.Positive = 100.0


@dataclass(frozen=True)
class Init:
    """The initial weights.

    Attributes:
        checkpoint: File whose w_a and BatchNorm statistics are the initial ones; "": new weights. A resumed
            run does not need the file. Source: ours; "" is training from scratch.
        sha256: SHA-256 of the file's bytes. If it is missing, the run sets it; otherwise the file must match.
            Source: ours.
    """

    checkpoint: str = ""
    sha256: str = ""


def table_of(kind: type[Any], values: dict[str, Any], prefix: str, **others: Any) -> Any:
    """A table of a recipe, a dataclass ``kind``, from its ``values``; ``others`` are no keys.

    Raises:
        InputError: for unknown keys and wrong types; it names the key, with ``prefix`` before it.

    Example:
        >>> table_of(Monitor, {"every": 10}, "monitor.").every
        10
    """
    hints = options.type_hints(kind, bounds=True)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name not in others}
    built = {}
    for key, value in values.items():
        options.choose(f"recipe key {prefix}{key}", key, fields)
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise InputError(f"{prefix}{key}", value, allowed="a table")
            value = table_of(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        built[key] = value
    for name, f in fields.items():
        no_default = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if name not in built and no_default:
            raise InputError(f"recipe key {prefix}{name}: missing, and there is no default")
    table = kind(**built, **others)
    options.check_fields(table, prefix)
    return table
