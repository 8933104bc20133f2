"""The files in the folder of a run, and files of results that computations add to.

A file of results is locked while it is written and saved at intervals; a computation that fits it resumes.
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
    """Write step-NNNNNNN.h5, and last.h5 as a copy of it with the whole history; gives the former.

    What damages one of the two spares the other. ``every``: steps between two files, 0 for none; ``learners``
    and ``rows`` as :meth:`.Checkpoint.save` takes them.
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
    """The checkpoints step-*.h5 in ``folder``, sorted by name, without other files with such names.

    OperationError for a step-NNNNNNN.h5 that cannot be read: it must be a damaged checkpoint.
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
    """The files in ``folder`` with a name that a run writes: they would be overwritten."""
    return sorted(p for p in folder.glob("*") if p.name in _NAMES or _STEP.fullmatch(p.name))


def of_a_run(path: Path) -> bool:
    """Return whether ``path``, named as a run's file, is one: a checkpoint of a run, or its recipe."""
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
        path: the file; or the folder of a run, which stands for its last checkpoint.

    Returns:
        A :class:`Checkpoint`, a result, or a list where the file holds several results.

    Raises:
        InputError: no name of a file.
        OperationError: a file that is missing, truncated, foreign or of a newer version.

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
    """The files of a run in ``folder``; OperationError if there are any, and neither option is given.

    With ``force`` also if another file has the name of one, as it would be deleted; None: there is no such
    option.
    """
    if resume and force:
        raise InputError("resume, force: only one of the two is allowed")
    present = named_like_a_run(folder)
    if present and not (resume or force):
        ways = {"resume": True} if force is None else {"resume": True, "force": True}
        words = f"{folder}: holds a run already ({present[0].name})"
        raise OperationError(words, give=ways, otherwise="another folder")
    for path in present if force else []:
        if not of_a_run(path):
            raise OperationError(f"force: {path} is no checkpoint of a run, it is not deleted; move it")
    return present


def last_sound(folder: Path, learners: Callable[[int], slice]) -> Checkpoint:
    """The checkpoint last.h5 or, if that is damaged, the newest step file that is sound, with a warning.

    ``learners`` as of :meth:`.Checkpoint.load`.

    Raises OperationError, about last.h5, where no file of the run is sound.
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
    """A result of the file, and whether a computation of this session has ended with it."""

    result: Result
    ended: bool = False


Mode = Annotated[str, OneOf(("r", "a", "w"))]


class ResultFile:
    """The results in an HDF5 file, as a sequence that computations add to; :func:`landscape.open` makes it.

    ``landscape.contour(…, into=file)`` and ``landscape.hessian_grid(…, into=file)`` go on with the result in
    the file that is of the same problem, plane and settings, unless it was resumed since the file was
    opened; they write the file about every ten seconds, and when they end. Every write is a whole new file
    that replaces the old one.

    Args:
        path, mode, replace: as for :func:`landscape.open`.
        writes: whether this process writes the file; of several that open it, one does.

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
        #: The earlier result that the latest computation went on with; None if it began from the start.
        self.resumed: Result | None = None
        #: Whether the file was written since it was opened.
        self.written = False
        self._writable, self._writes = mode != "r", writes and mode != "r"
        self._replace = replace or mode == "w"
        self._lock = Lock(self.path)
        self._going_on: _Entry | None = None  # the one that the computation writes until it ends
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
            ...     file.add(surface)
            ...     file.add(surface.compact())
            ...     len(file)
            2
        """
        self._going_on = None
        self.put(result, finished=True)

    def once(self, settings: Mapping[str, Any], compute: Callable[[], Iterable[Result]]) -> list[Result]:
        """The results of these settings: those in the file, or what ``compute`` makes, written at once.

        Args:
            settings: all that the results depend on, by name: numbers, texts, flags and lists of these.
            compute: called where the file does not have the results, or was opened with ``replace``.

        Returns:
            The results, which are all that the file holds now.

        Raises:
            OperationError: the file holds other results, and was not opened with ``replace``.

        Example:
            >>> import tempfile, landscape
            >>> path = f"{tempfile.mkdtemp()}/one.h5"
            >>> for _ in range(2):
            ...     with landscape.open(path, "a") as file:
            ...         [same] = file.once({"grid": 3}, lambda: [surface])
            ...         file.written
            True
            False
        """
        self._check()
        new_settings = dict(json.loads(json.dumps(settings)))
        if self._entries and not self._replace:
            for name in {**new_settings, **self._settings} if self._settings else ():
                before, after = self._settings.get(name), new_settings.get(name)
                if before != after:
                    words = f"its {name} is {_word(before)} and not {_word(after)}"
                    raise self._conflict(f"holds another result, {words}")
            if not self._settings:
                raise self._conflict(f"holds a {self[0].schema} with settings that are not known")
            return [*self]
        self._entries, self._changed = [_Entry(result, ended=True) for result in compute()], True
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
            >>> landscape.save([surface, surface.compact()], path)
            >>> with landscape.open(path, "a") as file:
            ...     file.keep(file[:1])
            >>> landscape.load(path).center.shape
            (2,)
        """
        self._check()
        entries = {id(entry.result): entry for entry in self._entries}
        new_entries = [entries.get(id(result), _Entry(result)) for result in results]
        self._changed |= new_entries != self._entries
        self._entries = new_entries

    def close(self) -> None:
        """Write what is not written, and release the lock; leaving a ``with`` block does so, too.

        Example:
            >>> import tempfile, landscape
            >>> file = landscape.open(f"{tempfile.mkdtemp()}/one.h5", "w")
            >>> file.add(surface)
            >>> file.close()
        """
        self._close(write=True)

    def _close(self, write: bool) -> None:
        try:
            if write and self._entries:  # without a result nothing takes the place of the old file
                self._write()
        finally:
            self._lock.release()
            self._writable = self._writes = False

    def earlier(
        self, kind: type[Result], differs: Callable[[Any], str], source: str, x: Array, y: Array
    ) -> Any:
        """Find the result that a computation on the grid ``x``, ``y`` goes on with; None if it begins.

        Results of this session are not resumed again, and those of files other than ``source`` (a
        SHA-256) are left alone.

        Args:
            kind: the class of the result.
            differs: the difference of a result from what is to be computed, in words; "" if there is none.
            source: the SHA-256 of the file whose weights are analyzed; "" if there is none.
            x, y: the coordinates of the grid.

        Returns:
            The result, which is ``resumed`` from now on.

        Raises:
            OperationError: the file holds other results, or points that the grid does not have, or it is open
                for reading only.

        Example:
            >>> import tempfile, landscape
            >>> with landscape.open(f"{tempfile.mkdtemp()}/one.h5", "w") as file:
            ...     file.earlier(landscape.Surface, lambda result: "", "", surface.x, surface.y) is None
            True
        """
        self._check()
        self.resumed = self._going_on = None
        refused = []
        for entry in self._entries:
            result = entry.result
            if entry.ended or _different_sources(source, getattr(result, "source_sha256", "")):
                continue
            reason = differs(result) if isinstance(result, kind) else f"it holds a {result.schema}"
            if not reason:
                self._check_points(result, x, y)
                self.resumed, self._going_on = result, entry
                return result
            refused.append((result, reason))
        if refused:
            self.drop(*refused[0])
        return None

    def only(self, sources: Sequence[str]) -> None:
        """Leave out the results of other weights.

        Args:
            sources: SHA-256 of the files whose weights are to be analyzed.

        Raises:
            OperationError: there are such results, and the file was not opened with ``replace``.

        Example:
            >>> import tempfile, landscape
            >>> path = f"{tempfile.mkdtemp()}/one.h5"
            >>> landscape.save([surface], path)
            >>> with landscape.open(path, "a") as file:  # it does not say whose weights it is of
            ...     file.only(["6ba7b810"])
            ...     len(file)
            1
        """
        for result in self:
            if _different_sources(", ".join(sources), getattr(result, "source_sha256", "")):
                self.drop(result, f"it is of other checkpoints ({getattr(result, 'label', '')})")

    def drop(self, result: Result, reason: str) -> None:
        """Leave out a result that does not fit, with a warning.

        Args:
            result: one that the file holds.
            reason: why it does not fit, in words.

        Raises:
            OperationError: the file was not opened with ``replace``.

        Example:
            >>> import tempfile, warnings, landscape
            >>> path = f"{tempfile.mkdtemp()}/two.h5"
            >>> landscape.save([surface, surface.compact()], path)
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
        across, up = coincide(x, earlier.x)[1], coincide(y, earlier.y)[1]
        before, after = int(earlier.done.sum()), int(earlier.done[np.ix_(up, across)].sum())
        if after < before and not self._replace:
            nx, ny, span = len(earlier.x), len(earlier.y), f"[−{earlier.span:g}, {earlier.span:g}]"
            words = f"holds {before:,} points of a grid of {nx} × {ny} over {span}, of which"
            finer = f"a grid of {2 * nx - 1} × {2 * ny - 1} keeps them all"
            raise self._conflict(f"{words} {before - after:,} would be lost; {finer}")

    def put(self, result: Result, *, finished: bool) -> None:
        """Write a result in the place of the one that it goes on with, or after all others.

        Args:
            result: of the kind that the file holds.
            finished: whether it is whole, and so not resumed while the file is open.

        Raises:
            OperationError: as for :meth:`add`.

        Example:
            >>> import tempfile, landscape
            >>> with landscape.open(f"{tempfile.mkdtemp()}/one.h5", "w") as file:
            ...     file.put(surface, finished=False)
            ...     file.put(surface, finished=True)
            ...     len(file)
            1
        """
        self._check(result)
        entry = self._going_on
        if entry is None or entry not in self._entries:
            entry = _Entry(result)
            self._entries.append(entry)
            self._changed = True
        self._changed |= entry.result is not result
        entry.result, entry.ended = result, finished
        self._going_on = None if finished else entry
        self._write()

    def _write(self, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write the file, unless it is as it was."""
        if self._writes and self._changed:
            base.write([*self], self.path, settings)
            self.written = True
        self._changed = False

    def _check(self, result: Result | None = None) -> None:
        if not self._writable:
            raise OperationError(f"{self.path}: is closed, or open for reading only; give mode 'a'")
        different = [stored for stored in self if result is not None and stored.schema != result.schema]
        if different and result is not None:
            raise self._conflict(f"holds a {different[0].schema}, no {result.schema} is allowed beside it")

    def _conflict(self, words: str) -> OperationError:
        """The refusal to lose results that the file holds."""
        return OperationError(f"{self.path}: {words}", give={"replace": True}, otherwise="another file")


def _word(value: Any) -> str:
    """A setting in a message."""
    return "the default" if value is None else str(value) if isinstance(value, str) else json.dumps(value)


def _different_sources(source: str, other_source: str) -> bool:
    """Return whether two results come from different files, by the SHA-256 of these."""
    checksums, other_checksums = (set(text.split(", ")) - {""} for text in (source, other_source))
    return bool(checksums and other_checksums) and checksums.isdisjoint(other_checksums)


@checked()
def open(
    path: str | Path, mode: Mode = "r", *, replace: bool = False, group: dist.ProcessGroup | None = None
) -> ResultFile:
    """Open a file of results, to read them, or for computations to add to it and to go on with.

    Args:
        path: the file.
        mode: "r" reads; "a" adds to the file, or makes it; "w" begins anew, and the first result that is
            written takes the place of the old file. With "a" and "w" no other process can write it.
        replace: results that do not fit, and points that a new grid does not have, are replaced, and a
            warning says why; without, a computation that would lose them is refused.
        group: a torch.distributed group whose processes all open the file; its first one writes.

    Returns:
        The file, which leaving its ``with`` block closes.

    Raises:
        InputError: another mode, or no name of a file.
        OperationError: the file holds something else, is damaged ("w" replaces such a one), cannot be read,
            or is in use.

    Example:
        >>> import tempfile, landscape
        >>> path = f"{tempfile.mkdtemp()}/surface.h5"
        >>> surface.save(path)
        >>> with landscape.open(path) as file:
        ...     [type(result).__name__ for result in file]
        ['Surface']
    """
    writes = group is None or dist.get_rank(group) == 0
    return ResultFile(path, mode, replace=replace, writes=writes)
