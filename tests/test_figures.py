"""Figures: what they run at each scale, what is kept and made only once, and the page that shows them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import landscape
from landscape import data
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import UNITS
from landscape.core import registry
from landscape.core.errors import OperationError
from landscape.core.options import parse_toml
from landscape.paper import compared, figure, pages, run_times
from landscape.paper.context import SCALES, Cell, Context, Ended, Point, Scale, identity
from landscape.paper.figure import Drawing
from landscape.paper.figures import communication, edge, landscapes, noise
from landscape.paper.record import POINTS
from landscape.paper.run_times import Costs, Machines, predict
from landscape.paper.verdicts import judged, outcome, rows_of, select
from landscape.plots import surface
from landscape.training.recipes import NETWORKS, Decompose, Evaluate, Monitor, recipe
from landscape.training.recipes.recipe import Recipe
from tests.conftest import Command, slow_but
from tests.test_cli import one_line

ROOT = Path(__file__).parents[1]

# Of the papers: a figure for each of theirs, and what is listed as the papers' claims and ours.
WANTED = {
    "fig1", "fig2a", "fig2b", "fig3", "fig4", "fig6", "fig7", *(f"table{k}" for k in range(1, 7)), "saddles",
    "runtime", "runtime-loopback", "smoothing", "lr-divergence", "local-sgd", "delay-boundary", "delay-minima", "edge", "edge-follows", "eq4",
    "noise-split", "lamb", "learners-plane", "flatness", "edge-lazy", "instruments", "rules", "disagreement", "edge-geometries",
}  # fmt: skip


def test_every_figure_is_listed(command: Command) -> None:
    code, out, _ = command("figures")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} >= WANTED


@pytest.mark.parametrize(
    "scale",
    slow_but(["smoke"], SCALES),  # the runs of one scale are like those of another
)
def test_the_runs_of_every_figure_can_be_written_down(scale: Scale) -> None:
    for name in figure.names():
        found = figure.get(name)
        assert found.note(Context(Path("none"), scale))
        cells = found.runs(scale)
        of_each_kind = {str(cell.values | {"seed": 0}): cell.recipe for cell in cells}  # a seed is a number
        for run in [*of_each_kind.values()][::5]:
            assert recipe.from_values(parse_toml(run.to_toml(), name)).to_toml() == run.to_toml()
        for cell in cells:
            assert cell.values["seed"] == cell.recipe.seed
            if scale == "smoke":  # nothing but what is bundled
                assert cell.recipe.data["name"] == "digits"


def test_figure_2_is_the_papers_size_on_a_laptop() -> None:
    for part, size in {"a": (2000, 5, 1.0, 1500), "b": (1998, 6, 0.2, 6000)}.items():
        runs = [cell.recipe for cell in figure.get(f"fig2{part}").runs("laptop")]
        assert len(runs) == 15
        assert {(run.batch, run.learners, run.lr, run.steps) for run in runs} == {size}
        assert all(run.data["name"] == "mnist" for run in runs)
        assert all(run.model["widths"] == [784, 50, 50, 10] for run in runs)
    whole = [cell.recipe for cell in figure.get("table3").runs("laptop")]
    assert len(whole) == 56  # four seeds, at the largest batch of each form of DPSGD
    found = {run.batch: run.schedule.peak_lr(run.lr, run.batch) for run in whole}
    assert found == pytest.approx({1024: 0.1, 8192: 0.8})


def test_the_papers_numbers_are_of_our_networks() -> None:
    axis = figure.figures_toml()["axes"]["networks"]["paper"]
    assert tuple(axis["_model"]) == NETWORKS
    assert set(axis["network"]) <= set(compared.printed("table3_cifar10"))
    assert set(compared.printed("table2_batch_size")["model"]) == set(axis["network"])


def test_a_table_of_a_figure_is_checked() -> None:
    texts = dict.fromkeys(("where", "title", "claims", "finding", "laptop"), "x")
    decorate = figure.figure("mine", lambda rows: [], texts | {"titles": "x"})
    with pytest.raises(landscape.InputError, match=r"mine: 'titles' is not known; did you mean 'title'"):
        decorate(lambda context: Drawing({}, pd.DataFrame(), []))
    for cells, words in (
        ({"recipe": "digits-ssgd", "seeds": [1, 1, 1], "sets": []}, r"cells: 'sets' is not known"),
        ({"recipe": "digits-ssgd", "seeds": 1}, r"cells\.seeds: 1 is not allowed"),
    ):
        with pytest.raises(landscape.InputError, match=words):
            figure.cells(cells, "smoke")


def test_cells_are_all_combinations_of_their_axes() -> None:
    table = {
        "recipe": "digits-{_rule}", "set": ["lr={lr}", "{_more}"], "labels": {"at": "lr {lr}"}, "seeds": [1, 2, 2],
        "axes": [
            {"algorithm": ["SSGD", "DPSGD"], "_rule": ["ssgd", "dpsgd"]},
            {"lr": [0.5, 1.0], "_more": ["", "steps=7"]},
        ],
        "laptop": {"set": ["lr={lr}"]},
    }  # fmt: skip
    cells = figure.cells(table, "smoke")
    assert [(c.values["algorithm"], c.values["at"], c.recipe.lr) for c in cells] == [
        ("SSGD", "lr 0.5", 0.5), ("SSGD", "lr 1.0", 1.0), ("DPSGD", "lr 0.5", 0.5), ("DPSGD", "lr 1.0", 1.0),
    ]  # fmt: skip
    assert [c.recipe.steps for c in cells] == [500, 7, 500, 7]
    assert [c.recipe.algorithm["name"] for c in cells] == ["ssgd", "ssgd", "dpsgd", "dpsgd"]
    assert {c.recipe.steps for c in figure.cells(table, "laptop")} == {500}
    assert [c.recipe.seed for c in figure.cells(table, "paper")] == [0, 1] * 4


def small(**changes: Any) -> Recipe:
    base = recipe.read("digits-dpsgd", ["steps=4", "batch=50", "decompose.every=2", "evaluate.every=2"])
    return dataclasses.replace(base, **changes)


def with_runs(context: Context, *recipes: Recipe) -> Context:
    return context.of([Cell({}, each) for each in recipes])


def test_a_run_is_known_by_what_bears_on_it() -> None:
    assert identity(small()) == identity(small(name="other"))
    others = [
        small(lr=0.25), small(seed=1), small(algorithm={"name": "ssgd"}), small(evaluate=Evaluate(4)),
    ]  # fmt: skip
    assert len({identity(r) for r in [small(), *others]}) == 5


def test_runs_are_trained_once(tmp_path: Path) -> None:
    told: list[str] = []
    context = Context(tmp_path, message=told.append)
    context.train([small(), small(name="other"), small(seed=1)])
    assert len(told) == 2
    assert with_runs(context, small(), small(seed=1)).missing() == []


def test_an_estimate_counts_the_samples_of_all_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "seconds_a_sample", lambda *args: 0.001)
    plain = small(steps=300, decompose=Decompose(every=0), evaluate=Evaluate(every=0))
    decomposed = dataclasses.replace(plain, decompose=Decompose(every=3, samples=64))
    measured = dataclasses.replace(plain, monitor=Monitor(sharpness=30, samples=10))
    shown = dataclasses.replace(plain, monitor=Monitor(instruments=["path"], every=30, samples=10, k=2))
    one, two, three, four, five = (
        figure.seconds_of(Context(tmp_path), runs, {})
        for runs in ([plain], [plain, plain], [decomposed], [measured], [shown])
    )
    assert (one, two) == (pytest.approx(300 * plain.batch / 1000), pytest.approx(2 * one))
    assert three - one == pytest.approx(300 * 64 / 3 / 1000)
    assert four - one == pytest.approx(300 / 30 * figure.SHARPNESS_PASSES * 10 / 1000)
    assert five - one == pytest.approx(300 / 30 * figure.EIGENVECTOR_PASSES * 2 * 10 / 1000)


def test_a_figure_without_runs_is_made_with_data_and_a_page(tmp_path: Path, command: Command) -> None:
    options = ("delay-boundary", "-o", tmp_path, "--runs", tmp_path / "runs")
    code, out, _ = command("figures", *options, "--scale", "smoke")
    assert (code, "its numbers say nothing about the claim" in out) == (0, True)
    page, own, kept = (tmp_path / f for f in ("README.md", "delay-boundary.md", "delay-boundary.json"))
    assert "| **Smoke.** |" in page.read_text()
    assert "Scale smoke: from the characteristic polynomial; nothing is trained." in own.read_text()
    assert json.loads(kept.read_text())["outcome"] == ""
    code, out, err = command("figures", *options)
    assert code == 0, err
    assert out.startswith("delay-boundary: ")
    assert out.splitlines()[1:] == [str(tmp_path / "delay-boundary.png"), str(page)]
    with Image.open(tmp_path / "delay-boundary.png") as picture:
        assert picture.width > 600
    assert set(rows_of((tmp_path / "delay-boundary.csv").read_text())["form"]) == {"ordinary", "shifted"}
    entry = json.loads(kept.read_text())
    assert entry["outcome"] == "holds"
    # DESIGN's table of limits, to four digits.
    assert all(e["ours"] == e["paper"] for e in entry["compared"])
    assert "![" in own.read_text()
    assert "landscape figures delay-boundary --scale laptop" in own.read_text()
    kept.write_text("{")
    with pytest.raises(OperationError, match=r"delay-boundary\.json: damaged"):
        pages.page(tmp_path)


@pytest.mark.slow
def test_every_run_of_the_figures_in_the_repository_has_its_record(tmp_path: Path) -> None:
    context = Context(tmp_path, records=ROOT / "figures" / "records")
    for name in figure.names():
        assert not figure.get(name).of(context).missing(), f"{name}: its runs have another identity"


def test_missing_data_skips_a_figure_and_says_what_to_fetch(tmp_path: Path, command: Command) -> None:
    options = ("--data-dir", tmp_path / "none", "-o", tmp_path / "g", "--runs", tmp_path / "r")
    one_line(command("figures", "fig2a", *options), 1, "mnist", "LANDSCAPE_DATA")
    code, out, err = command("figures", "fig2a", "delay-boundary", *options)
    assert code == 1
    assert "fig2a: skipped: " in err
    assert "1 of 2 figures were skipped: fig2a" in err
    assert str(tmp_path / "g" / "delay-boundary.png") in out
    assert not (tmp_path / "r" / "runs").exists()


def test_a_dry_run_says_what_is_needed_where_the_data_is_not_there(tmp_path: Path, command: Command) -> None:
    options = ("--dry-run", "--data-dir", tmp_path / "none", "--runs", tmp_path / "r", "-o", tmp_path / "g")
    code, out, err = command("figures", "fig2a", "delay-boundary", *options)
    assert code == 0, err
    first, second = out.splitlines()
    assert first.startswith(
        "fig2a: 15 of 15 runs to train, for a time that is known once their data is there; "
    )
    assert "data: mnist (" in first
    assert "LANDSCAPE_DATA" in first
    assert second.endswith("data: none")
    assert not (tmp_path / "g").exists()


def test_plateau_is_the_median_of_the_second_half() -> None:
    nothing = {name: np.full(10, np.nan) for name in UNITS}
    run: Any = SimpleNamespace(step=10, history=nothing | {"step": np.arange(1, 11.0)})
    assert np.isnan(edge.plateau(run))
    run.history["lr_lambda_max"] = np.array([9, 9, 9, 9, 9, 1, np.nan, 2, 3, np.nan])
    assert edge.plateau(run) == 2
    run.history["lambda_max"] = np.ones(10)  # what has not converged does not count
    run.history["lambda_max_residual"] = np.array([0, 0, 0, 0, 0, 0.5, 0, 0.01, 0.01, 0])
    assert edge.plateau(run) == 2.5


def test_a_table_beside_the_papers_shows_differences_and_divergence(tmp_path: Path) -> None:
    found = figure.get("table6")
    wanted = {"algorithm": "DPSGD", "network": "LSTM, batch 8192"}
    cells = [cell for cell in found.runs("smoke") if cell.values.items() >= wanted.items()]
    context = found.of(Context(tmp_path, "smoke")).of(cells)
    context.train([cell.recipe for cell in cells])
    drawing = found.draw(context)
    rows = select(drawing.rows, algorithm="DPSGD", at="lr 0.1", network="LSTM, batch 8192")
    (row,) = rows.to_dict("records")
    assert (row["seed"], row["paper"], row["lr"]) == (0, 1.66, 0.05)
    label = f"DPSGD, lr 0.1, LSTM, batch {row['batch']} (paper 8192)"  # the batch that was used
    assert compared.Compared(label, f"{row['ours']:.2f}", "1.66") in drawing.compared
    assert row["batch"] == context.cells[0].recipe.batch


def test_the_digits_in_other_forms_are_the_same_digits() -> None:
    flat, image, frames = (data.load("digits", form=form).train for form in ("flat", "image", "frames"))
    x = np.asarray(flat[0]).reshape(-1, 8, 8)
    assert image[0].shape[1:] == (3, 32, 32)
    np.testing.assert_array_equal(image[0][:, 1, ::4, ::4], x)
    np.testing.assert_array_equal(image[0][:, 2, 3::4, 2::4], x)
    np.testing.assert_array_equal(frames[0], x)
    np.testing.assert_array_equal(frames[1], np.repeat(np.asarray(flat[1])[:, None], 8, 1))
    tokens = data.load("digits", form="tokens")
    assert tokens.classes == 17
    pixels = np.column_stack([tokens.train[0][:, :1], tokens.train[1]])
    np.testing.assert_array_equal(tokens.train[0], pixels[:, :-1])
    np.testing.assert_array_equal(pixels.reshape(-1, 8, 8), 16 * x)
    np.testing.assert_array_equal(tokens.columns["label"], flat[1])
    with pytest.raises(landscape.InputError, match=r"data\.form: 'round'"):
        data.load("digits", form="round")


def test_every_figure_is_estimated(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(plain: Recipe, local: int, **options: Any) -> Costs:
        assert plain.sampling != "all"  # a short batch has not all samples
        return Costs(0.0625 * local, 0.0, 0.0, 0.0, 0.0, 1)

    monkeypatch.setattr(figure, "calibrate", checks)
    code, out, err = command("figures", "--all", "--dry-run", "--scale", "smoke", "--runs", tmp_path / "r")
    assert code == 0, err
    assert [line.partition(":")[0] for line in out.splitlines()] == figure.names()
    assert "e+" not in out
    assert "delay-boundary: 0 of 0 runs to train, about no time" in out


def test_the_time_of_long_steps_is_of_short_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timed = []

    def measured(plain: Recipe, local: int, **options: Any) -> Costs:
        timed.append(local)
        return Costs(0.015 + 0.0005 * local, 0.0, 0.0, 0.0, 0.0, 1)

    monkeypatch.setattr(figure, "calibrate", measured)
    for local in (8, 64, 300):
        run = recipe.read("digits-dpsgd", ["learners=2", f"batch={2 * local}"])
        seconds = figure.seconds_a_sample(Context(tmp_path), run)
        assert seconds == pytest.approx((0.015 + 0.0005 * local) / local)
    assert timed == [8, 16, 64, 16, 64]


def _grid(ratio: list[float], converged: list[bool], label: str) -> landscape.HessianGrid:
    names = "lambda_min", "lambda_max", "residual_min", "residual_max", "products"
    columns = {name: np.ones((2, 2)) for name in names}
    return landscape.HessianGrid(
        x=np.array([-1.0, 1]), y=np.array([-1.0, 1]), ratio=np.array(ratio).reshape(2, 2),
        converged=np.array(converged).reshape(2, 2), kind="random", norm="none", seed=0, span=1.0, residual_tol=0.01,
        samples=9, dtype="float32", split="test", label=label, **columns,
    )  # fmt: skip


@pytest.mark.parametrize(("converged", "grade", "middle"), [
    ([True] * 4, "holds", 0.25),
    ([True, True, False, False], "does not hold", 0.7),
    ([True] + 3 * [False], "undecided", 0.9),
])  # fmt: skip
def test_points_that_did_not_converge_do_not_count(
    converged: list[bool], grade: str, middle: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = figure.get("fig4")
    grids = {
        "SSGD": _grid([0.6, 0.6, 0.6, 0.6], [True] * 4, "SSGD"),
        "DPSGD": _grid([0.9, 0.5, 0.0, 0.0], converged, "DPSGD"),
    }

    cells = [
        Cell({"network": "SENet-18", "algorithm": a, "model": "SENet-18", "seed": seed}, small())
        for a in grids
        for seed in range(3)
    ]
    point = Point(tmp_path, small(), 1, 1.0, "", {})
    ended = [Ended(cell.values, cast(Checkpoint, None), point, [point]) for cell in cells]
    context = Context(tmp_path, cells=cells)
    monkeypatch.setattr(Context, "ended", lambda self: ended)
    monkeypatch.setattr(
        Context,
        "hessian_grid",
        lambda self, early, label: grids[label.removeprefix("SENet-18, ").split(",")[0]],
    )
    monkeypatch.setattr(landscapes, "score", lambda run, quantity: 50.0)
    drawing = found.draw(context)
    assert outcome(judged(found.judge, drawing.rows)) == grade
    assert f"median {middle:.3g}" in drawing.pictures[""].axes[1].get_title()
    if not all(converged):
        assert f"{3 * (4 - sum(converged))} of SENet-18 with DPSGD" in drawing.remark
    # Around a network at chance is a plain, not a minimum.
    monkeypatch.setattr(landscapes, "score", lambda run, quantity: 10.0)
    drawing = found.draw(context)
    assert outcome(judged(found.judge, drawing.rows)) == "undecided"
    assert "do not count in the verdict: SENet-18 with SSGD, SENet-18 with DPSGD" in drawing.remark


def test_predicted_times_that_fall_with_more_workers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a process takes to plan its exchanges is measured, and would vary with the machine.
    monkeypatch.setattr(run_times, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    costs = Costs(0.1, 0.01, 0.001, 0.01, 1e-8, 1000)
    machines = Machines(50e-6, 1.25e9, straggler=0.2)
    times = predict(recipe.read("digits-dpsgd"), [2, 4, 8], costs, machines, ["full"])
    assert communication.falls(times) == []
    busy = np.where(times.workers == 2, 1.5, 1.0)
    worse = dataclasses.replace(times, step_s=times.step_s * busy)
    assert "ssgd" in communication.falls(worse)
    assert "1,000 parameters" in times.label


def test_processes_that_cannot_be_timed_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    how = {"processes": 2, "widths": "64, 10", "rounds": 1, "steps": 2}
    with pytest.raises(OperationError, match=r"slow loopback cannot be timed here \(.*unshare"):
        communication._measured(**how, bandwidth=1e8)


def test_a_picture_that_is_made_smaller_keeps_its_colors(tmp_path: Path) -> None:
    """Thin lines keep theirs, and the pale middle of a contour, from which letters take colors away."""
    lines, contour = np.mgrid[0:300, 0:300] / 300, np.hypot(*np.mgrid[-1:1:300j, -1:1:300j])
    plain = np.stack([255 * lines[0] * lines[1], 255 * lines[1], 255 * (1 - lines[0])], -1).astype(np.uint8)
    plain[:40, 0], plain[:, 100:102] = (213, 94, 0), (230, 159, 0)
    pale = (255 * surface.CMAP(np.minimum(contour**2, 1))[..., :3]).astype(np.uint8)
    pale[::10, ::10] = np.random.default_rng(0).integers(0, 255, (30, 30, 3))
    for pixels, part, reduce, most in ((plain, slice(None), np.max, 24), (pale, slice(100, 200), np.mean, 6)):
        Image.fromarray(pixels).save(tmp_path / "a.png")
        pages._reduce_colors(tmp_path / "a.png")
        small = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
        assert reduce(np.abs(small - pixels)[part, part]) < most


def test_a_duration_is_said_in_two_units_at_most() -> None:
    words = {0.4: "0 s", 42: "42 s", 99.4: "99 s", 150: "2 min", 15_000: "4 h 10 min", 7_199: "2 h 0 min"}
    assert {seconds: pages.duration(seconds) for seconds in words} == words


def test_numbers_are_compared_by_setting_in_the_order_of_the_rows() -> None:
    rows = pd.DataFrame({"rule": ["SSGD"] * 2 + ["DPSGD"] * 2, "limit": [2, 2, np.nan, np.nan]})
    rows["x"] = [3.0, 1.0, 5.0, np.inf]
    assert compared.compare_with_paper(rows, "x of {rule} ({limit:.1f})", "x", paper="1", form=".1f") == [
        compared.Compared("x of SSGD (2.0)", "2.0 (1.0 to 3.0)", "1"),
        compared.Compared("x of DPSGD (nan)", "5.0", "1"),
    ]
    assert compared.mean_and_spread([1.0, np.inf]) == compared.mean_and_spread([np.nan]) == "diverged"


# ---- Update rules side by side


@pytest.mark.parametrize("scale", slow_but(["smoke"], SCALES))
def test_all_update_rules_are_compared(scale: Scale) -> None:
    ours = {n for n in registry.algorithms if registry.algorithms[n].__module__.startswith("landscape.")}
    cells = figure.get("rules").runs(scale)
    assert {cell.recipe.algorithm["name"] for cell in cells} == ours
    assert {cell.values["split"] for cell in cells} == {noise.IID, noise.SKEWED}
    assert {cell.recipe.split.text for cell in cells} == {"iid", "dirichlet(0.1)"}
    assert all(cell.recipe.steps <= POINTS for cell in cells)  # records have the bytes of each step


def with_history(**columns: list[float]) -> Any:
    steps = len(next(iter(columns.values())))
    history = {name: np.full(steps, np.nan) for name in UNITS} | {"step": np.arange(1.0, steps + 1)}
    history |= {name: np.array(values) for name, values in columns.items()}
    model = {"name": "mlp", "options": {"widths": [9, 3]}}
    end = SimpleNamespace(history=history, step=steps, diverged="", model=model)
    recipe = SimpleNamespace(monitor=SimpleNamespace(k=3))
    return SimpleNamespace(end=end, last=SimpleNamespace(recipe=recipe))


def test_the_numbers_of_a_rule_are_those_of_its_history() -> None:
    nan = float("nan")
    run = with_history(
        comm_bytes=[0, 0, 4000, 0, 0, 0, 2000, 0], lr=[0.5] * 8, alpha_e=[nan, 9, nan, 9, nan, 0.25, nan, 0.75],
        grad_norm2=[4.0] * 8, displacement2=[1.0] * 8, delta=[nan, 9, nan, 9, nan, 2, nan, 6],
        delta_2=[nan, 9, nan, 9, nan, 1, nan, 4], delta_cross=[nan, 9, nan, 9, nan, 0, nan, -1],
        consensus=[9, 9, 9, 9, 1, 2, 4, 3], lr_lambda_max=[nan] * 5 + [1, nan, 3], lr_lambda_limit=[2.0] * 8,
        train_loss=[3, nan, 2, nan, nan, 1, nan, nan], test_accuracy=[nan, 0.5, nan, nan, nan, nan, nan, 0.75],
    )  # fmt: skip
    found = noise._measured(run, 8)
    expected = {
        "megabytes": 0.006, "kilobytes_a_step": 0.75, "kilobytes_burst": 4.0, "steps_apart": 4, "consensus": 2.5,
        "relative_rate": 1.0, "delta": 4.0, "delta_from_spread": 0.5, "step_cosine": 1.0, "of_limit": 1.0,
        "train_loss": 1.0, "test_error_percent": 25.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert np.isnan(found["path_cosine"])
    early = noise._measured(run, 3)
    assert (early["train_loss"], early["test_error_percent"], early["megabytes"]) == (2.0, 50.0, 0.004)


def test_shares_are_compared_with_those_of_a_random_direction() -> None:
    nan = float("nan")
    run = with_history(
        spread_share=[nan, 0.5, nan], noise_share=[0.3, 0.4, nan],
        disagreement_cost=[nan, 0.25, nan], consensus=[1.0, 0.5, 1.0], lambda_max=[nan, 4.0, nan],
    )  # fmt: skip
    (row,) = noise._along(run).to_dict("records")
    assert (row["step"], row["spread_share"], row["noise_share"]) == (2, 0.5, 0.4)
    # 9 · 3 weights and 3 biases, k = 3; 2 · 0.25 / (0.5 · 4).
    assert (row["random_share"], row["alignment"]) == (pytest.approx(0.1), pytest.approx(0.25))


def test_an_optimizer_has_settled_before_its_data_is_learned() -> None:
    rows = pd.DataFrame({"rule": "SSGD", "optimizer": "Adam", "seed": 0, "step": np.arange(10, 110, 10)})
    rows["loss"], rows["ratio"] = [2.0] * 6 + [0.05] * 4, [0.1] * 3 + [0.9, 1.0, 1.4] + [9.0] * 4
    assert edge._settled(rows)["step"].tolist() == [40, 50, 60]
    (effect,) = edge._judge_geometries(rows)
    assert (effect.where, effect.values) == ("Adam, SSGD", (1.0,))
    history = {"lr_lambda_max": [np.nan, 3.0], "lr_lambda_limit": [np.nan, 2.0], "loss": [1.0, 0.5]}
    assert edge._of_limit(with_history(**history)).to_dict("records") == [
        {"step": 2, "loss": 0.5, "ratio": 1.5}
    ]


def test_the_verdicts_on_rules_compare_seed_by_seed() -> None:
    place = {"network": "MLP", "split": "iid", "seed": 0}
    late = [
        place
        | {"rule": rule, "step": step, "spread_share": 0.6 * step / 2, "noise_share": 0.3, "alignment": a}
        for rule, a in ((noise.PLAIN, 0.4), (noise.ADAPTIVE, 0.1))
        for step in (1, 2)
    ]
    first, second, third = noise._judge_disagreement(pd.DataFrame(late))
    assert (first.values, second.values, third.values) == ((2.0,), (2.0,), (0.25,))
    table = pd.DataFrame(
        place | {"split": split, "at": at, "rule": rule, noise.ERROR: error, noise.COSINE: cosine}
        for split, more in ((noise.IID, 0.0), (noise.SKEWED, 1.0))
        for at in (noise.SAMPLES, noise.BYTES)
        for rule, error, cosine in (
            ("SSGD", 9.0, 0.5), ("local SGD", 4.0, 0.5), (noise.MULOCO, 5.0, 0.3), (noise.DILOCO, 5.0, 0.1),
            ("DPSGD AWC", 3.0 + 4 * more, 0.5), ("D²", 3.0 + more, 0.5),
        )
    )  # fmt: skip
    effects = noise._judge_rules(table)
    assert [effect.values for effect in effects] == [
        (5.0,), (pytest.approx(0.2),), (5.0,), (pytest.approx(0.2),), (3.0,),
    ]  # fmt: skip
