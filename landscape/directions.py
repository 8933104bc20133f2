"""Planes through weight space: a centre θ (P,) and two directions (2, P)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.options import InputError, choose
from landscape.problem import Problem

NORMS = ("none", "filter", "layer")


@dataclass(frozen=True)
class Plane:
    """The points ``center + x·directions[0] + y·directions[1]``; center (P,), directions (2, P)."""

    center: Tensor
    directions: Tensor
    kind: str
    norm: str
    seed: int


def random_plane(problem: Problem, norm: str = "none", seed: int = 0) -> Plane:
    """Two directions with i.i.d. standard normal entries through the problem's centre.

    Args:
        norm: "none" keeps the draw (DPSGD-2020, section 4.1; the default, as in the paper's figures);
            "filter" scales each filter of a weight (each slice along its first dimension) to the norm of the
            centre's own filter and zeroes biases and normalisation parameters (Li et al. 2018, section 4);
            "layer" scales each parameter tensor to the norm of the centre's own.
        seed: the same seed gives the same draw for every problem of the same layout, on every device and in
            every precision, so that several centres can be compared along the same directions.
    """
    choose("norm", norm, NORMS)
    if seed < 0:
        raise InputError(f"seed: {seed} is not allowed, it must be an integer ≥ 0")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.empty(2, problem.layout.size, dtype=problem.dtype, device=problem.device)
    for direction in directions:
        centers, views = problem.layout.views(problem.theta), problem.layout.views(direction)
        for slot in problem.layout.slots:  # slot by slot: a float64 draw of all of θ would double the memory
            draw = torch.randn(slot.shape, dtype=torch.float64, generator=generator)
            views[slot.name].copy_(draw)
            _normalise(views[slot.name], centers[slot.name], norm, slot.role)
    return Plane(problem.theta, directions, "random", norm, seed)


def _normalise(direction: Tensor, center: Tensor, norm: str, role: str) -> None:
    """Scale ``direction`` in place to the norms of ``center``; a zero centre gives a zero direction."""
    if norm == "none":
        return
    if norm == "filter" and role != "weight":
        direction.zero_()
        return
    rows = (len(center), -1) if norm == "filter" and center.dim() > 1 else (1, -1)
    d, c = direction.view(rows), center.reshape(rows)
    own = d.norm(dim=1, keepdim=True)
    d.mul_(c.norm(dim=1, keepdim=True) / own.where(own > 0, torch.ones_like(own)))
