"""Heatmaps of Hessian ratios."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib import cm, colors
from matplotlib.figure import Figure

from landscape.plots.picture import loss_of, several, splits
from landscape.plots.surface import bn_note, style
from landscape.plots.values import drawing
from landscape.results.hessian_grid import HessianGrid


@drawing
def hessian_grids(results: Sequence[HessianGrid], title: str = "") -> Figure:
    """Heatmaps of |λ_min|/|λ_max|, one panel a grid, on one colour scale; * where not converged.

    A median is of the points that did.
    """
    with style():
        figure, axes = several(len(results), 3.9, 3.5)
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
