"""Files: whole or not there, and a clear word about each bad one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

import landscape
from landscape import OperationError
from landscape.core import hdf5
from tests import problems


def surface() -> landscape.Surface:
    problem = problems.mlp()
    return landscape.contour(problem, landscape.random_plane(problem, seed=3), grid=(3, 2), label="a ‖label‖")


def test_the_surface_schema_is_the_documented_one(tmp_path: Path) -> None:
    surface().save(tmp_path / "s.h5")
    landscape.save([surface(), surface()], tmp_path / "two.h5")
    with h5py.File(tmp_path / "two.h5") as file:
        assert sorted(file) == ["0", "1"]
    with pytest.raises(OperationError, match="one landscape"):
        landscape.Surface.load(tmp_path / "two.h5")
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
except landscape.OperationError as error:
    sys.exit(0 if f"{sys.argv[1]}: cannot be written (File too large)" == str(error) else str(error))
sys.exit("it was written")
"""


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """A limit on file size fails as a full disk does, in the middle of a write; in a process of its own."""
    surface().save(tmp_path / "s.h5")
    before = (tmp_path / "s.h5").read_bytes()
    argv = [sys.executable, "-c", FULL_DISK, str(tmp_path / "s.h5")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "s.h5").read_bytes() == before
    assert os.listdir(tmp_path) == ["s.h5"]


def test_an_error_inside_the_block_is_not_hidden_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hdf5.writing(tmp_path / "x.h5", "landscape.test"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
