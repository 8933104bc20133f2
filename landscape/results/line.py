"""Loss and accuracy along a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class Line(Result):
    """``loss[k]`` and ``accuracy[k]`` (K,) float64 at start + t[k]·direction; direction and start (P,).

    ``kind`` is "interpolation" (t from 0 to 1, one end to the other) or "direction" (t around 0, start the
    centre). ``barrier`` is :func:`barrier` of an interpolation, NaN of a direction. ``bn``, ``batchnorm`` and
    ``bn_samples`` as in :class:`landscape.Surface`.
    """

    schema: ClassVar[str] = "landscape.line"
    shapes: ClassVar[Mapping[str, str]] = {
        "t": "K+",
        "loss": "K",
        "accuracy": "K",
        "start": "P",
        "direction": "P",
    }
    axes_of: ClassVar[tuple[str, ...]] = ("t",)

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


def barrier(t: Array, loss: Array) -> float:
    """max_t [L(t) − ((1−t)·L(0) + t·L(1))] ≥ 0 for t (K,) from 0 to 1, in the loss's unit.

    0 where the loss never rises above the straight line between its ends, as in a convex valley: the two
    ends are linearly connected (Frankle et al. 2020, who take the ends' mean for the straight line; this form
    is Entezari et al. 2022, section 2). NaN if any loss is NaN, or an end infinite.
    """
    with np.errstate(invalid="ignore"):
        return float(np.max(loss - ((1 - t) * loss[0] + t * loss[-1])))
