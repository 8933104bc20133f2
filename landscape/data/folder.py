"""Folders of image files, one folder for each class: decoded once and cached, or streamed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from landscape.core import registry
from landscape.core.errors import FailedError, InputError
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.data.base import Dataset, data_root
from landscape.data.cache import cached, each
from landscape.data.images import crops_and_flips, decode, image_set
from landscape.data.stream import ImageFiles, ImageStream

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
