"""Pages of the reference that are made from the package when the site is built.

A command's page is made from its options, a recipe key's row from the class that reads the key, a file
format's table from the class of its result. What has no description there stops the build.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import site_commands
from site_messages import messages_page

import landscape
import landscape.testing
from landscape.checkpoint.history import COLUMNS
from landscape.cli.commands import GROUPS as COMMANDS
from landscape.core import registry
from landscape.core.options import described, toml_value, type_hints
from landscape.data.images import image_set
from landscape.data.speech import Features
from landscape.models import convolutional
from landscape.results.base import Result
from landscape.training.recipes.recipe import Recipe

#: Tables of a recipe whose other keys depend on their name, and the registry of the names.
NAMED_TABLES = {
    "algorithm": registry.algorithms,
    "optimizer": registry.optimizers,
    "model": registry.models,
    "data": registry.data_sets,
}


#: Where options that several entries of a table share are described.
SHARED = {"model": (convolutional.staged,), "data": (image_set, Features)}


def descriptions(function: Callable[..., Any], table_name: str) -> dict[str, str]:
    """Option -> description: of a function, or a class and its base classes, and what its kind shares."""
    documented = inspect.getmro(function) if inspect.isclass(function) else (function,)
    found: dict[str, str] = {}
    for source in reversed((*documented, *SHARED.get(table_name, ()))):
        found |= described(source)
    return found


def _name(owner: Callable[..., Any]) -> str:
    """The module and the name of a function or a class."""
    return f"{owner.__module__}.{owner.__qualname__}"


def _doc(documented: Any) -> str:
    """The docstring; of a function that a decorator wraps, the function's."""
    return inspect.cleandoc(inspect.unwrap(documented).__doc__ or "")


def markdown(text: str) -> str:
    """A description of a docstring as Markdown, for a cell of a table."""
    text = re.sub(r":(?:class|func|meth|mod|data):`~?\.?([^`]+)`", r"`\1`", text).replace("``", "`")
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*<>\[\]$_])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def type_name(annotation: Any) -> str:
    """A type as the reader of a recipe knows it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return " ".join((type_name(args[0]), *(rule.text for rule in args[1:] if hasattr(rule, "text"))))
    if origin is typing.Literal:
        return " or ".join(f'`"{a}"`' if isinstance(a, str) else f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args if a is not type(None))
    if origin in (list, tuple):
        return f"list of {type_name(args[0])}" if args else "list"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}
    return names.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def default_text(value: Any) -> str:
    """A default as TOML, or what its absence means."""
    return "not set" if value is None else f"`{toml_value(value)}`"


def key_row(
    owner: Callable[..., Any], key: str, description: str, annotation: Any, default: Any, missing: object
) -> tuple[str, ...]:
    """The row of one key, of the docstring of ``owner``: key; meaning; type and unit; default and its source.

    A description ends with "Unit: …." and "Source: …." where there is a unit, and a default.
    """
    match = re.fullmatch(r"(.*?)(?: Unit: (.+?)\.)?(?: Source: (.+?)\.?)?", description)
    assert match
    meaning, unit, source = match[1], match[2] or "", match[3] or ""
    if not meaning:
        raise ValueError(f"recipe key {key}: has no description in the docstring of {_name(owner)}")
    required = default is missing
    if not required and not source:
        raise ValueError(
            f"recipe key {key}: its description in the docstring of {_name(owner)} does not say 'Source: …', "
            "where its default is from"
        )
    kind = f"{type_name(annotation)}, {markdown(unit)}" if unit else type_name(annotation)
    shown = markdown(source) or "required" if required else f"{default_text(default)}: {markdown(source)}"
    return f"`{key}`", markdown(meaning), kind, shown


HEAD = ("key", "meaning", "type, unit", "default: its source")


def dataclass_rows(kind: type, prefix: str = "") -> list[tuple[str, ...]]:
    """Rows of the keys of a table of the recipe."""
    texts, hints = described(kind), type_hints(kind, bounds=True)
    rows = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]) or field.name in NAMED_TABLES or not field.repr:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        key = prefix + field.name
        rows.append(
            key_row(kind, key, texts.get(field.name, ""), hints[field.name], default, dataclasses.MISSING)
        )
    return rows


def option_rows(function: Callable[..., Any], prefix: str, given: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Rows of the options of an entry of a registry: an update rule, an optimizer, a model, a data set."""
    texts = descriptions(function, prefix.rstrip("."))
    called = function.__init__ if inspect.isclass(function) else function
    hints = type_hints(called, bounds=True)
    rows = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given:
            continue
        about, empty = (prefix + name, texts.get(name, "")), inspect.Parameter.empty
        rows.append(key_row(function, *about, hints.get(name, Any), parameter.default, empty))
    return rows


#: Of a table whose keys depend on its name, what it has with every name.
ALL = {
    "data": ' With each of them `data.split`, by default "iid", divides the training set among learners: '
    "[Give each learner its own data](../../how-to/split.md).",
    "optimizer": " With each of them `optimizer.groups` give parts of the parameters another optimizer or "
    "rate: [Groups of parameters](../../how-to/training.md#groups-of-parameters).",
}


def recipe_page() -> Iterator[str]:
    """Every key of a recipe."""
    yield from ("# Recipe keys", "")
    yield (
        "A recipe is a TOML file. `landscape recipes NAME` prints one with all its keys. "
        "`--set KEY=VALUE` changes a key, such as `--set schedule.warmup=10`."
    )
    yield from ("", "## The run", "")
    yield from table(HEAD, dataclass_rows(Recipe))
    for name, hint in type_hints(Recipe).items():
        if dataclasses.is_dataclass(hint):
            yield from (f"## {name}", "", markdown(_doc(hint).split("\n\n")[0].replace("\n", " ")), "")
            yield from table(HEAD, dataclass_rows(typing.cast(type, hint), f"{name}."))
    for name, entries in NAMED_TABLES.items():
        yield from (f"## {name}", "", f"`{name}.name` is one of the following names.{ALL.get(name, '')}", "")
        for entry in entries.names():
            yield from entry_section(name, entry, entries[entry])


def entry_section(table_name: str, entry: str, function: Callable[..., Any]) -> Iterator[str]:
    """What an algorithm, optimizer, model or data set is, and its keys."""
    given = {"algorithm": ("learners", "seed"), "data": ("data_dir",)}.get(table_name, ())
    yield from (f'### {table_name}.name = "{markdown(entry)}"', "")
    text = re.split(r"^(?:Args|Attributes|Returns|Raises|Example):", _doc(function), flags=re.M)[0]
    for paragraph in text.strip().split("\n\n"):
        yield from (markdown(" ".join(paragraph.split())), "")
    if rows := option_rows(function, f"{table_name}.", given):
        yield from table(HEAD, rows)


def format_section(schema: str, kind: type[Result]) -> Iterator[str]:
    """The file format of one kind of result: its data sets and attributes."""
    texts, hints = descriptions(kind, ""), type_hints(kind)
    yield from (f"## {schema}", "", markdown(_doc(kind).split("\n\n")[0].replace("\n", " ")), "")
    yield from (
        (f"Written by {{class}}`landscape.{kind.__name__}`.", "")
        if kind.__name__ in landscape.__all__
        else ()
    )
    data_sets, attributes = [], []
    for field in dataclasses.fields(kind):
        if field.name not in texts:
            raise ValueError(f"{kind.__name__}.{field.name}: has no description in the class's docstring")
        text, unit = markdown(texts[field.name]), kind.units.get(field.name, "")
        optional = "" if _required(field) else " (optional)"
        if hints[field.name] in (bool, int, float, str) or hints[field.name] == tuple[str, ...]:
            named = {tuple[str, ...]: "list of texts", str: "text", int: "whole number"}
            kind_name = named.get(hints[field.name], type_name(hints[field.name]))
            attributes.append((f"`{field.name}`{optional}", kind_name, markdown(unit), text))
        else:
            shape = ", ".join(part.rstrip("+") for part in kind.shapes.get(field.name, "").split())
            data_sets.append((f"`/{field.name}`{optional}", f"({shape})", markdown(unit), text))
    yield from table(("data set", "shape", "unit", "meaning"), data_sets)
    yield from table(("attribute", "type", "unit", "meaning"), attributes)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def formats_page() -> Iterator[str]:
    """Every file format of a result."""
    yield from ("# File formats of results", "")
    yield (
        "Each section is one schema. A file holds one result at its root, or several in the groups `/0`, "
        "`/1`, …. Fields that are optional may be missing in files of earlier versions."
    )
    yield ""
    for schema in registry.results.names():
        kind = registry.results[schema]
        if kind.__module__.startswith("landscape."):  # not of a plugin, or of the tests
            yield from format_section(schema, kind)


def history_page() -> Iterator[str]:
    """Every column of the history of a run."""
    yield from ("# History columns", "")
    yield (
        "The group `/history` of a checkpoint has one data set for each column, with one number for each "
        "step. The attribute `unit` of a data set is the unit. A number that was not evaluated is NaN."
    )
    yield from ("", "## Columns of every run", "")
    yield from table(
        ("column", "unit", "meaning"), [(f"`{k}`", markdown(u), markdown(m)) for k, (u, m) in COLUMNS.items()]
    )
    yield from ("## Columns of single algorithms", "")
    rows = [
        (f"`{column}`", f"`{name}`", markdown(unit))
        for name in registry.algorithms.names()
        for column, unit in registry.algorithms[name].columns.items()
    ]
    yield from table(("column", "algorithm", "unit"), rows)


#: Commands without a function of their name -> the script of the gallery that draws what they show.
COMMAND_PICTURES = {
    "demo": "maps/contour",
    "plot": "maps/levels",
    "train": "training/curves",
}


def command_page(name: str) -> Iterator[str]:
    """The page of one command; sphinx-click reads its help and options."""
    yield from (f"({name})=", "", "```{eval-rst}", f".. click:: {site_commands.__name__}:{name}")
    yield from (f"   :prog: landscape {name}", "```", "")
    drawn = COMMAND_PICTURES.get(name)
    shown = f"../examples/gallery/{drawn}.py" if drawn else f"landscape.{name.replace('-', '_')}"
    yield from ("```{eval-rst}", f".. minigallery:: {shown}", "```", "")


def figure_pages() -> dict[str, Iterator[str]]:
    """The pages of the papers' figures, "papers" for README.md of figures/, where pictures and data stay."""
    folder = Path(__file__).parents[1] / "figures"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}
    front = re.sub(r"(?<=\]\()(?=[\w-]+\.md\))", "papers/", texts.pop("README"))
    front = front.replace('<img src="', '<img src="../../../figures/')
    names = re.findall(r"\]\(papers/([\w-]+)\.md\)", front)
    tree = ("```{toctree}", ":hidden:", "", *(f"{name} <papers/{name}>" for name in names), "```")
    pages = {"papers": iter((front, *tree))}
    for name, text in texts.items():
        text = re.sub(r"(?<=\]\()(?=[\w-]+\.(?:png|csv)\))", "../../../../figures/", text)
        pages[f"papers/{name}"] = iter((text.replace("](README.md)", "](../papers.md)"),))
    return pages


def commands_page() -> Iterator[str]:
    """The list of all commands."""
    yield from ("# Commands", "")
    yield "Each page is made from the help of its command, which `landscape COMMAND --help` prints."
    yield ""
    names = registry.commands.names()
    for group, commands in COMMANDS.items():
        rows = [(f"[{n}](commands/{n}.md)", markdown(registry.commands.summary(n))) for n in commands]
        yield from (f"## {group}", "", *table(("command", "what it does"), rows))
    yield from ("```{toctree}", ":hidden:", "", *(f"commands/{name}" for name in names), "```")


#: Tasks, in the order of the page: heading -> introduction, and where the names of the task are defined.
#: A name belongs to the task with the longest beginning of its place, the module and the name.
TASKS = {
    "Train": (
        "Runs from recipes, records of your own loop, decentralized training, and experiments on runs.",
        ("landscape.training", "landscape.results.grids.Sweep"),
    ),
    "Say what is analyzed": (
        "A model, a loss, data, and one vector of weights; networks and data sets by name.",
        ("landscape.problem", "landscape.models", "landscape.data", "landscape.core.analysis"),
    ),
    "Map": (
        "The loss on planes and along lines, and what is computed on finished surfaces.",
        ("landscape.analysis.grids", "landscape.analysis.planes", "landscape.evaluation",
         "landscape.results.grids", "landscape.results.surfaces"),
    ),
    "Measure curvature": (
        "Eigenvalues, trace and density of the Hessian, sharpness, the learners' spread, stability.",
        ("landscape.curvature", "landscape.analysis", "landscape.limits",
         "landscape.results.spectrum", "landscape.results.flatness"),
    ),
    "Measure the noise of gradients": (
        "What the learners' spread adds to the noise of a step, noise scales, and critical batches.",
        ("landscape.analysis.noise", "landscape.analysis.spread", "landscape.results.noise",
         "landscape.gradients"),
    ),
    "Compare": (
        "Which of several runs is flatter, with a test for each quantity.",
        ("landscape.analysis.compare", "landscape.results.comparison"),
    ),
    "Draw": (
        "Pictures of results and runs, and pages about them.",
        ("landscape.plots", "landscape.reports"),
    ),
    "Read and write files": (
        "Runs, results, and weights of other programs. Every result saves, loads, draws and converts itself.",
        ("landscape.checkpoint", "landscape.results"),
    ),
    "Catch errors": (
        "What a mistake or a failure raises, and what is warned of.",
        ("landscape.core.errors", "landscape.deprecated"),
    ),
    "Write a plugin": (
        "What packages of your own build on: `landscape.plugins`, and the checks of `landscape.testing`.",
        ("landscape.plugins", "landscape.testing"),
    ),
}  # fmt: skip


def task_of(place: str) -> str:
    """The task of a public name by its ``place``, such as "landscape.results.grids.Sweep"."""
    fits = [
        (len(start), task)
        for task, (_, starts) in TASKS.items()
        for start in starts
        if f"{place}.".startswith(f"{start}.")
    ]
    if not fits:
        raise ValueError(f"{place}: has no task; give it one in docs/site_reference.py, TASKS")
    return max(fits)[1]


#: Other types and errors that the descriptions name.
TYPES = (
    "landscape.problem.batches.Stream",
    "landscape.problem.batchnorm.BatchNormPolicy",
    "landscape.problem.data.Data",
    "landscape.problem.layout.Layout",
    "landscape.problem.layout.Slot",
    "landscape.results.base.Provenance",
    "landscape.results.shown.Finding",
    "landscape.analysis.forecast.Forecast",
    "landscape.results.shown.Radius",
    "landscape.results.shown.SurfaceCheck",
    "landscape.evaluation.grid.MismatchError",
    "landscape.training.processes.comm.LostProcessError",
)


def used_as() -> dict[str, str]:
    """Public class -> how scripts of the gallery use it: its own name, and functions that return it."""
    found = {name: f"{module}.{name}" for name, module in landscape._MODULES.items()}
    for name in landscape.__all__:
        if inspect.isfunction(function := getattr(landscape, name)):
            kind = inspect.signature(function).return_annotation
            if kind in found:
                found[kind] += f" landscape.{name}"
    return found


def autosummary(names: Iterable[str]) -> Iterator[str]:
    """A table of names, with a page for each."""
    yield from ("```{eval-rst}", ".. autosummary::", "   :toctree: api", "   :nosignatures:", "")
    yield from (f"   {name}" for name in names)
    yield from ("```", "")


#: Names of landscape.plugins that the page has under another name.
SHOWN_ELSEWHERE = ("plugins.registry", "plugins.Dataset", "plugins.InputError", "plugins.OperationError")


def api_page() -> Iterator[str]:
    """All public names, by task."""
    yield from ("# Python interface", "", "`import landscape` gives all names of this page. ")
    yield from ("[What is public](../public.md) says what the names promise.", "")
    tasks: dict[str, list[str]] = {task: [] for task in TASKS}
    for name, module in landscape._MODULES.items():
        if name == "__version__":
            continue
        place = module if module != "landscape" else f"landscape.{name}"
        inner = [f"{name}.{one}" for one in getattr(landscape, name).__all__] if place != module else [name]
        tasks[task_of(f"{place}.{name}")] += (
            f"landscape.{one}" for one in inner if one not in SHOWN_ELSEWHERE
        )
    tasks["Write a plugin"] += (
        f"landscape.testing.{name}" for name in landscape.testing.__all__ if name != "CHECKS"
    )
    for task, names in tasks.items():
        yield from (f"## {task}", "", TASKS[task][0], "", *autosummary(names))
    yield from ("## Other types and errors", "", *autosummary(TYPES))


def write_pages(folder: Path) -> None:
    """Write all generated pages below ``folder``; a page that has not changed is not written again."""
    for inner in ("commands", "papers"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    pages = {
        "api": api_page(),
        "recipes": recipe_page(),
        "formats": formats_page(),
        "history": history_page(),
        "messages": messages_page(),
    }
    pages |= {"commands": commands_page(), **figure_pages()}
    pages |= {f"commands/{name}": command_page(name) for name in registry.commands.names()}
    for name, lines in pages.items():
        path, text = folder / f"{name}.md", "\n".join(lines) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder).with_suffix("")) not in pages:
            path.unlink()
