"""The tables of a recipe for measurements, checkpoints, divergence and the initial weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from landscape.core import registry
from landscape.core.options import positive


@dataclass(frozen=True)
class Decompose:
    """How often a step is decomposed into effective learning rate and noise, and from how many samples.

    Attributes:
        every: Decompose every so many steps; 0: none. Unit: steps. Source: ours; every 10th step costs about
            as much as the training itself at Figure 2's size, and resolves its curves.
        samples: Number of training samples from which g is estimated; 0: all, so that g is exact. Unit:
            samples. Source: ours; 0 is the definition.
        split: Record the terms of Eq. 4, too. They take one more gradient where learners have weights of
            their own. Source: ours.
    """

    every: int = 10
    samples: int = 0
    split: bool = True


@dataclass(frozen=True)
class Evaluate:
    """How often w_a is evaluated on the test set.

    Attributes:
        every: Evaluate loss and accuracy every so many steps; 0: only at the end. Unit: steps. Source: ours.
        bn_samples: Training samples, always the same ones, on which BatchNorm's statistics are re-estimated
            at w_a before an evaluation. Unit: samples. Source: ours; a statistic over 5,000 samples has a
            standard error of 1.4%.
    """

    every: int = 100
    bn_samples: int = 5000


@dataclass(frozen=True)
class Save:
    """How often a checkpoint is written; one is always written at the end.

    Attributes:
        every: Write a file step-NNNNNNN.h5 every so many steps; 0: only at the end. Unit: steps. Source:
            ours.
    """

    every: int = 500


@dataclass(frozen=True)
class Monitor:
    """What is measured along the run besides its steps, at w_a and at the learners' weights.

    Attributes:
        sharpness: Measure λ_max of the loss at w_a every so many steps; 0: never. Unit: steps. Source: ours;
            at Figure 2's settings every 50 steps cost about an eighth of the run.
        samples: Training samples for Hessians, always the same ones; 0: all. Unit: samples. Source: ours; at
            Figure 2's settings λ_max on 2,000 samples is within 10% of that on 10,000.
        top: Number of leading eigenvectors, for the share of the learners' spread that lies along them.
            Source: ours.
        instruments: Names of instruments that measure every ``every`` steps, such as "batch-sharpness".
            Source: ours.
        every: How often the instruments measure. Unit: steps. Source: ours.
        draws: Minibatches that an instrument draws each time. Source: ours; a standard error from 16 is right
            to 18%.
        rho: Radius of "worst-sharpness" and "average-sharpness", which need one. Source: ours.
    """

    sharpness: int = 0
    samples: int = 2000
    top: int = 3
    instruments: list[str] = field(default_factory=list)
    every: int = 50
    draws: int = 16
    rho: float = 0.0

    def __post_init__(self) -> None:
        for key, least in {"sharpness": 0, "samples": 0, "top": 1, "every": 1, "draws": 2, "rho": 0}.items():
            positive(f"monitor.{key}", getattr(self, key), least=least)
        for name in self.instruments:
            registry.instruments[name]  # refuses one that is not known


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

    loss: float = 1e4
    consensus: float = 100.0


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
