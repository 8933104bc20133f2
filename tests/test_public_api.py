"""The public names with their signatures, and what each analysis costs, against committed tables.

``python -m tests.test_public_api`` writes both tables anew; a change of them is a change that users see.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import landscape
from tests import problems
from tests.test_conformance import ANALYSES, is_slow
from tests.test_docstrings import every_name

API, COUNTS = (Path(__file__).parent / name for name in ("public_api.txt", "counts.txt"))


def api() -> str:
    """A line for each public name: its signature, without addresses."""
    found = set()
    for name, value, _ in every_name():
        function = value.fget if isinstance(value, property) else value
        alias = not (inspect.isclass(value) or inspect.isroutine(function))
        bare = alias or (inspect.isclass(value) and issubclass(value, Exception))
        signature = "" if bare else str(inspect.signature(function))
        kind = "property " if isinstance(value, property) else "class " if inspect.isclass(value) else ""
        found.add(re.sub(" at 0x[0-9a-f]+", "", f"{kind}{name}{signature}\n"))
    return "".join(sorted(found))


#: Calls on a network of 107 parameters with 53 samples: the analyses with the options of the conformance tests.
CALLS: dict[str, Callable[[landscape.Problem], Any]] = {
    "Problem.loss()": lambda p: p.loss(),
    "Problem.gradient()": lambda p: p.gradient(),
    "random_plane(norm='filter')": lambda p: landscape.random_plane(p, norm="filter"),
    "extreme_eigenvalues()": landscape.extreme_eigenvalues,
    "top_eigenvalues(k=3)": lambda p: landscape.top_eigenvalues(p, 3),
    "trace()": landscape.trace,
    "density()": landscape.density,
    **{
        name: functools.partial(analysis, **options)
        for name, (analysis, options, _) in ANALYSES.items()
        if not is_slow(name, "seed")
    },
}


class Multiplications(TorchDispatchMode):
    """Counts those of all matrix products, whatever path leads to them."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self.number += out.numel() * args["add" in name].shape[-1]
        return out


def counts() -> Iterator[tuple[str, int, float]]:
    """(call, the Hessian products that its result states, multiplications over those of Problem.loss())."""
    unit = 0
    for call, function in CALLS.items():
        problem = problems.mlp()
        with Multiplications() as all_of_it:
            result = function(problem)
        unit = unit or all_of_it.number
        yield call, int(np.sum(getattr(result, "products", 0))), all_of_it.number / unit


def table() -> str:
    head = f"{'call':50}{'products':>10}{'passes':>10}\n"
    return head + "".join(f"{call:50}{products:10}{passes:10.1f}\n" for call, products, passes in counts())


def test_the_public_names_and_signatures_are_those_of_the_table() -> None:
    assert api() == API.read_text(), "if it is meant: python -m tests.test_public_api"


def test_the_analyses_cost_what_the_table_says() -> None:
    """Up to 5%: rounding differs between machines, and with it when a search has converged."""
    rows = {line[:50].strip(): line[50:].split() for line in COUNTS.read_text().splitlines()[1:]}
    found = {call: numbers for call, *numbers in counts()}
    assert found.keys() == rows.keys()
    for call, numbers in found.items():
        assert numbers == pytest.approx([float(n) for n in rows[call]], rel=0.05, abs=1), (
            f"{call}: python -m tests.test_public_api"
        )


if __name__ == "__main__":
    API.write_text(api())
    COUNTS.write_text(table())
