"""Pseudogradients of AdamW and Muon, by the number of learners: ``python -m benchmarks.pseudogradients``.

A pseudogradient is the weights before a period of local SGD minus their mean after it. It is compared with the
direction of as many synchronous steps, whose minibatches are the same. Eighty runs are trained, in minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import landscape

INNER: dict[str, dict[str, Any]] = {
    "AdamW": {"name": "adamw"},
    "Muon": {"name": "adamw", "groups": {"matrix": {"name": "muon", "lr_factor": 5.0}}},
}


def moved(folder: Path, optimizer: str, algorithm: dict[str, Any], learners: int, seed: int) -> Tensor:
    """The pseudogradient of 100 steps from the start, of 32 samples a learner."""
    keys: dict[str, Any] = {"algorithm": algorithm, "learners": learners, "batch": 32 * learners}
    keys |= {"optimizer": INNER[optimizer], "steps": 100, "seed": seed}
    keys |= {"decompose.every": 0, "checkpoint.every": 100}
    name = folder / f"{optimizer}-{algorithm['name']}-{learners}-{seed}"
    end = landscape.train("digits-muloco", name, **keys)
    return landscape.Checkpoint.load(name / "step-0000000.h5").mean - end.mean


def main() -> None:
    """Print the mean cosine of five seeds with its standard error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for optimizer in INNER:
            for learners in (2, 4, 8, 16):
                cosines = []
                for seed in range(5):
                    local = moved(folder, optimizer, {"name": "local-sgd", "period": 100}, learners, seed)
                    together = moved(folder, optimizer, {"name": "ssgd"}, learners, seed)
                    cosines.append(float(local @ together / local.norm() / together.norm()))
                error = np.std(cosines, ddof=1) / 5**0.5
                print(f"{optimizer}, n = {learners:2d}: cosine {np.mean(cosines):.3f} ± {error:.3f}")


if __name__ == "__main__":
    main()
