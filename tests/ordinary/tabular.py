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


@tabular("GaussianNLLLoss: mean and variance as two outputs")
def gaussian_nll() -> Parts:
    class MeanVariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.variance = nn.Linear(4, 5), nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = F.gelu(self.body(x))
            return self.mean(z), F.softplus(self.variance(z)) + 1e-6

    criterion = nn.GaussianNLLLoss()
    return MeanVariance(), lambda out, y: criterion(out[0], y, out[1]), (rows(), torch.randn(N, 1))


@tabular("ListNet: lists of documents (N, L, F), masked by the padding value −1")
def listnet() -> Parts:
    def list_net(y_pred: Tensor, y_true: Tensor) -> Tensor:
        mask = y_true == -1
        y_pred, y_true = (
            y_pred.squeeze(-1).masked_fill(mask, float("-inf")),
            y_true.masked_fill(mask, float("-inf")),
        )
        preds, true = F.softmax(y_pred, dim=1), F.softmax(y_true, dim=1)
        return torch.mean(-torch.sum(true * torch.log(preds + 1e-10), dim=1))

    y = torch.randint(4, (N, 5)).float()
    y[torch.arange(5) >= torch.randint(2, 6, (N, 1))] = -1
    return net(), list_net, (torch.randn(N, 5, 4), y)


@tabular("root mean squared error: torch.sqrt of MSELoss", says=TOGETHER)
def rmse() -> Parts:
    return net(), lambda o, y: torch.sqrt(nn.MSELoss()(o, y) + 1e-8), (rows(), torch.randn(N, 1))


@tabular("weighted samples: the weight is a column of the targets, sum / sum of weights", says=COUNTED)
def weighted_samples() -> Parts:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        value, weight = y[:, :1], y[:, 1:]
        return (weight * (out - value) ** 2).sum() / weight.sum()

    return net(), loss, (rows(), torch.cat([torch.randn(N, 1), torch.rand(N, 1)], 1))


@tabular("categorical and continuous columns: embeddings, BatchNorm1d, a dict of inputs")
def entity_embeddings() -> Parts:
    class TabularModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeds = nn.ModuleList([nn.Embedding(4, 2), nn.Embedding(3, 2)])
            self.bn_cont, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.1)
            self.layers = nn.Sequential(
                nn.Linear(7, 5), nn.ReLU(inplace=True), nn.BatchNorm1d(5), nn.Linear(5, 1)
            )

        def forward(self, x_cat: Tensor, x_cont: Tensor) -> Tensor:
            x = torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1)
            return self.layers(torch.cat([self.drop(x), self.bn_cont(x_cont)], 1))

    cat = torch.stack([torch.randint(4, (N,)), torch.randint(3, (N,))], 1)
    return TabularModel(), nn.MSELoss(), ({"x_cat": cat, "x_cont": torch.randn(N, 3)}, torch.randn(N, 1))


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
