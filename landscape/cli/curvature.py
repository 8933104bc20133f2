"""landscape spectrum, sharpness, learning-coefficient and disagreement"""

from __future__ import annotations

from typing import Any

from landscape.analysis.learning_coefficient import learning_coefficient as compute_learning_coefficient
from landscape.analysis.sharpness import KINDS as SHARPNESS
from landscape.analysis.sharpness import sharpness as compute_sharpness
from landscape.analysis.spectrum import spectrum as compute_spectrum
from landscape.analysis.spread import disagreement as compute_disagreement
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.completion import Choice
from landscape.cli.options import command
from landscape.core.options import positive
from landscape.curvature.hessian import KINDS
from landscape.curvature.pyhessian_engine import ENGINES
from landscape.results.curvature import Spectrum
from landscape.train.optimizer.preconditioning import preconditioner

BATCH = 512  # Lau et al.'s on MNIST


@command(
    parts={"flag": "--part", "metavar": "NAME"},
    analysis=analysis_options(
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
        top_k={"show_default": False, "help": "The K largest eigenvalues."},
        ends={"help": "λ_max and λ_min. [default without another choice]"},
        with_trace={"flag": "--trace"},
        with_density={"flag": "--density"},
        probes={"help": "Random vectors for the density."},
        steps={"help": "Lanczos steps for each random vector."},
        kind={"type": Choice(KINDS), "help": "Which matrix."},
        engine={
            "type": Choice(ENGINES),
            "help": "landscape, or pyhessian: the eigenvalue of largest magnitude, and the trace.",
        },
    ),
)
def spectrum(precondition: bool, parts: tuple[str, ...], analysis: Analysis) -> None:
    """Eigenvalues, trace and density of the Hessian at w_a of each CKPT, over the whole split.

    Prints each eigenvalue with its relative residual, the bounds outside which there is no other eigenvalue
    (with 99% probability), and the trace with its standard error. With --precondition also the learning rate
    times λ_max, next to the largest stable one of the optimizer.

    Args:
        precondition: Of P^{-1/2} H P^{-1/2}, P from the state of the optimizer: Adam, AdamW, RMSprop, LARS or
            LAMB.
        parts: Only the block of these parameters: a name (1.weight) or a prefix (1); can be repeated.

    Example:
        landscape spectrum runs/dp/last.h5 --top-k 5 --trace --density --plot f.png
    """

    def compute(run: Checkpoint, **settings: Any) -> Spectrum:
        problem = analysis.problem(run)
        by = preconditioner(run, problem) if precondition else None
        return compute_spectrum(problem, precondition=by, part=list(parts) or None, **settings)

    variant = [analysis.settings["kind"], *(["preconditioned"] if precondition else [])]
    analysis.compute("spectrum", analysis.open(), compute, *variant)


@command(
    rho={"multiple": True, "required": True},
    analysis=analysis_options(
        compute_sharpness,
        "kind",
        "adaptive",
        "m",
        "steps",
        "starts",
        "tol",
        "max_draws",
        kind={"type": Choice(SHARPNESS), "help": "worst: max over ‖δ/c‖ ≤ ρ; average: δ/c ~ N(0, ρ²)."},
        adaptive={"flag": "--adaptive/--not-adaptive"},
        max_draws={"help": "…or until there are so many draws."},
    ),
)
def sharpness(rho: tuple[float, ...], analysis: Analysis) -> None:
    """Worst-case or average-case sharpness at w_a of each CKPT: the rise of the loss within ρ.

    Adaptive (Kwon et al. 2021) and over minibatches of m samples (Foret et al. 2021), if asked for. Prints
    the value with its standard error. It predicts generalisation poorly (arXiv 2302.07011).

    Args:
        rho: ρ: the radius; can be repeated.

    Example:
        landscape sharpness runs/ss runs/dp --rho 0.002 --rho 0.02 --plot sharpness.png
    """
    analysis.compute(
        "sharpness",
        [(run, radius) for run in analysis.open() for radius in rho],
        lambda run, radius, **settings: compute_sharpness(analysis.problem(run), radius, **settings),
        *(["average"] if analysis.settings["kind"] == "average" else []),
    )


@command(
    analysis=analysis_options(
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
        batch={"default": BATCH},
    )
)
def learning_coefficient(analysis: Analysis) -> None:
    """The local learning coefficient at w_a of each CKPT, by SGLD chains around it.

    λ̂ = nβ (E L(w) − L(w_a)) over w ~ exp(−nβ L(w) − γ/2 ‖w − w_a‖²), L the training loss (Lau et al., arXiv
    2308.12108): P/2 for a regular model, less for a singular one. Needs pip install 'sgd-landscape[bayes]'.

    Example:
        landscape learning-coefficient runs/ss runs/dp --plot coefficient.png
    """
    analysis.compute(
        "learning-coefficient",
        analysis.open(),
        lambda run, **settings: compute_learning_coefficient(analysis.problem(run), **settings),
    )


@command(analysis=analysis_options(compute_disagreement, "top_k", "tol", "max_products"))
def disagreement(analysis: Analysis) -> None:
    """Shares of the learners' spread and of the gradient in the top-K Hessian space of each CKPT.

    Prints them with one standard error over the learners, ½ tr(HC), which is what the spread costs in loss to
    second order, and the share of the gradient in the span of the spread. Needs at least two learners.

    Example:
        landscape disagreement runs/dp --top-k 10 --plot disagreement.png
    """
    runs = analysis.open()
    for run in runs:
        positive(f"{run.path}: learners", run.learners, least=2)
    analysis.compute(
        "disagreement",
        runs,
        lambda run, **settings: compute_disagreement(run.weights, problem=analysis.problem(run), **settings),
    )
