"""Ours: the edge of stability with other batches, with momentum, and with other networks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from landscape.analysis.batch_sharpness import batch_sharpness
from landscape.analysis.spectrum import spectrum
from landscape.paper.figure import Compared, Drawing, Point, Runs, Scale, Work, figure, summary, test_error
from landscape.paper.figures.plateaus import COLORS, algorithm, draw, near_limits, plateau, rows_of
from landscape.paper.scales import SMOKE_NOTE, mnist, seeds_of
from landscape.paper.verdicts import Effect, Rows, by_seed, column, difference, measured, select
from landscape.plots.picture import wrapped_panels
from landscape.plots.style import shades, style
from landscape.results.batch_sharpness import BatchSharpness
from landscape.results.spectrum import Spectrum
from landscape.train import table_recipes as recipes

SEEDS = 3
EVERY = ("decompose.every=0", "monitor.sharpness=50", "evaluate.every=500")
_OURS = "all settings ours, three seeds"


def sharpness_drawing(
    work: Work,
    panels: Mapping[str, Mapping[str, str]],
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> Drawing:
    """ηλ_max of the runs of each panel, by setting -> prefix of their keys, with limits; rows and numbers.

    ``more``: further columns of a run, by its key.
    """
    rows: list[dict[str, Any]] = []
    compared: list[Compared] = []
    with style():
        picture, axes = wrapped_panels(len(panels), 3.9, 3.1)
        for ax, (panel, prefixes) in zip(axes, panels.items(), strict=True):
            for color, (name, prefix) in zip(_colors(list(prefixes)), prefixes.items(), strict=True):
                runs = work.group(prefix)
                if not runs:
                    continue
                draw(ax, color, runs, label=name)
                for run in runs:
                    extra = (more or {}).get(f"{prefix}/{run.seed}", {})
                    rows += rows_of(panel, name, [run], test_error_percent=test_error(run), **extra)
                values = [plateau(run) for run in runs]
                compared.append(Compared(f"plateau of ηλ_max, {panel}, {name}", summary(values)))
            ax.set_title(panel)
            ax.set_xlabel("step")
            if ax.get_subplotspec().is_first_col():
                ax.set_ylabel(r"$\eta\lambda_{max}$ of $w_a$")
        most = max(axes, key=lambda ax: len(ax.get_legend_handles_labels()[1]))
        picture.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    effects = near_limits(rows)
    near = [float(np.exp(np.mean(np.log(e.values)))) for e in effects if e.values and min(e.values) > 0]
    held = sum(e.holds is True for e in effects)
    text = f"{min(near):.2f} to {max(near):.2f}" if near else "–"
    return Drawing(
        {"": picture},
        rows,
        compared,
        f"The plateau of ηλ_max is {text} times the setting's own limit (dashed; means over the seeds), and "
        f"near it with its interval in {held} of {len(effects)} settings.",
    )


def _colors(names: list[str]) -> list[Any]:
    """SSGD's colour, and shades of DPSGD's for the other settings."""
    return [COLORS["SSGD"], *shades(COLORS["full"], max(1, len(names) - 1))][: len(names)]


# ---- Batches

RATE, STEPS = 0.5, 1000
# Total batches of six learners; the last is the whole training set, a share for each learner.
BATCHES = {"nB = 198": 198, "nB = 1,998": 1998, "nB = 19,998": 19_998, "full batch": 60_000}
_BATCH_SETTINGS = ("SSGD", "full AWC", "ring(2) AWC", "ring(2) ATC")


def _batch_runs(scale: Scale) -> Runs:
    runs = {}
    for (panel, batch), name, seed in itertools.product(
        BATCHES.items(), _BATCH_SETTINGS, seeds_of(scale, SEEDS)
    ):
        every = [f"batch={batch}", *(["sampling=all"] if batch == 60_000 and scale != "smoke" else [])]
        changes = [f"lr={RATE}", *algorithm(name), *EVERY, *every]
        runs[f"{panel} {name}/{seed}"] = mnist(scale, "fig2b-dpsgd", seed, *changes, steps=STEPS)
    return runs


def _at_the_end(work: Work, point: Point) -> dict[str, float]:
    """η times batch sharpness at w_a and at the learners, and times the learners' λ_max."""
    samples, draws = work.pick((100, 4), (SAMPLES, 1000), (SAMPLES, 1000))

    def batches() -> BatchSharpness:
        run = point.load()
        problem = work.cache.problem(run, "train")
        batch = min(run.local_batch * run.learners, problem.samples)
        least = min(draws, 16)
        return batch_sharpness(
            problem,
            batch,
            weights=run.weights,
            lr=run.lr,
            with_lambda_max=False,
            draws=least,
            max_draws=draws,
        )

    def tops() -> list[Spectrum]:
        run = point.load()
        own = [work.cache.problem(run, "train", j).subset(slice(samples)) for j in range(run.learners)]
        return [spectrum(problem, 1) for problem in own]

    found = work.cached(BatchSharpness, point, {"draws": draws}, batches, (batch_sharpness,))[0]
    spectra = work.cached(Spectrum, point, {"learners": True, "samples": samples}, tops, (spectrum,))
    return {
        "lr_batch_sharpness": found.lr * found.value,
        "lr_learners_batch_sharpness": found.lr * float(found.learner_curvature.mean()),
        "lr_learners_lambda_max": found.lr * float(np.median([s.values[0] for s in spectra])),
    }


def _batches(work: Work) -> Drawing:
    panels = {panel: {name: f"{panel} {name}" for name in _BATCH_SETTINGS} for panel in BATCHES}
    more = {key: _at_the_end(work, work.last(key)) for key in work.runs}
    return sharpness_drawing(work, panels, more)


def _judge_batches(rows: Rows) -> list[Effect]:
    """The limits at each batch, their order, and batch sharpness where the batch is smallest."""
    effects = []
    for panel in dict.fromkeys(column(rows, "panel")):
        ssgd, ring = (
            by_seed(rows, "plateau_lr_lambda_max", panel=panel, setting=name)
            for name in ("SSGD", "ring(2) AWC")
        )
        effects.append(Effect(f"{panel}, SSGD less ring(2) AWC", "plateau of ηλ_max", difference(ssgd, ring)))
    small = next(iter(BATCHES))
    effects.append(
        measured(
            f"{small}, SSGD",
            "η × batch sharpness",
            lambda: by_seed(rows, "lr_batch_sharpness", panel=small, setting="SSGD").values(),
            (1.34, 3.0),
            ratio=True,
        )
    )
    return [*effects, *near_limits(rows)]


SAMPLES = 2000
figure(
    "edge-batch",
    "Further analyses",
    "the edge of stability by batch, MNIST",
    "At every batch ηλ_max settles near the rule's own limit, lower for DPSGD in AWC order than for SSGD; "
    "with a small batch η times batch sharpness settles at 2 instead, and λ_max stays below (ours; the "
    "latter arXiv:2412.20553).",
    _batch_runs,
    _judge_batches,
    smoke=SMOKE_NOTE,
    laptop=f"n = 6, α = {RATE}, {STEPS:,} steps, λ_max on {SAMPLES:,} training samples; {_OURS}",
    paper=f"n = 6, α = {RATE}, {STEPS:,} steps; {_OURS}",
    weights=True,
)(_batches)

# ---- Momentum

MOMENTUM, MOMENTUM_RATE, MOMENTUM_STEPS = 0.9, 0.1, 2000
_ORDERS = tuple(
    f"{mixing} {order} {buffers}"
    for order, buffers, mixing in itertools.product(("AWC", "ATC"), ("keep", "mix"), ("full", "ring(2)"))
)


def _momentum_runs(scale: Scale) -> Runs:
    heavy = f"optimizer={{name='sgd', momentum={MOMENTUM}}}"
    return {
        f"{name}/{seed}": mnist(
            scale,
            "fig2b-dpsgd",
            seed,
            f"lr={MOMENTUM_RATE}",
            *algorithm(name),
            heavy,
            *EVERY,
            steps=MOMENTUM_STEPS,
        )
        for name in ("SSGD", *_ORDERS)
        for seed in seeds_of(scale, SEEDS)
    }


def _momentum(work: Work) -> Drawing:
    panels = {}
    for order, (buffers, words) in itertools.product(("AWC", "ATC"), _KEPT.items()):
        chosen = [name for name in _ORDERS if name.split()[1:] == [order, buffers]]
        panels[f"{order}, {words}"] = {"SSGD": "SSGD", **{name.split()[0]: name for name in chosen}}
    return sharpness_drawing(work, panels)


_KEPT = {"keep": "momentum of its own", "mix": "momentum averaged"}
figure(
    "edge-momentum",
    "Further analyses",
    "the edge of stability with momentum 0.9, MNIST",
    "With momentum β, ηλ_max settles near 2(1 + β) for SSGD, (1 + ω_min)(1 + β) for DPSGD in AWC order, and "
    "near the limits of the other order and of averaged momentum (ours).",
    _momentum_runs,
    near_limits,
    smoke=SMOKE_NOTE,
    laptop=f"n = 6, nB = 1998, α = {MOMENTUM_RATE}, {MOMENTUM_STEPS:,} steps; {_OURS}",
    paper=f"n = 6, nB = 1998, α = {MOMENTUM_RATE}, {MOMENTUM_STEPS:,} steps; {_OURS}",
)(_momentum)

# ---- Other networks

_IMAGES, _IMAGE_BATCH = 10_000, 1998
_NETWORK_SETTINGS = ("SSGD", "full AWC", "ring(2) AWC", "ring(2) ATC")
# Networks on the first images of CIFAR-10, with rate and steps; ResNet-18 has BatchNorm.
NETWORKS = {
    "LeNet-5": ("{name='lenet-5'}", 0.1, 600),
    "ResNet-18, 1/16 the width": ("{name='resnet-18', width=0.0625}", 0.5, 300),
}


def _panels(scale: Scale) -> list[str]:
    """The networks of a scale; smoke leaves out the one that takes long."""
    return list(NETWORKS)[: 1 if scale == "smoke" else None]


def _network_runs(scale: Scale) -> Runs:
    runs = {}
    for panel, name, seed in itertools.product(_panels(scale), _NETWORK_SETTINGS, seeds_of(scale, SEEDS)):
        model, rate, steps = NETWORKS[panel]
        changes = [
            f"lr={rate}", f"steps={steps}", "learners=6", f"batch={_IMAGE_BATCH}", f"model={model}",
            f"data={{name='cifar10', subset={_IMAGES}}}", "schedule={}", "optimizer={name='sgd'}",
            *algorithm(name), f"monitor.sharpness={steps // 20}", "monitor.samples=999",
            "decompose.every=0", f"evaluate.every={steps // 4}", "evaluate.bn_samples=2000",
            "checkpoint.every=0",
        ]  # fmt: skip
        if scale == "smoke":
            changes += ["steps=3", "batch=96", "data={name='digits', form='image'}", "monitor.sharpness=1"]
            changes += ["monitor.samples=32", "evaluate.bn_samples=64", "evaluate.every=0"]
        runs[f"{panel} {name}/{seed}"] = recipes.read(
            "cifar10/resnet-18-b1024-ssgd", [*changes, f"seed={seed}"]
        )
    return runs


def _networks(work: Work) -> Drawing:
    panels = {panel: {name: f"{panel} {name}" for name in _NETWORK_SETTINGS} for panel in _panels(work.scale)}
    return sharpness_drawing(work, panels)


def _judge_networks(rows: Rows) -> list[Effect]:
    effects = []
    for panel in dict.fromkeys(column(rows, "panel")):
        here = select(rows, panel=panel)
        ssgd, full, ring = (
            by_seed(here, "plateau_lr_lambda_max", setting=name)
            for name in ("SSGD", "full AWC", "ring(2) AWC")
        )
        effects.append(Effect(f"{panel}, SSGD less full AWC", "plateau of ηλ_max", difference(ssgd, full)))
        effects.append(Effect(f"{panel}, SSGD less ring(2) AWC", "plateau of ηλ_max", difference(ssgd, ring)))
    return [*effects, *near_limits(rows)]


_NETWORKS_NOTE = (
    f"the first {_IMAGES:,} images of CIFAR-10, n = 6, nB = {_IMAGE_BATCH:,}, no momentum, λ_max on 999 "
    f"samples; {_OURS}"
)
figure(
    "edge-networks",
    "Further analyses",
    "the edge of stability of convolutional networks, CIFAR-10",
    "Convolutional networks, too, settle near the limit of their update rule (ours).",
    _network_runs,
    _judge_networks,
    smoke=SMOKE_NOTE,
    laptop=_NETWORKS_NOTE,
    paper=_NETWORKS_NOTE,
    partial=True,
)(_networks)
