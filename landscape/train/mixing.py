"""Mixing matrices: who averages with whom. M is doubly stochastic; row j says what learner j takes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from landscape.options import FailedError, InputError
from landscape.store import Array
from landscape.train.randomness import generator
from landscape.vector import average

FORMS = "full, ring(k), random-matching, or a .csv, .txt or .npy file with an n × n matrix"
# Row and column sums may miss 1 by this much: a matrix typed with four decimals passes (ours).
SUM_TOLERANCE = 1e-4


class Mixing:
    """The mixing of n learners: a fixed matrix, or one drawn for every step.

    ``spec`` is one of FORMS: "full" averages all learners (M = 11ᵀ/n), "ring(k)" each learner with k
    neighbours on either side and itself, equally; "random-matching" pairs the learners anew each step, each
    pair averages, and an odd learner sits out (DPSGD-2020, section 4: "a learner randomly picks a
    neighbor"). Raises InputError for a spec or matrix that is not allowed.
    """

    def __init__(self, spec: str, learners: int, seed: int) -> None:
        self.spec, self.learners, self.seed = spec, learners, seed
        self.fixed = None if spec == "random-matching" else self._matrix(spec, learners)
        expected = self.fixed if self.fixed is not None else expected_matching(learners)
        eigenvalues = np.linalg.eigvals(expected)
        others = np.delete(eigenvalues, np.argmin(np.abs(eigenvalues - 1)))
        #: 1 − the largest modulus among the eigenvalues other than 1; for random matching, of the mean of M.
        self.gap = round(float(1 - np.abs(others).max()), 12)
        #: The smallest eigenvalue (real part). For random matching that of every drawn M, a projection: 0.
        self.omega_min = round(float(others.real.min()), 12) + 0.0 if self.fixed is not None else 0.0

    @staticmethod
    def _matrix(spec: str, n: int) -> Array:
        if spec == "full":
            return np.full((n, n), 1 / n)
        ring = re.fullmatch(r"ring\((\d+)\)", spec.replace(" ", ""))
        if ring:
            k = int(ring[1])
            if k < 1 or 2 * k + 1 > n:
                raise InputError(
                    f"algorithm.mixing: '{spec}' is not allowed with {n} learners, k must be 1…{(n - 1) // 2}"
                )
            offsets = (np.arange(n)[None] - np.arange(n)[:, None]) % n
            return np.where((offsets <= k) | (offsets >= n - k), 1 / (2 * k + 1), 0.0)
        if Path(spec).suffix in (".csv", ".txt", ".npy"):
            return _read_matrix(Path(spec), n)
        raise InputError(f"algorithm.mixing: '{spec}' is not known (allowed: {FORMS})")

    def matrix(self, step: int) -> Array:
        """M (n, n) float64 of this step."""
        if self.fixed is not None:
            return self.fixed
        order = torch.randperm(self.learners, generator=generator(self.seed, "mixing", step)).numpy()
        m = np.eye(self.learners)
        for a, b in order[: self.learners // 2 * 2].reshape(-1, 2):
            m[[a, a, b, b], [a, b, a, b]] = 0.5
        return m

    def apply(self, weights: Tensor, step: int) -> Tensor:
        """Σ_k M_jk w_k for each row j of ``weights`` (n, P).

        Mixes the deviations from the mean: a float32 matrix whose rows miss 1 by a rounding would otherwise
        let the mean drift by that factor every step.
        """
        mean = average(weights)
        m = torch.from_numpy(self.matrix(step)).to(weights)
        return torch.addmm(mean.expand_as(weights), m, weights - mean)

    def describe(self) -> str:
        """One line: the gap, ω_min and the stability limit that follows from it (DESIGN, formulas)."""
        mean = " of the mean matrix" if self.fixed is None else ""
        return (
            f"mixing {self.spec}: spectral gap {self.gap:.4g}{mean}, smallest eigenvalue ω_min "
            f"{self.omega_min:.4g}; stable while lr·λ_max < {1 + self.omega_min:.4g} (AWC)"
        )


def expected_matching(n: int) -> Array:
    """The mean of M over uniformly random matchings: each learner meets each other one equally often."""
    meet = (n // 2 * 2) / n / (n - 1)  # probability of one particular pair
    m = np.full((n, n), meet / 2)
    np.fill_diagonal(m, 1 - meet / 2 * (n - 1))
    return m


def _read_matrix(path: Path, n: int) -> Array:
    try:
        if path.suffix == ".npy":
            m = np.load(path, allow_pickle=False)
        else:
            m = np.loadtxt(path, delimiter="," if path.suffix == ".csv" else None, ndmin=2)
        m = np.asarray(m, dtype=float)
    except (OSError, ValueError) as error:
        words = " ".join(str(error).split())
        raise FailedError(f"algorithm.mixing: {path} cannot be read as a matrix ({words})") from error
    if m.shape != (n, n):
        raise InputError(f"algorithm.mixing: {path} holds a {m.shape} matrix, {n} learners need ({n}, {n})")
    if not np.isfinite(m).all() or m.min() < 0:
        raise InputError(f"algorithm.mixing: {path} holds {m.min()}, every entry must be finite and ≥ 0")
    for name, sums in (("row", m.sum(1)), ("column", m.sum(0))):
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > SUM_TOLERANCE:
            raise InputError(
                f"algorithm.mixing: {path}: {name} {worst + 1} sums to {sums[worst]:.6g}; every row and "
                "column must sum to 1 (a doubly stochastic matrix)"
            )
    return m
