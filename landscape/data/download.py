"""Data sets from their public mirrors: downloaded, verified by checksums, and put where the loaders look."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import itertools
import tarfile
import time
import tomllib
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from landscape._version import __version__
from landscape.core.errors import InputError, OperationError
from landscape.core.files import open_regular, replacing, within
from landscape.core.progress import Progress, portion

# Seconds without an answer, bytes that are read at once, and the slowest download in bytes per second (our
# choice).
TIMEOUT, BLOCK, PACE = 30.0, 1 << 18, 2e4
MOST = 1 << 30  # bytes of one file, unpacked or not: more than any of them has (our choice)


def copies(root: Path, name: str, folder: str, file: str) -> list[Path]:
    """The copies of a file that are there, in the order of a loader; a packed one may lie there unpacked."""
    folders = dict.fromkeys((root / folder, root / name / folder, root / name, root))
    names = dict.fromkeys((file, file.removesuffix(".gz")))
    return [path for path in (below / n for below in folders for n in names) if path.is_file()]


@dataclass(frozen=True)
class File:
    """A file with its SHA-256, and, where it may also be packed otherwise, the MD5 of what is in it.

    ``size`` in bytes, of those that are downloaded: no more is.
    """

    name: str
    sha256: str
    content: str = ""
    size: int = MOST


@dataclass(frozen=True)
class Source:
    """The mirrors and ``files`` of a data set, and their ``folder`` below the root of the data.

    With an ``archive``, which the mirrors hold in their place, they are extracted from it; ``size``: the
    megabytes of a download.
    """

    mirrors: tuple[str, ...]
    folder: str
    files: tuple[File, ...]
    size: int
    archive: File | None = None


def _source(table: dict[str, Any]) -> Source:
    """The source that ``table`` of sources.toml describes."""
    files = tuple(File(**file) for file in table["files"])
    archive = File(**table["archive"]) if "archive" in table else None
    return Source(tuple(table["mirrors"]), table["folder"], files, table["size"], archive)


with Path(__file__).with_name("sources.toml").open("rb") as _file:
    SOURCES = {name: _source(table) for name, table in tomllib.load(_file).items()}
#: The four IDX files of MNIST and its relatives.
FILES = tuple(file.name.removesuffix(".gz") for file in SOURCES["mnist"].files)


def folder_of(name: str, root: Path) -> Path | None:
    """The folder of a data set's files, if all are there and the checksum of the last one fits; else None."""
    source = SOURCES[name]
    for file in source.files:
        if not (paths := copies(root, name, source.folder, file.name)):
            return None
    return next((path.parent for path in paths if _has_checksum(path, file)), None)


def fetch(
    name: str,
    root: Path,
    *,
    mirror: str | None = None,
    force: bool = False,
    progress: Progress = lambda share: None,
    message: Callable[[str], None] = lambda line: None,
) -> dict[Path, bool]:
    """Download the missing files of a data set into ``root``, and verify the existing ones by checksums.

    A file gets its final name only when it is complete and verified.

    Args:
        name: a key of SOURCES.
        mirror: the URL of a copy of the files, used instead of the public mirrors.
        force: whether to replace existing files that have another checksum.
        progress: a function that takes the completed share, from 0 to 1.
        message: a function that takes a line about each failed mirror before the next one is tried.

    Returns:
        The path of each file -> whether this call downloaded it, in the order of SOURCES.

    Raises:
        InputError: ``mirror`` is no http or https address.
        OperationError: no mirror gives a file with the right checksum, an existing file has another checksum,
            or a file cannot be written.
    """
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise InputError(f"mirror: '{mirror}' is not allowed, it must be an http:// or https:// address")
    source = SOURCES[name]
    mirrors = source.mirrors if mirror is None else (mirror,)
    # For each file its path, or None if the file must be downloaded.
    verified_paths = {file: _verified_path(name, root, file, force) for file in source.files}
    missing = [file for file, path in verified_paths.items() if path is None]
    folder = root / source.folder
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    if missing and source.archive:
        archive_path = root / source.archive.name
        _download(mirrors, source.archive, archive_path, progress, message)
        _extract(archive_path, source, missing, root)
    elif missing:
        for i, file in enumerate(missing):
            file_progress = portion(progress, i / len(missing), (i + 1) / len(missing))
            _download(mirrors, file, folder / file.name, file_progress, message)
    return {path or folder / file.name: path is None for file, path in verified_paths.items()}


def _verified_path(name: str, root: Path, file: File, force: bool) -> Path | None:
    """Return the path of an existing file with the right checksum; None if it must be downloaded."""
    target = root / SOURCES[name].folder / file.name
    for path in copies(root, name, SOURCES[name].folder, file.name):
        if _has_checksum(path, file):
            return path
        if path.parent == target.parent and not force:
            words = f"{path}: is not the file of {name} (its checksum is another); move it away"
            raise OperationError(words, give={"force": True})
        if path.parent == target.parent and path != target:
            path.unlink()  # so that no loader takes it in place of the new one
    return None


def _has_checksum(path: Path, file: File) -> bool:
    """Return whether the file at ``path`` has the checksum of ``file``, or the same content when unpacked."""
    with open_regular(path, MOST) as opened:
        if _digest("sha256", opened) == file.sha256:
            return True
        if not file.content:
            return False
        opened.seek(0)
        try:
            unpacked = gzip.GzipFile(fileobj=opened) if path.suffix == ".gz" else opened
            return _digest("md5", unpacked) == file.content  # type: ignore[arg-type]
        except (OSError, EOFError, zlib.error):
            return False


def _digest(kind: str, file: IO[bytes]) -> str:
    """The checksum of what can be read, at most of MOST bytes."""
    digest = hashlib.new(kind, usedforsecurity=False)
    for block in itertools.islice(_blocks_of(file), MOST // BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _blocks_of(file: IO[bytes]) -> Iterator[bytes]:
    return iter(functools.partial(file.read, BLOCK), b"")


def _write(blocks: Iterable[bytes], path: Path, sha256: str, wrong: OperationError) -> None:
    """Write a file under its name once it is whole; ``wrong`` is raised where it has another checksum."""
    digest = hashlib.sha256()
    with replacing(path) as written:
        for block in blocks:
            written.write(block)
            digest.update(block)
        if written.error is None and digest.hexdigest() != sha256:
            raise wrong


class _MirrorError(OperationError):
    """A mirror that does not give the file."""


def _download(
    mirrors: tuple[str, ...], file: File, path: Path, progress: Progress, message: Callable[[str], None]
) -> None:
    """Write a file from the first mirror that gives it; an archive that is there already is kept."""
    if path.is_file() and _has_checksum(path, file):
        return
    failures: list[str] = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{file.name}"
        try:
            wrong = _MirrorError(f"{url}: the checksum is wrong, it is not the file that is expected")
            with contextlib.closing(_downloaded_blocks(url, file.size, progress)) as blocks:
                _write(blocks, path, file.sha256, wrong)
            return
        except _MirrorError as error:
            failures.append(str(error))
            if mirror != mirrors[-1]:
                message(f"{error}; trying the next mirror")
    words = f"{'; '.join(failures)}; try again, or put {file.name} into {path.parent} yourself"
    raise OperationError(words, give={"mirror": ...})


def _downloaded_blocks(url: str, max_bytes: int, progress: Progress) -> Generator[bytes]:
    """Yield the bytes of ``url`` in blocks; raise _MirrorError on failure or above ``max_bytes``."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    seconds = 2 * TIMEOUT + max_bytes / PACE
    deadline = time.monotonic() + seconds
    request = Request(url, headers={"User-Agent": f"landscape/{__version__}"})
    try:
        # TIMEOUT limits single waits; ``within`` also stops a server that sends its headers byte by byte.
        with within(seconds, lambda: urlopen(request, timeout=TIMEOUT)) as reply:
            size = int(reply.headers.get("Content-Length") or 0)  # 0: not known
            received = 0
            if size > max_bytes:
                raise _MirrorError(f"{url}: has {size:,} bytes, {max_bytes:,} are expected")
            # One byte more than ``max_bytes`` shows that the file is too long.
            while block := reply.read1(min(BLOCK, max_bytes + 1 - received)):
                received += len(block)
                if received > max_bytes:
                    raise _MirrorError(f"{url}: has more than the {max_bytes:,} bytes that are expected")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"incomplete after {seconds:.0f} s")
                yield block
                progress(received / (size or max_bytes))
            if received < size:
                raise _MirrorError(f"{url}: broken off after {received:,} of {size:,} bytes")
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(error, HTTPError):  # this error holds the open reply
            error.close()
            reason = error
        raise _MirrorError(f"{url}: cannot be downloaded ({reason or type(error).__name__})") from error


def _extract(archive: Path, source: Source, missing: list[File], root: Path) -> None:
    """Write the missing files from a verified archive, and delete it."""
    files = {f"{source.folder}/{file.name}": file for file in missing}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                file = files.get(member.name)
                opened = tar.extractfile(member) if file and member.isreg() else None
                if not file or opened is None:
                    continue
                wrong = OperationError(f"{archive}: the checksum of {member.name} in it is wrong")
                _write(_blocks_of(opened), root / source.folder / file.name, file.sha256, wrong)
                del files[member.name]
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise OperationError(f"{archive}: cannot be unpacked ({error}); delete it and try again") from error
    if files:
        raise OperationError(f"{archive}: lacks {', '.join(files)}")
    archive.unlink()
