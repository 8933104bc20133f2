"""Batches of any structure: tensors in nested tuples, lists and dicts, with the samples first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from landscape.options import InputError

# What PyTorch and Hugging Face mark targets with that the loss leaves out.
IGNORED = -100


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

    It is where it is a dict, a tuple of two, or a list of two tensors.
    """
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    return isinstance(data, Mapping) or (
        pair and (isinstance(data, tuple) or all(isinstance(part, Tensor) for part in data))
    )


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
    if not found or found[0][1].dim() == 0:
        what = "no tensor" if not found else f"a single number as {found[0][0]}"
        raise InputError(f"data: a batch holds {what}, it must hold tensors with the samples first")
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


def loss_terms(loss: Any, targets: Any) -> Tensor | None:
    """(B,) how many terms of the mean each sample brings to cross-entropy or negative log-likelihood.

    These leave out targets equal to ``ignore_index``, and weigh the others where there are class weights.
    None for any other loss, or targets that are not class indices.
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() == 0:
        return None
    if loss in (F.cross_entropy, F.nll_loss):
        ignored, weight = IGNORED, None
    elif isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        ignored, weight = loss.ignore_index, loss.weight
    else:
        return None
    terms = (targets != ignored).double()
    if weight is not None:
        terms *= weight.to(targets.device)[targets.where(terms > 0, torch.zeros_like(targets))]
    return terms.flatten(1).sum(1) if terms.dim() > 1 else terms


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
