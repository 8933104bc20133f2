"""landscape watch: what it says of a run, while the run goes on and after it, and that it takes no lock."""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import landscape
from landscape.cli.watch import Row, curve, line, look, rows, view
from landscape.core.files import Lock, in_use
from landscape.core.progress import duration
from landscape.training.recipes import recipe
from landscape.training.run import launch
from tests.conftest import Command

SMALL = (
    "steps=40",
    "checkpoint.every=20",
    "monitor={sharpness = 10, instruments = ['noise-scale', 'batch-sharpness'], every = 10, draws = 2}",
    "evaluate.every=10",
    "model.widths=[64, 8, 10]",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "dp"
    launch.launch(recipe.read("digits-dpsgd", SMALL), folder)
    return folder


def test_it_prints_an_ended_run_once(run: Path, command: Command) -> None:
    code, out, _ = command("watch", run, "--once")
    assert code == 0
    assert "dpsgd, seed 0, step 40 of 40 (100%), ended" in out
    for word in ("loss", "α_e", "noise Δ", "consensus distance", "samples/s", "test error"):
        assert word in out
    history = landscape.load(run / "last.h5").history
    known = history["lr_lambda_max"][np.isfinite(history["lr_lambda_max"])]
    assert f"{known[-1]:.4g} of 1 ({known[-1]:.0%} of the limit)" in out
    sharp = f"η × batch sharpness: {history['lr_batch_sharpness'][-1]:.4g} of 1"
    assert sharp in out
    for k in np.flatnonzero(np.isfinite(history["noise_scale"]))[-1:]:  # NaN where ‖g‖² is not told from 0
        scale = f"{history['noise_scale'][k]:.4g} ± {history['noise_scale_se'][k]:.2g}"
        assert f"noise scale (samples): {scale}" in out
    assert not (run / ".lock").exists()


def test_without_a_terminal_it_prints_plain_lines_and_ends(run: Path, command: Command) -> None:
    code, out, _ = command("watch", run)
    assert code == 0
    assert len(out.splitlines()) == 1
    assert out.isprintable() or out[:-1].isprintable()


@pytest.mark.slow
def test_it_follows_a_run_of_another_process_until_that_ends(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], command: Command
) -> None:
    sets = [word for setting in (*SMALL[1:], "steps=300") for word in ("--set", setting)]
    training = start("train", "digits-dpsgd", "-o", tmp_path / "run", *sets)
    for _ in range(600):
        if in_use(tmp_path / "run"):
            break
        time.sleep(0.05)
    code, out, err = command("watch", tmp_path / "run", "--every", "0.2")
    assert training.wait() == 0
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "step 300 of 300 (100%), ended" in lines[-1]
    assert any(" left, saved " in text for text in lines[:-1])


def test_a_recorders_run(tmp_path: Path, command: Command) -> None:
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy
    recorder = landscape.Recorder(
        tmp_path / "mine", model, loss, (x, y), every=2, save_every=4, optimizer=optimizer
    )
    for step in range(8):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        with recorder.step():
            optimizer.step()
        if step == 5:
            status = look(tmp_path / "mine")
            assert (status.state, status.end.step if status.end else 0) == ("running", 4)
    recorder.close()
    status = look(tmp_path / "mine")
    assert (status.state, status.steps) == ("ended", 0)
    assert "step 8, ended" in line(status)
    assert command("watch", tmp_path / "mine", "--once")[0] == 0


def test_states(run: Path, tmp_path: Path, command: Command) -> None:
    code, _, err = command("watch", tmp_path / "none")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "no such folder" in err
    assert "holds no run" in command("watch", tmp_path)[2]
    assert "it must be" in command("watch", run, "--every", "0")[2]
    with Lock(tmp_path) as lock:
        lock.acquire()
        assert look(tmp_path).state == "waiting"
        assert "not written a file yet" in command("watch", tmp_path, "--once")[2]
    (tmp_path / "last.h5").write_bytes((run / "step-0000020.h5").read_bytes())
    assert look(tmp_path).state == "stopped"
    with Lock(tmp_path) as lock:
        lock.acquire()
        status = look(tmp_path)
        assert status.state == "running"
        assert status.left_s >= 0
    (tmp_path / "last.h5").write_bytes(b"damaged")
    assert command("watch", tmp_path, "--once")[0] == 1


def test_a_lock_is_seen_and_not_taken(tmp_path: Path) -> None:
    assert not in_use(tmp_path)
    for words, used in (
        (f"process {os.getpid()} on {socket.gethostname()} since now\n", True),
        (f"process 999999999 on {socket.gethostname()} since now\n", False),
        (f"process {10**30} on {socket.gethostname()} since now\n", False),
        ("process 1 on another-machine since now\n", True),
        ("", True),
        ("anything", True),
    ):
        (tmp_path / ".lock").write_text(words)
        assert in_use(tmp_path) == used
        assert (tmp_path / ".lock").read_text() == words
    os.utime(tmp_path / ".lock", (0, 0))  # what nobody has written his name to for so long, nobody will
    assert not in_use(tmp_path)


def test_the_page_follows_a_folder_that_grows_and_gives_nothing_else(
    run: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = tmp_path / "dp", []
    folder.mkdir()
    (tmp_path / "secret.h5").write_bytes(b"secret")
    serve = ThreadingHTTPServer.serve_forever

    def visit(server: ThreadingHTTPServer) -> None:
        def get(path: str, **headers: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection(opened[0].split("/")[2])
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        threading.Thread(target=serve, args=(server,), daemon=True).start()
        assert "waiting for its first file" in get("/")[1]
        shutil.copy(run / "step-0000020.h5", folder / "last.h5")
        first = json.loads(get("/data")[1])
        shutil.copy(run / "last.h5", folder)
        problem = landscape.load(run).problem()
        surface = landscape.contour(problem, landscape.random_plane(problem), grid=3)
        surface.save(folder / "c.h5")
        second = json.loads(get("/data")[1])
        for one, step in ((first, 20), (second, 40)):
            assert f"step {step} of 40" in one["ran"]
            assert one["charts"]["curve-train_loss"]["figure"]["data"][0]["x"][-1] == step
        assert [len(one["surfaces"]) for one in (first, second)] == [0, 1]
        np.testing.assert_allclose(second["surfaces"][0]["z"], surface.loss, rtol=1e-5)
        assert '<div class="plot"' in get("/")[1]
        (folder / "d.h5").write_bytes(b"damaged")
        third = json.loads(get("/data")[1])
        assert third["surfaces"] == second["surfaces"]
        assert "d.h5: not a readable HDF5 file" in third["findings"][-1]
        (folder / "last.h5").write_bytes(b"damaged")
        assert "last.h5: not a readable HDF5 file" in json.loads(get("/data")[1])["ran"]
        for path in ("/secret.h5", "/../secret.h5", "/last.h5", "/c.h5", "//etc/passwd", "/data/.."):
            assert get(path)[0] == 404
        for host in ("example.org", "localhost", f"example.org:{server.server_port}"):
            assert get("/data", Host=host)[0] == 403
        server.shutdown()
        raise KeyboardInterrupt  # as Ctrl-C does

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", visit)
    monkeypatch.setattr("webbrowser.open", opened.append)
    with Lock(folder) as lock:
        lock.acquire()
        code, out, err = command("watch", folder, "--open")
    assert (code, len(err.strip().splitlines())) == (130, 1)  # after the end of the line with ^C
    assert out == f"{opened[0]}\n"
    assert out.startswith("http://127.0.0.1:")
    assert "only one of the two" in command("watch", folder, "--open", "--once")[2]


def test_curves_and_durations() -> None:
    steps = np.arange(400.0)
    assert curve(Row("a", "", steps, steps - 200))[0] == "▁"
    assert len(curve(Row("a", "", steps, np.ones(400)))) == 40
    assert curve(Row("a", "", steps[:1], np.ones(1))) == "▁"
    assert [duration(s) for s in (59.6, 3599.6)] == ["1 min 0 s", "1 h 0 min"]


def test_rows_leave_out_what_was_not_recorded(run: Path) -> None:
    end = landscape.load(run / "last.h5")
    end.history["lr_lambda_max"][:] = np.nan
    assert "ηλ_max" not in [row.name for row in rows(end)]


def test_the_view_of_a_terminal_keeps_the_numbers_when_it_is_narrow(run: Path) -> None:
    status = look(run)
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(view(status))
    shown = console.export_text()
    assert status.end is not None
    for row in rows(status.end):
        assert row.text in shown
    assert "▁" in shown
