"""Two half circles, one for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from landscape.plugins import Dataset, classification, positive


def two_moons(
    data_dir: str | Path | None = None, samples: int = 1000, noise: float = 0.1, seed: int = 0
) -> Dataset:
    """x (N, 2), y in 0…1: ``samples`` points to train and half as many to test, with Gaussian noise.

    Every data set takes ``data_dir``, the folder with the user's data, which this one does not need.
    """
    positive("data.samples", samples, least=2)
    positive("data.noise", noise, least=0)
    rng = np.random.default_rng(seed)
    size = samples + samples // 2
    y = rng.integers(0, 2, size)
    angle = np.pi * rng.random(size)
    moons = np.stack([np.cos(angle), np.sin(angle)], 1)
    moons[y == 1] = [1, 0.5] - moons[y == 1]
    x = moons + noise * rng.normal(size=(size, 2))
    return classification((x[:samples], y[:samples]), (x[samples:], y[samples:]), scale=1.0, classes=2)
