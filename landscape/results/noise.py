"""Δ(2), the noise that the spread of the learners adds to a step, in four estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import mean_and_error
from landscape.results.base import Result


@dataclass(frozen=True)
class NoiseEstimate(Result):
    """Δ(2) at one checkpoint, with learners w_j = w_a + Δw_j, learning rate α and local batch B.

    All values are squared weights. Arrays (draws,) have one value for each draw of n minibatches of B samples
    (with replacement). Numbers without draws are exact on the whole data set. With P⊥ the projector
    orthogonal to g and δ = n⁻¹ Σ_j [∇L^{μ_j}(w_j) − ∇L^{μ_j}(w_a)], Δ_DP = Δ_S + α²‖P⊥δ‖² + 2α²⟨P⊥g_S, P⊥δ⟩
    (DPSGD-2020, Eq. 4).

    Attributes:
        direct: (draws,), α²‖δ‖²: the definition.
        first_order: (draws,), α²‖n⁻¹ Σ_j H_{μ_j} Δw_j‖², its first-order expansion, with minibatch Hessians
            at w_a.
        delta_s: (draws,), Δ_S = α²‖P⊥g_S‖².
        delta_2: (draws,), α²‖P⊥δ‖².
        delta_cross: (draws,), 2α²⟨P⊥g_S, P⊥δ⟩.
        full_batch: the definition with ∇L in place of ∇L^{μ_j}, which has only terms of higher order.
        eq4: α² n⁻² Σ_j ‖HΔw_j‖², the Hessian form in the paper.

    Example:
        >>> values = np.array([1.0, 3.0])
        >>> result = NoiseEstimate(direct=values, first_order=values, delta_s=values, delta_2=values,
        ...                        delta_cross=values, full_batch=1.5, eq4=1.0, consensus=0.1, lr=0.1,
        ...                        learners=2, local_batch=4, samples=10, seed=0)
        >>> result.summary()["direct"], result.summary()["eq4"]
        ((2.0, 1.0), (1.0, 0.0))
    """

    schema: ClassVar[str] = "landscape.noise"
    shapes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("direct", "first_order", "delta_s", "delta_2", "delta_cross"), "draw+"
    )
    units: ClassVar[Mapping[str, str]] = dict.fromkeys((*shapes, "full_batch", "eq4", "consensus", "lr"), "1")
    table: ClassVar[str] = "draw"

    direct: Array
    first_order: Array
    delta_s: Array
    delta_2: Array
    delta_cross: Array
    full_batch: float
    eq4: float
    consensus: float
    lr: float
    learners: int
    local_batch: int
    samples: int
    seed: int
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""

    def summary(self) -> dict[str, tuple[float, float]]:
        """All estimates of Δ(2), and the parts of Δ_DP.

        Returns:
            Name -> (mean over the draws, its standard error; 0 for numbers that are exact).

        Example:
            >>> values = np.array([1.0, 3.0])
            >>> result = NoiseEstimate(direct=values, first_order=values, delta_s=values, delta_2=values,
            ...                        delta_cross=values, full_batch=1.5, eq4=1.0, consensus=0.1, lr=0.1,
            ...                        learners=2, local_batch=4, samples=10, seed=0)
            >>> result.summary()["direct"]
            (2.0, 1.0)
        """
        rows = {}
        for name in ("direct", "full_batch", "eq4", "first_order", "delta_s", "delta_2", "delta_cross"):
            value = getattr(self, name)
            rows[name] = mean_and_error(value) if np.ndim(value) else (float(value), 0.0)
        return rows
