"""Metrics: other quantities than the loss, from the same forward passes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.core.devices import double, float64_device
from landscape.core.errors import InputError, first_words
from landscape.core.options import choose
from landscape.problem.batches import attempt, concatenate, count_samples, named_tensors, opened, tree_map
from landscape.problem.losses import Terms, correct, describe_loss, is_classes, opened_logits

# Outputs of all samples that a metric of the whole set may take at once, in bytes (our choice: a million
# samples of a thousand classes).
MAX_OUTPUTS = 2**32
# Bins of the calibration error (Guo et al. 2017, arXiv 1706.04599).
BINS = 15


class Scores:
    """Outputs (N, C, L) and their targets, and what several metrics need of them, each computed once.

    In this order of dimensions, softmax and its relatives of few classes take a tenth of the time on CPUs.

    Args:
        outputs: (N, C, L).
        targets: of classes (L,) or (N, L), of numbers (C, L).
        counted: whether each class counts in the loss; None: all do.
    """

    def __init__(self, outputs: Tensor, targets: Tensor, counted: Tensor | None = None) -> None:
        self.outputs = outputs.float() if outputs.itemsize < 4 else outputs
        every = torch.ones(outputs.shape[-1], dtype=torch.bool, device=outputs.device)
        self._targets, self.counted = targets, every if counted is None else counted

    @classmethod
    def of(cls, outputs: Any, targets: Any, terms: Terms) -> Scores:
        """Those of a network's outputs (B, C, …) with classes (B, …), or numbers of the outputs' shape."""
        z = opened_logits(outputs)
        if (pair := terms.classes(outputs, targets)) is not None:
            z, t = pair[0], pair[1].flatten(1) if pair[0].dim() > 2 else pair[1]
            return cls(z.flatten(2) if z.dim() > 2 else z.T.contiguous()[None], t, terms.counted(t))
        if isinstance(z, Tensor) and isinstance(targets, Tensor) and z.dim() > 1 and len(z) == len(targets):
            sizes = [[n for n in t.shape[1:] if n != 1] for t in (z, targets)]
            if targets.shape == z.shape or (sizes[0] == sizes[1] and not is_classes(targets)):
                return cls(z.flatten(1).T[None], numbers(targets))
        raise ValueError("takes outputs (B, classes, …) with targets (B, …), or numbers of one shape")

    @functools.cached_property
    def classes(self) -> Tensor:
        """(N, L) classes; targets beyond them, such as those that are masked, are replaced."""
        if not is_classes(self._targets) or self.outputs.shape[1] < 2:
            raise ValueError("takes outputs of several classes, and integers as targets")
        return self._targets.long().clamp(0, self.outputs.shape[1] - 1).expand(len(self.outputs), -1)

    @functools.cached_property
    def sound(self) -> Tensor:
        """1; NaN, as the accuracy is then, where some targets that count are no classes of the outputs."""
        t, one = self._targets, self.outputs.new_ones(())
        within = (t >= 0) & (t < self.outputs.shape[1])
        return one.where((within | ~self.counted).all(), torch.nan) if is_classes(t) else one

    def kept(self, values: Tensor, other: int = 0) -> Tensor:
        """``values`` (N, ..., L), replaced by ``other`` at targets that do not count."""
        counted = self.counted.view(-1, *[1] * (values.dim() - 2), values.shape[-1])
        return values.where(counted, other)

    @functools.cached_property
    def top(self) -> Tensor:
        """(N, 1, L) the largest outputs."""
        return self.outputs.amax(1, keepdim=True)

    @functools.cached_property
    def guess(self) -> Tensor:
        """(N, L) the first class with the largest output; C where outputs are NaN.

        This takes a sixth of the time of argmax along a middle dimension on CPUs.
        """
        z, count = self.outputs, self.outputs.shape[1]
        order = torch.arange(count, 0, -1, device=z.device, dtype=torch.float32)[:, None]
        first = torch.eq(z, self.top, out=torch.empty_like(z, dtype=torch.float32)).mul_(order).amax(1)
        return count - first.long()

    @functools.cached_property
    def right(self) -> Tensor:
        """(N, L), whether the guess is the target."""
        return self.guess == self.classes

    @functools.cached_property
    def own(self) -> Tensor:
        """(N, 1, L) the outputs of the targets' classes."""
        return self.outputs.gather(1, self.classes[:, None])

    @functools.cached_property
    def scale(self) -> Tensor:
        """(N, 1, L) log Σ exp of the outputs less the largest; numbers below e⁻⁸⁰ make this sum slow only."""
        return (self.outputs - self.top).clamp_(min=-80).exp_().sum(1, keepdim=True).log_()

    @functools.cached_property
    def gap(self) -> Tensor:
        """(N, C, L) outputs less targets; of classes, less 1 at the target's and 0 at the others."""
        if not is_classes(self._targets):
            return self.outputs - self._targets
        classes = self.classes if self._targets.dim() > 1 else self.classes[:1]
        every = torch.arange(self.outputs.shape[1], device=classes.device)[:, None]
        return self.outputs - (classes[:, None] == every).to(self.outputs)


def numbers(targets: Tensor) -> Tensor:
    """Targets (B, …) as numbers (C, B)."""
    rows = targets.flatten(1) if targets.dim() > 1 else targets[:, None]
    return (double(rows) if is_classes(rows) else rows).T


def _mean(values: Callable[[Scores], Tensor]) -> Statistic:
    """The mean of ``values``, (N, L) or (N, 1, L)."""
    return Statistic(lambda s: s.kept(values(s).flatten(1)).sum(1, keepdim=True), lambda means: means[..., 0])


def _top5(s: Scores) -> Tensor:
    not_above = torch.le(s.outputs, s.own, out=torch.empty_like(s.outputs)).sum(1)
    return not_above > s.outputs.shape[1] - 5


def _margin(s: Scores) -> Tensor:
    return s.own - s.outputs.scatter(1, s.classes[:, None], -math.inf).amax(1, keepdim=True)


def _counts(s: Scores) -> Tensor:
    """(N, 3(C + 1)): right guesses, guesses and targets of each class, and in the last place of none."""
    n, classes = len(s.outputs), s.outputs.shape[1]
    of = s.kept(torch.stack((s.classes.where(s.right, classes), s.guess, s.classes), 1), classes)
    counts = torch.zeros(n, 3, classes + 1, device=of.device)
    return counts.scatter_add_(2, of, torch.ones((), device=of.device).expand(of.shape)).flatten(1)


def _f1(means: Tensor) -> Tensor:
    """The mean of 2TP/(2TP + FP + FN) (macro F1), over the classes of targets or guesses as scikit-learn."""
    right, guessed, true = means.view(*means.shape[:-1], 3, -1)[..., :-1].unbind(-2)
    total = guessed + true
    return (2 * right / total.where(total != 0, 1.0)).sum(-1) / (total != 0).sum(-1)


def _gaps(s: Scores) -> Tensor:
    """(N, BINS): the sums of right guesses less confidence, by confidence."""
    confidence = (-s.scale).exp_()[:, 0]
    bins = (confidence * BINS).ceil_().long().clamp_(1, BINS) - 1
    gaps = s.kept(s.right.to(confidence) - confidence)
    return confidence.new_zeros(len(bins), BINS).scatter_add_(1, bins, gaps)


@dataclass(frozen=True)
class Statistic:
    """A metric that has a name: a function of the means over all positions of what ``sums`` gives.

    Attributes:
        sums: gives (N, S), sums over L.
        finish: (…, S) means over the targets that count -> (…,).
        linear: whether it is a mean itself.
    """

    sums: Callable[[Scores], Tensor]
    finish: Callable[[Tensor], Tensor]
    linear: bool = True


_NLL = _mean(lambda s: s.top - s.own + s.scale)
#: The metrics that have a name.
BY_NAME: dict[str, Statistic] = {
    "accuracy": _mean(lambda s: s.right),
    "error": _mean(lambda s: ~s.right),
    "top5": _mean(_top5),
    "mse": _mean(lambda s: s.gap.square().mean(1)),
    "mae": _mean(lambda s: s.gap.abs().mean(1)),
    "nll": _NLL,
    "margin": _mean(_margin),
    "perplexity": Statistic(_NLL.sums, lambda means: means[..., 0].clamp(max=700).exp(), linear=False),
    "f1": Statistic(_counts, _f1, linear=False),
    # The mean of |accuracy − confidence| over the bins, by samples.
    "calibration": Statistic(_gaps, lambda means: means.abs().sum(-1), linear=False),
}


Metrics = Mapping[str, Any] | Sequence[str]


# Names that results have for something else.
TAKEN = ("loss", "accuracy", "x", "y", "t", "done", "path", "step")


@dataclass
class Metric:
    """One metric: a ``statistic``, or a user's.

    ``make()`` of a user's gives an object with update and compute. A ``function`` gives (B,) values, whose
    mean over the samples is the metric; or, where ``whole``, one number, and is called with the outputs of
    all samples at once.
    """

    name: str
    function: Any = None
    make: Callable[[], Any] | None = None
    statistic: Statistic | None = None
    whole: bool = False

    @property
    def of_sums(self) -> bool:
        """Return whether it follows from sums over samples, which other paths may take as they like."""
        return self.make is None and not self.whole

    def sums(self, outputs: Any, targets: Any, scores: Scores | None) -> Tensor:
        """Those of some samples: (N, S) of ``scores``, (B, 1) of a function; InputError where it fails."""
        if self.statistic is None:
            values = called(self, self.function, outputs, targets).detach()
            samples = next((len(t) for _, t in named_tensors(targets) if t.dim()), len(values))
            return double(called(self, Tensor.view, values, (samples, 1)))
        assert scores is not None
        return double(self.statistic.sums(scores)) * double(scores.sound)

    def finish(self, means: Tensor) -> Tensor:
        """(…,) the values of the metric, of means (…, S) over all samples or positions."""
        return self.statistic.finish(means) if self.statistic is not None else means[..., 0]


def metrics_of(metrics: Metrics | None) -> tuple[Metric, ...]:
    """The metrics of a problem, from names of :data:`BY_NAME` or a dict of functions and objects."""
    if metrics is None:
        return ()
    if isinstance(metrics, str) or not isinstance(metrics, (Mapping, list, tuple)):
        allowed = f"a dict of names and functions, or a list of names ({', '.join(BY_NAME)})"
        raise InputError("metrics", metrics, allowed=allowed)
    pairs = metrics.items() if isinstance(metrics, Mapping) else ((name, name) for name in metrics)
    # The accuracy is there without being asked for.
    return tuple(_metric(name, value) for name, value in pairs if (name, value) != ("accuracy", "accuracy"))


def _metric(name: Any, value: Any) -> Metric:
    if not isinstance(name, str) or not name.isidentifier() or name in TAKEN:
        raise InputError(f"metrics: the name {name!r} is not allowed (an identifier, not {', '.join(TAKEN)})")
    if isinstance(value, str):
        return Metric(name, statistic=BY_NAME[choose(f"metrics: '{name}'", value, BY_NAME)])
    if hasattr(value, "update") and hasattr(value, "compute"):
        return Metric(name, value, make=lambda: _restarted(value))
    if not callable(value) or isinstance(value, type):
        kind = type(value).__name__
        raise InputError(f"metrics: '{name}' is a {kind}, it must be a function, or have update and compute")
    return Metric(name, value)


def names_of(problem: Any) -> tuple[str, ...]:
    """The names of a problem's metrics."""
    return tuple(metric.name for metric in problem.metrics)


def described(metrics: Sequence[Metric]) -> str:
    """The names of metrics, and of the code of those that no sample of the data shows."""
    of = [
        metric.name + ("" if metric.of_sums else f" ({describe_loss(metric.function)})") for metric in metrics
    ]
    return ", ".join(of)


def _restarted(metric: Any) -> Any:
    """A copy of a user's object without the samples that it may have seen."""
    metric = copy.deepcopy(metric)
    if hasattr(metric, "reset"):
        metric.reset()
    return metric


def check_metrics(problem: Any, batch: tuple[Any, Any]) -> None:
    """Decide of each metric whether it is a mean over samples; InputError for one that is not possible.

    A function that fails on so few samples, as one that needs all classes, is one of all samples, and is
    called with these.
    """
    x, y = problem.data.pick(*batch)
    with torch.no_grad(), problem.evaluating(0):
        outputs = problem.outputs(problem.weights, x)
    failed = False
    for metric in problem.metrics:
        if metric.statistic is not None:
            try:
                metric.sums(outputs, y, Scores.of(outputs, y, problem.data.terms_in))
            except ValueError as error:
                words = f"metrics: '{metric.name}' {first_words(error)}; give a function of your own"
                raise InputError(words) from error
        elif metric.make is None:
            failed |= _check_function(problem, metric, outputs, x, y)
        mean = metric.of_sums and (metric.statistic is None or metric.statistic.linear)
        if problem.draws > 1 and not mean:
            raise InputError(f"metrics: '{metric.name}' is no mean over samples; use randomness='seed'")
    if failed:
        problem.totals()


def _check_function(problem: Any, metric: Metric, outputs: Any, x: Any, y: Any) -> bool:
    """Decide whether a user's function is a mean over samples; return whether it fails on these."""
    try:
        value = called(metric, metric.function, outputs, y)
    except InputError:
        metric.whole = True
        return True
    samples = count_samples(x, y)
    metric.whole = not (isinstance(value, Tensor) and value.shape == (samples,) and not value.is_complex())
    _number(metric, value, samples)
    if not metric.whole and problem.data.divisible and _mixes(problem, metric, value, outputs, x, y):
        raise InputError(
            f"metrics: '{metric.name}' gives a sample another value where other samples are missing; "
            "let it give one number for all samples"
        )
    return False


def _mixes(problem: Any, metric: Metric, values: Tensor, outputs: Any, x: Any, y: Any) -> bool:
    """Return whether every other sample alone has other ``values`` (B,).

    Its outputs are rows of ``outputs``, or those of a new pass where samples are not the rows.
    """
    function, (tree, again) = metric.function, opened(outputs)
    limit = math.sqrt(max(torch.finfo(dtype).eps for dtype in (problem.dtype, torch.float32)))
    size = float(double(values).nan_to_num(0, 0, 0).abs().max())

    def same(rows: slice, new_pass: bool) -> bool:
        part, part_x, part_y = tree_map(lambda t: t[rows] if t.dim() else t, (tree, x, y))
        part = problem.outputs(problem.weights, part_x) if new_pass else again(part)
        pair = double(torch.as_tensor(function(part, part_y))), double(values[rows])
        return pair[0].shape == pair[1].shape and torch.allclose(*pair, limit, limit * size, equal_nan=True)

    with torch.no_grad(), problem.evaluating(0):
        halves = [slice(k, None, 2) for k in range(min(2, len(values)))]
        return not all(attempt(same, rows, False) or attempt(same, rows, True) for rows in halves)


def called(metric: Metric, function: Callable[..., Any], *samples: Any) -> Any:
    """Return the value of a user's ``function``; InputError, in one line, if it fails or changes samples."""
    given = [t for _, t in named_tensors([opened(tree)[0] for tree in samples]) if not t.is_inference()]
    versions = [t._version for t in given]
    try:
        value = function(*samples)
    except Exception as error:  # of the user's code
        words = f"{type(error).__name__}: {first_words(error)}"
        raise InputError(f"metrics: '{metric.name}' failed: {words}") from error
    if versions != [t._version for t in given]:
        words = "changes outputs or targets in place, which other metrics take, too; let it copy them"
        raise InputError(f"metrics: '{metric.name}' {words}")
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _number(metric: Metric, value: Any, samples: int) -> float:
    """Return the number that a user's metric returned, or the mean of its values for all ``samples``."""
    try:
        values = isinstance(value, Tensor) and value.shape == (samples,) and not value.is_complex()
        return float(double(value).mean() if values else value)
    except (TypeError, ValueError, RuntimeError) as error:
        form = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        words = f"metrics: '{metric.name}' gives {form}, it must give one number, or ({samples},)"
        raise InputError(words) from error


def few_of(problem: Any) -> Any:
    """The problem on a few samples, without the metrics that may need more, such as all classes."""
    return with_sums(problem.on(problem.data.few()))


def with_sums(part: Any) -> Any:
    """``part`` of a problem's data without the metrics that may need all of it."""
    part.metrics = tuple(metric for metric in part.metrics if metric.of_sums)
    return part


class Sums:
    """Sums over the samples at one point: the loss, the right answers, and the metrics, in float64.

    Each metric counts as its value times the samples, so that all are divided by them.
    """

    def __init__(self, problem: Any) -> None:
        self._problem, self._metrics = problem, problem.metrics
        self._total = torch.zeros(
            2 + len(self._metrics), dtype=torch.float64, device=float64_device(problem.device)
        )
        self._objects = [metric.make() if metric.make else None for metric in self._metrics]
        self._sums = list[Any]([0.0] * len(self._metrics))
        # How many targets are right and count, in the accuracy, and how many count in metrics by name.
        self._hits, self._positions = self._total.new_zeros(2), self._total.new_zeros(())
        self._outputs, self._again = list[tuple[Any, Any]](), opened(None)[1]
        self._scored = any(metric.statistic is not None for metric in self._metrics)

    def add(self, outputs: Any, y: Any, loss: Tensor, weight: float) -> None:
        """Take a chunk of samples: its outputs, its mean ``loss``, and how many samples that stands for."""
        self._total[0] += double(loss.detach()) * weight
        terms = self._problem.data.terms_in
        self._hits += correct(outputs, y, terms).sum(1).to(self._total.device)
        scores = Scores.of(outputs, y, terms) if self._scored else None
        self._positions += 0 if scores is None else double(scores.counted).sum()
        for k, (metric, accumulator) in enumerate(zip(self._metrics, self._objects, strict=True)):
            if metric.of_sums:
                self._sums[k] += metric.sums(outputs, y, scores).sum(0)
            elif accumulator is not None:
                called(metric, accumulator.update, *_on_cpu(accumulator, outputs, y))
        if any(metric.whole for metric in self._metrics):
            tree, self._again = opened(outputs)
            self._outputs.append((tree_map(lambda t: t.detach() if t.dim() else t.detach()[None], tree), y))
            if sum(t.nbytes for _, t in named_tensors(self._outputs[-1])) * len(self._outputs) > MAX_OUTPUTS:
                name = next(metric.name for metric in self._metrics if metric.whole)
                raise InputError(f"metrics: '{name}' needs over 4 GiB of outputs; let it give (B,) values")

    def end(self) -> Tensor:
        """(2 + metrics,): the sums."""
        samples, draws = self._problem.samples, max(1, self._problem.draws)
        self._total[1] = self._hits[0] * (samples / self._hits[1])
        whole = [concatenate(parts) for parts in zip(*self._outputs, strict=True)]
        whole[:1] = [self._again(tree) for tree in whole[:1]]
        for k, (metric, accumulator) in enumerate(zip(self._metrics, self._objects, strict=True)):
            if metric.of_sums:
                count = samples * draws if metric.statistic is None else self._positions
                value = metric.finish(self._sums[k] / count)
            else:
                of_all = (accumulator.compute,) if accumulator is not None else (metric.function, *whole)
                value = _number(metric, called(metric, *of_all), samples * draws)
            self._total[2 + k] = value * samples
        return self._total


def _on_cpu(accumulator: Any, outputs: Any, y: Any) -> tuple[Any, Any]:
    """Outputs and targets where a user's object is: modules of torchmetrics are on the CPU."""
    if not isinstance(accumulator, nn.Module):
        return outputs, y
    outputs = opened_logits(outputs)
    return tree_map(Tensor.cpu, outputs), tree_map(Tensor.cpu, y)
