"""Text: language models, classifiers, translation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.battery.case import module
from tests.ordinary.use import COUNTED, TOGETHER, Parts, Theme, by_size

language = Theme("language")
WORDS, LENGTH, SAMPLES = 8, 6, 8


def tokens(low: int = 1) -> Tensor:
    return torch.randint(low, WORDS, (SAMPLES, LENGTH))


def padded(pad: int = 0) -> Tensor:
    """Sequences of different lengths, padded at the end."""
    ids = tokens()
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES, 1))
    lengths[0], lengths[1] = 2, LENGTH
    return ids.masked_fill(torch.arange(LENGTH) >= lengths, pad)


class Block(nn.Module):
    """minGPT's."""

    def __init__(self, n_embd: int, n_head: int = 2) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))
        self.n_head, self.n_embd = n_head, n_embd
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 6), nn.GELU(approximate="tanh"), nn.Linear(6, n_embd), nn.Dropout(0.1)
        )

    def attention(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (z.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for z in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """minGPT's: forward(idx, targets) returns logits and the loss."""

    def __init__(self, n_embd: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, n_embd), nn.Embedding(LENGTH, n_embd)
        self.h, self.ln_f = nn.ModuleList([Block(n_embd)]), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        pos = torch.arange(0, idx.shape[1], dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@language("padding ignored in a lambda: ignore_index=0", says=COUNTED)
def padding_ignored() -> Parts:
    ids = padded()
    x, y = ids, F.pad(ids[:, 1:], (0, 1))
    return GPT(), lambda o, y: F.cross_entropy(o.view(-1, WORDS), y.view(-1), ignore_index=0), (x, y)


@language("shifted tokens with padding ignored", says=COUNTED)
def shifted_and_padded() -> Parts:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return F.cross_entropy(shift_logits.view(-1, WORDS), shift_labels.view(-1), ignore_index=0)

    ids = padded()
    return GPT(), loss, (ids, ids)


@language("word_language_model: LSTM that returns (output, hidden)")
def word_language_model() -> Parts:
    @module(drop=nn.Dropout(0.2), encoder=nn.Embedding(WORDS, 3), rnn=nn.LSTM(3, 3, batch_first=True),
        decoder=nn.Linear(3, WORDS))  # fmt: skip
    def model(self, x: Tensor) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(x)))
        decoded = self.decoder(self.drop(output)).view(-1, WORDS)
        return F.log_softmax(decoded, dim=1), hidden

    ids = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    criterion = nn.NLLLoss()
    return model, lambda out, y: criterion(out[0], y.reshape(-1)), (ids[:, :-1], ids[:, 1:])


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, max_len: int = 16) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=0.1)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.size(1)])


@language("Transformer tutorial: nn.TransformerEncoder with a causal mask")
def transformer_tutorial() -> Parts:
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.1, batch_first=True)

    @module(embedding=nn.Embedding(WORDS, 4), pos_encoder=PositionalEncoding(4),
        transformer_encoder=nn.TransformerEncoder(layer, 1), linear=nn.Linear(4, WORDS))  # fmt: skip
    def model(self, src: Tensor) -> Tensor:
        src = self.pos_encoder(self.embedding(src) * math.sqrt(4))
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1])
        return self.linear(self.transformer_encoder(src, mask, is_causal=True))

    ids = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    data = (ids[:, :-1], ids[:, 1:])
    return model, lambda o, y: F.cross_entropy(o.reshape(-1, WORDS), y.reshape(-1)), data


@language(
    "translation tutorial: nn.Transformer, masks of padding, CrossEntropyLoss(ignore_index=PAD)", says=COUNTED
)
def translation() -> Parts:
    @module(src=nn.Embedding(WORDS, 4), tgt=nn.Embedding(WORDS, 4), pos=PositionalEncoding(4),
        transformer=nn.Transformer(4, 2, 1, 1, 4, 0.1, batch_first=True), generator=nn.Linear(4, WORDS))  # fmt: skip
    def model(self, src: Tensor, trg: Tensor) -> Tensor:
        tgt_mask = torch.triu(torch.ones(trg.shape[1], trg.shape[1], dtype=torch.bool), 1)
        outs = self.transformer(
            self.pos(self.src(src)), self.pos(self.tgt(trg)), tgt_mask=tgt_mask,
            src_key_padding_mask=src == 0, tgt_key_padding_mask=trg == 0, memory_key_padding_mask=src == 0,
        )  # fmt: skip
        return self.generator(outs)

    loss_fn = nn.CrossEntropyLoss(ignore_index=0)
    src, tgt = padded(), padded()
    model.transformer.encoder.enable_nested_tensor = False
    data = ((src, tgt[:, :-1]), tgt[:, 1:])
    return model, lambda logits, y: loss_fn(logits.reshape(-1, WORDS), y.reshape(-1)), data


@language("text classification tutorial: EmbeddingBag with offsets, a list of batches", total=by_size,
    differences=True)  # fmt: skip
def embedding_bag() -> Parts:
    @module(embedding=nn.EmbeddingBag(WORDS, 4, sparse=False), fc=nn.Linear(4, 3))
    def model(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.fc(self.embedding(text, offsets))

    def batch(n: int) -> Any:
        lengths = torch.randint(1, 5, (n,))
        return (torch.randint(WORDS, (int(lengths.sum()),)), lengths.cumsum(0) - lengths), torch.randint(
            3, (n,)
        )

    return model, nn.CrossEntropyLoss(), [batch(4), batch(4), batch(3)]


@language("Embedding(padding_idx=0), mean over the words")
def mean_of_words() -> Parts:
    @module(embedding=nn.Embedding(WORDS, 4, padding_idx=0), fc=nn.Linear(4, 3))
    def model(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).unsqueeze(-1)
        return self.fc((self.embedding(ids) * mask).sum(1) / mask.sum(1))

    return model, nn.CrossEntropyLoss(), (padded(), torch.randint(3, (SAMPLES,)))


@language("Embedding(padding_idx=0), plain sum with the padding in it")
def sum_of_words() -> Parts:
    @module(embedding=nn.Embedding(WORDS, 4, padding_idx=0), fc=nn.Linear(4, 3))
    def model(self, ids: Tensor) -> Tensor:
        return self.fc(self.embedding(ids).sum(1).tanh())

    return model, nn.CrossEntropyLoss(), (padded(), torch.randint(3, (SAMPLES,)))


@language("sentiment: packed sequences through a bi-directional LSTM")
def packed_lstm() -> Parts:
    @module(embedding=nn.Embedding(WORDS, 3, padding_idx=0),
        rnn=nn.LSTM(3, 2, bidirectional=True, batch_first=True), fc=nn.Linear(4, 1))  # fmt: skip
    def model(self, text: Tensor, lengths: Tensor) -> Tensor:
        words = self.embedding(text)
        packed = pack_padded_sequence(words, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        return self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1)).squeeze(1)

    text = padded()
    return model, nn.BCEWithLogitsLoss(), ((text, (text != 0).sum(1)), torch.randint(2, (SAMPLES,)).float())


@language("masked words: −100 elsewhere, a lambda that transposes", says=COUNTED)
def masked_words() -> Parts:
    ids = tokens()
    chosen = torch.rand(ids.shape) < 0.3
    chosen[0, :4] = True
    model = nn.Sequential(
        nn.Embedding(WORDS, 4), nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), nn.Linear(4, WORDS)
    )
    x, y = ids.masked_fill(chosen, 0), ids.masked_fill(~chosen, -100)
    return model, lambda o, y: F.cross_entropy(o.transpose(1, 2), y), (x, y)


@language("tags of words: BiLSTM, targets are (tags, mask)", says=COUNTED)
def tagging() -> Parts:
    @module(embed=nn.Embedding(WORDS, 3), lstm=nn.LSTM(3, 2, batch_first=True, bidirectional=True),
        out=nn.Linear(4, 3))  # fmt: skip
    def model(self, ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(ids))[0])

    def loss(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        tags, mask = target
        ce = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
        return (ce * mask).sum() / mask.sum()

    ids = padded()
    return model, loss, (ids, (torch.randint(3, ids.shape), (ids != 0).float()))


@language("lengths as targets: the mask is made of them in the loss", says=COUNTED)
def mask_from_lengths() -> Parts:
    def loss(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
        mask = torch.arange(LENGTH)[None] < target["lengths"][:, None]
        return F.cross_entropy(logits[mask], target["ids"][mask])

    ids = padded()
    return GPT(), loss, (ids, {"ids": ids.roll(-1, 1), "lengths": (ids != 0).sum(1)})


@language("word2vec: skip-gram with negative samples as inputs")
def word2vec() -> Parts:
    @module(in_embed=nn.Embedding(WORDS, 4), out_embed=nn.Embedding(WORDS, 4))
    def model(self, center: Tensor, context: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
        v = self.in_embed(center)
        return (v * self.out_embed(context)).sum(1), torch.bmm(
            self.out_embed(negatives), v.unsqueeze(2)
        ).squeeze(2)

    def loss(scores: Any, _: Tensor) -> Tensor:
        positive, negative = scores
        return -(F.logsigmoid(positive) + F.logsigmoid(-negative).sum(1)).mean()

    n = 16
    ids = torch.randint(WORDS, (n,)), torch.randint(WORDS, (n,)), torch.randint(WORDS, (n, 3))
    return model, loss, (ids, torch.zeros(n))


@language("LLaMA's parts: RMSNorm, rotary embedding, SwiGLU, grouped queries")
def llama_parts() -> Parts:
    class RMSNorm(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight

    def rotate(x: Tensor) -> Tensor:
        t = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(x.shape[-1] // 2)
        x1, x2 = x.chunk(2, -1)
        return torch.cat((x1 * t.cos() - x2 * t.sin(), x1 * t.sin() + x2 * t.cos()), -1)

    class Llama(nn.Module):
        def __init__(self, d: int = 4) -> None:
            super().__init__()
            self.tok = nn.Embedding(WORDS, d)
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, o, bias=False) for o in (d, 2, 2, d))
            self.w1, self.w2, self.w3 = (nn.Linear(*of, bias=False) for of in ((d, 6), (6, d), (d, 6)))
            self.norm1, self.norm2, self.norm = (RMSNorm(d) for _ in range(3))
            self.output = nn.Linear(d, WORDS, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tok(ids)
            b, t, d = x.shape
            z = self.norm1(x)
            q, k, v = (w(z).view(b, t, -1, 2).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            q, k = rotate(q), rotate(k).repeat_interleave(2, 1)
            att = F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, 1), is_causal=True)
            x = x + self.wo(att.transpose(1, 2).reshape(b, t, d))
            z = self.norm2(x)
            x = x + self.w2(F.silu(self.w1(z)) * self.w3(z))
            return self.output(self.norm(x))

    ids = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    return Llama(), lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()), (ids[:, :-1], ids[:, 1:])


@language("mixture of experts with Switch's load-balancing loss", says=TOGETHER)
def mixture_of_experts() -> Parts:
    @module(embed=nn.Embedding(WORDS, 4), gate=nn.Linear(4, 2),
        experts=nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2)),
        head=nn.Linear(4, WORDS))  # fmt: skip
    def model(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        probs = self.gate(x).softmax(-1)
        top = probs.argmax(-1)
        fraction = F.one_hot(top, 2).to(x).flatten(0, 1).mean(0)
        balance = 2 * (fraction * probs.flatten(0, 1).mean(0)).sum()
        chosen = probs.gather(-1, top[..., None])
        y = (
            torch.stack([e(x) for e in self.experts], -2)
            .gather(-2, top[..., None, None].expand(*top.shape, 1, 4))
            .squeeze(-2)
        )
        return self.head(x + chosen * y), balance

    ids = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    data = (ids[:, :-1], ids[:, 1:])
    return model, lambda out, y: F.cross_entropy(out[0].transpose(1, 2), y) + 0.1 * out[1], data


@language("DPO: log-probabilities of chosen and rejected answers against a frozen reference")
def dpo() -> Parts:
    @module(gpt=GPT())
    def model(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        def log_probability(ids: Tensor) -> Tensor:
            logp = self.gpt(ids[:, :-1]).log_softmax(-1)
            return logp.gather(2, ids[:, 1:, None]).squeeze(2).sum(1)

        return log_probability(chosen), log_probability(rejected)

    def loss(policy: Any, reference: Any, beta: float = 0.5) -> Tensor:
        margin = (policy[0] - policy[1]) - (reference[0] - reference[1])
        return -F.logsigmoid(beta * margin).mean()

    return model, loss, ((tokens(), tokens()), (-10 - torch.rand(SAMPLES), -10 - torch.rand(SAMPLES)))


@language("reward model: −logsigmoid(r_chosen − r_rejected)")
def reward_model() -> Parts:
    @module(embed=nn.Embedding(WORDS, 3), gru=nn.GRU(3, 3, batch_first=True), head=nn.Linear(3, 1))
    def model(self, input_ids_chosen: Tensor, input_ids_rejected: Tensor) -> Tensor:
        return torch.cat(
            [self.head(self.gru(self.embed(x))[0][:, -1]) for x in (input_ids_chosen, input_ids_rejected)], 1
        )

    data = {"input_ids_chosen": tokens(), "input_ids_rejected": tokens()}, torch.zeros(SAMPLES)
    return model, lambda r, _: -F.logsigmoid(r[:, 0] - r[:, 1]).mean(), data


@language("distillation: soft teacher probabilities at temperature 2, batchmean, and hard labels")
def distillation() -> Parts:
    def loss(
        student: Tensor, target: tuple[Tensor, Tensor], temperature: float = 2.0, alpha: float = 0.7
    ) -> Tensor:
        teacher, labels = target
        soft = F.kl_div(
            F.log_softmax(student / temperature, 1),
            F.softmax(teacher / temperature, 1),
            reduction="batchmean",
        )
        return alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(student, labels)

    layers = nn.Embedding(WORDS, 3), nn.Flatten(), nn.Linear(3 * LENGTH, 4)
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(4, 3))
    return model, loss, (tokens(), (torch.randn(SAMPLES, 3), torch.randint(3, (SAMPLES,))))


@language("padded outputs of a packed GRU, max-pooled, inputs in a dict")
def unpacked_gru() -> Parts:
    @module(embed=nn.Embedding(WORDS, 3), gru=nn.GRU(3, 3, batch_first=True), out=nn.Linear(3, 2))
    def model(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, padding_value=-1000000000.0)
        return self.out(output.max(1).values)

    ids = padded()
    data = {"ids": ids, "lengths": (ids != 0).sum(1)}, torch.randint(2, (SAMPLES,))
    return model, F.cross_entropy, data


# fmt: off
language("minGPT: model(idx, targets) returns (logits, loss), −1 ignored", says=COUNTED, name="mingpt")(
    lambda: (GPT(), lambda out, y: out[1], ((tokens(), (targets := padded(-1))), targets)))
language("nanoGPT on characters: logits.view(−1, V), tied weights", name="nanogpt")(
    lambda: (GPT(tied=True), lambda logits, y: F.cross_entropy(logits.view(-1, WORDS), y.view(-1)),
    ((ids := torch.randint(WORDS, (SAMPLES, LENGTH + 1)))[:, :-1], ids[:, 1:].contiguous())))
language("shifted tokens in the loss: o[:, :−1] against y[:, 1:]", name="shifted")(
    lambda: (GPT(), lambda o, y: F.cross_entropy(o[:, :-1].reshape(-1, WORDS), y[:, 1:].reshape(-1)),
    ((ids := tokens()), ids)))
language("perplexity: exp of the mean cross-entropy", says=TOGETHER, name="perplexity")(
    lambda: (GPT(), lambda o, y: torch.exp(F.cross_entropy(o.transpose(1, 2), y)),
    ((ids := torch.randint(WORDS, (SAMPLES, LENGTH + 1)))[:, :-1], ids[:, 1:])))
