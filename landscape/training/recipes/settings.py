"""Settings that change a recipe: values by dotted key, and texts KEY=VALUE that stand for them."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from landscape.core import registry
from landscape.core.errors import InputError, warn_caller
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
    before = {table: _name(values, table) for table in NAMED}
    for key, value in settings.items():
        *tables, last = key.split(".")
        if len(tables) > MAX_DEPTH:
            raise InputError(
                f"settings: a key of {len(tables) + 1} parts is not allowed, at most {MAX_DEPTH} are"
            )
        if key.startswith(UNSET):
            _take_out(values, key)
            continue
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise InputError(f"settings: '{key}' is not allowed, '{table}' is not a table")
        inner[last] = _plain(key, value)
    for table, old in before.items():
        if f"{table}.name" in settings and old not in (None, _name(values, table)):
            _drop_keys_of(old, table, values[table], settings)
    return values


def _name(values: Mapping[str, Any], table: str) -> Any:
    """The name in a table of a recipe; None where there is none."""
    found = values.get(table)
    default = "sgd" if table == "optimizer" else None
    return found.get("name", default) if isinstance(found, dict) else None


def _take_out(values: dict[str, Any], key: str) -> None:
    """Remove what "~KEY" names."""
    *tables, last = key.removeprefix(UNSET).split(".")
    inner: Any = values
    for table in tables:
        inner = inner.get(table) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        there = ", ".join(inner) if isinstance(inner, dict) and inner else "no such table"
        raise InputError(f"settings: '{key}' is not allowed, the recipe has no such key (it has: {there})")
    del inner[last]


def _drop_keys_of(old: str, table: str, values: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Take out those keys of a table that its new name does not have and ``settings`` do not give."""
    name = str(values["name"])
    if table == "optimizer":
        known = {optimizer.GROUPS, *optimizer.options(optimizer.full_name(name), {})}
    elif name in NAMED[table]:
        known = set(inspect.signature(NAMED[table][name]).parameters) | (
            {"split"} if table == "data" else set()
        )
    else:
        return  # code of the user, whose options are known when it is run; another name is refused later
    gone = [key for key in values if key not in {"name", *known} and f"{table}.{key}" not in settings]
    for key in gone:
        del values[key]
    if gone:
        keys = ", ".join(f"{table}.{key}" for key in gone)
        warn_caller(f"{keys}: left out, {old} has it and {name} does not")


def _plain(key: str, value: Any) -> Any:
    """``value`` of a key as TOML knows it; NumPy's numbers, paths and tuples become such values."""
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    if isinstance(value, (np.generic, Path)):
        return value.item() if isinstance(value, np.generic) else str(value)
    if not isinstance(value, (bool, int, float, str)):
        raise InputError(
            f"{key}: a {type(value).__name__} is not allowed, only text, numbers, lists and tables are"
        )
    return value


def parsed(settings: Iterable[str]) -> dict[str, Any]:
    """Values by dotted key of "KEY=VALUE" settings; the last of several for a key holds.

    "~KEY", which takes a key out, is a key without a value.

    Example:
        >>> parsed(["lr=0.5", "algorithm.name=dpsgd", "~epochs"])
        {'lr': 0.5, 'algorithm.name': 'dpsgd', '~epochs': None}
    """
    found: dict[str, Any] = {}
    for setting in settings:
        if setting.startswith(UNSET) and "=" not in setting:
            found[setting.strip()] = None
            continue
        key, value = key_and_value(setting)
        found.pop(key, None)  # it holds from here on
        found[key] = parse_value(value)
    return found


def key_and_value(setting: str) -> tuple[str, str]:
    """("lr", "0.5") of "lr=0.5"; InputError where it is not of that form.

    Example:
        >>> key_and_value("lr=0.5")
        ('lr', '0.5')
    """
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise InputError(f"settings: '{setting}' is not allowed, it must be KEY=VALUE, such as lr=0.5")
    return key.strip(), text


def parse_value(written: str) -> Any:
    """A TOML value; other text is a string without quotes, as in algorithm.name=dpsgd.

    Example:
        >>> parse_value("0.5"), parse_value("[1, 2]"), parse_value("dpsgd")
        (0.5, [1, 2], 'dpsgd')
    """
    try:
        return tomllib.loads(f"v = {written}")["v"]
    except tomllib.TOMLDecodeError:
        return written
    except (RecursionError, ValueError) as error:
        shown = f"{written[:20]}…" if len(written) > 20 else written
        raise InputError(f"settings: '{shown}' is not allowed ({' '.join(str(error).split())})") from error
