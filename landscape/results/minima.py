"""Learning rates at which training stays at a minimum, measured and predicted by linear stability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result
from landscape.results.stability import FORMS


@dataclass(frozen=True)
class Minima(Result):
    """Learning rates at which full-batch training with delayed gradients stays at a minimum or leaves it.

    Arrays (3, K) have a row for each form of momentum (none, ordinary, shifted) and a column for each delay.

    Each run starts at the distance ``displacement`` from the minimum, in the sharpest direction. It has left
    the minimum if its loss exceeds, within ``steps`` steps, the loss at ``factor`` times this distance.

    Attributes:
        delay: (K,), in steps.
        predicted: (3, K), the largest stable ηλ divided by ``lambda_max`` + ``weight_decay``.
        stays: (3, K), the largest learning rate at which training stayed.
        leaves: (3, K), the smallest learning rate at which training left.
        steps: (3, K), length of the runs.
        lambda_after: (3, K), λ_max at the end of the run at ``stays``, in nats.
        momentum: the momentum of the second and third row.
        lambda_max, residual: of the Hessian at the minimum, in nats.
        weight_decay: that of the training.
        displacement: the distance from the minimum at which each run starts, in the sharpest direction.
        factor: a run has left where its loss exceeds the loss at this many times the distance.
        loss, gradient_norm: at the minimum, with weight decay.

    Example:
        >>> ones = np.ones((3, 1))
        >>> result = Minima(np.array([0]), predicted=ones, stays=ones, leaves=4 * ones, steps=ones,
        ...                 lambda_after=ones, momentum=0.9, weight_decay=0.0, lambda_max=2.0, residual=0.0,
        ...                 loss=0.0, gradient_norm=0.0, displacement=0.1, factor=4.0, samples=10)
        >>> result.boundary[:, 0].tolist()
        [2.0, 2.0, 2.0]
    """

    schema: ClassVar[str] = "landscape.minima"
    shapes: ClassVar[Mapping[str, str]] = {"delay": "delay+"} | dict.fromkeys(
        ("predicted", "stays", "leaves", "steps", "lambda_after"), "form delay"
    )
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": FORMS}
    units: ClassVar[Mapping[str, str]] = {"delay": "steps", "steps": "steps"} | dict.fromkeys(
        ("lambda_after", "lambda_max", "residual", "loss"), "nat"
    )
    table: ClassVar[str] = "form delay"

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
    def boundary(self) -> Array:
        """(3, K): the geometric mean of ``stays`` and ``leaves``, an estimate of the largest stable rate."""
        middle: Array = np.sqrt(self.stays * self.leaves)
        return middle
