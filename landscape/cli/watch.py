"""landscape watch"""

from __future__ import annotations

import math
import sys
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint
from landscape.checkpoint.history import latest
from landscape.cli import common, output
from landscape.cli.options import FOLDER, command
from landscape.cli.run_summary import against, numbers
from landscape.core.errors import InputError, OperationError
from landscape.core.files import in_use, printable
from landscape.core.hdf5 import Array
from landscape.core.options import positive
from landscape.core.progress import duration
from landscape.results.shown import running_quartiles

if TYPE_CHECKING:  # matplotlib is imported where there is a page
    from landscape.reports.parts import Page

# Rows of the history over which the speed is measured, and characters of a curve (ours).
RECENT, WIDTH = 100, 40
_BARS = "▁▂▃▄▅▆▇█"
# Columns of instruments, with their names in the view.
INSTRUMENTS = {
    "lr_batch_sharpness": "η × batch sharpness",
    "lr_learner_batch_sharpness": "the same at learners",
    "lr_preconditioned_lambda_max": "ηλ_max preconditioned",
    "noise_scale": "noise scale (samples)",
    "spread_share": "sharp share of spread",
    "gradient_share": "sharp share of gradient",
    "disagreement_cost": "½ tr(HC) (nat)",
    "noise_alignment": "tr(HS)/tr S (nat)",
    "worst_sharpness": "worst-case sharpness",
    "average_sharpness": "average sharpness",
}


@dataclass(frozen=True)
class Status:
    """How a run goes: the ``end`` so far (no weights; None before its first file), and what is known of it.

    ``steps`` is 0 where the number of steps is not known, as of a recorded loop. ``saved_s`` is the age of
    the last file, ``left_s`` the time left, NaN where it is not known; ``state`` is "waiting", "running",
    "ended", "diverged" or "stopped" (no process writes it, and it has not reached its last step).
    """

    folder: Path
    end: Checkpoint | None
    steps: int
    state: str
    saved_s: float
    left_s: float


@command(
    folder=FOLDER | {"argument": True}, every={"metavar": "S"}, opened={"flag": "--open", "is_flag": True}
)
def watch(*, folder: str, once: bool, every: float = 1.0, opened: bool = False) -> None:
    """Show the progress of a run while it trains.

    The run in DIR trains in another process.

    Shows the last numbers and the course of loss, α_e, Δ, consensus distance, ηλ_max against its limit, what
    else monitor.instruments measured, the samples per second and the time left, as of the run's last file,
    which a run writes every checkpoint.every steps (a Recorder: save_every). Ends when the run ends. Where
    stdout is no terminal, it prints a line for each file; with --json, one object when it ends.

    Args:
        once: Print it once, and do not wait.
        every: Seconds between two looks.
        opened: Show it in the browser, with the latest contour in DIR, on a page of this machine alone that
            refreshes itself; also after the run has ended. Ctrl-C ends the page.

    Example:
        landscape watch runs/dp
    """
    positive("--every", every)
    if once and opened:
        raise InputError("--once, --open: only one of the two is allowed")
    place = Path(folder)
    status = look(place)
    table = sys.stdout.isatty() and not output.current().as_json
    if opened:
        _serve(place, every)
    elif once:
        if status.end is None:
            raise OperationError(f"{place}: its run has not written a file yet")
        if table:
            Console().print(view(status))
        else:
            lines = [head(status), *(f"  {row.name}: {row.text}" for row in rows(status.end))]
            common.values("\n".join(lines), run=_numbers(status))
    elif table:
        with Live(view(status), auto_refresh=False) as live:
            _follow(place, status, every, lambda now: live.update(view(now), refresh=True))
    else:
        _follow(place, status, every, _lines())


def _follow(folder: Path, status: Status, every: float, show: Callable[[Status], None]) -> None:
    """Show the status of a run until no process writes it any more."""
    show(status)
    while status.state in ("waiting", "running"):
        time.sleep(every)
        status = look(folder)
        show(status)


def _serve(folder: Path, every: float) -> None:
    """Show the page of the run in ``folder`` in the browser until the command is interrupted."""
    from landscape.reports import live, page  # and matplotlib: only where something is drawn

    page.check_installed()
    look(folder)  # a folder without a run is refused before there is a page

    def make() -> Page:
        status = look(folder)
        told = (f"{row.name}: {row.text}" for row in rows(status.end)) if status.end else ()
        return page.build_now(folder, status.end, head(status), tuple(told))

    with live.server(make, str(folder), every) as server:
        url = f"http://{live.HOST}:{server.server_address[1]}/"
        common.values(url, url=url)
        webbrowser.open(url)
        server.serve_forever()


def _lines() -> Callable[[Status], None]:
    """A function that prints a line for each new file of a run, and one at its end."""
    seen: set[tuple[int, str]] = set()

    def show(status: Status) -> None:
        now = (status.end.step if status.end else -1, status.state)
        if now not in seen:
            seen.add(now)
            common.values(line(status), run=_numbers(status))

    return show


def _numbers(status: Status) -> dict[str, Any]:
    """The numbers of a run for --json: its last status."""
    known = numbers(status.end) if status.end else {}
    return {"folder": str(status.folder), "state": status.state, "steps": status.steps, **known}


def look(folder: Path) -> Status:
    """The status of the run in ``folder``; its lock is not taken, and of its file only the history is read.

    Raises:
        OperationError: no such folder, one without a run, or a damaged file.
    """
    if not folder.is_dir():
        raise OperationError(f"{folder}: no such folder; the folder of a run is needed")
    written = in_use(folder)  # before the file: a run that ends in between has then written its last one
    last = folder / "last.h5"
    if not last.exists():
        if not written and not (folder / "recipe.toml").exists():
            raise OperationError(f"{folder}: holds no run; that of landscape train or a Recorder is needed")
        return Status(folder, None, 0, "waiting" if written else "stopped", math.nan, math.nan)
    age = max(0.0, time.time() - last.stat().st_mtime)
    end = Checkpoint.load(last, learners=lambda n: slice(0))
    if end.algorithm == IMPORTED:
        raise OperationError(f"{last}: imported weights, there is no run to watch")
    steps = end.settings.get("steps", 0) if end.has_recipe else 0
    if end.diverged:
        state = "diverged"
    elif steps and end.step >= steps:
        state = "ended"
    elif written:
        state = "running"
    else:
        state = "stopped" if steps else "ended"
    left = (steps - end.step) * _seconds_a_step(end) - age if state == "running" and steps else math.nan
    return Status(folder, end, steps, state, age, max(0.0, left) if math.isfinite(left) else left)


def _seconds_a_step(end: Checkpoint) -> float:
    """Seconds a step over the last rows of the history; NaN for fewer than two."""
    steps, clock = end.history["step"][-RECENT:], end.history["wall_s"][-RECENT:]
    known = np.isfinite(clock)
    steps, clock = steps[known], clock[known]
    if len(steps) < 2 or steps[-1] <= steps[0]:
        return math.nan
    return float((clock[-1] - clock[0]) / (steps[-1] - steps[0]))


@dataclass(frozen=True)
class Row:
    """A line of the view: a name, the last number in words, and the values by step that its curve shows."""

    name: str
    text: str
    steps: Array
    values: Array


def rows(end: Checkpoint) -> list[Row]:
    """The rows of the view: those columns that the run recorded.

    α_e and Δ are the running median over 5% of the steps, with the quartiles.
    """
    shown = []
    named = {
        "loss": "minibatch loss (nat)",
        "train_loss": "training loss (nat)",
        "test_loss": "test loss (nat)",
        "test_accuracy": "test error (%)",
        "alpha_e": "effective rate α_e",
        "delta": "noise Δ",
        "consensus": "consensus distance",
        "lr_lambda_max": "ηλ_max",
        **INSTRUMENTS,
        "samples_per_s": "samples/s",
    }
    for column, name in named.items():
        known = np.isfinite(end.history.get(column, np.nan))
        if not known.any():
            continue
        steps, values = end.history["step"][known], end.history[column][known]
        if column == "test_accuracy":
            values = 100 * (1 - values)
        text = f"{values[-1]:.4g}"
        if column in ("alpha_e", "delta", "samples_per_s"):
            steps, (low, values, high) = running_quartiles(steps, values)
            text = f"{values[-1]:.3g}  ({low[-1]:.3g} to {high[-1]:.3g})"
        if column == "alpha_e":
            text += f", α = {end.history['lr'][-1]:.3g}"
        if column.startswith("lr_"):
            limit = "lr_preconditioned_limit" if "preconditioned" in column else "lr_lambda_limit"
            text += against(float(values[-1]), latest(end.history, limit))
        if column in INSTRUMENTS and f"{column}_se" in end.history:
            text += f" ± {end.history[f'{column}_se'][known][-1]:.2g}"
        shown.append(Row(name, text, steps, values))
    return shown


def curve(row: Row) -> str:
    """The values by step as a line of bars, from the lowest to the highest of them; log where all are > 0.

    Example:
        >>> curve(Row("loss", "3", np.arange(8.0), 2.0 ** np.arange(8)))
        '▁▂▃▄▅▆▇█'
    """
    values = np.log(row.values) if (row.values > 0).all() else row.values
    count = min(WIDTH, len(values))
    edges = np.linspace(row.steps[0], row.steps[-1], count + 1)
    places = np.clip(np.searchsorted(edges, row.steps, "right") - 1, 0, count - 1)
    means = [values[places == k].mean() if (places == k).any() else np.nan for k in range(count)]
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    span = high - low or 1.0
    return "".join(" " if np.isnan(m) else _BARS[round((m - low) / span * (len(_BARS) - 1))] for m in means)


def head(status: Status) -> str:
    """One line: the run, its step, its state and the time left."""
    if status.end is None:
        words = "waiting for its first file" if status.state == "waiting" else "stopped without a file"
        return f"{status.folder}: {words}"
    end = status.end
    of = f" of {status.steps:,} ({end.step / status.steps:.0%})" if status.steps else ""
    state = f"diverged at step {end.diverged_at:,}" if end.diverged else status.state
    parts = [f"{status.folder}: {end.algorithm}, seed {end.seed}", f"step {end.step:,}{of}", state]
    if math.isfinite(status.left_s):
        parts.append(f"{duration(status.left_s)} left")
    if status.state == "running":
        parts.append(f"saved {duration(status.saved_s)} ago")
    return ", ".join(parts)


def line(status: Status) -> str:
    """The status in one line, for a file or a pipe."""
    numbers = rows(status.end) if status.end else []
    return "; ".join([head(status), *(f"{row.name} {row.text}" for row in numbers)])


def view(status: Status) -> Group:
    """The status as a table, for a terminal. Texts are shown as they are, not as rich's markup."""
    shown = rows(status.end) if status.end else []
    table = Table(box=None, pad_edge=False)  # a narrow terminal cuts the curves, not the numbers
    table.add_column("", no_wrap=True, min_width=max((len(row.name) for row in shown), default=0))
    table.add_column("last", no_wrap=True, min_width=max((len(row.text) for row in shown), default=0))
    table.add_column("over the run", no_wrap=True)
    for row in shown:
        table.add_row(Text(row.name), Text(row.text), Text(curve(row)))
    return Group(Text(printable(head(status)), style="bold"), table)
