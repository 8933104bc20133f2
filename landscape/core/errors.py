"""The errors and warnings that a user sees as one line."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from typing import Any


class LandscapeError(Exception):
    """A request that the package does not fulfill, in one line, which the command line prints.

    Args:
        message: the line: the parameter, option or file, the value, and what is allowed.
        remedy: Python code that makes the call right, added to the line: an expression in ``landscape``,
            ``torch``, and the caller's ``model``, ``loss`` and ``data``.
        give: arguments that make the call right, which a command has as options; ``...``: any value.
        otherwise: what can be done in place of that.

    Attributes:
        exit_code: with which the command ends.

    Example:
        >>> import landscape
        >>> issubclass(landscape.InputError, landscape.LandscapeError)
        True
    """

    exit_code = 1

    def __init__(
        self, message: str, remedy: str = "", *, give: Mapping[str, Any] = {}, otherwise: str = ""
    ) -> None:
        self.message, self.remedy, self.give, self.otherwise = message, remedy, dict(give), otherwise
        super().__init__(self.line())

    def line(self, flags: Mapping[str, str] = {}) -> str:
        """The line, with the options of a command in place of the parameters that it names.

        Args:
            flags: parameter -> option.

        Returns:
            The line.

        Example:
            >>> LandscapeError("nproc: 0 is not allowed", give={"resume": True}).line({"nproc": "--nproc"})
            '--nproc: 0 is not allowed; give resume=True'
        """
        subject, colon, rest = self.message.partition(": ")
        if colon and all(name in flags for name in subject.split(", ")):
            subject = ", ".join(flags[name] for name in subject.split(", "))
        words = []
        for name, value in self.give.items():
            if name not in flags:
                words.append(f"{name}={'…' if value is ... else repr(value)}")
            elif value in (..., True):
                words.append(flags[name])
            else:
                words.append(f"{flags[name]} {shlex.quote(str(value))}")
        ways = " or ".join(filter(None, (", ".join(words), self.otherwise)))
        line = f"{subject}{colon}{rest}" + (f"; give {ways}" if ways else "")
        return f"{line}; use {self.remedy}" if self.remedy else line


class InputError(LandscapeError, ValueError):
    """A user's mistake in a call or a command, which ends with exit code 2.

    Args:
        message: the parameter, where ``value`` is given, or several with commas between them; else the line.
        value: what the parameter is.
        allowed: what it must be.
        remedy, give, otherwise: as of :class:`LandscapeError`.

    Example:
        >>> raise InputError("grid", 0, allowed="a whole number ≥ 1")
        Traceback (most recent call last):
        landscape.core.errors.InputError: grid: 0 is not allowed, it must be a whole number ≥ 1
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        value: Any = ...,
        *,
        allowed: str = "",
        remedy: str = "",
        give: Mapping[str, Any] = {},
        otherwise: str = "",
    ) -> None:
        if value is not ...:
            message += f": {in_short(value)} is not allowed"
            message += f", it must be {allowed}" if allowed else ""
        super().__init__(message, remedy, give=give, otherwise=otherwise)


def in_short(value: Any) -> str:
    """A value as a message shows it: numbers, texts and short lists of them, of others the type.

    Example:
        >>> in_short("x"), in_short([0.5, 2]), in_short(2**70), in_short(print)
        ("'x'", '[0.5, 2]', 'a whole number of 71 bits', 'a builtin_function_or_method')
    """
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = (str, bytes, int, float, complex, type(None))
    several = isinstance(value, (list, tuple, set, range)) and len(value) < 40
    if all(isinstance(item, plain) for item in (value if several else [value])):
        text = str(value) if isinstance(value, (int, float)) else repr(value)
        return text if len(text) <= 200 else f"{text[:200]}…"
    return f"a {type(value).__name__}"


class OperationError(LandscapeError):
    """A valid request that cannot be met, such as a damaged file or missing data; exit code 1.

    Example:
        >>> OperationError("run.h5: no such file").exit_code
        1
    """


class PathWarning(UserWarning):
    """A fast way of computing disagreed with the reference on this model; the reference is used instead.

    The result is correct, but slower to compute. The command line prints the warning as one line.

    Example:
        >>> issubclass(PathWarning, UserWarning)
        True
    """


class ProblemWarning(UserWarning):
    """How a :class:`landscape.Problem` reads a loss that could be read in several ways.

    The line says what was chosen, and which argument says so explicitly.

    Example:
        >>> issubclass(ProblemWarning, UserWarning)
        True
    """


class DataWarning(UserWarning):
    """Data or a file is lost, left out, replaced or not saved; the option -q does not silence it.

    Example:
        >>> issubclass(DataWarning, UserWarning)
        True
    """


# Modules whose lines are no caller's: this package, and what calls it back.
_INSIDE = ("landscape", "torch", "contextlib", "functools")


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller: of the nearest frame outside this package and torch's decorators.

    Example:
        >>> with warnings.catch_warnings(action="error"):
        ...     warn_caller("loss: read as a mean", ProblemWarning)
        Traceback (most recent call last):
        landscape.core.errors.ProblemWarning: loss: read as a mean
    """
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


# As torch's allocators, C++ and numpy say it.
_NO_MEMORY = re.compile("(can't|cannot) allocate memory|out of memory|bad_alloc|not enough memory")
REMEDY = (
    "to train, lower learners, batch or the model, or raise accumulate; to analyze, lower max_memory, "
    "the grid or the number of processes"
)


def first_words(error: BaseException, most: int = 120) -> str:
    """The beginning of an error's text, in one line.

    Example:
        >>> first_words(ValueError("no  such\\nline"))
        'no such line'
    """
    return " ".join(str(error).split())[:most] or type(error).__name__


def explain(error: BaseException) -> LandscapeError | None:
    """``error`` as a line for the user, if this machine caused it; None for a defect of the code."""
    if isinstance(error, LandscapeError):
        return error
    words = " ".join(str(error).split())
    torch = sys.modules.get("torch")  # where it was not imported, the error is not its own
    memory = isinstance(error, (MemoryError, *([torch.OutOfMemoryError] if torch else [])))
    if memory or (isinstance(error, RuntimeError) and _NO_MEMORY.search(words.lower())):
        request = re.search(r"(?:tried to allocate|allocate) (\d[\d.]* ?\w+)", words)
        size = f", {request[1]} more were needed" if request else ""
        return OperationError(f"there is not enough memory{size}; {REMEDY}")
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename is not None else ""
        return OperationError(f"{name}{error.strerror}")
    return None
