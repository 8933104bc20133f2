"""Jobs in several processes of this machine at a time, which have nothing to do with each other.

A job is a function of this package, as MODULE:NAME, and arguments that JSON can hold; so is what it returns.
A process does one job after another, which saves starting it anew: importing torch takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from landscape.core.errors import FailedError
from landscape.core.failures import explain
from landscape.train.distributed.children import Child, Children, threads_each

# How long a process may show no sign of life (s), as in a group.
TIMEOUT = 600.0


class JobError(FailedError):
    """A job that failed: its ``number`` among the jobs, the line that says why; ``known`` if it said so."""

    def __init__(self, number: int, words: str, known: bool = False) -> None:
        super().__init__(words)
        self.number, self.known = number, known


def run(
    function: str,
    jobs: Sequence[Sequence[Any]],
    nproc: int,
    done: Callable[[int, Any], None],
    *,
    threads: int | None,
    timeout: float = TIMEOUT,
    place: Callable[[int], dict[str, str]] = lambda number: {},
) -> None:
    """Call ``function`` with the arguments of each job, ``nproc`` at a time.

    Args:
        function: MODULE:NAME, MODULE being of this package.
        done: takes a job's number and what it returned, in the order in which they end.
        threads: shared by the processes; None: as the environment has it for each.
        timeout: how long a process may show no sign of life (s).
        place: more environment variables of the process of that number.

    Raises :class:`JobError` as soon as one fails; the others are ended then.
    """
    waiting = list(enumerate(jobs))[::-1]
    with Children() as children:
        shared = threads_each(nproc, threads)
        for number in range(min(nproc, len(jobs))):
            children.start(__name__, [function], shared | place(number), piped=True)
        busy: dict[Child, int] = {}
        left = len(jobs)
        for child in children.all:
            busy[child] = _give(child, waiting)
        while left:
            pipes = {child.process.stdout: child for child in busy}
            for pipe in children.look(*filter(None, pipes)):
                child = pipes[pipe]
                job = busy.pop(child)
                line = pipe.readline()
                if not line:  # it has ended
                    child.process.wait()
                    ending = f"its process {child.exit_description()}; {_last_line(child)}"
                    raise JobError(job, f"{ending}the same command goes on")
                answer = json.loads(line)
                if "failed" in answer:
                    sys.stderr.write(answer.get("trace", ""))
                    raise JobError(job, answer["failed"], answer["known"])
                left -= 1
                if waiting:
                    busy[child] = _give(child, waiting)
                done(job, answer["result"])
            for child, job in busy.items():
                if child.silent > timeout:
                    raise JobError(job, f"its process was lost, no sign of life for {timeout:g} s")


def _give(child: Child, waiting: list[tuple[int, Sequence[Any]]]) -> int:
    number, arguments = waiting.pop()
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed where it should answer
        child.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        child.process.stdin.flush()
    return number


def _last_line(child: Child) -> str:
    """The last line that a process wrote to stderr, with a semicolon."""
    lines = child.stderr_text().strip().splitlines()
    return f"{lines[-1]}; " if lines else ""


def main() -> None:
    """In a process: read jobs, a line each, from stdin; answer on what was stdout, for us alone."""
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answer: dict[str, Any] = {"result": function(*json.loads(line))}
            except Exception as error:
                known = explain(error)
                line = str(known) if known else f"{type(error).__name__}: {error}"
                answer = {"failed": line, "known": bool(known)}
                if known is None:
                    answer["trace"] = traceback.format_exc()
            answers.write(json.dumps(answer) + "\n")
