"""landscape doctor: what it finds, and that it fails where something is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from landscape import ExtremeEigenvalues
from landscape.cli import begin
from tests.conftest import Command


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LANDSCAPE_DATA", str(tmp_path / "data"))


def checks(command: Command, code: int) -> dict[str, dict[str, str]]:
    got, out, err = command("doctor", "--json")
    assert got == code, err
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_a_sound_installation(tmp_path: Path, command: Command) -> None:
    found = checks(command, 0)
    assert {name for name in found if found[name]["state"] == "FAILED"} == set()
    assert found["torch"]["text"] == torch.__version__
    assert found["mnist"]["state"] == "missing"
    assert f"landscape fetch mnist --data-dir {tmp_path}/data" in found["mnist"]["text"]
    assert (tmp_path / "cache").is_dir()
    assert "dense" in found["Hessian on cpu"]["text"]
    assert set(begin.OPTIONAL) <= set(found)
    code, out, _ = command("doctor", "-q")
    assert (code, out.count("\n")) == (0, len(found))


def test_wrong_eigenvalues_fail(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = begin.extreme_eigenvalues

    def wrong(*args: object, **options: object) -> ExtremeEigenvalues:
        ends = real(*args, **options)  # type: ignore[arg-type]
        return dataclasses.replace(ends, values=ends.values * [1, 0.9])

    monkeypatch.setattr(begin, "extreme_eigenvalues", wrong)
    assert checks(command, 1)["Hessian on cpu"]["state"] == "FAILED"


def test_an_error_fails_a_check(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path / "file" / "cache"))

    def breaks(*args: object, **options: object) -> ExtremeEigenvalues:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(begin, "extreme_eigenvalues", breaks)
    found = checks(command, 1)
    assert found["cache"]["state"] == "FAILED"
    assert found["Hessian on cpu"]["text"] == "RuntimeError: no such instruction"
    code, _, err = command("doctor", "-q")
    assert (code, err) == (1, "landscape: doctor: failed: cache, Hessian on cpu\n")


def test_a_package_that_is_broken(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brittle.py").write_text("raise RuntimeError('operator does not exist')")
    information = tmp_path / "brittle-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(begin, "OPTIONAL", {"brittle": ("tests", "brittle")})
    found = checks(command, 0)["brittle"]
    assert found["state"] == "broken"
    assert found["text"] == ("1.2, its import fails (RuntimeError: operator does not exist); for tests")
