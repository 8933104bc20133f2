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
from landscape.train.recipes import recipe
from landscape.train.run import launch
from tests.conftest import Command


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


@pytest.mark.parametrize(
    "more",
    [(), ("-q",), pytest.param(("-q", "--nproc", "2"), marks=pytest.mark.slow), ("-q", "--set", "lr=1e30")],
)
def test_a_run_that_diverged_always_says_so(more: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    settings = [
        "lr=2.5",
        "data={name='quadratic', dimension=2}",
        "model={name='quadratic', eigenvalues=[1.0, 2.0]}",
        "learners=2",
    ]
    flags = [part for s in settings for part in ("--set", s)]
    code, out, err = command("train", "digits-ssgd", *flags, *more, "-o", tmp_path / "r")
    assert code == 3
    assert len([line for line in err.splitlines() if "landscape: " in line]) == 1
    assert f"{tmp_path}/r: diverged at step" in err
    assert "the mean" in err
    if "--nproc" not in more:  # whose processes print it themselves
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
    assert (a.split, a.norm, a.span, a.seed, a.path) == ("train", "none", 0.1, 0, "batched")
    assert a.source_sha256 == landscape.core.hdf5.sha256(files[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    center = landscape.load(files[0]).problem()
    again = landscape.contour(center, landscape.random_plane(center), grid=(4, 3))
    np.testing.assert_array_equal(again.loss, a.loss)


def test_hessian_grid_noise_info_and_plot(runs: Path, tmp_path: Path, command: Command) -> None:
    checkpoint = runs / "dp" / "step-0000010.h5"
    h, n = tmp_path / "h.h5", tmp_path / "n.h5"
    assert command("hessian-grid", checkpoint, "--grid", "2", "--dtype", "float64", "-o", h)[0] == 0
    assert landscape.load(h).dtype == "float64"
    code, out, _ = command("noise", checkpoint, "--draws", "4", "-o", n)
    assert code == 0
    for words in ("by definition", "on the full batch", "Eq. 4", "first order", "cross term", "±", "exact"):
        assert words in out
    for file, suffix in ((h, ".png"), (n, ".pdf"), (checkpoint, ".svg")):
        picture = tmp_path / f"p{suffix}"
        code, out, _ = command("plot", file, "-o", picture)
        assert (code, out) == (0, f"{picture}\n")
        assert picture.stat().st_size > 1000
    for file, words in ((h, "lambda_max"), (n, "eq4"), (checkpoint, "recipe:")):
        code, out, _ = command("info", file)
        assert code == 0
        assert words in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.h5", "n.h5", "p.pdf", "p.png", "p.svg"]


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
    before = sorted(tmp_path.iterdir())
    one_line(command("plot", files[0], "-o", tmp_path / "z.vts"), 2, "only a surface", "Checkpoint")
    one_line(command("plot", one, "--style", "difference", "-o", tmp_path / "z.png"), 2, "takes two")
    one_line(
        command("plot", files[0], "--style", "surface", "-o", tmp_path / "z.png"), 2, "'surface'", "contour"
    )
    one_line(command("plot", one, "--style", "surfac", "-o", tmp_path / "z.png"), 2, "did you mean 'surface'")
    assert sorted(tmp_path.iterdir()) == before


def test_planes_that_checkpoints_do_not_make(
    runs: Path, tiny: Path, tmp_path: Path, command: Command
) -> None:
    dp, ss = runs / "dp" / "last.h5", runs / "ss" / "last.h5"
    out = ("-o", tmp_path / "x.h5", "--grid", "2")
    plane = ("contour", *out, "--plane")
    assert command("train", tiny, "-o", tmp_path / "other", "-q")[0] == 0
    other = tmp_path / "other" / "last.h5"
    alone = tmp_path / "alone" / "last.h5"
    alone.parent.mkdir()
    shutil.copy(dp, alone)
    with h5py.File(alone, "a") as file:
        file["weights"][:] = file["weights"][0]
    one_line(command(*plane, "between", dp), 2, "--plane between: 1 checkpoints", "two or three")
    one_line(command(*plane, "between", dp, ss, dp, ss), 2, "4 checkpoints", "two or three")
    one_line(command(*plane, "between", dp, dp), 1, "equal, they must differ")
    one_line(
        command(*plane, "between", dp, other), 1, "other/last.h5: its layout of 83 weights", "is not that of"
    )
    one_line(command(*plane, "random", dp, other), 1, "share no directions")
    one_line(command("line", dp, other, "-o", tmp_path / "x.h5"), 1, "is not that of")
    one_line(command(*plane, "pca", alone), 1, "alone/last.h5: 0 earlier step-*.h5", "at least 2")
    one_line(command(*plane, "pca", runs / "dp" / "step-0000010.h5"), 1, "1 earlier", "at least 2")
    one_line(command(*plane, "learners", alone), 1, "alone/last.h5", "all 5 are equal")
    one_line(command(*plane, "learner", dp), 2, "did you mean 'learners'")
    one_line(command(*plane, "pca", dp, "--norm", "filter"), 2, "random planes", "pca")
    one_line(command(*plane, "eigen", dp, "--ignore", "none"), 2, "random planes", "eigen")
    one_line(command("contour", *out, dp, "--ignore", "bias"), 2, "ignore", "bias+norm")
    one_line(command("contour", *out, dp, "--bn", "batch"), 2, "bn", "recalibrate")
    one_line(command("contour", *out, dp, "--bn-samples", "1"), 2, "bn_samples", "≥ 2")
    one_line(command("line", dp, ss, dp), 2, "3 checkpoints", "one or two")
    one_line(command("line", dp, ss, "--span", "1"), 2, "--span", "one CKPT")
    one_line(command("line", dp, "--points", "1", "-o", tmp_path / "x.h5"), 2, "points", "≥ 2")
    for key, old, new, words in (
        ("model", '"relu"', '"tanh"', "its model mlp"),
        ("data", '"fingerprint": "', '"fingerprint": "0', "trained on other data"),
    ):
        changed = tmp_path / f"{key}.h5"
        shutil.copy(ss, changed)
        with h5py.File(changed, "a") as file:
            assert old in file.attrs[key]
            file.attrs[key] = file.attrs[key].replace(old, new)
        one_line(command(*plane, "between", dp, changed), 1, f"{key}.h5", words)
        one_line(command("line", dp, changed, "-o", tmp_path / "x.h5"), 1, f"{key}.h5", words)
    with h5py.File(alone, "a") as file:
        file["weights"][1, 3] = np.inf
    one_line(command("line", dp, alone, "-o", tmp_path / "x.h5"), 1, "alone/last.h5", "NaN or infinite")
    one_line(command(*plane, "between", dp, alone), 1, "NaN or infinite")
    assert not (tmp_path / "x.h5").exists()


def test_recipes_lists_and_prints(command: Command) -> None:
    code, out, _ = command("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if " n = " in line] == recipe.built_in()
    code, out, _ = command("recipes", "mnist-fig2b-dpsgd")
    assert 'mixing = "ring(2)"' in out
    one_line(command("recipes", "mnist-fig2c-dpsgd"), 2, "did you mean 'mnist-fig2b-dpsgd'")


def test_bad_usage(runs: Path, tmp_path: Path, command: Command) -> None:
    dp = runs / "dp" / "last.h5"
    one_line(
        command("contour", dp, "--grid", "0", "-o", tmp_path / "x.h5"), 2, "--grid", "'0'", "numbers ≥ 1"
    )
    one_line(command("contour", dp, "--grid", "4y4", "-o", tmp_path / "x.h5"), 2, "--grid", "51x25")
    one_line(command("contour", dp, "--span", "-1", "-o", tmp_path / "x.h5"), 2, "span", "-1.0", "> 0")
    one_line(command("contour", dp, "--span", "nan", "-o", tmp_path / "x.h5"), 2, "span", "nan")
    one_line(command("contour", dp, "--span", "wide"), 2, "--span", "'wide'")
    one_line(command("contour", dp, "--norm", "filer", "-o", tmp_path / "x.h5"), 2, "did you mean 'filter'")
    one_line(command("contour", dp, "--split", "tset", "-o", tmp_path / "x.h5"), 2, "did you mean 'test'")
    one_line(command("contour", dp, "--path", "fast"), 2, "--path", "batched")
    one_line(command("contour", dp, "--dtype", "half", "-o", tmp_path / "x.h5"), 2, "--dtype", "'half'")
    one_line(command("contour", dp, "-o", tmp_path / "x.txt"), 2, "x.txt", ".h5")
    one_line(command("contour", dp, "--plot", tmp_path / "x.bmp"), 2, "x.bmp", ".png, .pdf, .svg")
    one_line(command("contour", dp, "--device", "tpu", "-o", tmp_path / "x.h5"), 2, "--device", "auto")
    one_line(command("contour", dp, "-o", dp), 1, "is a checkpoint, it is not overwritten")
    one_line(command("contour"), 2, "CKPT")
    one_line(command("hessian-grid", dp, "--tol", "0", "-o", tmp_path / "x.h5"), 2, "tol", "0")
    one_line(command("noise", dp, "--draws", "1", "-o", tmp_path / "x.h5"), 2, "draws", "1", "≥ 2")
    one_line(command("plot", dp, runs / "none.h5", "-o", tmp_path / "x.png"), 1, "none.h5: no such file")
    one_line(command("contuor"), 2, "contuor")
    one_line(command("train"), 2, "RECIPE")
    one_line(command("train", "--set", "lr=1"), 2, "--set")
    one_line(
        command("train", "digits-ssgd", "--resume", "--force", "-o", tmp_path / "x"), 2, "only one of the two"
    )
    one_line(command("train", "--resume", "-o", tmp_path / "x"), 1, "holds no run to resume")
    one_line(command("train", "digits-ssgd", "--set", "learners=0", "-o", tmp_path / "x"), 2, "learners: 0")
    one_line(
        command("train", "digits-ssgd", "--set", "batch=7", "-o", tmp_path / "x"), 2, "batch: 7", "5 learners"
    )
    one_line(command("train", "digits-ssgd", "-o", runs / "ss"), 1, "holds a run already", "--resume")
    assert list(tmp_path.iterdir()) == []


def test_bad_files(runs: Path, tmp_path: Path, command: Command) -> None:
    good = (runs / "dp" / "last.h5").read_bytes()
    made = {
        "cut": good[: len(good) // 2],
        "text": b"not a file of ours",
        "empty": b"",
        "newer": good,
        "naninf": good,
        "other-data": good,
    }
    for name, raw in made.items():
        (tmp_path / f"{name}.h5").write_bytes(raw)
    with h5py.File(tmp_path / "newer.h5", "a") as file:
        file.attrs["version"] = 2
    with h5py.File(tmp_path / "naninf.h5", "a") as file:
        file["weights"][0, 3] = np.nan
    with h5py.File(tmp_path / "other-data.h5", "a") as file:
        file.attrs["data"] = file.attrs["data"].replace('"fingerprint": "', '"fingerprint": "0')
    before = sorted(tmp_path.iterdir())
    for name, words in (
        ("cut", "not a readable HDF5 file"),
        ("text", "not a readable HDF5 file"),
        ("empty", "not a readable HDF5 file"),
        ("newer", "version 2 is newer than 1"),
        ("naninf", "NaN or infinite"),
        ("other-data", "fingerprint"),
        ("none", "no such file"),
    ):
        for analysis in ("contour", "hessian-grid", "noise"):
            one_line(command(analysis, tmp_path / f"{name}.h5", "-o", tmp_path / "x.h5"), 1, words)
    one_line(command("info", tmp_path / "cut.h5"), 1, "cut.h5")
    one_line(command("plot", tmp_path / "text.h5"), 1, "text.h5")
    assert sorted(tmp_path.iterdir()) == before


def test_a_checkpoint_whose_data_is_not_there(tmp_path: Path, runs: Path, command: Command) -> None:
    shutil.copy(runs / "dp" / "last.h5", tmp_path / "m.h5")
    with h5py.File(tmp_path / "m.h5", "a") as file:
        file.attrs["data"] = json.dumps(json.loads(file.attrs["data"]) | {"name": "mnist", "options": {}})
    one_line(
        command("contour", tmp_path / "m.h5", "--data-dir", tmp_path, "-o", tmp_path / "x.h5"),
        1,
        "train-images-idx3-ubyte[.gz] is not in",
        "--data-dir",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, runs: Path, command: Command) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    one_line(
        command("contour", runs / "dp" / "last.h5", "--grid", "2", "-o", folder / "x.h5"), 1, "Permission"
    )
    one_line(command("train", "digits-ssgd", "-o", folder / "run"), 1, "Permission")


def test_a_path_that_cannot_be_a_folder(tmp_path: Path, runs: Path, command: Command) -> None:
    (tmp_path / "file").write_text("x")
    one_line(command("train", "digits-ssgd", "-o", tmp_path / "file"), 1, "cannot be")
    one_line(
        command("contour", runs / "dp" / "last.h5", "-o", tmp_path / "file" / "x.h5"), 1, "cannot be made"
    )
    one_line(command("plot", runs / "dp" / "last.h5", "-o", tmp_path / "file" / "x.png"), 1, "cannot be made")


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
