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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from landscape.core import registry
from landscape.results.base import Result
from landscape.testing.checks import CHECKS, lent, require, run, same_result

#: The run whose folder commands are given: DPSGD with four learners on a Gaussian mixture.
RECIPE: dict[str, Any] = {
    "name": "tiny", "learners": 4, "batch": 40, "lr": 0.2, "steps": 12, "dtype": "float64",
    "algorithm": {"name": "dpsgd", "mixing": "ring(1)"},
    "model": {"name": "mlp", "widths": [6, 8, 3], "activation": "tanh"},
    "data": {"name": "synthetic", "samples": 200, "dimension": 6, "classes": 3},
    "decompose": {"every": 3}, "evaluate": {"every": 6}, "checkpoint": {"every": 5},
}  # fmt: skip
TITLE = "A title of one's own"


def check_drawing(results: Sequence[Result], *, only: str | None = None) -> None:
    """Check the drawing that is registered for a class of results: axes, title, file, no side effects.

    Args:
        results: finished ones of one class.
        only: the check that is run, of ``CHECKS["drawing"]``; all by default.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_drawing([surface])  # of landscape.contour
    """
    run("drawing", list(results), only)


def axes(results: list[Result]) -> None:
    """Something is drawn, on axes with names, under the title that was asked for; the file is a picture."""
    from matplotlib.text import Text

    from landscape import plots

    figure = plots.draw(results, title=TITLE)
    require(TITLE in [text.get_text() for text in figure.findobj(Text)], "the title is not on the figure")
    drawn = [ax for ax in figure.axes if ax.has_data()]
    require(
        any(ax.get_xlabel() or ax.get_ylabel() for ax in drawn), "nothing is drawn, or no axis has a name"
    )
    with tempfile.TemporaryDirectory() as folder:
        plots.save_figure(figure, Path(folder) / "drawing.png")
        require((Path(folder) / "drawing.png").read_bytes().startswith(b"\x89PNG"), "the file is no picture")


def effects(results: list[Result]) -> None:
    """The results and matplotlib's settings are left as they were."""
    import matplotlib

    from landscape import plots

    kept, settings = copy.deepcopy(results), {**matplotlib.rcParams}
    plots.draw(results)
    for mine, result in zip(kept, results, strict=True):
        same_result(mine, result)
    changed = [
        key for key, value in settings.items() if key != "backend" and matplotlib.rcParams[key] != value
    ]
    require(not changed, f"the drawing changes matplotlib's {changed}")


def check_command(
    command: str | click.Command, arguments: Sequence[object] = (), *,
    refused: Mapping[str, Sequence[object]] | None = None, only: str | None = None,
) -> None:  # fmt: skip
    """Check a command: help with an example, ``-q``, ``--json``, and refusals in one line.

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
    with lent(registry.commands, command, str(getattr(command, "name", ""))) as name:
        run("command", SimpleNamespace(name=name, arguments=arguments, refused=refused or {}), only)


@functools.cache
def trained() -> tempfile.TemporaryDirectory[str]:
    """The folder of the small run, which is trained once a process and goes with it."""
    from landscape.train.recipes import recipe
    from landscape.train.run.launch import launch

    folder = tempfile.TemporaryDirectory(prefix="landscape-testing-")
    launch(recipe.from_values(RECIPE), folder.name, device="cpu")
    return folder


def run_command(name: str, words: Sequence[object], folder: str) -> tuple[int, str, str]:
    """``landscape NAME WORDS`` in this process: its exit code, stdout and stderr."""
    from landscape import cli

    given = [str(word).replace("{run}", trained().name).replace("{folder}", folder) for word in words]
    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["landscape", name, *given]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()


def output(case: Any) -> None:
    """The help has an example; -q leaves stdout as it is and stderr empty; --json prints JSON alone."""
    require("Example" in run_command(case.name, ["--help"], "")[1], "the help has no example")
    shown: list[str] = []
    for more in ([], ["-q"], ["-q", "--json"]):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run_command(case.name, [*case.arguments, *more], folder)
            require(code == 0 and not (more and err), f"{more}: exit code {code}, stderr: {err}")
            shown.append(out.replace(folder, ""))
    require(shown[0] == shown[1], "-q changes stdout")
    bad: list[str] = []
    found = json.loads(shown[2], parse_constant=bad.append) if shown[2].startswith("{") else {}
    require(
        found.get("command") == case.name and not bad, f"--json prints no JSON of it: {shown[2][:200]} {bad}"
    )


def one_line(case: Any) -> None:
    """What is wrong is one line on stderr that names it, with the exit code 1 or 2."""
    for named, wrong in {"--no-such-option": [*case.arguments, "--no-such-option"], **case.refused}.items():
        with tempfile.TemporaryDirectory() as folder:
            code, _, err = run_command(case.name, wrong, folder)
        refused = code in (1, 2) and err.count("\n") == 1 and named in err
        require(refused, f"{wrong} is not refused in one line with {named!r}: exit code {code}, {err}")


CHECKS["drawing"] = {check.__name__: check for check in (axes, effects)}
CHECKS["command"] = {check.__name__: check for check in (output, one_line)}
