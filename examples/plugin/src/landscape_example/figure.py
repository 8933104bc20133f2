"""A figure: what clipping does at a large learning rate."""

from __future__ import annotations

import landscape
from landscape.plugins import (
    Context,
    Drawing,
    Effect,
    Rows,
    compare_with_paper,
    figure,
    paired_effect,
    test_error,
)

SETTINGS = [
    "algorithm={_algorithm}",
    "learners=4",
    "batch=80",
    "lr=2.0",
    "model={{name='mlp', widths=[2, 16, 2]}}",
    "data={{name='two-moons'}}",
]
# The runs: all combinations of the axes, each with two seeds; a name that begins with "_" is no column.
CELLS = {
    "recipe": "digits-ssgd",
    "axes": [
        {
            "algorithm": ["ssgd", "clipped-ssgd"],
            "_algorithm": ["{name='ssgd'}", "{name='clipped-ssgd', max_norm=0.5}"],
        }
    ],
    "set": [*SETTINGS, "evaluate.every=50"],
    "seeds": [2, 2, 2],  # at the scales smoke, laptop and paper
    "smoke": {"set": [*SETTINGS, "steps=20", "evaluate.every=2"]},
}


def judge(rows: Rows) -> list[Effect]:
    """The verdict on the claim: by how much clipping lowers the test error, paired over the seeds."""
    both, what = ("ssgd", "clipped-ssgd"), "test error, plain less clipped (points)"
    return [paired_effect("two moons", what, rows, "test_error_percent", algorithm=both)]


TEXTS = {
    "where": "Example, Figure 1",
    "title": "SSGD with and without clipping, two moons",
    "claims": "Clipped directions keep training stable at a large learning rate.",
    "finding": "Clipping lowers the test error at a large learning rate",
    "laptop": "all of it is ours",
}


@figure("clipping", judge, TEXTS | {"cells": CELLS})
def clipping(context: Context) -> Drawing:
    """Training curves, and the test error at the end."""
    rows = context.table(lambda run: {"test_error_percent": test_error(run.end)})
    picture = landscape.draw([run.end for run in context.ended()], title=TEXTS["title"])
    return Drawing(
        {"": picture}, rows, compare_with_paper(rows, "test error of {algorithm} (%)", "test_error_percent")
    )
