"""The rule of the scales on which numbers are shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landscape.results.shown import LOG_RATIO, logarithmic


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 100.0], False),
        ([1.0, 100.1], True),
        ([1.0, np.nan, np.inf, 50.0], False),
        ([-1.0, 1e9], False),
        ([0.0, 1e9], False),
        ([np.nan], False),
        ([], False),
        ([5e-324, 1.0], True),
        ([1.0, 1.7e308], True),
    ],
)
def test_the_rule(values: list[float], expected: bool) -> None:
    assert logarithmic(np.array(values)) == expected


@given(st.lists(st.floats(1e-200, 1e200), min_size=1), st.floats(1e-3, 1e3))
def test_the_rule_depends_on_ratios_alone(values: list[float], factor: float) -> None:
    ratio = max(values) / min(values)
    if abs(ratio / LOG_RATIO - 1) > 1e-9:
        assert (
            logarithmic(np.array(values)) == (ratio > LOG_RATIO) == logarithmic(factor * np.array([values]))
        )
