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

#: A setting that begins so takes the key out, as in Hydra.
UNSET = "~"
#: The tables whose keys depend on their name, and where it is looked up.
NAMED: dict[str, Any] = {
    "algorithm": registry.algorithms,
    "optimizer": optimizer,
    "model": registry.models,
    "data": registry.data_sets,
}


def changed(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Change ``values`` by ``settings``, values by dotted key, and return it.

    "~KEY" takes a key out. Where a table's name becomes another one, keys that only the old name has go, and
    a warning says which.
    """
    before = {table: table_name(values, table) for table in NAMED}
    for key, value in settings.items():
        *tables, last = key.split(".")
        if len(tables) > MAX_DEPTH:
            raise InputError(f"settings: a key has {len(tables) + 1} parts, at most {MAX_DEPTH} are allowed")
        if key.startswith(UNSET):
            _take_out(values, key)
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


def _take_out(values: dict[str, Any], key: str) -> None:
    """Remove what "~KEY" names."""
    *tables, last = key.removeprefix(UNSET).split(".")
    inner: Any = values
    for table in tables:
        inner = inner.get(table) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        keys = ", ".join(inner) if isinstance(inner, dict) and inner else "no such table"
        raise InputError(f"settings: '{key}' is not allowed, the recipe has no such key (it has: {keys})")
    del inner[last]


def _drop_keys_of(old: str, table: str, values: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Take out those keys of a table that its new name does not have and ``settings`` do not give."""
    name = str(values["name"])
    if table == "optimizer":
        allowed = {optimizer.GROUPS, *optimizer.options(optimizer.full_name(name), {})}
    elif name in NAMED[table]:
        allowed = {"split", *inspect.signature(NAMED[table][name]).parameters}
    else:
        return  # code of the user, whose options are known when it is run; another name is refused later
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

    "~KEY", which takes a key out, is a key without a value.

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
    """Return the tables of a recipe: where, ``needs``, the values, and the defaults of what has needs."""
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
        if "name" in group:  # else it is frozen
            yield named(where, optimizer, optimizer.make(group["name"], given).needs, group["name"], given)


def _is_true(term: str, facts: Mapping[str, Any]) -> Any:
    """Return whether ``term`` is true: the name of a fact, "KEY < VALUE", or "KEY + KEY <= VALUE"."""
    if term in facts:
        return facts[term]
    keys, sign, bound = term.rsplit(" ", 2)
    value = functools.reduce(operator.add, (facts[key] for key in keys.split(" + ")))
    return COMPARE[sign](value, facts[bound] if bound in facts else type(value)(bound))


def idle(recipe: Any) -> dict[str, tuple[Any, str]]:
    """Return the settings of a :class:`.Recipe` that differ from the defaults without effect.

    Returns:
        Key -> (value, the unmet conditions for an effect, in words).
    """
    schedule, monitor, rule = recipe.schedule, recipe.monitor, recipe.rule()
    method = optimizer.make(*recipe.part("optimizer"))
    instruments = [*monitor.instruments, *(["lambda-max"] if monitor.sharpness else [])]
    keys_of_instruments = {key for name in instruments for key in registry.instruments[name].reads}
    facts = {
        "learners": recipe.learners,
        "steps": recipe.steps,
        CHANGES: schedule.warmup or schedule.milestones or schedule.anneal != 1 or schedule.cosine,
        SPLITS: method.direction_is_gradient and any(map(rule.follows_mean_direction, range(1, 100))),
        STATE: method.names,
        OTHER: method.names or not method.linear,
    }
    settings = {}
    for where, needs, values, defaults in _tables(recipe):
        for key, condition in needs.items():
            if values.get(key) == defaults.get(key):
                continue
            terms = {**facts, **values, READ: key in keys_of_instruments}
            # A condition is alternatives of terms: "A and B or C".
            alternatives = [alternative.split(" and ") for alternative in condition.split(" or ")]
            unmet = [
                " and ".join(term for term in alternative if not _is_true(term, terms))
                for alternative in alternatives
            ]
            if all(unmet):
                settings[f"{where}.{key}"] = values[key], " or ".join(dict.fromkeys(unmet))
    spec = recipe.spec("optimizer")
    groups = spec.options.pop(optimizer.GROUPS, {})
    unchanged = {"name": spec.name, "lr_factor": 1.0, **spec.options}
    if all(group == unchanged for group in groups.values()):
        for pattern in groups:
            value = recipe.optimizer[optimizer.GROUPS][pattern]
            settings[f"optimizer.groups.{pattern}"] = value, "a setting of its own"
    return settings


def refuse_idle(recipe: Any) -> Any:
    """Return ``recipe``, or raise InputError for a setting without effect."""
    for key, (value, needs) in idle(recipe).items():
        raise InputError(f"{key}: {value!r} is not allowed, it changes nothing without {needs}; leave it out")
    return recipe
