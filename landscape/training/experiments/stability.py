"""The limits of stability at a minimum: the rates above which training leaves it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import numpy as np
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.analysis import analysis
from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.core.progress import ProgressOption
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.curvature.hessian import Preconditioner, as_preconditioner
from landscape.evaluation.grid import named_loss
from landscape.limits import limits
from landscape.problem.problem import Problem, Run, problem_of
from landscape.results.base import Provenance
from landscape.results.training import Stability
from landscape.training.experiments.continued import operating_point
from landscape.training.optimizer.preconditioning import preconditioner

# The table of docs/explanation/stability.md.
DELAYS = (0, 1, 3, 7, 31)


@analysis(shorter="a larger residual_tol= or a part of the data", of_the_run=None)
def stability(
    problem: Problem | Run,
    delays: Sequence[int] = DELAYS,
    momentum: float = 0.9,
    *,
    lr: float | None = None,
    own_limit: float | None = None,
    own_delay: int | None = None,
    precondition: Preconditioner | Tensor | bool | None = None,
    residual_tol: float = 0.01,
    seed: int = 0,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> Stability:
    """λ_max of the Hessian at the problem's center, and the limits of stability for ``delays``.

    Args:
        problem: the loss; or a run.
        delays: gradient delays τ in steps.
        momentum: m of the ordinary and shifted forms. 0.9 is the usual value.
        lr: the learning rate, for the picture of ηλ_max; default: the run's.
        own_limit, own_delay: the limit on ηλ of the run itself, and its delay; default: those of the run's
            update rule.
        precondition: P, as :func:`landscape.spectrum` takes it, or True: that of the run's optimizer. λ_max
            is then that of P^{-1/2} H P^{-1/2}, the limits are of steps w ← w − η P⁻¹ v, v ← m v + g, and lr
            and own_limit are those of P, if it has them.
        residual_tol: residual of λ_max, relative to it.
        seed: draws the starting vector.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        λ_max with its residual, and the limits on ηλ, (3, K): without momentum, ordinary, shifted.

    Raises:
        InputError: a negative delay, a momentum outside [0, 1), a residual_tol that is not positive, or
            ``precondition=True`` without a run.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = landscape.stability(problem, delays=[0, 1])
        >>> round(result.lambda_max, 4), result.limit[0].round(3).tolist()
        (9.0, [2.0, 1.0])
    """
    table, run = limits(delays, momentum), problem if isinstance(problem, Checkpoint) else None
    problem = problem_of(problem)
    own_lr, rule_limit, rule_delay = operating_point(run) if run else (math.nan, None, 0)
    lr, own_limit = own_lr if lr is None else lr, rule_limit if own_limit is None else own_limit
    own_delay = rule_delay if own_delay is None else own_delay
    positive("own_delay", own_delay, least=0)
    if isinstance(precondition, bool):
        if precondition and run is None:
            raise InputError("precondition: True is not allowed for a problem, whose optimizer is not known")
        precondition = preconditioner(run, problem) if precondition and run else None
    if given := as_preconditioner(precondition):
        lr, own_limit = given.lr, given.limit
    top = top_eigenvalues(problem, 1, residual_tol, seed=seed, precondition=given, progress=progress)
    return Stability(
        np.asarray(delays, dtype=np.int64),
        table,
        momentum,
        float(top.values[0]),
        float(top.residuals[0]),
        bool(top.converged),
        lr,
        math.nan if own_limit is None else own_limit,
        own_delay,
        problem.data.samples,
        precondition=given.name if given else "",
        **named_loss(problem),
        **about,
    )
