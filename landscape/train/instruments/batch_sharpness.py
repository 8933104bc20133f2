"""Batch sharpness along a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import FailedError
from landscape.core.hdf5 import Array
from landscape.core.statistics import mean_and_error
from landscape.curvature.hessian import gradient_curvature
from landscape.gradients.minibatches import Minibatches
from landscape.problem.problem import Problem
from landscape.train.instruments.base import Instrument, Moment, Setting


@registry.instruments.add("batch-sharpness")
class BatchSharpness(Instrument):
    """E[gᵀHg/‖g‖²] (arXiv:2412.20553), over ``monitor.draws`` fresh minibatches of the training set.

    At w_a with minibatches of the total batch and, with several learners, where each of them takes its
    gradients, with the local one; see :func:`landscape.batch_sharpness`. A draw takes a gradient and a
    product over its minibatch. NaN where a gradient is zero or not finite.
    """

    name = "batch-sharpness"
    columns: ClassVar[Mapping[str, str]] = {
        "batch_sharpness": "nat",
        "batch_sharpness_se": "nat",
        "lr_batch_sharpness": "1",
        "lr_lambda_limit": "1",
        "learner_batch_sharpness": "nat",
        "learner_batch_sharpness_se": "nat",
        "lr_learner_batch_sharpness": "1",
    }

    def __init__(self, run: Setting) -> None:
        super().__init__(run)
        self.needs_batch()

    def measure(self, now: Moment) -> dict[str, float]:
        run = self.run
        value, error = mean_and_error(self._drawn(now, now.mean[None], 1).mean(1))
        columns = {
            "batch_sharpness": value,
            "batch_sharpness_se": error,
            "lr_batch_sharpness": now.lr * value,
            "lr_lambda_limit": math.nan if run.stability_limit is None else run.stability_limit,
        }
        if run.learners == 1:
            return columns
        value, error = mean_and_error(self._drawn(now, now.points, run.learners).mean(1))
        return columns | {
            "learner_batch_sharpness": value,
            "learner_batch_sharpness_se": error,
            "lr_learner_batch_sharpness": now.lr * value,
        }

    def _drawn(self, now: Moment, thetas: Tensor, learners: int) -> Array:
        """(draws, learners): w_a's draws are shared by the processes; of learners each has its own."""
        comm, draws = self.run.comm, self.run.monitor.draws
        part = "learners" if learners > 1 else "mean"
        minibatches = Minibatches(
            self.run.problem, self.run.batch // learners, self.generator(now, part), learners
        )
        own = comm.local if learners > 1 else slice(0, 1)
        turns = range(draws)[slice(None) if learners > 1 else comm.share(draws)]
        table = torch.zeros(draws, learners, dtype=torch.float64)
        for k, drawn in zip(range(draws), minibatches, strict=False):
            if k in turns:
                pairs = zip(drawn[own], thetas, strict=True)
                table[k, own] = torch.tensor([_curvature(p, t) for p, t in pairs], dtype=torch.float64)
        found: Array = comm.totals(table).numpy()
        return found


def _curvature(minibatch: Problem, theta: Tensor) -> float:
    """gᵀHg/‖g‖²; NaN where it does not exist, since a run must not end for it."""
    try:
        return gradient_curvature(minibatch, theta)[0]
    except FailedError:
        return math.nan
