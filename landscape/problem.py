"""A model, a loss and data: the one thing that analysis works on."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from landscape.batches import (
    HostStream,
    Stream,
    call,
    check_labels,
    correct,
    count_samples,
    is_resident,
    label_terms,
    loss_terms,
    named_tensors,
    output_loss,
    split,
    take,
    tree_map,
)
from landscape.memory import SavedBytes, fits
from landscape.options import InputError
from landscape.vector import Layout, gradients

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
        model: any module; it is copied, put in eval mode, and never changed. A dict x is passed to it as
            ``model(**x)``, a tuple or list as ``model(*x)``, anything else as ``model(x)``.
        loss: ``loss(outputs, targets)``, the *mean* over the samples it is given; None where the model's
            output carries it, as ``.loss`` or ["loss"] (Hugging Face models).
        data: ``(x, y)``, or an iterable (not an iterator) of such batches. x and y are tensors with the
            samples first, or tuples, lists and dicts of these, nested at will; what is no tensor is passed on
            as it is. In place of a pair, one dict: its "labels" are the targets (the whole dict where it has
            none), and the model is given them only where ``loss`` is None. Data that is a dict, a tuple of
            two or a list of two tensors is moved to the device once, or in parts if it does not fit there;
            of anything else each batch in turn. Minibatches can be drawn from such data, and from a
            :class:`landscape.batches.Stream`, whose samples all weigh the same.
        theta: weights (P,) to centre on; default: the model's own.
        device, dtype: default: those of the model's first parameter.
        terms: ``terms(targets)`` gives (B,) how many terms of the mean each sample brings. Default: one each;
            for cross-entropy and negative log-likelihood of PyTorch, as many as it has targets other than
            ``ignore_index``, or the sum of their class weights; for a loss of the model's own with integer
            "labels", as many as these are not −100, the first of each sequence left out if the loss does not
            depend on it (causal language models; two passes over the first samples tell).

    θ is the flat vector of the model's trainable parameters (``layout`` says which slice is which). Chunks
    and batches weigh by their terms, so that a short last one counts for as much as it holds.
    Raises InputError for weights that are not finite, no parameters, no samples, tensors of unequal length,
    or an exhausted iterator.
    """

    bn = "center"  # whose statistics BatchNorm uses (landscape.batchnorm)
    bn_samples = 0  # how many samples BatchNorm's statistics come from, 0: its buffers (landscape.batchnorm)

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
    ) -> None:
        self.layout = Layout.of(model)
        if self.layout.size == 0:
            raise InputError("model: it has no trainable parameters, at least one is needed")
        first = next(p for p in model.parameters() if p.requires_grad)
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.model = copy.deepcopy(model).to(self.device, self.dtype).eval()
        for layer in self.model.modules():
            if isinstance(layer, nn.RNNBase) and not layer.dropout:  # the same function; but cuDNN's backward
                layer.train()  # pass is there in training mode only
        self.criterion = output_loss if loss is None else loss
        named = dict(self.model.named_parameters())
        own = self.layout.flatten({s.name: named[s.name].detach() for s in self.layout.slots})
        self.theta = own if theta is None else theta.detach().to(self.device, self.dtype)
        if self.theta.shape != own.shape:
            raise InputError(f"theta: shape {tuple(self.theta.shape)}, the model needs {tuple(own.shape)}")
        if not bool(torch.isfinite(self.theta).all()):
            bad = int((~torch.isfinite(self.theta)).sum())
            raise InputError(f"weights: {bad} of {self.layout.size} are NaN or infinite, all must be finite")
        self._chunk: int | None = None
        self._terms_of, self._shifted = terms, False
        # (x, y) on the device, and how many terms of the loss each sample brings (None: all the same number).
        self.resident: tuple[Any, Any] | None = None
        self._terms: Tensor | None = None
        self._batches: Iterable[Any] = ()
        self.samples, self.terms = 0, 0.0  # terms: how many the loss is the mean of
        if is_resident(data):
            x, y = self._split(data)
            self.samples = count_samples(x, y, alike=True)
            if fits(self._size(x) + self._size(y), self.device):
                self.resident = self._place(x), self._place(y)
            else:
                self._batches = HostStream(x, y, self.samples)
            if self.samples > 0:
                self._shifted = self._is_shifted(*self._first())
                each = self._terms_in(x, y)
                self.terms = float(each.sum())
                self._terms = each if bool((each != each[0]).any()) else None
        elif isinstance(data, Iterator) or not isinstance(data, Iterable):
            raise InputError(
                f"data: a {type(data).__name__} is no iterable, or an iterator, which can be read only once; "
                "give (x, y), a dict, a list of batches or a DataLoader"
            )
        elif isinstance(data, Stream):
            self._batches, self.samples, self.terms = data, data.samples, float(data.samples)
        else:
            self._batches = data
            for batch in data:
                x, y = self._split(batch)
                if self.samples == 0:
                    self._shifted = self._is_shifted(self._place(x), self._place(y))
                self.samples += count_samples(x, y, alike=False)
                self.terms += float(self._terms_in(x, y).sum())
        if self.samples == 0:
            raise InputError("data: it holds no samples, at least one is needed")
        if not self.terms > 0:
            raise InputError("data: all its targets are left out of the loss, at least one must count")

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """(x, y) where each is one tensor and all samples weigh the same: what batched paths work on."""
        if self.resident is None or self._terms is not None:
            return None
        x, y = self.resident
        return (x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else None

    def _split(self, batch: Any) -> tuple[Any, Any]:
        return split(batch, self.criterion is output_loss)

    def _place(self, tree: Any) -> Any:
        def place(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

        return tree_map(place, tree)

    def _size(self, tree: Any) -> int:
        """Bytes that the tensors of ``tree`` take on the device."""
        tensors = (tensor for _, tensor in named_tensors(tree))
        return sum(t.numel() * (self.dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors)

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

    def _first(self) -> tuple[Any, Any]:
        """The first two samples, or the first batch, on the device."""
        if self.resident is not None:
            return take(self.resident[0], slice(2)), take(self.resident[1], slice(2))
        x, y = self._split(next(iter(self._batches)))
        return self._place(x), self._place(y)

    def check_fit(self) -> None:
        """Raise InputError, in one line, unless model, loss and the first samples fit together.

        All labels of data that lies on the device must be classes that the model's outputs have.
        """
        self._try(*self._first(), labels=self.resident[1] if self.resident else None)

    @torch.no_grad()
    def _try(self, x: Any, y: Any, labels: Any = None) -> None:
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
        return call(self.model, weights, x)

    def outputs(self, theta: Tensor, x: Any) -> Any:
        """The model's outputs at weights ``theta`` (P,), differentiable in both."""
        return self.call(self.layout.views(theta), x)

    @functools.cached_property
    def sample_bytes(self) -> int:
        """Bytes that one sample keeps for its backward pass; a forward pass alone holds less at a time."""
        assert self.resident is not None
        x, y = self._first()
        leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(self.theta).items()}
        saved = SavedBytes(besides=leaves.values())
        with torch.enable_grad(), saved:
            self.criterion(self.call(leaves, x), y)
        return max(1, saved.bytes_ // min(2, self.samples))

    @property
    def chunk(self) -> int:
        """Samples evaluated at once, from the bytes one sample keeps for its backward pass."""
        if self._chunk is None:
            self._chunk = max(1, min(MAX_CHUNK, ACTIVATION_BYTES // self.sample_bytes))
        return self._chunk

    def chunks(self) -> Iterator[tuple[Any, Any, float]]:
        """The data as (x, y, count), on the device; every sample once.

        The counts are what the chunks weigh in the mean, and add up to ``samples``: numbers of samples, but
        where these bring unequal numbers of terms to the loss. A chunk with no term is left out.
        """
        done = 0
        for x, y in self._parts():
            if self.indexed:
                part = slice(done, done + count_samples(x, y, alike=False))
                done, count = part.stop, float(part.stop - part.start)
                if self._terms is not None:
                    count = float(self._terms[part].sum()) * self.samples / self.terms
            else:
                count = float(self._terms_in(x, y).sum()) * self.samples / self.terms
            if count > 0:
                yield self._place(x), self._place(y), count

    def _parts(self) -> Iterator[tuple[Any, Any]]:
        if self.resident is None:
            yield from (self._split(batch) for batch in self._batches)
            return
        for i in range(0, self.samples, self.chunk):
            part = slice(i, min(i + self.chunk, self.samples))
            yield take(self.resident[0], part), take(self.resident[1], part)

    @property
    def indexed(self) -> bool:
        """Whether any sample can be had by its number, so that minibatches can be drawn."""
        return self.resident is not None or isinstance(self._batches, Stream)

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """(x, y) of the samples ``indices``, of any shape, repeats allowed; on the device, indices first."""
        flat = indices.flatten()
        if self.resident is not None:
            flat = flat.to(self.device)
            whole = tree_map(lambda t: t.index_select(0, flat), self.resident)
        elif isinstance(self._batches, Stream):
            whole = self._place(self._batches.gather(flat.cpu()))
        else:
            raise InputError("data: drawing minibatches needs (x, y) tensors, not an iterable of batches")
        x, y = tree_map(lambda t: t.view(*indices.shape, *t.shape[1:]), whole)
        return x, y

    def subset(self, indices: Tensor | slice) -> Problem:
        """The same on the samples ``indices`` (repeats allowed; a slice copies nothing). Not of batches."""
        part = copy.copy(self)
        if isinstance(indices, Tensor):
            part.resident = self.gather(indices)
            part.samples = len(indices)
        elif self.resident is not None:
            part.resident = take(self.resident[0], indices), take(self.resident[1], indices)
            part.samples = count_samples(*part.resident, alike=False)
        elif isinstance(self._batches, Stream):
            part._batches = self._batches.part(indices)
            part.samples = part._batches.samples
        else:
            raise InputError("data: drawing minibatches needs (x, y) tensors, not an iterable of batches")
        if self.resident is not None:
            part._chunk = self.chunk
        part.terms = self.terms * part.samples / self.samples
        if self._terms is not None:
            part._terms = self._terms[indices if isinstance(indices, slice) else indices.cpu()]
            part.terms = float(part._terms.sum())
        return part

    @torch.no_grad()
    def totals(self, theta: Tensor | None = None) -> Tensor:
        """(2,) float64, on the device: the sums that :meth:`evaluate` divides by the number of samples.

        Nothing here waits for the device.
        """
        theta = self.theta if theta is None else theta
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for x, y, count in self.chunks():
            outputs = self.outputs(theta, x)
            total[0] += self.criterion(outputs, y).double() * count
            total[1] += correct(outputs, y)
        return total

    def evaluate(self, theta: Tensor | None = None) -> tuple[float, float]:
        """(mean loss, accuracy) at ``theta``, default the centre; sums in float64.

        Accuracy is the share of samples whose largest output is the target; NaN where the outputs, or their
        ``logits``, are not (B, classes) with integer targets (B,).
        """
        loss, right = (self.totals(theta) / self.samples).tolist()
        return loss, right

    def loss(self, theta: Tensor | None = None) -> float:
        """Mean loss at ``theta`` (P,), default the centre."""
        return self.evaluate(theta)[0]

    def accuracy(self, theta: Tensor | None = None) -> float:
        """Share of samples classified right at ``theta``; see :meth:`evaluate`."""
        return self.evaluate(theta)[1]

    def loss_and_gradient(
        self, theta: Tensor | None = None, *, seeded: bool = False, out: Tensor | None = None
    ) -> tuple[float, Tensor]:
        """(L, ∇L (P,)) at ``theta``, over the whole data; in the memory of ``out``, or in fresh memory.

        ``seeded``: a random model draws the numbers that a Hessian with randomness "seed" belongs to.
        """
        theta = self.theta if theta is None else theta
        leaves = {k: v.detach().requires_grad_() for k, v in self.layout.views(theta).items()}
        total, gradient = 0.0, torch.empty_like(theta) if out is None else out
        for i, (x, y, count) in enumerate(self.chunks()):
            with fixed_randomness(self, i if seeded else None):
                value = self.criterion(self.call(leaves, x), y) * (count / self.samples)
            parts = gradients(value, list(leaves.values()))
            for view, part in zip(self.layout.views(gradient).values(), parts, strict=True):
                view.copy_(part) if i == 0 else view.add_(part)
            total += float(value.detach())
        return total, gradient

    def gradient(self, theta: Tensor | None = None, *, seeded: bool = False) -> Tensor:
        """∇L (P,) at ``theta``, default the centre, over the whole data; as :meth:`loss_and_gradient`."""
        return self.loss_and_gradient(theta, seeded=seeded)[1]


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
