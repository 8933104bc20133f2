"""The page of landscape report: what is on it, that it is right, shows texts as texts, and sends no request."""

from __future__ import annotations

import base64
import csv
import dataclasses
import functools
import hashlib
import html.parser
import json
import re
import shutil
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly import graph_objects

import landscape
from landscape import reports as page
from landscape.analysis.noise import noise as compute_noise
from landscape.analysis.planes import learners_plane
from landscape.checkpoint.checkpoint import RECORDED, Checkpoint
from landscape.cli import begin as demo_command
from landscape.cli import common
from landscape.core.errors import DataWarning, InputError, OperationError
from landscape.core.files import printable
from landscape.plots.surface import scale
from landscape.reports import Contents, Picture, Section, Table, script_json
from landscape.results.base import save
from landscape.results.shown import Row
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests.conftest import Command
from tests.examples import comparison
from tests.harm import samples
from tests.test_cli import one_line

pytestmark = pytest.mark.xdist_group("report")  # the runs and pages are made once
MOST_BYTES = 8_000_000
HOSTILE = "<script>alert('1')</script>\"&amp;é漢$x$%{y}"


class Reader(html.parser.HTMLParser):
    """Texts, tags and attributes of a page; what is inside scripts and styles apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.words: list[str] = []
        self.feed(text)
        self.scripts, self.styles = self.inside["script"], self.inside["style"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.inside.get(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.inside:
            self.inside[self.cdata_elem][-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    @property
    def scenes(self) -> Any:
        """The surfaces that turn."""
        return json.loads(self.scripts[0])

    def files(self, kind: str) -> list[str]:
        """The files of a kind inside the page, such as "text/csv"."""
        start = f"data:{kind};base64,"
        inside = [value for _, value in self.attributes if value.startswith(start)]
        return [base64.b64decode(value.removeprefix(start)).decode() for value in inside]


def read(path: Path) -> Reader:
    return Reader(path.read_text())


def reported(folder: Path, *paths: Path, **options: str) -> Reader:
    """A report on ``paths``, written to ``folder``."""
    page.report(paths, folder / "p.html", **options)
    return read(folder / "p.html")


def steps(**more: str) -> list[str]:
    """A run of a fraction of a second, with all that a report shows of it."""
    table = {
        "steps": "30", "checkpoint.every": "5", "decompose.every": "1", "evaluate.every": "5",
        "monitor.sharpness": "10", "monitor.samples": "200", "monitor.instruments": "['batch-sharpness']",
        "monitor.every": "10", "monitor.draws": "2", "model.widths": "[64, 8, 10]", **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in table.items()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs_in(tmp_path_factory.getbasetemp() / "report")


@functools.cache
def runs_in(folder: Path) -> Path:
    """The folder with a run of SSGD and one of DPSGD, and surfaces around both in one file."""
    made = []
    for name in ("ssgd", "dpsgd"):
        launch.launch(recipe.read(f"digits-{name}", steps()), folder / name, device="cpu")
        run = Checkpoint.load(folder / name / "last.h5")
        problem, about = run.problem("train"), common.about(run, "train")
        plane = landscape.random_plane(problem)
        made.append(landscape.contour(problem, plane, grid=(9, 7), **about))
    save(made, folder / "both.h5")
    learners = landscape.contour(problem, learners_plane(problem, run.weights), grid=(9, 7), **about)
    learners.save(folder / "dpsgd" / "learners.h5")
    parts: Any = ("extremes", "trace", "density")
    spectrum = landscape.spectrum(problem, k=3, quantities=parts, draws=2, steps=10, **about)
    spectrum.save(folder / "dpsgd" / "spectrum.h5")
    landscape.hessian_grid(problem, plane, grid=(3, 2), **about).save(folder / "ratio.h5")
    compute_noise(problem, run.weights, run.lr, run.local_batch, draws=4, **about).save(folder / "noise.h5")
    return folder


FILES = ("ssgd", "dpsgd", "both.h5", "ratio.h5", "noise.h5")


@pytest.fixture(scope="module")
def made(runs: Path) -> page.Contents:
    return page.read([runs / name for name in FILES])


@pytest.fixture(scope="module")
def whole(runs: Path, made: page.Contents) -> Path:
    """The page about all of it."""
    page.write(made, runs / "page.html")
    return runs / "page.html"


def test_the_page_has_all_sections_and_the_numbers(runs: Path, whole: Path, made: Contents) -> None:
    shown = read(whole)
    for title in (
        "SSGD and DPSGD on digits", "Training", "Contours: train loss (nat) over random directions",
        "Contours: train loss (nat) over the plane nearest to the learners", "In three dimensions",
        "Hessian grid", "Spectrum", "Noise", "Origin: files and settings", "consensus distance",
    ):  # fmt: skip
        assert title in shown.text
    for item in made.items:
        for row in (*item.of.describe(), *item.origin):
            assert " ".join(row.number.split()) in shown.text
    for run in made.runs:
        assert run.recipe.split("\n")[0] in shown.text
    assert shown.text.count("SHA-256") == 1  # a row of the runs
    about = {row.name: row.value for item in made.items[:2] for row in item.origin}
    assert {"file", "SHA-256", "step", "lr", "seed", "model", "data", "learners"} <= set(about)
    assert not {"history", "buffers", "optimizer", "diverged at", "path"} & set(about)


def test_the_pictures_are_those_of_plots_with_their_numbers(whole: Path, made: Contents) -> None:
    shown = read(whole)
    pictures = shown.files("image/svg+xml")
    assert len(pictures) == 6
    for picture in pictures:
        assert xml.etree.ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
        assert len(picture) < 400_000
        assert not re.search(r' d="[^"]*\.\d{3}', picture)
    assert all(len(value) > 20 for name, value in shown.attributes if name == "alt")
    tables = [list(csv.DictReader(text.splitlines())) for text in shown.files("text/csv")]
    assert len(tables) == len(pictures)
    history = made.runs[1].history["consensus"]
    own = [float(row["consensus"]) for row in tables[0] if row["of"].startswith("DPSGD")]
    np.testing.assert_allclose(own, history, rtol=1e-5)
    losses = [float(row["loss"]) for row in next(t for t in tables if "loss" in t[0] and len(t) == 126)]
    np.testing.assert_allclose(losses, [v for s in surfaces_of(made)[1:] for v in s.loss.ravel()], rtol=1e-5)


def surfaces_of(given: Contents) -> list[landscape.Surface]:
    """The plane of the learners, which the folder of its run brings, and the two random planes."""
    return [item.of for item in given.items if isinstance(item.of, landscape.Surface)]


def test_areas_and_curves_of_many_points_are_pixels(runs: Path) -> None:
    surface = landscape.Surface.load(runs / "dpsgd" / "learners.h5")
    grid, draw = np.linspace(-1, 1, 81), np.random.default_rng(0)
    loss = 1 + grid**2 + grid[:, None] ** 2 + 0.1 * draw.normal(size=(81, 81))
    fine = dataclasses.replace(
        surface, x=grid, y=grid, loss=loss, accuracy=np.zeros_like(loss), done=np.ones_like(loss, bool)
    )
    few, many = (page._svg(landscape.draw([each])) for each in (surface, fine))
    assert many.count("<image") > few.count("<image")
    steps = np.arange(1.0, 5001)
    run = Checkpoint.load(runs / "ssgd" / "last.h5")
    history = {name: draw.uniform(size=len(steps)) for name in run.history} | {"step": steps}
    history["lr_lambda_limit"] = np.ones(len(steps))
    long = dataclasses.replace(run, history=history)
    assert len(svg := page._svg(landscape.draw([long]))) < 1_000_000
    assert {*re.findall(r"url\(#(.*?)\)", svg)} == {*re.findall('clipPath id="(clip[0-9]+)"', svg)}
    text, note = page._csv([page.Item(long, None, "", "long")])
    rows = list(csv.DictReader(text.splitlines()))
    every = round(5000 / len(rows))
    assert note == f", one row in {every}"
    assert len(rows) * len(rows[0]) <= page.MOST_CELLS
    assert [float(row["step"]) for row in rows] == [*range(1, 5001, every)]


def test_a_run_alone_is_the_same_page_each_time_without_plotly_that_names_what_is_missing(
    runs: Path, tmp_path: Path, whole: Path
) -> None:
    shown = reported(tmp_path, runs / "ssgd" / "last.h5")
    for command in ("contour", "spectrum", "hessian-grid", "noise"):
        assert f"{command.replace('-', ' ')}: landscape {command} {runs / 'ssgd'}" in shown.text
    assert "In three dimensions" not in shown.text  # nothing is drawn of what is not there
    assert "Not in the files" not in read(whole).text
    assert len(shown.scripts) == 2
    first = (tmp_path / "p.html").read_bytes()
    assert len(first) < 1_000_000
    reported(tmp_path, runs / "ssgd" / "last.h5")
    assert (tmp_path / "p.html").read_bytes() == first


def test_a_loop_of_ones_own_has_no_seed_and_needs_its_code(made: Contents, tmp_path: Path) -> None:
    run = made.runs[0]
    own = dataclasses.replace(run, algorithm=RECORDED, data=run.data | {"name": ""})
    loop = dataclasses.replace(made.items[0], of=own, name="mine, step 20")
    given = Contents((loop,))
    assert not {"seed", "local batch"} & {row.name for row in loop.origin}
    assert all("--data MODULE:NAME" in command for _, command in given.missing())
    page.write(given, tmp_path / "p.html")
    assert "<h1>mine, step 20</h1>" in (tmp_path / "p.html").read_text()


def test_analyze_makes_what_is_missing(trained: Path, tmp_path: Path, command: Command) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "dpsgd"))
    words = ("report", folder, "-o", tmp_path / "p.html", "--analyse", "-q", "--device", "cpu")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    names = ("last-contour.h5", "last-spectrum.h5")
    written = [line for line in out.splitlines() if line.startswith("/")]
    assert written == [*(str(folder / name) for name in names), str(tmp_path / "p.html")]
    text = read(tmp_path / "p.html").text
    assert "Contours: " in text
    assert "Spectrum" in text
    assert command(*words)[:2] == (0, f"{tmp_path}/p.html\n")  # nothing is made twice
    assert command("contour", folder, "--grid", 3, "--force", "-q")[0] == 0
    code, _, err = command(words[0], folder / "last.h5", *words[2:])
    assert (code, err.partition("; give ")[2]) == (1, "this file, too, or move it\n")


def test_what_is_no_run_and_a_package_that_is_missing_are_one_line(
    runs: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsaved = dataclasses.replace(Checkpoint.load(runs / "ssgd" / "last.h5"), path=None)
    for wrong, said in ((unsaved, "a run without a file"), (3, "a int")):
        with pytest.raises(InputError, match=f"runs: {said} is not allowed"):
            page.report(wrong, tmp_path / "x.html")
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = command("report", runs / "ssgd", "-o", tmp_path / "x.html")
    one_line(result, 1, "plotly is not installed", "pip install")
    assert not (tmp_path / "x.html").exists()
    with pytest.warns(DataWarning, match="plotly is not installed"):
        demo_command._report(tmp_path)  # the rest of the demo is done: a line says what is not
    with pytest.raises(OperationError, match="plotly"):
        page.check_installed()


def test_the_page_is_small_and_names_no_other_place(whole: Path) -> None:
    assert whole.stat().st_size < MOST_BYTES
    shown = read(whole)
    run = [s for s in shown.scripts if not s.startswith("[")]  # the surfaces are JSON
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in run]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(run) == 2
    assert (
        "content",
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
    ) in shown.attributes
    kinds = ("src", "srcset", "href", "action", "data", "poster", "background")
    places = [v for name, v in shown.attributes if name in kinds]
    assert all(v.startswith(("#", "data:image/svg+xml;base64,", "data:text/csv;base64,")) for v in places)
    assert not re.search(r"https?:", " ".join(value for _, value in shown.attributes))
    assert not re.search(r"@import|url\(|https?:", "".join(shown.styles))
    assert not re.search(r"fetch\(|XMLHttpRequest|https?:|import\(|eval\(|localStorage", shown.scripts[-1])
    assert {"link", "iframe", "object", "base"}.isdisjoint(shown.tags)


def test_surfaces_turn_in_the_scale_of_their_picture(whole: Path, made: Contents) -> None:
    learners, first, second = scenes = read(whole).scenes
    for scene in scenes:
        figure = graph_objects.Figure({"data": scene["data"], "layout": {"scene": scene["scene"]}})
        assert len(figure.data) == len(scene["data"]) >= 3  # Plotly refuses what it does not know
    surfaces = surfaces_of(made)
    shared = scale([s.loss for s in surfaces[1:]])
    for scene, surface in zip((first, second), surfaces[1:], strict=True):
        sheet = scene["data"][0]
        assert (sheet["cmin"], sheet["cmax"]) == pytest.approx(tuple(shared.levels[[0, -1]]))
        assert scene["scene"]["zaxis"] == first["scene"]["zaxis"]
        np.testing.assert_allclose(sheet["z"], surface.loss, rtol=1e-5)
        np.testing.assert_allclose(sheet["x"], surface.x, rtol=1e-5)
    names = [trace["name"] for trace in learners["data"][1:]]
    assert names == ["lowest grid point", "learners", "their mean w_a"]
    np.testing.assert_allclose(learners["data"][2]["x"], surfaces[0].markers[:-1, 0], rtol=1e-5)


def scene_of(runs: Path, **changes: Any) -> Any:
    """What turns of the surface of the learners with ``changes``."""
    surface = dataclasses.replace(landscape.Surface.load(runs / "dpsgd" / "learners.h5"), **changes)
    return page._scenes([page.Item(surface, None, "", "a")])[0]


def test_losses_of_many_sizes_turn_on_a_logarithmic_axis(runs: Path) -> None:
    loss = np.geomspace(0.01, 100, 63).reshape(7, 9)
    scene = scene_of(runs, loss=loss)
    sheet, lowest = scene["data"][:2]
    np.testing.assert_allclose(sheet["surfacecolor"], np.log10(loss), atol=1e-4)
    assert scene["scene"]["zaxis"]["type"] == "log"
    assert lowest["z"][0] > loss.min()  # above the surface
    low, high = scene["scene"]["zaxis"]["range"]
    assert low <= np.log10(loss.min()) < high


def test_fine_surfaces_turn_with_fewer_points(runs: Path) -> None:
    grid = np.linspace(-1, 1, 301)
    loss = grid**2 + grid[:, None] ** 2 + 1
    sheet = scene_of(runs, x=grid, y=grid, loss=loss, accuracy=loss, done=loss > 0)["data"][0]
    assert len(sheet["x"]) == len(sheet["z"]) == 61
    np.testing.assert_allclose(sheet["z"], loss[::5, ::5], rtol=1e-5)


texts = st.text(st.characters(), max_size=40)


@given(texts)
def test_json_is_safe_inside_a_script_and_reads_back(text: str) -> None:
    made = script_json({"a": [text], text: 1})
    assert json.loads(made) == {"a": [text], text: 1}
    assert made.isascii()
    assert not set("<>&") & set(made)


def worded(text: str) -> str:
    """A page with ``text`` wherever it may have one."""
    table = Table((f"d{text}",), {f"e{text}": (Row("", f"f{text}", note=f"g{text}"),)})
    picture = Picture(f"o{text}", "<svg/>", "a\n", f"h{text}")
    section = Section(
        f"b{text}", (picture,), table, table, ({"name": f"m{text}"},), ((f"i{text}", f"j{text}"),), (f"c{text}",)
    )  # fmt: skip
    return page.render(f"a{text}", (section,), Contents((), (f"k{text}",)))


@settings(max_examples=15)  # each makes a page
@given(texts)
def test_every_text_is_shown_as_text(text: str) -> None:
    found, expected = Reader(worded(text)), Reader(worded(""))
    assert found.tags == expected.tags
    assert [name for name, _ in found.attributes] == [name for name, _ in expected.attributes]
    assert found.scripts[1:] == expected.scripts[1:]
    shown = "\n".join(map(printable, text.split("\n")))
    whole = "".join(found.words)
    for letter in "abcdefghijkm":
        assert f"{letter}{shown}" in whole
    assert ("alt", f"o{shown}") in found.attributes


def test_hostile_names_and_labels(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "dpsgd", tmp_path / f"run {HOSTILE.replace('/', '')}"))
    surface = landscape.Surface.load(folder / "learners.h5")
    words = {"label": HOSTILE, "axes": (HOSTILE,) * 2, "labels": (HOSTILE,) * len(surface.labels)}
    hostile = dataclasses.replace(surface, kind="between", **words)
    save([hostile], folder / "learners.h5")
    (folder / "broken.h5").write_bytes(b"no HDF5")
    found = reported(tmp_path, folder, title=HOSTILE)
    assert "broken.h5" in found.text  # a damaged result is named
    assert found.tags.count("script") == 3  # surfaces, Plotly, the page's own
    assert found.text.count(HOSTILE) >= 5
    assert folder.name in found.text
    names = [trace["name"] for trace in found.scenes[0]["data"][2:]]
    assert names == [HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")] * len(names)
    (picture,) = [svg for svg in found.files("image/svg+xml") if "alert" in svg]
    tags = {element.tag.partition("}")[2] for element in xml.etree.ElementTree.fromstring(picture).iter()}
    assert not {"script", "a", "foreignObject"} & tags


@pytest.mark.slow
def test_results_of_every_kind(tmp_path: Path, command: Command) -> None:
    kept = samples.results()
    for name, result in kept.items():
        result.save(tmp_path / f"{name}.h5")
    code, out, err = command("report", *sorted(tmp_path.glob("*.h5")), "-o", tmp_path / "p.html", "-q")
    assert (code, out, err) == (0, f"{tmp_path}/p.html\n", "")
    shown = read(tmp_path / "p.html")
    assert 3 <= shown.tags.count("img") <= len(kept)
    assert len(shown.files("text/csv")) == shown.tags.count("img")
    assert all(value for name, value in shown.attributes if name == "alt")


def test_what_one_picture_cannot_show_has_a_picture_each(tmp_path: Path) -> None:
    one = comparison()
    shown = reported(tmp_path, *[one, dataclasses.replace(one, sides=("A", "B"))])
    assert shown.tags.count("img") == 2
    assert "A against B" in shown.text
    names = [value for name, value in shown.attributes if name == "data-name"]
    assert len(set(names)) == 2


def test_missing_numbers_are_null(tmp_path: Path, runs: Path) -> None:
    surface = landscape.Surface.load(runs / "dpsgd" / "learners.h5")
    loss = surface.loss.copy()
    loss[0, 1], loss[2, 2] = np.nan, np.inf
    save([dataclasses.replace(surface, loss=loss)], tmp_path / "s.h5")
    z = reported(tmp_path, tmp_path / "s.h5").scenes[0]["data"][0]["z"]
    assert (z[0][1], z[2][2]) == (None, None)
    nothing = dataclasses.replace(surface, loss=np.full_like(loss, np.nan))
    shown = reported(tmp_path, nothing)  # of a result that has no file; nothing to draw, and no error
    assert shown.scenes == []
    assert "is not drawn: loss: no value is finite" in shown.text
    grid = landscape.HessianGrid.load(runs / "ratio.h5")
    empty = np.full_like(grid.ratio, np.nan)
    assert "–" in reported(tmp_path, dataclasses.replace(grid, ratio=empty, lambda_max=empty)).text
    both = reported(tmp_path, surface, nothing)
    assert (both.tags.count("img"), len(both.scenes)) == (1, 1)
