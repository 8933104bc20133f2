"""The result file of a command that works on grids: written as the work goes on, gone on with, and reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from landscape import store
from landscape.cli import common
from landscape.cli.processes import Team
from landscape.grid import MismatchError, difference
from landscape.options import FailedError

R = TypeVar("R", bound=store.Result)


class GridFile(Generic[R]):
    """Results of ``kind``, one for each of ``origins`` (where it comes from), in the file ``path``.

    What the file holds of the same checkpoints, with the same values in the fields ``wanted``, is gone on
    with; the rest is replaced, and a message says so.
    """

    def __init__(
        self,
        path: Path,
        kind: type[R],
        origins: Sequence[store.About],
        wanted: Mapping[str, Any],
        quiet: bool,
        team: Team,
    ) -> None:
        if team.rank == 0:
            common.lock(path)
        self._path, self._quiet = path, quiet
        self._reasons: list[str] = []  # told when work starts: the command may still end with an error
        self._results: list[R] = []
        self._held = self._read(kind)
        self._past: list[R | None] = [None] * len(origins)
        known = {getattr(held, "source_sha256", ""): held for held in self._held}
        for i, origin in enumerate(origins):
            past = known.get(origin["source_sha256"])
            reason = difference(past, wanted) if past else ""
            if reason:
                self._anew(reason)
            else:
                self._past[i] = past
        if self._held and not any(origin["source_sha256"] in known for origin in origins):
            self._anew("it is of other checkpoints")

    def _read(self, kind: type[R]) -> list[R]:
        if not self._path.exists():
            return []
        try:
            found = store.load_results(self._path)
        except FailedError as error:
            self._anew(str(error))
            return []
        same = [result for result in found if isinstance(result, kind)]
        if not same:
            self._anew(f"it holds a {found[0].schema}")
        return same

    def _anew(self, reason: str) -> None:
        self._reasons.append(reason)

    def _tell(self) -> None:
        for reason in self._reasons:
            common.message(f"{self._path}: not gone on with, {reason}; computed from nothing", self._quiet)
        self._reasons = []

    @property
    def previous(self) -> R | None:
        """What the file holds of the next result, if anything."""
        return self._past[len(self._results)]

    def add(self, compute: Callable[..., R], team: Team) -> tuple[R, R | None]:
        """The next result, by ``compute(previous=…, save=…, group=…)``, and the previous one it used."""
        previous = self.previous
        self._tell()
        try:
            result = compute(previous=previous, save=self._save, group=team.group)
        except MismatchError as error:
            self._anew(str(error))
            self._tell()
            previous = None
            result = compute(save=self._save, group=team.group)
        if result is not previous and len(self._results) + 1 < len(self._past) and team.rank == 0:
            self._save(result)  # whatever becomes of the next one
        self._results.append(result)
        return result, previous

    def _save(self, result: R) -> None:
        """Write the results so far, ``result`` as it is, and what is held of those to come."""
        ahead = [past for past in self._past[len(self._results) + 1 :] if past is not None]
        store.save([*self._results, result, *ahead], self._path)

    def finish(self, picture: str | None) -> None:
        """Write the file, unless it holds these results already; draw them and name the files on stdout."""
        if len(self._held) == len(self._results) and all(map(_is, self._held, self._results)):
            common.message(f"{self._path}: finished already, nothing is computed", self._quiet)
        else:
            store.save(self._results, self._path)
        common.show(self._results, self._path, picture)


def _is(a: object, b: object) -> bool:
    return a is b
