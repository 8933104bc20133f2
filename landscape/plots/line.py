"""Loss and accuracy along lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from landscape.core.errors import InputError
from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, interpolation_note, shared_note, split_names
from landscape.plots.picture import caption, has_given_axes, panels
from landscape.plots.style import colors_of, paper_name, style
from landscape.results.line import Line


@draws(Line)
def draw_lines(results: Sequence[Line], title: str = "") -> Figure:
    """Loss and, below it, accuracy along lines of one kind; barriers in the legend.

    Axes that the user gave show the loss alone.

    Raises:
        InputError: lines between two sets of weights together with lines along a direction.

    Example:
        >>> t = np.linspace(0, 1, 3)
        >>> line = Line(t=t, loss=t**2, accuracy=1 - t, start=np.zeros(2), direction=np.ones(2),
        ...             kind="interpolation", barrier=0.0, samples=1, dtype="float64", bn="center",
        ...             batchnorm=False, bn_samples=0, path="batched", ends=("a", "b"))
        >>> [ax.get_ylabel() for ax in draw_lines([line]).axes]
        ['mean loss (nat)', 'mean accuracy (%)']
    """
    kinds = {r.kind for r in results}
    if len(kinds) != 1:
        raise InputError("FILE: interpolations and directions have different axes, give files of one kind")
    between = kinds == {"interpolation"}
    with_accuracy = not has_given_axes() and any(np.isfinite(r.accuracy).any() for r in results)
    with style():
        figure, axes = panels(2 if with_accuracy else 1, 1, 5.4, 2.6, sharex=True)
        note, notes = shared_note([batchnorm_note(r) for r in results])
        colors = colors_of([" to ".join(r.ends) or r.label for r in results])
        for k, (r, color) in enumerate(zip(results, colors, strict=True)):
            name = " to ".join(map(paper_name, r.ends)) or paper_name(r.label) or f"line {k + 1}"
            if between:
                name += f" (barrier {r.barrier:.3g})"
            # Points that are not finite leave a gap in the curve.
            axes[0].plot(
                r.t, np.where(np.isfinite(r.loss), r.loss, np.nan), color=color, label=name + notes[k]
            )
            if with_accuracy:
                axes[1].plot(r.t, 100 * r.accuracy, color=color)
            if between and np.isfinite(r.barrier):
                axes[0].plot([0, 1], r.loss[[0, -1]], color=color, lw=0.9, ls=":")
        axes[0].set_ylabel(f"{split_names(results)} loss (nat)")
        if with_accuracy:
            axes[1].set_ylabel(f"{split_names(results)} accuracy (%)")
        axes[-1].set_xlabel("t (0: first end, 1: second end)" if between else "t (step along the direction)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center")
        usual = (
            "Loss between two sets of weights; dotted: the straight line" if between else "Loss along a line"
        )
        figure.suptitle(title or usual + note)
        caption(figure, interpolation_note(results).removeprefix("; ").capitalize())
    return figure
