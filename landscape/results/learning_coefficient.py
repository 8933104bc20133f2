"""The local learning coefficient, with the traces of the chains that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from landscape.core.hdf5 import Array
from landscape.results.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class LearningCoefficient(Measurement):
    """λ̂ = nβ (E L(w) − L(w*)), w ~ exp(−nβ L(w) − γ/2 ‖w − w*‖²), from chains of SGLD that begin at w*.

    L is the mean loss of n samples, in nats a negative logarithm of the likelihood; λ̂ has no unit. A draw is
    the mean of ``steps_a_draw`` steps of a chain; the first ``burn_in`` draws are discarded.

    Attributes:
        rise: (chains, draws), nβ (L(w) − L(w*)), on minibatches.
        heating: (chains, draws), by how much step size and minibatches raise it.
        distance2: (chains, draws), ‖w − w*‖².
        standard_error: of ``value``, from the effective sample size; no chain's error, and not that of γ.
        r_hat: rank-normalised split R̂ of rise − heating (Vehtari et al. 2021), 1 where chains have mixed.
        r_hat_distance: the same of ``distance2``.
        ess: the effective sample size of the mean of rise − heating, all chains together.
        nbeta: nβ, the inverse temperature times the number of samples.
        localization: γ.
        step_size: ε.
        batch: samples of a minibatch.
        steps: of each chain, those of the burn-in included.
        burn_in: draws of each chain that are discarded.
        loss: L(w*) in nats.
        weights_norm2: ‖w*‖².
        lambda_max: the largest eigenvalue of the Hessian at w* in nats, where ε was chosen by it; else NaN.
        parameters: P; a regular model has λ = P/2.
        max_rhat: the limit on ``r_hat``.
        tol: the relative standard error asked for.
        converged: whether it, and an effective sample size of 100 a chain, was reached.

    Example:
        >>> import numpy as np
        >>> rise = np.array([[0.0, 3.0, 5.0], [0.0, 4.0, 4.0]])
        >>> result = LearningCoefficient(
        ...     rise=rise, heating=rise / 4, distance2=rise, standard_error=0.3, r_hat=1.0,
        ...     r_hat_distance=1.0, ess=4.0, nbeta=10.0, localization=1.0, step_size=0.1, batch=8, steps=3,
        ...     burn_in=1, loss=0.5, weights_norm2=1.0, lambda_max=2.0, parameters=6, max_rhat=1.01,
        ...     tol=0.05, converged=False, samples=36, seed=0, dtype="float64")
        >>> result.value, result.uncorrected, result.chain_values.tolist(), result.mean_loss
        (3.0, 4.0, [3.0, 3.0], 0.8)
    """

    schema: ClassVar[str] = "landscape.learning_coefficient"
    shapes: ClassVar[Mapping[str, str]] = {
        "rise": "chain+ draw+",
        "heating": "chain draw",
        "distance2": "chain draw",
    }
    units: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("rise", "heating", "standard_error", "r_hat", "r_hat_distance", "ess", "nbeta"), "1"
        ),
        **dict.fromkeys(("loss", "lambda_max"), "nat"),
        "batch": "samples",
    }
    table: ClassVar[str] = "chain draw"

    rise: Array
    heating: Array
    distance2: Array
    standard_error: float
    r_hat: float
    r_hat_distance: float
    ess: float
    nbeta: float
    localization: float
    step_size: float
    batch: int
    steps: int
    burn_in: int
    loss: float
    weights_norm2: float
    lambda_max: float
    parameters: int
    max_rhat: float
    tol: float
    converged: bool

    @property
    def value(self) -> float:
        """λ̂: the mean of rise − heating over all chains after the burn-in."""
        return float(self.chain_values.mean())

    @property
    def chain_values(self) -> Array:
        """(chains,), λ̂ of each chain."""
        values: Array = (self.rise - self.heating)[:, self.burn_in :].mean(1)
        return values

    @property
    def uncorrected(self) -> float:
        """λ̂ with its heating: the mean of ``rise``, the estimator as Lau et al. write it."""
        return float(self.rise[:, self.burn_in :].mean())

    @property
    def chains(self) -> int:
        """The number of chains."""
        return len(self.rise)

    @property
    def steps_a_draw(self) -> int:
        """The steps that a draw is the mean of."""
        return int(self.steps // self.rise.shape[1])

    @property
    def mean_loss(self) -> float:
        """E L(w) of the chains without heating, L(w*) + λ̂/nβ, in nats."""
        return self.loss + self.value / self.nbeta

    @property
    def distance(self) -> float:
        """The root mean square of ‖w − w*‖ after the burn-in."""
        return float(self.distance2[:, self.burn_in :].mean() ** 0.5)
