"""Numbers of a run or of a user's loop go to TensorBoard, Weights & Biases or trackio, too."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.options import choose
from landscape.core.registry import optional

# Under which numbers stand in a run that the user's loop writes to as well.
PREFIX = "landscape/"
#: Takes the numbers of one step by name; those of the same step may come in parts.
Write = Callable[[int, Mapping[str, float]], object]
WRITERS = ("tensorboard", "wandb", "trackio")


def writer_names(scalars: str | Sequence[str] | None) -> list[str]:
    """The writers asked for, none where it is None; InputError for a name that is not known."""
    if scalars is not None and not isinstance(scalars, (str, list, tuple)):
        raise InputError(f"scalars: {scalars!r} is not allowed, it must be one of {', '.join(WRITERS)}")
    each = [scalars] if isinstance(scalars, str) else scalars or []
    return [choose("scalars", name, WRITERS) for name in each]


def package_of(name: str) -> Any:
    """The package of the writer called ``name``; OperationError where it is not installed."""
    return optional(name, "scalars", f"{name}, or leave scalars out")


def open_writer(name: str, folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    """The writer called ``name``, for a run in ``folder`` that has done ``step`` steps; ``opened`` closes it.

    Raises OperationError where its package is missing or refuses.
    """
    try:
        package = package_of(name)
        if name == "tensorboard":
            return _tensorboard(folder, step, opened)
        return _tracked(package, folder, opened)
    except LandscapeError:
        raise
    except Exception as error:  # whatever the package, or the service behind it, says
        words = " ".join(str(error).split())[:200]
        raise OperationError(f"scalars: '{name}' cannot be used ({type(error).__name__}: {words})") from error


def row_writer(
    name: str, folder: Path, step: int, opened: contextlib.ExitStack, then: Callable[[dict[str, float]], None]
) -> Callable[[dict[str, float]], None]:
    """A function that writes the finite numbers of a row of a history, and then calls ``then`` with it.

    The other arguments are :func:`open_writer`'s.
    """
    write = open_writer(name, folder, step, opened)

    def take(row: dict[str, float]) -> None:
        write(int(row["step"]), {k: v for k, v in row.items() if k != "step" and math.isfinite(v)})
        then(row)

    return take


def _tensorboard(folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    """Event files in the folder "tensorboard" of the run."""
    module = optional("torch.utils.tensorboard", "scalars", "tensorboard, or leave scalars out")
    # What an unbroken run has not written yet is taken back where one goes on from an earlier step.
    writer = module.SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
    opened.callback(writer.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def _tracked(tracker: Any, folder: Path, opened: contextlib.ExitStack) -> Write:
    """A run of Weights & Biases, or of trackio, which has the same functions.

    That of the user's loop where one is active, under names of their own and with the step beside them; else
    a new one in the project "landscape", called as the folder.
    """
    current = getattr(getattr(tracker, "context_vars", None), "current_run", None)  # trackio's
    active = current.get() if current else getattr(tracker, "run", None)
    if active is not None:  # whose steps are the user's
        return lambda step, values: active.log(
            {f"{PREFIX}{k}": v for k, v in values.items()} | {f"{PREFIX}step": step}
        )
    run = tracker.init(project="landscape", name=folder.name)
    opened.callback(run.finish)
    return lambda step, values: run.log(dict(values), step=step)
