"""Escape times from a saddle, by the same training loop as everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from landscape.core.errors import InputError
from landscape.core.registry import numerics
from landscape.models.small import Saddle
from landscape.results.training import Escape
from landscape.train.recipes.recipe import read
from landscape.train.run.loop import Hooks, Trainer

# Half of the depth lies far outside of the nearly quadratic region (ours).
SHARE = 0.5
# Name of a quantity that can be varied -> the recipe's keys that change.
VARY = {"dimension": ("model.dimension", "data.dimension"), "noise": ("data.gradient_std",), "lr": ("lr",)}


class _Escaped(Exception):
    pass


def escape_time(recipe: str, settings: Sequence[str]) -> float:
    """The first step after which L(w_a) ≤ SHARE of the saddle's depth; inf if none is.

    ``recipe`` and ``settings`` as in :func:`landscape.train.recipes.recipe.read`; the model must be "saddle".
    """
    run_recipe = read(recipe, [*settings, "evaluate.every=1", "decompose.every=0"])
    spec = run_recipe.spec("model")
    if spec.name != "saddle":
        raise InputError(f"model.name: '{spec.name}' is not allowed, escape times are those of 'saddle'")
    level = SHARE * Saddle(**spec.options).depth

    def check_escape(done: int, total: int) -> None:
        if trainer.history.rows[-1]["test_loss"] <= level:
            raise _Escaped

    trainer = Trainer(run_recipe, hooks=Hooks(step=check_escape))
    try:
        trainer.run()
    except _Escaped:
        return float(trainer.step)
    return math.inf


@numerics(1)
def sweep(
    vary: str,
    values: Sequence[float],
    algorithms: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    *,
    recipe: str = "saddle-dpsgd",
    settings: Sequence[str] = (),
    done: Callable[[], None] = lambda: None,
) -> Escape:
    """:class:`Escape` of each of ``algorithms`` (name -> settings) over ``values`` of a key of VARY.

    The seeds are the same for all, so that algorithms see the same minibatches.
    """
    times = np.zeros((len(algorithms), len(values), len(seeds)))
    for a, changes in enumerate(algorithms.values()):
        for k, value in enumerate(values):
            varied = [f"{key}={value}" for key in VARY[vary]]
            for s, seed in enumerate(seeds):
                times[a, k, s] = escape_time(recipe, [*settings, *changes, *varied, f"seed={seed}"])
                done()
    base = read(recipe, settings)
    model, data = base.spec("model").options, base.spec("data").options
    fixed = {"dimension": model["dimension"], "noise": data["gradient_std"], "lr": base.lr}
    setting = ", ".join(f"{name} {value:g}" for name, value in fixed.items() if name != vary)
    return Escape(
        times, np.array(values, dtype=np.float64), vary, tuple(algorithms), SHARE, base.steps, setting
    )
