"""The errors that a user sees as one line, and the warning about a path."""

from __future__ import annotations


class InputError(ValueError):
    """A user's mistake: one line that names the option or file, the value and what is allowed.

    The command line prints it and exits with ``exit_code`` (2: bad usage; 1: a file or a run failed).
    """

    exit_code = 2


class FailedError(InputError):
    """What was asked for is well formed but cannot be done (a damaged file, data not there)."""

    exit_code = 1


class PathWarning(UserWarning):
    """A fast way of computing something disagreed with the plain one on this model: the plain one is used.

    The result is right, and slower; the command line prints it as one line.
    """
