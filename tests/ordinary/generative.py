"""Models of the data: autoencoders, diffusion, adversaries, flows, energies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ordinary.use import Parts, Theme, seeded

generative = Theme("generative")
N = 8
RANDOM: dict[str, Any] = {
    "expected": "refused",
    "undefined": True,
    "random": True,
    "remedied": True,
    "total": seeded,
    "words": "random",
}


def points(samples: int = N, features: int = 5) -> Tensor:
    return torch.randn(samples, features)


@generative("denoising autoencoder, MSE")
def autoencoder() -> Parts:
    model = nn.Sequential(
        nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 5)
    )
    x = points()
    return model, nn.MSELoss(), (x + 0.1 * torch.randn_like(x), x)


class VAE(nn.Module):
    """PyTorch's example."""

    def __init__(self, always: bool = True) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(5, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.fc3, self.fc4 = nn.Linear(2, 4), nn.Linear(4, 5)
        self.always = always

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        if not (self.training or self.always):
            return mu
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def elbo(out: Any, x: Tensor, beta: float = 1.0) -> Tensor:
    recon, mu, logvar = out
    bce = F.binary_cross_entropy(recon, x, reduction="none").sum(1).mean()
    kld = -0.5 * torch.mean(torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1))
    return bce + beta * kld


@generative(
    "VAE that samples in every mode", **RANDOM, why="the latent variables are drawn, also in eval mode"
)
def vae() -> Parts:
    x = torch.rand(N, 5)
    return VAE(), elbo, (x, x)


def mean_elbo(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return elbo(model(data[0]), data[1])


@generative(
    "VAE example's loss: BCE and KL divergence as sums",
    expected="refused",
    undefined=True,
    words="sum",
    after=mean_elbo,
    why="it is a sum over the samples, which depends on how many there are",
)
def vae_sum() -> Parts:
    def loss_function(out: Any, x: Tensor) -> Tensor:
        recon_x, mu, logvar = out
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 5), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    x = torch.rand(N, 5)
    return VAE(always=False), loss_function, (x, x)


@generative("hinge loss of a discriminator with spectral normalisation")
def hinge_gan() -> Parts:
    net = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)),
        nn.LeakyReLU(0.1),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 1)),
    )
    net.eval()
    x, sign = points(2 * N), torch.ones(2 * N, 1)
    sign[N:] = -1
    return net, lambda d, sign: F.relu(1 - sign * d).mean(), (x, sign)
