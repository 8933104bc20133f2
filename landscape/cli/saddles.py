"""landscape saddles"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from landscape.cli import common, options
from landscape.core.errors import InputError
from landscape.results.training import median_rank
from landscape.train.experiments.saddles import VARY, sweep

LEVEL = 0.95
RECIPE = "saddle-dpsgd"
# Around the recipe's own values, far enough to show the slope (ours).
VALUES = {"dimension": "2,4,8,16", "noise": "0.0001,0.001,0.01,0.1", "lr": "0.05,0.1,0.2,0.4"}


@click.command(
    epilog="Example: landscape saddles --seeds 0-39 --noise 0.001,0.01 -o saddles.h5 --plot saddles.png"
)
@click.option("--dimension", default=VALUES["dimension"], show_default=True, help="Dimensions of the saddle.")
@click.option(
    "--noise", default=VALUES["noise"], show_default=True, help="Standard deviation of a sample's gradient."
)
@click.option("--lr", default=VALUES["lr"], show_default=True, help="Learning rates.")
@click.option("--sigma", default=0.001, show_default=True, help="Noise on the weights that SSGD* adds.")
@options.seeds("0-19", "Seeds of each setting: 0-19, or 0,1,5; at least six.")
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help=f"Changes the recipe {RECIPE} for all."
)
@click.option(
    "-o",
    "--output",
    default="saddles.h5",
    show_default=True,
    metavar="OUT.h5",
    shell_complete=options.paths("file"),
    help="Result file.",
)
@options.force
@options.picture
@options.quiet
def saddles(
    dimension: str,
    noise: str,
    lr: str,
    sigma: float,
    seeds: str,
    settings: tuple[str, ...],
    output: str,
    force: bool,
    picture: str | None,
    quiet: bool,
) -> None:
    """Steps until SSGD, SSGD* and DPSGD leave a saddle, by dimension, noise and learning rate.

    One of the three varies at a time; the others are as in the recipe saddle-dpsgd. An empty list skips one.
    Prints medians over seeds with exact 95% confidence bands. The problem is ours: DPSGD-2020 describes its
    problem in an appendix that is not available.
    """
    seed_list = options.parse_seeds(seeds)
    median_rank(len(seed_list), LEVEL)
    chosen = {
        name: parse(f"--{name}", text, VALUES[name], whole=name == "dimension")
        for name, text in (("dimension", dimension), ("noise", noise), ("lr", lr))
        if text.strip()
    }
    algorithms = {
        "ssgd": ["algorithm={name='ssgd'}"],
        "ssgd*": [f"algorithm={{name='ssgd*', sigma={sigma!r}}}"],
        "dpsgd": list[str](),
    }
    if not chosen:
        raise InputError(f"--{', --'.join(VARY)}: at least one of them must have a value")
    path = Path(output)
    common.check_targets(path, picture, force)
    runs, finished = len(seed_list) * len(algorithms) * sum(map(len, chosen.values())), 0
    results = []
    with common.progress_bar("saddles", quiet) as bar:

        def done() -> None:
            nonlocal finished
            finished += 1
            bar(finished / runs)

        for name, values in chosen.items():
            results.append(
                sweep(name, values, algorithms, seed_list, recipe=RECIPE, settings=settings, done=done)
            )
    for result in results:
        common.describe(result)
    common.write(results, path, picture)


def parse(where: str, text: str, example: str, *, whole: bool) -> list[float]:
    """[0.1, 0.2] from "0.1,0.2"; positive, and whole numbers if ``whole``."""
    try:
        values: list[float] = sorted({int(word) if whole else float(word) for word in text.split(",")})
    except ValueError:
        values = []
    if not values or not 0 < values[0] <= values[-1] < np.inf:
        kind = "whole numbers" if whole else "numbers"
        raise InputError(f"{where}: '{text}' is not allowed, it must be {kind} > 0, such as {example}")
    return values
