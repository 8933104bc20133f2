"""A pool of processes of this machine for independent jobs.

A job is a function of this package, MODULE:NAME, with arguments and a result that JSON can represent. Each
process does one job after another, as a new process would take seconds to import torch.
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
    """A job that failed: its ``number`` among the jobs, and the reason; ``known``: an error for the user."""

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
        done: takes a job's number and its result, in the order in which the jobs end.
        threads: shared by the processes; None: as the environment has it for each.
        timeout: limit of the time without a sign of life of a process (s).
        place: gives further environment variables of a process, by its number.

    Raises :class:`JobError` as soon as a job fails; the other processes are ended then.
    """
    waiting = list(enumerate(jobs))[::-1]
    with Children() as children:
        shared = threads_each(nproc, threads)
        for number in range(min(nproc, len(jobs))):
            children.start(__name__, [function], shared | place(number), piped=True)
        busy: dict[Child, int] = {}
        remaining = len(jobs)
        for child in children.all:
            busy[child] = _give(child, waiting)
        while remaining:
            pipes = {child.process.stdout: child for child in busy}
            for pipe in children.check(*filter(None, pipes)):
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
                remaining -= 1
                if waiting:
                    busy[child] = _give(child, waiting)
                done(job, answer["result"])
            for child, job in busy.items():
                if child.silent > timeout:
                    raise JobError(job, f"its process was lost, no sign of life for {timeout:g} s")


def _give(child: Child, waiting: list[tuple[int, Sequence[Any]]]) -> int:
    number, arguments = waiting.pop()
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed when its answer is read
        child.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        child.process.stdin.flush()
    return number


def _last_line(child: Child) -> str:
    """The last line that a process wrote to stderr, with a semicolon."""
    lines = child.stderr_text().strip().splitlines()
    return f"{lines[-1]}; " if lines else ""


def main() -> None:
    """The main of a process: reads jobs from stdin, a line each, and writes results to stdout."""
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
