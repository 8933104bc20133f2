"""Transformers by Hugging Face and peft from tiny configurations: nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.cases_data import Rows
from tests.battery.small_transformers import LENGTH, made, pictures, some_words, text
from tests.ordinary.use import COUNTED, TOGETHER, Parts, Theme

huggingface, peft = Theme("Hugging Face"), Theme("peft")

N = 6


def causal(samples: int = N) -> dict[str, Tensor]:
    batch = text(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def inputs(batch: Any) -> Any:
    return {k: v for k, v in batch.items() if k != "labels"}


def shifted(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def next_words(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """The mean over all words that count, from the logits; of one batch or several."""
    batches = data if isinstance(data, list) else [data]
    total = sum(shifted(model(**inputs(b)).logits, b["labels"], reduction="sum") for b in batches)
    return total / sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)


def of_logits(function: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The total of a model that makes its loss itself: ``function(logits, labels)``."""
    return lambda model, loss, data: function(model(**inputs(data)).logits, data["labels"])


def of_words(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@huggingface("GPT-2, batches of a collator, each padded to its longest", total=next_words)
def gpt2_collator() -> Parts:
    def cut(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        longest = int(batch["attention_mask"].sum(1).max())
        return {k: v[:, :longest] for k, v in batch.items()}

    return made("gpt2"), None, [cut(causal(3)), cut(causal(3)), cut(causal(2))]


@huggingface("BERT for classes, a Dataset of dicts as the Trainer takes it", total=of_logits(F.cross_entropy))
def bert_classes() -> Parts:
    def review(ids: Tensor, label: Tensor) -> dict[str, Tensor]:
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": label}

    reviews = Rows(text()["input_ids"], torch.randint(3, (N,)), review)
    return made("SequenceClassification"), None, reviews


def regression(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits.squeeze(), labels)


def spans(model: nn.Module, loss: Any, data: Any) -> Tensor:
    names = "start_positions", "end_positions"
    out = model(**{k: v for k, v in data.items() if k not in names})
    return (
        F.cross_entropy(out.start_logits, data[names[0]]) + F.cross_entropy(out.end_logits, data[names[1]])
    ) / 2


@huggingface("BERT as a sentence encoder, mean pooling, in-batch negatives", says=TOGETHER)
def bert_sentences() -> Parts:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = made("bert")

        def embed(self, batch: dict[str, Tensor]) -> Tensor:
            mask = batch["attention_mask"][..., None]
            return F.normalize((self.bert(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))

        def forward(self, anchor: dict[str, Tensor], positive: dict[str, Tensor]) -> Tensor:
            return 20 * self.embed(anchor) @ self.embed(positive).T

    model = Encoder()
    model.bert.pooler.requires_grad_(False)
    data = {"anchor": text(), "positive": text()}, torch.zeros(N)
    return model, lambda s, _: F.cross_entropy(s, torch.arange(len(s))), data


def answers(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return of_words(model(**data).logits, data["labels"])


@huggingface("T5: sequence to sequence, labels −100 at padding", total=answers, inside=torch.float32)
def t5() -> Parts:
    return made("t5"), None, {**text(), "labels": causal()["labels"]}


def pixels(model: nn.Module, loss: Any, data: Any) -> Tensor:
    logits, size = model(data["pixel_values"]).logits, data["labels"].shape[-2:]
    logits = F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, data["labels"], ignore_index=255)


@huggingface("SegFormer: labels of pixels, of which 255 is left out", total=pixels, says=COUNTED)
def segformer() -> Parts:
    labels = torch.randint(3, (N, 8, 8)).masked_fill(torch.rand(N, 8, 8) < 0.7 * torch.rand(N, 1, 1), 255)
    return made("segformer"), None, {"pixel_values": torch.randn(N, 1, 8, 8), "labels": labels}


def pairs_of_clip(model: nn.Module, loss: Any, data: Any) -> Tensor:
    logits = model(**data).logits_per_text
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def adapted(model: Any, config: str, **options: Any) -> Any:
    """``model`` under an adapter of peft, moved from where training begins."""
    package = importlib.import_module("peft")
    wrapped = package.get_peft_model(model, getattr(package, config)(**options))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return wrapped


@peft("LoRA on GPT-2", total=next_words)
def lora_gpt2() -> Parts:
    where: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    model = adapted(made("gpt2"), "LoraConfig", r=2, lora_alpha=4, lora_dropout=0.1, **where)
    return model, None, causal()


@peft("LoRA on BERT for classes, modules_to_save", total=of_logits(F.cross_entropy))
def lora_bert() -> Parts:
    where = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    model = adapted(made("SequenceClassification"), "LoraConfig", r=2, **where, task_type="SEQ_CLS")
    return model, None, {**text(), "labels": torch.randint(3, (N,))}


@peft("LoRA as it is initialized (B = 0), a module of one's own")
def lora_fresh() -> Parts:
    package = importlib.import_module("peft")
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    wrapped = package.get_peft_model(model, package.LoraConfig(r=2, target_modules=["0", "2"]))
    return wrapped, nn.CrossEntropyLoss(), (torch.randn(N, 5), torch.randint(3, (N,)))


@peft.no_hessian("DoRA on BERT",
    "peft detaches the norm of the weights, as the paper on DoRA proposes: the gradient is not that of the loss",
    total=of_logits(F.cross_entropy))  # fmt: skip
def dora_bert() -> Parts:
    options: dict[str, Any] = {"r": 2, "use_dora": True, "target_modules": ["query"], "task_type": "SEQ_CLS"}
    model = adapted(made("SequenceClassification"), "LoraConfig", **options)
    return model, None, {**text(), "labels": torch.randint(3, (N,))}


@peft("IA³ on T5", total=answers, inside=torch.float32)
def ia3_t5() -> Parts:
    model, _, data = t5()
    parts = {"target_modules": ["k", "v", "wo"], "feedforward_modules": ["wo"]}
    return adapted(model, "IA3Config", **parts, task_type="SEQ_2_SEQ_LM"), None, data


# fmt: off
huggingface("GPT-2, a dict with labels, loss None", total=next_words, name="gpt2_labels")(
    lambda: (made("gpt2"), None, causal()))
huggingface("GPT-2, own shifted loss of out.logits, padding −100", says=COUNTED, name="gpt2_own_loss")(
    lambda: (made("gpt2"), lambda out, labels: shifted(out.logits, labels), causal()))
huggingface("Llama, loss None", total=next_words, inside=torch.float32, name="llama")(
    lambda: (made("llama"), None, causal()))
huggingface("BERT for classes, cross-entropy of out.logits", name="bert_logits")(
    lambda: (made("SequenceClassification"), lambda out, y: F.cross_entropy(out.logits, y),
    {**text(), "labels": torch.randint(3, (N,))}))
huggingface("BERT for regression (num_labels=1)", total=of_logits(regression), name="bert_regression")(
    lambda: (made("SequenceClassification", num_labels=1), None, {**text(), "labels": torch.randn(N)}))
huggingface("BERT for several labels (multi_label_classification)",
    total=of_logits(F.binary_cross_entropy_with_logits), name="bert_multi_label")(
    lambda: (made("SequenceClassification", problem_type="multi_label_classification"), None,
    {**text(), "labels": torch.randint(2, (N, 3)).float()}))
huggingface("BERT for tags of words, −100 at padding", total=of_logits(of_words), name="bert_tags")(
    lambda: (made("TokenClassification"), None,
    {**(batch := text()), "labels": (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)}))
huggingface("BERT for masked words", total=of_logits(of_words), name="bert_masked_words")(
    lambda: (made("MaskedLM"), None, {**(batch := text()), "labels": some_words(batch)}))
huggingface("BERT for questions: start_positions and end_positions in the inputs, loss None", total=spans,
    name="bert_questions")(
    lambda: (made("QuestionAnswering", num_labels=2), None,
    {**text(), "start_positions": torch.randint(LENGTH, (N,)), "end_positions": torch.randint(LENGTH, (N,))}))
huggingface("ViT for classes of images", total=of_logits(F.cross_entropy), name="vit")(
    lambda: (made("vit"), None, pictures(N)))
huggingface("Whisper: spectrograms to text", total=answers, name="whisper")(
    lambda: (made("whisper"), None, {"input_features": torch.randn(N, 3, 8), "labels": causal()["labels"]}))
huggingface("CLIP with return_loss, a dict", total=pairs_of_clip, says=TOGETHER, name="clip")(
    lambda: (made("clip"), None, {**text(), "pixel_values": pictures(N)["pixel_values"], "return_loss": True}))
peft("prefix tuning on GPT-2: keys and values before the text", total=next_words, name="prefix_gpt2")(
    lambda: (adapted(made("gpt2"), "PrefixTuningConfig", num_virtual_tokens=2, task_type="CAUSAL_LM"), None,
    causal()))
peft("LoRA merged into the weights (merge_and_unload), all of them trainable again", total=next_words,
    name="lora_merged")(
    lambda: (lora_gpt2()[0].merge_and_unload().requires_grad_(True), None, causal()))
