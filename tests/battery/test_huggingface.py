"""Hugging Face's architectures from tiny configurations, nothing downloaded: make battery-huggingface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.battery.case import Case
from tests.battery.checks import run
from tests.battery.reference import joined
from tests.battery.small_transformers import made, pictures, some_words, text

pytest.importorskip("transformers", reason="transformers is not installed; make battery-huggingface")

SAMPLES = 7
Labels = Callable[[dict[str, Tensor]], Tensor]


def labeled(labels: Labels) -> Callable[[], dict[str, Tensor]]:
    """Padded sequences of unequal length, with labels made of them."""

    def build() -> dict[str, Tensor]:
        batch = text(SAMPLES)
        return {**batch, "labels": labels(batch)}

    return build


def next_words(batch: dict[str, Tensor]) -> Tensor:
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def kinds_of_words(batch: dict[str, Tensor]) -> Tensor:
    return (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)


def kinds(batch: dict[str, Tensor]) -> Tensor:
    return torch.randint(3, (SAMPLES,))


def images() -> dict[str, Tensor]:
    return pictures(SAMPLES)


def pairs() -> dict[str, Any]:
    """Texts and images of one batch, each against all others."""
    return {**text(SAMPLES), "pixel_values": images()["pixel_values"], "return_loss": True}


def each_once(targets: Any) -> Tensor:
    return torch.ones(len(targets["input_ids"]))


def whole(data: Any) -> tuple[Any, Any]:
    """All batches as one; the labels are inputs, too, from which the model makes its loss."""
    batch = dict(data) if isinstance(data, dict) else joined([dict(part) for part in data])
    return batch, batch.get("labels", batch)


def without_labels(data: Any) -> tuple[Any, Any]:
    return {k: v for k, v in data.items() if k != "labels"}, data["labels"]


def halves(labels: Labels) -> Callable[[], list[dict[str, Tensor]]]:
    def build() -> list[dict[str, Tensor]]:
        data = labeled(labels)()
        return [{k: v[:4] for k, v in data.items()}, {k: v[4:] for k, v in data.items()}]

    return build


def of_logits(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets)


# Causal models take the loss of float32 logits, whatever they are; Llama and T5 normalize in float32.
HALFWAY = {"inside": torch.float32}


def _case(name: str, model: str, data: Callable[[], Any], loss: Any = None, **options: Any) -> Case:
    return Case(name, lambda: (made(model), loss, data()), **{"whole": whole, **options})


CASES = [
    _case("GPT-2", "gpt2", labeled(next_words), **HALFWAY),
    _case("GPT-2, two batches", "gpt2", halves(next_words), **HALFWAY),
    _case("GPT-2, float32", "gpt2", labeled(next_words), dtype=None),
    _case("Llama", "llama", labeled(next_words), **HALFWAY),
    _case("BERT, masked words", "MaskedLM", labeled(some_words)),
    _case("BERT, masked words, two batches", "MaskedLM", halves(next_words)),
    _case("BERT, classes", "SequenceClassification", labeled(kinds)),
    _case("BERT, a loss of the logits", "SequenceClassification", labeled(kinds), of_logits, whole=without_labels),
    _case("BERT, a class a word", "TokenClassification", labeled(kinds_of_words)),
    _case("ViT", "vit", images),
    _case("ViT, a loss of the logits", "vit", images, of_logits, whole=without_labels),
    _case("T5", "t5", labeled(next_words), **HALFWAY),
    _case("CLIP", "clip", pairs, said="mixes samples"),
    _case("CLIP, one batch", "clip", lambda: [pairs()], options={"terms": each_once}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_or_refused(case: Case) -> None:
    found = run(case)
    assert not found.wrong, f"{case.name}:\n" + "\n".join(found.wrong)
