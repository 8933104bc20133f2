"""Checks of analyses: functions of a problem that return a result."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from landscape.core import registry
from landscape.problem.problem import Problem
from landscape.results.base import Result, load_results
from landscape.testing.checks import (
    CHECKS,
    check_command,
    check_drawing,
    classification,
    refuses,
    require,
    run,
    run_command,
    same_result,
)

Analysis = Callable[..., Result]


@dataclass(frozen=True)
class Truth:
    """A problem of which the numbers are known.

    Attributes:
        problem: device -> the problem.
        values: name of a number of the result -> what it is.
        errors: name of a number -> the name of its standard error; others are exact, up to ``rtol``.
        options: of the analysis, in place of the case's own.
        draws: the seeds over which standard errors are compared with the deviations from the truth.
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


#: What may differ with the form of the data: how the loss was computed.
PATHS = ("path", "search", "hvps", "residual", "residuals", "provenance")


def check_analysis(
    analysis: Analysis, options: Mapping[str, Any] | None = None, *, refused: Mapping[str, Any] | None = None,
    truth: Truth | None = None, command: Sequence[str] = (), seeded: bool = True, rtol: float = 1e-6,
    forms: Sequence[str] = ("batches", "dict", "dict batches"), device: str = "cpu", only: str | None = None,
) -> None:  # fmt: skip
    """Check an analysis: seeds, files, forms of data, BatchNorm, error bar, refusals, command, picture.

    Args:
        analysis: ``analysis(problem, **options) -> Result``. It is given a network of 27 parameters with 24
            samples in several forms, in float64.
        options: with which it is quick.
        refused: option -> a value of it that must be refused in one line.
        truth: a problem with known numbers.
        command: the words of its command after ``landscape``, without the checkpoint and without files; ()
            for an analysis that has none.
        seeded: whether it draws random numbers from an option ``seed``.
        rtol: by how much its numbers may differ, relatively, for data in other forms.
        forms: the forms of data that it is defined for, besides tensors.
        device: where it is computed.
        only: the check that is run, of ``CHECKS["analysis"]``; all by default.

    Raises:
        AssertionError: a check fails.
        InputError: there is no such check.

    Example:
        >>> import landscape
        >>> options = {"batch": 6, "top_k": 2, "max_draws": 4}
        >>> check_analysis(landscape.noise_alignment, options, refused={"tol": 0.0}, only="seed")
    """
    given = options or {}

    def call(changes: Mapping[str, Any], form: str = "tensors") -> Result:
        return analysis(classification(device, form), **{**given, **changes})

    case = SimpleNamespace(
        call=call, analysis=analysis, options=given, refused=refused or {}, truth=truth, command=command,
        seeded=seeded, rtol=rtol, forms=forms, device=device,
    )  # fmt: skip
    run("analysis", case, only)


def seed(case: Any) -> None:
    """The same seed gives the same numbers and another one others; the global state stays as it was."""
    before = torch.get_rng_state()
    one = case.call({})
    require(torch.equal(torch.get_rng_state(), before), "the analysis draws from the global generator")
    same_result(one, case.call({}))
    if case.seeded:
        other = vars(case.call({"seed": 7})) | {"seed": one.seed}
        require(str(other) != str(vars(one)), "another seed gives the same numbers")


def file(case: Any) -> None:
    """A file keeps every field, and the short form of the result is one line."""
    result = case.call({})
    require("\n" not in repr(result), f"its repr has several lines: {result!r}")
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "result.h5")
        same_result(load_results(Path(folder) / "result.h5")[0], result)


def batches(case: Any) -> None:
    """Data as a list of batches, as a dict, and as a list of dicts gives the same numbers."""
    expected = case.call({}) if case.forms else None
    for form in case.forms:
        same_result(case.call({}, form), expected, case.rtol, PATHS)


def batchnorm(case: Any) -> None:
    """With BatchNorm the result says whose statistics it used; the model's own, and its weights, are left."""
    problem = classification(case.device, norm=True)
    kept = copy.deepcopy(problem.model.state_dict())
    for policy in ("center", "recalibrate"):
        result: Any = case.analysis(problem.with_batchnorm(policy, 24), **case.options)
        said = getattr(result, "bn", policy) in (policy, "train") and getattr(result, "batchnorm", True)
        require(said, f"the result does not say that BatchNorm has the statistics of {policy!r}")
    require(not problem.model.training, "the model is left in training mode")
    for name, tensor in problem.model.state_dict().items():
        require(torch.equal(tensor, kept[name]), f"the model's {name} is changed")


def truth(case: Any) -> None:
    """Exact numbers are the truth's; the others lie around it as their standard errors say."""
    known: Truth | None = case.truth
    if known is None:
        return
    problem, options = known.problem(case.device), {**case.options, **known.options}
    seeds = [{"seed": s} if case.seeded else {} for s in range(known.draws if known.errors else 1)]
    results = [case.analysis(problem, **options, **one) for one in seeds]
    for name, value in known.values.items():
        found = np.array([getattr(result, name) for result in results])
        if name not in known.errors:
            np.testing.assert_allclose(found[0], value, rtol=known.rtol, atol=known.rtol, err_msg=name)
            continue
        pulls = (found - value) / np.array([getattr(result, known.errors[name]) for result in results])
        size, off = float(np.sqrt(np.mean(pulls**2))), abs(float(pulls.mean())) * np.sqrt(pulls.size)
        require(
            0.65 < size < 1.5, f"{name} deviates from the truth by {size:.2f} standard errors (rms), not 1"
        )
        require(off < 4, f"{name} is biased: its mean is {off:.1f} standard errors of a mean from the truth")


def refusals(case: Any) -> None:
    """What is not allowed is refused in one line that names option and value."""
    refuses(case.call, case.refused)


def command(case: Any) -> None:
    """The command writes such a result, and refuses what the function does; see :func:`check_command`."""
    if not case.command:
        return
    name, *words = case.command
    words = ["{run}/last.h5", *words, "-o", "{folder}/out.h5"]
    flags = {flag for each in registry.commands[name].params for flag in each.opts}
    options = {option: f"--{option.replace('_', '-')}" for option in case.refused}
    refused = {o: [*words, flag, case.refused[o]] for o, flag in options.items() if flag in flags}
    check_command(name, words, refused=refused)
    with tempfile.TemporaryDirectory() as folder:
        code, _, error = run_command(name, [*words, "--plot", "{folder}/out.png"], folder)
        require(code == 0, error)
        require(
            type(load_results(f"{folder}/out.h5")[0]) is type(case.call({})), "the file has another result"
        )


def picture(case: Any) -> None:
    """The result has a drawing, which passes :func:`check_drawing`."""
    check_drawing([case.call({})])


CHECKS["analysis"] = {
    check.__name__: check for check in (seed, file, batches, batchnorm, truth, refusals, command, picture)
}
