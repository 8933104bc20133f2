"""The outcome in sentences, with numbers and their errors, computed from runs and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from landscape.core.hdf5 import Array
from landscape.core.statistics import standard_error, t_quantile, welch_freedom
from landscape.plots.style import headline
from landscape.report import analyses, surfaces
from landscape.report.contents import Contents, Run, Setting, settings_of
from landscape.report.curves import values_of
from landscape.results.base import Result
from landscape.results.comparison import Comparison
from landscape.results.curvature import Spectrum
from landscape.results.grids import Surface
from landscape.results.shown import in_words

# Two settings are told apart where the 95% interval of their difference leaves zero out (the usual level).
LEVEL = 0.95
# Of a run: its last quarter is "at the end", its first tenth "at first" (ours).
END, START = 0.25, 0.1
RELAPSE = 10.0  # times its lowest training loss, above which a run is said to have left a minimum (ours)


@dataclass(frozen=True)
class TestError:
    """The test error of a setting in %: mean and deviation over ``seeds``, standard error of the mean.

    Of one seed, spread and standard error are those of the test samples.
    """

    mean: float
    spread: float
    standard_error: float
    words: str
    seeds: int = 1


def sentences(contents: Contents) -> tuple[str, ...]:
    """What the files say, a sentence each; the most important first."""
    settings = settings_of(contents.runs)
    errors = {s.name: e for s in settings if (e := test_error(contents.runs, s))}
    said = [f"{name}: test error {error.words}." for name, error in errors.items()]
    said += _comparison(errors)
    said += analyses.comparison_sentences(contents)
    for setting in settings:
        said += _divergence(contents.runs, setting)
        said += _relapse(contents.runs, setting)
        said += _edge(contents.runs, setting)
        said += _rate(contents.runs, setting)
    said += _flatness(contents)
    said += _results(contents)
    return tuple(said) or ("The files hold no run and no result that a sentence can be made of.",)


def test_error(runs: Sequence[Run], setting: Setting) -> TestError | None:
    """The last test error of a setting: mean and deviation over seeds, or one run with its sampling error.

    None where the accuracy was never evaluated.
    """
    lasts = [(runs[k], values_of(runs[k], "test_error")[1]) for k in setting.places]
    finite = [(run, float(values[-1])) for run, values in lasts if len(values)]
    if not finite:
        return None
    values = np.array([value for _, value in finite])
    steps = " and ".join(f"{step:,}" for step in sorted({run.checkpoint.step for run, _ in finite}))
    run = finite[0][0].checkpoint
    if len(values) > 1:
        spread = float(values.std(ddof=1))
        seeds = ", ".join(str(r.checkpoint.seed) for r, _ in finite)
        words = f"{in_words(float(values.mean()), spread)}% after {steps} steps"
        words += f" (mean and standard deviation of {len(values)} seeds: {seeds})"
        return TestError(float(values.mean()), spread, standard_error(values), words, len(values))
    share, samples = values[0] / 100, run.data["test"]
    error = 100 * math.sqrt(share * (1 - share) / samples) if samples else math.nan
    words = f"{in_words(float(values[0]), error)}% after {steps} steps"
    words += f" (seed {run.seed}; standard error of {samples:,} test samples)" if samples else ""
    return TestError(float(values[0]), error, error, words)


def _comparison(errors: dict[str, TestError]) -> list[str]:
    """The best setting against the second best, and whether the runs tell them apart."""
    if len(errors) < 2:
        return []
    (best, a), (other, b) = sorted(errors.items(), key=lambda item: item[1].mean)[:2]
    gap, error = b.mean - a.mean, math.hypot(a.standard_error, b.standard_error)
    words = f"{best} has the lowest test error, {in_words(gap, error)} points below {other}"
    if not math.isfinite(error):
        return [f"{words}; how sure that is cannot be said from these files."]
    if not error:
        return [f"{words}."]
    needed = _needed(a, b)
    words += f", {gap / error:.1f} standard errors"
    if gap <= needed * error:
        return [f"{words}; {needed:.1f} are needed, so these runs do not tell the two apart."]
    return [f"{words}."]


def _needed(a: TestError, b: TestError) -> float:
    """The standard errors at which the interval of a difference ends: Student's t, with Welch's freedom."""
    freedoms = [math.inf if e.seeds == 1 else e.seeds - 1 for e in (a, b)]
    freedom = welch_freedom((a.standard_error, b.standard_error), (freedoms[0], freedoms[1]))
    return float(t_quantile(LEVEL, freedom))


def _divergence(runs: Sequence[Run], setting: Setting) -> list[str]:
    lost = [runs[k].checkpoint for k in setting.places if runs[k].checkpoint.diverged]
    if not lost:
        return []
    seeds = ", ".join(f"seed {c.seed} at step {c.diverged_at:,} (the {c.diverged})" for c in lost)
    return [f"{setting.name}: {len(lost)} of {len(setting.places)} runs diverged: {seeds}."]


def _relapse(runs: Sequence[Run], setting: Setting) -> list[str]:
    """The runs that left a minimum: their loss at the end is far above the lowest that they had."""
    words = []
    for k in setting.places:
        steps, values = values_of(runs[k], "train_loss")
        last = _part(steps, values, slice_end=True)
        if len(values) and not runs[k].checkpoint.diverged and values.min() > 0:
            ratio = float(np.median(last) / values.min())
            if ratio > RELAPSE:
                at = steps[values.argmin()]
                words.append(f"seed {runs[k].checkpoint.seed}, {ratio:.3g} times that of step {at:,.0f}")
    if not words:
        return []
    return [
        f"{setting.name}: {len(words)} of {len(setting.places)} runs left a minimum: the training loss in "
        f"the last quarter (median) is far above the lowest ({'; '.join(words)})."
    ]


def _edge(runs: Sequence[Run], setting: Setting) -> list[str]:
    """lr·λ_max at the end of the runs, against the limit of the rule."""
    ends = [_part(*values_of(runs[k], "lr_lambda_max"), slice_end=True) for k in setting.places]
    values = np.concatenate(ends)
    limits = np.concatenate([values_of(runs[k], "lr_lambda_limit")[1] for k in setting.places])
    if not len(values):
        return []
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    words = (
        f"{setting.name}: lr·λ_max in the last quarter is {middle:.3g} (quartiles {low:.3g} and {high:.3g})"
    )
    if len(limits):
        limit = float(np.median(limits))
        words += f", {100 * middle / limit:.0f}% of its rule's limit {limit:.4g}"
    return [f"{words}."]


def _rate(runs: Sequence[Run], setting: Setting) -> list[str]:
    """α_e relative to α, at first and at the end."""
    first, last = [], []
    for k in setting.places:
        history = runs[k].checkpoint.history
        with np.errstate(divide="ignore", invalid="ignore"):
            share = history["alpha_e"] / history["lr"]
        there = np.isfinite(share)
        steps, share = history["step"][there], share[there]
        first.append(_part(steps, share, slice_end=False))
        last.append(_part(steps, share, slice_end=True))
    a, b = np.concatenate(first), np.concatenate(last)
    if not len(a) or not len(b):
        return []
    return [
        f"{setting.name}: the effective learning rate α_e is {np.median(a):.2f} of α in the first tenth of "
        f"the steps and {np.median(b):.2f} of it in the last quarter (medians)."
    ]


def _part(steps: Array, values: Array, slice_end: bool) -> Array:
    """The values in the last quarter, or in the first tenth, of the steps."""
    if not len(steps):
        return values
    first, last = float(steps[0]), float(steps[-1])
    if slice_end:
        return values[steps >= last - END * (last - first)]
    return values[steps <= first + START * (last - first)]


def _flatness(contents: Contents) -> list[str]:
    """How far the loss rises over each plane, of groups with several surfaces over one span."""
    said = []
    for group in surfaces.groups(contents):
        rises = {}
        for _, s in group.surfaces:
            loss = s.loss[np.isfinite(s.loss)]
            rises[s.label] = float(np.median(loss) - loss.min())
        spans = {s.span for _, s in group.surfaces}
        if len(rises) < 2 or len(spans) > 1 or not all(rise > 0 for rise in rises.values()):
            continue
        (flat, a), *_, (steep, b) = sorted(rises.items(), key=lambda item: item[1])
        said.append(
            f"The {group.title}: the median rise above the lowest point is {a:.3g} nat around {flat} and "
            f"{b:.3g} nat around {steep}, which is {b / a:.2g} times as steep."
        )
    return said


def _results(contents: Contents) -> list[str]:
    """The most important number of each other kind of result."""
    kinds: dict[type[Result], list[Result]] = {}
    for found in contents.found:
        if not isinstance(found.result, (Surface, Comparison)) and found.result.describe():
            kinds.setdefault(type(found.result), []).append(found.result)
    return [
        f"{headline(results)}{' (±: residual)' if kind is Spectrum else ''}."
        for kind, results in kinds.items()
    ]
