"""Checks of the content of an HDF5 file before it is used.

This module is also run as a script, the validator: a separate process that reads files before any other does.
A damaged file can make HDF5 crash, loop or allocate too much memory, and then does so only in that process.
The module therefore imports nothing of the package. The script reads one path per line, with the inode of the
file there, and answers with one line: "ok", or a description of the problem.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from typing import Any

import h5py
import numpy as np

# Filters that every build of HDF5 has. This project uses none, but a user may have compressed a file.
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
# Limits on compressed data: bytes per byte of the file, and bytes that every file may have (our choice; a
# column of NaN is compressed a thousandfold, weights hardly at all).
EXPANSION, ALWAYS = 16, 1 << 26
DEPTH, OBJECTS, ATTRIBUTES, MEMBERS = 8, 1_000_000, 10_000, 16
FLOATS = (
    h5py.h5t.IEEE_F16LE, h5py.h5t.IEEE_F32LE, h5py.h5t.IEEE_F64LE,
    h5py.h5t.IEEE_F16BE, h5py.h5t.IEEE_F32BE, h5py.h5t.IEEE_F64BE,
)  # fmt: skip


class UnsoundError(Exception):
    """A problem of a file, with its place in the file.

    Example:
        >>> str(UnsoundError("/loss: is a soft link"))
        '/loss: is a soft link'
    """


class _Walk:
    """One pass over the links, types, shapes and sizes of all objects of a file, without reading data."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.uncompressed = 0  # bytes of uncompressed data sets and attributes
        self.expanded = 0  # bytes of compressed data sets once they are expanded
        self.objects = 0
        self.most = min(OBJECTS, length // 8)  # links that so many bytes can hold
        self.seen: set[int] = set()  # addresses of objects

    def once(self, thing: Any, where: str) -> None:
        """Raise UnsoundError for an object seen before: a small file can give it a great many names."""
        address = h5py.h5o.get_info(thing).addr
        if address in self.seen:
            raise UnsoundError(f"{where}: is a second name of an object, or lies in a circle")
        self.seen.add(address)

    def group(self, group: Any, where: str, depth: int) -> None:
        if depth > DEPTH:
            raise UnsoundError(f"{where or '/'}: groups lie more than {DEPTH} deep")
        self.once(group, where or "/")
        self.attributes(group, where or "/")
        names: list[bytes] = []

        def take(name: bytes) -> bool | None:  # True ends the iteration, which a damaged index may never do
            names.append(name)
            return self.objects + len(names) > self.most or None

        group.links.iterate(take)
        self.objects += len(names)
        if self.objects > self.most:
            raise UnsoundError(f"{where or '/'}: more than {self.most:,} objects")
        for name in names:
            path = f"{where}/{name.decode('utf-8', 'surrogateescape')}"
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                raise UnsoundError(f"{path}: is a soft link, or one to another file, which is not followed")
            member = h5py.h5o.open(group, name)
            if isinstance(member, h5py.h5g.GroupID):
                self.group(member, path, depth + 1)
            elif isinstance(member, h5py.h5d.DatasetID):
                self.dataset(member, path)
            else:
                raise UnsoundError(f"{path}: is neither a group nor a data set")

    def dataset(self, dataset: Any, where: str) -> None:
        self.once(dataset, where)
        properties = dataset.get_create_plist()
        layout = properties.get_layout()
        if layout == h5py.h5d.VIRTUAL or properties.get_external_count():
            raise UnsoundError(f"{where}: is virtual, or its data lie in another file, which is not followed")
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        for code in filters:
            if code not in FILTERS or filters.count(code) > 1:  # gzip of gzip expands a millionfold
                allowed = ", ".join(FILTERS.values())
                raise UnsoundError(f"{where}: filter {code} is not allowed ({allowed} are, each once)")
        self.attributes(dataset, where)
        kind = dataset.get_type()
        check_type(kind, where)
        shape = shape_of(dataset.get_space(), where)
        size, stored = math.prod(shape) * kind.get_size(), dataset.get_storage_size()
        # In memory a text is a pointer, in the file 8 bytes more.
        size += math.prod(shape) * 8 * sum(map(is_text, members(kind)))
        if layout == h5py.h5d.CHUNKED and size:
            chunk = properties.get_chunk()
            if len(chunk) != len(shape) or min(chunk) < 1:
                raise UnsoundError(f"{where}: chunks {chunk} do not fit shape {shape}")
            count = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
            size = count * math.prod(chunk) * kind.get_size()
            most = EXPANSION * self.length + ALWAYS
            if filters and self.expanded + size > most:
                raise UnsoundError(f"{where}: shape {shape} is too much for its size; use h5repack -f NONE")
            if size > most or dataset.get_num_chunks() != count:
                raise UnsoundError(f"{where}: shape {shape} is more than the file holds")
            chunk_bytes = 0 if filters else math.prod(chunk) * kind.get_size()
            dataset.chunk_iter(lambda c: self._chunk(c, chunk_bytes, where))
            if filters:
                self.expanded += size
                return
        if size != stored:
            raise UnsoundError(f"{where}: shape {shape} needs {size:,} bytes, {stored:,} are there")
        self._take(size, where, shape)

    def _chunk(self, chunk: Any, size: int, where: str) -> None:
        """Raise UnsoundError unless a chunk lies in the file, with all filters; ``size``: 0 if not known."""
        inside = chunk.byte_offset is not None and chunk.byte_offset + chunk.size <= self.length
        if not inside or chunk.filter_mask or chunk.size != (size or chunk.size):
            raise UnsoundError(f"{where}: its chunk at {chunk.chunk_offset} is not as its header says")

    def _take(self, size: int, where: str, shape: tuple[int, ...]) -> None:
        self.uncompressed += size
        if self.uncompressed > self.length:
            raise UnsoundError(f"{where}: shape {shape} is more than a file of {self.length:,} bytes holds")

    def attributes(self, thing: Any, where: str) -> None:
        count = h5py.h5a.get_num_attrs(thing)
        if count > ATTRIBUTES:
            raise UnsoundError(f"{where}: more than {ATTRIBUTES:,} attributes")
        for i in range(count):
            attribute = h5py.h5a.open(thing, index=i)
            name = f"{where}: attribute {attribute.name.decode('utf-8', 'surrogateescape')}"
            kind = attribute.get_type()
            check_type(kind, name)
            shape = shape_of(attribute.get_space(), name)
            self._take(math.prod(shape) * kind.get_size(), name, shape)


def shape_of(space: Any, where: str) -> tuple[int, ...]:
    """The shape of a data space. Raises UnsoundError for a space without elements."""
    if space.get_simple_extent_type() not in (h5py.h5s.SCALAR, h5py.h5s.SIMPLE):
        raise UnsoundError(f"{where}: is empty")
    return tuple(int(n) for n in space.get_simple_extent_dims())


def members(kind: Any) -> list[Any]:
    """The types of the members of a compound type; of another type, the type itself."""
    if kind.get_class() != h5py.h5t.COMPOUND:
        return [kind]
    return [kind.get_member_type(i) for i in range(kind.get_nmembers())]


def is_text(kind: Any) -> bool:
    """Return whether ``kind`` is text of variable length."""
    return kind.get_class() == h5py.h5t.STRING and bool(kind.is_variable_str())


def check_type(kind: Any, where: str, depth: int = 0) -> None:
    """Raise UnsoundError unless ``kind`` is a number, a boolean, a text, or a compound of a few of these."""
    of = kind.get_class()
    size = kind.get_size()
    if of == h5py.h5t.INTEGER and size in (1, 2, 4, 8):
        return
    if of == h5py.h5t.FLOAT and any(kind.equal(float_kind) for float_kind in FLOATS):
        return
    if of == h5py.h5t.STRING and (kind.is_variable_str() or 0 < size < 1 << 16):
        return
    if of == h5py.h5t.ENUM and size == 1 and kind.get_nmembers() == 2:  # how h5py writes booleans
        values = {kind.get_member_name(i): kind.get_member_value(i) for i in range(2)}
        if values == {b"FALSE": 0, b"TRUE": 1}:
            return
    if of == h5py.h5t.COMPOUND and depth == 0 and 0 < kind.get_nmembers() <= MEMBERS:
        for part in members(kind):
            check_type(part, where, 1)
        return
    raise UnsoundError(f"{where}: must hold numbers or texts of a usual form, and nothing else")


def check(file: h5py.File, length: int) -> None:
    """Check all objects of ``file``.

    Args:
        length: size of the file in bytes.

    Raises:
        UnsoundError: the file contains something that this project does not write, or is damaged. HDF5
            itself may raise other errors for a damaged file.
    """
    _Walk(length).group(h5py.h5g.open(file.id, b"/"), "", 0)


def read_all(group: h5py.Group) -> None:
    """Read everything that HDF5 has to decode: attributes, text, and data with filters."""
    dict(group.attrs)
    for item in group.values():
        if isinstance(item, h5py.Group):
            read_all(item)
            continue
        dict(item.attrs)
        if item.dtype.kind in "fiub" and not item.id.get_create_plist().get_nfilters():
            continue  # stored as they are, and where they lie is known
        if item.ndim == 0:
            item[()]
            continue
        rows = max(1, (1 << 23) // max(1, item.dtype.itemsize * math.prod(item.shape[1:])))
        for start in range(0, len(item), rows):
            np.asarray(item[start : start + rows])


def examine(path: str, inode: int) -> str:
    """Examine the file at ``path``: "ok", or a description of the problem in one line.

    A file with another ``inode`` has taken its name since.
    """
    problem = "not a readable HDF5 file"
    try:
        with open(path, "rb") as raw:
            status = os.fstat(raw.fileno())
            if status.st_ino != inode:
                return "is another file now"
            # The open file and not its name, which HDF5 would look up: another file may have it by now.
            with h5py.File(raw, "r") as file:
                problem = "damaged or incomplete"
                check(file, status.st_size)
                read_all(file)
    except UnsoundError as error:
        return " ".join(str(error).split())
    except Exception as error:  # HDF5 and h5py raise errors of many types for damaged files
        return f"{problem} ({first_words(error)})"
    return "ok"


def first_words(error: BaseException) -> str:
    """The beginning of an error's text, in one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__


def _serve() -> None:
    """Answer until stdin ends. The first argument is the limit on memory in bytes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when this one ends
    most = int(sys.argv[1])
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        path, inode = line.decode().split()
        answer = examine(os.fsdecode(bytes.fromhex(path)), int(inode))
        sys.stdout.write(answer.encode("ascii", "backslashreplace").decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
