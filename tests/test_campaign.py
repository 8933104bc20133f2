"""Campaigns: records, budgets, versions of the numerics, runs that follow from others."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import landscape
from landscape.core import numerics
from landscape.core.errors import FailedError
from landscape.core.numerics import version_of
from landscape.paper import campaign, figure, gallery
from landscape.paper.figure import Drawing, Figure, Runs, Scale, WeightsNeededError, Work
from landscape.paper.figures import edges
from landscape.paper.record import POINTS, Record
from landscape.paper.run_cache import OutOfTimeError, RunCache, identity
from landscape.paper.scales import cell
from landscape.results.stability import Stability
from landscape.train import runs
from landscape.train.loop import Trainer
from landscape.train.recipe import Recipe
from landscape.train.recipe_tables import Decompose, Evaluate, Save
from landscape.train.runs import Run, train
from tests.conftest import Command
from tests.test_cli import one_line
from tests.test_figures import small


def test_a_record_holds_what_is_drawn_of_a_run(tmp_path: Path) -> None:
    cache = RunCache(tmp_path)
    cache.run([small()])
    end = landscape.load(cache.run_folder(small()) / "last.h5")
    record = cache.record(small())
    assert record is not None
    read = Record.read(tmp_path / "records" / f"{identity(small())}.json").checkpoint()
    assert (read.step, read.seed, read.label, read.epoch) == (end.step, end.seed, end.label, end.epoch)
    assert (read.lr, read.local_batch, read.learners, read.data) == (
        end.lr, end.local_batch, end.learners, end.data,
    )  # fmt: skip
    for name in ("step", "lr", "loss", "alpha_e", "delta", "consensus", "test_accuracy"):
        np.testing.assert_allclose(read.history[name], end.history[name], rtol=1e-5, err_msg=name)
    assert record.checkpoints == (0, 4)
    assert read.weights.shape == (5, 0)
    with pytest.raises(ValueError, match=r"fit|shape|match|size"):
        read.problem("train").loss()


def test_long_curves_are_thinned_and_keep_their_ends(tmp_path: Path) -> None:
    run = small(steps=4)
    cache = RunCache(tmp_path)
    cache.run([run])
    end = landscape.load(cache.run_folder(run) / "last.h5")
    long = 5 * POINTS
    end.step, end.recipe = long, dataclasses.replace(run, steps=long).to_toml()
    end.history = {name: np.full(long, np.nan) for name in end.history}
    end.history |= {
        "step": np.arange(1.0, long + 1),
        "loss": np.linspace(2, 1, long),
        "wall_s": np.ones(long),
    }
    end.history["test_loss"][[9, long - 1]] = 0.5, np.inf
    thin = Record.of(end, [0, long]).checkpoint().history
    assert len(thin["step"]) <= POINTS + 2
    assert (thin["step"][0], thin["step"][-1]) == (1, long)
    assert np.isfinite(thin["loss"]).sum() == POINTS
    assert thin["test_loss"][np.isfinite(thin["test_loss"])].tolist() == [0.5]


@pytest.mark.parametrize("text", ["{", "{}", '{"recipe": 3}', "[]"])
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "records" / f"{identity(small())}.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(FailedError, match="damaged .*delete it"):
        RunCache(tmp_path).missing([small()])


def test_a_run_is_made_again_once_its_numerics_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RunCache(tmp_path)
    cache.run([small()])
    assert cache.missing([small()]) == []
    monkeypatch.setitem(numerics._VERSIONS, Trainer, version_of(Trainer) + 1)
    assert len(RunCache(tmp_path).missing([small()])) == 1


def _entry(runs: Runs, **more: Any) -> Figure:
    notes: dict[Scale, str] = dict.fromkeys(figure.SCALES, "")
    return Figure(
        "x",
        "Ours",
        "t",
        "c",
        notes,
        lambda scale: runs,
        lambda rows: [],
        lambda work: Drawing({}, [], [], ""),
        **more,
    )


def test_an_analysis_is_made_again_once_its_numerics_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    @numerics.numerics(1)
    def analysis() -> Stability:
        made.append(1)
        return Stability(
            delay=np.array([0]), limit=np.ones((3, 1)), momentum=0.9, lambda_max=1.0, residual=0.0,
            converged=True, lr=0.1, own_limit=2.0, own_delay=0, samples=10,
        )  # fmt: skip

    work = Work(_entry({}), "laptop", RunCache(tmp_path), {})
    for _ in range(2):
        work.cached(Stability, [], {}, analysis, (analysis,))
    assert len(made) == 1
    monkeypatch.setitem(numerics._VERSIONS, analysis, 2)
    work.cached(Stability, [], {}, analysis, (analysis,))
    assert len(made) == 2
    assert work.versions == {"analysis": 2}


def test_analyses_are_kept_with_the_records_and_weights_made_again_where_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"a/0": small()}

    def draw(work: Work) -> Drawing:
        surface = work.contour(work.last("a/0"), grid=3)
        return Drawing({}, [{"rise": float(v)} for v in surface.loss.flat], [], "")

    entry = dataclasses.replace(_entry(runs, weights=True), draw=draw)
    monkeypatch.setattr(gallery, "make", lambda work, folder: (work.figure.draw(work), []))
    first = RunCache(tmp_path / "1", records=tmp_path / "records")
    first.run(runs.values())
    drawn, _ = campaign.draw(entry, "laptop", first, runs, tmp_path)
    other = RunCache(tmp_path / "2", records=tmp_path / "records")
    assert campaign.draw(entry, "laptop", other, runs, tmp_path)[0].rows == drawn.rows
    assert not (tmp_path / "2").exists()
    shutil.rmtree(tmp_path / "records" / "results")
    with pytest.raises(OutOfTimeError):
        campaign.draw(entry, "laptop", dataclasses.replace(other, until=0.0), runs, tmp_path)
    assert campaign.draw(entry, "laptop", other, runs, tmp_path)[0].rows == drawn.rows
    assert other.run_folder(small()).exists()


@pytest.mark.slow
def test_a_figure_is_drawn_from_records_alone(tmp_path: Path, command: Command) -> None:
    options = ("--scale", "smoke", "-o", tmp_path / "g")
    code, _, err = command("figures", "learners-plane", *options, "--runs", tmp_path / "r")
    assert code == 0, err
    before = (tmp_path / "g" / "learners-plane.csv").read_bytes()
    (tmp_path / "g" / "learners-plane.csv").unlink()
    # Another machine: no runs, and no data.
    code, _, err = command("figures", "learners-plane", *options, "--runs", tmp_path / "new")
    assert (code, "(0 of 2 runs to train)" in err) == (0, True), err
    assert (tmp_path / "g" / "learners-plane.csv").read_bytes() == before
    assert not (tmp_path / "new" / "runs").exists()
    # Where an analysis is missing, the runs that it needs are made again.
    shutil.rmtree(tmp_path / "g" / "records" / "results")
    code, _, err = command("figures", "learners-plane", *options, "--runs", tmp_path / "new")
    assert code == 0, err
    assert (tmp_path / "g" / "learners-plane.csv").read_bytes() == before
    assert len(list((tmp_path / "new" / "runs").iterdir())) == 2


@pytest.mark.slow
def test_a_budget_stops_and_the_same_command_goes_on_and_repeats_no_run(
    tmp_path: Path, command: Command
) -> None:
    options = ("noise-split", "--scale", "smoke", "-o", tmp_path / "g", "--runs", tmp_path / "r")
    one_line(command("figures", *options, "--budget", "6"), 2, "--budget", "'6'", "min, h, d")
    one_line(command("figures", *options, "--budget", "0h"), 2, "--budget", "> 0")
    code, out, err = command("figures", *options, "--budget", "0.000001s")
    assert (code, out) == (0, "")
    assert "4 of 4 runs have not ended" in err
    assert "0.000001s are used; the same command goes on with noise-split" in err
    code, out, err = command("figures", *options, "--budget", "1d")
    assert (code, "noise-split.png" in out) == (0, True), err
    assert "(4 of 4 runs to train)" in err
    shutil.rmtree(tmp_path / "g")
    code, _, err = command("figures", *options)
    assert (code, "(0 of 4 runs to train)" in err) == (0, True)
    # Figure 2 has these runs, too.
    code, out, err = command("figures", "fig2a", "--dry-run", *options[1:])
    assert (code, "fig2a: 4 of 6 runs to train" in out) == (0, True), err


def test_a_run_stops_at_its_time_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(steps=60, checkpoint=Save(every=20), decompose=Decompose(every=0), evaluate=Evaluate(every=0))
    folder = tmp_path / "run"
    assert train(Run(run, folder), "cpu", None, time.time() - 1) is None
    assert not folder.exists()
    clock = iter([0.0, *np.arange(30.0)])  # the time is over in step 29, after the checkpoint of step 20
    monkeypatch.setattr(
        runs, "time", SimpleNamespace(time=lambda: next(clock), perf_counter=time.perf_counter)
    )
    assert train(Run(run, folder), "cpu", None, 27.5) is None
    assert landscape.load(folder / "last.h5").step == 20
    monkeypatch.undo()
    assert train(Run(run, folder), "cpu", None) is not None
    whole = tmp_path / "whole"
    train(Run(run, whole), "cpu", None)
    a, b = (landscape.load(f / "last.h5") for f in (folder, whole))
    np.testing.assert_array_equal(a.weights, b.weights)


def test_weights_are_deleted_where_no_figure_needs_them(tmp_path: Path) -> None:
    kept, other = small(seed=3), small(seed=4)
    cache = RunCache(tmp_path, kept={identity(kept)})
    cache.run([kept, other])
    assert cache.missing([kept, other]) == []
    assert cache.run_folder(kept).exists()
    assert not cache.run_folder(other).exists()
    work = Work(_entry({"a/4": other}), "laptop", cache, {"a/4": other})
    assert [point.step for point in work.points("a/4")] == [4]
    with pytest.raises(WeightsNeededError):
        work.last("a/4").load()
    wanted = campaign.with_weights([figure.get("fig3"), figure.get("table1")], "smoke")
    assert wanted == {identity(r) for r in figure.get("fig3").runs("smoke").values()}


def test_a_figure_is_drawn_from_part_of_its_runs_only_if_it_can_be(tmp_path: Path) -> None:
    runs = {"a/0": small(), "a/1": small(seed=1)}
    cache = RunCache(tmp_path)
    cache.run([runs["a/0"]])
    with pytest.raises(OutOfTimeError):
        campaign.draw(_entry(runs), "laptop", cache, runs, tmp_path)
    work = Work(_entry(runs), "laptop", cache, runs)
    assert [run.seed for run in work.group("a")] == [0]
    assert "1 of 2 runs have not ended yet" in work.about


@pytest.mark.parametrize(
    ("errors", "found"),
    [
        ({1: 60.0, 2: 50.0, 4: 90.0}, (2, 4)),
        ({1: 90.0}, (1, 1)),
        ({1: 60.0, 2: 61.0, 4: 62.0, 8: 63.0, 16: 64.0, 32: 65.0}, (1, 64)),
    ],
)
def test_the_rate_is_doubled_until_ssgd_fails(
    errors: dict[float, float], found: tuple[float, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(edges, "error", lambda run: errors[run])
    monkeypatch.setattr(edges, "chance", lambda run: 90.0)
    monkeypatch.setattr(Work, "ended", lambda self, key: True)
    monkeypatch.setattr(Work, "group", lambda self, prefix: [float(prefix.partition(" × ")[2] or 1)] * 3)
    runs: dict[str, Recipe] = {}
    tried = []
    for _ in range(20):
        work = Work(_entry(runs), "workstation", RunCache(tmp_path), runs)
        more = {k: r for k, r in edges.search(work, "senet-18", 8192).items() if k not in runs}
        if not more:
            break
        runs |= more
        tried.append({(k.rpartition("/")[0].partition("-b8192-")[2], r.lr) for k, r in more.items()})
    work = Work(_entry(runs), "workstation", RunCache(tmp_path), runs)
    assert edges.edge(work, "senet-18", 8192) == found
    ssgd = [("ssgd" if f == 1 else f"ssgd × {f:g}", pytest.approx(0.1 * f)) for f in errors]
    assert [next(iter(each)) for each in tried[: len(errors)]] == ssgd
    last = {name for name, _ in tried[-1]}
    assert last == {f"dpsgd × {f:g}" if f != 1 else "dpsgd" for f in found if f <= 32}


def test_workstation_cells_are_the_papers_but_for_width_and_length() -> None:
    for algorithm in ("ssgd", "dpsgd"):
        run = cell("workstation", f"cifar10/senet-18-b8192-{algorithm}", 1)
        assert (run.learners, run.batch, run.schedule.peak_lr(run.lr, run.batch)) == (
            16,
            8192,
            pytest.approx(0.8),
        )
        assert (run.model["width"], run.data["name"], "subset" in run.data) == (0.125, "cifar10", False)
        assert run.steps == 49
        assert run.monitor.sharpness
        assert run.stability_limit() is not None
    runs = edges.runs_at("workstation", "senet-18", 8192, edges.variants("senet-18"), (1.0, 4.0))
    assert len(runs) == 2 * 5 * 3
    assert edges.key("senet-18", 8192, "ssgd", 1.0) == "cifar10/senet-18-b8192-ssgd"
    limits = {key: run.stability_limit() for key, run in runs.items() if key.endswith("× 4/0")}
    found = [round(limit, 3) for limit in limits.values() if limit]
    assert found == [3.8, 2.011, 2.401, 1.162, 3.8]  # SSGD; AWC, ATC; with momentum averaged AWC, ATC
