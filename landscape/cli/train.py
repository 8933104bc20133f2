"""landscape train"""

from __future__ import annotations

import math

import click

from landscape.checkpoint import Checkpoint
from landscape.cli import common
from landscape.options import InputError
from landscape.train import launch, recipe
from landscape.train.loop import Hooks


@click.command(
    epilog="Example: landscape train mnist-fig2a-dpsgd --set seed=1 --data-dir ~/data -o runs/dp-1"
)
@click.argument("recipe_name", metavar="[RECIPE]", required=False)
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a key of the recipe, such as lr=0.5 or algorithm.mixing='ring(1)'.",
)
@click.option("-o", "--output", metavar="DIR", help="Folder of the run. [default: runs/NAME-seedN]")
@click.option("--resume", is_flag=True, help="Go on from DIR/last.h5, to the bits of an unbroken run.")
@click.option("--force", is_flag=True, help="Delete the run that is in DIR first.")
@common.device
@common.data_dir
@common.quiet
def train(
    recipe_name: str | None,
    settings: tuple[str, ...],
    output: str | None,
    resume: bool,
    force: bool,
    device: str,
    data_dir: str | None,
    quiet: bool,
) -> None:
    """Train n learners by RECIPE, a built-in name or a .toml file, every step decomposed.

    Writes DIR/last.h5, DIR/step-NNNNNNN.h5 and DIR/recipe.toml. With --resume, RECIPE may be left out.
    """
    chosen = recipe.read(recipe_name, settings) if recipe_name else None
    if chosen is None and settings:
        raise InputError("--set: needs a RECIPE to change; give its name or file")
    if output is None and chosen is None:
        raise InputError(
            "RECIPE: missing; give a name (see 'landscape recipes'), a .toml file, or -o DIR --resume"
        )
    folder = output or f"runs/{chosen.name if chosen else ''}-seed{chosen.seed if chosen else 0}"
    with common.progress_bar("training", quiet) as bar:
        hooks = Hooks(
            message=lambda line: common.message(line, quiet),
            step=lambda done, total: bar(done / total),
        )
        end = launch.launch(
            chosen, folder, resume=resume, force=force, device=device, data_dir=data_dir, hooks=hooks
        )
    common.message(closing(end), quiet)
    click.echo(f"{folder}/last.h5")


def closing(end: Checkpoint) -> str:
    """One line about how a run ended."""
    if not len(end.history["step"]):
        return "no step to make"
    last = {name: float(column[-1]) for name, column in end.history.items()}
    error = (
        "" if math.isnan(last["test_accuracy"]) else f", test error {100 * (1 - last['test_accuracy']):.2f}%"
    )
    drift = f" (diverged at step {end.diverged_at}: the {end.diverged})" if end.diverged else ""
    return (
        f"step {end.step}{drift}: test loss {last['test_loss']:.4g}{error}, "
        f"consensus distance {last['consensus']:.3g}, {last['wall_s']:.1f} s"
    )
