"""A forecast of what an analysis takes, before it starts: products, seconds and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from landscape.analysis.grids import contour, hessian_grid, line
from landscape.analysis.planes import eigen_plane
from landscape.analysis.spectrum import curvature_table, spectrum
from landscape.core.analysis import memory_of
from landscape.core.memory import MemoryBudget, available_memory, limit
from landscape.core.options import checked
from landscape.core.progress import duration
from landscape.curvature.eigenvalues import extreme_eigenvalues, fast_hessian, top_eigenvalues
from landscape.curvature.hessian import HessianOptions
from landscape.curvature.search import SearchOptions, expected_products, start_vector
from landscape.curvature.trace import density, trace
from landscape.evaluation import needs


@dataclass(frozen=True, repr=False)
class Forecast:
    """The forecast of a call.

    Attributes:
        function: the analysis.
        products: the number of Hessian-vector products. For a search it depends on the spectrum, and is right
            to a factor of 2 for most networks; for traces and densities it is exact. 0: none, or unknown.
        seconds: the time on this machine as it is now, without the start of the call; NaN: unknown.
        memory: the most bytes that the call needs in addition to those in use.
        free: the bytes that the call may use now.
    """

    function: str
    products: int
    seconds: float
    memory: int
    free: int

    def __repr__(self) -> str:
        products = f"some {self.products:,} Hessian products, " if self.products else ""
        time_needed = "" if math.isnan(self.seconds) else f"about {duration(self.seconds)}, "
        needed, free = (f"{size / 2**20:,.0f} MiB" for size in (self.memory, self.free))
        return f"{self.function}: {products}{time_needed}{needed} of memory at most, {free} are free"


def _ends(problem: Any, arguments: Mapping[str, Any]) -> float:
    target = SearchOptions(1, 1, arguments["residual_tol"], arguments["max_products"])
    return expected_products(needs.size(problem, arguments.get("part")), target)


def _top(problem: Any, arguments: Mapping[str, Any]) -> float:
    target = SearchOptions(0, arguments["k"] or 1, arguments["residual_tol"], arguments["max_products"])
    return expected_products(needs.size(problem, arguments["part"]), target)


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
    target = SearchOptions(1, 1, arguments["residual_tol"], arguments["max_products"])
    searched = sum(expected_products(sum(slot.size for slot in slots), target) for slots in rows)
    return float(searched + arguments["draws"])


_PARTS: dict[str, Callable[[Any, Mapping[str, Any]], float]] = {"trace": _trace, "density": _density}
#: Analyses whose time is known, and the count of the products that one takes at a point; None for losses.
_PRODUCT_COUNTS: dict[Any, Callable[[Any, Mapping[str, Any]], float] | None] = {
    contour: None,
    line: None,
    hessian_grid: _ends,
    eigen_plane: _ends,
    extreme_eigenvalues: _ends,
    top_eigenvalues: _top,
    trace: _trace,
    density: _density,
    spectrum: _spectrum,
    curvature_table: _table,
}


@checked()
def forecast(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Forecast:
    """Forecast the Hessian products, seconds and memory of a call of an analysis.

    If enough memory is free for the call, one Hessian product is computed and timed. For an analysis that
    computes losses alone, a few points of a line are timed instead. The number of products of an eigenvalue
    search depends on the spectrum. In tests at all stages of training, the forecast of this number was right
    to a factor of 2. A search with ``search="auto"`` can be faster.

    A call may take more memory than forecast if more memory makes it faster. Without ``max_memory``,
    the call takes at most half of the memory that the forecast leaves free. With ``max_memory``, the process
    takes at most ``max_memory`` in all.

    Args:
        function: the analysis, such as :func:`landscape.contour`.
        args, kwargs: its arguments, beginning with a problem or a run; a plane or direction may be left out.

    Returns:
        A forecast with ``products``, ``seconds``, ``memory`` and ``free``; it is printed as one line.

    Raises:
        InputError: a function that is not an analysis or has no bound on its memory, or an argument that the
            function does not allow.
        TypeError: unknown or missing arguments, as in a call of the function.

    Example:
        >>> import torch, landscape
        >>> x, y = torch.eye(2), torch.zeros(2, 1)
        >>> problem = landscape.Problem(torch.nn.Linear(2, 1), torch.nn.MSELoss(), (x, y))
        >>> landscape.forecast(landscape.density, problem, draws=2, steps=3).products
        6
    """
    memory, arguments = memory_of(function, *args, **kwargs)
    problem = next(iter(arguments.values()))
    # ``limit()``: the bytes that the process may use, by an enclosing call; None: no limit.
    budget = MemoryBudget.on(problem.device, arguments.get("max_memory") or limit())
    free = max(0, int(min(budget.remaining, available_memory(problem.device))))
    products, seconds = 0, math.nan
    points = arguments["points"] if "points" in arguments else needs.points(arguments.get("grid", 1))
    if memory <= free and function in _PRODUCT_COUNTS:
        count_products = _PRODUCT_COUNTS[function]
        if count_products:
            products = math.ceil(points * count_products(problem, arguments))
            seconds = products * _seconds_of_a_product(problem, arguments)
        else:  # an analysis of losses alone
            seconds = points * _seconds_of_a_point(problem)
    return Forecast(function.__name__, products, seconds, memory, free)


def _seconds_of_a_product(problem: Any, arguments: Mapping[str, Any]) -> float:
    """Return the time of a product after the first product, which makes the stored graphs."""
    matrix, part = arguments.get("matrix", "hessian"), arguments.get("part")
    options = HessianOptions(matrix, part, None, arguments.get("derivatives", "auto"))
    h = fast_hessian(problem, arguments.get("weights"), options)
    v = start_vector(h, 0)
    for _ in range(2):
        began = time.perf_counter()
        float(h(v).norm())  # waits for the device
    return time.perf_counter() - began


def _seconds_of_a_point(problem: Any) -> float:
    """Return the time of a point of a line, without the time of the start of a call."""
    direction, times = torch.ones_like(problem.weights), []
    for points in (2, 2, 10):  # the first call loads modules
        began = time.perf_counter()
        line(problem, direction, points=points, span=1e-3, progress=False)
        times.append(time.perf_counter() - began)
    return max(times[2] - times[1], 0.0) / 8
