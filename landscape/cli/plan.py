"""landscape plan"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Literal

import torch

from landscape.cli import common
from landscape.cli.completion import Choice, names
from landscape.cli.options import command, group, numbers
from landscape.core.devices import pick_device
from landscape.core.options import positive, quantity
from landscape.results.training import RunTimes
from landscape.training.planning import calibration
from landscape.training.planning.plan import (
    ALL_REDUCE,
    SCALINGS,
    Cluster,
    Costs,
    Link,
    Stragglers,
    local_batch,
)
from landscape.training.planning.plan import plan as compute_plan
from landscape.training.recipes import recipe
from landscape.training.recipes.recipe import Recipe

_BYTES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "KiB/s": 2**10, "MiB/s": 2**20, "GiB/s": 2**30}
_BITS = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8}
#: In bytes a second, and in seconds.
BANDWIDTHS: dict[str, float] = _BITS | _BYTES
TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
# Largest number of workers, since mixing matrices are dense (ours).
MAX_WORKERS = 4096


@dataclasses.dataclass(kw_only=True)
class Planning:
    """The options of ``landscape plan``.

    Args:
        settings: Change a key of the recipe.
        workers: Numbers of processes.
        learners_per_worker: Learners that each worker computes; the paper's GPUs have one.
        scaling: local: each learner keeps the recipe's local batch; total: all share its total batch. In
            both, a run goes through the recipe's samples.
        bandwidth: Of a worker's link, such as 10Gbit/s. [default: loopback's]
        latency: Of a message, such as 50us. [default: loopback's]
        straggler: Computing takes 1 + S·Exp(1) times as long, drawn for each worker and step.
        slow: One worker computes F times as long throughout.
        mixings: Only this topology or matrix file; may be repeated. [default: all that the workers allow]
        kind: The algorithm of an all-reduce; gloo's is ring.
        alone: The algorithm alone: workers do not wait for the loss of the previous step. landscape train
            exchanges it.
        per_machine: Workers that share a machine's cores and memory: so many are measured at once. Each has
            its own link.
    """

    recipe_name: str
    settings: tuple[str, ...]
    workers: str = "8,64,512"
    learners_per_worker: int = 1
    scaling: Literal["local", "total"] = "local"
    bandwidth: str | None
    latency: str | None
    straggler: float = 0.0
    slow: float = 1.0
    mixings: tuple[str, ...]
    kind: str = "ring"
    alone: bool
    per_machine: int = 1
    target: common.Target
    allow_code: bool
    device: str
    data_dir: str | None

    def __post_init__(self) -> None:
        positive("--learners-per-worker", self.learners_per_worker, least=1)
        positive("--per-machine", self.per_machine, least=1)
        self.counts = numbers("--workers", self.workers, "8,64,512", most=MAX_WORKERS)
        self.stragglers = Stragglers(self.straggler, self.slow)
        self.given = (  # in bytes/s and s
            quantity("--bandwidth", self.bandwidth, BANDWIDTHS) if self.bandwidth else None,
            quantity("--latency", self.latency, TIMES, zero=True) if self.latency else None,
        )

    def recipe(self) -> Recipe:
        """The recipe; changed keys are part of its name, which would otherwise stand for other settings."""
        chosen = recipe.read(self.recipe_name, self.settings, allow_code=self.allow_code)
        name = ", ".join([chosen.name, *self.settings])
        return dataclasses.replace(chosen, name=name)

    def measure(self, recipe: Recipe, place: torch.device, local_batch: int) -> Costs:
        """What a worker computes in a step, measured on this machine; a message has the times."""
        k = self.learners_per_worker
        together = self.per_machine if place.type == "cpu" else 1  # with a GPU each, workers do not compete
        if together > 1:
            costs = calibration.calibrate_at_once(recipe, k, local_batch, together, data_dir=self.data_dir)
        else:
            costs = calibration.calibrate(recipe, k, local_batch, device=place, data_dir=self.data_dir)
        common.message(
            f"measured here ({place}, {together} at once on {os.cpu_count()} cores), "
            f"{k} learner{'s' * (k > 1)} × {local_batch} samples: gradient {_time(costs.gradient)}, "
            f"{_time(costs.gradient / k / local_batch)} a sample, update {_time(costs.update)}"
        )
        return costs

    def link(self, size: int) -> Link:
        """The link between workers. What the options do not set is measured over loopback.

        A message says which is which. ``size``: bytes of the vector that is sent in a measurement.
        """
        bandwidth, latency = self.given
        processes = max(2, self.per_machine)
        if bandwidth is None or latency is None:
            measured = calibration.measure_link(size, processes)
            bandwidth = measured.bandwidth if bandwidth is None else bandwidth
            latency = measured.latency if latency is None else latency
        origins = [
            f"measured over loopback, {processes} processes" if value is None else "given"
            for value in self.given
        ]
        common.message(
            f"bandwidth {8e-9 * bandwidth:.3g} Gbit/s ({origins[0]}); latency {_time(latency)} ({origins[1]})"
        )
        return Link(latency, bandwidth)


@command(
    planning=group(
        Planning,
        recipe_name={"argument": True, "metavar": "RECIPE", "shell_complete": names(recipe.names)},
        learners_per_worker={"metavar": "K"},
        scaling={"type": Choice(SCALINGS)},
        bandwidth={"metavar": "B"},
        latency={"metavar": "T"},
        straggler={"metavar": "S"},
        slow={"metavar": "F"},
        mixings={"flag": "--mixing", "metavar": "SPEC"},
        kind={"flag": "--all-reduce", "type": Choice(ALL_REDUCE)},
        per_machine={"metavar": "K"},
        target=group(common.Target, output={"help": "Keep the table, too. [default: only printed]"}),
    )
)
def plan(planning: Planning) -> None:
    """Predict the time of a step and of a run of RECIPE on more workers than this machine has.

    The table has SSGD, SSGD*, and DPSGD in both orders over each topology. The computing time of a worker is
    measured on this machine in some seconds; a message costs latency + bytes/bandwidth. Columns: "waiting" is
    the share of a step in which a worker does not compute; "× SSGD" is samples/s relative to SSGD on as many
    workers; "efficiency" is samples/s relative to as many workers without communication and stragglers.

    Example:
        landscape plan mnist-fig2b-dpsgd --workers 8,64,512 --bandwidth 10Gbit/s --latency 50us
        --straggler 0.2 --plot plan.png
    """
    recipe, target = planning.recipe(), planning.target
    path = Path(target.output) if target.output else None
    common.check_targets(path, target.picture, target.force)
    costs = functools.cache(functools.partial(planning.measure, recipe, pick_device(planning.device)))
    learners = planning.counts[0] * planning.learners_per_worker
    with common.progress_bar("plan") as bar:
        with common.progress_bar("measurement"):
            link = planning.link(costs(local_batch(recipe, learners, planning.scaling)).size)
        cluster = Cluster(
            link,
            planning.stragglers,
            planning.learners_per_worker,
            planning.kind,
            exchange_loss=not planning.alone,
        )
        result = compute_plan(
            recipe,
            planning.counts,
            costs,
            cluster,
            mixings=planning.mixings,
            scaling=planning.scaling,
            message=common.message,
            progress=bar,
        )
    common.message(assumptions(result))
    common.values(table(result))
    if path:
        result.save(path)
    common.show([result], path, target.picture)


def assumptions(r: RunTimes) -> str:
    """What the numbers rest on, a line each."""
    slow = f", one worker {r.slow:g}× slower" if r.slow != 1 else ""
    wait = (
        "before each update, an exchange of the previous loss"
        if r.exchange_loss
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
