"""The layout that DESIGN promises: imports point downwards with no circle, files stay small, names load when used."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import landscape
from tests.mutants import MUTANTS

pytestmark = pytest.mark.xdist_group("source")  # it is parsed once
PACKAGE = Path(__file__).parents[1] / "landscape"
# From the top: a room may import those after it. _version is a number that all may read.
ROOMS = (
    "__init__", "__main__", "plugins", "cli", "testing", "integrations", "reports", "paper", "training", "plots", "analysis", "checkpoint", "curvature", "gradients", "evaluation",
    "results", "limits", "models", "data", "problem", "core", "_version",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package stands for its __init__.py."""
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


MODULES = modules()


def imported(path: Path) -> set[str]:
    """The modules of the package that ``path`` imports anywhere: in functions and under TYPE_CHECKING, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "landscape"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            if node.module and node.module.partition(".")[0] == "landscape":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in MODULES else node.module for name in names}
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    return {name: imported(path) for name, path in MODULES.items()}


def room(module: str) -> str:
    """The folder that a module lies in, or its own name."""
    return module.split(".")[1] if "." in module else "__init__"


def upwards(module: str) -> list[str]:
    """The imports of a module that lie above its room; the top is one of them."""
    allowed = ROOMS[ROOMS.index(room(module)) :]
    return [name for name in imports()[module] if room(name) not in allowed or name == "landscape"]


def test_imports_point_downwards_and_files_are_small() -> None:
    assert {module: found for module in MODULES if (found := upwards(module))} == {}
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: length for module, length in lines.items() if length > 600} == {}


def test_no_circle_of_imports() -> None:
    graph = {name: names - {name} for name, names in imports().items()}
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= set(MODULES)


def test_the_import_test_sees_circles_and_every_import(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from landscape import plots\n"
        "def f():\n    import landscape.cli\n    from landscape.core.errors import InputError\n"
    )
    assert imported(path) == {"landscape.plots", "landscape.cli", "landscape.core.errors"}
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


def test_every_warning_points_to_the_line_of_the_caller() -> None:
    raw = [name for name, path in MODULES.items() if "warnings.warn(" in path.read_text()]
    assert raw == ["landscape.core.errors"]


def test_the_faults_of_the_mutants_are_55_and_stand_in_their_files() -> None:
    """Each once, so that ``python -m tests.mutants`` can put it there."""
    faults = [fault for group in MUTANTS.values() for fault in group]
    assert len(faults) == 55
    assert [(name, old) for name, old, _ in faults if (PACKAGE / name).read_text().count(old) != 1] == []


def test_the_package_has_only_rooms() -> None:
    own = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert own == {"__init__.py", "__init__.pyi", "__main__.py", "_version.py", "py.typed"}
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms | {"__init__", "__main__", "_version"} == set(ROOMS)


@pytest.mark.skipif((PACKAGE.parent / "PKG-INFO").exists(), reason="an sdist has no links")
def test_train_and_cli_are_links_into_the_package() -> None:
    for name, room in {"train": "training", "cli": "cli"}.items():
        link = PACKAGE.parent / name
        assert link.is_symlink()
        assert link.resolve() == PACKAGE / room


def loaded(code: str) -> set[str]:
    """The modules that a fresh interpreter has after ``code``."""
    whole = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


HEAVY = {"matplotlib", "seaborn", "pandas", "sklearn", "xarray"}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "import landscape\nassert 'click' not in sys.modules\n"
            "import contextlib, io, landscape.cli\nout = io.StringIO()\n"
            "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
            "    sys.argv = ['landscape', '--help']\n    landscape.cli.main()\n"
            "assert 'hessian-grid' in out.getvalue()",
            {*HEAVY, "torch", "numpy", "scipy", "h5py", "PIL", "landscape.cli.grids", "landscape.cli.train"},
        ),
        (
            "import landscape, landscape.training.run.launch, landscape.training.run.loop, landscape.paper\n"
            "landscape.contour, landscape.load, landscape.data.names()\n"
            "from landscape.results import base, shown\n"
            "import landscape.cli.grids, landscape.cli.train, landscape.cli.figures",
            HEAVY,
        ),
    ],
    ids=["the package and the list of its commands", "analysis, results, training and their commands"],
)
def test_an_import_brings_only_what_is_needed(code: str, absent: set[str]) -> None:
    assert not absent & loaded(code)


def test_the_public_names_are_there_and_typed() -> None:
    for name in landscape.__all__:
        assert getattr(landscape, name) is not None
        assert name in dir(landscape)
    with pytest.raises(AttributeError, match="no_such_name"):
        landscape.no_such_name  # noqa: B018
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body[1:]:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.name == alias.asname  # what type checkers take for public
        assert alias.name in landscape.__all__
    assert len(landscape.__all__) == len(set(landscape.__all__)) > 60
