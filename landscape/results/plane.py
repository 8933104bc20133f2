"""A plane through weight space: a centre θ (P,) and two directions (2, P)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from landscape.core.hdf5 import Array

SPAN = 0.1  # x, y ∈ [−0.1, 0.1] around w_a (DPSGD-2020, section 4.1)
MARGIN = 1.25  # a plane with markers shows a quarter more than reaches the outermost one (ours)


@dataclass(frozen=True)
class Plane:
    """The points ``center + x·directions[0] + y·directions[1]``; center (P,), directions (2, P).

    ``kind`` says how it was made, ``norm`` and ``ignore`` how random directions were scaled and which
    parameters they leave alone; ``axes`` what a step of 1 along each direction is.

    A plane made from M weight vectors (:mod:`landscape.analysis.planes`) keeps them: ``thetas`` (M, P), their
    coordinates ``markers`` (M, 2), float64, of the nearest point of the plane where they lie outside of it,
    and ``labels`` (M). ``explained`` (2,) is the share of their variance along each direction, or (0,).
    """

    center: Tensor
    directions: Tensor
    kind: str
    norm: str
    seed: int
    ignore: str = "none"
    axes: tuple[str, ...] = ("step along direction 1", "step along direction 2")
    markers: Array = field(default_factory=lambda: np.zeros((0, 2)))
    labels: tuple[str, ...] = ()
    explained: Array = field(default_factory=lambda: np.zeros(0))
    thetas: Tensor | None = None

    @property
    def span(self) -> float:
        """How far a picture reaches unless told otherwise: 0.1, or a quarter beyond the outermost marker."""
        reach = float(np.abs(self.markers).max(initial=0.0))
        return MARGIN * reach if reach > 0 else SPAN
