"""Compute loss and accuracy at many points of a plane, θ = center + x·u + y·v, as fast as the model allows.

There are three methods, which the tests compare with one another:

- "batched": for chains of linear layers. Up to the first nonlinearity θ is linear in (x, y), so that the
  first layer takes three products per chunk of data, which all points share. Later layers multiply a block of
  points as one batched product, with features before samples in memory.
- "pointwise": for any model, one forward pass over the data per point.
- "folded": the same with BatchNorm folded into the convolutions and a channels-last layout, for models that
  torch.fx can trace. "auto" chooses it for models with convolutions.

The first use of "batched" and "folded" compares their losses with those of "pointwise" on the user's model:
on a few samples, at the center and at two displaced points of the plane. Where they differ by more than
rounding, "auto" falls back to "pointwise" with a PathWarning. No choice depends on timings: the same call
uses the same method.

Memory is bounded for any number of points: a block of points times a chunk of data is computed at a time, of
BLOCK_BYTES, or less under ``max_memory``. On a GPU the host waits for the device only after all points.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from landscape.core.devices import Captured, double, float64_device, vector_norm
from landscape.core.errors import InputError, PathWarning, warn_caller
from landscape.core.hdf5 import Array
from landscape.core.memory import MemoryBudget, limit
from landscape.core.options import OneOf
from landscape.core.progress import Progress, no_progress
from landscape.evaluation.folding import FoldedForward, fold
from landscape.problem.checks import tolerance
from landscape.problem.losses import is_softmax_loss
from landscape.problem.metrics import Scores, Sums, few_of, names_of, numbers
from landscape.problem.problem import Layer, LinearLayer, Problem, chain, stacked_losses
from landscape.problem.sharded import on_ranks

# Measured on 1 core, 784-50-50-10: whole contours are as fast with chunks of 1,000 samples and blocks of 20
# points. Contours within 1%, which compute few points at a time, are then 4 to 7% slower.
CHUNK = 2000
BLOCK_BYTES = 16 * 2**20
MAX_BLOCK, MAX_GPU_BLOCK = 10, 320
# Measured on a CPU with 1 to 4 threads: the products of a batch of matrices have the same bits for any number
# of matrices from 2 on. With 2 threads, the product of a single matrix has other bits.
MIN_BLOCK = 2
# The first layer's products are stored for the next call up to this size (our choice: small beside the data).
PRODUCT_BYTES = 64 * 2**20
# On a GPU the start of a kernel takes longer than a block of this size: with these sizes a contour on an H200
# was as slow as one forward pass per point. There the other two sizes are larger by this factor (our choice).
GPU_FACTOR = 16


def scaled_to_device(size: int, device: torch.device) -> int:
    """Return one of the sizes above, scaled by GPU_FACTOR unless ``device`` is a CPU."""
    return size if device.type == "cpu" else GPU_FACTOR * size


def block_size(
    problem: Problem, layers: list[Layer], count: int, budget: MemoryBudget, is_forced: bool
) -> tuple[int, int] | None:
    """Return the number of samples in a chunk, and of points in a block, for the batched method.

    If one sample at one point exceeds the memory, return None or, if ``is_forced``, raise InputError.

    Args:
        problem: the loss.
        layers: the layers of the model, a chain.
        count: the number of points that will be evaluated.
        budget: the memory.
        is_forced: whether the user has chosen the method.
    """
    shapes = {slot.name: slot.shape for slot in problem.layout.slots}
    weight_shapes = [shapes[layer.weight] for layer in layers if isinstance(layer, LinearLayer)]
    first_width, inputs = weight_shapes[0]
    widest = max(width for width, _ in weight_shapes)
    later_weights = problem.layout.size - first_width * inputs
    number_bytes = problem.weights.itemsize
    # How many copies of a layer's numbers may exist at once. Metrics need up to three more: one with the
    # dimensions in another order, and two in float64, each of which is as large as two copies.
    copies = ACTIVATION_COPIES + (5 if problem.metrics else 0)
    # The center and the two directions in one tensor, and the weights of later layers at one point.
    fixed_bytes = 3 * problem.weights.nbytes + copies * later_weights * number_bytes
    # For one sample: three products with the first layer's weights, and the activations at one point.
    sample_bytes = (3 * first_width + copies * widest) * number_bytes
    if fixed_bytes + sample_bytes > budget.remaining:
        if is_forced:
            budget.require(fixed_bytes + sample_bytes)
        return None
    scaled = functools.partial(scaled_to_device, device=problem.device)
    chunk = int(min(scaled(CHUNK), problem.samples, (budget.remaining - fixed_bytes) // sample_bytes))
    # At one point, the activations or the weights, whichever are larger. Below, ``copies`` of the larger ones
    # are counted, which also have room for the smaller ones.
    point_bytes = max(chunk * widest, later_weights) * number_bytes
    remaining = budget.remaining - fixed_bytes - 3 * first_width * chunk * number_bytes
    max_by_memory = remaining // (copies * point_bytes)
    max_by_cache = scaled(BLOCK_BYTES) // point_bytes
    # On a CPU, a block has more points if chunks are smaller, so that samples times points stays the same.
    max_block = MAX_BLOCK * CHUNK // chunk if problem.device.type == "cpu" else MAX_GPU_BLOCK
    return chunk, int(max(1, min(max_block, count, max_by_cache, max_by_memory)))


@torch.no_grad()  # here; the callers of the returned function turn gradients off, too
def batched(loss: PlaneLoss, layers: list[Layer], size: tuple[int, int], may_store: bool = False) -> Totals:
    """Return the function that computes the totals of points by the batched method, see :data:`Totals`.

    Args:
        loss: the loss on the plane.
        layers: the layers of the model, a chain that begins with a linear layer.
        size: the number of samples in a chunk, and the number of points in a block.
        may_store: whether tensors that several chunks or calls share may be stored: the parameters at the
            points, and the products of the first layer.
    """
    problem, samples = loss.problem, loss.problem.samples
    chunk, block = size
    first_layer, *later_layers = layers
    assert isinstance(first_layer, LinearLayer)
    assert problem.tensors is not None
    x, y = problem.tensors
    # The parameters of the center and of the two directions, (3, *shape), by name.
    views = problem.layout.views(torch.stack((loss.center, *loss.directions)))
    last_layer = next(layer for layer in reversed(layers) if isinstance(layer, LinearLayer))
    output_count = views[last_layer.weight].shape[1]
    has_classes = y.dim() == 1 and not y.is_floating_point() and output_count > 1
    has_accuracy = has_classes and bool(((y >= 0) & (y < output_count)).all())
    # A built-in metric has a ``statistic``, which is computed from Scores. A metric of the user has none.
    is_builtin = [metric.statistic is not None for metric in problem.metrics]
    # If a built-in metric needs the terms of a softmax loss, the loss is computed from the same terms.
    has_softmax_terms = has_accuracy and is_softmax_loss(problem.criterion) and any(is_builtin)

    def at_points(values: Tensor, points: Tensor) -> Tensor:
        """Return the values (k, *shape) at ``points`` (k, 2).

        ``values`` (3, *shape) are those at the center, and their changes along the two directions. The
        computation is element by element, because a matrix product rounds differently with another number of
        points.
        """
        a, b = points.T.reshape(2, -1, *[1] * (values.dim() - 1))
        return torch.addcmul(values[0], a, values[1]).addcmul_(b, values[2])

    def evaluate_chunk(
        points: Tensor, parameters: dict[str, Tensor], input_products: Tensor, y_chunk: Tensor
    ) -> list[Tensor]:
        """Evaluate a chunk of B samples at a block of k points.

        Args:
            points: (k, 2).
            parameters: name -> (k, *shape), at the points: all parameters except the first layer's weights.
            input_products: (3, width, B), the first layer's weights of the center and of each direction,
                times the samples.
            y_chunk: (B, …), the targets of the samples.

        Returns:
            The mean losses (k,), the numbers of correct samples (k,), and for each metric the sums (k, S) of
            its S terms over the samples.
        """
        point_count = len(points)
        h = at_points(input_products, points)  # (k, width, B)
        if first_layer.bias:
            h += parameters[first_layer.bias].unsqueeze(-1)
        for layer in later_layers:
            if not isinstance(layer, LinearLayer):
                h = h.relu_() if type(layer) is nn.ReLU else layer(h)
            elif layer.bias:
                h = torch.baddbmm(parameters[layer.bias].unsqueeze(-1), parameters[layer.weight], h)
            else:
                h = torch.bmm(parameters[layer.weight], h)
        targets = y_chunk.expand(point_count, *y_chunk.shape)
        # Scores takes targets that are no classes as (outputs, B), the form that ``numbers`` gives.
        scores = Scores(h, y_chunk if has_classes else numbers(y_chunk))
        if has_softmax_terms:
            # Each (k, 1, B): top is the largest output, own is the output of the target's class, and scale is
            # log Σ exp(outputs − top). Cross-entropy, log Σ exp(outputs) − own, is top − own + scale.
            losses = (scores.top - scores.own + scores.scale).mean(2)[:, 0]
        else:
            losses = stacked_losses(problem.criterion, h, targets)
        # scores.right: (k, B)
        correct = scores.right.sum(1) if has_accuracy else torch.full_like(losses, torch.nan)
        # (k·B, outputs), for metrics of the user, which take a row for each sample.
        rows = None if all(is_builtin) else h.transpose(1, 2).flatten(0, 1)
        sample_sums = [metric.sums(rows, targets.flatten(0, 1), scores) for metric in problem.metrics]
        sums = [values.view(point_count, -1, values.shape[1]).sum(1) for values in sample_sums]
        return [losses, correct, *sums]

    first_weights = views.pop(first_layer.weight).flatten(0, 1)  # (3·width, inputs)
    stored_blocks = BLOCK_BYTES // (problem.weights.nbytes * block) if may_store else 0
    stores_products = may_store and len(first_weights) * samples * x.itemsize <= PRODUCT_BYTES
    stored_products: dict[int, Tensor] = {}  # by the number of the first sample
    # On a CPU, all blocks of MIN_BLOCK points or more give a point the same bits; on a GPU, full blocks do.
    min_block = MIN_BLOCK if problem.device.type == "cpu" else block

    def totals(points: Tensor, progress: Progress) -> Tensor:
        # The last point is repeated until the last block has at least ``min_block`` points. A point's bits
        # then do not depend on the other points of the call.
        last_block = (len(points) - 1) % block + 1
        padding = max(0, min(min_block, block) - last_block)
        padded = torch.cat((points, points[-1:].expand(padding, 2))).to(problem.device, problem.dtype)

        @functools.lru_cache(maxsize=stored_blocks)
        def parameters(first_point: int) -> dict[str, Tensor]:
            block_points = padded[first_point : first_point + block]
            return {name: at_points(values, block_points) for name, values in views.items()}

        total = loss.zeros(len(padded))
        metric_sums: list[Tensor] = []  # for each metric, (points, S), the sums of its S terms
        for i in range(0, samples, chunk):
            x_chunk, y_chunk = x[i : i + chunk], y[i : i + chunk]
            count = len(x_chunk)
            input_products = stored_products.get(i)
            if input_products is None:
                input_products = (first_weights @ x_chunk.flatten(1).T).view(3, -1, count)
            if stores_products:
                stored_products[i] = input_products
            for first_point in range(0, len(padded), block):
                rows = slice(first_point, first_point + block)
                chunk_values = evaluate_chunk(padded[rows], parameters(first_point), input_products, y_chunk)
                mean_losses, correct, *sums = chunk_values
                total[rows, 0] += double(mean_losses) * count
                total[rows, 1] += correct.to(total.device)
                if not metric_sums:
                    metric_sums = [total.new_zeros(len(total), values.shape[1]) for values in sums]
                for metric_sum, values in zip(metric_sums, sums, strict=True):
                    metric_sum[rows] += values
                progress((i + count * (first_point + block) / len(padded)) / samples)
            del input_products  # frees memory for the next products
        # After the losses and the correct samples, one column for each metric, times ``samples``: a caller
        # divides all columns by ``samples``. ``finish`` gives the metric for the means of its terms.
        for column, (metric, metric_sum) in enumerate(zip(problem.metrics, metric_sums, strict=True), 2):
            total[:, column] = metric.finish(metric_sum / samples) * samples
        return total[: len(points)]

    return totals


# Distance from the center of the two displaced points of a comparison, as a share of the center's norm
# (our choice: far enough to tell a wrong method from rounding).
DISPLACEMENT = 0.3
# Under max_memory, activations count this many times: a layer's input, output and scratch space exist at
# once, and freed memory does not return to the system at once (our choice).
ACTIVATION_COPIES = 3

# From points (K, 2) to totals (K, 2 + metrics) in float64: the sums over the samples of the losses, of the
# correct samples, and of the metrics.
Totals = Callable[[Tensor, Progress], Tensor]


@dataclass(frozen=True)
class PlaneLoss:
    """The loss at points (a, b) of a plane, θ = center + a·directions[0] + b·directions[1].

    Attributes:
        problem: the loss.
        center, directions: (P,) and (2, P).
    """

    problem: Problem
    center: Tensor
    directions: Tensor

    def move(self, a: float, b: float, weights: Tensor) -> Tensor:
        """Write the weights at (a, b) to ``weights`` (P,), and return them in the problem's precision."""
        u, v = self.directions
        return torch.add(self.center, u, alpha=a, out=weights).add_(v, alpha=b).to(self.problem.dtype)

    def zeros(self, count: int) -> Tensor:
        """Return zeros (count, 2 + metrics), in float64 if the device supports it."""
        columns, device = 2 + len(self.problem.metrics), float64_device(self.problem.device)
        return torch.zeros(count, columns, dtype=torch.float64, device=device)

    def replayed(self, totals: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """``totals`` at weights (P,), recorded where all data lie on the device and nothing is random."""
        problem = self.problem
        varies = problem.data.resident is None or problem.draws or problem.batchnorm.varies
        varies |= not all(metric.of_sums for metric in problem.metrics)  # others are computed by the host
        return totals if varies else functools.partial(Captured(), totals)

    @functools.cached_property
    def _of_problem(self) -> Callable[[Tensor], Tensor]:
        return self.replayed(self.problem.totals)

    def pointwise(self, points: Tensor, progress: Progress) -> Tensor:
        """Return the totals, see :data:`Totals`, of the problem itself, point by point."""
        total = self.zeros(len(points))
        theta = torch.empty_like(self.center)  # one buffer for all points; the parameters are views of it
        for k, (a, b) in enumerate(points.tolist()):
            total[k] = self._of_problem(self.move(a, b, theta))
            progress((k + 1) / len(points))
        return total

    def with_penalty(self, totals: Totals) -> Totals:
        """Return the function that adds the problem's penalty to ``totals`` of the data."""
        problem = self.problem
        if not problem.regularised:
            return totals

        def penalized(points: Tensor, progress: Progress) -> Tensor:
            total = totals(points, progress).clone()
            for k, (a, b) in enumerate(points.tolist()):
                theta = self.move(a, b, torch.empty_like(self.center))
                total[k, 0] += double(problem.penalty_value(theta)) * problem.data.samples
            return total

        return penalized

    @torch.no_grad()
    def agrees(self, method: str, totals_of: Callable[[PlaneLoss], Totals], *, is_forced: bool) -> bool:
        """Return whether a method gives the losses of the model, at three points and on a few samples.

        If it does not, raise InputError if ``is_forced``. Otherwise warn (PathWarning) that the model itself
        is used in place of the method.

        Args:
            method: the name of the method, for messages.
            totals_of: takes a loss on a plane, and returns the function that computes the method's totals.
            is_forced: whether the user has chosen the method.
        """
        if self.problem.check == "off":
            return True
        small_loss = replace(self, problem=few_of(self.problem))
        # The center's norm counts as at least 1e-3, as it may be 0 (our choice).
        distance = DISPLACEMENT * max(float(vector_norm(self.center)), 1e-3)
        norms = vector_norm(self.directions).tolist()
        a, b = [distance / norm if norm > 0 else 0.0 for norm in norms]
        points = torch.tensor([[0.0, 0.0], [a, -b / 2], [-a / 2, b]], dtype=torch.float64)
        expected = small_loss.pointwise(points, no_progress)  # includes the penalty
        try:
            totals = small_loss.with_penalty(totals_of(small_loss))(points, no_progress)
        except Exception as error:  # a model that does not run by this method may raise any error
            reason = f"it fails on this model ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        else:
            samples, rtol = small_loss.problem.data.samples, tolerance(self.problem.dtype)
            losses, expected_losses = totals[:, 0], expected[:, 0]
            atol = rtol * samples  # losses are sums over the samples
            same_losses = torch.allclose(losses, expected_losses, rtol=rtol, atol=atol, equal_nan=True)
            # Where two outputs are almost equal, the numbers of correct samples (column 1) may differ. They
            # must be NaN at the same points.
            if same_losses and torch.equal(totals[:, 1].isnan(), expected[:, 1].isnan()):
                return True
            worst = int((losses - expected_losses).abs().nan_to_num(nan=torch.inf).argmax())
            loss, expected_loss = losses[worst] / samples, expected_losses[worst] / samples
            reason = f"its loss is {loss:.6g} where the loss of the model itself is {expected_loss:.6g}"
        if is_forced:
            raise InputError(f"method: '{method}' is not allowed for this model, {reason}; use 'pointwise'")
        warn_caller(f"method: 'pointwise' in place of '{method}', {reason}", PathWarning)
        return False


def folded_totals(loss: PlaneLoss, folded: FoldedForward) -> Totals:
    """Return the function that computes the totals of points by the ``folded`` forward pass."""
    problem = loss.problem

    def folded_totals_at(theta: Tensor) -> Tensor:
        weights, sums = folded.weights(problem.layout.views(theta)), Sums(problem)
        for x, y, count in problem.chunks():
            outputs = folded(weights, x)
            sums.add(outputs, y, problem.criterion(outputs, y), count)
        return sums.end()

    at = loss.replayed(folded_totals_at)

    def totals(points: Tensor, progress: Progress) -> Tensor:
        total = loss.zeros(len(points))
        theta = torch.empty_like(loss.center)
        for k, (a, b) in enumerate(points.tolist()):
            total[k] = at(loss.move(a, b, theta))
            progress((k + 1) / len(points))
        return total

    return totals


METHODS = ("auto", "batched", "folded", "pointwise")
# The dtype of the arithmetic; None for "tf32": that of the model.
AUTOCASTS = {"tf32": None, "bfloat16": torch.bfloat16}
Method = Annotated[str, OneOf(METHODS)]
Autocast = Annotated[str, OneOf(tuple(AUTOCASTS))]


@dataclass(frozen=True)
class Evaluator:
    """The evaluation of points of one plane by one method.

    A call with points (K, 2) returns columns by name, (K,) float64 each: the mean loss, the accuracy (NaN
    without classes), and the metrics. Losses that are not finite are kept. A point's values do not depend on
    the other points of the call.

    Attributes:
        method: one of METHODS.
        block: the number of points that are evaluated together; calls for whole blocks are the fastest.
        samples: the number of samples.
        autocast: as for :func:`evaluator`.
        totals: the sums over the samples.
        problem: the loss, with its data in chunks that fit into the memory.
    """

    method: str
    block: int
    samples: int
    autocast: str | None
    totals: Totals
    problem: Problem

    @torch.no_grad()
    def __call__(self, points: Tensor, progress: Progress = no_progress) -> dict[str, Tensor]:
        with _arithmetic(self.autocast):
            means = self.totals(points, progress).cpu() / self.samples
        names = ("loss", "accuracy", *names_of(self.problem))
        return dict(zip(names, means.T, strict=True))


def evaluator(
    problem: Problem, center: Tensor, directions: Tensor, count: int, *, method: str = "auto",
    autocast: str | None = None, max_memory: int | None = None,
) -> Evaluator:  # fmt: skip
    """Return an evaluator of the loss at points of a plane.

    Args:
        problem: the loss.
        center, directions: (P,) and (2, P), the plane.
        count: the number of points that will be evaluated.
        method: one of METHODS; "auto" chooses by the layers of the model and a comparison on a few samples.
        autocast: None: the model's dtype; "tf32": float32 with TensorFloat-32 products, on CUDA;
            "bfloat16": weights and inputs in bfloat16, outputs and losses in float32, with BatchNorm folded.
        max_memory: the most bytes that the process may use, or on CUDA the most that PyTorch may use on the
            device; default: the limit of the current call. Chunks of data and blocks of points are chosen to
            fit. Data that is given in batches keeps its batches.

    Raises:
        InputError: a method or an ``autocast`` that does not work with the model, or a max_memory that is
            too small.
    """
    if autocast == "tf32" and (problem.device.type != "cuda" or problem.dtype != torch.float32):
        raise InputError("autocast: 'tf32' is not allowed here, it needs a float32 model on a CUDA device")
    max_memory = limit() if max_memory is None else max_memory
    loss = PlaneLoss(problem, center, directions)
    budget = MemoryBudget.on(problem.device, max_memory)
    layers = chain(problem)
    autocast_dtype = AUTOCASTS[autocast] if autocast else None
    dtype = autocast_dtype or problem.dtype
    # All points share the products of a linear first layer with the inputs: those of the center's weights and
    # of both directions.
    begins_linear = layers is not None and isinstance(layers[0], LinearLayer)
    # A metric with ``of_sums`` is a function of means over the samples.
    can_batch = begins_linear and dtype == problem.dtype and all(m.of_sums for m in problem.metrics)
    # For a model in half precision the plane has float32. Each point is then a forward pass of the model, so
    # that rounding is as in the user's network.
    if center.dtype != problem.dtype:
        can_batch = False
        method = "pointwise" if method == "auto" else method
    if method == "batched" and not can_batch:
        words = "a chain of linear layers in its own precision, tensor data and metrics that are means"
        raise InputError(f"method: '{method}' needs {words}; use 'pointwise'")
    if method == "pointwise" and dtype != problem.dtype:
        raise InputError(f"method: 'pointwise' works in the model's own precision; leave out {autocast}")
    if layers is not None and can_batch and method not in ("pointwise", "folded"):
        evaluate = _batched_evaluator(loss, layers, count, method, autocast, budget)
        if evaluate:
            return evaluate
        method = "pointwise"  # such a chain has no convolutions to fold
    return _folded_or_pointwise(loss, method, autocast, dtype, budget)


def _batched_evaluator(
    loss: PlaneLoss, layers: list[Layer], count: int, method: str, autocast: str | None, budget: MemoryBudget
) -> Evaluator | None:
    """Return the evaluation by the batched method, or None if memory is short or its losses are wrong."""
    problem, is_forced = loss.problem, method != "auto"
    size = block_size(problem, layers, count, budget, is_forced)
    if size is None or not loss.agrees(
        "batched", lambda few: batched(few, layers, (few.problem.samples, 3)), is_forced=is_forced
    ):
        return None
    chunk, block = size
    chunked = problem if budget.limit is None else problem.on(problem.data.in_chunks(chunk))
    totals = loss.with_penalty(batched(loss, layers, size, may_store=budget.limit is None))
    return Evaluator("batched", block, problem.samples, autocast, totals, chunked)


def _folded_or_pointwise(
    loss: PlaneLoss, method: str, autocast: str | None, dtype: torch.dtype, budget: MemoryBudget
) -> Evaluator:
    """Return the evaluator by the folded method, or by the pointwise method.

    Only the folded method can compute in a ``dtype`` other than the model's.
    """
    problem, same_dtype = loss.problem, dtype == loss.problem.dtype
    unfolded_bytes = problem.weights.nbytes  # one buffer, which holds the weights of one point at a time
    folded_bytes = problem.layout.size * dtype.itemsize
    # Statistics that are estimated at each point cannot be folded.
    can_fold = method != "pointwise" and not problem.batchnorm.varies and problem.separable
    folded = fold(problem.model, dtype) if can_fold else None
    # Folding is faster for convolutions. "auto" also requires that the folded weights fit into the memory.
    is_useful = folded is not None and folded.convolves and unfolded_bytes + folded_bytes <= budget.remaining
    if method == "auto" and same_dtype and not is_useful:
        folded = None
    elif folded is not None:
        # Compared in the model's dtype, in which the losses must be equal up to rounding. If they are not,
        # a method that the user has chosen raises InputError.
        converted = folded if same_dtype else folded.converted(problem.dtype)
        if not loss.agrees("folded", lambda few: folded_totals(few, converted), is_forced=method != "auto"):
            folded = None
    if folded is None and (method == "folded" or not same_dtype):
        option = "method: 'folded'" if same_dtype else f"autocast: '{autocast}'"
        words = "a model that torch.fx can trace, BatchNorm statistics of the center, and a mean as loss"
        raise InputError(f"{option} needs {words}; leave it out")
    weight_bytes = unfolded_bytes + (folded_bytes if folded else 0)
    # With a narrower dtype, activations are smaller, and a chunk can have more samples.
    chunk_factor = max(1, problem.dtype.itemsize // dtype.itemsize)
    chunked = _in_chunks(problem, budget, weight_bytes, chunk_factor)
    chunked_loss = replace(loss, problem=chunked)
    if folded is None:
        return Evaluator("pointwise", 1, problem.samples, autocast, chunked_loss.pointwise, chunked)
    totals = loss.with_penalty(folded_totals(chunked_loss, folded))
    return Evaluator("folded", 1, problem.samples, autocast, totals, chunked)


def check_one_loss(
    evaluate: Evaluator, center: Tensor, directions: Tensor, points: Tensor, losses: Array
) -> None:
    """Raise InputError unless :meth:`Problem.loss` at one point equals the loss computed by ``evaluate``.

    The point is the one nearest to the center among those with a finite loss. The comparison takes one pass
    over all data. If the problem's ``check`` is "off", nothing is compared.

    Args:
        evaluate: the evaluator that has computed the losses.
        center, directions: (P,) and (2, P), the plane.
        points: (K, 2), the coordinates of the points.
        losses: (K,), the losses at the points; NaN where no loss was computed.
    """
    problem = evaluate.problem
    finite_indices = np.flatnonzero(np.isfinite(losses))
    if not len(finite_indices) or problem.check == "off":
        return
    nearest = int(finite_indices[points[torch.from_numpy(finite_indices)].norm(dim=1).argmin()])
    a, b = points[nearest].tolist()
    theta = PlaneLoss(problem, center, directions).move(a, b, torch.empty_like(center))
    loss, problem_loss = float(losses[nearest]), problem.loss(theta)
    eps = torch.finfo(problem.dtype).eps
    # Half of the digits of the loss, or a hundred eps if the loss is nearly 0 (our choice).
    allowed = math.sqrt(eps) * abs(problem_loss) + 100 * eps
    if abs(loss - problem_loss) <= allowed:
        return
    second_loss = problem.loss(theta)  # differs from the first if the model or the loss is random
    cause = f"the method '{evaluate.method}' is wrong for this model; use method='pointwise'"
    if evaluate.method == "pointwise":
        cause = "model or loss keeps something of an earlier pass; keep nothing in eval mode"
    if not abs(second_loss - problem_loss) <= allowed:
        cause = f"the loss is {second_loss:.8g} in a second pass; it is random, or changes with each pass"
    raise InputError(
        f"model or loss: at the point ({a:.4g}, {b:.4g}) the loss is {loss:.8g}, but by Problem.loss() it "
        f"is {problem_loss:.8g}: {cause}"
    )


@contextlib.contextmanager
def _arithmetic(autocast: str | None) -> Iterator[None]:
    """Set PyTorch to TensorFloat-32 products inside the block, if ``autocast`` is "tf32"."""
    if autocast != "tf32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _in_chunks(problem: Problem, budget: MemoryBudget, weight_bytes: int, chunk_factor: int) -> Problem:
    """Return ``problem`` with its data in chunks whose activations fit into the memory.

    ``weight_bytes`` are those that weights need beside the activations. Without a limit of memory, chunks
    have ``chunk_factor`` times the usual number of samples.
    """
    data = problem.data
    if data.resident is None or on_ranks(problem):
        budget.require(weight_bytes)
        return problem
    if budget.limit is None:
        return problem.on(data.in_chunks(problem.chunk * chunk_factor))
    sample_bytes = ACTIVATION_COPIES * problem.sample_bytes
    # Statistics need batches of their size, and random numbers are drawn for each chunk.
    minimum = problem.chunk if problem.batchnorm.samples or not problem.separable else 1
    budget.require(weight_bytes + minimum * sample_bytes)
    samples = min(problem.chunk, max(minimum, int((budget.remaining - weight_bytes) // sample_bytes)))
    return problem.on(data.in_chunks(samples))
