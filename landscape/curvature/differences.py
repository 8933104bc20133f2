"""Products of the Hessian as differences of gradients, with measured errors, in one process or on ranks."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.core.devices import finite, generator, normal, vector_norm, widest_dtype
from landscape.core.errors import InputError, LandscapeError
from landscape.curvature.double_backward import (
    INSIDE,
    LOW,
    NO_GRADIENT,
    FullPrecision,
    check_gradient,
    in_full_precision,
)
from landscape.curvature.operators import ALONE, Ranks, SymmetricOperator, qr
from landscape.problem.batches import own_outputs
from landscape.problem.layout import Slot, backward, cut, placed, put
from landscape.problem.problem import Problem
from landscape.problem.ranks import Piece
from landscape.problem.sharded import ShardedProblem

# Steps relative to the weights are eps^(1/3)·4^−k, from k = COARSEST to FINEST, and at least LEAST·eps:
# below that the weights themselves are rounded. MIDDLE is the best k for smooth networks: a product is right
# to 2e-5 to 2e-4 in float32 there, and to 1e-10 to 1e-8 in float64 (GELU, LayerNorm, digits; measured).
COARSEST, FINEST, LEAST = -1, 6, 4
MIDDLE = {torch.float64: 3, torch.float32: 2}
# The relative error up to which products in the model's own precision serve a search; in float64 a step is
# good enough at FINE, and where one-sided differences disagree by more than KINK, a kink lies within it.
GOAL, FINE, KINK = 1e-3, 1e-6, 1e-3
# How many times the disagreement of a smooth probe that of a product without kinks is at most (our choice).
OUTLIER = 5
# Errors that are seen in the disagreement of steps are taken so much larger: with 1.5, one of 1,200 products
# of benchmarks/certified.py had a larger error than was stated.
SAFETY = 2.0


class Gradient:
    """∇L near some weights in one precision, computed as in training: by backward() in the module itself.

    Attributes:
        coarse: the coarsest precision in the forward and backward pass, as far as is known.
        problem: the loss in that precision, with the BatchNorm statistics at the weights.
    """

    def __init__(self, problem: Problem, weights: Tensor, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        low = problem.checked.get(INSIDE) or problem.dtype in LOW
        part = problem if dtype == problem.dtype else problem.to(dtype)
        self.problem, self.slots, self.dtype = part.at(weights.to(dtype)), slots, dtype
        self.coarse = dtype if not low or dtype == torch.float64 else torch.bfloat16
        self.sizes = [slot.size for slot in slots]
        self.weights = weights.to(widest_dtype(problem.device))

    def __call__(self, step: Tensor | None = None) -> Tensor:
        """The gradient in the slots (P',) in float64, at the weights displaced by ``step`` (P',) there."""
        problem, at = self.problem, self.weights
        if step is not None:
            at = at.clone()
            for slot, piece in zip(self.slots, torch.split(step, self.sizes), strict=True):
                at[slot.place] += piece
        total = at.new_zeros(sum(self.sizes))
        full = FullPrecision(self.dtype) if self.dtype == torch.float64 else contextlib.nullcontext()
        with placed(problem.model, problem.layout, at) as parameters, torch.enable_grad(), full:
            inputs = list(parameters.values())

            def add(loss: Tensor, share: float) -> None:
                parts = dict(zip(parameters, backward(loss, inputs), strict=True))
                for piece, slot in zip(torch.split(total, self.sizes), self.slots, strict=True):
                    piece.add_(parts[slot.name].flatten(), alpha=share)

            for x, y, count, seed in problem.parts():
                with problem.evaluating(seed):
                    loss = problem.criterion(own_outputs(problem, x), y)
                add(loss, count / problem.samples)
            if problem.regularised:
                add(problem.penalty_value(problem.layout.flatten(parameters)), 1.0)
        return total

    def steps(self) -> list[float]:
        """The steps, relative to the weights, from the coarsest on."""
        eps = torch.finfo(self.coarse).eps
        steps = [eps ** (1 / 3) * 4.0**-k for k in range(COARSEST, FINEST + 1)]
        return [step for step in steps if step >= LEAST * eps]


class Differences:
    """The products (g(w + εv) − g(w − εv))/2ε at one w, g the gradient, and their errors.

    The step ε is relative to ‖w‖, by layer. g is computed as in training. The precision is the model's where
    this makes products right to GOAL, and else float64, if the model runs in float64. (With ReLU, the steps
    that float32 needs may contain kinks.) Errors are measured in the finest precision of the model.

    Attributes:
        arithmetic: the precisions, in words.
        root: a diagonal R (P',), with which the products are those of RHR; None for H.
    """

    root: Tensor | None = None
    ranks: Ranks = ALONE

    def __init__(self, problem: Problem, weights: Tensor, slots: Sequence[Slot]) -> None:
        self.slots, self.sizes = slots, [slot.size for slot in slots]
        self.problem = problem
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(InputError):
            in_full_precision(problem)  # which sees the precision of the pass; a model in half alone is one
        gradient = Gradient(problem, weights, slots, problem.dtype)
        self.finest = gradient if problem.dtype == torch.float64 else self._in_float64(gradient)
        self.scales = self._scales(gradient)
        self.gradients = self.finest
        self._center = dict[int, Tensor]()
        self._key = key = ("differences", problem.batchnorm.name, *(slot.name for slot in slots))
        if key not in problem.checked and problem.check != "off":
            self._check(weights)
            problem.checked[key] = True  # and that its own precision may serve, until it is seen not to
        if self.finest is not gradient and gradient.coarse not in LOW and problem.checked.get(key, True):
            problem.checked[key] = self._serves(gradient)
            self.gradients = gradient if problem.checked[key] else self.finest
        names = [str(g.dtype).removeprefix("torch.") for g in (self.gradients, self.finest)]
        self.arithmetic = f"differences of {names[0]} gradients"
        if names[0] != names[1]:
            self.arithmetic += f", verified in {names[1]}"

    def _check(self, weights: Tensor) -> None:
        """Raise InputError unless on a few samples the gradient is the loss's, and products are symmetric."""
        few = self.problem.on(self.problem.data.few())
        check_gradient(few, weights, self.slots)
        few.checked = {**few.checked, self._key: False}
        small = Differences(few, weights, self.slots)
        u = self._random(0)
        image, error = small.measured(u)
        if not finite(image):  # this says why, with all samples
            return
        v = image / (image.norm() or 1.0)
        other_image, other_error = small.measured(v)
        if not abs(float(v @ image - u @ other_image)) <= 10 * (error + other_error * float(u.norm())):
            words = "differences of its gradients are not symmetric: one is wrong"
            raise InputError(f"model or loss: {words}{NO_GRADIENT}")

    def _random(self, seed: int) -> Tensor:
        """A normal vector (P',)."""
        like, size = self.finest.weights, sum(self.sizes)
        return self._masked(normal(size, generator(seed, like.device, size)).to(like))

    def _serves(self, gradient: Gradient) -> bool:
        """Return whether products in the model's own precision are right to GOAL, and there are no kinks.

        One-sided differences decline with the step where there are none, from steps so coarse that few
        samples show kinks.
        """
        image = self._difference(gradient, self._random(0), gradient.steps()[self._middle(gradient)])[0]
        v = self._masked(image / (image.norm() or 1.0))
        steps = gradient.steps()[: self._middle(gradient) + 2]
        differences = {k: self._difference(gradient, v, step) for k, step in enumerate(steps)}
        image, sides = differences[self._middle(gradient)]
        self.limit = OUTLIER * sides / (float(image.norm()) or 1.0)
        smooth = all(differences[k + 1][1] <= differences[k][1] / 2 for k in range(self._middle(gradient)))
        return smooth and self._error(differences, self._middle(gradient)) <= GOAL * float(image.norm())

    def _in_float64(self, gradient: Gradient) -> Gradient:
        """The gradient in float64; ``own`` of a model or device that does not run in that."""
        if widest_dtype(gradient.problem.device) != torch.float64:
            return gradient
        try:
            finer = Gradient(gradient.problem, gradient.weights, self.slots, torch.float64)
            few = finer.problem.on(finer.problem.data.few())
            Gradient(few, gradient.weights, self.slots, torch.float64)()
            return finer
        except LandscapeError:
            raise
        except Exception:  # the user's model raises any kind of error where dtypes do not fit
            return gradient

    def _scales(self, gradient: Gradient) -> list[float]:
        """The squared lengths of the weights in the slots, at least those of average weights."""
        average = float(gradient.weights.square().mean()) or 1.0
        parts = [gradient.weights[slot.place] for slot in self.slots]
        return [float(p.square().sum()) + average * p.numel() for p in parts]

    def _masked(self, v: Tensor) -> Tensor:
        """``v`` in float64, scaled, and zero along the padding rows of embeddings."""
        v = v.to(self.finest.weights, copy=True)
        if self.root is not None:
            v *= self.root.to(v)
        if self.problem.padding:
            whole = put(torch.zeros_like(self.finest.weights), self.slots, v)
            v = cut(self.problem.along_weights(whole), self.slots)
        return v

    def _step(self, v: Tensor, step: float) -> float:
        """ε for ``v``: the changes of all layers, relative to their weights, are ``step`` in length."""
        change = sum(square / scale for square, scale in zip(self._squares(v), self.scales, strict=True))
        return step / math.sqrt(change) if change else step

    def _squares(self, v: Tensor) -> list[float]:
        """The squared lengths of the parts of ``v`` (P',) by slot."""
        squares = torch.stack([piece.square().sum() for piece in torch.split(v, self.sizes)])
        return self.ranks.total(squares).tolist()

    def _middle(self, g: Gradient) -> int:
        return min(MIDDLE.get(g.coarse, 0) - COARSEST, len(g.steps()) - 2)

    def _difference(self, g: Gradient, v: Tensor, step: float) -> tuple[Tensor, float]:
        """The product with ``v``, and how far one-sided differences of this step are from one another."""
        if id(g) not in self._center:
            self._center[id(g)] = g()
        step = self._step(v, step)
        above, below = g(step * v), g(-step * v)
        sides = (above + below).sub_(self._center[id(g)], alpha=2).div_(step)
        image = above.sub_(below).div_(2 * step)
        if self.root is not None:
            image, sides = self.root.to(image) * image, self.root.to(sides) * sides
        return image, float(self.ranks.norm(sides))

    def product(self, v: Tensor) -> Tensor:
        """The product with ``v`` (P',), in float64, by one step, finer where a kink is within it."""
        g, v = self.gradients, self._masked(v)
        if g is not self.finest:
            image, sides = self._difference(g, v, g.steps()[self._middle(g)])
            if sides <= self.limit * float(image.norm()):
                return image
            g = self.finest
        first = self._middle(g) + (g.coarse == torch.float64)  # fewer kinks lie within a smaller step
        for step in g.steps()[first:]:
            image, sides = self._difference(g, v, step)
            if g.coarse != torch.float64 or sides <= KINK * float(self.ranks.norm(image)):
                break
        return image

    def measured(self, v: Tensor, g: Gradient | None = None) -> tuple[Tensor, float]:
        """The product with ``v`` (P',) by the best of several steps, and a bound on the length of its error.

        A coarser step has a larger truncation, a finer one more rounding, and either is at most about what
        two steps differ by; a kink of ReLU within both is in them by other amounts. Where the one-sided
        differences disagree by no less at a finer step, kinks lie within all of them, whose part in the
        product may be √(samples) times that.
        """
        g = g or self.finest
        v, steps = self._masked(v), g.steps()
        differences: dict[int, tuple[Tensor, float]] = {}
        middle = self._middle(g)
        goal = FINE if g.coarse == torch.float64 else GOAL / 3
        order = [middle, middle - 1, middle + 1, *range(middle + 2, len(steps)), *range(middle - 2, -1, -1)]
        best: tuple[float, int] = (math.inf, middle)
        for k in order:
            differences[k] = self._difference(g, v, steps[k])
            if len(differences) < 3:
                continue
            best = min((self._error(differences, j), j) for j in differences)
            if best[0] <= goal * float(self.ranks.norm(differences[best[1]][0])):
                break
        image = differences[best[1]][0]
        rounding = torch.finfo(g.coarse).eps ** (2 / 3) * float(image.norm())  # of a loss without truncation
        return image, max(best[0], rounding)

    def _error(self, differences: dict[int, tuple[Tensor, float]], k: int) -> float:
        """The error of step number ``k``, from those beside it."""
        image, sides = differences[k]
        neighbors = [differences[j][0] for j in (k - 1, k + 1) if j in differences]
        beside = [float(self.ranks.norm(image - neighbor)) for neighbor in neighbors]
        error = SAFETY * min(beside, default=math.inf)
        if k - 1 not in differences or not sides <= differences[k - 1][1] / 2:
            error = max(error, sides * math.sqrt(self.problem.samples))
        return error if math.isfinite(error) else math.inf


class ShardedRanks(Ranks):
    """The ranks that hold the vectors of a problem (:class:`.ShardedProblem`)."""

    def __init__(self, problem: ShardedProblem) -> None:
        self.problem = problem
        parameters = sum(piece.local.numel() for piece in problem.chosen)
        self._length = int(problem.gathered(torch.tensor(parameters)).max())

    def total(self, values: Tensor) -> Tensor:
        return self.problem.total(values)

    def norm(self, v: Tensor) -> Tensor:
        return self.total(vector_norm(v).square()).sqrt()

    def size(self, v: Tensor) -> int:
        return self.problem.size

    def length(self, v: Tensor) -> int:
        return self._length

    def generator(self, seed: int, like: Tensor) -> torch.Generator:
        return torch.Generator().manual_seed(seed)  # the same numbers on all ranks

    def normal(self, like: Tensor, generator: torch.Generator, dtype: torch.dtype | None = None) -> Tensor:
        return self.problem.draw(lambda p: torch.randn(p.slot.shape, dtype=dtype, generator=generator))

    def signs(self, like: Tensor, count: int, generator: torch.Generator) -> Tensor:
        def draw(piece: Piece) -> Tensor:
            return torch.randint(2, piece.slot.shape, dtype=torch.int8, generator=generator) * 2 - 1

        return torch.stack([self.problem.draw(draw) for _ in range(count)])

    def orthonormal(self, rows: Tensor) -> Tensor:
        # By the factors of each rank's part, one below the other (Demmel et al. 2012, tall and skinny QR).
        q, r = qr(rows.T)
        factor = r.new_zeros(len(rows), len(rows))
        factor[: len(r)] = r
        factors = self.problem.gathered(factor)
        turn = torch.linalg.qr(factors.flatten(0, 1))[0].view_as(factors)[dist.get_rank()]
        return (q @ turn[: len(r)]).T


class ShardedGradient(Gradient):
    """∇L of a sharded problem near its weights."""

    def __init__(self, problem: ShardedProblem, weights: Tensor | None) -> None:
        self.problem: Any = problem
        self.dtype, self.coarse = problem.dtype, problem.coarse
        self.weights = problem.weights if weights is None else weights

    def __call__(self, step: Tensor | None = None) -> Tensor:
        at = self.weights if step is None else self.weights + step
        return self.problem.gradient(at)


class ShardedDifferences(Differences):
    """The products of a sharded problem's Hessian, and their errors."""

    def __init__(self, problem: ShardedProblem, weights: Tensor | None) -> None:
        self.problem: Any = problem
        self.ranks = ShardedRanks(problem)
        self.gradients = self.finest = ShardedGradient(problem, weights)
        self.sizes = [piece.local.numel() for piece in problem.chosen]
        squares = self._squares(self.finest.weights)
        counts = [piece.parameter.numel() for piece in problem.chosen]
        average = sum(squares) / sum(counts) or 1.0
        self.scales = [square + average * count for square, count in zip(squares, counts, strict=True)]
        self._center = {}
        self.arithmetic = f"differences of gradients on {problem.ranks} ranks"

    def _masked(self, v: Tensor) -> Tensor:
        return self.problem.along_weights(v.to(self.problem.dtype, copy=True))


class ShardedHessian(SymmetricOperator):
    """The Hessian of a sharded problem, as a linear operator on the vectors of each rank.

    Every rank computes the products together with the others.

    Args:
        problem: the loss.
        weights: (n,); default: the model's own.

    Attributes:
        size: the numbers of a vector on this rank.
        ranks: inner products of vectors, and random ones.
    """

    matrix, derivatives = "hessian", "differences"

    def __init__(self, problem: ShardedProblem, weights: Tensor | None = None) -> None:
        self.problem = problem
        self.differences = ShardedDifferences(problem, weights)
        self.ranks, self.arithmetic = self.differences.ranks, self.differences.arithmetic
        self.size = sum(self.differences.sizes)
        self.dtype, self.device = problem.dtype, self.problem.chosen[0].local.device

    def _finite(self, rows: Tensor, images: Tensor) -> Tensor:
        if float(self.ranks.total(torch.tensor([not finite(images) and finite(rows)]).double())):
            raise self._not_finite()  # on all ranks
        return images

    def to_scipy(self) -> Any:
        """InputError: SciPy takes inner products of one rank's part."""
        raise InputError("to_scipy: not allowed with a sharded model; use landscape.top_eigenvalues")
