"""landscape contour, hessian-grid, line and basins: planes around checkpoints, and files that are resumed."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from landscape.analysis.grids import contour as compute_contour
from landscape.analysis.grids import hessian_grid as compute_hessian_grid
from landscape.analysis.grids import line as compute_line
from landscape.analysis.planes import (
    IGNORES,
    NORMS,
    between,
    eigen_plane,
    learners_plane,
    pca_plane,
    random_plane,
)
from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common, processes
from landscape.cli.analysis import Analysis, analysis_options, each
from landscape.cli.completion import Choice
from landscape.cli.options import command, group
from landscape.cli.processes import Processes, Team
from landscape.core import hdf5
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.evaluation.grid import MismatchError, axes, coincide, difference, reused_points
from landscape.geometry.surfaces import AROUND
from landscape.problem.problem import Problem
from landscape.results import base
from landscape.results.base import load_results
from landscape.results.grids import HessianGrid, Interpolated, Line, Plane, Surface

KINDS = ("random", "between", "pca", "learners", "eigen")


@dataclass(frozen=True)
class Chosen:
    """The kind of the planes; ``norm`` and ``ignore`` are of random ones.

    Args:
        kind: random; between (through two or three CKPTs); pca (of the step-*.h5 up to the CKPT); learners
            (nearest to all learners); eigen (Hessian eigenvectors of λ_max and λ_min).
        norm: Directions: none (i.i.d. normal, the paper's), filter or layer (Li et al. 2018).
        ignore: What random directions leave out: none, or bias+norm (bias and norm parameters). [default:
            bias+norm with --norm filter, else none]
    """

    kind: str = "random"
    norm: str = "none"
    ignore: str | None = None


PLANE = group(
    Chosen,
    kind={"flag": "--plane", "type": Choice(KINDS)},
    norm={"type": Choice(NORMS)},
    ignore={"type": Choice(IGNORES)},
)


def chosen_groups(chosen: Chosen, runs: list[Checkpoint]) -> list[list[Checkpoint]]:
    """The checkpoints of each surface, its own first; all options are checked before any work."""
    kind, norm, ignore = chosen.kind, chosen.norm, chosen.ignore
    if kind != "random" and (norm != "none" or ignore is not None):
        raise InputError(f"--norm, --ignore: they are for random planes, '--plane {kind}' has none to scale")
    if kind == "random":
        same_layout(runs)
    if kind == "between":
        if len(runs) not in (2, 3):
            raise InputError(
                f"--plane between: {len(runs)} checkpoints are not allowed, it takes two or three"
            )
        same_network(runs)
        return [runs]
    return [[run, *trajectory(run)] if kind == "pca" else [run] for run in runs]


def make_plane(chosen: Chosen, problem: Problem, group: list[Checkpoint], seed: int) -> Plane:
    """The plane around the problem of a group's checkpoint; errors name its file."""
    kind, run = chosen.kind, group[0]
    if kind == "random":
        return random_plane(problem, norm=chosen.norm, seed=seed, ignore=chosen.ignore)
    try:
        if kind == "between":
            return between(problem, [r.mean for r in group], titles(group), seed=seed)
        if kind == "pca":
            path = [*group[1:], run]
            return pca_plane(problem, [r.mean for r in path], [f"step {r.step:,}" for r in path])
        if kind == "learners":
            return learners_plane(problem, run.weights)
        return eigen_plane(problem, seed=seed)
    except LandscapeError as error:
        raise OperationError(f"{run.path}: {error}") from error


def same_layout(runs: list[Checkpoint]) -> None:
    """OperationError unless all weights have the same names and shapes, so that a direction fits them all."""
    first = runs[0]
    for run in runs[1:]:
        if run.layout != first.layout:
            raise OperationError(
                f"{run.path}: its layout of {run.layout.size:,} weights is not that of {first.path} "
                f"({first.layout.size:,}); they share no directions"
            )


def same_network(runs: list[Checkpoint]) -> None:
    """OperationError unless all checkpoints hold weights of one network, trained on the same data."""
    same_layout(runs)
    first = runs[0]
    for run in runs[1:]:
        if run.model != first.model:
            raise OperationError(
                f"{run.path}: its model {run.model['name']} {run.model['options']} is not that of "
                f"{first.path}, {first.model['name']} {first.model['options']}"
            )
        if run.data["fingerprint"] != first.data["fingerprint"]:
            raise OperationError(
                f"{run.path}: trained on other data than {first.path}; both must have the same"
            )


def trajectory(run: Checkpoint) -> list[Checkpoint]:
    """The checkpoints step-*.h5 before ``run`` in its folder, in order of their steps."""
    assert run.path is not None
    by_step: dict[int, Checkpoint] = {}
    for path in run_folder.steps(run.path.parent):
        saved = Checkpoint.load(path, whole_history=False)
        by_step.setdefault(saved.step, saved)  # a copy under another name is not taken twice
    earlier = [by_step[step] for step in sorted(by_step) if step < run.step]
    if len(earlier) < 2:
        raise OperationError(
            f"{run.path}: {len(earlier)} earlier step-*.h5 in its folder, '--plane pca' needs at least 2 "
            "(see checkpoint.every)"
        )
    same_network([run, *earlier])
    return earlier


def titles(runs: list[Checkpoint]) -> list[str]:
    """What to call checkpoints in one picture: their labels, or their paths where labels are equal."""
    labels = [run.label for run in runs]
    return labels if len(set(labels)) == len(labels) else [str(run.path) for run in runs]


def ends(problem: Problem, runs: list[Checkpoint]) -> torch.Tensor:
    """The means (2, P) of two checkpoints, where the problem is. OperationError for what is not finite."""
    for run in runs:
        if not bool(torch.isfinite(run.mean).all()):
            raise OperationError(f"{run.path}: its weights are NaN or infinite, all must be finite")
    return torch.stack([run.mean for run in runs]).to(problem.weights)


R = TypeVar("R", bound=Interpolated)


class GridFile(Generic[R]):
    """Results of ``kind``, one for each of ``origins`` (where it comes from), in the file ``path``.

    Results in the file of the same checkpoints, with the same values in the fields ``wanted``, are resumed.
    OperationError where the file has anything that would be lost, except with ``force``; then a message says
    why it is replaced.
    """

    def __init__(
        self,
        path: Path,
        kind: type[R],
        origins: Sequence[base.Provenance],
        wanted: Mapping[str, Any],
        force: bool,
    ) -> None:
        self._path, self._force = path, force
        self._reasons: list[str] = []  # printed when work starts: the command may still end with an error
        self._results: list[R] = []
        self._stored = self._read(kind)
        self._past: list[R | None] = [None] * len(origins)
        places = {origin["source_sha256"]: i for i, origin in enumerate(origins)}
        every = {sha for key in places for sha in key.split(", ")}
        for result in self._stored:
            of: str = getattr(result, "source_sha256", "")
            i = places.get(of)
            label = {} if i is None else {"label": origins[i]["label"]}  # the label names other data
            # A surface between checkpoints is of several: of these, it differs from one around them in kind.
            reason = "" if every.isdisjoint(of.split(", ")) else difference(result, {**wanted, **label})
            if i is None or reason:
                self._replace(reason or f"it is of other checkpoints ({getattr(result, 'label', '')})")
            else:
                self._past = [
                    result if origin["source_sha256"] == origins[i]["source_sha256"] else past
                    for origin, past in zip(origins, self._past, strict=True)
                ]

    def _read(self, kind: type[R]) -> list[R]:
        if not self._path.exists():
            return []
        results = base.load_results(self._path)
        same = [result for result in results if isinstance(result, kind)]
        if not same:
            self._replace(f"it holds a {results[0].schema}")
        return same

    def _replace(self, reason: str) -> None:
        """Replace what the file holds; OperationError where that is not allowed."""
        if not self._force:
            raise OperationError(
                f"{self._path}: holds another result, {reason}; give --force to replace it, or another -o"
            )
        if reason not in self._reasons:
            self._reasons.append(reason)

    def _explain_replacement(self) -> None:
        for reason in self._reasons:
            common.message(f"{self._path}: cannot be resumed, {reason}; computed from the start")
        self._reasons = []

    @property
    def previous(self) -> R | None:
        """The earlier result in the file for the next checkpoint, if any."""
        return self._past[len(self._results)]

    def add(self, compute: Callable[..., R], team: Team, x: hdf5.Array, y: hdf5.Array) -> tuple[R, R | None]:
        """The next result, by ``compute(previous=…, save=…, group=…, cluster=…)``, and what it used.

        ``x`` and ``y`` are the coordinates that it has. OperationError where it lacks points of the previous
        one, unless by force.
        """
        previous = self.previous
        if previous is not None:
            self._keep_points(previous, x, y)
        self._explain_replacement()
        compute = functools.partial(compute, save=self._save, group=team.group, cluster=team.cluster)
        try:
            result = compute(previous=previous)
        except MismatchError as error:
            self._replace(str(error))
            self._explain_replacement()
            previous = None
            result = compute()
        if result is not previous and len(self._results) + 1 < len(self._past) and team.rank == 0:
            self._save(result)  # in case the next one fails
        self._results.append(result)
        return result, previous

    def _keep_points(self, previous: Any, x: hdf5.Array, y: hdf5.Array) -> None:
        across, up = coincide(x, previous.x)[1], coincide(y, previous.y)[1]
        before, after = int(previous.done.sum()), int(previous.done[np.ix_(up, across)].sum())
        if after < before and not self._force:
            nx, ny = len(previous.x), len(previous.y)
            raise OperationError(
                f"{self._path}: holds {before:,} points of a grid of {nx} × {ny} over [−{previous.span:g}, "
                f"{previous.span:g}], of which {before - after:,} would be lost; give --force to replace "
                f"them, another -o, or a grid that has them all, such as --grid {2 * nx - 1}x{2 * ny - 1}"
            )

    def _save(self, result: R) -> None:
        """Write the finished results, ``result`` as it is, and the earlier ones of the next checkpoints."""
        ahead = [past for past in self._past[len(self._results) + 1 :] if past is not None]
        base.save([*self._results, result, *ahead], self._path)

    def finish(self, picture: str | None) -> None:
        """Write the file unless it has these results already; draw them, print the files' names on stdout."""
        if len(self._stored) == len(self._results) and all(map(operator.is_, self._stored, self._results)):
            common.message(f"{self._path}: complete already, nothing is computed")
        else:
            base.save(self._results, self._path)
        common.show(self._results, self._path, picture)


def compute_on_grid(
    analysis: Analysis,
    chosen: Chosen,
    processes: Processes,
    name: str,
    kind: type[R],
    compute: Callable[..., R],
) -> None:
    """A result of ``compute(problem, plane, …)`` around each checkpoint, in one file, which is resumed.

    An earlier result must be equal in all fields that are options, except ``kind.may_differ``.
    """
    team = processes.join()
    groups = chosen_groups(chosen, analysis.open())
    path = analysis.path(groups[0][0], name, chosen.kind, chosen.norm, resumes=True)
    origins = [analysis.about(*(group if chosen.kind == "between" else group[:1])) for group in groups]
    where = {"split": analysis.split, "dtype": analysis.dtype, "seed": analysis.seed}
    asked = {**where, **analysis.settings, **vars(chosen)}
    free = kind.may_differ if chosen.kind in ("random", "eigen") else kind.may_differ | {"seed"}
    fixed = {field.name for field in dataclasses.fields(kind)} - free
    wanted = {key: value for key, value in asked.items() if key in fixed and value is not None}
    if team.rank == 0:
        common.lock(path)
    file = GridFile(path, kind, origins, wanted, analysis.target.force)
    settings, span = analysis.settings, analysis.settings["span"]
    with team:
        for i, (group, progress) in enumerate(each(name, groups)):
            problem = analysis.problem(group[0])
            if chosen.kind == "eigen" and isinstance(file.previous, Surface):
                plane = file.previous.plane(problem.weights)  # costly to find, and the same but for rounding
            else:
                plane = make_plane(chosen, problem, group, analysis.seed)
            partial = functools.partial(compute, problem, plane, **settings, progress=progress, **origins[i])
            corners = axes(settings["grid"], plane.span if span is None else span)
            result, previous = file.add(partial, team, *corners)
            common.describe(result)
            if previous:
                known = reused_points(previous, result)
                common.values(f"  {known:,} of {result.exact.size:,} points were in the file")
    if team.rank == 0:
        file.finish(analysis.target.picture)


@command(
    plane=PLANE,
    processes=processes.OPTIONS,
    analysis=analysis_options(compute_contour, grid={"default": "50"}),
)
def contour(plane: Chosen, processes: Processes, analysis: Analysis) -> None:
    """Loss contours over a plane around w_a of each CKPT; all have common levels.

    Random directions (the default) are the same for all CKPTs; "between" draws one surface through all. The
    other defaults are those of the paper's figures.

    The result file is written during the computation; after an interruption, the same command resumes it.
    With --tolerance 1% a smooth surface takes a tenth of the points; the error of the others is estimated and
    kept. The same command without it computes them.

    Points in the file are not computed again: a grid of 49 contains all points of a grid of 25, a grid of 50
    only its corners. Points that the new grid does not contain, and results of other checkpoints or options,
    are replaced only with --force.

    Example:
        landscape contour runs/ss/last.h5 runs/dp/last.h5 --norm filter --span 1 --plot both.png
    """
    compute_on_grid(analysis, plane, processes, "contour", Surface, compute_contour)


@command(
    plane=PLANE,
    processes=processes.OPTIONS,
    analysis=analysis_options(
        compute_hessian_grid,
        grid={"default": "4"},
        max_products={"help": "Hessian-vector products a point, at most."},
    ),
)
def hessian_grid(plane: Chosen, processes: Processes, analysis: Analysis) -> None:
    """Extreme Hessian eigenvalues and |λ_min|/|λ_max| on a grid around w_a of each CKPT.

    Example:
        landscape hessian-grid runs/dp/step-0000250.h5 --grid 4 --plot ratio.png
    """
    compute_on_grid(analysis, plane, processes, "hessian", HessianGrid, compute_hessian_grid)


@command(
    norm={"type": Choice(NORMS)},
    ignore={"type": Choice(IGNORES)},
    analysis=analysis_options(
        compute_line,
        metavar="CKPT [CKPT]",
        path=None,
        span={"help": "One CKPT: t runs over [−span, span]. [default: 0.1]"},
    ),
)
def line(*, norm: str = "none", ignore: str | None, analysis: Analysis) -> None:
    """Loss and accuracy on the line between w_a of two CKPTs, with the barrier between them.

    With one CKPT, along a random direction through its w_a: the first that contour draws from the same seed.

    Args:
        norm, ignore: One CKPT: as for contour.

    Example:
        landscape line runs/ss/last.h5 runs/dp/last.h5 --plot barrier.png
    """
    count = len(analysis.checkpoints)
    if count > 2:
        raise InputError(f"CKPT: {count} checkpoints are not allowed, it must be one or two")
    if count == 2 and (analysis.settings["span"] is not None or norm != "none" or ignore is not None):
        raise InputError(
            "--span, --norm, --ignore: they are for one CKPT; a line between two has none to set"
        )
    runs = analysis.open()
    same_network(runs)
    kind = "between" if len(runs) == 2 else "random"

    def compute(run: Checkpoint, *others: Checkpoint, seed: int, **settings: Any) -> Line:
        problem = analysis.problem(run)
        if others:
            first, last = titles(runs)
            return compute_line(problem, ends(problem, runs), ends=(first, last), **settings)
        along = random_plane(problem, norm=norm, seed=seed, ignore=ignore).directions[0]
        return compute_line(problem, along, **settings)

    analysis.compute("line", [tuple(runs)], compute, kind, norm)


@command(
    rises={"flag": "--rise", "metavar": "NATS"},
    least={"metavar": "NATS"},
    around={"type": Choice(AROUND)},
    target=common.TARGET,
)
def basins(
    files: tuple[str, ...],
    rises: tuple[float, ...],
    least: float | None,
    around: str | None,
    target: common.Target,
) -> None:
    """Basins of the contours in FILEs: where they merge, and how wide they are at a given rise.

    Pure arithmetic on files that landscape contour wrote. Prints the basins by persistence, and area, volume
    and widths of the region around the centre (or the lowest point) in distances of weight space.

    Args:
        rises: Measure the region where the loss rises by at most NATS; can be repeated. [default: 24 rises up
            to the one at which the region reaches the edge of the grid]
        least: The smallest persistence of a basin that is listed. [default: 1% of the median rise]
        around: The point in the region. [default: as the plane has it]

    Example:
        landscape basins runs/dp/last-contour.h5 --rise 0.05 --plot basins.png
    """
    surfaces = [surface for file in files for surface in _surfaces(Path(file))]
    first = Path(files[0])
    path = target.path(first.with_name(f"{first.stem}-basins.h5"))
    results = [surface.basins(rises or None, least=least, around=around) for surface in surfaces]
    for result in results:
        common.describe(result)
    common.write(results, path, target.picture)


def _surfaces(path: Path) -> list[Surface]:
    """The surfaces in a file, all points of which are computed."""
    found = load_results(path)
    for surface in found:
        if not isinstance(surface, Surface):
            raise OperationError(
                f"{path}: holds a {surface.schema}, a surface of landscape contour is needed"
            )
        if not surface.done.all() and not surface.columns:
            raise OperationError(
                f"{path}: is not finished, run its command again to compute the other points"
            )
    return [surface for surface in found if isinstance(surface, Surface)]
