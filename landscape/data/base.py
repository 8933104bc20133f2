"""The common form of data sets, and a cache of arrays that take long to compute from files.

The cache is one HDF5 file each, checked when read, in the folder LANDSCAPE_CACHE, else landscape/ under
XDG_CACHE_HOME or ~/.cache. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from landscape.core import hdf5
from landscape.core.errors import OperationError, warn_caller
from landscape.core.files import folder_lock
from landscape.core.options import SPLITS, choose
from landscape.core.progress import progress_bar
from landscape.problem.batches import Stream

Split = tuple[Tensor, Tensor] | Stream


def samples_of(split: Split) -> int:
    """The number of samples of a split."""
    return split.samples if isinstance(split, Stream) else len(split[1])


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
        columns: further values of the training samples by name, (N,) each, such as who spoke; the recipe's
            ``data.split = "by(NAME)"`` divides the samples by them.

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
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        sizes = [f"{samples_of(self.split(name)):,} {name}" for name in SPLITS]
        classes = f"; {self.classes} classes" if self.classes else ""
        return f"Dataset({', '.join(sizes)}{classes})"

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
        return getattr(self, choose("split", name, SPLITS))


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


SCHEMA = "landscape.cache"
Arrays = dict[str, np.ndarray[Any, Any]]
T = TypeVar("T")
R = TypeVar("R")


def cached(name: str, root: Path, files: Sequence[str], settings: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays of ``make()``, from the cache if it has them for the same files and settings.

    ``files`` are paths below ``root``; files are the same if paths, sizes and modification times are. If
    several processes start together, one computes the arrays and the other processes wait for it. A damaged
    cache file is computed again. If the cache cannot be written, there is a warning and nothing is cached.
    """
    digest = hashlib.sha256(settings.encode())
    for path in files:
        stat = file_stat(root, path)
        digest.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    with contextlib.ExitStack() as stack:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(folder_lock(folder))
        except (OSError, OperationError) as error:
            remedy = "; LANDSCAPE_CACHE may name another folder" if isinstance(error, OSError) else ""
            warn_caller(f"{error}{remedy}; nothing is cached")
            return _contiguous(make)
        stored = folder / f"{name}-{digest.hexdigest()[:24]}.h5"
        arrays = _read(stored)
        if arrays is None:
            arrays = _contiguous(make)
            try:
                with hdf5.writing(stored, SCHEMA) as file:
                    for key, array in arrays.items():
                        file[key] = array
            except OperationError as error:
                warn_caller(f"{error}; LANDSCAPE_CACHE may name another folder")
    return arrays


def _contiguous(make: Callable[[], Arrays]) -> Arrays:
    """Make the arrays contiguous, as after reading: a network's rounding depends on the order in memory."""
    return {key: np.ascontiguousarray(array) for key, array in make().items()}


def cache_folder() -> Path:
    """The folder of the cache; OperationError without a home folder and LANDSCAPE_CACHE."""
    folder = os.environ.get("LANDSCAPE_CACHE")
    if folder:
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "landscape")
    except RuntimeError as error:  # neither HOME nor an entry in the list of users, as in some containers
        raise OperationError("there is no home folder for the cache; LANDSCAPE_CACHE may name one") from error


def file_stat(root: Path, path: str) -> os.stat_result:
    """Size and times of root/path; OperationError where it cannot be had, as of a link to nothing."""
    try:
        return os.stat(os.path.join(root, path))
    except OSError as error:
        raise OperationError(f"{root / path}: cannot be read ({error.strerror})") from error


def _read(path: Path) -> Arrays | None:
    """The arrays in ``path``; None if it is not there, or not whole."""
    try:
        with hdf5.reading(path, SCHEMA, warn=False) as file:
            return {key: np.asarray(file[key]) for key in file} if hdf5.has_checksum(path) else None
    except OperationError:
        return None


def each(title: str, work: Callable[[T], R], items: Sequence[T], task: int = 1) -> list[R]:
    """Apply ``work`` to every item, in order, in as many threads as there are cores, under a progress bar.

    A thread takes ``task`` items at once. Threads, because most of decoding leaves the interpreter free; for
    32×32 JPEGs it does not, and 2 threads on 2 cores take 1.2 times as long as one, 2 processes half as long
    (20,000 images: 2.5, 2.0 and 1.1 s). Processes would need a guard in every script that loads data for the
    first time.
    """
    results: list[R] = []
    groups = [items[i : i + task] for i in range(0, len(items), task)]
    with progress_bar(title) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for group in pool.map(lambda group: [work(item) for item in group], groups):
                results += group
                bar(len(results) / len(items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results
