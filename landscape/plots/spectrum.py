"""Eigenvalues and densities of spectra."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.picture import loss_of, panels, splits
from landscape.plots.surface import bn_note, style
from landscape.plots.values import drawing
from landscape.results.spectrum import Spectrum


@drawing
def spectra(results: Sequence[Spectrum], title: str = "") -> Figure:
    """Spectral densities on a log axis, eigenvalues as ticks below, one colour a result.

    The axis ends a factor 10 below the peak that one eigenvalue out of P makes.
    """
    if not any(r.values.size or r.nodes.size for r in results):
        raise InputError("spectrum: it holds no eigenvalue and no density, there is nothing to draw")
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
        usual = f"Spectrum, {first.samples:,} samples of {splits(results)}{part}{bn_note(first)}"
        figure.suptitle(title or usual)
    return figure
