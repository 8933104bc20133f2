"""Checks of a user's names, numbers, keyword arguments and TOML, with errors that say what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import math
import numbers
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from landscape.core.errors import InputError, LandscapeError

P = ParamSpec("P")
T = TypeVar("T")

# The default split of all analyses: the training set (our choice). Training minimizes its loss, so that Δ(2),
# the limits on ηλ_max, the smoothing by the spread and the minima that delay leaves are defined by it. Other
# analyses use it, too, so that results of two commands can be compared. The contours in the papers are of the
# test loss, and the papers' figures set the split themselves.
SPLIT = "train"
#: All splits of a data set.
SPLITS = ("train", "test")


def choose(where: str, name: str, allowed: Iterable[str]) -> str:
    """Check that ``name`` is allowed, and return it.

    Raises:
        InputError: another name; the message begins with ``where``, the option of the name, and suggests the
            most similar allowed name.

    Example:
        >>> choose("norm", "fliter", ["none", "filter", "layer"])
        Traceback (most recent call last):
        landscape.core.errors.InputError: norm: 'fliter' is not known; did you mean 'filter'? ...
    """
    names = sorted(allowed)
    if name in names:
        return name
    listed = ", ".join(names) or "nothing here"
    raise InputError(f"{where}: '{name}' is not known{near(name, names)} (allowed: {listed})")


def near(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean '…'?" with the most similar one of ``names``; "" if none is similar.

    If one to three names begin with ``name``, the text has all of them.

    Example:
        >>> names = ["none", "filter", "fig2a", "fig2b"]
        >>> near("fliter", names), near("fig2", names)
        ("; did you mean 'filter'?", "; did you mean 'fig2a' or 'fig2b'?")
    """
    names = list(names)
    similar = [candidate for candidate in names if candidate.startswith(str(name))]
    if not 0 < len(similar) <= 3:
        similar = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ""


def ends_in(where: str, path: str | Path, suffixes: Sequence[str]) -> None:
    """Check that the name of a file ends in one of ``suffixes``.

    Raises:
        InputError: another suffix; the message begins with ``where``, the option of the path.

    Example:
        >>> ends_in("-o", "report.txt", [".html"])
        Traceback (most recent call last):
        landscape.core.errors.InputError: -o: 'report.txt' is not allowed, its name must end in .html
    """
    if Path(path).suffix not in suffixes:
        raise InputError(f"{where}: '{path}' is not allowed, its name must end in {', '.join(suffixes)}")


@dataclass(frozen=True)
class Within:
    """The bounds of a number, for annotations such as :data:`Count`.

    A number must be ≥ ``least``, ≤ ``most``, > ``above`` and < ``below``; None is no bound.

    Example:
        >>> Within(above=0, most=1).text
        '> 0 and ≤ 1'
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def text(self) -> str:
        """The bounds as a text for messages."""
        signs = {"≥": self.least, ">": self.above, "≤": self.most, "<": self.below}
        bounds = [(sign, bound) for sign, bound in signs.items() if bound is not None]
        return " and ".join(f"{sign} {b:{',' if isinstance(b, int) else 'g'}}" for sign, b in bounds)

    def contains(self, value: float) -> bool:
        """Return whether a number satisfies the bounds; NaN does not satisfy any."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


# Types of arguments. Beyond its type, an annotation has bounds, a rule (a function of the argument's name and
# value that raises InputError), or words for messages.
Natural = Annotated[int, Within(0)]
Count = Annotated[int, Within(1)]
AtLeastTwo = Annotated[int, Within(2)]
Seed = Annotated[int, Within(0, 2**62), "a whole number from 0 to 2⁶²"]  # numbers of runs are added to it
Positive = Annotated[float, Within(above=0)]
NonNegative = Annotated[float, Within(0)]
AtLeastOne = Annotated[float, Within(1)]
BelowOne = Annotated[float, Within(0, below=1)]
UpToOne = Annotated[float, Within(above=0, most=1)]
Span = Annotated[float, Within(above=0, most=1e30)]  # a multiple of it times a direction must fit in float32
GridSize = Annotated[Count | tuple[Count, Count], "a whole number ≥ 1, or two, such as (51, 25)"]


@dataclass(frozen=True)
class OneOf:
    """A rule for annotations: a text must be one of ``names``.

    Example:
        >>> OneOf(("awc", "atc"))("order", "atc")
    """

    names: tuple[str, ...]

    def __call__(self, where: str, value: str) -> None:
        """Raise InputError for another name."""
        choose(where, value, self.names)


class _UnfitError(Exception):
    """A value does not fit an annotation; :func:`fit` raises InputError in place of this error."""


def fit(where: str, value: Any, annotation: Any) -> Any:
    """Check a value against an annotation, and return it in the annotation's type.

    Numbers of NumPy and tensors without dimensions count as numbers, and a bool does not; numbers must be
    finite. A file's name may be any path-like object. Items of mappings and the parameters of functions are
    not checked.

    Args:
        where: the name of the argument, for the message.

    Raises:
        InputError: the value is of another type, or outside the bounds.

    Example:
        >>> fit("lr", 1, Positive), fit("grid", [3, 4], tuple[Count, Count])
        (1.0, (3, 4))
        >>> fit("k", 0, Count)
        Traceback (most recent call last):
        landscape.core.errors.InputError: k: 0 is not allowed, it must be a whole number ≥ 1
    """
    try:
        return _converted(where, value, annotation)
    except _UnfitError:
        allowed = in_words(annotation)
        raise InputError(where, value, allowed=allowed, remedy=_remedy(value, allowed)) from None


def _converted(where: str, value: Any, annotation: Any) -> Any:
    """Return the value in the annotation's type; raise _UnfitError, or a check's own InputError."""
    kind = get_origin(annotation) or annotation
    args = get_args(annotation)
    if kind is Any:
        return value
    if kind is Annotated:
        value = _converted(where, value, args[0])
        for rule in args[1:]:
            if isinstance(rule, Within) and not rule.contains(value):
                raise _UnfitError
            if callable(rule):
                rule(where, value)
        return value
    if kind in (Union, types.UnionType):
        return _one_of(where, value, args)
    if kind in (bool, int, float):
        return _number(where, value, kind)
    if kind in (list, tuple, Sequence, Iterable):
        return _sequence(where, value, kind, args)
    if kind is Literal:
        if isinstance(value, str) and isinstance(args[0], str):
            return choose(where, value, args)  # raises an error that suggests a similar text
        fits = value in args
    elif kind is Callable:
        fits = callable(value)
    elif kind in (None, types.NoneType):
        fits = value is None
    else:
        value_class = os.PathLike if kind is Path else kind
        # An array of NumPy is allowed in place of a tensor.
        is_array = getattr(kind, "__name__", "") == "Tensor" and type(value).__name__ == "ndarray"
        is_class = isinstance(value, type)  # a class with a protocol's methods would pass as an instance
        fits = is_array or (isinstance(value, value_class) and not is_class)
    if not fits:
        raise _UnfitError
    return value


def _one_of(where: str, value: Any, annotations: Sequence[Any]) -> Any:
    """Return the value in the type of the first of several annotations that it fits."""
    if Path in annotations and isinstance(value, (str, os.PathLike)):
        name = os.fspath(value)
        if not isinstance(name, str) or not name or "\0" in name:
            raise InputError(where, value, allowed="the name of a file or folder")
        return value if isinstance(value, str) else Path(name)
    if getattr(value, "ndim", 0) and type(value) in [get_origin(kind) or kind for kind in annotations]:
        return value  # a tensor or an array, which must not be converted to a list
    input_error = None
    for annotation in annotations:
        try:
            return _converted(where, value, annotation)
        except _UnfitError:
            continue
        except InputError as error:
            input_error = error
    raise input_error or _UnfitError


def _number(where: str, value: Any, kind: type) -> Any:
    """Return the value as a number of Python of the type ``kind``."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a number of NumPy, or a tensor without dimensions
    if isinstance(value, bool) != (kind is bool):
        raise _UnfitError
    if kind is bool:
        return value
    if not isinstance(value, numbers.Integral if kind is int else numbers.Real):
        raise _UnfitError
    try:
        number = kind(value)
    except OverflowError:
        raise _UnfitError from None
    if kind is float and not math.isfinite(number):
        raise _UnfitError
    if kind is int and not -(2**63) <= number < 2**63:
        raise InputError(where, number, allowed="a whole number of at most 63 bits")
    return number


def _sequence(where: str, value: Any, kind: Any, args: Sequence[Any]) -> Any:
    """Return the value as a list or tuple whose items have the types ``args``."""
    original = value
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        value = list(value)
    classes = (list, tuple) if kind in (list, tuple) else kind
    if not isinstance(value, classes) or isinstance(value, (str, bytes)):
        raise _UnfitError
    if not isinstance(value, (list, tuple, range)) or not args or args[0] is Any:
        return original
    if kind is tuple and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise _UnfitError
        return tuple(_converted(where, item, item_type) for item, item_type in zip(value, args, strict=True))
    base = get_args(args[0])[0] if get_origin(args[0]) is Annotated else args[0]
    is_plain = base in (int, float, str) or get_origin(base) is Literal
    items = [fit(where if is_plain else f"{where}[{k}]", item, args[0]) for k, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def in_words(annotation: Any) -> str:
    """Return the values that an annotation allows, in the words of a message.

    Example:
        >>> in_words(Count | Literal["all"] | None)
        "a whole number ≥ 1 or one of 'all'"
    """
    kind, args = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Annotated:
        texts = [rule for rule in args[1:] if isinstance(rule, str)]
        texts += [in_words(Literal[rule.names]) for rule in args[1:] if isinstance(rule, OneOf)]
        bounds = [rule.text for rule in args[1:] if isinstance(rule, Within)]
        return texts[0] if texts else " ".join([in_words(args[0]), *bounds])
    if kind in (Union, types.UnionType):
        alternatives = [in_words(alternative) for alternative in args if alternative is not types.NoneType]
        return " or ".join(dict.fromkeys(alternatives))
    if kind is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if kind in (list, tuple, Sequence, Iterable):
        if kind is tuple and args and args[-1] is not Ellipsis:
            return f"({', '.join(map(in_words, args))})"
        return f"a list, each item {in_words(args[0])}" if args else "a list"
    return _WORDS.get(getattr(kind, "__name__", ""), f"a {getattr(kind, '__name__', kind)}")


_WORDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "True or False",
    "Callable": "a function",
    "Module": "a torch.nn.Module",
    "Optimizer": "a torch.optim.Optimizer",
    "Checkpoint": "a Checkpoint (of landscape.load)",
    "Run": "a run",
}


def _remedy(value: Any, allowed: str) -> str:
    """Return code that makes the allowed object from a run, a path or a module; "" if there is none."""
    if allowed.startswith("a Preconditioner"):
        return "landscape.preconditioner(run, run.problem())"
    if isinstance(value, (str, Path)):
        if allowed.startswith("a ResultFile"):
            return f"landscape.open({str(value)!r}, 'a')"
        members = {"a Checkpoint": "", "a Problem": ".problem()", "a Tensor": ".mean"}
        for class_name, member in members.items():
            if allowed.startswith(class_name):
                return f"landscape.load({str(value)!r}){member}"
    is_module = hasattr(value, "state_dict") and not isinstance(value, type)
    return "landscape.Problem(model, loss, data)" if is_module and allowed.startswith("a Problem") else ""


def positive(where: str, value: float, *, least: float | None = None) -> None:
    """Check that ``value`` is a finite number (not a bool) that is > 0 or, with ``least``, ≥ ``least``.

    Raises:
        InputError: another value; the message begins with ``where``, the option of the value.

    Example:
        >>> positive("grid", 0, least=1)
        Traceback (most recent call last):
        landscape.core.errors.InputError: grid: 0 is not allowed, it must be a finite number ≥ 1
    """
    fit(where, value, Positive if least is None else Annotated[float, Within(least)])


def is_run(subject: Any) -> bool:
    """Return whether ``subject`` is a run: an object whose class has a method ``problem``."""
    return callable(getattr(type(subject), "problem", None))


def of_run(subject: Any) -> Any:
    """Return the problem of a run; return any other object unchanged."""
    return subject.problem() if is_run(subject) else subject


def check_arguments(
    function: Callable[..., Any], arguments: dict[str, Any], unchecked: Sequence[str] = ()
) -> None:
    """Check the arguments of a call, and convert them to the types of the function's annotations.

    Args:
        function: the called function.
        arguments: the arguments by name, converted in place. For a parameter ``**options``, the mapping
            "options" holds the keyword arguments, which are checked and not converted.
        unchecked: the names of arguments that the function checks itself.

    Raises:
        InputError: an argument does not fit its annotation.
        TypeError: ``**options`` has a key that is not in the TypedDict of its annotation.

    Example:
        >>> def halved(k: Count): ...
        >>> check_arguments(halved, {"k": 0})
        Traceback (most recent call last):
        landscape.core.errors.InputError: k: 0 is not allowed, it must be a whole number ≥ 1
    """
    for name, hint in type_hints(function, bounds=True).items():  # with bounds of numbers, as in Count
        if name not in arguments or name in unchecked or _is_nan_default(function, name, arguments[name]):
            continue
        if get_origin(hint) is typing.Unpack:  # the annotation of **options by a TypedDict
            keyword_types = type_hints(get_args(hint)[0], bounds=True)
            for key, value in arguments[name].items():
                if key not in keyword_types:
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{key}'")
                fit(key, value, keyword_types[key])
        else:
            arguments[name] = fit(name, arguments[name], hint)


def _is_nan_default(function: Callable[..., Any], name: str, value: Any) -> bool:
    """Return whether ``value`` is NaN and NaN, for an unknown number, is the parameter's default."""
    if not (isinstance(value, float) and math.isnan(value)):
        return False
    default = inspect.signature(function).parameters[name].default
    return isinstance(default, float) and math.isnan(default)


def checked(unchecked: Sequence[str] = ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for a public function or method that checks the arguments before each call.

    Args:
        unchecked: the names of arguments that the function checks itself.

    Example:
        >>> @checked()
        ... def halved(k: Count) -> float:
        ...     return k / 2
        >>> halved("3")
        Traceback (most recent call last):
        landscape.core.errors.InputError: k: '3' is not allowed, it must be a whole number ≥ 1
    """

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # it also fails, with a TypeError that names the function
            check_arguments(function, call.arguments, unchecked)  # converts call.arguments in place
            return function(*call.args, **call.kwargs)

        return decorated

    return decorator


def check_fields(table: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass, and of dataclasses in them, against their annotations.

    Args:
        table: an object of the dataclass; its fields are converted to the annotations' types.
        prefix: the prefix of names of fields in messages, such as "monitor.".

    Raises:
        InputError: a field does not fit its annotation.

    Example:
        >>> from landscape.training.recipes import Monitor
        >>> check_fields(Monitor(k=0), "monitor.")
        Traceback (most recent call last):
        landscape.core.errors.InputError: monitor.k: 0 is not allowed, it must be a whole number ≥ 1
    """
    for name, hint in type_hints(type(table), bounds=True).items():
        value = getattr(table, name)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{prefix}{name}.")
        else:
            object.__setattr__(table, name, fit(f"{prefix}{name}", value, hint))


_type_hints: WeakKeyDictionary[Callable[..., Any], dict[bool, Any]] = WeakKeyDictionary()


def described(documented: Any) -> dict[str, str]:
    """Return the descriptions in the sections Args and Attributes of a docstring, by name.

    Example:
        >>> described(fit)["where"]
        'the name of the argument, for the message.'
    """
    doc, texts = inspect.cleandoc(inspect.unwrap(documented).__doc__ or ""), dict[str, str]()
    for section in re.findall(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", doc, re.M | re.S):
        for entry in re.split(r"^    (?=\S)", section, flags=re.M)[1:]:
            names, _, text = " ".join(entry.split()).partition(": ")
            texts |= dict.fromkeys(names.replace("*", "").split(", "), text)
    return texts


def type_hints(named: Callable[..., Any], *, bounds: bool = False) -> dict[str, Any]:
    """Return the annotations of a function's parameters or a class's fields; do not change the dict.

    They are stored, because their evaluation takes time and recipes need them often. With ``bounds`` they
    include the bounds and rules of ``Annotated``.
    """
    hints: dict[bool, dict[str, Any]] = _type_hints.setdefault(named, {})
    if bounds not in hints:
        hints[bounds] = typing.get_type_hints(named, include_extras=bounds)
    return hints[bounds]


def check_keywords(
    where: str, options: Mapping[str, Any], function: Callable[..., Any], given: Iterable[str] = ()
) -> dict[str, Any]:
    """Check ``options`` against the signature of ``function``, and add the default of each missing option.

    Args:
        where: the prefix of keys in messages, such as "model".
        options: keyword arguments for ``function``, a function or a class.
        given: parameters that the caller sets; a user may not set them.

    Returns:
        All keyword arguments of ``function`` except those in ``given``.

    Raises:
        InputError: a key is unknown, a value has the wrong type, or an option without a default is missing.

    Example:
        >>> def build(width: int, depth: int = 2): ...
        >>> check_keywords("model", {"width": 8}, build)
        {'width': 8, 'depth': 2}
    """
    hints = type_hints(function.__init__ if inspect.isclass(function) else function, bounds=True)
    parameters = dict(inspect.signature(function).parameters)
    for name in ("self", *given):
        parameters.pop(name, None)  # not allowed in ``options``
    checked_options = {}
    for key, value in options.items():
        choose(where, key, parameters)  # refuses an unknown key
        checked_options[key] = fit(f"{where}.{key}", value, hints.get(key, Any))
    for name, parameter in parameters.items():
        if name not in checked_options:
            if parameter.default is inspect.Parameter.empty:
                raise InputError(f"{where}.{name}: missing, and there is no default")
            checked_options[name] = parameter.default
    return checked_options


# Limits far above the needs of any recipe, below which every reader of TOML works (our choice): characters;
# dots, as tomllib needs gigabytes for a key with tens of thousands; and levels of tables within tables.
MAX_LENGTH, MAX_DOTS, MAX_DEPTH = 10**6, 5000, 20


def parse_toml(toml: str, where: str) -> dict[str, Any]:
    """Return the values in a TOML text.

    Raises:
        InputError: the text is not TOML, or too large or too deep for a recipe; ``where`` names its origin.

    Example:
        >>> parse_toml("lr = 0.5", "recipe.toml")
        {'lr': 0.5}
    """
    if len(toml) > MAX_LENGTH or toml.count(".") > MAX_DOTS:
        size = f"{len(toml)} characters with {toml.count('.')} dots"
        raise InputError(f"{where}: {size} are not allowed, at most {MAX_LENGTH} with {MAX_DOTS}")
    try:
        return bounded_toml(tomllib.loads(toml), where)
    except RecursionError as error:
        raise InputError(f"{where}: more than {MAX_DEPTH} tables or lists within each other") from error
    except LandscapeError:
        raise
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise InputError(f"{where}: not valid TOML ({error})") from error


def bounded_toml(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return ``values``; raise InputError if tables are too deep or a whole number has more than 64 bits."""
    stack: list[tuple[str, Any, int]] = [("", values, 0)]
    while stack:
        key, value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise InputError(f"{where}: more than {MAX_DEPTH} tables or lists within each other")
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else [(key, item) for item in value]
            prefix = f"{key}." if key and isinstance(value, dict) else ""
            stack += [(f"{prefix}{name}", item, depth + 1) for name, item in items]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            size = str(value) if value.bit_length() < 100 else f"a number of {value.bit_length()} bits"
            raise InputError(f"{key}: {size} is not allowed, whole numbers must lie between −2⁶³ and 2⁶³")
    return values


def toml_value(value: Any) -> str:
    """Return ``value`` as TOML, which JSON writes alike for strings, booleans, whole numbers and their lists.

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
    # TOML does not allow one character that JSON writes without an escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_text(values: Mapping[str, Any]) -> str:
    """Return ``values`` as TOML: a mapping becomes a table, without its entries of value None.

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
