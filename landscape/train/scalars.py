"""Where the numbers of a recorded run can go beside its file: TensorBoard, Weights & Biases, trackio.

Each package is imported only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from landscape.core.errors import FailedError, InputError
from landscape.core.extras import optional
from landscape.core.options import choose

# Under which numbers stand in a run that the user's loop writes to as well.
PREFIX = "landscape/"


class ScalarWriter(Protocol):
    """Takes numbers by name, step by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step; those of the same step may come in parts."""

    def close(self) -> None:
        """Write what is still in memory."""


class TensorBoard:
    """Event files in the folder "tensorboard" of the run."""

    def __init__(self, folder: Path, step: int) -> None:
        _package("tensorboard")
        module = _package("torch.utils.tensorboard", "tensorboard")
        # What an unbroken run has not written yet is taken back where one goes on from an earlier step.
        self._writer = module.SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class TrackedRun:
    """A run of Weights & Biases, or of trackio, which has the same functions.

    That of the user's loop where one is active, under names of their own and with the step beside them; else
    a new one in the project "landscape", called as the folder.
    """

    def __init__(self, tracker: Any, active: Any, folder: Path) -> None:
        self._theirs = active is not None
        self._run = active if self._theirs else tracker.init(project="landscape", name=folder.name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._theirs:  # whose steps are the user's
            self._run.log({f"{PREFIX}{k}": v for k, v in values.items()} | {f"{PREFIX}step": step})
        else:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        if not self._theirs:
            self._run.finish()


def _wandb(folder: Path, step: int) -> ScalarWriter:
    wandb = _package("wandb")
    return TrackedRun(wandb, wandb.run, folder)


def _trackio(folder: Path, step: int) -> ScalarWriter:
    trackio = _package("trackio")
    current = getattr(getattr(trackio, "context_vars", None), "current_run", None)
    return TrackedRun(trackio, current.get() if current else None, folder)


WRITERS = {"tensorboard": TensorBoard, "wandb": _wandb, "trackio": _trackio}


def names(scalars: str | Sequence[str] | None) -> list[str]:
    """The writers asked for, none where it is None; InputError for a name that is not known."""
    if scalars is not None and not isinstance(scalars, (str, list, tuple)):
        raise InputError(f"scalars: {scalars!r} is not allowed, it must be one of {', '.join(WRITERS)}")
    return [
        choose("scalars", name, WRITERS)
        for name in ([scalars] if isinstance(scalars, str) else scalars or [])
    ]


def open_writers(scalars: str | Sequence[str] | None, folder: Path, step: int) -> list[ScalarWriter]:
    """The writers asked for by name, for a run in ``folder`` that has done ``step`` steps.

    Raises InputError for a name that is not known, FailedError where a package is missing or refuses.
    """
    opened: list[ScalarWriter] = []
    for name in names(scalars):
        try:
            opened.append(WRITERS[name](folder, step))
        except Exception as error:  # whatever the package, or the service behind it, says
            close(opened)
            if isinstance(error, InputError):
                raise
            words = " ".join(str(error).split())[:200]
            raise FailedError(
                f"scalars: '{name}' cannot be used ({type(error).__name__}: {words})"
            ) from error
    return opened


def close(writers: Sequence[ScalarWriter]) -> None:
    """Close each of ``writers``."""
    for writer in writers:
        writer.close()


def _package(module: str, install: str = "") -> Any:
    return optional(module, "scalars", f"{install or module}, or leave scalars out")
