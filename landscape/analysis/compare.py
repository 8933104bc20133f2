"""Compare minima: every measure of flatness at each minimum, and tests of the differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from landscape.analysis.quantities import (
    BOUND,
    BY_NAME,
    QUANTITIES,
    SE,
    SEEDS,
    MeasuredValue,
    Preconditioning,
    Quantity,
    Row,
    Settings,
    Subject,
    metric_quantity,
)
from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import hdf5
from landscape.core.analysis import analysis
from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import SPLIT, AtLeastTwo, Count, OneOf, Positive, Seed, Within, fit
from landscape.core.progress import Progress, ProgressOption, portion
from landscape.core.statistics import holm
from landscape.evaluation.grid import setting
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.losses import describe_loss
from landscape.problem.metrics import Metrics, names_of
from landscape.problem.problem import Loss, Problem
from landscape.results.comparison import Comparison

# Losses count as equal within this share of the common loss (our choice: quantities such as λ_max, which fall
# with the loss, then change by about the same share, far less than the differences of interest).
LOSS_TOL = 0.1


def _at_equal_loss(entries: Sequence[Entry], loss_tol: float) -> tuple[list[Entry], float]:
    """Replace each run by the one of its checkpoints whose training loss is nearest to a common loss.

    The common loss is the highest training loss of the given runs, because every other run had a loss this
    high earlier in its training. A run's candidates are itself and its earlier checkpoints, which are files
    step-*.h5 in its folder.

    Args:
        entries: the runs.
        loss_tol: how far the loss of a chosen checkpoint may be from the common loss, as a share of the
            common loss.

    Returns:
        The new entries, and the common loss in nats.

    Raises:
        InputError: an entry that is not a run, or a run that was not read from a file.
        OperationError: a run whose training loss is not finite, or with no checkpoint within ``loss_tol``.
    """
    runs = [entry.run for entry in entries if entry.run]
    if len(runs) < len(entries):
        raise InputError("equal_loss: a problem has no earlier checkpoints, give runs or their files instead")
    for run in runs:
        if run.path is None:
            raise InputError(f"equal_loss: {run.label} was not read from a file, give the run's checkpoint")
    losses = [run.problem(SPLIT).loss() for run in runs]
    for run, loss in zip(runs, losses, strict=True):
        if not math.isfinite(loss):
            raise OperationError(f"{run.path}: its training loss is {loss:g}, so that no other can be equal")
    common_loss = max(losses)
    nearest_entries = []
    for entry, run, loss in zip(entries, runs, losses, strict=True):
        nearest, nearest_loss = _nearest_checkpoint(run, loss, common_loss)
        if abs(nearest_loss - common_loss) > loss_tol * abs(common_loss):
            cause = f"no checkpoint of its run has a training loss within {loss_tol:.0%} of {common_loss:.4g}"
            remedy = f"the nearest is step {nearest.step:,} with {nearest_loss:.4g}; raise loss_tol"
            raise OperationError(f"{run.path}: {cause}; {remedy}")
        nearest_entries.append(replace(entry, subject=nearest, label=nearest.label))
    return nearest_entries, common_loss


def _nearest_checkpoint(run: Checkpoint, loss: float, common_loss: float) -> tuple[Checkpoint, float]:
    """Return the checkpoint up to ``run`` whose loss is nearest to ``common_loss``, and its loss.

    ``loss`` is that of ``run``. Files of other runs in the same folder are left out.
    """
    nearest, nearest_loss = run, loss
    if loss == common_loss:
        return nearest, nearest_loss
    assert run.path is not None
    problem = run.problem(SPLIT)
    # The statistics of BatchNorm belong to the weights, so that each checkpoint needs its own model.
    batchnorm = has_batchnorm(problem.model)
    for path in storage.steps(run.path.parent):
        earlier = Checkpoint.load(path, whole_history=False).using(**run.source)
        same_run = (earlier.algorithm, earlier.seed, earlier.layout) == (run.algorithm, run.seed, run.layout)
        if not same_run or earlier.step >= run.step:
            continue
        mean = earlier.mean.to(problem.weights)
        earlier_loss = earlier.problem(SPLIT).loss() if batchnorm else problem.loss(mean)
        if abs(earlier_loss - common_loss) < abs(nearest_loss - common_loss):
            nearest, nearest_loss = earlier, earlier_loss
    return nearest, nearest_loss


# Differences below this number of rounding errors count as zero, as between losses that must be the same
# (landscape.evaluation.grid).
ROUNDINGS = 1000


def difference_fields(
    rows: Sequence[Row], side_count: int, eps: float, significance: float
) -> dict[str, Any]:
    """Return the fields of a :class:`.Comparison` about the differences between all pairs of sides.

    A difference is significant if it exceeds the rounding of the values, and if its error excludes zero. Zero
    is excluded by a test or, for a quantity without a test, if the difference exceeds the bound on its error.

    Args:
        rows: the Q quantities, each with the values of all sides.
        side_count: S, the number of sides; there are K = S(S − 1)/2 pairs of sides.
        eps: the relative rounding error of the values.
        significance: the significance level of all tests together.
    """
    pairs = np.array(list(combinations(range(side_count), 2)))  # (K, 2)
    differences, tests = [], []
    for row in rows:
        differences_and_tests = [row.difference(first, second) for first, second in pairs]
        differences.append([difference for difference, _ in differences_and_tests])
        tests.append(" or ".join(dict.fromkeys(test for _, test in differences_and_tests)))  # each name once

    def numbers(name: str) -> Array:
        """Return an attribute of all differences, (Q, K)."""
        return np.array([[getattr(difference, name) for difference in row] for row in differences], float)

    # Of a quantity without a test, the attribute ``standard_error`` holds the bound on the error.
    values, errors, p = numbers("value"), numbers("standard_error"), numbers("p")
    corrected_p = holm(p)
    magnitudes = np.array([[abs(side.value) for side in row.sides] for row in rows])  # (Q, S)
    larger_magnitudes = np.maximum(magnitudes[:, pairs[:, 0]], magnitudes[:, pairs[:, 1]])  # (Q, K)
    exceeds_rounding = np.abs(values) > ROUNDINGS * eps * larger_magnitudes
    has_test = np.array([row.kind == SE for row in rows])[:, None]  # tests need standard errors
    excludes_zero = np.where(has_test, corrected_p <= significance, np.abs(values) > errors)  # False for NaN
    return {
        "tests": tuple(tests),
        "first": pairs[:, 0],
        "second": pairs[:, 1],
        "difference": values,
        "difference_error": errors,
        "difference_freedom": numbers("freedom"),
        "p": p,
        "p_holm": corrected_p,
        "significant": exceeds_rounding & excludes_zero,
    }


def quantity_fields(rows: Sequence[Row], loss_name: str, same_loss: bool) -> dict[str, Any]:
    """Return the fields of a :class:`.Comparison` about the quantities, their values and their errors.

    Unless all sides have the ``same_loss`` function, no value says which side is flatter.
    """
    quantities = [row.quantity for row in rows]
    titles = [quantity.title.replace("training loss", f"training {loss_name}") for quantity in quantities]

    def of_sides(name: str) -> Array:  # (Q, S)
        return np.array([[getattr(side, name) for side in row.sides] for row in rows], float)

    return {
        "quantities": tuple(quantity.name for quantity in quantities),
        "titles": tuple(titles),
        "unit_names": tuple(quantity.unit for quantity in quantities),
        "flatter": np.array([quantity.flatter if same_loss else 0 for quantity in quantities]),
        "kinds": tuple(row.kind for row in rows),
        "own_kinds": tuple(quantity.kind for quantity in quantities),
        "over": tuple(row.over() for row in rows),
        "value": of_sides("value"),
        "error": of_sides("error"),
        "freedom": of_sides("freedom"),
        "own_value": np.array([[cell.value for cell in row.cells] for row in rows], float),
        "own_error": np.array([[cell.error for cell in row.cells] for row in rows], float),
    }


def group_notes(rows: Sequence[Row], sides: Sequence[str], side_of: Sequence[int]) -> list[str]:
    """Return notes on groups that are too small for a test, and on bounds that exceed standard errors.

    Args:
        rows: the quantities.
        sides: (S,), the names of the sides.
        side_of: (M,), the number of each checkpoint's side.
    """
    if not rows or not rows[0].grouped:
        return []
    notes = []
    counts = Counter(side_of)
    small = [f"{name} has {counts[side]}" for side, name in enumerate(sides) if counts[side] < SEEDS]
    if small:
        notes.append(f"no statement on groups of fewer than {SEEDS} seeds: {', '.join(small)}")
    for row in rows:
        if row.quantity.kind != BOUND:
            continue
        for index, side in enumerate(row.sides):
            cells = zip(row.cells, side_of, strict=True)
            bound = max(cell.error for cell, cell_side in cells if cell_side == index)
            if bound > side.error:
                numbers = f"the largest bound, {bound:.2g}, is above the standard error, {side.error:.2g}"
                notes.append(f"{row.quantity.name}, {sides[index]}: {numbers}")
    return notes


# The significance level of all tests of a table together (the usual one).
SIGNIFICANCE = 0.05
ProblemLike = Checkpoint | Problem | str | Path
Sides = Sequence[ProblemLike | Sequence[ProblemLike]] | Mapping[str, ProblemLike | Sequence[ProblemLike]]


@dataclass(frozen=True)
class Entry:
    """One checkpoint or problem of a comparison.

    Attributes:
        subject: the checkpoint or problem.
        label: its name in the table.
        side: the number of its side.
    """

    subject: Checkpoint | Problem
    label: str
    side: int

    @property
    def run(self) -> Checkpoint | None:
        """The checkpoint; None for a problem."""
        return self.subject if isinstance(self.subject, Checkpoint) else None

    @property
    def step(self) -> int:
        """The step of the checkpoint; −1 if it is unknown."""
        return self.run.step if self.run else -1

    def source(self) -> tuple[str, str]:
        """Return the name and the SHA-256 of the checkpoint's file, or two empty texts without a file."""
        path = self.run.path if self.run else None
        return (path.name, hdf5.sha256(path)) if path else ("", "")


QuantityName = Annotated[str, OneOf(tuple(BY_NAME))]


# ``shorter``: advice that a message shows during a long call. ``of_the_run=None``: the function gets the runs
# themselves, not their problems, and no argument is filled in from a run.
@analysis(shorter="a shorter list of quantities= or a part of the data", of_the_run=None)
def compare(
    problems: Sides,
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
    draws: AtLeastTwo = Settings.draws,
    planes: AtLeastTwo = Settings.planes,
    rise: Positive = Settings.rise,
    rho: Positive = Settings.rho,
    rho_average: Positive = Settings.rho_average,
    k: Count = Settings.k,
    significance: Annotated[float, Within(above=0, below=1)] = SIGNIFICANCE,
    preconditioner_of: Preconditioning | None = None,
    seed: Seed = 0,
    progress: ProgressOption = None,
) -> Comparison:
    """Measure several minima by every instrument, and test which differences are larger than their errors.

    If no item is a group, all are measured with the same minibatches, random vectors and planes. Their draws
    are therefore compared in pairs: by Student's t test or, for right and wrong answers on test samples, by
    McNemar's test. "disagreement" and "spread-cost", whose draws are learners, are compared by Welch's t
    test. Eigenvalues have bounds on their errors, which hold with a probability of 99%. Two eigenvalues
    differ if their difference exceeds the sum of their bounds.

    With groups, such as the seeds of two recipes, each member has its own draws, the error is the standard
    error over the group, and Welch's t test compares the means. Holm's correction is applied to all tests.

    Args:
        problems: two or more problems, runs, or names of runs' files or folders, as a list, or as a dict from
            names to items. An item may itself be a list: a group. If any item is a group, a single item
            counts as a group of one.
        batch: the number of samples in a minibatch; default: the runs' total batch. If the runs' batches
            differ, the quantities that need a batch are left out, with a note.
        quantities: their names, as ``landscape compare --help`` lists them; default: all that can be
            measured, except "distance", "barrier" and "same-basin". These three compare each item with the
            first one, after alignment of hidden units by weights (:func:`landscape.connect`).
        model, data, loss, data_dir, metrics: what the runs' files lack, as for
            :meth:`landscape.Checkpoint.problem`; the same for all runs.
        equal_loss: whether to replace each run by the one of its checkpoints that is nearest to a common
            training loss: the highest training loss of the given runs.
        loss_tol: how far the loss of a chosen checkpoint may be from the common loss, as a share of the
            common loss.
        draws: the number of minibatches; for average-case sharpness, of random displacements of the weights;
            the trace always takes 60 Hessian-vector products.
        planes: the number of random planes over which the basin width is averaged.
        rise: the rise of the loss, in nats, at which the basin width is measured.
        rho: ρ of worst-case adaptive sharpness.
        rho_average: ρ of average-case adaptive sharpness.
        k: the number of eigenvectors that span the sharp space.
        significance: the significance level of all tests together.
        preconditioner_of: a function from a run and its problem to the optimizer's preconditioner, such as
            :func:`landscape.preconditioner`; needed only for the quantity "preconditioned".
        seed: the seed of minibatches, vectors, displacements and planes.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.

    Returns:
        A table of the sides, which are the items of ``problems``. The table has ``value`` and ``error``
        (quantities, sides), ``difference`` and ``significant`` (quantities, pairs of sides), and ``notes`` on
        what could not be measured.

    Raises:
        InputError: an argument that is not allowed, a group that has a checkpoint or a seed twice, or a
            quantity that is named in ``quantities`` but cannot be measured.
        OperationError: with ``equal_loss``, a run whose loss is not finite, or with no checkpoint near the
            common loss.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> layer, loss = torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss()
        >>> sharp, flat = (landscape.Problem(layer, loss, (c * x, y)) for c in (1, 0.5))
        >>> result = landscape.compare({"sharp": sharp, "flat": flat}, quantities=["lambda-max", "trace"])
        >>> result.value.round(2).tolist(), result.significant.ravel().tolist()
        ([[9.0, 2.25], [10.0, 2.5]], [True, True])
    """
    arguments = {"model": model, "data": data, "data_dir": data_dir, "metrics": metrics}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if not (isinstance(loss, str) and loss == "data"):  # "data" stands for the loss of the runs' data sets
        arguments["loss"] = loss
    # A side is an item of ``problems``. An entry is one problem or checkpoint; a group has several entries.
    names, entries, grouped = _entries(problems, arguments)
    quantities_given = bool(quantities)
    requested = [BY_NAME[name] for name in dict.fromkeys(quantities)]
    if not requested:
        requested = [quantity for quantity in QUANTITIES if not quantity.on_request]
    batch, requested, batch_notes = _batch_and_quantities(entries, batch, requested, quantities_given)
    settings = Settings(
        batch, draws, planes, float(rise), float(rho), float(rho_average), k, preconditioner_of
    )
    given_steps = [entry.step for entry in entries]  # ``equal_loss`` changes the entries
    common_loss = math.nan
    if equal_loss:
        entries, common_loss = _at_equal_loss(entries, loss_tol)
    side_names = names or _short_names(entries)
    columns: list[_Column] = []  # the measurements of each entry
    first_subject = None
    for index, entry in enumerate(entries):
        entry_seed = seed
        if grouped:  # each checkpoint has its own draws, so that those of a group are independent
            entry_seed = int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
        column_progress = portion(progress, index / len(entries), (index + 1) / len(entries))
        subject = Subject(entry.subject, entry_seed, first_subject)
        if first_subject is None:  # its metrics become quantities, measured at all entries
            first_subject = subject
            requested += [metric_quantity(name) for name in names_of(subject.problem)]
        columns.append(_measure(subject, requested, settings, column_progress))
    names_and_units = {(column.setting["loss_name"], column.setting["loss_unit"]) for column in columns}
    loss_name, loss_unit = names_and_units.pop() if len(names_and_units) == 1 else ("loss", "")
    same_loss = len({column.loss_name_and_code for column in columns}) == 1
    side_of = [entry.side for entry in entries]
    rows = _rows(requested, columns, quantities_given, side_of, grouped)
    labels = tuple(entry.label for entry in entries)
    files = [entry.source() for entry in entries]  # (name, SHA-256) each
    notes = batch_notes + _column_notes(requested, columns, labels) + group_notes(rows, side_names, side_of)
    return Comparison(
        **quantity_fields(rows, loss_name, same_loss),
        **difference_fields(rows, len(side_names), max(column.eps for column in columns), significance),
        **{name: value for name, value in vars(settings).items() if name != "preconditioner_of"},
        sides=tuple(side_names),
        labels=labels,
        sources=tuple(name for name, _ in files),
        sources_sha256=tuple(digest for _, digest in files),
        side_of=np.array(side_of),
        steps=np.array([entry.step for entry in entries]),
        given_steps=np.array(given_steps),
        significance=float(significance),
        grouped=grouped,
        equal_loss=common_loss,  # in nats; NaN unless the argument ``equal_loss`` is True
        notes=tuple(notes),
        seed=seed,
        sample_counts=np.array([column.setting["samples"] for column in columns]),
        dtype=columns[0].setting["dtype"],
        split=SPLIT,
        batchnorm=any(column.setting["batchnorm"] for column in columns),
        loss_name=loss_name,
        loss_unit=loss_unit,
    )


class _Column(NamedTuple):
    """The measurements of one checkpoint.

    Attributes:
        cells: (Q,), the value of each quantity, or the error that its measurement raised.
        loss_name_and_code: the name of the loss function, and its code object, or None without one.
        setting: the loss and data, see :func:`landscape.evaluation.grid.setting`.
        parameters: the number of parameters.
        eps: the relative rounding error of the problem's precision.
    """

    cells: list[MeasuredValue | LandscapeError]
    loss_name_and_code: tuple[str, Any]
    setting: dict[str, Any]
    parameters: int
    eps: float


def _measure(
    subject: Subject, quantities: Sequence[Quantity], settings: Settings, progress: Progress
) -> _Column:
    """Measure all quantities of one checkpoint."""
    problem, cells = subject.problem, list[MeasuredValue | LandscapeError]()
    for index, quantity in enumerate(quantities):
        cell_progress = portion(progress, index / len(quantities), (index + 1) / len(quantities))
        try:
            cells.append(quantity.measure(subject, settings, cell_progress))
        except LandscapeError as error:  # becomes a note of the table
            cells.append(error)
        cell_progress(1.0)
    loss, eps = problem.criterion, torch.finfo(problem.dtype).eps
    code = getattr(getattr(loss, "func", loss), "__code__", None)  # differs between lambdas, unlike the name
    return _Column(cells, (describe_loss(loss), code), setting(problem), problem.layout.size, eps)


def _rows(
    quantities: Sequence[Quantity], columns: Sequence[_Column], quantities_given: bool,
    side_of: Sequence[int], grouped: bool,
) -> list[Row]:  # fmt: skip
    """Return the rows of the quantities that were measured at one checkpoint or more, with NaN elsewhere.

    Raises the first error if no quantity was measured, or if the caller gave the quantities and one of them
    was measured nowhere.
    """
    rows = list[Row]()
    for index, quantity in enumerate(quantities):
        cells = [column.cells[index] for column in columns]
        errors = [cell for cell in cells if isinstance(cell, LandscapeError)]
        is_last = index == len(quantities) - 1
        if len(errors) == len(cells):
            if quantities_given or (is_last and not rows):
                raise errors[0]
            continue
        unknown = MeasuredValue(math.nan, math.nan)
        values = [cell if isinstance(cell, MeasuredValue) else unknown for cell in cells]
        rows.append(Row.from_cells(quantity, values, side_of, grouped))
    return rows


def _column_notes(
    quantities: Sequence[Quantity], columns: Sequence[_Column], labels: Sequence[str]
) -> list[str]:
    """Return notes on different loss functions, networks or data, and on quantities that were not measured.

    ``labels`` name the columns.
    """
    notes = []
    loss_functions = dict.fromkeys(column.loss_name_and_code for column in columns)  # without repetitions
    if len(loss_functions) > 1:
        names = ", ".join(name for name, _code in loss_functions)
        notes.append(f"different losses ({names}): their numbers are not comparable")
    for index, quantity in enumerate(quantities):
        cells = [(label, column.cells[index]) for label, column in zip(labels, columns, strict=True)]
        errors = [(label, str(cell)) for label, cell in cells if isinstance(cell, LandscapeError)]
        if not errors:
            continue
        is_everywhere = len(errors) == len(columns)
        where = "" if is_everywhere else f" at {'; '.join(label for label, _ in errors)}"
        reasons = "; ".join(dict.fromkeys(reason for _, reason in errors))
        notes.append(f"{quantity.name} was not measured{where}: {reasons}")
    sizes = [column.parameters for column in columns]
    sample_counts = [column.setting["samples"] for column in columns]
    if len(set(sizes)) > 1:
        numbers = ", ".join(f"{size:,}" for size in sizes)
        notes.append(f"networks of different size ({numbers} parameters): their distances are not comparable")
    if len(set(sample_counts)) > 1:
        numbers = ", ".join(f"{count:,}" for count in sample_counts)
        notes.append(f"data of different size ({numbers} samples)")
    return notes


def _entries(problems: Sides, arguments: Mapping[str, Any]) -> tuple[list[str], list[Entry], bool]:
    """Return the names of the sides, the entries of all sides, and whether the sides are groups.

    The comparison is between the sides. A side is an item of ``problems``: a problem, a run or a group. The
    list of names is empty if the sides are neither named nor groups.

    Args:
        problems: as for :func:`compare`.
        arguments: the default arguments that each run gets for its :meth:`landscape.Checkpoint.problem`.
    """
    names = list(problems) if isinstance(problems, Mapping) else []
    items: Any = problems.values() if isinstance(problems, Mapping) else problems
    is_single = isinstance(items, str) or not isinstance(items, Iterable)
    items = [items] if is_single else list(items)  # a single item is one side: refused below
    grouped = any(isinstance(item, (list, tuple)) for item in items)
    sides = [list(item) if isinstance(item, (list, tuple)) else [item] for item in items]
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
                entries.append(Entry(member.using(**arguments), member.label, side))
                continue
            label = names[side] if names else member.name
            entries.append(Entry(member, label or f"problem {side + 1}", side))
        if grouped:
            _check_group(names[side], [entry for entry in entries if entry.side == side])
    return names, entries, grouped


def _check_group(name: str, entries: Sequence[Entry]) -> None:
    """Raise InputError if a group has equal weights or two runs of one seed: its error would be too small."""
    weights = [double(entry.run.mean).cpu().numpy().tobytes() for entry in entries if entry.run]
    problems = [id(entry.subject) for entry in entries if not entry.run]
    if len({*weights, *problems}) < len(entries):
        raise InputError(f"problems: the group '{name}' holds the same weights twice; leave one out")
    seeds = Counter(entry.run.seed for entry in entries if entry.run and entry.run.has_recipe)
    seed, count = max(seeds.items(), key=lambda item: item[1], default=(0, 0))
    if count > 1:
        raise InputError(f"problems: the group '{name}' has {count} checkpoints of seed {seed}; give one")


def _batch_and_quantities(
    entries: Sequence[Entry], batch: int | None, quantities: list[Quantity], quantities_given: bool
) -> tuple[int, list[Quantity], list[str]]:
    """Return the batch B, the quantities that can be measured with B, and a note on the other quantities.

    B is ``batch``, or the runs' total batch. B is 0 if no quantity needs a batch, or if the runs' batches
    differ. If they differ and the caller gave the quantities, raise InputError.
    """
    needing = ", ".join(quantity.name for quantity in quantities if quantity.needs_batch)
    if not needing:
        return 0, quantities, []
    if batch is not None:
        return int(batch), quantities, []
    sizes = {entry.run.batch if entry.run else 0 for entry in entries}  # 0: unknown
    if len(sizes) == 1 and 0 not in sizes:
        return max(sizes), quantities, []
    batches = ", ".join(f"{size:,}" if size else "unknown" for size in sorted(sizes))
    note = f"batch: missing, which {needing} need; the total batches are {batches}, give one for all"
    if quantities_given:
        raise InputError(note)
    return 0, [quantity for quantity in quantities if not quantity.needs_batch], [note]


def _short_names(entries: Sequence[Entry]) -> list[str]:
    """Return different names of the sides.

    They are the words of the labels that not all labels share, or the folders, or both, or numbered labels.
    """
    labels = [entry.label for entry in entries]
    words = [label.split(", ") for label in labels]
    shared_words = set.intersection(*map(set, words))
    short = [", ".join(word for word in label_words if word not in shared_words) for label_words in words]
    paths = [entry.run.path if entry.run else None for entry in entries]
    folders = [path.resolve().parent.name if path else "" for path in paths]
    with_folders = [f"{label} ({folder})" for label, folder in zip(labels, folders, strict=True)]
    for names in (short, folders, with_folders):
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{label} ({k + 1})" for k, label in enumerate(labels)]
