"""The permutations of hidden units that leave a model's function unchanged, from one recorded pass.

Each axis of each tensor is a product of spaces: an axis of 12 heads of 64 numbers is (12, 64). An operation
tells which axes run over the same units: by ``mm`` of (a, b) and (b, c), both b are one space. Units in the
order of the data, of a constant or of the outputs are fixed, and so are all units of an operation that is not
known here. The operations are PyTorch's own (ATen), of which all layers consist.
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
from landscape.problem.losses import opened_logits
from landscape.problem.mean_loss import MeanLoss


@dataclass(eq=False)
class Space:
    """Units that have the same order in all tensors.

    Attributes:
        size: the number of units.
        why_fixed: the reason why the units must keep their places; "" if they may be permuted.
        outer: the space in each of whose units this one repeats: the numbers of a head repeat in each head.
        same: the space that this one was found to be equal to; None for none.
        parts: the two spaces of which this one is the product; None for none.
    """

    size: int
    why_fixed: str = ""
    outer: Space | None = None
    same: Space | None = None
    parts: tuple[Space, Space] | None = None

    def leaves(self) -> tuple[Space, ...]:
        """Return the spaces of which this one is the product, each as the first of all that are equal."""
        if self.same is not None:
            return self.same.leaves()
        return (self,) if self.parts is None else (*self.parts[0].leaves(), *self.parts[1].leaves())

    def split(self, first: int) -> None:
        """Divide the space into ``first`` blocks: it becomes the product of blocks and units of a block."""
        blocks = Space(first, self.why_fixed, self.outer)
        self.parts = blocks, Space(self.size // first, self.why_fixed, blocks)


Axis = tuple[Space, ...]
# Reasons why units must keep their places that are no limits of this module.
DATA, OUTPUTS, PLACES, ONE_BY_ONE = "the data", "the outputs", "places", "parts with roles of their own"
NATURAL = (DATA, OUTPUTS, PLACES, ONE_BY_ONE)


def _units(size: int, reason: str = "") -> Axis:
    """Return an axis of a new space; the empty axis for size 1."""
    return (Space(size, reason),) if size > 1 else ()


def leaves(axis: Sequence[Space]) -> list[Space]:
    """Return the spaces of an axis, after all divisions and equalities so far."""
    return [leaf for space in axis for leaf in space.leaves()]


def spaces(axes: Sequence[Axis]) -> list[Space]:
    """Return the spaces of several axes, one axis after another."""
    return [space for axis in axes for space in leaves(axis)]


def fix(axis: Sequence[Space], reason: str) -> None:
    """Record that the units of an axis must keep their places, for this reason."""
    for space in leaves(axis):
        space.why_fixed = space.why_fixed or reason


def unify(first: Sequence[Space], second: Sequence[Space]) -> None:
    """Record that two axes run over the same units; an axis of size 1, which is broadcast, does not."""
    if not first or not second:
        return
    while (first_leaves := leaves(first)) and (second_leaves := leaves(second)):
        a, b = first_leaves[0], second_leaves[0]
        if a.size == b.size:
            if a is not b:
                b.same, a.why_fixed, a.outer = a, a.why_fixed or b.why_fixed, a.outer or b.outer
            first, second = first_leaves[1:], second_leaves[1:]
            continue
        large, small = (a, b) if a.size > b.size else (b, a)
        if large.size % small.size:
            fix((*first_leaves, *second_leaves), "blocks of different sizes")
            return
        large.split(small.size)


def axes_of_view(axes: Sequence[Axis], view: Tensor) -> list[Axis]:
    """Return the axes of ``view``, a view of a contiguous tensor with these ``axes``, by the view's strides.

    An axis of the tensor runs over one or more spaces of units. An axis of the view may cut one of these
    spaces into blocks of consecutive units: it runs from block to block, or inside the blocks. The space is
    then split in two. The units of the first space are the blocks, those of the second the units of a block.
    Spaces without an axis of the view are fixed, with the reason ONE_BY_ONE: their units must keep their
    places. An axis that does not run over whole spaces is fixed, with the reason APART.
    """
    new_axes = list[Axis]()

    def spaces_with_strides() -> list[tuple[Space, int]]:
        """Return the tensor's spaces, the last one first, each with its stride.

        The stride is the distance between neighboring units in memory. The extent of a space is its stride
        times its size.
        """
        last_first = spaces(axes)[::-1]
        # One number more than there are spaces: the last one is the size of the tensor.
        strides = itertools.accumulate((space.size for space in last_first), mul, initial=1)
        return list(zip(last_first, strides, strict=False))

    def split_at(distance: int) -> bool:
        """Split the space whose stride is below ``distance``, and whose extent is above ``distance``, if any.

        The blocks are ``distance`` numbers long in memory. Return False if the space has no such blocks.
        """
        for space, stride in spaces_with_strides():
            extent = stride * space.size
            if stride < distance < extent:
                if distance % stride or space.size % (distance // stride):
                    return False
                space.split(extent // distance)
        return True

    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size < 2 or stride == 0:
            new_axes.append(_units(size))  # an axis of size 1, or an axis that repeats one number
            continue
        extent = stride * size
        can_split = split_at(stride) and split_at(extent)
        # The view begins at storage_offset, which is unit (storage_offset // stride) % size of this axis. For
        # whole spaces this must be unit 0.
        has_whole_spaces = can_split and view.storage_offset() // stride % size == 0
        axis = list[Space]()  # the spaces that the axis runs over
        for space, space_stride in spaces_with_strides():
            if space_stride < extent and stride < space_stride * space.size:
                axis.insert(0, space)
        if has_whole_spaces:
            new_axes.append(tuple(axis))
        else:
            fix(axis, APART)
            new_axes.append(_units(size, APART))
    left_out = {*spaces(axes)} - {*spaces(new_axes)}
    fix([*left_out], ONE_BY_ONE)
    return new_axes


# Operations whose output has the axes of the input, besides those that PyTorch tags as pointwise; softmax
# treats all entries of its axis alike.
_LIKE_POINTWISE = {"_softmax", "_log_softmax", "_safe_softmax", "copy_", "lift_fresh", "fill_", "zero_"}
_LIKE_POINTWISE |= {"_prelu_kernel", "hardswish", "hardtanh"}
# Operations whose output has the shape of the input, but other values.
_NEW = {f"{kind}_like" for kind in ("zeros", "ones", "full", "empty")}
_NEW |= {f"new_{kind}" for kind in ("zeros", "ones", "full", "empty")}
_VIEWS = {"view", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "alias"}
_VIEWS |= {"select", "unbind", "slice", "split", "unsafe_split", "split_with_sizes", "detach"}
_VIEWS_IN_PLACE = {"transpose_", "t_", "squeeze_", "unsqueeze_"}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "logsumexp"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}
_NORMS = ("native_", "cudnn_", "_native_", "_batch", "_fused", "miopen")
# Operations over the last axes only, whose units have neighbors; the name has the number of these axes.
_LOCAL = ("max_pool", "avg_pool", "_adaptive_avg_pool", "upsample")
JOINED, APART = "joined with others", "taken apart"


class Step(NamedTuple):
    """An operation of a forward pass.

    Attributes:
        func: the operation of ATen.
        arguments: its arguments, by name.
        tensors: the tensors among the arguments.
        shapes: their shapes before the operation.
        outputs: the tensors among its results.
    """

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
    """A mode of PyTorch that records all operations in order, in ``steps``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = list[Step]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
        tensors = _tensors([arguments.get(name) for name in names])
        shapes = [t.shape for t in tensors]  # an operation in place may change them
        out = func(*args, **(kwargs or {}))
        self.steps.append(Step(func, arguments, tensors, shapes, _tensors(out)))
        return out

    def needed(self, results: Sequence[Tensor]) -> list[Step]:
        """Return the steps that the results depend on, and those that write to a tensor or return none."""
        needed_ids, steps = {id(t) for t in results}, list[Step]()
        for step in reversed(self.steps):
            output_ids = {id(t) for t in step.outputs}
            if output_ids & needed_ids or not output_ids or step.func._schema.is_mutable:
                needed_ids |= {id(t) for t in step.tensors}
                steps.append(step)
        return steps[::-1]


class Axes:
    """The axes of tensors: of those given by :meth:`start`, and of the results of operations on them.

    All other tensors are constants. The units of a constant are fixed along an axis, unless its numbers are
    all equal along it, so that no permutation changes them.
    """

    def __init__(self) -> None:
        self.axes_of = dict[int, list[Axis]]()

    def start(self, tensor: Tensor, reason: str = "") -> None:
        """Set axes of new spaces for a tensor."""
        self.axes_of[id(tensor)] = [_units(n, reason) for n in tensor.shape]

    def of(self, tensor: Tensor) -> list[Axis]:
        """Return the axes of a tensor."""
        if id(tensor) in self.axes_of:
            return self.axes_of[id(tensor)]
        axes = list[Axis]()
        for dim, size in enumerate(tensor.shape):
            differs = size > 1 and bool((tensor != tensor.narrow(dim, 0, 1)).any())
            axes.append(_units(size, "a constant" if differs else ""))
        return axes

    def fix(self, tensors: Sequence[Tensor], reason: str) -> None:
        """Record that all units of these tensors must keep their places, for this reason."""
        for t in tensors:
            for axis in self.axes_of.get(id(t), []):
                fix(axis, reason)

    def follow(self, step: Step) -> None:
        """Set the axes of an operation's outputs, and unify the spaces that it shows to be equal."""
        name = step.func.overloadpacket.__name__
        if name in _NEW or not any(id(t) in self.axes_of for t in step.tensors):
            return  # the outputs are constants
        axes = self._axes_of_outputs(name, step) or []
        if not axes:
            self.fix(step.tensors, f"operation {name}")
        for k, t in enumerate(step.outputs):
            if k >= len(axes):
                self.start(t, f"operation {name}")
                continue
            if id(t) in self.axes_of and name not in _VIEWS_IN_PLACE:  # the operation writes to this tensor
                for old_axis, new_axis in zip(self.axes_of[id(t)], axes[k], strict=True):
                    unify(old_axis, new_axis)
            self.axes_of[id(t)] = list(axes[k])

    def _axes_of_outputs(self, name: str, step: Step) -> list[list[Axis]] | None:
        """Return the axes of the outputs of an operation; None for an operation that is not known here."""
        func, arguments, outputs = step.func, step.arguments, step.outputs
        operands = [self.of(t) for t in step.tensors]
        input_axes = operands[0]
        if torch.Tag.nondeterministic_seeded in func.tags or name.endswith("_backward"):
            return None  # a random operation, or one of a backward pass
        if torch.Tag.pointwise in func.tags or name in _LIKE_POINTWISE:
            return [self._broadcast(operands, outputs[0].dim())]
        # A view as another dtype, which reads the numbers differently, is not known here.
        if name in _VIEWS | _VIEWS_IN_PLACE and outputs[0].dtype == step.tensors[0].dtype:
            # axes_of_view() needs a view of a contiguous tensor: the operation is repeated on such a tensor.
            other_arguments = {key: value for key, value in arguments.items() if key != "self"}
            views = _tensors(func(torch.empty(step.shapes[0]), **other_arguments))
            return [axes_of_view(input_axes, view) for view in views]
        if name in _PRODUCTS:
            return [self._product(operands)]
        if name == "convolution":
            return [self._convolution(arguments, operands, outputs[0])]
        if "norm" in name and name.startswith(_NORMS):
            return [self._norm(name, arguments, operands)]
        if name == "embedding":  # rows of a matrix (rows, features), chosen by indices, which are data
            fix(input_axes[0], DATA)
            return [[*operands[1], input_axes[1]]]
        dims = _named_dims(arguments, len(input_axes))
        if name in _REDUCTIONS:
            if arguments.get("keepdim", False):
                axes = [() if k in dims else axis for k, axis in enumerate(input_axes)]
            else:
                axes = [axis for k, axis in enumerate(input_axes) if k not in dims]
            return [axes] * len(outputs)
        if name == "glu":
            # One half of an axis times a function of the other half: both must have the same order. The view
            # of a half splits the axis into a space of 2 blocks and a space of the units in both blocks.
            first_half, _ = torch.empty(step.shapes[0]).chunk(2, arguments.get("dim", -1))
            return [axes_of_view(input_axes, first_half)]
        if name in ("cat", "stack"):
            dim = arguments.get("dim", 0) % outputs[0].dim()
            return [self._joined(operands, dim, outputs[0], stacked=name == "stack")]
        # An operation such as "roll" depends on the order of the units along an axis. These units are fixed.
        moved_dims = _moved_dims(name, arguments, dims, len(input_axes))
        if moved_dims is None:
            return None
        for k in moved_dims:
            fix(input_axes[k], PLACES)
        axes_of_outputs = []
        for t in outputs:
            axes = [_units(n, PLACES) if k in moved_dims else input_axes[k] for k, n in enumerate(t.shape)]
            axes_of_outputs.append(axes)
        return axes_of_outputs

    def _joined(self, operands: list[list[Axis]], dim: int, out: Tensor, *, stacked: bool) -> list[Axis]:
        """Return the axes of tensors that are concatenated, or ``stacked``, along the axis ``dim``."""
        operands_axes = [[*axes] for axes in operands if len(axes) == out.dim() - stacked]
        for axes in operands_axes:
            if stacked:
                axes.insert(dim, ())
            else:
                fix(axes[dim], JOINED)
                axes[dim] = ()
        joined = self._broadcast(operands_axes, out.dim())
        joined[dim] = _units(out.shape[dim], JOINED)
        return joined

    def _broadcast(self, operands: Sequence[Sequence[Axis]], count: int) -> list[Axis]:
        """Unify the axes of operands that are broadcast, and return the axes of the result."""
        axes: list[Axis] = [()] * count
        for operand in operands:
            for k, axis in enumerate(reversed(operand), 1):
                unify(axes[-k], axis)
                axes[-k] = axes[-k] or axis
        return axes

    def _product(self, operands: list[list[Axis]]) -> list[Axis]:
        """Return the axes of a product of vectors, matrices or stacks of these, perhaps with a summand."""
        a, b = operands[-2:]
        unify(a[-1], b[-1] if len(b) == 1 else b[-2])
        lead = self._broadcast([a[:-2], b[:-2]], len(a) - 2) if len(a) > 2 else []
        out = [*lead, *a[-2:-1], *(b[-1:] if len(b) > 1 else [])]
        return self._broadcast([out, *operands[:-2]], len(out))

    def _convolution(self, arguments: dict[str, Any], operands: list[list[Axis]], out: Tensor) -> list[Axis]:
        """Return the axes of a convolution's output (N, channels, …); unify its channels with the weight's.

        With groups, the weight's channels on one side are all channels, as blocks of one group each, and on
        the other side those of one group.
        """
        x, weight, *bias = operands
        groups, is_transposed = arguments["groups"], arguments["transposed"]
        source, target = (weight[0], weight[1]) if is_transposed else (weight[1], weight[0])
        if groups > 1:
            blocks: Axis = (Space(groups),)
            all_channels = source if is_transposed else target
            size = math.prod(space.size for space in leaves(all_channels))
            unify(all_channels, (*blocks, *_units(size // groups)))
            source = source if is_transposed else (*blocks, *source)
            target = (*blocks, *target) if is_transposed else target
        unify(x[1], source)
        for axis in (*x[2:], *weight[2:]):
            fix(axis, PLACES)
        for axes in bias:
            unify(axes[0], target)
        return [x[0], target, *(_units(n, PLACES) for n in out.shape[2:])]

    def _norm(self, name: str, arguments: dict[str, Any], operands: list[list[Axis]]) -> list[Axis]:
        """Return the axes of a normalized tensor; weight, bias and statistics have its normalized axes."""
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


def _named_dims(arguments: Mapping[str, Any], count: int) -> Collection[int]:
    """Return the axes that an operation's arguments name, all ≥ 0; all axes (``count``) if they name none."""
    dims = arguments.get("dim", arguments.get("dims"))
    if isinstance(dims, int):
        dims = [dims]
    return [k % count for k in dims] if dims and count else range(count)


def _moved_dims(
    name: str, arguments: Mapping[str, Any], dims: Collection[int], count: int
) -> Collection[int] | None:
    """Return the axes of ``count`` along which an operation moves units; None for other operations."""
    if name.startswith(_LOCAL):
        return range(count - int(re.search(r"(\d)d", name)[1]), count)  # type: ignore[index]
    if name == "constant_pad_nd":
        return {count - 1 - k // 2 for k, pad in enumerate(arguments["pad"]) if pad}
    if name in ("tril", "triu"):
        return range(count - 2, count)
    return dims if name in ("roll", "flip", "cumsum") else None


@contextmanager
def _unfused_pass(problem: MeanLoss) -> Iterator[None]:
    """Return a context for a pass without fused attention and recurrent layers, whose axes are not known."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH), problem.evaluating(0):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)


class TracedAxes(NamedTuple):
    """The axes of tensors in one pass of a model.

    Attributes:
        parameters: the axes of each parameter, by name.
        activations: the axes of activations that an operation sums over units that may be permuted.
    """

    parameters: dict[str, list[Axis]]
    activations: dict[Place, list[Axis]]


@torch.no_grad()
def traced_axes(problem: MeanLoss) -> TracedAxes:
    """Return the axes of parameters and activations, from one pass of model and loss over the first chunk.

    The units of the outputs are fixed, and so are units that the loss treats individually.
    """
    x, y, *_ = next(problem.data.chunks())
    x, y = problem.data.for_pass(x, y)
    weights, recorder, axes = problem.layout.leaves(problem.weights), Recorder(), Axes()
    with _unfused_pass(problem), recorder:
        outputs = problem.call(weights, x)
        loss = problem.criterion(outputs, y)
    buffers = [problem.model.get_buffer(name) for name in buffer_names(problem.model)]
    for tensor in (*weights.values(), *buffers):
        axes.start(tensor)
    for tensor in _tensors([x, y]):
        axes.start(tensor, DATA)
    fixed_outputs = main_outputs(outputs)
    fixed_ids = {id(t) for t in fixed_outputs}
    activation_ids = {id(t) for t in _tensors([x, y])}  # the data, and then all that is computed from them
    for step in recorder.needed([loss, *fixed_outputs]):
        axes.follow(step)
        axes.fix([t for t in step.outputs if id(t) in fixed_ids], OUTPUTS)
        if activation_ids & {id(t) for t in step.tensors}:
            activation_ids |= {id(t) for t in step.outputs}
    # By address and shape of an activation: the first place where an operation sums over units of the
    # activation, and the activation's axes there.
    summed_activations = dict[tuple[int, torch.Size], tuple[Place, list[Axis]]]()
    for number, step in enumerate(recorder.steps):
        output_spaces = {space for t in step.outputs for space in spaces(axes.axes_of.get(id(t), []))}
        for k, t in enumerate(step.tensors):
            if id(t) not in activation_ids:
                continue
            operand_axes = axes.axes_of.get(id(t), [])
            # The spaces that only the operand has: the operation sums over the units of these spaces.
            summed_spaces = {*spaces(operand_axes)} - output_spaces
            if any(not space.why_fixed for space in summed_spaces):
                # An activation in several operations has one address and shape, and is listed once.
                place = Place(number, k, step.func, t.shape)
                summed_activations.setdefault((t.data_ptr(), t.shape), (place, operand_axes))
    axes_of_parameters = {name: axes.axes_of[id(weight)] for name, weight in weights.items()}
    return TracedAxes(axes_of_parameters, dict(summed_activations.values()))


@torch.no_grad()
def activations(problem: MeanLoss, weights: Tensor, x: Any, points: Collection[Place]) -> dict[str, Tensor]:
    """Return the activations at some places of a pass with ``weights`` (P,), by the text of the place.

    Raises:
        InputError: the pass has other operations than the recorded one.
    """
    x, _ = problem.data.for_pass(x, None)
    parameters, recorder, tensors = problem.layout.leaves(weights), Recorder(), dict[str, Tensor]()
    with _unfused_pass(problem), recorder:
        problem.call(parameters, x)
    for point in points:
        step = recorder.steps[point.number] if point.number < len(recorder.steps) else None
        if step is None or step.func is not point.func or step.tensors[point.operand].shape != point.shape:
            raise InputError("align: 'activations' needs the same operations in each pass; use 'weights'")
        tensors[str(point)] = step.tensors[point.operand]
    return tensors


def main_outputs(outputs: Any) -> list[Tensor]:
    """Return [the outputs] if they are a tensor, [their ``logits``] if they have some, else []."""
    logits = opened_logits(outputs)
    return [logits] if isinstance(logits, Tensor) else []
