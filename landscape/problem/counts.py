"""Counts of the terms that a sample contributes to the mean of a loss: of its targets, or of a mask.

The loss of some samples is the mean of the losses of their parts, weighted by the terms of each part. Such
equations between losses show which count is right.
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

# The largest difference of two counts of a batch, relative to its terms, that is rounding (our choice).
ALIKE = 1e-7
# The most classes whose weights are determined (our choice).
MAX_CLASSES = 64
# Weights of classes below this share of the largest are zero (our choice: they come from differences of
# losses).
ZERO = 1e-5
# Limits for weights of classes (our choices): they are orthogonal to the equations within LIMIT times the
# rounding of these. A class whose column has less than the share LEAST of the largest column's norm is not
# determined. No weights are determined if the second smallest singular value is below the share SINGULAR of
# the largest.
LIMIT, LEAST, SINGULAR = 1e3, 1e-7, 1e-3

# All targets, or those without the first or the last of each sequence: code -> index.
CUTS: dict[str, tuple[slice, ...]] = {
    "": (),
    "[:, 1:]": (slice(None), slice(1, None)),
    "[:, :-1]": (slice(None), slice(-1)),
}


# A tensor of the targets: its code, its number among the targets, and one of CUTS.
Key = tuple[str, int, str]


class Samples(NamedTuple):
    """Some samples: outputs (None if the loss is computed by passes of the model), inputs and targets."""

    outputs: Any
    x: Any
    y: Any

    @property
    def size(self) -> int:
        """The number of samples."""
        return count_samples(self.x, self.y)

    @property
    def ends(self) -> Sequence[int]:
        """The ends of the parts of an equation, except the last; of up to 5 samples, each is a part."""
        return (2, 5) if self.size > 5 else range(1, self.size)

    @property
    def numbers(self) -> int:
        """The number of numbers in all tensors."""
        return sum(t.numel() for _, t in named_tensors(self))

    def on(self, device: Any) -> Samples:
        """Return the samples on ``device``."""
        return Samples(*tree_map(lambda t: t.to(device), self))

    def rows(self, index: Any) -> Samples:
        """Return the samples ``index``, a slice or a list."""
        return Samples(*tree_map(lambda t: t[index] if t.dim() else t, self))

    def opposite(self) -> Samples:
        """Return the samples with outputs of the other sign."""
        return self._replace(outputs=tree_map(lambda t: -t if t.is_floating_point() else t, self.outputs))

    def along(self, length: int, part: slice) -> Samples:
        """Return a part of each sample: the slice ``part`` of a tensor's first axis of this ``length``."""

        def cut(tensor: Tensor) -> Tensor:
            dims = [d for d in range(1, tensor.dim()) if tensor.shape[d] == length]
            return tensor[(slice(None),) * dims[0] + (part,)] if dims else tensor

        return Samples(tree_map(cut, self.outputs), None, tree_map(cut, self.y))

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """Return all samples of ``parts``; raise ValueError if samples differ in shape.

        Tensors without dimensions, such as a loss among the outputs, are joined to one with a number for each
        part.
        """
        rows = [tree_map(lambda t: t if t.dim() else t[None], part) for part in parts]
        try:
            return cls(*concatenate(rows))
        except LandscapeError as error:
            raise ValueError(str(error)) from error

    def cropped(self, other: Samples) -> Samples:
        """Return the samples, with each axis of a tensor cut to its length in ``other`` if that is less."""
        slices = {}
        for (_, t), (_, other_t) in zip(named_tensors(self), named_tensors(other), strict=True):
            slices[id(t)] = [slice(min(n)) for n in zip(t.shape[1:], other_t.shape[1:], strict=True)]
        return Samples(*tree_map(lambda t: t[(slice(None), *slices[id(t)])] if t.dim() else t, self))


@dataclass(frozen=True)
class Equation:
    """The loss of some samples, and the losses of the parts into which they are divided.

    Attributes:
        whole: the loss of all samples.
        parts: the loss of each part, and the part.
        rounding: the largest relative difference of losses that is rounding.
        error: the largest absolute difference of losses by their random numbers.
    """

    whole: float
    parts: list[tuple[float, Samples]]
    rounding: float
    error: float = 0.0

    def weights(self, count: Callable[[Any, Any], Tensor]) -> list[float]:
        """Return the number of terms of each part."""
        return [float(count(part.x, part.y).sum()) for _, part in self.parts]

    def without_outputs(self) -> Equation:
        """Return the equation without outputs, which counts do not need."""
        parts = [(value, Samples(None, part.x, part.y)) for value, part in self.parts]
        return dataclasses.replace(self, parts=parts)

    @property
    def losses(self) -> Tensor:
        """(1 + parts,) float64: the loss of all samples, then those of the parts."""
        return torch.tensor([self.whole, *(value for value, _ in self.parts)], dtype=torch.float64)

    def equals(self, other: Equation) -> bool:
        """Return whether both have the same losses, within the rounding of ``other``."""
        limit = other.rounding * float(other.losses.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return torch.allclose(self.losses, other.losses, rtol=0, atol=limit, equal_nan=True)

    def of_sum(self) -> bool:
        """Return whether the loss of all samples is the sum of the losses of the parts, and not zero."""
        total, largest = float(self.losses[1:].sum()), float(self.losses.abs().max())
        return bool(self.whole) and abs(total - self.whole) <= self.rounding * largest + self.error

    def combines_by(self, count: Callable[[Any, Any], Tensor], share: float = 1.0) -> bool:
        """Return whether the mean of the parts' losses, weighted by ``count``, is the loss of all samples.

        Parts without a term are left out. The allowed difference is ``share`` times the rounding.
        """
        weights = self.weights(count)
        pairs = [(value, weight) for (value, _), weight in zip(self.parts, weights, strict=True) if weight]
        total = sum(weights)
        if not total > 0 or not min(weights) >= 0:
            return not any(weights) and (math.isnan(self.whole) or not self.whole)
        if math.isinf(self.whole) and any(math.isinf(value) for value, _ in pairs):
            return True  # infinite losses agree with every count
        difference = sum(value * weight for value, weight in pairs) / total - self.whole
        largest = max(abs(self.whole), *(abs(value) for value, _ in pairs))
        return abs(difference) <= share * self.rounding * largest + self.error  # False for NaN


@dataclass(frozen=True)
class Count:
    """A function ``count(x, y)`` that returns (B,), the number of terms of each sample.

    It applies one of :data:`FUNCTIONS` to a tensor of the targets or inputs, and sums by sample. Its fields
    are numbers and texts, which ranks of torch.distributed can exchange.

    Attributes:
        code: the same function as code, for messages.
        number: the number of the tensor among those of the targets or inputs.
        cut: the part of each sequence that counts, a key of :data:`CUTS`.
        function: a key of :data:`FUNCTIONS`.
        value: the function's second argument; None if it has none.
        of_inputs: whether the tensor is one of the inputs.
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
        """Return whether each of ``targets`` counts; all do if the count depends on more than these."""
        alone = self.function in ("other than", "above", "from") and not (self.of_inputs or self.cut)
        return FUNCTIONS[self.function if alone else "all"](targets, *[self.value] * alone).bool()


def _parts(tree: Any, name: str) -> Iterator[tuple[str, int, str, Tensor]]:
    """Yield (code, number, cut, tensor) for each tensor of ``tree`` and each of its :data:`CUTS`."""
    for number, (code, tensor) in enumerate(named_tensors(tree, name)):
        if tensor.dim() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
            continue
        for cut, index in CUTS.items():
            if cut and (tensor.dim() == 1 or tensor.shape[1] == 1):
                break
            yield code + cut, number, cut, tensor[index]


def _tests(name: str, tensor: Tensor) -> Iterator[tuple[str, str, float | None]]:
    """Yield (code, function, value) of the usual counts of a tensor: of its values, or as mask or weights."""
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
    if bool((tensor >= 0).all()):  # it may be a mask, weights or lengths
        yield name, "numbers", None


def _class_terms(tensor: Tensor, weights: dict[int, float]) -> Tensor:
    """Return (B,), the sum of the weights of a sample's classes; raise InputError for an unknown class."""
    is_known = torch.isin(tensor, torch.tensor([*weights]).to(tensor))
    if not bool(is_known.all()):
        raise InputError(f"data: the weight of class {int(tensor[~is_known][0])} is unknown; give terms=")
    return sum((w * double(by_sample(tensor == c)) for c, w in weights.items()), torch.zeros(()))


# The functions of counts, by name: of a tensor (B, …), and some of a value.
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
    """Yield the usual counts of samples like these: of targets with some values, of masks, of weights."""
    for tree, letter in ((y, "y"), (x, "x")):
        for name, number, cut, tensor in _parts(tree, letter):
            if letter == "x" and tensor.is_floating_point() and bool(((tensor != 0) & (tensor != 1)).any()):
                continue  # among the inputs, only integers and masks of 0 and 1 may count
            for test, function, value in _tests(name, tensor):
                code = f"({test}).flatten(1).sum(1)" if tensor.dim() > 1 else test
                yield Count(f"lambda {letter}: {code}", number, cut, function, value, letter == "x")


def class_counts(
    equations: Iterable[Equation], only_determined: bool = True, gather: Any = None
) -> list[Count]:
    """Return the counts by weights of classes with which all ``equations`` hold.

    There is at most one for each tensor of the targets. If class c has the weight w_c, a part with n_c
    targets of class c has Σ_c n_c w_c terms. The equation of a loss L is then Σ_c r_c w_c = 0, with
    r_c = Σ_part (L_part − L_whole) n_c. So the vector of weights is orthogonal to the row r of each equation.

    Args:
        equations: the equations.
        only_determined: True: the equations must determine the weights. False: they must hold with some
            weights.
        gather: returns the list of its arguments on all ranks of torch.distributed; None: a single rank.
    """
    # For each equation of this rank: its rounding, and its row for each tensor of the targets, by Key.
    rank_rows = [(e.rounding, _rows(e)) for e in equations if math.isfinite(e.whole)]
    rows_of_all_ranks = gather(rank_rows) if gather else [rank_rows]
    rows: dict[Key, list[dict[int, float]]] = {}  # of all equations; a row is a dict by class
    zero_limit = 0.0  # singular values of the rows count as zero up to this share of the largest one
    for rounding, row_by_key in itertools.chain.from_iterable(rows_of_all_ranks):
        zero_limit = max(zero_limit, LIMIT * rounding)
        for key, row in row_by_key.items():
            rows.setdefault(key, []).append(row)
    counts = []
    for (tensor_code, number, cut), tensor_rows in rows.items():  # see Key
        classes = sorted({c for row in tensor_rows for c in row})
        if len(classes) > MAX_CLASSES:
            continue
        matrix = [[row.get(c, 0.0) for c in classes] for row in tensor_rows]
        system = torch.tensor(matrix, dtype=torch.float64)  # (equations, classes)
        # A class in a part without a finite loss has the weight 0.
        is_counted = system.isfinite().all(0)
        if only_determined and is_counted.sum() <= 1:
            continue
        # Classes that are not counted keep the weight 0, and so does a single class: all equations hold then.
        weights = torch.zeros(len(classes), dtype=torch.float64)
        if len(classes) > 1 and bool(is_counted.any()):
            # NaN if no weights make all equations hold.
            weights[is_counted] = _orthogonal(system[:, is_counted], zero_limit, only_determined)
        if bool(weights.isfinite().all()):
            by_class = dict(zip(classes, weights.tolist(), strict=True))
            texts = ", ".join(f"{c}: {w:.4g}" for c, w in by_class.items())
            code = f"the weights of the classes of {tensor_code}, {{{texts}}}"
            counts.append(Count(code, number, cut, "classes", by_class))
    return counts


def _rows(equation: Equation) -> dict[Key, dict[int, float]]:
    """Return Σ_part (L_part − L_whole) n_c by tensor of the targets and by class c.

    A sum is not finite if the loss of one of its parts is not.
    """
    rows: dict[Key, dict[int, float]] = {}
    for loss, part in equation.parts:
        for name, number, cut, tensor in _parts(part.y, "y"):
            if not tensor.is_floating_point() and tensor.dtype != torch.bool:
                row = rows.setdefault((name, number, cut), {})
                classes, numbers = torch.unique(tensor, return_counts=True)
                for c, n in zip(classes[: MAX_CLASSES + 1].tolist(), numbers.tolist(), strict=False):
                    row[c] = row.get(c, 0.0) + n * (loss - equation.whole)
    return rows


def _orthogonal(system: Tensor, zero_limit: float, only_determined: bool) -> Tensor:
    """Return the vector orthogonal to all rows of ``system``, with 1 as its largest number; NaN if none is.

    With ``only_determined`` the result is NaN, too, if other vectors are orthogonal, if there are fewer
    distinct rows than unknowns, or if a number is negative. Singular values up to ``zero_limit``, relative
    to the largest one, count as zero.
    """
    scale = system.norm(dim=0)
    scale[scale <= LEAST * scale.max()] = torch.inf
    squares, directions = torch.linalg.eigh((system / scale).T @ (system / scale))
    singular = (squares / squares[-1]).clamp(min=0.0).sqrt()
    weights = directions[:, 0] / scale
    weights = weights / weights[weights.abs().argmax()]
    weights[weights.abs() < ZERO] = 0.0
    is_allowed = True
    if only_determined:
        has_enough_rows = len((system / scale / SINGULAR**2).round().unique(dim=0)) >= len(scale)
        is_allowed = has_enough_rows and singular[1] > SINGULAR and bool((weights >= 0).all())
    return weights if singular[0] <= zero_limit and is_allowed else torch.full_like(weights, torch.nan)


# The count of every loss that is a mean over its samples.
ONES = Count("lambda y: torch.ones(len(y))", 0, "", "one each")


def that_hold(counts: Iterable[Count], equations: Sequence[Equation]) -> list[Count]:
    """Return the ``counts`` with which all ``equations`` hold."""

    def holds(count: Count) -> bool:
        with contextlib.suppress(InputError):  # a class without a weight
            return all(equation.combines_by(count) for equation in equations)
        return False

    return [count for count in counts if attempt(holds, count)]


def most_different_batches(totals: Tensor) -> list[int]:
    """Return the two batches that the counts weigh most differently; [] if all counts weigh them alike.

    ``totals`` (batches, counts): the number of terms of each batch.
    """
    shares = totals / totals.sum(0).clamp(min=1e-300)
    differences = shares - shares[:, :1]
    if not differences.abs().max() > ALIKE / len(totals):
        return []
    worst = differences[:, differences.abs().amax(0).argmax()]
    return [int(worst.argmin()), int(worst.argmax())]


def unambiguous(counts: Sequence[Count], totals: Tensor) -> Count:
    """Return the first of ``counts``, if it counts samples or all counts weigh the batches alike.

    ``totals`` (batches, counts): the terms of each batch. Raises InputError if no target counts, or the
    counts weigh batches differently.
    """
    if not bool(totals.any()):
        raise InputError("data: all its targets are left out of the loss, or it is NaN; one must count")
    if counts[0] == ONES or not most_different_batches(totals):
        return counts[0]
    codes = " or terms=".join(count.code for count in counts[:3])
    raise InputError(f"loss: its terms may be counted in several ways; give the right one, as terms={codes}")
