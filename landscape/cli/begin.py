"""landscape demo, doctor and fetch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn.functional import cross_entropy

from landscape import data, plots, reports
from landscape.analysis.grids import contour
from landscape.analysis.noise import noise as compute_noise
from landscape.analysis.planes import learners_plane, random_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common, details, plot
from landscape.cli.common import Source, message, with_progress
from landscape.cli.options import FOLDER, Choice, command
from landscape.core.devices import pick_device
from landscape.core.errors import DataWarning, InputError, OperationError, warn_caller
from landscape.core.files import HAS_LOCKS
from landscape.core.progress import Progress, no_progress
from landscape.curvature.eigenvalues import extreme_eigenvalues
from landscape.data.base import cache_folder, data_root
from landscape.data.download import SOURCES, folder_of
from landscape.data.download import fetch as download
from landscape.problem.layout import Layout
from landscape.problem.problem import Problem
from landscape.results.base import save
from landscape.results.noise import Noise
from landscape.results.surfaces import Surface
from landscape.testing.device import Compared, calls, compared, networks, one_line
from landscape.training.processes.children import Pool
from landscape.training.recipes import recipe
from landscape.training.run import WRITERS
from landscape.training.run.launch import TrainingJob, train_runs

# From our trials: at rate 1, the outcome on the digits depends on rounding, and so on the machine. At 0.5,
# the only other rate tried, each of these seeds has the same outcome, also with another order of summation.
LR, STEPS, SEEDS, EARLY = 0.5, 500, (0, 1, 2, 3, 4), 50
FRAME = 25  # steps from one frame of the film to the next (our choice): 20 frames
SETTINGS = (f"lr={LR}", f"steps={STEPS}", "decompose.every=5", "evaluate.every=50", "monitor.sharpness=20")
NAMES = ("ssgd", "dpsgd")
AT_ONCE = 5  # runs at once, at most (our choice): each process takes 0.4 GB


@command(output=FOLDER)
def demo(*, output: str = "demo") -> None:
    """Train SSGD and DPSGD on digits, and compare them.

    Each algorithm is trained from five seeds. Writes the runs, the results contour.h5 and noise.h5, the
    pictures training.png, contour.png, noise.png and learners.gif, and report.html, one page about all of
    them. Existing runs are reused. docs/tutorials/demo.md explains the pictures.

    Args:
        output: Folder for runs and pictures.

    Example:
        landscape demo -o demo
    """
    folder = Path(output)
    common.make_folder(folder)
    with _one_thread() as usual_threads:
        runs = train(folder, at_once=usual_threads)  # as many runs at once, each with one thread
        surfaces = contours(runs)
        noises = noise(folder)
        with common.progress_bar("film") as bar:
            film_path = _film(folder, bar)
    save(surfaces, folder / "contour.h5")
    save(noises, folder / "noise.h5")
    plots.draw(runs, folder / "training.png")
    seed_0_surfaces = [surfaces[0], surfaces[len(SEEDS)]]  # SSGD's surfaces come first, then DPSGD's
    plots.draw(seed_0_surfaces, folder / "contour.png", style="hillshade")
    plots.draw(noises, folder / "noise.png")
    common.print_files(*(folder / f"{name}.png" for name in ("training", "contour", "noise")), film_path)
    _report(folder)


def _report(folder: Path) -> None:
    """Write the page about the runs and the results, with a plane of DPSGD's learners, seed 0.

    If a package for it is missing, a warning says what to install.
    """
    try:
        reports.check_installed()
    except OperationError as error:
        warn_caller(str(error), DataWarning)
        return
    run, plane = Checkpoint.load(folder / "dpsgd-0" / "last.h5"), folder / "learners.h5"
    contour(run, learners_plane(run, run.weights), grid=31).save(plane)
    paths = [folder / f"{name}-{seed}" for name, seed in itertools.product(NAMES, SEEDS)]
    reports.report([*paths, folder / "contour.h5", plane, folder / "noise.h5"], folder / "report.html")
    common.print_files(folder / "report.html")


@contextlib.contextmanager
def _one_thread() -> Iterator[int]:
    """Make torch use one thread inside, so that the order of sums is the same on all machines.

    Yields the number of threads that torch used before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def train(folder: Path, at_once: int) -> list[Checkpoint]:
    """Train the runs, ``at_once`` at a time with a thread each, and return their ends, SSGD's first."""
    jobs = []
    for name, seed in itertools.product(NAMES, SEEDS):
        every = FRAME if (name, seed) == ("dpsgd", 0) else STEPS
        settings = recipe.read(f"digits-{name}", (*SETTINGS, f"seed={seed}", f"checkpoint.every={every}"))
        jobs.append(TrainingJob(settings, folder / f"{name}-{seed}"))
    processes = min(at_once, AT_ONCE) if HAS_LOCKS else 1
    pool, ended = Pool(processes, threads=processes), list[TrainingJob]()
    with common.progress_bar("training") as bar:

        def count(run: TrainingJob, seconds: float | None) -> None:
            ended.append(run)
            bar(len(ended) / len(jobs))

        def report(share: float) -> None:
            bar((len(ended) + share) / len(jobs))

        train_runs(jobs, count, report, pool=pool, device="cpu", data_dir=None)
    return [Checkpoint.load(job.folder / "last.h5") for job in jobs]


def contours(runs: list[Checkpoint]) -> list[Surface]:
    """Compute the training loss around each run's end, on the plane of its seed."""
    jobs = with_progress("contours", runs)
    return [contour(run, random_plane(run), grid=31, progress=bar) for run, bar in jobs]


def noise(folder: Path) -> list[Noise]:
    """Compute Δ(2) of DPSGD, seed 0, early and at the end."""
    paths = [folder / "dpsgd-0" / f"step-{step:07d}.h5" for step in (EARLY, STEPS)]
    jobs = with_progress("noise", paths)
    return [compute_noise(Checkpoint.load(path), progress=bar) for path, bar in jobs]


def _film(folder: Path, progress: Progress) -> Path:
    """Write the film of DPSGD's learners, seed 0, and return its path."""
    from landscape.plots import animation

    path = folder / "learners.gif"
    film = plot.Film(film_grid=21, frames=25, fps=4, source=Source())
    runs = plot.checkpoints(folder / "dpsgd-0" / "last.h5", film.frames)
    frames = plot.frames(runs, film, progress)
    animation.save_film(frames, "dpsgd", path, film.fps, 80, no_progress)
    return path


# Package -> its purpose, and what to install with pip.
OPTIONAL = {
    "plotly": ("landscape report", "sgd-landscape[report]"),
    "jinja2": ("landscape report", "sgd-landscape[report]"),
    "xarray": ("Result.to_xarray", "sgd-landscape[frames]"),
    "torchvision": ("networks of ImageNet", "sgd-landscape[imagenet]"),
    "lightning": ("Lightning's callback", "sgd-landscape[lightning]"),
    "transformers": ("Hugging Face's callback", "sgd-landscape[huggingface]"),
    **{name: ("scalars of a run or Recorder", name) for name in WRITERS},
}
# The self-test: 200 digits and a network of 330 parameters, whose dense Hessian takes a second (our choice).
SAMPLES, TOL = 200, 1e-4
State = Literal["ok", "missing", "broken", "FAILED"]


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check of the installation.

    Attributes:
        name: What was checked, such as a package.
        state: "broken" for a package that is installed but cannot be imported; only for "FAILED" is the exit
            code 1.
        text: A version, a path, or what to do.
    """

    name: str
    state: State
    text: str


@command(device={"default": None})
def doctor(data_dir: str | None, device: str | None) -> None:
    """Check this installation, its devices and data.

    Prints versions, devices, data and optional packages, and tests eigenvalues on each device.

    The test compares λ_min and λ_max of a small network's Hessian with the eigenvalues of the dense matrix.
    If data or a package is missing, the command that installs it is printed. The exit code is 1 only if
    something that every command needs does not work.

    With --device, the command instead makes the same computations (losses, eigenvalues, short trainings and
    others) on the CPU and on that device, with small networks. It prints a table of the differences, which
    you can paste into an issue. This takes a minute or two. The exit code is then 1 if a difference is larger
    than allowed.

    Args:
        device: Compare this device with the CPU, call by call.

    Example:
        landscape doctor --device cuda
    """
    if device:
        _print_comparison(pick_device(device))
        return
    checks: list[Check] = []
    check_functions: dict[str, Callable[[], Iterable[Check]]] = {
        "versions": _check_versions_and_devices,
        "data": functools.partial(_check_data_sets, data_root(data_dir)),
        "cache": _check_cache,
        "packages": _check_packages,
    }
    # A line is "cpu: 2 threads …" or "cuda:0: …".
    device_names = [line.split(": ")[0] for line in details.devices()]
    for device_name in device_names:
        check_functions[f"Hessian on {device_name}"] = functools.partial(_check_hessian, device_name)
    with common.progress_bar("checks"):
        for name, function in check_functions.items():
            for check in _run_checks(name, function):
                checks.append(check)
                common.print_values(f"{check.state:8} {check.name:18} {check.text}")
    common.add_values(checks=[dataclasses.asdict(check) for check in checks])
    if failed := [check.name for check in checks if check.state == "FAILED"]:
        raise OperationError(f"doctor: failed: {', '.join(failed)}")


def _print_comparison(device: torch.device) -> None:
    """Print the table of calls on the CPU and on a device, row by row."""
    rows: list[Compared] = []
    common.print_values(f"{details.line()}; {platform.platform()}\n")
    common.print_values("| call | difference | allowed | time, CPU = 1 | |\n| --- | --- | --- | --- | --- |")
    with common.progress_bar("calls") as bar:
        for row in compared(str(device)):
            rows.append(row)
            bar(len(rows) / len(calls()))
            state = row.error or ("ok" if row.same else "DIFFERS")
            numbers = f"{row.difference:.1e} | {row.allowed:.0e} | {row.ratio:.2g}"
            common.print_values(f"| {row.call} | {numbers} | {state} |")
    common.add_values(device=str(device), calls=[dataclasses.asdict(row) for row in rows])
    if wrong := [row.call for row in rows if not row.same]:
        raise OperationError(f"doctor: {device} differs from the CPU in: {', '.join(wrong)}")


def _check_versions_and_devices() -> Iterator[Check]:
    texts = {**details.packages(), **dict(line.split(": ", 1) for line in details.devices())}
    yield from (Check(name, "ok", text) for name, text in texts.items())


def _check_data_sets(root: Path) -> Iterator[Check]:
    yield Check("digits", "ok", "bundled")
    for name in SOURCES:
        images = root / name / "train"
        if folder := folder_of(name, root):
            yield Check(name, "ok", str(folder))
        elif images.is_dir():
            yield Check(name, "ok", f"images in {images.parent}")
        else:
            yield Check(name, "missing", f"not in {root}; landscape fetch {name} --data-dir {root}")


def _check_cache() -> Iterator[Check]:
    folder = cache_folder()
    common.make_folder(folder)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")
    yield Check("cache", "ok", f"{folder} can be written")


def _check_packages() -> Iterator[Check]:
    for name, (purpose, install) in OPTIONAL.items():
        try:
            version = importlib.metadata.version(name)
            with warnings.catch_warnings(action="ignore"):
                importlib.import_module(name)
            yield Check(name, "ok", f"{version}, for {purpose}")
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "missing", f"for {purpose}; pip install '{install}'")
        except Exception as error:  # a package may fail with anything
            yield Check(name, "broken", f"{version}, its import fails ({one_line(error)}); for {purpose}")
    program = shutil.which("ffmpeg")
    yield Check("ffmpeg", "ok" if program else "missing", program or "for films as .mp4; .gif needs nothing")


def _check_hessian(device: str) -> Iterator[Check]:
    """Compare λ_min and λ_max by our products on a device with those of the dense Hessian in float64."""
    model, split = networks()["perceptron"], data.load("digits").train
    assert isinstance(split, tuple)
    x, y = split[0][:SAMPLES], split[1][:SAMPLES]
    dense_min, dense_max = _dense_eigenvalues(model, x, y)
    rounding = 1e-5 * max(abs(dense_min), abs(dense_max))  # of products in float32
    ends = extreme_eigenvalues(Problem(model, cross_entropy, (x, y), device=device), TOL, search="exact")
    is_right = abs(ends.min - dense_min) <= ends.residual_min + rounding
    is_right = is_right and abs(ends.max - dense_max) <= ends.residual_max + rounding
    text = f"λ_min {ends.min:.6g}, λ_max {ends.max:.6g}; dense: {dense_min:.6g}, {dense_max:.6g}"
    yield Check(f"Hessian on {device}", "ok" if is_right and ends.converged else "FAILED", text)


def _dense_eigenvalues(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return λ_min and λ_max of the dense Hessian, by torch's own differentiation in float64."""
    double_model = copy.deepcopy(model).double()
    layout = Layout.of(double_model)

    def loss(theta: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(double_model, layout.views(theta), (x.double(),)), y)

    theta = nn.utils.parameters_to_vector(double_model.parameters()).detach()
    eigenvalues = torch.linalg.eigvalsh(hessian(loss, theta, vectorize=True))  # type: ignore[no-untyped-call]
    return float(eigenvalues[0]), float(eigenvalues[-1])


def _run_checks(name: str, function: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield the checks of a function; an exception becomes a failed check, so that others still run."""
    try:
        yield from function()
    except Exception as error:  # code under test may raise anything
        yield Check(name, "FAILED", one_line(error))


@command(names={"argument": True, "metavar": "[NAME…]", "type": Choice(SOURCES)}, mirror={"metavar": "URL"})
def fetch(names: tuple[str, ...], data_dir: str | None, mirror: str | None, force: bool) -> None:
    """Download data sets, and verify their checksums.

    Without a NAME, lists the data sets. Existing files are verified and kept. Give the other commands the
    same --data-dir, or set LANDSCAPE_DATA.

    Args:
        mirror: Download from this address, a folder with the same files as the public address; only with one
            NAME.
        force: Replace existing files whose checksums are wrong.

    Example:
        landscape fetch mnist cifar10 --data-dir ~/data
    """
    if not names:
        lines, entries = [], []
        for name, source in SOURCES.items():
            lines.append(f"{name:14} {source.size:4} MB from {source.mirrors[0]}")
            entries.append({"name": name, "megabytes": source.size, "from": source.mirrors})
        common.print_values("\n".join(lines), data_sets=entries)
        return
    if mirror and len(names) > 1:
        raise InputError(f"--mirror: not allowed with {len(names)} data sets, it is the address of one")
    root = data_root(data_dir)
    common.make_folder(root)
    new_files: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        with common.progress_bar(name) as bar:
            files = download(name, root, mirror=mirror, force=force, progress=bar, message=message)
        new_files[name] = [str(path) for path, is_new in files.items() if is_new]
        count = len(new_files[name])
        message(f"{name}: {count} files downloaded, {len(files) - count} were there; all verified")
        common.print_files(*files)
    common.add_values(downloaded=new_files)
