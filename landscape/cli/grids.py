"""landscape contour, hessian-grid, line and basins: planes around checkpoints, and files that are resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from landscape.analysis import connection, grids, planes
from landscape.checkpoint import storage, user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common, processes
from landscape.cli.common import AnalysisCommand, analysis_options, say_cost, with_progress
from landscape.cli.options import OMIT, Choice, command, group
from landscape.cli.processes import Processes
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.hdf5 import sha256
from landscape.core.options import NonNegative, Positive
from landscape.evaluation.grid import Execution, reused_points
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.problem import Problem
from landscape.results import base, geometry
from landscape.results.base import load_results
from landscape.results.comparison import Connection
from landscape.results.grids import Line, Plane
from landscape.results.surfaces import Surface

KINDS = ("random", "between", "pca", "learners", "eigen")


@dataclass(frozen=True)
class PlaneOptions:
    """The kind of the planes, and how random directions are drawn.

    Args:
        kind: The plane's directions: random; between (through two or three CKPTs); pca (of the step-*.h5 up
            to the CKPT); learners (nearest to all learners); eigen (Hessian eigenvectors of λ_max and λ_min).
        norm: Scale of random directions: none (i.i.d. normal, as in the paper), filter or layer (Li et al.
            2018).
        ignore: Parameters that random directions leave unchanged: none, or bias+norm (bias and norm
            parameters). [default: bias+norm with --norm filter, else none]
        align: With --plane between: permute the hidden units of the second CKPT and the third to be near the
            first, matched by weights or activations. [default: not permuted]
    """

    kind: str = "random"
    norm: Literal["none", "filter", "layer"] = "none"
    ignore: Literal["none", "bias+norm"] | None = None
    align: Literal["weights", "activations"] | None = None


PLANE = group(PlaneOptions, kind={"flag": "--plane", "type": Choice(KINDS)})


def checkpoint_groups(options: PlaneOptions, runs: list[Checkpoint]) -> list[list[Checkpoint]]:
    """Return the checkpoints of each surface, its center first; refuse options that exclude each other."""
    kind = options.kind
    if kind != "random" and (options.norm != "none" or options.ignore is not None):
        raise InputError(f"--norm, --ignore: not allowed with '--plane {kind}', only with random")
    if options.align and kind != "between":
        raise InputError(f"--align: it is not allowed with '--plane {kind}', only with between")
    if kind == "random":
        check_layouts(runs)
    if kind == "between":
        if len(runs) not in (2, 3):
            raise InputError(f"--plane between: {len(runs)} checkpoints are not allowed, it takes 2 or 3")
        check_networks(runs)
        return [runs]
    return [[run, *trajectory(run)] if kind == "pca" else [run] for run in runs]


def make_plane(options: PlaneOptions, problem: Problem, group: list[Checkpoint], seed: int) -> Plane:
    """Return the plane of a group of checkpoints around the problem of the first; errors name its file."""
    kind, run = options.kind, group[0]
    if kind == "random":
        return planes.random_plane(problem, norm=options.norm, seed=seed, ignore=options.ignore)
    try:
        if kind == "between":
            names = titles(group)
            if options.align:
                names[1:] = [f"{name}, aligned" for name in names[1:]]
            return planes.between(problem, group, names, align=options.align or "none", seed=seed)
        if kind == "pca":
            path = [*group[1:], run]
            return planes.pca_plane(problem, path, [f"step {saved.step:,}" for saved in path])
        if kind == "learners":
            return planes.learners_plane(problem, run.weights)
        return planes.eigen_plane(problem, seed=seed)
    except LandscapeError as error:
        raise OperationError(f"{run.path}: {error}") from error


def check_layouts(runs: list[Checkpoint]) -> None:
    """Raise OperationError unless all checkpoints have parameters of the same names and shapes."""
    first = runs[0]
    for run in runs[1:]:
        if run.layout != first.layout:
            raise OperationError(f"{run.path}: its layout is not {first.path}'s; they share no directions")


def check_networks(runs: list[Checkpoint]) -> None:
    """Raise OperationError unless all checkpoints have weights of one network, trained on the same data."""
    check_layouts(runs)
    first = runs[0]
    for run in runs[1:]:
        if run.model != first.model:
            model = user_code.text_of(**run.model)
            raise OperationError(f"{run.path}: its model {model} is not that of {first.path}")
        if run.data["fingerprint"] != first.data["fingerprint"]:
            raise OperationError(f"{run.path}: trained on other data than {first.path}, it must be the same")


def trajectory(run: Checkpoint) -> list[Checkpoint]:
    """Return the checkpoints step-*.h5 before ``run`` in its folder, in order of their steps."""
    assert run.path is not None
    by_step: dict[int, Checkpoint] = {}
    for path in storage.steps(run.path.parent):
        saved = Checkpoint.load(path, whole_history=False)
        by_step.setdefault(saved.step, saved)  # only one of several copies of a step
    earlier = [by_step[step] for step in sorted(by_step) if step < run.step]
    if len(earlier) < 2:
        raise OperationError(f"{run.path}: {len(earlier)} earlier step-*.h5 beside it, --plane pca needs 2")
    check_networks([run, *earlier])
    return earlier


def titles(runs: list[Checkpoint]) -> list[str]:
    """Return the names of checkpoints in one picture: their labels, or their paths if labels are equal."""
    labels = [run.label for run in runs]
    return labels if len(set(labels)) == len(labels) else [str(run.path) for run in runs]


def compute_on_grid(
    analysis: AnalysisCommand, plane_options: PlaneOptions, processes: Processes, name: str,
    compute: Callable[..., Any],
) -> None:  # fmt: skip
    """Call ``compute(problem, plane, …)`` for each group of checkpoints, and write the results to one file.

    A group has the checkpoints of one plane, see :func:`checkpoint_groups`. Points that are in the file
    already are not computed again. ``name`` is part of the name of the file, and the title of the progress
    bar.
    """
    team = processes.start()  # with --nproc N, N new processes run the rest, and this one ends here
    groups = checkpoint_groups(plane_options, analysis.open())
    kind, align = plane_options.kind, plane_options.align
    align_words = ["aligned", align] if align else []
    path = analysis.path(groups[0][0], name, kind, *align_words, plane_options.norm)
    # With --plane between, a result's origin is all checkpoints of the group. With other planes it is the
    # first, and the others only give directions.
    origins = [analysis.about(*(runs if kind == "between" else runs[:1])) for runs in groups]
    results: list[base.Result] = []
    with analysis.target.opened(path, writes=team.rank == 0) as file:
        # ``only`` removes results of other weights or, without --force, raises an error about them.
        file.only([origin["source_sha256"] for origin in origins])
        with team.connected() as process_group:
            execution = Execution(process_group)
            for origin, (runs, progress) in zip(origins, with_progress(name, groups), strict=True):
                source_hash, problem = origin["source_sha256"], runs[0].problem()
                # The result in the file for the same weights, if any.
                saved = next((old for old in file if getattr(old, "source_sha256", "") == source_hash), None)
                if align and analysis.settings["bn"] == "center" and has_batchnorm(problem.model):
                    raise InputError("--align: aligned weights need new statistics; give --bn recalibrate")
                if kind == "eigen" and isinstance(saved, Surface) and saved.kind == "eigen":
                    # To compute the eigenvectors again would be costly, and would change them by rounding.
                    plane = saved.plane(problem.weights)
                else:
                    plane = make_plane(plane_options, problem, runs, analysis.seed)
                # A forecast holds only if this process computes all points.
                computes_all = saved is None and process_group is None
                if computes_all and compute is grids.hessian_grid:
                    say_cost(compute, problem, analysis.settings)
                options = {**analysis.settings, **origin, "progress": progress}
                result = compute(problem, plane, into=file, execution=execution, **options)
                results.append(result)
                analysis.say_if_other_data(runs[:1])
                common.describe(result)
                if file.resumed is not None:  # the earlier result whose points were reused
                    count = reused_points(file.resumed, result)
                    common.print_values(f"  {count:,} of {result.exact.size:,} points were in the file")
        # Further results of the same weights may be in the file. --force removes them.
        further_results = [old for old in file if all(old is not new for new in results)]
        # The new results come first, in the order of the checkpoints.
        file.keep(results if analysis.target.replace else [*results, *further_results])
    if team.rank == 0:
        common.show(results, file.path, analysis.target.picture)


@command(
    plane=PLANE,
    processes=processes.OPTIONS,
    analysis=analysis_options(grids.contour, metrics=True, grid={"default": "50"}),
)
def contour(plane: PlaneOptions, processes: Processes, analysis: AnalysisCommand) -> None:
    """Draw the loss on a plane around each checkpoint.

    Planes go through w_a of each CKPT, the mean of its learners; all pictures have common levels.

    Random directions (the default) are the same for all CKPTs; "between" draws one surface through all. The
    other defaults are those of the paper's figures.

    The result file is written during the computation; after an interruption, the same command resumes it.
    With --interpolation-tol 1%, a tenth of the points is enough for a smooth surface; the other points are
    interpolated, and the file has their estimated error. The same command without this option computes them.

    Points in the file are not computed again: a grid of 49 contains all points of a grid of 25, a grid of 50
    only its corners. Points that the new grid does not contain, and results of other checkpoints or options,
    are replaced only with --force.

    Example:
        landscape contour runs/ss/last.h5 runs/dp/last.h5 --norm filter --span 1 --plot both.png
    """
    compute_on_grid(analysis, plane, processes, "contour", grids.contour)


@command(
    plane=PLANE,
    processes=processes.OPTIONS,
    analysis=analysis_options(grids.hessian_grid, metrics=True, grid={"default": "4"}),
)
def hessian_grid(plane: PlaneOptions, processes: Processes, analysis: AnalysisCommand) -> None:
    """Compute extreme Hessian eigenvalues on a grid.

    The center of the grid is w_a of each CKPT; the ratio |λ_min|/|λ_max| is computed at each point, too.

    Example:
        landscape hessian-grid runs/dp/step-0000250.h5 --grid 4 --plot ratio.png
    """
    compute_on_grid(analysis, plane, processes, "hessian", grids.hessian_grid)


@command(analysis=analysis_options(grids.line, metrics=True, metavar="CKPT [CKPT]", method=OMIT, labels=OMIT))
def line(
    *, norm: Literal["none", "filter", "layer"] = "none", ignore: Literal["none", "bias+norm"] | None,
    analysis: AnalysisCommand,
) -> None:  # fmt: skip
    """Compute loss and accuracy between two checkpoints.

    Each CKPT has a w_a, the mean of its learners' weights; the line connects the two. The barrier on the line
    is printed, too.

    With one CKPT, the line goes through its w_a in a random direction: the first direction that landscape
    contour draws from the same seed.

    Args:
        norm, ignore: Only with one CKPT: as in landscape contour.

    Example:
        landscape line runs/ss/last.h5 runs/dp/last.h5 --plot barrier.png
    """
    count = len(analysis.checkpoints)
    if count > 2:
        raise InputError(f"CKPT: {count} checkpoints are not allowed, it must be one or two")
    if count == 2 and (analysis.settings["span"] is not None or norm != "none" or ignore is not None):
        raise InputError("--span, --norm, --ignore: not allowed with two CKPTs, only with one")
    runs = analysis.open()
    check_networks(runs)

    def compute(run: Checkpoint, *others: Checkpoint, seed: int, **settings: Any) -> Line:
        problem = run.problem()
        if others:
            return grids.line(problem, run, *others, labels=titles([run, *others]), **settings)
        direction = planes.random_plane(problem, norm=norm, seed=seed, ignore=ignore).directions[0]
        return grids.line(problem, direction, **settings)

    analysis.compute("line", [tuple(runs)], compute, variant=["between" if count == 2 else "random", norm])


@command(analysis=analysis_options(connection.connect, metrics=True, metavar="CKPT CKPT", split=False))
def connect(analysis: AnalysisCommand) -> None:
    """Compute the barrier between two checkpoints.

    It is computed on the line between their w_a, on the line after alignment, and along a curve.

    Alignment permutes the hidden units of the second checkpoint so that its weights come near to those of the
    first; its function stays the same. The curve is trained on the training set; all losses are losses on the
    training set.

    Example:
        landscape connect runs/ss/last.h5 runs/dp/last.h5 --plot connection.png
    """
    if len(analysis.checkpoints) != 2:
        raise InputError(f"CKPT: {len(analysis.checkpoints)} checkpoints are not allowed, it must be two")
    runs = analysis.open()
    check_networks(runs)

    def compute(first: Checkpoint, second: Checkpoint, **settings: Any) -> Connection:
        return connection.connect(first.problem(), first, second, **settings)

    analysis.compute("connect", [tuple(runs)], compute)


@command(
    rises={"flag": "--rise", "metavar": "NATS,…"},
    least={"metavar": "NATS"},
    around={"type": Choice(geometry.AROUND)},
    target=common.TARGET,
)
def basins(
    files: tuple[str, ...], rises: Sequence[Positive] | None, least: NonNegative | None, around: str | None,
    target: common.Target,
) -> None:  # fmt: skip
    """Measure the basins of contours: merges and widths.

    The FILEs are results of landscape contour; no loss is computed. Prints the basins in order of their
    persistence: the loss where a basin merges with a deeper one, minus the lowest loss of the basin. Also
    prints the area, volume and widths of the region around the center (or the lowest point). Lengths are
    distances in weight space.

    Args:
        rises: Measure the region around a point (see --around) where the loss is at most NATS above the loss
            at the point. [default: 24 values up to the rise at which the region reaches the edge of the grid]
        least: The smallest persistence of a basin that is listed. [default: 1% of the difference between the
            median loss and the lowest loss, but at least twice the error of interpolated losses]
        around: The point that the region contains. [default: center for planes around one network, else
            lowest]

    Example:
        landscape basins runs/dp/last-contour.h5 --rise 0.05 --plot basins.png
    """
    first = Path(files[0])
    surfaces = [surface for file in files for surface in _surfaces(Path(file))]
    target.write(
        first.with_name(f"{first.stem}-basins.h5"),
        sources=[f"{Path(file).name} ({sha256(file)[:16]})" for file in files],
        compute=lambda: (geometry.basins(surface, rises, least=least, around=around) for surface in surfaces),
        describe=common.describe,
    )


def _surfaces(path: Path) -> list[Surface]:
    """Return the surfaces of a file; refuse other results, and surfaces that are not finished."""
    results = load_results(path)
    for surface in results:
        if not isinstance(surface, Surface):
            raise OperationError(f"{path}: it contains a {surface.schema}, a surface is needed")
        if not surface.done.all() and not surface.columns:
            raise OperationError(f"{path}: is not finished; its command, run again, computes the rest")
    return [surface for surface in results if isinstance(surface, Surface)]
