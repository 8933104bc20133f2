"""landscape disagreement"""

from __future__ import annotations

import click

from landscape.analysis.disagreement import TOP_K
from landscape.analysis.disagreement import disagreement as compute_disagreement
from landscape.cli.analysis import Analysis, analysis_options
from landscape.core.options import positive
from landscape.curvature.lanczos import MAX_PRODUCTS, TOL
from landscape.results.curvature import Disagreement


@click.command(epilog="Example: landscape disagreement runs/dp --top-k 10 --plot disagreement.png")
@click.option(
    "--top-k",
    default=TOP_K,
    show_default=True,
    metavar="K",
    help="Eigenvectors of the K largest eigenvalues.",
)
@click.option("--tol", default=TOL, show_default=True, help="Residual of each eigenvalue, relative to it.")
@click.option(
    "--max-products", default=MAX_PRODUCTS, show_default=True, help="Products for the eigenvalues, at most."
)
@analysis_options("Draws the vector that the search starts from.")
def disagreement(analysis: Analysis, top_k: int, tol: float, max_products: int) -> None:
    """Shares of the learners' spread and of the gradient in the top-K Hessian space of each CKPT.

    Prints them with one standard error over the learners, ½ tr(HC), which is what the spread costs in loss to
    second order, and the share of the gradient in the span of the spread. Needs at least two learners.
    """
    runs = analysis.open()
    for run in runs:
        positive(f"{run.path}: learners", run.learners, least=2)
    path = analysis.target(runs[0], "disagreement")
    results = []
    for run, progress in analysis.each("disagreement", runs):
        result = compute_disagreement(
            run.weights,
            top_k,
            problem=analysis.problem(run),
            tol=tol,
            max_products=max_products,
            seed=analysis.seed,
            progress=progress,
            **analysis.about(run),
        )
        results.append(result)
        analysis.values(table(result))
    analysis.write(results, path)


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
