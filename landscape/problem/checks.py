"""Whether L(θ), as a problem computes it, is the loss that the user's own module and loss give.

Each check works on a few samples, and raises InputError in one line that names the cause and the remedy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.problem.batches import call, clone, named_tensors, strided, take
from landscape.problem.data import PROBE
from landscape.problem.function import Function, check_fit, check_original, mentions, moved, tolerance
from landscape.problem.losses import ClonedTargets, Terms
from landscape.problem.mean_check import AT_ONCE, check_mean, takes

CHECKS = ("full", "quick", "off")
FULL_PROBE = 256  # samples of check="full" (ours)
# Draws of random numbers, one of which at least must change a loss that depends on them: a layer that is
# dropped as a whole one time in ten is missed once in 10³ (ours).
DRAWS = 64


def check_problem(
    problem: Function, original: nn.Module, terms: Terms, batch: tuple[Any, Any], *, full: bool
) -> None:
    """Raise InputError unless L(θ) is the loss that ``original`` and the user's loss give.

    A model or loss that writes to its arguments gets clones of them from now on.

    Args:
        original: the user's module, of which the problem has a copy.
        terms: how many terms of the mean each sample contributes.
        batch: the first samples, or the first batch.
        full: more samples, at more weights.
    """
    data = problem.data
    x, y = data.pick(*batch, FULL_PROBE if full else PROBE)
    # Clones, until it is known whether model and loss write to their arguments.
    given, before = clone((x, y)), problem.theta.clone()
    labels = data.resident[1] if data.resident else None
    try:
        loss, drawn = check_fit(problem, given[0], given[1], labels)
    except InputError as error:  # the loss, or the model of a graph, may take no part of the data
        x, y = _more(problem, batch, x)
        given = clone((x, y))
        try:
            loss, drawn = check_fit(problem, given[0], given[1], labels)
        except InputError:
            raise error from error.__cause__
    if writes(x, given[0]):
        clone_inputs(problem.model)
    if writes(y, given[1]):
        problem.criterion = ClonedTargets(problem.criterion)
    check_passes(problem, before, loss, x, y)
    if drawn and not problem.draws:
        check_random(problem, x, y)
    check_recorded(problem, before, loss, check_leaves(problem, original, x, y), x, y)
    away = moved(problem)
    for theta in (away, moved(problem, 1), moved(problem, 2)) if full else (away,):
        check_parameters(problem, x, y, theta)
    check_mean(problem, terms, batch, away)
    if full or mentions(problem.criterion, original):
        check_original(problem, original, x, y)


def _more(problem: Function, batch: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """More samples than ``x``: all for a model that does not take these, or else AT_ONCE at most."""
    resident = problem.data.resident
    if resident is None or problem.data.samples <= AT_ONCE or not takes(problem, x):
        return resident or batch
    x, y = take(resident, slice(AT_ONCE))
    return x, y


def writes(before: Any, after: Any) -> bool:
    """Whether any tensor of ``after`` has other numbers than its copy in ``before``."""
    pairs = zip(named_tensors(before), named_tensors(after), strict=True)
    return any(not torch.equal(*(strided(t).nan_to_num() for t in (a, b))) for (_, a), (_, b) in pairs)


def clone_inputs(model: nn.Module) -> None:
    """Make ``model``, which writes to its inputs, work on clones of them."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return clone(args), clone(kwargs)

    model.register_forward_pre_hook(hook, with_kwargs=True)


def check_passes(problem: Function, before: Tensor, first: Tensor, x: Any, y: Any) -> None:
    """Raise InputError unless a pass leaves θ as it was, ``before``, and the next gives the loss ``first``.

    It may differ by a buffer that each pass updates.
    """
    if not torch.equal(problem.theta, before):
        raise InputError(
            "model: its forward pass writes to its own parameters (an embedding's max_norm?), so that other "
            "weights are evaluated than asked for; leave that out of forward, and bound them after each step "
            "of training"
        )
    buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    second = _loss(problem, x, y)
    if not _same(first, second, problem):
        after = dict(problem.model.named_buffers())
        changed = [
            name for name, buffer in buffers.items() if not torch.equal(strided(buffer), strided(after[name]))
        ]
        raise InputError(
            f"model: two passes over the same samples differ, with losses {float(first):.6g} and "
            f"{float(second):.6g}: it keeps something of a pass for the next"
            + (f", in its buffer '{changed[0]}'" if changed else "")
            + ", or draws random numbers by a generator of its own; let it keep nothing unless "
            "self.training, and draw from PyTorch's own generator"
        )


def check_recorded(problem: Function, before: Tensor, loss: Tensor, recorded: Tensor, x: Any, y: Any) -> None:
    """Raise InputError unless the loss is the same where gradients are recorded.

    It differs for a model that asks for that, as PyTorch's own TransformerEncoder does with padding, or where
    any two passes may differ.
    """
    if _same(loss, recorded, problem):
        return
    for _ in range(DRAWS):
        check_passes(problem, before, loss, x, y)
    raise InputError(
        f"model: its loss is {float(loss):.6g}, but {float(recorded):.6g} where gradients are recorded: its "
        "forward pass asks for that (torch.is_grad_enabled; a TransformerEncoder given padding, unless made "
        "with enable_nested_tensor=False); make it compute the same either way"
    )


@torch.no_grad()
def _loss(problem: Function, x: Any, y: Any, seed: int = 0) -> Tensor:
    """The loss of clones of some samples at the centre."""
    inputs, targets = fresh(problem, x, y)
    with problem.evaluating(seed):
        outputs = problem.call(problem.layout.views(problem.theta), inputs)
        return problem.criterion(outputs, targets).detach()


def _same(a: Tensor, b: Tensor, problem: Function) -> bool:
    """Whether two losses are the same but for rounding."""
    allowed = max(tolerance(dtype) for dtype in (problem.theta.dtype, a.dtype))
    return torch.allclose(a, b, rtol=allowed, atol=allowed, equal_nan=True)


def fresh(problem: Function, x: Any, y: Any) -> tuple[Any, Any]:
    """Clones of some samples for one pass."""
    x, y = clone((x, y))
    return problem.data.leaves(x, y)


def check_random(problem: Function, x: Any, y: Any) -> None:
    """Raise InputError if the loss depends on the random numbers that are drawn for it.

    Eval mode stops dropout modules, but not ``F.dropout`` left on, or noise that a model or loss draws.
    """
    first = _loss(problem, x, y)
    for seed in range(1, DRAWS + 1):
        other = _loss(problem, x, y, seed)
        if not torch.allclose(first, other, rtol=0, atol=0, equal_nan=True):
            raise InputError(
                "model or loss: random even in eval mode: the loss of the same samples is "
                f"{float(first):.6g} or {float(other):.6g}, as other numbers are drawn (F.dropout needs "
                "training=self.training); randomness='seed' holds the numbers fixed, randomness=8 takes the "
                "mean over 8 draws of them",
                remedy='landscape.Problem(model, loss, data, randomness="seed")',
            )


def leaves(value: Any) -> list[Tensor]:
    """The tensors that require gradients and that ``value`` was computed from."""
    variables: dict[int, Tensor] = {}
    functions = []
    for _, tensor in named_tensors(value):
        if tensor.grad_fn is not None:
            functions.append(tensor.grad_fn)
        elif tensor.requires_grad:
            variables[id(tensor)] = tensor
    seen = set(functions)
    while functions:
        function = functions.pop()
        variable = getattr(function, "variable", None)
        if variable is not None:
            variables[id(variable)] = variable
        new = {f for f, _ in function.next_functions if f is not None} - seen
        seen |= new
        functions += new
    return list(variables.values())


def check_leaves(problem: Function, original: nn.Module, x: Any, y: Any) -> Tensor:
    """Raise InputError if the loss depends on anything that requires gradients and is not θ.

    Returns the loss, of a pass that records gradients.
    """
    given = {k: v.detach().requires_grad_() for k, v in problem.layout.views(problem.theta).items()}
    known = {id(leaf) for leaf in given.values()}

    def unknown_leaves() -> tuple[Tensor, list[list[Tensor]]]:
        """The loss, and the tensors other than θ that the outputs, and the loss, depend on."""
        inputs, targets = fresh(problem, x, y)
        with torch.enable_grad(), problem.evaluating(0):
            outputs = problem.call(given, inputs)
            loss = problem.criterion(outputs, targets)
        every = leaves(_tensors(outputs)), leaves(loss)
        return loss.detach(), [[leaf for leaf in each if id(leaf) not in known] for each in every]

    loss, first = unknown_leaves()
    if not any(first):
        return loss
    # A leaf that a pass makes for itself, as to differentiate in x, is another one in the next pass.
    for before, after, of_loss in zip(first, unknown_leaves()[1], (False, True), strict=True):
        again = {id(leaf) for leaf in after}
        lasting = [leaf for leaf in before if id(leaf) in again]
        if lasting:
            raise InputError(_unknown_leaf(lasting[0], problem.model, original, of_loss=of_loss))
    return loss


def _tensors(outputs: Any) -> list[Tensor]:
    """The tensors of ``outputs``, those of an object with attributes (NamedTuple, Hugging Face) included."""
    if hasattr(outputs, "__dict__") and not isinstance(outputs, (Tensor, dict, list, tuple)):
        outputs = vars(outputs)
    return [tensor for _, tensor in named_tensors(outputs)]


def _unknown_leaf(leaf: Tensor, model: nn.Module, original: nn.Module, *, of_loss: bool) -> str:
    """The message on a tensor that the outputs, or the loss, depend on although it is no part of θ."""
    names = {id(p): name for module in (model, original) for name, p in module.named_parameters()}
    name = names.get(id(leaf))
    shape = tuple(leaf.shape)
    if of_loss and name:
        return (
            f"loss: it uses the model's parameter '{name}' itself, whose values do not move with the "
            "weights; a loss that calls the model belongs into the forward pass of a module around it; a "
            "regulariser is given as Problem(…, penalty=lambda parameters: …), a dict of tensors by name, "
            "or as weight_decay="
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


def check_parameters(problem: Function, x: Any, y: Any, theta: Tensor) -> None:
    """Raise InputError unless loss and gradient at ``theta`` are those of the module that holds it."""
    given = {k: v.detach().requires_grad_() for k, v in problem.layout.views(theta).items()}
    a, b = fresh(problem, x, y), fresh(problem, x, y)
    with problem.evaluating(0):
        ours, slope = _loss_and_slope(lambda: problem.call(given, a[0]), problem, list(given.values()), a[1])
    with _loaded(problem, theta) as parameters, problem.evaluating(0):
        wanted, truth = _loss_and_slope(lambda: call(problem.model, {}, b[0]), problem, parameters, b[1])
    allowed = tolerance(problem.theta.dtype)
    if not torch.allclose(ours, wanted, rtol=allowed, atol=allowed, equal_nan=True):
        raise InputError(
            f"model: with all parameters replaced its loss is {float(ours):.6g}, but {float(wanted):.6g} "
            "with the same ones loaded into the module: it keeps some of them, or what was computed from "
            "them, elsewhere; compute it from self.NAME in each forward pass"
        )
    if slope is not None and truth is not None:
        difference, scale = _difference_and_norm(slope, truth)
        if math.isfinite(scale) and difference > 10 * allowed * (scale + allowed):
            raise InputError(
                "model: with all parameters replaced its gradient is not that of the module with the same "
                "ones loaded (is activation checkpointing on?); switch off what computes outputs again later"
            )


def _loss_and_slope(
    outputs: Callable[[], Any], problem: Function, parameters: list[Tensor], y: Any
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """The loss and its gradient, parameter by parameter, or None where the loss has none."""
    with torch.enable_grad():
        loss = problem.criterion(outputs(), y)
        if not loss.requires_grad:
            return loss.detach(), None
        try:
            parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
        except RuntimeError:  # an operation without a derivative: contours do not need one
            return loss.detach(), None
    return loss.detach(), parts


def _difference_and_norm(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[float, float]:
    """‖a − b‖ and ‖b‖ in double precision, a part at a time: copies of all parts would take much memory."""
    squares = [0.0, 0.0]
    for mine, other in zip(a, b, strict=True):
        wanted = other.double()
        squares[0] += float((mine.double() - wanted).square().sum())
        squares[1] += float(wanted.square().sum())
    return math.sqrt(squares[0]), math.sqrt(squares[1])


@contextlib.contextmanager
def _loaded(problem: Function, theta: Tensor) -> Iterator[list[Tensor]]:
    """The parameters of the problem's module, equal to ``theta`` while the block runs."""
    named = dict(problem.model.named_parameters())
    parameters = [named[slot.name] for slot in problem.layout.slots]
    before = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p, value in zip(parameters, problem.layout.views(theta).values(), strict=True):
                p.copy_(value)
        yield [p.requires_grad_() for p in parameters]
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
