"""Losses: their source, the terms of the mean that a sample contributes, and what counts as correct."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.core.devices import double, finite, float64_device
from landscape.core.errors import InputError, OperationError
from landscape.problem.batches import clone, count_samples, named_tensors, tree_map

# The target that PyTorch and Hugging Face leave out of the loss.
IGNORED = -100


def output_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss in a model's output, ``outputs.loss`` or ``outputs["loss"]``."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(value, Tensor) or value.dim() > 0:
        kind = type(outputs).__name__
        raise InputError(f"loss: missing, and this {kind} has no .loss of one number; give a loss")
    return value


@dataclass(frozen=True)
class ClassLoss:
    """PyTorch's cross-entropy or negative log-likelihood, of classes: what it leaves out and how it weighs.

    ``softmax``: it is cross-entropy with its default options, whose batched form and Hessian are known.
    """

    ignored: int
    weight: Tensor | None
    softmax: bool

    @classmethod
    def of(cls, loss: Any) -> ClassLoss | None:
        """The kind of loss of classes that ``loss`` is; None: of another kind."""
        if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
            options = {name: getattr(loss, name) for name in _DEFAULTS if hasattr(loss, name)}
            cross_entropy = type(loss) is nn.CrossEntropyLoss
        else:
            options = {}
            while isinstance(loss, partial) and not loss.args:
                loss, options = loss.func, {**loss.keywords, **options}
            if loss not in (F.cross_entropy, F.nll_loss):
                return None
            cross_entropy = loss is F.cross_entropy
        options = {**_DEFAULTS, **options}
        weight = options["weight"]
        return cls(options["ignore_index"], weight, cross_entropy and weight is None and options == _DEFAULTS)


# PyTorch's losses that are by definition a mean over the numbers, or the classes, of each sample alone.
_MEANS: tuple[Any, ...] = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss,
    nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.MultiMarginLoss,
    nn.MultiLabelSoftMarginLoss, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss,
    F.soft_margin_loss, F.multi_margin_loss, F.multilabel_soft_margin_loss,
)  # fmt: skip


def is_mean(loss: Any) -> bool:
    """Return whether ``loss`` is one of PyTorch's that are by definition a mean over the samples."""
    while isinstance(loss, partial):
        loss = loss.func
    return type(loss) in _MEANS if isinstance(loss, nn.Module) else any(loss is mean for mean in _MEANS)


# The options of PyTorch's losses of classes that change their value.
_DEFAULTS: dict[str, Any] = {
    "weight": None, "ignore_index": IGNORED, "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip


def placed_loss(loss: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """``loss`` with its tensors, such as class weights, on ``device`` and in ``dtype``."""

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
    """(B,) the sums of a tensor (B, ...) by sample."""
    return tensor.flatten(1).sum(1) if tensor.dim() > 1 else tensor


def _counted(targets: Any, ignored: int) -> Tensor | None:
    """1 for each target other than ``ignored``, else 0; None for targets that are not class indices."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() == 0:
        return None
    return double(targets != ignored)


def loss_terms(loss: Any, targets: Any) -> Tensor | None:
    """(B,) how many terms of the mean each sample contributes to cross-entropy or negative log-likelihood.

    These leave out targets equal to ``ignore_index``, and weigh the others where there are class weights.
    None for any other loss, or targets that are not class indices.
    """
    class_loss = ClassLoss.of(loss)
    if class_loss is None or (terms := _counted(targets, class_loss.ignored)) is None:
        return None
    if class_loss.weight is not None:
        counted = targets.where(targets != class_loss.ignored, torch.zeros_like(targets))
        terms *= class_loss.weight.to(targets.device)[counted].to(terms)
    return by_sample(terms)


class Terms:
    """(x, y) of a batch -> (B,) float64, on the CPU: how many terms of the mean each sample contributes.

    Args:
        criterion: the loss.
        given: ``given(targets)`` -> (B,), from the user; None: the known losses of PyTorch and Hugging Face
            count their targets, any other loss has one term a sample.
        shifted: whether the loss leaves out the first label of each sequence; None: this is not known.
    """

    def __init__(
        self, criterion: Any, given: Callable[[Any], Tensor] | None = None, shifted: bool | None = None
    ) -> None:
        self.criterion, self.given, self.shifted = criterion, given, shifted
        self.count: Any = None  # Count, which the losses of parts of the data show
        self.by_batch = False  # the loss is the mean over batches, each of which counts the same

    def __call__(self, x: Any, y: Any) -> Tensor:
        samples = count_samples(x, y, alike=False)
        if self.by_batch:
            share = 1 / max(1, samples)  # a batch of images may have no box in its targets
            return torch.full((max(1, samples),), share, dtype=torch.float64)
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
        """Whether each of ``targets``, where they are classes, counts: the loss leaves out the others."""
        if not isinstance(targets, Tensor):
            return torch.ones(1)
        class_loss, every = ClassLoss.of(self.criterion), torch.ones_like(targets, dtype=torch.bool)
        if class_loss is not None or self.criterion is output_loss:
            return targets != (IGNORED if class_loss is None else class_loss.ignored)
        if self.given is not None and targets.dim() == 1:
            return self.given(targets).to(targets.device) > 0
        return every if self.count is None else self.count.left(targets)

    def classes(self, outputs: Any, targets: Any) -> tuple[Tensor, Tensor] | None:
        """Outputs (B, C, ...) and their classes (B, ...); None where they are not of this form.

        The classes come second, or last where the shapes leave no choice. If the model's own loss leaves out
        the first label of each sequence, each output is that of the next label. ValueError where nothing says
        which classes belong to which outputs.
        """
        z, own, shifted = opened_logits(outputs), self.criterion is output_loss, self.shifted
        if not isinstance(z, Tensor) or not isinstance(targets, Tensor) or z.dim() < 2:
            return None
        second, last = targets.shape == (len(z), *z.shape[2:]), targets.shape == z.shape[:-1]
        if not (second or last) or not is_classes(targets) or z.shape[1 if second else -1] < 2:
            return None
        if z.dim() == 2 or ClassLoss.of(self.criterion) is not None:
            return (z, targets) if second else None
        if shifted is None or (shifted and not own) or (second and last):
            raise ValueError("takes outputs (B, classes, …), these may be (B, …, classes) or of next targets")
        z = z.movedim(-1, 1) if last else z
        return (z[:, :, :-1], targets[:, 1:]) if shifted else (z, targets)


def is_classes(targets: Tensor) -> bool:
    """Return whether targets are integers."""
    return not (targets.is_floating_point() or targets.is_complex())


def check_labels(loss: Any, outputs: Any, targets: Any) -> None:
    """Raise InputError if a label for cross-entropy or negative log-likelihood is no class.

    PyTorch would report it at the first such minibatch, and on a GPU only as a failed assertion.
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
    """(B,) how many labels of each sample count in a model's own loss: those that are not −100.

    ``shifted``: all but each sequence's first, as in causal language models. None for labels that are not
    class indices.
    """
    terms = _counted(labels, IGNORED)
    return terms if terms is None else by_sample(terms[:, 1:] if shifted and terms.dim() > 1 else terms)


def with_other_first_labels(criterion: Any, x: Any, y: Any) -> tuple[Any, Any] | None:
    """A batch with integer labels (B, n, ...), with others at the first place of each sequence.

    They are the targets, or the "labels" in x of a model that computes its loss. None for other labels, or a
    loss that is known to take all. The loss of causal language models leaves the first label out; no
    attribute of a model says so, but its loss of this batch does.
    """
    own = criterion is output_loss
    labels = (x.get("labels") if isinstance(x, Mapping) else None) if own else y
    if not isinstance(labels, Tensor) or labels.dim() < 2 or not is_classes(labels) or is_mean(criterion):
        return None
    changed = labels.clone()
    changed[:, 0] = (labels[:, 0] == 0).to(labels)
    return ({**x, "labels": changed} if own else x), changed


def is_softmax_loss(loss: Any) -> bool:
    """Return whether ``loss`` is cross-entropy with its default options."""
    class_loss = ClassLoss.of(loss)
    return class_loss is not None and class_loss.softmax


def opened_logits(outputs: Any) -> Any:
    """The ``logits`` of a model's outputs, or the outputs themselves where they have none."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    return getattr(outputs, "logits", outputs)


def correct(outputs: Any, targets: Any, terms: Terms) -> Tensor:
    """(2, B) float64: how many targets of each sample are right, and how many count in the loss.

    Right are those at the largest entry of (B, classes, ...) ``outputs``, or of their ``logits``. (2, 1) NaN
    if it is not such a task, if there is one output alone, which no other can exceed, if nothing says where
    the classes are, or if some targets are neither classes nor left out of the loss.
    """
    with contextlib.suppress(ValueError):
        if (pair := terms.classes(outputs, targets)) is not None:
            (z, t), counted = pair, terms.counted(pair[1])
            right = torch.stack(((z.argmax(1) == t) & counted, counted))
            sums = double(right).unsqueeze(-1).flatten(2).sum(2)
            return sums.where((~counted | ((t >= 0) & (t < z.shape[1]))).all(), torch.nan)
    return torch.full((2, 1), torch.nan, dtype=torch.float64)


class ClonedTargets:
    """A loss that writes to its targets, given clones of them."""

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        self.func = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.func(outputs, clone(targets))


class Metric(ClonedTargets):
    """A loss that gives an integer, or a number of Python or NumPy, as those of scikit-learn, as a tensor.

    It is in float64, but for a number that was rounded to less, which says how far two may differ.
    It receives outputs for which no gradient is recorded, which NumPy does not take.
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
        first = next((t for _, t in named_tensors(outputs)), value)
        return value.to(float64_device(first.device))


def several_numbers(value: Any) -> InputError:
    """The refusal of a loss that does not give one number."""
    what, remedy = repr(type(value)), ""
    if isinstance(value, Tensor):
        what, remedy = f"shape {tuple(value.shape)}", ".mean()"
    elif isinstance(value, (tuple, list, Mapping)) and value:
        key = next(iter(value)) if isinstance(value, Mapping) else 0
        if isinstance(value[key], Tensor) and value[key].dim() == 0:
            remedy = f"[{key!r}]"
    return InputError(
        f"loss: it gives {what}, it must give one number, the mean over the samples",
        remedy=f"landscape.Problem(model, lambda o, t: loss(o, t){remedy}, data)" if remedy else "",
    )


def existing(loss: float, gradient: Tensor) -> Tensor:
    """``gradient``, that of ``loss``; OperationError unless both are finite."""
    if not math.isfinite(loss):
        raise OperationError(f"weights: the loss there is {loss:g}, without derivatives; take others")
    if not finite(gradient):
        raise OperationError(
            f"model or loss: the gradient is NaN or infinite where the loss is {loss:.6g}; let roots "
            "and norms stay away from zero, and each branch of torch.where be finite"
        )
    return gradient


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


#: The losses of PyTorch that are negative log-likelihoods, in nats: the classes, and the functions.
NATS = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.PoissonNLLLoss,
    nn.GaussianNLLLoss, nn.CTCLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss,
    F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div,
    F.poisson_nll_loss, F.gaussian_nll_loss, F.ctc_loss, F.soft_margin_loss, F.multilabel_soft_margin_loss,
)  # fmt: skip


def loss_name_and_unit(loss: Any) -> tuple[str, str]:
    """("loss", "nat") for likelihoods of PyTorch, else without unit; a function of one's own has its name."""
    while isinstance(loss, (partial, ClonedTargets)):
        loss = loss.func
    if loss in NATS or type(loss) in NATS:
        return "loss", "nat"
    kind = loss if hasattr(loss, "__name__") else type(loss)
    users = not (kind.__module__ or "").startswith(("torch.", "landscape.")) and kind.__name__.isidentifier()
    return kind.__name__ if users and "loss" not in kind.__name__.lower() else "loss", ""


# What moves numbers, without any rounding.
_ATEN = torch.ops.aten
_MOVES = (_ATEN.index, _ATEN.masked_select, _ATEN.where, _ATEN.gather, _ATEN.clone)


class Coarsest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the largest relative rounding, ``eps``, of what is computed from numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        moves = func.is_view or func.overloadpacket in _MOVES
        if isinstance(result, Tensor) and result.is_floating_point() and not moves:
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result


class _Pairs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether two tensors of these shapes are broadcast to one."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.seen = {a.shape, b.shape}, False
        self.joint = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.joint:
            shapes = {t.shape for _, t in named_tensors(args)} & self.shapes
            self.seen |= len(shapes) == 2 or (len(shapes) == 1 and func is torch.ops.aten.expand.default)
        return result


def refuse_broadcasting(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> None:
    """Raise InputError for a loss that pairs outputs (N, 1) with targets (N,), or the reverse.

    A loss that works elementwise broadcasts them: it takes its mean over (N, N) pairs, and PyTorch gives a
    warning at most.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    shapes = tuple(outputs.shape), tuple(targets.shape)
    if shapes[0] != (*shapes[1], 1) and shapes[1] != (*shapes[0], 1):
        return
    reshaped = targets.reshape(outputs.shape)
    if not reshaped.is_floating_point():
        reshaped = reshaped.to(outputs)
    try:
        loss(outputs, reshaped)
    except Exception:  # the loss refuses reshaped targets: they are no remedy to propose
        return
    with contextlib.suppress(Exception), _Pairs(outputs, targets) as pairs:
        loss(outputs, targets)  # an error of PyTorch for such shapes is refused below, too
        if not pairs.seen:
            return
    change = "unsqueeze(-1)" if outputs.dim() > targets.dim() else "squeeze(-1)"
    expression = f"targets.{change}" + ("" if targets.is_floating_point() else ".to(outputs)")
    raise InputError(
        f"loss: it broadcasts outputs of shape {shapes[0]} and targets {shapes[1]}, "
        "each output with each target",
        remedy=f"landscape.Problem(model, lambda outputs, targets: loss(outputs, {expression}), data)",
    )
