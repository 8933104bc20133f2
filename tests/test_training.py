"""Runs: the same bits again, resumed and from another run's weights, diverging either way, and their history."""

from __future__ import annotations

import dataclasses
import shutil
import tracemalloc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import landscape
from landscape import Checkpoint, InputError, OperationError
from landscape.checkpoint import history
from landscape.checkpoint.history import LEAST, HistoryWarning
from landscape.checkpoint.user_code import as_data
from landscape.core import hdf5
from landscape.core.options import parse_toml
from landscape.data import base as division
from landscape.gradients.learners import Stack
from landscape.testing.checks import RECIPE, same_bits
from landscape.training.decomposition import GradientEstimator
from landscape.training.processes.comm import Comm
from landscape.training.recipes import Init, recipe
from landscape.training.run import BLOCK, RECENT, History, generator, launch
from landscape.training.run.loop import Hooks, Trainer
from landscape.training.topology import Mixing
from tests.battery.case import net as network
from tests.conftest import Command


def quadratic(**changes: Any) -> recipe.Recipe:
    """DPSGD on a ring of 6 with curvature 1: stable up to lr 1 + ω_min = 2/3, the mean up to 2."""
    values: dict[str, Any] = {
        "name": "quadratic", "learners": 6, "batch": 60, "lr": 0.3, "steps": 400, "dtype": "float64",
        "algorithm": {"name": "dpsgd", "mixing": "ring(1)"},
        "model": {"name": "quadratic", "eigenvalues": [1.0, 0.5]},
        "data": {"name": "quadratic", "dimension": 2, "gradient_std": 0.1}, "evaluate": {"every": 0},
    }  # fmt: skip
    return recipe.from_values(values | changes)


def test_a_finished_run_may_go_on_to_more_steps_with_the_same_bits(tiny: Path, tmp_path: Path) -> None:
    settings = ["schedule={cosine = 40.0, milestones = [12]}", "optimizer={name = 'lamb'}"]
    short, long = (recipe.read(str(tiny), [f"steps={n}", *settings]) for n in (17, 30))
    launch.launch(short, tmp_path / "a")
    same_bits(launch.launch(long, tmp_path / "a", resume=True), launch.launch(long, tmp_path / "b"))
    with pytest.raises(OperationError, match="steps = 30, resuming it with steps = 17"):
        launch.launch(short, tmp_path / "a", resume=True)
    with pytest.raises(OperationError, match=r"its run has lr = 0.2, resuming it with lr = 0.1"):
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
        assert "m.csv has another matrix" in err
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
    for name in ("layout", "model", "data", "epoch", "learners", "local_batch", "lr", "algorithm", "seed"):
        assert getattr(back, name) == getattr(end, name), name
    assert (back.epoch, back.data["train"]) == (30 * 40 / 200, 200)
    kept = recipe.read(str(tmp_path / "run" / "recipe.toml"))
    assert kept == recipe.from_values(parse_toml(back.recipe, ""))
    assert back.problem("test").evaluate() == (
        back.history["test_loss"][-1],
        back.history["test_accuracy"][-1],
    )
    assert torch.equal(back.problem(learner=2).weights, back.weights[2])
    with pytest.raises(InputError, match="learner: 4 is not allowed, it must be 'mean' or 0…3"):
        back.problem(learner=4)
    back.data["options"]["seed"] = 1  # the same name and sizes, other samples
    with pytest.raises(OperationError, match="fingerprint"):
        back.problem()


def test_the_history_has_numbers_where_they_are_due(tiny: Path) -> None:
    h = Trainer(recipe.read(str(tiny))).run().history
    np.testing.assert_array_equal(h["step"], np.arange(1, 31))
    due = h["step"] % 3 == 0
    for name in ("alpha_e", "grad_norm2", "displacement2", "delta", "delta_s", "delta_2", "train_loss"):
        np.testing.assert_array_equal(np.isfinite(h[name]), due, err_msg=name)
    np.testing.assert_array_equal(np.isfinite(h["test_loss"]), (h["step"] % 7 == 0) | (h["step"] == 30))
    assert np.all(h["consensus"] > 0)
    assert np.all(np.diff(h["wall_s"]) > 0)


OVERFLOW: dict[str, Any] = {
    "lr": 1e200, "diverge": {"loss": 1e308, "consensus": 1e300}, "optimizer": {"name": "sgd", "momentum": 0.9},
}  # fmt: skip


@pytest.mark.parametrize(("changes", "how", "later"), [
    ({"lr": 0.62}, "", 0),
    ({"lr": 0.75}, "learners", 0),
    ({"lr": 2.5, "algorithm": {"name": "ssgd"}}, "mean", 0),
    (OVERFLOW, "mean", 1),
])  # fmt: skip
def test_learners_that_drift_apart_are_told_from_a_mean_that_explodes(
    changes: dict[str, Any], how: str, later: int, tmp_path: Path
) -> None:
    """The last finite state is kept: after an overflow, that of the step before."""
    end = launch.launch(quadratic(**changes), tmp_path)
    assert end.diverged == how
    if how:
        assert 0 < end.diverged_at == end.step + later < 400
    assert bool(torch.isfinite(torch.cat([end.weights, *end.optimizer.values()])).all())
    same_bits(end, Checkpoint.load(tmp_path / "last.h5"))
    same_bits(end, launch.launch(None, tmp_path, resume=True))  # nothing more to do


def test_another_runs_folder_is_refused_and_force_clears_it(tiny: Path, tmp_path: Path) -> None:
    chosen = recipe.read(str(tiny))
    launch.launch(chosen, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    before, lines = (tmp_path / "run" / "last.h5").stat(), list[str]()
    launch.launch(chosen, tmp_path / "run", hooks=Hooks(message=lines.append))
    assert lines == [f"{tmp_path / 'run'}: complete already, nothing is trained"]
    assert (tmp_path / "run" / "last.h5").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(OperationError, match="holds a run already"):
        launch.launch(recipe.read(str(tiny), ["steps=40"]), tmp_path / "run")
    with pytest.raises(OperationError, match=r"its run has lr = 0.2, .* with lr = 0.1"):
        launch.launch(recipe.read(str(tiny), ["lr=0.1"]), tmp_path / "run")
    with pytest.raises(InputError, match="nproc: 99 is not allowed, it must be ≤ 4"):
        landscape.train(chosen, tmp_path / "new", nproc=99)
    assert not (tmp_path / "new").exists()  # no process was started
    short = recipe.read(str(tiny), ["steps=5"])
    launch.launch(short, tmp_path / "run", force=True)
    names = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert names == ["last.h5", "notes.txt", "recipe.toml", "step-0000000.h5", "step-0000005.h5"]


EVERY, STEPS = 20, 300


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with more rows than each of its files holds at least."""
    folder = tmp_path_factory.mktemp("run")
    launch.launch(_recipe(STEPS), folder)
    return folder


def _recipe(steps: int) -> recipe.Recipe:
    values = RECIPE | {"batch": 4, "steps": steps, "checkpoint": {"every": EVERY}}
    return recipe.from_values(values | {"decompose": {"every": 0}, "evaluate": {"every": 0}})


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
        made.write_to_row(row, {"age": age})
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
    for step in range(8 * BLOCK):
        made.append(made.new_row(step, 0.1))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 1.3 * (8 * BLOCK * 8 * len(made.units) + 1300 * (BLOCK + RECENT))


@pytest.fixture
def first(tiny: Path, tmp_path: Path) -> Path:
    launch.launch(recipe.read(str(tiny)), tmp_path / "first")
    return tmp_path / "first" / "last.h5"


def test_all_learners_start_at_the_mean_of_what_is_said(tiny: Path, first: Path, tmp_path: Path) -> None:
    settings = [f"init.checkpoint={first}", "seed=7", "learners=5"]
    launch.launch(recipe.read(str(tiny), settings), tmp_path / "second")
    start = landscape.load(tmp_path / "second" / "step-0000000.h5")
    torch.testing.assert_close(start.weights, landscape.load(first).mean.expand(5, -1), rtol=0, atol=0)
    written = recipe.read(str(tmp_path / "second" / "recipe.toml"))
    assert written.init == Init(str(first), hdf5.sha256(first))
    assert recipe.from_values(parse_toml(start.recipe, "")) == written
    assert recipe.read(str(tiny)).init == Init()


def test_such_a_run_is_resumed_to_the_bit_without_the_file(tiny: Path, first: Path, tmp_path: Path) -> None:
    # The bound on the spread is a multiple of ‖w_a‖² at the start, which only the file that is gone could tell.
    chosen = recipe.read(str(tiny), [f"init.checkpoint={first}", "diverge.consensus=1e-9"])
    whole = launch.launch(chosen, tmp_path / "whole")
    assert (whole.diverged, whole.diverged_at) == ("learners", 10)
    calm = recipe.read(str(tiny), [f"init.checkpoint={first}"])
    other = launch.launch(calm, tmp_path / "calm")
    first.unlink()
    for done, end in ((tmp_path / "whole", whole), (tmp_path / "calm", other)):
        for path in sorted(done.glob("step-*.h5"))[::2]:
            folder = tmp_path / f"{done.name}-{path.stem}"
            folder.mkdir()
            shutil.copy(path, folder / "last.h5")
            same_bits(end, launch.launch(None, folder, resume=True))
    # A RECIPE that says nothing of the SHA-256 is the same; another file is not.
    same_bits(other, launch.launch(calm, tmp_path / "calm", resume=True))
    with pytest.raises(OperationError, match=r"resuming it with checkpoint = \"\" is not allowed"):
        launch.launch(recipe.read(str(tiny)), tmp_path / "calm", resume=True)
    trainer = Trainer(chosen, checkpoint=landscape.load(tmp_path / "whole" / "step-0000000.h5"))
    assert trainer.divergence.start_norm2 == pytest.approx(float(trainer.weights[0] @ trainer.weights[0]))


def test_what_is_no_start_is_one_line(command: Command, tiny: Path, first: Path, tmp_path: Path) -> None:
    for setting, match in (
        ("model.widths=[6,9,3]", "last.h5: its weights do not fit the model"),
        ("init.sha256='00ff'", "init.sha256 is 00ff"),
    ):
        words = "--set", f"init.checkpoint={first}", "--set", setting
        code, _, err = command("train", tiny, *words, "-o", tmp_path / "run", "-q")
        assert code == 1
        assert match in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_all_samples_at_each_step_are_gradient_descent(tiny: Path) -> None:
    settings = ["algorithm={name='ssgd'}", "sampling=all", "batch=200", "dtype=float64", "steps=10"]
    trainer = Trainer(recipe.read(str(tiny), settings))
    theta = trainer.train_problem.weights
    for _ in range(10):
        theta = theta - 0.2 * trainer.train_problem.gradient(theta)
    torch.testing.assert_close(trainer.run().mean, theta, rtol=1e-12, atol=1e-12)


def test_only_the_first_training_images(tmp_path: Path) -> None:
    from tests.test_recipe_and_data import write_mnist

    write_mnist(tmp_path)
    whole, part = (landscape.data.load("mnist", data_dir=tmp_path, samples=n) for n in (0, 12))
    assert isinstance(whole.train, tuple)
    assert isinstance(part.train, tuple)
    assert torch.equal(part.train[0], whole.train[0][:12])
    assert part.fingerprint != whole.fingerprint
    with pytest.raises(InputError, match=r"data.samples: 31 is not allowed, it must be 0 \(all\) to 30"):
        landscape.data.load("mnist", data_dir=tmp_path, samples=31)


@pytest.mark.parametrize("split", ["dirichlet(0.3)", "labels(2)", "sizes(0.4, 0.3, 0.2, 0.1)"])
@pytest.mark.parametrize("samples", [0, 640])
def test_learners_have_parts_of_measured_heterogeneity(split: str, samples: int, tiny: Path) -> None:
    """By hand, in float64: minibatches from the parts, DPSGD's step on the ring, and n⁻¹ Σ ‖∇L_j − ∇L‖²."""
    settings = {"dtype": "float64", "steps": 3, "decompose.every": 1, "decompose.samples": samples}
    trainer = Trainer(recipe.read(str(tiny), settings | {"data.split": split}))
    assert trainer.data_parts is not None
    problem, parts = trainer.train_problem, trainer.data_parts.indices
    assert sorted(torch.cat(parts).tolist()) == list(range(200))
    weights, expected = trainer.weights.clone(), []
    for t in range(1, 4):
        draws, mean = generator(0, "batch", t), weights.mean(0)
        drawn = [part[torch.randint(len(part), (10,), generator=draws)] for part in parts]
        whole = problem.gradient(mean)
        own = [problem.subset(part).gradient(mean) for part in parts]
        expected.append(sum(float((g - whole).square().sum()) for g in own) / 4)
        gradients = [problem.subset(i).gradient(w) for i, w in zip(drawn, weights, strict=True)]
        mixing = torch.from_numpy(Mixing("ring(1)", 4, 0).matrix(t))
        weights = mixing @ weights - 0.2 * torch.stack(gradients)
    end = trainer.run()
    torch.testing.assert_close(end.weights, weights, rtol=1e-9, atol=1e-9)
    found, error = end.history["heterogeneity"], end.history["heterogeneity_se"]
    if samples == 0:
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        np.testing.assert_array_equal(error, 0)
    else:
        assert (error > 0).all()
        assert (np.abs(found - expected) < 4 * error).all()


def test_the_estimate_of_heterogeneity_is_unbiased_and_knows_its_error() -> None:
    torch.manual_seed(0)
    y = torch.randint(3, (60,))
    x = torch.randn(60, 4, dtype=torch.float64) + y[:, None]
    model = landscape.models.build("mlp", widths=[4, 3]).double()
    problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y), dtype=torch.float64)
    split = division.parse("labels(2)", 3)
    parts = division.Parts.drawn(split, problem, {}, 3, 5, 1)
    comm, whole = Comm(3), problem.gradient()
    own = [problem.subset(part).gradient() for part in parts.indices]
    truth = sum(float((g - whole).square().sum()) for g in own) / 3
    estimator = GradientEstimator(problem, comm, 96, 0)
    drawn = [
        estimator.heterogeneity(problem.weights, t, estimator.at(problem.weights, t), parts)
        for t in range(1, 81)
    ]
    value, error = np.array([[d["heterogeneity"], d["heterogeneity_se"]] for d in drawn]).T
    assert abs(value.mean() - truth) < 4 * value.std() / 80**0.5
    assert 0.8 < np.sqrt((error**2).mean()) / value.std() < 1.25


@pytest.mark.parametrize(
    ("chunk", "decay", "at_once"), [(2000, 0.0, 16), (20, 0.0, 3), (5, 0.0, 0), (2000, 0.1, 0)]
)
def test_groups_of_samples_at_once_give_the_estimates_of_a_pass_each(
    chunk: int, decay: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randint(3, (60,))
    model = landscape.models.build("mlp", widths=[4, 5, 3]).double()
    loss = torch.nn.functional.cross_entropy
    problem = landscape.Problem(model, loss, (x, y), dtype=torch.float64, weight_decay=decay)
    problem.data.chunk_size, passes = chunk, []
    parts = division.Parts.drawn(division.parse("sizes(0.6, 0.4)", 2), problem, {}, 2, 5, 1)
    estimator = GradientEstimator(problem, Comm(2), 96, 0)
    gradients = Stack.gradients

    def counted(self: Stack, weights: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        passes.append(len(weights))
        return gradients(self, weights, *args, **options)

    monkeypatch.setattr(Stack, "gradients", counted)
    g = estimator.at(problem.weights, 3)
    assert max(passes, default=0) == at_once
    draw = generator(0, "decompose", 3)
    each = [problem.subset(i).loss_and_gradient() for i in torch.randint(60, (16, 6), generator=draw)]
    torch.testing.assert_close(g.rows, torch.stack([row for _, row in each]), rtol=1e-12, atol=1e-12)
    assert g.loss == pytest.approx(sum(value for value, _ in each) / 16, rel=1e-12)
    found = estimator.heterogeneity(problem.weights, 3, g, parts)
    torch.testing.assert_close(g.rows, torch.stack([row for _, row in each]), rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(GradientEstimator, "_stack", None)
    alone = dataclasses.replace(estimator).heterogeneity(problem.weights, 3, g, parts)
    assert found == pytest.approx(alone, rel=1e-9)


def test_the_parts_of_a_split_are_what_its_name_says() -> None:
    y = torch.arange(1200) % 6
    data = {"train": ({"x": torch.randn(1200, 2), "site": torch.arange(1200) // 240}, y)}
    model = network(lambda m, x, site: m.layer(x), layer=torch.nn.Linear(2, 6))
    problem = landscape.Problem(model, torch.nn.functional.cross_entropy, data["train"])

    def drawn(text: str, learners: int = 4, seed: int = 0, **columns: Any) -> division.Parts:
        return division.Parts.drawn(division.parse(text, learners), problem, columns, learners, 10, seed)

    for text in ("dirichlet(0.1)", "labels(2)", "sizes(0.4, 0.3, 0.2, 0.1)", "by(site)"):
        made = drawn(text)
        assert torch.equal(made.learner, drawn(text).learner)
        assert text == "by(site)" or not torch.equal(made.learner, drawn(text, seed=1).learner)
        by_hand = [[int((y[own] == label).sum()) for label in range(6)] for own in made.indices]
        assert made.counts.tolist() == by_hand
        assert made.counts.sum() == 1200
        assert made.counts.sum(1).min() >= 10
    assert drawn("sizes(0.4, 0.3, 0.2, 0.1)").counts.sum(1).tolist() == [480, 360, 240, 120]
    assert ((drawn("labels(2)").counts > 0).sum(1) == 2).all()
    assert sorted(drawn("by(site)").counts.sum(1).tolist()) == [240, 240, 240, 480]
    who = np.array(["ann", "bob", "eve", "joe"])[np.arange(1200) % 4]
    assert drawn("by(who)", who=who).learner.unique().tolist() == [0, 1, 2, 3]
    even, uneven = (drawn(f"dirichlet({alpha})").counts.double() for alpha in (1000, 0.1))
    assert float(even.std(0).max()) < 10 < float(uneven.std(0).min())
    alike = torch.stack([drawn("dirichlet(1)", 2, seed).counts[0] / 200 for seed in range(200)]).flatten()
    assert abs(float(alike.mean()) - 0.5) < 0.03  # shares ~ Dirichlet(1, 1) are uniform
    assert abs(float(alike.var()) - 1 / 12) < 0.01


@pytest.mark.parametrize("algorithm", [{"name": "ssgd"}, {"name": "dpsgd", "mixing": "ring(1)"}])
def test_a_run_with_parts_records_them_and_goes_on_to_the_bit(
    algorithm: dict[str, Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    settings = {"algorithm": algorithm, "data.split": "dirichlet(0.3)", "batch": 20}
    short, long = (recipe.read(str(tiny), settings | {"steps": steps}) for steps in (9, 14))
    launch.launch(short, tmp_path / "a")
    whole = launch.launch(long, tmp_path / "b")
    monkeypatch.setattr(division.Parts, "drawn", None)  # the checkpoint's are taken
    end = launch.launch(long, tmp_path / "a", resume=True)
    same_bits(end, whole)
    counts = landscape.label_counts(landscape.load(tmp_path / "a" / "last.h5"))
    assert counts.counts.sum() == 200
    assert counts.counts.shape == (4, 3)
    assert counts.division == "dirichlet(0.3)"
    words = ("label-counts", tmp_path / "a", "-o", tmp_path / "c.h5", "--plot", tmp_path / "c.png")
    assert command(*words)[0] == 0
    assert (tmp_path / "c.png").exists()
    np.testing.assert_array_equal(landscape.load(tmp_path / "c.h5").counts, counts.counts)
    broken = dataclasses.replace(end, shared={})
    with pytest.raises(OperationError, match="lacks the parts of data.split"):
        Trainer(long, checkpoint=broken)
    odd = dataclasses.replace(end, shared=end.shared | {"split.learner": end.shared["split.learner"] - 1})
    with pytest.raises(OperationError, match="/shared/split.learner is no division of the training set"):
        Trainer(long, checkpoint=odd)
    with pytest.raises(OperationError, match="no parts of their own"):
        landscape.label_counts(broken)


def test_all_samples_of_equal_parts_are_each_learners_own(tiny: Path) -> None:
    settings = {"sampling": "all", "batch": 200, "data.split": "sizes(0.25, 0.25, 0.25, 0.25)", "steps": 1}
    trainer = Trainer(recipe.read(str(tiny), settings | {"dtype": "float64"}))
    assert trainer.data_parts is not None
    start = trainer.train_problem.weights
    own = [trainer.train_problem.subset(part).gradient(start) for part in trainer.data_parts.indices]
    torch.testing.assert_close(trainer.run().weights, start - 0.2 * torch.stack(own))


@pytest.mark.parametrize("form", ["dict", "object", "tokens"])
def test_data_of_ones_own_are_divided_by_columns_of_their_own(form: str, tiny: Path) -> None:
    """With a column of texts beside the samples, and of sequences that have no label."""
    x, y = landscape.data.load("synthetic", samples=120, dimension=6, classes=3).train
    site = ["abcd"[i % 4] for i in range(120)]
    splits: dict[str, Any] = {"train": (x, y), "test": (x, y), "columns": {"site": site}}
    settings: dict[str, Any] = {"data.split": "by(site)", "steps": 2, "decompose.every": 1}
    if form == "tokens":
        settings["model"] = {"name": "tests.nets:tagger"}
        splits |= dict.fromkeys(("train", "test"), (x, torch.stack([y, y], 1)))
    given = as_data(SimpleNamespace(**splits) if form == "object" else splits)
    trainer = Trainer(recipe.read(str(tiny), settings), dataset=given)
    assert trainer.data_parts is not None
    assert [part.tolist() for part in trainer.data_parts.indices] == [[*range(k, 120, 4)] for k in range(4)]
    assert trainer.data_parts.counts.shape == (4, 1 if form == "tokens" else 3)
    assert (trainer.run().history["heterogeneity"] > 0).all()
    with pytest.raises(InputError, match=r"one of shape \(119,\), not \(120,\)"):
        Trainer(recipe.read(str(tiny), settings), dataset=as_data(splits | {"columns": {"site": site[1:]}}))
