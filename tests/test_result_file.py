"""Files of results opened from Python: gone on with, locked, refused where they do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import landscape
from landscape import Execution, InputError, OperationError, Problem
from landscape.core import files
from landscape.core.errors import DataWarning
from landscape.training.recipes.recipe import read
from landscape.training.run.launch import launch
from tests import problems
from tests.conftest import Command, slow_but
from tests.examples import parabola
from tests.harm.commands import CASES


@pytest.fixture
def problem() -> Problem:
    return problems.mlp()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "surface.h5"


def test_a_computation_goes_on_with_what_the_file_has(problem: Problem, path: Path) -> None:
    plane = landscape.random_plane(problem)
    with landscape.open(path, "a") as file:
        coarse = landscape.contour(problem, plane, grid=3, into=file)
        assert (len(file), file[0] is coarse, file.resumed, file.written) == (1, True, None, True)
    with landscape.open(path, "a") as file:
        fine = landscape.contour(problem, plane, grid=5, into=file)
        assert file.resumed is not None
        assert [result is fine for result in file] == [True]
    before = path.read_bytes()
    with landscape.open(path, "a") as file:
        same = landscape.contour(problem, plane, grid=5, into=file)
        assert not file.written
    assert path.read_bytes() == before
    np.testing.assert_array_equal(same.loss, fine.loss)


def test_several_results_are_found_again_in_any_order(problem: Problem, path: Path) -> None:
    planes = [landscape.random_plane(problem, seed=seed) for seed in range(3)]
    with landscape.open(path, "w") as file:
        first = [landscape.hessian_grid(problem, plane, grid=(2, 1), into=file) for plane in planes]
    with landscape.open(path, "a") as file:
        again = [landscape.hessian_grid(problem, plane, grid=(2, 1), into=file) for plane in planes[::-1]]
        assert [result.seed for result in file] == [0, 1, 2]
    for a, b in zip(first, again[::-1], strict=True):
        np.testing.assert_array_equal(a.lambda_max, b.lambda_max)
    assert [result.seed for result in landscape.load(path)] == [0, 1, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["contour", "hessian_grid"])
def test_an_interruption_keeps_what_was_saved(
    kind: str, problem: Problem, path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("landscape.curvature.eigenvalues.MAX_POINTS", 2)
    analysis, plane = getattr(landscape, kind), landscape.random_plane(problem)

    def stop(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with landscape.open(path, "a") as file:
        with pytest.raises(KeyboardInterrupt):
            analysis(problem, plane, grid=(4, 3), into=file, progress=stop)
        begun = file[0]
        assert 0 < begun.done.sum() < 12
    assert int(landscape.load(path).done.sum()) == int(begun.done.sum())  # type: ignore[union-attr]
    with landscape.open(path, "a") as file:
        whole = analysis(problem, plane, grid=(4, 3), into=file)
        assert len(file) == 1
    unbroken = analysis(problem, plane, grid=(4, 3))
    for field in dataclasses.fields(whole):
        np.testing.assert_array_equal(getattr(whole, field.name), getattr(unbroken, field.name))


def test_what_does_not_fit_is_refused_or_replaced(problem: Problem, path: Path) -> None:
    plane, seeded = landscape.random_plane(problem), landscape.random_plane(problem, seed=1)
    with landscape.open(path, "a") as file:
        landscape.contour(problem, plane, grid=3, into=file)
    before = path.read_bytes()
    other = Problem(problem.model, lambda o, y: problem.criterion(o, y), problem.tensors or ())
    for analysis, of, at, options, words in (
        (landscape.contour, problem, seeded, {"grid": 3}, "another result, its seed is 0 and not 1"),
        (landscape.contour, other, plane, {}, "another result, its loss is"),
        (landscape.contour, problem, plane, {"grid": 3, "bn": "train"}, "its bn is 'center'"),
        (landscape.contour, problem, plane, {"grid": 2}, "9 points .* 3 × 3.* 5 would be lost; .* 5 × 5"),
        (landscape.hessian_grid, problem, plane, {"grid": 2}, "it holds a landscape.surface"),
    ):
        with landscape.open(path, "a") as file, pytest.raises(OperationError, match=words) as refusal:
            analysis(of, at, into=file, **options)  # type: ignore[operator]
        assert str(refusal.value).endswith("give replace=True or another file")
        assert path.read_bytes() == before
    with landscape.open(path, "a", replace=True) as file, pytest.warns(DataWarning) as warned:
        landscape.contour(problem, seeded, grid=2, into=file)
    line = f"{path}: cannot be resumed, its seed is 0 and not 1; computed from the start"
    assert [str(w.message) for w in warned] == [line]
    assert [s.seed for s in landscape.open(path)] == [1]


def test_results_of_other_files_stay_beside(problem: Problem, path: Path) -> None:
    plane = landscape.random_plane(problem)
    other = Problem(problem.model, problem.criterion, problem.tensors or (), weights=1.1 * problem.weights)
    for one, source in ((problem, "a" * 64), (other, "b" * 64)):
        with landscape.open(path, "a") as file:
            landscape.contour(one, landscape.random_plane(one), grid=2, source_sha256=source, into=file)
    with landscape.open(path) as file:
        assert [surface.source_sha256[0] for surface in file] == ["a", "b"]
    with landscape.open(path, "a") as file, pytest.raises(OperationError, match="its span|points|seed|bn"):
        landscape.contour(problem, plane, grid=2, bn="train", source_sha256="a" * 64, into=file)


def test_a_file_of_some_weights_only_refuses_or_drops_those_of_others(path: Path) -> None:
    of = {
        name: dataclasses.replace(parabola(), source_sha256=name, label=name) for name in ("a", "b", "a, b")
    }
    landscape.save([*of.values()], path)
    with landscape.open(path, "a") as file:
        file.only(["b", "a"])
        assert [surface.source_sha256 for surface in file] == ["a", "b", "a, b"]
        with pytest.raises(OperationError, match=r"it is of other checkpoints \(b\)"):
            file.only(["a"])
    with landscape.open(path, "a", replace=True) as file:
        with pytest.warns(DataWarning) as warned:
            file.only(["a"])
        assert len(warned) == 1
        file.keep([file[1], file[0]])
    assert [surface.label for surface in landscape.open(path)] == ["a, b", "a"]


def test_any_results_are_added_and_read(path: Path) -> None:
    surface = parabola()
    with landscape.open(path, "a") as file:
        assert len(file) == 0
        file.add(surface)
        file.add(surface.compact())
        with pytest.raises(OperationError, match="no landscape.basins is allowed"):
            file.add(landscape.basins(surface, [0.25]))
        assert len(landscape.load(path)) == 2  # type: ignore[arg-type]
    with landscape.open(path) as file:
        assert [type(result).__name__ for result in file] == ["Surface", "Surface"]
        np.testing.assert_array_equal(file[-1].loss, surface.loss)
        with pytest.raises(OperationError, match="reading only"):
            file.add(surface)
    with pytest.raises(OperationError, match="is closed"):
        file.add(surface)
    with landscape.open(path, "a") as file:
        file.keep([file[1]])
    assert len(landscape.open(path)) == 1
    before = path.read_bytes()
    with landscape.open(path, "w") as file:
        assert len(file) == 0
    assert path.read_bytes() == before  # nothing took its place
    with landscape.open(path, "w") as file:
        file.add(landscape.basins(surface, [0.25]))
    assert isinstance(landscape.load(path), landscape.Basins)


def test_what_is_no_file_of_results_is_refused(problem: Problem, path: Path) -> None:
    plane = landscape.random_plane(problem)
    with pytest.raises(InputError, match="mode: 'x' is not known"):
        landscape.open(path, "x")
    with pytest.raises(OperationError, match="no such file"):
        landscape.open(path)
    with pytest.raises(InputError, match="into: .* is not allowed, it must be a ResultFile"):
        landscape.contour(problem, plane, grid=2, into=str(path))  # type: ignore[arg-type]
    with landscape.open(path, "a") as file, pytest.raises(InputError, match="execution: previous and save"):
        landscape.contour(problem, plane, grid=2, into=file, execution=Execution(save=print))
    path.write_text("no HDF5")
    for mode in "raw":
        with pytest.raises(OperationError, match="HDF5"):
            landscape.open(path, mode)
    assert path.read_text() == "no HDF5"


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_replaced_where_the_mode_is_to_begin_anew(damage: str, path: Path) -> None:
    surface = parabola()
    surface.save(path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes(whole[:middle] if damage == "cut" else flipped)
    for mode in "ra":
        with pytest.raises(OperationError, match="damaged|not a readable"):
            landscape.open(path, mode)
    with landscape.open(path, "w") as file:
        assert len(file) == 0
        file.add(surface)
    np.testing.assert_array_equal(landscape.load(path).loss, surface.loss)  # type: ignore[union-attr]


def test_a_file_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "last.h5"
    launch(read("saddle-dpsgd", ["steps=1"]), tmp_path)
    with pytest.raises(OperationError, match=r"holds a landscape\.checkpoint, not a result"):
        landscape.open(path, "w")


def test_one_at_a_time_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is of the open file, so that a second one in this process is refused like another process's."""
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    parabola().save(path)
    with landscape.open(path, "a"):
        assert len(landscape.open(path)) == 1
        with pytest.raises(OperationError, match="in use by process"):
            landscape.open(path, "a")
    assert not list(path.parent.glob(".*"))


def test_what_the_same_settings_computed_is_not_computed_again(path: Path) -> None:
    surface, calls = parabola(), list[int]()

    def compute() -> list[landscape.Surface]:
        calls.append(1)
        return [surface, surface]

    for _ in range(2):
        with landscape.open(path, "a") as file:
            assert len(file.once({"k": 1, "names": ("a",)}, compute)) == 2
    before = path.read_bytes()
    for settings, words in (
        ({"k": 2, "names": ("a",)}, "its k is 1 and not 2"),
        ({"k": 1}, r'its names is \["a"\] and not the default'),
    ):
        with landscape.open(path, "a") as file, pytest.raises(OperationError, match=words):
            file.once(settings, compute)
    assert (len(calls), path.read_bytes()) == (1, before)
    with landscape.open(path, "a", replace=True) as file:
        file.once({"k": 2}, compute)
    with landscape.open(path, "a") as file:
        file.add(surface)  # which no settings are about any more
    with (
        landscape.open(path, "a") as file,
        pytest.raises(OperationError, match="settings that are not known"),
    ):
        file.once({"k": 2}, compute)
    assert len(calls) == 2


ONE_FILE = [name for name, words in CASES.items() if "last.h5" in str(words) and "--nproc" not in words]
QUICK = ("spectrum", "average", "connect", "compare", "line")


@pytest.mark.parametrize("name", slow_but(QUICK, [*ONE_FILE, "critical-batch"]))
def test_commands_with_a_result_are_done(name: str, trained: Path, tmp_path: Path, command: Command) -> None:
    words = [word.format(run=trained, folder=tmp_path) for word in CASES[name] if word != "-q"]
    words = [word.replace("0000005", "0000010").replace("120x80", "4") for word in words]
    code, out, err = command(*words)
    assert code == 0, err
    [path] = tmp_path.glob("*.h5")
    before = path.read_bytes(), path.stat().st_mtime_ns
    code, again, err = command(*words)
    assert (code, err.count("complete already, nothing is computed"), again.splitlines()[-1]) == (
        0, 1, out.splitlines()[-1],
    )  # fmt: skip
    option, value, wrong = ("--seed", "3", "x") if name == "critical-batch" else ("--dtype", "float64", "f64")
    code, out, err = command(*words, option, value)
    assert (code, out, err.count("\n")) == (1, "", 1), err
    assert f"its {option.lstrip('-')} is " in err.replace("its --", "its "), err
    assert f" and not {value}" in err.replace("'", ""), err
    assert "give --force or another file" in err, err
    code, out, err = command(*words, option, wrong)
    assert (code, out, option in err, str(path) in err) == (2, "", True, False), err
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    code, out, err = command(*words[:-1], tmp_path) if words[-2] == "-o" else (2, "", "\n")
    assert (code, out, err.count("\n")) == (2, "", 1), err
