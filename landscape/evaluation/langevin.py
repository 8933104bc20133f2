"""Stochastic gradient Langevin dynamics (SGLD) of several chains at once, around the weights of a problem."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from landscape.core.hdf5 import Array
from landscape.evaluation.minibatches import draws, stream
from landscape.evaluation.stack import Stack
from landscape.problem.problem import Problem

# Of data given as batches, the steps whose minibatches one pass collects, unless they take too much memory:
# a chain takes a thousand steps or more, so that few are drawn in vain (ours).
STEPS_A_PASS = 100


class Langevin:
    """Chains that sample exp(−U(w)), U(w) = nβ L(w) + γ/2 ‖w − w*‖², and begin at w*, the problem's weights.

    A step is w ← w − ε/2 ĝ + √ε ξ, with ξ ~ N(0, 1) and ĝ = nβ ∇L_B(w) + γ (w − w*) from a minibatch B drawn
    with replacement, for each chain its own (Lau et al., arXiv 2308.12108, algorithm 1). All chains are one
    stack of learners.

    Args:
        problem: L and w*.
        batch: samples of a minibatch.
        chains: how many, at least 2.
        step_size: ε.
        nbeta: nβ.
        localization: γ.
        seed: draws minibatches and noise; another device has other numbers.

    Attributes:
        steps: how many each chain has taken.

    Example:
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
        >>> problem = Problem(model, torch.nn.functional.mse_loss, (x, y))
        >>> Langevin(problem, 2, 3, step_size=0.1, nbeta=1.0, localization=1.0, seed=0).run(5).shape
        (3, 3, 5)
    """

    def __init__(
        self,
        problem: Problem,
        batch: int,
        chains: int,
        *,
        step_size: float,
        nbeta: float,
        localization: float,
        seed: int,
    ) -> None:
        self.problem, self.batch, self.steps = problem, batch, 0
        self.step_size, self.nbeta, self.localization = step_size, nbeta, localization
        self._stack, self._along = Stack(problem), problem.along_weights
        self._start = problem.theta.expand(chains, -1)
        self._weights, self._gradient = self._start.clone(), torch.empty_like(self._start)
        self._minibatches = draws(problem.data, chains, batch, stream(seed, 0), STEPS_A_PASS)
        noise = int(torch.randint(2**62, (), generator=stream(seed, 1)))
        self._noise = torch.Generator(problem.device).manual_seed(noise)

    def run(self, steps: int) -> Array:
        """Take ``steps`` steps, and return three numbers of each as (3, chains, steps) float64.

        1. nβ (L_B(w) − L_B(w*)), whose mean is nβ (L(w) − L(w*)): on one minibatch both losses have much of
           their noise in common.
        2. By how much the mean of 1. is too large because ε is not 0 and B not all of the data: exact for a
           quadratic L, to first order in ε for others near their minimum (ours). With the Hessian H,
           A = nβ H + γ and G = E ĝĝᵀ, stationarity of E (w − w*)(w − w*)ᵀ = C means AC + CA = 2 + ε/2 G, so
           that nβ/2 tr(HC) is ε/8 tr(G − γ A⁻¹G) above its value at ε = 0. Here tr(G) − γ E ĝ·(w − w*) is
           E ĝ·a with a = nβ ∇L_B(w), and what remains is −γ tr(A⁻¹N) with the covariance N of a's noise, for
           which half of the mean of (a·d' − a'·d)² stands: d = w − w*, a', d' of the other chains.
        3. ‖w − w*‖².
        """
        rows = [self._step() for _ in range(steps)]
        self.steps += steps
        numbers: Array = torch.stack(rows, 2).double().cpu().numpy()
        return numbers

    def _step(self) -> Tensor:
        """The three numbers (3, chains) of the weights before a step."""
        x, y = next(self._minibatches)
        losses = self._stack.gradients(self._weights, x, y, out=self._gradient)
        with torch.no_grad():
            rise = self.nbeta * (losses - self._stack.losses(self._start, x, y))
            away, gradient = self._weights - self._start, self._gradient.mul_(self.nbeta)
            drift = torch.add(gradient, away, alpha=self.localization)
            work = gradient @ away.T
            skew = (work - work.T).square().sum(1) / (2 * (len(work) - 1))
            heating = self.step_size / 8 * ((gradient * drift).sum(1) - self.localization * skew)
            noise = self._along(torch.empty_like(away).normal_(generator=self._noise))
            distance2 = away.square_().sum(1)
            self._weights.sub_(drift, alpha=self.step_size / 2).add_(noise, alpha=math.sqrt(self.step_size))
        return torch.stack([rise, heating, distance2])
