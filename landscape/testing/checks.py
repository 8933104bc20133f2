"""Checks of drawings, commands and analyses, and tools that all checks share, such as tiny problems."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.core.errors import LandscapeError
from landscape.core.options import choose
from landscape.problem.problem import Problem
from landscape.results.base import Result, load_results

#: What is checked -> the name of a check, which ``only`` takes -> the check, a function of the case.
CHECKS: dict[str, dict[str, Callable[[Any], None]]] = {}
#: Columns of the history that a clock gives.
CLOCK = ("wall_s", "samples_per_s", "wait_s")
#: Samples of the batches; they are not equal, as the last one of a loader is not.
SIZES = [9, 8, 7]


def run_checks(kind: str, case: Any, only: str | None) -> None:
    """Run all checks of ``kind`` on ``case``, or only the check ``only``; a failure names its check."""
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
        except LandscapeError as error:
            text, words = str(error), str(value.get("name") if isinstance(value, dict) else value)
            named = prefix + option in text and words in text and "\n" not in text
            require(named, f"{option} = {value!r} is not refused in one line with both: {text}")
        else:
            raise AssertionError(f"{option} = {value!r} is not refused")


@contextmanager
def registered(kind: registry.Registry, entry: Any, name: str) -> Iterator[str]:
    """Return a context that gives the name of ``entry``: ``entry`` itself if it is a name of the registry.

    Any other ``entry`` has the name ``name`` in the registry inside the context.
    """
    kind.names()  # imports all entries, which would otherwise be added to the copy
    entries = kind._entries
    kind._entries = entries if isinstance(entry, str) else {**entries, name: entry}
    try:
        yield entry if isinstance(entry, str) else name
    finally:
        kind._entries = entries


def same_result(first: Any, second: Any, rtol: float = 0.0, leave: tuple[str, ...] = ()) -> None:
    """Check that all fields of two results, except ``leave``, are equal, numbers up to ``rtol``."""
    require(type(first) is type(second), f"{type(first).__name__} and {type(second).__name__}")
    for name in vars(first).keys() - {*leave}:
        a, b = getattr(first, name), getattr(second, name)
        if rtol and isinstance(a, np.ndarray | float):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=name)
        else:
            np.testing.assert_equal(a, b, err_msg=name)


def same_bits(first: Checkpoint, second: Checkpoint) -> None:
    """Check that two checkpoints are equal to the bit, except for columns of times."""

    def values(run: Checkpoint) -> dict[str, Any]:
        tensors = run.stacked() | {f"shared/{name}": t for name, t in run.shared.items()}
        arrays = {name: t.cpu().numpy() for name, t in tensors.items()}
        facts = {"step": run.step, "recipe": run.recipe, "diverged": (run.diverged, run.diverged_at)}
        return {**arrays, **{k: v for k, v in run.history.items() if k not in CLOCK}, **facts}

    np.testing.assert_equal(values(first), values(second))


class OwnLoss(nn.Module):
    """A classifier that computes its loss itself, from keyword inputs with labels, as Hugging Face's do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def classification(device: str, form: str = "tensors", norm: bool = False) -> Problem:
    """Return a problem of 24 samples of 3 classes and a network of 27 parameters, in float64.

    Args:
        device: the device of the problem.
        form: "tensors"; "batches", a list of batches of different sizes; "dict" or "dict batches", with a
            model that computes its own loss. The loss is the same in all forms.
        norm: whether the network has BatchNorm, with statistics other than the initial ones.
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
        whole = {"x": x, "labels": y}
        return Problem(OwnLoss(net.eval()), None, dicts if "batches" in form else whole, device=device)
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
    """Check the drawing that is registered for a class of results: axes, title, parts, file, no side effects.

    Args:
        results: complete results of one class.
        only: the name of one check of ``CHECKS["drawing"]`` to run; default: all checks.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_drawing([surface])  # of landscape.contour
    """
    run_checks("drawing", list(results), only)


def axes(results: list[Result]) -> None:
    """Something is drawn, on axes with names, under the title that was asked for; the file is a picture."""
    from matplotlib.text import Text

    from landscape import plots

    figure = plots.draw(results, title=TITLE)
    require(TITLE in [text.get_text() for text in figure.findobj(Text)], "the title is not on the figure")
    panels = [ax for ax in figure.axes if ax.has_data()]
    named = any(ax.get_xlabel() or ax.get_ylabel() for ax in panels)
    require(named, "nothing is drawn, or no axis has a name")
    with tempfile.TemporaryDirectory() as folder:
        plots.save_figure(figure, Path(folder) / "drawing.png")
        require((Path(folder) / "drawing.png").read_bytes().startswith(b"\x89PNG"), "the file is no picture")


def effects(results: list[Result]) -> None:
    """The results and matplotlib's settings are left as they were."""
    import matplotlib

    from landscape import plots

    copies, settings = copy.deepcopy(results), {**matplotlib.rcParams}
    plots.draw(results)
    for mine, result in zip(copies, results, strict=True):
        same_result(mine, result)
    changed = [key for key in settings if key != "backend" and matplotlib.rcParams[key] != settings[key]]
    require(not changed, f"the drawing changes matplotlib's {changed}")


def check_command(
    command: str | click.Command, arguments: Sequence[object] = (), *,
    refused: Mapping[str, Sequence[object]] | None = None, only: str | None = None,
) -> None:  # fmt: skip
    """Check a command: help with an example, ``-q``, ``--json``, and refusals in one line.

    Args:
        command: the name of the command; or a command that is not registered.
        arguments: its arguments; "{run}" stands for the folder of a small run, "{folder}" for a new folder.
        refused: a word of the message -> arguments that must be refused with it.
        only: the name of one check of ``CHECKS["command"]`` to run; default: all checks.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_command("info", ["{run}/last.h5"], refused={"none.h5": ["none.h5"]})
    """
    with registered(registry.commands, command, str(getattr(command, "name", ""))) as name:
        run_checks("command", SimpleNamespace(name=name, arguments=arguments, refused=refused or {}), only)


@functools.cache
def trained() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the small run, which is trained once for each process, and deleted with it."""
    from landscape.training.recipes import recipe
    from landscape.training.run.launch import launch

    folder = tempfile.TemporaryDirectory(prefix="landscape-testing-")
    launch(recipe.from_values(RECIPE), folder.name, device="cpu")
    return folder


def run_command(name: str, words: Sequence[object], folder: str) -> tuple[int, str, str]:
    """Run ``landscape NAME WORDS`` in this process, and return its exit code, stdout and stderr."""
    program = importlib.import_module("landscape.cli")  # by name, as this package must not depend on it
    argv_words = [str(word).replace("{run}", trained().name).replace("{folder}", folder) for word in words]
    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = ["landscape", name, *argv_words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            program.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv = argv
    return code, out.getvalue(), err.getvalue()


def output(case: Any) -> None:
    """The help has an example; -q leaves stdout as it is and stderr empty; --json prints JSON alone."""
    require("Example" in run_command(case.name, ["--help"], "")[1], "the help has no example")
    outputs: list[str] = []
    for more in ([], ["-q"], ["-q", "--json"]):
        with tempfile.TemporaryDirectory() as folder:
            code, out, err = run_command(case.name, [*case.arguments, *more], folder)
            require(code == 0 and not (more and err), f"{more}: exit code {code}, stderr: {err}")
            outputs.append(out.replace(folder, ""))
    require(outputs[0] == outputs[1], "-q changes stdout")
    bad: list[str] = []
    answer = json.loads(outputs[2], parse_constant=bad.append) if outputs[2].startswith("{") else {}
    right = answer.get("command") == case.name and not bad
    require(right, f"--json prints no JSON of it: {outputs[2][:200]} {bad}")


def one_line(case: Any) -> None:
    """An error is one line on stderr that names it, with the exit code 1 or 2."""
    for named, wrong in {"--no-such-option": [*case.arguments, "--no-such-option"], **case.refused}.items():
        with tempfile.TemporaryDirectory() as folder:
            code, _, err = run_command(case.name, wrong, folder)
        refused = code in (1, 2) and err.count("\n") == 1 and named in err
        require(refused, f"{wrong} is not refused in one line with {named!r}: exit code {code}, {err}")


def parts(results: list[Result]) -> None:
    """Everything around the panels can be left out; each panel can be drawn into axes of one's own."""
    from matplotlib.figure import Figure

    from landscape import plots
    from landscape.plots.picture import VISUALS

    bare: Any = plots.draw(results, visuals=dict.fromkeys(VISUALS, False))
    texts = [bare.get_suptitle(), *(ax.get_title() for ax in bare.axes), *bare.legends]
    require(not any(texts), f"visuals leave {texts}")
    usual: Any = plots.draw(results)
    named = getattr(usual, "axes_by_name", {})
    require(named, "its panels have no names: make them with landscape.plugins.panels")
    for name, ax in named.items():
        figure = Figure()
        panel = figure.add_subplot(projection=ax.name)
        require(plots.draw(results, axes={name: panel}) is figure, "the picture is no figure of its axes")
        require(panel.has_data() == ax.has_data(), f"{name} is not drawn into axes of one's own")


CHECKS["drawing"] = {check.__name__: check for check in (axes, effects, parts)}
CHECKS["command"] = {check.__name__: check for check in (output, one_line)}


Analysis = Callable[..., Result]


@dataclass(frozen=True)
class Truth:
    """A problem with known numbers.

    Attributes:
        problem: a function of the device that returns the problem.
        values: the known numbers, by their names in the result.
        errors: the names of the standard errors of numbers; the other numbers are exact, up to ``rtol``.
        options: options of the analysis, in place of those of the check.
        draws: the number of seeds for the comparison of standard errors with the errors of the numbers.
        rtol: the relative tolerance of exact numbers.

    Example:
        >>> Truth(lambda device: None, {"value": 1.0}, {"value": "standard_error"}).draws
        40
    """

    problem: Callable[[str], Problem]
    values: Mapping[str, Any]
    errors: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    draws: int = 40
    rtol: float = 1e-6


#: Fields that may differ between forms of the data, as the loss is computed in another way.
PATHS = ("method", "search", "products", "residual", "residuals", "provenance")


def check_analysis(
    analysis: Analysis, options: Mapping[str, Any] | None = None, *, refused: Mapping[str, Any] | None = None,
    truth: Truth | None = None, command: Sequence[str] = (), seeded: bool = True, rtol: float = 1e-6,
    forms: Sequence[str] = ("batches", "dict", "dict batches"), device: str = "cpu", only: str | None = None,
) -> None:  # fmt: skip
    """Check an analysis: seeds, files, forms of data, BatchNorm, known numbers, refusals, command, picture.

    Args:
        analysis: ``analysis(problem, **options) -> Result``. Each problem is a network with 27 parameters and
            24 samples, in float64; the problems differ in the form of the data.
        options: options with which the analysis is quick.
        refused: option -> a value of the option that the analysis must refuse, with a message of one line.
        truth: a problem, and the known numbers of its result; default: no numbers are compared.
        command: the words of the analysis's command after ``landscape``, without files; (): no command.
        seeded: whether the analysis draws random numbers from an option ``seed``.
        rtol: the allowed relative difference between the numbers for data in different forms.
        forms: the forms of data, besides tensors, for which the analysis is defined.
        device: the device of the problems.
        only: the name of one check of ``CHECKS["analysis"]`` to run; default: all checks.

    Raises:
        AssertionError: a check fails.
        InputError: no check has the name ``only``.

    Example:
        >>> import landscape
        >>> options = {"batch": 6, "k": 2, "min_draws": 4, "max_draws": 4}
        >>> check_analysis(landscape.noise_alignment, options, refused={"batch": 0}, only="refusals")
    """
    settings = options or {}

    def call(changes: Mapping[str, Any], form: str = "tensors") -> Result:
        return analysis(classification(device, form), **{**settings, **changes})

    case = SimpleNamespace(
        call=call, analysis=analysis, options=settings, refused=refused or {}, truth=truth, command=command,
        seeded=seeded, rtol=rtol, forms=forms, device=device,
    )  # fmt: skip
    run_checks("analysis", case, only)


def seed(case: Any) -> None:
    """The same seed gives the same numbers and another one others; the global state stays as it was."""
    before = torch.get_rng_state()
    first = case.call({})
    require(torch.equal(torch.get_rng_state(), before), "the analysis draws from the global generator")
    same_result(first, case.call({}))
    if case.seeded:
        another = vars(case.call({"seed": 7})) | {"seed": first.seed}
        require(str(another) != str(vars(first)), "another seed gives the same numbers")


def file(case: Any) -> None:
    """A file keeps every field, and the repr of the result has no arrays."""
    result = case.call({})
    require("array(" not in repr(result), f"its repr prints arrays: {result!r}")
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "result.h5")
        same_result(load_results(Path(folder) / "result.h5")[0], result)


def batches(case: Any) -> None:
    """Data as a list of batches, as a dict, and as a list of dicts gives the same numbers."""
    expected = case.call({})
    for form in case.forms:
        # A model's own loss has no unit, whatever it is.
        same_result(case.call({}, form), expected, case.rtol, (*PATHS, "loss_name", "loss_unit"))


def batchnorm(case: Any) -> None:
    """With BatchNorm the result says whose statistics it used; the model's own, and its weights, are left."""
    problem = classification(case.device, norm=True)
    before = copy.deepcopy(problem.model.state_dict())
    for policy in ("center", "recalibrate"):
        result: Any = case.analysis(problem.with_batchnorm(policy, 24), **case.options)
        # An analysis at several weights may estimate them again at each.
        is_named = getattr(result, "bn", policy) in (policy, "train", "recalibrate")
        is_named &= getattr(result, "batchnorm", True)
        require(is_named, f"the result does not say that BatchNorm has the statistics of {policy!r}")
    require(not problem.model.training, "the model is left in training mode")
    for name, tensor in problem.model.state_dict().items():
        require(torch.equal(tensor, before[name]), f"the model's {name} is changed")


def truth(case: Any) -> None:
    """Exact numbers are the truth's; the others lie around it as their standard errors say."""
    known: Truth | None = case.truth
    if known is None:
        return
    problem, options = known.problem(case.device), {**case.options, **known.options}
    seeds = [{"seed": s} if case.seeded else {} for s in range(known.draws if known.errors else 1)]
    results = [case.analysis(problem, **options, **option) for option in seeds]
    for name, value in known.values.items():
        numbers = np.array([getattr(result, name) for result in results])
        if name not in known.errors:
            np.testing.assert_allclose(numbers[0], value, rtol=known.rtol, atol=known.rtol, err_msg=name)
            continue
        pulls = (numbers - value) / np.array([getattr(result, known.errors[name]) for result in results])
        size, bias = float(np.sqrt(np.mean(pulls**2))), abs(float(pulls.mean())) * np.sqrt(pulls.size)
        require(0.65 < size < 1.5, f"{name} is {size:.2f} standard errors (rms) from the truth, not 1")
        require(bias < 4, f"{name} is biased: its mean is {bias:.1f} standard errors from the truth")


def refusals(case: Any) -> None:
    """Values that are not allowed are refused in one line that names option and value."""
    refuses(case.call, case.refused)


def command(case: Any) -> None:
    """The command writes such a result, and refuses what the function does; see :func:`check_command`."""
    if not case.command:
        return
    cli = importlib.import_module("landscape.cli")

    name, *words = case.command
    words = ["{run}/last.h5", *words, "-o", "{folder}/out.h5"]
    flags = {flag for parameter in cli.as_command(registry.commands[name]).params for flag in parameter.opts}
    options = {option: f"--{option.replace('_', '-')}" for option in case.refused}
    refused = {flag: [*words, flag, case.refused[o]] for o, flag in options.items() if flag in flags}
    check_command(name, words, refused=refused)
    with tempfile.TemporaryDirectory() as folder:
        code, _, error = run_command(name, [*words, "--plot", "{folder}/out.png"], folder)
        require(code == 0, error)
        result = load_results(f"{folder}/out.h5")[0]
        require(type(result) is type(case.call({})), "the file has another result")


def picture(case: Any) -> None:
    """The result has a drawing, which passes :func:`check_drawing`."""
    check_drawing([case.call({})])


CHECKS["analysis"] = {
    check.__name__: check for check in (seed, file, batches, batchnorm, truth, refusals, command, picture)
}
