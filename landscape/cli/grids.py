"""landscape contour and hessian-grid, whose result file is written during the work, resumed, and reused."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from landscape.analysis.grids import contour as compute_contour
from landscape.analysis.grids import hessian_grid as compute_hessian_grid
from landscape.cli import common, planes, processes
from landscape.cli.analysis import Analysis, analysis_options, each
from landscape.cli.options import command
from landscape.cli.processes import Processes, Team
from landscape.core import hdf5
from landscape.core.errors import FailedError
from landscape.evaluation.grid import MismatchError, axes, coincide, difference, reused_points
from landscape.results import base
from landscape.results.grids import HessianGrid, Interpolated, Surface

R = TypeVar("R", bound=Interpolated)


class GridFile(Generic[R]):
    """Results of ``kind``, one for each of ``origins`` (where it comes from), in the file ``path``.

    Results in the file of the same checkpoints, with the same values in the fields ``wanted``, are resumed.
    FailedError where the file has anything that would be lost, except with ``force``; then a message says
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
        """Replace what the file holds; FailedError where that is not allowed."""
        if not self._force:
            raise FailedError(
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

        ``x`` and ``y`` are the coordinates that it has. FailedError where it lacks points of the previous
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
            raise FailedError(
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
    chosen: planes.Chosen,
    processes: Processes,
    name: str,
    kind: type[R],
    compute: Callable[..., R],
) -> None:
    """A result of ``compute(problem, plane, …)`` around each checkpoint, in one file, which is resumed.

    An earlier result must be equal in all fields that are options, except ``kind.may_differ``.
    """
    team = processes.join()
    groups = planes.check(chosen, analysis.open())
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
                plane = file.previous.plane(problem.theta)  # costly to find, and the same but for rounding
            else:
                plane = planes.make(chosen, problem, group, analysis.seed)
            partial = functools.partial(compute, problem, plane, **settings, progress=progress, **origins[i])
            corners = axes(settings["grid"], plane.span if span is None else span)
            result, previous = file.add(partial, team, *corners)
            common.describe(result)
            if previous:
                known = reused_points(previous, result)
                common.values(f"  {known:,} of {result.exact.size:,} points were in the file")
    if team.rank == 0:
        file.finish(analysis.target.picture)


# What a command gives to a function on a grid by itself.
_GIVEN = {"max_memory", "previous", "save", "group", "cluster", "progress"}


def option_names(compute: Callable[..., Any]) -> list[str]:
    """The parameters of ``compute`` that are options of its command: those with a default, but for _GIVEN."""
    known = inspect.signature(compute).parameters.values()
    return [p.name for p in known if p.default is not p.empty and p.name not in _GIVEN]


@command(
    plane=planes.OPTIONS,
    processes=processes.OPTIONS,
    analysis=analysis_options(compute_contour, *option_names(compute_contour), grid={"default": "50"}),
)
def contour(plane: planes.Chosen, processes: Processes, analysis: Analysis) -> None:
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
    plane=planes.OPTIONS,
    processes=processes.OPTIONS,
    analysis=analysis_options(
        compute_hessian_grid,
        *option_names(compute_hessian_grid),
        grid={"default": "4"},
        max_products={"help": "Hessian-vector products a point, at most."},
    ),
)
def hessian_grid(plane: planes.Chosen, processes: Processes, analysis: Analysis) -> None:
    """Extreme Hessian eigenvalues and |λ_min|/|λ_max| on a grid around w_a of each CKPT.

    Example:
        landscape hessian-grid runs/dp/step-0000250.h5 --grid 4 --plot ratio.png
    """
    compute_on_grid(analysis, plane, processes, "hessian", HessianGrid, compute_hessian_grid)
