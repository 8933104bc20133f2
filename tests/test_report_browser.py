"""The report in a real browser: every chart is drawn, everything on it works, and no request leaves it.

It takes Playwright (pip install playwright, without its browsers) and Chromium from the system's packages.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from landscape.reports import page as pages
from tests.benchmarks import report as benchmark
from tests.conftest import wait_for
from tests.test_report import FILES, HOSTILE, MOST_BYTES, runs  # noqa: F401  (a fixture)

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
# On Debian /usr/bin/chromium is a script around this program.
PLACES = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in PLACES if (found := shutil.which(name))), None)
FLAGS = ("--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist")

pytestmark = pytest.mark.xdist_group("report")  # the runs, the browser and the page are made once


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if PROGRAM is None:
        pytest.skip("no Chromium among the system's programs")
    with playwright.sync_playwright() as started:
        program = started.chromium.launch(executable_path=PROGRAM, args=[*FLAGS])
        yield program
        program.close()


class Opened:
    """A page in the browser, with its errors and requests."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": 900, "height": 600}, color_scheme=scheme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("dialog", lambda d: self.errors.append(f"dialog: {d.message}"))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector('html[data-ready="1"]', state="attached", timeout=120_000)

    def close(self) -> None:
        outside = [url for url in self.requests[1:] if not url.startswith(("data:", "blob:"))]
        self.page.close()
        assert not self.errors
        assert not outside


def colors(opened: Opened, selector: str) -> int:
    """How many colors a picture of the element has: a blank canvas has one."""
    png = opened.page.locator(selector).first.screenshot()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    return len(picture.getcolors(picture.width * picture.height))


@pytest.fixture(scope="module")
def report(runs: Path) -> Path:  # noqa: F811
    """A report on two runs, as tests/test_report.py has it."""
    pages.report([runs / name for name in FILES], runs / "browser.html", title=HOSTILE)
    return runs / "browser.html"


@pytest.fixture(scope="module")
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    """One page for the tests that use it, which takes seconds to open; each leaves every part of it visible."""
    shown = Opened(browser, report)
    yield shown
    shown.close()


def test_every_chart_is_drawn(opened: Opened) -> None:
    drawn = opened.page.evaluate("""() => {
        const charts = JSON.parse(document.getElementById("data").textContent).charts;
        return [...document.querySelectorAll("[data-chart]")].map((figure) => {
            const div = figure.querySelector(".plot"), wanted = charts[figure.dataset.chart].figure;
            return {
                name: figure.dataset.chart, traces: div.data ? div.data.length : 0, kind: wanted.data ? "figure" : "contour",
                wanted: wanted.data ? wanted.data.length : 3, marks: div.querySelectorAll("path, image, canvas").length,
            };
        });
    }""")
    assert len(drawn) == 18  # one of them is also the page's first picture
    for chart in drawn:
        assert chart["traces"] >= (chart["wanted"] if chart["kind"] == "figure" else 2), chart
        assert chart["marks"] > 3, chart
        assert colors(opened, f'[data-chart="{chart["name"]}"] .plot') > 10, chart
    assert opened.page.locator(".gl-container canvas").count() == 2  # no browser allows many
    for selector in ("#plot-a", "#plot-b", "#plot-scrub"):
        assert colors(opened, selector) > 200
    assert opened.page.title() == HOSTILE
    assert opened.page.locator("h1").inner_text() == HOSTILE


@pytest.mark.slow
def test_selector_and_synchronized_cameras(opened: Opened) -> None:
    page = opened.page
    scene = "(id) => { const l = document.getElementById(id)._fullLayout.scene; return [l._scene.getCamera().eye.x, l.zaxis.range]; }"
    assert page.evaluate(scene, "plot-a")[1] == pytest.approx(page.evaluate(scene, "plot-b")[1])
    before = page.evaluate(scene, "plot-a")[0]
    page.click('[data-turn="left"]')
    wait_for(lambda: page.evaluate(scene, "plot-a")[0] != before)
    after = page.evaluate(scene, "plot-a")[0]
    wait_for(lambda: page.evaluate(scene, "plot-b")[0] == pytest.approx(after))
    page.locator("#plot-a").scroll_into_view_if_needed()
    box = page.locator("#plot-a").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    frame = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.mouse.move(x, y)
    page.evaluate(frame)  # Plotly looks at the mouse once in each frame
    page.mouse.down()
    for k in range(1, 4):
        page.mouse.move(x + 40 * k, y + 5 * k)
        page.evaluate(frame)
    page.mouse.up()
    eyes = """(before) => {  // on a busy machine, a move is drawn late
        const [a, b] = ["plot-a", "plot-b"].map((id) => document.getElementById(id)._fullLayout.scene._scene.getCamera().eye.x);
        return Math.abs(a - before) > 1e-3 && Math.abs(a - b) < 1e-6;
    }"""
    wait_for(lambda: page.evaluate(eyes, after))
    picture = page.locator("#plot-a").screenshot()
    page.select_option("#scene-a", "0")
    wait_for(lambda: page.locator("#plot-a").screenshot() != picture)
    assert page.evaluate("document.getElementById('plot-a').data.map((t) => t.name)").count("learners") == 1
    page.select_option("#scene-b", "")
    page.wait_for_selector("#plot-b", state="hidden")
    page.select_option("#scene-b", "1")
    page.wait_for_selector("#plot-b")
    wait_for(lambda: colors(opened, "#plot-b") > 200)


def test_cursors_are_linked(opened: Opened) -> None:
    page = opened.page
    first, second = (page.locator(f'.charts [data-chart="surface-{k}"]') for k in (1, 2))
    first.scroll_into_view_if_needed()
    box = first.locator(".nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.3 * box["height"], steps=5)

    def read() -> list[str]:
        return [figure.locator(".reading").inner_text() for figure in (first, second)]

    def reached() -> bool:
        """Both show the same place, to the right and above of the center, which the mouse passes by others."""
        places = {text.split(": loss")[0] for text in read()}
        numbers = re.findall(r"=\s*([-\d.]+)", "".join(places))
        return len(places) == 1 and len(numbers) == 2 and all(float(number) > 0 for number in numbers)

    wait_for(reached)
    texts = read()
    x = float(texts[0].split(",")[0].split("=")[1])
    assert texts[0] != texts[1]
    assert all(figure.locator(".cursor").is_visible() for figure in (first, second))
    second.focus()
    page.keyboard.press("ArrowLeft")
    moved = first.locator(".reading").inner_text()
    assert float(moved.split(",")[0].split("=")[1]) < x
    other = page.locator('.charts [data-chart="surface-0"] .reading').inner_text()  # of another group
    assert "loss" not in other


@pytest.mark.slow
def test_the_scrubber_moves_the_learners(opened: Opened) -> None:
    page = opened.page
    dots = "() => JSON.stringify(document.getElementById('plot-scrub').data[2].x)"
    text, at_end = page.locator("#scrub-text"), page.evaluate(dots)
    assert text.inner_text().startswith("step 30,")
    page.locator("#scrub").focus()
    page.keyboard.press("Home")
    assert text.inner_text().startswith("step 0")
    wait_for(lambda: page.evaluate(dots) != at_end)
    page.click("#scrub-on")
    assert text.inner_text().startswith("step 5,")
    assert "consensus distance" in text.inner_text()
    extent = "document.getElementById('plot-scrub')._fullLayout.xaxis.range"
    wide = page.evaluate(extent)
    page.check("#scrub-close")
    wait_for(lambda: page.evaluate(extent) != wide)
    page.click("#scrub-play")
    wait_for(lambda: text.inner_text().startswith("step 30,"))


def test_runs_tables_and_theme(opened: Opened) -> None:
    page = opened.page
    visible = "() => document.querySelector('[data-chart=curve-consensus] .plot').data.map((t) => t.visible ?? true)"
    assert page.evaluate(visible) == [True, True]
    page.locator("[data-runs] input").first.uncheck()
    wait_for(lambda: page.evaluate(visible) == [False, True])
    header = page.locator("#runs th", has_text="test error")
    column = 1 + page.locator("#runs th").all_inner_texts().index(header.inner_text())
    cells = page.locator(f"#runs tbody td:nth-child({column})")
    header.locator("button").click()
    up = [float(text.split("±")[0]) for text in cells.all_inner_texts()]
    header.locator("button").click()
    down = [float(text.split("±")[0]) for text in cells.all_inner_texts()]
    assert up == sorted(up) == down[::-1]
    assert header.get_attribute("aria-sort") == "descending"
    ink = "() => document.querySelector('[data-chart=curve-consensus] .xtick text').style.fill"
    before = page.evaluate(ink)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    wait_for(lambda: page.evaluate(ink) != before)


def saved(page: Any, chart: str, kind: str) -> bytes:
    """What the button ``kind`` of a chart gives."""
    with page.expect_download() as download:
        page.locator(f"{chart} .tools [aria-label='Save as {kind}']").click()
    assert download.value.suggested_filename.endswith(f".{kind.lower()}")
    return Path(download.value.path()).read_bytes()


LOSS, SURFACE, SCENE = (
    ".charts [data-chart=curve-train_loss]", ".charts [data-chart=surface-1]", ".scenes > :first-child"
)  # fmt: skip
OF_LOSS = f"(key) => document.querySelector('{LOSS} .plot')[key]"
DATA = "JSON.parse(document.getElementById('data').textContent)"


def test_charts_are_saved(opened: Opened) -> None:
    page = opened.page

    def rows(chart: str) -> list[list[str]]:
        head, *points = csv.reader(saved(page, chart, "CSV").decode().splitlines())
        assert head == ["name", "x", "y", "z"]
        return points

    wanted = [
        (t["name"], x, y) for t in page.evaluate(OF_LOSS, "data") for x, y in zip(t["x"], t["y"], strict=True)
    ]
    assert [(name, float(x), float(y)) for name, x, y, _ in rows(LOSS)] == wanted
    surfaces = page.evaluate(DATA)["surfaces"]
    for chart, k in ((SURFACE, 1), (SCENE, int(page.locator("#scene-a").input_value()))):
        assert [float(z) for *_, z in rows(chart) if z] == [z for row in surfaces[k]["z"] for z in row]
    width = page.locator(f"{LOSS} .plot").bounding_box()["width"]
    for chart in (LOSS, SURFACE, SCENE):
        picture = Image.open(io.BytesIO(saved(page, chart, "PNG"))).convert("RGB")
        assert len(picture.getcolors(picture.width * picture.height)) > 10
        if chart is LOSS:
            assert picture.width == pytest.approx(2 * width, abs=2)
        assert (
            xml.etree.ElementTree.fromstring(saved(page, chart, "SVG")).tag
            == "{http://www.w3.org/2000/svg}svg"
        )


def test_curves_are_smoothed_and_switched_between_scales(opened: Opened) -> None:
    page = opened.page
    axis = f"() => document.querySelector('{LOSS} .plot')._fullLayout.yaxis.type"
    was = page.evaluate(axis)
    for wished in ("linear" if was == "log" else "log", was):
        page.locator(f"{LOSS} .tools [aria-label^=Logarithmic]").click()
        wait_for(lambda wished=wished: page.evaluate(axis) == wished)
    raw = page.evaluate(OF_LOSS, "data")[0]["y"]
    page.locator("#smoothing").fill("0.9")
    weights = 0.9 ** np.arange(len(raw))[::-1]  # divided by their sum
    expected = weights @ np.array(raw) / weights.sum()
    wait_for(lambda: page.evaluate(OF_LOSS, "data")[0]["y"][-1] == pytest.approx(expected))
    name = "curve-alpha_e"  # with the learning rates beside it, which stay
    shown = f"document.querySelector('.charts [data-chart={name}] .plot').data"
    whole = page.evaluate(DATA)["charts"][name]["figure"]["data"]
    for trace, before in zip(page.evaluate(shown), whole, strict=True):
        assert (trace["y"] == before["y"]) == (trace.get("legendgroup") == "beside")
    page.locator("#smoothing").fill("0")
    wait_for(lambda: page.evaluate(OF_LOSS, "data")[0]["y"] == raw)


@pytest.mark.slow
def test_a_dark_screen_shows_it_dark(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, "dark")
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    opened.close()


def test_readable_on_a_narrow_screen_and_by_a_screen_reader(opened: Opened) -> None:
    page = opened.page
    page.set_viewport_size({"width": 390, "height": 600})
    wait_for(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390)
    for without_a_name in (
        """() => [...document.querySelectorAll("button, select, input")].filter((e) =>
        !(e.textContent.trim() || e.getAttribute("aria-label") || e.closest("label")) && !e.closest(".plot")).length""",
        """() => [...document.querySelectorAll("[role=img], img")].filter((e) =>
        (e.getAttribute("aria-label") ?? e.alt).length < 20).length""",
    ):
        assert page.evaluate(without_a_name) == 0
    page.set_viewport_size({"width": 900, "height": 600})


@pytest.mark.slow
def test_twenty_surfaces_open_without_jank(browser: Any, tmp_path: Path) -> None:
    """No task holds the page for long, but for those that read Plotly's code and start WebGL."""
    pages.report(benchmark.make(tmp_path), tmp_path / "p.html")
    opened = Opened(browser, tmp_path / "p.html")
    assert opened.page.locator(".js-plotly-plot").count() >= 20 + 7 + 2
    opened.page.evaluate("""() => { window.tasks = [];
        new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((e) => e.duration)))
            .observe({ type: "longtask" }); }""")
    first = opened.page.locator('.charts [data-chart="surface-0"]')
    first.focus()
    for key in ("ArrowLeft", "ArrowUp") * 10:
        opened.page.keyboard.press(key)
    reading = opened.page.locator('.charts [data-chart="surface-19"] .reading')
    wait_for(lambda: reading.inner_text().startswith("x = -0.4, y = 0.4"))
    assert max(opened.page.evaluate("window.tasks"), default=0) < 200
    opened.close()
