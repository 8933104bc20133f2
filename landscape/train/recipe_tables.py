"""The tables of a recipe for measurements, checkpoints, divergence and the initial weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from landscape.core import registry
from landscape.core.options import positive


@dataclass(frozen=True)
class Decompose:
    """Decompose every ``every``-th step (0: none), with g from ``samples`` samples (0: all, exactly).

    Every 10th costs about as much as the training itself at Figure 2's size, and resolves its curves (ours).
    ``split``: with the terms of Eq. 4, which take one more gradient where learners have weights of their own.
    """

    every: int = 10
    samples: int = 0
    split: bool = True


@dataclass(frozen=True)
class Evaluate:
    """Loss and accuracy of w_a on the test set every ``every`` steps (0: only at the end). Ours.

    With BatchNorm its statistics are then re-estimated at w_a on ``bn_samples`` samples of the training set,
    always the same ones: a statistic over 5,000 samples has a standard error of 1.4% (ours).
    """

    every: int = 100
    bn_samples: int = 5000


@dataclass(frozen=True)
class Save:
    """Write a checkpoint every ``every`` steps (0: only at the end) and at the end. Ours."""

    every: int = 500


@dataclass(frozen=True)
class Monitor:
    """What is measured along the run besides its steps, at w_a and at the learners' weights.

    λ_max of the loss at w_a every ``sharpness`` steps (0: never), and every ``every`` steps what
    ``instruments`` names. Hessians are of ``samples`` samples of the training set (0: all), always the same
    ones; with the ``top`` eigenvectors comes the share of the learners' spread that lies along them. At
    Figure 2's settings λ_max on 2,000 samples is within 10% of that on 10,000, and every 50 steps cost about
    an eighth of the run (ours). Instruments that draw minibatches draw ``draws`` each time (ours: a standard
    error from 16 is right to 18%); ``rho`` is the radius of "worst-sharpness" and "average-sharpness", which
    need one.
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

    The mean: its loss is not finite or above ``loss`` nats (ours: runs at Figure 2(a)'s rate peaked at 1,272
    in a burst and came back). The learners: for ten steps in a row the consensus distance exceeds
    ``consensus`` times the larger of ‖w_a‖² now and at the start, while the mean's loss is still below (ours:
    where one learner throws the mean along the ratio stays near n − 1; only disagreement that grows by
    itself stays far beyond).
    """

    loss: float = 1e4
    consensus: float = 100.0


@dataclass(frozen=True)
class Init:
    """The initial weights: w_a of the file ``checkpoint``, with its BatchNorm statistics; "": new weights.

    ``sha256`` is the digest of the file's bytes. If it is missing, the run sets it; otherwise the file must
    match. A resumed run does not need the file.
    """

    checkpoint: str = ""
    sha256: str = ""
