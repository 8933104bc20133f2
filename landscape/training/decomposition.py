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


#: A function (new weights, learning rate) -> the history's columns of a step.
ColumnsOfStep = Callable[[Tensor, float], dict[str, float]]
# Samples of a learner's part that are gathered at a time (our choice: it bounds the memory).
CHUNK = 1000
# Coordinates converted to float64 at a time, our choice: they stay in cache.
BLOCK = 2**16


@dataclass(frozen=True)
class Gradient:
    """g = ∇L(w_a) as rows of k independent estimates (k, P); one row if g is exact.

    Each process has its share of the P coordinates, (k, P_share). Sums are in float64.
    """

    loss: float
    rows: Tensor
    comm: Comm

    @property
    def exact(self) -> bool:
        return len(self.rows) == 1

    def project(self, vectors: Sequence[Tensor]) -> Projection:
        """Return the projections on g of m vectors (P_share,) that do not depend on the estimates."""
        k, m = len(self.rows), len(vectors)
        products = self.comm.totals(_inner_products([*self.rows, *vectors]))
        gg = products[:k, :k]  # ⟨g_r, g_s⟩ (k, k) of the estimates
        dots = products[:k, k:].T  # ⟨v_i, g_r⟩ (m, k)
        pairs = products[k:, k:]  # ⟨v_i, v_j⟩ (m, m)
        if not self.exact:
            means = (dots[:, :, None] + dots[:, None, :]) / 2  # (m, k, k), symmetric in r and s
            # ⟨v_i, g_r⟩⟨v_j, g_s⟩ (m, m, k, k), whose mean over r ≠ s is ⟨v_i, g⟩⟨v_j, g⟩.
            crossed = (dots[:, None, :, None] * dots[None, :, None, :]).expand(m, m, k, k)
            inside, inside_se = quotient((crossed + crossed.mT) / 2, gg)
            norm2, norm2_se = float(pair_mean(gg)), float(standard_error(gg))
            along, along_se = quotient(means, gg)
            return Projection(norm2, norm2_se, along, along_se, pairs, pairs - inside, inside_se)
        norm2 = float(gg) or float("nan")
        # Products of the orthogonal parts, as a difference pairs − … would lose small ones to rounding.
        along = dots[:, 0] / norm2
        across = self.comm.totals(_inner_products([self.rows[0], *vectors], along))[1:, 1:]
        zero = torch.zeros_like(across)
        return Projection(norm2, 0.0, along, zero[0], pairs, across, zero)


@dataclass(frozen=True)
class Projection:
    """‖g‖² and the projections of m vectors on g, with standard errors (names with _se), 0 where g is exact.

    Where g is estimated, each product of two means comes from independent samples. In ⟨a, g⟩⟨b, g⟩/‖g‖² the
    numerator and the denominator come from the same samples: their errors are nearly equal and cancel, so
    that the error of Δ grows with the noise η, not with the whole displacement. Quotients by ‖g‖² are NaN
    where the estimate of ‖g‖² is not positive. ‖g‖² is NaN where g is exactly zero: nothing can be projected
    on a zero vector.

    Attributes:
        norm2: ‖g‖².
        along: ⟨v, g⟩/‖g‖² (m,) of each vector v.
        pairs: ⟨a, b⟩ (m, m) of any two vectors.
        across: ⟨P⊥a, P⊥b⟩ (m, m), P⊥ the projector orthogonal to g.
    """

    norm2: float
    norm2_se: float
    along: Tensor
    along_se: Tensor
    pairs: Tensor
    across: Tensor
    across_se: Tensor


def step_columns(loss: float, d: Projection) -> dict[str, float]:
    """Return the history's columns of a step of any rule, given L(w_a) and the projection of d alone."""
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


def _inner_products(vectors: Sequence[Tensor], along: Tensor | None = None) -> Tensor:
    """Return the inner products (m, m) of ``vectors`` in float64.

    With ``along`` (m − 1,): the products of v_0 and of all v_i − along_i v_0.
    """
    m, size = len(vectors), len(vectors[0])
    device = float64_device(vectors[0].device)
    total = torch.zeros(m, m, dtype=torch.float64, device=device)
    block = torch.empty(m, BLOCK, dtype=torch.float64, device=device)
    for begin in range(0, size, BLOCK):
        rows = block[:, : size - begin]  # the last block is shorter
        for row, v in zip(rows, vectors, strict=True):
            row.copy_(v[begin : begin + BLOCK].to(device))
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
        batch: > 0: the loss of a sample depends on the batch of the sample. The training set is then cut,
            once and at random, into batches of at most ``batch`` samples (equal ±1), and L is the mean over
            these batches. Estimates draw batches anew; the expectation of an estimate is the mean over all
            batches that can be drawn.
    """

    problem: Problem
    comm: Comm
    samples: int = 0
    seed: int = 0
    batch: int = 0

    def at(self, weights: Tensor, step: int) -> Gradient:
        """Return g at ``weights`` (P,) before ``step``; valid until the next call."""
        problem, comm, batch = self.problem, self.comm, self.batch
        if self.samples == 0 and batch:
            cut = fixed_batches(problem.samples, batch, self.seed)
            loss, gradient = _summed(problem, weights, cut[comm.share(len(cut))], problem.samples)
            return Gradient(comm.total(loss)[0], comm.share_of_sum(gradient, "g")[None], comm)
        if self.samples == 0:
            part = problem.subset(comm.share(problem.samples)) if comm.size > 1 else problem
            weight = part.terms / problem.terms
            memory = comm.buffer("gradient", weights)
            if weight:
                loss, gradient = part.loss_and_gradient(weights, out=memory)
            else:  # no sample of this process's share is a term of the loss
                loss, gradient = 0.0, memory.zero_()
            exact = comm.share_of_sum(gradient.mul_(weight), "g")
            return Gradient(comm.total(loss * weight)[0], exact[None], comm)
        random_numbers = generator(self.seed, "decompose", step)
        shape = (GROUPS, self.samples // GROUPS)
        indices = torch.randint(problem.samples, shape, generator=random_numbers)
        total, rows = self._estimates(weights, indices[comm.share(GROUPS)], "estimates")
        return Gradient(comm.total(total)[0] / GROUPS, rows, comm)

    def heterogeneity(self, weights: Tensor, step: int, g: Gradient, parts: Parts) -> dict[str, float]:
        """Return the heterogeneity n⁻¹ Σ_j ‖∇L_j − ∇L‖² at ``weights`` = w_a (P,), and its standard error.

        L_j is the loss on the samples that ``parts`` gives to learner j. If ``g``, the gradient ∇L at
        ``weights``, is exact, the result is exact. Otherwise each ∇L_j is estimated GROUPS = 16 times, from
        independent groups of samples. All groups of all learners together have about as many samples as the
        estimate ``g``, but each group has at least one sample or, with BatchNorm, one batch. An estimate of
        ∇L is the weighted mean of the learners' estimates. A learner's weight is the number of loss terms of
        the learner's samples.
        """
        n = len(parts.indices)
        if g.exact:
            squares = 0.0
            for j, indices in enumerate(parts.indices):
                difference = self._part_gradient(weights, indices, j).sub_(g.rows[0])
                # Adds ‖difference‖² over this process's coordinates, from a (1, 1) matrix of inner products.
                squares += float(_inner_products([difference])[0, 0])
            (total,) = self.comm.total(squares)
            return {"heterogeneity": total / n, "heterogeneity_se": 0.0}
        sample_terms = self.problem.data.sample_terms  # None: one term for each sample
        terms = [float(len(i) if sample_terms is None else sample_terms[i].sum()) for i in parts.indices]
        size = max(self.samples // (GROUPS * n), self.batch, 1)  # of each of a learner's GROUPS draws
        # The rows of R_j are the GROUPS estimates of ∇L_j, in this process's share of the P coordinates. The
        # rows of S = Σ_j (terms_j/Σ_i terms_i) R_j are the estimates of ∇L.
        # ``mean_rows`` is Σ_j R_j/n, and ``weighted_rows`` is S.
        mean_rows, weighted_rows = torch.zeros(()), torch.zeros(())  # get the shape of R_j in the first sum
        mean_products = torch.zeros(GROUPS, GROUPS, dtype=torch.float64)  # Σ_j R_j R_jᵀ/n
        for j, indices in enumerate(parts.indices):
            random_numbers = generator(self.seed, "heterogeneity", step, j)
            draws = torch.randint(len(indices), (GROUPS, size), generator=random_numbers)
            groups = indices[draws][self.comm.share(GROUPS)]
            _, rows = self._estimates(weights, groups, "estimates of ∇L_j")
            mean_products += _inner_products([*rows]).cpu() / n
            mean_rows = mean_rows + rows / n
            weighted_rows = weighted_rows + rows * (terms[j] / sum(terms))
        products = _inner_products([*mean_rows, *weighted_rows]).cpu()  # (2 GROUPS, 2 GROUPS)
        cross, weighted_products = products[:GROUPS, GROUPS:], products[GROUPS:, GROUPS:]
        # ``kernel`` is Σ_j (R_j − S)(R_j − S)ᵀ/n. The expectation of each off-diagonal entry is the
        # heterogeneity. On the diagonal an estimate's error is multiplied by itself.
        kernel = self.comm.totals(mean_products - cross - cross.T + weighted_products)
        return {"heterogeneity": float(pair_mean(kernel)), "heterogeneity_se": float(standard_error(kernel))}

    def _part_gradient(self, weights: Tensor, samples: Tensor, learner: int) -> Tensor:
        """Return ∇L_j on ``samples``, this process's share of the coordinates; valid until the next call."""
        comm = self.comm
        gradient, terms = comm.buffer("part", weights).zero_(), 0.0
        if self.batch:  # fixed batches, as those of the whole training set
            random_numbers = generator(self.seed, "heterogeneity", 0, learner)
            batches = _cut(samples[torch.randperm(len(samples), generator=random_numbers)], self.batch)
            batches = batches[comm.share(len(batches))]
        else:
            samples = samples[comm.share(len(samples))]
            batches = _cut(samples, CHUNK) if len(samples) else ()
        for indices in batches:
            problem = self.problem.subset(indices.to(self.problem.device))
            gradient.add_(problem.loss_and_gradient(weights)[1], alpha=problem.terms)
            terms += problem.terms
        return comm.share_of_sum(gradient, "∇L_j").div_(comm.total(terms)[0])

    def _estimates(self, weights: Tensor, groups: Tensor, use: str) -> tuple[float, Tensor]:
        """Return the sum of this process's losses, and the gradients (GROUPS, P_share) on groups of samples.

        ``groups`` (k, size) are this process's; the gradients are those of all processes' GROUPS groups. They
        are valid until the next call with the same ``use``.
        """
        problem, groups = self.problem, groups.to(self.problem.device)
        size = groups.shape[1]
        rows, total = self.comm.buffer(use, weights.expand(len(groups), -1)), 0.0
        # As many groups at once as fit into a chunk of the data, which bounds the memory.
        at_once = problem.chunk // size if self._stack and len(groups) else 0
        if self._stack and at_once:
            for part, out in zip(torch.split(groups, at_once), torch.split(rows, at_once), strict=True):
                x, y = problem.gather(part)
                losses = self._stack.gradients(weights.expand_as(out), x, y, out=out)
                total += sum(losses.tolist())
        else:
            for row, group in zip(rows, groups, strict=True):
                loss, gradient = _summed(problem, weights, _cut(group, self.batch or size), size)
                row.copy_(gradient)
                total += loss
        return total, self.comm.parts(rows, GROUPS)

    @functools.cached_property
    def _stack(self) -> Stack | None:
        """Gradients of several groups at once; None where the model is no chain, or has a penalty."""
        stack = Stack(self.problem)
        return None if stack.layers is None or self.problem.regularised else stack


def fixed_batches(samples: int, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Return sample numbers of a training set, drawn once into batches of at most ``batch`` (equal ±1)."""
    return _cut(torch.randperm(samples, generator=generator(seed, "decompose")), batch)


def _cut(indices: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Return ``indices`` in the fewest parts of at most ``batch`` (equal ±1)."""
    return indices.tensor_split(-(-len(indices) // batch))


def _summed(problem: Problem, weights: Tensor, parts: Sequence[Tensor], samples: int) -> tuple[float, Tensor]:
    """Return Σ_b s_b L_b and Σ_b s_b ∇L_b over batches ``parts``, s_b their shares of ``samples``."""
    total, gradient = 0.0, torch.zeros_like(weights)
    for part in parts:
        loss, part_gradient = problem.subset(part).loss_and_gradient(weights)
        total += loss * len(part) / samples
        gradient.add_(part_gradient, alpha=len(part) / samples)
    return total, gradient


@dataclass(frozen=True)
class Decomposer:
    """Decomposes steps of one run.

    With BatchNorm, minibatch gradients are gradients of the loss with the minibatch's own statistics, at the
    learners' weights and at the mean. g is then the gradient of this loss over the training set, cut into
    fixed batches of the size whose statistics training uses (``gradient.batch``). With running statistics,
    which are constants to the gradient, g would belong to another loss than the one that steps descend.
    Dropout and augmentation change minibatch gradients and not g: their effect counts as noise.

    Each of several processes has its own rows. The processes share the work: g by samples, sums by
    coordinates. Each of N processes computes 1/N of g, and exchanges two vectors of P numbers in the weights'
    precision. The terms of Eq. 4 need one more vector with ``at_mean``, otherwise a gradient, two vectors and
    an all-reduce.

    Args:
        stack: computes the learners' gradients.
        gradient: computes g.
        divided: the learners' parts of the training set, whose heterogeneity is then measured, at the price
            of another g; None: the learners share the training set.
    """

    stack: Stack
    gradient: GradientEstimator
    divided: Parts | None = None

    def begin(
        self, weights: Tensor, x: Any, y: Any, gradients: Tensor, step: int, split_noise: bool = True,
        at_mean: bool = False, training: Training | None = None,
    ) -> ColumnsOfStep:  # fmt: skip
        """Begin to decompose a step: compute everything that does not need the new weights.

        Always computed is g = ∇L(w_a), where w_a is the mean of the learners' weights. A step d of w_a has
        the effective learning rate α_e and the noise Δ = ‖d + α_e g‖² (DPSGD-2020, Eq. 3). Eq. 4 splits Δ
        into terms. The terms need g_S, the mean over the learners of their minibatch gradients at w_a, and δ,
        the mean of ``gradients`` minus g_S. For a divided training set the heterogeneity is computed, too.

        Args:
            weights: the learners' weights (n, P) at the start of the step.
            x, y: the learners' minibatches, for their gradients at w_a.
            gradients: the learners' minibatch gradients (n, P) in this step. Some update rules take gradients
                at other weights than ``weights``, such as older ones.
            step: counted from 1.
            split_noise: whether to split Δ into the terms of Eq. 4. The terms hold only if the learners step
                by −α times a gradient: without momentum or weight decay, and not for LARS, LAMB or
                ``torch.optim``.
            at_mean: whether all ``gradients`` were taken at w_a, so that δ = 0.
            training: the options of training mode for ``gradients``; None: they were computed in eval mode.

        Returns:
            A function of the new weights (n, P) and the learning rate α that returns the history's columns.
        """
        comm = self.gradient.comm
        mean_weights = comm.mean(weights)
        g = self.gradient.at(mean_weights, step)
        vectors: list[Tensor] = []  # [g_S, δ]; [g_S] if δ = 0; [] without the terms of Eq. 4
        # share_of_mean() averages over all learners, and returns this process's share of the P coordinates.
        # ``g`` holds only this share, too.
        if split_noise and at_mean:
            vectors = [comm.share_of_mean(gradients, "g_S")]
        elif split_noise:
            gradients_at_mean = comm.buffer("gradients at w_a", gradients)
            if training is not None:  # a pass at w_a must not change the learners' running statistics
                training = dataclasses.replace(training, buffers={})
            points = mean_weights.expand_as(gradients)
            self.stack.gradients(points, x, y, out=gradients_at_mean, training=training)
            delta = comm.share_of_mean(gradients, "δ", minus=gradients_at_mean)
            vectors = [comm.share_of_mean(gradients_at_mean, "g_S"), delta]
        columns = self.gradient.heterogeneity(mean_weights, step, g, self.divided) if self.divided else {}

        def columns_of_step(new_weights: Tensor, lr: float) -> dict[str, float]:
            # d is the mean of the differences, because a difference of two means has two rounding errors.
            displacement = comm.share_of_mean(new_weights, "d", minus=weights)
            return columns | _columns(g, displacement, vectors, lr)

        return columns_of_step


def _columns(g: Gradient, displacement: Tensor, vectors: list[Tensor], lr: float) -> dict[str, float]:
    """Return the history's columns for a step of w_a by ``displacement`` with learning rate α.

    ``vectors``: [g_S, δ]; [g_S] where δ = 0; [] without the terms of Eq. 4.
    """
    projection = g.project([displacement, *vectors])
    pairs, across, errors = projection.pairs, projection.across, projection.across_se
    columns = step_columns(g.loss, projection)
    if not vectors:
        return columns
    scale = lr**2
    columns |= {"delta_s": scale * float(across[1, 1]), "delta_s_se": scale * float(errors[1, 1])}
    if len(vectors) == 1:
        return columns | dict.fromkeys(DELTA_2, 0.0)
    terms = across[2, 2], errors[2, 2], pairs[2, 2], 2 * across[1, 2], 2 * errors[1, 2]
    return columns | {name: float(scale * term) for name, term in zip(DELTA_2, terms, strict=True)}


def pair_mean(h: Tensor) -> Tensor:
    """Return the mean (...,) of ``h`` (..., k, k) over all pairs of different estimates."""
    k = h.shape[-1]
    return _off_diagonal(h).sum((-1, -2)) / (k * (k - 1))


def covariance(a: Tensor, b: Tensor) -> Tensor:
    """Return the unbiased covariance (...,) of pair_mean(a) and pair_mean(b); both (..., k, k), k ≥ 4.

    The product of the means, less the mean product of pairs without a common estimate; the latter estimates
    the product of the expectations.
    """
    return pair_mean(a) * pair_mean(b) - _mean_of_distinct(_off_diagonal(a), _off_diagonal(b))


def standard_error(h: Tensor) -> Tensor:
    """Return the standard error (...,) of the mean of ``h`` over pairs, √((4(k − 2) ζ₁ + 2 ζ₂)/(k(k − 1))).

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
    """Return pair_mean(above)/pair_mean(below) (...,), without its bias of order 1/k, and its standard error.

    ``above`` and ``below`` (..., k, k) come from the same k estimates, so that common errors cancel. The
    error is the linearized quotient's. NaN where pair_mean(below) is not positive: the divisor is unknown.
    """
    divisor = pair_mean(below)
    divisor = divisor.where(divisor > 0, torch.nan)
    value = pair_mean(above) / divisor
    linear = (above - value[..., None, None] * below) / divisor[..., None, None]
    return value + covariance(linear, below) / divisor, standard_error(linear)


def _off_diagonal(h: Tensor) -> Tensor:
    return h.masked_fill(torch.eye(h.shape[-1], dtype=torch.bool, device=h.device), 0.0)


def _mean_of_distinct(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean of a_ij b_kl over i, j, k, l that all differ, by inclusion and exclusion."""
    k, matrix = a.shape[-1], (-1, -2)
    shared = (a.sum(-1) * b.sum(-1)).sum(-1)
    total = a.sum(matrix) * b.sum(matrix) - 4 * shared + 2 * (a * b).sum(matrix)
    return total / (k * (k - 1) * (k - 2) * (k - 3))
