"""The declaration of an analysis, which says all that its command, progress, memory and provenance need."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import BoundArguments
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from landscape.core import memory
from landscape.core.errors import InputError
from landscape.core.memory import Need, admitted
from landscape.core.options import check_arguments, is_run
from landscape.core.progress import shows_progress
from landscape.core.registry import numerics

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Analysis:
    """The declaration of a function.

    Attributes:
        function: the public function.
        group: the group of its command in ``landscape --help``; "" where none is made from it.
        options: what the command adds to parameters; see :func:`analysis`.
        variant: the parameter whose value is part of the name of the command's file; "": none.
        of_run: whether the function is about a run itself, and not about its problem.
        need: the need of a call with these arguments, None where it is not known, and the arguments.
    """

    function: Callable[..., Any]
    group: str
    options: Mapping[str, Any]
    variant: str
    of_run: bool
    need: Callable[..., tuple[Need | None, Mapping[str, Any]]] | None


#: All that were imported, by their functions.
ANALYSES: dict[Any, Analysis] = {}


def analysis(
    need: Callable[..., Need] | None = None,
    *,
    shorter: str = "",
    of_the_run: tuple[str, ...] | None = (),
    version: int = 0,
    group: str = "",
    options: Mapping[str, Any] = MappingProxyType({}),
    variant: str = "",
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for a public function whose first argument is what it analyzes: a problem, or a run.

    Arguments are checked against their annotations, such as ``Count`` and ``Literal``, before any work.
    For a run the function gets the run's problem, and its ``about`` the run's origin. A function with the
    keyword ``progress`` shows its progress. One with a ``need`` is refused before it starts where its memory
    is not there; ``max_memory`` is its limit. Of functions that call one another, the outermost states the
    need of all.

    Args:
        need: gives the :class:`Need` of a call from the function's arguments, by name.
        shorter: the arguments that make a call shorter, for whoever waits.
        of_the_run: arguments whose default are the run's attributes of that name; None for a function that
            gets the run itself.
        version: as of :func:`landscape.core.registry.numerics`; 0: it has none.
        group: the group of the command that is made from the function; "": none is.
        options: what click needs for a parameter, by its name, beyond signature and Args; None
            for a parameter that is no option. ``each`` are examples of the values that a parameter without a
            default may have together: the command computes for each.
        variant: a parameter whose value is part of the name of the command's file.

    Returns:
        The decorator. What it makes has the function's signature and docstring.

    Example:
        >>> @analysis(shorter="a part of the data")
        ... def samples(problem: Any) -> int:
        ...     return problem.samples
        >>> samples(problem)
        2
    """

    def declare(function: Callable[P, T]) -> Callable[P, T]:
        signature, name = inspect.signature(function), function.__name__
        subject = next(iter(signature.parameters))
        with_progress = shows_progress(shorter)(function) if "progress" in signature.parameters else function

        def bound(args: Any, kwargs: Any, checks: Callable[..., None] = check_arguments) -> BoundArguments:
            # Of a problem on several ranks, which else wait for each other.
            agree = getattr(kwargs.get(subject, next(iter(args), None)), "agree", lambda *call: None)
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError as error:
                agree(f"{name}() {error}", {})
                raise TypeError(f"{name}() {error}") from None
            arguments = call.arguments
            compared = arguments | arguments.get("about", {})
            agree(name, {key: of for key, of in compared.items() if key not in ("progress", "about")})
            checks(function, arguments, subject)  # which the function examines
            run: Any = arguments.get(subject)
            if "about" in signature.parameters:
                label = getattr(run, "__dict__", {}).get("name")  # of a problem
                origin = run.about() if is_run(run) else {"label": label} if label else {}
                arguments["about"] = origin | arguments.get("about", {})
            if is_run(run):
                for attribute in of_the_run or ():
                    value = getattr(run, attribute)
                    # NaN and 0 are the numbers of imported weights.
                    is_unknown = isinstance(value, (int, float)) and not value > 0
                    if arguments.get(attribute) is None and not is_unknown:
                        arguments[attribute] = value
                if of_the_run is not None:
                    arguments[subject] = run.problem()  # which reads its data once
            call.apply_defaults()
            return call

        def needed(arguments: Mapping[str, Any]) -> Need | None:
            problem = arguments[subject]
            if need is None or not hasattr(type(problem), "chunk_bytes"):
                if hasattr(problem, "ranks") and arguments.get("max_memory") is not None:
                    raise InputError("max_memory: not allowed for a problem on several ranks (no forecast)")
                return None  # the function itself refuses what is no problem
            return need(**arguments)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            call = bound(args, kwargs)
            bound_of_memory: Any = call.arguments.get("max_memory", kwargs.get("max_memory"))
            with admitted(name, bound_of_memory, lambda: needed(call.arguments)):
                return with_progress(*call.args, **call.kwargs)

        def forecasted(*args: Any, **kwargs: Any) -> tuple[Need | None, Mapping[str, Any]]:
            if "plane" in [*signature.parameters][len(args) :]:  # a call costs the same wherever it lies
                kwargs = {"plane": None, **kwargs}
            required = {key for key, of in signature.parameters.items() if of.default is of.empty}
            left_out = [key for key, value in kwargs.items() if value is None and key in required]
            call = bound(args, kwargs, lambda *parts: check_arguments(*parts, *left_out))
            return needed(call.arguments), call.arguments

        declaration = Analysis(called, group, options, variant, of_the_run is None, need and forecasted)
        ANALYSES[called] = declaration
        return numerics(version)(called) if version else called

    return declare


def memory_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, Mapping[str, Any]]:
    """The bytes that a call takes, at most, besides what is in use, and its arguments, a run's problem first.

    Raises:
        InputError: a function that is no analysis with a bound on its memory, or what is no problem.
    """
    needs = {public: declaration.need for public, declaration in ANALYSES.items() if declaration.need}
    if function not in needs:
        allowed = ", ".join(sorted(public.__name__ for public in needs))
        name = getattr(function, "__name__", function)
        raise InputError(f"function: {name} is not allowed, it must be one of {allowed}")
    need, arguments = needs[function](*args, **kwargs)
    if need is None:
        raise InputError(f"args: {function.__name__} has a forecast for a landscape.Problem or a run only")
    return math.ceil(memory.RESERVE + need.fixed + need.spare), arguments
