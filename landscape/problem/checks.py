"""Whether L(θ), as a problem computes it, is the loss that the user's own module and loss give.

Each check works on a few samples, and raises InputError in one line that names the cause and the remedy.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.problem.batches import call, count_samples, fixed_randomness, named_tensors, take, tree_map
from landscape.problem.layout import Layout

CHECKS = ("full", "quick", "off")
# How deep, and among how many, the model is looked for in what a loss holds: a partial of a function with a
# list of layers is three (ours).
DEPTH, MOST_HELD = 3, 1000
# How far θ is moved to see that the loss follows it, relative to each parameter's mean magnitude (ours).
MOVE = 0.1


class Function(Protocol):
    """What is checked: a model as a function of its parameters, and a loss."""

    model: nn.Module
    layout: Layout
    theta: Tensor
    criterion: Callable[[Any, Any], Tensor]
    device: torch.device

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The outputs with the parameters ``weights``."""


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways of computing one number count as equal: √eps."""
    return math.sqrt(torch.finfo(dtype).eps)


def copied(tree: Any) -> Any:
    """``tree`` with every tensor cloned."""
    return tree_map(lambda tensor: tensor.clone(), tree)


def writes(before: Any, after: Any) -> bool:
    """Whether any tensor of ``after`` has other numbers than its copy in ``before``."""
    pairs = zip(named_tensors(before), named_tensors(after), strict=True)
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for (_, a), (_, b) in pairs)


def clone_inputs(model: nn.Module) -> None:
    """Make ``model``, which writes to its inputs, work on clones of them."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return copied(args), copied(kwargs)

    model.register_forward_pre_hook(hook, with_kwargs=True)


def check_passes(problem: Function, before: Tensor, x: Any, y: Any) -> None:
    """Raise InputError unless a pass leaves θ as it was, ``before``, and all passes give one loss.

    A pass may differ from the next in a buffer that it updates, and from one that records gradients in what
    asks for that, as the padding of PyTorch's own TransformerEncoder does.
    """
    if not torch.equal(problem.theta, before):
        raise InputError(
            "model: its forward pass writes to its own parameters (an embedding's max_norm?), so that other "
            "weights are evaluated than asked for; leave that out of forward, and bound them after each step "
            "of training"
        )
    views = problem.layout.views(problem.theta)
    buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}

    def loss(*, recorded: bool) -> Tensor:
        given = {name: view.detach().requires_grad_(recorded) for name, view in views.items()}
        with fixed_randomness(problem, 0), torch.set_grad_enabled(recorded):
            return problem.criterion(problem.call(given, copied(x)), copied(y)).detach()

    first, second, third = loss(recorded=False), loss(recorded=False), loss(recorded=True)
    allowed = max(tolerance(dtype) for dtype in (problem.theta.dtype, first.dtype))
    if not torch.allclose(first, second, rtol=allowed, atol=allowed, equal_nan=True):
        after = dict(problem.model.named_buffers())
        changed = [name for name, buffer in buffers.items() if not torch.equal(buffer, after[name])]
        raise InputError(
            f"model: two passes over the same samples differ, with losses {float(first):.6g} and "
            f"{float(second):.6g}: it keeps something of a pass for the next"
            + (f", in its buffer '{changed[0]}'" if changed else "")
            + "; let it do so in training mode only (if self.training)"
        )
    if not torch.allclose(first, third, rtol=allowed, atol=allowed, equal_nan=True):
        raise InputError(
            f"model: its loss is {float(first):.6g}, but {float(third):.6g} where gradients are recorded: "
            "its forward pass asks for that (torch.is_grad_enabled; a TransformerEncoder given padding, "
            "unless made with enable_nested_tensor=False); make it compute the same either way"
        )


class ClonedTargets:
    """A loss that writes to its targets, given clones of them."""

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        self.func = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.func(outputs, copied(targets))


def leaves(value: Any) -> list[Tensor]:
    """The tensors that require gradients and that ``value`` was computed from."""
    found: dict[int, Tensor] = {}
    functions = []
    for _, tensor in named_tensors(value):
        if tensor.grad_fn is not None:
            functions.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found[id(tensor)] = tensor
    seen = set(functions)
    while functions:
        function = functions.pop()
        variable = getattr(function, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        new = {f for f, _ in function.next_functions if f is not None} - seen
        seen |= new
        functions += new
    return list(found.values())


def check_leaves(problem: Function, original: nn.Module, x: Any, y: Any) -> None:
    """Raise InputError if the loss depends on anything that requires gradients and is not θ."""
    given = {k: v.detach().requires_grad_() for k, v in problem.layout.views(problem.theta).items()}
    known = {id(leaf) for leaf in given.values()}

    def strange() -> list[list[Tensor]]:
        """What the outputs, and the loss, depend on beside θ."""
        with fixed_randomness(problem, 0), torch.enable_grad():
            outputs = problem.call(given, x)
            found = leaves(_tensors(outputs)), leaves(problem.criterion(outputs, y))
        return [[leaf for leaf in each if id(leaf) not in known] for each in found]

    first = strange()
    if not any(first):
        return
    # A leaf that a pass makes for itself, as to differentiate in x, is another one in the next pass.
    for before, after, of_loss in zip(first, strange(), (False, True), strict=True):
        again = {id(leaf) for leaf in after}
        lasting = [leaf for leaf in before if id(leaf) in again]
        if lasting:
            raise InputError(_stray(lasting[0], problem.model, original, of_loss=of_loss))


def _tensors(outputs: Any) -> list[Tensor]:
    """The tensors of ``outputs``, those of an object with attributes (NamedTuple, Hugging Face) included."""
    if hasattr(outputs, "__dict__") and not isinstance(outputs, (Tensor, dict, list, tuple)):
        outputs = vars(outputs)
    return [tensor for _, tensor in named_tensors(outputs)]


def _stray(leaf: Tensor, model: nn.Module, original: nn.Module, *, of_loss: bool) -> str:
    """What to say of a tensor that the outputs, or the loss, depend on although it is no part of θ."""
    names = {id(p): name for module in (model, original) for name, p in module.named_parameters()}
    name = names.get(id(leaf))
    shape = tuple(leaf.shape)
    if of_loss and name:
        return (
            f"loss: it uses the model's parameter '{name}' itself, whose values do not move with the "
            "weights; leave that term out and give it as Problem(…, penalty=lambda parameters: …), a dict of "
            "tensors by name, or as weight_decay="
        )
    if of_loss:
        return (
            f"loss: it depends on a tensor of shape {shape} that requires gradients and is none of the "
            "model's parameters; freeze it (requires_grad_(False)) or make it a parameter of the model"
        )
    if name:
        return (
            f"model: its forward pass reaches parameter '{name}' past the module's attributes (by a list, a "
            "dict or a function made elsewhere), so that it does not follow other weights; use self.NAME, "
            "nn.ParameterList or nn.ParameterDict"
        )
    return (
        f"model: its outputs depend on a tensor of shape {shape} that requires gradients and is none of its "
        "parameters; register it as nn.Parameter, or detach it"
    )


def check_parameters(problem: Function, x: Any, y: Any, *, seed: int = 0) -> None:
    """Raise InputError unless loss and gradient at other weights are those of the module that holds them."""
    generator = torch.Generator().manual_seed(seed)
    theta = problem.theta.clone()
    for view in problem.layout.views(theta).values():
        if view.numel():
            size = float(view.detach().abs().float().mean()) + MOVE
            view += (MOVE * size * torch.randn(view.shape, generator=generator)).to(view)
    given = {k: v.detach().requires_grad_() for k, v in problem.layout.views(theta).items()}
    with fixed_randomness(problem, 0):
        ours, slope = _loss_and_slope(lambda: problem.call(given, x), problem, list(given.values()), y)
    with _loaded(problem, theta) as own, fixed_randomness(problem, 0):
        wanted, truth = _loss_and_slope(lambda: call(problem.model, {}, x), problem, own, y)
    allowed = tolerance(problem.theta.dtype)
    if not torch.allclose(ours, wanted, rtol=allowed, atol=allowed, equal_nan=True):
        raise InputError(
            f"model: with all parameters replaced its loss is {float(ours):.6g}, but {float(wanted):.6g} "
            "with the same ones loaded into the module: it keeps some of them, or what was computed from "
            "them, elsewhere; compute it from self.NAME in each forward pass"
        )
    if slope is not None and truth is not None:
        difference, scale = float((slope - truth).norm()), float(truth.norm())
        if math.isfinite(scale) and difference > 10 * allowed * (scale + allowed):
            raise InputError(
                "model: with all parameters replaced its gradient is not that of the module with the same "
                "ones loaded (is activation checkpointing on?); switch off what computes outputs again later"
            )


def _loss_and_slope(
    outputs: Callable[[], Any], problem: Function, parameters: list[Tensor], y: Any
) -> tuple[Tensor, Tensor | None]:
    """The loss and its gradient (P,), or None where the loss has none."""
    with torch.enable_grad():
        loss = problem.criterion(outputs(), y)
        if not loss.requires_grad:
            return loss.detach(), None
        try:
            parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
        except RuntimeError:  # an operation without a derivative: contours do not need one
            return loss.detach(), None
    return loss.detach(), torch.cat([part.detach().double().flatten() for part in parts])


@contextlib.contextmanager
def _loaded(problem: Function, theta: Tensor) -> Iterator[list[Tensor]]:
    """The parameters of the problem's own module, with ``theta`` in them while the block runs."""
    named = dict(problem.model.named_parameters())
    own = [named[slot.name] for slot in problem.layout.slots]
    before = [p.detach().clone() for p in own]
    try:
        with torch.no_grad():
            for p, value in zip(own, problem.layout.views(theta).values(), strict=True):
                p.copy_(value)
        yield [p.requires_grad_() for p in own]
    finally:
        with torch.no_grad():
            for p, value in zip(own, before, strict=True):
                p.copy_(value)


def mentions(function: Any, module: nn.Module) -> bool:
    """Whether a loss holds ``module``, a part or a parameter of it: in its closure, globals, attributes."""
    own = {id(each) for each in (*module.modules(), *module.parameters())}

    def within(value: Any, depth: int) -> bool:
        return id(value) in own or (depth > 0 and any(within(each, depth - 1) for each in _held(value)))

    return within(function, DEPTH)


def _held(value: Any) -> Iterable[Any]:
    """What a function, a container or an object holds."""
    if isinstance(value, types.FunctionType):
        names = [value.__globals__.get(name) for name in value.__code__.co_names]
        return [*inspect.getclosurevars(value).nonlocals.values(), *names, *(value.__defaults__ or ())]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, (list, tuple, set, dict)):
        return list(value.values() if isinstance(value, dict) else value)[:MOST_HELD]
    if isinstance(value, (types.ModuleType, type, Tensor)):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def check_original(problem: Function, original: nn.Module, x: Any, y: Any) -> None:
    """Raise InputError if the loss at θ changes with what the user's own module holds, for a moment."""

    def loss() -> Tensor:
        with torch.no_grad(), fixed_randomness(problem, 0):
            return problem.criterion(problem.call(problem.layout.views(problem.theta), x), y)

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


@torch.no_grad()
def check_mean(
    problem: Function, terms: Callable[[Any, Any], Tensor], x: Any, y: Any, *, batches: bool, known: bool
) -> None:
    """Raise InputError unless the loss of samples is the mean of the losses of parts of them, by their terms.

    Args:
        terms: (B,) how many terms of the mean each sample brings.
        batches: the data comes in batches that are never split: it is enough that the loss is no sum.
        known: the user said how many terms there are.
    """
    try:
        samples = count_samples(x, y, alike=True)
    except InputError:
        return  # a batch that cannot be split
    if samples < 2:
        return
    views = problem.layout.views(problem.theta)

    precisions = {problem.theta.dtype}  # Hugging Face's causal models take the loss in float32 always

    def loss(part: slice) -> float:
        with fixed_randomness(problem, 0):
            value = problem.criterion(problem.call(views, take(x, part)), take(y, part))
        precisions.add(value.dtype)
        return float(value)

    whole = loss(slice(None))
    if not math.isfinite(whole):
        return
    ends = [0, 1, samples] if samples < 6 else [0, 2, 5, samples]
    parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    each = terms(x, y)
    try:
        losses = [(loss(part), float(each[part].sum())) for part in parts]
    except (RuntimeError, ValueError, IndexError, TypeError):
        return  # the model does not take batches of another size
    total = sum(weight for _, weight in losses)
    counted = [(value, weight) for value, weight in losses if weight > 0]
    if total <= 0:
        return
    mean = sum(value * weight for value, weight in counted) / total
    scale = abs(whole) + max(abs(value) for value, _ in counted)
    eps = max(torch.finfo(dtype).eps for dtype in precisions)
    allowed = min(1000 * eps, 3 * math.sqrt(eps)) * scale  # a batch of another size rounds otherwise
    if abs(mean - whole) <= allowed or _is_random(problem, x, y, whole):
        return
    if abs(sum(value for value, _ in counted) - whole) <= allowed:
        raise InputError(
            "loss: it is the sum over the samples it is given, not the mean (reduction='sum'?); give one "
            "that returns the mean"
        )
    if batches and known:
        return
    raise InputError(
        f"loss: that of {samples} samples is {whole:.6g}, but the mean over parts of them is {mean:.6g}: it "
        "leaves samples out or weighs them (give terms=, how many terms of the mean each brings, such as "
        "terms=lambda y: (y != 0).sum(1)), or model or loss mix samples (give such data as a list of "
        "batches, and terms=lambda y: torch.ones(len(y)))"
    )


def _is_random(problem: Function, x: Any, y: Any, loss: float) -> bool:
    """Whether other random numbers give another loss."""
    with fixed_randomness(problem, 1):
        other = float(problem.criterion(problem.call(problem.layout.views(problem.theta), x), y))
    return other != loss and not math.isnan(other)


def describe_loss(loss: Any) -> str:
    """A name for a loss: that of a function, or a module as it prints itself."""
    if isinstance(loss, nn.Module):
        return " ".join(repr(loss).split())
    if isinstance(loss, partial):
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(loss.keywords.items()))
        return f"{describe_loss(loss.func)}({options})"
    if isinstance(loss, ClonedTargets):
        return describe_loss(loss.func)
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    return f"{getattr(loss, '__module__', '')}.{name}"
