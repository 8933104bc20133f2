"""Loss and accuracy at many points of a plane, θ = center + x·u + y·v, as fast as the model allows.

Two paths, each the other's check in the tests:

- "batched": for chains of linear layers (see :mod:`landscape.stack`). θ is linear in (x, y) up to the first
  nonlinearity, so the first layer costs three products a data chunk, shared by all points; later layers
  take a block of points as one batched product, with features before samples in memory.
- "pointwise": any model, one forward pass over the data a point.

Peak memory is bounded whatever the number of points: a block of points for a chunk of data at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landscape.options import InputError, choose
from landscape.problem import Problem, correct
from landscape.stack import LinearStep, chain, stacked_losses
from landscape.store import Array

PATHS = ("auto", "batched", "pointwise")
# Measured on 2 cores, 784-50-50-10: 1,000 samples a chunk with about 50 points a block is the fastest;
# what counts is that a block's activations stay in cache, hence the bound in bytes.
CHUNK = 1000
BLOCK_BYTES = 16 * 2**20
MAX_BLOCK = 64

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
    progress: Progress | None = None,
) -> Values:
    """Loss and accuracy at center + points @ directions.

    Shapes: center (P,), directions (2, P), points (K, 2). ``progress`` is told the share of the work done.
    Losses that are not finite are returned as they are. Raises InputError for a path the model cannot take.
    """
    choose("path", path, PATHS)
    steps = chain(problem.model) if problem.tensors is not None else None
    fits = steps is not None and isinstance(steps[0], LinearStep)
    if path == "batched" and not fits:
        raise InputError("path: 'batched' needs a chain of linear layers and tensor data; use 'pointwise'")
    if fits and path != "pointwise":
        assert steps is not None
        return _batched(problem, steps, center, directions, points, progress or (lambda done: None))
    return _pointwise(problem, center, directions, points, progress or (lambda done: None))


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
def _batched(
    problem: Problem,
    steps: list[LinearStep | torch.nn.Module],
    center: Tensor,
    directions: Tensor,
    points: Tensor,
    progress: Progress,
) -> Values:
    layout = problem.layout
    basis = torch.stack((center, directions[0], directions[1]))  # (3, P)
    views = layout.views(basis)
    first = steps[0]
    assert isinstance(first, LinearStep)
    assert problem.tensors is not None
    weights = views[first.weight].reshape(-1, views[first.weight].shape[-1])  # (3·out, in)
    coords = torch.cat((torch.ones(len(points), 1), points), 1).to(problem.device, problem.dtype)  # (K, 3)
    x, y = problem.tensors
    widths = [views[s.weight].shape[1] for s in steps if isinstance(s, LinearStep)]
    chunk = min(CHUNK, problem.samples)
    block_bytes = max(chunk * max(widths), layout.size - weights.numel() // 3) * problem.theta.itemsize
    block = max(1, min(MAX_BLOCK, BLOCK_BYTES // block_bytes))
    loss = torch.zeros(len(points), dtype=torch.float64, device=problem.device)
    right = torch.zeros(len(points), dtype=torch.float64, device=problem.device)
    for i in range(0, problem.samples, chunk):
        xc, yc = x[i : i + chunk].flatten(1), y[i : i + chunk]
        products = (weights @ xc.T).view(3, -1, len(xc))  # W·x, U·x, V·x: (3, out, samples)
        for k in range(0, len(points), block):
            c = coords[k : k + block]
            # The layers after the first, (k, *shape) each: made again for every chunk, which costs little
            # beside their use on a chunk of samples and keeps memory to one block.
            later = {name: torch.tensordot(c, v, 1) for name, v in views.items() if name != first.weight}
            a, b = c[:, 1, None, None], c[:, 2, None, None]
            h = torch.addcmul(products[0], a, products[1]).addcmul_(b, products[2])  # (k, out, samples)
            if first.bias:
                h += later[first.bias].unsqueeze(-1)
            for step in steps[1:]:
                if isinstance(step, LinearStep):
                    w = later[step.weight]
                    h = torch.baddbmm(later[step.bias].unsqueeze(-1), w, h) if step.bias else torch.bmm(w, h)
                else:
                    h = step(h)
            means = stacked_losses(problem.criterion, h, yc.expand(len(c), *yc.shape))
            loss[k : k + block] += means.double() * len(yc)
            right[k : k + block] += _correct(h, yc)
            progress((i + len(yc) * min(1.0, (k + block) / len(points))) / problem.samples)
    return Values(loss.cpu() / problem.samples, right.cpu() / problem.samples, "batched")


def _correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """(K,) how many samples each of outputs (K, C, samples) classifies right; NaN if not such a task."""
    if targets.dim() != 1 or targets.is_floating_point():
        return correct(None, None)
    # argmax along a middle dimension is 40 times slower here than amax: it serves only where outputs tie.
    best = outputs == outputs.amax(1, keepdim=True)
    if int(best.sum()) == best[:, 0].numel():
        return best.gather(1, targets.expand(len(best), 1, -1)).sum((1, 2)).double()
    return (outputs.argmax(1) == targets).sum(1).double()
