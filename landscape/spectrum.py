"""Trace and density of the Hessian's spectrum by random probes, with error bars; all of it in one result."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape import second_opinion
from landscape.batchnorm import has_batchnorm
from landscape.eigenvalues import Products, eigenpairs, exact_products, start_vector, top_eigenvalues
from landscape.evaluate import Progress
from landscape.hessian import Part
from landscape.krylov import BASIS_BYTES, negligible, orthogonalise, small_eigh
from landscape.lanczos import MAX_PRODUCTS, TOL, follow
from landscape.options import InputError, choose, positive
from landscape.problem import Problem
from landscape.store import About, Array, Result

# A third of these are the samples behind the standard error, which 20 give to about 16% (ours).
TRACE_PRODUCTS = 60
# Ghorbani, Krishnan and Xiao 2019 use 10 probes of 80 to 90 steps for networks of all sizes.
PROBES = 10
STEPS = 80
# Vectors of a trace's products at once: on 2 cores more are no faster.
BLOCK = 8
# Width of a drawn density's Gaussians, as a share of the range of the nodes (ours; as fine as a plot shows).
BROADENING = 0.01


@dataclass(frozen=True)
class Trace:
    """An estimate of tr H, its standard error, and the Hessian-vector products it took."""

    value: float
    standard_error: float
    hvps: int


def signs(size: int, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """(count, size) random signs ±1, drawn on the CPU so that a seed gives the same on every device."""
    draw = torch.randint(2, (count, size), dtype=torch.int8, generator=generator)
    return draw.to(like).mul_(2).sub_(1)


def hutchpp(
    operator: Products,
    like: Tensor,
    *,
    products: int = TRACE_PRODUCTS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """tr A of a symmetric operator on vectors like ``like`` (P,): Hutch++ (Meyer et al. 2021, Algorithm 1).

    A third of the products finds an orthonormal basis Q of the range of AS, S random signs; a third gives
    tr(QᵀAQ) exactly; the rest samples g ↦ gᵀ(I − QQᵀ)A(I − QQᵀ)g, whose mean is what is left of the trace.
    The estimate is unbiased, and its standard error is that of the mean of these samples. InputError for
    fewer than 6 products, which would leave less than 2 samples. ``operator`` takes (k, P), k at most 8.
    """
    positive("products", products, least=6)
    generator = torch.Generator().manual_seed(seed)
    size = len(like)
    rank = min(products // 3, size)
    report = progress or (lambda share: None)
    done = 0

    def each(rows: Tensor) -> Tensor:
        nonlocal done
        images = []
        for block in torch.split(rows, BLOCK):
            images.append(operator(block))
            done += len(block)
            report(min(1.0, done / products))
        return torch.cat(images)

    q = torch.linalg.qr(each(signs(size, rank, generator, like)).T)[0].T.contiguous()  # (rank, P), rows
    exact = float((q.double() * each(q).double()).sum())
    if rank == size:  # Q spans everything
        return Trace(exact, 0.0, done)
    g = signs(size, products - 2 * rank, generator, like)
    for _ in range(2):  # twice, as in Lanczos: once leaves rounding of the size of what was taken away
        g -= (g @ q.T) @ q
    samples = (g.double() * each(g).double()).sum(1)
    error = float(samples.std()) / len(samples) ** 0.5
    return Trace(exact + float(samples.mean()), error, done)


@dataclass(frozen=True)
class Density:
    """The spectral density of a P × P matrix, as nodes and weights (probes, steps) of one quadrature a probe.

    Each probe's weights sum to 1; a probe that exhausted its Krylov space early is filled up with nodes of
    weight 0. ``size`` is P, ``hvps`` the products.
    """

    nodes: Array
    weights: Array
    size: int
    hvps: int

    def moment(self, order: int) -> tuple[float, float]:
        """(estimate of tr(H^order)/P, its standard error over the probes; NaN for one probe)."""
        values = (self.weights * self.nodes**order).sum(1)
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        return float(values.mean()), float(error)

    def broadened(self, at: Array, width: float | None = None) -> Array:
        """The density at ``at`` (n,), each node a Gaussian of standard deviation ``width``; integrates to 1.

        Mean over the probes of Σ_i weight_i N(x; node_i, width²) (Ghorbani et al. 2019, Eq. 4). Default
        width: see :meth:`width`.
        """
        width = self.width() if width is None else width
        positive("width", width)
        total = np.zeros(len(at))
        for node, weight in zip(self.nodes.ravel(), self.weights.ravel(), strict=True):
            total += weight * np.exp(-0.5 * ((at - node) / width) ** 2)
        scaled: Array = total / (len(self.nodes) * width * np.sqrt(2 * np.pi))
        return scaled

    def width(self) -> float:
        """1% of the range of the nodes, or of the largest magnitude (or 1) where they are all one."""
        span = float(np.ptp(self.nodes))
        largest = float(np.abs(self.nodes).max())
        return BROADENING * (span if span > 1e-6 * largest else largest or 1.0)


def quadrature(
    products: Products,
    like: Tensor,
    *,
    probes: int = PROBES,
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """The density of a symmetric operator on vectors like ``like`` (P,), by stochastic Lanczos quadrature.

    Ubaru, Chen and Saad 2017, section 3. From each probe z of random signs, ``steps`` Lanczos steps with full
    reorthogonalisation give the Ritz values as nodes, and the squared first components of T's eigenvectors as
    weights: exact for zᵀp(A)z/P, p any polynomial of degree below 2·steps. ``products`` takes (k, P), the
    vectors of as many probes as fit in memory. InputError for a count below 1.
    """
    positive("probes", probes, least=1)
    positive("steps", steps, least=1)
    generator = torch.Generator().manual_seed(seed)
    size = len(like)
    steps = min(steps, size)
    at_once = max(1, min(probes, BASIS_BYTES // (steps * like.nbytes)))
    hvps = 0

    def counted(vectors: Tensor, running: list[int]) -> Tensor:
        nonlocal hvps
        hvps += len(vectors)
        if progress:
            progress(min(1.0, hvps / (probes * steps)))
        return products(vectors)

    found: list[tuple[Array, Array]] = []
    for i in range(0, probes, at_once):
        starts = [signs(size, 1, generator, like)[0] / size**0.5 for _ in range(min(at_once, probes - i))]
        found += follow([_probe(start, steps) for start in starts], counted, lambda: None)
    nodes, weights = (np.stack(part) for part in zip(*found, strict=True))
    return Density(nodes, weights, size, hvps)


def _probe(start: Tensor, steps: int) -> Generator[Tensor, Tensor, tuple[Array, Array]]:
    """Nodes and weights (steps,) of one probe; see :func:`landscape.lanczos.search` for what it yields."""
    vectors = start.new_zeros(steps, len(start))
    vectors[0] = start
    t = np.zeros((steps, steps))
    for j in range(steps):
        w = yield vectors[j]
        w, beta = orthogonalise(w, vectors, t, j)
        if j + 1 == steps or not beta < np.inf or negligible(beta, float(np.abs(t).max()), start.dtype):
            break
        vectors[j + 1] = w / beta
    values, s = small_eigh(t[: j + 1, : j + 1])
    nodes, weights = np.full(steps, values[0]), np.zeros(steps)
    nodes[: j + 1], weights[: j + 1] = values, s[0] ** 2
    return nodes, weights


def trace(
    problem: Problem,
    products: int = TRACE_PRODUCTS,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    engine: str = "landscape",
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """tr ∇²L(θ), θ (P,) by default the centre, from at most ``products`` products; see :func:`hutchpp`.

    ``kind``, ``part`` and ``randomness`` as in :class:`landscape.HessianOperator`. ``engine`` "pyhessian"
    asks that package instead: plain Hutchinson samples, one a product.
    """
    positive("products", products, least=6)
    h, size = exact_products(problem, theta, kind=kind, part=part, randomness=randomness)
    like = start_vector(problem, seed, size)
    if choose("engine", engine, second_opinion.ENGINES) == "pyhessian":
        second_opinion.check(problem, kind, part)
        samples = second_opinion.trace_samples(problem, theta, products=products, seed=seed)
        return Trace(float(samples.mean()), float(samples.std()) / products**0.5, products)
    return hutchpp(h, like, products=products, seed=seed, progress=progress)


def density(
    problem: Problem,
    probes: int = PROBES,
    steps: int = STEPS,
    *,
    theta: Tensor | None = None,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    seed: int = 0,
    progress: Progress | None = None,
) -> Density:
    """The spectral density of ∇²L(θ), θ (P,) by default the centre; see :func:`quadrature`.

    ``kind``, ``part`` and ``randomness`` as in :class:`landscape.HessianOperator`.
    """
    h, size = exact_products(problem, theta, kind=kind, part=part, randomness=randomness)
    like = start_vector(problem, seed, size)
    return quadrature(h, like, probes=probes, steps=steps, seed=seed, progress=progress)


@dataclass(frozen=True)
class Spectrum(Result):
    """What was asked about the spectrum of one Hessian, or of a block of ``parameters`` numbers.

    ``values`` and ``residuals`` (k,): eigenvalues, descending, of which the last ``lowest`` are the smallest
    there are and the others the largest. ``trace`` and ``trace_error`` (one standard error): NaN where not
    asked. ``nodes`` and ``weights`` (probes, steps) as in :class:`Density`: (0, 0) where not asked. ``hvps``
    counts all products. ``kind``, ``part`` (names, joined by commas; empty for all) and ``engine`` say how;
    ``batchnorm``, ``bn`` and ``bn_samples`` as in :class:`landscape.Surface`. ``bound_low``, ``bound_high``
    and ``verified``: as in :class:`landscape.Eigenpairs`; infinite in files older than these fields.
    """

    schema: ClassVar[str] = "landscape.spectrum"
    shapes: ClassVar[Mapping[str, str]] = {
        "values": "k",
        "residuals": "k",
        "nodes": "probes steps",
        "weights": "probes steps",
    }

    values: Array
    residuals: Array
    lowest: int
    converged: bool
    trace: float
    trace_error: float
    nodes: Array
    weights: Array
    parameters: int
    hvps: int
    kind: str
    part: str
    engine: str
    tol: float
    seed: int
    samples: int
    dtype: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""
    search: str = ""  # what the search multiplied with
    batchnorm: bool = False
    bn: str = "center"
    bn_samples: int = 0
    bound_low: float = -np.inf
    bound_high: float = np.inf
    verified: bool = False

    @property
    def density(self) -> Density | None:
        """The spectral density; None where it was not asked."""
        return Density(self.nodes, self.weights, self.parameters, self.hvps) if self.nodes.size else None


def spectrum(
    problem: Problem,
    top_k: int = 0,
    *,
    ends: bool = False,
    with_trace: bool = False,
    with_density: bool = False,
    kind: str = "hessian",
    part: Part = None,
    randomness: str = "refuse",
    engine: str = "landscape",
    search: str = "auto",
    tol: float = TOL,
    max_products: int = MAX_PRODUCTS,
    products: int = TRACE_PRODUCTS,
    probes: int = PROBES,
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress | None = None,
    **about: Unpack[About],
) -> Spectrum:
    """What is asked about the spectrum of ∇²L at the problem's centre, in one result that can be saved.

    Args:
        top_k: how many of the largest eigenvalues; ends: the smallest and the largest; both come from one
            Lanczos run. Both ends where nothing at all is asked.
        with_trace, with_density: see :func:`trace` (``products``), :func:`density` (``probes``, ``steps``).
        kind, part, randomness: see :class:`landscape.HessianOperator`.
        engine: "pyhessian" gives one eigenvalue, that of largest magnitude, and the trace; no more.
        tol, max_products, seed, search: see :func:`extreme_eigenvalues`. Trace and density are always exact.
        about: see :class:`landscape.store.About`; kept with the result.

    Raises InputError as these do.
    """
    positive("top_k", top_k, least=0)
    choose("engine", engine, second_opinion.ENGINES)
    outside = engine == "pyhessian"
    if not (top_k or ends or with_trace or with_density):
        top_k, ends = (1, False) if outside else (0, True)
    if outside and (ends or with_density):
        raise InputError(
            f"engine: 'pyhessian' is not allowed with {'ends' if ends else 'density'}, it gives "
            "the eigenvalue of largest magnitude (top_k=1) and the trace"
        )
    positive("tol", tol)
    of: dict[str, Any] = {"kind": kind, "part": part, "randomness": randomness}
    h, size = exact_products(problem, **of)
    start = start_vector(problem, seed, size)
    low, high = int(ends), max(top_k, int(ends))
    asked = {"pairs": high, "trace": with_trace, "density": with_density}
    stages = [name for name, wanted in asked.items() if wanted]

    def stage(name: str) -> Progress:
        place = stages.index(name)
        return lambda share: progress((place + share) / len(stages)) if progress else None

    pairs, traced, dense = None, Trace(np.nan, np.nan, 0), None
    if high:
        if outside:
            pairs = top_eigenvalues(
                problem, high, tol, engine=engine, max_products=max_products, seed=seed, **of
            )
        else:
            pairs = eigenpairs(
                problem, problem.theta[None], start, low=low, high=high, tol=tol,
                max_products=max_products, how=search, **of,
            )[0]  # fmt: skip
        stage("pairs")(1.0)
    if with_trace and outside:
        traced = trace(problem, products, engine=engine, seed=seed, **of)
    elif with_trace:
        traced = hutchpp(h, start, products=products, seed=seed, progress=stage("trace"))
    if with_density:
        dense = quadrature(h, start, probes=probes, steps=steps, seed=seed, progress=stage("density"))
    return Spectrum(
        values=pairs.values.numpy() if pairs else np.zeros(0),
        residuals=pairs.residuals.numpy() if pairs else np.zeros(0),
        lowest=low,
        converged=pairs.converged if pairs else True,
        trace=traced.value,
        trace_error=traced.standard_error,
        nodes=dense.nodes if dense else np.zeros((0, 0)),
        weights=dense.weights if dense else np.zeros((0, 0)),
        parameters=size,
        hvps=sum(found.hvps for found in (pairs, traced, dense) if found),
        kind=kind,
        part=",".join([part] if isinstance(part, str) else part or ()),
        engine=engine,
        search=pairs.search if pairs else "",
        tol=tol,
        seed=seed,
        samples=problem.samples,
        dtype=str(problem.dtype).removeprefix("torch."),
        batchnorm=has_batchnorm(problem.model),
        bn=problem.bn,
        bn_samples=problem.bn_samples,
        **dict(zip(("bound_low", "bound_high"), pairs.bounds if pairs else (-np.inf, np.inf), strict=True)),
        verified=pairs.verified if pairs else False,
        **about,
    )
