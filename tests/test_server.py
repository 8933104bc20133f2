"""Asynchronous SGD with measured delays: a server and workers that are processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import landscape
from landscape import Checkpoint, InputError
from landscape.testing.checks import RECIPE
from landscape.train.processes import process_group
from landscape.train.processes.process_group import Group, Lost
from landscape.train.processes.server import Server, Worker
from landscape.train.recipes import recipe
from landscape.train.run import launch
from landscape.train.run.loop import Trainer
from tests.conftest import Command, slow_but
from tests.groups import together
from tests.problems import assert_identity

BASE: dict[str, Any] = RECIPE | {
    "learners": 1, "batch": 20, "lr": 0.1, "steps": 60, "data": RECIPE["data"] | {"samples": 203},
    "algorithm": {"name": "async-sgd", "delay": 0, "schedule": "measured"},
    "decompose": {"every": 5}, "evaluate": {"every": 20}, "checkpoint": {"every": 20},
}  # fmt: skip


def measured(delay: int, **changes: Any) -> dict[str, Any]:
    algorithm = BASE["algorithm"] | {"delay": delay} | changes.pop("algorithm", {})
    return BASE | changes | {"algorithm": algorithm}


def serve(group: Group, values: dict[str, Any], folder: str, resume: bool = False) -> Checkpoint:
    return launch.launch(recipe.from_values(values), folder, resume=resume, group=group)


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_one_worker_is_plain_sgd_and_resumes_to_the_bit(momentum: float, tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "momentum": momentum}
    plain = Trainer(recipe.from_values(BASE | {"algorithm": {"name": "ssgd"}, "optimizer": optimizer})).run()
    end, last = together(2, serve, measured(0, optimizer=optimizer), str(tmp_path / "a"))
    assert torch.equal(end.weights, plain.weights)
    assert torch.equal(last.weights, plain.weights)
    for column in ("loss", "alpha_e", "delta", "test_loss", "train_loss"):
        np.testing.assert_allclose(end.history[column], plain.history[column], rtol=1e-9, err_msg=column)
    assert (end.history["delay"] == 0).all()
    assert "delay" not in plain.history  # a column of the asynchronous rules
    # Eq. 4's terms need the minibatch, which the worker has.
    assert np.isnan(end.history["delta_s"]).all()
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "step-0000020.h5", tmp_path / "b" / "last.h5")
    again, _ = together(2, serve, measured(0, optimizer=optimizer), str(tmp_path / "b"), True)
    assert torch.equal(again.weights, plain.weights)


@pytest.mark.parametrize("form", slow_but(["shifted and aware"], ["off", "ordinary", "shifted and aware"]))
def test_workers_deliver_at_their_own_pace(form: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 60}
    changes |= {"optimizer": {"name": "sgd", "momentum": 0.5}} if form == "ordinary" else {}
    shifted = {"shifted": 0.5, "staleness_aware": True} if form == "shifted and aware" else {}
    parts = together(4, serve, measured(2, algorithm=shifted, **changes), str(tmp_path / "run"))
    end = parts[0]
    assert isinstance(end, Checkpoint), parts
    for part in parts[1:]:
        assert torch.equal(part.weights, end.weights)
    delay, step = end.history["delay"], end.history["step"]
    assert len(step) == 60
    assert ((delay >= 0) & (delay < step)).all()
    # A worker's delays, and one for each delivery, add up to the step of its last one.
    latest = end.shared["fetched"].clone()
    latest[end.shared["last"]] = 60
    assert delay.sum() + 60 == float(latest.sum())
    assert (
        1.0 <= delay.mean() <= 2.0
    )  # n − 1, but for how long ago each was the last: much, on a busy machine
    assert end.history["train_loss"][-1:] < end.history["train_loss"][4]
    assert_identity(end.history)
    more = measured(2, algorithm=shifted, **(changes | {"steps": 80}))
    longer = together(4, serve, more, str(tmp_path / "run"), True)[0]
    assert longer.step == 80
    np.testing.assert_array_equal(longer.history["delay"][:60], delay)


def die_in_training(folder: Path) -> None:
    while not (folder / "last.h5").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_one(group: Group, folder: str) -> str:
    process_group.LOST_AFTER = 4.0  # a busy machine may keep a living rank from its signs for seconds
    if group.rank == 2:
        threading.Thread(target=die_in_training, args=(Path(folder),), daemon=True).start()
    try:
        serve(group, measured(2, steps=10**7, decompose={"every": 0}), folder)
    except Lost as error:
        return str(error) if group.tell(str(error)) else "told already"
    return "not lost"


@pytest.mark.slow
def test_a_worker_that_is_lost_ends_the_run_with_a_line(tmp_path: Path) -> None:
    found = together(4, lose_one, str(tmp_path), timeout=60.0, deadline=180.0, lost=(2,))
    told = [line for line in found if isinstance(line, str) and line != "told already"]
    assert len(told) == 1, found
    assert told[0].startswith("rank 2 of 4 lost, no sign of life for 4 s (")
    assert told[0].endswith(f"; --resume goes on from {tmp_path}/last.h5")
    landscape.load(tmp_path / "last.h5")


def test_what_does_not_fit_is_said_in_a_line(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(recipe.from_values(measured(2)).to_toml())
    code, _, err = command("train", path, "-o", tmp_path / "run", "-q")
    assert (code, err.strip()) == (
        2,
        "landscape: --nproc: 1 is not allowed, algorithm.schedule 'measured' with delay 2 needs 4, a server and "
        "3 workers",
    )
    with pytest.raises(InputError, match="'measured' is not allowed in one process"):
        Trainer(recipe.from_values(measured(2))).run()
    with pytest.raises(InputError, match="learners: 2 is not allowed with algorithm.schedule 'measured'"):
        recipe.from_values(measured(2, learners=2))
    assert recipe.from_values(measured(2)).stability_limit() is None
    assert recipe.from_values(measured(0)).stability_limit() == 2
    assert launch.trainer_class(recipe.from_values(BASE | {"algorithm": {"name": "ssgd"}}), None) is Trainer
    (refused, _) = together(2, norms, lost=(1,))
    assert isinstance(refused, InputError)
    assert "has BatchNorm" in str(refused)


def norms(group: Group) -> None:
    values = measured(0, model={"name": "tests.nets:norm_net"})
    chosen = recipe.from_values(values)
    assert launch.trainer_class(chosen, group) is (Worker if group.rank else Server)
    launch.trainer_class(chosen, group)(chosen, group=group)
