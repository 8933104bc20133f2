"""Mutations of files: of their bytes, and of HDF5 files by their objects, types, shapes, links and values."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from tests.harm import samples

NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
TEXTS = [
    "", "x", "²", "\x1b[31mred\x1b[0m", "$\\frac{$", "a$b$c", "$$", "\x00", "a" * 9999, "{", "9" * 400, "1e999",
    "nan", "../../etc/passwd", "%s%n", "\u202e", "\ud800", '{"name": 1}', "[" * 5000, "module:name",
    "os:system", "-1", "\n\r\t", "\\", "null", "True",
]  # fmt: skip
FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e300, -1e300, 1e-320, -1.0, 1e38, 3.0]


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """``raw`` with a few bytes flipped, replaced, removed, repeated, moved, or cut off."""
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        place, start = rng.randrange(len(out) + 1), rng.randrange(len(out) + 1)
        # The beginning and the end hold most of what is not mere data.
        place = rng.choice([place, min(place, rng.randrange(200)), max(0, len(out) - rng.randrange(1, 200))])
        length, size = rng.choice([1, 2, 4, 8, 64, 512]), rng.choice([1, 2, 4, 8])
        number = rng.choice(NUMBERS) % (1 << 8 * size)
        replaced, new = rng.choice([
            (1, bytes(byte ^ 1 << rng.randrange(8) for byte in out[place : place + 1])),
            (size, number.to_bytes(size, rng.choice(["little", "big"]))),
            (length, b""), (0, rng.randbytes(length)), (length, bytes(length)), (length, rng.randbytes(length)),
            (length, out[start : start + length]), (len(out) if rng.random() < 0.3 else 1, b""),
        ])  # fmt: skip
        out[place : place + replaced] = new
    return bytes(out)


# What HDF5's own structures begin with: B-trees, tables of names, heaps, headers of objects.
SIGNATURES = re.compile(rb"TREE|SNOD|HEAP|GCOL|OHDR|OCHK|FRHP|FHDB|FHIB|FSHD|BTHD|BTLF|BTIN|FAHD|EAHD")


def structure(raw: bytes, rng: random.Random) -> bytes:
    """An HDF5 file with damage in the superblock, a B-tree, a heap, a header or one of its messages."""
    out = bytearray(raw)
    places = [0, *(found.start() for found in SIGNATURES.finditer(raw))]
    # A table of names has the addresses of the headers of objects, which have no signature of their own.
    words = [struct.unpack_from("<Q", raw, place)[0] for place in range(0, len(raw) - 8, 8)]
    headers = [word for word in set(words) if 96 <= word < len(raw) - 16 and raw[word : word + 2] == b"\1\0"]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        start = rng.choice(rng.choice([places, places, headers or places]))
        place = min(start + rng.randrange(rng.choice([16, 64, 64, 600])), len(out) - 8)
        place -= (place - start) % rng.choice([1, 2, 8, 8])
        size, code = rng.choice([(1, "B"), (2, "H"), (4, "I"), (8, "Q"), (8, "Q")])
        old = int.from_bytes(out[place : place + size], "little")
        number = rng.choice([
            rng.choice(NUMBERS), rng.choice(places + headers), start, old + rng.choice([-8, -1, 1, 8]),
            old ^ 1 << rng.randrange(8 * size), rng.randrange(len(out)), rng.randrange(32),
        ])  # fmt: skip
        struct.pack_into("<" + code, out, place, number % (1 << 8 * size))
    return bytes(out)


def sealed(raw: bytes) -> bytes:
    """``raw`` with a checksum that fits."""
    return raw + f"\nlandscape sha256 {hashlib.sha256(raw).hexdigest()}\n".encode()


def unsealed(raw: bytes) -> bytes:
    """``raw`` as version 0.6.0 wrote it."""
    return raw[:-83] if raw[-83:].startswith(b"\nlandscape sha256 ") else raw


def _objects(file: h5py.File) -> list[str]:
    names: list[str] = []
    with contextlib.suppress(UnicodeDecodeError):  # of a name that an earlier mutation made
        file.visit(names.append)
    return names


def rebuilt(path: Path, rng: random.Random, values_only: bool = False) -> None:
    """Change the HDF5 file at ``path``, which stays one that HDF5 reads."""
    changes = [_new_values, _new_values, _new_attribute] if values_only else CHANGES
    with h5py.File(path, "r+") as file:
        for _ in range(rng.choice([1, 1, 2])):
            if not (names := _objects(file)):
                return
            name = rng.choice(names)
            rng.choice(changes)(file, name, rng)


def _new_values(file: h5py.File, name: str, rng: random.Random) -> None:
    data = file[name]
    if not isinstance(data, h5py.Dataset) or data.dtype.kind not in "fiu" or not 0 < data.size < 1 << 24:
        return
    if data.is_virtual:  # an earlier mutation made it: of itself, which HDF5 2.0 reads without end
        return
    values = data[()]
    odd = np.array(rng.choice(FLOATS))
    with np.errstate(all="ignore"):
        odd = (odd if data.dtype.kind == "f" else np.array(rng.choice([0, 1, 2, 100]))).astype(data.dtype)
    if data.ndim == 0 or rng.random() < 0.4:
        data[...] = np.full_like(values, odd)
    else:
        flat = values.ravel()
        for _ in range(rng.choice([1, 3])):
            flat[rng.randrange(flat.size)] = odd
        data[...] = flat.reshape(values.shape)


def _new_attribute(file: h5py.File, name: str, rng: random.Random) -> None:
    holder = file[name] if rng.random() < 0.2 else file
    keys = list(holder.attrs)
    key = rng.choice(keys) if keys and rng.random() < 0.9 else rng.choice(["x", "²", "\x1b[2J"])
    if rng.random() < 0.1 and key in holder.attrs:
        del holder.attrs[key]
        return
    text = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
    value: Any = rng.choice([
        lambda: text.replace(b"\0", b""), lambda: np.bytes_(text), lambda: rng.choice(FLOATS),
        lambda: rng.choice(NUMBERS[:-1]), lambda: np.zeros((2, 2)), lambda: h5py.Empty("f4"),
        lambda: np.array([text.replace(b"\0", b"")] * 2, dtype=h5py.string_dtype()), lambda: np.zeros(0),
        lambda: True, lambda: file.ref, lambda: 1j, lambda: text.decode("latin1").replace("\0", ""),
    ])()  # fmt: skip
    holder.attrs[key] = value


def _virtual(file: h5py.File, name: str, source: str) -> None:
    layout = h5py.VirtualLayout(shape=(4, 83), dtype="f4")
    layout[:] = h5py.VirtualSource(source, name.replace("%", "%%"), shape=(4, 83))  # % begins a format
    file.create_virtual_dataset(name, layout)


def _unknown_filter(file: h5py.File, name: str) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((4, 83))
    made.set_filter(299, h5py.h5z.FLAG_OPTIONAL, (1,))
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4, 83)), made)


# What stands in the place of data, and what is said where it stands in that of a checkpoint's weights.
HOSTILE: dict[str, tuple[Callable[[h5py.File, str], object], str]] = {
    "virtual": (lambda f, name: _virtual(f, name, "secret.bin"), "virtual"),
    "virtual on itself": (lambda f, name: _virtual(f, name, "."), "virtual"),
    "external storage": (
        lambda f, name: f.create_dataset(name, (4, 83), "f4", external=[("secret.bin", 0, h5py.h5f.UNLIMITED)]), "another file"),
    "external link": (lambda f, name: f.__setitem__(name, h5py.ExternalLink("secret.bin", "/x")), "another file"),
    "soft link": (lambda f, name: f.__setitem__(name, h5py.SoftLink("/rule/x")), "soft link"),
    "references": (lambda f, name: f.create_dataset(name, data=np.array([f.ref] * 4, dtype=h5py.ref_dtype)), "must hold numbers"),
    "bytes": (lambda f, name: f.create_dataset(name, data=np.full((4, 83), b"x")), "one of the kinds"),
    "text": (lambda f, name: f.create_dataset(name, data=np.array(["a", "²"], dtype=h5py.string_dtype())), "one of the kinds"),
    "lists": (lambda f, name: f.create_dataset(name, (2,), h5py.vlen_dtype("f4")), "must hold numbers"),
    "opaque": (lambda f, name: f.create_dataset(name, (2,), h5py.opaque_dtype("V9")), "must hold numbers"),
    "complex": (lambda f, name: f.create_dataset(name, data=np.zeros(2, "c16")), "one of the kinds"),
    "rows": (lambda f, name: f.create_dataset(name, data=np.zeros(2, [("a", "f4"), ("b", "S3")])), "one of the kinds"),
    "nothing": (lambda f, name: f.create_dataset(name, data=h5py.Empty("f4")), ""),
    "group": (lambda f, name: f.create_group(name), "is a group"),
    "filter": (_unknown_filter, "filter 299"),
    "missing chunks": (lambda f, name: f.create_dataset(name, (4, 83), "f4", chunks=(1, 83)), "more than the file holds"),
    "10^12 elements": (lambda f, name: f.create_dataset(name, (10**6, 10**6), "f4"), "are there"),
    "2^40 in chunks": (lambda f, name: f.create_dataset(name, (1 << 40, 1), "f4", chunks=(1 << 16, 1)), "more than the file"),
    "deep": (lambda f, name: f.create_group(name + "/a" * 9), "8 deep"),
    "circle": (lambda f, name: f.__setitem__(name, f["/"]), "in a circle"),
}  # fmt: skip


def _new_data(file: h5py.File, name: str, rng: random.Random) -> None:
    """Something hostile, or data of another shape or type, packed or not."""
    old = file[name]
    shape = old.shape if isinstance(old, h5py.Dataset) else (3,)
    del old, file[name]
    if rng.random() < 0.7:
        rng.choice([*HOSTILE.values()])[0](file, name)
        return
    odd = tuple(rng.choice([0, 1, 2, 7, n]) for n in shape) + (2,) * rng.choice([0, 0, 1])
    kind = rng.choice(["f4", "f8", "i8", "u1", "f2", "?", ">f8"])
    packed = {"compression": rng.choice(["gzip", "lzf"]), "chunks": True} if odd and 0 not in odd else {}
    file.create_dataset(name, data=np.zeros(odd, kind), **rng.choice([{}, packed]))


def _another_name(file: h5py.File, name: str, rng: random.Random) -> None:
    del file[name]
    if names := [n for n in _objects(file) if not name.startswith(n)]:
        file[name] = file[rng.choice(names)]


def _new_name(file: h5py.File, name: str, rng: random.Random) -> None:
    text = rng.choice([*TEXTS, "²", "0", "00", "1", "history", "weights", "layout"])
    new = text.encode("utf-8", "surrogatepass").replace(b"\0", b"").replace(b"/", b"").replace(b".", b"")
    if new and not file.id.links.exists(new):
        file.id.link(name.encode(), new, h5py.h5g.LINK_HARD)
        if rng.random() < 0.5:
            del file[name]


def _removed(file: h5py.File, name: str, rng: random.Random) -> None:
    del file[name]


CHANGES = [_new_values, _new_attribute, _new_attribute, *[_new_data] * 3, _another_name, _new_name, _removed]


class Runs:
    """Code that a pickle would run: it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.trace}'",)


#: What is said of tensors that are no plain numbers, and how zeros become such.
ODD_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta": lambda zeros: zeros.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "quantized": lambda zeros: torch.quantize_per_tensor(zeros, 0.1, 0, torch.qint8),
    "float8_e4m3fn": lambda zeros: zeros.to(torch.float8_e4m3fn),
    "int8": torch.Tensor.char,
    "complex64": lambda zeros: zeros.to(torch.complex64),
}


def state(raw: bytes, rng: random.Random, trace: Path) -> bytes:
    """A file of torch.save: with code in it, with odd tensors, as a bomb, or damaged."""
    good = samples.net().state_dict()
    key = rng.choice(list(good))
    shape = good[key].shape
    odd: list[Callable[[], Any]] = [
        lambda: Runs(trace),
        *(functools.partial(make, torch.zeros(shape)) for make in ODD_TENSORS.values()),
        lambda: torch.zeros(1).expand(1 << 20, 1 << 20),
        lambda: torch.zeros((*shape, 2)),
        lambda: torch.full(shape, float("nan")),
        lambda: "text",
        lambda: [1, 2],
        lambda: {"a": torch.zeros(shape)},
        lambda: np.zeros(shape),
        lambda: torch.zeros(shape, dtype=torch.bool),
        lambda: torch.zeros(shape, dtype=torch.uint16),
    ]
    how = rng.randrange(4)
    if how == 0:
        return damaged(raw, rng)
    if how == 1:
        return pickle.dumps(rng.choice([Runs(trace), {key: Runs(trace)}, {"state_dict": Runs(trace)}]))
    if how == 2 and raw.startswith(b"PK"):
        return repacked(raw, rng)
    made = dict(good)
    made[rng.choice([key, "\x1b[2J", "a$b", 3])] = rng.choice(odd)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return samples.saved(rng.choice([made, made, {"model": made}, [made], made[key], None]))


def repacked(raw: bytes, rng: random.Random) -> bytes:
    """A zip archive with an entry that is damaged or replaced by 100 MB of zeros, compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive, zipfile.ZipFile(out, "w") as new:
        chosen = rng.choice(archive.namelist())
        for name in archive.namelist():
            data = archive.read(name)
            if name == chosen and rng.random() < 0.1:
                new.writestr(name, bytes(100_000_000), zipfile.ZIP_DEFLATED)
            else:
                new.writestr(name, damaged(data, rng) if name == chosen else data)
    return out.getvalue()


def spliced(raw: bytes, rng: random.Random) -> bytes:
    """Text with one of its words, or a number, replaced by an odd one."""
    text = raw.decode("utf-8", "replace")
    words = [w for w in text.replace("=", " ").replace(",", " ").split() if w]
    if not words or rng.random() < 0.3:
        return damaged(raw, rng)
    new = rng.choice(
        [*TEXTS, *map(str, NUMBERS), "{" * 1000, "[" * 1000, "a." * 500 + "a", "1e39", "true", "[]", '""']
    )
    return text.replace(rng.choice(words), new, rng.choice([1, -1])).encode("utf-8", "surrogatepass")
