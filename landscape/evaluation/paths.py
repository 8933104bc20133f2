"""Sums of losses at points of a plane, one point after the other, and what a faster way is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.core.errors import InputError, PathWarning
from landscape.evaluation.fold import FoldedForward
from landscape.problem.batches import correct
from landscape.problem.checks import tolerance
from landscape.problem.problem import Problem

# How far the two displaced points of a check lie from the centre, as a share of its norm (ours).
DISPLACED = 0.3
# Under max_memory, activations are planned at this many times their own bytes: a layer's input, output and
# scratch space are there at once, and freed memory is not returned to the system at once (ours).
SPARE = 3

Progress = Callable[[float], None]
# (K, 2) points -> (K, 2) float64 on the device: sums over the samples of the losses, and of the right ones.
Totals = Callable[[Tensor, Progress], Tensor]


def pointwise(problem: Problem, center: Tensor, directions: Tensor) -> Totals:
    """The problem's own totals, point by point."""

    def totals(points: Tensor, progress: Progress) -> Tensor:
        total = torch.empty(len(points), 2, dtype=torch.float64, device=problem.device)
        theta = torch.empty_like(center)  # one buffer for all points; the model's parameters are views of it
        for k, (a, b) in enumerate(points.tolist()):
            torch.add(center, directions[0], alpha=a, out=theta).add_(directions[1], alpha=b)
            total[k] = problem.totals(theta)
            progress((k + 1) / len(points))
        return total

    return totals


def folded_totals(
    problem: Problem, folded: FoldedForward, center: Tensor, directions: Tensor, keep: bool
) -> Totals:
    """The totals by a folded network. ``keep``: the data is laid out once, beside the original."""
    laid_out = [(folded.inputs(x), y, count) for x, y, count in problem.chunks()] if keep else None

    def totals(points: Tensor, progress: Progress) -> Tensor:
        total = torch.zeros(len(points), 2, dtype=torch.float64, device=problem.device)
        theta = torch.empty_like(center)
        for k, (a, b) in enumerate(points.tolist()):
            torch.add(center, directions[0], alpha=a, out=theta).add_(directions[1], alpha=b)
            weights = folded.weights(problem.layout.views(theta))
            for x, y, count in laid_out or problem.chunks():
                outputs = folded(weights, folded.inputs(x))
                total[k, 0] += problem.criterion(outputs, y).double() * count
                total[k, 1] += correct(outputs, y, problem.criterion)
            progress((k + 1) / len(points))
        return total

    return totals


@dataclass
class Comparison:
    """A fast path beside the plain one, on a few samples, at three points of the plane."""

    problem: Problem
    center: Tensor
    directions: Tensor
    forced: bool

    @torch.no_grad()
    def agrees(self, path: str, fast: Callable[[Problem], Totals]) -> bool:
        """Whether ``fast`` gives the losses of the model itself; else a PathWarning, InputError if forced."""
        if self.problem.check == "off":
            return True
        few = self.problem.probe()
        reach = DISPLACED * max(float(self.center.norm()), 1e-3)
        a, b = (reach / norm if norm > 0 else 0.0 for norm in self.directions.norm(dim=1).tolist())
        points = torch.tensor([[0.0, 0.0], [a, -b / 2], [-a / 2, b]], dtype=torch.float64)
        plain = pointwise(few, self.center, self.directions)(points, _nobody)
        try:
            found = fast(few)(points, _nobody)
        except Exception as error:  # the user's model by a way that it was not written for
            reason = f"it fails on this model ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        else:
            if few.regularised:  # the plain totals hold the penalty, as the model's own loss does
                found = penalised(few, lambda points, progress: found, self.center, self.directions)(
                    points, _nobody
                )
            allowed = tolerance(self.problem.dtype)
            same = torch.isclose(found, plain, rtol=allowed, atol=allowed * few.samples, equal_nan=True)
            if bool(same[:, 0].all()) and bool((found[:, 1].isnan() == plain[:, 1].isnan()).all()):
                return True
            k = int((found - plain)[:, 0].abs().nan_to_num(nan=torch.inf).argmax())
            losses = [float(totals[k, 0]) / few.samples for totals in (found, plain)]
            reason = "its loss is {:.6g} where that of the model itself is {:.6g}".format(*losses)
        if self.forced:
            raise InputError(f"path: '{path}' is not allowed for this model, {reason}; use 'pointwise'")
        warnings.warn(f"path: 'pointwise' in place of '{path}', {reason}", PathWarning, stacklevel=4)
        return False


def _nobody(share: float) -> None:
    """Progress that nobody is told of."""


def penalised(problem: Problem, totals: Totals, center: Tensor, directions: Tensor) -> Totals:
    """``totals`` of the data, and the problem's penalty at each point."""
    if not problem.regularised:
        return totals

    def both(points: Tensor, progress: Progress) -> Tensor:
        total = totals(points, progress).clone()
        for k, (a, b) in enumerate(points.tolist()):
            theta = torch.add(center, directions[0], alpha=a).add_(directions[1], alpha=b)
            total[k, 0] += problem.penalty_value(theta).double() * problem.samples
        return total

    return both
