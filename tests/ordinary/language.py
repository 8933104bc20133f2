"""Text: language models, classifiers, translation."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


@language("minGPT: model(idx, targets) returns (logits, loss), −1 ignored", says=COUNTED)
def mingpt() -> Parts:
    idx = tokens()
    targets = padded(-1)
    return GPT(), lambda out, y: out[1], ((idx, targets), targets)


@language("shifted tokens with padding ignored", says=COUNTED)
def shifted_and_padded() -> Parts:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return F.cross_entropy(shift_logits.view(-1, WORDS), shift_labels.view(-1), ignore_index=0)

    ids = padded()
    return GPT(), loss, (ids, ids)


@language("perplexity: exp of the mean cross-entropy", says=TOGETHER)
def perplexity() -> Parts:
    ids = torch.randint(WORDS, (SAMPLES, LENGTH + 1))
    return GPT(), lambda o, y: torch.exp(F.cross_entropy(o.transpose(1, 2), y)), (ids[:, :-1], ids[:, 1:])


@language(
    "text classification tutorial: EmbeddingBag with offsets, a list of batches",
    total=by_size,
    differences=True,
)
def embedding_bag() -> Parts:
    class TextClassificationModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.EmbeddingBag(WORDS, 4, sparse=False), nn.Linear(4, 3)

        def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
            return self.fc(self.embedding(text, offsets))

    def batch(n: int) -> Any:
        lengths = torch.randint(1, 5, (n,))
        return (torch.randint(WORDS, (int(lengths.sum()),)), lengths.cumsum(0) - lengths), torch.randint(
            3, (n,)
        )

    return TextClassificationModel(), nn.CrossEntropyLoss(), [batch(4), batch(4), batch(3)]


@language("Embedding(padding_idx=0), mean over the words")
def mean_of_words() -> Parts:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.Embedding(WORDS, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            mask = (ids != 0).unsqueeze(-1)
            return self.fc((self.embedding(ids) * mask).sum(1) / mask.sum(1))

    return Classifier(), nn.CrossEntropyLoss(), (padded(), torch.randint(3, (SAMPLES,)))


@language("Embedding(padding_idx=0), plain sum with the padding in it")
def sum_of_words() -> Parts:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.Embedding(WORDS, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(self.embedding(ids).sum(1).tanh())

    return Classifier(), nn.CrossEntropyLoss(), (padded(), torch.randint(3, (SAMPLES,)))


@language("lengths as targets: the mask is made of them in the loss", says=COUNTED)
def mask_from_lengths() -> Parts:
    def loss(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
        mask = torch.arange(LENGTH)[None] < target["lengths"][:, None]
        return F.cross_entropy(logits[mask], target["ids"][mask])

    ids = padded()
    return GPT(), loss, (ids, {"ids": ids.roll(-1, 1), "lengths": (ids != 0).sum(1)})
