"""The minibatches of a run, from its seed and the step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from landscape.problem.problem import Problem
from landscape.train.randomness import generator
from landscape.train.recipe import Recipe


class Minibatches:
    """Draws from the training set as :class:`.Recipe` says (``sampling``, ``seed``).

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
