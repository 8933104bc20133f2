"""The output of a command: values and names of files on stdout, messages on stderr.

With ``--json`` stdout has one object in place of the lines. The group of the commands adds ``--json``, ``-v``
and ``-q`` to each command, and each command prints through this module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from landscape._version import __version__
from landscape.core import progress
from landscape.core.errors import InputError
from landscape.core.files import printable
from landscape.core.progress import Bar, aside

if TYPE_CHECKING:  # a list of the commands needs no numpy
    from landscape.results.base import Result


@dataclass
class Output:
    """The output of one command so far, and its manner of printing.

    Attributes:
        command: Name of the command.
        as_json, verbose, quiet: Whether ``--json``, ``-v`` and ``-q`` are given.
        muted: Whether only errors are printed, as in all processes of a group except the first.
        entries, results, names: What ``--json`` shows: values by name, results, names of files.
        began: Time of the start, in seconds of the monotonic clock.
    """

    command: str = ""
    as_json: bool = False
    verbose: bool = False
    quiet: bool = False
    muted: bool = False
    entries: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def silent(self) -> bool:
        """Return whether there are no messages and no progress."""
        return self.quiet or self.muted

    def end(self) -> None:
        """Print the object of --json, if there is anything to show, and the details of -v."""
        if self.as_json and not self.muted and (self.entries or self.results or self.names):
            from landscape.cli import details

            entries = {"command": self.command, "landscape_version": __version__, **self.entries}
            if self.results:
                entries["results"] = [details.of_result(result) for result in self.results]
            click.echo(details.text(entries | {"files": self.names}))
        if self.verbose and not self.muted:
            from landscape.cli import details

            message(f"{details.used(time.monotonic() - self.began)}; {details.line()}")


_current: ContextVar[Output] = ContextVar("output")


def current() -> Output:
    """Return the output of the command that runs; outside of a command, one that prints everything."""
    return _current.get(Output())


@contextlib.contextmanager
def collected(out: Output) -> Iterator[None]:
    """Collect in ``out`` what the command inside prints; end it unless the command is interrupted."""
    token = _current.set(out)
    try:
        yield
    except Exception:
        out.end()
        raise
    else:
        out.end()
    finally:
        _current.reset(token)


def _echo(text: str, err: bool = False) -> None:
    """Print lines; control characters in names from files are escaped for the terminal."""
    with aside():
        click.echo("\n".join(map(printable, text.split("\n"))), err=err)


def print_values(text: str, **entries: Any) -> None:
    """Print the values that a command computes, also with -q; with --json keep ``entries`` for its object."""
    out = current()
    out.entries |= entries
    if text and not out.as_json and not out.muted:
        _echo(text)


def add_values(**entries: Any) -> None:
    """Keep values that a command computes for the object of --json, and print none."""
    current().entries |= entries


def message(text: str) -> None:
    """Print lines for the user on stderr; none with -q."""
    if not current().silent:
        _echo(text, err=True)


def print_files(*paths: str | Path) -> None:
    """Print the names of files that the command has written."""
    out = current()
    out.names += map(str, paths)
    for path in paths:
        print_values(str(path))


files = print_files  # its name in landscape.plugins


def add_results(new_results: Sequence[Result]) -> None:
    """Keep results for --json, which shows their numbers; -v prints these on stderr."""
    out = current()
    out.results += new_results
    if out.verbose and not out.as_json:
        from landscape.cli import details

        for result in new_results:
            message("\n".join(f"  {name}: {value}" for name, value in details.of_result(result).items()))


def _keep(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Set the attribute of the current output that belongs to a flag."""
    out = current()
    if value and not context.resilient_parsing:
        setattr(out, str(parameter.name), True)
        if out.quiet and out.verbose:
            out.verbose = False
            raise InputError("-q and -v: only one of the two is allowed")


_EVERY = {
    "-q --quiet quiet": "No messages and no progress.",
    "--json as_json": "Print one JSON object on stdout in place of the text: the numbers of each result, and "
    "the files. NaN and infinite numbers are null.",
    "-v --verbose verbose": "Details on stderr: the fields of each result, time, memory, versions; where an "
    "error arose.",
}


def add_options(command: click.Command) -> None:
    """Add --json, -v and -q to a command, except for those whose names it has already."""
    flags_in_use: set[str] = set()
    for parameter in command.params:
        flags_in_use.update(parameter.opts, parameter.secondary_opts)
    for flags, text in _EVERY.items():
        option = click.Option(
            flags.split(), is_flag=True, is_eager=True, expose_value=False, callback=_keep, help=text
        )
        if flags_in_use.isdisjoint(option.opts):
            command.params.append(option)


def table_text(rows: Iterable[Sequence[str]], *, left: bool = False) -> str:
    """Return a table as text, with aligned columns: the first to the left, the others to the right.

    With ``left``, all columns are aligned to the left.
    """
    table = [*rows]
    first, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
    align = str.ljust if left else str.rjust
    return "\n".join("  ".join([row[0].ljust(first), *map(align, row[1:], widths)]).rstrip() for row in table)


def progress_bar(title: str) -> AbstractContextManager[Bar]:
    """Return the progress bar of one piece of work, on stderr; with -q it shows nothing."""
    return progress.progress_bar(title, current().silent)


def list_figures(rows: Sequence[dict[str, str]]) -> None:
    """Print the names of figures, where they are in the papers, and their titles."""
    print_values("\n".join("{name:18} {where}: {title}".format(**row) for row in rows), figures=rows)
