"""One loss on other data, with other statistics of BatchNorm, in another precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.problem import batchnorm as bn_policies
from landscape.problem.batchnorm import SAMPLES, BatchNormPolicy
from landscape.problem.data import Data
from landscape.problem.layout import Layout
from landscape.problem.losses import placed_loss

Loss = Callable[[Any, Any], Tensor]
Penalty = Callable[[dict[str, Tensor]], Tensor]


class Variants:
    """What a :class:`landscape.Problem` consists of, and the same with one part replaced.

    Attributes:
        model, criterion, layout: the model, the loss, and the parameters' places in θ.
        theta: the centre (P,).
        data: the samples (:class:`landscape.problem.data.Data`).
        batchnorm: whose statistics BatchNorm uses (:class:`landscape.problem.batchnorm.BatchNormPolicy`).
        draws: how many draws of random numbers the loss is a mean over; 0 where it draws none.
        differentiates: model or loss differentiate themselves (``torch.autograd.grad``), which needs
            gradients to be recorded.
        draws_elsewhere: some of the random numbers are those of NumPy or Python.
        padding: where in θ the padding rows of embeddings lie, which are no directions.
    """

    model: nn.Module
    criterion: Loss
    layout: Layout
    theta: Tensor
    data: Data
    batchnorm: BatchNormPolicy
    batch_bytes: int
    device: torch.device
    dtype: torch.dtype
    penalty: Penalty | None
    weight_decay: float
    draws: int
    differentiates: bool
    draws_elsewhere: bool
    padding: tuple[slice, ...]

    # Names of ``data`` that users ask the problem for.

    @property
    def samples(self) -> int:
        """N, the number of samples."""
        return self.data.samples

    @property
    def terms(self) -> float:
        """The number of terms of the loss's mean that the samples contribute together."""
        return self.data.terms

    @property
    def resident(self) -> tuple[Any, Any] | None:
        """(x, y) on the device, or None where the data comes in batches."""
        return self.data.resident

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """(x, y) if each is one tensor and all samples have the same weight; None otherwise."""
        return self.data.tensors

    @property
    def indexed(self) -> bool:
        """Whether each sample has a number, so that minibatches can be drawn."""
        return self.data.indexed

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of some samples.

        Args:
            indices: numbers of samples, of any shape; repeats are allowed.

        Returns:
            (x, y), the shape of the indices first.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.tensor([0, 1])
            >>> model = torch.nn.Linear(2, 2, bias=False)
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
            >>> problem.gather(torch.tensor([1, 1]))[1].tolist()
            [1, 1]
        """
        return self.data.gather(indices)

    def along_weights(self, directions: Tensor) -> Tensor:
        """Set ``directions`` to zero along the padding rows of embeddings, which training never moves.

        Args:
            directions: (..., P), changed in place.

        Returns:
            ``directions``.

        Example:
            >>> import torch, landscape
            >>> model, x = torch.nn.Embedding(3, 1, padding_idx=0), torch.tensor([1, 2])
            >>> problem = landscape.Problem(model, torch.nn.functional.mse_loss, (x, torch.ones(2, 1)))
            >>> problem.along_weights(torch.ones(3))
            tensor([0., 1., 1.])
        """
        for rows in self.padding:
            directions[..., rows] = 0
        return directions

    # The same loss on other data, with other statistics, in another precision.

    def on(self, data: Data) -> Self:
        """The same loss on other data.

        Args:
            data: the samples.

        Returns:
            A problem that shares everything else with this one.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.tensor([0, 1])
            >>> model = torch.nn.Linear(2, 2, bias=False)
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
            >>> problem.on(problem.data.subset(torch.tensor([0]))).samples
            1
        """
        part = copy.copy(self)
        part.data = data
        return part

    def with_batchnorm(self, bn: str, samples: int = SAMPLES) -> Self:
        """The same with the BatchNorm statistics of policy ``bn``; this problem stays as it is.

        Dropout and all other layers stay in eval mode. A model without BatchNorm is returned as it is.

        Args:
            bn: "center": the statistics in the model's buffers, at every point (returns this problem itself);
                "recalibrate": estimated again at each point before it is evaluated, on a fixed random sample
                of the data, as the average over batches of 250 (as torch.optim.swa_utils.update_bn does);
                derivatives at a point are taken with the statistics of that point, fixed;
                "train": the statistics of the batch itself, as in training, in batches of ``samples`` (for
                data given as batches, in those), so that a sample's loss depends on its batch.
            samples: how many samples "recalibrate" draws (at most all; of data given as batches, the first
                until there are so many), or "train" has in a batch. Default 1,000.

        Returns:
            The problem with these statistics.

        Raises:
            InputError: an unknown policy, or samples < 2.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
            >>> problem.with_batchnorm("recalibrate", 10).batchnorm.samples
            10
        """
        self._check_precision()
        policy = bn_policies.policy(bn, samples, self.model, self.layout, self.data)
        if policy.name == "center":
            return self
        part = self.on(self.data.in_chunks(samples) if bn == "train" else self.data)
        part.batchnorm, part.model = policy, policy.network(self.model)
        return part

    def batchnorm_statistics(
        self, theta: Tensor | None = None, inputs: Iterable[Any] | None = None
    ) -> dict[str, Tensor]:
        """The running statistics of BatchNorm, estimated at some weights.

        Args:
            theta: weights (P,); default: the centre.
            inputs: batches of inputs; default: all of the data, in batches of 250 or as it comes.

        Returns:
            Buffer name -> statistics; empty without BatchNorm.

        Example:
            >>> import torch, landscape
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
            >>> data = (torch.randn(20, 3), torch.randint(2, (20,)))
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, data)
            >>> sorted(problem.batchnorm_statistics())
            ['1.num_batches_tracked', '1.running_mean', '1.running_var']
        """
        if not bn_policies.has_running_statistics(self.model):
            return {}
        inputs = bn_policies.sample_inputs(self.data, self.samples) if inputs is None else inputs
        theta = self.theta if theta is None else theta
        return bn_policies.Estimator(self.model, self.layout)(theta, inputs)

    def _check_precision(self) -> None:
        """InputError under torch.autocast, where numbers would be those of a lower precision."""
        if torch.is_autocast_enabled(self.device.type):
            raise InputError(
                "torch.autocast: the numbers would not be those of the model's own precision; make the call "
                f'outside of it, or under torch.autocast("{self.device.type}", enabled=False)'
            )

    def at(self, theta: Tensor | None = None) -> Self:
        """The same with the BatchNorm statistics at some weights, fixed, for derivatives there.

        Args:
            theta: weights (P,); default: the centre.

        Returns:
            This problem itself where the statistics do not depend on the weights.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.tensor([0, 1])
            >>> model = torch.nn.Linear(2, 2, bias=False)
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
            >>> problem.at() is problem
            True
        """
        self._check_precision()
        policy = self.batchnorm.at(self.theta if theta is None else theta)
        if policy is self.batchnorm:
            return self
        part = copy.copy(self)
        part.batchnorm = policy
        return part

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another precision.

        Args:
            dtype: of weights, inputs and outputs.

        Returns:
            A copy; this problem stays as it is.

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.tensor([0, 1])
            >>> model = torch.nn.Linear(2, 2, bias=False)
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
            >>> problem.to(torch.float64).theta.dtype
            torch.float64
        """
        other = self.on(self.data.to(dtype))
        other.dtype, other.theta = dtype, self.theta.to(dtype)
        other.model = copy.deepcopy(self.model).to(dtype)
        other.batchnorm = self.batchnorm.to(dtype)
        other.criterion = placed_loss(self.criterion, self.device, dtype)
        return other
