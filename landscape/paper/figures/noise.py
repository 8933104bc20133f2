"""Ours: what Figure 2's runs say about the paper's noise, and about how flatness is measured."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from landscape import plots
from landscape.analysis.contour import contour
from landscape.analysis.noise import estimate_noise
from landscape.analysis.planes import learners_plane
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.statistics import mean_and_error
from landscape.paper.figure import Compared, Drawing, Point, Runs, Scale, Work, figure, summary
from landscape.paper.figures.figure_2 import NAMED, last, median_rise, runs_of
from landscape.paper.scales import MNIST_NOTE, SMOKE_NOTE, mnist, seeds
from landscape.paper.verdicts import Effect, Rows, by_seed, column, measured, ratio, select
from landscape.plots.picture import panels
from landscape.plots.style import decimal_labels, style
from landscape.results.noise import NoiseEstimate
from landscape.results.surface import Surface


def _eq4(work: Work) -> Drawing:
    """The four Δ(2) numbers at every checkpoint of DPSGD's runs of Figure 2(a)."""
    names = {
        "direct": "definition (Eq. 4, left)",
        "full_batch": "on the full batch",
        "eq4": "Eq. 4, α² tr(HCH)",
        "first_order": "first order, minibatch Hessians",
    }
    draws = work.pick(2, 16, 32)
    rows: list[dict[str, Any]] = []
    with style():
        picture, axes = panels(1, len(work.group("dpsgd")), 4.4, 3.7, sharey=True)
        for ax, run in zip(axes, work.group("dpsgd"), strict=True):
            estimates = work.cached(
                NoiseEstimate,
                work.points(f"dpsgd/{run.seed}"),
                {"draws": draws, "along": True},
                functools.partial(_along, work, run, draws),
                (estimate_noise,),
            )
            for k, (name, label) in enumerate(names.items()):
                values = np.array([estimate.summary()[name] for estimate in estimates])
                steps = [int(estimate.label) for estimate in estimates]
                ax.errorbar(steps, values[:, 0], values[:, 1], marker="osD^"[k], ms=4, capsize=2, label=label)
                rows += [
                    {"seed": run.seed, "step": step, "estimate": name, "value": v, "standard_error": e}
                    for step, (v, e) in zip(steps, values, strict=True)
                ]
            ax.set_yscale("log")
            ax.set_title(f"seed {run.seed}")
            ax.set_xlabel("step")
        axes[0].set_ylabel("Δ(2) (squared weights)")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    by = {name: np.array([r["value"] for r in rows if r["estimate"] == name]) for name in names}
    compared, off = [], {}
    for name in list(names)[1:]:
        ratio = by[name] / by["direct"]
        off[name] = ratio
        compared.append(Compared(f"{names[name]}, of the definition", summary(ratio.tolist(), ".2g"), "1"))
    within = float(np.mean(np.abs(np.log(off["eq4"])) < np.log(1.5)))
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"Eq. 4's Hessian form is within a factor 1.5 of the definition at {100 * within:.0f}% of the "
        f"checkpoints (ratios {off['eq4'].min():.2g} to {off['eq4'].max():.2g}), the first-order sum with "
        f"minibatch Hessians between {off['first_order'].min():.2g} and {off['first_order'].max():.2g}.",
    )


def _along(work: Work, run: Checkpoint, draws: int) -> list[NoiseEstimate]:
    estimates = []
    for point in work.points(f"dpsgd/{run.seed}"):
        here = point.load()
        problem = work.cache.problem(here, "train")
        estimates.append(
            estimate_noise(
                problem, here.weights, here.lr, here.local_batch, draws=draws, label=str(here.step)
            )
        )
    return estimates


def _judge_eq4(rows: Rows) -> list[Effect]:
    """The median over the checkpoints of a run, within a factor of 1.5 (ours)."""
    ratios = []
    for seed in dict.fromkeys(column(rows, "seed")):
        direct, eq4 = (
            {float(r["step"]): float(r["value"]) for r in select(rows, seed=seed, estimate=name)}
            for name in ("direct", "eq4")
        )
        ratios.append(float(np.median(ratio(eq4, direct))))
    what = "α² tr(HCH) / definition, median over checkpoints"
    return [Effect("Figure 2(a)", what, tuple(ratios), (1 / 1.5, 1.5), ratio=True)]


figure(
    "eq4",
    "DPSGD-2020, Eq. 4 in detail",
    "Δ(2) over training, four ways",
    "DPSGD's extra noise is α² tr(HCH), a function of the Hessian and of the learners' spread.",
    runs_of("fig2a", ("dpsgd",), 3),
    _judge_eq4,
    smoke=SMOKE_NOTE,
    laptop=f"Figure 2(a), {MNIST_NOTE}",
    paper=MNIST_NOTE,
    weights=True,
)(_eq4)


def _split(work: Work) -> Drawing:
    """Δ_DP = Δ_S + α²‖P⊥δ‖² + cross, over training; the median over seeds in bins of steps."""
    terms = {
        "delta_s": r"$\Delta_S$",
        "delta_2": r"$\alpha^2\Vert P_\perp\delta\Vert^2$",
        "delta_cross": "|cross term|",
    }
    rows: list[dict[str, Any]] = []
    shares: dict[str, tuple[float, float, float]] = {}
    with style():
        picture, axes = panels(1, 2, 5.0, 3.7)
        for ax, part in zip(axes, ("a", "b"), strict=True):
            runs = work.group(part)
            steps = runs[0].history["step"]
            chosen = np.isfinite(runs[0].history["delta"])
            whole = [run for run in runs if run.step == runs[0].step]
            alive = [run.seed for run in whole]
            table = {c: np.array([run.history[c][chosen] for run in whole]) for c in ("delta", *terms)}
            for k, (name, label) in enumerate(terms.items()):
                share = np.abs(table[name]) / table["delta"]
                ax.plot(steps[chosen], np.median(share, 0), color=f"C{k}", lw=1.0, label=label)
                rows += [
                    {
                        "figure": f"2({part})",
                        "seed": "median",
                        "step": int(s),
                        "term": name,
                        "share_of_delta": float(v),
                    }
                    for s, v in zip(steps[chosen], np.median(share, 0), strict=True)
                ]
            cross = table["delta_cross"] / table["delta"]
            rows += [
                {
                    "figure": f"2({part})",
                    "seed": run,
                    "step": "mean",
                    "term": "delta_cross",
                    "share_of_delta": v,
                }
                for run, v in zip(alive, cross.mean(1).tolist(), strict=True)
            ]
            mean, error = mean_and_error(cross.mean(1))
            shares[part] = float(np.median(np.abs(cross))), mean, error
            ax.set_title(f"Figure 2({part}), median of {len(runs)} seeds")
            ax.set_xlabel("step")
            ax.set_yscale("log")
        axes[0].set_ylabel(r"share of $\Delta_{DP}$")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    of = {
        part: f"{100 * mean:+.1f}" + (f" ± {100 * error:.1f}%" if np.isfinite(error) else "%")
        for part, (_, mean, error) in shares.items()
    }
    compared = [
        Compared(
            f"cross term of Δ_DP, Figure 2({part}): median size; mean ± standard error",
            f"{100 * size:.1f}%; {of[part]}",
            "0",
        )
        for part, (size, _, _) in shares.items()
    ]
    sizes = [100 * size for size, _, _ in shares.values()]
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"The cross term of Δ_DP is {of['a']} of it in (a), {of['b']} in (b). These are means over training; "
        f"its median size is {sizes[0]:.1f} and {sizes[1]:.1f}%. A mean under 5% counts as none.",
    )


def _judge_split(rows: Rows) -> list[Effect]:
    """The mean over the steps of a run; below 5% counts as none (ours)."""
    return [
        measured(
            f"Figure {part}",
            "cross term / Δ_DP, mean over the steps",
            functools.partial(_cross, rows, part),
            (-0.05, 0.05),
        )
        for part in dict.fromkeys(column(rows, "figure"))
    ]


def _cross(rows: Rows, part: str) -> list[float]:
    column(rows, "seed")
    return [float(r["share_of_delta"]) for r in select(rows, figure=part, step="mean", term="delta_cross")]


def _split_runs(scale: Scale) -> Runs:
    return {
        f"{part}/{seed}": mnist(scale, f"fig2{part}-dpsgd", seed)
        for part, seed in itertools.product("ab", seeds(scale, 5))
    }


figure(
    "noise-split",
    "DPSGD-2020, Eq. 4 in detail",
    "what DPSGD's noise is made of",
    "Δ_DP = Δ_S + Δ(2): the cross term between the two is zero.",
    _split_runs,
    _judge_split,
    smoke=SMOKE_NOTE,
    laptop=f"Figure 2, {MNIST_NOTE}",
    paper=MNIST_NOTE,
)(_split)


def _planes(work: Work) -> Drawing:
    """The loss in the plane nearest to DPSGD's learners, early, in the middle and at the end."""
    surfaces: list[Surface] = []
    rows: list[dict[str, Any]] = []
    for run in work.group("dpsgd"):
        points = work.points(f"dpsgd/{run.seed}")
        for when, point in zip(_WHEN, (points[0], points[len(points) // 2], points[-1]), strict=True):
            surface = _learners_surface(work, point)
            surfaces.append(surface)
            rows.append(
                {
                    "seed": run.seed,
                    "when": when,
                    "step": point.step,
                    "loss_at_mean_nat": float(surface.marker_loss[-1]),  # after the learners, the mean
                    "learners_loss_median_nat": float(np.median(surface.marker_loss[:-1])),
                    "consensus_distance": last(point, "consensus"),
                    "explained_percent": float(100 * sum(surface.explained)),
                }
            )
    ratios = {w: ratio(*_learners_and_mean(rows, w)) for w in _WHEN}
    compared = [
        Compared(f"loss of a learner / loss of the mean, {w}", summary(list(v), ".3g"))
        for w, v in ratios.items()
    ]
    higher = sum(v > 1 for values in ratios.values() for v in values)
    return Drawing(
        {"": plots.draw(surfaces[: len(_WHEN)])},
        rows,
        compared,
        f"The mean has a lower loss than the median learner at {higher} of {len(rows)} checkpoints; the "
        "picture is of the first seed.",
    )


_WHEN = ("early", "in the middle", "at the end")


def _learners_surface(work: Work, point: Point) -> Surface:
    grid = work.pick(7, 41, 51)

    def make() -> Surface:
        here = point.load()
        problem = work.cache.problem(here, "train")
        plane = learners_plane(problem, here.weights)
        return contour(problem, plane, grid=(grid, grid), split="train", label=f"step {point.step:,}")

    settings = {"plane": "learners", "grid": grid}
    return work.cached(Surface, point, settings, make, (contour, learners_plane))[0]


def _learners_and_mean(rows: Rows, when: str) -> list[dict[float, float]]:
    """The median learner's loss and that of the mean, by seed."""
    return [by_seed(rows, name, when=when) for name in ("learners_loss_median_nat", "loss_at_mean_nat")]


def _judge_planes(rows: Rows) -> list[Effect]:
    column(rows, "seed")
    what = "loss of the median learner / of the mean"
    return [Effect(w, what, ratio(*_learners_and_mean(rows, w)), (1.0, np.inf), ratio=True) for w in _WHEN]


figure(
    "learners-plane",
    "Further analyses",
    "the loss in the plane of DPSGD's learners, Figure 2(a)",
    "The learners lie around their mean on the walls of the valley that the mean sits in.",
    runs_of("fig2a", ("dpsgd",), 3),
    _judge_planes,
    smoke=SMOKE_NOTE,
    laptop=MNIST_NOTE,
    paper=MNIST_NOTE,
    weights=True,
)(_planes)


def _flatness(work: Work) -> Drawing:
    """How far the loss rises at distance along random directions, as they are and filter-normalised, and from
    checkpoints of equal training loss."""
    grid, rows = work.pick(5, 21, 25), list[dict[str, Any]]()
    measures = {"as drawn (paper)": "none", "filter-normalised": "filter"}
    for a in ("ssgd", "dpsgd"):
        for run in work.group(a):
            key = f"{a}/{run.seed}"
            other = work.group("dpsgd" if a == "ssgd" else "ssgd")[run.seed]
            for when, point in (("end", work.last(key)), ("equal loss", _of_equal_loss(work, key, other))):
                for label, norm in measures.items():
                    surface = work.contour(point, grid=grid, norm=norm, span=0.1 if norm == "none" else 0.5)
                    rows.append(
                        {
                            "algorithm": NAMED[a],
                            "seed": run.seed,
                            "point": when,
                            "directions": label,
                            "step": point.step,
                            "median_rise_nat": median_rise(surface),
                        }
                    )
    ratios = {
        f"{label}, {when}": np.array(_rise_ratios(rows, label, when)) for label, when in _measured(rows)
    }
    with style():
        picture, (ax,) = panels(1, 1, 7.6, 3.6)
        for k, ratio in enumerate(ratios.values()):
            ax.plot(ratio, np.full(len(ratio), k), "o", color=f"C{k}", ms=6, mfc="none")
            ax.plot(np.median(ratio), k, "|", color="k", ms=18, mew=2)
        ax.axvline(1, color="#777777", lw=0.9, ls=":")
        ax.set_yticks(range(len(ratios)), list(ratios))
        ax.set_ylim(len(ratios) - 0.5, -0.5)
        ax.set_xscale("log")
        decimal_labels(ax.xaxis)
        ax.set_xlabel("rise of the loss around SSGD / around DPSGD, a ring a seed, a bar the median")
    compared = [
        Compared(f"rise around SSGD / DPSGD: {k}", summary(list(v), ".2f")) for k, v in ratios.items()
    ]
    medians = [float(np.median(v)) for v in ratios.values()]
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"The loss rises {medians[0]:.2f} times as much around SSGD's solution as around DPSGD's. That is as "
        "the paper draws it, a median over the plane; with filter-normalised directions it is "
        f"{medians[1]:.2f} times, at checkpoints of about equal training loss {medians[2]:.2f} and "
        f"{medians[3]:.2f} times.",
    )


def _measured(rows: Rows) -> list[tuple[str, str]]:
    """(directions, point) of the measures, those at the end first."""
    pairs = dict.fromkeys(zip(column(rows, "directions"), column(rows, "point"), strict=True))
    return sorted(pairs, key=lambda pair: pair[1] != "end")


def _rise_ratios(rows: Rows, directions: str, point: str) -> tuple[float, ...]:
    """The rise around SSGD over that around DPSGD, by seed."""
    where = {"directions": directions, "point": point}
    return ratio(*(by_seed(rows, "median_rise_nat", algorithm=a, **where) for a in ("SSGD", "DPSGD")))


def _judge_flatness(rows: Rows) -> list[Effect]:
    what = "rise of the loss around SSGD / DPSGD"
    return [
        Effect(f"{label}, {when}", what, _rise_ratios(rows, label, when), (1.0, np.inf), ratio=True)
        for label, when in _measured(rows)
    ]


def _of_equal_loss(work: Work, key: str, other: Checkpoint) -> Point:
    """Of the run's checkpoints, that whose training loss is nearest to the larger of both final losses."""
    target = max(last(work.end(key), "train_loss"), last(other, "train_loss"))
    points = work.points(key)
    return min(points, key=lambda point: abs(np.log(last(point, "train_loss") / target)))


figure(
    "flatness",
    "Further analyses",
    "does DPSGD's flatness survive other measures? (Figure 2(b))",
    "The flatter contours of DPSGD stay flatter with filter-normalised directions and at equal training "
    "loss.",
    runs_of("fig2b", ("ssgd", "dpsgd")),
    _judge_flatness,
    smoke=SMOKE_NOTE,
    laptop=MNIST_NOTE,
    paper=MNIST_NOTE,
    weights=True,
)(_flatness)
