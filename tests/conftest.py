"""Settings for all tests: one thread, so that the same bits come out whatever else the machine does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# The tests share the cores already; before torch is imported, for the processes that tests start, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

hypothesis.settings.register_profile("landscape", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("landscape")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One worker more than there are cores: tests wait for other processes and for time limits to pass."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Until ``condition`` holds; the limit is one for the slowest machines."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of which all but the ``quick`` ones, which go a way of their own each, are run by make test-all."""
    kept = set(quick)
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


@pytest.fixture(autouse=True)
def module_path() -> Iterator[None]:
    """Folders that a command looked in for a user's modules are left out of the next test."""
    path = list(sys.path)
    yield
    sys.path[:] = path


@pytest.fixture(autouse=True, scope="session")
def one_thread_and_no_waiting_for_the_disk() -> Iterator[None]:
    """Files are written as ever, but not waited for: no test outlives a power failure."""
    import torch  # not above: the process that hands the tests out has no use for it

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share what takes long to make share a worker, so that it is made once.

    Those that use ``tests.groups`` share the server that their processes are forks of; others a fixture of their
    module.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") or not isinstance(item, pytest.Function):
            continue
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if {"together", "CONTEXT", "in_processes"} & {*item.function.__code__.co_names}:
            item.add_marker(pytest.mark.xdist_group("processes"))
        elif any(fixture.scope == "module" for found in fixtures for fixture in found):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``landscape ARGS`` in this process: (exit code, stdout, stderr)."""
    import landscape.cli

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["landscape", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            landscape.cli.main()
        out, err = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, out, err

    return run


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves are as frequent as may be, on the batched path after four points."""
    monkeypatch.setattr("landscape.evaluation.grid.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("landscape.evaluation.grid.SAVE_RATIO", 0.0)
    monkeypatch.setattr("landscape.evaluation.evaluate.block_size", lambda *_: (1000, 4))  # samples, points


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[bytes]]:
    """Start ``landscape ARGS`` as a process of its own, one thread, nothing on its output."""

    def run(*args: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "landscape", *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return run


TINY = """
learners = 4
batch = 40
lr = 0.2
steps = 30
algorithm = { name = "dpsgd", mixing = "ring(1)" }
model = { name = "mlp", widths = [6, 8, 3], activation = "tanh" }
data = { name = "synthetic", samples = 200, dimension = 6, classes = 3 }
decompose = { every = 3 }
evaluate = { every = 7 }
checkpoint = { every = 10 }
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A recipe file that trains in a fraction of a second: DPSGD on a small Gaussian mixture."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of ``tiny``, for tests that write nothing there."""
    from landscape.core.options import parse_toml
    from landscape.training.recipes import recipe
    from landscape.training.run import launch

    folder = tmp_path_factory.mktemp("trained")
    launch.launch(recipe.from_values(parse_toml(TINY, "tiny") | {"name": "tiny"}), folder)
    return folder
