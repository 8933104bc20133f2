"""Topologies by name: each is a function from the number of learners n to mixing matrices (n, n).

A name adds itself to the registry; the arguments after n stand in brackets in a recipe, ``ring(2)``. One
matrix is that of every step; several are gone through in turn, and must be circulant. The docstring begins
with the forms that a user may write. InputError with a reason refuses an n.
"""

from __future__ import annotations

import inspect
import math
import re

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.registry import topologies

# Row and column sums of a topology miss 1 by rounding only.
_ROUNDING = 1e-9


@topologies.add("full")
def full(n: int) -> list[Array]:
    """full: M = 11ᵀ/n, the average of all."""
    return [np.full((n, n), 1 / n)]


@topologies.add("ring")
def ring(n: int, k: int) -> list[Array]:
    """ring(k): k neighbours on either side."""
    if k < 1 or 2 * k + 1 > n:
        raise InputError(f"k must be 1…{(n - 1) // 2}" if n > 2 else "a ring needs at least 3")
    return [_equal(n, [0, *range(1, k + 1), *range(-k, 0)])]


@topologies.add("torus")
def torus(n: int, size: str = "") -> list[Array]:
    """torus, torus(RxC): the four neighbours on an R × C grid that wraps round; by default the squarest."""
    given = re.fullmatch(r"(\d+)x(\d+)", size)
    if size and not given:
        raise InputError("torus(RxC) needs numbers of rows and columns, such as torus(2x3)")
    rows = int(given[1]) if given else max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    columns = int(given[2]) if given else n // rows
    if min(rows, columns) < 2 or rows * columns != n:
        needs = f"{rows} × {columns} is not {n}" if given else f"{n} is not R × C"
        raise InputError(f"{needs}, both must be at least 2")
    i, j = np.divmod(np.arange(n), columns)
    steps = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    return [_equal(n, [(i + u) % rows * columns + (j + v) % columns - np.arange(n) for u, v in steps])]


@topologies.add("exponential")
def exponential(n: int) -> list[Array]:
    """exponential: learner j takes from those 1, 2, 4, … after it (Ying et al. 2021)."""
    return [_equal(n, [0, *_powers(n)])]


@topologies.add("one-peer-exponential")
def one_peer_exponential(n: int) -> list[Array]:
    """one-peer-exponential: half from the one 2^((t−1) mod ⌈log₂ n⌉) after it at step t (Ying et al. 2021).

    It averages exactly after ⌈log₂ n⌉ steps if n is a power of two, and never otherwise.
    """
    return [_equal(n, [0, p]) for p in _powers(n)] or [np.ones((1, 1))]


@topologies.add("hypercube")
def hypercube(n: int) -> list[Array]:
    """hypercube: from those whose number differs in one bit."""
    powers = _powers(n)
    if n != 2 ** len(powers):
        below = 2 ** (len(powers) - 1)
        raise InputError(f"there must be a power of two, such as {below} or {2 * below}")
    learners = np.arange(n)
    return [_equal(n, [0, *((learners ^ p) - learners for p in powers)])]


@topologies.add("random-matching")
def random_matching(n: int) -> list[Array]:
    """random-matching: drawn anew for every step; each pair averages, an odd learner sits out.

    The same on every process (DPSGD-2020, section 4: "a learner randomly picks a neighbor"). There are no
    matrices to go through: :meth:`.Mixing.matrix` draws them.
    """
    return []


@topologies.add("star")
def star(n: int) -> list[Array]:
    """star: learner 0 with all others, by Metropolis–Hastings weights 1/(1 + max(deg j, deg k)) = 1/n."""
    m = np.eye(n) * (1 - 1 / n)
    m[0, :] = m[:, 0] = 1 / n
    return [m]


@topologies.add("nodes")
def nodes(n: int, k: int) -> list[Array]:
    """nodes(k): k nodes of n/k learners each, which average within their node."""
    if k < 1 or n % k:
        raise InputError("k must divide their number")
    return [np.kron(np.eye(k), np.full((n // k, n // k), k / n))]


@topologies.add("lazy")
def lazy(n: int, a: float, form: str) -> list[Array]:
    """lazy(a, FORM): (1 − a)I + aM, M another named form: an eigenvalue ω becomes 1 − a(1 − ω).

    So the spectral gap and ω_min can be chosen apart.
    """
    if not 0 < a <= 1:
        raise InputError("a of lazy(a, FORM) must be > 0 and ≤ 1")
    inner = [] if form.startswith("lazy") else matrices(form, n, "FORM")
    if not inner:
        raise InputError(
            "FORM of lazy(a, FORM) must be a named mixing that is not drawn and not lazy, such as ring(1)"
        )
    return [(1 - a) * np.eye(n) + a * m for m in inner]


def forms() -> list[str]:
    """What a user may write, topology by topology: "ring(k)"."""
    docs = {name: (inspect.getdoc(topologies[name]) or "").partition(":")[0] for name in topologies}
    return [doc if doc.startswith(name) else name for name, doc in docs.items()]


def matrices(spec: str, n: int, where: str) -> list[Array]:
    """The matrices of ``spec`` for ``n`` learners, checked; none where each step draws its own.

    Raises:
        InputError: an unknown form, or a number of learners that it does not allow; it names ``where``.
    """
    form = re.fullmatch(r"([^()]+)(?:\((.+)\))?", spec.replace(" ", ""))
    topology = topologies[form[1]] if form and form[1] in topologies else None
    parameters = list(inspect.signature(topology).parameters.values())[1:] if topology else []
    given = form[2].split(",", max(len(parameters) - 1, 0)) if form and form[2] else []
    needed = sum(p.default is p.empty for p in parameters)
    if topology is None or not needed <= len(given) <= len(parameters):
        known = f"{', '.join(forms())}, or a .csv, .txt or .npy file with an n × n matrix"
        raise InputError(f"{where}: '{spec}' is not known (allowed: {known})")
    try:
        arguments = (_argument(p, text) for p, text in zip(parameters, given, strict=False))
        found = [np.asarray(m, dtype=float) for m in topology(n, *arguments)]
        if topology is not random_matching:
            _check(found, n)
    except InputError as reason:
        raise InputError(f"{where}: '{spec}' is not allowed with {n} learners, {reason}") from None
    return found


def _argument(parameter: inspect.Parameter, text: str) -> int | float | str:
    kind = {"int": int, "float": float}.get(getattr(parameter.annotation, "__name__", parameter.annotation))
    try:
        return kind(text) if kind else text
    except ValueError:
        raise InputError(f"{parameter.name} must be a number, not '{text}'") from None


def _check(found: list[Array], n: int) -> None:
    """InputError unless ``found`` are mixing matrices: those of a plugin may be anything."""
    if not found or any(m.shape != (n, n) or not np.isfinite(m).all() or m.min() < 0 for m in found):
        raise InputError(f"it must give matrices ({n}, {n}) of finite numbers ≥ 0")
    if max(np.abs(m.sum(axis) - 1).max() for m in found for axis in (0, 1)) > _ROUNDING:
        raise InputError("it must give matrices whose rows and columns sum to 1 (doubly stochastic)")
    if len(found) > 1:
        shift = (np.arange(n)[:, None] - np.arange(n)) % n  # equal along a diagonal of a circulant matrix
        if any(np.abs(m - m[shift, 0]).max() > _ROUNDING for m in found):
            raise InputError("it must give one matrix, or circulant ones, which share their modes")


def _powers(n: int) -> list[int]:
    """1, 2, 4, … below n."""
    return [2**i for i in range(math.ceil(math.log2(n)))]


def _equal(n: int, offsets: list[Array | int]) -> Array:
    """M with equal weights: learner j takes from j + each of ``offsets``, each source counted once."""
    m, learners = np.zeros((n, n)), np.arange(n)
    for offset in offsets:
        m[learners, (learners + offset) % n] = 1.0
    m /= m.sum(1, keepdims=True)
    return m
