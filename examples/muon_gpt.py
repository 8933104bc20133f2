"""A GPT of two layers on text: Muon for its matrices with AdamW for the rest, against AdamW alone.

    python examples/muon_gpt.py [FOLDER]

Four learners on a ring (DPSGD) read the project's license by characters, three seeds of each. Muon has
the scale with which AdamW's rate fits it (Liu et al. 2025); 0.03 is AdamW's best of 0.003, 0.01, 0.03, 0.1.
"""

import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import landscape

LENGTH = 32  # characters of a sample
ADAMW = {"name": "adamw", "weight_decay": 0.01}
MUON = {"name": "muon", "scale": "match_rms_adamw", "weight_decay": 0.01}
OPTIMIZERS = {"adamw": ADAMW, "muon": ADAMW | {"groups": {"matrix": MUON}}}


class GPT(nn.Module):
    """Characters (B, T) -> logits (B, 128, T) of the next ones."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.tokens(x) + self.places.weight, nn.Transformer.generate_square_subsequent_mask(LENGTH)
        with sdpa_kernel(SDPBackend.MATH):  # the one that takes several learners at once
            for block in self.blocks:
                h = block(h, mask, is_causal=True)
        return self.head(self.norm(h)).transpose(1, 2)


def text(data_dir: str | None = None) -> landscape.data.Dataset:
    """The license in pieces of LENGTH characters; the last tenth is for tests."""
    written = (Path(__file__).parents[1] / "LICENSE").read_bytes()
    pieces = torch.tensor(list(written)).clamp(max=127).unfold(0, LENGTH + 1, LENGTH // 4)
    train, test = pieces[: len(pieces) * 9 // 10], pieces[len(pieces) * 9 // 10 + 4 :]
    both = [(part[:, :-1], part[:, 1:]) for part in (train, test)]
    return landscape.data.Dataset(*both, nn.functional.cross_entropy, sha256(written).hexdigest())


def main(folder: str = "runs/muon-gpt", lr: float = 0.03, seeds: int = 3) -> None:
    keys = {"learners": 4, "batch": 32, "lr": lr, "steps": 300, "algorithm.mixing": "ring(1)"}
    keys |= {"model": {"name": "muon_gpt:GPT"}, "data": {"name": "muon_gpt:text"}}
    keys |= {"decompose.every": 50, "evaluate.every": 0}
    for name, optimizer in OPTIMIZERS.items():
        losses = []
        for seed in range(seeds):
            own = {"seed": seed, "optimizer": optimizer}
            run = landscape.train("digits-dpsgd", f"{folder}/{name}-{seed}", **own, **keys)
            losses.append(run.using(model=GPT(), data=text()).problem("train").loss())
        print(f"{name}: training loss {np.mean(losses):.3f} ± {np.std(losses, ddof=1):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
