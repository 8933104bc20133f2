"""What a run would take on more workers than there are here: what our code sends, and what it computes.

A step of landscape.train.loop, as costed here (DPSGD-2020 compares run times in its appendix, which is not
available: the cost model, the stragglers and all defaults are ours):

- SSGD: an all-reduce of w_a before the gradient, which waits for it; where the optimizer is not linear, one
  more of the gradients. SSGD*: the same, and the draw of ξ by every process.
- DPSGD, AWC: the exchange begins with the step and runs beside the gradient; ATC: after the gradient. A
  process sends each learner once to each process with a neighbour of it; "full" is an all-reduce.
- Every step ends with an all-reduce of two numbers, loss and spread, which each waits for before its next
  update. So nobody is ahead of the slowest by more than a gradient, whatever the rule; without
  ``exchange_loss`` it is the algorithm by itself.

Left out: the decomposition, evaluation and checkpoints, whose cost is a matter of how often they are due.
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
from landscape.core.options import choose, positive
from landscape.results.run_times import RunTimes
from landscape.train.distributed.comm import Plan
from landscape.train.mixing import Mixing, averages_all
from landscape.train.planning.calibration import Costs
from landscape.train.planning.run_time import (
    ALL_REDUCE,
    AllReduce,
    Link,
    Order,
    PointToPoint,
    Stragglers,
    all_reduce,
    step_time,
)
from landscape.train.recipe import Recipe

# The forms of landscape.train.mixing, rings with one and two neighbours a side.
TOPOLOGIES = (
    "full", "ring(1)", "ring(2)", "torus", "exponential", "one-peer-exponential", "hypercube",
    "random-matching", "star",
)  # fmt: skip
# Random matchings that are drawn, and then gone through in turn (ours).
MATCHINGS = 50
# Loss and spread, in float64.
LOGGED = 16

Scaling = Literal["local", "total"]


def messages(matrix: Array, per_worker: int) -> tuple[Array, Array, Array]:
    """Who sends to whom, and how many learners each sends and receives, under one mixing matrix (n, n).

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
    """What a mixing has W processes exchange, step by step in turn, ``size`` bytes a learner over ``link``.

    ``seconds`` of an exchange if nobody is late, ``received`` learners (both means over a turn, of the worker
    with most), and ``host``, the seconds a process takes each step to know what to exchange.
    """

    exchanges: list[AllReduce | PointToPoint]
    seconds: float
    received: float
    host: float

    @classmethod
    def of(
        cls, spec: str, workers: int, per_worker: int, size: int, link: Link, kind: str, seed: int = 0
    ) -> CommunicationCost:
        """That of the mixing ``spec``; InputError where it is not allowed with so many learners."""
        mixing = Mixing(spec, workers * per_worker, seed)
        if workers == 1:
            return cls([AllReduce(0.0)], 0.0, 0.0, 0.0)
        turns = len(mixing.cycle) or MATCHINGS
        exchanges, seconds, received, host = list[AllReduce | PointToPoint](), [], [], []
        for step in range(1, turns + 1):
            clock = time.perf_counter()
            matrix = mixing.matrix(step)
            same = averages_all(matrix)
            if not mixing.cycle:  # a new plan each step; those of a cycle are kept
                Plan.of(matrix, list(range(0, workers * per_worker + 1, per_worker)), 0)
            host.append(time.perf_counter() - clock)
            if same:
                whole = all_reduce(kind, workers, size, link)
                exchanges.append(AllReduce(whole))
                seconds.append(whole)
                received.append(0)
                continue
            waits, out, into = messages(matrix, per_worker)
            busy = np.maximum(out, into) * link.message(size)
            exchanges.append(PointToPoint.of(waits, busy))
            seconds.append(float(busy.max()))
            received.append(int(into.max()))
        return cls(
            exchanges,
            statistics.mean(seconds),
            statistics.mean(received),
            statistics.median(host),
        )


def plan(
    recipe: Recipe,
    workers: Sequence[int],
    costs: Callable[[int], Costs],
    link: Link,
    *,
    stragglers: Stragglers | None = None,
    mixings: Sequence[str] = (),
    learners_per_worker: int = 1,
    scaling: Scaling = "local",
    kind: str = "ring",
    exchange_loss: bool = True,
    message: Callable[[str], None] = lambda line: None,
    progress: Callable[[float], None] = lambda share: None,
) -> RunTimes:
    """Predict steps and runs of ``recipe`` on each number of ``workers`` (processes).

    Args:
        costs: what a worker computes with that local batch; see :func:`.calibrate`.
        stragglers: none by default.
        mixings: all of TOPOLOGIES by default. Those that cannot be with some number of learners are left out
            there, and told; one that is given must be possible with some.
        learners_per_worker: learners a worker (default 1, as the paper's "16 GPUs (learners)").
        scaling: "local": each learner has the recipe's local batch, so that the total grows with n (default:
            what is measured is then what runs); "total": all share the recipe's total batch. Either way a run
            goes through the recipe's samples.
        kind: the all-reduce; the default is gloo's, see :func:`landscape.train.planning.run_time.all_reduce`.
        exchange_loss: whether all get the loss of each step, as landscape.train.loop does (the default).

    Raises InputError for numbers that do not fit the recipe.
    """
    choose("--scaling", scaling, ("local", "total"))
    choose("--all-reduce", kind, ALL_REDUCE)
    positive("--straggler", (stragglers := stragglers or Stragglers()).coefficient, least=0)
    positive("--slow", stragglers.slow, least=1)
    batches = {w: local_batch(recipe, w * learners_per_worker, scaling) for w in workers}
    for spec in mixings:
        _possible(spec, [w * learners_per_worker for w in workers], recipe.seed)
    rows: list[dict[str, Any]] = []
    for k, w in enumerate(workers):
        c, n = costs(batches[w]), w * learners_per_worker
        batch = n * batches[w]
        loss_exchange_s = all_reduce(kind, w, LOGGED, link) if exchange_loss else None
        gradient = c.gradient + (n - learners_per_worker) * batches[w] * c.draw
        cases = _synchronous(c, w, link, kind)
        for spec in mixings or TOPOLOGIES:
            try:
                cases += _decentralised(spec, c, w, learners_per_worker, link, kind, recipe.seed)
            except InputError as refused:
                message(f"{w} workers: left out, {refused}")
        for i, case in enumerate(cases):
            update = c.update + case.update
            seconds, error = step_time(
                case.order, case.cost.exchanges, gradient, update, w, stragglers,
                loss_exchange_s=loss_exchange_s, seed=recipe.seed,
            )  # fmt: skip
            steps = math.ceil(recipe.steps * recipe.batch / batch)
            rows.append(
                {
                    "workers": w,
                    "algorithm": case.algorithm,
                    "mixing": case.mixing,
                    "gradient_s": gradient,
                    "update_s": update,
                    "exchange_s": case.cost.seconds,
                    "step_s": seconds,
                    "step_error": error,
                    "steps": steps,
                    "run_s": steps * seconds,
                    "waiting": 1 - stragglers.mean(w) * (gradient + update) / seconds,
                    "samples_per_s": batch / seconds,
                    "speedup": next((r["step_s"] for r in rows if r["workers"] == w), seconds) / seconds,
                    "efficiency": (c.gradient + c.update) / seconds,
                }
            )
            progress((k + (i + 1) / len(cases)) / len(workers))
    names = ("algorithm", "mixing")
    columns: dict[str, Any] = {key: tuple(row[key] for row in rows) for key in names}
    columns |= {key: np.array([row[key] for row in rows]) for key in rows[0] if key not in names}
    return RunTimes(
        **columns, recipe=recipe.name, parameters=c.parameters, held=learners_per_worker,
        bandwidth=link.bandwidth, latency=link.latency, straggler=stragglers.coefficient,
        slow=stragglers.slow, all_reduce=kind, news=exchange_loss, seed=recipe.seed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """An algorithm with its mixing, what it exchanges when, and the seconds that it adds to the update."""

    algorithm: str
    mixing: str
    order: Order
    cost: CommunicationCost
    update: float = 0.0


def _synchronous(c: Costs, workers: int, link: Link, kind: str) -> list[_Case]:
    """SSGD and SSGD*: an all-reduce before the gradient, one more where the optimizer is not linear."""
    reduced = all_reduce(kind, workers, c.size, link) * (1 if c.linear else 2)
    mean = CommunicationCost([AllReduce(reduced)], reduced, 0.0, 0.0)
    return [_Case("ssgd", "", "before", mean), _Case("ssgd*", "", "before", mean, c.noise)]


def _decentralised(
    spec: str, c: Costs, workers: int, per_worker: int, link: Link, kind: str, seed: int
) -> list[_Case]:
    """DPSGD in both orders with the mixing ``spec``; InputError where so many learners cannot have it."""
    cost = CommunicationCost.of(spec, workers, per_worker, c.size, link, kind, seed)
    # One's own learners take part in the mixing where there are several.
    mixed = cost.received + (per_worker if per_worker > 1 else 0)
    update = cost.host + mixed * c.mix
    return [
        _Case("dpsgd awc", spec, "during", cost, update),
        _Case("dpsgd atc", spec, "after", cost, update),
    ]


def _possible(spec: str, learners: Sequence[int], seed: int) -> None:
    """Raise what refuses the mixing ``spec`` if each of these numbers of learners does."""
    refused: list[InputError] = []
    for n in learners:
        try:
            Mixing(spec, n, seed)
        except InputError as error:
            refused.append(error)
    if len(refused) == len(learners):
        raise refused[-1]


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
