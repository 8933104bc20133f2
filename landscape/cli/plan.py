"""landscape plan"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Literal, cast

import click

from landscape import paper, plots
from landscape.cli import common, options
from landscape.core.errors import InputError
from landscape.core.options import choose, positive, quantity
from landscape.results.run_times import RunTimes
from landscape.train.launch import pick_device
from landscape.train.planning import calibration
from landscape.train.planning import plan as planning
from landscape.train.planning.run_time import ALL_REDUCE, Link, Stragglers

_BYTES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "KiB/s": 2**10, "MiB/s": 2**20, "GiB/s": 2**30}
_BITS = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8}
#: In bytes a second, and in seconds.
BANDWIDTHS: dict[str, float] = _BITS | _BYTES
TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
# Largest number of workers, since mixing matrices are dense (ours).
MOST = 4096


@click.command(
    epilog="Example: landscape plan mnist-fig2b-dpsgd --workers 8,64,512 --bandwidth 10Gbit/s --latency 50us "
    "--straggler 0.2 --plot plan.png"
)
@click.argument("recipe_name", metavar="RECIPE")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a key of the recipe.")
@click.option("--workers", default="8,64,512", show_default=True, help="Numbers of processes.")
@click.option(
    "--learners-per-worker",
    metavar="K",
    default=1,
    show_default=True,
    help="Learners that each worker computes; the paper's GPUs have one.",
)
@click.option("--held", type=int, hidden=True)  # its name until version 0.8
@click.option(
    "--scaling",
    default="local",
    show_default=True,
    help="local: each learner keeps the recipe's local batch; total: all share its total batch. A run goes "
    "through the recipe's samples in both.",
)
@click.option("--bandwidth", metavar="B", help="Of a worker's link, such as 10Gbit/s. [default: loopback's]")
@click.option("--latency", metavar="T", help="Of a message, such as 50us. [default: loopback's]")
@click.option(
    "--straggler",
    metavar="S",
    default=0.0,
    show_default=True,
    help="Computing takes 1 + S·Exp(1) times as long, drawn for each worker and step.",
)
@click.option(
    "--slow",
    metavar="F",
    default=1.0,
    show_default=True,
    help="One worker computes F times as long throughout.",
)
@click.option(
    "--mixing",
    "mixings",
    metavar="SPEC",
    multiple=True,
    help="Only this topology or matrix file; may be repeated. [default: all that the workers allow]",
)
@click.option(
    "--all-reduce",
    "kind",
    default="ring",
    show_default=True,
    help="ring (gloo's), recursive-doubling or recursive-halving.",
)
@click.option(
    "--alone",
    is_flag=True,
    help="The algorithm by itself: nobody waits for the loss of the step before, as in landscape train.",
)
@click.option(
    "--per-machine",
    metavar="K",
    default=1,
    show_default=True,
    help="Workers that share a machine's cores and memory: so many are measured at once. Each has a link of "
    "its own.",
)
@click.option("-o", "--output", metavar="OUT.h5", help="Keep the table, too. [default: only printed]")
@options.force
@options.picture
@options.allow_code
@options.device
@options.data_dir
@options.quiet
def plan(
    recipe_name: str,
    settings: tuple[str, ...],
    workers: str,
    learners_per_worker: int,
    held: int | None,
    scaling: str,
    bandwidth: str | None,
    latency: str | None,
    straggler: float,
    slow: float,
    mixings: tuple[str, ...],
    kind: str,
    alone: bool,
    per_machine: int,
    output: str | None,
    force: bool,
    picture: str | None,
    allow_code: bool,
    device: str,
    data_dir: str | None,
    quiet: bool,
) -> None:
    """Predict the time of a step and of a run of RECIPE on more workers than this machine has.

    The table has SSGD, SSGD*, and DPSGD in both orders over each topology. The computing time of a worker is
    measured on this machine in some seconds; a message costs latency + bytes/bandwidth. Columns: "waiting" is
    the share of a step in which a worker does not compute; "× SSGD" is samples/s relative to SSGD on as many
    workers; "efficiency" is samples/s relative to as many workers without communication and stragglers.
    """
    learners_per_worker = learners_per_worker if held is None else held
    for name, number in (("--learners-per-worker", learners_per_worker), ("--per-machine", per_machine)):
        positive(name, number, least=1)
    positive("--straggler", straggler, least=0)
    positive("--slow", slow, least=1)
    choose("--scaling", scaling, ("local", "total"))
    choose("--all-reduce", kind, ALL_REDUCE)
    counts = parse_workers(workers)
    given = (
        quantity("--bandwidth", bandwidth, BANDWIDTHS) if bandwidth else None,
        quantity("--latency", latency, TIMES, zero=True) if latency else None,
    )
    chosen = paper.read(recipe_name, settings, allow_code=allow_code)
    if settings:  # the name alone would stand for what is not measured
        chosen = dataclasses.replace(chosen, name=f"{chosen.name}, {', '.join(settings)}")
    path = Path(output) if output else None
    common.check_targets(path, picture, force)
    place = pick_device(device)
    together = per_machine if place.type == "cpu" else 1  # with a GPU each, workers do not compete

    @functools.cache
    def costs(local_batch: int) -> calibration.Costs:
        if together > 1:
            found = calibration.calibrate_at_once(
                chosen, learners_per_worker, local_batch, together, data_dir=data_dir
            )
        else:
            found = calibration.calibrate(
                chosen, learners_per_worker, local_batch, device=place, data_dir=data_dir
            )
        k = learners_per_worker
        many = f"{k} learner{'s' * (k > 1)} × {local_batch} samples"
        where = f"{place}, {together} at once on {os.cpu_count()} cores"
        common.message(
            f"measured here ({where}), {many}: gradient {_time(found.gradient)}, "
            f"{_time(found.gradient / k / local_batch)} a sample, update {_time(found.update)}",
            quiet,
        )
        return found

    size = costs(
        planning.local_batch(
            chosen, counts[0] * learners_per_worker, cast(Literal["local", "total"], scaling)
        )
    ).size
    link = _link(given, size, max(2, per_machine), quiet)
    with common.progress_bar("plan", quiet) as bar:
        result = planning.plan(
            chosen,
            counts,
            costs,
            link,
            stragglers=Stragglers(straggler, slow),
            mixings=mixings,
            learners_per_worker=learners_per_worker,
            scaling=cast(Literal["local", "total"], scaling),
            kind=kind,
            exchange_loss=not alone,
            message=lambda line: common.message(line, quiet),
            progress=bar,
        )
    common.message(assumptions(result), quiet)
    click.echo(table(result))
    if path:
        result.save(path)
        click.echo(str(path))
    if picture:
        plots.save_figure(plots.draw([result]), picture)
        click.echo(picture)


def parse_workers(text: str) -> list[int]:
    """[8, 64] from "8,64", in order and without doubles."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= MOST for word in words):
        raise InputError(
            f"--workers: '{text}' is not allowed, it must be whole numbers from 1 to {MOST}, such as 8,64,512"
        )
    return sorted({int(word) for word in words})


def _link(given: tuple[float | None, float | None], size: int, processes: int, quiet: bool) -> Link:
    """The link as given; what is not is measured over loopback, and a message says which is which."""
    bandwidth, latency = given
    if bandwidth is None or latency is None:
        found = calibration.measure_link(size, processes)
        bandwidth = found.bandwidth if bandwidth is None else bandwidth
        latency = found.latency if latency is None else latency
    how = ("given" if g is not None else f"measured over loopback, {processes} processes" for g in given)
    rates = (f"bandwidth {8e-9 * bandwidth:.3g} Gbit/s", f"latency {_time(latency)}")
    common.message("; ".join(f"{r} ({h})" for r, h in zip(rates, how, strict=True)), quiet)
    return Link(latency, bandwidth)


def assumptions(r: RunTimes) -> str:
    """What the numbers rest on, a line each."""
    slow = f", one worker {r.slow:g}× slower" if r.slow != 1 else ""
    wait = "before each update, the loss of the step before" if r.news else "no news of the loss (--alone)"
    return (
        f"assumed: {r.all_reduce} all-reduce; {wait}; straggler coefficient {r.straggler:g}{slow}\n"
        "not counted: decomposition, evaluation, checkpoints"
    )


def table(r: RunTimes) -> str:
    """The rows, a line each."""
    head = (
        f"{'workers':>7} {'algorithm':10} {'mixing':21} {'step':>15} {'waiting':>8} {'samples/s':>10} "
        f"{'run':>9} {'× SSGD':>7} {'efficiency':>10}"
    )
    lines = [head]
    for i, (algorithm, mixing) in enumerate(zip(r.algorithm, r.mixing, strict=True)):
        if i and r.workers[i] != r.workers[i - 1]:
            lines.append("")
        error = f" ± {r.step_error[i] / r.step_s[i]:.1%}" if r.step_error[i] else ""
        lines.append(
            f"{r.workers[i]:7d} {algorithm:10} {mixing:21} {_time(r.step_s[i]) + error:>15} "
            f"{r.waiting[i]:8.0%} {r.samples_per_s[i]:10,.0f} {_time(r.run_s[i]):>9} {r.speedup[i]:7.2f} "
            f"{r.efficiency[i]:10.0%}"
        )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    """Three digits, in a unit that fits."""
    for unit, worth in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= 2 * worth or (unit in ("s", "ms") and seconds >= worth):
            return f"{seconds / worth:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
