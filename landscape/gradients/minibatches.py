"""Minibatches, the noise of their gradients, and how precise its estimates are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.core import statistics
from landscape.core.devices import double, float64_device
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import AtLeastTwo, Count, Positive, check_fields, fit
from landscape.core.progress import Progress, no_progress
from landscape.problem.batches import concatenate, count_samples, named_tensors, take
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.data import Data
from landscape.problem.problem import Problem

# If the data come in batches, one pass over the data collects the minibatches of 16 draws (our choice: a pass
# serves several draws, and few draws remain unused), or of fewer draws if 16 would take more than PASS_BYTES.
DRAWS_A_PASS, PASS_BYTES = 16, 2**28


def stream(seed: int, part: int) -> torch.Generator:
    """A generator for one ``part`` of an analysis, independent of those of its other parts.

    Example:
        >>> torch.equal(torch.rand(3, generator=stream(0, 1)), torch.rand(3, generator=stream(0, 2)))
        False
    """
    state = np.random.SeedSequence((seed, part)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def in_minibatches(problem: Problem, batch: int) -> Problem:
    """Return ``problem`` with BatchNorm's statistics of minibatches of ``batch`` samples, as in training.

    If samples are numbered, a smaller last minibatch is left out; data in batches keep the user's batches.
    Without BatchNorm, ``problem`` itself is returned.
    """
    if not has_batchnorm(problem.model):
        return problem
    size = min(batch, problem.samples)
    whole = problem.subset(slice(problem.samples // size * size)) if problem.indexed else problem
    return whole.with_batchnorm("train", size)


def check_unpenalized(problem: Problem, what: str) -> None:
    """Raise InputError where the loss has a penalty, which ``what`` says is not part of the quantity."""
    if problem.regularised:
        raise InputError(f"penalty: {what}, leave out penalty and weight_decay")


class Minibatches:
    """Draws of ``learners`` minibatches of ``batch`` samples, with replacement, as in training.

    The iterator has no end; each item is a tuple of problems, one for each learner. Data in batches are read
    once for every :data:`DRAWS_A_PASS` draws: a sample's number is then its place in the pass. BatchNorm uses
    the statistics of the minibatch, as in training, unless the problem has another policy already or
    ``own_statistics`` is false.

    Attributes:
        whole_problem: the problem on all of the data, with the same policy. If BatchNorm takes the statistics
            of minibatches, the data are in minibatches of ``batch`` samples (:func:`in_minibatches`).

    Raises:
        InputError: a batch below 1, or below 2 with BatchNorm.

    Example:
        >>> x = torch.arange(6.0)[:, None]
        >>> problem = Problem(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (x, x))
        >>> (first, second), = [draw for draw, _ in zip(Minibatches(problem, 4, stream(0, 0), 2), range(1))]
        >>> first.samples, second.samples
        (4, 4)
    """

    def __init__(
        self,
        problem: Problem,
        batch: int,
        generator: torch.Generator,
        learners: int = 1,
        *,
        own_statistics: bool = True,
    ) -> None:
        norm = own_statistics and has_batchnorm(problem.model)
        self.batch = fit("batch", batch, AtLeastTwo if norm else Count)
        self.learners, self._generator = learners, generator
        divided = norm and problem.batchnorm.name == "center"
        self._data = problem.data
        self.whole_problem = in_minibatches(problem, self.batch) if divided else problem
        # A minibatch is one chunk if its samples share statistics; else all have the first one's chunk size.
        together = norm and self.whole_problem.batchnorm.name != "recalibrate"
        self._chunk: int | None = self.batch if together else None

    def __iter__(self) -> Iterator[tuple[Problem, ...]]:
        for batch in draws(self._data, self.learners, self.batch, self._generator):
            yield tuple(self._problem(*take(batch, j)) for j in range(self.learners))

    def _problem(self, x: Any, y: Any) -> Problem:
        data = self._data.minibatch(x, y)
        problem = self.whole_problem.on(data.in_chunks(self._chunk) if self._chunk else data)
        self._chunk = problem.chunk
        return problem


def draws(
    data: Data, learners: int, batch: int, generator: torch.Generator, most: int = DRAWS_A_PASS
) -> Iterator[tuple[Any, Any]]:
    """Yield (x, y) on the device without end: for each learner a minibatch drawn with replacement.

    x and y have the shapes (learners, batch, …). If the data come in batches, one pass over the data collects
    several draws: at most ``most`` draws, which together take at most :data:`PASS_BYTES` (one draw may take
    more). The indices of the drawn samples do not depend on the number of draws in a pass.

    Example:
        >>> x = torch.arange(6.0)[:, None]
        >>> problem = Problem(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (x, x))
        >>> next(draws(problem.data, 2, 4, stream(0, 0)))[0].shape
        torch.Size([2, 4, 1])
    """
    samples = data.samples

    def draw_indices() -> Tensor:
        return torch.randint(samples, (learners, batch), generator=generator)

    while True:
        if data.indexed:
            yield data.gather(draw_indices())
            continue
        # count_samples() accepts tensors with another length than the targets, such as edges of graphs.
        first = data.first_batch()  # (x, y)
        sample_bytes = sum(t.nbytes for _, t in named_tensors(first)) // count_samples(*first)
        draw_bytes = max(1, sample_bytes * learners * batch)
        draws_in_pass = max(1, min(most, PASS_BYTES // draw_bytes))
        indices = torch.stack([draw_indices() for _ in range(draws_in_pass)])  # (draws, learners, batch)
        collected = _read_samples(data, indices.flatten(), samples)
        positions = torch.arange(indices.numel()).view(indices.shape)  # of the samples in ``collected``
        for positions_of_draw in positions:
            yield data.place(take(collected, positions_of_draw))


def _read_samples(data: Data, indices: Tensor, samples: int) -> tuple[Any, Any]:
    """Return (x, y) of the samples ``indices``, in their order, from one pass over the batches."""
    order = indices.argsort(stable=True)
    ascending = indices[order]
    parts, begin = [], 0  # begin: the number of the batch's first sample
    for x, y in data.pairs():
        count = count_samples(x, y, equal_lengths=True)
        edges = torch.tensor([begin, begin + count])
        low, high = torch.searchsorted(ascending, edges).tolist()
        if high > low:
            parts.append(take((x, y), ascending[low:high] - begin))
        begin += count
    if begin != samples:
        raise InputError(f"data: a pass over its batches has {begin} samples, the first had {samples}")
    x, y = concatenate(parts)
    return take((x, y), order.argsort())


# The draws form 32 groups. Each group is left out once, which gives the standard error to 13%, 1/√(2·31).
# There are fewer groups, but at least 8, if the sums of 32 would take more than GROUP_BYTES (our choice).
GROUPS, LEAST_GROUPS, GROUP_BYTES = 32, 8, 2**30


@dataclass(frozen=True)
class GradientNoise:
    """tr Σ, ‖g‖² and their ratio, the noise scale.

    Attributes:
        estimates: (replicates,), numbers whose mean is tr Σ/‖g‖²; their standard error is that of the ratio.
        trace, trace_error: tr Σ and its standard error, with the covariance Σ of one sample's gradient.
        norm2, norm2_error: ‖g‖² and its standard error.
        covariance: the covariance of the estimates of tr Σ and ‖g‖²; 0 if one of them is exact.
    """

    estimates: Array
    trace: float
    trace_error: float
    norm2: float
    norm2_error: float
    covariance: float = 0.0

    @property
    def value(self) -> float:
        """tr Σ/‖g‖²; NaN where ‖g‖² is not significantly above 0."""
        return statistics.scale_of(self.estimates, self.interval())

    def interval(self) -> tuple[float, float]:
        """The 95% interval of tr Σ/‖g‖²; its upper end is infinite where ‖g‖² may be 0."""
        freedom = len(self.estimates) - 1
        return statistics.ratio_interval(
            statistics.Estimate(self.trace, self.trace_error, freedom),
            statistics.Estimate(self.norm2, self.norm2_error, freedom),
            self.covariance,
        )

    @property
    def standard_error(self) -> float:
        """The standard error of ``value``; NaN from one replicate."""
        return statistics.standard_error(self.estimates)


def from_round(gradients: Tensor, batch: int) -> tuple[float, float]:
    """(tr Σ, ‖g‖²), both unbiased, from the gradients (n, P) of n ≥ 2 minibatches of ``batch`` samples.

    McCandlish et al. 2018, appendix A.1, with the n minibatches as small batches and all together as the
    large one. If the minibatches are those of learners at different weights, their full gradients g_j have a
    variance V (divided by n − 1). Then ``batch`` · V is added to tr Σ, and the second value is ‖g‖² − V/n,
    with the mean g of the g_j.

    Example:
        >>> from_round(torch.tensor([[3.0, 1.0], [3.0, -1.0]]), batch=5)
        (10.0, 8.0)
    """
    total2 = float(gradients.to(float64_device(gradients.device)).sum(0, dtype=torch.float64).square().sum())
    squares = float(sum(double(row).square().sum() for row in gradients))
    return from_sums(squares, total2, len(gradients), batch)


def from_sums(squares: Any, total2: Any, n: Any, batch: int) -> tuple[Any, Any]:
    """(tr Σ, ‖g‖²) of :func:`from_round`, from Σ_j ‖g_j‖² and ‖Σ_j g_j‖² of n ≥ 2 minibatches; or arrays.

    Example:
        >>> from_sums(20.0, 36.0, 2, batch=5)
        (10.0, 8.0)
    """
    return batch * (squares - total2 / n) / (n - 1), (total2 - squares) / (n * (n - 1))


class ExactGradientEstimator:
    """The noise from the distances of minibatch gradients to the gradient of all data, which is exact."""

    def __init__(self, whole: Tensor, batch: int) -> None:
        self._whole, self._batch, self.draws = whole, batch, 0
        self._norm2 = float(double(whole).square().sum())
        self._traces: list[float] = []

    def add(self, gradients: Tensor) -> None:
        """Take the gradient (1, P) of a minibatch."""
        self._traces.append(self._batch * float(double(gradients[0] - self._whole).square().sum()))
        self.draws += 1

    def estimate(self) -> GradientNoise:
        """tr Σ is the mean of B‖g_B − g‖²."""
        traces = np.array(self._traces)
        estimates = traces / self._norm2 if self._norm2 else np.full_like(traces, np.inf)
        return GradientNoise(estimates, *statistics.mean_and_error(traces), self._norm2, 0.0)


class JackknifeEstimator:
    """The noise from all pairs of minibatch gradients at one θ (P,): unbiased parts, a nearly unbiased ratio.

    Each group of draws is left out once, which gives the standard errors and takes most of the ratio's bias
    (Quenouille's jackknife). Sums of gradients are kept by group, not the gradients themselves.
    """

    def __init__(self, weights: Tensor, batch: int) -> None:
        groups = max(LEAST_GROUPS, min(GROUPS, GROUP_BYTES // (8 * len(weights))))
        self._batch, self.draws = batch, 0
        device = float64_device(weights.device)
        self._sums = torch.zeros(groups, len(weights), dtype=torch.float64, device=device)
        self._gram = np.zeros((groups, groups))
        self._squares, self._counts = np.zeros(groups), np.zeros(groups, dtype=int)

    def add(self, gradients: Tensor) -> None:
        """Take the gradient (1, P) of a minibatch."""
        m = self.draws % len(self._sums)
        g = double(gradients[0])
        self._sums[m] += g
        self._squares[m] += float(g @ g)
        self._counts[m] += 1
        self._gram[m] = self._gram[:, m] = (self._sums @ self._sums[m]).cpu().numpy()
        self.draws += 1

    def estimate(self) -> GradientNoise:
        """Pseudo-values of the ratio, one for each group."""
        used = self._counts > 0
        gram, squares, counts = self._gram[np.ix_(used, used)], self._squares[used], self._counts[used]
        total2, square, count = gram.sum(), squares.sum(), counts.sum()
        left2 = total2 - 2 * gram.sum(1) + np.diag(gram)
        k = len(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = from_sums(square, total2, count, self._batch)
            without_one = from_sums(square - squares, left2, count - counts, self._batch)
            ratio, ratios = parts[0] / parts[1], without_one[0] / without_one[1]
            pseudo = [k * ratio - (k - 1) * ratios]
            pseudo += [k * whole - (k - 1) * part for whole, part in zip(parts, without_one, strict=True)]
            # Of two draws each part has one, whose noise is infinite: errors are NaN.
            _, trace_error, norm2_error = (statistics.standard_error(values) for values in pseudo)
            covariance = statistics.covariance_of_means(pseudo[1], pseudo[2])
        trace, norm2 = map(float, parts)
        return GradientNoise(pseudo[0], trace, trace_error, norm2, norm2_error, covariance)


class LearnersEstimator(JackknifeEstimator):
    """The noise from minibatch gradients of n ≥ 2 learners at their own weights.

    The noise scale is that of the mean of the learners' gradients: a draw counts as one minibatch of n · B
    samples, and the spread of the weights adds nothing to its noise. ``rounds`` has the means of what single
    draws show (:func:`from_round`), as a running training would measure it.
    """

    def __init__(self, weights: Tensor, learners: int, batch: int) -> None:
        super().__init__(weights, learners * batch)
        self._local_batch, self._rounds = batch, list[tuple[float, float]]()

    def add(self, gradients: Tensor) -> None:
        """Take the learners' gradients (n, P)."""
        super().add(gradients.to(self._sums.device).mean(0, keepdim=True, dtype=torch.float64))
        self._rounds.append(from_round(gradients, self._local_batch))

    def rounds(self) -> dict[str, float]:
        """The means of tr Σ and ‖g‖² over the draws, each by itself, with their standard errors."""
        names = ("round_trace", "round_trace_error", "round_norm2", "round_norm2_error")
        pairs = map(statistics.mean_and_error, np.array(self._rounds).T)
        return dict(zip(names, itertools.chain(*pairs), strict=True))


# The fewest and the most draws if each takes a product with the whole Hessian, or a search (our choice: a
# standard error from 32 draws is itself right to an eighth).
MIN_COSTLY, MAX_COSTLY = 32, 256


@dataclass(frozen=True)
class Precision:
    """A stopping rule: draw until the standard error is at most ``relative_error`` times the estimate.

    There are ``min_draws`` to ``max_draws`` draws.

    Example:
        >>> precision = Precision(0.1, 16, 100)
        >>> precision.enough(15, 1.0, 0.0), precision.enough(16, 1.0, 0.05), precision.enough(100, 1.0, 9.0)
        (False, True, True)
    """

    # The relative standard error asked for, and the fewest and the most draws (our choice): a standard error
    # from 16 draws is itself right to 18%, 1/√(2·15), and a stop much earlier would favor draws that agree by
    # accident.
    relative_error: Positive = 0.05
    min_draws: AtLeastTwo = 16
    max_draws: AtLeastTwo = 1000

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_draws < self.min_draws:
            raise InputError("max_draws", self.max_draws, allowed=f"≥ min_draws, {self.min_draws}")

    def met(self, value: float, error: float) -> bool:
        """Return whether the standard error ``error`` of ``value`` is small enough."""
        return error <= self.relative_error * abs(value)

    def enough(self, draws: int, value: float, error: float, progress: Progress = no_progress) -> bool:
        """Return whether no further draw is needed, or allowed, and report the share of the work done."""
        ended = draws >= self.max_draws or (draws >= self.min_draws and self.met(value, error))
        progress(1.0 if ended else self._share(draws, value, error))
        return ended

    def _share(self, draws: int, value: float, error: float) -> float:
        """The share of the work that is done, from the draws that the error needs: it falls as 1/√draws."""
        if draws < self.min_draws or not 0 < error < float("inf") or not abs(value) > 0:
            return min(1.0, draws / max(self.min_draws, draws + 1))
        needed = max(self.min_draws, draws * (error / (self.relative_error * abs(value))) ** 2)
        return min(1.0, draws / min(self.max_draws, needed))


def placed(problem: Problem, weights: Tensor | None, min_rows: int = 1) -> Tensor:
    """The learners' ``weights`` (n, P), n ≥ ``min_rows``, on the problem's device; else InputError."""
    like, size = problem.weights, len(problem.weights)
    if weights is None:
        raise InputError(f"weights: missing; a problem has no learners, give theirs (n, {size}), or the run")
    weights = fit("weights", weights, Tensor)
    if weights.dim() != 2 or weights.shape[1] != size:
        raise InputError(f"weights: shape {tuple(weights.shape)}, it must be (n, {size}) with n ≥ {min_rows}")
    if len(weights) < min_rows:
        reason = f"at least {min_rows} are needed; give more, or a run with more learners"
        raise InputError(f"weights: those of {len(weights)} network are not allowed, {reason}")
    return weights.to(like)


def required_batch(batch: int | None) -> int:
    """Return ``batch``, the number of samples of a minibatch; raise InputError if it is missing."""
    if batch is None:
        raise InputError("batch: missing; neither a problem nor imported weights have one, give it")
    return batch


def learners_of(
    problem: Problem, batch: int, weights: Tensor | None, local_batch: int | None
) -> tuple[Tensor | None, int]:
    """Return the learners' weights on the device, or None, and the samples in a learner's minibatch.

    Raises InputError for weights of another shape, or a local batch that is missing or not allowed.
    """
    if weights is None:
        if local_batch is not None:
            raise InputError(f"local_batch: {local_batch} is not allowed without weights, the learners'")
        return None, 0
    weights = placed(problem, weights)
    if local_batch is None:
        local_batch, rest = divmod(batch, n := len(weights))
        if rest:
            raise InputError(f"batch: {batch} is no multiple of the {n} learners; give local_batch")
    return weights, local_batch
