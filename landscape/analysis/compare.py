"""Minima side by side: every measure of flatness at each of them, and which differences are real."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from landscape.analysis.quantities import (
    BOUND,
    BY_NAME,
    EXACT,
    QUANTITIES,
    SE,
    Measured,
    Preconditioning,
    Quantity,
    Settings,
    Subject,
    of_metric,
)
from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import hdf5
from landscape.core.analysis import analysis
from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.options import SPLIT, Count, OneOf, Positive, Seed, Several, Within, fit
from landscape.core.progress import Progress, ProgressOption, portion
from landscape.core.statistics import Difference, Estimate, holm, mcnemar, paired, welch
from landscape.evaluation.grid import setting
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.losses import describe_loss
from landscape.problem.metrics import Metrics, names_of
from landscape.problem.problem import Loss, Problem
from landscape.results.comparison import Comparison

# Losses are equal within this share of the target (our choice: quantities such as λ_max, which fall with the
# loss, then change by about as much, far less than the differences of interest).
LOSS_TOL = 0.1


def _at_equal_loss(entries: Sequence[Entry], loss_tol: float) -> tuple[list[Entry], float]:
    """Replace each entry by the checkpoint of its run whose training loss is nearest to one common loss.

    The common loss is the highest final loss of the runs, because the other runs passed it earlier. The
    checkpoints are the files step-*.h5 in a run's folder, and its last one. Returns the new entries, and the
    common loss in nats.

    Raises:
        InputError: a run that is not of a file.
        OperationError: a run with no checkpoint within ``loss_tol``, relative to the loss, or a loss that is
            not finite.
    """
    runs = [entry.run for entry in entries if entry.run]
    if len(runs) < len(entries):
        raise InputError("equal_loss: a problem has no earlier checkpoints, give runs or their files instead")
    for run in runs:
        if run.path is None:
            raise InputError(f"equal_loss: {run.label} is not of a file, give the run's checkpoint")
    losses = [run.problem(SPLIT).loss() for run in runs]
    for run, loss in zip(runs, losses, strict=True):
        if not math.isfinite(loss):
            raise OperationError(f"{run.path}: its training loss is {loss:g}, so that no other can be equal")
    target = max(losses)
    nearest = []
    for entry, run, loss in zip(entries, runs, losses, strict=True):
        near, near_loss = (run, loss) if loss == target else _nearest(run, loss, target)
        if not abs(near_loss - target) <= loss_tol * abs(target):
            words = f"no checkpoint of its run has a training loss within {loss_tol:.0%} of {target:.4g}"
            nearest_step = f"the nearest is step {near.step:,} with {near_loss:.4g}"
            raise OperationError(f"{run.path}: {words}; {nearest_step}; raise loss_tol")
        nearest.append(replace(entry, subject=near, label=near.label))
    return nearest, target


def _nearest(run: Checkpoint, loss: float, target: float) -> tuple[Checkpoint, float]:
    """The checkpoint of the run up to ``run`` whose loss is nearest to ``target``, and that loss.

    What other runs left in the folder is not of the run.
    """
    assert run.path is not None
    problem = run.problem(SPLIT)
    batchnorm = has_batchnorm(problem.model)  # whose statistics are those of the weights
    best, best_loss = run, loss
    for path in storage.steps(run.path.parent):
        earlier = Checkpoint.load(path, whole_history=False).using(**run.source)
        same = (earlier.algorithm, earlier.seed, earlier.layout) == (run.algorithm, run.seed, run.layout)
        if not same or earlier.step >= run.step:
            continue
        mean = earlier.mean.to(problem.weights)
        value = earlier.problem(SPLIT).loss() if batchnorm else problem.loss(mean)
        if abs(value - target) < abs(best_loss - target):
            best, best_loss = earlier, value
    return best, best_loss


# Seeds of a group from which its mean and its error say something (our choice: of two, a 95% interval reaches
# 12.7 standard errors to each side).
SEEDS = 3
# Differences below this number of roundings of the numbers are none, as for losses that must be the same
# (landscape.evaluation.grid).
ROUNDINGS = 1000


@dataclass(frozen=True)
class Row:
    """A quantity with its number at each checkpoint, and of each side.

    Attributes:
        cells: one for each checkpoint.
        sides: the same numbers, or of groups the means of theirs, with these as draws.
        grouped: whether the sides are groups.
    """

    quantity: Quantity
    cells: Sequence[Measured]
    sides: Sequence[Measured]
    grouped: bool

    @classmethod
    def of(cls, quantity: Quantity, cells: Sequence[Measured], side_of: Sequence[int], grouped: bool) -> Row:
        """The row of the cells; ``side_of`` has the number of each one's side."""
        if not grouped:
            return cls(quantity, cells, cells, grouped)
        values = np.array([cell.value for cell in cells])
        side_numbers = np.array(side_of)
        means = [Measured.mean(values[side_numbers == side]) for side in range(max(side_of) + 1)]
        # One checkpoint is a group without an error, not an exact number.
        sides = [m if len(m.draws) > 1 else Measured(m.value, math.nan, math.nan, m.draws) for m in means]
        return cls(quantity, cells, sides, grouped)

    @property
    def kind(self) -> str:
        """The kind of the errors of the sides."""
        return SE if self.grouped else self.quantity.kind

    def over(self) -> str:
        """The draws that the errors of the sides are over, such as "64 minibatches"."""
        if self.kind != SE:
            return ""
        counts = {len(side.draws) for side in self.sides}
        if not self.grouped:
            counts = {int(side.freedom) + 1 for side in self.sides if math.isfinite(side.freedom)}
        what = "seeds" if self.grouped else self.quantity.over
        return f"{' to '.join(f'{n:,}' for n in sorted({min(counts), max(counts)}))} {what}" if counts else ""

    def difference(self, first: int, second: int) -> tuple[Difference, str]:
        """The difference of two sides, and the test by which it is judged."""
        a, b = self.sides[first], self.sides[second]
        if self.kind != SE:
            test = Difference(b.value - a.value, a.error + b.error, math.nan, math.nan)
            return test, "exact" if self.kind == EXACT else "bounds"
        if self.quantity.common and not self.grouped and len(a.draws) == len(b.draws) > 1:
            values = np.union1d(a.draws, b.draws)
            if len(values) != 2 or values[0] != 0:
                return paired(a.draws, b.draws), "paired t"
            scale = values[1]  # draws are percentages: two values, one of them 0
            test = mcnemar(a.draws / scale, b.draws / scale)
            value, error = scale * test.value, scale * test.standard_error
            return replace(test, value=value, standard_error=error), "McNemar"
        test = welch(*(Estimate(s.value, s.error, s.freedom) for s in (a, b)))
        if self.grouped and min(len(a.draws), len(b.draws)) < SEEDS:
            test = replace(test, p=math.nan)
        return test, "Welch t"


def differences(rows: Sequence[Row], sides: int, eps: float, significance: float) -> dict[str, Any]:
    """The fields of a :class:`.Comparison` about the differences of all pairs of ``sides`` sides.

    ``eps`` is the relative rounding of the numbers.
    """
    pairs = np.array(list(combinations(range(sides), 2)))
    every = [[row.difference(*pair) for pair in pairs] for row in rows]
    numbers = np.array([[astuple(difference) for difference, _ in row] for row in every], float)
    values, errors, freedom, p = np.moveaxis(numbers, 2, 0)
    corrected = holm(p)
    size = np.abs([[side.value for side in row.sides] for row in rows])[:, pairs].max(2)
    bounded = np.array([row.kind in (BOUND, EXACT) for row in rows])[:, None]
    larger = np.where(bounded, np.abs(values) > errors, corrected <= significance)  # False for NaN
    return {
        "tests": tuple(" or ".join(dict.fromkeys(test for _, test in row)) for row in every),
        "first": pairs[:, 0],
        "second": pairs[:, 1],
        "difference": values,
        "difference_error": errors,
        "difference_freedom": freedom,
        "p": p,
        "p_holm": corrected,
        "significant": larger & (np.abs(values) > ROUNDINGS * eps * size),
    }


def described(rows: Sequence[Row], loss_name: str, one_loss: bool) -> dict[str, Any]:
    """The fields of a :class:`.Comparison` about the quantities, their numbers and their errors.

    Without ``one_loss`` for all sides, no number says which of them is flatter.
    """
    quantities = [row.quantity for row in rows]
    sides = np.array([[(s.value, s.error, s.freedom) for s in row.sides] for row in rows], float)
    cells = np.array([[(cell.value, cell.error) for cell in row.cells] for row in rows], float)
    return {
        "quantities": tuple(q.name for q in quantities),
        "titles": tuple(q.title.replace("training loss", f"training {loss_name}") for q in quantities),
        "unit_names": tuple(q.unit for q in quantities),
        "flatter": np.array([q.flatter * one_loss for q in quantities]),
        "kinds": tuple(row.kind for row in rows),
        "own_kinds": tuple(q.kind for q in quantities),
        "over": tuple(row.over() for row in rows),
        **dict(zip(("value", "error", "freedom"), np.moveaxis(sides, 2, 0), strict=True)),
        **dict(zip(("own_value", "own_error"), np.moveaxis(cells, 2, 0), strict=True)),
    }


def remarks(rows: Sequence[Row], sides: Sequence[str], side_of: Sequence[int]) -> list[str]:
    """Remarks on groups: those too small for a statement, and bounds as large as the errors."""
    if not rows or not rows[0].grouped:
        return []
    few = [f"{name} has {side_of.count(k)}" for k, name in enumerate(sides) if side_of.count(k) < SEEDS]
    notes = [f"no statement on groups of fewer than {SEEDS} seeds: {', '.join(few)}"] if few else []
    for row in rows:
        for index, side in enumerate(row.sides if row.quantity.kind == BOUND else ()):
            bound = max(cell.error for cell, of in zip(row.cells, side_of, strict=True) if of == index)
            if bound > side.error:
                numbers = f"the largest bound, {bound:.2g}, is above the standard error, {side.error:.2g}"
                notes.append(f"{row.quantity.name}, {sides[index]}: {numbers}")
    return notes


# The significance level of all tests of a table together (the usual one).
SIGNIFICANCE = 0.05
Compared = Checkpoint | Problem | str | Path
Given = Sequence[Compared | Sequence[Compared]] | Mapping[str, Compared | Sequence[Compared]]


@dataclass(frozen=True)
class Entry:
    """One checkpoint or problem that is compared, and the number of its side."""

    subject: Checkpoint | Problem
    label: str
    side: int

    @property
    def run(self) -> Checkpoint | None:
        """The checkpoint; None for a problem alone."""
        return self.subject if isinstance(self.subject, Checkpoint) else None

    @property
    def step(self) -> int:
        """The step of the checkpoint; −1 where it is not known."""
        return self.run.step if self.run else -1

    def source(self) -> tuple[str, str]:
        """The name of its file and its SHA-256; "" without one."""
        path = self.run.path if self.run else None
        return (path.name, hdf5.sha256(path)) if path else ("", "")


QuantityName = Annotated[str, OneOf(tuple(BY_NAME))]


@analysis(shorter="a shorter list of quantities= or a part of the data", of_the_run=None)
def compare(
    problems: Given,
    batch: Count | None = None,
    *,
    quantities: Sequence[QuantityName] = (),
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    data: Any = None,
    loss: Loss | str | None = "data",
    data_dir: str | Path | None = None,
    metrics: Metrics | None = None,
    equal_loss: bool = False,
    loss_tol: Positive = LOSS_TOL,
    draws: Several = Settings.draws,
    planes: Several = Settings.planes,
    rise: Positive = Settings.rise,
    rho: Positive = Settings.rho,
    rho_average: Positive = Settings.rho_average,
    k: Count = Settings.k,
    significance: Annotated[float, Within(above=0, below=1)] = SIGNIFICANCE,
    preconditioner_of: Preconditioning | None = None,
    seed: Seed = 0,
    progress: ProgressOption = None,
) -> Comparison:
    """Several minima by every instrument, and which differences are larger than their errors.

    All checkpoints have the same minibatches, random vectors and planes, so that what is drawn is compared in
    pairs (common random numbers; Student's t test of the differences, over test samples McNemar's). Spreads
    of learners are compared by Welch's t test, eigenvalues by bounds that hold for the outermost ones with a
    probability of 99% each (not by residuals, which say that some eigenvalue is near). In groups, such as the
    seeds of two recipes, each checkpoint has draws of its own, the error is that over the group, and Welch's
    t test compares the means: this alone speaks of recipes rather than of single runs. Holm's
    correction makes ``significance`` hold for all tests of the table together.

    Args:
        problems: at least two problems, runs, or names of runs' files or folders, mixed at will; in a list,
            or in a dict of names to them. A list among them is a group, and what stands alone beside it a
            group of one. A problem is measured at its center, without what needs a test set, learners or an
            optimizer.
        batch: samples in a minibatch; default: the runs' total batch, if it is the same for all, or no
            quantity that needs one, which the notes say.
        quantities: their names, as ``landscape compare --help`` lists them; default: all that can be
            measured, without "distance", "barrier" and "same-basin" (1 where the error rises by at most 2
            percentage points on the line, Frankle et al. 2020). These are from the first problem, to each
            with its hidden units aligned to it by weights (:func:`landscape.connect`).
        model, data, loss, data_dir, metrics: what the files of the runs do not bring along, as
            :meth:`landscape.Checkpoint.problem` takes it; the same for all runs. Metrics, and those of
            problems, become rows.
        equal_loss: take of each run the checkpoint whose training loss is nearest to the highest of all given
            ones.
        loss_tol: how near, relative to that loss.
        draws: minibatches and displacements of each quantity. The trace takes 60 products.
        planes: random planes, over which the basin width is the mean.
        rise: rise of the loss at that width, in nats.
        rho: ρ of worst-case adaptive sharpness.
        rho_average: ρ of average-case adaptive sharpness.
        k: eigenvectors that span the sharp space.
        significance: the significance level of all tests together.
        preconditioner_of: :func:`landscape.preconditioner`, to have λ_max with the preconditioner of the
            optimizer that made a run, where it has one.
        seed: draws minibatches, vectors, displacements and planes.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.

    Returns:
        A table of value and error, (Q, S) each, with the differences of all pairs, (Q, K), and ``notes`` on
        what could not be measured. ``significant`` says which differences are larger than their errors.

    Raises:
        InputError: fewer than two problems, an unknown quantity, a number that is not allowed, a group that
            has a checkpoint or a seed twice, or a quantity asked for that cannot be measured, as without the
            batch that it needs.
        OperationError: no checkpoint near the loss asked for.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> layer, loss = torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss()
        >>> sharp, flat = (landscape.Problem(layer, loss, (c * x, y)) for c in (1, 0.5))
        >>> result = landscape.compare({"sharp": sharp, "flat": flat}, quantities=["lambda-max", "trace"])
        >>> result.value.round(2).tolist(), result.significant.ravel().tolist()
        ([[9.0, 2.25], [10.0, 2.5]], [True, True])
    """
    source = {"model": model, "data": data, "data_dir": data_dir, "metrics": metrics}
    source = {name: value for name, value in source.items() if value is not None}
    if not (isinstance(loss, str) and loss == "data"):
        source["loss"] = loss
    sides, entries, grouped = _entries(problems, source)
    chosen = [BY_NAME[name] for name in dict.fromkeys(quantities)]
    chosen = chosen or [quantity for quantity in QUANTITIES if not quantity.by_name]
    size, chosen, left_out = _batch(entries, batch, chosen, bool(quantities))
    radii = float(rise), float(rho), float(rho_average)
    settings = Settings(size, draws, planes, *radii, k, preconditioner_of)
    given_steps, target = [entry.step for entry in entries], math.nan
    if equal_loss:
        entries, target = _at_equal_loss(entries, loss_tol)
    sides = sides or _names(entries)
    columns, first = [], None
    for m, entry in enumerate(entries):
        own_seed = int(np.random.SeedSequence((seed, m)).generate_state(1)[0]) if grouped else seed
        part = portion(progress, m / len(entries), (m + 1) / len(entries))
        subject = Subject(entry.subject, own_seed, first)
        if first is None:
            chosen += [of_metric(name) for name in names_of(subject.problem)]
        first = first or subject
        columns.append(_measured(subject, chosen, settings, part))
    names = {(c.setting["loss_name"], c.setting["loss_unit"]) for c in columns}
    name, unit = names.pop() if len(names) == 1 else ("loss", "")
    side_of = [entry.side for entry in entries]
    rows = _rows(chosen, columns, bool(quantities), side_of, grouped)
    labels, origins = tuple(entry.label for entry in entries), [entry.source() for entry in entries]
    return Comparison(
        **described(rows, name, len({c.loss for c in columns}) == 1),
        **differences(rows, len(sides), max(column.eps for column in columns), significance),
        **{name: value for name, value in vars(settings).items() if name != "preconditioner_of"},
        sides=tuple(sides),
        labels=labels,
        sources=tuple(name for name, _ in origins),
        sources_sha256=tuple(digest for _, digest in origins),
        side_of=np.array(side_of),
        steps=np.array([entry.step for entry in entries]),
        given_steps=np.array(given_steps),
        significance=float(significance),
        grouped=grouped,
        equal_loss=target,
        notes=(*left_out, *_notes(chosen, columns, labels), *remarks(rows, sides, side_of)),
        seed=seed,
        sample_counts=np.array([column.setting["samples"] for column in columns]),
        dtype=columns[0].setting["dtype"],
        split=SPLIT,
        batchnorm=any(column.setting["batchnorm"] for column in columns),
        loss_name=name,
        loss_unit=unit,
    )


class _Column(NamedTuple):
    """The measurements of one checkpoint: a cell for each quantity, or the reason for none; its loss."""

    cells: list[Measured | LandscapeError]
    loss: tuple[str, Any]
    setting: dict[str, Any]
    parameters: int
    eps: float


def _measured(
    subject: Subject, quantities: Sequence[Quantity], settings: Settings, progress: Progress
) -> _Column:
    """All quantities of one checkpoint."""
    problem, cells = subject.problem, list[Measured | LandscapeError]()
    for k, quantity in enumerate(quantities):
        part = portion(progress, k / len(quantities), (k + 1) / len(quantities))
        try:
            cells.append(quantity.measure(subject, settings, part))
        except LandscapeError as error:  # the table's notes say it
            cells.append(error)
        part(1.0)
    loss, eps = problem.criterion, torch.finfo(problem.dtype).eps
    code = getattr(getattr(loss, "func", loss), "__code__", None)  # of a lambda, whose name says nothing
    return _Column(cells, (describe_loss(loss), code), setting(problem), problem.layout.size, eps)


def _rows(
    quantities: Sequence[Quantity], columns: Sequence[_Column], by_name: bool, side_of: Sequence[int],
    grouped: bool,
) -> list[Row]:  # fmt: skip
    """The rows that were measured at one checkpoint at least, NaN at the others.

    Raises the reason where none was, or, where they were chosen ``by_name``, any of them was not.
    """
    rows = []
    for q, quantity in enumerate(quantities):
        cells = [column.cells[q] for column in columns]
        refused = [cell for cell in cells if isinstance(cell, LandscapeError)]
        if len(refused) < len(cells):
            measured = [c if isinstance(c, Measured) else Measured(math.nan, math.nan) for c in cells]
            rows.append(Row.of(quantity, measured, side_of, grouped))
        elif by_name or (q == len(quantities) - 1 and not rows):
            raise refused[0]
    return rows


def _notes(quantities: Sequence[Quantity], columns: Sequence[_Column], labels: Sequence[str]) -> list[str]:
    """Notes on what was left out and why, and on differences that a comparison takes as none."""
    notes = []
    losses = dict.fromkeys(column.loss for column in columns)
    if len(losses) > 1:
        names = ", ".join(name for name, _ in losses)
        notes.append(f"different losses ({names}): their numbers are not comparable")
    for q, quantity in enumerate(quantities):
        cells = [(label, column.cells[q]) for label, column in zip(labels, columns, strict=True)]
        refused = [(label, str(cell)) for label, cell in cells if isinstance(cell, LandscapeError)]
        if refused:
            at = f" at {'; '.join(label for label, _ in refused)}"
            where = "" if len(refused) == len(columns) else at
            words = "; ".join(dict.fromkeys(reason for _, reason in refused))
            notes.append(f"{quantity.name} was not measured{where}: {words}")
    sizes, counts = [c.parameters for c in columns], [c.setting["samples"] for c in columns]
    if len(set(sizes)) > 1:
        numbers = ", ".join(f"{n:,}" for n in sizes)
        notes.append(f"networks of different size ({numbers} parameters): their distances are not comparable")
    if len(set(counts)) > 1:
        notes.append(f"data of different size ({', '.join(f'{n:,}' for n in counts)} samples)")
    return notes


def _entries(problems: Given, source: Mapping[str, Any]) -> tuple[list[str], list[Entry], bool]:
    """(names of the sides, or none if they are not named; entries; whether the sides are groups).

    Runs have the arguments ``source`` of their problems.
    """
    names = list(problems) if isinstance(problems, Mapping) else []
    several: Any = problems.values() if isinstance(problems, Mapping) else problems
    if isinstance(several, str) or not isinstance(several, Iterable):
        several = [several]
    values: list[Any] = list(several)
    grouped = any(isinstance(value, (list, tuple)) for value in values)
    sides = [list(value) if isinstance(value, (list, tuple)) else [value] for value in values]
    if len(sides) < 2 or not all(sides):
        raise InputError(f"problems: {len(sides)} given, at least 2 are needed, and no list may be empty")
    if grouped and not names:
        names = [f"group {k + 1}" for k in range(len(sides))]
    entries = []
    for side, members in enumerate(sides):
        for member in members:
            if isinstance(member, (str, Path)):
                member = Checkpoint.load(storage.checkpoint_in(Path(member)))
            fit("problems", member, Checkpoint | Problem)
            if isinstance(member, Checkpoint):
                entries.append(Entry(member.using(**source), member.label, side))
            else:
                label = names[side] if names else member.name or f"problem {side + 1}"
                entries.append(Entry(member, label, side))
        if grouped:
            _check_group(names[side], [entry for entry in entries if entry.side == side])
    return names, entries, grouped


def _check_group(name: str, entries: Sequence[Entry]) -> None:
    """InputError where a group has the same weights, or runs of the same seed, twice: its error would lie."""
    distinct = {double(e.run.mean).cpu().numpy().tobytes() if e.run else id(e.subject) for e in entries}
    if len(distinct) < len(entries):
        raise InputError(f"problems: the group '{name}' holds the same weights twice; leave one out")
    seeds = Counter(entry.run.seed for entry in entries if entry.run and entry.run.has_recipe)
    seed, count = max(seeds.items(), key=lambda item: item[1], default=(0, 0))
    if count > 1:
        raise InputError(f"problems: the group '{name}' has {count} checkpoints of seed {seed}; give one")


def _batch(
    entries: Sequence[Entry], batch: int | None, chosen: list[Quantity], by_name: bool
) -> tuple[int, list[Quantity], list[str]]:
    """(B, the quantities without those that need it where it is missing, and a note on these).

    B is as given, or the runs' total batch. InputError where it is missing for quantities chosen ``by_name``.
    """
    needing = [quantity.name for quantity in chosen if quantity.needs_batch]
    sizes = {entry.run.batch if entry.run else 0 for entry in entries} if batch is None else {int(batch)}
    if not needing or (len(sizes) == 1 and 0 not in sizes):
        return max(sizes) if needing else 0, chosen, []
    batches = ", ".join(f"{size:,}" if size else "unknown" for size in sorted(sizes))
    names = ", ".join(needing)
    words = f"batch: missing, which {names} need; the total batches are {batches}, give one for all"
    if by_name:
        raise InputError(words)
    return 0, [quantity for quantity in chosen if not quantity.needs_batch], [words]


def _names(entries: Sequence[Entry]) -> list[str]:
    """Short names of the sides: the parts of the labels that not all share, else the labels and folders."""
    labels = [entry.label for entry in entries]
    parts = [label.split(", ") for label in labels]
    shared = set.intersection(*map(set, parts))
    short = [", ".join(part for part in name_parts if part not in shared) for name_parts in parts]
    folders = [e.run.path.resolve().parent.name if e.run and e.run.path else "" for e in entries]
    placed = [f"{label} ({folder})" for label, folder in zip(labels, folders, strict=True)]
    numbered = [f"{label} ({k + 1})" for k, label in enumerate(labels)]
    options = [names for names in (short, folders, placed) if all(names) and len(set(names)) == len(names)]
    return (options or [numbered])[0]
