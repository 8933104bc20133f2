"""The smallest and the largest eigenvalue of the Hessian on a grid over a plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.interpolated import Interpolated


@dataclass(frozen=True)
class HessianGrid(Interpolated):
    """λ_min, λ_max and the ratio |λ_min|/|λ_max| of the Hessian on a grid, as in DPSGD-2020, Figure 4.

    A low ratio means a nearly convex region, a high ratio a saddle.

    Attributes:
        x, y: (nx,) and (ny,), coordinates in the plane.
        lambda_min, lambda_max: (ny, nx), in nats; NaN where not computed yet.
        ratio: (ny, nx); infinite where λ_max is 0.
        residual_min, residual_max: (ny, nx), ‖Hv − λv‖ in nats: some eigenvalue lies within this
            distance, not necessarily the outermost.
        hvps: (ny, nx), number of Hessian-vector products.
        converged: (ny, nx), whether both residuals met the tolerance ``tol``.
        done: (ny, nx), True where the values are exact; elsewhere they are interpolated, or not computed yet.
            Files older than this field are complete.
        tolerance, columns, stated_error, largest_error, checks, log_columns: of interpolated values, as in
            :class:`landscape.results.interpolated.Interpolated`. Residuals are NaN there, ``converged`` is
            False.
        plane_sha256: SHA-256 of the bytes of the centre and the directions.
        batchnorm, bn, bn_samples, provenance: as in :class:`landscape.Surface`. Files older than these fields
            used the statistics of the centre.

    Example:
        >>> one = np.ones((1, 2))
        >>> grid = HessianGrid(
        ...     x=np.arange(2.0), y=np.zeros(1), lambda_min=-one, lambda_max=2 * one, ratio=one / 2,
        ...     residual_min=one, residual_max=one, hvps=one, converged=one > 0, kind="random", norm="none",
        ...     seed=0, span=0.1, tol=0.01, samples=1, dtype="float64")
        >>> grid.to_dataframe()[["x", "ratio"]].to_numpy().tolist()
        [[0.0, 0.5], [1.0, 0.5]]
    """

    schema: ClassVar[str] = "landscape.hessian_grid"
    shapes: ClassVar[Mapping[str, str]] = {**Interpolated.shapes, "x": "x+", "y": "y+"} | dict.fromkeys(
        ("lambda_min", "lambda_max", "ratio", "residual_min", "residual_max", "hvps", "converged", "done"),
        "y x",
    )
    axes_of: ClassVar[tuple[str, ...]] = ("x", "y")
    units: ClassVar[Mapping[str, str]] = {"ratio": "1"} | dict.fromkeys(
        ("lambda_min", "lambda_max", "residual_min", "residual_max"), "nat"
    )
    table: ClassVar[str] = "y x"

    x: Array
    y: Array
    lambda_min: Array
    lambda_max: Array
    ratio: Array
    residual_min: Array
    residual_max: Array
    hvps: Array
    converged: Array
    kind: str
    norm: str
    seed: int
    span: float
    tol: float
    samples: int
    dtype: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    search: str = ""
    plane_sha256: str = ""
    batchnorm: bool = False
    bn: str = "center"
    bn_samples: int = 0
    done: Array = field(default_factory=lambda: np.zeros((0, 0), bool))
    max_products: int = 0
    randomness: str = ""
    provenance: tuple[str, ...] = ()

    @property
    def trusted(self) -> Array:
        """(ny, nx): where the eigenvalues converged, or are interpolated between exact points."""
        interpolated = ~self.done if "ratio" in self.columns else np.zeros_like(self.done)
        found: Array = self.converged.astype(bool) | interpolated
        return found

    def __post_init__(self) -> None:
        if self.done.size == 0:
            object.__setattr__(self, "done", np.ones(self.ratio.shape, bool))
        super().__post_init__()
