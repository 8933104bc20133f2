"""A figure: what clipping does at a large learning rate."""

from __future__ import annotations

from landscape import plots
from landscape.paper.figure import Compared, Drawing, Runs, Scale, Work, figure, summary, test_error
from landscape.paper.verdicts import Effect, Rows, by_seed, difference
from landscape.train import recipe

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
    return {
        f"{name}/{seed}": recipe.from_values({**values, "name": name, "seed": seed, "algorithm": algorithm})
        for name, algorithm in ALGORITHMS.items()
        for seed in range(2)
    }


def judge(rows: Rows) -> list[Effect]:
    """The verdict on the claim: by how much clipping lowers the test error, paired over the seeds."""
    plain, clipped = (by_seed(rows, "test_error_percent", algorithm=name) for name in ALGORITHMS)
    return [Effect("two moons", "test error, plain less clipped (points)", difference(plain, clipped))]


@figure(
    "clipping",
    "Example, Figure 1",
    "SSGD with and without clipping, two moons",
    "Clipped directions keep training stable at a large learning rate.",
    runs,
    judge,
    smoke=NOTE,
    laptop=NOTE,
    paper=NOTE,
)
def clipping(work: Work) -> Drawing:
    """Training curves, and the test error at the end."""
    ends = {name: work.group(name) for name in ALGORITHMS}
    picture = plots.draw([end for group in ends.values() for end in group], title=work.figure.title)
    errors = {name: [test_error(end) for end in group] for name, group in ends.items()}
    rows = [
        {"algorithm": name, "seed": seed, "test_error_percent": error}
        for name, group in errors.items()
        for seed, error in enumerate(group)
    ]
    compared = [Compared(f"test error of {name} (%)", summary(group)) for name, group in errors.items()]
    text = ", ".join(f"{name} {summary(group)}%" for name, group in errors.items())
    return Drawing({"": picture}, rows, compared, f"Test error: {text}.")
