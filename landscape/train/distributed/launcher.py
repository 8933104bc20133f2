"""``--nproc``: this command again in several processes of one machine, which compute one thing together.

They meet in a private folder, so that no port is open for it, and exchange over the loopback interface. This
process computes nothing: it watches them, ends all when one fails or shows no sign of life, starts them anew
while restarts are left, and says in one line what happened.
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
from landscape.train.distributed import board
from landscape.train.distributed.board import FolderBoard
from landscape.train.distributed.children import Child, Children, loopback, threads_each

# Seconds in which the others end by themselves once one has, having told why.
GRACE = 5.0
# In place of an exit code: a process that told this was not the one that failed, but lost another.
LOST = 75


class Broken(FailedError):
    """A process was lost: the others may be started anew."""


def start(
    module: str,
    words: Sequence[str],
    nproc: int,
    *,
    timeout: float,
    threads: int | None,
    restarts: int = 0,
    advice: Callable[[], str],
    log: Path | None = None,
) -> int:
    """Run ``module``'s main with ``words`` in ``nproc`` processes; the exit code when all have ended.

    Args:
        module: of this package, such as "landscape.cli".
        timeout: how long a process may show no sign of life (s).
        threads: shared by the processes; None: as the environment has it for each.
        restarts: how often all are started anew when one was lost.
        advice: says what to do after one was lost.
        log: a file for what happens to the processes, written if its folder's parent is there.

    Raises FailedError (or InputError where the processes found bad usage) with the line of the process that
    failed first, or that names the rank that was lost.
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
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                children.start(module, words, environment | own, shown=rank == 0)
            pids = ", ".join(str(child.process.pid) for child in children.all)
            _log(log, f"start {attempt}: processes {pids}")
            try:
                return _watch(children, timeout)
            except InputError as error:
                _log(log, str(error))
                if not isinstance(error, Broken):
                    raise
                if attempt == restarts:
                    line, rest = str(error), advice()
                    raise FailedError(line if rest in line else f"{line}; {rest}") from error
    raise AssertionError("unreachable")


def _watch(children: Children, timeout: float) -> int:
    """The exit code, once all have ended; raises as :func:`start` does."""
    told, until = FolderBoard(children.folder), 0.0
    while True:
        children.look()
        lost = [child for child in children.all if (child.ended or 0) < 0]
        if lost:
            raise Broken(f"{_name(lost[0], children)} {lost[0].how()}")
        if line := told.get("failure"):
            raise _told(line)
        ended = [child for child in children.all if child.ended is not None]
        if len(ended) == len(children.all):
            return _code(children)
        if any(child.ended for child in ended):
            until = until or time.monotonic() + GRACE
            if time.monotonic() > until:
                return _code(children)
        silent = [child for child in children.all if child.ended is None and child.silent > timeout]
        if silent:
            names = " and ".join(_name(child, children) for child in silent)
            raise Broken(f"{names} lost, no sign of life for {timeout:g} s")


def _code(children: Children) -> int:
    """The exit code of all; raises where one ended as no process that knows why does."""
    codes = {child.ended or 0 for child in children.all}
    if codes == {0} or not codes & {1, 2}:
        return max(codes)
    child = next(child for child in children.all if child.ended in (1, 2))
    sys.stderr.write(child.said())
    raise Broken(f"{_name(child, children)} {child.how()}")


def _told(line: str) -> InputError:
    """The failure that a process told."""
    _, code, words = line.split(" ", 2)
    if int(code) == InputError.exit_code:
        return InputError(words)
    return Broken(words) if int(code) == LOST else FailedError(words)


def _name(child: Child, children: Children) -> str:
    return f"rank {child.number} of {len(children.all)}"


def _log(path: Path | None, line: str) -> None:
    """Append to the log of a run that is there already; one that cannot be written does no harm."""
    if path and path.parent.parent.is_dir():
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}Z {line}\n")


def report(message: str, code: int) -> bool:
    """Leave a failure to the process that started this one with ``--nproc``, which prints it; False if none.

    What another process has told before stands.
    """
    found = board.of_launcher()
    if found:
        with contextlib.suppress(OSError):  # the launcher is gone, and nobody reads it
            found.first("failure", f"{os.environ.get('RANK', 0)} {code} {message}")
    return found is not None
