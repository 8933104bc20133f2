"""What a figure is: the runs it needs at each scale, and a drawing of their finished results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from landscape.analysis.contour import contour
from landscape.analysis.hessian_grid import hessian_grid
from landscape.analysis.planes import random_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.run_folder import steps
from landscape.core import registry
from landscape.paper.run_cache import RunCache
from landscape.problem.problem import Problem
from landscape.results import base
from landscape.results.hessian_grid import HessianGrid
from landscape.results.surface import Surface
from landscape.train.recipe import Recipe

if TYPE_CHECKING:  # matplotlib is imported where a figure is drawn
    from matplotlib.figure import Figure as Picture

Scale = Literal["smoke", "laptop", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "paper")
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
    """A finished figure: pictures by suffix ("" for the first), data, numbers, and the result for the claim.

    ``rows`` become the CSV; all have the same keys. ``claim_holds`` is None where the data does not decide.
    """

    pictures: dict[str, Picture]
    rows: list[dict[str, Any]]
    compared: list[Compared]
    conclusion: str
    claim_holds: bool | None


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper, by ``name``; ``where`` it is and what it ``claims``.

    ``notes`` says what each scale changes from the paper, and what is ours.
    """

    name: str
    where: str
    title: str
    claims: str
    notes: Mapping[Scale, str]
    runs: Callable[[Scale], Runs]
    draw: Callable[[Work], Drawing]


@dataclass
class Work:
    """A figure in progress: its finished runs, and analyses of them, each computed once."""

    figure: Figure
    scale: Scale
    cache: RunCache
    runs: Runs
    seconds: float = 0.0
    _ends: dict[str, Checkpoint] = field(default_factory=dict)

    @property
    def about(self) -> str:
        """The first words of each picture's caption: the figure, the scale, and what the scale changes."""
        entry = self.figure
        note = " ".join(entry.notes[self.scale].split())
        return f"{entry.where}: {entry.title}. {self.scale.capitalize()} scale: {note}."

    def pick(self, smoke: R2, laptop: R2, paper: R2) -> R2:
        """The value for this scale."""
        return {"smoke": smoke, "laptop": laptop, "paper": paper}[self.scale]

    def end(self, key: str) -> Checkpoint:
        """The last checkpoint of the run ``key``."""
        if key not in self._ends:
            self._ends[key] = Checkpoint.load(self.folder(key) / "last.h5")
        return self._ends[key]

    def folder(self, key: str) -> Path:
        """The folder of the run ``key``."""
        return self.cache.run_folder(self.runs[key])

    def checkpoints(self, key: str) -> list[Checkpoint]:
        """The checkpoints of the run ``key`` in order, without that of its start."""
        saved = [Checkpoint.load(path, whole_history=False) for path in steps(self.folder(key))]
        return [point for point in saved if point.step]

    def group(self, prefix: str) -> list[Checkpoint]:
        """The ends of the runs ``prefix``/SEED, by seed."""
        keys = [key for key in self.runs if key.rpartition("/")[0] == prefix]
        assert keys, prefix
        return [self.end(key) for key in sorted(keys, key=lambda key: int(key.rpartition("/")[2]))]

    def problem(self, end: Checkpoint, split: str = "test") -> Problem:
        """The mean's problem at a checkpoint."""
        return self.cache.problem(end, split)

    def cached(
        self,
        kind: type[R],
        ends: Checkpoint | Sequence[Checkpoint],
        settings: Mapping[str, Any],
        make: Callable[[], R | Sequence[R]],
    ) -> list[R]:
        """``make()``, computed once for these checkpoints and ``settings``: all that it depends on."""
        several = [ends] if isinstance(ends, Checkpoint) else list(ends)
        what = {"of": [[self._name(end), end.step] for end in several], **settings}
        results = self.cache.cached(kind, what, make)
        self.seconds += self.cache.seconds(kind, what)
        return results

    def _name(self, end: Checkpoint) -> str:
        assert end.path is not None
        return end.path.parent.name

    def contour(self, end: Checkpoint, label: str = "", **settings: Any) -> Surface:
        """The contour of the test loss around w_a: ``grid``, ``span``, ``norm`` and ``samples`` (0: all)."""
        samples = settings.get("samples", 0)

        def make() -> Surface:
            problem = self._some(end, samples)
            plane = random_plane(problem, norm=settings.get("norm", "none"))
            grid, span = settings["grid"], settings.get("span", 0.1)
            return contour(
                problem, plane, grid=(grid, grid), span=span, split="test", label=label or end.label
            )

        return self.cached(Surface, end, settings | {"label": label}, make)[0]

    def hessian_grid(self, end: Checkpoint, label: str = "", **settings: Any) -> HessianGrid:
        """Hessian ratios of the test loss around w_a: ``grid``, ``samples`` (0: all) and ``products``."""

        def make() -> HessianGrid:
            problem, grid = self._some(end, settings["samples"]), settings["grid"]
            return hessian_grid(
                problem,
                random_plane(problem),
                grid=(grid, grid),
                max_products=settings["products"],
                split="test",
                label=label or end.label,
            )

        return self.cached(HessianGrid, end, settings | {"label": label}, make)[0]

    def _some(self, end: Checkpoint, samples: int) -> Problem:
        """The test problem, on its first ``samples`` (0: all)."""
        problem = self.problem(end)
        return problem.subset(slice(min(samples, problem.samples))) if samples else problem


def figure(
    name: str,
    where: str,
    title: str,
    claims: str,
    runs: Callable[[Scale], Runs],
    *,
    smoke: str,
    laptop: str,
    paper: str,
) -> Callable[[Callable[[Work], Drawing]], Figure]:
    """A decorator: add the :class:`Figure` that the function draws to the registry, under ``name``.

    Args:
        name: what ``landscape figures`` calls it.
        where: the paper and the figure, such as "DPSGD-2020, Figure 2(a)".
        title: what the figure shows.
        claims: what the paper claims.
        runs: gives the recipes of the runs at a scale.
        smoke, laptop, paper: what each scale changes from the paper.
    """

    def add(draw: Callable[[Work], Drawing]) -> Figure:
        notes: dict[Scale, str] = {"smoke": smoke, "laptop": laptop, "paper": paper}
        return registry.figures.add(name)(Figure(name, where, title, claims, notes, runs, draw))

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
