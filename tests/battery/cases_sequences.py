"""Recurrent layers, attention, embeddings and sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.battery.case import Case, Net, Parts, parameter
from tests.problems import LanguageModel, tokens


def sequences(samples: int = 7, length: int = 5, features: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, length, features), torch.randint(3, (samples,))


def words(samples: int = 11, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (samples, length)), torch.randint(3, (samples,))


def _recurrent(name: str, layer: Callable[[], nn.Module], width: int = 3, **expected: Any) -> Case:
    def build() -> Parts:
        model = Net(lambda m, x: m.head(m.body(x)[0][:, -1]), body=layer(), head=nn.Linear(width, 3))
        return model, F.cross_entropy, sequences()

    return Case(name, build, **expected)


def _tokens(
    name: str, body: Callable[[], nn.Module], forward: Callable[[Any, Tensor], Tensor], **expected: Any
) -> Case:
    def build() -> Parts:
        return Net(forward, e=body(), head=nn.Linear(4, 3)), F.cross_entropy, words()

    return Case(name, build, **expected)


def cell_loop() -> Parts:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return m.head(h)

    return Net(forward, cell=nn.GRUCell(3, 3), head=nn.Linear(3, 3)), F.cross_entropy, sequences()


def sequence_first() -> Parts:
    """An LSTM that takes the time first; the model transposes."""
    model = Net(
        lambda m, x: m.head(m.body(x.transpose(0, 1))[1][0][-1]), body=nn.LSTM(3, 3), head=nn.Linear(3, 3)
    )
    return model, F.cross_entropy, sequences()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(3, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out: Tensor = self.head(self.body(packed)[1][-1])
        return out


def packed() -> Parts:
    x, y = sequences()
    return Packed(), F.cross_entropy, ((x, torch.randint(1, 6, (7,))), y)


def attention() -> Parts:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.a(x, x, x, need_weights=False)[0].mean(1))

    a = nn.MultiheadAttention(4, 2, batch_first=True)
    return Net(forward, a=a, head=nn.Linear(4, 3)), F.cross_entropy, sequences(7, 3, 4)


def attention_with_weights() -> Parts:
    def forward(m: Any, x: Tensor) -> Tensor:
        out, weights = m.a(x, x, x)
        return m.head(out.mean(1) + weights.square().sum((1, 2))[:, None])

    a = nn.MultiheadAttention(4, 2, batch_first=True, bias=False)
    return Net(forward, a=a, head=nn.Linear(4, 3)), F.cross_entropy, sequences(7, 3, 4)


def encoder() -> Parts:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu")
    return (
        Net(lambda m, x: m.head(m.e(x).mean(1)), e=layer, head=nn.Linear(4, 3)),
        F.cross_entropy,
        sequences(7, 3, 4),
    )


def encoder_norm_first() -> Parts:
    layer = nn.TransformerEncoderLayer(4, 1, 4, dropout=0.1, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return (
        Net(lambda m, x: m.head(m.e(x)[:, 0]), e=body, head=nn.Linear(4, 3)),
        F.cross_entropy,
        sequences(7, 3, 4),
    )


def padded_encoder(nested: bool) -> Callable[[], Parts]:
    """Padded sequences, and a mean over all places: without gradients PyTorch's fast path makes those zero."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x, src_key_padding_mask=padding).mean(1))
            return out

    def build() -> Parts:
        x, y = sequences(7, 3, 4)
        return Padded(), F.cross_entropy, ((x, torch.arange(3) >= torch.randint(1, 4, (7, 1))), y)

    return build


def decoder() -> Parts:
    layer = nn.TransformerDecoderLayer(4, 1, 4, batch_first=True)
    model = Net(lambda m, x: m.head(m.d(x, x.flip(1)).mean(1)), d=layer, head=nn.Linear(4, 3))
    return model, F.cross_entropy, sequences(5, 3, 4)


def causal_attention() -> Parts:
    """F.scaled_dot_product_attention, and a class at each place: (N, C, T) against (N, T)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.mix(x).chunk(3, -1)
        return m.head(F.scaled_dot_product_attention(q, k, v, is_causal=True)).transpose(1, 2)

    model = Net(forward, mix=nn.Linear(4, 12), head=nn.Linear(4, 3))
    return model, F.cross_entropy, (torch.randn(6, 4, 4), torch.randint(3, (6, 4)))


def own_loss(causal: bool) -> Parts:
    return LanguageModel(causal, as_dict=not causal), None, tokens()


def _of_tokens(data: Any) -> tuple[Any, Any]:
    return dict(data), data["labels"]


def tied_embedding() -> Parts:
    """A language model whose head is its embedding; the loss takes (N·T, C)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.mix(m.e(x)).tanh())

    e, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = e.weight
    x = torch.randint(7, (9, 5))

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o.reshape(-1, 7), y.reshape(-1))

    return Net(forward, e=e, mix=nn.Linear(4, 4), head=head), loss, (x, x.roll(-1, 1))


def linear_on_steps(length: int, loss: Any) -> Callable[[], Parts]:
    """A chain without Flatten, which acts on the last dimension of (N, T, 8)."""

    def build() -> Parts:
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
        return model, loss, (torch.randn(13, length, 8), torch.randn(13, length, 2))

    return build


def steps_as_classes() -> Parts:
    """Outputs (N, T, C) with T = C, a class at each step, and a loss that flattens both."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))

    def loss(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o.flatten(0, 1), y.flatten())

    return model, loss, (torch.randn(9, 3, 4), torch.randint(3, (9, 3)))


def shape_arithmetic() -> Parts:
    """``x.size(2) + 1 + self.t`` in forward."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(x.mean(1)) * (x.size(2) + 1 + m.t)

    return Net(forward, t=parameter(3), head=nn.Linear(3, 3)), F.cross_entropy, sequences()


def conv_lstm() -> Parts:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.n(m.c(x.transpose(1, 2))).relu().transpose(1, 2)
        return m.head(m.r(h)[0].mean(1))

    model = Net(
        forward,
        c=nn.Conv1d(3, 2, 2),
        n=nn.BatchNorm1d(2),
        r=nn.LSTM(2, 2, batch_first=True),
        head=nn.Linear(2, 3),
    )
    return model, F.cross_entropy, sequences()


CASES = [
    _recurrent("RNN", lambda: nn.RNN(3, 3, batch_first=True)),
    _recurrent("RNN of relu, two layers", lambda: nn.RNN(3, 3, 2, nonlinearity="relu", batch_first=True)),
    _recurrent("LSTM", lambda: nn.LSTM(3, 3, batch_first=True)),
    _recurrent("LSTM bidirectional", lambda: nn.LSTM(3, 2, batch_first=True, bidirectional=True), 4),
    _recurrent("LSTM with projection", lambda: nn.LSTM(3, 3, batch_first=True, proj_size=2), 2),
    _recurrent("LSTM with dropout", lambda: nn.LSTM(3, 2, 2, batch_first=True, dropout=0.5), 2),
    _recurrent("GRU", lambda: nn.GRU(3, 3, batch_first=True)),
    _recurrent("GRU bidirectional without bias", lambda: nn.GRU(3, 2, batch_first=True, bidirectional=True, bias=False), 4),
    Case("GRUCell in a loop", cell_loop),
    Case("LSTM with time first", sequence_first),
    Case("packed sequences", packed),
    Case("convolution and LSTM", conv_lstm),
    Case("MultiheadAttention", attention),
    Case("MultiheadAttention with its weights", attention_with_weights),
    Case("TransformerEncoderLayer", encoder),
    Case("TransformerEncoder, norm first", encoder_norm_first),
    Case("TransformerEncoder, padding", padded_encoder(False)),
    Case("TransformerEncoder, padding, nested tensors", padded_encoder(True), refused="gradients are recorded"),
    Case("TransformerDecoderLayer", decoder),
    Case("scaled_dot_product_attention", causal_attention),
    _tokens("embedding", lambda: nn.Embedding(7, 4), lambda m, x: m.head(m.e(x).mean(1).tanh())),
    _tokens("embedding with padding_idx", lambda: nn.Embedding(7, 4, padding_idx=0), lambda m, x: m.head(m.e(x).sum(1).tanh())),
    _tokens("embedding, sparse", lambda: nn.Embedding(7, 4, sparse=True), lambda m, x: m.head(m.e(x).mean(1).tanh()), differences=True),
    _tokens("embedding with max_norm", lambda: nn.Embedding(7, 4, max_norm=0.5), lambda m, x: m.head(m.e(x).mean(1)), refused="max_norm"),
    _tokens("EmbeddingBag", lambda: nn.EmbeddingBag(7, 4), lambda m, x: m.head(m.e(x).tanh()), differences=True),
    Case("embedding tied to the head", tied_embedding),
    Case("causal language model with its own loss", lambda: own_loss(True), whole=_of_tokens),
    Case("masked language model with its own loss", lambda: own_loss(False), whole=_of_tokens),
    Case("linear on (N, 1, 8), MSE", linear_on_steps(1, F.mse_loss)),
    Case("linear on (N, 3, 8), MSE", linear_on_steps(3, F.mse_loss)),
    Case("linear on (N, 1, 8), L1", linear_on_steps(1, F.smooth_l1_loss)),
    Case("outputs (N, T, C) with T = C", steps_as_classes, accuracy=lambda o, y: float((o.argmax(2) == y).double().mean())),
    Case("x.size(2) + 1 + self.t", shape_arithmetic),
]  # fmt: skip
