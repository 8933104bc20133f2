"""Loss and accuracy at many points of a plane, θ = center + x·u + y·v, as fast as the model allows.

Paths, each the other's check in the tests:

- "batched": for chains of linear layers (see :mod:`.stack`). θ is linear in (x, y) up to the first
  nonlinearity, so the first layer costs three products a data chunk, shared by all points; later layers
  take a block of points as one batched product, with features before samples in memory. "compiled" is the
  same under torch.compile; "auto" turns to it for long grids, where it can.
- "pointwise": any model, one forward pass over the data a point. "folded" is the same with BatchNorm folded
  into the convolutions and channels-last layout, for models that torch.fx can trace; "auto" takes it for
  models with convolutions.

Each path but "pointwise" is first compared with it on the user's own model: on a few samples, at the centre
and at two displaced points of the plane. Where they differ by more than rounding, "auto" goes back to
"pointwise" with a PathWarning. No choice depends on the clock: the same call takes the same path.

Memory is bounded whatever the number of points: a block of points for a chunk of data at a time, of
BLOCK_BYTES or ACTIVATION_BYTES, less where ``max_memory`` asks for it. On a GPU nothing waits for the device
before all points are through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.memory import MemoryBudget
from landscape.core.options import choose
from landscape.evaluation.batched import batched, block_size, compiled_totals, long_enough
from landscape.evaluation.fold import fold
from landscape.evaluation.paths import SPARE, Comparison, Totals, folded_totals, penalised, pointwise
from landscape.evaluation.paths import Progress as Progress
from landscape.evaluation.stack import LinearStep, chain
from landscape.problem.problem import Problem

PATHS = ("auto", "batched", "compiled", "folded", "pointwise")
# What the arithmetic is done in; "model" is the model's own dtype, as PyTorch is set up.
PRECISIONS = {"model": None, "tf32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Values:
    """Mean loss and accuracy (NaN where it has no meaning) at each point, float64, and the path taken."""

    loss: Tensor
    accuracy: Tensor
    path: str


@dataclass(frozen=True)
class Evaluator:
    """One way through one plane, chosen once: called with points (K, 2), gives the :class:`Values` there.

    ``block`` points go through together; calls for a few blocks, or more, waste nothing. A point's values do
    not depend on the points it is called with.
    """

    path: str
    block: int
    samples: int
    precision: str
    totals: Totals

    @torch.no_grad()
    def __call__(self, points: Tensor, progress: Progress | None = None) -> Values:
        with _arithmetic(self.precision):
            totals = self.totals(points, progress or (lambda done: None)).cpu() / self.samples
        return Values(totals[:, 0], totals[:, 1], self.path)


def evaluate_plane(
    problem: Problem,
    center: Tensor,
    directions: Tensor,
    points: Tensor,
    *,
    path: str = "auto",
    precision: str = "model",
    progress: Progress | None = None,
) -> Values:
    """Loss and accuracy at center + points @ directions; points (K, 2), the rest as in :func:`evaluator`.

    ``progress`` is told the share of the work done. Losses that are not finite are returned as they are.
    """
    return evaluator(problem, center, directions, len(points), path=path, precision=precision)(
        points, progress
    )


def evaluator(
    problem: Problem,
    center: Tensor,
    directions: Tensor,
    count: int,
    *,
    path: str = "auto",
    precision: str = "model",
    max_memory: int | None = None,
) -> Evaluator:
    """The way to evaluate ``count`` points of the plane through center (P,) along directions (2, P).

    Args:
        path: one of PATHS; "auto" chooses, by what the model is and by a moment's trial.
        precision: "model": the model's own dtype; "tf32": the same with TensorFloat-32 products, for float32
            on CUDA; "bfloat16": weights and inputs rounded to it, outputs and losses in float32, by the
            folded path.
        max_memory: bytes; bounds what the process holds (on CUDA, what PyTorch holds on the device) while
            points are evaluated, by smaller chunks of data and blocks of points. Data given as batches goes
            through in those: their size is the caller's.

    Raises InputError for a path that the model cannot take, or a bound that cannot be kept.
    """
    choose("path", path, PATHS)
    choose("precision", precision, PRECISIONS)
    if precision == "tf32" and (problem.device.type != "cuda" or problem.dtype != torch.float32):
        raise InputError("precision: 'tf32' is not allowed here, it needs a float32 model on a CUDA device")
    lower = PRECISIONS[precision] or problem.dtype
    own = lower == problem.dtype
    budget = MemoryBudget.on(problem.device, max_memory)
    steps = chain(problem)
    fits = steps is not None and isinstance(steps[0], LinearStep) and own
    compared = Comparison(problem, center, directions, forced=path != "auto")
    if path in ("batched", "compiled") and not fits:
        raise InputError(
            f"path: '{path}' needs a chain of linear layers, tensor data and the model's own precision; "
            "use 'pointwise'"
        )
    if path == "pointwise" and not own:
        raise InputError(f"path: 'pointwise' works in the model's own precision, not in {precision}")

    def made(path: str, totals: Totals, block: int = 1) -> Evaluator:
        return Evaluator(path, block, problem.samples, precision, totals)

    if fits and path not in ("pointwise", "folded"):
        assert steps is not None
        size = block_size(problem, steps, count, budget, forced=path != "auto")
        agrees = size is not None and compared.agrees(
            "batched", lambda few: batched(few, steps, center, directions, (few.samples, 3))
        )
        if size is not None and agrees:
            totals, taken = batched(problem, steps, center, directions, size), "batched"
            # A compiler's memory has no bound.
            forced = path == "compiled"
            if forced or (path == "auto" and not max_memory and long_enough(problem, steps, count)):
                with _arithmetic(precision):
                    totals, taken = compiled_totals(problem, steps, center, directions, size, forced)
            return made(taken, penalised(problem, totals, center, directions), size[1])
        path = "pointwise"
    weights = problem.theta.nbytes  # the moved θ, one buffer for all points
    low = problem.layout.size * lower.itemsize
    # Statistics that are estimated at each point cannot be folded.
    folded = fold(problem.model, lower) if path != "pointwise" and problem.buffers_at is None else None
    if (
        path == "auto"
        and own
        and (folded is None or not folded.convolves or weights + low > budget.remaining)
    ):
        folded = None
    elif folded is not None:
        plain = folded if own else folded.converted(problem.dtype)
        if not compared.agrees("folded", lambda few: folded_totals(few, plain, center, directions, False)):
            folded = None
    if folded is None and (path == "folded" or not own):
        raise InputError(
            f"path: '{path}' in precision '{precision}' needs a model that torch.fx can trace and the "
            "BatchNorm statistics of the centre; use 'pointwise' and 'model'"
        )
    smaller = max(1, problem.dtype.itemsize // lower.itemsize)
    bounded = _bounded(problem, budget, weights + (low if folded else 0), smaller)
    if folded is None:
        return made("pointwise", pointwise(bounded, center, directions))
    keep = problem.tensors is not None and weights + low + 2 * problem.tensors[0].nbytes < budget.remaining
    totals = folded_totals(bounded, folded, center, directions, keep)
    return made("folded", penalised(problem, totals, center, directions))


def losses(problem: Problem, thetas: Tensor | None) -> Array:
    """(M,) float64 losses at the weights ``thetas`` (M, P) themselves; (0,) for None."""
    rows = () if thetas is None else thetas
    return np.array([problem.loss(theta.to(problem.theta)) for theta in rows], dtype=np.float64)


@contextlib.contextmanager
def _arithmetic(precision: str) -> Iterator[None]:
    """PyTorch set to TensorFloat-32 products inside the block, where that is the precision."""
    before = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if precision == "tf32":
            torch.set_float32_matmul_precision(before)


def _bounded(problem: Problem, budget: MemoryBudget, weights: int, smaller: int) -> Problem:
    """``problem`` in chunks of data that fit in the budget together with ``weights`` bytes.

    Without a bound they hold the same bytes in numbers ``smaller`` times as small.
    """
    if problem.resident is None:
        budget.require(weights)
        return problem
    if budget.limit is None:
        return problem.in_chunks(problem.chunk * smaller)
    sample = SPARE * problem.sample_bytes
    least = problem.chunk if problem.bn_samples else 1  # statistics come from batches of their own size
    budget.require(weights + least * sample)
    return problem.in_chunks(min(problem.chunk, max(least, int((budget.remaining - weights) // sample))))
