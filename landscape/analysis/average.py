"""The predicted loss of averages of weights: from losses, gradients and products at the members alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.spread import Spread
from landscape.checkpoint.weights import Weights, networks_of
from landscape.core.analysis import analysis
from landscape.core.devices import single
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.memory import Need
from landscape.core.progress import Progress, ProgressOption, portion, taken
from landscape.curvature.double_backward import in_full_precision
from landscape.curvature.eigenvalues import fast_hessian
from landscape.curvature.hessian import exact_only
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.evaluation.hull import LENGTHS, LEVEL, Hull, Measured
from landscape.gradients.minibatches import placed
from landscape.problem.batchnorm import SAMPLES, tracked
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.comparison import WeightAverage

# The most members: with n of them a matrix of (2n² − n)² numbers is factored, 32 MB for 32 (ours).
MEMBERS = 32


def _average_need(problem: Any, weights: Any, **_: Any) -> Need:
    """Members, deviations, gradient, product; a matrix over the observations for each length, and terms."""
    n = len(weights) if isinstance(weights, Sequence) else needs.rows(weights)
    return needs.curved(problem, 2 * n + 4, 8 * (len(LENGTHS) + 8) * (2 * min(n, MEMBERS) ** 2) ** 2)


@analysis(_average_need, shorter="a part of the data", of_the_run=("weights",), version=1)
def average(
    problem: Problem | Run,
    weights: Sequence[Weights] | Tensor | None = None,
    coefficients: Sequence[float] | Array | None = None,
    *,
    exact: bool = True,
    bn_samples: int = SAMPLES,
    labels: Sequence[str] = (),
    max_memory: int | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> WeightAverage:
    """Predict the loss of averages of weights, before they are evaluated.

    Members may be checkpoints of a run (SWA, LAWA, WSM), the learners of a run, fine-tunings of a network (a
    soup) or adapters. The loss and the gradient at each member w_j, and one Hessian product with its distance
    from the mean, are measured once; from them follow the losses of all averages w = Σ_j a_j w_j: to second
    order Σ a_j L(w_j) − ½ tr(HC), with C the covariance of the members, and higher orders from a Gaussian
    process around a quadratic function, in the affine hull of the members. The average is not evaluated for
    it. The 90% interval is that of length scales from half the members' distance from their mean to four
    times, and of the orders that are missing: where each order corrects more than the one before (``ratio`` ≥
    1), as between networks that were trained independently, the interval has no ends.

    Besides, members are chosen by prediction: from the best on, each that lowers the predicted loss of the
    uniform average (greedy soup, Wortsman et al. 2022, Recipe 1, which evaluates each average), if the
    interval of that loss is below the mean loss of the averaged members.

    A network with BatchNorm has, at each member and average, statistics that are estimated there. Gradients
    and products go through those of batches of ``bn_samples``; the differences between the losses with either
    statistics are predicted linearly, and the largest of them is part of the interval.

    Args:
        problem: the loss; or a run, on its training set.
        weights: the members, 2 to 32: (n, P), or a list of networks in any form that :func:`landscape.line`
            takes; default: the run's learners.
        coefficients: a_j ≥ 0 (n,), or (K, n) for K averages, divided by their sum; default: uniform.
        exact: whether the exact losses of the averages are computed beside it, a pass over the data each.
        bn_samples: samples from which statistics of BatchNorm are estimated.
        labels: names of the members; default: 0, 1, …
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        Predicted losses with intervals of the averages that were asked for, and of the chosen one.

    Raises:
        InputError: a number of members or coefficients that is not allowed, what is no weights of this model,
            or a model without second derivatives.
        OperationError: members that are equal, or that are not finite in weights, losses or gradients.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> members = torch.tensor([[1.0, 0.2], [-1.0, 0.2], [0.0, 3.0]])
        >>> result = landscape.average(problem, members, [1, 1, 0])
        >>> result.loss.round(3).tolist(), result.chosen.tolist()  # of the first two; they are chosen, too
        ([0.02, 0.02], [True, True, False])
    """
    problem = problem_of(problem)
    members = None if weights is None else [each.theta for each in networks_of(problem, weights)]
    if not isinstance(weights, Tensor):  # which is taken without a copy
        weights = torch.stack(members) if members else None
    weights = placed(problem, weights, least=2)
    n = len(weights)
    if n > MEMBERS:
        raise InputError(f"weights: {n} members are not allowed, it must be 2 to {MEMBERS}")
    if labels and len(labels) != n:
        raise InputError(f"labels: {len(labels)} for {n} members, each needs one")
    asked = _shares(coefficients, n)
    exact_only(problem, "average")
    evaluated, curved = _with_statistics(problem, in_full_precision(problem), bn_samples)
    measured = _measure(evaluated, curved, weights := single(weights), portion(progress, 0, 0.9))
    hull, members_loss = Hull(measured), measured.losses + measured.offsets
    averages = np.vstack([asked, chosen := _greedy(hull, members_loss)])
    found = hull(averages)
    losses = np.full(len(averages), np.nan)
    for k, row in enumerate(averages if exact else []):
        losses[k] = evaluated.loss((torch.from_numpy(row).to(weights) @ weights).to(evaluated.dtype))
    taken(progress)(1.0)
    return WeightAverage(
        members_loss=members_loss,
        coefficients=averages,
        loss=found.loss,
        low=found.low,
        high=found.high,
        ratio=found.ratio,
        exact=losses,
        chosen=chosen > 0,
        labels=tuple(labels) or tuple(map(str, range(n))),
        parameters=problem.layout.size,
        products=n,
        level=LEVEL,
        **setting(evaluated),
        **about,
    )


def _shares(coefficients: Any, n: int) -> Array:
    """(K, n), ``coefficients`` whose rows sum to 1. InputError for others than numbers ≥ 0."""
    if coefficients is None:
        return np.full((1, n), 1 / n)
    try:
        rows = np.atleast_2d(np.asarray(coefficients, dtype=np.float64))
    except (TypeError, ValueError):
        rows = np.zeros((0, 0))
    if rows.ndim != 2 or rows.shape[1] != n or not len(rows):
        raise InputError(f"coefficients: shape {np.shape(coefficients)}, it must be ({n},) or (K, {n})")
    sums = rows.sum(1, keepdims=True)
    for row in rows[~((rows >= 0).all(1) & (sums[:, 0] > 0) & np.isfinite(sums[:, 0]))][:1]:
        raise InputError(f"coefficients: {row.tolist()} are not allowed, they must be ≥ 0, not all of them 0")
    shares: Array = rows / sums
    return shares


def _with_statistics(problem: Problem, full: Problem, bn_samples: int) -> tuple[Problem, Problem]:
    """The problem of the losses, and of the derivatives, which differs with BatchNorm and half precision."""
    trained = full.with_batchnorm("train", bn_samples)
    if problem.batchnorm.name == "train" or not tracked(problem.model):
        return problem, full
    own = problem.batchnorm.name == "recalibrate"
    return problem if own else problem.with_batchnorm("recalibrate", bn_samples), trained


def _measure(evaluated: Problem, curved: Problem, weights: Tensor, progress: Progress) -> Measured:
    """Measure the members by ``curved``; offsets are the losses by ``evaluated`` minus those."""
    n, spread = len(weights), Spread(weights)
    if not spread.consensus > 0 or all(torch.equal(w, weights[0]) for w in weights):
        raise OperationError(
            f"weights: all {n} members are equal, so that each of their averages is the same network; give "
            "members that differ"
        )
    losses, offsets, slopes, bends = np.zeros(n), np.zeros(n), np.zeros((n, n)), np.zeros((n, n))
    for i, w in enumerate(weights):
        losses[i], gradient = curved.loss_and_gradient(w)
        image = fast_hessian(curved, w)(w - spread.mean)[None]
        slopes[i], bends[i] = spread.products(torch.cat([gradient[None], image])).T.cpu().numpy()
        offsets[i] = evaluated.loss(w.to(evaluated.dtype)) - losses[i] if evaluated is not curved else 0.0
        if not all(np.isfinite(part).all() for part in (losses[i], offsets[i], slopes[i], bends[i])):
            raise OperationError(
                f"weights: loss, gradient or product of member {i} is not finite, leave it out"
            )
        progress((i + 1) / n)
    rounding = float(torch.finfo(evaluated.dtype).eps * np.abs(losses).max())
    return Measured(spread.gram.cpu().numpy(), losses, offsets, slopes, bends, rounding)


def _greedy(hull: Hull, losses: Array) -> Array:
    """The coefficients (n,) of the uniform average of the members that are chosen one after another."""
    order = np.argsort(losses, kind="stable")
    best: Array = np.eye(len(order))[order[0]]
    lowest = losses[order[0]]
    for j in order[1:]:
        trial = ((best > 0) | (np.arange(len(order)) == j)).astype(np.float64)
        trial /= trial.sum()
        found = hull(trial[None])
        if found.loss[0] < lowest and found.high[0] < trial @ losses:
            best, lowest = trial, found.loss[0]
    return best
