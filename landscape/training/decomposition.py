"""Every step as effective learning rate and noise (DPSGD-2020, Eq. 3 and 4), for any update rule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from landscape.core.devices import float64_device
from landscape.data.base import Parts
from landscape.gradients.learners import Stack, Training
from landscape.problem.problem import Problem
from landscape.training.processes.comm import Comm
from landscape.training.recipes import GROUPS
from landscape.training.run import generator

# The columns that are 0 if all gradients are taken at the mean.
DELTA_2 = ("delta_2", "delta_2_se", "delta_2_full", "delta_cross", "delta_cross_se")


#: The columns of a step, from its new weights and learning rate.
Columns = Callable[[Tensor, float], dict[str, float]]
# The columns of learners with data of their own.
HETEROGENEITY = ("heterogeneity", "heterogeneity_se")
# Samples of a learner's part that are gathered at a time (our choice: it bounds the memory).
CHUNK = 1000
# Coordinates converted to float64 at a time, our choice: they stay in cache.
BLOCK = 2**16


@dataclass(frozen=True)
class Gradient:
    """∇L(w_a) as rows of independent estimates (k, P); one row if it is exact.

    Each process has its share of the P coordinates, of g and of the projected vectors. Sums are in float64.
    """

    loss: float
    rows: Tensor
    comm: Comm

    @property
    def exact(self) -> bool:
        return len(self.rows) == 1

    def project(self, vectors: Sequence[Tensor]) -> Projection:
        """The projections on g of m vectors (P_share,) that do not depend on the estimates."""
        k, m = len(self.rows), len(vectors)
        products = self.comm.totals(_products([*self.rows, *vectors]))
        gg, dots, pairs = products[:k, :k], products[:k, k:].T, products[k:, k:]
        if not self.exact:
            sums = (dots[:, :, None] + dots[:, None, :]) / 2  # (m, k, k)
            products_of_dots = (dots[:, None, :, None] * dots[None, :, None, :]).expand(m, m, k, k)
            along, along_se = quotient((products_of_dots + products_of_dots.mT) / 2, gg)
            norms = float(mean(gg)), float(standard_error(gg))
            return Projection(*norms, *quotient(sums, gg), pairs, pairs - along, along_se)
        norm2 = float(gg) or float("nan")
        # The projections themselves, so that small ones are not lost in differences.
        along = dots[:, 0] / norm2
        across = self.comm.totals(_products([self.rows[0], *vectors], along))[1:, 1:]
        zero = torch.zeros_like(across)
        return Projection(norm2, 0.0, along, zero[0], pairs, across, zero)


@dataclass(frozen=True)
class Projection:
    """‖g‖² and, of m vectors, ``along`` ⟨v, g⟩/‖g‖² (m,), with standard errors, 0 where g is exact.

    ``pairs`` (m, m): ⟨a, b⟩ of any two; ``across``: ⟨P⊥a, P⊥b⟩, P⊥ being the projector orthogonal to g.
    Where g is estimated, each product of two means comes from independent samples, and numerator and
    denominator of ⟨a, g⟩⟨b, g⟩/‖g‖² from the same: their errors are nearly the same and cancel, so that the
    error of Δ goes with the noise η, not with the whole displacement. Quotients by ‖g‖² are NaN where
    its estimate is not positive. ‖g‖² is NaN where g is exactly zero: nothing can be projected on it.
    """

    norm2: float
    norm2_se: float
    along: Tensor
    along_se: Tensor
    pairs: Tensor
    across: Tensor
    across_se: Tensor


def step_columns(loss: float, d: Projection) -> dict[str, float]:
    """The history's columns of a step of any rule, from L(w_a) and the projection of d."""
    return {
        "train_loss": loss,
        "alpha_e": 0.0 - float(d.along[0]),  # 0, and not −0, where nothing moved
        "alpha_e_se": float(d.along_se[0]),
        "grad_norm2": d.norm2,
        "grad_norm2_se": d.norm2_se,
        "displacement2": float(d.pairs[0, 0]),
        "delta": float(d.across[0, 0]),
        "delta_se": float(d.across_se[0, 0]),
    }


def _products(vectors: Sequence[Tensor], along: Tensor | None = None) -> Tensor:
    """⟨a, b⟩ (m, m) of any two, in float64; with ``along`` (m − 1,) of v_0 and v_i − along_i v_0."""
    m, where = len(vectors), float64_device(vectors[0].device)
    total = torch.zeros(m, m, dtype=torch.float64, device=where)
    block = torch.empty(m, BLOCK, dtype=torch.float64, device=where)
    for i in range(0, len(vectors[0]), BLOCK):
        rows = block[:, : len(vectors[0]) - i]
        for row, v in zip(rows, vectors, strict=True):
            row.copy_(v[i : i + BLOCK].to(where))
        if along is not None:
            rows[1:].addr_(along, rows[0], alpha=-1)
        total.addmm_(rows, rows.T)
    return total


@dataclass(frozen=True)
class GradientEstimator:
    """g = ∇L at any weights: exact over the whole training set, or from samples drawn anew at each step.

    Each process works on its share of the training set, of its batches, or of the GROUPS independent
    estimates.

    Args:
        problem: the training set.
        comm: the exchange with other processes; results are in its memory.
        samples: the number of samples from which g is estimated, a multiple of GROUPS; 0: all, exactly.
        seed: of the samples.
        batch: > 0 says that the loss of a sample depends on the batch it is in: the training set is then cut,
            once and at random, into batches of at most ``batch`` samples (equal ±1), and L is the mean over
            these. Estimates draw batches anew; their expectation is the mean over all batches that can be
            drawn.
    """

    problem: Problem
    comm: Comm
    samples: int = 0
    seed: int = 0
    batch: int = 0

    def at(self, weights: Tensor, step: int) -> Gradient:
        """g at ``weights`` (P,) before ``step``; valid until the next call."""
        problem, comm, batch = self.problem, self.comm, self.batch
        if self.samples == 0 and batch:
            cut = fixed_batches(problem.samples, batch, self.seed)
            loss, gradient = _summed(problem, weights, cut[comm.share(len(cut))], problem.samples)
            return Gradient(comm.total(loss)[0], comm.part_sum(gradient, "g")[None], comm)
        if self.samples == 0:
            part = problem.subset(comm.share(problem.samples)) if comm.size > 1 else problem
            weight = part.terms / problem.terms
            memory = comm.buffer("gradient", weights)
            loss, gradient = part.loss_and_gradient(weights, out=memory) if weight else (0.0, memory.zero_())
            exact = comm.part_sum(gradient.mul_(weight), "g")
            return Gradient(comm.total(loss * weight)[0], exact[None], comm)
        draw = generator(self.seed, "decompose", step)
        indices = torch.randint(problem.samples, (GROUPS, self.samples // GROUPS), generator=draw)
        total, rows = self._estimates(weights, indices[comm.share(GROUPS)], "estimates")
        return Gradient(comm.total(total)[0] / GROUPS, rows, comm)

    def heterogeneity(self, weights: Tensor, step: int, g: Gradient, parts: Parts) -> dict[str, float]:
        """n⁻¹ Σ_j ‖∇L_j − ∇L‖² at ``weights`` = w_a (P,), L_j the loss on the ``parts`` of learner j.

        Exact where ``g`` is. Otherwise each learner's part gives GROUPS independent estimates of ∇L_j, from
        as many samples together as ``g``, and their mean, weighted by the parts' terms, those of ∇L.
        """
        n = len(parts.indices)
        if g.exact:
            squares = 0.0
            for j in range(n):
                part = self._part_gradient(weights, parts.indices[j], j)
                squares += float(_products([part.sub_(g.rows[0])])[0, 0])
            return dict(zip(HETEROGENEITY, (self.comm.total(squares)[0] / n, 0.0), strict=True))
        sizes = self.problem.data.sample_terms
        terms = [float(len(i) if sizes is None else sizes[i].sum()) for i in parts.indices]
        mean_rows = weighted_rows = torch.zeros(())
        gram = torch.zeros(GROUPS, GROUPS, dtype=torch.float64)
        for j, samples in enumerate(parts.indices):
            rows = self._part_estimates(weights, samples, step, j, n)
            gram += _products([*rows]).cpu() / n
            mean_rows = mean_rows + rows / n
            weighted_rows = weighted_rows + rows * (terms[j] / sum(terms))
        # Σ_j ⟨R_j − S, R_j − S⟩/n for the rows R_j of the learners, S their weighted sum.
        pairs = _products([*mean_rows, *weighted_rows]).cpu()
        cross, weighted = pairs[:GROUPS, GROUPS:], pairs[GROUPS:, GROUPS:]
        kernel = self.comm.totals(gram - cross - cross.T + weighted)
        return dict(zip(HETEROGENEITY, (float(mean(kernel)), float(standard_error(kernel))), strict=True))

    def _part_gradient(self, weights: Tensor, samples: Tensor, learner: int) -> Tensor:
        """∇L_j on ``samples``, this process's share of the coordinates; valid until the next call."""
        comm, gradient, terms = self.comm, self.comm.buffer("part", weights).zero_(), 0.0
        if self.batch:  # in fixed batches, as the whole training set is
            draw = generator(self.seed, "heterogeneity", 0, learner)
            cut = _cut(samples[torch.randperm(len(samples), generator=draw)], self.batch)
            cut = cut[comm.share(len(cut))]
        else:
            samples = samples[comm.share(len(samples))]
            cut = _cut(samples, CHUNK) if len(samples) else ()
        for indices in cut:
            problem = self.problem.subset(indices.to(self.problem.device))
            gradient.add_(problem.loss_and_gradient(weights)[1], alpha=problem.terms)
            terms += problem.terms
        return comm.part_sum(gradient, "∇L_j").div_(comm.total(terms)[0])

    def _part_estimates(self, weights: Tensor, samples: Tensor, step: int, learner: int, n: int) -> Tensor:
        """(GROUPS, P_share), independent estimates of ∇L_j from ``samples``, drawn with replacement."""
        comm, draw = self.comm, generator(self.seed, "heterogeneity", step, learner)
        size = max(self.samples // (GROUPS * n), self.batch, 1)
        indices = torch.randint(len(samples), (GROUPS, size), generator=draw)
        return self._estimates(weights, samples[indices][comm.share(GROUPS)], "estimates of ∇L_j")[1]

    def _estimates(self, weights: Tensor, groups: Tensor, use: str) -> tuple[float, Tensor]:
        """The gradients on all GROUPS groups of samples, (GROUPS, P_share), of which ``groups`` (k, size) are
        this process's, and the sum of the losses of these; valid until the next of the same ``use``.
        """
        problem, size, groups = self.problem, groups.shape[1], groups.to(self.problem.device)
        rows, total = self.comm.buffer(use, weights.expand(len(groups), -1)), 0.0
        # As many groups at once as a chunk of the data has samples, which bounds the memory.
        at_once = problem.chunk // size if self._stack and len(groups) else 0
        if self._stack and at_once:
            for part, out in zip(torch.split(groups, at_once), torch.split(rows, at_once), strict=True):
                losses = self._stack.gradients(weights.expand_as(out), *problem.gather(part), out=out)
                total += sum(losses.tolist())
        else:
            for row, group in zip(rows, groups, strict=True):
                loss, row[:] = _summed(problem, weights, _cut(group, self.batch or size), size)
                total += loss
        return total, self.comm.parts(rows, GROUPS)

    @functools.cached_property
    def _stack(self) -> Stack | None:
        """Gradients of several groups at once; None where the model is no chain, or has a penalty."""
        stack = Stack(self.problem)
        return None if stack.layers is None or self.problem.regularised else stack


def fixed_batches(samples: int, batch: int, seed: int) -> tuple[Tensor, ...]:
    """The numbers of a training set's samples, drawn once into batches of at most ``batch`` (equal ±1)."""
    return _cut(torch.randperm(samples, generator=generator(seed, "decompose")), batch)


def _cut(indices: Tensor, batch: int) -> tuple[Tensor, ...]:
    return indices.tensor_split(-(-len(indices) // batch))


def _summed(problem: Problem, weights: Tensor, parts: Sequence[Tensor], samples: int) -> tuple[float, Tensor]:
    """Loss and gradient of each of ``parts``, a batch, summed by their shares of ``samples``."""
    total, gradient = 0.0, torch.zeros_like(weights)
    for part in parts:
        loss, g = problem.subset(part).loss_and_gradient(weights)
        total += loss * len(part) / samples
        gradient.add_(g, alpha=len(part) / samples)
    return total, gradient


@dataclass(frozen=True)
class Decomposer:
    """Decomposes steps of one run.

    With BatchNorm, the learners' minibatch gradients are gradients of the loss with the minibatch's own
    statistics, and so are those at the mean here. g is then the gradient of the same loss over the training
    set, cut into fixed batches of ``batch`` samples, those that one statistic comes from in training (of
    ``problem``, which takes each batch's statistics). Running statistics would be constants to the gradient,
    of another function than the steps descend. Dropout and augmentation are in the minibatch gradients and
    not in g: their effect counts as noise.

    Several processes have rows of their own each, and share the work: g by samples, sums by coordinates. For
    each process of N that costs 1/N of g and the traffic of two vectors of P numbers of the weights'
    precision; the split one vector more ``at_mean``, else a gradient, two vectors and an all-reduce.

    Args:
        stack: computes the learners' gradients.
        gradient: gives g.
        divided: the learners' parts of the training set, whose heterogeneity is measured, too, at the price
            of another g; None: they share it.
    """

    stack: Stack
    gradient: GradientEstimator
    divided: Parts | None = None

    def begin(
        self,
        weights: Tensor,
        x: Any,
        y: Any,
        gradients: Tensor,
        step: int,
        split: bool = True,
        at_mean: bool = False,
        training: Training | None = None,
    ) -> Columns:
        """Compute what needs no new weights: g, g_S and δ at w_a.

        Args:
            weights: those at the start of the step (n, P).
            x: the learners' minibatches, with ``y``, of which the gradients at the mean are computed here.
            gradients: the learners' minibatch gradients (n, P), where the rule took them.
            step: counted from 1.
            split: with the terms of Eq. 4. They must be left out where steps are not −α × gradient (with
                momentum, weight decay, LARS, LAMB or an optimizer of torch's); α_e and Δ come from the
                displacement and hold for all.
            at_mean: whether the rule took all gradients at w_a, so that δ = 0.
            training: the options with which the learners' minibatch gradients were taken.

        Returns:
            The history's columns, given the new weights (n, P) and the learning rate α.
        """
        comm = self.gradient.comm
        theta = comm.mean(weights)
        # Several processes have the mean of the new weights; the memory of this one is then overwritten.
        start = None if comm.size == 1 else comm.buffer("start", comm.part(theta)).copy_(comm.part(theta))
        g = self.gradient.at(theta, step)
        parts: list[Tensor] = []
        if split and at_mean:
            parts = [comm.part_mean(gradients, "g_S")]
        elif split:
            gradients_at_mean = comm.buffer("gradients at w_a", gradients)
            if training is not None:  # the learners' statistics are those of their own weights
                training = dataclasses.replace(training, buffers={})
            self.stack.gradients(theta.expand_as(gradients), x, y, out=gradients_at_mean, training=training)
            delta = comm.part_mean(gradients, "δ", minus=gradients_at_mean)
            parts = [comm.part_mean(gradients_at_mean, "g_S"), delta]
        columns = self.gradient.heterogeneity(theta, step, g, self.divided) if self.divided else {}

        def displacement(new: Tensor) -> Tensor:
            if start is None:  # the mean of the differences, each nearly free of rounding
                return comm.part_mean(new, "d", minus=weights)
            return torch.sub(comm.part(comm.mean(new)), start, out=start)

        return lambda new, lr: columns | _columns(g, displacement(new), parts, lr)


def _columns(g: Gradient, displacement: Tensor, parts: list[Tensor], lr: float) -> dict[str, float]:
    """The history's columns for a step of w_a by ``displacement`` with learning rate α.

    ``parts``: g_S and δ, g_S alone where δ = 0, nothing without the terms of Eq. 4.
    """
    projected = g.project([displacement, *parts])
    pairs, across, errors = projected.pairs, projected.across, projected.across_se
    columns = step_columns(g.loss, projected)
    if not parts:
        return columns
    scale = lr**2
    columns |= {"delta_s": scale * float(across[1, 1]), "delta_s_se": scale * float(errors[1, 1])}
    if len(parts) == 1:
        return columns | dict.fromkeys(DELTA_2, 0.0)
    terms = across[2, 2], errors[2, 2], pairs[2, 2], 2 * across[1, 2], 2 * errors[1, 2]
    return columns | {name: float(scale * term) for name, term in zip(DELTA_2, terms, strict=True)}


def mean(h: Tensor) -> Tensor:
    """The mean (...,) of ``h`` over all pairs of different estimates."""
    k = h.shape[-1]
    return _off_diagonal(h).sum((-1, -2)) / (k * (k - 1))


def covariance(a: Tensor, b: Tensor) -> Tensor:
    """The covariance (...,) of the means of ``a`` and ``b`` over pairs, without bias.

    E of their product, less the product of their expectations, for which pairs with no estimate in common
    stand. Needs four estimates or more.
    """
    return mean(a) * mean(b) - _mean_of_distinct(_off_diagonal(a), _off_diagonal(b))


def standard_error(h: Tensor) -> Tensor:
    """The standard error (...,) of the mean of ``h`` over pairs, √((4(k − 2) ζ₁ + 2 ζ₂)/(k(k − 1))).

    ζ₁ is the covariance of pairs with one estimate in common, ζ₂ the variance of one pair, unbiased or 0.
    Where ζ₁ is 0 the jackknife would state an error √2 times too large.
    """
    k, h = h.shape[-1], _off_diagonal(h)
    distinct, squares = _mean_of_distinct(h, h), h.square().sum((-1, -2))
    shared = (h.sum(-1).square().sum(-1) - squares) / (k * (k - 1) * (k - 2))
    zeta_1 = (shared - distinct).clamp(min=0)
    zeta_2 = (squares / (k * (k - 1)) - distinct).clamp(min=0)
    return ((4 * (k - 2) * zeta_1 + 2 * zeta_2) / (k * (k - 1))).sqrt()


def quotient(above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
    """mean(above)/mean(below), its bias of order 1/k taken off, and its standard error, (...,) each.

    Both from the same estimates, so that what they have in common cancels. The error is that of the
    linearized quotient. NaN where mean(below) is not positive, as the divisor is then unknown.
    """
    down = mean(below)
    down = down.where(down > 0, torch.nan)
    value = mean(above) / down
    linear = (above - value[..., None, None] * below) / down[..., None, None]
    return value + covariance(linear, below) / down, standard_error(linear)


def _off_diagonal(h: Tensor) -> Tensor:
    return h.masked_fill(torch.eye(h.shape[-1], dtype=torch.bool, device=h.device), 0.0)


def _mean_of_distinct(a: Tensor, b: Tensor) -> Tensor:
    """The mean of a_ij b_kl over i, j, k, l that all differ, by inclusion and exclusion."""
    k, matrix = a.shape[-1], (-1, -2)
    shared = (a.sum(-1) * b.sum(-1)).sum(-1)
    total = a.sum(matrix) * b.sum(matrix) - 4 * shared + 2 * (a * b).sum(matrix)
    return total / (k * (k - 1) * (k - 2) * (k - 3))
