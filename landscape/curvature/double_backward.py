"""Checks that a gradient is the derivative of the loss, that it has a derivative, and of their precision."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core import devices
from landscape.core.devices import double, widest_dtype
from landscape.core.errors import InputError, LandscapeError, ProblemWarning, first_words, warn_caller
from landscape.core.options import fit
from landscape.problem.batches import graph_nodes, own_outputs, recomputes
from landscape.problem.checks import moved
from landscape.problem.layout import FOLLOW, Slot, backward, cut, differentiable, gradients, placed, put
from landscape.problem.problem import Problem

LOW = (torch.bfloat16, torch.float16)
RAISED = (*LOW, torch.float32, torch.complex32, torch.complex64)
# The key of ``Problem.checked`` for whether model or loss compute in a precision of LOW.
HALF_INSIDE = ("low precision",)


class FullPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of PyTorch in which autocast and casts to less than ``dtype`` produce ``dtype``.

    Casts to 8 bits, for quantization, are not changed.

    Attributes:
        dtype: the precision.
        cast_dtypes: the precisions that casts have asked for so far.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.cast_dtypes = dtype, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype in RAISED:
            self.cast_dtypes.add(dtype)
            full = self.dtype.to_complex() if dtype.is_complex else self.dtype
            kwargs["dtype"] = torch.promote_types(dtype, full)
        return func(*args, **kwargs)


def first_loss(problem: Problem, weights: dict[str, Tensor]) -> Tensor:
    """Return the loss of the first chunk of the problem's data, with the parameters ``weights``."""
    x, y, _, seed = next(problem.parts())
    with problem.evaluating(seed):
        return problem.criterion(problem.call(weights, x), y)


def in_full_precision(problem: Problem) -> Problem:
    """Return ``problem`` or, if its weights are in half precision, a copy in float32.

    Products in half precision have two or three digits, too few for an eigenvalue search. A model may also
    cast to half precision in its forward pass. ``problem.checked[HALF_INSIDE]`` records such casts. Products
    of such a model are computed within :class:`FullPrecision`. A ProblemWarning reports half precision, of
    weights or casts, once for each problem.

    Raises:
        NoSecondDerivative: the model runs in half precision only.
    """
    fit("problem", problem, Problem)
    is_half = problem.dtype in LOW
    full_problem = problem.to(torch.float32) if is_half else problem
    if HALF_INSIDE in problem.checked:
        return full_problem
    small_problem = full_problem.on(full_problem.data.few())
    try:
        with torch.no_grad(), FullPrecision(full_problem.dtype) as mode:
            first_loss(small_problem, small_problem.layout.views(small_problem.weights))
    except LandscapeError:
        raise
    except Exception as error:  # a model that does not run in the full dtype may raise any error
        if not (is_half or mode.cast_dtypes & {*LOW}):  # neither weights nor casts in half precision
            raise
        # FOLLOW is the remedy: how to write a model that runs in several precisions.
        words = f"it runs in half precision only ({first_words(error)}), too coarse for second derivatives"
        raise NoSecondDerivative(f"model: {words}; {FOLLOW}") from error
    half_dtypes = mode.cast_dtypes & {*LOW}  # half precision in the forward pass
    problem.checked[HALF_INSIDE] = bool(half_dtypes)
    if is_half:
        half_dtypes.add(problem.dtype)
    if half_dtypes:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in half_dtypes)
        arithmetic = str(full_problem.dtype).removeprefix("torch.")
        words = f"it computes in {' and '.join(names)}; second derivatives have {arithmetic} arithmetic"
        warn_caller(f"model: {words}", ProblemWarning)
    return full_problem


# PyTorch's messages for operations without a second derivative, with the operation's name: a general one, and
# that of its CTC loss on a GPU.
MISSING = re.compile(
    r"derivative for '?(?:aten::)?_?(\w+?)(?:_backward)?'? is not implemented|wrapper_CUDA_\w*_(ctc_loss)"
)
# A product is wrong if the differences of gradients over one step and over two steps differ by at most the
# share AGREEMENT, and the product differs from them by more than the share DISAGREEMENT (our choices). The
# two differences disagree if a step contains a kink, or if the model computes in a coarser precision inside.
AGREEMENT, DISAGREEMENT = 0.05, 0.25
# Differences of losses are reliable if those over one and two steps differ by at most the share SAME_SHARE,
# and are at least MIN_ROUNDINGS times the rounding. A gradient is wrong if it differs from them by more than
# ALLOWED_FACTOR times their disagreement plus the share ALLOWED_SHARE: a detached part may be small. BALANCE
# is the largest factor by which the gradient of a tensor with a small part is raised (our choices).
SAME_SHARE, ALLOWED_FACTOR, ALLOWED_SHARE, MIN_ROUNDINGS, BALANCE = 0.002, 10, 0.001, 1000, 30
# Numbers that are converted to float64 at once (our choice: 8 MiB).
SLICE = 2**20


class NoSecondDerivative(InputError):
    """Model or loss have no second derivative, or a wrong one; their gradient may be right."""


WHAT_TO_DO = (
    "; take derivatives='differences', those of gradients, or write it in differentiable operations (losses "
    "and gradients do not need it)"
)
NO_GRADIENT = "; write it in differentiable operations (losses do not need it)"


class Decomposed(TorchFunctionMode):
    """A mode that replaces PyTorch's operations whose second derivative is missing, wrong or slow by others.

    That of weight_norm is wrong (up to 2.13), that of EmbeddingBag is missing, that of torch.prod divides by
    the factors, and that of convolutions is slow.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            v, g, dim = (*args, 0)[:3]
            return v * (g / torch.norm_except_dim(v, 2, dim))
        if func is F.embedding_bag:
            bags = inspect.signature(F.embedding_bag).bind(*args, **(kwargs or {}))
            bags.apply_defaults()
            return _bags(**bags.arguments)
        if func in (torch.prod, Tensor.prod):
            return _multiplied(*args, **(kwargs or {}))
        if func in CONVOLUTIONS and (result := _convolution(*args, **(kwargs or {}))) is not None:
            return result
        return func(*args, **(kwargs or {}))


CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


class Convolution(torch.autograd.Function):
    """A convolution whose second derivatives are convolutions with the same options.

    PyTorch's own second derivatives exchange minibatch and channels, and compute group by group: on one core
    a product with the Hessian of LeNet-5 took 1.9 times as long, with that of MobileNetV2 3 times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, options: Sequence[Any]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.options = options
        result: Tensor = torch.ops.aten.convolution(x, w, b, *options)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        parts = ConvolutionGradients.apply(*grads, *ctx.saved_tensors, ctx.options, needed)  # type: ignore[no-untyped-call]
        return (*parts, None)


class ConvolutionGradients(torch.autograd.Function):
    """The gradients of a convolution x ∗ w + b by x, w and b, given the gradient g of its result.

    Their inner product with (u, v, c) is ⟨g, u ∗ w + x ∗ v + c⟩; the backward pass computes the derivatives
    of this number by g, x and w.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, options: Sequence[Any], needed: Any) -> Any:
        ctx.save_for_backward(g, x, w)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return torch.ops.aten.convolution_backward(g, x, w, [len(w)], *options, needed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (u, v, c), (g, x, w), options = grads, ctx.saved_tensors, ctx.options
        _, needs_x, needs_w, *_ = ctx.needs_input_grad
        convolution, derivatives = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
        in_x = in_w = None
        terms: list[Tensor] = []
        if u is not None:
            terms.append(convolution(u, w, None, *options))
            in_w = derivatives(g, u, w, None, *options, [False, needs_w, False])[1]
        if v is not None:
            terms.append(convolution(x, v, None, *options))
            in_x = derivatives(g, x, v, None, *options, [needs_x, False, False])[0]
        if c is not None:
            terms.append(c.view(-1, *[1] * (g.dim() - 2)).expand_as(g))
        return functools.reduce(torch.add, terms), in_x, in_w, None, None


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return the result of F.conv1d, 2d or 3d; None for arguments that :class:`Convolution` does not have."""
    axes = weight.dim() - 2
    settings = [[v] * axes if isinstance(v, int) else v for v in (stride, padding, dilation)]
    is_dual = unpack_dual(input).tangent is not None  # type: ignore[no-untyped-call]
    is_usual = input.is_floating_point() and input.dtype == weight.dtype and input.dim() == weight.dim()
    if is_dual or not is_usual or isinstance(padding, str) or torch._C._are_functorch_transforms_active():
        return None
    options = (*settings, False, [0] * axes, groups)
    result: Tensor = Convolution.apply(input, weight, bias, options)  # type: ignore[no-untyped-call]
    return result


def _multiplied(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Return the result of torch.prod, as products of halves, whose derivatives divide by no factor."""
    if not (input.dim() and input.numel() and input.is_floating_point()) or isinstance(dim, str):
        return torch.prod(input, dtype=dtype) if dim is None else torch.prod(input, dim, keepdim, dtype=dtype)
    x, axis = (input.flatten(), 0) if dim is None else (input, dim)
    x = x if dtype is None else x.to(dtype)
    while x.shape[axis] > 1:
        half, odd = divmod(x.shape[axis], 2)
        first, second, rest = torch.split(x, [half, half, odd], axis)
        x = torch.cat((first * second, rest), axis)
    return x if keepdim and dim is not None else x.squeeze(axis)


def _bags(input: Tensor, weight: Tensor, offsets: Tensor | None, mode: str, **options: Any) -> Tensor:
    """Return the result of F.embedding_bag: the sum or mean of the weights of the words of each bag."""
    if mode == "max" or options["scale_grad_by_freq"] or options["max_norm"] is not None:
        return F.embedding_bag(input, weight, offsets, mode=mode, **options)
    word_weights, padding = options["per_sample_weights"], options["padding_idx"]
    words = input.flatten()
    if offsets is None:
        bags = torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1])
        count = len(input)
    else:
        count = len(offsets) - options["include_last_offset"]
        bags = torch.searchsorted(offsets[:count], torch.arange(len(words)).to(offsets), right=True) - 1
    is_counted = torch.ones_like(words) if padding is None else words != padding % len(weight)
    factors = is_counted.to(weight) if word_weights is None else is_counted * word_weights.flatten()
    rows = F.embedding(words, weight) * factors[:, None]
    sums = weight.new_zeros(count, weight.shape[1]).index_add(0, bags, rows)
    counts = weight.new_zeros(count).index_add(0, bags, is_counted.to(weight))
    return sums / counts.clamp(min=1)[:, None] if mode == "mean" else sums


@contextlib.contextmanager
def missing_named() -> Iterator[None]:
    """Return a context that raises NoSecondDerivative, with the operation's name, for an error of PyTorch."""
    try:
        yield
    except RuntimeError as error:
        match = MISSING.search(str(error))
        if match is None:
            raise
        words = f"model or loss: PyTorch has no second derivative of {match[1] or match[2]}{WHAT_TO_DO}"
        raise NoSecondDerivative(words) from error


def check_graph(gradients: Sequence[Tensor]) -> None:
    """Raise InputError if a backward pass that is marked ``once_differentiable`` has computed the gradients.

    Its results are constants for PyTorch, with derivatives of zero.
    """
    if any(node.name() == "torch::autograd::Error" for node in graph_nodes(gradients)):
        words = "one of its operations has no second derivative (once_differentiable)"
        raise NoSecondDerivative(f"model or loss: {words}{WHAT_TO_DO}")


def _loss_and_gradient(problem: Problem, at: Tensor, slots: Sequence[Slot]) -> tuple[float, Tensor]:
    """Return the loss of the first chunk at ``at`` (P,), and its gradient (P,) in ``slots``, zero elsewhere.

    If the backward pass computes outputs again, it uses the module's own parameters, as in training.
    Otherwise leaves replace these parameters, so that hooks of the user's parameters (an optimizer within the
    backward pass) do not run.
    """
    if recomputes(problem.model):
        x, y, _, seed = next(problem.parts())
        with placed(problem.model, problem.layout, at) as parameters:
            with torch.enable_grad(), problem.evaluating(seed):
                value = problem.criterion(own_outputs(problem, x), y)
            parts = dict(zip(parameters, backward(value, list(parameters.values())), strict=True))
    else:
        parameters = {k: v.detach().clone().requires_grad_() for k, v in problem.layout.views(at).items()}
        with torch.enable_grad():
            value = differentiable(first_loss(problem, parameters))
        parts = dict(zip(parameters, gradients(value, list(parameters.values())), strict=True))
    numbers = torch.cat([parts[slot.name].flatten() for slot in slots])
    return float(value.detach()), put(torch.zeros_like(at), slots, numbers)


def check_gradient(small_problem: Problem, weights: Tensor, slots: Sequence[Slot]) -> None:
    """Raise InputError unless the gradient in ``slots`` is the derivative of the loss near ``weights`` (P,).

    The gradient is not the derivative if a term of the loss is detached, or if the model replaces a gradient
    on purpose (straight-through estimators). The derivative of such a gradient is no Hessian.

    The gradient is compared with central differences of the loss (:func:`_is_derivative`), in the widest
    dtype of the device (usually float64) if the model can run in it, otherwise in the problem's dtype.

    The check is made once for each problem, ``slots`` and kind of BatchNorm statistics. ``small_problem``
    shares its ``checked`` with the problem of all samples.

    Args:
        small_problem: the problem with a few samples.
        weights: (P,).
        slots: the parameters whose gradient is checked.
    """
    key = ("gradient", small_problem.batchnorm.name, tuple(slot.name for slot in slots))
    if key in small_problem.checked:
        return
    # dict.fromkeys drops the second dtype if it equals the first.
    for dtype in dict.fromkeys((widest_dtype(small_problem.device), small_problem.dtype)):
        try:
            converted = small_problem.to(dtype)
            converted.weights = weights.to(dtype)
            with FullPrecision(dtype):
                agrees = _is_derivative(converted, slots)
            break
        except LandscapeError:
            raise
        except Exception:  # a model that does not run in the wider dtype may raise any error: next dtype
            if dtype == small_problem.dtype:
                raise
    if not agrees:
        words = "its gradient is not the derivative of the loss (a detached part, rounding?)"
        raise InputError(f"model or loss: {words}{NO_GRADIENT}")
    small_problem.checked[key] = True


def _is_derivative(problem: Problem, slots: Sequence[Slot]) -> bool:
    """Return whether the gradient agrees with central differences of the loss.

    The differences are taken along the balanced gradient (:func:`_balanced_gradient`) and along two random
    directions. The differences are reliable if they exceed the rounding of the loss, and if the differences
    over one step and over two steps agree. The step grows until the differences along all directions are
    reliable. Unreliable differences are not compared: if all are unreliable, the result is True.
    """
    # Slightly displaced, because the weights may be on a kink of ReLU or max pooling.
    at = problem.weights.add(_random_move(problem, 0), alpha=0.01)
    loss, gradient = _loss_and_gradient(problem, at, slots)

    @torch.no_grad()
    def difference(direction: Tensor, step: float) -> float:
        """Return the central difference of the loss, divided by 2·step."""
        loss_ahead = float(first_loss(problem, problem.layout.views(at.add(direction, alpha=step))))
        loss_behind = float(first_loss(problem, problem.layout.views(at.add(direction, alpha=-step))))
        return (loss_ahead - loss_behind) / (2 * step)

    def direction_of(number: int) -> Tensor:
        """Return direction 0 (the balanced gradient), 1 or 2 (random). All are zero outside of ``slots``."""
        if number == 0:
            return _balanced_gradient(problem, gradient, slots)
        return put(torch.zeros_like(at), slots, cut(_random_move(problem, number), slots))

    eps = torch.finfo(at.dtype).eps
    # A small loss may come from logits of size 1, and then has the rounding of numbers of size 1.
    rounding = eps * max(1.0, abs(loss))
    # Each step is 30 times as long as the one before (our choice).
    for step in (eps**0.5, 30 * eps**0.5, 900 * eps**0.5):
        all_reliable = True
        for group in ((0,), (1, 2)):  # the balanced gradient; the two random directions together
            rows = []
            for number in group:
                d = direction_of(number)  # one direction at a time, to save memory
                rows.append([difference(d, step), difference(d, 2 * step), float(devices.inner(d, gradient))])
            # Slopes along the directions of the group: by differences over one step, by differences over two
            # steps, and as the gradient predicts.
            one_step, two_steps, predicted = torch.tensor(rows, dtype=torch.float64).T
            scale = torch.stack([one_step.norm(), two_steps.norm(), predicted.norm()]).max()
            exceeds_rounding = 2 * step * scale >= MIN_ROUNDINGS * rounding
            disagreement = (one_step - two_steps).norm()
            is_reliable = bool(exceeds_rounding & (disagreement <= SAME_SHARE * scale))
            allowed = ALLOWED_FACTOR * disagreement + ALLOWED_SHARE * scale
            if is_reliable and not bool((one_step - predicted).norm() <= allowed):
                return False
            all_reliable &= is_reliable
        if all_reliable:
            break
    return True


def _random_move(problem: Problem, seed: int) -> Tensor:
    """Return a random displacement (P,) in proportion to the sizes of the weights."""
    return problem.along_weights(moved(problem, seed).sub_(problem.weights))


def _balanced_gradient(problem: Problem, gradient: Tensor, slots: Sequence[Slot]) -> Tensor:
    """Return the gradient's direction (P,), scaled by tensor so that all tensors contribute nearly alike.

    Otherwise a wrong gradient of a tensor with a small contribution would not be detected.
    """
    direction = torch.zeros_like(gradient)
    random = _random_move(problem, 1)
    norms = [devices.vector_norm(v[slot.place]) for v in (gradient, random) for slot in slots]
    values = torch.stack(norms).tolist()  # the device is read once
    sizes, lengths = values[: len(slots)], values[len(slots) :]
    largest = max(size * length for size, length in zip(sizes, lengths, strict=True))
    for slot, size, length in zip(slots, sizes, lengths, strict=True):
        if size > 0:
            scale = length / size * largest / max(size * length, largest / BALANCE)
            direction[slot.place] = gradient[slot.place] * scale
    return direction


def holds_but_for_rounding(problem: Problem, test: Callable[[Problem], bool]) -> bool:
    """Return whether ``test`` holds for the problem in its own precision, or else in float64.

    (If a network fits its data well, products have few correct digits, because 1 − p cancels.) For a model
    that runs in one precision only, the test in that precision decides.
    """
    has_result = False
    for dtype in dict.fromkeys((problem.dtype, widest_dtype(problem.device))):
        try:
            if test(problem if dtype == problem.dtype else problem.to(dtype)):
                return True
            has_result = True
        except LandscapeError:
            raise
        except Exception:  # the user's model raises any kind of error where dtypes do not fit
            if dtype == problem.dtype:
                raise
    return not has_result and test(problem)


def _slices(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the numbers of two vectors, as lists of tensors, in float64, SLICE at a time to save memory."""
    for part, other_part in zip(a, b, strict=True):
        pairs = zip(torch.split(part.flatten(), SLICE), torch.split(other_part.flatten(), SLICE), strict=True)
        yield from ((double(x), double(y)) for x, y in pairs)


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return ⟨a, b⟩, in float64, of two vectors as lists of tensors."""
    return torch.stack([x @ y for x, y in _slices(a, b)]).sum()


def norm(a: Sequence[Tensor], minus: Sequence[Tensor] | None = None) -> Tensor:
    """Return ‖a‖ or, with ``minus``, ‖a − minus‖, in float64, of vectors as lists of tensors."""
    squares = [(x if minus is None else x - y).square().sum() for x, y in _slices(a, minus or a)]
    return torch.stack(squares).sum().sqrt()


def check_differences(
    problem: Problem, leaves: dict[str, Tensor], active: list[Tensor], vector: list[Tensor],
    image: Sequence[Tensor],
) -> None:  # fmt: skip
    """Raise InputError if differences of gradients contradict ``image``, the Hessian times ``vector``.

    Only this check detects a custom backward pass whose own derivative lacks a term (because of detach,
    .data or NumPy).

    Args:
        problem: the loss.
        leaves: the parameters with which the model is called, by name.
        active: the parameters among ``leaves`` by which the loss is differentiated. Their values are changed.
        vector, image: the vector and the product, each as a list with one tensor for each of ``active``.
    """
    start = [parameter.detach().clone() for parameter in active]
    ratio = float(norm(start) / norm(vector))
    # The step is in units of ``vector``. The cube root balances rounding and the error of a central
    # difference. The 1e-3 is for parameters that are zero (our choice).
    step = torch.finfo(problem.dtype).eps ** (1 / 3) * max(ratio, 1e-3)

    def gradient_at(t: float) -> list[Tensor]:
        """Return the gradient at start + t·vector."""
        with torch.no_grad():
            for parameter, at, v in zip(active, start, vector, strict=True):
                torch.add(at, v, alpha=t, out=parameter)
        loss = first_loss(problem, leaves)
        return gradients(loss, active) if loss.requires_grad else [torch.zeros_like(a) for a in active]

    def difference(t: float) -> list[Tensor]:
        """Return the central difference of gradients between start − t·vector and start + t·vector."""
        pairs = zip(gradient_at(t), gradient_at(-t), strict=True)
        return [(forward - backward).div_(2 * t) for forward, backward in pairs]

    one_step, two_steps = difference(step), difference(2 * step)
    scale = torch.maximum(norm(one_step), norm(two_steps))
    is_reliable = bool(norm(one_step, minus=two_steps) <= AGREEMENT * scale)
    limit = DISAGREEMENT * torch.maximum(scale, norm(image))
    agrees = bool(norm(image, minus=one_step) <= limit)  # False for NaN
    if is_reliable and not agrees:
        raise NoSecondDerivative(
            "model or loss: its second derivative is wrong: products with the Hessian disagree with "
            f"differences of gradients (a detached part?){WHAT_TO_DO}"
        )
