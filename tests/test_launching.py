"""Processes and the machine around them: ports, the module path, signals, time limits, locks, broken streams."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import landscape
from landscape import InputError, OperationError
from landscape.checkpoint import storage
from landscape.core import errors, files, progress
from landscape.core.files import Lock
from landscape.data import base
from landscape.evaluation import grid
from landscape.training.processes import children
from landscape.training.processes.children import Children
from landscape.training.processes.process_group import Group, number
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests.conftest import Command, wait_for
from tests.groups import together

ROOT = Path(__file__).parents[1]
linux = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
LONG = ("--set", "steps=1000000", "--set", "checkpoint.every=20")
# A busy machine takes its time to start Python; the limits on waiting hold from a signal on.
STARTING = 300.0


@contextlib.contextmanager
def running(*words: object, cwd: Path | None = None, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``landscape WORDS``; killed at the latest with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "landscape", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ran(*words: object, code: str = "from landscape.cli import main; main()", **options: Any) -> Any:
    """``landscape WORDS``, or ``code`` with them, as a process of its own that has ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    argv = [*options.pop("before", ()), sys.executable, "-P", "-c", code, *map(str, words)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, **options)


def children_of(process: int) -> list[int]:
    """The children of a process, in the order in which they were started."""
    return [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def lives(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def listening(processes: list[int]) -> set[str]:
    """The addresses at which ``processes`` listen, as the kernel writes them."""
    sockets = set()
    for process in processes:
        for handle in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(handle))
    rows = [line.split() for t in ("tcp", "tcp6") for line in Path(f"/proc/net/{t}").read_text().splitlines()]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


# Ports, and what comes in through them.


@linux
def test_processes_started_by_hand_listen_on_the_address_that_is_given() -> None:
    (addresses, others) = together(2, where_it_listens)
    assert addresses == others == {"0100007F"}


def where_it_listens(group: Group) -> set[str]:
    group.agree({})
    return listening([os.getpid()])


def test_no_object_is_pickled_on_the_wire() -> None:
    for path in (ROOT / "landscape").rglob("*.py"):  # such as torch.distributed's all_gather_object
        assert set(re.findall(r"\.(\w+_object(?:_list)?)\b", path.read_text())) <= {"is_object"}, path
    assert grid._part(_sent({"v": np.arange(3.0)}, ["x", 1.5]))[1] == ["x", 1.5]
    for foreign in (pickle.dumps(InputError("x")), b"", b"\xff" * 64, _sent({"v": np.array(["x"])}, [])):
        with pytest.raises(OperationError):
            grid._part(foreign)


def _sent(arrays: dict[str, Any], facts: list[Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, facts=json.dumps(facts), **arrays)
    return buffer.getvalue()


# The module path.


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_nothing_in_the_current_folder_runs_unasked(processes: str, tmp_path: Path) -> None:
    trap = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nraise SystemExit('trap')\n"
    for name in ("sklearn", "h5py", "multiprocessing", "json", "landscape"):
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / "mine.py").write_text(
        "from landscape import models\nmodel = lambda: models.build('mlp', widths=[64, 10])\n"
    )
    own = ["--set", "steps=2", "--set", "model={name='mine:model'}", "-q"]
    analyzed = ["contour", "run/last.h5", "--grid", "2", "--model", "mine:model"]
    for words in (
        ["train", "digits-dpsgd", *own, "--nproc", processes, "-o", "run"],
        *([analyzed] if processes == "2" else []),  # in the slow tests
    ):
        done = ran(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.ran")) == []


# The environment.


def test_a_grid_names_a_variable_that_is_wrong(
    command: Command, monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    launch.launch(recipe.read(str(tiny), ["steps=0"]), tmp_path / "run")
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = command("contour", tmp_path / "run" / "last.h5", "-o", tmp_path / "c.h5")
    assert (code, out) == (2, "")
    assert err.startswith("landscape: RANK: 'x' is not allowed")
    assert err.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    assert number("RANK", 0) == 1


def test_what_memory_and_files_refuse_is_a_line(command: Command, tiny: Path, tmp_path: Path) -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")):
        assert "not enough memory" in str(errors.explain(error))
    assert errors.explain(RuntimeError("a defect")) is None
    huge = f"model.widths=[6, {10**13}, 3]"
    code, out, err = command("train", tiny, "--set", huge, "-o", tmp_path / "run")
    assert (code, out) == (1, "")
    assert "memory" in err
    assert "lower" in err
    assert err.count("\n") == 1
    for name in ("x" * 300, "y" * 150 + "/" + "z" * 256):
        code, _, err = command("train", tiny, "-o", tmp_path / name)
        assert code in (1, 2)
        assert err.count("\n") == 1


@pytest.mark.slow
def test_a_full_or_closed_stream_is_no_traceback(tiny: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    landscape_ = f"OMP_NUM_THREADS=1 {sys.executable} -m landscape"
    done = subprocess.run(["bash", "-c", f"{landscape_} recipes > /dev/full"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "landscape: stdout: No space left on device\n")
    for i, ending in enumerate(("2>&-", "2> /dev/full", "2> >(true)")):
        words = f"train {tiny} -o {tmp_path}/{i} {ending}"
        done = subprocess.run(["bash", "-c", f"{landscape_} {words}"], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [f"{tmp_path}/{i}/last.h5"]), ending
        assert landscape.load(tmp_path / str(i) / "last.h5").step == 30


def test_messages_to_a_terminal_that_is_gone_are_lost(tmp_path: Path) -> None:
    hear, say = os.pipe()
    os.close(hear)
    told = progress.tolerant_stream(say)
    print("nobody reads this", file=told, flush=True)
    print("nor this", file=told)
    told.close()
    os.close(say)


def test_a_cache_that_is_read_only_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setenv("LANDSCAPE_CACHE", str(file / "below"))
    for _ in range(2):
        with pytest.warns(UserWarning, match="LANDSCAPE_CACHE"):
            found = base.cached("x", tmp_path, ["file"], "", lambda: {"a": np.arange(3)})
        np.testing.assert_array_equal(found["a"], [0, 1, 2])
        monkeypatch.delenv("LANDSCAPE_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)


CAN_READ = "+dac_override,+dac_read_search"


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="becomes another user")
@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_user_without_home_and_name_can_work(processes: str, tiny: Path, tmp_path: Path) -> None:
    someone = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
    someone += [f"--inh-caps={CAN_READ}", f"--ambient-caps={CAN_READ}", "env", "-u", "HOME", "-u", "USER"]
    if subprocess.run([*someone, "true"], capture_output=True).returncode:
        pytest.skip("may not become another user here")
    words = ("train", tiny, "-o", tmp_path / "run", "--nproc", processes, "-q")
    done = ran(*words, before=someone, env={"MPLCONFIGDIR": str(tmp_path / "matplotlib")})
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, [f"{tmp_path}/run/last.h5"]), done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_read_is_a_line(
    tiny: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(storage, "named_like_a_run", refused)  # root may read all
    code, out, err = command("train", tiny, "-o", tmp_path)
    assert (code, out, err) == (1, "", f"landscape: {tmp_path}: Permission denied\n")


# Time limits.


@linux
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(1,), (0, 1)])
def test_a_frozen_process_is_named_in_time(stopped: tuple[int, ...], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running("train", tiny, *LONG, "--nproc", "2", "--timeout", "12", "-o", run, "-q") as process:
        wait_for((run / "step-0000020.h5").exists)
        for rank in stopped:
            os.kill(children_of(process.pid)[rank], signal.SIGSTOP)
        clock = time.monotonic()
        err = process.communicate(timeout=STARTING)[1]
        assert time.monotonic() - clock < 12 + 15
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert err.startswith(f"landscape: rank {stopped[0]} of 2")
    assert "no sign of life for" in err
    assert f"a resumed run continues from {run / 'last.h5'}" in err


# Signals, and what is left behind.


@linux
@pytest.mark.parametrize(("kind", "number"), [
    ("train", signal.SIGTERM),
    pytest.param("sweep", signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("figures", signal.SIGINT, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_signal_leaves_no_process(kind: str, number: signal.Signals, tiny: Path, tmp_path: Path) -> None:
    words: dict[str, tuple[object, ...]] = {
        "train": ("train", tiny, *LONG, "--nproc", "2", "-o", tmp_path / "run"),
        "sweep": ("sweep", tiny, *LONG, "--set", "lr=0.1,0.2", "--jobs", "2", "-o", tmp_path),
        "figures": (
            "figures", "fig2a", "--scale", "smoke", "--jobs", "2", "-o", tmp_path / "f", "--runs", tmp_path,
        ),
    }  # fmt: skip
    with running(*words[kind]) as process:
        wait_for(lambda: list(tmp_path.rglob("step-*.h5")))
        started = children_of(process.pid)
        assert len(started) == 2
        process.send_signal(number)
        clock = time.monotonic()
        _, err = process.communicate(timeout=STARTING)
        wait_for(lambda: not any(map(lives, started)), 10.0)
        assert time.monotonic() - clock < 60  # some seconds; Python's own end takes long on a busy machine
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in err
    if number != signal.SIGKILL:
        last = err.splitlines()[-1]
        assert last.startswith("landscape: interrupted")
        assert number == signal.SIGINT or number.name in last
    for path in tmp_path.rglob("*.h5"):
        landscape.load(path)


def booted(pid: int) -> bool:
    """Whether it is a child of ours, and not one that an import starts for a moment."""
    try:
        return "processes/__init__.py" in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False


@linux
def test_a_stopped_child_dies_with_its_parent() -> None:
    code = (
        "import time; from landscape.training.processes.children import Children\n"
        "with Children() as c: c.start('landscape.training.processes.children', ['os:getpid'], {}, piped=True, show=False); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        try:
            wait_for(lambda: any(map(booted, children_of(parent.pid))))
            (child,) = filter(booted, children_of(parent.pid))
            time.sleep(0.5)
            os.kill(child, signal.SIGSTOP)
        finally:
            parent.kill()
    wait_for(lambda: not lives(child), 10.0)


# The pool.


@pytest.mark.slow
def test_jobs_are_done_and_the_one_that_fails_is_named() -> None:
    found: dict[int, Any] = {}
    children.Pool(2).run("operator:truediv", [[k, 2] for k in range(5)], found.__setitem__)
    assert found == {k: k / 2 for k in range(5)}
    with pytest.raises(children.JobError, match="ZeroDivisionError") as caught:
        children.Pool(1).run("operator:truediv", [[1, 1], [1, 0]], found.__setitem__)
    assert caught.value.number == 1
    with pytest.raises(children.JobError, match="was killed by SIGABRT"):
        children.Pool(1).run("os:abort", [[]], found.__setitem__)
    with pytest.raises(children.JobError, match="no sign of life"):
        children.Pool(1, timeout=3.0).run("signal:raise_signal", [[signal.SIGSTOP]], found.__setitem__)


def test_the_folder_of_processes_is_private_and_goes_with_them() -> None:
    with Children() as started:
        assert started.folder.stat().st_mode & 0o077 == 0
    assert not started.folder.exists()


# Locks.


@pytest.mark.filterwarnings("default:.* cannot be resumed")
def test_one_writer_at_a_time_and_the_line_names_it(
    tiny: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    run = tmp_path / "run"
    (run / "inner").mkdir(parents=True)
    (run / ".lock").write_text("left behind by a process that was killed\n")
    assert command("train", tiny, "-o", run, "-q")[0] == 0
    assert not (run / ".lock").exists()
    wanted = ("contour", run / "last.h5", "--grid", "3", "-o", run / "c.h5", "-q")
    assert command(*wanted)[0] == 0
    before = {path.name: path.read_bytes() for path in run.glob("*.h5")}
    for place, words in (
        (run, ("train", tiny, "-o", run, "--resume")),
        (run, ("train", tiny, "-o", run, "--force", "--set", "seed=1")),
        (run, ("sweep", tiny, "-o", run)),
        (run / "c.h5", (*wanted, "--seed", "1")),
    ):
        with Lock(place) as held:
            held.acquire()
            code, out, err = command(*words)
        assert (code, out) == (1, "")
        assert err.startswith(
            f"landscape: {place}: in use by process {os.getpid()} on {socket.gethostname()} since"
        )
        assert err.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in run.glob("*.h5")}
    assert command(*wanted, "--seed", "1", "--force")[0] == 0
    assert sorted(p.name for p in run.iterdir() if p.name.startswith(".")) == []


def test_a_run_that_another_process_starts_meanwhile_is_not_touched(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, mine = tmp_path / "run", recipe.read(str(tiny))
    real = launch.trainer_class

    def slow(*args: Any) -> Any:  # while this one builds its model, another trains
        monkeypatch.setattr(launch, "trainer_class", real)
        launch.launch(recipe.read(str(tiny), ["seed=1"]), other)
        return real(*args)

    monkeypatch.setattr(launch, "trainer_class", slow)
    with pytest.raises(OperationError, match="another process has started a run there"):
        launch.launch(mine, other)
    assert landscape.load(other / "last.h5").seed == 1


BELOW_PYTHON = """
import sys, click, torch
from landscape.cli import main
from landscape.core import registry
@registry.commands.add("busy")
@click.command()
def busy():
    matrix = torch.randn(4000, 4000)
    print("begun", flush=True)
    torch.linalg.svd(matrix)
sys.argv = ["landscape", "busy"]
main()
"""


@linux
def test_the_second_signal_ends_a_command_at_once() -> None:
    """Also while a call below Python, which takes a minute, hears none."""
    with subprocess.Popen([sys.executable, "-c", BELOW_PYTHON], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20.0)
    assert (process.returncode, err.count("\n")) == (143, 1)
    assert err.startswith("landscape: interrupted by SIGTERM")


SIGNALING = """
import os, signal, sys
from landscape.__main__ import main
class Signaling:
    def find_spec(self, name, path=None, target=None):
        try:
            if name == {name!r}: os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt: pass
sys.meta_path.insert(0, Signaling())
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@linux
def test_a_signal_while_modules_are_imported_ends_the_command(tiny: Path) -> None:
    """Other packages catch exceptions in their imports: a KeyboardInterrupt there would be lost, or leave them
    incomplete."""
    for name in ("numpy.linalg", "click"):
        done = ran("train", tiny, code=SIGNALING.format(name=name))
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "1000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_that_wait_sleep_unless_the_user_has_it_otherwise(given: dict[str, str], found: str) -> None:
    """OpenMP reads its settings as it is loaded, with torch."""
    code = (
        "import atexit, os, sys, landscape.__main__ as command; sys.argv[1:] = ['--help']\n"
        "atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules))\ncommand.main()"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    } | given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == f"{found} False", done.stderr
