"""Several processes against one: trajectories, decomposition, checkpoints, and what happens when one is lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import unittest.mock
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import landscape
from landscape import Checkpoint, InputError, LandscapeError, OperationError
from landscape.checkpoint.history import MONITORED, UNITS
from landscape.core import files, registry
from landscape.testing.checks import RECIPE, same_bits
from landscape.training.decomposition import GradientEstimator
from landscape.training.processes import comm, process_group
from landscape.training.processes.comm import Comm, LostProcessError, Plan, _bounds
from landscape.training.processes.process_group import Group
from landscape.training.recipes import recipe
from landscape.training.run import launch
from landscape.training.run.loop import Hooks, Server, Trainer, Worker
from tests.conftest import Command, slow_but, wait_for
from tests.groups import free_port, together
from tests.problems import assert_identity
from tests.test_launching import booted, children_of, lives, running
from tests.test_metrics import Tagger

# Of these 1, 2 and 4 processes hold 5, 2 + 3 and 1 + 1 + 1 + 2 learners.
BASE: dict[str, Any] = RECIPE | {
    "learners": 5, "steps": 12, "data": RECIPE["data"] | {"samples": 203},
    "decompose": {"every": 4}, "evaluate": {"every": 5}, "checkpoint": {"every": 250},
}  # fmt: skip
pytestmark = pytest.mark.xdist_group("processes")  # the runs of one process are made once
DPSGD = {"name": "dpsgd"}
RING, PAIRS = DPSGD | {"mixing": "ring(1)"}, DPSGD | {"mixing": "random-matching"}
MOMENTUM = {"optimizer": {"name": "sgd", "momentum": 0.8}, "lr": 0.05}
NORM, DROPOUT = {"name": "tests.nets:norm_net"}, {"name": "tests.nets:norm_net", "dropout": 0.3}
STATISTICS = {"every": 8, "bn_samples": 100}
CASES: dict[str, dict[str, Any]] = {
    "ssgd": {"algorithm": {"name": "ssgd"}},
    "ssgd, nesterov": {
        "algorithm": {"name": "ssgd"}, "model": NORM, "lr": 0.02,
        "optimizer": {"name": "sgd", "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}},
    "ssgd, microbatches": {"algorithm": {"name": "ssgd"}, "accumulate": 2, **MOMENTUM},
    "ssgd*": {"algorithm": {"name": "ssgd*", "sigma": 0.01}},
    "ssgd, lamb": {"algorithm": {"name": "ssgd"}, "optimizer": {"name": "lamb"}, "lr": 0.02},
    "full, atc": {"algorithm": DPSGD | {"order": "atc"}},
    "ring": {"algorithm": RING},
    "ring, atc, momentum": {"algorithm": DPSGD | {"mixing": "ring(2)", "order": "atc"}, **MOMENTUM},
    "ring, sampled g": {"algorithm": RING, "decompose": {"every": 5, "samples": 64}},
    "one-peer": {"algorithm": DPSGD | {"mixing": "one-peer-exponential"}, "learners": 8},
    "matching": {"algorithm": PAIRS},
    "matching, atc": {"algorithm": PAIRS | {"order": "atc"}, "learners": 8},
    "star": {"algorithm": DPSGD | {"mixing": "star"}},
    "local": {"algorithm": {"name": "local-sgd", "period": 4, "start": 6}},
    "nodes, momentum": {
        "algorithm": {"name": "local-sgd", "period": 6, "nodes": 4, "node_period": 2, "buffers": "average"}, "learners": 8, **MOMENTUM},
    "slowmo": {"algorithm": {"name": "slowmo", "period": 3, "mixing": "ring(1)", "buffers": "reset"}, **MOMENTUM},
    "diloco": {"algorithm": {"name": "diloco", "period": 5}, "lr": 0.05},
    "sparta": {"algorithm": {"name": "sparta", "share": 0.1}},
    "streaming": {"algorithm": {"name": "streaming-diloco", "period": 5, "fragments": 2, "delay": 2, "own_share": 0.5}, "lr": 0.05},
    "decoupled": {
        "algorithm": {"name": "decoupled-diloco", "period": 5, "fragments": 2, "delay": 2, "availability": 0.5}, "lr": 0.05},
    "async": {"algorithm": {"name": "async-sgd", "delay": 3, "staleness_aware": True, "schedule": "random"}},
    "async, shifted": {"algorithm": {"name": "async-sgd", "delay": 3, "shifted": 0.7}, "lr": 0.05},
    "pairs": {"algorithm": {"name": "ad-psgd", "delay": 2, "schedule": "random"}},
    "push": {"algorithm": {"name": "sgp", "graph": "random"}},
    "merge": {"algorithm": {"name": "single-merge", "at": 7}},
    "demo": {"algorithm": {"name": "demo", "k": 3, "chunk": 8}, "lr": 0.01},
    "sparseloco": {"algorithm": {"name": "sparseloco", "period": 4, "average": "senders"}, **MOMENTUM},
    "noloco": {"algorithm": {"name": "noloco", "period": 4}, **MOMENTUM},
    "snoo": {"algorithm": {"name": "snoo", "period": 4}, **MOMENTUM},
    "gpa": {"algorithm": {"name": "gpa", "mu_x": 0.9}, "optimizer": {"name": "lamb"}, "lr": 0.02},
    "tracking": {"algorithm": {"name": "gradient-tracking", "mixing": "ring(1)"}, **MOMENTUM},
    "tracking, atc": {"algorithm": {"name": "gradient-tracking", "mixing": "random-matching", "order": "atc"}},
    "d2": {"algorithm": {"name": "d2", "mixing": "ring(1)"}},
    "adaptive": {"algorithm": {"name": "dsgd-ac", "mixing": "ring(1)"}, "schedule": {"cosine": 60.0}},
    "adamw": {"algorithm": RING, "optimizer": {"name": "adamw", "betas": [0.8, 0.95]}, "lr": 0.02},
    "groups": {
        "algorithm": RING, "lr": 0.02,
        "optimizer": {"name": "adamw", "groups": {"matrix": {"name": "muon"}, "*.bias": {"weight_decay": 0.0}}}},
    "norms, monitored": {"algorithm": RING, "model": NORM, "monitor": {"sharpness": 10, "samples": 100, "k": 1}},
    "norms, matching, atc, dropout": {"algorithm": PAIRS | {"order": "atc"}, "model": DROPOUT, "evaluate": STATISTICS},
    "norms, microbatches, dropout": {"accumulate": 2, "model": DROPOUT, "evaluate": STATISTICS, **MOMENTUM},
    "norms, sampled g, float32": {
        "dtype": "float32", "model": NORM, "evaluate": STATISTICS, "decompose": {"every": 5, "samples": 192}},
    # Fewer samples than processes.
    "monitored": {"algorithm": {"name": "ssgd"}, "monitor": {"sharpness": 5, "samples": 2, "k": 1}},
    "instruments": {
        "algorithm": RING, "optimizer": {"name": "torch:RMSprop"}, "lr": 0.01,
        "monitor": {
            "instruments": sorted({*registry.instruments.names()} - {"generalized-sharpness"}),  # of steepest
            "every": 6, "draws": 3, "samples": 90, "rho": 0.05}},
    "ring, parts": {"algorithm": RING, "data": BASE["data"] | {"split": "dirichlet(0.3)"}},
    "norms, parts": {"algorithm": RING, "model": NORM, "data": BASE["data"] | {"split": "labels(2)"}},
    "ring, parts, sampled g": {
        "algorithm": RING, "data": BASE["data"] | {"split": "labels(2)"}, "decompose": {"every": 5, "samples": 64}},
    # One learner in a process of two: its row is the process's whole sum.
    "three": {"algorithm": {"name": "ssgd"}, "learners": 3, "batch": 39},
}  # fmt: skip
SINGLE = ("full, atc", "ring")  # those tried in float32, too
# Those tried in four processes only, by make test-all, since each has a like that is tried in two.
FOUR = (
    "nodes, momentum", "async", "star", "diloco", "adaptive", "ssgd, lamb", "ring, float32", "monitored",
    "instruments", "norms, matching, atc, dropout", "norms, microbatches, dropout", "norms, sampled g, float32",
)  # fmt: skip
# What tests/test_conformance.py does not resume.
RESUMED = (
    "norms, microbatches, dropout", "norms, sampled g, float32", "groups", "norms, parts",
    "norms, matching, atc, dropout",
)  # fmt: skip


def recipes() -> dict[str, recipe.Recipe]:
    found = {name: recipe.from_values(BASE | changes) for name, changes in CASES.items()}
    for name in SINGLE:
        found[f"{name}, float32"] = recipe.from_values(BASE | CASES[name] | {"dtype": "float32"})
    return found


def train_all(group: Group | None, chosen: dict[str, recipe.Recipe]) -> dict[str, tuple[slice, Checkpoint]]:
    """This process's learners, and the end of each run; in the group's processes, or in one."""
    comm.PIECE = 1000  # so that these small networks are exchanged in several pieces
    trainers = {name: Trainer(one, group=group) for name, one in chosen.items()}
    return {name: (trainer.comm.local, trainer.run()) for name, trainer in trainers.items()}


def in_processes(
    size: int, chosen: dict[str, recipe.Recipe]
) -> Iterator[tuple[str, Checkpoint, Checkpoint, slice]]:
    """Of each run and rank: name, the end there, the end in one process, and the learners of the rank."""
    ranks, alone = together(size, train_all, chosen), train_all(None, chosen)
    for found in ranks:
        assert isinstance(found, dict), found
        for name, (own, part) in found.items():
            yield name, part, alone[name][1], own


def near_tensors(mine: Mapping[str, Tensor], others: Mapping[str, Tensor], near: float = 0.0) -> None:
    assert {*mine} == {*others}
    for name in mine:
        torch.testing.assert_close(mine[name], others[name], rtol=near, atol=near, msg=name)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_processes_gives_the_trajectory_of_one(size: int, trained: Path) -> None:
    started = {"algorithm": RING, "init": {"checkpoint": str(trained / "last.h5")}}
    chosen = {"init": recipe.from_values(BASE | started)} | {
        name: one
        for name, one in recipes().items()
        if size <= one.learners and not (size == 2 and name in FOUR)
    }
    for name, part, whole, own in in_processes(size, chosen):
        near = 1e-5 if name.endswith("float32") else 1e-12
        torch.testing.assert_close(part.weights, whole.weights[own], rtol=near, atol=near, msg=name)
        near_tensors(part.buffers, {key: rows[own] for key, rows in whole.buffers.items()}, 100 * near)
        near_tensors(part.mean_buffers, whole.mean_buffers, 100 * near)
        for column, expected in whole.history.items():
            values = part.history[column]
            if column in ("wall_s", "samples_per_s", "wait_s"):
                assert np.isfinite(values).all()
                continue
            if column == "consensus":  # needs w_a, so it is measured where that is due
                step, one = whole.history["step"], chosen[name]
                due = (
                    (step % one.decompose.every == 0) | (step % one.evaluate.every == 0) | (step == one.steps)
                )
                np.testing.assert_array_equal(np.isfinite(values), due)
                expected = np.where(due, expected, np.nan)
            # What vanishes but for rounding is small against the noise of a step, or the weights.
            floor = np.nanmax(whole.history["delta"]) if column.startswith("delta") else near
            scale = np.nanmax(np.abs(expected), initial=floor)
            rtol, atol = 1e-9 if near == 1e-12 else 1e-3, 10 * near * scale
            if column in MONITORED or column not in UNITS:  # found by iteration
                rtol, atol = 1e-6, 1e-9
            np.testing.assert_allclose(values, expected, rtol, atol, err_msg=f"{name}: {column}")


def test_a_small_step_of_processes_has_the_displacement_of_one() -> None:
    small = {"algorithm": RING, "dtype": "float32", "lr": 1e-6, "steps": 1, "decompose": {"every": 1}}
    for _, part, whole, _ in in_processes(2, {"small": recipe.from_values(BASE | small)}):
        for column in ("alpha_e", "delta"):  # a difference of rounded means has errors of 1%
            np.testing.assert_allclose(part.history[column], whole.history[column], 1e-5, err_msg=column)


@pytest.mark.parametrize("name", slow_but(RESUMED[:3], RESUMED))
def test_a_run_from_each_checkpoint_has_the_bits_of_an_unbroken_one(name: str, tmp_path: Path) -> None:
    shorter = {"steps": 12, "checkpoint": {"every": 4}, "learners": 3, "batch": 36}
    run = recipe.from_values(BASE | CASES[name] | shorter)
    whole = Trainer(run, hooks=Hooks(save=lambda state: state.save(tmp_path / f"{state.step}.h5"))).run()
    for step in (0, 4, 8):
        torch.manual_seed(step)  # what the process drew before is nothing to a run
        rest = Trainer(run, checkpoint=Checkpoint.load(tmp_path / f"{step}.h5")).run()
        same_bits(whole, rest)
        near_tensors(whole.mean_buffers, rest.mean_buffers)
    if "sampled" not in name:  # where g is an estimate, with an error
        assert_identity(whole.history)


def test_ssgd_in_processes_resumes_to_the_bit(tmp_path: Path) -> None:
    shorter = {"steps": 12, "checkpoint": {"every": 4}, "learners": 3, "batch": 36}
    settings = CASES["ssgd, nesterov"] | shorter
    for end, again in together(2, run_and_resume, str(tmp_path / "a"), settings, 8, settings):
        same_bits(end, again)


DIVERGING: dict[str, dict[str, Any]] = {
    "bound, mixing": {"algorithm": RING, "lr": 30.0, "diverge": {"loss": 5.0}},
    "bound, shared": {"algorithm": {"name": "ssgd"}, "lr": 30.0, "diverge": {"loss": 5.0}},
    "no finite state, momentum": {
        "algorithm": RING, "optimizer": {"name": "sgd", "momentum": 0.5},
        "model": {"name": "mlp", "widths": [6, 8, 3]}, "lr": 1e6, "dtype": "float32",
        "diverge": {"loss": 1e300, "consensus": 1e300}},
    "first step": {"algorithm": {"name": "ssgd"}, "lr": 1e300},
}  # fmt: skip


def test_a_run_over_processes_diverges_as_in_one() -> None:
    """Each hears of the others' losses a step late, and goes back to where one process stops at once."""
    base = BASE | {"steps": 20, "decompose": {"every": 5}}
    chosen = {name: recipe.from_values(base | changes) for name, changes in DIVERGING.items()}
    for name, part, whole, own in in_processes(2, chosen):
        assert whole.diverged
        assert whole.diverged_at % 5  # where all losses are waited for anyway
        for field in ("diverged", "diverged_at", "step"):
            assert getattr(part, field) == getattr(whole, field), name
        near = 1e-12 if part.weights.dtype == torch.float64 else 1e-4
        for key, value in {"weights": whole.weights, **whole.optimizer}.items():
            mine = part.weights if key == "weights" else part.optimizer[key]
            size = float(value.abs().max())
            torch.testing.assert_close(mine, value[own], rtol=near, atol=near * size, msg=name)
        np.testing.assert_allclose(part.history["loss"], whole.history["loss"], rtol=10 * near)


def of_unequal_terms(group: Group | None) -> list[float]:
    """Loss and gradient of a training set of which most of the first half is left out of the loss."""
    torch.manual_seed(0)
    model, x = landscape.models.build("mlp", widths=[4, 3]).double(), torch.randn(21, 4, dtype=torch.float64)
    y = torch.where(torch.arange(21).remainder(7) < torch.arange(21) // 3, torch.arange(21) % 3, -100)
    problem = landscape.Problem(model, torch.nn.functional.cross_entropy, (x, y))
    tokens = torch.randint(4, (20, 6))
    labels = tokens.where(torch.rand(20, 6) < torch.arange(20)[:, None] / 19, -100)
    causal = landscape.Problem(Tagger(causal=True), None, {"tokens": tokens, "labels": labels})
    comm = Comm(2, group)
    g = GradientEstimator(problem, comm).at(problem.weights, 1)
    accuracies = [comm.evaluate(p, p.weights)[1] for p in (problem, causal)]
    return [comm.evaluate(problem, problem.weights)[0], *accuracies, g.loss, g.project([g.rows[0]]).norm2]


def test_shares_of_a_training_set_weigh_by_their_terms_of_the_loss() -> None:
    for found in together(2, of_unequal_terms):
        assert found == pytest.approx(of_unequal_terms(None), rel=1e-12)


@given(st.integers(1, 9), st.integers(1, 5), st.floats(0, 1), st.integers(0, 10_000))
def test_each_row_goes_once_to_each_process_in_need(n: int, size: int, density: float, seed: int) -> None:
    """Plans of all ranks together: matching orders, nothing superfluous, and Σ_k M_jk w_k."""
    size, rng = min(size, n), np.random.default_rng(seed)
    matrix = rng.random((n, n)) * (rng.random((n, n)) < density) + np.eye(n)
    matrix /= matrix.sum(1, keepdims=True)
    bounds = _bounds(n, size)
    plans = [Plan.of(matrix, bounds, rank) for rank in range(size)]
    weights = torch.randn(n, 3, dtype=torch.float64)
    for rank, plan in enumerate(plans):
        own = slice(bounds[rank], bounds[rank + 1])
        needed = {k for j in range(*own.indices(n)) for k in range(n) if matrix[j, k]}
        assert plan.receive == sorted(needed - set(range(*own.indices(n))))
        mixed = plan.apply(weights[own], weights[plan.receive], torch.empty_like(weights[own]))
        torch.testing.assert_close(mixed, torch.from_numpy(matrix[own]) @ weights)
        for other in range(size):
            between = [k for k, peer in plan.transfers if peer == other]
            assert between == [k for k, peer in plans[other].transfers if peer == rank]
            assert len(between) == len(set(between))


def peak_of_saving(group: Group, folder: str) -> tuple[int, int]:
    """How far rank 0's memory rises while 16 learners are saved, and the size of one (bytes)."""
    comm, row = Comm(16, group), 2**19
    weights = torch.full((comm.n_local, row), float(group.rank), dtype=torch.float64)
    state = Checkpoint(weights, landscape.problem.layout.Layout(()), 0, "ssgd", "", {}, history={})
    launch._save_on_rank_0(state, Path(folder), comm, 0)  # once before: libraries take what they keep
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    launch._save_on_rank_0(state, Path(folder), comm, 0)
    return memory("VmHWM") - before, 8 * row


def memory(name: str) -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(name))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_a_checkpoint_takes_one_learner_at_a_time(tmp_path: Path) -> None:
    (rise, row), _ = together(2, peak_of_saving, str(tmp_path))
    # The other process's 8 learners never are here together; 4 MiB for modules that a first save imports.
    assert rise < 3 * row + 2**22


def run_in(group: Group, folder: str, settings: dict[str, Any], resume: bool = False) -> Checkpoint:
    return launch.launch(recipe.from_values(BASE | settings), folder, resume=resume, group=group)


LONG = CASES["ring, atc, momentum"] | {"steps": 800, "checkpoint": {"every": 20}}


def command_for(folder: Path, *options: str) -> tuple[object, ...]:
    """The words of a run over two processes that takes some seconds."""
    path = folder.with_suffix(".toml")
    path.write_text(recipe.from_values(BASE | LONG).to_toml())
    return "train", path, "--nproc", "2", "-o", folder, *options


@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_a_line_and_a_restart_loses_nothing(tmp_path: Path) -> None:
    for part in together(2, run_in, str(tmp_path / "whole"), LONG):
        assert isinstance(part, Checkpoint), part
    folder = tmp_path / "killed"
    with running(*command_for(folder)) as run:
        wait_for((folder / "step-0000020.h5").exists)
        pids = [*filter(booted, children_of(run.pid))]
        os.kill(pids[1], signal.SIGKILL)
        _, err = run.communicate(timeout=400)
    assert run.returncode == 1
    last = [line for line in err.splitlines() if line.startswith("landscape:")]
    assert last == err.splitlines()[-1:]
    assert "rank 1 of 2 was killed by SIGKILL; a resumed run continues from" in last[0]
    wait_for(lambda: not any(map(lives, pids)))
    step = landscape.load(folder / "last.h5").step
    assert 20 <= step < 800
    # Again, the other rank, and with a restart: to the bits of the run that nobody stopped.
    with running(*command_for(folder, "--resume", "--max-restarts", "1")) as run:
        wait_for((folder / f"step-{step + 20:07d}.h5").exists)
        rank_0, _ = filter(booted, children_of(run.pid))  # another child examines the checkpoint
        os.kill(rank_0, signal.SIGKILL)
        out, err = run.communicate(timeout=400)
    assert (run.returncode, out.splitlines()[-1:]) == (0, [f"{folder}/last.h5"]), err
    assert "restart 1: from step" in err
    assert "rank 0 of 2 was killed by SIGKILL" in (folder / "logs" / "launcher.log").read_text()
    same_bits(landscape.load(folder / "last.h5"), landscape.load(tmp_path / "whole" / "last.h5"))
    # Another number of processes goes on, too, along the same trajectory.
    (tmp_path / "three").mkdir()
    for path in folder.glob("step-*.h5"):  # each holds a part of the history
        if path.name <= "step-0000740.h5":
            shutil.copy(path, tmp_path / "three")
    shutil.copy(folder / "step-0000740.h5", tmp_path / "three" / "last.h5")
    for part in together(3, run_in, str(tmp_path / "three"), LONG, True):
        assert isinstance(part, Checkpoint), part
    end = landscape.load(tmp_path / "three" / "last.h5")
    torch.testing.assert_close(end.weights, landscape.load(folder / "last.h5").weights, rtol=1e-9, atol=1e-9)


def lose_one(group: Group, folder: str, settings: dict[str, Any], lost: int, how: int) -> str:
    process_group.LOST_AFTER = 4.0  # a busy machine may keep a living rank from its signs for seconds
    compute = Trainer._compute_gradients

    def last(self: Trainer, *arguments: Any) -> Any:
        if group.rank == lost and group.step >= 10:  # a worker may leave steps out
            os.kill(os.getpid(), how)
        return compute(self, *arguments)

    Trainer._compute_gradients = last  # type: ignore[method-assign]
    try:
        run_in(group, folder, settings)
    except LostProcessError as error:
        return str(error) if group.report(str(error)) else "told already"
    return "not lost"


def run_and_resume(
    group: Group, folder: str, settings: dict[str, Any], step: int, longer: dict[str, Any]
) -> tuple[Checkpoint, Checkpoint]:
    """The end of a run, and of a copy of it that goes on from ``step`` with the settings ``longer``."""
    end = run_in(group, folder, settings)
    if group.rank == 0:
        shutil.copytree(folder, f"{folder}-again")
        shutil.copy(f"{folder}/step-{step:07d}.h5", f"{folder}-again/last.h5")
    return end, run_in(group, f"{folder}-again", longer, resume=True)


def nothing(group: Group) -> None:
    pass


def disagree(group: Group) -> list[str]:
    """What is said of another setting, and of another program."""
    said = []
    for code in (False, True):
        if code:
            process_group.code_fingerprint = lambda: f"of {group.rank}"
        with pytest.raises(OperationError) as caught:
            group.agree({"lr": "0.1" if group.rank else "0.2"})
        said.append(str(caught.value))
    return said


def resume_late(group: Group, folder: str, steps: int) -> int:
    """The last step of a run of ``folder``; until rank 0 has its lock, another command goes on with it."""

    class Late(files.Lock):
        def acquire(self) -> None:
            time.sleep(0.5)
            shutil.copy(f"{folder}/step-0000004.h5", f"{folder}/last.h5")
            super().acquire()

    with unittest.mock.patch.object(launch, "Lock", Late):
        chosen = recipe.from_values(BASE | SHORT | {"steps": steps})
        return launch.launch(chosen, folder, resume=True, group=group).step


SHORT = {"algorithm": RING, "steps": 4, "checkpoint": {"every": 2}}


def test_all_ranks_go_on_from_the_checkpoint_that_is_there_when_the_folder_is_theirs(tmp_path: Path) -> None:
    launch.launch(recipe.from_values(BASE | SHORT), tmp_path)
    shutil.copy(tmp_path / "step-0000002.h5", tmp_path / "last.h5")
    assert together(2, resume_late, str(tmp_path), 6) == [6, 6]


def test_what_keeps_processes_from_meeting_is_said_in_a_line() -> None:
    wrong = together(2, nothing, environment={1: {"WORLD_SIZE": "3"}}, timeout=2.0)
    assert all(
        isinstance(error, OperationError) for error in wrong
    )  # rank 1 may only see that rank 0 has gone
    assert str(wrong[0]) == "WORLD_SIZE: 2 on rank 0, but 3 on rank 1"
    for setting, program in together(2, disagree):
        assert "lr: 0.1 on rank 1, but 0.2 on rank 0" in setting
        assert "(of 1) on rank 1, but" in program


def test_a_process_alone_says_what_it_waits_for() -> None:
    port = str(free_port())
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        used = str(taken.getsockname()[1])
        for variables, words in (
            ({"WORLD_SIZE": "2", "MASTER_PORT": port}, "rank 1 of 2 did not come within 1 s"),
            (
                {"WORLD_SIZE": "2", "MASTER_PORT": port, "RANK": "1"},
                f"rank 1: rank 0 does not answer at 127.0.0.1:{port}",
            ),
            (
                {"WORLD_SIZE": "2", "MASTER_PORT": used, "RANK": "1"},  # what listens there is no store
                f"rank 1: rank 0 does not answer at 127.0.0.1:{used}",
            ),
        ):
            (error,) = together(1, nothing, environment={0: variables}, timeout=1.0)
            assert str(error).startswith(words)
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "1", "RANK": "0"}
        with unittest.mock.patch.dict(os.environ, alone | {"MASTER_PORT": used}):
            assert Group(torch.device("cpu"), 1.0).size == 1  # it reads the environment only
        for variables, words in (
            ({"MASTER_PORT": used}, f"MASTER_PORT: {used} fails on 127.0.0.1"),
            ({"RANK": "1"}, "RANK: 1 is not allowed, WORLD_SIZE is 1"),
            ({"MASTER_ADDR": ""}, "MASTER_ADDR: missing"),
            ({"WORLD_SIZE": "²"}, "WORLD_SIZE: '²' is not allowed, it must be a whole number ≥ 1"),
            ({"RANK": "-1"}, "RANK: '-1' is not allowed"),
            ({"MASTER_PORT": "9" * 5000}, "MASTER_PORT: '9"),
        ):
            with (
                unittest.mock.patch.dict(os.environ, alone | variables),
                pytest.raises(LandscapeError) as caught,
            ):
                Group.join(torch.device("cpu"), 1.0)
            assert str(caught.value).startswith(words)


MEASURED: dict[str, Any] = RECIPE | {
    "learners": 1, "batch": 20, "lr": 0.1, "steps": 60, "data": RECIPE["data"] | {"samples": 203},
    "algorithm": {"name": "async-sgd", "delay": 0, "schedule": "measured"},
    "decompose": {"every": 5}, "evaluate": {"every": 20}, "checkpoint": {"every": 20},
}  # fmt: skip


def measured(delay: int, **changes: Any) -> dict[str, Any]:
    algorithm = MEASURED["algorithm"] | {"delay": delay} | changes.pop("algorithm", {})
    return MEASURED | changes | {"algorithm": algorithm}


@pytest.mark.parametrize(
    ("kind", "lost", "how"),
    [
        ("dpsgd", 1, signal.SIGKILL),
        pytest.param("dpsgd", 1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("dpsgd", 0, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("measured", 2, signal.SIGKILL, marks=pytest.mark.slow),  # a worker
    ],
)
def test_the_others_name_the_lost_rank(kind: str, lost: int, how: signal.Signals, tmp_path: Path) -> None:
    """Rank 0 has the store: without it, each of the others ends by itself, within the timeout and 15 s."""
    settings = LONG if kind == "dpsgd" else measured(1, steps=10**7, decompose={"every": 0})
    found = together(
        3, lose_one, str(tmp_path), settings, lost, int(how), timeout=16.0, deadline=180.0, lost=(lost,)
    )
    lines = {line for line in found if isinstance(line, str) and line != "told already"}
    if lost:
        (line,) = lines
        assert line.startswith(f"rank {lost} of 3 lost, no sign of life for 4 s (")
        assert line.endswith(f"; a resumed run continues from {tmp_path}/last.h5")
    else:
        assert all(line.startswith("rank 0 of 3 ") for line in lines)
    assert "not lost" not in found  # None: ended by its own watch
    landscape.load(tmp_path / "last.h5")


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_one_worker_is_plain_sgd_and_resumes_to_the_bit(momentum: float, tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "momentum": momentum}
    values = MEASURED | {"algorithm": {"name": "ssgd"}, "optimizer": optimizer}
    plain = Trainer(recipe.from_values(values)).run()
    settings = measured(0, optimizer=optimizer)
    found = together(2, run_and_resume, str(tmp_path / "a"), settings, 20, settings)
    assert all(torch.equal(each.weights, plain.weights) for ends in found for each in ends), found
    end = found[0][0]
    for column in ("loss", "alpha_e", "delta", "test_loss", "train_loss"):
        np.testing.assert_allclose(end.history[column], plain.history[column], rtol=1e-9, err_msg=column)
    assert (end.history["delay"] == 0).all()
    assert "delay" not in plain.history  # a column of the asynchronous rules
    # Eq. 4's terms need the minibatch, which the worker has.
    assert np.isnan(end.history["delta_s"]).all()


@pytest.mark.parametrize("form", slow_but(["shifted and aware"], ["off", "ordinary", "shifted and aware"]))
def test_workers_deliver_at_their_own_pace(form: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": {"name": "sgd", "momentum": 0.5}} if form == "ordinary" else {}
    shifted = {"shifted": 0.5, "staleness_aware": True} if form == "shifted and aware" else {}
    settings, more = (measured(2, algorithm=shifted, **changes | {"steps": steps}) for steps in (60, 80))
    parts = together(4, run_and_resume, str(tmp_path / "run"), settings, 60, more)
    assert isinstance(parts[0], tuple), parts
    end, longer = parts[0]
    assert all(torch.equal(part.weights, end.weights) for part, _ in parts)
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
    assert longer.step == 80
    np.testing.assert_array_equal(longer.history["delay"][:60], delay)


def test_what_does_not_fit_is_said_in_a_line(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(recipe.from_values(measured(2)).to_toml())
    code, _, err = command("train", path, "-o", tmp_path / "run", "-q")
    assert (code, err.strip()) == (
        2,
        "landscape: --nproc: 1 is not allowed, it must be 4 with algorithm.schedule 'measured': a server and "
        "delay + 1 workers",
    )
    with pytest.raises(
        InputError, match="learners: 2 is not allowed, it must be 1 with algorithm.schedule 'measured'"
    ):
        recipe.from_values(measured(2, learners=2))
    with pytest.raises(InputError, match="'measured' needs several processes; give train"):
        Trainer(recipe.from_values(measured(2))).run()
    assert recipe.from_values(measured(2)).stability_limit() is None
    assert recipe.from_values(measured(0)).stability_limit() == 2
    assert (
        launch.trainer_class(recipe.from_values(MEASURED | {"algorithm": {"name": "ssgd"}}), None) is Trainer
    )
    (refused, _) = together(2, norms, lost=(1,))
    assert isinstance(refused, InputError)
    assert "has BatchNorm" in str(refused)


def norms(group: Group) -> None:
    values = measured(0, model={"name": "tests.nets:norm_net"})
    chosen = recipe.from_values(values)
    assert launch.trainer_class(chosen, group) is (Worker if group.rank else Server)
    launch.trainer_class(chosen, group)(chosen, group=group)
