"""Checks that L(θ), as a problem computes it, is the loss of the user's own module and loss function.

Each check evaluates a few samples, and raises InputError in one line that names the cause and the remedy. A
module may merge its parameters in eval(), or store numbers computed from them there or in its first pass. The
checks therefore compare with a new copy of the module that receives θ before eval() and before any pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.core.devices import double, generator, normal
from landscape.core.errors import InputError, LandscapeError
from landscape.core.options import OneOf
from landscape.problem import losses
from landscape.problem.batches import (
    attempt,
    call,
    clone,
    graph_nodes,
    has_changed,
    leaves,
    mark_as_recomputing,
    named_tensors,
    random_state,
    recomputes,
    strided,
    take,
)
from landscape.problem.data import PROBE
from landscape.problem.layout import has_own_mode, in_eval_mode, independent_copy, placed, restoring
from landscape.problem.mean_check import AT_ONCE, takes
from landscape.problem.mean_loss import MeanLoss

# How far the checks move θ, relative to the mean magnitude of each parameter (our choice).
MOVE = 0.1
# A multiple of the weights at which a stored number of a module changes the loss (our choice): at the weights
# themselves, saturated layers may hide it.
SHRUNK = 0.1
# A multiple of the center, with another loss, at which a module makes its first pass (our choice).
ELSEWHERE = 3
# The limits of a step along the difference of two gradients (our choices): the change of the loss that the
# difference predicts, relative to the loss; and the length of the step, relative to ‖θ‖.
MAX_CHANGE, MAX_STEP = 1e-3, 1e-2
# The rounding of fused kernels on GPUs, relative (our choice: below that of float32 problems, √eps).
FUSED = 1e-5


def tolerance(dtype: torch.dtype) -> float:
    """Return √eps, the largest relative difference of two computations of one number that count as equal."""
    return math.sqrt(torch.finfo(dtype).eps)


@torch.no_grad()
def loss_of(problem: MeanLoss, x: Any, y: Any, seed: int = 0, weights: Tensor | None = None) -> Tensor:
    """Return the loss of clones of some samples at ``weights`` (P,), by default at the center."""
    at = problem.weights if weights is None else weights
    (inputs, targets) = clones_for_pass(problem, x, y)
    with problem.evaluating(seed):
        return problem.criterion(problem.outputs(at, inputs), targets).detach()


def equal(a: Tensor, b: Tensor, problem: MeanLoss, min_tolerance: float = 0.0) -> bool:
    """Return whether two losses differ by rounding only, or relatively by at most ``min_tolerance``."""
    allowed = max(min_tolerance, *(tolerance(dtype) for dtype in (problem.weights.dtype, a.dtype)))
    return torch.allclose(a, b, rtol=allowed, atol=allowed, equal_nan=True)


def clones_for_pass(problem: MeanLoss, x: Any, y: Any) -> tuple[Any, Any]:
    """Return clones of some samples for one pass."""
    return problem.data.for_pass(*clone((x, y)))


def storing_modules(model: nn.Module) -> list[str]:
    """Return the names of the user's modules that may store numbers computed from parameters in eval mode.

    They are the modules with a train() or eval() of their own. If there are none, they are the modules with
    parameters or other tensors; and if there are none, all of the user's modules.
    """
    modules = {name: module for name, module in model.named_modules() if not is_of_torch(module)}
    names = [name for name, module in modules.items() if has_own_mode(module)]
    if not names:
        names = [name for name, module in modules.items() if module._parameters or stored_tensors(module)]
    return names or list(modules)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is PyTorch's own, without hooks, so that it stores nothing of a pass."""
    package = type(module).__module__.split(".")[0]
    return package == "torch" and not (module._forward_hooks or module._forward_pre_hooks)


def stored_tensors(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that contain tensors, other than its parameters and buffers."""
    items = [(key, value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers")]
    return {key: value for key, value in items if any(named_tensors([value]))}


def without_stored_tensors(problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any]) -> nn.Module:
    """Return ``original``, or a copy without the stored tensors that a pass computes again."""
    attributes = list[tuple[str, str, Any]]()
    for name, module in original.named_modules():
        if not is_of_torch(module):
            attributes += [(name, key, value) for key, value in stored_tensors(module).items()]
    model = independent_copy(original) if attributes else original
    for name, key, value in attributes:
        trial = in_eval_mode(independent_copy(model).to(problem.device, problem.dtype))
        module = trial.get_submodule(name)
        empty: Callable[[], Any] = type(value) if isinstance(value, (dict, list)) else lambda: None
        setattr(module, key, empty())
        with problem.evaluating(seed=0):  # the pass fails if the tensor is a constant
            attempt(call, trial, {}, clones_for_pass(problem, *problem.data.pick(*batch))[0])
        if key in stored_tensors(module):
            setattr(model.get_submodule(name), key, empty())
    return model


def reference_values(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str] = ()
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Return the loss and gradient of a copy of the user's module that got ``weights`` (P,) before eval().

    A model of PyTorch's own modules alone needs no copy. ``training``: modules to put in training mode.
    """
    x, y = clones_for_pass(problem, x, y)
    needs_copy = not all(map(is_of_torch, problem.model.modules()))
    model = independent_copy(original).to(problem.device, problem.dtype) if needs_copy else problem.model
    with placed(model, problem.layout, weights) as parameters, problem.evaluating(seed=0):
        if needs_copy:
            in_eval_mode(model, training)
        return _loss_and_gradient(lambda: call(model, {}, x), problem, list(parameters.values()), y)


def check_parameters(
    problem: MeanLoss, original: nn.Module, x: Any, y: Any, weights: Tensor, training: Sequence[str]
) -> None:
    """Raise InputError unless a copy of ``original`` with the parameters ``weights`` has the problem's loss.

    The copy is in eval mode, also if the problem's model has modules in training mode. The problem's gradient
    must not miss a part of the loss, either.

    A model with activation checkpointing computes outputs again in its backward pass, with the module's own
    parameters. Then PyTorch raises an error that names checkpointing, or the gradient is wrong although the
    loss is right. Such a model is marked (:func:`.recomputes`). From then on only its loss is compared.

    Args:
        problem: the problem, whose model is checked.
        original: the user's module.
        x, y: some samples.
        weights: (P,).
        training: the modules of the problem's model in training mode.
    """
    tensors = problem.layout.leaves(weights)
    may_store = not all(is_of_torch(module) for module in problem.model.modules())
    # A user's module may store numbers in one pass, and use them in a later one. Two later passes show this:
    # one that follows a pass at other weights, and one that follows the passes below.
    later_losses = [_loss_after_overwriting(problem, tensors, x, y)] if may_store else []
    if recomputes(problem.model):
        loss, gradient = loss_of(problem, x, y, weights=weights), None
    else:
        inputs, targets = clones_for_pass(problem, x, y)
        outputs = functools.partial(problem.call, tensors, inputs)
        with problem.evaluating(seed=0):
            loss, gradient = _loss_and_gradient(outputs, problem, list(tensors.values()), targets)
    # The gradient is compared with a copy in the same modes, and the loss with a copy in eval mode.
    true_loss, true_gradient = reference_values(problem, original, x, y, weights, training)
    if training:
        true_loss, _ = reference_values(problem, original, x, y, weights)
    min_tolerance = 0.0 if problem.device.type == "cpu" else FUSED
    if may_store:
        later_losses.append(loss_of(problem, x, y, weights=weights))
    wrong_losses = [v for v in (loss, *later_losses) if not equal(v, true_loss, problem, min_tolerance)]
    is_right = not wrong_losses
    if is_right and gradient is not None and true_gradient is not None:
        # One parameter at a time: copies of whole gradients in double precision would need much memory.
        allowed = tolerance(problem.weights.dtype)
        errors = [float((double(a) - double(b)).norm()) for a, b in zip(gradient, true_gradient, strict=True)]
        norm = math.hypot(*(float(double(part).norm()) for part in true_gradient))
        # Gradients may differ by 10 times the tolerance of losses (our choice).
        if math.isfinite(norm) and math.hypot(*errors) > 10 * allowed * (norm + allowed):
            # The loss is right, but the gradient is wrong: the model computes outputs again.
            mark_as_recomputing(problem.model)
            gradient = true_gradient
        # A copy with other modules in training mode may have a gradient with a part that ``gradient`` misses.
        users_modules = tuple(name for name, module in original.named_modules() if not is_of_torch(module))
        other_modes = [() if training else tuple(storing_modules(original)), users_modules]
        arguments = problem, original, (x, y), weights, gradient, training
        is_right = all(_gradient_is_complete(*arguments, mode) for mode in dict.fromkeys(other_modes))
    if not is_right:
        wrong_loss = float(wrong_losses[0] if wrong_losses else loss)
        submodules = [original.get_submodule(name) for name in storing_modules(original)]
        classes = dict.fromkeys(type(module).__name__ for module in submodules)
        raise InputError(
            f"model: its loss in eval mode does not follow all of its parameters (it is {wrong_loss:.6g}, "
            f"that of a copy is {float(true_loss):.6g}): {', '.join(classes) or 'PyTorch'} merges, caches or "
            "detaches parameters, or uses an earlier pass; compute with self.NAME in each forward pass"
        )


@torch.no_grad()
def _loss_after_overwriting(problem: MeanLoss, parameters: dict[str, Tensor], x: Any, y: Any) -> Tensor:
    """Return the loss at ``parameters``, written into tensors that had other numbers in an earlier pass.

    A module may store numbers by a parameter's identity, address or version, and then use the old ones.
    """
    tensors, losses = problem.layout.leaves(ELSEWHERE * problem.weights), list[Tensor]()
    for _ in range(2):
        inputs, targets = clones_for_pass(problem, x, y)
        with problem.evaluating(seed=0):
            losses.append(problem.criterion(problem.call(tensors, inputs), targets).detach())
        for name, tensor in tensors.items():
            tensor.data.copy_(parameters[name])
    return losses[1]


def _gradient_is_complete(
    problem: MeanLoss, original: nn.Module, xy: tuple[Any, Any], weights: Tensor, gradient: Sequence[Tensor],
    training: Sequence[str], other_training: Sequence[str],
) -> bool:  # fmt: skip
    """Return whether ``gradient`` misses no part of the loss, such as a part that a module detaches.

    ``gradient`` is the gradient of a model with the modules ``training`` in training mode. It is compared
    with the gradient of a copy of ``original`` with the modules ``other_training`` in training mode. If the
    losses in the two modes differ, the gradients may rightly differ, too. Then only parameters whose
    ``gradient`` is zero are compared.

    If the gradients differ, a short step along their difference decides. For this step, the other gradient
    predicts a larger rise of the loss. If the loss rises by more than the mean of the two predictions,
    ``gradient`` misses a part of the loss.
    """
    has_zero_part = any(not part.any() for part in gradient)  # whether it is zero for some parameter
    # A copy in eval mode (``other_training`` is empty) is compared only if ``training`` is not empty, and
    # ``gradient`` is zero for some parameter.
    if not other_training and not (training and has_zero_part):
        return True
    values = attempt(reference_values, problem, original, *xy, weights, other_training)
    if values is None or values[1] is None:
        return True  # the copy fails in that mode, or has no gradient
    other_loss, other_gradient = values[0], values[1]
    loss, _ = reference_values(problem, original, *xy, weights, training)
    has_same_loss = equal(other_loss, loss, problem)
    differences, sums = list[Tensor](), list[Tensor]()
    for part, other_part in zip(gradient, other_gradient, strict=True):
        difference = double(other_part) - double(part)
        if not has_same_loss and part.any():
            difference = 0.0 * difference  # not compared, but NaN stays NaN
        differences.append(difference.flatten())
        sums.append((double(part) + double(other_part)).flatten())
    direction, total = torch.cat(differences), torch.cat(sums)
    length, precision = float(direction.norm()), torch.finfo(weights.dtype)
    if not length > max(precision.tiny, 10 * tolerance(weights.dtype) * float(total.norm())):
        return True  # the gradients differ by rounding only, or are NaN
    # If copies share cached numbers, the losses below may be wrong, and the zero part decides.
    if has_zero_part and _copies_share_numbers(original):
        return False
    # The slope along the direction, by the mean of the two gradients.
    loss_size, mean_slope = float(other_loss.abs()), float(total @ direction) / length / 2
    step_length = min(MAX_CHANGE * loss_size / length, MAX_STEP * float(weights.norm()))
    step = direction.to(weights)
    step *= step_length / length
    end_loss, _ = reference_values(problem, original, *xy, weights + step)
    start_loss, _ = reference_values(problem, original, *xy, weights - step)
    # The rise from θ − step to θ + step, and the mean of the two gradients' predictions of this rise.
    rise, mean_prediction = float(end_loss) - float(start_loss), 2 * mean_slope * float(step.norm())
    rounding = 100 * precision.eps * loss_size
    return not rise > max(rounding, mean_prediction)  # True also for NaN


def _copies_share_numbers(model: nn.Module) -> bool:
    """Return whether copies of the user's modules share closures, caches or tensors of a class."""
    modules = [model.get_submodule(name) for name in storing_modules(model)]
    attributes = [value for module in modules for value in vars(module).values()]
    if any(getattr(value, "__closure__", None) or hasattr(value, "cache_info") for value in attributes):
        return True
    return any(any(named_tensors(dict(vars(type(module))))) for module in modules)


def _loss_and_gradient(
    outputs: Callable[[], Any], problem: MeanLoss, parameters: Sequence[Tensor], y: Any
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Return the loss of ``outputs()`` and its gradient by parameter; None in place of a missing gradient."""
    with torch.enable_grad():
        loss = problem.criterion(outputs(), y)
        gradient = None
        # Reentrant checkpointing hides its parameters from torch.autograd.grad, which gives zero for them.
        if any(node.name() == "CheckpointFunctionBackward" for node in graph_nodes([loss])):
            mark_as_recomputing(problem.model)
        elif loss.requires_grad:
            try:
                gradient = torch.autograd.grad(loss, parameters, materialize_grads=True)
            except RuntimeError as error:  # an operation without a derivative; contours need none
                if "heckpoint" in str(error):
                    mark_as_recomputing(problem.model)
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
    """Raise InputError unless model, loss and some samples fit together.

    There are up to three passes: without gradients, with gradients of the parameters, and with gradients of
    parameters and inputs (for physics-informed losses, which call ``torch.autograd.grad``). The settings of
    the first pass without an error become ``problem.differentiates`` and ``data.input_gradients``. If that
    pass draws random numbers of NumPy or Python, ``problem.draws_elsewhere`` becomes True.

    Args:
        problem: model, loss and data.
        x, y: the samples.
        labels: all labels of the data; for a loss of classes, each label must be a class of the outputs.

    Returns:
        (the loss, whether the pass drew random numbers).
    """
    outputs, data, had_input_gradients = None, problem.data, problem.data.input_gradients
    causes: list[Exception] = []
    settings = (False, had_input_gradients), (True, had_input_gradients), (True, True)
    for differentiates, input_gradients in settings:
        problem.differentiates, data.input_gradients = differentiates, input_gradients
        problem.draws_elsewhere = True  # evaluating() also seeds NumPy and Python; the pass may use either
        try:
            inputs, targets = data.for_pass(x, y)
            with problem.evaluating(seed=0):
                states_before = random_state(problem.device)
                outputs = problem.outputs(problem.weights, inputs)
                losses.check_labels(problem.criterion, outputs, labels)
                value: object = problem.criterion(outputs, targets)  # the user's function returns any object
                # A number of Python or NumPy, or an integer, becomes a tensor of floating-point type.
                is_number = isinstance(value, Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
                if is_number or (isinstance(value, Tensor) and not value.is_floating_point()):
                    problem.criterion = losses.Metric(problem.criterion)
                    value = problem.criterion(outputs, targets)
                states_after = random_state(problem.device)
            problem.draws_elsewhere = states_before[1] != states_after[1]  # the states of NumPy and Python
            break
        except LandscapeError:
            raise
        except Exception as error:  # the user's model and loss raise any kind of error
            causes.append(error)
    else:  # all passes raised errors
        problem.differentiates = problem.draws_elsewhere = False
        data.input_gradients = had_input_gradients
        # Raises InputError only for outputs (N, 1) with targets (N,), or the reverse.
        losses.refuse_broadcasting(problem.criterion, outputs, y)
        raise losses.no_fit(problem, causes, x, y) from causes[0]
    if not isinstance(value, Tensor) or value.dim() > 0:
        raise losses.several_numbers(value)
    return value.detach(), states_before != states_after


def check_original(problem: MeanLoss, original: nn.Module, x: Any, y: Any) -> None:
    """Raise InputError if the loss at θ depends on the parameters that the user's own module has now."""
    before, parameters = loss_of(problem, x, y), list(original.parameters())
    with torch.no_grad(), restoring(parameters):
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
    problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any], moved_weights: Sequence[Tensor]
) -> None:
    """Raise InputError unless L(θ) is the loss of ``original`` with the user's loss function.

    Args:
        problem: the problem. This function may set ``problem.model`` to another copy of ``original``.
        original: the user's module.
        batch: the first samples, or the first batch.
        moved_weights: vectors (P,) of :func:`moved`: one for ``check="quick"``, several for "full".
    """
    source = without_stored_tensors(problem, original, batch)
    first_error, checked_samples = None, batch
    # First all modules are in eval mode. If the check fails, the modules that may store numbers computed from
    # parameters in eval mode are in training mode.
    for training_modules in ([], storing_modules(source)):
        if training_modules or source is not original:  # else problem.model is a copy in eval mode already
            model = independent_copy(source).to(problem.device, problem.dtype)
            problem.model = in_eval_mode(model, training_modules)
        try:
            checked_samples = _check_model(problem, source, batch, moved_weights, training_modules)
            break
        except InputError as error:
            first_error = first_error or error
            if training_modules or not storing_modules(source):
                raise first_error from first_error.__cause__
    # Other losses may use parameters of the user's module. Known losses are tested in a full check only.
    is_known_loss = problem.criterion is losses.output_loss or losses.is_mean(problem.criterion)
    if len(moved_weights) > 1 or not is_known_loss:
        check_original(problem, original, *checked_samples)


def _check_model(
    problem: MeanLoss, original: nn.Module, batch: tuple[Any, Any], moved_weights: Sequence[Tensor],
    training: Sequence[str],
) -> tuple[Any, Any]:  # fmt: skip
    """Raise InputError unless the problem's model computes what ``original`` does, at several θ.

    Returns the samples that were evaluated. A model or loss that writes to its arguments gets clones of them
    from now on. ``training``: the modules of problem.model in training mode.
    """
    data = problem.data
    quick_count, full_count = PROBES
    x, y = data.pick(*batch, full_count if len(moved_weights) > 1 else quick_count)
    # The first pass gets clones, which show whether model and loss write to their arguments.
    x_clone, y_clone = clone((x, y))
    weights_before = problem.weights.clone()
    all_labels = data.resident[1] if data.resident else None  # each must be a class of the outputs
    try:
        loss, draws_numbers = check_fit(problem, x_clone, y_clone, all_labels)
    except LandscapeError as error:  # some losses need all samples, and so does a model of one whole graph
        x, y = _more_samples(problem, batch, x)
        x_clone, y_clone = clone((x, y))
        try:
            loss, draws_numbers = check_fit(problem, x_clone, y_clone, all_labels)
        except LandscapeError:
            raise error from error.__cause__
    if has_changed(x, x_clone):
        problem.model.register_forward_pre_hook(
            lambda _, args, kwargs: (clone(args), clone(kwargs)), with_kwargs=True
        )
    if has_changed(y, y_clone):
        problem.criterion = losses.ClonedTargets(problem.criterion)
    check_passes(problem, weights_before, loss, x, y)
    # check_random() could miss a draw: dropout before a matrix of zeros does not change the loss.
    if draws_numbers and training:
        raise InputError("model: it draws random numbers in training mode; draw them in an nn.Dropout")
    if draws_numbers and problem.draws == 0:  # randomness="refuse"
        check_random(problem, x, y)
    loss_with_gradients = check_leaves(problem, original, x, y)
    check_recorded(problem, weights_before, loss, loss_with_gradients, x, y)
    users_modules = [module for module in problem.model.modules() if not is_of_torch(module)]
    if any(has_own_mode(module) or stored_tensors(module) for module in users_modules):
        # Such a module may use numbers of an earlier pass. Saturated layers hide them less at small weights.
        moved_weights = [*moved_weights, SHRUNK * moved_weights[0]]
    for weights in moved_weights:
        check_parameters(problem, original, x, y, weights, training)
    return x, y


def _more_samples(problem: MeanLoss, batch: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """Return more samples than ``x``: all, or at most AT_ONCE for a model that accepts parts of the data."""
    resident = problem.data.resident
    if resident is None or problem.data.samples <= AT_ONCE or not takes(problem, x):
        return resident or batch
    return take(resident, slice(AT_ONCE))


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
    min_tolerance = 0.0 if problem.device.type == "cpu" else FUSED
    if equal(loss, recorded, problem, min_tolerance):
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
    """Return the loss of a pass with gradients; raise InputError if it depends on a leaf tensor outside θ."""
    parameters = problem.layout.leaves(problem.weights)
    parameter_ids = {id(leaf) for leaf in parameters.values()}

    def unknown_leaves() -> tuple[Tensor, dict[str, list[Tensor]]]:
        """Return the loss, and the leaves outside θ in the graphs of "outputs" and "loss"."""
        inputs, targets = clones_for_pass(problem, x, y)
        with torch.enable_grad(), problem.evaluating(seed=0):
            outputs = problem.call(parameters, inputs)
            loss = problem.criterion(outputs, targets)
        leaves_in = {"outputs": leaves(_tensors(outputs)), "loss": leaves(loss)}
        for graph, all_leaves in leaves_in.items():
            leaves_in[graph] = [leaf for leaf in all_leaves if id(leaf) not in parameter_ids]
        return loss.detach(), leaves_in

    loss, first_leaves = unknown_leaves()
    if not any(first_leaves.values()):
        return loss
    # A leaf that each pass creates anew, such as a copy of x by which the loss is differentiated, is allowed.
    # It has another id in the second pass.
    _, second_leaves = unknown_leaves()
    for graph in ("outputs", "loss"):
        second_ids = {id(leaf) for leaf in second_leaves[graph]}
        lasting_leaves = [leaf for leaf in first_leaves[graph] if id(leaf) in second_ids]
        if lasting_leaves:
            raise InputError(_words_for_leaf(lasting_leaves[0], problem, original, of_loss=graph == "loss"))
    return loss


def _tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of ``outputs``, also of an object with attributes (NamedTuple, Hugging Face)."""
    if hasattr(outputs, "__dict__") and not isinstance(outputs, (Tensor, dict, list, tuple)):
        outputs = vars(outputs)
    return [tensor for _, tensor in named_tensors(outputs)]


def _words_for_leaf(leaf: Tensor, problem: MeanLoss, original: nn.Module, *, of_loss: bool) -> str:
    """Return the message for a tensor outside of θ that the outputs (or, ``of_loss``, the loss) depend on."""
    names = {id(p): name for module in (problem.model, original) for name, p in module.named_parameters()}
    name, shape = names.get(id(leaf)), tuple(leaf.shape)
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
