"""DPSGD-2020's Eq. 4 in detail, the loss smoothed by the spread (DPSGD-2021), and (our choice) all rules.

The rules are decomposed, and tell whether the spread lies in sharp directions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from landscape import models, plots
from landscape.analysis.noise import noise
from landscape.analysis.spread import smoothing
from landscape.core.hdf5 import Array
from landscape.core.statistics import Estimate, mean_and_error
from landscape.paper.compared import Compared, summary
from landscape.paper.context import Context, Ended, Point
from landscape.paper.figure import Drawing, figure, figures_toml, handle, late
from landscape.paper.verdicts import CONFIDENCE, Effect, Rows, distinct, effect_of, paired_effect, select
from landscape.plots.picture import caption, panels, points, shared_legend, wrapped_panels
from landscape.plots.style import CYCLE, OTHER, color_of, log_axis
from landscape.plots.training import column_of
from landscape.results.flatness import Smoothing
from landscape.results.noise import Noise
from landscape.results.shown import running_quartiles
from landscape.training import experiments as continued

# ---- Four numbers for Δ(2)

_FORMS = {
    "direct": "definition (Eq. 4, left)",
    "full_batch": "on the full batch",
    "eq4": "Eq. 4, α² tr(HCH)",
    "first_order": "first order, minibatch Hessians",
}
# What counts as equal (our choice).
_FACTOR = 1.5


def _ratios_to_definition(rows: Rows) -> Rows:
    """Return the four numbers by seed and step, divided by the definition; NaN where the definition is 0."""
    numbers = rows.pivot(index=["seed", "step"], columns="estimate", values="value")
    return numbers.div(numbers["direct"].where(numbers["direct"] != 0), axis=0)


def _judge_eq4(rows: Rows) -> list[Effect]:
    """Judge the median over the checkpoints of a run."""
    ratios = _ratios_to_definition(rows)["eq4"].groupby("seed", sort=False)
    medians = ratios.agg(lambda values: np.median(values))  # NaN if a checkpoint has NaN
    what = "α² tr(HCH) / the extra noise by its definition, median over checkpoints"
    return [Effect("Figure 2(a)", what, tuple(medians.tolist()), (1 / _FACTOR, _FACTOR), ratio=True)]


@figure("eq4", _judge_eq4)
def _eq4(context: Context) -> Drawing:
    """Draw the extra noise Δ(2), estimated in the four ways of _FORMS, against the step of the checkpoint.

    Each seed has a panel.
    """
    draws = context.sizes["draws"]

    def noise_at(point: Point) -> Noise:
        run = point.load()
        problem, step = context.problem(run, "train"), str(run.step)
        return noise(problem, run.weights, run.lr, run.local_batch, draws=draws, label=step)

    def measure(run: Ended) -> Iterator[dict[str, Any]]:
        """Yield a row for each of the four estimates at each checkpoint of a run."""

        def make() -> list[Noise]:
            return [noise_at(point) for point in run.points]

        # "along" has no meaning. It is kept because the name of the stored file is a hash of these settings.
        results = context.cached(Noise, run.points, {"draws": draws, "along": True}, make, functions=[noise])
        for name, result in itertools.product(_FORMS, results):
            value, error = result.means()[name]
            yield {"step": int(result.label), "estimate": name, "value": value, "standard_error": error}

    rows = context.table(measure)  # with the seed of each run
    groups = rows.groupby("seed")
    picture, axes = wrapped_panels(len(groups), 2.1, 3.0, columns=5, sharey=True)
    for ax, (seed, seed_rows) in zip(axes, groups, strict=True):
        for marker, (name, label) in zip("osD^", _FORMS.items(), strict=True):
            curve = select(seed_rows, estimate=name)
            look = {"marker": marker, "ms": 4, "label": label, "lw": 3.2 if name == "direct" else 1.4}
            ax.errorbar(curve["step"], curve["value"], curve["standard_error"], **look)
        ax.set(yscale="log", title=f"seed {seed}", xlabel="step")
    axes[0].set_ylabel("Δ(2) (squared weights)")
    shared_legend(picture, axes[:1], ncols=4)
    ratios = _ratios_to_definition(rows)
    # The definition is the estimate "direct". The other three estimates are divided by "direct". In the paper
    # the ratios are 1.
    names = [name for name in _FORMS if name != "direct"]
    compared = [Compared(f"{_FORMS[n]}, of the definition", summary(ratios[n], ".2g"), "1") for n in names]
    return Drawing({"": picture}, rows, compared)


# ---- The three terms of DPSGD's noise

_TERMS = {
    "delta_s": r"of minibatches, $\Delta_S$",
    "delta_2": r"of the learners' spread, $\Delta(2)$",
    "delta_cross": "cross term of both",
}


def _judge_split(rows: Rows) -> list[Effect]:
    """Judge the mean over the steps of a run; below 5% counts as none (our choice)."""
    means = select(rows, step="mean", term="delta_cross")
    what, claimed = "cross term / Δ_DP, mean over the steps", (-0.05, 0.05)
    return [
        Effect(f"Figure {part}", what, tuple(map(float, group["share_of_delta"])), claimed)
        for part, group in means.groupby("figure", sort=False)
    ]


@figure("noise-split", _judge_split)
def _split(context: Context) -> Drawing:
    """Draw the three terms of Δ_DP = Δ_S + Δ(2) + cross term, as shares of Δ_DP, along training.

    Δ(2) is here α²‖P⊥δ‖², the history's column delta_2 (:class:`landscape.results.noise.Noise` has the
    symbols). Figure 2(a) and Figure 2(b) have a panel each; lines are running medians over 5% of the steps
    and all seeds, with a band between the quartiles. For each step and term, the table has the median size of
    the share over the seeds; for each run, it has the mean share of the cross term over the steps. Runs that
    ended earlier than others are left out.
    """
    tables, compared = [], list[Compared]()
    picture, axes = panels(1, 2, 5.0, 3.7, sharey=True)
    for ax, part in zip(axes, "ab", strict=True):
        all_ends = [run.end for run in context.ended(_part=part)]
        ends = [end for end in all_ends if end.step == max(each.step for each in all_ends)]
        is_decomposed = np.isfinite(ends[0].history["delta"])
        steps = ends[0].history["step"][is_decomposed].astype(int)
        shares: dict[str, Array] = {}  # term -> its shares, (runs, steps)
        for term, label in _TERMS.items():
            shares[term] = share = np.array([
                end.history[term][is_decomposed] / end.history["delta"][is_decomposed] for end in ends
            ])  # fmt: skip
            centers, (low, median, high) = running_quartiles(np.tile(steps, len(ends)), share.ravel())
            ax.fill_between(centers, low, high, alpha=0.25, lw=0)
            ax.plot(centers, median, label=label)
            place = {"figure": f"2({part})", "seed": "median", "step": steps, "term": term}
            tables.append(pd.DataFrame({**place, "share_of_delta": np.median(np.abs(share), 0)}))
        cross = shares["delta_cross"]
        place = {"figure": f"2({part})", "seed": [end.seed for end in ends], "step": "mean"}
        tables.append(pd.DataFrame({**place, "term": "delta_cross", "share_of_delta": cross.mean(1)}))
        mean, error = mean_and_error(cross.mean(1))
        size_text = f"{100 * float(np.median(np.abs(cross))):.1f}%"
        error_text = f" ± {100 * error:.1f}" if np.isfinite(error) else ""
        what = f"cross term of Δ_DP, Figure 2({part}): median size; mean ± standard error"
        compared.append(Compared(what, f"{size_text}; {100 * mean:+.1f}{error_text}%", paper="0"))
        ax.axhline(0, color=OTHER, lw=0.9, zorder=0)
        ax.set(title=f"Figure 2({part}), α = {ends[0].lr:g}", xlabel="step")
    axes[0].set_ylabel(r"share of DPSGD's noise $\Delta_{DP}$")
    shared_legend(picture, axes[:1], ncols=3)
    rows = pd.concat([table.astype(object) for table in tables], ignore_index=True)
    # The number of seeds, such as "5", or "4 or 5" if the figures differ. A row with the step "mean" has the
    # mean of one seed.
    seed_counts = " or ".join(map(str, select(rows, step="mean").groupby("figure").size().unique()))
    caption(picture, f"Medians and quartiles over 5% of the steps and {seed_counts} seeds.")
    return Drawing({"": picture}, rows, compared)


# ---- The loss smoothed by the spread


def _smoothed(context: Context, point: Point) -> Smoothing:
    draws, samples = context.sizes["draws"], context.sizes["samples"]

    def make() -> Smoothing:
        run = point.load()
        problem, rate = context.problem(run, "train", samples=samples), continued.effective_rate(run)
        path = continued.mean_path(run, continued.PATH_STEPS, data_dir=context.data_dir)
        settings: Any = {"lr": run.lr, "alpha_e": rate, "split": "train", "label": point.label}
        return smoothing(problem, run.weights, draws=draws, trajectory=path, **settings)

    by = (smoothing, continued.mean_path)
    return context.cached(Smoothing, point, {"pairs": draws, "samples": samples}, make, by)[0]


def _judge_smoothing(rows: Rows) -> Iterator[Effect]:
    """Judge DPSGD's checkpoints, the first and the last of each seed."""
    seeds = rows["checkpoint"].astype(str).str.extract(r"^dpsgd, seed (\d+), step ", expand=False)
    runs, below = rows.groupby(seeds, sort=False), (-np.inf, 1.0)
    for when, run in (("early", runs.first()), ("at the end", runs.last())):
        flat = tuple((run["lambda_smoothed"] / run["lambda_max"]).tolist())
        yield Effect(when, "λ_max of the smoothed loss / of the loss", flat, below, ratio=True)
    low = tuple((runs.first()["alpha_e"] / runs.first()["alpha"]).tolist())
    yield Effect("early", "effective rate α_e / α", low, below)


@figure("smoothing", _judge_smoothing)
def _smoothing(context: Context) -> Drawing:
    """Draw how the spread smooths the loss, at the first and the last checkpoint of the runs of seed 0.

    The table has these checkpoints of all runs.
    """
    results_of_seed_0 = list[Smoothing]()

    def measure(run: Ended) -> list[dict[str, Any]]:
        results = [_smoothed(context, point) for point in (run.points[0], run.points[-1])]
        if run.values["seed"] == 0:
            results_of_seed_0.extend(results)
        # In lambda_smooth, entry 0 has the covariance of the spread, entry 1 an isotropic covariance. In
        # share, entry 0 is of the sharpest direction.
        return [
            {
                "checkpoint": r.label,
                "lambda_max": r.lambda_max,
                "lambda_smoothed": float(r.lambda_smooth[0]),
                "standard_error": float(r.lambda_smooth_se[0]),
                "lambda_smoothed_isotropic": float(r.lambda_smooth[1]),
                "tr_H_Sigma": r.trace_hs,
                "consensus_distance": r.consensus,
                "alpha": r.lr,
                "alpha_e": r.alpha_e,
                "share_along_sharpest": float(r.share[0]),
            }
            for r in results
        ]

    rows = context.table(measure).drop(columns="seed")  # the column "checkpoint" names the seed
    compared = []
    for r in rows.itertuples():
        ours = f"{r.lambda_smoothed / r.lambda_max:.3f} ± {r.standard_error / abs(r.lambda_max):.3f}"
        compared.append(Compared(f"λ_max smoothed / λ_max, {r.checkpoint}", ours))
    return Drawing({"": plots.draw(results_of_seed_0)}, rows, compared)


LAYOUT: dict[str, Any] = figures_toml()["rules_layout"]
# Rules are compared when they have sent the bytes that SSGD sends in this share of its steps (our choice).
SHARE = 1 / 8
SAMPLES, BYTES = "equal samples", "equal bytes"
IID, SKEWED = "iid", "Dirichlet 0.1"
ERROR, COSINE = "test_error_percent", "path_cosine"
GROUP_COLUMNS = ["network", "split", "rule"]
# Two rules that agree in these columns made the same run: the GPT's DiLoCo is DiLoCo with AdamW.
SAME_RUNS = ["network", "split", "seed", "at", "kilobytes_a_step", "consensus", "path_cosine", "train_loss"]
# Rules that differ in the schedule of the rate or the optimizer only, and are compared with one another.
ADAPTIVE, PLAIN = "DSGD-AC, cosine rate", "DPSGD AWC, cosine rate"
MULOCO, DILOCO = "MuLoCo", "DiLoCo, AdamW"


# ---- The table


def _sent(run: Ended) -> Array:
    """Return the bytes that a learner sends in each step."""
    sent = run.end.history["comm_bytes"]
    sent = sent[np.isfinite(sent)]
    assert len(sent) == run.end.step  # a record has all of up to record.POINTS steps
    return sent


def _derived(run: Ended) -> dict[str, Array]:
    """Return the columns of the history with those that follow from them; NaN where a column is not there."""
    h = {name: column_of(run.end, name) for name in LAYOUT["columns"]}
    with np.errstate(divide="ignore", invalid="ignore"):  # a rate of zero; an estimate of ‖g‖² below zero
        return h | {
            "relative_rate": h["alpha_e"] / h["lr"],
            "step_cosine": h["alpha_e"] * np.sqrt(h["grad_norm2"] / h["displacement2"]),
            "delta_from_spread": (h["delta_2"] + h["delta_cross"]) / h["delta"],
            "of_limit": h["lr_lambda_max"] / h["lr_lambda_limit"],
        }


def _measured(run: Ended, until: int) -> dict[str, Any]:
    """Return the numbers of a run up to the step ``until``.

    A number that the run's rule or optimizer does not have is NaN. Means and medians are over the second half
    of these steps. Training loss and test error are the last values. Ratios are medians: a denominator, such
    as a schedule's rate or an estimate of ‖g‖², may be near zero.
    """
    columns = _derived(run)
    sent = _sent(run)[:until]  # bytes in each step
    is_within = columns["step"] <= until
    is_late = is_within & (columns["step"] > until / 2)

    def statistic(name: str, is_counted: Array, reduce: Callable[[Array], Any]) -> float:
        values = columns[name][is_counted & np.isfinite(columns[name])]
        return float(reduce(values)) if len(values) else float("nan")

    def last_value(name: str) -> float:
        return statistic(name, is_within, lambda values: values[-1])

    # A gap ends at a step with an exchange, or at the last step. Steps are counted from 1.
    gap_ends = np.append(np.flatnonzero(sent) + 1, until)
    return {
        "step": until,
        "megabytes": sent.sum() / 1e6,
        "kilobytes_a_step": sent.mean() / 1e3,
        "kilobytes_burst": sent.max() / 1e3,
        "steps_apart": int(np.diff(gap_ends, prepend=0).max()),  # the longest gap
        **{name: statistic(name, is_late, np.median) for name in LAYOUT["medians"]},
        **{name: statistic(name, is_late, np.mean) for name in LAYOUT["means"]},
        "train_loss": last_value("train_loss"),
        ERROR: 100 * (1 - last_value("test_accuracy")),
        "diverged": run.end.diverged,
    }


def _judge_rules(rows: Rows) -> Iterator[Effect]:
    """Judge local SGD against SSGD at equal bytes, MuLoCo against DiLoCo, and what skewed data cost D²."""
    for network, split in distinct(rows, "network", "split"):
        place: dict[str, Any] = {"network": network, "split": split}
        where = f"{network}, {split}"
        what = "test error at equal bytes, SSGD − local SGD (points)"
        yield paired_effect(where, what, rows, ERROR, at=BYTES, rule=("SSGD", "local SGD"), **place)
        what = f"cosine of the displacement of w_a with −g, {MULOCO} − {DILOCO}"
        yield paired_effect(where, what, rows, COSINE, at=SAMPLES, rule=(MULOCO, DILOCO), **place)
    for network in distinct(rows, "network"):
        by = select(rows, network=network, at=SAMPLES).pivot_table(ERROR, "seed", ["rule", "split"])
        worse = {rule: by[rule, SKEWED] - by[rule, IID] for rule in ("DPSGD AWC", "D²")}
        what = f"what {SKEWED} adds to the test error, DPSGD AWC − D² (points)"
        yield effect_of(network, what, worse["DPSGD AWC"], worse["D²"])


@figure("rules", _judge_rules)
def _rules(context: Context) -> Drawing:
    """Draw two pictures for each network, with a panel for each measured quantity and a row for each rule.

    The first picture has the rules that exchange in each step. The second has SSGD, and the rules whose
    learners are apart for several steps. The first network's first picture also has local SGD, DiLoCo and
    MuLoCo, which the figure's claims are about. :func:`.pages.write` replaces the title of this picture by
    the figure's finding.
    """
    tables, compared, pictures = [], list[Compared](), dict[str, Any]()
    colors = {run.values["rule"]: color_of(run.end.algorithm) for run in context.ended()}
    for network in dict.fromkeys(cell.values["network"] for cell in context.cells):
        ssgd = context.ended(network=network, rule="SSGD")[0]
        byte_budget = _sent(ssgd).mean() * ssgd.last.recipe.steps * SHARE

        def measure(run: Ended, byte_budget: float = byte_budget) -> list[dict[str, Any]]:
            # Rounding of the sum must not cost a run its last step, hence 1e-9.
            steps_within = int(np.searchsorted(_sent(run).cumsum(), byte_budget * (1 + 1e-9), "right"))
            last_steps = {SAMPLES: run.end.step, BYTES: max(1, steps_within)}
            return [{"at": at, **_measured(run, step)} for at, step in last_steps.items()]

        table = context.table(measure, network=network)
        tables.append(table)
        rows = table.drop_duplicates(SAME_RUNS)  # of rules that made the same run, the first is drawn
        is_first_network = not pictures
        network_suffix = "" if is_first_network else f"-{network.split(',')[0].lower()}"
        # Whether the row's rule has learners that are apart for several steps.
        is_apart = rows["rule"].isin(distinct(rows[rows["steps_apart"] > 1], "rule"))
        is_in_first = ~is_apart
        if is_first_network:
            is_in_first |= rows["rule"].isin(["local SGD", DILOCO, MULOCO])
        is_in_second = is_apart | (rows["rule"] == "SSGD")
        for suffix, picture_rows in {"": rows[is_in_first], "-apart": rows[is_in_second]}.items():
            pictures[network_suffix + suffix] = picture = _rules_picture(picture_rows, network, colors)
            picture.suptitle(f"{network}: several steps between exchanges" if suffix else network)
        compared += _compared(table)
    return Drawing(pictures, pd.concat(tables, ignore_index=True), compared, LAYOUT["remark"])


def _interval(values: Any) -> tuple[float, float, float]:
    """Return (mean, low, high) over the seeds; NaN if a seed has no number, or there is only one seed."""
    estimate = Estimate.of(values.to_numpy(float))
    return estimate.value, *estimate.interval(CONFIDENCE)


def _text(values: Any, form: str) -> str:
    """Return the mean over the seeds ± half of the interval, or "–" where it is no number."""
    mean, low, _ = _interval(values)
    spread = f" ± {float(f'{mean - low:.1g}'):g}" if mean - low > 1e-9 * abs(mean) else ""  # not its rounding
    return f"{mean:{form}}{spread}" if np.isfinite(mean) else "–"


def _compared(rows: Rows) -> list[Compared]:
    """Return a line for each network, split and rule: its numbers."""
    lines = []
    for key, group in rows.groupby(GROUP_COLUMNS, sort=False):
        texts = [f"{label} {_text(select(group, at=at)[c], form)}" for label, c, form, at in LAYOUT["table"]]
        lines.append(Compared(", ".join(key), "; ".join(texts)))
    return lines


def _rules_picture(rows: Rows, network: str, colors: dict[str, str]) -> Any:
    """Draw a panel for each entry of LAYOUT["panels"], with a row for each rule.

    Points are means over the seeds, with confidence intervals. They are filled for iid data, and hollow for
    skewed data.
    """
    rules = distinct(rows, "rule")
    # A panel is (column, label, scale, comparison). The comparison selects rows: numbers after equal SAMPLES,
    # or after equal BYTES. A column without numbers has no panel.
    data_panels = [panel for panel in LAYOUT["panels"] if rows[panel[0]].notna().any()]
    picture, axes = panels(1, len(data_panels), 10.5 / len(data_panels), 0.27 * len(rules) + 1.3, sharey=True)
    for ax, (column, label, scale, comparison) in zip(axes, data_panels, strict=True):
        for (row, rule), split in itertools.product(enumerate(rules), (IID, SKEWED)):
            mean, low, high = _interval(select(rows, rule=rule, split=split, at=comparison)[column])
            if not np.isfinite(mean) or (scale == "log" and not mean > 0):
                continue
            lengths = [[mean - low], [high - mean]] if np.isfinite(low) else None
            color = colors[rule]
            y = row - 0.17 if split == IID else row + 0.17
            look: Any = {"mfc": color if split == IID else "white", "ms": 4, "lw": 0.8, "capsize": 0}
            points(ax, mean, y, None, color, xerr=lengths, **look)
        if scale == "log":
            log_axis(ax.xaxis, factor=2)
        elif scale == "symlog" and np.abs(ax.dataLim.intervalx).max() > 10:
            ax.set_xscale("symlog", linthresh=1)
            ax.xaxis.set_major_formatter("{x:g}")  # powers of ten take more room than there is
        ax.set_xlabel(label)
    axes[0].set_yticks(range(len(rules)), rules)
    axes[0].set_ylim(len(rules) - 0.5, -0.5)
    circle = {"marker": "o", "ls": "none", "ms": 4}
    handles = [handle(IID, **circle), handle(SKEWED, mfc="white", **circle)]
    picture.legend(handles=handles, loc="outside lower center", ncols=2)
    caption(picture, f"{network}. {LAYOUT['caption']}")
    return picture


# ---- Where the spread lies

COLUMNS = 4  # of panels in a row


def _along(run: Ended) -> Rows:
    """Return a row for each measurement at which the learners' weights differ."""
    h = _derived(run)
    at = np.isfinite(h["spread_share"]) & np.isfinite(h["noise_share"])
    h = {name: column[at] for name, column in h.items()}
    table = pd.DataFrame({name: h[name] for name in ("step", *LAYOUT["shares"])})
    alignment = 2 * h["disagreement_cost"] / (h["consensus"] * h["lambda_max"])
    model = run.end.model
    size = sum(p.numel() for p in models.build(model["name"], **model["options"]).parameters())
    # A random direction has its equal part along each of the eigenvectors.
    random_share = run.last.recipe.monitor.k / size
    return table.assign(alignment=alignment, random_share=random_share).astype({"step": int})


def _judge_disagreement(rows: Rows) -> Iterator[Effect]:
    """Judge each rule's share of the spread against that of the noise, and adaptive consensus."""
    for key, group in rows.groupby(GROUP_COLUMNS, sort=False):
        means = late(group).groupby("seed")[["spread_share", "noise_share"]].mean()
        what = "share in the sharp space, the spread's / the noise's"
        pair = means["spread_share"], means["noise_share"]
        yield effect_of(", ".join(key), what, *pair, times=True)
    for (network, split), group in rows.groupby(GROUP_COLUMNS[:2], sort=False):
        means = late(group).groupby(["rule", "seed"], as_index=False)["alignment"].mean()
        what = f"tr(HC)/(λ_max tr C), {ADAPTIVE} / {PLAIN}"
        how: dict[str, Any] = {"times": True, "claimed": (0.0, 1.0), "rule": (ADAPTIVE, PLAIN)}
        yield paired_effect(f"{network}, {split}", what, means, "alignment", **how)


@figure("disagreement", _judge_disagreement)
def _disagreement(context: Context) -> Drawing:
    """Draw the shares along training: a picture for each network, a panel for each rule."""
    rows = context.table(_along)
    pictures: dict[str, Any] = {}
    once = rows.drop_duplicates(["network", "split", "seed", "step", *LAYOUT["shares"], "alignment"])
    for network, group in once.groupby("network", sort=False):
        pictures[f"-{network.split(',')[0].lower()}" if pictures else ""] = _shares_picture(group, network)
    compared = []
    what = "share in the sharp space of the spread; of the noise; of a random direction"
    for key, group in rows.groupby(GROUP_COLUMNS, sort=False):
        half = late(group).groupby("seed").mean(numeric_only=True)
        names = (*LAYOUT["shares"][:2], "random_share")
        texts = [_text(half[name], ".2g") for name in names]
        compared.append(Compared(f"{', '.join(key)}: {what}", "; ".join(texts)))
    return Drawing(pictures, rows, compared)


def _shares_picture(rows: Rows, network: str) -> Any:
    """Draw the medians over seeds of the spread's share (solid) and the noise's (dashed), by rule."""
    rules = distinct(rows, "rule")
    picture, axes = wrapped_panels(len(rules), 2.5, 1.8, columns=COLUMNS, sharex=True, sharey=True)
    looks, widths = {IID: CYCLE[4], SKEWED: CYCLE[0]}, {IID: 2.6, SKEWED: 1.2}  # equal curves are both seen
    for ax, rule in zip(axes, rules, strict=True):
        for split, color in looks.items():
            middle = select(rows, rule=rule, split=split).groupby("step")[LAYOUT["shares"][:2]].median()
            for name, line in zip(middle, ("-", ":"), strict=True):
                ax.plot(middle.index, middle[name], color=color, ls=line, lw=widths[split])
        ax.set_title(rule)
    lines = [handle("the learners' spread", lw=1.3), handle("gradient noise at the mean", lw=1.3, ls=":")]
    lines += [handle(split, color=color, lw=widths[split]) for split, color in looks.items()]
    picture.legend(handles=lines, loc="outside lower center", ncols=4)
    for ax in axes[-COLUMNS:]:
        ax.set_xlabel("step")
    for ax in axes[::COLUMNS]:
        ax.set_ylabel("sharp share")
    picture.suptitle(network)
    caption(picture, f"{network}. {LAYOUT['shares_caption']}")
    return picture
