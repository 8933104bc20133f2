"""Checks of what a user typed: names, numbers and keyword arguments, with errors that say what is allowed."""

from __future__ import annotations

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_args, get_origin

from landscape.core.errors import InputError

# The split that every analysis is of, unless told otherwise. Of the training set (ours): only there is all of
# it defined. Training goes down this loss, so that Δ(2), the limits on ηλ_max, the smoothing that the spread
# does and the minima that delay leaves are its; the others share it so that numbers of two commands compare.
# The papers' contours are of the test loss: their figures say so themselves, --split test elsewhere.
SPLIT = "train"


def choose(where: str, name: str, allowed: Iterable[str]) -> str:
    """Return ``name`` if it is among ``allowed``; else raise InputError naming the nearest allowed one."""
    known = sorted(allowed)
    if name in known:
        return name
    raise InputError(f"{where}: '{name}' is not known{near(name, known)} (allowed: {', '.join(known)})")


def near(name: str, known: Iterable[str]) -> str:
    """ "; did you mean '…'?" with the one of ``known`` that looks most like ``name``, or ""."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean '{found[0]}'?" if found else ""


def positive(where: str, value: float, *, least: float | None = None) -> None:
    """Raise InputError unless ``value`` is finite and > 0 (or ≥ ``least`` where given)."""
    bits = value.bit_length() if isinstance(value, int) else 0
    ok = value > 0 if least is None else value >= least
    if not ok or bits > 1023 or value == float("inf"):  # which no float holds
        allowed = "a finite number > 0" if least is None else f"a finite number ≥ {least:g}"
        shown = f"a whole number of {bits} bits" if bits > 1023 else value
        raise InputError(f"{where}: {shown} is not allowed, it must be {allowed}")


def quantity(where: str, text: str, units: Mapping[str, float], *, zero: bool = False) -> float:
    """The number before a unit, times what ``units`` says the unit is worth: "10Gbit/s", "50 us".

    Raises InputError naming ``where``, unless it is finite and > 0 (or ≥ 0 with ``zero``) and has a unit,
    spelt as in ``units``: Mb and MB are not the same.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+))?\s*(\D.*)", text.strip())
    value = float(f"{match[1]}e{match[2] or 0}") if match else -1.0
    if not match or match[3] not in units or not 0 <= value < float("inf") or not (value or zero):
        least = "≥" if zero else ">"
        known = ", ".join(units)
        raise InputError(
            f"{where}: '{text}' is not allowed, it must be a number {least} 0 with its unit ({known})"
        )
    return value * units[match[3]]


def below_one(where: str, value: float) -> None:
    """Raise InputError unless 0 ≤ ``value`` < 1."""
    if not 0 <= value < 1:
        raise InputError(f"{where}: {value} is not allowed, it must be ≥ 0 and < 1")


def _fits(value: Any, annotation: Any) -> bool:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin in (list, tuple):
        items = args[:1] if args else (Any,)
        return isinstance(value, (list, tuple)) and all(_fits(item, items[0]) for item in value)
    if annotation is float:  # an int is a fine float; a bool is neither
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return annotation is not None and isinstance(value, annotation)


def _spell(annotation: Any) -> str:
    if get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def check_type(where: str, value: Any, annotation: Any) -> Any:
    """Return ``value`` (an int given for a float becomes one) or raise InputError naming both types."""
    if not _fits(value, annotation):
        raise InputError(f"{where}: {value!r} is not allowed, it must be {_spell(annotation)}")
    return float(value) if annotation is float else value


def check_keywords(
    where: str, options: Mapping[str, Any], function: Callable[..., Any], given: Iterable[str] = ()
) -> dict[str, Any]:
    """Check ``options`` against the signature of ``function`` and return them with their defaults filled in.

    ``where`` is the dotted prefix of the keys, such as "model"; ``given`` names parameters that the caller
    supplies itself, which a user may not set.
    """
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    parameters = {
        name: p
        for name, p in inspect.signature(function).parameters.items()
        if name not in set(given) and name != "self"
    }
    checked = {}
    for key, value in options.items():
        choose(where, key, parameters)
        checked[key] = check_type(f"{where}.{key}", value, hints.get(key, Any))
    for name, p in parameters.items():
        if name not in checked:
            if p.default is inspect.Parameter.empty:
                raise InputError(f"{where}.{name}: missing, and there is no default")
            checked[name] = p.default
    return checked
