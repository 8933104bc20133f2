"""Data sets of pictures: the bundled digits, MNIST and its relatives, CIFAR-10."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from landscape.core import registry
from landscape.core.errors import FailedError, InputError
from landscape.core.files import open_regular, read_regular
from landscape.core.hdf5 import Array
from landscape.core.options import choose, positive
from landscape.data.base import Dataset, classification, data_root
from landscape.data.images import folder_arrays, image_set

FILE = Path(__file__).with_name("digits.csv.gz")
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


FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


CLASSES = 10
# Bytes of one file, unpacked: five times MNIST's training images (ours); CIFAR-100's largest has 154 million.
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


def _load_cifar(
    name: str, data_dir: str | Path | None, normalize: bool, augment: bool, subset: int
) -> Dataset:
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
    return _load_cifar("cifar10", data_dir, normalize, augment, subset)


@registry.data_sets.add("cifar100")
def cifar100(
    data_dir: str | Path | None = None, normalize: bool = True, augment: bool = False, subset: int = 0
) -> Dataset:
    """CIFAR-100 with its fine labels, y in 0…99; otherwise as :func:`cifar10`.

    Args:
        subset: As for cifar10. Unit: samples. Source: ours.
    """
    return _load_cifar("cifar100", data_dir, normalize, augment, subset)
