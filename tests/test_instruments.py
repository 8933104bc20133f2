"""What a run measures as it goes, and sharpness along training: against dense matrices, known truths, resumed, over processes, and refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from torch import Tensor

import landscape
from landscape import Checkpoint, InputError, Problem
from landscape.core import registry
from landscape.core.errors import OperationError
from landscape.core.options import parse_toml
from landscape.plots import draw
from landscape.problem.layout import average
from landscape.testing.checks import registered
from landscape.training.instruments import Instrument, StepState
from landscape.training.own_loop.recorder import Recorder
from landscape.training.recipes import recipe
from landscape.training.run import generator
from landscape.training.run.loop import Hooks, Trainer
from tests import problems
from tests.dense import dense_hessian
from tests.test_batch_sharpness import dense
from tests.test_buffers import BASE, load, module_of
from tests.test_recorder import digits, net
from tests.test_training import quadratic

NAMES = [
    "lambda-max", "batch-sharpness", "noise-scale", "disagreement", "noise-alignment", "worst-sharpness",
    "average-sharpness", "average", "noise-share", "path",
]  # fmt: skip
ALL: dict[str, Any] = {
    "instruments": NAMES, "every": 6, "draws": 3, "samples": 90, "k": 2, "rho": 0.05, "window": 2,
}  # fmt: skip


def values_of(tiny: Path, **changes: Any) -> dict[str, Any]:
    values = parse_toml(tiny.read_text(), "") | {"name": "tiny", "dtype": "float64"}
    return values | {"checkpoint": {"every": 5}, "monitor": ALL} | changes


def measured(values: dict[str, Any]) -> tuple[Trainer, Checkpoint, dict[int, Tensor]]:
    """The trainer and the end of a run, and the learners' weights after each step that was saved."""
    saved: dict[int, Tensor] = {}

    def keep(state: Checkpoint) -> None:
        saved[state.step] = state.weights.clone()

    trainer = Trainer(recipe.from_values(values), hooks=Hooks(save=keep))
    return trainer, trainer.run(), saved


def ratio(above: list[float], below: list[float]) -> tuple[float, float]:
    """Σa/Σb and its error, leaving one out at a time."""
    a, b, n = np.array(above), np.array(below), len(above)
    left = np.array([np.delete(a, k).sum() / np.delete(b, k).sum() for k in range(n)])
    return a.sum() / b.sum(), math.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum())


@pytest.mark.parametrize(
    "algorithm", [{"name": "dpsgd", "mixing": "ring(1)"}, {"name": "ssgd"}], ids=["dpsgd", "ssgd"]
)
def test_the_columns_are_those_of_dense_matrices(tiny: Path, algorithm: dict[str, Any]) -> None:
    values = values_of(tiny, algorithm=algorithm, steps=12, checkpoint={"every": 6})
    trainer, end, saved = measured(values)
    sample, whole, n = trainer.monitor.run.sample.problem, trainer.train_problem, 4
    assert sample.samples == ALL["samples"]
    assert [end.units[c] for c in ("noise_scale", "batch_sharpness", "disagreement_cost", "spread_share_se")] == [
        "samples", "nat", "nat", "1",
    ]  # fmt: skip
    for step in (12,) if algorithm["name"] == "dpsgd" else (6,):
        row = {name: column[end.history["step"] == step][0] for name, column in end.history.items()}
        weights = saved[step]
        mean = weights.mean(0)
        points = mean.expand_as(weights) if algorithm["name"] == "ssgd" else weights
        at = problems.at(sample, mean)
        h = problems.textbook_hessian(at)

        def drawn(part: str, *shape: int, step: int = step) -> Tensor:
            stream = generator(trainer.recipe.seed, f"monitor_{part}", step)
            return torch.stack([torch.randint(whole.samples, shape, generator=stream) for _ in range(3)])

        at_mean = [dense(whole, mean, i)[0] for i in drawn("batch-sharpness mean", 1, 40)[:, 0]]
        own = [
            np.mean([dense(whole, w, i)[0] for w, i in zip(points, rows, strict=True)])
            for rows in drawn("batch-sharpness learners", n, 10)
        ]
        for name, found in {"batch_sharpness": at_mean, "learner_batch_sharpness": own}.items():
            assert row[name] == pytest.approx(np.mean(found), rel=1e-8)
            assert row[f"{name}_se"] == pytest.approx(np.std(found, ddof=1) / 3**0.5, rel=1e-6)
            assert row[f"lr_{name}"] == pytest.approx(0.2 * np.mean(found), rel=1e-8)
        eigenvalues, vectors = torch.linalg.eigh(h)
        assert abs(row["lambda_max"] - eigenvalues[-1]) <= row["lambda_max_residual"] + 1e-12
        assert row["lambda_max_residual"] <= 0.01 * eigenvalues[-1]
        assert row["lr_lambda_max"] == 0.2 * row["lambda_max"]
        # ring(1) of 4: 1 + ω_min
        assert row["lr_lambda_limit"] == pytest.approx(2 if algorithm["name"] == "ssgd" else 2 / 3)
        result, vectors = landscape.disagreement(sample, weights, 2), vectors[:, -2:]
        for name, found, near in (
            ("spread_share", result.value, 0.02), ("spread_share_se", result.standard_error, 0.01),
            ("gradient_share", result.gradient_share.sum(), 0.02), ("disagreement_cost", result.cost, 1e-9),
            ("disagreement_cost_se", result.cost_error, 1e-7),
        ):  # fmt: skip
            assert row[name] == pytest.approx(found, abs=near)
        fresh = {
            name: [problems.textbook_gradient(whole.subset(i), mean) for i in drawn(name, 1, 40)[:, 0]]
            for name in ("noise-alignment", "noise-share")
        }
        gradients = fresh["noise-alignment"]
        expected = ratio([float(v @ h @ v) for v in gradients], [float(v @ v) for v in gradients])
        assert (row["noise_alignment"], row["noise_alignment_se"]) == pytest.approx(expected, rel=1e-8)
        noise = torch.stack(fresh["noise-share"])
        noise -= noise.mean(0)
        share = float((noise @ vectors).square().sum() / noise.square().sum())
        assert row["noise_share"] == pytest.approx(share, abs=0.02)
        if step == 12:  # from the measurement after step 6
            start = saved[6].mean(0)
            way, slope = mean - start, problems.textbook_gradient(sample, start)
            cosine = float(-(way @ slope) / (way.norm() * slope.norm()))
            assert row["path_cosine"] == pytest.approx(cosine, rel=1e-8)
        else:
            assert np.isnan(row["path_cosine"])
        for kind in ("worst", "average"):
            seed = generator(trainer.recipe.seed, f"monitor_{kind}-sharpness", step).initial_seed() % 2**62
            rise = landscape.sharpness(at, 0.05, kind, min_draws=3, max_draws=3, seed=seed)
            assert row[f"{kind}_sharpness"] == pytest.approx(rise.value, rel=1e-6)


MUON = {"name": "muon", "groups": {"bias": {"name": "sgd"}}}


@pytest.mark.parametrize(("algorithm", "optimizer"), [
    ({"name": "ssgd"}, {"name": "sgd", "momentum": 0.9}),
    ({"name": "ssgd"}, MUON),
    ({"name": "dpsgd", "mixing": "ring(1)"}, {"name": "adamw"}),
    ({"name": "dpsgd", "mixing": "ring(1)", "order": "atc"}, {"name": "lamb"}),
    ({"name": "diloco", "period": 3}, {"name": "adamw"}),
    ({"name": "async-sgd", "delay": 2}, {"name": "sgd"}),
])  # fmt: skip
def test_the_loss_change_of_a_step(tiny: Path, algorithm: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Of any rule and optimizer; step 3 is DiLoCo's outer step, 4 is none."""
    monitor = {"instruments": ["loss-change"], "every": 1, "samples": 90}
    changes = {"algorithm": algorithm, "optimizer": optimizer, "lr": 0.02, "steps": 4}
    trainer, end, saved = measured(values_of(tiny, **changes, checkpoint={"every": 1}, monitor=monitor))
    sample = trainer.monitor.run.sample.problem
    for step in (3, 4):
        row = {name: column[end.history["step"] == step][0] for name, column in end.history.items()}
        before, after = saved[step - 1].mean(0), saved[step].mean(0)
        d, h = after - before, problems.textbook_hessian(problems.at(sample, before))
        assert row["loss_change"] == pytest.approx(sample.loss(after) - sample.loss(before), rel=1e-9)
        gradient = float(problems.textbook_gradient(sample, before) @ d)
        assert row["loss_change_gradient"] == pytest.approx(gradient, rel=1e-9)
        assert row["loss_change_curvature"] == pytest.approx(float(d @ h @ d) / 2, rel=1e-8)
        assert row["directional_sharpness"] == pytest.approx(float(d @ h @ d / (d @ d)), rel=1e-8)
        parts = [row[f"loss_change_{part}"] for part in ("gradient", "curvature", "rest")]
        assert sum(parts) == pytest.approx(row["loss_change"], abs=1e-15)
        layers = [value for name, value in row.items() if name.startswith("loss_change ")]
        assert len(layers) > 1
        assert sum(layers) == pytest.approx(parts[0] + parts[1], abs=1e-12)
        slope = problems.textbook_gradient(sample, before) + h @ d / 2
        for name, own in sample.layout.groups("layer").items():
            part = sum(float(slope[s.place] @ d[s.place]) for s in own)
            assert row[f"loss_change {name}"] == pytest.approx(part, abs=1e-9)


def test_the_running_average_is_that_of_the_last_measured_weights(tiny: Path) -> None:
    monitor = {"instruments": ["average"], "every": 5, "samples": 90, "window": 3}
    trainer, end, saved = measured(values_of(tiny, monitor=monitor))
    steps = [step for step in saved if step and step % 5 == 0]
    means = [saved[step].mean(0) for step in steps[-3:]]
    sample = trainer.monitor.run.sample.problem
    wanted = landscape.average(sample, means)
    row = {name: end.history[name][steps[-1] - 1] for name in trainer.monitor.columns}
    assert row["average_loss"] == pytest.approx(wanted.loss[0], rel=1e-9)
    assert row["average_gain"] == pytest.approx(sample.loss(means[-1]) - wanted.loss[0], rel=1e-6)
    assert row["average_loss_low"] < wanted.exact[0] < row["average_loss_high"]
    assert np.isnan(end.history["average_loss"][: steps[1]]).all()


def test_the_noise_scale_of_a_window_is_that_of_its_gradients(tiny: Path) -> None:
    """SSGD's from the gradients of each step; the ratio of averages, not the average of ratios."""
    monitor = ALL | {"instruments": ["noise-scale"]}
    values = values_of(tiny, algorithm={"name": "ssgd"}, steps=12, monitor=monitor)
    trainer = Trainer(recipe.from_values(values))
    seen: list[tuple[float, float]] = []
    compute = trainer._compute_gradients

    def keep(*arguments: Any) -> Tensor:
        losses = compute(*arguments)
        g = trainer._gradients
        pairs = [float(a @ b) for i, a in enumerate(g) for j, b in enumerate(g) if i != j]
        seen.append((10 * float((g - g.mean(0)).square().sum()) / 3, float(np.mean(pairs))))
        return losses

    trainer._compute_gradients = keep  # type: ignore[method-assign]
    history = trainer.run().history
    for last in (6, 12):
        traces, norms = (list(column) for column in zip(*seen[last - 6 : last], strict=True))
        row = {name: history[f"noise_{name}"][last - 1] for name in ("scale", "scale_se", "trace", "norm2")}
        assert (row["scale"], row["scale_se"]) == pytest.approx(ratio(traces, norms), rel=1e-9)
        assert (row["trace"], row["norm2"]) == pytest.approx((np.mean(traces), np.mean(norms)), rel=1e-9)


def test_learners_that_agree_have_no_shares(tiny: Path) -> None:
    values = values_of(tiny, algorithm={"name": "dpsgd", "order": "atc"}, steps=6, dtype="float32")
    row = {name: column[-1] for name, column in Trainer(recipe.from_values(values)).run().history.items()}
    assert math.isnan(row["spread_share"])
    assert abs(row["disagreement_cost"]) < 1e-10
    assert row["gradient_share"] > 0


@pytest.mark.parametrize("name", ["torch:Adam", "lars"])
def test_the_preconditioner_is_that_of_the_optimizers_state(tiny: Path, name: str) -> None:
    monitor = ALL | {"instruments": ["preconditioned-lambda-max"], "samples": 0}
    values = values_of(tiny, optimizer={"name": name}, lr=0.01, steps=12, monitor=monitor)
    trainer, end, _ = measured(values)
    row = {column: end.history[column][-1] for column in end.history}
    problem = end.problem()
    seen = landscape.preconditioner(end, problem)
    with pytest.raises(
        InputError, match=f"^precondition: '{name}' is not allowed, .* or a Tensor; use"
    ) as refusal:
        landscape.noise_scale(end, precondition=name)  # type: ignore[arg-type]
    by = eval(refusal.value.remedy, {"landscape": landscape, "run": end})
    assert torch.equal(by.diagonal, seen.diagonal)
    root = seen.diagonal.double().rsqrt()
    top = float(
        torch.linalg.eigvalsh(
            root[:, None] * problems.textbook_hessian(problems.at(trainer.train_problem, end.mean)) * root
        )[-1]
    )
    # LARS's P hangs on minibatches that are drawn anew.
    assert row["preconditioned_lambda_max"] == pytest.approx(top, rel=0.02 if name != "lars" else 0.3)
    assert row["lr_preconditioned_lambda_max"] == pytest.approx(0.01 * row["preconditioned_lambda_max"])
    assert row["lr_preconditioned_limit"] == pytest.approx(seen.limit)


def test_an_instrument_of_ones_own_declares_its_columns(tiny: Path) -> None:
    class Norm(Instrument):
        name = "norm"

        def measure(self, now: StepState) -> dict[str, float]:
            return {"norm": float(now.mean.norm())}

    with registered(registry.instruments, Norm, "norm") as name:
        chosen = recipe.from_values(values_of(tiny, steps=6, monitor={"instruments": [name], "every": 6}))
        with pytest.raises(OperationError, match="'columns' of 'norm' must declare 'norm'"):
            Trainer(chosen).run()


def test_gradients_that_vanish_are_nan_and_end_no_run(tiny: Path) -> None:
    trainer = Trainer(recipe.from_values(values_of(tiny)))
    row = trainer.monitor.measure(6, 0.2, torch.full_like(trainer.weights, torch.inf))
    assert math.isnan(row["batch_sharpness"])
    assert "lambda_max" not in row


# Loops of the user's own.


def record(
    folder: Path, monitor: dict[str, Any], steps: int = 4, **options: Any
) -> tuple[Recorder, torch.nn.Module]:
    model, (x, y) = net(), digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Recorder(
        folder, model, torch.nn.functional.cross_entropy, (x, y), every=0, monitor=monitor,
        **{"optimizer": optimizer, "batch": 16, "save_every": 2} | options,
    ) as recorder:  # fmt: skip
        for t in range(recorder.steps, steps):
            rows = torch.randint(len(y), (16,), generator=torch.Generator().manual_seed(t))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            with recorder.step():
                optimizer.step()
    return recorder, model


def test_a_recorder_measures_the_loss_change_of_its_steps(tmp_path: Path) -> None:
    _, model = record(tmp_path, {"instruments": ["loss-change"], "every": 2, "samples": 0}, save_every=1)
    before = landscape.load(tmp_path / "step-0000003.h5").weights[0]
    problem = Problem(model, torch.nn.functional.cross_entropy, digits())
    change = landscape.loss_change(problem, before, problem.weights)
    row = {name: column[-1] for name, column in landscape.load(tmp_path / "last.h5").history.items()}
    assert row["step"] == 4
    assert row["loss_change"] == pytest.approx(change.loss_change, rel=1e-9)
    assert row["loss_change_gradient"] == pytest.approx(change.gradient[0], rel=1e-9)
    assert row["loss_change_curvature"] == pytest.approx(change.curvature[0], rel=1e-8)


@pytest.mark.slow
def test_a_recorder_measures_with_the_same_instruments(tmp_path: Path) -> None:
    names = ["batch-sharpness", "noise-scale", "noise-alignment", "preconditioned-lambda-max"]
    _, model = record(tmp_path, {"instruments": names, "every": 2, "draws": 40})
    run = landscape.load(tmp_path / "last.h5")
    row = {name: column[-1] for name, column in run.history.items()}
    assert run.history["step"][np.isfinite(run.history["noise_scale"])].tolist() == [2, 4]
    problem = Problem(model, torch.nn.functional.cross_entropy, digits())
    sharp = landscape.batch_sharpness(problem, 16, min_draws=200, max_draws=200, quantities=())
    assert abs(row["batch_sharpness"] - sharp.value) < 4 * math.hypot(
        row["batch_sharpness_se"], sharp.standard_error
    )
    scale = landscape.noise_scale(problem, 16, min_draws=200, max_draws=200)
    assert abs(row["noise_scale"] - scale.value) < 4 * math.hypot(row["noise_scale_se"], scale.standard_error)
    assert row["lr_preconditioned_limit"] == pytest.approx(38, rel=1e-6)
    assert row["lr_preconditioned_lambda_max"] == pytest.approx(0.01 * row["preconditioned_lambda_max"])
    assert run.units["noise_scale"] == "samples"


def test_a_recorders_state_goes_on(tmp_path: Path) -> None:
    """λ_max begins its search where the last one ended; columns of instruments may not be logged."""
    monitor = {"instruments": ["lambda-max", "noise-scale"], "every": 2, "draws": 4}
    record(tmp_path, monitor)
    first = landscape.load(tmp_path / "last.h5")
    assert "monitor_start" in first.shared
    with pytest.warns(UserWarning, match="not those recorded"):
        record(tmp_path, monitor, steps=6, resume=True)
    assert landscape.load(tmp_path / "last.h5").history["step"][-1] == 6
    loss, options = torch.nn.functional.cross_entropy, {"monitor": monitor, "batch": 16, "every": 0}
    other = Recorder(tmp_path / "other", net(), loss, digits(), **options)
    with other, pytest.raises(InputError, match="column of the recorder's own"):
        other.log(noise_scale=1.0)


def test_the_limit_is_the_rules_own_and_its_crossing_is_shown_once() -> None:
    lines: list[str] = []
    hooks = Hooks(message=lines.append)
    monitor = {"sharpness": 10}
    stable = quadratic(monitor=monitor, steps=50, lr=0.6)
    Trainer(stable, hooks=hooks).run()
    assert not [line for line in lines if "is above" in line]
    beyond = quadratic(monitor=monitor, steps=50, lr=0.7)
    end = Trainer(beyond, hooks=hooks).run()
    assert [line for line in lines if "is above" in line] == [
        "step 10: lr·λ_max = 0.7 is above 0.6667, the limit of stability on a quadratic (shown once only)"
    ]
    longer = quadratic(monitor=monitor, steps=80, lr=0.7)
    Trainer(longer, checkpoint=end, hooks=hooks).run()
    assert sum("is above" in line for line in lines) == 1
    mean = Trainer(quadratic(monitor=monitor, steps=10, algorithm={"name": "ssgd"}, lr=0.7)).run()
    assert mean.history["lr_lambda_limit"][-1] == 2
    lamb = quadratic(monitor=monitor, steps=10, optimizer={"name": "lamb"}, lr=0.01)
    assert np.isnan(Trainer(lamb).run().history["lr_lambda_limit"]).all()


def test_with_batchnorm_it_is_that_of_the_loss_that_training_descends() -> None:
    chosen = recipe.from_values(BASE | {"monitor": {"sharpness": 6, "samples": 100, "k": 1}})
    trainer = Trainer(chosen)
    end = trainer.run()
    problem = trainer.monitor.run.sample.problem
    assert (problem.samples, problem.chunk) == (96, 12)  # whole batches
    values = np.linalg.eigvalsh(dense_hessian(problem, average(end.weights)).numpy())
    residual = end.history["lambda_max_residual"][-1]
    assert end.history["lambda_max"][-1] == pytest.approx(values[-1], abs=residual + 1e-9)
    x, _ = trainer.train_problem.subset(torch.arange(12)).resident or ()
    model = problem.call(problem.layout.views(average(end.weights)), x)
    module = module_of(trainer)  # in training mode: the batch's own statistics
    load(module, trainer, average(end.weights))
    torch.testing.assert_close(model, module(x))


def test_settings_of_one_algorithm_have_colors_that_differ(tiny: Path) -> None:
    mixings = ("ring(1)", "full", "star", "torus")
    runs = [Trainer(recipe.read(str(tiny), ["steps=5", f"algorithm.mixing={m}"])).run() for m in mixings]
    colors = np.array([to_rgb(line.get_color()) for line in draw(runs).axes[2].lines])
    apart = np.abs(colors[:, None] - colors[None]).max(-1)
    assert (apart[~np.eye(len(runs), dtype=bool)] > 0.15).all()


def test_the_picture_has_a_row_more(tiny: Path) -> None:
    monitor = {"instruments": ["noise-scale", "batch-sharpness", "disagreement"], "every": 10, "draws": 2}
    more, without = (
        Trainer(recipe.from_values(values_of(tiny, steps=10, monitor=m))).run()
        for m in (monitor | {"sharpness": 5, "k": 2}, {})
    )
    heights = {round(float(line.get_ydata()[0]), 3) for line in draw([more]).axes[0].lines}  # type: ignore[index]
    assert heights & {2.0, 0.667} == {0.667}
    assert len(draw([without]).axes) == 6
    shown = [ax for ax in draw([more]).axes if ax.get_visible()]
    labels = " ".join(ax.get_ylabel() for ax in shown)
    # ‖g‖² is not significantly above 0, so that the noise scale has no panel.
    assert np.isnan(more.history["noise_scale"]).all()
    assert len(shown) == 13
    assert all(words in labels for words in ("batch sharpness", "tr(HC)"))


def test_a_recorder_refuses_what_it_cannot_measure(tmp_path: Path) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("disagreement", {}, "'disagreement' is not allowed with 1 learner"),
        ("batch-sharpness", {"batch": 0}, "'batch-sharpness' needs the size of a minibatch"),
        ("preconditioned-lambda-max", {"optimizer": None}, "only with Adam, AdamW or RMSprop"),
    ]
    for name, options, words in refused:
        with pytest.raises(InputError, match=words):
            record(tmp_path / "run", {"instruments": [name]}, **options)
        assert not (tmp_path / "run").exists()
