"""The gradient noise scale tr Σ/‖g‖² from gradients of minibatches, with standard errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.core.statistics import Estimate, covariance_of_means, ratio_interval, scale_of, standard_error

# Groups of draws, each of which is left out once for the standard error, which they give to 13%, 1/√(2·31);
# fewer where their sums would take more than so many bytes, but at least 8 (ours).
GROUPS, LEAST_GROUPS, GROUP_BYTES = 32, 8, 2**30


@dataclass(frozen=True)
class Scale:
    """tr Σ, ‖g‖² and their ratio.

    Attributes:
        estimates: (replicates,), numbers whose mean is tr Σ/‖g‖² and whose standard error is that of it.
        trace, trace_error: tr Σ, Σ the covariance of the gradient of one sample, and its standard error.
        norm2, norm2_error: the same of ‖g‖².
        covariance: of the two estimates; 0 where one is exact.
    """

    estimates: Array
    trace: float
    trace_error: float
    norm2: float
    norm2_error: float
    covariance: float = 0.0

    @property
    def value(self) -> float:
        """tr Σ/‖g‖²; NaN where ‖g‖² is not told apart from 0."""
        return scale_of(self.estimates, self.interval())

    def interval(self) -> tuple[float, float]:
        """The 95% interval of tr Σ/‖g‖²; its upper end is infinite where ‖g‖² is not told apart from 0."""
        freedom = len(self.estimates) - 1
        return ratio_interval(
            Estimate(self.trace, self.trace_error, freedom),
            Estimate(self.norm2, self.norm2_error, freedom),
            self.covariance,
        )

    @property
    def standard_error(self) -> float:
        """The standard error of ``value``; NaN from one replicate."""
        return standard_error(self.estimates)


class Estimator(Protocol):
    """Takes the gradients of one draw after the other."""

    @property
    def draws(self) -> int:
        """How many draws were taken."""

    def add(self, gradients: Tensor) -> None:
        """Take the gradients of a draw, a row for each of its minibatches."""

    def scale(self) -> Scale:
        """The estimate from the draws so far."""


def from_round(gradients: Tensor, batch: int) -> tuple[float, float]:
    """(tr Σ, ‖g‖²), both unbiased, from the gradients (n, P) of n ≥ 2 minibatches of ``batch`` samples.

    McCandlish et al. 2018, appendix A.1, with the n minibatches as small batches and all together as the
    large one. Where they are of learners at different weights, with V the variance of the learners' own mean
    gradients (divided by n − 1), tr Σ includes ``batch`` · V, and ‖g‖² is that of their average less V/n.

    Example:
        >>> from_round(torch.tensor([[3.0, 1.0], [3.0, -1.0]]), batch=5)
        (10.0, 8.0)
    """
    total2 = float(gradients.sum(0, dtype=torch.float64).square().sum())
    squares = float(sum(row.double().square().sum() for row in gradients))
    return from_sums(squares, total2, len(gradients), batch)


def from_sums(squares: Any, total2: Any, n: Any, batch: int) -> tuple[Any, Any]:
    """(tr Σ, ‖g‖²) of :func:`from_round`, from Σ_j ‖g_j‖² and ‖Σ_j g_j‖² of n ≥ 2 minibatches; or arrays.

    Example:
        >>> from_sums(20.0, 36.0, 2, batch=5)
        (10.0, 8.0)
    """
    return batch * (squares - total2 / n) / (n - 1), (total2 - squares) / (n * (n - 1))


class AroundWhole:
    """From the distances of minibatch gradients to the gradient of all data, which is exact."""

    def __init__(self, whole: Tensor, batch: int) -> None:
        self._whole, self._batch = whole, batch
        self._norm2 = float(whole.double().square().sum())
        self._traces: list[float] = []

    @property
    def draws(self) -> int:
        """How many draws were taken."""
        return len(self._traces)

    def add(self, gradients: Tensor) -> None:
        """Take the gradient (1, P) of a minibatch."""
        self._traces.append(self._batch * float((gradients[0] - self._whole).double().square().sum()))

    def scale(self) -> Scale:
        """tr Σ is the mean of B‖g_B − g‖²."""
        traces = np.array(self._traces)
        estimates = traces / self._norm2 if self._norm2 else np.full_like(traces, np.inf)
        return Scale(estimates, float(traces.mean()), standard_error(traces), self._norm2, 0.0)


class Learners:
    """From minibatch gradients of n ≥ 2 learners at their own weights.

    The scale is that of their mean gradient, by :class:`Jackknife`: each draw is one of n · B samples, whose
    noise the spread of the weights does not enter. ``rounds`` is what single draws show by
    :func:`from_round`, as a running training would.
    """

    def __init__(self, theta: Tensor, learners: int, batch: int) -> None:
        self._mean, self._batch = Jackknife(theta, learners * batch), batch
        self._rounds: list[tuple[float, float]] = []

    @property
    def draws(self) -> int:
        """How many draws were taken."""
        return len(self._rounds)

    def add(self, gradients: Tensor) -> None:
        """Take the learners' gradients (n, P)."""
        self._mean.add(gradients.mean(0, keepdim=True, dtype=torch.float64))
        self._rounds.append(from_round(gradients, self._batch))

    def scale(self) -> Scale:
        """The scale of the mean gradient."""
        return self._mean.scale()

    def rounds(self) -> dict[str, float]:
        """The means of tr Σ and ‖g‖² over the draws, each by itself, with their standard errors."""
        traces, norms2 = np.array(self._rounds).T
        return {
            "round_trace": float(traces.mean()),
            "round_trace_error": standard_error(traces),
            "round_norm2": float(norms2.mean()),
            "round_norm2_error": standard_error(norms2),
        }


class Jackknife:
    """From all pairs of minibatch gradients at one θ (P,): both parts are unbiased, their ratio nearly.

    Each group of draws is left out once, which gives the standard errors and takes most of the ratio's bias
    (Quenouille's jackknife). Sums of gradients are kept by group, not the gradients themselves.
    """

    def __init__(self, theta: Tensor, batch: int) -> None:
        groups = max(LEAST_GROUPS, min(GROUPS, GROUP_BYTES // (8 * len(theta))))
        self._batch, self.draws = batch, 0
        self._sums = torch.zeros(groups, len(theta), dtype=torch.float64, device=theta.device)
        self._gram = np.zeros((groups, groups))
        self._squares, self._counts = np.zeros(groups), np.zeros(groups, dtype=int)

    def add(self, gradients: Tensor) -> None:
        """Take the gradient (1, P) of a minibatch."""
        m = self.draws % len(self._sums)
        g = gradients[0].double()
        self._sums[m] += g
        self._squares[m] += float(g @ g)
        self._counts[m] += 1
        self._gram[m] = self._gram[:, m] = (self._sums @ self._sums[m]).cpu().numpy()
        self.draws += 1

    def scale(self) -> Scale:
        """Pseudo-values of the ratio, one for each group."""
        used = self._counts > 0
        gram, squares, counts = self._gram[np.ix_(used, used)], self._squares[used], self._counts[used]
        total2, square, count = gram.sum(), squares.sum(), counts.sum()
        parts = self._parts(total2, square, count)
        left2 = total2 - 2 * gram.sum(1) + np.diag(gram)
        left = self._parts(left2, square - squares, count - counts)
        k = len(counts)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio, ratios = parts[0] / parts[1], left[0] / left[1]
            pseudo = [k * ratio - (k - 1) * ratios]
        pseudo += [k * whole - (k - 1) * part for whole, part in zip(parts, left, strict=True)]
        _, trace_error, norm2_error = (standard_error(values) for values in pseudo)
        both = covariance_of_means(pseudo[1], pseudo[2])
        return Scale(pseudo[0], float(parts[0]), trace_error, float(parts[1]), norm2_error, both)

    def _parts(self, total2: Array, squares: Array, count: Array) -> tuple[Array, Array]:
        """(tr Σ, ‖g‖²) from ‖Σ g_k‖², Σ ‖g_k‖² and the number of draws."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return from_sums(squares, total2, count, self._batch)
