"""How large a rate training stands at a minimum, by trying, beside what linear stability predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class Minima(Result):
    """The learning rates at which full-batch training with delay stays at a minimum, and at which it leaves.

    Rows f of (3, K) arrays: no momentum, ``momentum`` in its ordinary form, in its shifted form; columns k:
    ``delay[k]``. ``predicted`` is the largest stable ηλ over ``lambda_max`` + ``weight_decay``; ``stays`` the
    largest rate found at which training stayed, ``leaves`` the smallest at which it left. Every run starts
    ``displacement`` away from the minimum, along the sharpest direction, and has left where its loss ever
    rises, within ``steps`` (3, K) steps, as ``factor`` times as far would raise it. ``lambda_after`` is λ_max
    where the run at ``stays`` ended. ``loss`` and ``gradient_norm``, with weight decay, are the minimum's.
    """

    schema: ClassVar[str] = "landscape.minima"
    shapes: ClassVar[Mapping[str, str]] = {"delay": "K+"} | dict.fromkeys(
        ("predicted", "stays", "leaves", "steps", "lambda_after"), "3 K"
    )

    delay: Array
    predicted: Array
    stays: Array
    leaves: Array
    steps: Array
    lambda_after: Array
    momentum: float
    weight_decay: float
    lambda_max: float
    residual: float
    loss: float
    gradient_norm: float
    displacement: float
    factor: float
    samples: int
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""

    @property
    def found(self) -> Array:
        """(3, K): the geometric mean of the rates that training stayed and left at."""
        middle: Array = np.sqrt(self.stays * self.leaves)
        return middle
