"""Loss and accuracy at many points of a plane, θ = center + x·u + y·v, as fast as the model allows.

Paths, which the tests compare with one another:

- "batched": for chains of linear layers (see :mod:`.chain`). θ is linear in (x, y) up to the first
  nonlinearity, so the first layer costs three products a data chunk, shared by all points; later layers
  take a block of points as one batched product, with features before samples in memory.
- "pointwise": any model, one forward pass over the data a point. "folded" is the same with BatchNorm folded
  into the convolutions and channels-last layout, for models that torch.fx can trace; "auto" takes it for
  models with convolutions.

Each path but "pointwise" is first compared with it on the user's model: on a few samples, at the center and
at two displaced points of the plane. Where they differ by more than rounding, "auto" goes back to
"pointwise" with a PathWarning. No choice depends on the clock: the same call takes the same path.

Memory is bounded whatever the number of points: a block of points for a chunk of data at a time, of
BLOCK_BYTES or ACTIVATION_BYTES, less where ``max_memory`` asks for it. On a GPU nothing waits for the device
before all points are through.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.memory import MemoryBudget, limit
from landscape.core.options import choose
from landscape.core.progress import Progress, no_progress
from landscape.evaluation import paths
from landscape.evaluation.paths import PlaneLoss, Totals, block_size
from landscape.problem.problem import Layer, LinearLayer, Problem, chain
from landscape.problem.sharded import on_ranks

METHODS = ("auto", "batched", "folded", "pointwise")
# The dtype of the arithmetic; "tf32": that of the model.
AUTOCASTS = {"tf32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Evaluator:
    """The chosen path through one plane: called with points (K, 2), it gives the losses and accuracies there.

    They are mean loss and accuracy (NaN where it has no meaning) of each point, (K,) float64, by name. Losses
    that are not finite are returned as they are.

    ``block`` points are evaluated together, so that calls for whole blocks are the fastest. A point's values
    do not depend on the other points of the call. ``parts`` is the problem in parts that fit into the memory.
    """

    method: str
    block: int
    samples: int
    autocast: str | None
    totals: Totals
    parts: Problem

    @torch.no_grad()
    def __call__(self, points: Tensor, progress: Progress = no_progress) -> dict[str, Tensor]:
        with _arithmetic(self.autocast):
            totals = self.totals(points, progress).cpu() / self.samples
        return {"loss": totals[:, 0], "accuracy": totals[:, 1]}


def evaluator(
    problem: Problem,
    center: Tensor,
    directions: Tensor,
    count: int,
    *,
    method: str = "auto",
    autocast: str | None = None,
    max_memory: int | None = None,
) -> Evaluator:
    """The path to evaluate ``count`` points of the plane through center (P,) along directions (2, P).

    Args:
        method: one of METHODS; "auto" chooses by the kind of the model and a comparison on a few samples.
        autocast: None: the model's dtype; "tf32": the same with TensorFloat-32 products, for float32 on
            CUDA; "bfloat16": weights and inputs rounded to it, outputs and losses in float32, by the folded
            path.
        max_memory: bytes, by default the limit of the call that is under way; bounds the memory of the
            process (on CUDA, the memory that PyTorch has reserved on the device) during the evaluation, by
            smaller chunks of data and blocks of points. Data given as batches keeps its batches: their size
            is the caller's.

    Raises:
        InputError: a method that the model cannot take, or a bound that is too small.
    """
    choose("method", method, METHODS)
    if autocast is not None:
        choose("autocast", autocast, AUTOCASTS)
    if autocast == "tf32" and (problem.device.type != "cuda" or problem.dtype != torch.float32):
        raise InputError("autocast: 'tf32' is not allowed here, it needs a float32 model on a CUDA device")
    max_memory = limit() if max_memory is None else max_memory
    loss, budget = PlaneLoss(problem, center, directions), MemoryBudget.on(problem.device, max_memory)
    layers, dtype = chain(problem), (AUTOCASTS[autocast] if autocast else None) or problem.dtype
    # The batched path is possible for a chain that starts with a linear layer.
    takes = layers is not None and isinstance(layers[0], LinearLayer) and dtype == problem.dtype
    if center.dtype != problem.dtype:  # of networks in half precision, whose losses are the model's own
        takes, method = False, "pointwise" if method == "auto" else method
    if method == "batched" and not takes:
        raise InputError(
            f"method: '{method}' needs a chain of linear layers, tensor data and the model's own precision; "
            "use 'pointwise'"
        )
    if method == "pointwise" and dtype != problem.dtype:
        raise InputError(f"method: 'pointwise' works in the model's own precision, not in {autocast}")
    found, wanted = None, method
    if layers is not None and takes and method not in ("pointwise", "folded"):
        found = _by_blocks(loss, layers, count, method, budget)
        wanted = "pointwise"
    chosen, block, totals, parts = found or _by_points(loss, wanted, autocast, dtype, budget)
    return Evaluator(chosen, block, problem.samples, autocast, totals, parts)


def _by_blocks(
    loss: PlaneLoss, layers: list[Layer], count: int, method: str, budget: MemoryBudget
) -> tuple[str, int, Totals, Problem] | None:
    """The batched path; None if it has too little memory or is wrong for the model."""
    problem, forced = loss.problem, method != "auto"
    size = block_size(problem, layers, count, budget, forced=forced)
    if size is None or not loss.agrees(
        "batched", lambda few: paths.batched(few, layers, (few.problem.samples, 3)), forced=forced
    ):
        return None
    parts = problem if budget.limit is None else problem.on(problem.data.in_chunks(size[0]))
    return "batched", size[1], loss.with_penalty(paths.batched(loss, layers, size)), parts


def _by_points(
    loss: PlaneLoss, method: str, autocast: str | None, dtype: torch.dtype, budget: MemoryBudget
) -> tuple[str, int, Totals, Problem]:
    """The folded path, or the pointwise one."""
    problem, same = loss.problem, dtype == loss.problem.dtype
    weights = problem.weights.nbytes  # the moved θ, one buffer for all points
    low = problem.layout.size * dtype.itemsize
    # Statistics that are estimated at each point cannot be folded.
    foldable = method != "pointwise" and not problem.batchnorm.varies and problem.separable
    folded = paths.fold(problem.model, dtype) if foldable else None
    pays = folded is not None and folded.convolves and weights + low <= budget.remaining
    if method == "auto" and same and not pays:
        folded = None
    elif folded is not None:
        exact = folded if same else folded.converted(problem.dtype)
        if not loss.agrees("folded", lambda few: paths.folded_totals(few, exact), forced=method != "auto"):
            folded = None
    if folded is None and (method == "folded" or not same):
        raise InputError(
            f"method: '{method}' with autocast {autocast or 'None'} needs a model that torch.fx can trace, "
            "the BatchNorm statistics of the center, and a loss that is a mean over samples; use "
            "'pointwise', and no autocast"
        )
    smaller = max(1, problem.dtype.itemsize // dtype.itemsize)
    parts = _bounded(problem, budget, weights + (low if folded else 0), smaller)
    bounded = replace(loss, problem=parts)
    if folded is None:
        return "pointwise", 1, bounded.pointwise, parts
    return "folded", 1, loss.with_penalty(paths.folded_totals(bounded, folded)), parts


def confirm(run: Evaluator, center: Tensor, directions: Tensor, points: Tensor, values: Array) -> None:
    """Raise InputError unless the problem's own loss at one of the points is the value that ``run`` gave.

    It is that of all samples, which no comparison on a few of them replaces, at the point nearest to the
    center whose value is finite. One pass over the data; not with ``check`` "off".

    Args:
        points, values: (K, 2), and the losses (K,) there, NaN where there is none.
    """
    problem, found = run.parts, np.flatnonzero(np.isfinite(values))
    if not len(found) or problem.check == "off":
        return
    k = int(found[points[torch.from_numpy(found)].norm(dim=1).argmin()])
    a, b = points[k].tolist()
    theta = PlaneLoss(problem, center, directions).move(a, b, torch.empty_like(center))
    value, plain = float(values[k]), problem.loss(theta)
    eps = torch.finfo(problem.dtype).eps
    allowed = math.sqrt(eps) * abs(plain) + 100 * eps
    if abs(value - plain) <= allowed:
        return
    again = problem.loss(theta)
    cause = f"the method '{run.method}' is wrong for this model; use method='pointwise'"
    if run.method == "pointwise" or not abs(again - plain) <= allowed:
        cause = f"it is {again:.8g} when asked again; the loss is random, or changes with each pass"
    raise InputError(
        f"model or loss: at the point ({a:.4g}, {b:.4g}) the loss is {value:.8g}, but by Problem.loss() it "
        f"is {plain:.8g}: {cause}"
    )


@contextlib.contextmanager
def _arithmetic(autocast: str | None) -> Iterator[None]:
    """PyTorch set to TensorFloat-32 products inside the block, where that is the precision."""
    if autocast != "tf32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _bounded(problem: Problem, budget: MemoryBudget, weights: int, smaller: int) -> Problem:
    """``problem`` in chunks of data whose activations fit into the memory left beside ``weights`` bytes.

    Without a bound a chunk takes the usual bytes, in numbers ``smaller`` times as small.
    """
    data = problem.data
    if data.resident is None or on_ranks(problem):
        budget.require(weights)
        return problem
    if budget.limit is None:
        return problem.on(data.in_chunks(problem.chunk * smaller))
    sample = paths.ACTIVATION_COPIES * problem.sample_bytes
    # Statistics need batches of their size, and random numbers are drawn for each chunk.
    least = problem.chunk if problem.batchnorm.samples or not problem.separable else 1
    budget.require(weights + least * sample)
    size = min(problem.chunk, max(least, int((budget.remaining - weights) // sample)))
    return problem.on(data.in_chunks(size))
