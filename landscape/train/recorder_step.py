"""What stands around one step of a recorded loop."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

# What a with statement around a step is at: not asked for, asked for, entered.
IDLE, ASKED, INSIDE = 0, 1, 2


class RecorderWarning(UserWarning):
    """What is recorded may not be what the user means."""


class Steps(Protocol):
    """What a step needs of its recorder."""

    steps: int
    _next: int
    _phase: int
    _broken: bool
    _observer: Any

    def _before(self) -> None: ...
    def _after(self) -> None: ...


class Step:
    """What ``with recorder.step():`` enters: one object for all steps, so that one costs two comparisons."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Steps) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.steps + 1 >= recorder._next:
            recorder._before()
        recorder._phase = INSIDE

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        recorder = self._recorder
        recorder._phase = IDLE
        recorder._broken = kind is not None
        if kind is not None:
            recorder._observer.forget()
            return
        recorder.steps += 1
        if recorder.steps >= recorder._next:
            recorder._after()


def warn_of_other_weights(folder: Path, step: int, theta: Tensor, recorded: Tensor) -> None:
    """Warn where the model's weights are not those that were recorded at ``step``."""
    if not torch.equal(theta.cpu().to(recorded.dtype), recorded):
        warnings.warn(
            f"{folder}: the model's weights are not those recorded at step {step}; load them before the loop "
            "goes on, or give resume=STEP, the step that they are of",
            RecorderWarning,
            stacklevel=6,
        )
