"""Batches of any structure: tensors in nested tuples, lists and dicts, with the samples first."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from landscape.core.errors import InputError

# What PyTorch and Hugging Face mark targets with that the loss leaves out.
IGNORED = -100
# Samples that a stream hands over at once: enough to hide that, few enough for a large network (ours).
STREAM_BATCH = 64


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced; mappings become dicts, what is no tensor stays as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(tree_map(function, value) for value in tree)
    return tree


def as_tensors(tree: Any) -> Any:
    """``tree`` with NumPy arrays as tensors; an iterable that is no tuple, list or dict stays as it is."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree)
    if isinstance(tree, Mapping):
        return {key: as_tensors(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(as_tensors(value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(as_tensors(value) for value in tree)
    return tree


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``tree``, each with where it is, such as "inputs['mask']" or "targets[1]"."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named_tensors(value, f"{name}[{key!r}]")


def take(tree: Any, index: Any) -> Any:
    """``tensor[index]`` for every tensor of ``tree``."""
    return tree_map(lambda tensor: tensor[index], tree)


def call(model: nn.Module, weights: dict[str, Tensor], x: Any) -> Any:
    """The model's outputs with ``weights`` in place of its own, differentiable in them.

    A dict x is passed as ``model(**x)``, a tuple or list as ``model(*x)``, anything else as ``model(x)``.
    """
    if isinstance(x, Mapping):
        return functional_call(model, weights, (), dict(x))
    return functional_call(model, weights, tuple(x) if isinstance(x, (tuple, list)) else (x,))


def is_resident(data: Any) -> bool:
    """Whether ``data`` is the data itself, samples first, and not an iterable of batches of it.

    It is where it is a dict, a tuple of two, or a list of two tensors. Raises InputError for a tuple of two
    pairs that may as well be two batches.
    """
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    if pair and isinstance(data, tuple) and _alike(*data):
        raise InputError(
            "data: a tuple of two pairs may be two batches, or pairs of inputs and of targets; give batches "
            "as a list, [(x1, y1), (x2, y2)], and inputs that the model takes together as a dict"
        )
    return isinstance(data, Mapping) or (
        pair and (isinstance(data, tuple) or all(isinstance(part, Tensor) for part in data))
    )


def _alike(first: Any, second: Any) -> bool:
    """Whether both are pairs of tensors, of the same kinds and shapes but for the number of samples."""
    pairs = [first, second]
    if not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs):
        return False
    if not all(isinstance(t, Tensor) and t.dim() for p in pairs for t in p):
        return False
    return all((a.dtype, a.shape[1:]) == (b.dtype, b.shape[1:]) for a, b in zip(first, second, strict=True))


def split(batch: Any, own_loss: bool) -> tuple[Any, Any]:
    """(inputs, targets) of a batch: a pair, or one dict as Hugging Face's collators make them.

    Of a dict the targets are its "labels", or all of it where it has none. The labels are inputs, too, if the
    model makes its ``own_loss`` from them; otherwise the model is not given them.
    """
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
        if labels is None or own_loss:
            return dict(batch), dict(batch) if labels is None else labels
        return {key: value for key, value in batch.items() if key != "labels"}, labels
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    what = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
    raise InputError(
        f"data: a batch is a {what}, it must be (inputs, targets) or a dict; several inputs go into one "
        "tuple, ((a, b), targets)"
    )


def count_samples(x: Any, y: Any, *, alike: bool) -> int:
    """How many samples a batch holds: the length of its first tensor, of the targets where they have one.

    With ``alike``, InputError unless all tensors are of that length.
    """
    found = [*named_tensors(y, "targets"), *named_tensors(x, "inputs")]
    lone = isinstance(y, (bool, int, float)) or (found and found[0][1].dim() == 0)
    if not found or lone:
        what = f"a single number as {found[0][0] if found and found[0][1].dim() == 0 else 'targets'}"
        raise InputError(
            f"data: a batch holds {what if found else 'no tensor'}, it must hold tensors with the samples "
            "first; single samples, or lists of numbers, go through a DataLoader(…, batch_size=…)"
        )
    first, length = found[0][0], len(found[0][1])
    for name, tensor in found if alike else ():
        if tensor.dim() == 0 or len(tensor) != length:
            size = len(tensor) if tensor.dim() else "no"
            raise InputError(
                f"data: {name}: {size} samples, but {first}: {length}; all tensors must hold each sample once"
            )
    return length


def output_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss that a model's output carries, ``outputs.loss`` or ``outputs["loss"]``."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(value, Tensor) or value.dim() > 0:
        raise InputError(
            f"loss: None takes it from the model's output, but this {type(outputs).__name__} has no .loss "
            "that is one number; give a loss, or batches with the labels that the model makes its loss from"
        )
    return value


def class_loss(loss: Any) -> tuple[int, Tensor | None] | None:
    """(ignore_index, class weights) of PyTorch's cross-entropy or negative log-likelihood; else None."""
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return loss.ignore_index, loss.weight
    options: dict[str, Any] = {}
    while isinstance(loss, partial) and not loss.args:
        loss, options = loss.func, {**loss.keywords, **options}
    if loss in (F.cross_entropy, F.nll_loss):
        return options.get("ignore_index", IGNORED), options.get("weight")
    return None


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
    """(B,) how many terms of the mean each sample brings to cross-entropy or negative log-likelihood.

    These leave out targets equal to ``ignore_index``, and weigh the others where there are class weights.
    None for any other loss, or targets that are not class indices.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() == 0:
        return None
    known = class_loss(loss)
    if known is None:
        return None
    ignored, weight = known
    terms = (targets != ignored).double()
    if weight is not None:
        terms *= weight.to(targets.device)[targets.where(terms > 0, torch.zeros_like(targets))]
    return terms.flatten(1).sum(1) if terms.dim() > 1 else terms


def check_labels(loss: Any, outputs: Any, targets: Any) -> None:
    """Raise InputError if cross-entropy or negative log-likelihood is given a label that is no class.

    PyTorch would say so at the first minibatch that holds it, and on a GPU only that some check has failed.
    """
    terms = loss_terms(loss, targets)
    if terms is None or not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    known = class_loss(loss)
    assert known is not None
    ignored = known[0]
    kept, classes = targets[targets != ignored], outputs.shape[1]
    if len(kept) and not 0 <= int(kept.min()) <= int(kept.max()) < classes:
        raise InputError(
            f"data: its labels go from {int(kept.min())} to {int(kept.max())}, but the model has {classes} "
            f"outputs, so that 0…{classes - 1} are allowed"
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


def correct(outputs: Any, targets: Any, loss: Any) -> Tensor:
    """How many of (B, classes, ...) ``outputs`` have their largest entry at the target (B, ...).

    Of an output that carries ``logits``, of these. A sample with several targets counts by the share that is
    right, and only where the loss is PyTorch's cross-entropy or negative log-likelihood, which say that the
    classes come second. NaN if it is not such a task, if there is one output alone, which no other can
    exceed, or if some targets are no classes, as those that a negative number masks.
    """
    z = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(z, Tensor) or not _classes(targets):
        return torch.tensor(torch.nan, dtype=torch.float64)
    if z.dim() < 2 or z.shape[1] < 2 or targets.shape != (len(z), *z.shape[2:]):
        return torch.tensor(torch.nan, dtype=torch.float64)
    if z.dim() > 2 and class_loss(loss) is None:
        return torch.tensor(torch.nan, dtype=torch.float64)
    right: Tensor = (z.argmax(1) == targets).double().sum() / max(1, targets[:1].numel())
    return right.where(((targets >= 0) & (targets < z.shape[1])).all(), torch.nan)


def _classes(targets: Any) -> bool:
    """Whether ``targets`` can be numbers of classes."""
    return isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex()


class Stream(ABC):
    """Samples too many to lie on the device, each of which can be fetched when it is used.

    Iterating gives batches (x, y) of all ``samples``, each once, always in the same order.
    """

    samples: int

    @abstractmethod
    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """(x, y) of the samples ``indices`` (B,), repeats allowed."""

    @abstractmethod
    def part(self, rows: slice) -> Stream:
        """The stream of those samples alone."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for indices in torch.split(torch.arange(self.samples), STREAM_BATCH):
            yield self.gather(indices)


@dataclass(frozen=True)
class HostStream(Stream):
    """A stream of ``x`` and ``y`` (tensors, or what holds them) in host memory."""

    x: Any
    y: Any
    samples: int

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        return take(self.x, indices), take(self.y, indices)

    def part(self, rows: slice) -> Stream:
        return HostStream(take(self.x, rows), take(self.y, rows), len(range(self.samples)[rows]))


class _Placed(Protocol):
    device: torch.device


@contextlib.contextmanager
def fixed_randomness(problem: _Placed, seed: int | None) -> Iterator[None]:
    """Random numbers drawn inside come from ``seed``, and PyTorch's own state is as before afterwards.

    None leaves everything as it is.
    """
    if seed is None:
        yield
        return
    devices = [problem.device] if problem.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes as long as a small network's pass
        if devices:
            torch.cuda.manual_seed(seed)
        yield
