"""The permutations of hidden units that leave a model's function unchanged, found in one traced pass.

Each axis of each tensor is a product of spaces: an axis of 12 heads of 64 numbers is (12, 64). An operation
says which axes run over the same units: ``mm`` of (a, b) and (b, c) that both b are one space. What the data,
a constant or the outputs number is fixed, and so is all that an operation touches of which nothing is known.
The operations are PyTorch's own (ATen), not layers: whatever a model is written with ends in these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

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


def regrouped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis] | None:
    """The axes of a tensor that is viewed as ``shape``; None where they cross the borders of blocks."""
    left, found = leaves([space for axis in axes for space in axis]), list[Axis]()
    for size in shape:
        axis, needed = list[Space](), size
        while needed > 1 and left:
            space = left[0]
            if needed % space.size == 0:
                axis.append(left.pop(0))
                needed //= space.size
            elif space.size % needed == 0:
                space.split(needed)
                left = leaves(left)
            else:
                return None
        found.append(tuple(axis))
    return found


def _uniform(tensor: Tensor, dim: int) -> bool:
    """Test whether all entries along an axis are equal, so that no permutation changes the tensor."""
    return tensor.shape[dim] < 2 or bool((tensor == tensor.narrow(dim, 0, 1)).all())


# Operations that give every entry its place back, besides those that PyTorch calls pointwise; softmax treats
# the entries of its axis alike.
_SAME = {
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "alias",
    "detach",
    "copy_",
    "lift_fresh",
    "fill_",
    "zero_",
}
_SAME |= {"_prelu_kernel", "hardswish", "hardtanh"}
# Tensors made like others, whose values do not come from these.
_NEW = {
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
}
_REDUCTIONS = {"mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "logsumexp"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}
# Over the last axes alone, whose units have neighbors: the number of these axes stands in the name.
_LOCAL = ("max_pool", "avg_pool", "_adaptive_avg_pool", "upsample")
_ALONG = {"roll", "flip", "cumsum", "tril", "triu"}


class Step(NamedTuple):
    """An operation of a forward pass: its arguments by name, and the tensors in them with their shapes."""

    func: Any
    given: dict[str, Any]
    tensors: list[Tensor]
    shapes: list[torch.Size]
    outputs: list[Tensor]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations inside, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps = list[Step]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        tensors = [t for _, t in named_tensors([given.get(name) for name in names])]
        shapes = [t.shape for t in tensors]  # before an operation that changes it in place
        out = func(*args, **(kwargs or {}))
        outputs = [t for _, t in named_tensors(out if isinstance(out, (tuple, list)) else [out])]
        self.steps.append(Step(func, given, tensors, shapes, outputs))
        return out

    def needed(self, results: Sequence[Tensor]) -> list[Step]:
        """The steps that the results come from, and those that write to a tensor or return none."""
        wanted, found = {id(t) for t in results}, list[Step]()
        for step in reversed(self.steps):
            made = {id(t) for t in step.outputs}
            if made & wanted or not made or step.func._schema.is_mutable:
                wanted |= {id(t) for t in step.tensors}
                found.append(step)
        return found[::-1]


class Axes:
    """The axes of tensors: those given, and those that operations on them make.

    Tensors that no operation has made from these are constants, which are told apart along an axis, or are
    the same all along it: then no permutation changes them.
    """

    def __init__(self) -> None:
        self.known = dict[int, list[Axis]]()

    def start(self, tensor: Tensor, reason: str = "") -> None:
        """Give a tensor axes of its own."""
        self.known[id(tensor)] = [_units(n, reason) for n in tensor.shape]

    def of(self, tensor: Tensor) -> list[Axis]:
        """The axes of a tensor."""
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        reasons = ["" if _uniform(tensor, dim) else "a constant" for dim in range(tensor.dim())]
        return [_units(n, reason) for n, reason in zip(tensor.shape, reasons, strict=True)]

    def fix(self, tensors: Sequence[Tensor], reason: str) -> None:
        """All units of these tensors must keep their places."""
        for t in tensors:
            for axis in self.known.get(id(t), []):
                fix(axis, reason)

    def follow(self, step: Step) -> None:
        """Give the outputs of an operation their axes, and unite what it numbers alike."""
        func, _, tensors, _, outputs = step
        name = func.overloadpacket.__name__
        if name in _NEW or not any(id(t) in self.known for t in tensors):
            return  # constants
        turned = name in ("transpose_", "t_", "squeeze_", "unsqueeze_")
        axes = self._made(name.rstrip("_") if turned else name, step) or []
        if not axes:
            self.fix(tensors, f"operation {name}")
        for k, t in enumerate(outputs):
            if k >= len(axes):
                self.start(t, f"operation {name}")
                continue
            if id(t) in self.known and not turned:  # written to in place
                for before, now in zip(self.known[id(t)], axes[k], strict=True):
                    unify(before, now)
            self.known[id(t)] = list(axes[k])

    def _made(self, name: str, step: Step) -> list[list[Axis]] | None:
        """The axes of the outputs of an operation; None where nothing is known of it."""
        func, given, tensors, _, outputs = step
        first = self.of(tensors[0])
        if torch.Tag.nondeterministic_seeded in func.tags or name.endswith("_backward"):
            return None
        if torch.Tag.pointwise in func.tags or name in _SAME:
            return [self._broadcast([self.of(t) for t in tensors], outputs[0].dim())]
        if name in ("view", "_unsafe_view", "_reshape_alias"):
            axes = regrouped(first, outputs[0].shape)
            return None if axes is None else [axes]
        if name in _PRODUCTS:
            return [self._product(name, [self.of(t) for t in tensors])]
        if name == "convolution":
            return [self._convolution(given, [self.of(t) for t in tensors], outputs[0])]
        if "norm" in name and name.startswith(
            ("native_", "cudnn_", "_native_", "_batch", "_fused", "miopen")
        ):
            return [self._norm(name, given, [self.of(t) for t in tensors])]
        if name == "embedding":
            fix(first[0], DATA)
            return [[*self.of(tensors[1]), first[1]]]
        if name.startswith(_LOCAL):
            places = {"1d": 1, "2d": 2, "3d": 3}[re.search(r"\dd", name)[0]]  # type: ignore[index]
            local = [k >= len(first) - places for k in range(len(first))]
            return [self._where(first, local, t) for t in outputs]
        if name == "constant_pad_nd":
            pads = list(given["pad"]) + [0] * (2 * len(first) - len(given["pad"]))
            padded = [any(pads[2 * k : 2 * k + 2]) for k in range(len(first))][::-1]
            return [self._where(first, padded, outputs[0])]
        return self._moved(name, step)

    def _moved(self, name: str, step: Step) -> list[list[Axis]] | None:
        """The same of operations that move axes, drop them, or take parts of them."""
        _, given, tensors, (shape, *_), outputs = step
        axes, count = list(self.of(tensors[0])), len(shape)
        dims = _listed(given.get("dim", given.get("dims")), count)
        if name in ("permute", "transpose", "t"):
            order = _listed(given.get("dims"), count) or list(range(count))
            if name != "permute":
                i, j = (0, count - 1) if name == "t" else (given["dim0"] % count, given["dim1"] % count)
                order[i], order[j] = order[j], order[i]
            return [[axes[k] for k in order]]
        if name == "unsqueeze":
            axes.insert(given["dim"] % (count + 1), ())
            return [axes]
        if name == "squeeze":
            gone = {k for k in dims or range(count) if shape[k] == 1}
            return [[axis for k, axis in enumerate(axes) if k not in gone]]
        if name == "expand":
            whole = [()] * (outputs[0].dim() - count) + axes
            return [[axis or _units(n) for n, axis in zip(outputs[0].shape, whole, strict=True)]]
        if name in _REDUCTIONS:
            gone = set(dims or range(count))
            kept = [() if k in gone else axis for k, axis in enumerate(axes)]
            if not given.get("keepdim", False):
                kept = [axis for k, axis in enumerate(kept) if k not in gone]
            return [kept] * len(outputs)
        if name in ("select", "unbind"):
            place = given.get("dim", 0) % count
            fix(axes.pop(place), ONE_BY_ONE)
            return [axes] * len(outputs)
        if name in ("slice", "split", "unsafe_split", "split_with_sizes", "glu"):
            return self._parts(name, given, axes, tensors[0], outputs)
        if name in ("cat", "stack"):
            place = given.get("dim", 0) % outputs[0].dim()
            if name == "stack":
                others = [[*self.of(t)[:place], (), *self.of(t)[place:]] for t in tensors]
            else:
                others = [self.of(t) for t in tensors if t.dim() == count]
                for each in others:
                    fix(each[place], "joined with others")
                others = [[*each[:place], (), *each[place + 1 :]] for each in others]
            axes = self._broadcast(others, outputs[0].dim())
            axes[place] = _units(outputs[0].shape[place], "joined with others")
            return [axes]
        if name in _ALONG:
            along = {count - 1, count - 2} if name in ("tril", "triu") else set(dims or range(count))
            return [self._where(axes, [k in along for k in range(count)], outputs[0])]
        return None

    def _parts(
        self, name: str, given: dict[str, Any], axes: list[Axis], tensor: Tensor, outputs: list[Tensor]
    ) -> list[list[Axis]]:
        """Equal parts of an axis, which are a space of their own, or unequal ones, which are fixed."""
        place = given.get("dim", -1 if name == "glu" else 0) % tensor.dim()
        whole, sizes = tensor.shape[place], {t.shape[place] for t in outputs}
        if sizes == {whole}:
            return [axes] * len(outputs)
        part = sizes.pop()
        equal = not sizes and part > 0 and not whole % part
        if name == "slice":
            equal = equal and (given.get("start") or 0) % part == 0 and given.get("step", 1) == 1
        found = regrouped([axes[place]], [whole // part, part]) if equal else None
        if found is None:
            fix(axes[place], "taken apart")
            return [
                [*axes[:place], _units(t.shape[place], "taken apart"), *axes[place + 1 :]] for t in outputs
            ]
        fix(found[0], ONE_BY_ONE)
        return [[*axes[:place], found[1], *axes[place + 1 :]]] * len(outputs)

    def _broadcast(self, operands: Sequence[Sequence[Axis]], count: int) -> list[Axis]:
        """The axes of operands that are put side by side from the last one on."""
        axes: list[Axis] = [()] * count
        for operand in operands:
            for k, axis in enumerate(reversed(operand), 1):
                unify(axes[-k], axis)
                axes[-k] = axes[-k] or axis
        return axes

    def _product(self, name: str, operands: list[list[Axis]]) -> list[Axis]:
        """A product of matrices (and stacks of them), with what is added to it."""
        a, b = operands[-2:]
        unify(a[-1], b[-1 if len(b) == 1 else -2])
        lead = self._broadcast([a[:-2], b[:-2]], len(a) - 2) if len(a) > 2 else []
        out = [*lead, *(a[-2:-1] if len(a) > 1 else []), *(b[-1:] if len(b) > 1 else [])]
        return self._broadcast([out, *operands[:-2]], len(out))

    def _convolution(self, given: dict[str, Any], operands: list[list[Axis]], out: Tensor) -> list[Axis]:
        x, weight, *bias = operands
        groups, back = given["groups"], given["transposed"]
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

    def _norm(self, name: str, given: dict[str, Any], operands: list[list[Axis]]) -> list[Axis]:
        """Batch, group and layer normalization: weight, bias and statistics have the normalized axes."""
        x, *others = operands
        if "group" in name:
            size = math.prod(space.size for space in leaves(x[1]))
            unify(x[1], (*_units(given["group"]), *_units(size // given["group"])))
            for axis in x[2:]:
                fix(axis, PLACES)
        for axes in others:
            if "layer" in name or "rms" in name:
                self._broadcast([x[-len(axes) :], axes], len(axes))
            else:
                unify(x[1], axes[0])
        return x

    def _where(self, axes: Sequence[Axis], changed: Sequence[bool], out: Tensor) -> list[Axis]:
        """The axes of an operation that moves units along those that are ``changed``."""
        for axis, moved in zip(axes, changed, strict=True):
            if moved:
                fix(axis, PLACES)
        new = [_units(n, PLACES) for n in out.shape]
        return [n if moved else axis for axis, moved, n in zip(axes, changed, new, strict=True)]


def _listed(dims: Any, count: int) -> list[int]:
    """Numbers of axes, from 0 on; [] where none is given."""
    return [k % count for k in ([dims] if isinstance(dims, int) else dims or [])] if count else []


@torch.no_grad()
def traced(problem: MeanLoss) -> dict[str, list[Axis]]:
    """Name of a parameter -> its axes, from one pass of the model and the loss over the first samples.

    What numbers the outputs keeps its place, and so does what the loss takes apart.
    """
    x, y = problem.data.leaves(*problem.data.first())
    weights = problem.layout.leaves(problem.weights)
    statistics = {*buffer_names(problem.model)}
    recorder, axes = Recorder(), Axes()
    with ExitStack() as stack:
        # Neither fused attention nor a recurrent layer of a library says what it does to its axes.
        fast = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(problem.evaluating(0))
        stack.enter_context(recorder)
        outputs = problem.call(weights, x)
        loss = problem.criterion(outputs, y)
    for weight in weights.values():
        axes.start(weight)
    for name, buffer in problem.model.named_buffers():
        if name in statistics:
            axes.start(buffer)
    for _, tensor in named_tensors((x, y)):
        axes.start(tensor, DATA)
    ends = seen(outputs)
    for step in recorder.needed([loss, *ends]):
        axes.follow(step)
        axes.fix([t for t in step.outputs if any(t is end for end in ends)], OUTPUTS)
    return {name: axes.known[id(weight)] for name, weight in weights.items()}


def seen(outputs: Any) -> list[Tensor]:
    """The outputs that must not change: a tensor, or the ``logits`` among others; else the loss has to do."""
    z = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    return [z] if isinstance(z, Tensor) else []
