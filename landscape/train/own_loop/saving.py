"""Checkpoints of decentralised training in a user's own loop, with all learners, as the trainer's."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from landscape.checkpoint.checkpoint import RECORDED, Checkpoint, misfit, storable
from landscape.checkpoint.history import UNITS
from landscape.core.errors import FailedError, InputError
from landscape.core.hdf5 import Array
from landscape.core.toml import toml_text
from landscape.problem.layout import unwrapped
from landscape.train.own_loop import recording
from landscape.train.own_loop.step import Stepper
from landscape.train.processes.process_group import Lost


def save(stepper: Stepper, path: Path, algorithm: Mapping[str, Any], seed: int) -> None:
    """Write a checkpoint with all learners to ``path``: rank 0 does, and gets the rows of the others.

    Args:
        algorithm: the name of the rule and its options.
        seed: of the rule's random draws.

    Raises:
        FailedError: on every rank where rank 0 cannot write there.
    """
    parameters, comm, rule = stepper.parameters, stepper.comm, stepper.rule
    stepper.group.check(_unwritable(path) if comm.rank == 0 else None)
    momentum = recording.heavy_ball(parameters.optimizer)
    limit = rule.stability_limit(*momentum) if momentum else None
    rows = {name: t.to(parameters.device)[None].clone() for name, t in parameters.rest().items()}
    state = Checkpoint(
        weights=storable(parameters.flat),
        layout=parameters.layout,
        step=stepper.steps,
        epoch=math.nan,
        algorithm=RECORDED,
        recipe=toml_text(
            {
                "name": path.resolve().parent.name,
                "seed": seed,
                "algorithm": algorithm,
                "optimizer": recording.optimizer_table(parameters.optimizer),
                "monitor": {} if limit is None else {"stability_limit": limit},
            },
        ),
        model={"name": recording.class_path(unwrapped(parameters.module)), "options": {}},
        data={"name": "", "options": {}, "train": 0, "test": 0, "fingerprint": ""},
        lr=recording.rate(parameters.optimizer),
        local_batch=0,
        seed=seed,
        history=_history(stepper),
        buffers={name: storable(t) for name, t in rows.items()},
        optimizer=stepper.state.rows(),
        rule={name: storable(t) for name, t in rule.state.items()},
        shared={name: storable(t) for name, t in rule.shared.items()},
    )
    error: InputError | None = None
    if comm.rank:
        for tensor in state.stacked().values():
            comm.send_rows(tensor)
    else:
        try:
            state.save(path, comm.learners, comm.rows)
        except Lost:
            raise
        except FailedError as raised:  # all rows were received: the file takes them even from a full disk
            error = raised
    stepper.group.check(error)  # nobody goes on before the file is there


def _history(stepper: Stepper) -> dict[str, Array]:
    """Two rows, of the start, where all learners are equal, and of now: the learning rate, the spread."""
    flat, comm = stepper.parameters.flat, stepper.comm
    spread = (flat - comm.fresh_mean(flat, "weights")).flatten()
    values = {
        "step": float(stepper.steps),
        "consensus": comm.total(float(spread @ spread))[0] / comm.learners,
        "lr": recording.rate(stepper.parameters.optimizer),
    }
    rows = [{"step": 0.0, "consensus": 0.0}, values][0 if stepper.steps else 1 :]
    return {column: np.array([row.get(column, math.nan) for row in rows]) for column in UNITS}


def load(stepper: Stepper, path: Path, algorithm: Mapping[str, Any]) -> None:
    """Take weights, buffers, and the states of optimizer and rule from a file of :func:`save`.

    Raises:
        FailedError: on every rank where one cannot read the file, or it does not fit.
        InputError: for a file of another algorithm, or of another number of learners.
    """
    error: InputError | None = None
    try:
        _load(stepper, path, algorithm)
    except InputError as raised:
        error = raised
    stepper.group.check(error)


def _load(stepper: Stepper, path: Path, algorithm: Mapping[str, Any]) -> None:
    comm, parameters, rule = stepper.comm, stepper.parameters, stepper.rule
    learners: list[int] = []

    def own(n: int) -> slice:
        learners.append(n)
        return comm.local

    run = Checkpoint.load(path, own)
    if run.algorithm != RECORDED or "algorithm" not in recording.read_settings(run):
        raise FailedError(
            f"{path}: holds no state of a DecentralizedDataParallel; give one of save_checkpoint"
        )
    if learners[0] != comm.learners:
        raise InputError(f"{path}: holds {learners[0]} learners, here are {comm.learners}; start as many")
    before = recording.read_settings(run)["algorithm"]
    for key in {**before, **algorithm}:
        if before.get(key) != algorithm.get(key):
            raise InputError(
                f"algorithm.{key}: {algorithm.get(key)!r} is not allowed, {path} has {before.get(key)!r}"
            )
    made = recording.read_settings(run).get("optimizer", {}).get("name")
    kind = type(parameters.optimizer).__name__
    if made != kind:
        raise InputError(f"optimizer: {kind} is not allowed, {path} has the state of {made}")
    if run.layout != parameters.layout:
        raise FailedError(
            f"{path}: its weights do not fit the model: {misfit(run.layout, parameters.layout)}"
        )
    rest = parameters.rest()
    if run.buffers.keys() != rest.keys():
        different = sorted(run.buffers.keys() ^ rest.keys())[0]
        raise FailedError(f"{path}: buffer '{different}' is not in both the file and the model")
    rule.restore(run.rule, run.shared)
    stepper.state.restore(run.optimizer)
    parameters.flat.copy_(run.weights)
    for name, tensor in rest.items():
        tensor.copy_(run.buffers[name][0])
    stepper.steps = run.step


def _unwritable(path: Path) -> InputError | None:
    """Why ``path`` cannot be written, found before the others begin to send."""
    if path.suffix != ".h5":
        return InputError(f"path: {path} is not allowed, its name must end in .h5")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            return FailedError(f"{path}: is a folder, a file is needed")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        return FailedError(f"{path}: cannot be written ({error.strerror})")
    return None
