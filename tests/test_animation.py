"""Films of a run's learners: what is in them, and one line where there can be none."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import landscape
from landscape.cli import plot
from landscape.cli.common import Source
from landscape.plots import animation
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests.conftest import Command
from tests.examples import parabola
from tests.test_cli import one_line

SMALL = ("steps=12", "checkpoint.every=4", "model.widths=[64, 8, 10]", "monitor.sharpness=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "dp"
    launch.launch(recipe.read("digits-dpsgd", SMALL), folder)
    return folder


def film(**changes: object) -> plot.Film:
    return plot.Film(**({"film_grid": 5} | changes), source=Source())  # type: ignore[arg-type]


def test_frames_are_the_checkpoints(run: Path) -> None:
    runs = plot.checkpoints(run / "last.h5", 60)
    assert [r.step for r in runs] == [4, 8, 12]  # at the start all learners are equal
    frames = plot.frames(runs, film(), lambda share: None)
    end = landscape.load(run / "last.h5")
    for frame, r in zip(frames, runs, strict=True):
        spread = (r.weights - r.weights.mean(0)).double().numpy()
        directions = frame.surface.directions
        np.testing.assert_allclose(directions @ directions.T, np.eye(2), atol=1e-5)
        np.testing.assert_allclose(frame.surface.markers[:-1], spread @ directions.T, atol=1e-5)
        np.testing.assert_array_equal(frame.surface.markers[-1], 0)
        np.testing.assert_allclose(frame.surface.center, r.mean.numpy(), rtol=1e-6)
        assert frame.lr_lambda_max == end.history["lr_lambda_max"][end.history["step"] == r.step]
        assert frame.limit == pytest.approx(1.0)  # 1 + ω_min of full averaging
    assert len({f.surface.span for f in frames}) == 1
    surface = frames[0].surface
    assert surface.marker_loss[-1] == pytest.approx(surface.loss[2, 2], rel=1e-4)


def test_a_gif_has_a_frame_for_each(run: Path, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "new" / "run.gif"
    options = "--animate", "learners", "--film-grid", "5", "--frames", "2"
    code, out, err = command("plot", run, *options, "-o", path)
    assert (code, out.strip()) == (0, str(path)), err
    with Image.open(path) as picture:
        assert (picture.format, picture.n_frames) == ("GIF", 2)  # type: ignore[attr-defined]


def test_the_dial_shows_the_limit_and_learners_outside() -> None:
    markers = np.array([[0.5, 0], [5, 5], [0, 0]])
    marked = dataclasses.replace(
        parabola(), kind="learners", markers=markers, marker_loss=np.ones(3), labels=("a", "b", "w_a")
    )
    known = animation.Frame(marked, 3, 0.8, 1.0, 0.2)
    figure, draw = animation.film([known, animation.Frame(marked, 4, np.nan, np.nan)], "dpsgd")
    draw(0)
    ax, dial = figure.axes[:2]
    by_name = {h.get_label(): h.get_xydata() for h in ax.lines}
    np.testing.assert_array_equal(by_name["learners"], [[0.5, 0]])
    np.testing.assert_allclose(by_name["learners outside"], [[0.97, 0.97]])
    assert "DPSGD, step 3" in figure.get_suptitle()
    assert "limit\n1" in [text.get_text() for text in dial.texts]
    draw(1)
    assert "not known" in dial.texts[-1].get_text()


def test_one_checkpoint_is_no_film(run: Path, tmp_path: Path, command: Command) -> None:
    alone = Path(shutil.copytree(run, tmp_path / "dp", ignore=shutil.ignore_patterns("step-*.h5")))
    film = command("plot", alone, "--animate", "learners", "-o", tmp_path / "a.gif")
    one_line(film, 1, "a film needs 2")
    one_line(command("plot", run, run, "--animate", "learners"), 2, "must be one run")


def test_mp4_by_ffmpeg(run: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.mp4"
    if shutil.which("ffmpeg"):
        assert command("plot", run, "--animate", "learners", "--film-grid", "3", "-o", path)[0] == 0
        assert b"ftyp" in path.read_bytes()[:16]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    other = tmp_path / "other.mp4"
    one_line(command("plot", run, "--animate", "learners", "-o", other), 1, "needs ffmpeg")
    assert not other.exists()
