"""Loss and accuracy along a line: through the centre, or between two sets of weights."""

from __future__ import annotations

from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.evaluation import evaluate
from landscape.problem.batchnorm import SAMPLES, has_batchnorm, with_policy
from landscape.problem.layout import as_array
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.line import Line, barrier
from landscape.results.plane import SPAN

POINTS = 51  # ours; Frankle et al. 2020 take 30 between two ends. Odd, so that the middle is one of them


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
    progress: evaluate.Progress | None = None,
    **about: Unpack[Provenance],
) -> Line:
    """Loss and accuracy of ``problem`` at ``points`` weights on a line.

    Args:
        along: (P,), a direction: the weights are center + t·along, t ∈ [−span, span]; or (2, P), two ends:
            (1−t)·along[0] + t·along[1], t ∈ [0, 1], with the barrier between them.
        span: of a direction; default 0.1, as in :func:`landscape.contour`.
        ends: what to call the two ends in a plot.
        bn, bn_samples: whose statistics BatchNorm uses; see :func:`landscape.problem.batchnorm.with_policy`.
        path, progress, about: as in :func:`landscape.contour`.

    Raises InputError for fewer than 2 points, a span that is not positive or given for two ends, or an
    ``along`` of another shape.
    """
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
    problem = with_policy(problem, bn, bn_samples)
    values = evaluate.evaluate_plane(
        problem,
        start,
        torch.stack((direction, torch.zeros_like(direction))),
        torch.from_numpy(np.stack((t, np.zeros(points)), 1)),
        path=path,
        progress=progress,
    )
    loss = values.loss.numpy()
    return Line(
        t=t,
        loss=loss,
        accuracy=values.accuracy.numpy(),
        start=as_array(start),
        direction=as_array(direction),
        kind=kind,
        barrier=barrier(t, loss) if kind == "interpolation" else float("nan"),
        samples=problem.samples,
        dtype=str(problem.dtype).removeprefix("torch."),
        bn=bn,
        batchnorm=has_batchnorm(problem.model),
        bn_samples=problem.bn_samples,
        path=values.path,
        ends=ends,
        **about,
    )
