"""Other packages on a problem: pyhessian (Yao et al. 2020) as a second engine, and operators of curvlinops.

pyhessian shares only the forward pass with this package. Its power iteration returns the eigenvalue of
largest *magnitude*, which is λ_max unless a negative one is larger; it has no parts of a model and no
Gauss-Newton products.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.core.devices import kept_randomness, vector_norm
from landscape.core.errors import InputError, first_words
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.core.registry import optional
from landscape.curvature.double_backward import in_full_precision
from landscape.curvature.hessian import HessianOptions, twice_differentiable
from landscape.problem.problem import Problem

EXTRA = "'sgd-landscape[pyhessian]'"


class _CountedBatches(list[tuple[Any, Any]]):
    """Batches that count the passes over them: pyhessian makes one for each product."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.passes += 1
        return super().__iter__()


def _plain(
    problem: Problem, weights: Tensor | None, who: str, remedy: str
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a copy of the problem's model at ``weights``, and its data as batches of two tensors.

    Raises InputError, with the names ``who`` and ``remedy``, if that is not the whole problem.
    """
    problem = in_full_precision(problem)
    model = copy.deepcopy(problem.model)
    views = problem.layout.views(problem.weights if weights is None else weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in views:
                parameter.copy_(views[name])
    chunks = list(problem.chunks())
    if problem.regularised:
        raise InputError(f"{who} knows no penalty and no weight decay; use {remedy}")
    if not problem.separable:
        raise InputError(f"{who} takes means over samples without random numbers alone; use {remedy}")
    if not all(isinstance(x, Tensor) and isinstance(y, Tensor) and n == len(x) for x, y, n in chunks):
        raise InputError(f"{who} takes one tensor each whose samples weigh the same; use {remedy}")
    return model, [(x, y) for x, y, _ in chunks]


@contextlib.contextmanager
def _engine(problem: Problem, weights: Tensor | None, seed: int) -> Iterator[tuple[Any, _CountedBatches]]:
    """Return a context with a pyhessian object for a copy of the model, and its batches."""
    hessian = optional("pyhessian", "engine 'pyhessian'", EXTRA).hessian
    model, plain = _plain(problem, weights, "engine: 'pyhessian'", "'landscape'")
    batches = _CountedBatches(plain)
    cuda = problem.device.type == "cuda"
    # Its backward(create_graph=True) makes PyTorch warn of a reference cycle, which ends with the copy.
    quiet = warnings.catch_warnings(action="ignore")
    with quiet, kept_randomness(problem.device), twice_differentiable(problem):
        torch.manual_seed(seed)
        try:
            yield hessian(model, problem.criterion, dataloader=batches, cuda=cuda), batches
        except (AssertionError, RuntimeError) as error:
            raise InputError(f"engine: 'pyhessian' fails ({first_words(error)}); use 'landscape'") from error
        finally:
            for parameter in model.parameters():
                parameter.grad = None


def check(options: HessianOptions) -> None:
    """Raise InputError for options that pyhessian does not have."""
    if options.precondition is not None:
        raise InputError("engine: 'pyhessian' knows no preconditioner; use 'landscape'")
    if options.matrix != "hessian":
        raise InputError(f"matrix: '{options.matrix}' is not allowed with engine 'pyhessian'; use 'hessian'")
    if options.part:
        raise InputError(f"part: {options.part!r} is not allowed with engine 'pyhessian'; use 'landscape'")


def largest_magnitude(
    problem: Problem, weights: Tensor | None, residual_tol: float, max_products: int, seed: int
) -> tuple[float, Tensor, int]:
    """Return (the eigenvalue of largest magnitude, its unit vector (P,), the number of products).

    The power iteration ends when the Rayleigh quotient changes relatively by less than tol²/100: its error is
    of the order of the residual squared, and a step removes little of it if convergence is slow.
    """
    with _engine(problem, weights, seed) as (engine, batches):
        values, vectors = engine.eigenvalues(maxIter=max_products, tol=residual_tol**2 / 100)
    flat = torch.cat([part.detach().flatten() for part in vectors[0]]).to(problem.weights)
    return float(values[0]), flat / vector_norm(flat), batches.passes


def trace_samples(problem: Problem, weights: Tensor | None, *, products: int, seed: int) -> Array:
    """Return samples zᵀHz (products,), z random signs, whose mean estimates the trace (Hutchinson 1990)."""
    with _engine(problem, weights, seed) as (engine, _):
        # A tolerance of −∞, because its stopping rule would end at once for a negative running mean.
        samples = engine.trace(maxIter=products, tol=-math.inf)
    return np.array(samples, dtype=np.float64)


# The losses that curvlinops supports as modules.
LOSSES: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}


def to_curvlinops(problem: Problem, operator: str, weights: Tensor | None, **options: Any) -> Any:
    """Return an operator of curvlinops on ``problem``, see :meth:`landscape.Problem.to_curvlinops`."""
    model, batches = _plain(problem, weights, "to_curvlinops: curvlinops", "problem.hessian()")
    curvlinops = optional("curvlinops", "to_curvlinops", "'sgd-landscape[curvlinops]'")
    choose("operator", operator, [name for name in dir(curvlinops) if name.endswith("LinearOperator")])
    named, loss = dict(model.named_parameters()), problem.criterion
    loss = LOSSES[loss]() if loss in LOSSES else loss
    parameters = [named[slot.name] for slot in problem.layout.slots]
    try:
        return getattr(curvlinops, operator)(model, loss, parameters, batches, **options)
    except Exception as error:  # another package raises any kind of error
        words = f"{operator} fails on this problem ({first_words(error)})"
        raise InputError(f"to_curvlinops: {words}; use problem.hessian()") from error
