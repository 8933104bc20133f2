"""Verdicts: intervals against a known truth, grades, and the pages on which they stand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from landscape.core.errors import OperationError
from landscape.paper import figure, gallery
from landscape.paper.figures import edge
from landscape.paper.figures.large_batch import ends, judge_pairs
from landscape.paper.verdicts import (
    OUTCOMES,
    SHOWN,
    Effect,
    by_seed,
    difference,
    finding,
    judged,
    outcome,
    paired_effect,
    ratio,
    rows_of,
    table,
)

FIGURES = Path(__file__).parents[1] / "figures"
RESULTS = Path(__file__).parents[1] / "docs" / "results.md"


def test_an_undecided_claim_has_each_effect_with_its_reason() -> None:
    open_ = [Effect(f"network {i}", "points", (1.0, -1.0, 1.1)) for i in range(SHOWN + 1)]
    untold = Effect("network z", "points", (), untested="nothing was trained")
    text = gallery.sizes({"effects": [effect.entry() for effect in [*open_, untold]]})
    first, *shown, more = re.split(r"; (?=network|\d)", text)
    assert (first, more) == ("nothing was trained", "1 more below")
    assert shown == [f"{e.where}, points: {e.text} ({e.reason})" for e in open_[:SHOWN]]


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=9))
def test_intervals_are_students(values: list[float]) -> None:
    mean, low, high = Effect("", "", tuple(values)).interval
    error = scipy.stats.sem(values)
    if error > 1e-9:
        expected = scipy.stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert (low, high) == pytest.approx(expected, abs=1e-9)
    ratios = Effect("", "", tuple(np.exp(values)), ratio=True).interval
    assert ratios == pytest.approx((math.exp(mean), math.exp(low), math.exp(high)), rel=1e-9)


@pytest.mark.parametrize(("values", "claimed", "holds", "reason"), [
    ((1.0, 1.1, 1.2), (0, math.inf), True, ""),
    ((-1.0, -1.1, -1.2), (0, math.inf), False, ""),
    ((1.0, -1.0, 1.1), (0, 9), None, "the interval contains the border; about 43 seeds would decide"),
    ((5.0,), (0, math.inf), None, "1 seed, a verdict needs 3"),
    ((), (0, math.inf), None, "no seeds, a verdict needs 3"),
    ((0.08, 0.081, 0.082), (-0.05, 0.05), False, ""),
    ((1.0, math.nan, 1.0), (0, math.inf), None, "not finite"),
])  # fmt: skip
def test_an_effect_counts_from_three_seeds_and_with_an_interval_on_one_side(
    values: tuple[float, ...], claimed: tuple[float, float], holds: bool | None, reason: str
) -> None:
    effect = Effect("", "", values, claimed)
    assert (effect.holds, effect.reason) == (holds, reason)
    assert json.loads(json.dumps(effect.entry()))["holds"] is holds  # no NaN that JSON has not


def test_grades() -> None:
    good, bad, open_ = (Effect("", "", v) for v in ((1.0, 1.1, 1.2), (-1.0, -1.1, -1.2), (1.0, -1.0, 1.1)))
    assert outcome([good]) == outcome([good, good]) == "holds"
    assert outcome([good, open_]) == outcome([good, bad]) == "holds in part"
    assert outcome([bad]) == outcome([bad, open_]) == "does not hold"
    assert outcome([open_]) == outcome([Effect("", "", (1.0,))]) == "undecided"
    assert outcome([]) == outcome([Effect("", "", (), untested="it cannot be")]) == "not tested here"
    assert Effect("", "", (1.0, -1.0, 0.0)).reason.endswith("; 1000 would not decide")
    # Between two borders the nearer one counts; ratios are compared as logarithms.
    assert Effect("", "", (0.9, 1.9, 1.4), (0.0, 2.0)).reason.endswith("; about 6 seeds would decide")
    logs = tuple(np.exp([0.9, 1.9, 1.4]))
    assert Effect("", "", logs, (1.0, math.exp(2)), ratio=True).reason.endswith(
        "; about 6 seeds would decide"
    )
    assert outcome([Effect("", "", (3.0,), exact=True)]) == "holds"
    assert Effect("", "", (1.0, 2.0, 3.0), untested="a reason").holds is None


def test_a_sentence_states_no_more_than_the_intervals_allow() -> None:
    said, seeds = "A is better", (1.0, 1.1, 1.2)
    _, low, high = Effect("", "", seeds).interval

    def effect(border: float) -> Effect:
        return Effect("", "", seeds, (border, math.inf))

    # The boundary is the end of the interval: just below it the claim holds, just above the other end it does
    # not, and on both ends nothing is said.
    assert finding([effect(low - 1e-9)], said) == said
    assert finding([effect(low)], said) == finding([effect(high)], said) == f"Undecided with 3 seeds: {said}"
    assert finding([effect(high + 1e-9)], said) == f"Does not hold (not in 1 of 1 tests): {said}"
    two = Effect("", "", (1.0, 1.1))  # too few seeds, whatever they say
    assert finding([two], said) == f"Undecided with 2 seeds: {said}"
    assert finding([effect(0.0), two], said) == f"Holds in 1 of 2 tests (1 open): {said}"
    assert finding([Effect("", "", (), untested="no data")], said) == f"Not tested here: {said}"


@pytest.fixture(scope="module")
def entries() -> dict[str, Any]:
    """The gallery, judged once for all tests, which change nothing in it."""
    return gallery.entries_in(FIGURES)


def test_pairs_are_those_of_a_seed() -> None:
    rows = [{"seed": s, "a": name, "x": v} for s, name, v in [(0, "p", 1.0), (1, "p", 2.0), (1, "q", 5.0)]]
    rows = rows_of(table(pd.DataFrame(rows)))
    p, q = (by_seed(rows, "x", a=name) for name in "pq")
    assert difference(q, p) == paired_effect("", "", rows, "x", a=("q", "p")).values == (3.0,)
    assert ratio(q, p) == paired_effect("", "", rows, "x", a=("q", "p"), times=True).values == (2.5,)
    assert judged(lambda rows: [Effect("", "", tuple(by_seed(rows, "y")))], rows)[0].reason == (
        "its CSV has no numbers by seed (y)"
    )


def test_the_verdicts_in_the_repository_are_those_of_its_data(entries: dict[str, Any]) -> None:
    folder = FIGURES
    assert set(entries) <= set(figure.names())
    for name, entry in entries.items():
        kept = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        assert (kept["outcome"], kept["effects"]) == (entry["outcome"], entry["effects"]), name
        for effect in entry["effects"]:  # no verdict on one seed
            assert effect["holds"] is None or effect["seeds"] == 0 or effect["seeds"] >= 3
        sentence = figure.get(name).finding
        assert (entry["finding"] == sentence) == all(effect["holds"] for effect in entry["effects"]), name
        assert entry["finding"].endswith(sentence)
        assert entry["verdict"].startswith(f"{entry['finding']}.")
    assert entries["flatness"]["outcome"] == "holds"
    assert entries["fig7"]["outcome"] == "does not hold"


def test_a_page_begins_with_the_verdicts_and_follows_the_csv(tmp_path: Path) -> None:
    source = FIGURES
    for suffix in (".json", ".csv"):
        text = (source / f"flatness{suffix}").read_text(encoding="utf-8")
        (tmp_path / f"flatness{suffix}").write_text(text, encoding="utf-8")
    lines = gallery.page(tmp_path).read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("| ") and "[flatness](#flatness)" in line)
    assert "**holds**" in row
    assert '<img src="flatness.png" width="240" alt="' in row
    (of_flatness,) = figure.get("flatness").found.values()
    assert f"What we found: {of_flatness}" in lines
    assert lines.index(row) < lines.index("## flatness")
    version = json.loads((source / "flatness.json").read_text(encoding="utf-8"))["version"]
    assert any(f"drawn by version {version}" in line for line in lines)
    halved = rows_of((tmp_path / "flatness.csv").read_text())
    (tmp_path / "flatness.csv").write_text(table(halved[halved["seed"] < 2]))
    changed = gallery.page(tmp_path).read_text(encoding="utf-8")
    assert "**undecided**" in changed
    assert "What we found: " not in changed  # it was written for another outcome
    assert json.loads((tmp_path / "flatness.json").read_text())["outcome"] == "undecided"
    (tmp_path / "flatness.csv").write_text("a,b\n1,2,3\n4,5,6,7\n")
    with pytest.raises(
        OperationError, match=r"flatness.csv: damaged \(Error tokenizing data.*\); make"
    ) as caught:
        gallery.page(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "flatness.csv").unlink()
    with pytest.raises(OperationError, match="flatness.csv"):
        gallery.page(tmp_path)


def test_what_we_found_rests_on_outcomes_that_the_gallery_has(entries: dict[str, Any]) -> None:
    sentences = figure.declared()["findings"]
    assert all(each["text"] in gallery.found(entries) for each in sentences)
    for each in sentences:
        assert set(each["rests"]) <= set(figure.names())
    assert gallery.found({}) == ""
    for name in figure.names():
        assert set(figure.get(name).found) <= set(OUTCOMES)
    # With another outcome a sentence is gone.
    (first, *_), name = sentences, next(iter(sentences[0]["rests"]))
    assert first["text"] not in gallery.found(entries | {name: {"outcome": "undecided"}})


def _results_page(page: str, entries: dict[str, Any]) -> str:
    """``page`` with the claims, and the errors of Figure 2's runs, as the gallery has them."""
    errors = []
    for part, middle in {"a": "median", "b": "mean"}.items():
        rows = rows_of((FIGURES / f"fig2{part}.csv").read_text(encoding="utf-8"))
        by = rows.pivot(index="algorithm", columns="seed", values="test_error_percent")
        paper = {each["what"]: each["paper"] for each in entries[f"fig2{part}"]["compared"]}
        for name in ("SSGD", "SSGD*", "DPSGD"):
            values = by.loc[name]
            here = f"{middle} {values.agg(middle):.2f}" + (f" ± {values.std():.2f}" if part == "b" else "")
            cells = [
                f"`mnist-fig2{part}-{name.lower().replace('*', '-noise')}`",
                *(f"{v:.2f}" for v in values),
            ]
            errors.append(" | ".join(["", *cells, here, paper[f"test error of {name} (%)"], ""]).strip())
    head = [
        "| recipe | 0 | 1 | 2 | 3 | 4 | here | paper |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    parts = {
        "errors": "\n".join(head + errors),
        "claims": "\n".join(gallery.overview(entries, "../figures/")),
        "found": gallery.found(entries),
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name}: python -m tests.test_verdicts -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def test_the_page_of_results_has_the_numbers_of_the_gallery(entries: dict[str, Any]) -> None:
    page = RESULTS.read_text(encoding="utf-8")
    assert _results_page(page, entries) == page, "python -m tests.test_verdicts writes it"
    # Elsewhere on the page an effect stands as the gallery has it: "+0.18 (-0.049 to +0.4)".
    effects = {e["text"] for entry in entries.values() for e in entry["effects"]}
    own = re.sub(r"<!-- (\w+): python.*?<!-- end of \1 -->", "", page, flags=re.DOTALL)
    quoted = re.findall(r"[-+]?[\d.e-]+ \([-+]?[\d.e-]+ to [-+]?[\d.e-]+\)", own)
    assert quoted
    assert set(quoted) <= effects


def test_other_pages_have_the_numbers_of_the_gallery(entries: dict[str, Any]) -> None:
    compared = {name: {c["what"]: c["ours"] for c in entry["compared"]} for name, entry in entries.items()}
    draft, page = (
        (FIGURES.parent / name).read_text(encoding="utf-8")
        for name in ("paper/paper.md", "docs/explanation/eq4.md")
    )
    assert f"Its gallery has {len(entries)} figures and tables" in draft
    dpsgd, ssgd = (float(compared["fig2a"][f"test error of {a} (%)"].split()[0]) for a in ("DPSGD", "SSGD"))
    assert f"is {dpsgd:.1f}% with DPSGD and {ssgd:.1f}% with SSGD" in draft
    rows = rows_of((FIGURES / "smoothing.csv").read_text(encoding="utf-8"))
    rows = rows[rows["checkpoint"].str.startswith("dpsgd")]
    more = 100 * (rows["lambda_smoothed"] / rows["lambda_max"] - 1)
    assert f"by {more.min():.0f} to {more.max():.0f}%" in draft
    what = "cross term of Δ_DP, Figure 2({}): median size; mean ± standard error"
    a, b = (compared["noise-split"][what.format(part)].split("; ")[1].replace("-", "−") for part in "ab")
    assert f"it is {a} of $\\Delta_{{DP}}$ in (a) and {b} in (b)" in page
    low, high = compared["eq4"]["Eq. 4, α² tr(HCH), of the definition"].split("(")[1].strip(")").split(" to ")
    assert f"is {low} to {high} times the definition" in page


def test_ends_of_runs_that_diverged() -> None:
    rows = [
        {"seed": s, "epoch": e, "test_accuracy": v, "diverged": d}
        for s, e, v, d in [(0, 1, 40.0, ""), (0, 2, 60.0, ""), (1, 1, 30.0, "mean")]
    ]
    found = ends(pd.DataFrame(rows), "test_accuracy", "test_accuracy")
    assert found.to_dict() == {0.0: 60.0, 1.0: 10.0}


def test_the_largest_rate_that_converges_is_the_last_without_a_failure_before() -> None:
    errors = {"SSGD": (10.0, 11.0, 90.0, 12.0), "DPSGD": (10.0, 12.0, 13.0, 90.0)}
    rows = [
        {
            "task": "MLP",
            "algorithm": a,
            "lr": 0.5 * 2**k,
            "seed": s,
            "test_error_percent": e + s,
            "chance_percent": 90.0,
        }
        for a, values in errors.items()
        for k, e in enumerate(values)
        for s in range(3)
    ]
    (effect,) = edge._judge_rates(pd.DataFrame(rows))
    assert effect.values == (1.0, 1.0, 1.0)  # from 1 to 2
    assert effect.holds is True
    too_low = {"lr": 0.25, "test_error_percent": 80.0}  # does not converge in the steps given
    slow = [r | too_low for r in rows if r["lr"] == 0.5]
    assert edge._judge_rates(pd.DataFrame(slow + rows))[0].values == (1.0, 1.0, 1.0)


def test_table_pairs_are_better_or_as_good() -> None:
    def holds(gap: float, at: str, quantity: str = "test_accuracy") -> list[bool | None]:
        rows = pd.DataFrame(
            {"algorithm": a, "network": "n", "at": at, "seed": s, "ours": 50 + s + d * gap}
            for a, d in (("SSGD", 0), ("DPSGD", 1), ("DPSGD ATC", 2))
            for s in range(3)
        )
        return [e.holds for e in judge_pairs(rows, quantity, small="batch 1")]

    assert holds(1.0, "lr 1") == [True, True]
    assert holds(-0.4, "lr 1") == [False, False]
    assert holds(-0.4, "batch 1") == [True, True]
    assert holds(1.0, "lr 1", "test_loss") == [False, False]


def test_powers_of_lazy_mixings_are_found() -> None:
    cells = (cell.values for cell in figure.get("edge-lazy").runs("smoke"))
    families = [(values["panel"], values["setting"]) for values in cells]
    rows = [
        {"panel": family, "setting": name, "seed": seed, "omega_min": 0.1 * k, "gap": 0.9 / (1 + (k * 7) % 5)}
        | {"plateau_lr_lambda_max": (1 + 0.1 * k) * (1 + 0.01 * seed)}
        for k, (family, name) in enumerate(families)
        for seed in range(3)
    ]
    sharp, gap = edge._judge_lazy(pd.DataFrame(rows))[:2]
    assert sharp.values == pytest.approx((1.0, 1.0, 1.0))
    assert gap.values == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)


if __name__ == "__main__":
    written = _results_page(RESULTS.read_text(encoding="utf-8"), gallery.entries_in(FIGURES))
    RESULTS.write_text(written, encoding="utf-8")
