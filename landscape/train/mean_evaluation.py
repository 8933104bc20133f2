"""Loss and accuracy of w_a during a run, with BatchNorm statistics of its own."""

from __future__ import annotations

from torch import Tensor

from landscape.problem.problem import Problem
from landscape.train.buffers import Buffers
from landscape.train.distributed.comm import Comm


class MeanEvaluation:
    """Evaluates the learners' mean on the training and the test set; several processes share the work."""

    def __init__(self, train: Problem, test: Problem, buffers: Buffers, comm: Comm) -> None:
        self._train, self._test, self._buffers, self._comm = train, test, buffers, comm
        # The step whose mean the problems have the statistics of, and these.
        self._step, self._statistics = -1, dict[str, Tensor]()

    def statistics(self, weights: Tensor, step: int) -> dict[str, Tensor]:
        """BatchNorm's statistics at w_a, name -> (…), which both problems are given; computed once a step.

        Args:
            weights: those of this process's learners (n_local, P) after ``step``.
        """
        if self._buffers.local and self._step != step:
            self._step, self._statistics = step, self._buffers.at_mean(self._comm.mean(weights))
        return self._statistics

    def test(self, weights: Tensor, step: int) -> tuple[float, float]:
        """(loss, accuracy) of w_a on the test set; arguments as of :meth:`statistics`."""
        self.statistics(weights, step)
        mean, comm = self._comm.mean(weights), self._comm
        if self._test.indexed or comm.size == 1:
            return comm.evaluate(self._test, mean)
        # Batches cannot be shared: all processes evaluate them, so that none waits; rank 0's result counts.
        result = self._test.evaluate(mean)
        loss, accuracy = comm.total(*(result if comm.rank == 0 else (0.0, 0.0)))
        return loss, accuracy

    def training_loss(self, mean: Tensor) -> float:
        """The loss of any ``mean`` (P,) on the training set, with the statistics of these weights."""
        self._step, self._statistics = -1, {}
        self._buffers.at_mean(mean)
        return self._comm.evaluate(self._train, mean)[0]
