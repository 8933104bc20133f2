"""Loss and accuracy at many points of a plane, θ = center + x·u + y·v, as fast as the model allows.

Paths, which the tests compare with one another:

- "batched": for chains of linear layers. θ is linear in (x, y) up to the first
  nonlinearity, so the first layer costs three products a data chunk, shared by all points; later layers
  take a block of points as one batched product, with features before samples in memory.
- "pointwise": any model, one forward pass over the data a point. "folded" is the same with BatchNorm folded
  into the convolutions and channels-last layout, for models that torch.fx can trace; "auto" takes it for
  models with convolutions.

Each path but "pointwise" is first compared with it on the user's model: on a few samples, at the center and
at two displaced points of the plane. Where they differ by more than rounding, "auto" goes back to
"pointwise" with a PathWarning. No choice depends on the clock: the same call takes the same path.

Memory is bounded whatever the number of points: a block of points for a chunk of data at a time, of
BLOCK_BYTES, less where ``max_memory`` asks for it. On a GPU nothing waits for the device
before all points are through.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from landscape.core.devices import double, float64_device, vector_norm
from landscape.core.errors import InputError, PathWarning, warn_caller
from landscape.core.hdf5 import Array
from landscape.core.memory import MemoryBudget, limit
from landscape.core.options import OneOf
from landscape.core.progress import Progress, no_progress
from landscape.problem.batches import call, tree_map
from landscape.problem.checks import tolerance
from landscape.problem.losses import is_softmax_loss
from landscape.problem.metrics import Scores, Sums, few_of, names_of, numbers
from landscape.problem.problem import Layer, LinearLayer, Problem, chain, stacked_losses
from landscape.problem.sharded import on_ranks

# Measured on 2 cores, 784-50-50-10: 1,000 samples per chunk with 16 to 32 points a block is the fastest, with
# 64 it takes 1.3 times as long. The activations of a block must stay in cache, hence the bound in bytes, too.
CHUNK = 1000
BLOCK_BYTES = 16 * 2**20
MAX_BLOCK = 20
# On a GPU the start of a kernel takes longer than a block of this size: with these sizes a contour on an H200
# was as slow as a forward pass a point, which starts as many. There all three are larger by this factor (our
# choice).
GPU_FACTOR = 16


def of_device(size: int, device: torch.device) -> int:
    """A size above, as it is on ``device``."""
    return size if device.type == "cpu" else GPU_FACTOR * size


def block_size(
    problem: Problem, layers: list[Layer], count: int, budget: MemoryBudget, forced: bool
) -> tuple[int, int] | None:
    """(samples per chunk, points per block) of the batched path; None if one of each exceeds the memory.

    With ``forced`` InputError in place of None.
    """
    shapes = {slot.name: slot.shape for slot in problem.layout.slots}
    linear = [layer for layer in layers if isinstance(layer, LinearLayer)]
    first, widest = shapes[linear[0].weight][0], max(shapes[layer.weight][0] for layer in linear)
    later = problem.layout.size - first * shapes[linear[0].weight][1]  # weights after the first layer
    item = problem.weights.itemsize
    # Metrics take the outputs once more, in another order, and may work with two copies in float64.
    copies = ACTIVATION_COPIES + (5 if problem.metrics else 0)
    # Center and directions in one tensor; for one sample the first products and one point's activations.
    fixed = 3 * problem.weights.nbytes + copies * later * item
    sample = (3 * first + copies * widest) * item
    if fixed + sample > budget.remaining:
        if forced:
            budget.require(fixed + sample)
        return None
    on_device = functools.partial(of_device, device=problem.device)
    chunk = int(min(on_device(CHUNK), problem.samples, (budget.remaining - fixed) // sample))
    point = max(chunk * widest, later) * item
    rest = budget.remaining - fixed - 3 * first * chunk * item
    by_memory = rest // (copies * point)
    return chunk, int(max(1, min(on_device(MAX_BLOCK), count, on_device(BLOCK_BYTES) // point, by_memory)))


@torch.no_grad()
def batched(loss: PlaneLoss, layers: list[Layer], size: tuple[int, int]) -> Totals:
    """The totals of a chain's ``layers``, in chunks of samples and blocks of points of ``size``."""
    problem, samples, (chunk, block) = loss.problem, loss.problem.samples, size
    first, *later = layers
    assert isinstance(first, LinearLayer)
    assert problem.tensors is not None
    x, y = problem.tensors
    # Center and directions, (3, *shape) each.
    views = problem.layout.views(torch.stack((loss.center, *loss.directions)))
    last = next(layer for layer in reversed(layers) if isinstance(layer, LinearLayer))
    outputs = views[last.weight].shape[1]
    classes = y.dim() == 1 and not y.is_floating_point() and outputs > 1
    # (samples,) classes that count as right; None: accuracy has no meaning.
    labels = y.long() if classes and bool(((y >= 0) & (y < outputs)).all()) else None
    # The loss may take what metrics with a name have computed.
    shared = (
        labels is not None
        and is_softmax_loss(problem.criterion)
        and any(m.statistic for m in problem.metrics)
    )

    def run(c: Tensor, products: Tensor, part: slice) -> list[Tensor]:
        """At points c (k, 3): mean losses, hits, sums (k, S) of each metric; products: W·x, U·x, V·x."""

        def at_points(name: str) -> Tensor:  # (k, *shape)
            return (c @ views[name].flatten(1)).view(len(c), *views[name].shape[1:])

        a, b = c[:, 1, None, None], c[:, 2, None, None]
        h = torch.addcmul(products[0], a, products[1]).addcmul_(b, products[2])
        if first.bias:
            h += at_points(first.bias).unsqueeze(-1)
        for layer in later:
            if not isinstance(layer, LinearLayer):
                h = h.relu_() if type(layer) is nn.ReLU else layer(h)
            elif layer.bias:
                h = torch.baddbmm(at_points(layer.bias).unsqueeze(-1), at_points(layer.weight), h)
            else:
                h = torch.bmm(at_points(layer.weight), h)
        targets = y[part].expand(len(c), *y[part].shape)
        scores = Scores(h, y[part] if classes else numbers(y[part]))
        own = (scores.top - scores.own + scores.scale).mean(2)[:, 0] if shared else None
        losses = stacked_losses(problem.criterion, h, targets) if own is None else own
        correct = torch.full_like(losses, torch.nan) if labels is None else scores.right.sum(1)
        # (k·B, out), for functions of the user's, which are of single samples.
        rows = None if all(m.statistic for m in problem.metrics) else h.transpose(1, 2).flatten(0, 1)
        sums = [metric.sums(rows, targets.flatten(0, 1), scores) for metric in problem.metrics]
        return [losses, correct, *(part.view(len(c), -1, part.shape[1]).sum(1) for part in sums)]

    def totals(points: Tensor, progress: Progress) -> Tensor:
        rest = -len(points) % block  # the last point again, so that all blocks have one shape
        padded = torch.cat((points, points[-1:].expand(rest, 2)))
        coords = torch.cat((torch.ones(len(padded), 1), padded), 1).to(problem.device, problem.dtype)
        total, sums = loss.empty(len(padded)), list[Tensor]()
        for i in range(0, samples, chunk):
            part = slice(i, i + chunk)
            products = (views[first.weight].flatten(0, 1) @ x[part].flatten(1).T).view(3, -1, len(x[part]))
            for k in range(0, len(padded), block):
                means, hits, *of_metrics = run(coords[k : k + block], products, part)
                total[k : k + block, 0] += double(means) * len(x[part])
                total[k : k + block, 1] += hits.to(total.device)
                sums = sums or [total.new_zeros(len(total), part.shape[1]) for part in of_metrics]
                for column, values in zip(sums, of_metrics, strict=True):
                    column[k : k + block] += values
                progress((i + len(x[part]) * (k + block) / len(padded)) / samples)
            del products  # before the next ones, which take as much
        for k, (metric, column) in enumerate(zip(problem.metrics, sums, strict=True), 2):
            total[:, k] = metric.finish(column / samples) * samples
        return total[: len(points)]

    return totals


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Pair(NamedTuple):
    """A convolution and the BatchNorm that is the only user of its output, by module name."""

    convolution: str
    norm: str


class FoldedForward:
    """``forward(views, x)``: the model's outputs at the weights ``views`` (name -> tensor), BatchNorm folded.

    ``dtype`` is that of the arithmetic inside; outputs come back in float32 or wider. 4-D weights and
    inputs are laid out channels last, which CPUs and GPUs convolve fastest.
    """

    def __init__(
        self, graph: fx.GraphModule, pairs: list[Pair], dtype: torch.dtype, trainable: set[int]
    ) -> None:
        self._graph, self._pairs, self._dtype = graph, pairs, dtype
        self.convolves = any(isinstance(m, CONVOLUTIONS) for m in graph.modules())
        # A trace has no layer that the forward pass leaves out.
        self._names = {name for name, _ in graph.named_parameters(remove_duplicate=False)}
        # Frozen parameters, and buffers, which need the precision of the rest.
        self._fixed: dict[str, Tensor] = {n: p for n, p in graph.named_parameters() if id(p) not in trainable}
        self._fixed |= dict(graph.named_buffers())
        self._norms: dict[str, Any] = {pair.norm: graph.get_submodule(pair.norm) for pair in pairs}

    def converted(self, dtype: torch.dtype) -> FoldedForward:
        """The same in another precision."""
        copied = copy.copy(self)
        copied._dtype = dtype
        return copied

    def _lay_out(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype) if x.is_floating_point() else x
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

    def weights(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """The graph's parameters and buffers at the weights ``views``, folded: once a point."""
        tensors = self._fixed | {name: view for name, view in views.items() if name in self._names}
        for pair in self._pairs:
            weight, bias = f"{pair.convolution}.weight", f"{pair.convolution}.bias"
            norm = self._norms[pair.norm]
            scale, shift = tensors.pop(f"{pair.norm}.weight", None), tensors.pop(f"{pair.norm}.bias", None)
            convolution = tensors[weight], tensors[bias], norm.running_mean, norm.running_var
            tensors[weight], tensors[bias] = fuse_conv_bn_weights(*convolution, norm.eps, scale, shift)
        return {name: self._lay_out(value) for name, value in tensors.items()}

    def __call__(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The outputs at :meth:`weights` for the inputs ``x``."""
        out = call(self._graph, weights, tree_map(self._lay_out, x))
        return out.float() if isinstance(out, Tensor) and out.itemsize < 4 else out


def fold(model: nn.Module, dtype: torch.dtype) -> FoldedForward | None:
    """The folded forward of ``model`` (in eval mode), or None where torch.fx cannot trace it.

    Only pairs whose BatchNorm tracks statistics and whose modules are used once are folded; there may be
    none, and then only the memory layout and ``dtype`` differ from the model itself. A trace need not be the
    user's function (it drops hooks, and follows one branch): the caller compares it with the model first.
    """
    # fx takes an optional argument as a given one: "if mask is not None" would always hold.
    if any(p.default is not p.empty for p in inspect.signature(model.forward).parameters.values()):
        return None
    # The modules are copied, the tensors are not.
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        graph = fx.symbolic_trace(copy.deepcopy(model, shared))
    except Exception:  # control flow on values, or code that fx does not know: fx raises any kind of error
        return None
    modules = dict(graph.named_modules())
    pairs = []
    for node in list(graph.graph.nodes):
        pair = _pair(graph, modules, node)
        if pair is None:
            continue
        convolution, norm = modules[pair.convolution], modules[pair.norm]
        if convolution.bias is None:
            convolution.bias = nn.Parameter(torch.zeros_like(norm.running_mean))
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
        pairs.append(pair)
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # the same numbers, and it takes what lies channels last
    graph.recompile()
    return FoldedForward(graph, pairs, dtype, {id(p) for p in model.parameters() if p.requires_grad})


def _pair(graph: fx.GraphModule, modules: dict[str, nn.Module], node: fx.Node) -> Pair | None:
    """The convolution and BatchNorm at a ``node``, if these two and nothing else use their tensors."""
    source = node.args[0] if node.op == "call_module" and node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
        return None
    pair = Pair(str(source.target), str(node.target))
    norm, convolution = modules[pair.norm], modules[pair.convolution]
    if type(norm) not in BATCHNORMS or type(convolution) not in CONVOLUTIONS:
        return None
    if norm.training or norm.running_mean is None:
        return None
    counts = Counter(id(tensor) for _, tensor in graph.named_parameters(remove_duplicate=False))
    targets = [str(n.target) for n in graph.graph.nodes if n.op in ("call_module", "get_attr")]
    for name, module in ((pair.convolution, convolution), (pair.norm, norm)):
        # Used once, by no other name, nowhere by its tensors, and with nothing hung on it.
        tied = any(counts[id(p)] > 1 for p in module.parameters())
        touched = sum(t == name or t.startswith(f"{name}.") for t in targets)
        hooked = module._forward_hooks or module._forward_pre_hooks
        if tied or touched != 1 or hooked or list(module.children()):
            return None
    return pair


# Distance from the center of the two displaced points of a comparison, as a share of the center's norm
# (our choice: far enough to tell a wrong path from rounding).
DISPLACEMENT = 0.3
# Under max_memory, activations are planned at this many times their bytes: a layer's input, output and
# scratch space exist at once, and freed memory does not return to the system at once (our choice).
ACTIVATION_COPIES = 3

# (K, 2) points -> (K, 2) float64: sums over the samples of the losses, and of the correct ones.
Totals = Callable[[Tensor, Progress], Tensor]


@dataclass(frozen=True)
class PlaneLoss:
    """The loss of ``problem`` at points (a, b) of a plane, θ = center + a·directions[0] + b·directions[1].

    center (P,), directions (2, P).
    """

    problem: Problem
    center: Tensor
    directions: Tensor

    def move(self, a: float, b: float, weights: Tensor) -> Tensor:
        """The weights (P,) at the point (a, b), computed in ``weights``, and rounded once from there."""
        u, v = self.directions
        return torch.add(self.center, u, alpha=a, out=weights).add_(v, alpha=b).to(self.problem.dtype)

    def empty(self, count: int) -> Tensor:
        """(count, 2 + metrics) zeros, in float64 if the device has that."""
        columns, device = 2 + len(self.problem.metrics), float64_device(self.problem.device)
        return torch.zeros(count, columns, dtype=torch.float64, device=device)

    def pointwise(self, points: Tensor, progress: Progress) -> Tensor:
        """The :data:`Totals` by the problem itself, point by point."""
        total = self.empty(len(points))
        theta = torch.empty_like(self.center)  # one buffer for all points; the parameters are views of it
        for k, (a, b) in enumerate(points.tolist()):
            total[k] = self.problem.totals(self.move(a, b, theta))
            progress((k + 1) / len(points))
        return total

    def with_penalty(self, totals: Totals) -> Totals:
        """``totals`` of the data plus the problem's penalty at each point."""
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
    def agrees(self, method: str, fast: Callable[[PlaneLoss], Totals], *, forced: bool) -> bool:
        """Return whether ``fast`` gives the model's losses on a few samples, at three points of the plane.

        If not, a PathWarning, or InputError with ``forced``.
        """
        if self.problem.check == "off":
            return True
        few = replace(self, problem=few_of(self.problem))
        reach = DISPLACEMENT * max(float(vector_norm(self.center)), 1e-3)
        a, b = (reach / size if size > 0 else 0.0 for size in vector_norm(self.directions).tolist())
        points = torch.tensor([[0.0, 0.0], [a, -b / 2], [-a / 2, b]], dtype=torch.float64)
        expected = few.pointwise(points, no_progress)  # with the penalty
        try:
            totals = few.with_penalty(fast(few))(points, no_progress)
        except Exception as error:  # the user's model, on a path that it was not written for
            reason = f"it fails on this model ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        else:
            samples, allowed = few.problem.data.samples, tolerance(self.problem.dtype)
            same = torch.isclose(totals, expected, rtol=allowed, atol=allowed * samples, equal_nan=True)
            if bool(same[:, 0].all()) and bool((totals[:, 1].isnan() == expected[:, 1].isnan()).all()):
                return True
            k = int((totals - expected)[:, 0].abs().nan_to_num(nan=torch.inf).argmax())
            losses = [float(sums[k, 0]) / samples for sums in (totals, expected)]
            reason = "its loss is {:.6g} where that of the model itself is {:.6g}".format(*losses)
        if forced:
            raise InputError(f"method: '{method}' is not allowed for this model, {reason}; use 'pointwise'")
        warn_caller(f"method: 'pointwise' in place of '{method}', {reason}", PathWarning)
        return False


def folded_totals(loss: PlaneLoss, folded: FoldedForward) -> Totals:
    """The totals by a folded network."""
    problem = loss.problem

    def totals(points: Tensor, progress: Progress) -> Tensor:
        total = loss.empty(len(points))
        theta = torch.empty_like(loss.center)
        for k, (a, b) in enumerate(points.tolist()):
            weights, sums = folded.weights(problem.layout.views(loss.move(a, b, theta))), Sums(problem)
            for x, y, count in problem.chunks():
                outputs = folded(weights, x)
                sums.add(outputs, y, problem.criterion(outputs, y), count)
            total[k] = sums.end()
            progress((k + 1) / len(points))
        return total

    return totals


METHODS = ("auto", "batched", "folded", "pointwise")
# The dtype of the arithmetic; "tf32": that of the model.
AUTOCASTS = {"tf32": None, "bfloat16": torch.bfloat16}
Method = Annotated[str, OneOf(METHODS)]
Autocast = Annotated[str, OneOf(tuple(AUTOCASTS))]


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
        names = ("loss", "accuracy", *names_of(self.parts))
        return dict(zip(names, totals.T, strict=True))


def evaluator(
    problem: Problem, center: Tensor, directions: Tensor, count: int, *, method: str = "auto",
    autocast: str | None = None, max_memory: int | None = None,
) -> Evaluator:  # fmt: skip
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
    if autocast == "tf32" and (problem.device.type != "cuda" or problem.dtype != torch.float32):
        raise InputError("autocast: 'tf32' is not allowed here, it needs a float32 model on a CUDA device")
    max_memory = limit() if max_memory is None else max_memory
    loss, budget = PlaneLoss(problem, center, directions), MemoryBudget.on(problem.device, max_memory)
    layers, dtype = chain(problem), (AUTOCASTS[autocast] if autocast else None) or problem.dtype
    # The batched path is possible for a chain that starts with a linear layer.
    takes = layers is not None and isinstance(layers[0], LinearLayer) and dtype == problem.dtype
    takes = takes and all(metric.of_sums for metric in problem.metrics)
    if center.dtype != problem.dtype:  # of networks in half precision, whose losses are the model's own
        takes, method = False, "pointwise" if method == "auto" else method
    if method == "batched" and not takes:
        words = "a chain of linear layers in its own precision, tensor data and metrics that are means"
        raise InputError(f"method: '{method}' needs {words}; use 'pointwise'")
    if method == "pointwise" and dtype != problem.dtype:
        raise InputError(f"method: 'pointwise' works in the model's own precision; leave out {autocast}")
    if layers is not None and takes and method not in ("pointwise", "folded"):
        if by_blocks := _by_blocks(loss, layers, count, method, autocast, budget):
            return by_blocks
        method = "pointwise"
    return _by_points(loss, method, autocast, dtype, budget)


def _by_blocks(
    loss: PlaneLoss, layers: list[Layer], count: int, method: str, autocast: str | None, budget: MemoryBudget
) -> Evaluator | None:
    """The batched path; None if it has too little memory or is wrong for the model."""
    problem, forced = loss.problem, method != "auto"
    size = block_size(problem, layers, count, budget, forced=forced)
    if size is None or not loss.agrees(
        "batched", lambda few: batched(few, layers, (few.problem.samples, 3)), forced=forced
    ):
        return None
    parts = problem if budget.limit is None else problem.on(problem.data.in_chunks(size[0]))
    totals = loss.with_penalty(batched(loss, layers, size))
    return Evaluator("batched", size[1], problem.samples, autocast, totals, parts)


def _by_points(
    loss: PlaneLoss, method: str, autocast: str | None, dtype: torch.dtype, budget: MemoryBudget
) -> Evaluator:
    """The folded path, or the pointwise one."""
    problem, same = loss.problem, dtype == loss.problem.dtype
    weights = problem.weights.nbytes  # the moved θ, one buffer for all points
    low = problem.layout.size * dtype.itemsize
    # Statistics that are estimated at each point cannot be folded.
    foldable = method != "pointwise" and not problem.batchnorm.varies and problem.separable
    folded = fold(problem.model, dtype) if foldable else None
    pays = folded is not None and folded.convolves and weights + low <= budget.remaining
    if method == "auto" and same and not pays:
        folded = None
    elif folded is not None:
        exact = folded if same else folded.converted(problem.dtype)
        if not loss.agrees("folded", lambda few: folded_totals(few, exact), forced=method != "auto"):
            folded = None
    if folded is None and (method == "folded" or not same):
        option = "method: 'folded'" if same else f"autocast: '{autocast}'"
        words = "a model that torch.fx can trace, BatchNorm statistics of the center, and a mean as loss"
        raise InputError(f"{option} needs {words}; leave it out")
    smaller = max(1, problem.dtype.itemsize // dtype.itemsize)
    parts = _bounded(problem, budget, weights + (low if folded else 0), smaller)
    bounded = replace(loss, problem=parts)
    if folded is None:
        return Evaluator("pointwise", 1, problem.samples, autocast, bounded.pointwise, parts)
    totals = loss.with_penalty(folded_totals(bounded, folded))
    return Evaluator("folded", 1, problem.samples, autocast, totals, parts)


def confirm(run: Evaluator, center: Tensor, directions: Tensor, points: Tensor, values: Array) -> None:
    """Raise InputError unless the problem's own loss at one of the points is the value that ``run`` gave.

    It is that of all samples, which no comparison on a few of them replaces, at the point nearest to the
    center whose value is finite. One pass over the data; not with ``check`` "off".

    Args:
        points, values: (K, 2), and the losses (K,) there, NaN where none was computed.
    """
    problem, finite = run.parts, np.flatnonzero(np.isfinite(values))
    if not len(finite) or problem.check == "off":
        return
    k = int(finite[points[torch.from_numpy(finite)].norm(dim=1).argmin()])
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
    sample = ACTIVATION_COPIES * problem.sample_bytes
    # Statistics need batches of their size, and random numbers are drawn for each chunk.
    minimum = problem.chunk if problem.batchnorm.samples or not problem.separable else 1
    budget.require(weights + minimum * sample)
    size = min(problem.chunk, max(minimum, int((budget.remaining - weights) // sample)))
    return problem.on(data.in_chunks(size))
