"""Checks of a sharded problem, which all ranks make together: each raises its refusal on all of them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.devices import inner
from landscape.core.errors import InputError
from landscape.problem.batches import call, count_samples, named_tensors, take, tree_map
from landscape.problem.checks import tolerance
from landscape.problem.counts import ONES, Count, Samples, candidates, class_counts
from landscape.problem.losses import Terms, is_mean, output_loss
from landscape.problem.mean_check import Losses, attempt, only, say_count, that_hold
from landscape.problem.shards import whole

# The check of the gradient moves the weights by so much of their norm, and allows so large a relative error:
# a gradient that is a sum over ranks instead of their mean is off by a factor of 2 at least (both ours).
STEP, ALLOWED = 1e-3, 0.2
# Samples that each rank shows the others, and numbers of their outputs (ours).
MAX_ROWS, MAX_NUMBERS = 64, 1 << 22


def check_ranks(problem: Any, x: Any, y: Any, terms: Terms) -> None:
    """Raise InputError unless ranks, loss and gradient fit together, on the first batch of each rank."""
    few = problem._on(x, y, float(terms(x, y).sum()))
    value, g = few.loss(), few.gradient()
    rounding = _rounding(problem, value)
    if problem.criterion is output_loss:
        _check_halves(problem, few, value, x, y, terms)
    _check_gradient(problem, few, g, rounding)


def _rounding(problem: Any, value: float) -> float:
    """How far two passes over the same samples may differ, with the loss ``value``."""
    return 10 * torch.finfo(problem.pieces[0].parameter.dtype).eps * max(1.0, abs(value))


def check_random(problem: Any, x: Any, y: Any, terms: Terms) -> None:
    """Raise InputError unless two passes over the first batch of each rank have the same loss."""
    if problem._mean(sum(float((~torch.isfinite(piece.local)).sum()) for piece in problem.pieces)):
        raise InputError("weights: some are NaN or infinite, all must be finite")
    few = problem._on(x, y, float(terms(x, y).sum()))
    value, again = few.loss(), few.loss()
    if not (abs(again - value) <= _rounding(problem, value) or (math.isnan(value) and math.isnan(again))):
        raise InputError(
            f"model or loss: random even in eval mode: the loss of one batch is {value:.6g}, and "
            f"{again:.6g} in a second pass"
        )


def _check_halves(problem: Any, few: Any, value: float, x: Any, y: Any, terms: Terms) -> None:
    """Raise InputError unless the model's own loss of a batch is the mean of those of its halves."""
    samples = count_samples(x, y, alike=False)
    halves = [take((x, y), rows) for rows in (slice(samples // 2), slice(samples // 2, None))]
    counts = [float(terms(*half).sum()) if len(half) else 0.0 for half in halves]
    if not problem._each(*counts).min() > 0:
        return
    parts = [problem._on(half[0], half[1], count) for half, count in zip(halves, counts, strict=True)]
    mean = sum(part.loss() * part._mean_terms for part in parts) / few._mean_terms
    if not abs(mean - value) <= tolerance(problem.dtype) * max(1.0, abs(value)):
        raise InputError(
            f"loss: it is no mean over samples: {value:.6g} for a batch, {mean:.6g} by its halves; "
            "give one with reduction='mean'"
        )


def check_mean(problem: Any, terms: Terms) -> None:
    """Find by which count of targets the losses of parts combine, of all batches of all ranks together.

    Raises InputError, on all ranks, where none of the standard counts is right.
    """
    targets = next(_placed(problem))[1]
    shapes = problem._each(problem.data.ragged, sum(t[:1].numel() for _, t in named_tensors(targets)))
    ragged = bool(shapes[:, 0].any()) or len(shapes.unique(dim=0)) > 1
    if problem.criterion is output_loss or (is_mean(problem.criterion) and not ragged):
        return
    few: Any = SimpleNamespace(
        criterion=problem.criterion,
        data=problem.data,
        device=problem.device,
        draws=0,
        evaluating=lambda seed: contextlib.nullcontext(),
        outputs=lambda weights, x: tree_map(whole, call(problem.model, {}, x)),
    )
    losses = Losses(few, problem.weights, by_outputs=True)
    with problem._passes(None):
        equations = [e.without_outputs() for e in losses.equations(_placed(problem), ragged)]
        first = losses.samples(*next(_placed(problem)))
    rows = min(MAX_ROWS, max(1, MAX_NUMBERS * first.size // max(1, first.numbers)))
    first = first.rows(slice(rows))
    gathered = problem._gathered_objects([first.outputs, first.y])
    heads = [Samples(outputs, None, y).on(problem.device) for outputs, y in gathered]
    here = dist.get_rank()
    if (both := attempt(losses.of_two, heads[here - 1], heads[here], 0)) is not None:
        equations.append(both.without_outputs())

    def that_hold_everywhere(counts: Sequence[Any]) -> list[Any]:
        verdicts = problem._each(*(bool(that_hold([count], equations)) for count in counts))
        return [*itertools.compress(counts, verdicts.view(problem.ranks, -1).all(0))]

    if that_hold_everywhere([terms]):
        return
    own = [[*vars(count).values()] for x, y in _placed(problem) for count in candidates(x, y)]
    every = problem._gathered_objects(own)
    counts = {values[0]: Count(*values) for each in every for values in each}
    left = that_hold_everywhere([ONES, *counts.values()])
    if not left:
        weighted = attempt(lambda: class_counts(losses.cuts(Samples.joined(heads), MAX_ROWS)))
        left = that_hold_everywhere(weighted or [])
    if not left:
        raise InputError(
            "loss: it is no mean over samples, nor one over a standard count of targets, on all ranks "
            "together; give one with reduction='mean', or terms=, the number of terms of each sample"
        )
    totals = problem._each(*(sum(float(c(x, y).sum()) for x, y in _placed(problem)) for c in left))
    terms.count = only(left, totals.view(problem.ranks, -1))
    say_count(terms.count)
    problem._weigh(terms)


def _placed(problem: Any) -> Iterator[tuple[Any, Any]]:
    """The batches of this rank, on its device."""
    return map(problem.data.place, problem.data.pieces())


def _check_gradient(problem: Any, few: Any, g: Tensor, rounding: float) -> None:
    """Raise InputError unless g is the gradient of the loss of the ``few`` samples on all ranks."""
    triples = zip(problem.pieces, problem.parts(problem.weights), problem.parts(g), strict=True)
    copies = [t.double() for piece, *both in triples if piece.share * problem.ranks == 1 for t in both]
    if not problem._same(*(float(t.square().sum()) for t in copies)):
        raise InputError(
            "model: parameters that every rank has, or their gradients, differ from rank to rank; ranks "
            "that divide a layer among them need the same data"
        )
    generator = torch.Generator().manual_seed(0)
    random = problem.along_weights(problem.draw(lambda p: torch.randn(p.slot.shape, generator=generator)))
    theta = problem.weights
    along = random / problem.norm(random) + g / max(problem.norm(g), 1e-30)
    step = STEP * problem.norm(theta) / problem.norm(along)
    expected = float(problem.total(inner(g, along)))
    ends = [few.loss(theta + times * step * along) for times in (1, -1, 2, -2)]
    slope, other = (ends[0] - ends[1]) / (2 * step), (ends[2] - ends[3]) / (4 * step)
    allowed = ALLOWED * max(abs(expected), abs(slope)) + abs(slope - other) + rounding / step
    if not abs(slope - expected) <= allowed:
        raise InputError(
            f"model: its gradient is not that of the mean loss of all ranks: the slope is {slope:.3g}, "
            f"by the gradient {expected:.3g}; ranks with data of their own must average gradients"
        )
