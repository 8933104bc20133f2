"""Figures: what is drawn is what the results hold; ``python -m tests.test_plots`` draws the baseline anew."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.testing.compare import compare_images
from PIL import Image

import landscape
from landscape import InputError, OperationError, Surface, plots
from landscape.core import registry
from landscape.plots import draw
from landscape.plots.picture import formulas, panels
from landscape.plots.style import OTHER, color_of, decimal_labels, paper_name
from landscape.plots.surface import LOG_LEVELS, MAX_LEVELS, caption_of, scale
from landscape.results import geometry
from landscape.results.shown import running_quartiles
from landscape.results.spectrum import Spectrum
from landscape.training.recipes import recipe
from landscape.training.run.loop import Trainer
from tests import problems
from tests.conftest import slow_but
from tests.examples import parabola
from tests.harm import samples

BASELINE = Path(__file__).with_name("baseline")
CONSTRAINTS = BASELINE.parents[1] / "constraints.txt"
PINNED = re.findall(r"^matplotlib==(.+)$", CONSTRAINTS.read_text(), re.MULTILINE)[0]
TOLERANCE = 4.0  # root mean square over pixels of 256 levels: less than a line of text, more than rounding


@functools.cache
def pictured() -> dict[str, tuple[Any, str]]:
    """A result of every schema with the style that it is drawn in."""
    made = {name: (result, "contour") for name, result in samples.results().items()}
    surface, _ = made["surface"]
    return made | {style: (surface, style) for style in ("hillshade", "surface-3d")}


def picture(name: str, path: Path) -> None:
    result, style = pictured()[name]
    plots.save_figure(plots.draw([result], style=style.removesuffix("-3d")), path, dpi=30)


@pytest.mark.skipif(matplotlib.__version__ != PINNED, reason=f"the baseline is of matplotlib {PINNED}")
@pytest.mark.parametrize("name", sorted(path.stem for path in BASELINE.glob("*.png")))
def test_drawings_look_as_they_did(name: str, tmp_path: Path) -> None:
    picture(name, tmp_path / f"{name}.png")
    expected = tmp_path / "expected.png"
    expected.write_bytes((BASELINE / f"{name}.png").read_bytes())
    difference = compare_images(str(expected), str(tmp_path / f"{name}.png"), TOLERANCE)
    assert difference is None, f"{difference}; if it is meant: python -m tests.test_plots"


def test_every_drawing_has_a_baseline() -> None:
    assert {path.stem for path in BASELINE.glob("*.png")} == {*pictured()}


@pytest.fixture(scope="module")
def surface() -> Surface:
    problem = problems.mlp()
    return landscape.contour(problem, landscape.random_plane(problem), grid=(6, 4), span=1.0, split="test")


def changed(surface: Surface, **changes: Any) -> Surface:
    """The surface with other fields; a loss of another shape brings axes of its own."""
    if (loss := changes.get("loss", surface.loss)).shape != surface.loss.shape:
        y, x = (np.linspace(-1, 1, n) for n in loss.shape)
        changes = {"x": x, "y": y, "accuracy": loss, "done": loss > 0} | changes
    return dataclasses.replace(surface, **changes)


def marked(surface: Surface, kind: str, count: int) -> Surface:
    """The surface as one of a plane of ``kind`` with ``count`` markers."""
    places = np.linspace(-0.8, 0.7, 2 * count).reshape(count, 2)
    labels = tuple(f"m{k}" for k in range(count))
    return changed(surface, kind=kind, markers=places, labels=labels, marker_loss=np.zeros(count))


def with_hole(surface: Surface, *places: tuple[int, int]) -> Surface:
    loss = surface.loss.copy()
    for place in places:
        loss[place] = np.nan
    return changed(surface, loss=loss)


def drawn(figure: Any, panel: int = 0) -> dict[str, np.ndarray]:
    """Legend name -> coordinates (n, 2) of what is drawn on a panel."""
    return {str(h.get_label()): h.get_xydata() for h in figure.axes[panel].lines}


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_surfaces_share_levels_and_mark_what_is_not_finite(surface: Surface) -> None:
    other = changed(with_hole(surface, (0, 0)), label="other")
    other = changed(other, loss=other.loss + 3.0)
    first, second, under, beside, bar = draw([surface, other]).axes
    assert under.get_ylim() == beside.get_ylim()
    assert [ax.get_title().split("\n")[0] for ax in (first, second)] == ["surface 0", "other"]
    assert first.collections[0].get_clim() == second.collections[0].get_clim()
    low, high = bar.get_ylim()
    assert low <= surface.loss.min() <= np.nanmax(other.loss) <= high
    below, above = scale([surface.loss, other.loss]).levels[1:3]
    assert bar.get_ylabel() == f"loss (nat), lines {above - below:.3g} apart"


def test_one_ratio_without_bound_leaves_the_colors_of_the_others_apart() -> None:
    grid = samples.results()["hessian_grid"]
    ratio = np.full_like(grid.ratio, 0.5)
    assert plots.draw([dataclasses.replace(grid, ratio=ratio)]).axes[-1].get_ylim() == (0.0, 0.5)
    ratio[0, 0] = 1e4
    assert plots.draw([dataclasses.replace(grid, ratio=ratio)]).axes[-1].get_ylim() == (0.0, 1.0)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_levels_cover_the_losses_and_are_few(low: float, width: float) -> None:
    chosen = scale([np.array([low, low + width, np.nan])]).levels
    assert chosen[0] <= low
    assert chosen[-1] >= low + width
    assert 2 <= len(chosen) <= MAX_LEVELS + 3
    assert np.all(np.diff(chosen) > 0)


def test_levels_are_the_papers_or_at_equal_ratios_or_end_below_what_few_points_reach() -> None:
    np.testing.assert_allclose(np.diff(scale([np.array([0.051, 0.149])]).levels), 0.005)
    wide = scale([np.array([0.1, 200.0])]).levels
    np.testing.assert_allclose(wide[1:] / wide[:-1], 2000 ** (1 / (LOG_LEVELS - 1)))
    assert (wide[0], wide[-1]) == (pytest.approx(0.1), pytest.approx(200))
    spike = np.linspace(1.0, 2.0, 400)
    assert scale([spike]).levels[-1] >= 2.0
    spike[0] = 40.0
    assert scale([spike]).levels[-1] < 2.2


@pytest.mark.parametrize(
    ("low", "high", "height"), [(0.03, 0.6, 3.0), (0.0011, 0.62, 1.4), (0.002, 400.0, 1.4), (42, 92, 1.0)]
)
def test_labels_of_log_axes_are_decimals_that_do_not_touch(low: float, high: float, height: float) -> None:
    figure, (ax,) = panels(1, 1, 4.0, height)
    ax.set(yscale="log", ylim=(low, high))
    decimal_labels(ax.yaxis)
    ends = ends_of_labels(figure, ax.yaxis)
    assert len(ends) > 1 + (height > 2)
    assert all(below[1] < above[0] for below, above in itertools.pairwise(ends))


@pytest.mark.parametrize(("low", "high"), [(2.6, 370.0), (13.0, 450.0), (0.03, 0.6), (42, 92)])
def test_labels_beside_one_another_do_not_touch(low: float, high: float) -> None:
    figure, (ax,) = panels(1, 1, 2.25, 3.0)
    ax.set(xscale="log", xlim=(low, high))
    decimal_labels(ax.xaxis)
    ends = ends_of_labels(figure, ax.xaxis)
    assert len(ends) > 1
    assert all(left[1] < right[0] for left, right in itertools.pairwise(ends))


def test_labels_of_two_decades_are_1_2_3_and_5_of_each() -> None:
    figure, (ax,) = panels(1, 1, 4.0, 3.3)
    ax.set(yscale="log", ylim=(2.2, 110))
    decimal_labels(ax.yaxis)
    FigureCanvasAgg(figure).draw()
    ticks = [*ax.get_yticklabels(), *ax.get_yticklabels(minor=True)]
    shown = {float(t.get_text()) for t in ticks if t.get_text()}
    assert {x for x in shown if 2.2 <= x <= 110} == {3, 5, 10, 20, 30, 50, 100}


def test_names_with_an_index_are_formulas_unless_a_text_has_its_own() -> None:
    assert formulas("α_e of w_a, ηλ_max, raw_a") == "$α_{e}$ of $w_{a}$, η$λ_{max}$, raw_a"
    assert formulas("w_a of $x$") == "w_a of $x$"


def ends_of_labels(figure: Any, axis: Any) -> list[tuple[float, float]]:
    """Where the labels of an axis, which are decimals, begin and end."""
    FigureCanvasAgg(figure).draw()
    low, high = axis.get_view_interval()
    ticks = [t for t in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)) if t.get_text()]
    assert all(tick.get_text() == f"{float(tick.get_text()):g}" for tick in ticks)
    boxes = [t.get_window_extent() for t in ticks if low <= float(t.get_text()) <= high]
    return sorted(tuple(getattr(box, f"interval{axis.axis_name}")) for box in boxes)


def trained_run(*settings: str, name: str = "digits-ssgd") -> Any:
    return Trainer(recipe.read(name, [*settings])).run()


def test_training_curves_of_several_settings_and_seeds() -> None:
    settings = ["lr=0.5"], ["lr=0.5", "seed=1"], ["lr=1.0", "schedule.cosine=12"], ["optimizer={name='lamb'}", "lr=0.01"]  # fmt: skip
    runs = [trained_run("steps=12", "decompose.every=1", *each) for each in settings]
    figure = draw(runs)
    assert legend(figure) == [
        "SSGD, lr 0.5, optimizer sgd, cosine 0.0 (median of 2)",
        "SSGD, lr 1.0, optimizer sgd, cosine 12.0",
        "SSGD, lr 0.01, optimizer lamb, cosine 0.0",
    ]
    assert len({line.get_color() for line in figure.legends[0].get_lines()}) == 3
    rates = [line.get_ydata() for line in figure.axes[3].lines if line.get_linestyle() == ":"]
    np.testing.assert_array_equal(rates, [run.history["lr"] for run in runs])
    consensus = figure.axes[2].lines[0]
    np.testing.assert_array_equal(consensus.get_ydata(), runs[0].history["consensus"])
    plain = draw(runs[:2])
    assert legend(plain) == ["SSGD (median of 2)"]
    np.testing.assert_allclose(plain.axes[3].get_ylim(), (-0.18, 0.9))  # near α, where plain steps have α_e


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_single_value_is_drawn_as_a_mark(seeds: int) -> None:
    runs = [trained_run("steps=10", f"seed={k}", name="digits-dpsgd") for k in range(seeds)]
    for name, ax in draw(runs).axes_by_name.items():  # type: ignore[attr-defined]
        alone = [len(line.get_xdata()) == 1 for line in ax.lines]
        assert [line.get_marker() == "o" for line in ax.lines] == alone
        assert any(alone) == (name != "consensus"), name


def test_noisy_columns_are_drawn_as_quartiles() -> None:
    run = trained_run("steps=120", "decompose.every=1", "model.widths=[64, 8, 10]", name="digits-dpsgd")
    rate = draw([run]).axes[3]
    (line,) = [line for line in rate.lines if line.get_linestyle() == "-"]
    at, (low, median, high) = running_quartiles(run.history["step"], run.history["alpha_e"])
    np.testing.assert_array_equal(line.get_xydata(), np.stack([at, median], 1))
    assert len(rate.collections) == 1
    assert np.all(low <= high)


def test_markers_are_where_the_results_say(surface: Surface) -> None:
    path, learners, anchors = (
        marked(surface, k, n) for k, n in (("pca", 5), ("learners", 4), ("between", 3))
    )
    holed = with_hole(surface, np.unravel_index(surface.loss.argmin(), surface.loss.shape))
    i, j = np.unravel_index(np.nanargmin(holed.loss), holed.loss.shape)
    m, n = np.unravel_index(surface.loss.argmin(), surface.loss.shape)
    for shown, names in (
        (path, {"trajectory": path.markers, "last checkpoint": path.markers[-1:]}),
        (learners, {"learners": learners.markers[:-1], "their mean $w_a$": learners.markers[-1:]}),
        (anchors, {f"m{k}": anchors.markers[k : k + 1] for k in range(3)}),
        (surface, {"center": [[0, 0]], "lowest grid point": [[surface.x[n], surface.y[m]]]}),
        (holed, {"lowest grid point": [[surface.x[j], surface.y[i]]]}),
    ):
        seen = drawn(plots.draw([shown]))
        for name, places in names.items():
            np.testing.assert_array_equal(seen[name], places)
        assert ("center" in seen) == (shown.kind == "random")
    first, *marks = legend(plots.draw([surface, surface]))  # one for both panels
    assert first.split()[1:] == ["nat", "above", "the", "center"]
    assert marks == ["lowest grid point", "center", "medians of other panels"]


def test_markers_in_three_dimensions_lie_on_the_surface(surface: Surface) -> None:
    shown = marked(surface, "learners", 4)
    ax: Any = plots.draw([shown], style="surface").axes[0]
    lines = {str(h.get_label()): np.array(h.get_data_3d()) for h in ax.lines}
    places = shown.markers[:-1]
    np.testing.assert_allclose(lines["learners"][:2].T, places)
    np.testing.assert_allclose(lines["learners"][2], geometry.loss_at(surface, *places.T))
    assert "their mean $w_a$" in lines


def test_batchnorm_statistics_are_named_where_there_are_any(surface: Surface) -> None:
    def text(**changes: Any) -> str:
        return caption_of([changed(surface, **changes)])

    assert "BatchNorm" not in text()
    own, fresh = (changed(surface, batchnorm=True, bn=bn, bn_samples=9) for bn in ("center", "recalibrate"))
    assert "BatchNorm: from 9 samples per point" in caption_of([fresh])
    assert "batches of 64" in text(batchnorm=True, bn="train", bn_samples=64)
    assert "statistics of each batch" in text(batchnorm=True, bn="train")
    for style in ("contour", "surface", "difference"):
        picture: Any = plots.draw([own, fresh], style=style)
        assert "the center's statistics / BatchNorm: from 9 samples" in picture.get_caption()


def test_three_dimensions_and_a_relief_with_holes(surface: Surface) -> None:
    holes = with_hole(surface, (1, 2), (0, 0))
    first, second = plots.draw([surface, holes], style="surface").axes[:2]
    low, high = first.get_zlim()
    assert (low, high) == second.get_zlim()
    assert low <= surface.loss.min() <= surface.loss.max() <= high
    assert len(first.collections[0].get_array()) == 5 * 3
    image = plots.draw([holes], style="hillshade").axes[0].images[0].get_array()
    assert (image[0, 0, 3], image[-1, -1, 3]) == (0, 1)


def test_a_difference_is_the_first_less_the_second_on_a_scale_around_zero(surface: Surface) -> None:
    more = np.linspace(-1, 3, surface.loss.size).reshape(surface.loss.shape)
    other = changed(surface, loss=surface.loss - more)
    figure = plots.draw([changed(surface, label="surface A"), other], style="difference")
    filled = figure.axes[0].collections[0]
    assert filled.get_clim() == pytest.approx((-3, 3))
    np.testing.assert_allclose(filled.get_array(), np.linspace(-2.875, 2.875, 24))
    assert "surface A" in figure.get_suptitle()
    higher = changed(surface, loss=surface.loss + 1 + more**2)
    filled = plots.draw([higher, surface], style="difference").axes[0].collections[0]
    # The first is higher everywhere: only the upper half of the scale is used.
    used = [at for at, path in zip(filled.get_array(), filled.get_paths(), strict=True) if len(path)]
    assert min(used) > 0
    plots.draw([surface, surface], style="difference")  # no difference at all is a picture, too


def axes_of_ones_own() -> Any:
    return Figure().add_subplot()


def test_parts_of_a_picture_are_changed(surface: Surface) -> None:
    look = {"title": {"color": "red"}, "caption": {"fontsize": 5}, "legend": {"alpha": 0.5}, "colorbar": True}
    changed: Any = plots.draw(surface, visuals=look)
    assert changed._suptitle.get_color() == "red"
    assert changed._caption.get_fontsize() == 5
    assert changed.legends[0].get_alpha() == 0.5
    assert changed.get_caption() == plots.draw(surface).get_caption()  # type: ignore[attr-defined]
    assert changed.get_size_inches()[1] > plots.draw(surface, visuals={"caption": False}).get_size_inches()[1]


def test_panels_go_to_axes_of_ones_own_by_name(surface: Surface) -> None:
    own = Figure()
    left, middle, right = own.subplots(1, 3)
    places = {"surface": left, "profile": right}
    assert plots.draw(surface, axes=places, title="here", visuals={"legend": False}) is own
    assert left.get_title() == "here"
    assert (left.get_legend(), middle.has_data(), right.has_data()) == (None, False, True)
    assert len(own.axes) == 4  # with the color bar
    assert right.get_ylabel() == "loss (nat)"
    plots.draw(surface, ax=middle, title="here", visuals={"title": False, "colorbar": False})
    assert (middle.get_title(), len(own.axes)) == ("", 4)
    assert middle.get_legend()
    run = trained_run("steps=2", "decompose.every=1")
    picture: Any = plots.draw(run)
    assert {"train_loss", "consensus", "delta_2_full"} <= {*picture.axes_by_name}
    rate = axes_of_ones_own()
    plots.draw([run], axes={"alpha_e": rate})
    assert "$α_e$" in rate.get_ylabel()
    assert 8 <= rate.yaxis.label.get_fontsize() <= 9
    with matplotlib.rc_context({"font.size": 14}):
        large = axes_of_ones_own()
    plots.draw(surface, ax=large)
    assert large.xaxis.label.get_fontsize() == 14  # which the user chose


def test_files_have_vectors_and_the_title_and_caption_that_are_left_out(
    surface: Surface, tmp_path: Path
) -> None:
    usual: Any = plots.draw(surface)
    with matplotlib.rc_context({"pdf.compression": 0}):
        written: Any = plots.draw(surface, tmp_path / "b.pdf", width=3.3, title=None)
    text = (tmp_path / "b.pdf").read_bytes()
    assert usual.get_suptitle().split(" (")[0].encode() in text
    assert "samples".encode("utf-16-be") in text
    assert b"/Subtype /Image" not in text
    written.savefig(tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as image:
        assert image.info["Description"].startswith("Test loss over")
    assert plots.draw(surface, title=None).get_suptitle() == ""
    assert plots.draw(surface, width=3.3, title="mine").get_suptitle() == "mine"


def test_names_are_those_of_a_dict_a_problem_or_a_run(surface: Surface) -> None:
    assert [ax.get_title().split("\n")[0] for ax in draw({"SGD": surface, "SAM": surface}).axes[:2]] == [
        "SGD",
        "SAM",
    ]
    short = ("steps=2", "decompose.every=1")
    runs = {0.5: [trained_run(*short), trained_run(*short, "seed=1")], "other": trained_run(*short)}
    assert legend(draw(runs)) == ["0.5 (median of 2)", "other"]
    assert legend(draw({"SGD to SAM": LINE})) == [f"SGD to SAM (barrier {LINE.barrier:.3g})"]
    x, y = torch.eye(2), torch.tensor([0, 1])
    first, second = (
        landscape.Problem(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), (x, y), name=name)
        for name in ("SGD", "SAM")
    )
    assert repr(first).startswith("Problem(SGD: Linear, ")
    assert landscape.trace(first).label == "SGD"
    assert landscape.trace(first, label="mine").label == "mine"
    assert landscape.compare([first, second], quantities=["loss"]).sides == ("SGD", "SAM")
    assert landscape.between(first, [first, second, torch.zeros(6)]).labels == ("SGD", "SAM", "w2")
    run = trained_run("steps=2").using(name="A")
    assert (run.label, run.problem().name, landscape.trace(run).label) == ("A", "A", "A")


def test_levels_follow_a_trajectory(surface: Surface) -> None:
    loss = np.geomspace(1.0, 90.0, 24).reshape(4, 6)
    path = marked(changed(surface, loss=loss), "pca", 3)
    path = changed(path, marker_loss=np.array([2.4, np.nan, 1.4]))
    levels = scale([loss], trajectory_losses=[path.marker_loss]).levels
    assert ((levels > 1.4) & (levels < 2.4)).sum() >= 6
    assert levels[-1] < 5
    assert not np.array_equal(levels, scale([loss]).levels)
    bar = plots.draw([path]).axes[-1]
    assert bar.get_ylim()[1] < 5
    far = changed(surface, loss=loss**3)  # logarithmic
    bar = plots.draw([marked(far, "pca", 3), changed(far, kind="pca")]).axes[-1]
    assert bar.get_ylim()[1] == pytest.approx(90.0**3)  # no path, no limit
    wide = scale([loss**3], trajectory_losses=[np.array([1e3, 1e4])]).levels
    assert np.ptp(np.log(wide)) == pytest.approx(3 * np.log(10))
    assert scale([loss], trajectory_losses=[np.array([2.0])]).levels[-1] >= 90
    assert scale([loss], vmax=50, trajectory_losses=[path.marker_loss]).levels[-1] >= 50
    off = [np.array([200.0, 300.0])]  # of a path above the plane, or above the user's highest level
    assert scale([loss], trajectory_losses=off).levels[-1] >= 90
    assert scale([loss], vmax=5, trajectory_losses=[np.array([20.0, 30.0])]).levels[[0, -1]] == pytest.approx(
        [1, 5]
    )


@pytest.mark.parametrize("style", ["contour", "surface", "difference"])
def test_labels_have_the_units_of_the_fields(surface: Surface, style: str) -> None:
    with mock.patch.object(Surface, "units", {**Surface.units, "loss": "bit"}):
        figure = plots.draw([surface] * 2, style=style)
    labels = {ax.get_ylabel() for ax in figure.axes}
    assert any("loss (bit)" in label.replace("\n", " ") for label in labels)
    assert not any("nat" in label for label in labels)


def test_a_drawing_with_a_figure_of_its_own_takes_no_axes() -> None:
    class Lone(float):
        pass

    plots.draws(Lone)(lambda results, title="": Figure())
    assert plots.draw(Lone(1.0))
    with pytest.raises(InputError, match="ax: not allowed, the drawing of a Lone makes a figure of its own"):
        plots.draw(Lone(1.0), ax=axes_of_ones_own())


LINE: Any = samples.results()["line"]
ALONG = dataclasses.replace(LINE, kind="direction", accuracy=np.full(5, np.nan))


def test_lines_show_loss_accuracy_and_barrier() -> None:
    figure = plots.draw([LINE])
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), LINE.loss)
    np.testing.assert_array_equal(figure.axes[1].lines[0].get_ydata(), 100 * LINE.accuracy)
    assert legend(figure) == [f"a to b (barrier {LINE.barrier:.3g})"]
    assert len(plots.draw([ALONG]).axes) == 1  # no accuracy, no panel for it


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: plots.draw([s, ALONG]), "all must be of one kind"),
        (lambda s: plots.draw([LINE, ALONG]), "different axes"),
        (lambda s: plots.draw([ALONG], style="surface"), r"style: 'surface'.*Line.*contour"),
        (lambda s: plots.draw([ALONG], labels=True), "labels: not allowed for a Line"),
        (lambda s: plots.draw([s], style="differenc"), r"style: 'differenc'.*'difference'"),
        (lambda s: plots.draw([changed(s, loss=s.loss[:1])]), "2 × 2 can"),
        (lambda s: plots.draw([changed(s, loss=s.loss * np.nan)]), "no value is finite"),
        (lambda s: plots.draw([changed(s, loss=s.loss - s.loss.min())], log=True), "log: .* lowest loss is 0"),
        (lambda s: plots.draw([s], vmax=0.0), "vmax: .* must be above the lowest loss"),
        (lambda s: plots.draw([s], levels=1), "levels"),
        (lambda s: plots.draw([s], cmap="viridi"), "cmap: 'viridi'.*'viridis'"),
        (lambda s: plots.draw([s], style="difference"), "1 surfaces are not allowed, it takes two"),
        (lambda s: plots.draw([s, s], style="difference", vmax=2.0), "vmax: not allowed with style difference"),
        (lambda s: plots.draw([s, changed(s, seed=5)], style="difference"), "must have the same grid"),
        (lambda s: plots.draw([s, changed(s, x=2 * s.x)], style="difference"), "must have the same grid"),
        (lambda s: plots.draw([s, changed(s, kind="eigen")], style="difference"), "must have the same grid"),
        (lambda s: plots.draw([s, changed(s, loss=s.loss * np.nan)], style="difference"), "nothing to draw"),
        (lambda s: plots.save_figure(panels(1, 1, 1, 1)[0], "b.png", dpi=5), "dpi: 5 is not allowed"),
        (lambda s: plots.draw([s], "c.png", dpi=5), "dpi: 5 is not allowed"),
        (lambda s: plots.draw([s], "c.jpeg"), "must end in .png"),
        (lambda s: plots.draw([s], width=1), "width: 1 is not allowed"),
        (lambda s: plots.draw([s], width=3.3, ax=axes_of_ones_own()), "width: not allowed with axes of your own"),
        (lambda s: plots.draw({"A": samples.results()["sweep"]}), "results: 'A': a Sweep takes no name"),
        (lambda s: plots.draw([s, s], ax=axes_of_ones_own()), r"ax: .* give axes=.* of surface 0, surface 1"),
        (lambda s: plots.draw(s, axes={"profil": axes_of_ones_own()}), "axes: 'profil'.*'profile'"),
        (lambda s: plots.draw(s, axes={"surface": 3}), "axes: 3 is not allowed, it must be axes"),
        (lambda s: plots.draw([s], style="surface", ax=axes_of_ones_own()), "ax: its projection is 'rectilinear'"),
        (lambda s: plots.draw(s, ax=axes_of_ones_own(), axes={"surface": axes_of_ones_own()}), "only one"),
        (lambda s: plots.draw(s, visuals={"capt": False}), "visuals: 'capt'.*'caption'"),
        (lambda s: plots.draw(s, visuals={"title": None}), "visuals: 'title': None is not allowed"),
        (lambda s: plots.draw(s, visuals={"caption": {"tint": "r"}, "legend": False}), "'caption'.*tint"),
        (lambda s: landscape.save_vts(s, "s.vtk"), "must end in .vts"),
        (lambda s: landscape.save_vts(changed(s, loss=s.loss * np.nan), "t.vts"), "no value is finite"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_fails(surface: Surface, make: Callable[[Surface], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(surface)


def test_vts_has_every_point_in_vtks_order(surface: Surface, tmp_path: Path) -> None:
    holes = with_hole(surface, (2, 3))
    landscape.save_vts(holes, tmp_path / "s.vts")
    root = ET.parse(tmp_path / "s.vts").getroot()
    (grid,), (piece,) = root.iter("StructuredGrid"), root.iter("Piece")
    assert grid.attrib["WholeExtent"] == piece.attrib["Extent"] == "0 5 0 3 0 0"  # 6 × 4 points
    arrays = {a.attrib["Name"]: np.array((a.text or "").split(), float) for a in piece.iter("DataArray")}
    np.testing.assert_array_equal(arrays["loss"], holes.loss.ravel())
    np.testing.assert_array_equal(arrays["accuracy"], surface.accuracy.ravel())
    np.testing.assert_array_equal(arrays["vtkGhostType"], 2 * np.isnan(holes.loss.ravel()))
    y, x = np.meshgrid(surface.y, surface.x, indexing="ij")  # x runs fastest
    z = np.where(np.isnan(holes.loss), np.nanmin(holes.loss), holes.loss)
    np.testing.assert_array_equal(arrays["points"].reshape(-1, 3), np.stack([x, y, z], -1).reshape(-1, 3))
    with pytest.raises(OperationError, match="cannot be written"):
        landscape.save_vts(surface, tmp_path / "none" / "t.vts")
    assert [p.name for p in tmp_path.iterdir()] == ["s.vts"]


def test_the_same_rise_is_drawn_on_all_panels(surface: Surface) -> None:
    steep = changed(surface, loss=3 * surface.loss, label="other")
    figure: Any = plots.draw([surface, steep])
    rise = geometry.shared_rise([surface, steep])
    for ax, r in zip(figure.axes, (surface, steep), strict=False):
        thick = [c for c in ax.collections if np.allclose(c.get_linewidth(), 1.8)]
        assert [c.levels.tolist() for c in thick] == [[pytest.approx(geometry.center_loss(r) + rise)]]
    np.testing.assert_allclose(figure.axes[2].lines[1].get_ydata(), geometry.profile(surface).median)
    assert legend(figure)[0] == f"{rise:.2g} nat above the center"
    far = plots.draw([surface, changed(surface, loss=100 * rise + surface.loss)])
    valleys = [[c for c in ax.collections if c.get_linestyle()[0][1]] for ax in far.axes[:2]]
    (lines,), low = valleys[1], surface.loss.min() + 100 * rise
    high = geometry.center_loss(surface) + 101 * rise
    np.testing.assert_allclose(lines.levels, low + (high - low) * np.arange(1, 5) / 5)
    assert "each fifth of the rise to the orange line" in legend(far)


def test_axes_are_distances_and_coordinates_those_of_the_plane(surface: Surface) -> None:
    figure = plots.draw([surface])
    FigureCanvasAgg(figure).draw()
    ax, length = figure.axes[0], geometry.lengths(surface)[0]
    assert ax.get_xlim() == (surface.x[0], surface.x[-1])
    ticks = [tick for tick in ax.get_xticks() if abs(tick) <= 1]
    labels = [ax.xaxis.get_major_formatter()(tick) for tick in ticks]
    values = [float(label.replace("\N{MINUS SIGN}", "-")) for label in labels]
    np.testing.assert_allclose(values, np.array(ticks) * length, rtol=1e-2, atol=1e-9)
    assert ax.get_xlabel() == "distance along u"


def test_the_look_of_surfaces(surface: Surface) -> None:
    wide = changed(surface, loss=surface.loss * np.geomspace(1, 1e4, surface.loss.size).reshape(4, 6))
    for result, options, words in (
        (wide, {}, "logarithmic, since losses differ by a factor of"),
        (wide, {"log": False}, " linear"),
        (surface, {"log": True}, " logarithmic"),
        (surface, {}, " linear"),
    ):
        assert words in plots.draw([result], **options).get_caption()  # type: ignore[attr-defined]
    top = float(surface.loss.max()) / 2
    labeled = plots.draw([surface], labels=True, levels=6, cmap="viridis", vmax=top).axes[0]
    assert labeled.texts
    assert labeled.collections[0].get_clim()[1] == pytest.approx(top, rel=0.5)


def test_each_algorithm_has_one_color() -> None:
    rules = [registry.algorithms[name] for name in registry.algorithms]
    ours = [rule for rule in rules if rule.__module__.startswith("landscape.")]
    assert all(rule.label for rule in ours)
    assert len({*(rule.color for rule in ours), OTHER}) == len(ours) + 1 == len({r.label for r in ours}) + 1
    assert color_of("SSGD*") == color_of("ssgd*, seed 0") != color_of("ssgd")
    assert paper_name("ad-psgd, seed 1") == "AD-PSGD, seed 1"


def test_limits_at_delay_0_are_joined_to_nothing() -> None:
    result = samples.results()["stability"]
    result = dataclasses.replace(result, delay=np.array([0, 1, 2]), limit=np.ones((3, 3)))
    for limit in plots.draw([result]).axes[0].lines[:3]:
        x, y = limit.get_xydata().T
        assert np.isnan(y[1])
        np.testing.assert_array_equal(x[[0, 2, 3]], [0, 1, 2])


def test_a_trace_alone_and_a_density_alone_are_drawn() -> None:
    spectrum: Spectrum = samples.results()["spectrum"]
    none = {"values": np.zeros(0), "residuals": np.zeros(0), "lowest": 0, "trace": 3.0, "trace_error": 0.1}
    dense = dataclasses.replace(spectrum, **none)
    trace = dataclasses.replace(dense, nodes=np.zeros((0, 0)), masses=np.zeros((0, 0)), label="dpsgd, seed 0")
    ax = plots.draw([trace, dataclasses.replace(trace, label="ssgd")]).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["DPSGD, seed 0", "SSGD"]
    assert "3 ± 0.1" in [text.get_text() for text in ax.texts]
    assert plots.draw([dense]).axes[0].get_ylabel() == "spectral density (log)"
    with pytest.raises(InputError, match="no eigenvalue, no density and no trace"):
        plots.draw([dataclasses.replace(trace, trace=np.nan)])


# L = x² + y² on 11 × 11 points, which draw faster.
COARSE = changed(parabola(), loss=parabola().loss[::4, ::4])
STRANGE = {
    "infinite directions": {"directions": np.full((2, 2), np.inf)},
    "unknown directions": {"directions": np.full((2, 2), np.nan)},
    "no directions": {"directions": np.zeros((2, 2))},
    "parallel directions": {"directions": np.ones((2, 2))},
    "long directions": {"directions": 1e90 * np.eye(2)},
    "short directions": {"directions": 1e-200 * np.eye(2)},
    "no weights": {"directions": np.zeros((2, 0)), "center": np.zeros(0)},
    "unknown weights": {"center": np.full(2, np.nan)},
    "flat": {"loss": np.ones((11, 11))},
    "high": {"loss": 1e99 * COARSE.loss + 1},
    "tiny": {"loss": 1e-310 * COARSE.loss + 5e-324},
    "infinite": {"loss": np.where(COARSE.loss < 0.1, 1.0, np.inf)},
    "unknown": {"loss": np.where(COARSE.loss == COARSE.loss[0, 0], 1.0, np.nan)},
    "off the center": {"x": COARSE.x + 5},
    "no formula": {"label": "$\\frac$ <b>"},
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(("high",), STRANGE))
def test_surfaces_with_strange_numbers_are_drawn(name: str, tmp_path: Path) -> None:
    strange = changed(COARSE, **STRANGE[name])
    for style, count in (("contour", 2), ("hillshade", 1), ("surface", 1)):
        plots.save_figure(plots.draw(count * [strange], style=style), tmp_path / "a.png", dpi=30)


def test_the_caption_of_several_runs_has_the_sizes_of_all() -> None:
    sizes = (1, 40), (4, 40), (4, 80)
    runs = [trained_run(f"learners={n}", f"batch={b}", "steps=2", "evaluate.every=1") for n, b in sizes]
    for chosen, said in (
        (runs, "n = 1, nB = 40 / n = 4, nB = 40 / n = 4, nB = 80"),
        (runs[:2], "n = 1, nB = 40 / n = 4, nB = 40,"),
        (runs[2:], "n = 4, nB = 80,"),
    ):
        assert said in " ".join(t.get_text() for t in draw(chosen).texts).replace("\n", " ")


if __name__ == "__main__":
    BASELINE.mkdir(exist_ok=True)
    for old in BASELINE.glob("*.png"):
        old.unlink()
    for name in pictured():
        picture(name, BASELINE / f"{name}.png")
