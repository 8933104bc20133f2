"""The time of a step on many workers: its messages by a cost model, and its computing as measured here.

A step as costed here (DPSGD-2020 compares run times in its appendix, which is not available: the cost model,
the stragglers and all defaults are our choice), with a learner on each worker and plain SGD:

- SSGD: an all-reduce of w_a before the gradient, which waits for it. SSGD*: the same, and the draw of ξ by
  every process.
- DPSGD, AWC: the exchange begins with the step and overlaps the gradient; ATC: after the gradient. A
  process sends its learner once to each process with a neighbor of it; "full" is an all-reduce.
- Every step ends with an all-reduce of two numbers, loss and spread, which each waits for before its next
  update. So no worker is ahead of the slowest by more than a gradient, under any rule.
- A message of S bytes takes α + S/β: latency α (s), bandwidth β (bytes per second) of a worker's own link,
  which sends and receives at the same time, one message after the other each way, and is not shared
  (Thakur, Rabenseifner, Gropp 2005, section 3, without their third term, the arithmetic of the sum).

Left out: the decomposition, evaluation and checkpoints, whose cost depends on their frequency.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from landscape.core.devices import synchronize
from landscape.core.errors import LandscapeError
from landscape.core.hdf5 import Array
from landscape.core.options import parse_toml
from landscape.core.registry import numerics
from landscape.data.base import Dataset
from landscape.results.base import Result
from landscape.training.algorithms.central import SSGD
from landscape.training.processes import children
from landscape.training.processes.comm import Comm, Plan
from landscape.training.processes.process_group import Group
from landscape.training.recipes import Decompose, Evaluate
from landscape.training.recipes.recipe import Recipe, from_values
from landscape.training.run import generator
from landscape.training.run.loop import Trainer
from landscape.training.topology import Mixing, averages_all

# A measurement lasts at least this long (s), and has at least this many repetitions (our choice: medians
# within percents).
SECONDS, REPETITIONS = 1.0, 5
# Number of random matchings that are drawn, and then used in turn (our choice).
MATCHINGS = 50
# Bytes of the logged loss and spread, in float64.
LOGGED = 16
# Steps of a simulated run, whose first half is discarded, and the number of independent runs (our choice:
# standard errors well below 1% at a straggler coefficient of 1, 512 workers and all topologies in seconds).
STEPS, RUNS = 400, 8

#: When the exchange of a step begins: before the gradient, which waits for it (SSGD); with the gradient, and
#: the update waits for both (AWC); or after it (ATC).
Order = Literal["before", "during", "after"]


@dataclass(frozen=True)
class RunTimes(Result, schema="landscape.plan", table="row"):
    """Times of a step, a row for each number of workers, algorithm and mixing.

    Attributes:
        workers: (rows,), number of workers.
        algorithm: (rows,), "ssgd", "ssgd*", "dpsgd awc" or "dpsgd atc".
        mixing: (rows,), "" for algorithms without mixing.
        step_s, step_error: (rows,), seconds of a step, and the standard error of the simulation.
        recipe, parameters: name of the recipe, and number of parameters of its network.
        bandwidth, latency: of the link, in bytes per second and seconds.
        straggler: see :class:`Machines`.
    """

    workers: Annotated[Array, "row+"]
    algorithm: Annotated[tuple[str, ...], "row+"]
    mixing: Annotated[tuple[str, ...], "row+"]
    step_s: Annotated[Array, "row+", "s"]
    step_error: Annotated[Array, "row+", "s"]
    recipe: str
    parameters: int
    bandwidth: Annotated[float, "byte/s"]
    latency: Annotated[float, "s"]
    straggler: float

    @property
    def label(self) -> str:
        """The recipe with the size of its network, and the link, in two lines."""
        slow = f", computing longer at random, by {self.straggler:.0%} on average" if self.straggler else ""
        link = f"{8e-9 * self.bandwidth:.3g} Gbit/s, {1e6 * self.latency:.3g} µs latency{slow}"
        return f"{self.recipe}, {self.parameters:,} parameters\n{link}"


# ---- The model


@dataclass(frozen=True)
class Costs:
    """Seconds that a worker computes for its learner's local batch, as measured by :func:`calibrate`.

    ``gradient``: minibatch, gradient and the optimizer's direction. ``update``: the rest of a step with
    nothing to exchange. ``mix``: to mix in one received learner. ``noise``: SSGD*'s draw. ``draw``: one index
    of a minibatch; every process draws those of all learners.
    """

    gradient: float
    update: float
    mix: float
    noise: float
    draw: float
    parameters: int

    @property
    def size(self) -> int:
        """The bytes of a learner, in float32."""
        return 4 * self.parameters


@dataclass(frozen=True)
class Machines:
    """The machines: latency α (s) and bandwidth β (bytes per second) of each worker's link, and stragglers.

    A worker's seconds of computing are times 1 + s E with E ~ Exp(1) drawn anew each step and s =
    ``straggler``, the shifted exponential of Lee et al. 2018 ("Speeding up distributed machine learning using
    codes"); of W such workers the slowest takes 1 + s H_W on average, H_W = Σ_{i ≤ W} 1/i.
    """

    latency: float
    bandwidth: float
    straggler: float = 0.0

    def message(self, size: float) -> float:
        """Return seconds for one message of ``size`` bytes: α + S/β."""
        return self.latency + size / self.bandwidth

    def all_reduce_s(self, workers: int, size: float) -> float:
        """Return seconds that W workers take to sum S bytes in a ring, from when the last of them begins.

        2(W − 1)α + 2 (W − 1)/W · S/β, the algorithm of gloo for any size.
        """
        return 2 * (workers - 1) * self.message(size / workers)


@dataclass(frozen=True)
class Exchange:
    """The messages of a step.

    The link of worker j is busy for ``busy[j]`` seconds; a number stands for all workers. Without ``sources``
    the exchange is an all-reduce, which ends when the links of all workers are free. Otherwise the messages
    are point-to-point, and worker j waits for the links of workers ``sources[offsets[j]:offsets[j + 1]]``,
    itself among them: no neighbor counts as done before the last message of a worker.
    """

    busy: Array | float
    sources: Array | None = None
    offsets: Array | None = None

    @classmethod
    def between(cls, waits: Array, busy: Array) -> Exchange:
        """Return the exchange of workers that wait for each other; ``waits`` is (W, W) bool."""
        rows, sources = np.nonzero(waits | waits.T | np.eye(len(waits), dtype=bool))
        return cls(busy, sources, np.searchsorted(rows, np.arange(len(waits))))

    def ends(self, begun: Array) -> Array:
        """Return when the workers have their results (runs, W), in s; they began at ``begun`` (runs, W)."""
        sent = begun + self.busy
        if self.sources is None or self.offsets is None:
            return np.broadcast_to(sent.max(1, keepdims=True), begun.shape)
        completion: Array = np.maximum.reduceat(sent[:, self.sources], self.offsets, axis=1)
        return completion


def step_time(
    order: Order, exchanges: Sequence[Exchange], gradient: float, update: float, workers: int,
    straggler: float, *, loss_exchange_s: float, seed: int = 0, steps: int = STEPS,
) -> tuple[float, float]:  # fmt: skip
    """Simulate steps of W workers, and return (mean seconds of a step, its standard error).

    Worker j begins a step at the time s_j. With its straggler factor f_j, its gradient takes f_j g seconds
    and its update f_j u seconds. It exchanges messages with the workers N(j), which include j; the messages
    of worker i take c_i seconds. Gradients that begin at the times t end at G(t)_j = t_j + f_j g; an exchange
    that begins at t ends at D(t)_j = max_{i ∈ N(j)} (t_i + c_i). The step of worker j ends at

    - G(D(s))_j + f_j u for the order "before";
    - max(G(s)_j, D(s)_j) + f_j u for "during";
    - D(G(s))_j + f_j u for "after".

    This is a recurrence in maximum and sum (Baccelli et al. 1992, "Synchronization and Linearity"). In
    addition, no gradient ends before the all-reduce of the previous step's loss has ended, at max_i s_i +
    ``loss_exchange_s``.

    Args:
        order: when the exchange begins.
        exchanges: the exchanges of successive steps; after the last, the first comes again.
        gradient, update: g and u in seconds, without stragglers.
        workers: W.
        straggler: as in :class:`Machines`.
        loss_exchange_s: seconds of the all-reduce of a step's loss.
        seed: seed of the random f_j.
        steps: number of simulated steps. The mean is over the second half of the steps: from when all workers
            have ended the first half until all have ended the last step. The standard error is that of RUNS
            independent runs; without stragglers it is 0.
    """
    rng = np.random.default_rng(seed)
    factors = np.ones(workers)
    runs = RUNS if straggler else 1
    now, now_at_half = np.zeros((runs, workers)), np.zeros(runs)  # seconds since the start
    for step in range(1, steps + 1):
        if straggler:
            factors = 1 + straggler * rng.standard_exponential((runs, workers))
        exchange = exchanges[(step - 1) % len(exchanges)]
        gradient_start = exchange.ends(now) if order == "before" else now
        loss_exchanged = now.max(1, keepdims=True) + loss_exchange_s
        ready = np.maximum(gradient_start + factors * gradient, loss_exchanged)
        if order == "during":
            ready = np.maximum(ready, exchange.ends(now))
        elif order == "after":
            ready = exchange.ends(ready)
        now = ready + factors * update
        if step == steps // 2:
            now_at_half = now.max(1)
    means = (now.max(1) - now_at_half) / (steps - steps // 2)  # (runs,)
    standard_error = float(means.std(ddof=1)) / math.sqrt(runs) if runs > 1 else 0.0
    return float(means.mean()), standard_error


def messages(matrix: Array) -> tuple[Array, Array, Array]:
    """Return the messages of one exchange under M (W, W): the senders of each worker, and the counts.

    Returns receives-from (W, W) bool, sent (W,) and received (W,): those of ``Plan`` for every worker.
    """
    needs = (matrix != 0) & ~np.eye(len(matrix), dtype=bool)
    return needs, needs.sum(0), needs.sum(1)


@dataclass(frozen=True)
class Case:
    """An algorithm with its mixing.

    ``exchanges`` are those of a cycle of steps; ``order`` says when they begin. ``extra_update_s``: the
    seconds that an update takes in addition to ``Costs.update``.
    """

    algorithm: str
    mixing: str
    order: Order
    exchanges: list[Exchange]
    extra_update_s: float


def decentralized(spec: str, costs: Costs, workers: int, machines: Machines, seed: int) -> list[Case]:
    """Return DPSGD in both orders with the mixing ``spec``. InputError: not possible for ``workers``."""
    mixing = Mixing(spec, workers, seed)
    exchanges, received_counts, plan_s = list[Exchange](), list[int](), list[float]()
    for step in range(1, (len(mixing.cycle) or MATCHINGS) + 1):
        start = time.perf_counter()
        matrix = mixing.matrix(step)
        is_all_reduce = averages_all(matrix)
        if not mixing.cycle:  # a process makes a new plan each step; it keeps the plans of a cycle
            Plan.of(matrix, list(range(workers + 1)), 0)
        plan_s.append(time.perf_counter() - start)
        if is_all_reduce:
            exchanges.append(Exchange(machines.all_reduce_s(workers, costs.size)))
            received_counts.append(0)
        else:
            waits, sent, received = messages(matrix)
            busy = np.maximum(sent, received) * machines.message(costs.size)
            exchanges.append(Exchange.between(waits, busy))
            received_counts.append(int(received.max()))
    # A process finds out what to exchange, and mixes the learners that it receives.
    extra_update_s = statistics.median(plan_s) + statistics.mean(received_counts) * costs.mix
    orders: tuple[tuple[str, Order], ...] = (("awc", "during"), ("atc", "after"))
    return [Case(f"dpsgd {name}", spec, order, exchanges, extra_update_s) for name, order in orders]


@numerics(1)
def predict(
    recipe: Recipe, workers: Sequence[int], costs: Costs, machines: Machines, mixings: Sequence[str]
) -> RunTimes:
    """Predict the seconds of a step of SSGD, SSGD* and DPSGD for each number of ``workers``.

    Each worker has one learner.

    Args:
        recipe: the run whose local batch, seed and name are used.
        workers: numbers of workers, each at least 2.
        costs: the durations of a worker's computations.
        machines: the machines.
        mixings: mixing matrices of DPSGD. The result has no row for a matrix that does not exist for a number
            of learners.
    """
    rows = list[tuple[int, str, str, float, float]]()
    for count in workers:
        all_reduce = [Exchange(machines.all_reduce_s(count, costs.size))]
        # In SSGD the exchange comes before the gradient.
        cases = [
            Case("ssgd", "", order="before", exchanges=all_reduce, extra_update_s=0.0),
            Case("ssgd*", "", order="before", exchanges=all_reduce, extra_update_s=costs.noise),
        ]
        for mixing in mixings:
            try:
                cases += decentralized(mixing, costs, count, machines, recipe.seed)
            except LandscapeError:  # such as a ring of two learners
                continue
        # Each process also draws the minibatch indices of the other learners.
        gradient_s = costs.gradient + (count - 1) * recipe.local_batch * costs.draw
        for case in cases:
            step_s, step_error = step_time(
                case.order, case.exchanges, gradient_s, costs.update + case.extra_update_s, count,
                machines.straggler, loss_exchange_s=machines.all_reduce_s(count, LOGGED), seed=recipe.seed,
            )  # fmt: skip
            rows.append((count, case.algorithm, case.mixing, step_s, step_error))
    counts, algorithms, row_mixings, seconds, errors = zip(*rows, strict=True)  # the columns
    return RunTimes(
        np.array(counts), algorithms, row_mixings, np.array(seconds), np.array(errors), recipe.name,
        costs.parameters, machines.bandwidth, machines.latency, machines.straggler,
    )  # fmt: skip


# ---- Measurements


def calibrate(
    recipe: Recipe, local_batch: int, *, device: torch.device | str = "cpu", data_dir: Any = None,
    dataset: Dataset | None = None, seconds: float = SECONDS,
) -> Costs:  # fmt: skip
    """Measure how long the computations of a worker take in a step of ``recipe``.

    Args:
        recipe: the recipe of a run.
        local_batch: the number of samples in the minibatch of the worker's learner.
        device: where the worker computes; on the CPU with torch's current number of threads.
        data_dir: folder with data sets that are not bundled.
        dataset: the data of the recipe; None: it is loaded.
        seconds: the shortest duration of the measurement.

    Returns:
        Medians over the measured steps.
    """
    # At lr=1e-12 the weights practically do not change.
    measured_recipe = dataclasses.replace(
        recipe, learners=1, batch=local_batch, lr=1e-12, steps=10**9, algorithm={"name": "ssgd"},
        decompose=Decompose(every=0), evaluate=Evaluate(every=0),
    )  # fmt: skip
    trainer = Trainer(measured_recipe, device=device, data_dir=data_dir, dataset=dataset)
    trainer.rule = rule = _TimedSSGD(recipe.seed, trainer.train_problem.device)
    trainer.comm = rule.comm = _NoExchange()
    weights = trainer.weights
    parameters = weights.shape[1]
    # The plan of a process that mixes four received learners into its own learner. Each of the five has ⅕ in
    # the mixing matrix. Any entries take as long.
    mix_four = Plan([0, 1, 2, 3], [], torch.full((1, 1), 0.2), torch.full((1, 4), 0.2))
    received, mixed = weights.repeat(4, 1), torch.empty_like(weights)

    def make_step() -> None:
        trainer._step(trainer.step + 1)
        trainer.history.rows.clear()

    def mix_learners() -> None:
        mix_four.apply(weights, received, mixed)

    def draw_noise() -> None:
        noise = torch.randn(parameters, generator=generator(0, "noise", 1))
        torch.add(weights, noise.to(weights), alpha=0.1)  # 0.1: any σ takes as long

    def draw_indices() -> None:
        torch.randint(trainer.train_problem.samples, (1000, 100), generator=generator(0, "batch", 1))

    if dist.is_initialized():  # processes that are measured together begin at the same time
        dist.barrier()
    rows = list[list[float]]()  # seconds of the gradient, the rest of the step, mixing, noise and indices
    start = time.perf_counter()
    while len(rows) <= REPETITIONS or time.perf_counter() - start < seconds:
        clocks = [rule.now()]
        for call in (make_step, mix_learners, draw_noise, draw_indices):
            call()
            clocks.append(rule.now())
        step_s, mix_s, noise_s, indices_s = np.diff(clocks).tolist()
        rows.append([rule.gradient_s, step_s - rule.gradient_s, mix_s, noise_s, indices_s])
    medians = np.median(rows[1:], axis=0).tolist()  # the first row is a warm-up
    gradient_s, update_s, mix_s, noise_s, indices_s = medians
    # mix_s is the time of 4 received learners, indices_s that of 100,000 indices; Costs has the time of one.
    return Costs(gradient_s, update_s, mix_s / 4, noise_s, indices_s / 100_000, parameters)


class _NoExchange(Comm):
    """The communication of one process of two, without the exchanges: only the computing of this process."""

    def __init__(self) -> None:
        super().__init__(1)
        self.size = 2

    def _start_mean(self, rows: Tensor, use: str, out: Tensor | None = None) -> Callable[[], Tensor]:
        total = torch.sum(rows, 0, out=self.buffer(use, rows[0])).div_(self.learners)
        return lambda: total

    def start_learners_mean(self, *values: float) -> Callable[[], list[float]]:
        return lambda: list(values)


class _TimedSSGD(SSGD):
    """SSGD that measures ``gradient_s``: the seconds from the last ``gradient_points`` to ``finish``."""

    gradient_s = _begun = 0.0

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(1, seed)
        self.device = device

    def now(self) -> float:
        """Return the time (s), with nothing still queued on the device."""
        synchronize(self.device)
        return time.perf_counter()

    def gradient_points(self, weights: Tensor) -> Tensor:
        points = super().gradient_points(weights)
        self._begun = self.now()
        return points

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        self.gradient_s = self.now() - self._begun
        return super().finish(weights, directions, lr, step)


def measure_steps(
    recipes: Mapping[str, Recipe], processes: int, rounds: int, steps: int
) -> list[tuple[Costs, dict[str, float], dict[str, float]]]:
    """Return the costs, the link and the seconds per step of ``recipes``, by round, means over ``processes``.

    Args:
        recipes: by name, of as many learners as processes; the costs are those of the first.
        processes: of this machine, each with one thread, which exchange over loopback.
        rounds: in each all is measured in turn, so that its parts bear a machine that is busy now and then.
        steps: of each recipe in a round.

    Raises:
        OperationError: the processes cannot meet.
    """
    results: dict[int, Any] = {}
    tomls = {name: recipe.to_toml() for name, recipe in recipes.items()}
    threads = None if "OMP_NUM_THREADS" in os.environ else os.cpu_count()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [[rank, processes, folder, tomls, rounds, steps] for rank in range(processes)]
        children.Pool(processes, threads).run(f"{__name__}:_member", jobs, results.__setitem__)
    means = tree_map(lambda *numbers: statistics.mean(numbers), *results.values())
    return [(Costs(**costs), link, seconds) for costs, link, seconds in means]


def _member(
    rank: int, processes: int, folder: str, tomls: dict[str, str], rounds: int, steps: int
) -> list[list[dict[str, float]]]:
    """Return the numbers of one process of :func:`measure_steps`: of each round costs, link and seconds."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", children.loopback())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), children.STORE: folder}
    group = Group.join(torch.device("cpu"))
    recipes = {name: from_values(parse_toml(toml, name)) for name, toml in tomls.items()}
    runs = {name: Trainer(recipe, group=group) for name, recipe in recipes.items()}
    first, measurements = next(iter(recipes.values())), []
    for _ in range(rounds):
        costs = calibrate(first, first.local_batch)
        seconds = {}
        for name, run in runs.items():
            dist.barrier()
            run.history.rows.clear()
            for _ in range(steps + 1):
                run._step(run.step + 1)
            rows = run.history.rows[1:]  # the first warms up
            seconds[name] = statistics.median(run.recipe.batch / row["samples_per_s"] for row in rows)
        measurements.append([vars(costs), _link(group, costs.size), seconds])
    group.close()
    return measurements


def _link(group: Group, size: int) -> dict[str, float]:
    """Measure latency (s) and bandwidth (bytes/s) of processes that each send ``size`` bytes to the next."""
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
