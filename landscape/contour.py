"""Loss (and accuracy) on a grid over a plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch

from landscape import evaluate
from landscape.directions import Plane
from landscape.options import positive
from landscape.problem import Problem
from landscape.store import About, Array, Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Surface(Result):
    """``loss[i, j]`` is L(center + x[j]·directions[0] + y[i]·directions[1]).

    x (nx,), y (ny,), loss and accuracy (ny, nx) float64, done (ny, nx) bool; directions (2, P), center (P,).
    Losses that came out infinite or NaN are kept as such. ``label`` and ``source`` say whose surface it is.
    """

    schema: ClassVar[str] = "landscape.surface"

    x: Array
    y: Array
    loss: Array
    accuracy: Array
    done: Array
    directions: Array
    center: Array
    kind: str
    norm: str
    seed: int
    span: float
    samples: int
    dtype: str
    bn: str
    path: str
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.y), len(self.x))
        if not self.loss.shape == self.accuracy.shape == self.done.shape == shape:
            raise ValueError(f"loss {self.loss.shape}, accuracy and done must all have shape {shape}")

    def plot(self, **options: Any) -> Figure:
        """A contour plot; see :func:`landscape.plots.surfaces`."""
        from landscape import plots  # numerics import no matplotlib until a picture is asked for

        return plots.surfaces([self], **options)


def axes(grid: tuple[int, int], span: float) -> tuple[Array, Array]:
    """x (nx,) and y (ny,) evenly spaced over [−span, span]; a single point is 0. InputError if impossible."""
    for count in grid:
        positive("grid", count, least=1)
    positive("span", span)
    x, y = (np.linspace(-span, span, n) if n > 1 else np.zeros(1) for n in grid)
    return x, y


def grid_points(x: Array, y: Array) -> torch.Tensor:
    """(ny·nx, 2) points (x[j], y[i]), row by row: reshape(ny, nx) puts them back in a surface's order."""
    gx, gy = np.meshgrid(x, y)
    return torch.from_numpy(np.stack((gx.ravel(), gy.ravel()), 1))


def contour(
    problem: Problem,
    plane: Plane,
    grid: tuple[int, int] = (50, 50),
    span: float = 0.1,
    *,
    path: str = "auto",
    progress: evaluate.Progress | None = None,
    **about: Unpack[About],
) -> Surface:
    """Loss and accuracy of ``problem`` on an (nx, ny) ``grid`` over ``plane``.

    Args:
        grid, span: 50 × 50 points over x, y ∈ [−0.1, 0.1] by default (DPSGD-2020, section 4.1).
        path: "auto", "batched" or "pointwise"; see :mod:`landscape.evaluate`.
        progress: called with the share of the work done.
        about: see :class:`landscape.store.About`; kept with the result.

    The model is evaluated in eval mode with the BatchNorm statistics of the centre (``bn`` "center").
    Raises InputError for a grid below 1 or a span that is not positive.
    """
    x, y = axes(grid, span)
    points = grid_points(x, y)
    values = evaluate.evaluate_plane(
        problem, plane.center, plane.directions, points, path=path, progress=progress
    )
    shape = (len(y), len(x))
    return Surface(
        x=x,
        y=y,
        loss=values.loss.numpy().reshape(shape),
        accuracy=values.accuracy.numpy().reshape(shape),
        done=np.ones(shape, bool),
        directions=plane.directions.cpu().numpy(),
        center=plane.center.cpu().numpy(),
        kind=plane.kind,
        norm=plane.norm,
        seed=plane.seed,
        span=span,
        samples=problem.samples,
        dtype=str(problem.dtype).removeprefix("torch."),
        bn="center",
        path=values.path,
        **about,
    )
