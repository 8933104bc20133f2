"""A run's history is in its folder once, and each of its files reads as before."""

from __future__ import annotations

import shutil
import tracemalloc
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

import landscape
from landscape.checkpoint import history
from landscape.checkpoint.history import LEAST, HistoryWarning
from landscape.train.recipes import recipe
from landscape.train.run import launch
from landscape.train.run.setup import BLOCK, RECENT, History

EVERY, STEPS = 20, 300


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with more rows than each of its files holds at least."""
    folder = tmp_path_factory.mktemp("run")
    launch.launch(_recipe(STEPS), folder)
    return folder


def _recipe(steps: int) -> recipe.Recipe:
    return recipe.from_values(
        {
            "name": "tiny",
            "learners": 2,
            "batch": 4,
            "lr": 0.1,
            "algorithm": {"name": "dpsgd"},
            "steps": steps,
            "model": {"name": "mlp", "widths": [4, 3]},
            "data": {"name": "synthetic", "samples": 20, "dimension": 4, "classes": 3},
            "checkpoint": {"every": EVERY},
        }
    )


def _rows(path: Path) -> int:
    with h5py.File(path, "r") as file:
        return len(file["history/step"])


def _equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray], rows: int) -> bool:
    return all(np.array_equal(a[name], b[name][:rows], equal_nan=True) for name in a | b)


def test_step_files_hold_their_own_rows_and_read_as_whole(run: Path) -> None:
    whole = landscape.load(run / "last.h5").history
    assert whole["step"].tolist() == list(range(1, STEPS + 1))
    for path in sorted(run.glob("step-*.h5")):
        step = int(path.stem[5:])
        assert _rows(path) == min(step, LEAST)
        assert _equal(landscape.load(path).history, whole, step)
    assert _rows(run / "last.h5") == STEPS


def test_rows_come_from_the_step_files_where_last_is_damaged(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    whole = landscape.load(run / "last.h5").history
    (folder / "last.h5").write_bytes(b"damaged")
    with pytest.warns(landscape.core.hdf5.DamageWarning):
        resumed = launch.launch(None, folder, resume=True)
    assert _equal(resumed.history, whole, STEPS)
    # A run goes on with what is there, and says what is not.
    for step in range(0, 200, EVERY):
        (folder / f"step-{step:07d}.h5").unlink()
    (folder / "last.h5").unlink()
    with pytest.warns(HistoryWarning, match="begins at step 101"):
        assert landscape.load(folder / "step-0000300.h5").history["step"][0] == 101


def test_a_file_of_another_run_lends_no_rows(run: Path, tmp_path: Path) -> None:
    launch.launch(_recipe(STEPS), tmp_path)  # the same numbers, at another time
    shutil.copy(run / "step-0000300.h5", tmp_path / "step-0000300.h5")
    with pytest.warns(HistoryWarning):
        history = landscape.load(tmp_path / "step-0000300.h5").history
    assert history["step"][0] == STEPS - LEAST + 1


def test_a_run_that_goes_on_has_the_rows_of_both_parts(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "last.h5").write_bytes((folder / "step-0000240.h5").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.launch(_recipe(STEPS + 50), folder, resume=True)
    steps = landscape.load(folder / "last.h5").history["step"]
    assert steps.tolist() == list(range(1, STEPS + 51))
    assert _rows(folder / "step-0000350.h5") == LEAST


def test_the_disk_space_of_a_history_grows_with_its_length_alone() -> None:
    """Of 10⁶ steps, saved every 500: rows are written to step files once, not two thousand times."""
    step, written = np.arange(1.0, 100_001), 0
    for saved in range(500, 100_001, 500):
        rows = history.recent({"step": step[:saved]}, saved, 500)["step"]
        assert rows[-1] == saved
        written += len(rows)
    assert written == len(step)


@pytest.mark.parametrize("known", [0, 50, 3 * BLOCK])
def test_rows_that_became_arrays_read_as_the_rows_that_they_were(known: int) -> None:
    """Bit for bit, with rows from a checkpoint before them, a column that it lacks and one more of its own."""
    draw = np.random.default_rng(known)
    rows = draw.standard_normal((known + 2 * BLOCK + RECENT + 7, 3)).tolist()
    made = History("rule", {"age": "steps"})
    old = np.array(rows[:known]).reshape(known, 3)
    made.restore({"step": old[:, 0], "loss": old[:, 1], "other": old[:, 2]}, {"other": "1"})
    for step, loss, age in rows[known:]:
        row = made.new_row(step, 0.5)
        made.append(row)
        row["loss"] = loss  # the results of a step come after its row
        made.record(row, {"age": age})
    expected = np.array(rows)
    new = expected[known:]
    columns = made.columns()
    assert columns["step"].tobytes() == expected[:, 0].tobytes()
    assert columns["loss"].tobytes() == expected[:, 1].tobytes()
    assert columns["age"].tobytes() == np.r_[np.full(known, np.nan), new[:, 2]].tobytes()
    assert columns["other"].tobytes() == np.r_[old[:, 2], np.full(len(new), np.nan)].tobytes()
    assert np.isnan(columns["delta"]).all()
    assert made.rows[-1]["age"] == rows[-1][2]
    assert len(made.rows) >= RECENT


def test_a_step_takes_the_memory_of_its_numbers() -> None:
    made = History("rule", {})
    tracemalloc.start()
    for step in range(20 * BLOCK):
        made.append(made.new_row(step, 0.1))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 1.3 * (20 * BLOCK * 8 * len(made.units) + 1300 * (BLOCK + RECENT))
