"""The layout that DESIGN promises: imports point downwards, numerics draw nothing, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "landscape"
ABOVE = ("train", "cli", "paper")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards_and_files_are_small(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0]
    names = imported(path)
    if part not in (*ABOVE, "__main__.py", "__init__.py"):
        assert not [n for n in names for a in ABOVE if n.startswith(f"landscape.{a}")]
    if part == "train":
        assert not [n for n in names if n.startswith(("landscape.cli", "landscape.paper", "landscape.plots"))]
    assert len(path.read_text().splitlines()) <= 400


def test_numerics_and_training_import_no_matplotlib() -> None:
    code = (
        "import sys, landscape, landscape.train.launch, landscape.train.loop;"
        "sys.exit(any(m.startswith(('matplotlib', 'seaborn')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_train_and_cli_are_links_into_the_package() -> None:
    for name in ("train", "cli"):
        link = PACKAGE.parent / name
        assert link.is_symlink()
        assert link.resolve() == PACKAGE / name


def test_the_public_names_are_there() -> None:
    import landscape

    for name in landscape.__all__:
        assert getattr(landscape, name) is not None
