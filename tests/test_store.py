"""Files: whole or not there, and a clear word about each bad one."""

from __future__ import annotations

import os
import resource
import signal
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


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does, in the middle of a write."""
    result, path = surface(), tmp_path / "s.h5"
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
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.h5"]


def test_an_error_inside_the_block_is_not_hidden_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hdf5.writing(tmp_path / "x.h5", "landscape.test"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
