"""Δ(2), the noise that the spread of the learners adds, four ways (DPSGD-2020, Eq. 4)."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.memory import bounded
from landscape.core.options import expect, positive
from landscape.core.progress import Progress
from landscape.core.registry import numerics
from landscape.curvature.hessian import HessianOperator
from landscape.evaluation import needs
from landscape.gradients.learners import Stack
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.layout import average
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.noise import NoiseEstimate

# Draws give each standard error to about 13%, 1/√(2·31) (ours; DESIGN's default).
DRAWS = 32


@numerics(1)
@bounded(needs.estimate_noise)
def estimate_noise(
    problem: Problem,
    weights: Tensor,
    lr: float,
    local_batch: int,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    max_memory: int | None = None,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> NoiseEstimate:
    """Four estimates of Δ(2), the noise that the spread of the learners adds to the gradient.

    With δ the mean over learners of ∇L^μ(w_j) − ∇L^μ(w_a): the definition α²‖δ‖² over drawn minibatches, the
    same with the whole data, Eq. 4 of DPSGD-2020 with the Hessian, and the first-order expansion with the
    minibatches' Hessians. BatchNorm takes each minibatch's statistics, as in training; the whole data then
    comes in minibatches of that size, without a smaller last one.

    Args:
        problem: the loss on the training set.
        weights: (n, P), the learners' weights.
        lr: α, the learning rate.
        local_batch: B, samples a learner in a minibatch.
        draws: how many times the minibatches are drawn; 32 give each standard error to about 13%.
        seed: draws the minibatches.
        max_memory: bytes that the process may take, at most.
        progress: called with the share of the draws done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        direct, first_order, delta_s, delta_2 and delta_cross (draws,), full_batch and eq4, in units of the
        squared step.

    Raises:
        InputError: fewer than 2 learners or draws, a batch below 1, data without numbered samples, or a
            penalty.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> weights = problem.theta + 0.1 * torch.randn(4, 8)
        >>> landscape.estimate_noise(problem, weights, lr=0.1, local_batch=5, draws=3).direct.shape
        (3,)
    """
    positive("learners", len(weights), least=2)
    expect("problem", problem, Problem)
    positive("draws", draws, least=2)
    positive("local_batch", local_batch, least=1)
    positive("lr", lr)
    positive("seed", seed, least=0)
    if problem.regularised:
        raise InputError("penalty: Δ(2) is of the data's minibatches, leave out penalty and weight_decay")
    problem.data.gather(torch.zeros(1, dtype=torch.long))  # refuses data without numbered samples at once
    if has_batchnorm(problem.model):
        batch = min(local_batch, problem.data.samples)
        whole = problem.data.samples // batch * batch
        problem = problem.subset(slice(whole)).with_batchnorm("train", batch)
    weights = weights.to(problem.device, problem.dtype)
    n, mean = len(weights), average(weights)
    gradient = problem.gradient(mean).double()
    rows, drawn = [], _Draws(problem, weights, mean, gradient)
    positive("seed", seed, least=0)
    generator = torch.Generator().manual_seed(seed)
    for k in range(draws):
        indices = torch.randint(problem.data.samples, (n, local_batch), generator=generator)
        rows.append(drawn.terms(indices))
        if progress:
            progress((k + 1) / draws)
    table = lr**2 * torch.tensor(rows, dtype=torch.float64).numpy()
    spread = weights - mean
    each = torch.stack([problem.gradient(w) for w in weights])
    full = each.mean(0, dtype=torch.float64) - gradient
    operator = HessianOperator(problem, mean)
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
        samples=problem.data.samples,
        seed=seed,
        **about,
    )


class _Draws:
    """The terms of Δ(2) on drawn minibatches; ``gradient`` (P,) is that of all data at the mean."""

    def __init__(self, problem: Problem, weights: Tensor, mean: Tensor, gradient: Tensor) -> None:
        self.problem, self.weights, self.mean, self.gradient = problem, weights, mean, gradient
        self.stack = Stack(problem)
        self.at_learners, self.at_mean = torch.empty_like(weights), torch.empty_like(weights)

    def terms(self, indices: Tensor) -> list[Tensor]:
        """direct, first order, Δ_S, Δ(2) and cross term over lr², on the samples ``indices`` (n, B)."""
        x, y = self.problem.data.gather(indices)
        self.stack.gradients(self.weights, x, y, out=self.at_learners)
        self.stack.gradients(self.mean.expand_as(self.weights), x, y, out=self.at_mean)
        delta = (self.at_learners - self.at_mean).mean(0, dtype=torch.float64)
        products = [
            HessianOperator(self.problem.subset(i), self.mean)(d)
            for i, d in zip(indices, self.weights - self.mean, strict=True)
        ]
        first = torch.stack(products).mean(0, dtype=torch.float64)
        p_delta = self._perpendicular(delta)
        p_s = self._perpendicular(self.at_mean.mean(0, dtype=torch.float64))
        return [delta @ delta, first @ first, p_s @ p_s, p_delta @ p_delta, 2 * p_s @ p_delta]

    def _perpendicular(self, v: Tensor) -> Tensor:
        """The part of ``v`` (P,) orthogonal to the gradient."""
        return v - (v @ self.gradient) / (self.gradient @ self.gradient) * self.gradient
