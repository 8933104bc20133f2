"""The errors that a user sees as one line, and the warning about fast ways of computing."""

from __future__ import annotations


class InputError(ValueError):
    """A user's mistake: one line that names the option or file, the value, and what is allowed.

    The command line prints the line and exits with ``exit_code``: 2 for bad usage, 1 where a file or a run
    failed.

    Example:
        >>> raise InputError("--grid: 0 is not allowed, it must be ≥ 1")
        Traceback (most recent call last):
        landscape.core.errors.InputError: --grid: 0 is not allowed, it must be ≥ 1
    """

    exit_code = 2


class FailedError(InputError):
    """A valid request that cannot be met, such as a damaged file or missing data.

    Example:
        >>> FailedError("run.h5: no such file").exit_code
        1
    """

    exit_code = 1


class PathWarning(UserWarning):
    """A fast way of computing disagreed with the reference on this model; the reference is used instead.

    The result is correct, but slower to compute. The command line prints the warning as one line.

    Example:
        >>> issubclass(PathWarning, UserWarning)
        True
    """
