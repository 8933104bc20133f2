"""The documented chain on a first use, and what came out beside the truth."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

import landscape
from landscape import LandscapeError, Problem
from landscape.curvature import chain_hessian
from landscape.evaluation import evaluate
from landscape.problem import mean_loss
from tests.battery.checks import TOLERANCES, Findings
from tests.ordinary.use import Truth, Use

GRID, SPAN = (3, 3), 0.1
# Standard errors by which a trace may miss: it has few degrees of freedom, and a fixed seed (ours).
ERRORS = 6
LOW = (torch.bfloat16, torch.float16)
# Samples that the package takes at once here, in place of 2,000: what goes wrong between parts of the data shows
# with a handful of samples, too.
CHUNK = 4
SIZES = ((mean_loss, "MAX_CHUNK"), (evaluate, "CHUNK"), (chain_hessian, "MAX_CHUNK"))


@dataclass
class Outcome:
    """What became of a use: ``kind`` is "right", "refused", "refused_hessian", "wrong" or "crash".

    ``words``: the refusal, what is wrong, or the error. ``remedy``: the code that the refusal names, and
    ``says`` what warnings said of how the loss is read.
    """

    kind: str
    words: str = ""
    remedy: str = ""
    says: list[str] = field(default_factory=list)


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """The texts of ProblemWarnings; any other warning, but of a slower path, is an error."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        for category in (
            DeprecationWarning,
            FutureWarning,
        ):  # what PyTorch and Hugging Face say of themselves
            warnings.simplefilter("ignore", category)
        warnings.simplefilter("ignore", landscape.PathWarning)
        warnings.simplefilter("always", landscape.ProblemWarning)
        yield said
    said += dict.fromkeys(str(w.message) for w in caught)


@contextlib.contextmanager
def in_parts(use: Use) -> Iterator[None]:
    """Resident data is evaluated in parts of CHUNK samples; a random use is not, as each part has its numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in () if use.random else SIZES:
            patch.setattr(module, name, CHUNK)
        yield


def follow(use: Use) -> Outcome:
    """The chain on ``use``, and on what its remedy makes of it."""
    with in_parts(use):
        return _follow(use)


def _follow(use: Use) -> Outcome:
    with listening() as said:
        outcome = _first(use)
    if outcome.kind == "wrong" and use.other is not None and said:
        with listening():
            outcome = _first(dataclasses.replace(use, total=use.other))
    outcome.says = said
    if outcome.remedy:
        with listening():
            found = remedied(use, outcome.remedy)
        if found:
            outcome.kind, outcome.words = "wrong", f"the remedy {outcome.remedy}: {found}"
    return outcome


def differs(use: Use, outcome: Outcome) -> str:
    """How the outcome differs from the one expected; "" if it does not."""
    if outcome.kind != use.expected:
        return f"{outcome.kind}, expected {use.expected}: {outcome.words}"
    if use.remedied and not outcome.remedy:
        return f"the refusal carries no remedy: {outcome.words}"
    if use.words and not re.search(use.words, outcome.words):
        return f"the refusal does not say '{use.words}': {outcome.words}"
    if use.says and not any(re.search(use.says, line) for line in outcome.says):
        return f"no warning says '{use.says}': {outcome.says}"
    if outcome.kind == "refused" or use.says != "" or not outcome.says:
        return ""
    return f"a warning that was not expected: {outcome.says}"


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """The relative ones of losses and of second derivatives."""
    return TOLERANCES[torch.bfloat16 if dtype in LOW else dtype]


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _first(use: Use) -> Outcome:
    model, loss, data = use.parts()
    state = copy.deepcopy(dict(model.state_dict()))
    try:
        outcome = _chain(use, Problem(model, loss, data), Truth(use, use.total))
    except LandscapeError as error:
        outcome = _refusal("refused", error)
    except Exception as error:  # what a first use must not end in
        outcome = Outcome("crash", _line(error))
    after = model.state_dict()
    if not all(torch.equal(value, after[name]) for name, value in state.items()):
        return Outcome("wrong", "the user's model was changed")
    return outcome


def _refusal(kind: str, error: LandscapeError) -> Outcome:
    text = str(error)
    return Outcome("wrong", f"several lines: {text}") if "\n" in text else Outcome(kind, text, error.remedy)


def _chain(use: Use, problem: Problem, truth: Truth) -> Outcome:
    """Contour, ends and trace, held against ``truth``; a refusal of the contour is raised."""
    tol, tol_hessian = tolerances(use.inside or problem.dtype)
    if problem.dtype in LOW:  # weights are rounded, but second derivatives need not be
        tol_hessian = tolerances(torch.float32)[1]
    if problem.layout.size != truth.size:
        return Outcome("wrong", f"P = {problem.layout.size}, expected {truth.size}")
    found, theta = Findings(), truth.center
    found.compare("loss", problem.loss(), truth.loss(theta), 3 * tol)
    plane = landscape.random_plane(problem, norm="filter", seed=0)
    if bool(plane.directions[:, truth.padding].any()):
        found.wrong.append("the plane moves an embedding's row of padding")
    surface = landscape.contour(problem, plane, grid=GRID, span=SPAN)
    expected = truth.surface(theta, plane.directions, surface.x.tolist(), surface.y.tolist())
    found.compare("contour", surface.loss, expected, 3 * tol)
    if found.wrong:
        return Outcome("wrong", "; ".join(found.wrong))
    try:
        ends, trace = landscape.extreme_eigenvalues(problem), landscape.trace(problem)
    except LandscapeError as error:
        return _refusal("refused_hessian", error)
    h = truth.hessian(theta, differences=use.differences)
    if not bool(h.isfinite().all()):
        numbers = ends.min, ends.max, trace.value
        said = not ends.converged or all(map(math.isnan, numbers))
        return Outcome("refused_hessian" if said else "wrong", f"no second derivative, but {numbers}")
    if use.inside is None and (wrong := truth.not_of_the_loss()):
        found.wrong.append(wrong)
    values = torch.linalg.eigvalsh((h + h.T) / 2)
    rounding = tol_hessian * max(float(values.abs().max()), 1e-8)
    for name, got, wanted, error in (
        ("λ_min", ends.min, float(values[0]), ends.residual_min),
        ("λ_max", ends.max, float(values[-1]), ends.residual_max),
        ("trace", trace.value, float(values.sum()), ERRORS * trace.standard_error),
    ):
        if not abs(got - wanted) <= error + rounding:
            found.wrong.append(f"{name}: got {got:.6g} ± {error:.2g}, expected {wanted:.6g}")
    if not ends.converged:
        found.wrong.append("ends: not converged")
    return Outcome("wrong" if found.wrong else "right", "; ".join(found.wrong))


def remedied(use: Use, remedy: str) -> str:
    """Run the remedy as it stands; what is wrong with it, or ""."""
    with use.precision():
        model, loss, data = use.parts()
        names = {"landscape": landscape, "torch": torch, "F": F, "model": model, "loss": loss, "data": data}
        try:
            problem = eval(remedy, {**names, **use.names})
            if not isinstance(problem, Problem):
                return f"gives a {type(problem).__name__}, not a Problem"
            outcome = _chain(use, problem, Truth(use, use.after or use.total))
        except Exception as error:  # a remedy that does not run
            return _line(error)
    return "" if outcome.kind in ("right", "refused_hessian") else outcome.words
