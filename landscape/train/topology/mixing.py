"""Mixing matrices: who averages with whom. M is doubly stochastic; row j: the weights that learner j uses."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import FailedError, InputError
from landscape.core.files import open_regular
from landscape.core.hdf5 import Array
from landscape.problem.layout import average
from landscape.stability.rules import first_unstable
from landscape.train.run.randomness import generator
from landscape.train.topology.forms import matrices

# Row and column sums may miss 1 by this much: a matrix typed with four decimals passes (ours).
SUM_TOLERANCE = 1e-4
# Most learners a matrix is made for, and largest file of a matrix: 128 MiB in memory (ours).
MAX_LEARNERS, MAX_FILE_BYTES = 4096, 1 << 27
_MATRICES: ContextVar[dict[str, Array] | None] = ContextVar("matrices", default=None)


@contextlib.contextmanager
def known_matrices(matrices: dict[str, Array]) -> Iterator[None]:
    """Inside, a file whose name is in ``matrices`` is not read; the matrix of any other file is added to it.

    So a run keeps the matrix that it began with, whatever becomes of the file.
    """
    token = _MATRICES.set(matrices)
    try:
        yield
    finally:
        _MATRICES.reset(token)


class Mixing:
    """The mixing of n learners: a fixed matrix, a cycle of matrices, or one drawn for every step.

    ``spec`` is a topology by name (:mod:`landscape.train.topology.forms`) such as ring(2), or a .csv, .txt or
    .npy file with a doubly stochastic n × n matrix.

    Args:
        spec: a topology, or the file of a matrix.
        learners: n.
        seed: of random matchings.
        where: the option that ``spec`` was given to, for messages.

    Raises:
        InputError: for a spec or matrix that is not allowed with n learners.
        FailedError: for a file that cannot be read as a matrix.

    Example:
        >>> Mixing("ring(1)", learners=4, seed=0).matrix(step=1)[0].round(3).tolist()
        [0.333, 0.333, 0.0, 0.333]
        >>> Mixing("ring(2)", learners=6, seed=0).stability_limit
        0.8
        >>> lazy = Mixing("lazy(0.75, ring(1))", learners=6, seed=0)  # ω_min of "full", and another gap
        >>> lazy.omega_min, lazy.gap
        (0.0, 0.25)
    """

    def __init__(self, spec: str, learners: int, seed: int, where: str = "algorithm.mixing") -> None:
        if learners > MAX_LEARNERS:
            raise InputError(
                f"{where}: '{spec}' is not allowed with {learners} learners, at most {MAX_LEARNERS:,} are "
                "allowed: their matrix has n² numbers"
            )
        self.spec, self.learners, self.seed = spec, learners, seed
        #: The matrices (n, n) float64 that the steps go through in turn; none if each step draws its own.
        self.cycle: list[Array] = (
            [read_matrix(where, Path(spec), learners)] if is_file(spec) else matrices(spec, learners, where)
        )

    def matrix(self, step: int) -> Array:
        """M (n, n) float64 of this step, counted from 1."""
        if self.cycle:
            return self.cycle[(step - 1) % len(self.cycle)]
        order = torch.randperm(self.learners, generator=generator(self.seed, "mixing", step)).numpy()
        a, b = order[: self.learners // 2 * 2].reshape(-1, 2).T
        m = np.eye(self.learners)
        m[a, a] = m[b, b] = m[a, b] = m[b, a] = 0.5
        return m

    def apply(self, weights: Tensor, step: int) -> Tensor:
        """Σ_k M_jk w_k for each row j of ``weights`` (n, P)."""
        return combine(weights, self.matrix(step))

    @cached_property
    def modes(self) -> Array:
        """ω (τ, n − 1), complex: the eigenvalues of the cycle's τ matrices but the mean's 1, a column a mode.

        A cycle of several is of circulant matrices, which share their modes. For random matching, of the mean
        of M_t.
        """
        if self.learners == 1:
            return np.empty((max(1, len(self.cycle)), 0), dtype=complex)
        if len(self.cycle) > 1:
            return np.array([np.fft.fft(m[:, 0])[1:] for m in self.cycle])
        m = self.cycle[0] if self.cycle else expected_matching(self.learners)
        eigenvalues = np.linalg.eigvalsh(m) if np.array_equal(m, m.T) else np.linalg.eigvals(m)
        return np.delete(eigenvalues, np.argmin(np.abs(eigenvalues - 1))).astype(complex)[None]

    @property
    def gap(self) -> float:
        """1 − max |ω|: the share of the disagreement that a step takes away at least.

        Of a cycle, from the product over one, per step; of random matching, of the mean of M_t.
        """
        tau = len(self.modes)
        slowest = round(float(np.abs(self.modes).prod(0).max(initial=0)), 12)  # before the root: 0 stays 0
        return round(1 - math.pow(slowest, 1 / tau), 12)

    @property
    def omega_min(self) -> float:
        """The smallest real part of an eigenvalue of any M_t; random matching draws projections: 0."""
        if not self.cycle:
            return 0.0 if self.learners > 1 else 1.0
        return round(float(self.modes.real.min(initial=1)), 12) + 0.0

    @property
    def stability_limit(self) -> float:
        """The ηλ at which learners that take plain steps on one quadratic, in AWC order, drift apart.

        A mode evolves by ω − ηλ, so the limit is min Re ω + √(1 − (Im ω)²): 1 + ω_min for symmetric M
        (DESIGN, formulas). Of a cycle, where the product over one first reaches 1 in modulus. Of random
        matching, in mean square: with projections E(M − ηλ)² = (1 − 2ηλ) E M + (ηλ)², so ρ + √(ρ² − ρ + 1)
        with ρ the mean's eigenvalue; no drawing at all grows below 1 + ω_min = 1. One learner: SGD's 2.
        """
        if self.learners == 1:
            return 2.0
        if not self.cycle:
            rho = float(self.modes.real[0, 0])
            return rho + math.sqrt(rho**2 - rho + 1)
        if len(self.cycle) == 1:
            limits = self.modes.real + np.sqrt(np.maximum(0, 1 - self.modes.imag**2))
            return round(float(limits.min()), 12)

        def growth(x: float) -> float:
            return float(np.abs(self.modes - x).prod(0).max())

        return first_unstable(growth, 2.01, 2010)

    def degree(self, step: int) -> float:
        """Vectors that a learner sends at ``step``, the mean over the learners.

        One to each neighbour; an average of all is an all-reduce, 2(n−1)/n.
        """
        if not self.cycle:  # every learner but an odd one has a partner; no need to draw the large matrix
            return self.learners // 2 * 2 / self.learners
        m = self.matrix(step)
        if averages_all(m):
            return 2 * (self.learners - 1) / self.learners
        return (np.count_nonzero(m) - np.count_nonzero(np.diag(m))) / self.learners

    def describe(self, order: str = "awc", stable: str = "") -> str:
        """One line: the gap, ω_min and the stability limit, with ``order`` "awc" or "atc".

        In ATC order a mode evolves by ω(1 − ηλ), so that none is less stable than the mean, ηλ < 2.
        ``stable`` replaces the limit, which is that of plain steps.
        """
        limit, gap, omega = f"{self.stability_limit:.4g}", "", ""
        if not self.cycle:
            gap, omega = " of the mean of M_t", " of each M_t"
            limit = f"1 + ω_min = {1 + self.omega_min:.4g} whatever is drawn, in mean square < {limit}"
        elif len(self.cycle) > 1:
            gap = f" a step over a cycle of {len(self.cycle)}"
        elif math.isclose(self.stability_limit, 1 + self.omega_min):
            limit = f"1 + ω_min = {limit}"
        if order == "atc":
            limit = "2"
        return (
            f"mixing {self.spec}: spectral gap {self.gap:.4g}{gap}, smallest eigenvalue ω_min "
            f"{self.omega_min:.4g}{omega}; "
            + (stable or f"plain steps are stable while lr·λ_max < {limit} ({order.upper()})")
        )


def is_file(spec: object) -> bool:
    """Whether ``spec`` names the file of a matrix."""
    return isinstance(spec, str) and Path(spec).suffix in (".csv", ".txt", ".npy")


def averages_all(matrix: Array) -> bool:
    """Whether ``matrix`` (n, n) needs an all-reduce: all entries are equal.

    Two learners rather exchange their vectors: the traffic is the same, and the work is less.
    """
    return len(matrix) > 2 and np.ptp(matrix) == 0


def combine(weights: Tensor, matrix: Array) -> Tensor:
    """Σ_k M_jk w_k for each row j of ``weights`` (n, P), the rows of ``matrix`` (n, n) sum to 1.

    Mixes the deviations from the mean: a float32 matrix whose rows miss 1 by a rounding would otherwise let
    the mean drift by that factor every step.
    """
    mean = average(weights)
    m = torch.from_numpy(matrix).to(weights)
    return torch.addmm(mean.expand_as(weights), m, weights - mean)


def expected_matching(n: int) -> Array:
    """The mean of M over uniformly random matchings: each learner meets each other one equally often."""
    meet = (n // 2 * 2) / n / (n - 1)  # probability of one particular pair
    m = np.full((n, n), meet / 2)
    np.fill_diagonal(m, 1 - meet / 2 * (n - 1))
    return m


def _memory_map(path: Path) -> Array:
    """The array in a .npy file, memory-mapped, so that its shape is known before memory is used."""
    with open(path, "rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError("it does not begin as a .npy file")
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def read_matrix(
    where: str, path: Path, n: int, sums: tuple[Literal["row", "column"], ...] = ("row", "column")
) -> Array:
    """The n × n matrix in ``path``, whose rows or columns (``sums``) or both must sum to 1.

    ``where`` is the option that named it. Raises FailedError or InputError for any other.
    """
    matrices = _MATRICES.get()
    m = matrices[str(path)] if matrices and str(path) in matrices else _numbers(where, path)
    if m.shape != (n, n):
        raise InputError(f"{where}: {path} holds a {m.shape} matrix, {n} learners need ({n}, {n})")
    m = np.asarray(m, dtype=float)
    if not np.isfinite(m).all() or m.min() < 0:
        raise InputError(f"{where}: {path} holds {m.min()}, every entry must be finite and ≥ 0")
    for name in sums:
        totals = m.sum(1 if name == "row" else 0)
        worst = int(np.argmax(np.abs(totals - 1)))
        if abs(totals[worst] - 1) > SUM_TOLERANCE:
            raise InputError(
                f"{where}: {path}: {name} {worst + 1} sums to {totals[worst]:.6g}; every "
                f"{' and '.join(sums)} must sum to 1 ({'doubly' if len(sums) > 1 else sums[0]} stochastic)"
            )
    axes = [1 if name == "row" else 0 for name in sums]
    if max(np.abs(m.sum(axis) - 1).max() for axis in axes) > 1e-12:
        for _ in range(100):  # the rounding to few decimals is scaled away (Sinkhorn)
            for axis in axes:
                m = m / m.sum(axis, keepdims=True)
    if matrices is not None:
        matrices[str(path)] = m
    return m


def _numbers(where: str, path: Path) -> Array:
    try:
        with open_regular(path, MAX_FILE_BYTES) as file, warnings.catch_warnings():
            warnings.simplefilter("error")
            if path.suffix == ".npy":
                m = _memory_map(path)
                if m.dtype.kind not in "fiub":
                    raise ValueError("it holds no array of numbers")
                return m
            with io.TextIOWrapper(file, encoding="utf-8") as lines:
                return np.loadtxt(lines, delimiter="," if path.suffix == ".csv" else None, ndmin=2)
    except Exception as error:  # numpy raises whatever a damaged header makes Python raise
        words = " ".join(str(error).split())[:120]
        raise FailedError(f"{where}: {path} cannot be read as a matrix ({words})") from error
