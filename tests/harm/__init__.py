"""Damaged and hostile files for every function that reads files; commands that are killed at random moments."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """How often what happened, what must not, and the largest number of MiB taken or seconds waited."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    most: float = 0.0

    def add(self, other: Tally) -> None:
        self.counts += other.counts
        self.wrong += other.wrong
        self.most = max(self.most, other.most)


def run(work: Callable[[Any], Tally], shares: Sequence[Any]) -> Tally:
    """What comes of all ``shares``, each in a process of its own."""
    tally = Tally()
    # Each process imports everything once; its children inherit that.
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(work, shares):
            tally.add(part)
    return tally
