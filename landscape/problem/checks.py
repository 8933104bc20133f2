"""Checks that L(θ), as a problem computes it, is the loss that the user's own module and loss give.

Each check works on a few samples, and raises InputError in one line that names the cause and the remedy.
A module may merge its parameters in eval(), compute something from them there, or in its first pass: a fresh
copy of it, which gets θ before all that, tells.
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

from landscape.core.devices import double
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
# The share of the weights at which a module that keeps something shows it (our choice): at the weights
# themselves saturated layers hide it.
SHRUNK = 0.1
# The multiple of the center at which a module first computes what it may keep, of another loss (our choice).
ELSEWHERE = 3
# A short step: the share by which the loss rises along it, and its largest share of θ (our choice).
RISE, SHORT = 1e-3, 1e-2


# The rounding of fused kernels on GPUs, relative (our choice: below that of float32 problems, √eps).
FUSED = 1e-5


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways of computing one number count as equal: √eps."""
    return math.sqrt(torch.finfo(dtype).eps)


@torch.no_grad()
def loss_of(problem: MeanLoss, x: Any, y: Any, seed: int = 0, weights: Tensor | None = None) -> Tensor:
    """The loss of clones of some samples at ``weights``, or at the center."""
    at = problem.weights if weights is None else weights
    (inputs, targets) = fresh(problem, x, y)
    with problem.evaluating(seed):
        return problem.criterion(problem.outputs(at, inputs), targets).detach()


def equal(a: Tensor, b: Tensor, problem: MeanLoss, smallest: float = 0.0) -> bool:
    """Return whether two losses are the same but for rounding, of at least a share of ``smallest``."""
    allowed = max(smallest, *(tolerance(dtype) for dtype in (problem.weights.dtype, a.dtype)))
    return torch.allclose(a, b, rtol=allowed, atol=allowed, equal_nan=True)


def fresh(problem: MeanLoss, x: Any, y: Any) -> tuple[Any, Any]:
    """Clones of some samples for one pass."""
    x, y = clone((x, y))
    return problem.data.leaves(x, y)


def custom(model: nn.Module) -> list[str]:
    """Names of the user's modules that may keep in eval mode what they compute from parameters.

    They have a train() or eval() of their own; or, where none has, parameters or other tensors.
    """
    modules = [(name, module) for name, module in model.named_modules() if not of_torch(module)]
    names = [name for name, module in modules if own_mode(module)]
    return names or [name for name, module in modules if module._parameters or held(module)]


def may_keep(module: nn.Module) -> bool:
    """Return whether a module has a mode of its own, or holds tensors, perhaps since its last pass."""
    return not of_torch(module) and (own_mode(module) or bool(held(module)))


def of_torch(module: nn.Module) -> bool:
    """Return whether a module is PyTorch's, without hooks: those keep nothing of a pass or a mode."""
    torchs = type(module).__module__.split(".")[0] == "torch"
    return torchs and not (module._forward_hooks or module._forward_pre_hooks)


def held(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are tensors, or hold some, other than parameters and buffers."""
    items = [(key, value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers")]
    return {key: value for key, value in items if any(named_tensors([value]))}


def emptied(problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any]) -> nn.Module:
    """``original``, or a copy of it without the tensors that a pass makes anew where they are missing."""
    tensors = [(name, module) for name, module in original.named_modules() if not of_torch(module)]
    attributes = [(name, key, value) for name, module in tensors for key, value in held(module).items()]
    model = independent_copy(original) if attributes else original
    for name, key, value in attributes:
        trial = evaluated(independent_copy(model).to(problem.device, problem.dtype))
        tried = trial.get_submodule(name)
        empty: Callable[[], Any] = type(value) if isinstance(value, (dict, list)) else lambda: None
        setattr(tried, key, empty())
        with problem.evaluating(0):  # it fails without a constant
            attempt(call, trial, {}, fresh(problem, *problem.data.pick(*batch))[0])
        if key in held(tried):
            setattr(model.get_submodule(name), key, empty())
    return model


def truth_of(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str] = ()
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """The loss, and its gradient, of a copy of the user's module that got ``weights`` (P,) before its mode.

    Of PyTorch's own modules alone the problem's model is as good, and cheaper.
    """
    x, y = fresh(problem, x, y)
    plain = all(map(of_torch, problem.model.modules()))
    model = problem.model if plain else independent_copy(original).to(problem.device, problem.dtype)
    with placed(model, problem.layout, weights) as parameters, problem.evaluating(0):
        if not plain:
            evaluated(model, training)
        return _loss_and_gradient(lambda: call(model, {}, x), problem, list(parameters.values()), y)


def check_parameters(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str]
) -> None:
    """Raise InputError unless the loss at ``weights`` is that of a copy of ``original`` that holds them.

    Where the gradient is not, or PyTorch says so, the model computes outputs again in its backward pass, with
    the parameters that the module itself has: activation checkpointing (:func:`.recomputes`). ``training``:
    the modules of the problem's model that are in training mode; the loss must be that of eval mode.
    """
    tensors, (inputs, targets) = problem.layout.leaves(weights), fresh(problem, x, y)
    in_place = [] if all(map(of_torch, problem.model.modules())) else [_in_place(problem, tensors, x, y)]
    with problem.evaluating(0):
        pass_here = functools.partial(problem.call, tensors, inputs)
        ours, gradient = _loss_and_gradient(pass_here, problem, list(tensors.values()), targets)
    true_loss, truth = truth_of(problem, original, x, y, weights, training)
    if training:
        true_loss, _ = truth_of(problem, original, x, y, weights)
    smallest = 0.0 if problem.device.type == "cpu" else FUSED
    if in_place:
        in_place.append(loss_of(problem, x, y, weights=weights))  # which may keep something of another pass
    deviating = [loss for loss in (ours, *in_place) if not equal(loss, true_loss, problem, smallest)]
    follows = not deviating
    if follows and gradient is not None and truth is not None:
        # A part at a time: copies of all parts in double precision would take much memory.
        allowed = tolerance(problem.weights.dtype)
        apart = [float((double(a) - double(b)).norm()) for a, b in zip(gradient, truth, strict=True)]
        scale = math.hypot(*(float(double(part).norm()) for part in truth))
        if math.isfinite(scale) and math.hypot(*apart) > 10 * allowed * (scale + allowed):
            recomputes(problem.model, seen=True)
        follows = _flat(problem, original, (x, y), weights, gradient, training)
    if not follows:
        names = dict.fromkeys(type(original.get_submodule(name)).__name__ for name in custom(original))
        raise InputError(
            f"model: its loss {float([*deviating, ours][0]):.6g} in eval mode does not follow all of its "
            f"parameters ({float(true_loss):.6g} of a copy): {', '.join(names) or 'PyTorch'} merges, caches "
            "or detaches some, or uses an earlier pass; compute with self.NAME in each forward pass"
        )


@torch.no_grad()
def _in_place(problem: MeanLoss, parameters: dict[str, Tensor], x: Any, y: Any) -> Tensor:
    """The loss at ``parameters``, of tensors that held other numbers in a pass before.

    A module may keep what it computed by a parameter's identity, place in memory, or version.
    """
    tensors, values = problem.layout.leaves(ELSEWHERE * problem.weights), list[Tensor]()
    for _ in range(2):
        inputs, targets = fresh(problem, x, y)
        with problem.evaluating(0):
            values.append(problem.criterion(problem.call(tensors, inputs), targets).detach())
        for name, tensor in tensors.items():
            tensor.data.copy_(parameters[name])
    return values[1]


def _flat(
    problem: MeanLoss, original: nn.Module, xy: tuple[Any, Any], at: Tensor, parts: Any, training: Any
) -> bool:
    """Return whether the loss has the gradient ``parts``, of which nothing is detached.

    A copy in the other mode, of the same loss or where a part is zero, has one by which the loss rises more.
    """
    names, zero = () if training else custom(original), not all(bool(part.any()) for part in parts)
    other_mode = (
        attempt(truth_of, problem, original, *xy, at, names) if names or (training and zero) else None
    )
    if other_mode is None or other_mode[1] is None:
        return True
    pairs = [(double(a), double(b)) for a, b in zip(parts, other_mode[1], strict=True)]
    same = equal(other_mode[0], truth_of(problem, original, *xy, at, training)[0], problem)
    step = torch.cat([((b - a) * (same or not a.any())).flatten() for a, b in pairs])
    length, loss = float(step.norm()), float(other_mode[0].abs())
    sums = torch.cat([(a + b).flatten() for a, b in pairs])
    if not length > max(torch.finfo(at.dtype).tiny, 10 * tolerance(at.dtype) * float(sums.norm())):
        return True
    modules = [original.get_submodule(name) for name in custom(original)]
    functions = [value for module in modules for value in vars(module).values()]
    shared = any(getattr(f, "__closure__", None) or hasattr(f, "cache_info") for f in functions)
    if zero and (shared or any(named_tensors([dict(vars(type(module)))]) for module in modules)):
        return False  # copies share what these keep
    step, slope = step.to(at), float(sums @ step) / length / 2  # between those of both
    step *= min(RISE * loss / length, SHORT * float(at.norm())) / length
    ends = [float(truth_of(problem, original, *xy, end)[0]) for end in (at + step, at - step)]
    rounding = 100 * torch.finfo(at.dtype).eps * loss
    return not ends[0] - ends[1] > max(rounding, 2 * slope * float(step.norm()))


def _loss_and_gradient(
    outputs: Callable[[], Any], problem: MeanLoss, parameters: Sequence[Tensor], y: Any
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """The loss and its gradient, parameter by parameter, or None where the loss has none."""
    with torch.enable_grad():
        loss = problem.criterion(outputs(), y)
        parts = None
        if loss.requires_grad:
            try:
                parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
            except RuntimeError as error:  # without a derivative, which contours do not need
                if "heckpoint" in str(error):
                    recomputes(problem.model, seen=True)
    return loss.detach(), parts


def moved(problem: MeanLoss, seed: int = 0) -> Tensor:
    """θ moved at random by :data:`MOVE`: there samples have different losses, even of a model just made.

    What is zero (as LoRA's second matrix at first) is moved so far that its share of the loss shows.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = problem.weights.clone()
    for view in problem.layout.views(weights).values():
        if view.numel():
            mean = float(view.detach().abs().float().mean())
            size = mean + MOVE if mean else 1.0
            view += (MOVE * size * torch.randn(view.shape, generator=generator)).to(view)
    return weights


@torch.no_grad()
def ignores_first_label(problem: MeanLoss, x: Any, y: Any) -> bool | None:
    """Return whether the loss leaves out the first label of each sequence, as causal ones; None: unknown."""
    changed = losses.with_other_first_labels(problem.criterion, x, y)
    if changed is None:
        return None if problem.criterion is losses.output_loss else False
    check_fit(problem, x, y)
    first, second = loss_of(problem, x, y), attempt(loss_of, problem, *changed)
    return second is None or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def check_fit(problem: MeanLoss, x: Any, y: Any, labels: Any = None) -> tuple[Tensor, bool]:
    """Raise InputError, in one line, unless model, loss and some samples fit together.

    Returns the loss, and whether random numbers were drawn for it.

    Where they do with gradients recorded alone, as those that call ``torch.autograd.grad`` (physics-informed
    losses), ``problem.differentiates`` is set, and all passes record gradients from then on; with
    ``data.leaf_inputs``, those of the inputs, too. Random numbers of NumPy or Python set
    ``problem.draws_elsewhere``.

    ``labels``: where the loss takes classes, each of these must be a class of the model's outputs.
    """
    outputs, data, needed = None, problem.data, problem.data.leaf_inputs
    causes: list[Exception] = []
    for recorded in ((False, needed), (True, needed), (True, True)):
        problem.differentiates, data.leaf_inputs = recorded
        problem.draws_elsewhere = True  # seed all generators, until it is known which are used
        try:
            inputs, targets = data.leaves(x, y)
            with problem.evaluating(0):
                before = random_state(problem.device)
                outputs = problem.outputs(problem.weights, inputs)
                losses.check_labels(problem.criterion, outputs, labels)
                value: object = problem.criterion(outputs, targets)  # whatever the user's function gives
                number = isinstance(value, Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
                if number or (isinstance(value, Tensor) and not value.is_floating_point()):
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
        data.leaf_inputs = needed
        losses.refuse_broadcasting(problem.criterion, outputs, y)
        raise _no_fit(problem, causes, x, y) from causes[0]
    if not isinstance(value, Tensor) or value.dim() > 0:
        raise losses.several_numbers(value)
    return value.detach(), before != after


def _no_fit(problem: MeanLoss, causes: Sequence[Exception], x: Any, y: Any) -> InputError:
    """The refusal where errors are raised without gradients, with them, and with those in the inputs."""
    tensors = [*named_tensors(x, "inputs"), *named_tensors(y, "targets")]
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors)
    words, last = first_words(causes[0], 200), str(causes[-1])
    hint = ""
    if "does not require grad" in last or "not have been used in the graph" in last:
        hint = "; a loss that differentiates in the inputs finds them in its targets: give data as (x, x)"
    for form, inputs, targets in _other_forms(x, y):
        with contextlib.suppress(Exception), problem.evaluating(0):
            loss = problem.criterion(problem.outputs(problem.weights, inputs), targets)
            if isinstance(loss, (Tensor, Real)):
                hint = f"; {form}"
                break
    return InputError(f"model and data do not fit: {type(causes[0]).__name__}: {words} ({shapes}){hint}")


# Names of targets in dicts, which are tried first (our choice).
TARGETS = ("label", "target", "targets", "y", "class", "classes")


def _other_forms(x: Any, y: Any) -> Iterator[tuple[str, Any, Any]]:
    """Forms that data may have in place of (x, y), in words, with the inputs and targets."""
    if isinstance(x, (Mapping, tuple, list)):
        yield f"the model takes one {type(x).__name__}: give data as ((inputs,), targets)", (x,), y
    every = list(x)[::-1] if isinstance(x, Mapping) and isinstance(y, Mapping) else []
    for key in sorted(every, key=lambda key: key not in TARGETS):
        words, end = "a dict d without 'labels' has no targets: give", f"d[{key!r}])"
        rest = {k: v for k, v in x.items() if k != key}
        codes = {k: f"d[{k!r}]" for k in rest}
        if len(rest) == 1:
            yield f"{words} ({''.join(codes.values())}, {end}", *rest.values(), x[key]
        named = ", ".join(f"{k!r}: {code}" for k, code in codes.items())
        yield f"{words} ({{{named}}}, {end}", rest, x[key]
        yield f"{words} (({', '.join(codes.values())}), {end}", tuple(rest.values()), x[key]
        yield f"{words} ((d,), {end}", (x,), x[key]


def check_original(problem: MeanLoss, original: nn.Module, x: Any, y: Any) -> None:
    """Raise InputError if the loss at θ changes with the parameters of the user's module.

    They are changed for two passes, and set back.
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
# Draws of random numbers, one of which at least must change a loss that depends on them (our choice: a layer
# that is dropped as a whole one time in ten is missed once in 10³).
DRAWS = 64


def check_problem(
    problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any], away: Sequence[Tensor]
) -> None:
    """Raise InputError unless L(θ) is the loss that ``original`` and the user's loss give.

    A model or loss that writes to its arguments gets clones of them from now on.

    Args:
        original: the user's module, of which the problem has a copy.
        batch: the first samples, or the first batch.
        away: weights (P,) away from the center, see :func:`moved`; of several, more samples are taken, too.
    """
    source, refusal, few = emptied(problem, original, batch), None, batch
    for names in ((), custom(source)):
        if names or source is not original:
            model = independent_copy(source).to(problem.device, problem.dtype)
            problem.model = evaluated(model, names)
        try:
            few = _check_model(problem, source, batch, away, names)
            break
        except InputError as error:  # training mode may be right where eval mode merges or caches parameters
            refusal = refusal or error
            if names or not custom(source):
                raise refusal from refusal.__cause__
    if len(away) > 1 or not (problem.criterion is losses.output_loss or losses.is_mean(problem.criterion)):
        check_original(problem, original, *few)


def _check_model(
    problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any], away: Sequence[Tensor], training: Any
) -> tuple[Any, Any]:
    """Raise InputError unless passes of the problem's model are those of ``original``, at any θ.

    Returns the samples that were evaluated. ``training``: the modules of the problem's model that are in
    training mode.
    """
    data = problem.data
    x, y = data.pick(*batch, PROBES[len(away) > 1])
    # Clones, until it is known whether model and loss write to their arguments.
    copied, before = clone((x, y)), problem.weights.clone()
    labels = data.resident[1] if data.resident else None
    try:
        loss, draws_numbers = check_fit(problem, copied[0], copied[1], labels)
    except LandscapeError as error:  # the loss, or the model of a graph, may take no part of the data
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
    if draws_numbers and training:  # dropout may have no effect yet, as of what is multiplied by zero
        raise InputError("model: it draws random numbers in training mode; draw them in an nn.Dropout")
    if draws_numbers and not problem.draws:
        check_random(problem, x, y)
    check_recorded(problem, before, loss, check_leaves(problem, original, x, y), x, y)
    far = [SHRUNK * away[0]] if any(map(may_keep, problem.model.modules())) else []
    for weights in (*away, *far):
        check_parameters(problem, original, x, y, weights, training)
    return x, y


def _more(problem: MeanLoss, batch: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """More samples than ``x``: all for a model that does not take these, or else AT_ONCE at most."""
    resident = problem.data.resident
    if resident is None or problem.data.samples <= AT_ONCE or not takes(problem, x):
        return resident or batch
    return take(resident, slice(AT_ONCE))


def writes(before: Any, after: Any) -> bool:
    """Return whether any tensor of ``after`` has other numbers than its copy in ``before``."""
    pairs = zip(named_tensors(before), named_tensors(after), strict=True)
    return any(not torch.equal(*(strided(t).nan_to_num() for t in (a, b))) for (_, a), (_, b) in pairs)


def check_passes(problem: MeanLoss, before: Tensor, first: Tensor, x: Any, y: Any) -> None:
    """Raise InputError unless a pass leaves θ as it was, ``before``, and the next gives the loss ``first``.

    It may differ by a buffer that each pass updates.
    """
    if not torch.equal(problem.weights, before):
        raise InputError("model: its forward pass writes to its parameters (max_norm?); move that to steps")
    buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    second = loss_of(problem, x, y)
    if not equal(first, second, problem):
        after = dict(problem.model.named_buffers())
        changed = [name for name, b in buffers.items() if not torch.equal(strided(b), strided(after[name]))]
        cause = f"in its buffer '{changed[0]}'" if changed else "or has a generator of its own"
        raise InputError(
            f"model: two passes over the same samples differ, with losses {float(first):.6g} and "
            f"{float(second):.6g}: it keeps something of a pass {cause}; let it do so in training alone"
        )


def check_recorded(problem: MeanLoss, before: Tensor, loss: Tensor, recorded: Tensor, x: Any, y: Any) -> None:
    """Raise InputError unless the loss is the same where gradients are recorded.

    It differs for a model that asks for that, as PyTorch's own TransformerEncoder does with padding, or where
    any two passes may differ. On a GPU its kernel for passes without gradients is coarser than float64.
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
    """Raise InputError if the loss depends on the random numbers that are drawn for it.

    Eval mode stops dropout modules, but not ``F.dropout`` left on, or noise that a model or loss draws.
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
    """Raise InputError if the loss depends on anything that requires gradients and is not θ.

    Returns the loss, of a pass that records gradients.
    """
    parameters = problem.layout.leaves(problem.weights)
    parameter_ids = {id(leaf) for leaf in parameters.values()}

    def unknown_leaves() -> tuple[Tensor, list[list[Tensor]]]:
        """The loss; the leaves other than θ of the outputs' graph, and those of the loss's graph."""
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
    # A leaf that each pass creates anew, such as to differentiate by x, is allowed. It has another id in the
    # second pass.
    _, second = unknown_leaves()
    for before, after, of_loss in zip(first, second, (False, True), strict=True):
        again = {id(leaf) for leaf in after}
        lasting = [leaf for leaf in before if id(leaf) in again]
        if lasting:
            raise InputError(_unknown_leaf(lasting[0], problem, original, of_loss=of_loss))
    return loss


def _tensors(outputs: Any) -> list[Tensor]:
    """The tensors of ``outputs``, those of an object with attributes (NamedTuple, Hugging Face) included."""
    if hasattr(outputs, "__dict__") and not isinstance(outputs, (Tensor, dict, list, tuple)):
        outputs = vars(outputs)
    return [tensor for _, tensor in named_tensors(outputs)]


def _unknown_leaf(leaf: Tensor, problem: MeanLoss, original: nn.Module, *, of_loss: bool) -> str:
    """The message on a tensor that the outputs, or the loss, depend on although it is no part of θ."""
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
