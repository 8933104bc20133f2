"""Hessian ratios on a grid, as heatmaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import seaborn as sns
from matplotlib import cm, colormaps, colors
from matplotlib.figure import Figure

from landscape.core.options import choose, positive
from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, interpolation_note, loss_of, splits
from landscape.plots.picture import caption, wrapped_panels
from landscape.plots.style import paper_name, style
from landscape.results.hessian_grid import HessianGrid


@draws(HessianGrid)
def draw_hessian_grids(
    results: Sequence[HessianGrid], title: str = "", *, vmax: float | None = None, cmap: str | None = None
) -> Figure:
    """Heatmaps of |λ_min|/|λ_max|, one panel for each grid, with one colour scale.

    A star marks points where the eigenvalues have not converged; the medians leave these out.

    Args:
        vmax: the ratio of the darkest colour. Default: the largest one.
        cmap: a colour map of matplotlib. Default: rocket_r of seaborn.

    Raises:
        InputError: a vmax or colour map that is not allowed.

    Example:
        >>> one = np.ones((1, 1))
        >>> grid = HessianGrid(
        ...     x=one[0], y=one[0], lambda_min=-one, lambda_max=2 * one, ratio=one / 2, residual_min=one,
        ...     residual_max=one, hvps=one, converged=one > 0, kind="random", norm="none", seed=0, span=0.1,
        ...     tol=0.01, samples=1, dtype="float64")
        >>> [text.get_text() for text in draw_hessian_grids([grid]).axes[0].texts]
        ['0.5']
    """
    if cmap is not None:
        choose("--cmap", cmap, colormaps)
    if vmax is not None:
        positive("--vmax", vmax)
    with style():
        figure, axes = wrapped_panels(len(results), 3.9, 3.5)
        finite = np.concatenate([r.ratio[np.isfinite(r.ratio)] for r in results])
        top = float(finite.max()) if finite.size and vmax is None else vmax or 1.0
        colours = sns.color_palette("rocket_r", as_cmap=True) if cmap is None else colormaps[cmap]
        for k, (ax, r) in enumerate(zip(axes, results, strict=True)):
            flipped = r.ratio[::-1]  # a heatmap's first row is its top; y grows upwards
            marks = np.where(r.trusted[::-1], "", "*")
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
                cmap=colours,
                annot=labels if r.ratio.size <= 64 else None,
                fmt="",
                annot_kws={"fontsize": 8},
                square=True,
                cbar=False,
                xticklabels=[f"{v:.2g}" for v in r.x],
                yticklabels=[f"{v:.2g}" for v in r.y[::-1]],
            )
            ax.tick_params(axis="y", rotation=0)
            good = r.ratio[r.trusted]
            middle = f"{np.median(good):.3g}" if good.size else "–"
            few = f" ({good.size} of {r.ratio.size} points)" if good.size < r.ratio.size else ""
            ax.set_title(f"{paper_name(r.label) or f'grid {k}'}\nmedian {middle}{few}")
            ax.set_xlabel("x (step along direction 1)")
            ax.set_ylabel("y (step along direction 2)")
        scale = cm.ScalarMappable(colors.Normalize(0.0, top), colours)
        bar = figure.colorbar(scale, ax=axes, shrink=0.85, pad=0.02)
        bar.set_label(rf"$|\lambda_{{min}}| / |\lambda_{{max}}|$ ({loss_of(results)})")
        usual = f"Hessian ratio, {results[0].samples:,} samples of {splits(results)}"
        figure.suptitle(title or _finding(results) or "Hessian ratio")
        usual += batchnorm_note(results[0]).replace("\n", "; ") + interpolation_note(results)
        caption(figure, f"{usual}. Low: nearly convex.")
    return figure


def _finding(results: Sequence[HessianGrid]) -> str:
    """The medians of the converged ratios; "" where none converged."""
    medians = [
        f"{paper_name(r.label).split(',')[0] or f'grid {k}'} {np.median(r.ratio[r.trusted]):.3g}"
        for k, r in enumerate(results)
        if r.trusted.any()
    ]
    return f"Median |λ_min|/|λ_max|: {', '.join(medians)}" if medians else ""
