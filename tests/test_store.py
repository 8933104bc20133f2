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
from landscape import OperationError
from landscape.core import hdf5
from landscape.results import base
from tests import problems


def results() -> list[base.Result]:
    problem = problems.mlp()
    plane = landscape.random_plane(problem, seed=3)
    weights = problem.weights + 0.1 * problem.weights.new_tensor([[1.0], [-1.0]])
    return [
        landscape.contour(problem, plane, grid=(3, 2), label="a ‖label‖", split="test"),
        landscape.hessian_grid(problem, plane, grid=(2, 1)),
        landscape.noise(problem, weights, 0.1, 4, draws=3),
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
    with pytest.raises(OperationError, match="one landscape"):
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
    results()[0].save(tmp_path / "s.h5")
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
