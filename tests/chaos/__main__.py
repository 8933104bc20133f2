"""``python -m tests.chaos``: commands are killed, stopped and crowded at random moments, and go on.

Each command is started again and again, and something is done to it at a moment drawn from the time that it
takes; once it comes to its end, its results must be those of a run that nobody touched, to the bit. After each
event no process of it may be left within LEFT seconds, nobody may wait longer than the command's --timeout and
15 s, and every result file that was there must still be whole.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cases import ALL, BEYOND, TIMEOUT, Case, contents, difference, prepare

LEFT = 10.0
TOKEN = "LANDSCAPE_CHAOS"  # marks in the environment which processes belong to a command
ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
COMPLETE = ("holds a finished", "exists already, it is not overwritten")
_MAIN = re.compile(r'landscape/cli/__init__\.py", line \d+, in main\n')
EVENTS = (*ENDING * 3, signal.SIGKILL, signal.SIGKILL, "stop", "stop and go on", "second writer")


@dataclass
class Tally:
    """What happened, and what should not have."""

    events: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self) -> int:
        return sum(self.events.values())


class Lane:
    """One command after another; several lanes run at the same time."""

    def __init__(self, tally: Tally, base: Path, work: Path, seed: int, timeout: float) -> None:
        self.tally, self.base, self.work, self.timeout = tally, base, work, timeout
        self.rng, self.token = random.Random(seed), f"{os.getpid()}-{seed}"

    def start(self, case: Case, out: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "landscape", *case.command(self.base, out, self.timeout)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN: self.token, "OMP_NUM_THREADS": "1"},
            preexec_fn=_hear,
        )

    def whole(self, case: Case) -> float:
        """The case by itself, as the others are compared with; seconds."""
        out, clock = self.work / "whole" / case.name, time.monotonic()
        out.mkdir(parents=True)
        process = self.start(case, out)
        _, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"{case.name}: {err}")
        seconds = time.monotonic() - clock
        print(f"{case.name}: {seconds:.1f} s by itself", flush=True)
        return seconds

    def chain(self, case: Case, seconds: float, events: int) -> None:
        """Run the case to its end, with things done to it on the way, ``events`` in all at most."""
        out = self.work / self.token / case.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for turn in range(20):
            last = turn == 19 or self.tally.count() >= events
            process = self.start(case, out)
            if not last:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.rng.uniform(0, seconds))
            if process.poll() is None and not last:
                self.disturb(case, process, out)
            err = self.ends(case, process)
            # Ended between its last file and its exit: the next one says that all is there.
            if process.returncode == 0 or (turn and any(words in err for words in COMPLETE)):
                break
            # Until main has begun, while Python starts or torch is imported, Ctrl-C is Python's own.
            early = err.rstrip().endswith("KeyboardInterrupt") and not _MAIN.search(err)
            if ("Traceback" in err and not early) or last:
                self.report(case, "ended", f"{process.returncode}: {err.strip()[-2000:]}")
            if last:
                return
            self.files(case, out)
        else:
            return
        where = difference(contents(self.work / "whole" / case.name), contents(out))
        with self.tally.lock:
            self.tally.ends[case.name] += 1
        if where:
            self.report(case, "differs", where)

    def disturb(self, case: Case, process: subprocess.Popen[str], out: Path) -> None:
        """One event, and what it must lead to."""
        event = self.rng.choice(EVENTS)
        pids = _descendants(process.pid)
        target = self.rng.choice([process.pid, *pids]) if case.nproc > 1 else process.pid
        name = event if isinstance(event, str) else signal.Signals(event).name
        who = "" if target == process.pid else ", of a child"
        with self.tally.lock:
            self.tally.events[f"{name}{who}"] += 1
            if self.tally.count() % 50 == 0:
                print(f"{self.tally.count()} events", flush=True)
        if event == "second writer":
            second = self.start(case, out)
            _, err = second.communicate()
            fine = ("in use by", "another process has started a run", *COMPLETE)
            if second.returncode and not (process.poll() is not None or any(words in err for words in fine)):
                self.report(case, "second writer", err.strip()[-500:])
        elif event == "stop and go on" or (event == "stop" and target == process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGSTOP)
                time.sleep(self.rng.uniform(0, 0.4 * self.timeout))
                os.kill(target, signal.SIGCONT)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGSTOP if event == "stop" else event)
            if target == process.pid and event in ENDING:
                self.limit(case, process, LEFT, name)
            elif event in (signal.SIGKILL, signal.SIGTERM, "stop"):
                self.limit(case, process, self.timeout + BEYOND, f"{name}{who}")

    def limit(self, case: Case, process: subprocess.Popen[str], seconds: float, name: str) -> None:
        """See that the command ends in time."""
        clock = time.monotonic()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.report(case, "waits", f"longer than {seconds:g} s after {name}")
            process.kill()
        with self.tally.lock:
            self.tally.longest = max(self.tally.longest, time.monotonic() - clock)

    def ends(self, case: Case, process: subprocess.Popen[str]) -> str:
        """Wait for the command, and see that nobody is left; what it said."""
        try:
            _, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            self.report(case, "waits", "10 minutes")
            process.kill()
            _, err = process.communicate()
        until = time.monotonic() + LEFT
        while left := _marked(f"{TOKEN}={self.token}"):
            if time.monotonic() > until:
                self.report(case, "left", f"processes {left}")
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.05)
        return err

    def files(self, case: Case, out: Path) -> None:
        """See that what is there can be read, and that checkpoints are not lost."""
        try:
            contents(out)
        except Exception as error:
            self.report(case, "file", f"{type(error).__name__}: {error}")
        for folder in {path.parent for path in out.rglob("step-*.h5")}:
            steps = sorted(int(path.stem[5:]) for path in folder.glob("step-*.h5"))
            every = steps[1] - steps[0] if len(steps) > 1 else 0
            if steps[0] or any(b - a > every for a, b in itertools.pairwise(steps)):
                self.report(case, "file", f"{folder}: a checkpoint is missing, there are {steps}")

    def report(self, case: Case, kind: str, words: str) -> None:
        with self.tally.lock:
            self.tally.wrong.append(kind)
        print(f"WRONG: {case.name}: {kind}: {words}", flush=True)


def _hear() -> None:
    """A shell that starts this in the background, and nohup, have a signal ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _descendants(pid: int) -> list[int]:
    try:
        found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [p for child in found for p in (child, *_descendants(child))]


def _marked(words: str) -> list[int]:
    """The processes with ``words`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if words.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def run(events: int, cases: list[Case], *, lanes: int = 2, seed: int = 0, timeout: float = TIMEOUT) -> Tally:
    """Do ``events`` things to ``cases`` in turn; ``timeout`` is their --timeout."""
    tally, clock = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work / "base")
        first = Lane(tally, work / "base", work, seed, timeout)
        seconds = {case.name: first.whole(case) for case in cases}
        turns = iter(range(10**9))

        def lane(number: int) -> None:
            mine = Lane(tally, work / "base", work, seed + 1 + number, timeout)
            while tally.count() < events:
                with tally.lock:
                    case = cases[next(turns) % len(cases)]
                mine.chain(case, seconds[case.name], events)

        threads = [threading.Thread(target=lane, args=(k,)) for k in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"{tally.count()} events in {(time.monotonic() - clock) / 60:.1f} min:")
    print(*(f"  {n:4} {name}" for name, n in sorted(tally.events.items())), sep="\n")
    print(f"{sum(tally.ends.values())} commands came to their end, of {len(tally.ends)} kinds")
    print(f"the longest wait after a signal took {tally.longest:.1f} s")
    kinds = ("file", "differs", "left", "waits", "second writer", "ended")
    print(*(f"{kind}: {tally.wrong.count(kind)}" for kind in kinds), sep="; ", flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--lanes", type=int, default=2, help="commands at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="--timeout of the commands (s)")
    asked = parser.parse_args()
    cases = [case for case in ALL if asked.only in case.name]
    tally = run(asked.events, cases, lanes=asked.lanes, seed=asked.seed, timeout=asked.timeout)
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
