"""The coverage of lines and of branches, each against its limit in pyproject.toml.

coverage.py's own ``fail_under`` has one limit for both together.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

KINDS = {"lines": ("covered_lines", "num_statements"), "branches": ("covered_branches", "num_branches")}


def main(report: Path) -> int:
    """Print both shares of coverage.py's JSON ``report``; 1 where one is below its limit, else 0."""
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    totals = json.loads(report.read_text())["totals"]
    below = False
    for kind, limit in settings["tool"]["landscape"]["coverage"].items():
        covered, of = (totals[key] for key in KINDS[kind])
        share = 100 * covered / of
        below |= share < limit
        print(f"{kind}: {covered:,} of {of:,}, {share:.1f}%, at least {limit}%")
    return int(below)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
