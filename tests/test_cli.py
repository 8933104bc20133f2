"""The commands as a user meets them: what they write and print, which data they take, one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase
from torch import nn

import landscape
from landscape import InputError
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import as_command
from landscape.core import registry
from landscape.core.errors import DataWarning
from landscape.core.options import SPLIT
from landscape.results.geometry import median_rise
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests import problems
from tests.conftest import TINY, Command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs on the bundled digits, made once: the folders ss and dp."""
    folder = tmp_path_factory.mktemp("runs")
    for name, short in (("ssgd", "ss"), ("dpsgd", "dp")):
        small = ["steps=20", "checkpoint.every=10", "model.widths=[64, 8, 10]"]
        launch.launch(recipe.read(f"digits-{name}", small), folder / short)
    return folder


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run dp, which a test may write to."""
    return Path(shutil.copytree(runs / "dp", tmp_path / "run"))


def one_line(result: tuple[int, str, str], code: int, *words: str) -> None:
    """The command failed with ``code``, printed nothing on stdout and one line with ``words`` on stderr."""
    assert result[0] == code, result
    assert result[1] == ""
    assert result[2].startswith("landscape: ")
    assert result[2].count("\n") == 1, result[2]
    for word in words:
        assert word in result[2]


def test_train_writes_its_files_and_names_the_last(tiny: Path, tmp_path: Path, command: Command) -> None:
    code, out, err = command("train", tiny, "-o", tmp_path / "r", "--set", "seed=3")
    assert code == 0
    assert out.splitlines()[-1] == f"{tmp_path}/r/last.h5"
    assert "test error" in out
    assert (
        "ring(1): spectral gap 0.6667, smallest eigenvalue ω_min -0.3333; plain steps are stable "
        "while lr·λ_max < 1 + ω_min = 0.6667 (AWC)" in err
    )
    assert "\r" not in err  # no progress bar where there is no terminal
    assert landscape.load(tmp_path / "r" / "last.h5").seed == 3
    assert command("train", tiny, "-o", tmp_path / "q", "-q")[2] == ""


@pytest.mark.parametrize("more", [(), ("-q", "--json", "--set", "lr=1e30")])
def test_a_run_that_diverged_always_says_so(more: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    settings = [
        "lr=2.5", "data={name='quadratic', dimension=2}", "model={name='quadratic', eigenvalues=[1.0, 2.0]}", "learners=2",
    ]  # fmt: skip
    flags = [part for s in settings for part in ("--set", s)]
    code, out, err = command("train", "digits-ssgd", *flags, *more, "-o", tmp_path / "r")
    assert code == 3
    (said,) = [line for line in err.splitlines() if "landscape: " in line]
    assert f"{tmp_path}/r: diverged at step" in said
    assert "the mean" in said
    if more:
        assert json.loads(out)["run"]["diverged"] == "mean"
    else:
        assert "diverged at step" in out
        assert out.splitlines()[-1] == f"{tmp_path}/r/last.h5"
    assert landscape.load(tmp_path / "r" / "last.h5").diverged == "mean"
    assert command("train", "-o", tmp_path / "r", "--resume", "-q")[0] == 3


def test_contours_of_several_checkpoints_share_axes(runs: Path, tmp_path: Path, command: Command) -> None:
    out_file, picture = tmp_path / "sub" / "c.h5", tmp_path / "c.png"
    files = [runs / "ss" / "last.h5", runs / "dp" / "last.h5"]
    code, out, _ = command("contour", *files, "--grid", "4x3", "-o", out_file, "--plot", picture)
    assert code == 0
    assert out.split()[-2:] == [str(out_file), str(picture)]
    a, b = landscape.load(out_file)
    np.testing.assert_array_equal(a.directions, b.directions)
    assert a.loss.shape == (3, 4)
    assert (a.split, a.norm, a.span, a.seed, a.method) == ("train", "none", 0.1, 0, "batched")
    assert a.source_sha256 == landscape.core.hdf5.sha256(files[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    center = landscape.load(files[0]).problem()
    again = landscape.contour(center, landscape.random_plane(center), grid=(4, 3))
    np.testing.assert_array_equal(again.loss, a.loss)


@pytest.mark.parametrize("kind", ["between", "pca", "learners", "eigen"])
def test_planes_from_checkpoints(kind: str, runs: Path, tmp_path: Path, command: Command) -> None:
    files = [runs / name / "last.h5" for name in (("dp", "ss") if kind == "between" else ("dp",))]
    out_file, picture = tmp_path / "c.h5", tmp_path / "c.png"
    words = ("--plane", kind, "--grid", "3x4", "-o", out_file, "--plot", picture)
    code, out, _ = command("contour", *files, *words)
    assert (code, out.split()[-2:]) == (0, [str(out_file), str(picture)])
    s, own = landscape.load(out_file), [landscape.load(file) for file in files]
    problem = own[0].problem()
    assert s.kind == kind
    if kind == "eigen":
        assert s.span == 0.1
        assert "λ_max" in out
        return
    np.testing.assert_allclose(s.span, 1.25 * np.abs(s.markers).max())
    if kind == "between":
        assert s.labels == tuple(run.label for run in own)
        np.testing.assert_allclose(s.marker_loss, [problem.loss(run.mean) for run in own], rtol=1e-6)
        assert re.search(rf"loss of {s.labels[1]} +{s.marker_loss[1]:.6g} nat", out)
    if kind == "pca":  # step-0000020.h5 holds what last.h5 does and is not taken twice
        assert s.labels == ("step 0", "step 10", "step 20")
        assert re.search(r"share of the variance in the plane.* 3 weight vectors", out)
    if kind == "learners":
        losses = [problem.loss(w) for w in own[0].weights]
        np.testing.assert_allclose(s.marker_loss, [*losses, problem.loss()], rtol=1e-6)
        assert re.search(rf"loss of w_a +{problem.loss():.4g}", out)
        assert re.search(rf"mean loss of the learners +{np.mean(losses):.4g}", out)


def test_line_between_two_and_along_one(runs: Path, tmp_path: Path, command: Command) -> None:
    a, b, out_file = runs / "dp" / "last.h5", runs / "ss" / "last.h5", tmp_path / "l.h5"
    code, out, _ = command("line", a, b, "--points", "5", "-o", out_file, "--plot", tmp_path / "l.png")
    assert (code, out.split()[-2:]) == (0, [str(out_file), f"{tmp_path}/l.png"])
    between = landscape.load(out_file)
    problem, other = (landscape.load(f).problem() for f in (a, b))
    assert (between.loss[0], between.loss[-1]) == pytest.approx((problem.loss(), other.loss()), rel=1e-5)
    assert f"{between.barrier:.6g} nat" in out
    again = ("line", a, "--points", "5", "--seed", "4", "-o", out_file)
    assert command(*again, "--force")[0] == 0
    direction = landscape.random_plane(problem, seed=4).directions[0].numpy()
    np.testing.assert_array_equal(landscape.load(out_file).direction, direction)


def test_plot_styles_and_export(runs: Path, tmp_path: Path, command: Command) -> None:
    both, one = tmp_path / "both.h5", tmp_path / "one.h5"
    files = [runs / "ss" / "last.h5", runs / "dp" / "last.h5"]
    assert command("contour", *files, "--grid", "3", "--ignore", "bias+norm", "-o", both)[0] == 0
    assert landscape.load(both)[0].ignore == "bias+norm"
    assert command("contour", files[0], "--grid", "3", "-o", one)[0] == 0
    picture = tmp_path / "difference.svg"
    assert command("plot", both, "--style", "difference", "-o", picture)[:2] == (0, f"{picture}\n")
    assert command("plot", both, "-o", tmp_path / "x.vts")[1] == f"{tmp_path}/x-0.vts\n{tmp_path}/x-1.vts\n"
    assert command("plot", one, "-o", tmp_path / "y.vts")[1] == f"{tmp_path}/y.vts\n"
    one_line(command("plot", one, "--style", "difference", "-o", tmp_path / "z.png"), 2, "takes two")
    assert not (tmp_path / "z.png").exists()


@pytest.fixture(scope="module")
def changed(runs: Path) -> Path:
    """A folder with checkpoints that differ from the last ones of the runs: ``what``/last.h5."""
    folder = runs / "changed"
    (runs / "other.toml").write_text(TINY)
    launch.launch(recipe.read(str(runs / "other.toml"), ["steps=3"]), folder / "other")
    mnist = {"name": "mnist", "options": {}}
    for what, run, change in (
        ("equal", "dp", lambda f: f["weights"].__setitem__(slice(None), f["weights"][0])),
        ("infinite", "dp", lambda f: f["weights"].__setitem__((1, 3), np.inf)),
        ("model", "ss", lambda f: f.attrs.update(model=f.attrs["model"].replace('"relu"', '"tanh"'))),
        ("data", "ss", lambda f: f.attrs.update(data=f.attrs["data"].replace('print": "', 'print": "0'))),
        ("mnist", "dp", lambda f: f.attrs.update(data=json.dumps(json.loads(f.attrs["data"]) | mnist))),
        ("newer", "dp", lambda f: f.attrs.update(version=2)),
    ):
        (folder / what).mkdir()
        shutil.copy(runs / run / "last.h5", folder / what / "last.h5")
        with h5py.File(folder / what / "last.h5", "a") as file:
            change(file)
    return folder


# The words of a command that is refused, the exit code, and what the line must say; dp, ss: the last
# checkpoints of the runs, NAME/: a changed one, out: a file that is not there.
REFUSED: list[tuple[str, int, tuple[str, ...]]] = [
    ("contour --plane between dp", 2, ("--plane between: 1 checkpoints", "2 or 3")),
    ("contour --plane between dp ss dp ss", 2, ("4 checkpoints", "2 or 3")),
    ("contour --plane between dp dp", 1, ("equal, they must differ",)),
    ("contour --plane between dp other/", 1, ("other/last.h5: its layout is not", "share no directions")),
    ("contour --plane between dp infinite/", 1, ("NaN or infinite",)),
    ("contour --plane between dp model/", 1, ("model/last.h5", "its model mlp")),
    ("contour --plane between dp data/", 1, ("data/last.h5", "trained on other data")),
    ("contour dp other/", 1, ("share no directions",)),
    ("contour --plane pca equal/", 1, ("equal/last.h5: 0 earlier step-*.h5", "needs 2")),
    ("contour --plane pca early", 1, ("1 earlier", "needs 2")),
    ("contour --plane learners equal/", 1, ("equal/last.h5", "all 5 are equal")),
    ("contour --plane learner dp", 2, ("did you mean 'learners'",)),
    ("contour --plane pca dp --norm filter", 2, ("only with random", "pca")),
    ("contour --plane eigen dp --ignore none", 2, ("only with random", "eigen")),
    ("contour dp --ignore bias", 2, ("ignore", "bias+norm")),
    ("contour dp --bn-samples 1", 2, ("--bn-samples", "≥ 2")),
    ("line dp other/", 1, ("share no directions",)),
    ("line dp model/", 1, ("model/last.h5", "its model mlp")),
    ("line dp data/", 1, ("data/last.h5", "trained on other data")),
    ("line dp infinite/", 1, ("infinite/last.h5", "NaN or infinite")),
    ("line dp ss dp", 2, ("3 checkpoints", "one or two")),
    ("line dp ss --span 1", 2, ("--span", "two CKPT")),
    ("contour dp --grid 4y4", 2, ("--grid", "51x25")),
    ("contour dp --span nan", 2, ("span", "nan")),
    ("contour dp --span wide", 2, ("--span", "'wide'")),
    ("contour dp --norm filer", 2, ("did you mean 'filter'",)),
    ("contour dp --split tset", 2, ("did you mean 'test'",)),
    ("contour dp --dtype half", 2, ("--dtype", "'half'")),
    ("contour dp --device tpu", 2, ("--device", "auto")),
    ("contour dp --plot x.bmp", 2, ("x.bmp", ".png, .pdf, .svg")),
    ("contour dp -o x.txt", 2, ("x.txt", ".h5")),
    ("contour dp -o dp", 1, ("is a checkpoint, it is not overwritten",)),
    ("contour dp -o file/x.h5", 1, ("cannot be made",)),
    ("contour", 2, ("CKPT",)),
    ("contuor", 2, ("contuor",)),
    ("contour infinite/", 1, ("NaN or infinite",)),
    ("contour data/", 1, ("fingerprint",)),
    ("contour newer/", 1, ("version 2 is newer than 1",)),
    ("contour cut.h5", 1, ("cut.h5", "not a readable HDF5 file")),
    ("contour mnist/ --data-dir .", 1, ("train-images-idx3-ubyte[.gz] is not in", "--data-dir")),
    ("plot dp -o file/x.png", 1, ("cannot be made",)),
    ("plot dp -o z.vts", 2, ("only a surface", "Checkpoint")),
    ("plot dp --style surface -o z.png", 2, ("'surface'", "contour")),
    ("plot dp --style surfac -o z.png", 2, ("did you mean 'surface'",)),
    ("plot dp --title $\\frac{$ -o p.png", 2, ("--title", "formula")),
    ("plot dp --dpi 5", 2, ("--dpi: 5.0 is not allowed",)),
    ("plot dp --animate learnrs", 2, ("did you mean 'learners'",)),
    ("plot dp --animate learners -o x.png", 2, ("must end in .gif, .mp4",)),
    ("plot dp --animate learners --film-grid 1", 2, ("--film-grid: 1 is not allowed",)),
    ("plot dp --animate learners --fps 0", 2, ("--fps",)),
    ("plot dp --animate learners --log", 2, ("--log: not allowed with --animate",)),
    ("plot dp --animate learners --style surface", 2, ("--style: not allowed with --animate",)),
    ("report dp -o x.h5", 2, ("-o", "x.h5", ".html")),
    ("report no.h5 -o x.html", 1, ("no.h5", "no such file")),
    ("report . -o x.html", 1, ("last.h5",)),
    ("report cut.h5 -o x.html", 1, ("cut.h5",)),
    ("sweep digits-ssgd -o s --set lr=0.1,", 2, ("--set: lr=0.1, is not allowed, it lacks a value",)),
    ("sweep digits-ssgd -o s --set lr=0.1,0.10", 2, ("it has 0.1 twice",)),
    ("sweep digits-ssgd -o s --set lr=1 --set lr=2", 2, ("lr is given twice; give its values with commas",)),
    ("sweep digits-ssgd -o s --set seed=1,2", 2, ("'seed' is not a key of a sweep; give --seeds",)),
    ("sweep digits-ssgd -o s --seeds 3-1", 2, ("--seeds: '3-1' is not allowed",)),
    ("sweep digits-ssgd -o s --rounds 99", 2, ("--rounds: 99",)),
    ("sweep digits-ssgd -o s --share 0/2", 2, ("--share: '0/2' is not allowed, it must be K/N with 1 ≤ K ≤ N ≤ 1, the number of runs",)),
    ("sweep digits-ssgd -o s --share 1", 2, ("--share: '1' is not allowed, it must be K/N",)),
    ("sweep digits-ssgd -o s --share 1/2", 2, ("--share: '1/2' is not allowed, it must be K/N with 1 ≤ K ≤ N ≤ 1, the number of runs",)),
    ("sweep digits-ssgd -o s --search lr=1..2 --share 1/1", 2, ("--share: not allowed with search",)),
    ("sweep digits-ssgd -o s --search lr=1", 2, ("--search: 'lr=1' is not allowed, it must be KEY=LO..HI",)),
    ("sweep digits-ssgd -o s --search lr=1..2 --set lr=3", 2, ("--search: lr is not allowed",)),
    ("sweep digits-dpsgd digits-ssgd digits-ssgd -o s", 2, ("'digits-ssgd' is given twice",)),
    ("figures fig2", 2, ("NAME", "'fig2'", "fig2a")),
    ("figures fig2a --scale big", 2, ("--scale", "'big'", "smoke")),
    ("figures fig2a --all", 2, ("--all", "fig2a")),
    ("figures fig2a --jobs 0", 2, ("--jobs", "0")),
    ("figures fig2a --budget 6", 2, ("--budget", "'6'", "min, h, d")),
    ("figures fig2a --budget 0h", 2, ("--budget", "> 0")),
    ("figures table1 -o file/in --runs r", 1, ("cannot be made",)),
    ("fetch mnist --mirror file:///etc --data-dir .", 2, ("--mirror", "http://")),
    ("fetch mnist cifar10 --mirror http://x/ --data-dir .", 2, ("--mirror", "2 data sets")),
    ("fetch minst --data-dir .", 2, ("NAMES", "did you mean 'mnist'")),
    ("spectrum ss --precondition", 2, ("precondition: the optimizer 'sgd'",)),
    ("train", 2, ("RECIPE",)),
    ("train --set lr=1", 2, ("--set",)),
    ("train digits-ssgd --resume --force -o x", 2, ("only one of the two",)),
    ("train --resume -o x", 1, ("holds no run to resume",)),
    ("train digits-ssgd -o ran", 1, ("its run has widths = [64, 8, 10]", "another folder")),
    ("train digits-ssgd -o file", 1, ("cannot be",)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_is_refused_is_one_line(
    words: str, code: int, said: tuple[str, ...], runs: Path, changed: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, command: Command,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "cut.h5").write_bytes((runs / "dp" / "last.h5").read_bytes()[:9000])
    known = {"dp": runs / "dp/last.h5", "ss": runs / "ss/last.h5", "ran": runs / "ss"}
    known["early"] = runs / "dp/step-0000010.h5"
    given = [
        known.get(word, changed / f"{word}last.h5" if word.endswith("/") else word) for word in words.split()
    ]
    if given[0] in ("contour", "line") and "-o" not in given:
        given += ["-o", "new.h5"]
    one_line(command(*given), code, *said)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "cut.h5"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, runs: Path, command: Command) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    contour = command("contour", runs / "dp" / "last.h5", "--grid", "2", "-o", folder / "x.h5")
    one_line(contour, 1, "Permission")
    one_line(command("train", "digits-ssgd", "-o", folder / "run"), 1, "Permission")


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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, the current one, with a module ``users``."""
    (tmp_path / "users.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.modules.pop("users", None)


def test_bare_landscape_prints_its_help_line_by_line(command: Command) -> None:
    code, out, err = command()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: landscape")
    assert len(err.splitlines()) > 20
    assert "\nTrain:\n" in err


def test_a_warning_is_one_line(copy: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_lost_is_said_with_q(copy: Path, command: Command) -> None:
    """A checkpoint that is damaged, settings that are left out, and a result that is replaced."""
    raw = bytearray((copy / "last.h5").read_bytes())
    raw[len(raw) // 2] ^= 1
    contour = ("contour", copy / "step-0000010.h5", "--grid", "2", "-o", copy / "c.h5", "-q")
    train = ("train", "digits-dpsgd", "-q", "--set", "algorithm.name='ssgd'", "--set")
    wanted = (
        ((*contour, "--seed", "1", "--force"), "cannot be resumed, its seed is 0 and not 1; computed from"),
        ((*train, "steps=1", "-o", copy / "a"), "algorithm.mixing: left out, dpsgd has it and ssgd does not"),
        (("train", "-o", copy, "--resume", "-q"), "damaged, its checksum does not fit"),
    )
    assert command(*contour)[::2] == (0, "")
    (copy / "last.h5").write_bytes(raw)
    warnings.simplefilter("always", DataWarning)  # pytest undoes it
    for words, line in wanted:
        code, _, err = command(*words)
        assert (code, line in err, err.count("\n")) == (0, True, 1), err


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
    assert after.labels == ("step 0", "step 10", "step 20")
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
    every = {name: as_command(registry.commands[name]) for name in registry.commands.names()}
    named = {name: p for name, c in every.items() for p in c.params if p.name == "split"}
    assert set(named) == {
        "contour", "line", "hessian-grid", "spectrum", "smoothing", "stability", "disagreement", "average",
        "sharpness",
    }  # fmt: skip
    assert {p.default for p in named.values()} == {SPLIT}
    for name, *flags in (("spectrum",), ("hessian-grid", "--grid", "1"), ("noise", "--draws", "2")):
        code, out, err = command(name, copy / "last.h5", *flags)
        assert (code, "train loss" in out.splitlines()[0]) == (0, True), (name, out, err)
        if name != "noise":
            assert landscape.load(copy / f"last-{name.removesuffix('-grid')}.h5").split == SPLIT
            code, out, _ = command(name, copy / "last.h5", *flags, "--split", "test")
            assert (code, "test loss" in out.splitlines()[0]) == (0, True), (name, out)


def test_coefficients_belong_to_the_members_in_their_order(copy: Path, command: Command) -> None:
    members = [copy / "step-0000010.h5", copy / "last.h5"]
    for text, shares in (("0.9,0.1", [0.9, 0.1]), ("2,2", [0.5, 0.5]), ("1,0", [1.0, 0.0])):
        out = copy / f"{text}.h5"
        code, _, err = command("average", *members, "--coefficients", text, "-o", out)
        assert code == 0, err
        average = landscape.load(out)
        assert average.coefficients[0].tolist() == pytest.approx(shares)
        w = sum(share * landscape.load(path).mean for share, path in zip(shares, members, strict=True))
        assert average.exact[0] == pytest.approx(landscape.load(members[1]).problem().loss(w), rel=1e-5)


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
    coarser = command("contour", last, other, "--grid", "4")
    one_line(coarser, 1, "9 points of a grid of 3 × 3", "5 × 5", "--force")
    one_line(command("contour", last, other, "--grid", "2"), 1, "5 would be lost", "--force")
    code, out, _ = command("contour", last, other, "--grid", "5")
    assert (code, "9 of 25 points" in out) == (0, True)
    spectrum = command("spectrum", last, "-o", surface)
    one_line(spectrum, 1, "landscape.surface with settings that are not known", "--force")
    assert len(landscape.load(surface)) == 2
    warnings.simplefilter("always", DataWarning)  # pytest undoes it
    assert command("contour", last, "--grid", "4", "--force")[0] == 0
    assert landscape.load(surface).loss.shape == (4, 4)
    assert command("spectrum", last, "-o", surface, "--force", "-q")[0] == 0
    assert isinstance(landscape.load(surface), landscape.Spectrum)
    one_line(command("contour", last, "-o", last, "--force"), 1, "is a checkpoint")


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
        one_line(command(*wanted), 1, "net-contour.h5", "another result", "--force")
        warnings.simplefilter("always", DataWarning)  # pytest undoes it
        code, _, err = command(*wanted, "-o", "other.h5", "--force")
        assert code == 0, err
        name = f"'{other}'" if "(" in other else other
        assert f"--data: {name} " in err
        found = landscape.load("other.h5")
        assert found.label == f"{own.label}, on {name}"
        assert abs(found.loss - own.loss).max() > 1e-3


def test_pictures_leave_nothing_open(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_number_is_a_square_grid() -> None:
    problem = problems.mlp()
    plane = landscape.random_plane(problem)
    for analysis in (landscape.contour, landscape.hessian_grid):
        assert analysis(problem, plane, grid=np.int64(2)).done.shape == (2, 2)
    for wrong in (2.5, (3,), (2, 3, 4), "51x25", (2, 2.0)):
        with pytest.raises(InputError, match="grid: "):
            landscape.contour(problem, plane, grid=wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_demo(tmp_path: Path, command: Command) -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            code, out, _ = command("demo", "-o", tmp_path / f"demo-{threads}", "-q")
        finally:
            torch.set_num_threads(1)
        assert code == 0
    folder, other = tmp_path / "demo-1", tmp_path / "demo-2"
    for name in ("training", "contour", "noise"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in out
    assert (folder / "learners.gif").read_bytes().startswith(b"GIF89a")
    surfaces, again = (landscape.load(place / "contour.h5") for place in (folder, other))
    assert len(surfaces) == 10
    for one, two in zip(surfaces, again, strict=True):  # to the last bit, whatever the number of threads
        np.testing.assert_array_equal(one.loss, two.loss)
    # What docs/tutorials/demo.md says of it.
    ss, dp = (
        [landscape.load(folder / f"{name}-{seed}").history for seed in range(5)] for name in ("ssgd", "dpsgd")
    )

    def medians(runs: list[Any], column: str, first: int, last: int) -> Any:
        rows = [run[column][(run["step"] > first) & (run["step"] <= last)] for run in runs]
        return np.array([np.nanmedian(row) for row in rows])

    for runs, limit, said in ((ss, 2.0, 1.97), (dp, 1.0, 0.946)):
        edge = medians(runs, "lr_lambda_max", 50, 250)
        assert 0.67 < np.median(edge) / limit < 1.5
        assert np.median(edge) == pytest.approx(said, rel=0.2)
    assert (medians(ss, "lambda_max", 250, 500) > medians(dp, "lambda_max", 250, 500)).all()
    assert np.median(medians(dp, "delta", 0, 50) / medians(ss, "delta", 0, 50)) > 1.5
    assert np.median(medians(dp, "alpha_e", 0, 50)) < 0.8 * np.median(medians(ss, "alpha_e", 0, 50))
    rises = np.array([median_rise(surface) for surface in surfaces]).reshape(2, 5)
    assert (rises[0] > rises[1]).all()
    errors = [[1 - run["test_accuracy"][-1] for run in runs] for runs in (ss, dp)]
    assert max(map(min, errors)) <= min(map(max, errors))  # the ranges overlap
    early = landscape.load(folder / "noise.h5")[0]
    shares = early.means()
    assert shares["direct"][0] > 0.9 * (shares["direct"][0] + shares["delta_s"][0])
