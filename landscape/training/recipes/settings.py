"""Settings that change a recipe: values by dotted key, and texts KEY=VALUE that stand for them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from landscape.core.errors import InputError
from landscape.core.options import MAX_DEPTH


def changed(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Change ``values`` by ``settings``, values by dotted key, and return it."""
    for key, value in settings.items():
        *tables, last = key.split(".")
        if len(tables) > MAX_DEPTH:
            raise InputError(
                f"settings: a key of {len(tables) + 1} parts is not allowed, at most {MAX_DEPTH} are"
            )
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise InputError(f"settings: '{key}' is not allowed, '{table}' is not a table")
        inner[last] = _plain(key, value)
    return values


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

    Example:
        >>> parsed(["lr=0.5", "algorithm.name=dpsgd"])
        {'lr': 0.5, 'algorithm.name': 'dpsgd'}
    """
    found: dict[str, Any] = {}
    for setting in settings:
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
