"""Checks that a loss is the mean over its samples, by how many terms of each, and remedies if not."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError, ProblemWarning
from landscape.core.memory import available_memory
from landscape.problem.batches import count_samples, named_tensors, take
from landscape.problem.data import Data, notable
from landscape.problem.losses import Terms, by_sample, refuse_broadcasting
from landscape.problem.mean_loss import MeanLoss

T = TypeVar("T")

# Classes whose weights are sought, and samples for each of them (ours).
MAX_CLASSES, SAMPLES_A_CLASS = 64, 3
# Weights of classes below this share of the largest are zero: they come from differences of losses (ours).
ZERO = 1e-5


@dataclass(frozen=True)
class Count:
    """``terms(targets)`` -> (B,), with the code that says the same, which is how it prints.

    They are the sums by sample of what ``function`` gives of the tensor at ``place`` in the targets.
    """

    code: str
    place: Place
    function: Callable[[Tensor], Tensor]

    def __call__(self, targets: Any) -> Tensor:
        number, cut = self.place
        return double(by_sample(self.function(list(named_tensors(targets))[number][1][cut])))

    def __repr__(self) -> str:
        return self.code


# The number of a tensor among the targets, and what of it counts.
Place = tuple[int, tuple[slice, ...]]
# Targets whole, and without the first or last of each sequence, as code and index.
_CUTS: dict[str, tuple[slice, ...]] = {
    "": (),
    "[:, 1:]": (slice(None), slice(1, None)),
    "[:, :-1]": (slice(None), slice(-1)),
}


def _parts(targets: Any) -> Iterator[tuple[str, Place, Tensor]]:
    """The tensors of ``targets`` with their code, whole, and without the first or last of each sequence."""
    for i, (name, tensor) in enumerate(named_tensors(targets, "y")):
        if tensor.dim() == 0 or tensor.is_complex():
            continue
        for code, index in _CUTS.items():
            if code and (tensor.dim() == 1 or tensor.shape[1] == 1):
                break
            yield name + code, (i, index), tensor[index]


def _tests(name: str, tensor: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Counts of targets that may be meant, with their code: those not left out, masks and weights."""
    if tensor.dtype == torch.bool:
        yield name, torch.clone
        yield f"~{name}", torch.logical_not
        return
    for value in notable(tensor):
        yield f"{name} != {value:g}", functools.partial(torch.ne, other=value)
    yield f"{name} > 0", lambda t: t > 0
    yield f"{name} >= 0", lambda t: t >= 0
    if tensor.is_floating_point():
        yield f"~{name}.isnan()", lambda t: ~t.isnan()
    if bool((tensor >= 0).all()):  # a mask, weights or lengths
        yield name, torch.clone


def candidates(targets: Any) -> Iterator[Count]:
    """The standard counts of targets like these: those that are not left out, sums of masks and weights."""
    for name, place, tensor in _parts(targets):
        for test, function in _tests(name, tensor):
            code = f"({test}).flatten(1).sum(1)" if tensor.dim() > 1 else test
            yield Count(f"lambda y: {code}", place, function)


def samples_apart(counts: Sequence[Count], targets: Any) -> list[int]:
    """Two samples whose terms have another ratio by one of ``counts`` than by the first; [] if none have."""
    first = counts[0](targets)
    for other in counts[1:]:
        second = other(targets)
        both = first / first.sum() - second / second.sum()
        if bool((both.abs() > 1e-9 * (first / first.sum()).max()).any()):
            return [int(both.argmin()), int(both.argmax())]
    return []


def revealed(losses: Parts) -> list[Count]:
    """Weights by class of the targets, as the losses of pairs of samples reveal them.

    With L(a, b) the loss of both, w_b/w_a = (L(a, b) − L(a))/(L(b) − L(a, b)), for the terms w of the samples
    a and b; they are sums of the weights of their targets' classes.
    """
    found = []
    for name, place, tensor in _parts(losses.targets):
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            continue
        classes = torch.unique(tensor).tolist()
        if not 2 <= len(classes) <= MAX_CLASSES:
            continue
        numbers = double(torch.stack([by_sample(tensor == c) for c in classes], 1)).cpu()
        if (weights := _class_weights(losses, numbers)) is not None:
            found.append(_weighted(name, place, dict(zip(classes, weights, strict=True))))
    return found


def _class_weights(losses: Parts, numbers: Tensor) -> list[float] | None:
    """The weight of each class, the largest 1, from ``numbers`` (N, classes) of targets; None if unknown."""
    shares = numbers / numbers.sum(1, keepdim=True).clamp(min=1)
    most = shares.topk(min(SAMPLES_A_CLASS, len(shares)), 0).indices  # of each class
    rows = list(dict.fromkeys(most.T.flatten().tolist()))
    alone = {row: losses.loss([row]) for row in rows}
    finite = [row for row in rows if math.isfinite(alone[row])]
    if not finite:
        return None
    first = min(finite, key=lambda row: alone[row])
    terms = {first: 1.0}
    for row in rows:
        both = losses.loss([first, row]) if row != first else math.nan
        apart = alone[row] - both
        if math.isfinite(both) and not math.isfinite(alone[row]):
            terms[row] = 0.0  # nothing of it counts
        elif math.isfinite(both) and abs(alone[row] - alone[first]) > 0.01 * abs(alone[row]) and apart:
            terms[row] = (both - alone[first]) / apart
    system, given = numbers[list(terms)], torch.tensor(list(terms.values()), dtype=torch.float64)
    if int(torch.linalg.matrix_rank(system)) < numbers.shape[1]:
        return None
    weights = torch.linalg.lstsq(system, given[:, None]).solution[:, 0]
    weights /= weights.abs().max()
    weights[weights.abs() < ZERO] = 0.0
    return None if bool((weights < 0).any()) else weights.tolist()


def _weighted(name: str, place: Place, weights: dict[int, float]) -> Count:
    """The sums of the weights of the targets' classes."""

    def terms(tensor: Tensor) -> Tensor:
        known = torch.isin(tensor, torch.tensor([*weights]).to(tensor))
        if not bool(known.all()):
            raise InputError(
                f"data: {name} has the class {int(tensor[~known][0])}, which the first samples do not have, "
                "so that its weight in the loss is not known; give terms=, the sum of each sample's weights"
            )
        return sum((w * double(by_sample(tensor == c)) for c, w in weights.items()), torch.zeros(()))

    listed = ", ".join(f"{c}: {w:.4g}" for c, w in weights.items())
    return Count(f"the weights of the classes of {name}, {{{listed}}}", place, terms)


# Samples that every loss is evaluated on at once anyway (MAX_CHUNK of landscape.problem.mean_loss).
AT_ONCE = 2000
# Differences above this share of what may be rounding are looked at in float64: a batch of another size
# rounds by some eps, and losses of samples that are much alike differ by little more (ours).
SURE, FLOAT32 = 0.02, torch.finfo(torch.float32).eps
# The passes of a random loss that are averaged, and the standard errors beyond which its parts count as
# different from the whole: false once in 10⁸ (ours).
RANDOM_PASSES, RANDOM_ERRORS = 64, 6.0
# Activations of all samples at once may take this share of the available memory: a Hessian's product needs
# the graph of a gradient, and scratch space (ours).
MEMORY_SHARE = 1 / 4
# Samples by which the memory of all is extrapolated: they make pairs, triples, fours and fives (ours).
SOME = 120


class Parts:
    """The losses of parts of the data, each evaluated once.

    Args:
        problem: model and loss.
        batch: the first one; of data with numbered samples, rows are those numbers.
        weights: θ (P,).
        data: where the samples come from.
    """

    def __init__(self, problem: MeanLoss, batch: tuple[Any, Any], weights: Tensor, data: Data) -> None:
        self.problem, self.data, self.weights, self._batch = problem, data, weights, batch
        self._known: dict[tuple[tuple[int, ...], int], float] = {}
        self.eps = torch.finfo(weights.dtype).eps

    def in_float64(self) -> Parts:
        """The same in float64, where the model runs in it."""
        none = copy.copy(self.problem.data)
        none.resident, none.batches = None, ()
        try:
            exact = self.problem.on(none).to(torch.float64)
            parts = Parts(exact, self._batch, double(self.weights), self.data)
            parts.loss([0])
        except Exception:  # a dtype that the model, or the loss, names itself
            return self
        return parts if parts.eps < self.eps else self

    def samples(self, rows: Sequence[int]) -> tuple[Any, Any]:
        """Inputs and targets of some samples."""
        samples = self.data.samples_at(torch.tensor(list(rows)), *self._batch)
        return self.problem.data.place(samples)

    @property
    def targets(self) -> Any:
        """The targets of all samples, or of the batch."""
        data = self.data
        if data.resident is not None:
            return data.resident[1]
        return self.samples(range(data.samples))[1] if data.indexed else self._batch[1]

    @torch.no_grad()
    def loss(self, rows: Sequence[int], seed: int = 0) -> float:
        """The loss of some samples; whatever the user's model and loss raise is raised."""
        key = tuple(rows), seed
        if key not in self._known:
            problem = self.problem
            inputs, targets = problem.data.leaves(*self.samples(rows))
            # What the loss says of so few samples is no news.
            with problem.evaluating(seed), warnings.catch_warnings(action="ignore"):
                value = problem.criterion(problem.outputs(self.weights, inputs), targets).detach()
            # Hugging Face's causal models take the loss in float32 always.
            self.eps = max(self.eps, torch.finfo(value.dtype).eps)
            self._known[key] = float(value)
        return self._known[key]

    def rounding(self, *values: float) -> float:
        """The largest difference that rounding makes; a batch of another size rounds otherwise."""
        return min(1000 * self.eps, 3 * math.sqrt(self.eps)) * max(map(abs, values))

    def term_counts(self, terms: Callable[[Any, Any], Tensor], rows: Sequence[int]) -> Tensor:
        """(max(rows) + 1,) the terms of the samples ``rows``, by their numbers; 0 for others."""
        weights = torch.zeros(max(rows) + 1, dtype=torch.float64)
        weights[list(rows)] = terms(*self.samples(rows)).cpu()
        return weights

    def difference(self, rows: Sequence[int], ends: Sequence[int], weights: Tensor, seed: int = 0) -> float:
        """The mean of the losses of the parts of ``rows`` that end at ``ends``, less the loss of all of them.

        ``weights`` (N,): of samples, by their numbers. Parts without weight do not count.
        """
        parts = divided(rows, ends)
        sums = [float(weights[part].sum()) for part in parts]
        counted = [(self.loss(part, seed), w) for part, w in zip(parts, sums, strict=True) if w > 0]
        whole = self.loss(rows, seed)
        total = sum(w for _, w in counted)
        return sum(value * w for value, w in counted) / total - whole if total > 0 else math.nan

    def combine(self, rows: Sequence[int], ends: Sequence[int], weights: Tensor, share: float = 1.0) -> bool:
        """Test whether the losses of the parts of ``rows`` combine to that of all, by the weights of samples.

        ``share``: of the difference that counts as rounding.
        """
        difference = self.difference(rows, ends, weights)
        values = [v for v in map(self.loss, divided(rows, ends)) if math.isfinite(v)]
        return abs(difference) <= share * self.rounding(self.loss(rows), *values)  # False for NaN


def attempt(function: Callable[..., T], *args: Any) -> T | None:
    """Call ``function(*args)``; None where the user's model or loss does not take such samples."""
    try:
        return function(*args)
    except LandscapeError:
        raise
    except Exception:  # they raise any kind of error
        return None


@torch.no_grad()
def takes(problem: MeanLoss, x: Any) -> bool:
    """Test whether the model takes the inputs ``x``: a model of a whole graph takes no part of it."""
    with problem.evaluating(0), warnings.catch_warnings(action="ignore"):
        return attempt(problem.outputs, problem.weights, problem.data.leaves(x, None)[0]) is not None


def divided(rows: Sequence[int], ends: Sequence[int]) -> list[list[int]]:
    """``rows`` in parts that end at ``ends``."""
    return [list(rows[a:b]) for a, b in itertools.pairwise([0, *ends, len(rows)])]


def check_mean(problem: MeanLoss, terms: Terms, batch: tuple[Any, Any], at: Tensor) -> None:
    """Find by which weights the losses of parts of the data combine to that of all of them.

    Where they do not combine by the ``terms`` that are known, other counts of targets are tried, and used
    where all parts combine exactly by them. A loss that mixes samples is taken of all of them at once, or as
    the mean over the batches. A :class:`landscape.ProblemWarning` says so.

    Args:
        terms: how many terms of the mean each sample brings; changed where others are found.
        batch: the first samples, or the first batch.
        at: weights (P,) at which samples have different losses.

    Raises InputError where the loss is a sum, or neither a mean nor of a size that can be taken at once.
    """
    picked = problem.data.rows(*batch)
    if picked is None or len(picked) < 2:  # a batch that cannot be split, or nothing to split
        return
    parts = Parts(problem, batch, at, problem.data)
    rows = _by_targets(picked.tolist(), parts)
    if problem.draws:
        if attempt(_random_parts_combine, parts, rows, terms):
            return
    else:
        try:
            if not math.isfinite(parts.loss(rows)):
                parts = Parts(problem, batch, problem.weights, problem.data)
            if not math.isfinite(parts.loss(rows)):
                _refuse_without_targets(parts, rows)
                return
            weights = parts.term_counts(terms, rows)
            if parts.eps <= FLOAT32 and _all_combine(parts, rows, weights, SURE):
                return
            parts = parts.in_float64()
            if _all_combine(parts, rows, weights):
                return
        except LandscapeError:
            raise
        except Exception:  # the loss, or the model, does not take such a part
            if not problem.data.indexed and _even_parts_combine(parts, rows, terms):
                return  # batches are never split
        else:
            if terms.given is not None and not isinstance(terms.given, Count):
                if problem.data.indexed:
                    raise InputError(
                        "terms: by them the losses of parts of the data do not combine to that of all of it; "
                        "leave terms out, or give data whose loss mixes samples as a list of batches",
                        remedy="landscape.Problem(model, loss, data)",
                    )
                return  # batches stay whole
            if _count_found(parts, terms, rows):
                return
    _take_together(problem, terms, parts, rows, batch)


def _all_combine(parts: Parts, rows: list[int], weights: Tensor, share: float = 1.0) -> bool:
    """Test whether the losses of parts of ``rows`` combine, ``share`` as in :meth:`Parts.combine`.

    Of few samples each is set against the others: the terms of one may be the mean number by chance.
    """
    if len(rows) >= 6:
        return parts.combine(rows, [2, 5], weights, share)
    turned = ([*rows[k:], *rows[:k]] for k in range(len(rows)))
    return all(parts.combine(order, [1], weights, share) for order in turned)


def _by_targets(rows: list[int], parts: Parts) -> list[int]:
    """``rows`` with those of the largest and of the smallest sums of targets first.

    Where samples have unequal numbers of terms, parts with equal sums of them would not show it.
    """
    targets = parts.samples(rows)[1]
    for _, each in named_tensors(targets):
        if each.is_complex() or each.dim() == 0 or bool((double(each) != double(each).round()).any()):
            continue  # of these no sum tells how many count
        order = by_sample(double(each)).argsort(stable=True).tolist()
        return [rows[i] for i in (*order[-2:], *order[:-2])]
    return rows


def _even_parts_combine(parts: Parts, rows: list[int], terms: Terms) -> bool:
    """Test whether halves or thirds combine, of a loss that does not take uneven parts."""
    for k in (2, 3):
        ends = range(len(rows) // k, len(rows), len(rows) // k)
        if len(rows) % k == 0 and len(rows) > k:
            combined = attempt(parts.combine, rows, ends, parts.term_counts(terms, rows))
            if combined is not None:
                return combined
    return False


def _random_parts_combine(parts: Parts, rows: list[int], terms: Terms) -> bool:
    """Test whether the losses of parts combine on average over draws, within their standard error."""
    ends, weights = [2, 5] if len(rows) >= 6 else [1], parts.term_counts(terms, rows)
    differences = [parts.difference(rows, ends, weights, seed) for seed in range(RANDOM_PASSES)]
    drawn = torch.tensor(differences, dtype=torch.float64)
    error = float(drawn.std()) / math.sqrt(len(drawn))
    return not abs(float(drawn.mean())) > RANDOM_ERRORS * error + parts.rounding(parts.loss(rows))


def _refuse_without_targets(parts: Parts, rows: list[int]) -> None:
    """Raise InputError for a loss that is NaN as it leaves out all targets, while the outputs are finite."""
    inputs, targets = parts.samples(rows)
    if not math.isnan(parts.loss(rows)) or not parts.data.indexed:
        return
    if not all(bool(each.isfinite().all()) for _, each in named_tensors(targets)):
        return  # the targets are the reason
    if any(not bool(count(targets).any()) for count in candidates(targets)):
        with torch.no_grad(), parts.problem.evaluating(0):
            outputs = parts.problem.outputs(parts.weights, inputs)
        if all(bool(each.isfinite().all()) for _, each in named_tensors(outputs)):
            raise InputError("data: all its targets are left out of the loss, at least one must count")


def _count_found(parts: Parts, terms: Terms, rows: list[int]) -> bool:
    """Use a standard count of targets, or weights by class, if it is the terms of the mean; else false."""
    targets = parts.samples(rows)[1]
    fitting = [count for count in candidates(targets) if attempt(_fits, count, parts, rows)]
    if not fitting:
        fitting = [count for count in attempt(revealed, parts) or () if attempt(_fits, count, parts, rows)]
    for others, every in _sources(parts):
        while len(fitting) > 1:
            apart = samples_apart(fitting, every)
            if not apart:
                break
            some = list(dict.fromkeys([*apart, *range(min(4, count_samples(None, every, alike=False)))]))
            left = [count for count in fitting if attempt(_fits, count, others, some)]
            if len(left) == len(fitting):
                return False  # the samples that tell them apart have equal losses
            fitting = left
    if not fitting:
        return False
    terms.given = fitting[0]
    _say(
        f"loss: the terms of its mean are counted as terms={fitting[0]}, by which the losses of parts of the "
        "data combine exactly; give terms= to say so yourself"
    )
    return True


def _fits(count: Count, parts: Parts, rows: list[int]) -> bool:
    """Test whether the losses of single samples combine by ``count`` to those of several sets of ``rows``."""
    weights = parts.term_counts(lambda x, y: count(y), rows)
    if bool((weights < 0).any()) or len(set(weights[rows].tolist())) < 2:
        return False
    sets = (rows, rows[: len(rows) // 2], rows[len(rows) // 2 :], rows[::2], rows[1::2])
    counting = [(some, [row for row in some if weights[row] > 0]) for some in sets]
    tested = [(some, counted) for some, counted in counting if len(counted) > 1]
    # Samples without a term must not matter, and the others combine by their numbers of terms.
    return len(tested) > 1 and all(
        abs(parts.loss(some) - parts.loss(counted)) <= parts.rounding(parts.loss(some))
        and parts.combine(counted, range(1, len(counted)), weights)
        for some, counted in tested
    )


def _sources(parts: Parts) -> Iterator[tuple[Parts, Any]]:
    """All targets: at once where samples have numbers, else batch by batch, with the parts of that batch."""
    if parts.data.indexed:
        yield parts, parts.targets
        return
    for batch in map(parts.data.place, parts.data.pairs()):
        yield Parts(parts.problem, batch, parts.weights, parts.data), batch[1]


def _take_together(
    problem: MeanLoss, terms: Terms, parts: Parts, rows: list[int], batch: tuple[Any, Any]
) -> None:
    """Take the loss, which is no mean over the samples, of all of them at once, or by batches."""
    _refuse_sum(problem, parts, rows)
    data = problem.data
    inputs, targets = data.leaves(*data.samples_at(torch.tensor(rows), *batch))
    if takes(problem, inputs):
        with torch.no_grad(), problem.evaluating(0):
            refuse_broadcasting(problem.criterion, problem.outputs(problem.weights, inputs), targets)
    if data.own_batches and not data.indexed:
        raise InputError(
            "loss: it mixes the samples of a batch, and a Dataset has no batches; give a DataLoader with the "
            "batches over which the loss is the mean",
            remedy="landscape.Problem(model, loss, torch.utils.data.DataLoader(data, batch_size=64))",
        )
    if not data.indexed:
        data.mix()
        terms.by_batch = True
        if not isinstance(data.batches, (list, tuple)) or len(data.batches) > 1:
            _say(
                "loss: it mixes the samples of a batch, or weighs them; it is taken as the mean over the "
                "batches that were given, each of which counts the same"
            )
        return
    need, available = _bytes_at_once(problem), available_memory(problem.device)
    if need is None:
        raise InputError(
            f"loss: it mixes samples, and takes neither {SOME} nor {2 * SOME} of them, so that the memory "
            f"for all {data.samples:,} at once is not known; give them as a list of one batch, or of "
            "several, over which the loss is then the mean",
            remedy="landscape.Problem(model, loss, [data])",
        )
    if need > MEMORY_SHARE * available:
        much = f"about {need / 2**30:.1f} GiB" if math.isfinite(need) else "more than fits on the device"
        raise InputError(
            f"loss: it mixes samples, and all {data.samples:,} of them at once need {much} for each pass "
            f"({available / 2**30:.1f} GiB are available); give a list of batches, over which the loss is "
            "then the mean",
            remedy=f"landscape.Problem(model, loss, {data.in_batches()})",
        )
    data.mix()
    _say(
        f"loss: it mixes samples, or weighs them; all {data.samples:,} are evaluated at once; give a list of "
        "batches for the mean over these"
    )


def _refuse_sum(problem: MeanLoss, parts: Parts, rows: list[int]) -> None:
    """Raise InputError for a loss that is the sum over its samples."""
    if problem.draws:
        return
    try:
        total = sum(map(parts.loss, divided(rows, [len(rows) // 2])))
    except Exception:  # the loss does not take parts
        return
    whole = parts.loss(rows)
    if whole and abs(total - whole) <= parts.rounding(whole, total):
        raise InputError(
            "loss: it is the sum over the samples that it is given, not the mean (reduction='sum'?)",
            remedy="landscape.Problem(model, lambda o, t: loss(o, t) / len(t), data)",
        )


def _bytes_at_once(problem: MeanLoss) -> float | None:
    """The bytes that a pass of all samples saves, from those of a few, as a·n + b·n²; None if unknown."""
    samples, resident = problem.data.samples, problem.data.resident
    if resident is None:
        return math.inf
    if samples <= 2 * SOME:
        return 0.0
    some, more = (take(resident, slice(n)) for n in (SOME, 2 * SOME))
    if not takes(problem, some[0]):  # a graph, of which all nodes were computed already
        return problem.saved_bytes(*resident)
    small, large = attempt(problem.saved_bytes, *some), attempt(problem.saved_bytes, *more)
    if small is None or large is None:  # the loss takes no such part
        return 0.0 if samples <= AT_ONCE else None
    square = max(0.0, (large / (2 * SOME) - small / SOME) / SOME)
    return samples * (small / SOME - SOME * square) + square * samples**2


def _say(text: str) -> None:
    """Warn with a line, at the call of ``landscape.Problem``."""
    warnings.warn(text, ProblemWarning, stacklevel=6)
