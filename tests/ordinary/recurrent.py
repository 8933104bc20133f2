"""Series, speech and control."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.ordinary.use import Parts, Theme, by_size

recurrent = Theme("recurrent")
N, T = 8, 6


def series(features: int = 2) -> Tensor:
    return torch.randn(N, T, features)


@recurrent("time first: LSTM without batch_first, data transposed in forward")
def time_first() -> Parts:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            _, (h, _) = self.rnn(x.transpose(0, 1))
            return self.out(h[-1]).squeeze(-1)

    return Net(), F.mse_loss, (series(), torch.randn(N))


@recurrent(
    "speech: CTC over (T, N, C), targets and lengths in a tuple, a list of batches",
    expected="refused_hessian",
    words="second derivative",
    why="PyTorch has no second derivative of ctc_loss",
)
def speech_ctc() -> Parts:
    class SpeechModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rnn, self.fc = (
                nn.Conv1d(3, 4, 3, padding=1),
                nn.GRU(4, 3, batch_first=True, bidirectional=True),
                nn.Linear(6, 5),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return F.log_softmax(self.fc(self.rnn(x)[0]), dim=2).transpose(0, 1)

    criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def loss(log_probs: Tensor, y: Any) -> Tensor:
        return criterion(log_probs, *y)

    def batch(n: int) -> Any:
        lengths = torch.randint(1, 4, (n,))
        labels = torch.randint(1, 5, (n, 3)) * (torch.arange(3) < lengths[:, None])
        return torch.randn(n, 8, 3), (labels, torch.full((n,), 8), lengths)

    return SpeechModel(), loss, [batch(4), batch(4)]


@recurrent("sequences of several lengths padded by a collate function, lengths in the inputs", total=by_size)
def collated() -> Parts:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.RNN(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            out, _ = self.rnn(x)
            return self.out(out[torch.arange(len(x)), lengths - 1])

    def collate(sizes: list[int]) -> Any:
        padded = pad_sequence([torch.randn(n, 2) for n in sizes], batch_first=True)
        return (padded, torch.tensor(sizes)), torch.randint(2, (len(sizes),))

    return Tagger(), nn.CrossEntropyLoss(), [collate([3, 5, 2]), collate([6, 1, 4]), collate([2, 2])]


@recurrent("Transformer forecast: encoder with a padding mask given as src_key_padding_mask")
def masked_transformer() -> Parts:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(2, 4)
            layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True)
            self.encoder, self.out = (
                nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
                nn.Linear(4, 1),
            )

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            z = self.encoder(self.embed(x), src_key_padding_mask=padding)
            return self.out((z * ~padding[..., None]).sum(1) / (~padding).sum(1, keepdim=True))

    padding = torch.arange(T) >= torch.randint(2, T + 1, (N, 1))
    return Net(), F.mse_loss, ((series(), padding), torch.randn(N, 1))
