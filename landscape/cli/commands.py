"""The commands by group, with help and options, for lists, help and completion, which import no command.

``python -m tests.test_commands`` writes ``commands.json`` from the commands themselves, and a test compares
the two. A module is imported when its command is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import click

from landscape.cli.options import Choice, Number, offer, paths
from landscape.core import registry
from landscape.core.options import Within

#: Command -> its module and name there ("place"), its group if it is made from an analysis, help and options.
WORDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
#: Title of a group -> its commands; ``landscape --help`` has this order.
GROUPS = {
    title: (*first_names, *(name for name, words in WORDS.items() if words["group"] == title))
    for title, first_names in {
        "Begin": ("demo", "doctor", "fetch"),
        "Train": ("recipes", "train", "sweep", "topologies", "import"),
        "Map the landscape": ("contour", "line", "connect", "basins", "average", "compare", "smoothing"),
        "Measure curvature": ("spectrum", "hessian-grid", "batch-sharpness", "stability"),
        "Measure noise and learners": ("noise-scale",),
        "Papers": ("figures",),
        "Show": ("info", "plot", "report"),
    }.items()
}


def without_callback(name: str) -> click.Command:
    """Return the command ``name`` with its help, options and completion, but without its function."""
    words = WORDS[name]
    params = [_parameter({"required": False, **entry}) for entry in words["params"]]
    return click.Command(name, params=params, help=words["help"], epilog=words["epilog"])


def _parameter(settings: dict[str, Any]) -> click.Parameter:
    """Return the option or argument that an entry of ``commands.json`` describes."""
    declarations, complete = settings.pop("declarations"), settings.pop("complete", "")
    is_option = declarations[0].startswith("-")
    if isinstance(complete, list):
        settings["shell_complete"] = offer(lambda: complete)
        if is_option:  # an argument may also be a pattern, or the name of a plugin
            settings["type"] = Choice(complete)
    elif complete:
        settings["shell_complete"] = paths(complete)
    if "number" in settings:
        type_name, *bounds = settings.pop("number")
        number_type: Any = {"integer": int, "float": float}[type_name]
        settings["type"] = Number(Annotated[number_type, Within(*bounds)])
    return click.Option(declarations, **settings) if is_option else click.Argument(declarations, **settings)


for _name, _words in WORDS.items():
    registry.commands.declare(_name, _words["place"], " ".join(_words["help"].partition("\n\n")[0].split()))
