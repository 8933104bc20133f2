"""Commands with tiny settings: something is done to each at a random moment, and it is given again until it ends.

Its results must then be those of a run that nobody touched, to the bit. After each event no process of it may be
left within LEFT seconds, nobody may wait longer than the command's --timeout and BEYOND, and every result file that
was there must still be whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import landscape
from tests import harm
from tests.conftest import TINY
from tests.test_conformance import ANALYSES, COMMANDS

# How long a process may be silent (s), how much longer nobody may wait for it, and how long one may be left. Four
# processes that start at the same time on two busy cores were silent for 5 s.
TIMEOUT, BEYOND, LEFT = 15.0, 15.0, 10.0
TOKEN = "LANDSCAPE_HARM"  # marks in the environment which processes belong to a command
ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EVENTS = (*ENDING * 3, signal.SIGKILL, signal.SIGKILL, "stop", "stop and go on", "second writer")
_MAIN = re.compile(r'landscape/cli/__init__\.py", line \d+, in main\n')
# {run}: the folder of a run; {folder}: the command's own. These are tried with one process and with two.
_BOTH = {
    "train": "{run}/tiny.toml --resume -o {folder}/run --nproc",
    "sweep": "{run}/tiny.toml --set lr=0.1,0.2 -o {folder}/sweep --jobs",
    "contour": "{run}/last.h5 --grid 120x80 --method batched -o {folder}/contour.h5 --nproc",
    "hessian-grid": "{run}/last.h5 --grid 6 --search exact -o {folder}/hessian.h5 --nproc",
    "figures": "fig2a --scale smoke -o {folder}/figures --runs {folder}/runs --jobs",
}
_ONE = {
    "line": ["line", "{run}/last.h5", "-o", "{folder}/line.h5"],
    "import": ["import", "{run}/net.pt", "--model", "mlp(widths=[6, 8, 3])", "-o", "{folder}/net.h5"],
}


def _cases() -> dict[str, list[str]]:
    """Name -> words; with those of the conformance tests, where a command has no others."""
    cases = dict(_ONE)
    for name, words in _BOTH.items():
        *first, option = [name, *words.split()]
        cases[f"{name}, 1 process"] = first
        cases[f"{name}, 2 processes"] = [*first, option, "2", "--timeout", "{timeout}"]
    own = {words[0] for words in cases.values()}
    cases |= {
        name: [name, *words] for name, (words, _) in COMMANDS.items() if "-o" in words and name not in own
    }
    for name, (_, _, more) in ANALYSES.items():
        if "command" in more and more["command"][0] not in own:
            command, *words = more["command"]
            cases[name] = [command, "{run}/last.h5", *words, "-o", "{folder}/out.h5"]
    return cases


CASES = {name: words if "import" in words else [*words, "-q"] for name, words in _cases().items()}


def prepare(base: Path) -> None:
    """Make in ``base`` what the commands work on."""
    from landscape.training.recipes import recipe
    from landscape.training.run import launch

    text = TINY.replace("steps = 30", "steps = 60").replace("{ every = 10 }", "{ every = 5 }")
    base.mkdir(parents=True)
    (base / "tiny.toml").write_text(text)
    launch.launch(recipe.read(str(base / "tiny.toml")), base)
    layers = (torch.nn.Flatten(), torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    torch.save(torch.nn.Sequential(*layers).state_dict(), base / "net.pt")


# What a clock measures, and where something lay.
_CLOCKED = {"wall_s", "wait_s", "samples_per_s", "seconds", "method", "path"}


def contents(folder: Path) -> dict[str, str]:
    """All that the result files below ``folder`` hold, bit by bit, by file and name; raises what a broken one raises."""
    every: dict[str, str] = {}
    for path in sorted(folder.rglob("*.h5")):
        loaded = landscape.load(path)
        for i, result in enumerate(loaded if isinstance(loaded, list) else [loaded]):
            fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
            every |= _bits(f"{path.relative_to(folder)} {i}", fields)
    return every


def _bits(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key in value.keys() - _CLOCKED:
            yield from _bits(f"{name} {key}", value[key])
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        array = np.asarray(value)
        yield name, f"{array.dtype} {array.shape} {array.tobytes().hex()}"
    else:
        yield name, repr(value)


def difference(a: dict[str, str], b: dict[str, str]) -> str:
    """The first name whose value is not the same in both, "" if there is none."""
    return next((name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)), "")


@dataclasses.dataclass
class Lane:
    """One command after another until ``events`` have happened; several lanes run at the same time."""

    work: Path
    events: int
    seconds: dict[str, float]
    seed: int = 0
    timeout: float = TIMEOUT
    tally: harm.Tally = dataclasses.field(default_factory=harm.Tally)

    def __post_init__(self) -> None:
        self.rng, self.token = random.Random(self.seed), f"{os.getpid()}-{self.seed}"

    def start(self, case: str, out: Path) -> subprocess.Popen[str]:
        """The command, which hears every signal: a shell in the background, and nohup, have some ignored."""

        def hear() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

        places = {"run": self.work / "base", "folder": out, "timeout": self.timeout}
        return subprocess.Popen(
            [sys.executable, "-m", "landscape", *(word.format(**places) for word in CASES[case])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, TOKEN: self.token, "OMP_NUM_THREADS": "1"},
            preexec_fn=hear,
        )

    def whole(self, case: str) -> None:
        """Let the command run by itself, for comparison, and take its time."""
        out, clock = self.work / "whole" / case, time.monotonic()
        out.mkdir(parents=True)
        process = self.start(case, out)
        _, err = process.communicate()
        if process.returncode:
            raise SystemExit(f"{case}: {err}")
        assert contents(out), case
        self.seconds[case] = time.monotonic() - clock

    def chain(self, case: str) -> None:
        """Run the command to its end, with things done to it on the way."""
        out = self.work / self.token / case
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for turn in range(20):
            last = turn == 19 or self.done()
            process = self.start(case, out)
            if not last:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.rng.uniform(0, self.seconds[case]))
            if process.poll() is None and not last:
                self.disturb(case, process, out)
            err = self.ends(case, process)
            if process.returncode == 0:
                if where := difference(contents(self.work / "whole" / case), contents(out)):
                    self.report(case, f"differs: {where}")
                return
            # Until main has begun, while Python starts or torch is imported, Ctrl-C is Python's own.
            early = err.rstrip().endswith("KeyboardInterrupt") and not _MAIN.search(err)
            if ("Traceback" in err and not early) or last:
                self.report(case, f"ended: {process.returncode}: {err.strip()[-2000:]}")
            if last:
                return
            self.files(case, out)

    def done(self) -> bool:
        return self.tally.counts.total() >= self.events

    def disturb(self, case: str, process: subprocess.Popen[str], out: Path) -> None:
        """One event, and what it must lead to."""
        event = self.rng.choice(EVENTS)
        pids = _descendants(process.pid) if "--timeout" in CASES[case] else []
        target = self.rng.choice([process.pid, *pids])
        name = event if isinstance(event, str) else signal.Signals(event).name
        name += "" if target == process.pid else ", of a child"
        self.tally.counts[name] += 1
        if event == "second writer":
            second = self.start(case, out)
            _, err = second.communicate()
            fine = ("in use by", "another process has started a run")
            if second.returncode and process.poll() is None and not any(words in err for words in fine):
                self.report(case, f"second writer: {err.strip()[-500:]}")
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
                self.limit(case, process, self.timeout + BEYOND, name)

    def limit(self, case: str, process: subprocess.Popen[str], seconds: float, name: str) -> None:
        """See that the command ends in time."""
        clock = time.monotonic()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.report(case, f"waits longer than {seconds:g} s after {name}")
            process.kill()
        self.tally.most = max(self.tally.most, time.monotonic() - clock)

    def ends(self, case: str, process: subprocess.Popen[str]) -> str:
        """Wait for the command, and see that nobody is left; what it said."""
        try:
            _, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            self.report(case, "waits longer than 10 minutes")
            process.kill()
            _, err = process.communicate()
        until = time.monotonic() + LEFT
        while (left := _marked(f"{TOKEN}={self.token}")) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            self.report(case, f"left: process {pid}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return err

    def files(self, case: str, out: Path) -> None:
        """See that what is there can be read, and that checkpoints are not lost."""
        try:
            contents(out)
        except Exception as error:
            self.report(case, f"file: {type(error).__name__}: {error}")
        for folder in {path.parent for path in out.rglob("step-*.h5")}:
            steps = sorted(int(path.stem[5:]) for path in folder.glob("step-*.h5"))
            every = steps[1] - steps[0] if len(steps) > 1 else 0
            if steps[0] or any(b - a > every for a, b in itertools.pairwise(steps)):
                self.report(case, f"file: {folder}: a checkpoint is missing, there are {steps}")

    def report(self, case: str, words: str) -> None:
        self.tally.wrong.append(f"{case}: {words}")


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [p for child in children for p in (child, *_descendants(child))]


def _marked(words: str) -> list[int]:
    """The processes with ``words`` in their environment."""
    marked = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if words.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    marked.append(int(entry.name))
    return marked


def attack(lane: Lane) -> harm.Tally:
    """One of its commands after another, until enough has happened."""
    lane.token = f"{os.getpid()}-{lane.seed}"
    for case in itertools.cycle(lane.rng.sample([*lane.seconds], len(lane.seconds))):
        if lane.done():
            return lane.tally
        lane.chain(case)
    raise ValueError("no commands")


def run(events: int, cases: list[str], lanes: int = 2, seed: int = 0, timeout: float = TIMEOUT) -> harm.Tally:
    """Do ``events`` things to ``cases`` in turn; ``timeout`` is their --timeout."""
    with tempfile.TemporaryDirectory() as folder:
        work, seconds = Path(folder), dict[str, float]()
        prepare(work / "base")
        alone = Lane(work, 0, seconds, timeout=timeout)
        for case in cases:
            alone.whole(case)
        each = -(-events // lanes)
        return harm.run(attack, [Lane(work, each, seconds, seed + i, timeout) for i in range(lanes)])
