"""Loss and accuracy along a line: through the centre, or between two sets of weights."""

from __future__ import annotations

from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.memory import bounded
from landscape.core.options import expect, positive
from landscape.core.progress import Progress
from landscape.evaluation import evaluate, needs
from landscape.evaluation.adaptive import Tolerance, first_points
from landscape.evaluation.filling import complete
from landscape.evaluation.grid import Portions, setting
from landscape.problem.batchnorm import SAMPLES
from landscape.problem.layout import as_array
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.grids import SPAN, Line, barrier

POINTS = 51  # ours; Frankle et al. 2020 take 30 between two ends. Odd, so that the middle is one of them


@bounded(needs.line)
def line(
    problem: Problem,
    along: Tensor,
    points: int = POINTS,
    span: float | None = None,
    *,
    ends: tuple[str, str] | tuple[()] = (),
    bn: str = "center",
    bn_samples: int = SAMPLES,
    path: str = "auto",
    tolerance: str | float | None = None,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Line:
    """Loss and accuracy of ``problem`` at ``points`` weights on a line.

    Args:
        problem: the loss; its model is evaluated in eval mode.
        along: (P,), a direction: the weights are center + t·along, t ∈ [−span, span]; or (2, P), two ends:
            (1−t)·along[0] + t·along[1], t ∈ [0, 1], with the barrier between them.
        points: how many, at least 2; 51 by default.
        span: of a direction; default 0.1, as of planes (DPSGD-2020, section 4.1).
        ends: names of the two ends for plots.
        bn, bn_samples: whose statistics BatchNorm uses, "center", "recalibrate" or "train"; see
            :meth:`landscape.Problem.with_batchnorm`.
        path: how the losses are computed; "auto" takes the fastest path that agrees with the model itself.
        tolerance: as for :func:`landscape.contour`; of 51 points a smooth line needs 25 exact ones. Where
            half of them do not suffice, all are computed.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        t, loss and accuracy, (points,) each.

    Raises:
        InputError: fewer than 2 points, a span that is not positive or for two ends, an ``along`` of another
            shape, an unknown option, or a tolerance that is not allowed.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> landscape.line(problem, torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), points=3).loss.tolist()
        [0.5, 0.0, 0.5]
    """
    expect("problem", problem, Problem)
    expect("along", along, Tensor)
    positive("points", points, least=2)
    size = problem.layout.size
    if along.shape not in ((size,), (2, size)):
        raise InputError(
            f"along: shape {tuple(along.shape)} is not allowed, it must be ({size},) or (2, {size})"
        )
    along = along.to(problem.theta)
    if along.dim() == 2:
        if span is not None:
            raise InputError("span: a line between two ends runs from 0 to 1, it has none")
        kind, t = "interpolation", np.linspace(0, 1, points)
        start, direction = along[0], along[1] - along[0]
    else:
        span = SPAN if span is None else span
        positive("span", span)
        kind, t = "direction", np.linspace(-span, span, points)
        start, direction = problem.theta, along
    problem = problem.with_batchnorm(bn, bn_samples)
    allowed = None if tolerance is None else Tolerance.parse(tolerance, problem.dtype)
    directions = torch.stack((direction, torch.zeros_like(direction)))
    run = evaluate.evaluator(
        problem, start, directions, points if allowed is None else first_points((points,)), path=path
    )

    def values(places: Tensor, report: Progress) -> dict[str, Tensor]:
        at_points = run(places, report)
        return {"loss": at_points.loss, "accuracy": at_points.accuracy}

    columns = {"loss": np.full(points, np.nan), "accuracy": np.full(points, np.nan)}
    done = np.zeros(points, bool)
    places, portions = torch.from_numpy(np.stack((t, np.zeros(points)), 1)), Portions(progress=progress)
    errors = complete(places, done, columns, values, portions, allowed, ("loss",), ("accuracy",))
    exact = np.where(done, columns["loss"], np.nan)
    evaluate.confirm(problem, start, directions, places, exact, run.path)
    return Line(
        t=t,
        loss=columns["loss"],
        accuracy=columns["accuracy"],
        done=done,
        start=as_array(start),
        direction=as_array(direction),
        kind=kind,
        barrier=barrier(t, columns["loss"]) if kind == "interpolation" else float("nan"),
        path=run.path,
        ends=ends,
        **errors,
        **setting(problem),
        **about,
    )
