"""landscape spectrum"""

from __future__ import annotations

from typing import Any

import click

from landscape.analysis.spectrum import spectrum as compute_spectrum
from landscape.checkpoint.checkpoint import Checkpoint
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
    analysis.compute("spectrum", analysis.open(), compute, *variant)
