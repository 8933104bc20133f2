"""landscape recipes"""

from __future__ import annotations

import click

from landscape.train import recipe


@click.command(epilog="Example: landscape recipes mnist-fig2a-dpsgd > mine.toml")
@click.argument("name", metavar="[NAME]", required=False)
def recipes(name: str | None) -> None:
    """List the built-in recipes; with NAME (or a .toml file), print that one whole, defaults included."""
    if name:
        click.echo(recipe.read(name).to_toml(), nl=False)
        return
    for known in recipe.built_in():
        r = recipe.read(known)
        click.echo(
            f"{known:24} {r.part('algorithm')[0]:6} {r.part('data')[0]:7} n = {r.learners}, nB = {r.batch}, "
            f"lr {r.lr:g}, {r.steps} steps"
        )
