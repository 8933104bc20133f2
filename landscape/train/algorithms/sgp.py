"""Stochastic gradient push: decentralised SGD over directed graphs, by push-sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.stability import max_stable_step
from landscape.stability.rules import first_unstable, max_mixing_step
from landscape.train.algorithms.base import Rule
from landscape.train.topology.mixing import Mixing, is_file, read_matrix


@registry.algorithms.add("sgp")
class SGP(Rule):
    """x_i ← Σ_j P_ij (x_j − α ∇L^{μ_j}(z_j)), w_i ← Σ_j P_ij w_j, z_i = x_i/w_i (Assran et al. 2019, Alg. 1).

    P's columns sum to 1: learner j sends shares of its vector, and needs no answer. The learners' weights are
    z, which the paper evaluates. They move by z_i ← Σ_j Q_ij (z_j − α u_j/w_j) with Q_ij = P_ij w_j/w_i',
    whose rows sum to 1; w (n,) is state.

    Args:
        graph: "random": each learner keeps half and sends half to one other, drawn at each step. A .csv, .txt
            or .npy file: P itself. Else a mixing by name (one-peer-exponential, exponential, ring(k), …),
            which is doubly stochastic, so that the push-sum weights w stay 1. Source: Assran et al. 2019.
    """

    label, color = "SGP", "#882255"
    purposes = ("push",)
    lr_is_factor = True

    def __init__(self, learners: int, seed: int, graph: str = "one-peer-exponential") -> None:
        super().__init__(learners, seed)
        self.graph = graph
        self.mixing, self.fixed = None, None
        if is_file(graph):
            self.fixed = read_matrix("algorithm.graph", Path(graph), learners, sums=("column",))
            parts, _ = connected_components(self.fixed > 0, directed=True, connection="strong")
            if parts > 1:
                raise InputError(
                    f"algorithm.graph: {graph} is not strongly connected ({parts} components), what each "
                    "learner sends must reach every other one"
                )
        elif graph != "random":
            self.mixing = Mixing(graph, learners, seed, where="algorithm.graph")

    def start(self, weights: Tensor) -> None:
        self.shared = {"push_weights": torch.ones(self.learners, dtype=torch.float64)}

    def matrix(self, step: int) -> Array:
        """P (n, n) float64 of ``step``; column j has the shares of learner j."""
        if self.mixing:
            return self.mixing.matrix(step)
        if self.fixed is not None:
            return self.fixed
        n = self.learners
        p = np.eye(n)
        if n > 1:
            hop = torch.randint(1, n, (n,), generator=self.generator("push", step)).numpy()
            p *= 0.5
            p[(np.arange(n) + hop) % n, np.arange(n)] = 0.5
        return p

    def gradient_points(self, weights: Tensor) -> Tensor:
        return weights

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        w, p = self.shared["push_weights"], self.matrix(step)
        local_w = w[self.comm.local, None].to(weights)
        stepped = torch.addcdiv(weights, directions, local_w.expand_as(directions), value=-lr)
        new = torch.from_numpy(p) @ w
        q = p * w.numpy() / new.numpy()[:, None]
        result = self._new_weights(weights).copy_(self.comm.combine(stepped, q)())
        self.shared = {"push_weights": new}
        return result

    def follows_mean_direction(self, step: int) -> bool:
        return self.mixing is not None  # otherwise w_a is not the mean of x, which moves by −α mean u

    def communication_cost(self, step: int) -> tuple[float, int]:
        p = self.matrix(step)
        return (np.count_nonzero(p) - np.count_nonzero(np.diag(p))) / self.learners, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Where w stays 1, that of DPSGD in ATC order; of a fixed graph, with the w that it settles at.

        On one quadratic x ← P (x − ηλ x/w): learners of little weight w take the largest steps.
        """
        if self.mixing and not momentum:
            return max_stable_step()
        if self.mixing and len(self.mixing.cycle) == 1:
            return max_mixing_step(self.mixing.modes[0], momentum, form, "atc")
        if self.fixed is None or momentum:
            return None
        p, w = self.fixed, np.linalg.matrix_power(self.fixed, 2**20).sum(1)
        if not np.allclose(p @ w, w):
            return None  # w does not converge on this graph
        return first_unstable(lambda h: float(np.abs(np.linalg.eigvals(p - h * p / w)).max()), 2 * w.max())
