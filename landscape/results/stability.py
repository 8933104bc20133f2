"""Limits of linear stability at a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result

# Forms of momentum: the rows of the limits.
FORMS = ("no momentum", "momentum", "shifted momentum")


@dataclass(frozen=True)
class Stability(Result):
    """Limits of stable training with delayed gradients at a minimum, and the run that led there.

    Attributes:
        delay: (K,), in steps.
        limit: (3, K), the largest stable ηλ, a row for each form of momentum (none, ordinary, shifted).
            Training leaves this minimum if the learning rate is above limit/λ_max.
        momentum: the momentum of the second and third row.
        lambda_max, residual: the largest eigenvalue of the Hessian over all ``samples``, in nats, and its
            residual ‖Hv − λv‖.
        lr: the learning rate of the run; NaN if unknown.
        own_limit: the largest stable ηλ of the update rule of the run; NaN if unknown.
        own_delay: the delay of the run, in steps.
        precondition: the optimizer whose preconditioner P the Hessian is seen through, P^{-1/2} H P^{-1/2};
            "" without.

    Example:
        >>> limits = np.array([[2.0, 1.0], [3.8, 0.1], [3.8, 0.19]])
        >>> result = Stability(np.array([0, 1]), limits, momentum=0.9, lambda_max=4.0, residual=0.0,
        ...                    converged=True, lr=0.1, own_limit=np.nan, own_delay=0, samples=100)
        >>> result.rates[0].tolist()
        [0.5, 0.25]
    """

    schema: ClassVar[str] = "landscape.stability"
    shapes: ClassVar[Mapping[str, str]] = {"delay": "delay+", "limit": "form delay"}
    labels_of: ClassVar[Mapping[str, tuple[str, ...]]] = {"form": FORMS}
    units: ClassVar[Mapping[str, str]] = {
        "delay": "steps",
        "limit": "1",
        "lambda_max": "nat",
        "residual": "nat",
        "own_delay": "steps",
    }
    table: ClassVar[str] = "form delay"

    delay: Array
    limit: Array
    momentum: float
    lambda_max: float
    residual: float
    converged: bool
    lr: float
    own_limit: float
    own_delay: int
    samples: int
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    precondition: str = ""

    @property
    def rates(self) -> Array:
        """(3, K): the learning rates above which training leaves this minimum; inf where λ_max ≤ 0."""
        return self.limit / self.lambda_max if self.lambda_max > 0 else np.full_like(self.limit, np.inf)
