"""The predicted loss of a running average of w_a."""

from __future__ import annotations

import math
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

    def measure(self, now: StepState) -> dict[str, float]:
        window = self.run.monitor.window
        before = () if self.memory is None else self.memory
        self.memory = members = torch.stack([*before, now.mean][-window:])
        return self.row_of_first(lambda: self._predicted(members)) if len(members) == window else {}

    def _predicted(self, members: Tensor) -> list[float]:
        """The values of the columns for the average of ``members`` (m, P); NaN where there is none."""
        try:
            result = average(self.run.sample.problem, [*members], exact=False, progress=False)
        except OperationError:  # weights that are equal or not finite: a run must not end for it
            return [math.nan] * len(self.columns)
        loss = result.loss[0]
        return [loss, result.low[0], result.high[0], result.members_loss[-1] - loss]
