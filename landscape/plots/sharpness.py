"""Worst-case and average-case sharpness, by radius or one beside the other."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, loss_of, splits
from landscape.plots.picture import caption, panels
from landscape.plots.style import colors_of, decimal_labels, paper_name, short_names, style
from landscape.results.sharpness import Sharpness


@draws(Sharpness)
def draw_sharpness(results: Sequence[Sharpness], title: str = "") -> Figure:
    """The sharpness of each checkpoint against ρ where there are several, else one beside the other.

    Error bars are one standard error over the draws.

    Example:
        >>> import numpy as np
        >>> result = Sharpness(
        ...     values=np.array([0.1, 0.3]), standard_error=0.1, loss=0.5, kind="average", rho=0.05,
        ...     adaptive=True, m=0, reached=False, residual=0.0, gradients=5, steps=0, starts=0, fixed=0,
        ...     parameters=9, seed=0, samples=9, dtype="float64", label="dpsgd, seed 0")
        >>> print(draw_sharpness([result]).get_suptitle())
        Average-case adaptive sharpness at ρ = 0.05:
        DPSGD 0.2 ± 0.1 nat
    """
    labels = list(dict.fromkeys(r.label for r in results))
    many = len({r.rho for r in results}) > 1
    with style():
        figure, (ax,) = panels(1, 1, max(5.0, 1.5 * len(labels)), 3.8)
        for k, (label, color) in enumerate(zip(labels, colors_of(labels), strict=True)):
            own = sorted((r for r in results if r.label == label), key=lambda r: r.rho)
            at = [r.rho for r in own] if many else [k] * len(own)
            ax.errorbar(
                at,
                [r.value for r in own],
                [r.standard_error for r in own],
                color=color,
                marker="o",
                capsize=4,
                ls="-" if many else "none",
                label=paper_name(label) or f"result {k}",
            )
        if many:
            ax.set_xscale("log")
            if min(r.value for r in results) > 0:
                ax.set_yscale("log")
            decimal_labels(ax.xaxis)
            ax.set_xlabel("ρ (relative to each weight)" if results[0].adaptive else "ρ (distance)")
            figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        else:
            names = [
                (paper_name(label) or f"result {k}").replace(", ", ",\n") for k, label in enumerate(labels)
            ]
            ax.set_xticks(range(len(labels)), names)
            ax.set_ylim(min(0.0, *(r.value for r in results), 0.0), None)
            ax.margins(x=0.3)
            ax.grid(False, axis="x")
        ax.set_ylabel(f"rise of the {loss_of(results)} (nat)")
        figure.suptitle(title or _finding(results))
        caption(figure, _caption(results))
    return figure


def _name(r: Sharpness) -> str:
    kind = "Worst-case" if r.kind == "worst" else "Average-case"
    return f"{kind} {'adaptive ' * r.adaptive}{f'{r.m}-' if r.m else ''}sharpness"


def _finding(results: Sequence[Sharpness]) -> str:
    """One line with the sharpness of each label at the largest ρ."""
    rho = max(r.rho for r in results)
    own = [r for r in results if r.rho == rho]
    named = []
    for name, r in zip(short_names([r.label for r in own]), own, strict=True):
        error = f" ± {r.standard_error:.2g}" if r.standard_error else ""
        named.append(f"{name} {r.value:.3g}{error}")
    names = " / ".join(dict.fromkeys(_name(r) for r in results))
    return f"{names} at ρ = {rho:g}: {', '.join(named)} nat"


def _caption(results: Sequence[Sharpness]) -> str:
    r = results[0]
    draws_of = " / ".join(dict.fromkeys(str(each.draws) for each in results))
    of = f"minibatches of {r.m} from " if r.m else ""
    drawn = (
        f"; {draws_of} draws, error bars: one standard error" if any(each.draws for each in results) else ""
    )
    how = (
        f"a lower bound, by at most {r.steps} gradients from each of {r.starts + 1} starts"
        if r.kind == "worst"
        else "mean over pairs of displacements ±δ"
    )
    note = batchnorm_note(r).strip()
    return (
        f"{of.capitalize()}{r.samples:,} samples of {splits(results)}; {how}{drawn}."
        f"{f' {note}.' if note else ''} Sharpness of this kind predicts generalisation poorly "
        "(arXiv 2302.07011)."
    )
