"""Verdicts: intervals against a known truth, grades, and the pages on which they stand."""

from __future__ import annotations

import dataclasses
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
from landscape.paper import figure, pages
from landscape.paper.figures import edge
from landscape.paper.figures.large_batch import ends, judge_pairs
from landscape.paper.verdicts import (
    NEGLIGIBLE,
    Effect,
    by_seed,
    counted,
    difference,
    judged,
    outcome,
    paired_effect,
    ratio,
    rows_of,
    table,
)

FIGURES = Path(__file__).parents[1] / "figures"


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


def test_equal_is_what_lies_within_a_margin_of_zero() -> None:
    seeds = (1.0, 1.01, 0.985, 1.002)
    _, low, high = Effect("", "", seeds, ratio=True).interval
    edge = max(1 / low, high) - 1  # the two one-sided tests: the interval ends within a factor of 1 + margin

    def effect(margin: float, values: tuple[float, ...] = seeds) -> Effect:
        return Effect("", "", values, (1.0, math.inf), ratio=True, margin=margin)

    assert (effect(edge + 1e-9).equal, effect(edge - 1e-9).equal) == (True, False)
    assert outcome([effect(0.05), effect(0.05)]) == "no difference"
    assert effect(0.05).holds is None
    assert effect(0.05).answer == effect(0.05).entry()["reason"] == "equal within 5%"
    # One that is open or wide, has two seeds or no number is not equal, and what is decided stays so.
    for values in ((0.9, 1.1, 1.0), (1.0, 1.001), (1.0, math.nan, 1.0), (1.0, 1.0, 1.0)):
        assert outcome([effect(0.05, values)]) == outcome([effect(0.05), effect(0.05, values)]) == "undecided"
    more, less = (1.01, 1.011, 1.012), (0.99, 0.991, 0.989)
    assert [effect(0.05, values).answer for values in (more, less)] == ["as claimed", "not as claimed"]
    assert outcome([effect(0.05), effect(0.05, less)]) == "does not hold"
    unknown = Effect("", "", (0.0, math.nan, 0.0), exact=True, margin=1.0)
    assert (unknown.answer, outcome([unknown])) == ("open", "undecided")
    points = Effect("", "", (0.2, -0.3, 0.1), margin=1.0)
    assert points.answer == "equal within 1"
    lost = Effect("", "", (0.0, 0.0, 0.0), (-1.0, math.inf), margin=1.0)  # as good as, but both diverged
    assert (lost.equal, lost.holds, lost.reason[:16]) == (False, None, "the same numbers")
    assert counted([points, effect(0.05, more)]) == "1 of 2 as claimed, 1 equal within 1"
    assert outcome([Effect("", "", seeds, ratio=True, margin=0.05, untested="no data")]) == "not tested here"


def test_a_title_says_what_came_out_and_never_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    said, seeds = "A is better", (1.0, 1.1, 1.2)
    _, low, high = Effect("", "", seeds).interval
    shown = dataclasses.replace(
        figure.get("fig7"), finding=said, title="a and b", results={"n": "A is worse."}
    )
    monkeypatch.setattr(pages, "get", lambda name: shown)

    def title(*effects: Effect, scale: str = "laptop") -> str:
        monkeypatch.setattr(pages, "judged", lambda judge, rows: list(effects))
        return str(pages.verdict("fig7", scale, "")["finding"])

    def effect(border: float) -> Effect:
        return Effect("", "", seeds, (border, math.inf))

    # The boundary is the end of the interval: just below it the claim holds, just above the other end it does
    # not, and on both ends nothing is said.
    assert title(effect(low - 1e-9)) == said
    assert title(effect(low)) == title(effect(high)) == "A and b: 0 of 1 as claimed, 1 open"
    assert title(effect(high + 1e-9)) == "A is worse"
    # The sentence was written for these answers, at this scale.
    assert title(effect(high + 1e-9), scale="paper") == "A and b: 0 of 1 as claimed, 1 not"
    assert title(effect(high + 1e-9), effect(high)) == "A and b: 0 of 2 as claimed, 1 not, 1 open"
    two = Effect("", "", (1.0, 1.1))  # too few seeds, whatever they say
    assert title(effect(0.0), two) == "A and b: 1 of 2 as claimed, 1 open"
    assert title(Effect("", "", (), untested="no data")) == "A and b: 0 of 1 as claimed, 1 untested"


@pytest.fixture(scope="module")
def entries() -> dict[str, Any]:
    """The figures of the repository, judged once for all tests, which change nothing in it."""
    return pages.entries_in(FIGURES)


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
        result, _ = pages.result_of(name, entry["scale"], entry["effects"])
        holds = all(effect["holds"] for effect in entry["effects"])
        assert entry["finding"] == (figure.get(name).finding if holds else result.rstrip(".")), name
        assert entry["verdict"].startswith(f"{pages.graded(entry)}: {result}")
    assert entries["flatness"]["outcome"] == "holds"
    assert entries["fig7"]["outcome"] == "does not hold"


def test_the_pages_in_the_repository_are_those_of_its_data(entries: dict[str, Any]) -> None:
    written = {f"{name}.md": pages.details(name, entry) for name, entry in entries.items()}
    written |= {"README.md": pages.front(entries)}
    assert {path.name for path in FIGURES.glob("*.md")} == set(written)
    for name, text in written.items():
        assert (FIGURES / name).read_text(encoding="utf-8") == text, (
            f"landscape figures {name[:-3]} writes it"
        )


def test_the_front_page_says_each_claim_what_came_out_and_one_effect(entries: dict[str, Any]) -> None:
    effects = {effect["text"] for entry in entries.values() for effect in entry["effects"]}
    for name, entry in entries.items():
        own = figure.get(name)
        assert own.claims == entry["claims"]
        assert len(own.claims.split()) <= 15, name
        sentence, detail = pages.result_of(name, "laptop", entry["effects"])
        assert sentence.endswith("."), name
        assert len(sentence.split()) <= 17, name
        assert pages.result_of(name, "paper", entry["effects"]) == ("", "")
        assert own.effect in {"", *(effect["where"] for effect in entry["effects"])}, name
        # An effect stands in a text as the tests have it: "+0.18 (-0.049 to +0.4)".
        assert (
            set(re.findall(r"[-+]?[\d.e-]+ \([-+]?[\d.e-]+ to [-+]?[\d.e-]+\)", sentence + detail)) <= effects
        )


def test_a_page_begins_with_the_verdicts_and_follows_the_csv(tmp_path: Path) -> None:
    source = FIGURES
    for suffix in (".json", ".csv"):
        text = (source / f"flatness{suffix}").read_text(encoding="utf-8")
        (tmp_path / f"flatness{suffix}").write_text(text, encoding="utf-8")
    lines = pages.page(tmp_path).read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("| ") and "<br>[flatness](flatness.md) |" in line)
    result, detail = pages.result_of("flatness", "laptop", 4 * [{"answer": "as claimed"}])
    assert f"| **Holds.** {result} | **2.83 (2.09 to 3.83)**: rise of the loss around w_a, SSGD" in row
    assert '<img src="flatness.png" width="160" alt="' in row
    own = (tmp_path / "flatness.md").read_text(encoding="utf-8")
    assert f"\n\n**Holds.** {detail}\n\n" in own
    halved = rows_of((tmp_path / "flatness.csv").read_text())
    (tmp_path / "flatness.csv").write_text(table(halved[halved["seed"] < 2]))
    changed = pages.page(tmp_path).read_text(encoding="utf-8")
    assert (
        "| **Undecided (0 of 4 as claimed, 4 open).** |" in changed
    )  # the sentence was written for another outcome
    assert detail not in (tmp_path / "flatness.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "flatness.json").read_text())["outcome"] == "undecided"
    (tmp_path / "flatness.csv").write_text("a,b\n1,2,3\n4,5,6,7\n")
    with pytest.raises(OperationError, match=r"flatness.csv: damaged \(Error tokenizing.*\); make") as caught:
        pages.page(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "flatness.csv").unlink()
    with pytest.raises(OperationError, match="flatness.csv"):
        pages.page(tmp_path)


def test_what_we_found_rests_on_outcomes_that_the_figures_have(entries: dict[str, Any]) -> None:
    sentences = figure.figures_toml()["findings"]
    assert pages.findings(entries) == [f"- {each['text']}" for each in sentences]
    assert len(sentences) == 6
    for each in sentences:
        assert set(each["rests"]) <= set(figure.names())
    assert pages.findings({}) == []
    assert f"{NEGLIGIBLE:.0%} for times" in pages.words("rules")
    for name in figure.names():
        assert set("".join(figure.get(name).results)) <= set("anoeu")
    # With another outcome a sentence is gone.
    (first, *_), name = sentences, next(iter(sentences[0]["rests"]))
    assert f"- {first['text']}" not in pages.findings(entries | {name: {"outcome": "undecided"}})


def test_other_pages_have_the_numbers_of_the_figures(entries: dict[str, Any]) -> None:
    compared = {name: {c["what"]: c["ours"] for c in entry["compared"]} for name, entry in entries.items()}
    draft, page = (
        (FIGURES.parent / name).read_text(encoding="utf-8")
        for name in ("paper/paper.md", "docs/explanation/eq4.md")
    )
    assert f"It has {len(entries)} figures and tables" in draft
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
    same = {"task": "MLP", "chance_percent": 90.0}
    rows = [
        same | {"algorithm": a, "lr": 0.5 * 2**k, "seed": s, "test_error_percent": e + s}
        for a, values in errors.items()
        for k, e in enumerate(values)
        for s in range(3)
    ]
    (effect,) = edge._judge_rates(pd.DataFrame(rows))
    assert effect.values == (1.0, 1.0, 1.0)  # from 1 to 2
    assert effect.holds is True
    too_low = {"lr": 0.25, "test_error_percent": 80.0}  # does not converge in the steps given
    slow = [r | too_low for r in rows if r["lr"] == 0.5]
    assert next(edge._judge_rates(pd.DataFrame(slow + rows))).values == (1.0, 1.0, 1.0)


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
    sharp, gap, *_ = edge._judge_lazy(pd.DataFrame(rows))
    assert sharp.values == pytest.approx((1.0, 1.0, 1.0))
    assert gap.values == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
