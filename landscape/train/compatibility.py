"""Checks before the first step that the parts of a recipe are compatible."""

from __future__ import annotations

import torch

from landscape.checkpoint.user_code import Spec, UserData
from landscape.core.errors import InputError
from landscape.data.base import Dataset
from landscape.evaluation.stack import Stack
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.problem import Problem
from landscape.train.buffers import Buffers
from landscape.train.decomposition import GROUPS
from landscape.train.recipe import Recipe


def check_compatibility(
    recipe: Recipe,
    model: Spec,
    dataset: Dataset | UserData,
    problems: tuple[Problem, Problem],
    stack: Stack,
    buffers: Buffers,
) -> None:
    """Raise InputError where model, data (``problems``: train, test) and device are not compatible."""
    train, samples = problems[0], recipe.decompose.samples
    if samples % GROUPS:
        raise InputError(f"decompose.samples: {samples} is not allowed, it must be a multiple of {GROUPS}")
    on_gpu = train.device.type == "cuda"
    if recipe.precision == "bfloat16" and on_gpu and not torch.cuda.is_bf16_supported(False):
        raise InputError("precision: 'bfloat16' is not allowed, this GPU does not compute in it; use 'full'")
    micro = recipe.local_batch // recipe.accumulate
    if has_batchnorm(train.model) and 0 < samples < GROUPS * micro:
        raise InputError(
            f"decompose.samples: {samples} is not allowed, BatchNorm needs at least {GROUPS} batches of "
            f"{micro} samples"
        )
    if isinstance(dataset, Dataset):
        first, y = train.gather(torch.zeros(1, dtype=torch.long))
        outputs = train.outputs(train.theta, first)
        needed = (dataset.classes, *y.shape[1:])
        if dataset.classes and outputs.shape[1:] != needed:
            raise InputError(
                f"model: '{model.name}' has outputs of shape {tuple(outputs.shape[1:])}, "
                f"data '{recipe.part('data')[0]}' needs {needed}"
            )
    else:
        train.gather(torch.zeros(1, dtype=torch.long))  # refuses batches, which cannot be drawn from
    if stack.steps is None:
        buffers.check(stack.training_model, micro)
    if recipe.sampling == "all" and recipe.batch != train.samples:
        raise InputError(
            f"sampling: 'all' is not allowed with batch {recipe.batch}, it must be "
            f"{train.samples}, the samples of the training set"
        )
