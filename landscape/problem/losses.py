"""Losses: their source, the terms that a sample contributes to the mean, and the correct predictions."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core.devices import double, finite, float64_device
from landscape.core.errors import InputError, OperationError, first_words
from landscape.problem.batches import clone, count_samples, named_tensors, other_forms, tree_map

# The target that PyTorch and Hugging Face leave out of the loss.
IGNORED = -100


def output_loss(outputs: Any, targets: Any) -> Tensor:
    """Return the loss in a model's output, ``outputs.loss`` or ``outputs["loss"]``."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(value, Tensor) or value.dim() > 0:
        kind = type(outputs).__name__
        raise InputError(f"loss: missing, and this {kind} has no .loss of one number; give a loss")
    return value


@dataclass(frozen=True)
class ClassLoss:
    """The options of PyTorch's cross-entropy or negative log-likelihood of classes.

    Attributes:
        ignored: the target that does not count.
        weight: the weights of the classes; None for equal weights.
        softmax: whether it is cross-entropy with default options, for which there are faster formulas.
    """

    ignored: int
    weight: Tensor | None
    softmax: bool

    @classmethod
    def of(cls, loss: Any) -> ClassLoss | None:
        """Return the options of ``loss``; None if it is no loss of classes."""
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            options = {name: getattr(loss, name) for name in _DEFAULTS if hasattr(loss, name)}
            is_cross_entropy = type(loss) is nn.CrossEntropyLoss
        else:
            options = {}
            while isinstance(loss, partial) and not loss.args:
                loss, options = loss.func, {**loss.keywords, **options}
            if loss not in (F.cross_entropy, F.nll_loss):
                return None
            is_cross_entropy = loss is F.cross_entropy
        options = {**_DEFAULTS, **options}
        weight = options["weight"]  # a tensor cannot be compared with the default
        softmax = is_cross_entropy and weight is None and options == _DEFAULTS
        return cls(options["ignore_index"], weight, softmax)


# PyTorch's losses that are by definition means over samples, of functions of one sample each.
_MEANS: tuple[Any, ...] = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss,
    nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.MultiMarginLoss,
    nn.MultiLabelSoftMarginLoss, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
    F.soft_margin_loss, F.multi_margin_loss, F.multilabel_soft_margin_loss,
)  # fmt: skip


def is_mean(loss: Any) -> bool:
    """Return whether ``loss`` is a loss of PyTorch that is by definition a mean over the samples."""
    while isinstance(loss, partial):
        loss = loss.func
    return type(loss) in _MEANS if isinstance(loss, nn.Module) else any(loss is mean for mean in _MEANS)


# The options that change the value of PyTorch's losses of classes.
_DEFAULTS: dict[str, Any] = {
    "weight": None, "ignore_index": IGNORED, "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip


def placed_loss(loss: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return ``loss`` with its tensors, such as class weights, on ``device`` and in ``dtype``."""

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    if isinstance(loss, nn.Module):
        if all(t is to_device(t) for t in (*loss.parameters(), *loss.buffers())):
            return loss
        return copy.deepcopy(loss).to(device, dtype)
    if isinstance(loss, partial):
        return partial(loss.func, *tree_map(to_device, loss.args), **tree_map(to_device, loss.keywords))
    return loss


def by_sample(tensor: Tensor) -> Tensor:
    """Return (B,), the sums of a tensor (B, ...) by sample."""
    return tensor.flatten(1).sum(1) if tensor.dim() > 1 else tensor


def _counted(targets: Any, ignored: int) -> Tensor | None:
    """Return 1 for each target other than ``ignored``, else 0; None for targets that are no class indices."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() == 0:
        return None
    return double(targets != ignored)


def loss_terms(loss: Any, targets: Any) -> Tensor | None:
    """Return (B,), the terms that each sample contributes to the mean of a loss of classes.

    Targets equal to ``ignore_index`` do not count; the others count by the weights of their classes. None for
    any other loss, or targets that are no class indices.
    """
    class_loss = ClassLoss.of(loss)
    terms = None if class_loss is None else _counted(targets, class_loss.ignored)
    if class_loss is None or terms is None:
        return None
    if class_loss.weight is not None:
        counted = targets.where(targets != class_loss.ignored, torch.zeros_like(targets))
        terms *= class_loss.weight.to(targets.device)[counted].to(terms)
    return by_sample(terms)


class Terms:
    """A function of (x, y) that returns (B,) float64 on the CPU: the terms of each sample in the mean.

    Args:
        criterion: the loss.
        given: the user's function of the targets, which returns (B,). None: the targets of losses of classes,
            and the labels of a model's own loss, are counted; for any other loss each sample has one term.
        shifted: whether the loss ignores the first label of each sequence; None: this is not known.

    Attributes:
        count: the :class:`.Count` found by :mod:`.mean_check`, in place of those; else None.
        by_batch: whether the loss is the mean over batches, of which each counts the same.
    """

    def __init__(
        self, criterion: Any, given: Callable[[Any], Tensor] | None = None, shifted: bool | None = None
    ) -> None:
        self.criterion, self.given, self.shifted = criterion, given, shifted
        self.count: Any = None
        self.by_batch = False

    def __call__(self, x: Any, y: Any) -> Tensor:
        samples = count_samples(x, y)
        if self.by_batch:
            length = max(1, samples)  # the targets of a batch of images may have no box
            return torch.full((length,), 1 / length, dtype=torch.float64)
        if self.given is not None:
            terms: Tensor | None = self.given(y)
        elif self.count is not None:
            terms = self.count(x, y)
        elif self.criterion is output_loss:
            terms = label_terms(x.get("labels"), bool(self.shifted)) if isinstance(x, Mapping) else None
        else:
            terms = loss_terms(self.criterion, y)
        if terms is None:
            return torch.ones(samples, dtype=torch.float64)
        if terms.shape != (samples,):
            shape = tuple(terms.shape)
            raise InputError(f"terms: shape {shape}, it must give one number per sample, ({samples},)")
        return double(terms.detach()).cpu()

    def counted(self, targets: Any) -> Tensor:
        """Return whether each of ``targets``, if they are classes, counts in the loss."""
        if not isinstance(targets, Tensor):
            return torch.ones(1)
        class_loss, every = ClassLoss.of(self.criterion), torch.ones_like(targets, dtype=torch.bool)
        if class_loss is not None or self.criterion is output_loss:
            return targets != (IGNORED if class_loss is None else class_loss.ignored)
        if self.given is not None and targets.dim() == 1:
            return self.given(targets).to(targets.device) > 0
        return every if self.count is None else self.count.left(targets)

    def classes(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor] | None:
        """Return outputs (B, C, ...) and their classes (B, ...), or None for another kind of task.

        The axis of the classes is the second, or the last if the shapes allow no other. If the model's own
        loss ignores the first label of each sequence, each output belongs to the next label. Raise ValueError
        if nothing says which output belongs to which target.
        """
        z, is_own_loss, shifted = opened_logits(outputs), self.criterion is output_loss, self.shifted
        if not isinstance(z, Tensor) or not isinstance(targets, Tensor) or z.dim() < 2:
            return None
        second, last = targets.shape == (len(z), *z.shape[2:]), targets.shape == z.shape[:-1]
        if not (second or last) or not is_classes(targets) or z.shape[1 if second else -1] < 2:
            return None
        if z.dim() == 2 or ClassLoss.of(self.criterion) is not None:
            return (z, targets) if second else None
        if shifted is None or (shifted and not is_own_loss) or (second and last):
            raise ValueError("takes outputs (B, classes, …), these may be (B, …, classes) or of next targets")
        z = z.movedim(-1, 1) if last else z
        return (z[:, :, :-1], targets[:, 1:]) if shifted else (z, targets)


def is_classes(targets: Tensor) -> bool:
    """Return whether targets are integers."""
    return not (targets.is_floating_point() or targets.is_complex())


def check_labels(loss: Any, outputs: Any, targets: Any) -> None:
    """Raise InputError if a label for cross-entropy or negative log-likelihood is no class of the outputs.

    PyTorch would report it in the first minibatch with the label, and on a GPU only as a failed assertion.
    """
    class_loss = ClassLoss.of(loss)
    if class_loss is None or _counted(targets, class_loss.ignored) is None:
        return
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    labels, classes = targets[targets != class_loss.ignored], outputs.shape[1]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        span = f"from {int(labels.min())} to {int(labels.max())}"
        raise InputError(f"data: its labels go {span}, they must lie in 0…{classes - 1}")


def label_terms(labels: Any, shifted: bool) -> Tensor | None:
    """Return (B,), the number of labels of each sample that count in a model's own loss: all except −100.

    ``shifted``: the first label of each sequence does not count, as in causal language models. None for
    labels that are no class indices.
    """
    terms = _counted(labels, IGNORED)
    if terms is not None and shifted and terms.dim() > 1:
        terms = terms[:, 1:]
    return terms if terms is None else by_sample(terms)


def with_other_first_labels(criterion: Any, x: Any, y: Any) -> tuple[Any, Any] | None:
    """Return a batch with integer labels (B, n, ...) with other first labels.

    The labels are the targets, or for a model with a loss of its own "labels" in x. None for other labels, or
    a loss that is known to count all. The loss of causal language models ignores the first labels; no
    attribute of a model says so, but an equal loss of this batch shows it.
    """
    is_own_loss = criterion is output_loss
    labels = (x.get("labels") if isinstance(x, Mapping) else None) if is_own_loss else y
    if not isinstance(labels, Tensor) or labels.dim() < 2 or not is_classes(labels) or is_mean(criterion):
        return None
    changed = labels.clone()
    changed[:, 0] = (labels[:, 0] == 0).to(labels)
    return ({**x, "labels": changed} if is_own_loss else x), changed


def is_softmax_loss(loss: Any) -> bool:
    """Return whether ``loss`` is cross-entropy with its default options."""
    class_loss = ClassLoss.of(loss)
    return class_loss is not None and class_loss.softmax


def opened_logits(outputs: Any) -> Any:
    """Return the ``logits`` of a model's outputs, or the outputs themselves if they have none."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    return getattr(outputs, "logits", outputs)


def correct(outputs: Any, targets: Any, terms: Terms) -> Tensor:
    """Return (2, B) float64, how many targets of each sample have the largest output, and how many count.

    Args:
        outputs: (B, classes, ...), or an object with such ``logits``; see :meth:`Terms.classes`.
        targets: (B, ...), class indices.
        terms: which targets count in the loss; no others are correct.

    Returns:
        The numbers; or (2, 1) NaN for another kind of task, for a single output, if nothing says which axis
        is that of the classes, or if some targets that count are no classes.
    """
    with contextlib.suppress(ValueError):
        if (pair := terms.classes(outputs, targets)) is not None:
            (z, t), counted = pair, terms.counted(pair[1])
            right = torch.stack(((z.argmax(1) == t) & counted, counted))
            sums = double(right).unsqueeze(-1).flatten(2).sum(2)
            are_classes = (~counted | ((t >= 0) & (t < z.shape[1]))).all()
            return sums.where(are_classes.to(sums.device), torch.nan)
    device = targets.device if isinstance(targets, Tensor) else "cpu"  # a copy could not be recorded there
    return double(torch.full((2, 1), torch.nan, device=device))


class ClonedTargets:
    """A loss that receives clones of its targets, because it writes to them."""

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        self.func = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.func(outputs, clone(targets))


class Metric(ClonedTargets):
    """A loss whose integers, or numbers of Python or NumPy, such as of scikit-learn, become tensors.

    The tensor is in float64, or in the lower precision of the number, which tells by how much two may differ
    by rounding. The loss receives detached outputs, because NumPy accepts no tensors with gradients.
    """

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if hasattr(outputs, "__dict__") and not isinstance(outputs, Tensor):  # Hugging Face
            detached = copy.copy(outputs)
            for name, value in tree_map(Tensor.detach, vars(outputs)).items():
                setattr(detached, name, value)
        else:
            detached = tree_map(Tensor.detach, outputs)
        number: Any = self.func(detached, targets)
        value = torch.as_tensor(number, dtype=torch.float64 if isinstance(number, (int, float)) else None)
        value = value if value.is_floating_point() else value.to(torch.float64)
        first_output = next((t for _, t in named_tensors(outputs)), value)
        return value.to(float64_device(first_output.device))


def several_numbers(value: Any) -> InputError:
    """Return the error for a loss that does not return one number."""
    result, remedy = repr(type(value)), ""
    if isinstance(value, Tensor):
        result, remedy = f"shape {tuple(value.shape)}", ".mean()"
    elif isinstance(value, (tuple, list, Mapping)) and value:
        key = next(iter(value)) if isinstance(value, Mapping) else 0
        if isinstance(value[key], Tensor) and value[key].dim() == 0:
            remedy = f"[{key!r}]"
    return InputError(
        f"loss: it gives {result}, it must give one number, the mean over the samples",
        remedy=f"landscape.Problem(model, lambda o, t: loss(o, t){remedy}, data)" if remedy else "",
    )


def finite_gradient(loss: float, gradient: Tensor) -> Tensor:
    """Return ``gradient``, the gradient of ``loss``; raise OperationError unless both are finite."""
    if not math.isfinite(loss):
        raise OperationError(f"weights: the loss there is {loss:g}, without derivatives; take others")
    if not finite(gradient):
        raise OperationError(
            f"model or loss: the gradient is NaN or infinite where the loss is {loss:.6g}; let roots "
            "and norms stay away from zero, and each branch of torch.where be finite"
        )
    return gradient


def describe_loss(loss: Any) -> str:
    """Return a name for a loss: the name of a function, or the printed form of a module."""
    if isinstance(loss, nn.Module):
        return " ".join(repr(loss).split())
    if isinstance(loss, partial):
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(loss.keywords.items()))
        return f"{describe_loss(loss.func)}({options})"
    if isinstance(loss, ClonedTargets):
        return describe_loss(loss.func)
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    return f"{getattr(loss, '__module__', '')}.{name}"


#: The losses of PyTorch that are negative log-likelihoods, in nats: the classes, and the functions.
NATS = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.PoissonNLLLoss,
    nn.GaussianNLLLoss, nn.CTCLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss,
    F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div,
    F.poisson_nll_loss, F.gaussian_nll_loss, F.ctc_loss, F.soft_margin_loss, F.multilabel_soft_margin_loss,
)  # fmt: skip


def loss_name_and_unit(loss: Any) -> tuple[str, str]:
    """Return the name and the unit of a loss for axes and tables.

    Negative log-likelihoods of PyTorch are ("loss", "nat"); all others have no unit. A user's function has
    its own name, unless that contains "loss".
    """
    while isinstance(loss, (partial, ClonedTargets)):
        loss = loss.func
    if loss in NATS or type(loss) in NATS:
        return "loss", "nat"
    named = loss if hasattr(loss, "__name__") else type(loss)
    name, module = named.__name__, named.__module__ or ""
    if module.startswith(("torch.", "landscape.")) or not name.isidentifier() or "loss" in name.lower():
        name = "loss"
    return name, ""


# Operations that copy numbers without rounding.
_ATEN = torch.ops.aten
_MOVES = (_ATEN.index, _ATEN.masked_select, _ATEN.where, _ATEN.gather, _ATEN.clone)


class Coarsest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of PyTorch that records in ``eps`` the coarsest precision of all computed numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func.is_view or func.overloadpacket in _MOVES
        if isinstance(result, Tensor) and result.is_floating_point() and not is_copy:
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result


class _Broadcasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of PyTorch that records in ``found`` whether an operation broadcasts two tensors' shapes."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.found = {a.shape, b.shape}, False
        self.joint_shape = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.joint_shape:
            shapes = {t.shape for _, t in named_tensors(args)} & self.shapes
            self.found |= len(shapes) == 2 or (len(shapes) == 1 and func is torch.ops.aten.expand.default)
        return result


def refuse_broadcasting(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> None:
    """Raise InputError for a loss that pairs outputs (N, 1) with targets (N,), or the reverse.

    An elementwise loss would broadcast the two, and return a mean over (N, N) pairs. PyTorch at most warns.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    output_shape, target_shape = tuple(outputs.shape), tuple(targets.shape)
    if output_shape != (*target_shape, 1) and target_shape != (*output_shape, 1):
        return
    reshaped = targets.reshape(outputs.shape)
    if not reshaped.is_floating_point():
        reshaped = reshaped.to(outputs)
    try:
        loss(outputs, reshaped)
    except Exception:  # reshaped targets are no remedy for this loss
        return
    # If the loss raises an error for these shapes, suppress() ends the block, and the loss is refused below.
    with contextlib.suppress(Exception), _Broadcasts(outputs, targets) as broadcasts:
        loss(outputs, targets)
        if not broadcasts.found:
            return
    expression = "targets.unsqueeze(-1)" if outputs.dim() > targets.dim() else "targets.squeeze(-1)"
    if not targets.is_floating_point():
        expression += ".to(outputs)"
    raise InputError(
        f"loss: it broadcasts outputs of shape {output_shape} and targets {target_shape}, "
        "each output with each target",
        remedy=f"landscape.Problem(model, lambda outputs, targets: loss(outputs, {expression}), data)",
    )


def no_fit(problem: Any, causes: Sequence[Exception], x: Any, y: Any) -> InputError:
    """Return the error for model and data that do not fit; ``causes`` are the errors of the three passes.

    Its message ends with another form of the data that fits, if there is one.
    """
    tensors = [*named_tensors(x, "inputs"), *named_tensors(y, "targets")]
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors)
    words, last_error = first_words(causes[0], 200), str(causes[-1])
    hint = ""
    if "does not require grad" in last_error or "not have been used in the graph" in last_error:
        hint = "; a loss that differentiates in the inputs finds them in its targets: give data as (x, x)"
    for form, inputs, targets in other_forms(x, y):
        with contextlib.suppress(Exception), problem.evaluating(0):
            loss = problem.criterion(problem.outputs(problem.weights, inputs), targets)
            if isinstance(loss, (Tensor, Real)):
                hint = f"; {form}"
                break
    return InputError(f"model and data do not fit: {type(causes[0]).__name__}: {words} ({shapes}){hint}")
