"""What a figure is: the runs it needs at each scale, and a drawing of their finished results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from landscape.analysis.contour import contour
from landscape.analysis.hessian_grid import hessian_grid
from landscape.analysis.planes import random_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.core.hdf5 import Array
from landscape.core.numerics import version_of
from landscape.paper.run_cache import RunCache, identity
from landscape.paper.verdicts import Judge, Rows
from landscape.problem.problem import Problem
from landscape.results import base
from landscape.results.hessian_grid import HessianGrid
from landscape.results.surface import Surface
from landscape.train.recipe import Recipe

if TYPE_CHECKING:  # matplotlib is imported where a figure is drawn
    from matplotlib.figure import Figure as Picture

Scale = Literal["smoke", "laptop", "workstation", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "workstation", "paper")
#: Runs by a key such as "dpsgd/0": what, then the seed.
Runs = Mapping[str, Recipe]
R = TypeVar("R", bound=base.Result)
R2 = TypeVar("R2")


@dataclass(frozen=True)
class Compared:
    """A number of ours and the paper's; ``paper`` is "" where the paper has none."""

    what: str
    ours: str
    paper: str = ""


@dataclass
class Drawing:
    """A finished figure: pictures by suffix ("" for the first), data, numbers, and a sentence about them.

    ``rows`` become the CSV, all with the same keys; from the CSV alone follows the verdict on the claim.
    """

    pictures: dict[str, Picture]
    rows: Rows
    compared: list[Compared]
    conclusion: str


def _no_more(work: Work) -> Runs:
    return {}


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper, by ``name``; ``where`` it is and what it ``claims``.

    ``notes`` says what each scale changes from the paper, and what is ours. ``judge`` gives the effects that
    the verdict on the claim rests on. ``more`` gives the runs that follow from the results of ``runs``;
    ``weights`` says that weights are needed, ``partial`` that it can be drawn while some runs have not ended.
    """

    name: str
    where: str
    title: str
    claims: str
    notes: Mapping[Scale, str]
    runs: Callable[[Scale], Runs]
    judge: Judge
    draw: Callable[[Work], Drawing]
    more: Callable[[Work], Runs] = _no_more
    weights: bool = False
    partial: bool = False


class WeightsNeededError(Exception):
    """The weights of a run are needed, which is known by its record alone."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe


@dataclass(frozen=True)
class Point:
    """A run at a step at which its weights were saved; they are read only where they are needed.

    ``history`` is that of the run's record, up to this step.
    """

    cache: RunCache
    recipe: Recipe
    step: int
    epoch: float
    label: str
    history: Mapping[str, Array]

    @property
    def key(self) -> list[Any]:
        """What identifies the weights."""
        return [identity(self.recipe), self.step]

    def load(self) -> Checkpoint:
        """The checkpoint with its weights.

        Raises:
            WeightsNeededError: it is not in the cache's folder of runs.
        """
        path = self.cache.run_folder(self.recipe) / f"step-{self.step:07d}.h5"
        if not path.exists():
            raise WeightsNeededError(self.recipe)
        return Checkpoint.load(path, whole_history=False)


@dataclass
class Work:
    """A figure in progress: its finished runs, and analyses of them, each computed once.

    ``versions``: the version of the numerics of all that was trained and computed for it.
    """

    figure: Figure
    scale: Scale
    cache: RunCache
    runs: Runs
    seconds: float = 0.0
    versions: dict[str, int] = field(default_factory=dict)
    _ends: dict[str, Checkpoint] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """The first words of each picture's caption: the figure, the scale, and what the scale changes."""
        entry = self.figure
        note = " ".join(entry.notes[self.scale].split())
        return f"{entry.where}: {entry.title}. {self.scale.capitalize()} scale: {note}.{self.unfinished}"

    @property
    def unfinished(self) -> str:
        """How many of the runs have not ended yet; "" where all have."""
        missing = [key for key in self.runs if not self.ended(key)]
        return f" {len(missing)} of {len(self.runs)} runs have not ended yet." if missing else ""

    def pick(self, smoke: R2, laptop: R2, paper: R2, workstation: R2 | None = None) -> R2:
        """The value for this scale; that of ``workstation`` is by default that of ``laptop``."""
        values = {"smoke": smoke, "laptop": laptop, "paper": paper, "workstation": workstation}
        found = values[self.scale]
        return laptop if found is None else found

    def ended(self, key: str) -> bool:
        """Whether the run ``key`` has ended."""
        return key in self._ends or self.cache.record(self.runs[key]) is not None

    def end(self, key: str) -> Checkpoint:
        """The end of the run ``key`` as its record has it: a history and no weights."""
        if key not in self._ends:
            record = self.cache.record(self.runs[key])
            assert record is not None, key
            self._ends[key] = record.checkpoint()
            self.versions["training"] = record.numerics
        return self._ends[key]

    def group(self, prefix: str) -> list[Checkpoint]:
        """The ends of the runs ``prefix``/SEED that have ended, by seed."""
        keys = [key for key in self.runs if key.rpartition("/")[0] == prefix]
        assert keys, prefix
        seeds = sorted(keys, key=lambda key: int(key.rpartition("/")[2]))
        return [self.end(key) for key in seeds if self.ended(key)]

    def groups(self) -> list[str]:
        """The prefixes of the runs, of those of which a seed has ended."""
        return list(dict.fromkeys(key.rpartition("/")[0] for key in self.runs if self.ended(key)))

    def points(self, key: str) -> list[Point]:
        """The run ``key`` where its weights were saved, in order, without its start."""
        record, end = self.cache.record(self.runs[key]), self.end(key)
        assert record is not None
        return [self._point(key, end, step) for step in record.checkpoints if step]

    def last(self, key: str) -> Point:
        """The run ``key`` at its end."""
        end = self.end(key)
        return self._point(key, end, end.step)

    def _point(self, key: str, end: Checkpoint, step: int) -> Point:
        rows = end.history["step"] <= step
        return Point(
            self.cache,
            self.runs[key],
            step,
            step * end.epoch / max(1, end.step),
            f"{end.algorithm}, seed {end.seed}, step {step:,}",
            {name: column[rows] for name, column in end.history.items()},
        )

    def problem(self, point: Point, split: str = "test") -> Problem:
        """The mean's problem at a point of a run."""
        return self.cache.problem(point.load(), split)

    def cached(
        self,
        kind: type[R],
        points: Point | Sequence[Point],
        settings: Mapping[str, Any],
        make: Callable[[], R | Sequence[R]],
        by: Sequence[Any],
    ) -> list[R]:
        """``make()``, computed once for these points, ``settings`` and versions of what computes it, ``by``.

        These must be all that it depends on; ``by`` are functions and classes under
        :func:`landscape.core.numerics.numerics`.
        """
        several = [points] if isinstance(points, Point) else list(points)
        versions = {function.__name__: version_of(function) for function in by}
        self.versions |= versions
        what = {"of": [point.key for point in several], "numerics": versions, **settings}
        results = self.cache.cached(kind, what, make)
        self.seconds += self.cache.seconds(kind, what)
        return results

    def contour(self, point: Point, label: str = "", **settings: Any) -> Surface:
        """The contour of the test loss around w_a: ``grid``, ``span``, ``norm`` and ``samples`` (0: all)."""
        samples = settings.get("samples", 0)

        def make() -> Surface:
            problem = self._some(point, samples)
            plane = random_plane(problem, norm=settings.get("norm", "none"))
            grid, span = settings["grid"], settings.get("span", 0.1)
            return contour(
                problem, plane, grid=(grid, grid), span=span, split="test", label=label or point.label
            )

        return self.cached(Surface, point, settings | {"label": label}, make, (contour, random_plane))[0]

    def hessian_grid(self, point: Point, label: str = "", **settings: Any) -> HessianGrid:
        """Hessian ratios of the test loss around w_a: ``grid``, ``samples`` (0: all) and ``products``."""

        def make() -> HessianGrid:
            problem, grid = self._some(point, settings["samples"]), settings["grid"]
            return hessian_grid(
                problem,
                random_plane(problem),
                grid=(grid, grid),
                max_products=settings["products"],
                split="test",
                label=label or point.label,
            )

        by = (hessian_grid, random_plane)
        return self.cached(HessianGrid, point, settings | {"label": label}, make, by)[0]

    def _some(self, point: Point, samples: int) -> Problem:
        """The test problem, on its first ``samples`` (0: all)."""
        problem = self.problem(point)
        return problem.subset(slice(min(samples, problem.samples))) if samples else problem


def figure(
    name: str,
    where: str,
    title: str,
    claims: str,
    runs: Callable[[Scale], Runs],
    judge: Judge,
    *,
    smoke: str,
    laptop: str,
    paper: str,
    workstation: str = "",
    **more: Any,
) -> Callable[[Callable[[Work], Drawing]], Figure]:
    """A decorator: add the :class:`Figure` that the function draws to the registry, under ``name``.

    Args:
        name: what ``landscape figures`` calls it.
        where: the paper and the figure, such as "DPSGD-2020, Figure 2(a)".
        title: what the figure shows.
        claims: what the paper claims.
        runs: gives the recipes of the runs at a scale.
        judge: gives the effects behind the verdict on the claim, from the rows of the CSV.
        smoke, laptop, paper: what each scale changes from the paper.
        workstation: the same; "": as ``laptop``.
        more: further fields of :class:`Figure`.
    """

    def add(draw: Callable[[Work], Drawing]) -> Figure:
        notes: dict[Scale, str] = {
            "smoke": smoke,
            "laptop": laptop,
            "workstation": workstation or laptop,
            "paper": paper,
        }
        entry = Figure(name, where, title, claims, notes, runs, judge, draw, **more)
        return registry.figures.add(name)(entry)

    return add


def names() -> list[str]:
    """The figures by paper, in the order of the paper, its other figures after its tables; ours come last."""
    papers = ("DPSGD-2020", "DPSGD-2021", "LocalSGD-2021", "Delay-2019")

    def place(name: str) -> tuple[int, bool, str, str]:
        entry = get(name)
        paper, _, part = entry.where.partition(", ")
        rank = (*papers, paper).index(paper)
        module = getattr(entry.draw, "__module__", "")  # independent of the order of imports
        return rank, not part.startswith(("Figure", "Table")), part, module

    return sorted(registry.figures, key=place)


def get(name: str) -> Figure:
    """The figure called ``name``. InputError names the nearest one."""
    entry: Figure = registry.figures[name]
    return entry


def test_error(run: Checkpoint) -> float:
    """Test error of w_a where it was last evaluated, in %."""
    accuracy = run.history["test_accuracy"]
    finite = accuracy[np.isfinite(accuracy)]
    return float(100 * (1 - finite[-1])) if len(finite) else float("nan")


def summary(values: Sequence[float], form: str = ".2f") -> str:
    """ "3.09 (2.69 to 4.53)": median and range, or the one value there is."""
    finite = np.array([v for v in values if np.isfinite(v)])
    if not len(finite):
        return "–"
    if len(finite) == 1:
        return f"{finite[0]:{form}}"
    return f"{np.median(finite):{form}} ({finite.min():{form}} to {finite.max():{form}})"


def mean_and_spread(values: Sequence[float], form: str = ".2f") -> str:
    """ "2.43 ± 0.11": mean and sample standard deviation, or the one value there is."""
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else "–"
    return f"{np.mean(values):{form}} ± {np.std(values, ddof=1):{form}}"
