"""A part of the samples, whose loss is like that of all, for a fraction of the work.

It guides which points are computed with all samples (:mod:`landscape.evaluation.adaptive`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from landscape.problem.metrics import with_sums
from landscape.problem.problem import Problem
from landscape.problem.sharded import on_ranks

# Ours, from the surfaces of benchmarks/surfaces.py: of smaller parts the loss is rougher than that of all.
# LEAST are targets, of which a sequence has many, and FEWEST samples.
SHARE, LEAST, FEWEST = 1 / 20, 64, 8
MOST = 1 / 8  # of the samples: a larger part costs more than it saves


def part_of(problem: Problem) -> Problem | None:
    """The same loss of a twentieth of the samples, stratified by label; None where it would not pay.

    It does not where there are few samples or targets, and has no meaning where the loss mixes samples or
    draws random numbers. Data in batches that have no numbers has none, nor have sharded models, nor
    BatchNorm whose statistics are estimated at each point, which costs as much for a part. It is a function
    of the data and the settings alone.
    """
    if on_ranks(problem) or not problem.separable or problem.batchnorm.varies or not problem.data.indexed:
        return None
    classes = _classes(problem)
    targets = 1 if classes is None else classes[0].numel()
    count = max(FEWEST, math.ceil(LEAST / max(1, targets)), math.ceil(SHARE * problem.samples))
    if count > MOST * problem.samples:
        return None
    part: Problem = with_sums(drawn(problem, count))
    part.check = "off"  # what is compared is compared with all samples
    return part


def drawn(problem: Problem, count: int) -> Problem:
    """The same loss of ``count`` samples, always the same ones, stratified by label where they have one."""
    return problem.subset(_rows(_classes(problem), problem.samples, count))


def _classes(problem: Problem) -> Tensor | None:
    """The classes (N, …) of the samples, if they have any."""
    y = problem.data.resident[1] if problem.data.resident else getattr(problem.data.batches, "labels", None)
    return y.cpu() if isinstance(y, Tensor) and not y.is_floating_point() else None


def _rows(classes: Tensor | None, samples: int, count: int) -> Tensor:
    """The numbers of ``count`` samples, of each class the same share where a sample has one."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    if classes is not None and classes.dim() == 1:
        order = order[classes[order].argsort(stable=True)]
    every = ((torch.arange(count) + 0.5) * (samples / count)).long()
    return order[every].sort().values
