"""The quantities of comparisons, one line each in :data:`QUANTITIES`, and a table's rows of their values."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import elementwise
from torch import Tensor

from landscape.analysis.connection import POINTS
from landscape.analysis.grids import line
from landscape.analysis.noise import noise_alignment, noise_scale
from landscape.analysis.planes import random_plane
from landscape.analysis.sharpness import batch_sharpness, sharpness
from landscape.analysis.spread import K, disagreement
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.devices import double, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import SPLIT, positive
from landscape.core.progress import Progress, no_progress
from landscape.core.statistics import Difference, Estimate, mcnemar, paired, welch
from landscape.curvature.eigenvalues import extreme_eigenvalues, top_eigenvalues
from landscape.curvature.hessian import Preconditioner
from landscape.curvature.trace import trace
from landscape.evaluation.evaluate import evaluator
from landscape.problem.alignment import aligned
from landscape.problem.losses import correct
from landscape.problem.metrics import names_of
from landscape.problem.problem import Problem
from landscape.results.geometry import barrier
from landscape.results.grids import SPAN, Line
from landscape.results.noise import Disagreement
from landscape.results.spectrum import ExtremeEigenvalues

# Rays from the center of each plane, at equal angles (our choice: the area of an ellipse is then right within
# 0.03% for axes of 1 : 2 and within 3.4% for 1 : 4; random planes in many dimensions are rounder).
RAY_COUNT = 16
RAY_NUMBERS = np.arange(RAY_COUNT)
# The error of the rise at the resulting distances, as a share of the rise (our choice: widths are then right
# within 0.1%).
WITHIN = 2e-3
# The number of squared distances that the search tries, each twice the last, and the rise at which it counts
# a loss that is not finite (our choice).
STEPS, WALL = 200, 1e300
# A rise below this number of roundings of the loss cannot be measured (our choice).
LOSS_ROUNDINGS = 1000


def basin_widths(
    problem: Problem, rise: float, planes: int, *, seed: int = 0, progress: Progress | None = None
) -> Array:
    """Return the widths (planes,) of the region in which the loss rises by less than ``rise``.

    Each plane has two random directions, which depend only on the seed and the number of weights. On 16 rays
    from the center of a plane, a search finds the point at which the loss has risen by ``rise``. The width is
    twice the root mean square of the distances of these points from the center. This is the diameter of a
    circle whose area is that of the region inside the points. If each ray leaves the basin once, the width
    estimates the same quantity as :attr:`.Basins.equivalent_width` does from a grid. Distances are Euclidean
    in weight space, and so depend on the scaling of the network.

    Args:
        problem: the loss.
        rise: in nats.
        planes: the number of planes; each needs about 150 losses.
        seed: the seed of the directions.
        progress: called with the finished share of the planes.

    Raises:
        InputError: a rise that is not positive, or a model with one parameter.
        OperationError: a loss that is not finite, or a rise that rounding hides or some ray never reaches.

    Example:
        >>> import torch, landscape
        >>> x, y = 2**0.5 * torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> problem.weights.zero_()
        tensor([0., 0.])
        >>> basin_widths(problem, 0.25, 2).round(2).tolist()  # ‖w‖² < 0.25
        [1.0, 1.0]
    """
    positive("parameters of the model", problem.layout.size, least=2)
    # On the first plane the search starts where grids end by default: at SPAN times a random direction, whose
    # length is about √P. On each further plane, the search starts at the distances of the plane before.
    distances = np.full(RAY_COUNT, SPAN * math.sqrt(problem.layout.size))
    widths = []
    report = progress or no_progress
    plane_seeds = np.random.SeedSequence(seed).generate_state(planes).tolist()
    for number, plane_seed in enumerate(plane_seeds, 1):
        distances = _distances_on_rays(problem, rise, plane_seed, distances)
        widths.append(2 * math.sqrt(float(np.mean(distances**2))))
        report(number / planes)
    return np.array(widths)


def _distances_on_rays(problem: Problem, rise: float, plane_seed: int, start: Array) -> Array:
    """Return the distances (rays,) at which the loss has risen by ``rise``, on the rays of a random plane.

    The search starts at the distances ``start`` (rays,).
    """
    drawn_directions = double(random_plane(problem, seed=plane_seed).directions)
    orthonormal = torch.linalg.qr(drawn_directions.T)[0].T.to(problem.weights)
    # The evaluator chooses its method for ``count`` points: the search begins with one point on each ray.
    loss = evaluator(problem, problem.weights, orthonormal, count=RAY_COUNT)
    base = float(loss(torch.zeros(1, 2, dtype=torch.float64))["loss"][0])
    if not math.isfinite(base):
        raise OperationError(f"weights: their loss is {base:g}, above which nothing rises; take others")
    if not rise >= LOSS_ROUNDINGS * torch.finfo(problem.dtype).eps * abs(base):
        raise OperationError(f"rise: {rise:g} is hidden by the rounding of a loss of {base:g}; give more")
    angles = 2 * math.pi * torch.from_numpy(RAY_NUMBERS) / RAY_COUNT
    circle = torch.stack((angles.cos(), angles.sin()), 1)  # (rays, 2)

    def excess(squares: Array, rays: Array) -> Array:
        """Return loss − base − rise, (k,), at squared distances (k,) on the ``rays`` (k,)."""
        points = circle[rays] * torch.from_numpy(squares**0.5)[:, None]
        values = loss(points)["loss"].numpy() - base - rise
        return np.where(np.isfinite(values), values, WALL)

    # The roots are sought in the squared distance, because a quadratic loss is linear in it. The search on a
    # ray ends when the relative error of the rise is at most WITHIN, or the relative error of the squared
    # distance is at most WITHIN / 2 (our choice).
    bracket = elementwise.bracket_root(excess, 0.0, start**2, xmin=0.0, args=(RAY_NUMBERS,), maxiter=STEPS)
    tolerances = {"fatol": WITHIN * rise, "xrtol": WITHIN / 2}
    root = elementwise.find_root(excess, bracket.bracket, args=(RAY_NUMBERS,), tolerances=tolerances)
    if not (bracket.success & root.success).all():
        raise OperationError(f"rise: the loss does not rise by {rise:g} in all directions; give less")
    distances: Array = np.sqrt(root.x)
    return distances


# Tolerance of the ends of the spectrum (our choice: their bounds are then within a few percent, for a tenth
# more products than at 1%). With cheaper products the bounds would have no proof.
ENDS_TOL = 1e-3
# The largest error of Hessian products, in rounding errors of λ_max (our choice: as in the search).
ROUNDINGS = 100

# Networks are linearly connected if the error rises by at most this much between them (Frankle et al. 2020,
# section 2).
UNSTABLE = 0.02

Preconditioning = Callable[[Checkpoint, Problem], Preconditioner]


@dataclass(frozen=True)
class Settings:
    """How the quantities are measured; see :func:`landscape.compare`.

    Example:
        >>> Settings(draws=8).rise
        0.1
    """

    batch: int = 0
    # The number of draws of every mean over draws, equal for all quantities, so that draws can be compared in
    # pairs (our choice: batch sharpness of the MNIST network then has an error of about 5%).
    draws: int = 64
    # The number of planes over which the width is a mean (our choice: each needs some 500 losses, and random
    # planes differ little).
    planes: int = 8
    # The rise of the loss in nats at which the width is measured (our choice: far above the training loss of
    # a network that fits its data, and far below that of a network that guesses, ln 10 of ten classes).
    rise: float = 0.1
    # ρ of worst-case adaptive sharpness: Kwon et al. 2021 for CIFAR-10; of the average, 5% of each weight
    # (our choice).
    rho: float = 0.5
    rho_average: float = 0.05
    k: int = K
    preconditioner_of: Preconditioning | None = None


@dataclass(frozen=True)
class MeasuredValue:
    """A number with its error.

    Attributes:
        value: the number.
        error: its standard error, or a bound on its error.
        freedom: the degrees of freedom of a standard error; NaN for a bound.
        draws: (n,), the draws whose mean is ``value``; empty if it is not a mean.

    Example:
        >>> MeasuredValue.mean(np.array([1.0, 3.0])).error
        1.0
    """

    value: float
    error: float = 0.0
    freedom: float = math.nan
    draws: Array = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def mean(cls, draws: Array) -> MeasuredValue:
        """Return the mean of independent draws (n,), which is exact for a single draw."""
        if len(draws) == 1:
            return cls(float(draws[0]), 0.0, math.inf, draws)
        estimate = Estimate.of(draws)
        return cls(estimate.value, estimate.standard_error, estimate.freedom, draws)


class Subject:
    """A problem whose quantities are measured at its center.

    Args:
        source: the problem, or a checkpoint, whose problem on the training set is measured.
        seed: the seed of minibatches, vectors, displacements and planes.
        first: the subject from which distances are measured; None: this one.

    Attributes:
        run: the checkpoint; None for a problem.
        problem: the problem.
        test: returns the checkpoint's problem on the test set; None for a problem.
    """

    def __init__(self, source: Checkpoint | Problem, seed: int, first: Subject | None = None) -> None:
        run = self.run = source if isinstance(source, Checkpoint) else None
        self.problem = source if isinstance(source, Problem) else source.problem(SPLIT)
        self.test = functools.partial(run.problem, "test") if run else None
        self.seed = seed
        self.first = first or self

    @functools.cached_property
    def ends(self) -> ExtremeEigenvalues:
        """Both ends of the Hessian's spectrum."""
        return extreme_eigenvalues(self.problem, ENDS_TOL, search="exact", seed=self.seed)

    @functools.cached_property
    def sums(self) -> dict[str, float]:
        """The loss, the accuracy and the metrics by name, from one pass over the data."""
        names = ("loss", "accuracy", *names_of(self.problem))
        values = (self.problem.totals().cpu() / self.problem.samples).tolist()
        return dict(zip(names, values, strict=True))

    @functools.cached_property
    def aligned(self) -> Tensor:
        """The weights with hidden units permuted, so that they are near the first subject's weights."""
        a, b = self.first.problem, self.problem
        if a.layout != b.layout:
            raise InputError("distance: the network differs from the first one, it must be the same")
        return aligned(b, a.weights.to(b.weights), b.weights, seed=self.seed)[0]

    @functools.cached_property
    def from_first(self) -> Line | None:
        """The line from the first subject's weights to the aligned weights; None if they are equal."""
        ends = torch.stack((self.first.problem.weights.to(self.aligned), self.aligned))
        if torch.equal(*ends):
            return None
        return line(self.problem, *ends, points=POINTS, bn="recalibrate", progress=False)

    def rounding(self, top: float) -> float:
        """Return the rounding error of eigenvalues whose largest magnitude is ``top``."""
        return ROUNDINGS * torch.finfo(self.problem.dtype).eps * abs(top)

    def spread(self, settings: Settings, progress: Progress) -> Disagreement:
        """Return the learners' disagreement, computed once."""
        if not hasattr(self, "_spread"):
            if self.run is None:
                raise InputError("learners: a problem alone has none, give the checkpoint")
            weights, k = self.run.weights, settings.k
            self._spread = disagreement(self.problem, weights, k, seed=self.seed, progress=progress)
        return self._spread


MINIBATCHES = "minibatches"
Measure = Callable[[Subject, Settings, Progress], MeasuredValue]


@dataclass(frozen=True)
class Quantity:
    """A quantity that checkpoints are compared by.

    Attributes:
        name: its name in options.
        title: its name in words.
        unit: the unit of its values.
        kind: the kind of its error: "standard error", "bound" or "exact".
        measure: measures it at a subject.
        over: the draws of its mean, such as "minibatches".
        flatter: −1 if small values mean a flat minimum, 1 if large values do, 0 if neither does.
        common: whether the draws of two subjects have the same random numbers.
        on_request: whether it is measured only if the caller names it.

    Example:
        >>> BY_NAME["loss"].flatter
        0
    """

    name: str
    title: str
    unit: str
    kind: str
    measure: Measure
    over: str = ""
    flatter: int = 0
    common: bool = True
    on_request: bool = False

    @property
    def needs_batch(self) -> bool:
        """Return whether the quantity needs the size of minibatches."""
        return self.over == MINIBATCHES


@torch.no_grad()
def _test_error(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    if subject.test is None:
        raise InputError("test error: a problem alone has no test set, give the checkpoint")
    test = subject.test()
    problem, counts = test.at(), []
    for x, y, _ in test.chunks():
        counts.append(correct(problem.outputs(test.weights, x), y, test.data.terms_in).cpu())
    right, counted = torch.cat(counts, 1).numpy()  # (samples,) each: right answers, and targets that count
    accuracy = right.sum() / counted.sum()
    # The ratio of the two sums, to first order in each sample's share of them.
    errors = 100 * (1 - accuracy - (right - accuracy * counted) / counted.mean())  # (samples,)
    if not np.isfinite(errors).all():
        raise OperationError("test error: the data has no class labels; leave it out")
    return MeasuredValue.mean(errors)


def _lambda_max(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    return _largest(subject, subject.ends.max, subject.ends.bounds[1])


def _ratio(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    """Return |λ_min|/λ_max, with the largest error that the bounds on both allow."""
    ends = subject.ends
    rounding = subject.rounding(max(ends.max, -ends.min))
    if not ends.max > rounding:
        raise OperationError("ratio: λ_max is not above 0; leave it out")
    lowest_end, highest_end = ends.bounds[0] - rounding, ends.min + rounding  # λ_min lies between
    ratio = abs(ends.min) / ends.max
    largest_ratio = max(-lowest_end, highest_end) / (ends.max - rounding)
    smallest_ratio = max(lowest_end, -highest_end, 0.0) / (ends.bounds[1] + rounding)
    return MeasuredValue(ratio, max(largest_ratio - ratio, ratio - smallest_ratio))


def _largest(subject: Subject, value: float, bound: float) -> MeasuredValue:
    """Return λ_max from the Ritz value ``value``, with its distance from the ``bound`` above as the error."""
    return MeasuredValue(value, max(bound - value, 0.0) + subject.rounding(value))


def _mean_of(
    analysis: Callable[..., Any], draws: str, options: Callable[[Settings, Problem], dict[str, Any]]
) -> Measure:
    """Return the measurement of the mean of an analysis's field ``draws``, with its ``options``."""

    def measure(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
        arguments = options(settings, subject.problem)
        # All quantities have the same number of draws, for any scatter.
        if "max_draws" in inspect.signature(analysis).parameters:
            arguments |= {"min_draws": settings.draws, "max_draws": settings.draws}
        result = analysis(subject.problem, **arguments, seed=subject.seed, progress=progress)
        return MeasuredValue.mean(getattr(result, draws))

    return measure


_trace = _mean_of(trace, "draws", lambda s, p: {})
_batch_sharpness = _mean_of(batch_sharpness, "curvature", lambda s, p: {"batch": s.batch, "quantities": ()})
_noise_scale = _mean_of(noise_scale, "estimates", lambda s, p: {"batch": s.batch})
_noise_alignment = _mean_of(noise_alignment, "estimates", lambda s, p: {"batch": s.batch, "k": 1})
# Over minibatches, whose scatter is the error; over all samples there would be no error.
_worst = _mean_of(sharpness, "values", lambda s, p: {"rho": s.rho, "m": min(s.batch, p.samples)})
_average = _mean_of(sharpness, "values", lambda s, p: {"rho": s.rho_average, "kind": "average"})


def _width(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    rise, planes = settings.rise, settings.planes
    return MeasuredValue.mean(
        basin_widths(subject.problem, rise, planes, seed=subject.seed, progress=progress)
    )


def _disagreement(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    spread = subject.spread(settings, progress)
    return MeasuredValue(100 * spread.value, 100 * spread.standard_error, spread.learners - 1)


def _spread_cost(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    spread = subject.spread(settings, progress)
    return MeasuredValue(spread.cost, spread.cost_error, spread.learners - 1)


def _preconditioned(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    if subject.run is None or settings.preconditioner_of is None:
        raise InputError("preconditioner_of: not given, landscape.preconditioner makes P from a run")
    preconditioner = settings.preconditioner_of(subject.run, subject.problem)
    pairs = top_eigenvalues(subject.problem, precondition=preconditioner, seed=subject.seed)
    return _largest(subject, float(pairs.values[0]), pairs.bounds[1])


def _distance(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    """Return ‖w − w_first‖ with the hidden units of w in a near order: a bound on the smallest distance."""
    return MeasuredValue(float(vector_norm(double(subject.aligned) - double(subject.first.problem.weights))))


def _barrier(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    """Return the barrier on the line from the first subject's weights to these, aligned."""
    return MeasuredValue(subject.from_first.barrier if subject.from_first else 0.0)


def _same_basin(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
    """Return 1 where the error has no barrier above :data:`UNSTABLE` on the same line, else 0."""
    path = subject.from_first
    if path and not np.isfinite(path.accuracy).all():
        raise OperationError("same-basin: the data has no class labels; leave it out")
    return MeasuredValue(float(not path or barrier(path.t, 1 - path.accuracy) <= UNSTABLE))


def metric_quantity(name: str) -> Quantity:
    """Return the row of a problem's metric, on the data of the loss."""

    def measure(subject: Subject, settings: Settings, progress: Progress) -> MeasuredValue:
        if name not in subject.sums:
            raise InputError(f"metrics: it has no '{name}'; give both the same")
        return MeasuredValue(subject.sums[name])

    return Quantity(name, name, "1", EXACT, measure)


SE, BOUND, EXACT = "standard error", "bound", "exact"
#: All quantities, in the order of the table. A new one is a line here, and a function above.
QUANTITIES = (
    Quantity("loss", "training loss", "nat", EXACT, lambda subject, *_: MeasuredValue(subject.sums["loss"])),
    Quantity("test-error", "test error", "%", SE, _test_error, "test samples"),
    Quantity("lambda-max", "λ_max", "nat", BOUND, _lambda_max, flatter=-1),
    Quantity("ratio", "|λ_min|/λ_max", "1", BOUND, _ratio),
    Quantity("trace", "trace of H", "nat", SE, _trace, "random vectors", -1),
    Quantity("batch-sharpness", "batch sharpness", "nat", SE, _batch_sharpness, MINIBATCHES, -1),
    Quantity("noise-alignment", "tr(HS)/tr S", "nat", SE, _noise_alignment, MINIBATCHES, -1),
    Quantity("sharpness-worst", "worst-case sharpness", "nat", SE, _worst, MINIBATCHES, -1),
    Quantity("sharpness-average", "average-case sharpness", "nat", SE, _average, "displacements", -1),
    Quantity("basin-width", "basin width", "distance", SE, _width, "planes", 1),
    Quantity("preconditioned", "λ_max of P⁻¹ᐟ²HP⁻¹ᐟ²", "1/η", BOUND, _preconditioned, flatter=-1),
    Quantity("noise-scale", "gradient noise scale", "samples", SE, _noise_scale, MINIBATCHES),
    Quantity("disagreement", "spread in the sharp space", "%", SE, _disagreement, "learners", common=False),
    Quantity("spread-cost", "½ tr(HC) of the spread", "nat", SE, _spread_cost, "learners", common=False),
    Quantity("distance", "distance to the first, aligned", "distance", EXACT, _distance, on_request=True),
    Quantity("barrier", "barrier to the first, aligned", "nat", EXACT, _barrier, on_request=True),
    Quantity("same-basin", "in the basin of the first, aligned", "1", EXACT, _same_basin, on_request=True),
)  # fmt: skip
BY_NAME = {quantity.name: quantity for quantity in QUANTITIES}

# The smallest group whose mean is tested (our choice: the 95% interval of a group of two reaches 12.7
# standard errors to each side).
SEEDS = 3


@dataclass(frozen=True)
class Row:
    """The values of one quantity.

    Attributes:
        quantity: the quantity.
        cells: (M,), its values at the checkpoints.
        sides: (S,), its values of the sides: the cells, or the mean of each group, whose draws are the values
            of the group's cells.
        grouped: whether the sides are groups.
    """

    quantity: Quantity
    cells: Sequence[MeasuredValue]
    sides: Sequence[MeasuredValue]
    grouped: bool

    @classmethod
    def from_cells(
        cls, quantity: Quantity, cells: Sequence[MeasuredValue], side_of: Sequence[int], grouped: bool
    ) -> Row:
        """Return the row of ``cells`` (M,), where ``side_of`` (M,) are the numbers of their sides."""
        if not grouped:
            return cls(quantity, cells, cells, grouped)
        values, side_numbers = np.array([cell.value for cell in cells]), np.array(side_of)
        sides = [MeasuredValue.mean(values[side_numbers == side]) for side in range(max(side_of) + 1)]
        for index, side in enumerate(sides):
            if len(side.draws) == 1:  # the error of a group of one is unknown, not zero
                sides[index] = replace(side, error=math.nan, freedom=math.nan)
        return cls(quantity, cells, sides, grouped)

    @property
    def kind(self) -> str:
        """The kind of the sides' errors."""
        return SE if self.grouped else self.quantity.kind

    def over(self) -> str:
        """Return the draws that the sides' standard errors are over, such as "64 minibatches", or ""."""
        if self.kind != SE:
            return ""
        if self.grouped:
            counts, noun = {len(side.draws) for side in self.sides}, "seeds"
        else:
            counts = {int(side.freedom) + 1 for side in self.sides if math.isfinite(side.freedom)}
            noun = self.quantity.over
        if not counts:
            return ""
        return f"{' to '.join(f'{count:,}' for count in sorted({min(counts), max(counts)}))} {noun}"

    def difference(self, first: int, second: int) -> tuple[Difference, str]:
        """Return the value of side ``second`` minus that of side ``first``, and the name of the test."""
        a, b = self.sides[first], self.sides[second]
        if self.kind != SE:
            difference = Difference(b.value - a.value, a.error + b.error, math.nan, math.nan)
            return difference, "exact" if self.kind == EXACT else "bounds"
        if self.quantity.common and not self.grouped and len(a.draws) == len(b.draws) > 1:
            return _paired_difference(a.draws, b.draws)
        difference = welch(Estimate(a.value, a.error, a.freedom), Estimate(b.value, b.error, b.freedom))
        if self.grouped and min(len(a.draws), len(b.draws)) < SEEDS:
            difference = replace(difference, p=math.nan)
        return difference, "Welch t"


def _paired_difference(a: Array, b: Array) -> tuple[Difference, str]:
    """Return the mean of b − a, whose draws (n,) have the same random numbers, and the name of its test."""
    values = np.union1d(a, b)
    if len(values) != 2 or values[0] != 0:
        return paired(a, b), "paired t"
    scale = values[1]  # each sample is right, with an error of 0, or wrong, with 100%
    difference = mcnemar(a / scale, b / scale)
    mean, error = scale * difference.value, scale * difference.standard_error
    return replace(difference, value=mean, standard_error=error), "McNemar"
