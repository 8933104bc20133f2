"""The interface of optimizers: from a learner's gradient to its direction u_j; the rule steps by −α u_j."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import FailedError, InputError
from landscape.core.options import below_one, positive
from landscape.problem.layout import Layout


class OptimizerMemory(Protocol):
    """What update rules read and change of an optimizer, this package's or a user's own.

    Attributes:
        counters, state: as of :class:`Optimizer`.
    """

    state: dict[str, Tensor]

    @property
    def counters(self) -> frozenset[str]: ...

    def reset(self) -> None:
        """Forget all steps so far."""


class Optimizer(ABC):
    """Directions (n, P) from gradients (n, P); ``state`` name -> (n, …), saved as /optimizer/NAME.

    A step's order: gradients at the rule's points p_j (n, P); weight decay at p_j; the optimizer's state;
    u_j; the rule finishes (DPSGD in AWC order: w_j ← Σ_k M_jk w_k − α u_j). Each learner has a state of its
    own, as when every worker runs its own ``torch.optim`` optimizer.

    An optimizer is added to the registry under the name that recipes give, in this package or in a plugin;
    the arguments of its ``__init__`` are the options of the recipe::

        @registry.optimizers.add("my-optimizer")
        class MyOptimizer(Optimizer): ...
    """

    #: Names of the state's tensors (n, P).
    names: tuple[str, ...] = ()
    #: Names of the tensors that only count steps: equal for all learners, and left out of averages.
    counters: frozenset[str] = frozenset()
    #: Whether the direction is linear in the gradients so far.
    linear = True

    #: Whether the direction is the gradient itself, which Eq. 4's split of the noise assumes.
    direction_is_gradient = False
    #: (m, form) as :func:`landscape.stability.max_stable_step` takes them; None if it is another kind.
    heavy_ball: tuple[float, str] | None = None
    #: (m, form, c): with its preconditioner P fixed, the steps are those of momentum m with rate c·α. m and
    #: form as in :attr:`heavy_ball`; Adam's m ← β m + (1 − β) g has c = 1 − β. None where
    #: :meth:`preconditioner` gives none.
    preconditioned: tuple[float, str, float] | None = None

    def __init__(self) -> None:
        self.layout = Layout(())
        #: A step replaces it and never writes to it, so that the step can be undone with the old one.
        self.state: dict[str, Tensor] = {}

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor | None:
        """The diagonal of P (n, P) after ``step`` steps: with it the directions are P⁻¹ times a momentum.

        None: the directions are no such product with a positive diagonal P.

        Args:
            points: (n, P), the weights.
            gradients: (n, P), such as the next ones; LARS alone depends on them.
            step: counted from 1.
        """
        return None

    def start(self, layout: Layout, weights: Tensor) -> None:
        """Set a state of zeros.

        Args:
            layout: of the parameter tensors in a row of weights.
            weights: of this process's learners (n, P).
        """
        self.layout = layout
        self.state = {name: torch.zeros_like(weights) for name in self.names}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take the state of a checkpoint, after :meth:`start`.

        Args:
            state: name -> (n, …).

        Raises:
            FailedError: where it is not this optimizer's, or not of so many learners.
        """
        for name, tensor in self.state.items():
            needed, shape = tuple(tensor.shape), tuple(state[name].shape) if name in state else "nothing"
            if shape != needed:
                raise FailedError(f"checkpoint: /optimizer/{name} holds {shape}, its run needs {needed}")
        self.state = {name: state[name].to(tensor) for name, tensor in self.state.items()}

    def reset(self) -> None:
        """Forget all steps so far: the state is that of :meth:`start`."""
        self.state = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}

    @abstractmethod
    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        """The descent directions of the learners.

        Args:
            gradients: (n, P); they are not written to.
            points: where they were taken (n, P).
            lr: α of this step. The direction does not contain it: a change does not rescale momentum.
            step: counted from 1.

        Returns:
            u (n, P).
        """


@registry.optimizers.add("sgd")
class SGD(Optimizer):
    """``torch.optim.SGD`` without dampening: g ← g + λ p; v ← m v + g; u = v, or Nesterov's u = g + m v.

    Without momentum and weight decay u is the gradient.

    Args:
        momentum: m. Source: DPSGD-2020, Figure 2.
        nesterov: Use Nesterov's form. Source: torch.optim.SGD.
        weight_decay: λ. Source: DPSGD-2020, Figure 2.
    """

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        super().__init__()
        below_one("optimizer.momentum", momentum)
        positive("optimizer.weight_decay", weight_decay, least=0)
        if nesterov and not momentum:
            raise InputError("optimizer.nesterov: true is not allowed without optimizer.momentum > 0")
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.names = ("momentum",) if momentum else ()
        self.direction_is_gradient = not momentum and not weight_decay
        self.heavy_ball = momentum, "nesterov" if nesterov else "ordinary"

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        if self.weight_decay:
            gradients = torch.add(gradients, points, alpha=self.weight_decay)
        if not self.momentum:
            return gradients
        v = torch.add(gradients, self.state["momentum"], alpha=self.momentum)
        self.state = {"momentum": v}
        return torch.add(gradients, v, alpha=self.momentum) if self.nesterov else v
