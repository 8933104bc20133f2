"""Optimizers: from a learner's gradient to its direction u_j, which the rule steps by −α.

Their interface, SGD, and rates that adapt to each parameter tensor: LARS and LAMB, for large batches; groups
of parameters, each with an optimizer and a rate of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor

from landscape.core import registry
from landscape.core.devices import vector_norm
from landscape.core.errors import InputError, OperationError
from landscape.core.options import BelowOne, NonNegative, Positive, fit, near
from landscape.problem.layout import Layout, Slot, cut, put


class OptimizerMemory(Protocol):
    """The part of an optimizer, of this package or a user's own, that update rules read and change.

    Attributes:
        counters, state: as of :class:`Optimizer`.
    """

    state: dict[str, Tensor]

    @property
    def counters(self) -> frozenset[str]: ...

    def reset(self) -> None:
        """Forget all steps so far."""


def restored(group: str, like: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's ``group`` in the precision of ``like``; OperationError for another shape."""
    for name, tensor in like.items():
        shape = tuple(stored[name].shape) if name in stored else "nothing"
        if shape != (needed := tuple(tensor.shape)):
            raise OperationError(f"checkpoint: /{group}/{name} holds {shape}, its run needs {needed}")
    return {name: stored[name].to(tensor) for name, tensor in like.items()}


class Optimizer(ABC):
    """Directions (n, P) from gradients (n, P); ``state`` name -> (n, …), saved as /optimizer/NAME.

    A step computes, in this order, gradients at the rule's points p_j (n, P), weight decay at p_j, the
    optimizer's state, the directions u_j, and the rule's new weights (DPSGD in AWC order:
    w_j ← Σ_k M_jk w_k − α u_j). Each learner has its own state, as if every worker had its own
    ``torch.optim`` optimizer.

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

    #: Options without effect on their own, as of :class:`.Rule`.
    needs: Mapping[str, str] = {}
    #: Whether :meth:`preconditioner` depends on the gradients that it is given.
    gradient_scaled = False
    #: Whether the direction is the gradient itself, which Eq. 4's split of the noise assumes.
    direction_is_gradient = False
    #: Momentum and form for :func:`landscape.limits.max_stable_step`; None for other optimizers.
    heavy_ball: tuple[float, str] | None = None
    #: (m, form, c): with a fixed preconditioner P, the steps are those of momentum m with rate c·α. m and
    #: form as in :attr:`heavy_ball`; Adam's m ← β m + (1 − β) g has c = 1 − β. None without a
    #: :meth:`preconditioner`.
    preconditioned: tuple[float, str, float] | None = None
    #: (norm, normalized) of steepest descent, the options of ``steepest``; None for other optimizers.
    geometry: tuple[str, bool] | None = None

    def __init__(self) -> None:
        self.layout = Layout(())
        #: A step replaces it and never writes to it, so that the step can be undone with the old one.
        self.state: dict[str, Tensor] = {}

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor | None:
        """Return the diagonal (n, P) of the preconditioner after ``step`` steps.

        The directions are a momentum divided by this diagonal. None means that no positive diagonal makes
        them such a quotient.

        Args:
            points: (n, P), the weights.
            gradients: (n, P), for example the next gradients; only LARS depends on them.
            step: counted from 1.
        """
        return None

    def start(self, layout: Layout, weights: Tensor) -> None:
        """Set a state of zeros.

        Args:
            layout: the layout of the parameter tensors in a row of weights.
            weights: (n, P), of this process's learners.
        """
        self.layout = layout
        self.state = {name: torch.zeros_like(weights) for name in self.names}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint, after :meth:`start`.

        Args:
            state: name -> (n, …).

        Raises:
            OperationError: for the state of another optimizer, or of another number of learners.
        """
        self.state = restored("optimizer", self.state, state)

    def reset(self) -> None:
        """Forget all steps so far: the state is that of :meth:`start`."""
        self.state = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}

    @abstractmethod
    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        """Return the descent directions of the learners.

        Args:
            gradients: (n, P), which are not changed.
            points: (n, P), the points of the gradients.
            lr: α of this step. The direction does not contain α, so that its changes do not rescale momentum.
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
        nesterov: Whether to use Nesterov's form. Source: torch.optim.SGD.
        weight_decay: λ. Source: DPSGD-2020, Figure 2.
    """

    needs: Mapping[str, str] = {"nesterov": "momentum > 0"}

    def __init__(
        self, momentum: BelowOne = 0.0, nesterov: bool = False, weight_decay: NonNegative = 0.0
    ) -> None:
        super().__init__()
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.names = ("momentum",) if momentum else ()
        self.direction_is_gradient = not momentum and not weight_decay
        self.heavy_ball = momentum, "nesterov" if nesterov else "ordinary"

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        state = {name: torch.empty_like(gradients) for name in self.names}
        u = self.directions_of(slice(None), gradients, points, state)
        self.state = state
        return u

    def directions_of(
        self, columns: slice, gradients: Tensor, points: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``columns`` of :meth:`directions`, and write their new state to ``state``."""
        gradients = gradients[:, columns]
        if self.weight_decay:
            gradients = torch.add(gradients, points[:, columns], alpha=self.weight_decay)
        if not self.momentum:
            return gradients
        v = state["momentum"][:, columns]
        torch.add(gradients, self.state["momentum"][:, columns], alpha=self.momentum, out=v)
        return torch.add(gradients, v, alpha=self.momentum) if self.nesterov else v


@registry.optimizers.add("lars")
class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, Algorithm 1), for large batches.

    For each parameter tensor, biases and normalization included: v ← m v + r (g + λ p), u = v,
    r = ``trust`` ‖p‖ / (‖g‖ + λ ‖p‖). The variant of common implementations: the learning rate outside v, and
    r = 1 where ‖p‖ or ‖g‖ is 0 (a tensor that starts at zero could never leave it).

    Args:
        momentum: m. Source: You, Gitman, Ginsburg 2017.
        weight_decay: λ. Source: You, Gitman, Ginsburg 2017.
        trust: The trust coefficient in r. Source: You, Gitman, Ginsburg 2017.
    """

    names = ("momentum",)
    linear = False
    gradient_scaled = True

    def __init__(
        self, momentum: BelowOne = 0.9, weight_decay: NonNegative = 0.0005, trust: Positive = 0.001
    ) -> None:
        super().__init__()
        self.momentum, self.weight_decay, self.trust = momentum, weight_decay, trust
        self.preconditioned = momentum, "ordinary", 1.0

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor:
        return _scale(self.layout, torch.ones_like(points), 1 / self._ratios(points, gradients))

    def _ratios(self, points: Tensor, gradients: Tensor) -> Tensor:
        """Return the ratios r (n, slots)."""
        w, g = slot_norms(self.layout, points), slot_norms(self.layout, gradients)
        ratios = self.trust * w / (g + self.weight_decay * w)
        return torch.where((w > 0) & (g > 0), ratios, 1.0)

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        ratios = self._ratios(points, gradients)
        scaled = _scale(self.layout, torch.add(gradients, points, alpha=self.weight_decay), ratios)
        v = scaled.add_(self.state["momentum"], alpha=self.momentum)
        self.state = {"momentum": v}
        return v


@registry.optimizers.add("lamb")
class LAMB(Optimizer):
    """LAMB (You et al. 2020, Algorithm 2, φ the identity): Adam, then a ratio for each parameter tensor.

    m ← β₁ m + (1 − β₁) g, v ← β₂ v + (1 − β₂) g²; m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ); s = m̂/(√v̂ + ε) + λ p;
    u = s ‖p‖/‖s‖ for each parameter tensor, biases and normalization included, and u = s where either norm is
    0, as in common implementations. Weight decay λ is decoupled.

    Args:
        beta1: β₁. Source: You et al. 2020, for BERT.
        beta2: β₂. Source: You et al. 2020, for BERT.
        epsilon: ε. Source: You et al. 2020, for BERT.
        weight_decay: λ. Source: You et al. 2020, for BERT.
    """

    names = ("first_moment", "second_moment")
    linear = False

    def __init__(
        self,
        beta1: BelowOne = 0.9,
        beta2: BelowOne = 0.999,
        epsilon: Positive = 1e-6,
        weight_decay: NonNegative = 0.01,
    ) -> None:
        super().__init__()
        self.betas, self.epsilon, self.weight_decay = (beta1, beta2), epsilon, weight_decay
        self.preconditioned = beta1, "ordinary", 1 - beta1

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        beta1, beta2 = self.betas
        first = self.state["first_moment"].lerp(gradients, 1 - beta1)
        second = torch.addcmul(beta2 * self.state["second_moment"], gradients, gradients, value=1 - beta2)
        self.state = {"first_moment": first, "second_moment": second}
        s = torch.div(first, self._root(step)).add_(points, alpha=self.weight_decay)
        return _scale(self.layout, s, self._ratios(points, s))

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor:
        root = self._root(step)
        s = torch.div(self.state["first_moment"], root).add_(points, alpha=self.weight_decay)
        return _scale(self.layout, root, 1 / self._ratios(points, s))

    def _root(self, step: int) -> Tensor:
        """Return the divisor of m, (√v̂ + ε)(1 − β₁ᵗ)."""
        beta1, beta2 = self.betas
        root = (self.state["second_moment"] / (1 - beta2**step)).sqrt_().add_(self.epsilon)
        return root.mul_(1 - beta1**step)

    def _ratios(self, points: Tensor, s: Tensor) -> Tensor:
        """Return the ratios ‖p‖/‖s‖ (n, slots)."""
        w, norms = slot_norms(self.layout, points), slot_norms(self.layout, s)
        return torch.where((w > 0) & (norms > 0), w / norms, 1.0)


def slot_norms(layout: Layout, v: Tensor) -> Tensor:
    """Return the norms (n, slots) of each learner's parameter tensors."""
    return torch.stack([vector_norm(v[:, slot.place]).to(v) for slot in layout.slots], dim=1)


def _scale(layout: Layout, v: Tensor, ratios: Tensor) -> Tensor:
    """Multiply each learner's parameter tensors in ``v`` (n, P) by ratios (n, slots), in place."""
    for slot, ratio in zip(layout.slots, ratios.unbind(1), strict=True):
        v[:, slot.place] *= ratio[:, None]
    return v


#: The roles of parameters, see :func:`role_of`.
ROLES = ("matrix", "bias", "norm", "embedding", "head")
#: The group of the parameters that are in no other group.
OTHERS = "others"


def role_of(slot: Slot) -> str:
    """Return one of ROLES: norms and biases first, then embeddings, then the last layer, the head."""
    return slot.role if slot.role in ("norm", "bias") else slot.layer or "matrix"


@contextlib.contextmanager
def naming_group(pattern: str) -> Iterator[None]:
    """Make the InputErrors inside the block name the group ``pattern``."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("optimizer", f"optimizer.groups.{pattern}", 1)) from error


def group_options(pattern: str, table: Any) -> tuple[bool, float, dict[str, Any]]:
    """Return whether the group is frozen, its factor of the learning rate, and its further options.

    Args:
        pattern: the group's name.
        table: as in the recipe.

    Raises:
        InputError: for values that are not allowed.
    """
    where = f"optimizer.groups.{pattern}"
    options = dict(fit(where, table, dict))
    frozen = fit(f"{where}.frozen", options.pop("frozen", False), bool)
    factor = fit(f"{where}.lr_factor", options.pop("lr_factor", 1.0), NonNegative)
    if "lr" in options:
        raise InputError(f"{where}.lr: not allowed, give lr_factor, by which the recipe's rate is multiplied")
    if frozen and (options or factor != 1.0):
        raise InputError(f"{where}.frozen: true is not allowed with {', '.join(options) or 'lr_factor'}")
    return frozen, factor, options


@dataclass
class Member:
    """A group of parameters.

    Attributes:
        optimizer: the group's optimizer; None for a frozen group.
        factor: the group's learning rate is the run's times this factor.
        slots: the group's parameter tensors in θ.
    """

    optimizer: Optimizer | None
    factor: float = 1.0
    slots: tuple[Slot, ...] = ()


class Grouped(Optimizer):
    """Each group g has its own optimizer and direction: u = f u_g(α f), f the group's factor; 0 if frozen.

    A group's name is a role, a pattern of parameter names such as "*.bias", or the beginning of names up to a
    dot. A parameter belongs to the first group that fits its role or name. The names in the state begin with
    the group's name.

    Args:
        base: the optimizer of the parameters that are in no group.
        groups: group -> its optimizer and factor, without slots.
    """

    def __init__(self, base: Optimizer, groups: Mapping[str, Member]) -> None:
        super().__init__()
        self._groups = {**groups, OTHERS: Member(base)}
        self._present: dict[str, Member] = {}
        members = self._groups.values()
        optimizers = [m.optimizer for m in members if m.optimizer]
        all_move = len(optimizers) == len(members)
        plain = all_move and all(m.factor == 1 for m in members)
        self.linear = all(o.linear for o in optimizers)
        self.direction_is_gradient = plain and all(o.direction_is_gradient for o in optimizers)
        self.gradient_scaled = any(o.gradient_scaled for o in optimizers)
        self.names = tuple(name for o in optimizers for name in o.names)
        if plain and len({o.heavy_ball for o in optimizers}) == 1:
            self.heavy_ball = base.heavy_ball
        if all_move and len({o.preconditioned for o in optimizers}) == 1:
            self.preconditioned = base.preconditioned
        self.counters = frozenset(
            f"{name}.{key}" for name, m in self._groups.items() if m.optimizer for key in m.optimizer.counters
        )

    def start(self, layout: Layout, weights: Tensor) -> None:
        self.layout, self.state, self._present = layout, {}, {}
        free = list(layout.slots)  # the tensors that are in no group yet
        for name, member in self._groups.items():
            slots = tuple(s for s in free if name == OTHERS or _fits(name, s))
            free = [s for s in free if s not in slots]
            if not slots and name == OTHERS:
                continue
            if not slots:
                roles = dict.fromkeys(role_of(s) for s in layout.slots)
                names = [s.name for s in layout.slots]
                raise InputError(
                    f"optimizer.groups.{name}: fits no parameter that is left{near(name, names)} "
                    f"(allowed: this model's roles {', '.join(roles)}, names and patterns such as {names[0]})"
                )
            self._present[name] = member = dataclasses.replace(member, slots=slots)
            if member.optimizer:
                with contextlib.nullcontext() if name == OTHERS else naming_group(name):
                    member.optimizer.start(_apart(slots), cut(weights, slots))
                self.state |= _prefixed(name, member.optimizer.state)

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        u = torch.zeros_like(points)
        state: dict[str, Tensor] = {}
        for name, optimizer, member in self._moving():
            rate = lr * member.factor
            part = optimizer.directions(cut(gradients, member.slots), cut(points, member.slots), rate, step)
            put(u, member.slots, part * member.factor)
            state |= _prefixed(name, optimizer.state)
        self.state = state
        return u

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor | None:
        """Join the groups' preconditioners over their factors; None if one is missing, or a factor 0."""
        p = torch.full_like(points, torch.inf)
        for _, optimizer, member in self._moving():
            part = optimizer.preconditioner(cut(points, member.slots), cut(gradients, member.slots), step)
            if part is None or not member.factor:
                return None
            put(p, member.slots, part / member.factor)
        return p

    def _moving(self) -> Iterator[tuple[str, Optimizer, Member]]:
        """Yield name, optimizer and group of each group that is not frozen, after restoring its state."""
        for name, member in self._present.items():
            if optimizer := member.optimizer:
                optimizer.state = {key: self.state[f"{name}.{key}"] for key in optimizer.state}
                yield name, optimizer, member


def _fits(pattern: str, slot: Slot) -> bool:
    if pattern in ROLES:
        return role_of(slot) == pattern
    return fnmatchcase(slot.name, pattern) or slot.name.startswith(f"{pattern}.")


def _apart(slots: tuple[Slot, ...]) -> Layout:
    """Return the layout of these parameter tensors alone."""
    offsets = itertools.accumulate((slot.size for slot in slots), initial=0)
    return Layout(tuple(dataclasses.replace(s, offset=o) for s, o in zip(slots, offsets, strict=False)))


def _prefixed(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in state.items()}
