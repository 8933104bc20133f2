"""Ours: batch sharpness, noise scale and disagreement along training, by mixing matrix and batch."""

from __future__ import annotations

import itertools

from landscape.paper.figure import Runs, Scale
from landscape.paper.scales import mnist, seeds

# Total batches (ours): a tenth of Figure 2's, that of Figure 2, and three times as much.
BATCHES = (198, 1998, 6000)
MIXINGS = ("full", "ring(2)", "ring(1)")
SETTINGS = ("SSGD", *(f"{m} {o}" for o in ("AWC", "ATC") for m in MIXINGS))
STEPS = 2000
MEASURED = (
    "monitor.instruments=['lambda-max', 'batch-sharpness', 'noise-scale', 'disagreement']",
    "monitor.every=100",
    "monitor.draws=8",
    "monitor.top=10",
)


def _algorithm(name: str) -> str:
    mixing, _, order = name.partition(" ")
    if not order:
        return "algorithm={name='ssgd'}"
    return f"algorithm={{name='dpsgd', mixing='{mixing}', order='{order.lower()}'}}"


def _runs(scale: Scale) -> Runs:
    return {
        f"{batch} {name}/{seed}": mnist(
            scale,
            "fig2b-dpsgd",
            seed,
            f"batch={batch}",
            _algorithm(name),
            "decompose.every=0",
            "evaluate.every=500",
            *MEASURED,
            steps=STEPS,
        )
        for batch, name in itertools.product(BATCHES, SETTINGS)
        for seed in seeds(scale, 3)
    }
