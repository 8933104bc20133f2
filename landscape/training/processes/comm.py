"""The learners of this process, and its exchanges with the processes that hold the other learners."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.devices import float64_device, gather_bytes
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.problem.layout import Layout, average
from landscape.problem.problem import Problem
from landscape.training.topology import Mixing, averages_all

T = TypeVar("T")
# Bytes of a piece of a mean. Source: DistributedDataParallel's buckets.
PIECE = 25 * 2**20


class Processes(ABC):
    """The processes of torch's default group, which share the learners.

    Args:
        rank, size: the number of this process, and the number of processes.
        device: the device of the exchanged tensors.

    Attributes:
        step: the number of the step that this process is in.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device, self.step = rank, size, device, 0

    @abstractmethod
    def naming(self) -> contextlib.AbstractContextManager[None]:
        """Turn torch's errors in the exchanges of the block into an error that names the lost rank."""

    def gathered(self, mine: T) -> list[T]:
        """Return the value of each rank, which JSON can represent, in the order of the ranks."""
        if self.size == 1:
            return [mine]
        with self.naming():
            return [json.loads(text) for text in gather_bytes(json.dumps(mine).encode(), self.device)]

    def difference(self, facts: Mapping[str, str]) -> str:
        """Return a line on the first of ``facts``, name -> text, that differs between ranks, or ""."""
        rank_0_facts, *others = self.gathered(dict(facts))
        for rank, rank_facts in enumerate(others, 1):
            for name in {**rank_0_facts, **rank_facts}:
                at_0, at_rank = rank_0_facts.get(name, "missing"), rank_facts.get(name, "missing")
                if at_rank != at_0:
                    return f"{name}: {at_rank} on rank {rank}, but {at_0} on rank 0; all must be the same"
        return ""


class Comm:
    """This process's part of ``learners`` n learners, rows ``local`` of the (n, P) buffer, and its exchanges.

    Without a ``group``, or in a group of one process, this process has all learners. Raises InputError for
    fewer learners than processes; a failed exchange raises :class:`.LostProcessError` with the rank.
    """

    def __init__(self, learners: int, group: Processes | None = None) -> None:
        self.learners, self.group = learners, group
        self.rank, self.size = (group.rank, group.size) if group else (0, 1)
        if learners < self.size:
            raise InputError("learners", learners, allowed=f"≥ {self.size}, the number of processes")
        self.bounds = _bounds(learners, self.size)
        self.local = slice(self.bounds[self.rank], self.bounds[self.rank + 1])
        #: The number of learners of this process.
        self.n_local = self.local.stop - self.local.start
        #: Seconds that this process has waited for the other processes.
        self.waited = 0.0
        # Turns torch's errors inside, also those of starting an exchange, into the name of the lost rank.
        self._naming = group.naming if group else contextlib.nullcontext
        self._device = group.device if group else torch.device("cpu")
        self._mean: tuple[Tensor, int, Callable[[], Tensor]] | None = None
        self._plans: dict[tuple[str, int] | None, Plan] = {}
        self._buffers: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add the time of the block to ``waited``, and name a rank that is lost in it."""
        cuda = self._device.type == "cuda"
        if cuda:  # NCCL only queues: the host waits here to time the exchange
            torch.cuda.current_stream().synchronize()
        clock = time.perf_counter()
        try:
            with self._naming():
                yield
                if cuda:
                    torch.cuda.current_stream().synchronize()
        finally:
            self.waited += time.perf_counter() - clock

    # Means and sums over all processes.

    def mean(self, rows: Tensor) -> Tensor:
        """Return the mean (P,) over all n learners, of which ``rows`` (n_local, P) are this process's.

        The mean of the last tensor is stored, because a step ends and the next begins with the same tensor.
        The result is valid until the mean of another tensor is computed or started.
        """
        return self.start_mean(rows)()

    def start_mean(self, rows: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`mean`; the exchange runs until the result is called, which returns the mean."""
        if self._mean is None or self._mean[0] is not rows or self._mean[1] != rows._version:
            if self._mean is not None:
                self._mean[2]()  # finish this exchange, whose memory the next mean uses
            self._mean = rows, rows._version, functools.cache(self._start_mean(rows, "mean"))
        return self._mean[2]

    def set_mean(self, rows: Tensor, mean: Callable[[], Tensor] | None = None) -> None:
        """Store ``mean``, a function whose result is then the :meth:`mean` of ``rows`` (n_local, P).

        Without ``mean`` row 0 is stored: the rows of all n learners must then be equal.
        """
        self._mean = rows, rows._version, functools.cache(mean) if mean else lambda: rows[0]

    def fresh_mean(self, rows: Tensor, use: str = "", out: Tensor | None = None) -> Tensor:
        """Return the mean (P,) as :meth:`mean`, not stored; valid until the next call with the same ``use``.

        Several processes write the mean to ``out`` (P,), if given; ``out`` may be the only row of ``rows``.
        """
        return self._start_mean(rows, use, out)()

    def _start_mean(self, rows: Tensor, use: str, out: Tensor | None = None) -> Callable[[], Tensor]:
        if self.size == 1:
            return lambda: average(rows)
        total = self.buffer(use, rows[0]) if out is None else out
        works = [self._send_mean(rows[..., piece], total[piece]) for piece in pieces(total)]
        return lambda: self._finished(works, total)

    def _send_mean(self, rows: Tensor, out: Tensor) -> dist.Work:
        """Start the exchange that writes the mean over all learners of ``rows`` (n_local, ...) to ``out``."""
        if len(rows) == 1:
            torch.div(rows[0], self.learners, out=out)
        else:
            torch.sum(rows, 0, out=out).div_(self.learners)
        with self._naming():
            return dist.all_reduce(out, async_op=True)

    def _finished(self, works: list[dist.Work], result: Tensor) -> Tensor:
        with self._waiting():
            for work in works:
                work.wait()
        return result

    def totals(self, values: Tensor) -> Tensor:
        """Return ``values`` (float64, the same shape on all ranks) summed over the processes."""
        if self.size == 1:
            return values
        total = values.detach().to(self._device, torch.float64, copy=True)
        with self._waiting():
            dist.all_reduce(total)
        return total.to(values.device)

    def total(self, *values: float) -> list[float]:
        """Return each of ``values`` summed over the processes."""
        sums: list[float] = self.totals(torch.tensor(values, dtype=torch.float64)).tolist()
        return sums

    def evaluate(self, problem: Problem, weights: Tensor) -> tuple[float, float]:
        """Return mean loss and accuracy at ``weights``; each process evaluates its share of the samples."""
        if self.size == 1:
            return problem.evaluate(weights)
        part = problem.subset(self.share(problem.samples))
        loss, accuracy = part.evaluate(weights) if part.terms else (0.0, 0.0)
        terms = part.data.terms_in
        targets = (y[:, 1:] if terms.shifted else y for _, y, _ in part.chunks())
        counted = sum(float(terms.counted(y).sum()) for y in targets)
        loss, right, count = self.total(loss * part.terms / problem.terms, accuracy * counted, counted)
        return loss, right / count

    def start_learners_mean(self, *values: float) -> Callable[[], list[float]]:
        """Start the mean over all learners of numbers that are means over this process's learners.

        A call of the result waits for the exchange, and returns the means.
        """
        if self.size == 1:
            return lambda: list(values)
        share = self.n_local / self.learners
        total = torch.tensor(values, dtype=torch.float64, device=self._device).mul_(share)
        with self._naming():
            work = dist.all_reduce(total, async_op=True)
        return lambda: self._finished([work], total).tolist()

    def buffer(self, use: str, like: Tensor) -> Tensor:
        """Return memory of the shape of ``like`` that every step reuses, as new memory is slow."""
        old = self._buffers.get(use)
        if old is None or old.shape != like.shape or old.dtype != like.dtype:
            self._buffers[use] = old = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return old

    # Work and coordinates split over the processes.

    def share(self, count: int) -> slice:
        """Return this process's share of ``count`` samples or coordinates; empty if there are too few."""
        bounds = _bounds(count, self.size)
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def share_of_sum(self, vector: Tensor, use: str) -> Tensor:
        """Return this process's :meth:`share` of the sum of ``vector`` (P,) over the processes.

        With several processes the result is valid until the next call with the same ``use``.
        """
        if self.size == 1:
            return vector
        bounds = _bounds(len(vector), self.size)
        shares = [vector[start:stop] for start, stop in itertools.pairwise(bounds)]
        own_share = shares[self.rank]
        received = self.buffer("parts", own_share.expand(self.size - 1, -1))
        rows, transfers = iter(received), []
        # Every rank posts in this order, which NCCL needs. gloo's own reduce-scatter takes twice as long.
        for sender, receiver in itertools.permutations(range(self.size), 2):
            if receiver == self.rank:
                transfers.append(dist.P2POp(dist.irecv, next(rows), sender, tag=self.learners))
            elif sender == self.rank:
                transfers.append(dist.P2POp(dist.isend, shares[receiver], receiver, tag=self.learners))
        self._finished(self._post(transfers), received)
        total = torch.add(own_share, received[0], out=self.buffer(use, own_share))
        for row in received[1:]:
            total += row
        return total

    def share_of_mean(self, rows: Tensor, use: str, minus: Tensor | None = None) -> Tensor:
        """Return the mean over all learners of ``rows`` (n_local, P), or of rows − minus, in their precision.

        Each process keeps its :meth:`share` of the columns, as in :meth:`share_of_sum`. Sums over its own
        learners are in float64.
        """
        if len(rows) == 1:  # nothing to add up, and no memory for a sum in float64
            buffer = self.buffer("sent", rows[0])
            total = rows[0] if minus is None else torch.sub(rows[0], minus[0], out=buffer)
        else:
            exact = torch.zeros(rows.shape[1:], dtype=torch.float64, device=float64_device(rows.device))
            for j, row in enumerate(rows):
                exact += (row if minus is None else row - minus[j]).to(exact.device)
            total = exact.to(rows)
        # With one process the sum is the caller's tensor, which must not be divided in place.
        return total / self.learners if self.size == 1 else self.share_of_sum(total, use).div_(self.learners)

    def parts(self, vectors: Tensor, count: int) -> Tensor:
        """Return this process's :meth:`share` of the coordinates of ``count`` vectors (P,), (count, P_share).

        ``vectors`` (k, P) are this process's share of them.
        """
        if self.size == 1:
            return vectors
        counts, widths = (np.diff(_bounds(k, self.size)) for k in (count, vectors.shape[1]))
        sent = torch.cat([part.flatten() for part in torch.split(vectors, widths.tolist(), 1)])
        gathered = vectors.new_empty(count, widths[self.rank])
        received, numbers = (counts * widths[self.rank]).tolist(), (widths * len(vectors)).tolist()
        with self._naming():
            work = dist.all_to_all_single(gathered.view(-1), sent, received, numbers, async_op=True)
        return self._finished([work], gathered)

    # Exchange with neighbors.

    def mix(self, weights: Tensor, mixing: Mixing, step: int) -> Exchange:
        """Start the exchange for Σ_k M_jk w_k; a call of the result waits, and returns it, (n_local, P).

        ``weights`` (n_local, P) must not change before this call. Each row is sent once to each process with
        a neighbor of its learner; a matrix that averages more than two learners is an all-reduce.
        """
        turn = (mixing.spec, (step - 1) % len(mixing.cycle)) if mixing.cycle else None
        return self.combine(weights, mixing.matrix(step), turn)

    def combine(self, weights: Tensor, matrix: Array, key: tuple[str, int] | None = None) -> Exchange:
        """Begin to mix by any ``matrix`` (n, n) whose rows sum to 1; ``key`` names a matrix that recurs."""
        if averages_all(matrix):
            mean = self.start_mean(weights) if self.size == 1 else self._start_mean(weights, "mixed")
            return Exchange(weights, lambda: mean().expand_as(weights))
        if self.size == 1:
            return Exchange(weights, lambda: combine(weights, matrix))
        plan = self._plans.get(key) or Plan.of(matrix, self.bounds, self.rank)
        if key:
            self._plans[key] = plan
        received = self.buffer("received", weights[:1].expand(len(plan.receive), -1))
        rows = dict(enumerate(weights, self.local.start)) | dict(zip(plan.receive, received, strict=True))
        transfers = []
        for learner, peer in plan.transfers:
            kind = dist.irecv if learner in plan.receive else dist.isend
            transfers.append(dist.P2POp(kind, rows[learner], peer, tag=learner))
        works = self._post(transfers)
        arrived = functools.partial(self._finished, works, received)
        return Exchange(
            weights,
            lambda: plan.apply(weights, arrived(), self.buffer("mixed", weights)),
            (lambda out: plan.pull(out, weights, arrived())) if len(weights) == 1 else None,
        )

    def _post(self, transfers: list[dist.P2POp]) -> list[dist.Work]:
        """Start point-to-point transfers as one batch."""
        with self._naming():
            return dist.batch_isend_irecv(transfers) if transfers else []

    # Learners one at a time, for checkpoints.

    def rows(self, local: Tensor) -> Iterator[Tensor]:
        """Iterate on rank 0 over the n rows of a tensor, of which ``local`` (n_local, …) are this process's.

        A row is valid until the next one, so that memory for one is enough. The other ranks call
        :meth:`send_rows`.
        """
        yield from local
        row = torch.empty_like(local[0])
        for holder in range(1, self.size):
            for _ in range(self.bounds[holder], self.bounds[holder + 1]):
                yield self._finished(self._post([dist.P2POp(dist.irecv, row, holder)]), row)

    def send_rows(self, local: Tensor) -> None:
        """Send, on other ranks, the rows of ``local`` (n_local, …) to rank 0, which is in :meth:`rows`."""
        for row in local:
            self._finished(self._post([dist.P2POp(dist.isend, row.contiguous(), 0)]), row)


class PiecewiseMean:
    """A mean (P,) over all learners that is exchanged in pieces while a backward pass computes its rows.

    Args:
        comm: exchanges the pieces.
        layout: of the parameter tensors in the P columns.
        total: (P,), the memory for the mean.
        rows: returns the rows (n_local, columns) of a piece whose gradients are all computed.
    """

    def __init__(self, comm: Comm, layout: Layout, total: Tensor, rows: Callable[[slice], Tensor]) -> None:
        self._comm, self._total, self._rows = comm, total, rows
        self._works: list[dist.Work] = []
        self._pieces, self._done, self._expected = pieces(total), set[str](), [*layout.slots]

    def send_completed_pieces(self, *names: str) -> None:
        """Send the pieces that are complete with the gradients of the parameters ``names``.

        All processes send the last piece first, for any order of the gradients.
        """
        self._done.update(names)
        while self._expected and self._expected[-1].name in self._done:
            self._expected.pop()
        complete = self._expected[-1].place.stop if self._expected else 0
        while self._pieces and self._pieces[0].start >= complete:
            piece = self._pieces.pop(0)
            self._works.append(self._comm._send_mean(self._rows(piece), self._total[piece]))

    def wait(self) -> Tensor:
        """Send the remaining pieces, wait for all, and return the mean."""
        self.send_completed_pieces(*(slot.name for slot in self._expected))
        works, self._works = self._works, []
        return self._comm._finished(works, self._total)


def pieces(row: Tensor) -> list[slice]:
    """Return the columns of ``row`` (P,) in pieces of at most PIECE bytes, in a backward pass's order."""
    width = max(1, PIECE // row.itemsize)
    return [slice(max(0, stop - width), stop) for stop in range(len(row), 0, -width)]


def _bounds(count: int, parts: int) -> list[int]:
    return [count * r // parts for r in range(parts + 1)]


@dataclass(frozen=True)
class Exchange:
    """A started exchange of weights, of which either ``mixed`` or ``pull`` is called, once.

    Attributes:
        weights: (n_local, P).
        mixed: waits, and returns Σ_k M_jk w_k, (n_local, P).
        pull: adds Σ_k M_jk (w_k − w_j) to its argument in less time; None if there is no such way.
    """

    weights: Tensor
    mixed: Callable[[], Tensor]
    pull: Callable[[Tensor], Tensor] | None = None

    def __call__(self) -> Tensor:
        return self.mixed()

    def add_to(self, out: Tensor) -> Tensor:
        """Wait, and add Σ_k M_jk (w_k − w_j) to ``out`` (n_local, P), in place."""
        return self.pull(out) if self.pull else out.add_(self.mixed() - self.weights)


@dataclass(frozen=True)
class Plan:
    """The messages of one process under one mixing matrix, and its entries of the matrix.

    Attributes:
        receive: the learners of other processes that this process needs.
        transfers: (learner, the other process), in the order of (learner, receiver), which all processes
            share: NCCL hangs if matching transfers differ in order.
        local_block: (n_local, n_local), the entries of M for the process's own learners.
        remote_block: (n_local, len(receive)), the entries for the learners that it receives.
    """

    receive: list[int]
    transfers: list[tuple[int, int]]
    local_block: Tensor
    remote_block: Tensor

    @classmethod
    def of(cls, matrix: Array, bounds: list[int], rank: int) -> Plan:
        """Return the plan of ``rank``, which holds the learners bounds[rank]…bounds[rank + 1] − 1."""
        a, b = bounds[rank], bounds[rank + 1]
        holder = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        sources = (matrix[a:b] != 0).any(0)
        receive = [int(k) for k in np.flatnonzero(sources) if not a <= k < b]
        receivers = np.logical_or.reduceat(matrix[:, a:b] != 0, bounds[:-1], axis=0)  # (processes, n_local)
        sent = [(a + int(k), int(receiver)) for k, receiver in np.argwhere(receivers.T) if receiver != rank]
        transfers = sorted([*sent, *((k, int(holder[k])) for k in receive)])
        local, remote = matrix[a:b, a:b], matrix[a:b][:, receive]
        return cls(receive, transfers, torch.from_numpy(local.copy()), torch.from_numpy(remote.copy()))

    def apply(self, weights: Tensor, received: Tensor, out: Tensor) -> Tensor:
        """Return Σ_k M_jk w_k for this process's learners j; overwrites ``received``, and perhaps ``out``.

        The method mixes differences from the first local row, as :func:`combine` does from the mean, so that
        rounding in the matrix does not let the mean drift.
        """
        if len(weights) == len(received) == 1:  # a pair: one pass over memory
            return torch.lerp(weights, received, float(self.remote_block), out=received)
        origin = weights[0]
        mixed = origin.expand_as(weights)
        if len(weights) > 1:
            mixed = torch.addmm(mixed, self.local_block.to(weights), weights - origin, out=out)
        if len(received):
            mixed = torch.addmm(mixed, self.remote_block.to(weights), received.sub_(origin), out=out)
        return mixed

    def pull(self, out: Tensor, weights: Tensor, received: Tensor) -> Tensor:
        """Add Σ_k M_jk (w_k − w_j) to ``out``, of one local learner; overwrites ``received``."""
        received.sub_(weights)
        if len(received) == 1:
            return out.add_(received, alpha=float(self.remote_block))
        return out.addmm_(self.remote_block.to(weights), received) if len(received) else out


class LostProcessError(OperationError):
    """Another process is lost, or failed first; the message names its rank."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch's, without the place in torch's sources."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2][:160] if line.startswith("[/") else line[:160]


def combine(weights: Tensor, matrix: Array) -> Tensor:
    """Return Σ_k M_jk w_k (n, P) of ``weights`` (n, P), where the rows of ``matrix`` (n, n) sum to 1.

    The function mixes deviations from the mean: otherwise the rounding of a float32 matrix's rows would let
    the mean drift in every step.
    """
    mean = average(weights)
    m = torch.from_numpy(matrix).to(weights)
    return torch.addmm(mean.expand_as(weights), m, weights - mean)
