"""Loss and accuracy along a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.interpolated import Interpolated


@dataclass(frozen=True)
class Line(Interpolated):
    """Loss and accuracy at the weights ``start + t·direction``.

    Attributes:
        t: (K,), coordinates on the line.
        loss: (K,), in nats.
        accuracy: (K,), between 0 and 1; NaN without class labels.
        start, direction: (P,), weights.
        kind: "interpolation" (from one set of weights at t = 0 to another at t = 1) or "direction" (t around
            0, start is the centre).
        done: (K,), True where the values are exact; files older than this field are. Elsewhere they are
            interpolated, see :class:`landscape.results.interpolated.Interpolated`.
        barrier: of an interpolation, in nats (see :func:`landscape.barrier`); NaN of a direction.
        ends: names of the two sets of weights.
        batchnorm, bn, bn_samples: as in :class:`landscape.Surface`.

    Example:
        >>> t = np.linspace(0, 1, 3)
        >>> line = Line(t=t, loss=t**2, accuracy=1 - t, start=np.zeros(2), direction=np.ones(2),
        ...             kind="interpolation", barrier=0.0, samples=1, dtype="float64", bn="center",
        ...             batchnorm=False, bn_samples=0, path="batched", ends=("a", "b"))
        >>> line.to_dataframe().loss.tolist()
        [0.0, 0.25, 1.0]
    """

    schema: ClassVar[str] = "landscape.line"
    shapes: ClassVar[Mapping[str, str]] = {
        **Interpolated.shapes,
        "t": "t+",
        "loss": "t",
        "accuracy": "t",
        "done": "t",
        "start": "parameter",
        "direction": "parameter",
    }
    axes_of: ClassVar[tuple[str, ...]] = ("t",)
    units: ClassVar[Mapping[str, str]] = {"loss": "nat", "accuracy": "1", "barrier": "nat"}
    table: ClassVar[str] = "t"

    t: Array
    loss: Array
    accuracy: Array
    start: Array
    direction: Array
    kind: str
    barrier: float
    samples: int
    dtype: str
    bn: str
    batchnorm: bool
    bn_samples: int
    path: str
    ends: tuple[str, ...] = ()
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    done: Array = field(default_factory=lambda: np.zeros(0, bool))

    def __post_init__(self) -> None:
        if self.done.size == 0:
            object.__setattr__(self, "done", np.ones(self.loss.shape, bool))
        super().__post_init__()


def barrier(t: Array, loss: Array) -> float:
    """The loss barrier between the ends of a line: max_t [L(t) − ((1−t)·L(0) + t·L(1))] ≥ 0.

    A barrier of 0 means that the loss never rises above the straight line between its ends, as in a convex
    valley: the two ends are linearly connected (Frankle et al. 2020, who use the mean of the two ends in
    place of the straight line; this form is from Entezari et al. 2022, section 2).

    Args:
        t: (K,), from 0 to 1.
        loss: (K,).

    Returns:
        The barrier in the unit of the loss; NaN if a loss is NaN or an end is infinite.

    Example:
        >>> barrier(np.array([0.0, 0.5, 1.0]), np.array([1.0, 4.0, 3.0]))
        2.0
    """
    with np.errstate(invalid="ignore"):
        return float(np.max(loss - ((1 - t) * loss[0] + t * loss[-1])))
