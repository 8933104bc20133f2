"""The files in the folder of a run, and files of results to which computations add.

A file of results is locked while it is open for writing, and saved at intervals; a later computation with the
same settings resumes its unfinished result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self

import h5py
import numpy as np
import torch.distributed as dist
from torch import Tensor

from landscape.checkpoint import history
from landscape.checkpoint.checkpoint import IMPORTED, SCHEMA, Checkpoint
from landscape.checkpoint.history import checkpoint_in as checkpoint_in
from landscape.core import hdf5
from landscape.core.errors import DataWarning, InputError, OperationError, warn_caller
from landscape.core.files import Lock, printable
from landscape.core.hdf5 import Array, DamagedError, DamageWarning
from landscape.core.options import OneOf, checked
from landscape.evaluation.grid import coincide
from landscape.results import base
from landscape.results.base import Result

_STEP = re.compile(r"step-\d{7,}\.h5")
_NAMES = ("last.h5", "recipe.toml")


def write(
    checkpoint: Checkpoint,
    folder: Path,
    every: int,
    learners: int | None = None,
    rows: Callable[[Tensor], Iterable[Tensor]] = iter,
) -> Path:
    """Write step-NNNNNNN.h5, and last.h5, a copy of it with the whole history; return the path of the first.

    Two files, because damage to one spares the other. ``every``: the steps between two files, 0 for none;
    ``learners`` and ``rows``: as for :meth:`.Checkpoint.save`.
    """
    path = folder / f"step-{checkpoint.step:07d}.h5"
    recent = history.recent(checkpoint.history, checkpoint.step, every)

    def complete(file: h5py.File) -> None:
        if recent is not checkpoint.history:
            history.write(file, checkpoint.history, checkpoint.units)

    with hdf5.writing(path, SCHEMA, folder / "last.h5", complete) as file:
        dataclasses.replace(checkpoint, history=recent)._write(file, learners, rows)
    return path


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints step-*.h5 in ``folder``, sorted by name; other files are left out.

    Raises OperationError for a step-NNNNNNN.h5 that cannot be read, because it is a damaged checkpoint.
    """
    checkpoints = []
    for path in sorted(folder.glob("step-*.h5")):
        try:
            checkpoints += [path] if hdf5.schema_of(path) == SCHEMA else []
        except OperationError:
            if _STEP.fullmatch(path.name):
                raise
    return checkpoints


def named_like_a_run(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that a run would overwrite, by their names."""
    return sorted(p for p in folder.glob("*") if p.name in _NAMES or _STEP.fullmatch(p.name))


def of_a_run(path: Path) -> bool:
    """Return whether a file with the name of a run's file is a checkpoint of a run, or its recipe."""
    if path.name == "recipe.toml":
        return True
    try:
        with hdf5.reading(path, SCHEMA, warn=False) as file:
            return bool(file.attrs["algorithm"] != IMPORTED)
    except OperationError:
        return False


@checked()
def load(path: str | Path) -> Checkpoint | base.Result | list[base.Result]:
    """Read any file of this project.

    Args:
        path: the file; or the folder of a run, for its last checkpoint.

    Returns:
        A :class:`Checkpoint`, a result, or a list if the file has several results.

    Raises:
        InputError: the path is no name of a file.
        OperationError: the file is missing, truncated, of another program or of a newer version.

    Example:
        >>> load("missing.h5")
        Traceback (most recent call last):
        landscape.core.errors.OperationError: missing.h5: no such file; ...
    """
    path = checkpoint_in(Path(path))
    if hdf5.schema_of(path) == SCHEMA:
        return Checkpoint.load(path)
    results = base.load_results(path)
    return results[0] if len(results) == 1 else results


def check_folder(folder: Path, *, resume: bool, force: bool | None = None) -> list[Path]:
    """Return the files of a run in ``folder``; raise OperationError if there are any and no option allows it.

    ``force`` allows to delete them; it raises OperationError for another file with the name of a run's file.
    None: the caller has no option ``force``.
    """
    if resume and force:
        raise InputError("resume, force: only one of the two is allowed")
    files = named_like_a_run(folder)
    if files and not (resume or force):
        options = {"resume": True} if force is None else {"resume": True, "force": True}
        words = f"{folder}: holds a run already ({files[0].name})"
        raise OperationError(words, give=options, otherwise="another folder")
    for path in files if force else []:
        if not of_a_run(path):
            raise OperationError(f"force: {path} is no checkpoint of a run, it is not deleted; move it")
    return files


def last_sound(folder: Path, learners: Callable[[int], slice]) -> Checkpoint:
    """Return the checkpoint last.h5 or, if it is damaged, the newest sound step file, with a warning.

    ``learners``: as for :meth:`.Checkpoint.load`. Raises OperationError, about last.h5, if no file is sound.
    """
    try:
        return Checkpoint.load(folder / "last.h5", learners)
    except OperationError as error:
        numbered = [p for p in named_like_a_run(folder) if p.name.startswith("step-")]
        for path in reversed(numbered):
            with contextlib.suppress(OperationError):
                checkpoint = Checkpoint.load(path, learners)
                warn_caller(f"{printable(error)}; {printable(path.name)} takes its place", DamageWarning)
                return checkpoint
        raise


@dataclass(eq=False)
class _Entry:
    """A result of the file, and whether a computation has completed it since the file was opened."""

    result: Result
    completed_while_open: bool = False


Mode = Annotated[str, OneOf(("r", "a", "w"))]


class ResultFile:
    """The results in an HDF5 file, as a sequence; :func:`landscape.open` opens it.

    ``landscape.contour(…, into=file)`` and ``landscape.hessian_grid(…, into=file)`` resume the file's result
    with the same problem, plane and settings, unless it was completed since the file was opened. They write
    the file about every ten seconds, and at their end. Every write makes a new file in place of the old one.

    Args:
        path, mode, replace: as for :func:`landscape.open`.
        writes: whether this process writes the file; of several processes that open it, one does.

    Example:
        >>> import tempfile, torch, landscape
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> problem = landscape.Problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (x, y))
        >>> plane, path = landscape.random_plane(problem), f"{tempfile.mkdtemp()}/surface.h5"
        >>> with landscape.open(path, "a") as file:
        ...     coarse = landscape.contour(problem, plane, grid=3, into=file)
        >>> with landscape.open(path, "a") as file:  # computes the points that are not there
        ...     fine = landscape.contour(problem, plane, grid=5, into=file)
        >>> with landscape.open(path) as file:
        ...     len(file), file[0].loss.shape
        (1, (5, 5))
    """

    def __init__(
        self, path: str | Path, mode: Mode = "r", *, replace: bool = False, writes: bool = True
    ) -> None:
        self.path = Path(path)
        #: The earlier result that the latest computation resumed; None if it began from the start.
        self.resumed: Result | None = None
        #: Whether the file was written since it was opened.
        self.written = False
        self._writable, self._writes = mode != "r", writes and mode != "r"
        self._replace = replace or mode == "w"
        self._lock = Lock(self.path)
        self._current: _Entry | None = None  # the entry that the running computation updates
        self._changed = False
        if self._writes:
            self._lock.acquire()
        try:
            exists = mode == "r" or self.path.exists()
            stored = base.load_results(self.path) if exists else []
            self._settings = base.settings_in(self.path) if exists else {}
        except BaseException as error:
            if not (mode == "w" and isinstance(error, DamagedError)):  # "w" replaces a damaged file
                self._lock.release()
                raise
            stored, self._settings = [], {}
        self._entries = [] if mode == "w" else [*map(_Entry, stored)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._close(write=kind is None)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Result]:
        return iter([entry.result for entry in self._entries])

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def __repr__(self) -> str:
        return f"ResultFile({str(self.path)!r}, {', '.join(map(repr, self)) or 'empty'})"

    def add(self, result: Result) -> None:
        """Add a finished result after all others, and write the file.

        Args:
            result: of the kind that the file holds.

        Raises:
            OperationError: the file is closed, open for reading only, holds another kind, or cannot be
                written.

        Example:
            >>> import tempfile, landscape
            >>> with landscape.open(f"{tempfile.mkdtemp()}/two.h5", "w") as file:
            ...     file.add(surface)  # a result of landscape.contour
            ...     file.add(surface.compact())
            ...     len(file)
            2
        """
        self._current = None
        self.put(result, finished=True)

    def once(self, settings: Mapping[str, Any], compute: Callable[[], Iterable[Result]]) -> list[Result]:
        """Return the results for some settings; compute and write them if the file does not have them.

        Args:
            settings: all settings of the results, by name: numbers, strings, bools and lists of these.
            compute: a function that computes the results. If the file was opened with ``replace``, it is
                always called.

        Returns:
            All results that the file has now.

        Raises:
            OperationError: the file is closed, open for reading only, or has results for other settings and
                was not opened with ``replace``.

        Example:
            >>> import tempfile, landscape
            >>> path = f"{tempfile.mkdtemp()}/one.h5"
            >>> for _ in range(2):
            ...     with landscape.open(path, "a") as file:
            ...         [same] = file.once({"grid": 3}, lambda: [surface])  # a result of landscape.contour
            ...         file.written
            True
            False
        """
        self._check_writable()
        new_settings = dict(json.loads(json.dumps(settings)))  # as a file returns them: tuples become lists
        if self._entries and not self._replace:
            if not self._settings:
                raise self._conflict(f"holds a {self[0].schema} with settings that are not known")
            for name in {**new_settings, **self._settings}:
                stored, wanted = self._settings.get(name), new_settings.get(name)
                if stored != wanted:
                    words = f"its {name} is {_word(stored)} and not {_word(wanted)}"
                    raise self._conflict(f"holds another result, {words}")
            return [*self]
        self._entries = [_Entry(result, completed_while_open=True) for result in compute()]
        self._changed = True
        self._write(new_settings)
        return [*self]

    def keep(self, results: Sequence[Result]) -> None:
        """Keep only these of the results, in this order; the file changes when it is written or closed.

        Args:
            results: some of the results in the file.

        Raises:
            OperationError: the file is closed, or open for reading only.

        Example:
            >>> import tempfile, landscape
            >>> path = f"{tempfile.mkdtemp()}/two.h5"
            >>> landscape.save([surface, surface.compact()], path)  # surface: a result of landscape.contour
            >>> with landscape.open(path, "a") as file:
            ...     file.keep(file[:1])
            >>> landscape.load(path).center.shape
            (2,)
        """
        self._check_writable()
        entries = {id(entry.result): entry for entry in self._entries}
        new_entries = [entries.get(id(result), _Entry(result)) for result in results]
        self._changed |= new_entries != self._entries
        self._entries = new_entries

    def close(self) -> None:
        """Write the file if it has changed, and release the lock, as at the end of a ``with`` block.

        Example:
            >>> import tempfile, landscape
            >>> file = landscape.open(f"{tempfile.mkdtemp()}/one.h5", "w")
            >>> file.add(surface)  # a result of landscape.contour
            >>> file.close()
        """
        self._close(write=True)

    def _close(self, write: bool) -> None:
        try:
            if write and self._entries:  # a file without results does not replace the old one
                self._write()
        finally:
            self._lock.release()
            self._writable = self._writes = False

    def earlier(
        self, kind: type[Result], differs: Callable[[Any], str], source: str, x: Array, y: Array
    ) -> Any:
        """Return the stored result that a computation resumes; None if there is none.

        Results that were completed since the file was opened, and results of weights in another file, are
        left out. If no result can be resumed, the first one that differs is removed, with a warning. This
        needs a file opened with ``replace``.

        Args:
            kind: the class of the result.
            differs: a function that takes a stored result, and returns, in words, how it differs from the
                computation; "" if it does not differ.
            source: the SHA-256 of the file with the weights; "" for weights without a file.
            x, y: the coordinates of the computation's grid.

        Returns:
            The result, which becomes the attribute ``resumed``.

        Raises:
            OperationError: the file is closed, open for reading only, or has results or points that do not
                fit the computation and was not opened with ``replace``.

        Example:
            >>> import tempfile, numpy as np, landscape
            >>> x = y = np.linspace(-1, 1, 3)
            >>> with landscape.open(f"{tempfile.mkdtemp()}/one.h5", "w") as file:
            ...     file.earlier(landscape.Surface, lambda result: "", "", x, y) is None
            True
        """
        self._check_writable()
        self.resumed = self._current = None
        first_unfit: tuple[Result, str] | None = None  # and how it differs from the computation
        for entry in self._entries:
            result = entry.result
            if entry.completed_while_open or _different_sources(source, getattr(result, "source_sha256", "")):
                continue
            difference = differs(result) if isinstance(result, kind) else f"it holds a {result.schema}"
            if not difference:
                self._check_points(result, x, y)
                self.resumed, self._current = result, entry
                return result
            first_unfit = first_unfit or (result, difference)
        if first_unfit:
            self.drop(*first_unfit)  # raises OperationError unless the file was opened with ``replace``
        return None

    def only(self, sources: Sequence[str]) -> None:
        """Remove the results of other weights.

        Args:
            sources: the SHA-256 of the files with the weights of the computation.

        Raises:
            OperationError: there are results of other weights, and the file was not opened with ``replace``.

        Example:
            >>> import tempfile, landscape
            >>> path = f"{tempfile.mkdtemp()}/one.h5"
            >>> landscape.save([surface], path)  # a result of landscape.contour, of weights without a file
            >>> with landscape.open(path, "a") as file:
            ...     file.only(["6ba7b810"])
            ...     len(file)
            1
        """
        for result in self:
            if _different_sources(", ".join(sources), getattr(result, "source_sha256", "")):
                self.drop(result, f"it is of other checkpoints ({getattr(result, 'label', '')})")

    def drop(self, result: Result, reason: str) -> None:
        """Remove a result that does not fit, with a warning.

        Args:
            result: a result in the file.
            reason: the reason why it does not fit, in words.

        Raises:
            OperationError: the file was not opened with ``replace``.

        Example:
            >>> import tempfile, warnings, landscape
            >>> path = f"{tempfile.mkdtemp()}/two.h5"
            >>> landscape.save([surface, surface.compact()], path)  # surface: a result of landscape.contour
            >>> with landscape.open(path, "a", replace=True) as file:
            ...     with warnings.catch_warnings(action="ignore"):
            ...         file.drop(file[0], "it is too large")
            ...     len(file)
            1
        """
        if not self._replace:
            raise self._conflict(f"holds another result, {reason}")
        self.keep([stored for stored in self if stored is not result])
        line = f"{printable(self.path)}: cannot be resumed, {reason}; computed from the start"
        warn_caller(line, DataWarning)

    def _check_points(self, earlier: Any, x: Array, y: Array) -> None:
        """Raise OperationError if the grid ``x``, ``y`` lacks computed points of an earlier result."""
        columns, rows = coincide(x, earlier.x)[1], coincide(y, earlier.y)[1]
        before, after = int(earlier.done.sum()), int(earlier.done[np.ix_(rows, columns)].sum())
        if after < before and not self._replace:
            nx, ny, span = len(earlier.x), len(earlier.y), f"[−{earlier.span:g}, {earlier.span:g}]"
            words = f"holds {before:,} points of a grid of {nx} × {ny} over {span}, of which"
            finer = f"a grid of {2 * nx - 1} × {2 * ny - 1} keeps them all"
            raise self._conflict(f"{words} {before - after:,} would be lost; {finer}")

    def put(self, result: Result, *, finished: bool) -> None:
        """Store the present result of a computation, and write the file.

        The first call adds the result, unless :meth:`earlier` has returned a result to resume. Then the first
        call replaces that result. Each further call replaces the result of the call before.

        Args:
            result: a result of the same class as the others in the file.
            finished: whether the computation has ended. The next call then belongs to another one.

        Raises:
            OperationError: as for :meth:`add`.

        Example:
            >>> import tempfile, landscape
            >>> with landscape.open(f"{tempfile.mkdtemp()}/one.h5", "w") as file:
            ...     file.put(surface, finished=False)  # a result of landscape.contour
            ...     file.put(surface, finished=True)
            ...     len(file)
            1
        """
        self._check_writable(result)
        entry = self._current  # in the first call: None, or the entry that :meth:`earlier` has set
        if entry is None or entry not in self._entries:
            entry = _Entry(result)
            self._entries.append(entry)
            self._changed = True
        self._changed |= entry.result is not result
        entry.result, entry.completed_while_open = result, finished
        self._current = None if finished else entry
        self._write()

    def _write(self, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write the file if it has changed."""
        if self._writes and self._changed:
            base.write([*self], self.path, settings)
            self.written = True
        self._changed = False

    def _check_writable(self, result: Result | None = None) -> None:
        """Raise OperationError if this object cannot write, or the file has results of another class."""
        if not self._writable:
            raise OperationError(f"{self.path}: is closed, or open for reading only; give mode 'a'")
        different = [stored for stored in self if result is not None and stored.schema != result.schema]
        if different and result is not None:
            raise self._conflict(f"holds a {different[0].schema}, no {result.schema} is allowed beside it")

    def _conflict(self, words: str) -> OperationError:
        """Return the error for results in the file that would be lost."""
        return OperationError(f"{self.path}: {words}", give={"replace": True}, otherwise="another file")


def _word(value: Any) -> str:
    """Return the text of a setting for a message."""
    if value is None:
        return "the default"
    return value if isinstance(value, str) else json.dumps(value)


def _different_sources(source: str, other_source: str) -> bool:
    """Return whether two results are of weights in different files, by their SHA-256."""
    checksums, other_checksums = (set(text.split(", ")) - {""} for text in (source, other_source))
    return bool(checksums and other_checksums) and checksums.isdisjoint(other_checksums)


@checked()
def open(
    path: str | Path, mode: Mode = "r", *, replace: bool = False, group: dist.ProcessGroup | None = None
) -> ResultFile:
    """Open a file of results, to read the results, or to let computations add and resume results.

    Args:
        path: the file.
        mode: "r" reads; "a" adds to the file, or makes it; "w" makes a new file, which replaces the old one
            when the first result is written. With "a" and "w" no other process can write the file.
        replace: what happens to results and grid points in the file that do not fit a new computation. True:
            the computation replaces them, with a warning; False: the computation is refused.
        group: a torch.distributed group whose processes all open the file; the first process writes.

    Returns:
        The file; the end of its ``with`` block closes it.

    Raises:
        InputError: another mode, or a path that is no name of a file.
        OperationError: the file is no file of results, is damaged (unless the mode is "w"), cannot be read,
            or is in use.

    Example:
        >>> import tempfile, landscape
        >>> path = f"{tempfile.mkdtemp()}/surface.h5"
        >>> surface.save(path)  # a result of landscape.contour
        >>> with landscape.open(path) as file:
        ...     [type(result).__name__ for result in file]
        ['Surface']
    """
    is_writer = group is None or dist.get_rank(group) == 0
    return ResultFile(path, mode, replace=replace, writes=is_writer)
