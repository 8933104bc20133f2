"""The gradient noise scale at one vector of weights, and at the learners' weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import standard_error
from landscape.results.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class NoiseScale(Measurement):
    """B_simple = tr Σ/‖g‖² in samples, g = ∇L and Σ the covariance of one sample's gradient.

    The scale is that of McCandlish et al. 2018, section 2.2.

    Attributes:
        estimates: (replicates,), numbers whose mean is B_simple at w_a, and whose standard error is its own.
        trace, trace_error: tr Σ in squared nats, and one standard error.
        norm2, norm2_error: ‖g‖² in squared nats, and one standard error; 0 where it is exact.
        draws: how many minibatches of ``batch`` samples were drawn.
        gradient: "whole": g is of all data; "draws": ‖g‖² is estimated from pairs of minibatches.
        batch: samples of a minibatch.
        learner_draws: how often one minibatch of ``local_batch`` samples was drawn for each learner.
        learner_estimates: (learner replicates,), as ``estimates``, of the learners' mean gradient at their
            own weights; empty without learners.
        learner_trace, learner_trace_error, learner_norm2, learner_norm2_error: the same of tr Σ and ‖g‖²; NaN
            without learners.
        round_trace, round_trace_error, round_norm2, round_norm2_error: the means of what a single draw shows,
            tr Σ and ‖g‖² from the n gradients of one step. With V the variance of the learners' own mean
            gradients (divided by n − 1), tr Σ then includes local_batch · V, and ‖g‖² lacks V/n, so that it
            may be below 0. NaN without learners.
        tol: the relative standard error asked for.
        converged: whether the standard errors of w_a and of the learners are that small.

    Example:
        >>> result = NoiseScale(
        ...     estimates=np.array([90.0, 110.0]), trace=200.0, trace_error=20.0, norm2=2.0, norm2_error=0.0,
        ...     batch=8, draws=2, gradient="whole", tol=0.05, converged=False, samples=100, seed=0,
        ...     dtype="float64")
        >>> result.value, result.standard_error
        (100.0, 10.0)
    """

    schema: ClassVar[str] = "landscape.noise_scale"
    shapes: ClassVar[Mapping[str, str]] = {
        "estimates": "replicate+",
        "learner_estimates": "learner_replicate",
    }
    units: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("estimates", "learner_estimates", "batch", "local_batch"), "samples"),
        **dict.fromkeys(("trace", "trace_error", "norm2", "norm2_error"), "nat2"),
        **dict.fromkeys(
            ("learner_trace", "learner_trace_error", "learner_norm2", "learner_norm2_error"), "nat2"
        ),
        **dict.fromkeys(("round_trace", "round_trace_error", "round_norm2", "round_norm2_error"), "nat2"),
        "tol": "1",
    }  # fmt: skip
    table: ClassVar[str] = "replicate"

    estimates: Array
    trace: float
    trace_error: float
    norm2: float
    norm2_error: float
    batch: int
    draws: int
    gradient: str
    tol: float
    converged: bool
    learners: int = 0
    local_batch: int = 0
    learner_draws: int = 0
    learner_estimates: Array = field(default_factory=lambda: np.zeros(0))
    learner_trace: float = np.nan
    learner_trace_error: float = np.nan
    learner_norm2: float = np.nan
    learner_norm2_error: float = np.nan
    round_trace: float = np.nan
    round_trace_error: float = np.nan
    round_norm2: float = np.nan
    round_norm2_error: float = np.nan

    @property
    def value(self) -> float:
        """B_simple at w_a, in samples."""
        return float(self.estimates.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of ``value``."""
        return standard_error(self.estimates)

    @property
    def learner_value(self) -> float:
        """B_simple of the learners' mean gradient, in samples; NaN without learners."""
        return float(self.learner_estimates.mean()) if self.learner_estimates.size else np.nan

    @property
    def learner_standard_error(self) -> float:
        """The standard error of ``learner_value``."""
        return standard_error(self.learner_estimates)

    @property
    def resolved(self) -> bool:
        """Whether ‖g‖² at w_a is at least twice its standard error: otherwise B_simple has no upper bound."""
        return self.norm2 > 2 * self.norm2_error
