"""Images by name: from files in folders, decoded once or during use, and augmented in training."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torch.utils.data import Dataset as Samples

from landscape.core import registry
from landscape.core.errors import FailedError, InputError
from landscape.core.files import open_regular
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.data.base import Dataset, Split, data_root, fingerprint
from landscape.data.cache import cached, each, file_stat
from landscape.problem.batches import STREAM_BATCH, Stream


def augment(x: Tensor, generator: torch.Generator, padding: int = 4, fill: Tensor | float = 0.0) -> Tensor:
    """Images (B, C, H, W), each padded by ``padding``, cropped to H × W at random, and half of them flipped.

    Crops with 4 pixels of padding and horizontal flips are CIFAR's usual augmentation (He et al. 2016,
    section 4.2). ``fill`` is what the padding holds, a number or one a channel. All is drawn from
    ``generator``, on the CPU, so that a device does not change the draw; ``x`` itself is not changed.
    """
    b, c, h, w = x.shape
    corner = torch.randint(2 * padding + 1, (2, b, 1), generator=generator)
    flip = torch.randint(2, (b, 1), generator=generator).bool()
    rows, columns = corner[0] + torch.arange(h), corner[1] + torch.arange(w)  # (B, H), (B, W)
    columns = torch.where(flip, columns.flip(1), columns).to(x.device)
    padded = x.new_empty(b, c, h + 2 * padding, w + 2 * padding)
    padded[:] = torch.as_tensor(fill, dtype=x.dtype, device=x.device).view(-1, 1, 1)
    padded[:, :, padding : padding + h, padding : padding + w] = x
    sample = torch.arange(b, device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[:, None, None]
    return padded[sample, channel, rows.to(x.device)[:, None, :, None], columns[:, None, None, :]]


# Allowed formats, whatever the name of the file.
FORMATS = ("JPEG", "PNG")
# Largest size of one file in bytes and pixels (ours): half of Pillow's limit, far above inputs of networks.
MAX_BYTES, MAX_PIXELS = 1 << 28, 1 << 25


def image_set(
    train: tuple[Array, Array], test: tuple[Array, Array], classes: int, normalize: bool, augment: bool
) -> Dataset:
    """A cross-entropy data set from uint8 images (N, C, H, W) and labels (N,).

    Pixels become float32 in [0, 1].

    Args:
        normalize: Subtract the training set's mean from each channel and divide by its standard deviation.
            Source: DPSGD-2020, section 4.1.
        augment: Crop and flip minibatches in training, see :func:`crops_and_flips`. Source: ours; off, since
            analyses are of the data as it is.
    """
    channels = train[0].shape[1]
    mean, std = channel_moments(train[0]) if normalize else (np.zeros(channels), np.ones(channels))
    center, scale = ((torch.from_numpy(v).float().view(-1, 1, 1)) for v in (mean, std))

    def tensors(pair: tuple[Array, Array]) -> Split:
        x = torch.from_numpy(pair[0]).float().div_(255).sub_(center).div_(scale)
        return x, torch.from_numpy(pair[1].astype(np.int64))

    return Dataset(
        tensors(train),
        tensors(test),
        torch.nn.functional.cross_entropy,
        fingerprint((*train, *test, mean, std)),
        classes,
        crops_and_flips(train[0].shape[2], center, scale) if augment else None,
    )


def channel_moments(images: Array) -> tuple[Array, Array]:
    """(mean, standard deviation) (C,) float64 of pixels / 255; from integer sums, so exact and repeatable."""
    total = np.zeros(images.shape[1], np.uint64)
    squares = np.zeros_like(total)
    for part in np.array_split(images, -(-len(images) // 1000)):
        wide = part.astype(np.uint32)
        total += wide.sum((0, 2, 3), dtype=np.uint64)
        squares += (wide * wide).sum((0, 2, 3), dtype=np.uint64)
    count = images.size // images.shape[1]
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return mean / 255, np.where(std == 0, 1.0, std / 255)


def crops_and_flips(height: int, mean: Tensor, std: Tensor) -> Callable[[Tensor, torch.Generator], Tensor]:
    """:func:`augment` for images normalised so: the padding is black, an eighth of ``height``.

    That is CIFAR's 4 pixels of 32 (He et al. 2016, section 4.2); the same share for other sizes is ours.
    """
    return functools.partial(augment, padding=height // 8, fill=-mean / std)


def decode(path: Path, size: int, border: float) -> Array:
    """uint8 (3, H, W) of one image; ``size`` not 0: its middle, scaled to size × size, see image_folder."""
    try:
        # For some other formats, such as EPS, Pillow would start programs.
        with open_regular(path, MAX_BYTES) as file, Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise FailedError(
                    f"{path}: has {image.width} × {image.height} pixels, at most {MAX_PIXELS:,} are read"
                )
            whole = image.convert("RGB")
            if size and (border or whole.size != (size, size)):
                whole = ImageOps.fit(whole, (size, size), Image.Resampling.BILINEAR, bleed=border)
            return np.asarray(whole).transpose(2, 0, 1)
    except FailedError:
        raise
    except Exception as error:  # PIL's decoders raise errors of many kinds for damaged files
        words = " ".join(str(error).split())
        raise FailedError(f"{path}: cannot be decoded as an image ({words})") from error


class ImageFiles(Samples[tuple[Tensor, int]]):
    """x (3, H, W) float32, normalised per channel, and y, for each of ``files`` (path below root, label)."""

    def __init__(
        self, root: Path, files: list[tuple[str, int]], size: int, border: float, mean: Tensor, std: Tensor
    ) -> None:
        self.root, self.files, self.size, self.border = root, files, size, border
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        pixels = torch.tensor(decode(self.root / path, self.size, self.border))
        return pixels.float().div_(255).sub_(self.mean).div_(self.std), label

    def fingerprint(self) -> str:
        """SHA-256 (hex) of names, labels and sizes of the files, and of the settings; not of the pixels."""
        digest = hashlib.sha256(repr((self.size, self.border, self.mean, self.std)).encode())
        for path, label in self.files:
            digest.update(f"\0{path}\0{label}\0{file_stat(self.root, path).st_size}".encode())
        return digest.hexdigest()


class ImageStream(Stream):
    """Batches (x (B, 3, H, W), y (B,)) of :class:`ImageFiles`, decoded in ``workers`` processes (0: in this).

    New workers start for each pass and each :meth:`gather`; the batches do not depend on their number.
    """

    def __init__(self, files: Samples[tuple[Tensor, int]], samples: int, workers: int) -> None:
        self.files, self.samples, self.workers = files, samples, workers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._read(self.files)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        batches = list(self._read(Subset(self.files, indices.tolist())))
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def part(self, rows: slice) -> ImageStream:
        indices = range(self.samples)[rows]
        return ImageStream(Subset(self.files, indices), len(indices), self.workers)

    def _read(self, files: Samples[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        # A separate generator: otherwise the workers' seeds would be drawn from PyTorch's global state.
        loader = DataLoader(files, STREAM_BATCH, num_workers=self.workers, generator=torch.Generator())
        try:
            yield from loader
        except FailedError as error:  # from a worker, its text is the worker's traceback
            raise FailedError(str(error).rsplit("FailedError: ", 1)[-1].strip()) from error


SUFFIXES = (".jpg", ".jpeg", ".png")
# Files that one task decodes: few enough for a smooth progress bar, many enough that tasks cost nothing.
TASK = 200
# Means and standard deviations of ImageNet's channels, the usual values.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def listing(root: Path) -> tuple[list[str], dict[str, list[tuple[str, int]]]]:
    """(classes, split -> (file below root, label)…) of root/train/CLASS/*.jpg|jpeg|png and root/test/CLASS/….

    Classes are sorted by name; files are in a fixed random order, so that consecutive batches contain all
    classes. Raises FailedError for a split without classes, a class without images, or classes that
    differ.
    """
    files_of_split: dict[str, list[tuple[str, int]]] = {}
    classes: list[str] = []
    for split in ("train", "test"):
        try:
            names = sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir())
            listed = {name: sorted(os.listdir(root / split / name)) for name in names}
        except OSError as error:
            raise FailedError(f"{error.filename}: cannot be read ({error.strerror})") from error
        if split == "test" and names != classes:
            odd = sorted(set(names) ^ set(classes))
            raise FailedError(f"{root}: train and test have different classes ({', '.join(odd[:5])})")
        if len(names) < 2:
            raise FailedError(f"{root / split}: holds {len(names)} folders of images, one a class is needed")
        classes, files_of_split[split] = names, []
        for label, name in enumerate(names):
            files = [file for file in listed[name] if file.lower().endswith(SUFFIXES)]
            if not files:
                kinds = ", ".join(SUFFIXES)
                raise FailedError(f"{root / split / name}: holds no image, a class needs one ({kinds})")
            files_of_split[split] += [(f"{split}/{name}/{file}", label) for file in files]
        order = np.random.default_rng(0).permutation(len(files_of_split[split]))
        files_of_split[split] = [files_of_split[split][i] for i in order]
    return classes, files_of_split


def folder_arrays(
    name: str, root: Path, size: int, border: float = 0.0
) -> tuple[list[str], dict[str, Array]]:
    """(classes, arrays x_train, y_train, x_test, y_test) of folders of images, decoded once and cached."""
    classes, listed = listing(root)
    paths = [path for split in listed.values() for path, _ in split]

    def make() -> dict[str, Array]:
        shape = decode(root / paths[0], size, border).shape

        def some(group: list[str]) -> Array:
            images = [decode(root / path, size, border) for path in group]
            for path, image in zip(group, images, strict=True):
                if image.shape != shape:
                    raise FailedError(
                        f"{root / path}: is {image.shape[2]} × {image.shape[1]} pixels where {paths[0]} is "
                        f"{shape[2]} × {shape[1]}; give data.size to scale all to one"
                    )
            return np.stack(images)

        groups = [paths[i : i + TASK] for i in range(0, len(paths), TASK)]
        images = np.concatenate(each(f"decoding {name}", some, groups))
        cut = len(listed["train"])
        labels = {f"y_{split}": np.array([y for _, y in pairs]) for split, pairs in listed.items()}
        return {"x_train": images[:cut], "x_test": images[cut:], **labels}

    return classes, cached(name, root, paths, f"images 1 {size} {border}", make)


@registry.data_sets.add("image-folder")
def image_folder(
    folder: str,
    data_dir: str | Path | None = None,
    size: int = 0,
    border: float = 0.0,
    normalize: bool = True,
    augment: bool = False,
    stream: bool = False,
    workers: int = 2,
) -> Dataset:
    """Your own images: ``folder``/train/CLASS/*.jpg|jpeg|png and ``folder``/test/CLASS/….

    Args:
        folder: Below ``data_dir`` unless absolute. Classes are numbered in the order of their names.
        size: Images are cut to their middle square and scaled to size × size; 0: as they are, all of one
            size. Unit: pixels. Source: ours.
        border: The share that is cut off at each side before that; 0.0625 is ImageNet's usual 224 of 256.
            Source: ours.
        normalize: Normalise each channel by the training set's moments; of a stream, which cannot be gone
            through for it, by ImageNet's. Source: usual for images.
        stream: Decode images whenever they are used, and hold none in memory; otherwise all are decoded once
            and kept (see :mod:`landscape.data.cache`). Source: ours.
        workers: Processes that decode a stream; 0: this one. Source: ours.
    """
    positive("data.size", size, least=0)
    positive("data.workers", workers, least=0)
    if not 0 <= border < 0.5:
        raise InputError(f"data.border: {border} is not allowed, it must be ≥ 0 and below 0.5")
    root = data_root(data_dir) / folder
    if not stream:
        classes, a = folder_arrays(Path(folder).name, root, size, border)
        train, test = (a["x_train"], a["y_train"]), (a["x_test"], a["y_test"])
        return image_set(train, test, len(classes), normalize, augment)
    if not size:
        raise InputError(
            "data.size: 0 is not allowed with data.stream, it must be the images' height in pixels"
        )
    classes, listed = listing(root)
    mean, std = (
        torch.tensor(v).view(-1, 1, 1) for v in (IMAGENET if normalize else ((0.0,) * 3, (1.0,) * 3))
    )
    files = {split: ImageFiles(root, pairs, size, border, mean, std) for split, pairs in listed.items()}
    mark = hashlib.sha256("".join(f.fingerprint() for f in files.values()).encode()).hexdigest()
    return Dataset(
        ImageStream(files["train"], len(files["train"]), workers),
        ImageStream(files["test"], len(files["test"]), workers),
        torch.nn.functional.cross_entropy,
        mark,
        len(classes),
        crops_and_flips(size, mean, std) if augment else None,
    )
