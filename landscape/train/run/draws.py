"""The minibatches of a run, and second gradients, from its seed and the step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from landscape.evaluation.stack import Stack, Training
from landscape.problem.problem import Problem
from landscape.train.recipes.recipe import Recipe
from landscape.train.run.randomness import generator


class Sampler:
    """Draws minibatches from the training set as :class:`.Recipe` says (``sampling``, ``seed``).

    Args:
        recipe: the run's.
        train: the training set, as a problem.
        augment: the data set's random changes of inputs (B, …), given a generator; None for none.
    """

    def __init__(self, recipe: Recipe, train: Problem, augment: Callable[..., Tensor] | None) -> None:
        self._recipe, self._train, self.augment = recipe, train, augment

    def draw(self, step: int, learners: int, local: slice, other: str = "") -> tuple[Any, Any]:
        """(x (n_local, B, …), y (n_local, B, …)) of ``step``, of the ``local`` ones of ``learners``.

        The draws and the augmentation of a learner do not depend on the number of processes. ``other`` names
        a further, independent draw at the same step.
        """
        size, seed, samples = self._recipe.local_batch, self._recipe.seed, self._train.samples
        if self._recipe.sampling == "all":
            drawn = torch.arange(samples).view(-1, size).expand(learners, size)
        else:
            drawn = torch.randint(samples, (learners, size), generator=generator(seed, f"{other}batch", step))
        x, y = self._train.gather(drawn[local])
        if self.augment is not None:
            draws = [generator(seed, f"{other}augment", step, j) for j in range(local.start, local.stop)]
            x = torch.stack([self.augment(rows, draw) for rows, draw in zip(x, draws, strict=True)])
        return x, y


# Before the purposes of the draws of a step, for those of a second gradient.
OTHER = "second "


class SecondGradient:
    """Gradients on further minibatches, of the same size, with augmentation and dropout of their own.

    As in a step BatchNorm takes the minibatch's statistics; the learner's running ones stay as they are.

    Args:
        recipe: of the run.
        stack: computes the gradients of its steps.
        minibatches: those of its steps.
    """

    def __init__(self, recipe: Recipe, stack: Stack, minibatches: Sampler) -> None:
        self._recipe, self._stack, self._minibatches = recipe, stack, minibatches

    def __call__(self, step: int, learner: int, point: Tensor) -> Tensor:
        """(P,), the gradient of ``learner`` at ``point`` (P,), independent of that of its ``step``."""
        recipe = self._recipe
        x, y = self._minibatches.draw(step, recipe.learners, slice(learner, learner + 1), OTHER)

        def seed(_: int, micro: int) -> int:
            return generator(recipe.seed, f"{OTHER}dropout", step, learner, micro).initial_seed()

        out = torch.empty_like(point)[None]
        self._stack.gradients(point[None], x, y, out=out, training=Training({}, seed))
        return out[0]
