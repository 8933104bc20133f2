"""Options made from the parameters of the function that a command calls: its defaults, types and Args."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from landscape.analysis.planes import IGNORES, NORMS
from landscape.cli.choices import Choice
from landscape.core.errors import InputError
from landscape.curvature.eigenvalues import SEARCHES
from landscape.evaluation.evaluate import PATHS, PRECISIONS
from landscape.problem.batchnorm import POLICIES

Option = Callable[[Any], Any]
TYPES = {"int": int, "float": float, "str": str, "bool": bool}


def parse_grid(text: str) -> tuple[int, int]:
    """(nx, ny) from "50" or "51x25"."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match or min(int(match[1]), int(match[2] or match[1])) < 1:
        raise InputError(
            f"--grid: '{text}' is not allowed, it must be K or KXxKY with numbers ≥ 1, such as 51x25"
        )
    return int(match[1]), int(match[2] or match[1])


class GridType(click.ParamType):  # type: ignore[type-arg]  # no generic class in click 8.1
    """The points of a grid; a type and no callback, so that a default is read where commands call others."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """(nx, ny) from the text of the option."""
        return parse_grid(value) if isinstance(value, str) else value


#: What a signature and its Args do not say of a parameter, by its name: what click.option takes, and
#: ``flag``, the option where it is not the name. A command adds to it, or replaces it.
TABLE: Mapping[str, Mapping[str, Any]] = {
    "grid": {"type": GridType(), "help": "Points: K, or KXxKY such as 51x25."},
    "span": {"help": "x and y run over [−span, span]. [default: 0.1, or what shows all markers]"},
    "norm": {
        "type": Choice(NORMS),
        "help": "Directions: none (i.i.d. normal, the paper's), filter or layer (Li et al. 2018).",
    },
    "ignore": {
        "type": Choice(IGNORES),
        "help": "What random directions leave out: none, or bias+norm (bias and norm parameters). "
        "[default: bias+norm with --norm filter, else none]",
    },
    "tolerance": {
        "metavar": "SIZE",
        "help": "Compute exact points only until the others can be interpolated with an error below SIZE: 1% "
        "of the range shown, or a number such as 0.005. [default: all points are exact]",
    },
    "bn": {
        "type": Choice(POLICIES),
        "help": "BatchNorm statistics: center (the checkpoint's), recalibrate (estimated again at each "
        "point) or train (those of the batch itself).",
    },
    "bn_samples": {"help": "Number of samples for recalibrate, and in a batch for train."},
    "path": {"type": Choice(PATHS), "help": "How points are evaluated."},
    "precision": {
        "type": Choice(PRECISIONS),
        "help": "Arithmetic: model (that of --dtype), bfloat16 (networks that torch.fx can trace), tf32 "
        "(CUDA).",
    },
    "search": {
        "type": Choice(SEARCHES),
        "help": "auto: cheaper products find the eigenvectors, the results are verified and refined with "
        "exact products; exact: exact products only.",
    },
    "top_k": {"metavar": "K", "help": "Eigenvectors of the K largest eigenvalues."},
    "draws": {"flag": "--min-draws", "help": "At least so many draws."},
    "max_draws": {"help": "At most so many draws."},
}


def options_of(function: Callable[..., Any], *names: str, **own: Mapping[str, Any]) -> list[Option]:
    """The options of the parameters ``names`` and ``own`` of ``function``, in this order.

    Default and type are those of the signature; the help is the first sentence of the parameter's Args. What
    ``TABLE`` has of a name, or ``own``, comes before.
    """
    parameters, said = inspect.signature(function).parameters, described(function)
    found = []
    for name in dict.fromkeys((*names, *own)):
        known: dict[str, Any] = {**TABLE.get(name, {}), **own.get(name, {})}
        flag = known.pop("flag", f"--{name.replace('_', '-')}")
        parameter = parameters[name]
        kind = TYPES[str(parameter.annotation).partition(" | ")[0]] if "type" not in known else known["type"]
        settings: dict[str, Any] = {"help": said.get(name), "type": kind}
        if kind is bool:
            settings["is_flag"] = True
        if parameter.default is inspect.Parameter.empty:
            settings["required"] = True
        elif parameter.default is not None:
            settings |= {"default": parameter.default, "show_default": parameter.default is not False}
        found.append(click.option(flag, name, **settings | known))
    return found


def described(function: Callable[..., Any]) -> dict[str, str]:
    """The first sentence of each parameter in the Args of a docstring, without its markup."""
    block = re.search(r"^Args:\n(.*?)^\S", inspect.getdoc(function) or "", re.M | re.S)
    found: dict[str, str] = {}
    for entry in re.split(r"^    (?=\S)", block[1] if block else "", flags=re.M)[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        text = re.sub(r":\w+:`([^`]*)`", r"\1", text).replace("``", "")
        sentence = re.split(r"(?<!\bal)\.\s(?=[A-Z])", text)[0].rstrip(".")
        sentence += "" if sentence.endswith("…") else "."
        symbol = re.match(r"\w\b", sentence)  # γ and m stay small
        found |= dict.fromkeys(names.split(", "), sentence if symbol else sentence[:1].upper() + sentence[1:])
    return found
