"""Every reader, as a user calls it: on one mutated file, in a folder of its own."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import landscape
import landscape.cli
from landscape import data
from landscape.core.errors import LandscapeError
from landscape.data import speech
from landscape.data.images import FILES, decode, read_binary, read_idx
from landscape.paper import pages
from landscape.paper.record import Record
from landscape.training import topology as mixing
from landscape.training.recipes import recipe
from tests.fuzz import mutations, samples

Reader = Callable[[bytes, Path, random.Random], None]


class Uncaught(Exception):
    """What should have been one line was something else."""


def command(*words: str) -> None:
    """Run ``landscape WORDS``: it ends with 0, or with one line on stderr that a terminal shows as it is."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["landscape", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            landscape.cli.main()
    except SystemExit as stop:
        lines = [line for line in err.getvalue().splitlines() if "no checksum" not in line]
        lines = [line for line in lines if "Warning" not in line and not line.startswith("  ")]
        if stop.code not in (0, 1, 2) or len(lines) > 1 or (stop.code != 0 and not lines):
            raise Uncaught(f"exit {stop.code}, {lines}") from None
        if any(ord(c) < 32 and c != "\n" for c in out.getvalue() + err.getvalue()):
            raise Uncaught("control characters on the terminal") from None
        if stop.code:
            raise LandscapeError(lines[0]) from None
    finally:
        sys.argv = argv


def _hdf5(raw: bytes, folder: Path, rng: random.Random) -> None:
    path = folder / "x.h5"
    plain = mutations.unsealed(raw)
    if rng.random() < 0.5:
        path.write_bytes(mutations.damaged(raw if rng.random() < 0.2 else plain, rng))
    else:
        path.write_bytes(plain)
        mutations.rebuilt(path, rng)
        if rng.random() < 0.5:
            path.write_bytes(mutations.sealed(path.read_bytes()))
    command("info", str(path))


def _forged(raw: bytes, folder: Path, rng: random.Random) -> None:
    """Damage within, by someone who mends the checksum, seen by one of the readers."""
    path = folder / "last.h5"
    path.write_bytes(mutations.sealed(mutations.structure(mutations.unsealed(raw), rng)))
    if rng.random() < 0.5:
        landscape.load(path)
    else:
        command("info", str(path))


def _drawing(raw: bytes, folder: Path, rng: random.Random) -> None:
    path = folder / "x.h5"
    path.write_bytes(mutations.unsealed(raw))
    mutations.rebuilt(path, rng, values_only=True)
    style = rng.choice(["contour", "contour", "surface"]) if b"landscape.surface" in raw else "contour"
    command("plot", str(path), "-o", str(folder / rng.choice(["x.png", "x.svg"])), "--style", style)


def _idx(raw: bytes, folder: Path, rng: random.Random) -> None:
    good = np.zeros((6, 3, 3), np.uint8), np.arange(6, dtype=np.uint8) % 3
    suffix = ".gz" if raw[:2] == b"\x1f\x8b" else ""
    odd = rng.randrange(4)
    for i, name in enumerate(FILES):
        (folder / name).write_bytes(samples.idx(good[i % 2]))
    bad = mutations.damaged(raw, rng)
    if rng.random() < 0.2:
        sizes = b"".join(rng.choice(mutations.NUMBERS[:9]).to_bytes(8, "big")[-4:] for _ in range(4))
        start = b"\0\0\x08" + bytes([rng.choice([0, 1, 3, 4, 255])])
        bad = start + sizes + bytes(rng.choice([0, 9, 1 << 22]))
        bad = gzip.compress(bad, 1) if suffix else bad
    (folder / (FILES[odd] + suffix)).write_bytes(bad)
    read_idx(folder / (FILES[odd] + suffix))
    data.load("mnist", data_dir=folder)


def _mutated(name: str, read: Callable[[Path], object], mutate: Callable[..., bytes]) -> Reader:
    def reader(raw: bytes, folder: Path, rng: random.Random) -> None:
        path = folder / name
        path.write_bytes(mutate(raw, rng))
        read(path)

    return reader


def _bytes(name: str, read: Callable[[Path], object]) -> Reader:
    return _mutated(name, read, mutations.damaged)


def _text(name: str, read: Callable[[Path], object]) -> Reader:
    return _mutated(name, read, mutations.spliced)


def _state(raw: bytes, folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(["x.pt", "x.bin", "x.pth"])
    path.write_bytes(mutations.state(raw, rng, folder / "ran"))
    landscape.import_state(path, samples.net(), message=lambda line: None)


def _index(path: Path) -> None:
    """A mutated index beside a sound file."""
    (path.parent / "x.bin").write_bytes(samples.saved(samples.net().state_dict()))
    landscape.import_state(path, samples.net())


def _list(path: Path) -> None:
    for name in ("a.wav", "b.wav"):
        (path.parent / name).write_bytes(samples.wav())
    speech._read_list(path)


def _matrix(path: Path) -> None:
    mixing.read_matrix("algorithm.mixing", path, 4)


def _page(path: Path) -> None:
    """The page of a folder with one figure, of which the other file is sound."""
    for suffix, kind in ((".json", "page"), (".csv", "rows")):
        if path.suffix != suffix:
            path.with_suffix(suffix).write_bytes(samples.PAGE[kind])
    pages.page(path.parent)


def _environment(raw: bytes, folder: Path, rng: random.Random) -> None:
    """One variable that launchers set is not what it should be; the others are, of a run of one process."""
    path = folder / "x.toml"
    path.write_bytes(samples.TOML.encode())
    good = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    good |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    name = rng.choice([*good])
    value = mutations.damaged(raw, rng).replace(b"\0", b"") if rng.random() < 0.7 else raw
    text = os.fsdecode(value)
    if name == "MASTER_ADDR" or text.strip().isdigit():
        return  # it may be right
    pid = os.fork()  # a process that a launcher started ends itself
    if pid == 0:
        os.dup2(os.open(folder / "err", os.O_WRONLY | os.O_CREAT), 2)
        os.environ.update({**good, name: text})
        sys.argv = ["landscape", "train", str(path), "-o", str(folder / "run"), "-q"]
        sys.stderr = os.fdopen(2, "w")
        try:
            landscape.cli.main()
        except SystemExit as stop:
            sys.stderr.flush()
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        os._exit(99)
    code, lines = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), (folder / "err").read_text().splitlines()
    lines = [line for line in lines if "Warning" not in line and not line.startswith("  ")]
    if code == 0 and not lines:
        return  # nothing depended on it
    if code not in (1, 2) or len(lines) != 1:
        raise Uncaught(f"{name}={text!r}: exit {code}, {lines[-3:]}")
    raise LandscapeError(lines[0])


READERS: dict[str, Reader] = {
    "hdf5": _hdf5,
    "forged": _forged,
    "drawing": _drawing,
    "idx": _idx,
    "cifar": _bytes("data_batch_1.bin", lambda path: read_binary(path, 1, 10)),
    "image": _bytes("x.png", lambda path: decode(path, 8, 0.0)),
    "wav": _bytes("x.wav", lambda path: speech.log_mel(speech.read_wav(path, 8000), 8000, 20)),
    "state": _state,
    "safetensors": _bytes("x.safetensors", lambda path: landscape.import_state(path, samples.net())),
    "index": _text("x.bin.index.json", _index),
    "matrix.npy": _bytes("m.npy", _matrix),
    "matrix.csv": _text("m.csv", _matrix),
    "list.csv": _text("train.csv", _list),
    "recipe": _text("x.toml", lambda path: recipe.read(str(path))),
    "page": _text("fig2a.json", _page),
    "rows": _text("fig2a.csv", _page),
    "record": _text("x.json", lambda path: Record.read(path.read_bytes(), recipe.read("digits-dpsgd"), "x")),
    "environment": _environment,
}
