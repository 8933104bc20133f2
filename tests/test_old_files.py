"""Files that version 0.6.0 wrote open, resume and plot."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import landscape
from tests.conftest import Command, slow_but

OLD = Path(__file__).parent / "data" / "v0.6.0"
RESULTS = ("surface", "surfaces", "hessian_grid", "line", "spectrum", "noise", "smoothing", "stability")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_all_of_them_take_less_than_200_kb() -> None:
    assert sum(path.stat().st_size for path in OLD.rglob("*") if path.is_file()) < 200_000


@pytest.mark.parametrize(
    "name", slow_but(["surfaces", "spectrum", "run/last"], [*RESULTS, "run/last", "run/step-0000006"])
)
def test_each_opens_and_plots(old: Path, command: Command, name: str) -> None:
    loaded = landscape.load(old / f"{name}.h5")
    assert loaded
    code, out, err = command("plot", old / f"{name}.h5", "-o", old / "p.png")
    assert (code, out) == (0, f"{old}/p.png\n"), err
    assert (old / "p.png").stat().st_size > 5000
    assert command("info", old / f"{name}.h5")[0] == 0


def test_results_hold_the_numbers_that_were_written(old: Path) -> None:
    surface = landscape.Surface.load(old / "surface.h5")
    assert surface.loss[1, 2] == pytest.approx(0.75323308, abs=1e-8)
    assert surface.split == "train"
    first, second = landscape.load(old / "surfaces.h5")
    assert first.label != second.label
    grid = landscape.HessianGrid.load(old / "hessian_grid.h5")
    np.testing.assert_allclose(grid.ratio, np.abs(grid.lambda_min / grid.lambda_max))


def test_a_run_resumes_to_the_numbers_of_version_0_6_0(old: Path, command: Command) -> None:
    """Version 0.6.0 itself went on from step 12 to 18 with these."""
    code, _, err = command(
        "train", old / "run/recipe.toml", "--set", "steps=18", "-o", old / "run", "--resume", "-q"
    )
    assert code == 0, err
    end = landscape.load(old / "run/last.h5")
    assert end.history["step"].tolist() == list(range(1, 19))
    assert float(torch.linalg.vector_norm(end.weights)) == pytest.approx(4.3482156, rel=1e-5)
    assert end.history["loss"][-1] == pytest.approx(0.5244106650352478, rel=1e-5)
    assert end.history["alpha_e"][-1] == pytest.approx(0.34421291522560143, rel=1e-4)


@pytest.mark.parametrize(("name", "grid"), [("surface", "4x3"), ("hessian_grid", "2")])
def test_a_grid_that_is_half_done_goes_on(old: Path, command: Command, name: str, grid: str) -> None:
    path, kind = old / f"{name}.h5", name.replace("surface", "contour").replace("_", "-")
    whole = landscape.load(path)
    with h5py.File(path, "r+") as file:
        file["done"][1:] = False
        for column in ("loss", "accuracy") if name == "surface" else ("lambda_min", "lambda_max", "ratio"):
            file[column][1:] = np.nan
    code, _, err = command(kind, old / "run/last.h5", "--grid", grid, "-q", "-o", path)
    assert code == 0, err
    again = landscape.load(path)
    assert again.done.all()
    if name == "surface":
        np.testing.assert_allclose(again.loss, whole.loss, rtol=1e-6)
    else:
        np.testing.assert_allclose(again.lambda_max, whole.lambda_max, rtol=0.02)  # --tol is 0.01
        np.testing.assert_array_equal(again.lambda_max[0], whole.lambda_max[0])
