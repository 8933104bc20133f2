"""The errors and warnings that a user sees as one line."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from typing import Any


class LandscapeError(Exception):
    """A request that the package cannot fulfill; the command line prints its message as one line.

    Args:
        message: one line: the parameter, option or file, its value, and the allowed values.
        remedy: Python code that corrects the call, appended to the line: an expression in ``landscape``,
            ``torch``, and the caller's ``model``, ``loss`` and ``data``.
        give: arguments that correct the call, by name; ``...`` stands for any value. A command prints them
            as its options.
        otherwise: an alternative to the arguments in ``give``.

    Attributes:
        exit_code: the exit code of the command.

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
        """Return the message and its corrections as one line, with options in place of parameters.

        Args:
            flags: parameter -> the command-line option that is written in its place. Other parameters
                remain.

        Returns:
            The line.

        Example:
            >>> LandscapeError("nproc: 0 is not allowed", give={"resume": True}).line({"nproc": "--nproc"})
            '--nproc: 0 is not allowed; give resume=True'
        """
        subject, colon, rest = self.message.partition(": ")
        if colon and all(name in flags for name in subject.split(", ")):
            subject = ", ".join(flags[name] for name in subject.split(", "))
        arguments = []
        for name, value in self.give.items():
            if name not in flags:
                arguments.append(f"{name}={'…' if value is ... else repr(value)}")
            elif value is ... or value is True:  # the user chooses the value, or the option takes no value
                arguments.append(flags[name])
            else:
                arguments.append(f"{flags[name]} {shlex.quote(str(value))}")
        corrections = [text for text in (", ".join(arguments), self.otherwise) if text]
        line = f"{subject}{colon}{rest}"
        if corrections:
            line += f"; give {' or '.join(corrections)}"
        return f"{line}; use {self.remedy}" if self.remedy else line


class InputError(LandscapeError, ValueError):
    """A user's mistake in a call or a command; the command ends with exit code 2.

    Args:
        message: with a ``value``, the name of the parameter, or several names with commas between them;
            without a ``value``, the whole line.
        value: the parameter's value.
        allowed: the allowed values, in words.
        remedy, give, otherwise: as for :class:`LandscapeError`.

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
            requirement = f", it must be {allowed}" if allowed else ""
            message += f": {in_short(value)} is not allowed{requirement}"
        super().__init__(message, remedy, give=give, otherwise=otherwise)


def in_short(value: Any) -> str:
    """Return a text for a value in a message: a number, a text or a short list of them; else the type's name.

    Example:
        >>> in_short("x"), in_short([0.5, 2]), in_short(2**70), in_short(print)
        ("'x'", '[0.5, 2]', 'a whole number of 71 bits', 'a builtin_function_or_method')
    """
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = (str, bytes, int, float, complex, type(None))
    items = value if isinstance(value, (list, tuple, set, range)) and len(value) < 40 else [value]
    if all(isinstance(item, plain) for item in items):
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


# Packages whose frames are never the user's call: this one, and those that call it back.
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


# What messages of torch's allocators, of C++ and of numpy have in common.
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
    """Return an error with a line for the user if the machine caused ``error``; None for a defect of code."""
    if isinstance(error, LandscapeError):
        return error
    words = " ".join(str(error).split())
    torch = sys.modules.get("torch")  # if it was not imported, the error is not from it
    out_of_memory = isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError))
    if out_of_memory or (isinstance(error, RuntimeError) and _NO_MEMORY.search(words.lower())):
        request = re.search(r"(?:tried to allocate|allocate) (\d[\d.]* ?\w+)", words)
        size = f", {request[1]} more were needed" if request else ""
        return OperationError(f"there is not enough memory{size}; {REMEDY}")
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename is not None else ""
        return OperationError(f"{name}{error.strerror}")
    return None
