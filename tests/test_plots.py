"""Figures: what is drawn is what the results hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import InputError, Surface, plots
from landscape.train import recipe
from landscape.train.loop import Trainer
from tests import problems


@pytest.fixture(scope="module")
def surface() -> Surface:
    problem = problems.mlp()
    return landscape.contour(problem, landscape.random_plane(problem), grid=(6, 4), span=1.0, split="test")


def test_surfaces_share_levels_and_mark_what_is_not_finite(surface: Surface) -> None:
    holes = surface.loss.copy()
    holes[0, 0] = np.nan
    other = dataclasses.replace(surface, loss=holes + 3.0, label="other")
    figure = plots.surfaces([surface, other])
    first, second, bar = figure.axes
    assert [ax.get_title().split("\n")[0] for ax in (first, second)] == ["surface", "other"]
    assert first.collections[0].get_clim() == second.collections[0].get_clim()
    low, high = bar.get_ylim()
    assert low <= surface.loss.min()
    assert high >= np.nanmax(other.loss)
    assert bar.get_ylabel() == "test loss (nat)"


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_levels_cover_the_losses_and_are_few(low: float, width: float) -> None:
    levels = plots.levels([np.array([low, low + width, np.nan])])
    assert levels[0] <= low
    assert levels[-1] >= low + width
    assert 2 <= len(levels) <= plots.MAX_LEVELS + 3
    assert np.all(np.diff(levels) > 0)


def test_the_papers_spacing_where_it_fits() -> None:
    np.testing.assert_allclose(np.diff(plots.levels([np.array([0.051, 0.149])])), 0.005)


def test_training_curves_of_several_seeds() -> None:
    runs = [Trainer(recipe.read(f"digits-{a}", ["steps=12", f"seed={s}", "evaluate.every=4"])).run()
            for a in ("ssgd", "dpsgd") for s in (0, 1)]  # fmt: skip
    figure = plots.training(runs)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["ssgd (median of 2)", "dpsgd (median of 2)"]
    consensus = figure.axes[2].lines[0]
    np.testing.assert_array_equal(consensus.get_ydata(), runs[0].history["consensus"])


def test_results_plot_themselves_and_mixtures_are_refused(surface: Surface, tmp_path: Path) -> None:
    problem = problems.mlp()
    grid = landscape.hessian_grid(
        problem, landscape.random_plane(problem), grid=(2, 2), max_products=3, tol=1e-9
    )
    weights = problem.theta + 0.1 * problem.theta.new_tensor([[1.0], [-1.0]])
    noise = landscape.estimate_noise(problem, weights, 0.1, 4, draws=3)
    assert not grid.converged.all()
    texts = [t.get_text() for t in grid.plot().axes[0].texts]
    assert texts[0] == f"{grid.ratio[1, 0]:.2g}*"  # the top row is the largest y
    for i, result in enumerate((surface, grid, noise)):
        plots.save_figure(result.plot(), tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 5000
    with pytest.raises(InputError, match="all files must be of one kind"):
        plots.draw([surface, grid])
    with pytest.raises(InputError, match="no value is finite"):
        plots.levels([np.array([np.nan])])
    top = {name: getattr(surface, name)[:1] for name in ("y", "loss", "accuracy", "done")}
    line = dataclasses.replace(surface, **top)
    with pytest.raises(InputError, match="2 × 2 can"):
        plots.surfaces([line])
