"""Series, speech and control."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.battery.case import module
from tests.ordinary.use import COUNTED, Parts, Theme, by_size

recurrent = Theme("recurrent")
N, T = 8, 6


def series(features: int = 2) -> Tensor:
    return torch.randn(N, T, features)


@recurrent("LSTM classifier of the last hidden state, with h0 and c0 made in forward")
def lstm_classifier() -> Parts:
    @module(lstm=nn.LSTM(2, 3, 2, batch_first=True), fc=nn.Linear(3, 3))
    def model(self, x: Tensor) -> Tensor:
        h0, c0 = (torch.zeros(2, x.size(0), 3).to(x) for _ in range(2))
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])

    return model, nn.CrossEntropyLoss(), (series(), torch.randint(3, (N,)))


@recurrent("GRU forecast of the next value, MSE")
def gru_forecast() -> Parts:
    @module(gru=nn.GRU(1, 4, batch_first=True), fc=nn.Linear(4, 1))
    def model(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x)[0][:, -1])

    wave = torch.sin(torch.arange(N * T + 1) * 0.4)
    windows = wave.unfold(0, T + 1, 1)[:20]
    return model, nn.MSELoss(), (windows[:, :T, None], windows[:, T:])


@recurrent("PyTorch's time_sequence_prediction: LSTMCells in a loop over time")
def lstm_cells() -> Parts:
    @module(lstm1=nn.LSTMCell(1, 3), lstm2=nn.LSTMCell(3, 3), linear=nn.Linear(3, 1))
    def model(self, input: Tensor) -> Tensor:
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(input.size(0), 3, dtype=input.dtype) for _ in range(4))
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)

    wave = torch.sin(torch.arange(T + 1) * 0.7 + torch.randn(N, 1))
    return model, nn.MSELoss(), (wave[:, :-1], wave[:, 1:])


@recurrent("time first: LSTM without batch_first, data transposed in forward")
def time_first() -> Parts:
    @module(rnn=nn.LSTM(2, 3), out=nn.Linear(3, 1))
    def model(self, x: Tensor) -> Tensor:
        _, (h, _) = self.rnn(x.transpose(0, 1))
        return self.out(h[-1]).squeeze(-1)

    return model, F.mse_loss, (series(), torch.randn(N))


@recurrent("speech: CTC over (T, N, C), targets and lengths in a tuple, a list of batches",
    says="no second derivative of ctc_loss; products are differences of gradients", differences=True)  # fmt: skip
def speech_ctc() -> Parts:
    @module(conv=nn.Conv1d(3, 4, 3, padding=1), rnn=nn.GRU(4, 3, batch_first=True, bidirectional=True),
        fc=nn.Linear(6, 5))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return F.log_softmax(self.fc(self.rnn(x)[0]), dim=2).transpose(0, 1)

    criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def batch(n: int) -> Any:
        lengths = torch.randint(1, 4, (n,))
        labels = torch.randint(1, 5, (n, 3)) * (torch.arange(3) < lengths[:, None])
        return torch.randn(n, 8, 3), (labels, torch.full((n,), 8), lengths)

    return model, lambda log_probs, y: criterion(log_probs, *y), [batch(4), batch(4)]


@recurrent("attention seq2seq with teacher forcing, mask of padding by hand", says=COUNTED)
def attention_seq2seq() -> Parts:
    @module(src=nn.Embedding(6, 3), tgt=nn.Embedding(6, 3), encoder=nn.GRU(3, 3, batch_first=True),
        decoder=nn.GRUCell(6, 3), Wa=nn.Linear(3, 3), Ua=nn.Linear(3, 3), Va=nn.Linear(3, 1),
        out=nn.Linear(3, 6))  # fmt: skip
    def model(self, src: Tensor, tgt: Tensor) -> Tensor:
        keys, hidden = self.encoder(self.src(src))
        h, outputs = hidden[0], []
        for word in self.tgt(tgt).unbind(1):
            scores = self.Va(torch.tanh(self.Wa(h)[:, None] + self.Ua(keys))).softmax(1)
            h = self.decoder(torch.cat([word, (scores * keys).sum(1)], 1), h)
            outputs.append(self.out(h))
        return torch.stack(outputs, 1)

    def masked_nll(logits: Tensor, target: Tensor) -> Tensor:
        mask = (target != 0).to(logits)
        nll = -logits.log_softmax(-1).gather(2, target[..., None]).squeeze(2)
        return (nll * mask).sum() / mask.sum()

    src, tgt = torch.randint(1, 6, (N, 4)), torch.randint(1, 6, (N, 5))
    tgt = tgt.masked_fill(torch.arange(5) >= torch.randint(2, 6, (N, 1)), 0)
    return model, masked_nll, ((src, tgt), tgt)


@recurrent("temporal convolutions: dilated, causal, weight normalization", differences=True)
def tcn() -> Parts:
    weight_norm = nn.utils.parametrizations.weight_norm

    class Block(nn.Module):
        def __init__(self, i: int, o: int, dilation: int) -> None:
            super().__init__()
            self.pad, self.conv = 2 * dilation, weight_norm(nn.Conv1d(i, o, 3, dilation=dilation))
            self.skip = nn.Conv1d(i, o, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(F.pad(x, (self.pad, 0)))) + self.skip(x)

    @module(net=nn.Sequential(Block(2, 3, 1), Block(3, 3, 2)), head=nn.Linear(3, 1))
    def model(self, x: Tensor) -> Tensor:
        return self.head(self.net(x.transpose(1, 2))[:, :, -1])

    return model, nn.HuberLoss(), (series(), torch.randn(N, 1))


@recurrent("quantile forecast: pinball losses of three quantiles")
def quantile_forecast() -> Parts:
    @module(rnn=nn.LSTM(2, 3, batch_first=True), out=nn.Linear(3, 3))
    def model(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0][:, -1])

    def quantile_loss(preds: Tensor, target: Tensor) -> Tensor:
        losses = []
        for i, q in enumerate((0.1, 0.5, 0.9)):
            errors = target - preds[:, i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
        return torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))

    return model, quantile_loss, (series(), torch.randn(N))


@recurrent("sequences of several lengths padded by a collate function, lengths in the inputs", total=by_size)
def collated() -> Parts:
    @module(rnn=nn.RNN(2, 3, batch_first=True), out=nn.Linear(3, 2))
    def model(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.out(out[torch.arange(len(x)), lengths - 1])

    def collate(sizes: list[int]) -> Any:
        padded = pad_sequence([torch.randn(n, 2) for n in sizes], batch_first=True)
        return (padded, torch.tensor(sizes)), torch.randint(2, (len(sizes),))

    return model, nn.CrossEntropyLoss(), [collate([3, 5, 2]), collate([6, 1, 4]), collate([2, 2])]


@recurrent("state-space model: diagonal recurrence with learned decay")
def state_space() -> Parts:
    @module(log_a=nn.Parameter(torch.randn(4)), b=nn.Linear(2, 4, bias=False), c=nn.Linear(4, 1))
    def model(self, x: Tensor) -> Tensor:
        a, h, out = torch.exp(-torch.exp(self.log_a)), 0.0, []
        for u in self.b(x).unbind(1):
            h = a * h + u
            out.append(self.c(h))
        return torch.cat(out, 1)

    return model, nn.MSELoss(), (series(), torch.randn(N, T))


@recurrent("Transformer forecast: encoder with a padding mask given as src_key_padding_mask")
def masked_transformer() -> Parts:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True)

    @module(embed=nn.Linear(2, 4), encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        out=nn.Linear(4, 1))  # fmt: skip
    def model(self, x: Tensor, padding: Tensor) -> Tensor:
        z = self.encoder(self.embed(x), src_key_padding_mask=padding)
        return self.out((z * ~padding[..., None]).sum(1) / (~padding).sum(1, keepdim=True))

    padding = torch.arange(T) >= torch.randint(2, T + 1, (N, 1))
    return model, F.mse_loss, ((series(), padding), torch.randn(N, 1))


@recurrent("DQN: smooth L1 of Q(s, a) against a given target")
def dqn() -> Parts:
    @module(layer1=nn.Linear(4, 6), layer2=nn.Linear(6, 2))
    def model(self, x: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x)))

    def loss(q: Tensor, batch: Any) -> Tensor:
        actions, expected = batch
        return nn.SmoothL1Loss()(q.gather(1, actions), expected.unsqueeze(1))

    return model, loss, (torch.randn(16, 4), (torch.randint(2, (16, 1)), torch.randn(16)))


@recurrent("PPO: clipped surrogate, value loss and entropy bonus")
def ppo() -> Parts:
    @module(body=nn.Linear(4, 5), actor=nn.Linear(5, 3), critic=nn.Linear(5, 1))
    def model(self, obs: Tensor) -> tuple[Any, Tensor]:
        z = torch.tanh(self.body(obs))
        return torch.distributions.Categorical(logits=self.actor(z)), self.critic(z).squeeze(-1)

    def loss(out: Any, batch: dict[str, Tensor], clip: float = 0.2) -> Tensor:
        dist, value = out
        ratio = torch.exp(dist.log_prob(batch["actions"]) - batch["log_probs"])
        a = batch["advantages"]
        surrogate = torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        return -surrogate.mean() + 0.5 * F.mse_loss(value, batch["returns"]) - 0.01 * dist.entropy().mean()

    n = 16
    batch = {"actions": torch.randint(3, (n,)), "log_probs": -1 - 0.2 * torch.rand(n)}
    batch |= {name: torch.randn(n) for name in ("advantages", "returns")}
    return model, loss, (torch.randn(n, 4), batch)


@recurrent("REINFORCE with a Gaussian policy, log_std a parameter")
def reinforce() -> Parts:
    model = module(
        mean=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), log_std=nn.Parameter(torch.zeros(2))
    )(lambda self, s: torch.distributions.Normal(self.mean(s), self.log_std.exp()))
    data = torch.randn(12, 3), (torch.randn(12, 2), torch.randn(12))
    return model, lambda d, y: -(d.log_prob(y[0]).sum(-1) * y[1]).mean(), data
