"""The parameters of public functions, the fields of results and the options of commands against the vocabulary.

The words stand in docs/reference/vocabulary.md, with the types that a parameter of the name may have.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from landscape import plugins
from landscape.checkpoint.history import UNITS
from landscape.cli import group
from landscape.core import registry
from landscape.core.options import type_hints
from landscape.training.recipes.recipe import Recipe
from tests.test_docstrings import every_name, with_members

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "vocabulary.md"
ROWS = [
    [cell.strip().replace("&#124;", "|") for cell in line[1:-1].split("|")]
    for line in PAGE.read_text("utf-8").splitlines()
    if line.startswith("| `")
]
UNUSED = {word: row[1] for row in ROWS if len(row) == 2 for word in re.findall("`(.*?)`", row[0])}


@dataclasses.dataclass
class Word:
    """A row of the vocabulary: the types of parameters, those of fields, and the unit."""

    types: set[str]
    fields: set[str]
    unit: str


#: A type -> the names of what bounds it.
BOUNDED = {
    "int": "Natural|Count|AtLeastTwo|Seed|GroupedSamples", "float": "Positive|NonNegative|BelowOne|UpToOne|Span|Dpi|Width",
    "str": "Derivatives|Method|Autocast|Check|Form|MixingForm|Order|Around|Mode|DeviceName|QuantityName",
    "Tensor": "Vector", "torch.dtype": "Dtype", "torch.device | str": "Device", "Sequence[int]": "Seeds",
    "int | tuple[int, int]": "GridSize",
}  # fmt: skip


def members(annotation: str) -> set[str]:
    """The types that an annotation joins by "|", without None: {"int", "str"} of "int | str | None"."""
    text = re.sub(r"Annotated\[((?:[^\[\],]|\[[^\[\]]*\])+),.*\]$", r"\1", annotation)
    text = text.replace("tuple[str, ...]", "Sequence[str]").replace("Names", "Sequence[str]")
    text = re.sub(r"Literal\[(['\"]).*?\1\]", "str", text)  # words, which are listed
    for kind, names in BOUNDED.items():
        text = re.sub(rf"\b({names})\b", kind, text)
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        parts = [*parts, ""] if letter in "|," and not depth else [*parts[:-1], parts[-1] + letter]
    return {part.strip() for part in parts} - {"None", ""}


def word_of(text: str) -> Word:
    types, _, unit = text.removesuffix(")").partition(" (")
    own, _, fields = types.partition("; result: ")
    return Word(members(own), members(fields or own), unit)


#: The unit in the annotation of a field.
UNIT = re.compile(r"^Annotated\[(?:int|float|.*, '[^']*'), '(\w+)'\]$")
WORDS = {row[0].strip("`"): word_of(row[1]) for row in ROWS if len(row) > 2}

#: Words of one function each, which its own docstring describes.
OWN = {
    "LandscapeError.line": "flags",
    "limits.lr_that_keeps_minima": "before after",
    "loss_change": "before after",
    "connect": "a b curve",
    "line": "a b",
    "average": "coefficients base plan last factors rank exact",
    "compare": "problems equal_loss planes rho_average preconditioner_of",
    "learning_coefficient": "localization step_size nbeta chains max_rhat",
    "sharpness": "adaptive m starts",
    "smoothing": "trajectory alpha_e",
    "Checkpoint.check_data": "dataset",
    "Checkpoint.load": "whole_history",
    "ResultFile": "writes",
    "ResultFile.drop": "reason",
    "ResultFile.earlier": "differs",
    "ResultFile.once": "compute",
    "ResultFile.only": "sources",
    "Exchanges.agree": "call arguments",
    "ResultFile.put": "finished",
    "top_eigenvalues": "initial",
    "HessianOperator": "graph_bytes",
    "save_vts": "surface",
    "Surface.radius": "drop",
    "Line.radius": "drop",
    "draw": "visuals dpi",
    "Problem": "penalty",
    "Problem.to_curvlinops": "operator",
    "Spectrum.of": "parts",
    "MeanLoss.batchnorm_statistics": "inputs",
    "MeanLoss.loss_and_gradient": "out",
    "Density.broadened": "at",
    "Density.moment": "order",
    "basins": "surface rises around",
    "Sweep.best": "key",
    "sweep": "recipes rounds",
    "stability": "own_limit own_delay",
    "topologies": "mixings parameters picture",
    "Surface.plane": "like",
    "barrier": "t",
    "recipes": "pattern",
    "train": "max_restarts",
    "critical_batch": "factors scaling",
    "DecentralizedDataParallel": "algorithm average_buffers peak_lr",
    "DecentralizedDataParallel.forward": "keywords",
    "Recorder": "every test sharpness save_every scalars",
    "Recorder.log": "unit",
    "testing.check_analysis": "analysis truth command seeded rtol forms",
    "testing.check_command": "command arguments",
    "testing.check_instrument": "instrument changes",
    "testing.check_optimizer": "reference",
    "testing.check_rule": "rule sharp",
    "plugins.Registry": "option room",
    "plugins.choose": "allowed",
    "plugins.classification": "train test scale classes",
    "plugins.panels": "beside",
    "plugins.wrapped_panels": "count",
    "plugins.finish": "figure legend",
    "plugins.command": "own",
    "ShardedProblem.flatten": "tensors",
    "Registry.declare": "place summary",
    "Registry.make": "own",
    "Rule.finish_moved": "moved",
    "SSGD.finish_moved": "moved",
    "Rule.generator": "purpose",
    "Rule.restore": "shared",
    "Optimizer.start": "layout",
    # Fields that are tables of a recipe, or what an object is made of.
    "Recipe": "checkpoint",
    "Execution": "save previous",
}
#: Options of a command that are no parameters of the function of the same name.
OPTIONS = {
    "basins": "around",
    "average": "by_factor",
    "batch-sharpness": "no_lambda_max",
    "compare": "groups at_equal_loss",
    "critical-batch": "branches lr_scaling",
    "fetch": "mirror",
    "figures": "all scale budget dry_run records prune",
    "plot": "quantity log linear levels vmax cmap dpi animate film_grid frames fps",
    "report": "analyse",
    "sharpness": "not_adaptive",
    "stability": "from_delay from_momentum from_form from_batch",
    "train": "scalars",
}


def parameters(value: Any) -> Iterator[inspect.Parameter]:
    """The parameters of a function or class, without self."""
    yield from (p for p in inspect.signature(value).parameters.values() if p.name not in ("self", "cls"))


def faults(value: Any, own: str = "", *, is_field: bool = False) -> list[str]:
    """What is wrong with the names and types of a function's parameters, or a dataclass's fields."""
    found = []
    for parameter in parameters(value):
        name, types = parameter.name, members(str(parameter.annotation))
        word = WORDS.get(name)
        if name in own.split():
            continue
        if name in UNUSED:
            found.append(f"{name}: {UNUSED[name]} is the word")
        elif word is None:
            found += [] if is_field else [f"{name}: not in the vocabulary"]
        elif types - (word.fields | {"Array"} if is_field else word.types):
            found.append(f"{name}: {' | '.join(sorted(types))} is not its type")
        elif is_field and (unit := UNIT.findall(str(parameter.annotation))):
            found += [f"{name}: {unit[0]} is not its unit"] if word.unit not in ("", unit[0]) else []
    return found


def described() -> Iterator[tuple[str, Any, bool]]:
    """(name, function or class, True for the fields of a dataclass) of all that has a signature."""
    methods = (one for name in plugins.__all__ for one in with_members(name, getattr(plugins, name)))
    for name, value, owner in (*every_name(), *(one for one in methods if one[2])):
        if isinstance(value, property) or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if not (inspect.isclass(value) and issubclass(value, Exception)):
            yield (value.__qualname__ if owner else name), value, dataclasses.is_dataclass(value)


FUNCTIONS = {name: (value, is_field) for name, value, is_field in described()}


def test_names_and_types_are_those_of_the_vocabulary() -> None:
    found = {}
    for name, (value, is_field) in FUNCTIONS.items():
        found[name] = faults(value, OWN.get(name, ""), is_field=is_field)
        if value.__module__.startswith("landscape.paper"):  # figures have words of their own
            found[name] = [fault for fault in found[name] if fault.endswith("is the word")]
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def options() -> Iterator[tuple[str, click.Option]]:
    """(command, option) of all commands."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        yield from ((name, option) for option in command.params if isinstance(option, click.Option))


def option_faults(command: str, option: click.Option) -> list[str]:
    """What is wrong with the words of an option, and with its type."""
    flags = [flag for flag in (*option.opts, *option.secondary_opts) if flag.startswith("--")]
    found = []
    for name in (flag.lstrip("-").replace("-", "_") for flag in flags):
        word = WORDS.get(name)
        kind = {"integer": "int", "float": "float", "boolean": "bool"}.get(option.type.name)
        if name in f"{OPTIONS.get(command, '')} {OWN.get(command.replace('-', '_'), '')}".split():
            continue
        if name in UNUSED:
            found.append(f"--{name}: {UNUSED[name]} is the word")
        elif word is None:
            found.append(f"--{name}: not in the vocabulary")
        elif kind and kind not in word.types:
            found.append(f"--{name}: {kind} is not its type")
    return found


def test_options_are_words_of_the_vocabulary() -> None:
    found = {f"{name}: {fault}" for name, option in options() for fault in option_faults(name, option)}
    assert found == set()


def test_keys_of_recipes_and_columns_of_histories_are_not_former_words() -> None:
    tables = [kind for kind in type_hints(Recipe).values() if dataclasses.is_dataclass(kind)]
    keys = [field.name for kind in tables for field in dataclasses.fields(kind)]
    assert "every" in keys
    columns = [name for kind in registry.instruments for name in registry.instruments[kind].columns]
    assert {*keys, *UNITS, *columns} & UNUSED.keys() == {"checkpoint"}  # init.checkpoint, a file


def test_no_word_is_listed_without_need() -> None:
    """Every row is used by two functions or options at least, every other word by its own."""
    used = {name: [p.name for p in parameters(value)] for name, (value, _) in FUNCTIONS.items()}
    for name, words in OWN.items():
        assert set(words.split()) <= set(used[name]) - WORDS.keys(), name
    flags: dict[str, set[str]] = {}
    for name, option in options():
        flags.setdefault(name, set()).update(
            f.lstrip("-").replace("-", "_") for f in (*option.opts, *option.secondary_opts)
        )
    for name, words in OPTIONS.items():
        assert set(words.split()) <= flags[name] - WORDS.keys(), name
    every = [word for words in (*used.values(), *flags.values()) for word in words]
    assert [word for word in WORDS if every.count(word) < 2] == []
    assert not WORDS.keys() & UNUSED.keys()


def measure(k: float, hvps: int = 1, draws: int | None = None, odd: int = 0) -> None:
    """An invented function with two wrong words and a wrong type."""


def test_a_wrong_word_is_found() -> None:
    assert faults(measure) == [
        "k: float is not its type",
        "hvps: `products` is the word",
        "odd: not in the vocabulary",
    ]
    assert "odd" not in str(faults(measure, "odd"))
    wrong = click.Option(["--top-k"], type=int), click.Option(["--draws"], type=float)
    assert [option_faults("spectrum", option) for option in wrong] == [
        ["--top_k: `k` is the word"],
        ["--draws: float is not its type"],
    ]
