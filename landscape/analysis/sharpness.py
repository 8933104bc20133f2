"""Worst-case and average-case sharpness: how far the loss rises within a distance of the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.memory import bounded
from landscape.core.options import choose, expect, positive
from landscape.core.progress import Progress
from landscape.core.statistics import mean_and_error, standard_error
from landscape.curvature.start import start_vector
from landscape.evaluation import needs
from landscape.evaluation.ascent import Ascent, largest_rise
from landscape.evaluation.minibatches import Minibatches, stream
from landscape.evaluation.provenance import setting
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.flatness import Sharpness

KINDS = ("worst", "average")
# Gradients of one search (Andriushchenko et al. 2023 take 20 on CIFAR-10), and random starts of it besides
# that along the gradient (ours: at a minimum the gradient is mostly noise).
STEPS, STARTS = 20, 1
# A relative standard error of 5% in at most 256 draws, not judged before the 32nd (ours: an error from fewer
# is itself wrong by an eighth).
TOL, DRAWS, FEWEST = 0.05, 256, 32


@bounded(needs.sharpness)
def sharpness(
    problem: Problem,
    rho: float,
    kind: str = "worst",
    *,
    adaptive: bool = True,
    m: int | None = None,
    steps: int = STEPS,
    starts: int = STARTS,
    tol: float = TOL,
    max_draws: int = DRAWS,
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Sharpness:
    """How far the loss rises within ρ of the weights: (adaptive) worst-case or average-case m-sharpness.

    The definitions are those of Andriushchenko et al. (arXiv 2302.07011), after Kwon et al. (2021) for
    ``adaptive`` and Foret et al. (2021) for ``m``, with the logits as they are; pairs ±δ and the search are
    ours. Adaptive sharpness does not change where the weights of two layers are scaled so that the network
    stays the same. Neither kind predicts generalisation well: over modern networks its correlation with the
    test error is low, and may be negative (arXiv 2302.07011). BatchNorm has the statistics of the problem at
    all weights, not those of the minibatches.

    Args:
        problem: the loss.
        rho: ρ: the radius ("worst"), or the standard deviation of each component of δ/c ("average").
        kind: "worst" or "average".
        adaptive: c = |w|, so that each weight moves in proportion to its size; else c = 1.
        m: samples of a minibatch, over which the sharpness is a mean; default: all samples at once.
        steps: gradients for each start of a search, at most.
        starts: random starts of a search, besides that along the gradient.
        tol: draws go on until the standard error is this share of the value…
        max_draws: …or until there are so many: minibatches, or pairs ±δ; at least 2.
        seed: draws minibatches, displacements and starts.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        ``value`` and ``standard_error`` in nats; for kind "worst" and all samples nothing is drawn.

    Raises:
        InputError: a number or kind that is not allowed, ``m`` above the number of samples, or weights that
            are all 0 with ``adaptive``.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> problem.theta.zero_()  # the minimum; H has the eigenvalues 1 and 9
        tensor([0., 0.])
        >>> round(landscape.sharpness(problem, 0.1, adaptive=False).value, 4)  # 9ρ²/2
        0.045
    """
    choose("kind", kind, KINDS)
    expect("problem", problem, Problem)
    positive("rho", rho)
    positive("tol", tol)
    for name, value, least in (("steps", steps, 1), ("starts", starts, 0), ("max_draws", max_draws, 2)):
        positive(name, value, least=least)
    theta = problem.theta
    scale = theta.abs() if adaptive else None
    if scale is not None and not bool(scale.any()):
        raise InputError("adaptive: all weights are 0, so that none could move; give adaptive=False")
    if m is not None:
        positive("m", m, least=1)
        if m > problem.data.samples:
            raise InputError(f"m: {m} is not allowed, the data has {problem.data.samples} samples")
    start_vector(problem, seed, 1)  # refuses a seed below 0
    fixed = kind == "worst" and m is None
    drawn = _Draws(problem, float(rho), scale, _parts(problem, m, seed), stream(seed, 1))
    whole = problem.loss() if kind == "average" and m is None else None
    found: list[Ascent] = []
    reached = False
    while not reached and len(found) < (1 if fixed else max_draws):
        found.append(drawn.worst(steps, starts) if kind == "worst" else drawn.pair(whole))
        reached = fixed or (len(found) >= FEWEST and _relative_error([each.rise for each in found]) <= tol)
        if progress:
            progress(1.0 if reached else len(found) / max_draws)
    rises = np.array([each.rise for each in found])
    return Sharpness(
        values=rises,
        standard_error=0.0 if fixed else standard_error(rises),
        loss=float(np.mean([each.base for each in found])),
        kind=kind,
        rho=float(rho),
        adaptive=adaptive,
        m=m or 0,
        reached=reached,
        residual=float(np.mean([each.residual for each in found])),
        gradients=sum(each.gradients for each in found) + (whole is not None),
        steps=steps if kind == "worst" else 0,
        starts=starts if kind == "worst" else 0,
        fixed=0 if scale is None else int((scale == 0).sum()),
        parameters=len(theta),
        seed=seed,
        **setting(problem),
        **about,
    )


@dataclass(frozen=True)
class _Draws:
    """What is drawn: minibatches (or all samples, always the same), displacements and starts."""

    problem: Problem
    rho: float
    scale: Tensor | None
    parts: Iterator[Problem]
    generator: torch.Generator

    def normal(self) -> Tensor:
        """(P,), the same draw on every device."""
        theta = self.problem.theta
        drawn = torch.randn(len(theta), dtype=torch.float64, generator=self.generator).to(theta)
        return self.problem.along_weights(drawn)

    def worst(self, steps: int, starts: int) -> Ascent:
        """The largest rise of one minibatch's loss."""
        part = next(self.parts)
        directions = [self.normal() for _ in range(starts)]
        return largest_rise(part, part.theta, self.scale, self.rho, directions, steps)

    def pair(self, base: float | None) -> Ascent:
        """The mean rise at ±δ, in which odd terms cancel; ``base``: the loss at the centre, if known."""
        part, shift = next(self.parts), self.normal() * self.rho
        shift = shift if self.scale is None else shift * self.scale
        known = part.loss() if base is None else base
        rise = (part.loss(part.theta + shift) + part.loss(part.theta - shift)) / 2 - known
        return Ascent(rise, known, 0.0, 2 + (base is None))


def _parts(problem: Problem, m: int | None, seed: int) -> Iterator[Problem]:
    """Minibatches of ``m`` samples, drawn with replacement; None: the problem itself, again and again."""
    if m is None:
        return itertools.repeat(problem)
    drawn = Minibatches(problem, m, stream(seed, 0), own_statistics=False)
    return (part for (part,) in drawn)


def _relative_error(values: list[float]) -> float:
    """The standard error of the mean of ``values``, relative to it; infinite for a mean of 0."""
    mean, error = mean_and_error(np.array(values))
    return error / abs(mean) if mean else math.inf
