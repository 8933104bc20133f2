"""The data of a problem: its place, its division into chunks, and the weight of each sample."""

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
# The most bytes of activations that a chunk saves for its backward pass. On 2 cores ResNet-18 evaluates
# fastest with 50 to 100 images at once (of 50, 100, 200 and 400); with this limit it has 56.
ACTIVATION_BYTES = 2**28
# The most samples that are evaluated at once. On 2 cores with a 784-50-50-10 MLP, the times for 1,000 to
# 10,000 differ by 10%, and 2,000 is the fastest. For large networks ACTIVATION_BYTES is the limit.
MAX_CHUNK = 2000
# The limit on CPUs, where the system clears the memory of each larger chunk again. LeNet-5 evaluates 1.7
# times as fast with 585 images at once, by this limit, as with 2,000. A chunk has at least SMALL_CHUNK
# samples: two convolutions of 16 and 32 channels are 1.8 times as fast with 256 samples as with 1,455.
SMALL_BYTES, SMALL_CHUNK = 2**25, 256
# The largest relative difference between the checksums of two equal passes over batches: rounding of sums in
# another order (our choice: one changed pixel of 10,000 images is 1e-9).
CHECKSUM_TOLERANCE = 1e-12
# The numbers in place of NaN, infinity and −infinity in a checksum (our choice).
NUMBERS = (1.618, 1e9, -1e9)

# Targets that losses leave out: padding, PyTorch's and Hugging Face's default, masks of segmentations.
LEFT_OUT = (0, -100, -1, 255)
LISTED = "landscape.Problem(model, loss, list(data))"
# The most targets of which the most frequent one is determined (our choice: it takes a tenth of a second).
MAX_SORTED = 1 << 20


Terms = Callable[[Any, Any], Tensor]  # (x, y) -> (B,) float64 on the CPU: the terms of the mean by sample


class Data:
    """The samples of a problem: on the device, or in batches that are moved there one by one.

    :meth:`count_terms` is called once, before :meth:`chunks`.

    Args:
        data: the data, as for :class:`landscape.Problem`.
        device, dtype: the device of the tensors, and the precision of floating-point tensors.
        model_has_loss: whether the model computes its loss from the labels, and so receives them.

    Attributes:
        samples: N, the number of samples.
        terms: the number of terms that all samples contribute to the mean of the loss.
        sample_terms: (N,) the terms of each sample; None if all have the same number.
        resident: (x, y) on the device; None if the data comes in batches.
        is_dataset: whether the user gave a torch Dataset, of which ``batched`` makes batches.
        loss_mixes_samples: whether the loss is no mean over samples: it is the loss of all samples at once,
            or the mean of the losses of the batches.
        input_gradients: whether model or loss differentiate by the inputs, which must then require gradients.
        ragged: whether the shapes of targets differ between batches.
        divisible: whether the model accepts a part of a batch, as a model of a whole graph does not.
        chunk_size: the samples per chunk of resident data; None before the problem has measured its model.
    """

    def __init__(self, data: Any, device: torch.device, dtype: torch.dtype, model_has_loss: bool) -> None:
        self.device, self.dtype, self._model_has_loss = device, dtype, model_has_loss
        self.resident: tuple[Any, Any] | None = None
        self.batches: Iterable[Any] = ()
        self.loss_mixes_samples = self.input_gradients = self.ragged = False
        self.divisible = True
        self.sample_terms: Tensor | None = None
        self.chunk_size: int | None = None
        self.samples, self.terms = 0, 0.0  # terms can be sums of classes' weights, which are no integers
        self.checksum: Tensor | None = None  # the checksum of a pass over all batches
        self._sums: list[Tensor] = []  # the checksum of each batch
        # Key "fingerprint": the text of the fingerprint. A number as key: the indices of that many samples,
        # as pick_if_divisible() has chosen them.
        self._cache: dict[Any, Any] = {}
        # The number of terms of each sample: 1, until count_terms() sets another function.
        self.terms_in: Any = lambda x, y: torch.ones(count_samples(x, y))
        self.is_dataset = isinstance(data, Dataset)
        data = batched(as_tensors(data))
        if is_resident(data):
            x, y = split(data, model_has_loss)
            # Inputs of several tensors may be the nodes and edges of one graph, which differ in number. The
            # InputError recommends to give this graph as a list of one batch.
            remedy = "" if isinstance(x, Tensor) else "landscape.Problem(model, loss, [data])"
            self.samples = count_samples(x, y, equal_lengths=True, remedy=remedy)
            self.input_gradients = _any_requires_gradients(x)
            device_bytes = 0
            for _, tensor in named_tensors((x, y)):
                device_dtype = dtype if tensor.is_floating_point() else tensor.dtype
                device_bytes += tensor.numel() * device_dtype.itemsize
            if fits(device_bytes, device):
                self.resident = self.place((x, y))
            else:
                self.batches = HostStream(x, y, self.samples)
        elif isinstance(data, Iterator) or not isinstance(data, Iterable):
            is_iterator = isinstance(data, Iterator)
            reason, remedy = ("can be read only once", LISTED) if is_iterator else ("cannot be read", "")
            raise InputError(f"data: a {type(data).__name__} {reason}; give (x, y) or batches", remedy=remedy)
        else:
            self.batches = data
            self.samples = data.samples if isinstance(data, Stream) else 0

    def mix(self) -> None:
        """Let the loss be that of all resident samples at once, or the mean of the batches' losses."""
        self.loss_mixes_samples = True
        self.chunk_size = self.samples if self.resident is not None else None

    def count_terms(self, terms_in: Terms) -> None:
        """Count the samples, and the terms of each by ``terms_in``; raise InputError if there are none."""
        self.terms_in = terms_in
        if self._whole is not None:
            x, y = self._whole
            self._set_terms(terms_in(x, y) if self.samples else torch.zeros(0))
        elif isinstance(self.batches, Stream):
            labels = self.batches.labels  # the terms depend on targets only
            batches = self.batches if labels is None else [(labels, labels)]
            self._set_terms(torch.cat([terms_in(x, y) for x, y in batches] or [torch.zeros(0)]))
        else:
            self._read(terms_in)
        if self.samples == 0:
            raise InputError("data: it holds no samples, at least one is needed")

    def check_terms(self, terms: float) -> None:
        """Raise InputError unless the number of ``terms`` is above 0."""
        if not terms > 0:
            raise InputError("data: all its targets are left out of the loss, at least one must count")

    def _read(self, terms_in: Terms) -> None:
        """Count the samples and terms of the batches, and compute their checksums."""
        self._sums, self.samples, self.terms, shapes = [], 0, 0.0, set()
        for x, y in self.pairs():
            self.samples += count_samples(x, y)
            self.terms += float(terms_in(x, y).sum())
            self._sums.append(_checksum((x, y)))
            shapes.add(tuple(targets.shape[1:] for _, targets in named_tensors(y)))
        self.checksum = _total(self._sums) if self._sums else None
        self.ragged = len(shapes) > 1

    def second_pass(self, sums: list[Tensor]) -> Iterator[tuple[Any, Any]]:
        """Yield the batches again, and append their checksums to ``sums``, for :meth:`compare`."""
        for pair in self.pairs():
            sums.append(_checksum(pair))
            yield pair

    def compare(self, again: list[Tensor], *, ordered: bool) -> None:
        """Raise InputError unless a second pass has the same samples, by the checksums of its batches.

        Their order and batches may differ, except if ``ordered``: then each batch must be the same.
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
            batches = f"torch.utils.data.DataLoader(data, {STREAM_BATCH})" if self.is_dataset else "data"
            why = _why_passes_differ(self.batches)
            raise InputError(
                f"data: two passes over its batches differ: {why}, or a list, which holds one draw",
                remedy=f"landscape.Problem(model, loss, list({batches}))",
            )

    @property
    def _whole(self) -> tuple[Any, Any] | None:
        """(x, y) of all samples, if they are in tensors; else None."""
        return (self.batches.x, self.batches.y) if isinstance(self.batches, HostStream) else self.resident

    @property
    def has_nan(self) -> bool:
        """Return whether a number in the data is NaN; False for a stream, which is not read."""
        if self.resident is not None:
            return bool(nan_places(*self.resident))
        return self.checksum is not None and bool(self.checksum[2].any())

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of each of the user's batches."""
        for batch in self.batches:
            yield split(as_tensors(batch), self._model_has_loss)

    def in_batches(self) -> str:
        """Return code that makes batches of the user's data; their size is a multiple of 2, 3, 4, 5 and 6."""
        if self._whole is None:
            return "list(data)"
        # The size whose last batch is the largest.
        size = max(range(480, 1200, 120), key=lambda size: self.samples % size or size)
        batch = f"torch.utils._pytree.tree_map(lambda t: t[i : i + {size}], data)"
        return f"[{batch} for i in range(0, {self.samples}, {size})]"

    def place(self, tree: Any) -> Any:
        """Return ``tree`` on the device, with floating-point tensors in the problem's precision."""

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                raise InputError("data: it is on the device 'meta' and has no numbers; give it on another")
            floating = self.dtype if tensor.is_floating_point() else None
            tensor = tensor.clone() if tensor.is_inference() else tensor  # it would allow no gradients
            return tensor.detach().to(self.device, floating)

        return tree_map(move, tree)

    def for_pass(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return (x, y) for one pass; with ``input_gradients``, as new leaves that require gradients.

        Physics-informed losses differentiate outputs by inputs.
        """
        if not self.input_gradients:
            return x, y
        fresh = {id(t): t.detach().requires_grad_() for _, t in named_tensors(x) if t.is_floating_point()}
        return tree_map(lambda tensor: fresh.get(id(tensor), tensor), (x, y))

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """(x, y) if each is one tensor and all samples have the same weight, for batched paths; else None."""
        if self.resident is None or self.sample_terms is not None:
            return None
        x, y = self.resident
        return (x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else None

    def first_batch(self, terms_in: Terms | None = None) -> tuple[Any, Any]:
        """Return the first two samples, or the first batch in which a target counts, on the device.

        ``terms_in``: the terms by sample, for calls before :meth:`count_terms`.
        """
        self.terms_in = terms_in or self.terms_in
        if self.resident is not None:
            return take(self.resident, slice(2))
        batches = self.pairs()
        first = next(batches, None)
        if first is None:
            raise InputError("data: it holds no samples, at least one is needed")
        batches = itertools.chain([first], batches)
        x, y = next((batch for batch in batches if float(self.terms_in(*batch).sum()) > 0), first)
        self.input_gradients |= _any_requires_gradients(x)
        return self.place((x, y))

    def pick(self, x: Any, y: Any, count: int = PROBE) -> tuple[Any, Any]:
        """Return at most ``count`` samples for checks, on the device.

        They come from all samples if these have indices, else from the first batch. Their targets differ as
        much as possible, so that targets which the loss treats specially are among them; at least one counts
        in the loss, if any does. If the first batch cannot be divided, all of it is returned; of a loss that
        mixes samples, all samples or the first batch.

        Args:
            x, y: the result of :meth:`first_batch`.
            count: the largest number of samples.
        """
        if self.loss_mixes_samples:
            return self.resident or (x, y)
        return self.pick_if_divisible(x, y, count) or (x, y)

    def pick_if_divisible(self, x: Any, y: Any, count: int = PROBE) -> tuple[Any, Any] | None:
        """Return the samples of :meth:`pick`; None for a batch that cannot be divided."""
        if self.indexed:
            if count not in self._cache:
                inputs, targets = self._whole or (None, None)
                picked = _different(targets, self.samples, count)
                self._cache[count] = self._with_one_that_counts(picked, inputs, targets)
            return self._gather(self._cache[count])
        try:
            length = count_samples(x, y, equal_lengths=True)
        except LandscapeError:
            return None
        if not self.divisible or not [*named_tensors(x)]:
            return None
        return take((x, y), self._with_one_that_counts(_different(y, length, count), x, y).to(self.device))

    def _with_one_that_counts(self, picked: Tensor, x: Any, y: Any) -> Tensor:
        """Return the indices ``picked``; if none of these samples counts, the last is replaced by one."""
        terms = torch.ones(1) if y is None else self.terms_in(take(x, picked), take(y, picked))
        if not bool((terms > 0).any()):
            picked[-1] = self.terms_in(x, y).argmax()
        return picked

    def few(self, count: int = PROBE) -> Data:
        """Return the samples of :meth:`pick` as data of one chunk."""
        x, y = self.pick(*self.first_batch(), count)
        few = self.in_chunks(count)._of_samples(x, y, self.terms_in(x, y))
        if not self.indexed:
            few.resident, few.sample_terms, few.batches = None, None, [(x, y)]
        return few

    def _of_samples(self, x: Any, y: Any, terms: Tensor) -> Data:
        """Return data of the samples (x, y), on the device, with these ``terms`` (N,)."""
        part = copy.copy(self)
        part._cache, part.checksum = {}, None
        part.resident, part.batches, part.samples = (x, y), (), len(terms)
        part._set_terms(terms)
        return part

    def _set_terms(self, terms: Tensor) -> None:
        """Set the ``terms`` of each sample (N,), as their sum only if all are equal."""
        self.terms = float(terms.sum())
        self.sample_terms = terms if bool((terms != terms[:1]).any()) else None

    def in_chunks(self, size: int) -> Data:
        """Return the data with ``size`` samples a chunk, or the data itself if the loss mixes samples."""
        if self.loss_mixes_samples:
            return self
        part = copy.copy(self)
        part.chunk_size = size
        return part

    def to(self, dtype: torch.dtype) -> Data:
        """Return the data in another precision."""
        converted = copy.copy(self)
        converted.dtype = dtype
        if self.resident is not None:
            converted.resident = converted.place(self.resident)
        return converted

    def chunks(self, empty: bool = False) -> Iterator[tuple[Any, Any, float]]:
        """Yield all data as (x, y, weight), on the device, in batches or chunks of ``chunk_size`` samples.

        The weights in the mean add up to ``samples``. They are the chunks' numbers of samples or, if samples
        contribute unequal numbers of terms, proportional to the terms. Chunks without a term are left out,
        unless ``empty``.
        """
        start = 0
        for x, y in self.pieces():
            samples = count_samples(x, y)
            terms = None if self.sample_terms is None else self.sample_terms[start : start + samples]
            if terms is None and not self.indexed:
                terms = self.terms_in(x, y)
            weight = float(samples)
            if terms is not None:
                weight = float(terms.sum()) * self.samples / max(self.terms, 1e-300)
            start += samples
            if weight > 0 or empty:
                x, y = self.place((x, y))
                yield x, y, weight

    def pieces(self) -> Iterator[tuple[Any, Any]]:
        """Yield the user's batches, or chunks of ``chunk_size`` samples of resident data."""
        if self.resident is None:
            yield from self.pairs()
            return
        assert self.chunk_size is not None  # Problem.chunks sets it
        for i in range(0, self.samples, self.chunk_size):
            yield take(self.resident, slice(i, i + self.chunk_size))

    @property
    def indexed(self) -> bool:
        """Return whether samples have indices, so that minibatches can be drawn."""
        return self.resident is not None or isinstance(self.batches, Stream)

    def gather(self, indices: Tensor) -> tuple[Any, Any]:
        """Return (x, y) of the samples ``indices`` (…), repeats allowed, as tensors (…, *shape)."""
        self._check_mean()
        return self._gather(indices)

    def _check_mean(self) -> None:
        """Raise InputError if the loss mixes samples, so that a part of the data has another loss."""
        if self.loss_mixes_samples:
            raise InputError("data: the loss mixes its samples; give one that is a mean over the samples")

    def _gather(self, indices: Tensor) -> tuple[Any, Any]:
        flat = indices.flatten()
        if self.resident is not None:
            flat = flat.to(self.device)
            samples = tree_map(lambda t: t.index_select(0, flat), self.resident)
        elif isinstance(self.batches, Stream):
            samples = self.place(self.batches.gather(flat.cpu()))
        else:
            raise InputError("data: drawing minibatches needs (x, y) tensors, not an iterable of batches")
        return tree_map(lambda t: t.view(*indices.shape, *t.shape[1:]), samples)

    def subset(self, indices: Tensor | slice) -> Data:
        """Return data of the samples ``indices``, repeats allowed; a slice copies nothing.

        Raises InputError for data in batches, or a loss that mixes samples.
        """
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
        return part._check_counted()

    def minibatch(self, x: Any, y: Any) -> Data:
        """Return data of the samples (x, y), on the device: a minibatch, with the weights of training."""
        self._check_mean()
        count_samples(x, y, equal_lengths=True)
        return self._of_samples(x, y, self.terms_in(x, y))._check_counted()

    def _check_counted(self) -> Data:
        """Return the data itself; raise InputError if it has samples of which no target counts."""
        if self.samples and not self.terms > 0:
            raise InputError(f"batch: no target of {self.samples} samples counts in the loss; draw more")
        return self

    def fingerprint(self) -> str:
        """Return a CRC-32 of the tensors, or the checksums of the batches.

        It detects other data (such as another split, order or precision), but no forgery.
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


def _any_requires_gradients(x: Any) -> bool:
    """Return whether any of the inputs requires gradients."""
    return any(tensor.requires_grad for _, tensor in named_tensors(x))


def nan_places(x: Any, y: Any) -> str:
    """Return the names of the tensors with NaN, separated by commas; "" if there are none."""
    tensors = (*named_tensors(x, "inputs"), *named_tensors(y, "targets"))
    sums = ((name, strided(t).sum()) for name, t in tensors if t.is_floating_point())
    return ", ".join(name for name, total in sums if bool(total.isnan()))


def not_a_number(x: Any, y: Any, value: float, origin: str) -> InputError:
    """Return the error for the samples (x, y), whose loss is NaN or infinite; ``origin`` describes them."""
    where = nan_places(x, y)
    number = "NaN" if math.isnan(value) else f"{value:g}"
    cause = f"NaN in {where} of {origin}, so that its loss" if where else f"the loss of {origin}"
    return InputError(
        f"data: {cause} is {number}; leave such samples out, mask them, or give terms=, 0 for them"
    )


def batched(data: Any) -> Any:
    """Return batches of a torch Dataset, which yields single samples; return other data unchanged."""
    return DataLoader(data, batch_size=STREAM_BATCH) if isinstance(data, Dataset) else data


def _why_passes_differ(batches: Iterable[Any]) -> str:
    """Return the likely cause of a difference between two passes, and the remedy."""
    cut = isinstance(batches, DataLoader) and batches.drop_last and isinstance(batches.sampler, RandomSampler)
    if cut and len(batches.sampler) % batches.batch_size:  # type: ignore[attr-defined]
        return "drop_last=True leaves other samples out of each; give a loader with drop_last=False"
    return "its samples are drawn anew (random augmentation?); give the data set without augmentation"


def _checksum(tree: Any) -> Tensor:
    """Return the checksum of a batch, (3, K) float64: K sums, the sums of magnitudes, and the counts of NaN.

    A sample's number is the weighted sum over its numbers, with weights by place in the sample; each tensor
    has the sum of the samples' numbers and of their squares. So the total over all batches does not depend on
    the order of the samples, and the squares detect numbers that were exchanged between samples. NaN and
    infinity are replaced by NUMBERS.
    """
    sums = []
    for _, tensor in named_tensors(tree):
        rows = double(strided(tensor.detach())).cpu()
        rows = rows.flatten(1) if rows.dim() > 1 else rows.reshape(-1, 1)
        nan_count = rows.isnan().sum()
        rows = rows.nan_to_num(*NUMBERS)
        weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64).sqrt().frac() + 0.5
        numbers = rows @ weights
        for values in (numbers, numbers.square()):
            sums.append(torch.stack((values.sum(), values.abs().sum(), nan_count)))
    return torch.stack(sums, 1) if sums else torch.zeros(3, 1, dtype=torch.float64)


def _total(sums: Sequence[Tensor]) -> Tensor:
    """Return the sum of checksums of batches, padded with zeros as batches may differ in their tensors."""
    width = max(checksum.shape[1] for checksum in sums)
    return torch.stack([F.pad(checksum, (0, width - checksum.shape[1])) for checksum in sums]).sum(0)


def _different(y: Any, samples: int, count: int) -> Tensor:
    """Return the indices of at most ``count`` samples, with targets that differ as much as possible."""
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
    """Return the values among targets that a loss may leave out.

    They are LEFT_OUT; of integers also the extremes, and the most frequent last one of sequences; of other
    numbers the most frequent one.
    """
    values = [*map(float, LEFT_OUT)]
    if targets.is_floating_point() and 0 < targets.numel() <= MAX_SORTED:
        values.append(float(targets.flatten().mode().values))
    if targets.numel() and not targets.is_floating_point():
        values += [float(targets.min()), float(targets.max())]
        if targets.dim() > 1:
            values.append(float(targets.flatten(1)[:, -1].mode().values))
    return [value for value in dict.fromkeys(values) if bool((targets == value).any())]
