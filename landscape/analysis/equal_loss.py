"""Of a run's saved checkpoints the one whose training loss is nearest to a given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import FailedError, InputError
from landscape.core.options import SPLIT
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.problem import Problem

# Losses are equal within this share of the target (ours): quantities such as λ_max, which fall with the loss,
# then change by about as much, far less than the differences of interest.
TOLERANCE = 0.1

ProblemOf = Callable[[Checkpoint, str], Problem]


def at_equal_loss(
    runs: Sequence[Checkpoint], tolerance: float, problem_of: ProblemOf
) -> tuple[list[Checkpoint], float]:
    """(checkpoints of ``runs`` at nearly one training loss, that loss in nats).

    The loss is the highest of those of ``runs`` as they are, which the others had earlier: of the files
    step-*.h5 in each one's folder the one is taken whose loss is nearest, or the run as it is.

    Raises:
        InputError: a run that is not of a file.
        FailedError: a run with no checkpoint within ``tolerance``, relative to the loss, or a loss that is
            not finite.

    Example:
        >>> at_equal_loss([], 0.1, Checkpoint.problem)
        Traceback (most recent call last):
        landscape.core.errors.InputError: equal_loss: no checkpoint was given
    """
    if not runs:
        raise InputError("equal_loss: no checkpoint was given")
    for run in runs:
        if run.path is None:
            raise InputError(
                f"equal_loss: {run.label} is not of a file, its run's earlier ones are not known"
            )
    losses = [problem_of(run, SPLIT).loss() for run in runs]
    for run, loss in zip(runs, losses, strict=True):
        if not math.isfinite(loss):
            raise FailedError(f"{run.path}: its training loss is {loss:g}, so that no other can be equal")
    target = max(losses)
    highest = runs[losses.index(target)]
    taken = []
    for run, loss in zip(runs, losses, strict=True):
        near, found = (run, loss) if loss == target else _nearest(run, loss, target, problem_of)
        if abs(found - target) > tolerance * abs(target):
            raise FailedError(
                f"{run.path}: no checkpoint of its run has a training loss within {tolerance:.0%} of "
                f"{target:.4g}, that of {highest.path}; the nearest is step {near.step:,} with {found:.4g}. "
                "Save more of them (checkpoint.every), or allow a larger loss tolerance"
            )
        taken.append(near)
    return taken, target


def _nearest(run: Checkpoint, loss: float, target: float, problem_of: ProblemOf) -> tuple[Checkpoint, float]:
    """The checkpoint of the run whose loss is nearest to ``target``, and that loss."""
    problem = problem_of(run, SPLIT)
    batchnorm = has_batchnorm(problem.model)  # whose statistics are those of the weights
    best, found = run, loss
    for earlier in _earlier(run):
        value = (
            problem_of(earlier, SPLIT).loss() if batchnorm else problem.loss(earlier.mean.to(problem.theta))
        )
        if abs(value - target) < abs(found - target):
            best, found = earlier, value
    return best, found


def _earlier(run: Checkpoint) -> Iterator[Checkpoint]:
    """The checkpoints of the same run before ``run``, without what other runs left in its folder."""
    assert run.path is not None
    for path in run_folder.steps(run.path.parent):
        other = Checkpoint.load(path, whole_history=False)
        same = (other.algorithm, other.seed, other.layout) == (run.algorithm, run.seed, run.layout)
        if same and other.step < run.step:
            yield other
