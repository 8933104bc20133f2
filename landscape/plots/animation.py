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
from landscape.core.options import ends_in
from landscape.core.progress import Progress
from landscape.plots import drawable, style, surface
from landscape.plots.picture import caption, panels
from landscape.results.surfaces import Surface

FORMATS = (".gif", ".mp4")
LINES = 10  # white contour lines in a frame (our choice)
_LINE: dict[str, Any] = {"colors": "w", "linewidths": 0.6, "alpha": 0.8}


@dataclass(frozen=True)
class Frame:
    """One frame of a film.

    Attributes:
        surface: the surface around w_a; its markers are the learners and, as the last, w_a.
        step: step of the run.
        lr_lambda_max, limit: ηλ_max at w_a, and its largest stable value; NaN if unknown.
        loss: training loss of the run at this step; NaN if unknown.
    """

    surface: Surface
    step: int
    lr_lambda_max: float
    limit: float
    loss: float = np.nan


def film(frames: Sequence[Frame], algorithm: str) -> tuple[Figure, Callable[[int], None]]:
    """Return a figure for the frames of a film, and the function that draws a frame into the figure.

    A frame has the learners on the landscape around their mean, beside a dial of ηλ_max. All frames have the
    same colors. The white lines of a frame have levels of their own.

    Args:
        frames: the frames, in the order of their steps.
        algorithm: name of the run's algorithm, such as "dpsgd".

    Returns:
        The figure; and the function, which takes the index of a frame.

    Raises:
        InputError: no frame, or no finite loss.
    """
    if not frames:
        raise InputError("animate: no frame, there is nothing to draw")
    surfaces = [drawable(frame.surface) for frame in frames]
    with style.style():
        figure, (ax, dial) = panels(1, 2, 4.6, 4.6, names=["surface", "dial"], width_ratios=(1.6, 1.0))
        level_scale = surface.scale([shown_surface.loss for shown_surface in surfaces])
        # contourf changes its norm in each frame. The color bar has a copy, so that its labels are not reset.
        norm = copy.deepcopy(level_scale.norm)
        surface.color_bar(figure, ax, norm, surface.CMAP, f"loss{style.unit(surfaces[0], 'loss')}")
        text = "White lines: levels of the frame. Dial: learning rate × sharpness, unstable above the limit."
        caption(figure, f"{surface.caption_of(surfaces[:1], level_scale.reason)} {text}")
    dial_values = [value for frame in frames for value in (frame.lr_lambda_max, frame.limit)]
    # 15% more than the largest finite value (our choice)
    dial_end = 1.15 * max(filter(np.isfinite, dial_values), default=2.0)

    def draw(index: int) -> None:
        frame = frames[index]
        with style.style():
            ax.clear()
            dial.clear()
            _draw_surface(ax, surfaces[index], level_scale)
            _draw_dial(dial, frame, dial_end, style.color_of(algorithm))
            loss_text = f", training loss {frame.loss:.3g} nat" if np.isfinite(frame.loss) else ""
            figure.suptitle(f"{style.paper_name(algorithm)}, step {frame.step:,}{loss_text}")

    return figure, draw


def _draw_surface(ax: Axes, r: Surface, level_scale: surface.LevelScale) -> None:
    """Draw a surface and its learners, where learners outside the grid are open markers at the edge."""
    masked = np.ma.masked_invalid(r.loss)
    surface.map_axes(ax)
    ax.contourf(r.x, r.y, masked, level_scale.levels, extend="max", cmap=surface.CMAP, norm=level_scale.norm)
    low, high = float(masked.min()), float(masked.max())
    if low < high:  # lines of the frame's own levels show its form where one color covers it
        ax.contour(r.x, r.y, masked, np.linspace(low, high, LINES + 2)[1:-1], **_LINE)
    limits = np.abs([r.x[0], r.y[0]])
    learners, mean = r.markers[:-1], r.markers[-1]
    inside = (np.abs(learners) <= limits).all(axis=1)
    ax.plot(*mean, label="mean of the learners", **surface.MEAN)
    ax.plot(*learners[inside].T, label="learners", **surface.LEARNER)
    at_edge = np.clip(learners[~inside], -0.97 * limits, 0.97 * limits)
    if len(at_edge):
        ax.plot(*at_edge.T, label="learners outside", **{**surface.LEARNER, "mfc": "none"})
    ax.set(xlim=(r.x[0], r.x[-1]), ylim=(r.y[0], r.y[-1]))
    surface.label_axes(ax, r)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _draw_dial(ax: Axes, frame: Frame, end: float, color: str) -> None:
    """Draw a dial of ηλ_max: a half circle for the values from 0 to ``end``, and a needle in ``color``.

    The rim beyond the limit is red.
    """

    def position(value: Any, radius: float) -> tuple[Any, Any]:
        """Return x and y of a value on the dial, at ``radius`` from its center; the rim is at radius 1."""
        angle = np.pi * (1 - value / end)  # from π, at the left, to 0
        return radius * np.cos(angle), radius * np.sin(angle)

    def draw_rim(low: float, high: float, rim_color: str, **look: Any) -> None:
        arc = position(np.linspace(low, high, 60), 1.0)
        ax.plot(*arc, color=rim_color, lw=9, solid_capstyle="butt", **look)

    centered: dict[str, Any] = {"ha": "center", "va": "center"}
    limit = frame.limit if np.isfinite(frame.limit) else end
    draw_rim(0.0, limit, style.PALE)
    if np.isfinite(frame.limit):
        draw_rim(limit, end, style.RED, alpha=0.75)
        ax.text(*position(limit, 1.17), f"limit\n{limit:.3g}", fontsize=8.5, **centered)
    for tick in ticker.MaxNLocator(4).tick_values(0, end):
        if tick <= end:
            ax.text(*position(tick, 0.82), f"{tick:g}", fontsize=8, color=style.DARK, **centered)
    label = r"$\eta\lambda_{max}$ not known"
    if np.isfinite(frame.lr_lambda_max):
        shown_value = min(max(frame.lr_lambda_max, 0.0), end)
        x, y = position(shown_value, 0.93)
        ax.plot([0, x], [0, y], color=color, lw=3)
        label = rf"$\eta\lambda_{{max}}$ = {frame.lr_lambda_max:.2f}"
    ax.plot(0, 0, "o", color=color, ms=8)
    ax.text(0, -0.22, label, ha="center", va="top")
    ax.set(xlim=(-1.35, 1.35), ylim=(-0.6, 1.35), aspect="equal")
    ax.axis("off")


def save_film(
    frames: Sequence[Frame], algorithm: str, path: Path, fps: int, dpi: float, progress: Progress
) -> None:
    """Write the :func:`film` to ``path``. An existing file stays unchanged until the new one is complete.

    Args:
        frames, algorithm: as in :func:`film`.
        path: a .gif or .mp4 file.
        fps: frames per second.
        dpi: pixels per inch.
        progress: called with the finished share of the frames.

    Raises:
        OperationError: ffmpeg fails, or the file cannot be written.
    """
    figure, draw = film(frames, algorithm)
    writer_class = animation.PillowWriter if path.suffix == ".gif" else animation.FFMpegWriter
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"film{path.suffix}")
        writer = writer_class(fps=fps)
        try:
            with style.style(), writer.saving(figure, str(target), dpi):
                for index in range(len(frames)):
                    draw(index)
                    writer.grab_frame()
                    figure.set_layout_engine("none")  # panels stay where the first frame has them
                    progress((index + 1) / len(frames))
        except (OSError, RuntimeError) as error:
            cause = " ".join(str(error).split())[:120]
            raise OperationError(f"{path}: the film cannot be written ({cause})") from error
        with replacing(path) as file:
            file.write(read_regular(target))  # all bytes of the finished film


def check_film(path: Path) -> None:
    """Check that a film of this name can be written here.

    Raises:
        InputError: another suffix than .gif and .mp4.
        OperationError: an .mp4 without ffmpeg.
    """
    ends_in("-o", path, FORMATS)
    if path.suffix == ".mp4" and shutil.which("ffmpeg") is None:
        raise OperationError(f"{path}: an .mp4 needs ffmpeg, not installed here; install it, or write a .gif")
