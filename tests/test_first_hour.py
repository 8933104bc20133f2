"""The stranger's check: scripts that were written from names alone run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.first_hour.from_names import TASKS


def test_three_tasks_for_each_of_six_parts() -> None:
    assert len(TASKS) == 18
    assert all(task.__doc__ for task in TASKS.values())


@pytest.mark.parametrize("name", TASKS)
def test_a_script_from_names_runs(name: str, tmp_path: Path) -> None:
    TASKS[name](tmp_path)
