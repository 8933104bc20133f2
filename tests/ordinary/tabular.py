"""Statistics: survival, quantiles, mixtures, ranking, calibrated and robust losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ordinary.use import BATCHES, COUNTED, TOGETHER, Parts, Theme, per_batch

tabular = Theme("tabular")
N = 12


def net(outputs: int = 1, inputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, outputs))


def rows(samples: int = N) -> Tensor:
    return torch.randn(samples, 4)


def cox_ph(log_h: Tensor, durations: Tensor, events: Tensor) -> Tensor:
    """pycox's."""
    order = durations.sort(descending=True)[1]
    events, log_h = events[order].view(-1), log_h[order].view(-1)
    gamma = log_h.max()
    log_cumsum_h = log_h.sub(gamma).exp().cumsum(0).add(1e-7).log().add(gamma)
    return -log_h.sub(log_cumsum_h).mul(events).sum().div(events.sum())


def survival(samples: int = N) -> tuple[Tensor, Tensor]:
    events = (torch.rand(samples) < 0.6).float()
    events[0] = 1
    return torch.rand(samples), events


@tabular("Cox's partial likelihood (pycox)", says=TOGETHER)
def cox() -> Parts:
    return net(), lambda out, y: cox_ph(out, *y), (rows(), survival())


@tabular("Cox's partial likelihood, targets in two columns, a list of batches", says=BATCHES, total=per_batch)
def cox_batches() -> Parts:
    def batch(n: int) -> tuple[Tensor, Tensor]:
        return rows(n), torch.stack(survival(n), 1)

    return net(), lambda out, y: cox_ph(out, y[:, 0], y[:, 1]), [batch(8), batch(8)]


@tabular("root mean squared error: torch.sqrt of MSELoss", says=TOGETHER)
def rmse() -> Parts:
    return net(), lambda o, y: torch.sqrt(nn.MSELoss()(o, y) + 1e-8), (rows(), torch.randn(N, 1))


@tabular("weighted samples: the weight is a column of the targets, sum / sum of weights", says=COUNTED)
def weighted_samples() -> Parts:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        value, weight = y[:, :1], y[:, 1:]
        return (weight * (out - value) ** 2).sum() / weight.sum()

    return net(), loss, (rows(), torch.cat([torch.randn(N, 1), torch.rand(N, 1)], 1))


@tabular(
    "domain adversary with a gradient reversal layer",
    expected="refused_hessian",
    undefined=True,
    words="derivative",
    why="the reversed gradient is not that of the loss",
)
def gradient_reversal() -> Parts:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return -grad

    class DANN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.label, self.domain = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = torch.tanh(self.features(x))
            return self.label(z), self.domain(Reverse.apply(z))

    def loss(out: Any, y: Any) -> Tensor:
        return F.cross_entropy(out[0], y[0]) + F.cross_entropy(out[1], y[1])

    return DANN(), loss, (rows(), (torch.randint(3, (N,)), torch.randint(2, (N,))))


@tabular("negative log marginal likelihood of a deep-kernel Gaussian process", says=TOGETHER)
def deep_kernel() -> Parts:
    class DeepKernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.log_noise = net(2), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            z = self.features(x)
            k = torch.exp(-0.5 * (z[:, None] - z[None]).pow(2).sum(-1))
            return k + self.log_noise.exp() * torch.eye(len(x)).to(k)

    def nll(k: Tensor, y: Tensor) -> Tensor:
        chol = torch.linalg.cholesky(k)
        solved = torch.cholesky_solve(y[:, None], chol).squeeze(1)
        return (0.5 * y @ solved + chol.diagonal().log().sum()) / len(y)

    return DeepKernel(), nll, (rows(), torch.randn(N))
