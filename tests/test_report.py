"""The page of landscape report: what is on it, that it is right, shows texts as texts, and sends no request."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import html.parser
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly import graph_objects

import landscape
from landscape.analysis.noise import noise as compute_noise
from landscape.analysis.planes import learners_plane
from landscape.checkpoint.checkpoint import RECORDED, Checkpoint
from landscape.cli import analysis
from landscape.cli import report as report_command
from landscape.core.errors import OperationError
from landscape.core.files import printable
from landscape.paper import gallery
from landscape.reports import analyses, contents, curves, findings, page
from landscape.reports.page import figures_page
from landscape.reports.parts import Missing, Page, Section, Table, chart_text, script_json, text_cells
from landscape.results.base import save
from landscape.results.shown import in_words
from landscape.results.spectrum import Spectrum
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests.conftest import Command
from tests.fuzz import samples
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
    def data(self) -> Any:
        return json.loads(self.scripts[0])


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
        problem, about = run.problem("train"), analysis.about(run, "train")
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
def made(runs: Path) -> contents.Contents:
    return contents.read([runs / name for name in FILES])


@pytest.fixture(scope="module")
def whole(runs: Path, made: contents.Contents) -> Path:
    """The page about all of it."""
    page.write(page.build(made), runs / "page.html")
    return runs / "page.html"


def test_the_page_has_all_sections_and_the_numbers(runs: Path, whole: Path, made: contents.Contents) -> None:
    shown = read(whole)
    for title in (
        "SSGD and DPSGD on digits", "Outcome", "What was run, and on what", "Training", "In three dimensions",
        "Learners along the run", "Hessian ratios", "Spectra", "Noise of the spread", "How each number was made",
        "Glossary", "consensus distance", "ω_min", "AWC", "ATC",
    ):  # fmt: skip
        assert title in shown.text
    for run in made.runs:
        accuracy = run.checkpoint.history["test_accuracy"][-1]
        error = math.sqrt(accuracy * (1 - accuracy) / 360)
        assert f"{in_words(100 * (1 - accuracy), 100 * error)}%" in shown.text
        assert run.checkpoint.recipe.split("\n")[0] in shown.text
        assert run.sha256[:12] in shown.text
    spectrum = Spectrum.load(runs / "dpsgd" / "spectrum.h5")
    assert in_words(spectrum.values[0], spectrum.residuals[0]) in shown.text
    assert in_words(spectrum.trace, spectrum.trace_error) in shown.text
    curve = next(t for t in shown.data["charts"]["curve-consensus"]["figure"]["data"] if t["meta"] == 1)
    np.testing.assert_allclose(curve["y"], made.runs[1].checkpoint.history["consensus"], rtol=1e-5)
    loss = made.of(landscape.Surface)[1].loss
    assert shown.data["surfaces"][1]["z"][0][0] == pytest.approx(loss[0, 0], rel=1e-5)
    assert {surface["group"] for surface in shown.data["surfaces"]} == {0, 1}


def test_what_is_missing_is_named_with_its_command(runs: Path, tmp_path: Path) -> None:
    text = reported(tmp_path, runs / "ssgd" / "last.h5").text
    for command in ("contour", "spectrum", "hessian-grid", "noise"):
        assert f"landscape {command} {runs / 'ssgd'}" in text
    assert f"landscape contour {runs / 'ssgd'} --plane learners" in text
    assert "In three dimensions" not in text  # nothing is drawn of what is not there


def test_analyze_makes_what_is_missing(runs: Path, tmp_path: Path, command: Command) -> None:
    folder = Path(shutil.copytree(runs / "dpsgd", tmp_path / "dpsgd"))
    for path in ("learners.h5", "spectrum.h5"):
        (folder / path).unlink()
    words = ("report", folder, "-o", tmp_path / "p.html", "--analyse", "-q", "--device", "cpu")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    names = ("last-contour.h5", "last-contour-learners.h5", "last-spectrum.h5")
    written = [line for line in out.splitlines() if line.startswith("/")]
    assert written == [*(str(folder / name) for name in names), str(tmp_path / "p.html")]
    text = read(tmp_path / "p.html").text
    assert "There is no" not in text
    assert "Learners along the run" in text
    assert command(*words)[:2] == (0, f"{tmp_path}/p.html\n")  # nothing is made twice


def test_bad_use_is_one_line(
    runs: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(b"no HDF5")
    for path, name, code, *words in (
        (runs / "ssgd", "x.h5", 2, "-o", "x.h5", ".html"),
        (tmp_path / "no.h5", "x.html", 1, "no.h5", "no such file"),
        (tmp_path, "x.html", 1, "last.h5"),
        (damaged, "x.html", 1, "damaged.h5"),
    ):
        one_line(command("report", path, "-o", tmp_path / name), code, *words)
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = command("report", runs / "ssgd", "-o", tmp_path / "x.html")
    one_line(result, 1, "plotly is not installed", "pip install")
    assert not (tmp_path / "x.html").exists()
    # Of a command that ends with a report, the rest is done.
    report_command.finish(lambda: Page("a", (), ()), tmp_path / "x.html")
    with pytest.raises(OperationError, match="plotly"):
        page.check_installed()


def test_the_page_is_small_and_names_no_other_place(whole: Path) -> None:
    assert whole.stat().st_size < MOST_BYTES
    shown = read(whole)
    run = [s for s in shown.scripts if not s.startswith("{")]  # the data is JSON
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in run]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(run) == 2
    assert (
        "content",
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
    ) in shown.attributes
    places = [
        v
        for name, v in shown.attributes
        if name in ("src", "srcset", "href", "action", "data", "poster", "background")
    ]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in places)
    assert not re.search(r"https?:", " ".join(value for _, value in shown.attributes))
    assert not re.search(r"@import|url\(|https?:", "".join(shown.styles))
    assert not re.search(r"fetch\(|XMLHttpRequest|https?:|import\(|eval\(|localStorage", shown.scripts[-1])
    assert {"link", "iframe", "object", "base"}.isdisjoint(shown.tags)


def test_figures_are_figures_of_plotly(made: contents.Contents) -> None:
    charts = [chart for s in page.build(made).sections for chart in s.charts if chart.kind == "figure"]
    assert len(charts) >= 10
    for chart in charts:
        figure = graph_objects.Figure(chart.figure)  # refuses what Plotly does not know
        assert len(figure.data) == len(chart.figure["data"]) > 0
        assert len(chart.alt) > 20
    assert len({chart.name for chart in charts}) == len(charts)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_decimation_keeps_every_peak_and_the_ends(values: list[float], buckets: int) -> None:
    x, y = np.arange(len(values)), np.array(values)
    kept_x, kept_y = curves.decimate(x, y, buckets)
    assert len(kept_x) <= max(2 * buckets + 2, 2)
    assert (np.diff(kept_x) > 0).all()
    np.testing.assert_array_equal(kept_y, y[kept_x])
    assert {0, len(y) - 1} <= {*kept_x.tolist()}
    if len(y) > 2 * buckets:
        edges = np.linspace(0, len(y), buckets + 1).astype(int)
        for low, high in itertools.pairwise(edges):
            inside = kept_y[(kept_x >= low) & (kept_x < high)]
            assert (inside.min(), inside.max()) == (y[low:high].min(), y[low:high].max())


texts = st.text(st.characters(), max_size=40)


@given(texts)
def test_json_is_safe_inside_a_script_and_reads_back(text: str) -> None:
    made = script_json({"a": [text], text: 1})
    assert json.loads(made) == {"a": [text], text: 1}
    assert made.isascii()
    assert not set("<>&") & set(made)


def worded(text: str) -> Page:
    """A page with ``text`` wherever it may have one."""
    section = Section(
        "s", f"b{text}", (f"c{text}",), tables=(Table(f"d{text}", (f"e{text}",), (text_cells(f"f{text}"),)),),
        missing=(Missing(f"g{text}", f"h{text}"),), texts=((f"i{text}", f"j{text}"),),
    )  # fmt: skip
    return Page(f"a{text}", (f"k{text}",), (section,))


@settings(max_examples=15)  # each makes a page
@given(texts)
def test_every_text_is_shown_as_text(text: str) -> None:
    found, expected = Reader(page.render(worded(text))), Reader(page.render(worded("")))
    assert found.tags == expected.tags
    assert [name for name, _ in found.attributes] == [name for name, _ in expected.attributes]
    assert found.scripts[1:] == expected.scripts[1:]
    shown = "\n".join(map(printable, text.split("\n")))
    whole = "".join(found.words)
    for letter in "abcdefghijk":
        assert f"{letter}{shown}" in whole


def test_hostile_names_and_labels(runs: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs / "dpsgd", tmp_path / f"run {HOSTILE.replace('/', '')}"))
    surface = landscape.Surface.load(folder / "learners.h5")
    hostile = dataclasses.replace(
        surface, label=HOSTILE, axes=(HOSTILE, HOSTILE), labels=(HOSTILE,) * len(surface.labels)
    )
    save([hostile], folder / "learners.h5")
    (folder / "broken.h5").write_bytes(b"no HDF5")
    found = reported(tmp_path, folder, title=HOSTILE)
    assert "broken.h5" in found.text  # a damaged result is named
    assert found.tags.count("script") == 3  # data, Plotly, the page's own
    assert found.text.count(HOSTILE) >= 5
    assert folder.name in found.text
    assert found.data["surfaces"][0]["label"] == chart_text(HOSTILE)
    assert "<" not in found.data["surfaces"][0]["label"]


@pytest.mark.slow
def test_results_of_every_kind(tmp_path: Path, command: Command) -> None:
    kept = samples.results()
    for name, result in kept.items():
        result.save(tmp_path / f"{name}.h5")
    code, out, err = command("report", *sorted(tmp_path.glob("*.h5")), "-o", tmp_path / "p.html", "-q")
    assert (code, out, err) == (0, f"{tmp_path}/p.html\n", "")
    shown = read(tmp_path / "p.html")
    assert 3 <= shown.tags.count("img") <= len(kept)  # those that landscape plot draws, and Plotly does not
    assert all(value for name, value in shown.attributes if name == "alt")


def test_sentences_say_what_the_runs_can_tell_apart(made: contents.Contents) -> None:
    said = findings.sentences(made)
    assert any("lr·λ_max in the last quarter" in s and "limit 1" in s for s in said)
    assert any("times as much" in s or "rises by" in s for s in said)  # of the surfaces
    one = findings.ErrorSummary(5.0, 1.0, 1.0, "")
    few = dataclasses.replace(one, seeds=3)  # t of 4 degrees of freedom: 2.78 times √2 = 3.93
    unsure = dataclasses.replace(one, standard_error=math.nan)
    for best, gap, words in (
        (
            one,
            1.0,
            "The test errors of A and B differ by 1.0 ± 1.4 points, 0.7 standard errors; 2.0 are needed",
        ),
        (one, 10.0, "A has the lowest test error, 10.0 ± 1.4 points below B, 7.1 standard errors."),
        (few, 3.8, "are needed to say which is lower"),
        (few, 4.0, "standard errors."),
        (unsure, 1.0, "cannot be said"),
        (dataclasses.replace(one, standard_error=0.0), 1.0, "below B."),
    ):
        (sentence,) = findings._comparison({"A": best, "B": dataclasses.replace(best, mean=5 + gap)})
        assert words in sentence


def test_a_run_that_left_its_minimum_is_named(made: contents.Contents) -> None:
    run = made.runs[1]
    history = dict(run.checkpoint.history)
    history["train_loss"] = np.where(history["step"] < 15, 0.001, 1.0)
    lost = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, history=history))
    assert not any("left a minimum" in sentence for sentence in findings.sentences(made))
    (said,) = [s for s in findings.sentences(contents.Contents((lost,), ())) if "left a minimum" in s]
    assert "DPSGD: 1 of 1 runs" in said
    assert "1e+03 times that of step 1" in said


def test_seeds_of_one_setting_are_one(runs: Path, tmp_path: Path) -> None:
    launch.launch(recipe.read("digits-dpsgd", steps(seed="1")), tmp_path / "other", device="cpu")
    two = contents.read([runs / "dpsgd", tmp_path / "other", runs / "ssgd"])
    settings = contents.seed_groups(two.runs)
    assert [(s.name, s.places) for s in settings] == [("DPSGD", (0, 1)), ("SSGD", (2,))]
    error = findings.test_error(two.runs, settings[0])
    assert error
    values = [100 * (1 - run.checkpoint.history["test_accuracy"][-1]) for run in two.runs[:2]]
    assert (error.mean, error.spread) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    lines = curves.lines_of(two.runs)
    assert lines[0]["color"] == lines[1]["color"] != lines[2]["color"]
    assert lines[0]["dash"] != lines[1]["dash"]


def test_three_seeds_are_drawn_as_their_median_in_a_band() -> None:
    steps, setting = np.arange(4.0), contents.SeedGroup("A", "#123456", (0, 1, 2))
    runs = [(steps, steps + 1), (steps, steps + 4), (steps[1:], steps[1:] + 2)]
    band, line = curves._band(setting, runs, "train_loss", log=True)
    assert (line["x"], line["y"]) == ([1, 2, 3], [3, 4, 5])
    assert (band["x"], band["y"]) == ([1, 2, 3, 3, 2, 1], [5, 6, 7, 4, 3, 2])
    assert "meta" not in line  # it is shown whatever runs are chosen
    assert curves._band(setting, runs[:2], "train_loss", log=True) == []


def test_the_page_begins_with_a_picture_and_what_was_run(made: contents.Contents, tmp_path: Path) -> None:
    shown = page.build(made)
    assert shown.first
    assert shown.first.kind == "contour"
    assert shown.ran.startswith("Runs: SSGD (")
    assert "Surface" in shown.ran
    assert all(section.shows for section in shown.sections)
    one = made.runs[0].checkpoint
    other = dataclasses.replace(one, algorithm=RECORDED, data=one.data | {"name": ""})
    path = tmp_path / "last.h5"  # without step files beside it
    loop = dataclasses.replace(made.runs[0], checkpoint=other, path=path, name="mine, step 20")
    alone = page.build(contents.Contents((loop,), ()))
    assert alone.title == "mine, step 20"
    commands = [m.command for section in alone.sections for m in section.missing]
    assert any("save_every" in command for command in commands)
    assert not any("landscape train" in command for command in commands)


def test_frames_are_the_projections_of_the_learners(made: contents.Contents, runs: Path) -> None:
    section, scrubbers = analyses.scrubber_section(made)
    (only,) = scrubbers
    assert section.widget == "scrubber"
    assert [frame["step"] for frame in only["frames"]] == list(range(0, 31, 5))
    surface = landscape.Surface.load(runs / "dpsgd" / "learners.h5")
    np.testing.assert_allclose(only["frames"][-1]["points"], surface.markers[:-1], atol=1e-5)
    np.testing.assert_allclose(only["frames"][-1]["mean"], surface.markers[-1], atol=1e-5)
    early = Checkpoint.load(runs / "dpsgd" / "step-0000010.h5", whole_history=False).weights.double().numpy()
    expected = (early - surface.center) @ surface.directions.T
    np.testing.assert_allclose(only["frames"][2]["points"], expected, atol=1e-4)


def test_one_scale_for_the_surfaces_of_a_group(made: contents.Contents) -> None:
    first, second = analyses.groups(made)
    assert [len(group.surfaces) for group in (first, second)] == [2, 1]
    losses = np.concatenate([s.loss.ravel() for _, s in first.surfaces])
    scale = first.scale
    ends = np.array([scale["low"], scale["high"]])
    ends = 10**ends if scale["log"] else ends
    assert ends[0] <= losses.min() * (1 + 1e-9)
    assert ends[1] >= np.quantile(losses, 0.97)


def test_missing_numbers_are_null(tmp_path: Path, runs: Path) -> None:
    surface = landscape.Surface.load(runs / "dpsgd" / "learners.h5")
    loss = surface.loss.copy()
    loss[0, 1], loss[2, 2] = np.nan, np.inf
    save([dataclasses.replace(surface, loss=loss)], tmp_path / "s.h5")
    z = reported(tmp_path, tmp_path / "s.h5").data["surfaces"][0]["z"]
    assert (z[0][1], z[2][2]) == (None, None)
    save([dataclasses.replace(surface, loss=np.full_like(loss, np.nan))], tmp_path / "s.h5")
    grid = landscape.HessianGrid.load(runs / "ratio.h5")
    nothing = np.full_like(grid.ratio, np.nan)
    save([dataclasses.replace(grid, ratio=nothing, lambda_max=nothing)], tmp_path / "g.h5")
    given = contents.read([tmp_path / "s.h5", tmp_path / "g.h5"])
    assert analyses.data(given)["surfaces"] == []  # nothing to draw, and no error
    assert len(analyses.data(contents.read([surface]))["surfaces"]) == 1  # of a result that has no file
    assert analyses.other_sections(given)[0].tables[0].rows[0][1].text == "–"


def test_the_gallery_as_one_page(tmp_path: Path, command: Command) -> None:
    code, _, err = command(
        "figures", "delay-boundary", "-o", tmp_path, "--runs", tmp_path / "runs", "--scale", "smoke", "-q"
    )
    assert code == 0, err
    (entry,) = gallery.entries_in(tmp_path).values()
    shown = Reader(page.render(figures_page(tmp_path)))
    assert entry["claims"] in shown.text
    assert entry["command"] in shown.text
    assert shown.tags.count("img") == len(entry["pictures"])
    assert len(shown.scripts) == 2  # without Plotly: there is nothing for it to draw
