"""The 1,797 hand-written digits, 8×8, of scikit-learn: real data without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.data.base import Dataset, classification

FORMS = ("flat", "image", "frames")


@registry.data_sets.add("digits")
def digits(data_dir: str | Path | None = None, test_samples: int = 360, form: str = "flat") -> Dataset:
    """x (N, 64) in [0, 1] (pixels / 16), y in 0…9; shuffled; the last ``test_samples`` are the test set.

    360 of 1,797 is a fifth, a usual test set (ours; the data has no official split). For networks of other
    inputs, ``form`` "image" makes x (N, 3, 32, 32), each pixel 4 × 4 times in three
    equal channels, and "frames" x (N, 8, 8), the rows as frames that each have the digit's label, y (N, 8).
    Raises InputError unless both splits hold a sample.
    """
    from sklearn.datasets import load_digits

    bundle = load_digits()
    order = np.random.default_rng(0).permutation(len(bundle.target))
    x, y = bundle.data[order].astype(np.uint8), bundle.target[order].astype(np.uint8)
    if not 1 <= test_samples < len(y):
        raise InputError(
            f"data.test_samples: {test_samples} is not allowed, it must be 1…{len(y) - 1} of {len(y)} digits"
        )
    choose("data.form", form, FORMS)
    x, y = _reshape(x, y, form)
    cut = len(y) - test_samples
    return classification((x[:cut], y[:cut]), (x[cut:], y[cut:]), scale=16.0, classes=10)


def _reshape(x: Array, y: Array, form: str) -> tuple[Array, Array]:
    if form == "flat":
        return x, y
    rows = x.reshape(-1, 8, 8)
    if form == "frames":
        return rows, np.repeat(y[:, None], 8, axis=1)
    large = rows.repeat(4, axis=1).repeat(4, axis=2)
    return np.repeat(large[:, None], 3, axis=1), y
