"""Statistics: survival, quantiles, mixtures, ranking, calibrated and robust losses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import module
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


@tabular("Cox's partial likelihood, targets in two columns, a list of batches", says=BATCHES, total=per_batch)
def cox_batches() -> Parts:
    def batch(n: int) -> tuple[Tensor, Tensor]:
        return rows(n), torch.stack(survival(n), 1)

    return net(), lambda out, y: cox_ph(out, y[:, 0], y[:, 1]), [batch(8), batch(8)]


@tabular("discrete-time hazards (LogisticHazard): sum over the intervals at risk")
def logistic_hazard() -> Parts:
    def nll_logistic_hazard(phi: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        idx_durations, events = target
        idx = idx_durations.view(-1, 1)
        y_bce = torch.zeros_like(phi).scatter(1, idx, events.view(-1, 1).to(phi))
        bce = F.binary_cross_entropy_with_logits(phi, y_bce, reduction="none")
        return bce.cumsum(1).gather(1, idx).view(-1).mean()

    return net(5), nll_logistic_hazard, (rows(), (torch.randint(5, (N,)), torch.randint(2, (N,)).float()))


@tabular("Weibull accelerated failure times with censoring")
def weibull() -> Parts:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        shape, scale = F.softplus(out).add(1e-3).unbind(1)
        t, event = y.unbind(1)
        log_hazard = shape.log() - shape * scale.log() + (shape - 1) * t.log()
        return -(event * log_hazard - (t / scale) ** shape).mean()

    return net(2), loss, (rows(), torch.stack([torch.rand(N) + 0.1, torch.randint(2, (N,)).float()], 1))


@tabular("quantile regression: pinball loss")
def pinball() -> Parts:
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        e = y - out
        q = quantiles.to(out)
        return torch.maximum(q * e, (q - 1) * e).mean()

    return net(3), loss, (rows(), torch.randn(N, 1))


@tabular("mixture density network: torch.distributions.MixtureSameFamily")
def mixture_density() -> Parts:
    @module(hidden=nn.Linear(4, 5), pi=nn.Linear(5, 3), mu=nn.Linear(5, 3), sigma=nn.Linear(5, 3))
    def model(self, x: Tensor) -> Any:
        z = torch.tanh(self.hidden(x))
        mix = torch.distributions.Categorical(logits=self.pi(z))
        return torch.distributions.MixtureSameFamily(
            mix, torch.distributions.Normal(self.mu(z), self.sigma(z).exp())
        )

    return model, lambda dist, y: -dist.log_prob(y).mean(), (rows(), torch.randn(N))


@tabular("GaussianNLLLoss: mean and variance as two outputs")
def gaussian_nll() -> Parts:
    @module(body=nn.Linear(4, 5), mean=nn.Linear(5, 1), variance=nn.Linear(5, 1))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = F.gelu(self.body(x))
        return self.mean(z), F.softplus(self.variance(z)) + 1e-6

    criterion = nn.GaussianNLLLoss()
    return model, lambda out, y: criterion(out[0], y, out[1]), (rows(), torch.randn(N, 1))


@tabular("evidential regression: normal-inverse-gamma likelihood and a regularizer")
def evidential() -> Parts:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        gamma, nu, alpha, beta = out.chunk(4, 1)
        nu, alpha, beta = F.softplus(nu) + 1e-3, F.softplus(alpha) + 1.001, F.softplus(beta) + 1e-3
        omega = 2 * beta * (1 + nu)
        nll = (
            0.5 * torch.log(math.pi / nu) - alpha * torch.log(omega)
            + (alpha + 0.5) * torch.log((y - gamma) ** 2 * nu + omega) + torch.lgamma(alpha) - torch.lgamma(alpha + 0.5)
        )  # fmt: skip
        return (nll + 0.1 * (y - gamma).abs() * (2 * nu + alpha)).mean()

    return net(4), loss, (rows(), torch.randn(N, 1))


@tabular("ordinal regression (CORAL): a shared weight, levels as binary tasks")
def coral() -> Parts:
    @module(body=nn.Linear(4, 5), fc=nn.Linear(5, 1, bias=False),
        bias=nn.Parameter(torch.arange(3, 0, -1).float() / 3))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.body(x))) + self.bias

    def coral_loss(logits: Tensor, levels: Tensor) -> Tensor:
        term = F.logsigmoid(logits) * levels + (F.logsigmoid(logits) - logits) * (1 - levels)
        return -torch.mean(torch.sum(term, dim=1))

    y = torch.randint(4, (N,))
    return model, coral_loss, (rows(), (y[:, None] > torch.arange(3)).float())


@tabular("focal loss as a class with alpha and gamma")
def focal() -> Parts:
    @module(gamma=2.0, alpha=0.25)
    def model(self, inputs: Tensor, targets: Tensor) -> Tensor:
        ce_loss = F.cross_entropy(inputs, targets, reduction="none")
        pt = torch.exp(-ce_loss)
        return (self.alpha * (1 - pt) ** self.gamma * ce_loss).mean()

    return net(3), model, (rows(), torch.randint(3, (N,)))


@tabular("generalized cross-entropy for noisy labels, and symmetric cross-entropy")
def noisy_labels() -> Parts:
    def loss(out: Tensor, y: Tensor, q: float = 0.7) -> Tensor:
        p = out.softmax(1).gather(1, y[:, None]).clamp(1e-7, 1.0)
        reverse = -(out.softmax(1).clamp(1e-7, 1) * F.one_hot(y, 3).clamp(1e-4, 1).log()).sum(1)
        return ((1 - p**q) / q).mean() + 0.1 * reverse.mean()

    return net(3), loss, (rows(), torch.randint(3, (N,)))


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


@tabular("MarginRankingLoss of two scores")
def margin_ranking() -> Parts:
    criterion = nn.MarginRankingLoss(margin=0.5)
    return net(2), lambda s, y: criterion(s[:, 0], s[:, 1], y), (rows(), torch.randint(2, (N,)) * 2.0 - 1)


@tabular("Pearson correlation as a loss", says=TOGETHER)
def pearson() -> Parts:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        a, b = out.squeeze() - out.mean(), y - y.mean()
        return 1 - (a * b).sum() / (a.norm() * b.norm())

    return net(), loss, (rows(), torch.randn(N))


@tabular("Poisson regression of counts with an exposure beside them")
def poisson() -> Parts:
    def loss(log_rate: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        counts, exposure = target
        return F.poisson_nll_loss(log_rate.squeeze(1) + exposure.log(), counts, log_input=True, full=False)

    return net(), loss, (rows(), (torch.poisson(2 * torch.rand(N)), torch.rand(N) + 0.5))


@tabular("Tweedie deviance")
def tweedie() -> Parts:
    def loss(out: Tensor, y: Tensor, p: float = 1.5) -> Tensor:
        mu = torch.exp(out)
        return torch.mean(-y * mu.pow(1 - p) / (1 - p) + mu.pow(2 - p) / (2 - p))

    return net(), loss, (rows(), torch.rand(N, 1) * (torch.rand(N, 1) < 0.5))


@tabular("weighted samples: the weight is a column of the targets, sum / sum of weights", says=COUNTED)
def weighted_samples() -> Parts:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        value, weight = y[:, :1], y[:, 1:]
        return (weight * (out - value) ** 2).sum() / weight.sum()

    return net(), loss, (rows(), torch.cat([torch.randn(N, 1), torch.rand(N, 1)], 1))


@tabular("categorical and continuous columns: embeddings, BatchNorm1d, a dict of inputs")
def entity_embeddings() -> Parts:
    @module(embeds=nn.ModuleList([nn.Embedding(4, 2), nn.Embedding(3, 2)]), bn_cont=nn.BatchNorm1d(3),
        drop=nn.Dropout(0.1),
        layers=nn.Sequential(nn.Linear(7, 5), nn.ReLU(inplace=True), nn.BatchNorm1d(5), nn.Linear(5, 1)))  # fmt: skip
    def model(self, x_cat: Tensor, x_cont: Tensor) -> Tensor:
        x = torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1)
        return self.layers(torch.cat([self.drop(x), self.bn_cont(x_cont)], 1))

    cat = torch.stack([torch.randint(4, (N,)), torch.randint(3, (N,))], 1)
    return model, nn.MSELoss(), ({"x_cat": cat, "x_cont": torch.randn(N, 3)}, torch.randn(N, 1))


@tabular("wide & deep: BCEWithLogits on squeezed logits")
def wide_and_deep() -> Parts:
    model = module(wide=nn.Linear(6, 1), deep=net())(
        lambda self, wide, deep: (self.wide(wide) + self.deep(deep)).squeeze(-1)
    )
    data = (torch.randint(2, (N, 6)).float(), rows()), torch.randint(2, (N,)).float()
    return model, nn.BCEWithLogitsLoss(), data


@tabular("factorization machine")
def factorization_machine() -> Parts:
    @module(linear=nn.Linear(6, 1), v=nn.Parameter(torch.randn(6, 3) / 2))
    def model(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(1) + 0.5 * ((x @ self.v) ** 2 - (x**2) @ self.v**2).sum(1)

    return model, nn.MSELoss(), (torch.randint(2, (N, 6)).float(), torch.randn(N))


@tabular.random("Bayes by backprop: weights are drawn in forward, KL in the loss",
    "weights are drawn in each pass, also in eval mode")  # fmt: skip
def bayes_by_backprop() -> Parts:
    class BayesLinear(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.mu, self.rho = nn.Parameter(torch.randn(o, i) / 2), nn.Parameter(-3 * torch.ones(o, i))

        def forward(self, x: Tensor) -> Tensor:
            sigma = F.softplus(self.rho)
            self.kl = (0.5 * (sigma**2 + self.mu**2 - 1) - sigma.log()).sum()
            return F.linear(x, self.mu + sigma * torch.randn_like(sigma))

    @module(l1=BayesLinear(4, 4), l2=BayesLinear(4, 1))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.l2(torch.tanh(self.l1(x)))
        return y, self.l1.kl + self.l2.kl

    return model, lambda out, y: F.mse_loss(out[0], y) + 1e-2 * out[1], (rows(), torch.randn(N, 1))


@tabular.no_hessian(
    "domain adversary with a gradient reversal layer", "the reversed gradient is not that of the loss"
)
def gradient_reversal() -> Parts:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return -grad

    @module(features=nn.Linear(4, 4), label=nn.Linear(4, 3), domain=nn.Linear(4, 2))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.features(x))
        return self.label(z), self.domain(Reverse.apply(z))

    def loss(out: Any, y: Any) -> Tensor:
        return F.cross_entropy(out[0], y[0]) + F.cross_entropy(out[1], y[1])

    return model, loss, (rows(), (torch.randint(3, (N,)), torch.randint(2, (N,))))


@tabular("deep CORAL: covariances of source and target features", says=TOGETHER)
def deep_coral() -> Parts:
    @module(features=nn.Linear(4, 4), head=nn.Linear(4, 3))
    def model(self, source: Tensor, target: Tensor) -> Any:
        s, t = torch.tanh(self.features(source)), torch.tanh(self.features(target))
        return self.head(s), torch.cov(s.T), torch.cov(t.T)

    data = (rows(), rows() * 2), torch.randint(3, (N,))
    return model, lambda o, y: F.cross_entropy(o[0], y) + (o[1] - o[2]).pow(2).sum(), data


@tabular("negative log marginal likelihood of a deep-kernel Gaussian process", says=TOGETHER)
def deep_kernel() -> Parts:
    @module(features=net(2), log_noise=nn.Parameter(torch.zeros(())))
    def model(self, x: Tensor) -> Tensor:
        z = self.features(x)
        k = torch.exp(-0.5 * (z[:, None] - z[None]).pow(2).sum(-1))
        return k + self.log_noise.exp() * torch.eye(len(x)).to(k)

    def nll(k: Tensor, y: Tensor) -> Tensor:
        chol = torch.linalg.cholesky(k)
        solved = torch.cholesky_solve(y[:, None], chol).squeeze(1)
        return (0.5 * y @ solved + chol.diagonal().log().sum()) / len(y)

    return model, nll, (rows(), torch.randn(N))


# fmt: off
tabular("Cox's partial likelihood (pycox)", says=TOGETHER, name="cox")(
    lambda: (net(), lambda out, y: cox_ph(out, *y), (rows(), survival())))
tabular("RankNet: pairs of documents, BCE of the difference", name="ranknet")(
    lambda: (module(model=net())(lambda self, x1, x2: torch.sigmoid(self.model(x1) - self.model(x2))),
    nn.BCELoss(), ((rows(), rows()), torch.randint(2, (N, 1)).float())))
tabular("root mean squared error: torch.sqrt of MSELoss", says=TOGETHER, name="rmse")(
    lambda: (net(), lambda o, y: torch.sqrt(nn.MSELoss()(o, y) + 1e-8), (rows(), torch.randn(N, 1))))
