"""Checks of drawings and commands."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from landscape.core import registry
from landscape.results.base import Result
from landscape.testing.checks import lent, register, require, run, same_result

#: The run whose folder commands are given: DPSGD with four learners on a Gaussian mixture.
RECIPE: dict[str, Any] = {
    "name": "tiny", "learners": 4, "batch": 40, "lr": 0.2, "steps": 12, "dtype": "float64",
    "algorithm": {"name": "dpsgd", "mixing": "ring(1)"},
    "model": {"name": "mlp", "widths": [6, 8, 3], "activation": "tanh"},
    "data": {"name": "synthetic", "samples": 200, "dimension": 6, "classes": 3},
    "decompose": {"every": 3}, "evaluate": {"every": 6}, "checkpoint": {"every": 5},
}  # fmt: skip


@dataclass(frozen=True)
class _Drawing:
    results: Sequence[Result]
    options: Mapping[str, Any]

    def figure(self, **changes: Any) -> Any:
        from landscape import plots

        return plots.draw(list(self.results), **{**self.options, **changes})


def check_drawing(
    results: Sequence[Result], options: Mapping[str, Any] | None = None, *, only: str | None = None
) -> None:
    """Check the drawing that is registered for a class of results: axes, title, files, no side effects.

    Args:
        results: finished ones of one class.
        options: of :func:`landscape.plots.draw`.
        only: the check that is run, of ``CHECKS["drawing"]``; all by default.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> from landscape.results.comparison import example
        >>> check_drawing([example()])
    """
    run("drawing", _Drawing(results, options or {}), only)


@register("drawing")
def axes(case: _Drawing) -> None:
    """Something is drawn, on axes with names, under the title that was asked for; twice it is the same."""
    figure = case.figure(title="A title of one's own")
    shown = [text.get_text() for text in figure.findobj(lambda each: hasattr(each, "get_text"))]
    require("A title of one's own" in shown, "the title is not on the figure")
    drawn = [ax for ax in figure.axes if ax.has_data()]
    require(drawn, "nothing is drawn")
    require(any(ax.get_xlabel() or ax.get_ylabel() for ax in drawn), "no axis has a name")
    require(
        _pixels(figure) == _pixels(case.figure(title="A title of one's own")),
        "drawn twice it is another picture",
    )


def _pixels(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="rgba", dpi=50)
    return out.getvalue()


@register("drawing")
def files(case: _Drawing) -> None:
    """It is written as PNG, PDF and SVG."""
    from landscape import plots

    with tempfile.TemporaryDirectory() as folder:
        for suffix, begin in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")):
            path = Path(folder) / f"drawing.{suffix}"
            plots.save_figure(case.figure(), path)
            require(path.read_bytes().startswith(begin), f"the {suffix} file is none")


@register("drawing")
def effects(case: _Drawing) -> None:
    """The results and matplotlib's settings are left as they were."""
    import matplotlib

    kept, settings = copy.deepcopy(list(case.results)), {**matplotlib.rcParams}
    case.figure()
    for mine, result in zip(kept, case.results, strict=True):
        same_result(mine, result)
    changed = [
        key for key, value in settings.items() if key != "backend" and matplotlib.rcParams[key] != value
    ]
    require(not changed, f"{changed}: the drawing changes matplotlib's settings")


@dataclass(frozen=True)
class _Command:
    name: str
    arguments: Sequence[object]
    refused: Mapping[str, Sequence[object]]

    def words(self, folder: str, arguments: Sequence[object]) -> list[str]:
        return [str(word).replace("{run}", _run()).replace("{folder}", folder) for word in arguments]


def check_command(
    command: str | click.Command,
    arguments: Sequence[object] = (),
    *,
    refused: Mapping[str, Sequence[object]] | None = None,
    only: str | None = None,
) -> None:
    """Check a command: help with an example, its files, ``-q``, ``--json``, and refusals in one line.

    Args:
        command: its name; or a command that is not registered.
        arguments: its words; "{run}" stands for the folder of a small run, "{folder}" for a fresh folder.
        refused: what the message must name -> words that must be refused.
        only: the check that is run, of ``CHECKS["command"]``; all by default.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_command("info", ["{run}/last.h5"], refused={"none.h5": ["none.h5"]})
    """
    with lent(registry.commands, command, getattr(command, "name", "") or "") as name:
        run("command", _Command(name, arguments, refused or {}), only)


def run_command(*words: object) -> tuple[int, str, str]:
    """``landscape WORDS`` in this process: its exit code, stdout and stderr."""
    from landscape import cli

    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["landscape", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()


@functools.cache
def _trained() -> tempfile.TemporaryDirectory[str]:
    """The small run; its folder goes with the process."""
    from landscape.train.recipes import recipe
    from landscape.train.run.launch import launch

    folder = tempfile.TemporaryDirectory(prefix="landscape-testing-")
    launch(recipe.from_values(RECIPE), Path(folder.name) / "run", device="cpu")
    return folder


def _run() -> str:
    return f"{_trained().name}/run"


@register("command")
def help(case: _Command) -> None:
    """The help has an example."""
    code, out, err = run_command(case.name, "--help")
    require((code, err) == (0, ""), f"--help exits with {code}: {err}")
    require("Example" in out, "the help has no example")


@register("command")
def output(case: _Command) -> None:
    """It ends with 0; -q leaves stdout as it is and stderr empty; --json prints one object of JSON alone."""
    shown: list[str] = []
    for more in ((), ("-q",), ("-q", "--json")):
        with tempfile.TemporaryDirectory() as folder:
            words = [case.name, *case.words(folder, case.arguments), *more]
            code, out, err = run_command(*words)
            require(code == 0, f"landscape {' '.join(words)} exits with {code}: {err}")
            require(not (more and err), f"with {' '.join(more)} it writes to stderr: {err}")
            shown.append(out.replace(folder, "{folder}"))
    require(shown[0] == shown[1], "-q changes stdout")
    try:
        found = json.loads(shown[2], parse_constant=_refuse)
    except ValueError as error:
        raise AssertionError(f"--json: {error} in {shown[2][:200]}") from error
    require(found.get("command") == case.name, f"--json names the command {found.get('command')!r}")


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


@register("command")
def refusals(case: _Command) -> None:
    """What is wrong is one line on stderr that names it, with the exit code 1 or 2."""
    for named, wrong in {"--no-such-option": [*case.arguments, "--no-such-option"], **case.refused}.items():
        with tempfile.TemporaryDirectory() as folder:
            code, _, err = run_command(case.name, *case.words(folder, wrong))
        require(code in (1, 2), f"{wrong} exits with {code}")
        require(
            err.count("\n") == 1 and named in err, f"{wrong} is not refused in one line with {named!r}: {err}"
        )
