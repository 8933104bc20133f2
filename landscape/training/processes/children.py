"""Child processes on this machine, which end with this process: for independent jobs, and for ``--nproc``.

A :class:`Pool` does independent jobs. :func:`run_in_processes` runs this command in several processes, which
compute one result together. They meet in a private folder, without an open port, and exchange over the
loopback interface. The launcher itself computes nothing: it watches the processes, ends all of them when one
fails or shows no sign of life, restarts them while restarts remain, and reports a failure in one line.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from landscape.core.errors import InputError, LandscapeError, OperationError, explain
from landscape.core.files import HAS_LOCKS
from landscape.training import processes as boot

# Interval of the checks of the children (s), short enough not to delay a short command noticeably.
CHECK_INTERVAL = 0.05
FOLDER = "landscape-processes-"
#: The environment variable with the folder of the store, for the processes that ``--nproc`` started.
STORE = "LANDSCAPE_STORE"


class FolderStore:
    """A store of texts by name for processes of this machine, with a file for each and without a port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, name: str, text: str) -> None:
        """Write ``text`` under ``name``."""
        path = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        path.write_text(text, encoding="utf-8")
        os.replace(path, self.folder / name)

    def get(self, name: str) -> str:
        """Return the text called ``name``, or ""."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def first(self, name: str, text: str) -> bool:
        """Write ``text`` if no text has this name, and return whether ``text`` has it now."""
        with contextlib.suppress(FileExistsError), open(self.folder / name, "x", encoding="utf-8") as file:
            file.write(text)
        return self.get(name) == text


def launcher_store() -> FolderStore | None:
    """Return the store of the launcher that started this process with ``--nproc``, or None."""
    return FolderStore(Path(os.environ[STORE])) if STORE in os.environ else None


class Child:
    """A process that runs ``MODULE.main()`` of this package; ``number`` is its index among the children."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], link: socket.socket, errors: Path
    ) -> None:
        self.number, self.process, self.link, self.errors = number, process, link, errors
        #: Seconds without a sign of life, not counting the time in which this process itself was stopped.
        self.silent = 0.0

    @property
    def ended(self) -> int | None:
        """The exit code, negative for a signal; None for a running process."""
        return self.process.poll()

    def exit_description(self) -> str:
        """Return " was killed by SIGNAL" or "ended with CODE", after the process has ended."""
        code, names = self.process.returncode, {int(number): number.name for number in signal.Signals}
        killed = f"was killed by {names.get(-code, f'signal {-code}')}"
        return killed if code < 0 else f"ended with {code}"

    def stderr_text(self) -> str:
        """Return the text that the child wrote to stderr; "" if it shares this process's stderr."""
        return self.errors.read_text(errors="replace") if self.errors.exists() else ""


class Children:
    """Child processes with a private folder, as a context manager.

    At the end of the context all children have ended, and the folder is deleted.
    """

    def __init__(self) -> None:
        if not HAS_LOCKS:
            raise InputError("processes: this system has no processes that share sockets; use 1")
        self.all: list[Child] = []
        try:
            self._private = tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
        except OSError as error:
            raise OperationError(f"TMPDIR: set it to a writable folder ({error.strerror})") from error
        self.folder = Path(self._private.name)
        self._checked = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def start(
        self, module: str, argv: Sequence[str], environment: Mapping[str, str], *, piped: bool, show: bool
    ) -> None:
        """Start a child process that calls main() of ``module`` with the command-line arguments ``argv``.

        Args:
            environment: environment variables in addition to those of this process.
            piped: whether the child's stdin and stdout are pipes to this process. Otherwise stdin is empty.
            show: True: the child shares this process's stderr and stdout. False: the child's stderr goes to a
                file, and stdout is dropped. If ``piped``, stdout is the pipe in both cases.
        """
        number = len(self.all)
        parent_end, child_end = socket.socketpair()  # the child sends its signs of life here
        parent_end.setblocking(False)
        error_path = self.folder / f"errors-{number}"
        variables = {**environment, boot.LINK: str(child_end.fileno())}
        # If stdout or stderr is None, the child shares that of this process.
        unpiped_stdout = None if show else subprocess.DEVNULL
        error_file = contextlib.nullcontext() if show else error_path.open("wb")
        # -P keeps the folder of boot.__file__ out of sys.path.
        with child_end, error_file as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", boot.__file__, module, *argv],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else unpiped_stdout,
                stderr=stderr,
                pass_fds=[child_end.fileno()],
            )
        self.all.append(Child(number, process, parent_end, error_path))

    def check(self, *streams: IO[bytes]) -> list[IO[bytes]]:
        """Read the children's signs of life, and return the ``streams`` with data to read."""
        ready = select.select(streams, [], [], CHECK_INTERVAL)[0]
        now = time.monotonic()
        # At most one beat counts, because this process itself may have been stopped in between.
        seconds = min(now - self._checked, boot.BEAT)
        self._checked = now
        for child in self.all:
            child.silent += seconds
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if child.link.recv(2**16):
                    child.silent = 0.0
        return ready

    def __exit__(self, *raised: object) -> None:
        # Killing children cannot damage files, which are written atomically.
        for child in self.all:
            if child.ended is None:
                child.process.kill()
        for child in self.all:
            with contextlib.suppress(OSError), child.process:  # closes the pipes, and waits for the end
                child.link.close()
        self._private.cleanup()


def loopback() -> str:
    """Return the name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def threads_each(processes: int, threads: int | None) -> dict[str, str]:
    """Return the environment of a process, with its share of ``threads`` among ``processes``, if given."""
    if threads is None:
        return {}
    share = str(max(1, threads // processes))
    return {"OMP_NUM_THREADS": share, "MKL_NUM_THREADS": share}


# The longest time (s) of a process without a sign of life, and of an exchange of a group: the default of
# torch's NCCL groups.
TIMEOUT = 600.0
RESUMES = "the same command resumes"


class JobError(OperationError):
    """The failure of the job ``number``."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)
        self.number = number


@dataclass(frozen=True)
class Pool:
    """Processes of this machine, which run jobs.

    Attributes:
        nproc: the number of processes.
        threads: the number of threads that the processes share; None: the environment's number for each.
        timeout: the longest time of a process without a sign of life (s).
        environment: returns further environment variables of a process, given its number.
    """

    nproc: int = 1
    threads: int | None = None
    timeout: float = TIMEOUT
    environment: Callable[[int], dict[str, str]] = lambda number: {}

    def run(self, function: str, jobs: Sequence[Sequence[Any]], done: Callable[[int, Any], None]) -> None:
        """Call ``function`` in the pool's processes, once for each job.

        Args:
            function: MODULE:NAME of a function of this package.
            jobs: the positional arguments of each call. They and the results are sent as JSON.
            done: called with a job's index in ``jobs`` and its result, in the order in which the jobs end.

        Raises:
            JobError: when a job fails; the other processes are then killed.
        """
        waiting_jobs = deque(enumerate(jobs))
        with Children() as children:
            for number in range(min(self.nproc, len(jobs))):
                variables = threads_each(self.nproc, self.threads) | self.environment(number)
                # The child calls main() of this module.
                children.start(__name__, [function], variables, piped=True, show=False)
            # The index of the job that each child works on.
            busy = {child: _give_next_job(child, waiting_jobs) for child in children.all}
            for _ in jobs:  # each job has one answer
                child, answer = self._next_answer(children, busy)
                job_index = busy.pop(child)
                if "failed" in answer:
                    sys.stderr.write(answer["trace"])
                    raise JobError(job_index, answer["failed"])
                if waiting_jobs:
                    busy[child] = _give_next_job(child, waiting_jobs)
                done(job_index, answer["result"])

    def _next_answer(self, children: Children, busy: Mapping[Child, int]) -> tuple[Child, dict[str, Any]]:
        """Return the next child that answers, and its answer; JobError if a child ended or is silent."""
        pipes = {child.process.stdout: child for child in busy}
        while True:
            for pipe in children.check(*filter(None, pipes)):
                child = pipes[pipe]
                if line := pipe.readline():
                    return child, json.loads(line)
                child.process.wait()
                last_line = child.stderr_text().strip().splitlines()[-1:]
                words = "; ".join([f"its process {child.exit_description()}", *last_line, RESUMES])
                raise JobError(busy[child], words)
            for child, job in busy.items():
                if child.silent > self.timeout:
                    raise JobError(job, f"its process was lost, no sign of life for {self.timeout:g} s")


def _give_next_job(child: Child, waiting_jobs: deque[tuple[int, Sequence[Any]]]) -> int:
    """Send the next job to ``child``, and return the job's index."""
    job_index, arguments = waiting_jobs.popleft()
    assert child.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child has ended: the missing answer shows it
        child.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        child.process.stdin.flush()
    return job_index


def main() -> None:
    """Read jobs from stdin, a line each, run them, and write results to stdout."""
    function = pkgutil.resolve_name(sys.argv[1])
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answer: dict[str, Any] = {"result": function(*json.loads(line))}
            except Exception as error:
                users = explain(error)  # None: a defect of this package
                words = str(users) if users else f"{type(error).__name__}: {error}"
                answer = {"failed": words, "trace": "" if users else traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")


# The time that the other processes have to end by themselves after one has ended with an error (s).
GRACE = 5.0
# Replaces an exit code in a report if the process did not fail, but lost another process.
LOST = 75


class RestartableError(OperationError):
    """The loss of a process, after which all processes may be restarted."""


def run_in_processes(
    argv: Sequence[str], nproc: int, *, timeout: float, threads: int | None, restarts: int = 0,
    hint: Callable[[], str], log: Path | None = None, show_output: bool = True,
) -> int:  # fmt: skip
    """Run ``landscape`` in ``nproc`` processes until all have ended, and return their common exit code.

    Args:
        argv: the command-line arguments of every process.
        nproc: the number of processes.
        timeout: the longest time of a process without a sign of life (s).
        threads: the number of threads that the processes share; None: as environment variables say.
        restarts: how often all processes may be restarted after one is lost.
        hint: returns words that tell the user how to resume after a process is lost.
        log: a file for lines about starts and failures, which is not written if its folder does not exist.
        show_output: whether rank 0 writes to this process's stdout and stderr.

    Raises OperationError (InputError for bad usage) with the message of the process that failed first, or
    with the rank of the process that was lost.
    """
    for attempt in range(restarts + 1):
        with Children() as children:
            # The variables that torchrun sets, and the variables with which the processes find one another.
            environment = {
                "WORLD_SIZE": str(nproc),
                "LOCAL_WORLD_SIZE": str(nproc),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                STORE: str(children.folder),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback()),
                "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback()),
                **threads_each(nproc, threads),
            }
            for rank in range(nproc):
                variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                show = show_output and rank == 0
                children.start("landscape.cli", argv, variables, piped=False, show=show)
            _log(log, f"start {attempt}: processes {', '.join(str(c.process.pid) for c in children.all)}")
            try:
                return _watch(children, timeout)
            except LandscapeError as error:
                _log(log, str(error))
                if not isinstance(error, RestartableError):
                    raise
                if attempt == restarts:
                    line, advice = str(error), hint()
                    addition = "" if advice in line else f"; {advice}"  # the line may already have it
                    raise OperationError(line + addition) from error
    raise AssertionError("unreachable")


def _watch(children: Children, timeout: float) -> int:
    """Wait for the end of all children, and return the exit code of :func:`run_in_processes`, or raise."""
    failures, deadline = FolderStore(children.folder), 0.0
    while True:
        children.check()
        for child in children.all:
            if (child.ended or 0) < 0:
                raise RestartableError(f"{_name(child, children)} {child.exit_description()}")
        if line := failures.get("failure"):
            _, code, words = line.split(" ", 2)
            kinds = {InputError.exit_code: InputError, LOST: RestartableError}
            raise kinds.get(int(code), OperationError)(words)
        running = [child for child in children.all if child.ended is None]
        if any(child.ended for child in children.all):
            deadline = deadline or time.monotonic() + GRACE
        if not running or (deadline and time.monotonic() > deadline):
            return _code(children)
        if silent := [_name(child, children) for child in running if child.silent > timeout]:
            raise RestartableError(f"{' and '.join(silent)} lost, no sign of life for {timeout:g} s")


def _code(children: Children) -> int:
    """Return the common exit code; RestartableError if a process ended with an unreported error."""
    failed = [child for child in children.all if child.ended in (1, 2)]
    if not failed:
        return max(child.ended or 0 for child in children.all)
    sys.stderr.write(failed[0].stderr_text())
    raise RestartableError(f"{_name(failed[0], children)} {failed[0].exit_description()}")


def _name(child: Child, children: Children) -> str:
    return f"rank {child.number} of {len(children.all)}"


def stamped(line: str) -> str:
    """Return the line of a log, with the time."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}Z {line}\n"


def _log(path: Path | None, line: str) -> None:
    """Append ``line`` to the log of a run whose folder exists, and ignore errors in writing."""
    if path and path.parent.parent.is_dir():
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(stamped(line))


def report(message: str, code: int) -> bool:
    """Report a failure to the launcher of this process, and return whether there is a launcher.

    The launcher prints the first failure that is reported.
    """
    failures = launcher_store()
    if failures:
        with contextlib.suppress(OSError):  # the launcher has ended, and cannot read it
            failures.first("failure", failure(os.environ.get("RANK", 0), code, message))
    return failures is not None


def failure(rank: object, code: int, message: str) -> str:
    """Return the text of a failure in a store: rank, exit code and message."""
    return f"{rank} {code} {' '.join(message.split())}"
