"""The learners' disagreement and the gradient in the sharp subspace, along a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from landscape.analysis.disagreement import half_mean, shares
from landscape.checkpoint.history import UNITS
from landscape.core import registry
from landscape.core.errors import InputError
from landscape.train.instruments.base import Instrument, Moment, Setting, on_all, rounding


@registry.instruments.add("disagreement")
class Disagreement(Instrument):
    """The spread and the gradient in the space of the ``monitor.top`` largest eigenvalues, and ½ tr(HC).

    H and the gradient are at w_a, on the sample of ``monitor.samples``; C = n⁻¹ Σ_j Δw_j Δw_jᵀ, so that
    ½ tr(HC) is what the spread costs in loss to second order, in nats. Errors are those of
    :func:`landscape.disagreement`, over the learners. Takes the products of the eigenvectors, which
    "lambda-max" uses as well, and one for each learner.
    """

    name = "disagreement"
    columns: ClassVar[Mapping[str, str]] = {
        "spread_share": UNITS["spread_share"],
        "spread_share_se": "1",
        "gradient_share": "1",
        "disagreement_cost": "nat",
        "disagreement_cost_se": "nat",
    }

    def __init__(self, run: Setting) -> None:
        super().__init__(run)
        if run.learners < 2:
            raise InputError(
                f"monitor.instruments: '{self.name}' is not allowed with 1 learner, at least 2 are needed"
            )
        self._sample = run.sample

    def measure(self, now: Moment) -> dict[str, float]:
        pairs = self._sample.top(now.step, now.mean)
        if pairs is None:
            return {}
        comm, vectors = self.run.comm, pairs.vectors.double()
        spread = now.weights - now.mean
        along, curvature = self._sample.curvature(now.mean), np.zeros(self.run.learners)
        for j in range(self.run.learners):
            own = comm.local.start <= j < comm.local.stop
            row = on_all(comm, spread[j - comm.local.start] if own else None, now.mean)
            curvature[j] = along(row)
        # Of each learner the squares along the eigenvectors, and its own square.
        table = torch.zeros(self.run.learners, len(vectors) + 1, dtype=torch.float64)
        rows = spread.double()
        table[comm.local] = torch.cat((rows @ vectors.T, rows.norm(dim=1, keepdim=True)), 1).square().cpu()
        squares = comm.totals(table).numpy()
        gradient = self._sample.gradient(now.mean).double()
        norm2 = float(gradient @ gradient)
        columns = {"gradient_share": float((vectors @ gradient).square().sum()) / (norm2 or math.nan)}
        if squares[:, -1].mean() > rounding(now.mean):  # else all learners have the same weights
            share, error = shares(squares[:, :-1], squares[:, -1])
            columns |= {"spread_share": float(share.sum()), "spread_share_se": float(error[-1])}
        cost, cost_error = half_mean(curvature)
        return columns | {"disagreement_cost": cost, "disagreement_cost_se": cost_error}
