"""A figure: what clipping does at a large learning rate."""

from __future__ import annotations

import landscape
from landscape.plugins import (
    Context,
    Drawing,
    Effect,
    Rows,
    Runs,
    Scale,
    compare_with_paper,
    difference_effect,
    figure,
    pair,
    runs_of,
    summary,
    test_error,
)

NOTE = "all of it is ours"
ALGORITHMS = {"ssgd": {"name": "ssgd"}, "clipped-ssgd": {"name": "clipped-ssgd", "max_norm": 0.5}}


def runs(scale: Scale) -> Runs:
    """Both algorithms with two seeds, by "ALGORITHM/SEED"."""
    steps = 20 if scale == "smoke" else 500
    values = {
        "learners": 4,
        "batch": 80,
        "lr": 2.0,
        "steps": steps,
        "model": {"name": "mlp", "widths": [2, 16, 2]},
        "data": {"name": "two-moons"},
        "evaluate": {"every": steps // 10},
    }

    def make(name: str, seed: int) -> landscape.Recipe:
        own = {**values, "name": name, "seed": seed, "algorithm": ALGORITHMS[name]}
        return landscape.Recipe.read("digits-ssgd", **own)

    return runs_of("{name}", {"name": ALGORITHMS}, range(2), make)


def judge(rows: Rows) -> list[Effect]:
    """The verdict on the claim: by how much clipping lowers the test error, paired over the seeds."""
    errors = pair(rows, "test_error_percent", algorithm=tuple(ALGORITHMS))
    return [difference_effect("two moons", "test error, plain less clipped (points)", errors)]


@figure(
    "clipping",
    "Example, Figure 1",
    "SSGD with and without clipping, two moons",
    "Clipped directions keep training stable at a large learning rate.",
    runs,
    judge,
    laptop=NOTE,
)
def clipping(context: Context) -> Drawing:
    """Training curves, and the test error at the end."""
    rows = context.table(
        "{algorithm}", {"algorithm": ALGORITHMS}, lambda key, end: {"test_error_percent": test_error(end)}
    )
    ends = [end for name in ALGORITHMS for end in context.group(name)]
    picture = landscape.draw(ends, title="SSGD with and without clipping, two moons")
    errors = rows.groupby("algorithm", sort=False)["test_error_percent"]
    text = ", ".join(f"{name} {summary(values)}%" for name, values in errors)
    compared = compare_with_paper(rows, "test error of {algorithm} (%)", "test_error_percent")
    return Drawing({"": picture}, rows, compared, f"Test error: {text}.")
