"""The commands by group, and their words, for lists, help and completion, which import no command.

``commands.json`` has the words: ``python -m tests.test_commands`` writes it from the commands themselves, and
a test compares. A module is imported when its command is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import click

from landscape.cli.options import Choice, Number, names, paths
from landscape.core import registry
from landscape.core.options import Within

#: Command -> its place, its group where it is made from an analysis, and its words.
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


def described(name: str) -> click.Command:
    """The command ``name`` as its words describe it: with its help and its completion, and no callback."""
    words = WORDS[name]
    params: list[click.Parameter] = []
    for entry in words["params"]:
        settings = {"required": False, **entry}
        declarations, complete = settings.pop("declarations"), settings.pop("complete", "")
        if isinstance(complete, list):
            settings["shell_complete"] = names(lambda every=complete: every)  # type: ignore[misc]
            if declarations[0][0] == "-":  # a name may be a pattern, or a plugin's
                settings["type"] = Choice(complete)
        elif complete:
            settings["shell_complete"] = paths(complete)
        if "number" in settings:
            name, *bounds = settings.pop("number")
            kind: Any = {"integer": int, "float": float}[name]
            settings["type"] = Number(Annotated[kind, Within(*bounds)])
        form = click.Option if declarations[0][0] == "-" else click.Argument
        params.append(form(declarations, **settings))
    return click.Command(name, params=params, help=words["help"], epilog=words["epilog"])


for _name, _words in WORDS.items():
    registry.commands.declare(_name, _words["place"], " ".join(_words["help"].partition("\n\n")[0].split()))
