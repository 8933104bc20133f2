"""landscape recipes"""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from typing import Any

from landscape.cli import common
from landscape.cli.completion import names
from landscape.cli.options import command
from landscape.train.recipes import recipe, table_recipes


@command(name={"argument": True, "metavar": "[NAME]", "shell_complete": names(table_recipes.names)})
def recipes(name: str | None) -> None:
    """List the built-in recipes; with NAME (or a .toml file), print that recipe with all defaults.

    NAME may be a pattern, such as 'cifar10/resnet-18-*': then the matching recipes are listed. Without a
    pattern, the recipes of a paper's table are one line. The properties of a recipe's mixing matrix (gap,
    ω_min, stability limit) go to stderr.

    Example:
        landscape recipes mnist-fig2a-dpsgd > mine.toml
    """
    known = [n for n in table_recipes.names() if fnmatchcase(n, name)] if name else recipe.built_in()
    if name and (name in known or not known):
        chosen = table_recipes.read(name, allow_code=True)  # which is only printed
        text, description = chosen.to_toml(), chosen.describe()
        common.values(text.rstrip("\n"), recipe=tomllib.loads(text), description=description)
        if description:
            common.message(description)
        return
    listed = [_row(one) for one in known]
    width = max(map(len, known))
    lines = [
        f"{row['name']:{width}} {row['algorithm']:9} {row['data']:7} n = {row['learners']}, nB = "
        f"{row['batch']}, lr {row['lr']:g}, {row['steps']} steps"
        for row in listed
    ]
    if not name:
        lines += [f"{series.pattern}: {series.where}" for series in table_recipes.SERIES]
        lines.append(f"The tables are DPSGD-2020's. NETWORK: {', '.join(table_recipes.NETWORKS)}")
    common.values("\n".join(lines), recipes=listed)


def _row(name: str) -> dict[str, Any]:
    """What the list says of a recipe; lr is the peak of the schedule."""
    chosen = table_recipes.read(name)
    return {
        "name": name,
        "algorithm": chosen.part("algorithm")[0],
        "data": chosen.part("data")[0],
        "learners": chosen.learners,
        "batch": chosen.batch,
        "lr": chosen.schedule.peak_lr(chosen.lr, chosen.batch),
        "steps": chosen.steps,
    }
