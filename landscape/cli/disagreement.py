"""landscape disagreement"""

from __future__ import annotations

import click

from landscape.analysis.spread import disagreement as compute_disagreement
from landscape.cli.analysis import Analysis, analysis_options
from landscape.core.options import positive


@click.command(epilog="Example: landscape disagreement runs/dp --top-k 10 --plot disagreement.png")
@analysis_options(compute_disagreement, "top_k", "tol", "max_products")
def disagreement(analysis: Analysis) -> None:
    """Shares of the learners' spread and of the gradient in the top-K Hessian space of each CKPT.

    Prints them with one standard error over the learners, ½ tr(HC), which is what the spread costs in loss to
    second order, and the share of the gradient in the span of the spread. Needs at least two learners.
    """
    runs = analysis.open()
    for run in runs:
        positive(f"{run.path}: learners", run.learners, least=2)
    analysis.compute(
        "disagreement",
        runs,
        lambda run, **settings: compute_disagreement(run.weights, problem=analysis.problem(run), **settings),
    )
