"""The example of a plugin package, installed from its folder: its names work without a change of the package."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import landscape
from landscape.core import registry
from tests.conftest import TINY

pytestmark = pytest.mark.xdist_group("plugin")  # the plugin is installed once
ROOT = Path(__file__).parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run ``python …`` in a folder, with the plugin installed where only these processes find it."""
    # Looking for pip by find_spec would make setuptools give the standard library's distutils to this
    # process from then on, and torch.compile fail in it.
    present = {distribution.name for distribution in importlib.metadata.distributions()}
    if missing := {"pip", "setuptools"} - present:
        pytest.skip(f"cannot install a package without {' and '.join(sorted(missing))}")
    folder = tmp_path_factory.mktemp("plugin")
    source, installed = folder / "source", folder / "installed"
    shutil.copytree(ROOT / "examples" / "plugin", source)  # setuptools writes next to the sources
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)]), "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error:plugin",
    }  # fmt: skip

    def python(*words: object, cwd: Path = folder) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, *map(str, words)]
        return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True)

    done = python(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--target", installed, source,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return python


ONCE = """
import contextlib, io, json, os, sys
import landscape.cli

commands, checks = json.loads(sys.argv[1]), sys.argv[2]
found = {}
for name, words in {"help": ["--help"], **commands}.items():
    out, err, code, sys.argv = io.StringIO(), io.StringIO(), 0, ["landscape", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            landscape.cli.main()
        except SystemExit as stop:
            code = stop.code
    found[name] = [code, out.getvalue(), err.getvalue(), "torch" in sys.modules]
import pytest
found["checks"] = int(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, checks]))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def once(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of what one process with the plugin does, and what it prints: commands, and the plugin's own tests."""
    folder = tmp_path_factory.mktemp("once")
    (folder / "tiny.toml").write_text(TINY)
    train = [
        "train", folder / "tiny.toml", "-o", folder / "run", "-q", "--set", "algorithm={name='clipped-ssgd', max_norm=0.3}",
        "--set", "data={name='two-moons', samples=200}", "--set", "model.widths=[2, 8, 2]",
    ]  # fmt: skip
    commands = {"two-moons": ["two-moons", folder / "moons.csv", "--samples", "10"], "train": train}
    words = json.dumps({name: list(map(str, each)) for name, each in commands.items()})
    done = run("-c", ONCE, words, ROOT / "examples" / "plugin" / "tests")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1]) | {"printed": done.stdout}


def test_train_with_the_algorithm_and_the_data_of_a_plugin(once: tuple[Path, dict[str, Any]]) -> None:
    folder, found = once
    code, _, err, _ = found["train"]
    assert (code, err) == (0, "")
    end = landscape.load(folder / "run" / "last.h5")
    assert isinstance(end, landscape.Checkpoint)
    assert (end.algorithm, end.data["name"], end.data["train"]) == ("clipped-ssgd", "two-moons", 200)
    # One step moves the mean by at most α times the bound.
    moved = end.history["displacement2"] ** 0.5
    assert 0 < np.nanmax(moved) <= 0.2 * 0.3 * (1 + 1e-5)
    # The column that the algorithm adds to the history: the share of its four learners that are clipped.
    with h5py.File(folder / "run" / "last.h5") as file:
        column = file["history/clipped_share"]
        assert (column.attrs["unit"], column.shape, column.dtype) == ("1", (30,), np.float64)
        share = column[:]
    assert set(np.unique(4 * share)) <= {0, 1, 2, 3, 4}
    assert 0 < share.mean() < 1


@pytest.mark.slow
def test_the_names_of_a_plugin_are_in_lists_and_messages(run: Run, tmp_path: Path, tiny: Path) -> None:
    words = ("--set", "algorithm={name='clipped-ssgd'}", "--set", "data={name='two-moons', samples=200}")
    words += ("--set", "model.widths=[2, 8, 2]", "-o", tmp_path / "run", "-q")
    assert run("-m", "landscape", "train", tiny, *words).returncode == 0
    done = run("-m", "landscape", "contour", tmp_path / "run", "--grid", "3", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("-m", "landscape", "train", tiny, "--set", "algorithm={name='clipped-ssgd', max_norm=-1}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "algorithm.max_norm: -1" in done.stderr
    code = "import landscape; print('two-moons' in landscape.data.names(), len(landscape.data.load('two-moons').train[1]))"
    assert run("-c", code).stdout == "True 1000\n"
    done = run("-m", "landscape", "train", "digits-ssgd", "--set", "algorithm={name='clipped-sgd'}")
    assert (done.returncode, "did you mean 'clipped-ssgd'?" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_figure_of_a_plugin_is_listed_and_made(run: Run, tmp_path: Path) -> None:
    listed = run("-m", "landscape", "figures")
    assert "\nclipping           Example, Figure 1: " in listed.stdout
    done = run("-m", "landscape", "figures", "clipping", "--scale", "smoke", "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"clipping.png", "clipping.csv"}


def test_the_command_of_a_plugin_is_listed_and_runs(once: tuple[Path, dict[str, Any]]) -> None:
    folder, found = once
    _, out, _, torch_is_there = found["help"]
    assert "two-moons Write the data set two-moons as a CSV file." in " ".join(out.split())
    assert not torch_is_there  # the plugin only declares its names
    assert found["two-moons"][:2] == [0, f"{folder / 'moons.csv'}\n"]
    assert len((folder / "moons.csv").read_text().splitlines()) == 11


def test_the_names_of_a_plugin_pass_the_checks_of_the_package(once: tuple[Path, dict[str, Any]]) -> None:
    _, found = once
    assert (found["checks"], "2 passed" in found["printed"]) == (0, True), found["printed"]


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "import sys; sys.exit()", "raise ImportError"])
def test_a_plugin_that_ends_is_left_out(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ended_plugin.py").write_text(end)
    (tmp_path / "sound_plugin.py").write_text("loaded = True")
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint
    points = [point(name, f"{name}_plugin", registry.GROUP) for name in ("ended", "sound")]
    monkeypatch.setattr(registry, "_entry_points", lambda path: tuple(points))
    monkeypatch.setattr(registry, "_loaded", set())
    with pytest.warns(
        registry.PluginWarning, match=r"'ended' \(ended_plugin\) cannot be loaded: ImportError"
    ):
        registry.load_plugins()
    assert sys.modules.pop("sound_plugin").loaded
    with pytest.raises(KeyboardInterrupt), registry.others_code():
        signal.raise_signal(signal.SIGINT)  # Ctrl-C is none of the plugin's
