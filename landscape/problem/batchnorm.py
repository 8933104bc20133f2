"""Whose statistics BatchNorm uses at weights other than those it was trained to.

A BatchNorm layer in eval mode divides by the statistics in its buffers. They belong to the centre's weights:
at displaced weights the activations have others, and part of what a surface shows is that mismatch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from landscape.core.options import choose, positive
from landscape.problem.batches import count_samples
from landscape.problem.problem import Problem

POLICIES = ("center", "recalibrate", "train")
# Samples that statistics come from, and how many go through the network at once while they are re-estimated:
# ours; a statistic over 1,000 samples has a standard error of 3%, in batches of a common training size.
SAMPLES = 1000
BATCH = 250


def _layers(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm layers of ``model`` that keep running statistics."""
    found = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [m for m in found if m.running_mean is not None]


def buffer_names(model: nn.Module) -> list[str]:
    """The names of what BatchNorm layers in ``model`` keep: running statistics, and counts of batches."""
    return [
        f"{name}.{key}" if name else key
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        for key in dict(layer.named_buffers(recurse=False))
    ]


def has_batchnorm(model: nn.Module) -> bool:
    """Whether ``model`` has a BatchNorm layer."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def with_policy(problem: Problem, bn: str, samples: int = SAMPLES) -> Problem:
    """``problem`` with the BatchNorm statistics of policy ``bn``; its own model and buffers stay as they are.

    Args:
        bn: "center": the statistics in the model's buffers, at every point (the problem itself is returned);
            "recalibrate": re-estimated at each point before it is evaluated, on a fixed random sample of the
            problem's data, as the average over batches of 250 (what torch.optim.swa_utils.update_bn does);
            derivatives at a point hold the statistics of that point fixed;
            "train": the statistics of the batch itself, as in training, in batches of ``samples`` (for data
            given as batches, in those), so that a sample's loss depends on its batch.
        samples: how many samples "recalibrate" draws (at most all; of data given as batches, the first
            until there are so many), or "train" has in a batch. Default 1,000.

    Dropout and all other layers stay in eval mode. A model without BatchNorm is returned as it is.
    Raises InputError for an unknown policy or samples < 2.
    """
    choose("bn", bn, POLICIES)
    positive("bn_samples", samples, least=2)
    if bn == "center" or not _layers(problem.model):
        return problem
    if bn == "recalibrate":
        return _recalibrated(problem, samples)
    own = problem.in_chunks(samples)
    own.model = copy.deepcopy(problem.model)
    own.bn = bn
    own.bn_samples = samples if problem.resident is not None else 0  # else the data's own batches
    # Without buffers a layer takes its batch's statistics, in eval mode, too.
    for layer in _layers(own.model):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return own


def _recalibrated(problem: Problem, samples: int) -> Problem:
    """``problem`` with statistics estimated at the weights asked for, from one sample of its inputs."""
    inputs = list(_sample(problem, samples))
    estimator = copy.copy(problem)
    estimator.model = copy.deepcopy(problem.model)
    names = buffer_names(problem.model)

    def statistics(theta: Tensor) -> dict[str, Tensor]:
        _estimate(estimator, theta, inputs)
        found = dict(estimator.model.named_buffers())
        return {name: found[name].clone() for name in names}

    own = copy.copy(problem)
    own.bn = "recalibrate"
    own.bn_samples = sum(count_samples(x, None, alike=False) for x in inputs)
    own.buffers_at = statistics
    return own


@torch.no_grad()
def _estimate(problem: Problem, theta: Tensor, inputs: Iterable[Any]) -> None:
    """Set the statistics in the problem's own model to those of ``inputs``, batch by batch, at ``theta``."""
    layers = _layers(problem.model)
    for layer in layers:
        layer.momentum = None  # a plain average over the batches, in place of an exponential one
        layer.reset_running_stats()
        layer.train()
    for x in inputs:
        problem.outputs(theta, x)
    for layer in layers:
        layer.eval()


def reestimated(
    problem: Problem, theta: Tensor | None = None, inputs: Iterable[Any] | None = None
) -> dict[str, Tensor]:
    """Buffer name -> statistics that BatchNorm has at ``theta``, default the centre; empty without BatchNorm.

    They are those of ``inputs``, batches of inputs; default: of all data, in batches of 250 or as it comes.
    As in torch.optim.swa_utils.update_bn they are an average over batches; but layers other than BatchNorm
    stay in eval mode.
    """
    if not _layers(problem.model):
        return {}
    own = copy.copy(problem)
    own.model = copy.deepcopy(problem.model)
    theta = own.theta if theta is None else theta
    _estimate(own, theta, _sample(own, own.samples) if inputs is None else inputs)
    found = dict(own.model.named_buffers())
    return {name: found[name] for name in buffer_names(own.model)}


def sample_parts(problem: Problem, samples: int) -> tuple[Tensor, ...]:
    """The numbers of ``samples`` samples (at most all), a fixed random choice, in even batches."""
    order = torch.randperm(problem.samples, generator=torch.Generator().manual_seed(0))[:samples]
    return order.tensor_split(-(-len(order) // BATCH))


def _sample(problem: Problem, samples: int) -> Iterator[Any]:
    """Inputs of :func:`sample_parts`, or, of data without numbered samples, of its own first batches."""
    if not problem.indexed:
        seen = 0
        for x, y, _ in problem.chunks():
            yield x
            seen += count_samples(x, y, alike=False)
            if seen >= samples:
                return
        return
    for part in sample_parts(problem, samples):
        yield problem.gather(part)[0]
