"""The preconditioner in the state of an optimizer: of a run as it goes, and of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint, check_learner
from landscape.core.errors import InputError, OperationError
from landscape.core.options import expect
from landscape.curvature.hessian import Preconditioner
from landscape.gradients.minibatches import Minibatches, stream
from landscape.problem.problem import Problem
from landscape.training import optimizer as optimizers
from landscape.training.optimizer.base import Optimizer
from landscape.training.recipes.recipe import Recipe, recipe_of


def preconditioner(
    run: Checkpoint, problem: Problem, learner: str | int = "mean", *, seed: int = 0
) -> Preconditioner:
    """The diagonal P with which Adam, AdamW, RMSprop, LARS or LAMB makes its next step, and its limit.

    For Adam P = (√v̂ + ε)(1 − β₁ᵗ), v̂ the second moment corrected for its bias, as in Cohen et al. 2022
    (arXiv:2207.14484); for LAMB that times ‖s‖/‖w‖ and for LARS (‖g‖ + λ‖w‖)/(trust ‖w‖), by parameter tensor
    (ours). The limit on ηλ_max(P^{-1/2} H P^{-1/2}) is that of the update rule with the optimizer's momentum,
    P being fixed and common to all learners: 2(1 + β₁)/(1 − β₁) = 38 for SSGD with Adam's β₁ = 0.9. A weight
    decay in the recipe is left out.

    Args:
        run: a checkpoint of ``landscape train``.
        problem: its problem; LARS takes gradients of it, on minibatches of the run's size.
        learner: "mean": the state averaged over the learners (ours; with SSGD all are equal), at w_a; or a
            learner's number, with its own state and weights.
        seed: draws these minibatches.

    Returns:
        P with the optimizer's learning rate and limit.

    Raises:
        InputError: another optimizer, or a learner that does not exist.
        OperationError: a checkpoint that ``landscape train`` did not make, or of step 0.

    Example:
        >>> import torch, landscape
        >>> landscape.Preconditioner(torch.tensor([1.0, 4.0]), name="torch:Adam", lr=0.1, limit=38.0).lr
        0.1
    """
    expect("run", run, Checkpoint)
    if not run.has_recipe:
        raise OperationError(
            f"{run.path or 'run'}: no run of landscape train; give a landscape.Preconditioner"
        )
    made = StatePreconditioner(recipe_of(run), problem, "precondition")
    if run.step < 1:
        raise OperationError(f"{run.path or 'run'}: of step 0, the optimizer has no state yet")
    check_learner(learner, run.learners)
    if isinstance(learner, int):
        weights = run.weights[learner]
        state = {key: rows[learner : learner + 1] for key, rows in run.optimizer.items()}
    else:  # counters are equal, and may be whole numbers
        weights, same = run.mean, made.counters
        state = {k: t[:1] if k in same else t.mean(0, keepdim=True) for k, t in run.optimizer.items()}
    return made.at(weights.to(problem.weights), state, run.step, run.lr, stream(seed, 0))


# Minibatches over which LARS's preconditioner, which depends on the gradient's norm, is averaged (ours).
DRAWS = 8


class StatePreconditioner:
    """P and its limit, as :func:`landscape.preconditioner` describes them, from states of the optimizer.

    Args:
        recipe: of the run.
        problem: its problem; LARS takes gradients of it, on minibatches of the run's size.
        where: what asks for P, for the message.

    Raises:
        InputError: for an optimizer without a diagonal preconditioner.
    """

    def __init__(self, recipe: Recipe, problem: Problem, where: str) -> None:
        self._recipe, self._problem = recipe, problem
        self.name, options = recipe.part("optimizer")
        self._optimizer: Optimizer = optimizers.make(self.name, options)
        momentum = self._optimizer.preconditioned
        if momentum is None:
            raise InputError(
                f"{where}: the optimizer '{self.name}' has no preconditioner (allowed: adam, adamw, rmsprop, "
                "lars, lamb)"
            )
        m, form, factor = momentum
        limit = recipe.rule().stability_limit(m, form)
        self.limit = math.nan if limit is None else limit / factor

    @property
    def counters(self) -> frozenset[str]:
        """The parts of a state that count steps: equal for all learners, and not to be averaged."""
        return self._optimizer.counters

    def at(
        self, weights: Tensor, state: Mapping[str, Tensor], step: int, lr: float, draws: torch.Generator
    ) -> Preconditioner:
        """P after ``step`` steps.

        Args:
            weights: θ (P,).
            state: name -> (1, …).
            step: counted from 1.
            lr: η.
            draws: for LARS's minibatches.
        """
        self._optimizer.start(self._problem.layout, weights[None])
        self._optimizer.restore(state)
        gradients = (
            self._gradients(weights, draws)
            if self._optimizer.gradient_scaled
            else torch.zeros_like(weights)[None]
        )
        diagonals = [self._optimizer.preconditioner(weights[None], g[None], step) for g in gradients]
        known = torch.cat([d for d in diagonals if d is not None])
        return Preconditioner(known.mean(0), name=self.name, lr=lr, limit=self.limit)

    def _gradients(self, weights: Tensor, draws: torch.Generator) -> Tensor:
        """(DRAWS, P), gradients of the minibatches that one state of the optimizer sees."""
        recipe = self._recipe
        size = recipe.local_batch * (recipe.learners if recipe.rule().synchronous else 1)
        drawn = zip(range(DRAWS), Minibatches(self._problem, size, draws), strict=False)
        return torch.stack([part.gradient(weights) for _, (part,) in drawn])
