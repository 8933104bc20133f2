"""Networks of today, 24 of them, and how near curvature by differences of gradients comes to a reference.

``python -m benchmarks.certified [SEEDS] [NETWORK]…`` prints a row for each network. The reference is the dense float64 Hessian of the
same weights, of a network rewritten in differentiable operations where PyTorch has no second derivative, or by float64
differences of gradients where there is no such network.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import landscape
from landscape import HessianOperator, Problem
from landscape.curvature.search import start_vector
from landscape.curvature.trace import TRACE_PRODUCTS, hutchpp
from tests.battery.case import net

once = torch.autograd.function.once_differentiable
TOL = 1e-3


class OnceAttention(torch.autograd.Function):
    """softmax(qkᵀ/√d)v, whose backward pass has no derivative, as fused kernels have none."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, p = ctx.saved_tensors
        dp = grads[0] @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return ds @ k, ds.mT @ q, p.mT @ grads[0]


class OnceRelu(torch.autograd.Function):
    """relu(z)², by a kernel that is differentiable once."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.relu().square()

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return 2 * grads[0] * z.relu()


class OnceCrossEntropy(torch.autograd.Function):
    """A fused cross-entropy: the gradient is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        p = z.softmax(1)
        ctx.save_for_backward((p - F.one_hot(y, z.shape[1])) / len(y))
        return F.cross_entropy(z, y)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None


def fused_loss(z: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = OnceCrossEntropy.apply(z, y)  # type: ignore[no-untyped-call]
    return loss


class Block(nn.Module):
    """A transformer's block; ``kind`` is how attention, or the whole, is computed."""

    def __init__(self, width: int, kind: str, causal: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.second, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.kind, self.causal = kind, causal

    def inner(self, h: Tensor) -> Tensor:
        n, t, d = h.shape
        q, k, v = self.qkv(self.norm(h)).view(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        if self.kind == "once":
            mixed: Tensor = OnceAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h = h + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        out: Tensor = h + self.down(F.gelu(self.up(self.second(h)), approximate="tanh"))
        return out

    def forward(self, h: Tensor) -> Tensor:
        if self.kind.startswith("checkpointed"):
            again: Tensor = torch.utils.checkpoint.checkpoint(
                self.inner, h, use_reentrant="re" in self.kind[12:]
            )
            return again
        return self.inner(h)


class Tokens(nn.Module):
    """A small GPT-2 (causal, tied head) or a classifier of sequences; ``kind`` as that of the block."""

    def __init__(self, kind: str = "plain", language: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Parameter(torch.randn(5, 4) / 2)
        self.block, self.norm = Block(4, kind, language), nn.LayerNorm(4)
        self.head = None if language else nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.block(self.words(x) + self.places))
        return (h @ self.words.weight.T).transpose(1, 2) if self.head is None else self.head(h.mean(1))


class Patches(nn.Module):
    """A small ViT: patches of images, a class token, a block."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.token, self.places = (
            nn.Conv2d(1, 4, 3, 3),
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.Parameter(torch.randn(5, 4) / 2),
        )
        self.block, self.norm, self.head = Block(4, "plain"), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(len(h), -1, -1), h), 1) + self.places
        out: Tensor = self.head(self.norm(self.block(h))[:, 0])
        return out


def mlp(act: Callable[[], nn.Module], norm: Callable[[int], nn.Module] | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in ((6, 8), (8, 8)):
        layers += [nn.Linear(i, o), *([norm(o)] if norm else []), act()]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def gated(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    out: Tensor = m.c(F.silu(m.b(h)) * m.d(h))
    return out


def lora(m: Any, x: Tensor) -> Tensor:
    h = (F.linear(x, m.w) + m.up(m.down(x))).tanh()
    out: Tensor = m.head(h)
    return out


def lora_net() -> nn.Module:
    model = net(lora, w=nn.Parameter(torch.randn(8, 6) / 2), down=nn.Linear(6, 2, bias=False),
              up=nn.Linear(2, 8, bias=False), head=nn.Linear(8, 3))  # fmt: skip
    nn.init.zeros_(model.up.weight)  # as LoRA begins
    model.w.requires_grad_(False)
    return model


def images(n: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 6, 6), torch.randint(3, (n,))


def vectors(n: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6), torch.randint(3, (n,))


def words(n: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (n, 5)), torch.randint(3, (n,))


def text(n: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(7, (n, 6))
    return tokens[:, :-1], tokens[:, 1:]


def speech(n: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 7, 4), torch.randint(1, 4, (n, 3))


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    z = outputs.log_softmax(-1).transpose(0, 1)
    n = len(targets)
    lengths = torch.full((n,), z.shape[0]), torch.full((n,), targets.shape[1])
    return F.ctc_loss(z, targets, *lengths, reduction="none").mean()


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return net(lambda m, x: m.head(m.r(x)[0][:, -1]), r=kind(4, 5, batch_first=True), head=nn.Linear(5, 3))


def sequences(n: int = 20) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, 4), torch.randint(3, (n,))


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = m.net(x)
    return out.float()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Network:
    """A network: model, data, loss; ``plain`` the model and ``plain_loss`` the loss of the reference, if others;
    ``differences``: the reference takes float64 differences; ``dtype`` of weights and data; ``bn``."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]] = vectors
    loss: Callable[..., Tensor] = F.cross_entropy
    plain: Callable[[], nn.Module] | None = None
    plain_loss: Callable[..., Tensor] | None = None
    differences: bool = False
    dtype: torch.dtype = torch.float32
    bn: str = "center"
    options: dict[str, Any] = field(default_factory=dict)


RMS = getattr(nn, "RMSNorm", nn.LayerNorm)
NETWORKS: dict[str, Network] = {
    "ReLU": Network(lambda: mlp(nn.ReLU)),
    "ReLU, LayerNorm": Network(lambda: mlp(nn.ReLU, nn.LayerNorm)),
    "GELU, LayerNorm": Network(lambda: mlp(nn.GELU, nn.LayerNorm)),
    "tanh, weight decay": Network(lambda: mlp(nn.Tanh), options={"weight_decay": 0.1}),
    "SwiGLU": Network(lambda: net(gated, a=nn.Linear(6, 6), b=nn.Linear(6, 8), d=nn.Linear(6, 8), c=nn.Linear(8, 3))),
    "SiLU, RMSNorm": Network(lambda: mlp(nn.SiLU, RMS)),
    "BatchNorm": Network(lambda: mlp(nn.ReLU, nn.BatchNorm1d)),
    "BatchNorm of the batch": Network(lambda: mlp(nn.Tanh, nn.BatchNorm1d), bn="train"),
    "convolutions, max pooling": Network(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)), images),
    "hardswish, hardsigmoid": Network(lambda: nn.Sequential(nn.Linear(6, 8), nn.Hardswish(), nn.Linear(8, 8), nn.Hardsigmoid(), nn.Linear(8, 3)), differences=True),
    "bfloat16 weights, GELU": Network(lambda: mlp(nn.GELU, nn.LayerNorm), dtype=torch.bfloat16),
    "bfloat16 weights, ReLU": Network(lambda: mlp(nn.ReLU), dtype=torch.bfloat16),
    "autocast inside": Network(lambda: net(autocast, net=mlp(nn.GELU)), plain=lambda: net(lambda m, x: m.net(x), net=mlp(nn.GELU))),
    "LoRA": Network(lora_net),
    "weight_norm": Network(lambda: nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))),
    "EmbeddingBag, max": Network(lambda: net(lambda m, x: m.head(m.bag(x).tanh()), bag=nn.EmbeddingBag(7, 6, mode="max"), head=nn.Linear(6, 3)), words,
        plain=lambda: net(lambda m, x: m.head(F.embedding(x, m.bag.weight).amax(1).tanh()), bag=nn.EmbeddingBag(7, 6, mode="max"), head=nn.Linear(6, 3))),
    "LSTM": Network(lambda: recurrent(nn.LSTM), sequences),
    "CTC": Network(lambda: net(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(4, 6), b=nn.Linear(6, 4)), speech, ctc, differences=True),
    "attention, once differentiable": Network(lambda: Tokens("once"), words, plain=Tokens),
    "checkpointed": Network(lambda: Tokens("checkpointed"), words, plain=Tokens),
    "checkpointed, reentrant": Network(lambda: Tokens("checkpointed re"), words, plain=Tokens),
    "a small GPT-2": Network(lambda: Tokens("plain", language=True), text),
    "a small ViT": Network(Patches, images),
    "fused loss, ReLU² kernel": Network(
        lambda: net(lambda m, x: m.b(OnceRelu.apply(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), loss=fused_loss,
        plain=lambda: net(lambda m, x: m.b(m.a(x).relu().square()), a=nn.Linear(6, 8), b=nn.Linear(8, 3)), plain_loss=F.cross_entropy),
}  # fmt: skip


def differences(problem: Problem) -> Tensor:
    """The Hessian by float64 differences of gradients, extrapolated from two steps (Richardson 1911)."""

    def column(e: Tensor, step: float) -> Tensor:
        return (
            problem.gradient(problem.weights + step * e) - problem.gradient(problem.weights - step * e)
        ) / (2 * step)

    eye = torch.eye(problem.layout.size, dtype=torch.float64)
    h = torch.stack([(4 * column(e, 1e-5) - column(e, 2e-5)) / 3 for e in eye], 1)
    return (h + h.T) / 2


def reference(net: Network, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """The dense Hessian in float64 of the weights of ``model``."""
    plain = (net.plain or net.model)()
    plain.load_state_dict(model.state_dict())
    loss = net.plain_loss or net.loss
    problem = Problem(plain.double(), loss, data, dtype=torch.float64, check="off", **net.options)
    problem = problem.with_batchnorm(net.bn, 20)
    if net.differences:
        return differences(problem)
    return HessianOperator(problem, derivatives="exact") @ torch.eye(problem.layout.size, dtype=torch.float64)


@dataclass
class Found:
    """Of one network and seed: whether each number was within its stated error, and stated over true errors."""

    inside: dict[str, bool]
    ratios: list[float]
    worst: float


def parts(net: Network, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs and targets of a seed."""
    torch.manual_seed(seed)
    data = net.data()
    torch.manual_seed(100 + seed)
    model = net.model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p) * (p.std() if p.numel() > 1 else 1))
    x, y = (t.to(net.dtype) if t.is_floating_point() else t for t in data)
    return model.to(net.dtype), x, y


def found(net: Network, seed: int) -> Found:
    model, x, y = parts(net, seed)
    h = reference(net, copy.deepcopy(model).double(), (x, y))
    values = torch.linalg.eigvalsh(h).flip(0).numpy()
    problem = Problem(model, net.loss, (x, y), **net.options).with_batchnorm(net.bn, 20)
    ends = landscape.extreme_eigenvalues(problem, TOL, derivatives="differences")
    top = landscape.top_eigenvalues(problem, 5, TOL, derivatives="differences")
    trace = landscape.trace(problem, derivatives="differences")
    low, high = trace.interval(0.99)
    made = HessianOperator(problem, derivatives="differences")
    drawn = 0

    def of_reference(rows: Tensor) -> Tensor:
        """Those of the basis by differences: any basis will do, but another is another draw."""
        nonlocal drawn
        drawn += len(rows)
        return (made @ rows.T).T if drawn <= TRACE_PRODUCTS // 3 else (rows.double() @ h).to(rows)

    same = hutchpp(of_reference, start_vector(problem, 0, len(h)))
    rounding = 1e-5 * float(np.abs(values).sum())  # of vectors in float32
    off = np.abs(np.asarray(top.values) - values[:5])
    inside = {
        "λ_max": bool(abs(ends.max - values[0]) <= ends.residual_max),
        "λ_min": bool(abs(ends.min - values[-1]) <= ends.residual_min),
        "top 5": bool((off <= np.asarray(top.residuals)).all()),
        "trace, same draws": abs(trace.value - same["value"]) <= trace.product_error + rounding,
        "trace": low - trace.product_error <= h.trace() <= high + trace.product_error,
    }
    rows = torch.as_tensor(top.vectors).double()
    images, stated = made.verified(rows)
    true = (images.double() - rows @ h).norm(dim=1).numpy()
    off_reference = 1e-8 * abs(values[0]) if net.differences else 0.0
    inside["products"] = bool((true <= np.array(stated) + off_reference).all())
    ratios = [s / t for s, t in zip(stated, true, strict=True) if t > 0 and not net.differences]
    if not all([ends.converged, top.converged]):
        inside["converged"] = False
    return Found(inside, ratios, float(true.max() / abs(values[0])))


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    names = sys.argv[2:] or list(NETWORKS)
    warnings.simplefilter("ignore")
    every: list[Found] = []
    print(
        "| network | within stated errors | error of a product, relative | stated/true, median |\n| --- | --- | --- | --- |"
    )
    for name in names:
        each = [found(NETWORKS[name], seed) for seed in range(seeds)]
        every += each
        numbers = [v for one in each for v in one.inside.values()]
        missed = sorted({k for one in each for k, v in one.inside.items() if not v})
        ratio = np.median([r for one in each for r in one.ratios] or [np.nan])
        print(
            f"| {name} | {sum(numbers)}/{len(numbers)} {' '.join(missed)} | {max(one.worst for one in each):.1e} | {ratio:.2f} |",
            flush=True,
        )
    numbers = [v for one in every for v in one.inside.values()]
    share, ratio = np.mean(numbers), np.median([r for one in every for r in one.ratios] or [np.nan])
    print(f"all: {sum(numbers)} of {len(numbers)}, stated/true {ratio:.2f}")
    if share < 0.99 or ratio > 3:
        sys.exit("fewer than 99% are within their stated errors, or these are over three times the true ones")


if __name__ == "__main__":
    main()
