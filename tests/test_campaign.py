"""Campaigns: records, budgets, versions of the numerics, runs that follow from others."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import landscape
from landscape.core import registry
from landscape.core.errors import LandscapeError, OperationError
from landscape.core.registry import version_of
from landscape.paper import figure, pages
from landscape.paper.context import Cell, Context, OutOfTimeError, WeightsNeededError, identity
from landscape.paper.figure import Drawing, Figure
from landscape.paper.record import FEW, POINTS, Record, Store
from landscape.results.flatness import Stability
from landscape.training.recipes import Decompose, Evaluate, Save
from landscape.training.recipes.recipe import read
from landscape.training.run import launch
from landscape.training.run.launch import TrainingJob, train_one
from landscape.training.run.loop import Trainer
from tests.conftest import Command
from tests.test_cli import one_line
from tests.test_figures import small, with_runs


def test_a_record_holds_what_is_drawn_of_a_run(tmp_path: Path) -> None:
    context = Context(tmp_path)
    context.train([small()])
    end = landscape.load(context.run_folder(small()) / "last.h5")
    record = context.record(small())
    assert record is not None
    stored = tmp_path / "records" / f"{identity(small())}.json"
    read = Record.read(stored.read_bytes(), small(), "here").checkpoint()
    assert (read.step, read.seed, read.label, read.epoch) == (end.step, end.seed, end.label, end.epoch)
    assert (read.lr, read.local_batch, read.learners, read.data) == (
        end.lr, end.local_batch, end.learners, end.data,
    )  # fmt: skip
    for name in ("step", "lr", "loss", "alpha_e", "delta", "consensus", "test_accuracy"):
        np.testing.assert_allclose(read.history[name], end.history[name], rtol=1e-5, err_msg=name)
    assert record.checkpoints == (0, 4)
    assert read.weights.shape == (5, 0)
    with pytest.raises(LandscapeError, match=r"fit|shape|match|size"):
        read.problem("train").loss()


def test_keys_that_were_renamed_keep_the_records_of_before() -> None:
    plain, ranked, rounded = (
        read("saddle-dpsgd"), read("saddle-dpsgd", ["monitor.k=10", "monitor.sharpness=5"]),
        read("digits-dpsgd", ["autocast=bfloat16", "monitor.k=7"]),
    )  # fmt: skip
    assert [identity(run) for run in (plain, ranked, rounded)] == [  # as 0.17 has them
        "f8581677e33b17c76b5c5a69", "668626497f1e2d337e74ab7b", "04eb32f353943f60f6818c9f",
    ]  # fmt: skip


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    run = small(steps=4)
    context = Context(tmp_path)
    context.train([run])
    end = landscape.load(context.run_folder(run) / "last.h5")
    long = 5 * POINTS
    end.step, end.recipe = long, dataclasses.replace(run, steps=long).to_toml()
    end.history = {name: np.full(long, np.nan) for name in end.history}
    end.history |= {name: np.linspace(2, 1, long) for name in ("loss", "consensus")}
    end.history |= {"step": np.arange(1.0, long + 1), "wall_s": np.ones(long)}
    end.history["test_loss"][[9, long - 1]] = 0.5, np.inf
    thin = Record.of(end, [0, long]).checkpoint().history
    assert len(thin["step"]) <= POINTS + FEW + 2
    assert (thin["step"][0], thin["step"][-1]) == (1, long)
    assert np.isfinite(thin["consensus"]).sum() == POINTS
    assert np.isfinite(thin["loss"]).sum() == FEW + 1  # with the one at the step of an evaluation
    assert thin["test_loss"][np.isfinite(thin["test_loss"])].tolist() == [0.5]


@pytest.mark.parametrize("text", ["{", "{}", '{"recipe": 3}', "[]"])
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "records" / f"{identity(small())}.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(OperationError, match="damaged .*delete it"):
        with_runs(Context(tmp_path), small()).missing()


def _entry(**more: Any) -> Figure:
    texts = dict.fromkeys(("where", "title", "claims", "finding", "laptop"), "x")
    nothing = Drawing({}, pd.DataFrame(), [])
    made: dict[str, Any] = {"name": "x", "judge": lambda rows: [], "draw": lambda context: nothing}
    return Figure(**texts, **(made | more))


def test_numerics_that_change_make_everything_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(tmp_path)
    context.train([small()])
    assert with_runs(context, small()).missing() == []
    monkeypatch.setitem(registry._VERSIONS, Trainer, version_of(Trainer) + 1)
    assert len(with_runs(Context(tmp_path), small()).missing()) == 1
    made = []

    @registry.numerics(1)
    def analysis() -> Stability:
        made.append(1)
        return Stability(
            delay=np.array([0]), limit=np.ones((3, 1)), momentum=0.9, lambda_max=1.0, residual=0.0,
            converged=True, lr=0.1, own_limit=2.0, own_delay=0, samples=10,
        )  # fmt: skip

    def count(**settings: int) -> int:
        assert context.cached(Stability, [], settings, analysis, (analysis,))[0].lambda_max == 1.0
        return len(made)

    assert [count(), count(), count(a=2), count()] == [1, 1, 2, 2]
    monkeypatch.setitem(registry._VERSIONS, analysis, 2)
    assert count() == 3
    assert context.versions == {"analysis": 2}
    for path in (tmp_path / "records").glob("*.h5"):
        path.write_bytes(b"not HDF5")
    with pytest.raises(OperationError, match="h5"):
        count()


def test_analyses_are_kept_with_the_records_and_weights_made_again_where_they_are_needed(
    tmp_path: Path,
) -> None:
    cells = [Cell({"seed": 0}, small())]

    def draw(context: Context) -> Drawing:
        (run,) = context.ended()
        surface, loss = context.contour(run.last, grid=3), run.end.history["loss"]
        return Drawing({}, pd.DataFrame({"fall": loss[0] - loss, "rise": surface.loss[0, 0]}), [])

    def csv(context: Context) -> bytes:
        pages.draw(entry, context, tmp_path / "g")
        return (tmp_path / "g" / "x.csv").read_bytes()

    entry = _entry(weights=True, draw=draw)
    first, other = (
        Context(tmp_path / name, scale="smoke", records=tmp_path / "records", cells=cells) for name in "12"
    )
    first.train([small()])
    drawn = csv(first)
    assert csv(other) == drawn
    assert not (tmp_path / "2" / "runs").exists()
    packed = {path.name: path.read_bytes() for path in (tmp_path / "records").iterdir()}
    assert packed.keys() == {"runs.tar.xz", "analyses.tar.xz"}
    (tmp_path / "records" / "analyses.tar.xz").unlink()
    third = dataclasses.replace(other, folder=tmp_path / "3", until=0.0, _stores={})
    with pytest.raises(OutOfTimeError):
        csv(third)
    again = dataclasses.replace(third, until=math.inf)
    assert csv(again) == drawn
    assert again.run_folder(small()).exists()
    assert (tmp_path / "records" / "runs.tar.xz").read_bytes() == packed["runs.tar.xz"]


@settings(max_examples=20, deadline=None)
@given(cut=st.floats(0, 1), flip=st.integers(0, 255))
def test_a_damaged_archive_is_one_line(cut: float, flip: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name, "a.tar.xz"), Path(name))
        store.add(f"{0:024x}.json", b"{}")
        store.pack([f"{0:024x}.json"])
        whole = bytearray(store.archive.read_bytes())
        whole[int(cut * (len(whole) - 1))] ^= flip
        store.archive.write_bytes(whole)
        if flip:
            with pytest.raises(OperationError, match=r"a.tar.xz: damaged \(.+\); delete it to make its runs"):
                _ = Store(store.archive, Path(name)).packed
        store.archive.write_bytes(whole[: int(cut * (len(whole) - 1))])
        with pytest.raises(OperationError, match="damaged"):
            _ = Store(store.archive, Path(name)).packed


def test_an_archive_is_left_alone_where_nothing_is_new(tmp_path: Path) -> None:
    names = [f"{k:024x}.json" for k in range(3)]
    store = Store(tmp_path / "a.tar.xz", tmp_path / "new")
    for name in names:
        store.add(name, name.encode())
    store.pack(names[:2])
    stamp = store.archive.stat().st_mtime_ns
    other = Store(store.archive, tmp_path / "none")
    other.pack(names)
    assert store.archive.stat().st_mtime_ns == stamp
    assert [other.read(name) for name in names] == [names[0].encode(), names[1].encode(), None]
    store.pack(names[1:])
    assert [*Store(store.archive, tmp_path / "none").packed] == names[1:]


@pytest.mark.slow
def test_a_budget_stops_and_the_same_command_goes_on(tmp_path: Path, command: Command) -> None:
    options = ("noise-split", "--scale", "smoke", "-o", tmp_path / "g", "--runs", tmp_path / "r")
    code, out, err = command("figures", *options, "--budget", "0.000001s")
    assert (code, out) == (0, "")
    assert "4 of 4 runs have not ended" in err
    assert "0.000001s are used; the same command resumes noise-split" in err
    code, out, err = command("figures", *options, "--budget", "1d")
    assert (code, "noise-split.png" in out) == (0, True), err
    assert "(4 of 4 runs to train)" in err
    shutil.rmtree(tmp_path / "g")
    code, _, err = command("figures", *options)
    assert (code, "(0 of 4 runs to train)" in err) == (0, True)
    # Figure 2 has these runs, too.
    code, out, err = command("figures", "fig2a", "--dry-run", *options[1:])
    assert (code, "fig2a: 4 of 6 runs to train" in out) == (0, True), err


def test_shares_train_all_runs_and_the_command_without_them_draws(tmp_path: Path, command: Command) -> None:
    options = ("noise-split", "fig2a", "--scale", "smoke", "-o", tmp_path / "g", "--runs", tmp_path / "r")
    for share, ended in (("2/2", 4), ("1/2", 8)):  # two runs are in both figures
        code, out, err = command("figures", *options, "--share", share)
        assert (code, f"share {share}: 4 of 4 runs have ended" in out) == (0, True), err
        assert len(list((tmp_path / "r").rglob("last.h5"))) == ended
        assert not list((tmp_path / "g").glob("*.*"))
    code, out, err = command("figures", *options, "--share", "1/4", "--budget", "0.000001s")
    assert (code, "share 1/4: 2 of 2 runs have ended" in out) == (0, True), err
    one_line(command("figures", *options, "--share", "1/9"), 2, "--share", "N ≤ 8, the number of runs")
    one_line(command("figures", *options, "--share", "1/2", "--dry-run"), 2, "--share", "--dry-run")
    one_line(command("figures", "--share", "1/2"), 2, "--share", "without a NAME")
    code, _, err = command("figures", "noise-split", *options[2:])
    assert (code, "(0 of 4 runs to train)" in err) == (0, True), err
    shutil.rmtree(tmp_path / "r")  # its records are packed now
    code, out, err = command("figures", "noise-split", *options[2:], "--share", "2/2")
    assert (code, "share 2/2: 2 of 2 runs have ended" in out) == (0, True), err
    assert not list((tmp_path / "r").rglob("*.h5"))


def test_a_run_stops_at_its_time_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(steps=60, checkpoint=Save(every=20), decompose=Decompose(every=0), evaluate=Evaluate(every=0))
    folder = tmp_path / "run"
    assert train_one(TrainingJob(run, folder), "cpu", None, time.time() - 1) is None
    assert not folder.exists()
    clock = iter([0.0, *np.arange(30.0)])  # the time is over in step 29, after the checkpoint of step 20
    stopped = SimpleNamespace(time=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(launch, "time", stopped)
    assert train_one(TrainingJob(run, folder), "cpu", None, 27.5) is None
    assert landscape.load(folder / "last.h5").step == 20
    monkeypatch.undo()
    assert train_one(TrainingJob(run, folder), "cpu", None) is not None
    whole = tmp_path / "whole"
    train_one(TrainingJob(run, whole), "cpu", None)
    a, b = (landscape.load(f / "last.h5") for f in (folder, whole))
    np.testing.assert_array_equal(a.weights, b.weights)


def test_weights_are_deleted_where_no_figure_needs_them(tmp_path: Path) -> None:
    kept, other = small(seed=3), small(seed=4)
    context = Context(tmp_path, runs_with_weights={identity(kept)})
    context.train([kept, other])
    assert with_runs(context, kept, other).missing() == []
    assert context.run_folder(kept).exists()
    assert not context.run_folder(other).exists()
    (run,) = context.of([Cell({"seed": 4}, other)]).ended()
    assert [point.step for point in run.points] == [4]
    with pytest.raises(WeightsNeededError):
        run.last.load()
    wanted = figure.with_weights([figure.get("fig3"), figure.get("table1")], "smoke")
    assert wanted == {identity(cell.recipe) for cell in figure.get("fig3").runs("smoke")}


def test_a_figure_is_drawn_from_part_of_its_runs_only_if_it_can_be(tmp_path: Path) -> None:
    cells = [Cell({"what": "a", "_hidden": 1, "seed": seed}, small(seed=seed)) for seed in range(2)]
    context = Context(tmp_path, cells=cells)
    context.train([small()])
    with pytest.raises(OutOfTimeError):
        pages.draw(_entry(), context, tmp_path)
    assert [run.end.seed for run in context.ended(what="a")] == [0]
    assert context.ended(what="b") == []
    assert context.table(lambda run: {"of": run.end.algorithm}).to_dict("records") == [
        {"what": "a", "seed": 0, "of": "dpsgd"}
    ]
    assert "1 of 2 runs have not ended yet" in _entry().note(context)
