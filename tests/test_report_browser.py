"""The report in a real browser: pictures are shown and saved, surfaces turn together, and no request leaves it.

It takes Playwright (pip install playwright, without its browsers) and Chromium from the system's packages.
"""

from __future__ import annotations

import csv
import io
import shutil
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import report as benchmark
from landscape import reports as pages
from tests.conftest import wait_for
from tests.test_report import FILES, HOSTILE, runs  # noqa: F401  (a fixture)

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
        lost = "Too many active WebGL contexts"
        self.page.on(
            "console",
            lambda m: self.errors.append(m.text) if m.type == "error" or lost in m.text else None,
        )
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("dialog", lambda d: self.errors.append(f"dialog: {d.message}"))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(path.as_uri())

    def turns(self, scene: int) -> Any:
        """The element of a surface, in sight and drawn."""
        place = self.page.locator(f'[data-scene="{scene}"]')
        place.scroll_into_view_if_needed()
        wait_for(lambda: place.locator("canvas").count() > 0 and colors(place) > 50)
        return place

    def close(self) -> None:
        outside = [url for url in self.requests[1:] if not url.startswith(("data:", "blob:"))]
        self.page.close()
        assert not self.errors
        assert not outside


def colors(place: Any) -> int:
    """How many colors a picture of the element has: a blank canvas has one."""
    picture = Image.open(io.BytesIO(place.screenshot())).convert("RGB")
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


def test_every_picture_is_shown(opened: Opened) -> None:
    page = opened.page
    pictures = page.locator("img")
    assert pictures.count() == 6
    for k in range(pictures.count()):
        assert pictures.nth(k).evaluate("(img) => img.complete && img.naturalWidth > 300")
        assert colors(pictures.nth(k)) > 10
    assert page.title() == HOSTILE
    assert page.locator("h1").inner_text() == HOSTILE


EYE = "(id) => document.querySelector(`[data-scene='${id}']`)._fullLayout.scene._scene.getCamera().eye.x"


@pytest.mark.slow
def test_cameras_turn_together(opened: Opened) -> None:
    page = opened.page
    one, other = 1, 2  # the two random planes: they stand side by side
    for scene in (one, other):
        opened.turns(scene)
    before = page.evaluate(EYE, one)
    page.locator('section:has([data-scene="1"]) [data-turn="left"]').click()
    wait_for(lambda: page.evaluate(EYE, one) != before)
    after = page.evaluate(EYE, one)
    wait_for(lambda: page.evaluate(EYE, other) == pytest.approx(after))
    box = opened.turns(one).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    frame = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.mouse.move(x, y)
    page.evaluate(frame)  # Plotly looks at the mouse once in each frame
    page.mouse.down()
    for k in range(1, 4):
        page.mouse.move(x + 40 * k, y + 5 * k)
        page.evaluate(frame)
    page.mouse.up()

    def together() -> bool:  # on a busy machine, a move is drawn late
        a, b = page.evaluate(EYE, one), page.evaluate(EYE, other)
        return abs(a - after) > 1e-3 and abs(a - b) < 1e-6

    wait_for(together)
    turned = page.evaluate(EYE, one)
    opened.turns(0)  # one that was out of sight comes as the others stand
    assert page.evaluate(EYE, 0) == pytest.approx(turned)
    page.locator('[data-turn="reset"]').first.click()
    wait_for(lambda: page.evaluate(EYE, 0) == pytest.approx(1.3))


def test_pictures_and_numbers_are_saved(opened: Opened) -> None:
    figure = opened.page.locator("figure[data-name]").first
    name = figure.get_attribute("data-name")

    def saved(words: str) -> bytes:
        with opened.page.expect_download() as download:
            figure.get_by_text(words, exact=True).click()
        assert download.value.suggested_filename == f"{name}.{words.lower()}"
        return Path(download.value.path()).read_bytes()

    width = figure.locator("img").evaluate("(img) => img.naturalWidth")
    picture = Image.open(io.BytesIO(saved("PNG"))).convert("RGB")
    assert picture.width == 2 * width
    assert len(picture.getcolors(picture.width * picture.height)) > 10
    assert xml.etree.ElementTree.fromstring(saved("SVG")).tag == "{http://www.w3.org/2000/svg}svg"
    rows = list(csv.DictReader(saved("CSV").decode().splitlines()))
    assert len(rows) == 60
    assert float(rows[0]["step"]) == 1


@pytest.mark.slow
def test_a_dark_screen_shows_it_dark(browser: Any, report: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    shown = {}
    for scheme in ("light", "dark"):
        opened = Opened(browser, report, scheme)
        shown[scheme] = opened.page.evaluate(back)
        opened.close()
    assert shown == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}


def test_readable_on_a_narrow_screen_and_by_a_screen_reader(opened: Opened) -> None:
    page = opened.page
    page.set_viewport_size({"width": 390, "height": 600})
    wait_for(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390)
    for without_a_name in (
        """() => [...document.querySelectorAll("button")].filter((e) =>
        !(e.textContent.trim() || e.getAttribute("aria-label"))).length""",
        """() => [...document.querySelectorAll("[role=img], img")].filter((e) =>
        (e.getAttribute("aria-label") ?? e.alt).length < 20).length""",
    ):
        assert page.evaluate(without_a_name) == 0
    page.set_viewport_size({"width": 900, "height": 600})


@pytest.mark.slow
def test_of_twenty_surfaces_those_in_sight_are_drawn(browser: Any, tmp_path: Path) -> None:
    pages.report(benchmark.make(tmp_path), tmp_path / "p.html")
    opened = Opened(browser, tmp_path / "p.html")
    for scene in (0, 19, 0):
        opened.turns(scene)
        wait_for(lambda: opened.page.locator(".js-plotly-plot canvas").count() <= 12)
    opened.close()
