"""The initial weights of all learners: new ones, or those of another run's checkpoint."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.network import set_tensors
from landscape.core import hdf5
from landscape.core.errors import FailedError
from landscape.data.base import Dataset
from landscape.train.randomness import generator
from landscape.train.recipe import Recipe


def read(recipe: Recipe) -> tuple[Recipe, Checkpoint | None]:
    """``recipe`` with the SHA-256 of its ``init.checkpoint``, and that file; None where it names none.

    Raises FailedError where the file cannot be read, or is not the one whose SHA-256 the recipe has.
    """
    path, expected = recipe.init.checkpoint, recipe.init.sha256
    if not path:
        return recipe, None
    start, digest = Checkpoint.load(path), hdf5.sha256(path)
    if expected and digest != expected:
        raise FailedError(
            f"init.checkpoint: {path} has SHA-256 {digest[:12]}…, the recipe's init.sha256 is "
            f"{expected[:12]}…"
        )
    return dataclasses.replace(recipe, init=dataclasses.replace(recipe.init, sha256=digest)), start


def network(recipe: Recipe, data: Dataset | user_code.UserData, start: Checkpoint | None) -> nn.Module:
    """The recipe's model at w_a of ``start``, with the BatchNorm statistics of w_a; new where that is None.

    Raises FailedError where the weights of ``start`` are not finite or do not fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(recipe.seed, "init").initial_seed())
        model = user_code.build_model("model", recipe.spec("model"))
    if start is None:
        return model
    problem = start.problem("train", model=model, data=data, dtype=getattr(torch, recipe.dtype))
    set_tensors(problem.model, problem.layout.views(problem.theta))
    return problem.model
