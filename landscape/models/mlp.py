"""Multi-layer perceptron of any widths."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import choose

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
