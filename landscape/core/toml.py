"""TOML: the one door for that of files, parsed within bounds, and how it is written here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from landscape.core.errors import InputError

# Bounds far above any recipe, within which any reader of TOML works (ours): characters, dots (a key with tens
# of thousands takes tomllib gigabytes), tables within tables.
MAX_LENGTH, MAX_DOTS, MAX_DEPTH = 10**6, 5000, 20


def parse(toml: str, where: str) -> dict[str, Any]:
    """The values in a TOML text.

    Raises:
        InputError: with ``where`` and the line, if it is not TOML, or too large or too deep for a recipe.

    Example:
        >>> parse("lr = 0.5", "recipe.toml")
        {'lr': 0.5}
    """
    if len(toml) > MAX_LENGTH or toml.count(".") > MAX_DOTS:
        raise InputError(
            f"{where}: {len(toml)} characters with {toml.count('.')} dots are not allowed in a recipe, at "
            f"most {MAX_LENGTH} with {MAX_DOTS}"
        )
    try:
        return bounded(tomllib.loads(toml), where)
    except RecursionError as error:
        raise InputError(f"{where}: more than {MAX_DEPTH} tables or lists within each other") from error
    except InputError:
        raise
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise InputError(f"{where}: not valid TOML ({error})") from error


def bounded(values: dict[str, Any], where: str) -> dict[str, Any]:
    """``values``; InputError where tables lie too deep, or a whole number has more than 64 bits."""
    stack: list[tuple[str, Any, int]] = [("", values, 0)]
    while stack:
        key, value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise InputError(f"{where}: more than {MAX_DEPTH} tables or lists within each other")
        if isinstance(value, (dict, list)):
            inner = value.items() if isinstance(value, dict) else ((key, v) for v in value)
            prefix = f"{key}." if key and isinstance(value, dict) else ""
            stack += [(f"{prefix}{k}", v, depth + 1) for k, v in inner]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            size = str(value) if value.bit_length() < 100 else f"a number of {value.bit_length()} bits"
            raise InputError(f"{key}: {size} is not allowed, whole numbers must lie between −2⁶³ and 2⁶³")
    return values


def toml_value(value: Any) -> str:
    """``value`` as TOML; JSON writes strings, booleans, finite numbers and lists of them the same way.

    Example:
        >>> toml_value({"name": "dpsgd", "delay": 2})
        '{"name" = "dpsgd", "delay" = 2}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)
    # JSON leaves one character as it is that TOML does not allow.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_text(values: Mapping[str, Any]) -> str:
    """``values`` as TOML; what is a mapping becomes a table, of which what is None is left out.

    Example:
        >>> print(toml_text({"seed": 0, "decompose": {"every": 10, "samples": None}}), end="")
        seed = 0
        <BLANKLINE>
        [decompose]
        every = 10
    """
    lines = [f"{k} = {toml_value(v)}" for k, v in values.items() if not isinstance(v, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping):
            entries = (f"{k} = {toml_value(v)}" for k, v in table.items() if v is not None)
            lines += ["", f"[{name}]", *entries]
    return "\n".join(lines) + "\n"
