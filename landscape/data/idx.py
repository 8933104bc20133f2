"""MNIST and Fashion-MNIST from their original IDX files, gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from landscape.core import registry
from landscape.core.errors import FailedError, InputError
from landscape.core.files import open_regular
from landscape.data.base import Dataset, classification, data_root

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


CLASSES = 10
# Bytes of one file, unpacked: five times MNIST's training images (ours).
MAX_BYTES = 1 << 28


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """The uint8 array in an IDX file (gzip if its name ends so). FailedError if it is damaged, or too large.

    Of a compressed file, only the number of bytes in the header is unpacked.
    """
    with open_regular(path, MAX_BYTES) as packed:
        try:
            file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            start = file.read(4)
            sizes = file.read(4 * start[3]) if len(start) == 4 else b""
            if start[:3] != b"\x00\x00\x08" or len(start) < 4 or len(sizes) < 4 * start[3]:
                raise FailedError(
                    f"{path}: not an IDX file of unsigned bytes (it starts with {start.hex()!r})"
                )
            shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
            count = math.prod(shape)
            if max(shape, default=0) > MAX_BYTES or count > MAX_BYTES:
                raise FailedError(
                    f"{path}: its header promises shape {shape}, at most {MAX_BYTES:,} bytes are read"
                )
            raw = file.read(count + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise FailedError(f"{path}: cannot be read ({error}); download it again") from error
    if len(raw) != count:
        size = "more" if len(raw) > count else len(raw)
        raise FailedError(f"{path}: holds {size} bytes where its header says {count}; download it again")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _find(folders: list[Path], file: str, name: str) -> Path:
    for folder in folders:
        for path in (folder / f"{file}.gz", folder / file):
            if path.is_file():
                return path
    where = " or ".join(str(folder) for folder in folders)
    raise FailedError(
        f"data {name}: {file}[.gz] is not in {where}; download the four IDX files of {name} "
        f"({', '.join(FILES)}), put them there, and give the folder with --data-dir or LANDSCAPE_DATA"
    )


def _load(name: str, samples: int, data_dir: str | Path | None) -> Dataset:
    root = data_root(data_dir)
    arrays = [read_idx(_find([root / name, root], file, name)) for file in FILES]
    for images, labels, file in ((arrays[0], arrays[1], FILES[0]), (arrays[2], arrays[3], FILES[2])):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise FailedError(
                f"data {name}: {file} has shape {images.shape} and its labels {labels.shape}; "
                "they must be (N, height, width) and (N,)"
            )
        if images.size == 0:
            raise FailedError(f"data {name}: {file} holds no pixel, shape {images.shape}; download it again")
        if labels.max() >= CLASSES:
            raise FailedError(
                f"data {name}: the labels of {file} go up to {labels.max()}, allowed: 0…{CLASSES - 1}; "
                "download them again"
            )
    train, test = ((a.reshape(len(a), -1), b) for a, b in (arrays[:2], arrays[2:]))
    if not 0 <= samples <= len(train[0]):
        raise InputError(f"data.samples: {samples} is not allowed, it must be 0 (all) to {len(train[0])}")
    if samples:
        train = train[0][:samples], train[1][:samples]
    return classification(train, test, scale=255.0, classes=CLASSES)


@registry.data_sets.add("mnist")
def mnist(samples: int = 0, data_dir: str | Path | None = None) -> Dataset:
    """MNIST: x (60000 and 10000, 784) in [0, 1] with no further normalisation, y in 0…9.

    Args:
        samples: Only so many of the training set, the first; 0: all. Unit: samples. Source: ours.
    """
    return _load("mnist", samples, data_dir)


@registry.data_sets.add("fashion-mnist")
def fashion_mnist(samples: int = 0, data_dir: str | Path | None = None) -> Dataset:
    """Fashion-MNIST, in MNIST's format: x (60000 and 10000, 784) in [0, 1], y in 0…9.

    Args:
        samples: As for mnist. Unit: samples. Source: ours.
    """
    return _load("fashion-mnist", samples, data_dir)
