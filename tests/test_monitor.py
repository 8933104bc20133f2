"""Sharpness along training: against the dense Hessian, resumed, over processes, and what is told of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from landscape import Checkpoint, InputError
from landscape.checkpoint.history import MONITORED
from landscape.plots.training import draw_training
from landscape.problem.layout import average
from landscape.train.recipes import recipe
from landscape.train.run.loop import Hooks, Trainer
from tests.dense import dense_hessian
from tests.test_buffers import BASE, load, module_of
from tests.test_training import quadratic

MONITOR = "monitor={sharpness = 5, samples = 90, top = 2}"


def chosen(tiny: Path, *settings: str) -> recipe.Recipe:
    return recipe.read(str(tiny), ["dtype=float64", "checkpoint.every=5", MONITOR, *settings])


def test_it_is_that_of_the_dense_hessian_on_a_fixed_sample(tiny: Path) -> None:
    saved: list[Checkpoint] = []

    def keep(state: Checkpoint) -> None:  # the weights' memory is used again
        saved.append(dataclasses.replace(state, weights=state.weights.clone()))

    trainer = Trainer(chosen(tiny), hooks=Hooks(save=keep))
    history = trainer.run().history
    seen = np.flatnonzero(np.isfinite(history["lambda_max"]))
    np.testing.assert_array_equal(history["step"][seen], np.arange(5, 31, 5))
    problem = trainer.monitor.run.sample.problem
    assert problem.samples == 90
    for i, state in zip(seen, saved[1:], strict=True):
        mean = average(state.weights)
        values, vectors = np.linalg.eigh(dense_hessian(problem, mean).numpy())
        spread = (state.weights - mean).numpy()
        row = {name: history[name][i] for name in MONITORED}
        assert abs(row["lambda_max"] - values[-1]) <= row["lambda_max_residual"] + 1e-12
        assert row["lambda_max_residual"] <= 0.01 * values[-1]
        assert row["lr_lambda_max"] == 0.2 * row["lambda_max"]
        assert row["lr_lambda_limit"] == pytest.approx(2 / 3)  # ring(1) of 4: 1 + ω_min
        share = ((spread @ vectors[:, -2:]) ** 2).sum() / (spread**2).sum()
        assert row["spread_share"] == pytest.approx(share, abs=0.02)


def test_the_limit_is_the_rules_own_and_its_crossing_is_told_once() -> None:
    lines: list[str] = []
    hooks = Hooks(message=lines.append)
    monitor = {"sharpness": 10}
    stable = quadratic(monitor=monitor, steps=50, lr=0.6)
    Trainer(stable, hooks=hooks).run()
    assert not [line for line in lines if "is above" in line]
    beyond = quadratic(monitor=monitor, steps=50, lr=0.7)
    end = Trainer(beyond, hooks=hooks).run()
    assert [line for line in lines if "is above" in line] == [
        "step 10: lr·λ_max = 0.7 is above 0.6667, up to which the steps are stable on a quadratic; told once, "
        "the history has the rest"
    ]
    longer = quadratic(monitor=monitor, steps=80, lr=0.7)
    Trainer(longer, checkpoint=end, hooks=hooks).run()
    assert sum("is above" in line for line in lines) == 1
    mean = Trainer(quadratic(monitor=monitor, steps=10, algorithm={"name": "ssgd"}, lr=0.7)).run()
    assert mean.history["lr_lambda_limit"][-1] == 2
    lamb = quadratic(monitor=monitor, steps=10, optimizer={"name": "lamb"}, lr=0.01)
    assert np.isnan(Trainer(lamb).run().history["lr_lambda_limit"]).all()


def test_with_batchnorm_it_is_that_of_the_loss_that_training_descends() -> None:
    chosen = recipe.from_values(BASE | {"monitor": {"sharpness": 6, "samples": 100, "top": 1}})
    trainer = Trainer(chosen)
    end = trainer.run()
    problem = trainer.monitor.run.sample.problem
    assert (problem.samples, problem.chunk) == (96, 12)  # whole batches
    values = np.linalg.eigvalsh(dense_hessian(problem, average(end.weights)).numpy())
    residual = end.history["lambda_max_residual"][-1]
    assert end.history["lambda_max"][-1] == pytest.approx(values[-1], abs=residual + 1e-9)
    x, _ = trainer.train.subset(torch.arange(12)).resident or ()
    model = problem.call(problem.layout.views(average(end.weights)), x)
    module = module_of(trainer)  # in training mode: the batch's own statistics
    load(module, trainer, average(end.weights))
    torch.testing.assert_close(model, module(x))


def test_settings_of_one_algorithm_have_colours_that_differ(tiny: Path) -> None:
    mixings = ("ring(1)", "full", "star", "torus")
    runs = [Trainer(chosen(tiny, "steps=5", f"algorithm.mixing={m}")).run() for m in mixings]
    colors = np.array([to_rgb(line.get_color()) for line in draw_training(runs).axes[2].lines])
    apart = np.abs(colors[:, None] - colors[None]).max(-1)
    assert (apart[~np.eye(len(runs), dtype=bool)] > 0.15).all()


def test_the_picture_has_a_row_more(tiny: Path) -> None:
    names = "['noise-scale', 'batch-sharpness', 'disagreement']"
    settings = ("steps=10", f"monitor.instruments={names}", "monitor.every=10", "monitor.draws=2")
    more, without = (
        Trainer(chosen(tiny, *more)).run() for more in (settings, ("steps=10", "monitor.sharpness=0"))
    )
    heights = {round(float(line.get_ydata()[0]), 3) for line in draw_training([more]).axes[0].lines}  # type: ignore[index]
    assert {2.0, 0.667} <= heights
    assert len(draw_training([without]).axes) == 6
    shown = [ax for ax in draw_training([more]).axes if ax.get_visible()]
    labels = " ".join(ax.get_ylabel() for ax in shown)
    assert np.isnan(
        more.history["noise_scale"]
    ).all()  # ‖g‖² is not told apart from 0, so that it has no panel
    assert len(shown) == 13
    assert all(words in labels for words in ("batch sharpness", "tr(HC)"))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("monitor.sharpness=-1", "monitor.sharpness: -1 is not allowed"),
        ("monitor.samples=-1", "monitor.samples: -1 is not allowed"),
        ("monitor.top=0", "monitor.top: 0 is not allowed"),
        ("monitor.sharp=1", "did you mean 'sharpness'"),
    ],
)
def test_bad_settings_are_refused(tiny: Path, setting: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Trainer(chosen(tiny, setting))
