"""Checks that a loss is the mean over its samples, by how many terms of each, and remedies if not.

A batch and three parts of it give an equation between losses, and so do the last part of a batch and the
first part of the next. Such equations over all of the data decide; verdicts are tried in order.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from landscape.core.devices import double
from landscape.core.errors import InputError, LandscapeError, ProblemWarning, warn_caller
from landscape.core.memory import available_memory
from landscape.problem.batches import attempt, count_samples, named_tensors, opened, take, tree_map
from landscape.problem.counts import (
    MAX_CLASSES,
    ONES,
    Count,
    Equation,
    Samples,
    candidates,
    class_counts,
    only,
    that_hold,
    unlike,
)
from landscape.problem.data import PROBE, not_a_number
from landscape.problem.losses import (
    Coarsest,
    Metric,
    Terms,
    is_mean,
    output_loss,
    placed_loss,
    refuse_broadcasting,
)
from landscape.problem.mean_loss import MeanLoss

Batches = Callable[[], Iterable[tuple[Any, Any]]]

# Samples that every loss is evaluated on at once anyway (MAX_CHUNK of landscape.problem.mean_loss).
AT_ONCE = 2000
# Differences above this share of what may be rounding are looked at in float64 (our choice: a batch of
# another size rounds by some eps, and losses of samples that are much alike differ by little more).
SURE, FLOAT32 = 0.02, torch.finfo(torch.float32).eps
# The relative difference that rounding may make in float64, where terms of a loss cancel each other (our
# choice).
EXACT = 1e-9
# Outputs of more numbers are not copied in float64 (our choice: half a gigabyte).
MAX_EXACT = 1 << 26
# The passes of a random loss that are averaged, and the standard errors beyond which its parts count as
# different from the whole (our choice: false once in 10⁸).
RANDOM_PASSES, RANDOM_ERRORS = 64, 6.0
# Activations of all samples at once may take this share of the available memory (our choice: a Hessian's
# product needs the graph of a gradient, and scratch space).
MEMORY_SHARE = 1 / 4
# Weights far away are moved by MOVES times as much, and multiplied by the first of FAR of which losses are
# numbers (our choice: those of networks with many layers may be infinite).
MOVES, FAR = 10, (100, 10)
# Samples by which the memory of all is extrapolated (our choice: they make pairs, triples, fours and fives).
SOME = 120


@torch.no_grad()
def takes(problem: MeanLoss, x: Any) -> bool:
    """Return whether the model takes the inputs ``x``: a model of a whole graph takes no part of it."""
    with problem.evaluating(0), warnings.catch_warnings(action="ignore"):
        return attempt(problem.outputs, problem.weights, problem.data.leaves(x, None)[0]) is not None


def _rounding(times: int, eps: float) -> float:
    """The relative difference of two losses that sums over samples may make, with the rounding ``eps``."""
    return min(times * eps, 3 * math.sqrt(eps))


def _close(a: float, b: float, share: float) -> bool:
    """Return whether two losses differ by a ``share`` at most, or are NaN or infinite alike."""
    return abs(a - b) <= share * max(abs(a), abs(b)) if math.isfinite(a - b) else str(a) == str(b)


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
        self.eps, self.error = torch.finfo(weights.dtype).eps, 0.0
        self.passes = RANDOM_PASSES if problem.draws else 1
        self.informed = False  # equations of losses that are all zero are replaced
        self._remade: Callable[[Any], Any] = lambda tree: tree
        self._exact: Any = None  # the loss in float64

    @torch.no_grad()
    def samples(self, x: Any, y: Any) -> Samples:
        """The samples (x, y), which are on the device."""
        if not self.by_outputs:
            return Samples(None, x, y)
        with self.problem.evaluating(0):
            outputs = self.problem.outputs(self.weights, self.problem.data.leaves(x, y)[0])
        tree, self._remade = opened(outputs)
        tree = tree_map(torch.Tensor.detach, tree)
        return self._in_float64(Samples(tree, x if _divisible(x, y) else None, y))

    def _in_float64(self, samples: Samples) -> Samples:
        """The samples with outputs in float64, if the loss takes that, and is the same but for rounding.

        So are the targets, where the loss takes only that: a mark of missing ones, such as -99.9, is another
        number in float64.
        """
        plain = self._seen(samples, self.problem.criterion)
        if plain is None:
            return samples
        if self._exact is not False and samples.numbers <= MAX_EXACT:
            criterion = self._exact or placed_loss(self.problem.criterion, self.problem.device, torch.float64)
            outputs, y = tree_map(
                lambda t: double(t) if t.is_floating_point() else t, (samples.outputs, samples.y)
            )
            for exact in (Samples(outputs, samples.x, targets) for targets in (samples.y, y)):
                seen = self._seen(exact, criterion)
                if seen is not None and _close(seen[0], plain[0], max(EXACT, _rounding(100, plain[1]))):
                    self._exact, self.eps = criterion, max(seen[1], self.eps if self._exact else 0.0)
                    return exact
        # It names a dtype itself, or compares numbers that another dtype has not.
        self._exact, self.eps = False, plain[1]
        return samples

    def _seen(self, samples: Samples, criterion: Any) -> tuple[float, float] | None:
        """A loss of outputs, and the largest relative rounding in it; None where it does not take them."""
        with Coarsest() as seen:
            value = attempt(self._value, samples, 0, criterion)
        if value is None:
            return None
        # What NumPy computes of the outputs is not seen.
        unseen = samples.outputs if isinstance(criterion, Metric) else ()
        dtypes = {t.dtype for _, t in named_tensors(unseen) if t.is_floating_point()} | {value.dtype}
        return float(value), max(seen.eps, *(torch.finfo(dtype).eps for dtype in dtypes))

    @torch.no_grad()
    def _value(self, samples: Samples, seed: int = 0, criterion: Any = None) -> Tensor:
        problem, criterion = self.problem, criterion or self._exact or self.problem.criterion
        x, y = problem.data.leaves(samples.x, samples.y)
        # What the loss says of so few samples is no news.
        with problem.evaluating(seed), warnings.catch_warnings(action="ignore"):
            outputs = self._remade(samples.outputs) if self.by_outputs else problem.outputs(self.weights, x)
            return torch.as_tensor(criterion(outputs, y)).detach()

    def loss(self, samples: Samples) -> float:
        """The loss of some samples, its mean over draws; what the user's model and loss raise is raised."""
        values = [self._value(samples, seed) for seed in range(self.passes)]
        # Hugging Face's causal models take the loss in float32 always.
        self.eps = max(self.eps, torch.finfo(values[0].dtype).eps)
        draws = torch.stack(values).cpu().to(torch.float64)  # a device may have no float64
        if self.passes > 1:
            self.error = max(self.error, RANDOM_ERRORS * float(draws.std()) / math.sqrt(self.passes))
        return float(draws.mean())

    @property
    def rounding(self) -> float:
        """The largest relative difference that rounding makes; a batch of another size rounds otherwise."""
        # Of the same outputs only the sum over the samples rounds.
        return max(EXACT, _rounding(100 if self.by_outputs else 1000, self.eps))

    def equation(self, samples: Samples, ends: Sequence[int], batch: int = 0) -> Equation:
        """The equation of some samples and their parts, which end at ``ends``."""
        parts = [samples.rows(slice(*pair)) for pair in itertools.pairwise([0, *ends, samples.size])]
        return self._of_parts(samples, parts, batch)

    def _of_parts(self, whole: Samples, parts: Sequence[Samples], batch: int) -> Equation:
        losses = self.loss(whole), [(self.loss(part), part) for part in parts]
        equation = Equation(batch, *losses, self.rounding, 2 * self.error)
        if self.informed and not equation.losses.any() and whole.outputs is not None:
            # All zero, as a hinge loss of a trained network: opposite outputs tell more.
            uninformed = copy.copy(self)
            uninformed.informed = False
            turned = attempt(uninformed._of_parts, whole.opposite(), [p.opposite() for p in parts], batch)
            equation = equation if turned is None or not turned.losses.isfinite().all() else turned
        return equation

    def of_two(self, a: Samples, b: Samples, batch: int, uncut: bool = False) -> Equation:
        """The equation of two parts in one, cut to one shape where theirs differ, unless ``uncut``."""
        parts = [a, b] if uncut else [a.cropped(b), b.cropped(a)]
        return self._of_parts(Samples.joined(parts), parts, batch)

    def _of_lengths(self, batch: Samples, number: int, shift: int, share: int) -> Equation:
        """The equation of the first third (``share`` 3) and the rest of each sample's targets and outputs.

        With ``shift`` 1, for a loss of outputs and the next targets, both have the target between them.
        """
        length = next(t.shape[1] for _, t in named_tensors(batch.y) if t.dim() > 1)
        ends = slice(length // share + shift), slice(length // share, None)
        return self._of_parts(batch, [batch.along(length, part) for part in ends], number)

    def far(self, few: Samples, center: Tensor) -> list[Equation]:
        """Equations of some samples at weights far from ``center``, if their loss is a number there.

        A loss may count other samples at other weights, such as a loss without its largest terms.
        """
        moved = copy.copy(self)
        for times in FAR:
            moved.weights = times * (MOVES * self.weights - (MOVES - 1) * center)
            equations = attempt(moved._on_the_way, few, attempt(self.samples, few.x, few.y))
            if equations is not None and all(math.isfinite(equation.whole) for equation in equations):
                return equations
        return []

    def _on_the_way(self, few: Samples, near: Samples) -> list[Equation]:
        """Equations of samples of which each one's outputs are at another place on the way from ``near``."""
        far = self.samples(few.x, few.y)
        pairs = zip(named_tensors(far.outputs), named_tensors(near.outputs), strict=True)
        starts = {id(t): start for (_, t), (_, start) in pairs}

        def between(powers: Tensor, t: Tensor) -> Tensor:
            start = starts[id(t)].to(t)
            if not t.is_floating_point() or t.shape[:1] != (few.size,):
                return t
            shares = (t.norm() / start.norm()).clamp(min=1) ** -powers.to(t)
            return start.lerp(t, shares.view(-1, *[1] * (t.dim() - 1)))

        powers = torch.linspace(0, 1, few.size)
        moves = [partial(between, moved) for moved in (powers, 1 - powers)[: 1 + self.by_outputs]]
        samples = [far._replace(outputs=tree_map(move, far.outputs)) for move in moves]
        return [self.equation(moved, few.ends) for moved in samples]

    def equations(
        self,
        batches: Iterable[tuple[Any, Any]],
        ragged: bool = False,
        cuts: int = 1,
        shift: int = 0,
        uncut: bool = False,
    ) -> Iterator[Equation]:
        """Those of each batch and parts of it, and of its first part with the last one of the batch before.

        Parts that the loss, or the model, does not take have none. A batch without any, which is not the
        first, has one that holds by no count.

        Args:
            batches: on the device.
            ragged: samples differ in length, so that batches are cut along it, too: a mean over targets
                combines by their number.
            cuts: how often each batch is cut.
            shift: 1 for a loss of outputs and the next targets.
            uncut: a batch and the one before have no equation where their samples differ in shape.
        """
        before = list[Samples]()
        for number, (x, y) in enumerate(batches):
            batch = self.samples(x, y)
            every = self.cuts(batch, cuts, number)
            parts = [part for _, part in every[0].parts] if every else [batch]
            joined = attempt(self.of_two, before[-1], parts[0], number, uncut) if before else None
            every += [] if joined is None else [joined]
            yield from every or ([Equation(number, 1.0, [], 0.0)] if number else [])
            shares = (3, 2) if ragged and self.by_outputs else ()
            along = (attempt(self._of_lengths, batch, number, shift, share) for share in shares)
            yield from itertools.islice((equation for equation in along if equation is not None), 1)
            before = parts

    def cuts(self, batch: Samples, times: int = 1, number: int = 0) -> list[Equation]:
        """Equations of a batch and parts of it: three of any size, or else halves or thirds.

        After the first one the samples are in other orders.
        """
        size, draws, every = batch.size, random.Random(number), list[Equation]()
        even = [range(size // k, size, size // k) for k in (2, 3) if size % k == 0 and size > k]
        for k in range(times if size > 1 else 0):
            if k:  # a tensor may have fewer rows, as where time comes first
                batch = attempt(batch.rows, draws.sample(range(size), size)) or batch
            uneven = sorted(draws.sample(range(1, size), min(2, size - 1))) if k or size > 5 else batch.ends
            equations = (attempt(self.equation, batch, ends, number) for ends in (uneven, *even))
            every += itertools.islice((e for e in equations if e is not None), 1)
        return every


def _divisible(x: Any, y: Any) -> bool:
    """Return whether all tensors of a batch hold each sample once."""
    with contextlib.suppress(LandscapeError):
        return count_samples(x, y, alike=True) > 0
    return False


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
    if problem.data.indexed and problem.data.samples < 2:
        return  # nothing to divide
    on = _Decision(problem, terms, first, at, batches)
    verdicts = (
        on.as_it_is, on.by_terms, on.by_count, on.not_as_given, on.a_sum, on.over_batches, on.at_once,
    )  # fmt: skip
    for verdict in verdicts:
        if verdict():
            return


class _Decision:
    """The verdicts on a loss, by a few samples and by all, in the order in which they are tried.

    Each returns whether it is decided how the loss is taken, or refuses the loss.
    """

    def __init__(
        self, problem: MeanLoss, terms: Terms, first: tuple[Any, Any], at: Tensor, batches: Batches
    ) -> None:
        self.problem, self.terms, self.at, self.batches = problem, terms, at, batches
        self.data, self.first = problem.data, first
        self.definite = terms.given is None and is_mean(problem.criterion) and not self.data.ragged
        self.few: Samples | None = None
        self.by_passes: Equation | None = None  # of passes over the few samples and parts of them
        self.combine: bool | None = None  # whether that holds by the terms; None without
        some = self.data.some(*first)
        if some is not None and count_samples(*some, alike=False) > 1:
            self.few = Samples(None, *self.data.place(some))
            self.combine = attempt(self._combine, self.few)
            if self.combine is None and not self.data.indexed and not takes(problem, self.few.x):
                self.few = None
        self.data.divisible = self.few is not None or self.data.indexed
        self.losses: Losses | None = None
        self.terms_hold = False  # all equations hold by the terms
        self.hints: list[Equation] = []  # of the few samples, far away

    def as_it_is(self) -> bool:
        """It is PyTorch's own, and a mean over a few samples; or the user counts for batches."""
        is_mean_itself = bool(self.combine) and self.definite
        return is_mean_itself or (self.terms.given is not None and not self.data.indexed)

    def by_terms(self) -> bool:
        """All equations hold by the terms that are assumed, or it is PyTorch's own and cannot be divided."""
        self.losses = self._way()
        if self.losses is None and self.problem.draws and self.combine and self.terms.given is None:
            _say("loss: it is random; its terms were decided on the first samples alone; give terms=")
        if self.losses is None:
            return bool(self.problem.draws and self.combine) or (self.definite and not self.data.indexed)
        self.losses.informed = self.losses.by_outputs and not self.problem.draws
        if self.combine is False:
            return False
        # To the end, where two passes over the data are compared.
        self.terms_hold, ones = True, self.data.ragged
        parts = [self.few] if self.few else []
        for equation in self.losses.equations(self.batches()):
            parts += [part.rows(slice(1)) for _, part in equation.parts if len(parts) < PROBE]
            ones = ones and equation.weights(self.terms) == [part.size for _, part in equation.parts]
            self.terms_hold = self.terms_hold and equation.combines_by(self.terms)
        if self.few is not None and self.terms.given is None:
            some = attempt(Samples.joined, parts) or self.few
            self.hints = self.losses.far(some, self.problem.weights)
            self.terms_hold = self.terms_hold and all(far.combines_by(self.terms) for far in self.hints)
        return self.terms_hold and not ones  # where samples differ in length, their targets may count

    def by_count(self) -> bool:
        """All equations hold by a standard count of targets, or by weights of their classes."""
        if self.losses is None or self.terms.given is not None:
            return False
        # What the few samples rule out needs no pass over the data.
        if self.few is not None:
            self.hints += self.losses.equations([(self.few.x, self.few.y)], cuts=self.few.size)
        count = _count(self.losses, self.hints, self.batches)
        if self.problem.draws and count and self.by_passes and not self.by_passes.combines_by(count):
            count = None  # the model mixes samples, of which outputs of one pass tell nothing
        if count is not None and not (self.terms_hold and count == ONES):
            self.terms.count = count
            say_count(count)
        return self.terms_hold or count is not None

    def not_as_given(self) -> bool:
        """They do not hold by the terms of the user, of data that can be divided."""
        if self.terms.given is None:
            return False
        refuse_nan(self.problem, self.terms, self.batches)
        raise InputError(
            "terms: by them the losses of parts of the data do not combine to that of all; leave terms out",
            remedy="landscape.Problem(model, loss, data)",
        )

    def a_sum(self) -> bool:
        """The loss is a sum over the samples, or pairs each output with each target."""
        problem, few = self.problem, self.few
        if few is None:
            return False
        halves = attempt(Losses(problem, problem.weights).equation, few, [few.size // 2])
        every = self.losses.equations(self.batches()) if self.losses is not None else ()
        if halves is not None and halves.of_sum() and all(e.of_sum() for e in every if e.losses.any()):
            loss, data = "loss(o, t)", "data"
            if problem.criterion is output_loss:
                batches = '[(batch, batch["labels"]) for batch in data]'
                loss, data = 'o["loss"]', '(data, data["labels"])' if self.data.indexed else batches
            raise InputError(
                "loss: it is the sum over the samples that it is given, not the mean (reduction='sum'?)",
                remedy=f"landscape.Problem(model, lambda o, t: {loss} / len(t), {data})",
            )
        inputs, targets = self.data.leaves(few.x, few.y)
        with torch.no_grad(), problem.evaluating(0):
            outputs = attempt(problem.outputs, problem.weights, inputs)
            refuse_broadcasting(problem.criterion, outputs, targets)
        return False

    def over_batches(self) -> bool:
        """It is the mean over the batches that were given."""
        if self.data.indexed:
            return False
        self.terms.by_batch = True
        refuse_nan(self.problem, self.terms, self.batches)
        if self.data.own_batches:
            raise InputError(
                "loss: it mixes the samples of a batch, and a Dataset has no batches; give a DataLoader",
                remedy="landscape.Problem(model, loss, torch.utils.data.DataLoader(data, batch_size=64))",
            )
        self.data.mix()
        if not isinstance(self.data.batches, (list, tuple)) or len(self.data.batches) > 1:
            mean = "the loss is the mean over the batches, which have equal weight"
            _say(f"loss: it mixes the samples of a batch, or weighs them; {mean}")
        return True

    def at_once(self) -> bool:
        """It is taken of all samples at once, where these fit in memory."""
        problem, data = self.problem, self.data
        need, available = _bytes_at_once(problem), available_memory(problem.device)
        if not need <= MEMORY_SHARE * available:
            if self.losses is not None:
                refuse_nan(problem, self.terms, self.batches)
            memory = f"about {need / 2**30:.1f} GiB" if math.isfinite(need) else "more than is known to fit"
            remedy = "[data]" if math.isnan(need) else data.in_batches()
            raise InputError(
                f"loss: it mixes samples, and all {data.samples:,} at once need {memory} of "
                f"{available / 2**30:.1f} GiB; give a list of batches, of which the loss is then the mean",
                remedy=f"landscape.Problem(model, loss, {remedy})",
            )
        data.mix()
        refuse_nan(problem, self.terms, self.batches)
        at_once = f"all {data.samples:,} are evaluated at once"
        _say(f"loss: it mixes samples, or weighs them; {at_once}; give a list of batches for their mean")
        return True

    def _way(self) -> Losses | None:
        """Losses by the rows of outputs, where these are the losses of passes over the parts; else by passes.

        None where the loss, or the model, takes no part of the data either way.
        """
        losses, passes = (Losses(self.problem, self.at, by_outputs) for by_outputs in (True, False))
        some = self.few or Samples(None, *self.first)
        if self.problem.draws:  # outputs have the random numbers of one pass, which the whole and parts share
            losses.passes = 1
            samples = losses.samples(some.x, some.y)
            values = [attempt(losses._value, samples, seed) for seed in range(RANDOM_PASSES)]
            return losses if len({str(value) for value in values} - {"None"}) == 1 else None
        rows = attempt(lambda: losses.equation(losses.samples(some.x, some.y), some.ends))
        if self.few is None:  # of one sample, or of inputs that cannot be divided
            models_own = self.problem.criterion is output_loss  # which no rows of outputs have
            return None if rows is None else passes if models_own else losses
        # A model that mixes samples has other outputs for parts of them.
        alike = rows is not None and self.by_passes is not None and rows.equals(self.by_passes)
        if alike and rows is not None and rows.combines_by(self.terms) is (self.combine is True):
            return losses
        return None if self.by_passes is None and (self.data.indexed or not passes.cuts(some)) else passes

    def _combine(self, few: Samples) -> bool:
        """Return whether passes over a few samples have losses that combine by the terms."""
        problem, losses = self.problem, Losses(self.problem, self.at)
        self.by_passes = first = losses.equation(few, few.ends)
        if not math.isfinite(first.whole):
            losses = Losses(problem, problem.weights)
            first = losses.equation(few, few.ends)
            if not math.isfinite(first.whole) and is_mean(problem.criterion):
                return True  # such numbers tell nothing, and need not
        if losses.eps <= FLOAT32 and first.combines_by(self.terms, SURE):
            return True
        none = copy.copy(self.data)
        none.resident, none.batches = None, ()
        with contextlib.suppress(Exception):  # a dtype that the model, or the loss, names itself
            problem = problem.on(none).to(torch.float64)
            exact = Losses(problem, double(losses.weights))
            equation = exact.equation(Samples(None, *problem.data.place((few.x, few.y))), few.ends)
            # A mark of missing targets, such as -99.9, is another number in float64.
            first = equation if exact.eps < losses.eps and equation.equals(first) else first
        return first.combines_by(self.terms)


def _count(losses: Losses, hints: Sequence[Equation], batches: Batches) -> Count | None:
    """A count of targets, or weights by class, by which all equations, and the hints, hold, or None."""
    size, by_code, ragged, uncut = 0, {ONES.code: ONES}, losses.problem.data.ragged, False
    for x, y in batches():
        size += 1
        by_code |= {count.code: count for count in candidates(x, y)}

    def explain(counts: Iterable[Count], shift: int = 0) -> list[Count]:
        remaining = that_hold(counts, hints)
        equations = losses.equations(batches(), ragged and not uncut, shift=shift, uncut=uncut)
        while remaining and (equation := next(equations, None)) is not None:
            remaining = that_hold(remaining, [equation])
        return remaining

    remaining = explain(by_code.values())
    if ragged and not remaining:
        remaining = explain((count for count in by_code.values() if count.cut), shift=1)
    if ragged and not remaining:  # lengths among the inputs, which no cut changes
        uncut = True
        remaining = explain(c for c in by_code.values() if c.of_inputs and c.function == "numbers")
    if not remaining and (not hints or class_counts(hints, sure=False)):
        cuts = -(-2 * MAX_CLASSES // size) if losses.by_outputs else 1
        remaining = explain(class_counts(losses.equations(batches(), ragged, cuts)))
    while remaining:
        rows = [[float(count(x, y).sum()) for count in remaining] for x, y in batches()]
        totals = torch.tensor(rows, dtype=torch.float64)
        pair = unlike(totals)
        pair_samples = [losses.samples(*batch) for number, batch in enumerate(batches()) if number in pair]
        joined = attempt(losses.of_two, *pair_samples, pair[0], uncut) if pair_samples else None
        rest = remaining if joined is None else that_hold(remaining, [joined])
        if len(rest) == len(remaining):
            return only(remaining, totals)
        remaining = rest
    return None


def refuse_nan(problem: MeanLoss, terms: Terms, batches: Batches) -> None:
    """Raise InputError, with the batch, for a loss that is NaN at the center."""
    losses = Losses(problem, problem.weights)
    losses.passes = 1
    for number, (x, y) in enumerate(batches()):
        value = attempt(losses.loss, Samples(None, x, y))
        if value is None or not math.isnan(value) or not float(terms(x, y).sum()):
            continue
        where = f"batch {number} (the first one is batch 0)"
        if problem.data.resident is not None:
            first = number * problem.chunk
            where = f"samples {first} to {first + count_samples(x, y, alike=False) - 1}"
        raise not_a_number(x, y, value, where)


def _bytes_at_once(problem: MeanLoss) -> float:
    """The bytes that a pass of all samples saves, from those of a few, as a·n + b·n²; NaN if unknown."""
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
        return 0.0 if samples <= AT_ONCE else math.nan
    square = max(0.0, (large / (2 * SOME) - small / SOME) / SOME)
    return samples * (small / SOME - SOME * square) + square * samples**2


def say_count(count: Count) -> None:
    """Warn that the terms of the mean are counted."""
    _say(f"loss: the terms of its mean are counted as terms={count.code}; give terms= to say so yourself")


def _say(text: str) -> None:
    """Warn with a line, at the call of ``landscape.Problem``."""
    warn_caller(text, ProblemWarning)
