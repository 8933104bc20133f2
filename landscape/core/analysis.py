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
        variant: the parameter whose value is part of the name of the file to which the command writes; ""
            for none.
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

    The decorated function checks its arguments against their annotations before it starts. A run as the first
    argument is replaced by its problem, and the parameter ``about`` gets the run's origin. A function with a
    parameter ``progress`` shows its progress. A function with a ``need`` raises InputError if the memory that
    it needs is not free or exceeds ``max_memory``. If one such function calls another, the inner
    call checks its memory only if it gives ``max_memory``.

    Args:
        need: a function that takes the arguments of a call by name, and returns the call's :class:`Need`.
        shorter: words for what makes a call faster, such as "a smaller k= or a part of the data". A message
            shows them during a long call.
        of_the_run: parameters that get the run's attribute of the same name if a call leaves them out. None
            for a function that receives the run itself, and not its problem.
        version: the version of the computed numbers, see :func:`landscape.core.registry.numerics`; 0 for a
            function whose version is not recorded.
        group: the group of the function's command in ``landscape --help``; "" for no command.
        options: parameter -> further settings of its option in click; None for a parameter without option.
            With the setting ``each`` true, the command accepts several values of the parameter, and computes
            once for each.
        variant: the parameter whose value is part of the name of the file to which the command writes.

    Returns:
        The decorator, which keeps the function's signature and docstring.

    Example:
        >>> @analysis()
        ... def samples(problem: Any) -> int:
        ...     return problem.samples
        >>> samples(problem)
        2
    """

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        signature, name = inspect.signature(function), function.__name__
        first_name = next(iter(signature.parameters))
        # ``shorter`` is a part of the message that a long call shows with its progress.
        with_progress = shows_progress(shorter)(function) if "progress" in signature.parameters else function

        def bind(args: Any, kwargs: Any, *unchecked: str) -> BoundArguments:
            """Return the call with checked arguments and defaults.

            A run as first argument is replaced by its problem, and gives the values of the arguments in
            ``of_the_run`` that the call leaves out. If ``of_the_run`` is None, the function takes the run.
            """
            # Ranks that make different calls would wait for each other forever. A problem on several ranks
            # therefore has a method ``agree``, which compares the calls of all ranks. A call with wrong
            # arguments is compared, too: on another rank the call may be right.
            first_argument = kwargs.get(first_name, next(iter(args), None))
            compare_ranks = getattr(first_argument, "agree", lambda *call: None)
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError as error:
                compare_ranks(f"{name}() {error}", {})
                raise TypeError(f"{name}() {error}") from None
            arguments = call.arguments
            all_arguments = arguments | arguments.get("about", {})  # the keys of **about are arguments, too
            not_compared = ("progress", "about")
            compare_ranks(name, {key: all_arguments[key] for key in all_arguments if key not in not_compared})
            # The first argument is not checked. A run in place of a problem would not fit the annotation.
            check_arguments(function, arguments, unchecked=(first_name, *unchecked))
            problem_or_run: Any = arguments.get(first_name)
            if "about" in signature.parameters:
                # The label is the object's own attribute ``name``. A method or property ``name`` of the class
                # is no label.
                problem_name = getattr(problem_or_run, "__dict__", {}).get("name")
                origin = {"label": problem_name} if problem_name else {}
                if is_run(problem_or_run):
                    origin = problem_or_run.about()
                arguments["about"] = origin | arguments.get("about", {})
            if is_run(problem_or_run):
                for attribute in of_the_run or ():
                    value = getattr(problem_or_run, attribute)
                    # A run that was imported from other weights has NaN or 0 for a number that is unknown.
                    is_unknown = isinstance(value, (int, float)) and not value > 0
                    if arguments.get(attribute) is None and not is_unknown:
                        arguments[attribute] = value
                if of_the_run is not None:
                    arguments[first_name] = problem_or_run.problem()
            call.apply_defaults()
            return call

        def need_of(arguments: Mapping[str, Any]) -> Need | None:
            """Return the memory that a call with these arguments needs; None if there is no forecast."""
            problem = arguments[first_name]
            # Only a Problem has the property ``chunk_bytes``. There is no forecast for a first argument of
            # another class, such as a problem on several ranks.
            if need is None or not hasattr(type(problem), "chunk_bytes"):
                if hasattr(problem, "ranks") and arguments.get("max_memory") is not None:
                    raise InputError("max_memory: not allowed for a problem on several ranks (no forecast)")
                return None
            return need(**arguments)

        @functools.wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
            call = bind(args, kwargs)
            # max_memory may be a parameter of its own, or a key of **options.
            max_memory: Any = call.arguments.get("max_memory", kwargs.get("max_memory"))
            with admitted(name, max_memory, lambda: need_of(call.arguments)):
                return with_progress(*call.args, **call.kwargs)

        def forecast(*args: Any, **kwargs: Any) -> tuple[Need | None, Mapping[str, Any]]:
            """Return the memory that a call needs, and the call's arguments.

            The caller may give None for a required argument on which the memory does not depend.
            """
            not_by_position = [*signature.parameters][len(args) :]
            if "plane" in not_by_position:  # the need is the same for every plane
                kwargs = {"plane": None, **kwargs}
            required = {key for key, p in signature.parameters.items() if p.default is p.empty}
            none_arguments = [key for key, value in kwargs.items() if value is None and key in required]
            call = bind(args, kwargs, *none_arguments)
            return need_of(call.arguments), call.arguments

        takes_run_itself = of_the_run is None
        forecast_or_none = forecast if need else None
        ANALYSES[decorated] = Analysis(decorated, group, options, variant, takes_run_itself, forecast_or_none)
        # ``numerics`` records the version, and returns the function itself.
        return numerics(version)(decorated) if version else decorated

    return decorator


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
