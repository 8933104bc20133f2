"""``--nproc``: runs this command in several processes of one machine, which compute one result together.

They meet in a private folder, without an open port, and exchange over the loopback interface. The launcher
itself computes nothing: it watches the processes, ends all of them when one fails or shows no sign of life,
restarts them while restarts remain, and reports a failure in one line.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from landscape.core.errors import FailedError, InputError
from landscape.train.processes import board
from landscape.train.processes.board import FolderBoard
from landscape.train.processes.children import Child, Children, loopback, threads_each

# After one process has ended with an error, the others have this long to end by themselves (s).
GRACE = 5.0
# In place of an exit code in a report: the process did not fail itself, another one was lost.
LOST = 75


class Broken(FailedError):
    """A process was lost, and all processes may be restarted."""


def start(
    module: str,
    words: Sequence[str],
    nproc: int,
    *,
    timeout: float,
    threads: int | None,
    restarts: int = 0,
    hint: Callable[[], str],
    log: Path | None = None,
) -> int:
    """Run ``module``'s main with ``words`` in ``nproc`` processes; the exit code when all have ended.

    Args:
        module: of this package, such as "landscape.cli".
        timeout: limit of the time without a sign of life of a process (s).
        threads: shared by the processes; None: as the environment has it for each.
        restarts: how often all processes are restarted after one was lost.
        hint: gives the words that tell the user how to go on after a process was lost.
        log: a file for starts and failures, written if the parent of its folder exists.

    Raises FailedError (InputError for bad usage) with the message of the process that failed first, or with
    the rank that was lost.
    """
    for attempt in range(restarts + 1):
        with Children() as children:
            environment = {
                "WORLD_SIZE": str(nproc),
                "LOCAL_WORLD_SIZE": str(nproc),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                board.FOLDER: str(children.folder),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback()),
                "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback()),
                **threads_each(nproc, threads),
            }
            for rank in range(nproc):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                children.start(module, words, environment | ranks, shown=rank == 0)
            pids = ", ".join(str(child.process.pid) for child in children.all)
            _log(log, f"start {attempt}: processes {pids}")
            try:
                return _watch(children, timeout)
            except InputError as error:
                _log(log, str(error))
                if not isinstance(error, Broken):
                    raise
                if attempt == restarts:
                    line, advice = str(error), hint()
                    raise FailedError(line if advice in line else f"{line}; {advice}") from error
    raise AssertionError("unreachable")


def _watch(children: Children, timeout: float) -> int:
    """The exit code, once all have ended; raises as :func:`start` does."""
    failures, deadline = FolderBoard(children.folder), 0.0
    while True:
        children.check()
        lost = [child for child in children.all if (child.ended or 0) < 0]
        if lost:
            raise Broken(f"{_name(lost[0], children)} {lost[0].exit_description()}")
        if line := failures.get("failure"):
            raise _reported_failure(line)
        ended = [child for child in children.all if child.ended is not None]
        if len(ended) == len(children.all):
            return _code(children)
        if any(child.ended for child in ended):
            deadline = deadline or time.monotonic() + GRACE
            if time.monotonic() > deadline:
                return _code(children)
        silent = [child for child in children.all if child.ended is None and child.silent > timeout]
        if silent:
            names = " and ".join(_name(child, children) for child in silent)
            raise Broken(f"{names} lost, no sign of life for {timeout:g} s")


def _code(children: Children) -> int:
    """The common exit code; raises Broken if a process ended with an error that it did not report."""
    codes = {child.ended or 0 for child in children.all}
    if codes == {0} or not codes & {1, 2}:
        return max(codes)
    child = next(child for child in children.all if child.ended in (1, 2))
    sys.stderr.write(child.stderr_text())
    raise Broken(f"{_name(child, children)} {child.exit_description()}")


def _reported_failure(line: str) -> InputError:
    """The failure that a process has reported, from its ``line`` on the board."""
    _, code, words = line.split(" ", 2)
    if int(code) == InputError.exit_code:
        return InputError(words)
    return Broken(words) if int(code) == LOST else FailedError(words)


def _name(child: Child, children: Children) -> str:
    return f"rank {child.number} of {len(children.all)}"


def _log(path: Path | None, line: str) -> None:
    """Append to the log of a run whose folder exists; an error in writing it is ignored."""
    if path and path.parent.parent.is_dir():
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}Z {line}\n")


def report(message: str, code: int) -> bool:
    """Report a failure to the launcher of this process, which prints it; False if there is no launcher.

    If another process has reported a failure before, that one is printed.
    """
    failures = board.of_launcher()
    if failures:
        with contextlib.suppress(OSError):  # the launcher has ended, and cannot read it
            failures.first("failure", f"{os.environ.get('RANK', 0)} {code} {message}")
    return failures is not None
