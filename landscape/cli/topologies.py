"""landscape topologies"""

from __future__ import annotations

from typing import Any

from landscape.cli import common
from landscape.cli.completion import names
from landscape.cli.options import command
from landscape.training.topology import default_mixings, forms
from landscape.training.topology import topologies as compare


@command(
    mixings={"argument": True, "metavar": "[MIXING]…", "shell_complete": names(default_mixings)},
    learners={"metavar": "N"},
    parameters={"metavar": "P"},
)
def topologies(
    *, mixings: tuple[str, ...], learners: int = 8, parameters: int = 1_000_000, picture: str | None = None
) -> None:
    """List the topologies, or compare some, for so many learners.

    Columns: the spectral gap and the smallest eigenvalue ω_min of the mixing matrix; the largest stable ηλ of
    DPSGD in AWC order without momentum; after how many steps from the first the learners have exactly the
    average ("-": never); the bytes that a learner sends in a step, the mean over the steps. Of a cycle of
    matrices the gap is per step, ω_min that of any.

    MIXING is what algorithm.mixing may be, such as ring(2), base, or a file. The picture has them as graphs,
    a panel for each step.

    Args:
        learners: How many learners.
        parameters: How many parameters the network has, 4 bytes each.

    Example:
        landscape topologies base 'ring(2)' --learners 25 --parameters 11000000 --plot graphs.png
    """
    common.check_targets(None, picture, force=False)
    about: dict[str, Any] = {"learners": learners, "parameters": parameters, "picture": picture}
    with common.progress_bar("topologies") as bar:
        found = compare(mixings or None, progress=bar, **about)
    width = max(map(len, found))
    lines = [
        f"{'mixing':{width}} {'gap':>7} {'ω_min':>7} {'ηλ <':>6} {'exact after':>11} {'bytes a step':>12}"
    ]
    for spec, row in found.items():
        spectrum = f"{row['gap']:7.4f} {row['omega_min']:7.4f} {row['limit']:6.4g}"
        lines.append(f"{spec:{width}} {spectrum} {row['rounds'] or '-':>11} {row['bytes']:12,.0f}")
    common.values("\n".join(lines), topologies=found)
    if not mixings:
        if others := [spec for spec in default_mixings() if spec not in found]:
            common.message(f"not for {learners} learners: {', '.join(others)}")
        common.message(f"forms: {', '.join(forms())}; a file .csv, .txt or .npy")
    if picture:
        common.files(picture)
