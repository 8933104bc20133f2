"""A small part of ``make fuzz`` and ``make chaos``, and readers of small files on arbitrary bytes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from landscape.checkpoint.states import read_state
from landscape.core.errors import LandscapeError
from landscape.core.files import printable
from landscape.data.images import decode, read_binary, read_idx
from landscape.data.speech import read_wav
from landscape.training.topology import read_matrix
from tests.harm import commands, files, samples

INPUTS = 100


def test_readers_stand_damaged_and_hostile_files() -> None:
    tally = files.attack(files.plan(INPUTS))
    assert tally.counts.total() >= INPUTS - len(files.CASES)
    assert not tally.wrong


@pytest.mark.slow
def test_the_harness_sees_what_must_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a crash, a loop, code that runs and too much memory are each told."""

    def bad(raw: bytes, folder: Path, rng: Any) -> None:
        count = folder.parent / "count"
        how = int(count.read_text()) if count.exists() else 0
        count.write_text(str(how + 1))
        if how == 0:
            raise KeyError("x")
        if how == 1:
            os.kill(os.getpid(), 11)
        while how == 2:
            pass
        if how == 3:
            (folder / "ran").touch()
        if how == 4:
            bytearray(5 << 30)

    monkeypatch.setitem(files.CASES, "page", files.CASES["page"]._replace(read=bad))
    monkeypatch.setattr(files, "SECONDS", 2.0)
    wrong = files.attack([("page", i) for i in range(6)]).wrong
    words = ("KeyError", "status", "nothing for 2 s", "code was run", "MemoryError")
    assert [word in line for word, line in zip(words, wrong, strict=True)] == [True] * 5
    assert [line.split(": ", 1)[0] for line in wrong] == [f"page {i}" for i in range(5)]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in Linux's /proc")
@pytest.mark.slow
def test_a_run_that_is_disturbed_comes_to_the_same_end() -> None:
    tally = commands.run(12, ["train, 1 process", "train, 2 processes"], seed=1, timeout=20.0)
    assert tally.wrong == []
    assert tally.counts.total() >= 12
    assert len(commands.CASES) > 15


def test_a_difference_is_told(tmp_path: Path) -> None:
    for name, value in (("a", np.nan), ("b", np.nan), ("c", 0.0)):
        (tmp_path / name).mkdir()
        line = samples.results()["line"]
        loss = np.where(line.t == 0.5, value, line.loss)
        dataclasses.replace(line, loss=loss).save(tmp_path / name / "x.h5")
    a, b, c = (commands.contents(tmp_path / name) for name in "abc")
    assert commands.difference(a, b) == ""
    assert commands.difference(a, c) == "x.h5 0 loss"
    assert commands.difference(a, a | {"y": ""}) == "y"


NAMES = ("train-images-idx3-ubyte", "t.gz", "x.bin", "s.wav", "i.png", "m.npy", "m.csv", "n.pt", "n.safetensors")  # fmt: skip
STARTS = (b"", b"\x93NUMPY\x01\x00", b"RIFF", b"\0\0\x08\x02", b"\x89PNG\r\n\x1a\n", b"\x80\x02}", b"PK\3\4")


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.sampled_from(NAMES), st.sampled_from(STARTS), st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, start: bytes, rest: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(start + rest)
    try:
        if name.startswith("m."):
            read_matrix("mixing", path, 2)
        elif name.startswith("n."):
            read_state(path)
        elif name == "x.bin":
            read_binary(path, 1, 10)
        elif name == "s.wav":
            read_wav(path, 8000)
        elif name == "i.png":
            decode(path, 4, 0.0)
        else:
            assert isinstance(read_idx(path), np.ndarray)
    except LandscapeError as error:
        if "\n" in str(error) or name not in str(error):
            raise


@hypothesis.given(st.text())
def test_what_is_shown_obeys_nothing(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown
