"""The first hour with the package, of five people, run."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.first_hour.roles import ROLES, TRAINING, Hour
from tests.test_documents import in_folder, run_command

__all__ = ["in_folder"]  # the fixture


def play(hour: Hour, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type what an hour has, in the current folder: all that must be seen is, and nothing else is refused."""
    module = types.ModuleType("typed")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "typed", module)
    for typed, needed in hour:
        seen, refusal = shell(typed[2:]) if typed.startswith("$ ") else python(typed, vars(module))
        must = [fragment for fragment in needed if re.fullmatch(r"exit \d|\w+Error", fragment)]
        assert [refusal] == (must or [""]), f"{typed}\n{seen}"
        missing = [fragment for fragment in needed if fragment not in seen]
        assert not missing, f"{typed}\nmust show {missing}:\n{seen}"


def shell(line: str) -> tuple[str, str]:
    """(what a terminal shows, "exit" and the code unless it is 0)."""
    code, printed = run_command(shlex.split(line))
    refusal = f"exit {code}" if code else ""
    return printed + refusal, refusal


def python(source: str, namespace: dict[str, Any]) -> tuple[str, str]:
    """(what is printed, with the value of the last line or the error; the name of the error's class)."""
    tree, out = ast.parse(source), io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(tree, "<typed>", "exec"), namespace)
            value = eval(compile(ast.Expression(last.value), "<typed>", "eval"), namespace) if last else None
    except Exception as error:
        return f"{out.getvalue()}{type(error).__name__}: {error}", type(error).__name__
    return f"{out.getvalue()}{'' if value is None else value!r}", ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which :data:`TRAINING` was typed."""
    folder = tmp_path_factory.mktemp("first_hour")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        play(TRAINING, patch)
    return folder


@pytest.mark.parametrize("role", ROLES)
def test_a_first_hour(role: str, trained: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if role == "engineer" and importlib.util.find_spec("transformers") is None:
        pytest.skip("the package transformers is not installed")
    shutil.copytree(trained / "runs", "runs")
    play(ROLES[role], monkeypatch)


def test_an_hour_fails_where_something_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (("1 + 1", ["3"]), ("1 / 0", []), ("1 + 1", ["InputError"]), ("$ landscape contuor", [])):
        with pytest.raises(AssertionError):
            play([wrong], monkeypatch)
