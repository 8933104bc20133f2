"""The training set in disjoint parts, one a learner, as the recipe's key ``data.split`` says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.problem.batches import HostStream
from landscape.problem.problem import Problem

IID = "iid"
FORMS = "iid, dirichlet(ALPHA), labels(COUNT), sizes(SHARE, …), by(COLUMN)"
LABEL = "label"
# Draws of dirichlet(…) before it is given up (ours): each takes some milliseconds.
TRIES = 1000
#: Names in a checkpoint of the tensors of :class:`Parts`.
NAMES = "split.learner", "split.counts", "split.labels"


@dataclass(frozen=True)
class Split:
    """A way to divide the training set.

    Attributes:
        text: as in the recipe.
        kind: "iid", "dirichlet", "labels", "sizes" or "by".
        numbers: what stands in brackets, if these are numbers.
        column: the same of "by".
    """

    text: str
    kind: str
    numbers: tuple[float, ...] = ()
    column: str = ""


def parse(text: str, learners: int) -> Split:
    """The split that ``text`` describes, checked as far as that needs no data.

    Args:
        text: one of FORMS.
        learners: n.

    Raises:
        InputError: for another form, or numbers that are not allowed.

    Example:
        >>> parse("sizes(0.5, 0.5)", 2).numbers
        (0.5, 0.5)
    """
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text.strip())
    kind, inside = (match[1], match[2]) if match else ("", None)
    if kind == IID and inside is None:
        return Split(text, IID)
    if kind == "by" and inside and inside.strip():
        return Split(text, kind, column=inside.strip())
    try:
        numbers = tuple(float(number) for number in (inside or "").split(","))
    except ValueError:
        numbers = ()
    right = len(numbers) == (learners if kind == "sizes" else 1) and all(0 < v < math.inf for v in numbers)
    if kind == "sizes":
        right = right and abs(sum(numbers) - 1) <= 1e-6
    elif kind == "labels":
        right = right and numbers[0].is_integer()
    if not right or kind not in ("dirichlet", "labels", "sizes"):
        raise InputError(
            f"data.split: '{text}' is not allowed (allowed: {FORMS}; numbers must be above 0, COUNT whole, "
            f"and of SHARE {learners}, one a learner, with the sum 1)"
        )
    return Split(text, kind, numbers)


@dataclass(frozen=True)
class Parts:
    """The parts of a training set of N samples.

    Attributes:
        split: how they were made.
        learner: (N,) int32, the learner that has each sample.
        counts: (n, K) int64, samples by learner and label.
        labels: (K,) int64, the labels that occur; one, 0, where samples have none.
    """

    split: Split
    learner: Tensor
    counts: Tensor
    labels: Tensor

    @cached_property
    def indices(self) -> list[Tensor]:
        """The numbers of each learner's samples, in increasing order."""
        return [torch.nonzero(self.learner == j).flatten() for j in range(len(self.counts))]

    @property
    def state(self) -> dict[str, Tensor]:
        """Its form in checkpoints."""
        return dict(zip(NAMES, (self.learner, self.counts, self.labels), strict=True))

    @classmethod
    def restored(cls, split: Split, shared: Mapping[str, Tensor], learners: int, samples: int) -> Parts:
        """The parts that a checkpoint recorded; OperationError where they are not those of such a run."""
        parts = cls(split, *(shared[name].cpu() for name in NAMES)) if {*NAMES} <= {*shared} else None
        if parts is None or parts.learner.shape != (samples,) or len(parts.counts) != learners:
            raise OperationError(
                f"checkpoint: it does not say which of {learners} learners has which of the {samples} "
                f"training samples, as data.split '{split.text}' needs ('{NAMES[0]}'); it cannot be resumed"
            )
        sizes = torch.tensor([len(part) for part in parts.indices])
        if int(sizes.sum()) != samples or not torch.equal(sizes, parts.counts.sum(1)) or not sizes.all():
            raise OperationError(
                f"checkpoint: /shared/{NAMES[0]} is no division of the training set, as a resumed run needs"
            )
        return parts

    @classmethod
    def drawn(
        cls, split: Split, problem: Problem, columns: Mapping[str, Any], learners: int, batch: int, seed: int
    ) -> Parts:
        """New parts of the training set of ``problem``, of at least ``batch`` samples each.

        Args:
            split: how to divide; not "iid".
            problem: the training set.
            columns: further values of its samples by name, (N,) each.
            learners: n.
            batch: B, the samples of a learner's minibatch.
            seed: of all draws.

        Raises:
            InputError: where the samples have no such column or label, or a part is smaller than ``batch``.
        """
        known = _columns(problem) | {name: np.asarray(values) for name, values in columns.items()}
        labels, samples, rng = known.get(LABEL), problem.samples, np.random.default_rng(seed)
        if split.kind == "sizes":
            ends = np.rint(np.cumsum(split.numbers) * samples).astype(int)[:-1]
            owner = _owner(enumerate(np.split(rng.permutation(samples), ends)), samples)
        elif split.kind == "by":
            owner = _by_value(split, _column(split, known, samples), learners)
        elif labels is None:
            raise InputError(
                f"data.split: '{split.text}' is not allowed, it needs one whole number a sample as target; "
                "sizes(…) needs none"
            )
        elif split.kind == "labels":
            owner = _owner(_by_labels(split, labels, learners, rng), samples)
        else:
            owner = _dirichlet(split, labels, learners, batch, rng)
        sizes = np.bincount(owner, minlength=learners)
        if sizes.min() < batch:
            raise InputError(
                f"data.split: '{split.text}' gives learner {sizes.argmin()} {sizes.min()} of {samples} "
                f"samples, fewer than its minibatch of {batch}; use a smaller batch or another split"
            )
        kinds, of = np.unique(np.zeros(samples, int) if labels is None else labels, return_inverse=True)
        counts = np.zeros((learners, len(kinds)), np.int64)
        np.add.at(counts, (owner, of), 1)
        return cls(split, *(torch.from_numpy(a) for a in (owner.astype(np.int32), counts, kinds)))


def _columns(problem: Problem) -> dict[str, Array]:
    """The columns of whole numbers, one a sample: the label, and inputs or targets by name."""
    data, found = problem.data, dict[str, Any]()
    x, y = data.resident or (None, getattr(data.batches, "labels", None))
    if isinstance(data.batches, HostStream):
        x, y = data.batches.x, data.batches.y
    for tree in (x, y):
        found |= tree if isinstance(tree, Mapping) else {}
    found[LABEL] = y
    return {
        name: t.cpu().numpy()
        for name, t in found.items()
        if isinstance(t, Tensor) and t.dim() == 1 and len(t) == problem.samples and not t.is_floating_point()
    }


def _column(split: Split, known: Mapping[str, Array], samples: int) -> Array:
    """The values (N,) that the samples are divided by."""
    values = known.get(split.column)
    if values is None or values.shape != (samples,):
        why = "no such column" if values is None else f"one of shape {values.shape}, not ({samples},)"
        raise InputError(
            f"data.split: '{split.text}' is not allowed, the data has {why} "
            f"(allowed: {', '.join(known) or 'none, it has no column'})"
        )
    return values


def _owner(parts: Iterable[tuple[int, Array]], samples: int) -> Array:
    """(N,), the learner of each sample, from pairs of a learner and numbers of samples."""
    owner = np.empty(samples, int)
    for j, part in parts:
        owner[part] = j
    return owner


def _by_value(split: Split, values: Array, learners: int) -> Array:
    """Each value of a column to the learner with the fewest samples so far, the most frequent value first."""
    kinds, of, sizes = np.unique(values, return_inverse=True, return_counts=True)
    if len(kinds) < learners:
        raise InputError(
            f"data.split: '{split.text}' is not allowed, the column has {len(kinds)} different values for "
            f"{learners} learners"
        )
    holder, filled = np.empty(len(kinds), int), np.zeros(learners, int)
    for kind in np.argsort(-sizes, kind="stable"):
        holder[kind] = filled.argmin()
        filled[holder[kind]] += sizes[kind]
    return holder[of]


def _by_labels(
    split: Split, labels: Array, learners: int, rng: np.random.Generator
) -> Iterator[tuple[int, Array]]:
    """Pairs for :func:`_owner`: so many labels a learner, each label in equal parts to those that have it."""
    kinds, each = np.unique(labels), int(split.numbers[0])
    if not len(kinds) / learners <= each <= len(kinds):
        raise InputError(
            f"data.split: '{split.text}' is not allowed, {learners} learners can have from "
            f"{math.ceil(len(kinds) / learners)} to {len(kinds)} of {len(kinds)} labels each"
        )
    for place, kind in enumerate(rng.permutation(kinds)):
        holders = [j for j in range(learners) if (place - j * each) % len(kinds) < each]
        own = rng.permutation(np.flatnonzero(labels == kind))
        yield from zip(holders, np.array_split(own, len(holders)), strict=True)


def _dirichlet(split: Split, labels: Array, learners: int, batch: int, rng: np.random.Generator) -> Array:
    """(N,), each label in shares ~ Dirichlet(α, …, α); drawn anew until no part is below ``batch``.

    Hsu et al. 2019 (arXiv 1909.06335) draw the labels' shares of a learner, whose part has a fixed size; this
    form, by label, is that of Yurochkin et al. 2019 and Li et al. 2022 (arXiv 2102.02079), in which each
    sample is used and sizes differ.
    """
    members = [np.flatnonzero(labels == kind) for kind in np.unique(labels)]

    def draw() -> Iterator[tuple[int, Array]]:
        for own in members:
            ends = np.cumsum(rng.dirichlet(np.full(learners, split.numbers[0])))[:-1] * len(own)
            yield from enumerate(np.split(rng.permutation(own), ends.astype(int)))

    for _ in range(TRIES):
        owner = _owner(draw(), len(labels))
        if np.bincount(owner, minlength=learners).min() >= batch:
            return owner
    raise InputError(
        f"data.split: '{split.text}' leaves a learner fewer samples than its minibatch of {batch} in each of "
        f"{TRIES} draws; use a larger number in brackets or a smaller batch"
    )
