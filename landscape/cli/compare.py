"""landscape compare, and landscape average: several checkpoints beside each other."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from landscape.analysis.average import average as compute_average
from landscape.analysis.compare import compare as compute_comparison
from landscape.analysis.quantities import BY_NAME
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli import common
from landscape.cli.analysis import Analysis, analysis_options, each
from landscape.cli.grids import same_network, titles
from landscape.cli.options import ListType, command
from landscape.core.errors import InputError
from landscape.results.comparison import Comparison, WeightAverage, footnotes, summary, table_of
from landscape.training.experiments import preconditioner

WIDTH = 110  # characters of a line of the table, but for its last column (ours)


@command(
    groups={"metavar": "recipe|NAME=COUNT,…"},
    analysis=analysis_options(
        compute_comparison,
        split=False,
        quantities={"metavar": "NAME,…", "help": f"Only these: {', '.join(BY_NAME)}. [default: all]"},
        batch={"help": "Samples in a minibatch. [default: the runs' total batch, if it is one]"},
        draws={"help": "Minibatches and displacements."},
        planes={"help": "Random planes of the basin width."},
        rise={"help": "Of the loss in nats, at that width."},
        rho={"help": "ρ of worst-case adaptive sharpness."},
        rho_average={"help": "ρ of the average case."},
        k={"help": "Sharp directions."},
        significance={"help": "Of all tests of the table together."},
        equal_loss={
            "flag": "--at-equal-loss",
            "help": "Take of each run's files step-*.h5 the one whose training loss is nearest to the "
            "highest of all.",
        },
        loss_tol={"help": "How near, relative to that loss."},
    ),
)
def compare(groups: str | None, analysis: Analysis) -> None:
    """Compare how flat minima are, with tests.

    All instruments are in one table, which says whether this minimum is flatter than that one.

    Prints each quantity with its standard error, or the bound of an eigenvalue, and which differences are
    larger than that: by paired tests on common minibatches, vectors and planes, and over groups by Welch's t,
    with Holm's correction. Quantities that cannot be measured are named below the table.

    Args:
        groups: Compare groups, with errors over their seeds: recipe (runs whose recipes differ only in the
            seed), or NAME=COUNT,… (the first COUNT of the CKPTs, the next, …). At least 3 each for a
            statement.

    Example:
        landscape compare runs/ss-*/ runs/dp-*/ --groups recipe --at-equal-loss --plot flat.png
    """
    runs = analysis.open()
    given = runs if groups is None else grouped(runs, groups)
    path = analysis.path(runs[0], "compare")
    for _, progress in each("compare", [given]):
        result = compute_comparison(
            given,
            **analysis.settings,
            preconditioner_of=preconditioner,
            seed=analysis.seed,
            progress=progress,
        )
    analysis.say_other_data(runs)
    others = dict.fromkeys(filter(None, map(analysis.source.other_data, runs)))
    notes = [f"the data is {name}, not that of the checkpoints" for name in others]
    result = dataclasses.replace(result, notes=(*result.notes, *notes))
    common.values(table(result))
    common.write([result], path, analysis.target.picture)


def grouped(runs: Sequence[Checkpoint], text: str) -> dict[str, list[Checkpoint]]:
    """The runs by the names of their groups, from the value of --groups."""
    if text == "recipe":
        from landscape.plots.training import groups_of  # only here: it brings matplotlib

        unknown = next((run for run in runs if not run.has_recipe), None)
        if unknown:
            raise InputError(f"--groups: recipe is not allowed, {unknown.path} has none; give NAME=COUNT,…")
        return {name: members for name, _, members in groups_of(runs)}
    found: dict[str, list[Checkpoint]] = {}
    done = 0
    for word in text.split(","):
        match = re.fullmatch(r"\s*([^=]*[^=\s])\s*=\s*([1-9]\d{0,5})\s*", word)
        if not match or match[1] in found:
            raise InputError(
                f"--groups: '{text}' is not allowed, it must be recipe, or as SSGD=3,DPSGD=3, each name once"
            )
        found[match[1]] = list(runs[done : done + int(match[2])])
        done += int(match[2])
    if done != len(runs):
        raise InputError(f"--groups: '{text}' has places for {done} checkpoints, {len(runs)} were given")
    return found


@command(
    analysis=analysis_options(
        compute_average,
        labels=None,
        exact=None,
        seed=False,
        coefficients={
            "metavar": "a,…",
            "type": ListType(float, "0.5,0.3,0.2"),
            "help": "One for each member, ≥ 0; they are divided by their sum. [default: uniform]",
        },
    )
)
def average(analysis: Analysis) -> None:
    """Predict the loss of averaged weights.

    The average is of the w_a of several CKPTs, such as the files of a run or fine-tunings of one network; of
    one CKPT, of its learners.

    The loss, the gradient and one Hessian product at each member predict the loss of the average with a 90%
    interval; its exact loss stands beside it. Members are chosen by prediction, too.

    Example:
        landscape average runs/ss/step-???????.h5 --plot average.png
    """
    runs = analysis.open()
    same_network(runs)

    def compute(first: Checkpoint, *others: Checkpoint, seed: int, **settings: Any) -> WeightAverage:
        problem = first.problem()
        if not others:
            return compute_average(problem, first.weights, **settings)
        return compute_average(problem, runs, labels=titles(runs), **settings)

    analysis.compute("average", [tuple(runs)], compute)


def table(result: Comparison) -> str:
    """The whole table with what must be known of it."""
    c = result
    rows = [["", *c.sides, "error over", "difference"], *table_of(c)]
    said = [
        textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in footnotes(c)
    ]
    return "\n".join([common.columns(rows, left=True), "", *summary(c), *said])
