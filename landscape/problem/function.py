"""A model and a loss as a function of the parameters, and whether they fit together."""

from __future__ import annotations

import contextlib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core.errors import InputError
from landscape.problem.batches import named_tensors, random_state
from landscape.problem.data import Data
from landscape.problem.layout import Layout
from landscape.problem.losses import check_labels, output_loss

# How far the checks move θ, relative to the mean magnitude of each parameter (ours).
MOVE = 0.1


class Function(Protocol):
    """A problem under construction: a model as a function of its parameters θ (P,), a loss, and data."""

    model: nn.Module
    layout: Layout
    theta: Tensor
    criterion: Callable[[Any, Any], Tensor]
    data: Data
    device: torch.device
    draws: int
    differentiates: bool
    draws_elsewhere: bool

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The outputs with the parameters ``weights``."""

    def evaluating(self, seed: int | None) -> AbstractContextManager[None]:
        """What surrounds a forward pass and its loss; its random numbers are those of ``seed``."""

    def on(self, data: Data) -> Self:
        """The same on other data."""

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another precision."""

    def saved_bytes(self, x: Any, y: Any) -> int:
        """Bytes that the pass of a batch saves for its backward pass."""


def moved(problem: Function, seed: int = 0) -> Tensor:
    """θ moved at random by :data:`MOVE`: there samples have different losses, even of a model just made."""
    generator = torch.Generator().manual_seed(seed)
    theta = problem.theta.clone()
    for view in problem.layout.views(theta).values():
        if view.numel():
            size = float(view.detach().abs().float().mean()) + MOVE
            view += (MOVE * size * torch.randn(view.shape, generator=generator)).to(view)
    return theta


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways of computing one number count as equal: √eps."""
    return math.sqrt(torch.finfo(dtype).eps)


# How deep, and among how many objects, the model is searched for inside a loss: a partial of a function with
# a list of layers has depth three (ours).
DEPTH, MAX_OBJECTS = 3, 1000


def mentions(function: Any, module: nn.Module) -> bool:
    """Whether closure, globals or attributes of a loss contain ``module``, a part or a parameter of it."""
    parts = {id(each) for each in (*module.modules(), *module.parameters())}

    def within(value: Any, depth: int) -> bool:
        return id(value) in parts or (depth > 0 and any(within(each, depth - 1) for each in _contents(value)))

    return within(function, DEPTH)


def _contents(value: Any) -> Iterable[Any]:
    """The objects inside a function, a container or an object."""
    if isinstance(value, types.FunctionType):
        names = [value.__globals__.get(name) for name in value.__code__.co_names]
        return [*inspect.getclosurevars(value).nonlocals.values(), *names, *(value.__defaults__ or ())]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, (list, tuple, set, dict)):
        return list(value.values() if isinstance(value, dict) else value)[:MAX_OBJECTS]
    if isinstance(value, (types.ModuleType, type, Tensor)):
        return ()
    return list(getattr(value, "__dict__", {}).values())


@torch.no_grad()
def ignores_first_label(problem: Function, x: Any, y: Any) -> bool:
    """Whether the model's own loss leaves out the first label of each sequence, as causal models do.

    No attribute of a model says so: two passes show whether another first label changes the loss.
    """
    labels = x.get("labels") if isinstance(x, Mapping) else None
    if problem.criterion is not output_loss or not isinstance(labels, Tensor):
        return False
    if labels.is_floating_point() or labels.dim() < 2:
        return False
    check_fit(problem, x, y)
    other = labels.clone()
    other[:, 0] = (labels[:, 0] == 0).to(labels)
    views, losses = problem.layout.views(problem.theta), []
    for given in (labels, other):
        with problem.evaluating(0):
            losses.append(problem.criterion(problem.call(views, {**x, "labels": given}), given))
    return torch.allclose(losses[0], losses[1], rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def check_fit(problem: Function, x: Any, y: Any, labels: Any = None) -> tuple[Tensor, bool]:
    """Raise InputError, in one line, unless model, loss and some samples fit together.

    Returns the loss, and whether random numbers were drawn for it.

    Where they do with gradients recorded alone, as those that call ``torch.autograd.grad`` (physics-informed
    losses), ``problem.differentiates`` is set, and all passes record gradients from then on; with
    ``data.leaf_inputs``, those of the inputs, too. Random numbers of NumPy or Python set
    ``problem.draws_elsewhere``.

    ``labels``: where the loss takes classes, each of these must be a class of the model's outputs.
    """
    outputs, data, needed = None, problem.data, problem.data.leaf_inputs

    def value() -> tuple[object, bool]:
        nonlocal outputs
        inputs, targets = data.leaves(x, y)
        with problem.evaluating(0):
            before = random_state(problem)
            outputs = problem.call(problem.layout.views(problem.theta), inputs)
            check_labels(problem.criterion, outputs, labels)
            found = problem.criterion(outputs, targets)  # whatever the user's function gives
            after = random_state(problem)
        problem.draws_elsewhere = before[1] != after[1]
        return found, before != after

    causes: list[Exception] = []
    for recorded in ((False, needed), (True, needed), (True, True)):
        problem.differentiates, data.leaf_inputs = recorded
        problem.draws_elsewhere = True  # seed all generators, until it is known which are used
        try:
            found, drawn = value()
            break
        except InputError:
            raise
        except Exception as error:  # the user's model and loss raise any kind of error
            causes.append(error)
    else:
        problem.differentiates = problem.draws_elsewhere = False
        data.leaf_inputs = needed
        refuse_broadcasting(problem.criterion, outputs, y)
        raise _no_fit(causes, x, y) from causes[0]
    if not isinstance(found, Tensor) or found.dim() > 0:
        raise _several_numbers(found)
    return found.detach(), drawn


def _no_fit(causes: Sequence[Exception], x: Any, y: Any) -> InputError:
    """The refusal where errors are raised without gradients, with them, and with those in the inputs."""
    tensors = [*named_tensors(x, "inputs"), *named_tensors(y, "targets")]
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors)
    words, last = " ".join(str(causes[0]).split())[:200], str(causes[-1])
    hint = ""
    if "does not require grad" in last or "not have been used in the graph" in last:
        hint = "; a loss that differentiates in the inputs finds them in its targets: give data as (x, x)"
    return InputError(f"model and data do not fit: {type(causes[0]).__name__}: {words} ({shapes}){hint}")


def _several_numbers(found: Any) -> InputError:
    """The refusal of a loss that does not give one number."""
    what, one = repr(type(found)), ""
    if isinstance(found, Tensor):
        what, one = f"shape {tuple(found.shape)}", ".mean()"
    elif isinstance(found, (tuple, list, Mapping)) and found:
        key = next(iter(found)) if isinstance(found, Mapping) else 0
        if isinstance(found[key], Tensor) and found[key].dim() == 0:
            one = f"[{key!r}]"
    return InputError(
        f"loss: it gives {what}, it must give one number, the mean over the samples",
        f"landscape.Problem(model, lambda o, t: loss(o, t){one}, data)" if one else "",
    )


class _Pairs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether two tensors of these shapes are broadcast to one."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.seen = {a.shape, b.shape}, False
        self.both = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.both:
            given = {t.shape for _, t in named_tensors(args)} & self.shapes
            self.seen |= len(given) == 2 or (len(given) == 1 and func is torch.ops.aten.expand.default)
        return result


def broadcasting(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> str:
    """Code for targets in the shape of the outputs, where these are (N, 1) and (N,) or the reverse.

    A loss that takes them element by element pairs each output with each target: its mean is over (N, N), and
    PyTorch gives a warning at most. "" for other shapes, and for a loss that does not pair these.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return ""
    shapes = outputs.shape, targets.shape
    if shapes[0] != (*shapes[1], 1) and shapes[1] != (*shapes[0], 1):
        return ""
    same = targets.reshape(outputs.shape)
    same = same if same.is_floating_point() else same.to(outputs)
    try:
        loss(outputs, same)
    except Exception:  # whatever the user's loss raises: this is no remedy
        return ""
    with contextlib.suppress(Exception), _Pairs(outputs, targets) as pairs:
        loss(outputs, targets)  # some of PyTorch's raise an error for such shapes
        if not pairs.seen:
            return ""
    change = "unsqueeze(-1)" if outputs.dim() > targets.dim() else "squeeze(-1)"
    kind = "" if targets.is_floating_point() else ".to(outputs)"
    return f"landscape.Problem(model, lambda outputs, targets: loss(outputs, targets.{change}{kind}), data)"


def refuse_broadcasting(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> None:
    """Raise InputError, with the remedy, where :func:`broadcasting` is the cause of a refusal."""
    remedy = broadcasting(loss, outputs, targets)
    if remedy:
        raise InputError(
            f"loss: the outputs have shape {tuple(outputs.shape)}, but the targets {tuple(targets.shape)}: a "
            "loss that broadcasts them pairs each output with the targets of all samples",
            remedy,
        )


def check_original(problem: Function, original: nn.Module, x: Any, y: Any) -> None:
    """Raise InputError if the loss at θ changes with the parameters of the user's module.

    They are changed for two passes, and set back.
    """

    def loss() -> Tensor:
        with torch.no_grad(), problem.evaluating(0):
            return problem.criterion(problem.call(problem.layout.views(problem.theta), x), y).detach()

    before, saved = loss(), [p.detach().clone() for p in original.parameters()]
    try:
        with torch.no_grad():
            for p in original.parameters():
                p.mul_(1 + MOVE).add_(MOVE)
        after = loss()
    finally:
        with torch.no_grad():
            for p, value in zip(original.parameters(), saved, strict=True):
                p.copy_(value)
    if not torch.allclose(before, after, rtol=tolerance(problem.theta.dtype), atol=0, equal_nan=True):
        raise InputError(
            "loss: it changes with the values in the module that was given, beside those of the weights: it, "
            "or the model, uses that module's parameters; give a regulariser as Problem(…, penalty=…)"
        )
