"""The values of a recipe: settings that change them, and those without effect."""

from __future__ import annotations

import functools
import inspect
import operator
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from landscape.core import registry
from landscape.core.errors import DataWarning, InputError, warn_caller
from landscape.core.options import MAX_DEPTH
from landscape.training import optimizer

#: The prefix of a setting that removes its key, as in Hydra.
UNSET = "~"
#: The tables whose keys depend on their name, and the registries of these names.
NAMED: dict[str, Any] = {
    "algorithm": registry.algorithms,
    "optimizer": optimizer,
    "model": registry.models,
    "data": registry.data_sets,
}


def with_changes(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Change ``values`` by ``settings``, values by dotted key, and return it.

    "~KEY" removes a key. If a table's name changes, keys that only the old name has are removed, with a
    warning.
    """
    before = {table: table_name(values, table) for table in NAMED}
    for key, value in settings.items():
        *tables, last = key.split(".")
        if len(tables) > MAX_DEPTH:
            raise InputError(f"settings: a key has {len(tables) + 1} parts, at most {MAX_DEPTH} are allowed")
        if key.startswith(UNSET):
            _remove(values, key)
            continue
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise InputError(f"settings: '{key}' is not allowed, '{table}' is not a table")
        inner[last] = plain_value(key, value)
    for table, old in before.items():
        if f"{table}.name" in settings and old not in (None, table_name(values, table)):
            _drop_keys_of(old, table, values[table], settings)
    return values


def table_name(values: Mapping[str, Any], table: str) -> Any:
    """Return the name in a table of a recipe; None for a table without a name."""
    part = values.get(table)
    default = "sgd" if table == "optimizer" else None
    return part.get("name", default) if isinstance(part, dict) else None


def _remove(values: dict[str, Any], key: str) -> None:
    """Remove the key of the setting "~KEY"."""
    *tables, last = key.removeprefix(UNSET).split(".")
    inner: Any = values
    for table in tables:
        inner = inner.get(table) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        keys = ", ".join(inner) if isinstance(inner, dict) and inner else "no such table"
        raise InputError(f"settings: '{key}' is not allowed, the recipe has no such key (it has: {keys})")
    del inner[last]


def _drop_keys_of(old: str, table: str, values: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Remove the keys of a table that neither its new name nor ``settings`` have, with a warning."""
    name = str(values["name"])
    if table == "optimizer":
        allowed = {optimizer.GROUPS, *optimizer.options(optimizer.full_name(name), {})}
    elif name in NAMED[table]:
        allowed = {"split", *inspect.signature(NAMED[table][name]).parameters}
    else:
        return  # the options of a user's code are unknown before it runs; other names are refused later
    removed = [key for key in values if key not in {"name", *allowed} and f"{table}.{key}" not in settings]
    for key in removed:
        del values[key]
    if removed:
        keys = ", ".join(f"{table}.{key}" for key in removed)
        warn_caller(f"{keys}: left out, {old} has it and {name} does not", DataWarning)


def plain_value(key: str, value: Any) -> Any:
    """Return ``value`` as TOML has it, also from NumPy's numbers and arrays, paths, tuples and ranges."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain_value(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain_value(key, item) for item in value]
    if not isinstance(value, (bool, int, float, str, Path)):
        raise InputError(key, value, allowed="text, a number, a list or a table")
    return str(value) if isinstance(value, Path) else value


def parsed(settings: Iterable[str]) -> dict[str, Any]:
    """Return the values of "KEY=VALUE" settings by dotted key; the last setting of a key counts.

    "~KEY", which removes a key, is a key without a value.

    Example:
        >>> parsed(["lr=0.5", "algorithm.name=dpsgd", "~epochs"])
        {'lr': 0.5, 'algorithm.name': 'dpsgd', '~epochs': None}
    """
    values: dict[str, Any] = {}
    for setting in settings:
        if setting.startswith(UNSET) and "=" not in setting:
            values[setting.strip()] = None
            continue
        key, value = key_and_value(setting)
        values.pop(key, None)  # the last one comes last
        values[key] = parse_value(value)
    return values


def key_and_value(setting: str) -> tuple[str, str]:
    """Return the key and the value of text such as "lr=0.5"; InputError for another form.

    Example:
        >>> key_and_value("lr=0.5")
        ('lr', '0.5')
    """
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise InputError(f"settings: '{setting}' is not allowed, it must be KEY=VALUE, such as lr=0.5")
    return key.strip(), text


def parse_value(written: str) -> Any:
    """Return a TOML value; other text is a string without quotes, as in algorithm.name=dpsgd.

    Example:
        >>> parse_value("0.5"), parse_value("[1, 2]"), parse_value("dpsgd")
        (0.5, [1, 2], 'dpsgd')
    """
    try:
        return tomllib.loads(f"v = {written}")["v"]
    except tomllib.TOMLDecodeError:
        return written
    except (RecursionError, ValueError) as error:
        start = f"{written[:20]}…" if len(written) > 20 else written
        raise InputError(f"settings: '{start}' is not allowed ({' '.join(str(error).split())})") from error


# Settings without effect, which a new recipe may not have.

# Facts about the run that ``needs`` of tables, rules and optimizers may name in addition to options.
RATE_CHANGES, ALONG_GRADIENT = "a rate that changes", "steps along the mean gradient"
HAS_STATE, IS_READ = "an optimizer with a state", "an instrument that reads it"
NOT_PLAIN_SGD = "an optimizer other than plain SGD"


#: The needs of the tables without a name.
NEEDS: dict[str, dict[str, str]] = {
    "schedule": {"unit": RATE_CHANGES, "factor": "milestones", "milestones": "factor != 1"},
    "decompose": {"samples": "every > 0", "split": f"every > 0 and {ALONG_GRADIENT}"},
    "monitor": {"every": "instruments", **dict.fromkeys(("samples", "k", "draws", "rho", "window"), IS_READ)},
}


COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, "!=": operator.ne}


def _tables(recipe: Any) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the tables of a recipe: the key, ``needs``, the values, and the values without these needs."""
    for table, needs in NEEDS.items():
        values = getattr(recipe, table)
        yield table, needs, vars(values), vars(type(values)())

    def named(where: str, kinds: Any, needs: Mapping[str, str], name: str, options: dict[str, Any]) -> Any:
        plain = {key: value for key, value in options.items() if key not in needs}
        return where, needs, kinds.options(name, options), kinds.options(name, plain)

    yield named("algorithm", registry.algorithms, recipe.rule().needs, *recipe.part("algorithm"))
    spec = recipe.spec("optimizer")
    groups = spec.options.pop(optimizer.GROUPS, {}).items()
    tables = {f"optimizer.groups.{key}": group for key, group in groups}
    for where, group in {"optimizer": {"name": spec.name, **spec.options}, **tables}.items():
        given = {key: value for key, value in group.items() if key not in ("name", "lr_factor", "frozen")}
        if "name" in group:  # a frozen group has no name
            yield named(where, optimizer, optimizer.make(group["name"], given).needs, group["name"], given)


def _is_true(term: str, facts: Mapping[str, Any]) -> Any:
    """Return whether ``term`` is true: the name of a fact, "KEY < VALUE", or "KEY + KEY <= VALUE"."""
    if term in facts:
        return facts[term]
    keys, sign, bound = term.rsplit(" ", 2)
    value = functools.reduce(operator.add, (facts[key] for key in keys.split(" + ")))
    return COMPARE[sign](value, facts[bound] if bound in facts else type(value)(bound))


def without_effect(recipe: Any) -> dict[str, tuple[Any, str]]:
    """Return the settings of a :class:`.Recipe` that differ from the default value and have no effect.

    Returns:
        Key -> (the key's value, the conditions under which the key would have an effect, in words).
    """
    schedule, monitor, rule = recipe.schedule, recipe.monitor, recipe.rule()
    run_optimizer = optimizer.make(*recipe.part("optimizer"))
    instruments = list(monitor.instruments)
    if monitor.sharpness:
        instruments.append("lambda-max")
    keys_of_instruments = {key for name in instruments for key in registry.instruments[name].reads}
    # Some rules move w_a along the mean gradient only in some steps; the first 99 steps include one of these.
    follows_mean = any(rule.follows_mean_direction(step) for step in range(1, 100))
    # ``run_optimizer.names`` are the names of the tensors in the optimizer's state.
    # A condition may name a key of its table or a key of this dict. ``learners`` and ``steps`` are
    # numbers for comparisons. Every other entry is true unless its value is False, 0 or empty.
    facts = {
        "learners": recipe.learners,
        "steps": recipe.steps,
        RATE_CHANGES: schedule.warmup or schedule.milestones or schedule.anneal != 1 or schedule.cosine,
        ALONG_GRADIENT: run_optimizer.direction_is_gradient and follows_mean,
        HAS_STATE: run_optimizer.names,
        NOT_PLAIN_SGD: run_optimizer.names or not run_optimizer.linear,
    }
    settings = {}
    for where, conditions, values, defaults in _tables(recipe):
        for key, condition in conditions.items():
            if values.get(key) == defaults.get(key):
                continue
            term_values = {**facts, **values, IS_READ: key in keys_of_instruments}
            # "A and B or C" has the alternatives "A and B" and "C". ``unmet`` has the false terms of each.
            unmet = []
            for alternative in condition.split(" or "):
                unmet_terms = [term for term in alternative.split(" and ") if not _is_true(term, term_values)]
                unmet.append(" and ".join(unmet_terms))
            if all(unmet):  # no alternative is true
                settings[f"{where}.{key}"] = values[key], " or ".join(dict.fromkeys(unmet))
    spec = recipe.spec("optimizer")
    groups = spec.options.pop(optimizer.GROUPS, {})
    # Groups have no effect if all of them have the recipe's own optimizer and options. Any group would have
    # an effect with "a setting of its own", a setting that differs from the recipe's.
    recipe_optimizer = {"name": spec.name, "lr_factor": 1.0, **spec.options}
    if all(group == recipe_optimizer for group in groups.values()):
        for pattern in groups:
            value = recipe.optimizer[optimizer.GROUPS][pattern]
            settings[f"optimizer.groups.{pattern}"] = value, "a setting of its own"
    return settings


def refuse_without_effect(recipe: Any) -> Any:
    """Return ``recipe``, or raise InputError for a setting without effect."""
    for key, (value, needs) in without_effect(recipe).items():
        raise InputError(f"{key}: {value!r} is not allowed, it changes nothing without {needs}; leave it out")
    return recipe
