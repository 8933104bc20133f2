"""``python -m tests.ordinary [WORDS…]``: the page of the docs, or the uses whose names contain a word."""

from __future__ import annotations

import sys
import time

from tests.ordinary.follow import differs, follow
from tests.ordinary.uses import USES


def main() -> int:
    words = sys.argv[1:]
    failing = 0
    for use in USES:
        if words and not any(word in f"{use.theme}-{use.name}" for word in words):
            continue
        begun = time.monotonic()
        outcome = follow(use)
        found = differs(use, outcome)
        failing += bool(found)
        print(f"{use.theme}-{use.name}: {time.monotonic() - begun:.1f} s: {'FAIL ' + found if found else 'ok ' + outcome.kind}")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
