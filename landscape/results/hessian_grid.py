"""Both ends of the Hessian's spectrum on a grid over a plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class HessianGrid(Result):
    """λ_min, λ_max and ratio |λ_min|/|λ_max| (ny, nx) of the Hessian on a grid, as in DPSGD-2020, Figure 4.

    A low ratio means a nearly convex region, a high one a saddle. Residuals, product counts (hvps) and the
    converged flags belong to each point; ``ratio`` is infinite where λ_max is 0. Points that are not ``done``
    (ny, nx) yet are NaN, 0 or False; a file older than this field is whole. ``plane_sha256`` is of the bytes
    of centre and directions. ``batchnorm``, ``bn`` and ``bn_samples`` as in :class:`landscape.Surface`;
    files older than these fields are of the centre's statistics. ``provenance`` as in
    :class:`landscape.Surface`.
    """

    schema: ClassVar[str] = "landscape.hessian_grid"
    shapes: ClassVar[Mapping[str, str]] = {"x": "nx+", "y": "ny+"} | dict.fromkeys(
        ("lambda_min", "lambda_max", "ratio", "residual_min", "residual_max", "hvps", "converged", "done"),
        "ny nx",
    )
    axes_of: ClassVar[tuple[str, ...]] = ("x", "y")

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

    def __post_init__(self) -> None:
        if self.done.size == 0:
            object.__setattr__(self, "done", np.ones(self.ratio.shape, bool))
        super().__post_init__()
