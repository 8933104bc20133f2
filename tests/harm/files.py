"""Every function that reads files, on one mutated file, in its own folder, with limits on time and memory."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gzip
import io
import multiprocessing
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch

import landscape
import landscape.cli
from landscape import data
from landscape.core import hdf5
from landscape.core.errors import LandscapeError
from landscape.data import speech
from landscape.data.images import FILES, decode, read_binary, read_idx
from landscape.paper import pages
from landscape.paper.record import Record
from landscape.training.recipes import recipe
from landscape.training.topology import read_matrix
from tests.harm import Tally, mutations, samples

SECONDS, BYTES = 30.0, 4 << 30
Read = Callable[[bytes, Path, random.Random], object]


class Case(NamedTuple):
    """The share of the inputs, the sound files and what is done with a mutated one."""

    share: int
    sound: Callable[[], list[bytes]]
    read: Read


def command(*words: str) -> None:
    """Run ``landscape WORDS``: it ends with 0, or with one line on stderr that a terminal shows as it is."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["landscape", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            landscape.cli.main()
    except SystemExit as stop:
        unasked = ("no checksum", "Warning")
        told = [s for s in err.getvalue().splitlines() if not any(w in s for w in unasked) and s[:2] != "  "]
        if stop.code not in (0, 1, 2) or len(told) != (stop.code != 0):
            raise AssertionError(f"exit {stop.code}, {told[-3:]}") from None
        if any(ord(c) < 32 and c != "\n" for c in out.getvalue() + err.getvalue()):
            raise AssertionError("control characters on the terminal") from None
        if stop.code:
            raise LandscapeError(told[0]) from None
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
    rng.choice([landscape.load, functools.partial(command, "info")])(str(path))


def _drawing(raw: bytes, folder: Path, rng: random.Random) -> None:
    path = folder / "x.h5"
    path.write_bytes(mutations.unsealed(raw))
    mutations.rebuilt(path, rng, values_only=True)
    style = rng.choice(["contour", "contour", "surface"]) if b"landscape.surface" in raw else "contour"
    command("plot", str(path), "-o", str(folder / rng.choice(["x.png", "x.svg"])), "--style", style)


def _idx(raw: bytes, folder: Path, rng: random.Random) -> None:
    """One of the four files of a data set, which is read by itself and with the others."""
    good = np.zeros((6, 3, 3), np.uint8), np.arange(6, dtype=np.uint8) % 3
    for i, name in enumerate(FILES):
        (folder / name).write_bytes(samples.idx(good[i % 2]))
    suffix = ".gz" if raw[:2] == b"\x1f\x8b" else ""
    bad, path = mutations.damaged(raw, rng), folder / (rng.choice(FILES) + suffix)
    if rng.random() < 0.2:
        sizes = b"".join(rng.choice(mutations.NUMBERS[:9]).to_bytes(8, "big")[-4:] for _ in range(4))
        bad = (
            b"\0\0\x08" + bytes([rng.choice([0, 1, 3, 4, 255])]) + sizes + bytes(rng.choice([0, 9, 1 << 22]))
        )
        bad = gzip.compress(bad, 1) if suffix else bad
    path.write_bytes(bad)
    read_idx(path)
    data.load("mnist", data_dir=folder)


def _mutated(mutate: Callable[..., bytes], name: str, read: Callable[[Path], object]) -> Read:
    def reader(raw: bytes, folder: Path, rng: random.Random) -> None:
        path = folder / name
        path.write_bytes(mutate(raw, rng))
        read(path)

    return reader


_bytes = functools.partial(_mutated, mutations.damaged)
_text = functools.partial(_mutated, mutations.spliced)


def _weights(path: Path) -> None:
    landscape.import_state(path, samples.net(), message=lambda line: None)


def _state(raw: bytes, folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice(["x.pt", "x.bin", "x.pth"])
    path.write_bytes(mutations.state(raw, rng, folder / "ran"))
    _weights(path)


def _index(path: Path) -> None:
    """A mutated index beside a sound file."""
    (path.parent / "x.bin").write_bytes(samples.saved(samples.net().state_dict()))
    _weights(path)


def _list(path: Path) -> None:
    for name in ("a.wav", "b.wav"):
        (path.parent / name).write_bytes(samples.wav())
    speech._read_list(path)


def _matrix(path: Path) -> None:
    read_matrix("algorithm.mixing", path, 4)


def _page(path: Path) -> None:
    """The page of a folder with one figure, of which the other file is sound."""
    for suffix, raw in samples.PAGE.items():
        if path.suffix != suffix:
            path.with_suffix(suffix).write_bytes(raw)
    pages.page(path.parent)


def _record(path: Path) -> None:
    Record.read(path.read_bytes(), recipe.read("digits-dpsgd"), "x")


# Most for the format that has the most to go wrong, half for checksums that are forged.
CASES = {
    "forged": Case(104, samples.hdf5, _forged),
    "hdf5": Case(40, samples.hdf5, _hdf5),
    "drawing": Case(4, samples.hdf5, _drawing),
    "idx": Case(8, samples.idx_files, _idx),
    "cifar": Case(
        2,
        lambda: [bytes(range(256)) * 24 + b"\1\2"],
        _bytes("data_batch_1.bin", lambda path: read_binary(path, 1, 10)),
    ),
    "image": Case(8, samples.images, _bytes("x.png", lambda path: decode(path, 8, 0.0))),
    "wav": Case(
        6,
        lambda: [samples.wav()],
        _bytes("x.wav", lambda path: speech.log_mel(speech.read_wav(path, 8000), 8000, 20)),
    ),
    "state": Case(10, samples.states, _state),
    "safetensors": Case(
        5, lambda: [safetensors.torch.save(samples.net().state_dict())], _bytes("x.safetensors", _weights)
    ),
    "index": Case(
        4,
        lambda: [b'{"metadata": {}, "weight_map": {"0.weight": "x.bin", "0.bias": "x.bin"}}'],
        _text("x.bin.index.json", _index),
    ),
    "matrix.npy": Case(
        5,
        lambda: [samples.written(np.save, np.full((4, 4), 0.25, kind)) for kind in ("<f8", "<f4")],
        _bytes("m.npy", _matrix),
    ),
    "matrix.csv": Case(2, lambda: [b"\n".join([b"0.25,0.25,0.25,0.25"] * 4)], _text("m.csv", _matrix)),
    "list.csv": Case(2, lambda: [b"path,label\na.wav,yes\nb.wav,no\n"], _text("train.csv", _list)),
    "recipe": Case(6, lambda: [samples.TOML.encode()], _text("x.toml", lambda path: recipe.read(str(path)))),
    "page": Case(1, lambda: [samples.PAGE[".json"]], _text("fig2a.json", _page)),
    "rows": Case(1, lambda: [samples.PAGE[".csv"]], _text("fig2a.csv", _page)),
    "record": Case(3, samples.record, _text("x.json", _record)),
}


def plan(inputs: int) -> list[tuple[str, int]]:
    """(case, number) of each input; the number is the seed of its mutation."""
    total = sum(case.share for case in CASES.values())
    return [(name, i) for name, case in CASES.items() for i in range(max(1, inputs * case.share // total))]


def one(name: str, number: int, folder: Path) -> str:
    """What became of an input: "taken", "refused", or the last line and place of what was raised."""
    rng, sound = random.Random(f"{name} {number}"), CASES[name].sound()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "secret.bin").write_bytes(b"secret" * 99)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CASES[name].read(sound[number % len(sound)], folder, rng)
    except LandscapeError as error:
        return f"two lines: {error!s:.200}" if "\n" in str(error) else "refused"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        place = ([f for f in where if "/landscape/" in f.filename] or where)[-1]
        return f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {' '.join(str(error).split())[:200]}"
    return "code was run" if (folder / "ran").exists() else "taken"


def _child(todo: Sequence[tuple[str, int]], pipe: Connection, folder: Path) -> None:
    """Work through ``todo``; sends how each input ended, and how many MiB this process has taken."""
    faulthandler.disable()  # which pytest turns on: a crash is told by this process's end
    torch.set_num_threads(1)
    base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (base + BYTES, base + BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, number in todo:
        ended = one(name, number, folder)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pipe.send((f"{used >> 10} MiB of memory" if used - start > BYTES >> 10 else ended, used / 1024))
    hdf5._validator.stop()


def attack(todo: Sequence[tuple[str, int]]) -> Tally:
    """What becomes of all inputs, in one process after another: each is replaced when it dies."""
    tally, done, fork = Tally(), 0, multiprocessing.get_context("fork")
    for name, _ in todo:
        CASES[name].sound()  # which the children inherit
    with tempfile.TemporaryDirectory() as folder:
        while done < len(todo):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(todo[done:], theirs, Path(folder) / "one"))
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # that this process has threads; the child starts none of them again
                process.start()
            theirs.close()
            ended = "taken"
            while done < len(todo) and ended:
                ended = ""
                try:
                    if ours.poll(SECONDS):
                        ended, used = ours.recv()
                        tally.most = max(tally.most, used)
                    else:
                        process.kill()
                        word = f"nothing for {SECONDS:g} s"
                except EOFError:
                    process.join()
                    word = f"the process ended with status {process.exitcode}"
                name, number = todo[done]
                done += 1
                fine = ended in ("taken", "refused")
                tally.counts[f"{name}: {ended if fine else 'FAILED'}"] += 1
                if not fine:
                    tally.wrong.append(f"{name} {number}: {ended or word}")
            process.join()
    return tally
