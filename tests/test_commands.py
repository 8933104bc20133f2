"""What a new user runs into: names of results, what is replaced, which data, folders and weights as CKPT."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.figure import Figure
from torch import nn

import landscape
from landscape import InputError
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.core.options import SPLIT
from landscape.results.training import COLUMNS, texts
from landscape.training.experiments.escapes import stability
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests import problems
from tests.conftest import Command
from tests.test_cli import one_line

MODULE = """
import torch
from torch import nn

def net(width=5, slope=0.0):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(slope), nn.Linear(width, 10))

def points(samples=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    def split():
        return torch.randn(samples, 64, generator=generator), torch.randint(10, (samples,), generator=generator)
    return {"train": split(), "test": split()}

def others():
    return points(30, 7)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on the bundled digits, made once."""
    folder = tmp_path_factory.mktemp("run")
    small = ["steps=30", "checkpoint.every=10", "model.widths=[64, 8, 10]"]
    launch.launch(recipe.read("digits-dpsgd", small), folder)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may write to."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, the current one, with a module ``users``."""
    (tmp_path / "users.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("users", None)


def test_bare_landscape_prints_its_help_line_by_line(command: Command) -> None:
    code, out, err = command()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: landscape")
    assert len(err.splitlines()) > 20
    assert "\nTrain:\n" in err


def test_a_warning_is_one_line(
    copy: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Checkpoint.problem

    def warns(*args: object, **options: object) -> object:
        warnings.warn("the fast way\nis not taken", UserWarning, stacklevel=1)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "problem", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = command("noise", copy, "--draws", "2")
        assert (code, err.splitlines()[0]) == (0, "landscape: the fast way is not taken")
        assert command("noise", copy, "--draws", "2", "--force", "-q")[::2] == (0, "")


def test_a_result_beside_the_checkpoints_is_not_taken_for_one(copy: Path, command: Command) -> None:
    assert command("contour", copy / "last.h5", "--plane", "pca", "--grid", "2", "-q")[0] == 0
    before = landscape.load(copy / "last-contour-pca.h5")
    assert command("noise", copy / "step-0000010.h5", "--draws", "2")[0] == 0
    assert (copy / "step-0000010-noise.h5").exists()
    shutil.copy(copy / "step-0000010.h5", copy / "step-mine.h5")  # a copy is no other point of the path
    (copy / "step-notes.h5").write_text("not HDF5")
    code, _, err = command("contour", copy / "last.h5", "--plane", "pca", "--grid", "2", "-o", copy / "x.h5")
    assert code == 0, err
    after = landscape.load(copy / "x.h5")
    assert after.labels == ("step 0", "step 10", "step 20", "step 30")
    np.testing.assert_array_equal(after.loss, before.loss)


def test_force_deletes_checkpoints_of_the_run_alone(copy: Path, tiny: Path, command: Command) -> None:
    mine = ("step-mine.h5", "step-0000010-noise.h5", "step-notes.h5")
    assert command("noise", copy / "step-0000010.h5", "--draws", "2")[0] == 0
    shutil.copy(copy / "step-0000010-noise.h5", copy / "step-mine.h5")
    (copy / "step-notes.h5").write_text("notes")
    kept = {name: (copy / name).read_bytes() for name in mine}
    assert command("train", tiny, "-o", copy, "--force", "--set", "checkpoint.every=15", "-q")[0] == 0
    assert {name: (copy / name).read_bytes() for name in mine} == kept
    assert not (copy / "step-0000010.h5").exists()
    shutil.copy(copy / "step-mine.h5", copy / "step-0000007.h5")  # a result under a checkpoint's name
    one_line(command("train", tiny, "-o", copy, "--force"), 1, "--force", "step-0000007.h5")
    assert (copy / "step-0000007.h5").read_bytes() == kept["step-mine.h5"]


def test_one_split_by_default_in_every_command(copy: Path, command: Command) -> None:
    every = {name: registry.commands[name] for name in registry.commands.names()}
    named = {name: p for name, c in every.items() for p in c.params if p.name == "split"}
    assert set(named) == {
        "contour", "line", "hessian-grid", "spectrum", "smoothing", "stability", "minima", "disagreement",
        "sharpness",
    }  # fmt: skip
    assert {p.default for p in named.values()} == {SPLIT}
    sharpest = []
    for name, flags in (
        ("spectrum", ()),
        ("hessian-grid", ("--grid", "1", "--residual-tol", "0.001")),
        ("noise", ("--draws", "2")),
    ):
        code, out, err = command(name, copy / "last.h5", *flags)
        assert code == 0, err
        assert "train loss" in out.splitlines()[0], (name, out)
        if name != "noise":
            r = landscape.load(copy / f"last-{name.removesuffix('-grid')}.h5")
            sharpest.append(float(r.values[0] if name == "spectrum" else np.max(r.lambda_max)))
            assert r.split == SPLIT
            code, out, _ = command(name, copy / "last.h5", *flags, "--split", "test")
            assert (code, "test loss" in out.splitlines()[0]) == (0, True), (name, out)
    np.testing.assert_allclose(sharpest, sharpest[0], rtol=0.02)


def test_names_tell_planes_and_norms_apart(copy: Path, command: Command) -> None:
    a, b = copy / "last.h5", copy / "step-0000010.h5"
    written = {}
    for flags, name in (
        ((a, b), "last-contour.h5"),
        ((a, b, "--plane", "between"), "last-contour-between.h5"),
        ((a, b, "--norm", "filter"), "last-contour-filter.h5"),
        ((a, "--split", "test"), "last-contour-test.h5"),
    ):
        code, out, err = command("contour", *flags, "--grid", "3")
        assert (code, out.splitlines()[-1]) == (0, str(copy / name)), err
        written[name] = (copy / name).read_bytes()
    assert {name: (copy / name).read_bytes() for name in written} == written
    for files, name in (((a, b), "last-line-between.h5"), ((a,), "last-line.h5")):
        assert command("line", *files, "--points", "3")[1].splitlines()[-1] == str(copy / name)
    out = copy / "last-contour-between.h5"
    one_line(command("contour", a, b, "--grid", "3", "-o", out), 1, "its kind is 'between' and not 'random'")
    assert out.read_bytes() == written["last-contour-between.h5"]


def test_finished_results_are_replaced_with_force_only(copy: Path, command: Command) -> None:
    last, other = copy / "last.h5", copy / "step-0000010.h5"
    surface = copy / "last-contour.h5"
    assert command("contour", last, other, "--grid", "3")[0] == 0
    one_line(command("contour", last, "--grid", "3"), 1, "of other checkpoints", "step 10", "--force")
    one_line(
        command("contour", last, other, "--grid", "4"), 1, "9 points of a grid of 3 × 3", "5x5", "--force"
    )
    one_line(command("contour", last, other, "--grid", "2"), 1, "5 would be lost", "--force")
    code, out, _ = command("contour", last, other, "--grid", "5")
    assert (code, "9 of 25 points" in out) == (0, True)
    one_line(command("spectrum", last, "-o", surface), 1, "finished landscape.surface", "--force")
    one_line(command("contour", last, "-q", "-o", _sweep(copy)), 1, "landscape.sweep", "--force")
    assert len(landscape.load(surface)) == 2
    assert command("contour", last, "--grid", "4", "--force")[0] == 0
    assert landscape.load(surface).loss.shape == (4, 4)
    assert command("spectrum", last, "-o", surface, "--force", "-q")[0] == 0
    assert isinstance(landscape.load(surface), landscape.Spectrum)
    one_line(command("contour", last, "-o", last, "--force"), 1, "is a checkpoint")


def _sweep(folder: Path) -> Path:
    path = folder / "sweep.h5"
    numbers = dict.fromkeys(COLUMNS, np.zeros(1))
    landscape.Sweep(("recipe",), texts([["digits-ssgd"]]), texts(["0"]), **numbers).save(path)
    return path


def test_a_folder_stands_for_its_last_checkpoint(copy: Path, tmp_path: Path, command: Command) -> None:
    code, out, _ = command("contour", copy, "--grid", "2")
    assert (code, out.splitlines()[-1]) == (0, f"{copy / 'last-contour.h5'}")
    assert command("info", copy)[0] == 0
    assert command("plot", copy, "-o", tmp_path / "p.png")[0] == 0
    (tmp_path / "empty").mkdir()
    one_line(command("contour", tmp_path / "empty"), 1, "empty", "last.h5")


def test_weights_of_others_are_taken_as_they_are(folder: Path, command: Command) -> None:
    import users  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = users.net()
    x, y = users.points()["train"]
    true = float(nn.functional.cross_entropy(model(x), y).detach())
    own = ("--model", "users:net", "--data", "users:points", "--grid", "1")
    state = model.state_dict()
    lightning = {
        "state_dict": {f"net.{k}": v for k, v in state.items()} | {"seen.count": torch.zeros(1)},
        "epoch": 3,
    }
    for name, saved in (("a.pt", state), ("b.pth", state), ("c.bin", state), ("d.ckpt", lightning)):
        torch.save(saved, name)
        code, out, err = command("contour", name, *own)
        written = out.splitlines()[-1]
        assert (code, written) == (0, f"{Path(name).stem}-contour.h5"), err
        assert landscape.load(written).loss[0, 0] == pytest.approx(true, rel=1e-6)
    assert "net." in err
    assert "seen.count" in err
    one_line(command("contour", "a.pt"), 2, "--model", "a.pt")
    torch.save({"state_dict": state, "hyper_parameters": Path("here")}, "e.ckpt")
    one_line(command("contour", "e.ckpt", *own), 1, "e.ckpt", "weights_only=False", "state_dict")


def test_data_that_is_not_the_runs_is_refused_or_said(folder: Path, command: Command) -> None:
    import users

    torch.manual_seed(0)
    torch.save(users.net(slope=0.5).state_dict(), "net.pt")
    model, data = "users:net(slope=0.5)", "users:points(samples=20, seed=3)"
    assert command("import", "net.pt", "--model", model, "--data", data)[0] == 0
    one_line(command("contour", "net.h5", "--model", model), 1, f"--data '{data}'")
    one_line(command("contour", "net.h5", "--data", data), 1, f"--model '{model}'")
    grid = ("--grid", "2")
    for short in ("users:points", "users:points(seed=3)"):
        one_line(command("contour", "net.h5", "--model", model, "--data", short, *grid), 1, "--data", data)
    one_line(command("contour", "net.h5", "--model", "users:net", "--data", data, *grid), 1, "--model", model)
    code, _, err = command("contour", "net.h5", "--model", model, "--data", data, *grid)
    assert (code, "--data" in err) == (0, False)
    own = landscape.load("net-contour.h5")
    for other in ("users:others", "users:points(samples=20, seed=4)"):
        wanted = ("contour", "net.h5", "--model", model, "--data", other, *grid)
        one_line(command(*wanted), 1, "net-contour.h5", "label", "--force")
        code, _, err = command(*wanted, "-o", "other.h5", "--force")
        assert code == 0, err
        name = f"'{other}'" if "(" in other else other
        assert f"--data: {name} " in err
        found = landscape.load("other.h5")
        assert found.label == f"{own.label}, on {name}"
        assert abs(found.loss - own.loss).max() > 1e-3


def test_pictures_show_themselves_and_leave_nothing_open(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = landscape.load(copy / "last.h5").problem()
    surface = landscape.contour(problem, landscape.random_plane(problem), 3, split="train")
    before = pyplot.get_fignums()
    figure = surface.plot(path=tmp_path / "s.png", title="mine")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert surface.plot(style="surface").axes[0].name == "3d"
    with pytest.raises(landscape.OperationError, match=r"path="):
        figure.show()
    # Where there are windows, one shows it until it is closed.
    shown = []
    monkeypatch.setattr(FigureManagerBase, "show", lambda self: None)
    monkeypatch.setattr("landscape.plots.picture.FigureManagerBase", type("Other", (), {"show": None}))
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf().canvas.manager.canvas.figure))
    figure.show()
    assert shown == [figure]
    assert pyplot.get_fignums() == before


def test_pictures_in_axes_of_a_users_own(copy: Path) -> None:
    problem = landscape.load(copy / "last.h5").problem()
    plane = landscape.random_plane(problem)
    own = Figure(figsize=(12, 8), layout="constrained")
    axes = own.subplots(1, 3).ravel()
    results = (
        landscape.contour(problem, plane, 3, split="train", label="here"),
        landscape.line(problem, plane.directions[0], 5),
    )
    for result, ax in zip(results, axes, strict=False):
        assert result.plot(ax=ax) is own
        assert ax.has_data()
        assert ax.get_title()
    assert "here" in axes[0].get_title()
    assert own.get_suptitle() == ""
    assert not axes[2].has_data()
    with pytest.raises(InputError, match="ax: its projection is 'rectilinear'"):
        results[0].plot(style="surface", ax=axes[2])
    delays = stability(problem, [0, 1], 0.9, lr=0.1, own_limit=None, own_delay=0)
    assert delays.plot(ax=axes[2]) is own


def test_one_number_is_a_square_grid() -> None:
    problem = problems.mlp()
    plane = landscape.random_plane(problem)
    for analysis in (landscape.contour, landscape.hessian_grid):
        assert analysis(problem, plane, grid=np.int64(2)).done.shape == (2, 2)
    for wrong in (2.5, (3,), (2, 3, 4), "51x25", (2, 2.0)):
        with pytest.raises(InputError, match="grid: "):
            landscape.contour(problem, plane, grid=wrong)  # type: ignore[arg-type]
