"""A figure: its runs at each scale, how long they take, and a drawing of their finished results.

The runs are those of figures.toml. Scale ``paper`` is the paper's setting; ``laptop`` what two cores do in
half an hour a figure, on real data; ``smoke`` some steps on the bundled digits, which only show that a figure
can be made. All that is changed is ours.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import latest
from landscape.core import registry
from landscape.core.devices import pick_device
from landscape.core.options import check_keywords, parse_toml
from landscape.data.base import samples_of
from landscape.paper.compared import Compared
from landscape.paper.context import SCALES, Cell, Context, Point, Scale, digest, identity
from landscape.paper.run_times import calibrate
from landscape.paper.verdicts import Judge, Rows
from landscape.training.recipes import SAMPLES, recipe
from landscape.training.recipes.recipe import Recipe

if TYPE_CHECKING:  # matplotlib is imported where a figure is drawn
    from matplotlib.figure import Figure as Picture

# CIFAR-10 at laptop scale: pixels per side of an image, epochs, and widths of the networks (our choice by
# trial: a run takes minutes on one core). Learners, batches and rates are the paper's.
SIZE, EPOCHS = 16, 20
WIDTHS, WIDTH, SMOKE_WIDTH = {"efficientnet-b0": 0.25}, 0.125, 0.0625
# Samples of a learner in the steps that are timed, up to the first steps that take BUSY_SECONDS; the time of
# more samples follows from a straight line (our choice: within 10% for a ResNet, SENet and EfficientNet).
TIMED_SAMPLES, BUSY_SECONDS = (16, 64, 512), 0.02
FORECAST_SECONDS = 0.1  # of such a measurement, which is printed with one or two digits (our choice)
# A measurement of λ_max along a run takes as long as this number of gradients of its samples (measured with
# Figure 2(b)).
SHARPNESS_PASSES = 30
# The same for a measurement of the instruments, for each eigenvector, as eigenvectors take most of the time
# (our choice: 17 with the MLP of Figure 2(b), 15 with LeNet-5, k = 10).
EIGENVECTOR_PASSES = 16


@functools.cache
def figures_toml() -> dict[str, Any]:
    """Return the contents of figures.toml, which begins with a description of its tables."""
    path = Path(__file__).with_name("figures.toml")
    return parse_toml(path.read_text(encoding="utf-8"), path.name)


@dataclass(frozen=True)
class Block:
    """The keys of a table of cells in figures.toml."""

    recipe: str
    seeds: list[int]
    axes: list[Any] = field(default_factory=list)
    set: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    epochs: int = EPOCHS

    def cells(self, scale: Scale) -> Iterator[Cell]:
        """Yield all combinations of the values of the axes, each with its seeds."""
        for axis_rows in itertools.product(*(_rows(axis, scale) for axis in self.axes)):
            values: dict[str, Any] = dict(itertools.chain(*axis_rows))
            values |= {name: template.format(**values) for name, template in self.labels.items()}
            name = self.recipe.format(**values)
            changes = [template.format(**values) for template in self.set]
            for seed in range(self.seeds[SCALES.index(scale)]):
                yield Cell(
                    values | {"seed": seed}, scaled(scale, name, filter(None, changes), seed, self.epochs)
                )


def _rows(axis: Any, scale: Scale) -> list[list[tuple[str, Any]]]:
    """Return the rows of an axis, or of one by name, as pairs of column and value."""
    columns = figures_toml()["axes"][axis] if isinstance(axis, str) else axis
    columns = columns.get(scale, columns)
    rows = zip(*columns.values(), strict=True)
    return [list(zip(columns, row, strict=True)) for row in rows]


def cells(named: Any, scale: Scale) -> list[Cell]:
    """Return the runs under cells.NAME in figures.toml, or of such a table, at ``scale``."""
    table = figures_toml()["cells"][named] if isinstance(named, str) else named
    blocks: list[dict[str, Any]] = table if isinstance(table, list) else [table]
    whole = [block | block.get(scale, {}) for block in blocks]
    blocks_here = [{key: value for key, value in block.items() if key not in SCALES} for block in whole]
    return [c for block in blocks_here for c in Block(**check_keywords("cells", block, Block)).cells(scale)]


def scaled(scale: Scale, name: str, settings: Iterable[str], seed: int, epochs: int = EPOCHS) -> Recipe:
    """Return a built-in recipe with ``settings`` at ``scale``; on a laptop, CIFAR-10 has ``epochs``."""
    settings, overrides = list(settings), [f"seed={seed}"]
    if "/" in name:  # settings come last: a rate of ours is one at each scale
        return recipe.read(name, [*_of_tables(scale, name, epochs), *settings, *overrides])
    base = recipe.read(name, settings)
    if name == "mnist-minimum":
        overrides += [
            "steps=600", "model.widths=[64, 50, 50, 10]", "data={name='digits'}", "batch=1437",
            "schedule.milestones=[]", "monitor.sharpness=0",
        ] * (scale == "smoke")  # fmt: skip
    elif not name.startswith("mnist-"):
        pass  # a plugin's: its cells say what a scale changes
    elif scale == "smoke":
        overrides += [
            f"steps={max(20, base.steps // 50)}", "evaluate.every=10", "checkpoint.every=10",
            f"batch={min(base.batch, 60 * base.learners)}",
            "model={name='mlp', widths=[64, 50, 50, 10]}", "data.name='digits'", "monitor.samples=200",
            f"decompose.every={5 * bool(base.decompose.every)}",
            f"monitor.sharpness={10 * bool(base.monitor.sharpness)}",
            *(["monitor.every=10", "monitor.draws=2"] if base.monitor.instruments else []),
        ]  # fmt: skip
    else:
        overrides += [f"checkpoint.every={min(500, base.steps // 10)}"]
    return recipe.read(name, [*settings, *overrides])


@functools.cache
def _of_tables(scale: Scale, name: str, epochs: int) -> list[str]:
    """Return the settings that ``scale`` changes in a recipe of the tables."""
    base, speech = recipe.read(name), name.startswith("speech/")
    model = base.model["name"]
    if scale == "smoke":
        small = "inputs=8, layers=1, cells=8, bottleneck=8, classes=10" if speech else f"width={SMOKE_WIDTH}"
        return [
            f"data={{name='digits', form='{'frames' if speech else 'image'}'}}",
            f"learners={min(2, base.learners)}", "batch=16", "steps=4", "evaluate.every=2",
            "checkpoint.every=1", "schedule.base_batch=0", "lr=0.05",
            f"model={{name='{model}', {small}}}", *(["evaluate.bn_samples=64"] if not speech else []),
        ]  # fmt: skip
    if scale == "laptop" and speech:
        return ["model.layers=2", "model.cells=64", "model.bottleneck=64"]
    early = [f"checkpoint.every={-(-base.steps // 20)}"]  # after epoch 16 of 320, for Figure 4
    if scale == "laptop":
        evaluations = -(-epochs * SAMPLES["cifar10"] // (20 * base.batch))  # steps between 20 of them
        return [
            f"epochs={epochs}", f"data.size={SIZE}", f"model.width={WIDTHS.get(model, WIDTH)}",
            "evaluate.bn_samples=2000", f"evaluate.every={evaluations}", *(early if epochs > EPOCHS else []),
        ]  # fmt: skip
    return [] if speech else early


def seconds_of(context: Context, runs: Iterable[Recipe], seconds_by_kind: dict[str, float]) -> float:
    """Estimate the seconds that ``runs`` take on this machine if they are trained one after another.

    The estimate is the measured time of a sample's gradient times the number of gradients: those of the
    training steps, and those of the evaluations, decompositions, λ_max and instruments between the steps. The
    time to write checkpoints is left out.

    Args:
        context: the data and the device.
        runs: recipes of the runs.
        seconds_by_kind: kind of run -> seconds of a sample's gradient; missing kinds are measured and added.
    """
    total = 0.0
    for run in runs:
        # Runs that have these settings in common share one measurement.
        largest_timed_batch = min(max(TIMED_SAMPLES), run.local_batch)
        kind = digest(run.model, run.data, run.autocast, run.dtype, largest_timed_batch)
        if kind not in seconds_by_kind:
            seconds_by_kind[kind] = seconds_a_sample(context, run)
        spec = run.spec("data")
        dataset = context.dataset(spec.name, spec.options)
        train_samples, test_samples = samples_of(dataset.train), samples_of(dataset.test)
        monitor = run.monitor
        monitored_samples = monitor.samples or train_samples
        instruments_every = monitor.every if monitor.instruments else 0
        measurements = (  # (gradients of a measurement, steps from one measurement to the next; 0: never)
            (run.decompose.samples or train_samples, run.decompose.every),
            (test_samples / 3, run.evaluate.every),  # a loss takes a third of the time of a gradient
            (SHARPNESS_PASSES * monitored_samples, monitor.sharpness),  # λ_max every ``sharpness`` steps
            (EIGENVECTOR_PASSES * monitor.k * monitored_samples, instruments_every),
        )
        gradients_a_step = run.batch + sum(count / every for count, every in measurements if every)
        total += run.steps * gradients_a_step * seconds_by_kind[kind]
    return total


def seconds_a_sample(context: Context, recipe: Recipe) -> float:
    """Estimate the seconds of a sample's gradient in a step of ``recipe``, from steps with fewer samples."""
    # Minibatches drawn with replacement may be small also for a run that uses all samples in each step.
    timed_recipe = dataclasses.replace(
        recipe, accumulate=1, sampling="replacement", monitor=type(recipe.monitor)()
    )
    device, spec = pick_device(context.device), recipe.spec("data")
    data = context.dataset(spec.name, spec.options)
    samples, seconds, slope = 0, 0.0, 0.0  # slope: seconds per sample above the last measurement
    for index, more_samples in enumerate(sorted({min(n, recipe.local_batch) for n in TIMED_SAMPLES})):
        if index >= 2 and seconds > BUSY_SECONDS:
            break
        costs = calibrate(timed_recipe, more_samples, device=device, dataset=data, seconds=FORECAST_SECONDS)
        slope = max(0.0, costs.gradient - seconds) / (more_samples - samples)
        samples, seconds = more_samples, costs.gradient
    return (seconds + slope * (recipe.local_batch - samples)) / recipe.local_batch


@dataclass
class Drawing:
    """A finished figure.

    Attributes:
        pictures: the pictures by suffix of the file; "" for the first.
        rows: the data of the CSV file, from which alone the verdict on the claim follows.
        compared: numbers beside the paper's.
        remark: a sentence that follows the verdict.
    """

    pictures: dict[str, Picture]
    rows: Rows
    compared: list[Compared]
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Described:
    """The keys of a figure's table in figures.toml, where they are described."""

    where: str
    title: str
    claims: str
    finding: str
    laptop: str
    caption: str = ""
    detail: str = ""
    effect: str = ""
    smoke: str = "{smoke}"
    paper: str = ""
    weights: bool = False
    partial: bool = False
    cells: Any = ""
    sizes: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figure(Described):
    """One figure or table of a paper.

    Attributes:
        name: the name in ``landscape figures`` and of the table in figures.toml.
        judge: returns the effects behind the verdict on the claim, from the rows of the CSV.
        draw: makes the drawing, with matplotlib in the toolkit's style.
    """

    name: str
    judge: Judge
    draw: Callable[[Context], Drawing]

    def runs(self, scale: Scale) -> list[Cell]:
        """Return the runs that the figure needs at ``scale``."""
        return cells(self.cells, scale) if self.cells else []

    def of(self, context: Context) -> Context:
        """Return ``context`` with the runs and the sizes of this figure, of which nothing is computed yet."""
        sizes = {name: values[SCALES.index(context.scale)] for name, values in self.sizes.items()}
        runs = self.cells if self.cells and isinstance(self.cells, str) else self.name
        archives = (f"runs-{runs}", f"analyses-{self.name}")
        return context.of(self.runs(context.scale), sizes=sizes, archives=archives)

    def note(self, context: Context) -> str:
        """Return the changes of the scale to the paper's setting, and the number of unfinished runs."""
        notes = {"smoke": self.smoke, "laptop": self.laptop, "paper": self.paper or self.laptop}
        missing = sum(context.record(cell.recipe) is None for cell in context.cells)
        remark = f"; {missing} of {len(context.cells)} runs have not ended yet" if missing else ""
        return notes[context.scale].format(**figures_toml()["notes"]) + remark


def figure(
    name: str, judge: Judge, table: dict[str, Any] | None = None
) -> Callable[[Callable[[Context], Drawing]], Figure]:
    """Return a decorator that registers a function as the drawing of a :class:`Figure`.

    Args:
        name: name of the figure in ``landscape figures``.
        judge: takes the rows of the CSV file, and returns the effects that decide whether the paper's claim
            (``Described.claims``) holds.
        table: values of the fields of ``Described``, the base of :class:`Figure`. Default: the table ``name``
            of figures.toml in this package.

    Returns:
        The decorator, which returns the :class:`Figure` in place of the function.

    Raises:
        InputError: a key of ``table`` is unknown, or a key is missing.

    Example:
        >>> figure("mine", judge=lambda rows: [], table={"title": "my figure"})(lambda context: None)
        Traceback (most recent call last):
        landscape.core.errors.InputError: mine.where: missing...
    """

    def add(draw: Callable[[Context], Drawing]) -> Figure:
        # By default, the runs of a figure are those of the table cells.NAME, if figures.toml has it.
        named_cells = name if name in figures_toml()["cells"] else ""
        description = check_keywords(name, table or {"cells": named_cells, **figures_toml()[name]}, Described)
        new_figure = Figure(name=name, judge=judge, draw=draw, **description)
        return registry.figures.add(name)(new_figure)

    return add


def names() -> list[str]:
    """Return the figures by paper, in the order of the paper and then its tables; ours come last."""

    def sort_key(name: str) -> tuple[int, str, bool, str, str]:
        paper, _, part = get(name).where.partition(", ")
        numbered = part.startswith(("Figure", "Table"))
        return [*figures_toml()["papers"], paper].index(paper), paper, not numbered, part, name

    return sorted(registry.figures, key=sort_key)


def get(name: str) -> Figure:
    """Return the figure called ``name``. InputError names the most similar one."""
    return registry.figures[name]


def with_weights(figures: Iterable[Figure], scale: Scale) -> set[str]:
    """Return the identities of the runs whose weights figures need."""
    return {identity(cell.recipe) for entry in figures if entry.weights for cell in entry.runs(scale)}


def handle(label: str, **look: Any) -> Any:
    """Return an entry of a legend that is no curve of its own; gray where ``look`` has no color."""
    from matplotlib.lines import Line2D

    from landscape.plots.style import DARK

    return Line2D([], [], label=label, **{"color": DARK, **look})


def last(run: Checkpoint | Point, column: str) -> float:
    """Return the last number of a column of the history; NaN if it has none."""
    return latest(run.history, column)


def test_error(run: Checkpoint) -> float:
    """Test error of w_a where it was last evaluated, in %."""
    return 100 * (1 - last(run, "test_accuracy"))


def late(rows: Rows, *by: str) -> Rows:
    """Return the rows in the second half of the steps of each run; ``by`` are the columns that name a run."""
    last = rows.groupby(list(by))["step"].transform("max") if by else rows["step"].max()
    return rows[rows["step"] > last / 2]


def draw_ranges(ax: Any, groups: Any, offset: float = 1.0, **look: Any) -> None:
    """Draw the median and range of each of ``groups`` of a column, at its key times ``offset``."""
    of_group = groups.agg(["median", "min", "max"]).dropna()
    lengths = [of_group["median"] - of_group["min"], of_group["max"] - of_group["median"]]
    ax.errorbar(of_group.index * offset, of_group["median"], lengths, capsize=3, **look)
