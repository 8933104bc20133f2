"""One loss on other data, with other statistics of BatchNorm, in another precision."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from landscape.core.analysis import analysis
from landscape.core.devices import check_default_device, check_dtype, double
from landscape.core.errors import InputError
from landscape.core.memory import Need, with_saved_bytes
from landscape.problem import batchnorm as bn_policies
from landscape.problem.batches import call, count_samples, fixed_randomness, own_outputs, quiet, recomputes
from landscape.problem.batchnorm import SAMPLES, BatchNormPolicy
from landscape.problem.data import ACTIVATION_BYTES, SMALL_BYTES, SMALL_CHUNK, Data
from landscape.problem.layout import Layout, Vector, backward, gradients, placed, vector_of
from landscape.problem.losses import existing, placed_loss
from landscape.problem.metrics import Metric, Sums

Loss = Callable[[Any, Any], Tensor]
Penalty = Callable[[dict[str, Tensor]], Tensor]

# Samples evaluated at once, at most. Measured on 2 cores with a 784-50-50-10 MLP: 1,000 to 10,000 lie within
# 10% of each other, 2,000 is the fastest. Large networks are bounded by ACTIVATION_BYTES instead.
MAX_CHUNK = 2000


class MeanLoss:
    """L(θ), the mean of a loss over data, as a :class:`landscape.Problem` computes it, and its variants.

    In the examples ``problem`` is ``landscape.Problem(torch.nn.Linear(2, 2, bias=False),
    torch.nn.functional.cross_entropy, (x, y))`` with ``x, y = torch.eye(2), torch.tensor([0, 1])``.

    Attributes:
        model, criterion, layout: the model, the loss, and the parameters' places in θ.
        weights: the center (P,).
        data: the samples (:class:`landscape.problem.data.Data`).
        batchnorm: whose statistics BatchNorm uses (:class:`landscape.problem.batchnorm.BatchNormPolicy`).
        draws: how many draws of random numbers the loss is a mean over; 0 where it draws none.
        differentiates: model or loss differentiate themselves (``torch.autograd.grad``), which needs
            gradients to be recorded.
        draws_elsewhere: some of the random numbers are those of NumPy or Python.
        metrics: what is evaluated besides the loss (:mod:`landscape.problem.metrics`).
        padding: where in θ the padding rows of embeddings lie, which are no directions.
    """

    model: nn.Module
    criterion: Loss
    layout: Layout
    weights: Tensor
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
    metrics: tuple[Metric, ...]
    padding: tuple[slice, ...]

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
        """Return whether each sample has a number, so that minibatches can be drawn."""
        return self.data.indexed

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of some samples.

        Args:
            indices: numbers of samples, of any shape; repeats are allowed.

        Returns:
            (x, y), the shape of the indices first.

        Example:
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
                until it has that number), or "train" has in a batch. Default 1,000.

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
        self._check_surroundings()
        policy = bn_policies.policy(bn, samples, self.model, self.layout, self.data)
        if policy.name == "center":
            return self
        part = self.on(self.data.in_chunks(samples) if bn == "train" else self.data)
        part.batchnorm = policy
        if bn == "train":
            part.model = bn_policies.without_statistics(self.model)
        return part

    def batchnorm_statistics(
        self, weights: Tensor | None = None, inputs: Iterable[Any] | None = None
    ) -> dict[str, Tensor]:
        """The running statistics of BatchNorm, estimated at some weights.

        Args:
            weights: (P,); default: the center.
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
        if not bn_policies.tracked(self.model):
            return {}
        inputs = bn_policies.sample_inputs(self.data, self.samples) if inputs is None else inputs
        weights = vector_of(weights, self.weights)
        return bn_policies.Estimator(self.model, self.layout)(weights, inputs)

    def _check_surroundings(self) -> None:
        """InputError under torch.autocast, with numbers of a lower precision, or a default device."""
        check_default_device()
        if torch.is_autocast_enabled(self.device.type):
            kind = self.device.type
            raise InputError(
                f'torch.autocast: call outside of it, or use torch.autocast("{kind}", enabled=False)'
            )

    def at(self, weights: Tensor | None = None) -> Self:
        """The same with the BatchNorm statistics at some weights, fixed, for derivatives there.

        Args:
            weights: (P,); default: the center.

        Returns:
            This problem itself where the statistics do not depend on the weights.

        Example:
            >>> problem.at() is problem
            True
        """
        self._check_surroundings()
        policy = self.batchnorm.at(vector_of(weights, self.weights))
        if policy is self.batchnorm:
            return self
        part = self.on(self.data)
        part.batchnorm = policy
        return part

    def to(self, dtype: torch.dtype) -> Self:
        """The same in another precision.

        Args:
            dtype: of weights, inputs and outputs.

        Returns:
            A copy; this problem stays as it is.

        Raises:
            InputError: no floating-point dtype, or float64 on a device that has none.

        Example:
            >>> problem.to(torch.float64).weights.dtype
            torch.float64
        """
        target: Any = dtype
        if not (isinstance(target, torch.dtype) and target.is_floating_point):
            raise InputError(
                "dtype", dtype, allowed="a floating-point dtype; make a problem on another device"
            )
        check_dtype(self.device, dtype)
        converted = self.on(self.data.to(dtype))
        converted.dtype, converted.weights = dtype, self.weights.to(dtype)
        converted.model = copy.deepcopy(self.model).to(dtype)
        converted.batchnorm = self.batchnorm.to(dtype)
        converted.criterion = placed_loss(self.criterion, self.device, dtype)
        return converted

    def subset(self, indices: Tensor | slice) -> Self:
        """The same loss on some of the samples; not of data that comes in batches.

        Args:
            indices: their numbers, repeats allowed, or a slice, which copies nothing.

        Returns:
            A problem that shares everything else with this one.

        Example:
            >>> problem.subset(slice(0, 1)).samples
            1
        """
        data = self.data.in_chunks(self.chunk) if self.data.resident is not None else self.data
        return self.on(data.subset(indices))

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The model's outputs with given parameters, differentiable in them.

        Args:
            weights: name -> parameter.
            x: inputs, as the model takes them.

        Returns:
            What the model returns.

        Example:
            >>> tuple(problem.call({"weight": torch.ones(2, 2)}, x).shape)
            (2, 2)
        """
        buffers = self.batchnorm.buffers
        if self.differentiates and torch.is_grad_enabled():  # in its parameters, perhaps, as in training
            weights = {k: w if w.requires_grad else w.detach().requires_grad_() for k, w in weights.items()}
        return call(self.model, {**buffers, **weights} if buffers else weights, x)

    def outputs(self, weights: Tensor, x: Any) -> Any:
        """The model's outputs at some weights, differentiable in weights and inputs.

        Args:
            weights: (P,).
            x: inputs, as the model takes them.

        Returns:
            What the model returns.

        Example:
            >>> problem.outputs(torch.tensor([1.0, 0.0, 0.0, 1.0]), x).tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        return self.call(self.layout.views(weights.to(self.weights)), x)

    @contextlib.contextmanager
    def evaluating(self, seed: int | None) -> Iterator[None]:
        """The context of a forward pass and its loss.

        Args:
            seed: of the random numbers that are drawn inside; None: those of PyTorch's own state.

        Returns:
            A context.

        Example:
            >>> with problem.evaluating(0):
            ...     a = torch.rand(1)
            >>> with problem.evaluating(0):
            ...     bool(torch.rand(1) == a)
            True
        """
        recorded = torch.enable_grad() if self.differentiates else contextlib.nullcontext()
        fixed = fixed_randomness(self.device, seed, self.draws_elsewhere)
        with recorded, fixed, quiet(self.model, self.device):
            yield

    def saved_bytes(self, x: Any, y: Any) -> int:
        """Bytes of activations that a batch saves for its backward pass; a forward pass needs less.

        Args:
            x, y: inputs and targets, on the device.

        Returns:
            The bytes.

        Example:
            >>> problem.saved_bytes(x, y) > 0
            True
        """
        leaves, again = self.layout.leaves(self.weights), recomputes(self.model)
        x, y = self.data.leaves(x, y)

        def loss() -> Tensor:
            with torch.enable_grad(), self.evaluating(0):
                return self.criterion(own_outputs(self, x) if again else self.call(leaves, x), y)

        return with_saved_bytes(loss, excluding=leaves.values())[1]

    @functools.cached_property
    def sample_bytes(self) -> int:
        """Bytes of activations that one sample saves for its backward pass."""
        assert self.data.resident is not None
        x, y = self.data.resident if self.data.mixes else self.data.first()
        return max(1, self.saved_bytes(x, y) // count_samples(x, y, alike=False))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of activations that a chunk of the data saves for its backward pass.

        Of data in batches, those of its first batch; 0 where ``check`` is "off", so that none was evaluated.
        """
        if self.data.resident is None:
            return self.batch_bytes
        samples: int = min(self.chunk, self.data.samples)
        return self.sample_bytes * samples

    @property
    def chunk(self) -> int:
        """Samples of resident data evaluated at once, from the bytes that one saves for its backward pass."""
        if self.data.chunk_size is None:
            size = ACTIVATION_BYTES // self.sample_bytes
            if self.device.type == "cpu" and not self.draws:  # each chunk has random numbers of its own
                size = min(size, max(SMALL_CHUNK, SMALL_BYTES // self.sample_bytes))
            self.data.chunk_size = max(1, min(MAX_CHUNK, size))
        return self.data.chunk_size

    def chunks(self) -> Iterator[tuple[Any, Any, float]]:
        """The data in parts that fit into memory.

        Returns:
            An iterator of (x, y, weight), on the device; weights add up to the number of samples.

        Example:
            >>> [(len(y), weight) for x, y, weight in problem.chunks()]
            [(2, 2.0)]
        """
        return (self.data.in_chunks(self.chunk) if self.data.resident is not None else self.data).chunks()

    def parts(self) -> Iterator[tuple[Any, Any, float, int | None]]:
        """The chunks of the data, each as often as random numbers are drawn for it.

        Returns:
            An iterator of (x, y, weight, seed): weights add up to the number of samples, and the pass is made
            with the random numbers of ``seed`` (:meth:`evaluating`).

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.tensor([0, 1])
            >>> model = torch.nn.Linear(2, 2, bias=False)
            >>> loss = torch.nn.functional.cross_entropy
            >>> problem = landscape.Problem(model, loss, (x, y), randomness=2)
            >>> [(weight, seed) for x, y, weight, seed in problem.parts()]
            [(1.0, 0), (1.0, 1)]
        """
        for i, (x, y, count) in enumerate(self.chunks()):
            for k in range(max(1, self.draws)):
                seed = i * self.draws + k if self.draws else None
                yield *self.data.leaves(x, y), count / max(1, self.draws), seed

    @property
    def separable(self) -> bool:
        """Return whether faster paths may divide samples and passes as they like.

        They may where the loss is the mean over the samples, draws no random numbers and differentiates
        nothing itself.
        """
        return not (self.draws or self.differentiates or self.data.mixes)

    @property
    def regularised(self) -> bool:
        """Return whether a penalty or weight decay is added to the mean loss."""
        return self.penalty is not None or self.weight_decay > 0

    def penalty_value(self, weights: Tensor) -> Tensor:
        """The penalty and weight decay at some weights, differentiable.

        Args:
            weights: (P,).

        Returns:
            One number, which :meth:`evaluate` adds to the mean over the samples.

        Example:
            >>> problem.penalty_value(problem.weights).item()
            0.0
        """
        weights = weights.to(self.weights)
        value = weights.new_zeros(()) if self.penalty is None else self.penalty(self.layout.views(weights))
        return value + self.weight_decay / 2 * weights.square().sum()

    @torch.no_grad()
    def totals(self, weights: Tensor | None = None) -> Tensor:
        """The sums that :meth:`evaluate` divides by the number of samples; nothing waits for the device.

        Args:
            weights: (P,); default: the center.

        Returns:
            (2 + metrics,) float64, on the device if it has that: the loss, the right answers, the metrics.

        Example:
            >>> problem.totals(torch.tensor([1.0, 0.0, 0.0, 1.0]))[1].item()
            2.0
        """
        weights = vector_of(weights, self.weights)
        problem = self.at(weights)
        sums = Sums(self)
        for x, y, count, seed in self.parts():
            with self.evaluating(seed):
                outputs = problem.outputs(weights, x)
                sums.add(outputs, y, self.criterion(outputs, y), count)
        total = sums.end()
        if self.regularised:
            total[0] += double(self.penalty_value(weights)) * self.samples
        return total

    def evaluate(self, weights: Tensor | None = None) -> tuple[float, float]:
        """Mean loss and accuracy at some weights; sums are in float64.

        Args:
            weights: (P,); default: the center.

        Returns:
            (loss, accuracy). Accuracy is the share of the targets, without those that the loss leaves out,
            that have the largest output; NaN where the outputs, or their ``logits``, are not (B, classes, …)
            or (B, …, classes) with integer targets (B, …), or nothing says which output is whose.

        Example:
            >>> loss, accuracy = problem.evaluate(weights=torch.tensor([1.0, 0.0, 0.0, 1.0]))
            >>> round(loss, 3), accuracy
            (0.313, 1.0)
        """
        loss, right, *_ = (self.totals(weights) / self.samples).tolist()
        return loss, right

    @analysis(lambda self, **_: Need(self.device, self.chunk_bytes))
    def loss(self, weights: Vector | None = None, *, max_memory: int | None = None) -> float:
        """Mean loss at some weights.

        Args:
            weights: (P,); default: the center.
            max_memory: bytes that the process may take, at most.

        Returns:
            L(θ), in nats for a cross-entropy.

        Raises:
            InputError: weights that are NaN or infinite, or no vector (P,).

        Example:
            >>> round(problem.loss(torch.zeros(4)), 3)
            0.693
        """
        value = self.evaluate(weights)[0]
        if not value < float("inf") and not bool(vector_of(weights, self.weights).isfinite().all()):
            raise InputError("weights: they are NaN or infinite, all must be finite; a run diverged there")
        return value

    def accuracy(self, weights: Tensor | None = None) -> float:
        """Share of the targets that have the largest output, at some weights.

        Args:
            weights: (P,); default: the center.

        Returns:
            Between 0 and 1; NaN where accuracy has no meaning, see :meth:`evaluate`.

        Example:
            >>> problem.accuracy(torch.tensor([1.0, 0.0, 0.0, 1.0]))
            1.0
        """
        return self.evaluate(weights)[1]

    def loss_and_gradient(
        self, weights: Tensor | None = None, *, out: Tensor | None = None
    ) -> tuple[float, Tensor]:
        """The mean loss over the whole data and its gradient at some weights.

        Args:
            weights: (P,); default: the center.
            out: memory (P,) for the gradient; default: fresh memory.

        Returns:
            L(θ) and its gradient (P,).

        Example:
            >>> loss, gradient = problem.loss_and_gradient(torch.zeros(4))
            >>> round(loss, 3), gradient.tolist()
            (0.693, [-0.25, 0.25, 0.25, -0.25])
        """
        weights = vector_of(weights, self.weights)
        problem, again = self.at(weights), recomputes(self.model)
        total, gradient = 0.0, torch.empty_like(weights) if out is None else out
        in_module = placed(self.model, self.layout, weights) if again else None
        with in_module or contextlib.nullcontext(self.layout.leaves(weights)) as leaves:
            for i, (x, y, count, seed) in enumerate(self.parts()):
                with self.evaluating(seed):
                    outputs = own_outputs(problem, x) if again else problem.call(leaves, x)
                    value = self.criterion(outputs, y) * (count / self.samples)
                parts = (backward if again else gradients)(value, list(leaves.values()))
                for view, part in zip(self.layout.views(gradient).values(), parts, strict=True):
                    view.copy_(part) if i == 0 else view.add_(part)
                total += float(value.detach())
        if self.regularised:
            leaf = weights.detach().requires_grad_()
            with torch.enable_grad():
                value = self.penalty_value(leaf)
            gradient += gradients(value, [leaf])[0]
            total += float(value.detach())
        return total, gradient

    # The parts of a chunk's gradient and their sum, besides the activations and their gradients.
    @analysis(lambda self, **_: Need(self.device, 2 * (self.weights.nbytes + self.chunk_bytes)))
    def gradient(self, weights: Vector | None = None, *, max_memory: int | None = None) -> Tensor:
        """The gradient of the mean loss over the whole data at some weights.

        Args:
            weights: (P,); default: the center.
            max_memory: bytes that the process may take, at most.

        Returns:
            The gradient (P,). OperationError where it, or the loss, is NaN or infinite.

        Example:
            >>> problem.gradient(torch.zeros(4)).tolist()
            [-0.25, 0.25, 0.25, -0.25]
        """
        return existing(*self.loss_and_gradient(weights))
