"""Eigenvalues, trace and density of a Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.results.base import Result

# Width of a drawn density's Gaussians, as a share of the range of the nodes (ours; as fine as a plot shows).
BROADENING = 0.01


@dataclass(frozen=True)
class Trace:
    """An estimate of tr H, its standard error, and the Hessian-vector products it took."""

    value: float
    standard_error: float
    hvps: int


@dataclass(frozen=True)
class Density:
    """The spectral density of a P × P matrix, as nodes and weights (probes, steps) of one quadrature a probe.

    Each probe's weights sum to 1; a probe that exhausted its Krylov space early is filled up with nodes of
    weight 0. ``size`` is P, ``hvps`` the products.
    """

    nodes: Array
    weights: Array
    size: int
    hvps: int

    def moment(self, order: int) -> tuple[float, float]:
        """(estimate of tr(H^order)/P, its standard error over the probes; NaN for one probe)."""
        values = (self.weights * self.nodes**order).sum(1)
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        return float(values.mean()), float(error)

    def broadened(self, at: Array, width: float | None = None) -> Array:
        """The density at ``at`` (n,), each node a Gaussian of standard deviation ``width``; integrates to 1.

        Mean over the probes of Σ_i weight_i N(x; node_i, width²) (Ghorbani et al. 2019, Eq. 4). Default
        width: see :meth:`width`.
        """
        width = self.width() if width is None else width
        positive("width", width)
        total = np.zeros(len(at))
        for node, weight in zip(self.nodes.ravel(), self.weights.ravel(), strict=True):
            total += weight * np.exp(-0.5 * ((at - node) / width) ** 2)
        scaled: Array = total / (len(self.nodes) * width * np.sqrt(2 * np.pi))
        return scaled

    def width(self) -> float:
        """1% of the range of the nodes, or of the largest magnitude (or 1) where they are all one."""
        span = float(np.ptp(self.nodes))
        largest = float(np.abs(self.nodes).max())
        return BROADENING * (span if span > 1e-6 * largest else largest or 1.0)


@dataclass(frozen=True)
class Spectrum(Result):
    """What was asked about the spectrum of one Hessian, or of a block of ``parameters`` numbers.

    ``values`` and ``residuals`` (k,): eigenvalues, descending, of which the last ``lowest`` are the smallest
    there are and the others the largest. ``trace`` and ``trace_error`` (one standard error): NaN where not
    asked. ``nodes`` and ``weights`` (probes, steps) as in :class:`Density`: (0, 0) where not asked. ``hvps``
    counts all products. ``kind``, ``part`` (names, joined by commas; empty for all) and ``engine`` say how;
    ``batchnorm``, ``bn`` and ``bn_samples`` as in :class:`landscape.Surface`. ``bound_low``, ``bound_high``
    and ``verified``: as in :class:`landscape.Eigenpairs`; infinite in files older than these fields.
    """

    schema: ClassVar[str] = "landscape.spectrum"
    shapes: ClassVar[Mapping[str, str]] = {
        "values": "k",
        "residuals": "k",
        "nodes": "probes steps",
        "weights": "probes steps",
    }

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
    search: str = ""  # what the search multiplied with
    batchnorm: bool = False
    bn: str = "center"
    bn_samples: int = 0
    bound_low: float = -np.inf
    bound_high: float = np.inf
    verified: bool = False

    @property
    def density(self) -> Density | None:
        """The spectral density; None where it was not asked."""
        return Density(self.nodes, self.weights, self.parameters, self.hvps) if self.nodes.size else None
