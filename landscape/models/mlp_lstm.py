"""The networks of MNIST and of speech: a multilayer perceptron, and a bi-directional LSTM."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import choose, positive
from landscape.models.convolutional import check, scaled

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
        classes: int = 32000,
        inputs: int = 260,
        layers: int = 6,
        cells: int = 512,
        bottleneck: int = 256,
        width: float = 1.0,
    ) -> None:
        check(classes, width)
        for name, value in (
            ("inputs", inputs),
            ("layers", layers),
            ("cells", cells),
            ("bottleneck", bottleneck),
        ):
            positive(f"model.{name}", value, least=1)
        super().__init__()
        cells, bottleneck = scaled(cells, width), scaled(bottleneck, width)
        self.lstm = nn.LSTM(inputs, cells, layers, batch_first=True, bidirectional=True)
        self.bottleneck = nn.Linear(2 * cells, bottleneck)
        self.output = nn.Linear(bottleneck, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.bottleneck(self.lstm(x)[0]))
        return logits.transpose(1, 2)
