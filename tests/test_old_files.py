"""Runs that version 0.6.0 wrote open, resume and plot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import landscape
from tests.conftest import Command, slow_but

OLD = Path(__file__).parent / "data" / "v0.6.0"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def test_all_of_them_take_less_than_200_kb() -> None:
    assert sum(path.stat().st_size for path in OLD.rglob("*") if path.is_file()) < 200_000


@pytest.mark.parametrize("name", slow_but(["run/last"], ["run/last", "run/step-0000006"]))
def test_each_opens_and_plots(old: Path, command: Command, name: str) -> None:
    loaded = landscape.load(old / f"{name}.h5")
    assert loaded
    code, out, err = command("plot", old / f"{name}.h5", "-o", old / "p.png")
    assert (code, out) == (0, f"{old}/p.png\n"), err
    assert (old / "p.png").stat().st_size > 5000
    assert command("info", old / f"{name}.h5")[0] == 0


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
