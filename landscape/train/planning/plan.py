"""What a run would take on more workers than there are here: what our code sends, and what it computes.

A step of landscape.train.loop, as costed here (DPSGD-2020 compares run times in its appendix, which is not
available: the cost model, the stragglers and all defaults are ours):

- SSGD: an all-reduce of w_a before the gradient, which waits for it; where the optimizer is not linear, one
  more of the gradients. SSGD*: the same, and the draw of ξ by every process.
- DPSGD, AWC: the exchange begins with the step and runs beside the gradient; ATC: after the gradient. A
  process sends each learner once to each process with a neighbour of it; "full" is an all-reduce.
- Every step ends with an all-reduce of two numbers, loss and spread, which each waits for before its next
  update. So nobody is ahead of the slowest by more than a gradient, whatever the rule; without ``news`` it is
  the algorithm by itself.

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
    Everyone,
    Link,
    Neighbours,
    Order,
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


def messages(matrix: Array, held: int) -> tuple[Array, Array, Array]:
    """Who sends to whom, and how many learners each sends and receives, under one mixing matrix (n, n).

    Returns receives-from (W, W) bool, sent (W,) and received (W,): those of ``Plan`` for
    every one of the W processes, each with ``held`` learners.
    """
    learners = np.arange(len(matrix))
    needs = np.logical_or.reduceat(matrix != 0, learners[::held], axis=0)  # (W, n)
    needs[learners // held, learners] = False
    sent = np.add.reduceat(needs.sum(0), learners[::held])
    return np.logical_or.reduceat(needs, learners[::held], axis=1), sent, needs.sum(1)


@dataclass(frozen=True)
class Traffic:
    """What a mixing has W processes exchange, step by step in turn, ``size`` bytes a learner over ``link``.

    ``seconds`` of an exchange if nobody is late, ``received`` learners (both means over a turn, of the worker
    with most), and ``host``, the seconds a process takes each step to know what to exchange.
    """

    exchanges: list[Everyone | Neighbours]
    seconds: float
    received: float
    host: float

    @classmethod
    def of(
        cls, spec: str, workers: int, held: int, size: int, link: Link, kind: str, seed: int = 0
    ) -> Traffic:
        """That of the mixing ``spec``; InputError where it is not allowed with so many learners."""
        mixing = Mixing(spec, workers * held, seed)
        if workers == 1:
            return cls([Everyone(0.0)], 0.0, 0.0, 0.0)
        turns = len(mixing.cycle) or MATCHINGS
        exchanges, seconds, received, host = list[Everyone | Neighbours](), [], [], []
        for step in range(1, turns + 1):
            clock = time.perf_counter()
            matrix = mixing.matrix(step)
            same = averages_all(matrix)
            if not mixing.cycle:  # a new plan each step; those of a cycle are kept
                Plan.of(matrix, list(range(0, workers * held + 1, held)), 0)
            host.append(time.perf_counter() - clock)
            if same:
                whole = all_reduce(kind, workers, size, link)
                exchanges.append(Everyone(whole))
                seconds.append(whole)
                received.append(0)
                continue
            waits, out, into = messages(matrix, held)
            busy = np.maximum(out, into) * link.message(size)
            exchanges.append(Neighbours.of(waits, busy))
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
    held: int = 1,
    scaling: Scaling = "local",
    kind: str = "ring",
    news: bool = True,
    message: Callable[[str], None] = lambda line: None,
    progress: Callable[[float], None] = lambda share: None,
) -> RunTimes:
    """Predict steps and runs of ``recipe`` on each number of ``workers`` (processes).

    Args:
        costs: what a worker computes with that local batch; see :func:`.calibrate`.
        stragglers: none by default.
        mixings: all of TOPOLOGIES by default. Those that cannot be with some number of learners are left out
            there, and told; one that is given must be possible with some.
        held: learners a worker (default 1, as the paper's "16 GPUs (learners)").
        scaling: "local": each learner has the recipe's local batch, so that the total grows with n (default:
            what is measured is then what runs); "total": all share the recipe's total batch. Either way a run
            goes through the recipe's samples.
        kind: the all-reduce; the default is gloo's, see :func:`landscape.train.planning.run_time.all_reduce`.
        news: whether all get the loss of each step, as landscape.train.loop does (the default).

    Raises InputError for numbers that do not fit the recipe.
    """
    choose("--scaling", scaling, ("local", "total"))
    choose("--all-reduce", kind, ALL_REDUCE)
    positive("--straggler", (stragglers := stragglers or Stragglers()).coefficient, least=0)
    positive("--slow", stragglers.slow, least=1)
    batches = {w: local_batch(recipe, w * held, scaling) for w in workers}
    for spec in mixings:
        _possible(spec, [w * held for w in workers], recipe.seed)
    rows: list[dict[str, Any]] = []
    for k, w in enumerate(workers):
        c, n = costs(batches[w]), w * held
        batch = n * batches[w]
        reduced = all_reduce(kind, w, c.size, link) * (1 if c.linear else 2)
        news_s = all_reduce(kind, w, LOGGED, link) if news else None
        gradient = c.gradient + (n - held) * batches[w] * c.draw
        mean = Traffic([Everyone(reduced)], reduced, 0.0, 0.0)
        cases: list[tuple[str, str, Order, Traffic, float]] = [
            ("ssgd", "", "before", mean, 0.0),
            ("ssgd*", "", "before", mean, c.noise),
        ]
        for spec in mixings or TOPOLOGIES:
            try:
                traffic = Traffic.of(spec, w, held, c.size, link, kind, recipe.seed)
            except InputError as refused:
                message(f"{w} workers: left out, {refused}")
                continue
            # One's own learners take part in the mixing where there are several.
            mixed = traffic.received + (held if held > 1 else 0)
            more = traffic.host + mixed * c.mix
            cases += [
                ("dpsgd awc", spec, "during", traffic, more),
                ("dpsgd atc", spec, "after", traffic, more),
            ]
        for i, (algorithm, spec, order, traffic, extra) in enumerate(cases):
            update = c.update + extra
            seconds, error = step_time(
                order, traffic.exchanges, gradient, update, w, stragglers,
                news_s=news_s, seed=recipe.seed,
            )  # fmt: skip
            computing = stragglers.mean(w) * (gradient + update)
            steps = math.ceil(recipe.steps * recipe.batch / batch)
            rows.append(
                {
                    "workers": w,
                    "algorithm": algorithm,
                    "mixing": spec,
                    "gradient_s": gradient,
                    "update_s": update,
                    "exchange_s": traffic.seconds,
                    "step_s": seconds,
                    "step_error": error,
                    "steps": steps,
                    "run_s": steps * seconds,
                    "waiting": 1 - computing / seconds,
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
        **columns, recipe=recipe.name, parameters=c.parameters, held=held, bandwidth=link.bandwidth,
        latency=link.latency, straggler=stragglers.coefficient, slow=stragglers.slow, all_reduce=kind,
        news=news, seed=recipe.seed,
    )  # fmt: skip


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
