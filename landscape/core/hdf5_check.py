"""Checks of the content of an HDF5 file before it is used.

This module is also run as a script, the validator: a separate process that reads files before any other does.
A damaged file can make HDF5 crash, loop or allocate too much memory, and then only that process fails. The
module therefore imports nothing of the package. The script reads lines with a path and the inode of the file
there, and answers each with one line: "ok", or a description of the problem.
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
# The limit on the expanded size of compressed data: EXPANSION bytes for each byte of the file, plus ALLOWANCE
# bytes (our choice; a column of NaN is compressed a thousandfold, weights hardly at all).
EXPANSION, ALLOWANCE = 16, 1 << 26
# The limits on levels of groups, on objects, on attributes of an object, and on members of a compound type.
DEPTH, OBJECTS, ATTRIBUTES, MEMBERS = 8, 1_000_000, 10_000, 16
FLOATS = (
    h5py.h5t.IEEE_F16LE, h5py.h5t.IEEE_F32LE, h5py.h5t.IEEE_F64LE,
    h5py.h5t.IEEE_F16BE, h5py.h5t.IEEE_F32BE, h5py.h5t.IEEE_F64BE,
)  # fmt: skip


class UnsoundError(Exception):
    """A fault of a file: the object that has it, and a description.

    Example:
        >>> str(UnsoundError("/loss: is a soft link"))
        '/loss: is a soft link'
    """


class _FileChecker:
    """Checks the links, types, shapes and sizes of all objects of a file, without reading their data.

    Args:
        length: the size of the file in bytes.

    Attributes:
        uncompressed_bytes: the bytes of the uncompressed data sets and attributes that were checked so far.
        expanded_bytes: the bytes of the compressed data sets so far, after expansion.
        objects: the number of objects so far, counted by their links.
        max_objects: the most objects that a file of this size can hold.
        addresses: the addresses of the objects so far.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.uncompressed_bytes = self.expanded_bytes = self.objects = 0
        self.max_objects = min(OBJECTS, length // 8)
        self.addresses: set[int] = set()

    def check_address(self, item: Any, path: str) -> None:
        """Raise UnsoundError for a second link to an object: links in a circle would never end."""
        address = h5py.h5o.get_info(item).addr
        if address in self.addresses:
            raise UnsoundError(f"{path}: is a second name of an object, or lies in a circle")
        self.addresses.add(address)

    def check_group(self, group: Any, path: str, depth: int) -> None:
        """Check a group and all its members; ``path`` is "" for the root, whose ``depth`` is 0."""
        if depth > DEPTH:
            raise UnsoundError(f"{path or '/'}: groups lie more than {DEPTH} deep")
        self.check_address(group, path or "/")
        self.check_attributes(group, path or "/")
        names: list[bytes] = []

        def add_name(name: bytes) -> bool | None:
            """Keep a name; return True to end the iteration, which is endless in some damaged files."""
            names.append(name)
            has_too_many = self.objects + len(names) > self.max_objects
            return True if has_too_many else None

        group.links.iterate(add_name)
        self.objects += len(names)
        if self.objects > self.max_objects:
            raise UnsoundError(f"{path or '/'}: more than {self.max_objects:,} objects")
        for name in names:
            member_path = f"{path}/{name.decode('utf-8', 'surrogateescape')}"
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                raise UnsoundError(
                    f"{member_path}: is a soft link or a link to another file, neither of which is followed"
                )
            member = h5py.h5o.open(group, name)
            if isinstance(member, h5py.h5g.GroupID):
                self.check_group(member, member_path, depth + 1)
            elif isinstance(member, h5py.h5d.DatasetID):
                self.check_dataset(member, member_path)
            else:
                raise UnsoundError(f"{member_path}: is neither a group nor a data set")

    def check_dataset(self, dataset: Any, path: str) -> None:
        """Check where the data of a data set lie, its filters, attributes and type, and its stored size."""
        self.check_address(dataset, path)
        properties = dataset.get_create_plist()
        layout = properties.get_layout()
        if layout == h5py.h5d.VIRTUAL or properties.get_external_count():
            raise UnsoundError(f"{path}: is virtual, or its data lie in another file, which is not opened")
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        for code in filters:
            # A filter is allowed once: gzip of gzip expands a millionfold.
            if code not in FILTERS or filters.count(code) > 1:
                allowed = ", ".join(FILTERS.values())
                raise UnsoundError(f"{path}: filter {code} is not allowed ({allowed} are, each once)")
        self.check_attributes(dataset, path)
        element_type = dataset.get_type()
        check_type(element_type, path)
        shape = shape_of(dataset.get_space(), path)
        element_size = element_type.get_size()
        for member in members(element_type):
            # For a text of variable length, HDF5 states the size of a pointer, 8 bytes. The file has a
            # reference of 16 bytes in its place.
            if member.get_class() == h5py.h5t.STRING and member.is_variable_str():
                element_size += 8
        size, stored_size = math.prod(shape) * element_size, dataset.get_storage_size()
        if layout == h5py.h5d.CHUNKED and size:
            chunk_shape = properties.get_chunk()
            if len(chunk_shape) != len(shape) or min(chunk_shape) < 1:
                raise UnsoundError(f"{path}: chunks {chunk_shape} do not fit shape {shape}")
            sides = zip(shape, chunk_shape, strict=True)
            chunks = math.prod(-(-side // chunk_side) for side, chunk_side in sides)  # rounded up
            chunk_bytes = math.prod(chunk_shape) * element_size
            size = chunks * chunk_bytes
            max_size = EXPANSION * self.length + ALLOWANCE
            if filters and self.expanded_bytes + size > max_size:
                raise UnsoundError(f"{path}: shape {shape} is too much for this file; use h5repack -f NONE")
            # Without filters ``max_size`` is only a first, wide limit. Below, the size of such chunks must be
            # the stored size, and fit into the file.
            if size > max_size or dataset.get_num_chunks() != chunks:
                raise UnsoundError(f"{path}: shape {shape} is more than the file holds")
            stored_chunk_bytes = None if filters else chunk_bytes  # None: a filter may compress each chunk
            dataset.chunk_iter(lambda info: self._check_chunk(info, stored_chunk_bytes, path))
            if filters:
                self.expanded_bytes += size
                return
        if size != stored_size:
            raise UnsoundError(f"{path}: shape {shape} needs {size:,} bytes, {stored_size:,} are there")
        self._add_uncompressed(size, path, shape)

    def _check_chunk(self, chunk: Any, size: int | None, path: str) -> None:
        """Raise UnsoundError unless a chunk is inside the file, has all filters, and has ``size`` bytes.

        A ``size`` of None is not checked.
        """
        inside = chunk.byte_offset is not None and chunk.byte_offset + chunk.size <= self.length
        if not inside or chunk.filter_mask or size not in (None, chunk.size):
            raise UnsoundError(f"{path}: its chunk at {chunk.chunk_offset} is not as its header says")

    def _add_uncompressed(self, size: int, path: str, shape: tuple[int, ...]) -> None:
        """Count the bytes of uncompressed data; raise UnsoundError if all are more than the file has."""
        self.uncompressed_bytes += size
        if self.uncompressed_bytes > self.length:
            raise UnsoundError(f"{path}: shape {shape} is more than a file of {self.length:,} bytes holds")

    def check_attributes(self, item: Any, path: str) -> None:
        """Check the attributes of a group or data set: their number, types and sizes."""
        count = h5py.h5a.get_num_attrs(item)
        if count > ATTRIBUTES:
            raise UnsoundError(f"{path}: more than {ATTRIBUTES:,} attributes")
        for i in range(count):
            attribute = h5py.h5a.open(item, index=i)
            name = f"{path}: attribute {attribute.name.decode('utf-8', 'surrogateescape')}"
            element_type = attribute.get_type()
            check_type(element_type, name)
            shape = shape_of(attribute.get_space(), name)
            self._add_uncompressed(math.prod(shape) * element_type.get_size(), name, shape)


def shape_of(space: Any, where: str) -> tuple[int, ...]:
    """Return the shape of a data space; raise UnsoundError for a space without elements."""
    if space.get_simple_extent_type() not in (h5py.h5s.SCALAR, h5py.h5s.SIMPLE):
        raise UnsoundError(f"{where}: is empty")
    return tuple(int(n) for n in space.get_simple_extent_dims())


def members(kind: Any) -> list[Any]:
    """Return the types of the members of a compound type; for any other type, [the type]."""
    if kind.get_class() != h5py.h5t.COMPOUND:
        return [kind]
    return [kind.get_member_type(i) for i in range(kind.get_nmembers())]


def check_type(kind: Any, where: str, depth: int = 0) -> None:
    """Raise UnsoundError unless a type is a number, a boolean, a text, or a compound of a few of these."""
    type_class = kind.get_class()
    size = kind.get_size()
    if type_class == h5py.h5t.INTEGER and size in (1, 2, 4, 8):
        return
    if type_class == h5py.h5t.FLOAT and any(kind.equal(float_kind) for float_kind in FLOATS):
        return
    if type_class == h5py.h5t.STRING and (kind.is_variable_str() or 0 < size < 1 << 16):
        return
    if type_class == h5py.h5t.ENUM and size == 1 and kind.get_nmembers() == 2:  # h5py's booleans
        values = {kind.get_member_name(i): kind.get_member_value(i) for i in range(2)}
        if values == {b"FALSE": 0, b"TRUE": 1}:
            return
    if type_class == h5py.h5t.COMPOUND and depth == 0 and 0 < kind.get_nmembers() <= MEMBERS:
        for member in members(kind):
            check_type(member, where, 1)
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
    _FileChecker(length).check_group(h5py.h5g.open(file.id, b"/"), "", 0)


def read_all(group: h5py.Group) -> None:
    """Read all members that HDF5 has to decode: attributes, text, and data with filters."""
    dict(group.attrs)
    for item in group.values():
        if isinstance(item, h5py.Group):
            read_all(item)
            continue
        dict(item.attrs)
        if item.dtype.kind in "fiub" and not item.id.get_create_plist().get_nfilters():
            continue  # plain numbers, whose place in the file was checked
        if item.ndim == 0:
            item[()]
            continue
        rows = max(1, (1 << 23) // max(1, item.dtype.itemsize * math.prod(item.shape[1:])))
        for start in range(0, len(item), rows):
            np.asarray(item[start : start + rows])


def examine(path: str, inode: int) -> str:
    """Examine the file at ``path`` and return "ok", or a description of its problem in one line.

    A file at ``path`` with another ``inode`` has replaced the one to examine.
    """
    problem = "not a readable HDF5 file"
    try:
        with open(path, "rb") as raw:
            status = os.fstat(raw.fileno())
            if status.st_ino != inode:
                return "is another file now"
            # HDF5 reads the open file: at its path there may be another one by now.
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
    """Return the beginning of an error's text, as one line."""
    return " ".join(str(error).split())[:120] or type(error).__name__


def _serve() -> None:
    """Examine the files that stdin names, until it ends; the script's argument limits memory, in bytes."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when this one ends
    limit = int(sys.argv[1])
    with contextlib.suppress(ImportError):  # Windows has no limits on memory
        import resource

        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        path, inode = line.decode().split()
        answer = examine(os.fsdecode(bytes.fromhex(path)), int(inode))
        sys.stdout.write(answer.encode("ascii", "backslashreplace").decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
