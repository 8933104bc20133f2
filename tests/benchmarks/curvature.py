"""Both ends and the top of the Hessian of a trained MNIST network against general-purpose solvers."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

import landscape
from tests.benchmarks.harness import compare, mnist

TOL = 1e-2
STEPS, BATCH, LR = 300, 2000, 0.2


def trained() -> landscape.Problem:
    """784-50-50-10 after plain SGD on the training set, with 10,000 test images as data."""
    data = landscape.data.load(**mnist())
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[784, 50, 50, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = data.train
    for _ in range(STEPS):
        rows = torch.randint(len(y), (BATCH,))
        optimizer.zero_grad()
        data.loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return landscape.Problem(model, data.loss, tuple(t[:10_000] for t in data.test))


def main() -> None:
    problem = trained()
    both_ends(problem)
    top_five(problem)


def both_ends(problem: landscape.Problem) -> None:
    assert problem.tensors is not None
    x, y = problem.tensors
    parameters = list(problem.model.parameters())
    size = len(problem.theta)
    found: dict[str, np.ndarray] = {}
    products = 0

    def product(v: np.ndarray) -> np.ndarray:
        """Double backward over the full batch, graph and all anew: what one would write."""
        nonlocal products
        products += 1
        loss = problem.criterion(problem.model(x), y)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])
        vector = torch.from_numpy(v.ravel()).to(gradient.dtype)
        return torch.cat([g.flatten() for g in torch.autograd.grad(gradient @ vector, parameters)]).numpy()

    def ours() -> None:
        ends = landscape.extreme_eigenvalues(problem, tol=TOL)
        assert ends.converged
        found["ours"] = np.array([ends.min, ends.max, ends.residual_min, ends.residual_max, ends.hvps])

    def arpack() -> None:
        nonlocal products
        products = 0
        operator = LinearOperator((size, size), matvec=product, dtype=np.float32)
        start = landscape.lanczos.start_vector(problem, 0).numpy()
        values, vectors = eigsh(operator, k=2, which="BE", tol=TOL, v0=start)
        count = products
        residuals = [np.linalg.norm(product(v) - x * v) for x, v in zip(values, vectors.T, strict=True)]
        found["arpack"] = np.array([*values, *residuals, count])

    compare(
        "both ends, trained 784-50-50-10, 10,000 images, against ARPACK over double backward",
        ours, arpack, rounds=3, need=10.0,
    )  # fmt: skip
    for name, (low, high, residual_low, residual_high, count) in found.items():
        print(
            f"  {name}: λ_min {low:.5f} (residual {residual_low:.1e}), λ_max {high:.5f} ({residual_high:.1e}), "
            f"{count:.0f} products",
            flush=True,
        )


def top_five(problem: landscape.Problem) -> None:
    if importlib.util.find_spec("hessian_eigenthings") is None:
        print("top 5 against hessian_eigenthings: skipped, it is not installed", flush=True)
        return
    import hessian_eigenthings as peer

    loss = peer.supervised_loss(problem.criterion)
    theirs = peer.HessianOperator(problem.model, [problem.tensors], loss)
    check = landscape.HessianOperator(problem)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def worst(values: torch.Tensor, vectors: torch.Tensor) -> float:
        """The largest residual relative to its eigenvalue, by the same products for both."""
        pairs = zip(values.tolist(), vectors, strict=True)
        return max(float((check(v) - x * v).norm()) / abs(x) for x, v in pairs)

    def ours() -> None:
        pairs = landscape.top_eigenvalues(problem, 5, tol=TOL)
        assert pairs.converged
        found["ours"] = pairs.values, pairs.vectors

    def lanczos(steps: int) -> None:
        pairs = peer.lanczos(theirs, k=5, max_iter=steps, tol=TOL, which="LA", reorthogonalize=True, seed=0)
        found["peer"] = pairs.eigenvalues, pairs.eigenvectors

    # It takes a fixed number of steps: it is given the fewest that meet the tolerance, found beforehand.
    for steps in range(6, 200):
        lanczos(steps)
        if worst(*found["peer"]) <= TOL:
            break
    compare(
        f"top 5, trained 784-50-50-10, 10,000 images, against hessian_eigenthings in its fewest {steps} steps",
        ours, lambda: lanczos(steps), rounds=5, need=2.0,
    )  # fmt: skip
    for name, (values, vectors) in found.items():
        shown = ", ".join(f"{value:.4f}" for value in values.tolist())
        print(f"  {name}: {shown}; largest relative residual {worst(values, vectors):.1e}", flush=True)
