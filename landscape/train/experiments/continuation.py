"""Two quantities that analyses need of a run: the path it would take from here, and its effective rate."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import FailedError
from landscape.core.numerics import numerics
from landscape.problem.layout import average
from landscape.train.loop import Hooks, Trainer, recipe_of
from landscape.train.recipe_tables import Decompose, Evaluate, Monitor, Save

# Steps along which the gradient's Lipschitz constant is estimated, and decomposed steps whose median is
# called the run's α_e (ours).
STEPS = 5
LAST = 10


@numerics(1)
def mean_path(
    run: Checkpoint, steps: int, device: torch.device | str = "cpu", data_dir: str | Path | None = None
) -> Tensor:
    """w_a (S + 1, P) along ``steps`` S further steps of the run, in memory; fewer if it diverges.

    Raises FailedError where the run's recipe names code, which a file cannot bring in.
    """
    recipe = dataclasses.replace(
        recipe_of(run),
        steps=run.step + steps,
        decompose=Decompose(every=0),
        evaluate=Evaluate(every=0),
        monitor=Monitor(),
        checkpoint=Save(every=1),
    )
    if recipe.names_code:
        raise FailedError(
            f"{run.path}: its recipe names code, which a file may not bring in; the run cannot be continued"
        )
    path = [run.mean]
    hooks = Hooks(save=lambda state: path.append(average(state.weights).cpu()))
    # The spread of a diverged run can be smoothed by, but there is nowhere to go on to.
    if not run.diverged:
        Trainer(recipe, checkpoint=run, device=device, data_dir=data_dir, hooks=hooks).run()
    return torch.stack(path)


def effective_rate(run: Checkpoint) -> float:
    """The median of the last α_e of a run; NaN where it has none."""
    rates: Any = run.history.get("alpha_e", np.zeros(0))
    rates = rates[np.isfinite(rates)][-LAST:]
    return float(np.median(rates)) if len(rates) else math.nan
