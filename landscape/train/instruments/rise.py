"""Worst-case and average-case sharpness along a run: how far the loss rises within ρ."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from landscape.analysis.sharpness import sharpness
from landscape.core import registry
from landscape.core.errors import InputError
from landscape.train.instruments.base import Instrument, Moment, Setting


class _Rise(Instrument):
    """Adaptive sharpness at w_a within ``monitor.rho``, on the run's sample; rank 0 measures it.

    See :func:`landscape.sharpness`, whose defaults it has.
    """

    kind: ClassVar[str]

    def __init__(self, run: Setting) -> None:
        super().__init__(run)
        if not run.monitor.rho:
            raise InputError(f"monitor.rho: missing, '{self.name}' is the rise of the loss within it")
        self._sample = run.sample

    def measure(self, now: Moment) -> dict[str, float]:
        found = torch.zeros(len(self.columns), dtype=torch.float64)
        if self.run.comm.rank == 0:
            problem = copy.copy(self._sample.problem)
            problem.theta = now.mean
            result = sharpness(
                problem, self.run.monitor.rho, self.kind,
                max_draws=self.run.monitor.draws, seed=self.generator(now).initial_seed(),
            )  # fmt: skip
            found += torch.tensor([result.value, result.standard_error][: len(found)])
        values = self.run.comm.totals(found).tolist()
        if not all(math.isfinite(value) for value in values):
            return {}
        return dict(zip(self.columns, values, strict=True))


@registry.instruments.add("worst-sharpness")
class WorstSharpness(_Rise):
    """The largest rise of the loss for ‖δ/|w|‖ ≤ ρ, in nats; a lower bound."""

    name, kind = "worst-sharpness", "worst"
    columns: ClassVar[Mapping[str, str]] = {"worst_sharpness": "nat"}


@registry.instruments.add("average-sharpness")
class AverageSharpness(_Rise):
    """The mean rise of the loss for δ/|w| ~ N(0, ρ²), in nats, over ``monitor.draws`` pairs ±δ."""

    name, kind = "average-sharpness", "average"
    columns: ClassVar[Mapping[str, str]] = {"average_sharpness": "nat", "average_sharpness_se": "nat"}
