"""What Windows lacks: modules and constants of POSIX are taken away before the package is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, signal, sys, types
import click, filelock, h5py, numpy, torch.distributed, tqdm  # not ours

for name, module in sys.modules.items():  # which has a form of its own for Windows
    if name.startswith("filelock.") and hasattr(module, "os"):
        module.os = types.SimpleNamespace(**vars(os))
for module in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[module] = None
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "getuid", "geteuid", "fork"):
    delattr(os, name)
del signal.SIGHUP

import landscape
for name in landscape.__all__:
    getattr(landscape, name)

from landscape.core.files import HAS_LOCKS
from landscape.training.recipes import recipe
from landscape.training.run import launch
assert not HAS_LOCKS
from pathlib import Path

import pytest
small = ["steps=3", "model.widths=[64, 4, 10]"]
stale = Path(sys.argv[1], ".landscape-0123456789abcdef.tmp")
stale.touch()
os.utime(stale, (0, 0))
end = launch.launch(recipe.read("digits-ssgd", small), sys.argv[1])
assert not stale.exists()
run = landscape.load(sys.argv[1] + "/last.h5")
problem = run.problem()
landscape.contour(problem, landscape.random_plane(problem), grid=2).save(sys.argv[1] + "/c.h5")

import landscape.cli
sys.argv = ["landscape", "contour", sys.argv[1] + "/last.h5", "--grid", "2", "--nproc", "2"]
landscape.cli.main()
"""


@pytest.mark.slow
def test_the_package_works_without_what_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    argv = [sys.executable, "-W", "error", "-c", CODE, tmp_path / "run"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stderr == "landscape: processes: this system has no processes that share sockets; use 1\n"
    assert done.returncode == 2
    assert (tmp_path / "run" / "c.h5").exists()
