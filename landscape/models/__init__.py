"""Networks by name. ``build("mlp", widths=[784, 50, 50, 10])``; ``names()`` lists them.

Networks that are not convolutional stand here. Each adds itself to :data:`landscape.core.registry.models`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import AtLeastTwo, Count, Positive, checked, choose
from landscape.models.convolutional import scaled

__all__ = ["build", "names", "options"]

names, options = registry.models.names, registry.models.options


@checked()
def build(name: str, **kwargs: Any) -> nn.Module:
    """A new network with PyTorch's default initialization from the current global random state.

    Args:
        name: one of :func:`names`.
        kwargs: its options, such as ``widths=[784, 50, 50, 10]``; those left out have their defaults.

    Returns:
        The network, in training mode.

    Raises:
        InputError: for an unknown name or option; it names the nearest known one.

    Example:
        >>> sum(p.numel() for p in build("mlp", widths=[784, 50, 50, 10]).parameters())
        42310
    """
    model = registry.models.make(name, kwargs)
    if not isinstance(model, nn.Module):  # as a plugin may have it
        raise InputError(f"model.name: '{name}' gives a {type(model).__name__}, it must give an nn.Module")
    return model


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "identity": nn.Identity,
}


@registry.models.add("mlp")
def mlp(widths: list[int], activation: str = "relu") -> nn.Sequential:
    """Inputs (B, ...) flattened to widths[0] features -> logits (B, widths[-1]).

    Args:
        widths: Numbers of features: the inputs, the hidden layers, the classes.
        activation: What stands between every two linear layers: relu, tanh, sigmoid, gelu, silu, softplus or
            identity. Source: ours; DPSGD-2020 names none for its MNIST network.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise InputError(f"model.widths: {widths} is not allowed, it must be two or more positive integers")
    make = ACTIVATIONS[choose("model.activation", activation, ACTIVATIONS)]
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        if i > 0:
            layers.append(make())
        layers.append(nn.Linear(fan_in, fan_out))
    return nn.Sequential(*layers)


@registry.models.add("lstm")
class LSTM(nn.Module):
    """Frames (N, T, inputs) -> logits (N, classes, T): the classes second, as cross-entropy needs them.

    The defaults are DPSGD-2020's acoustic model: 6 layers of 512 cells a direction, 260 inputs, a bottleneck
    of 256 and 32,000 classes, 43,154,944 parameters. The width scales cells and bottleneck.

    Args:
        inputs: Features of a frame. Source: DPSGD-2020's acoustic model (Table 1).
        layers: Number of bi-directional layers. Source: DPSGD-2020's acoustic model (Table 1).
        cells: Cells of a layer in each direction. Source: DPSGD-2020's acoustic model (Table 1).
        bottleneck: Width of the linear bottleneck. Source: DPSGD-2020's acoustic model (Table 1).
    """

    def __init__(
        self,
        classes: AtLeastTwo = 32000,
        inputs: Count = 260,
        layers: Count = 6,
        cells: Count = 512,
        bottleneck: Count = 256,
        width: Positive = 1.0,
    ) -> None:
        super().__init__()
        cells, bottleneck = scaled(cells, width), scaled(bottleneck, width)
        self.lstm = nn.LSTM(inputs, cells, layers, batch_first=True, bidirectional=True)
        self.bottleneck = nn.Linear(2 * cells, bottleneck)
        self.output = nn.Linear(bottleneck, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.bottleneck(self.lstm(x)[0]))
        return logits.transpose(1, 2)


class Block(nn.Module):
    """A block of GPT-2: causal attention and an MLP, each on normalized features and added to its input."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.attention = nn.LayerNorm(features), nn.Linear(features, 3 * features)
        self.projection = nn.Linear(features, features)
        self.mlp = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, 4 * features),
            nn.GELU(approximate="tanh"), nn.Linear(4 * features, features),
        )  # fmt: skip

    def forward(self, h: Tensor) -> Tensor:
        qkv = self.attention(self.norm(h)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (N, heads, T, features/heads)
        h = h + self.projection(attended.transpose(1, 2).flatten(2))
        result: Tensor = h + self.mlp(h)
        return result


@registry.models.add("gpt")
class GPT(nn.Module):
    """Tokens (N, T) -> logits (N, classes, T) of the next ones; the classes are second, as in the LSTM.

    The defaults are GPT-2 (Radford et al. 2019) without dropout, 124,439,808 parameters with the tied ones
    counted once. The width scales the features.

    Args:
        classes: Number of different tokens. Source: Radford et al. 2019.
        context: Largest number of tokens in a row. Unit: tokens. Source: Radford et al. 2019.
        layers: Number of blocks. Source: Radford et al. 2019.
        features: Features of a token, a multiple of the heads. Source: Radford et al. 2019.
        heads: Heads of attention. Source: Radford et al. 2019.
    """

    def __init__(
        self,
        classes: AtLeastTwo = 50257,
        context: Count = 1024,
        layers: Count = 12,
        features: Count = 768,
        heads: Count = 12,
        width: Positive = 1.0,
    ) -> None:
        super().__init__()
        features = scaled(features, width)
        if features % heads:
            raise InputError(f"model.heads: {heads} is not allowed, it must divide {features} features")
        self.tokens, self.places = nn.Embedding(classes, features), nn.Embedding(context, features)
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(features), nn.Linear(features, classes, bias=False)
        self.output.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # the last weights of a branch are smaller, as the branches add up
                last = name.endswith(("projection.weight", "mlp.3.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers if last else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.places.weight):
            raise InputError(
                "model.context",
                len(self.places.weight),
                allowed=f"at least {x.shape[1]}, the tokens of a row",
            )
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        logits: Tensor = self.output(self.norm(self.blocks(h)))
        return logits.transpose(1, 2)


@registry.models.add("quadratic")
class Quadratic(nn.Module):
    """Per-sample losses L_i(w) = s_i/2 · (w−c)ᵀH(w−c) + b_iᵀ(w−c), for samples x_i = (s_i, b_i).

    H = Q diag(eigenvalues) Qᵀ. Input x (B, 1 + P), output (B,). With the samples' mean s at 1 and mean b at
    0, as in the data set "quadratic", the mean loss is ½(w−c)ᵀH(w−c) and its Hessian exactly H. All in
    float64.

    Args:
        eigenvalues: The P eigenvalues of H.
        rotate: Q is a random orthogonal matrix; if false, the identity. Source: ours.
        seed: Draws Q. Source: ours.
        start: All initial weights. Source: ours.
        center: All coordinates of c. Source: ours.
    """

    hessian: Tensor
    center: Tensor

    def __init__(
        self,
        eigenvalues: list[float],
        rotate: bool = True,
        seed: int = 0,
        start: float = 1.0,
        center: float = 0.0,
    ) -> None:
        super().__init__()
        if not eigenvalues:
            raise InputError("model.eigenvalues: [] is not allowed, it must hold at least one number")
        size = len(eigenvalues)
        generator = torch.Generator().manual_seed(seed)
        q = torch.eye(size, dtype=torch.float64)
        if rotate:
            q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
        h = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
        self.register_buffer("hessian", ((h + h.T) / 2))
        self.register_buffer("center", torch.full((size,), center, dtype=torch.float64))
        self.w = nn.Parameter(torch.full((size,), start, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        offset = self.w - self.center
        return 0.5 * x[:, 0] * (offset @ self.hessian @ offset) + x[:, 1:] @ offset


@registry.models.add("saddle")
class Saddle(nn.Module):
    """L_i(w) = s_i f(w) + b_iᵀw, f(x, y) = Σ_k γ(x_k⁴/4 − x_k²/2) + κ/2 ‖y‖², for samples x_i = (s_i, b_i).

    x are the unstable coordinates, which come first, y the rest. The Hessian of f at its saddle w = 0 has −γ
    and κ; the minima are at x_k = ±1, y = 0, where f is :attr:`depth` = −γ/4 for each unstable coordinate.
    Training starts at the saddle, so that it leaves only by noise. Data as for
    :class:`Quadratic`. DPSGD-2020's problem is in an appendix that is not
    available: this family is ours.

    Args:
        dimension: Number of weights. Source: ours.
        unstable: Number of unstable coordinates. Source: ours.
        descent: γ. Source: ours.
        curvature: κ. Source: ours.
    """

    def __init__(
        self, dimension: Count = 2, unstable: int = 1, descent: Positive = 1.0, curvature: Positive = 1.0
    ) -> None:
        super().__init__()
        if not 1 <= unstable <= dimension:
            raise InputError(f"model.unstable: {unstable} is not allowed, it must be 1…{dimension}")
        self.unstable, self.descent, self.curvature = unstable, descent, curvature
        self.w = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    @property
    def depth(self) -> float:
        """The minimum of f."""
        return -self.descent * self.unstable / 4

    def forward(self, x: Tensor) -> Tensor:
        u, y = self.w[: self.unstable], self.w[self.unstable :]
        f = self.descent * (u**4 / 4 - u**2 / 2).sum() + self.curvature / 2 * (y**2).sum()
        return x[:, 0] * f + x[:, 1:] @ self.w
