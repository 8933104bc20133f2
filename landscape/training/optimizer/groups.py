"""Parameters in groups, each with an optimizer and a rate of its own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from landscape.core.errors import InputError
from landscape.core.options import NonNegative, check_type, near
from landscape.problem.layout import Layout, Slot, cut, put
from landscape.training.optimizer.base import Optimizer

#: What the parameters of a role are, see :func:`role_of`.
ROLES = ("matrix", "bias", "norm", "embedding", "head")
#: The group of the parameters that no other group has.
OTHERS = "others"


def role_of(slot: Slot) -> str:
    """One of ROLES: norms and biases first, then embeddings, then the last layer, the head."""
    return slot.role if slot.role in ("norm", "bias") else slot.layer or "matrix"


@contextlib.contextmanager
def named(pattern: str) -> Iterator[None]:
    """Messages about the optimizer inside are about that of the group."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("optimizer", f"optimizer.groups.{pattern}", 1)) from error


def options_of(pattern: str, table: Any) -> tuple[bool, float, dict[str, Any]]:
    """(whether the group is frozen, its factor of the learning rate, its further options).

    Args:
        pattern: the group's name.
        table: as in the recipe.

    Raises:
        InputError: for values that are not allowed.
    """
    where = f"optimizer.groups.{pattern}"
    rest = dict(check_type(where, table, dict))
    frozen = check_type(f"{where}.frozen", rest.pop("frozen", False), bool)
    factor = check_type(f"{where}.lr_factor", rest.pop("lr_factor", 1.0), NonNegative)
    if "lr" in rest:
        raise InputError(f"{where}.lr: not allowed, give lr_factor, by which the recipe's rate is multiplied")
    if frozen and (rest or factor != 1.0):
        raise InputError(
            f"{where}.frozen: true is not allowed with other keys ({', '.join(rest) or 'lr_factor'})"
        )
    return frozen, factor, rest


@dataclass
class Member:
    """A group of parameters.

    Attributes:
        optimizer: that of the group; None where it is frozen.
        factor: its learning rate is the run's times this.
        slots: its parameter tensors in θ.
    """

    optimizer: Optimizer | None
    factor: float = 1.0
    slots: tuple[Slot, ...] = ()


class Grouped(Optimizer):
    """Each group's direction from its own optimizer: u = f u_g(α f), f the factor of its rate; 0 if frozen.

    A group is the parameters of a role, or those whose name is a pattern such as "*.bias" or begins with it
    and a dot; a parameter belongs to the first group that it fits. The state's names begin with the group's.

    Args:
        base: the optimizer of the parameters that no group has.
        groups: group -> its optimizer and rate, without slots.
    """

    def __init__(self, base: Optimizer, groups: Mapping[str, Member]) -> None:
        super().__init__()
        self._groups = {**groups, OTHERS: Member(base)}
        self._present: dict[str, Member] = {}
        members = self._groups.values()
        own = [m.optimizer for m in members if m.optimizer]
        plain = len(own) == len(members) and all(m.factor == 1 for m in members)
        self.linear = all(each.linear for each in own)
        self.direction_is_gradient = plain and all(each.direction_is_gradient for each in own)
        self.gradient_scaled = any(each.gradient_scaled for each in own)
        same = {each.heavy_ball for each in own}
        self.heavy_ball = base.heavy_ball if plain and len(same) == 1 else None
        shared = {each.preconditioned for each in own}
        self.preconditioned = base.preconditioned if len(own) == len(members) and len(shared) == 1 else None
        self.counters = frozenset(
            f"{name}.{key}" for name, m in self._groups.items() if m.optimizer for key in m.optimizer.counters
        )

    def start(self, layout: Layout, weights: Tensor) -> None:
        self.layout, left, self.state, self._present = layout, list(layout.slots), {}, {}
        for name, member in self._groups.items():
            slots = tuple(s for s in left if name == OTHERS or _fits(name, s))
            left = [s for s in left if s not in slots]
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
                with contextlib.nullcontext() if name == OTHERS else named(name):
                    member.optimizer.start(_apart(slots), cut(weights, slots))
                self.state |= _prefixed(name, member.optimizer.state)

    def directions(self, gradients: Tensor, points: Tensor, lr: float, step: int) -> Tensor:
        u, state = torch.zeros_like(points), dict[str, Tensor]()
        for name, each, member in self._each():
            rate = lr * member.factor
            part = each.directions(cut(gradients, member.slots), cut(points, member.slots), rate, step)
            put(u, member.slots, part * member.factor)
            state |= _prefixed(name, each.state)
        self.state = state
        return u

    def preconditioner(self, points: Tensor, gradients: Tensor, step: int) -> Tensor | None:
        """Join the preconditioners of the groups, over their factors; None where one is missing or still."""
        p = torch.full_like(points, torch.inf)
        for _, each, member in self._each():
            part = each.preconditioner(cut(points, member.slots), cut(gradients, member.slots), step)
            if part is None or not member.factor:
                return None
            put(p, member.slots, part / member.factor)
        return p

    def _each(self) -> Iterator[tuple[str, Optimizer, Member]]:
        """The groups that move, each optimizer with its part of the state."""
        for name, member in self._present.items():
            if each := member.optimizer:
                each.state = {key: self.state[f"{name}.{key}"] for key in each.state}
                yield name, each, member


def _fits(pattern: str, slot: Slot) -> bool:
    if pattern in ROLES:
        return role_of(slot) == pattern
    return fnmatchcase(slot.name, pattern) or slot.name.startswith(f"{pattern}.")


def _apart(slots: tuple[Slot, ...]) -> Layout:
    """The layout of these parameter tensors alone."""
    moved, offset = [], 0
    for slot in slots:
        moved.append(dataclasses.replace(slot, offset=offset))
        offset += slot.size
    return Layout(tuple(moved))


def _prefixed(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in state.items()}
