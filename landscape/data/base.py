"""The form of a data set: two splits of tensors, a loss, and a fingerprint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.core.options import choose
from landscape.problem.batches import Stream

Split = tuple[Tensor, Tensor] | Stream
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Dataset:
    """A training set, a test set, and their loss.

    Attributes:
        train, test: (x, y) with the samples first; or a stream, which is read during use.
        loss: ``loss(outputs, targets)``, a mean over the samples, in nats for a cross-entropy.
        fingerprint: SHA-256 of the source arrays; an analysis compares it with that of the training data.
        classes: number of classes; 0 where the targets are no classes.
        augment: ``augment(x, generator)`` augments the inputs of a minibatch in training, and only there;
            None: no augmentation.

    Example:
        >>> from landscape import data
        >>> digits = data.load("digits")
        >>> digits.classes, len(digits.test[1])
        (10, 360)
    """

    train: Split
    test: Split
    loss: Callable[[Tensor, Tensor], Tensor]
    fingerprint: str
    classes: int = 0
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def split(self, name: str) -> Split:
        """One of the two splits.

        Args:
            name: "train" or "test".

        Returns:
            (x, y), or a stream.

        Raises:
            InputError: for another name.

        Example:
            >>> from landscape import data
            >>> len(data.load("digits").split("test")[1])
            360
        """
        split: Split = getattr(self, choose("split", name, SPLITS))
        return split


def data_root(data_dir: str | Path | None) -> Path:
    """The folder with the data sets that are not bundled: ``data_dir``, else LANDSCAPE_DATA, else "data"."""
    return Path(data_dir or os.environ.get("LANDSCAPE_DATA") or "data")


def fingerprint(arrays: Iterable[np.ndarray[Any, Any]]) -> str:
    """SHA-256 (hex) over dtype, shape and bytes of each array, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def classification(
    train: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    test: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    scale: float,
    classes: int,
) -> Dataset:
    """A cross-entropy data set from arrays: x becomes float32 and is divided by ``scale``, y int64."""

    def tensors(pair: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(np.ascontiguousarray(pair[0], dtype=np.float32)).div_(scale)
        return x, torch.from_numpy(np.ascontiguousarray(pair[1], dtype=np.int64))

    mark = fingerprint((*train, *test, np.array(scale)))
    return Dataset(tensors(train), tensors(test), torch.nn.functional.cross_entropy, mark, classes)
