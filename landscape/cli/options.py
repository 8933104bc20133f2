"""Options of the commands, made from the parameters of functions and classes, their defaults, types and Args.

A shell can complete their values. No torch is imported, except for an option that needs it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from landscape.core.errors import InputError
from landscape.core.options import SPLITS, OneOf, choose, described, fit, type_hints

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class Choice(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on
    """One of a few allowed values, which completion offers; an error names the most similar one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = "value" if param is None else param.opts[-1]
        return choose(name if name.startswith("-") else name.upper(), str(value), self.choices)


class Number(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A number that a parameter's annotation allows."""

    def __init__(self, annotation: Any) -> None:
        self.annotation, self.kind = annotation, base_of(annotation)
        self.name = "integer" if self.kind is int else "float"

    def __repr__(self) -> str:
        return f"Number({self.name})"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a text to the number; a default is a number already."""
        if not isinstance(value, str):
            return value
        with contextlib.suppress(ValueError):
            value = self.kind(value)
        return fit(param.opts[-1] if param else "", value, self.annotation)


def paths(kind: str) -> Completion:
    """Return completion by names of files ("file") or folders ("dir"), which the shell itself finds."""
    return lambda context, parameter, incomplete: [CompletionItem(incomplete, type=kind)]


def offer(allowed: Callable[[], Iterable[str]]) -> Completion:
    """Return completion that offers the ``allowed`` names that match; if no name does, files."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name) for name in allowed() if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]

    return complete


Settings = Mapping[str, Any]
#: In place of the settings of a parameter: the parameter is no option of the command.
OMIT: None = None

# What follows imports torch: only for a command with such an option.


def _limit(context: click.Context, parameter: click.Parameter, text: str | None) -> None:
    from landscape.core.memory import at_most, parse_size

    context.with_resource(at_most(parse_size("--max-memory", text) if text else None))


def _devices() -> Choice:
    from landscape.core.devices import DEVICES

    return Choice(DEVICES)


_FILE = paths("file")
#: Options that several commands share: click's settings; ``flag``, the option if it is not the parameter's
#: name; and ``argument``, whether it is an argument.
SHARED: Mapping[str, dict[str, Any]] = {
    "files": {"argument": True, "metavar": "FILE…", "nargs": -1, "required": True, "shell_complete": _FILE},
    "split": {"type": Choice(SPLITS), "help": "Part of the data."},
    "seed": {"default": 0},
    "dtype": {"type": Choice(("float32", "float64")), "help": "Precision."},
    "output": {"flag": "-o --output", "metavar": "OUT.h5", "shell_complete": _FILE},
    "replace": {"flag": "--force"},
    "picture": {"flag": "--plot", "metavar": "F.png", "shell_complete": _FILE},
    "device": {
        "type": _devices,
        "default": "auto",
        "help": "Where to compute; auto: the accelerator, where there is one with float64.",
    },
    "data_dir": {
        "metavar": "D",
        "shell_complete": paths("dir"),
        "help": "Folder with the data sets that are not bundled. [default: $LANDSCAPE_DATA or data]",
    },
    "max_memory": {
        "metavar": "SIZE",
        "callback": _limit,
        "expose_value": False,
        "help": "Memory of a process, such as 2.5GiB (on CUDA: of the GPU). Work that needs more is refused "
        "before it starts. [default: the free memory]",
    },
    "settings": {"flag": "--set", "metavar": "KEY=VALUE"},
}
FOLDER: dict[str, Any] = {"metavar": "DIR", "shell_complete": paths("dir")}


def option(name: str, **settings: Any) -> click.Parameter:
    """Return the option or argument ``name``, with the settings of ``SHARED`` and click's ``settings``."""
    settings = {**SHARED.get(name, {}), **settings}
    if settings.get("type") is _devices:
        settings["type"] = _devices()
    flags = settings.pop("flag", f"--{name.replace('_', '-')}")
    if settings.pop("argument", False):
        if settings.pop("multiple", False):
            settings["nargs"] = -1
        settings.pop("help", None)
        return click.Argument([name], **settings)
    default = settings.get("default")
    settings.setdefault("show_default", default not in (None, "") and default is not False)
    is_list = isinstance(settings.get("type"), ListType) or str(settings.get("metavar")).endswith(",…")
    option_class = ListOption if is_list and not settings.get("multiple") else click.Option
    return option_class([*flags.split(), name], **settings)


class ListOption(click.Option):
    """An option of several values, separated by commas or by repeating the option."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Make the parser keep all texts of the option, not only the last one."""
        self.multiple = True
        super().add_to_parser(parser, ctx)
        self.multiple = False

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        """Join the texts of the option with commas."""
        value, source = super().consume_value(ctx, opts)
        return (",".join(value) if isinstance(value, list) else value), source


class ListType(click.ParamType):  # type: ignore[type-arg]  # no generic class in click 8.1
    """Several values, separated by commas; the annotation of an item says which are allowed."""

    name = "list"

    def __init__(self, item: Any) -> None:
        self.item = item

    def __repr__(self) -> str:
        return f"LIST({base_of(self.item).__name__})"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a text to the tuple of its values, in their order; a default is a tuple already."""
        if not isinstance(value, str):
            return value
        words = value.split(",")
        if base_of(self.item) is str:
            return tuple(word.strip() for word in words if word.strip())
        return tuple(Number(self.item).convert(word, param, ctx) for word in words)


def base_of(annotation: Any) -> Any:
    """Return the type of an annotation's values, without bounds and names; of a union, the first type."""
    if get_origin(annotation) in (Union, types.UnionType):
        return base_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    return base_of(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def item_of(annotation: Any) -> Any:
    """Return the annotation of the items of a sequence; None for another type."""
    base = base_of(annotation)
    return get_args(base)[0] if get_origin(base) in (Sequence, tuple) else None


def is_plain(annotation: Any) -> bool:
    """Return whether a parameter is a number, a text, a flag, or several of these."""
    return base_of(item_of(annotation) or annotation) in (int, float, str, bool)


def options_of(function: Callable[..., Any], *names: str, **settings: Settings) -> list[click.Parameter]:
    """Return the options of some parameters of a function: of ``names``, then of the keys of ``settings``.

    ``settings``: parameter -> settings of its option in click. Without a setting, default and type are those
    of the signature, and the help is the first sentence of the parameter's Args.
    """
    parameters, hints = inspect.signature(function).parameters, type_hints(function, bounds=True)
    helps = help_texts(function)
    every = dict.fromkeys((*names, *settings))
    return [_option(parameters[name], hints[name], helps.get(name), settings.get(name, {})) for name in every]


def _option(parameter: inspect.Parameter, hint: Any, text: str | None, changes: Settings) -> click.Parameter:
    """Return the option of a parameter with the annotation ``hint``; ``changes`` replace its settings."""
    is_repeated = get_origin(base_of(hint)) is tuple
    given = {**SHARED.get(parameter.name, {}), **changes}
    settings: dict[str, Any] = {"help": text} if text else {}
    default = parameter.default
    if changes.get("each"):
        settings |= {"type": ListType(hint), "required": True}
    elif "type" not in given and item_of(hint) and not is_repeated:
        settings["type"] = ListType(item_of(hint))
        if isinstance(default, tuple):
            default = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
    elif "type" not in given:
        settings["type"] = _type_of(item_of(hint) or hint)
    if settings.get("type") is bool:
        flag = parameter.name.replace("_", "-")
        settings |= {"flag": f"--{flag}/--not-{flag}"} if default is True else {"is_flag": True}
    if is_repeated:
        settings["multiple"] = True
    if default not in (None, inspect.Parameter.empty, ()):
        settings["default"] = default
    elif default is not None and not is_repeated and not {"default", "is_flag"} & {*given, *settings}:
        settings["required"] = types.NoneType not in get_args(hint)
    settings |= {name: value for name, value in changes.items() if name != "each"}
    return option(parameter.name, **settings)


def _type_of(annotation: Any) -> Any:
    """Return click's type for an annotation: allowed words, a number within its bounds, a text or a flag."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(member for member in get_args(annotation) if member is not types.NoneType)
    if get_origin(annotation) is Literal:
        return Choice(get_args(annotation))
    for rule in getattr(annotation, "__metadata__", ()):
        if isinstance(rule, OneOf):
            return Choice(rule.names)
    base = base_of(annotation)
    return Number(annotation) if base in (int, float) else base


def plain(text: str) -> str:
    """Return a docstring's text without markup."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "").strip()


def help_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the first sentence of each parameter's description in a docstring, without markup."""
    first_sentences: dict[str, str] = {}
    for name, text in described(function).items():
        sentence = re.split(r"(?<!\bal)\.\s(?=[A-Z])", plain(text))[0].rstrip(".")
        if not sentence.endswith("…"):
            sentence += "."
        if not re.match(r"\w\b", sentence):  # γ and m stay small
            sentence = sentence[:1].upper() + sentence[1:]
        first_sentences[name] = sentence.replace('"', "")
    return first_sentences


@dataclass(frozen=True)
class Group:
    """Options that a command receives as one object, ``make(**values)``."""

    make: Callable[..., Any]
    options: Sequence[click.Parameter]


def group(make: Callable[..., Any], **by_parameter: Settings | Group | None) -> Group:
    """Return the options of all parameters of ``make``, with the texts under Args of ``make`` as their help.

    Args:
        make: The function or class that receives the values.
        by_parameter: Parameter -> settings of its option in click. A :class:`Group` if several options
            together make the parameter's value. OMIT if the parameter is no option.
    """
    helps, hints = described(make), type_hints(make, bounds=True)
    groups: dict[str, Group] = {}
    options: list[click.Parameter] = []
    for name, parameter in inspect.signature(make).parameters.items():
        settings = by_parameter.get(name, {})
        if isinstance(settings, Group):
            groups[name] = settings
            options += settings.options
        elif settings is not OMIT:
            options.append(_option(parameter, hints[name], helps.get(name), settings))

    def make_with_groups(**values: Any) -> Any:
        for name, inner_group in groups.items():
            names = [str(option.name) for option in inner_group.options if option.expose_value]
            inner_values = {option_name: values.pop(option_name) for option_name in names}
            values[name] = inner_group.make(**inner_values)
        return make(**values)

    return Group(make_with_groups, options)


def command(
    name: str | None = None, /, **own: Settings | Group | None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command: its parameters are the options, as ``group`` makes them with ``own``.

    The docstring's text is the help of the command, its Args are the help of the options, and its Example
    comes last.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        text, example = re.split(r"^Example:\n", inspect.getdoc(function) or "", flags=re.M)
        options = group(function, **own)
        return click.Command(
            name or function.__name__.replace("_", "-"),
            callback=functools.wraps(function)(options.make),
            params=[*options.options],
            help=re.split(r"^Args:\n", text, flags=re.M)[0].strip(),
            epilog=f"Example: {' '.join(example.split())}",
        )

    return decorate


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a text, such as [0, 1, 2, 5] of "0-2,5"."""
    seeds: set[int] = set()
    for interval in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", interval, re.ASCII)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not 1 <= len(numbers) <= 1000:
            raise InputError(f"--seeds: '{text}' is not allowed, it must be numbers such as 0-4 or 0,1,5")
        seeds.update(numbers)
    return sorted(seeds)
