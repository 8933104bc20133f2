"""A small part of ``make fuzz``, and readers of small files on arbitrary bytes."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from landscape.checkpoint.weights import read_state
from landscape.core.errors import LandscapeError
from landscape.core.files import printable
from landscape.data.images import decode, read_binary, read_idx
from landscape.data.speech import read_wav
from landscape.training.topology import read_matrix
from tests.fuzz import harness

INPUTS = 100


def test_readers_stand_damaged_and_hostile_files() -> None:
    outcome = harness.run(harness.plan(INPUTS))
    assert sum(outcome.counts.values()) >= INPUTS - len(harness.SHARES)
    assert not outcome.failures


@pytest.mark.slow
def test_the_harness_sees_what_must_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a crash, a loop and code that runs are each told."""

    def bad(raw: bytes, folder: Path, rng: object) -> None:
        how = int((folder.parent / "count").read_text() or 0) if (folder.parent / "count").exists() else 0
        (folder.parent / "count").write_text(str(how + 1))
        if how == 0:
            raise KeyError("x")
        if how == 1:
            os.kill(os.getpid(), 11)
        if how == 2:
            while True:
                pass
        if how == 3:
            (folder / "ran").touch()
        if how == 4:
            bytearray(5 << 30)

    monkeypatch.setitem(harness.READERS, "page", bad)
    monkeypatch.setattr(harness, "SECONDS", 2.0)
    failures = harness.run([("page", i) for i in range(6)]).failures
    assert [line.split(": ", 1)[0] for line in failures] == [f"page {i}" for i in range(5)]
    for line, word in zip(
        failures, ("KeyError", "status", "nothing for 2 s", "code was run", "MemoryError"), strict=True
    ):
        assert word in line


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
