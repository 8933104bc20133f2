"""landscape learning-coefficient"""

from __future__ import annotations

import click

from landscape.analysis.learning_coefficient import learning_coefficient as compute_learning_coefficient
from landscape.cli.analysis import Analysis, analysis_options

BATCH = 512  # Lau et al.'s on MNIST


@click.command(epilog="Example: landscape learning-coefficient runs/ss runs/dp --plot coefficient.png")
@analysis_options(
    compute_learning_coefficient,
    "batch",
    "localization",
    "step_size",
    "nbeta",
    "chains",
    "tol",
    "max_rhat",
    "max_steps",
    split=False,
    own={"batch": {"default": BATCH, "show_default": True, "required": False}},
)
def learning_coefficient(analysis: Analysis) -> None:
    """The local learning coefficient at w_a of each CKPT, by SGLD chains around it.

    λ̂ = nβ (E L(w) − L(w_a)) over w ~ exp(−nβ L(w) − γ/2 ‖w − w_a‖²), L the training loss (Lau et al., arXiv
    2308.12108): P/2 for a regular model, less for a singular one. Needs pip install 'sgd-landscape[bayes]'.
    """
    analysis.compute(
        "learning-coefficient",
        analysis.open(),
        lambda run, **settings: compute_learning_coefficient(analysis.problem(run), **settings),
    )
