"""Update rules by name; each is one small file. ``make("dpsgd", {"mixing": "ring(2)"}, …)``."""

from __future__ import annotations

from typing import Any

from landscape.core.options import check_keywords
from landscape.core.registry import algorithms
from landscape.train.algorithms.ad_psgd import ADPSGD
from landscape.train.algorithms.async_sgd import AsyncSGD
from landscape.train.algorithms.base import Rule
from landscape.train.algorithms.dpsgd import DPSGD
from landscape.train.algorithms.dsgd_ac import DSGDAC
from landscape.train.algorithms.local_sgd import LocalSGD
from landscape.train.algorithms.sgp import SGP
from landscape.train.algorithms.slowmo import DiLoCo, SlowMo
from landscape.train.algorithms.ssgd import SSGD
from landscape.train.algorithms.ssgd_noise import SSGDNoise

__all__ = ["Rule", "make", "names", "options"]

_REGISTRY: dict[str, type[Rule]] = {
    "ssgd": SSGD,
    "ssgd*": SSGDNoise,
    "dpsgd": DPSGD,
    "local-sgd": LocalSGD,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "async-sgd": AsyncSGD,
    "ad-psgd": ADPSGD,
    "sgp": SGP,
    "dsgd-ac": DSGDAC,
}

for _name, _rule in _REGISTRY.items():
    algorithms.add(_name)(_rule)


def names() -> list[str]:
    """The names that :func:`make` knows, those of plugins included."""
    return algorithms.names()


def options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` checked against the rule's options, defaults filled in; InputError names the key."""
    return check_keywords("algorithm", given, algorithms[name], given=("learners", "seed"))


def make(name: str, given: dict[str, Any], *, learners: int, seed: int) -> Rule:
    """A new rule for ``learners`` learners, its randomness from ``seed``."""
    rule: Rule = algorithms[name](learners=learners, seed=seed, **options(name, given))
    return rule
