"""Δ(2), the noise that the spread of the learners adds, in four estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.core.hdf5 import Array
from landscape.results.base import Result


@dataclass(frozen=True)
class NoiseEstimate(Result):
    """Δ(2) at one checkpoint, with learners w_j = w_a + Δw_j, learning rate α and local batch B.

    One value for each of ``draws`` draws of n minibatches of B samples (with replacement):

    - ``direct`` α²‖δ‖², δ = n⁻¹ Σ_j [∇L^{μ_j}(w_j) − ∇L^{μ_j}(w_a)]: the definition;
    - ``first_order`` α²‖n⁻¹ Σ_j H_{μ_j} Δw_j‖², its first-order expansion, minibatch Hessians at w_a;
    - ``delta_s`` α²‖P⊥g_S‖², ``delta_2`` α²‖P⊥δ‖², ``delta_cross`` 2α²⟨P⊥g_S, P⊥δ⟩, which add up to Δ_DP.

    And without draws, exact on the whole data set:

    - ``full_batch`` the definition with ∇L in place of ∇L^{μ_j}: what is left of higher order;
    - ``eq4`` α² n⁻² Σ_j ‖HΔw_j‖², the Hessian form that the paper prints.
    """

    schema: ClassVar[str] = "landscape.noise"
    shapes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("direct", "first_order", "delta_s", "delta_2", "delta_cross"), "draws+"
    )

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
        """Name -> (mean, standard error over the draws; 0 for what is exact)."""
        rows = {}
        for name in ("direct", "full_batch", "eq4", "first_order", "delta_s", "delta_2", "delta_cross"):
            value = np.atleast_1d(getattr(self, name))
            error = value.std(ddof=1) / np.sqrt(len(value)) if len(value) > 1 else 0.0
            rows[name] = (float(value.mean()), float(error))
        return rows
