"""Optimizers by name: from each learner's gradient to its direction u_j; the rule steps by −α u_j.

Each learner has a state of its own, (n, P), which is not averaged or exchanged unless the rule says so. Under
SSGD that is the same as one optimizer on the mean gradient if u is linear in the gradients, as SGD's is.
LARS's, LAMB's and most of torch's are not, so there every learner is given the mean gradient: all states and
directions are equal.

The learning rate stays outside the state, as in ``torch.optim.SGD``: a change does not rescale momentum.
"""

from __future__ import annotations

from typing import Any

from landscape.core.options import check_type, choose
from landscape.core.registry import optimizers
from landscape.training.optimizer import torch_optim
from landscape.training.optimizer.base import Grouped, Member, Optimizer, named, options_of
from landscape.training.optimizer.torch_optim import TorchOptimizer

GROUPS = "groups"  # the key of the table of groups


def names() -> list[str]:
    """The names that :func:`make` accepts in addition to "torch:CLASS", those of plugins included."""
    return sorted({*optimizers.names(), *torch_optim.short_names()})


def full_name(name: str) -> str:
    """The name by which recipes and results know an optimizer: "torch:AdamW" for "adamw" or "AdamW".

    Entries of the registry come first: "sgd" is this package's own.

    Raises:
        InputError: for an unknown name; it suggests the most similar one.
    """
    if torch_optim.is_torch(name) or name in optimizers:
        return name
    short = torch_optim.short_names()
    return short.get(name.lower()) or choose("optimizer.name", name, names())


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the optimizer's options, with defaults for the rest.

    Args:
        name: one of :func:`names`, or "torch:CLASS" with a class of ``torch.optim``.
        given: the recipe's table "optimizer" without its name. A table "groups" in it has further tables, by
            role or pattern of names: a group has the optimizer's own options where it changes none.

    Raises:
        InputError: for an unknown name, or an option that the optimizer does not have; it names the key.
    """
    own = {key: value for key, value in given.items() if key != GROUPS}
    name = full_name(name)
    chosen = (torch_optim if torch_optim.is_torch(name) else optimizers).options(name, own)
    tables = check_type("optimizer.groups", given.get(GROUPS, {}), dict)
    for pattern, table in tables.items():
        frozen, factor, rest = options_of(pattern, table)
        if frozen:
            tables = tables | {pattern: {"frozen": True}}
            continue
        with named(pattern):
            other = full_name(str(rest.pop("name", name)))
            inner = options(other, (own if other == name else {}) | rest)
        # In an order that does not depend on what is given: recipes are compared as texts.
        tables = tables | {pattern: {"name": other, "lr_factor": factor, **dict(sorted(inner.items()))}}
    return chosen | ({GROUPS: tables} if tables else {})


def make(name: str, given: dict[str, Any]) -> Optimizer:
    """A new optimizer; :meth:`.Optimizer.start` gives it its learners.

    Args:
        name: one of :func:`names`, or "torch:CLASS" with a class of ``torch.optim``.
        given: its options; the others have their defaults.

    Raises:
        InputError: for an unknown name, or an option or value that is not allowed; it names the key.
    """
    name, chosen = full_name(name), options(name, given)
    groups = {pattern: options_of(pattern, table) for pattern, table in chosen.pop(GROUPS, {}).items()}
    base: Optimizer = (
        TorchOptimizer(name, chosen) if torch_optim.is_torch(name) else optimizers[name](**chosen)
    )
    if not groups:
        return base
    members = {}
    for pattern, (frozen, factor, table) in groups.items():
        with named(pattern):
            members[pattern] = Member(None if frozen else make(str(table.pop("name")), table), factor)
    return Grouped(base, members)
