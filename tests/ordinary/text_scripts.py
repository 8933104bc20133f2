"""Text, as public repositories' training scripts have it: their losses and forms of batches, small models."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.battery.case import module
from tests.ordinary.scripts import mask_of
from tests.ordinary.use import BATCHES, COUNTED, EITHER, TOGETHER, Parts, Theme, by_count, by_size, per_batch

text_scripts = Theme("text scripts")
WORDS = 7


def words(*shape: int) -> Tensor:
    """No padding (0) among them."""
    return torch.randint(1, WORDS, shape)


def padded_to(lengths: list[int], pad: int = 0) -> Tensor:
    """(N, max) words, ``pad`` after each sequence's length."""
    size = max(lengths)
    return words(len(lengths), size).masked_fill(~mask_of(lengths), pad)


class Past(nn.Module):
    """Each word sees the mean of those before it: a causal model that takes sequences of any length."""

    def __init__(self, outputs: int = WORDS) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(WORDS, 3), nn.Linear(3, 4), nn.Linear(4, outputs)

    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        count = torch.arange(1, x.shape[1] + 1).to(x)
        return torch.tanh(self.mix(x.cumsum(1) / count[:, None]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.features(ids))


def counted(value: int) -> Any:
    """The number of targets other than ``value``."""
    return lambda x, y: (y != value).sum()


@text_scripts("PyTorch's word_language_model: time first, two columns, flattened targets, a shorter last batch",
    source="pytorch/examples: word_language_model/main.py", small=True, total=by_size)  # fmt: skip
def word_language_model_columns() -> Parts:
    @module(encoder=nn.Embedding(WORDS, 3), rnn=nn.GRU(3, 3), decoder=nn.Linear(3, WORDS))
    def model(self, x: Tensor) -> Tensor:
        decoded = self.decoder(self.rnn(self.encoder(x))[0])
        return F.log_softmax(decoded.view(-1, WORDS), dim=1)

    source, bptt = words(11, 2), 4
    batches = []
    for i in range(0, len(source) - 1, bptt):
        n = min(bptt, len(source) - 1 - i)
        batches.append((source[i : i + n], source[i + 1 : i + 1 + n].reshape(-1)))
    return model, nn.NLLLoss(), batches


@text_scripts("PyTorch's language_translation: time first, source and target of several lengths, padding ignored",
    source="pytorch/examples: language_translation/main.py", small=True, total=by_count(counted(0)),
    other=per_batch, says=EITHER)  # fmt: skip
def language_translation() -> Parts:
    @module(src=nn.Embedding(WORDS, 3), tgt=nn.Embedding(WORDS, 3), rnn=nn.GRU(3, 3), out=nn.Linear(3, WORDS))
    def model(self, src: Tensor, tgt: Tensor) -> Tensor:
        hidden = self.src(src).mean(0, keepdim=True)
        return self.out(self.rnn(self.tgt(tgt), hidden)[0])

    loss_fn = nn.CrossEntropyLoss(ignore_index=0)

    def batch(sources: list[int], targets: list[int]) -> Any:
        src, tgt = padded_to(sources).T, padded_to(targets).T
        return (src, tgt[:-1]), tgt[1:]

    data = [batch([3, 4], [5, 5]), batch([5, 2], [6, 3]), batch([2], [3])]
    return model, lambda logits, y: loss_fn(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)), data


@text_scripts("litgpt's finetuning: packed sequences, one a batch, of several lengths; −100 at prompts, one has no answer",
    source="Lightning-AI/litgpt: litgpt/finetune/lora.py", small=True,
    total=by_count(lambda x, y: (y[:, 1:] != -100).sum()), other=per_batch, says=EITHER)  # fmt: skip
def packed_sequences() -> Parts:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = logits[..., :-1, :].reshape(-1, WORDS), targets[..., 1:].reshape(-1)
        count = (targets != -100).sum()
        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count.maximum(
            torch.ones_like(count)
        )

    def batch(length: int, prompt: int) -> tuple[Tensor, Tensor]:
        ids = words(1, length)
        return ids, ids.masked_fill(torch.arange(length) < prompt, -100)

    return Past(), loss, [batch(7, 2), batch(4, 1), batch(9, 6), batch(5, 5)]


def of_tokens(model: nn.Module, loss: Any, data: Any) -> Tensor:
    parts = [
        (model(**{**batch, "num_items_in_batch": 1}).loss, (batch["labels"] != -100).sum()) for batch in data
    ]
    return sum(value for value, _ in parts) / sum(count for _, count in parts)


# The Trainer adds the losses of the micro-batches: the loss of the step is the mean over all labels of all of
# them. There is one answer, and so this is no refusal.
@text_scripts("Hugging Face's Trainer: micro-batches of one or two rows, each a sum over num_items_in_batch of all",
    source="huggingface/transformers: src/transformers/loss/loss_utils.py", small=True, total=of_tokens)  # fmt: skip
def num_items_in_batch() -> Parts:
    class Model(Past):
        def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
            logits = super().forward(input_ids)
            how = "mean" if num_items_in_batch is None else "sum"
            value = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction=how)
            return types.SimpleNamespace(
                loss=value if how == "mean" else value / num_items_in_batch, logits=logits
            )

    def batch(lengths: list[int]) -> dict[str, Tensor]:
        ids = padded_to(lengths)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    batches = [batch([5, 3]), batch([2, 6]), batch([4])]
    count = sum((b["labels"] != -100).sum() for b in batches)
    return Model(), None, [{**b, "num_items_in_batch": count} for b in batches]


@text_scripts("Hugging Face's LabelSmoother, a loader of three rows; the last row has no label",
    source="huggingface/transformers: src/transformers/trainer_pt_utils.py", small=True, says=COUNTED)  # fmt: skip
def label_smoother() -> Parts:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = -F.log_softmax(logits, dim=-1)
        mask = labels.unsqueeze(-1).eq(-100)
        nll = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).masked_fill(mask, 0.0)
        smoothed = log_probs.sum(-1, keepdim=True).masked_fill(mask, 0.0)
        active = mask.numel() - mask.long().sum()
        return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * log_probs.shape[-1])

    ids = padded_to([5, 5, 5, 4, 5, 2])
    ids = torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)])
    labels = ids.masked_fill(ids == 0, -100)
    return Past(), loss, DataLoader(TensorDataset(ids, labels), batch_size=3)


@text_scripts("fairseq's label-smoothed cross-entropy: sum over the batch / ntokens, batches of several lengths",
    source="facebookresearch/fairseq: fairseq/criterions/label_smoothed_cross_entropy.py", small=True,
    total=by_count(counted(1)), says=COUNTED)  # fmt: skip
def fairseq_smoothed() -> Parts:
    pad = 1

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        lprobs = F.log_softmax(logits, dim=-1).view(-1, WORDS)
        target = target.reshape(-1, 1)
        nll, smooth = -lprobs.gather(-1, target), -lprobs.sum(-1, keepdim=True)
        mask = target.eq(pad)
        nll, smooth = nll.masked_fill(mask, 0.0).sum(), smooth.masked_fill(mask, 0.0).sum()
        eps = 0.1 / (WORDS - 1)
        return ((1.0 - 0.1 - eps) * nll + eps * smooth) / target.ne(pad).sum()

    def batch(lengths: list[int]) -> tuple[Tensor, Tensor]:
        ids = torch.where(padded_to(lengths) == 0, pad, torch.randint(2, WORDS, (len(lengths), max(lengths))))
        return F.pad(ids[:, :-1], (1, 0), value=2), ids

    return Past(), loss, [batch([4, 4]), batch([6, 2]), batch([3])]


@text_scripts("makemore: names end in −1, a loader of three, the last batch has one",
    source="karpathy/makemore: makemore.py", small=True, says=COUNTED)  # fmt: skip
def makemore() -> Parts:
    lengths = torch.tensor([4, 4, 4, 6, 2, 5, 1])
    ids = padded_to(lengths.tolist())
    x = F.pad(ids, (1, 0))
    y = F.pad(ids, (0, 1)).masked_fill(torch.arange(7) > lengths[:, None], -1)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    return Past(), loss, DataLoader(TensorDataset(x, y), batch_size=3)


@text_scripts("BERT-pytorch: masked words (0 ignored) and next sentences, two means; the last rows have no masked word",
    source="codertimo/BERT-pytorch: bert_pytorch/trainer/pretrain.py", says=EITHER)  # fmt: skip
def bert_pretraining() -> Parts:
    @module(base=Past(), segment=nn.Embedding(2, 4), next=nn.Linear(4, 2))
    def model(self, x: Tensor, segment_label: Tensor) -> tuple[Tensor, Tensor]:
        z = self.base.features(x) + self.segment(segment_label)
        return F.log_softmax(self.next(z[:, 0]), -1), F.log_softmax(self.base.out(z), -1)

    masked, nexts = nn.NLLLoss(ignore_index=0), nn.NLLLoss()

    def loss(out: Any, y: Any) -> Tensor:
        is_next, bert_label = y
        return nexts(out[0], is_next) + masked(out[1].transpose(1, 2), bert_label)

    n = 10
    labels = words(n, 5) * (torch.rand(n, 5) < 0.4)
    labels[:, 1], labels[-2:] = words(n), 0
    labels[:6, 2:] = 0  # one word each at first
    inputs = words(n, 5), (torch.arange(5) > 2).long().repeat(n, 1)
    return model, loss, (inputs, (torch.randint(2, (n,)), labels))


@text_scripts("DistilBERT's distiller: KL over the words of the text and cross-entropy of masked words, pairs of rows",
    source="huggingface/transformers: examples/research_projects/distillation/distiller.py", small=True,
    says=BATCHES, total=per_batch)  # fmt: skip
def distiller() -> Parts:
    def loss(s_logits: Tensor, y: Any) -> Tensor:
        lm_labels, attention_mask, t_logits = y
        mask = attention_mask.unsqueeze(-1).expand_as(s_logits).bool()
        s, t = (z.masked_select(mask).view(-1, WORDS) for z in (s_logits, t_logits))
        kl = F.kl_div(F.log_softmax(s / 2, -1), F.softmax(t / 2, -1), reduction="batchmean") * 4
        return 5 * kl + 2 * F.cross_entropy(s_logits.view(-1, WORDS), lm_labels.view(-1), ignore_index=-100)

    def batch(lengths: list[int], chosen: list[int]) -> Any:
        ids = padded_to(lengths)
        labels = ids.clone()
        labels[torch.arange(ids.shape[1]) >= torch.tensor(chosen)[:, None]] = -100
        return ids, (labels, (ids != 0).long(), torch.randn(*ids.shape, WORDS))

    return Past(), loss, [batch([4, 4], [1, 1]), batch([5, 3], [2, 1]), batch([3, 6], [3, 1])]


def orpo_parts() -> Parts:
    @module(base=Past())
    def model(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return self.base(torch.cat([chosen, rejected]))

    def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits[:, :-1], labels[:, 1:]
        mask = labels != -100
        each = logits.log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        return (each * mask).sum(-1) / mask.sum(-1)

    def loss(logits: Tensor, y: Any) -> Tensor:
        chosen, rejected = y
        n = len(chosen)
        nll = F.cross_entropy(logits[:n, :-1].reshape(-1, WORDS), chosen[:, 1:].reshape(-1))
        good, bad = log_probs(logits[:n], chosen), log_probs(logits[n:], rejected)
        odds = (good - bad) - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
        return nll - 0.1 * F.logsigmoid(odds).mean()

    chosen, rejected = padded_to([5, 5, 5, 4, 6, 3, 6]), padded_to([6, 4, 5, 3, 5, 5, 2])
    labels = tuple(ids.masked_fill(ids == 0, -100) for ids in (chosen, rejected))
    return model, loss, ((chosen, rejected), labels)


@text_scripts.refused("TRL's ORPO: chosen and rejected rows in one pass, data = ((chosen, rejected), (labels, labels))",
    "two pairs of tensors of one shape may be two batches as well", "pairs",
    source="huggingface/trl: trl/trainer/orpo_trainer.py")  # fmt: skip
def orpo_pairs() -> Parts:
    return orpo_parts()


@text_scripts("TRL's ORPO, inputs in a dict: mean over words of the chosen rows, and over pairs",
    source="huggingface/trl: trl/trainer/orpo_trainer.py", says=TOGETHER)  # fmt: skip
def orpo() -> Parts:
    model, loss, ((chosen, rejected), labels) = orpo_parts()
    return model, loss, ({"chosen": chosen, "rejected": rejected}, labels)


def grpo_loss(logits: Tensor, y: Any) -> tuple[Tensor, Tensor]:
    """Loss by word, and its mask."""
    ids, mask, advantages, old = y
    log_probs = logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
    ratio = torch.exp(log_probs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]), mask


def completions(lengths: list[int]) -> Any:
    ids = padded_to(lengths) if max(lengths) else torch.zeros(len(lengths), 1, dtype=torch.long)
    n, size = ids.shape
    return ids, (ids.roll(-1, 1), (ids != 0).long(), torch.randn(n), -2 + 0.1 * torch.randn(n, size))


@text_scripts("TRL's GRPO: the mean of each completion's mean; a truncated completion is masked as a whole",
    source="huggingface/trl: trl/trainer/grpo_trainer.py")  # fmt: skip
def grpo() -> Parts:
    def loss(logits: Tensor, y: Any) -> Tensor:
        each, mask = grpo_loss(logits, y)
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()

    return Past(), loss, completions([5, 3, 5, 2, 4, 5, 0, 3])


@text_scripts("TRL's GRPO with loss_type 'bnpo': sum over words / words of the batch, one or two completions a batch",
    source="huggingface/trl: trl/trainer/grpo_trainer.py", small=True, total=by_count(lambda x, y: y[1].sum()),
    other=per_batch, says=EITHER)  # fmt: skip
def bnpo() -> Parts:
    def loss(logits: Tensor, y: Any) -> Tensor:
        each, mask = grpo_loss(logits, y)
        return (each * mask).sum() / mask.sum().clamp(min=1.0)

    return Past(), loss, [completions([4, 4]), completions([6, 2]), completions([0]), completions([3])]


@text_scripts("AllenNLP's sequence_cross_entropy, average='batch': the mean over rows that have a word; the last have none",
    source="allenai/allennlp: allennlp/nn/util.py", says=EITHER)  # fmt: skip
def allennlp_rows() -> Parts:
    def loss(logits: Tensor, y: Any) -> Tensor:
        targets, weights = y
        nll = -F.log_softmax(logits, -1).gather(2, targets.unsqueeze(2)).squeeze(2) * weights
        total = weights.sum(1)
        return (nll.sum(1) / (total + 1e-13)).sum() / ((total > 0).float().sum() + 1e-13)

    ids = torch.cat([padded_to([5, 3, 5, 4, 2, 5]), torch.zeros(2, 5, dtype=torch.long)])
    return Past(4), loss, (ids, (torch.randint(4, ids.shape), (ids != 0).float()))


class Crf(nn.Module):
    """Log-likelihood of tags, by row: forward algorithm over time."""

    def __init__(self, tags: int = 3) -> None:
        super().__init__()
        self.base = Past(tags)
        self.start, self.pairs = (
            nn.Parameter(torch.randn(tags) / 3),
            nn.Parameter(torch.randn(tags, tags) / 3),
        )

    def forward(self, ids: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emissions = self.base(ids)
        score = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        alpha = self.start + emissions[:, 0]
        for t in range(1, ids.shape[1]):
            step = self.pairs[tags[:, t - 1], tags[:, t]] + emissions[:, t].gather(
                1, tags[:, t : t + 1]
            ).squeeze(1)
            score = score + step * mask[:, t]
            following = torch.logsumexp(alpha[:, :, None] + self.pairs + emissions[:, t, None], 1)
            alpha = torch.where(mask[:, t, None].bool(), following, alpha)
        return score - torch.logsumexp(alpha, 1)


@text_scripts("pytorch-crf, reduction='token_mean': log-likelihoods of rows / words of the batch, two rows a batch",
    source="kmkurn/pytorch-crf: torchcrf/__init__.py", small=True, total=by_count(lambda x, y: y.sum()),
    other=per_batch, says=EITHER)  # fmt: skip
def crf_token_mean() -> Parts:
    def batch(lengths: list[int]) -> Any:
        ids = padded_to(lengths)
        mask = (ids != 0).long()
        return (ids, torch.randint(3, ids.shape), mask), mask

    data = [batch([3, 3]), batch([5, 2]), batch([4])]
    return Crf(), lambda llh, mask: -llh.sum() / mask.sum(), data


@text_scripts("yunjey's image captioning: targets are the packed captions, lengths a list of ints, three images a batch",
    source="yunjey/pytorch-tutorial: tutorials/03-advanced/image_captioning/train.py", small=True,
    total=by_size, other=per_batch, says=None)  # fmt: skip
def packed_captions() -> Parts:
    @module(image=nn.Linear(4, 3), embed=nn.Embedding(WORDS, 3), rnn=nn.GRU(3, 3, batch_first=True),
        out=nn.Linear(3, WORDS))  # fmt: skip
    def model(self, images: Tensor, captions: Tensor, lengths: list[int]) -> Tensor:
        x = torch.cat((self.image(images).unsqueeze(1), self.embed(captions)), 1)
        return self.out(self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0][0])

    def batch(lengths: list[int]) -> Any:
        captions = padded_to(lengths)
        targets = pack_padded_sequence(captions, lengths, batch_first=True)[0]
        return (torch.randn(len(lengths), 4), captions, lengths), targets

    return model, nn.CrossEntropyLoss(), [batch([3, 3, 3]), batch([6, 4, 1]), batch([2, 2])]


@text_scripts("captions with attention: cross-entropy of the packed words, and a penalty of the attention of each image",
    source="sgrvinod/a-PyTorch-Tutorial-to-Image-Captioning: train.py", small=True, says=BATCHES,
    total=per_batch)  # fmt: skip
def attention_captions() -> Parts:
    @module(query=nn.Embedding(WORDS, 3), key=nn.Linear(2, 3), out=nn.Linear(2, WORDS))
    def model(self, images: Tensor, captions: Tensor, lengths: Tensor) -> Any:
        lengths, order = lengths.sort(dim=0, descending=True)
        images, captions = images[order], captions[order]
        alphas = torch.softmax(self.query(captions[:, :-1]) @ self.key(images).transpose(1, 2), -1)
        return self.out(alphas @ images), captions, (lengths - 1).tolist(), alphas

    def loss(out: Any, _: Any) -> Tensor:
        scores, captions, lengths, alphas = out
        picked = pack_padded_sequence(scores, lengths, batch_first=True)[0]
        targets = pack_padded_sequence(captions[:, 1:], lengths, batch_first=True)[0]
        return F.cross_entropy(picked, targets) + ((1.0 - alphas.sum(dim=1)) ** 2).mean()

    def batch(lengths: list[int]) -> Any:
        captions, sizes = padded_to(lengths), torch.tensor(lengths)
        return (torch.randn(len(lengths), 4, 2), captions, sizes), sizes

    return model, loss, [batch([4, 3]), batch([3, 6, 2]), batch([5, 3, 4])]


@text_scripts("PyTorch's chatbot: time first, a masked mean at each step, summed over the steps",
    source="pytorch/tutorials: beginner_source/chatbot_tutorial.py", small=True, says=BATCHES, total=per_batch)  # fmt: skip
def chatbot() -> Parts:
    @module(src=nn.Embedding(WORDS, 3), tgt=nn.Embedding(WORDS, 3), rnn=nn.GRU(3, 3), out=nn.Linear(3, WORDS))
    def model(self, src: Tensor, tgt: Tensor) -> Tensor:
        return F.softmax(self.out(self.rnn(self.tgt(tgt), self.src(src).mean(0, keepdim=True))[0]), -1)

    def loss(outputs: Tensor, y: Any) -> Tensor:
        target, mask = y
        value = outputs.new_zeros(())
        for t in range(len(target)):
            nll = -torch.log(torch.gather(outputs[t], 1, target[t].view(-1, 1)).squeeze(1))
            value = value + nll.masked_select(mask[t]).mean()
        return value

    def batch(lengths: list[int]) -> Any:
        target = padded_to(lengths).T
        return (words(4, len(lengths)), F.pad(target[:-1], (0, 0, 1, 0), value=1)), (target, target != 0)

    return model, loss, [batch([4, 4, 4]), batch([5, 3, 2]), batch([3, 1])]


@text_scripts("x-transformers: the wrapped model returns its loss of the ids, data = (ids, ids), three rows a batch",
    source="lucidrains/x-transformers: x_transformers/autoregressive_wrapper.py", small=True)  # fmt: skip
def autoregressive_wrapper() -> Parts:
    @module(net=Past())
    def model(self, x: Tensor) -> Tensor:
        inputs, target = x[:, :-1], x[:, 1:]
        return F.cross_entropy(self.net(inputs).transpose(1, 2), target, ignore_index=-100)

    ids = words(7, 6)
    return model, lambda value, _: value, DataLoader(TensorDataset(ids, ids), batch_size=3)


@text_scripts("sentence-transformers' CoSENT: a log-sum over pairs of the batch, three rows a batch",
    source="UKPLab/sentence-transformers: sentence_transformers/losses/CoSENTLoss.py", small=True, says=BATCHES,
    total=per_batch)  # fmt: skip
def cosent() -> Parts:
    @module(base=Past())
    def model(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.normalize(self.base.features(ids).mean(1)) for ids in (a, b))
        return (a * b).sum(1)

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        scores = scores * 20
        scores = scores[:, None] - scores[None, :]
        smaller = (labels[:, None] < labels[None, :]).to(scores)
        scores = (scores - (1 - smaller) * 1e12).view(-1)
        return torch.logsumexp(torch.cat((torch.zeros(1).to(scores), scores)), dim=0)

    data = [((words(n, 4), words(n, 4)), torch.linspace(0, 1, n)) for n in (3, 3, 2)]
    return model, loss, data


def squad(logits: Tensor, y: Any) -> Tensor:
    """Answers beyond the text are clamped to its length, which is ignored."""
    length = logits.shape[1]
    value = logits.new_zeros(())
    for of, positions in zip(logits.unbind(-1), y, strict=True):
        value = value + F.cross_entropy(of, positions.clamp(0, length), ignore_index=length) / 2
    return value


@text_scripts("the same, whole answers alone are truncated, a loader of two",
    source="huggingface/transformers: src/transformers/models/bert/modeling_bert.py", small=True, says=EITHER,
    other=per_batch)  # fmt: skip
def truncated_answers_in_batches() -> Parts:
    start = torch.tensor([0, 1, 2, 9, 0, 3, 2, 7, 1])
    end = torch.tensor([1, 3, 2, 11, 2, 3, 4, 8, 2])
    data = [((words(len(s), 5)), (s, e)) for s, e in zip(start.split(2), end.split(2), strict=True)]
    return Past(2), squad, data


# fmt: off
text_scripts("BERT for questions: start and end are ignored beyond the text, each for itself; late rows are truncated",
    source="huggingface/transformers: src/transformers/models/bert/modeling_bert.py", says=TOGETHER,
    name="truncated_answers")(
    lambda: (Past(2), squad,
    (words(9, 5), (torch.tensor([0, 1, 2, 1, 0, 3, 2, 4, 9]), torch.tensor([1, 3, 2, 4, 2, 3, 4, 7, 11])))))
