"""Update rules by name; each is one small file, which adds itself to the registry."""

from __future__ import annotations

from typing import Any

from landscape.core.options import check_keywords
from landscape.core.registry import algorithms
from landscape.train.algorithms.base import Rule

__all__ = ["Rule", "make", "names", "options"]


def names() -> list[str]:
    """The names that :func:`make` knows, those of plugins included.

    Example:
        >>> {"ssgd", "dpsgd"} <= set(names())
        True
    """
    return algorithms.names()


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the rule's options, with defaults for the rest.

    Args:
        name: one of :func:`names`.
        given: the recipe's table "algorithm" without its name.

    Raises:
        InputError: for an unknown name, or an option that the rule does not have; it names the key.

    Example:
        >>> options("dpsgd", {"mixing": "ring(1)"})
        {'mixing': 'ring(1)', 'order': 'awc', 'buffers': 'keep'}
    """
    return check_keywords("algorithm", given, algorithms[name], given=("learners", "seed"))


def make(name: str, given: dict[str, Any], *, learners: int, seed: int) -> Rule:
    """A new rule for ``learners`` learners, its randomness from ``seed``.

    Args:
        name: one of :func:`names`.
        given: the rule's options; the others have their defaults.

    Returns:
        The rule, before :meth:`.Rule.start`.

    Raises:
        InputError: for an unknown name, or an option or value that is not allowed; it names the key.

    Example:
        >>> make("dpsgd", {"mixing": "ring(2)"}, learners=6, seed=0).stability_limit()
        0.8
    """
    rule: Rule = algorithms[name](learners=learners, seed=seed, **options(name, given))
    return rule
