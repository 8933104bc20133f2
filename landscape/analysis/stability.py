"""ηλ_max of a problem against the limits of linear stability under delay and momentum (Delay-2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np
from torch import Tensor

from landscape.core.progress import Progress
from landscape.curvature.eigenvalues import top_eigenvalues
from landscape.curvature.hessian import Preconditioner, as_preconditioner
from landscape.problem.problem import Problem
from landscape.results.base import Provenance
from landscape.results.stability import Stability
from landscape.stability import limits


def stability(
    problem: Problem,
    delays: Sequence[int],
    momentum: float = 0.9,
    *,
    lr: float = float("nan"),
    own_limit: float | None = None,
    own_delay: int = 0,
    precondition: Preconditioner | Tensor | None = None,
    tol: float = 0.01,
    seed: int = 0,
    progress: Progress | None = None,
    **about: Unpack[Provenance],
) -> Stability:
    """λ_max of the Hessian at the problem's centre, and the limits of stability for ``delays``.

    Args:
        problem: the loss.
        delays: gradient delays τ in steps.
        momentum: m of the ordinary and shifted forms. 0.9 is the usual value, as in DESIGN's table.
        lr: the learning rate of the run, for the plot of ηλ_max.
        own_limit, own_delay: the limit on ηλ of the run itself, and its delay.
        precondition: P, as :func:`landscape.spectrum` takes it: λ_max is then that of P^{-1/2} H P^{-1/2},
            the limits are of steps w ← w − η P⁻¹ v, v ← m v + g, and lr and own_limit are those of P, if it
            has them.
        tol: residual of λ_max, relative to it.
        seed: draws the starting vector.
        progress: called with an estimate of the share of the work done.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        λ_max with its residual, and the limits on ηλ, (3, K): without momentum, ordinary, shifted.

    Raises:
        InputError: a negative delay, a momentum outside [0, 1), or a tol that is not positive.

    Example:
        >>> import torch, landscape
        >>> from landscape.analysis.stability import stability
        >>> x, y = torch.diag(torch.tensor([1.0, 3.0])), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(), (x, y))
        >>> result = stability(problem, delays=[0, 1])
        >>> round(result.lambda_max, 4), result.limit[0].round(3).tolist()
        (9.0, [2.0, 1.0])
    """
    table = limits(delays, momentum)
    given = None if precondition is None else as_preconditioner(precondition)
    if given:
        lr, own_limit = given.lr, given.limit
    top = top_eigenvalues(problem, 1, tol, seed=seed, precondition=given, progress=progress)
    return Stability(
        np.asarray(delays, dtype=np.int64),
        table,
        momentum,
        float(top.values[0]),
        float(top.residuals[0]),
        bool(top.converged),
        lr,
        float("nan") if own_limit is None else own_limit,
        own_delay,
        problem.data.samples,
        precondition=given.name if given else "",
        **about,
    )
