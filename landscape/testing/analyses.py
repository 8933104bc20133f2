"""Checks of analyses: functions of a problem that return a result."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape.problem.problem import Problem
from landscape.results.base import Result, load_results
from landscape.testing.checks import classification, refuses, register, require, run, same_result
from landscape.testing.interface import check_command, check_drawing

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


@dataclass(frozen=True)
class _Case:
    analysis: Analysis
    options: Mapping[str, Any]
    refused: Mapping[str, Any]
    truth: Truth | None
    command: Sequence[str]
    seeded: bool
    rtol: float
    device: str

    def __call__(self, form: str = "tensors", **changes: Any) -> Any:
        return self.analysis(classification(self.device, form), **{**self.options, **changes})


def check_analysis(
    analysis: Analysis,
    options: Mapping[str, Any] | None = None,
    *,
    refused: Mapping[str, Any] | None = None,
    truth: Truth | None = None,
    command: Sequence[str] = (),
    seeded: bool = True,
    rtol: float = 1e-6,
    device: str = "cpu",
    only: str | None = None,
) -> None:
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
    run("analysis", _Case(analysis, options or {}, refused or {}, truth, command, seeded, rtol, device), only)


@register("analysis")
def seed(case: _Case) -> None:
    """The same seed gives the same numbers and another one others; the global state stays as it was."""
    before = torch.get_rng_state()
    one = case()
    require(torch.equal(torch.get_rng_state(), before), "the analysis draws from the global generator")
    same_result(one, case())
    if case.seeded:
        same_result(case(seed=7), case(seed=7))
        try:
            same_result(one, _with(case(seed=7), seed=one.seed))  # type: ignore[attr-defined]
        except AssertionError:
            return
        raise AssertionError("another seed gives the same numbers")


def _with(result: Result, **changes: Any) -> Result:
    return dataclasses.replace(result, **changes)


@register("analysis")
def file(case: _Case) -> None:
    """A file keeps every field, and the short form of the result is one line."""
    result = case()
    require("\n" not in repr(result), f"its repr has several lines: {result!r}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.h5"
        result.save(path)
        same_result(load_results(path)[0], result)


@register("analysis")
def batches(case: _Case) -> None:
    """Data as a list of batches, as a dict, and as a list of dicts gives the same numbers."""
    whole = case()
    for form in ("batches", "dict", "dict batches"):
        same_result(_with(case(form), **_path(whole)), whole, case.rtol)


def _path(result: Result) -> dict[str, Any]:
    """How the loss was computed may differ with the form of the data."""
    return {
        name: getattr(result, name)
        for name in ("path", "search", "hvps", "residual", "residuals")
        if hasattr(result, name)
    }


@register("analysis")
def batchnorm(case: _Case) -> None:
    """With BatchNorm the result says whose statistics it used; the model's own, and its weights, are left."""
    problem = classification(case.device, norm=True)
    kept = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    for policy in ("center", "recalibrate"):
        result: Any = case.analysis(problem.with_batchnorm(policy, 24), **case.options)
        if hasattr(result, "batchnorm"):
            require(result.batchnorm, "the result does not say that the model has BatchNorm")
            require(result.bn in (policy, "train"), f"bn is {result.bn!r}, the problem has {policy!r}")
    require(not problem.model.training, "the model is left in training mode")
    for name, tensor in problem.model.state_dict().items():
        require(torch.equal(tensor, kept[name]), f"the model's {name} is changed")


@register("analysis")
def truth(case: _Case) -> None:
    """Exact numbers are the truth's; the others lie around it as their standard errors say."""
    known = case.truth
    if known is None:
        return
    problem, options = known.problem(case.device), {**case.options, **known.options}
    seeds = range(known.draws if known.errors else 1)
    results = [case.analysis(problem, **options, **({"seed": s} if case.seeded else {})) for s in seeds]
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


@register("analysis")
def refusals(case: _Case) -> None:
    """What is not allowed is refused in one line that names option and value."""
    for option, value in case.refused.items():
        refuses(option, value, lambda option=option, value=value: case(**{option: value}))  # type: ignore[misc]


@register("analysis")
def command(case: _Case) -> None:
    """The command writes a result of the same class, and passes :func:`check_command`."""
    if not case.command:
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.h5"
        name, *words = case.command
        check_command(
            name, ["{run}/last.h5", *words, "-o", str(out), "--plot", f"{folder}/out.png", "--force"]
        )
        (result,) = load_results(out)
        require(type(result) is type(case()), f"the file has a {type(result).__name__}")


@register("analysis")
def picture(case: _Case) -> None:
    """The result has a drawing, which passes :func:`check_drawing`."""
    check_drawing([case()])
