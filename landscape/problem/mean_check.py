"""Checks that a loss is the mean over its samples, with a number of terms for each, and remedies if not.

The losses of a batch and of three parts of it give an equation, and so do those of the last part of a batch
and the first part of the next. Such equations over all of the data decide.
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
from landscape.problem import counts
from landscape.problem.batches import attempt, count_samples, named_tensors, opened, take, tree_map
from landscape.problem.counts import MAX_CLASSES, ONES, Count, Equation, Samples
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

# The samples that are evaluated at once for any loss (MAX_CHUNK of landscape.problem.data).
AT_ONCE = 2000
# Differences above this share of the largest rounding are computed again in float64 (our choice: a batch of
# another size rounds by some eps, and losses of similar samples differ by little more).
SURE, FLOAT32 = 0.02, torch.finfo(torch.float32).eps
# The largest relative difference by rounding in float64, if terms of a loss cancel each other (our choice).
EXACT = 1e-9
# Outputs of more numbers are not copied in float64 (our choice: half a gigabyte).
MAX_EXACT = 1 << 26
# The passes of a random loss that are averaged, and the standard errors beyond which its parts count as
# different from the whole (our choice: false once in 10⁸).
RANDOM_PASSES, RANDOM_ERRORS = 64, 6.0
# The largest share of the available memory for activations of all samples (our choice: Hessians need more).
MEMORY_SHARE = 1 / 4
# Far weights: the displacement from the center times MOVES, then multiplied by the first of FAR that gives
# finite losses (our choice: losses of networks with many layers may be infinite).
MOVES, FAR = 10, (100, 10)
# Samples from which the memory of all is extrapolated (our choice: a multiple of 2, 3, 4 and 5).
SOME = 120


@torch.no_grad()
def takes(problem: MeanLoss, x: Any) -> bool:
    """Return whether the model accepts the inputs ``x``: a model of a whole graph accepts no part of it."""
    with problem.evaluating(0), warnings.catch_warnings(action="ignore"):
        return attempt(problem.outputs, problem.weights, problem.data.for_pass(x, None)[0]) is not None


def _rounding(times: int, eps: float) -> float:
    """Return the largest relative difference of two losses by the rounding ``eps`` of sums over samples."""
    return min(times * eps, 3 * math.sqrt(eps))


def _close(a: float, b: float, share: float) -> bool:
    """Return whether two losses differ relatively by at most ``share``, or are the same NaN or infinity."""
    return abs(a - b) <= share * max(abs(a), abs(b)) if math.isfinite(a - b) else str(a) == str(b)


class Losses:
    """The losses of samples, and equations between them, at one vector of weights.

    Args:
        problem: model and loss.
        weights: θ (P,).
        cuts_outputs: whether the loss of a part of a batch is computed from rows of the outputs of one pass
            over the batch, in float64 if the loss accepts that. Otherwise each part has its own pass.
    """

    def __init__(self, problem: MeanLoss, weights: Tensor, cuts_outputs: bool = False) -> None:
        self.problem, self.weights, self.cuts_outputs = problem, weights, cuts_outputs
        self.eps, self.error = torch.finfo(weights.dtype).eps, 0.0  # error: the largest so far
        self.passes = RANDOM_PASSES if problem.draws else 1
        self.informed = False  # whether opposite outputs replace outputs whose losses are all zero
        self._as_outputs: Callable[[Any], Any] = lambda tree: tree
        self._exact: Any = None  # the loss in float64; False if it accepts no outputs in float64

    @torch.no_grad()
    def samples(self, x: Any, y: Any) -> Samples:
        """Return the samples (x, y), which are on the device, with their outputs if they are needed."""
        if not self.cuts_outputs:
            return Samples(None, x, y)
        with self.problem.evaluating(0):
            outputs = self.problem.outputs(self.weights, self.problem.data.for_pass(x, y)[0])
        tree, self._as_outputs = opened(outputs)
        tree = tree_map(torch.Tensor.detach, tree)
        is_divisible = False
        with contextlib.suppress(LandscapeError):  # unless all tensors have each sample once
            is_divisible = count_samples(x, y, equal_lengths=True) > 0
        return self._in_float64(Samples(tree, x if is_divisible else None, y))

    def _in_float64(self, samples: Samples) -> Samples:
        """Return the samples with outputs in float64, if the loss accepts that and changes by rounding only.

        The targets are converted only if the loss needs it: a mark of missing targets, such as -99.9, is
        another number in float64.
        """
        value, eps = self._value_and_eps(samples, self.problem.criterion) or (None, 0.0)
        if value is None:
            return samples
        if self._exact is not False and samples.numbers <= MAX_EXACT:
            criterion = self._exact or placed_loss(self.problem.criterion, self.problem.device, torch.float64)
            pair = samples.outputs, samples.y
            outputs, exact_targets = tree_map(lambda t: double(t) if t.is_floating_point() else t, pair)
            for targets in (samples.y, exact_targets):
                exact = Samples(outputs, samples.x, targets)
                exact_value, exact_eps = self._value_and_eps(exact, criterion) or (None, 0.0)
                if exact_value is not None and _close(exact_value, value, max(EXACT, _rounding(100, eps))):
                    self.eps = max(exact_eps, self.eps) if self._exact else exact_eps
                    self._exact = criterion
                    return exact
        # The loss names a dtype, or compares with numbers that float64 does not have.
        self._exact, self.eps = False, eps
        return samples

    def _value_and_eps(self, samples: Samples, criterion: Any) -> tuple[float, float] | None:
        """Return a loss of outputs, and the coarsest precision in it; None if it does not accept them."""
        with Coarsest() as coarsest:
            value = attempt(self._value, samples, 0, criterion)
        if value is None:
            return None
        # The mode does not see the computations of NumPy, which have the precision of the outputs.
        outputs = samples.outputs if isinstance(criterion, Metric) else ()
        dtypes = {t.dtype for _, t in named_tensors(outputs) if t.is_floating_point()} | {value.dtype}
        return float(value), max(coarsest.eps, *(torch.finfo(dtype).eps for dtype in dtypes))

    @torch.no_grad()
    def _value(self, samples: Samples, seed: int = 0, criterion: Any = None) -> Tensor:
        """Return the loss of some samples with the random numbers of ``seed``."""
        problem, criterion = self.problem, criterion or self._exact or self.problem.criterion
        x, y = problem.data.for_pass(samples.x, samples.y)
        # Warnings of the user's loss about few samples are not for the user.
        with problem.evaluating(seed), warnings.catch_warnings(action="ignore"):
            tree = samples.outputs
            outputs = self._as_outputs(tree) if self.cuts_outputs else problem.outputs(self.weights, x)
            return torch.as_tensor(criterion(outputs, y)).detach()

    def loss(self, samples: Samples) -> float:
        """Return the loss of some samples, its mean over draws; errors of the user's model and loss pass."""
        values = [self._value(samples, seed) for seed in range(self.passes)]
        # Hugging Face's causal models compute the loss in float32 always.
        self.eps = max(self.eps, torch.finfo(values[0].dtype).eps)
        draws = torch.stack(values).cpu().to(torch.float64)  # a device may have no float64
        if self.passes > 1:
            self.error = max(self.error, RANDOM_ERRORS * float(draws.std()) / math.sqrt(self.passes))
        return float(draws.mean())

    @property
    def rounding(self) -> float:
        """The largest relative difference by rounding: of sums over samples, and of passes by batch size."""
        return max(EXACT, _rounding(100 if self.cuts_outputs else 1000, self.eps))

    def equation(self, samples: Samples, ends: Sequence[int]) -> Equation:
        """Return the equation of some samples and their parts, which end at ``ends``."""
        parts = [samples.rows(slice(*pair)) for pair in itertools.pairwise([0, *ends, samples.size])]
        return self._of_parts(samples, parts)

    def _of_parts(self, whole: Samples, parts: Sequence[Samples]) -> Equation:
        """Return the equation of the samples ``whole`` and their ``parts``."""
        loss, losses = self.loss(whole), [(self.loss(part), part) for part in parts]
        equation = Equation(loss, losses, self.rounding, 2 * self.error)
        if self.informed and not equation.losses.any() and whole.outputs is not None:
            # All losses are zero, such as hinge losses of a trained network; opposite outputs have others.
            uninformed = copy.copy(self)
            uninformed.informed = False
            opposite = attempt(uninformed._of_parts, whole.opposite(), [p.opposite() for p in parts])
            return opposite if opposite is not None and opposite.losses.isfinite().all() else equation
        return equation

    def of_two(self, a: Samples, b: Samples, keep_lengths: bool = False) -> Equation:
        """Return the equation of two parts together, cut to one shape unless ``keep_lengths``."""
        parts = [a, b] if keep_lengths else [a.cropped(b), b.cropped(a)]
        return self._of_parts(Samples.joined(parts), parts)

    def _of_lengths(self, batch: Samples, shift: int, divisor: int) -> Equation:
        """Return the equation of the first part of each sample's targets and outputs, and their rest.

        The first part is 1/``divisor`` of the length. With ``shift`` 1, for a loss of outputs and the next
        targets, both parts have the target between them.
        """
        length = next(t.shape[1] for _, t in named_tensors(batch.y) if t.dim() > 1)
        slices = slice(length // divisor + shift), slice(length // divisor, None)
        return self._of_parts(batch, [batch.along(length, part) for part in slices])

    def far(self, few: Samples, center: Tensor) -> list[Equation]:
        """Return equations of some samples at weights far from ``center``; [] if no loss is finite there.

        A loss may count other samples at other weights, such as a loss without its largest terms.
        """
        moved = copy.copy(self)
        for factor in FAR:
            moved.weights = factor * (MOVES * self.weights - (MOVES - 1) * center)
            equations = attempt(moved._interpolated, few, attempt(self.samples, few.x, few.y))
            if equations is not None and all(math.isfinite(equation.whole) for equation in equations):
                return equations
        return []

    def _interpolated(self, few: Samples, near: Samples) -> list[Equation]:
        """Return equations of samples whose outputs lie between those of ``near`` and those at these weights.

        The first sample has the far output, the last one the near output; of outputs, the reverse, too.
        """
        far = self.samples(few.x, few.y)
        pairs = zip(named_tensors(far.outputs), named_tensors(near.outputs), strict=True)
        near_outputs = {id(t): near_t for (_, t), (_, near_t) in pairs}

        def interpolate(powers: Tensor, t: Tensor) -> Tensor:
            start = near_outputs[id(t)].to(t)
            if not t.is_floating_point() or t.shape[:1] != (few.size,):
                return t
            shares = (t.norm() / start.norm()).clamp(min=1) ** -powers.to(t)
            return start.lerp(t, shares.view(-1, *[1] * (t.dim() - 1)))

        powers = torch.linspace(0, 1, few.size)
        orders = [powers, 1 - powers] if self.cuts_outputs else [powers]
        trees = [tree_map(partial(interpolate, order), far.outputs) for order in orders]
        return [self.equation(far._replace(outputs=tree), few.ends) for tree in trees]

    def equations(
        self, batches: Iterable[tuple[Any, Any]], ragged: bool = False, divisions: int = 1, shift: int = 0,
        keep_lengths: bool = False,
    ) -> Iterator[Equation]:  # fmt: skip
        """Yield equations between the loss of each batch and the losses of its parts.

        The last part of a batch and the first part of the next one also give an equation. If a batch after
        the first one gives none, an equation is yielded that holds with no :class:`.Count`.

        Args:
            batches: the batches, on the device.
            ragged: whether samples differ in length. With ``cuts_outputs``, each batch is then also divided
                along the length. These equations show whether a loss is a mean over targets.
            divisions: the number of equations of each batch, each of another division into parts.
            shift: 1 for a loss that compares outputs with the next targets, else 0.
            keep_lengths: True: samples are neither divided along the length nor cut to another batch's shape.
        """
        previous_parts = list[Samples]()
        for number, (x, y) in enumerate(batches):
            batch = self.samples(x, y)
            equations = self.equations_of_batch(batch, divisions, number)
            parts = [part for _, part in equations[0].parts] if equations else [batch]
            if previous_parts:
                joint_equation = attempt(self.of_two, previous_parts[-1], parts[0], keep_lengths)
                if joint_equation is not None:
                    equations.append(joint_equation)
            if number and not equations:
                equations = [Equation(whole=1.0, parts=[], rounding=0.0)]  # holds with no count
            yield from equations
            if ragged and self.cuts_outputs and not keep_lengths:
                for divisor in (3, 2):  # halves, if the loss does not accept a third of the length
                    equation = attempt(self._of_lengths, batch, shift, divisor)
                    if equation is not None:
                        yield equation
                        break
            previous_parts = parts

    def equations_of_batch(self, batch: Samples, divisions: int = 1, number: int = 0) -> list[Equation]:
        """Return equations of a batch and three parts of it, or halves or thirds if these are not accepted.

        For all equations after the first one, the samples are in random order.
        """
        size, draws, equations = batch.size, random.Random(number), list[Equation]()
        even_ends = [range(size // k, size, size // k) for k in (2, 3) if size % k == 0 and size > k]
        for k in range(divisions if size > 1 else 0):
            if k:  # some tensors may have fewer rows, such as those with time first
                batch = attempt(batch.rows, draws.sample(range(size), size)) or batch
            is_random = k > 0 or size > 5
            random_ends = sorted(draws.sample(range(1, size), min(2, size - 1))) if is_random else batch.ends
            tried = (attempt(self.equation, batch, ends) for ends in (random_ends, *even_ends))
            equations += itertools.islice(filter(None, tried), 1)
        return equations


def check_mean(problem: MeanLoss, terms: Terms, first: tuple[Any, Any], at: Tensor, batches: Batches) -> None:
    """Check that L(θ) is a mean over terms, and find how many terms each sample has.

    If an :class:`.Equation` between losses does not hold with the assumed ``terms``, another count of terms
    with which all equations hold is used. If there is no such count, the loss mixes samples. With a warning,
    L(θ) is then the mean over the user's batches, or the loss of all samples at once.

    Args:
        problem: model, loss and data.
        terms: the terms of each sample in the mean; changed if another count is right.
        first: the first samples, or the first batch.
        at: weights (P,) at which samples have different losses.
        batches: returns an iterator over all batches of the data, on the device.

    Raises:
        InputError: the loss is NaN or a sum; or it mixes samples, and not all samples fit in memory.
    """
    if problem.data.indexed and problem.data.samples < 2:
        return  # an equation needs two samples
    decision = _Decision(problem, terms, first, at, batches)
    for step in (
        decision.accept_known_mean, decision.accept_terms, decision.accept_count,
        decision.refuse_given_terms, decision.refuse_sum, decision.average_over_batches,
        decision.evaluate_at_once,
    ):  # fmt: skip
        if step():
            return


class _Decision:
    """The steps of a decision on a loss, from a few samples and from all, in the order of the calls.

    Each step returns whether it decides, or raises InputError. The last step always decides or raises.
    """

    def __init__(
        self, problem: MeanLoss, terms: Terms, first: tuple[Any, Any], at: Tensor, batches: Batches
    ) -> None:
        self.problem, self.terms, self.at, self.batches = problem, terms, at, batches
        self.data, self.first = problem.data, first
        self.definite = terms.given is None and is_mean(problem.criterion) and not self.data.ragged
        self.few: Samples | None = None  # a few samples; None if the data cannot be divided
        self.by_passes: Equation | None = None  # the equation of passes over these and their parts
        self.combine: bool | None = None  # whether that holds with the terms; None without an equation
        some = self.data.pick_if_divisible(*first)
        if some is not None and count_samples(*some) > 1:
            self.few = Samples(None, *self.data.place(some))
            self.combine = attempt(self._combine, self.few)
            if self.combine is None and not self.data.indexed and not takes(problem, self.few.x):
                self.few = None
        self.data.divisible = self.few is not None or self.data.indexed
        self.losses: Losses | None = None  # the losses in the equations over all data
        self.terms_hold = False  # whether all equations hold with the terms
        self.hints: list[Equation] = []  # equations of the few samples, at weights far away

    def accept_known_mean(self) -> bool:
        """Return whether the loss is PyTorch's own mean, also of a few samples, or has the user's terms."""
        is_mean_itself = bool(self.combine) and self.definite
        return is_mean_itself or (self.terms.given is not None and not self.data.indexed)

    def accept_terms(self) -> bool:
        """Return whether all equations hold with the terms, or a loss of PyTorch's cannot be divided."""
        self.losses = self._losses_of_parts()
        if self.losses is None and self.problem.draws and self.combine and self.terms.given is None:
            _say("loss: it is random; its terms were decided on the first samples alone; give terms=")
        if self.losses is None:
            return bool(self.problem.draws and self.combine) or (self.definite and not self.data.indexed)
        self.losses.informed = self.losses.cuts_outputs and not self.problem.draws
        if self.combine is False:
            return False
        # No early end: the caller compares the checksums of two whole passes over the data.
        self.terms_hold, counts_samples = True, self.data.ragged
        parts = [self.few] if self.few else []
        for equation in self.losses.equations(self.batches()):
            parts += [part.rows(slice(1)) for _, part in equation.parts if len(parts) < PROBE]
            sizes = [part.size for _, part in equation.parts]
            counts_samples = counts_samples and equation.weights(self.terms) == sizes
            self.terms_hold = self.terms_hold and equation.combines_by(self.terms)
        if self.few is not None and self.terms.given is None:
            some = attempt(Samples.joined, parts) or self.few
            self.hints = self.losses.far(some, self.problem.weights)
            self.terms_hold = self.terms_hold and all(far.combines_by(self.terms) for far in self.hints)
        return self.terms_hold and not counts_samples  # of ragged samples, the targets may count instead

    def accept_count(self) -> bool:
        """Return whether all equations hold with a usual count of targets, or weights of their classes."""
        if self.losses is None or self.terms.given is not None:
            return False
        if self.few is not None:  # equations of few samples exclude counts without a pass over the data
            self.hints += self.losses.equations([(self.few.x, self.few.y)], divisions=self.few.size)
        count = _find_count(self.losses, self.hints, self.batches)
        if self.problem.draws and count and self.by_passes and not self.by_passes.combines_by(count):
            count = None  # the model mixes samples, so that rows of outputs have no losses of their own
        if count is not None and not (self.terms_hold and count == ONES):
            self.terms.count = count
            say_count(count)
        return self.terms_hold or count is not None

    def refuse_given_terms(self) -> bool:
        """Raise InputError for the user's terms, with which the equations do not hold."""
        if self.terms.given is None:
            return False
        refuse_nan(self.problem, self.terms, self.batches)
        raise InputError(
            "terms: by them the losses of parts of the data do not combine to that of all; leave terms out",
            remedy="landscape.Problem(model, loss, data)",
        )

    def refuse_sum(self) -> bool:
        """Raise InputError for a loss that is a sum over the samples, or broadcasts outputs and targets."""
        problem, few = self.problem, self.few
        if few is None:
            return False
        halves = attempt(Losses(problem, problem.weights).equation, few, [few.size // 2])
        equations = self.losses.equations(self.batches()) if self.losses is not None else ()
        if halves is not None and halves.of_sum() and all(e.of_sum() for e in equations if e.losses.any()):
            loss, data = "loss(o, t)", "data"
            if problem.criterion is output_loss:
                batches = '[(batch, batch["labels"]) for batch in data]'
                loss, data = 'o["loss"]', '(data, data["labels"])' if self.data.indexed else batches
            raise InputError(
                "loss: it is the sum over the samples that it is given, not the mean (reduction='sum'?)",
                remedy=f"landscape.Problem(model, lambda o, t: {loss} / len(t), {data})",
            )
        inputs, targets = self.data.for_pass(few.x, few.y)
        with torch.no_grad(), problem.evaluating(0):
            outputs = attempt(problem.outputs, problem.weights, inputs)
            refuse_broadcasting(problem.criterion, outputs, targets)
        return False

    def average_over_batches(self) -> bool:
        """Let the loss be the mean over the user's batches; return False for data without batches."""
        if self.data.indexed:
            return False
        self.terms.by_batch = True
        refuse_nan(self.problem, self.terms, self.batches)
        if self.data.is_dataset:
            raise InputError(
                "loss: it mixes the samples of a batch, and a Dataset has no batches; give a DataLoader",
                remedy="landscape.Problem(model, loss, torch.utils.data.DataLoader(data, batch_size=64))",
            )
        self.data.mix()
        if not isinstance(self.data.batches, (list, tuple)) or len(self.data.batches) > 1:
            mean = "the loss is the mean over the batches, which have equal weight"
            _say(f"loss: it mixes the samples of a batch, or weighs them; {mean}")
        return True

    def evaluate_at_once(self) -> bool:
        """Let the loss be that of all samples at once; raise InputError if they do not fit in memory."""
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

    def _losses_of_parts(self) -> Losses | None:
        """Return losses by rows of outputs, if they equal the losses of passes over parts; else by passes.

        None if the loss or the model accepts no part of the data either way.
        """
        by_rows, by_passes = Losses(self.problem, self.at, cuts_outputs=True), Losses(self.problem, self.at)
        some = self.few or Samples(None, *self.first)
        if self.problem.draws:  # rows of outputs share the random numbers of one pass
            by_rows.passes = 1
            samples = by_rows.samples(some.x, some.y)
            values = [attempt(by_rows._value, samples, seed) for seed in range(RANDOM_PASSES)]
            return by_rows if len({str(value) for value in values} - {"None"}) == 1 else None
        rows = attempt(lambda: by_rows.equation(by_rows.samples(some.x, some.y), some.ends))
        if self.few is None:  # one sample, or inputs that cannot be divided
            # The loss in a model's output is not computed from rows of outputs.
            losses = by_passes if self.problem.criterion is output_loss else by_rows
            return None if rows is None else losses
        # A model that mixes samples has other outputs for parts of them.
        is_equal = rows is not None and self.by_passes is not None and rows.equals(self.by_passes)
        if is_equal and rows is not None and rows.combines_by(self.terms) is (self.combine is True):
            return by_rows
        if self.by_passes is None and (self.data.indexed or not by_passes.equations_of_batch(some)):
            return None
        return by_passes

    def _combine(self, few: Samples) -> bool:
        """Return whether the losses of passes over a few samples and their parts combine by the terms."""
        problem, losses = self.problem, Losses(self.problem, self.at)
        self.by_passes = equation = losses.equation(few, few.ends)
        if not math.isfinite(equation.whole):
            losses = Losses(problem, problem.weights)
            equation = losses.equation(few, few.ends)
            if not math.isfinite(equation.whole) and is_mean(problem.criterion):
                return True  # the loss is a mean by definition
        if losses.eps <= FLOAT32 and equation.combines_by(self.terms, SURE):
            return True
        no_data = copy.copy(self.data)
        no_data.resident, no_data.batches = None, ()
        with contextlib.suppress(Exception):  # the model or the loss may need another dtype
            problem = problem.on(no_data).to(torch.float64)
            exact = Losses(problem, double(losses.weights))
            samples = Samples(None, *problem.data.place((few.x, few.y)))
            exact_equation = exact.equation(samples, few.ends)
            # They differ if a mark of missing targets, such as -99.9, is another number in float64.
            if exact.eps < losses.eps and exact_equation.equals(equation):
                equation = exact_equation
        return equation.combines_by(self.terms)


def _find_count(losses: Losses, hints: Sequence[Equation], batches: Batches) -> Count | None:
    """Return a count with which the ``hints`` and the equations of all batches hold; None if there is none.

    An equation holds with a count if the loss of all samples is the mean of the losses of their parts,
    weighted by the number of terms of each part. ``hints``: equations of a few samples.
    """
    batch_count, by_code = 0, {ONES.code: ONES}
    for x, y in batches():
        batch_count += 1
        by_code |= {count.code: count for count in counts.candidates(x, y)}
    usual_counts = [*by_code.values()]
    ragged = losses.problem.data.ragged

    def those_that_hold(tried: Iterable[Count], shift: int = 0, keep_lengths: bool = False) -> list[Count]:
        """Return the counts with which the hints and the equations of all batches hold."""
        remaining = counts.that_hold(tried, hints)
        if not remaining:
            return []
        for equation in losses.equations(batches(), ragged, shift=shift, keep_lengths=keep_lengths):
            remaining = counts.that_hold(remaining, [equation])
            if not remaining:
                break
        return remaining

    remaining = those_that_hold(usual_counts)
    if ragged and not remaining:  # the loss may compare outputs with the next targets
        remaining = those_that_hold([count for count in usual_counts if count.cut], shift=1)
    keep_lengths = ragged and not remaining
    if keep_lengths:
        # The inputs may hold the number of terms of each sample, which is right only if no sample is cut.
        numbers = [count for count in usual_counts if count.of_inputs and count.function == "numbers"]
        remaining = those_that_hold(numbers, keep_lengths=True)
    if not remaining and (not hints or counts.class_counts(hints, only_determined=False)):
        # Some weights of classes agree with the hints. All batches together give at least 2 · MAX_CLASSES
        # equations for the weights (our choice). If each part of a batch needs its own pass, there are fewer.
        divisions = math.ceil(2 * MAX_CLASSES / batch_count) if losses.cuts_outputs else 1
        class_counts = counts.class_counts(losses.equations(batches(), ragged, divisions))
        remaining = those_that_hold(class_counts, keep_lengths=keep_lengths)
    # The equation of the two batches that the remaining counts weigh most differently may exclude counts.
    while remaining:
        rows = [[float(count(x, y).sum()) for count in remaining] for x, y in batches()]
        totals = torch.tensor(rows, dtype=torch.float64)  # (batches, counts)
        pair = counts.most_different_batches(totals)  # [] if the counts weigh the batches alike
        samples = [losses.samples(*batch) for number, batch in enumerate(batches()) if number in pair]
        equation = attempt(losses.of_two, *samples, keep_lengths) if samples else None
        still_remaining = remaining if equation is None else counts.that_hold(remaining, [equation])
        if len(still_remaining) == len(remaining):
            return counts.unambiguous(remaining, totals)
        remaining = still_remaining
    return None


def refuse_nan(problem: MeanLoss, terms: Terms, batches: Batches) -> None:
    """Raise InputError, with the number of the batch, for a loss that is NaN at the center."""
    losses = Losses(problem, problem.weights)
    losses.passes = 1
    for number, (x, y) in enumerate(batches()):
        value = attempt(losses.loss, Samples(None, x, y))
        if value is None or not math.isnan(value) or not float(terms(x, y).sum()):
            continue
        where = f"batch {number} (the first one is batch 0)"
        if problem.data.resident is not None:
            first = number * problem.chunk
            where = f"samples {first} to {first + count_samples(x, y) - 1}"
        raise not_a_number(x, y, value, where)


def _bytes_at_once(problem: MeanLoss) -> float:
    """Return the bytes that a pass of all samples saves, extrapolated as a·n + b·n²; NaN if unknown."""
    samples, resident = problem.data.samples, problem.data.resident
    if resident is None:
        return math.inf
    if samples <= 2 * SOME:
        return 0.0
    some, twice_as_many = (take(resident, slice(n)) for n in (SOME, 2 * SOME))  # samples
    if not takes(problem, some[0]):  # a graph: the checks have evaluated all of it already
        return problem.saved_bytes(*resident)
    some_bytes, twice_bytes = (attempt(problem.saved_bytes, *pair) for pair in (some, twice_as_many))
    if some_bytes is None or twice_bytes is None:  # the loss accepts no part of the data
        return 0.0 if samples <= AT_ONCE else math.nan
    square = max(0.0, (twice_bytes / (2 * SOME) - some_bytes / SOME) / SOME)
    return samples * (some_bytes / SOME - SOME * square) + square * samples**2


def say_count(count: Count) -> None:
    """Warn that the terms of the mean are counted by ``count``."""
    _say(f"loss: the terms of its mean are counted as terms={count.code}; give terms= to say so yourself")


def _say(text: str) -> None:
    """Warn with a line, at the call of ``landscape.Problem``."""
    warn_caller(text, ProblemWarning)
