"""Transformers by Hugging Face and peft from tiny configurations: nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ordinary.use import COUNTED, TOGETHER, Parts, Theme

huggingface, peft = Theme("Hugging Face"), Theme("peft")

WORDS, LENGTH, N = 9, 6, 6
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
IMAGE = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
# What these configurations name as special tokens lies beyond a vocabulary of nine.
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def made(kind: str, config: str, **sizes: Any) -> Any:
    """A model of transformers from a configuration, with weights that are not all near zero."""
    package = importlib.import_module("transformers")
    model = getattr(package, kind)(getattr(package, config)(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model


def gpt2() -> Any:
    return made(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=WORDS,
        n_positions=LENGTH + 2,
        n_embd=4,
        n_layer=1,
        n_head=2,
        n_inner=4,
        **SPECIAL,
    )


def bert(head: str, **options: Any) -> Any:
    return made(
        f"BertFor{head}",
        "BertConfig",
        type_vocab_size=1,
        pad_token_id=0,
        **{"num_labels": 3, **SIZES, **options},
    )


def text(samples: int = N) -> dict[str, Tensor]:
    """What a tokenizer makes of sentences of several lengths."""
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (samples, 1))).long()
    return {"input_ids": torch.randint(3, WORDS, (samples, LENGTH)) * mask, "attention_mask": mask}


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


@huggingface("GPT-2, a dict with labels, loss None", total=next_words)
def gpt2_labels() -> Parts:
    return gpt2(), None, causal()


@huggingface("GPT-2, batches of a collator, each padded to its longest", total=next_words)
def gpt2_collator() -> Parts:
    def cut(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        longest = int(batch["attention_mask"].sum(1).max())
        return {k: v[:, :longest] for k, v in batch.items()}

    return gpt2(), None, [cut(causal(3)), cut(causal(3)), cut(causal(2))]


@huggingface("GPT-2, own shifted loss of out.logits, padding −100", says=COUNTED)
def gpt2_own_loss() -> Parts:
    return gpt2(), lambda out, labels: shifted(out.logits, labels), causal()


@huggingface("Llama, loss None", total=next_words, inside=torch.float32)
def llama() -> Parts:
    return made("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1, **SIZES, **SPECIAL), None, causal()


@huggingface("BERT for classes, a Dataset of dicts as the Trainer takes it", total=of_logits(F.cross_entropy))
def bert_classes() -> Parts:
    class Reviews(Dataset[Any]):
        def __init__(self) -> None:
            self.encodings, self.labels = text(), torch.randint(3, (N,))

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {**{k: v[i] for k, v in self.encodings.items()}, "labels": self.labels[i]}

        def __len__(self) -> int:
            return len(self.labels)

    return bert("SequenceClassification"), None, Reviews()


@huggingface("BERT for tags of words, −100 at padding", total=of_logits(of_words))
def bert_tags() -> Parts:
    batch = text()
    return (
        bert("TokenClassification"),
        None,
        {**batch, "labels": (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)},
    )


def pairs_of_clip(model: nn.Module, loss: Any, data: Any) -> Tensor:
    logits = model(**data).logits_per_text
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def clip_parts() -> tuple[Any, dict[str, Any]]:
    config = {
        "text_config": {**SIZES, **SPECIAL},
        "vision_config": {**IMAGE, "image_size": 4, "patch_size": 2, "num_channels": 1},
    }
    model = made("CLIPModel", "CLIPConfig", projection_dim=3, **config)
    return model, {**text(), "pixel_values": torch.randn(N, 1, 4, 4), "return_loss": True}


@huggingface("CLIP with return_loss, a dict", total=pairs_of_clip, says=TOGETHER)
def clip() -> Parts:
    model, data = clip_parts()
    return model, None, data


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
    return (
        adapted(
            gpt2(),
            "LoraConfig",
            r=2,
            lora_alpha=4,
            lora_dropout=0.1,
            target_modules=["c_attn"],
            fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        ),
        None,
        causal(),
    )


@peft(
    "DoRA on BERT",
    total=of_logits(F.cross_entropy),
    expected="refused_hessian",
    undefined=True,
    words="derivative",
    why="peft detaches the norm of the weights, as the paper on DoRA proposes: the gradient is not that of the loss",
)
def dora_bert() -> Parts:
    model = adapted(
        bert("SequenceClassification"),
        "LoraConfig",
        r=2,
        use_dora=True,
        target_modules=["query"],
        task_type="SEQ_CLS",
    )
    return model, None, {**text(), "labels": torch.randint(3, (N,))}


@peft("LoRA merged into the weights (merge_and_unload), all of them trainable again", total=next_words)
def lora_merged() -> Parts:
    return lora_gpt2()[0].merge_and_unload().requires_grad_(True), None, causal()
