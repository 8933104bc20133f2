"""Arrays that take long to make from files, made once and kept: an HDF5 file each, checked when read.

They lie in the folder that LANDSCAPE_CACHE names, or else in landscape/ under XDG_CACHE_HOME or ~/.cache, and
may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from landscape import store
from landscape.data.base import fingerprint
from landscape.options import FailedError
from landscape.progress import progress_bar

SCHEMA = "landscape.cache"
Arrays = dict[str, np.ndarray[Any, Any]]
T = TypeVar("T")
R = TypeVar("R")


def cached(name: str, root: Path, files: Sequence[str], settings: str, make: Callable[[], Arrays]) -> Arrays:
    """What ``make()`` returns, from the cache if it was made before from the same files and settings.

    ``files`` are paths below ``root``; they count as the same while these, sizes and times of change are. Of
    several processes that start at once, one makes the arrays and the others wait for it. A cache file that
    is damaged is made again. Raises FailedError where the cache cannot be written.
    """
    digest = hashlib.sha256(settings.encode())
    for path in files:
        stat = file_stat(root, path)
        digest.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    folder = Path(
        os.environ.get("LANDSCAPE_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "landscape")
    )
    kept = folder / f"{name}-{digest.hexdigest()[:24]}.h5"
    with _alone(folder):
        arrays = _read(kept)
        if arrays is None:
            # Laid out as they will be when read: a network's rounding depends on the order in memory.
            arrays = {key: np.ascontiguousarray(array) for key, array in make().items()}
            with store.writing(kept, SCHEMA) as file:
                file.attrs["fingerprint"] = _fingerprint(arrays)
                for key, array in arrays.items():
                    file[key] = array
    return arrays


def file_stat(root: Path, path: str) -> os.stat_result:
    """Size and times of root/path; FailedError where it cannot be had, as of a link to nothing."""
    try:
        return os.stat(os.path.join(root, path))
    except OSError as error:
        raise FailedError(f"{root / path}: cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No two processes are in this block for one folder; the lock ends with the process that holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise FailedError(
            f"{folder}: cannot be used as cache ({error.strerror}); LANDSCAPE_CACHE may name another folder"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> Arrays | None:
    """The arrays in ``path``; None if it is not there, or not whole."""
    if not path.exists():
        return None
    try:
        with store.reading(path, SCHEMA, warn=False) as file:
            arrays = {key: np.asarray(file[key]) for key in file}
            return arrays if _fingerprint(arrays) == file.attrs["fingerprint"] else None
    except FailedError:
        return None


def _fingerprint(arrays: Arrays) -> str:
    return fingerprint(array for _, array in sorted(arrays.items()))


def each(title: str, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of every item, in order, in as many threads as there are cores, under a progress bar.

    Threads, because most of decoding leaves the interpreter free; for 32×32 JPEGs it does not, and 2 threads
    on 2 cores take 1.2 times as long as one, 2 processes half as long (20,000 images: 2.5, 2.0 and 1.1 s).
    Processes would need a guard in every script that loads data for the first time.
    """
    found: list[R] = []
    with progress_bar(title) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for result in pool.map(work, items):
                found.append(result)
                bar(len(found) / len(items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found
