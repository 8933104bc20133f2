"""ηλ_max of a problem against the limits of linear stability under delay and momentum (Delay-2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from landscape.curvature.eigenvalues import top_eigenvalues
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
    tol: float = 0.01,
    seed: int = 0,
    **about: Unpack[Provenance],
) -> Stability:
    """λ_max of the Hessian at the problem's centre, and the limits for ``delays`` that it stands against.

    ``momentum`` (default 0.9: DESIGN's table, and the usual one) is that of the ordinary and shifted forms.
    ``tol`` and ``seed`` as in :func:`landscape.top_eigenvalues`.
    """
    table = limits(delays, momentum)
    top = top_eigenvalues(problem, 1, tol, seed=seed)
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
        problem.samples,
        **about,
    )
