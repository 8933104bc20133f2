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
    from hessian_eigenthings.algorithms import lanczos as peer_lanczos
    from hessian_eigenthings.loss_fns import supervised_loss
    from hessian_eigenthings.operators import HessianOperator
