"""Each combination of the battery is right, or refused with a message that names the cause and the remedy."""

from __future__ import annotations

import pytest

from tests.battery import cases_activations, cases_data, cases_layers, cases_losses, cases_models, cases_sequences
from tests.battery.case import Case
from tests.battery.checks import run

THEMES = (cases_activations, cases_layers, cases_sequences, cases_models, cases_losses, cases_data)
CASES: list[Case] = [case for theme in THEMES for case in theme.CASES]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * c.slow, id=c.name.replace(" ", "-")) for c in CASES]
)
def test_right_or_refused(case: Case) -> None:
    found = run(case)
    assert not found.wrong, f"{case.name}:\n" + "\n".join(found.wrong)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("activation Tanh", "activation ReLU", "MSE")])
def test_the_compiled_path(case: Case) -> None:
    assert not run(case, compiled=True).wrong


def test_there_are_at_least_120_combinations_of_different_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 120
