"""The critical batch size by branching: what the loss loses where training goes on with larger batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import standard_error
from landscape.results.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class CriticalBatch(Measurement):
    """The loss after branches that train on equally many samples, by batch; the first is the reference.

    The critical batch is where the mean loss exceeds that of the reference by the share ``tol`` of it.

    Attributes:
        batch: (K,), samples of a step, nB, increasing.
        lr: (K,), the learning rate of each branch.
        steps: (K,), its length.
        loss: (K, seeds) in nats, the training loss at w_a near the end; inf where a branch diverged.
        own_batch: nB of the run that the branches start from.
        step: the step that they start at.
        trained_samples: the samples that each branch sees.
        tol: the allowed rise of the loss, relative to the reference.
        scaling: how the learning rate follows the batch: "linear", "sqrt" or "none".

    Example:
        >>> result = CriticalBatch(
        ...     batch=np.array([10, 40]), lr=np.array([0.1, 0.4]), steps=np.array([40, 10]),
        ...     loss=np.array([[1.0, 1.0], [1.1, 1.3]]), own_batch=10, step=100, trained_samples=400, tol=0.1,
        ...     scaling="linear", samples=50, seed=0, dtype="float32")
        >>> result.value, result.rise.round(3).tolist()
        (20.0, [0.0, 0.2])
    """

    schema: ClassVar[str] = "landscape.critical_batch"
    shapes: ClassVar[Mapping[str, str]] = {
        "batch": "batch+",
        "lr": "batch",
        "steps": "batch",
        "loss": "batch seed_of_branch+",
    }
    axes_of: ClassVar[tuple[str, ...]] = ("batch",)
    units: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("batch", "own_batch", "trained_samples"), "samples"),
        **dict.fromkeys(("steps", "step"), "steps"),
        **dict.fromkeys(("lr", "tol"), "1"),
        "loss": "nat",
    }
    table: ClassVar[str] = "batch seed_of_branch"

    batch: Array
    lr: Array
    steps: Array
    loss: Array
    own_batch: int
    step: int
    trained_samples: int
    tol: float
    scaling: str

    @property
    def rise(self) -> Array:
        """(K,), the mean loss above that of the reference, relative to it."""
        mean = self.loss.mean(1)
        rise: Array = mean / mean[0] - 1
        return rise

    @property
    def rise_error(self) -> Array:
        """(K,), the standard error of ``rise`` over the seeds, in pairs; NaN for one seed."""
        mean = self.loss.mean(1)
        with np.errstate(invalid="ignore"):
            spread = self.loss / mean[0] - mean[:, None] / mean[0] ** 2 * self.loss[0]
        return np.array([standard_error(row) for row in spread])

    @property
    def value(self) -> float:
        """The critical batch in samples; inf where no branch is worse than allowed."""
        return self._crossing(self.loss)

    @property
    def standard_error(self) -> float:
        """The standard error of ``value`` over the seeds, by the jackknife; NaN where it is unknown.

        The distance to the batches that were tried on both sides, :attr:`bracket`, is not in it.
        """
        n = self.loss.shape[1]
        left = np.array([self._crossing(np.delete(self.loss, k, 1)) for k in range(n)]) if n > 1 else None
        if left is None or not np.isfinite(left).all():
            return math.nan
        return float(np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum()))

    @property
    def bracket(self) -> tuple[float, float]:
        """(the largest batch that is good enough, the next one; inf if there is none)."""
        k = self._first_worse(self.rise)
        return float(self.batch[k - 1]), float(self.batch[k]) if k < len(self.batch) else math.inf

    def _first_worse(self, rise: Array) -> int:
        worse = np.flatnonzero(~(rise <= self.tol))
        return int(worse[0]) if len(worse) else len(rise)

    def _crossing(self, loss: Array) -> float:
        """Where the rise passes ``tol``: linear in the logarithm of the batch; in its middle from inf."""
        mean = loss.mean(1)
        rise = mean / mean[0] - 1
        k = self._first_worse(rise)
        if k == len(rise):
            return math.inf
        share = (self.tol - rise[k - 1]) / (rise[k] - rise[k - 1]) if np.isfinite(rise[k]) else 0.5
        low, high = np.log(self.batch[k - 1 : k + 1])
        return float(round(math.exp(low + share * (high - low)), 9))
