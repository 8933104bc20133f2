"""Loss and accuracy at many points of a plane, θ = center + x·u + y·v, as fast as the model allows.

Paths, each the other's check in the tests:

- "batched": for chains of linear layers (see :mod:`landscape.stack`). θ is linear in (x, y) up to the first
  nonlinearity, so the first layer costs three products a data chunk, shared by all points; later layers
  take a block of points as one batched product, with features before samples in memory. "compiled" is the
  same under torch.compile; "auto" turns to it for long grids, where it can.
- "pointwise": any model, one forward pass over the data a point. "folded" is the same with BatchNorm folded
  into the convolutions and channels-last layout, for models that torch.fx can trace; "auto" times one chunk
  each way and takes the faster.

Peak memory is bounded whatever the number of points: a block of points for a chunk of data at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.fold import FoldedForward, fold
from landscape.options import InputError, choose
from landscape.problem import Problem, correct
from landscape.stack import LinearStep, Step, chain, stacked_losses
from landscape.store import Array

PATHS = ("auto", "batched", "compiled", "folded", "pointwise")
PRECISIONS = {"model": None, "bfloat16": torch.bfloat16}
# Measured on 2 cores, 784-50-50-10: 1,000 samples a chunk with about 50 points a block is the fastest;
# what counts is that a block's activations stay in cache, hence the bound in bytes.
CHUNK = 1000
BLOCK_BYTES = 16 * 2**20
MAX_BLOCK = 64
# Compiling takes 6 to 40 s on 2 cores and makes the rest about 1.7 times as fast: worth it from here on.
COMPILE_SECONDS = 90.0
# Samples that the choice between folded and plain is timed on: enough to fill the cores (ours).
TRIAL = 32

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Values:
    """Mean loss and accuracy (NaN where it has no meaning) at each point, float64, and the path taken."""

    loss: Tensor
    accuracy: Tensor
    path: str


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
    """Loss and accuracy at center + points @ directions.

    Shapes: center (P,), directions (2, P), points (K, 2). ``progress`` is told the share of the work done.
    Losses that are not finite are returned as they are. Raises InputError for a path the model cannot take.
    """
    choose("path", path, PATHS)
    choose("precision", precision, PRECISIONS)
    lower = PRECISIONS[precision] or problem.dtype
    own = lower == problem.dtype
    progress = progress or (lambda done: None)
    steps = chain(problem.model) if problem.tensors is not None else None
    fits = steps is not None and isinstance(steps[0], LinearStep) and own
    if path in ("batched", "compiled") and not fits:
        raise InputError(
            f"path: '{path}' needs a chain of linear layers, tensor data and the model's own precision; "
            "use 'pointwise'"
        )
    if path == "pointwise" and not own:
        raise InputError(f"path: 'pointwise' works in the model's own precision, not in {precision}")
    if fits and path not in ("pointwise", "folded"):
        assert steps is not None
        return _batched(problem, steps, center, directions, points, path, progress)
    # A problem whose evaluate is its own (a BatchNorm policy) is evaluated by that.
    usual = type(problem).evaluate is Problem.evaluate
    folded = fold(problem.model, lower) if path != "pointwise" and usual else None
    if folded is None and (path == "folded" or not own):
        raise InputError(
            f"path: '{path}' in precision '{precision}' needs a model that torch.fx can trace and the "
            "BatchNorm statistics of the centre; use 'pointwise' and 'model'"
        )
    if folded is None or (path == "auto" and own and not _folding_pays(problem, folded)):
        return _pointwise(problem, center, directions, points, progress)
    return _folded(problem, folded, center, directions, points, progress)


def losses(problem: Problem, thetas: Tensor | None) -> Array:
    """(M,) float64 losses at the weights ``thetas`` (M, P) themselves; (0,) for None."""
    rows = () if thetas is None else thetas
    return np.array([problem.loss(theta.to(problem.theta)) for theta in rows], dtype=np.float64)


def _pointwise(
    problem: Problem, center: Tensor, directions: Tensor, points: Tensor, progress: Progress
) -> Values:
    loss = torch.empty(len(points), dtype=torch.float64)
    accuracy = torch.empty(len(points), dtype=torch.float64)
    for k, (a, b) in enumerate(points.tolist()):
        theta = torch.add(center, directions[0], alpha=a).add_(directions[1], alpha=b)
        loss[k], accuracy[k] = problem.evaluate(theta)
        progress((k + 1) / len(points))
    return Values(loss, accuracy, "pointwise")


@torch.no_grad()
def _folded(
    problem: Problem,
    folded: FoldedForward,
    center: Tensor,
    directions: Tensor,
    points: Tensor,
    progress: Progress,
) -> Values:
    loss = torch.zeros(len(points), dtype=torch.float64, device=problem.device)
    right = torch.zeros(len(points), dtype=torch.float64, device=problem.device)
    theta = torch.empty_like(center)  # one buffer for all points; the model's parameters are views of it
    laid_out = None
    if problem.tensors is not None:  # once, not once a point
        laid_out = [(folded.inputs(x), y, count) for x, y, count in problem.chunks()]
    for k, (a, b) in enumerate(points.tolist()):
        torch.add(center, directions[0], alpha=a, out=theta).add_(directions[1], alpha=b)
        weights = folded.weights(problem.layout.views(theta))
        for x, y, count in laid_out or problem.chunks():
            outputs = folded(weights, folded.inputs(x))
            loss[k] += problem.criterion(outputs, y).double() * count
            right[k] += correct(outputs, y)
        progress((k + 1) / len(points))
    return Values(loss.cpu() / problem.samples, right.cpu() / problem.samples, "folded")


@torch.no_grad()
def _folding_pays(problem: Problem, folded: FoldedForward) -> bool:
    """Whether a few samples go through faster folded than as they are; each twice, the second time counts."""
    x, _, _ = next(iter(problem.chunks()))
    x = x[:TRIAL] if isinstance(x, Tensor) else x
    inputs, weights = folded.inputs(x), folded.weights(problem.layout.views(problem.theta))
    times = []
    ways: list[Callable[[], Any]] = [
        lambda: folded(weights, inputs),
        lambda: problem.outputs(problem.theta, x),
    ]
    for forward in ways:
        for _ in range(2):
            clock = time.perf_counter()
            forward()
            if problem.device.type == "cuda":
                torch.cuda.synchronize(problem.device)
            elapsed = time.perf_counter() - clock
        times.append(elapsed)
    return times[0] < times[1]


@torch.no_grad()
def _batched(
    problem: Problem,
    steps: list[Step],
    center: Tensor,
    directions: Tensor,
    points: Tensor,
    path: str,
    progress: Progress,
) -> Values:
    views = problem.layout.views(torch.stack((center, directions[0], directions[1])))  # (3, *shape) each
    first = steps[0]
    assert isinstance(first, LinearStep)
    assert problem.tensors is not None
    weights = views[first.weight].flatten(0, 1)  # (3·out, in)
    coords = torch.cat((torch.ones(len(points), 1), points), 1).to(problem.device, problem.dtype)  # (K, 3)
    x, y = problem.tensors
    widths = [views[s.weight].shape[1] for s in steps if isinstance(s, LinearStep)]
    chunk = min(CHUNK, problem.samples)
    block_bytes = max(chunk * max(widths), problem.layout.size - views[first.weight][0].numel())
    block = max(1, min(MAX_BLOCK, len(points), BLOCK_BYTES // (block_bytes * problem.theta.itemsize)))
    loss = torch.zeros(len(points), dtype=torch.float64, device=problem.device)
    right = torch.zeros(len(points), dtype=torch.float64, device=problem.device)

    def eager(c: Tensor, products: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _block(problem, steps, views, c, products, targets)

    run, taken = eager, "batched"
    if path == "compiled":
        run, taken = torch.compile(eager, dynamic=False), "compiled"
    for i in range(0, problem.samples, chunk):
        xc, yc = x[i : i + chunk].flatten(1), y[i : i + chunk]
        products = (weights @ xc.T).view(3, -1, len(xc))  # W·x, U·x, V·x: (3, out, samples)
        for k in range(0, len(points), block):
            # The last block looks back over points that are done, so that all have one shape.
            where = slice(min(k, len(points) - block), min(k, len(points) - block) + block)
            new = slice(k - where.start, block)
            clock = time.perf_counter()
            means, hits = run(coords[where], products, yc)
            loss[where][new] += means[new].double() * len(yc)
            right[where][new] += hits[new]
            done = (i + len(yc) * min(1.0, (k + block) / len(points))) / problem.samples
            progress(done)
            if path == "auto" and i == k == 0 and (time.perf_counter() - clock) / done > COMPILE_SECONDS:
                compiled = torch.compile(eager, dynamic=False)
                with contextlib.suppress(Exception):  # no compiler, or one that fails: this path goes on
                    compiled(coords[where], products, yc)
                    run, taken = compiled, "compiled"
    return Values(loss.cpu() / problem.samples, right.cpu() / problem.samples, taken)


def _block(
    problem: Problem,
    steps: list[Step],
    views: dict[str, Tensor],
    c: Tensor,
    products: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean losses (k,) and hits (k,) of the points c (k, 3) on one chunk of data.

    ``products`` (3, out, samples) are the first layer's, ``views`` the centre and directions, (3, *shape).
    """

    def at_points(name: str) -> Tensor:  # (k, *shape)
        return (c @ views[name].flatten(1)).view(len(c), *views[name].shape[1:])

    first = steps[0]
    assert isinstance(first, LinearStep)
    a, b = c[:, 1, None, None], c[:, 2, None, None]
    h = torch.addcmul(products[0], a, products[1]).addcmul_(b, products[2])  # (k, out, samples)
    if first.bias:
        h += at_points(first.bias).unsqueeze(-1)
    for step in steps[1:]:
        if isinstance(step, LinearStep):
            w = at_points(step.weight)
            h = torch.baddbmm(at_points(step.bias).unsqueeze(-1), w, h) if step.bias else torch.bmm(w, h)
        else:
            h = step(h)
    return stacked_losses(problem.criterion, h, targets.expand(len(c), *targets.shape)), _correct(h, targets)


def _correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """(K,) how many samples each of outputs (K, C, samples) classifies right; NaN if not such a task."""
    if targets.dim() != 1 or targets.is_floating_point():
        return correct(None, None)
    # In eager mode argmax along a middle dimension is 40 times slower than amax: it serves where outputs tie.
    if torch.compiler.is_compiling():
        return (outputs.argmax(1) == targets).sum(1).double()
    best = outputs == outputs.amax(1, keepdim=True)
    if int(best.sum()) == best[:, 0].numel():
        return best.gather(1, targets.expand(len(best), 1, -1)).sum((1, 2)).double()
    return (outputs.argmax(1) == targets).sum(1).double()
