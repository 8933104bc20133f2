"""Results: their drawings, data sets, tables and HTML, for every kind of result."""

from __future__ import annotations

import base64
import dataclasses
import html
import itertools
import math
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import h5py
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn

import landscape
from landscape import InputError, Surface, plots
from landscape.cli import details
from landscape.core import registry
from landscape.plots import drawing_of, draws
from landscape.plots.picture import panels
from landscape.plots.style import headline
from landscape.results import shown
from landscape.results.base import Evaluated, Measurement, Result
from tests.conftest import slow_but
from tests.harm import samples

SHOWN = samples.results()
RESULTS = {name: result for name, result in SHOWN.items() if isinstance(result, Result)}
KINDS = sorted(RESULTS)


@dataclasses.dataclass(frozen=True)
class Heights(Result, schema="landscape.tests.heights", table="age"):
    """A result of another package: the height of a child at several ages."""

    shapes: ClassVar[Mapping[str, str]] = {"age": "age+", "height": "age"}
    units: ClassVar[Mapping[str, str]] = {"age": "year", "height": "m"}

    age: np.ndarray
    height: np.ndarray
    label: str = ""


class MoreHeights(Heights):
    """A subclass without a drawing and a schema."""


class OtherHeights(Heights):
    """A subclass with a drawing."""


@draws(Heights)
def draw_heights(results: Sequence[Heights], title: str = "") -> Figure:
    figure, (ax,) = panels(1, 1, 4.0, 3.0)
    for r in results:
        ax.plot(r.age, r.height)
    figure.suptitle(title or "heights")
    return figure


@draws(OtherHeights)
def draw_other_heights(results: Sequence[OtherHeights], title: str = "", style: str = "line") -> Figure:
    figure, _ = panels(1, 1, 4.0, 3.0)
    figure.suptitle(f"other heights, {style}")
    return figure


def heights(kind: type[Heights] = Heights) -> Heights:
    return kind(np.array([1.0, 2.0]), np.array([0.75, 0.9]))


# Without those of the papers' figures alone, which are registered where a figure is drawn.
REGISTERED = [
    name
    for name in registry.results.names()
    if not registry.results[name].__module__.startswith("landscape.paper")
]


@pytest.mark.parametrize("name", REGISTERED)
def test_every_kind_of_result_has_a_drawing_and_describes_its_arrays(name: str) -> None:
    kind = registry.results[name]
    assert drawing_of(kind).__name__.startswith("draw_")
    fields = {field.name for field in dataclasses.fields(kind)}
    assert set(kind.shapes) <= fields
    assert set(kind.axes_of) | set(kind.texts) <= set(kind.shapes)
    assert set(kind.units) <= fields
    dimensions = {d.rstrip("+") for text in kind.shapes.values() for d in text.split()}
    assert set(kind.table.split()) | set(kind.labels_of) <= dimensions
    assert kind.table


def test_the_examples_are_of_every_kind() -> None:
    assert {type(result) for result in RESULTS.values()} == {
        registry.results[name] for name in REGISTERED if name.startswith("landscape.") and "tests" not in name
    }


def test_subclasses_are_drawn_and_saved_as_their_base_class(tmp_path: Path) -> None:
    heights().save(tmp_path / "h.h5")
    back = landscape.load(tmp_path / "h.h5")
    assert type(back) is Heights
    np.testing.assert_array_equal(back.plot().axes[0].lines[0].get_ydata(), [0.75, 0.9])
    assert heights(MoreHeights).plot().get_suptitle() == "heights"
    assert len(plots.draw([heights(), heights(MoreHeights)]).axes[0].lines) == 2
    heights(MoreHeights).save(tmp_path / "h.h5")
    assert type(landscape.load(tmp_path / "h.h5")) is Heights
    assert heights(OtherHeights).plot().get_suptitle() == "other heights, line"
    assert heights(OtherHeights).plot(style="bars").get_suptitle() == "other heights, bars"
    with pytest.raises(InputError, match=r"Heights.*OtherHeights"):
        plots.draw([heights(), heights(OtherHeights)])


def test_a_result_without_a_description_of_its_own_has_the_ranges_of_its_arrays() -> None:
    assert [row.text for row in heights().describe()] == ["1 to 2 year", "0.75 to 0.9 m"]


def test_what_cannot_be_drawn_is_named() -> None:
    for words, call in {
        r"float.*allowed:.*Surface": lambda: plots.draw([1.0]),
        "results": lambda: plots.draw([]),
        r"style: 'bars'.*Heights": lambda: heights().plot(style="bars"),
        "'Heights'": lambda: draws(type("Heights", (), {}))(draw_other_heights),
        r"'landscape\.surface'": lambda: types.new_class("Other", (Result,), {"schema": "landscape.surface"}),
    }.items():
        with pytest.raises(InputError, match=words):
            call()
    assert registry.results["landscape.surface"] is Surface


@pytest.mark.parametrize("kind", KINDS)
def test_data_sets_hold_the_arrays_and_attributes(kind: str) -> None:
    result = RESULTS[kind]
    dataset = result.to_xarray()
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(result, Evaluated) and field.name in ("metric_names", "metrics"):
            continue
        if field.name not in result.shapes:
            stored = dataset.attrs[field.name]
            np.testing.assert_array_equal(stored, value)
            assert isinstance(stored, (bool, int, float, str, list))
        elif np.size(value):
            variable = dataset[field.name]
            assert variable.dims == tuple(d.rstrip("+") for d in result.shapes[field.name].split())
            expected = np.char.decode(value, "utf-8") if field.name in result.texts else value
            np.testing.assert_array_equal(variable.values, expected)
            assert variable.attrs.get("units") == result.units.get(field.name)
            assert (field.name in dataset.coords) == (variable.dims == (field.name,))
        else:
            assert field.name not in dataset
    for name in result.metric_names if isinstance(result, Evaluated) else ():
        np.testing.assert_array_equal(dataset[name].values, result.column(name))
    for dimension, labels in result.labels_of.items():
        assert dataset.coords[dimension].values.tolist() == list(labels)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_have_a_row_for_each_point(kind: str) -> None:
    result = RESULTS[kind]
    dimensions = result.table.split()
    dataset, frame = result.to_xarray(), result.to_dataframe()
    shape = [dataset.sizes[d] for d in dimensions]
    assert len(frame) == np.prod(shape)
    assert set(dataset.attrs) == set(frame.attrs)
    inside = [name for name, v in dataset.variables.items() if v.dims and set(v.dims) <= set(dimensions)]
    assert set(inside) <= set(frame.columns)
    for row, place in enumerate(itertools.product(*map(range, shape))):
        at = dict(zip(dimensions, place, strict=True))
        for name in inside:
            value = dataset[name].isel({d: at[d] for d in dataset[name].dims}).item()
            np.testing.assert_equal(frame[name].iloc[row], value)


def test_tables_of_other_dimensions() -> None:
    density = RESULTS["spectrum"].to_dataframe("draw node")
    assert list(density.columns) == ["draw", "node", "nodes", "masses"]
    np.testing.assert_array_equal(density.nodes, RESULTS["spectrum"].nodes.ravel())
    turned = RESULTS["spectrum"].to_dataframe("node draw")
    np.testing.assert_array_equal(turned.nodes, RESULTS["spectrum"].nodes.T.ravel())
    markers = RESULTS["surface"].to_dataframe("marker")
    assert markers.labels.tolist() == ["one", "two"]
    sweep = RESULTS["sweep"].to_dataframe()
    assert sweep.columns[:3].tolist() == ["lr", "batch", "seeds"]
    assert sweep.lr.tolist() == ["0.1", "0.2"]
    forms = RESULTS["stability"].to_dataframe().set_index(["form", "delay"]).limit
    assert forms["momentum", 1] == RESULTS["stability"].limit[1, 1]
    with pytest.raises(InputError, match=r"dims: 'z'.*'?x"):
        RESULTS["surface"].to_dataframe("z x")


def texts_of(page: str) -> list[str]:
    """The texts between the tags."""
    return [html.unescape(text) for text in re.findall(r">([^<>]+)<", page)]


@pytest.mark.parametrize("kind", slow_but(["surface", "noise"], KINDS))
def test_notebooks_show_a_picture_and_a_table(kind: str) -> None:
    text = RESULTS[kind]._repr_html_()
    (encoded,) = re.findall(r"<img [^>]*data:image/png;base64,([A-Za-z0-9+/=]+)'>", text)
    assert base64.b64decode(encoded).startswith(b"\x89PNG\r\n\x1a\n")
    assert len(text) < 400_000
    assert {row.name for row in RESULTS[kind].describe()} <= {*texts_of(text)}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_a_result_shows_its_numbers_at_one_glance(name: str) -> None:
    result: Any = SHOWN[name]
    lines = repr(result).splitlines()
    rows = [row for row in result.describe() if row.value == row.value]
    assert 2 <= len(lines) <= shown.LINES
    assert lines[0].startswith(type(result).__name__)
    assert lines[1].startswith(f"  {rows[0].name}")
    assert len(rows) <= shown.LINES - 1 or "more in summary()" in lines[-1]
    text = repr(result) + result.summary()
    assert not re.search(r"\(\d+,\)|\[\d|tensor\(|array\(|[0-9a-f]{64}", text)
    assert not any(f"{name} (" in text for name in getattr(result, "shapes", ()))
    assert repr(result.summary()) == result.summary() == shown.text_of(result)  # as a notebook shows it
    assert len(result.to_dataframe())
    assert drawing_of(type(result))  # tests/test_plots.py calls it


def test_a_tolerance_that_was_missed_is_shown_at_one_glance() -> None:
    result = dataclasses.replace(RESULTS["spectrum"], converged=False)
    assert "converged  NO" in repr(result).splitlines()[-2]
    assert len(repr(result).splitlines()) == shown.LINES


@pytest.mark.parametrize("kind", RESULTS)
def test_a_description_has_the_numbers_that_are_printed(kind: str) -> None:
    result = RESULTS[kind]
    rows = result.describe()
    assert len({row.name for row in rows}) == len(rows)
    lines = shown.text_of(result).splitlines()[1:]
    assert [line.split("  ")[1] for line in lines] == [row.name for row in rows]
    assert details.of_result(result)["describe"][0]["name"] == rows[0].name
    if isinstance(result, Measurement) and np.isfinite(result.value):
        known = [row for row in rows if row.value in (result.value, 100 * result.value)]
        assert known[0].error in (result.standard_error, 100 * result.standard_error)
        assert result.describe()[0].number in headline([result])


@pytest.mark.parametrize(
    ("row", "number", "text"),
    [
        (shown.Row("a", 12.3456, 0.21, "nat", "8 draws"), "12.3 ± 0.2 nat", "12.3456 ± 0.21 nat   8 draws"),
        (shown.Row("a", 0.5, 0.0), "0.5", "0.5   exact"),
        (shown.Row("a", 12345, unit="samples"), "12,345 samples", "12,345 samples"),
        (shown.Row("a", math.nan, unit="nat"), "–", "– nat"),
        (shown.Row("a", "NO", note="raise it"), "NO", "NO   raise it"),
        (shown.percent("a", 0.25, 0.01), "25.0 ± 1.0%", "25 ± 1%"),
        (shown.eigenvalue("a", -4.0, 0.5), "-4.0 ± 0.5 nat", "-4 ± 0.5 nat   ±: residual, relative residual 1.2e-01"),
    ],
)  # fmt: skip
def test_rows_in_words(row: shown.Row, number: str, text: str) -> None:
    assert (row.number, row.text) == (number, text)


@settings(max_examples=6)  # each draws a table
@given(st.text(max_size=99))
def test_texts_are_escaped_in_notebooks(label: str) -> None:
    hostile = f"<script>alert('{label}')</script>"
    surface = RESULTS["surface"]  # without a number, so that nothing is drawn
    shown = dataclasses.replace(surface, loss=surface.loss * np.nan, label=hostile, labels=(hostile, ""))
    text = shown._repr_html_()
    assert "<script" not in text
    assert {*re.findall(r"<(\w+)", text)} <= {
        *["b", "div", "i", "table", "tr", "th", "td", "details", "summary"]
    }


def test_a_result_that_cannot_be_drawn_shows_its_table() -> None:
    surface = RESULTS["surface"]
    text = dataclasses.replace(surface, loss=surface.loss * np.nan, label="<b>")._repr_html_()
    assert "<img" not in text
    no_picture = "no picture: loss: no value is finite, there is nothing to draw"
    assert {no_picture, "lowest loss", "Surface: <b>: test loss"} <= {*texts_of(text)}


def test_arrays_must_fit_their_dimensions() -> None:
    stability = RESULTS["stability"]
    with pytest.raises(ValueError, match=r"limit.*\(2, 3\).*\(3, 3\)"):
        dataclasses.replace(stability, limit=stability.limit[:2])
    with pytest.raises(ValueError, match=r"height.*\(3,\)"):
        Heights(np.arange(2.0), np.zeros(3))


@given(st.floats(-1e300, 1e300), st.floats(0, 1e300))
def test_every_number_has_words(value: float, error: float) -> None:
    words = shown.in_words(value, error)
    if error > 0:
        number, wrong = (float(part.replace(",", "")) for part in words.split(" ± "))
        assert abs(number - value) <= max(error, 1e-15 * abs(value))
        assert wrong == pytest.approx(error, rel=0.3, abs=1e-320)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 100.0], False), ([1.0, 100.1], True), ([1.0, np.nan, np.inf, 50.0], False), ([-1.0, 1e9], False),
        ([0.0, 1e9], False), ([np.nan], False), ([], False), ([5e-324, 1.0], True), ([1.0, 1.7e308], True),
    ],
)  # fmt: skip
def test_scales_are_logarithmic_above_a_ratio_of_100(values: list[float], expected: bool) -> None:
    assert shown.logarithmic(np.array(values)) == expected


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(0, 3))
@example([float(k * k) for k in range(400)], 1)  # more than the points that are shown
def test_running_quartiles_are_quantiles_of_the_window(values: list[float], holes: int) -> None:
    steps, column = np.arange(len(values), dtype=float), np.array(values)
    column[:holes] = np.nan
    at, quartiles = shown.running_quartiles(steps, column)
    known = np.isfinite(column)
    assert len(at) == min(shown.POINTS, known.sum())
    reach = shown.WINDOW / 2 * np.ptp(steps[known]) if known.any() else 0
    for place, quartile in list(zip(at, quartiles.T, strict=True))[:: max(1, len(at) // 5)]:
        inside = column[known & (np.abs(steps - place) <= reach)]
        np.testing.assert_allclose(quartile, np.quantile(inside, (0.25, 0.5, 0.75)))


def f1_score(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.softmax(1) * nn.functional.one_hot(targets, 3)).sum(1).mean()


def test_a_metric_has_its_name_and_no_unit_in_file_and_picture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = torch.randn(24, 4), torch.randint(3, (24,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    surface_of(landscape.Problem(model, f1_score, data)).save(tmp_path / "s.h5")
    again = landscape.Surface.load(tmp_path / "s.h5")
    assert (again.loss_name, again.loss_unit) == ("f1_score", "")
    figure = again.plot()
    said = " ".join(text.get_text() for text in figure.findobj(Text)).replace("\n", " ")
    assert "f1_score rises by" in said or "f1_score falls by" in said
    assert not re.search(" nat| by [-\N{MINUS SIGN}]", said)
    plt.close(figure)


def root_mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean().sqrt()


def surface_of(problem: landscape.Problem) -> Surface:
    return landscape.contour(problem, landscape.random_plane(problem), grid=(7, 7), span=1.0)


MEASURED: dict[str, Any] = {
    "contour": lambda p, q: surface_of(p),
    "basins": lambda p, q: landscape.basins(surface_of(p)),
    "trace": lambda p, q: landscape.trace(p),
    "compare": lambda p, q: landscape.compare([p, q], 4, draws=2, planes=2, rise=0.01),
    "smoothing": lambda p, q: landscape.smoothing(p, weights=torch.stack([p.weights, q.weights]), draws=2),
    "stability": lambda p, q: landscape.stability(p),
    "loss_change": lambda p, q: landscape.loss_change(p, p.weights, q.weights),
    "line": lambda p, q: landscape.line(p, p.weights, q.weights, points=3),
    "spectrum": lambda p, q: landscape.spectrum(p),
    "sharpness": lambda p, q: landscape.sharpness(p, rho=0.1),
}


@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), root_mean_square])
def test_only_likelihoods_are_in_nats_in_text_axes_and_captions(name: str, loss: Any) -> None:
    torch.manual_seed(0)
    data = torch.randn(12, 4), torch.rand(12, 3)
    result = MEASURED[name](*(landscape.Problem(nn.Linear(4, 3), loss, data) for _ in range(2)))
    figure = result.plot()
    drawn = " ".join(text.get_text() for text in figure.findobj(Text))
    nats = isinstance(loss, nn.CrossEntropyLoss)
    assert bool(re.search(r"\bnat\b", result.summary())) == nats
    assert nats or not re.search(r"\bnat\b", drawn)
    plt.close(figure)


def test_a_file_without_a_unit_is_in_nats(tmp_path: Path) -> None:
    problem = landscape.Problem(nn.Linear(2, 1), nn.MSELoss(), (torch.randn(8, 2), torch.randn(8, 1)))
    surface = landscape.contour(problem, landscape.random_plane(problem), grid=(3, 3))
    surface.save(tmp_path / "s.h5")
    with h5py.File(tmp_path / "s.h5", "a") as file:
        del file.attrs["loss_unit"], file.attrs["loss_name"]
    assert landscape.Surface.load(tmp_path / "s.h5").loss_unit == "nat"


@pytest.mark.parametrize("top", [1e4, 9.7e7, 1e300])
def test_a_window_of_absurd_losses_is_not_fine(top: float) -> None:
    problem = landscape.Problem(nn.Linear(2, 1), nn.MSELoss(), (torch.randn(8, 2), torch.randn(8, 1)))
    surface = landscape.contour(problem, landscape.random_plane(problem), grid=(9, 9))
    distance = np.hypot(*np.meshgrid(surface.x, surface.y)) / surface.span
    for height, fine in ((top, False), (50.0, True)):
        drawn = dataclasses.replace(surface, loss=0.3 + height * distance**2 / 2)
        (window,) = (finding for finding in drawn.check().findings if finding.subject == "window")
        assert window.fine == fine
    drawn.loss[4, 4] = np.nan
    assert "its loss is nan, nan above the lowest" in str(drawn.check())


def test_the_format_of_a_result_stands_in_its_class_line() -> None:
    with pytest.raises(
        InputError, match="schema: set in the class body, it must be in the class line: class"
    ):
        type("Mine", (Heights,), {"schema": "landscape.tests.mine"})
