"""Many inputs in few processes: each is forked, limited in time and memory, and replaced when it dies."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from landscape.core import hdf5
from landscape.core.errors import LandscapeError
from tests.fuzz import samples
from tests.fuzz.readers import READERS

SECONDS, BYTES = 30.0, 4 << 30
# Shares of the inputs: most for the format that has the most to go wrong, half for checksums that are forged.
SHARES = {
    "forged": 104, "hdf5": 40, "drawing": 4, "idx": 8, "cifar": 2, "image": 8, "wav": 6, "state": 10, "safetensors": 5, "index": 4,
    "matrix.npy": 5, "matrix.csv": 2, "list.csv": 2, "recipe": 6, "page": 1, "rows": 1, "record": 3, "environment": 1,
}  # fmt: skip


@dataclasses.dataclass
class Outcome:
    """How often what happened, and what must not."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)
    peak: int = 0


def plan(inputs: int) -> list[tuple[str, int]]:
    """(kind, number) of each input; the number is the seed of its mutation."""
    total = sum(SHARES.values())
    return [(kind, i) for kind, share in SHARES.items() for i in range(max(1, inputs * share // total))]


def one(kind: str, number: int, folder: Path, raws: Sequence[bytes]) -> str:
    """What became of an input: "taken", "refused", or the last line and place of what was raised."""
    rng = random.Random(f"{kind} {number}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "secret.bin").write_bytes(b"secret" * 99)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[kind](raws[number % len(raws)], folder, rng)
    except LandscapeError as error:
        return f"two lines: {error!s:.200}" if "\n" in str(error) else "refused"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        own = [f for f in where if "/landscape/" in f.filename] or where
        name = Path(own[-1].filename).name
        return f"{type(error).__name__} in {name}:{own[-1].lineno}: {' '.join(str(error).split())[:200]}"
    return "code was run" if (folder / "ran").exists() else "taken"


def child(todo: Sequence[tuple[str, int]], pipe: int, folder: Path, raws: dict[str, list[bytes]]) -> None:
    """Work through ``todo``; says before each input that it begins, and after it how it ended."""
    faulthandler.disable()  # which pytest turns on: a crash is told by this process's end
    torch.set_num_threads(1)
    base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (base + BYTES, base + BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, number in todo:
        os.write(pipe, b"+\n")
        ended = one(kind, number, folder, raws[kind])
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if used - start > BYTES >> 10:
            ended = f"{used >> 10} MB of memory"
        os.write(pipe, ended.encode("utf-8", "backslashreplace").replace(b"\n", b" ") + b"\n")
    hdf5._validator.stop()  # its memory counts for the peak


def run(todo: Sequence[tuple[str, int]]) -> Outcome:
    """The outcome of all inputs, in one process after another."""
    outcome, at = Outcome(), 0
    with tempfile.TemporaryDirectory() as temporary:
        raws = samples.all_samples(Path(temporary))
        folder = Path(temporary) / "one"
        while at < len(todo):
            at += _one_process(todo[at:], folder, raws, outcome)
    return outcome


def _one_process(
    todo: Sequence[tuple[str, int]], folder: Path, raws: dict[str, list[bytes]], outcome: Outcome
) -> int:
    """Run a process until it is through or dies; returns how many inputs it dealt with."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has threads; the child starts none of them again
        pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            child(todo, theirs, folder, raws)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(theirs)
    done, begun, rest, last, late = 0, 0, b"", time.monotonic(), False
    while True:
        if not select.select([ours], [], [], max(0.0, last + SECONDS - time.monotonic()))[0]:
            late = True
            os.kill(pid, signal.SIGKILL)
        part = os.read(ours, 1 << 16)
        if not part:
            break
        last = time.monotonic()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line == b"+":
                begun += 1
                continue
            kind, number = todo[done]
            done += 1
            word = line.decode()
            outcome.counts[f"{kind}: {word if word in ('taken', 'refused') else 'FAILED'}"] += 1
            if word not in ("taken", "refused"):
                outcome.failures.append(f"{kind} {number}: {word}")
    os.close(ours)
    _, status, usage = os.wait4(pid, 0)
    outcome.peak = max(outcome.peak, usage.ru_maxrss << 10)
    if begun > done:
        kind, number = todo[done]
        how = f"nothing for {SECONDS:g} s" if late else f"the process ended with status {status}"
        outcome.counts[f"{kind}: FAILED"] += 1
        outcome.failures.append(f"{kind} {number}: {how}")
        return done + 1
    if done < len(todo):
        raise RuntimeError(f"a process of the harness ended early, with status {status}")
    return done
