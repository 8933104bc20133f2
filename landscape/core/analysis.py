"""The declaration of an analysis, from which its command, progress, memory check and provenance are made."""

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
    """The declaration of a public function by :func:`analysis`.

    Attributes:
        function: the public function.
        group: the group of its command in ``landscape --help``; "" for a function without a command.
        options: settings of click for the command's parameters; see :func:`analysis`.
        variant: the parameter whose value is part of the name of the command's file; "" for none.
        of_run: whether the function receives a run itself, and not the run's problem.
        need: a function of a call's arguments that returns the call's need of memory (None if it has no
            forecast) and its arguments by name. None for a function without a forecast.
    """

    function: Callable[..., Any]
    group: str
    options: Mapping[str, Any]
    variant: str
    of_run: bool
    need: Callable[..., tuple[Need | None, Mapping[str, Any]]] | None


#: The declarations of all imported analyses, by their public functions.
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
    """Return a decorator for a public function whose first argument is a problem or a run.

    The decorated function checks its arguments against their annotations, such as ``Count`` and ``Literal``,
    before any work. If the first argument is a run, the function receives the run's problem, and its
    parameter ``about`` receives the run's origin. A function with the keyword ``progress`` shows its
    progress. A function with a ``need`` raises InputError before it starts if the needed memory is not free
    or exceeds ``max_memory``. If one analysis calls another, only the outer one checks the memory.

    Args:
        need: returns the :class:`Need` of a call; it receives the function's arguments by name.
        shorter: the arguments that make a call shorter, for the message of a long call.
        of_the_run: parameters whose default is the run's attribute of the same name; None for a function
            that receives the run itself.
        version: the version for :func:`landscape.core.registry.numerics`; 0 for none.
        group: the group of the function's command in ``landscape --help``; "" for no command.
        options: settings of click by parameter, in addition to those that follow from the signature and the
            docstring; None for a parameter that is no option of the command. The setting ``each`` lists
            example values of a parameter without a default: the command accepts several values and makes one
            computation for each.
        variant: the parameter whose value is part of the name of the command's file.

    Returns:
        The decorator. The decorated function keeps its signature and docstring.

    Example:
        >>> @analysis(shorter="a part of the data")
        ... def samples(problem: Any) -> int:
        ...     return problem.samples
        >>> samples(problem)
        2
    """

    def declare(function: Callable[P, T]) -> Callable[P, T]:
        signature, name = inspect.signature(function), function.__name__
        subject = next(iter(signature.parameters))  # the name of the first parameter
        with_progress = shows_progress(shorter)(function) if "progress" in signature.parameters else function

        def bind(args: Any, kwargs: Any, *unchecked: str) -> BoundArguments:
            """Return the call's checked arguments, with defaults, and a run's problem in place of the run."""
            # A problem on several ranks compares the calls: ranks with different ones would wait forever.
            first_argument = kwargs.get(subject, next(iter(args), None))
            compare_ranks = getattr(first_argument, "agree", lambda *call: None)
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError as error:
                compare_ranks(f"{name}() {error}", {})
                raise TypeError(f"{name}() {error}") from None
            arguments = call.arguments
            compared = arguments | arguments.get("about", {})
            compared = {key: value for key, value in compared.items() if key not in ("progress", "about")}
            compare_ranks(name, compared)
            check_arguments(function, arguments, subject, *unchecked)  # the function checks its subject
            problem_or_run: Any = arguments.get(subject)
            if "about" in signature.parameters:
                problem_name = getattr(problem_or_run, "__dict__", {}).get("name")
                origin = {"label": problem_name} if problem_name else {}
                if is_run(problem_or_run):
                    origin = problem_or_run.about()
                arguments["about"] = origin | arguments.get("about", {})
            if is_run(problem_or_run):
                for attribute in of_the_run or ():
                    value = getattr(problem_or_run, attribute)
                    # Imported weights have NaN or 0 in place of numbers that nobody knows.
                    is_unknown = isinstance(value, (int, float)) and not value > 0
                    if arguments.get(attribute) is None and not is_unknown:
                        arguments[attribute] = value
                if of_the_run is not None:
                    arguments[subject] = problem_or_run.problem()
            call.apply_defaults()
            return call

        def need_of(arguments: Mapping[str, Any]) -> Need | None:
            """Return the need of memory of a call with these arguments; None without a forecast."""
            problem = arguments[subject]
            if need is None or not hasattr(type(problem), "chunk_bytes"):
                if hasattr(problem, "ranks") and arguments.get("max_memory") is not None:
                    raise InputError("max_memory: not allowed for a problem on several ranks (no forecast)")
                return None  # for a subject that is no problem the function itself raises InputError
            return need(**arguments)

        @functools.wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
            call = bind(args, kwargs)
            # A function without this parameter may have it among the keys of **options.
            max_memory: Any = call.arguments.get("max_memory", kwargs.get("max_memory"))
            with admitted(name, max_memory, lambda: need_of(call.arguments)):
                return with_progress(*call.args, **call.kwargs)

        def forecast(*args: Any, **kwargs: Any) -> tuple[Need | None, Mapping[str, Any]]:
            """Return the need and arguments of a call, in which required arguments may be None."""
            keyword_parameters = [*signature.parameters][len(args) :]
            if "plane" in keyword_parameters:  # the need is the same for every plane
                kwargs = {"plane": None, **kwargs}
            required = {key for key, p in signature.parameters.items() if p.default is p.empty}
            none_arguments = [key for key, value in kwargs.items() if value is None and key in required]
            call = bind(args, kwargs, *none_arguments)
            return need_of(call.arguments), call.arguments

        of_run = of_the_run is None
        forecast_or_none = forecast if need else None
        ANALYSES[decorated] = Analysis(decorated, group, options, variant, of_run, forecast_or_none)
        return numerics(version)(decorated) if version else decorated

    return declare


def memory_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, Mapping[str, Any]]:
    """Return the largest number of bytes that a call allocates, and the call's arguments by name.

    A run among the arguments is replaced by its problem.

    Raises:
        InputError: the function has no forecast of its memory, or the first argument is no problem.
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
