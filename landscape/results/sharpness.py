"""How far the loss rises within a distance of the weights, at worst or on average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from landscape.core.hdf5 import Array
from landscape.results.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class Sharpness(Measurement):
    """Worst-case or average-case (m-)sharpness, in nats.

    With c = |w| ("adaptive") or c = 1, and S all samples or minibatches of m of them:

    - kind "worst": E_S max over ‖δ/c‖ ≤ ρ of L_S(w + δ) − L_S(w). A search finds each maximum, so that the
      value is a lower bound.
    - kind "average": E_S E L_S(w + δ) − L_S(w), δ ~ N(0, ρ² diag(c²)), so that ‖δ/c‖ is about ρ√P.

    Attributes:
        values: (draws,), of each minibatch, or pair ±δ; one where nothing is drawn.
        standard_error: of their mean; 0 where nothing is drawn. That of the search is not in it.
        loss: L(w), the mean over the draws.
        kind: "worst" or "average".
        adaptive: whether displacements are relative to each weight.
        steps, starts: gradients of a search, and searches for each draw; 0 of "average".
        rho: ρ, without a unit if ``adaptive``, else a distance in weight space.
        m: samples of a minibatch, drawn with replacement; 0: all samples.
        reached: whether the relative standard error that was asked for was reached.
        residual: of "worst", the mean angle in radians between gradient and displacement where the search
            ended, 0 at a maximum; 0 of "average".
        gradients: the number of gradients ("worst") or losses ("average"), each of m samples or of all.
        fixed: weights that are exactly 0, which "adaptive" displacements never move.

    Example:
        >>> import numpy as np
        >>> result = Sharpness(
        ...     values=np.array([0.1, 0.3]), standard_error=0.1, loss=0.5, kind="average", rho=0.05,
        ...     adaptive=True, m=0, reached=False, residual=0.0, gradients=5, steps=0, starts=0, fixed=0,
        ...     parameters=9, seed=0, samples=9, dtype="float64")
        >>> result.value, result.standard_error
        (0.2, 0.1)
    """

    schema: ClassVar[str] = "landscape.sharpness"
    shapes: ClassVar[Mapping[str, str]] = {"values": "draw+"}
    units: ClassVar[Mapping[str, str]] = dict.fromkeys(("values", "standard_error", "loss"), "nat")
    table: ClassVar[str] = "draw"

    values: Array
    standard_error: float
    loss: float
    kind: str
    rho: float
    adaptive: bool
    m: int
    reached: bool
    residual: float
    gradients: int
    steps: int
    starts: int
    fixed: int
    parameters: int

    @property
    def value(self) -> float:
        """The sharpness in nats: the mean of ``values``."""
        return float(self.values.mean())

    @property
    def draws(self) -> int:
        """The number of minibatches or pairs ±δ; 0 where nothing was drawn."""
        return 0 if self.m == 0 and self.kind == "worst" else len(self.values)
