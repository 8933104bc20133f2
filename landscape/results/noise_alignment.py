"""The noise of minibatch gradients against the curvature of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class NoiseAlignment(Measurement):
    """How the gradients g_B of minibatches of B samples, drawn with replacement, lie in the curvature.

    H is the Hessian and g the gradient over all samples, v_i and λ_i the eigenvectors and eigenvalues of the
    k largest; S = E g_B g_Bᵀ the second moment, C = E (g_B − g)(g_B − g)ᵀ the covariance. Errors are one
    standard error over the drawn minibatches, by the jackknife.

    Attributes:
        values, residuals: (k,), λ_i in nats, descending, and ‖Hv − λv‖.
        covariance, covariance_error: (k,), C_ii = v_iᵀCv_i.
        ias, ias_error: tr(HS)/tr S in nats, the interaction-aware sharpness: of a gradient step on a
            minibatch, the mean curvature that it meets. At most λ_1.
        noise_curvature, noise_curvature_error: tr(HC)/tr C in nats, the same of the noise alone.
        trace_s, trace_c: tr S and tr C.
        grad_norm2: ‖g‖².
        gamma, gamma_error: γ in C_ii ∝ λ_i^γ (arXiv 2602.05600, in the eigenbasis of H), the least-squares
            slope of log C_ii over log λ_i > 0, and the error that the draws leave in it; NaN for fewer
            than 2.
        gamma_scatter: the standard error of the slope from the scatter of the points around the line, as if
            they were independent: large where there is no power law. NaN for fewer than 3.
        batch: B.
        draws: the number of minibatches.
        estimates: (draws,), one number a minibatch: their mean is ``ias``, their standard error its own, so
            that results of the same minibatches can be compared in pairs. Empty in older files.
        reached: whether the relative standard error that was asked for was reached by ``ias``.
        batchnorm, bn, bn_samples: as in :class:`landscape.Surface`; with BatchNorm the statistics are those
            of each minibatch, and H and g are means over minibatches of that size.

    Example:
        >>> import numpy as np
        >>> two = np.array([2.0, 1.0])
        >>> result = NoiseAlignment(
        ...     values=two, residuals=two / 99, covariance=two, covariance_error=two / 9, ias=1.5,
        ...     ias_error=0.1, noise_curvature=1.4, noise_curvature_error=0.1, trace_s=5.0, trace_c=4.0,
        ...     grad_norm2=1.0, gamma=1.0, gamma_error=0.1, gamma_scatter=np.nan, batch=4, draws=32,
        ...     reached=True, parameters=9, hvps=50, converged=True, tol=0.05, seed=0, samples=9,
        ...     dtype="float64")
        >>> result.value, result.standard_error, result.shares.tolist()
        (1.5, 0.1, [0.5, 0.25])
    """

    schema: ClassVar[str] = "landscape.noise_alignment"
    shapes: ClassVar[Mapping[str, str]] = {
        "values": "rank+",
        "residuals": "rank",
        "covariance": "rank",
        "covariance_error": "rank",
        "estimates": "draw",
    }
    units: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("values", "residuals", "ias", "ias_error", "estimates", "noise_curvature", "noise_curvature_error"),
        "nat",
    ) | dict.fromkeys(
        ("covariance", "covariance_error", "trace_s", "trace_c", "grad_norm2"), "nat^2"
    ) | dict.fromkeys(("gamma", "gamma_error", "gamma_scatter"), "1")  # fmt: skip
    table: ClassVar[str] = "rank"

    values: Array
    residuals: Array
    covariance: Array
    covariance_error: Array
    ias: float
    ias_error: float
    noise_curvature: float
    noise_curvature_error: float
    trace_s: float
    trace_c: float
    grad_norm2: float
    gamma: float
    gamma_error: float
    gamma_scatter: float
    batch: int
    draws: int
    reached: bool
    parameters: int
    hvps: int
    converged: bool
    tol: float
    estimates: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def value(self) -> float:
        """The interaction-aware sharpness in nats."""
        return self.ias

    @property
    def standard_error(self) -> float:
        """The standard error of :attr:`value`."""
        return self.ias_error

    @property
    def shares(self) -> Array:
        """(k,), C_ii/tr C: the share of the noise along each eigenvector."""
        share: Array = self.covariance / self.trace_c
        return share
