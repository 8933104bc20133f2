"""The local learning coefficient: the traces of the chains, and the estimate from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from landscape.plots.drawing import draws
from landscape.plots.labels import batchnorm_note, plus_minus, splits
from landscape.plots.picture import caption, shared_legend, wrapped_panels
from landscape.plots.style import OTHER, color_of, paper_name, shades, short_names, style
from landscape.results.learning_coefficient import LearningCoefficient


@draws(LearningCoefficient)
def draw_learning_coefficient(results: Sequence[LearningCoefficient], title: str = "") -> Figure:
    """The chains' nβ (L(w) − L(w*)) without heating against the step, one panel for each result.

    The line is λ̂ with a band of one standard error; the grey part is the burn-in.

    Example:
        >>> rise = np.array([[0.0, 3.0, 5.0], [0.0, 4.0, 4.0]])
        >>> result = LearningCoefficient(
        ...     rise=rise, heating=rise / 4, distance2=rise, standard_error=0.3, r_hat=1.0,
        ...     r_hat_distance=1.0, ess=4.0, nbeta=10.0, localization=1.0, step_size=0.1, batch=8, steps=3,
        ...     burn_in=1, loss=0.5, weights_norm2=1.0, lambda_max=2.0, parameters=6, max_rhat=1.01,
        ...     tol=0.05, converged=False, samples=36, seed=0, dtype="float64", label="dpsgd, seed 0")
        >>> print(draw_learning_coefficient([result]).get_suptitle())
        Local learning coefficient: 3.0 ± 0.3
        DPSGD (P/2 = 3)
    """
    with style():
        figure, axes = wrapped_panels(len(results), 4.8, 3.4, sharey=True)
        for ax, result in zip(axes, results, strict=True):
            _draw_chains(ax, result)
        shared_legend(figure, axes, ncols=3)
        figure.suptitle(title or _finding(results))
        caption(figure, _caption(results))
    return figure


def _draw_chains(ax: Axes, result: LearningCoefficient) -> None:
    """Traces, burn-in and estimate of one result."""
    traces = result.rise - result.heating
    steps = (np.arange(traces.shape[1]) + 0.5) * result.steps_a_draw
    for k, (trace, color) in enumerate(zip(traces, shades(color_of(result.label), len(traces)), strict=True)):
        ax.plot(steps, trace, color=color, lw=0.7, alpha=0.8, label="chains" if k == 0 else None)
    ax.axvspan(0, result.burn_in * result.steps_a_draw, color=OTHER, alpha=0.15, lw=0, label="burn-in")
    kept = result.burn_in * result.steps_a_draw, result.steps
    low, high = result.value - result.standard_error, result.value + result.standard_error
    ax.fill_between(kept, low, high, color="k", alpha=0.25, lw=0)
    ax.plot(kept, [result.value] * 2, color="k", lw=1.5, label="estimate ± standard error")
    # A chain that begins far from where it settles must not hide the rest.
    after = traces[:, result.burn_in :]
    ax.set_ylim(min(0.0, float(after.min())), 1.15 * float(after.max()))
    ax.set_xlim(0, result.steps)
    ax.set_title(paper_name(result.label) or "weights")
    ax.set_xlabel("step of the chain")
    ax.set_ylabel("nβ (L(w) − L(w*))")


def _finding(results: Sequence[LearningCoefficient]) -> str:
    """λ̂ of each result, and P/2 where it is one number."""
    names = short_names([r.label for r in results]) if any(r.label for r in results) else [""] * len(results)
    shown = [
        f"{plus_minus(r.value, r.standard_error)} {name}".strip()
        for name, r in zip(names[:6], results, strict=False)
    ]
    more = f", … ({len(results)} in all)" if len(results) > 6 else ""
    sizes = {r.parameters for r in results}
    half = f" (P/2 = {sizes.pop() / 2:,g})" if len(sizes) == 1 else ""
    return f"Local learning coefficient: {', '.join(shown)}{more}{half}"


def _caption(results: Sequence[LearningCoefficient]) -> str:
    def each(form: str, *names: str) -> str:
        return " / ".join(dict.fromkeys(form.format(*(getattr(r, n) for n in names)) for r in results))

    note = batchnorm_note(results[0]).strip()
    return (
        f"SGLD from w*: {each('{} chains of {:,} steps', 'chains', 'steps')}, minibatches of "
        f"{each('{:,}', 'batch')} from {each('{:,}', 'samples')} samples ({splits(results)}); "
        f"nβ = {each('{:.4g}', 'nbeta')}, γ = {each('{:g}', 'localization')}, ε = "
        f"{each('{:.2g}', 'step_size')}; R̂ {each('{:.3f}', 'r_hat')}, effective draws "
        f"{each('{:,.0f}', 'ess')}; heating taken off: "
        f"{' / '.join(f'{r.uncorrected - r.value:.3g}' for r in results)}; a point is the mean of "
        f"{each('{}', 'steps_a_draw')} steps.{f' {note}.' if note else ''}"
    )
