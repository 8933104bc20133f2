"""A forecast of what an analysis takes, before it starts: products, seconds and memory."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from landscape.analysis.grids import contour, hessian_grid, line
from landscape.analysis.spectrum import curvature_table, spectrum
from landscape.core.analysis import analysis, forecast
from landscape.core.memory import Need
from landscape.core.options import choose
from landscape.core.progress import duration
from landscape.curvature.eigenvalues import extreme_eigenvalues, fast_hessian, top_eigenvalues
from landscape.curvature.hessian import HessianOptions
from landscape.curvature.search import start_vector
from landscape.curvature.trace import density, trace
from landscape.evaluation import needs

# Products of a search for both ends at a tolerance of 0.01, for one eigenvalue and each further one, and
# their growth with each digit of the tolerance: medians over networks on digits and a small transformer.
ENDS, FIRST, FURTHER, DIGIT = 33, 14, 4.6, 0.25


@dataclass(frozen=True)
class Cost:
    """The forecast of a call.

    Attributes:
        function: the analysis.
        products: Hessian-vector products. Those of searches depend on the spectrum and are right to a factor
            of 2 for most networks; those of traces and densities are known.
        seconds: on this machine as it is now, without the start of the call.
        memory: bytes besides what is in use, at most.
    """

    function: str
    products: int
    seconds: float
    memory: int

    def __str__(self) -> str:
        products = f"some {self.products:,} Hessian products, " if self.products else ""
        rest = f"about {duration(self.seconds)}, {self.memory / 2**20:,.0f} MiB at most"
        return f"{self.function}: {products}{rest}"


def _searched(size: int, first: float, further: int, arguments: Mapping[str, Any]) -> float:
    """Products of one search in ``size`` dimensions, for ``further`` eigenvalues besides the first."""
    tol, whole = arguments["residual_tol"], size + 2.0 + further
    digits = math.log10(0.01 / tol) if tol > 0 else 0.0
    products = (first + FURTHER * further) * (1 + DIGIT) ** digits
    complete = further and size <= needs.MAX_BASIS  # the basis of a small matrix
    return min(float(arguments["max_products"]), whole if complete else min(products, whole))


def _ends(problem: Any, arguments: Mapping[str, Any]) -> float:
    return _searched(needs.size(problem, arguments.get("part")), ENDS, 0, arguments)


def _top(problem: Any, arguments: Mapping[str, Any]) -> float:
    return _searched(needs.size(problem, arguments["part"]), FIRST, (arguments["k"] or 1) - 1, arguments)


def _trace(problem: Any, arguments: Mapping[str, Any]) -> float:
    size = needs.size(problem, arguments["part"])
    return float(2 * size if arguments["products"] // 3 >= size else arguments["products"])


def _density(problem: Any, arguments: Mapping[str, Any]) -> float:
    return float(arguments["draws"] * min(arguments["steps"], needs.size(problem, arguments["part"])))


def _spectrum(problem: Any, arguments: Mapping[str, Any]) -> float:
    quantities = {*arguments["quantities"]} or ({"extremes"} if not arguments["k"] else set())
    products = _top(problem, arguments) if arguments["k"] else 0.0
    if "extremes" in quantities:
        products = max(products, _ends(problem, arguments))
    return products + sum(count(problem, arguments) for name, count in _PARTS.items() if name in quantities)


def _table(problem: Any, arguments: Mapping[str, Any]) -> float:
    rows = [problem.layout.slots, *problem.layout.groups(arguments["by"]).values()]
    searched = sum(_searched(sum(slot.size for slot in slots), ENDS, 0, arguments) for slots in rows)
    return float(searched + arguments["draws"])


_PARTS: dict[str, Callable[[Any, Mapping[str, Any]], float]] = {"trace": _trace, "density": _density}
#: Analyses by name, and the count of the products that one takes at one vector of weights; None for losses.
_ANALYSES: dict[str, tuple[Callable[..., Any], Callable[[Any, Mapping[str, Any]], float] | None]] = {
    "contour": (contour, None),
    "line": (line, None),
    "hessian_grid": (hessian_grid, _ends),
    "extreme_eigenvalues": (extreme_eigenvalues, _ends),
    "top_eigenvalues": (top_eigenvalues, _top),
    "trace": (trace, _trace),
    "density": (density, _density),
    "spectrum": (spectrum, _spectrum),
    "curvature_table": (curvature_table, _table),
}


def cost_need(problem: Any, function: Any, options: Mapping[str, Any]) -> Need:
    """The timed product, or the points of a line, within the ``max_memory`` of the options."""
    lossy = _ANALYSES.get(function, (None, None))[1] is None
    if lossy:
        return needs.evaluated(problem, 5, 0, options.get("max_memory"))
    derivatives = options.get("derivatives", "auto")
    return needs.curved(problem, 3, part=options.get("part"), derivatives=derivatives)


@analysis(cost_need)
def cost(problem: Any, function: str, **options: Any) -> Cost:
    """The forecast of :meth:`landscape.Problem.cost`."""
    called, count = _ANALYSES[choose("function", function, _ANALYSES)]
    signature = inspect.signature(called)
    if "plane" in signature.parameters:  # which costs the same wherever it lies
        options = {"plane": None, **options}
    call = signature.bind(problem, **options)
    call.apply_defaults()
    arguments, memory = call.arguments, forecast(called, problem, **options)
    points = arguments["points"] if "points" in arguments else needs.points(arguments.get("grid", 1))
    if count is None:
        return Cost(function, 0, points * _seconds_of_a_point(problem), memory)
    products = points * count(problem, arguments)
    return Cost(function, math.ceil(products), products * _seconds_of_a_product(problem, arguments), memory)


def _seconds_of_a_product(problem: Any, arguments: Mapping[str, Any]) -> float:
    """The time of a product after the first, which makes graphs that are kept."""
    matrix, part = arguments.get("matrix", "hessian"), arguments.get("part")
    options = HessianOptions(matrix, part, None, arguments["derivatives"])
    h = fast_hessian(problem, arguments.get("weights"), options)
    v = start_vector(h, 0)
    for _ in range(2):
        began = time.perf_counter()
        float(h(v).norm())  # waits for the device
    return time.perf_counter() - began


def _seconds_of_a_point(problem: Any) -> float:
    """The time of a point of a line beyond the first ones, which have the start of the call."""
    direction, times = torch.ones_like(problem.weights), []
    for points in (2, 2, 10):  # the first call loads what is loaded once
        began = time.perf_counter()
        line(problem, direction, points=points, span=1e-3, progress=False)
        times.append(time.perf_counter() - began)
    return max(times[2] - times[1], 0.0) / 8
