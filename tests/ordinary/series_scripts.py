"""Sequences in time, as public repositories' training scripts have them: speech, forecasts, control."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import module
from tests.ordinary.scripts import mask_of, net
from tests.ordinary.use import BATCHES, EITHER, TOGETHER, Parts, Theme, by_count, by_size, per_batch

series_scripts = Theme("series scripts")


@series_scripts("DeepAR: at each step the mean over the series that have a value (labels ≠ 0), summed over the steps",
    source="zhykoties/TimeSeries: train.py", says=TOGETHER)  # fmt: skip
def deepar() -> Parts:
    @module(cell=nn.GRUCell(2, 3), mu=nn.Linear(3, 1), sigma=nn.Linear(3, 1))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, mus, sigmas = x.new_zeros(len(x), 3), [], []
        for t in range(x.shape[1]):
            z = x[:, t]
            if t > 0:
                missing = z[:, :1] == 0
                z = torch.cat([torch.where(missing, mus[-1][:, None], z[:, :1]), z[:, 1:]], 1)
            h = self.cell(z, h)
            mus.append(self.mu(h).squeeze(1))
            sigmas.append(F.softplus(self.sigma(h)).squeeze(1))
        return torch.stack(mus, 1), torch.stack(sigmas, 1)

    def loss(out: Any, labels: Tensor) -> Tensor:
        value = 0.0
        for mu, sigma, label in zip(*(o.unbind(1) for o in out), labels.unbind(1), strict=True):
            there = label != 0
            value = value - torch.distributions.Normal(mu[there], sigma[there]).log_prob(label[there]).mean()
        return value / labels.shape[1]

    labels = 1 + torch.rand(8, 4)
    labels[5:, 1:] *= torch.rand(3, 3) < 0.5
    x = torch.stack([F.pad(labels[:, :-1], (1, 0)), torch.randn(8, 4)], 2)
    return model, loss, (x, labels)


@series_scripts("DCRNN: time first, errors by a mask of y ≠ 0 that is divided by its mean, two windows a batch",
    source="chnsh/DCRNN_PyTorch: model/pytorch/loss.py", small=True,
    total=by_count(lambda x, y: (y != 0).sum()), other=per_batch, says=EITHER)  # fmt: skip
def dcrnn() -> Parts:
    @module(rnn=nn.GRU(3, 3), out=nn.Linear(3, 3))
    def model(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])

    def loss(pred: Tensor, true: Tensor) -> Tensor:
        mask = (true != 0).to(pred)
        mask = mask / mask.mean()
        return (torch.abs(pred - true) * mask).mean()

    def batch(n: int, share: float) -> tuple[Tensor, Tensor]:
        return torch.randn(4, n, 3), torch.randn(4, n, 3) * (torch.rand(4, n, 3) < share)

    return model, loss, [batch(2, 1.1), batch(2, 1.1), batch(2, 0.3), batch(1, 0.6)]


@series_scripts("Graph WaveNet: masked errors with NaN set to 0; all sensors of the last window are missing",
    source="nnzhan/Graph-WaveNet: util.py", small=True, total=by_count(lambda x, y: (y != 0).sum()),
    other=per_batch, says=EITHER)  # fmt: skip
def graph_wavenet() -> Parts:
    def loss(preds: Tensor, labels: Tensor) -> Tensor:
        mask = (labels != 0.0).to(preds)
        mask = mask / torch.mean(mask)
        mask = torch.where(torch.isnan(mask), torch.zeros_like(mask), mask)
        value = torch.abs(preds - labels) * mask
        return torch.mean(torch.where(torch.isnan(value), torch.zeros_like(value), value))

    def batch(n: int, share: float) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 4, 3), torch.randn(n, 4, 2) * (torch.rand(n, 4, 2) < share)

    model = net(3, 2)
    return model, loss, [batch(2, 1.1), batch(2, 0.5), batch(1, 0.0)]


def of_dict(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return model(**data)["loss"]


@series_scripts("BRITS: a dict with labels, the output's 'loss': at each step a sum / (mask's sum + 1e-5), and a label's",
    source="caow13/BRITS: models/rits.py", says=TOGETHER, total=of_dict)  # fmt: skip
def brits() -> Parts:
    @module(cell=nn.LSTMCell(4, 2), guess=nn.Linear(2, 2), out=nn.Linear(2, 1))
    def model(self, values: Tensor, masks: Tensor, labels: Tensor, is_train: Tensor) -> dict[str, Tensor]:
        h = c = values.new_zeros(len(values), 2)
        value = values.new_zeros(())
        for x, m in zip(values.unbind(1), masks.unbind(1), strict=True):
            g = self.guess(h)
            value = value + ((x - g).abs() * m).sum() / (m.sum() + 1e-5)
            h, c = self.cell(torch.cat([m * x + (1 - m) * g, m], 1), (h, c))
        y = self.out(h)
        ce = F.binary_cross_entropy_with_logits(y, labels.view(-1, 1), reduction="none")
        ce = (ce * is_train.view(-1, 1)).sum() / (is_train.sum() + 1e-5)
        return {"loss": 0.3 * value + ce, "predictions": torch.sigmoid(y)}

    masks = (torch.rand(8, 4, 2) < 0.9).float()
    masks[6:, 1:] = 0
    labels, train = torch.randint(2, (8,)).float(), torch.tensor([1.0] * 6 + [0, 1])
    return model, None, {"values": torch.randn(8, 4, 2), "masks": masks, "labels": labels, "is_train": train}


@series_scripts("PyTorch Forecasting: quantile losses up to each series' length, sum / lengths, three series a batch",
    source="sktime/pytorch-forecasting: pytorch_forecasting/metrics/quantile.py", small=True, says=EITHER)  # fmt: skip
def masked_quantiles() -> Parts:
    quantiles = 0.1, 0.5, 0.9

    def loss(pred: Tensor, y: Any) -> Tensor:
        target, lengths = y
        errors = target.unsqueeze(-1) - pred
        q = torch.tensor(quantiles).to(pred)
        each = torch.max((q - 1) * errors, q * errors) * 2
        mask = torch.arange(target.shape[1]) < lengths[:, None]
        return each.masked_fill(~mask.unsqueeze(-1), 0.0).sum() / lengths.sum() / len(quantiles)

    lengths = torch.tensor([4, 4, 4, 4, 1, 3, 2, 4])
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))
    x, target = torch.randn(8, 4, 2), torch.randn(8, 4)
    data = [(a, (b, c)) for a, b, c in zip(x.split(3), target.split(3), lengths.split(3), strict=True)]
    return model, loss, data


@series_scripts("N-BEATS: blocks with residuals and a mask of the inputs, MAPE with masked weights, the mean over all steps",
    source="ServiceNow/N-BEATS: common/torch/losses.py", small=True)  # fmt: skip
def nbeats() -> Parts:
    @module(
        blocks=nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 6)) for _ in range(2))
    )
    def model(self, x: Tensor, mask: Tensor) -> Tensor:
        residual, forecast = x.flip(1), x[:, -1:]
        for block in self.blocks:
            backcast, step = block(residual).split([4, 2], 1)
            residual = (residual - backcast) * mask.flip(1)
            forecast = forecast + step
        return forecast

    def loss(forecast: Tensor, y: Any) -> Tensor:
        target, mask = y
        weights = torch.where(target != 0, mask / torch.where(target != 0, target, 1.0), 0.0)
        return torch.mean(torch.abs((forecast - target) * weights))

    mask = torch.ones(7, 2)
    mask[5:, 1] = 0
    x = torch.rand(7, 4), (torch.rand(7, 4) < 0.8).float()
    data = DataLoader(TensorDataset(*x, torch.rand(7, 2) + 0.5, mask), batch_size=3, collate_fn=pairs)
    return model, loss, data


def pairs(rows: list[Any]) -> Any:
    """Of four tensors a row: ((a, b), (c, d))."""
    a, b, c, d = (torch.stack(column) for column in zip(*rows, strict=True))
    return (a, b), (c, d)


@series_scripts("SASRec: positive and negative items where np.where(pos != 0), three users a batch; late users have few items",
    source="pmixer/SASRec.pytorch: main.py", small=True, says=EITHER, other=per_batch)  # fmt: skip
def sasrec() -> Parts:
    @module(item=nn.Embedding(6, 3, padding_idx=0), mix=nn.Linear(3, 3))
    def model(self, seq: Tensor, pos: Tensor, neg: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.mix(self.item(seq).cumsum(1)))
        return (h * self.item(pos)).sum(-1), (h * self.item(neg)).sum(-1)

    criterion = nn.BCEWithLogitsLoss()

    def loss(out: Any, pos: Tensor) -> Tensor:
        there = np.where(pos.numpy() != 0)
        good, bad = (o[there] for o in out)
        return criterion(good, torch.ones_like(good)) + criterion(bad, torch.zeros_like(bad))

    there = mask_of([4, 4, 4, 4, 4, 4, 1, 2]).flip(1)
    seq, pos, neg = (torch.randint(1, 6, (8, 4)) * there for _ in range(3))
    data = [((s, p, n), p) for s, p, n in zip(seq.split(3), pos.split(3), neg.split(3), strict=True)]
    return model, loss, data


@series_scripts("torchdiffeq's demo: start points (B, 1, 2) and one grid of times (T,) as inputs, targets (T, B, 1, 2)",
    source="rtqichen/torchdiffeq: examples/ode_demo.py", small=True, total=by_count(lambda x, y: y.numel()),
    other=per_batch, says=None)  # fmt: skip
def ode_demo() -> Parts:
    @module(net=net(2, 2))
    def model(self, y0: Tensor, t: Tensor) -> Tensor:
        path = [y0]
        for dt in t.diff():
            k1 = self.net(path[-1] ** 3)
            path.append(path[-1] + dt * self.net((path[-1] + dt / 2 * k1) ** 3))
        return torch.stack(path)

    def batch(n: int) -> Any:
        return (torch.randn(n, 1, 2), torch.linspace(0.0, 1.0, 5)), torch.randn(5, n, 1, 2)

    return model, lambda pred, y: torch.mean(torch.abs(pred - y)), [batch(3), batch(3), batch(2)]


@series_scripts("CleanRL's PPO: advantages normalized in the minibatch, clipped value loss, entropy, three steps a batch",
    source="vwxyzjn/cleanrl: cleanrl/ppo.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def cleanrl_ppo() -> Parts:
    @module(critic=nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), actor=nn.Linear(4, 3))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)

    def loss(out: Any, y: dict[str, Tensor]) -> Tensor:
        probs, value = torch.distributions.Categorical(logits=out[0]), out[1].view(-1)
        ratio = (probs.log_prob(y["actions"]) - y["logprobs"]).exp()
        adv = (y["advantages"] - y["advantages"].mean()) / (y["advantages"].std() + 1e-8)
        policy = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
        clipped = y["values"] + torch.clamp(value - y["values"], -0.2, 0.2)
        v_loss = 0.5 * torch.max((value - y["returns"]) ** 2, (clipped - y["returns"]) ** 2).mean()
        return policy - 0.01 * probs.entropy().mean() + v_loss * 0.5

    def batch(n: int) -> Any:
        names = "advantages", "values", "returns"
        y = {name: torch.randn(n) for name in names}
        return torch.randn(n, 4), {
            **y,
            "actions": torch.randint(3, (n,)),
            "logprobs": -1 - 0.1 * torch.rand(n),
        }

    return model, loss, [batch(3), batch(3), batch(2)]


@series_scripts("Decision Transformer: the mask is an input, and goes with the outputs into the loss; the first batch is full",
    source="kzl/decision-transformer: gym/decision_transformer/training/seq_trainer.py", small=True,
    total=by_count(lambda x, y: x[1].sum()), other=per_batch, says=EITHER)  # fmt: skip
def decision_transformer() -> Parts:
    @module(mix=nn.Linear(3, 4), out=nn.Linear(4, 2))
    def model(self, states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.mix((states * attention_mask[..., None]).cumsum(1)))
        return self.out(z), attention_mask

    def loss(out: Any, actions: Tensor) -> Tensor:
        preds, mask = out
        there = mask.reshape(-1) > 0
        return torch.mean((preds.reshape(-1, 2)[there] - actions.reshape(-1, 2)[there]) ** 2)

    def batch(*lengths: int) -> Any:
        mask = (torch.arange(4) >= 4 - torch.tensor(lengths)[:, None]).long()
        return (torch.randn(len(lengths), 4, 3), mask), torch.randn(len(lengths), 4, 2)

    return model, loss, [batch(4, 4), batch(1, 3), batch(2)]


@series_scripts("Tacotron 2: outputs beyond each length are filled in the model, means over all frames, two texts a batch",
    source="NVIDIA/tacotron2: loss_function.py", small=True, total=per_batch,
    other=by_count(lambda x, y: y[1].numel()), says=None)  # fmt: skip
def tacotron() -> Parts:
    @module(
        rnn=nn.GRU(2, 3, batch_first=True), mel=nn.Linear(3, 2), post=nn.Linear(2, 2), gate=nn.Linear(3, 1)
    )
    def model(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        z = self.rnn(x)[0]
        beyond = torch.arange(x.shape[1]) >= lengths[:, None]
        mel = self.mel(z)
        post = (mel + self.post(mel)).masked_fill(beyond[..., None], 0.0)
        return (
            mel.masked_fill(beyond[..., None], 0.0),
            post,
            self.gate(z).squeeze(-1).masked_fill(beyond, 1e3),
        )

    def loss(out: Any, y: Any) -> Tensor:
        mel, gate = y
        squares = F.mse_loss(out[0], mel) + F.mse_loss(out[1], mel)
        return squares + F.binary_cross_entropy_with_logits(out[2].view(-1, 1), gate.view(-1, 1))

    def batch(*lengths: int) -> Any:
        there, sizes = mask_of(list(lengths)), torch.tensor(lengths)
        gate = (torch.arange(max(lengths)) >= sizes[:, None] - 1).float()
        n, size = there.shape
        return (torch.randn(n, size, 2), sizes), (torch.randn(n, size, 2) * there[..., None], gate)

    return model, loss, [batch(4, 3), batch(7, 2), batch(3, 5)]


@series_scripts("FastSpeech 2: masked means over frames and over phonemes, added; late texts are short",
    source="ming024/FastSpeech2: model/loss.py", says=TOGETHER)  # fmt: skip
def fastspeech() -> Parts:
    @module(phoneme=nn.Linear(2, 3), duration=nn.Linear(3, 1), mel=nn.Linear(3, 2))
    def model(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.phoneme(x))
        return self.mel(z.repeat_interleave(2, 1)), self.duration(z).squeeze(-1)

    def loss(out: Any, y: dict[str, Tensor]) -> Tensor:
        mel, duration = out
        frames, phonemes = y["mel_mask"], y["src_mask"]
        value = F.l1_loss(
            mel.masked_select(frames.unsqueeze(-1)), y["mel"].masked_select(frames.unsqueeze(-1))
        )
        logs = torch.log(y["duration"].to(mel) + 1)
        return value + F.mse_loss(duration.masked_select(phonemes), logs.masked_select(phonemes))

    sources, frames = [4, 4, 4, 4, 4, 1, 2], [8, 8, 8, 8, 8, 2, 7]
    y = {"mel": torch.randn(7, 8, 2), "duration": torch.randint(1, 4, (7, 4))}
    data = torch.randn(7, 4, 2), {**y, "src_mask": mask_of(sources), "mel_mask": mask_of(frames)}
    return model, loss, data


@series_scripts("Conv-TasNet: SI-SNR of the best permutation of the sources, up to each length, two mixtures a batch",
    source="kaituoxu/Conv-TasNet: src/pit_criterion.py", small=True, total=by_size)  # fmt: skip
def conv_tasnet() -> Parts:
    @module(encoder=nn.Conv1d(1, 3, 3, padding=1), decoder=nn.Conv1d(3, 2, 1))
    def model(self, mixture: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.decoder(torch.tanh(self.encoder(mixture[:, None]))), lengths

    def loss(out: Any, sources: Tensor) -> Tensor:
        estimate, lengths = out
        mask = (torch.arange(sources.shape[-1]) < lengths[:, None])[:, None].to(estimate)
        a, b = (
            (z * mask - (z * mask).sum(-1, keepdim=True) / lengths[:, None, None]) * mask
            for z in (sources, estimate)
        )
        a, b = a[:, None], b[:, :, None]
        projection = (a * b).sum(-1, keepdim=True) * a / (a.pow(2).sum(-1, keepdim=True) + 1e-8)
        ratio = projection.pow(2).sum(-1) / ((b - projection).pow(2).sum(-1) + 1e-8)
        snr = 10 * torch.log10(ratio + 1e-8)
        best = torch.stack([snr[:, 0, 0] + snr[:, 1, 1], snr[:, 0, 1] + snr[:, 1, 0]], 1).max(1).values / 2
        return 0 - best.mean()

    def batch(*lengths: int) -> Any:
        sources = torch.randn(len(lengths), 2, max(lengths)) * mask_of(list(lengths))[:, None]
        return (sources.sum(1), torch.tensor(lengths)), sources

    return model, loss, [batch(8, 8), batch(9, 6), batch(7)]


@series_scripts("wav2vec 2.0: CTC of the labels that are not −100, each batch padded to its own lengths, two or one a batch",
    source="huggingface/transformers: src/transformers/models/wav2vec2/modeling_wav2vec2.py", small=True,
    total=by_size, differences=True,
    says="no second derivative of ctc_loss; products are differences of gradients")  # fmt: skip
def wav2vec_ctc() -> Parts:
    model = net(2, 4)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        there = labels >= 0
        log_probs = F.log_softmax(logits, dim=-1).transpose(0, 1)
        sizes = torch.full((len(logits),), logits.shape[1])
        return F.ctc_loss(
            log_probs, labels.masked_select(there), sizes, there.sum(-1), blank=0, reduction="mean"
        )

    def batch(frames: int, *lengths: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(1, 4, (len(lengths), max(lengths))).masked_fill(~mask_of(list(lengths)), -100)
        return torch.randn(len(lengths), frames, 2), labels

    return model, loss, [batch(7, 2, 2), batch(9, 4, 1), batch(8, 3)]


@series_scripts("ESPnet: KL of smoothed labels, summed and divided by the batch size, two or one utterances a batch",
    source="espnet/espnet: espnet/nets/pytorch_backend/transformer/label_smoothing_loss.py", small=True,
    total=by_size)  # fmt: skip
def espnet_smoothing() -> Parts:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        n, size = len(x), x.shape[-1]
        x, target = x.reshape(-1, size), target.reshape(-1)
        with torch.no_grad():
            true = torch.full_like(x, 0.1 / (size - 1))
            ignored = target == -1
            true.scatter_(1, target.masked_fill(ignored, 0).unsqueeze(1), 0.9)
        kl = F.kl_div(torch.log_softmax(x, dim=1), true, reduction="none")
        return kl.masked_fill(ignored.unsqueeze(1), 0).sum() / n

    def batch(*lengths: int) -> tuple[Tensor, Tensor]:
        n = len(lengths)
        targets = torch.randint(4, (n, max(lengths))).masked_fill(~mask_of(list(lengths)), -1)
        return torch.randn(n, max(lengths), 3), targets

    model = net(3, 4)
    return model, loss, [batch(3, 3), batch(6, 2), batch(4)]


@series_scripts("SpeechBrain: NLL up to relative lengths (1.0 is the longest), sum / mask, two or one utterances a batch",
    source="speechbrain/speechbrain: speechbrain/nnet/losses.py", small=True,
    total=by_count(lambda x, y: (y[1] * y[0].shape[1]).round().sum()), other=per_batch, says=EITHER)  # fmt: skip
def speechbrain_nll() -> Parts:
    def loss(logits: Tensor, y: Any) -> Tensor:
        targets, relative = y
        nll = F.nll_loss(F.log_softmax(logits, -1).transpose(1, -1), targets, reduction="none")
        mask = (torch.arange(targets.shape[1]) < (relative * targets.shape[1]).round()[:, None]).to(logits)
        return (nll * mask).sum() / mask.sum()

    def batch(*lengths: int) -> Any:
        n, size = len(lengths), max(lengths)
        return torch.randn(n, size, 3), (torch.randint(4, (n, size)), torch.tensor(lengths) / size)

    model = net(3, 4)
    return model, loss, [batch(4, 4), batch(6, 1), batch(3)]


# CrossEntropyLoss is the mean over its targets, here the utterances, whatever the model makes of their batch;
# with the script's own batches, all of one size, it is the mean over these as well.
@series_scripts("GE2E: utterances of speakers in a row, embeddings viewed as (speakers, utterances), similarities in the batch",
    source="CorentinJ/Real-Time-Voice-Cloning: encoder/model.py", total=by_size)  # fmt: skip
def ge2e() -> Parts:
    @module(rnn=nn.GRU(2, 3, batch_first=True), weight=nn.Parameter(torch.tensor([4.0])),
        bias=nn.Parameter(torch.tensor([-2.0])))  # fmt: skip
    def model(self, x: Tensor) -> Tensor:
        embeds = F.normalize(self.rnn(x)[1][-1]).view(-1, 2, 3)
        mean = F.normalize(embeds.mean(1))
        without = F.normalize((embeds.sum(1, keepdim=True) - embeds), dim=2)
        similar = torch.einsum("sud,td->sut", embeds, mean)
        own = (embeds * without).sum(2)
        chosen = torch.eye(len(embeds), dtype=torch.bool)[:, None]
        similar = torch.where(chosen, own[..., None], similar) * self.weight + self.bias
        return similar.reshape(-1, len(embeds))

    data = [(torch.randn(2 * n, 4, 2), torch.arange(n).repeat_interleave(2)) for n in (3, 3, 2)]
    return model, nn.CrossEntropyLoss(), data


@series_scripts("MAML: an inner step by autograd.grad(create_graph=True) in forward, for each of one or two tasks",
    source="tristandeleu/pytorch-meta: examples/maml/train.py", small=True, total=by_size)  # fmt: skip
def maml() -> Parts:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.randn(3, 2) / 2), nn.Parameter(torch.randn(2, 3) / 2)

        def logits(self, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
            return torch.tanh(x @ w1.T) @ w2.T

        def forward(self, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
            out = []
            with torch.enable_grad():
                for x, y, q in zip(support, labels, query, strict=True):
                    inner = F.cross_entropy(self.logits(x, self.w1, self.w2), y)
                    g1, g2 = torch.autograd.grad(inner, (self.w1, self.w2), create_graph=True)
                    out.append(self.logits(q, self.w1 - 0.4 * g1, self.w2 - 0.4 * g2))
            return torch.stack(out)

    def batch(n: int) -> Any:
        inputs = torch.randn(n, 4, 2), torch.randint(2, (n, 4)), torch.randn(n, 3, 2)
        return inputs, torch.randint(2, (n, 3))

    data = [batch(2), batch(2), batch(1)]
    return Learner(), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), data


@series_scripts("PyTorch's reinforce: one episode a batch, the sum of −log π · return over its steps",
    source="pytorch/examples: reinforcement_learning/reinforce.py", says=BATCHES, total=per_batch)  # fmt: skip
def reinforce() -> Parts:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

    def loss(logits: Tensor, y: Any) -> Tensor:
        actions, returns = y
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        return (-torch.distributions.Categorical(logits=logits).log_prob(actions) * returns).sum()

    data = [(torch.randn(n, 4), (torch.randint(2, (n,)), torch.randn(n))) for n in (5, 8, 3)]
    return model, loss, data
