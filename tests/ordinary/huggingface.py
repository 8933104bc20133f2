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


@huggingface("BERT for classes, cross-entropy of out.logits")
def bert_logits() -> Parts:
    return (
        bert("SequenceClassification"),
        lambda out, y: F.cross_entropy(out.logits, y),
        {**text(), "labels": torch.randint(3, (N,))},
    )


def regression(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits.squeeze(), labels)


@huggingface("BERT for regression (num_labels=1)", total=of_logits(regression))
def bert_regression() -> Parts:
    return bert("SequenceClassification", num_labels=1), None, {**text(), "labels": torch.randn(N)}


@huggingface(
    "BERT for several labels (multi_label_classification)",
    total=of_logits(F.binary_cross_entropy_with_logits),
)
def bert_multi_label() -> Parts:
    model = bert("SequenceClassification", problem_type="multi_label_classification")
    return model, None, {**text(), "labels": torch.randint(2, (N, 3)).float()}


@huggingface("BERT for tags of words, −100 at padding", total=of_logits(of_words))
def bert_tags() -> Parts:
    batch = text()
    return (
        bert("TokenClassification"),
        None,
        {**batch, "labels": (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)},
    )


@huggingface("BERT for masked words", total=of_logits(of_words))
def bert_masked_words() -> Parts:
    batch = text()
    chosen = (torch.rand(N, LENGTH) < 0.3) & (batch["attention_mask"] > 0)
    chosen[0, 0] = True
    return bert("MaskedLM"), None, {**batch, "labels": batch["input_ids"].masked_fill(~chosen, -100)}


def spans(model: nn.Module, loss: Any, data: Any) -> Tensor:
    names = ("start_positions", "end_positions")
    out = model(**{k: v for k, v in data.items() if k not in names})
    return (
        F.cross_entropy(out.start_logits, data[names[0]]) + F.cross_entropy(out.end_logits, data[names[1]])
    ) / 2


@huggingface("BERT for questions: start_positions and end_positions in the inputs, loss None", total=spans)
def bert_questions() -> Parts:
    batch = {"start_positions": torch.randint(LENGTH, (N,)), "end_positions": torch.randint(LENGTH, (N,))}
    return bert("QuestionAnswering", num_labels=2), None, {**text(), **batch}


@huggingface("BERT as a sentence encoder, mean pooling, in-batch negatives", says=TOGETHER)
def bert_sentences() -> Parts:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = made("BertModel", "BertConfig", type_vocab_size=1, pad_token_id=0, **SIZES)

        def embed(self, batch: dict[str, Tensor]) -> Tensor:
            mask = batch["attention_mask"][..., None]
            return F.normalize((self.bert(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))

        def forward(self, anchor: dict[str, Tensor], positive: dict[str, Tensor]) -> Tensor:
            return 20 * self.embed(anchor) @ self.embed(positive).T

    model = Encoder()
    model.bert.pooler.requires_grad_(False)
    return (
        model,
        lambda s, _: F.cross_entropy(s, torch.arange(len(s))),
        ({"anchor": text(), "positive": text()}, torch.zeros(N)),
    )


@huggingface("ViT for classes of images", total=of_logits(F.cross_entropy))
def vit() -> Parts:
    model = made(
        "ViTForImageClassification",
        "ViTConfig",
        image_size=4,
        patch_size=2,
        num_channels=1,
        num_labels=3,
        **IMAGE,
    )
    return model, None, {"pixel_values": torch.randn(N, 1, 4, 4), "labels": torch.randint(3, (N,))}


def answers(model: nn.Module, loss: Any, data: Any) -> Tensor:
    return of_words(model(**data).logits, data["labels"])


@huggingface("T5: sequence to sequence, labels −100 at padding", total=answers, inside=torch.float32)
def t5() -> Parts:
    model = made(
        "T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2,
        relative_attention_num_buckets=4, relative_attention_max_distance=6, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return model, None, {**text(), "labels": causal()["labels"]}


@huggingface("Whisper: spectrograms to text", total=answers)
def whisper() -> Parts:
    model = made(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=WORDS, d_model=4, num_mel_bins=3, max_source_positions=4,
        max_target_positions=LENGTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=4, decoder_ffn_dim=4, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **SPECIAL,
    )  # fmt: skip
    return model, None, {"input_features": torch.randn(N, 3, 8), "labels": causal()["labels"]}


def pixels(model: nn.Module, loss: Any, data: Any) -> Tensor:
    logits = F.interpolate(
        model(data["pixel_values"]).logits,
        size=data["labels"].shape[-2:],
        mode="bilinear",
        align_corners=False,
    )
    return F.cross_entropy(logits, data["labels"], ignore_index=255)


@huggingface("SegFormer: labels of pixels, of which 255 is left out", total=pixels, says=COUNTED)
def segformer() -> Parts:
    model = made(
        "SegformerForSemanticSegmentation", "SegformerConfig", num_channels=1, num_encoder_blocks=1, depths=[1], sr_ratios=[1], hidden_sizes=[4],
        patch_sizes=[3], strides=[2], num_attention_heads=[2], mlp_ratios=[1], decoder_hidden_size=4, num_labels=3,
    )  # fmt: skip
    labels = torch.randint(3, (N, 8, 8)).masked_fill(torch.rand(N, 8, 8) < 0.7 * torch.rand(N, 1, 1), 255)
    return model, None, {"pixel_values": torch.randn(N, 1, 8, 8), "labels": labels}


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


@peft("LoRA on BERT for classes, modules_to_save", total=of_logits(F.cross_entropy))
def lora_bert() -> Parts:
    model = adapted(
        bert("SequenceClassification"),
        "LoraConfig",
        r=2,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
        task_type="SEQ_CLS",
    )
    return model, None, {**text(), "labels": torch.randint(3, (N,))}


@peft("LoRA as it is initialised (B = 0), a module of one's own")
def lora_fresh() -> Parts:
    package = importlib.import_module("peft")
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    wrapped = package.get_peft_model(model, package.LoraConfig(r=2, target_modules=["0", "2"]))
    return wrapped, nn.CrossEntropyLoss(), (torch.randn(N, 5), torch.randint(3, (N,)))


@peft.no_hessian(
    "DoRA on BERT",
    "peft detaches the norm of the weights, as the paper on DoRA proposes: the gradient is not that of the loss",
    total=of_logits(F.cross_entropy),
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


@peft("IA³ on T5", total=answers, inside=torch.float32)
def ia3_t5() -> Parts:
    model, _, data = t5()
    return (
        adapted(
            model,
            "IA3Config",
            target_modules=["k", "v", "wo"],
            feedforward_modules=["wo"],
            task_type="SEQ_2_SEQ_LM",
        ),
        None,
        data,
    )


@peft("prefix tuning on GPT-2: keys and values before the text", total=next_words)
def prefix_gpt2() -> Parts:
    return adapted(gpt2(), "PrefixTuningConfig", num_virtual_tokens=2, task_type="CAUSAL_LM"), None, causal()


@peft("LoRA merged into the weights (merge_and_unload), all of them trainable again", total=next_words)
def lora_merged() -> Parts:
    return lora_gpt2()[0].merge_and_unload().requires_grad_(True), None, causal()
