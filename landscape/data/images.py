"""Images: decoding of a file, and data sets from arrays of images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from landscape.core.errors import FailedError
from landscape.core.files import open_regular
from landscape.core.hdf5 import Array
from landscape.data.augment import augment
from landscape.data.base import Dataset, Split, fingerprint

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
