"""landscape saddles"""

from __future__ import annotations

import itertools
from pathlib import Path

from landscape.cli import common
from landscape.cli.options import command, group, numbers, parse_seeds
from landscape.core.errors import InputError
from landscape.results.training import median_rank
from landscape.train.experiments.escapes import VARY, sweep

LEVEL = 0.95
RECIPE = "saddle-dpsgd"
# Around the recipe's own values, far enough to show the slope (ours).
VALUES = {"dimension": "2,4,8,16", "noise": "0.0001,0.001,0.01,0.1", "lr": "0.05,0.1,0.2,0.4"}


@command(
    seeds={"metavar": "N-M,…"},
    target=group(common.Target, output={"default": "saddles.h5", "help": "Result file."}),
)
def saddles(
    *,
    dimension: str = VALUES["dimension"],
    noise: str = VALUES["noise"],
    lr: str = VALUES["lr"],
    sigma: float = 0.001,
    seeds: str = "0-19",
    settings: tuple[str, ...],
    target: common.Target,
) -> None:
    """Steps until SSGD, SSGD* and DPSGD leave a saddle, by dimension, noise and learning rate.

    One of the three varies at a time; the others are as in the recipe saddle-dpsgd. An empty list skips one.
    Prints medians over seeds with exact 95% confidence bands. The problem is ours: DPSGD-2020 describes its
    problem in an appendix that is not available.

    Args:
        dimension: Dimensions of the saddle.
        noise: Standard deviation of a sample's gradient.
        lr: Learning rates.
        sigma: Noise on the weights that SSGD* adds.
        seeds: Seeds of each setting: 0-19, or 0,1,5; at least six.
        settings: Changes the recipe saddle-dpsgd for all.

    Example:
        landscape saddles --seeds 0-39 --noise 0.001,0.01 -o saddles.h5 --plot saddles.png
    """
    seed_list = parse_seeds(seeds)
    median_rank(len(seed_list), LEVEL)
    chosen = {
        name: numbers(f"--{name}", text, VALUES[name], kind=int if name == "dimension" else float)
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
    path = target.path(Path())
    runs, finished = len(seed_list) * len(algorithms) * sum(map(len, chosen.values())), itertools.count(1)
    with common.progress_bar("saddles") as bar:
        results = [
            sweep(
                name,
                values,
                algorithms,
                seed_list,
                recipe=RECIPE,
                settings=settings,
                done=lambda: bar(next(finished) / runs),
            )
            for name, values in chosen.items()
        ]
    for result in results:
        common.describe(result)
    common.write(results, path, target.picture)
