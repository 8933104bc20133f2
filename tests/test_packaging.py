"""What stands in several files of the package's surroundings is the same in all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import landscape

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# conda-forge's names, where they are not PyPI's: the parts that are needed here.
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base", "seaborn": "seaborn-base"}


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (.+)$"),
        ("conda/recipe.yaml", r'^  version: "(.+)"$'),
        ("CHANGELOG.md", r"^## (\d\S+)"),  # the newest
    ],
)
def test_the_version_is_the_same_in(file: str, pattern: str) -> None:
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == landscape.__version__


def test_the_conda_recipe_has_the_dependencies_of_the_wheel() -> None:
    text = (ROOT / "conda" / "recipe.yaml").read_text()
    run = text.partition("  run:\n")[2].partition("\n\n")[0]
    python, *lines = [line.strip().removeprefix("- ") for line in run.splitlines()]
    assert python == "python >=${{ python_min }}"
    assert f'python_min: "{PROJECT["project"]["requires-python"].removeprefix(">=")}"' in text
    wanted = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    assert lines == [f"{CONDA.get(one.name, one.name)} {one.specifier}" for one in wanted]


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+( - \d{4}-\d\d-\d\d)?", version) for version in versions[1:])
    for part in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", part, re.MULTILINE)
        assert kinds == [kind for kind in ("Added", "Changed", "Fixed", "Removed") if kind in kinds]


def test_every_pinned_version_is_allowed() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().lower().splitlines()
        if line and not line.startswith("#")
    )
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), *groups.values()]
    for one in (Requirement(line) for lines in lists for line in lines if isinstance(line, str)):
        if pin := pins.get(one.name.lower()):
            assert pin in one.specifier, one.name


@pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("bash")), reason="make or bash is not installed"
)
def test_the_environments_of_the_makefile_are_commands_of_a_shell() -> None:
    names = re.findall(r"^\$\((\w+)\)/ready:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    folders = dict(re.findall(r"^(\w+) := (\.venv\S*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(names) > 4
    for name in names:
        make = ["make", "--always-make", "--dry-run", f"{folders[name]}/ready"]
        recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert subprocess.run(["bash", "-n"], input=recipe, text=True).returncode == 0, name
