"""The preconditioner in the optimizer's state of a checkpoint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import FailedError, InputError
from landscape.curvature.preconditioner import Preconditioner
from landscape.evaluation.minibatches import Minibatches, stream
from landscape.problem.problem import Problem
from landscape.train import optimizer as optimizers
from landscape.train.loop import recipe_of
from landscape.train.recipe import Recipe

# Minibatches over which LARS's preconditioner, which depends on the gradient's norm, is averaged (ours).
DRAWS = 8


def preconditioner(
    checkpoint: Checkpoint, problem: Problem, learner: str | int = "mean", *, seed: int = 0
) -> Preconditioner:
    """The diagonal P with which Adam, AdamW, RMSprop, LARS or LAMB makes its next step, and its limit.

    For Adam P = (√v̂ + ε)(1 − β₁ᵗ), v̂ the second moment corrected for its bias, as in Cohen et al. 2022
    (arXiv:2207.14484); for LAMB that times ‖s‖/‖w‖ and for LARS (‖g‖ + λ‖w‖)/(trust ‖w‖), by parameter tensor
    (ours). The limit on ηλ_max(P^{-1/2} H P^{-1/2}) is that of the update rule with the optimizer's momentum,
    P being fixed and common to all learners: 2(1 + β₁)/(1 − β₁) = 38 for SSGD with Adam's β₁ = 0.9. A weight
    decay in the recipe is left out.

    Args:
        checkpoint: of a run of ``landscape train``.
        problem: its problem; LARS takes gradients of it, on minibatches of the run's size.
        learner: "mean": the state averaged over the learners (ours; with SSGD all are equal), at w_a; or a
            learner's number, with its own state and weights.
        seed: draws these minibatches.

    Returns:
        P with the optimizer's learning rate and limit.

    Raises:
        InputError: another optimizer, or a learner that does not exist.
        FailedError: a checkpoint that ``landscape train`` did not make, or of step 0.

    Example:
        >>> import landscape
        >>> landscape.Preconditioner(torch.tensor([1.0, 4.0]), name="torch:Adam", lr=0.1, limit=38.0).lr
        0.1
    """
    recipe = recipe_of(checkpoint)
    name, options = recipe.part("optimizer")
    made = optimizers.make(name, options)
    momentum = made.preconditioned
    if momentum is None:
        raise InputError(
            f"precondition: the optimizer '{name}' has no diagonal preconditioner (allowed: torch:Adam, "
            "torch:AdamW, torch:RMSprop, lars, lamb)"
        )
    if checkpoint.step < 1:
        raise FailedError(f"{checkpoint.path or 'checkpoint'}: of step 0, the optimizer has no state yet")
    if isinstance(learner, int) and 0 <= learner < checkpoint.learners:
        theta = checkpoint.weights[learner : learner + 1]
        state = {key: rows[learner : learner + 1] for key, rows in checkpoint.optimizer.items()}
    elif learner == "mean":
        theta = checkpoint.mean[None]
        state = {key: _mean(key, rows, made.counters) for key, rows in checkpoint.optimizer.items()}
    else:
        raise InputError(
            f"learner: {learner!r} is not allowed, it must be 'mean' or 0…{checkpoint.learners - 1}"
        )
    theta = theta.to(problem.theta)
    made.start(checkpoint.layout, theta)
    made.restore(state)
    m, form, factor = momentum
    gradients = _gradients(problem, theta[0], recipe, seed) if name == "lars" else torch.zeros_like(theta)
    diagonals = [made.preconditioner(theta, g[None], checkpoint.step) for g in gradients]
    limit = recipe.rule().stability_limit(m, form)
    return Preconditioner(
        torch.cat([d for d in diagonals if d is not None]).mean(0),
        name=name,
        lr=checkpoint.lr,
        limit=math.nan if limit is None else limit / factor,
    )


def _mean(name: str, rows: Tensor, counters: frozenset[str]) -> Tensor:
    """The mean over the learners (1, …); of counters, which are equal, the first row."""
    return rows[:1] if name in counters else rows.mean(0, keepdim=True)


def _gradients(problem: Problem, theta: Tensor, recipe: Recipe, seed: int) -> Tensor:
    """(draws, P), gradients of the minibatches that one state of the optimizer sees."""
    size = recipe.local_batch * (recipe.learners if recipe.rule().synchronous else 1)
    drawn = zip(range(DRAWS), Minibatches(problem, size, stream(seed, 0)), strict=False)
    return torch.stack([part.gradient(theta) for _, (part,) in drawn])
