"""The data of a problem: where it lies, in which chunks it comes, and how much each sample weighs."""

from __future__ import annotations

import copy
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError
from landscape.core.memory import fits
from landscape.problem.batches import (
    STREAM_BATCH,
    HostStream,
    Stream,
    as_tensors,
    count_samples,
    is_resident,
    named_tensors,
    split,
    strided,
    take,
    tree_map,
)

# Samples for checks of the user's model and loss (our choice: few, so that they cost less than a hundredth of
# a contour).
PROBE = 12
# The activations of one chunk, saved for its backward pass. On 2 cores ResNet-18 evaluates fastest at 50 to
# 100 images of 50, 100, 200 and 400; this bound gives it 56.
ACTIVATION_BYTES = 2**28
# On a CPU the system clears the memory of larger chunks anew for each of them. LeNet-5 evaluates 1.7 times as
# fast with 585 images at once, which is this bound, as with 2,000. No fewer than SMALL_CHUNK samples for it,
# which then count more: two convolutions of 16 and 32 channels are 1.8 times as fast with 256 as with 1,455.
SMALL_BYTES, SMALL_CHUNK = 2**25, 256
# The largest relative difference between the checksums of two equal passes over batches: rounding of sums in
# another order (our choice: one changed pixel of 10,000 images is 1e-9).
CHECKSUM_TOLERANCE = 1e-12
# What NaN, infinity and its negative count in a checksum (our choice).
NUMBERS = (1.618, 1e9, -1e9)

# Targets that losses leave out: padding, PyTorch's and Hugging Face's default, masks of segmentations.
LEFT_OUT = (0, -100, -1, 255)
LISTED = "landscape.Problem(model, loss, list(data))"
# Of more numbers the most frequent one is not sought (our choice: a tenth of a second).
MAX_SORTED = 1 << 20


Terms = Callable[[Any, Any], Tensor]  # (x, y) -> (B,) float64 on the CPU: terms of the mean by sample


class Data:
    """The samples of a problem: on the device, or in batches that are moved there in turn.

    Args:
        data: as :class:`landscape.Problem` takes it.
        device, dtype: where the tensors go, and the precision of those of floating point.
        model_has_loss: the model computes its loss from the labels, and receives them.

    Attributes:
        samples: N, the number of samples.
        terms: the number of terms of the loss's mean that they contribute together.
        sample_terms: (N,) terms of each sample; None where all have the same number.
        resident: (x, y) on the device; None where the data comes in batches.
        own_batches: the user gave none, but a data set that is read in batches.
        mixes: the loss is no mean over samples: it is taken of all at once, or is the mean over the batches.
        leaf_inputs: inputs require gradients, in which model or loss differentiate.
        ragged: the targets of a sample have another shape in some batches than in others.
        divisible: the model takes a part of a batch; it does not of a graph.
        chunk_size: samples per chunk of resident data; None until the problem knows what its model can take.

    :meth:`weigh` is called once, before :meth:`chunks`.
    """

    def __init__(self, data: Any, device: torch.device, dtype: torch.dtype, model_has_loss: bool) -> None:
        self.device, self.dtype, self._model_has_loss = device, dtype, model_has_loss
        self.resident: tuple[Any, Any] | None = None
        self.batches: Iterable[Any] = ()
        self.mixes = self.leaf_inputs = self.ragged = False
        self.divisible = True
        self.sample_terms: Tensor | None = None
        self.chunk_size: int | None = None
        self.samples, self.terms = 0, 0.0
        self.checksum: Tensor | None = None  # of a pass over batches
        self._sums: list[Tensor] = []  # of each batch
        self._cache: dict[Any, Any] = {}  # the fingerprint, and what :meth:`some` picked, by count
        self.terms_in: Any = lambda x, y: torch.ones(count_samples(x, y, alike=False))
        self.own_batches = isinstance(data, Dataset)  # those of STREAM_BATCH samples
        data = batched(as_tensors(data))
        if is_resident(data):
            x, y = split(data, model_has_loss)
            whole = "" if isinstance(x, Tensor) else "landscape.Problem(model, loss, [data])"
            self.samples = count_samples(x, y, alike=True, remedy=whole)
            self.leaf_inputs = _require_gradients(x)
            every = [t for _, t in named_tensors((x, y))]
            size = sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for t in every)
            if fits(size, device):
                self.resident = self.place((x, y))
            else:
                self.batches = HostStream(x, y, self.samples)
        elif isinstance(data, Iterator) or not isinstance(data, Iterable):
            raise InputError(
                f"data: a {type(data).__name__} cannot be read, or only once; give (x, y) or batches",
                remedy=LISTED if isinstance(data, Iterator) else "",
            )
        else:
            self.batches = data
            self.samples = data.samples if isinstance(data, Stream) else 0

    def mix(self) -> None:
        """Take the loss of all resident samples at once, or as the mean over the batches."""
        self.mixes = True
        self.chunk_size = self.samples if self.resident is not None else None

    def weigh(self, terms_in: Terms) -> None:
        """Count the samples, and the terms of each by ``terms_in``. InputError without a sample."""
        self.terms_in = terms_in
        if self._whole is not None:
            x, y = self._whole
            self._weigh(terms_in(x, y) if self.samples else torch.zeros(0))
        elif isinstance(self.batches, Stream):
            parts = self.batches if self.batches.labels is None else [(self.batches.labels,) * 2]
            self._weigh(torch.cat([terms_in(x, y) for x, y in parts] or [torch.zeros(0)]))
        else:
            self._read(terms_in)
        if self.samples == 0:
            raise InputError("data: it holds no samples, at least one is needed")

    def check_terms(self, terms: float) -> None:
        """Raise InputError unless a target counts, by the number of ``terms``."""
        if not terms > 0:
            raise InputError("data: all its targets are left out of the loss, at least one must count")

    def _read(self, terms_in: Terms) -> None:
        """Count the samples and terms of the batches, and take their checksums."""
        self._sums, self.samples, self.terms, shapes = [], 0, 0.0, set()
        for x, y in self.pairs():
            self.samples += count_samples(x, y, alike=False)
            self.terms += float(terms_in(x, y).sum())
            self._sums.append(_checksum((x, y)))
            shapes.add(tuple(targets.shape[1:] for _, targets in named_tensors(y)))
        self.checksum = _total(self._sums) if self._sums else None
        self.ragged = len(shapes) > 1

    def second_pass(self, sums: list[Tensor]) -> Iterator[tuple[Any, Any]]:
        """The batches again, whose checksums go to ``sums``, for :meth:`compare`."""
        for pair in self.pairs():
            sums.append(_checksum(pair))
            yield pair

    def compare(self, again: list[Tensor], *, ordered: bool) -> None:
        """Raise InputError unless a second pass, with these checksums, gave the same samples.

        In whatever order and batches; with ``ordered`` each batch must be the same.
        """
        if len(self._sums) == len(again) and all(map(torch.equal, self._sums, again)):
            return
        if ordered:
            words = "data: its batches are others in each pass (shuffle=True?), which changes this loss"
            raise InputError(words, remedy=LISTED)
        assert self.checksum is not None
        second = _total([torch.zeros_like(self.checksum), *again])
        first = _total([torch.zeros_like(second), self.checksum])
        largest = torch.maximum(first[1], second[1])
        if not bool(((first - second).abs() <= CHECKSUM_TOLERANCE * largest).all()):
            batches = f"torch.utils.data.DataLoader(data, {STREAM_BATCH})" if self.own_batches else "data"
            why = _why_passes_differ(self.batches)
            raise InputError(
                f"data: two passes over its batches differ: {why}, or a list, which holds one draw",
                remedy=f"landscape.Problem(model, loss, list({batches}))",
            )

    @property
    def _whole(self) -> tuple[Any, Any] | None:
        """All samples at once, where they are tensors."""
        return (self.batches.x, self.batches.y) if isinstance(self.batches, HostStream) else self.resident

    @property
    def has_nan(self) -> bool:
        """Return whether a number in the data is NaN; False for a stream, which is not read for it."""
        if self.resident is not None:
            return bool(nan_places(*self.resident))
        return self.checksum is not None and bool(self.checksum[2].any())

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each of the batches, as they are given."""
        for batch in self.batches:
            yield split(as_tensors(batch), self._model_has_loss)

    def in_batches(self) -> str:
        """Code for the user's data in batches; of tensors, batches hold pairs to sixes."""
        if self._whole is None:
            return "list(data)"
        # The last one is as large as possible.
        size = max(range(480, 1200, 120), key=lambda size: self.samples % size or size)
        part = f"torch.utils._pytree.tree_map(lambda t: t[i : i + {size}], data)"
        return f"[{part} for i in range(0, {self.samples}, {size})]"

    def place(self, tree: Any) -> Any:
        """``tree`` on the device, its floating-point tensors in the problem's precision."""

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                raise InputError("data: it is on the device 'meta' and has no numbers; give it on another")
            floating = self.dtype if tensor.is_floating_point() else None
            tensor = tensor.clone() if tensor.is_inference() else tensor  # which no gradient passes
            return tensor.detach().to(self.device, floating)

        return tree_map(move, tree)

    def leaves(self, x: Any, y: Any) -> tuple[Any, Any]:
        """(x, y) for one pass; with ``leaf_inputs``, as leaves that require gradients.

        Physics-informed losses differentiate outputs in inputs.
        """
        if not self.leaf_inputs:
            return x, y
        fresh = {id(t): t.detach().requires_grad_() for _, t in named_tensors(x) if t.is_floating_point()}
        return tree_map(lambda tensor: fresh.get(id(tensor), tensor), (x, y))

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """(x, y) where each is one tensor and all samples weigh the same: what batched paths work on."""
        if self.resident is None or self.sample_terms is not None:
            return None
        x, y = self.resident
        return (x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else None

    def first(self, terms_in: Terms | None = None) -> tuple[Any, Any]:
        """The first two samples, or the first batch in which a target counts, on the device.

        ``terms_in``: as :meth:`weigh` takes it, before that is called.
        """
        self.terms_in = terms_in or self.terms_in
        if self.resident is not None:
            return take(self.resident, slice(2))
        batches = self.pairs()
        first = next(batches, None)
        if first is None:
            raise InputError("data: it holds no samples, at least one is needed")
        counted = (b for b in itertools.chain([first], batches) if float(self.terms_in(*b).sum()) > 0)
        x, y = next(counted, first)
        self.leaf_inputs |= _require_gradients(x)
        return self.place((x, y))

    def pick(self, x: Any, y: Any, count: int = PROBE) -> tuple[Any, Any]:
        """At most ``count`` samples for checks, on the device; ``x``, ``y``: what :meth:`first` gives.

        They come from all the data where it can be indexed, else from the first batch. Their targets are as
        different as possible, so that those which the loss treats differently are likely among them; one at
        least counts in the loss, where any does.
        A batch whose tensors are not all as long as it has samples is returned whole, as are all samples, or
        the first batch, of a loss that mixes them.
        """
        if self.mixes:
            return self.resident or (x, y)
        return self.some(x, y, count) or (x, y)

    def some(self, x: Any, y: Any, count: int = PROBE) -> tuple[Any, Any] | None:
        """The samples of :meth:`pick`; None for a batch that cannot be divided."""
        if self.indexed:
            if count not in self._cache:
                every = self._whole or (None, None)
                self._cache[count] = self._that_count(_different(every[1], self.samples, count), *every)
            return self._gather(self._cache[count])
        try:
            length = count_samples(x, y, alike=True)
        except LandscapeError:
            return None
        if not self.divisible or not [*named_tensors(x)]:
            return None
        return take((x, y), self._that_count(_different(y, length, count), x, y).to(self.device))

    def _that_count(self, picked: Tensor, x: Any, y: Any) -> Tensor:
        """The numbers ``picked`` among the samples (x, y), the last replaced where none of them counts."""
        terms = torch.ones(1) if y is None else self.terms_in(take(x, picked), take(y, picked))
        if not bool((terms > 0).any()):
            picked[-1] = self.terms_in(x, y).argmax()
        return picked

    def few(self, count: int = PROBE) -> Data:
        """The samples of :meth:`pick`, in one chunk."""
        x, y = self.pick(*self.first(), count)
        part = self.in_chunks(count)  # the bytes of a sample are not measured for so few
        few = part._holding(x, y, self.terms_in(x, y))
        if not self.indexed:
            few.resident, few.sample_terms, few.batches = None, None, [(x, y)]
        return few

    def _holding(self, x: Any, y: Any, terms: Tensor) -> Data:
        """The samples (x, y), on the device, with these ``terms`` (N,), in place of its own."""
        part = copy.copy(self)
        part._cache, part.checksum = {}, None
        part.resident, part.batches, part.samples = (x, y), (), len(terms)
        part._weigh(terms)
        return part

    def _weigh(self, terms: Tensor) -> None:
        """Take the ``terms`` of each sample (N,), as a number where all have the same."""
        self.terms = float(terms.sum())
        self.sample_terms = terms if bool((terms != terms[:1]).any()) else None

    def in_chunks(self, size: int) -> Data:
        """The same with ``size`` samples a chunk; data given as batches, or of a loss that mixes samples,
        keeps its own.
        """
        if self.mixes:
            return self
        part = copy.copy(self)
        part.chunk_size = size
        return part

    def to(self, dtype: torch.dtype) -> Data:
        """The same in another precision."""
        converted = copy.copy(self)
        converted.dtype = dtype
        if self.resident is not None:
            converted.resident = converted.place(self.resident)
        return converted

    def chunks(self, empty: bool = False) -> Iterator[tuple[Any, Any, float]]:
        """The data as (x, y, weight), on the device; every sample once, ``chunk_size`` at a time if resident.

        The weights of the chunks in the mean add up to ``samples``: they are numbers of samples, except where
        samples contribute unequal numbers of terms to the loss. A chunk without any term is left out, unless
        ``empty``.
        """
        done = 0
        for x, y in self.pieces():
            samples = count_samples(x, y, alike=False)
            terms = None if self.sample_terms is None else self.sample_terms[done : done + samples]
            if terms is None and not self.indexed:
                terms = self.terms_in(x, y)
            count = float(samples)
            if terms is not None:
                count = float(terms.sum()) * self.samples / max(self.terms, 1e-300)
            done += samples
            if count > 0 or empty:
                x, y = self.place((x, y))
                yield x, y, count

    def pieces(self) -> Iterator[tuple[Any, Any]]:
        """The batches as they are given, or ``chunk_size`` samples at a time if resident."""
        if self.resident is None:
            yield from self.pairs()
            return
        assert self.chunk_size is not None  # Problem.chunks sets it
        for i in range(0, self.samples, self.chunk_size):
            yield take(self.resident, slice(i, i + self.chunk_size))

    @property
    def indexed(self) -> bool:
        """Return whether each sample has a number, so that minibatches can be drawn."""
        return self.resident is not None or isinstance(self.batches, Stream)

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """(x, y) of the samples ``indices``, of any shape, repeats allowed; on the device, indices first."""
        self._check_mean()
        return self._gather(indices)

    def _check_mean(self) -> None:
        """Raise InputError for samples of a loss that mixes them: a part has another loss than the whole."""
        if self.mixes:
            raise InputError("data: the loss mixes its samples; give one that is a mean over the samples")

    def _gather(self, indices: Tensor) -> tuple[Any, Any]:
        flat = indices.flatten()
        if self.resident is not None:
            flat = flat.to(self.device)
            whole = tree_map(lambda t: t.index_select(0, flat), self.resident)
        elif isinstance(self.batches, Stream):
            whole = self.place(self.batches.gather(flat.cpu()))
        else:
            raise InputError("data: drawing minibatches needs (x, y) tensors, not an iterable of batches")
        return tree_map(lambda t: t.view(*indices.shape, *t.shape[1:]), whole)

    def subset(self, indices: Tensor | slice) -> Data:
        """The samples ``indices`` (repeats allowed; a slice copies nothing). Not of batches."""
        self._check_mean()
        part = copy.copy(self)
        part._cache = {}
        rows = indices if isinstance(indices, Tensor) else torch.arange(self.samples)[indices]
        part.samples = len(rows)
        if isinstance(indices, slice) and self.resident is not None:
            part.resident = take(self.resident, indices)
        elif isinstance(indices, slice) and isinstance(self.batches, Stream):
            part.batches = self.batches.part(indices)
        else:
            part.resident = self._gather(rows)
        part.terms = self.terms * part.samples / self.samples
        if self.sample_terms is not None:
            part.sample_terms = self.sample_terms[indices if isinstance(indices, slice) else indices.cpu()]
            part.terms = float(part.sample_terms.sum())
        return part._counted()

    def only(self, x: Any, y: Any) -> Data:
        """The samples (x, y), on the device, in place of its own: a minibatch, weighted as in training."""
        self._check_mean()
        count_samples(x, y, alike=True)
        return self._holding(x, y, self.terms_in(x, y))._counted()

    def _counted(self) -> Data:
        """Itself; InputError where it is samples of which no target counts."""
        if self.samples and not self.terms > 0:
            raise InputError(f"batch: no target of {self.samples} samples counts in the loss; draw more")
        return self

    def fingerprint(self) -> str:
        """A CRC-32 of the tensors, or the checksums of the batches: other data has another fingerprint.

        As the checksum of a file, it detects accidents (another split, order or precision), not forgery.
        """
        if self.checksum is not None:
            return " ".join(f"{value:.17g}" for value in self.checksum.flatten().tolist())
        if self.resident is None:
            return f"{self.samples} samples of a stream"
        if "fingerprint" not in self._cache:
            digest = 0
            x, y = self.resident
            for name, tensor in (*named_tensors(x, "x"), *named_tensors(y, "y")):
                digest = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
                rows = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                digest = zlib.crc32(rows.numpy().data, digest)
            self._cache["fingerprint"] = f"{digest:08x}"
        return str(self._cache["fingerprint"])


def _require_gradients(x: Any) -> bool:
    """Return whether any of the inputs requires gradients."""
    return any(tensor.requires_grad for _, tensor in named_tensors(x))


def nan_places(x: Any, y: Any) -> str:
    """The places of NaN in some samples, in words; "" where there is none."""
    every = (*named_tensors(x, "inputs"), *named_tensors(y, "targets"))
    sums = ((name, strided(t).sum()) for name, t in every if t.is_floating_point())
    return ", ".join(name for name, total in sums if bool(total.isnan()))


def not_a_number(x: Any, y: Any, value: float, origin: str) -> InputError:
    """The refusal of the samples (x, y) of an ``origin``, whose loss is NaN or infinite."""
    where = nan_places(x, y)
    number = "NaN" if math.isnan(value) else f"{value:g}"
    cause = f"NaN in {where} of {origin}, so that its loss" if where else f"the loss of {origin}"
    return InputError(
        f"data: {cause} is {number}; leave such samples out, mask them, or give terms=, 0 for them"
    )


def batched(data: Any) -> Any:
    """``data``, or batches of a data set that gives its samples one at a time."""
    return DataLoader(data, batch_size=STREAM_BATCH) if isinstance(data, Dataset) else data


def _why_passes_differ(batches: Iterable[Any]) -> str:
    """The likely cause, and what to give instead; another order of the samples alone is no difference."""
    cut = isinstance(batches, DataLoader) and batches.drop_last and isinstance(batches.sampler, RandomSampler)
    if cut and len(batches.sampler) % batches.batch_size:  # type: ignore[attr-defined]
        return "drop_last=True leaves other samples out of each; give a loader with drop_last=False"
    return "its samples are drawn anew (random augmentation?); give the data set without augmentation"


def _checksum(tree: Any) -> Tensor:
    """(3, K) float64: K weighted sums over the numbers of a batch, the sums of their magnitudes, and of NaN.

    NaN and infinity count as numbers. A number's weight depends on its place in its sample, not on the
    sample's place: the sum over all batches is the same in whatever order they come. The square tells samples
    whose numbers were exchanged.
    """
    sums = []
    for _, tensor in named_tensors(tree):
        rows = double(strided(tensor.detach())).cpu()
        rows = rows.flatten(1) if rows.dim() > 1 else rows.reshape(-1, 1)
        missing = rows.isnan().sum()
        rows = rows.nan_to_num(*NUMBERS)
        weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).sqrt().frac() + 0.5
        products = rows @ weights
        for part in (products, products.square()):
            sums.append(torch.stack((part.sum(), part.abs().sum(), missing)))
    return torch.stack(sums, 1) if sums else torch.zeros(3, 1, dtype=torch.float64)


def _total(sums: Sequence[Tensor]) -> Tensor:
    """The sum of checksums of batches, which may hold numbers of tensors of their own."""
    most = max(sums_of_batch.shape[1] for sums_of_batch in sums)
    padded = [F.pad(sums_of_batch, (0, most - sums_of_batch.shape[1])) for sums_of_batch in sums]
    return torch.stack(padded).sum(0)


def _different(y: Any, samples: int, count: int) -> Tensor:
    """The numbers of at most ``count`` of the samples, some of which have targets unlike the others'."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))[:count]
    picked = [0, samples - 1] if samples > 1 else [0]
    for _, targets in named_tensors(y):
        if targets.is_floating_point() or targets.is_complex() or not targets.numel():
            continue
        rows = targets.detach().cpu().reshape(samples, -1)
        for value in notable(rows):
            frequency = (rows == value).sum(1)
            picked += [int(frequency.argmax()), int(frequency.argmin())]
        if rows.shape[1] == 1 and rows.dtype != torch.bool:
            classes = {int(v): i for i, v in enumerate(rows[: 64 * count, 0].tolist())}
            picked += list(classes.values())
    unique = list(dict.fromkeys([*picked, *order.tolist()]))[:count]
    return torch.tensor(unique)


def notable(targets: Tensor) -> list[float]:
    """The values among targets that a loss may leave out: the usual ones; of integers the extremes, and what
    sequences end with; of other numbers the most frequent.
    """
    values = [*map(float, LEFT_OUT)]
    if targets.is_floating_point() and 0 < targets.numel() <= MAX_SORTED:
        values.append(float(targets.flatten().mode().values))
    if targets.numel() and not targets.is_floating_point():
        values += [float(targets.min()), float(targets.max())]
        if targets.dim() > 1:
            values.append(float(targets.flatten(1)[:, -1].mode().values))
    return [v for v in dict.fromkeys(values) if bool((targets == v).any())]
