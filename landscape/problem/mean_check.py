"""Checks that a loss is the mean over its samples, by how many terms of each, and remedies if not.

The loss of any samples must be the mean of the losses of the parts that they consist of, weighted by the
terms of each. A batch and three parts of it give such an equation, and so do the last part of a batch and the
first part of the next. One list of equations, over all of the data, decides.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError, ProblemWarning
from landscape.core.memory import available_memory
from landscape.problem.batches import count_samples, named_tensors, take, tree_map
from landscape.problem.counts import ONES, ClassSamples, Count, Samples, candidates
from landscape.problem.data import nan_places
from landscape.problem.losses import Terms, by_sample, is_mean, output_loss, placed_loss, refuse_broadcasting
from landscape.problem.mean_loss import MeanLoss

T = TypeVar("T")
Batches = Callable[[], Iterable[tuple[Any, Any]]]

# Samples that every loss is evaluated on at once anyway (MAX_CHUNK of landscape.problem.mean_loss).
AT_ONCE = 2000
# Differences above this share of what may be rounding are looked at in float64: a batch of another size
# rounds by some eps, and losses of samples that are much alike differ by little more (ours).
SURE, FLOAT32 = 0.02, torch.finfo(torch.float32).eps
# The relative difference that rounding may make in float64, where terms of a loss cancel each other (ours).
EXACT = 1e-9
# Outputs of more numbers are not copied in float64 (ours): half a gigabyte.
MAX_EXACT = 1 << 26
# The passes of a random loss that are averaged, and the standard errors beyond which its parts count as
# different from the whole: false once in 10⁸ (ours).
RANDOM_PASSES, RANDOM_ERRORS = 64, 6.0
# Activations of all samples at once may take this share of the available memory: a Hessian's product needs
# the graph of a gradient, and scratch space (ours).
MEMORY_SHARE = 1 / 4
# Samples by which the memory of all is extrapolated: they make pairs, triples, fours and fives (ours).
SOME = 120


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
    """Return whether the model takes the inputs ``x``: a model of a whole graph takes no part of it."""
    with problem.evaluating(0), warnings.catch_warnings(action="ignore"):
        return attempt(problem.outputs, problem.weights, problem.data.leaves(x, None)[0]) is not None


def opened(outputs: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A model's outputs as a tree of tensors, and a function that makes outputs of such a tree again."""
    if isinstance(outputs, Mapping) and type(outputs) is not dict:
        return dict(outputs), lambda tree: type(outputs)(**tree)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        return dict(vars(outputs)), lambda tree: dataclasses.replace(outputs, **tree)
    return outputs, lambda tree: tree


class Losses:
    """The losses of samples at one vector of weights.

    Args:
        problem: model and loss.
        weights: θ (P,).
        by_outputs: one pass gives the outputs of a batch, and the loss of a part is taken of its rows; in
            float64 where the loss takes that. Otherwise each part has a pass of its own.
    """

    def __init__(self, problem: MeanLoss, weights: Tensor, by_outputs: bool = False) -> None:
        self.problem, self.weights, self.by_outputs = problem, weights, by_outputs
        self.eps = torch.finfo(weights.dtype).eps
        self._remade: Callable[[Any], Any] = lambda tree: tree
        self._exact: Any = None  # the loss in float64

    @torch.no_grad()
    def samples(self, x: Any, y: Any) -> Samples:
        """The samples (x, y), which are on the device."""
        if not self.by_outputs:
            return Samples(None, x, y)
        with self.problem.evaluating(0):
            outputs, self._remade = opened(
                self.problem.outputs(self.weights, self.problem.data.leaves(x, y)[0])
            )
        outputs = tree_map(torch.Tensor.detach, outputs)
        return self._in_float64(Samples(outputs, x if _divisible(x, y) else None, y))

    def _in_float64(self, samples: Samples) -> Samples:
        """The samples in float64, if the loss takes that."""
        every = [t for _, t in named_tensors((samples.outputs, samples.y)) if t.is_floating_point()]
        if self._exact is False or sum(t.numel() for t in every) > MAX_EXACT:
            return samples
        if all(t.dtype == torch.float64 for t in every):
            self._exact = self._exact or self.problem.criterion
            return samples
        widened = tree_map(lambda t: double(t) if t.is_floating_point() else t, (samples.outputs, samples.y))
        exact = Samples(widened[0], samples.x, widened[1])
        if self._exact is None:
            self._exact = placed_loss(self.problem.criterion, self.problem.device, torch.float64)
            value = attempt(self._value, exact)
            if value is None or value.dtype != torch.float64:
                self._exact = False  # it names a dtype itself
                return samples
            self.eps = torch.finfo(torch.float64).eps
        return exact

    @torch.no_grad()
    def _value(self, samples: Samples, seed: int = 0) -> Tensor:
        problem, criterion = self.problem, self._exact or self.problem.criterion
        x, y = problem.data.leaves(samples.x, samples.y)
        # What the loss says of so few samples is no news.
        with problem.evaluating(seed), warnings.catch_warnings(action="ignore"):
            outputs = self._remade(samples.outputs) if self.by_outputs else problem.outputs(self.weights, x)
            return torch.as_tensor(criterion(outputs, y)).detach()

    def loss(self, samples: Samples, seed: int = 0) -> float:
        """The loss of some samples; whatever the user's model and loss raise is raised."""
        value = self._value(samples, seed)
        # Hugging Face's causal models take the loss in float32 always.
        self.eps = max(self.eps, torch.finfo(value.dtype).eps)
        return float(value)

    @property
    def rounding(self) -> float:
        """The largest relative difference that rounding makes; a batch of another size rounds otherwise."""
        # Of the same outputs only the sum over the samples rounds.
        return max(EXACT, min((100 if self.by_outputs else 1000) * self.eps, 3 * math.sqrt(self.eps)))

    def equation(self, samples: Samples, ends: Sequence[int], batch: int = 0) -> Equation:
        """The equation of some samples and their parts, which end at ``ends``."""
        parts = [samples.rows(slice(*pair)) for pair in itertools.pairwise([0, *ends, samples.size])]
        return self._of_parts(samples, parts, batch)

    def _of_parts(self, whole: Samples, parts: Sequence[Samples], batch: int) -> Equation:
        return Equation(batch, self.loss(whole), [(self.loss(part), part) for part in parts], self.rounding)

    def of_two(self, a: Samples, b: Samples, batch: int) -> Equation:
        """The equation of two parts in one, cut to one shape where theirs differ."""
        try:
            whole = Samples.joined([a, b])
        except ValueError:
            a, b = a.cropped(b), b.cropped(a)
            whole = Samples.joined([a, b])
        return self._of_parts(whole, [a, b], batch)

    def _of_lengths(self, batch: Samples, number: int) -> Equation:
        """The equation of the first third and the rest of each sample's targets and outputs."""
        length = next(t.shape[1] for _, t in named_tensors(batch.y) if t.dim() > 1)
        parts = [batch.along(length, slice(length // 3)), batch.along(length, slice(length // 3, None))]
        return self._of_parts(batch, parts, number)

    def equations(self, batches: Iterable[tuple[Any, Any]], ragged: bool = False) -> Iterator[Equation]:
        """Those of each batch and parts of it, and of its first part with the last one of the batch before.

        Without those whose parts the loss, or the model, does not take. ``ragged``: samples differ in length,
        so that batches are cut along it, too: a mean over targets combines by their number.
        """
        draws, before = random.Random(0), list[Samples]()
        for number, (x, y) in enumerate(batches):
            batch = self.samples(x, y)
            own = self.of_batch(batch, number, draws)
            first, last = (batch, batch) if own is None else (own.parts[0][1], own.parts[-1][1])
            both = attempt(self.of_two, before[0], first, number) if before else None
            cut = attempt(self._of_lengths, batch, number) if ragged and self.by_outputs else None
            yield from (equation for equation in (own, both, cut) if equation is not None)
            before = [last]

    def of_batch(self, batch: Samples, number: int, draws: random.Random) -> Equation | None:
        """The equation of a batch and parts of it: three of any size, or else halves or thirds."""
        size = batch.size
        uneven = sorted(draws.sample(range(1, size), min(2, size - 1))) if size > 1 else []
        even = [range(size // k, size, size // k) for k in (2, 3) if size % k == 0 and size > k]
        for ends in (uneven, *even):
            if len(ends) and (equation := attempt(self.equation, batch, ends, number)) is not None:
                return equation
        return None


def _divisible(x: Any, y: Any) -> bool:
    """Return whether all tensors of a batch hold each sample once."""
    try:
        return count_samples(x, y, alike=True) > 0
    except LandscapeError:
        return False


@dataclass(frozen=True)
class Equation:
    """The loss of some samples of batch number ``batch``, and of the parts that they consist of.

    ``rounding``: the relative difference that counts as none.
    """

    batch: int
    whole: float
    parts: list[tuple[float, Samples]]
    rounding: float

    def weights(self, count: Callable[[Any, Any], Tensor]) -> list[float]:
        """The terms of each part."""
        return [float(count(part.x, part.y).sum()) for _, part in self.parts]

    def without_outputs(self) -> Equation:
        """The same for counts, which need the targets only."""
        parts = [(value, Samples(None, part.x, part.y)) for value, part in self.parts]
        return dataclasses.replace(self, parts=parts)

    def equals(self, other: Equation) -> bool:
        """Return whether both have the same losses, within the rounding of ``other``."""
        values = [
            (self.whole, other.whole),
            *((a, b) for (a, _), (b, _) in zip(self.parts, other.parts, strict=True)),
        ]
        limit = other.rounding * max((abs(b) for _, b in values if math.isfinite(b)), default=0.0)
        return all(abs(a - b) <= limit or (a != a and b != b) or a == b for a, b in values)

    def holds(self, count: Callable[[Any, Any], Tensor], share: float = 1.0) -> bool:
        """Return whether the losses of the parts combine to the whole one by ``count``.

        Parts without a term must not matter. ``share``: of the difference that counts as rounding.
        """
        weights = self.weights(count)
        pairs = [(value, weight) for (value, _), weight in zip(self.parts, weights, strict=True) if weight]
        total = sum(weights)
        if not total > 0 or not min(weights) >= 0:
            return not any(weights) and (math.isnan(self.whole) or not self.whole)
        if math.isinf(self.whole) and any(math.isinf(value) for value, _ in pairs):
            return True  # which says nothing
        difference = sum(value * weight for value, weight in pairs) / total - self.whole
        largest = max(abs(self.whole), *(abs(value) for value, _ in pairs))
        return abs(difference) <= share * self.rounding * largest  # False for NaN


# ---- The decision


def check_mean(problem: MeanLoss, terms: Terms, first: tuple[Any, Any], at: Tensor, batches: Batches) -> None:
    """Find by which weights the losses of parts of the data combine to that of all of it.

    Where they do not combine by the ``terms`` that are assumed, other counts are tried, and one is used by
    which all equations hold. A loss that mixes samples is taken of all of them at once, or as the mean over
    the batches. A :class:`landscape.ProblemWarning` says so.

    Args:
        problem: model, loss and data.
        terms: how many terms of the mean each sample contributes; changed where another count is right.
        first: the first samples, or the first batch.
        at: weights (P,) at which samples have different losses.
        batches: gives all of the data, batch by batch, on the device.

    Raises:
        InputError: the loss is a sum, NaN, or neither a mean nor of a size that can be taken at once.
    """
    data = problem.data
    if data.indexed and data.samples < 2:
        return  # nothing to divide
    few = _few(problem, first)
    combine = _few_combine(problem, terms, few, at)
    by_definition = terms.given is None and is_mean(problem.criterion) and not data.ragged
    if combine and (by_definition or problem.draws):
        return
    losses = None if problem.draws else _way(problem, terms, few, first, at, combine)
    if terms.given is not None and not data.indexed:
        return  # it is the user's own count, and batches stay whole
    if losses is not None:
        holds, each_one = (False, True) if combine is False else _all_hold(losses, terms, batches)
        if holds and not (data.ragged and each_one):
            return
        if terms.given is None:
            count = _count(losses, few, batches)
            if count is not None and not (holds and count == ONES):
                terms.count = count
                say_count(count, data.ragged and each_one)
            if count is not None or holds:
                return
        refuse_nan(problem, terms, losses.by_outputs, batches)
    elif by_definition and not data.indexed:
        return
    if terms.given is not None:
        raise InputError(
            "terms: by them the losses of parts of the data do not combine to that of all of it; "
            "leave terms out, or give data whose loss mixes samples as a list of batches",
            remedy="landscape.Problem(model, loss, data)",
        )
    _take_together(problem, terms, few)


def _few(problem: MeanLoss, first: tuple[Any, Any]) -> Samples | None:
    """Some samples, those with the largest and smallest sums of targets first; None where they are not two.

    Where samples have unequal numbers of terms, parts with equal sums of them would not show it.
    """
    rows = problem.data.rows(*first)
    if rows is None or len(rows) < 2:
        return None
    few = Samples(None, *problem.data.place(problem.data.samples_at(rows, *first)))
    for _, targets in named_tensors(few.y):
        if (
            targets.is_complex()
            or targets.dim() == 0
            or bool((double(targets) != double(targets).round()).any())
        ):
            continue  # of these no sum tells how many count
        order = by_sample(double(targets)).argsort(stable=True).tolist()
        return few.rows([*order[-2:], *order[:-2]])
    return few


def _few_combine(problem: MeanLoss, terms: Terms, few: Samples | None, at: Tensor) -> bool | None:
    """Return whether passes over a few samples have losses that combine by ``terms``.

    None where the loss, or the model, does not take parts of them.
    """
    losses = Losses(problem, at)
    if few is None:
        return None
    if problem.draws:
        return attempt(_random_parts_combine, losses, few, terms)
    try:
        if not math.isfinite(losses.loss(few)):
            losses = Losses(problem, problem.weights)
            if not math.isfinite(losses.loss(few)) and is_mean(problem.criterion):
                return True  # such numbers tell nothing, and need not
        if losses.eps <= FLOAT32 and _parts_combine(losses, few, terms, SURE):
            return True
        return _parts_combine(*_in_float64(losses, few), terms)
    except LandscapeError:
        raise
    except Exception:  # the loss, or the model, does not take such a part
        return None


def _in_float64(losses: Losses, few: Samples) -> tuple[Losses, Samples]:
    """Losses and samples in float64, where the model runs in it."""
    none = copy.copy(losses.problem.data)
    none.resident, none.batches = None, ()
    try:
        problem = losses.problem.on(none).to(torch.float64)
        exact = Losses(problem, double(losses.weights))
        samples = Samples(None, *problem.data.place((few.x, few.y)))
        exact.loss(samples)
    except Exception:  # a dtype that the model, or the loss, names itself
        return losses, few
    return (exact, samples) if exact.eps < losses.eps else (losses, few)


def _parts_combine(losses: Losses, few: Samples, terms: Terms, share: float = 1.0) -> bool:
    """Return whether the losses of parts of ``few`` combine, ``share`` as in :meth:`Equation.holds`.

    Of few samples each is set against the others: the terms of one may be the mean number by chance.
    """
    size = few.size
    if size >= 6:
        return losses.equation(few, [2, 5]).holds(terms, share)
    turned = (few.rows([*range(k, size), *range(k)]) for k in range(size))
    return all(losses.equation(order, [1]).holds(terms, share) for order in turned)


def _random_parts_combine(losses: Losses, few: Samples, terms: Terms) -> bool:
    """Return whether the losses of parts combine on average over draws, within their standard error."""
    ends, differences = [0, 2, 5, few.size] if few.size >= 6 else [0, 1, few.size], list[float]()
    parts = [few.rows(slice(*pair)) for pair in itertools.pairwise(ends)]
    weights = [float(terms(part.x, part.y).sum()) for part in parts]
    for seed in range(RANDOM_PASSES):
        total = sum(losses.loss(part, seed) * w for part, w in zip(parts, weights, strict=True) if w > 0)
        differences.append(total / sum(weights) - losses.loss(few, seed))
    drawn = torch.tensor(differences, dtype=torch.float64)
    error = float(drawn.std()) / math.sqrt(len(drawn))
    return abs(float(drawn.mean())) <= RANDOM_ERRORS * error + losses.rounding * abs(losses.loss(few))


def _way(
    problem: MeanLoss,
    terms: Terms,
    few: Samples | None,
    first: tuple[Any, Any],
    at: Tensor,
    combine: bool | None,
) -> Losses | None:
    """Losses by the rows of outputs, where these are the losses of passes over the parts; else by passes.

    None where the loss, or the model, takes no part of the data either way.
    """
    data, losses, passes = problem.data, Losses(problem, at, by_outputs=True), Losses(problem, at)
    if few is not None and combine is None and not data.indexed and not takes(problem, few.x):
        few = None
    if few is None:  # of one sample, or of inputs that cannot be divided
        data.divisible = data.indexed
        ends = range(1, min(2, count_samples(*first, alike=False)))
        whole = attempt(losses.samples, *first)
        return losses if whole is not None and attempt(losses.equation, whole, ends) is not None else None
    ends = range(2, few.size, 3) if few.size >= 6 else range(1, 2)
    rows = attempt(lambda: losses.equation(losses.samples(few.x, few.y), ends))
    own = attempt(passes.equation, few, ends)
    # A model that mixes samples has other outputs for parts of them.
    if own is not None and rows is not None and rows.equals(own) and rows.holds(terms) is (combine is True):
        return losses
    if own is None and (data.indexed or passes.of_batch(few, 0, random.Random(0)) is None):
        return None
    return passes


def _all_hold(losses: Losses, terms: Terms, batches: Batches) -> tuple[bool, bool]:
    """Return whether all equations hold by ``terms``, and whether each sample has one term."""
    source, holds, each_one = iter(batches()), True, True
    for equation in losses.equations(source):
        each_one &= equation.weights(terms) == [part.size for _, part in equation.parts]
        holds = equation.holds(terms)
        if not holds:
            break
    for _ in source:  # to its end, where two passes over the data are compared
        pass
    return holds, each_one


def that_hold(counts: Iterable[Count], equations: Sequence[Equation]) -> list[Count]:
    """The ``counts`` by which all ``equations`` hold."""

    def hold(count: Count) -> bool:
        return all(equation.holds(count) for equation in equations)

    return [count for count in counts if attempt(hold, count)]


def _count(losses: Losses, few: Samples | None, batches: Batches) -> Count | None:
    """A standard count of targets, or weights by class, by which all equations hold, or None."""
    counts = {ONES.code: ONES}
    classes = ClassSamples(lambda samples: losses.loss(losses.samples(samples.x, samples.y)))
    for x, y in batches():
        counts |= {count.code: count for count in candidates(x, y)}
        attempt(classes.add, Samples(None, x, y))
    # What the few samples rule out needs no pass over the data.
    hints = [] if few is None else [*losses.equations([(few.x, few.y)])]
    for weighted in (False, True):
        left = that_hold((attempt(classes.counts) or []) if weighted else counts.values(), hints)
        for equation in losses.equations(batches(), losses.problem.data.ragged) if left else ():
            left = that_hold(left, [equation])
        if left:
            rows = [[float(count(x, y).sum()) for count in left] for x, y in batches()]
            return only(left, torch.tensor(rows, dtype=torch.float64))
    return None


def only(counts: Sequence[Count], totals: Tensor) -> Count:
    """The first of ``counts``, where all weigh the batches alike, or the one that is a mean over samples.

    ``totals`` (batches, counts): the terms of each batch. Raises InputError where no target counts, or the
    counts weigh batches differently.
    """
    if not bool(totals.any()):
        raise InputError(
            "data: all its targets are left out of the loss, at least one must count (or its loss is NaN for "
            "another reason)"
        )
    shares = totals / totals.sum(0)
    if counts[0] == ONES or torch.allclose(shares, shares[:, :1].expand_as(shares), rtol=1e-9, atol=0):
        return counts[0]
    raise InputError(
        "loss: the terms of its mean may be counted in several ways, which no samples tell apart; give the "
        f"right one, such as terms={' or terms='.join(map(repr, counts[:3]))}"
    )


def refuse_nan(problem: MeanLoss, terms: Terms, by_outputs: bool, batches: Batches) -> None:
    """Raise InputError, with the batch, for a loss that is NaN at the center."""
    losses = Losses(problem, problem.weights, by_outputs)
    for number, (x, y) in enumerate(batches()):
        value = attempt(losses.loss, losses.samples(x, y))
        if value is None or not math.isnan(value) or not float(terms(x, y).sum()):
            continue
        place = f"batch {number} (the first one is batch 0)"
        if problem.data.resident is not None:
            first = number * problem.chunk
            place = f"samples {first} to {first + count_samples(x, y, alike=False) - 1}"
        where = nan_places(x, y)
        cause = (
            f"NaN in {where} of {place}, so that its loss is NaN" if where else f"the loss of {place} is NaN"
        )
        raise InputError(
            f"data: {cause}; leave such samples out, mask them, or give terms=, a count that is 0 for them"
        )


def _take_together(problem: MeanLoss, terms: Terms, few: Samples | None) -> None:
    """Take the loss, which is no mean over the samples, of all of them at once, or by batches."""
    data = problem.data
    if few is not None:
        _refuse_sum(problem, few)
        inputs, targets = data.leaves(few.x, few.y)
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
    if not need <= MEMORY_SHARE * available:
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


def _refuse_sum(problem: MeanLoss, few: Samples) -> None:
    """Raise InputError for a loss that is the sum over its samples."""
    losses = Losses(problem, problem.weights)
    halves = None if problem.draws else attempt(losses.equation, few, [few.size // 2])
    if halves is None:
        return
    total = sum(value for value, _ in halves.parts)
    if halves.whole and abs(total - halves.whole) <= halves.rounding * max(abs(total), abs(halves.whole)):
        loss, data = "loss(o, t)", "data"
        if problem.criterion is output_loss:
            batches = '[(batch, batch["labels"]) for batch in data]'
            loss, data = 'o["loss"]', '(data, data["labels"])' if problem.data.indexed else batches
        raise InputError(
            "loss: it is the sum over the samples that it is given, not the mean (reduction='sum'?)",
            remedy=f"landscape.Problem(model, lambda o, t: {loss} / len(t), {data})",
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


def say_count(count: Count, by_length: bool) -> None:
    """Warn that the terms of the mean are counted; ``by_length``: since samples differ in length."""
    why = (
        "samples differ in length, and each target counts the same"
        if by_length
        else ("by which the losses of parts of the data combine exactly")
    )
    _say(f"loss: the terms of its mean are counted as terms={count}, {why}; give terms= to say so yourself")


def _say(text: str) -> None:
    """Warn with a line, at the call of ``landscape.Problem``."""
    warnings.warn(text, ProblemWarning, stacklevel=6)
