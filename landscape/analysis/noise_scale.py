"""The gradient noise scale (McCandlish et al. 2018), from draws and from the learners' gradients."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from landscape.core.errors import FailedError, InputError
from landscape.core.memory import bounded
from landscape.core.options import choose, expect
from landscape.core.progress import Progress
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.minibatches import (
    LEAST,
    MOST,
    TOL,
    AroundWhole,
    Estimator,
    Jackknife,
    Learners,
    Minibatches,
    Precision,
    Scale,
    learners_of,
    stream,
)
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.noise import NoiseScale

GRADIENTS = ("whole", "draws")


@bounded(needs.noise_scale)
def noise_scale(
    problem: Problem,
    batch: int,
    *,
    weights: Tensor | None = None,
    local_batch: int | None = None,
    gradient: str = "whole",
    tol: float = TOL,
    draws: int = LEAST,
    max_draws: int = MOST,
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> NoiseScale:
    """B_simple = tr Σ/‖g‖²: the batch at which noise and gradient are equal in size.

    Below it a larger batch saves nearly as many steps as it costs samples; far above it saves none
    (McCandlish et al. 2018, arXiv:1812.06162). Σ is the covariance of one sample's gradient and g that of the
    loss at w_a; tr Σ is B E‖g_B − g‖² for minibatches drawn with replacement. BatchNorm takes each
    minibatch's statistics, as in training, so that B_simple then depends on B a little, as it does where
    samples weigh unequally. Other layers, such as dropout, are in eval mode: their noise is left out.

    Args:
        problem: the loss, on the training set, centred on w_a.
        batch: B, samples of a minibatch at w_a. Without BatchNorm the result does not depend on it, and
            small ones are cheaper.
        weights: (n, P), where n ≥ 2 learners take their gradients (SSGD's all at w_a): B_simple of their mean
            gradient, too, and what the n gradients of single steps show of it, as training sees them at no
            cost.
        local_batch: samples of a learner's minibatch; default: batch / n.
        gradient: "whole": g from all data, one pass; "draws": ‖g‖² from pairs of minibatches, without a pass,
            which is the less exact the smaller ‖g‖² is.
        tol: draw until the standard error is at most this share of the value.
        draws, max_draws: at least and at most so many draws, of one gradient, or one for each learner.
        seed: draws the minibatches.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        B_simple in samples with its standard error, tr Σ and ‖g‖² with theirs, at w_a and from the learners.

    Raises:
        InputError: a batch, tol or number of draws that is not allowed, or weights of another shape or of
            one learner.
        FailedError: gradients that are not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.tensor([[1.0], [1.0]]), torch.tensor([[-2.0], [0.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> problem = landscape.Problem(model, torch.nn.MSELoss(), (x, y), theta=torch.zeros(1))
        >>> result = landscape.noise_scale(problem, 1)  # gradients 4 and 0
        >>> result.trace, result.norm2, result.value
        (4.0, 4.0, 1.0)
    """
    choose("gradient", gradient, GRADIENTS)
    expect("problem", problem, Problem)
    precision = Precision(tol, draws, max_draws)
    thetas, local = learners_of(problem, batch, weights, local_batch)
    if thetas is not None and len(thetas) < 2:
        raise InputError("weights: those of 1 learner are not allowed, at least 2 are needed")
    at_mean = Minibatches(problem, batch, stream(seed, 0))
    parts = 1 + (thetas is not None)

    def share(part: int) -> Progress:
        return lambda done: progress((part + done) / parts) if progress else None

    estimator: Estimator
    if gradient == "whole":
        estimator = AroundWhole(_finite(at_mean.whole.gradient()), batch)
    else:
        estimator = Jackknife(problem.theta, batch)
    mean = _drawn(at_mean, problem.theta[None], estimator, precision, share(0))
    measured, of_learners = [mean], dict[str, Any]()
    if thetas is not None:
        own = Minibatches(problem, local, stream(seed, 1), len(thetas))
        own_gradients = Learners(problem.theta, len(thetas), local)
        measured.append(_drawn(own, thetas, own_gradients, precision, share(1)))
        of_learners = {f"learner_{name}": value for name, value in vars(measured[1]).items()}
        of_learners |= own_gradients.rounds()
        of_learners |= {"learners": len(thetas), "local_batch": local, "learner_draws": own_gradients.draws}
    return NoiseScale(
        **vars(mean),
        **of_learners,
        batch=batch,
        draws=estimator.draws,
        gradient=gradient,
        tol=tol,
        converged=all(precision.met(each.value, each.standard_error) for each in measured),
        seed=seed,
        **setting(at_mean.whole),
        **about,
    )


def _drawn(
    minibatches: Minibatches, thetas: Tensor, estimator: Estimator, precision: Precision, progress: Progress
) -> Scale:
    """The noise scale from gradients at ``thetas`` (n, P), until it is as exact as asked for."""
    for drawn in minibatches:
        rows = [p.gradient(t) for p, t in zip(drawn, thetas, strict=True)]
        estimator.add(_finite(torch.stack(rows)))
        if estimator.draws < precision.least:
            progress(precision.share(estimator.draws, 0.0, math.inf))
            continue
        scale = estimator.scale()
        progress(precision.share(estimator.draws, scale.value, scale.standard_error))
        if precision.enough(estimator.draws, scale.value, scale.standard_error):
            break
    progress(1.0)
    return scale


def _finite(gradients: Tensor) -> Tensor:
    if not bool(torch.isfinite(gradients).all()):
        raise FailedError("weights: the gradient is not finite at these weights")
    return gradients
