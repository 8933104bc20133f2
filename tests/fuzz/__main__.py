"""``python -m tests.fuzz [INPUTS] [PROCESSES]``: 20,000 inputs in as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.fuzz import harness


def main() -> int:
    """Print what became of how many inputs; 1 if any of them did what none may."""
    inputs = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    begun, todo = time.monotonic(), harness.plan(inputs)
    # Each process of the pool imports everything once; its children inherit that.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        outcomes = pool.map(harness.run, [todo[i::processes] for i in range(processes)])
    counts: Counter[str] = sum((o.counts for o in outcomes), Counter())
    for name, count in sorted(counts.items()):
        print(f"{name:24} {count:6}")
    failures = [line for o in outcomes for line in o.failures]
    print("\n".join(failures))
    peak = max(o.peak for o in outcomes) / 2**20
    print(
        f"{sum(counts.values()):,} inputs, {len(failures)} failures, {time.monotonic() - begun:.0f} s, "
        f"at most {peak:.0f} MiB in a process"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
