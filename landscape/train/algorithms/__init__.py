"""Update rules by name; each is one small file. ``make("dpsgd", {"mixing": "ring(2)"}, …)``."""

from __future__ import annotations

from typing import Any

from landscape.options import check_keywords, choose
from landscape.train.algorithms.base import Rule
from landscape.train.algorithms.dpsgd import DPSGD
from landscape.train.algorithms.ssgd import SSGD
from landscape.train.algorithms.ssgd_noise import SSGDNoise

__all__ = ["Rule", "make", "names", "options"]

_REGISTRY: dict[str, type[Rule]] = {"ssgd": SSGD, "ssgd*": SSGDNoise, "dpsgd": DPSGD}


def names() -> list[str]:
    """The names that :func:`make` knows."""
    return sorted(_REGISTRY)


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the rule's options, defaults filled in; InputError names the key."""
    rule = _REGISTRY[choose("algorithm.name", name, _REGISTRY)]
    return check_keywords("algorithm", given, rule, given=("learners", "seed"))


def make(name: str, given: dict[str, Any], *, learners: int, seed: int) -> Rule:
    """A new rule for ``learners`` learners, its randomness from ``seed``."""
    return _REGISTRY[choose("algorithm.name", name, _REGISTRY)](
        learners=learners, seed=seed, **options(name, given)
    )
