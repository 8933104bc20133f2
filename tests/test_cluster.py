"""Jobs on the workers of a Dask scheduler give the bits of those done here, whatever happens to the workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import landscape
from landscape import InputError, OperationError
from landscape.core import files
from landscape.evaluation import grid
from landscape.evaluation.grid import Dispatch, compute_missing
from landscape.training.processes import children
from landscape.training.processes import cluster as module
from landscape.training.processes.cluster import Cluster
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests import problems
from tests.chaos.cases import contents, difference
from tests.conftest import Command, wait_for
from tests.groups import free_port
from tests.test_cli import one_line
from tests.test_launching import ROOT, STARTING, linux, listening, lives, running

SEVERAL = ("--set", "steps=800", "--set", "lr=0.1,0.2,0.3", "--set", "checkpoint.every=40")


@pytest.fixture(scope="module")
def local() -> Iterator[Cluster]:
    """A process of this machine, with one thread."""
    pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    with Cluster("local:1") as started:
        yield started


def compare_with_one(tiny: Path, tmp_path: Path, command: Command) -> None:
    """The sweep in the folder "two" is that of one process."""
    assert command("sweep", tiny, *SEVERAL, "-o", tmp_path / "one", "-q")[0] == 0
    assert difference(contents(tmp_path / "one"), contents(tmp_path / "two")) == ""


def workers(command: subprocess.Popen[str]) -> list[int]:
    """The processes in which a command does its jobs; its threads have started them."""
    listed = Path(f"/proc/{command.pid}/task").glob("*/children")
    started = [int(p) for path in listed for p in path.read_text().split()]
    return [p for p in started if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


# Grids and what is not allowed.


@pytest.mark.xdist_group("cluster")
def test_a_grid_has_the_same_bits_and_a_failure_is_one_line(
    local: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    problem = landscape.Problem(model, lambda o, t: torch.nn.functional.cross_entropy(o, t), (x, y))
    plane = landscape.random_plane(problem)
    for analysis, shape in ((landscape.contour, (19, 7)), (landscape.hessian_grid, (3, 2))):
        saved: list[Any] = []
        there = analysis(
            problem, plane, shape, execution=landscape.Execution(cluster=local, save=saved.append)
        )
        here = analysis(problem, plane, shape)
        for name in here.shapes:
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))

    with pytest.raises(OperationError, match="cluster: model, loss and data cannot be sent .* 'generator'"):
        local.run((_ for _ in ()).send, [[None]], print)
    with pytest.raises(children.JobError, match="ZeroDivisionError") as caught:
        local.run("operator:truediv", [[1, 1], [1, 0]], lambda number, result: None)
    assert (caught.value.number, caught.value.known) == (1, False)
    monkeypatch.setattr(module, "_versions", lambda: {"Python": "2.7"})
    with pytest.raises(children.JobError, match=r"worker tls://127.* has Python 3.*, this command 2.7"):
        local.run("os:getppid", [[]], print)


@linux
@pytest.mark.xdist_group("cluster")
def test_a_local_cluster_is_for_its_owner_only(local: Cluster) -> None:
    processes: dict[int, int] = {}
    local.run("os:getpid", [[] for _ in range(20)], processes.__setitem__)
    assert listening([os.getpid(), *set(processes.values())]) == {"0100007F"}
    host, port = local.address.removeprefix("tls://").split(":")
    stranger = ssl.create_default_context()
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    # With TLS 1.3 the server refuses after the client's part of the handshake.
    with (
        stranger.wrap_socket(socket.create_connection((host, int(port)))) as secured,
        pytest.raises(OSError, match="certificate required"),
    ):
        secured.recv(1)


class Backwards:
    """Does jobs from the last to the first, and fails before number ``fails``."""

    def __init__(self, fails: int = -1) -> None:
        self.fails, self.sizes = fails, list[int]()

    def run(
        self, function: Callable[..., Any], jobs: Sequence[Sequence[Any]], done: Callable[[int, Any], None]
    ) -> None:
        for number in reversed(range(len(jobs))):
            if number == self.fails:
                raise OperationError("a job failed")
            self.sizes.append(len(jobs[number][0]))
            done(number, function(*jobs[number]))


def test_points_are_jobs_of_whole_blocks_and_a_failure_saves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grid, "PORTION_SECONDS", 0.0)
    monkeypatch.setattr(grid, "SAVE_SHARE", 0.0)
    points = torch.arange(23.0).view(23, 1)
    done, v = np.zeros(23, bool), np.full(23, np.nan)
    done[5], v[5] = True, 7.0
    saved, shares = list[int](), list[float]()

    def compute(points: torch.Tensor, progress: object) -> dict[str, torch.Tensor]:
        return {"v": 2 * points[:, 0]}

    def portions(workers: Backwards) -> Dispatch:
        return Dispatch(4, 2, lambda: saved.append(int(done.sum())), cluster=workers, progress=shares.append)

    first = Backwards(fails=1)
    with pytest.raises(OperationError, match="a job failed"):
        compute_missing(points, done, {"v": v}, compute, portions(first))
    assert first.sizes == [3, 4, 4, 4]
    assert saved == [4, 8, 12, 16, 16]
    second = Backwards()
    compute_missing(points, done, {"v": v}, compute, portions(second))
    assert second.sizes == [4, 4]
    expected = 2 * np.arange(23.0)
    expected[5] = 7.0
    np.testing.assert_array_equal(v, expected)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    with pytest.raises(InputError, match="not allowed with a group"):
        landscape.Execution(group=object(), cluster=second)  # type: ignore[arg-type]


CONTOUR, SWEEP = ("contour", "{run}"), ("sweep", "{tiny}", "-o", "{out}")


@pytest.mark.parametrize(
    ("words", "options", "code", "expected"),
    [
        (CONTOUR, "--cluster host", 2, "'host' is not allowed, it must be the address of a Dask scheduler"),
        (SWEEP, "--cluster local:0", 2, "'local:0' is not allowed"),
        (CONTOUR, "--cluster http://host:8786", 2, "'http://host:8786' is not allowed"),
        (CONTOUR, "--cluster local --nproc 2", 2, "--nproc: 2 is not allowed with --cluster"),
        (SWEEP, "--cluster local --jobs 2", 2, "--jobs: 2 is not allowed with --cluster"),
        (SWEEP, "--cluster 127.0.0.1:{port}", 1, "no Dask scheduler answers at 127.0.0.1"),
        (CONTOUR, "--cluster tls://127.0.0.1:{port}", 1, "TLS"),  # no certificate
    ],
)
def test_a_bad_address_is_one_line_and_leaves_nothing(
    words: Sequence[str], options: str, code: int, expected: str, tiny: Path, tmp_path: Path,
    command: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if code == 1:
        pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    monkeypatch.setattr(module, "CONNECT", 0.3)
    names = {"run": tmp_path / "run", "tiny": tiny, "out": tmp_path / "out", "port": free_port()}
    typed = [word.format(**names) for word in [*words, *options.split()]]
    one_line(command(*typed), code, "--cluster", expected)
    assert not list(tmp_path.rglob("*.h5"))


def test_a_scheduler_without_certificates_is_refused_where_they_are_required(
    tiny: Path, tmp_path: Path, command: Command
) -> None:
    """By Dask's configuration."""
    dask = pytest.importorskip("dask", reason="the extra 'cluster' is not installed")
    with dask.config.set({"distributed.comm.require-encryption": True}):
        words = ("sweep", tiny, "--cluster", f"tcp://127.0.0.1:{free_port()}", "-o", tmp_path / "out")
        one_line(command(*words), 1, "--cluster", "encryption required")


def test_a_folder_that_is_not_shared_is_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = recipe.read(str(tiny)).to_toml()
    with pytest.raises(
        OperationError, match="no such folder on .*; runs on a cluster need a folder that all"
    ):
        launch.train_elsewhere(toml, str(tmp_path / "no" / "run"), "cpu", "", None, 0.0)

    class Elsewhere:
        def run(self, function: str, jobs: Sequence[Sequence[Any]], done: Callable[[int, Any], None]) -> None:
            done(0, 1.0)

    monkeypatch.setattr(launch, "NFS_SECONDS", 0.1)
    run = launch.TrainingJob(recipe.read(str(tiny)), tmp_path / "run")
    with pytest.raises(OperationError, match="run: the run has ended elsewhere, but runs on a cluster need"):
        launch.train_runs(
            [run], lambda run, seconds: None, print, executor=Elsewhere(), device="cpu", data_dir=None
        )


def test_a_run_that_another_worker_has_is_waited_for(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has lost its command, or its scheduler, ends its job only after a step."""
    toml, folder = recipe.read(str(tiny), ["steps=1"]).to_toml(), tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    with files.Lock(folder) as other:
        other.acquire()
        threading.Timer(0.3, other.release).start()
        assert launch.train_elsewhere(toml, str(folder), "cpu", "", None, 10.0)
    with files.Lock(folder) as other:
        other.acquire()
        with pytest.raises(OperationError, match="in use by process"):
            launch.train_elsewhere(toml, str(folder), "cpu", "", None, 0.1)


# Workers and commands that are lost.


@linux
@pytest.mark.slow
def test_workers_that_are_killed_change_nothing(tiny: Path, tmp_path: Path, command: Command) -> None:
    two = tmp_path / "two"
    with running("sweep", tiny, *SEVERAL, "--cluster", "local:2", "-q", "-o", two) as process:
        wait_for(lambda: list(two.rglob("step-0000080.h5")))
        before = workers(process)
        assert len(before) == 2
        for worker in before:  # others take their places
            os.kill(worker, signal.SIGKILL)
        out, err = process.communicate(timeout=STARTING)
        assert (process.returncode, out.split()[-2:]) == (0, [f"{two}/sweep.csv", f"{two}/sweep.h5"])
        assert err == ""  # nothing of Dask
    compare_with_one(tiny, tmp_path, command)


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
def test_new_workers_get_the_problem_again(local: Cluster) -> None:
    problem = problems.mlp()
    plane = landscape.random_plane(problem)
    processes: dict[int, int] = {}
    before = landscape.contour(problem, plane, (3, 2), execution=landscape.Execution(cluster=local))
    local.run("os:getpid", [[] for _ in range(20)], processes.__setitem__)
    for process in set(processes.values()):
        os.kill(process, signal.SIGKILL)
    again = landscape.contour(problem, plane, (3, 2), execution=landscape.Execution(cluster=local))
    np.testing.assert_array_equal(before.loss, again.loss)
    with pytest.raises(
        children.JobError, match="4 workers died at it, the last at tls://.*; the same command goes"
    ):
        local.run("os:abort", [[]], print)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process_and_goes_on(
    number: signal.Signals, tiny: Path, tmp_path: Path, command: Command
) -> None:
    words = ("sweep", tiny, *SEVERAL, "--cluster", "local:2", "-q", "-o", tmp_path / "two")
    with subprocess.Popen(
        [sys.executable, "-m", "landscape", *map(str, words)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        wait_for(lambda: list(tmp_path.rglob("step-0000080.h5")))
        started = workers(process)
        os.killpg(process.pid, number)  # as a terminal does
        _, err = process.communicate(timeout=STARTING)
        wait_for(lambda: not any(map(lives, started)), 15.0)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert err.count("landscape: interrupted") == len(err.strip().splitlines()) == (number != signal.SIGKILL)
    assert command(*words)[0] == 0
    compare_with_one(tiny, tmp_path, command)


@linux
@pytest.mark.slow
def test_workers_of_another_folder_go_on_with_the_runs_of_a_command_that_was_killed(
    tiny: Path, tmp_path: Path, command: Command
) -> None:
    """A scheduler and a worker that were started by hand."""
    pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    elsewhere, port = tmp_path / "elsewhere", free_port()
    elsewhere.mkdir()
    address = f"tcp://127.0.0.1:{port}"
    words = ("sweep", tiny, *SEVERAL, "--cluster", address, "-o", tmp_path / "two")

    @contextlib.contextmanager
    def dask(*what: str) -> Iterator[None]:
        settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started = [sys.executable, "-m", "dask", *what, "--no-dashboard"]
        with subprocess.Popen(started, cwd=elsewhere, env=settings) as process:
            try:
                yield
            finally:
                process.terminate()

    with dask("scheduler", "--host", address):
        wait_for(lambda: f":{port:04X} " in Path("/proc/net/tcp").read_text())
        with dask("worker", address, "--nthreads", "2"):
            one_line(
                command(*words, "-q"), 1, "does 2 jobs at once, 1 is allowed; start it with --nthreads 1"
            )
        with dask("worker", address, "--nthreads", "1"):
            with running(*words, "-q") as process:
                wait_for(lambda: list(tmp_path.rglob("step-0000080.h5")))
                process.kill()
            code, _, err = command(*words, "-q")
            assert (code, err) == (0, "")
    compare_with_one(tiny, tmp_path, command)


@pytest.mark.slow
def test_files_that_nobody_named_are_not_run(tmp_path: Path) -> None:
    """The current folder has modules with the names of packages that Dask and PyTorch take if they are there."""
    pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    for name in ("zstandard", "lz4", "opt_einsum", "snappy", "uvloop"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'a').write({name!r})")
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom other import SIZE\n"
        "def points():\n    return torch.ones(4, SIZE), torch.zeros(4, dtype=torch.long)\n"
        "def net():\n    return torch.nn.Linear(SIZE, 2)\n"
    )
    (tmp_path / "other.py").write_text("SIZE = 3\n")
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    words = ("contour", "w.pt", "--model", "mine:net", "--data", "mine:points", "--grid", "3")
    with running(*words, "--cluster", "local:1", "-q", cwd=tmp_path, PYTHONPATH=str(ROOT)) as process:
        _, err = process.communicate(timeout=STARTING)
    assert (process.returncode, err) == (0, "")
    assert not (tmp_path / "planted").exists()
    assert landscape.load(tmp_path / "w-contour.h5").done.all()
