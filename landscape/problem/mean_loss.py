"""The mean of a loss over data, and its variants with other data, BatchNorm statistics or precision."""

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
from landscape.problem.data import ACTIVATION_BYTES, MAX_CHUNK, SMALL_BYTES, SMALL_CHUNK, Data
from landscape.problem.layout import Layout, Vector, backward, gradients, placed, vector_of
from landscape.problem.losses import finite_gradient, placed_loss
from landscape.problem.metrics import Metric, Sums

Loss = Callable[[Any, Any], Tensor]
Penalty = Callable[[dict[str, Tensor]], Tensor]


class MeanLoss:
    """L(θ), the mean of a loss over data, as a :class:`landscape.Problem` computes it, and its variants.

    In the examples ``problem`` is ``landscape.Problem(torch.nn.Linear(2, 2, bias=False),
    torch.nn.functional.cross_entropy, (x, y))`` with ``x, y = torch.eye(2), torch.tensor([0, 1])``.

    Attributes:
        model, criterion, layout: the model, the loss, and the parameters' places in θ.
        weights: the center (P,).
        data: the samples (:class:`landscape.problem.data.Data`).
        batchnorm: the statistics that BatchNorm uses (:class:`landscape.problem.batchnorm.BatchNormPolicy`).
        draws: the number of draws of random numbers over which the loss is the mean; 0 if it draws none.
        differentiates: whether model or loss call ``torch.autograd.grad``, so that each pass must record
            gradients.
        draws_elsewhere: whether they draw random numbers of NumPy or Python.
        metrics: quantities that are evaluated with the loss (:mod:`landscape.problem.metrics`).
        padding: the places in θ of padding rows of embeddings, which are no directions.
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
        """The number of terms that all samples contribute to the mean of the loss."""
        return self.data.terms

    @property
    def resident(self) -> tuple[Any, Any] | None:
        """(x, y) on the device, or None if the data comes in batches."""
        return self.data.resident

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """(x, y) if each is one tensor and all samples have the same weight; None otherwise."""
        return self.data.tensors

    @property
    def indexed(self) -> bool:
        """Return whether samples have indices, so that minibatches can be drawn."""
        return self.data.indexed

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets of some samples.

        Args:
            indices: indices of samples, of any shape (…); repeats are allowed.

        Returns:
            (x, y), as tensors (…, *shape of a sample).

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

    def on(self, data: Data) -> Self:
        """Return a problem with the same loss on other data.

        Args:
            data: the samples.

        Returns:
            The problem; it shares all other attributes with this one.

        Example:
            >>> problem.on(problem.data.subset(torch.tensor([0]))).samples
            1
        """
        result = copy.copy(self)
        result.data = data
        return result

    def with_batchnorm(self, bn: str, samples: int = SAMPLES) -> Self:
        """Return a problem with the BatchNorm statistics of policy ``bn``.

        Dropout and all other layers stay in eval mode. Without BatchNorm in the model, the result is this
        problem itself.

        Args:
            bn: "center": the statistics in the model's buffers; the result is this problem.
                "recalibrate": statistics estimated at each point, as averages over batches of 250 samples (as
                in torch.optim.swa_utils.update_bn); derivatives treat them as constants.
                "train": the statistics of each batch, as in training.
            samples: for "recalibrate", the number of samples of the estimate: random samples, or the first
                ones if the data come in batches. For "train", the number of samples in a batch; data in
                batches keep the user's batches.

        Returns:
            The problem with these statistics; this problem does not change.

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
        self._check_autocast_and_device()
        policy = bn_policies.policy(bn, samples, self.model, self.layout, self.data)
        if policy.name == "center":  # also for a model without BatchNorm
            return self
        result = self.on(self.data.in_chunks(samples) if bn == "train" else self.data)
        result.batchnorm = policy
        if bn == "train":
            result.model = bn_policies.without_statistics(self.model)
        return result

    def batchnorm_statistics(
        self, weights: Tensor | None = None, inputs: Iterable[Any] | None = None
    ) -> dict[str, Tensor]:
        """Estimate the running statistics of BatchNorm at some weights.

        Args:
            weights: (P,); default: the problem's ``weights``.
            inputs: batches of inputs; default: all of the data, in batches of 250 or in the user's batches.

        Returns:
            The statistics by name of the buffer; empty without BatchNorm.

        Example:
            >>> import torch, landscape
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
            >>> data = (torch.randn(20, 3), torch.randint(2, (20,)))
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, data)
            >>> sorted(problem.batchnorm_statistics())
            ['1.num_batches_tracked', '1.running_mean', '1.running_var']
        """
        if not bn_policies.layers_with_statistics(self.model):
            return {}
        inputs = bn_policies.sample_inputs(self.data, self.samples) if inputs is None else inputs
        weights = vector_of(weights, self.weights)
        return bn_policies.Estimator(self.model, self.layout)(weights, inputs)

    def _check_autocast_and_device(self) -> None:
        """Raise InputError under torch.autocast, or with a default device other than the CPU."""
        check_default_device()
        if torch.is_autocast_enabled(self.device.type):
            remedy = f'torch.autocast("{self.device.type}", enabled=False)'
            raise InputError(f"torch.autocast: call outside of it, or use {remedy}")

    def at(self, weights: Tensor | None = None) -> Self:
        """Return a problem with the BatchNorm statistics at some weights, fixed, for derivatives there.

        Args:
            weights: (P,); default: the problem's ``weights``.

        Returns:
            The problem; this one itself if the statistics do not depend on the weights.

        Example:
            >>> problem.at() is problem
            True
        """
        self._check_autocast_and_device()
        policy = self.batchnorm.at(vector_of(weights, self.weights))
        if policy is self.batchnorm:
            return self
        result = self.on(self.data)
        result.batchnorm = policy
        return result

    def to(self, dtype: torch.dtype) -> Self:
        """Return a copy of the problem in another precision.

        Args:
            dtype: the precision of weights, inputs and outputs.

        Returns:
            The copy; this problem does not change.

        Raises:
            InputError: no floating-point dtype, or float64 on a device without it.

        Example:
            >>> problem.to(torch.float64).weights.dtype
            torch.float64
        """
        target: Any = dtype  # a user may pass any object
        if not (isinstance(target, torch.dtype) and target.is_floating_point):
            words = "a floating-point dtype (for another device, make another problem)"
            raise InputError("dtype", dtype, allowed=words)
        check_dtype(self.device, dtype)
        converted = self.on(self.data.to(dtype))  # a copy of the problem, with converted data
        converted.dtype, converted.weights = dtype, self.weights.to(dtype)
        converted.model = copy.deepcopy(self.model).to(dtype)
        converted.batchnorm = self.batchnorm.to(dtype)
        converted.criterion = placed_loss(self.criterion, self.device, dtype)
        return converted

    def subset(self, indices: Tensor | slice) -> Self:
        """Return a problem with the same loss on some of the samples; not of data in batches.

        Args:
            indices: the indices of the samples, repeats allowed; or a slice, which copies nothing.

        Returns:
            The problem; it shares all other attributes with this one.

        Example:
            >>> problem.subset(slice(0, 1)).samples
            1
        """
        data = self.data.in_chunks(self.chunk) if self.data.resident is not None else self.data
        return self.on(data.subset(indices))

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """Return the model's outputs with the given parameters, differentiable in them.

        Args:
            weights: the parameters by name.
            x: inputs of the model.

        Returns:
            The outputs.

        Example:
            >>> tuple(problem.call({"weight": torch.ones(2, 2)}, x).shape)
            (2, 2)
        """
        buffers = self.batchnorm.buffers
        if self.differentiates and torch.is_grad_enabled():  # the model may differentiate by its parameters
            weights = {k: w if w.requires_grad else w.detach().requires_grad_() for k, w in weights.items()}
        return call(self.model, {**buffers, **weights} if buffers else weights, x)

    def outputs(self, weights: Tensor, x: Any) -> Any:
        """Return the model's outputs at some weights, differentiable in weights and inputs.

        Args:
            weights: (P,).
            x: inputs of the model.

        Returns:
            The outputs.

        Example:
            >>> problem.outputs(torch.tensor([1.0, 0.0, 0.0, 1.0]), x).tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        return self.call(self.layout.views(weights.to(self.weights)), x)

    @contextlib.contextmanager
    def evaluating(self, seed: int | None) -> Iterator[None]:
        """Return the context for a forward pass and its loss.

        Args:
            seed: the seed of the random numbers inside; None: PyTorch's generator as it is.

        Returns:
            The context.

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
        """Return the bytes of activations that a batch saves for its backward pass.

        Args:
            x, y: inputs and targets, on the device.

        Returns:
            The bytes.

        Example:
            >>> problem.saved_bytes(x, y) > 0
            True
        """
        leaves, is_recomputing = self.layout.leaves(self.weights), recomputes(self.model)
        x, y = self.data.for_pass(x, y)

        def loss() -> Tensor:
            with torch.enable_grad(), self.evaluating(0):
                return self.criterion(own_outputs(self, x) if is_recomputing else self.call(leaves, x), y)

        return with_saved_bytes(loss, excluding=leaves.values())[1]

    @functools.cached_property
    def sample_bytes(self) -> int:
        """The bytes of activations that one sample saves for its backward pass."""
        assert self.data.resident is not None
        x, y = self.data.resident if self.data.loss_mixes_samples else self.data.first_batch()
        return max(1, self.saved_bytes(x, y) // count_samples(x, y))

    @property
    def chunk_bytes(self) -> int:
        """The bytes of activations that a chunk of the data saves for its backward pass.

        For data in batches they are those of the first batch, or 0 with ``check="off"``.
        """
        if self.data.resident is None:
            return self.batch_bytes
        samples: int = min(self.chunk, self.data.samples)
        return self.sample_bytes * samples

    @property
    def chunk(self) -> int:
        """The number of samples of resident data in a chunk, by the bytes of activations of one sample."""
        if self.data.chunk_size is None:
            size = ACTIVATION_BYTES // self.sample_bytes
            # For a random loss the size must not depend on the device: each chunk draws its own numbers.
            if self.device.type == "cpu" and not self.draws:
                size = min(size, max(SMALL_CHUNK, SMALL_BYTES // self.sample_bytes))
            self.data.chunk_size = max(1, min(MAX_CHUNK, size))
        return self.data.chunk_size

    def chunks(self) -> Iterator[tuple[Any, Any, float]]:
        """Iterate over the data in parts that fit into memory.

        Returns:
            An iterator of (x, y, weight), on the device; the weights add up to the number of samples.

        Example:
            >>> [(len(y), weight) for x, y, weight in problem.chunks()]
            [(2, 2.0)]
        """
        return (self.data if self.data.resident is None else self.data.in_chunks(self.chunk)).chunks()

    def parts(self) -> Iterator[tuple[Any, Any, float, int | None]]:
        """Iterate over the chunks of the data, each of them once for each draw of random numbers.

        Returns:
            An iterator of (x, y, weight, seed): the weights add up to the number of samples, and ``seed`` is
            for the context :meth:`evaluating` of the pass.

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
                yield *self.data.for_pass(x, y), count / max(1, self.draws), seed

    @property
    def separable(self) -> bool:
        """Return whether faster paths may divide samples and passes arbitrarily.

        They may if the loss is the mean over the samples, draws no random numbers, and neither model nor loss
        differentiates.
        """
        return not (self.draws or self.differentiates or self.data.loss_mixes_samples)

    @property
    def regularised(self) -> bool:
        """Return whether a penalty or weight decay is added to the mean loss."""
        return self.penalty is not None or self.weight_decay > 0

    def penalty_value(self, weights: Tensor) -> Tensor:
        """Return the penalty and weight decay at some weights, differentiable.

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
        """Return the sums that :meth:`evaluate` divides by the number of samples.

        The call does not wait for a GPU.

        Args:
            weights: (P,); default: the problem's ``weights``.

        Returns:
            (2 + metrics,) float64: the loss, the number of correct predictions, the metrics. The tensor is on
            the device, or on the CPU if the device has no float64.

        Example:
            >>> problem.totals(torch.tensor([1.0, 0.0, 0.0, 1.0]))[1].item()
            2.0
        """
        weights = vector_of(weights, self.weights)
        problem_at = self.at(weights)  # with BatchNorm's statistics there, which only outputs need
        sums = Sums(self)
        for x, y, count, seed in self.parts():
            with self.evaluating(seed):
                outputs = problem_at.outputs(weights, x)
                sums.add(outputs, y, self.criterion(outputs, y), count)
        total = sums.end()
        if self.regularised:
            total[0] += double(self.penalty_value(weights)) * self.samples
        return total

    def evaluate(self, weights: Tensor | None = None) -> tuple[float, float]:
        """Return mean loss and accuracy at some weights, summed in float64.

        Args:
            weights: (P,); default: the problem's ``weights``.

        Returns:
            (loss, accuracy). Accuracy is the share of the targets, without those that the loss leaves out,
            that have the largest output; NaN where the outputs, or their ``logits``, are not (B, classes, …)
            or (B, …, classes) with integer targets (B, …), or nothing says which output is whose.

        Example:
            >>> loss, accuracy = problem.evaluate(weights=torch.tensor([1.0, 0.0, 0.0, 1.0]))
            >>> round(loss, 3), accuracy
            (0.313, 1.0)
        """
        loss, accuracy, *_ = (self.totals(weights) / self.samples).tolist()
        return loss, accuracy

    @analysis(lambda self, **_: Need(self.device, self.chunk_bytes))
    def loss(self, weights: Vector | None = None, *, max_memory: int | None = None) -> float:
        """Return the mean loss at some weights.

        Args:
            weights: (P,); default: the problem's ``weights``.
            max_memory: the most bytes that the process may use.

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
        """Return the share of the targets that have the largest output, at some weights.

        Args:
            weights: (P,); default: the problem's ``weights``.

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
        """Return the mean loss over all data and its gradient at some weights.

        Args:
            weights: (P,); default: the problem's ``weights``.
            out: a tensor (P,) for the gradient; default: a new one.

        Returns:
            L(θ) and its gradient (P,).

        Example:
            >>> loss, gradient = problem.loss_and_gradient(torch.zeros(4))
            >>> round(loss, 3), gradient.tolist()
            (0.693, [-0.25, 0.25, 0.25, -0.25])
        """
        weights = vector_of(weights, self.weights)
        problem_at = self.at(weights)  # with BatchNorm's statistics there, which only outputs need
        is_recomputing = recomputes(self.model)
        gradient = torch.empty_like(weights) if out is None else out
        context: Any = contextlib.nullcontext(self.layout.leaves(weights))
        if is_recomputing:  # own_outputs() uses the module's own parameters, which become ``weights``
            context = placed(self.model, self.layout, weights)
        differentiate = backward if is_recomputing else gradients
        total = 0.0
        with context as parameters:
            for i, (x, y, count, seed) in enumerate(self.parts()):
                with self.evaluating(seed):
                    outputs = own_outputs(problem_at, x) if is_recomputing else problem_at.call(parameters, x)
                    chunk_loss = self.criterion(outputs, y) * (count / self.samples)
                chunk_gradients = differentiate(chunk_loss, list(parameters.values()))
                for view, addend in zip(self.layout.views(gradient).values(), chunk_gradients, strict=True):
                    if i == 0:
                        view.copy_(addend)
                    else:
                        view.add_(addend)
                total += float(chunk_loss.detach())
        if self.regularised:
            leaf = weights.detach().requires_grad_()
            with torch.enable_grad():
                penalty = self.penalty_value(leaf)
            gradient += gradients(penalty, [leaf])[0]
            total += float(penalty.detach())
        return total, gradient

    # The need: a chunk's gradient and the sum of gradients; the activations and their gradients.
    @analysis(lambda self, **_: Need(self.device, 2 * (self.weights.nbytes + self.chunk_bytes)))
    def gradient(self, weights: Vector | None = None, *, max_memory: int | None = None) -> Tensor:
        """Return the gradient of the mean loss over all data at some weights.

        Args:
            weights: (P,); default: the problem's ``weights``.
            max_memory: the most bytes that the process may use.

        Returns:
            The gradient (P,); OperationError is raised if it or the loss is NaN or infinite.

        Example:
            >>> problem.gradient(torch.zeros(4)).tolist()
            [-0.25, 0.25, 0.25, -0.25]
        """
        return finite_gradient(*self.loss_and_gradient(weights))
