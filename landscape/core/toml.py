"""TOML as this package writes it: a value a line, then its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
