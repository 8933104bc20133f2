"""landscape spectrum"""

from __future__ import annotations

import click
import numpy as np

from landscape.analysis.spectrum import spectrum as compute_spectrum
from landscape.cli import common
from landscape.core.errors import InputError
from landscape.curvature.density import PROBES, STEPS
from landscape.curvature.trace import TRACE_PRODUCTS
from landscape.results.spectrum import Spectrum


@click.command(epilog="Example: landscape spectrum runs/dp/last.h5 --top-k 5 --trace --density --plot f.png")
@common.checkpoints
@click.option("--top-k", default=0, metavar="K", help="The K largest eigenvalues.")
@click.option("--ends", is_flag=True, help="Both ends. [default where nothing else is asked]")
@click.option("--trace", "with_trace", is_flag=True, help="The trace, by Hutch++, with its standard error.")
@click.option(
    "--density", "with_density", is_flag=True, help="The density, by stochastic Lanczos quadrature."
)
@click.option("--kind", default="hessian", show_default=True, help="hessian or gauss-newton.")
@click.option(
    "--part",
    "parts",
    metavar="NAME",
    multiple=True,
    help="Only the block of these parameters: a name (1.weight) or a prefix (1); may be repeated.",
)
@click.option(
    "--engine",
    default="landscape",
    show_default=True,
    help="landscape, or pyhessian: the eigenvalue of largest magnitude, and the trace.",
)
@click.option("--tol", default=0.01, show_default=True, help="Residual of each eigenvalue, relative to it.")
@click.option(
    "--max-products", default=1000, show_default=True, help="Products for the eigenvalues, at most."
)
@common.search
@click.option("--products", default=TRACE_PRODUCTS, show_default=True, help="Products for the trace.")
@click.option("--probes", default=PROBES, show_default=True, help="Random vectors for the density.")
@click.option("--steps", default=STEPS, show_default=True, help="Lanczos steps a random vector.")
@click.option(
    "--randomness", default="refuse", show_default=True, help="A model random in eval mode: refuse or seed."
)
@common.split
@click.option("--seed", default=0, show_default=True, help="Draws the random vectors.")
@click.option("--dtype", default="float32", show_default=True, help="float32 or float64.")
@common.outputs
@common.device
@common.source
@common.quiet
def spectrum(
    checkpoints: tuple[str, ...],
    top_k: int,
    ends: bool,
    with_trace: bool,
    with_density: bool,
    kind: str,
    parts: tuple[str, ...],
    engine: str,
    tol: float,
    max_products: int,
    search: str,
    products: int,
    probes: int,
    steps: int,
    randomness: str,
    split: str,
    seed: int,
    dtype: str,
    output: str | None,
    force: bool,
    picture: str | None,
    device: str,
    source: common.Source,
    quiet: bool,
) -> None:
    """Eigenvalues, trace and density of the Hessian at w_a of each CKPT, over all samples of the split.

    Prints each eigenvalue with its residual relative to it, beyond what no other was missed, and the trace
    with its standard error.
    """
    if picture and with_trace and not (top_k or ends or with_density):
        raise InputError("--plot: a trace alone is not drawn, add --ends, --top-k or --density")
    runs = common.open_checkpoints(checkpoints, source, quiet)
    path = common.result_path(
        output, runs[0], "spectrum", picture, force=force, variant={"kind": kind, "split": split}
    )
    results = []
    for run, progress in common.each("spectrum", runs, quiet):
        result = compute_spectrum(
            common.open_problem(run, split, source, device, dtype, quiet),
            top_k,
            ends=ends,
            with_trace=with_trace,
            with_density=with_density,
            kind=kind,
            part=list(parts) or None,
            randomness=randomness,
            engine=engine,
            tol=tol,
            max_products=max_products,
            search=search,
            products=products,
            probes=probes,
            steps=steps,
            seed=seed,
            progress=progress,
            **common.about(run, split, source),
        )
        results.append(result)
        common.message(table(result), quiet)
    common.write(results, path, picture)


def table(result: Spectrum) -> str:
    """The numbers of one spectrum, a line each."""
    what = f"{result.kind}, {result.parameters:,} parameters{f' ({result.part})' if result.part else ''}"
    missed = "" if result.converged else "; NOT CONVERGED: raise --max-products"
    lines = [f"{result.label}: {result.split} loss, {what}, {result.hvps} products{missed}"]
    for i, (value, residual) in enumerate(zip(result.values, result.residuals, strict=True)):
        name = f"λ_{i + 1}" if i < len(result.values) - result.lowest else "λ_min"
        if result.engine == "pyhessian":
            name = "largest |λ|"
        lines.append(f"  {name:12} {value: .6e}  {common.residual(residual, value)}")
    for name, bound in (("below", result.bound_low), ("above", result.bound_high)):
        if np.isfinite(bound):
            lines.append(f"  {name:12} {bound: .6e}  no other eigenvalue, with 99% probability")
    if result.trace == result.trace:
        lines.append(f"  {'trace':12} {result.trace: .6e}  ± {result.trace_error:.1e}")
    if result.density:
        mean, error = result.density.moment(1)
        lines.append(f"  {'mean λ':12} {mean: .6e}  ± {error:.1e}, from the density")
    return "\n".join(lines)
