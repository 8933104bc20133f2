"""landscape disagreement"""

from __future__ import annotations

import click

from landscape.analysis.disagreement import disagreement as compute_disagreement
from landscape.cli.analysis import Analysis, analysis_options
from landscape.core.options import positive
from landscape.results.curvature import Disagreement


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
        table,
    )


def table(result: Disagreement) -> str:
    """The numbers of one result, a line each."""
    r = result
    missed = "" if r.converged else "; NOT CONVERGED: raise --max-products"
    k = len(r.values)
    lines = [
        f"{r.label}: {r.split} loss, {r.learners} learners, consensus distance {r.consensus:.4g}, λ_1 "
        f"{r.values[0]:.5g}, {r.hvps} products{missed}",
        f"  {f'of the spread in the top {k}':38} {100 * r.value:9.4f}% ± {100 * r.standard_error:.2g}% "
        f"(an isotropic one: {100 * r.chance:.2g}%)",
        f"  {f'of the gradient in the top {k}':38} {100 * r.gradient_value:9.4f}%",
        f"  {'of the gradient in the spread':38} {100 * r.gradient_in_span:9.4f}% "
        f"(an isotropic one: {100 * r.rank / r.parameters:.2g}%)",
        f"  {'of its sharp part in the spread':38} {100 * r.dominant_in_span:9.4f}%",
        f"  {'½ tr(HC)':38} {r.cost: .4e} ± {r.cost_error:.1e} nat, of it in the top {k} {r.cost_top:.4e}",
        f"  {'mean loss of the learners above w_a':38} {r.learners_loss - r.loss: .4e} nat",
    ]
    return "\n".join(lines)
