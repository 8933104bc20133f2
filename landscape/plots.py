"""Finished results -> figures. Nothing here computes a landscape; several results share scales and levels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import seaborn as sns
from matplotlib import cm, colors, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.checkpoint import Checkpoint
from landscape.contour import Surface
from landscape.escape import Escape
from landscape.files import replacing
from landscape.hessian_grid import HessianGrid
from landscape.line import Line
from landscape.minima import Minima
from landscape.noise import NoiseEstimate
from landscape.options import InputError, choose
from landscape.picture import into, loss_of, splits
from landscape.plots_stability import minima, smoothings, stabilities
from landscape.plots_surface import bn_note, difference, lines, surfaces, surfaces_3d
from landscape.plots_surface import panels as _panels
from landscape.plots_surface import plain_numbers as _plain_numbers
from landscape.plots_surface import several as _several
from landscape.plots_surface import style as _style
from landscape.plots_sweep import sweeps
from landscape.plots_training import COLORS, escapes, training
from landscape.plots_values import drawing
from landscape.runtime import RunTimes
from landscape.smoothing import Smoothing
from landscape.spectrum import Spectrum
from landscape.stability import Stability
from landscape.sweep import Sweep

FORMATS = (".png", ".pdf", ".svg")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write ``figure`` as PNG, PDF or SVG, atomically. InputError for another suffix."""
    path = Path(path)
    check_format(path)
    with replacing(path) as file, _style():
        figure.savefig(file, format=path.suffix[1:])


def check_format(path: str | Path) -> None:
    """Raise InputError unless the suffix of ``path`` is one that figures are written in."""
    if Path(path).suffix not in FORMATS:
        raise InputError(f"{path}: a picture's name must end in {', '.join(FORMATS)}")


@drawing
def hessian_grids(results: Sequence[HessianGrid], title: str = "") -> Figure:
    """Heatmaps of |λ_min|/|λ_max|, one panel a grid, on one colour scale; * where not converged.

    A median is of the points that did.
    """
    with _style():
        figure, axes = _several(len(results), 3.9, 3.5)
        finite = np.concatenate([r.ratio[np.isfinite(r.ratio)] for r in results])
        top = float(finite.max()) if finite.size else 1.0
        for k, (ax, r) in enumerate(zip(axes, results, strict=True)):
            flipped = r.ratio[::-1]  # a heatmap's first row is its top; y grows upwards
            marks = np.where(r.converged[::-1], "", "*")
            labels = np.array(
                [
                    [f"{v:.2g}{m}" for v, m in zip(*row, strict=True)]
                    for row in zip(flipped, marks, strict=True)
                ]
            )
            sns.heatmap(
                flipped,
                ax=ax,
                vmin=0.0,
                vmax=top,
                cmap="rocket_r",
                annot=labels if r.ratio.size <= 64 else None,
                fmt="",
                annot_kws={"fontsize": 8},
                square=True,
                cbar=False,
                xticklabels=[f"{v:.2g}" for v in r.x],
                yticklabels=[f"{v:.2g}" for v in r.y[::-1]],
            )
            ax.tick_params(axis="y", rotation=0)
            good = r.ratio[r.converged]
            middle = f"{np.median(good):.3g}" if good.size else "–"
            few = f" ({good.size} of {r.ratio.size} points)" if good.size < r.ratio.size else ""
            ax.set_title(f"{r.label or f'grid {k}'}\nmedian ratio {middle}{few}")
            ax.set_xlabel("x (step along direction 1)")
            ax.set_ylabel("y (step along direction 2)")
        scale = cm.ScalarMappable(colors.Normalize(0.0, top), sns.color_palette("rocket_r", as_cmap=True))
        bar = figure.colorbar(scale, ax=axes, shrink=0.85, pad=0.02)
        of = f"{loss_of(results)}; low: nearly convex"
        bar.set_label(rf"$|\lambda_{{min}}| / |\lambda_{{max}}|$ ({of})")
        figure.suptitle(
            title
            or f"Hessian ratio, {results[0].samples:,} samples of {splits(results)}" + bn_note(results[0])
        )
    return figure


@drawing
def noises(results: Sequence[NoiseEstimate], title: str = "") -> Figure:
    """The four Δ(2) numbers of each checkpoint as bars on a log scale, error bars one standard error."""
    names = {
        "direct": "direct\n(definition)",
        "full_batch": "full-batch",
        "eq4": "Eq. 4\nα² tr(HCH)",
        "first_order": "first-order",
    }
    with _style():
        figure, axes = _several(len(results), 3.9, 3.1)
        smallest = min(
            (v for r in results for k, (v, _) in r.summary().items() if k in names and v > 0), default=1.0
        )
        largest = max((v for r in results for k, (v, _) in r.summary().items() if k in names), default=1.0)
        for ax, r in zip(axes, results, strict=True):
            summary = r.summary()
            values, errors = zip(*(summary[name] for name in names), strict=True)
            place = np.arange(len(names))
            ax.bar(place, values, yerr=errors, color="#56B4E9", ecolor="k", capsize=3, width=0.65)
            ax.set_yscale("log")
            ax.set_ylim(smallest / 5, max(largest, smallest) * 6)
            for i, value in enumerate(values):
                ax.annotate(
                    f"{value:.2g}",
                    (i, max(value, smallest / 4)),
                    ha="center",
                    va="bottom",
                    xytext=(0, 6),
                    textcoords="offset points",
                    fontsize=8.5,
                )
            ax.set_xticks(place, list(names.values()))
            ax.set_title(f"{r.label}\nα = {r.lr:g}, {len(r.direct)} draws of {r.learners} × {r.local_batch}")
            ax.set_ylabel(f"Δ(2), {r.split or 'data'} (squared weights)")
            ax.grid(False, axis="x")
        figure.suptitle(title or "Δ(2): what the learners' spread adds to the noise, four ways")
    return figure


@drawing
def spectra(results: Sequence[Spectrum], title: str = "") -> Figure:
    """Spectral densities on a log axis, eigenvalues as ticks below, one colour a result.

    The axis ends a factor 10 below the peak that one eigenvalue out of P makes.
    """
    if not any(r.values.size or r.nodes.size for r in results):
        raise InputError("spectrum: it holds no eigenvalue and no density, there is nothing to draw")
    with _style():
        figure, (ax,) = _panels(1, 1, 6.4, 3.9)
        dense = [(r, r.density) for r in results if r.density]
        floor = 0.0
        if dense:
            low = min(float(d.nodes.min()) - 5 * d.width() for _, d in dense)
            high = max(float(d.nodes.max()) + 5 * d.width() for _, d in dense)
            floor = min(0.1 / (d.size * d.width() * np.sqrt(2 * np.pi)) for _, d in dense)
            at = np.linspace(low, high, 2000)
        for k, r in enumerate(results):
            color, label = f"C{k % 7}", r.label or f"spectrum {k}"
            if r.density:
                ax.plot(at, np.maximum(r.density.broadened(at), floor), color=color, label=label)
                label = "_"
            row = 0.05 if dense else 0.9 / len(results)  # one above the other: none hides another
            for value in r.values:
                ax.plot(
                    [value, value], [row * k, row * (k + 0.9)], transform=ax.get_xaxis_transform(),
                    color=color, lw=1.5, label=label, clip_on=False,
                )  # fmt: skip
                label = "_"
        if dense:
            ax.set_yscale("log")
            ax.set_ylim(floor, None)
            ax.set_ylabel("spectral density (log scale)")
        else:
            ax.set_yticks([])
            ax.spines["left"].set_visible(False)
            ax.margins(x=0.08)
        named = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton matrix"}
        first = results[0]
        ticks = "; ticks: computed eigenvalues" if any(r.values.size for r in results) else ""
        ax.set_xlabel(f"eigenvalue λ of the {loss_of(results)}'s {named.get(first.kind, first.kind)}{ticks}")
        figure.legend(loc="outside lower center", ncols=min(3, len(results)))
        part = f", parameters {first.part}" if first.part else ""
        usual = f"Spectrum, {first.samples:,} samples of {splits(results)}{part}{bn_note(first)}"
        figure.suptitle(title or usual)
    return figure


@drawing
def run_times(results: Sequence[RunTimes], title: str = "") -> Figure:
    """Seconds a step against workers, a line each algorithm and topology; one row of panels a result.

    SSGD is in both panels. Bars are one standard error of the simulation.
    """
    # Neither SSGD's colour nor SSGD*'s, and black as the last.
    palette = [c for i, c in enumerate(sns.color_palette("colorblind").as_hex()) if i not in (0, 3)] + ["k"]
    names = list(dict.fromkeys(m for r in results for m in r.mixing if m))
    look = {m: (palette[i % len(palette)], "sD^v<>Pp*hH8"[i % 12]) for i, m in enumerate(names)}
    with _style():
        figure, axes = _panels(len(results), 2, 4.6, 4.0, sharey="row")
        for k, r in enumerate(results):
            lines: dict[tuple[str, str], list[int]] = {}
            for i, key in enumerate(zip(r.algorithm, r.mixing, strict=True)):
                lines.setdefault(key, []).append(i)
            for order, ax in zip(("awc", "atc"), axes[2 * k : 2 * k + 2], strict=True):
                for (algorithm, mixing), rows in lines.items():
                    if mixing and not algorithm.endswith(order):
                        continue
                    color, marker = look[mixing] if mixing else (COLORS.get(algorithm, "#777777"), "o")
                    plain = {"color": color, "lw": 1.2, "marker": marker, "mfc": "none"}
                    bold = {**plain, "lw": 2.2, "ls": "--" if algorithm == "ssgd*" else "-"}
                    ax.errorbar(
                        r.workers[rows], r.step_s[rows], r.step_error[rows], **(plain if mixing else bold),
                        label=mixing or algorithm.upper(),
                    )  # fmt: skip
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
                ax.xaxis.set_major_formatter(ticker.ScalarFormatter())
                ax.set_xticks(sorted({int(w) for w in r.workers}))
                ax.set_xlabel("workers (log scale)")
                ax.set_title(f"{r.label}\nDPSGD, {order.upper()} order")
            _plain_numbers(axes[2 * k].yaxis)
            axes[2 * k].set_ylabel("time a step (s, log scale)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.suptitle(title or "Predicted time a step: SSGD, and DPSGD by topology")
    return figure


STYLES = ("contour", "surface", "difference")


def draw(results: Sequence[Any], style: str = "contour", *, ax: Axes | None = None, **options: Any) -> Figure:
    """The figure for ``results``, all of one kind. InputError for a mixture.

    With ``ax`` that of these axes, which it is drawn into: for a picture of one panel, else InputError.

    ``style`` is how surfaces are drawn: "contour"; "surface", in 3-D; or "difference", the first of two less
    the second. InputError for another one, or for anything but "contour" with results that are no surfaces.
    """
    painters = {
        Checkpoint: training,
        Surface: surfaces,
        Line: lines,
        HessianGrid: hessian_grids,
        NoiseEstimate: noises,
        Spectrum: spectra,
        RunTimes: run_times,
        Stability: stabilities,
        Minima: minima,
        Sweep: sweeps,
        Escape: escapes,
        Smoothing: smoothings,
    }
    choose("style", style, STYLES)
    kinds = {type(r) for r in results}
    if len(kinds) != 1:
        names = ", ".join(sorted(k.__name__ for k in kinds))
        raise InputError(f"FILE: {names} cannot be drawn in one picture, all files must be of one kind")
    kind = kinds.pop()
    painter: Any = painters[kind]
    if style != "contour":
        if kind is not Surface:
            raise InputError(f"style: '{style}' is for surfaces, a {kind.__name__} is drawn one way only")
        painter = surfaces_3d if style == "surface" else difference
    with into(ax):
        figure = painter(results, **options)
    made: Any = figure if ax is None else ax.get_figure()
    return cast(Figure, made)
