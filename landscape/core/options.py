"""Checks of a user's names, numbers, keyword arguments and TOML, with errors that say what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import numbers
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from landscape.core.errors import InputError, LandscapeError

# The default split of all analyses: the training set (ours). Training minimizes its loss, so that Δ(2), the
# limits on ηλ_max, the smoothing by the spread and the minima that delay leaves are defined by it; the other
# analyses use it, too, so that results of two commands can be compared. The contours in the papers are of the
# test loss: the papers' figures set that themselves, elsewhere it is --split test.
SPLIT = "train"
#: All splits of a data set.
SPLITS = ("train", "test")


def choose(where: str, name: str, allowed: Iterable[str]) -> str:
    """Check that ``name`` is allowed, and return it.

    Args:
        where: the option that the name was given with, for the message.

    Raises:
        InputError: another name; the message suggests the most similar allowed one.

    Example:
        >>> choose("norm", "fliter", ["none", "filter", "layer"])
        Traceback (most recent call last):
        landscape.core.errors.InputError: norm: 'fliter' is not known; did you mean 'filter'? ...
    """
    known = sorted(allowed)
    if name in known:
        return name
    allowed = ", ".join(known) or "nothing here"
    raise InputError(f"{where}: '{name}' is not known{near(name, known)} (allowed: {allowed})")


def near(name: str, known: Iterable[str]) -> str:
    """The text "; did you mean '…'?" with the most similar name in ``known``; "" if none is similar.

    Example:
        >>> near("fliter", ["none", "filter"])
        "; did you mean 'filter'?"
    """
    similar = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean '{similar[0]}'?" if similar else ""


def positive(where: str, value: float, *, least: float | None = None) -> None:
    """Check that ``value`` is a number, no bool, that is finite and > 0, or ≥ ``least`` if that is given.

    Args:
        where: the option that the value was given with, for the message.

    Raises:
        InputError: another value.

    Example:
        >>> positive("grid", 0, least=1)
        Traceback (most recent call last):
        landscape.core.errors.InputError: grid: 0 is not allowed, it must be a finite number ≥ 1
    """
    bits = value.bit_length() if isinstance(value, int) else 0
    given: Any = value  # typeshed does not know that a float is a Real
    ok = isinstance(given, numbers.Real) and not isinstance(given, bool)
    ok = ok and (value > 0 if least is None else value >= least)
    if not ok or bits > 1023 or value == float("inf"):  # larger integers do not fit into a float
        allowed = "a finite number > 0" if least is None else f"a finite number ≥ {least:g}"
        shown = f"a whole number of {bits} bits" if bits > 1023 else value
        raise InputError(f"{where}: {shown} is not allowed, it must be {allowed}")


def quantity(where: str, text: str, units: Mapping[str, float]) -> float:
    """The value of a number with a unit, such as "90min" or "6 h".

    Args:
        where: the option that the text was given with, for the message.
        units: the factor of each unit. Upper and lower case are the same.

    Raises:
        InputError: no finite number > 0, or no known unit.

    Example:
        >>> quantity("--budget", "1.5 h", {"s": 1.0, "h": 3600.0})
        5400.0
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d+))?\s*(\D.*)?", text.strip())
    value = float(f"{match[1]}e{match[2] or 0}") if match else -1.0
    factor = {unit.lower(): of for unit, of in units.items()}.get((match[3] or "").lower()) if match else None
    if not factor or not 0 < value < float("inf"):
        allowed = f"it must be a number > 0 with its unit ({', '.join(filter(None, units))})"
        raise InputError(f"{where}: '{text}' is not allowed, {allowed}")
    return value * factor


def ends_in(where: str, path: str | Path, suffixes: Sequence[str]) -> None:
    """Check that the name of a file ends in one of ``suffixes``.

    Args:
        where: the option that the name was given with, for the message.

    Raises:
        InputError: another suffix.

    Example:
        >>> ends_in("-o", "report.txt", [".html"])
        Traceback (most recent call last):
        landscape.core.errors.InputError: -o: 'report.txt' is not allowed, its name must end in .html
    """
    if Path(path).suffix not in suffixes:
        raise InputError(f"{where}: '{path}' is not allowed, its name must end in {', '.join(suffixes)}")


def below_one(where: str, value: float) -> None:
    """Check that 0 ≤ ``value`` < 1.

    Raises:
        InputError: another value.

    Example:
        >>> below_one("momentum", 0.9)
    """
    if not 0 <= value < 1:
        raise InputError(f"{where}: {value} is not allowed, it must be ≥ 0 and < 1")


def up_to_one(where: str, value: float) -> None:
    """Check that 0 < ``value`` ≤ 1, as of a share.

    Raises:
        InputError: another value.

    Example:
        >>> up_to_one("share", 1.0)
    """
    if not 0 < value <= 1:
        raise InputError(f"{where}: {value} is not allowed, it must be > 0 and ≤ 1")


# Numbers with bounds, for annotations of options and of fields: check_type and check_bounds check them.
Natural = Annotated[int, functools.partial(positive, least=0)]
Count = Annotated[int, functools.partial(positive, least=1)]
Several = Annotated[int, functools.partial(positive, least=2)]
Positive = Annotated[float, positive]
NonNegative = Annotated[float, functools.partial(positive, least=0)]
AtLeastOne = Annotated[float, functools.partial(positive, least=1)]
BelowOne = Annotated[float, below_one]
UpToOne = Annotated[float, up_to_one]


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
    if annotation is float:  # an int may stand for a float; a bool is no number
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return annotation is not None and isinstance(value, origin or annotation)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def check_type(where: str, value: Any, annotation: Any) -> Any:
    """Check that ``value`` has the type of ``annotation``, and return it; an int for a float becomes a float.

    Bounds that ``annotation`` has, as :data:`Count` does, are checked, too.

    Raises:
        InputError: a value of another type.

    Example:
        >>> check_type("lr", 1, float)
        1.0
    """
    if get_origin(annotation) is Annotated:
        kind, *checks = get_args(annotation)
        value = check_type(where, value, kind)
        for check in filter(callable, checks):
            check(where, value)
        return value
    if not _fits(value, annotation):
        raise InputError(f"{where}: {value!r} is not allowed, it must be {_type_name(annotation)}")
    return float(value) if annotation is float else value


def expect(where: str, given: Any, *kinds: type) -> None:
    """Check that ``given``, what a public function is about, is of one of ``kinds``.

    Args:
        where: the argument's name.
        kinds: such as ``landscape.Problem`` or ``landscape.Checkpoint``.

    Raises:
        InputError: another kind; the remedy makes a problem or a checkpoint of what was given, where it can.

    Example:
        >>> from landscape import Problem
        >>> expect("problem", "last.h5", Problem)
        Traceback (most recent call last):
        landscape.core.errors.InputError: problem: a str is not allowed, it must be a Problem or ...
    """
    if isinstance(given, kinds):
        return
    names, remedy = [kind.__name__ for kind in kinds], ""
    words = {"Checkpoint": "a Checkpoint (of landscape.load)", "Problem": "a Problem or a run"}
    words |= {"Problem": "a Problem"} if "Checkpoint" in names else {}
    allowed = " or ".join(words.get(name, f"a {name}") for name in names)
    if isinstance(given, (str, Path)):
        of = {"Problem": ".problem()", "Tensor": ".mean"}
        part = "" if "Checkpoint" in names else next((of[name] for name in names if name in of), "")
        remedy = f"landscape.load({str(given)!r}){part}"
    elif "Problem" in names and hasattr(given, "state_dict"):  # a module
        remedy = "landscape.Problem(model, loss, data)"
    raise InputError(f"{where}: a {type(given).__name__} is not allowed, it must be {allowed}", remedy)


# The fields that results have of their origin (results.base.Provenance).
ORIGIN = ("split", "label", "source", "source_sha256")


def check_origin(function: str, about: Iterable[str]) -> None:
    """Raise TypeError, as Python does, at an unknown keyword that ``function`` passes on to its result."""
    if wrong := [name for name in about if name not in ORIGIN]:
        raise TypeError(f"{function}() got an unexpected keyword argument '{wrong[0]}'")


def is_run(given: Any) -> bool:
    """Return whether ``given`` is a run, which is whatever has a method ``problem``."""
    return callable(getattr(type(given), "problem", None))


def of_run(given: Any) -> Any:
    """The problem of a run; anything else as it is."""
    return given.problem() if is_run(given) else given


def check_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check the arguments of a call against the bounds and the words in the function's annotations.

    Raises:
        InputError: a number beyond its bounds, or an unknown word.

    Example:
        >>> def halved(k: Count, form: typing.Literal["up", "down"] = "up"): ...
        >>> check_arguments(halved, {"k": 0})
        Traceback (most recent call last):
        landscape.core.errors.InputError: k: 0 is not allowed, it must be a finite number ≥ 1
    """
    for name, hint in type_hints(function, bounds=True).items():
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if name not in given or (given[name] is None and type(None) in parts):
            continue
        for part in parts:
            inside = next(iter(get_args(part)), None)
            if get_origin(part) is Annotated:
                for check in filter(callable, part.__metadata__):
                    check(name, given[name])
            elif get_origin(part) is typing.Literal:
                choose(name, given[name], get_args(part))
            elif get_origin(inside) is typing.Literal:
                for each in given[name]:
                    choose(name, each, get_args(inside))


def check_bounds(table: Any, prefix: str = "") -> None:
    """Check the numbers in a dataclass, and in those within it, against the bounds in their annotations.

    Args:
        table: an object of the dataclass.
        prefix: before the names of fields in messages, such as "monitor.".

    Raises:
        InputError: a number beyond its bounds.

    Example:
        >>> from landscape.training.recipes import Monitor
        >>> check_bounds(Monitor(k=0), "monitor.")
        Traceback (most recent call last):
        landscape.core.errors.InputError: monitor.k: 0 is not allowed, it must be a finite number ≥ 1
    """
    for name, hint in type_hints(type(table), bounds=True).items():
        if dataclasses.is_dataclass(value := getattr(table, name)):
            check_bounds(value, f"{prefix}{name}.")
        for check in filter(callable, getattr(hint, "__metadata__", ())):
            check(f"{prefix}{name}", value)


_type_hints: WeakKeyDictionary[Callable[..., Any], dict[bool, Any]] = WeakKeyDictionary()


def type_hints(named: Callable[..., Any], *, bounds: bool = False) -> dict[str, Any]:
    """The types that a function's parameters or a class's fields are annotated with; not to be changed.

    ``bounds``: with what else ``Annotated`` says of them.

    They are stored, because recipes ask for the same ones again and again, and each answer evaluates text.
    """
    known: dict[bool, dict[str, Any]] = _type_hints.setdefault(named, {})
    if bounds not in known:
        known[bounds] = typing.get_type_hints(named, include_extras=bounds)
    return known[bounds]


def check_keywords(
    where: str, options: Mapping[str, Any], function: Callable[..., Any], given: Iterable[str] = ()
) -> dict[str, Any]:
    """Check ``options`` against the signature of ``function``, and add the defaults of missing ones.

    Args:
        where: prefix of the keys in messages, such as "model".
        options: keyword arguments for ``function``.
        given: parameters that the caller sets itself, and a user may not.

    Returns:
        All keyword arguments of ``function`` but those in ``given``.

    Raises:
        InputError: an unknown key, a value of another type, or a missing value without a default.

    Example:
        >>> def build(width: int, depth: int = 2): ...
        >>> check_keywords("model", {"width": 8}, build)
        {'width': 8, 'depth': 2}
    """
    hints = type_hints(function.__init__ if inspect.isclass(function) else function, bounds=True)
    parameters = dict(inspect.signature(function).parameters)
    for name in ("self", *given):
        parameters.pop(name, None)
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


# Bounds far above any recipe, within which any reader of TOML works (ours): characters, dots (a key with tens
# of thousands takes tomllib gigabytes), tables within tables.
MAX_LENGTH, MAX_DOTS, MAX_DEPTH = 10**6, 5000, 20


def parse_toml(toml: str, where: str) -> dict[str, Any]:
    """The values in a TOML text.

    Raises:
        InputError: with ``where`` and the line, if it is not TOML, or too large or too deep for a recipe.

    Example:
        >>> parse_toml("lr = 0.5", "recipe.toml")
        {'lr': 0.5}
    """
    if len(toml) > MAX_LENGTH or toml.count(".") > MAX_DOTS:
        raise InputError(
            f"{where}: {len(toml)} characters with {toml.count('.')} dots are not allowed in a recipe, at "
            f"most {MAX_LENGTH} with {MAX_DOTS}"
        )
    try:
        return bounded_toml(tomllib.loads(toml), where)
    except RecursionError as error:
        raise InputError(f"{where}: more than {MAX_DEPTH} tables or lists within each other") from error
    except LandscapeError:
        raise
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise InputError(f"{where}: not valid TOML ({error})") from error


def bounded_toml(values: dict[str, Any], where: str) -> dict[str, Any]:
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
