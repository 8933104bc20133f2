"""Figures: what is drawn is what the results hold."""

from __future__ import annotations

import dataclasses
import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

import landscape
from landscape import FailedError, InputError, Surface, plots
from landscape.core import registry
from landscape.geometry import surfaces
from landscape.plots.picture import caption, panels
from landscape.plots.style import OTHER, color_of, decimal_labels, paper_name
from landscape.plots.surface import LOG_LEVELS, MAX_LEVELS, draw_surfaces, scale
from landscape.plots.training import draw_training
from landscape.results.curvature import Spectrum
from landscape.results.grids import HessianGrid
from landscape.results.shown import running_quartiles
from landscape.results.training import Stability
from landscape.train.recipes import recipe
from landscape.train.run.loop import Trainer
from tests import problems
from tests.examples import parabola


@pytest.fixture(scope="module")
def surface() -> Surface:
    problem = problems.mlp()
    return landscape.contour(problem, landscape.random_plane(problem), grid=(6, 4), span=1.0, split="test")


def test_surfaces_share_levels_and_mark_what_is_not_finite(surface: Surface) -> None:
    holes = surface.loss.copy()
    holes[0, 0] = np.nan
    other = dataclasses.replace(surface, loss=holes + 3.0, label="other")
    figure = draw_surfaces([surface, other])
    (first, second), (under, beside), bar = figure.axes[:2], figure.axes[2:4], figure.axes[4]
    assert under.get_ylim() == beside.get_ylim()
    assert [ax.get_title().split("\n")[0] for ax in (first, second)] == ["surface", "other"]
    assert first.collections[0].get_clim() == second.collections[0].get_clim()
    low, high = bar.get_ylim()
    assert low <= surface.loss.min()
    assert high >= np.nanmax(other.loss)
    below, above = scale([surface.loss, other.loss]).levels[1:3]
    assert bar.get_ylabel() == f"loss (nat), lines {above - below:.3g} apart"


def test_labels_of_one_row_end_above_the_titles_of_the_next(tmp_path: Path) -> None:
    steps, numbers = np.linspace(-0.1, 0.1, 4), np.linspace(0.1, 0.4, 16).reshape(4, 4)
    grid = HessianGrid(
        x=steps, y=steps, lambda_min=-numbers, lambda_max=numbers / 0.3, ratio=0.3 * numbers,
        residual_min=numbers, residual_max=numbers, hvps=numbers, converged=numbers > 0, kind="random",
        norm="none", seed=0, span=0.1, tol=0.01, samples=1, dtype="float64", label="ResNet-18, SSGD, epoch 9.01",
    )  # fmt: skip
    figure = plots.draw([grid] * 4)
    figure.suptitle("A title of one line")
    caption(figure, "Settings of the figure, " * 18)
    plots.save_figure(figure, tmp_path / "four.png", dpi=figure.dpi)
    upper, lower = figure.axes[0], figure.axes[2]
    assert upper.xaxis.label.get_window_extent().y0 > lower.title.get_window_extent().y1


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_levels_cover_the_losses_and_are_few(low: float, width: float) -> None:
    chosen = scale([np.array([low, low + width, np.nan])]).levels
    assert chosen[0] <= low
    assert chosen[-1] >= low + width
    assert 2 <= len(chosen) <= MAX_LEVELS + 3
    assert np.all(np.diff(chosen) > 0)


def test_the_papers_spacing_where_it_fits() -> None:
    np.testing.assert_allclose(np.diff(scale([np.array([0.051, 0.149])]).levels), 0.005)


def test_levels_end_below_what_few_points_reach(surface: Surface) -> None:
    spike = np.linspace(1.0, 2.0, 400)
    spike[0] = 40.0
    assert scale([spike]).levels[-1] < 2.2
    assert scale([np.linspace(1.0, 2.0, 400)]).levels[-1] >= 2.0
    for loss, reached in ((surface.loss, True), (np.tile(surface.loss, (10, 10)), False)):
        loss = loss.copy()
        loss[-1, -1] = 1e3  # more than 2% of the small grid, less of the large one
        y, x = (np.linspace(-1, 1, n) for n in loss.shape)
        *_, bar = draw_surfaces(
            [dataclasses.replace(surface, loss=loss, x=x, y=y, accuracy=loss, done=loss > 0)]
        ).axes
        assert (bar.get_ylim()[1] >= 1e3) == reached


@pytest.mark.parametrize(("low", "high"), [(0.03, 0.6), (0.4, 90.0)])
def test_labels_of_log_axes_are_decimal_numbers(low: float, high: float) -> None:
    figure, (ax,) = panels(1, 1, 4.0, 3.0)
    ax.plot([low, high], [low, high])
    ax.set_yscale("log")
    decimal_labels(ax.yaxis)
    FigureCanvasAgg(figure).draw()
    ticks = [*ax.get_yticklabels(), *ax.get_yticklabels(minor=True)]
    labels = {tick.get_text() for tick in ticks} - {""}
    assert len(labels) > 2
    assert labels == {f"{float(label):g}" for label in labels}


@pytest.mark.parametrize(("low", "high"), [(0.0011, 0.62), (0.02, 0.9), (0.002, 400.0), (0.15, 0.9)])
def test_labels_of_low_log_panels_do_not_touch(low: float, high: float) -> None:
    figure, (ax,) = panels(1, 1, 4.0, 1.4)
    ax.set_yscale("log")
    ax.set_ylim(low, high)
    decimal_labels(ax.yaxis)
    FigureCanvasAgg(figure).draw()
    ticks = [t for t in (*ax.get_yticklabels(), *ax.get_yticklabels(minor=True)) if t.get_text()]
    boxes = sorted(
        (b.y0, b.y1) for b in (t.get_window_extent() for t in ticks if low <= float(t.get_text()) <= high)
    )
    assert boxes
    assert all(below[1] < above[0] for below, above in itertools.pairwise(boxes))


def test_training_curves_of_several_seeds() -> None:
    runs = [Trainer(recipe.read(f"digits-{a}", ["steps=12", f"seed={s}", "evaluate.every=4"])).run()
            for a in ("ssgd", "dpsgd") for s in (0, 1)]  # fmt: skip
    figure = draw_training(runs)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["SSGD (median of 2)", "DPSGD (median of 2)"]


def test_training_curves_of_several_settings_are_not_seeds_of_one() -> None:
    settings = (
        ["lr=0.5"],
        ["lr=0.5", "seed=1"],
        ["lr=1.0", "schedule.cosine=12"],
        ["optimizer={name='lamb'}", "lr=0.01"],
    )
    runs = [
        Trainer(recipe.read("digits-ssgd", ["steps=12", "decompose.every=1", *s])).run() for s in settings
    ]
    figure = draw_training(runs)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "SSGD, lr 0.5, optimizer sgd, cosine 0.0 (median of 2)",
        "SSGD, lr 1.0, optimizer sgd, cosine 12.0",
        "SSGD, lr 0.01, optimizer lamb, cosine 0.0",
    ]
    colors = [line.get_color() for line in figure.legends[0].get_lines()]
    assert len(set(colors)) == 3
    rates = [line.get_ydata() for line in figure.axes[3].lines if line.get_linestyle() == ":"]
    np.testing.assert_array_equal(rates, [run.history["lr"] for run in runs])
    plain = draw_training(runs[:2]).axes[3]
    np.testing.assert_allclose(plain.get_ylim(), (-0.25, 1.25))  # near α, where plain steps have α_e
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
        scale([np.array([np.nan])])
    top = {name: getattr(surface, name)[:1] for name in ("y", "loss", "accuracy", "done")}
    line = dataclasses.replace(surface, **top)
    with pytest.raises(InputError, match="2 × 2 can"):
        draw_surfaces([line])


def test_losses_that_differ_a_hundredfold_get_levels_at_equal_ratios() -> None:
    chosen = scale([np.array([0.1, 200.0])]).levels
    np.testing.assert_allclose(chosen[1:] / chosen[:-1], 2000 ** (1 / (LOG_LEVELS - 1)))
    assert (chosen[0], chosen[-1]) == (pytest.approx(0.1), pytest.approx(200))


def marked(surface: Surface, kind: str, count: int) -> Surface:
    """The surface as one of a plane of ``kind`` with ``count`` markers."""
    places = np.linspace(-0.8, 0.7, 2 * count).reshape(count, 2)
    labels = tuple(f"m{k}" for k in range(count))
    return dataclasses.replace(surface, kind=kind, markers=places, labels=labels, marker_loss=np.zeros(count))


def drawn(figure: object, panel: int = 0) -> dict[str, np.ndarray]:
    """Legend name -> coordinates (n, 2) of what is drawn on a panel."""
    return {str(h.get_label()): h.get_xydata() for h in figure.axes[panel].lines}  # type: ignore[attr-defined]


def test_markers_are_where_the_results_say(surface: Surface) -> None:
    i, j = np.unravel_index(surface.loss.argmin(), surface.loss.shape)
    lowest = [[surface.x[j], surface.y[i]]]
    path, learners, anchors = (
        marked(surface, k, n) for k, n in (("pca", 5), ("learners", 4), ("between", 3))
    )
    seen = drawn(plots.draw([path]))
    np.testing.assert_array_equal(seen["trajectory"], path.markers)
    np.testing.assert_array_equal(seen["last checkpoint"], path.markers[-1:])
    np.testing.assert_array_equal(seen["lowest grid point"], lowest)
    seen = drawn(plots.draw([learners]))
    np.testing.assert_array_equal(seen["learners"], learners.markers[:-1])
    np.testing.assert_array_equal(seen["their mean $w_a$"], learners.markers[-1:])
    seen = drawn(plots.draw([anchors]))
    np.testing.assert_array_equal(np.concatenate([seen[f"m{k}"] for k in range(3)]), anchors.markers)
    assert "centre" not in seen
    figure = plots.draw([surface, surface])
    np.testing.assert_array_equal(drawn(figure, 1)["centre"], [[0, 0]])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["lowest grid point", "centre"]  # one legend for both panels


def test_the_lowest_point_is_the_lowest_finite_one(surface: Surface) -> None:
    holes = surface.loss.copy()
    i, j = np.unravel_index(holes.argmin(), holes.shape)
    holes[i, j] = np.nan
    m, n = np.unravel_index(np.nanargmin(holes), holes.shape)
    seen = drawn(plots.draw([dataclasses.replace(surface, loss=holes)]))
    np.testing.assert_array_equal(seen["lowest grid point"], [[surface.x[n], surface.y[m]]])


def test_batchnorm_statistics_are_named_where_there_are_any(surface: Surface) -> None:
    def title(**changes: object) -> str:
        figure = plots.draw([dataclasses.replace(surface, **changes)])  # type: ignore[arg-type]
        return figure.get_caption()  # type: ignore[attr-defined, no-any-return]

    assert "BatchNorm" not in title()
    assert "BatchNorm: the centre's statistics" in title(batchnorm=True)
    assert "from 1,000 samples a point" in title(batchnorm=True, bn="recalibrate", bn_samples=1000)
    assert "batches of 64" in title(batchnorm=True, bn="train", bn_samples=64)
    assert "statistics of each batch" in title(batchnorm=True, bn="train")
    two = [
        dataclasses.replace(surface, batchnorm=True, bn=bn, bn_samples=9) for bn in ("center", "recalibrate")
    ]
    for style in ("contour", "surface"):
        caption = plots.draw(two, style).get_caption()  # type: ignore[attr-defined]
        assert "the centre's statistics / BatchNorm: from 9 samples" in caption
    assert plots.draw(two, "difference").get_caption().count("BatchNorm") == 2  # type: ignore[attr-defined]


def test_three_dimensions_and_holes(surface: Surface, tmp_path: Path) -> None:
    holes = surface.loss.copy()
    holes[1, 2], holes[3, 0] = np.nan, np.inf
    figure = plots.draw([surface, dataclasses.replace(surface, loss=holes)], "surface")
    plots.save_figure(figure, tmp_path / "s.png")
    first, second = figure.axes[:2]
    assert first.get_zlim() == second.get_zlim()
    assert len(first.collections[0].get_array()) == 5 * 3
    low, high = first.get_zlim()
    assert low <= surface.loss.min()
    assert high >= surface.loss.max()


def test_a_difference_is_the_first_less_the_second_on_a_scale_around_zero(surface: Surface) -> None:
    more = np.linspace(-1, 3, surface.loss.size).reshape(surface.loss.shape)
    other = dataclasses.replace(surface, loss=surface.loss - more, label="other")
    figure = plots.draw([surface, other], "difference")
    assert figure.axes[0].collections[0].get_clim() == pytest.approx((-3, 3))
    np.testing.assert_allclose(figure.axes[0].collections[0].get_array(), np.linspace(-2.875, 2.875, 24))
    assert (
        "surface"
        in plots.draw([dataclasses.replace(surface, label="surface A"), other], "difference").get_suptitle()
    )
    higher = dataclasses.replace(surface, loss=surface.loss + 1 + more**2)
    filled = plots.draw([higher, surface], "difference").axes[0].collections[0]
    inside = [
        level > 0 for level, path in zip(filled.get_array(), filled.get_paths(), strict=True) if len(path)
    ]
    assert inside
    assert all(inside)  # the first is higher everywhere: only the upper half of the scale is used
    plots.draw([surface, surface], "difference")  # no difference at all is a picture, too
    with pytest.raises(InputError, match="1 surfaces are not allowed, it takes two"):
        plots.draw([surface], "difference")
    for changes in ({"seed": 5}, {"x": 2 * surface.x}, {"kind": "eigen"}):
        with pytest.raises(InputError, match="must have the same grid"):
            plots.draw([surface, dataclasses.replace(surface, **changes)], "difference")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="nothing to draw"):
        plots.draw([surface, dataclasses.replace(surface, loss=surface.loss * np.nan)], "difference")


def test_lines_show_loss_accuracy_and_barrier() -> None:
    problem = problems.mlp()
    ends = problem.theta + problem.theta.new_tensor([[1.0], [-1.0]])
    inner = landscape.line(problem, ends, 9, ends=("a", "b"))
    figure = plots.draw([inner])
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), inner.loss)
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_ydata(), 100 * inner.accuracy)
    assert f"a to b (barrier {inner.barrier:.3g})" in [t.get_text() for t in figure.legends[0].get_texts()]
    quadratic = problems.quadratic([1.0, 2.0])
    along = landscape.line(quadratic, quadratic.theta, 5)
    assert len(plots.draw([along]).axes) == 1  # no accuracy, no panel for it
    with pytest.raises(InputError, match="different axes"):
        plots.draw([inner, along])
    with pytest.raises(InputError, match=r"style: 'surface'.*Line.*contour"):
        plots.draw([inner], "surface")
    with pytest.raises(InputError, match=r"style: 'differenc'.*'difference'"):
        plots.draw([landscape.contour(problem, landscape.random_plane(problem), grid=2)], "differenc")


def test_vts_has_every_point_in_vtks_order(surface: Surface, tmp_path: Path) -> None:
    holes = surface.loss.copy()
    holes[2, 3] = np.nan
    with_hole = dataclasses.replace(surface, loss=holes)
    landscape.save_vts(with_hole, tmp_path / "s.vts")
    root = ET.parse(tmp_path / "s.vts").getroot()
    assert root.attrib["type"] == "StructuredGrid"
    grid = root.find("StructuredGrid")
    assert grid is not None
    piece = grid.find("Piece")
    assert piece is not None
    assert grid.attrib["WholeExtent"] == piece.attrib["Extent"] == "0 5 0 3 0 0"  # 6 × 4 points
    arrays = {a.attrib["Name"]: np.array((a.text or "").split(), float) for a in piece.iter("DataArray")}
    np.testing.assert_array_equal(arrays["loss"], holes.ravel())
    np.testing.assert_array_equal(arrays["accuracy"], surface.accuracy.ravel())
    hidden = np.zeros(24)
    hidden[2 * 6 + 3] = 2
    np.testing.assert_array_equal(arrays["vtkGhostType"], hidden)
    points = arrays["points"].reshape(-1, 3)
    for k, (x, y, z) in enumerate(points):  # x runs fastest
        assert (x, y) == (surface.x[k % 6], surface.y[k // 6])
        assert z == (holes[k // 6, k % 6] if not hidden[k] else np.nanmin(holes))
    with pytest.raises(InputError, match="must end in .vts"):
        landscape.save_vts(surface, tmp_path / "s.vtk")
    with pytest.raises(InputError, match="no value is finite"):
        landscape.save_vts(dataclasses.replace(surface, loss=holes * np.nan), tmp_path / "t.vts")
    with pytest.raises(FailedError, match="cannot be written"):
        landscape.save_vts(surface, tmp_path / "none" / "t.vts")
    assert [p.name for p in tmp_path.iterdir()] == ["s.vts"]


def test_the_same_rise_is_drawn_on_all_panels(surface: Surface) -> None:
    steep = dataclasses.replace(surface, loss=3 * surface.loss, label="other")
    figure = plots.draw([surface, steep])
    rise = surfaces.shared_rise([surface, steep])
    for ax, r in zip(figure.axes, (surface, steep), strict=False):
        thick = [c for c in ax.collections if np.allclose(c.get_linewidth(), 1.8)]
        assert [c.levels.tolist() for c in thick] == [[pytest.approx(surfaces.center_loss(r) + rise)]]
    below = figure.axes[2]
    np.testing.assert_allclose(below.lines[1].get_ydata(), surfaces.profile(surface).median)
    assert f"{rise:.3g} nat above the centre in all panels" in figure.get_caption()  # type: ignore[attr-defined]


def test_axes_are_distances_and_coordinates_those_of_the_plane(surface: Surface) -> None:
    figure = plots.draw([surface])
    FigureCanvasAgg(figure).draw()
    ax, length = figure.axes[0], surfaces.lengths(surface)[0]
    assert ax.get_xlim() == (surface.x[0], surface.x[-1])
    ticks = [tick for tick in ax.get_xticks() if abs(tick) <= 1]
    labels = [ax.xaxis.get_major_formatter()(tick) for tick in ticks]
    values = [float(label.replace("\N{MINUS SIGN}", "-")) for label in labels]
    np.testing.assert_allclose(values, np.array(ticks) * length, rtol=1e-2, atol=1e-9)
    assert "weights' norm" in ax.get_xlabel()


@pytest.mark.slow
def test_the_look_of_surfaces(surface: Surface, tmp_path: Path) -> None:
    wide = dataclasses.replace(
        surface, loss=surface.loss * np.geomspace(1, 1e4, surface.loss.size).reshape(4, 6)
    )

    def caption(*results: Surface, **options: object) -> str:
        return plots.draw(results, **options).get_caption()  # type: ignore[arg-type, attr-defined, no-any-return]

    assert "logarithmic, as losses differ by a factor of" in caption(wide)
    assert "linear, as asked" in caption(wide, log=False)
    assert "logarithmic, as asked" in caption(surface, log=True)
    assert "linear, as losses differ by a factor of" in caption(surface)
    top = float(surface.loss.max()) / 2
    assert plots.draw([surface], vmax=top).axes[0].collections[0].get_clim()[1] == pytest.approx(top, rel=0.5)
    labelled = plots.draw([surface], labels=True, levels=6, cmap="viridis")
    assert labelled.axes[0].texts
    for style in ("hillshade", "surface"):
        plots.save_figure(plots.draw([surface, wide], style, cmap="cividis"), tmp_path / "a.png", dpi=40)
    with pytest.raises(InputError, match="--log: not allowed, the lowest loss is 0"):
        plots.draw([dataclasses.replace(surface, loss=surface.loss - surface.loss.min())], log=True)
    with pytest.raises(InputError, match="--vmax: .* must be above the lowest loss"):
        plots.draw([surface], vmax=0.0)
    with pytest.raises(InputError, match="--levels"):
        plots.draw([surface], levels=1)
    with pytest.raises(InputError, match="--cmap: 'viridi'.*'viridis'"):
        plots.draw([surface], cmap="viridi")
    with pytest.raises(InputError, match="--vmax: not allowed with style difference"):
        plots.draw([surface, surface], "difference", vmax=2.0)
    ends = problems.mlp().theta + problems.mlp().theta.new_tensor([[1.0], [-1.0]])
    line = landscape.line(problems.mlp(), ends, 3)
    with pytest.raises(InputError, match="labels: not allowed for a Line"):
        plots.draw([line], labels=True)
    with pytest.raises(InputError, match="dpi: 5 is not allowed"):
        plots.save_figure(labelled, tmp_path / "b.png", dpi=5)


def test_a_relief_hides_what_is_not_finite(surface: Surface) -> None:
    holes = surface.loss.copy()
    holes[0, 0] = np.nan
    image = plots.draw([dataclasses.replace(surface, loss=holes)], "hillshade").axes[0].images[0].get_array()
    assert image is not None
    assert image[0, 0, 3] == 0
    assert image[-1, -1, 3] == 1


def test_markers_in_three_dimensions_lie_on_the_surface(surface: Surface) -> None:
    ax = plots.draw([marked(surface, "learners", 4)], "surface").axes[0]
    lines = {str(h.get_label()): np.array(h.get_data_3d()) for h in ax.lines}  # type: ignore[attr-defined]
    places = marked(surface, "learners", 4).markers
    np.testing.assert_allclose(lines["learners"][:2].T, places[:-1])
    np.testing.assert_allclose(lines["learners"][2], surfaces.loss_at(surface, *places[:-1].T))
    assert "their mean $w_a$" in lines


def test_each_algorithm_has_one_colour() -> None:
    rules = [registry.algorithms[name] for name in registry.algorithms]
    ours = [rule for rule in rules if rule.__module__.startswith("landscape.")]
    assert all(rule.label for rule in ours)
    assert len({*(rule.color for rule in ours), OTHER}) == len(ours) + 1 == len({r.label for r in ours}) + 1
    assert color_of("SSGD*") == color_of("ssgd*, seed 0") != color_of("ssgd")
    assert paper_name("ad-psgd, seed 1") == "AD-PSGD, seed 1"


def test_noisy_columns_are_drawn_as_quartiles() -> None:
    settings = ["steps=120", "decompose.every=1", "model.widths=[64, 8, 10]"]
    run = Trainer(recipe.read("digits-dpsgd", settings)).run()
    rate = draw_training([run]).axes[3]
    (line,) = [line for line in rate.lines if line.get_linestyle() == "-"]
    at, (low, median, high) = running_quartiles(run.history["step"], run.history["alpha_e"])
    np.testing.assert_array_equal(line.get_xydata(), np.stack([at, median], 1))
    assert len(rate.collections) == 1
    assert np.all(low <= high)


def test_limits_at_delay_0_are_joined_to_nothing() -> None:
    result = Stability(
        np.array([0, 1, 2]), np.ones((3, 3)), momentum=0.9, lambda_max=2.0, residual=0.0, converged=True, lr=0.1,
        own_limit=np.nan, own_delay=0, samples=9,
    )  # fmt: skip
    for line in plots.draw([result]).axes[0].lines[:3]:
        x, y = line.get_data()
        assert np.isnan(y[1])  # type: ignore[index]
        np.testing.assert_array_equal(x[[0, 2, 3]], [0, 1, 2])  # type: ignore[index]


def test_a_trace_alone_and_a_density_alone_are_drawn() -> None:
    problem = problems.mlp()
    only = landscape.trace(problem)
    none, more = np.zeros((0, 0)), landscape.density(problem, probes=2, steps=4)
    common = {"values": np.zeros(0), "residuals": np.zeros(0), "lowest": 0, "converged": True, "parameters": 9,
              "hvps": 1, "kind": "hessian", "part": "", "engine": "landscape", "tol": 0.1, "seed": 0, "samples": 9,
              "dtype": "float64", "label": "dpsgd, seed 0"}  # fmt: skip
    trace = Spectrum(**common, trace=only.value, trace_error=only.standard_error, nodes=none, weights=none)  # type: ignore[arg-type]
    ax = plots.draw([trace, dataclasses.replace(trace, label="ssgd")]).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["DPSGD, seed 0", "SSGD"]
    assert f"{only.value:.4g} ± {only.standard_error:.2g}" in [text.get_text() for text in ax.texts]
    dense = dataclasses.replace(trace, trace=np.nan, nodes=more.nodes, weights=more.weights)
    assert plots.draw([dense]).axes[0].get_ylabel() == "spectral density (log scale)"
    with pytest.raises(InputError, match="no eigenvalue, no density and no trace"):
        plots.draw([dataclasses.replace(trace, trace=np.nan)])


# L = x² + y² on 11 × 11 points, which draw faster.
_WHOLE = parabola()
COARSE = dataclasses.replace(
    _WHOLE,
    x=_WHOLE.x[::4],
    y=_WHOLE.y[::4],
    **{name: getattr(_WHOLE, name)[::4, ::4] for name in ("loss", "accuracy", "done")},
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"directions": np.full((2, 2), np.inf)}, marks=pytest.mark.slow),
        pytest.param({"directions": np.full((2, 2), np.nan)}, marks=pytest.mark.slow),
        pytest.param({"directions": np.zeros((2, 2))}, marks=pytest.mark.slow),
        pytest.param({"directions": np.ones((2, 2))}, marks=pytest.mark.slow),
        pytest.param({"directions": 1e90 * np.eye(2)}, marks=pytest.mark.slow),
        pytest.param({"directions": 1e-200 * np.eye(2)}, marks=pytest.mark.slow),
        pytest.param({"directions": np.zeros((2, 0)), "center": np.zeros(0)}, marks=pytest.mark.slow),
        pytest.param({"center": np.full(2, np.nan)}, marks=pytest.mark.slow),
        pytest.param({"loss": np.ones((11, 11))}, marks=pytest.mark.slow),
        {"loss": 1e99 * COARSE.loss + 1},
        pytest.param({"loss": 1e-310 * COARSE.loss + 5e-324}, marks=pytest.mark.slow),
        pytest.param({"loss": np.where(COARSE.loss < 0.1, 1.0, np.inf)}, marks=pytest.mark.slow),
        pytest.param({"loss": np.where(COARSE.loss == 0, 1.0, np.nan)}, marks=pytest.mark.slow),
        pytest.param({"x": COARSE.x + 5}, marks=pytest.mark.slow),
        {"label": "$\\frac$ <b>"},
    ],
)
def test_surfaces_with_strange_numbers_are_drawn(changes: dict[str, object], tmp_path: Path) -> None:
    strange = dataclasses.replace(COARSE, **changes)  # type: ignore[arg-type]
    for style, count in (("contour", 2), ("hillshade", 1), ("surface", 1)):
        plots.save_figure(plots.draw(count * [strange], style), tmp_path / "a.png", dpi=30)
