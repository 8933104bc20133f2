"""The covariance of minibatch gradients along the Hessian's eigenvectors, and tr(HS)/tr S."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, splits
from landscape.plots.picture import caption, panels
from landscape.plots.style import colors_of, decimal_labels, paper_name, short_names, style
from landscape.results.noise_alignment import NoiseAlignment


@draws(NoiseAlignment)
def draw_noise_alignment(results: Sequence[NoiseAlignment], title: str = "") -> Figure:
    """C_ii against λ_i on logarithmic axes with its power law; beside it tr(HS)/tr S next to λ_max.

    Error bars are one standard error over the draws.

    Example:
        >>> two = np.array([2.0, 1.0])
        >>> result = NoiseAlignment(
        ...     values=two, residuals=two / 99, covariance=two, covariance_error=two / 9, ias=1.5,
        ...     ias_error=0.1, noise_curvature=1.4, noise_curvature_error=0.1, trace_s=5.0, trace_c=4.0,
        ...     grad_norm2=1.0, gamma=1.0, gamma_error=0.1, gamma_scatter=np.nan, batch=4, draws=32,
        ...     reached=True, parameters=9, hvps=50, converged=True, tol=0.05, seed=0, samples=9,
        ...     dtype="float64")
        >>> draw_noise_alignment([result]).get_suptitle()
        'tr(HS)/tr S is 1.5 ± 0.1 nat, λ_max 2; noise along eigenvectors as λ^(1 ± 0.1)'
    """
    with style():
        figure, (power, curvature) = panels(1, 2, 4.6, 3.8)
        colors = colors_of([r.label for r in results])
        names = [paper_name(r.label) or f"result {k}" for k, r in enumerate(results)]
        for r, color, name in zip(results, colors, names, strict=True):
            _draw_power(power, r, color, name)
        power.set_xscale("log")
        power.set_yscale("log")
        decimal_labels(power.xaxis)
        power.set_xlabel("eigenvalue $\\lambda_i$ of the Hessian (nat)")
        power.set_ylabel("variance of the gradient along $v_i$")
        place = np.arange(len(results))
        for shift, head, value, error in (
            (-0.25, "tr(HS)/tr S", "ias", "ias_error"),
            (0.0, "tr(HC)/tr C", "noise_curvature", "noise_curvature_error"),
        ):
            curvature.errorbar(
                place + shift,
                [getattr(r, value) for r in results],
                [getattr(r, error) for r in results],
                marker="o" if shift else "s",
                color="k" if shift else "#56B4E9",
                capsize=3,
                ls="none",
                label=head,
            )
        top = [r.values[0] for r in results]
        curvature.plot(place + 0.25, top, "_", color="#D55E00", ms=18, mew=2.5, label="$\\lambda_{max}$")
        curvature.set_xticks(place, [name.replace(", ", ",\n") for name in names])
        curvature.set_ylim(min(0.0, *(r.ias for r in results), 0.0), None)
        curvature.margins(x=0.3)
        curvature.grid(False, axis="x")
        curvature.set_ylabel("curvature (nat)")
        curvature.legend(fontsize=8)
        figure.legend(*power.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.suptitle(title or _finding(results))
        caption(figure, _caption(results))
    return figure


def _draw_power(ax: Axes, r: NoiseAlignment, color: str, name: str) -> None:
    """The points of one result, and the line through them."""
    used = (r.values > 0) & (r.covariance > 0)
    x, y = r.values[used], r.covariance[used]
    below = np.minimum(r.covariance_error[used], 0.9 * y)  # the bar of a logarithm must not reach 0
    ax.errorbar(
        x, y, [below, r.covariance_error[used]], color=color, marker="o", ls="none", capsize=2, label=name
    )
    if np.isfinite(r.gamma):
        line = np.exp(np.log(y).mean() + r.gamma * (np.log(x) - np.log(x).mean()))
        ax.plot(x, line, color=color, lw=1.2, label=f"γ = {r.gamma:.2f} ± {r.gamma_error:.2g}")


def _finding(results: Sequence[NoiseAlignment]) -> str:
    if len(results) == 1:
        r = results[0]
        power = f"; noise along eigenvectors as λ^({r.gamma:.3g} ± {r.gamma_error:.2g})"
        return (
            f"tr(HS)/tr S is {r.ias:.3g} ± {r.ias_error:.2g} nat, λ_max {r.values[0]:.3g}"
            f"{power if np.isfinite(r.gamma) else ''}"
        )
    names = short_names([r.label for r in results])
    named = [f"{name} {r.ias:.3g} ± {r.ias_error:.2g}" for name, r in zip(names, results, strict=True)]
    return f"tr(HS)/tr S: {', '.join(named)} nat"


def _caption(results: Sequence[NoiseAlignment]) -> str:
    r = results[0]
    drawn = " / ".join(dict.fromkeys(f"{each.draws} minibatches of {each.batch}" for each in results))
    scatter = ", ".join(f"{each.gamma_scatter:.2g}" for each in results)
    note = batchnorm_note(r).strip()
    return (
        f"{drawn}, drawn with replacement from {r.samples:,} samples of {splits(results)}; H over all of "
        "them; error bars: one standard error over the draws. S: second moment, C: covariance of the "
        f"gradients. The scatter of the points around the line leaves an error of {scatter} in γ."
        f"{f' {note}.' if note else ''}"
    )
