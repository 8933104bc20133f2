"""Policies for the statistics of BatchNorm at weights other than the trained ones.

A BatchNorm layer in eval mode normalizes by the statistics in its buffers. These are right for the center. At
displaced weights the activations have other statistics, and the mismatch changes the surface.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from landscape.core.options import choose, positive
from landscape.problem.batches import call, count_samples, tree_map
from landscape.problem.data import Data
from landscape.problem.layout import Layout

POLICIES = ("center", "recalibrate", "train")
# Samples for the statistics, and samples per batch in their estimation (our choice: a statistic of 1,000
# samples has a standard error of 3%, and 250 is a common batch size).
SAMPLES = 1000
BATCH = 250


def layers_with_statistics(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the BatchNorm layers of ``model`` with running statistics."""
    layers = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [layer for layer in layers if layer.running_mean is not None]


def buffer_names(model: nn.Module) -> list[str]:
    """Return the names of BatchNorm's buffers in ``model``, each once: statistics, and counts of batches."""
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    return [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in layers]


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether ``model`` has a BatchNorm layer."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@dataclass(frozen=True, eq=False)
class BatchNormPolicy:
    """Fixed statistics: by default those in the model's buffers (policy "center").

    Attributes:
        name: one of POLICIES.
        samples: the number of samples of the statistics; 0: those of the model's buffers, or of each batch.
        buffers: statistics in place of the model's buffers, by their names.
    """

    name: str = "center"
    samples: int = 0
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    #: Whether the statistics depend on the weights, so that they cannot be folded into a convolution.
    varies: ClassVar[bool] = False

    def at(self, weights: Tensor) -> BatchNormPolicy:
        """Return a policy with the statistics at ``weights`` (P,), fixed, for derivatives there."""
        return self

    def to(self, dtype: torch.dtype) -> BatchNormPolicy:
        """Return the policy in another precision."""
        buffers = {k: t.to(dtype) if t.is_floating_point() else t for k, t in self.buffers.items()}
        return replace(self, buffers=buffers)


def without_statistics(model: nn.Module) -> nn.Module:
    """Return a copy without BatchNorm's buffers; in eval mode, its layers use the statistics of the batch."""
    copied = copy.deepcopy(model)
    for layer in layers_with_statistics(copied):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return copied


class Estimator:
    """Estimates the statistics of BatchNorm layers, as torch.optim.swa_utils.update_bn does.

    They are averages over batches. Layers other than BatchNorm stay in eval mode.

    Args:
        model: the model, which is copied.
        layout: the places of its parameters in θ.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._model, self._layout = copy.deepcopy(model), layout
        self._names = buffer_names(model)
        for layer in layers_with_statistics(self._model):
            layer.momentum = None  # a plain average over the batches, in place of an exponential one

    def to(self, dtype: torch.dtype) -> Estimator:
        """Return the estimator in another precision."""
        return Estimator(copy.deepcopy(self._model).to(dtype), self._layout)

    @torch.no_grad()
    def __call__(self, weights: Tensor, inputs: Iterable[Any]) -> dict[str, Tensor]:
        """Return the statistics of batches of inputs at ``weights`` (P,), by name of the buffer."""
        layers = layers_with_statistics(self._model)
        for layer in layers:
            layer.reset_running_stats()
            layer.train()
        for x in inputs:
            call(self._model, self._layout.views(weights), x)
        for layer in layers:
            layer.eval()
        buffers = dict(self._model.named_buffers())
        return {name: buffers[name].clone() for name in self._names}


@dataclass(frozen=True, eq=False)
class Recalibration(BatchNormPolicy):
    """The policy "recalibrate": statistics estimated at each θ, on a fixed sample of the inputs."""

    estimate: Estimator = field(kw_only=True)
    inputs: tuple[Any, ...] = field(kw_only=True)
    varies: ClassVar[bool] = True

    def at(self, weights: Tensor) -> BatchNormPolicy:
        return BatchNormPolicy(self.name, self.samples, self.estimate(weights, self.inputs))

    def to(self, dtype: torch.dtype) -> BatchNormPolicy:
        inputs = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, self.inputs)
        return replace(self, estimate=self.estimate.to(dtype), inputs=inputs)


def policy(bn: str, samples: int, model: nn.Module, layout: Layout, data: Data) -> BatchNormPolicy:
    """Return the policy named ``bn`` for a model and its data; see :meth:`landscape.Problem.with_batchnorm`.

    Raises InputError for an unknown policy or samples < 2.
    """
    choose("bn", bn, POLICIES)
    positive("bn_samples", samples, least=2)
    if bn == "center" or not layers_with_statistics(model):
        return BatchNormPolicy()
    if bn == "train":
        return BatchNormPolicy(bn, samples if data.resident is not None else 0)
    inputs = tuple(sample_inputs(data, samples))
    count = sum(count_samples(x, None) for x in inputs)
    return Recalibration(bn, count, estimate=Estimator(model, layout), inputs=inputs)


def sample_parts(count: int, samples: int) -> tuple[Tensor, ...]:
    """Draw indices of at most ``samples`` of ``count`` samples, and return them in batches of one size."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:samples]
    return order.tensor_split(-(-len(order) // BATCH))


def sample_inputs(data: Data, samples: int) -> Iterator[Any]:
    """Yield batches of inputs: those of :func:`sample_parts`, or the first of data without indices."""
    if data.indexed:
        for indices in sample_parts(data.samples, samples):
            yield data.gather(indices)[0]
        return
    count = 0
    for x, y, _ in data.chunks():
        yield x
        count += count_samples(x, y)
        if count >= samples:
            return
