"""λ_max of the average along a run, also as an optimizer's preconditioner sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from landscape.checkpoint.history import MONITORED, UNITS
from landscape.core import registry
from landscape.train.instruments.base import Instrument, Moment, Setting, rounding


@registry.instruments.add("lambda-max")
class LambdaMax(Instrument):
    """λ_max of ∇²L at w_a, lr·λ_max, the rule's limit, and the share of the spread along top eigenvectors.

    It is also measured every ``monitor.sharpness`` steps.
    """

    name = "lambda-max"
    columns: ClassVar[Mapping[str, str]] = {column: UNITS[column] for column in MONITORED}

    def __init__(self, run: Setting) -> None:
        super().__init__(run)
        self._sample = run.sample  # refuses what has no Hessian before the first step

    def measure(self, now: Moment) -> dict[str, float]:
        pairs = self._sample.top(now.step, now.mean)
        if pairs is None:
            return {}
        spread = now.weights - now.mean
        totals = self.run.comm.start_learners_mean(
            float((spread @ pairs.vectors.T).double().square().sum()) / len(spread),
            float(spread.double().square().sum()) / len(spread),
        )
        along, total = totals()
        top, limit = float(pairs.values[0]), self.run.stability_limit
        return {
            "lambda_max": top,
            "lambda_max_residual": float(pairs.residuals[0]),
            "lr_lambda_max": now.lr * top,
            "lr_lambda_limit": math.nan if limit is None else limit,
            "spread_share": along / total if total > rounding(now.mean) else math.nan,
        }


@registry.instruments.add("preconditioned-lambda-max")
class PreconditionedLambdaMax(Instrument):
    """λ_max of P^{-1/2} H P^{-1/2} at w_a, P the optimizer's preconditioner there, with its own limit.

    P and the limit are those of :func:`landscape.preconditioner`: of the learners' mean state.
    """

    name = "preconditioned-lambda-max"
    columns: ClassVar[Mapping[str, str]] = {
        "preconditioned_lambda_max": "nat",
        "preconditioned_lambda_max_residual": "nat",
        "lr_preconditioned_lambda_max": "1",
        "lr_preconditioned_limit": "1",
    }

    def __init__(self, run: Setting) -> None:
        super().__init__(run)
        run.preconditioner(None)
        self._sample = run.sample
        self._near: Tensor | None = None

    def state(self, step: int) -> dict[str, Tensor]:
        return {} if self._near is None else {self.key: self._near}

    def restore(self, state: Tensor) -> None:
        self._near = state.to(self.run.problem.theta)

    def measure(self, now: Moment) -> dict[str, float]:
        seen = self.run.preconditioner(now)
        pairs = None if seen is None else self._sample.search(now.mean, 1, self._near, seen)
        self._near = None if pairs is None else pairs.vectors.sum(0)
        if seen is None or pairs is None:
            return {}
        top = float(pairs.values[0])
        return {
            "preconditioned_lambda_max": top,
            "preconditioned_lambda_max_residual": float(pairs.residuals[0]),
            "lr_preconditioned_lambda_max": now.lr * top,
            "lr_preconditioned_limit": seen.limit,
        }
