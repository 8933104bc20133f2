"""The preconditioner that a recipe's optimizer has with a given state."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.curvature.preconditioner import Preconditioner
from landscape.evaluation.minibatches import Minibatches
from landscape.problem.problem import Problem
from landscape.train import optimizer as optimizers
from landscape.train.optimizer.base import Optimizer
from landscape.train.recipes.recipe import Recipe

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
                f"{where}: the optimizer '{self.name}' has no diagonal preconditioner (allowed: adam, "
                "adamw, rmsprop, lars, lamb)"
            )
        m, form, factor = momentum
        limit = recipe.rule().stability_limit(m, form)
        self.limit = math.nan if limit is None else limit / factor

    @property
    def counters(self) -> frozenset[str]:
        """The parts of a state that count steps: equal for all learners, and not to be averaged."""
        return self._optimizer.counters

    def at(
        self, theta: Tensor, state: Mapping[str, Tensor], step: int, lr: float, draws: torch.Generator
    ) -> Preconditioner:
        """P after ``step`` steps.

        Args:
            theta: θ (P,).
            state: name -> (1, …).
            step: counted from 1.
            lr: η.
            draws: for LARS's minibatches.
        """
        self._optimizer.start(self._problem.layout, theta[None])
        self._optimizer.restore(state)
        gradients = self._gradients(theta, draws) if self.name == "lars" else torch.zeros_like(theta)[None]
        diagonals = [self._optimizer.preconditioner(theta[None], g[None], step) for g in gradients]
        known = torch.cat([d for d in diagonals if d is not None])
        return Preconditioner(known.mean(0), name=self.name, lr=lr, limit=self.limit)

    def _gradients(self, theta: Tensor, draws: torch.Generator) -> Tensor:
        """(DRAWS, P), gradients of the minibatches that one state of the optimizer sees."""
        recipe = self._recipe
        size = recipe.local_batch * (recipe.learners if recipe.rule().synchronous else 1)
        drawn = zip(range(DRAWS), Minibatches(self._problem, size, draws), strict=False)
        return torch.stack([part.gradient(theta) for _, (part,) in drawn])
