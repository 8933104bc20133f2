"""Eigenvalues and spectral densities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, loss_of, splits
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.results.spectrum import Spectrum


@draws(Spectrum)
def draw_spectra(results: Sequence[Spectrum], title: str = "") -> Figure:
    """Spectral densities on a log axis with eigenvalues as ticks below it, one colour for each result.

    The axis ends a factor of 10 below the peak of one eigenvalue out of P.

    Raises:
        InputError: no result has eigenvalues or a density.

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
        raise InputError("spectrum: no eigenvalue and no density, there is nothing to draw")
    with style():
        figure, (ax,) = panels(1, 1, 6.4, 3.9)
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
        usual = f"Spectrum, {first.samples:,} samples of {splits(results)}{part}{batchnorm_note(first)}"
        figure.suptitle(title or usual)
    return figure
