"""Basins of surfaces against components that are counted level by level, and against ellipses and double wells."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

import landscape
from landscape import FailedError, InputError, Surface, plots
from landscape.geometry.basins import merge_tree
from tests.conftest import Command
from tests.examples import parabola
from tests.test_cli import one_line

GRIDS = arrays(
    np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(0, 6) | st.just(np.nan)
)


def surface(loss: np.ndarray, directions: np.ndarray | None = None, **changes: object) -> Surface:
    """``loss`` (ny, nx) over [−1, 1]²."""
    ny, nx = loss.shape
    fields = {
        "x": np.linspace(-1, 1, nx),
        "y": np.linspace(-1, 1, ny),
        "loss": loss,
        "accuracy": loss,
        "done": np.ones(loss.shape, bool),
        "directions": np.eye(2) if directions is None else directions,
    }
    center = np.zeros(fields["directions"].shape[1])  # type: ignore[union-attr]
    return dataclasses.replace(parabola(), **(fields | {"center": center} | changes))  # type: ignore[arg-type]


def wells(nx: int = 81, ny: int = 61) -> Surface:
    """L = (x² − ¼)² + x/20 + y²: two wells of different depth, whose saddle is near x = 0.1."""
    x, y = np.linspace(-1, 1, nx)[None], np.linspace(-1, 1, ny)[:, None]
    return surface((x**2 - 0.25) ** 2 + x / 20 + y**2)


@given(GRIDS)
def test_basins_are_the_components_of_every_level(loss: np.ndarray) -> None:
    tree = merge_tree(loss)
    born = loss.ravel()[tree.minimum]
    for level in range(7):
        _, count = ndimage.label(np.nan_to_num(loss, nan=99) <= level, np.ones((3, 3)))
        assert count == np.sum((born <= level) & (born + tree.persistence > level))
    assert sorted(tree.persistence, reverse=True) == tree.persistence.tolist()
    assert np.all(tree.first <= tree.persistence)
    for k in np.flatnonzero(tree.saddle >= 0):
        parent = tree.into[k]
        assert parent < k
        assert born[parent] <= born[k]
        assert loss.ravel()[tree.saddle[k]] - born[k] == tree.persistence[k] > 0
    np.testing.assert_array_equal(tree.basin < 0, np.isnan(loss))


@given(GRIDS, st.floats(0.5, 5))
def test_a_simplified_tree_keeps_each_point_in_a_basin(loss: np.ndarray, least: float) -> None:
    tree = merge_tree(loss)
    fewer = tree.without(least)
    assert len(fewer.minimum) == np.sum(tree.persistence >= least)
    assert set(np.unique(fewer.basin)) <= {-1, *range(len(fewer.minimum))}
    np.testing.assert_array_equal(fewer.basin < 0, np.isnan(loss))
    for k, place in enumerate(fewer.minimum):  # and each basin has its own lowest point
        assert fewer.basin.ravel()[place] == k


@settings(max_examples=6)
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
    found = whole.basins([0.7 * border])
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
    found = wells().basins()
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
    assert len(wells().basins(least=0.1).minimum) == 1
    assert wells().basins(least=0.1).minima == 2
    below = wells().basins([0.9 * (height[1] - height[0])], around="lowest")
    assert below.width[0, 0] < 0.75  # the region is of one well
    above = wells().basins([1.1 * (height[1] - height[0])], around="lowest")
    assert above.width[0, 0] > 1.2
    assert above.reference == pytest.approx(found.minimum[0])


def test_regions_that_the_edge_cuts_say_so() -> None:
    slope = surface(np.tile(np.linspace(0, 1, 21), (11, 1)))
    found = slope.basins()
    assert found.at_edge.all()
    assert found.cut.all()
    assert found.edge_rise == 0
    assert "edge" in plots.draw([found]).get_suptitle()
    wide = parabola().basins([0.5, 1.5])
    assert wide.cut.tolist() == [False, True]


def test_losses_that_are_not_finite_are_walls() -> None:
    loss = wells().loss.copy()
    loss[:, 44] = np.inf
    loss[3, 3] = np.nan
    found = surface(loss).basins(around="lowest")
    assert np.isinf(found.persistence).sum() == 2
    assert np.isfinite(found.smad)
    assert found.basin[3, 3] == -1
    assert (found.basin[:, 44] == -1).all()
    with pytest.raises(FailedError, match="around: 'center'"):
        surface(np.where(np.abs(loss) > -1, loss, 0) + np.where(np.arange(81) == 40, np.nan, 0)).basins()


def test_the_walls_around_a_region_are_no_edge() -> None:
    loss = parabola().loss.copy()
    loss[[0, -1]] = loss[:, [0, -1]] = np.inf
    found = surface(loss).basins()
    assert found.edge_rise == np.inf
    assert not found.cut.any()


def test_errors_of_interpolation_are_no_basins() -> None:
    whole = wells()
    shallow = dataclasses.replace(
        whole,
        columns=("loss",),
        stated_error=np.array([0.04]),
        largest_error=np.array([0.01]),
        tolerance="0.05",
    )
    assert whole.basins().least < 0.02
    assert shallow.basins().least == pytest.approx(0.08)
    assert len(shallow.basins().minimum) == 1
    share = dataclasses.replace(shallow, tolerance="5%")
    assert share.basins().least == pytest.approx(0.08 * np.ptp(whole.loss))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.basins([0.0]), "rises: 0.0 is not allowed"),
        (lambda s: s.basins([0.1, 0.1]), "rises: .*different"),
        (lambda s: s.basins([]), "rises"),
        (lambda s: s.basins([np.nan]), "rises: nan"),
        (lambda s: s.basins(least=-1.0), "least: -1"),
        (lambda s: s.basins(around="middle"), "around: 'middle' is not known.*center, lowest"),
        (lambda s: surface(s.loss[:1]).basins(), "2 × 2"),
        (lambda s: surface(s.loss * np.nan).basins(), "no value is finite"),
        (lambda s: surface(s.loss, np.ones((2, 3))).basins(), "directions: .*parallel"),
        (lambda s: surface(-s.loss).basins(), "rises: no loss is above"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=words) as caught:
        call(parabola())
    assert "\n" not in str(caught.value)


def test_the_command(tmp_path: Path, command: Command) -> None:
    wells().save(tmp_path / "c.h5")
    code, out, err = command("basins", tmp_path / "c.h5", "--plot", tmp_path / "b.png", "--rise", "0.01")
    assert (code, out.split()[-2:]) == (0, [str(tmp_path / "c-basins.h5"), str(tmp_path / "b.png")]), err
    saved = landscape.load(tmp_path / "c-basins.h5")
    np.testing.assert_equal(vars(saved), vars(wells().basins([0.01])))
    for words in ("lowest of basin 2", "SMAD", f"{saved.area[0]:.6g}", "meets no deeper one"):
        assert words in out
    one_line(command("basins", tmp_path / "c.h5"), 1, "finished landscape.basins", "--force")
    one_line(command("basins", tmp_path / "c.h5", "--around", "top"), 2, "--around: 'top'", "center, lowest")
    one_line(command("basins", tmp_path / "c.h5", "--rise", "-1", "--force"), 2, "rises: -1.0")
    one_line(command("basins", tmp_path / "c-basins.h5"), 1, "landscape.basins", "surface")
    one_line(command("basins", tmp_path / "none.h5"), 1, "none.h5: no such file")
    part = wells()
    dataclasses.replace(part, done=np.arange(part.done.size).reshape(part.done.shape) > 9).save(
        tmp_path / "p.h5"
    )
    one_line(command("basins", tmp_path / "p.h5"), 1, "p.h5", "not finished")


def test_the_picture_compares_surfaces_of_one_kind() -> None:
    both = [wells().basins(), dataclasses.replace(wells(), label="ssgd, seed 0").basins()]
    figure = plots.draw(both)
    assert figure.get_suptitle().startswith("Width ")
    assert len(figure.axes) == 5
    mixed = plots.draw([wells().basins(), wells().basins(around="lowest")])
    assert mixed.get_suptitle() == "Basins: 2, 2"
