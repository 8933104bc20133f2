"""The errors and warnings that a user sees as one line."""

from __future__ import annotations

import re
import sys
import warnings


class LandscapeError(Exception):
    """A request that the package does not fulfill, in one line, which the command line prints.

    Args:
        message: the line: the parameter, option or file, the value, and what is allowed.
        remedy: Python code that makes the call right, added to the line: an expression in ``landscape``,
            ``torch``, and the caller's ``model``, ``loss`` and ``data``.

    Attributes:
        exit_code: with which the command ends.

    Example:
        >>> import landscape
        >>> issubclass(landscape.InputError, landscape.LandscapeError)
        True
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; use {remedy}" if remedy else message)
        self.remedy = remedy


class InputError(LandscapeError, ValueError):
    """A user's mistake in a call or a command, which ends with exit code 2.

    Example:
        >>> raise InputError("grid: 0 is not allowed, it must be ≥ 1")
        Traceback (most recent call last):
        landscape.core.errors.InputError: grid: 0 is not allowed, it must be ≥ 1
    """

    exit_code = 2


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


def explain(error: BaseException) -> LandscapeError | None:
    """``error`` as a line for the user, if this machine caused it; None for a defect of the code."""
    if isinstance(error, LandscapeError):
        return error
    words = " ".join(str(error).split())
    torch = sys.modules.get("torch")  # where it was not imported, the error is not its own
    memory = isinstance(error, (MemoryError, *([torch.OutOfMemoryError] if torch else [])))
    if memory or (isinstance(error, RuntimeError) and _NO_MEMORY.search(words.lower())):
        wanted = re.search(r"(?:tried to allocate|allocate) (\d[\d.]* ?\w+)", words)
        size = f", {wanted[1]} more were needed" if wanted else ""
        return OperationError(f"there is not enough memory{size}; {REMEDY}")
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename is not None else ""
        return OperationError(f"{name}{error.strerror}")
    return None
