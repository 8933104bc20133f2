"""Two networks of DPSGD-2020 at full width, for their first steps at the rate at which its SSGD fails."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, summary
from landscape.paper.figures.lr_divergence import largest_sharpness
from landscape.paper.figures.plateaus import limit_of
from landscape.paper.figures.training_curves import ALL, BOTH, COLOR, NAMED, cell
from landscape.paper.scales import SMOKE_NOTE, seeds_of
from landscape.paper.scales import cell as scaled
from landscape.paper.verdicts import Effect, Rows, by_seed, column, difference, ratio
from landscape.plots.picture import panels
from landscape.plots.style import style
from landscape.stability import max_stable_step
from landscape.train.recipe import Recipe
from landscape.train.table_recipes import BATCHES

NETWORKS = ("efficientnet-b0", "senet-18")
SEEDS, MOMENTUM = 3, 0.9
# Steps at full width: on one core a step takes two to six minutes; and narrower ones on a laptop.
STEPS = {"smoke": 4, "laptop": 16, "workstation": 12, "paper": 60}
# λ_max and ‖g‖ are measured every so many steps.
EVERY = 4


def _recipe(scale: Scale, model: str, algorithm: str, seed: int) -> Recipe:
    """The cell of Table 3 at batch 8192, cut after its first steps; on a laptop of 1/8 the width."""
    name = cell(model, BATCHES[-1], algorithm)
    if scale == "smoke":
        return scaled(scale, name, seed, "monitor.sharpness=4", "monitor.samples=8")
    width = "0.125" if scale == "laptop" else "1.0"
    local = BATCHES[-1] // 16
    return scaled(
        "workstation", name, seed, f"model.width={width}", "epochs=320", f"steps={STEPS[scale]}",
        f"decompose={{every={EVERY}, samples={BATCHES[-1]}, split=false}}", f"monitor.sharpness={EVERY}",
        f"monitor.samples={local}", "evaluate.every=0", "evaluate.bn_samples=1024",
        f"checkpoint.every={EVERY}",
    )  # fmt: skip


def _key(model: str, algorithm: str) -> str:
    return f"{model} {algorithm}"


def _runs(scale: Scale) -> Runs:
    """Seed by seed, so that a budget gives pairs."""
    return {
        f"{_key(model, a)}/{seed}": _recipe(scale, model, a, seed)
        for model, seed, a in itertools.product(NETWORKS, seeds_of(scale, SEEDS), BOTH)
    }


_SHOWN = {
    "loss": "loss of the minibatches (nat)",
    "grad_norm": r"$\Vert g\Vert$ (nat)",
    "lr_lambda_max": r"$\eta\lambda_{max}$ of $w_a$",
}


def _values(run: Checkpoint, quantity: str) -> tuple[Any, Any]:
    """(steps, values) where the quantity was measured."""
    if quantity == "grad_norm":
        squares = run.history["grad_norm2"]
        values = np.sqrt(np.where(squares > 0, squares, np.nan))
    else:
        values = run.history[quantity]
    known = np.isfinite(values)
    return run.history["step"][known], values[known]


def _draw(work: Work) -> Drawing:
    rows: list[dict[str, Any]] = []
    compared: list[Compared] = []
    with style():
        picture, axes = panels(len(NETWORKS), len(_SHOWN), 3.9, 2.7)
        for (i, model), a in itertools.product(enumerate(NETWORKS), BOTH):
            runs = work.group(_key(model, a))
            for ax, (quantity, label) in zip(axes[3 * i : 3 * i + 3], _SHOWN.items(), strict=True):
                for k, run in enumerate(runs):
                    steps, values = _values(run, quantity)
                    ax.plot(
                        steps, values, "o-", ms=3, lw=1.1, color=COLOR[a], label=ALL[a] if not k else None
                    )
                ax.set_ylabel(label)
                ax.set_title(NAMED[model])
                ax.set_xlabel("step")
                if quantity == "lr_lambda_max" and runs:
                    ax.axhline(limit_of(runs[0]), color=COLOR[a], lw=1.0, ls="--")
            rows += [row for run in runs for row in _rows(model, a, run)]
            ends = [float(_values(run, "loss")[1][-1]) for run in runs]
            most = [largest_sharpness(run) for run in runs]
            compared.append(Compared(f"loss of the last step (nat), {NAMED[model]}, {ALL[a]}", summary(ends)))
            compared.append(Compared(f"largest ηλ_max, {NAMED[model]}, {ALL[a]}", summary(most, ".3g")))
        shown = axes[0].get_legend_handles_labels()
        picture.legend(*shown, loc="outside lower center", ncols=2)
    lines = [f"{e.where}, {e.what} {e.text}" for e in _judge(rows)[:2] if e.values]
    return Drawing({"": picture}, rows, compared, f"After the first steps: {'; '.join(lines) or '–'}.")


def _rows(model: str, algorithm: str, run: Checkpoint) -> list[dict[str, Any]]:
    rows = []
    for quantity in _SHOWN:
        for step, value in zip(*_values(run, quantity), strict=True):
            rows.append(
                {
                    "network": NAMED[model],
                    "algorithm": ALL[algorithm],
                    "seed": run.seed,
                    "step": int(step),
                    "quantity": quantity,
                    "value": float(value),
                    "limit": limit_of(run),
                    "diverged": run.diverged,
                }
            )
    return rows


def _judge(rows: Rows) -> list[Effect]:
    """The losses after the last step, and the largest ηλ_max of SSGD against its limit 2(1 + β)."""
    effects = []
    for network in dict.fromkeys(column(rows, "network")):
        ssgd, dpsgd = (
            by_seed(rows, "value", network=network, algorithm=ALL[a], quantity="loss") for a in BOTH
        )
        gap = difference(ssgd, dpsgd)
        effects.append(Effect(f"{network}, SSGD less DPSGD", "loss of the last step (nat)", gap))
    for network in dict.fromkeys(column(rows, "network")):
        where = {"network": network, "algorithm": ALL["ssgd"], "quantity": "lr_lambda_max"}
        most: dict[float, float] = {}
        for row in rows:
            if all(row[key] == value for key, value in where.items()):
                seed = float(row["seed"])
                most[seed] = max(most.get(seed, 0.0), float(row["value"]))
        limit = dict.fromkeys(most, max_stable_step(0, MOMENTUM))
        above = ratio(most, limit)
        effects.append(
            Effect(f"{network}, SSGD", "largest ηλ_max / 2(1 + β)", above, (1.0, np.inf), ratio=True)
        )
    return effects


_NOTE = (
    "16 learners, batch 8192, rate 0.8 without warm-up, all of CIFAR-10, three seeds; λ_max on 512 samples "
    "and g from 8,192; reduced: the first"
)
figure(
    "first-steps",
    "DPSGD-2020, section 4.1",
    "the first steps of the full networks at batch 8192 and rate 0.8",
    "Without warm-up SSGD is unstable at batch 8192 and rate 0.8, and DPSGD is not.",
    _runs,
    _judge,
    smoke=SMOKE_NOTE,
    laptop=f"{_NOTE} {STEPS['laptop']} steps, networks of 1/8 the width",
    workstation=f"{_NOTE} {STEPS['workstation']} steps, networks of full width",
    paper=f"{_NOTE} {STEPS['paper']} steps, networks of full width",
    partial=True,
)(_draw)
