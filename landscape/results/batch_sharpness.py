"""Batch sharpness: the curvature of minibatch losses along their own gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import standard_error, t_quantile
from landscape.results.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class BatchSharpness(Measurement):
    """g_Bᵀ H_B g_B/‖g_B‖² of drawn minibatches, at w_a and at the weights of the learners.

    Batch sharpness is that of Andreyev and Beneventano 2024 (arXiv 2412.20553).

    Attributes:
        curvature: (draws,) in nats, one for each minibatch of ``batch`` samples, at w_a.
        norm2: (draws,) ‖g_B‖² of these.
        learner_curvature, learner_norm2: (learner draws, learners), the same of learner j's minibatch of
            ``local_batch`` samples at w_j; (0, 0) without learners.
        batch, local_batch: samples of a minibatch; local_batch 0 without learners.
        lambda_max, residual: the largest eigenvalue of ∇²L at w_a over all data, in nats, and ‖Hv − λv‖; NaN
            if not computed.
        lr: η of the run; NaN if unknown.
        limit: the largest stable ηλ of the run's update rule on a quadratic; NaN if unknown.
        tol: the relative standard error asked for.
        converged: whether the standard errors of w_a and of the learners are that small.

    Example:
        >>> result = BatchSharpness(
        ...     curvature=np.array([3.0, 5.0]), norm2=np.array([1.0, 3.0]), batch=8, lambda_max=6.0,
        ...     residual=0.0, lr=0.5, limit=2.0, tol=0.05, converged=False, samples=100, seed=0,
        ...     dtype="float64")
        >>> result.value, result.standard_error, result.lr * result.value, result.pooled
        (4.0, 1.0, 2.0, 4.5)
    """

    schema: ClassVar[str] = "landscape.batch_sharpness"
    shapes: ClassVar[Mapping[str, str]] = {
        "curvature": "draw+",
        "norm2": "draw",
        "learner_curvature": "learner_draw learner",
        "learner_norm2": "learner_draw learner",
    }
    units: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("curvature", "learner_curvature", "lambda_max", "residual"), "nat"),
        **dict.fromkeys(("norm2", "learner_norm2"), "nat2"),
        **dict.fromkeys(("lr", "limit", "tol"), "1"),
        **dict.fromkeys(("batch", "local_batch"), "samples"),
    }
    table: ClassVar[str] = "draw"

    curvature: Array
    norm2: Array
    batch: int
    lambda_max: float
    residual: float
    lr: float
    limit: float
    tol: float
    converged: bool
    local_batch: int = 0
    learner_curvature: Array = field(default_factory=lambda: np.zeros((0, 0)))
    learner_norm2: Array = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def value(self) -> float:
        """Batch sharpness at w_a, E[g_Bᵀ H_B g_B/‖g_B‖²], in nats: the mean over the draws."""
        return float(self.curvature.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of ``value`` over the draws; NaN of one draw."""
        return standard_error(self.curvature)

    @property
    def pooled(self) -> float:
        """E[g_Bᵀ H_B g_B]/E‖g_B‖², in nats: the mean in which large gradients weigh more."""
        return float((self.curvature * self.norm2).sum() / self.norm2.sum())

    @property
    def learner_value(self) -> float:
        """The mean over learners of the batch sharpness at their weights, in nats; NaN without learners."""
        return float(self.learner_curvature.mean()) if self.learner_curvature.size else np.nan

    @property
    def learner_standard_error(self) -> float:
        """The standard error of ``learner_value`` over the draws."""
        return standard_error(self.learner_curvature.mean(1)) if self.learner_curvature.size else np.nan

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval of ``value``, from Student's t distribution.

        Args:
            level: the probability with which it contains the expectation.

        Returns:
            (lower end, upper end), in nats.

        Example:
            >>> none = dict(lambda_max=6.0, residual=0.0, lr=0.5, limit=2.0, tol=0.05, converged=False)
            >>> four = np.array([3.0, 5.0, 3.0, 5.0])
            >>> result = BatchSharpness(curvature=four, norm2=np.ones(4), batch=8, samples=9, seed=0,
            ...                         dtype="float64", **none)
            >>> [round(end, 2) for end in result.interval()]
            [2.16, 5.84]
        """
        half = float(t_quantile(level, len(self.curvature) - 1)) * self.standard_error
        return self.value - half, self.value + half
