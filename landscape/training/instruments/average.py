"""The predicted loss of a running average of w_a."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import ClassVar

import torch
from torch import Tensor

from landscape.analysis.average import MEMBERS, average
from landscape.core import registry
from landscape.core.errors import InputError, OperationError
from landscape.curvature.hessian import exact_only
from landscape.training.instruments.base import Instrument, MeasuredRun, StepState


@registry.instruments.add("average")
class RunningAverage(Instrument):
    """The loss of the mean of the last ``monitor.window`` measured w_a (LAWA), predicted; rank 0 predicts it.

    It is on the run's sample, with the ends of a 90% interval. The gain is the loss at w_a now minus the
    predicted loss: where it is above 0, to stop here and average is predicted to be better than to stop here.
    See :func:`landscape.average`. NaN until there are so many, and where there is no prediction.
    """

    name = "average"
    columns: ClassVar[dict[str, str]] = {
        "average_loss": "nat",
        "average_loss_low": "nat",
        "average_loss_high": "nat",
        "average_gain": "nat",
    }
    on_sample = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        if run.monitor.window > MEMBERS:
            raise InputError(f"monitor.window: {run.monitor.window} is not allowed, at most {MEMBERS}")
        exact_only(run.sample.problem, f"monitor.instruments: '{self.name}'")
        self._members: list[Tensor] = []

    def state(self, step: int) -> dict[str, Tensor]:
        return {self.key: torch.stack(self._members)} if self._members else {}

    def restore(self, state: Tensor) -> None:
        problem = self.run.sample.problem
        self._members = [*state.to(problem.device, problem.dtype)]

    def measure(self, now: StepState) -> dict[str, float]:
        window = self.run.monitor.window
        self._members = [*self._members, now.mean.clone()][-window:]
        if len(self._members) < window:
            return {}
        found = torch.zeros(len(self.columns), dtype=torch.float64)
        if self.run.comm.rank == 0:
            found += math.nan
            with suppress(OperationError):  # weights that are equal or not finite: a run must not end for it
                r = average(self.run.sample.problem, self._members, exact=False, progress=False)
                found = found.new_tensor([r.loss[0], r.low[0], r.high[0], r.members_loss[-1] - r.loss[0]])
        values = self.run.comm.totals(found).tolist()
        return self.row(*values) if all(map(math.isfinite, values)) else {}
