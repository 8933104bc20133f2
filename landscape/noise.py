"""Δ(2), the noise that the spread of the learners adds, four ways (DPSGD-2020, Eq. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.batchnorm import has_batchnorm, with_policy
from landscape.evaluate import Progress
from landscape.hessian import HessianOperator, check_deterministic
from landscape.options import InputError, choose, positive
from landscape.problem import RANDOMNESS, Problem
from landscape.stack import Stack
from landscape.store import About, Array, Result
from landscape.vector import average

# Draws give each standard error to about 13%, 1/√(2·31) (ours; DESIGN's default).
DRAWS = 32


@dataclass(frozen=True)
class NoiseEstimate(Result):
    """Δ(2) at one checkpoint, with learners w_j = w_a + Δw_j, learning rate α and local batch B.

    One value for each of ``draws`` draws of n minibatches of B samples (with replacement):

    - ``direct`` α²‖δ‖², δ = n⁻¹ Σ_j [∇L^{μ_j}(w_j) − ∇L^{μ_j}(w_a)]: the definition;
    - ``first_order`` α²‖n⁻¹ Σ_j H_{μ_j} Δw_j‖², its first-order expansion, minibatch Hessians at w_a;
    - ``delta_s`` α²‖P⊥g_S‖², ``delta_2`` α²‖P⊥δ‖², ``delta_cross`` 2α²⟨P⊥g_S, P⊥δ⟩, which add up to Δ_DP.

    And without draws, exact on the whole data set:

    - ``full_batch`` the definition with ∇L in place of ∇L^{μ_j}: what is left of higher order;
    - ``eq4`` α² n⁻² Σ_j ‖HΔw_j‖², the Hessian form that the paper prints.
    """

    schema: ClassVar[str] = "landscape.noise"
    shapes: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("direct", "first_order", "delta_s", "delta_2", "delta_cross"), "draws+"
    )

    direct: Array
    first_order: Array
    delta_s: Array
    delta_2: Array
    delta_cross: Array
    full_batch: float
    eq4: float
    consensus: float
    lr: float
    learners: int
    local_batch: int
    samples: int
    seed: int
    split: str = ""
    label: str = ""
    source: str = ""
    source_sha256: str = ""

    def summary(self) -> dict[str, tuple[float, float]]:
        """Name -> (mean, standard error over the draws; 0 for what is exact)."""
        rows = {}
        for name in ("direct", "full_batch", "eq4", "first_order", "delta_s", "delta_2", "delta_cross"):
            value = np.atleast_1d(getattr(self, name))
            error = value.std(ddof=1) / np.sqrt(len(value)) if len(value) > 1 else 0.0
            rows[name] = (float(value.mean()), float(error))
        return rows


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
    **about: Unpack[About],
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
