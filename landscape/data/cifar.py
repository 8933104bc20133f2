"""CIFAR-10 and CIFAR-100, from their original binary files or from folders of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from landscape.core import registry
from landscape.core.errors import FailedError
from landscape.core.files import read_regular
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.data.base import Dataset, data_root
from landscape.data.images import folder_arrays, image_set

# Name -> folder in the authors' archive, training files, test file, bytes of labels before an image (the last
# one counts; CIFAR-100: coarse, fine), classes.
BINARY = {
    "cifar10": (
        "cifar-10-batches-bin",
        [f"data_batch_{i}.bin" for i in range(1, 6)],
        "test_batch.bin",
        1,
        10,
    ),
    "cifar100": ("cifar-100-binary", ["train.bin"], "test.bin", 2, 100),
}
PIXELS = 3 * 32 * 32
MAX_BYTES = 1 << 28  # bytes of one file; CIFAR-100's largest has 154 million


def read_binary(path: Path, labels: int, classes: int) -> tuple[Array, Array]:
    """(images (N, 3, 32, 32) uint8, labels (N,) uint8) of one binary file; FailedError if it is damaged."""
    raw = np.frombuffer(bytearray(read_regular(path, MAX_BYTES)), np.uint8)
    record = labels + PIXELS
    if len(raw) == 0 or len(raw) % record:
        raise FailedError(f"{path}: holds {len(raw)} bytes, no multiple of {record}; download it again")
    rows = raw.reshape(-1, record)
    y = rows[:, labels - 1].copy()
    if y.max() >= classes:
        raise FailedError(f"{path}: holds the label {y.max()}, allowed: 0…{classes - 1}; download it again")
    return rows[:, labels:].reshape(-1, 3, 32, 32), y


def _load(name: str, data_dir: str | Path | None, normalize: bool, augment: bool, subset: int) -> Dataset:
    positive("data.subset", subset, least=0)
    archive, train_files, test_file, labels, classes = BINARY[name]
    root = data_root(data_dir)
    images = root / name
    for folder in (root / archive, images / archive, images, root):
        if not (folder / test_file).is_file():
            continue
        missing = [file for file in train_files if not (folder / file).is_file()]
        if missing:
            raise FailedError(f"data {name}: {folder / missing[0]} is missing; download the archive again")
        parts = [read_binary(folder / file, labels, classes) for file in train_files]
        train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        test = read_binary(folder / test_file, labels, classes)
        return image_set(_some(train, subset), _some(test, subset), classes, normalize, augment)
    if (images / "train").is_dir():
        names, a = folder_arrays(name, images, 32)
        if len(names) != classes:
            raise FailedError(f"{images / 'train'}: holds {len(names)} classes, {name} has {classes}")
        train, test = ((a[f"x_{part}"], a[f"y_{part}"]) for part in ("train", "test"))
        return image_set(_some(train, subset), _some(test, subset), classes, normalize, augment)
    raise FailedError(
        f"data {name}: neither {root / archive / test_file} nor {images / 'train'} exists; download the "
        f"binary version, or put images into {images}/train/CLASS and {images}/test/CLASS, and give the "
        "folder with --data-dir or LANDSCAPE_DATA"
    )


def _some(images: tuple[Array, Array], subset: int) -> tuple[Array, Array]:
    """``subset`` of 50,000 images, and that share of the 10,000 for testing, in a fixed shuffle; 0: all."""
    if not subset:
        return images
    x, y = images
    chosen = np.random.default_rng(0).permutation(len(y))[: max(1, len(y) * subset // 50_000)]
    return x[chosen], y[chosen]


@registry.data_sets.add("cifar10")
def cifar10(
    data_dir: str | Path | None = None, normalize: bool = True, augment: bool = False, subset: int = 0
) -> Dataset:
    """CIFAR-10: x (50000 and 10000, 3, 32, 32), y in 0…9 in the order of the names of the classes.

    Args:
        subset: So many of the 50,000 training images, and the same share of those for testing, for reduced
            runs; 0: all. Unit: samples. Source: ours.
    """
    return _load("cifar10", data_dir, normalize, augment, subset)


@registry.data_sets.add("cifar100")
def cifar100(
    data_dir: str | Path | None = None, normalize: bool = True, augment: bool = False, subset: int = 0
) -> Dataset:
    """CIFAR-100 with its fine labels, y in 0…99; otherwise as :func:`cifar10`.

    Args:
        subset: As for cifar10. Unit: samples. Source: ours.
    """
    return _load("cifar100", data_dir, normalize, augment, subset)
