"""What DPSGD-2020 prints: its tables as CSV, read by name."""

from __future__ import annotations

import csv
from pathlib import Path


def rows(table: str) -> list[dict[str, str]]:
    """The rows of TABLE.csv, such as "table3_cifar10", by column."""
    with (Path(__file__).parent / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
