"""Topologies side by side: spectrum, stability, exactness and traffic."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import numpy as np

from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import ends_in, positive
from landscape.core.progress import ProgressOption, shows_progress, taken
from landscape.training.planning.plan import planned_topologies
from landscape.training.topology.mixing import Mixing

#: Of the topologies that need a number, besides rings, one each in the list (ours).
EXAMPLES = ("k-peer-exponential(2)", "hyper-hypercube(2)", "base(2)", "d-equistatic(4)", "u-equistatic(4)")


class Properties(TypedDict):
    """The numbers of a topology, see :func:`topologies`."""

    gap: float
    omega_min: float
    limit: float
    rounds: int | None
    bytes: float


@shows_progress()
def topologies(
    mixings: Iterable[str] | None = None,
    *,
    learners: int = 8,
    parameters: int = 1_000_000,
    picture: str | Path | None = None,
    progress: ProgressOption = None,
) -> dict[str, Properties]:
    """Compare the topologies for so many learners.

    Args:
        mixings: what ``algorithm.mixing`` may be, such as "ring(2)", "base" or a file. Default: every
            topology that this number of learners allows, with some numbers where it needs one.
        learners: n.
        parameters: of the network, 4 bytes each.
        picture: a .png, .pdf or .svg file for a picture of the topologies as graphs, a panel for each step of
            a cycle, eight at most; of random matching three steps with seed 0.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.

    Returns:
        Mixing -> its numbers: "gap", the spectral gap of the mixing matrix; "omega_min", its smallest
        eigenvalue; "limit", the largest stable ηλ of DPSGD in AWC order without momentum; "rounds", after how
        many steps from the first the learners have exactly the average, None for never; "bytes", what a
        learner sends in a step, the mean over the steps. Of a cycle of matrices the gap is per step, and the
        eigenvalue is the smallest of all.

    Raises:
        InputError: a mixing that is not known, or not for so many learners; numbers below 1; a
            picture of none, or with another ending.

    Example:
        >>> found = topologies(["ring(1)", "base"], learners=6)
        >>> round(found["ring(1)"]["limit"], 4), found["ring(1)"]["rounds"], found["base"]["rounds"]
        (0.6667, None, 4)
    """
    positive("learners", learners, least=1)
    positive("parameters", parameters, least=1)
    if picture is not None:
        from landscape import plots  # and matplotlib: only where something is drawn
        from landscape.plots.topologies import draw_topologies

        ends_in("picture", picture, plots.FORMATS)
    found: dict[str, Properties] = {}
    graphs: dict[str, list[Array]] = {}
    chosen, report = default_mixings() if mixings is None else [*mixings], taken(progress)
    for done, spec in enumerate(chosen):
        report(done / len(chosen))
        try:
            mixing = Mixing(spec, learners, seed=0, where="mixings")
        except InputError:
            if mixings is not None:
                raise
            continue
        found[spec] = _properties(mixing, 4 * parameters)
        graphs[spec] = mixing.cycle or [mixing.matrix(t) for t in range(1, 4)]
    if picture is not None:
        if not graphs:
            raise InputError("mixings: none is not allowed with picture, there must be one to draw")
        plots.save_figure(draw_topologies(graphs), picture)
    return found


def default_mixings() -> list[str]:
    """The mixings that :func:`topologies` compares by default."""
    return [*planned_topologies(), *EXAMPLES]


def _properties(mixing: Mixing, size: int) -> Properties:
    """The numbers of a topology, for weights of ``size`` bytes."""
    vectors = np.mean([mixing.degree(t) for t in range(1, max(1, len(mixing.cycle)) + 1)])
    return {
        "gap": mixing.gap,
        "omega_min": mixing.omega_min,
        "limit": mixing.stability_limit,
        "rounds": mixing.rounds,
        "bytes": size * float(vectors),
    }
