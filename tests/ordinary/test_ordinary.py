"""Each first use has the outcome that it must have, and uses.md shows these outcomes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import slow_but
from tests.ordinary.__main__ import KINDS
from tests.ordinary.follow import differs, follow, remedied
from tests.ordinary.use import Truth, Use
from tests.ordinary.uses import NEED_TRANSFORMERS, PLAIN, SHARE, USES

PAGE = Path(__file__).parent / "uses.md"
ALONE = [use for theme in PLAIN for use in theme]


def _follow(use: Use) -> None:
    found = differs(use, follow(use))
    assert not found, f"{use.title}: {found}"


@pytest.mark.parametrize("use", slow_but(ALONE[SHARE - 1 :: SHARE], ALONE), ids=lambda use: use.id)
def test_first_use(use: Use) -> None:
    _follow(use)


@pytest.mark.slow
@pytest.mark.parametrize("use", [use for theme in NEED_TRANSFORMERS for use in theme], ids=lambda use: use.id)
def test_first_use_of_hugging_face(use: Use) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed; make ordinary-uses")
    _follow(use)


def test_each_use_says_what_it_expects() -> None:
    assert len({use.id for use in USES}) == len({use.title for use in USES}) == len(USES) >= 125
    assert {use.expected for use in USES} == set(KINDS)
    assert [use.id for use in USES if bool(use.why) != (use.expected != "right")] == []
    assert [use.id for use in USES if use.undefined and use.expected == "right"] == []


def test_of_uses_that_have_one_answer_nineteen_of_twenty_are_right_the_first_time() -> None:
    defined = [use for use in USES if not use.undefined]
    right = sum(use.expected == "right" for use in defined)
    assert right >= 0.95 * len(defined)
    share = f"{100 * right / len(defined):.0f}%"
    for page in (PAGE, PAGE.parents[2] / "README.md"):
        text = page.read_text()
        assert f"{right} of" in text
        assert share in text


def test_sixty_uses_follow_public_scripts_and_twenty_have_small_batches() -> None:
    scripts = [use for use in USES if use.source]
    assert len(scripts) >= 60
    assert sum(use.small for use in scripts) >= 20
    assert [use.id for use in scripts if not re.fullmatch(r"[\w.-]+/[\w.-]+: [\w./-]+", use.source)] == []
    defined = [use for use in scripts if not use.undefined]
    right = sum(use.expected == "right" for use in defined)
    assert f"{len(defined)} of them have one answer, and {right} of these are right" in PAGE.read_text()


def test_the_page_has_each_use_with_its_outcome() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| .*\|$", PAGE.read_text(), re.MULTILINE)
    rows = [row for row in rows if row[0] not in ("theme", "---")]
    uses = [use for use in USES if not use.source] + [use for use in USES if use.source]
    assert rows == [(use.theme, use.title, KINDS[use.expected]) for use in uses]


def test_a_wrong_reference_is_seen() -> None:
    """Derivatives of the reference are held against differences of its loss."""
    use = next(use for use in USES if use.name == "simsiam")
    assert "gradient" in Truth(use, use.total).not_of_the_loss()
    use = next(use for use in USES if use.name == "byol")
    truth = Truth(use, use.total)
    assert truth.not_of_the_loss() == ""
    differences = truth.hessian(truth.center, differences=True)
    torch.testing.assert_close(truth.hessian(truth.center), differences, rtol=1e-5, atol=1e-7)


def test_another_number_is_wrong_and_so_is_a_remedy_that_fails() -> None:
    use = next(use for use in USES if use.name == "autoencoder")
    other = dataclasses.replace(use, total=lambda m, loss, data: 1.001 * use.total(m, loss, data))
    assert follow(other).kind == "wrong"
    assert remedied(use, "landscape.Problem(model, loss, data)") == ""
    assert "NameError" in remedied(use, "landscape.Problem(model, loss, batches)")
    assert "expected" in remedied(use, "landscape.Problem(model, loss, data, weight_decay=1.0)")
    assert "not a Problem" in remedied(use, "loss")
