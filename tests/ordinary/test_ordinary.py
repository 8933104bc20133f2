"""Each first use has the outcome that it must have."""

from __future__ import annotations

import pytest

from tests.conftest import slow_but
from tests.ordinary.follow import differs, follow
from tests.ordinary.uses import QUICK, USES
from tests.ordinary.use import Use


@pytest.mark.parametrize("use", slow_but(QUICK, USES), ids=lambda use: f"{use.theme}-{use.name}")
def test_first_use(use: Use) -> None:
    found = differs(use, follow(use))
    assert not found, f"{use.title}: {found}"
