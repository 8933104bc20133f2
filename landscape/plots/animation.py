"""Films: the learners of a run on the landscape that moves with their mean, and a dial of ηλ_max."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import animation, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.core.errors import InputError, OperationError
from landscape.core.files import read_regular, replacing
from landscape.core.hdf5 import Array
from landscape.core.options import ends_in
from landscape.core.progress import Progress
from landscape.plots import drawable, style, surface
from landscape.plots.picture import caption, panels
from landscape.results.surfaces import Surface

FORMATS = (".gif", ".mp4")
LINES = 10  # of a frame (our choice)
_LINE: dict[str, Any] = {"colors": "w", "linewidths": 0.6, "alpha": 0.8}


@dataclass(frozen=True)
class Frame:
    """One moment of a film: the surface around w_a with the learners as its markers, w_a the last.

    Attributes:
        step: of the run.
        lr_lambda_max, limit: ηλ_max at w_a, and its largest stable value; NaN if unknown.
        loss: the training loss of the run there; NaN if unknown.
    """

    surface: Surface
    step: int
    lr_lambda_max: float
    limit: float
    loss: float = np.nan


def film(frames: Sequence[Frame], algorithm: str) -> tuple[Figure, Callable[[int], None]]:
    """Return the learners on the landscape around their mean, by step, beside a dial of ηλ_max.

    All frames have the same levels and colors.

    Args:
        frames: in the order of their steps.
        algorithm: that of the run, such as "dpsgd".

    Returns:
        A figure, and the function that draws frame k into it.

    Raises:
        InputError: no frame, or no loss that is finite.
    """
    if not frames:
        raise InputError("animate: no frame, there is nothing to draw")
    surfaces = [drawable(frame.surface) for frame in frames]
    with style.style():
        figure, (ax, dial) = panels(1, 2, 4.6, 4.6, ["surface", "dial"], width_ratios=(1.6, 1.0))
        chosen = surface.scale([r.loss for r in surfaces])
        # With a norm of its own: contourf changes the other one in each frame, which would reset the labels.
        surface.color_bar(
            figure, ax, copy.deepcopy(chosen.norm), surface.CMAP, f"loss{style.unit(surfaces[0], 'loss')}"
        )
        caption(figure, f"{surface.settings(surfaces[:1], chosen.why)} Lines: levels of the frame.")
    values = [v for f in frames for v in (f.lr_lambda_max, f.limit) if np.isfinite(v)]
    top = 1.15 * max(values, default=2.0)

    def draw(k: int) -> None:
        frame, r = frames[k], surfaces[k]
        with style.style():
            for part in (ax, dial):
                part.clear()
            _draw_surface(ax, r, chosen)
            _draw_dial(dial, frame, top, style.color_of(algorithm))
            loss = f", training loss {frame.loss:.3g} nat" if np.isfinite(frame.loss) else ""
            figure.suptitle(f"{style.paper_name(algorithm)}, step {frame.step:,}{loss}")

    return figure, draw


def _draw_surface(ax: Axes, r: Surface, chosen: surface.LevelScale) -> None:
    masked = np.ma.masked_invalid(r.loss)
    surface.map_axes(ax)
    ax.contourf(r.x, r.y, masked, chosen.levels, extend="max", cmap=surface.CMAP, norm=chosen.norm)
    low, high = float(masked.min()), float(masked.max())
    if low < high:  # what the frame looks like, also where one color covers it
        ax.contour(r.x, r.y, masked, np.linspace(low, high, LINES + 2)[1:-1], **_LINE)
    reach = np.abs([r.x[0], r.y[0]])
    learners, mean = r.markers[:-1], r.markers[-1]
    inside: Array = np.all(np.abs(learners) <= reach, axis=1)
    ax.plot(*learners[inside].T, label="learners", **surface.LEARNER)
    edge = np.clip(learners[~inside], -0.97 * reach, 0.97 * reach)
    ax.plot(*edge.T, label="outside", **{**surface.LEARNER, "mfc": "none"})
    ax.plot(*mean, label="$w_a$", **surface.MEAN)
    ax.set(xlim=(r.x[0], r.x[-1]), ylim=(r.y[0], r.y[-1]))
    surface.label_axes(ax, r)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _draw_dial(ax: Axes, frame: Frame, top: float, color: str) -> None:
    """Draw a half circle from 0 to ``top`` with a needle; beyond the limit its rim has a warning color."""

    def at(value: Any, radius: float) -> tuple[Any, Any]:
        angle = np.pi * (1 - value / top)
        return radius * np.cos(angle), radius * np.sin(angle)

    def rim(low: float, high: float, color: str, **look: Any) -> None:
        ax.plot(*at(np.linspace(low, high, 60), 1.0), color=color, lw=9, solid_capstyle="butt", **look)

    middle: dict[str, Any] = {"ha": "center", "va": "center"}
    limit = frame.limit if np.isfinite(frame.limit) else top
    rim(0.0, limit, style.PALE)
    if np.isfinite(frame.limit):
        rim(limit, top, style.RED, alpha=0.75)
        ax.text(*at(limit, 1.17), f"limit\n{limit:.3g}", fontsize=8.5, **middle)
    for tick in ticker.MaxNLocator(4).tick_values(0, top):
        if tick <= top:
            ax.text(*at(tick, 0.82), f"{tick:g}", fontsize=8, color=style.DARK, **middle)
    words = r"$\eta\lambda_{max}$ not known"
    if np.isfinite(frame.lr_lambda_max):
        x, y = at(min(max(frame.lr_lambda_max, 0.0), top), 0.93)
        ax.plot([0, x], [0, y], color=color, lw=3)
        words = rf"$\eta\lambda_{{max}}$ = {frame.lr_lambda_max:.2f}"
    ax.plot(0, 0, "o", color=color, ms=8)
    ax.text(0, -0.22, words, ha="center", va="top")
    ax.set(xlim=(-1.35, 1.35), ylim=(-0.6, 1.35), aspect="equal")
    ax.axis("off")


def save_film(
    frames: Sequence[Frame], algorithm: str, path: Path, fps: int, dpi: float, progress: Progress
) -> None:
    """Write the :func:`film` to ``path``; a file that exists is replaced only once the new one is whole.

    Args:
        frames, algorithm: as of :func:`film`.
        path: .gif or .mp4, as ``check_film`` allows it.
        fps: frames per second.
        dpi: pixels per inch.
        progress: called with the share of the frames that are drawn.

    Raises:
        OperationError: ffmpeg fails, or the file cannot be written.
    """
    figure, draw = film(frames, algorithm)
    kind = animation.PillowWriter if path.suffix == ".gif" else animation.FFMpegWriter
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"film{path.suffix}")
        writer = kind(fps=fps)
        try:
            with style.style(), writer.saving(figure, str(target), dpi):
                for k in range(len(frames)):
                    draw(k)
                    writer.grab_frame()
                    figure.set_layout_engine("none")  # panels stay where the first frame has them
                    progress((k + 1) / len(frames))
        except (OSError, RuntimeError) as error:
            words = " ".join(str(error).split())[:120]
            raise OperationError(f"{path}: the film cannot be written ({words})") from error
        with replacing(path) as file:
            file.write(read_regular(target))


def check_film(path: Path) -> None:
    """Check that a film of this name can be written here.

    Raises:
        InputError: another suffix than .gif and .mp4.
        OperationError: an .mp4 without ffmpeg.
    """
    ends_in("-o", path, FORMATS)
    if path.suffix == ".mp4" and shutil.which("ffmpeg") is None:
        raise OperationError(f"{path}: an .mp4 needs ffmpeg, not installed here; install it, or write a .gif")
