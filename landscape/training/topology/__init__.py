"""Topologies by name, which say who averages with whom, and mixing matrices.

A topology is a function from the number of learners n to a list of mixing matrices (n, n). A decorator adds
the function to the registry. A recipe writes the arguments after n in brackets: ``ring(2)``. A single matrix
serves every step; the steps use several matrices in turn. The function's docstring begins with the forms that
a user may write. The function refuses an n by an InputError with the reason.

M is doubly stochastic; row j has the weights that learner j uses.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, get_args

import numpy as np

from landscape.core import registry
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.files import open_regular
from landscape.core.hdf5 import Array
from landscape.core.options import Count, UpToOne, checked, ends_in, fit, type_hints
from landscape.core.progress import ProgressOption, reporter, shows_progress
from landscape.limits import first_unstable

# Row and column sums of a topology miss 1 by rounding only.
_ROUNDING = 1e-9


@registry.topologies.add("full")
def full(n: int) -> list[Array]:
    """full: M = 11ᵀ/n, the average of all."""
    return [np.full((n, n), 1 / n)]


@registry.topologies.add("ring")
def ring(n: int, k: Count) -> list[Array]:
    """ring(k): k neighbors on either side."""
    if 2 * k + 1 > n:
        raise InputError(f"k must be 1…{(n - 1) // 2}" if n > 2 else "a ring needs at least 3")
    return [equal_weights(n, [0, *range(1, k + 1), *range(-k, 0)])]


@registry.topologies.add("torus")
def torus(n: int, size: str = "") -> list[Array]:
    """torus, torus(RxC): the four neighbors on an R × C grid that wraps round; by default the squarest."""
    rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    columns = n // rows
    if size:
        sides = re.fullmatch(r"(\d+)x(\d+)", size)
        if not sides:
            raise InputError("torus(RxC) needs numbers of rows and columns, such as torus(2x3)")
        rows, columns = map(int, sides.groups())
    if min(rows, columns) < 2 or rows * columns != n:
        raise InputError(f"{n} is not {size or 'R × C'}, both must be at least 2")
    i, j = np.divmod(np.arange(n), columns)
    offsets: list[Array | int] = []
    for down, right in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
        neighbors = (i + down) % rows * columns + (j + right) % columns
        offsets.append(neighbors - np.arange(n))
    return [equal_weights(n, offsets)]


@registry.topologies.add("exponential")
def exponential(n: int) -> list[Array]:
    """exponential: learner j takes from learners j + 1, j + 2, j + 4, … (Ying et al. 2021)."""
    return [equal_weights(n, [0, *_powers(n)])]


@registry.topologies.add("one-peer-exponential")
def one_peer_exponential(n: int) -> list[Array]:
    """one-peer-exponential: half from learner j + 2^((t−1) mod ⌈log₂ n⌉) at step t (Ying et al. 2021).

    If n is a power of two, the weights are averaged exactly after ⌈log₂ n⌉ steps; otherwise never.
    """
    return [equal_weights(n, [0, p]) for p in _powers(n)] or [np.ones((1, 1))]


@registry.topologies.add("hypercube")
def hypercube(n: int) -> list[Array]:
    """hypercube: from the learners whose numbers differ from j in one bit."""
    powers = _powers(n)
    if n != 2 ** len(powers):
        below = 2 ** (len(powers) - 1)
        raise InputError(f"there must be a power of two, such as {below} or {2 * below}")
    learners = np.arange(n)
    return [equal_weights(n, [0, *((learners ^ p) - learners for p in powers)])]


@registry.topologies.add("random-matching")
def random_matching(n: int) -> list[Array]:
    """random-matching: pairs drawn anew for every step; each pair averages, an odd learner sits out.

    All processes draw equal pairs (DPSGD-2020, section 4: "a learner randomly picks a neighbor"). The list of
    matrices is empty: :meth:`.Mixing.matrix` draws a matrix for each step.
    """
    return []


@registry.topologies.add("star")
def star(n: int) -> list[Array]:
    """star: learner 0 with all others, by Metropolis–Hastings weights 1/(1 + max(deg j, deg k)) = 1/n."""
    m = np.eye(n) * (1 - 1 / n)
    m[0, :] = m[:, 0] = 1 / n
    return [m]


@registry.topologies.add("nodes")
def nodes(n: int, k: Count) -> list[Array]:
    """nodes(k): k nodes of n/k learners each, which average within their node."""
    if n % k:
        raise InputError("their number must be divisible by k")
    return [np.kron(np.eye(k), np.full((n // k, n // k), k / n))]


@registry.topologies.add("lazy")
def lazy(n: int, a: UpToOne, form: str) -> list[Array]:
    """lazy(a, FORM): (1 − a)I + aM, M another named form: an eigenvalue ω becomes 1 − a(1 − ω).

    So the spectral gap and ω_min can be chosen apart.
    """
    inner = [] if form.startswith("lazy") else matrices(form, n, "FORM")
    if not inner:
        raise InputError("FORM", form, allowed="a named mixing, not drawn and not lazy, such as ring(1)")
    return [(1 - a) * np.eye(n) + a * m for m in inner]


def forms() -> list[str]:
    """Return the forms that a user may write, one text for each topology: "ring(k)"."""
    docs = {
        name: (inspect.getdoc(registry.topologies[name]) or "").partition(":")[0]
        for name in registry.topologies
    }
    # A plugin's docstring may not begin with a form.
    return [doc if doc.startswith(name) else name for name, doc in docs.items()]


def matrices(spec: str, n: int, where: str) -> list[Array]:
    """Return the checked mixing matrices of ``spec`` for ``n`` learners, which the steps use in turn.

    The list is empty if each step draws a matrix.

    Args:
        spec: NAME or NAME(VALUE, …), such as "full" or "ring(1)".
        n: the number of learners.
        where: the name of the option that contains ``spec``; messages begin with this name.

    Raises:
        InputError: an unknown form, or a value or a number of learners that the topology does not allow.
    """
    match = re.fullmatch(r"(?P<name>[^()]+)(\((?P<values>.+)\))?", spec.replace(" ", ""))
    name, values_text = match.group("name", "values") if match else ("", "")
    is_registered = name in registry.topologies
    topology: Any = registry.topologies[name] if is_registered else None
    # Without the first parameter, n.
    parameters = list(inspect.signature(topology).parameters.values())[1:] if is_registered else []
    max_splits = max(len(parameters) - 1, 0)  # the last value may contain commas, as in lazy(0.5, FORM)
    texts = values_text.split(",", max_splits) if values_text else []
    required = sum(parameter.default is parameter.empty for parameter in parameters)
    if not is_registered or not required <= len(texts) <= len(parameters):
        # A user may also give a file. The callers of this function read files; only the message is here.
        allowed = f"{', '.join(forms())}, or a .csv, .txt or .npy file with an n × n matrix"
        raise InputError(f"{where}: '{spec}' is not known (allowed: {allowed})")
    try:
        hints = type_hints(topology, bounds=True)
        values = []
        for parameter, text in zip(parameters, texts, strict=False):  # the last parameters may have defaults
            values.append(_parsed_value(parameter.name, text, hints.get(parameter.name, Any)))
        # ``axes``: the sums of the rows (axis 1) and of the columns (axis 0) must be 1.
        cycle = [_checked_matrix(m, n, axes=(1, 0), tolerance=_ROUNDING) for m in topology(n, *values)]
        if not cycle and topology is not random_matching:  # random matching draws a matrix for each step
            raise InputError("it must return at least one matrix")  # gets its beginning in ``except``
    except LandscapeError as reason:
        raise InputError(f"{where}: '{spec}' is not allowed with {n} learners, {reason}") from None
    return cycle


def _parsed_value(name: str, text: str, hint: Any) -> Any:
    """Return the value of ``text`` for the parameter ``name``, checked against its annotation."""
    kind: Any = next((kind for kind in (int, float) if kind in (hint, *get_args(hint))), str)
    try:
        value = kind(text)
    except ValueError:
        value = text
    return fit(name, value, hint)


def _checked_matrix(matrix: Any, n: int, axes: tuple[int, ...], tolerance: float) -> Array:
    """Return ``matrix`` in float64; InputError unless it is (n, n), ≥ 0, and sums to 1 along ``axes``.

    Plugins and files may return any object as ``matrix``.
    """
    if np.shape(matrix) != (n, n):
        raise InputError(f"it is a {np.shape(matrix)} matrix, {n} learners need ({n}, {n})")
    m = np.asarray(matrix, dtype=float)
    if not (np.isfinite(m).all() and m.min() >= 0):
        raise InputError(f"{m.min()} is in it, every entry must be finite and ≥ 0")
    for axis in axes:
        sums = m.sum(axis)
        worst = int(np.argmax(np.abs(sums - 1)))
        if abs(sums[worst] - 1) > tolerance:
            line = "row" if axis == 1 else "column"
            needed = "doubly" if len(axes) > 1 else "column"
            raise InputError(f"{line} {worst + 1} sums to {sums[worst]:.6g}, it must be {needed} stochastic")
    return m


def _powers(n: int) -> list[int]:
    """Return 1, 2, 4, … below n."""
    return [2**i for i in range(math.ceil(math.log2(n)))]


def equal_weights(n: int, offsets: list[Array | int]) -> Array:
    """Return M with equal weights from learners j + offset to j for all ``offsets``; sources count once."""
    m = np.zeros((n, n))
    learners = np.arange(n)
    for offset in offsets:
        m[learners, (learners + offset) % n] = 1.0
    return m / m.sum(1, keepdims=True)


# The largest error of row and column sums (our choice: a matrix typed with four decimals passes).
SUM_TOLERANCE = 1e-4
# The largest number of learners of a matrix, and its largest file (our choice: 128 MiB in memory).
MAX_LEARNERS, MAX_FILE_BYTES = 4096, 1 << 27
_MATRICES: ContextVar[dict[str, Array] | None] = ContextVar("matrices", default=None)


@contextlib.contextmanager
def stored_matrices(matrices: dict[str, Array]) -> Iterator[None]:
    """Use ``matrices``, file name -> matrix, inside the block in place of the files.

    The matrix of any other file is added to ``matrices``, so that a run keeps its initial matrix when the
    file changes.
    """
    token = _MATRICES.set(matrices)
    try:
        yield
    finally:
        _MATRICES.reset(token)


class Mixing:
    """The mixing of n learners: a fixed matrix, a cycle of matrices, or one drawn for every step.

    ``spec`` is a topology by name such as ring(2), or a .csv, .txt or .npy file with a doubly stochastic
    n × n matrix.

    Args:
        spec: a topology, or the file of a matrix.
        learners: the number n of learners.
        seed: the seed of random matchings.
        where: the name of the option that contains ``spec``; messages begin with this name.

    Raises:
        InputError: for a spec or matrix that is not allowed with n learners.
        OperationError: for a file that cannot be read as a matrix.

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
            raise InputError(f"{where}: '{spec}' is not allowed with {learners} learners, > {MAX_LEARNERS:,}")
        self.spec, self.learners, self.seed = spec, learners, seed
        #: The matrices (n, n) float64 that the steps use in turn; none if each step draws its own.
        self.cycle: list[Array] = (
            [read_matrix(where, Path(spec), learners)] if is_file(spec) else matrices(spec, learners, where)
        )

    def matrix(self, step: int) -> Array:
        """Return the mixing matrix (n, n) of this step, counted from 1, in float64."""
        if self.cycle:
            return self.cycle[(step - 1) % len(self.cycle)]
        import torch  # only here, as properties of the topologies need none

        from landscape.training.run import generator

        order = torch.randperm(self.learners, generator=generator(self.seed, "mixing", step)).numpy()
        even = self.learners // 2 * 2
        a, b = order[:even].reshape(-1, 2).T  # learners a[i] and b[i] are a pair
        m = np.eye(self.learners)
        m[a, a] = m[b, b] = m[a, b] = m[b, a] = 0.5
        return m

    @cached_property
    def modes(self) -> Array:
        """Return the complex eigenvalues ω (τ, n − 1) of the cycle's τ matrices, without the mean's, 1.

        A column belongs to one mode if the matrices share their modes, as circulant matrices do
        (:attr:`shares_modes`); otherwise a column has no meaning. For random matching they are the
        eigenvalues of the mean of M_t.
        """
        if self.learners == 1:
            return np.empty((max(1, len(self.cycle)), 0), dtype=complex)
        if len(self.cycle) > 1 and self.shares_modes:
            return np.array([np.fft.fft(m[:, 0])[1:] for m in self.cycle])
        if not self.cycle:  # of the mean: two learners meet with probability 2⌊n/2⌋/(n(n − 1))
            count = self.learners - 1
            return np.full((1, count), 1 - self.learners // 2 / count, dtype=complex)
        modes = []
        for m in self.cycle:
            eigenvalues = np.linalg.eigvalsh(m) if np.array_equal(m, m.T) else np.linalg.eigvals(m)
            modes.append(np.delete(eigenvalues, np.argmin(np.abs(eigenvalues - 1))))
        return np.array(modes, dtype=complex)

    @cached_property
    def shares_modes(self) -> bool:
        """Return whether the matrices of the cycle have the same modes, as one matrix or circulant ones."""
        n = self.learners
        if len(self.cycle) < 2:
            return True
        # Entry (i, j) of a circulant matrix equals entry ((i − j) mod n, 0).
        shift = (np.arange(n)[:, None] - np.arange(n)) % n
        return all(np.abs(m - m[shift, 0]).max() <= _ROUNDING for m in self.cycle)

    def _growth(self, x: float) -> float:
        """Return the spectral radius of Π_t (M_t − x) over a cycle, on the subspace of vectors of mean 0."""
        if self.shares_modes:
            return float(np.abs(self.modes - x).prod(0).max(initial=0))
        identity = np.eye(self.learners)
        product = identity - 1 / self.learners
        for m in self.cycle:
            product = (m - x * identity) @ product
        return float(np.abs(np.linalg.eigvals(product)).max())

    @property
    def rounds(self) -> int | None:
        """The first step of the cycle that leaves all weights at the mean, to 1e-12; None: no such step."""
        product = np.eye(self.learners)
        for step, m in enumerate(self.cycle, 1):
            product = m @ product
            if np.abs(product - 1 / self.learners).max() < 1e-12:
                return step
        return None

    @property
    def gap(self) -> float:
        """1 − max |ω|: the least share of the disagreement that a step takes away.

        For a cycle: per step, from the product of its matrices. For random matching: of the mean of M_t.
        """
        slowest = round(self._growth(0.0), 12)  # before the root: 0 stays 0
        return round(1 - math.pow(slowest, 1 / max(1, len(self.cycle))), 12)

    @property
    def omega_min(self) -> float:
        """The smallest real part of an eigenvalue of any M_t; 0 for random matching (projections)."""
        if not self.cycle:
            return 0.0 if self.learners > 1 else 1.0
        return round(float(self.modes.real.min(initial=1)), 12) + 0.0

    @property
    def stability_limit(self) -> float:
        """The ηλ at which learners that take plain steps on one quadratic, in AWC order, drift apart.

        A mode evolves by ω − ηλ, so the limit is min Re ω + √(1 − (Im ω)²): 1 + ω_min for symmetric M
        (docs/explanation/stability.md). For a cycle, the limit is the first ηλ at which the product over the
        cycle reaches modulus 1. For random matching, the limit is one in mean square. M_t are projections,
        so E(M − ηλ)² = (1 − 2ηλ) E M + (ηλ)², and the limit is ρ + √(ρ² − ρ + 1), ρ the eigenvalue of E M.
        Below 1 + ω_min = 1 no sequence of matchings grows. For one learner the limit is SGD's 2.
        """
        if self.learners == 1:
            return 2.0
        if not self.cycle:
            rho = float(self.modes.real[0, 0])
            return rho + math.sqrt(rho**2 - rho + 1)
        if len(self.cycle) == 1:
            limits = self.modes.real + np.sqrt(np.maximum(0, 1 - self.modes.imag**2))
            return round(float(limits.min()), 12)
        points = 2010 if self.shares_modes else 201  # fewer where each point takes an eigenvalue problem
        return first_unstable(self._growth, 2.01, points)

    def degree(self, step: int) -> float:
        """Return the number of vectors that a learner sends at ``step``, the mean over the learners.

        A learner sends one vector to each neighbor; an average of all is an all-reduce, 2(n − 1)/n vectors.
        """
        if not self.cycle:  # every learner but an odd one has a partner, whatever matrix is drawn
            return self.learners // 2 * 2 / self.learners
        m = self.matrix(step)
        if averages_all(m):
            return 2 * (self.learners - 1) / self.learners
        return (np.count_nonzero(m) - np.count_nonzero(np.diag(m))) / self.learners

    def describe(self) -> str:
        """Return one line: the gap and ω_min."""
        gap = omega = ""
        if not self.cycle:
            gap, omega = " of the mean of M_t", " of each M_t"
        elif len(self.cycle) > 1:
            gap = f" a step over a cycle of {len(self.cycle)}"
        words = f"mixing {self.spec}: spectral gap {self.gap:.4g}{gap}"
        return f"{words}, smallest eigenvalue ω_min {self.omega_min:.4g}{omega}"


def averages_all(matrix: Array) -> bool:
    """Return whether ``matrix`` (n, n) needs an all-reduce: all entries are equal.

    Two learners rather exchange their vectors: the traffic is the same, and the work is less.
    """
    return len(matrix) > 2 and np.ptp(matrix) == 0


def is_file(spec: object) -> bool:
    """Return whether ``spec`` names the file of a matrix."""
    return isinstance(spec, str) and Path(spec).suffix in (".csv", ".txt", ".npy")


def read_matrix(where: str, path: Path, n: int, axes: tuple[int, ...] = (1, 0)) -> Array:
    """Return the n × n matrix in ``path``, which must sum to 1 along ``axes``: 1 for rows, 0 for columns.

    ``where`` is the option that names the file. Raises OperationError for a file that cannot be read, and
    InputError for a matrix that is not allowed.
    """
    matrices = _MATRICES.get()
    m = matrices[str(path)] if matrices and str(path) in matrices else _numbers(where, path)
    try:
        m = _checked_matrix(m, n, axes, SUM_TOLERANCE)
    except InputError as reason:
        raise InputError(f"{where}: {path}: {reason}") from None
    if max(np.abs(m.sum(axis) - 1).max() for axis in axes) > 1e-12:
        for _ in range(100):  # Sinkhorn's scaling removes what few decimals in the file leave
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
                m = np.lib.format.open_memmap(path, mode="r")  # no memory is used before the shape is checked
                if m.dtype.kind not in "fiub":
                    raise ValueError("it holds no array of numbers")
                return m
            with io.TextIOWrapper(file, encoding="utf-8") as lines:
                return np.loadtxt(lines, delimiter="," if path.suffix == ".csv" else None, ndmin=2)
    except Exception as error:  # numpy raises whatever a damaged header makes Python raise
        words = " ".join(str(error).split())[:120]
        raise OperationError(f"{where}: {path} cannot be read as a matrix ({words})") from error


#: In the default list: one example of each topology that needs a number, besides rings (our choice).
EXAMPLES = ("k-peer-exponential(2)", "hyper-hypercube(2)", "base(2)", "d-equistatic(4)", "u-equistatic(4)")


class Properties(TypedDict):
    """The numbers of a topology, see :func:`topologies`."""

    gap: float
    omega_min: float
    limit: float
    rounds: int | None
    bytes: float


@checked()
@shows_progress()
def topologies(
    mixings: Iterable[str] | None = None,
    *,
    learners: Count = 8,
    parameters: Count = 1_000_000,
    picture: str | Path | None = None,
    progress: ProgressOption = None,
) -> dict[str, Properties]:
    """Compare the topologies for a number of learners.

    Args:
        mixings: values of ``algorithm.mixing``, such as "ring(2)", "base" or a file. Default: every topology
            that this number of learners allows, with example numbers where a topology needs one.
        learners: the number of learners n.
        parameters: the number of the network's parameters, 4 bytes each.
        picture: a .png, .pdf or .svg file for a picture of the topologies as graphs. Each of the first eight
            steps of a cycle has a panel; random matching has three panels, drawn with seed 0.
        progress: True (show), False (hide), None (show after 2 s), or a function that takes the share done.

    Returns:
        Mixing -> its numbers. "gap": the spectral gap of the mixing matrix; for a cycle of matrices, the gap
        per step. "omega_min": the smallest eigenvalue of all matrices. "limit": the largest stable ηλ of
        DPSGD without momentum, in the order AWC (adapt with combine). "rounds": the number of steps after
        which all learners have exactly the average; None: they never have. "bytes": the mean number of bytes
        that a learner sends in a step.

    Raises:
        InputError: a mixing that is unknown or not allowed with this number of learners; ``learners`` or
            ``parameters`` below 1; ``picture`` with another ending, or without a mixing to draw.

    Example:
        >>> numbers = topologies(["ring(1)", "base"], learners=6)
        >>> round(numbers["ring(1)"]["limit"], 4), numbers["ring(1)"]["rounds"], numbers["base"]["rounds"]
        (0.6667, None, 4)
    """
    if picture is not None:
        from landscape import plots  # here, because it imports matplotlib, which takes time
        from landscape.plots.tables import draw_topologies

        ends_in("picture", picture, plots.FORMATS)
    properties: dict[str, Properties] = {}
    graphs: dict[str, list[Array]] = {}
    specs = default_mixings() if mixings is None else [*mixings]
    show_progress = reporter(progress)
    for done, spec in enumerate(specs):
        show_progress(done / len(specs))
        try:
            mixing = Mixing(spec, learners, seed=0, where="mixings")
        except InputError:
            if mixings is not None:
                raise
            continue  # a default mixing that this number of learners does not allow
        period = max(1, len(mixing.cycle))  # random matching has no cycle; each step sends equally much
        vectors_per_step = np.mean([mixing.degree(step) for step in range(1, period + 1)])
        properties[spec] = {
            "gap": mixing.gap,
            "omega_min": mixing.omega_min,
            "limit": mixing.stability_limit,
            "rounds": mixing.rounds,
            "bytes": 4 * parameters * float(vectors_per_step),
        }
        if picture is not None:
            graphs[spec] = mixing.cycle or [mixing.matrix(step) for step in (1, 2, 3)]
    if picture is not None:
        if not graphs:
            raise InputError("mixings: there must be at least one to draw in the picture")
        plots.save_figure(draw_topologies(graphs), picture)
    return properties


def default_mixings() -> list[str]:
    """Return the default mixings of :func:`topologies`: names without numbers, rings, and EXAMPLES."""
    full_name, *bare_names = [
        spec for form in forms() for spec in form.split(", ") if spec in registry.topologies
    ]
    return [full_name, "ring(1)", "ring(2)", *bare_names, *EXAMPLES]
