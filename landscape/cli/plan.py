"""landscape plan"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, Literal

import click
import torch

from landscape import plots
from landscape.cli import common, options
from landscape.core.errors import InputError
from landscape.core.memory import pick_device
from landscape.core.options import positive, quantity
from landscape.results.training import RunTimes
from landscape.train.planning import calibration
from landscape.train.planning.plan import ALL_REDUCE, SCALINGS, Cluster, Costs, Link, Stragglers, local_batch
from landscape.train.planning.plan import plan as compute_plan
from landscape.train.recipes import table_recipes
from landscape.train.recipes.recipe import Recipe

_BYTES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "KiB/s": 2**10, "MiB/s": 2**20, "GiB/s": 2**30}
_BITS = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8}
#: In bytes a second, and in seconds.
BANDWIDTHS: dict[str, float] = _BITS | _BYTES
TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
# Largest number of workers, since mixing matrices are dense (ours).
MAX_WORKERS = 4096


@dataclasses.dataclass(frozen=True)
class Planning:
    """The options of ``landscape plan``, checked; ``bandwidth`` in bytes/s, ``latency`` in s."""

    recipe_name: str
    settings: tuple[str, ...]
    workers: list[int]
    learners_per_worker: int
    scaling: Literal["local", "total"]
    bandwidth: float | None
    latency: float | None
    stragglers: Stragglers
    mixings: tuple[str, ...]
    kind: str
    alone: bool
    per_machine: int
    output: str | None
    force: bool
    picture: str | None
    allow_code: bool
    device: str
    data_dir: str | None
    quiet: bool

    @classmethod
    def of_options(cls, workers: str, learners_per_worker: int, **values: Any) -> Planning:
        """From the values of the options; InputError for one that is not allowed."""
        straggler, slow = values.pop("straggler"), values.pop("slow")
        for name, number, least in (
            ("--learners-per-worker", learners_per_worker, 1),
            ("--per-machine", values["per_machine"], 1),
        ):
            positive(name, number, least=least)
        bandwidth, latency = values.pop("bandwidth"), values.pop("latency")
        return cls(
            workers=parse_workers(workers),
            learners_per_worker=learners_per_worker,
            bandwidth=quantity("--bandwidth", bandwidth, BANDWIDTHS) if bandwidth else None,
            latency=quantity("--latency", latency, TIMES, zero=True) if latency else None,
            stragglers=Stragglers(straggler, slow),
            **values,
        )

    def message(self, text: str) -> None:
        """A line for the user, on stderr; none with -q."""
        common.message(text, self.quiet)

    def recipe(self) -> Recipe:
        """The recipe; changed keys are part of its name, which would otherwise stand for other settings."""
        chosen = table_recipes.read(self.recipe_name, self.settings, allow_code=self.allow_code)
        if not self.settings:
            return chosen
        return dataclasses.replace(chosen, name=f"{chosen.name}, {', '.join(self.settings)}")

    def measure(self, recipe: Recipe, place: torch.device, local_batch: int) -> Costs:
        """What a worker computes in a step, measured on this machine; a message has the times."""
        k = self.learners_per_worker
        together = self.per_machine if place.type == "cpu" else 1  # with a GPU each, workers do not compete
        if together > 1:
            costs = calibration.calibrate_at_once(recipe, k, local_batch, together, data_dir=self.data_dir)
        else:
            costs = calibration.calibrate(recipe, k, local_batch, device=place, data_dir=self.data_dir)
        self.message(
            f"measured here ({place}, {together} at once on {os.cpu_count()} cores), "
            f"{k} learner{'s' * (k > 1)} × {local_batch} samples: gradient {_time(costs.gradient)}, "
            f"{_time(costs.gradient / k / local_batch)} a sample, update {_time(costs.update)}"
        )
        return costs

    def link(self, size: int) -> Link:
        """The link between workers. What the options do not set is measured over loopback.

        A message says which is which. ``size``: bytes of the vector that is sent in a measurement.
        """
        bandwidth, latency = self.bandwidth, self.latency
        processes = max(2, self.per_machine)
        if bandwidth is None or latency is None:
            measured = calibration.measure_link(size, processes)
            bandwidth = measured.bandwidth if bandwidth is None else bandwidth
            latency = measured.latency if latency is None else latency
        origins = (
            f"measured over loopback, {processes} processes" if value is None else "given"
            for value in (self.bandwidth, self.latency)
        )
        values = (f"bandwidth {8e-9 * bandwidth:.3g} Gbit/s", f"latency {_time(latency)}")
        self.message("; ".join(f"{v} ({origin})" for v, origin in zip(values, origins, strict=True)))
        return Link(latency, bandwidth)

    def cluster(self, link: Link) -> Cluster:
        """The workers, joined by ``link``."""
        return Cluster(
            link, self.stragglers, self.learners_per_worker, self.kind, exchange_loss=not self.alone
        )


planning_options = options.grouped(
    "planning",
    Planning.of_options,
    click.argument("recipe_name", metavar="RECIPE", shell_complete=options.names(table_recipes.names)),
    click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Change a key of the recipe."),
    click.option("--workers", default="8,64,512", show_default=True, help="Numbers of processes."),
    click.option(
        "--learners-per-worker",
        metavar="K",
        default=1,
        show_default=True,
        help="Learners that each worker computes; the paper's GPUs have one.",
    ),
    click.option(
        "--scaling",
        type=options.Choice(SCALINGS),
        default="local",
        show_default=True,
        help="local: each learner keeps the recipe's local batch; total: all share its total batch. In both, "
        "a run goes through the recipe's samples.",
    ),
    click.option(
        "--bandwidth", metavar="B", help="Of a worker's link, such as 10Gbit/s. [default: loopback's]"
    ),
    click.option("--latency", metavar="T", help="Of a message, such as 50us. [default: loopback's]"),
    click.option(
        "--straggler",
        metavar="S",
        default=0.0,
        show_default=True,
        help="Computing takes 1 + S·Exp(1) times as long, drawn for each worker and step.",
    ),
    click.option(
        "--slow",
        metavar="F",
        default=1.0,
        show_default=True,
        help="One worker computes F times as long throughout.",
    ),
    click.option(
        "--mixing",
        "mixings",
        metavar="SPEC",
        multiple=True,
        help="Only this topology or matrix file; may be repeated. [default: all that the workers allow]",
    ),
    click.option(
        "--all-reduce",
        "kind",
        type=options.Choice(ALL_REDUCE),
        default="ring",
        show_default=True,
        help="The algorithm of an all-reduce; gloo's is ring.",
    ),
    click.option(
        "--alone",
        is_flag=True,
        help="The algorithm alone: workers do not wait for the loss of the previous step. landscape train "
        "exchanges it.",
    ),
    click.option(
        "--per-machine",
        metavar="K",
        default=1,
        show_default=True,
        help="Workers that share a machine's cores and memory: so many are measured at once. Each has its "
        "own link.",
    ),
    click.option(
        "-o",
        "--output",
        metavar="OUT.h5",
        shell_complete=options.paths("file"),
        help="Keep the table, too. [default: only printed]",
    ),
    options.force,
    options.picture,
    options.allow_code,
    options.device,
    options.data_dir,
    options.quiet,
)


@click.command(
    epilog="Example: landscape plan mnist-fig2b-dpsgd --workers 8,64,512 --bandwidth 10Gbit/s --latency 50us "
    "--straggler 0.2 --plot plan.png"
)
@planning_options
def plan(planning: Planning) -> None:
    """Predict the time of a step and of a run of RECIPE on more workers than this machine has.

    The table has SSGD, SSGD*, and DPSGD in both orders over each topology. The computing time of a worker is
    measured on this machine in some seconds; a message costs latency + bytes/bandwidth. Columns: "waiting" is
    the share of a step in which a worker does not compute; "× SSGD" is samples/s relative to SSGD on as many
    workers; "efficiency" is samples/s relative to as many workers without communication and stragglers.
    """
    recipe = planning.recipe()
    path = Path(planning.output) if planning.output else None
    common.check_targets(path, planning.picture, planning.force)
    costs = functools.cache(functools.partial(planning.measure, recipe, pick_device(planning.device)))
    learners = planning.workers[0] * planning.learners_per_worker
    with common.progress_bar("plan") as bar:
        with common.progress_bar("measurement"):
            link = planning.link(costs(local_batch(recipe, learners, planning.scaling)).size)
        result = compute_plan(
            recipe,
            planning.workers,
            costs,
            planning.cluster(link),
            mixings=planning.mixings,
            scaling=planning.scaling,
            message=planning.message,
            progress=bar,
        )
    planning.message(assumptions(result))
    common.values(table(result))
    common.results([result])
    if path:
        result.save(path)
        common.files(path)
    if planning.picture:
        plots.save_figure(plots.draw([result]), planning.picture)
        common.files(planning.picture)


def parse_workers(text: str) -> list[int]:
    """[8, 64] from "8,64", in order and without doubles."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= MAX_WORKERS for word in words):
        raise InputError(
            f"--workers: '{text}' is not allowed, it must be whole numbers from 1 to {MAX_WORKERS}, such as "
            "8,64,512"
        )
    return sorted({int(word) for word in words})


def assumptions(r: RunTimes) -> str:
    """What the numbers rest on, a line each."""
    slow = f", one worker {r.slow:g}× slower" if r.slow != 1 else ""
    wait = (
        "before each update, an exchange of the previous loss"
        if r.news
        else "no exchange of the loss (--alone)"
    )
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
