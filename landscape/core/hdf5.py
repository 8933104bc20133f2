"""Reading and writing of HDF5: all files are opened here, replaced only when whole, and checked when read.

Files contain only arrays and attributes, and no pickled objects: reading a file never runs code.

A file ends with a line that contains the SHA-256 of all bytes before it; HDF5 ignores bytes after its own
end. If the line is there, it must match; it is missing in files that
another program changed. Anybody can compute a checksum, so that it shows damage and no more: a separate
process (hdf5_check.py) reads each file first, because a forged file can make HDF5 crash, loop or fill the
memory. A file with the checksum of one that this very process wrote is spared that. Links to other files are
not followed, and no data set may be larger than the file allows.
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import h5py
import numpy as np

from landscape._version import __version__
from landscape.core import hdf5_check
from landscape.core.errors import LandscapeError, OperationError, warn_caller
from landscape.core.files import TolerantFile, open_regular, printable, replacing
from landscape.core.hdf5_check import first_words

Array = np.ndarray[Any, Any]
T = TypeVar("T", bool, int, float, str)
# Larger coordinates cannot be drawn, because their differences overflow (ours).
LARGEST = 1e100
SCHEMA = r"landscape(\.\w+)+"  # the names of formats
# The newest version of the formats: the one that is written.
VERSION = 1

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SEAL = re.compile(rb"\nlandscape sha256 ([0-9a-f]{64})\n")
_SEAL_LENGTH = 83
ATTEMPTS = 8  # to open a file that others replace: a run in progress writes its last checkpoint again (ours)
# Time limit of the validator: seconds for its start, which took more than 10 on 2 cores with 14 processes,
# and bytes per second, a tenth of the speed of a disk (ours). Its memory limit in bytes, plus twice the size
# of the file: Python, numpy and HDF5 need half of it.
PATIENCE, PACE, MEMORY = 25.0, 20e6, 1 << 29
_known: dict[str, tuple[int, ...]] = {}  # files that were verified, with their state then
_own: set[bytes] = set()  # the checksums of files that this process wrote


class ChecksumWarning(UserWarning):
    """A file has no checksum, so that damage to its numbers cannot be detected.

    Example:
        >>> issubclass(ChecksumWarning, UserWarning)
        True
    """


class DamagedError(OperationError):
    """A file of this project whose content is damaged or incomplete."""


class DamageWarning(UserWarning):
    """A file is damaged, and another one was used instead.

    Example:
        >>> issubclass(DamageWarning, UserWarning)
        True
    """


@contextlib.contextmanager
def writing(path: str | Path, schema: str) -> Iterator[h5py.File]:
    """A context with a new HDF5 file that replaces ``path`` at the end, with a checksum after its last byte.

    After an error the file at ``path`` is unchanged.

    Args:
        schema: the name of the format, written as an attribute.

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
    import torch  # for its version: reading needs none of it

    with replacing(path) as raw:
        with h5py.File(raw, "w") as file:
            file.attrs["schema"] = schema
            file.attrs["version"] = VERSION
            file.attrs["created"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            file.attrs["landscape_version"] = __version__
            file.attrs["torch_version"] = str(torch.__version__)
            yield file
        _add_seal(raw)


@contextlib.contextmanager
def changed_copy(source: str | Path, target: str | Path) -> Iterator[h5py.File]:
    """A context with a copy of the HDF5 file ``source`` to be changed; it replaces ``target`` at the end.

    Raises:
        OperationError: the folder does not exist, or there is no permission or no space.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with writing(f"{folder}/a.h5", "landscape.example") as file:
        ...         file.attrs["n"] = 5
        ...     with changed_copy(f"{folder}/a.h5", f"{folder}/b.h5") as file:
        ...         file.attrs["n"] = 6
        ...     with reading(f"{folder}/b.h5") as file:
        ...         attribute(file, "n", int)
        6
    """
    with replacing(target) as raw:
        with open(source, "rb") as origin:
            shutil.copyfileobj(origin, raw, 1 << 20)
        if raw.error:
            raise raw.error
        if _verify(raw, source, check=True) not in _own:
            raise OperationError(f"{source}: is not as this process wrote it; another one changed it")
        raw.truncate(raw.seek(0, os.SEEK_END) - _SEAL_LENGTH)
        with h5py.File(raw, "r+") as file:
            yield file
        _add_seal(raw)


def _add_seal(raw: TolerantFile) -> None:
    """Write the checksum behind the last byte."""
    if raw.error is None:
        raw.seek(0)
        digest = hashlib.file_digest(raw, "sha256").hexdigest()
        raw.seek(0, os.SEEK_END)
        raw.write(f"\nlandscape sha256 {digest}\n".encode())
        _own.add(digest.encode())


@contextlib.contextmanager
def reading(path: str | Path, schema: str | None = None, warn: bool = True) -> Iterator[h5py.File]:
    """A context with an HDF5 file of this project, open for reading and checked.

    Args:
        schema: the format that the file must have; None: any.
        warn: whether to warn of a file without a checksum.

    Raises:
        OperationError: the file is missing, damaged, of another program, of another format or of a newer
            version, or what the caller reads from it is missing.

    Example:
        >>> with reading("missing.h5") as file:
        ...     pass
        Traceback (most recent call last):
        landscape.core.errors.OperationError: missing.h5: no such file; ...
    """
    path = Path(path)
    if not path.exists():
        raise OperationError(f"{path}: no such file; an .h5 file that landscape wrote is needed")
    with _opened(path) as (file, sealed):
        try:
            actual = file.attrs.get("schema")
            if not isinstance(actual, str) or not re.fullmatch(SCHEMA, actual):
                raise OperationError(f"{path}: an HDF5 file of another program; give one of landscape")
            if schema is not None and actual != schema:
                raise OperationError(f"{path}: holds a {actual}, a {schema} is needed")
            newest = attribute(file, "version", int)
            if newest > VERSION:
                raise OperationError(
                    f"{path}: {actual} version {newest} is newer than {VERSION}, the newest that "
                    f"landscape {__version__} reads; update landscape"
                )
            if warn and not sealed:
                warn_caller(
                    f"{printable(path)}: has no checksum, damage to its numbers would not be seen (another "
                    "program changed it)",
                    ChecksumWarning,
                )
            yield file
        except LandscapeError:
            raise
        except Exception as error:  # the file may contain anything, so every error is due to its content
            raise DamagedError(f"{path}: damaged or incomplete ({first_words(error)})") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[h5py.File, bool]]:
    """A context with the file at ``path``, open and checked, and whether it has a checksum."""
    with contextlib.ExitStack() as stack:
        for left in reversed(range(ATTEMPTS)):
            raw = stack.enter_context(open_regular(path))
            stamp, key = _stamp(raw.fileno()), os.path.abspath(path)
            seal = _verify(raw, path, check=_known.get(key) != stamp)
            # The open file, whatever takes its name meanwhile; where there is no /proc, the name.
            opened = f"/proc/{os.getpid()}/fd/{raw.fileno()}"
            place = opened if os.path.exists(opened) else key
            unknown = _known.get(key) != stamp and seal not in _own
            try:
                if unknown and (problem := _validator.ask(place, stamp[2])):
                    damaged = problem.startswith(("damaged", "not a readable HDF5 file"))
                    kind = DamagedError if damaged else OperationError
                    raise kind(f"{path}: {problem}")
                # Its writer may still have it locked for a moment, after it took its name as a whole file.
                file = stack.enter_context(h5py.File(place, "r", locking=False if seal else None))
                break
            except (OSError, RuntimeError, OperationError) as error:
                # HDF5 looks up the file's own name, which is none where another one has taken its place.
                if left and os.path.exists(path) and os.stat(path).st_ino != stamp[1]:
                    continue
                if isinstance(error, OperationError):
                    raise
                raise OperationError(f"{path}: not a readable HDF5 file ({first_words(error)})") from error
        if _stamp(file.id.get_vfd_handle()) != stamp:
            raise OperationError(f"{path}: was changed while it was opened; try again")
        _known[key] = stamp
        yield file, seal is not None


def has_checksum(path: str | Path) -> bool:
    """True if the file at ``path`` has a checksum; :func:`reading` compares it with the content."""
    with open_regular(path) as raw:
        return _seal(raw) is not None


def _stamp(descriptor: int) -> tuple[int, ...]:
    """Numbers that change when the open file changes."""
    s = os.fstat(descriptor)
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


def _seal(raw: IO[bytes]) -> bytes | None:
    raw.seek(max(0, os.fstat(raw.fileno()).st_size - _SEAL_LENGTH))
    match = _SEAL.fullmatch(raw.read(_SEAL_LENGTH))
    return match[1] if match else None


def _verify(raw: Any, path: str | Path, check: bool) -> bytes | None:
    """The checksum in ``raw``, or None. With ``check``, raises OperationError unless it matches."""
    try:
        seal = _seal(raw)
        raw.seek(0)
        if raw.read(len(SIGNATURE)) != SIGNATURE:
            raise OperationError(f"{path}: not a readable HDF5 file (it does not begin as one)")
        if seal and check:
            digest, left = hashlib.sha256(SIGNATURE), os.fstat(raw.fileno()).st_size - _SEAL_LENGTH - 8
            buffer = memoryview(bytearray(1 << 18))  # small enough for the processor's cache
            while left > 0 and (count := raw.readinto(buffer[: min(left, len(buffer))])):
                digest.update(buffer[:count])
                left -= count
            if digest.hexdigest().encode() != seal:
                raise DamagedError(
                    f"{path}: damaged, its checksum does not fit; take a copy, or make it again"
                )
    except OSError as error:
        raise OperationError(f"{path}: cannot be read ({error.strerror})") from error
    return seal


class _Validator:
    """The process that reads files before this one does; started when needed, and again after a crash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._memory = 0, 0

    def ask(self, path: str, length: int) -> str:
        """The fault of the file at ``path``, or how the process failed over it; "" for a sound file."""
        memory, seconds, late = MEMORY + 2 * length, PATIENCE + length / PACE, threading.Event()
        with self._lock:
            try:
                if self._process is None or self._owner != os.getpid() or self._memory < memory:
                    self.stop()
                    self._start(memory)
            except OSError as error:
                return f"cannot be examined, no process can be started for it ({error.strerror})"
            process: Any = self._process

            def end() -> None:
                late.set()
                process.kill()

            clock = threading.Timer(seconds, end)
            clock.daemon = True
            clock.start()
            try:
                process.stdin.write(os.fsencode(path).hex().encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = b""
            except BaseException:  # an interrupt: its answer must not be taken for that about another file
                self.stop()
                raise
            finally:
                clock.cancel()
            if answer.endswith(b"\n"):
                return "" if answer == b"ok\n" else answer.decode("ascii").rstrip("\n")
            self.stop()
            how = f"does not come to an end in {seconds:.0f} s" if late.is_set() else "crashes over it"
            return f"damaged or incomplete (HDF5 {how})"

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
    """The group ``name`` of ``parent``.

    Raises:
        ValueError: there is no such group.

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
    """The data set ``name`` of ``parent``.

    Args:
        kinds: allowed kinds of numbers, as the codes of numpy's ``dtype.kind``.
        dims: needed number of dimensions; None: any.

    Raises:
        ValueError: there is no such data set, or it has another kind or number of dimensions.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     file["loss"] = [0.5, 0.25]
        ...     dataset(file, "loss", "f", dims=1).shape
        (2,)
    """
    member, place = parent.get(name), location(parent, name)
    if not isinstance(member, h5py.Dataset):
        raise ValueError(f"{place} is {'missing' if member is None else 'a group'}, a data set is needed")
    if member.dtype.kind not in kinds or not member.dtype.isnative:
        raise ValueError(f"{place} holds {member.dtype}, one of the kinds '{kinds}' is needed")
    if dims is not None and member.ndim != dims:
        raise ValueError(f"{place} has shape {member.shape}, {dims} dimensions are needed")
    return member


def attribute(parent: h5py.Group, name: str, kind: type[T]) -> T:
    """The attribute ``name`` of ``parent``.

    Args:
        kind: bool, int, float or str.

    Raises:
        ValueError: there is no such attribute, or it has another type.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     file.attrs["lr"] = 1
        ...     attribute(file, "lr", float)
        1.0
    """
    place = f"attribute {location(parent, name)}"
    if name not in parent.attrs:
        raise ValueError(f"{place} is missing")
    value = parent.attrs[name]
    whole: Any = (int, np.integer)
    allowed: dict[type, Any] = {bool: (bool, np.bool_), int: whole, float: (*whole, float, np.floating)}
    if not isinstance(value, allowed.get(kind, kind)):
        raise ValueError(f"{place} is {first_words(ValueError(repr(value)))}, {kind.__name__} is needed")
    return kind(value)


def location(parent: h5py.Group, name: str) -> str:
    """The full name of a member of ``parent``, for messages.

    Example:
        >>> with h5py.File("a", "w", driver="core", backing_store=False) as file:
        ...     location(file.create_group("history"), "loss")
        '/history/loss'
    """
    return f"{(parent.name or '').rstrip('/')}/{name}"


def sha256(path: str | Path) -> str:
    """SHA-256 of the bytes of a file, as 64 hexadecimal digits.

    Example:
        >>> len(sha256(__file__))
        64
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
