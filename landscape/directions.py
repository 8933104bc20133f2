"""Planes through weight space: a centre θ (P,) and two directions (2, P)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from landscape.options import InputError, choose
from landscape.problem import Problem
from landscape.store import Array

NORMS = ("none", "filter", "layer")
IGNORES = ("none", "bias+norm")
SPAN = 0.1  # x, y ∈ [−0.1, 0.1] around w_a (DPSGD-2020, section 4.1)
MARGIN = 1.25  # a plane with markers shows a quarter more than reaches the outermost one (ours)


@dataclass(frozen=True)
class Plane:
    """The points ``center + x·directions[0] + y·directions[1]``; center (P,), directions (2, P).

    ``kind`` says how it was made, ``norm`` and ``ignore`` how random directions were scaled and which
    parameters they leave alone; ``axes`` what a step of 1 along each direction is.

    A plane made from M weight vectors (:mod:`landscape.planes`) keeps them: ``thetas`` (M, P), their
    coordinates ``markers`` (M, 2), float64, of the nearest point of the plane where they lie outside of it,
    and ``labels`` (M). ``explained`` (2,) is the share of their variance along each direction, or (0,).
    """

    center: Tensor
    directions: Tensor
    kind: str
    norm: str
    seed: int
    ignore: str = "none"
    axes: tuple[str, ...] = ("step along direction 1", "step along direction 2")
    markers: Array = field(default_factory=lambda: np.zeros((0, 2)))
    labels: tuple[str, ...] = ()
    explained: Array = field(default_factory=lambda: np.zeros(0))
    thetas: Tensor | None = None

    @property
    def span(self) -> float:
        """How far a picture reaches unless told otherwise: 0.1, or a quarter beyond the outermost marker."""
        reach = float(np.abs(self.markers).max(initial=0.0))
        return MARGIN * reach if reach > 0 else SPAN


def random_plane(problem: Problem, norm: str = "none", seed: int = 0, *, ignore: str | None = None) -> Plane:
    """Two directions with i.i.d. standard normal entries through the problem's centre.

    Args:
        norm: "none" keeps the draw (DPSGD-2020, section 4.1; the default, as in the paper's figures);
            "filter" scales each filter of a weight (each slice along its first dimension) to the norm of the
            centre's own filter (Li et al. 2018, section 4), a bias or normalisation tensor as one filter;
            "layer" scales each parameter tensor to the norm of the centre's own. A filter or tensor that is
            zero at the centre gets a zero direction. Only random directions are ever normalised: those
            made from weights or eigenvectors have a length that means something.
        seed: the same seed gives the same draw for every problem of the same layout, on every device and in
            every precision, so that several centres can be compared along the same directions.
        ignore: "bias+norm" leaves biases and normalisation parameters where they are, "none" moves them, too.
            Default: "bias+norm" for norm "filter" (as Li et al. 2018 do), else "none". The other parameters
            have the same direction either way.
    """
    choose("norm", norm, NORMS)
    ignore = ("bias+norm" if norm == "filter" else "none") if ignore is None else ignore
    choose("ignore", ignore, IGNORES)
    if seed < 0:
        raise InputError(f"seed: {seed} is not allowed, it must be an integer ≥ 0")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.empty(2, problem.layout.size, dtype=problem.dtype, device=problem.device)
    for direction in directions:
        centers, views = problem.layout.views(problem.theta), problem.layout.views(direction)
        for slot in problem.layout.slots:  # slot by slot: a float64 draw of all of θ would double the memory
            draw = torch.randn(slot.shape, dtype=torch.float64, generator=generator)
            views[slot.name].copy_(draw)
            if ignore == "bias+norm" and slot.role != "weight":
                views[slot.name].zero_()
            elif norm != "none":
                _normalise(views[slot.name], centers[slot.name], norm)
    return Plane(problem.theta, directions, "random", norm, seed, ignore)


def _normalise(direction: Tensor, center: Tensor, norm: str) -> None:
    """Scale ``direction`` in place to the norms of ``center``; a zero centre gives a zero direction."""
    if not direction.numel():
        return
    rows = (len(center), -1) if norm == "filter" and center.dim() > 1 else (1, -1)
    d, c = direction.view(rows), center.reshape(rows)
    own = d.norm(dim=1, keepdim=True)
    d.mul_(c.norm(dim=1, keepdim=True) / own.where(own > 0, torch.ones_like(own)))
