"""Loss and accuracy on a grid over a plane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.results.base import Result
from landscape.results.plane import Plane

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Surface(Result):
    """``loss[i, j]`` is L(center + x[j]·directions[0] + y[i]·directions[1]).

    x (nx,), y (ny,), loss and accuracy (ny, nx) float64, done (ny, nx) bool; directions (2, P), center (P,).
    Losses that came out infinite or NaN are kept as such. ``label`` and ``source`` say whose surface it is.
    ``batchnorm`` says whether the model has BatchNorm, ``bn`` whose statistics it used, from ``bn_samples``
    samples a point where they were re-estimated (a batch where they were the batch's). ``path`` and
    ``precision`` as in :func:`contour`; ``precision_error`` is the largest difference in loss to the model's
    own precision, seen at up to ERROR_POINTS points (0 where that was used).

    ``provenance`` (:mod:`.provenance`) says what the loss was made of; older files have none.

    The weights that the plane was made from, if any: their coordinates ``markers`` (M, 2), ``labels``, the
    loss at each itself, not at its place in the plane, ``marker_loss`` (M,); ``explained`` and ``axes`` as
    in :class:`landscape.Plane`.
    """

    schema: ClassVar[str] = "landscape.surface"
    shapes: ClassVar[Mapping[str, str]] = {
        "x": "nx+",
        "y": "ny+",
        "loss": "ny nx",
        "accuracy": "ny nx",
        "done": "ny nx",
        "directions": "2 P",
        "center": "P",
        "axes": "2",
        "labels": "M",
        "markers": "M 2",
        "marker_loss": "M",
    }
    axes_of: ClassVar[tuple[str, ...]] = ("x", "y")

    x: Array
    y: Array
    loss: Array
    accuracy: Array
    done: Array
    directions: Array
    center: Array
    kind: str
    norm: str
    seed: int
    span: float
    samples: int
    dtype: str
    bn: str
    path: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    ignore: str = ""  # "": a file older than the option
    batchnorm: bool = False
    bn_samples: int = 0
    provenance: tuple[str, ...] = ()
    precision: str = "model"
    precision_error: float = 0.0
    axes: tuple[str, ...] = ("step along direction 1", "step along direction 2")
    markers: Array = field(default_factory=lambda: np.zeros((0, 2)))
    labels: tuple[str, ...] = ()
    marker_loss: Array = field(default_factory=lambda: np.zeros(0))
    explained: Array = field(default_factory=lambda: np.zeros(0))

    def plane(self, like: Tensor) -> Plane:
        """The plane, with its markers, on the device and in the precision of ``like``."""
        return Plane(
            torch.from_numpy(self.center).to(like),
            torch.from_numpy(self.directions).to(like),
            self.kind,
            self.norm,
            self.seed,
            self.ignore,
            self.axes,
            self.markers,
            self.labels,
            self.explained,
        )
