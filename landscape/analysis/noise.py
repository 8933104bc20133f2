"""Δ(2), the noise that the spread of the learners adds, four ways (DPSGD-2020, Eq. 4)."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.options import choose, positive
from landscape.curvature.hessian import HessianOperator, check_deterministic
from landscape.evaluation.paths import Progress
from landscape.evaluation.stack import Stack
from landscape.problem.batchnorm import has_batchnorm, with_policy
from landscape.problem.layout import average
from landscape.problem.problem import RANDOMNESS, Problem
from landscape.results.base import Provenance
from landscape.results.noise import NoiseEstimate

# Draws give each standard error to about 13%, 1/√(2·31) (ours; DESIGN's default).
DRAWS = 32


def estimate_noise(
    problem: Problem,
    weights: Tensor,
    lr: float,
    local_batch: int,
    *,
    draws: int = DRAWS,
    randomness: str = "refuse",
    seed: int = 0,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> NoiseEstimate:
    """The four Δ(2) numbers of learners at ``weights`` (n, P) on the data of ``problem`` (the training set).

    ``randomness`` as in :class:`landscape.HessianOperator`: with "seed" a model that is random in eval mode
    draws the same numbers for all learners and for their mean, so that δ is of the weights alone. ``about``
    as in :func:`landscape.contour`. BatchNorm takes each minibatch's own statistics, as in training, and the
    whole set comes in minibatches of that size, a smaller last one left out.

    Raises InputError for fewer than 2 learners or draws, a batch below 1, data that cannot be indexed, or a
    model that is random in eval mode.
    """
    choose("randomness", randomness, RANDOMNESS)
    positive("learners", len(weights), least=2)
    positive("draws", draws, least=2)
    positive("local_batch", local_batch, least=1)
    positive("lr", lr)
    if problem.regularised:
        raise InputError("penalty: Δ(2) is of the data's minibatches, leave out penalty and weight_decay")
    problem.gather(torch.zeros(1, dtype=torch.long))  # refuses data that cannot be indexed, before the work
    if has_batchnorm(problem.model):
        batch = min(local_batch, problem.samples)
        whole = problem.samples // batch * batch
        problem = with_policy(problem.subset(slice(whole)), "train", batch)
    weights = weights.to(problem.device, problem.dtype)
    n = len(weights)
    mean = average(weights)
    spread = weights - mean
    at_mean = mean.expand_as(weights)
    if randomness == "refuse":
        check_deterministic(problem, mean)
    seeded = randomness == "seed"
    generator = torch.Generator().manual_seed(seed)
    gradient = problem.gradient(mean, seeded=seeded).double()

    def perpendicular(v: Tensor) -> Tensor:
        return v - (v @ gradient) / (gradient @ gradient) * gradient

    rows = []
    stack, own, shared = (
        Stack(problem, seed=0 if seeded else None),
        torch.empty_like(weights),
        torch.empty_like(weights),
    )
    for k in range(draws):
        indices = torch.randint(problem.samples, (n, local_batch), generator=generator)
        x, y = problem.gather(indices)
        stack.gradients(weights, x, y, out=own)
        stack.gradients(at_mean, x, y, out=shared)
        delta = (own - shared).mean(0, dtype=torch.float64)
        products = [
            HessianOperator(problem.subset(i), mean, randomness=randomness)(d)
            for i, d in zip(indices, spread, strict=True)
        ]
        first = torch.stack(products).mean(0, dtype=torch.float64)
        p_delta, p_s = perpendicular(delta), perpendicular(shared.mean(0, dtype=torch.float64))
        rows.append([delta @ delta, first @ first, p_s @ p_s, p_delta @ p_delta, 2 * p_s @ p_delta])
        if progress:
            progress((k + 1) / draws)
    table = lr**2 * torch.tensor(rows, dtype=torch.float64).numpy()
    each = torch.stack([problem.gradient(w, seeded=seeded) for w in weights])
    full = each.mean(0, dtype=torch.float64) - gradient
    operator = HessianOperator(problem, mean, randomness=randomness)
    eq4 = sum(float(operator(d).double().square().sum()) for d in spread) / n**2
    return NoiseEstimate(
        direct=table[:, 0],
        first_order=table[:, 1],
        delta_s=table[:, 2],
        delta_2=table[:, 3],
        delta_cross=table[:, 4],
        full_batch=lr**2 * float(full @ full),
        eq4=lr**2 * eq4,
        consensus=float(spread.double().square().sum()) / n,
        lr=lr,
        learners=n,
        local_batch=local_batch,
        samples=problem.samples,
        seed=seed,
        **about,
    )
