"""A command over several processes: of ``--nproc N``, of a launcher, or of commands that share the runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

import click
import torch
import torch.distributed as dist

from landscape.cli import Stopped, flags_of, output
from landscape.cli.options import group
from landscape.core.errors import InputError, explain
from landscape.core.files import printable
from landscape.core.options import Count, Positive
from landscape.evaluation.grid import RESUMABLE, LostError
from landscape.training.processes import children
from landscape.training.processes.children import TIMEOUT, Pool
from landscape.training.processes.comm import LostProcessError
from landscape.training.processes.process_group import Group, number, started_by_launcher

# A share of a grid may take long; a process that ends or is silent is noticed without this limit.
EXCHANGE_TIMEOUT = 7 * 24 * 3600.0

SECONDS = {"metavar": "S"}


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that share a command's points.

    Args:
        nproc: Number of processes (and GPUs) that share the points; not needed under torchrun, which starts
            the processes.
        timeout: Seconds that a process may be silent.
    """

    nproc: Count = 1
    timeout: Positive = TIMEOUT

    def start(self) -> Team:
        """Start the processes of ``--nproc N``, if N > 1; in each of them, return its team.

        The N processes run the command in place of this process, which exits after them. They divide the
        processor's threads. If one process fails, all end, with an error that names its rank.
        """
        if started_by_launcher() and number("WORLD_SIZE", 1) > 1:
            size, rank = number("WORLD_SIZE", 1), number("RANK", 0)
            output.current().muted = rank > 0
            if self.nproc not in (1, size):
                raise InputError(f"--nproc: {self.nproc} is not allowed, torchrun started {size} processes")
            return Team(rank, self.timeout)
        if self.nproc == 1:
            return Team()
        if not dist.is_available():
            raise InputError("--nproc: this build of PyTorch has no torch.distributed; use 1")
        threads = torch.get_num_threads()
        code = children.run_in_processes(
            sys.argv[1:], self.nproc, timeout=self.timeout, threads=threads, hint=lambda: RESUMABLE
        )
        raise click.exceptions.Exit(code)


OPTIONS = group(Processes, nproc={"metavar": "N"}, timeout=SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jobs:
    """The number of runs that a command makes at a time, each in its own process, and its share of all runs.

    Args:
        jobs: Number of runs at a time, each in its own process.
        timeout: Seconds that a process may be silent, or that an exchange in training may take.
        share: Make only share K of N of the runs: N commands, such as the tasks of a SLURM array, make a
            share each; afterwards the same command without --share completes the work (see docs/cluster.md).
    """

    jobs: Count = 1
    timeout: Positive = TIMEOUT
    share: str | None
    device: str
    data_dir: str | None

    def pool(self) -> Pool:
        """Return the pool of processes that makes the runs."""
        from landscape.training.run import launch  # here, because only training needs it

        return launch.pool(self.jobs, self.timeout, self.device)


JOBS = group(Jobs, jobs={"metavar": "N"}, timeout=SECONDS, share={"metavar": "K/N"})


@dataclasses.dataclass(frozen=True)
class Team:
    """The processes of a command, as one of them sees it.

    Attributes:
        rank: Rank of this process.
        timeout: Seconds that another process may be silent; None if this process is the only one.
    """

    rank: int = 0
    timeout: float | None = None

    @contextlib.contextmanager
    def connected(self) -> Iterator[dist.ProcessGroup | None]:
        """Yield the group of the connected processes; None if there is only one process.

        All processes must make the same calls with the group.
        """
        if self.timeout is None:
            yield None
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(number("LOCAL_RANK", 0, 0) % torch.cuda.device_count())
        with joined(torch.device("cpu"), self.timeout, EXCHANGE_TIMEOUT) as group:
            group.agree({"command": " ".join(sys.argv[1:])})
            yield dist.group.WORLD


@contextlib.contextmanager
def joined(device: torch.device, timeout: float, exchange_timeout: float | None = None) -> Iterator[Group]:
    """Yield the group of processes that a launcher started.

    A failure ends this process here: an orderly exit would wait for messages that no process sends. Only the
    first process to fail prints its error.
    """
    group = None
    try:
        group = Group.join(device, timeout, exchange_timeout)
        try:
            yield group
        except LostError as error:
            raise LostProcessError(f"{group.diagnose(error)}; {RESUMABLE}") from error
        except (SystemExit, click.exceptions.Exit):  # done, with an exit code
            group.close()
            raise
        group.close()
    except (SystemExit, click.exceptions.Exit):
        raise
    except BaseException as error:
        _end_process(error, group)


def _end_process(error: BaseException, group: Group | None) -> NoReturn:
    """Report an error to the other processes, print it if it is the first, and end this process."""
    has_launcher = children.launcher_store() is not None
    is_lost = isinstance(error, LostProcessError)  # another process failed first
    failure = LostProcessError(str(error)) if isinstance(error, Stopped) else explain(error)
    if failure:
        line, code = failure.line(flags_of(output.current().command)), failure.exit_code
    else:
        line, code = f"{type(error).__name__}: {error}", 1
    if isinstance(error, Stopped):
        code = error.exit_code
    if group and group.rank and not has_launcher and not is_lost:
        line = f"rank {group.rank}: {line}"
    if group:
        is_first = group.report(line, children.LOST if is_lost else code)
    else:
        is_first = not children.report(line, code)
    if failure and is_first and not has_launcher:
        click.echo(f"landscape: {printable(line)}", err=True)
    if failure is None:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
