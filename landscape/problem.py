"""A model, a loss and data: the one thing that analysis works on."""

from __future__ import annotations

import contextlib
import copy
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from landscape.options import InputError
from landscape.vector import Layout

Loss = Callable[[Any, Any], Tensor]

# Samples evaluated at once, at most. Measured on 2 cores with a 784-50-50-10 MLP: 1,000 to 10,000 lie within
# 10% of each other, 2,000 is the fastest. Large networks are bounded by ACTIVATION_BYTES instead.
MAX_CHUNK = 2000
# What one chunk may keep for its backward pass. On 2 cores ResNet-18 evaluates fastest at 50 to 100 images of
# 50, 100, 200 and 400; this bound gives it 56.
ACTIVATION_BYTES = 2**28
# What to do with a model whose forward pass is random even in eval mode.
RANDOMNESS = ("refuse", "seed")


class Problem:
    """L(θ) = mean over the data of loss(model_θ(x), y), for any ``nn.Module``.

    Args:
        model: any module; it is copied, put in eval mode, and never changed.
        loss: ``loss(outputs, targets)``, the *mean* over the samples it is given.
        data: ``(x, y)`` tensors with the samples first, or an iterable (not an iterator) of such batches.
            Tensors are moved to the device once; batches of unequal size are weighted by their samples.
        theta: weights (P,) to centre on; default: the model's own.
        device, dtype: default: those of the model's first parameter.

    θ is the flat vector of the model's trainable parameters (``layout`` says which slice is which).
    Raises InputError for weights that are not finite, no parameters, no samples, or an exhausted iterator.
    """

    bn_samples = 0  # how many samples BatchNorm's statistics come from, 0: its buffers (landscape.batchnorm)

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: tuple[Tensor, Tensor] | Iterable[tuple[Any, Any]],
        *,
        theta: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.layout = Layout.of(model)
        if self.layout.size == 0:
            raise InputError("model: it has no trainable parameters, at least one is needed")
        first = next(p for p in model.parameters() if p.requires_grad)
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.model = copy.deepcopy(model).to(self.device, self.dtype).eval()
        self.criterion = loss
        named = dict(self.model.named_parameters())
        own = self.layout.flatten({s.name: named[s.name].detach() for s in self.layout.slots})
        self.theta = own if theta is None else theta.detach().to(self.device, self.dtype)
        if self.theta.shape != own.shape:
            raise InputError(f"theta: shape {tuple(self.theta.shape)}, the model needs {tuple(own.shape)}")
        if not bool(torch.isfinite(self.theta).all()):
            bad = int((~torch.isfinite(self.theta)).sum())
            raise InputError(f"weights: {bad} of {self.layout.size} are NaN or infinite, all must be finite")
        self.tensors: tuple[Tensor, Tensor] | None = None
        self._batches: Iterable[tuple[Any, Any]] = ()
        if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(d, Tensor) for d in data):
            x, y = typing.cast(tuple[Tensor, Tensor], data)
            if len(x) != len(y):
                raise InputError(f"data: {len(x)} inputs but {len(y)} targets, there must be one for each")
            self.tensors = (self._place(x), self._place(y))
            self.samples = len(y)
        else:
            if isinstance(data, Iterator):
                raise InputError(
                    "data: an iterator can be read only once; give tensors, a list or a DataLoader"
                )
            self._batches = typing.cast(Iterable[tuple[Any, Any]], data)
            self.samples = sum(len(y) for _, y in self._batches)
        if self.samples == 0:
            raise InputError("data: it holds no samples, at least one is needed")
        self._chunk: int | None = None

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def outputs(self, theta: Tensor, x: Any) -> Any:
        """The model's outputs at weights ``theta`` (P,), differentiable in both."""
        return functional_call(self.model, self.layout.views(theta), (x,))

    @property
    def chunk(self) -> int:
        """Samples evaluated at once, from the bytes one sample keeps for its backward pass."""
        if self._chunk is None:
            assert self.tensors is not None
            x, y = self.tensors
            leaves = {k: v.clone().requires_grad_() for k, v in self.layout.views(self.theta).items()}
            saved = SavedBytes(besides=leaves.values())
            with torch.enable_grad(), saved:
                self.criterion(functional_call(self.model, leaves, (x[:2],)), y[:2])
            per_sample = max(1, saved.bytes_ // min(2, len(y)))
            self._chunk = max(1, min(MAX_CHUNK, ACTIVATION_BYTES // per_sample))
        return self._chunk

    def chunks(self) -> Iterator[tuple[Any, Any, int]]:
        """The data as (x, y, number of samples), on the device; every sample once."""
        if self.tensors is not None:
            x, y = self.tensors
            for i in range(0, self.samples, self.chunk):
                yc = y[i : i + self.chunk]
                yield x[i : i + self.chunk], yc, len(yc)
        else:
            for xb, yb in self._batches:
                yield self._place(xb), self._place(yb), len(yb)

    def subset(self, indices: Tensor | slice) -> Problem:
        """The same model and loss on the samples ``indices`` (repeats allowed; a slice copies nothing).

        Needs tensor data.
        """
        if self.tensors is None:
            raise InputError("data: drawing minibatches needs (x, y) tensors, not an iterable of batches")
        part = copy.copy(self)
        part.tensors = (self.tensors[0][indices], self.tensors[1][indices])
        part.samples = len(part.tensors[1])
        part._chunk = self.chunk
        return part

    @torch.no_grad()
    def evaluate(self, theta: Tensor | None = None) -> tuple[float, float]:
        """(mean loss, accuracy) at ``theta``, default the centre; sums in float64.

        Accuracy is the share of samples whose largest output is the target; NaN where the outputs are not
        (B, classes) with integer targets (B,).
        """
        theta = self.theta if theta is None else theta
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right = torch.zeros((), dtype=torch.float64, device=self.device)
        for x, y, count in self.chunks():
            outputs = self.outputs(theta, x)
            loss += self.criterion(outputs, y).double() * count
            right += correct(outputs, y)
        return float(loss) / self.samples, float(right) / self.samples

    def loss(self, theta: Tensor | None = None) -> float:
        """Mean loss at ``theta`` (P,), default the centre."""
        return self.evaluate(theta)[0]

    def accuracy(self, theta: Tensor | None = None) -> float:
        """Share of samples classified right at ``theta``; see :meth:`evaluate`."""
        return self.evaluate(theta)[1]

    def loss_and_gradient(self, theta: Tensor | None = None) -> tuple[float, Tensor]:
        """(L, ∇L (P,)) at ``theta``, over the whole data."""
        theta = self.theta if theta is None else theta
        leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(theta).items()}
        total, gradient = 0.0, torch.zeros_like(theta)
        for x, y, count in self.chunks():
            value = self.criterion(functional_call(self.model, leaves, (x,)), y) * (count / self.samples)
            parts = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            for view, part in zip(self.layout.views(gradient).values(), parts, strict=True):
                view += part
            total += float(value.detach())
        return total, gradient

    def gradient(self, theta: Tensor | None = None) -> Tensor:
        """∇L (P,) at ``theta``, default the centre, over the whole data."""
        return self.loss_and_gradient(theta)[1]


def correct(outputs: Any, targets: Any) -> Tensor:
    """How many of (B, classes) ``outputs`` have their largest entry at the target; NaN if not such a task."""
    classes = isinstance(outputs, Tensor) and outputs.dim() == 2 and isinstance(targets, Tensor)
    if not classes or targets.dim() != 1 or targets.is_floating_point():
        return torch.tensor(torch.nan, dtype=torch.float64)
    right: Tensor = (outputs.argmax(1) == targets).sum().double()
    return right


@contextlib.contextmanager
def fixed_randomness(problem: Problem, seed: int | None) -> Iterator[None]:
    """Random numbers drawn inside come from ``seed``, and PyTorch's own state is as before afterwards.

    None leaves everything as it is.
    """
    if seed is None:
        yield
        return
    devices = [problem.device] if problem.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def check_deterministic(problem: Problem, theta: Tensor | None = None) -> None:
    """Raise InputError if two evaluations at one θ on one chunk of data differ: L is then no function of θ.

    (Eval mode stops dropout modules, but not ``F.dropout`` left on, or noise that a model adds itself.)
    Differences of rounding size, as from atomic additions on a GPU, are let through.
    """
    theta = problem.theta if theta is None else theta
    x, y, _ = next(iter(problem.chunks()))
    seen = []
    for _ in range(2):
        outputs = problem.outputs(theta, x)
        seen.append((outputs if isinstance(outputs, Tensor) else None, problem.criterion(outputs, y)))
    for first, second in zip(*seen, strict=True):
        if first is None:
            continue
        rounding = 100 * torch.finfo(problem.dtype).eps * float(first.abs().max())
        if not torch.allclose(first, second, rtol=0, atol=rounding, equal_nan=True):
            raise InputError(
                "model: its outputs are random even in eval mode, so that its loss has no Hessian; make it "
                "deterministic, or use randomness='seed' for the same random numbers at each pass"
            )


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward passes recorded inside the block.

    Tensors that share memory with ``besides`` (the parameters, which are there anyway) do not count.
    """

    def __init__(self, besides: Iterable[Tensor] = ()) -> None:
        self.bytes_ = 0
        seen = {tensor.data_ptr() for tensor in besides}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self.bytes_ += tensor.nbytes  # not its storage's: a chunk is a view of the whole data
            return tensor

        super().__init__(pack, lambda tensor: tensor)
