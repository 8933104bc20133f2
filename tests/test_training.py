"""Runs: the same bits again and resumed, killed at any moment, diverging either way, and what they record."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import landscape
from landscape import Checkpoint, FailedError, InputError
from landscape.train.recipes import recipe
from landscape.train.run import launch
from landscape.train.run.loop import Hooks, Trainer
from landscape.train.topology.mixing import Mixing
from tests.conftest import Command


def same_bits(a: Checkpoint, b: Checkpoint) -> None:
    """All but the clock."""
    assert torch.equal(a.weights, b.weights)
    assert a.step == b.step
    for mine, theirs in ((a.optimizer, b.optimizer), (a.rule, b.rule), (a.shared, b.shared)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (a.seed, a.recipe, a.diverged, a.diverged_at) == (b.seed, b.recipe, b.diverged, b.diverged_at)
    assert a.history.keys() == b.history.keys()
    for name in a.history:
        if name not in ("wall_s", "samples_per_s", "wait_s"):
            np.testing.assert_array_equal(a.history[name], b.history[name], err_msg=name)


def quadratic(**changes: Any) -> recipe.Recipe:
    """DPSGD on a ring of 6 with curvature 1: stable up to lr 1 + ω_min = 2/3, the mean up to 2."""
    values: dict[str, Any] = {
        "name": "quadratic",
        "learners": 6,
        "batch": 60,
        "lr": 0.3,
        "steps": 400,
        "dtype": "float64",
        "algorithm": {"name": "dpsgd", "mixing": "ring(1)"},
        "model": {"name": "quadratic", "eigenvalues": [1.0, 0.5]},
        "data": {"name": "quadratic", "dimension": 2, "gradient_std": 0.1},
        "evaluate": {"every": 0},
    }
    return recipe.from_values(values | changes)


def test_a_finished_run_may_go_on_to_more_steps_with_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    settings = ["schedule={cosine = 40.0, milestones = [12]}", "optimizer={name = 'lamb'}"]
    short, long = (recipe.read(str(tiny), [f"steps={n}", *settings]) for n in (17, 30))
    launch.launch(short, tmp_path / "a")
    same_bits(launch.launch(long, tmp_path / "a", resume=True), launch.launch(long, tmp_path / "b"))
    with pytest.raises(FailedError, match="steps = 30, resuming it with 17"):
        launch.launch(short, tmp_path / "a", resume=True)
    with pytest.raises(FailedError, match=r"its run has lr = 0.2, resuming it with lr = 0.1"):
        launch.launch(recipe.read(str(tiny), ["lr=0.1", *settings]), tmp_path / "a", resume=True)


@pytest.mark.parametrize("what", ["changed", "missing", "elsewhere"])
def test_a_run_keeps_the_mixing_matrix_that_it_began_with(
    what: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    ring, pairs = Mixing("ring(1)", 4, 0).matrix(1), np.kron(np.eye(2), np.full((2, 2), 0.5))
    np.savetxt("m.csv", ring, delimiter=",")
    settings = ("--set", "algorithm.mixing=m.csv")
    whole = launch.launch(recipe.read(str(tiny), ["algorithm.mixing=m.csv"]), tmp_path / "whole")
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "whole" / "step-0000010.h5", tmp_path / "run" / "last.h5")
    if what == "changed":
        np.savetxt("m.csv", pairs, delimiter=",")
        code, _, err = command("train", tiny, *settings, "-o", "run", "--resume")
        assert (code, len(err.splitlines())) == (1, 1)
        assert "m.csv holds another matrix" in err
    else:
        Path("m.csv").unlink()
    if what == "elsewhere":
        (tmp_path / "there").mkdir()
        monkeypatch.chdir(tmp_path / "there")
    assert command("train", "-o", tmp_path / "run", "--resume", "-q")[0] == 0
    same_bits(whole, Checkpoint.load(tmp_path / "run" / "last.h5"))
    assert command("info", tmp_path / "run" / "last.h5")[0] == 0


def test_a_checkpoint_comes_back_as_it_was(tiny: Path, tmp_path: Path) -> None:
    end = launch.launch(recipe.read(str(tiny)), tmp_path / "run")
    back = landscape.load(tmp_path / "run" / "last.h5")
    same_bits(end, back)
    assert back.layout == end.layout
    assert back.model == {"name": "mlp", "options": {"widths": [6, 8, 3], "activation": "tanh"}}
    assert (back.learners, back.local_batch, back.lr, back.algorithm) == (4, 10, 0.2, "dpsgd")
    assert back.epoch == 30 * 40 / 200
    assert (back.data["train"], back.data["test"]) == (200, 100)
    assert recipe.read(str(tmp_path / "run" / "recipe.toml")) == recipe.from_values(
        recipe.parse(back.recipe, "")
    )
    problem = back.problem("test")
    assert problem.evaluate() == (back.history["test_loss"][-1], back.history["test_accuracy"][-1])
    assert torch.equal(back.problem(learner=2).theta, back.weights[2])


def test_a_checkpoint_that_is_handed_over_never_changes(tiny: Path) -> None:
    settings = ["checkpoint.every=1", "optimizer.momentum=0.9", "algorithm={name='slowmo', period=4}"]
    seen: list[Checkpoint] = []
    kept: list[Checkpoint] = []

    def save(state: Checkpoint) -> None:
        seen.append(state)
        kept.append(copy.deepcopy(state))

    Trainer(recipe.read(str(tiny), settings), hooks=Hooks(save=save)).run()
    for mine, theirs in zip(seen, kept, strict=True):
        same_bits(mine, theirs)


def test_the_history_has_numbers_where_they_are_due(tiny: Path) -> None:
    h = Trainer(recipe.read(str(tiny))).run().history
    np.testing.assert_array_equal(h["step"], np.arange(1, 31))
    due = h["step"] % 3 == 0
    for name in ("alpha_e", "grad_norm2", "displacement2", "delta", "delta_s", "delta_2", "train_loss"):
        np.testing.assert_array_equal(np.isfinite(h[name]), due, err_msg=name)
    np.testing.assert_array_equal(np.isfinite(h["test_loss"]), (h["step"] % 7 == 0) | (h["step"] == 30))
    assert np.all(h["consensus"] > 0)
    assert np.all(np.diff(h["wall_s"]) > 0)


def test_learners_that_drift_apart_are_told_from_a_mean_that_explodes(tmp_path: Path) -> None:
    assert Trainer(quadratic(lr=0.62)).run().diverged == ""
    apart = launch.launch(quadratic(lr=0.75), tmp_path / "a")
    assert apart.diverged == "learners"
    assert 0 < apart.diverged_at == apart.step < 400
    exploded = launch.launch(quadratic(lr=2.5, algorithm={"name": "ssgd"}), tmp_path / "b")
    assert exploded.diverged == "mean"
    assert exploded.step < exploded.diverged_at + 1
    for end, folder in ((apart, "a"), (exploded, "b")):
        assert bool(torch.isfinite(end.weights).all())
        same_bits(end, Checkpoint.load(tmp_path / folder / "last.h5"))
        same_bits(end, launch.launch(None, tmp_path / folder, resume=True))  # nothing more to do


def test_an_overflow_keeps_the_last_finite_state(tmp_path: Path) -> None:
    heavy = {"name": "sgd", "momentum": 0.9}
    chosen = quadratic(lr=1e200, diverge={"loss": 1e308, "consensus": 1e300}, optimizer=heavy)
    end = launch.launch(chosen, tmp_path / "a")
    assert end.diverged == "mean"
    assert bool(torch.isfinite(end.weights).all())
    assert bool(torch.isfinite(end.optimizer["momentum"]).all())
    assert end.diverged_at == end.step + 1


def test_another_runs_folder_is_refused_and_force_clears_it(tiny: Path, tmp_path: Path) -> None:
    chosen = recipe.read(str(tiny))
    launch.launch(chosen, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(FailedError, match="holds a run already"):
        launch.launch(chosen, tmp_path / "run")
    short = recipe.read(str(tiny), ["steps=5"])
    launch.launch(short, tmp_path / "run", force=True)
    names = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert names == ["last.h5", "notes.txt", "recipe.toml", "step-0000000.h5", "step-0000005.h5"]


def test_a_failed_start_leaves_no_folder(tiny: Path, tmp_path: Path) -> None:
    wrong = recipe.read(str(tiny), ["data.name=mnist", "data={name='mnist'}"])
    with pytest.raises(FailedError, match="download the four IDX files"):
        launch.launch(wrong, tmp_path / "run", data_dir=tmp_path)
    for settings, message in (
        ("model.widths=[5, 3]", r"model and data do not fit.*inputs \(12, 6\)"),
        ("model.widths=[6, 4]", r"outputs of shape \(4,\), data 'synthetic' needs \(3,\)"),
        ("model.widths=[6]", r"model.widths: \[6\] is not allowed"),
        ("model.activation=rleu", "did you mean 'relu'"),
        ("decompose.samples=100", "decompose.samples: 100 is not allowed, it must be a multiple of 16"),
    ):
        with pytest.raises(InputError, match=message):
            launch.launch(recipe.read(str(tiny), [settings]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_data_than_the_runs_is_refused(tiny: Path, tmp_path: Path) -> None:
    launch.launch(recipe.read(str(tiny)), tmp_path / "run")
    end = landscape.load(tmp_path / "run" / "last.h5")
    end.data["options"]["seed"] = 1  # the same name and sizes, other samples
    with pytest.raises(FailedError, match="fingerprint"):
        end.problem()
    with pytest.raises(InputError, match="learner: 4 is not allowed, it must be 'mean' or 0…3"):
        end.problem(learner=4)
