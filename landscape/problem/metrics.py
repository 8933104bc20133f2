"""Metrics: other quantities than the loss, from the same forward passes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core.devices import double, float64_device
from landscape.core.errors import InputError, first_words
from landscape.core.options import choose
from landscape.problem.batches import attempt, concatenate, count_samples, named_tensors, opened, tree_map
from landscape.problem.losses import correct, correct_shares, opened_logits

# Outputs of all samples that a metric of the whole set may take at once, in bytes (our choice: a million
# samples of a thousand classes).
MAX_OUTPUTS = 2**32
# Bins of the calibration error (Guo et al. 2017, arXiv 1706.04599).
BINS = 15


def _of_samples(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A metric of logits (B, C) or of outputs (B, …), which gives (B,)."""

    def values(outputs: Any, targets: Any) -> Tensor:
        return function(opened_logits(outputs), targets).flatten(1).mean(1)

    return values


def _right(outputs: Tensor, targets: Tensor) -> Tensor:
    return correct_shares(outputs, targets, F.cross_entropy)[:, None]


def _top5(outputs: Tensor, targets: Tensor) -> Tensor:
    best = outputs.topk(min(5, outputs.shape[1]), 1).indices
    return double((best == targets.unsqueeze(1)).any(1)[:, None])


def _margin(outputs: Tensor, targets: Tensor) -> Tensor:
    rivals = outputs.scatter(1, targets[:, None], -math.inf).amax(1, keepdim=True)
    return outputs.gather(1, targets[:, None]) - rivals


def _nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")[:, None]


class Perplexity:
    """exp of the mean negative log-likelihood of all samples."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Take the outputs of some samples."""
        values = F.cross_entropy(opened_logits(outputs), targets, reduction="none")
        self.total, self.count = self.total + float(double(values).sum()), self.count + values.numel()

    def compute(self) -> float:
        """The perplexity of the samples that were taken."""
        return math.exp(min(self.total / self.count, 700.0))


class F1:
    """The mean over the classes of 2TP/(2TP + FP + FN) (macro F1); classes that never occur count as 0."""

    def __init__(self) -> None:
        self.counts: Any = 0

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Take the outputs of some samples."""
        logits = opened_logits(outputs)
        classes, guess = logits.shape[1], logits.argmax(1)
        three = (targets[guess == targets], guess, targets)
        counts = [torch.bincount(t.flatten(), minlength=classes) for t in three]
        self.counts = self.counts + torch.stack(counts)

    def compute(self) -> float:
        """The score of the samples that were taken."""
        right, guessed, true = double(self.counts)
        return float((2 * right / (guessed + true).clamp(min=1)).mean())


class Calibration:
    """The expected calibration error: the mean of |accuracy − confidence| over BINS bins, by samples."""

    def __init__(self) -> None:
        self.gaps, self.count = torch.zeros(BINS, dtype=torch.float64), 0

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Take the outputs of some samples."""
        confidence, guess = opened_logits(outputs).softmax(1).max(1)
        bins = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        gap = double(guess == targets) - double(confidence)
        self.gaps += gap.new_zeros(BINS).index_add(0, bins, gap).cpu()
        self.count += len(guess)

    def compute(self) -> float:
        """The error of the samples that were taken."""
        return float(self.gaps.abs().sum()) / self.count


#: The metrics that have a name.
BY_NAME: dict[str, Any] = {
    "accuracy": _of_samples(_right),
    "error": _of_samples(lambda o, y: 1 - _right(o, y)),
    "top5": _of_samples(_top5),
    "mse": _of_samples(lambda o, y: double(o - y).square().flatten(1)),
    "mae": _of_samples(lambda o, y: double(o - y).abs().flatten(1)),
    "nll": _of_samples(_nll),
    "margin": _of_samples(_margin),
    "perplexity": Perplexity,
    "f1": F1,
    "calibration": Calibration,
}


Metrics = Mapping[str, Any] | Sequence[str]


@dataclass
class Metric:
    """One metric: ``make()`` gives an object with update and compute, or None for values of samples.

    A ``function`` gives (B,) values, whose mean over the samples is the metric; or, where ``whole``, one
    number, and is called with the outputs of all samples at once.
    """

    name: str
    function: Callable[[Any, Any], Any] | None = None
    make: Callable[[], Any] | None = None
    whole: bool = False

    @property
    def of_samples(self) -> bool:
        """Return whether it is a mean over the samples, which other paths may sum as they like."""
        return self.make is None and not self.whole


def metrics_of(metrics: Metrics | None) -> tuple[Metric, ...]:
    """The metrics of a problem, from names of :data:`BY_NAME` or a dict of functions and objects."""
    if metrics is None:
        return ()
    if isinstance(metrics, str) or not isinstance(metrics, (Mapping, list, tuple)):
        allowed = f"a dict of names and functions, or a list of names ({', '.join(BY_NAME)})"
        raise InputError("metrics", metrics, allowed=allowed)
    pairs = metrics.items() if isinstance(metrics, Mapping) else ((name, name) for name in metrics)
    return tuple(_metric(name, value) for name, value in pairs)


def _metric(name: Any, value: Any) -> Metric:
    if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "x", "y", "t"):
        raise InputError(f"metrics: the name {name!r} is not allowed (an identifier, not loss, x, y, t)")
    if isinstance(value, str):
        value = BY_NAME[choose(f"metrics: '{name}'", value, BY_NAME)]
        if isinstance(value, type):
            return Metric(name, make=value)
    if hasattr(value, "update") and hasattr(value, "compute"):
        return Metric(name, make=lambda: _restarted(value))
    if not callable(value) or isinstance(value, type):
        kind = type(value).__name__
        raise InputError(f"metrics: '{name}' is a {kind}, it must be a function, or have update and compute")
    return Metric(name, value)


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
    samples = count_samples(x, y, alike=False)
    with torch.no_grad(), problem.evaluating(0):
        outputs = problem.outputs(problem.weights, x)
    failed = False
    for metric in problem.metrics:
        if metric.make is None:
            try:
                value = called(metric, outputs, y)
            except InputError:
                metric.whole = failed = True
                continue
            metric.whole = not (isinstance(value, Tensor) and value.shape == (samples,))
            if metric.whole and not _is_number(value):
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InputError(
                    f"metrics: '{metric.name}' gives {shape}, it must give one number, or ({samples},)"
                )
            if not metric.whole and problem.data.divisible and _mixes(problem, metric, value, outputs, x, y):
                raise InputError(
                    f"metrics: '{metric.name}' gives a sample another value where other samples are missing; "
                    "let it give one number for all samples"
                )
        if problem.draws > 1 and not metric.of_samples:
            raise InputError(f"metrics: '{metric.name}' is no mean over samples; use randomness='seed'")
    if failed:
        problem.totals()


def _mixes(problem: Any, metric: Metric, values: Tensor, outputs: Any, x: Any, y: Any) -> bool:
    """Return whether every other sample alone has other ``values`` (B,).

    Its outputs are rows of ``outputs``, or those of a new pass where samples are not the rows.
    """
    assert metric.function is not None
    function, (tree, again) = metric.function, opened(outputs)
    limit = math.sqrt(max(torch.finfo(dtype).eps for dtype in (problem.dtype, torch.float32)))
    size = float(double(values).nan_to_num(0, 0, 0).abs().max())

    def same(rows: slice, new_pass: bool) -> bool:
        part, part_x, part_y = tree_map(lambda t: t[rows] if t.dim() else t, (tree, x, y))
        part = problem.outputs(problem.weights, part_x) if new_pass else again(part)
        pair = double(function(part, part_y)), double(values[rows])
        return pair[0].shape == pair[1].shape and torch.allclose(*pair, limit, limit * size, equal_nan=True)

    with torch.no_grad(), problem.evaluating(0):
        halves = [slice(k, None, 2) for k in range(min(2, len(values)))]
        return not all(attempt(same, rows, False) or attempt(same, rows, True) for rows in halves)


def _is_number(value: Any) -> bool:
    numel = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
    try:
        return bool(numel == 1) and isinstance(float(value), float)
    except (TypeError, ValueError):
        return False


def called(metric: Metric, outputs: Any, y: Any) -> Any:
    """The value of a user's function; InputError, in one line, where it fails."""
    assert metric.function is not None
    try:
        return metric.function(outputs, y)
    except Exception as error:  # of the user's code
        words = f"{type(error).__name__}: {first_words(error)}"
        raise InputError(f"metrics: '{metric.name}' failed: {words}") from error


class Sums:
    """Sums over the samples at one point: the loss, the right answers, and the metrics, in float64.

    A metric of the whole set counts as its value times the samples, so that all are divided by them.
    """

    def __init__(self, problem: Any) -> None:
        self._problem, self._metrics = problem, problem.metrics
        size = 2 + len(self._metrics)
        self._total = torch.zeros(size, dtype=torch.float64, device=float64_device(problem.device))
        self._objects = [metric.make() if metric.make else None for metric in self._metrics]
        self._outputs = list[tuple[Any, Any]]()

    def add(self, outputs: Any, y: Any, loss: Tensor, weight: float) -> None:
        """Take a chunk of samples: its outputs, its mean ``loss``, and how many samples that stands for."""
        problem, draws = self._problem, max(1, self._problem.draws)
        self._total[0] += double(loss.detach()) * weight
        self._total[1] += correct(outputs, y, problem.criterion).to(self._total.device) / draws
        for k, (metric, accumulator) in enumerate(zip(self._metrics, self._objects, strict=True), 2):
            if metric.of_samples:
                self._total[k] += double(called(metric, outputs, y)).sum().to(self._total.device) / draws
            elif accumulator is not None:
                accumulator.update(*_on_cpu(accumulator, outputs, y))
        if any(metric.whole for metric in self._metrics):
            self._outputs.append((tree_map(Tensor.detach, outputs), y))
            if sum(t.nbytes for _, t in named_tensors(self._outputs[-1])) * len(self._outputs) > MAX_OUTPUTS:
                name = next(metric.name for metric in self._metrics if metric.whole)
                raise InputError(f"metrics: '{name}' needs over 4 GiB of outputs; let it give (B,) values")

    def end(self) -> Tensor:
        """(2 + metrics,): the sums."""
        whole = [concatenate(parts) for parts in zip(*self._outputs, strict=True)]
        for k, (metric, accumulator) in enumerate(zip(self._metrics, self._objects, strict=True), 2):
            if not metric.of_samples:
                value = accumulator.compute() if accumulator is not None else called(metric, *whole)
                self._total[k] = float(value) * self._problem.samples
        return self._total


def _on_cpu(accumulator: Any, outputs: Any, y: Any) -> tuple[Any, Any]:
    """Outputs and targets where a user's object is: modules of torchmetrics are on the CPU."""
    if not isinstance(accumulator, nn.Module):
        return outputs, y
    outputs = opened_logits(outputs)
    return tree_map(Tensor.cpu, outputs), tree_map(Tensor.cpu, y)
