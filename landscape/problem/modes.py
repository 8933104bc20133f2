"""Checks that a model in eval mode has the loss of its module at any θ, whatever eval() or a pass keeps.

A module may merge its parameters in eval(), compute something from them there, or in its first pass.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from landscape.core.devices import double
from landscape.core.errors import InputError
from landscape.problem.batches import call, clone, named_tensors, recomputes
from landscape.problem.layout import evaluated, independent_copy, own_mode, placed
from landscape.problem.mean_check import attempt
from landscape.problem.mean_loss import MeanLoss

# How far the checks move θ, relative to the mean magnitude of each parameter (ours).
MOVE = 0.1
# A short step along which a gradient says how much the loss rises, relative to the other and to θ (ours).
SHORT = 1e-2


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


def parameters_of(problem: MeanLoss) -> Tensor:
    """The parameters (P,) that the problem's model has."""
    named = dict(problem.model.named_parameters())
    return problem.layout.flatten({slot.name: named[slot.name].detach() for slot in problem.layout.slots})


def custom(model: nn.Module) -> Iterator[list[str]]:
    """Names of modules that may keep in eval mode what they compute from parameters: all, then the innermost.

    They have a train() or eval() of their own, or are the user's and hold parameters or other tensors.
    """
    own = [(name, m) for name, m in model.named_modules() if not of_torch(m)]
    names = [name for name, m in own if own_mode(m) or m._parameters or held(m)]
    inner = [a for a in names if not any(b != a and b.startswith(f"{a}." if a else "") for b in names)]
    yield from [names, inner][: len({len(names), len(inner)} - {0})]


def of_torch(module: nn.Module) -> bool:
    """Return whether a module is PyTorch's, without hooks: those keep nothing of a pass or a mode."""
    torchs = type(module).__module__.split(".")[0] == "torch"
    return torchs and not (module._forward_hooks or module._forward_pre_hooks)


def held(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are tensors, or hold some, other than parameters and buffers."""
    items = [(key, value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers")]
    return {key: value for key, value in items if any(named_tensors([value]))}


def truth_of(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str] = ()
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """The loss, and its gradient, of a copy of the user's module that got ``weights`` (P,) before its mode.

    Of PyTorch's own modules alone the problem's model is as good, and cheaper.
    """
    x, y = fresh(problem, x, y)
    with contextlib.ExitStack() as stack:
        model, views = problem.model, problem.layout.views(weights)
        if all(map(of_torch, model.modules())):
            stack.enter_context(placed(model, problem.layout, weights))
        else:
            model = evaluated(independent_copy(original), problem.device, problem.dtype, training, views)
        stack.enter_context(problem.evaluating(0))
        named = dict(model.named_parameters())
        return _loss_and_gradient(lambda: call(model, {}, x), problem, [named[name] for name in views], y)


def check_parameters(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str]
) -> Sequence[Tensor] | None:
    """Raise InputError unless the loss at ``weights`` is that of a copy of the user's module that holds them.

    Where the gradient is not, or PyTorch says so, the model computes outputs again in its backward pass, with
    the parameters that the module itself has: activation checkpointing (:func:`.recomputes`). Returns the
    gradient by parameter, if there is one.
    """
    given, (inputs, targets) = problem.layout.leaves(weights), fresh(problem, x, y)
    with problem.evaluating(0):
        ours, gradient = _loss_and_gradient(
            lambda: problem.call(given, inputs), problem, list(given.values()), targets
        )
    wanted, truth = truth_of(problem, original, x, y, weights, training)
    if training:
        wanted, _ = truth_of(problem, original, x, y, weights)
    least, own = (
        0.0 if problem.device.type == "cpu" else FUSED,
        not all(map(of_torch, problem.model.modules())),
    )
    # A pass without gradients may keep something of another.
    for value in (ours, loss_of(problem, x, y, weights=weights)) if own else (ours,):
        if not equal(value, wanted, problem, least):
            raise InputError(
                f"model: with all parameters replaced its loss is {float(value):.6g}, but "
                f"{float(wanted):.6g} with the same ones loaded into the module: it keeps some of them, or "
                "what was computed from them, elsewhere; compute it from self.NAME in each forward pass"
            )
    if gradient is not None and truth is not None:
        # A part at a time: copies of all parts in double precision would take much memory.
        allowed = tolerance(problem.weights.dtype)
        apart = [float((double(a) - double(b)).norm()) for a, b in zip(gradient, truth, strict=True)]
        scale = math.hypot(*(float(double(part).norm()) for part in truth))
        if math.isfinite(scale) and math.hypot(*apart) > 10 * allowed * (scale + allowed):
            recomputes(problem.model, found=True)
    return gradient


def check_modes(
    problem: MeanLoss,
    original: nn.Module,
    x: Any,
    y: Any,
    at: Tensor,
    gradient: Sequence[Tensor] | None,
    training: Sequence[str],
) -> None:
    """Raise InputError if the model keeps what an earlier pass computed, or misses a part of θ in eval mode.

    A model whose eval mode merges, caches or detaches a part has no ``gradient`` there, which a copy of it in
    training mode has, of equal loss. A small part changes the loss at the weights ``at`` by less than the
    tolerance: they are moved by the difference of the gradients. None: such a part is not looked for.
    """
    loss, away = loss_of(problem, x, y), copy.copy(problem)
    kept = attempt(truth_of, problem, emptied(problem, original, x), x, y, at)
    right = kept is None or equal(loss_of(problem, x, y, weights=at), kept[0], problem)
    ours = torch.cat([part.flatten() for part in gradient or [at[:0]]])
    for names in () if gradient is None else [()] if training else custom(problem.model):
        away.model = evaluated(independent_copy(original), problem.device, problem.dtype, names)
        try:
            losses = torch.stack([loss, *(loss_of(away, x, y, seed) for seed in (0, 1))])
            parts = truth_of(problem, original, x, y, at, names)[1] or ()
            theirs = torch.cat([part.flatten() for part in parts])
        except Exception:  # whatever the user's model raises in training mode
            continue
        step, eps = theirs - ours, torch.finfo(at.dtype).eps
        least = 100 * eps * float(loss.abs())  # of what is more than rounding
        alike = float(losses.max() - losses.min()) <= least
        if not (alike and step.norm() > math.sqrt(eps) * theirs.norm()):
            continue
        step *= MOVE * float(loss.abs()) / float(step.square().sum())
        end = loss_of(problem, x, y, weights=at + step)
        others = [truth_of(problem, original, x, y, at + step)[0]]
        others += [] if training else [loss_of(away, x, y, weights=at + step)]
        right = right and all(equal(end, other, problem) for other in others)
        # How much the loss rises along a short step: by what our gradient says, or theirs.
        step *= min(SHORT, SHORT * float(at.norm() / step.norm()))
        rise = float(loss_of(problem, x, y, weights=at + step) - loss_of(problem, x, y, weights=at - step))
        low, high = 2 * float(ours @ step), 2 * float(theirs @ step)
        right = right and not (high - low > least and abs(rise - high) < abs(rise - low))
    if not right:
        classes = [type(original.get_submodule(name)).__name__ for name in next(custom(original), ())]
        raise InputError(
            "model: in eval mode its loss does not follow all of its parameters: a module (of "
            f"{', '.join(dict.fromkeys(classes))}) merges, caches or detaches some, or keeps what an "
            "earlier pass computed; compute with self.NAME in each forward pass"
        )


def emptied(problem: MeanLoss, original: nn.Module, x: Any) -> nn.Module:
    """A copy of ``original`` without the tensors that a pass makes anew where they are missing."""
    model = independent_copy(original)
    trial = evaluated(independent_copy(original), problem.device, problem.dtype)
    for place in next(custom(model), ()):
        module, tried = model.get_submodule(place), trial.get_submodule(place)
        for key, value in held(module).items():
            empty: Any = {} if isinstance(value, dict) else [] if isinstance(value, list) else None
            setattr(tried, key, copy.copy(empty))
            with contextlib.suppress(Exception), problem.evaluating(0):  # it is no such tensor
                call(trial, {}, fresh(problem, x, None)[0])
            if key in held(tried):
                setattr(module, key, empty)
            setattr(tried, key, value)
    return model


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
