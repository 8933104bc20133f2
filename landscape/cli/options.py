"""Options of the commands: the parameters of functions and classes, with their defaults, types and Args.

Their values are those that a shell can complete. No torch is imported, but for an option that needs it."""

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
    """A few allowed values, which completion offers; for another one the error names the most similar."""

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
        """The number that a text stands for; a default is one already."""
        if not isinstance(value, str):
            return value
        with contextlib.suppress(ValueError):
            value = self.kind(value)
        return fit(param.opts[-1] if param else "", value, self.annotation)


def paths(kind: str) -> Completion:
    """Completion by names of files ("file") or folders ("dir"), which the shell itself finds."""
    return lambda context, parameter, incomplete: [CompletionItem(incomplete, type=kind)]


def names(allowed: Callable[[], Iterable[str]]) -> Completion:
    """Completion by the ``allowed`` names that begin so; where none does, by files."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        items = [CompletionItem(name) for name in allowed() if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]

    return complete


Settings = Mapping[str, Any]

# What follows imports torch: only for a command with such an option.


def _limit(context: click.Context, parameter: click.Parameter, text: str | None) -> None:
    from landscape.core.memory import at_most, parse_size

    context.with_resource(at_most(parse_size("--max-memory", text) if text else None))


def _devices() -> Choice:
    from landscape.core.devices import DEVICES

    return Choice(DEVICES)


#: Options that several commands share: what click is told of them, and ``flag``, the option where it is not
#: the name, or ``argument``.
SHARED: Mapping[str, dict[str, Any]] = {
    "files": {
        "argument": True,
        "metavar": "FILE…",
        "nargs": -1,
        "required": True,
        "shell_complete": paths("file"),
    },
    "split": {"type": Choice(SPLITS), "help": "Part of the data."},
    "seed": {"default": 0},
    "dtype": {"type": Choice(("float32", "float64")), "help": "Precision."},
    "output": {"flag": "-o --output", "metavar": "OUT.h5", "shell_complete": paths("file")},
    "replace": {"flag": "--force"},
    "picture": {"flag": "--plot", "metavar": "F.png", "shell_complete": paths("file")},
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
        "help": "Memory of a process, such as 2.5GiB (on CUDA: of the GPU). What needs more is refused "
        "before it starts. [default: what is free]",
    },
    "settings": {"flag": "--set", "metavar": "KEY=VALUE"},
}
FOLDER: dict[str, Any] = {"metavar": "DIR", "shell_complete": paths("dir")}


def option(name: str, **settings: Any) -> click.Parameter:
    """The option, or argument, ``name``, of which click is told ``settings`` and what ``SHARED`` has."""
    words = {**SHARED.get(name, {}), **settings}
    if words.get("type") is _devices:
        words["type"] = _devices()
    flags = words.pop("flag", f"--{name.replace('_', '-')}")
    if words.pop("argument", False):
        if words.pop("multiple", False):
            words["nargs"] = -1
        words.pop("help", None)
        return click.Argument([name], **words)
    default = words.get("default")
    words.setdefault("show_default", default not in (None, "") and default is not False)
    listed = isinstance(words.get("type"), ListType) or str(words.get("metavar")).endswith(",…")
    kind = ListOption if listed and not words.get("multiple") else click.Option
    return kind([*flags.split(), name], **words)


class ListOption(click.Option):
    """An option of several values with commas between them, which may be given several times, too."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Have the parser keep all texts of the option, and not the last one only."""
        self.multiple = True
        super().add_to_parser(parser, ctx)
        self.multiple = False

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        """The texts of the option as one, with commas between them."""
        value, source = super().consume_value(ctx, opts)
        return (",".join(value) if isinstance(value, list) else value), source


class ListType(click.ParamType):  # type: ignore[type-arg]  # no generic class in click 8.1
    """Several values with commas between them, each of which the annotation of an item allows."""

    name = "list"

    def __init__(self, item: Any) -> None:
        self.item = item

    def __repr__(self) -> str:
        return f"LIST({base_of(self.item).__name__})"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The tuple that the text of the option stands for, in its order; a default is one already."""
        if not isinstance(value, str):
            return value
        words = value.split(",")
        if base_of(self.item) is str:
            return tuple(word.strip() for word in words if word.strip())
        return tuple(Number(self.item).convert(word, param, ctx) for word in words)


def base_of(annotation: Any) -> Any:
    """The type that an annotation bounds or names the values of: of one with None, or others, the first."""
    if get_origin(annotation) in (Union, types.UnionType):
        return base_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    return base_of(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def item_of(annotation: Any) -> Any:
    """The annotation of the items of a sequence; None for another type."""
    base = base_of(annotation)
    return get_args(base)[0] if get_origin(base) in (Sequence, tuple) else None


def is_plain(annotation: Any) -> bool:
    """Return whether a parameter is a number, a text, a flag, or several of these."""
    return base_of(item_of(annotation) or annotation) in (int, float, str, bool)


def options_of(function: Callable[..., Any], *names: str, **own: Settings) -> list[click.Parameter]:
    """The options that the parameters ``names`` and ``own`` of ``function`` are, in this order.

    Default and type are those of the signature; the help is the first sentence of the parameter's Args. What
    ``own`` tells click comes before.
    """
    parameters = inspect.signature(function).parameters
    every, hints = dict.fromkeys((*names, *own)), type_hints(function, bounds=True)
    helps = sentences(function)
    return [_option(parameters[name], hints[name], helps.get(name), own.get(name, {})) for name in every]


def _option(parameter: inspect.Parameter, hint: Any, sentence: str | None, own: Settings) -> click.Parameter:
    """The option of a parameter, with the ``sentence`` of its Args as its help."""
    several = get_origin(base_of(hint)) is tuple
    shared = {**SHARED.get(parameter.name, {}), **own}
    words: dict[str, Any] = {"help": sentence} if sentence else {}
    default = parameter.default
    if own.get("each"):
        words |= {"type": ListType(hint), "required": True}
    elif "type" not in shared and item_of(hint) and not several:
        words["type"] = ListType(item_of(hint))
        if isinstance(default, tuple):
            default = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
    elif "type" not in shared:
        words["type"] = _type_of(item_of(hint) or hint)
    if words.get("type") is bool:
        flag = parameter.name.replace("_", "-")
        words |= {"flag": f"--{flag}/--not-{flag}"} if default is True else {"is_flag": True}
    if several:
        words["multiple"] = True
    if default not in (None, inspect.Parameter.empty, ()):
        words["default"] = default
    elif default is not None and not several and not {"default", "is_flag"} & {*shared, *words}:
        words["required"] = types.NoneType not in get_args(hint)
    return option(parameter.name, **words | {name: value for name, value in own.items() if name != "each"})


def _type_of(annotation: Any) -> Any:
    """The type of click for an annotation: its words, a number within its bounds, a text or a flag."""
    kind = next((part for part in get_args(annotation) if part is not types.NoneType), None)
    inner = kind if get_origin(annotation) in (Union, types.UnionType) else annotation
    if get_origin(inner) is Literal:
        return Choice(get_args(inner))
    names = [rule.names for rule in getattr(inner, "__metadata__", ()) if isinstance(rule, OneOf)]
    base = base_of(inner)
    return Choice(names[0]) if names else Number(inner) if base in (int, float) else base


def plain(text: str) -> str:
    """A docstring's text without markup."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "").strip()


def sentences(function: Callable[..., Any]) -> dict[str, str]:
    """The first sentence of each parameter's description in a docstring, without markup."""
    first: dict[str, str] = {}
    for name, text in described(function).items():
        sentence = re.split(r"(?<!\bal)\.\s(?=[A-Z])", plain(text))[0].rstrip(".")
        sentence += "" if sentence.endswith("…") else "."
        if not re.match(r"\w\b", sentence):  # γ and m stay small
            sentence = sentence[:1].upper() + sentence[1:]
        first[name] = sentence.replace('"', "")
    return first


@dataclass(frozen=True)
class Group:
    """Options that a command receives as one object, ``make(**values)``."""

    make: Callable[..., Any]
    options: Sequence[click.Parameter]


def group(make: Callable[..., Any], **own: Settings | Group | None) -> Group:
    """The options that all parameters of ``make`` are, with the whole text of its Args as their help.

    ``own`` has what click is told of a parameter, or the group of options that it stands for; None for a
    parameter that is no option.
    """
    texts, groups, hints = described(make), dict[str, Group](), type_hints(make, bounds=True)
    options: list[click.Parameter] = []
    for name, parameter in inspect.signature(make).parameters.items():
        settings_of = own.get(name, {})
        if isinstance(settings_of, Group):
            groups[name] = settings_of
            options += settings_of.options
        elif settings_of is not None:
            options.append(_option(parameter, hints[name], texts.get(name), settings_of))

    def from_values(**values: Any) -> Any:
        for name, part in groups.items():
            names = [str(option.name) for option in part.options if option.expose_value]
            values[name] = part.make(**{option: values.pop(option) for option in names})
        return make(**values)

    return Group(from_values, options)


def command(
    name: str | None = None, /, **own: Settings | Group | None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a function a command: its parameters are the options, as ``group`` makes them.

    The help is the docstring, but for its Args, which are the options', and its Example, which comes last.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        texts = re.split(r"^(Args|Example):\n", inspect.getdoc(function) or "", flags=re.M)
        example = " ".join(dict(zip(texts[1::2], texts[2::2], strict=True))["Example"].split())
        options = group(function, **own)
        return click.Command(
            name or function.__name__.replace("_", "-"),
            callback=functools.wraps(function)(options.make),
            params=[*options.options],
            help=texts[0].strip(),
            epilog=f"Example: {example}",
        )

    return decorate


def parse_seeds(text: str) -> list[int]:
    """[0, 1, 2, 5] of "0-2,5"."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= 1000:
            raise InputError(f"--seeds: '{text}' is not allowed, it must be numbers such as 0-4 or 0,1,5")
        seeds += range(first, last + 1)
    return sorted(set(seeds))
