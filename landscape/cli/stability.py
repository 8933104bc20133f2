"""landscape stability"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from landscape import stability as limits
from landscape.analysis.spectrum import stability as compute_stability
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options
from landscape.cli.completion import Choice
from landscape.cli.options import command, numbers
from landscape.cli.run_summary import known
from landscape.core.errors import InputError
from landscape.results.training import Stability
from landscape.train.optimizer.preconditioning import preconditioner

DELAYS = "0,1,3,7,31"  # DESIGN's table
HEADS = ("no momentum", "ordinary", "shifted")
Limits = list[dict[str, float]]  # a row for each delay: "delay", and a value for each of HEADS


@command(
    delay={"metavar": "τ,…"},
    from_form={"type": Choice(limits.FORMS)},
    analysis=analysis_options(compute_stability, "momentum", "tol", metavar="[CKPT…]", required=False),
)
def stability(
    *,
    delay: str = DELAYS,
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
    """The largest stable ηλ_max under delay τ and momentum, and the limits at a CKPT's minimum.

    Without a CKPT, prints the limits; with --lr, also the rates that keep the set of accessible minima. With
    a CKPT, measures λ_max at w_a over the split and prints the rates above which training leaves this
    minimum.

    Args:
        delay: Delays in steps.
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
    chosen, momentum = numbers("--delay", delay, DELAYS, least=0), analysis.settings["momentum"]
    if not analysis.checkpoints:
        if analysis.target.picture or analysis.target.output or precondition:
            raise InputError("--plot, -o: not allowed without a CKPT, nor --precondition")
        stable = rows(
            chosen, momentum, lambda tau, m, form: limits.max_stable_step(tau, m, form, noise / batch)
        )
        common.values(table(stable, momentum, noise / batch), limits=stable)
        if lr is not None:
            before = limits.Setting(from_delay, from_momentum, from_form, from_batch)

            def rate(tau: int, m: float, form: str) -> float:
                """The learning rate that keeps the minima which ``lr`` has now."""
                return limits.lr_that_keeps_minima(lr, before, limits.Setting(tau, m, form, batch), noise)

            kept = rows(chosen, momentum, rate)
            common.values(rates_table(kept, lr, before, noise), rates=kept)
        return
    if lr is not None or noise:
        raise InputError("--lr, --noise: not allowed with a CKPT, which has its own learning rate")

    def compute(run: Checkpoint, **settings: Any) -> Stability:
        rate, rule_limit, delay = known(run)
        problem = analysis.problem(run)
        return compute_stability(
            problem,
            chosen,
            lr=rate,
            own_limit=rule_limit,
            own_delay=delay,
            precondition=preconditioner(run, problem) if precondition else None,
            **settings,
        )

    analysis.compute("stability", analysis.open(), compute)


def rows(delays: list[int], momentum: float, value: Callable[[int, float, str], float]) -> Limits:
    """``value`` of each delay, and of no momentum, the momentum and the shifted one: a row a delay."""
    forms = list(zip(HEADS, (0.0, momentum, momentum), ("ordinary", "ordinary", "shifted"), strict=True))
    return [{"delay": tau, **{head: value(tau, m, form) for head, m, form in forms}} for tau in delays]


def table(found: Limits, momentum: float, noise: float) -> str:
    """The limits, a line a delay."""
    lines = [_row("τ", [HEADS[0], *(f"{h}, m = {momentum:g}" for h in HEADS[1:])])]
    lines += [_row(str(row["delay"]), [f"{row[head]:.4f}" for head in HEADS]) for row in found]
    return f"largest stable lr·λ_max{' in mean square' if noise else ''}\n" + "\n".join(lines)


def rates_table(found: Limits, lr: float, before: limits.Setting, noise: float) -> str:
    """The learning rates, a line a delay."""
    base = f"lr {lr:g} with delay {before.delay}, momentum {before.momentum:g} ({before.form})"
    base += f", batch {before.batch}" if noise else ""
    lines = [_row(str(row["delay"]), [f"{row[head]:.4g}" for head in HEADS]) for row in found]
    return f"learning rates with the minima of {base}\n" + "\n".join(lines)


def _row(first: str, cells: list[str]) -> str:
    return f"{first:>5}" + "".join(f"{cell:>20}" for cell in cells)
