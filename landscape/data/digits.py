"""1,797 hand-written digits of 8×8 pixels, which come with the package: real data without a download.

digits.csv.gz has a digit a row, its 64 pixels (0 to 16) and its label: the test set of "Optical Recognition
of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998; UCI Machine Learning Repository, CC BY 4.0), in the
file and the order of scikit-learn. To import scikit-learn for it takes 2 s, to read the file 6 ms.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.data.base import Dataset, classification

FILE = Path(__file__).with_suffix(".csv.gz")
FORMS = ("flat", "image", "frames")


@registry.data_sets.add("digits")
def digits(data_dir: str | Path | None = None, test_samples: int = 360, form: str = "flat") -> Dataset:
    """x (N, 64) in [0, 1] (pixels / 16), y in 0…9; shuffled; the last ``test_samples`` are the test set.

    The 1,797 digits come with the package (UCI, CC BY 4.0).

    Args:
        test_samples: Size of the test set. Unit: samples. Source: ours; a fifth, as the data has no official
            split.
        form: "flat" as above. "image" makes x (N, 3, 32, 32), each pixel 4 × 4 times in three equal channels.
            "frames" makes x (N, 8, 8), the rows as frames that each have the digit's label, y (N, 8). Source:
            ours.

    Raises:
        InputError: a split would hold no sample.
    """
    rows = np.loadtxt(FILE, delimiter=",", dtype=np.uint8)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    x, y = rows[:, :-1], rows[:, -1]
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
