"""Differential equations, operators, energies: networks of scientific computing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ordinary.use import Parts, Theme

physics = Theme("physics")
PI = torch.pi


def mlp(inputs: int = 1, outputs: int = 1, hidden: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


def gradients(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)[0]


@physics("PINN: u'' = f in the loss, x requires gradients and is input and target")
def poisson_in_the_loss() -> Parts:
    def pde(u: Tensor, x: Tensor) -> Tensor:
        u_x = gradients(u, x)
        u_xx = gradients(u_x, x)
        return torch.mean((u_xx + PI**2 * torch.sin(PI * x)) ** 2)

    x = torch.linspace(-1, 1, 12).view(-1, 1).requires_grad_(True)
    return mlp(), pde, (x, x)


@physics("PINN: the residual in forward, x.requires_grad_()")
def residual_in_forward() -> Parts:
    class PINN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_(True)
            u = self.net(x)
            u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
            return u_x + u

    return PINN(), nn.MSELoss(), (torch.rand(12, 1), torch.zeros(12, 1))


@physics("DeepXDE's style: points of the interior and the boundary in one batch of a dict")
def interior_and_boundary() -> Parts:
    class HeatPINN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(2)

        def forward(self, interior: Tensor, boundary: Tensor) -> dict[str, Tensor]:
            interior = interior.detach().requires_grad_(True)
            u = self.net(interior)
            du = gradients(u, interior)
            u_xx = gradients(du[:, :1], interior)[:, :1]
            return {"residual": du[:, 1:] - 0.3 * u_xx, "boundary": self.net(boundary)}

    def loss(out: Any, y: Tensor) -> Tensor:
        return out["residual"].pow(2).mean() + 10 * F.mse_loss(out["boundary"], y)

    return (
        HeatPINN(),
        loss,
        [({"interior": torch.rand(15, 2), "boundary": torch.rand(6, 2)}, torch.zeros(6, 1))],
    )


def whole_pinn(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return loss(None, data[1])


@physics(
    "PINN: the loss calls the network itself (a closure)",
    expected="refused",
    words="model|parameters|module",
    total=whole_pinn,
    why="the loss reads the parameters of the module that was given, which do not move with θ",
)
def closure_over_the_network() -> Parts:
    net = mlp()

    def loss(_: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        u = net(x)
        return ((gradients(gradients(u, x), x) + u) ** 2).mean()

    x = torch.rand(12, 1)
    return net, loss, (x, x)


@physics("PINN by torch.func: vmap(grad) of the network in forward")
def functional_pinn() -> Parts:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            u = lambda point: self.net(point).squeeze()  # noqa: E731
            return torch.func.vmap(torch.func.grad(u))(x) + torch.func.vmap(u)(x)[:, None]

    return Functional(), F.mse_loss, (torch.rand(10, 1), torch.zeros(10, 1))


class SpectralConv1d(nn.Module):
    def __init__(self, width: int, modes: int, complex_parameters: bool) -> None:
        super().__init__()
        self.modes, self.complex = modes, complex_parameters
        weights = torch.randn(width, width, modes, 2) / width
        self.weights = nn.Parameter(torch.view_as_complex(weights) if complex_parameters else weights)

    def forward(self, x: Tensor) -> Tensor:
        x_ft = torch.fft.rfft(x)
        weights = self.weights if self.complex else torch.view_as_complex(self.weights)
        out_ft = torch.zeros_like(x_ft)
        out_ft[:, :, : self.modes] = torch.einsum("bix,iox->box", x_ft[:, :, : self.modes], weights)
        return torch.fft.irfft(out_ft, n=x.size(-1))


class FNO1d(nn.Module):
    def __init__(self, complex_parameters: bool) -> None:
        super().__init__()
        self.fc0, self.conv, self.w = (
            nn.Linear(2, 3),
            SpectralConv1d(3, 3, complex_parameters),
            nn.Conv1d(3, 3, 1),
        )
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.linspace(0, 1, x.shape[1], dtype=x.dtype).view(1, -1, 1).expand(len(x), -1, 1)
        x = self.fc0(torch.cat((x, grid), -1)).permute(0, 2, 1)
        x = F.gelu(self.conv(x) + self.w(x)).permute(0, 2, 1)
        return self.fc2(F.gelu(self.fc1(x)))


def relative_l2(o: Tensor, y: Tensor) -> Tensor:
    return ((o - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean()


@physics(
    "FNO with complex weights",
    expected="refused",
    words="complex",
    why="θ is a vector of real numbers; the message says how to write them",
)
def fno_complex() -> Parts:
    return FNO1d(True), relative_l2, (torch.randn(5, 8, 1), torch.randn(5, 8, 1))


# The gradients of all parameters in one vector, which the reference would differentiate, are cut at odd places.
@physics("FNO with view_as_complex of real weights, relative L2 loss", differences=True)
def fno() -> Parts:
    return FNO1d(False), relative_l2, (torch.randn(5, 8, 1), torch.randn(5, 8, 1))


@physics("Lagrangian network: accelerations by torch.func.hessian and a solve")
def lagrangian() -> Parts:
    class LNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 4), nn.Softplus(), nn.Linear(4, 1))

        def lagrangian(self, state: Tensor) -> Tensor:
            return self.net(state).squeeze() + state[1] ** 2

        def forward(self, states: Tensor) -> Tensor:
            g = torch.func.vmap(torch.func.grad(self.lagrangian))(states)
            h = torch.func.vmap(torch.func.hessian(self.lagrangian))(states)
            return (g[:, 0] - h[:, 1, 0] * states[:, 1]) / h[:, 1, 1]

    return LNN(), F.mse_loss, (torch.randn(8, 2), torch.randn(8))
