"""Where a checkpoint stands against the limits of linear stability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class Stability(Result):
    """Where a minimum stands against the limits of delayed training.

    ``limit[f, k]`` is the largest stable ηλ with delay ``delay[k]`` (K,) under setting f: no momentum,
    ``momentum`` in its ordinary form, in its shifted form. ``lambda_max`` with ``residual`` is the largest
    eigenvalue of the Hessian over all ``samples``, so that a rate above limit/λ_max leaves this minimum.
    ``lr`` and ``own_limit`` are the run's own (NaN where unknown), ``own_delay`` the delay it trained with.
    """

    schema: ClassVar[str] = "landscape.stability"
    shapes: ClassVar[Mapping[str, str]] = {"delay": "K+", "limit": "3 K"}

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

    @property
    def rates(self) -> Array:
        """(3, K): the learning rates above which training leaves this minimum; inf at a maximum."""
        return self.limit / self.lambda_max if self.lambda_max > 0 else np.full_like(self.limit, np.inf)
