"""Loss (and accuracy) on a grid over a plane."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch

from landscape import evaluate
from landscape.batchnorm import SAMPLES, has_batchnorm, with_policy
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
    ``batchnorm`` says whether the model has BatchNorm, ``bn`` whose statistics it used, from ``bn_samples``
    samples a point where they were re-estimated (a batch where they were the batch's).

    The weights that the plane was made from, if any: their coordinates ``markers`` (M, 2), ``labels``, the
    loss at each itself, not at its place in the plane, ``marker_loss`` (M,); ``explained`` and ``axes`` as
    in :class:`landscape.Plane`.
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
    ignore: str = ""  # "": a file older than the option
    batchnorm: bool = False
    bn_samples: int = 0
    axes: tuple[str, ...] = ("step along direction 1", "step along direction 2")
    markers: Array = field(default_factory=lambda: np.zeros((0, 2)))
    labels: tuple[str, ...] = ()
    marker_loss: Array = field(default_factory=lambda: np.zeros(0))
    explained: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        shape = (len(self.y), len(self.x))
        if not self.loss.shape == self.accuracy.shape == self.done.shape == shape:
            raise ValueError(f"loss {self.loss.shape}, accuracy and done must all have shape {shape}")
        if self.markers.shape != (len(self.labels), 2) or self.marker_loss.shape != (len(self.labels),):
            raise ValueError(
                f"markers {self.markers.shape} and marker_loss must fit {len(self.labels)} labels"
            )

    def plot(self, style: str = "contour", **options: Any) -> Figure:
        """A picture of ``style`` "contour" or "surface" (3-D); see :func:`landscape.plots.draw`."""
        from landscape import plots  # numerics import no matplotlib until a picture is asked for

        return plots.draw([self], style, **options)


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
    span: float | None = None,
    *,
    bn: str = "center",
    bn_samples: int = SAMPLES,
    path: str = "auto",
    progress: evaluate.Progress | None = None,
    **about: Unpack[About],
) -> Surface:
    """Loss and accuracy of ``problem`` on an (nx, ny) ``grid`` over ``plane``.

    Args:
        grid, span: 50 × 50 points over x, y ∈ [−0.1, 0.1] by default (DPSGD-2020, section 4.1), over more
            where the plane has markers further out (``plane.span``).
        bn, bn_samples: whose statistics BatchNorm uses; see :func:`landscape.batchnorm.with_policy`.
        path: "auto", "batched", "compiled", "folded" or "pointwise"; see :mod:`landscape.evaluate`.
        progress: called with the share of the work done.
        about: see :class:`landscape.store.About`; kept with the result.

    The model is evaluated in eval mode. Raises InputError for a grid below 1, a span that is not positive or
    an unknown policy.
    """
    span = plane.span if span is None else span
    problem = with_policy(problem, bn, bn_samples)
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
        bn=bn,
        path=values.path,
        ignore=plane.ignore,
        batchnorm=has_batchnorm(problem.model),
        bn_samples=problem.bn_samples,
        axes=plane.axes,
        markers=plane.markers,
        labels=plane.labels,
        marker_loss=evaluate.losses(problem, plane.thetas),
        explained=plane.explained,
        **about,
    )
