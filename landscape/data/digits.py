"""The 1,797 hand-written digits, 8×8, that scikit-learn bundles: real data with nothing to fetch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from landscape.data.base import Dataset, classification


def digits(data_dir: str | Path | None = None, test_samples: int = 360) -> Dataset:
    """x (N, 64) in [0, 1] (pixels / 16), y in 0…9; a fixed shuffle, the last ``test_samples`` held out.

    360 of 1,797 is a fifth, a usual hold-out (ours; the set has no official split).
    """
    from sklearn.datasets import load_digits

    bundle = load_digits()
    order = np.random.default_rng(0).permutation(len(bundle.target))
    x, y = bundle.data[order].astype(np.uint8), bundle.target[order].astype(np.uint8)
    cut = len(y) - test_samples
    return classification((x[:cut], y[:cut]), (x[cut:], y[cut:]), scale=16.0, classes=10)
