"""The words of the commands in landscape/cli/commands.json; ``python -m tests.test_commands`` writes them anew."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import click

import landscape.cli
from landscape.cli import commands, output
from landscape.cli.options import Number
from landscape.core.analysis import ANALYSES
from landscape.core.options import Within

FILE = Path(landscape.cli.__file__).with_name("commands.json")
#: Options that each command gets when it is looked up.
EVERY = {flags.split()[-1] for flags in output._EVERY}
#: Packages in which commands are defined, and functions from which they are made.
ROOMS = ("landscape.cli", "landscape.analysis", "landscape.training.experiments")


def words_of(parameter: click.Parameter) -> dict[str, Any]:
    """What click is told of an option or argument, where that is not click's default."""
    context = click.Context(click.Command("x"))
    words = {
        "declarations": [parameter.name],
        "complete": complete(parameter, context),
        "metavar": parameter.make_metavar(context),
        "required": parameter.required,
        "nargs": parameter.nargs if parameter.nargs != 1 else None,
    }
    if isinstance(parameter.type, Number):
        bounds = [
            rule
            for rule in getattr(parameter.type.annotation, "__metadata__", ())
            if isinstance(rule, Within)
        ]
        words["number"] = [parameter.type.name, *(dataclasses.astuple(bounds[0]) if bounds else ())]
    if isinstance(parameter, click.Option):
        flags = [*parameter.opts, *(f"/{each}" for each in parameter.secondary_opts)]
        words |= {"declarations": ["".join(flags) if parameter.secondary_opts else flag for flag in flags]}
        words["declarations"] = [*dict.fromkeys(words["declarations"]), parameter.name]
        words |= {"metavar": None} if parameter.is_flag else {}
        words |= {name: getattr(parameter, name) for name in ("help", "is_flag", "multiple", "show_default")}
        words["default"] = parameter.to_info_dict()["default"]
    return {name: value for name, value in words.items() if value or type(value) in (int, float)}


def complete(parameter: click.Parameter, context: click.Context) -> list[str] | str:
    """The values that a shell offers for a parameter, or "file" or "dir"; "" where it offers nothing."""
    items = parameter.shell_complete(context, "")
    if items and items[0].type != "plain":
        return items[0].type
    return [item.value for item in items] or ""


def every() -> dict[str, dict[str, Any]]:
    """Command -> its words, as its module defines it."""
    places: dict[str, tuple[str, str]] = {}
    for room in map(importlib.import_module, ROOMS):
        for found in pkgutil.iter_modules(room.__path__):
            module = f"{room.__name__}.{found.name}"
            for attribute, value in vars(importlib.import_module(module)).items():
                own = isinstance(value, click.Command) and inspect.unwrap(value.callback).__module__ == module
                if own:
                    places[value.name] = (f"{module}:{attribute}", "")
    for function, known in ANALYSES.items():
        if known.group:
            name = function.__name__.replace("_", "-")
            places[name] = (f"{function.__module__}:{function.__name__}", known.group)
    texts = {}
    for name, (place, group) in sorted(places.items()):
        module, _, attribute = place.partition(":")
        command = landscape.cli.as_command(getattr(importlib.import_module(module), attribute))
        params = [words_of(each) for each in command.params if each.name not in EVERY]
        texts[name] = {"place": place, "group": group, "help": command.help, "epilog": command.epilog}
        texts[name]["params"] = params
    return texts


def test_the_words_of_all_commands_are_those_that_their_modules_say() -> None:
    assert json.loads(FILE.read_text("utf-8")) == json.loads(text())


def test_a_command_without_its_function_keeps_its_name() -> None:
    assert all(commands.without_callback(name).name == name for name in commands.WORDS)


def test_every_command_that_computes_a_loss_takes_fewer_samples() -> None:
    of = {name: {each["declarations"][0] for each in words["params"]} for name, words in every().items()}
    for name in {*of} - {"critical-batch"}:  # whose samples are those of training
        assert ("--samples" in of[name]) == ("--dtype" in of[name])


def text() -> str:
    """The file: a line for each option."""
    entries = []
    for name, words in every().items():
        params = ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in words.pop("params"))
        head = json.dumps(words, ensure_ascii=False, indent=1)[2:-2]
        entries.append(f'"{name}": {{\n{head},\n "params": [\n  {params}\n ]}}')
    return "{" + ",\n".join(entries) + "}\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
