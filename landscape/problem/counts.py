"""How many terms a sample contributes to the mean of a loss: counts of targets, or of a mask beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError
from landscape.problem.batches import concatenate, count_samples, named_tensors, tree_map
from landscape.problem.data import notable
from landscape.problem.losses import by_sample

# Classes whose weights are sought, and samples for each of them (ours).
MAX_CLASSES, SAMPLES_A_CLASS = 64, 3
# Weights of classes below this share of the largest are zero: they come from differences of losses (ours).
ZERO = 1e-5

# Targets whole, and without the first or last of each sequence, as code and index.
CUTS: dict[str, tuple[slice, ...]] = {
    "": (),
    "[:, 1:]": (slice(None), slice(1, None)),
    "[:, :-1]": (slice(None), slice(-1)),
}


@dataclass(frozen=True)
class Samples:
    """Some samples: inputs, targets, and the outputs where the loss is taken of these (else None)."""

    outputs: Any
    x: Any
    y: Any

    @property
    def size(self) -> int:
        """The number of samples."""
        return count_samples(self.x, self.y, alike=False)

    @property
    def numbers(self) -> int:
        """How many numbers the outputs and targets are."""
        return sum(t.numel() for _, t in named_tensors((self.outputs, self.y)))

    def on(self, device: Any) -> Samples:
        """The same on ``device``."""
        return Samples(*tree_map(lambda t: t.to(device), self._tree))

    def rows(self, index: Any) -> Samples:
        """The samples ``index``, a slice or a list."""
        return Samples(*tree_map(lambda t: t[index] if t.dim() else t, self._tree))

    def along(self, length: int, part: slice) -> Samples:
        """The ``part`` of each sample along the dimension of this ``length``, where a tensor has one."""

        def cut(tensor: Tensor) -> Tensor:
            places = [d for d in range(1, tensor.dim()) if tensor.shape[d] == length]
            return tensor[(slice(None),) * places[0] + (part,)] if places else tensor

        return Samples(tree_map(cut, self.outputs), None, tree_map(cut, self.y))

    @property
    def _tree(self) -> tuple[Any, Any, Any]:
        return self.outputs, self.x, self.y

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """All samples of ``parts``. ValueError for samples of different shapes."""
        try:
            return cls(*concatenate([part._tree for part in parts]))
        except LandscapeError as error:
            raise ValueError(str(error)) from error

    def cropped(self, other: Samples) -> Samples:
        """The samples, each tensor cut to the shape that those of ``other`` have, too."""
        pairs = zip(named_tensors(self._tree), named_tensors(other._tree), strict=True)
        sizes = {
            id(t): [slice(min(n)) for n in zip(t.shape[1:], o.shape[1:], strict=True)]
            for (_, t), (_, o) in pairs
        }
        return Samples(*tree_map(lambda t: t[(slice(None), *sizes[id(t)])] if t.dim() else t, self._tree))


@dataclass(frozen=True)
class Count:
    """``count(x, y)`` -> (B,), with the code that says the same, which is how it prints.

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

    def __repr__(self) -> str:
        return self.code


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
    if tensor.dtype == torch.bool:
        yield name, "numbers", None
        yield f"~{name}", "not", None
        return
    if tensor.is_floating_point():
        yield f"~{name}.isnan()", "no NaN", None
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
        raise InputError(
            f"data: a target is {int(tensor[~weighted][0])}, a class that none of the samples had from which "
            "the weights of the classes come; give terms=, the sum of each sample's weights"
        )
    return sum((w * double(by_sample(tensor == c)) for c, w in weights.items()), torch.zeros(()))


# The functions of counts, of a tensor (B, …) and a value.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "numbers": torch.clone,
    "not": torch.logical_not,
    "no NaN": lambda t: ~t.isnan(),
    "finite": torch.isfinite,
    "other than": torch.ne,
    "above": torch.gt,
    "from": torch.ge,
    "all": torch.ones_like,
    "one each": lambda t: torch.ones(len(t)),
    "classes": _class_terms,
}


def _is_mask(tensor: Tensor) -> bool:
    """Return whether ``tensor`` may be a mask: it has whole numbers, or zeros and ones only."""
    return not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all())


def candidates(x: Any, y: Any) -> Iterator[Count]:
    """The standard counts of samples like these: targets not left out, masks, weights, all targets."""
    for tree, letter in ((y, "y"), (x, "x")):
        for name, number, cut, tensor in _parts(tree, letter):
            if letter == "x" and not _is_mask(tensor):
                continue
            tests = [*_tests(name, tensor)]
            if letter == "y" and tensor.dim() > 1:
                tests.append((f"torch.ones_like({name})", "all", None))
            for test, function, value in tests:
                code = f"({test}).flatten(1).sum(1)" if tensor.dim() > 1 else test
                yield Count(f"lambda {letter}: {code}", number, cut, function, value, letter == "x")


class ClassSamples:
    """Samples with each class of the targets, from which the weights of the classes follow.

    Args:
        loss: gives the loss of some samples.
    """

    def __init__(self, loss: Callable[[Samples], float]) -> None:
        self._loss = loss
        # By tensor of the targets: class -> (share of its targets, sample), the largest shares first.
        self._best: dict[tuple[str, int, str], dict[int, list[tuple[float, Samples]]]] = {}

    def add(self, samples: Samples) -> None:
        """Keep those of ``samples`` in which a class has a larger share of the targets than in others."""
        for name, number, cut, tensor in _parts(samples.y, "y"):
            if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.numel():
                continue
            best = self._best.setdefault((name, number, cut), {})
            targets = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
            for c in torch.unique(tensor).tolist() if len(best) <= MAX_CLASSES else ():
                shares, rows = double(targets == c).mean(1).topk(min(SAMPLES_A_CLASS, len(targets)))
                pairs = [
                    *best.get(c, []),
                    *(
                        (s, samples.rows([r]))
                        for s, r in zip(shares.tolist(), rows.tolist(), strict=True)
                        if s
                    ),
                ]
                best[c] = sorted(pairs, key=lambda pair: -pair[0])[:SAMPLES_A_CLASS]

    def counts(self) -> list[Count]:
        """Weights by class of the targets, as the losses of pairs of samples reveal them."""
        counts = []
        for (name, number, cut), best in self._best.items():
            if not 2 <= len(best) <= MAX_CLASSES:
                continue
            classes = sorted(best)
            pool = [sample for c in classes for _, sample in best[c]]
            targets = [list(named_tensors(sample.y))[number][1][CUTS[cut]] for sample in pool]
            numbers = torch.stack(
                [torch.stack([double(t == c).sum() for c in classes]) for t in targets]
            ).cpu()
            weights = self._weights(pool, numbers)
            if weights is not None:
                counts.append(_weighted(name, number, cut, dict(zip(classes, weights, strict=True))))
        return counts

    def _weights(self, pool: Sequence[Samples], numbers: Tensor) -> list[float] | None:
        """The weight of each class, the largest 1, from ``numbers`` (N, classes) of targets; None if unknown.

        With L(a, b) the loss of both, w_b/w_a = (L(a, b) − L(a))/(L(b) − L(a, b)), for the terms w of the
        samples a and b; they are sums of the weights of their targets' classes.
        """
        alone = {row: self._loss(sample) for row, sample in enumerate(pool)}
        finite = [row for row in alone if math.isfinite(alone[row])]
        if not finite:
            return None
        first = min(finite, key=lambda row: alone[row])
        terms = {first: 1.0}
        for row in alone:
            both = self._loss(Samples.joined([pool[first], pool[row]])) if row != first else math.nan
            apart = alone[row] - both
            if math.isfinite(both) and not math.isfinite(alone[row]):
                terms[row] = 0.0  # nothing of it counts
            elif math.isfinite(both) and abs(alone[row] - alone[first]) > 0.01 * abs(alone[row]) and apart:
                terms[row] = (both - alone[first]) / apart
        system, given = numbers[list(terms)], torch.tensor(list(terms.values()), dtype=torch.float64)
        if int(torch.linalg.matrix_rank(system)) < numbers.shape[1]:
            return None
        weights = torch.linalg.lstsq(system, given[:, None]).solution[:, 0]
        weights /= weights.abs().max()
        weights[weights.abs() < ZERO] = 0.0
        return weights.tolist() if bool((weights >= 0).all()) else None


def _weighted(name: str, number: int, cut: str, weights: dict[int, float]) -> Count:
    """The count of the weights of the classes of ``name``."""
    listed = ", ".join(f"{c}: {w:.4g}" for c, w in weights.items())
    return Count(f"the weights of the classes of {name}, {{{listed}}}", number, cut, "classes", weights)


# The count of every loss that is a mean over its samples.
ONES = Count("lambda y: torch.ones(len(y))", 0, "", "one each")
