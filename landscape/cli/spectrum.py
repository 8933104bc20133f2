"""landscape spectrum"""

from __future__ import annotations

from typing import Any

import click
import numpy as np

from landscape.analysis.spectrum import spectrum as compute_spectrum
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.choices import Choice
from landscape.curvature.hessian import KINDS
from landscape.curvature.pyhessian_engine import ENGINES
from landscape.results.curvature import Spectrum
from landscape.train.optimizer.preconditioning import preconditioner


@click.command(epilog="Example: landscape spectrum runs/dp/last.h5 --top-k 5 --trace --density --plot f.png")
@click.option(
    "--precondition",
    is_flag=True,
    help="Of P^{-1/2} H P^{-1/2}, P from the state of the optimizer: Adam, AdamW, RMSprop, LARS or LAMB.",
)
@click.option(
    "--part",
    "parts",
    metavar="NAME",
    multiple=True,
    help="Only the block of these parameters: a name (1.weight) or a prefix (1); can be repeated.",
)
@analysis_options(
    compute_spectrum,
    "top_k",
    "ends",
    "with_trace",
    "with_density",
    "products",
    "probes",
    "steps",
    "kind",
    "engine",
    "tol",
    "max_products",
    "search",
    own={
        "top_k": {"show_default": False, "help": "The K largest eigenvalues."},
        "ends": {"help": "λ_max and λ_min. [default without another choice]"},
        "with_trace": {"flag": "--trace"},
        "with_density": {"flag": "--density"},
        "probes": {"help": "Random vectors for the density."},
        "steps": {"help": "Lanczos steps for each random vector."},
        "kind": {"type": Choice(KINDS), "help": "Which matrix."},
        "engine": {
            "type": Choice(ENGINES),
            "help": "landscape, or pyhessian: the eigenvalue of largest magnitude, and the trace.",
        },
    },
)
def spectrum(analysis: Analysis, precondition: bool, parts: tuple[str, ...]) -> None:
    """Eigenvalues, trace and density of the Hessian at w_a of each CKPT, over the whole split.

    Prints each eigenvalue with its relative residual, the bounds outside which there is no other eigenvalue
    (with 99% probability), and the trace with its standard error. With --precondition also the learning rate
    times λ_max, next to the largest stable one of the optimizer.
    """

    def compute(run: Checkpoint, **settings: Any) -> Spectrum:
        problem = analysis.problem(run)
        by = preconditioner(run, problem) if precondition else None
        return compute_spectrum(problem, precondition=by, part=list(parts) or None, **settings)

    variant = [analysis.settings["kind"], *(["preconditioned"] if precondition else [])]
    analysis.compute("spectrum", analysis.open(), compute, table, *variant)


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
