"""landscape sharpness"""

from __future__ import annotations

from dataclasses import dataclass

import click

from landscape.analysis.sharpness import DRAWS, KINDS, STARTS, STEPS, TOL
from landscape.analysis.sharpness import sharpness as compute_sharpness
from landscape.cli import options
from landscape.cli.analysis import Analysis, analysis_options
from landscape.results.flatness import Sharpness


@dataclass(frozen=True)
class Search:
    """How the sharpness is found: which kind, of which minibatches, how exactly."""

    kind: str
    adaptive: bool
    m: int | None
    steps: int
    starts: int
    tol: float
    max_draws: int


search_options = options.grouped(
    "search",
    Search,
    click.option(
        "--kind",
        type=options.Choice(KINDS),
        default="worst",
        show_default=True,
        help="worst: max over ‖δ/c‖ ≤ ρ; average: δ/c ~ N(0, ρ²).",
    ),
    click.option(
        "--adaptive/--not-adaptive", default=True, show_default=True, help="c: |w| of each weight, or 1."
    ),
    click.option("--m", type=int, help="Samples of a minibatch, drawn anew. [default: all samples at once]"),
    click.option("--steps", default=STEPS, show_default=True, help="Gradients for each start of a search."),
    click.option("--starts", default=STARTS, show_default=True, help="Random starts besides the gradient."),
    click.option(
        "--tol", default=TOL, show_default=True, help="Draw until the relative standard error is so small…"
    ),
    click.option("--max-draws", default=DRAWS, show_default=True, help="…or until there are so many draws."),
)


@click.command(
    epilog="Example: landscape sharpness runs/ss runs/dp --rho 0.002 --rho 0.02 --plot sharpness.png"
)
@click.option(
    "--rho", "radii", type=float, multiple=True, required=True, help="ρ: the radius; can be repeated."
)
@search_options
@analysis_options("Draws minibatches, displacements and starts.")
def sharpness(analysis: Analysis, search: Search, radii: tuple[float, ...]) -> None:
    """Worst-case or average-case sharpness at w_a of each CKPT: the rise of the loss within ρ.

    Adaptive (Kwon et al. 2021) and over minibatches of m samples (Foret et al. 2021), if asked for. Prints
    the value with its standard error. It predicts generalisation poorly (arXiv 2302.07011).
    """
    runs = analysis.open()
    path = analysis.target(runs[0], "sharpness", *(["average"] if search.kind == "average" else []))
    results = []
    for run, progress in analysis.each("sharpness", runs):
        problem = analysis.problem(run)
        for k, rho in enumerate(radii):
            result = compute_sharpness(
                problem,
                rho,
                **vars(search),
                seed=analysis.seed,
                progress=lambda share, k=k, of=progress: of((k + share) / len(radii)),  # type: ignore[misc]
                **analysis.about(run),
            )
            results.append(result)
            analysis.values(table(result))
    analysis.write(results, path)


def table(r: Sharpness) -> str:
    """The numbers of one result, a line each."""
    of = f"minibatches of {r.m}" if r.m else f"{r.samples:,} samples"
    error = f" ± {r.standard_error:.1e}, {r.draws} draws" if r.draws else ""
    missed = "" if r.reached else "; standard error NOT REACHED: raise --max-draws"
    lines = [
        f"{r.label}: {r.split} loss {r.loss:.5g}, {of}, {'adaptive' if r.adaptive else 'not adaptive'}",
        f"  {r.kind:8} ρ = {r.rho:<10g} {r.value: .6e}{error}, {r.gradients} "
        f"{'gradients' if r.kind == 'worst' else 'losses'}{missed}",
    ]
    if r.kind == "worst":
        lines.append(f"  a lower bound; angle between gradient and displacement {r.residual:.2g} rad")
    if r.fixed:
        lines.append(f"  {r.fixed:,} of {r.parameters:,} weights are 0 and do not move")
    return "\n".join(lines)
