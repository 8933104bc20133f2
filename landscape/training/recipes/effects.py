"""Settings without effect: a recipe is refused if one of them is no default."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.training import optimizer

# What ``needs`` of tables, rules and optimizers may name besides options: facts about the run.
CHANGES, SPLITS = "a rate that changes", "steps along the mean gradient"
STATE, READ = "an optimizer with a state", "an instrument that reads it"
OTHER = "an optimizer other than plain SGD"
#: Of the tables that have no name.
NEEDS: dict[str, dict[str, str]] = {
    "schedule": {"unit": CHANGES, "factor": "milestones", "milestones": "factor != 1"},
    "decompose": {"samples": "every > 0", "split": f"every > 0 and {SPLITS}"},
    "monitor": {"every": "instruments", **dict.fromkeys(("samples", "k", "draws", "rho", "window"), READ)},
}
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, "!=": operator.ne}


def _tables(recipe: Any) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]]:
    """The tables of a recipe: where, ``needs``, the values, and the defaults of what has needs."""
    for table, needs in NEEDS.items():
        values = getattr(recipe, table)
        yield table, needs, vars(values), vars(type(values)())

    def named(where: str, kinds: Any, needs: Mapping[str, str], name: str, given: dict[str, Any]) -> Any:
        plain = {key: value for key, value in given.items() if key not in needs}
        return where, needs, kinds.options(name, given), kinds.options(name, plain)

    yield named("algorithm", registry.algorithms, recipe.rule().needs, *recipe.part("algorithm"))
    name, given = recipe.part("optimizer")
    options = optimizer.options(name, given)
    groups = {f"optimizer.groups.{key}": group for key, group in options.pop(optimizer.GROUPS, {}).items()}
    for where, group in {"optimizer": {"name": name, **options}, **groups}.items():
        own = {key: value for key, value in group.items() if key not in ("name", "lr_factor", "frozen")}
        if "name" in group:  # else it is frozen
            yield named(where, optimizer, optimizer.make(group["name"], own).needs, group["name"], own)


def _holds(term: str, known: Mapping[str, Any]) -> Any:
    """Return whether a fact, or "KEY < VALUE", or "KEY + KEY <= VALUE", is so."""
    if term in known:
        return known[term]
    keys, sign, other = term.rsplit(" ", 2)
    value = functools.reduce(operator.add, (known[key] for key in keys.split(" + ")))
    return COMPARE[sign](value, known[other] if other in known else type(value)(other))


def idle(recipe: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a :class:`.Recipe` that are no defaults and change nothing: key -> value, its needs."""
    s, m, rule = recipe.schedule, recipe.monitor, recipe.rule()
    own = optimizer.make(*recipe.part("optimizer"))
    instruments = [*m.instruments, *(["lambda-max"] if m.sharpness else [])]
    read = {key for name in instruments for key in registry.instruments[name].reads}
    facts = {
        "learners": recipe.learners,
        "steps": recipe.steps,
        CHANGES: s.warmup or s.milestones or s.anneal != 1 or s.cosine,
        SPLITS: own.direction_is_gradient and any(map(rule.follows_mean_direction, range(1, 100))),
        STATE: own.names,
        OTHER: own.names or not own.linear,
    }
    keys = {}
    for where, needs, values, defaults in _tables(recipe):
        for key, condition in needs.items():
            if values.get(key) == defaults.get(key):
                continue
            known = {**facts, **values, READ: key in read}
            ways = [way.split(" and ") for way in condition.split(" or ")]
            unmet = [" and ".join(term for term in way if not _holds(term, known)) for way in ways]
            if all(unmet):
                keys[f"{where}.{key}"] = values[key], " or ".join(dict.fromkeys(unmet))
    name, given = recipe.part("optimizer")
    options = optimizer.options(name, given)
    groups = options.pop(optimizer.GROUPS, {})
    if all(group == {"name": name, "lr_factor": 1.0, **options} for group in groups.values()):
        keys |= {
            f"optimizer.groups.{key}": (given[optimizer.GROUPS][key], "a setting of its own")
            for key in groups
        }
    return keys


def refuse_idle(recipe: Any) -> Any:
    """``recipe``; InputError for a setting without effect."""
    for key, (value, needs) in idle(recipe).items():
        raise InputError(f"{key}: {value!r} is not allowed, it changes nothing without {needs}; leave it out")
    return recipe
