"""Sums of losses at points of a plane, point by point, and the comparison of a faster path with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from landscape.core.errors import InputError, PathWarning
from landscape.core.progress import Progress, no_progress
from landscape.evaluation.fold import FoldedForward
from landscape.problem.function import tolerance
from landscape.problem.losses import correct
from landscape.problem.problem import Problem

# Distance from the centre of the two displaced points of a comparison, as a share of the centre's norm
# (ours).
DISPLACEMENT = 0.3
# Under max_memory, activations are planned at this many times their bytes: a layer's input, output and
# scratch space exist at once, and freed memory does not return to the system at once (ours).
ACTIVATION_COPIES = 3

# (K, 2) points -> (K, 2) float64 on the device: sums over the samples of the losses, and of the correct ones.
Totals = Callable[[Tensor, Progress], Tensor]


@dataclass(frozen=True)
class PlaneLoss:
    """The loss of ``problem`` at points (a, b) of a plane, θ = center + a·directions[0] + b·directions[1].

    center (P,), directions (2, P).
    """

    problem: Problem
    center: Tensor
    directions: Tensor

    def of(self, problem: Problem) -> PlaneLoss:
        """The loss of another problem, such as one with fewer samples, on the same plane."""
        return replace(self, problem=problem)

    def move(self, a: float, b: float, theta: Tensor) -> Tensor:
        """Write the weights (P,) at the point (a, b) to ``theta``, and return it."""
        return torch.add(self.center, self.directions[0], alpha=a, out=theta).add_(
            self.directions[1], alpha=b
        )

    def pointwise(self, points: Tensor, progress: Progress) -> Tensor:
        """The :data:`Totals` by the problem itself, point by point."""
        total = torch.empty(len(points), 2, dtype=torch.float64, device=self.problem.device)
        theta = torch.empty_like(self.center)  # one buffer for all points; the parameters are views of it
        for k, (a, b) in enumerate(points.tolist()):
            total[k] = self.problem.totals(self.move(a, b, theta))
            progress((k + 1) / len(points))
        return total

    def with_penalty(self, totals: Totals) -> Totals:
        """``totals`` of the data plus the problem's penalty at each point."""
        problem = self.problem
        if not problem.regularised:
            return totals

        def both(points: Tensor, progress: Progress) -> Tensor:
            total = totals(points, progress).clone()
            for k, (a, b) in enumerate(points.tolist()):
                theta = self.move(a, b, torch.empty_like(self.center))
                total[k, 0] += problem.penalty_value(theta).double() * problem.data.samples
            return total

        return both

    @torch.no_grad()
    def agrees(self, path: str, fast: Callable[[PlaneLoss], Totals], *, forced: bool) -> bool:
        """Whether ``fast`` gives the model's losses on a few samples, at three points of the plane.

        If not, a PathWarning, or InputError with ``forced``.
        """
        if self.problem.check == "off":
            return True
        few = self.of(self.problem.on(self.problem.data.few()))
        reach = DISPLACEMENT * max(float(self.center.norm()), 1e-3)
        a, b = (reach / norm if norm > 0 else 0.0 for norm in self.directions.norm(dim=1).tolist())
        points = torch.tensor([[0.0, 0.0], [a, -b / 2], [-a / 2, b]], dtype=torch.float64)
        expected = few.pointwise(points, no_progress)  # with the penalty
        try:
            totals = few.with_penalty(fast(few))(points, no_progress)
        except Exception as error:  # the user's model, on a path that it was not written for
            reason = f"it fails on this model ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        else:
            samples, allowed = few.problem.data.samples, tolerance(self.problem.dtype)
            same = torch.isclose(totals, expected, rtol=allowed, atol=allowed * samples, equal_nan=True)
            if bool(same[:, 0].all()) and bool((totals[:, 1].isnan() == expected[:, 1].isnan()).all()):
                return True
            k = int((totals - expected)[:, 0].abs().nan_to_num(nan=torch.inf).argmax())
            losses = [float(sums[k, 0]) / samples for sums in (totals, expected)]
            reason = "its loss is {:.6g} where that of the model itself is {:.6g}".format(*losses)
        if forced:
            raise InputError(f"path: '{path}' is not allowed for this model, {reason}; use 'pointwise'")
        warnings.warn(f"path: 'pointwise' in place of '{path}', {reason}", PathWarning, stacklevel=5)
        return False


def folded_totals(loss: PlaneLoss, folded: FoldedForward, *, keep: bool) -> Totals:
    """The totals by a folded network. ``keep``: a copy of the data in its memory layout is kept."""
    problem = loss.problem
    laid_out = [(folded.inputs(x), y, count) for x, y, count in problem.chunks()] if keep else None

    def totals(points: Tensor, progress: Progress) -> Tensor:
        total = torch.zeros(len(points), 2, dtype=torch.float64, device=problem.device)
        theta = torch.empty_like(loss.center)
        for k, (a, b) in enumerate(points.tolist()):
            weights = folded.weights(problem.layout.views(loss.move(a, b, theta)))
            for x, y, count in laid_out or problem.chunks():
                outputs = folded(weights, folded.inputs(x))
                total[k, 0] += problem.criterion(outputs, y).double() * count
                total[k, 1] += correct(outputs, y, problem.criterion)
            progress((k + 1) / len(points))
        return total

    return totals
