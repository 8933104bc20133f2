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
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, summary
from landscape.paper.figures.mnist import NAMED, last, runs_of
from landscape.paper.scales import MNIST_NOTE, SMOKE_NOTE, mnist, seeds
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
                run,
                {"draws": draws, "along": True},
                functools.partial(_along, work, run, draws),
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
        within > 0.5,
    )


def _along(work: Work, run: Checkpoint, draws: int) -> list[NoiseEstimate]:
    estimates = []
    for point in work.checkpoints(run_key(work, run)):
        problem = work.problem(point, "train")
        estimates.append(
            estimate_noise(
                problem, point.weights, point.lr, point.local_batch, draws=draws, label=str(point.step)
            )
        )
    return estimates


def run_key(work: Work, run: Checkpoint) -> str:
    """The key of a run."""
    return next(key for key in work.runs if run.path and work.folder(key) == run.path.parent)


figure(
    "eq4",
    "DPSGD-2020, Eq. 4 in detail",
    "Δ(2) over training, four ways",
    "DPSGD's extra noise is α² tr(HCH), a function of the Hessian and of the learners' spread.",
    runs_of("fig2a", ("dpsgd",), 3),
    smoke=SMOKE_NOTE,
    laptop=f"Figure 2(a), {MNIST_NOTE}",
    paper=MNIST_NOTE,
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
            table = {
                c: np.array(
                    [run.history[c][: len(steps)][chosen] for run in runs if run.step == runs[0].step]
                )
                for c in ("delta", *terms)
            }
            for k, (column, label) in enumerate(terms.items()):
                share = np.abs(table[column]) / table["delta"]
                ax.plot(steps[chosen], np.median(share, 0), color=f"C{k}", lw=1.0, label=label)
                rows += [
                    {
                        "figure": f"2({part})",
                        "step": int(s),
                        "term": column,
                        "median_share_of_delta": float(v),
                    }
                    for s, v in zip(steps[chosen], np.median(share, 0), strict=True)
                ]
            cross = table["delta_cross"] / table["delta"]
            by_seed = cross.mean(1)
            error = by_seed.std(ddof=1) / len(by_seed) ** 0.5 if len(by_seed) > 1 else float("nan")
            shares[part] = float(np.median(np.abs(cross))), float(by_seed.mean()), float(error)
            ax.set_title(f"Figure 2({part}), median of {len(runs)} seeds")
            ax.set_xlabel("step")
            ax.set_yscale("log")
        axes[0].set_ylabel(r"share of $\Delta_{DP}$")
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    compared = [
        Compared(
            f"cross term of Δ_DP, Figure 2({part}): median size; mean ± standard error",
            f"{100 * size:.1f}%; {100 * mean:+.1f} ± {100 * error:.1f}%",
            "0",
        )
        for part, (size, mean, error) in shares.items()
    ]
    worst = max(abs(mean) for _, mean, _ in shares.values())
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"Over training the cross term is {compared[0].ours} of Δ_DP in (a) and {compared[1].ours} in (b); "
        "a mean under 5% counts as none.",
        worst < 0.05,
    )


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
    smoke=SMOKE_NOTE,
    laptop=f"Figure 2, {MNIST_NOTE}",
    paper=MNIST_NOTE,
)(_split)


def _planes(work: Work) -> Drawing:
    """The loss in the plane nearest to DPSGD's learners, early, in the middle and at the end."""
    grid = work.pick(7, 41, 51)
    surfaces, rows = [], []
    steps = work.checkpoints("dpsgd/0")
    for point in (steps[0], steps[len(steps) // 2], steps[-1]):

        def make(point: Checkpoint = point) -> Surface:
            problem = work.problem(point, "train")
            plane = learners_plane(problem, point.weights)
            return contour(problem, plane, grid=(grid, grid), split="train", label=f"step {point.step:,}")

        surface = work.cached(Surface, point, {"plane": "learners", "grid": grid}, make)[0]
        surfaces.append(surface)
        center = float(surface.loss[grid // 2, grid // 2])
        around = [float(work.problem(point, "train").loss(w)) for w in point.weights]
        rows.append(
            {
                "step": point.step,
                "loss_at_mean_nat": center,
                "learners_loss_median_nat": float(np.median(around)),
                "consensus_distance": float(point.history["consensus"][-1]),
                "explained_percent": float(100 * sum(surface.explained)),
            }
        )
    picture = plots.draw(surfaces)
    ratio = [row["learners_loss_median_nat"] / row["loss_at_mean_nat"] for row in rows]
    compared = [
        Compared(f"loss of a learner / loss of the mean, step {row['step']:,}", f"{r:.3g}")
        for row, r in zip(rows, ratio, strict=True)
    ]
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"The mean has a lower loss than the median learner at {sum(r > 1 for r in ratio)} of {len(ratio)} "
        f"checkpoints (by a factor of {ratio[0]:.3g} at step {rows[0]['step']:,}, {ratio[-1]:.3g} at the "
        "end).",
        all(r > 1 for r in ratio),
    )


figure(
    "learners-plane",
    "Further analyses",
    "the loss in the plane of DPSGD's learners, Figure 2(a)",
    "The learners lie around their mean on the walls of the valley that the mean sits in.",
    runs_of("fig2a", ("dpsgd",), 1),
    smoke=SMOKE_NOTE,
    laptop=MNIST_NOTE,
    paper=MNIST_NOTE,
)(_planes)


def _flatness(work: Work) -> Drawing:
    """How far the loss rises at distance along random directions, as they are and filter-normalised, and from
    checkpoints of equal training loss."""
    grid, rows = work.pick(5, 21, 25), list[dict[str, Any]]()
    measures = {"as drawn (paper)": "none", "filter-normalised": "filter"}
    rises: dict[str, dict[str, list[float]]] = {}
    for a in ("ssgd", "dpsgd"):
        for key, run in zip([k for k in work.runs if k.startswith(f"{a}/")], work.group(a), strict=True):
            other = work.group("dpsgd" if a == "ssgd" else "ssgd")[run.seed]
            equal = _of_equal_loss(work, key, other)
            for when, point in (("end", run), ("equal loss", equal)):
                for label, norm in measures.items():
                    surface = work.contour(point, grid=grid, norm=norm, span=0.1 if norm == "none" else 0.5)
                    rise = float(np.median(surface.loss) - surface.loss[grid // 2, grid // 2])
                    rows.append(
                        {
                            "algorithm": NAMED[a],
                            "seed": run.seed,
                            "point": when,
                            "directions": label,
                            "step": point.step,
                            "median_rise_nat": rise,
                        }
                    )
                    rises.setdefault(f"{label}, {when}", {}).setdefault(a, []).append(rise)
    ratios = {k: np.array(v["ssgd"]) / np.array(v["dpsgd"]) for k, v in rises.items()}
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
        f"The median rise of the loss around SSGD's solution is {medians[0]:.2f} times that around DPSGD's "
        f"as the paper draws it, {medians[1]:.2f} times with filter-normalised directions, and "
        f"{medians[2]:.2f} and {medians[3]:.2f} times at checkpoints of about equal training loss.",
        all(m > 1.05 for m in medians),
    )


def _of_equal_loss(work: Work, key: str, other: Checkpoint) -> Checkpoint:
    """Of the run's checkpoints, that whose training loss is nearest to the larger of both final losses."""
    target = max(last(work.end(key), "train_loss"), last(other, "train_loss"))
    points = work.checkpoints(key)
    return min(points, key=lambda point: abs(np.log(last(point, "train_loss") / target)))


figure(
    "flatness",
    "Further analyses",
    "does DPSGD's flatness survive other measures? (Figure 2(b))",
    "The flatter contours of DPSGD stay flatter with filter-normalised directions and at equal training "
    "loss.",
    runs_of("fig2b", ("ssgd", "dpsgd")),
    smoke=SMOKE_NOTE,
    laptop=MNIST_NOTE,
    paper=MNIST_NOTE,
)(_flatness)
