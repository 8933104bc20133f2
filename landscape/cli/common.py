"""Common parts of the commands: checks of the output files, locks, messages and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from landscape.checkpoint.checkpoint import SCHEMA
from landscape.cli import output
from landscape.cli.options import group
from landscape.cli.output import files as files
from landscape.cli.output import message as message
from landscape.cli.output import results as results
from landscape.cli.output import values as values
from landscape.core import hdf5, progress
from landscape.core.errors import OperationError
from landscape.core.files import make_folder as make_folder
from landscape.core.options import ends_in
from landscape.core.progress import Bar
from landscape.results import base
from landscape.results.shown import text_of


@dataclass(frozen=True)
class Target:
    """The file of the results (``output`` None: beside their source), and the picture of them, if any."""

    output: str | None
    force: bool
    picture: str | None

    def path(self, default: Path, *, resumes: bool = False) -> Path:
        """The path, checked before the work starts. ``resumes``: the command checks what the file holds."""
        path = Path(self.output) if self.output else default
        check_targets(path, self.picture, self.force or resumes)
        return path


TARGET = group(Target)


def check_targets(path: Path | None, picture: str | None, force: bool) -> None:
    """Check that a result and a picture can be written there, and make the folders.

    A checkpoint is never overwritten, another result only with ``force``.
    """
    if path:
        ends_in("-o", path, [".h5"])
    if path and path.exists():
        with hdf5.reading(path) as file:
            schema = str(file.attrs["schema"])
        if schema == SCHEMA:
            raise OperationError(f"-o: {path} is a checkpoint, it is not overwritten; give another name")
        if not force:
            raise OperationError(
                f"-o: {path} holds a finished {schema}; give --force to replace it, or another -o "
                "(landscape plot draws it)"
            )
    if picture:
        from landscape import plots  # and matplotlib: only where something is drawn

        plots.check_format(picture)
    for target in filter(None, (path, Path(picture) if picture else None)):
        make_folder(target.parent)


def describe(result: base.Result) -> None:
    """Print the numbers of a result on stdout, also with -q; --json shows them with its fields."""
    values(text_of(result))


def columns(rows: Iterable[Sequence[str]], *, left: bool = False) -> str:
    """A table: a line for each row, whose cells stand below each other, at the right unless ``left``."""
    table = [*rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    align = str.ljust if left else str.rjust
    return "\n".join("  ".join(map(align, row, widths)).rstrip() for row in table)


def progress_bar(title: str) -> AbstractContextManager[Bar]:
    """The progress of one piece of work, on stderr; none with -q."""
    return progress.progress_bar(title, output.current().silent)


def write(made: Sequence[base.Result], path: Path, picture: str | None) -> None:
    """Save the results, draw them if ``picture`` is given, and print the names of the files on stdout.

    Their numbers are what --json prints.
    """
    base.save(made, path)
    show(made, path, picture)


def show(made: Sequence[base.Result], path: Path | None, picture: str | None) -> None:
    """Draw the results if ``picture`` is given, and print the names of the files on stdout."""
    results(made)
    files(*([path] if path else []))
    if picture:
        from landscape import plots

        with progress_bar("picture"):
            plots.save_figure(plots.draw(made), picture)
        files(picture)
