"""A model, a loss and data: the one thing that analysis works on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.core.memory import SavedBytes
from landscape.core.options import choose
from landscape.problem import checks
from landscape.problem.batches import (
    call,
    check_labels,
    correct,
    count_samples,
    fixed_randomness,
    label_terms,
    loss_terms,
    named_tensors,
    output_loss,
    placed_loss,
)
from landscape.problem.data import PROBE, Data
from landscape.problem.layout import Layout, gradients, independent_copy, unwrapped

Loss = Callable[[Any, Any], Tensor]
Penalty = Callable[[dict[str, Tensor]], Tensor]

# Samples evaluated at once, at most. Measured on 2 cores with a 784-50-50-10 MLP: 1,000 to 10,000 lie within
# 10% of each other, 2,000 is the fastest. Large networks are bounded by ACTIVATION_BYTES instead.
MAX_CHUNK = 2000
# What one chunk may keep for its backward pass. On 2 cores ResNet-18 evaluates fastest at 50 to 100 images of
# 50, 100, 200 and 400; this bound gives it 56.
ACTIVATION_BYTES = 2**28
FULL_PROBE = 256  # samples of check="full" (ours)
# What to do with a model whose forward pass is random even in eval mode.
RANDOMNESS = ("refuse", "seed")


class Problem:
    """L(θ) = mean over the data of loss(model_θ(x), y), for any ``nn.Module``.

    Args:
        model: any module; it is copied, put in eval mode, and never changed. A dict x is passed to it as
            ``model(**x)``, a tuple or list as ``model(*x)``, anything else as ``model(x)``. Of DataParallel,
            DistributedDataParallel and torch.compile, the module inside.
        loss: ``loss(outputs, targets)``, the *mean* over the samples it is given; None where the model's
            output carries it, as ``.loss`` or ["loss"] (Hugging Face models). A module is copied to the
            problem's device and precision.
        data: ``(x, y)``, a torch.utils.data.Dataset, or an iterable (not an iterator) of batches (x, y). x
            and y are tensors or NumPy arrays with the samples first, or tuples, lists and dicts of these,
            nested at will; anything else is passed on as it is. In place of a pair, one dict: its "labels"
            are the targets (the whole dict where it has none), and the model is given them only where
            ``loss`` is None. Data that is a dict, a tuple of two or a list of two tensors is moved to the
            device once, or in parts if it does not fit there; of anything else each batch in turn.
            Minibatches can be drawn from such data, and from a :class:`.Stream`, whose
            samples all weigh the same.
        theta: weights (P,) to centre on; default: the model's own.
        device, dtype: default: those of the model's first parameter.
        terms: ``terms(targets)`` gives (B,) how many terms of the mean each sample brings. Default: one each;
            for cross-entropy and negative log-likelihood of PyTorch, as many as it has targets other than
            ``ignore_index``, or the sum of their class weights; for a loss of the model's own with integer
            "labels", as many as these are not −100, the first of each sequence left out if the loss does not
            depend on it (causal language models; two passes over the first samples tell).
        penalty: ``penalty(parameters)``, one number from the dict name -> trainable parameter, added to the
            mean loss: for regularisers, since a loss that uses the model's own would not see other weights.
        weight_decay: λ adds λ/2·‖θ‖², whose gradient is that of torch.optim.SGD(weight_decay=λ).
        check: "quick" sees on a few samples that the loss follows all of θ and nothing else, is the mean over
            the samples, and that two passes over batches are equal; "full" on more samples, at more weights;
            "off" not at all.

    θ is the flat vector of the model's trainable parameters (``layout`` says which slice is which). Chunks
    and batches weigh by their terms, so that a short last one counts for as much as it holds.

    Raises InputError for weights that are not finite, complex or no parameters, no samples, tensors of
    unequal length, an exhausted iterator, and for what a check finds.

    Example:
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> landscape.Problem(nn.Linear(3, 2), nn.functional.cross_entropy, (x, y), weight_decay=1e-4)
        Problem(Linear, 8 parameters, cross_entropy, 20 samples, float32 on cpu)
    """

    # Whose statistics BatchNorm uses, and how many samples they come from (0: its buffers).
    bn, bn_samples = "center", 0
    # θ -> buffers by name that belong to these weights, or None: the model's own serve everywhere.
    buffers_at: Callable[[Tensor], dict[str, Tensor]] | None = None

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
        self.model = independent_copy(original)
        self.layout = Layout.of(self.model)
        if self.layout.size == 0:
            raise InputError("model: it has no trainable parameters, at least one is needed")
        first = next(p for p in self.model.parameters() if p.requires_grad and p.numel())
        if any(p.is_complex() for p in self.model.parameters() if p.requires_grad):
            raise InputError("model: it has complex parameters, they must be real; keep two real ones each")
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.model = self.model.to(self.device, self.dtype).eval()
        for layer in self.model.modules():
            if isinstance(layer, nn.RNNBase) and not layer.dropout:  # the same function; but cuDNN's backward
                layer.train()  # pass is there in training mode only
        self.criterion = output_loss if loss is None else placed_loss(loss, self.device, self.dtype)
        self.penalty, self.weight_decay = penalty, float(weight_decay)
        self._buffers: dict[str, Tensor] = {}  # in place of the model's own
        self._chunk: int | None = None
        self._set_center(theta)
        self._terms_of, self._shifted = terms, False
        self.data = Data(data, self.device, self.dtype, self.criterion is output_loss)
        if self.data.samples or not self.data.indexed:
            x, y = self.data.first()
            count_samples(x, y, alike=False)
            with fixed_randomness(self, 0):
                self._shifted = self._is_shifted(x, y)
                if check != "off":
                    self._look(original, x, y)
        self.data.weigh(self._terms_in, equal=check != "off")

    def __repr__(self) -> str:
        loss = checks.describe_loss(self.criterion).split(".")[-1]
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"Problem({type(self.model).__name__}, {self.layout.size:,} parameters, {loss}, "
            f"{self.samples:,} samples, {dtype} on {self.device})"
        )

    def _set_center(self, theta: Tensor | None) -> None:
        named = dict(self.model.named_parameters())
        own = self.layout.flatten({s.name: named[s.name].detach() for s in self.layout.slots})
        self.theta = own if theta is None else theta.detach().to(self.device, self.dtype)
        if self.theta.shape != own.shape:
            raise InputError(f"theta: shape {tuple(self.theta.shape)}, the model needs {tuple(own.shape)}")
        if not bool(torch.isfinite(self.theta).all()):
            bad = int((~torch.isfinite(self.theta)).sum())
            raise InputError(f"weights: {bad} of {self.layout.size} are NaN or infinite, all must be finite")

    def _look(self, original: nn.Module, x: Any, y: Any) -> None:
        """The checks of :mod:`landscape.problem.checks`; ``x``, ``y``: the first samples, or batch."""
        full = self.check == "full"
        x, y = self.data.pick(x, y, FULL_PROBE if full else PROBE)
        # Neither model nor loss gets the data itself before it is known whether they write to it.
        given, before = checks.copied((x, y)), self.theta.clone()
        self._try(given[0], given[1], labels=self.data.resident[1] if self.data.resident else None)
        if checks.writes(x, given[0]):
            checks.clone_inputs(self.model)
        if checks.writes(y, given[1]):
            self.criterion = checks.ClonedTargets(self.criterion)
        checks.check_passes(self, before, x, y)
        checks.check_leaves(self, original, x, y)
        for seed in range(3 if full else 1):
            checks.check_parameters(self, x, y, seed=seed)
        known = self._terms_of is not None
        checks.check_mean(self, self._terms_in, x, y, batches=not self.data.indexed, known=known)
        if full or checks.mentions(self.criterion, original):
            checks.check_original(self, original, x, y)

    @property
    def samples(self) -> int:
        """N, how many samples the data holds."""
        return self.data.samples

    @property
    def terms(self) -> float:
        """How many terms of the loss's mean the samples bring together."""
        return self.data.terms

    @property
    def resident(self) -> tuple[Any, Any] | None:
        """(x, y) on the device, or None where the data comes in batches."""
        return self.data.resident

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """(x, y) where each is one tensor and all samples weigh the same: what batched paths work on."""
        return self.data.tensors

    def _terms_in(self, x: Any, y: Any) -> Tensor:
        """(B,) float64 on the CPU: how many terms of the loss's mean each sample of a batch brings."""
        if self._terms_of is not None:
            found: Tensor | None = self._terms_of(y)
        elif self.criterion is output_loss:
            found = label_terms(x.get("labels"), self._shifted) if isinstance(x, Mapping) else None
        else:
            found = loss_terms(self.criterion, y)
        samples = count_samples(x, y, alike=False)
        if found is None:
            return torch.ones(samples, dtype=torch.float64)
        if found.shape != (samples,):
            raise InputError(
                f"terms: shape {tuple(found.shape)}, it must give one number a sample, ({samples},)"
            )
        return found.detach().to("cpu", torch.float64)

    @torch.no_grad()
    def _is_shifted(self, x: Any, y: Any) -> bool:
        """Whether the model's own loss leaves out each sequence's first label, which nothing comes before.

        Nothing in a model's interface says so, hence the model is asked: does another first label change it?
        """
        labels = x.get("labels") if isinstance(x, Mapping) else None
        if self.criterion is not output_loss or self._terms_of is not None or not isinstance(labels, Tensor):
            return False
        if labels.is_floating_point() or labels.dim() < 2:
            return False
        self._try(x, y)
        other = labels.clone()
        other[:, 0] = (labels[:, 0] == 0).to(labels)
        seen = []
        for given in (labels, other):
            with fixed_randomness(self, 0):
                seen.append(self.criterion(self.outputs(self.theta, {**x, "labels": given}), given))
        return torch.allclose(seen[0], seen[1], rtol=0, atol=0, equal_nan=True)

    @torch.no_grad()
    def _try(self, x: Any, y: Any, labels: Any = None) -> None:
        """Raise InputError, in one line, unless model, loss and some samples fit together.

        ``labels``: must be classes that the model's outputs have, if the loss takes classes.
        """
        try:
            outputs = self.outputs(self.theta, x)
            check_labels(self.criterion, outputs, labels)
            value = self.criterion(outputs, y)
        except InputError:
            raise
        except Exception as error:  # the model and the loss are the user's, they raise what they like
            shapes = ", ".join(
                f"{name} {tuple(t.shape)}"
                for name, t in [*named_tensors(x, "inputs"), *named_tensors(y, "targets")]
            )
            words = " ".join(str(error).split())[:200]
            raise InputError(
                f"model and data do not fit: {type(error).__name__}: {words} ({shapes})"
            ) from error
        if not isinstance(value, Tensor) or value.dim() > 0:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
            raise InputError(f"loss: it gives {what}, it must give one number, the mean over the samples")

    def call(self, weights: dict[str, Tensor], x: Any) -> Any:
        """The model's outputs with the parameters ``weights`` (name -> tensor), differentiable in them."""
        return call(self.model, {**self._buffers, **weights} if self._buffers else weights, x)

    def outputs(self, theta: Tensor, x: Any) -> Any:
        """The model's outputs at weights ``theta`` (P,), differentiable in both."""
        return self.call(self.layout.views(theta), x)

    @functools.cached_property
    def sample_bytes(self) -> int:
        """Bytes that one sample keeps for its backward pass; a forward pass alone holds less at a time."""
        assert self.resident is not None
        x, y = self.data.first()
        leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(self.theta).items()}
        saved = SavedBytes(excluding=leaves.values())
        with torch.enable_grad(), saved, fixed_randomness(self, 0):
            self.criterion(self.call(leaves, x), y)
        return max(1, saved.bytes_ // min(2, self.samples))

    @property
    def chunk(self) -> int:
        """Samples evaluated at once, from the bytes one sample keeps for its backward pass."""
        if self._chunk is None:
            self._chunk = max(1, min(MAX_CHUNK, ACTIVATION_BYTES // self.sample_bytes))
        return self._chunk

    def chunks(self) -> Iterator[tuple[Any, Any, float]]:
        """The data as (x, y, count), on the device; see :meth:`landscape.problem.data.Data.chunks`."""
        return self.data.chunks(self.chunk if self.resident is not None else 0)

    @property
    def indexed(self) -> bool:
        """Whether any sample can be had by its number, so that minibatches can be drawn."""
        return self.data.indexed

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """(x, y) of the samples ``indices``, of any shape, repeats allowed; indices first."""
        return self.data.gather(indices)

    def subset(self, indices: Tensor | slice) -> Problem:
        """The same on the samples ``indices`` (repeats allowed; a slice copies nothing). Not of batches."""
        part = copy.copy(self)
        part.data = self.data.subset(indices)
        part._chunk = self.chunk if self.resident is not None else None
        return part

    def probe(self, count: int = PROBE) -> Problem:
        """The same on a few samples, for checks: of batches, some of the first."""
        part = copy.copy(self)
        part.data = self.data.few(count)
        part._chunk = count  # all at once: to find out what a sample takes costs as much as a check
        return part

    def in_chunks(self, size: int) -> Problem:
        """The same with ``size`` samples evaluated at once; data given as batches keeps its own."""
        part = copy.copy(self)
        part._chunk = size
        return part

    def at(self, theta: Tensor | None = None) -> Problem:
        """The same with the BatchNorm statistics of ``theta``, fixed: what a derivative at θ is taken of."""
        if self.buffers_at is None:
            return self
        part = copy.copy(self)
        part._buffers, part.buffers_at = self.buffers_at(self.theta if theta is None else theta), None
        return part

    @property
    def regularised(self) -> bool:
        """Whether a penalty or weight decay is added to the mean loss."""
        return self.penalty is not None or self.weight_decay > 0

    def penalty_value(self, theta: Tensor) -> Tensor:
        """What is added to the mean loss at ``theta`` (P,), one number, differentiable."""
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
        """(mean loss, accuracy) at ``theta``, default the centre; sums in float64.

        Accuracy is the share of samples whose largest output is the target; NaN where the outputs, or their
        ``logits``, are not (B, classes) with integer targets (B,); see :func:`.correct`.
        """
        loss, right = (self.totals(theta) / self.samples).tolist()
        return loss, right

    def loss(self, theta: Tensor | None = None) -> float:
        """Mean loss at ``theta`` (P,), default the centre."""
        return self.evaluate(theta)[0]

    def accuracy(self, theta: Tensor | None = None) -> float:
        """Share of samples classified right; see :meth:`evaluate`."""
        return self.evaluate(theta)[1]

    def loss_and_gradient(
        self, theta: Tensor | None = None, *, seeded: bool = False, out: Tensor | None = None
    ) -> tuple[float, Tensor]:
        """(L, ∇L (P,)) at ``theta``, over the whole data; in the memory of ``out``, or in fresh memory.

        ``seeded``: a random model draws the numbers that a Hessian with randomness "seed" belongs to.
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
        """∇L (P,) at ``theta``, default the centre, over the whole data; as :meth:`loss_and_gradient`."""
        return self.loss_and_gradient(theta, seeded=seeded)[1]
