"""Rates up to and beyond the edge: SSGD and four forms of DPSGD, and where SSGD stops converging."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.paper.figure import Runs, Scale, Work, test_error
from landscape.paper.figures.training_curves import cell
from landscape.paper.scales import cell as scaled
from landscape.paper.scales import seeds_of
from landscape.plots.style import color_of, shades
from landscape.train.recipe import Recipe

# The rates tried, as multiples of the paper's for the batch: 0.8 … 25.6 at batch 8192 (ours).
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
SEEDS = 3


def factors(scale: Scale) -> tuple[float, ...]:
    """Those of a scale: on the bundled digits the first and the last."""
    return FACTORS[:: len(FACTORS) - 1] if scale == "smoke" else FACTORS


@dataclass(frozen=True)
class Variant:
    """An algorithm of Table 5: ``base`` in the name of its cell, and what is changed of the recipe."""

    name: str
    base: str
    options: tuple[tuple[str, Any], ...] = ()
    momentum: bool = False  # differs from another variant only where the optimizer has momentum


VARIANTS = {
    "ssgd": Variant("SSGD", "ssgd"),
    "dpsgd": Variant("DPSGD", "dpsgd"),
    "atc": Variant("DPSGD ATC", "dpsgd", (("order", "atc"),)),
    "mix": Variant("DPSGD, momentum averaged", "dpsgd", (("buffers", "mix"),), True),
    "atc-mix": Variant("DPSGD ATC, momentum averaged", "dpsgd", (("order", "atc"), ("buffers", "mix")), True),
}
COLORS = dict(zip(VARIANTS, (color_of("ssgd"), *shades(color_of("dpsgd"), 4)), strict=True))


def variants(model: str) -> list[str]:
    """The variants that differ for a network: the LSTM is trained without momentum."""
    return [key for key, variant in VARIANTS.items() if model != "lstm" or not variant.momentum]


def key(model: str, batch: int, variant: str, factor: float) -> str:
    """The prefix of the runs at ``factor`` times the paper's rate; of a cell of the paper, its name."""
    entry = VARIANTS[variant]
    name = cell(model, batch, entry.base) + (f" {variant}" if entry.options else "")
    return f"{name} × {factor:g}" if factor != 1 else name


def runs_at(
    scale: Scale, model: str, batch: int, names: Iterable[str], at: Iterable[float]
) -> dict[str, Recipe]:
    """Runs of the variants ``names`` ``at`` multiples of the paper's rate, with all seeds."""
    runs = {}
    for factor, name, seed in itertools.product(at, names, seeds_of(scale, SEEDS)):
        variant = VARIANTS[name]
        base = scaled(scale, cell(model, batch, variant.base), seed)
        changed = base.algorithm | dict(variant.options)
        runs[f"{key(model, batch, name, factor)}/{seed}"] = dataclasses.replace(
            base, lr=float(f"{base.lr * factor:.6g}"), algorithm=changed
        )
    return runs


def chance(run: Checkpoint) -> float:
    """Test error in % of a guess among the classes, were they equally likely."""
    options = run.model["options"]
    return 100 * (1 - 1 / int(options.get("classes") or options["widths"][-1]))


def error(run: Checkpoint) -> float:
    """Test error of w_a at the end in %; that of a guess where training diverged."""
    return chance(run) if run.diverged else test_error(run)


def bound(best: float, of_guess: float) -> float:
    """Below this test error in % a run counts as converged: halfway from the best to a guess (ours)."""
    return (best + of_guess) / 2


def _converges(work: Work, model: str, batch: int, factor: float, below: float) -> bool:
    return all(error(run) < below for run in work.group(key(model, batch, "ssgd", factor)))


def edge(work: Work, model: str, batch: int) -> tuple[float, float] | None:
    """(the best of SSGD's rates, the first at which a seed fails), as factors; None while that is not known.

    Rates are doubled until a seed fails, which may be at the paper's own, or the last of FACTORS has run: the
    second number is then twice that.
    """
    tried: dict[float, float] = {}
    below = float("nan")
    for factor in factors(work.scale):
        prefix = key(model, batch, "ssgd", factor)
        runs = [name for name in work.runs if name.rpartition("/")[0] == prefix]
        if not runs or not all(map(work.ended, runs)):
            return None
        errors = [error(run) for run in work.group(prefix)]
        tried[factor] = sum(errors) / len(errors)
        if factor == 1:
            below = bound(min(errors), chance(work.group(prefix)[0]))
        if not _converges(work, model, batch, factor, below):
            return min(tried, key=lambda f: tried[f]), factor
    return min(tried, key=lambda f: tried[f]), 2 * FACTORS[-1]


def search(work: Work, model: str, batch: int) -> Runs:
    """What comes next: SSGD at the next rate, or, once it has failed, DPSGD there and at SSGD's best rate."""
    found = edge(work, model, batch)
    if found is not None:
        at = [factor for factor in dict.fromkeys(found) if factor <= FACTORS[-1]]
        return runs_at(work.scale, model, batch, ("dpsgd",), at)
    for factor in factors(work.scale):
        if f"{key(model, batch, 'ssgd', factor)}/0" not in work.runs:
            return runs_at(work.scale, model, batch, ("ssgd",), (factor,))
    return {}
