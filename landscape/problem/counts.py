"""How many terms a sample contributes to the mean of a loss: counts of targets, or of a mask beside them.

The loss of any samples is the mean of the losses of the parts that they consist of, weighted by the terms of
each. Such equations tell which count is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError
from landscape.problem.batches import attempt, concatenate, count_samples, named_tensors, tree_map
from landscape.problem.data import notable
from landscape.problem.losses import by_sample

# The share of a batch's terms by which two counts may differ and are one (our choice: weights are rounded).
ALIKE = 1e-7
# Classes whose weights are sought (our choice).
MAX_CLASSES = 64
# Weights of classes below this share of the largest are zero (our choice: they come from differences of
# losses).
ZERO = 1e-5
# Our choices: weights of classes are orthogonal to equations within LIMIT times the rounding of these. What
# these say of one class is rounding below the share LEAST of what they say of others. They determine none
# where another combination of the classes has a singular value below SINGULAR, a share of the largest.
LIMIT, LEAST, SINGULAR = 1e3, 1e-7, 1e-3

# Targets whole, and without the first or last of each sequence, as code and index.
CUTS: dict[str, tuple[slice, ...]] = {
    "": (),
    "[:, 1:]": (slice(None), slice(1, None)),
    "[:, :-1]": (slice(None), slice(-1)),
}


class Samples(NamedTuple):
    """Some samples: inputs, targets, and the outputs where the loss is taken of these (else None)."""

    outputs: Any
    x: Any
    y: Any

    @property
    def size(self) -> int:
        """The number of samples."""
        return count_samples(self.x, self.y, alike=False)

    @property
    def ends(self) -> Sequence[int]:
        """The ends of all parts of an equation but the last: of few samples, each is a part."""
        return (2, 5) if self.size > 5 else range(1, self.size)

    @property
    def numbers(self) -> int:
        """How many numbers they are."""
        return sum(t.numel() for _, t in named_tensors(self))

    def on(self, device: Any) -> Samples:
        """The same on ``device``."""
        return Samples(*tree_map(lambda t: t.to(device), self))

    def rows(self, index: Any) -> Samples:
        """The samples ``index``, a slice or a list."""
        return Samples(*tree_map(lambda t: t[index] if t.dim() else t, self))

    def opposite(self) -> Samples:
        """The samples with outputs of the other sign."""
        return self._replace(outputs=tree_map(lambda t: -t if t.is_floating_point() else t, self.outputs))

    def along(self, length: int, part: slice) -> Samples:
        """The ``part`` of each sample along the dimension of this ``length``, where a tensor has one."""

        def cut(tensor: Tensor) -> Tensor:
            dims = [d for d in range(1, tensor.dim()) if tensor.shape[d] == length]
            return tensor[(slice(None),) * dims[0] + (part,)] if dims else tensor

        return Samples(tree_map(cut, self.outputs), None, tree_map(cut, self.y))

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """All samples of ``parts``. ValueError for samples of different shapes.

        A number of each part, as the loss that a model returns beside its outputs, becomes a row of them.
        """
        rows = [tree_map(lambda t: t if t.dim() else t[None], part) for part in parts]
        try:
            return cls(*concatenate(rows))
        except LandscapeError as error:
            raise ValueError(str(error)) from error

    def cropped(self, other: Samples) -> Samples:
        """The samples, each tensor cut to the shape that those of ``other`` have, too."""
        sizes = {}
        for (_, t), (_, o) in zip(named_tensors(self), named_tensors(other), strict=True):
            sizes[id(t)] = [slice(min(n)) for n in zip(t.shape[1:], o.shape[1:], strict=True)]
        return Samples(*tree_map(lambda t: t[(slice(None), *sizes[id(t)])] if t.dim() else t, self))


@dataclass(frozen=True)
class Equation:
    """The loss of some samples of batch number ``batch``, and of the parts that they consist of.

    ``rounding``: the relative difference that counts as none. ``error``: the absolute one, of random losses.
    """

    batch: int
    whole: float
    parts: list[tuple[float, Samples]]
    rounding: float
    error: float = 0.0

    def weights(self, count: Callable[[Any, Any], Tensor]) -> list[float]:
        """The terms of each part."""
        return [float(count(part.x, part.y).sum()) for _, part in self.parts]

    def without_outputs(self) -> Equation:
        """The same for counts, which need the targets only."""
        parts = [(value, Samples(None, part.x, part.y)) for value, part in self.parts]
        return dataclasses.replace(self, parts=parts)

    @property
    def losses(self) -> Tensor:
        """(1 + parts,) float64: the losses of the whole and of the parts."""
        return torch.tensor([self.whole, *(value for value, _ in self.parts)], dtype=torch.float64)

    def equals(self, other: Equation) -> bool:
        """Return whether both have the same losses, within the rounding of ``other``."""
        limit = other.rounding * float(other.losses.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return torch.allclose(self.losses, other.losses, rtol=0, atol=limit, equal_nan=True)

    def of_sum(self) -> bool:
        """Return whether the loss of the whole is the sum of those of the parts, and not zero."""
        total, largest = float(self.losses[1:].sum()), float(self.losses.abs().max())
        return bool(self.whole) and abs(total - self.whole) <= self.rounding * largest + self.error

    def combines_by(self, count: Callable[[Any, Any], Tensor], share: float = 1.0) -> bool:
        """Return whether the losses of the parts combine to the whole one by ``count``.

        Parts without a term must not matter. ``share``: of the difference that counts as rounding.
        """
        weights = self.weights(count)
        pairs = [(value, weight) for (value, _), weight in zip(self.parts, weights, strict=True) if weight]
        total = sum(weights)
        if not total > 0 or not min(weights) >= 0:
            return not any(weights) and (math.isnan(self.whole) or not self.whole)
        if math.isinf(self.whole) and any(math.isinf(value) for value, _ in pairs):
            return True  # which says nothing
        difference = sum(value * weight for value, weight in pairs) / total - self.whole
        largest = max(abs(self.whole), *(abs(value) for value, _ in pairs))
        return abs(difference) <= share * self.rounding * largest + self.error  # False for NaN


@dataclass(frozen=True)
class Count:
    """``count(x, y)`` -> (B,), with the code that says the same.

    They are the sums by sample of what a function of :data:`FUNCTIONS` gives of a tensor in the targets, or
    the inputs. It is made of numbers and texts, which ranks of torch.distributed may exchange.

    Attributes:
        code: what it counts.
        number: of the tensor.
        cut: what is left out of it, a key of :data:`CUTS`.
        function: its name.
        value: the argument of the function, if it has one.
        of_inputs: the tensor is one of the inputs.
    """

    code: str
    number: int
    cut: str
    function: str
    value: Any = None
    of_inputs: bool = False

    def __call__(self, x: Any, y: Any) -> Tensor:
        tensor = list(named_tensors(x if self.of_inputs else y))[self.number][1][CUTS[self.cut]]
        argument = () if self.value is None else (self.value,)
        return double(by_sample(FUNCTIONS[self.function](tensor, *argument)))

    def left(self, targets: Tensor) -> Tensor:
        """Whether each of the ``targets`` counts; all do where the count is not one of these alone."""
        alone = self.function in ("other than", "above", "from") and not (self.of_inputs or self.cut)
        return FUNCTIONS[self.function if alone else "all"](targets, *[self.value] * alone).bool()


def _parts(tree: Any, name: str) -> Iterator[tuple[str, int, str, Tensor]]:
    """The tensors of ``tree`` with code, number and cut: whole, and without an end of each sequence."""
    for number, (code, tensor) in enumerate(named_tensors(tree, name)):
        if tensor.dim() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
            continue
        for cut, index in CUTS.items():
            if cut and (tensor.dim() == 1 or tensor.shape[1] == 1):
                break
            yield code + cut, number, cut, tensor[index]


def _tests(name: str, tensor: Tensor) -> Iterator[tuple[str, str, float | None]]:
    """Counts of targets that may be meant, as code, function and value: not left out, masks, weights."""
    if tensor.dim() > 1:
        yield f"torch.ones_like({name})", "all", None
    if tensor.dtype == torch.bool:
        yield name, "numbers", None
        yield f"~{name}", "not", None
        return
    if tensor.is_floating_point():
        yield f"{name}.isfinite()", "finite", None
    for value in notable(tensor):
        yield f"{name} != {value:g}", "other than", value
    yield f"{name} > 0", "above", 0.0
    yield f"{name} >= 0", "from", 0.0
    if bool((tensor >= 0).all()):  # a mask, weights or lengths
        yield name, "numbers", None


def _class_terms(tensor: Tensor, weights: dict[int, float]) -> Tensor:
    """The sums by sample of the weights of the targets' classes."""
    weighted = torch.isin(tensor, torch.tensor([*weights]).to(tensor))
    if not bool(weighted.all()):
        raise InputError(f"data: the weight of class {int(tensor[~weighted][0])} is unknown; give terms=")
    return sum((w * double(by_sample(tensor == c)) for c, w in weights.items()), torch.zeros(()))


# The functions of counts, of a tensor (B, …) and a value.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "numbers": torch.clone,
    "not": torch.logical_not,
    "finite": torch.isfinite,
    "other than": torch.ne,
    "above": torch.gt,
    "from": torch.ge,
    "all": torch.ones_like,
    "one each": lambda t: torch.ones(len(t)),
    "classes": _class_terms,
}


def candidates(x: Any, y: Any) -> Iterator[Count]:
    """The standard counts of samples like these: targets not left out, masks, weights, all targets."""
    for tree, letter in ((y, "y"), (x, "x")):
        for name, number, cut, tensor in _parts(tree, letter):
            if letter == "x" and tensor.is_floating_point() and bool(((tensor != 0) & (tensor != 1)).any()):
                continue  # no mask
            for test, function, value in _tests(name, tensor):
                code = f"({test}).flatten(1).sum(1)" if tensor.dim() > 1 else test
                yield Count(f"lambda {letter}: {code}", number, cut, function, value, letter == "x")


def class_counts(equations: Iterable[Equation], sure: bool = True, gather: Any = None) -> list[Count]:
    """Weights by class of the targets, by which the equations hold.

    The terms of a part are its numbers n of targets of each class times the weights w of the classes, and an
    equation of losses L is Σ (L_part − L_whole) n · w = 0: the weights are orthogonal to all equations.
    ``sure``: without weights that the equations do not determine. ``gather`` gives what all ranks of
    torch.distributed give it.
    """
    rows: dict[tuple[str, int, str], list[dict[int, float]]] = {}
    limit = 0.0
    own_rows = [(e.rounding, _rows(e)) for e in equations if math.isfinite(e.whole)]
    for rounding, by_tensor in itertools.chain.from_iterable(gather(own_rows) if gather else [own_rows]):
        limit = max(limit, LIMIT * rounding)
        for key, row in by_tensor.items():
            rows.setdefault(key, []).append(row)
    counts = []
    for (name, number, cut), every in rows.items():
        classes = sorted({c for row in every for c in row})
        if len(classes) > MAX_CLASSES:
            continue
        system = torch.tensor([[row.get(c, 0.0) for c in classes] for row in every], dtype=torch.float64)
        counted = system.isfinite().all(0)
        if counted.sum() > 1 or not sure:
            weights = torch.zeros(len(classes), dtype=torch.float64)
            if len(classes) > 1 and bool(counted.any()):  # a class alone tells nothing of its weight
                weights[counted] = _orthogonal(system[:, counted], limit, sure)
            if bool(weights.isfinite().all()):
                by_class = dict(zip(classes, weights.tolist(), strict=True))
                listed = ", ".join(f"{c}: {w:.4g}" for c, w in by_class.items())
                code = f"the weights of the classes of {name}, {{{listed}}}"
                counts.append(Count(code, number, cut, "classes", by_class))
    return counts


def _rows(equation: Equation) -> dict[tuple[str, int, str], dict[int, float]]:
    """By tensor of the targets: class -> Σ (L_part − L_whole) n, NaN for a part that does not count."""
    rows: dict[tuple[str, int, str], dict[int, float]] = {}
    for value, part in equation.parts:
        for name, number, cut, tensor in _parts(part.y, "y"):
            if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                row = rows.setdefault((name, number, cut), {})
                classes, numbers = torch.unique(tensor, return_counts=True)
                for c, n in zip(classes[: MAX_CLASSES + 1].tolist(), numbers.tolist(), strict=False):
                    row[c] = row.get(c, 0.0) + n * (value - equation.whole)
    return rows


def _orthogonal(system: Tensor, limit: float, sure: bool) -> Tensor:
    """The vector orthogonal to all rows of ``system``, its largest number 1; NaN if there is none.

    ``sure``: NaN if something else is, too, if the rows are no more than determine it, and if it is negative.
    """
    scale = system.norm(dim=0)
    scale[scale <= LEAST * scale.max()] = torch.inf
    squares, directions = torch.linalg.eigh((system / scale).T @ (system / scale))
    singular = (squares / squares[-1]).clamp(min=0.0).sqrt()
    weights = directions[:, 0] / scale
    weights = weights / weights[weights.abs().argmax()]
    weights[weights.abs() < ZERO] = 0.0
    several = len((system / scale / SINGULAR**2).round().unique(dim=0)) >= len(scale)
    determined = not sure or (several and singular[1] > SINGULAR and bool((weights >= 0).all()))
    return weights if singular[0] <= limit and determined else torch.full_like(weights, torch.nan)


# The count of every loss that is a mean over its samples.
ONES = Count("lambda y: torch.ones(len(y))", 0, "", "one each")


def that_hold(counts: Iterable[Count], equations: Sequence[Equation]) -> list[Count]:
    """The ``counts`` by which all ``equations`` hold."""

    def hold(count: Count) -> bool:
        with contextlib.suppress(InputError):  # a class without a weight
            return all(equation.combines_by(count) for equation in equations)
        return False

    return [count for count in counts if attempt(hold, count)]


def unlike(totals: Tensor) -> list[int]:
    """The two batches that counts weigh most differently, by ``totals`` (batches, counts); [] if none are."""
    shares = totals / totals.sum(0).clamp(min=1e-300)
    differences = shares - shares[:, :1]
    if not differences.abs().max() > ALIKE / len(totals):
        return []
    worst = differences[:, differences.abs().amax(0).argmax()]
    return [int(worst.argmin()), int(worst.argmax())]


def only(counts: Sequence[Count], totals: Tensor) -> Count:
    """The first of ``counts``, where all weigh the batches alike, or the one that is a mean over samples.

    ``totals`` (batches, counts): the terms of each batch. Raises InputError where no target counts, or the
    counts weigh batches differently.
    """
    if not bool(totals.any()):
        raise InputError("data: all its targets are left out of the loss, or it is NaN; one must count")
    if counts[0] == ONES or not unlike(totals):
        return counts[0]
    codes = " or terms=".join(count.code for count in counts[:3])
    raise InputError(f"loss: its terms may be counted in several ways; give the right one, as terms={codes}")
