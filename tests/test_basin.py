"""How far the loss rises around a centre: against parabolas, whose rise is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landscape.geometry import surfaces
from landscape.plots.surface import finding
from landscape.results.grids import Surface
from landscape.results.shown import POINTS, WINDOW, running_quartiles
from tests.examples import parabola


def valley(
    steepness: float = 1.0, directions: np.ndarray | None = None, count: int = 81, **changes: object
) -> Surface:
    """L = steepness × ‖θ‖² in the plane of two directions in three dimensions, exactly."""
    spread = np.array([[2.0, 0, 0], [0, 0.5, 0]]) if directions is None else directions
    x = np.linspace(-1, 1, count)
    points = x[None, :, None] * spread[0] + x[:, None, None] * spread[1]
    loss = 0.1 + steepness * (points**2).sum(-1)
    whole = {"x": x, "y": x, "loss": loss, "accuracy": loss, "done": loss > 0, "directions": spread}
    center = {"center": np.ones(spread.shape[1])}
    return dataclasses.replace(parabola(), **(center | whole | changes))  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-2, 2), min_size=6, max_size=6).filter(
        lambda v: np.linalg.norm(np.cross(v[:3], v[3:])) > 0.3
    )
)
def test_profiles_are_in_distances_whatever_the_directions(entries: list[float]) -> None:
    directions = np.array(entries).reshape(2, 3)
    p = surfaces.profile(valley(directions=directions))
    # Between points of the grid bilinear interpolation is too high, by at most a quarter step squared.
    slack = 0.26 * (1 / 40) ** 2 * (directions**2).sum() + 1e-9
    for quartile in (p.low, p.median, p.high):
        assert np.all(quartile >= 0.1 + p.distance**2 - 1e-9)
        assert np.all(quartile <= 0.1 + p.distance**2 + slack)


def test_the_profile_ends_where_the_grid_does() -> None:
    assert surfaces.profile(valley()).distance[-1] == pytest.approx(
        0.5, rel=2e-3
    )  # along the shorter direction


def test_losses_that_are_not_finite_are_above_all_others() -> None:
    loss = valley().loss.copy()
    loss[:35] = np.nan
    p = surfaces.profile(valley(loss=loss))
    assert np.isfinite(p.low).all()
    assert np.isinf(p.high[-1])
    assert surfaces.median_rise(valley(loss=loss)) > 0


@given(st.floats(1.2, 50))
def test_flatness_is_the_ratio_of_the_rises(ratio: float) -> None:
    flat, steep = valley(label="dpsgd, seed 0, step 9"), valley(ratio, label="ssgd, seed 0, step 9")
    assert surfaces.median_rise(steep) / surfaces.median_rise(flat) == pytest.approx(ratio)
    assert finding([steep, flat]) == f"DPSGD's minimum is {ratio:.2g} times as flat as SSGD's"
    shared = surfaces.shared_rise([flat, steep])
    assert shared == pytest.approx(surfaces.shared_rise([flat]))
    for surface in (flat, steep):  # the contour at that rise is inside both
        p = surfaces.profile(surface)
        assert p.median[0] + shared < p.median[-1]


def test_findings_say_no_more_than_the_surfaces_show() -> None:
    flat, same = valley(label="dpsgd, seed 0"), valley(1.05, label="ssgd, seed 0")
    assert "about as flat" in finding([flat, same])
    assert "2 surfaces" in finding([flat, valley(2.0, label="dpsgd, seed 1")])
    assert "flat" not in finding([flat, valley(2.0, label="ssgd", span=3.0)])  # another span
    larger = valley(2.0, np.pad(np.eye(2), ((0, 0), (0, 2))), label="ssgd")
    assert "flat" not in finding([flat, larger])  # another network
    named = [valley(label="VGG-19, DPSGD"), valley(2.0, label="VGG-19, SSGD")]
    assert finding(named) == "DPSGD's minimum is 2 times as flat as SSGD's"
    high = dataclasses.replace(flat, loss=flat.loss + 9)
    said = "The loss is 2 times as flat around DPSGD's weights as around SSGD's, at 9.1 against 0.1 nat"
    assert finding([high, valley(2.0, label="ssgd, seed 0")]) == said
    hill = valley(-0.01, label="ssgd, seed 0")
    assert finding([flat, hill]).startswith("Median rise of the loss around the centre: DPSGD")
    assert np.isnan(surfaces.shared_rise([hill]))
    path = valley(kind="pca", markers=np.zeros((2, 2)), labels=("a", "b"), marker_loss=np.array([2.0, 0.5]))
    assert finding([path]) == "Along the trajectory the loss goes from 2 to 0.5 nat"
    assert not surfaces.has_profile(path)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(0, 3))
def test_running_quartiles_are_quantiles_of_the_window(values: list[float], holes: int) -> None:
    steps, column = np.arange(len(values), dtype=float), np.array(values)
    column[:holes] = np.nan
    at, quartiles = running_quartiles(steps, column)
    assert len(at) <= POINTS
    assert quartiles.shape == (3, len(at))
    known = np.isfinite(column)
    reach = WINDOW / 2 * np.ptp(steps[known]) if known.any() else 0
    for place, quartile in zip(
        at[:: max(1, len(at) // 5)], quartiles.T[:: max(1, len(at) // 5)], strict=True
    ):
        inside = column[known & (np.abs(steps - place) <= reach)]
        np.testing.assert_allclose(quartile, np.quantile(inside, (0.25, 0.5, 0.75)))
