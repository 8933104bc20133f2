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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from landscape.core.errors import FailedError
from landscape.core.failures import explain
from landscape.train.distributed.children import Child, Children, threads_each

# How long a process may show no sign of life (s), as in a group.
TIMEOUT = 600.0
GOES_ON = "the same command goes on"


class JobError(FailedError):
    """A job that failed: its ``number`` among the jobs, and the reason; ``known``: an error for the user."""

    def __init__(self, number: int, words: str, known: bool = False) -> None:
        super().__init__(words)
        self.number, self.known = number, known


class Executor(Protocol):
    """What does independent jobs: a :class:`Pool`, or a :class:`.cluster.Cluster` of several machines."""

    def run(self, function: str, jobs: Sequence[Sequence[Any]], done: Callable[[int, Any], None]) -> None:
        """Call ``function`` with the arguments of each job.

        Args:
            function: MODULE:NAME, MODULE being of this package.
            done: takes a job's number and its result, in the order in which the jobs end.

        Raises:
            FailedError: as soon as a job fails; the others are ended then. A :class:`JobError` where it
                failed in another process.
        """


@dataclass(frozen=True)
class Pool:
    """``nproc`` processes of this machine.

    Attributes:
        nproc: how many jobs are done at a time.
        threads: shared by the processes; None: as the environment has it for each.
        timeout: limit of the time without a sign of life of a process (s).
        place: gives further environment variables of a process, by its number.
    """

    nproc: int = 1
    threads: int | None = None
    timeout: float = TIMEOUT
    place: Callable[[int], dict[str, str]] = lambda number: {}

    def run(self, function: str, jobs: Sequence[Sequence[Any]], done: Callable[[int, Any], None]) -> None:
        """As of :class:`Executor`; arguments and results are such that JSON can represent them."""
        waiting = list(enumerate(jobs))[::-1]
        with Children() as children:
            shared = threads_each(self.nproc, self.threads)
            for number in range(min(self.nproc, len(jobs))):
                children.start(__name__, [function], shared | self.place(number), piped=True)
            busy = {child: _give(child, waiting) for child in children.all}
            for _ in jobs:
                child, answer = self._next_answer(children, busy)
                number = busy.pop(child)
                if "failed" in answer:
                    sys.stderr.write(answer.get("trace", ""))
                    raise JobError(number, answer["failed"], answer["known"])
                if waiting:
                    busy[child] = _give(child, waiting)
                done(number, answer["result"])

    def _next_answer(self, children: Children, busy: Mapping[Child, int]) -> tuple[Child, dict[str, Any]]:
        """The next child that answers, with its answer; JobError for one that has ended or is silent."""
        pipes = {child.process.stdout: child for child in busy}
        while True:
            for pipe in children.check(*filter(None, pipes)):
                child = pipes[pipe]
                if line := pipe.readline():
                    return child, json.loads(line)
                child.process.wait()
                ending = f"its process {child.exit_description()}; {_last_line(child)}"
                raise JobError(busy[child], f"{ending}{GOES_ON}")
            for child, job in busy.items():
                if child.silent > self.timeout:
                    raise JobError(job, f"its process was lost, no sign of life for {self.timeout:g} s")


def resolve(function: str) -> Callable[..., Any]:
    """The function MODULE:NAME.

    Example:
        >>> resolve("operator:truediv")(1, 2)
        0.5
    """
    module, _, name = function.partition(":")
    call: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return call


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
    function = resolve(sys.argv[1])
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
