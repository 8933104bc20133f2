"""The permutations of hidden units that leave a model's function unchanged, found in one traced pass.

Each axis of each tensor is a product of spaces: an axis of 12 heads of 64 numbers is (12, 64). An operation
says which axes run over the same units: ``mm`` of (a, b) and (b, c) that both b are one space. What the data,
a constant or the outputs number is fixed, and so is all that an operation touches of which nothing is known.
The operations are PyTorch's own (ATen), not layers: whatever a model is written with ends in these.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core.errors import InputError
from landscape.problem.batches import named_tensors
from landscape.problem.batchnorm import buffer_names
from landscape.problem.mean_loss import MeanLoss


@dataclass(eq=False)
class Space:
    """Units that are numbered alike wherever they occur.

    Attributes:
        size: how many.
        reason: why they must keep their places; "" where they may be permuted.
        outer: the space that this one repeats in, as the numbers of a head do in the heads.
        same, parts: the space that this one turned out to be, or the two of which it is the product.
    """

    size: int
    reason: str = ""
    outer: Space | None = None
    same: Space | None = None
    parts: tuple[Space, Space] | None = None

    def leaves(self) -> tuple[Space, ...]:
        """The spaces of which this one is the product, each the one that stands for all that are equal."""
        if self.same is not None:
            return self.same.leaves()
        return (self,) if self.parts is None else (*self.parts[0].leaves(), *self.parts[1].leaves())

    def split(self, first: int) -> None:
        """Make it the product of ``first`` blocks."""
        major = Space(first, self.reason, self.outer)
        self.parts = major, Space(self.size // first, self.reason, major)


Axis = tuple[Space, ...]
# Why units have numbers that no permutation may change, in a model that is understood.
DATA, OUTPUTS, PLACES, ONE_BY_ONE = "the data", "the outputs", "places", "parts with roles of their own"
NATURAL = (DATA, OUTPUTS, PLACES, ONE_BY_ONE)


def _units(size: int, reason: str = "") -> Axis:
    """An axis of its own."""
    return (Space(size, reason),) if size > 1 else ()


def leaves(axis: Sequence[Space]) -> list[Space]:
    """The spaces of an axis as they are known by now; none of size 1 is among them."""
    return [leaf for space in axis for leaf in space.leaves()]


def spaces(axes: Sequence[Axis]) -> list[Space]:
    """Those of several axes, one axis after another."""
    return [space for axis in axes for space in leaves(axis)]


def fix(axis: Sequence[Space], reason: str) -> None:
    """The units of the axis must keep their places."""
    for space in leaves(axis):
        space.reason = space.reason or reason


def unify(first: Sequence[Space], second: Sequence[Space]) -> None:
    """Both axes number the same units, unless one has size 1 and is repeated."""
    if not first or not second:
        return
    while (a := leaves(first)) and (b := leaves(second)):
        p, q = a[0], b[0]
        if p.size == q.size:
            if p is not q:
                q.same, p.reason, p.outer = p, p.reason or q.reason, p.outer or q.outer
            first, second = a[1:], b[1:]
            continue
        large, small = (p, q) if p.size > q.size else (q, p)
        if large.size % small.size:
            fix((*a, *b), "blocks of different sizes")
            return
        large.split(small.size)


def viewed(axes: Sequence[Axis], view: Tensor) -> list[Axis]:
    """The axes of a view of a contiguous tensor with these axes: its strides say which entries it has.

    A space is split where the view has blocks of it, or one place of each block. What the view leaves out
    keeps its place, and so do the units of an axis that goes across the borders of blocks.
    """
    new_axes = list[Axis]()

    def spaced() -> list[tuple[Space, int]]:
        """The spaces from the last on, each with the distance of its units."""
        last_first = spaces(axes)[::-1]
        steps = itertools.accumulate((space.size for space in last_first), mul, initial=1)
        return list(zip(last_first, steps, strict=False))

    def has_border(at: int) -> bool:
        """Return whether a space begins at this distance, and if blocks of one do, split it."""
        for space, step in spaced():
            if step < at < step * space.size:
                if at % step or space.size % (at // step):
                    return False
                space.split(space.size * step // at)
        return True

    for size, step in zip(view.shape, view.stride(), strict=True):
        if size < 2 or step == 0:
            new_axes.append(_units(size))  # of size 1, or repeated
            continue
        end = step * size
        whole_blocks = has_border(step) and has_border(end) and view.storage_offset() // step % size == 0
        inside = [space for space, at in spaced() if at < end and step < at * space.size]
        if not whole_blocks:
            fix(inside, APART)
        new_axes.append(tuple(inside[::-1]) if whole_blocks else _units(size, APART))
    unmatched = {*spaces(axes)} - {*spaces(new_axes)}
    fix([*unmatched], ONE_BY_ONE)
    return new_axes


# Operations that give every entry its place back, besides those that PyTorch calls pointwise; softmax treats
# the entries of its axis alike.
_SAME = {"_softmax", "_log_softmax", "_safe_softmax", "copy_", "lift_fresh", "fill_", "zero_"}
_SAME |= {"_prelu_kernel", "hardswish", "hardtanh"}
# Tensors made like others, whose values do not come from these.
_NEW = {f"{kind}_like" for kind in ("zeros", "ones", "full", "empty")}
_NEW |= {f"new_{kind}" for kind in ("zeros", "ones", "full", "empty")}
_VIEWS = {"view", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "alias"}
_VIEWS |= {"select", "unbind", "slice", "split", "unsafe_split", "split_with_sizes", "detach"}
_TURNS = {"transpose_", "t_", "squeeze_", "unsqueeze_"}  # in place
_REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "logsumexp"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}
_NORMS = ("native_", "cudnn_", "_native_", "_batch", "_fused", "miopen")
# Over the last axes alone, whose units have neighbors: the number of these axes stands in the name.
_LOCAL = ("max_pool", "avg_pool", "_adaptive_avg_pool", "upsample")
JOINED, APART = "joined with others", "taken apart"


class Step(NamedTuple):
    """An operation of a forward pass: its arguments by name, and the tensors in them with their shapes."""

    func: Any
    arguments: dict[str, Any]
    tensors: list[Tensor]
    shapes: list[torch.Size]
    outputs: list[Tensor]


class Place(NamedTuple):
    """The place of an activation in a pass: operand ``operand`` of operation ``number``, ``func``."""

    number: int
    operand: int
    func: Any
    shape: torch.Size


def _tensors(tree: Any) -> list[Tensor]:
    return [t for _, t in named_tensors(tree if isinstance(tree, (tuple, list)) else [tree])]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations inside, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = list[Step]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
        tensors = _tensors([arguments.get(name) for name in names])
        shapes = [t.shape for t in tensors]  # before an operation that changes it in place
        out = func(*args, **(kwargs or {}))
        self.steps.append(Step(func, arguments, tensors, shapes, _tensors(out)))
        return out

    def needed(self, results: Sequence[Tensor]) -> list[Step]:
        """The steps that the results come from, and those that write to a tensor or return none."""
        needed_ids, steps = {id(t) for t in results}, list[Step]()
        for step in reversed(self.steps):
            output_ids = {id(t) for t in step.outputs}
            if output_ids & needed_ids or not output_ids or step.func._schema.is_mutable:
                needed_ids |= {id(t) for t in step.tensors}
                steps.append(step)
        return steps[::-1]


class Axes:
    """The axes of tensors: those given, and those that operations on them make.

    Tensors that no operation has made from these are constants, whose units differ along an axis, or are
    the same all along it: then no permutation changes them.
    """

    def __init__(self) -> None:
        self.axes_of = dict[int, list[Axis]]()

    def start(self, tensor: Tensor, reason: str = "") -> None:
        """Give a tensor axes of its own."""
        self.axes_of[id(tensor)] = [_units(n, reason) for n in tensor.shape]

    def of(self, tensor: Tensor) -> list[Axis]:
        """The axes of a tensor."""
        if id(tensor) in self.axes_of:
            return self.axes_of[id(tensor)]
        return [
            _units(n, "a constant" if n > 1 and bool((tensor != tensor.narrow(dim, 0, 1)).any()) else "")
            for dim, n in enumerate(tensor.shape)
        ]

    def fix(self, tensors: Sequence[Tensor], reason: str) -> None:
        """All units of these tensors must keep their places."""
        for t in tensors:
            for axis in self.axes_of.get(id(t), []):
                fix(axis, reason)

    def follow(self, step: Step) -> None:
        """Give the outputs of an operation their axes, and unite what it numbers alike."""
        name = step.func.overloadpacket.__name__
        if name in _NEW or not any(id(t) in self.axes_of for t in step.tensors):
            return  # constants
        axes = self._axes_made(name, step) or []
        if not axes:
            self.fix(step.tensors, f"operation {name}")
        for k, t in enumerate(step.outputs):
            if k >= len(axes):
                self.start(t, f"operation {name}")
                continue
            if id(t) in self.axes_of and name not in _TURNS:  # written to in place
                for before, now in zip(self.axes_of[id(t)], axes[k], strict=True):
                    unify(before, now)
            self.axes_of[id(t)] = list(axes[k])

    def _axes_made(self, name: str, step: Step) -> list[list[Axis]] | None:
        """The axes of the outputs of an operation; None where nothing is known of it."""
        func, arguments, outputs = step.func, step.arguments, step.outputs
        operands = [self.of(t) for t in step.tensors]
        first = operands[0]
        if torch.Tag.nondeterministic_seeded in func.tags or name.endswith("_backward"):
            return None
        if torch.Tag.pointwise in func.tags or name in _SAME:
            return [self._broadcast(operands, outputs[0].dim())]
        if name in _VIEWS | _TURNS and outputs[0].dtype == step.tensors[0].dtype:
            other_arguments = {key: value for key, value in arguments.items() if key != "self"}
            views = _tensors(func(torch.empty(step.shapes[0]), **other_arguments))
            return [viewed(first, view) for view in views]
        if name in _PRODUCTS:
            return [self._product(operands)]
        if name == "convolution":
            return [self._convolution(arguments, operands, outputs[0])]
        if "norm" in name and name.startswith(_NORMS):
            return [self._norm(name, arguments, operands)]
        if name == "embedding":
            fix(first[0], DATA)
            return [[*operands[1], first[1]]]
        dims = _listed(arguments.get("dim", arguments.get("dims")), len(first))
        if name in _REDUCTIONS:
            remaining = [() if not dims or k in dims else axis for k, axis in enumerate(first)]
            if not arguments.get("keepdim", False):
                remaining = [axis for k, axis in enumerate(remaining) if dims and k not in dims]
            return [remaining] * len(outputs)
        if name == "glu":  # the product of two halves
            dim = arguments.get("dim", -1)
            return [viewed(first, torch.empty(step.shapes[0]).chunk(2, dim)[0])]
        if name in ("cat", "stack"):
            place = arguments.get("dim", 0) % outputs[0].dim()
            return [self._joined(operands, place, outputs[0], stacked=name == "stack")]
        moved = _moved(name, arguments, dims or range(len(first)), len(first))
        if moved is None:
            return None
        for k in moved:
            fix(first[k], PLACES)
        return [
            [_units(n, PLACES) if k in moved else first[k] for k, n in enumerate(t.shape)] for t in outputs
        ]

    def _joined(self, operands: list[list[Axis]], dim: int, out: Tensor, *, stacked: bool) -> list[Axis]:
        """The axes of tensors that are put one after another along the axis ``dim``."""
        parts = [[*axes] for axes in operands if len(axes) == out.dim() - stacked]
        for axes in parts:
            if stacked:
                axes.insert(dim, ())
            else:
                fix(axes[dim], JOINED)
                axes[dim] = ()
        whole = self._broadcast(parts, out.dim())
        whole[dim] = _units(out.shape[dim], JOINED)
        return whole

    def _broadcast(self, operands: Sequence[Sequence[Axis]], count: int) -> list[Axis]:
        """The axes of operands that are put side by side from the last one on."""
        axes: list[Axis] = [()] * count
        for operand in operands:
            for k, axis in enumerate(reversed(operand), 1):
                unify(axes[-k], axis)
                axes[-k] = axes[-k] or axis
        return axes

    def _product(self, operands: list[list[Axis]]) -> list[Axis]:
        """A product of matrices (and stacks of them), with what is added to it."""
        a, b = operands[-2:]
        unify(a[-1], b[-1 if len(b) == 1 else -2])
        lead = self._broadcast([a[:-2], b[:-2]], len(a) - 2) if len(a) > 2 else []
        out = [*lead, *(a[-2:-1] if len(a) > 1 else []), *(b[-1:] if len(b) > 1 else [])]
        return self._broadcast([out, *operands[:-2]], len(out))

    def _convolution(self, arguments: dict[str, Any], operands: list[list[Axis]], out: Tensor) -> list[Axis]:
        x, weight, *bias = operands
        groups, back = arguments["groups"], arguments["transposed"]
        source, target = (weight[0], weight[1]) if back else (weight[1], weight[0])
        if groups > 1:
            blocks: Axis = (Space(groups),)
            whole, part = (source, (*blocks, *target)) if back else (target, (*blocks, *source))
            unify(whole, (*blocks, *_units(math.prod(space.size for space in leaves(whole)) // groups)))
            source, target = (whole, part) if back else (part, whole)
        unify(x[1], source)
        for axis in (*x[2:], *weight[2:]):
            fix(axis, PLACES)
        for axes in bias:
            unify(axes[0], target)
        return [x[0], target, *(_units(n, PLACES) for n in out.shape[2:])]

    def _norm(self, name: str, arguments: dict[str, Any], operands: list[list[Axis]]) -> list[Axis]:
        """Batch, group and layer normalization: weight, bias and statistics have the normalized axes."""
        x, *parameters = operands
        if "group" in name:
            size = math.prod(space.size for space in leaves(x[1]))
            unify(x[1], (*_units(arguments["group"]), *_units(size // arguments["group"])))
        for axes in parameters:
            if "layer" in name or "rms" in name:
                self._broadcast([x[-len(axes) :], axes], len(axes))
            else:
                unify(x[1], axes[0])
        return x


def _listed(dims: Any, count: int) -> list[int]:
    """Numbers of axes, from 0 on; [] where none is given."""
    return [k % count for k in ([dims] if isinstance(dims, int) else dims or [])] if count else []


def _moved(
    name: str, arguments: Mapping[str, Any], dims: Collection[int], count: int
) -> Collection[int] | None:
    """The axes of ``count`` along which an operation moves units; None where nothing is known of it."""
    if name.startswith(_LOCAL):
        return range(count - int(re.search(r"(\d)d", name)[1]), count)  # type: ignore[index]
    if name == "constant_pad_nd":
        return {count - 1 - k // 2 for k, pad in enumerate(arguments["pad"]) if pad}
    if name in ("tril", "triu"):
        return range(count - 2, count)
    return dims if name in ("roll", "flip", "cumsum") else None


@contextmanager
def _plainly(problem: MeanLoss) -> Iterator[None]:
    """A pass in which neither fused attention nor a library's recurrent layer hides what it does to axes."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH), problem.evaluating(0):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Trace(NamedTuple):
    """The axes that one pass of a model shows.

    Attributes:
        parameters: the axes of each.
        activations: the axes of what an operation takes and sums over units that may be permuted.
    """

    parameters: dict[str, list[Axis]]
    activations: dict[Place, list[Axis]]


@torch.no_grad()
def traced(problem: MeanLoss) -> Trace:
    """The axes of parameters and activations, from one pass of the model and the loss over its first chunk.

    Units that index the outputs stay fixed, and so do units that the loss treats individually.
    """
    x, y, *_ = next(problem.data.chunks())
    x, y = problem.data.leaves(x, y)
    weights, recorder, axes = problem.layout.leaves(problem.weights), Recorder(), Axes()
    with _plainly(problem), recorder:
        outputs = problem.call(weights, x)
        loss = problem.criterion(outputs, y)
    for tensor in (*weights.values(), *map(problem.model.get_buffer, buffer_names(problem.model))):
        axes.start(tensor)
    for tensor in _tensors([x, y]):
        axes.start(tensor, DATA)
    compared_outputs = seen(outputs)
    data_ids = {id(t) for t in _tensors([x, y])}
    for step in recorder.needed([loss, *compared_outputs]):
        axes.follow(step)
        axes.fix([t for t in step.outputs if any(t is end for end in compared_outputs)], OUTPUTS)
        if data_ids & {id(t) for t in step.tensors}:  # computed from the data
            data_ids |= {id(t) for t in step.outputs}
    read = dict[tuple[int, torch.Size], tuple[Place, list[Axis]]]()
    for number, step in enumerate(recorder.steps):
        kept_spaces = {space for t in step.outputs for space in spaces(axes.axes_of.get(id(t), []))}
        for k, t in enumerate(step.tensors):
            data_axes = axes.axes_of.get(id(t), []) if id(t) in data_ids else []
            summed = {*spaces(data_axes)} - kept_spaces  # the step's outputs no longer have them
            if any(not space.reason for space in summed):
                # The same numbers, which several operations take, are read once.
                read.setdefault((t.data_ptr(), t.shape), (Place(number, k, step.func, t.shape), data_axes))
    return Trace({name: axes.axes_of[id(weight)] for name, weight in weights.items()}, dict(read.values()))


@torch.no_grad()
def activations(problem: MeanLoss, weights: Tensor, x: Any, points: Collection[Place]) -> dict[str, Tensor]:
    """The activations at some places, by the text of the place, of a pass over inputs with ``weights`` (P,).

    Raises:
        InputError: the pass is not that which was traced.
    """
    x, _ = problem.data.leaves(x, None)
    parameters, recorder, tensors = problem.layout.leaves(weights), Recorder(), dict[str, Tensor]()
    with _plainly(problem), recorder:
        problem.call(parameters, x)
    for point in points:
        step = recorder.steps[point.number] if point.number < len(recorder.steps) else None
        if step is None or step.func is not point.func or step.tensors[point.operand].shape != point.shape:
            raise InputError("align: 'activations' needs the same operations in each pass; use 'weights'")
        tensors[str(point)] = step.tensors[point.operand]
    return tensors


def seen(outputs: Any) -> list[Tensor]:
    """The outputs that must not change: a tensor, or the ``logits`` among others; else the loss has to do."""
    z = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    return [z] if isinstance(z, Tensor) else []
