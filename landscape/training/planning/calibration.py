"""The plan of a run on many workers, from short measurements of this machine: its computing, and loopback."""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from landscape.core.devices import pick_device, synchronize
from landscape.core.errors import InputError, OperationError
from landscape.core.options import parse_toml, positive
from landscape.core.progress import ProgressOption, shows_progress, taken
from landscape.data.base import Dataset
from landscape.results.training import RunTimes
from landscape.training.algorithms.ssgd import SSGD
from landscape.training.planning.plan import (
    Costs,
    Machines,
    Scaling,
    local_batch,
    predict,
)
from landscape.training.processes import children
from landscape.training.processes.children import loopback
from landscape.training.processes.comm import Comm, Plan
from landscape.training.processes.process_group import Group
from landscape.training.recipes.recipe import Decompose, Evaluate, Recipe, from_values
from landscape.training.run.loop import Trainer
from landscape.training.run.randomness import generator
from landscape.training.run.setup import chosen_recipe

# A measurement goes on for this long (s), and for this many times at least (ours: medians within percents).
SECONDS, TIMES = 1.0, 5

# Largest number of workers, since mixing matrices are dense (ours).
MAX_WORKERS = 4096


@shows_progress()
def plan(
    recipe: Recipe | str | Path,
    workers: Sequence[int] = (8, 64, 512),
    *,
    learners_per_worker: int = 1,
    scaling: Scaling = "local",
    bandwidth: float | None = None,
    latency: float | None = None,
    straggler: float = 0.0,
    slow: float = 1.0,
    mixings: tuple[str, ...] = (),
    all_reduce: str = "ring",
    exchange_loss: bool = True,
    per_machine: int = 1,
    device: str = "auto",
    data_dir: str | Path | None = None,
    allow_code: bool = False,
    message: Callable[[str], None] | None = None,
    progress: ProgressOption = None,
    **settings: Any,
) -> RunTimes:
    """Predict the time of a step and of a run of a recipe on more workers than this machine has.

    The table has SSGD, SSGD*, and DPSGD in both orders over each topology. The computing time of a worker is
    measured on this machine in some seconds; a message costs latency + bytes/bandwidth.

    Args:
        recipe: as of :func:`landscape.train`.
        workers: numbers of processes.
        learners_per_worker: learners that each worker computes; the paper's GPUs have one.
        scaling: local: each learner keeps the recipe's local batch; total: all share its total batch. In
            both, a run goes through the recipe's samples.
        bandwidth: bytes per second of a worker's link; default: loopback's, measured.
        latency: seconds of a message; default: loopback's, measured.
        straggler: S; computing takes 1 + S·Exp(1) times as long, drawn for each worker and step.
        slow: F; one worker computes F times as long throughout.
        mixings: only these topologies or matrix files; default: all that the workers allow.
        all_reduce: the algorithm of an all-reduce; gloo's is ring.
        exchange_loss: whether workers wait for the loss of the previous step, as in ``landscape train``; else
            the algorithm alone.
        per_machine: workers that share a machine's cores and memory: so many are measured at once. Each has
            its own link.
        device, data_dir, allow_code: as of :func:`landscape.train`.
        message: takes lines for the user.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        settings: other values of the recipe's keys.

    Returns:
        A row for each algorithm, mixing and number of workers.

    Raises:
        InputError: a number, name or setting that is not allowed.
        OperationError: data that are missing, or processes that cannot be measured here.

    Example:
        >>> import landscape
        >>> times = landscape.plan("digits-dpsgd", [4], mixings=("ring(1)",), bandwidth=1e9, latency=1e-5)
        >>> times.algorithm
        ('ssgd', 'ssgd*', 'dpsgd awc', 'dpsgd atc')
    """
    for count in workers:
        positive("workers", count, least=1)
        if count > MAX_WORKERS:
            raise InputError(f"workers: {count} is not allowed, at most {MAX_WORKERS} are")
    positive("learners_per_worker", learners_per_worker, least=1)
    positive("per_machine", per_machine, least=1)
    for name, value, least in (("bandwidth", bandwidth, None), ("latency", latency, 0)):
        if value is not None:
            positive(name, value, least=least)
    say = message or (lambda line: None)
    machines = Machines(
        latency or 0.0, bandwidth or 1.0, straggler, slow, learners_per_worker, all_reduce, exchange_loss
    )
    chosen = chosen_recipe(recipe, settings, allow_code)
    assert chosen is not None
    # Its name would otherwise stand for other settings.
    words = [chosen.name, *(f"{key}={value}" for key, value in settings.items())]
    chosen, place = dataclasses.replace(chosen, name=", ".join(words)), pick_device(device)
    together = per_machine if place.type == "cpu" else 1  # with a GPU each, workers do not compete

    @functools.cache
    def costs(batch: int) -> Costs:
        k = learners_per_worker
        if together > 1:
            found = calibrate_at_once(chosen, k, batch, together, data_dir=data_dir)
        else:
            found = calibrate(chosen, k, batch, device=place, data_dir=data_dir)
        say(
            f"measured here ({place}, {together} at once on {os.cpu_count()} cores), {k} "
            f"learner{'s' * (k > 1)} × {batch} samples: gradient {in_words(found.gradient)}, "
            f"{in_words(found.gradient / k / batch)} a sample, update {in_words(found.update)}"
        )
        return found

    size = costs(local_batch(chosen, workers[0] * learners_per_worker, scaling)).size
    latency, bandwidth = _link(size, latency, bandwidth, max(2, per_machine), say)
    machines = dataclasses.replace(machines, latency=latency, bandwidth=bandwidth)
    return predict(
        chosen, workers, costs, machines, mixings=mixings, scaling=scaling, message=say,
        progress=taken(progress),
    )  # fmt: skip


def _link(
    size: int, latency: float | None, bandwidth: float | None, processes: int, say: Callable[[str], None]
) -> tuple[float, float]:
    """Latency and bandwidth between workers; what is None is measured over loopback by ``size`` bytes."""
    origins = [
        f"measured over loopback, {processes} processes" if value is None else "given"
        for value in (latency, bandwidth)
    ]
    if bandwidth is None or latency is None:
        measured = measure_link(size, processes)
        bandwidth = measured["bandwidth"] if bandwidth is None else bandwidth
        latency = measured["latency"] if latency is None else latency
    say(f"bandwidth {8e-9 * bandwidth:.3g} Gbit/s ({origins[1]}); latency {in_words(latency)} ({origins[0]})")
    return latency, bandwidth


def in_words(seconds: float) -> str:
    """Three digits, in a unit that fits.

    Example:
        >>> in_words(0.0123), in_words(90.0), in_words(7200.0)
        ('12.3 ms', '90 s', '2 h')
    """
    for unit, worth in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= 2 * worth or (unit in ("s", "ms") and seconds >= worth):
            return f"{seconds / worth:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def calibrate(
    recipe: Recipe,
    learners_per_worker: int,
    local_batch: int,
    *,
    device: torch.device | str = "cpu",
    data_dir: Any = None,
    dataset: Dataset | None = None,
    seconds: float = SECONDS,
    ready: Callable[[], object] = lambda: None,
) -> Costs:
    """Measure for some seconds the computing of a process in a step of ``recipe``.

    Args:
        recipe: the run.
        learners_per_worker: the process's learners.
        local_batch: samples of each.
        device: where it computes; on the CPU with as many threads as torch is set to.
        data_dir: where data sets are looked for.
        dataset: the recipe's data, where it has been read.
        seconds: how long to measure, at least.
        ready: called before the clock starts.

    Returns:
        Medians over the measured steps.

    Raises:
        InputError, OperationError: as reading the data and building the model do.
    """
    still = dataclasses.replace(  # its rate is so small that the weights stay where they are
        recipe, learners=learners_per_worker, batch=learners_per_worker * local_batch, lr=1e-12, steps=10**9,
        algorithm={"name": "ssgd"}, decompose=Decompose(every=0), evaluate=Evaluate(every=0),
    )  # fmt: skip
    trainer = Trainer(still, device=device, data_dir=data_dir, dataset=dataset)
    trainer.rule = rule = _Clocked(learners_per_worker, recipe.seed, trainer.train.device)
    trainer.comm = rule.comm = _Alone(learners_per_worker)
    weights = trainer.weights
    width = weights.shape[1]
    four = Plan([0, 1, 2, 3], [], torch.eye(learners_per_worker), torch.full((learners_per_worker, 4), 0.25))
    received, out = weights[:1].repeat(4, 1), torch.empty_like(weights)

    def step() -> None:
        trainer._step(trainer.step + 1)
        trainer.history.rows.clear()

    def mix() -> None:
        four.apply(weights, received, out)

    def noise() -> None:
        drawn = torch.randn(width, generator=generator(0, "noise", 1))
        torch.add(weights, drawn.to(weights), alpha=0.1)

    def draw() -> None:
        torch.randint(trainer.train.samples, (1000, 100), generator=generator(0, "batch", 1))

    ready()
    rows, begun = list[list[float]](), time.perf_counter()
    while len(rows) <= TIMES or time.perf_counter() - begun < seconds:
        clocks = [rule.now()]
        for call in (step, mix, noise, draw):
            call()
            clocks.append(rule.now())
        whole, *parts = np.diff(clocks).tolist()
        rows.append([rule.gradient, whole - rule.gradient, *parts])
    gradient, update, mixing, noisy, drawing = np.median(rows[1:], axis=0).tolist()  # the first warms up
    return Costs(
        gradient=gradient,
        update=update,
        mix=mixing / 4,
        noise=noisy,
        draw=drawing / 100_000,
        parameters=width,
        size=width * weights.element_size(),
        linear=trainer.optimizer.linear,
    )


class _Alone(Comm):
    """One process of several without the exchanges: it does the computing of such a process only."""

    def __init__(self, learners: int) -> None:
        super().__init__(learners)
        self.size = 2

    def _start_mean(self, rows: Tensor, use: str) -> Callable[[], Tensor]:
        total = torch.sum(rows, 0, out=self.buffer(use, rows[0])).div_(self.learners)
        return lambda: total

    def start_learners_mean(self, *values: float) -> Callable[[], list[float]]:
        return lambda: list(values)


class _Clocked(SSGD):
    """SSGD that measures the seconds of its last gradient, ``gradient``, from points to finish."""

    gradient = _begun = 0.0

    def __init__(self, learners: int, seed: int, device: torch.device) -> None:
        super().__init__(learners, seed)
        self.device = device

    def now(self) -> float:
        """The time (s), with nothing still queued on the device."""
        synchronize(self.device)
        return time.perf_counter()

    def gradient_points(self, weights: Tensor) -> Tensor:
        points = super().gradient_points(weights)
        self._begun = self.now()
        return points

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        self.gradient = self.now() - self._begun
        return super().finish(weights, directions, lr, step)


def calibrate_at_once(
    recipe: Recipe, learners_per_worker: int, local_batch: int, processes: int, *, data_dir: Any = None
) -> Costs:
    """The mean of :func:`calibrate` over ``processes`` that run at the same time on this machine's CPU.

    They share its cores and its memory as the workers of one machine do, with as many threads each as
    ``landscape train --nproc`` gives them. Raises OperationError where they cannot meet.
    """
    arguments = [recipe.to_toml(), learners_per_worker, local_batch, data_dir and os.fspath(data_dir)]
    return Costs(**_at_once(processes, "calibrate", arguments, "per_machine"))


def _calibrate(
    group: Group, toml: str, learners_per_worker: int, local_batch: int, data_dir: Any
) -> dict[str, float]:
    recipe, ready = from_values(parse_toml(toml, "recipe")), dist.barrier
    return vars(calibrate(recipe, learners_per_worker, local_batch, data_dir=data_dir, ready=ready))


def measure_link(size: int, processes: int = 2) -> dict[str, float]:
    """The latency (s) and bandwidth (bytes/s) over loopback, of ``processes`` that exchange ``size`` bytes.

    Each sends to the next and receives from the one before, as an exchange of ``Comm`` does.
    Raises OperationError where the processes cannot meet.
    """
    link: dict[str, float] = _at_once(processes, "exchange", [size], "bandwidth, latency")
    return link


def _exchange(group: Group, size: int) -> dict[str, float]:
    medians = []
    for count, times in ((1, 300), (max(1, size // 4), 15)):
        sent, received = torch.zeros(count), torch.zeros(count)
        seconds = []
        for _ in range(times):
            clock = time.perf_counter()
            to_next = dist.P2POp(dist.isend, sent, (group.rank + 1) % group.size)
            from_last = dist.P2POp(dist.irecv, received, (group.rank - 1) % group.size)
            for work in dist.batch_isend_irecv([to_next, from_last]):
                work.wait()
            seconds.append(time.perf_counter() - clock)
        medians.append(statistics.median(seconds[1:]))
    latency, whole = medians
    # If the bytes take no time compared with the latency, the bandwidth is only known to be large.
    return {"latency": latency, "bandwidth": size / max(whole - latency, 1e-3 * whole)}


def measure_steps(
    recipes: Mapping[str, Recipe], processes: int, rounds: int, steps: int
) -> list[tuple[Costs, dict[str, float], dict[str, float]]]:
    """The costs, the link and the seconds per step of ``recipes``, by round, of ``processes`` at once.

    Args:
        recipes: by name, of as many learners as processes; the costs are those of the first.
        processes: of this machine, each with one thread, which exchange over loopback.
        rounds: in each all is measured in turn, so that its parts bear a machine that is busy now and then.
        steps: of each recipe in a round.

    Raises:
        OperationError: the processes cannot meet.
    """
    tomls = {name: recipe.to_toml() for name, recipe in recipes.items()}
    found = _at_once(processes, "steps", [tomls, rounds, steps], "processes")
    return [(Costs(**costs), link, seconds) for costs, link, seconds in found]


def _steps(group: Group, tomls: dict[str, str], rounds: int, steps: int) -> list[list[dict[str, float]]]:
    """The numbers of one process of :func:`measure_steps`: of each round costs, link and seconds."""
    recipes = {name: from_values(parse_toml(toml, name)) for name, toml in tomls.items()}
    runs = {name: Trainer(recipe, group=group) for name, recipe in recipes.items()}
    first, found = next(iter(recipes.values())), []
    for _ in range(rounds):
        costs = vars(calibrate(first, 1, first.local_batch, ready=dist.barrier))
        seconds = {}
        for name, run in runs.items():
            dist.barrier()
            run.history.rows.clear()
            for _ in range(steps + 1):
                run._step(run.step + 1)
            rows = run.history.rows[1:]  # the first warms up
            seconds[name] = statistics.median(run.recipe.batch / row["samples_per_s"] for row in rows)
        found.append([costs, _exchange(group, costs["size"]), seconds])
    return found


_WORK: dict[str, Callable[..., Any]] = {"calibrate": _calibrate, "exchange": _exchange, "steps": _steps}


def _at_once(processes: int, work: str, arguments: list[Any], where: str) -> Any:
    """The mean over processes of what ``work`` of _WORK gives in each of them, at the same time.

    Numbers in lists and dicts; whole ones are the same in all processes, and stay whole.
    """
    results: dict[int, Any] = {}
    threads = None if "OMP_NUM_THREADS" in os.environ else os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [[work, rank, processes, folder, *arguments] for rank in range(processes)]
        try:
            children.Pool(processes, threads).run(f"{__name__}:_member", jobs, results.__setitem__)
        except children.JobError as error:
            if error.known:
                raise
            raise OperationError(
                f"{where}: {processes} processes cannot be measured here ({error})"
            ) from error
    return tree_map(lambda *numbers: statistics.mean(numbers), *results.values())


def _member(work: str, rank: int, processes: int, folder: str, *arguments: Any) -> Any:
    """One process of :func:`_at_once`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), children.STORE: folder}
    group = Group(torch.device("cpu"))
    result = _WORK[work](group, *arguments)
    group.close()
    return result
