"""What the package says of a case, held against the reference, quantity by quantity."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import landscape
from landscape import LandscapeError, Problem
from landscape.gradients.learners import Stack
from tests.battery.case import Case
from tests.battery.reference import Reference, mapped, tensors

# Relative tolerances of values and gradients, and of eigenvalues, in the arithmetic that was asked for.
TOLERANCES = {torch.float64: (1e-9, 1e-5), torch.float32: (3e-5, 3e-3), torch.bfloat16: (3e-2, 2e-1)}
# A refusal is one line with what to do: one of these words stands in it.
REMEDY = re.compile(
    r"\b(must|use|give|make|load|set|wrap|take|pass|needs|needed|replace|allowed|expected)\b", re.I
)
GRID, SPAN = (3, 2), 0.3
# The device of the problems, such as "cuda"; the references stay on the CPU.
DEVICE = os.environ.get("LANDSCAPE_TEST_DEVICE")
PATHS = ("auto", "pointwise", "batched", "folded")
PROBES, STEPS = 6, 8
# Parameters up to which a trace takes as many products as it needs to be exact. With more it takes the usual
# number, with some seeds: the error bar of one, from 20 samples, is off by more than five in 1 of 1,000 draws.
EXACT, SEEDS = 40, 3


@dataclass
class Findings:
    """What disagrees, one line each, and what was refused as expected."""

    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def compare(self, quantity: str, got: Any, expected: Any, tol: float, scale: float = 0.0) -> None:
        """``tol`` is relative to the largest expected magnitude, or to ``scale`` where that is larger."""
        a, b = (torch.as_tensor(v, dtype=torch.float64).detach().cpu() for v in (got, expected))
        if a.shape != b.shape:
            self.wrong.append(f"{quantity}: shape {tuple(a.shape)}, expected {tuple(b.shape)}")
            return
        limit = tol * max(float(b.nan_to_num().abs().max()) if b.numel() else 0.0, scale, 1e-12)
        error = (a - b).abs().where(~((a == b) | (a.isnan() & b.isnan())), 0.0)
        if not bool((error <= limit).all()):
            at = int(error.nan_to_num(nan=math.inf).flatten().argmax())
            self.wrong.append(
                f"{quantity}: got {float(a.flatten()[at]):.8g}, expected {float(b.flatten()[at]):.8g}"
            )

    @contextlib.contextmanager
    def attempt(self, quantity: str, refused: str = "") -> Iterator[None]:
        """Whatever is raised inside is a finding, unless it is the refusal that ``refused`` describes."""
        try:
            yield
        except LandscapeError as error:
            text = str(error)
            if not refused or not re.search(refused, text):
                self.wrong.append(f"{quantity}: refused: {text[:300]}")
            elif "\n" in text or not REMEDY.search(text):
                self.wrong.append(f"{quantity}: the refusal names no remedy: {text[:300]}")
            else:
                self.refused.append(quantity)
        except Exception as error:  # a crash is what the battery looks for
            words = " ".join(str(error).split())[:200]
            self.wrong.append(f"{quantity}: {type(error).__name__}: {words}")
        else:
            if refused:
                self.wrong.append(f"{quantity}: not refused, expected '{refused}'")


# A case, what was found, its problem and reference, and the weights.
Compared = tuple[Case, Findings, Problem, Reference, Tensor]


def run(case: Case, *, thorough: bool = True, ends: bool = True) -> Findings:
    """The quantities of ``case``: loss, gradient, contours, Hessian products and both ends.

    ``thorough`` adds a contour by each path and norm, the top three, trace, density and Gauss-Newton; without
    ``ends`` those are left out, which take most of the time.
    """
    found = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
        warnings.filterwarnings("ignore", "model: it computes in", landscape.ProblemWarning)
        if case.refused_hessian:
            warnings.filterwarnings("ignore", ".*products are differences", landscape.ProblemWarning)
        _run(case, found, thorough, ends)
    return found


def _run(case: Case, found: Findings, thorough: bool, ends: bool) -> None:
    model, loss, data = case.parts()
    before = copy.deepcopy((dict(model.state_dict()), list(tensors(data))))
    if case.refused:
        with found.attempt("problem", case.refused):
            _refused(_problem(case, model, loss, data))
        return
    own, own_loss, own_data = case.parts()
    x, y = case.whole(own_data)
    reference = Reference(case.plain(own), own_loss, x, y, case.options.get("penalty"))
    theta, problem = reference.center.clone(), None
    said: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if case.said:
        said = pytest.warns(landscape.ProblemWarning, match=re.escape(case.said))
    with found.attempt("problem"), said:
        problem = _problem(case, model, loss, data)
    if problem is None:
        return
    if problem.layout.size != reference.size:
        found.wrong.append(f"problem: P = {problem.layout.size}, expected {reference.size}")
        return
    compared = case, found, problem, reference, theta
    _first_order(compared)
    _surfaces(compared, PATHS if thorough else ("auto",))
    _learners(compared)
    _second_order(compared, thorough, ends)
    after = dict(model.state_dict()), list(tensors(data))
    if not all(torch.equal(before[0][k], v) for k, v in after[0].items()):
        found.wrong.append("the user's model was changed")
    if not all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True)):
        found.wrong.append("the user's data was changed")


def _problem(case: Case, model: Any, loss: Any, data: Any) -> Problem:
    options = case.options if DEVICE is None else {"device": DEVICE, **case.options}
    return Problem(model, loss, data, dtype=case.dtype, **options)


def _refused(problem: Problem) -> None:
    """What anyone would do first: some refusals come at the first pass, some at the first Hessian."""
    problem.loss()
    problem.gradient()
    landscape.contour(problem, landscape.random_plane(problem), grid=(2, 1))
    landscape.extreme_eigenvalues(problem)


def _first_order(compared: Compared) -> None:
    case, found, problem, reference, theta = compared
    tol = TOLERANCES[case.inside or problem.dtype][0]
    moved = theta + 0.1 * torch.linspace(-1, 1, len(theta), dtype=torch.float64)
    for name, at in (("", None), (" elsewhere", moved)):
        there = theta if at is None else at
        given = None if at is None else at.to(problem.weights)
        expected = reference.loss(there)
        with found.attempt(f"loss{name}"):
            found.compare(f"loss{name}", problem.loss(given), expected, tol)
            found.compare(f"loss{name}, again", problem.loss(given), expected, tol)
        with found.attempt(f"gradient{name}"):
            slope = reference.gradient(there)
            found.compare(f"gradient{name}", problem.gradient(given), slope, 10 * tol, abs(expected))
        with found.attempt(f"accuracy{name}"):
            share, got = reference.accuracy(there), problem.accuracy(given)
            if case.accuracy is not None:  # of another task, for which NaN is an answer
                reference.load(there)
                share = got if math.isnan(got) else case.accuracy(reference.outputs(), reference.y)
            if share is not None:
                found.compare(f"accuracy{name}", got, share, 1e-6)


def _surfaces(compared: Compared, paths: tuple[str, ...]) -> None:
    case, found, problem, reference, theta = compared
    tol = TOLERANCES[case.inside or problem.dtype][0]
    wanted = [("none", p) for p in paths]
    norms = [("filter", "auto"), ("layer", "auto")] if len(paths) > 1 else []
    for norm, path in (*wanted, *norms):
        quantity = f"contour norm={norm} path={path}"
        # A path that is asked for by name, but is not there for this model, is refused; 'pointwise' always is there.
        forced = path not in ("auto", "pointwise")
        with found.attempt(quantity), _unless(forced, LandscapeError, "method: "):
            plane = landscape.random_plane(problem, norm=norm, seed=1)
            s = landscape.contour(problem, plane, grid=GRID, span=SPAN, method=path)
            expected = reference.surface(theta, plane.directions.cpu(), s.x.tolist(), s.y.tolist())
            found.compare(quantity, s.loss, expected, 3 * tol)


@contextlib.contextmanager
def _unless(condition: bool, error: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except error as raised:
        if not condition or words not in str(raised):
            raise


def _learners(compared: Compared) -> None:
    """Minibatch gradients of three learners, as training takes them."""
    case, found, problem, reference, theta = compared
    if not problem.indexed or reference.penalty is not None:
        return
    tol, n = TOLERANCES[case.inside or problem.dtype][0], 3
    indices = torch.arange(4 * n).view(n, 4) % problem.samples
    weights = torch.stack([theta + 0.05 * j for j in range(n)]).to(problem.weights)
    with found.attempt("learners' gradients", "mixes its samples" if problem.data.loss_mixes_samples else ""):
        x, y = problem.gather(indices)
        out = torch.full_like(weights, 7.0)
        Stack(problem).gradients(weights, x, y, out)
        for j in range(n):
            xj, yj = (mapped(lambda t, own=indices[j]: t[own], part) for part in (reference.x, reference.y))
            expected = reference.gradient(weights[j].double().cpu(), xj, yj)
            found.compare(f"learner {j}'s gradient", out[j], expected, 10 * tol, 1e-2)


def _second_order(compared: Compared, thorough: bool, ends: bool) -> None:
    case, found, problem, reference, theta = compared
    tol = TOLERANCES[case.inside or problem.dtype][1]
    search = 1e-6 if tol < 1e-4 else tol / 3
    if case.refused_hessian:
        _no_hessian(found, problem, case.refused_hessian)
    p = reference.size
    h = reference.hessian(theta, differences=case.differences or bool(case.refused_hessian))
    values = torch.linalg.eigvalsh((h + h.T) / 2)
    radius = float(values.abs().max())
    if not float((h - h.T).abs().max()) <= tol * max(radius, 1e-8):
        found.wrong.append("reference: its Hessian is not symmetric")
    v = torch.linspace(-1, 1, p, dtype=torch.float64).cos()
    with found.attempt("Hessian product"):
        got = landscape.HessianOperator(problem)(v.to(problem.weights))
        found.compare("Hessian product", got, h @ v, tol, radius)
    if not ends:
        return
    with found.attempt("ends"):
        e = landscape.extreme_eigenvalues(problem, residual_tol=search)
        found.compare("ends", [e.min, e.max], [values[0], values[-1]], tol, radius)
        if not e.converged:
            found.wrong.append("ends: not converged")
    if not thorough:
        return
    with found.attempt("top 3"):
        k = min(3, p)
        top = landscape.top_eigenvalues(problem, k, residual_tol=search)
        found.compare("top 3", top.values, values.flip(0)[:k], tol, radius)
    with found.attempt("trace"):
        _trace(found, problem, float(values.sum()), tol * radius)
    with found.attempt("density"):
        _density(found, problem, h, tol)
    if not case.refused_hessian:
        _gauss_newton(compared, v, tol, search)


def _no_hessian(found: Findings, problem: Problem, words: str) -> None:
    functions = (landscape.extreme_eigenvalues, landscape.top_eigenvalues, landscape.trace, landscape.density)
    for function in functions:
        with found.attempt(function.__name__, words):
            function(problem, derivatives="exact")


def _trace(found: Findings, problem: Problem, expected: float, rounding: float) -> None:
    """Exact where products are as many as Hutch++ needs for that, and within its error bar where not."""
    p = problem.layout.size
    if p <= EXACT:
        found.compare("trace, exact", landscape.trace(problem, 3 * max(p, 2)).value, expected, 1.0, rounding)
        return
    drawn = [landscape.trace(problem, seed=seed) for seed in range(SEEDS)]
    value = sum(t.value for t in drawn) / SEEDS
    error = math.hypot(*(t.standard_error for t in drawn)) / SEEDS
    if not abs(value - expected) <= 5 * error + rounding:
        found.wrong.append(f"trace: got {value:.6g} ± {error:.2g}, expected {expected:.6g}")


def _density(found: Findings, problem: Problem, h: Tensor, tol: float) -> None:
    """The first two moments within five standard errors: the variance of zᵀAz/P, z random signs, is
    2 Σ_{i≠j} A_ij² / P²."""
    d = landscape.density(problem, PROBES, STEPS)
    for order, power in ((1, h), (2, h @ h)):
        off = power - power.diag().diag()
        error = 5 * math.sqrt(2 * float(off.square().sum()) / len(h) ** 2 / PROBES)
        got, expected = d.moment(order)[0], float(power.trace()) / len(h)
        if not abs(got - expected) <= error + tol * float(h.abs().max()) ** order:
            found.wrong.append(f"moment {order}: got {got:.8g}, expected {expected:.8g} ± {error:.2g}")


def _gauss_newton(compared: Compared, v: Tensor, tol: float, search: float) -> None:
    _, found, problem, reference, theta = compared
    if reference.loss_of is None or reference.penalty is not None:
        return
    g = reference.gauss_newton(theta)
    with found.attempt("Gauss-Newton", "" if g is not None else "gauss-newton"):
        got = landscape.HessianOperator(problem, matrix="gauss-newton")(v.to(problem.weights))
        if g is None:
            return
        radius = float(torch.linalg.eigvalsh(g)[-1])
        found.compare("Gauss-Newton product", got, g @ v, tol, radius)
        e = landscape.top_eigenvalues(problem, matrix="gauss-newton", residual_tol=search)
        found.compare("Gauss-Newton λ_max", e.values, [radius], tol, radius)
