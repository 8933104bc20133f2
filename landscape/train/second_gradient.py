"""A second minibatch gradient of one learner, from which the noise of the first is known."""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.evaluation.stack import Stack, Training
from landscape.train.minibatches import Minibatches
from landscape.train.randomness import generator
from landscape.train.recipe import Recipe

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

    def __init__(self, recipe: Recipe, stack: Stack, minibatches: Minibatches) -> None:
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
