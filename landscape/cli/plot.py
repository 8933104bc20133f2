"""landscape plot, with the films of --animate, whose surfaces are computed here, and landscape report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import torch

from landscape import plots, reports
from landscape.analysis.grids import contour
from landscape.analysis.planes import learners_plane
from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import latest
from landscape.cli import common, grids, measures
from landscape.cli.common import SOURCE, Source, about
from landscape.cli.options import Choice, Group, command, group, option
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.hdf5_check import first_words
from landscape.core.options import AtLeastTwo, Count, ends_in
from landscape.core.progress import Progress
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.plots import check_title
from landscape.plots.surface import STYLES
from landscape.problem.problem import Problem
from landscape.results.geometry import save_vts
from landscape.results.grids import Plane
from landscape.results.spectrum import Spectrum
from landscape.results.surfaces import Surface

if TYPE_CHECKING:  # matplotlib is imported where a film is drawn
    from landscape.plots.animation import Frame

# The defaults are ours: 25 × 25 points show the shape at the size of a film, which with 60 frames of 6 a
# second lasts ten seconds.
GRID, FRAMES, FPS, DPI = 25, 60, 6, 100
# Half the width of the picture, relative to the largest coordinate of a learner at the median checkpoint
# (our choice): the spread of a run falls by orders of magnitude, and its beginning would hide the rest.
RELATIVE_SPAN = 2.0


@dataclass(frozen=True, kw_only=True)
class Film:
    """The options of a film of a run.

    Args:
        animate: A film of the run FILE: its learners on the landscape around w_a at its checkpoints, with a
            dial of lr·λ_max and its limit.
        film_grid: Points along each axis of a film.
        frames: Largest number of frames of a film.
        fps: Frames per second of a film.
    """

    animate: str | None = None
    film_grid: AtLeastTwo = GRID
    frames: Count = FRAMES
    fps: Count = FPS
    source: Source


@command(
    output={"metavar": "F"},
    style={"type": Choice(STYLES)},
    log={"flag": "--log/--linear", "default": None},
    levels={"metavar": "N"},
    quantity={"metavar": "NAME"},
    vmax={"metavar": "V"},
    cmap={"metavar": "NAME"},
    width={"metavar": "W"},
    dpi={"metavar": "D"},
    film=group(Film, animate={"type": Choice(("learners",))}, source=SOURCE),
)
def plot(
    *, files: tuple[str, ...], output: str | None, style: str = "contour", quantity: str | None,
    log: bool | None, levels: AtLeastTwo | None, vmax: float | None, cmap: str | None, labels: bool,
    title: str = "", width: plots.Width | None, dpi: plots.Dpi | None, film: Film,
) -> None:  # fmt: skip
    """Draw training, contours, spectra and other results.

    One picture shows all FILEs, which must contain the same kind of result.

    The panels share levels and color scale. Several surfaces exported to F.vts become F-0.vts, F-1.vts and so
    on. "--animate learners" writes a film of a run; each frame shows its learners on the landscape around w_a
    at a step.

    Args:
        output: File to write: a picture (.png, .pdf or .svg), a surface for ParaView (.vts), or a film of
            --animate (.gif or .mp4). [default: FILE.png, FILE.gif]
        style: Style of surfaces: contour, hillshade (relief), surface (3-D) or difference (of two surfaces).
        quantity: What surfaces show: loss, accuracy, or a metric of landscape contour. [default: loss]
        log: Logarithmic or linear levels. [default: logarithmic if losses differ by a factor over 100]
        levels: Approximate number of contour levels. [default: 25 on a logarithmic scale; on a linear scale,
            levels 0.005 apart if this makes 4 to 40 levels, else 24 levels]
        vmax: Highest level; larger values have its color.
        cmap: Color map of matplotlib. [default: mako_r; rocket_r for ratios]
        labels: Write losses on the contour lines.
        title: Title in place of the default one.
        width: Width in inches for a paper, such as 3.3: small texts, no caption and no default title.
        dpi: Pixels per inch. [default: 150]

    Example:
        landscape plot runs/ss/last.h5 runs/dp/last.h5 -o training.png
    """
    options: dict[str, Any] = {"quantity": quantity, "log": log, "levels": levels, "vmax": vmax, "cmap": cmap}
    options |= {"width": width, "labels": labels or None, "title": title or None}  # None: not given
    options = {name: value for name, value in options.items() if value is not None}
    if film.animate is not None:
        given = [*options] if style == "contour" else [*options, "style"]  # "contour" is the default
        if given:
            raise InputError(f"--{given[0]}: not allowed with --animate")
        animate(files, output, film, dpi)
        return
    # ``checkpoint_in``: the folder of a run stands for its last checkpoint; any other path stays as it is.
    picture = Path(output or storage.checkpoint_in(Path(files[0])).with_suffix(".png"))
    if picture.suffix == ".vts":
        common.print_files(*_export(plots.loaded(files), picture))
        return
    plots.check_format(picture)
    results = plots.loaded(files)
    common.make_folder(picture.parent)
    check_title("--title", title)
    try:
        plots.draw(results, picture, dpi=dpi, style=style, **options)
    except LandscapeError:
        raise
    except (ArithmeticError, LookupError, ValueError) as error:  # numbers that no axis can show
        cause = first_words(error)
        raise OperationError(f"{', '.join(files)}: values that cannot be drawn ({cause})") from error
    common.print_files(picture)


def _export(results: list[Any], path: Path) -> list[Path]:
    """Write each surface as a .vts file, and return the paths: ``path``, or with numbers if several."""
    for result in results:
        if not isinstance(result, Surface):
            raise InputError(f"{path}: only a surface becomes a .vts file, this is a {type(result).__name__}")
    common.make_folder(path.parent)
    paths = [path]
    if len(results) > 1:
        paths = [path.with_stem(f"{path.stem}-{i}") for i in range(len(results))]
    for result, target in zip(results, paths, strict=True):
        save_vts(result, target)
    return paths


def animate(files: tuple[str, ...], output: str | None, film: Film, dpi: float | None) -> None:
    """Write the film of one run."""
    if len(files) != 1:
        raise InputError(f"FILE: {len(files)} are not allowed with --animate, it must be one run")
    from landscape.plots import animation  # here, because it imports matplotlib, which only drawing needs

    last = storage.checkpoint_in(Path(files[0]))
    path = Path(output) if output else last.with_suffix(".gif")
    animation.check_film(path)
    common.make_folder(path.parent)
    runs = checkpoints(last, film.frames)
    with common.progress_bar("surfaces") as bar:
        film_frames = frames(runs, film, bar)
    with common.progress_bar("film") as bar:
        animation.save_film(film_frames, runs[-1].algorithm, path, film.fps, dpi or DPI, bar)
    common.print_files(path)


def checkpoints(last: Path, limit: int) -> list[Checkpoint]:
    """Return at most ``limit`` checkpoints, evenly chosen, of the run that ends with ``last``."""
    paths = [path for path in storage.steps(last.parent) if path != last]
    end = Checkpoint.load(last)
    if end.learners < 3:
        raise OperationError(f"{last}: {end.learners} learners span no plane, a film needs at least 3")
    earlier = [Checkpoint.load(path, whole_history=False) for path in paths]
    earlier = [run for run in earlier if run.step < end.step and run.weights.shape == end.weights.shape]
    runs = [run for run in [*earlier, end] if bool((run.weights != run.weights[0]).any())]
    if len(runs) < 2:
        cause = f"{len(runs)} checkpoints of its run have learners that differ, a film needs 2"
        raise OperationError(f"{last}: {cause}; train with --set checkpoint.every=N")
    indices = np.linspace(0, len(runs) - 1, min(limit, len(runs))).round().astype(int)
    return [runs[i] for i in np.unique(indices)]


def frames(runs: list[Checkpoint], film: Film, progress: Progress) -> list[Frame]:
    """Compute the frames of a film: for each checkpoint, the surface around w_a, ηλ_max and its limit.

    All surfaces have the same two directions: the first principal components of the deviations of the
    learners from w_a at all checkpoints. The matrix (n, P) of the deviations at a checkpoint is first divided
    by the norm of the matrix, so that all checkpoints have equal weight.

    Args:
        runs: checkpoints of one run, in the order of their steps.
        film: the options of the film.
        progress: takes the share of the frames that are computed.
    """
    from landscape.plots.animation import Frame

    spreads = [run.weights.double() - run.weights.double().mean(0) for run in runs]
    unit_spreads = torch.cat([spread / spread.norm() for spread in spreads])  # frames × n rows, P columns
    # film.source.of() opens a checkpoint with its data, on the CPU.
    first_problem = film.source.of(runs[0], "cpu").problem()
    directions = learners_plane(first_problem, unit_spreads).directions
    # The learners' coordinates in the plane at each checkpoint, (n, 2).
    positions = [(spread.to(directions) @ directions.T).numpy() for spread in spreads]
    span = RELATIVE_SPAN * float(np.median([np.abs(position).max() for position in positions]))
    axes = ("direction 1 of the spread", "direction 2 of the spread")
    whole_history = runs[-1].history  # the last checkpoint has the history of all steps
    film_frames = []
    for run, position in zip(runs, positions, strict=True):
        problem = film.source.of(run, "cpu").problem()
        markers = np.concatenate([position, np.zeros((1, 2))])  # w_a is the origin
        learner_names = tuple(f"learner {j}" for j in range(len(position)))
        marked_weights = torch.cat((run.weights, run.mean[None]))
        plane = Plane(
            problem.weights, directions, kind="learners", norm="none", seed=0, axes=axes, markers=markers,
            labels=(*learner_names, "w_a"), weights=marked_weights.to(problem.weights),
        )  # fmt: skip
        surface = contour(problem, plane, grid=film.film_grid, span=span, **about(run, "train"))
        until_now = whole_history["step"] <= run.step
        history = {name: column[until_now] for name, column in whole_history.items()}
        lr_lambda_max, limit = _lr_lambda_max(run, problem, latest(history, "lr_lambda_max"))
        film_frames.append(Frame(surface, run.step, lr_lambda_max, limit, latest(history, "train_loss")))
        progress(len(film_frames) / len(runs))
    return film_frames


def _lr_lambda_max(run: Checkpoint, problem: Problem, recorded: float) -> tuple[float, float]:
    """Return (ηλ_max, its limit): ηλ_max as the run recorded it or, if that is NaN, measured at w_a."""
    from landscape.training.experiments import operating_point  # here, as only a film needs it

    lr, limit, _ = operating_point(run)
    limit = float("nan") if limit is None else limit
    if np.isfinite(recorded):
        return recorded, limit
    return lr * float(top_eigenvalues(problem, 1, residual_tol=0.05).values[0]), limit


@command(output={"metavar": "F.html"}, source=Group(dict, [*SOURCE.options, option("device")]))
def report(
    *, files: tuple[str, ...], output: str = "report.html", title: str = "", analyse: bool,
    source: dict[str, Any],
) -> None:  # fmt: skip
    """Write one page about runs and results.

    The page has pictures, tables, the origin of the numbers, and surfaces that can be turned.

    A FILE is a checkpoint, a result, or the folder of a run with its results. The page lists the analyses
    that are missing, with the commands that compute them.

    Args:
        output: The page: one file that loads nothing from the network.
        title: Title in place of the default one.
        analyse: Compute missing contours, eigenvalues and traces of the checkpoints, as landscape contour and
            landscape spectrum do.

    Example:
        landscape report runs/ss runs/dp contour.h5 -o report.html --analyse
    """
    path = Path(output)
    ends_in("-o", path, reports.FORMATS)  # raises an error for another suffix
    reports.check_installed()
    common.make_folder(path.parent)
    paths = [Path(file) for file in files]
    contents = reports.read(paths)
    if analyse:
        new_files = _analyze(contents, path.parent, source)
        if new_files:
            contents = reports.read([*paths, *new_files])
    reports.write(contents, path, title)
    common.print_files(path)


def _analyze(contents: reports.Contents, folder: Path, values: dict[str, Any]) -> list[Path]:
    """Compute the contours and spectra that are missing, and return their files.

    A file is next to its checkpoint or, if that folder cannot be written to, next to the page. ``values`` has
    the values of the options --model, --data, --device and so on.
    """
    context = click.get_current_context()
    new_files = []
    spectrum_options: dict[str, Any] = {"quantities": ("extremes", "trace")}
    for result_type, analysis in ((Surface, grids.contour), (Spectrum, measures.spectrum)):
        options = spectrum_options if result_type is Spectrum else {}
        for path in contents.lacking(result_type):
            target = path.with_name(f"{path.stem}-{analysis.name}.h5")
            if not os.access(path.parent, os.W_OK):
                target = folder / f"{path.resolve().parent.name}-{target.name}"
            try:
                context.invoke(analysis, checkpoints=(str(path),), output=str(target), **options, **values)
            except OperationError as error:
                if "replace" in error.give:  # this command has no option --replace
                    error.give, error.otherwise = {}, "this file, too, or move it"
                raise
            new_files.append(target)
    return new_files
