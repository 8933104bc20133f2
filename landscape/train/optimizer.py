"""Optimizers: from each learner's gradient to its descent direction u_j, by which the rule steps −α u_j.

A step's order: gradients at the rule's points p_j (n, P); weight decay at p_j; the optimizer's state; u_j;
the rule finishes (DPSGD in AWC order: w_j ← Σ_k M_jk w_k − α u_j). Each learner has a state of its own,
(n, P), never averaged or exchanged, as when every worker runs its own ``torch.optim`` optimizer. Under SSGD
that is the same as one optimizer on the mean gradient if u is linear in the gradients, as SGD's is. LARS's
and LAMB's are not, so there every learner is given the mean gradient: all states and directions are equal.

The learning rate stays outside the state, as in ``torch.optim.SGD``: a change does not rescale momentum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from landscape.core.errors import FailedError, InputError
from landscape.core.options import below_one, check_keywords, choose, positive
from landscape.problem.layout import Layout


class Optimizer(ABC):
    """Directions (n, P) from gradients (n, P); ``state`` name -> (n, P), saved as /optimizer/NAME."""

    #: Names of the state's tensors.
    names: tuple[str, ...] = ()
    #: Whether the direction is linear in the gradients so far.
    linear = True

    def __init__(self) -> None:
        self.layout = Layout(())
        #: Replaced, never written to, by each step: who holds the old one can go back to it.
        self.state: dict[str, Tensor] = {}

    @property
    def plain(self) -> bool:
        """Whether the direction is the gradient itself, as Eq. 4's split of the noise takes for granted."""
        return False

    @property
    def heavy_ball(self) -> tuple[float, str] | None:
        """(m, form) as :func:`landscape.stability.max_stable_step` takes them; None if it is another kind."""
        return None

    def start(self, layout: Layout, weights: Tensor) -> None:
        """Learners at ``weights`` (n, P) with ``layout``, and a state of zeros."""
        self.layout = layout
        self.state = {name: torch.zeros_like(weights) for name in self.names}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The state of a checkpoint, after :meth:`start`. FailedError if it is not this optimizer's."""
        for name, own in self.state.items():
            found = tuple(state[name].shape) if name in state else "nothing"
            if found != tuple(own.shape):
                raise FailedError(
                    f"checkpoint: /optimizer/{name} holds {found}, its run needs {tuple(own.shape)}"
                )
        self.state = {name: state[name].to(own) for name, own in self.state.items()}

    @abstractmethod
    def directions(self, gradients: Tensor, points: Tensor, step: int) -> Tensor:
        """u (n, P) of ``step``, counted from 1, for ``gradients`` (n, P) taken at ``points`` (n, P)."""

    def _norms(self, v: Tensor) -> Tensor:
        """(n, slots): the norm of each learner's part of each parameter tensor."""
        return torch.stack([v[:, s.offset : s.offset + s.size].norm(dim=1) for s in self.layout.slots], dim=1)

    def _scale(self, v: Tensor, ratios: Tensor) -> Tensor:
        """``v`` (n, P), each parameter tensor of each learner times its ratio (n, slots); in place."""
        for slot, ratio in zip(self.layout.slots, ratios.unbind(1), strict=True):
            v[:, slot.offset : slot.offset + slot.size] *= ratio[:, None]
        return v


class SGD(Optimizer):
    """``torch.optim.SGD`` without dampening: g ← g + λ p; v ← m v + g; u = v, or Nesterov's u = g + m v.

    m is ``momentum``, λ ``weight_decay``. Without either (the default, Figure 2's) u is the gradient.
    """

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        super().__init__()
        below_one("optimizer.momentum", momentum)
        positive("optimizer.weight_decay", weight_decay, least=0)
        if nesterov and not momentum:
            raise InputError("optimizer.nesterov: true is not allowed without optimizer.momentum > 0")
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.names = ("momentum",) if momentum else ()

    @property
    def plain(self) -> bool:
        return not self.momentum and not self.weight_decay

    @property
    def heavy_ball(self) -> tuple[float, str] | None:
        return self.momentum, "nesterov" if self.nesterov else "ordinary"

    def directions(self, gradients: Tensor, points: Tensor, step: int) -> Tensor:
        if self.weight_decay:
            gradients = torch.add(gradients, points, alpha=self.weight_decay)
        if not self.momentum:
            return gradients
        v = torch.add(gradients, self.state["momentum"], alpha=self.momentum)
        self.state = {"momentum": v}
        return torch.add(gradients, v, alpha=self.momentum) if self.nesterov else v


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, Algorithm 1), for large batches.

    For each parameter tensor, biases and normalisation included: v ← m v + r (g + λ p), u = v,
    r = ``trust`` ‖p‖ / (‖g‖ + λ ‖p‖). The variant of common implementations: the learning rate outside v, and
    r = 1 where ‖p‖ or ‖g‖ is 0 (a tensor that starts at zero could never leave it). Defaults: the paper's,
    m = 0.9, λ = 0.0005, trust = 0.001.
    """

    names = ("momentum",)
    linear = False

    def __init__(self, momentum: float = 0.9, weight_decay: float = 0.0005, trust: float = 0.001) -> None:
        super().__init__()
        below_one("optimizer.momentum", momentum)
        positive("optimizer.weight_decay", weight_decay, least=0)
        positive("optimizer.trust", trust)
        self.momentum, self.weight_decay, self.trust = momentum, weight_decay, trust

    def directions(self, gradients: Tensor, points: Tensor, step: int) -> Tensor:
        w, g = self._norms(points), self._norms(gradients)
        ratios = self.trust * w / (g + self.weight_decay * w)
        ratios = torch.where((w > 0) & (g > 0), ratios, 1.0)
        scaled = self._scale(torch.add(gradients, points, alpha=self.weight_decay), ratios)
        v = scaled.add_(self.state["momentum"], alpha=self.momentum)
        self.state = {"momentum": v}
        return v


class LAMB(Optimizer):
    """LAMB (You et al. 2020, Algorithm 2, φ the identity): Adam, then a ratio for each parameter tensor.

    m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g²; m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ); s = m̂/(√v̂ + ε) + λ p;
    u = s ‖p‖/‖s‖ for each parameter tensor, biases and normalisation included, and u = s where either norm is
    0, as in common implementations. Weight decay λ is decoupled. Defaults: the paper's for BERT, β₁ = 0.9,
    β₂ = 0.999, ε = 1e-6, λ = 0.01.
    """

    names = ("first_moment", "second_moment")
    linear = False

    def __init__(
        self, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-6, weight_decay: float = 0.01
    ) -> None:
        super().__init__()
        below_one("optimizer.beta1", beta1)
        below_one("optimizer.beta2", beta2)
        positive("optimizer.epsilon", epsilon)
        positive("optimizer.weight_decay", weight_decay, least=0)
        self.betas, self.epsilon, self.weight_decay = (beta1, beta2), epsilon, weight_decay

    def directions(self, gradients: Tensor, points: Tensor, step: int) -> Tensor:
        beta1, beta2 = self.betas
        first = self.state["first_moment"].lerp(gradients, 1 - beta1)
        second = torch.addcmul(beta2 * self.state["second_moment"], gradients, gradients, value=1 - beta2)
        self.state = {"first_moment": first, "second_moment": second}
        root = (second / (1 - beta2**step)).sqrt_().add_(self.epsilon)
        s = torch.div(first, root.mul_(1 - beta1**step)).add_(points, alpha=self.weight_decay)
        w, norms = self._norms(points), self._norms(s)
        return self._scale(s, torch.where((w > 0) & (norms > 0), w / norms, 1.0))


_REGISTRY: dict[str, type[Optimizer]] = {"sgd": SGD, "lars": LARS, "lamb": LAMB}


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the optimizer's options, defaults filled in; InputError names the key."""
    return check_keywords("optimizer", given, _REGISTRY[choose("optimizer.name", name, _REGISTRY)])


def make(name: str, given: dict[str, Any]) -> Optimizer:
    """A new optimizer; :meth:`Optimizer.start` gives it its learners."""
    return _REGISTRY[choose("optimizer.name", name, _REGISTRY)](**options(name, given))
