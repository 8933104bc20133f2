"""The predicted time of a run on more workers than this machine has, from its messages and its computing.

A step of landscape.train.loop, as costed here (DPSGD-2020 compares run times in its appendix, which is not
available: the cost model, the stragglers and all defaults are ours):

- SSGD: an all-reduce of w_a before the gradient, which waits for it; where the optimizer is not linear, one
  more of the gradients. SSGD*: the same, and the draw of ξ by every process.
- DPSGD, AWC: the exchange begins with the step and overlaps the gradient; ATC: after the gradient. A
  process sends each learner once to each process with a neighbour of it; "full" is an all-reduce.
- Every step ends with an all-reduce of two numbers, loss and spread, which each waits for before its next
  update. So no worker is ahead of the slowest by more than a gradient, under any rule; without
  ``exchange_loss`` it is the algorithm by itself.

Left out: the decomposition, evaluation and checkpoints, whose cost depends on their frequency.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.numerics import numerics
from landscape.core.options import choose
from landscape.results.run_times import RunTimes
from landscape.train.distributed.exchange import Plan
from landscape.train.mixing import Mixing, averages_all
from landscape.train.planning.calibration import Costs
from landscape.train.planning.run_time import AllReduce, Cluster, Order, PointToPoint, Step, step_time
from landscape.train.recipe import Recipe

# The forms of landscape.train.mixing, rings with one and two neighbours a side.
TOPOLOGIES = (
    "full", "ring(1)", "ring(2)", "torus", "exponential", "one-peer-exponential", "hypercube",
    "random-matching", "star",
)  # fmt: skip
# Number of random matchings that are drawn, and then used in turn (ours).
MATCHINGS = 50
# Loss and spread, in float64.
LOGGED = 16

Scaling = Literal["local", "total"]
SCALINGS: tuple[Scaling, ...] = ("local", "total")


def messages(matrix: Array, per_worker: int) -> tuple[Array, Array, Array]:
    """The messages of one exchange: which worker sends to which, and how many learners, under one M (n, n).

    Returns receives-from (W, W) bool, sent (W,) and received (W,): those of ``Plan`` for
    every one of the W processes, each with ``per_worker`` learners.
    """
    learners = np.arange(len(matrix))
    needs = np.logical_or.reduceat(matrix != 0, learners[::per_worker], axis=0)  # (W, n)
    needs[learners // per_worker, learners] = False
    sent = np.add.reduceat(needs.sum(0), learners[::per_worker])
    return np.logical_or.reduceat(needs, learners[::per_worker], axis=1), sent, needs.sum(1)


@dataclass(frozen=True)
class CommunicationCost:
    """The exchanges of W processes under a mixing, step by step in turn.

    ``seconds`` of an exchange if no worker is late, ``received`` learners (both means over a turn, of the
    worker with most), and ``host``, the seconds that a process takes each step to find out what to exchange.
    """

    exchanges: list[AllReduce | PointToPoint]
    seconds: float
    received: float
    host: float

    @classmethod
    def of(cls, spec: str, workers: int, cluster: Cluster, size: int, seed: int = 0) -> CommunicationCost:
        """That of the mixing ``spec``; InputError where it is not allowed with so many learners."""
        per_worker, link = cluster.learners_per_worker, cluster.link
        mixing = Mixing(spec, workers * per_worker, seed)
        if workers == 1:
            return cls([AllReduce(0.0)], 0.0, 0.0, 0.0)
        turns = len(mixing.cycle) or MATCHINGS
        exchanges, seconds, received, host = list[AllReduce | PointToPoint](), [], [], []
        for step in range(1, turns + 1):
            clock = time.perf_counter()
            matrix = mixing.matrix(step)
            is_all_reduce = averages_all(matrix)
            if not mixing.cycle:  # a process makes a new plan each step; it keeps the plans of a cycle
                Plan.of(matrix, list(range(0, workers * per_worker + 1, per_worker)), 0)
            host.append(time.perf_counter() - clock)
            if is_all_reduce:
                reduced = cluster.all_reduce_s(workers, size)
                exchanges.append(AllReduce(reduced))
                seconds.append(reduced)
                received.append(0)
                continue
            waits, sends, receives = messages(matrix, per_worker)
            busy = np.maximum(sends, receives) * link.message(size)
            exchanges.append(PointToPoint.of(waits, busy))
            seconds.append(float(busy.max()))
            received.append(int(receives.max()))
        return cls(
            exchanges,
            statistics.mean(seconds),
            statistics.mean(received),
            statistics.median(host),
        )


@numerics(1)
def plan(
    recipe: Recipe,
    workers: Sequence[int],
    costs: Callable[[int], Costs],
    cluster: Cluster,
    *,
    mixings: Sequence[str] = (),
    scaling: Scaling = "local",
    message: Callable[[str], None] = lambda line: None,
    progress: Callable[[float], None] = lambda share: None,
) -> RunTimes:
    """Predict steps and runs of ``recipe`` on each number of ``workers`` (processes).

    Args:
        recipe: the run.
        workers: numbers of processes W.
        costs: gives the seconds that a worker computes with a local batch; see :func:`.calibrate`.
        cluster: the machines.
        mixings: all of TOPOLOGIES by default. A mixing that is not possible with some number of learners is
            left out there, with a message; one that is given must be possible with some number.
        scaling: "local": each learner has the recipe's local batch, so that the total grows with n (default:
            the batch that is measured is then the one that runs); "total": all share the recipe's total
            batch. Either way a run goes through the recipe's samples.
        message: takes a line for the user.
        progress: takes the share that is done.

    Returns:
        A row for each algorithm and number of workers.

    Raises:
        InputError: for numbers that do not fit the recipe.
    """
    choose("--scaling", scaling, SCALINGS)
    learners = [w * cluster.learners_per_worker for w in workers]
    batches = [local_batch(recipe, n, scaling) for n in learners]
    for spec in mixings:
        _check_possible(spec, learners, recipe.seed)
    rows: list[dict[str, Any]] = []
    for k, w in enumerate(workers):
        measured = costs(batches[k])
        cases = _cases(measured, w, cluster, mixings or TOPOLOGIES, recipe.seed, message)
        for i, case in enumerate(cases):
            row = _row(recipe, case, measured, w, batches[k], cluster)
            ssgd_s = next((r["step_s"] for r in rows if r["workers"] == w), row["step_s"])
            rows.append(row | {"speedup": ssgd_s / row["step_s"]})
            progress((k + (i + 1) / len(cases)) / len(workers))
    names = ("algorithm", "mixing")
    columns: dict[str, Any] = {key: tuple(row[key] for row in rows) for key in names}
    columns |= {key: np.array([row[key] for row in rows]) for key in rows[0] if key not in names}
    link, stragglers = cluster.link, cluster.stragglers
    return RunTimes(
        **columns, recipe=recipe.name, parameters=measured.parameters, held=cluster.learners_per_worker,
        bandwidth=link.bandwidth, latency=link.latency, straggler=stragglers.coefficient,
        slow=stragglers.slow, all_reduce=cluster.all_reduce, news=cluster.exchange_loss, seed=recipe.seed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """An algorithm with its mixing, its exchange and when that begins, and seconds added to the update."""

    algorithm: str
    mixing: str
    order: Order
    cost: CommunicationCost
    update: float = 0.0


def _cases(
    costs: Costs,
    workers: int,
    cluster: Cluster,
    mixings: Sequence[str],
    seed: int,
    message: Callable[[str], None],
) -> list[_Case]:
    """All algorithms on so many ``workers``, SSGD first; impossible mixings are left out with a message."""
    cases = _synchronous(costs, workers, cluster)
    for spec in mixings:
        try:
            cases += _decentralised(spec, costs, workers, cluster, seed)
        except InputError as refusal:
            message(f"{workers} workers: left out, {refusal}")
    return cases


def _synchronous(costs: Costs, workers: int, cluster: Cluster) -> list[_Case]:
    """SSGD and SSGD*: an all-reduce before the gradient, one more where the optimizer is not linear."""
    reduced = cluster.all_reduce_s(workers, costs.size) * (1 if costs.linear else 2)
    mean = CommunicationCost([AllReduce(reduced)], reduced, 0.0, 0.0)
    return [_Case("ssgd", "", "before", mean), _Case("ssgd*", "", "before", mean, costs.noise)]


def _decentralised(spec: str, costs: Costs, workers: int, cluster: Cluster, seed: int) -> list[_Case]:
    """DPSGD in both orders with the mixing ``spec``; InputError where so many learners cannot have it."""
    cost = CommunicationCost.of(spec, workers, cluster, costs.size, seed)
    per_worker = cluster.learners_per_worker
    # A worker with several learners mixes these, too.
    mixed = cost.received + (per_worker if per_worker > 1 else 0)
    update = cost.host + mixed * costs.mix
    return [
        _Case("dpsgd awc", spec, "during", cost, update),
        _Case("dpsgd atc", spec, "after", cost, update),
    ]


def _row(
    recipe: Recipe, case: _Case, costs: Costs, workers: int, local_batch: int, cluster: Cluster
) -> dict[str, Any]:
    """The columns of :class:`.RunTimes` for one case but "speedup", which compares cases."""
    n, stragglers = workers * cluster.learners_per_worker, cluster.stragglers
    batch = n * local_batch
    gradient = costs.gradient + (n - cluster.learners_per_worker) * local_batch * costs.draw
    update = costs.update + case.update
    loss_exchange_s = cluster.all_reduce_s(workers, LOGGED) if cluster.exchange_loss else None
    step = Step(case.order, case.cost.exchanges, gradient, update, loss_exchange_s)
    seconds, error = step_time(step, workers, stragglers, seed=recipe.seed)
    steps = math.ceil(recipe.steps * recipe.batch / batch)
    return {
        "workers": workers,
        "algorithm": case.algorithm,
        "mixing": case.mixing,
        "gradient_s": gradient,
        "update_s": update,
        "exchange_s": case.cost.seconds,
        "step_s": seconds,
        "step_error": error,
        "steps": steps,
        "run_s": steps * seconds,
        "waiting": 1 - stragglers.mean(workers) * (gradient + update) / seconds,
        "samples_per_s": batch / seconds,
        "efficiency": (costs.gradient + costs.update) / seconds,
    }


def _check_possible(spec: str, learners: Sequence[int], seed: int) -> None:
    """Raise InputError if the mixing ``spec`` is possible with none of these numbers of learners."""
    refusals: list[InputError] = []
    for n in learners:
        try:
            Mixing(spec, n, seed)
        except InputError as error:
            refusals.append(error)
    if len(refusals) == len(learners):
        raise refusals[-1]


def local_batch(recipe: Recipe, learners: int, scaling: Scaling) -> int:
    """B of that many learners; InputError where they cannot share the recipe's total batch evenly."""
    if scaling == "local":
        return recipe.local_batch
    if recipe.batch % learners:
        raise InputError(
            f"--scaling: 'total' is not allowed, {learners} learners do not divide the batch of "
            f"{recipe.batch}; choose other --workers or --set batch=…"
        )
    return recipe.batch // learners
