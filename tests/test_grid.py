"""Grids that are saved as they go, gone on with, refined, and split over processes."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import landscape
from landscape import Problem, Surface
from landscape.evaluation import evaluate, grid
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests import problems
from tests.conftest import Command, wait_for
from tests.groups import Group, together
from tests.test_cli import one_line


def on_from(previous: Surface) -> landscape.Execution:
    return landscape.Execution(previous=previous)


@pytest.mark.parametrize("name", ["saddle", "mlp tanh", "conv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_surface_has_the_bits_of_a_whole(name: str, dtype: torch.dtype, often: None) -> None:
    own = problems.ALL[name]()
    problem, saved = Problem(own.model, own.criterion, own.resident, dtype=dtype), list[Surface]()
    plane = landscape.random_plane(problem)
    whole = landscape.contour(problem, plane, (5, 3), execution=landscape.Execution(save=saved.append))
    counts = [int(s.done.sum()) for s in saved]
    assert len(counts) >= 3
    assert counts == sorted(set(counts))
    for s in saved:
        assert np.array_equal(np.isnan(s.loss), ~s.done)
        again = landscape.contour(problem, plane, (5, 3), execution=on_from(s))
        np.testing.assert_array_equal(again.loss, whole.loss)
        np.testing.assert_array_equal(again.accuracy, whole.accuracy)
        assert again.done.all()
        assert again.method == whole.method


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_of_a_point_do_not_depend_on_the_other_points_of_a_call(dtype: torch.dtype) -> None:
    x, y = torch.randn(2200, 64), torch.randint(10, (2200,))
    model = landscape.models.build("mlp", widths=[64, 50, 33, 10])
    problem = Problem(model, nn.functional.cross_entropy, (x, y), dtype=dtype)
    plane, points = landscape.random_plane(problem), torch.randn(25, 2, dtype=torch.float64)
    losses = evaluate.evaluator(problem, plane.center, plane.directions, 25, method="batched")
    for count in (1, 2, 3, 7, 11):
        parts = torch.cat([losses(part)["loss"] for part in points.split(count)])
        assert torch.equal(parts, losses(points)["loss"])


def test_refining_computes_only_new_points() -> None:
    problem = problems.mlp()
    plane = landscape.random_plane(problem)
    coarse = landscape.contour(problem, plane, (5, 4))
    assert landscape.contour(problem, plane, (5, 4), execution=on_from(coarse)) is coarse
    coarse.loss[0, 0] += 1e-9  # too little to be taken for another loss, and seen if it is computed again
    for size, span, reused in (((9, 7), 0.1, 20), ((10, 8), 0.1, 4), ((9, 13), 0.2, 20)):
        fine = landscape.contour(problem, plane, size, span, execution=on_from(coarse))
        assert grid.reused_points(coarse, fine) == reused
        np.testing.assert_allclose(fine.loss, landscape.contour(problem, plane, size, span).loss, atol=1e-8)
        if size == (9, 7):
            np.testing.assert_array_equal(fine.loss[::2, ::2], coarse.loss)
            back = landscape.contour(problem, plane, (5, 4), execution=on_from(fine))  # nothing is computed
            np.testing.assert_array_equal(back.loss, coarse.loss)


@given(st.integers(2, 40), st.integers(2, 40), st.floats(1e-6, 1e6))
def test_coordinates_coincide_where_fractions_do(k: int, m: int, span: float) -> None:
    a, b = np.linspace(-span, span, k), np.linspace(-span, span, m)
    mine, theirs = grid.coincide(a, b)
    expected = [(i, j) for i in range(k) for j in range(m) if i * (m - 1) == j * (k - 1)]
    assert list(zip(mine.tolist(), theirs.tolist(), strict=True)) == expected


def test_what_is_of_something_else_is_refused_with_the_reason() -> None:
    problem = problems.conv()
    x, y = problem.tensors  # type: ignore[misc]
    plane, loss = landscape.random_plane(problem), problem.criterion
    usual: dict[str, Any] = {"split": "test", "source_sha256": "a"}
    before = landscape.contour(problem, plane, (2, 2), **usual)
    moved = Problem(problem.model, loss, (x, y), weights=problem.weights + 1e-6)
    single = Problem(problem.model, loss, (x, y), dtype=torch.float32)
    touched = x.clone()
    touched[17, 0, 0, 0] += 1e-3

    def model(loss: Any = loss, data: Any = (x, y), **options: Any) -> dict[str, Any]:
        return {"problem": Problem(problem.model, loss, data, **options)}

    def directions(d: torch.Tensor, center: torch.Tensor = plane.center) -> landscape.Plane:
        return landscape.Plane(center, d, "random", "none", 0)

    for words, other in (
        ("seed is 0 and not 1", {"plane": landscape.random_plane(problem, seed=1)}),
        ("norm is 'none' and not 'layer'", {"plane": landscape.random_plane(problem, norm="layer")}),
        ("split is 'test' and not 'train'", {"split": "train"}),
        ("source_sha256", {"source_sha256": "b"}),
        ("bn is 'center' and not 'train'", {"bn": "train", "bn_samples": 5}),
        ("autocast is '' and not 'bfloat16'", {"autocast": "bfloat16"}),
        ("method is", {"method": "pointwise" if before.method == "folded" else "folded"}),
        ("center is another", {"problem": moved, "plane": directions(plane.directions, moved.weights)}),
        ("directions is another", {"plane": directions(plane.directions.flip(0))}),
        ("dtype is", {"problem": single, "plane": landscape.random_plane(single)}),
        ("samples is", model(data=(x[1:], y[1:]))),
        ("other data", model(data=(x, 1 - y))),
        ("other data", model(data=(touched, y))),
        ("loss", model(nn.CrossEntropyLoss(label_smoothing=0.1))),
        ("loss", model(lambda o, t: loss(o, t))),
        ("penalty", model(weight_decay=1e-3)),
    ):
        given: dict[str, Any] = {"problem": problem, "plane": plane, **usual, **other}
        with pytest.raises(grid.MismatchError, match=words):
            landscape.contour(**given, grid=(2, 2), execution=on_from(before))


def test_portions_take_ten_seconds_and_saving_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls, saves = [0.0], list[int](), list[float]()
    monkeypatch.setattr(grid.time, "perf_counter", lambda: now[0])

    def compute(points: torch.Tensor, progress: object) -> dict[str, torch.Tensor]:
        calls.append(len(points))
        now[0] += 0.1 * len(points)
        return {"v": points[:, 0]}

    def save() -> None:
        saves.append(now[0])
        now[0] += 3.0

    points = torch.arange(2000.0, dtype=torch.float64).view(1000, 2)
    done, v = np.zeros(1000, bool), np.zeros(1000)
    grid.compute_missing(points, done, {"v": v}, compute, grid.Dispatch(min_per_process=8, save=save))
    assert calls == [8, 100, 300, 300, 292]  # 10 s; then 30 s, ten times what a save takes
    assert len(saves) == 4  # the whole result is the caller's to save
    np.testing.assert_array_equal(v, points[:, 0])
    assert done.all()


def test_what_was_done_is_kept_when_a_portion_fails() -> None:
    done, v, saved = np.zeros(10, bool), np.full(10, np.nan), list[int]()

    def compute(points: torch.Tensor, progress: object) -> dict[str, torch.Tensor]:
        if points[0, 0] > 0:
            raise MemoryError
        return {"v": points[:, 1]}

    points = torch.tensor([[0.0, 1.0]] * 4 + [[1.0, 1.0]] * 6)
    dispatch = grid.Dispatch(4, save=lambda: saved.append(int(done.sum())))
    with pytest.raises(MemoryError):
        grid.compute_missing(points, done, {"v": v}, compute, dispatch)
    assert saved == [4]
    assert np.flatnonzero(done).tolist() == [0, 1, 2, 3]


def member(group: Group, ending: str) -> tuple[Any, ...]:
    """One of two processes that compute one grid; the second may fail, in words or without."""
    done, v, saved, said = np.zeros(20, bool), np.full(20, np.nan), list[int](), ""
    if group.rank == 0:
        done[3], v[3] = True, 7.0

    def compute(points: torch.Tensor, progress: object) -> dict[str, torch.Tensor]:
        assert len(points) in (2, 1)
        if group.rank == 1 and float(points.max()) > 5 and ending == "words":
            raise ValueError("too hot")
        if group.rank == 1 and float(points.max()) > 5 and ending == "silence":
            os._exit(3)
        return {"v": 2 * points[:, 0]}

    grid.SAVE_SECONDS = grid.SAVE_RATIO = 0.0
    portions = grid.Dispatch(2, save=lambda: saved.append(int(done.sum())), group=dist.group.WORLD)
    try:
        grid.compute_missing(torch.arange(20.0).view(20, 1), done, {"v": v}, compute, portions)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return done, v, saved, said


@pytest.mark.parametrize("ending", [pytest.param("whole", marks=pytest.mark.slow), "words", "silence"])
def test_processes_share_a_grid_and_a_failure_names_its_rank(ending: str) -> None:
    first, second = together(2, member, ending, lost=(1,) if ending == "silence" else ())
    (done, v, saved, said), expected = first, 2 * np.arange(20.0)
    expected[3] = 7.0  # the first process had it
    np.testing.assert_array_equal(v[done], expected[done])
    if ending == "whole":
        assert done.all()
        np.testing.assert_array_equal(second[1], expected)
        assert [len(saved), len(second[2])] == [4, 0]  # 19 points, 4 at a time; the first one saves
        assert said == second[3] == ""
    elif ending == "words":
        assert said == f"OperationError: rank 1 failed (ValueError: too hot); {grid.RESUMABLE}"
        assert second[3] == "ValueError: too hot"
        assert saved[-1] == done.sum() == 7  # of the second portion, what the first one found
    else:
        assert said == f"LostError: {grid.LostError.words}; {grid.RESUMABLE}"
        assert not done.all()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a short run on the bundled digits."""
    folder = tmp_path_factory.mktemp("run")
    small = ["steps=20", "checkpoint.every=10", "model.widths=[64, 16, 10]"]
    launch.launch(recipe.read("digits-dpsgd", small), folder)
    return folder


@pytest.mark.filterwarnings("default:.* cannot be resumed")
def test_a_file_of_another_kind_is_replaced_with_a_word(run: Path, tmp_path: Path, command: Command) -> None:
    out, last, early = tmp_path / "c.h5", run / "last.h5", run / "step-0000010.h5"
    wanted = ("contour", "--grid", "3", "-o", out)
    assert command(*wanted, last)[0] == 0
    for words, reason in (
        ((last, "--seed", "1"), "its seed is 0 and not 1"),
        ((early,), "it is of other checkpoints"),
    ):
        before = out.read_bytes()
        one_line(command(*wanted, *words), 1, "c.h5: holds another result", reason, "--force")
        assert out.read_bytes() == before
        code, printed, err = command(*wanted, *words, "--force")
        assert (code, printed.endswith(f"{out}\n"), f"cannot be resumed, {reason}" in err) == (0, True, True)
    for files in ((last, early), (early, last)):  # what is there is not computed again, in any order
        code, printed, err = command(*wanted, *files)
        assert (code, "9 of 9 points were in the file" in printed + err) == (0, True)
        steps = [20 if file == last else 10 for file in files]
        assert [s.label for s in landscape.load(out)] == [f"dpsgd, seed 0, step {step}" for step in steps]


def test_processes_that_are_not_allowed_are_one_line(
    run: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "c.h5"
    assert command("contour", run / "last.h5", "--nproc", "0")[2].startswith("landscape: --nproc: 0 is not")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = command("contour", run / "last.h5", "-o", out, "--nproc", "2")
    assert (code, err) == (2, "landscape: --nproc: 2 is not allowed, torchrun started 4 processes\n")


@pytest.mark.slow
def test_a_killed_worker_is_named_and_what_is_done_is_kept(run: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/task").exists():
        pytest.skip("finds the worker in /proc, which only Linux has")
    out = tmp_path / "c.h5"
    wanted = ("contour", run / "last.h5", "--grid", "400", "--method", "batched", "-o", out)
    process = subprocess.Popen(
        [sys.executable, "-m", "landscape", *map(str, wanted), "--nproc", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for(lambda: out.exists() or process.poll() is not None, 60)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    printed, err = process.communicate(timeout=120)
    assert (process.returncode, printed) == (1, "")
    assert err == f"landscape: rank 2 of 3 was killed by SIGKILL; {grid.RESUMABLE}\n"
    assert 0 < landscape.load(out).done.sum() < 400 * 400


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_hessian_grid_is_the_same_in_portions_and_over_processes(
    processes: int, run: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("hessian-grid", run / "last.h5", "--grid", "6x3", "-o")
    assert command(*wanted, tmp_path / "1.h5")[0] == 0
    monkeypatch.setattr(grid, "SAVE_SECONDS", 0.0)
    assert command(*wanted, tmp_path / "2.h5", "--nproc", processes)[0] == 0
    first = landscape.load(tmp_path / "1.h5")
    assert bool(first.done.all())
    again = landscape.load(tmp_path / "2.h5")
    for name in ("lambda_min", "lambda_max", "products"):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))


def test_a_hessian_grid_has_the_planes_of_a_contour(run: Path, tmp_path: Path, command: Command) -> None:
    wanted = ("hessian-grid", run / "last.h5", "--grid", "1", "--plane", "eigen", "-o", tmp_path / "h.h5")
    assert command(*wanted)[0] == 0
    assert landscape.load(tmp_path / "h.h5").kind == "eigen"
    assert "complete already" in command(*wanted)[2]
    one_line(command(*wanted[:-1], tmp_path / "h.h5", "--plane", "learners"), 1, "its kind is 'eigen'")
    problem = problems.conv()
    plane = landscape.random_plane(problem)
    one = landscape.hessian_grid(problem, plane, grid=1, bn="train", bn_samples=10)
    other = landscape.hessian_grid(problem.with_batchnorm("train", 10), plane, grid=1)
    assert (one.bn, one.lambda_max.item()) == ("train", other.lambda_max.item())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=2), st.integers(0, 5))
def test_coarse_grids_come_first(shape: list[int], k: int) -> None:
    """The first points are those of every 2ᵏ-th row and column, for every k."""
    order = grid.coarse_first(shape)
    assert sorted(order) == list(range(math.prod(shape)))
    coarse = np.arange(math.prod(shape)).reshape(shape)[(slice(None, None, 2**k),) * len(shape)]
    assert sorted(order[: coarse.size]) == coarse.ravel().tolist()


@pytest.mark.parametrize(("known", "step"), [(1, 0), (6, 4), (19, 4), (20, 2), (62, 2), (63, 1)])
def test_an_unfinished_surface_shows_its_coarse_part(known: int, step: int) -> None:
    problem = problems.mlp()
    whole = landscape.contour(problem, landscape.random_plane(problem), grid=(9, 7))
    done = np.zeros(63, bool)
    done[grid.coarse_first((7, 9))[:known]] = True
    done = done.reshape(7, 9)
    part = dataclasses.replace(whole, done=done, loss=np.where(done, whole.loss, np.nan))
    seen, every = part.nested(), slice(None, None, step or 1)
    np.testing.assert_array_equal(seen.loss, (whole if step else part).loss[every, every])
    np.testing.assert_array_equal(seen.x, whole.x[every])
    assert landscape.draw(part).axes if step else seen is part
