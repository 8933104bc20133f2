"""Hessian ratios on a grid, as heatmaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib import cm, colors
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, loss_of, splits
from landscape.plots.picture import wrapped_panels
from landscape.plots.style import style
from landscape.results.hessian_grid import HessianGrid


@draws(HessianGrid)
def draw_hessian_grids(results: Sequence[HessianGrid], title: str = "") -> Figure:
    """Heatmaps of |λ_min|/|λ_max|, one panel for each grid, with one colour scale.

    A star marks points where the eigenvalues have not converged; the medians leave these out.

    Example:
        >>> one = np.ones((1, 1))
        >>> grid = HessianGrid(
        ...     x=one[0], y=one[0], lambda_min=-one, lambda_max=2 * one, ratio=one / 2, residual_min=one,
        ...     residual_max=one, hvps=one, converged=one > 0, kind="random", norm="none", seed=0, span=0.1,
        ...     tol=0.01, samples=1, dtype="float64")
        >>> [text.get_text() for text in draw_hessian_grids([grid]).axes[0].texts]
        ['0.5']
    """
    with style():
        figure, axes = wrapped_panels(len(results), 3.9, 3.5)
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
        usual = f"Hessian ratio, {results[0].samples:,} samples of {splits(results)}"
        figure.suptitle(title or usual + batchnorm_note(results[0]))
    return figure
