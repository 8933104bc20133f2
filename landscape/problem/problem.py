"""A model, a loss and data: the one thing that analysis works on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.core.memory import SavedBytes
from landscape.core.options import choose
from landscape.problem import batchnorm, checks
from landscape.problem.batches import call, count_samples, fixed_randomness
from landscape.problem.data import Data
from landscape.problem.layout import Layout, gradients, independent_copy, unwrapped
from landscape.problem.loss_checks import ignores_first_label
from landscape.problem.losses import Terms, correct, describe_loss, output_loss, placed_loss

Loss = Callable[[Any, Any], Tensor]
Penalty = Callable[[dict[str, Tensor]], Tensor]

# Samples evaluated at once, at most. Measured on 2 cores with a 784-50-50-10 MLP: 1,000 to 10,000 lie within
# 10% of each other, 2,000 is the fastest. Large networks are bounded by ACTIVATION_BYTES instead.
MAX_CHUNK = 2000
# The activations of one chunk, saved for its backward pass. On 2 cores ResNet-18 evaluates fastest at 50 to
# 100 images of 50, 100, 200 and 400; this bound gives it 56.
ACTIVATION_BYTES = 2**28
# What to do with a model whose forward pass is random even in eval mode.
RANDOMNESS = ("refuse", "seed")


class Problem:
    """L(θ) = mean over the data of loss(model_θ(x), y), for any ``nn.Module``.

    θ is the flat vector of the model's trainable parameters (``layout`` says which slice is which).

    Args:
        model: any module; it is copied, put in eval mode, and never changed. A dict x is passed to it as
            ``model(**x)``, a tuple or list as ``model(*x)``, anything else as ``model(x)``. Of DataParallel,
            DistributedDataParallel and torch.compile, the module inside.
        loss: ``loss(outputs, targets)``, the *mean* over the samples of a batch; None if the model computes
            its loss itself and returns it as ``.loss`` or ["loss"] (Hugging Face models). A module is copied
            to the problem's device and precision.
        data: ``(x, y)``, a torch.utils.data.Dataset, or an iterable (not an iterator) of batches (x, y). x
            and y are tensors or NumPy arrays with the samples first, or tuples, lists and dicts of these,
            nested at will; anything else is passed on as it is. In place of a pair, one dict: its "labels"
            are the targets (the whole dict if it has none), and the model receives them only if ``loss`` is
            None. A dict, a tuple of two or a list of two tensors is moved to the device once, or in parts if
            it does not fit there; an iterable batch by batch. Minibatches can be drawn from such tensors, and
            from a :class:`.Stream`, whose samples all have the same weight.
        theta: weights (P,) to centre on; default: the model's parameters.
        device, dtype: default: those of the model's first parameter.
        terms: ``terms(targets)`` gives (B,), how many terms of the mean each sample contributes. Default: one
            each; for cross-entropy and negative log-likelihood of PyTorch, the number of its targets other
            than ``ignore_index``, or the sum of their class weights; for a model's own loss with integer
            "labels", the number of labels other than −100, without the first of each sequence if the loss
            does not depend on it (causal language models; two passes over the first samples tell).
        penalty: ``penalty(parameters)``, one number from the dict name -> trainable parameter, added to the
            mean loss. A regulariser belongs here, because a loss that reads the parameters of the original
            model would not see other weights.
        weight_decay: λ adds λ/2·‖θ‖², whose gradient is that of torch.optim.SGD(weight_decay=λ).
        check: "quick" tests on a few samples that the loss depends on all of θ and on nothing else, is the
            mean over the samples, and that two passes over batches are equal; "full" tests it on more
            samples, at more weights; "off" does not test it.

    Attributes:
        model, criterion, layout, theta: the copy of the model, the loss, the parameters' places in θ, and the
            centre (P,).
        data: the samples, on the device or in batches (:class:`landscape.problem.data.Data`).
        batchnorm: whose statistics BatchNorm uses (:class:`landscape.problem.batchnorm.BatchNormPolicy`).

    Raises:
        InputError: weights that are not finite, complex or no parameters, no samples, tensors of unequal
            length, an exhausted iterator, or a failed check.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy
        >>> landscape.Problem(model, loss, (x, y), weight_decay=1e-4)
        Problem(Linear, 8 parameters, cross_entropy, 20 samples, float32 on cpu)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        data: Any,
        *,
        theta: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        terms: Callable[[Any], Tensor] | None = None,
        penalty: Penalty | None = None,
        weight_decay: float = 0.0,
        check: str = "quick",
    ) -> None:
        self.check = choose("check", check, checks.CHECKS)
        if not 0 <= weight_decay < float("inf"):
            raise InputError(f"weight_decay: {weight_decay} is not allowed, it must be a finite number ≥ 0")
        original = unwrapped(model)
        self._set_model(independent_copy(original), device, dtype)
        self.criterion = output_loss if loss is None else placed_loss(loss, self.device, self.dtype)
        self.penalty, self.weight_decay = penalty, float(weight_decay)
        self.batchnorm = batchnorm.BatchNormPolicy()
        # Verdicts of checks that were made once, such as of the symmetry of products; copies share them.
        self.checked: dict[tuple[Any, ...], bool] = {}
        self._set_center(theta)
        self.data = Data(data, self.device, self.dtype, self.criterion is output_loss)
        count = Terms(self.criterion, terms)
        if self.data.samples or not self.data.indexed:
            batch = self.data.first()
            count_samples(*batch, alike=False)
            with fixed_randomness(self, 0):
                count.shifted = terms is None and ignores_first_label(self, *batch)
                if check != "off":
                    checks.check_problem(self, original, count, batch, full=check == "full")
        self.data.weigh(count, equal=check != "off")

    def __repr__(self) -> str:
        loss = describe_loss(self.criterion).split(".")[-1]
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"Problem({type(self.model).__name__}, {self.layout.size:,} parameters, {loss}, "
            f"{self.samples:,} samples, {dtype} on {self.device})"
        )

    def _set_model(
        self, model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        self.layout = Layout.of(model)
        if self.layout.size == 0:
            raise InputError("model: it has no trainable parameters, at least one is needed")
        first = next(p for p in model.parameters() if p.requires_grad and p.numel())
        if any(p.is_complex() for p in model.parameters() if p.requires_grad):
            raise InputError(
                "model: it has complex parameters, they must be real; use two real ones for each"
            )
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.model = model.to(self.device, self.dtype).eval()
        for layer in self.model.modules():
            if isinstance(layer, nn.RNNBase) and not layer.dropout:  # the same function; but cuDNN's backward
                layer.train()  # pass is there in training mode only

    def _set_center(self, theta: Tensor | None) -> None:
        named = dict(self.model.named_parameters())
        default = self.layout.flatten({s.name: named[s.name].detach() for s in self.layout.slots})
        self.theta = default if theta is None else theta.detach().to(self.device, self.dtype)
        if self.theta.shape != default.shape:
            raise InputError(
                f"theta: shape {tuple(self.theta.shape)}, the model needs {tuple(default.shape)}"
            )
        if not bool(torch.isfinite(self.theta).all()):
            bad = int((~torch.isfinite(self.theta)).sum())
            raise InputError(f"weights: {bad} of {self.layout.size} are NaN or infinite, all must be finite")

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
        """(x, y) of the samples ``indices``, of any shape, repeats allowed; indices first."""
        return self.data.gather(indices)

    # The same loss on other data, with other statistics, in another precision.

    def on(self, data: Data) -> Problem:
        """The same with other ``data``."""
        part = copy.copy(self)
        part.data = data
        return part

    def subset(self, indices: Tensor | slice) -> Problem:
        """The same on the samples ``indices`` (repeats allowed; a slice copies nothing). Not of batches."""
        data = self.data.in_chunks(self.chunk) if self.data.resident is not None else self.data
        return self.on(data.subset(indices))

    def with_batchnorm(self, bn: str, samples: int = batchnorm.SAMPLES) -> Problem:
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
        policy = batchnorm.policy(bn, samples, self.model, self.layout, self.data)
        if policy.name == "center":
            return self
        part = self.on(self.data.in_chunks(samples) if bn == "train" else self.data)
        part.batchnorm, part.model = policy, policy.network(self.model)
        return part

    def batchnorm_statistics(
        self, theta: Tensor | None = None, inputs: Iterable[Any] | None = None
    ) -> dict[str, Tensor]:
        """Buffer name -> statistics of BatchNorm at ``theta``, default the centre; empty without BatchNorm.

        ``inputs``: batches of inputs; default: all of the data, in batches of 250 or as it comes.
        """
        if not batchnorm.has_running_statistics(self.model):
            return {}
        inputs = batchnorm.sample_inputs(self.data, self.samples) if inputs is None else inputs
        theta = self.theta if theta is None else theta
        return batchnorm.Estimator(self.model, self.layout)(theta, inputs)

    def at(self, theta: Tensor | None = None) -> Problem:
        """The same with the BatchNorm statistics at ``theta``, fixed, for derivatives at θ."""
        policy = self.batchnorm.at(self.theta if theta is None else theta)
        if policy is self.batchnorm:
            return self
        part = copy.copy(self)
        part.batchnorm = policy
        return part

    def to(self, dtype: torch.dtype) -> Problem:
        """The same in another precision."""
        other = self.on(self.data.to(dtype))
        other.dtype, other.theta = dtype, self.theta.to(dtype)
        other.model = copy.deepcopy(self.model).to(dtype)
        other.batchnorm = self.batchnorm.to(dtype)
        other.criterion = placed_loss(self.criterion, self.device, dtype)
        return other

    # Outputs, loss and gradient.

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The model's outputs with the parameters ``weights`` (name -> tensor), differentiable in them."""
        buffers = self.batchnorm.buffers
        return call(self.model, {**buffers, **weights} if buffers else weights, x)

    def outputs(self, theta: Tensor, x: Any) -> Any:
        """The model's outputs at weights ``theta`` (P,), differentiable in both."""
        return self.call(self.layout.views(theta), x)

    @functools.cached_property
    def sample_bytes(self) -> int:
        """Bytes of activations that one sample saves for its backward pass; a forward pass needs less."""
        assert self.data.resident is not None
        x, y = self.data.first()
        leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(self.theta).items()}
        saved = SavedBytes(excluding=leaves.values())
        with torch.enable_grad(), saved, fixed_randomness(self, 0):
            self.criterion(self.call(leaves, x), y)
        return max(1, saved.bytes_ // min(2, self.samples))

    @property
    def chunk(self) -> int:
        """Samples of resident data evaluated at once, from the bytes that one saves for its backward pass."""
        if self.data.chunk_size is None:
            self.data.chunk_size = max(1, min(MAX_CHUNK, ACTIVATION_BYTES // self.sample_bytes))
        return self.data.chunk_size

    def chunks(self) -> Iterator[tuple[Any, Any, float]]:
        """The data as (x, y, weight), on the device; see :meth:`landscape.problem.data.Data.chunks`."""
        return (self.data.in_chunks(self.chunk) if self.data.resident is not None else self.data).chunks()

    @property
    def regularised(self) -> bool:
        """Whether a penalty or weight decay is added to the mean loss."""
        return self.penalty is not None or self.weight_decay > 0

    def penalty_value(self, theta: Tensor) -> Tensor:
        """The penalty and weight decay at ``theta`` (P,), one number, differentiable."""
        value = theta.new_zeros(()) if self.penalty is None else self.penalty(self.layout.views(theta))
        return value + self.weight_decay / 2 * theta.square().sum()

    @torch.no_grad()
    def totals(self, theta: Tensor | None = None) -> Tensor:
        """(2,) float64, on the device: the sums that :meth:`evaluate` divides by the number of samples.

        Nothing here waits for the device.
        """
        theta = self.theta if theta is None else theta
        problem = self.at(theta)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for x, y, count in self.chunks():
            outputs = problem.outputs(theta, x)
            total[0] += self.criterion(outputs, y).double() * count
            total[1] += correct(outputs, y, self.criterion)
        if self.regularised:
            total[0] += self.penalty_value(theta).double() * self.samples
        return total

    def evaluate(self, theta: Tensor | None = None) -> tuple[float, float]:
        """(mean loss, accuracy) at ``theta`` (P,), default the centre; sums in float64.

        Accuracy is the share of samples whose largest output is the target; NaN where the outputs, or their
        ``logits``, are not (B, classes) with integer targets (B,).

        Example:
            >>> import torch, landscape
            >>> x, y = torch.eye(2), torch.tensor([0, 1])
            >>> model = torch.nn.Linear(2, 2, bias=False)
            >>> problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
            >>> loss, accuracy = problem.evaluate(theta=torch.tensor([1.0, 0.0, 0.0, 1.0]))
            >>> round(loss, 3), accuracy
            (0.313, 1.0)
        """
        loss, right = (self.totals(theta) / self.samples).tolist()
        return loss, right

    def loss(self, theta: Tensor | None = None) -> float:
        """Mean loss at ``theta`` (P,), default the centre."""
        return self.evaluate(theta)[0]

    def accuracy(self, theta: Tensor | None = None) -> float:
        """Share of samples whose largest output is the target; NaN where that has no meaning."""
        return self.evaluate(theta)[1]

    def loss_and_gradient(
        self, theta: Tensor | None = None, *, seeded: bool = False, out: Tensor | None = None
    ) -> tuple[float, Tensor]:
        """(L, ∇L (P,)) at ``theta``, over the whole data; in the memory of ``out``, or in fresh memory.

        ``seeded``: a random model draws the same numbers as for a Hessian with randomness "seed".
        """
        theta = self.theta if theta is None else theta
        leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(theta).items()}
        problem = self.at(theta)
        total, gradient = 0.0, torch.empty_like(theta) if out is None else out
        for i, (x, y, count) in enumerate(self.chunks()):
            with fixed_randomness(self, i if seeded else None):
                value = self.criterion(problem.call(leaves, x), y) * (count / self.samples)
            parts = gradients(value, list(leaves.values()))
            for view, part in zip(self.layout.views(gradient).values(), parts, strict=True):
                view.copy_(part) if i == 0 else view.add_(part)
            total += float(value.detach())
        if self.regularised:
            leaf = theta.detach().requires_grad_()
            with torch.enable_grad():
                value = self.penalty_value(leaf)
            gradient += gradients(value, [leaf])[0]
            total += float(value.detach())
        return total, gradient

    def gradient(self, theta: Tensor | None = None, *, seeded: bool = False) -> Tensor:
        """∇L (P,) at ``theta``, default the centre, over the whole data.

        ``seeded``: a random model draws the same numbers as for a Hessian with randomness "seed".
        """
        return self.loss_and_gradient(theta, seeded=seeded)[1]
