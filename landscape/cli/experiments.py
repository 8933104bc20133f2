"""landscape smoothing and stability."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from landscape import limits
from landscape.analysis.spread import smoothing as compute_smoothing
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.completion import Choice
from landscape.cli.options import command
from landscape.core.devices import pick_device
from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.results.flatness import Smoothing
from landscape.training import experiments as continued
from landscape.training.experiments import stability as compute_stability


@command(analysis=analysis_options(compute_smoothing, lr=None, alpha_e=None, k={}))
def smoothing(*, steps: int = continued.PATH_STEPS, analysis: Analysis) -> None:
    """Smooth the loss over the spread of the learners.

    It is smoothed around w_a of each CKPT; its sharpness is measured, too.

    The displacements have the measured covariance Σ of the learners; for comparison, isotropic ones have the
    same trace. Prints loss, λ_max and the gradient's Lipschitz constant along the path of w_a, each with a
    standard error; tr(HΣ), the share of the spread along the sharpest directions, and 2/λ_max next to the
    learning rate α and the effective α_e.

    Args:
        steps: Further training steps, in memory, along which the gradient's Lipschitz constant is estimated;
            0: none.

    Example:
        landscape smoothing runs/ss/last.h5 runs/dp/last.h5 --plot smoothing.png
    """
    positive("--steps", steps, least=0)
    source = analysis.source

    def compute(run: Checkpoint, **settings: Any) -> Smoothing:
        # A recipe in a file may name a user's code, which a file must never run.
        built_in = run.has_recipe and not (source.model or source.data or source.loss)
        if steps and not built_in:
            common.message(f"{run.label}: no further steps, --steps needs built-in model and data")
        device = pick_device(analysis.device)
        route = continued.mean_path(run, steps, device, source.data_dir) if steps and built_in else None
        rate = continued.effective_rate(run)
        return compute_smoothing(run, trajectory=route, alpha_e=rate, **settings)

    analysis.compute("smoothing", analysis.open(), compute)


HEADS = ("no momentum", "ordinary", "shifted")
Limits = list[dict[str, float]]  # a row for each delay: "delay", and a value for each of HEADS


@command(
    from_form={"type": Choice(limits.FORMS)},
    analysis=analysis_options(
        compute_stability, metavar="[CKPT…]", required=False, lr=None, own_limit=None, own_delay=None
    ),
)
def stability(
    *,
    lr: float | None,
    from_delay: int = 0,
    from_momentum: float = 0.0,
    from_form: str = "ordinary",
    batch: int = 1,
    from_batch: int = 1,
    noise: float = 0.0,
    precondition: bool,
    analysis: Analysis,
) -> None:
    """Compute the largest stable learning rates.

    They are limits on ηλ_max under delay τ and momentum, and on the rate at a CKPT's minimum.

    Without a CKPT, prints the limits; with --lr, also the rates that keep the set of accessible minima. With
    a CKPT, measures λ_max at w_a over the split and prints the rates above which training leaves this
    minimum.

    Args:
        lr: A learning rate in use: print the rates that keep the same minima.
        from_delay: Delay that --lr is used with.
        from_momentum: Momentum that --lr is used with.
        from_form: Form of that momentum.
        batch: Samples in a step.
        from_batch: Samples in a step that --lr is used with.
        noise: s²/λ²: relative variance of one sample's curvature along the sharpest direction; only with it
            does the batch matter.
        precondition: λ_max of P^{-1/2} H P^{-1/2}, P the preconditioner of the run's optimizer, against its
            limit.

    Example:
        landscape stability runs/dp/last.h5 --delay 0,1,2,4,8,16,32 --plot edge.png
    """
    chosen, momentum = analysis.settings["delays"], analysis.settings["momentum"]
    if not analysis.checkpoints:
        if analysis.target.picture or analysis.target.output or precondition:
            raise InputError("--plot, -o: not allowed without a CKPT, nor --precondition")
        stable = rows(chosen, momentum, functools.partial(limits.max_stable_step, noise=noise / batch))
        heads = [HEADS[0], *(f"{h}, m = {momentum:g}" for h in HEADS[1:])]
        title = f"largest stable lr·λ_max{' in mean square' if noise else ''}"
        common.values(table(title, stable, ".4f", heads), limits=stable)
        if lr is not None:
            before = limits.Hyperparameters(from_delay, from_momentum, from_form, from_batch)

            def rate(tau: int, m: float, form: str) -> float:
                after = limits.Hyperparameters(tau, m, form, batch)
                return limits.lr_that_keeps_minima(lr, before, after, noise)

            kept = rows(chosen, momentum, rate)
            base = f"lr {lr:g} with delay {from_delay}, momentum {from_momentum:g} ({from_form})"
            title = f"learning rates with the minima of {base}{f', batch {from_batch}' if noise else ''}"
            common.values(table(title, kept, ".4g"), rates=kept)
        return
    if lr is not None or noise:
        raise InputError("--lr, --noise: not allowed with a CKPT, which has its own learning rate")

    compute = functools.partial(compute_stability, precondition=precondition)
    analysis.compute("stability", analysis.open(), compute)


def rows(delays: Sequence[int], momentum: float, value: Callable[[int, float, str], float]) -> Limits:
    """``value`` of each delay, and of no momentum, the momentum and the shifted one: a row a delay."""
    forms = list(zip(HEADS, (0.0, momentum, momentum), ("ordinary", "ordinary", "shifted"), strict=True))
    return [{"delay": tau, **{head: value(tau, m, form) for head, m, form in forms}} for tau in delays]


def table(title: str, found: Limits, form: str, heads: Sequence[str] = ()) -> str:
    """The title, the heads of the columns, if there are any, and a line a delay."""
    cells = [[str(row["delay"]), *(f"{row[head]:{form}}" for head in HEADS)] for row in found]
    every = [["τ", *heads], *cells] if heads else cells
    lines = [f"{first:>5}" + "".join(f"{cell:>20}" for cell in rest) for first, *rest in every]
    return "\n".join([title, *lines])
