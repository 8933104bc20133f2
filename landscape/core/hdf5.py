"""Reading and writing of HDF5: all files are opened here, replaced only when whole, and checked when read.

Files contain only arrays and attributes, and no pickled objects: reading a file never runs code.

A file ends with a line that contains the SHA-256 of all bytes before it; HDF5 ignores bytes after its own
end. If the line is there, it must match; files that another program changed have no such line. A checksum
detects damage, but no forgery, and a forged file can make HDF5 crash, loop or fill the memory. Therefore a
separate process (hdf5_check.py) reads each file first, once for each state of the file. Links to other files
are not followed, and no data set may be larger than the file allows.

A file is opened once. The same open file is examined and read, even if another file gets its name meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import h5py
import numpy as np

from landscape._version import __version__
from landscape.core import hdf5_check
from landscape.core.errors import DataWarning, LandscapeError, OperationError, warn_caller
from landscape.core.files import HAS_LOCKS, TolerantFile, open_regular, printable, replacing, within
from landscape.core.hdf5_check import first_words

Array = np.ndarray[Any, Any]
T = TypeVar("T", bool, int, float, str)
# Larger coordinates cannot be drawn, because their differences overflow (our choice).
LARGEST = 1e100
SCHEMAS = r"landscape(\.\w+)+"  # a regular expression that the names of all formats match
# The newest version of the formats, which this package writes.
VERSION = 1

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_CHECKSUM_LINE = re.compile(rb"\nlandscape sha256 ([0-9a-f]{64})\n")
_CHECKSUM_LENGTH = 83
# Attempts to open a file that another process is changing, and seconds between them (our choice).
ATTEMPTS, PAUSE = 50, 0.02
# Nanoseconds between two changes of a file that certainly get different times: the clock of Linux advances
# every 1 to 10 ms.
TICK = 20_000_000
# The validator's time limit: PATIENCE seconds for its start, which took more than 10 on 2 cores with 14
# processes, and a second for each PACE bytes, a tenth of the speed of a disk (our choice). Its memory limit:
# MEMORY bytes, of which Python, numpy and HDF5 need half, plus two to four times the size of the file.
PATIENCE, PACE, MEMORY = 25.0, 20e6, 1 << 29
_examined: dict[str, tuple[int, ...]] = {}  # by path, the stamp of a file that was examined and is sound


class ChecksumWarning(UserWarning):
    """A file has no checksum, so that damage to its numbers cannot be detected.

    Example:
        >>> issubclass(ChecksumWarning, UserWarning)
        True
    """


class DamagedError(OperationError):
    """A file of this project whose content is damaged or incomplete."""


class DamageWarning(DataWarning):
    """A file is damaged, and another one was used instead.

    Example:
        >>> issubclass(DamageWarning, UserWarning)
        True
    """


@contextlib.contextmanager
def writing(
    path: str | Path,
    schema: str,
    copy: Path | None = None,
    change: Callable[[h5py.File], None] = lambda file: None,
) -> Iterator[h5py.File]:
    """Return a context with a new HDF5 file, which gets a checksum at the end and replaces ``path``.

    After an error the file at ``path`` is unchanged.

    Args:
        schema: the name of the format, written as an attribute.
        copy: the path of a copy, which is replaced just after ``path``; None: no copy.
        change: changes the content of the new copy, before the copy replaces an older one.

    Raises:
        OperationError: the folder does not exist, or there is no permission or no space.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with writing(f"{folder}/a.h5", "landscape.example") as file:
        ...         file.attrs["n"] = 5
        ...     with reading(f"{folder}/a.h5") as file:
        ...         attribute(file, "n", int)
        5
    """
    import torch  # here, because reading a file needs no torch

    copy_context = contextlib.nullcontext() if copy is None else replacing(copy)
    with copy_context as raw_copy, replacing(path) as raw:
        with h5py.File(raw, "w") as file:
            file.attrs["schema"] = schema
            file.attrs["version"] = VERSION
            file.attrs["created"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            file.attrs["landscape_version"] = __version__
            file.attrs["torch_version"] = str(torch.__version__)
            yield file
        _add_checksum(raw)
        if raw_copy is None:
            return
        raw.seek(0)
        shutil.copyfileobj(raw, raw_copy, 1 << 20)
        # A failed write to ``raw`` or ``raw_copy`` has raised nothing, but has set ``error``. An incomplete
        # copy must not be opened as HDF5.
        if write_error := raw.error or raw_copy.error:
            raise write_error
        raw_copy.truncate(raw_copy.tell() - _CHECKSUM_LENGTH)  # without the checksum of ``path``
        with h5py.File(raw_copy, "r+") as file:
            change(file)
        _add_checksum(raw_copy)


def _add_checksum(raw: TolerantFile) -> None:
    """Write a line with the checksum of all bytes at the end of the file."""
    if raw.error is None:
        raw.seek(0)
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
        raw.seek(0, os.SEEK_END)
        raw.write(f"\nlandscape sha256 {digest}\n".encode())


@contextlib.contextmanager
def reading(path: str | Path, schema: str | None = None, warn: bool = True) -> Iterator[h5py.File]:
    """Return a context with a checked HDF5 file of this package, open for reading.

    Args:
        schema: the name of the format that the file must have; None: any.
        warn: whether to warn of a file without a checksum.

    Raises:
        OperationError: the file is missing or damaged, or of another program, another format or a newer
            version; or an object that the caller reads is not in the file.

    Example:
        >>> with reading("missing.h5") as file:
        ...     pass
        Traceback (most recent call last):
        landscape.core.errors.OperationError: missing.h5: no such file; ...
    """
    path = Path(path)
    if not path.exists():
        raise OperationError(f"{path}: no such file; an .h5 file that landscape wrote is needed")
    with _opened(path) as (file, is_checksummed):
        try:
            file_schema = file.attrs.get("schema")
            if not isinstance(file_schema, str) or not re.fullmatch(SCHEMAS, file_schema):
                raise OperationError(f"{path}: an HDF5 file of another program; give one of landscape")
            if schema is not None and file_schema != schema:
                raise OperationError(f"{path}: holds a {file_schema}, a {schema} is needed")
            version = attribute(file, "version", int)
            if version > VERSION:
                raise OperationError(f"{path}: version {version} is newer than {VERSION}; update landscape")
            if warn and not is_checksummed:
                warn_caller(f"{printable(path)}: has no checksum, damage would not be seen", ChecksumWarning)
            yield file
        except LandscapeError:
            raise
        # The file may contain anything. Any other error, also one in the caller's block, counts as damage.
        except Exception as error:
            raise DamagedError(f"{path}: damaged or incomplete ({first_words(error)})") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[h5py.File, bool]]:
    """Return a context with the open, checked file at ``path``, and whether the file has a checksum."""
    with contextlib.ExitStack() as stack:
        for attempts_left in reversed(range(ATTEMPTS)):
            raw = stack.enter_context(open_regular(path))
            stamp, failure = _stamp(raw.fileno()), None
            try:
                is_checksummed = _examine(raw, path, stamp)
                file = stack.enter_context(h5py.File(raw, "r"))
            except OperationError as error:
                failure = error
            except (OSError, RuntimeError) as error:
                failure = OperationError(f"{path}: not a readable HDF5 file ({first_words(error)})")
            # By now a new file may be at ``path``. The new file has another device or inode than the open
            # file: the first two numbers of their stamps differ. The new file is tried only if the open file
            # is faulty.
            must_try_new_file = failure and os.path.exists(path) and _stamp(path)[:2] != stamp[:2]
            if not must_try_new_file and not _has_changed(raw, stamp):
                break
            if not attempts_left:
                raise OperationError(f"{path}: is being replaced by another process; try again later")
            stack.close()
            time.sleep(PAUSE)
        if failure:
            raise failure
        try:
            yield file, is_checksummed
        finally:
            if _has_changed(raw, stamp):
                raise OperationError(f"{path}: was changed while it was read; try again")


def _stamp(file: int | Path) -> tuple[int, ...]:
    """Return (device, inode, size, time of change, time of change of the inode) of a file.

    The last number changes also when the file is renamed or deleted.
    """
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _has_changed(raw: IO[bytes], stamp: tuple[int, ...]) -> bool:
    """Return whether the content of an open file may have changed since it had ``stamp``."""
    return _stamp(raw.fileno())[:-1] != stamp[:-1]


def _examine(raw: IO[bytes], path: Path, stamp: tuple[int, ...]) -> bool:
    """Return whether the open file has a checksum; raise OperationError unless the file is sound.

    A sound file is examined again only if its ``stamp`` has changed.
    """
    absolute_path = os.path.abspath(path)
    if _examined.get(absolute_path) == stamp:
        return _stored_checksum(raw) is not None
    checksum = _verify(raw, path)
    if checksum is None and HAS_LOCKS:
        # Another program may be writing this file, which has no checksum. HDF5 then holds a lock on it.
        import fcntl

        try:
            fcntl.flock(raw, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OperationError(f"{path}: another program writes it; close it there") from error
        except OSError:  # a file system without locks
            pass
    # The validator opens the file by the descriptor of ``raw``. On systems without /proc the validator opens
    # the path, and compares the inode of the file there with the one in ``stamp``.
    descriptor = f"/proc/{os.getpid()}/fd/{raw.fileno()}"
    fault = _validator.fault_of(descriptor if os.path.exists(descriptor) else absolute_path, stamp)
    if fault.startswith(("damaged", "not a readable HDF5 file")):
        raise DamagedError(f"{path}: {fault}")
    if fault:
        raise OperationError(f"{path}: {fault}")
    # A file that was changed within the last TICK may change again and keep its stamp: it is not remembered.
    if time.time_ns() - stamp[-1] > TICK:
        _examined[absolute_path] = stamp
    return checksum is not None


def schema_of(path: Path) -> str:
    """Return the name of a file's format; raise OperationError as :func:`reading` does."""
    with reading(path, warn=False) as file:
        return str(file.attrs["schema"])


def has_checksum(path: str | Path) -> bool:
    """Return whether the file at ``path`` has a checksum; :func:`reading` compares it with the content."""
    with open_regular(path) as raw:
        return _stored_checksum(raw) is not None


def _stored_checksum(raw: IO[bytes]) -> bytes | None:
    """Return the checksum at the end of a file, as 64 hexadecimal digits; None if there is none."""
    raw.seek(max(0, os.fstat(raw.fileno()).st_size - _CHECKSUM_LENGTH))
    match = _CHECKSUM_LINE.fullmatch(raw.read(_CHECKSUM_LENGTH))
    return match[1] if match else None


def _verify(raw: Any, path: Path) -> bytes | None:
    """Return the checksum in ``raw``, or None if there is none; raise OperationError unless it matches."""
    checksum = _stored_checksum(raw)
    raw.seek(0)
    if raw.read(len(SIGNATURE)) != SIGNATURE:
        raise OperationError(f"{path}: not a readable HDF5 file (it does not begin as one)")
    if checksum:
        digest = hashlib.sha256(SIGNATURE)
        remaining = os.fstat(raw.fileno()).st_size - _CHECKSUM_LENGTH - len(SIGNATURE)
        buffer = memoryview(bytearray(1 << 18))  # small enough for the processor's cache
        while remaining > 0 and (count := raw.readinto(buffer[: min(remaining, len(buffer))])):
            digest.update(buffer[:count])
            remaining -= count
        if digest.hexdigest().encode() != checksum:
            raise DamagedError(f"{path}: damaged, its checksum does not fit; take a copy, or make it again")
    return checksum


class _Validator:
    """A separate process that examines files before this one reads them.

    It is started when it is first needed, and again after a crash.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._memory = 0, 0

    def fault_of(self, path: str, stamp: tuple[int, ...]) -> str:
        """Return what is wrong with the file at ``path``, whose state is ``stamp``; "" for a sound file.

        A file is not sound if HDF5 crashes over the file, or does not finish reading within a time limit.
        """
        _device, inode, length, *_times = stamp
        memory, time_limit = MEMORY + 2 * length, PATIENCE + length / PACE
        failure = "crashes over it"  # unless another failure is found below
        with self._lock:
            try:
                if self._process is None or self._owner != os.getpid() or self._memory < memory:
                    self.stop()
                    self._start(MEMORY + 2 * (2 * length))  # enough for a file of twice the length
            except OSError as error:
                return f"cannot be examined, no process can be started for it ({error.strerror})"
            process: Any = self._process

            def exchange() -> bytes:
                """Send the file's path and inode to the validator, and return its answer, one line."""
                process.stdin.write(f"{os.fsencode(path).hex()} {inode}\n".encode())
                process.stdin.flush()
                return bytes(process.stdout.readline())

            try:
                answer = within(time_limit, exchange)
                if answer.endswith(b"\n"):
                    return "" if answer == b"ok\n" else answer.decode("ascii").rstrip("\n")
            except TimeoutError:
                failure = f"does not come to an end in {time_limit:.0f} s"
            except OSError:  # the process has ended
                pass
            except BaseException:  # an interrupt; the next call must not read this answer
                self.stop()
                raise
            self.stop()
            return f"damaged or incomplete (HDF5 {failure})"

    def _start(self, memory: int) -> None:
        # -I: ignore modules in the current folder and in PYTHONPATH.
        self._process = subprocess.Popen(
            [sys.executable, "-I", hdf5_check.__file__, str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._owner, self._memory = os.getpid(), memory

    def stop(self) -> None:
        """Stop the validator, if this process started it."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


_validator = _Validator()
atexit.register(_validator.stop)


def group(parent: h5py.Group, name: str) -> h5py.Group:
    """Return the group ``name`` of ``parent``.

    Raises:
        ValueError: there is no group of this name.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     group(file, "history")
        Traceback (most recent call last):
        ValueError: /history is missing, a group is needed
    """
    member = parent.get(name)
    if not isinstance(member, h5py.Group):
        state = "missing" if member is None else "a data set"
        raise ValueError(f"{location(parent, name)} is {state}, a group is needed")
    return member


def dataset(parent: h5py.Group, name: str, kinds: str = "fiub", dims: int | None = None) -> h5py.Dataset:
    """Return the data set ``name`` of ``parent``.

    Args:
        kinds: the allowed kinds of numbers, as codes of numpy's ``dtype.kind``.
        dims: the required number of dimensions; None: any.

    Raises:
        ValueError: there is no data set of this name, or its kind or number of dimensions is not allowed.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     file["loss"] = [0.5, 0.25]
        ...     dataset(file, "loss", "f", dims=1).shape
        (2,)
    """
    member, where = parent.get(name), location(parent, name)
    if not isinstance(member, h5py.Dataset):
        raise ValueError(f"{where} is {'missing' if member is None else 'a group'}, a data set is needed")
    if member.dtype.kind not in kinds or not member.dtype.isnative:
        raise ValueError(f"{where} holds {member.dtype}, one of the kinds '{kinds}' is needed")
    if dims is not None and member.ndim != dims:
        raise ValueError(f"{where} has shape {member.shape}, {dims} dimensions are needed")
    return member


def attribute(parent: h5py.Group, name: str, kind: type[T]) -> T:
    """Return the attribute ``name`` of ``parent``.

    Args:
        kind: the type that it must have: bool, int, float (which an int may replace) or str.

    Raises:
        ValueError: there is no attribute of this name, or it has another type.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     file.attrs["lr"] = 1
        ...     attribute(file, "lr", float)
        1.0
    """
    where = f"attribute {location(parent, name)}"
    if name not in parent.attrs:
        raise ValueError(f"{where} is missing")
    value = parent.attrs[name]
    integers: Any = (int, np.integer)
    allowed: dict[type, Any] = {bool: (bool, np.bool_), int: integers, float: (*integers, float, np.floating)}
    if not isinstance(value, allowed.get(kind, kind)):
        raise ValueError(f"{where} is {first_words(ValueError(repr(value)))}, {kind.__name__} is needed")
    return kind(value)


def location(parent: h5py.Group, name: str) -> str:
    """Return the full name of a member of ``parent``, for messages.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     location(file.create_group("history"), "loss")
        '/history/loss'
    """
    return f"{(parent.name or '').rstrip('/')}/{name}"


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of the bytes of a file, as 64 hexadecimal digits.

    Example:
        >>> len(sha256(__file__))
        64
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
