"""Files: whole or not there; broken, hostile and odd ones are not followed or trusted, and one line says what is wrong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import io
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

import landscape
from landscape import LandscapeError, OperationError, data
from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.states import read_state
from landscape.core import files, hdf5, hdf5_check
from landscape.core.files import Lock, printable, replacing, write_text
from landscape.data.images import FILES, decode, read_idx
from landscape.data.speech import read_wav
from landscape.training.recipes import recipe
from landscape.training.run import launch
from landscape.training.topology import read_matrix
from tests import problems
from tests.conftest import Command, wait_for
from tests.harm import samples
from tests.harm.mutations import HOSTILE, ODD_TENSORS, sealed, unsealed
from tests.test_cli import one_line

Change = Callable[[h5py.File], Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound file of every schema."""
    folder = tmp_path_factory.mktemp("sound")
    for name, result in samples.results().items():
        result.save(folder / f"{name}.h5")
    return folder


def changed(source: Path, target: Path, change: Change, seal: bool = False) -> Path:
    """``source`` with ``change`` made to it; with ``seal``, by someone who mended the checksum."""
    target.write_bytes(unsealed(source.read_bytes()))
    with h5py.File(target, "r+") as file:
        change(file)
    if seal:
        target.write_bytes(sealed(target.read_bytes()))
    return target


def instead(name: str, make: Change) -> Change:
    return lambda file: (file.__delitem__(name), make(file))


def attribute(name: str, value: Any) -> Change:
    return lambda file: file.attrs.__setitem__(name, value)


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_but_the_data_in_a_file_is_read(name: str, sound: Path, tmp_path: Path) -> None:
    make, words = HOSTILE[name]
    shutil.copy(sound / "checkpoint.h5", tmp_path / "secret.bin")
    for seal in (False, True):
        change = instead("weights", lambda file: make(file, "weights"))
        path = changed(sound / "checkpoint.h5", tmp_path / "x.h5", change, seal)
        lines = f"x.h5.*/weights.*{re.escape(words)}|x.h5.*{words}.*/weights"
        with pytest.raises(OperationError, match=lines):
            landscape.load(path)


def test_a_small_file_takes_little_memory(sound: Path, tmp_path: Path) -> None:
    def bomb(file: h5py.File) -> None:
        file.create_dataset("loss", (10, 1 << 20), "f8", chunks=(1, 1 << 20), compression="gzip")[...] = 0.0

    path = changed(sound / "surface.h5", tmp_path / "x.h5", instead("loss", bomb))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(OperationError, match="/loss: shape .* is too much for this file"):
        landscape.load(path)


def own_child(raw: bytes) -> bytes:
    """``raw`` with the B-tree of its root as the child of itself."""
    at = raw.index(b"TREE")
    return raw[: at + 5] + b"\1" + raw[at + 6 : at + 32] + struct.pack("<Q", at) + raw[at + 40 :]


def own_sibling(raw: bytes) -> bytes:
    """``raw`` with a heap whose list of free blocks goes round in a circle."""
    place = raw.index(b"HEAP")
    heap = struct.unpack_from("<Q", raw, place + 24)[0]
    free = struct.pack("<QQ", 0, 16)
    return raw[: place + 16] + bytes(8) + raw[place + 24 : heap] + free + raw[heap + 16 :]


def many_names(raw: bytes) -> bytes:
    """A file of eight groups within each other, each with ten names in the one above."""
    buffer = io.BytesIO(raw)
    with h5py.File(buffer, "r+") as file:
        inner = file.create_group("bottom")
        for level in range(7):
            outer = file.create_group(f"level {level}")
            for name in range(10):
                outer[str(name)] = inner
            inner = outer
    return buffer.getvalue()


def packed_twice(raw: bytes) -> bytes:
    """A small file with a column of a gigabyte, gzip of gzip."""
    buffer = io.BytesIO(raw)
    with h5py.File(buffer, "r+") as file:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((1 << 20,))
        made.set_deflate(9)
        made.set_deflate(9)
        space = h5py.h5s.create_simple((1 << 20,))
        data = h5py.h5d.create(file.id, b"packed", h5py.h5t.IEEE_F64LE, space, made)
        once = zlib.compressobj(1)
        zeros = b"".join(once.compress(bytes(1 << 20)) for _ in range(1 << 10)) + once.flush()
        data.write_direct_chunk((0,), zlib.compress(zeros, 9))
    return buffer.getvalue()


# A process of its own: the memory of a child counts that of the process it was forked from.
PEAK = """
import resource, sys, landscape
from landscape.core import hdf5
for path in sys.argv[1:]:
    try:
        landscape.load(path)
    except landscape.OperationError:
        hdf5._validator.stop()
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
FORGED = {
    own_child: "damaged or incomplete (HDF5 crashes",
    own_sibling: "damaged or incomplete",
    many_names: "second name",
    packed_twice: "filter 1 is not allowed",
}


def test_a_forged_checksum_opens_no_door(sound: Path, tmp_path: Path, command: Command) -> None:
    """Whoever mends the checksum does not crash, hold up or fill the process that reads the file."""
    raw = unsealed((sound / "checkpoint.h5").read_bytes())
    for forge, words in FORGED.items():
        path = tmp_path / f"{forge.__name__}.h5"
        path.write_bytes(sealed(forge(raw)))
        hdf5._validator.stop()
        begun = time.monotonic()
        with pytest.raises(OperationError, match=re.escape(words)):
            landscape.load(path)
        assert time.monotonic() - begun < hdf5.PATIENCE
        one_line(command("info", path), 1, path.name, words)
    for reader in ("contour", "plot"):
        one_line(command(reader, path), 1, path.name, words)
    hdf5._validator.stop()
    argv = [sys.executable, "-c", PEAK, *(tmp_path / f"{forge.__name__}.h5" for forge in FORGED)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= hdf5.MEMORY >> 10


def test_each_state_is_examined_once(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote it, and also where its content is another one of the same size and time."""
    asked, path, raw = [], tmp_path / "a.h5", (sound / "line.h5").read_bytes()
    landscape.load(sound / "line.h5").save(path)
    monkeypatch.setattr(hdf5._validator, "fault_of", lambda place, stamp: asked.append(place) or "")
    for count in (1, 2, 3):
        time.sleep(2 * hdf5.TICK / 1e9)
        landscape.load(path)
        assert len(asked) == count
        status = path.stat()
        path.write_bytes(raw)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_page_on_security_has_the_limits_of_the_code() -> None:
    page = (Path(__file__).parents[1] / "SECURITY.md").read_text("utf-8")
    memory = f"{hdf5.MEMORY >> 20} MiB plus four times the length of the file"
    seconds = f"{hdf5.PATIENCE:.0f} s plus 1 s for every {hdf5.PACE / 1e6:.0f} MB."
    assert f"{memory}, and {seconds}" in page


def test_every_flipped_bit_is_noticed(sound: Path, tmp_path: Path) -> None:
    path, raw = tmp_path / "x.h5", (sound / "checkpoint.h5").read_bytes()
    for place in [
        *range(9, len(raw) - 83, 997),
        raw.index(np.float32(Checkpoint.load(sound / "checkpoint.h5").weights[1, 2]).tobytes()) + 3,
    ]:
        flipped = bytearray(raw)
        flipped[place] ^= 0x40
        path.write_bytes(flipped)
        with pytest.raises(OperationError, match="x.h5: damaged, its checksum does not fit"):
            landscape.load(path)


def test_files_without_a_checksum_open_with_a_word(sound: Path, tmp_path: Path, command: Command) -> None:
    for source in sorted(sound.glob("[chl]*.h5")):
        path = tmp_path / source.name
        path.write_bytes(unsealed(source.read_bytes()))
        with pytest.warns(hdf5.ChecksumWarning, match=f"{path.name}: has no checksum"):
            landscape.load(path)
    assert "checksum: SHA-256" in command("info", source)[1]
    warnings.simplefilter("default")  # pytest undoes it
    code, out, err = command("info", path)
    assert (code, err.count("\n"), "checksum: none\n" in out) == (0, 1, True)
    assert err.startswith(f"landscape: {path}: has no checksum")


@pytest.mark.parametrize(
    ("how", "words"), [(signal.SIGSTOP, "does not come to an end in 1 s"), (signal.SIGKILL, "crash")]
)
def test_a_file_that_hdf5_loops_or_crashes_over_harms_only_the_validator(
    how: signal.Signals, words: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{i}.h5" for i in range(3)]
    for path in paths:
        path.write_bytes(unsealed((sound / "line.h5").read_bytes()))
    landscape.load(paths[0])
    process = hdf5._validator._process
    assert process is not None
    os.kill(process.pid, how)
    monkeypatch.setattr(hdf5, "PATIENCE", 1.0)  # not before: a busy machine may take longer over a sound file
    with pytest.raises(OperationError, match=f"1.h5: damaged .*{words}"):
        landscape.load(paths[1])
    monkeypatch.undo()
    landscape.load(paths[2])


def not_utf8(file: h5py.File) -> None:
    rows = file["layout"][...]
    rows[0]["name"] = b"\xff\xfe"
    file["layout"][...] = rows


ODD: dict[str, tuple[str, Change, str]] = {
    "version": ("checkpoint", attribute("version", "x"), "version"),
    "version of a result": ("surface", attribute("version", np.zeros(2)), "version"),
    "schema": ("surface", attribute("schema", 3), "of another program"),
    "newer version": ("surface", attribute("version", 9), "version 9 is newer"),
    "unknown schema": ("surface", attribute("schema", "landscape.weather"), "landscape.weather"),
    "no loss": ("surface", lambda f: f.__delitem__("loss"), "damaged or incomplete"),
    "no norm": ("surface", lambda f: f.attrs.__delitem__("norm"), "damaged or incomplete"),
    "loss of another shape": ("surface", instead("loss", lambda f: f.__setitem__("loss", np.zeros((5, 5)))), "loss has shape"),
    "schema of two lines": ("surface", attribute("schema", "landscape.s\nx"), "of another program"),
    "history": ("checkpoint", instead("history", lambda f: f.__setitem__("history", 1.0)), "/history is a data set"),
    "column": ("checkpoint", instead("history/lr", lambda f: f.create_group("history/lr")), "/history/lr is a group"),
    "layout": ("checkpoint", not_utf8, "utf-8"),
    "learners": (
        "checkpoint",
        instead("buffers/bn.mean", lambda f: f.__setitem__("buffers/bn.mean", np.zeros((3, 3)))),
        "/buffers/bn.mean",
    ),
    "text": ("checkpoint", instead("weights", lambda f: f.create_dataset("weights", (4, 83), "S4")), "/weights"),
    "model": ("checkpoint", attribute("model", '{"name": 1}'), "/model"),
    "data": ("checkpoint", attribute("data", "[" * 100_000), "damaged"),
    "step": ("checkpoint", attribute("step", "many"), "/step"),
    "superscript": ("line", lambda f: f.create_group("²"), ""),
    "zeros": ("line", lambda f: f.create_group("00"), "groups are 00"),
    "empty axis": ("surface", instead("x", lambda f: f.__setitem__("x", np.zeros(0))), "x has shape"),
    "axis": ("surface", lambda f: f["x"].__setitem__(1, np.nan), "x must be finite"),
    "backwards": ("hessian_grid", lambda f: f["y"].__setitem__(slice(None), [3, 2, 1]), "y must be finite and increasing"),
    "markers": ("surface", instead("markers", lambda f: f.__setitem__("markers", np.zeros((2, 3)))), "markers has shape"),
    "labels": ("surface", attribute("labels", np.zeros(2)), "/labels"),
    "seeds": ("sweep", lambda f: f["seeds"].__setitem__(slice(None), np.bytes_(b"x")), "seeds"),
    "numbers": ("sweep", instead("settings", lambda f: f.__setitem__("settings", np.zeros((2, 2)))), "/settings"),
    "label": ("line", attribute("label", 3.0), "/label"),
    "infinite": ("connection", lambda f: f["sizes"].__setitem__(0, np.inf), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_does_not_belong_is_one_line(name: str, sound: Path, tmp_path: Path, command: Command) -> None:
    schema, change, words = ODD[name]
    path = changed(sound / f"{schema}.h5", tmp_path / "x.h5", change)
    if words:
        one_line(command("info", path), 1, "x.h5", words)
    else:
        assert command("info", path)[0] == 0


RECIPES = {
    "prose": ("not TOML", "last.h5: recipe: not valid TOML"),
    "deep": ("a = " + "[" * 3000 + "]" * 3000, "lists within each other"),
    "dots": ("a = {" + "b." * 6000 + "c = 1}", "dots are not allowed"),
    "digits": ("seed = " + "9" * 5000, "last.h5: recipe: not valid TOML"),
    **{v: (f"steps = {v}", "steps of its recipe") for v in ("'x'", "[3]", "2026-11-24", "1.5", "true", "-1")},
}


@pytest.mark.parametrize("name", RECIPES)
def test_any_recipe_in_a_file_is_one_line(name: str, sound: Path, tmp_path: Path, command: Command) -> None:
    text, words = RECIPES[name]
    changed(sound / "checkpoint.h5", tmp_path / "last.h5", attribute("recipe", text), seal=True)
    one_line(command("plot", tmp_path / "last.h5"), 1, words)


def test_escape_sequences_and_odd_names_are_shown(sound: Path, tmp_path: Path, command: Command) -> None:
    path = changed(sound / "line.h5", tmp_path / "x.h5", attribute("label", "\x1b]0;title\x07"))
    out = command("info", path)[1]
    assert "\x1b" not in out
    assert "label: \\x1b]0;title\\x07" in out
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[31m.h5"))
    shutil.copy(sound / "line.h5", odd)
    code, out, _ = command("plot", odd)
    assert (code, out) == (0, f"{tmp_path}/\\udcff\\x1b[31m.png\n")
    odd.write_bytes(b"")
    one_line(command("info", odd), 1, "\\udcff\\x1b[31m.h5")
    assert printable("plain – ² 中") == "plain – ² 中"


def test_temporary_files_cannot_be_foreseen(sound: Path, tmp_path: Path) -> None:
    """A link under a name that could be foreseen is not followed, and names are not repeated."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("s.h5", "t.csv"):
        (tmp_path / f".{name}.{os.getpid()}.tmp").symlink_to(victim)
    landscape.load(sound / "line.h5").save(tmp_path / "s.h5")
    write_text(tmp_path / "t.csv", "x")
    assert victim.read_text() == "mine"
    seen = set()
    for _ in range(3):
        with replacing(tmp_path / "u") as file:
            seen |= {p.name for p in tmp_path.iterdir() if p.name.startswith(".landscape-")}
            file.write(b"x")
    assert len(seen) == 3
    assert (tmp_path / "u").stat().st_mode & 0o777 == 0o666 & ~umask()
    write_text(tmp_path / ("n" * 255), "x")


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_only_a_file_without_a_checksum_is_not_read_while_it_is_locked(sound: Path, tmp_path: Path) -> None:
    """Its writer's lock of the temporary file goes with it to its name; other programs lock as HDF5 does."""
    path, raw = tmp_path / "a.h5", (sound / "line.h5").read_bytes()
    path.write_bytes(raw)
    with path.open("rb+") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        landscape.load(path)
    path.write_bytes(unsealed(raw))
    with (
        h5py.File(path, "r+", locking=True),
        pytest.raises(OperationError, match="another program writes it"),
    ):
        landscape.load(path)
    with h5py.File(path, "r", locking=True):
        landscape.load(path)


def test_stale_temporary_files_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    stale, live = (tmp_path / f".landscape-{digit * 16}.tmp" for digit in "ab")
    mine = tmp_path / ".landscape-notes.tmp"
    for path in (stale, live, mine):
        path.write_text("x")
    with open(live) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_text(tmp_path / "x.txt", "x")
        assert sorted(p.name for p in tmp_path.iterdir()) == [live.name, mine.name, "x.txt"]


def test_no_unlocked_temporary_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks for stale ones between the opening of the file and its lock, three times."""
    lock, removed = filelock.lock_descriptor, []

    def late(descriptor: int, *, blocking: bool) -> bool:
        if len(removed) < 3:
            removed.extend(tmp_path.glob(".landscape-*"))
            with monkeypatch.context() as patch:
                patch.setattr(filelock, "lock_descriptor", lock)
                files.remove_stale(tmp_path)
        return lock(descriptor, blocking=blocking)

    (tmp_path / "x").write_text("old")
    files.remove_stale(tmp_path)
    monkeypatch.setattr(filelock, "lock_descriptor", late)
    with replacing(tmp_path / "x") as file:
        file.write(b"new")
    assert len(removed) == 3
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "new")]


ODD_LOCKS: dict[str, Callable[[Path, Path], Any]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "pipe": lambda path, victim: os.mkfifo(path),
    "folder": lambda path, victim: path.mkdir(),
    "device": lambda path, victim: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD_LOCKS)
def test_a_lock_is_a_file_of_its_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to what another user put there, before the lock is taken or just after."""
    run, victim, lock = tmp_path / "run", tmp_path / "victim", fcntl.flock
    run.mkdir()
    victim.write_text("mine")
    ODD_LOCKS[kind](run / ".lock", victim)
    with pytest.raises(OperationError, match=r"run/\.lock: is a link, a folder"):
        Lock(run).acquire()
    (run / ".lock").rmdir() if kind == "folder" else (run / ".lock").unlink()

    def swapped(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        (run / ".lock").unlink()
        ODD_LOCKS[kind](run / ".lock", victim)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", swapped)
    with pytest.raises(OperationError, match=r"run/\.lock: is a link, a folder"):
        Lock(run).acquire()
    assert victim.read_text() == "mine"


def test_a_lock_is_believed_only_while_it_is_held(tmp_path: Path) -> None:
    """The number of a process that was killed may be another's by now, such as that of this one."""
    (tmp_path / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()} since 2026-01-01\n")
    with Lock(tmp_path) as lock:
        lock.acquire()
    assert not (tmp_path / ".lock").exists()


def test_no_lock_file_is_left_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match="has no locks"):
        Lock(tmp_path).acquire()
    assert not list(tmp_path.iterdir())


def test_a_damaged_last_checkpoint_gives_way_to_the_newest_sound_one(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = launch.launch(recipe.read(str(tiny)), folder)
    last, steps = folder / "last.h5", sorted(folder.glob("step-*.h5"))
    assert last.stat().st_ino != steps[-1].stat().st_ino
    assert torch.equal(landscape.load(last).weights, landscape.load(steps[-1]).weights)
    for path in (last, steps[-1]):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    with pytest.warns(hdf5.DamageWarning, match=f"last.h5: damaged.*{steps[-2].name} takes its place"):
        again = launch.launch(None, folder, resume=True)
    assert torch.equal(again.weights, whole.weights)
    assert Checkpoint.load(last).step == whole.step
    for path in (last, *steps):
        path.write_bytes(b"")
    with pytest.raises(OperationError, match="last.h5: not a readable"):
        launch.launch(None, folder, resume=True)


@pytest.mark.parametrize(
    ("store", "cut", "words"),
    [
        (lambda f: f.create_dataset("x", data=np.zeros(1000), chunks=(500,)), 1, "x: its chunk at .* is not"),
        (lambda f: f.create_dataset("x", data=np.zeros(5000)), 20000, "x: .* more than a file of"),
        (lambda f: [f.attrs.__setitem__(f"a{i}", i) for i in range(4)], 0, "more than 3 attributes"),
    ],
    ids=["a chunk behind the end", "more bytes than the file has", "attributes"],
)
def test_what_a_file_cannot_hold_is_refused(
    store: Change, cut: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5_check, "ATTRIBUTES", 3)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("text", data=["sound"], chunks=(1,))
        store(file)
    with h5py.File(path) as file, pytest.raises(hdf5_check.UnsoundError, match=words):
        hdf5_check.check(file, path.stat().st_size - cut)


def test_idx_files_take_no_more_than_they_should(tmp_path: Path) -> None:
    path = tmp_path / FILES[0]
    path.write_bytes(b"\0\0\x08\x04" + (65536).to_bytes(4, "big") * 4 + bytes(9))
    with pytest.raises(OperationError, match=f"{FILES[0]}: no whole IDX file"):
        read_idx(path)
    packed = path.with_suffix(".gz")
    for shape in ((9, 3, 3), (1 << 20, 99, 99)):
        sizes = b"".join(size.to_bytes(4, "big") for size in shape)
        packed.write_bytes(gzip.compress(b"\0\0\x08\3" + sizes + bytes(20 << 20), 1))
        with pytest.raises(OperationError, match="no whole IDX file"):
            read_idx(packed)
    packed.unlink()
    for i, name in enumerate(FILES):
        array = np.zeros((12, 2, 2), np.uint8) if i % 2 == 0 else np.arange(12, dtype=np.uint8)
        (tmp_path / name).write_bytes(samples.idx(array))
    with pytest.raises(OperationError, match=r"labels \(12,\), up to 11; .* up to 9; download"):
        data.load("mnist", data_dir=tmp_path)


READERS: dict[str, Callable[[Path], Any]] = {
    "m.npy": lambda path: read_matrix("mixing", path, 4),
    "m.csv": lambda path: read_matrix("mixing", path, 4),
    "s.wav": lambda path: read_wav(path, 8000),
    "i.jpg": lambda path: decode(path, 0, 0.0),
    "n.pt": read_state,
    "n.safetensors": read_state,
    "train-images-idx3-ubyte": read_idx,
    "x.h5": landscape.load,
}
MAKE: dict[str, Callable[[Path], Any]] = {
    "zero": lambda path: path.symlink_to("/dev/zero"), "fifo": os.mkfifo, "folder": Path.mkdir
}  # fmt: skip


@pytest.mark.parametrize("kind", MAKE)
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    for name, read in READERS.items():
        MAKE[kind](tmp_path / name)
        with pytest.raises(OperationError, match=name):
            read(tmp_path / name)


def test_matrices_of_damaged_headers(tmp_path: Path) -> None:
    good, objects, whole = samples.written(np.save, np.full((4, 4), 0.25)), io.BytesIO(), tmp_path / "m.npy"
    np.save(objects, np.array([[print]], dtype=object), allow_pickle=True)
    damaged = good[:40], good[:-1], b"PK\3\4" + good, good.replace(b"<f8", b"<c8")
    for raw in (b"", *damaged, objects.getvalue()):
        whole.write_bytes(raw)
        with pytest.raises(LandscapeError, match="mixing: .*m.npy"):
            read_matrix("mixing", whole, 4)
    for text in (b"", b"\xff\xfe1,2", b"1,2\n3", b"x"):
        (tmp_path / "m.csv").write_bytes(text)
        with pytest.raises(OperationError, match="m.csv"):
            read_matrix("mixing", tmp_path / "m.csv", 4)
    whole.write_bytes(good)
    np.testing.assert_array_equal(read_matrix("mixing", whole, 4), np.full((4, 4), 0.25))


def test_tensors_that_are_not_plain_numbers_are_refused(tmp_path: Path) -> None:
    state, path = samples.net().state_dict(), tmp_path / "n.pt"
    zeros = torch.zeros(state["0.weight"].shape)
    for words, make in ODD_TENSORS.items():
        with warnings.catch_warnings(action="ignore"):  # PyTorch's own, of quantized ones
            torch.save({**state, "0.weight": make(zeros)}, path)
        with pytest.raises(OperationError, match="n.pt: '0.weight'.*" + words):
            landscape.import_state(path, samples.net())
    safetensors.torch.save_file({**state, "0.weight": zeros.to(torch.int8)}, tmp_path / "n.safetensors")
    with pytest.raises(OperationError, match="'0.weight' holds int8"):
        landscape.import_state(tmp_path / "n.safetensors", samples.net())
    doubled = {key: value.double() for key, value in state.items() if value.is_floating_point()}
    torch.save(state | doubled, path)
    assert landscape.import_state(path, samples.net()).weights.shape[0] == 1


def test_what_is_named_as_weights_is_read_or_told_apart(tmp_path: Path) -> None:
    model, path = samples.net(), tmp_path / "n.pt"
    for suffix in (".pt", ".bin"):
        safetensors.torch.save_file(model.state_dict(), path.with_suffix(suffix))
        assert landscape.import_state(path.with_suffix(suffix), model).learners == 1
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0"
    for text, words in (
        (pointer, "is a pointer of Git LFS .git lfs pull"), (b"\n<!DOCTYPE html>", "is a web page; give"),
        (b"<html>404", "is a web page"), (b"hello", "begins with b'hello'; give"), (b"", "is empty"),
    ):  # fmt: skip
        for name in ("n.pt", "n.safetensors") if text == pointer else ("n.pt",):
            (tmp_path / name).write_bytes(text)
            with pytest.raises(OperationError, match=f"{name}: not a readable state file, it {words}"):
                landscape.import_state(tmp_path / name, model)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("form", ["model", "checkpoint"])
def test_the_remedy_for_a_file_with_code_keeps_its_weights(form: str, zipped: bool, tmp_path: Path) -> None:
    model, path = samples.net(), tmp_path / "n.pt"
    saved = model if form == "model" else {"state_dict": model.state_dict(), "model": model}
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(OperationError, match="never run") as refusal:
        landscape.import_state(path, model)
    given = re.search(r"saved = (torch.load\(.*, weights_only=False\))", str(refusal.value))
    assert given
    state = {"model": "saved.state_dict()", "checkpoint": "saved['state_dict']"}[form]
    assert state in str(refusal.value)
    scope = {"torch": torch, "saved": eval(given[1])}
    torch.save(eval(state, scope), tmp_path / "n-weights.pt")
    assert landscape.import_state(tmp_path / "n-weights.pt", model).learners == 1


def test_archives_that_unpack_to_more_than_themselves_are_refused(tmp_path: Path) -> None:
    old = zipfile.ZipFile(io.BytesIO(samples.saved(samples.net().state_dict())))
    with zipfile.ZipFile(tmp_path / "n.pt", "w") as new:
        for name in old.namelist():
            data = bytes(10_000_000) if "/data/" in name else old.read(name)
            new.writestr(name, data, zipfile.ZIP_DEFLATED)
    with pytest.raises(OperationError, match="n.pt: not as torch.save writes"):
        read_state(tmp_path / "n.pt")


def test_wav_files_whose_chunks_lie(tmp_path: Path) -> None:
    raw, path = samples.wav(), tmp_path / "s.wav"
    path.write_bytes(raw)
    assert len(read_wav(path, 8000)) == 1600
    for place in (16, 20, 22, 24, 34, 40):  # sizes of chunks, format, channels, rate, bits
        for number in (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x05\0\0\x80"):
            path.write_bytes(raw[:place] + number + raw[place + 4 :])
            with pytest.raises(OperationError, match="s.wav"):
                read_wav(path, 8000)
    path.write_bytes(raw[:6])
    with pytest.raises(OperationError, match="s.wav: cannot be read as a wav file \\(it ends too soon\\)"):
        read_wav(path, 8000)


REPLACING = """
import os, sys
raw = open(sys.argv[1], "rb").read()
while True:
    with open("new", "wb") as file:
        file.write(raw)
    os.replace("new", "last.h5")
"""
#: The file that is replaced, how it is read, and how often (a hundred times as often in the slow tests).
BESIDE: dict[str, tuple[str, Callable[[Path, Command], Any], int]] = {
    "load": ("checkpoint", lambda path, _: landscape.load(path), 10),
    "open": ("surface", lambda path, _: landscape.open(path), 3),
    "info": ("surface", lambda path, command: command("info", path)[0] and pytest.fail("info"), 3),
    "sweep": ("checkpoint", lambda path, _: storage.last_sound(path.parent, lambda n: slice(0)), 3),
}


@contextlib.contextmanager
def beside(writer: subprocess.Popen[bytes]) -> Iterator[None]:
    """A context in which a process writes all the time."""
    with writer:
        try:
            yield
            assert writer.poll() is None
        finally:
            writer.kill()


@pytest.mark.parametrize("factor", [1, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", BESIDE)
def test_files_are_read_while_others_take_their_place(
    reader: str, factor: int, sound: Path, tmp_path: Path, command: Command
) -> None:
    name, read, loads = BESIDE[reader]
    shutil.copy(sound / f"{name}.h5", tmp_path / "last.h5")
    argv = [sys.executable, "-I", "-c", REPLACING, sound / f"{name}.h5"]
    with beside(subprocess.Popen(argv, cwd=tmp_path)):
        for _ in range(factor * loads):
            read(tmp_path / "last.h5", command)


@pytest.mark.slow
def test_the_last_checkpoint_of_a_run_in_progress_is_read(
    tiny: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    last = tmp_path / "run" / "last.h5"
    settings = "--set", "checkpoint.every=1", "--set", "steps=1000000"
    with beside(start("train", tiny, *settings, "-o", last.parent)):
        wait_for(last.exists)
        for _ in range(1000):
            landscape.load(last)


def test_what_is_read_is_examined(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile file takes the name before the examination; one that is written in place is refused."""
    ask, path = hdf5._validator.fault_of, tmp_path / "a.h5"
    shutil.copy(sound / "line.h5", path)

    def swapped(place: str, stamp: tuple[int, ...]) -> str:
        (tmp_path / "b.h5").write_bytes(sealed(own_child(unsealed((sound / "checkpoint.h5").read_bytes()))))
        os.replace(tmp_path / "b.h5", path)
        return ask(place, stamp)

    monkeypatch.setattr(hdf5._validator, "fault_of", swapped)
    assert landscape.Line.load(path).labels == ("a", "b")
    monkeypatch.setattr(hdf5._validator, "fault_of", ask)
    with pytest.raises(OperationError, match=re.escape(FORGED[own_child])):
        landscape.load(path)
    shutil.copy(sound / "line.h5", path)
    monkeypatch.setattr(hdf5._validator, "fault_of", lambda place, stamp: os.utime(path) or "")
    with pytest.raises(OperationError, match=r"a.h5: is being replaced by another process; try again later$"):
        landscape.load(path)
    monkeypatch.setattr(hdf5._validator, "fault_of", ask)
    with pytest.raises(OperationError, match="a.h5: was changed while it was read"), hdf5.reading(path):
        os.utime(path, ns=(0, 0))


def test_the_surface_schema_is_the_documented_one(sound: Path, tmp_path: Path) -> None:
    surface = landscape.load(sound / "surface.h5")
    landscape.save([surface, surface], tmp_path / "two.h5")
    with h5py.File(tmp_path / "two.h5") as file:
        assert sorted(file) == ["0", "1"]
    with pytest.raises(OperationError, match="one landscape"):
        landscape.Surface.load(tmp_path / "two.h5")
    problem = problems.mlp()
    landscape.contour(problem, landscape.random_plane(problem), grid=(3, 2)).save(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5") as file:
        assert (file.attrs["schema"], file.attrs["version"]) == ("landscape.surface", 1)
        assert {"x", "y", "loss", "accuracy", "done", "directions", "center"} == set(file)
        assert (file["loss"].shape, file["done"].dtype) == ((2, 3), bool)
        kept = "created landscape_version torch_version source source_sha256 split samples norm seed span dtype bn"
        assert {*kept.split()} <= {*file.attrs}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(sound: Path, tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does, in the middle of a write."""
    result, path = landscape.load(sound / "surface.h5"), tmp_path / "s.h5"
    result.save(path)
    before = path.read_bytes()
    assert len(before) > 4096
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OperationError, match=r"s.h5: cannot be written \(File too large\)$"):
            result.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    with pytest.raises(ZeroDivisionError), hdf5.writing(path, "landscape.test"):  # is not hidden
        raise ZeroDivisionError
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["s.h5"])
