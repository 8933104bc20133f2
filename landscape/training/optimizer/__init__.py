"""Optimizers by name: from each learner's gradient to its direction u_j; the rule steps by −α u_j.

Each learner has a state of its own, (n, P), which is not averaged or exchanged unless the rule says so. Under
SSGD that is the same as one optimizer on the mean gradient if u is linear in the gradients, as SGD's is.
LARS's, LAMB's and most of torch's are not, so there every learner is given the mean gradient: all states and
directions are equal.

The learning rate stays outside the state, as in ``torch.optim.SGD``: a change does not rescale momentum.
"""

from __future__ import annotations

from typing import Any

from landscape.core.options import choose
from landscape.core.registry import optimizers
from landscape.training.optimizer import torch_optim
from landscape.training.optimizer.base import LAMB, LARS, SGD, Optimizer
from landscape.training.optimizer.torch_optim import TorchOptimizer

__all__ = ["LAMB", "LARS", "SGD", "Optimizer", "TorchOptimizer", "full_name", "make", "names", "options"]


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
        given: the recipe's table "optimizer" without its name.

    Raises:
        InputError: for an unknown name, or an option that the optimizer does not have; it names the key.
    """
    name = full_name(name)
    return (torch_optim if torch_optim.is_torch(name) else optimizers).options(name, given)


def make(name: str, given: dict[str, Any]) -> Optimizer:
    """A new optimizer; :meth:`.Optimizer.start` gives it its learners.

    Args:
        name: one of :func:`names`, or "torch:CLASS" with a class of ``torch.optim``.
        given: its options; the others have their defaults.

    Raises:
        InputError: for an unknown name, or an option or value that is not allowed; it names the key.
    """
    name, chosen = full_name(name), options(name, given)
    return TorchOptimizer(name, chosen) if torch_optim.is_torch(name) else optimizers[name](**chosen)
