"""Counts of targets: how many terms of a mean each sample may contribute, as losses commonly count them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.problem.batches import named_tensors

# Targets that losses leave out: padding, PyTorch's and Hugging Face's default, masks of segmentations.
LEFT_OUT = (0, -100, -1, 255)
# Classes whose weights are sought, and samples for each of them (ours).
MAX_CLASSES, SAMPLES_A_CLASS = 64, 3
# Weights of classes below this share of the largest are zero: they come from differences of losses (ours).
ZERO = 1e-5


@dataclass(frozen=True)
class Count:
    """``terms(targets)`` -> (B,), with the code that says the same, which is how it prints."""

    code: str
    function: Callable[[Any], Tensor]

    def __call__(self, targets: Any) -> Tensor:
        return self.function(targets).double()

    def __repr__(self) -> str:
        return self.code


Getter = Callable[[Any], Tensor]


class Losses(Protocol):
    """The losses of sets of samples, by their numbers, and the targets of all."""

    @property
    def targets(self) -> Any:
        """The targets of all samples."""

    def loss(self, rows: Sequence[int]) -> float:
        """The loss of some samples."""


def by_sample(tensor: Tensor) -> Tensor:
    """(B,) the sums of a tensor (B, ...) by sample."""
    return tensor.flatten(1).sum(1) if tensor.dim() > 1 else tensor


def _parts(targets: Any) -> Iterator[tuple[str, Getter, Tensor]]:
    """The tensors of ``targets`` with their code, whole, and without the first or last of each sequence."""
    for i, (name, tensor) in enumerate(named_tensors(targets, "y")):

        def get(tree: Any, i: int = i) -> Tensor:
            return list(named_tensors(tree))[i][1]

        if tensor.dim() == 0 or tensor.is_complex():
            continue
        yield name, get, tensor
        if tensor.dim() > 1 and tensor.shape[1] > 1:
            for code, part in (("1:", slice(1, None)), (":-1", slice(-1))):

                def some(tree: Any, get: Getter = get, part: slice = part) -> Tensor:
                    return get(tree)[:, part]

                yield f"{name}[:, {code}]", some, tensor[:, part]


def candidates(targets: Any) -> Iterator[Count]:
    """The standard counts of targets like these: those that are not left out, sums of masks and weights."""
    for name, get, tensor in _parts(targets):
        summed = ".flatten(1).sum(1)" if tensor.dim() > 1 else ""

        def count(
            test: str, function: Callable[[Tensor], Tensor], get: Any = get, summed: str = summed
        ) -> Count:
            code = f"({test}){summed}" if summed else test
            return Count(f"lambda y: {code}", lambda tree: by_sample(function(get(tree))))

        if tensor.dtype == torch.bool:
            yield count(name, lambda t: t)
            yield count(f"~{name}", lambda t: ~t)
            continue
        for value in notable(tensor):
            yield count(f"{name} != {value:g}", functools.partial(torch.ne, other=value))
        yield count(f"{name} > 0", lambda t: t > 0)
        yield count(f"{name} >= 0", lambda t: t >= 0)
        if tensor.is_floating_point():
            yield count(f"~{name}.isnan()", lambda t: ~t.isnan())
        if bool((tensor >= 0).all()):  # a mask, weights or lengths
            yield count(name, lambda t: t)


def notable(targets: Tensor) -> list[float]:
    """The values among targets that a loss may leave out: the usual ones; of integers the extremes, and what
    sequences end with.
    """
    values = [*map(float, LEFT_OUT)]
    if targets.numel() and not targets.is_floating_point():
        values += [float(targets.min()), float(targets.max())]
        if targets.dim() > 1:
            values.append(float(targets.flatten(1)[:, -1].mode().values))
    return [v for v in dict.fromkeys(values) if bool((targets == v).any())]


def samples_apart(counts: Sequence[Count], targets: Any) -> list[int]:
    """Two samples whose terms have another ratio by one of ``counts`` than by the first; [] if none have."""
    first = counts[0](targets)
    for other in counts[1:]:
        second = other(targets)
        both = first / first.sum() - second / second.sum()
        if bool((both.abs() > 1e-9 * (first / first.sum()).max()).any()):
            return [int(both.argmin()), int(both.argmax())]
    return []


def revealed(losses: Losses) -> list[Count]:
    """Weights by class of the targets, as the losses of pairs of samples reveal them.

    With L(a, b) the loss of both, w_b/w_a = (L(a, b) − L(a))/(L(b) − L(a, b)), for the terms w of the samples
    a and b; they are sums of the weights of their targets' classes.
    """
    found = []
    for name, get, tensor in _parts(losses.targets):
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            continue
        classes = torch.unique(tensor).tolist()
        if not 2 <= len(classes) <= MAX_CLASSES:
            continue
        weights = _class_weights(
            losses, torch.stack([by_sample(tensor == c) for c in classes], 1).double().cpu()
        )
        if weights is not None:
            found.append(_weighted(name, get, dict(zip(classes, weights, strict=True))))
    return found


def _class_weights(losses: Losses, numbers: Tensor) -> list[float] | None:
    """The weight of each class, the largest 1, from ``numbers`` (N, classes) of targets; None if unknown."""
    classes = numbers.shape[1]
    shares = numbers / numbers.sum(1, keepdim=True).clamp(min=1)
    rows = [
        row
        for c in range(classes)
        for row in shares[:, c].topk(min(SAMPLES_A_CLASS, len(shares))).indices.tolist()
    ]
    rows = list(dict.fromkeys(rows))
    alone = {row: losses.loss([row]) for row in rows}
    finite = [row for row in rows if math.isfinite(alone[row])]
    if not finite:
        return None
    first = min(finite, key=lambda row: alone[row])
    used, terms = [first], [1.0]
    for row in rows:
        both = losses.loss([first, row]) if row != first else math.nan
        apart = alone[row] - both
        if math.isfinite(both) and not math.isfinite(alone[row]):
            used, terms = [*used, row], [*terms, 0.0]  # nothing of it counts
        elif math.isfinite(both) and abs(alone[row] - alone[first]) > 0.01 * abs(alone[row]) and apart:
            used, terms = [*used, row], [*terms, (both - alone[first]) / apart]
    system = numbers[used]
    if int(torch.linalg.matrix_rank(system)) < classes:
        return None
    weights = torch.linalg.lstsq(system, torch.tensor(terms, dtype=torch.float64)[:, None]).solution[:, 0]
    weights /= weights.abs().max()
    weights[weights.abs() < ZERO] = 0.0
    return None if bool((weights < 0).any()) else weights.tolist()


def _weighted(name: str, get: Callable[[Any], Tensor], weights: dict[int, float]) -> Count:
    """The sums of the weights of the targets' classes."""

    def terms(targets: Any) -> Tensor:
        tensor = get(targets)
        known = sum(((tensor == c) for c in weights), torch.zeros_like(tensor, dtype=torch.bool))
        if not bool(known.all()):
            raise InputError(
                f"data: {name} has the class {int(tensor[~known][0])}, which the first samples do not have, "
                "so that its weight in the loss is not known; give terms=, the sum of each sample's weights"
            )
        return sum((w * by_sample(tensor == c).double() for c, w in weights.items()), torch.zeros(()))

    listed = ", ".join(f"{c}: {w:.4g}" for c, w in weights.items())
    return Count(f"the weights of the classes of {name}, {{{listed}}}", terms)
