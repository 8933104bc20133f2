"""The public functions against the commands of the same names, and the messages that both give."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import landscape
from landscape import InputError, OperationError, Recipe
from landscape.cli import flags_of
from landscape.cli.commands import GROUPS
from landscape.core import registry
from tests.conftest import Command
from tests.test_cli import one_line

SETTINGS = {"steps": 12, "decompose.every": 2, "algorithm.mixing": "ring(1)", "evaluate.every": 5}
WORDS = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
CLOCK = ("wall_s", "samples_per_s", "wait_s")  # columns of times


def arrays(path: Path) -> dict[str, bytes]:
    """The bytes of every array of a run's file that does not measure time."""
    found: dict[str, bytes] = {}

    def keep(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset) and name.rpartition("/")[2] not in CLOCK:
            value = np.asarray(item[()])
            found[name] = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()

    with h5py.File(path) as file:
        file.visititems(keep)
    return found


def test_a_run_is_that_of_the_command_to_the_bit(tmp_path: Path, command: Command) -> None:
    run = landscape.train("digits-dpsgd", tmp_path / "python", **SETTINGS)
    assert command("train", "digits-dpsgd", *WORDS, "-o", str(tmp_path / "command"))[0] == 0
    mine, theirs = (tmp_path / name / "last.h5" for name in ("python", "command"))
    assert arrays(mine) == arrays(theirs)
    assert len(arrays(mine)) > 20
    texts = [(tmp_path / name / "recipe.toml").read_text() for name in ("python", "command")]
    assert texts[0] == texts[1]
    again = landscape.load(mine)
    assert run.path == mine
    np.testing.assert_array_equal(run.weights, again.weights)
    assert run.problem().loss() == again.problem().loss()
    longer = landscape.train("digits-dpsgd", tmp_path / "python", resume=True, **SETTINGS | {"steps": 14})
    whole = landscape.train(Recipe.read("digits-dpsgd", **SETTINGS).replace(steps=14), tmp_path / "whole")
    np.testing.assert_array_equal(longer.weights, whole.weights)
    again = landscape.train(None, tmp_path / "whole", resume=True)
    np.testing.assert_array_equal(again.weights, whole.weights)


def test_two_processes_by_one_call(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe.read("digits-dpsgd", **SETTINGS | {"steps": 4})
    one = landscape.train(recipe, tmp_path / "one")
    two = landscape.train(recipe, tmp_path / "two", nproc=2, progress=False)
    assert capfd.readouterr() == ("", "")
    np.testing.assert_allclose(one.weights, two.weights, rtol=1e-5, atol=1e-6)
    assert {"rank-0.log", "rank-1.log"} <= {path.name for path in (tmp_path / "two" / "logs").iterdir()}
    with pytest.raises(InputError, match="^nproc: 0 is not allowed"):
        landscape.train(recipe, tmp_path / "two", nproc=0)


def test_messages_and_progress_go_where_they_are_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    shares: list[float] = []
    monkeypatch.chdir(tmp_path)
    run = landscape.train("digits-ssgd", steps=4, message=lines.append, progress=shares.append)
    assert capfd.readouterr() == ("", "")
    assert lines[0].startswith("digits-ssgd: ssgd, 5 learners")
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert run.path == Path("runs/digits-ssgd-seed0/last.h5")


def test_a_recipe_is_read_changed_and_written(tmp_path: Path) -> None:
    recipe = Recipe.read("digits-dpsgd", lr=np.float64(0.5), **{"model.widths": (64, 8, 10)})
    assert (recipe.lr, recipe.model["widths"]) == (0.5, [64, 8, 10])
    (tmp_path / "mine.toml").write_text(recipe.to_toml())
    assert Recipe.read(tmp_path / "mine.toml").to_toml() == recipe.to_toml()
    other = recipe.replace(algorithm={"name": "ssgd"}, seed=3)
    assert (other.algorithm, other.seed, recipe.seed) == ({"name": "ssgd"}, 3, 0)
    np.savetxt(tmp_path / "m.csv", np.full((5, 5), 0.2), delimiter=",")
    mixed = recipe.replace(**{"algorithm.mixing": str(tmp_path / "m.csv")})
    (tmp_path / "m.csv").unlink()  # it was read once
    assert mixed.replace(steps=3).matrices == mixed.matrices
    assert not mixed.replace(**{"algorithm.mixing": "full"}).matrices
    assert set(landscape.recipes("digits-*")) >= {"digits-dpsgd", "digits-ssgd"}
    assert len(landscape.recipes("cifar10/resnet-18-*")) > 10 > len(landscape.recipes("saddle*"))


def test_no_key_of_a_recipe_is_hidden_by_a_parameter() -> None:
    keys = {field.name for field in dataclasses.fields(Recipe)} | {"epochs"}
    for function in (landscape.train, Recipe.read, Recipe.replace):
        assert not keys & {name for name in inspect.signature(function).parameters if name != "recipe"}


def test_commands_name_options_where_functions_name_parameters(tmp_path: Path, command: Command) -> None:
    words = ["train", "digits-dpsgd", "--set", "steps=2", "-o", str(tmp_path / "run")]
    one_line(command(*words, "--resume", "--force"), 2, "--resume, --force: only one")
    one_line(command(*words, "--nproc", "0"), 2, "--nproc: 0 is not allowed")
    one_line(command("train"), 2, "RECIPE: missing")
    assert command(*words)[0] == 0
    more = [word.replace("steps=2", "steps=3") for word in words]
    one_line(command(*more), 1, "give --resume, --force or another")
    error = InputError("data_dir: x", give={"nproc": 1, "lr": ...}, otherwise="y")
    assert str(error) == "data_dir: x; give nproc=1, lr=… or y"
    assert error.line(flags_of("train")) == "--data-dir: x; give --nproc 1, lr=… or y"
    assert (
        InputError("batch", 7, allowed="6").line(flags_of("train")) == "batch: 7 is not allowed, it must be 6"
    )
    assert error.line(flags_of("no such command")) == str(error)


#: Command -> its function, where that has another name; or why it has none.
ELSEWHERE = {
    "import": "import_state",
    "plot": "draw",
    "info": "load",
    "demo": None,  # a program that calls the functions, and says what they find
    "doctor": None,  # about an installation
    "fetch": None,  # data.load says what is missing, and no function of the package downloads by itself
    "figures": None,  # about the papers: their figures, scales and records
}


def test_every_command_has_a_public_function_of_its_name() -> None:
    commands = {name for group in GROUPS.values() for name in group}
    assert commands == {name for name in registry.commands.names() if name in commands}
    assert set(ELSEWHERE) <= commands
    for name in sorted(commands):
        function = name.replace("-", "_")
        if name in ELSEWHERE:
            assert function not in landscape.__all__, f"{name} needs no entry"
            function = ELSEWHERE[name] or "__version__"
        assert function in landscape.__all__, name


def test_compare_takes_any_mixture(tmp_path: Path) -> None:
    runs = [landscape.train("digits-dpsgd", tmp_path / str(k), seed=k, **SETTINGS) for k in (0, 1)]
    only = {"quantities": ["lambda-max"], "draws": 4}
    found = landscape.compare({"a": runs[0].problem(), "b": [runs[0], tmp_path / "1"]}, **only)
    assert (found.sides, found.side_of.tolist(), found.grouped) == (("a", "b"), [0, 1, 1], True)
    assert found.value[0, 1] == pytest.approx(found.own_value[0, 1:].mean())
    unnamed = landscape.compare([runs, [runs[0], str(tmp_path / "1")]], **only)
    assert unnamed.sides == ("group 1", "group 2")
    assert not unnamed.significant.any()


def test_compare_with_model_and_data_that_the_files_do_not_know(tmp_path: Path) -> None:
    model, data = torch.nn.Linear(3, 2), (torch.randn(30, 3), torch.arange(30) % 2)
    paths = []
    for k in (0, 1):
        torch.manual_seed(k)
        torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / f"{k}.pt")
        landscape.import_state(tmp_path / f"{k}.pt", model).save(tmp_path / f"{k}.h5")
        paths.append(tmp_path / f"{k}.h5")
    only = {"quantities": ["loss"]}
    with pytest.raises(OperationError, match="its data is not known; give data='MODULE:NAME'"):
        landscape.compare(paths, **only)
    found = landscape.compare(paths, model=model, data=data, **only)
    each = [landscape.load(path).using(model=model, data=data).problem().loss() for path in paths]
    np.testing.assert_allclose(found.value[0], each)


def test_a_sweep_is_that_of_the_command(tmp_path: Path, command: Command) -> None:
    settings = SETTINGS | {"steps": 3}
    values: dict[str, Any] = {"lr": [0.5, 1], "model.widths": [[64, 8, 10]]}
    found = landscape.sweep(["digits-dpsgd"], tmp_path / "python", seeds=[0, 1], **values, **settings)
    changes = {**settings, "lr": "0.5,1", "model.widths": "[64,8,10]"}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    words += ["--seeds", "0,1", "-o", str(tmp_path / "command")]
    assert command("sweep", "digits-dpsgd", *words)[0] == 0
    theirs = landscape.load(tmp_path / "command" / "sweep.h5")
    assert found.rows == theirs.rows
    np.testing.assert_array_equal(found.test_loss, theirs.test_loss)
    assert found.best("lr")[0]["lr"] in ("0.5", "1")
    recipe = Recipe.read("digits-dpsgd", **settings)
    again = landscape.sweep(recipe, tmp_path / "recipe", **values)
    assert [row["lr"] for row in again.rows] == ["0.5", "1"]
    assert again.rows[0]["recipe"] == recipe.name
    with pytest.raises(InputError, match="^settings: 'seed' is not a key of a sweep; give seeds=…"):
        landscape.sweep(recipe, tmp_path / "recipe", seed=[0, 1])
    assert (
        InputError("settings: no", give={"seeds": ...}).line(flags_of("sweep")) == "--set: no; give --seeds"
    )
