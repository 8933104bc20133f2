"""landscape sharpness"""

from __future__ import annotations

import click

from landscape.analysis.sharpness import KINDS
from landscape.analysis.sharpness import sharpness as compute_sharpness
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.choices import Choice


@click.command(
    epilog="Example: landscape sharpness runs/ss runs/dp --rho 0.002 --rho 0.02 --plot sharpness.png"
)
@click.option(
    "--rho", "radii", type=float, multiple=True, required=True, help="ρ: the radius; can be repeated."
)
@analysis_options(
    compute_sharpness,
    "kind",
    "adaptive",
    "m",
    "steps",
    "starts",
    "tol",
    "max_draws",
    own={
        "kind": {"type": Choice(KINDS), "help": "worst: max over ‖δ/c‖ ≤ ρ; average: δ/c ~ N(0, ρ²)."},
        "adaptive": {"flag": "--adaptive/--not-adaptive"},
        "max_draws": {"help": "…or until there are so many draws."},
    },
)
def sharpness(analysis: Analysis, radii: tuple[float, ...]) -> None:
    """Worst-case or average-case sharpness at w_a of each CKPT: the rise of the loss within ρ.

    Adaptive (Kwon et al. 2021) and over minibatches of m samples (Foret et al. 2021), if asked for. Prints
    the value with its standard error. It predicts generalisation poorly (arXiv 2302.07011).
    """
    variant = ["average"] if analysis.settings["kind"] == "average" else []
    analysis.compute(
        "sharpness",
        [(run, rho) for run in analysis.open() for rho in radii],
        lambda run, rho, **settings: compute_sharpness(analysis.problem(run), rho, **settings),
        *variant,
    )
