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

    The common loss is the highest final loss of the runs, because the other runs passed this loss earlier. A
    run's checkpoints are the files step-*.h5 in its folder, and its last checkpoint.

    Returns:
        The new entries, and the common loss in nats.

    Raises:
        InputError: a run that was not read from a file.
        OperationError: a run without a checkpoint whose relative distance from the common loss is at most
            ``loss_tol``, or a loss that is not finite.
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
    new_entries = []
    for entry, run, loss in zip(entries, runs, losses, strict=True):
        nearest, nearest_loss = (run, loss) if loss == target else _nearest(run, loss, target)
        if not abs(nearest_loss - target) <= loss_tol * abs(target):
            words = f"no checkpoint of its run has a training loss within {loss_tol:.0%} of {target:.4g}"
            nearest_step = f"the nearest is step {nearest.step:,} with {nearest_loss:.4g}"
            raise OperationError(f"{run.path}: {words}; {nearest_step}; raise loss_tol")
        new_entries.append(replace(entry, subject=nearest, label=nearest.label))
    return new_entries, target


def _nearest(run: Checkpoint, loss: float, target: float) -> tuple[Checkpoint, float]:
    """The checkpoint of the run up to ``run`` whose loss is nearest to ``target``, and that loss.

    The folder may also have files of other runs, which are left out.
    """
    assert run.path is not None
    problem = run.problem(SPLIT)
    batchnorm = has_batchnorm(problem.model)
    best, best_loss = run, loss
    for path in storage.steps(run.path.parent):
        earlier = Checkpoint.load(path, whole_history=False).using(**run.source)
        same_run = (earlier.algorithm, earlier.seed, earlier.layout) == (run.algorithm, run.seed, run.layout)
        if not same_run or earlier.step >= run.step:
            continue
        # BatchNorm's statistics belong to a checkpoint's weights.
        value = earlier.problem(SPLIT).loss() if batchnorm else problem.loss(earlier.mean.to(problem.weights))
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
    """A quantity with its measurements at each checkpoint and for each side.

    Attributes:
        cells: a measurement for each checkpoint.
        sides: a measurement for each side: a cell or, for groups, the mean of a group's cells, whose values
            are the mean's draws.
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
    tested = [[row.difference(*pair) for pair in pairs] for row in rows]  # (difference, name of the test)
    numbers = np.array([[astuple(difference) for difference, _ in row] for row in tested], float)
    values, errors, freedom, p = np.moveaxis(numbers, 2, 0)
    corrected = holm(p)
    side_values = np.array([[side.value for side in row.sides] for row in rows])
    size = np.abs(side_values)[:, pairs].max(2)
    bounded = np.array([row.kind in (BOUND, EXACT) for row in rows])[:, None]
    larger = np.where(bounded, np.abs(values) > errors, corrected <= significance)  # False for NaN
    return {
        "tests": tuple(" or ".join(dict.fromkeys(test for _, test in row)) for row in tested),
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

    All checkpoints share their minibatches, random vectors and planes (common random numbers). Student's t
    test therefore judges the paired differences, and McNemar's test those over test samples. Welch's t test
    compares spreads of learners. Eigenvalues differ if their bounds do not overlap; a bound on an outermost
    eigenvalue holds with a probability of 99%.

    Groups are, for example, the seeds of two recipes. Each checkpoint then has its own draws, the error is
    the standard error over the group, and Welch's t test compares the means. Only groups tell a recipe from
    a single run. Holm's correction makes ``significance`` hold for all tests of the table together.

    Args:
        problems: at least two problems, runs, or names of runs' files or folders, in a list or in a dict by
            name. Lists among them are groups; a single problem beside a list is a group of one. A problem is
            measured at its center, without quantities that need a test set, learners or an optimizer.
        batch: samples in a minibatch; default: the runs' total batch. Where the runs differ in this, the
            quantities that need a minibatch are left out, and a note says so.
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
        k: the number of eigenvectors that span the sharp space.
        significance: the significance level of all tests together.
        preconditioner_of: :func:`landscape.preconditioner`, for λ_max with the preconditioner of a run's
            optimizer, where the optimizer has one.
        seed: draws minibatches, vectors, displacements and planes.
        progress: a function of the finished share, or whether to show it; default: shown after two seconds.

    Returns:
        A table of value and error, (Q, S) each for Q quantities and S sides, and the differences (Q, K) of
        all K pairs. ``significant`` says which differences are larger than their errors. ``notes`` say which
        quantities could not be measured.

    Raises:
        InputError: fewer than two problems, an unknown quantity, a number that is not allowed, a group with
            one checkpoint or seed twice, or a wanted quantity that cannot be measured, for example without a
            batch.
        OperationError: no checkpoint near the common loss.

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
        run_source["loss"] = loss
    sides, entries, grouped = _entries(problems, run_source)
    chosen = [BY_NAME[name] for name in dict.fromkeys(quantities)]
    chosen = chosen or [quantity for quantity in QUANTITIES if not quantity.by_name]
    batch_size, chosen, batch_notes = _batch(entries, batch, chosen, bool(quantities))
    radii = float(rise), float(rho), float(rho_average)
    settings = Settings(batch_size, draws, planes, *radii, k, preconditioner_of)
    given_steps = [entry.step for entry in entries]
    common_loss = math.nan
    if equal_loss:
        entries, common_loss = _at_equal_loss(entries, loss_tol)
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
    labels = tuple(entry.label for entry in entries)
    sources = [entry.source() for entry in entries]
    return Comparison(
        **described(rows, loss_name, one_loss),
        **differences(rows, len(sides), max(column.eps for column in columns), significance),
        **{name: value for name, value in vars(settings).items() if name != "preconditioner_of"},
        sides=tuple(sides),
        labels=labels,
        sources=tuple(name for name, _ in sources),
        sources_sha256=tuple(digest for _, digest in sources),
        side_of=np.array(side_of),
        steps=np.array([entry.step for entry in entries]),
        given_steps=np.array(given_steps),
        significance=float(significance),
        grouped=grouped,
        equal_loss=common_loss,
        notes=(*batch_notes, *_notes(chosen, columns, labels), *remarks(rows, sides, side_of)),
        seed=seed,
        sample_counts=np.array([column.setting["samples"] for column in columns]),
        dtype=columns[0].setting["dtype"],
        split=SPLIT,
        batchnorm=any(column.setting["batchnorm"] for column in columns),
        loss_name=loss_name,
        loss_unit=loss_unit,
    )


class _Column(NamedTuple):
    """The measurements of one checkpoint: for each quantity a cell, or the error; the loss and its code."""

    cells: list[Measured | LandscapeError]
    loss: tuple[str, Any]
    setting: dict[str, Any]
    parameters: int
    eps: float


def _columns_of(
    entries: Sequence[Entry], quantities: Sequence[Quantity], settings: Settings, seed: int, grouped: bool,
    progress: ProgressOption,
) -> list[_Column]:  # fmt: skip
    """The measurements of all entries: with common draws, or, ``grouped``, with draws of each entry's own."""
    columns = []
    first_subject = None  # the origin of "distance", "barrier" and "same-basin"
    for m, entry in enumerate(entries):
        entry_seed = int(np.random.SeedSequence((seed, m)).generate_state(1)[0]) if grouped else seed
        part = portion(progress, m / len(entries), (m + 1) / len(entries))
        subject = Subject(entry.subject, entry_seed, first_subject)
        first_subject = first_subject or subject
        columns.append(_measured(subject, quantities, settings, part))
    return columns


def _measured(
    subject: Subject, quantities: Sequence[Quantity], settings: Settings, progress: Progress
) -> _Column:
    """Measure all quantities of one checkpoint."""
    problem = subject.problem
    cells: list[Measured | LandscapeError] = []
    for k, quantity in enumerate(quantities):
        part = portion(progress, k / len(quantities), (k + 1) / len(quantities))
        try:
            cells.append(quantity.measure(subject, settings, part))
        except LandscapeError as error:  # becomes a note of the table
            cells.append(error)
        part(1.0)
    loss, eps = problem.criterion, torch.finfo(problem.dtype).eps
    # The code tells lambdas apart, which have one name.
    code = getattr(getattr(loss, "func", loss), "__code__", None)
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
    """(names of the sides, empty without names; entries; whether the sides are groups).

    ``source``: arguments of the runs' problems.
    """
    names = list(problems) if isinstance(problems, Mapping) else []
    values: Any = problems.values() if isinstance(problems, Mapping) else problems
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = [values]
    members_or_groups: list[Any] = list(values)
    grouped = any(isinstance(value, (list, tuple)) for value in members_or_groups)
    sides = [list(value) if isinstance(value, (list, tuple)) else [value] for value in members_or_groups]
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
