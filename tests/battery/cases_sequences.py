"""Recurrent layers, attention, embeddings and sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.battery.case import Case, Parts, module, net, parameter
from tests.problems import LanguageModel, tokens


def sequences(samples: int = 7, length: int = 5, features: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, length, features), torch.randint(3, (samples,))


def words(samples: int = 11, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (samples, length)), torch.randint(3, (samples,))


def _recurrent(name: str, layer: Callable[[], nn.Module], width: int = 3, **expected: Any) -> Case:
    def build() -> Parts:
        model = net(lambda m, x: m.head(m.body(x)[0][:, -1]), body=layer(), head=nn.Linear(width, 3))
        return model, F.cross_entropy, sequences()

    return Case(name, build, **expected)


def _tokens(
    name: str, body: Callable[[], nn.Module], forward: Callable[[Any, Tensor], Tensor], **expected: Any
) -> Case:
    def build() -> Parts:
        return net(forward, e=body(), head=nn.Linear(4, 3)), F.cross_entropy, words()

    return Case(name, build, **expected)


def packed() -> Parts:
    @module(body=nn.GRU(3, 3, batch_first=True), head=nn.Linear(3, 3))
    def model(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return m.head(m.body(packed)[1][-1])

    x, y = sequences()
    return model, F.cross_entropy, ((x, torch.randint(1, 6, (7,))), y)


def attention_with_weights() -> Parts:
    @module(a=nn.MultiheadAttention(4, 2, batch_first=True, bias=False), head=nn.Linear(4, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        out, weights = m.a(x, x, x)
        return m.head(out.mean(1) + weights.square().sum((1, 2))[:, None])

    return model, F.cross_entropy, sequences(7, 3, 4)


def encoder() -> Parts:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu")
    model = net(lambda m, x: m.head(m.e(x).mean(1)), e=layer, head=nn.Linear(4, 3))
    return model, F.cross_entropy, sequences(7, 3, 4)


def encoder_norm_first() -> Parts:
    layer = nn.TransformerEncoderLayer(4, 1, 4, dropout=0.1, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = net(lambda m, x: m.head(m.e(x)[:, 0]), e=body, head=nn.Linear(4, 3))
    return model, F.cross_entropy, sequences(7, 3, 4)


def padded_encoder(nested: bool) -> Callable[[], Parts]:
    """Padded sequences, and a mean over all places: without gradients PyTorch's fast path makes those zero."""

    def build() -> Parts:
        layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)

        @module(body=nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested), head=nn.Linear(4, 3))
        def model(m: Any, x: Tensor, padding: Tensor) -> Tensor:
            return m.head(m.body(x, src_key_padding_mask=padding).mean(1))

        x, y = sequences(7, 3, 4)
        return model, F.cross_entropy, ((x, torch.arange(3) >= torch.randint(1, 4, (7, 1))), y)

    return build


def causal_attention() -> Parts:
    """F.scaled_dot_product_attention, and a class at each place: (N, C, T) against (N, T)."""

    @module(mix=nn.Linear(4, 12), head=nn.Linear(4, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.mix(x).chunk(3, -1)
        return m.head(F.scaled_dot_product_attention(q, k, v, is_causal=True)).transpose(1, 2)

    return model, F.cross_entropy, (torch.randn(6, 4, 4), torch.randint(3, (6, 4)))


def own_loss(causal: bool) -> Parts:
    return LanguageModel(causal, as_dict=not causal), None, tokens()


def _of_tokens(data: Any) -> tuple[Any, Any]:
    return dict(data), data["labels"]


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

    @module(t=parameter(3), head=nn.Linear(3, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        return m.head(x.mean(1)) * (x.size(2) + 1 + m.t)

    return model, F.cross_entropy, sequences()


CASES = [
    _recurrent("RNN", lambda: nn.RNN(3, 3, batch_first=True)),
    _recurrent("LSTM", lambda: nn.LSTM(3, 3, batch_first=True)),
    _recurrent("LSTM with projection", lambda: nn.LSTM(3, 3, batch_first=True, proj_size=2), 2),
    _recurrent("GRU", lambda: nn.GRU(3, 3, batch_first=True)),
    Case("packed sequences", packed),
    Case("MultiheadAttention with its weights", attention_with_weights),
    Case("TransformerEncoderLayer", encoder),
    Case("TransformerEncoder, norm first", encoder_norm_first),
    Case("TransformerEncoder, padding", padded_encoder(False)),
    Case("TransformerEncoder, padding, nested tensors", padded_encoder(True), refused="gradients are recorded"),
    Case("scaled_dot_product_attention", causal_attention),
    _tokens("embedding", lambda: nn.Embedding(7, 4), lambda m, x: m.head(m.e(x).mean(1).tanh())),
    _tokens("embedding with padding_idx", lambda: nn.Embedding(7, 4, padding_idx=0), lambda m, x: m.head(m.e(x).sum(1).tanh())),
    _tokens("embedding, sparse", lambda: nn.Embedding(7, 4, sparse=True), lambda m, x: m.head(m.e(x).mean(1).tanh()), differences=True),
    _tokens("embedding with max_norm", lambda: nn.Embedding(7, 4, max_norm=0.5), lambda m, x: m.head(m.e(x).mean(1)), refused="max_norm"),
    Case("causal language model with its own loss", lambda: own_loss(True), whole=_of_tokens),
    Case("masked language model with its own loss", lambda: own_loss(False), whole=_of_tokens),
    Case("linear on (N, 1, 8), MSE", linear_on_steps(1, F.mse_loss)),
    Case("linear on (N, 3, 8), MSE", linear_on_steps(3, F.mse_loss)),
    Case("outputs (N, T, C) with T = C", steps_as_classes, accuracy=lambda o, y: float((o.argmax(2) == y).double().mean())),
    Case("x.size(2) + 1 + self.t", shape_arithmetic),
]  # fmt: skip
