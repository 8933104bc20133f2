"""Sweeps: the grid, the search and the table, what is gone on with, and the recipes of the papers' tables."""

from __future__ import annotations

import csv
import math
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import InputError, plots
from landscape.cli.train import split
from landscape.core.files import Lock
from landscape.core.options import toml_value
from landscape.results.grids import COLUMNS, Sweep, texts
from landscape.training.experiments.sweep import Runner, Setting, canonical, find_best, folder_name, grid
from landscape.training.recipes import NETWORKS, names, recipe
from landscape.training.recipes.settings import parse_value
from landscape.training.run.launch import share_of
from tests.conftest import Command, wait_for
from tests.harm.commands import contents, difference
from tests.test_cli import one_line
from tests.test_launching import STARTING, linux, running

SMALL = ("--set", "steps=8", "--set", "evaluate.every=4", "--set", "decompose.every=0")


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def without_seconds(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows(folder)]


# Values and names.


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("0.1,1", ["0.1", "1"]),
        ("ring(1),full", ["ring(1)", "full"]),
        ("[64, 10],[64, 5, 10]", ["[64, 10]", "[64, 5, 10]"]),
        ('{name="ssgd"},{name="dpsgd", mixing="ring(1)"}', ['{name="ssgd"}', '{name="dpsgd", mixing="ring(1)"}']),
        ("1,", ["1", ""]),
    ],
)  # fmt: skip
def test_values_are_split_at_commas_outside_of_brackets_and_quotes(written: str, parts: list[str]) -> None:
    assert split(written) == parts


values = st.one_of(
    st.booleans(), st.integers(-(10**6), 10**6), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs", "Cc"])), st.lists(st.integers(0, 99), max_size=3),
    st.dictionaries(st.sampled_from(["name", "mixing"]), st.sampled_from(["dpsgd", "ring(1)"])),
)  # fmt: skip


@given(values)
def test_a_value_has_one_spelling_which_means_the_same(value: Any) -> None:
    once = canonical(parse_value(toml_value(value)))
    assert parse_value(once) == value
    assert canonical(parse_value(once)) == once


def test_the_grid_is_all_combinations_and_folders_are_named_from_them() -> None:
    found = grid(["a", "b"], {"lr": [0.10, 1.0], "algorithm.name": "ssgd*"})
    assert len(found) == 4
    assert found[0] == (("recipe", "a"), ("algorithm.name", "ssgd*"), ("lr", "0.1"))
    assert grid(["a"], {"lr": 1, "batch": np.int64(2)}) == grid(["a"], {"batch": 2.0, "lr": np.array([1.0])})
    assert folder_name((("recipe", "x/y"), ("lr", "0.1"))) == "x-y,lr=0.1"
    names = {folder_name(s) for s in [*found, *grid(["a"], {"lr": range(1, 3), "algorithm.name": "ssgd~"})]}
    assert len(names) == 6
    assert all(len(folder_name((("recipe", "a"), ("k", "v" * n)))) < 200 for n in (1, 100, 1000))


def test_a_table_has_infinite_losses(tmp_path: Path) -> None:
    (setting,) = grid(["a"], {"lr": 1})
    runner = Runner(tmp_path, [0, 1], ["lr"], *[lambda *args: None] * 4, share=None)  # type: ignore[misc,list-item]
    ends = {"test_loss": math.inf, "test_error": 90.0, "best_test_error": 5.0}
    ends |= {"diverged": 1.0, "seconds": 1.0}
    runner.outcomes[setting] = {0: ends, 1: ends | {"test_loss": 1.0, "test_error": 10.0, "diverged": 0.0}}
    table = runner.result()
    assert (table.test_loss[0], table.test_error[0], table.diverged[0]) == (math.inf, 50.0, 1.0)
    assert math.isnan(table.test_loss_std[0])
    assert table.test_error_std[0] == pytest.approx(math.sqrt(3200))
    del runner.outcomes[setting][1]
    assert math.isnan(runner.result().test_error_std[0])


# The search.


class Valley:
    """A runner without runs, whose score is the distance from ``bottom``, steeper on one side."""

    def __init__(self, bottom: float, steep: float) -> None:
        self.bottom, self.steep, self.asked = bottom, steep, list[Setting]()

    def run(self, settings: Iterable[Setting]) -> None:
        self.asked += settings

    def score(self, setting: Setting) -> tuple[int, float]:
        away = math.log10(float(dict(setting)["s"])) - self.bottom
        return 0, max(-away, self.steep * away)


@given(st.floats(-5, 1), st.floats(0.1, 10), st.integers(1, 8))
def test_the_search_finds_the_bottom_of_a_valley(bottom: float, steep: float, rounds: int) -> None:
    runner: Any = Valley(bottom, steep)
    (base,) = grid(["r"], {})
    found = find_best(runner, [base], "s", 1e-5, 10.0, rounds)
    away = math.log10(float(found[base])) - bottom
    assert abs(away) <= 6 / 2 ** (rounds + 1) + 1e-5
    assert len(runner.asked) == len(set(runner.asked)) <= 3 + 2 * rounds
    assert {"1e-05", "10", "0.01"} <= {dict(s)["s"] for s in runner.asked}


def test_the_search_trains_each_value_once_and_puts_divergence_last(tmp_path: Path, command: Command) -> None:
    """½·λw² with λ = 1, 2 from w = 1: the best rate is 2/3, and beyond 1 the loss grows."""
    changes = ["data={name='quadratic', dimension=2}", "model={name='quadratic', eigenvalues=[1.0, 2.0]}"]
    flags = [part for s in [*changes, "steps=20"] for part in ("--set", s)]
    args = ("sweep", "digits-ssgd", *flags, "--set", "decompose.every=0", "--search", "lr=0.01..100")
    code, out, _ = command(*args, "--rounds", "2", "-o", tmp_path)
    assert code == 0
    assert out.split()[-2:] == [str(tmp_path / "sweep.csv"), str(tmp_path / "sweep.h5")]
    table = rows(tmp_path)
    assert 3 < len(table) <= 7
    assert list(table[0])[:2] == ["recipe", "lr"]
    assert [float(r["lr"]) for r in table] == sorted(float(r["lr"]) for r in table)
    assert {r["diverged"] for r in table if float(r["lr"]) > 2} == {"1"}
    sound = [r for r in table if r["diverged"] == "0"]
    best = min(sound, key=lambda r: float(r["test_loss"]))
    assert 0.3 < float(best["lr"]) < 1
    assert f"digits-ssgd: best lr of the values evaluated: {best['lr']}" in out
    assert command(*args, "--rounds", "2", "-o", tmp_path, "-q")[0] == 0
    assert rows(tmp_path) == table  # nothing ran again: not even the seconds changed


# The table.


def test_the_table_is_what_a_hand_computes(tiny: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "s"
    code, out, err = command("sweep", tiny, *SMALL, "--set", "lr=0.1,0.5", "--seeds", "0-1,4", "-o", folder)
    assert code == 0
    assert out.endswith(f"\n{folder}/sweep.csv\n{folder}/sweep.h5\n")
    assert (err.count("test loss"), out.count("test loss")) == (6, 1)
    table, result = rows(folder), landscape.load(folder / "sweep.h5")
    assert isinstance(result, Sweep)
    assert result.keys == ("recipe", "steps", "evaluate.every", "decompose.every", "lr")
    assert result.seed_lists == [[0, 1, 4], [0, 1, 4]]
    for i, lr in enumerate(("0.1", "0.5")):
        ends = [landscape.load(p) for p in sorted(folder.glob(f"*lr={lr},*/seed-*/last.h5"))]
        assert [end.seed for end in ends] == [0, 1, 4]
        assert [recipe.from_values(tomllib.loads(end.recipe)).lr for end in ends] == [float(lr)] * 3
        losses = [end.history["test_loss"][-1] for end in ends]
        errors = [100 * (1 - end.history["test_accuracy"][-1]) for end in ends]
        bests = [100 * (1 - np.nanmax(end.history["test_accuracy"])) for end in ends]
        expected = {"diverged": 0.0, "seconds": np.mean([end.history["wall_s"][-1] for end in ends])}
        for name, v in (("test_loss", losses), ("test_error", errors), ("best_test_error", bests)):
            mean = sum(v) / 3
            expected |= {name: mean, f"{name}_std": math.sqrt(sum((x - mean) ** 2 for x in v) / 2)}
        assert set(expected) == set(COLUMNS)
        assert (table[i]["recipe"], table[i]["lr"], table[i]["seeds"]) == ("tiny", lr, "3")
        for name, value in expected.items():
            assert getattr(result, name)[i] == pytest.approx(value)
            assert float(table[i][name]) == pytest.approx(value)


def test_more_values_and_seeds_are_added_once(tiny: Path, tmp_path: Path, command: Command) -> None:
    args = ("sweep", tiny, *SMALL, "-o", tmp_path / "s")
    assert command(*args, "--set", "lr=0.1,0.2", "--seeds", "0")[0] == 0
    assert command("train", tiny, *SMALL, "--set", "lr=0.1", "-o", tmp_path / "t")[0] == 0
    (path,) = (tmp_path / "s").glob("*lr=0.1*/seed-0/last.h5")  # a run of a sweep is that of train
    a, b = landscape.load(path), landscape.load(tmp_path / "t" / "last.h5")
    assert (bool((a.weights == b.weights).all()), a.recipe) == (True, b.recipe)
    assert np.isnan(landscape.load(tmp_path / "s" / "sweep.h5").test_loss_std).all()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s").glob("*/*/*")}
    code, _, err = command(*args, "--set", "lr=0.20,0.3", "--seeds", "0,1")
    assert code == 0
    assert err.count("seed-") == 3
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert [(r["lr"], r["seeds"]) for r in rows(tmp_path / "s")] == [("0.1", "1"), ("0.2", "2"), ("0.3", "2")]
    assert command(*args, "--set", "batch=80", "--seeds", "0")[0] == 0  # other keys: other columns
    first = rows(tmp_path / "s")[0]
    assert (first["batch"], first["lr"]) == ("80", "")


@pytest.mark.slow
def test_several_processes_make_the_same_table(tiny: Path, tmp_path: Path, command: Command) -> None:
    args = ("sweep", tiny, *SMALL, "--set", "lr=0.1,0.2")
    assert command(*args, "-o", tmp_path / "one")[0] == 0
    code, _, err = command(*args, "--jobs", "2", "-o", tmp_path / "two")
    assert (code, err.count("seed-0")) == (0, 2)
    assert without_seconds(tmp_path / "one") == without_seconds(tmp_path / "two")


@pytest.mark.slow
@given(st.integers(1, 30), st.integers(1, 30))
def test_shares_are_disjoint_and_all_of_the_runs(items: int, shares: int) -> None:
    if shares > items:
        with pytest.raises(InputError, match=f"share: '1/{shares}' is not allowed, {items} runs have"):
            share_of(range(items), f"1/{shares}")
        return
    parts = [share_of(range(items), f"{k}/{shares}") for k in range(1, shares + 1)]
    assert sorted(item for part in parts for item in part) == list(range(items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert share_of(range(items), None) == list(range(items))


def test_shares_make_runs_and_the_command_a_table(tiny: Path, tmp_path: Path, command: Command) -> None:
    args = ("sweep", tiny, *SMALL, "--set", "lr=0.1,0.2,0.3", "--seeds", "0,1")
    one, two = tmp_path / "one", tmp_path / "two"
    assert command(*args, "-o", one)[0] == 0
    two.mkdir()
    with Lock(two) as other:  # a share works beside commands that have the folder
        other.acquire()
        code, out, err = command(*args, "--share", "2/4", "-o", two)
    assert (code, len(list(two.rglob("last.h5")))) == (0, 2)
    assert len(out.splitlines()) == 3, err
    assert "share 2/4 has ended; the same command without --share makes the table" in err
    for share in ("1/4", "4/4", "3/4"):
        assert command(*args, "--share", share, "-o", two)[0] == 0
        assert not list(two.glob("sweep.*"))
    # The command that collects leaves a run to the share that has it.
    (folder,) = two.glob("*lr=0.2*/seed-0")
    shutil.rmtree(folder)
    folder.mkdir()
    with Lock(folder) as other:
        other.acquire()
        one_line(command(*args, "-q", "-o", two), 1, f"{folder}: in use by process")
    assert command(*args, "--share", "3/6", "-o", two)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in two.rglob("last.h5")}
    assert command(*args, "-o", two)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in two.rglob("last.h5")} == before
    assert without_seconds(two) == without_seconds(one)
    assert difference(contents(one), contents(two)) == ""
    # A share that is asked for again leaves the table as it is.
    table = (two / "sweep.h5").read_bytes()
    assert command(*args, "--share", "1/2", "-o", two)[0] == 0
    assert (two / "sweep.h5").read_bytes() == table


@linux
@pytest.mark.slow
def test_shares_at_once_lose_nothing_after_an_end(tiny: Path, tmp_path: Path, command: Command) -> None:
    several = ("--set", "steps=800", "--set", "lr=0.1,0.2,0.3", "--set", "checkpoint.every=40")
    args, one, two = ("sweep", tiny, *several, "-q"), tmp_path / "one", tmp_path / "two"
    with (
        running(*args, "--share", "1/2", "-o", two) as first,
        running(*args, "--share", "2/2", "-o", two) as other,
    ):
        wait_for(lambda: list(two.rglob("step-0000080.h5")))
        first.kill()
        first.wait()
        assert command(*args, "--share", "1/2", "-o", two)[0] == 0
        assert other.wait(STARTING) == 0
    assert command(*args, "-o", two)[0] == 0
    assert command(*args, "-o", one)[0] == 0
    assert difference(contents(one), contents(two)) == ""


def test_a_failure_in_a_process_is_one_line(tiny: Path, tmp_path: Path, command: Command) -> None:
    occupied = tmp_path / "s" / "tiny" / "seed-1"
    occupied.parent.mkdir(parents=True)
    occupied.write_text("no folder")
    args = (tiny, "--seeds", "0,1", "--jobs", "2", "-o", tmp_path / "s", "-q")
    one_line(command("sweep", *args), 1, f"{occupied}: {occupied}: cannot be made (File exists)")


def test_a_folder_of_another_recipe_is_refused(tiny: Path, tmp_path: Path, command: Command) -> None:
    args = ("sweep", tiny, *SMALL, "--set", "lr=0.3,0.1", "-o", tmp_path / "s")
    code, out, err = command(*args, "-q")
    assert (code, err) == (0, "")
    assert out.endswith(f"{tmp_path}/s/sweep.csv\n{tmp_path}/s/sweep.h5\n")
    before = (tmp_path / "s" / "sweep.csv").read_bytes()
    tiny.write_text(tiny.read_text().replace("[6, 8, 3]", "[6, 9, 3]"))
    one_line(command(*args), 1, "lr=0.3", "widths = [6, 8, 3]", "widths = [6, 9, 3] is not allowed")
    assert (tmp_path / "s" / "sweep.csv").read_bytes() == before


# The picture.


def made(keys: tuple[str, ...], settings: list[tuple[str, ...]], errors: list[float]) -> Sweep:
    columns = {name: np.full(len(errors), 0.5) for name in COLUMNS} | {"test_error": np.array(errors)}
    return Sweep(keys=keys, settings=texts(settings), seeds=texts(["0 1"] * len(errors)), **columns)


def test_a_sweep_is_drawn_against_the_first_key_that_varies(tmp_path: Path) -> None:
    settings = [("α", "5", "0.1"), ("α", "5", "1"), ("b", "5", "0.1"), ("b", "5", "1")]
    table = made(("recipe", "steps", "lr"), settings, [3.0, 40.0, 2.0, 4.0])
    table.save(tmp_path / "s.h5")
    figure = plots.draw([Sweep.load(tmp_path / "s.h5")])
    (ax,) = figure.axes
    assert (ax.get_xlabel(), ax.get_xscale(), ax.get_yscale()) == ("learning rate", "log", "log")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["α", "b"]
    np.testing.assert_array_equal(ax.containers[1].lines[0].get_xydata(), [[0.1, 2.0], [1.0, 4.0]])
    words = plots.draw([made(("recipe",), [("a",), ("b",)], [1.0, 2.0])]).axes[0]
    assert [t.get_text() for t in words.get_xticklabels()] == ["a", "b"]
    loss = plots.draw([made(("recipe",), [("a",), ("b",)], [math.nan, math.nan])]).axes[0]
    assert "test loss" in loss.get_ylabel()
    with pytest.raises(InputError, match="one row, there is nothing to draw"):
        plots.draw([made(("recipe",), [("a",)], [1.0])])


def test_a_report_of_a_sweep_has_its_best_row(tmp_path: Path, command: Command) -> None:
    made(("lr",), [("0.1",), ("1",)], [2.0, 3.0]).save(tmp_path / "s.h5")
    code, _, err = command("report", tmp_path / "s.h5", "-o", tmp_path / "page.html", "-q")
    assert code == 0, err
    page = (tmp_path / "page.html").read_text()
    assert '<th scope="row">best setting</th><td>lr = 0.1' in page
    assert page.count("<img ") == 1


# The recipes of the tables.


def test_every_cell_of_the_tables_has_a_recipe() -> None:
    """(batch, lr, algorithm) of Tables 2, 3 and 5, as the paper prints them."""
    rates = {1024: 0.1, 2048: 0.2, 4096: 0.4, 8192: 0.8}
    table2 = {(b, 0.1, "ssgd") for b in (128, 256, 512, 1024, 2048, 4096, 8192)}
    table3 = {(b, lr, a) for b, lr in rates.items() for a in ("ssgd", "dpsgd")}
    table5 = {(8192, lr, a) for lr in (0.8, 0.4, 0.2) for a in ("ssgd", "dpsgd")}
    for network in NETWORKS:
        found = set()
        for name in names():
            if not name.startswith(f"cifar10/{network}-b") or name.endswith("noise"):
                continue
            r = recipe.read(name)
            found.add((r.batch, round(r.schedule.peak_lr(r.lr, r.batch), 9), r.part("algorithm")[0]))
            assert r.name == name
            assert r.part("model") == (network, {})
            assert r.learners == (16 if r.batch >= 1024 else 1)
            assert abs(r.steps * r.batch / 50_000 - 320) < 0.1
            assert [r.rate(t, 50_000) / r.rate(1, 50_000) for t in (r.steps * 2 // 3, r.steps)] == (
                pytest.approx([0.1, 0.01])
            )
            assert r.part("optimizer")[1] == {"momentum": 0.9, "weight_decay": 5e-4}
            assert r.spec("data").options == {"normalize": True, "augment": True, "subset": 0, "size": 32}
            if "dpsgd" in name:
                assert r.part("algorithm")[1]["mixing"] == "random-matching"
        assert found == table2 | table3 | table5


def test_noise_and_speech_recipes() -> None:
    noise = recipe.read("cifar10/efficientnet-b0-b8192-ssgd-noise")
    assert noise.part("algorithm") == ("ssgd*", {"sigma": 0.04})
    r = recipe.read("speech/lstm-b512-dpsgd")
    assert (r.part("model"), r.spec("data").options["imbalance"]) == (("lstm", {"classes": 100}), 4.0)
    rates = [r.rate(int(epoch * 3856 / 512), 3856) for epoch in (5, 10, 15, 20)]
    # ×32 by linear scaling after ten epochs, then 1/√2 an epoch, from the first on.
    assert rates == pytest.approx([1.6, 3.2, 3.2 * 0.5**2.5, 3.2 * 0.5**5], rel=0.05)


def test_recipes_of_tables_shrink_with_their_schedule() -> None:
    name = "cifar10/resnet-18-b8192-dpsgd"
    r = recipe.read(name, ["epochs=16", "batch=1024", "model.width=0.25", "seed=3"])
    assert (r.steps, r.batch, r.seed) == (round(16 * 50_000 / 1024), 1024, 3)
    assert r.schedule.milestones == [8, 12]
    assert r.schedule.peak_lr(r.lr, r.batch) == pytest.approx(0.1)
    assert r.part("model")[1] == {"width": 0.25}
    assert recipe.read(name, ["steps=5"]).steps == 5
    for bad, words in (
        ("epochs=-1", "epochs: -1"),
        ("epochs=all", "epochs: 'all'"),
        ("batch=1.5", "batch: 1.5"),
    ):
        with pytest.raises(InputError, match=words):
            recipe.read(name, [bad])


def test_recipes_are_listed_in_groups_and_by_pattern(command: Command) -> None:
    code, out, _ = command("recipes")
    assert code == 0
    assert "digits-ssgd " in out
    assert "cifar10/NETWORK-b{1024,2048,4096,8192}-{ssgd,dpsgd}: Table 3" in out
    assert len(out.splitlines()) < 30
    code, out, _ = command("recipes", "cifar10/vgg-19-*-dpsgd")
    assert [line.split()[0] for line in out.splitlines()] == [
        f"cifar10/vgg-19-b{batch}-dpsgd" for batch in (1024, 2048, 4096, 8192)
    ]
    code, out, _ = command("recipes", "cifar10/vgg-19-b8192-dpsgd")
    assert tomllib.loads(out)["model"]["name"] == "vgg-19"
    one_line(command("recipes", "cifar10/vgg19-b8192-dpsgd"), 2, "did you mean 'cifar10/vgg-19-b8192-dpsgd'?")
