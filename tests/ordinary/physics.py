"""Differential equations, operators, energies: networks of scientific computing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import module
from tests.ordinary.use import Parts, Theme, output_of

physics = Theme("physics")
PI = torch.pi


def mlp(inputs: int = 1, outputs: int = 1, hidden: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


def gradients(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)[0]


def same(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """Inputs that are the targets, too, as one tensor."""
    return loss(output_of(model, data[0]), data[1])


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
    @module(net=mlp())
    def model(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        u = self.net(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        return u_x + u

    return model, nn.MSELoss(), (torch.rand(12, 1), torch.zeros(12, 1))


@physics("Burgers' equation (t, x): residual in forward with clones that require gradients")
def burgers() -> Parts:
    @module(net=mlp(2))
    def model(self, tx: Tensor) -> Tensor:
        t, x = tx[:, :1].clone().requires_grad_(), tx[:, 1:].clone().requires_grad_()
        u = self.net(torch.cat([t, x], 1))
        u_t, u_x = gradients(u, t), gradients(u, x)
        return u_t + u * u_x - 0.01 / PI * gradients(u_x, x)

    return model, lambda f, _: (f**2).mean(), (torch.rand(12, 2), torch.zeros(12, 1))


@physics("DeepXDE's style: points of the interior and the boundary in one batch of a dict")
def interior_and_boundary() -> Parts:
    @module(net=mlp(2))
    def model(self, interior: Tensor, boundary: Tensor) -> dict[str, Tensor]:
        interior = interior.detach().requires_grad_(True)
        u = self.net(interior)
        du = gradients(u, interior)
        u_xx = gradients(du[:, :1], interior)[:, :1]
        return {"residual": du[:, 1:] - 0.3 * u_xx, "boundary": self.net(boundary)}

    def loss(out: Any, y: Tensor) -> Tensor:
        return out["residual"].pow(2).mean() + 10 * F.mse_loss(out["boundary"], y)

    return model, loss, [({"interior": torch.rand(15, 2), "boundary": torch.rand(6, 2)}, torch.zeros(6, 1))]


def whole_pinn(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return loss(None, data[1])


@physics.refused("PINN: the loss calls the network itself (a closure)",
    "the loss reads the parameters of the module that was given, which do not move with θ",
    "model|parameters|module", total=whole_pinn)  # fmt: skip
def closure_over_the_network() -> Parts:
    net = mlp()

    def loss(_: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        u = net(x)
        return ((gradients(gradients(u, x), x) + u) ** 2).mean()

    x = torch.rand(12, 1)
    return net, loss, (x, x)


@physics("inverse problem: an unknown coefficient is a parameter of the model")
def inverse_problem() -> Parts:
    @module(net=mlp(), mu=nn.Parameter(torch.tensor([0.5])))
    def model(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = t.clone().requires_grad_(True)
        u = self.net(t)
        du = gradients(u, t)
        return u, gradients(du, t) + self.mu * du + 4 * u

    def loss(out: Any, y: Tensor) -> Tensor:
        return F.mse_loss(out[0], y) + 1e-1 * torch.mean(out[1] ** 2)

    t = torch.linspace(0, 1, 12).view(-1, 1)
    return model, loss, (t, torch.exp(-t) * torch.cos(2 * t))


@physics("PINN by torch.func: vmap(grad) of the network in forward")
def functional_pinn() -> Parts:
    @module(net=mlp())
    def model(self, x: Tensor) -> Tensor:
        u = lambda point: self.net(point).squeeze()  # noqa: E731
        return torch.func.vmap(torch.func.grad(u))(x) + torch.func.vmap(u)(x)[:, None]

    return model, F.mse_loss, (torch.rand(10, 1), torch.zeros(10, 1))


@physics("hard boundary conditions: x(1 − x)·net(x), third derivative in the loss")
def hard_boundary() -> Parts:
    @module(net=mlp(hidden=4))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().clone().requires_grad_(True)
        return x * (1 - x) * self.net(x), x

    def loss(out: Any, _: Tensor) -> Tensor:
        u, x = out
        u_xxx = gradients(gradients(gradients(u, x), x), x)
        return (u_xxx - 1).square().mean()

    return model, loss, (torch.rand(10, 1), torch.zeros(10, 1))


@physics("deep Ritz: an energy with the gradient of u")
def deep_ritz() -> Parts:
    @module(net=mlp(2))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        u = self.net(x)
        return u, torch.autograd.grad(u.sum(), x, create_graph=True)[0]

    def energy(out: Any, f: Tensor) -> Tensor:
        u, du = out
        return torch.mean(0.5 * du.pow(2).sum(1, keepdim=True) - f * u)

    return model, energy, (torch.rand(12, 2), torch.ones(12, 1))


@physics("DeepONet: branch and trunk, data = ((functions, points), values)")
def deeponet() -> Parts:
    @module(branch=mlp(6, 4, 4), trunk=mlp(1, 4, 4), b=nn.Parameter(torch.zeros(1)))
    def model(self, u: Tensor, y: Tensor) -> Tensor:
        return (self.branch(u) * self.trunk(y)).sum(1, keepdim=True) + self.b

    return model, nn.MSELoss(), ((torch.randn(12, 6), torch.rand(12, 1)), torch.randn(12, 1))


@physics("DeepONet on a grid: functions (B, m), one grid of points for all (Q, 1), one batch")
def deeponet_grid() -> Parts:
    @module(branch=mlp(6, 4, 4), trunk=mlp(1, 4, 4))
    def model(self, u: Tensor, grid: Tensor) -> Tensor:
        return torch.einsum("bi,qi->bq", self.branch(u), self.trunk(grid))

    return model, nn.MSELoss(), [((torch.randn(5, 6), torch.rand(7, 1)), torch.randn(5, 7))]


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


# The gradients of all parameters in one vector, which the reference would differentiate, are cut at odd places.
@physics("Hamiltonian network: time derivatives by autograd.grad of H")
def hamiltonian() -> Parts:
    @module(H=mlp(2))
    def model(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_(True)
            dq, dp = torch.autograd.grad(self.H(x).sum(), x, create_graph=True)[0].chunk(2, dim=1)
        return torch.cat([dp, -dq], dim=1)

    x = torch.randn(12, 2)
    return model, F.mse_loss, (x, torch.stack([x[:, 1], -x[:, 0]], 1))


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


@physics("SIREN: sine activations with ω₀ = 30, image regression")
def siren() -> Parts:
    class SineLayer(nn.Module):
        def __init__(self, i: int, o: int, first: bool = False) -> None:
            super().__init__()
            self.linear = nn.Linear(i, o)
            bound = 1 / i if first else (6 / i) ** 0.5 / 30
            self.linear.weight.data.uniform_(-bound, bound)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(30 * self.linear(x))

    model = nn.Sequential(SineLayer(2, 5, True), SineLayer(5, 5), nn.Linear(5, 1))
    return model, nn.MSELoss(), (2 * torch.rand(16, 2) - 1, torch.rand(16, 1))


@physics("NeRF: Fourier features, volume rendering along rays")
def nerf() -> Parts:
    @module(net=nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4)))
    def model(self, points: Tensor, deltas: Tensor) -> Tensor:
        encoded = torch.cat([f(2.0**k * points) for k in range(2) for f in (torch.sin, torch.cos)], -1)
        raw = self.net(encoded)
        alpha = 1 - torch.exp(-F.softplus(raw[..., 3]) * deltas)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * clear)[..., None] * raw[..., :3].sigmoid()).sum(1)

    data = (torch.randn(8, 5, 3), 0.2 * torch.ones(8, 5)), torch.rand(8, 3)
    return model, lambda rgb, target: F.mse_loss(rgb, target), data


@physics("Kolmogorov-Arnold network: Chebyshev polynomials on each edge")
def kan() -> Parts:
    class KANLayer(nn.Module):
        def __init__(self, i: int, o: int, degree: int = 3) -> None:
            super().__init__()
            self.coefficients = nn.Parameter(torch.randn(i, o, degree + 1) / (i * (degree + 1)))
            self.register_buffer("order", torch.arange(degree + 1))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x).clamp(-1 + 1e-6, 1 - 1e-6)
            return torch.einsum(
                "bid,iod->bo", torch.cos(torch.acos(x)[..., None] * self.order), self.coefficients
            )

    x = torch.rand(16, 2)
    model = nn.Sequential(KANLayer(2, 3), KANLayer(3, 1))
    return model, nn.MSELoss(), (x, (x[:, :1] * PI).sin() + x[:, 1:] ** 2)


@physics.random(
    "divergence by Hutchinson's estimator, probes drawn in forward", "the probes are drawn in each pass"
)
def hutchinson_divergence() -> Parts:
    @module(f=mlp(2, 2))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_(True)
        e = torch.randn_like(x)
        dx = self.f(x)
        e_dfdx = torch.autograd.grad(dx, x, e, create_graph=True)[0]
        return x + 0.1 * dx, 0.1 * (e_dfdx * e).sum(1)

    def loss(out: Any, _: Tensor) -> Tensor:
        z, log_det = out
        return (0.5 * z.pow(2).sum(1) - log_det).mean()

    return model, loss, (torch.randn(10, 2), torch.zeros(10))


# fmt: off
physics.refused("FNO with complex weights",
    "θ is a vector of real numbers; the message says how to write them", "complex", name="fno_complex")(
    lambda: (FNO1d(True), relative_l2, (torch.randn(5, 8, 1), torch.randn(5, 8, 1))))
physics("FNO with view_as_complex of real weights, relative L2 loss", differences=True, name="fno")(
    lambda: (FNO1d(False), relative_l2, (torch.randn(5, 8, 1), torch.randn(5, 8, 1))))
