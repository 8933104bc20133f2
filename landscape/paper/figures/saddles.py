"""DPSGD-2020's steps to leave a saddle. Its problem is in an appendix that is not available."""

from __future__ import annotations

import numpy as np
import pandas as pd

from landscape import plots
from landscape.paper.context import Context
from landscape.paper.figure import Compared, Drawing, figure, summary
from landscape.paper.verdicts import Effect, Rows, pair, ratio_effect, settings
from landscape.results.stability import Escape
from landscape.train.experiments import saddles
from landscape.train.run.loop import Trainer

VARIED: dict[str, list[float]] = {
    "dimension": [2, 4, 8, 16],
    "noise": [1e-4, 1e-3, 1e-2, 1e-1],
    "lr": [0.05, 0.1, 0.2, 0.4],
}
FEW: dict[str, list[float]] = {"dimension": [2, 8]}
ALGORITHMS: dict[str, list[str]] = {
    "ssgd": ["algorithm={name='ssgd'}"],
    "ssgd*": ["algorithm={name='ssgd*', sigma=0.001}"],
    "dpsgd": [],
}


def _saddles(context: Context) -> Drawing:
    values, many = context.pick(FEW, VARIED, VARIED), context.pick(6, 20, 40)
    results = context.cached(
        Escape,
        [],
        {"values": values, "seeds": many},
        lambda: [saddles.sweep(name, list(each), ALGORITHMS, range(many)) for name, each in values.items()],
        (saddles.sweep, Trainer),
    )
    rows = pd.DataFrame(
        {"vary": r.vary, "value": float(v), "algorithm": name, "seed": s, "steps": min(float(steps), r.steps)}
        for r in results
        for a, name in enumerate(r.algorithms)
        for k, v in enumerate(r.values)
        for s, steps in enumerate(r.times[a, k])
    )
    ratio = [float(np.median(effect.values)) for effect in _judge(rows)]
    return Drawing(
        {"": plots.draw(results)},
        rows,
        [Compared("steps of SSGD / steps of DPSGD to leave, median over the seeds", summary(ratio))],
        f"DPSGD leaves the saddle {np.median(ratio):.2f} times as fast as SSGD (median over the settings, "
        f"{min(ratio):.2f} to {max(ratio):.2f}).",
    )


def _judge(rows: Rows) -> list[Effect]:
    """An effect for each setting; of a run that does not leave, all of its steps count."""
    effects = []
    for vary, value in settings(rows, "vary", "value"):
        steps = pair(rows, "steps", vary=vary, value=value, algorithm=("ssgd", "dpsgd"))
        effects.append(ratio_effect(f"{vary} {value:g}", "steps of SSGD / of DPSGD", steps))
    return effects


_SADDLE = "the paper's problem is in an appendix that is not available: the family of saddles is ours"
figure(
    "saddles", "DPSGD-2020, section 2", "steps to leave a saddle",
    "DPSGD's noise leaves saddles faster than SSGD's.",
    lambda scale: {}, _judge, smoke="two dimensions, six seeds", laptop=_SADDLE,
)(_saddles)  # fmt: skip
