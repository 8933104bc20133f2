"""Hugging Face's architectures from tiny configurations, and texts for them: nothing is downloaded."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH = 9, 6
LAYERS = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4}
SIZES: dict[str, Any] = {**LAYERS, "vocab_size": WORDS, "max_position_embeddings": LENGTH}
IMAGE: dict[str, Any] = {**LAYERS, "image_size": 4, "patch_size": 2, "num_channels": 1}
# What these configurations name as special tokens lies beyond a vocabulary of nine.
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BERT: dict[str, Any] = {**SIZES, "type_vocab_size": 1, "pad_token_id": 0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2", {"vocab_size": WORDS, "n_positions": LENGTH + 2, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 4, **SPECIAL}),
    "llama": ("LlamaForCausalLM", "Llama", {"num_key_value_heads": 1, **SIZES, **SPECIAL}),
    "bert": ("BertModel", "Bert", BERT),
    "vit": ("ViTForImageClassification", "ViT", {"num_labels": 3, **IMAGE}),
    "t5": ("T5ForConditionalGeneration", "T5", {
        "vocab_size": WORDS, "d_model": 4, "d_kv": 2, "d_ff": 4, "num_layers": 1, "num_heads": 2, "relative_attention_num_buckets": 4,
        "relative_attention_max_distance": 6, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
    }),
    "whisper": ("WhisperForConditionalGeneration", "Whisper", {
        "vocab_size": WORDS, "d_model": 4, "num_mel_bins": 3, "max_source_positions": 4, "max_target_positions": LENGTH, "encoder_layers": 1,
        "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 4, "decoder_ffn_dim": 4,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None, **SPECIAL,
    }),
    "segformer": ("SegformerForSemanticSegmentation", "Segformer", {
        "num_channels": 1, "num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [4], "patch_sizes": [3], "strides": [2],
        "num_attention_heads": [2], "mlp_ratios": [1], "decoder_hidden_size": 4, "num_labels": 3,
    }),
    "clip": ("CLIPModel", "CLIP", {"text_config": {**SIZES, **SPECIAL}, "vision_config": IMAGE, "projection_dim": 3}),
}  # fmt: skip


def made(name: str, **options: Any) -> Any:
    """A model of transformers, away from biases of zero and weights of 0.02, where nothing bends.

    ``name`` is one of MODELS, or what BertFor… ends in.
    """
    kind, config, sizes = MODELS.get(name, (f"BertFor{name}", "Bert", {"num_labels": 3, **BERT}))
    package = importlib.import_module("transformers")
    model = getattr(package, kind)(getattr(package, f"{config}Config")(**{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model


def text(samples: int = 6) -> dict[str, Tensor]:
    """What a tokenizer makes of sentences of several lengths."""
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (samples, 1))).long()
    return {"input_ids": torch.randint(3, WORDS, (samples, LENGTH)) * mask, "attention_mask": mask}


def pictures(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 1, 4, 4), "labels": torch.randint(3, (samples,))}


def some_words(batch: dict[str, Tensor]) -> Tensor:
    """A third of them as labels, as in masked language modeling; at least one."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    chosen = (torch.rand(ids.shape) < 0.3) & (mask > 0)
    chosen[0, 0] = True
    return ids.masked_fill(~chosen, -100)
