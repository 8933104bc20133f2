"""Hugging Face's architectures from tiny configurations, nothing downloaded: make battery-huggingface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.battery.case import Case, Parts
from tests.battery.checks import run
from tests.battery.reference import joined

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; make battery-huggingface"
)

WORDS, LENGTH, SAMPLES = 9, 6, 7
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 4,
    "max_position_embeddings": LENGTH,
}
# What these configurations name as special tokens lies beyond a vocabulary of nine.
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def text(labels: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Padded sequences of unequal length, with the labels that ``labels(ids, mask)`` makes of them."""
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1))).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels(ids, mask)}


def next_words(ids: Tensor, mask: Tensor) -> Tensor:
    return ids.masked_fill(mask == 0, -100)


def some_words(ids: Tensor, mask: Tensor) -> Tensor:
    """A third of them, as in masked language modelling; at least one."""
    kept = (torch.rand(ids.shape) < 0.3) & (mask > 0)
    kept[0, 0] = True
    return ids.masked_fill(~kept, -100)


def kinds(ids: Tensor, mask: Tensor) -> Tensor:
    return torch.randint(3, (len(ids),))


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(SAMPLES, 1, 4, 4), "labels": torch.randint(3, (SAMPLES,))}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=4, n_layer=1, n_head=2, n_inner=4, **SPECIAL
        )
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **SIZES, **SPECIAL))


def bert(head: str) -> Any:
    config = transformers.BertConfig(type_vocab_size=1, num_labels=3, pad_token_id=0, **SIZES)
    return getattr(transformers, f"BertFor{head}")(config)


def vit() -> Any:
    sizes = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(image_size=4, patch_size=2, num_channels=1, num_labels=3, **sizes)
    return transformers.ViTForImageClassification(config)


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2,
            relative_attention_num_buckets=4, relative_attention_max_distance=6, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=2,
        )
    )  # fmt: skip


def clip() -> Any:
    words = {**SIZES, **SPECIAL}
    image = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
    image |= {"image_size": 4, "patch_size": 2, "num_channels": 1}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=words, vision_config=image, projection_dim=3)
    )


def pairs() -> dict[str, Any]:
    """Texts and images of one batch, each against all others."""
    words = text(next_words)
    return {
        "input_ids": words["input_ids"],
        "attention_mask": words["attention_mask"],
        "pixel_values": pictures()["pixel_values"],
        "return_loss": True,
    }


def each_once(targets: Any) -> Tensor:
    return torch.ones(len(targets["input_ids"]))


def whole(data: Any) -> tuple[Any, Any]:
    """All batches as one; the labels are inputs, too, from which the model makes its loss."""
    batch = dict(data) if isinstance(data, dict) else joined([dict(part) for part in data])
    return batch, batch.get("labels", batch)


def without_labels(data: Any) -> tuple[Any, Any]:
    return {k: v for k, v in data.items() if k != "labels"}, data["labels"]


def halves(data: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v[:4] for k, v in data.items()}, {k: v[4:] for k, v in data.items()}]


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets)


# Causal models take the loss of float32 logits, whatever they are; Llama and T5 normalise in float32.
HALFWAY = {"inside": torch.float32}


def _case(
    name: str, model: Callable[[], Any], data: Callable[[], Any], loss: Any = None, **options: Any
) -> Case:
    def build() -> Parts:
        made = model()
        with torch.no_grad():  # away from biases of zero and weights of 0.02, where nothing bends
            for parameter in made.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return made, loss, data()

    return Case(name, build, **{"whole": whole, **options})


CASES = [
    _case("GPT-2", gpt2, lambda: text(next_words), **HALFWAY),
    _case("GPT-2, two batches", gpt2, lambda: halves(text(next_words)), **HALFWAY),
    _case("GPT-2, float32", gpt2, lambda: text(next_words), dtype=None),
    _case("Llama", llama, lambda: text(next_words), **HALFWAY),
    _case("BERT, masked words", lambda: bert("MaskedLM"), lambda: text(some_words)),
    _case("BERT, masked words, two batches", lambda: bert("MaskedLM"), lambda: halves(text(next_words))),
    _case("BERT, classes", lambda: bert("SequenceClassification"), lambda: text(kinds)),
    _case("BERT, a loss of the logits", lambda: bert("SequenceClassification"), lambda: text(kinds), of_logits, whole=without_labels),
    _case("BERT, a class a word", lambda: bert("TokenClassification"), lambda: text(lambda i, m: (i % 3).masked_fill(m == 0, -100))),
    _case("ViT", vit, pictures),
    _case("ViT, a loss of the logits", vit, pictures, of_logits, whole=without_labels),
    _case("T5", t5, lambda: text(next_words), **HALFWAY),
    _case("CLIP", clip, pairs, said="mixes samples"),
    _case("CLIP, one batch", clip, lambda: [pairs()], options={"terms": each_once}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_or_refused(case: Case) -> None:
    found = run(case)
    assert not found.wrong, f"{case.name}:\n" + "\n".join(found.wrong)
