"""Losses: their source, the terms of the mean that a sample contributes, and what counts as correct."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.problem.batches import clone, count_samples, tree_map

# The target that PyTorch and Hugging Face leave out of the loss.
IGNORED = -100


def output_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss in a model's output, ``outputs.loss`` or ``outputs["loss"]``."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(value, Tensor) or value.dim() > 0:
        raise InputError(
            f"loss: None takes it from the model's output, but this {type(outputs).__name__} has no .loss "
            "that is one number; give a loss, or batches with the labels that the model makes its loss from"
        )
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
        """What kind of loss of classes ``loss`` is; None: of another kind."""
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
        weight = options.pop("weight")
        default = options == {name: value for name, value in _DEFAULTS.items() if name != "weight"}
        return cls(options["ignore_index"], weight, cross_entropy and default and weight is None)


# The options of PyTorch's losses of classes that change their value.
_DEFAULTS: dict[str, Any] = {
    "weight": None, "ignore_index": IGNORED, "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip


def placed_loss(loss: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """``loss`` with its tensors, such as class weights, on ``device`` and in ``dtype``."""

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    if isinstance(loss, nn.Module):
        if all(t is place(t) for t in (*loss.parameters(), *loss.buffers())):
            return loss
        return copy.deepcopy(loss).to(device, dtype)
    if isinstance(loss, partial):
        return partial(loss.func, *tree_map(place, loss.args), **tree_map(place, loss.keywords))
    return loss


def loss_terms(loss: Any, targets: Any) -> Tensor | None:
    """(B,) how many terms of the mean each sample contributes to cross-entropy or negative log-likelihood.

    These leave out targets equal to ``ignore_index``, and weigh the others where there are class weights.
    None for any other loss, or targets that are not class indices.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() == 0:
        return None
    known = ClassLoss.of(loss)
    if known is None:
        return None
    terms = (targets != known.ignored).double()
    if known.weight is not None:
        terms *= known.weight.to(targets.device)[targets.where(terms > 0, torch.zeros_like(targets))]
    return terms.flatten(1).sum(1) if terms.dim() > 1 else terms


class Terms:
    """(x, y) of a batch -> (B,) float64, on the CPU: how many terms of the mean each sample contributes.

    Args:
        criterion: the loss.
        given: ``given(targets)`` -> (B,), from the user; None: the known losses of PyTorch and Hugging Face
            count their targets, any other loss has one term a sample.
        shifted: the model computes its loss from labels, without the first one of each sequence.
    """

    def __init__(
        self, criterion: Any, given: Callable[[Any], Tensor] | None = None, shifted: bool = False
    ) -> None:
        self.criterion, self.given, self.shifted = criterion, given, shifted
        self.by_batch = False  # the loss is the mean over batches, each of which counts the same

    def __call__(self, x: Any, y: Any) -> Tensor:
        if self.by_batch:
            samples = count_samples(x, y, alike=False)
            return torch.full((samples,), 1 / samples, dtype=torch.float64)
        if self.given is not None:
            terms: Tensor | None = self.given(y)
        elif self.criterion is output_loss:
            terms = label_terms(x.get("labels"), self.shifted) if isinstance(x, Mapping) else None
        else:
            terms = loss_terms(self.criterion, y)
        samples = count_samples(x, y, alike=False)
        if terms is None:
            return torch.ones(samples, dtype=torch.float64)
        if terms.shape != (samples,):
            raise InputError(
                f"terms: shape {tuple(terms.shape)}, it must give one number a sample, ({samples},)"
            )
        return terms.detach().to("cpu", torch.float64)


def check_labels(loss: Any, outputs: Any, targets: Any) -> None:
    """Raise InputError if a label for cross-entropy or negative log-likelihood is no class.

    PyTorch would report it at the first such minibatch, and on a GPU only as a failed assertion.
    """
    terms = loss_terms(loss, targets)
    if terms is None or not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    known = ClassLoss.of(loss)
    assert known is not None
    labels, classes = targets[targets != known.ignored], outputs.shape[1]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(
            f"data: its labels go from {int(labels.min())} to {int(labels.max())}, but the model has "
            f"{classes} outputs, so that 0…{classes - 1} are allowed"
        )


def label_terms(labels: Any, shifted: bool) -> Tensor | None:
    """(B,) how many labels of each sample count in a model's own loss: those that are not −100.

    ``shifted``: all but each sequence's first, as in causal language models. None for labels that are not
    class indices.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return None
    terms = (labels != IGNORED).double()
    if terms.dim() == 1:
        return terms
    return (terms[:, 1:] if shifted else terms).flatten(1).sum(1)


def is_softmax_loss(loss: Any) -> bool:
    """Whether ``loss`` is cross-entropy with its default options."""
    known = ClassLoss.of(loss)
    return known is not None and known.softmax


def correct(outputs: Any, targets: Any, loss: Any) -> Tensor:
    """How many of (B, classes, ...) ``outputs`` have their largest entry at the target (B, ...).

    NaN where :func:`correct_shares` is.
    """
    return correct_shares(outputs, targets, loss).sum()


def correct_shares(outputs: Any, targets: Any, loss: Any) -> Tensor:
    """(B,) float64: 1 for (B, classes, ...) ``outputs`` with the largest entry at the target (B, ...).

    Of an output with ``logits``, these are meant. A sample with several targets has the share that is right,
    and only where the loss is PyTorch's cross-entropy or negative log-likelihood, which say that the classes
    come second. One NaN if it is not such a task, if there is one output alone, which no other can exceed, or
    if some targets are no classes, as those that a negative number masks.
    """
    z = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    unknown = torch.full((1,), torch.nan, dtype=torch.float64)
    if not isinstance(z, Tensor) or not _classes(targets):
        return unknown
    if z.dim() < 2 or z.shape[1] < 2 or targets.shape != (len(z), *z.shape[2:]):
        return unknown
    if z.dim() > 2 and ClassLoss.of(loss) is None:
        return unknown
    right = (z.argmax(1) == targets).double().unsqueeze(-1).flatten(1).sum(1)
    shares: Tensor = right / max(1, targets[:1].numel())
    return shares.where(((targets >= 0) & (targets < z.shape[1])).all(), torch.nan)


def _classes(targets: Any) -> bool:
    """Whether ``targets`` can be numbers of classes."""
    return isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex()


class ClonedTargets:
    """A loss that writes to its targets, given clones of them."""

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        self.func = loss

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.func(outputs, clone(targets))


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
