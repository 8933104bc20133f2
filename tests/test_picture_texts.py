"""The texts of pictures: their sizes, and that they lie on the canvas, on no panel and on no other text."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from landscape import plots
from landscape.paper import figure as figures
from landscape.paper import pages
from landscape.paper.context import Context
from landscape.plots import animation
from landscape.plots.picture import CAPTION_LENGTH
from landscape.plots.style import LABEL, TITLE, style
from landscape.plots.tables import draw_topologies
from landscape.training.topology import Mixing
from tests.harm import samples

ROOT = Path(__file__).parents[1]
RESULTS = samples.results()
LONG = "VGG-19 with weight decay and a very long name, DPSGD in ATC order, seed 0"
WIDTHS = (3.3, 7.0)  # of a column and of a page in inches
ALONE = ("comparison",)  # several cannot be drawn in one picture


def seen(text: str) -> str:
    """``text`` with a character for each command of a formula."""
    return re.sub(r"\\[A-Za-z]+", "x", text).translate(str.maketrans("", "", "${}_^"))


def boxes_of(picture: Any) -> list[tuple[str, Any]]:
    """The texts around the panels with their extents."""
    axes = [ax for ax in picture.axes if ax.get_visible() and ax.axison and ax.name != "3d"]
    texts = [picture._suptitle, picture._caption]
    texts += [text for ax in axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    named = [(text.get_text(), text) for text in texts if text and text.get_text() and text.get_visible()]
    named += [("a legend", legend) for legend in picture.legends]
    return [(name, artist.get_window_extent().padded(-0.5)) for name, artist in named]  # of a pixel


def lay_out(picture: Any) -> None:
    """Give the texts their places, without pixels: twice, as panels of a fixed aspect get room for labels late."""
    FigureCanvasAgg(picture)
    for _ in range(2):
        picture.draw_without_rendering()


def check(picture: Any) -> None:
    """Check the texts of a picture, in which no name of the user is so long that a label is cut."""
    lay_out(picture)
    title = picture._suptitle
    assert len(seen(title.get_text()).replace("\n", " ")) <= TITLE, title.get_text()
    assert (title.get_fontsize(), title.get_fontweight()) == (13, "normal")
    lines = picture._caption.get_text().count("\n") + 1 if picture._caption else 0
    assert lines <= max(5, round(CAPTION_LENGTH / picture.get_figwidth()))
    for axis in (axis for ax in picture.axes for axis in (ax.xaxis, ax.yaxis)):
        label = axis.label.get_text()
        assert max(map(len, seen(label).split("\n"))) <= LABEL, label
        assert not label.endswith("…"), label
    boxes = boxes_of(picture)
    for name, box in boxes:
        outside = (-box.x0, -box.y0, box.x1 - picture.bbox.width, box.y1 - picture.bbox.height)
        assert max(outside) <= 1, f"{name!r} leaves the canvas"
        for ax in picture.axes:
            on_panel = ax.get_visible() and ax.name != "3d" and box.overlaps(ax.bbox.padded(-0.5))
            assert not on_panel, f"{name!r} is on a panel"
    for (a, first), (b, second) in itertools.combinations(boxes, 2):
        assert not first.overlaps(second), f"{a!r} is on {b!r}"


def check_paper(picture: Any) -> None:
    """Check that all texts, also at ticks and in panels, have 7 to 9 points, are whole, and lie on no other."""
    lay_out(picture)
    texts = [t for t in (picture._suptitle, getattr(picture, "_caption", None)) if t]
    legends = [*picture.legends]
    for ax in (ax for ax in picture.axes if ax.get_visible()):
        legends += filter(None, [ax.get_legend()])
        texts += [ax.title, *ax.texts]
        for axis in (ax.xaxis, ax.yaxis) if ax.axison and ax.name != "3d" else ():
            texts += [axis.label, axis.get_offset_text(), *(tick.label1 for tick in axis._update_ticks())]
    texts = [text for text in texts if text.get_visible() and text.get_text()]
    sizes = {text.get_fontsize() for text in texts} | {
        t.get_fontsize() for g in legends for t in g.get_texts()
    }
    assert 7 <= min(sizes) <= max(sizes) <= 9
    boxes = [(text.get_text(), text.get_window_extent().padded(-0.5)) for text in texts]
    boxes += [("a legend", legend.get_window_extent().padded(-0.5)) for legend in legends]
    for name, box in boxes:
        outside = (-box.x0, -box.y0, box.x1 - picture.bbox.width, box.y1 - picture.bbox.height)
        assert max(outside) <= 1, f"{name!r} leaves the canvas"
        assert not name.endswith("…"), name
    for (a, first), (b, second) in itertools.combinations(boxes, 2):
        assert not first.overlaps(second), f"{a!r} is on {b!r}"


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_texts_of_every_kind_of_result(name: str) -> None:
    check(plots.draw([RESULTS[name]]))
    for width in WIDTHS:
        picture: Any = plots.draw([RESULTS[name]], width=width)
        assert (picture.get_figwidth(), picture.get_suptitle(), picture.get_caption()) == (width, "", "")
        check_paper(picture)


@pytest.mark.parametrize("name", sorted({*RESULTS} - {*ALONE, "checkpoint"}))
@pytest.mark.slow  # each kind alone is tried by the test above
def test_texts_of_several_results(name: str) -> None:
    labeled = "label" in {field.name for field in dataclasses.fields(RESULTS[name])}
    labels = ("ssgd, seed 0", "dpsgd, seed 0")
    results = [dataclasses.replace(RESULTS[name], label=label) for label in labels] if labeled else []
    check(plots.draw(results or [RESULTS[name]] * 2))
    for width in WIDTHS:
        check_paper(plots.draw(results or [RESULTS[name]] * 2, width=width))


def test_texts_of_one_row_end_above_those_of_the_next() -> None:
    grid = dataclasses.replace(RESULTS["hessian_grid"], label="ResNet-18, SSGD, epoch 9.01")
    check(plots.draw([grid] * 4))


@pytest.mark.parametrize("name", ["surface", "basins", "noise_scale", "disagreement", "batch_sharpness"])
def test_long_names_are_cut(name: str) -> None:
    picture = plots.draw([dataclasses.replace(RESULTS[name], label=LONG)])
    FigureCanvasAgg(picture).draw()
    assert len(picture.get_suptitle()) <= TITLE
    number = RESULTS[name].describe()[0].number
    assert name in ("surface", "basins") or number in picture.get_suptitle().replace("\n", " ")


@pytest.mark.parametrize("style_name", ["hillshade", "surface", "difference"])
def test_texts_of_other_styles(style_name: str) -> None:
    surface = dataclasses.replace(RESULTS["surface"], kind="random")
    check(plots.draw([surface] * (1 + (style_name == "difference")), style=style_name))
    pair = [dataclasses.replace(surface, label=name) for name in ("SGD", "SAM")]
    for width in WIDTHS:
        check_paper(plots.draw(pair, style=style_name, width=width))
        if style_name == "hillshade":  # into axes of one's own
            own = Figure(figsize=(width, 2.6), layout="constrained")
            axes = dict(zip(("surface 0", "surface 1"), own.subplots(1, 2), strict=True))
            plots.draw(pair, axes=axes, visuals={"legend": False})
            check_paper(own)
            assert [ax.get_title() for ax in own.axes] == ["SGD", "SAM", ""]
            assert own.axes[2].get_ylabel() == "loss (nat)"  # one bar for both


def test_texts_of_a_film_and_of_topologies() -> None:
    surface = dataclasses.replace(RESULTS["surface"], kind="learners")
    film, draw = animation.film([animation.Frame(surface, 1200, 0.4, 0.8, 0.1)], "dpsgd")
    draw(0)
    check(film)
    check(draw_topologies({name: [Mixing(name, 5, 0).matrix(1)] for name in ("full", "ring(1)")}))


def test_a_title_of_the_user_is_whole_and_a_caption_ends_with_a_sentence() -> None:
    title = "A title of the user's own words, which may have more characters than one of ours"
    picture: Any = plots.draw([RESULTS["noise"]], title=title)
    assert picture.get_suptitle().replace("\n", " ") == title
    FigureCanvasAgg(picture).draw()
    box = picture._suptitle.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= picture.bbox.width
    picture.set_caption("One sentence. " * 40)
    assert picture.get_caption().endswith("One sentence.")
    picture.set_caption("a " * 400)
    assert picture.get_caption().endswith(" …")


CHEAP = ("delay-boundary", "edge-lazy", "lamb", "local-sgd", "runtime", "saddles", "delay-minima")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in CHEAP)) for n in figures.names()]
)
def test_texts_of_the_papers_figures(name: str, tmp_path: Path) -> None:
    entry = figures.get(name)
    context = entry.of(Context(tmp_path, records=ROOT / "figures" / "records"))
    with style():
        drawing = entry.draw(context)
        pages.set_titles_and_captions(entry, context, drawing, {"": "Not tested here: " + entry.finding})
    for picture in drawing.pictures.values():
        check(picture)


def test_titles_of_figures_have_room() -> None:
    for entry in map(figures.get, figures.names()):
        assert len(entry.title) <= TITLE, entry.name
        assert len("Not tested here: " + entry.finding) <= TITLE, entry.name


def test_colors_of_pictures_are_those_of_the_palette() -> None:
    sources = [*(ROOT / "landscape" / "plots").glob("*.py"), *(ROOT / "landscape" / "paper").rglob("*.py")]
    for path in sources:
        text = "" if path.name == "style.py" else path.read_text(encoding="utf-8")
        assert not re.findall(r'"#[0-9A-Fa-f]{6}"|color_palette\("|cmap="', text), path.name
