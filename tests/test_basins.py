"""Basins of surfaces against components that are counted level by level, ellipses, wells and parabolas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

import landscape
from landscape import LandscapeError, OperationError, Surface, plots
from landscape.plots.surface import finding
from landscape.results import geometry
from landscape.results.geometry import merge_tree
from tests.conftest import Command
from tests.examples import parabola
from tests.test_cli import one_line

GRIDS = arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(0, 6) | st.just(np.nan)
)


def surface(loss: np.ndarray, directions: np.ndarray | None = None, /, **changes: object) -> Surface:
    """``loss`` (ny, nx) over [−1, 1]²."""
    y, x = (np.linspace(-1, 1, n) for n in loss.shape)
    directions = np.eye(2) if directions is None else directions
    fields = {"x": x, "y": y, "loss": loss, "accuracy": loss, "done": np.ones(loss.shape, bool)}
    fields |= {"directions": directions, "center": np.zeros(directions.shape[1])}
    return dataclasses.replace(parabola(), **(fields | changes))  # type: ignore[arg-type]


def wells(nx: int = 81, ny: int = 61) -> Surface:
    """L = (x² − ¼)² + x/20 + y²: two wells of different depth, whose saddle is near x = 0.1."""
    x, y = np.linspace(-1, 1, nx)[None], np.linspace(-1, 1, ny)[:, None]
    return surface((x**2 - 0.25) ** 2 + x / 20 + y**2)


@settings(max_examples=30)
@given(GRIDS, st.floats(0.5, 5))
def test_basins_are_the_components_of_every_level(loss: np.ndarray, least: float) -> None:
    tree = merge_tree(loss)
    born = loss.ravel()[tree.minimum]
    for level in range(7):
        _, count = ndimage.label(np.nan_to_num(loss, nan=99) <= level, np.ones((3, 3)))
        assert count == np.sum((born <= level) & (born + tree.persistence > level))
    assert sorted(tree.persistence, reverse=True) == tree.persistence.tolist()
    assert np.all(tree.first_rise <= tree.persistence)
    for k in np.flatnonzero(tree.saddle >= 0):
        parent = tree.into[k]
        assert parent < k
        assert born[parent] <= born[k]
        assert loss.ravel()[tree.saddle[k]] - born[k] == tree.persistence[k] > 0
    fewer = tree.without_basins_below(least)
    assert len(fewer.minimum) == np.sum(tree.persistence >= least)
    for each in (tree, fewer):  # every point is in a basin, and each basin has its own lowest point
        np.testing.assert_array_equal(each.basin < 0, np.isnan(loss))
        np.testing.assert_array_equal(each.basin.ravel()[each.minimum], range(len(each.minimum)))
        assert each.basin.max(initial=-1) < len(each.minimum)


@settings(max_examples=4)
@given(st.lists(st.floats(-1.5, 1.5), min_size=6, max_size=6).filter(
    lambda v: np.linalg.norm(np.cross(v[:3], v[3:])) > 0.5
), st.floats(0.3, 30))  # fmt: skip
def test_an_ellipse_has_its_own_axes_whatever_the_directions(entries: list[float], second: float) -> None:
    directions = np.array(entries).reshape(2, 3)
    grid = np.linspace(-1, 1, 161)
    points = grid[None, :, None] * directions[0] + grid[:, None, None] * directions[1]
    one = directions[0] / np.linalg.norm(directions[0])
    two = directions[1] - directions[1] @ one * one
    two /= np.linalg.norm(two)
    curvature = np.array([2.0, second])
    loss = 0.1 + 0.5 * curvature[0] * (points @ one) ** 2 + 0.5 * curvature[1] * (points @ two) ** 2
    whole = surface(loss, directions)
    border = np.concatenate([loss[0], loss[-1], loss[:, 0], loss[:, -1]]).min() - 0.1
    found = landscape.basins(whole, [0.7 * border])
    assert found.edge_rise == pytest.approx(border, rel=0.01)
    axes = np.sort(2 * np.sqrt(2 * 0.7 * border / curvature))[::-1]
    area = np.pi * axes.prod() / 4
    np.testing.assert_allclose(found.width[0], axes, rtol=0.04)
    assert found.area[0] == pytest.approx(area, rel=0.04)
    assert found.equivalent_width[0] == pytest.approx(np.sqrt(axes.prod()), rel=0.02)
    assert found.volume[0] == pytest.approx(0.7 * border * area / 2, rel=0.05)
    assert found.anisotropy[0] == pytest.approx(np.sqrt(curvature.max() / curvature.min()), rel=0.06)
    assert not found.cut[0]


def test_two_wells_have_the_saddle_of_the_polynomial() -> None:
    found = landscape.basins(wells())
    slopes = np.sort(np.roots([4, 0, -1, 1 / 20]).real)
    height = (slopes**2 - 0.25) ** 2 + slopes / 20
    assert len(found.minimum) == found.minima == 2
    np.testing.assert_allclose(found.minimum, [[slopes[0], 0], [slopes[2], 0]], atol=0.02)
    np.testing.assert_allclose(found.saddle[1], [slopes[1], 0], atol=0.02)
    assert np.isnan(found.saddle[0]).all()
    np.testing.assert_allclose(found.minimum_loss, height[[0, 2]], atol=1e-3)
    assert found.persistence[0] == np.inf
    assert found.persistence[1] == pytest.approx(height[1] - height[2], abs=1e-3)
    # Both minima meet at the one saddle, and the average has the deeper one, too.
    assert found.smad == pytest.approx(height[1] - height[[0, 2]].mean(), abs=1e-3)
    assert found.share.sum() == pytest.approx(1)
    assert found.share[1] == pytest.approx((1 - slopes[1]) / 2, abs=0.02)
    assert not found.at_edge.any()
    assert len(landscape.basins(wells(), least=0.1).minimum) == 1
    assert landscape.basins(wells(), least=0.1).minima == 2
    below = landscape.basins(wells(), [0.9 * (height[1] - height[0])], around="lowest")
    assert below.width[0, 0] < 0.75  # the region is of one well
    above = landscape.basins(wells(), [1.1 * (height[1] - height[0])], around="lowest")
    assert above.width[0, 0] > 1.2
    assert above.reference == pytest.approx(found.minimum[0])


def test_regions_that_the_edge_cuts_say_so_and_walls_are_no_edge() -> None:
    found = landscape.basins(surface(np.tile(np.linspace(0, 1, 21), (11, 1))))  # a slope
    assert (found.at_edge.all(), found.cut.all(), found.edge_rise) == (True, True, 0)
    assert "edge" in plots.draw([found]).get_suptitle()
    assert landscape.basins(parabola(), [0.5, 1.5]).cut.tolist() == [False, True]
    loss = parabola().loss.copy()
    loss[[0, -1]] = loss[:, [0, -1]] = np.inf
    walled = landscape.basins(surface(loss))
    assert (walled.edge_rise, walled.cut.any()) == (np.inf, False)


def test_losses_that_are_not_finite_are_walls() -> None:
    loss = wells().loss.copy()
    loss[:, 44], loss[3, 3] = np.inf, np.nan
    found = landscape.basins(surface(loss), around="lowest")
    assert np.isinf(found.persistence).sum() == 2
    assert np.isfinite(found.smad)
    np.testing.assert_array_equal(found.basin == -1, ~np.isfinite(loss))
    loss[:, 40] = np.nan
    with pytest.raises(OperationError, match="around: 'center'"):
        landscape.basins(surface(loss))


def test_errors_of_interpolation_are_no_basins() -> None:
    whole = wells()
    errors = {"stated_error": np.array([0.04]), "largest_error": np.array([0.01])}
    shallow = dataclasses.replace(whole, columns=("loss",), interpolation_tol="0.05", **errors)
    assert landscape.basins(whole).least < 0.02
    assert landscape.basins(shallow).least == pytest.approx(0.08)
    assert len(landscape.basins(shallow).minimum) == 1
    share = dataclasses.replace(shallow, interpolation_tol="5%")
    assert landscape.basins(share).least == pytest.approx(0.08 * np.ptp(whole.loss))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: landscape.basins(s, [0.1, 0.1]), r"rises: \[0.1, 0.1\] .*different"),
        (lambda s: landscape.basins(s, []), "rises"),
        (lambda s: landscape.basins(s, [np.nan]), "rises: nan"),
        (lambda s: landscape.basins(s, least=-1.0), "least: -1"),
        (lambda s: landscape.basins(surface(s.loss[:1])), "2 × 2"),
        (lambda s: landscape.basins(surface(s.loss * np.nan)), "no value is finite"),
        (lambda s: landscape.basins(surface(s.loss, np.ones((2, 3)))), "directions: .*parallel"),
        (lambda s: landscape.basins(surface(-s.loss)), "rises: no loss exceeds"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(call: Callable[[Surface], object], words: str) -> None:
    with pytest.raises(LandscapeError, match=words) as caught:
        call(parabola())
    assert "\n" not in str(caught.value)


def test_the_command(tmp_path: Path, command: Command) -> None:
    wells().save(tmp_path / "c.h5")
    code, out, err = command("basins", tmp_path / "c.h5", "--plot", tmp_path / "b.png", "--rise", "0.01")
    assert (code, out.split()[-2:]) == (0, [str(tmp_path / "c-basins.h5"), str(tmp_path / "b.png")]), err
    saved = landscape.load(tmp_path / "c-basins.h5")
    np.testing.assert_equal(vars(saved), vars(landscape.basins(wells(), [0.01])))
    for words in ("lowest of basin 2", "SMAD", f"{saved.area[0]:.6g}", "meets no deeper one"):
        assert words in out
    part = wells()
    part.done[0, :9] = False
    part.save(tmp_path / "p.h5")
    for name, options, status, *named in (
        ("c.h5", (), 1, "its --rise is [0.01] and not the default", "--force"),
        ("c.h5", ("--around", "top"), 2, "--around: 'top'", "center, lowest"),
        ("c.h5", ("--rise", "-1", "--force"), 2, "--rise: -1.0 is not allowed"),
        ("c-basins.h5", (), 1, "landscape.basins", "surface"),
        ("p.h5", (), 1, "p.h5", "not finished"),
    ):
        one_line(command("basins", tmp_path / name, *options), status, *named)


def test_the_picture_compares_surfaces_of_one_kind() -> None:
    both = [landscape.basins(wells()), landscape.basins(dataclasses.replace(wells(), label="ssgd, seed 0"))]
    figure = plots.draw(both)
    assert figure.get_suptitle().startswith("Width ")
    assert len(figure.axes) == 5
    mixed = plots.draw([landscape.basins(wells()), landscape.basins(wells(), around="lowest")])
    assert mixed.get_suptitle() == "Basins: 2, 2"


def valley(steepness: float = 1.0, directions: np.ndarray | None = None, **changes: object) -> Surface:
    """L = steepness × ‖θ‖² in the plane of two directions in three dimensions, exactly."""
    spread = np.array([[2.0, 0, 0], [0, 0.5, 0]]) if directions is None else directions
    x = np.linspace(-1, 1, 81)
    points = x[None, :, None] * spread[0] + x[:, None, None] * spread[1]
    loss = 0.1 + steepness * (points**2).sum(-1)
    return surface(loss, spread, **({"center": np.ones(spread.shape[1])} | changes))


@given(
    st.lists(st.floats(-2, 2), min_size=6, max_size=6).filter(
        lambda v: np.linalg.norm(np.cross(v[:3], v[3:])) > 0.3
    )
)
def test_profiles_are_in_distances_whatever_the_directions(entries: list[float]) -> None:
    directions = np.array(entries).reshape(2, 3)
    p = geometry.profile(valley(directions=directions))
    # Between points of the grid bilinear interpolation is too high, by at most a quarter step squared.
    slack = 0.26 * (1 / 40) ** 2 * (directions**2).sum() + 1e-9
    for quartile in (p.low, p.median, p.high):
        assert np.all(quartile >= 0.1 + p.distance**2 - 1e-9)
        assert np.all(quartile <= 0.1 + p.distance**2 + slack)


def test_losses_that_are_not_finite_are_above_all_others() -> None:
    loss = valley().loss.copy()
    loss[:35] = np.nan
    p = geometry.profile(valley(loss=loss))
    assert np.isfinite(p.low).all()
    assert np.isinf(p.high[-1])
    assert geometry.median_rise(valley(loss=loss)) > 0


@given(st.floats(1.2, 50))
def test_flatness_is_the_ratio_of_the_rises(ratio: float) -> None:
    flat, steep = valley(label="dpsgd, seed 0, step 9"), valley(ratio, label="ssgd, seed 0, step 9")
    assert geometry.median_rise(steep) / geometry.median_rise(flat) == pytest.approx(ratio)
    assert finding([steep, flat]) == f"The loss rises {ratio:.2g} times as much around SSGD as around DPSGD"
    shared = geometry.shared_rise([flat, steep])
    assert shared == pytest.approx(geometry.shared_rise([flat]))
    for surface in (flat, steep):  # the contour at that rise is inside both
        p = geometry.profile(surface)
        assert p.median[0] + shared < p.median[-1]


def test_findings_say_no_more_than_the_surfaces_show() -> None:
    flat, same = valley(label="dpsgd, seed 0"), valley(1.05, label="ssgd, seed 0")
    assert "rises about as much" in finding([flat, same])
    assert "2 maps" in finding([flat, valley(2.0, label="dpsgd, seed 1")])
    assert "as much" not in finding([flat, valley(2.0, label="ssgd", span=3.0)])  # another span
    larger = valley(2.0, np.pad(np.eye(2), ((0, 0), (0, 2))), label="ssgd")
    assert "as much" not in finding([flat, larger])  # another network
    named = [valley(label="VGG-19, DPSGD"), valley(2.0, label="VGG-19, SSGD")]
    assert finding(named) == "The loss rises 2 times as much around SSGD as around DPSGD"
    high = dataclasses.replace(flat, loss=flat.loss + 9)  # weights that are not all at a minimum
    assert "Median rise of the loss: DPSGD" in finding([high, valley(2.0, label="ssgd, seed 0")])
    hill = valley(-0.01, label="ssgd, seed 0")
    assert finding([flat, hill]).startswith("Median rise of the loss: DPSGD")
    assert np.isnan(geometry.shared_rise([hill]))
    path = valley(kind="pca", markers=np.zeros((2, 2)), labels=("a", "b"), marker_loss=np.array([2.0, 0.5]))
    assert finding([path]) == "Along the trajectory the loss goes from 2 to 0.5 nat"
    assert not geometry.has_profile(path)


def paraboloid(
    a: float = 1.0, b: float = 1.0, at: tuple[float, float] = (0.0, 0.0), **changes: Any
) -> Surface:
    """L = a(x − x₀)² + b(y − y₀)² on 11 × 13 points, along directions of the lengths 2 and 1."""
    x, y = np.linspace(-1, 1, 11)[None], np.linspace(-1, 1, 13)[:, None]
    sides = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    return surface(a * (x - at[0]) ** 2 + b * (y - at[1]) ** 2, sides, **{"norm": "filter", **changes})


def extremes(low: float, high: float) -> landscape.ExtremeEigenvalues:
    """λ_min and λ_max."""
    matrix = torch.diag(torch.tensor([low, 0.1, high], dtype=torch.float64))
    return landscape.extreme_eigenvalues(matrix)


def slope() -> Surface:
    """A coarse plane, whose lower tenth is few points though it has no walls."""
    x, y = np.linspace(-1, 1, 7)[None], np.linspace(-1, 1, 7)[:, None]
    return surface(x + y, norm="filter")


def of_loss(change: Callable[[Any], Any]) -> Surface:
    return dataclasses.replace(paraboloid(), loss=change(paraboloid().loss))


def half_done() -> Surface:
    half = np.arange(143).reshape(13, 11) % 2 == 0
    return dataclasses.replace(of_loss(lambda loss: np.where(half, loss, np.nan)), done=half)


PLACES: dict[str, Any] = {"kind": "pca", "markers": np.array([[0.5, 0.0], [0.0, 0.25]]), "labels": ("a", "b")}
NEAR = paraboloid(**PLACES, marker_loss=np.array([0.25, 0.0725]), explained=np.array([0.8, 0.15]))
FAR = paraboloid(**PLACES, marker_loss=np.array([0.25, 0.3]), explained=np.array([0.5, 0.15]))


@pytest.mark.parametrize(
    ("subject", "shown", "ends", "fine", "words"),
    [
        ("center", paraboloid(), (), True, "its loss is 0, the lowest of all points"),
        # The slope is −2·0.4 and 2·0.5, and is zero where the lowest point of the grid lies.
        ("center", paraboloid(at=(0.4, -0.5)), (), False, "0.41 above the lowest, at (0.4, -0.5); slopes -0.8 and 1 nat a unit, zero 0.5 spans away"),
        ("center", NEAR, (), None, ""),
        # ∂² = 2a/‖d₁‖² = 0.5·a and 2b along unit vectors.
        ("curvature", paraboloid(4, 3), (0.05, 6.0), True, "2 to 6 on the plane, λ_min 0.05 and λ_max 6 in all"),
        ("curvature", paraboloid(4, 3), (0.05, 13.0), False, "λ_max 13"),
        ("curvature", paraboloid(4, 3), (-0.5, 6.0), False, "λ_min -0.5"),
        ("curvature", paraboloid(4, -0.1), (-0.3, 2.0), True, "-0.2 to 2"),
        ("curvature", paraboloid(4, 3, directions=np.array([[1.0, 0, 0], [1, 0, 0]])), (0.0, 1.0), None, ""),
        ("curvature", of_loss(lambda loss: np.where(loss == 0, np.nan, loss)), (0.0, 50.0), False, "no 3 × 3 points"),
        ("window", paraboloid(), (), True, "losses from 0 to 2; "),
        ("window", of_loss(lambda loss: loss * 1e-5 + 7), (), False, "the loss hardly changes, losses from 7 to 7; "),
        ("window", of_loss(lambda loss: np.where(loss > 0.02, 9.0, loss)), (), False, "the walls hide the valley, losses from 0 to 9; 1 "),
        ("window", of_loss(lambda loss: np.where(loss > 1.5, np.inf, loss)), (), False, "points have no finite loss; losses from 0 to "),
        ("window", slope(), (), True, "losses from -2 to 2; 3 of 49 points in the lower tenth"),
        ("places", NEAR, (), True, "the plane has 95% of the spread of its 2 places / b has the loss 0.0725, the plane below it 0.062"),
        ("places", FAR, (), False, "the plane has 65%"),
        ("BatchNorm", paraboloid(batchnorm=True, bn="center"), (), False, "come out too high"),
        ("BatchNorm", paraboloid(batchnorm=True, bn="recalibrate"), (), True, "recalibrate"),
        ("BatchNorm", paraboloid(), (), None, ""),
        ("directions", paraboloid(norm="none"), (), False, "biases and normalization layers move"),
        ("directions", paraboloid(ignore="bias+norm"), (), True, "random, scaled by filter"),
        ("points", half_done(), (), False, "71 of 143 points are not computed yet"),
    ],
)  # fmt: skip
def test_a_check_says_what_a_picture_shows_and_hides(
    subject: str, shown: Surface, ends: tuple[float, ...], fine: bool | None, words: str
) -> None:
    """``fine`` None: nothing is said of the subject."""
    check = shown.check(extremes(*ends) if ends else None)
    findings = [f for f in check.findings if f.subject == subject]
    assert check.fine == ("LOOK" not in str(check))
    assert {f.fine for f in findings} == ({fine} - {None})
    assert all(f.fine == (f.advice == "") for f in findings)
    assert words in " / ".join(f.answer for f in findings)


def test_a_surface_without_a_finite_loss_has_no_check() -> None:
    with pytest.raises(OperationError, match="no finite loss to look at"):
        of_loss(lambda loss: loss * np.nan).check()
