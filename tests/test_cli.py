"""The commands as a user meets them: what they write and print, and one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import landscape
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests.conftest import TINY, Command


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs on the bundled digits, made once: the folders ss and dp."""
    folder = tmp_path_factory.mktemp("runs")
    for name, short in (("ssgd", "ss"), ("dpsgd", "dp")):
        small = ["steps=20", "checkpoint.every=10", "model.widths=[64, 8, 10]"]
        launch.launch(recipe.read(f"digits-{name}", small), folder / short)
    return folder


def one_line(result: tuple[int, str, str], code: int, *words: str) -> None:
    """The command failed with ``code``, printed nothing on stdout and one line with ``words`` on stderr."""
    assert result[0] == code, result
    assert result[1] == ""
    assert result[2].startswith("landscape: ")
    assert result[2].count("\n") == 1, result[2]
    for word in words:
        assert word in result[2]


def test_train_writes_its_files_and_names_the_checkpoint(
    tiny: Path, tmp_path: Path, command: Command
) -> None:
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


def test_contour_of_several_checkpoints_shares_directions(
    runs: Path, tmp_path: Path, command: Command
) -> None:
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
    code, out, _ = command(
        "contour", *files, "--plane", kind, "--grid", "3x4", "-o", out_file, "--plot", picture
    )
    assert (code, out.split()[-2:]) == (0, [str(out_file), str(picture)])
    s = landscape.load(out_file)
    runs_ = [landscape.load(f) for f in files]
    problem = runs_[0].problem()
    assert s.kind == kind
    if kind == "eigen":
        assert s.span == 0.1
        assert "λ_max" in out
        return
    np.testing.assert_allclose(s.span, 1.25 * np.abs(s.markers).max())
    if kind == "between":
        assert s.labels == tuple(r.label for r in runs_)
        np.testing.assert_allclose(s.marker_loss, [problem.loss(r.mean) for r in runs_], rtol=1e-6)
        assert re.search(rf"loss of {s.labels[1]} +{s.marker_loss[1]:.6g} nat", out)
    if kind == "pca":  # step-0000020.h5 holds what last.h5 does and is not taken twice
        assert s.labels == ("step 0", "step 10", "step 20")
        assert re.search(r"share of the variance in the plane.* 3 places", out)
        assert s.explained.sum() == pytest.approx(1)
    if kind == "learners":
        losses = [problem.loss(w) for w in runs_[0].weights]
        np.testing.assert_allclose(s.marker_loss, [*losses, problem.loss()], rtol=1e-6)
        assert re.search(rf"loss of w_a +{problem.loss():.4g}", out)
        assert re.search(rf"mean loss of the learners +{np.mean(losses):.4g}", out)


def test_line_between_two_and_along_one(runs: Path, tmp_path: Path, command: Command) -> None:
    a, b, out_file = runs / "dp" / "last.h5", runs / "ss" / "last.h5", tmp_path / "l.h5"
    code, out, _ = command("line", a, b, "--points", "5", "-o", out_file, "--plot", tmp_path / "l.png")
    assert (code, out.split()[-2:]) == (0, [str(out_file), f"{tmp_path}/l.png"])
    between = landscape.load(out_file)
    problem, other = (landscape.load(f).problem() for f in (a, b))
    assert between.loss[0] == pytest.approx(problem.loss(), rel=1e-6)
    assert between.loss[-1] == pytest.approx(other.loss(), rel=1e-5)
    assert f"{between.barrier:.6g} nat" in out
    again = ("line", a, "--points", "5", "--seed", "4", "-o", out_file)
    one_line(command(*again), 1, "l.h5", "landscape.line", "--force")
    assert command(*again, "--force")[0] == 0
    along = landscape.load(out_file)
    np.testing.assert_array_equal(
        along.direction, landscape.random_plane(problem, seed=4).directions[0].numpy()
    )
    assert along.t[0] == -0.1


def test_plot_styles_and_export(runs: Path, tmp_path: Path, command: Command) -> None:
    both, one = tmp_path / "both.h5", tmp_path / "one.h5"
    files = [runs / "ss" / "last.h5", runs / "dp" / "last.h5"]
    assert command("contour", *files, "--grid", "3", "--ignore", "bias+norm", "-o", both)[0] == 0
    assert landscape.load(both)[0].ignore == "bias+norm"
    assert command("contour", files[0], "--grid", "3", "-o", one)[0] == 0
    for style in ("contour", "surface", "difference"):
        picture = tmp_path / f"{style}.svg"
        assert command("plot", both, "--style", style, "-o", picture)[:2] == (0, f"{picture}\n")
    code, out, _ = command("plot", both, "-o", tmp_path / "x.vts")
    assert (code, out) == (0, f"{tmp_path}/x-0.vts\n{tmp_path}/x-1.vts\n")
    assert command("plot", one, "-o", tmp_path / "y.vts")[1] == f"{tmp_path}/y.vts\n"
    assert command("plot", files[0], "-o", tmp_path / "run.pdf")[:2] == (0, f"{tmp_path}/run.pdf\n")
    before = sorted(tmp_path.iterdir())
    one_line(command("plot", files[0], "-o", tmp_path / "z.vts"), 2, "only a surface", "Checkpoint")
    one_line(command("plot", one, "--style", "difference", "-o", tmp_path / "z.png"), 2, "takes two")
    one_line(
        command("plot", files[0], "--style", "surface", "-o", tmp_path / "z.png"), 2, "'surface'", "contour"
    )
    one_line(command("plot", one, "--style", "surfac", "-o", tmp_path / "z.png"), 2, "did you mean 'surface'")
    assert sorted(tmp_path.iterdir()) == before


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
    ("contour --plane between dp", 2, ("--plane between: 1 checkpoints", "two or three")),
    ("contour --plane between dp ss dp ss", 2, ("4 checkpoints", "two or three")),
    ("contour --plane between dp dp", 1, ("equal, they must differ",)),
    ("contour --plane between dp other/", 1, ("other/last.h5: its layout of 83 weights", "is not that of")),
    ("contour --plane between dp infinite/", 1, ("NaN or infinite",)),
    ("contour --plane between dp model/", 1, ("model/last.h5", "its model mlp")),
    ("contour --plane between dp data/", 1, ("data/last.h5", "trained on other data")),
    ("contour dp other/", 1, ("share no directions",)),
    ("contour --plane pca equal/", 1, ("equal/last.h5: 0 earlier step-*.h5", "at least 2")),
    ("contour --plane pca early", 1, ("1 earlier", "at least 2")),
    ("contour --plane learners equal/", 1, ("equal/last.h5", "all 5 are equal")),
    ("contour --plane learner dp", 2, ("did you mean 'learners'",)),
    ("contour --plane pca dp --norm filter", 2, ("random planes", "pca")),
    ("contour --plane eigen dp --ignore none", 2, ("random planes", "eigen")),
    ("contour dp --ignore bias", 2, ("ignore", "bias+norm")),
    ("contour dp --bn-samples 1", 2, ("--bn-samples", "≥ 2")),
    ("line dp other/", 1, ("is not that of",)),
    ("line dp model/", 1, ("model/last.h5", "its model mlp")),
    ("line dp data/", 1, ("data/last.h5", "trained on other data")),
    ("line dp infinite/", 1, ("infinite/last.h5", "NaN or infinite")),
    ("line dp ss dp", 2, ("3 checkpoints", "one or two")),
    ("line dp ss --span 1", 2, ("--span", "one CKPT")),
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
    ("plot dp --title $\\frac{$ -o p.png", 2, ("--title", "formula")),
    ("train", 2, ("RECIPE",)),
    ("train --set lr=1", 2, ("--set",)),
    ("train digits-ssgd --resume --force -o x", 2, ("only one of the two",)),
    ("train --resume -o x", 1, ("holds no run to resume",)),
    ("train digits-ssgd -o ran", 1, ("holds a run already", "--resume")),
    ("train digits-ssgd -o file", 1, ("cannot be",)),
]


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


def test_recipes_lists_and_prints(command: Command) -> None:
    code, out, _ = command("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if " n = " in line] == recipe.built_in()
    assert 'mixing = "ring(2)"' in command("recipes", "mnist-fig2b-dpsgd")[1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, runs: Path, command: Command) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    one_line(
        command("contour", runs / "dp" / "last.h5", "--grid", "2", "-o", folder / "x.h5"), 1, "Permission"
    )
    one_line(command("train", "digits-ssgd", "-o", folder / "run"), 1, "Permission")


@pytest.mark.slow
def test_demo(tmp_path: Path, command: Command) -> None:
    texts = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            code, out, _ = command("demo", "-o", tmp_path / f"demo-{threads}", "-q")
        finally:
            torch.set_num_threads(1)
        assert code == 0
        texts.append(out.replace(f"demo-{threads}", "demo"))
    assert texts[0] == texts[1]  # to the last digit, whatever the number of threads
    for name in ("training", "contour", "noise"):
        assert (tmp_path / "demo-1" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in out
    assert (tmp_path / "demo-1" / "learners.gif").read_bytes().startswith(b"GIF89a")
    findings = [line for line in out.splitlines() if re.match(r"[1-9]\. ", line)]
    assert len(findings) == 5
    assert "trains at its own edge of stability" in findings[0]
    assert "follows the limits" in findings[1]
    assert "is flatter" in findings[3]
    assert len(re.findall(r"in 5 of 5 seeds more", " ".join(out.split()))) == 2
