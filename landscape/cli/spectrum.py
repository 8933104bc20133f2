"""landscape spectrum"""

from __future__ import annotations

from dataclasses import dataclass

import click
import numpy as np

from landscape.analysis.spectrum import spectrum as compute_spectrum
from landscape.cli import common, options
from landscape.cli.analysis import Analysis, analysis_options
from landscape.curvature.density import PROBES, STEPS
from landscape.curvature.hessian import KINDS
from landscape.curvature.pyhessian_engine import ENGINES
from landscape.curvature.trace import TRACE_PRODUCTS
from landscape.results.curvature import Spectrum
from landscape.train.run.preconditioner import preconditioner


@dataclass(frozen=True)
class Quantities:
    """What is computed, and the products, random vectors and Lanczos steps for trace and density."""

    top_k: int
    ends: bool
    with_trace: bool
    with_density: bool
    products: int
    probes: int
    steps: int


quantities_options = options.grouped(
    "quantities",
    Quantities,
    click.option("--top-k", default=0, metavar="K", help="The K largest eigenvalues."),
    click.option("--ends", is_flag=True, help="λ_max and λ_min. [default without another choice]"),
    click.option(
        "--trace", "with_trace", is_flag=True, help="The trace, by Hutch++, with its standard error."
    ),
    click.option(
        "--density", "with_density", is_flag=True, help="The density, by stochastic Lanczos quadrature."
    ),
    click.option("--products", default=TRACE_PRODUCTS, show_default=True, help="Products for the trace."),
    click.option("--probes", default=PROBES, show_default=True, help="Random vectors for the density."),
    click.option("--steps", default=STEPS, show_default=True, help="Lanczos steps for each random vector."),
)


@click.command(epilog="Example: landscape spectrum runs/dp/last.h5 --top-k 5 --trace --density --plot f.png")
@quantities_options
@click.option(
    "--precondition",
    is_flag=True,
    help="Of P^{-1/2} H P^{-1/2}, P from the state of the optimizer: Adam, AdamW, RMSprop, LARS or LAMB.",
)
@click.option(
    "--kind", type=options.Choice(KINDS), default="hessian", show_default=True, help="Which matrix."
)
@click.option(
    "--part",
    "parts",
    metavar="NAME",
    multiple=True,
    help="Only the block of these parameters: a name (1.weight) or a prefix (1); can be repeated.",
)
@click.option(
    "--engine",
    type=options.Choice(ENGINES),
    default="landscape",
    show_default=True,
    help="landscape, or pyhessian: the eigenvalue of largest magnitude, and the trace.",
)
@options.eigenvalues("Products for the eigenvalues, at most.")
@analysis_options("Draws the random vectors.")
def spectrum(
    analysis: Analysis,
    quantities: Quantities,
    eigenvalues: options.Eigenvalues,
    precondition: bool,
    kind: str,
    parts: tuple[str, ...],
    engine: str,
) -> None:
    """Eigenvalues, trace and density of the Hessian at w_a of each CKPT, over the whole split.

    Prints each eigenvalue with its relative residual, the bounds outside which there is no other eigenvalue
    (with 99% probability), and the trace with its standard error. With --precondition also the learning rate
    times λ_max, next to the largest stable one of the optimizer.
    """
    runs = analysis.open()
    path = analysis.target(runs[0], "spectrum", kind, *(["preconditioned"] if precondition else []))
    results = []
    for run, progress in analysis.each("spectrum", runs):
        problem = analysis.problem(run)
        result = compute_spectrum(
            problem,
            precondition=preconditioner(run, problem) if precondition else None,
            **vars(quantities),
            kind=kind,
            part=list(parts) or None,
            engine=engine,
            **vars(eigenvalues),
            seed=analysis.seed,
            progress=progress,
            **analysis.about(run),
        )
        results.append(result)
        analysis.values(table(result))
    analysis.write(results, path)


def table(result: Spectrum) -> str:
    """The numbers of one spectrum, a line each."""
    what = f"{result.kind}, {result.parameters:,} parameters{f' ({result.part})' if result.part else ''}"
    if result.precondition:
        what += f", preconditioned by {result.precondition}"
    missed = "" if result.converged else "; NOT CONVERGED: raise --max-products"
    lines = [f"{result.label}: {result.split} loss, {what}, {result.hvps} products{missed}"]
    for i, (value, residual) in enumerate(zip(result.values, result.residuals, strict=True)):
        name = f"λ_{i + 1}" if i < len(result.values) - result.lowest else "λ_min"
        if result.engine == "pyhessian":
            name = "largest |λ|"
        lines.append(f"  {name:12} {value: .6e}  {common.residual(residual, value)}")
    if np.isfinite(result.lr) and len(result.values) > result.lowest:
        limit = f"limit {result.limit:.4g}" if np.isfinite(result.limit) else "limit not known"
        lines.append(f"  {'lr · λ_max':12} {result.lr * result.values[0]: .4g}  {limit}")
    for name, bound in (("below", result.bound_low), ("above", result.bound_high)):
        if np.isfinite(bound):
            lines.append(f"  {name:12} {bound: .6e}  no other eigenvalue, with 99% probability")
    if result.trace == result.trace:
        interval = common.interval(result.trace_interval())
        lines.append(f"  {'trace':12} {result.trace: .6e}  ± {result.trace_error:.1e}{interval}")
    if result.density:
        mean, error = result.density.moment(1)
        lines.append(f"  {'mean λ':12} {mean: .6e}  ± {error:.1e}, from the density")
    return "\n".join(lines)
