"""Settings without effect: a recipe for a new run is refused if one of them is no default."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.training import optimizer
from landscape.training.optimizer.base import options_of
from landscape.training.recipes.settings import NAMED

# What ``needs`` of tables, rules and optimizers may name besides "KEY < VALUE": facts about the run.
CHANGES, SPLITS = "a rate that changes", "steps along the mean gradient"
MONITOR = {
    key: f"an instrument that reads monitor.{key}" for key in ("samples", "k", "draws", "rho", "window")
}
#: Of the tables that have no name.
NEEDS: dict[str, dict[str, str]] = {
    "evaluate": {"bn_samples": "BatchNorm in the model"},
    "schedule": {"unit": CHANGES, "factor": "schedule.milestones"},
    "decompose": {"samples": "every > 0", "split": f"every > 0 and {SPLITS}"},
    "monitor": {"every": "monitor.instruments", **MONITOR},
}
COMPARE = {"<": operator.lt, ">": operator.gt, "!=": operator.ne}


def _facts(recipe: Any, batchnorm: bool) -> dict[str, Callable[[], Any]]:
    s, m, rule = recipe.schedule, recipe.monitor, recipe.rule()
    own = optimizer.make(*recipe.part("optimizer"))

    def read(key: str) -> bool:
        names = [*m.instruments, *(["lambda-max"] if m.sharpness else [])]
        kinds = [registry.instruments[name] for name in names]
        return any(i.reads is None or key in i.reads or (key == "samples" and i.on_sample) for i in kinds)

    return {
        CHANGES: lambda: s.warmup or s.milestones or s.anneal != 1 or s.cosine,
        SPLITS: lambda: own.direction_is_gradient and any(map(rule.follows_mean_direction, range(1, 100))),
        "BatchNorm in the model": lambda: batchnorm,
        "an optimizer with a state": lambda: own.remembers,
        "schedule.milestones": lambda: s.milestones,
        "monitor.instruments": lambda: m.instruments,
        **{words: functools.partial(read, key) for key, words in MONITOR.items()},
    }


def _tables(recipe: Any) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, Any], Callable[[str], Any]]]:
    """The tables of a recipe: where, ``needs``, the values, and the default of a key."""
    for table, needs in NEEDS.items():
        values = vars(getattr(recipe, table))
        yield table, needs, values, vars(type(getattr(recipe, table))()).get

    def part(where: str, needs: Mapping[str, str], name: str, given: dict[str, Any]) -> Any:
        made = functools.partial(NAMED[where.partition(".")[0]].options, name)
        return where, needs, made(given), lambda key: made({k: given[k] for k in given if k != key})[key]

    yield part("algorithm", recipe.rule().needs, *recipe.part("algorithm"))
    name, own = recipe.part("optimizer")
    groups = own.pop(optimizer.GROUPS, {})
    yield part("optimizer", optimizer.make(name, own).needs, name, own)
    for pattern, table in groups.items():
        frozen, _, rest = options_of(pattern, table)
        other = optimizer.full_name(str(rest.pop("name", name)))
        rest = (own if other == name else {}) | rest
        if not frozen:
            yield part(f"optimizer.groups.{pattern}", optimizer.make(other, rest).needs, other, rest)


def idle(recipe: Any, *, batchnorm: bool = True) -> dict[str, tuple[Any, str]]:
    """The settings of a :class:`.Recipe` that are no defaults and change nothing: key -> value, its needs.

    ``batchnorm``: whether the model has BatchNorm, once that is known.
    """
    facts, keys = _facts(recipe, batchnorm), dict[str, tuple[Any, str]]()

    def holds(term: str, values: Mapping[str, Any]) -> Any:
        if term in facts:
            return facts[term]()
        key, sign, other = term.split()
        return COMPARE[sign](values[key], values[other] if other in values else type(values[key])(other))

    for where, needs, values, default in _tables(recipe):
        known = {"learners": recipe.learners, **values}
        for key, condition in needs.items():
            ways = (way.split(" and ") for way in condition.split(" or "))
            if key not in values or values[key] == default(key):
                continue
            if not any(all(holds(term, known) for term in way) for way in ways):
                keys[f"{where}.{key}"] = values[key], condition
    return keys


def refuse_idle(recipe: Any, begins: str = "", *, batchnorm: bool = True) -> Any:
    """``recipe``; InputError for a setting without effect whose key ``begins`` so; ``batchnorm`` as there."""
    for key, (value, needs) in idle(recipe, batchnorm=batchnorm).items():
        if key.startswith(begins):
            words = f"it changes nothing without {needs}; leave it out"
            raise InputError(f"{key}: {value!r} is not allowed, {words}")
    return recipe
