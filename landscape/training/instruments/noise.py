"""The gradient noise along a run, its curvature, and the learners' disagreement in the sharp subspace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from landscape.analysis.spread import half_mean, shares
from landscape.checkpoint.history import UNITS
from landscape.core import statistics
from landscape.core.devices import double, inner
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.statistics import covariance_of_means, mean_and_error
from landscape.curvature.search import RitzPairs
from landscape.gradients.minibatches import GradientNoise, JackknifeEstimator, Minibatches, from_sums
from landscape.training.instruments import Instrument, MeasuredRun, StepState, instrument, rounding
from landscape.training.instruments.sharpness import OnSample, TopEigenvectors

# Of a step's cost, the most that second gradients may take on average: 1/40 (our choice).
SHARE = 40


@instrument("noise-scale")
class NoiseScale(Instrument):
    """tr Σ/‖g‖² (McCandlish et al. 2018, arXiv:1812.06162), averaged over a window of steps.

    The value is the ratio of the averages of tr Σ and ‖g‖², which are unbiased. If all n learners compute
    their gradients at one point, tr Σ and ‖g‖² come from the gradients of a step. Otherwise g is the mean of
    the learners' gradients, and the spread of the points would count as noise: tr Σ then comes from a second
    gradient of one learner, in turn, every ⌈40/n⌉ steps, which takes 1/40 of the time of all gradients (our
    choice). The window is the steps since the last measurement.

    Errors come from the scatter within the window (the ratio's by the jackknife); changes of the weights
    count as noise. The ratio is NaN if ‖g‖² is not significantly above 0, because its distribution then has
    heavy tails. Further columns have the ends of the ratio's 95% interval (Fieller's); if the ratio is NaN,
    the upper end is infinite.

    In a user's training loop tr Σ and ‖g‖² come from ``monitor.draws`` fresh minibatches after a step. In a
    run of a recipe a step takes two passes over the learners' gradients; with several processes also a
    reduce-scatter and a sum of two numbers.
    """

    columns: Mapping[str, str] = {
        "noise_scale": "samples",
        "noise_scale_se": "samples",
        "noise_scale_low": "samples",
        "noise_scale_high": "samples",
        "noise_trace": "nat^2",
        "noise_trace_se": "nat^2",
        "noise_norm2": "nat^2",
        "noise_norm2_se": "nat^2",
    }
    on_minibatches = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        self._between = run.synchronous and run.learners > 1
        self._every = 1 if self._between else -(-SHARE // run.learners)
        #: The steps since the last measurement. Of each step two sums: ‖Σ_j g_j‖², and Σ_j ‖g_j‖² or tr Σ.
        self._steps: list[int] = []
        self._sums: list[Tensor] = []

    def see(self, step: int, points: Tensor, rows: Tensor) -> None:
        comm = self.run.comm
        mean = comm.share_of_sum(rows.sum(0), "noise scale")
        if self._between:
            flat = rows.flatten()
            noise = inner(flat, flat)
        else:
            noise = self._noise(step, points, rows)
        sums = torch.stack((inner(mean, mean), noise))  # not read here: the host need not wait for a GPU
        self._steps.append(step)
        self._sums.append(comm.totals(double(sums)))

    def _noise(self, step: int, points: Tensor, rows: Tensor) -> Tensor:
        """Return B/2 ‖g_j − g_j'‖² of this step's learner j; its expectation is tr Σ.

        0 where j is a learner of another process, and NaN where no learner has a turn in this step.
        """
        run = self.run
        assert run.second_gradient is not None
        if step % self._every:
            return rows.new_tensor(math.nan)
        j = step // self._every % run.learners
        local = j - run.comm.local.start
        if not 0 <= local < run.comm.n_local:
            return rows.new_zeros(())
        difference = run.second_gradient(step, j, points[local]) - rows[local]
        return inner(difference, difference) * (self.run.batch // run.learners / 2)

    def state(self, step: int) -> dict[str, Tensor]:
        count = sum(number <= step for number in self._steps)  # the last step may have been undone
        if not count:
            return {}
        steps = torch.tensor(self._steps[:count], dtype=torch.float64)
        return {self.key: torch.cat((steps[:, None], self._table()[:count]), 1)}

    def restore(self, state: Tensor) -> None:
        self._steps = [int(step) for step in state[:, 0]]
        self._sums = list(state[:, 1:])

    def _table(self) -> Tensor:
        """Return the sums of the steps so far, (steps, 2) float64 on the CPU."""
        return torch.stack([sums.to("cpu", torch.float64) for sums in self._sums])

    def measure(self, now: StepState) -> dict[str, float]:
        if self.run.second_gradient is None:
            return self._from_draws(now)
        traces, norms2 = self._window()
        if not len(traces):
            return {}
        estimates = statistics.ratio_estimates(traces, norms2)
        covariance = covariance_of_means(traces, norms2)
        noise = GradientNoise(estimates, *mean_and_error(traces), *mean_and_error(norms2), covariance)
        return self._row_of(noise)

    def _window(self) -> tuple[Array, Array]:
        """Return tr Σ and ‖g‖² of each step, or of each group of steps up to a second gradient.

        These steps are removed; steps after the last second gradient stay for the next window.
        """
        n = self.run.learners
        table = self._table().numpy() if self._sums else np.zeros((0, 2))
        # Each group of steps ends before one of these rows.
        ends = np.flatnonzero(np.array(self._steps) % self._every == 0) + 1
        count = int(ends[-1]) if len(ends) else 0
        self._steps, self._sums = self._steps[count:], self._sums[count:]
        if self._between:
            return from_sums(table[:, 1], table[:, 0], n, self.run.batch // n)
        traces = table[ends - 1, 1]
        groups = np.split(table[:count], ends[:-1]) if count else []
        means = np.array([group[:, 0].mean() for group in groups])
        return traces, means / n**2 - traces / self.run.batch

    def _from_draws(self, now: StepState) -> dict[str, float]:
        estimator = JackknifeEstimator(now.mean, self.run.batch)
        for gradient in _gradients(self, now):
            estimator.add(gradient[None])
        return self._row_of(estimator.estimate())

    def _row_of(self, scale: GradientNoise) -> dict[str, float]:
        error = scale.standard_error if math.isfinite(scale.value) else math.nan
        low, high = scale.interval()
        trace, norm2 = (scale.trace, scale.trace_error), (scale.norm2, scale.norm2_error)
        return self.row(scale.value, error, low, high, *trace, *norm2)


@instrument("noise-alignment", "draws")
class NoiseAlignment(OnSample):
    """tr(HS)/tr S at w_a, S the second moment of minibatch gradients: the interaction-aware sharpness.

    From ``monitor.draws`` fresh minibatches of the total batch, H on the sample of ``monitor.samples``; see
    :func:`landscape.noise_alignment`. A draw takes a gradient over its minibatch and a product over the
    sample.
    """

    columns: Mapping[str, str] = {"noise_alignment": "nat", "noise_alignment_se": "nat"}
    on_minibatches = True

    def numbers(self, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        curvatures = self.sample.curvatures(now.mean)
        pairs = [(*curvatures(g), float(double(g).square().sum())) for g in _gradients(self, now)]
        return statistics.ratio(*np.array(pairs).T)


@instrument("noise-share", "k", "draws")
class NoiseShare(TopEigenvectors):
    """The share of the gradient noise that lies along the ``monitor.k`` leading eigenvectors, at w_a.

    tr(VᵀΣV)/tr Σ, from ``monitor.draws`` fresh minibatches of the total batch. "disagreement" has this share
    for the spread, which the noise feeds. For random directions the share would be k/P. A measurement takes a
    gradient over each minibatch, and the products of the eigenvectors, which "lambda-max" uses as well.
    """

    columns: Mapping[str, str] = {"noise_share": "1", "noise_share_se": "1"}
    on_minibatches = True

    def numbers_of(self, pairs: RitzPairs, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        rows = double(torch.stack([*_gradients(self, now)]))
        rows -= rows.mean(0)
        squares = rows.square().sum(1).cpu().numpy()
        if not squares.sum() > 0:  # no noise, or none that is finite
            return ()
        share, error = shares((rows @ double(pairs.vectors).T).square().cpu().numpy(), squares)
        return float(share.sum()), float(error[-1])


def _gradients(instrument: Instrument, now: StepState) -> Iterator[Tensor]:
    """Return the gradients (P,) of ``monitor.draws`` fresh minibatches at w_a."""
    run = instrument.run
    minibatches = Minibatches(run.problem, run.batch, instrument.generator(now))
    for (minibatch,) in itertools.islice(minibatches, run.monitor.draws):
        yield minibatch.loss_and_gradient(now.mean)[1]


@instrument("disagreement", "k")
class Disagreement(TopEigenvectors):
    """The spread and the gradient in the space of the ``monitor.k`` largest eigenvalues, and ½ tr(HC).

    H and the gradient are at w_a, on the sample of ``monitor.samples``; C = n⁻¹ Σ_j Δw_j Δw_jᵀ, so that
    ½ tr(HC) is what the spread costs in loss to second order, in nats. Errors are those of
    :func:`landscape.disagreement`, over the learners. Takes the products of the eigenvectors, which
    "lambda-max" uses as well, and one for each learner.
    """

    columns: Mapping[str, str] = {
        "spread_share": UNITS["spread_share"],
        "spread_share_se": "1",
        "gradient_share": "1",
        "disagreement_cost": "nat",
        "disagreement_cost_se": "nat",
    }
    of_learners = True

    def __init__(self, run: MeasuredRun) -> None:
        super().__init__(run)
        if run.learners < 2:
            raise InputError(f"monitor.instruments: '{self.name}' is not allowed with 1 learner")

    def numbers_of(self, pairs: RitzPairs, now: StepState, learners: Iterator[Tensor]) -> Sequence[float]:
        vectors = double(pairs.vectors)
        curvatures_along = self.sample.curvatures(now.mean)
        curvatures: list[float] = []
        rows: list[Tensor] = []  # of a learner: the squares of Δw_j along the eigenvectors, and ‖Δw_j‖²
        for weights in learners:
            spread = weights - now.mean
            curvatures += curvatures_along(spread)
            spread = double(spread)
            rows.append(torch.cat((vectors @ spread, spread.norm()[None])).square())
        squares = torch.stack(rows).cpu().numpy()
        share = error = math.nan
        if squares[:, -1].mean() > rounding(now.mean):  # else all learners have the same weights
            spread_shares, errors = shares(squares[:, :-1], squares[:, -1])
            share, error = float(spread_shares.sum()), float(errors[-1])
        gradient = double(self.sample.gradient(now.mean))
        norm2 = float(gradient @ gradient) or math.nan
        gradient_share = float((vectors @ gradient).square().sum()) / norm2
        return share, error, gradient_share, *half_mean(np.array(curvatures))
