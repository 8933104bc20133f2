"""landscape noise"""

from __future__ import annotations

import click

import landscape
from landscape.cli import common
from landscape.noise import DRAWS


@click.command(epilog="Example: landscape noise runs/dp/step-0000500.h5 --draws 64 --plot noise.png")
@common.checkpoints
@click.option("--draws", default=DRAWS, show_default=True, help="Draws of n minibatches.")
@click.option("--seed", default=0, show_default=True, help="Draws the minibatches.")
@click.option("--dtype", default="float32", show_default=True, help="float32 or float64.")
@click.option("-o", "--output", metavar="OUT.h5", help="Result file. [default: beside the checkpoint]")
@click.option("--plot", "picture", metavar="F.png", help="Draw it, too: .png, .pdf or .svg.")
@common.device
@common.data_dir
@common.quiet
def noise(
    checkpoints: tuple[str, ...],
    draws: int,
    seed: int,
    dtype: str,
    output: str | None,
    picture: str | None,
    device: str,
    data_dir: str | None,
    quiet: bool,
) -> None:
    """Δ(2) of each CKPT four ways: by definition, on the full batch, by Eq. 4, and to first order.

    On the training set, with the run's own learning rate and local batch. Prints mean ± standard error.
    """
    runs = common.open_checkpoints(checkpoints)
    path = common.result_path(output, runs[0], "noise", picture)
    results = []
    for run, progress in common.each("noise", runs, quiet):
        result = landscape.estimate_noise(
            common.open_problem(run, "train", data_dir, device, dtype),
            run.weights,
            run.lr,
            run.local_batch,
            draws=draws,
            seed=seed,
            progress=progress,
            **common.about(run, "train"),
        )
        results.append(result)
        common.message(table(result), quiet)
    common.write(results, path, picture)


def table(result: landscape.NoiseEstimate) -> str:
    """The numbers of one estimate, a line each."""
    meaning = {
        "direct": "Δ(2) by definition, α²‖δ‖²",
        "full_batch": "Δ(2) on the full batch",
        "eq4": "Δ(2) by Eq. 4, α² tr(HCH)",
        "first_order": "Δ(2) to first order",
        "delta_s": "Δ_S",
        "delta_2": "α²‖P⊥δ‖²",
        "delta_cross": "cross term",
    }
    lines = [f"{result.label}: α = {result.lr:g}, consensus distance {result.consensus:.4g}"]
    for name, (mean, error) in result.summary().items():
        exact = "exact" if name in ("full_batch", "eq4") else f"± {error:.1e}"
        lines.append(f"  {meaning[name]:28} {mean: .4e}  {exact}")
    return "\n".join(lines)
