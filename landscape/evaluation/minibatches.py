"""Minibatches drawn at random from a problem's data, each as a problem of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.problem.batches import as_tensors, concatenate, count_samples, named_tensors, take
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.data import Data
from landscape.problem.problem import Problem

# Of data given as batches, the draws whose minibatches one pass collects: few are drawn in vain, and each
# pass serves several (ours); fewer where their samples would take more than so many bytes.
DRAWS_A_PASS, PASS_BYTES = 16, 2**28


def stream(seed: int, part: int) -> torch.Generator:
    """A generator for one ``part`` of an analysis, independent of those of its other parts.

    Example:
        >>> torch.equal(torch.rand(3, generator=stream(0, 1)), torch.rand(3, generator=stream(0, 2)))
        False
    """
    positive("seed", seed, least=0)
    state = np.random.SeedSequence((seed, part)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


class Minibatches:
    """Draws of ``learners`` minibatches of ``batch`` samples, with replacement, as in training.

    Iterating gives a tuple of problems, one for each learner, as often as asked for. Data given as batches is
    read once for every :data:`DRAWS_A_PASS` draws: a sample's number is then its place in the pass. BatchNorm
    takes the statistics of the minibatch, as in training, unless the problem has another policy already or
    ``own_statistics`` is false.

    Attributes:
        whole: the problem on all of the data, under the same policy; with numbered samples in minibatches of
            that size, without a smaller last one.

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
        positive("batch", batch, least=2 if norm else 1)
        self.batch, self.learners, self._generator = int(batch), learners, generator
        whole = problem
        if norm and problem.batchnorm.name == "center":
            size = min(self.batch, problem.samples)
            if problem.indexed:
                whole = problem.subset(slice(problem.samples // size * size))
            whole = whole.with_batchnorm("train", size)
        self._data, self.whole = problem.data, whole
        # A minibatch is one chunk where its samples share statistics; otherwise a chunk is measured once.
        together = norm and whole.batchnorm.name != "recalibrate"
        self._chunk: int | None = self.batch if together else None

    def __iter__(self) -> Iterator[tuple[Problem, ...]]:
        for drawn in draws(self._data, self.learners, self.batch, self._generator):
            yield tuple(self._problem(*take(drawn, j)) for j in range(self.learners))

    def _problem(self, x: Any, y: Any) -> Problem:
        data = self._data.only(x, y)
        made = self.whole.on(data.in_chunks(self._chunk) if self._chunk else data)
        self._chunk = made.chunk
        return made


def draws(
    data: Data, learners: int, batch: int, generator: torch.Generator, most: int = DRAWS_A_PASS
) -> Iterator[tuple[Any, Any]]:
    """(x, y) of minibatches drawn with replacement, (learners, batch, …) each, on the device, without end.

    Of data given as batches one pass collects ``most`` draws, or as many as take :data:`PASS_BYTES`; the
    numbers drawn do not depend on how many.

    Example:
        >>> x = torch.arange(6.0)[:, None]
        >>> problem = Problem(torch.nn.Linear(1, 1), torch.nn.MSELoss(), (x, x))
        >>> next(draws(problem.data, 2, 4, stream(0, 0)))[0].shape
        torch.Size([2, 4, 1])
    """
    shape, samples = (learners, batch), data.samples

    def numbers() -> Tensor:
        return torch.randint(samples, shape, generator=generator)

    while True:
        if data.indexed:
            yield data.gather(numbers())
            continue
        count = max(1, min(most, PASS_BYTES // max(1, _sample_bytes(data) * learners * batch)))
        rows = torch.stack([numbers() for _ in range(count)])
        collected = _collected(data, rows.flatten(), samples)
        for part in torch.arange(rows.numel()).view(rows.shape):
            x, y = data.place(take(collected, part))
            yield x, y


def _sample_bytes(data: Data) -> int:
    x, y = data.first()
    return sum(tensor.nbytes for _, tensor in named_tensors((x, y))) // count_samples(x, y, alike=False)


def _collected(data: Data, numbers: Tensor, samples: int) -> tuple[Any, Any]:
    """(x, y) of the samples with these ``numbers``, in their order, from one pass over the batches."""
    order = numbers.argsort(stable=True)
    ascending, parts, done = numbers[order], [], 0
    for batch in data.batches:
        x, y = data.split(as_tensors(batch))
        count = count_samples(x, y, alike=True)
        edges = torch.tensor([done, done + count])
        low, high = torch.searchsorted(ascending, edges).tolist()
        if high > low:
            parts.append(take((x, y), ascending[low:high] - done))
        done += count
    if done != samples:
        raise InputError(f"data: a pass over its batches has {done} samples, the first had {samples}")
    x, y = concatenate(parts)
    return take((x, y), order.argsort())  # type: ignore[no-any-return]
