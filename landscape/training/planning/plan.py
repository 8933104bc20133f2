"""The predicted time of a run on more workers than this machine has, from its messages and its computing.

A step as costed here (DPSGD-2020 compares run times in its appendix, which is not
available: the cost model, the stragglers and all defaults are ours):

- SSGD: an all-reduce of w_a before the gradient, which waits for it; where the optimizer is not linear, one
  more of the gradients. SSGD*: the same, and the draw of ξ by every process.
- DPSGD, AWC: the exchange begins with the step and overlaps the gradient; ATC: after the gradient. A
  process sends each learner once to each process with a neighbor of it; "full" is an all-reduce.
- Every step ends with an all-reduce of two numbers, loss and spread, which each waits for before its next
  update. So no worker is ahead of the slowest by more than a gradient, under any rule; without
  ``exchange_loss`` it is the algorithm by itself.
- A message of S bytes takes α + S/β: latency α (s), bandwidth β (bytes per second) of a worker's own link,
  which sends and receives at the same time, one message after the other each way, and is not shared
  (Thakur, Rabenseifner, Gropp 2005, section 3, without their third term, the arithmetic of the sum).

Left out: the decomposition, evaluation and checkpoints, whose cost depends on their frequency.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from landscape.core import registry
from landscape.core.errors import InputError, LandscapeError
from landscape.core.hdf5 import Array
from landscape.core.options import choose, ends_in, positive
from landscape.core.progress import Progress, ProgressOption, shows_progress, taken
from landscape.core.registry import numerics
from landscape.results.training import RunTimes
from landscape.training.processes.comm import Plan
from landscape.training.recipes.recipe import Recipe
from landscape.training.topology.mixing import Mixing, averages_all, forms

# Number of random matchings that are drawn, and then used in turn (ours).
MATCHINGS = 50
# Loss and spread, in float64.
LOGGED = 16
# Steps of a simulated run, whose first half is discarded, and the number of independent runs: standard
# errors well below 1% at a straggler coefficient of 1, 512 workers and all topologies in seconds (ours).
STEPS, RUNS = 400, 8

Scaling = Literal["local", "total"]
SCALINGS: tuple[Scaling, ...] = ("local", "total")
#: When the exchange of a step begins: before the gradient, which waits for it (SSGD); with the gradient, and
#: the update waits for both (AWC); or after it (ATC).
Order = Literal["before", "during", "after"]


@dataclass(frozen=True)
class Costs:
    """Seconds that a worker computes for its learners' local batches, as measured by :func:`.calibrate`.

    ``gradient``: minibatch, gradient and the optimizer's direction. ``update``: the rest of a step with
    nothing to exchange. ``mix``: to mix in one received learner. ``noise``: SSGD*'s draw. ``draw``: one index
    of a minibatch; every process draws those of all learners. ``size``: bytes of one learner.
    """

    gradient: float
    update: float
    mix: float
    noise: float
    draw: float
    parameters: int
    size: int
    linear: bool


ALL_REDUCE = ("ring", "recursive-doubling", "recursive-halving")


@dataclass(frozen=True)
class Machines:
    """The machines that a run is predicted for; no stragglers by default (ours), as nothing is known of them.

    A worker's seconds of computing are times f = F (1 + s E) with E ~ Exp(1) drawn anew each step, the
    shifted exponential of Lee et al. 2018 ("Speeding up distributed machine learning using codes"); of W such
    workers the slowest takes 1 + s H_W on average, H_W = Σ_{i ≤ W} 1/i. F is ``slow`` for worker 0, else 1.

    Attributes:
        latency, bandwidth: α (s) and β (bytes per second) of each worker's link.
        straggler: s.
        slow: the F of worker 0.
        learners_per_worker: by default 1, as the paper's "16 GPUs (learners)".
        all_reduce: the algorithm of :meth:`all_reduce_s`; the default is gloo's.
        exchange_loss: whether all workers get the loss of each step, as landscape.training.run.loop does (the
            default).

    Raises InputError for a number or a name that is not allowed.
    """

    latency: float
    bandwidth: float
    straggler: float = 0.0
    slow: float = 1.0
    learners_per_worker: int = 1
    all_reduce: str = "ring"
    exchange_loss: bool = True

    def __post_init__(self) -> None:
        positive("straggler", self.straggler, least=0)
        positive("slow", self.slow, least=1)
        choose("all_reduce", self.all_reduce, ALL_REDUCE)

    def message(self, size: float) -> float:
        """Seconds for one message of ``size`` bytes: α + S/β."""
        return self.latency + size / self.bandwidth

    def all_reduce_s(self, workers: int, size: float) -> float:
        """Seconds that W workers take to sum S bytes, from when the last of them begins.

        - "ring": 2(W − 1)α + 2 (W − 1)/W · S/β. That of gloo, for any size.
        - "recursive-doubling": ⌊log₂ W⌋ (α + S/β).
        - "recursive-halving", Rabenseifner's: 2⌊log₂ W⌋α + 2 (V − 1)/V · S/β, V = 2^⌊log₂ W⌋.

        The latter two take 2(α + S/β) more where W is no power of two (Thakur et al. 2005, section 4.5).

        Example:
            >>> round(Machines(latency=1e-4, bandwidth=1e9).all_reduce_s(workers=4, size=1e6), 6)
            0.0021
        """
        if self.all_reduce == "ring":
            return 2 * (workers - 1) * self.message(size / workers)
        rounds = workers.bit_length() - 1
        core, rest = 1 << rounds, 2 * (workers != 1 << rounds)
        if self.all_reduce == "recursive-doubling":
            return (rounds + rest) * self.message(size)
        moved = 2 * (core - 1) / core * size / self.bandwidth
        return 2 * rounds * self.latency + moved + rest * self.message(size)

    def factors(self, workers: int) -> Array:
        """F (W,)."""
        return np.array([self.slow] + [1.0] * (workers - 1))


@dataclass(frozen=True)
class Exchange:
    """The messages of a step, which keep the link of each worker busy for ``busy`` seconds, (W,) or all ().

    An all-reduce is done when all have done theirs. Of point-to-point messages worker j waits for workers
    ``sources[offsets[j]:offsets[j + 1]]``, itself among them; the last of a worker's messages is counted for
    all its neighbors.
    """

    busy: Array | float
    sources: Array | None = None
    offsets: Array | None = None

    @classmethod
    def between(cls, waits: Array, busy: Array) -> Exchange:
        """The exchange of workers that wait for each other, ``waits`` (W, W) bool, in either direction."""
        rows, sources = np.nonzero(waits | waits.T | np.eye(len(waits), dtype=bool))
        return cls(busy, sources, np.searchsorted(rows, np.arange(len(waits))))

    def done(self, begun: Array) -> Array:
        """The times (runs, W) when the workers have their results, if they began at ``begun`` (runs, W)."""
        sent = begun + self.busy
        if self.sources is None or self.offsets is None:
            return np.broadcast_to(sent.max(1, keepdims=True), begun.shape)
        completion: Array = np.maximum.reduceat(sent[:, self.sources], self.offsets, axis=1)
        return completion


def step_time(
    order: Order,
    exchanges: Sequence[Exchange],
    gradient: float,
    update: float,
    workers: int,
    machines: Machines,
    *,
    loss_exchange_s: float | None = None,
    seed: int = 0,
    steps: int = STEPS,
) -> tuple[float, float]:
    """(mean seconds per step, its standard error) of W workers, by simulation.

    With s_j the start of worker j's step, f_j its straggler factor, N(j) the workers it exchanges with and
    c_i the time that the messages of worker i take, a step ends at

    - "before": G(D(s))_j + f_j update, D(s)_j = max_{i ∈ N(j)} (s_i + c_i) and G(s)_j = s_j + f_j gradient;
    - "during": max(G(s)_j, D(s)_j) + f_j update;
    - "after": D(G(s))_j + f_j update;

    a recurrence in maximum and sum (Baccelli et al. 1992, "Synchronization and Linearity"). With
    ``loss_exchange_s`` no gradient counts as done before the all-reduce of the last step's loss is, at
    max_i s_i + ``loss_exchange_s``.

    Args:
        order: when the exchange begins.
        exchanges: those of the steps in turn.
        gradient, update: seconds of computing, without stragglers.
        workers: W.
        machines: the distribution of f_j.
        loss_exchange_s: seconds of the all-reduce of the last step's loss; None: there is none.
        seed: of the drawn f_j.
        steps: simulated steps; the time is that of the last worker over the second half of them. The error
            is that of RUNS independent runs; without randomness there is one, and the error is 0.
    """
    rng, f, late = np.random.default_rng(seed), machines.factors(workers), machines.straggler
    fixed, runs = f, RUNS if late else 1
    now, half = np.zeros((runs, workers)), np.zeros(runs)
    for t in range(1, steps + 1):
        if late:
            f = fixed * (1 + late * rng.standard_exponential((runs, workers)))
        exchange = exchanges[(t - 1) % len(exchanges)]
        start = exchange.done(now) if order == "before" else now
        done = start + f * gradient
        if loss_exchange_s is not None:
            done = np.maximum(done, now.max(1, keepdims=True) + loss_exchange_s)
        if order == "during":
            done = np.maximum(done, exchange.done(now))
        elif order == "after":
            done = exchange.done(done)
        now = done + f * update
        if t == steps // 2:
            half = now.max(1)
    means = (now.max(1) - half) / (steps - steps // 2)
    return float(means.mean()), float(means.std(ddof=1)) / math.sqrt(runs) if runs > 1 else 0.0


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
class Case:
    """An algorithm with its mixing: its exchanges in turn, and the seconds of one if no worker is late.

    ``order`` says when an exchange begins, ``more`` is added to the update of each step.
    """

    algorithm: str
    mixing: str
    order: Order
    exchanges: list[Exchange]
    seconds: float
    more: float = 0.0


def decentralized(spec: str, costs: Costs, workers: int, machines: Machines, seed: int) -> list[Case]:
    """DPSGD in both orders with the mixing ``spec``; InputError where so many learners cannot have it."""
    per_worker = machines.learners_per_worker
    mixing = Mixing(spec, workers * per_worker, seed)
    exchanges, received, host = [Exchange(0.0)], [0], [0.0]
    if workers > 1:
        exchanges, received, host = [], [], []
        for step in range(1, (len(mixing.cycle) or MATCHINGS) + 1):
            clock = time.perf_counter()
            matrix = mixing.matrix(step)
            is_all_reduce = averages_all(matrix)
            if not mixing.cycle:  # a process makes a new plan each step; it keeps the plans of a cycle
                Plan.of(matrix, list(range(0, workers * per_worker + 1, per_worker)), 0)
            host.append(time.perf_counter() - clock)
            exchange, most = Exchange(machines.all_reduce_s(workers, costs.size)), 0
            if not is_all_reduce:
                waits, sent, receives = messages(matrix, per_worker)
                busy = np.maximum(sent, receives) * machines.message(costs.size)
                exchange, most = Exchange.between(waits, busy), int(receives.max())
            exchanges.append(exchange)
            received.append(most)
    # What a process takes to find out what to exchange; a worker with several learners mixes these, too.
    mixed = statistics.mean(received) + (per_worker if per_worker > 1 else 0)
    more = statistics.median(host) + mixed * costs.mix
    orders: tuple[tuple[str, Order], ...] = (("awc", "during"), ("atc", "after"))
    mean = statistics.mean(float(np.max(exchange.busy)) for exchange in exchanges)
    return [Case(f"dpsgd {name}", spec, order, exchanges, mean, more) for name, order in orders]


@numerics(1)
def predict(
    recipe: Recipe,
    workers: Sequence[int],
    costs: Callable[[int], Costs],
    machines: Machines,
    *,
    mixings: Sequence[str] = (),
    scaling: Scaling = "local",
    message: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda share: None,
) -> RunTimes:
    """The times of steps and runs of ``recipe`` on each number of ``workers`` (processes).

    Args:
        recipe: the run.
        workers: numbers of processes W.
        costs: gives the seconds that a worker computes with a local batch; see :func:`.calibrate`.
        machines: the machines.
        mixings: by default those of :func:`planned_topologies`. A mixing that is not possible with some
            number of learners is left out there, with a message; one that is given must be possible with
            some number.
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
    choose("scaling", scaling, SCALINGS)
    learners = [w * machines.learners_per_worker for w in workers]
    batches = [local_batch(recipe, n, scaling) for n in learners]
    for spec in mixings:
        _check_possible(spec, learners, recipe.seed)
    rows: list[dict[str, Any]] = []
    for k, w in enumerate(workers):
        measured = costs(batches[k])
        reduced = machines.all_reduce_s(w, measured.size) * (1 if measured.linear else 2)
        mean = [Exchange(reduced)]
        cases = [
            Case("ssgd", "", "before", mean, reduced),
            Case("ssgd*", "", "before", mean, reduced, measured.noise),
        ]
        for spec in mixings or planned_topologies():
            try:
                cases += decentralized(spec, measured, w, machines, recipe.seed)
            except LandscapeError as refusal:
                message(f"{w} workers: left out, {refusal}")
        of_ssgd = math.nan
        for i, case in enumerate(cases):
            row = _row(recipe, case, measured, w, batches[k], machines)
            of_ssgd = of_ssgd if i else row["step_s"]
            rows.append(row | {"speedup": of_ssgd / row["step_s"]})
            progress((k + (i + 1) / len(cases)) / len(workers))
    columns: dict[str, Any] = {key: tuple(row[key] for row in rows) for key in rows[0]}
    columns |= {key: np.array(columns[key]) for key in columns.keys() - {"algorithm", "mixing"}}
    columns |= {"recipe": recipe.name, "parameters": measured.parameters, "seed": recipe.seed}
    return RunTimes(**columns, **vars(machines))


def planned_topologies() -> list[str]:
    """The topologies whose name is enough, and rings with one and two neighbors per side."""
    alone = [spec for form in forms() for spec in form.split(", ") if spec in registry.topologies]
    return [alone[0], "ring(1)", "ring(2)", *alone[1:]]


def _row(
    recipe: Recipe, case: Case, costs: Costs, workers: int, local_batch: int, machines: Machines
) -> dict[str, Any]:
    """The columns of :class:`.RunTimes` for one case but "speedup", which compares cases."""
    n = workers * machines.learners_per_worker
    gradient = costs.gradient + (n - machines.learners_per_worker) * local_batch * costs.draw
    update = costs.update + case.more
    logged = machines.all_reduce_s(workers, LOGGED) if machines.exchange_loss else None
    seconds, error = step_time(
        case.order, case.exchanges, gradient, update, workers, machines, loss_exchange_s=logged,
        seed=recipe.seed,
    )  # fmt: skip
    steps = math.ceil(recipe.steps * recipe.batch / (n * local_batch))
    computing = machines.factors(workers).mean() * (1 + machines.straggler) * (gradient + update)
    return {
        "workers": workers,
        "algorithm": case.algorithm,
        "mixing": case.mixing,
        "gradient_s": gradient,
        "update_s": update,
        "exchange_s": case.seconds,
        "step_s": seconds,
        "step_error": error,
        "steps": steps,
        "run_s": steps * seconds,
        "waiting": 1 - computing / seconds,
        "samples_per_s": n * local_batch / seconds,
        "efficiency": (costs.gradient + costs.update) / seconds,
    }


def _check_possible(spec: str, learners: Sequence[int], seed: int) -> None:
    """Raise InputError if the mixing ``spec`` is possible with none of these numbers of learners."""
    for k, n in enumerate(learners, 1):
        try:
            Mixing(spec, n, seed)
            return
        except LandscapeError:
            if k == len(learners):
                raise


def local_batch(recipe: Recipe, learners: int, scaling: Scaling) -> int:
    """B of that many learners; InputError where they cannot share the recipe's total batch evenly."""
    if scaling == "local":
        return recipe.local_batch
    if recipe.batch % learners:
        raise InputError(
            f"scaling: 'total' is not allowed, {learners} learners do not divide the batch of {recipe.batch}"
        )
    return recipe.batch // learners


#: Of the topologies that need a number, besides rings, one each in the list (ours).
EXAMPLES = ("k-peer-exponential(2)", "hyper-hypercube(2)", "base(2)", "d-equistatic(4)", "u-equistatic(4)")


class Properties(TypedDict):
    """The numbers of a topology, see :func:`topologies`."""

    gap: float
    omega_min: float
    limit: float
    rounds: int | None
    bytes: float


@shows_progress()
def topologies(
    mixings: Iterable[str] | None = None,
    *,
    learners: int = 8,
    parameters: int = 1_000_000,
    picture: str | Path | None = None,
    progress: ProgressOption = None,
) -> dict[str, Properties]:
    """Compare the topologies for so many learners.

    Args:
        mixings: what ``algorithm.mixing`` may be, such as "ring(2)", "base" or a file. Default: every
            topology that this number of learners allows, with some numbers where it needs one.
        learners: n.
        parameters: of the network, 4 bytes each.
        picture: a .png, .pdf or .svg file for a picture of the topologies as graphs, a panel for each step of
            a cycle, eight at most; of random matching three steps with seed 0.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.

    Returns:
        Mixing -> its numbers: "gap", the spectral gap of the mixing matrix; "omega_min", its smallest
        eigenvalue; "limit", the largest stable ηλ of DPSGD in AWC order without momentum; "rounds", after how
        many steps from the first the learners have exactly the average, None for never; "bytes", what a
        learner sends in a step, the mean over the steps. Of a cycle of matrices the gap is per step, and the
        eigenvalue is the smallest of all.

    Raises:
        InputError: a mixing that is not known, or not for so many learners; numbers below 1; a
            picture of none, or with another ending.

    Example:
        >>> found = topologies(["ring(1)", "base"], learners=6)
        >>> round(found["ring(1)"]["limit"], 4), found["ring(1)"]["rounds"], found["base"]["rounds"]
        (0.6667, None, 4)
    """
    positive("learners", learners, least=1)
    positive("parameters", parameters, least=1)
    if picture is not None:
        from landscape import plots  # and matplotlib: only where something is drawn
        from landscape.plots.topologies import draw_topologies

        ends_in("picture", picture, plots.FORMATS)
    found: dict[str, Properties] = {}
    graphs: dict[str, list[Array]] = {}
    chosen, report = default_mixings() if mixings is None else [*mixings], taken(progress)
    for done, spec in enumerate(chosen):
        report(done / len(chosen))
        try:
            mixing = Mixing(spec, learners, seed=0, where="mixings")
        except InputError:
            if mixings is not None:
                raise
            continue
        vectors = np.mean([mixing.degree(t) for t in range(1, max(1, len(mixing.cycle)) + 1)])
        found[spec] = {
            "gap": mixing.gap,
            "omega_min": mixing.omega_min,
            "limit": mixing.stability_limit,
            "rounds": mixing.rounds,
            "bytes": 4 * parameters * float(vectors),
        }
        graphs[spec] = mixing.cycle or [mixing.matrix(t) for t in range(1, 4)]
    if picture is not None:
        if not graphs:
            raise InputError("mixings: none is not allowed with picture, there must be one to draw")
        plots.save_figure(draw_topologies(graphs), picture)
    return found


def default_mixings() -> list[str]:
    """The mixings that :func:`topologies` compares by default."""
    return [*planned_topologies(), *EXAMPLES]
