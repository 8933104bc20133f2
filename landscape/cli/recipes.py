"""landscape recipes"""

from __future__ import annotations

from fnmatch import fnmatchcase

import click

from landscape import paper
from landscape.train import recipe


@click.command(epilog="Example: landscape recipes mnist-fig2a-dpsgd > mine.toml")
@click.argument("name", metavar="[NAME]", required=False)
def recipes(name: str | None) -> None:
    """List the built-in recipes; with NAME (or a .toml file), print that recipe with all defaults.

    NAME may be a pattern, such as 'cifar10/resnet-18-*': then the matching recipes are listed. Without a
    pattern, the recipes of a paper's table are one line. The properties of a recipe's mixing matrix (gap,
    ω_min, stability limit) go to stderr.
    """
    known = [n for n in paper.names() if fnmatchcase(n, name)] if name else recipe.built_in()
    if name and (name in known or not known):
        chosen = paper.read(name, allow_code=True)  # which is only printed
        click.echo(chosen.to_toml(), nl=False)
        if description := chosen.describe():
            click.echo(description, err=True)
        return
    width = max(map(len, known))
    for one in known:
        r = paper.read(one)
        rate = r.schedule.peak_lr(r.lr, r.batch)
        algorithm, data = r.part("algorithm")[0], r.part("data")[0]
        click.echo(
            f"{one:{width}} {algorithm:9} {data:7} n = {r.learners}, nB = {r.batch}, lr {rate:g}, "
            f"{r.steps} steps"
        )
    if not name:
        for series in paper.SERIES:
            click.echo(f"{series.pattern}: {series.where}")
        click.echo(f"The tables are DPSGD-2020's. NETWORK: {', '.join(paper.NETWORKS)}")
