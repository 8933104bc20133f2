"""What a recorder writes about a loop of the user's own, into its file and to other loggers."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from landscape import stability
from landscape.checkpoint import run_folder
from landscape.checkpoint.checkpoint import RECORDED, Checkpoint, check_fit
from landscape.checkpoint.history import UNITS
from landscape.core.errors import FailedError, InputError
from landscape.core.hdf5 import Array
from landscape.core.options import choose
from landscape.core.registry import optional
from landscape.curvature.hessian import Preconditioner
from landscape.problem.layout import Layout
from landscape.train.optimizer.torch_optim import preconditioned
from landscape.train.optimizer.torch_optim import preconditioner as found_preconditioner
from landscape.train.run.launch import last_sound

# Columns of the history that a user may fill; the recorder, or nobody, fills the others.
OPEN = ("loss", "consensus", "samples_per_s", "wait_s", "test_loss", "test_accuracy")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class Rows:
    """The history of a loop: a row for each step that something is known of.

    ``rows`` step -> column -> value, without NaN; ``units`` column -> unit, of all columns.

    Args:
        columns: those of the recorder's own, beside the ones that every run has: name -> unit.
        before: where the run goes on from: its rows up to step ``last`` are taken.
    """

    def __init__(self, columns: Mapping[str, str], before: Checkpoint | None, last: int) -> None:
        self._own = UNITS | dict(columns)
        self.units = self._own | (before.units if before else {})
        self.rows: dict[int, dict[str, float]] = {}
        history = before.history if before else {"step": np.zeros(0)}
        for i, step in enumerate(history["step"].astype(int).tolist()):
            if step <= last:
                row = {name: float(column[i]) for name, column in history.items()}
                self.rows[step] = {name: value for name, value in row.items() if not math.isnan(value)}

    def declare(self, name: str, unit: str | None) -> None:
        """Make ``name`` a column of the user's with this unit. InputError where it cannot be one."""
        if not _NAME.fullmatch(name):
            raise InputError(f"log: '{name}' is not allowed, use letters, digits, _, . and -, a letter first")
        if name in self._own and name not in OPEN:
            raise InputError(f"log: '{name}' is a column of the recorder's own, choose another name")
        known = self.units[name] = self.units.get(name) or unit or "1"  # "": a file did not say
        if unit is not None and unit != known:
            raise InputError(f"log: the unit of '{name}' is '{known}', '{unit}' is not allowed any more")

    def columns(self) -> dict[str, Array]:
        """Column -> (T,) float64, NaN where nothing is known."""
        found = {name: np.full(len(self.rows), np.nan) for name in self.units}
        for i, row in enumerate(self.rows.values()):  # which have few of the columns
            for name, value in row.items():
                found[name][i] = value
        return found


def due(every: int, step: int) -> bool:
    """Whether ``step`` is one of every ``every``-th; 0: none is."""
    return bool(every) and step % every == 0


def number(name: str, value: Any) -> float:
    """``value`` as a float; InputError where it is not one number."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        raise InputError(f"log: {name}: {kind} is not allowed, it must be one number") from error


def class_path(model: nn.Module) -> str:
    """MODULE:NAME of the model's class; of a script's its file, from which others can import it."""
    module = type(model).__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(file).stem if file else module
    return f"{module}:{type(model).__qualname__}"


def rate(optimizer: Any) -> float:
    """The learning rate of all parameter groups; NaN where they differ, or there is no optimizer."""
    if optimizer is None:
        return math.nan
    rates = {float(group.get("lr", math.nan)) for group in optimizer.param_groups}
    return rates.pop() if len(rates) == 1 else math.nan


def heavy_ball(optimizer: Any) -> tuple[float, str] | None:
    """(momentum, form) of torch.optim.SGD, as limits of stability take them; None for what is not known."""
    if type(optimizer) is not torch.optim.SGD:
        return None
    keys = ("lr", "momentum", "dampening", "nesterov", "maximize")
    forms = {tuple(float(group[key]) for key in keys) for group in optimizer.param_groups}
    _, momentum, dampening, nesterov, maximize = forms.pop()
    if forms or maximize or not 0 <= momentum < 1 or (momentum and dampening):
        return None
    return momentum, "nesterov" if nesterov else "ordinary"


def stability_limit(optimizer: Any) -> float | None:
    """The largest stable ηλ of torch.optim.SGD in its form; None for what is not known."""
    form = heavy_ball(optimizer)
    return stability.max_stable_step(0, *form) if form else None


def preconditioner(optimizer: Any, parameters: Sequence[nn.Parameter]) -> Preconditioner | None:
    """That of torch's Adam, AdamW or RMSprop for all ``parameters``, with its limit; None before it has one.

    Raises:
        InputError: for another optimizer, or parameter groups with different options.
    """
    kind = type(optimizer)
    names = ("betas", "eps", "amsgrad", "centered", "momentum", "maximize")
    groups = optimizer.param_groups if optimizer is not None else [{}]
    values = {name: groups[0][name] for name in names if name in groups[0]}
    form = preconditioned(kind, values)
    if form is None or any(group.get(name) != value for group in groups for name, value in values.items()):
        words = "parameter groups with different options" if form else f"the optimizer '{kind.__name__}'"
        raise InputError(
            f"monitor.instruments: 'preconditioned-lambda-max' is not allowed with {words}, only with Adam, "
            "AdamW or RMSprop of torch.optim with the same options for all parameters"
        )
    states = [optimizer.state.get(p, {}) for p in parameters]
    if not all("step" in state for state in states):
        return None
    flat = {
        key: torch.cat([state[key].detach().flatten() for state in states])[None]
        for key, value in states[0].items()
        if value is not None and key != "step"
    }
    pairs = zip(parameters, states, strict=True)
    updates = torch.cat([torch.full((p.numel(),), float(state["step"])) for p, state in pairs])[None]
    m, momentum_form, factor = form
    diagonal = found_preconditioner(kind, values, flat, updates.to(parameters[0].device, torch.float64))[0]
    limit = stability.max_stable_step(0, m, momentum_form) / factor
    return Preconditioner(diagonal, name=kind.__name__, lr=rate(optimizer), limit=limit)


def optimizer_table(optimizer: Any) -> dict[str, Any]:
    """The class of a torch optimizer and its defaults: flags, finite numbers, text and lists, as TOML has."""
    table: dict[str, Any] = {"name": type(optimizer).__name__}
    for key, value in getattr(optimizer, "defaults", {}).items():
        value = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        each = value if isinstance(value, (list, tuple)) else [value]
        held = all(
            isinstance(v, bool | int | str) or (isinstance(v, float) and math.isfinite(v)) for v in each
        )
        if held and re.fullmatch(r"[\w-]+", key):
            table[key] = value
    return table


def read_settings(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The tables of its settings that a recorded checkpoint holds."""
    return {name: table for name, table in checkpoint.settings.items() if isinstance(table, dict)}


def has_group() -> bool:
    """Whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def place(what: str = "Recorder", why: str = "so that one rank alone records") -> tuple[int, int]:
    """(rank, processes) of this process. InputError where there are several that know no group yet."""
    if has_group():
        return dist.get_rank(), dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise InputError(
            f"{what}: WORLD_SIZE is {size}, but torch.distributed knows no group yet; call "
            f"init_process_group first, {why}"
        )
    return 0, 1


def check_folder(folder: Path, resume: bool | int) -> None:
    """FailedError where ``folder`` holds a run that is not to be resumed."""
    taken = run_folder.named_like_a_run(folder) if folder.is_dir() else []
    if taken and resume is False:
        raise FailedError(
            f"{folder}: holds a run already ({taken[0].name}); give resume=True to go on with it, or another "
            "folder"
        )


def run_before(folder: Path, resume: bool | int, layout: Layout) -> Checkpoint | None:
    """The last state of the recorded run in ``folder``; None where there is none.

    Raises FailedError for a run of another kind or model, and where there is none to go on with at a step.
    """
    if not run_folder.named_like_a_run(folder):
        if resume and not isinstance(resume, bool):
            raise FailedError(f"resume: {resume} is not allowed, {folder} holds no run to go on with")
        return None
    run = last_sound(folder, learners=lambda n: slice(0, n))
    if run.algorithm != RECORDED:
        raise FailedError(f"{folder}: its run is of '{run.algorithm}', not a recorder's; give another folder")
    check_fit(folder, run.layout, layout)
    return run


def drop_later(folder: Path, step: int) -> None:
    """Delete the step files in ``folder`` of steps after ``step``."""
    for path in run_folder.named_like_a_run(folder):
        if path.stem[5:].isdecimal() and int(path.stem[5:]) > step:
            path.unlink()


# Under which numbers stand in a run that the user's loop writes to as well.
PREFIX = "landscape/"


#: Takes the numbers of one step by name; those of the same step may come in parts.
Write = Callable[[int, Mapping[str, float]], object]


def _tensorboard(folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    """Event files in the folder "tensorboard" of the run."""
    _package("tensorboard")
    module = _package("torch.utils.tensorboard", "tensorboard")
    # What an unbroken run has not written yet is taken back where one goes on from an earlier step.
    writer = module.SummaryWriter(folder / "tensorboard", purge_step=step + 1 if step else None)
    opened.callback(writer.close)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write


def _tracked(tracker: Any, active: Any, folder: Path, opened: contextlib.ExitStack) -> Write:
    """A run of Weights & Biases, or of trackio, which has the same functions.

    That of the user's loop where one is ``active``, under names of their own and with the step beside them;
    else a new one in the project "landscape", called as the folder.
    """
    if active is not None:  # whose steps are the user's

        def write(step: int, values: Mapping[str, float]) -> None:
            active.log({f"{PREFIX}{k}": v for k, v in values.items()} | {f"{PREFIX}step": step})

        return write
    run = tracker.init(project="landscape", name=folder.name)
    opened.callback(run.finish)
    return lambda step, values: run.log(dict(values), step=step)


def _wandb(folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    wandb = _package("wandb")
    return _tracked(wandb, wandb.run, folder, opened)


def _trackio(folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    trackio = _package("trackio")
    current = getattr(getattr(trackio, "context_vars", None), "current_run", None)
    return _tracked(trackio, current.get() if current else None, folder, opened)


WRITERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def writer_names(scalars: str | Sequence[str] | None) -> list[str]:
    """The writers asked for, none where it is None; InputError for a name that is not known."""
    if scalars is not None and not isinstance(scalars, (str, list, tuple)):
        raise InputError(f"scalars: {scalars!r} is not allowed, it must be one of {', '.join(WRITERS)}")
    each = [scalars] if isinstance(scalars, str) else scalars or []
    return [choose("scalars", name, WRITERS) for name in each]


def open_writer(name: str, folder: Path, step: int, opened: contextlib.ExitStack) -> Write:
    """The writer called ``name``, for a run in ``folder`` that has done ``step`` steps; ``opened`` closes it.

    Raises FailedError where its package is missing or refuses.
    """
    try:
        return WRITERS[name](folder, step, opened)
    except InputError:
        raise
    except Exception as error:  # whatever the package, or the service behind it, says
        words = " ".join(str(error).split())[:200]
        raise FailedError(f"scalars: '{name}' cannot be used ({type(error).__name__}: {words})") from error


def _package(module: str, install: str = "") -> Any:
    return optional(module, "scalars", f"{install or module}, or leave scalars out")
