"""The change of the loss in a step: gradient, curvature and the rest, by layer and between layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint.weights import Weights, network_of
from landscape.core.analysis import analysis
from landscape.core.devices import inner, vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.memory import Need
from landscape.core.options import positive
from landscape.core.progress import ProgressOption, taken
from landscape.curvature.double_backward import in_full_precision
from landscape.curvature.eigenvalues import Matrix
from landscape.evaluation import needs
from landscape.problem.layout import cut, put
from landscape.problem.losses import existing
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.spectrum import WHOLE, LossChange

# Of a critical multiple: the ratio of the two bounds at which its bisection ends, and the doublings of the
# step, or halvings, before it is given up (ours; from 2 to 1.02 takes six losses).
WITHIN, DOUBLINGS = 1.02, 40


def change_need(problem: Any, derivatives: Any, **_: Any) -> Need:
    """The step, a part of it, its product, gradient and a moved vector of weights."""
    return needs.curved(problem, 6, derivatives=derivatives)


@analysis(change_need, shorter="a coarser by= or a part of the data", version=1)
def loss_change(
    problem: Problem | Run,
    before: Weights,
    after: Weights,
    by: str | Sequence[str] = "layer",
    *,
    lr: float | None = None,
    derivatives: str = "auto",
    max_memory: int | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> LossChange:
    """L(θ + d) − L(θ) = ⟨g, d⟩ + ½ dᵀHd + rest of a step d: in total, by layer, and between layers.

    The step is that which an optimizer really took, with momentum, weight decay, averaging and all. The terms
    of a group of parameters are ⟨g_a, d_a⟩ and ½ Σ_b d_aᵀH_ab d_b, of which b = a is the curvature within the
    group, and the others are between groups; the rest, of third order and more, has no parts. One product of
    the Hessian for each group.

    With it come the directional sharpness dᵀHd/‖d‖² (arXiv 2606.04662), and the critical multiple m, the
    smallest for which the loss at θ + md is above L(θ): the critical sharpness of arXiv 2601.16979 is 2/(αm)
    for a step with learning rate α. It is found by doubling or halving, and bisection, to 1%.

    Args:
        problem: the loss, or a run.
        before, after: θ and θ + d, (P,) each, or in another form that :func:`landscape.line` takes.
        by: the groups, as in :func:`landscape.curvature_table`.
        lr: α; default: the critical sharpness is not known.
        derivatives: "exact", "differences" of gradients, or "auto"; see :class:`landscape.HessianOperator`.
        max_memory: bytes that the process may take, at most.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        A table with the whole in its first row and each group in another.

    Raises:
        InputError: weights of another model, or equal ones; a name that fits no parameter.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> change = landscape.loss_change(problem, torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0]))
        >>> change.gradient.round(3).tolist(), change.curvature.round(3).tolist()
        ([-0.5, -0.5], [0.125, 0.125])
        >>> round(change.critical_multiple, 1)
        4.0
    """
    if lr is not None:
        positive("lr", lr)
    problem = in_full_precision(problem_of(problem))  # half precision has two digits of a step
    before, after = (network_of(problem, *w).theta for w in ((before, "before"), (after, "after")))
    step = after - before
    norm = float(vector_norm(step))
    if not norm:
        raise InputError("after: it is equal to before, there must be a step between them")
    groups = problem.layout.groups(by)
    chosen = Matrix.of(
        problem, 0, about, weights=before, matrix="hessian", part=None, derivatives=derivatives,
        max_memory=max_memory,
    )  # fmt: skip
    h = chosen.operator
    start, g = problem.loss_and_gradient(before)
    existing(start, g)
    if math.isnan(end := problem.loss(after)):
        raise OperationError("after: the loss there is NaN, so that it has no change")
    report = taken(progress)
    places = [[slot.place for slot in slots] for slots in groups.values()]

    def along(vector: Tensor) -> list[float]:
        """⟨vector_a, d_a⟩ for each group a."""
        return [sum(float(inner(vector[p], step[p])) for p in place) for place in places]

    between, error = np.zeros((len(groups), len(groups))), 0.0
    for k, slots in enumerate(groups.values()):
        part = put(torch.zeros_like(step), slots, cut(step, slots))
        images, errors = h.verified(part[None])
        error += errors[0] * norm / 2
        between[k] = np.array(along(images[0])) / 2
        report((k + 1) / (len(groups) + 1))
    between = (between + between.T) / 2
    gradient, curvature = np.array(along(g)), between.sum(1)
    return LossChange(
        **chosen.about,
        groups=(WHOLE, *groups),
        sizes=np.array([problem.layout.size, *(sum(s.size for s in slots) for slots in groups.values())]),
        gradient=np.array([gradient.sum(), *gradient]),
        curvature=np.array([curvature.sum(), *curvature]),
        within=np.array([np.trace(between), *np.diag(between)]),
        between=between,
        loss_before=start,
        loss_after=end,
        step_norm=norm,
        step_lr=math.nan if lr is None else lr,
        critical_multiple=_critical(
            lambda m: not problem.loss(torch.add(before, step, alpha=m)) <= start, gradient.sum()
        ),
        products=len(groups),
        product_error=error,
    )


def _critical(rises: Callable[[float], bool], slope: float) -> float:
    """The smallest multiple of a step at which the loss ``rises`` above its start; 0 for a step uphill.

    NaN where it does not rise within DOUBLINGS. A rise that lies between two multiples that were tried, with
    a lower loss behind it, is not seen.
    """
    if not slope < 0:
        return math.nan if math.isnan(slope) else 0.0
    factor, last, now = 0.5 if rises(1.0) else 2.0, 1.0, 1.0
    for _ in range(DOUBLINGS):
        last, now = now, now * factor
        if rises(now) == (factor > 1):
            break
    else:
        return math.nan
    low, high = sorted((last, now))
    while high > WITHIN * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rises(middle) else (middle, high)
    return math.sqrt(low * high)
