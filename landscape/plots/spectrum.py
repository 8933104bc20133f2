"""Eigenvalues and spectral densities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, loss_of, splits
from landscape.plots.picture import panels
from landscape.plots.style import colors_of, paper_name, style
from landscape.results.spectrum import Spectrum


@draws(Spectrum)
def draw_spectra(results: Sequence[Spectrum], title: str = "") -> Figure:
    """Spectral densities on a log axis with eigenvalues as ticks below it, one colour for each result.

    The axis ends a factor of 10 below the peak of one eigenvalue out of P. Results that have only traces
    are drawn as traces, with one standard error.

    Raises:
        InputError: no result has eigenvalues, a density or a trace.

    Example:
        >>> none = np.zeros((0, 0))
        >>> result = Spectrum(
        ...     values=np.array([2.0, -1.0]), residuals=np.zeros(2), lowest=1, converged=True, trace=np.nan,
        ...     trace_error=np.nan, nodes=none, weights=none, parameters=9, hvps=12, kind="hessian", part="",
        ...     engine="lanczos", tol=0.01, seed=0, samples=10, dtype="float64", split="train")
        >>> draw_spectra([result]).axes[0].get_xlabel()
        "eigenvalue λ of the train loss's Hessian; ticks: computed eigenvalues"
    """
    if not any(r.values.size or r.nodes.size for r in results):
        return _draw_traces(results, title)
    with style():
        figure, (ax,) = panels(1, 1, 6.4, 3.9)
        dense = [(r, r.density) for r in results if r.density]
        floor = 0.0
        if dense:
            low = min(float(d.nodes.min()) - 5 * d.width() for _, d in dense)
            high = max(float(d.nodes.max()) + 5 * d.width() for _, d in dense)
            floor = min(0.1 / (d.size * d.width() * np.sqrt(2 * np.pi)) for _, d in dense)
            at = np.linspace(low, high, 2000)
        colors = colors_of([r.label for r in results])
        for k, r in enumerate(results):
            color, label = colors[k], paper_name(r.label) or f"spectrum {k}"
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
        matrix = named.get(first.kind, first.kind)
        ticks = "; ticks: computed eigenvalues" if any(r.values.size for r in results) else ""
        ax.set_xlabel(f"eigenvalue λ of the {loss_of(results)}'s {matrix}{ticks}")
        figure.legend(loc="outside lower center", ncols=min(3, len(results)))
        part = f", parameters {first.part}" if first.part else ""
        part += _preconditioned(results)
        usual = f"Spectrum, {first.samples:,} samples of {splits(results)}{part}{batchnorm_note(first)}"
        figure.suptitle(title or usual)
    return figure


def _preconditioned(results: Sequence[Spectrum]) -> str:
    """Whose preconditioners the results have, and lr · λ_max with its limit where that is known."""
    names = dict.fromkeys(r.precondition for r in results if r.precondition)
    if not names:
        return ""
    edges = [
        f"lr·λ_max {r.lr * r.values[0]:.3g} (limit {r.limit:.3g})"
        for r in results
        if np.isfinite(r.lr + r.limit) and len(r.values) > r.lowest
    ]
    return "; ".join([f", preconditioned by {', '.join(names)}", *edges])


def _draw_traces(results: Sequence[Spectrum], title: str) -> Figure:
    """Traces with their standard errors, one below the other."""
    if not any(np.isfinite(r.trace) for r in results):
        raise InputError("spectrum: no eigenvalue, no density and no trace, there is nothing to draw")
    with style():
        figure, (ax,) = panels(1, 1, 6.4, 1.5 + 0.4 * len(results))
        colors = colors_of([r.label for r in results])
        for k, (r, color) in enumerate(zip(results, colors, strict=True)):
            error = r.trace_error if np.isfinite(r.trace_error) else 0.0
            ax.errorbar(r.trace, k, xerr=error, color=color, marker="o", capsize=4, ls="none")
            text = f"{r.trace:.4g} ± {error:.2g}"
            ax.annotate(
                text, (r.trace, k), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9
            )
        names = [paper_name(r.label) or f"spectrum {k}" for k, r in enumerate(results)]
        ax.set_yticks(range(len(results)), names)
        ax.set_ylim(len(results) - 0.4, -0.8)
        ax.margins(x=0.25)
        ax.set_xlabel(f"trace of the {loss_of(results)}'s Hessian (nat), one standard error")
        figure.suptitle(title or f"Trace, {results[0].samples:,} samples of {splits(results)}")
    return figure
