"""Files: whole or not there, and a clear word about each bad one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import landscape
from landscape import FailedError, HessianGrid, NoiseEstimate, Surface
from landscape.core import hdf5, registry
from landscape.results import base
from tests import problems


def results() -> list[base.Result]:
    problem = problems.mlp()
    plane = landscape.random_plane(problem, seed=3)
    weights = problem.theta + 0.1 * problem.theta.new_tensor([[1.0], [-1.0]])
    return [
        landscape.contour(problem, plane, grid=(3, 2), label="a ‖label‖", split="test"),
        landscape.hessian_grid(problem, plane, grid=(2, 1)),
        landscape.estimate_noise(problem, weights, 0.1, 4, draws=3),
        landscape.line(problem, weights, 3, ends=("left ‖", "right")),
        landscape.line(problem, plane.directions[0], 3),
        landscape.contour(problem, landscape.between(problem, weights), grid=(2, 3)),
    ]


@pytest.mark.parametrize("kind", range(6))
def test_results_come_back_as_they_were_alone_and_in_groups(tmp_path: Path, kind: int) -> None:
    result = results()[kind]
    result.save(tmp_path / "one.h5")
    base.save([result, result], tmp_path / "two.h5")
    with h5py.File(tmp_path / "two.h5") as file:
        assert sorted(file) == ["0", "1"]
    assert len(landscape.load(tmp_path / "two.h5")) == 2
    for back in (landscape.load(tmp_path / "one.h5"), *landscape.load(tmp_path / "two.h5")):
        assert type(back) is type(result)
        for field in dataclasses.fields(result):
            before, after = getattr(result, field.name), getattr(back, field.name)
            np.testing.assert_array_equal(before, after)
            assert type(before) is type(after)
    assert type(result).load(tmp_path / "one.h5")
    with pytest.raises(FailedError, match="one landscape"):
        type(result).load(tmp_path / "two.h5")


def test_the_surface_schema_is_the_documented_one(tmp_path: Path) -> None:
    results()[0].save(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5") as file:
        assert file.attrs["schema"] == "landscape.surface"
        assert file.attrs["version"] == 1
        assert {"created", "landscape_version", "torch_version"} <= set(file.attrs)
        assert {"x", "y", "loss", "accuracy", "done", "directions", "center"} == set(file)
        assert file["loss"].shape == (2, 3)
        assert file["done"].dtype == bool
        assert {"source", "source_sha256", "split", "samples", "norm", "seed", "span", "dtype", "bn"} <= set(
            file.attrs
        )


def bad_files(folder: Path) -> dict[str, str]:
    results()[0].save(folder / "good.h5")
    raw = (folder / "good.h5").read_bytes()
    (folder / "cut.h5").write_bytes(raw[: len(raw) // 2])
    (folder / "empty.h5").write_bytes(b"")
    (folder / "text.h5").write_text("hello")
    with h5py.File(folder / "foreign.h5", "w") as file:
        file["x"] = 1
    for name, change in {"newer": ("version", 9), "unknown": ("schema", "landscape.weather")}.items():
        (folder / f"{name}.h5").write_bytes(raw)
        with h5py.File(folder / f"{name}.h5", "a") as file:
            file.attrs[change[0]] = change[1]
    for name in ("no-loss", "no-norm", "odd-shape"):
        (folder / f"{name}.h5").write_bytes(raw)
        with h5py.File(folder / f"{name}.h5", "a") as file:
            if name == "no-norm":
                del file.attrs["norm"]
            else:
                del file["loss"]
            if name == "odd-shape":
                file["loss"] = np.zeros((5, 5))
    return {
        "none": "no such file",
        "cut": "not a readable HDF5 file",
        "empty": "not a readable HDF5 file",
        "text": "not a readable HDF5 file",
        "foreign": "not one that landscape wrote",
        "newer": "version 9 is newer",
        "unknown": "landscape.weather",
        "no-loss": "damaged or incomplete",
        "no-norm": "damaged or incomplete",
        "odd-shape": "damaged or incomplete",
    }


def test_bad_files_are_named_with_what_is_wrong(tmp_path: Path) -> None:
    for name, message in bad_files(tmp_path).items():
        with pytest.raises(FailedError, match=message) as caught:
            landscape.load(tmp_path / f"{name}.h5")
        assert f"{name}.h5" in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(FailedError):
            landscape.Checkpoint.load(tmp_path / f"{name}.h5")
    with pytest.raises(FailedError, match=r"holds a landscape.surface, a landscape.checkpoint is needed"):
        landscape.Checkpoint.load(tmp_path / "good.h5")


FULL_DISK = """
import resource, signal, sys
import landscape
result = landscape.load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
try:
    try:
        result.save(sys.argv[1])
    finally:  # what measures the coverage of this process writes at its end
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
except landscape.FailedError as error:
    sys.exit(0 if f"{sys.argv[1]}: cannot be written (File too large)" == str(error) else str(error))
sys.exit("it was written")
"""


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """A limit on file size fails as a full disk does, in the middle of a write; in a process of its own."""
    results()[0].save(tmp_path / "s.h5")
    before = (tmp_path / "s.h5").read_bytes()
    argv = [sys.executable, "-c", FULL_DISK, str(tmp_path / "s.h5")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "s.h5").read_bytes() == before
    assert os.listdir(tmp_path) == ["s.h5"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="none/s.h5: cannot be written"):
        results()[0].save(tmp_path / "none" / "s.h5")


def test_an_error_inside_the_block_is_not_hidden_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hdf5.writing(tmp_path / "x.h5", "landscape.test"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_the_kinds_are_registered() -> None:
    assert {Surface, HessianGrid, NoiseEstimate} <= {
        registry.results[name] for name in registry.results.names()
    }
