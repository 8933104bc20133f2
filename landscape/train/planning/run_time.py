"""The time of a step on W workers: latency and bandwidth, stragglers, and which worker waits for which.

A message of S bytes takes α + S/β: latency α (s), bandwidth β (bytes a second) of a worker's own link, which
sends and receives at the same time, one message after the other each way, and is not shared
(Thakur, Rabenseifner, Gropp 2005, section 3, without their third term, the arithmetic of the sum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.options import choose, positive

# Steps of a simulated run, whose first half is discarded, and the number of independent runs: standard
# errors well below 1% at a straggler coefficient of 1, 512 workers and all topologies in seconds (ours).
STEPS, RUNS = 400, 8


@dataclass(frozen=True)
class Link:
    """A worker's network link: ``latency`` α (s) and ``bandwidth`` β (bytes a second)."""

    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Seconds for one message of ``size`` bytes: α + S/β."""
        return self.latency + size / self.bandwidth


def _ring(workers: int, size: float, link: Link) -> float:
    return 2 * (workers - 1) * link.message(size / workers)


def _doubling(workers: int, size: float, link: Link) -> float:
    rounds, rest = _rounds(workers)
    return (rounds + rest) * link.message(size)


def _halving(workers: int, size: float, link: Link) -> float:
    rounds, rest = _rounds(workers)
    core = 1 << rounds
    return (
        2 * rounds * link.latency + 2 * (core - 1) / core * size / link.bandwidth + rest * link.message(size)
    )


def _rounds(workers: int) -> tuple[int, int]:
    """⌊log₂ W⌋, and the two whole messages before and after where W is no power of two."""
    rounds = workers.bit_length() - 1
    return rounds, 0 if workers == 2**rounds else 2


ALL_REDUCE: dict[str, Callable[[int, float, Link], float]] = {
    "ring": _ring,
    "recursive-doubling": _doubling,
    "recursive-halving": _halving,
}


def all_reduce(kind: str, workers: int, size: float, link: Link) -> float:
    """Seconds that W workers take to sum S bytes, from when the last of them begins.

    Example:
        >>> round(all_reduce("ring", workers=4, size=1e6, link=Link(latency=1e-4, bandwidth=1e9)), 6)
        0.0021

    - "ring": 2(W − 1)α + 2 (W − 1)/W · S/β. That of gloo, for any size.
    - "recursive-doubling": ⌊log₂ W⌋ (α + S/β).
    - "recursive-halving", Rabenseifner's: 2⌊log₂ W⌋α + 2 (V − 1)/V · S/β, V = 2^⌊log₂ W⌋.

    The latter two take 2(α + S/β) more where W is no power of two (Thakur et al. 2005, section 4.5). Raises
    InputError for another ``kind``.
    """
    seconds: float = ALL_REDUCE[choose("--all-reduce", kind, ALL_REDUCE)](workers, size, link)
    return seconds


@dataclass(frozen=True)
class Stragglers:
    """A worker's seconds of computing, times f = F (1 + s E) with E ~ Exp(1) drawn anew each step.

    The shifted exponential of Lee et al. 2018 ("Speeding up distributed machine learning using codes"), s the
    ``coefficient``; of W such workers the slowest takes 1 + s H_W on average, H_W = Σ_{i ≤ W} 1/i. F is
    ``slow`` for worker 0 and 1 for all others. No stragglers is the default (ours): nothing is known of a
    machine that was not measured.
    """

    coefficient: float = 0.0
    slow: float = 1.0

    def fixed(self, workers: int) -> Array:
        """F (W,)."""
        factors = np.ones(workers)
        factors[0] = self.slow
        return factors

    def mean(self, workers: int) -> float:
        """The mean of f over workers and steps."""
        return float(self.fixed(workers).mean()) * (1 + self.coefficient)

    def slowest(self, workers: int) -> float:
        """E max f over W workers, all with F = 1."""
        return 1 + self.coefficient * sum(1 / i for i in range(1, workers + 1))


@dataclass(frozen=True)
class Cluster:
    """The machines that a run is predicted for.

    Attributes:
        link: of each worker.
        stragglers: none by default.
        learners_per_worker: by default 1, as the paper's "16 GPUs (learners)".
        all_reduce: a name of :func:`all_reduce`; the default is gloo's.
        exchange_loss: whether all workers get the loss of each step, as landscape.train.loop does (the
            default).

    Raises:
        InputError: for a number or name that is not allowed.
    """

    link: Link
    stragglers: Stragglers = Stragglers()
    learners_per_worker: int = 1
    all_reduce: str = "ring"
    exchange_loss: bool = True

    def __post_init__(self) -> None:
        choose("--all-reduce", self.all_reduce, ALL_REDUCE)
        positive("--straggler", self.stragglers.coefficient, least=0)
        positive("--slow", self.stragglers.slow, least=1)

    def all_reduce_s(self, workers: int, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes over ``workers``."""
        return all_reduce(self.all_reduce, workers, size, self.link)


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce: done ``seconds`` after the last worker began."""

    seconds: float

    def done(self, begun: Array) -> Array:
        """The times (runs, W) when the workers have their results, if they began at ``begun`` (runs, W)."""
        last: Array = begun.max(1, keepdims=True) + self.seconds
        return np.broadcast_to(last, begun.shape)


@dataclass(frozen=True)
class PointToPoint:
    """Point-to-point messages: a worker is done when it and all workers it exchanges with have sent theirs.

    Worker j waits for workers ``sources[offsets[j]:offsets[j + 1]]``, itself among them; worker i's messages
    keep its link ``busy[i]`` seconds (W,), the last of them being counted for all its neighbours.
    """

    sources: Array
    offsets: Array
    busy: Array

    @classmethod
    def of(cls, waits: Array, busy: Array) -> PointToPoint:
        """From whom each worker exchanges with, ``waits`` (W, W) bool, in either direction."""
        meets = waits | waits.T | np.eye(len(waits), dtype=bool)
        rows, sources = np.nonzero(meets)
        return cls(sources, np.searchsorted(rows, np.arange(len(waits))), busy)

    def done(self, begun: Array) -> Array:
        """The times (runs, W) when the workers have their results, if they began at ``begun`` (runs, W)."""
        sent = begun + self.busy
        completion: Array = np.maximum.reduceat(sent[:, self.sources], self.offsets, axis=1)
        return completion


#: When the exchange of a step begins: before the gradient, which waits for it (SSGD); with the gradient, and
#: the update waits for both (AWC); or after it (ATC).
Order = Literal["before", "during", "after"]


@dataclass(frozen=True)
class Step:
    """The parts of a step of each worker.

    Attributes:
        order: when the exchange begins.
        exchanges: those of the steps in turn.
        gradient: seconds of computing, without stragglers.
        update: as ``gradient``.
        loss_exchange_s: seconds of the all-reduce of the last step's loss, for which the update waits; None:
            there is none.
    """

    order: Order
    exchanges: Sequence[AllReduce | PointToPoint]
    gradient: float
    update: float
    loss_exchange_s: float | None = None


def step_time(
    step: Step,
    workers: int,
    stragglers: Stragglers,
    *,
    seed: int = 0,
    steps: int = STEPS,
    runs: int = RUNS,
) -> tuple[float, float]:
    """(mean seconds a step, its standard error) of W workers, by simulation.

    With s_j the start of worker j's step, f_j its straggler factor, N(j) the workers it exchanges with and
    c_i the time that the messages of worker i take, a step ends at

    - "before": G(D(s))_j + f_j update, D(s)_j = max_{i ∈ N(j)} (s_i + c_i) and G(s)_j = s_j + f_j gradient;
    - "during": max(G(s)_j, D(s)_j) + f_j update;
    - "after": D(G(s))_j + f_j update;

    a recurrence in maximum and sum (Baccelli et al. 1992, "Synchronization and Linearity"). With
    ``loss_exchange_s`` no gradient counts as done before the all-reduce of the last step's loss is, at
    max_i s_i + ``loss_exchange_s``.

    Args:
        step: what each worker does in a step.
        workers: W.
        stragglers: the distribution of f_j.
        seed: of the drawn f_j.
        steps: simulated steps; the time is that of the last worker over the second half of them.
        runs: independent runs, from which the error comes; without randomness one run, and the error is 0.
    """
    rng, fixed = np.random.default_rng(seed), stragglers.fixed(workers)
    if not stragglers.coefficient:
        runs = 1
    now, half = np.zeros((runs, workers)), np.zeros(runs)
    for t in range(1, steps + 1):
        f = fixed
        if stragglers.coefficient:
            f = fixed * (1 + stragglers.coefficient * rng.standard_exponential((runs, workers)))
        exchange = step.exchanges[(t - 1) % len(step.exchanges)]
        start = exchange.done(now) if step.order == "before" else now
        done = start + f * step.gradient
        if step.loss_exchange_s is not None:
            done = np.maximum(done, now.max(1, keepdims=True) + step.loss_exchange_s)
        if step.order == "during":
            done = np.maximum(done, exchange.done(now))
        elif step.order == "after":
            done = exchange.done(done)
        now = done + f * step.update
        if t == steps // 2:
            half = now.max(1)
    means = (now.max(1) - half) / (steps - steps // 2)
    error = float(means.std(ddof=1)) / math.sqrt(runs) if runs > 1 else 0.0
    return float(means.mean()), error
