"""The acoustic model: bi-directional LSTM layers, a linear bottleneck, and the states of a hybrid system."""

from __future__ import annotations

from torch import Tensor, nn

from landscape.core import registry
from landscape.core.options import positive
from landscape.models.layers import check, scaled


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
