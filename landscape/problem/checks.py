"""Checks that L(θ), as a problem computes it, is the loss of the user's own module and loss function.

Each check evaluates a few samples, and raises InputError in one line that names the cause and the remedy. A
module may merge its parameters in eval(), or store numbers computed from them there or in its first pass. The
checks therefore compare with a new copy of the module that receives θ before eval() and before any pass.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.core.devices import double, generator, normal
from landscape.core.errors import InputError, LandscapeError, first_words
from landscape.core.options import OneOf
from landscape.problem import losses
from landscape.problem.batches import (
    attempt,
    call,
    clone,
    leaves,
    named_tensors,
    random_state,
    recomputes,
    strided,
    take,
)
from landscape.problem.data import PROBE
from landscape.problem.layout import evaluated, independent_copy, own_mode, placed, set_back
from landscape.problem.mean_check import AT_ONCE, takes
from landscape.problem.mean_loss import MeanLoss

# How far the checks move θ, relative to the mean magnitude of each parameter (our choice).
MOVE = 0.1
# A multiple of the weights at which a stored number of a module changes the loss (our choice): at the weights
# themselves, saturated layers may hide it.
SHRUNK = 0.1
# A multiple of the center, with another loss, at which a module makes its first pass (our choice).
ELSEWHERE = 3
# A short step along a direction: the relative rise of the loss, and the largest length relative to ‖θ‖ (our
# choices).
RISE, SHORT = 1e-3, 1e-2


# The rounding of fused kernels on GPUs, relative (our choice: below that of float32 problems, √eps).
FUSED = 1e-5


def tolerance(dtype: torch.dtype) -> float:
    """Return √eps, the largest relative difference of two computations of one number that count as equal."""
    return math.sqrt(torch.finfo(dtype).eps)


@torch.no_grad()
def loss_of(problem: MeanLoss, x: Any, y: Any, seed: int = 0, weights: Tensor | None = None) -> Tensor:
    """Return the loss of clones of some samples at ``weights`` (P,), by default at the center."""
    at = problem.weights if weights is None else weights
    (inputs, targets) = fresh(problem, x, y)
    with problem.evaluating(seed):
        return problem.criterion(problem.outputs(at, inputs), targets).detach()


def equal(a: Tensor, b: Tensor, problem: MeanLoss, smallest: float = 0.0) -> bool:
    """Return whether two losses differ by rounding only, or relatively by at most ``smallest``."""
    allowed = max(smallest, *(tolerance(dtype) for dtype in (problem.weights.dtype, a.dtype)))
    return torch.allclose(a, b, rtol=allowed, atol=allowed, equal_nan=True)


def fresh(problem: MeanLoss, x: Any, y: Any) -> tuple[Any, Any]:
    """Return clones of some samples for one pass."""
    x, y = clone((x, y))
    return problem.data.leaves(x, y)


def custom(model: nn.Module, storing: bool = False) -> list[str]:
    """Return the names of the user's modules that may store numbers computed from parameters in eval mode.

    They are the modules with a train() or eval() of their own; if there are none, those with parameters or
    other tensors; if there are none, all of the user's, or none with ``storing``.
    """
    modules = {name: module for name, module in model.named_modules() if not of_torch(module)}
    names = [name for name, module in modules.items() if own_mode(module)]
    names = names or [name for name, module in modules.items() if module._parameters or held(module)]
    return names if names or storing else list(modules)


def of_torch(module: nn.Module) -> bool:
    """Return whether a module is PyTorch's own, without hooks, so that it stores nothing of a pass."""
    is_of_torch = type(module).__module__.split(".")[0] == "torch"
    return is_of_torch and not (module._forward_hooks or module._forward_pre_hooks)


def held(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that contain tensors, other than its parameters and buffers."""
    items = [(key, value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers")]
    return {key: value for key, value in items if any(named_tensors([value]))}


def emptied(problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any]) -> nn.Module:
    """Return ``original``, or a copy without the stored tensors that a pass computes again."""
    modules = [(name, module) for name, module in original.named_modules() if not of_torch(module)]
    attributes = [(name, key, value) for name, module in modules for key, value in held(module).items()]
    model = independent_copy(original) if attributes else original
    for name, key, value in attributes:
        trial = evaluated(independent_copy(model).to(problem.device, problem.dtype))
        module = trial.get_submodule(name)
        empty: Callable[[], Any] = type(value) if isinstance(value, (dict, list)) else lambda: None
        setattr(module, key, empty())
        with problem.evaluating(0):  # the pass fails if the tensor is a constant
            attempt(call, trial, {}, fresh(problem, *problem.data.pick(*batch))[0])
        if key in held(module):
            setattr(model.get_submodule(name), key, empty())
    return model


def truth_of(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str] = ()
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Return the loss and gradient of a copy of the user's module that got ``weights`` (P,) before eval().

    A model of PyTorch's own modules alone needs no copy. ``training``: modules to put in training mode.
    """
    x, y = fresh(problem, x, y)
    needs_copy = not all(map(of_torch, problem.model.modules()))
    model = independent_copy(original).to(problem.device, problem.dtype) if needs_copy else problem.model
    with placed(model, problem.layout, weights) as parameters, problem.evaluating(0):
        if needs_copy:
            evaluated(model, training)
        return _loss_and_gradient(lambda: call(model, {}, x), problem, list(parameters.values()), y)


def check_parameters(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str]
) -> None:
    """Raise InputError unless the loss at ``weights`` is that of a copy of ``original`` with these weights.

    If only the gradients differ, or PyTorch reports it, the model computes outputs again in its backward
    pass, with the module's own parameters: activation checkpointing, which :func:`.recomputes` records.

    Args:
        problem: the problem, whose model is checked.
        original: the user's module.
        x, y: some samples.
        weights: (P,).
        training: the modules of the problem's model in training mode; the loss must be that of eval mode.
    """
    tensors, (inputs, targets) = problem.layout.leaves(weights), fresh(problem, x, y)
    may_store = not all(map(of_torch, problem.model.modules()))
    losses = [_in_place(problem, tensors, x, y)] if may_store else []
    with problem.evaluating(0):
        outputs = functools.partial(problem.call, tensors, inputs)
        loss, gradient = _loss_and_gradient(outputs, problem, list(tensors.values()), targets)
    true_loss, true_gradient = truth_of(problem, original, x, y, weights, training)
    if training:
        true_loss, _ = truth_of(problem, original, x, y, weights)
    smallest = 0.0 if problem.device.type == "cpu" else FUSED
    if may_store:
        losses.append(loss_of(problem, x, y, weights=weights))  # it may use stored numbers of a former pass
    wrong_losses = [value for value in (loss, *losses) if not equal(value, true_loss, problem, smallest)]
    is_right = not wrong_losses
    if is_right and gradient is not None and true_gradient is not None:
        # One parameter at a time: copies of whole gradients in double precision would need much memory.
        allowed = tolerance(problem.weights.dtype)
        errors = [float((double(a) - double(b)).norm()) for a, b in zip(gradient, true_gradient, strict=True)]
        norm = math.hypot(*(float(double(part).norm()) for part in true_gradient))
        if math.isfinite(norm) and math.hypot(*errors) > 10 * allowed * (norm + allowed):
            recomputes(problem.model, seen=True)
        of_user = [name for name, module in original.named_modules() if not of_torch(module)]
        modes = dict.fromkeys((() if training else tuple(custom(original)), tuple(of_user)))
        if recomputes(problem.model):  # the gradient says nothing of modules without parameters of their own
            modes = dict.fromkeys([() if training else tuple(custom(original, storing=True))])
        arguments = problem, original, (x, y), weights, gradient, training
        is_right = all(_is_complete(*arguments, names) for names in modes)
    if not is_right:
        names = dict.fromkeys(type(original.get_submodule(name)).__name__ for name in custom(original))
        raise InputError(
            f"model: its loss {float([*wrong_losses, loss][0]):.6g} in eval mode does not follow all of its "
            f"parameters ({float(true_loss):.6g} of a copy): {', '.join(names) or 'PyTorch'} merges, caches "
            "or detaches some, or uses an earlier pass; compute with self.NAME in each forward pass"
        )


@torch.no_grad()
def _in_place(problem: MeanLoss, parameters: dict[str, Tensor], x: Any, y: Any) -> Tensor:
    """Return the loss at ``parameters``, written into tensors that had other numbers in a pass before.

    A module may store numbers by a parameter's identity, address or version, and then use the old ones.
    """
    tensors, losses = problem.layout.leaves(ELSEWHERE * problem.weights), list[Tensor]()
    for _ in range(2):
        inputs, targets = fresh(problem, x, y)
        with problem.evaluating(0):
            losses.append(problem.criterion(problem.call(tensors, inputs), targets).detach())
        for name, tensor in tensors.items():
            tensor.data.copy_(parameters[name])
    return losses[1]


def _is_complete(
    problem: MeanLoss, original: nn.Module, xy: tuple[Any, Any], at: Tensor, gradient: Any, training: Any,
    names: Sequence[str],
) -> bool:  # fmt: skip
    """Return whether the gradient misses no part of the loss, such as one that a module detaches.

    It is compared with the gradient of a copy with the modules ``names`` in the other mode. The gradients
    may differ by right, except where both losses are equal or a part of the first gradient is zero. There a
    short step along the difference decides: the first gradient misses a part if the loss changes more than
    it predicts.
    """
    has_zero = not all(bool(part.any()) for part in gradient)
    if not names and not (training and has_zero):
        return True
    other_loss, other_gradient = attempt(truth_of, problem, original, *xy, at, names) or (None, None)
    if other_loss is None or other_gradient is None:
        return True
    pairs = [(double(a), double(b)) for a, b in zip(gradient, other_gradient, strict=True)]
    has_same_loss = equal(other_loss, truth_of(problem, original, *xy, at, training)[0], problem)
    differences = [b - a if has_same_loss or not a.any() else 0.0 * (b - a) for a, b in pairs]
    step = torch.cat([difference.flatten() for difference in differences])
    length, loss = float(step.norm()), float(other_loss.abs())
    sums = torch.cat([(a + b).flatten() for a, b in pairs])
    if not length > max(torch.finfo(at.dtype).tiny, 10 * tolerance(at.dtype) * float(sums.norm())):
        return True
    modules = [original.get_submodule(name) for name in custom(original)]
    values = [value for module in modules for value in vars(module).values()]
    shares = any(getattr(value, "__closure__", None) or hasattr(value, "cache_info") for value in values)
    shares |= any(True for module in modules for _ in named_tensors(dict(vars(type(module)))))
    if has_zero and shares:
        return False  # copies of a module share closures, caches and tensors of its class
    step, slope = step.to(at), float(sums @ step) / length / 2  # the mean of both slopes along the step
    step *= min(RISE * loss / length, SHORT * float(at.norm())) / length
    ends = [float(truth_of(problem, original, *xy, end)[0]) for end in (at + step, at - step)]
    rounding = 100 * torch.finfo(at.dtype).eps * loss
    return not ends[0] - ends[1] > max(rounding, 2 * slope * float(step.norm()))


def _loss_and_gradient(
    outputs: Callable[[], Any], problem: MeanLoss, parameters: Sequence[Tensor], y: Any
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Return the loss of ``outputs()`` and its gradient by parameter; None in place of a missing gradient."""
    with torch.enable_grad():
        loss = problem.criterion(outputs(), y)
        gradient = None
        if loss.requires_grad:
            try:
                gradient = torch.autograd.grad(loss, parameters, materialize_grads=True)
            except RuntimeError as error:  # an operation without a derivative; contours need none
                if "heckpoint" in str(error):
                    recomputes(problem.model, seen=True)
    return loss.detach(), gradient


def moved(problem: MeanLoss, seed: int = 0) -> Tensor:
    """Return θ moved at random by :data:`MOVE`, where samples have different losses, also of a new model.

    Parameters that are zero (such as LoRA's second matrix at first) are moved far enough to change the loss.
    """
    weights = problem.weights.clone()
    draws = generator(seed, weights.device, len(weights))
    views = [view for view in problem.layout.views(weights).values() if view.numel()]
    means = torch.stack([view.detach().abs().float().mean() for view in views]).tolist()  # read at once
    for view, mean in zip(views, means, strict=True):
        size = mean + MOVE if mean else 1.0  # the standard deviation, in units of MOVE
        view += (MOVE * size * normal(view.shape, draws, None)).to(view)
    return weights


@torch.no_grad()
def ignores_first_label(problem: MeanLoss, x: Any, y: Any) -> bool | None:
    """Return whether the loss ignores the first label of each sequence, as causal ones do; None: unknown."""
    changed = losses.with_other_first_labels(problem.criterion, x, y)
    if changed is None:
        return None if problem.criterion is losses.output_loss else False
    check_fit(problem, x, y)
    first, second = loss_of(problem, x, y), attempt(loss_of, problem, *changed)
    return second is None or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def check_fit(problem: MeanLoss, x: Any, y: Any, labels: Any = None) -> tuple[Tensor, bool]:
    """Raise InputError, in one line, unless model, loss and some samples fit together.

    It tries a pass without gradients, then with gradients of the parameters, then also with gradients of the
    inputs: losses that call ``torch.autograd.grad`` (physics-informed losses) need them. The first pass
    without an error sets ``problem.differentiates`` and ``data.leaf_inputs`` for all passes. Random numbers
    of NumPy or Python set ``problem.draws_elsewhere``.

    Args:
        problem: model, loss and data.
        x, y: the samples.
        labels: all labels of the data; for a loss of classes, each must be a class of the model's outputs.

    Returns:
        (the loss, whether the pass drew random numbers).
    """
    outputs, data, require_inputs = None, problem.data, problem.data.leaf_inputs
    causes: list[Exception] = []
    for settings in ((False, require_inputs), (True, require_inputs), (True, True)):
        problem.differentiates, data.leaf_inputs = settings
        problem.draws_elsewhere = True  # seed all generators; the states below show which are used
        try:
            inputs, targets = data.leaves(x, y)
            with problem.evaluating(0):
                before = random_state(problem.device)
                outputs = problem.outputs(problem.weights, inputs)
                losses.check_labels(problem.criterion, outputs, labels)
                value: object = problem.criterion(outputs, targets)  # the user's function returns any object
                is_number = isinstance(value, Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
                if is_number or (isinstance(value, Tensor) and not value.is_floating_point()):
                    problem.criterion = losses.Metric(problem.criterion)
                    value = problem.criterion(outputs, targets)
                after = random_state(problem.device)
            problem.draws_elsewhere = before[1] != after[1]
            break
        except LandscapeError:
            raise
        except Exception as error:  # the user's model and loss raise any kind of error
            causes.append(error)
    else:
        problem.differentiates = problem.draws_elsewhere = False
        data.leaf_inputs = require_inputs
        losses.refuse_broadcasting(problem.criterion, outputs, y)
        raise _no_fit(problem, causes, x, y) from causes[0]
    if not isinstance(value, Tensor) or value.dim() > 0:
        raise losses.several_numbers(value)
    return value.detach(), before != after


def _no_fit(problem: MeanLoss, causes: Sequence[Exception], x: Any, y: Any) -> InputError:
    """Return the error for model and data that do not fit; ``causes`` are the errors of the three passes.

    Its message ends with another form of the data that fits, if there is one.
    """
    tensors = [*named_tensors(x, "inputs"), *named_tensors(y, "targets")]
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors)
    words, last_error = first_words(causes[0], 200), str(causes[-1])
    hint = ""
    if "does not require grad" in last_error or "not have been used in the graph" in last_error:
        hint = "; a loss that differentiates in the inputs finds them in its targets: give data as (x, x)"
    for form, inputs, targets in _other_forms(x, y):
        with contextlib.suppress(Exception), problem.evaluating(0):
            loss = problem.criterion(problem.outputs(problem.weights, inputs), targets)
            if isinstance(loss, (Tensor, Real)):
                hint = f"; {form}"
                break
    return InputError(f"model and data do not fit: {type(causes[0]).__name__}: {words} ({shapes}){hint}")


# Keys of a dict that probably hold its targets, which are tried first (our choice).
TARGETS = ("label", "target", "targets", "y", "class", "classes")


def _other_forms(x: Any, y: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield other forms of the data (x, y): a description in words, the inputs and the targets."""
    if isinstance(x, (Mapping, tuple, list)):
        yield f"the model takes one {type(x).__name__}: give data as ((inputs,), targets)", (x,), y
    keys = list(x)[::-1] if isinstance(x, Mapping) and isinstance(y, Mapping) else []
    for target_key in sorted(keys, key=lambda key: key not in TARGETS):
        words, end = "a dict d without 'labels' has no targets: give", f"d[{target_key!r}])"
        inputs, targets = {key: value for key, value in x.items() if key != target_key}, x[target_key]
        codes = [f"d[{key!r}]" for key in inputs]
        if len(inputs) == 1:
            yield f"{words} ({codes[0]}, {end}", *inputs.values(), targets
        items = ", ".join(f"{key!r}: d[{key!r}]" for key in inputs)
        yield f"{words} ({{{items}}}, {end}", inputs, targets
        yield f"{words} (({', '.join(codes)}), {end}", tuple(inputs.values()), targets
        yield f"{words} ((d,), {end}", (x,), targets


def check_original(problem: MeanLoss, original: nn.Module, x: Any, y: Any) -> None:
    """Raise InputError if the loss at θ changes with the user's module's own parameters.

    They are changed for one pass, and then restored.
    """
    before, parameters = loss_of(problem, x, y), list(original.parameters())
    with torch.no_grad(), set_back(parameters):
        for p in parameters:
            p.mul_(1 + MOVE).add_(MOVE)
        after = loss_of(problem, x, y)
    if not torch.allclose(before, after, rtol=tolerance(problem.weights.dtype), atol=0, equal_nan=True):
        raise InputError("loss: it uses the parameters of the given module; give a regularizer as penalty=")


CHECKS = ("full", "quick", "off")
Check = Annotated[str, OneOf(CHECKS)]
PROBES = (PROBE, 256)  # samples of check="quick" and "full" (our choice)
# Draws of random numbers, of which at least one must change a random loss (our choice: 64 draws miss a layer
# that is dropped one time in ten once in 10³ models).
DRAWS = 64


def check_problem(
    problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any], away: Sequence[Tensor]
) -> None:
    """Raise InputError unless L(θ) is the loss of ``original`` with the user's loss function.

    A model or loss that writes to its arguments is changed to receive clones of them.

    Args:
        problem: the problem, whose model may be replaced by one with some modules in training mode.
        original: the user's module, of which the problem has a copy.
        batch: the first samples, or the first batch.
        away: weights (P,) away from the center, see :func:`moved`; if there are several, the checks also use
            more samples.
    """
    source, first_error, few = emptied(problem, original, batch), None, batch
    for training in ((), custom(source)):
        if training or source is not original:
            model = independent_copy(source).to(problem.device, problem.dtype)
            problem.model = evaluated(model, training)
        try:
            few = _check_model(problem, source, batch, away, training)
            break
        except InputError as error:  # training mode may be right if eval mode merges or caches parameters
            first_error = first_error or error
            if training or not custom(source):
                raise first_error from first_error.__cause__
    if len(away) > 1 or not (problem.criterion is losses.output_loss or losses.is_mean(problem.criterion)):
        check_original(problem, original, *few)


def _check_model(
    problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any], away: Sequence[Tensor], training: Any
) -> tuple[Any, Any]:
    """Raise InputError unless the problem's model computes what ``original`` does, at several θ.

    Returns the samples that were evaluated. ``training``: the modules of its model in training mode.
    """
    data = problem.data
    x, y = data.pick(*batch, PROBES[1] if len(away) > 1 else PROBES[0])
    # The first pass gets clones, which show whether model and loss write to their arguments.
    copied, before = clone((x, y)), problem.weights.clone()
    labels = data.resident[1] if data.resident else None
    try:
        loss, draws_numbers = check_fit(problem, copied[0], copied[1], labels)
    except LandscapeError as error:  # the loss, or the model of a graph, may need all samples
        x, y = _more(problem, batch, x)
        copied = clone((x, y))
        try:
            loss, draws_numbers = check_fit(problem, copied[0], copied[1], labels)
        except LandscapeError:
            raise error from error.__cause__
    if writes(x, copied[0]):
        problem.model.register_forward_pre_hook(
            lambda _, args, kwargs: (clone(args), clone(kwargs)), with_kwargs=True
        )
    if writes(y, copied[1]):
        problem.criterion = losses.ClonedTargets(problem.criterion)
    check_passes(problem, before, loss, x, y)
    if draws_numbers and training:  # dropout may have no effect at first, as before a zero matrix
        raise InputError("model: it draws random numbers in training mode; draw them in an nn.Dropout")
    if draws_numbers and not problem.draws:
        check_random(problem, x, y)
    check_recorded(problem, before, loss, check_leaves(problem, original, x, y), x, y)
    users_modules = [module for module in problem.model.modules() if not of_torch(module)]
    if any(own_mode(module) or held(module) for module in users_modules):  # it may store numbers of a pass
        away = [*away, SHRUNK * away[0]]
    for weights in away:
        check_parameters(problem, original, x, y, weights, training)
    return x, y


def _more(problem: MeanLoss, batch: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """Return more samples than ``x``: all, or at most AT_ONCE for a model that accepts parts of the data."""
    resident = problem.data.resident
    if resident is None or problem.data.samples <= AT_ONCE or not takes(problem, x):
        return resident or batch
    return take(resident, slice(AT_ONCE))


def writes(before: Any, after: Any) -> bool:
    """Return whether any tensor of ``after`` has other numbers than its original in ``before``."""
    pairs = zip(named_tensors(before), named_tensors(after), strict=True)
    return not all(torch.equal(strided(a).nan_to_num(), strided(b).nan_to_num()) for (_, a), (_, b) in pairs)


def check_passes(problem: MeanLoss, before: Tensor, first: Tensor, x: Any, y: Any) -> None:
    """Raise InputError unless θ is unchanged from ``before``, and another pass has the loss ``first``.

    The message names the buffer that a pass changes, if there is one.
    """
    if not torch.equal(problem.weights, before):
        problem.weights.copy_(before)  # for a trial in another mode
        raise InputError("model: its forward pass writes to its parameters (max_norm?); move that to steps")
    buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    second = loss_of(problem, x, y)
    if not equal(first, second, problem):
        after = dict(problem.model.named_buffers())
        differing = [key for key, b in buffers.items() if not torch.equal(strided(b), strided(after[key]))]
        cause = f"in its buffer '{differing[0]}'" if differing else "or has a generator of its own"
        raise InputError(
            f"model: two passes over the same samples differ, with losses {float(first):.6g} and "
            f"{float(second):.6g}: it keeps something of a pass {cause}; let it do so in training alone"
        )


def check_recorded(problem: MeanLoss, before: Tensor, loss: Tensor, recorded: Tensor, x: Any, y: Any) -> None:
    """Raise InputError unless the loss is the same with gradients (``recorded``) and without (``loss``).

    It differs if a model depends on torch.is_grad_enabled(), like PyTorch's TransformerEncoder with padding,
    or if any two passes differ. On a GPU, fused kernels for passes without gradients round more coarsely.
    """
    smallest = 0.0 if problem.device.type == "cpu" else FUSED
    if equal(loss, recorded, problem, smallest):
        return
    for _ in range(DRAWS):
        check_passes(problem, before, loss, x, y)
    raise InputError(
        f"model: its loss is {float(loss):.6g}, but {float(recorded):.6g} where gradients are recorded; make "
        "it compute the same either way (TransformerEncoder with padding: enable_nested_tensor=False)"
    )


def check_random(problem: MeanLoss, x: Any, y: Any) -> None:
    """Raise InputError if the loss depends on the random numbers that it draws.

    Eval mode stops dropout modules, but neither ``F.dropout`` nor noise that a model or loss draws.
    """
    first = loss_of(problem, x, y)
    for seed in range(1, DRAWS + 1):
        again = loss_of(problem, x, y, seed)
        if not torch.allclose(first, again, rtol=0, atol=0, equal_nan=True):
            raise InputError(
                f"model or loss: random even in eval mode: losses {float(first):.6g} and {float(again):.6g}; "
                "randomness='seed' holds the numbers fixed, randomness=8 takes the mean of 8 draws",
                remedy='landscape.Problem(model, loss, data, randomness="seed")',
            )


def check_leaves(problem: MeanLoss, original: nn.Module, x: Any, y: Any) -> Tensor:
    """Raise InputError if the loss depends on a tensor that requires gradients and is no part of θ.

    Returns the loss of a pass that records gradients.
    """
    parameters = problem.layout.leaves(problem.weights)
    parameter_ids = {id(leaf) for leaf in parameters.values()}

    def unknown_leaves() -> tuple[Tensor, list[list[Tensor]]]:
        """Return the loss and [leaves in the outputs' graph, leaves in the loss's graph], both without θ."""
        inputs, targets = fresh(problem, x, y)
        with torch.enable_grad(), problem.evaluating(0):
            outputs = problem.call(parameters, inputs)
            loss = problem.criterion(outputs, targets)
        of_outputs = [leaf for leaf in leaves(_tensors(outputs)) if id(leaf) not in parameter_ids]
        of_loss = [leaf for leaf in leaves(loss) if id(leaf) not in parameter_ids]
        return loss.detach(), [of_outputs, of_loss]

    loss, first = unknown_leaves()
    if not any(first):
        return loss
    # A leaf that each pass creates anew, such as one to differentiate by x, is allowed. It has another id in
    # the second pass.
    _, second = unknown_leaves()
    for leaves_before, leaves_after, of_loss in zip(first, second, (False, True), strict=True):
        ids_after = {id(leaf) for leaf in leaves_after}
        lasting_leaves = [leaf for leaf in leaves_before if id(leaf) in ids_after]
        if lasting_leaves:
            raise InputError(_unknown_leaf(lasting_leaves[0], problem, original, of_loss=of_loss))
    return loss


def _tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of ``outputs``, also of an object with attributes (NamedTuple, Hugging Face)."""
    if hasattr(outputs, "__dict__") and not isinstance(outputs, (Tensor, dict, list, tuple)):
        outputs = vars(outputs)
    return [tensor for _, tensor in named_tensors(outputs)]


def _unknown_leaf(leaf: Tensor, problem: MeanLoss, original: nn.Module, *, of_loss: bool) -> str:
    """Return the message for a tensor outside of θ that the outputs (or, ``of_loss``, the loss) depend on."""
    names = {id(p): name for module in (problem.model, original) for name, p in module.named_parameters()}
    name = names.get(id(leaf))
    shape = tuple(leaf.shape)
    if of_loss and name:
        return (
            f"loss: it uses the model's parameter '{name}' itself, which does not follow the weights; give a "
            "regularizer as penalty= or weight_decay=, and let a module around the model call it in forward"
        )
    if of_loss:
        return f"loss: it depends on a tensor {shape} that requires gradients; it must be frozen"
    if name and name not in problem.layout.views(problem.weights):
        return f"model: its first forward pass made parameter '{name}'; run one batch through it before"
    if name:
        return (
            f"model: its forward pass takes parameter '{name}' from a list, a dict or a function, so that it "
            "does not follow the weights; use self.NAME, nn.ParameterList or nn.ParameterDict"
        )
    return f"model: it depends on a tensor {shape} that requires gradients; register it as nn.Parameter"
