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
    HALF_INSIDE,
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

# Steps relative to the weights are eps^(1/3)·4^−k, from k = COARSEST to FINEST, and at least LEAST·eps, as
# shorter steps are rounding of the weights. MIDDLE is the best k for smooth networks: products there have
# errors of 2e-5 to 2e-4 in float32, and of 1e-10 to 1e-8 in float64 (GELU, LayerNorm, digits; measured).
COARSEST, FINEST, LEAST = -1, 6, 4
MIDDLE = {torch.float64: 3, torch.float32: 2}
# Products in the model's own precision are used up to the relative error GOAL. In float64, FINE is a small
# enough error of a step, and one-sided differences that disagree by more than KINK show a kink in the step.
GOAL, FINE, KINK = 1e-3, 1e-6, 1e-3
# The largest disagreement of one-sided differences without a kink, relative to that of a smooth probe (our
# choice).
OUTLIER = 5
# The factor of errors that are estimated from the disagreement of steps: with 1.5, one of 1,200 products of
# benchmarks/certified.py had a larger error than its estimate.
SAFETY = 2.0


class Gradient:
    """∇L near some weights in one precision, computed as in training: by backward() in the module itself.

    Attributes:
        dtype_inside: the coarsest known precision in the forward and backward pass; the model may cast to it.
        problem: the loss in the precision ``dtype``, with the BatchNorm statistics at the weights.
    """

    def __init__(self, problem: Problem, weights: Tensor, slots: Sequence[Slot], dtype: torch.dtype) -> None:
        is_half = problem.checked.get(HALF_INSIDE) or problem.dtype in LOW
        converted = problem if dtype == problem.dtype else problem.to(dtype)
        self.problem, self.slots, self.dtype = converted.at(weights.to(dtype)), slots, dtype
        self.dtype_inside = torch.bfloat16 if is_half and dtype != torch.float64 else dtype
        self.sizes = [slot.size for slot in slots]
        self.weights = weights.to(widest_dtype(problem.device))

    def __call__(self, step: Tensor | None = None) -> Tensor:
        """Return the gradient in the slots (P',) in float64, at the weights plus ``step`` (P',) there."""
        problem, at = self.problem, self.weights
        if step is not None:
            at = put(at.clone(), self.slots, cut(at, self.slots) + step)
        total = at.new_zeros(sum(self.sizes))
        precision = FullPrecision(self.dtype) if self.dtype == torch.float64 else contextlib.nullcontext()
        with placed(problem.model, problem.layout, at) as parameters, torch.enable_grad(), precision:
            inputs = list(parameters.values())

            def add_gradient(loss: Tensor, share: float) -> None:
                gradients = dict(zip(parameters, backward(loss, inputs), strict=True))
                for sums, slot in zip(torch.split(total, self.sizes), self.slots, strict=True):
                    sums.add_(gradients[slot.name].flatten(), alpha=share)

            for x, y, weight, seed in problem.parts():
                with problem.evaluating(seed):
                    loss = problem.criterion(own_outputs(problem, x), y)
                add_gradient(loss, weight / problem.samples)
            if problem.regularised:
                add_gradient(problem.penalty_value(problem.layout.flatten(parameters)), 1.0)
        return total

    def steps(self) -> list[float]:
        """Return the steps, relative to the weights, from the coarsest to the finest."""
        eps = torch.finfo(self.dtype_inside).eps
        steps = [eps ** (1 / 3) * 4.0**-k for k in range(COARSEST, FINEST + 1)]
        return [step for step in steps if step >= LEAST * eps]


class Differences:
    """The products (g(w + εv) − g(w − εv))/2ε at one w, with the gradient g, and their errors.

    The step ε is relative to ‖w‖, by layer. g is computed as in training, in the model's own precision if
    products then have errors below GOAL, else in float64, if the model runs in float64. (With ReLU, the long
    steps of float32 may contain kinks.) Errors are measured in the finest precision of the model.

    Args:
        problem: the loss.
        weights: w (P,).
        slots: the parameters of v and of the products, (P',).

    Attributes:
        gradients: the gradient for :meth:`product`.
        finest: the gradient in the finest precision, for :meth:`measured`.
        scales: the squared lengths of the weights by slot.
        arithmetic: the precisions, in words.
        root: a diagonal R (P',) for products of RHR; None for products of H.
    """

    root: Tensor | None = None
    ranks: Ranks = ALONE

    def __init__(self, problem: Problem, weights: Tensor, slots: Sequence[Slot]) -> None:
        self.slots, self.sizes = slots, [slot.size for slot in slots]
        self.problem = problem
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(InputError):
            in_full_precision(problem)  # records whether the pass has half precision inside
        gradient = Gradient(problem, weights, slots, problem.dtype)
        self.finest = gradient if problem.dtype == torch.float64 else self._in_float64(gradient)
        self.scales = self._scales(gradient)
        self.gradients = self.finest
        self._gradients_at_weights = dict[int, Tensor]()  # id(g) -> the gradient g at the weights
        self._key = key = ("differences", problem.batchnorm.name, *(slot.name for slot in slots))
        if key not in problem.checked and problem.check != "off":
            self._check(weights)
            problem.checked[key] = True  # False below if its own precision has too large errors
        may_serve = gradient.dtype_inside not in LOW and problem.checked.get(key, True)
        if self.finest is not gradient and may_serve:
            problem.checked[key] = self._serves(gradient)
            self.gradients = gradient if problem.checked[key] else self.finest
        names = [str(g.dtype).removeprefix("torch.") for g in (self.gradients, self.finest)]
        self.arithmetic = f"differences of {names[0]} gradients"
        if names[0] != names[1]:
            self.arithmetic += f", verified in {names[1]}"

    def _check(self, weights: Tensor) -> None:
        """Raise InputError unless, for a few samples, the gradient is right and products are symmetric."""
        small_problem = self.problem.on(self.problem.data.few())
        check_gradient(small_problem, weights, self.slots)
        small_problem.checked = {**small_problem.checked, self._key: False}
        small = Differences(small_problem, weights, self.slots)
        u = self._random(0)
        image, error = small.measured(u)
        if not finite(image):  # products with all samples raise an error with the cause
            return
        v = image / (image.norm() or 1.0)
        other_image, other_error = small.measured(v)
        if not abs(float(v @ image - u @ other_image)) <= 10 * (error + other_error * float(u.norm())):
            words = "differences of its gradients are not symmetric: one is wrong"
            raise InputError(f"model or loss: {words}{NO_GRADIENT}")

    def _random(self, seed: int) -> Tensor:
        """Return a normal vector (P',)."""
        like, size = self.finest.weights, sum(self.sizes)
        return self._in_weight_space(normal(size, generator(seed, like.device, size)).to(like))

    def _serves(self, gradient: Gradient) -> bool:
        """Return whether products in the model's own precision have errors below GOAL, and no kinks.

        Without kinks, the disagreement of one-sided differences falls with the step; the coarsest steps are
        long enough to show kinks with few samples. It also sets ``limit``, the largest disagreement relative
        to a product without a kink.
        """
        middle = self._middle(gradient)
        image, _ = self._difference(gradient, self._random(0), gradient.steps()[middle])
        v = self._in_weight_space(image / (image.norm() or 1.0))
        steps = gradient.steps()[: middle + 2]
        differences = {k: self._difference(gradient, v, step) for k, step in enumerate(steps)}
        image, disagreement = differences[middle]
        self.limit = OUTLIER * disagreement / (float(image.norm()) or 1.0)
        is_smooth = all(differences[k + 1][1] <= differences[k][1] / 2 for k in range(middle))
        return is_smooth and self._error(differences, middle) <= GOAL * float(image.norm())

    def _in_float64(self, gradient: Gradient) -> Gradient:
        """Return the gradient in float64, or ``gradient`` if the model or device does not run in float64."""
        if widest_dtype(gradient.problem.device) != torch.float64:
            return gradient
        try:
            finer = Gradient(gradient.problem, gradient.weights, self.slots, torch.float64)
            small_problem = finer.problem.on(finer.problem.data.few())
            Gradient(small_problem, gradient.weights, self.slots, torch.float64)()
            return finer
        except LandscapeError:
            raise
        except Exception:  # the user's model raises any kind of error where dtypes do not fit
            return gradient

    def _scales(self, gradient: Gradient) -> list[float]:
        """Return the squared lengths of the weights by slot, each plus that of a slot of average weights."""
        average = float(gradient.weights.square().mean()) or 1.0
        parts = [gradient.weights[slot.place] for slot in self.slots]
        return [float(p.square().sum()) + average * p.numel() for p in parts]

    def _in_weight_space(self, v: Tensor) -> Tensor:
        """Return ``v`` in float64, times ``root``, and zero along the padding rows of embeddings."""
        v = v.to(self.finest.weights, copy=True)
        if self.root is not None:
            v *= self.root.to(v)
        if self.problem.padding:
            whole = put(torch.zeros_like(self.finest.weights), self.slots, v)
            v = cut(self.problem.along_weights(whole), self.slots)
        return v

    def _step_factor(self, v: Tensor, step: float) -> float:
        """Return ε such that the change εv has the length ``step`` relative to the weights."""
        change = sum(square / scale for square, scale in zip(self._squares(v), self.scales, strict=True))
        return step / math.sqrt(change) if change else step

    def _squares(self, v: Tensor) -> list[float]:
        """Return the squared lengths of the parts of ``v`` (P',) by slot."""
        squares = torch.stack([piece.square().sum() for piece in torch.split(v, self.sizes)])
        return self.ranks.total(squares).tolist()

    def _middle(self, g: Gradient) -> int:
        """Return the index of the best step for smooth networks."""
        return min(MIDDLE.get(g.dtype_inside, 0) - COARSEST, len(g.steps()) - 2)

    def _difference(self, g: Gradient, v: Tensor, step: float) -> tuple[Tensor, float]:
        """Return the product with ``v`` by one step, and the disagreement of its one-sided differences."""
        if id(g) not in self._gradients_at_weights:
            self._gradients_at_weights[id(g)] = g()
        epsilon = self._step_factor(v, step)
        forward, backward = g(epsilon * v), g(-epsilon * v)
        disagreement = (forward + backward).sub_(self._gradients_at_weights[id(g)], alpha=2).div_(epsilon)
        image = forward.sub_(backward).div_(2 * epsilon)
        if self.root is not None:
            image, disagreement = self.root.to(image) * image, self.root.to(image) * disagreement
        return image, float(self.ranks.norm(disagreement))

    def product(self, v: Tensor) -> Tensor:
        """Return the product with ``v`` (P',), in float64, by one step, or a finer one if that has a kink."""
        g, v = self.gradients, self._in_weight_space(v)
        if g is not self.finest:
            image, disagreement = self._difference(g, v, g.steps()[self._middle(g)])
            if disagreement <= self.limit * float(image.norm()):
                return image
            g = self.finest
        is_exact = g.dtype_inside == torch.float64
        first = self._middle(g) + 1 if is_exact else self._middle(g)  # a finer step contains fewer kinks
        for step in g.steps()[first:]:
            image, disagreement = self._difference(g, v, step)
            if not is_exact or disagreement <= KINK * float(self.ranks.norm(image)):
                break
        return image

    def measured(self, v: Tensor, g: Gradient | None = None) -> tuple[Tensor, float]:
        """Return the product with ``v`` by the best of several steps, and a bound on the product's error.

        Args:
            v: (P',), with an entry for each of the P' parameters of the products.
            g: the gradient whose differences are taken; default: the gradient in the finest precision.
        """
        g = g or self.finest
        v, steps = self._in_weight_space(v), g.steps()  # steps: from the coarsest to the finest
        # Index of a step -> the product, and how much the forward and the backward difference disagree.
        differences: dict[int, tuple[Tensor, float]] = {}
        middle = self._middle(g)
        # The relative error at which no further step is tried: FINE, or well below GOAL (our choice).
        # ``dtype_inside`` is the coarsest precision in the passes of the model, which may contain casts.
        goal = FINE if g.dtype_inside == torch.float64 else GOAL / 3
        # The best step for smooth networks and its two neighbors, then finer steps, then coarser steps.
        order = [middle, middle - 1, middle + 1, *range(middle + 2, len(steps)), *range(middle - 2, -1, -1)]
        error, best = math.inf, middle
        for k in order:
            differences[k] = self._difference(g, v, steps[k])
            if len(differences) < 3:
                continue
            error, best = min((self._error(differences, j), j) for j in differences)
            if error <= goal * float(self.ranks.norm(differences[best][0])):
                break
        image, _ = differences[best]
        gradient = self._gradients_at_weights[id(g)]
        if self.root is not None:  # products are those of RHR, and so differences of R·gradient
            gradient = self.root.to(gradient) * gradient
        eps = torch.finfo(g.dtype_inside).eps
        # Gradients have the relative error eps. Their difference is divided by ε.
        gradient_rounding = eps * float(self.ranks.norm(gradient)) / self._step_factor(v, steps[best])
        # Weights have the relative error eps. The displacement εv is ``step`` times as long. So it has the
        # relative error eps/step, and the product has the same.
        weight_rounding = eps * float(self.ranks.norm(image)) / steps[best]
        # With few parameters, the products by two steps often agree by chance. The error is therefore at
        # least the rounding, divided by √P', times SAFETY.
        least_error = SAFETY * (gradient_rounding + weight_rounding) / math.sqrt(self.ranks.size(v))
        return image, max(error, least_error)

    def _error(self, differences: dict[int, tuple[Tensor, float]], k: int) -> float:
        """Return the estimated error of the product by step number ``k``.

        A coarser step has a larger truncation error, and a finer step has more rounding. Both errors are at
        most about the difference between the products by two neighboring steps. The error from a kink of ReLU
        also shows in this difference, because the kink contributes unequally to the two products.

        Without a kink, the disagreement of the forward and the backward difference falls with the step. The
        disagreement at step ``k`` should be at most half of the disagreement at the coarser step ``k`` − 1.
        Otherwise, or if step ``k`` − 1 was not tried, a kink may be near. The error is then taken to be at
        least √(samples) times the disagreement at step ``k``.
        """
        image, disagreement = differences[k]
        neighbors = [differences[j][0] for j in (k - 1, k + 1) if j in differences]
        distances = [float(self.ranks.norm(image - neighbor)) for neighbor in neighbors]
        error = SAFETY * min(distances, default=math.inf)
        if k - 1 not in differences or not disagreement <= differences[k - 1][1] / 2:
            error = max(error, disagreement * math.sqrt(self.problem.samples))
        return error if math.isfinite(error) else math.inf


class ShardedRanks(Ranks):
    """The ranks that share the vectors of a :class:`.ShardedProblem`."""

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

    def local_size(self, v: Tensor) -> int:
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
        # QR of all ranks' triangular factors, stacked (Demmel et al. 2012, tall and skinny QR).
        q, r = qr(rows.T)
        factor = r.new_zeros(len(rows), len(rows))
        factor[: len(r)] = r
        factors = self.problem.gathered(factor)
        rotation = torch.linalg.qr(factors.flatten(0, 1))[0].view_as(factors)[dist.get_rank()]
        return (q @ rotation[: len(r)]).T


class ShardedGradient(Gradient):
    """The gradient of a sharded problem near its weights."""

    def __init__(self, problem: ShardedProblem, weights: Tensor | None) -> None:
        self.problem: Any = problem
        self.dtype, self.dtype_inside = problem.dtype, problem.coarse
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
        self._gradients_at_weights = {}
        self.arithmetic = f"differences of gradients on {problem.ranks} ranks"

    def _in_weight_space(self, v: Tensor) -> Tensor:
        return self.problem.along_weights(v.to(self.problem.dtype, copy=True))


class ShardedHessian(SymmetricOperator):
    """The Hessian of a sharded problem, as a linear operator on the vectors of each rank.

    All ranks compute each product together.

    Args:
        problem: the loss.
        weights: (n,); default: the model's own.

    Attributes:
        size: the number of numbers of a vector on this rank.
        ranks: the exchanges for inner products and random vectors.
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
        """Raise InputError: SciPy would compute inner products of one rank's part only."""
        raise InputError("to_scipy: not allowed with a sharded model; use landscape.top_eigenvalues")
