"""Batch sharpness: the curvature of minibatch losses along their own gradients."""

from __future__ import annotations

import math
from typing import Unpack

import numpy as np
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.core.memory import bounded
from landscape.core.options import expect
from landscape.core.progress import Progress
from landscape.core.registry import numerics
from landscape.core.statistics import mean_and_error
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.curvature.hessian import gradient_curvature
from landscape.curvature.lanczos import TOL as EIGENVALUE_TOL
from landscape.evaluation import needs
from landscape.evaluation.grid import setting
from landscape.gradients.minibatches import LEAST, MOST, TOL, Minibatches, Precision, learners_of, stream
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.curvature import BatchSharpness


@numerics(1)
@bounded(needs.batch_sharpness)
def batch_sharpness(
    problem: Problem,
    batch: int,
    *,
    weights: Tensor | None = None,
    local_batch: int | None = None,
    lr: float = math.nan,
    limit: float | None = None,
    with_lambda_max: bool = True,
    tol: float = TOL,
    draws: int = LEAST,
    max_draws: int = MOST,
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> BatchSharpness:
    """E_B[g_Bᵀ H_B g_B/‖g_B‖²]: the curvature that a minibatch's step meets along itself.

    g_B and H_B are gradient and Hessian of the loss of a minibatch B of ``batch`` samples, drawn with
    replacement. With plain SGD it settles near 2/η where the batch is small (Andreyev and Beneventano 2024,
    arXiv:2412.20553), while λ_max of the whole loss stays below. With ``weights`` it is measured at each
    learner's weights, too, with a minibatch of its own (ours). BatchNorm takes each minibatch's statistics,
    as in training. A problem's penalty and weight decay belong to the loss of every minibatch.

    Args:
        problem: the loss, on the training set, centred on w_a.
        batch: B, samples of a minibatch at w_a: the total batch of a step.
        weights: (n, P), the learners' weights, if they are to be measured.
        local_batch: samples of a learner's minibatch; default: batch / n.
        lr, limit: η and the largest stable ηλ of the update rule, kept with the result.
        with_lambda_max: λ_max at w_a over all data as well, which is most of the work where the data is much
            larger than a minibatch.
        tol: draw until the standard error of the mean is at most this share of it.
        draws, max_draws: at least and at most so many draws. Each takes one gradient and one product over
            ``batch`` samples, or ``local_batch`` for each learner.
        seed: draws the minibatches.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        curvature and norm2 (draws,), learner_curvature and learner_norm2 (learner draws, n), and their means
        with standard errors.

    Raises:
        InputError: a batch, tol or number of draws that is not allowed, or weights of another
            shape.
        FailedError: a minibatch whose gradient is zero or not finite.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([2.0, 2.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.batch_sharpness(problem, 1)  # of single samples, with Hessians of rank one
        >>> round(result.value, 3), round(result.lambda_max, 3)
        (8.0, 4.0)
    """
    precision = Precision(tol, draws, max_draws)
    expect("problem", problem, Problem)
    thetas, local = learners_of(problem, batch, weights, local_batch)
    at_mean = Minibatches(problem, batch, stream(seed, 0))
    parts = 1 + (thetas is not None) + with_lambda_max

    def share(part: int) -> Progress:
        return lambda done: progress((part + done) / parts) if progress else None

    curvature, norm2 = _drawn(at_mean, problem.theta[None], precision, share(0))
    learner_curvature, learner_norm2 = np.zeros((0, 0)), np.zeros((0, 0))
    if thetas is not None:
        own = Minibatches(problem, local, stream(seed, 1), len(thetas))
        learner_curvature, learner_norm2 = _drawn(own, thetas, precision, share(1))
    top, residual = math.nan, math.nan
    if with_lambda_max:
        pairs = top_eigenvalues(at_mean.whole, 1, EIGENVALUE_TOL, seed=seed, progress=share(parts - 1))
        top, residual = float(pairs.values[0]), float(pairs.residuals[0])
    measured = [curvature] if thetas is None else [curvature, learner_curvature]
    return BatchSharpness(
        curvature=curvature[:, 0],
        norm2=norm2[:, 0],
        learner_curvature=learner_curvature,
        learner_norm2=learner_norm2,
        batch=batch,
        local_batch=local if thetas is not None else 0,
        lambda_max=top,
        residual=residual,
        lr=lr,
        limit=math.nan if limit is None else limit,
        tol=tol,
        converged=all(precision.met(*mean_and_error(each.mean(1))) for each in measured),
        seed=seed,
        # The minibatches come from all samples; with BatchNorm λ_max leaves a smaller last minibatch out.
        **(setting(at_mean.whole) | {"samples": problem.samples}),
        **about,
    )


def _drawn(
    minibatches: Minibatches, thetas: Tensor, precision: Precision, progress: Progress
) -> tuple[Array, Array]:
    """Curvature and ‖g‖² (draws, n) at ``thetas`` (n, P), until the mean is as exact as asked for."""
    rows: list[list[tuple[float, float]]] = []
    for drawn in minibatches:
        rows.append([gradient_curvature(p, t) for p, t in zip(drawn, thetas, strict=True)])
        value, error = mean_and_error(np.array(rows)[:, :, 0].mean(1))
        progress(precision.share(len(rows), value, error))
        if precision.enough(len(rows), value, error):
            break
    progress(1.0)
    table = np.array(rows)
    return table[:, :, 0], table[:, :, 1]
