"""Checks that a model in eval mode has the loss of its module at any θ, whatever eval() or a pass keeps.

A module may merge its parameters in eval(), compute something from them there, or in its first pass. A fresh
copy of it, which gets θ before all that, tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from landscape.core.devices import double
from landscape.core.errors import InputError
from landscape.problem.batches import attempt, call, clone, named_tensors, recomputes
from landscape.problem.layout import evaluated, independent_copy, own_mode, placed
from landscape.problem.mean_loss import MeanLoss

# How far the checks move θ, relative to the mean magnitude of each parameter (ours).
MOVE = 0.1
# Where layers are saturated, what is kept does not show: it does with so small a share of the weights (ours).
SHRUNK = 0.1
# The multiple of the center at which a module first computes what it may keep, of another loss (ours).
ELSEWHERE = 3
# A short step: by which share the loss rises along it, and its largest share of θ (ours).
RISE, SHORT = 1e-3, 1e-2


# The rounding of fused kernels on GPUs, relative (ours; below that of float32 problems, √eps).
FUSED = 1e-5


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways of computing one number count as equal: √eps."""
    return math.sqrt(torch.finfo(dtype).eps)


@torch.no_grad()
def loss_of(problem: MeanLoss, x: Any, y: Any, seed: int = 0, weights: Tensor | None = None) -> Tensor:
    """The loss of clones of some samples at ``weights``, or at the center."""
    at, (inputs, targets) = problem.weights if weights is None else weights, fresh(problem, x, y)
    with problem.evaluating(seed):
        return problem.criterion(problem.outputs(at, inputs), targets).detach()


def equal(a: Tensor, b: Tensor, problem: MeanLoss, least: float = 0.0) -> bool:
    """Test whether two losses are the same but for rounding, of at least a share of ``least``."""
    allowed = max(least, *(tolerance(dtype) for dtype in (problem.weights.dtype, a.dtype)))
    return torch.allclose(a, b, rtol=allowed, atol=allowed, equal_nan=True)


def fresh(problem: MeanLoss, x: Any, y: Any) -> tuple[Any, Any]:
    """Clones of some samples for one pass."""
    x, y = clone((x, y))
    return problem.data.leaves(x, y)


def custom(model: nn.Module) -> list[str]:
    """Names of the user's modules that may keep in eval mode what they compute from parameters.

    They have a train() or eval() of their own; or, where none has, parameters or other tensors.
    """
    own = [(name, module) for name, module in model.named_modules() if not of_torch(module)]
    names = [name for name, module in own if own_mode(module)]
    return names or [name for name, module in own if module._parameters or held(module)]


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
    places = [(name, key, value) for name, module in tensors for key, value in held(module).items()]
    model = independent_copy(original) if places else original
    for name, key, value in places:
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
    given, (inputs, targets) = problem.layout.leaves(weights), fresh(problem, x, y)
    losses = [] if all(map(of_torch, problem.model.modules())) else [_in_place(problem, given, x, y)]
    with problem.evaluating(0):
        ours, gradient = _loss_and_gradient(
            lambda: problem.call(given, inputs), problem, list(given.values()), targets
        )
    wanted, truth = truth_of(problem, original, x, y, weights, training)
    if training:
        wanted, _ = truth_of(problem, original, x, y, weights)
    least = 0.0 if problem.device.type == "cpu" else FUSED
    if losses:
        losses.append(loss_of(problem, x, y, weights=weights))  # which may keep something of another pass
    other = [loss for loss in (ours, *losses) if not equal(loss, wanted, problem, least)]
    follows = not other
    if follows and gradient is not None and truth is not None:
        # A part at a time: copies of all parts in double precision would take much memory.
        allowed = tolerance(problem.weights.dtype)
        apart = [float((double(a) - double(b)).norm()) for a, b in zip(gradient, truth, strict=True)]
        scale = math.hypot(*(float(double(part).norm()) for part in truth))
        if math.isfinite(scale) and math.hypot(*apart) > 10 * allowed * (scale + allowed):
            recomputes(problem.model, found=True)
        follows = _flat(problem, original, (x, y), weights, gradient, training)
    if not follows:
        names = dict.fromkeys(type(original.get_submodule(name)).__name__ for name in custom(original))
        raise InputError(
            "model: in eval mode its loss does not follow all of its parameters: it is "
            f"{float([*other, ours][0]):.6g}, and {float(wanted):.6g} of a copy that holds them; a module "
            f"({', '.join(names) or 'PyTorch'}) merges, caches or detaches some, or keeps what an earlier "
            "pass computed; compute with self.NAME in each forward pass"
        )


@torch.no_grad()
def _in_place(problem: MeanLoss, parameters: dict[str, Tensor], x: Any, y: Any) -> Tensor:
    """The loss at ``parameters``, of tensors that held other numbers in a pass before.

    A module may keep what it computed by a parameter's identity, place in memory, or version.
    """
    given, losses = problem.layout.leaves(ELSEWHERE * problem.weights), list[Tensor]()
    for _ in range(2):
        inputs, targets = fresh(problem, x, y)
        with problem.evaluating(0):
            losses.append(problem.criterion(problem.call(given, inputs), targets).detach())
        for name, tensor in given.items():
            tensor.data.copy_(parameters[name])
    return losses[1]


def _flat(
    problem: MeanLoss, original: nn.Module, xy: tuple[Any, Any], at: Tensor, parts: Any, training: Any
) -> bool:
    """Return whether the loss has the gradient ``parts``, of which nothing is detached.

    A copy in the other mode, of the same loss or where a part is zero, has one by which the loss rises more.
    """
    names, zero = () if training else custom(original), not all(bool(part.any()) for part in parts)
    other = attempt(truth_of, problem, original, *xy, at, names) if names or (training and zero) else None
    if other is None or other[1] is None:
        return True
    pairs = [(double(a), double(b)) for a, b in zip(parts, other[1], strict=True)]
    same = equal(other[0], truth_of(problem, original, *xy, at, training)[0], problem)
    step = torch.cat([((b - a) * (same or not a.any())).flatten() for a, b in pairs])
    length, loss = float(step.norm()), float(other[0].abs())
    both = torch.cat([(a + b).flatten() for a, b in pairs])
    if not length > max(torch.finfo(at.dtype).tiny, 10 * tolerance(at.dtype) * float(both.norm())):
        return True
    own = [original.get_submodule(name) for name in custom(original)]
    functions = [value for module in own for value in vars(module).values()]
    shared = any(getattr(f, "__closure__", None) or hasattr(f, "cache_info") for f in functions)
    if zero and (shared or any(named_tensors([dict(vars(type(module)))]) for module in own)):
        return False  # copies share what these keep
    step, slope = step.to(at), float(both @ step) / length / 2  # between those of both
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
                    recomputes(problem.model, found=True)
    return loss.detach(), parts
