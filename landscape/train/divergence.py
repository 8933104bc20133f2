"""The test for divergence of a run, and its message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import FailedError
from landscape.train.history import Row
from landscape.train.recipe_tables import Diverge

# Consecutive steps in which the spread must exceed its bound (ours): a burst, such as one huge gradient, is
# shorter, and under SSGD the learners are equal again after one step.
PERSISTENT = 10


class Diverged(FailedError):
    """A run that diverged: its files are whole, and end with the last finite state."""

    exit_code = 3


@dataclass(frozen=True)
class DivergenceTest:
    """The bounds on loss and spread that :class:`landscape.train.recipe_tables.Diverge` describes.

    ``start_norm2`` is ‖w_a‖² at the start of the run.
    """

    bounds: Diverge
    start_norm2: float

    def needs_spread(self, rows: Sequence[Row]) -> bool:
        """Whether the last measured spread may exceed its bound, so that the next one must be measured."""
        return bool(rows) and rows[-1]["consensus"] > self.bounds.consensus * self.start_norm2

    def bounds_loss(self, loss: float) -> bool:
        """Whether ``loss`` is within its bound; not of NaN."""
        return loss <= self.bounds.loss

    def learners_apart(self, rows: Sequence[Row], mean: Tensor | None) -> bool:
        """Whether the spread exceeded its bound in all of the last steps.

        Args:
            rows: the history, the newest step included.
            mean: w_a (P,) after the newest step, None where it is not known.
        """
        recent = [row["consensus"] for row in rows[-PERSISTENT:]]
        if mean is None or len(recent) < PERSISTENT:
            return False
        bound = self.bounds.consensus * max(float(mean @ mean), self.start_norm2)
        return all(spread > bound for spread in recent)


def divergence_message(end: Checkpoint) -> str:
    """One line about a run that diverged."""
    reasons = {
        "mean": "the mean's loss left all bounds",
        "learners": "the learners drifted apart without bound while the mean's loss stays within its own",
    }
    return f"diverged at step {end.diverged_at}: {reasons[end.diverged]}; the last finite state is kept"
