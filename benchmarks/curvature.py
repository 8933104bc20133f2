"""Curvature of a trained MNIST network: eigenvalues against general-purpose solvers, products for 5%."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
import warnings
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

import landscape
from benchmarks.harness import DEVICE, SMOKE, compare, few, installed, judged, mnist_problem, say
from landscape.core.memory import peak_memory
from landscape.curvature.search import start_vector
from landscape.evaluation import needs
from tests.nets import GPT2

TOL = 1e-2
STEPS = 300
# Batch sharpness to a standard error of 5%: within so many products, in the median over so many seeds.
PRODUCTS, SEEDS = 60, few(5, 1)
# Of both ends of a GPT-2 of 124 million parameters: products, and bytes of the process.
LARGE_PRODUCTS, LIMIT = 40, 12 * 2**30


def main() -> None:
    problem = mnist_problem(STEPS)
    both_ends(problem)
    grid(problem)
    top_five(problem)
    top_and_trace(problem)
    by_differences()
    batch_sharpness()
    averages(problem)


def both_ends(problem: landscape.Problem) -> None:
    assert problem.tensors is not None
    x, y = problem.tensors
    parameters = list(problem.model.parameters())
    size = len(problem.weights)
    found: dict[str, list[np.ndarray]] = {"ours": [], "arpack": []}
    products = 0
    seeds = {name: itertools.count() for name in found}  # each round another start, the same for both

    def product(v: np.ndarray) -> np.ndarray:
        """Double backward over the full batch, graph and all anew: what one would write."""
        nonlocal products
        products += 1
        loss = problem.criterion(problem.model(x), y)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])
        vector = torch.from_numpy(v.ravel()).to(gradient)
        parts = torch.autograd.grad(gradient @ vector, parameters)
        return torch.cat([g.flatten() for g in parts]).cpu().numpy()

    def ours() -> None:
        ends = landscape.extreme_eigenvalues(problem, residual_tol=TOL, seed=next(seeds["ours"]))
        assert ends.converged
        line = [ends.min, ends.max, ends.residual_min, ends.residual_max, ends.products]
        found["ours"].append(np.array(line))

    def arpack() -> None:
        nonlocal products
        products = 0
        operator = LinearOperator((size, size), matvec=product, dtype=np.float32)
        start = start_vector(problem, next(seeds["arpack"])).cpu().numpy()
        values, vectors = eigsh(operator, k=2, which="BE", tol=TOL, v0=start)
        count = products
        residuals = [np.linalg.norm(product(v) - x * v) for x, v in zip(values, vectors.T, strict=True)]
        found["arpack"].append(np.array([*values, *residuals, count]))

    compare(
        "both ends, trained 784-50-50-10, 10,000 images, against ARPACK over double backward",
        ours, arpack, rounds=5, need=10.0,
    )  # fmt: skip
    for name, lines in found.items():
        for low, high, residual_low, residual_high, count in lines[1:]:
            say(
                f"  {name}: λ_min {low:.5f} (relative residual {residual_low / abs(low):.1e}), "
                f"λ_max {high:.5f} ({residual_high / abs(high):.1e}), {count:.0f} products"
            )


def grid(problem: landscape.Problem) -> None:
    """16 points against 16 times one: at most 12 points' worth is wanted."""
    plane = landscape.random_plane(problem)
    compare(
        "hessian-grid, 4 × 4 points, against 16 times one point",
        lambda: landscape.hessian_grid(problem, plane, residual_tol=TOL),
        lambda: landscape.extreme_eigenvalues(problem, residual_tol=TOL),
        rounds=3, need=16 / 12, work=16,
    )  # fmt: skip


def top_five(problem: landscape.Problem) -> None:
    if (peer := installed("hessian_eigenthings")) is None:
        return
    loss = peer.supervised_loss(problem.criterion)
    theirs = peer.HessianOperator(problem.model, [problem.tensors], loss)
    check = landscape.HessianOperator(problem)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def worst(values: torch.Tensor, vectors: torch.Tensor) -> float:
        """The largest residual relative to its eigenvalue, by the same products for both."""
        pairs = zip(values.tolist(), vectors, strict=True)
        return max(float((check(v) - x * v).norm()) / abs(x) for x, v in pairs)

    def ours() -> None:
        pairs = landscape.top_eigenvalues(problem, 5, residual_tol=TOL)
        assert pairs.converged
        found["ours"] = torch.from_numpy(pairs.values), torch.from_numpy(pairs.vectors).to(DEVICE)

    def lanczos(steps: int) -> None:
        pairs = peer.lanczos(theirs, k=5, max_iter=steps, tol=TOL, which="LA", reorthogonalize=True, seed=0)
        found["peer"] = pairs.eigenvalues, pairs.eigenvectors

    # It takes a fixed number of steps: it is given the fewest that meet the tolerance, found beforehand.
    for steps in range(6, 200):
        lanczos(steps)
        if worst(*found["peer"]) <= TOL:
            break

    def checked() -> None:
        """Ours comes with residuals; so the peer's, by its own products."""
        lanczos(steps)
        values, vectors = found["peer"]
        for x, v in zip(values.tolist(), vectors, strict=True):
            float((theirs.matvec(v) - x * v).norm())

    title = f"top 5, 10,000 images, against hessian_eigenthings in its fewest {steps} steps"
    compare(f"{title} and 5 products for the residuals", ours, checked, rounds=5, need=2.0)
    compare(f"{title}, without residuals", ours, lambda: lanczos(steps), rounds=5, need=1.0)
    for name, (values, vectors) in found.items():
        shown = ", ".join(f"{value:.4f}" for value in values.tolist())
        say(f"  {name}: {shown}; largest relative residual {worst(values, vectors):.1e}")


def top_and_trace(problem: landscape.Problem) -> None:
    """The top eigenvalue at a residual of 1%, and the trace at an equal number of products."""
    if (peer := installed("pyhessian")) is None:
        return
    check = landscape.HessianOperator(problem)
    found: dict[str, str] = {}

    def ask() -> Any:
        return peer.hessian(
            problem.model, problem.criterion, data=problem.tensors, cuda=DEVICE.type == "cuda"
        )

    def top() -> None:
        pair = landscape.top_eigenvalues(problem, 1, residual_tol=TOL)
        found["ours"] = f"{pair.values[0]:.4f}, relative residual {pair.residuals[0] / pair.values[0]:.1e}"

    def power(tol: float) -> float:
        torch.manual_seed(0)
        values, vectors = ask().eigenvalues(maxIter=1000, tol=tol)
        v = torch.cat([part.flatten() for part in vectors[0]])
        residual = float((check(v) - values[0] * v).norm()) / abs(values[0])
        found["pyhessian"] = f"{values[0]:.4f}, relative residual {residual:.1e}"
        return residual

    def trace() -> None:
        value = landscape.trace(problem, 60)
        found["ours"] = f"{value.value:.2f} ± {value.standard_error:.2f}"

    def samples() -> None:
        drawn = np.array(ask().trace(maxIter=60, tol=0.0))
        found["pyhessian"] = f"{drawn.mean():.2f} ± {drawn.std(ddof=1) / len(drawn) ** 0.5:.2f}"

    with warnings.catch_warnings(action="ignore"):  # its backward(create_graph=True)
        # It stops on how little the value moves: it is given the first tolerance that leads to the residual.
        tol = next(t for t in (1e-3, 1e-4, 1e-5, 1e-6, 0.0) if power(t) <= TOL or t == 0.0)
        rows = (
            (f"top eigenvalue, pyhessian's tol {tol:g}", top, lambda: power(tol)),
            ("trace, 60 products", trace, samples),
        )
        for title, ours, theirs in rows:
            compare(f"{title}, against pyhessian", ours, theirs, rounds=3, need=1.0)
            for name, text in found.items():
                say(f"  {name}: {text}")


def by_differences() -> None:
    """Differences of gradients against exact products: one product, and λ_max at a residual of 1%.

    ReLU has kinks within the steps of float32, so that its gradients are taken in float64.
    """
    for activation in ("tanh", "relu"):
        problem = mnist_problem(STEPS, activation=activation)
        h = {by: landscape.HessianOperator(problem, derivatives=by) for by in ("differences", "exact")}
        v, found = start_vector(problem, 0), dict[str, str]()

        def top(by: str, problem: landscape.Problem = problem, found: dict[str, str] = found) -> None:
            pair = landscape.top_eigenvalues(problem, 1, residual_tol=TOL, derivatives=by)
            assert pair.converged
            residual = pair.residuals[0] / pair.values[0]
            found[by] = f"{pair.values[0]:.4f}, relative residual {residual:.1e}, {pair.products} products"

        product, pair = (
            [functools.partial(one, by) for by in h] for one in (lambda by, h=h, v=v: h[by](v), top)
        )
        title = f"{h['differences'].arithmetic}, {activation}, 10,000 images, against exact products"
        compare(f"a product by {title}", *product, rounds=9, need=0.15)
        compare(f"the largest eigenvalue by {title}", *pair, rounds=3, need=0.05)
        for by, text in found.items():
            say(f"  {by}: {text}")


def batch_sharpness() -> None:
    """Products until the relative standard error is 5%, at several batches; the share that PRODUCTS suffice."""
    problem = mnist_problem(STEPS, split="train")
    for batch in (1000,) if SMOKE else (16, 64, 256, 1000, 1998):
        found = [
            landscape.batch_sharpness(problem, batch, relative_error=0.05, quantities=(), seed=seed)
            for seed in range(SEEDS)
        ]
        products = [len(result.curvature) for result in found]
        reached = max(result.standard_error / abs(result.value) for result in found)
        median = float(np.median(products))
        say(
            f"batch sharpness to 5%, trained 784-50-50-10, batch {batch}: {median:.0f} products (seeds "
            f"{min(products)}…{max(products)}; needed {PRODUCTS}: {judged(median, PRODUCTS, most=True)}), "
            f"largest relative standard error {100 * reached:.1f}%"
        )


def averages(problem: landscape.Problem) -> None:
    """All uniform averages of eight members: predicted from eight gradients and products, against evaluated."""
    noise = torch.randn(8, problem.layout.size, generator=torch.Generator().manual_seed(0))
    members = problem.weights + 0.01 * noise.to(problem.weights)
    subsets = np.array([[k >> j & 1 for j in range(8)] for k in range(1, few(256, 8))], dtype=np.float64)

    def evaluated() -> list[float]:
        rows = torch.from_numpy(subsets / subsets.sum(1, keepdims=True)).to(members)
        return [problem.loss(row @ members) for row in rows]

    compare(
        f"{len(subsets)} averages of 8 members, predicted against evaluated, 784-50-50-10, 10,000 images",
        lambda: landscape.average(problem, members, subsets, exact=False),
        evaluated, rounds=3, need=1,
    )  # fmt: skip


def language_model(vocabulary: int = 50257, **sizes: int) -> landscape.Problem:
    """A GPT-2 with random weights, and 2 × 64 random tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (2, 65))
    data = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if SMOKE:
        vocabulary, sizes = 20, {"layers": 1, "width": 8, "heads": 2, "length": 64}
        data = data[0] % vocabulary, data[1] % vocabulary
    model = GPT2(vocabulary=vocabulary, **sizes).to(DEVICE)
    data = data[0].to(DEVICE), data[1].to(DEVICE)
    return landscape.Problem(model, torch.nn.functional.cross_entropy, data)


def bases() -> None:
    """Products for both ends of a small GPT-2, by the vectors that the basis may have."""
    problem = language_model(4000, layers=2, width=128, heads=4, length=64)
    for most in (8, 12, 16, 20, needs.MAX_BASIS):
        with mock.patch.object(needs, "MAX_BASIS", most):
            ends = landscape.extreme_eigenvalues(problem, residual_tol=TOL)
        assert ends.converged
        say(f"both ends of {problem}, a basis of {most}: {ends.products} products")


def large() -> None:
    """Both ends of a GPT-2 of 124 million parameters: products, memory of the process, time of a product."""
    problem = language_model()
    product_time(problem)
    ends = landscape.extreme_eigenvalues(problem, residual_tol=TOL, max_memory=LIMIT)
    peak = (torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else peak_memory() or 0) / 2**30
    say(
        f"its both ends: {ends.products} products (needed {LARGE_PRODUCTS}: "
        f"{judged(ends.products, LARGE_PRODUCTS, most=True)}), peak {peak:.1f} GiB (needed "
        f"{LIMIT / 2**30:g}: {judged(peak, LIMIT / 2**30, most=True)}); "
        f"λ_min {ends.min:.4g} (residual {ends.residual_min:.1e}), λ_max {ends.max:.4g} "
        f"({ends.residual_max:.1e}), {'' if ends.converged else 'not '}converged"
    )


# GPT-2s of 1, 10 and 124 million parameters.
SIZES: dict[str, dict[str, int]] = {
    "1 M": {"vocabulary": 4000, "layers": 2, "width": 128, "heads": 4, "length": 64},
    "10 M": {"vocabulary": 8000, "layers": 4, "width": 384, "heads": 6, "length": 64},
    "124 M": {},
}


def sizes() -> None:
    """What analyses of these take, each in a process of its own, whose peak of memory is measured."""
    for name in SIZES:
        for analysis in ("contour", "extreme_eigenvalues", "trace", "curvature_table"):
            process = multiprocessing.get_context("spawn").Process(target=_measured, args=(name, analysis))
            process.start()
            process.join()
            assert process.exitcode == 0, f"{analysis} of {name} failed"


def _measured(name: str, analysis: str) -> None:
    problem, began = language_model(**SIZES[name]), time.perf_counter()
    problem.gradient()
    gradient, began = time.perf_counter() - began, time.perf_counter()
    if analysis == "contour":
        landscape.contour(problem, landscape.random_plane(problem), (5, 5), progress=False)
        units = 25
    else:
        given = {"trace": {"products": 12}, "extreme_eigenvalues": {"residual_tol": TOL}}.get(analysis, {})
        units = getattr(landscape, analysis)(problem, progress=False, **given).products
    passed = time.perf_counter() - began
    say(
        f"{name}, {analysis}: {units} {'points' if analysis == 'contour' else 'products'} of "
        f"{passed / units:.3g} s = {passed / units / gradient:.2f} gradients, peak of the process "
        f"{(peak_memory() or 0) / 2**30:.1f} GiB"
    )


def product_time(problem: landscape.Problem) -> None:
    h, v = problem.hessian(), start_vector(problem, 0)
    compare(
        f"gradient of {problem.layout.size:,} parameters, against a Hessian product",
        problem.gradient, lambda: h @ v, rounds=3, need=1.0,
    )  # fmt: skip
