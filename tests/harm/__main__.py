"""``python -m tests.harm {files,commands} [COUNT] [PROCESSES]``: 20,000 files, or 500 events in the life of commands.

Prints what became of them. The exit code is 1 where something happened that must not; each such thing is a line.
"""

from __future__ import annotations

import os
import sys
import time

from tests.harm import commands, files, run


def main() -> int:
    """Print what became of how many; 1 if any of it must not be."""
    kind, *numbers = sys.argv[1:] or ["files"]
    count = int(numbers[0]) if numbers else {"files": 20_000, "commands": 500}[kind]
    processes = int(numbers[1]) if len(numbers) > 1 else os.cpu_count() or 1
    begun = time.monotonic()
    if kind == "files":
        todo = files.plan(count)
        tally = run(files.attack, [todo[i::processes] for i in range(processes)])
    else:
        tally = commands.run(count, [*commands.CASES], processes)
    for name, n in sorted(tally.counts.items()):
        print(f"{n:6} {name}")
    print(*tally.wrong, sep="\n")
    print(
        f"{tally.counts.total():,} {kind}, {len(tally.wrong)} wrong, {time.monotonic() - begun:.0f} s; "
        f"at most {tally.most:.1f} {'MiB in a process' if kind == 'files' else 's of waiting after a signal'}"
    )
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
