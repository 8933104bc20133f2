"""A few of the events of ``make chaos``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.chaos.__main__ import run
from tests.chaos.cases import ALL, difference


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in Linux's /proc")
@pytest.mark.slow
def test_a_run_that_is_disturbed_comes_to_the_same_end() -> None:
    cases = [case for case in ALL if case.name in ("train, 1 process", "train, 2 processes")]
    tally = run(12, cases, seed=1, timeout=20.0)
    assert tally.wrong == []
    assert tally.count() >= 12


def test_a_difference_is_found() -> None:
    a = {"x": np.array([1.0, np.nan]), "y": "text"}
    assert difference(a, dict(a)) == ""
    assert difference(a, a | {"x": np.array([1.0, 0.0])}) == "x"
    assert difference(a, {"x": a["x"]}) == "y: only in one"
    assert len(ALL) > 15
