"""What is broken off: commands with tiny settings, and what must come out whatever was done to them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import landscape
from landscape import Checkpoint
from tests.conftest import TINY
from tests.test_conformance import ANALYSES, COMMANDS

RECIPE = TINY.replace("steps = 30", "steps = 60").replace(
    "checkpoint = { every = 10 }", "checkpoint = { every = 5 }"
)
# How long a process may be silent (s), and how much longer nobody may wait for it. Four processes that start at
# the same time on two busy cores were silent for 5 s.
TIMEOUT, BEYOND = 15.0, 15.0


@dataclass(frozen=True)
class Case:
    """``words`` of a command that goes on when given again; {run}: the folder of a run; {folder}: its own."""

    name: str
    words: tuple[str, ...]
    nproc: int = 1

    def command(self, base: Path, out: Path, timeout: float) -> list[str]:
        return [word.format(run=base, folder=out, timeout=timeout) for word in self.words]


def _both(name: str, *words: str, option: str = "--nproc") -> list[Case]:
    several = (*words, option, "2", "--timeout", "{timeout}")
    return [Case(f"{name}, 1 process", words), Case(f"{name}, 2 processes", several, 2)]


def _tabled() -> list[Case]:
    """The commands that write files, with the words of the conformance tests."""
    cases = {}
    for name, (_, _, more) in ANALYSES.items():
        if "command" in more:
            command, *words = more["command"]
            cases[name] = (command, "{run}/last.h5", *words, "-o", "{folder}/out.h5")
    cases |= {name: (name, *words) for name, (words, _) in COMMANDS.items() if "-o" in words}
    return [Case(name, (*words, "-q")) for name, words in cases.items()]


ALL = [
    *_both("train", "train", "{run}/tiny.toml", "--resume", "-q", "-o", "{folder}/run"),
    *_both("sweep", "sweep", "{run}/tiny.toml", "--set", "lr=0.1,0.2", "-q", "-o", "{folder}/sweep", option="--jobs"),
    *_both(
        "contour", "contour", "{run}/last.h5", "--grid", "120x80", "--method", "batched", "-q",
        "-o", "{folder}/contour.h5",
    ),
    *_both(
        "hessian-grid", "hessian-grid", "{run}/last.h5", "--grid", "6", "--search", "exact", "-q",
        "-o", "{folder}/hessian.h5",
    ),
    *_both(
        "figures", "figures", "fig2a", "--scale", "smoke", "-q", "-o", "{folder}/figures", "--runs", "{folder}/runs",
        option="--jobs",
    ),
    Case("line", ("line", "{run}/last.h5", "-q", "-o", "{folder}/line.h5")),
    Case("import", ("import", "{run}/net.pt", "--model", "mlp(widths=[6, 8, 3])", "-o", "{folder}/net.h5")),
]  # fmt: skip
ALL += [case for case in _tabled() if case.words[0] not in {other.words[0] for other in ALL}]


def prepare(base: Path) -> None:
    """Make in ``base`` what the commands work on."""
    from landscape.training.recipes import recipe
    from landscape.training.run import launch

    base.mkdir(parents=True)
    (base / "tiny.toml").write_text(RECIPE)
    launch.launch(recipe.read(str(base / "tiny.toml")), base)
    layers = (torch.nn.Flatten(), torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    net = torch.nn.Sequential(*layers)
    torch.save(net.state_dict(), base / "net.pt")


# What a clock measures, and where something lay.
_CLOCKED = {"wall_s", "wait_s", "samples_per_s", "seconds", "method", "path"}


def contents(folder: Path) -> dict[str, Any]:
    """All that the result files below ``folder`` hold, by file and name; raises what a broken one raises."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.h5")):
        loaded = landscape.load(path)
        for i, result in enumerate(loaded if isinstance(loaded, list) else [loaded]):
            for field in dataclasses.fields(result):
                value = getattr(result, field.name)
                if field.name not in _CLOCKED:
                    _flatten(f"{path.relative_to(folder)} {i} {field.name}", value, found)
        if not isinstance(loaded, (list, Checkpoint)):
            assert found, path
    return found


def _flatten(name: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in _CLOCKED:
                _flatten(f"{name} {key}", inner, found)
    else:
        found[name] = value.numpy() if isinstance(value, torch.Tensor) else value


def difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    """The first thing that is not the same to the bit in both, "" if there is none."""
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return f"{name}: only in one"
        if isinstance(a[name], np.ndarray):
            numbers = a[name].dtype.kind == "f"
            if not np.array_equal(a[name], b[name], equal_nan=numbers):
                return name
        elif repr(a[name]) != repr(b[name]):
            return name
    return ""
