"""The commands by group, found in the sources of this package without importing them.

A module is imported when its command is used. The line that ``landscape --help`` has for a command is the
beginning of its docstring.
"""

from __future__ import annotations

import re
from pathlib import Path

from landscape.core import registry

#: Title of a group -> its commands; ``landscape --help`` has this order.
GROUPS = {
    "Begin": ("demo", "doctor", "fetch", "completion"),
    "Train": ("recipes", "train", "watch", "sweep", "plan", "import"),
    "Map the landscape": ("contour", "line", "basins", "compare", "smoothing"),
    "Measure curvature": (
        "spectrum", "hessian-grid", "sharpness", "learning-coefficient", "batch-sharpness", "stability",
    ),
    "Measure noise and learners": (
        "noise", "noise-scale", "noise-alignment", "critical-batch", "disagreement",
    ),
    "Experiments and papers": ("minima", "saddles", "figures"),
    "Show": ("info", "plot", "report"),
}  # fmt: skip

# What makes a function a command, with another name where that is a keyword of Python; its docstring.
_COMMAND = re.compile(r'^@(?:click\.)?command\((?:\s+"(\w+)",)?.*?^def (\w+)\(.*?"""(.*?)\n\n', re.M | re.S)

for path in Path(__file__).parent.glob("*.py"):
    for name, function, summary in _COMMAND.findall(path.read_text("utf-8")):
        place = f"landscape.cli.{path.stem}:{function}"
        registry.commands.declare(name or function.replace("_", "-"), place, " ".join(summary.split()))
