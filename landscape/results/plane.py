"""A plane through weight space: a centre θ (P,) and two directions (2, P)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from landscape.core.hdf5 import Array

SPAN = 0.1  # x, y ∈ [−0.1, 0.1] around w_a (DPSGD-2020, section 4.1)
# Planes whose centre is a set of weights that training reached.
CENTERED = ("random", "eigen", "learners")
MARGIN = 1.25  # the span of a plane with markers, relative to the outermost marker (ours)


@dataclass(frozen=True)
class Plane:
    """The points ``center + x·directions[0] + y·directions[1]`` in weight space.

    Attributes:
        center: (P,).
        directions: (2, P).
        kind: "random", "between", "pca", "learners" or "eigen": how the directions were chosen.
        norm: normalisation of random directions: "none", "filter" or "layer".
        seed: of random directions.
        ignore: parameters that random directions do not change: "none" or "bias+norm".
        axes: what a step of length 1 along each direction means, for plots.
        thetas: (M, P), the weight vectors that define the plane, if any.
        markers: (M, 2), their coordinates, or those of the nearest point of the plane; else (0, 2).
        labels: (M,), their names.
        explained: (2,), the share of their variance along each direction; (0,) if unknown.

    Example:
        >>> import torch
        >>> plane = Plane(torch.zeros(3), torch.eye(3)[:2], "random", "none", seed=0)
        >>> plane.span
        0.1
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
        """The default half width of a picture: 0.1, or 1.25 times the largest coordinate of the markers."""
        largest = float(np.abs(self.markers).max(initial=0.0))
        return MARGIN * largest if largest > 0 else SPAN
