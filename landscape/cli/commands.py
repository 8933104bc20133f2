"""The commands by group, found in the sources of this package without importing them.

A module is imported when its command is used. The line that ``landscape --help`` has for a command is the
beginning of its docstring. Above a public name, ``# command: GROUP`` makes a function a command.
"""

from __future__ import annotations

import re
from pathlib import Path

from landscape.core import registry

ROOT = Path(__file__).parents[1]
#: Function with the same command, which is made from it -> its module; and the group of the command.
MODULES, _GROUP_OF = dict[str, str](), dict[str, str]()
for _group, _module, _name in re.findall(
    r"^# command: (.+)\nfrom (\S+) import (\w+)", (ROOT / "__init__.pyi").read_text("utf-8"), re.M
):
    MODULES[_name], _GROUP_OF[_name] = _module, _group

#: Title of a group -> its commands; ``landscape --help`` has this order.
GROUPS = {
    title: (*names, *(name.replace("_", "-") for name, group in _GROUP_OF.items() if group == title))
    for title, names in {
        "Begin": ("demo", "doctor", "fetch"),
        "Train": ("recipes", "train", "sweep", "topologies", "import"),
        "Map the landscape": ("contour", "line", "connect", "basins", "average", "compare", "smoothing"),
        "Measure curvature": ("spectrum", "hessian-grid", "batch-sharpness", "stability"),
        "Measure noise and learners": ("noise-scale",),
        "Papers": ("figures",),
        "Show": ("info", "plot", "report"),
    }.items()
}

# What makes a function a command, with another name where that is a keyword of Python; its docstring.
_COMMAND = re.compile(r'^@(?:click\.)?command\((?:\s+"(\w+)",)?.*?^def (\w+)\(.*?"""(.*?)\n\n', re.M | re.S)

for path in Path(__file__).parent.glob("*.py"):
    for name, function, summary in _COMMAND.findall(path.read_text("utf-8")):
        place = f"landscape.cli.{path.stem}:{function}"
        registry.commands.declare(name or function.replace("_", "-"), place, " ".join(summary.split()))
for name, module in MODULES.items():
    source = ROOT.parent.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
    summary = re.search(rf'^def {name}\(.*?"""(.*?)\n\n', source, re.M | re.S)
    assert summary
    title = name.replace("_", "-")
    registry.commands.declare(title, f"landscape.cli.analysis:{name}", " ".join(summary[1].split()))
