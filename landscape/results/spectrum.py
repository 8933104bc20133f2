"""Eigenvalues, trace and spectral density of a Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.core.statistics import mean_and_error
from landscape.results.base import Result

# Standard deviation of the Gaussians of a density, relative to the range of the nodes (ours: as fine as a
# plot shows).
BROADENING = 0.01


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace of a Hessian.

    Attributes:
        value: tr H, in nats.
        standard_error: of the value, in nats.
        hvps: the number of Hessian-vector products.
        draws: (n,), the estimates of which it is the mean, and whose standard error is its own; one where
            nothing was drawn.

    Example:
        >>> Trace(3.0, standard_error=0.1, hvps=30).value
        3.0
    """

    value: float
    standard_error: float
    hvps: int
    draws: Array = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)


@dataclass(frozen=True)
class Density:
    """The spectral density of a P × P matrix, as quadratures: nodes with weights.

    Attributes:
        nodes, weights: (probes, steps), a row for each random probe. The weights of a probe sum to 1; a probe
            whose Krylov space ended early has nodes of weight 0 at its end.
        size: P.
        hvps: number of Hessian-vector products.

    Example:
        >>> density = Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, hvps=2)
        >>> density.moment(1)[0], density.width()
        (0.5, 0.02)
        >>> density.broadened(np.array([0.0, 1.0]), width=0.1).round(3).tolist()
        [2.992, 0.0]
    """

    nodes: Array
    weights: Array
    size: int
    hvps: int

    def moment(self, order: int) -> tuple[float, float]:
        """A moment of the spectral density, tr(H^order)/P.

        Args:
            order: 0, 1, 2, …

        Returns:
            (estimate, its standard error over the probes, which is NaN for one probe).

        Example:
            >>> density = Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, hvps=2)
            >>> density.moment(2)[0]
            1.0
        """
        values = (self.weights * self.nodes**order).sum(1)
        return mean_and_error(values)

    def broadened(self, at: Array, width: float | None = None) -> Array:
        """The density with each node as a Gaussian (Ghorbani et al. 2019, Eq. 4).

        Args:
            at: (n,), eigenvalues.
            width: standard deviation of the Gaussians; default: that of :meth:`width`.

        Returns:
            (n,), the mean over the probes of Σ_i weight_i N(at; node_i, width²), whose integral is 1.

        Raises:
            InputError: a width that is not positive.

        Example:
            >>> density = Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, hvps=2)
            >>> density.broadened(np.array([0.0, 2.0]), width=0.1).round(3).tolist()
            [2.992, 0.997]
        """
        width = self.width() if width is None else width
        positive("width", width)
        total = np.zeros(len(at))
        for node, weight in zip(self.nodes.ravel(), self.weights.ravel(), strict=True):
            total += weight * np.exp(-0.5 * ((at - node) / width) ** 2)
        scaled: Array = total / (len(self.nodes) * width * np.sqrt(2 * np.pi))
        return scaled

    def width(self) -> float:
        """The default width of :meth:`broadened`: 1% of the range of the nodes (ours).

        Returns:
            The width; where all nodes are equal 1% of their magnitude, or 0.01 if that is 0.

        Example:
            >>> Density(np.array([[0.0, 2.0]]), np.array([[0.75, 0.25]]), size=4, hvps=2).width()
            0.02
        """
        span = float(np.ptp(self.nodes))
        largest = float(np.abs(self.nodes).max())
        return BROADENING * (span if span > 1e-6 * largest else largest or 1.0)


@dataclass(frozen=True)
class Spectrum(Result):
    """Eigenvalues, trace and density of one Hessian, or of the block of some parameters; each may be missing.

    Attributes:
        values: (k,), eigenvalues in nats, descending: the largest ones, and then the ``lowest`` smallest.
        residuals: (k,), ‖Hv − λv‖ in nats.
        lowest: how many of ``values`` are the smallest ones.
        trace, trace_error: tr H and one standard error, in nats; NaN if not computed.
        nodes, weights: (probes, steps), as in :class:`Density`; (0, 0) if not computed.
        parameters: size of the Hessian or block.
        hvps: number of all Hessian-vector products.
        kind: "hessian" or "gauss-newton".
        part: names of the parameters of the block, joined by commas; "" for all.
        engine: "lanczos" or "pyhessian".
        search: the products with which the search was done.
        bound_low, bound_high, verified: as in :class:`landscape.Eigenpairs`; infinite in files older than
            these fields.
        batchnorm, bn, bn_samples: as in :class:`landscape.Surface`.
        precondition: the optimizer whose preconditioner P was used, or "given": all is then of P^{-1/2} H
            P^{-1/2}, in units of 1/η; "" for none.
        lr, limit: the optimizer's η and the largest stable ηλ with P fixed; NaN if unknown or without P.

    Example:
        >>> none = np.zeros((0, 0))
        >>> result = Spectrum(
        ...     values=np.array([2.0, -1.0]), residuals=np.zeros(2), lowest=1, converged=True, trace=np.nan,
        ...     trace_error=np.nan, nodes=none, weights=none, parameters=9, hvps=12, kind="hessian", part="",
        ...     engine="lanczos", tol=0.01, seed=0, samples=10, dtype="float64")
        >>> result.density is None
        True
    """

    schema: ClassVar[str] = "landscape.spectrum"
    shapes: ClassVar[Mapping[str, str]] = {
        "values": "rank",
        "residuals": "rank",
        "nodes": "probe node",
        "weights": "probe node",
    }
    units: ClassVar[Mapping[str, str]] = {"weights": "1"} | dict.fromkeys(
        ("values", "residuals", "trace", "trace_error", "nodes", "bound_low", "bound_high"), "nat"
    )
    table: ClassVar[str] = "rank"

    values: Array
    residuals: Array
    lowest: int
    converged: bool
    trace: float
    trace_error: float
    nodes: Array
    weights: Array
    parameters: int
    hvps: int
    kind: str
    part: str
    engine: str
    tol: float
    seed: int
    samples: int
    dtype: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    search: str = ""
    batchnorm: bool = False
    bn: str = "center"
    bn_samples: int = 0
    bound_low: float = -np.inf
    bound_high: float = np.inf
    verified: bool = False
    precondition: str = ""
    lr: float = np.nan
    limit: float = np.nan

    @property
    def density(self) -> Density | None:
        """The spectral density; None if it was not computed."""
        return Density(self.nodes, self.weights, self.parameters, self.hvps) if self.nodes.size else None
