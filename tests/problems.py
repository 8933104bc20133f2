"""The small named problems that tests share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import landscape
from landscape import Problem
from landscape.data.synthetic import mean_output


def quadratic(eigenvalues: list[float], *, rotate: bool = True, start: float = 1.0) -> Problem:
    """½wᵀHw in float64 with exactly these eigenvalues, all coordinates of w at ``start``."""
    model = landscape.models.build("quadratic", eigenvalues=eigenvalues, rotate=rotate, start=start)
    data = landscape.data.load("quadratic", dimension=len(eigenvalues), samples=10)
    return Problem(model, mean_output, data.train, dtype=torch.float64)


def mlp(
    *, widths: tuple[int, ...] = (6, 7, 5, 3), activation: str = "tanh", samples: int = 53, seed: int = 0
) -> Problem:
    """A small chain on random data, float64."""
    torch.manual_seed(seed)
    model = landscape.models.build("mlp", widths=list(widths), activation=activation)
    x = torch.randn(samples, widths[0], dtype=torch.float64)
    y = torch.randint(widths[-1], (samples,))
    return Problem(model, nn.functional.cross_entropy, (x, y), dtype=torch.float64)


class SmallConv(nn.Module):
    """Convolution, BatchNorm and a linear layer: not a chain, and it has buffers and norm parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x)).tanh().mean((2, 3)))
        return out


def conv(samples: int = 20) -> Problem:
    """:class:`SmallConv` on random images, float64, with statistics that are not the initial ones."""
    torch.manual_seed(0)
    model = SmallConv()
    model(torch.randn(8, 1, 6, 6))
    data = torch.randn(samples, 1, 6, 6, dtype=torch.float64), torch.randint(2, (samples,))
    return Problem(model, nn.functional.cross_entropy, data, dtype=torch.float64)


class Linearised(nn.Module):
    """Outputs linear in θ, with squared loss: its Hessian is constant; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.unused = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.w * self.frozen)


def linear_regression() -> Problem:
    """Least squares with an unused and a frozen parameter, float64: P = 5, Hessian 2XᵀX/N and zeros."""
    torch.manual_seed(3)
    x = torch.randn(40, 3, dtype=torch.float64)
    return Problem(Linearised(), nn.functional.mse_loss, (x, x.sum(1)), dtype=torch.float64)


ALL: dict[str, Callable[[], Problem]] = {
    "positive definite": lambda: quadratic([0.1, 0.3, 1.0]),
    "saddle": lambda: quadratic([-0.98, 0.2, 1.0]),
    "mostly negative": lambda: quadratic([-3.0, -1.0, 0.5, 2.0]),
    "mlp tanh": mlp,
    "mlp relu": lambda: mlp(activation="relu"),
    "conv": conv,
    "linear regression": linear_regression,
}


def textbook_gradient(problem: Problem, theta: Tensor) -> Tensor:
    """∇L over all data as one batch, by plain autograd on one flat leaf."""
    assert problem.tensors is not None
    leaf = theta.clone().requires_grad_()
    x, y = problem.tensors
    loss = problem.criterion(problem.outputs(leaf, x), y)
    return torch.autograd.grad(loss, leaf)[0]


def textbook_hessian(problem: Problem) -> Tensor:
    """∇²L (P, P) over all data as one batch, by torch.autograd.functional."""
    assert problem.tensors is not None
    x, y = problem.tensors

    def loss(theta: Tensor) -> Tensor:
        return problem.criterion(problem.outputs(theta, x), y)

    h = torch.autograd.functional.hessian(loss, problem.theta)
    assert isinstance(h, Tensor)
    return h


def textbook_surface(
    problem: Problem, directions: Tensor, x: list[float], y: list[float]
) -> list[list[float]]:
    """Loss by the usual loop: put each point's weights into a real copy of the model, one forward pass."""
    import copy

    assert problem.tensors is not None
    model = copy.deepcopy(problem.model)
    rows = []
    for b in y:
        row = []
        for a in x:
            theta = problem.theta + a * directions[0] + b * directions[1]
            views = problem.layout.views(theta)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in views:
                        parameter.copy_(views[name])
                row.append(float(problem.criterion(model(problem.tensors[0]), problem.tensors[1])))
        rows.append(row)
    return rows
