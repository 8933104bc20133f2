"""What checks share (how they run, refusals, equality, tiny problems), and those of drawings and commands."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import choose
from landscape.problem.problem import Problem
from landscape.results.base import Result

#: What is checked -> the name of a check, which ``only`` takes -> the check, a function of the case.
CHECKS: dict[str, dict[str, Callable[[Any], None]]] = {}
#: Columns of the history that a clock gives.
CLOCK = ("wall_s", "samples_per_s", "wait_s")
#: Samples of the batches; they are not equal, as the last one of a loader is not.
SIZES = [9, 8, 7]


def run(kind: str, case: Any, only: str | None) -> None:
    """All checks of ``kind``, or that called ``only``; a failure says which check it was."""
    for name in CHECKS[kind] if only is None else [choose("only", only, CHECKS[kind])]:
        try:
            CHECKS[kind][name](case)
        except AssertionError as error:
            error.add_note(f"in the check '{name}' of landscape.testing.check_{kind}")
            raise


def require(condition: object, message: str) -> None:
    """AssertionError with ``message`` unless ``condition`` holds, with python -O, too."""
    if not condition:
        raise AssertionError(message)


def refuses(call: Callable[[Any], object], values: Mapping[str, Any], prefix: str = "") -> None:
    """``call({option: value})`` raises an InputError of one line that names both, for each of ``values``."""
    for option, value in values.items():
        try:
            call({option: value})
        except InputError as error:
            text, shown = str(error), str(value.get("name") if isinstance(value, dict) else value)
            named = prefix + option in text and shown in text and "\n" not in text
            require(named, f"{option} = {value!r} is not refused in one line with both: {text}")
        else:
            raise AssertionError(f"{option} = {value!r} is not refused")


@contextmanager
def lent(kind: registry.Registry, entry: Any, name: str) -> Iterator[str]:
    """The name of ``entry`` in a registry: itself if it is a name, or ``name`` while the block lasts."""
    kind.names()  # loads the room, which would otherwise add its entries to the copy
    own = kind._entries
    kind._entries = own if isinstance(entry, str) else {**own, name: entry}
    try:
        yield entry if isinstance(entry, str) else name
    finally:
        kind._entries = own


def same_result(one: Any, other: Any, rtol: float = 0.0, leave: tuple[str, ...] = ()) -> None:
    """All fields of two results but some are equal, numbers up to ``rtol``."""
    require(type(one) is type(other), f"{type(one).__name__} and {type(other).__name__}")
    for name in vars(one).keys() - {*leave}:
        a, b = getattr(one, name), getattr(other, name)
        if rtol and isinstance(a, np.ndarray | float):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=name)
        else:
            np.testing.assert_equal(a, b, err_msg=name)


def same_bits(one: Checkpoint, other: Checkpoint) -> None:
    """Two checkpoints are equal to the bit in all but the clock's columns."""

    def values(of: Checkpoint) -> dict[str, Any]:
        tensors = {
            "": {"weights": of.weights},
            "optimizer/": of.optimizer,
            "rule/": of.rule,
            "shared/": of.shared,
        }
        found = {kind + name: t.cpu().numpy() for kind, group in tensors.items() for name, t in group.items()}
        return {**found, **{k: v for k, v in of.history.items() if k not in CLOCK}, "step": of.step}

    np.testing.assert_equal(values(one), values(other))


class OwnLoss(nn.Module):
    """A classifier that computes its loss itself, from keyword inputs with labels, as Hugging Face's do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def classification(device: str, form: str = "tensors", norm: bool = False) -> Problem:
    """24 samples of 3 classes and a network of 27 parameters, float64; the data as tensors or in other forms.

    Args:
        device: where it is.
        form: "tensors"; "batches", a list of unequal ones; "dict" and "dict batches", with a model that
            computes its own loss. The loss is the same in all of them.
        norm: whether the network has BatchNorm, with statistics that are not the initial ones.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        x, y = torch.randn(24, 4).double(), torch.randint(3, (24,))
        layers = [nn.Linear(4, 3), *([nn.BatchNorm1d(3)] if norm else []), nn.Tanh(), nn.Linear(3, 3)]
        net = nn.Sequential(*layers).double()
        net(x)
    batches = list(zip(torch.split(x, SIZES), torch.split(y, SIZES), strict=True))
    if form.startswith("dict"):
        dicts = [{"x": a, "labels": b} for a, b in batches]
        return Problem(
            OwnLoss(net.eval()), None, dicts if "batches" in form else {"x": x, "labels": y}, device=device
        )
    data: Any = batches if form == "batches" else (x, y)
    return Problem(net.eval(), nn.functional.cross_entropy, data, device=device)


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
        plots.save_figure(figure, Path(folder) / "drawing.png", dpi=30)
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
