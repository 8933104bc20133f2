"""Models of the data: autoencoders, diffusion, adversaries, flows, energies."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.case import module
from tests.ordinary.use import BATCHES, Parts, Theme, per_batch

generative = Theme("generative")
N = 8


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


def mean_elbo(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return elbo(model(data[0]), data[1])


@generative.undefined("VAE example's loss: BCE and KL divergence as sums",
    "it is a sum over the samples, which depends on how many there are", "sum", after=mean_elbo)  # fmt: skip
def vae_sum() -> Parts:
    def loss_function(out: Any, x: Tensor) -> Tensor:
        recon_x, mu, logvar = out
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 5), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    x = torch.rand(N, 5)
    return VAE(always=False), loss_function, (x, x)


@generative.random(
    "β-VAE, dict of outputs, conditional on a class", "the latent variables are drawn, also in eval mode"
)
def conditional_vae() -> Parts:
    @module(encode=nn.Linear(8, 4), decode=nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5)))
    def model(self, x: Tensor, c: Tensor) -> dict[str, Tensor]:
        c = F.one_hot(c, 3).to(x)
        mu, logvar = self.encode(torch.cat([x, c], 1)).chunk(2, dim=1)
        q = torch.distributions.Normal(mu, (0.5 * logvar).exp())
        z = q.rsample()
        kl = torch.distributions.kl_divergence(
            q, torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(mu))
        )
        return {"recon": self.decode(torch.cat([z, c], 1)), "kl": kl.sum(1).mean()}

    x = points()
    data = {"x": x, "c": torch.randint(3, (N,))}, x
    return model, lambda o, x: F.mse_loss(o["recon"], x) + 4 * o["kl"], data


@generative.no_hessian("VQ-VAE: nearest code, straight-through estimator, commitment loss",
    "straight-through and stop-gradient: gradients are not those of the loss's value")  # fmt: skip
def vq_vae() -> Parts:
    @module(encoder=nn.Linear(5, 3), decoder=nn.Linear(3, 5), codebook=nn.Embedding(4, 3))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        distances = (
            z.pow(2).sum(1, keepdim=True)
            + self.codebook.weight.pow(2).sum(1)
            - 2 * z @ self.codebook.weight.t()
        )
        quantized = self.codebook(distances.argmin(1))
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized), loss

    x = points()
    return model, lambda o, x: F.mse_loss(o[0], x) + o[1], (x, x)


class Denoiser(nn.Module):
    """Predicts the noise in x at time t."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(10, 3), nn.Sequential(nn.Linear(8, 5), nn.SiLU(), nn.Linear(5, 5))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, self.time(t)], dim=1))


ALPHAS = torch.linspace(0.95, 0.3, 10)


@generative.random(
    "DDPM: forward draws t and the noise and returns the loss", "times and noise are drawn in each pass"
)
def ddpm() -> Parts:
    @module(eps_model=Denoiser(), alphas_bar=ALPHAS.clone())
    def model(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        a = self.alphas_bar[t][:, None]
        return F.mse_loss(self.eps_model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    x = points()
    return model, lambda out, _: out, (x, x)


@generative("diffusion: t and noise are drawn once and given as data")
def diffusion_with_data() -> Parts:
    x, noise, t = points(), points(), torch.randint(10, (N,))
    a = ALPHAS[t][:, None]
    return Denoiser(), F.mse_loss, ((a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


@generative.random(
    "flow matching: the loss's noise and times are drawn in forward", "times and noise are drawn in each pass"
)
def flow_matching() -> Parts:
    @module(velocity=nn.Sequential(nn.Linear(6, 6), nn.ELU(), nn.Linear(6, 5)))
    def model(self, x1: Tensor) -> tuple[Tensor, Tensor]:
        x0, t = torch.randn_like(x1), torch.rand(len(x1), 1, device=x1.device)
        xt = (1 - t) * x0 + t * x1
        return self.velocity(torch.cat([xt, t.to(xt)], 1)), x1 - x0

    x = points()
    return model, lambda out, _: F.mse_loss(*out), (x, torch.zeros(N))


def discriminator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))


@generative("generator against a frozen discriminator")
def gan_generator() -> Parts:
    model = module(
        netG=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5)),
        netD=discriminator().requires_grad_(False),
    )(lambda self, noise: self.netD(self.netG(noise)))
    data = points(N, 3), torch.ones(N, 1)
    return model, F.binary_cross_entropy_with_logits, data


@generative("WGAN-GP critic: the gradient penalty by autograd.grad in forward")
def wgan_gp() -> Parts:
    @module(net=discriminator())
    def model(self, real: Tensor, fake: Tensor, alpha: Tensor) -> Any:
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        d = self.net(interpolates)
        gradients = torch.autograd.grad(
            d, interpolates, torch.ones_like(d), create_graph=True, retain_graph=True
        )[0]
        return self.net(real), self.net(fake), gradients

    def loss(out: Any, _: Tensor) -> Tensor:
        real, fake, gradients = out
        return fake.mean() - real.mean() + 10 * ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    return model, loss, ((points(), points() + 1, torch.rand(N, 1)), torch.zeros(N))


@generative.random(
    "WGAN-GP critic that draws its interpolation", "the points of the penalty are drawn in each pass"
)
def wgan_gp_random() -> Parts:
    @module(net=nn.Sequential(nn.Linear(5, 6), nn.Softplus(), nn.Linear(6, 1)))
    def model(self, real: Tensor, fake: Tensor) -> Any:
        alpha = torch.rand(real.size(0), 1)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        gradients = torch.autograd.grad(self.net(interpolates).sum(), interpolates, create_graph=True)[0]
        return self.net(real), self.net(fake), gradients

    def loss(out: Any, _: Tensor) -> Tensor:
        real, fake, gradients = out
        return fake.mean() - real.mean() + 10 * ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    return model, loss, ((points(), points() + 1), torch.zeros(N))


@generative("hinge loss of a discriminator with spectral normalization")
def hinge_gan() -> Parts:
    layers = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.LeakyReLU(0.1)
    net = nn.Sequential(*layers, nn.utils.parametrizations.spectral_norm(nn.Linear(6, 1)))
    net.eval()
    x, sign = points(2 * N), torch.ones(2 * N, 1)
    sign[N:] = -1
    return net, lambda d, sign: F.relu(1 - sign * d).mean(), (x, sign)


class Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.s, self.t = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        xm = x * self.mask
        s, t = self.s(xm).tanh() * (1 - self.mask), self.t(xm) * (1 - self.mask)
        return xm + (1 - self.mask) * (x * s.exp() + t), s.sum(1)


@generative("RealNVP: negative log-likelihood under a standard normal")
def realnvp() -> Parts:
    mask = torch.tensor([1.0, 0, 1, 0])

    @module(layers=nn.ModuleList([Coupling(mask), Coupling(1 - mask)]))
    def model(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x), dtype=x.dtype)
        for layer in self.layers:
            x, ld = layer(x)
            log_det = log_det + ld
        return -0.5 * (x.pow(2) + math.log(2 * math.pi)).sum(1) + log_det

    x = points(N, 4)
    return model, lambda log_prob, _: -log_prob.mean(), (x, x)


@generative("MADE: masked linear layers, Gaussian conditionals")
def made() -> Parts:
    class MaskedLinear(nn.Linear):
        def __init__(self, i: int, o: int, mask: Tensor) -> None:
            super().__init__(i, o)
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mask * self.weight, self.bias)

    degrees = torch.arange(6) % 3 + 1
    first = (degrees[:, None] >= torch.arange(1, 5)).float()
    second = (torch.arange(1, 5)[:, None] > degrees).float()

    @module(hidden=MaskedLinear(4, 6, first), out=MaskedLinear(6, 8, second.repeat(2, 1)))
    def model(self, x: Tensor) -> Any:
        return self.out(F.relu(self.hidden(x))).chunk(2, 1)

    x = points(N, 4)

    def nll(out: Any, x: Tensor) -> Tensor:
        mu, log_sigma = out
        return (0.5 * ((x - mu) * (-log_sigma).exp()) ** 2 + log_sigma).sum(1).mean()

    return model, nll, (x, x)


@generative("energy model: contrastive divergence with given negatives")
def energy_model() -> Parts:
    @module(net=nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 1)))
    def model(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(real).squeeze(-1), self.net(fake).squeeze(-1)

    def loss(e: Any, _: Tensor) -> Tensor:
        real, fake = e
        return (real - fake).mean() + 0.1 * (real**2 + fake**2).mean()

    return model, loss, ((points(), 2 * points()), torch.zeros(N))


@generative("denoising score matching of an energy: the score by autograd.grad")
def score_matching() -> Parts:
    @module(energy=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    def model(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    x, noise, sigma = points(N, 4), points(N, 4), 0.5
    data = (x + sigma * noise, noise)
    return model, lambda score, noise: 0.5 * ((score * sigma + noise) ** 2).sum(1).mean(), data


@generative("PixelCNN: masked convolutions, cross-entropy of 4 gray levels")
def pixel_cnn() -> Parts:
    class MaskedConv2d(nn.Conv2d):
        def __init__(self, kind: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", torch.ones_like(self.weight))
            h, w = self.kernel_size
            self.mask[:, :, h // 2, w // 2 + (kind == "B") :] = 0
            self.mask[:, :, h // 2 + 1 :] = 0

        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, self.weight * self.mask, self.bias)

    first, second = MaskedConv2d("A", 1, 3, 3, padding=1), MaskedConv2d("B", 3, 3, 3, padding=1)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv2d(3, 4, 1))
    levels = torch.randint(4, (N, 5, 5))
    return model, nn.CrossEntropyLoss(), (levels[:, None] / 3.0, levels)


@generative.random(
    "Gumbel-softmax: categorical latents, drawn", "the Gumbel noise is drawn, also in eval mode"
)
def gumbel() -> Parts:
    @module(encoder=nn.Linear(5, 6), decoder=nn.Linear(6, 5))
    def model(self, x: Tensor) -> Tensor:
        logits = self.encoder(x).view(-1, 2, 3)
        return self.decoder(F.gumbel_softmax(logits, tau=1.0, hard=False).flatten(1))

    x = points()
    return model, F.mse_loss, (x, x)


@generative("neural ODE: Runge-Kutta steps, end point against data")
def neural_ode() -> Parts:
    @module(func=nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)))
    def model(self, y: Tensor, steps: int = 2, h: float = 0.5) -> Tensor:
        path = []
        for _ in range(steps):
            k1 = self.func(y**3)
            k2 = self.func((y + h / 2 * k1) ** 3)
            k3 = self.func((y + h / 2 * k2) ** 3)
            k4 = self.func((y + h * k3) ** 3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(y)
        return torch.stack(path, 1)

    y0 = points(N, 2)
    return model, lambda pred, true: torch.mean(torch.abs(pred - true)), (y0, torch.randn(N, 2, 2))


@generative("MMD of generated and real samples, a list of batches", says=BATCHES, total=per_batch)
def mmd() -> Parts:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / 4).mean()

    def loss(fake: Tensor, real: Tensor) -> Tensor:
        return kernel(fake, fake) + kernel(real, real) - 2 * kernel(fake, real)

    model = nn.Sequential(nn.Linear(2, 5), nn.Softplus(), nn.Linear(5, 3))
    return model, loss, [(points(6, 2), points(6, 3)), (points(6, 2), points(6, 3))]


# fmt: off
generative.random("VAE that samples in every mode", "the latent variables are drawn, also in eval mode",
    name="vae")(
    lambda: (VAE(), elbo, ((x := torch.rand(N, 5)), x)))
generative("VAE that samples in training only", name="vae_eval")(
    lambda: (VAE(always=False), elbo, ((x := torch.rand(N, 5)), x)))
generative("DCGAN tutorial: discriminator on real and fake, BCE with sigmoid", name="gan_discriminator")(
    lambda: (nn.Sequential(*discriminator(), nn.Sigmoid()),
    lambda out, label: nn.BCELoss()(out.view(-1), label),
    (torch.cat([points(), 0.5 * points() + 1]), torch.cat([torch.ones(N), torch.zeros(N)]))))
