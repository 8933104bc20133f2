"""landscape topologies"""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape.cli import common
from landscape.cli.completion import names
from landscape.cli.options import command
from landscape.core.errors import InputError
from landscape.core.options import positive
from landscape.training.planning.plan import planned_topologies
from landscape.training.topology.mixing import Mixing, forms

#: Of the topologies that need a number, besides rings, one each in the list (ours).
EXAMPLES = ("k-peer-exponential(2)", "hyper-hypercube(2)", "base(2)", "d-equistatic(4)", "u-equistatic(4)")


@command(
    mixings={"argument": True, "metavar": "[MIXING]…", "shell_complete": names(planned_topologies)},
    learners={"metavar": "N"},
    parameters={"metavar": "P"},
)
def topologies(*, mixings: tuple[str, ...], learners: int = 8, parameters: int = 1_000_000) -> None:
    """List the topologies, or compare some, for so many learners.

    Columns: the spectral gap and the smallest eigenvalue ω_min of the mixing matrix; the largest stable ηλ of
    DPSGD in AWC order without momentum; after how many steps from the first the learners have exactly the
    average ("-": never); the bytes that a learner sends in a step, the mean over the steps. Of a cycle of
    matrices the gap is per step, ω_min that of any.

    MIXING is what algorithm.mixing may be, such as ring(2), base, or a file.

    Args:
        learners: How many learners.
        parameters: How many parameters the network has, 4 bytes each.

    Example:
        landscape topologies --learners 25 --parameters 11000000
    """
    positive("--learners", learners, least=1)
    positive("--parameters", parameters, least=1)
    rows, refused = [], []
    for spec in mixings or (*planned_topologies(), *EXAMPLES):
        try:
            rows.append(_row(Mixing(spec, learners, seed=0, where="MIXING"), 4 * parameters))
        except InputError as why:
            if mixings:
                raise
            refused.append(str(why).removeprefix("MIXING: "))
    width = max(len(row["mixing"]) for row in rows)
    lines = [
        f"{'mixing':{width}} {'gap':>7} {'ω_min':>7} {'ηλ <':>6} {'exact after':>11} {'bytes a step':>12}"
    ]
    for row in rows:
        spectrum = f"{row['gap']:7.4f} {row['omega_min']:7.4f} {row['limit']:6.4g}"
        lines.append(f"{row['mixing']:{width}} {spectrum} {row['rounds'] or '-':>11} {row['bytes']:12,.0f}")
    common.values("\n".join(lines), topologies=rows)
    if refused:
        common.message("\n".join(["", *refused]))
    if not mixings:
        common.message(f"\nforms: {', '.join(forms())}; a file .csv, .txt or .npy")


def _row(mixing: Mixing, size: int) -> dict[str, Any]:
    """The numbers of a topology, for weights of ``size`` bytes."""
    return {
        "mixing": mixing.spec,
        "gap": mixing.gap,
        "omega_min": mixing.omega_min,
        "limit": mixing.stability_limit,
        "rounds": mixing.rounds,
        "bytes": size * float(np.mean([mixing.degree(t) for t in range(1, max(1, len(mixing.cycle)) + 1)])),
    }
