"""Training that goes on from a checkpoint: in branches of other batches, and along the path of w_a."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint.checkpoint import IMPORTED, RECORDED, Checkpoint
from landscape.core.analysis import analysis
from landscape.core.errors import InputError, OperationError
from landscape.core.options import choose, expect, positive
from landscape.core.progress import ProgressOption, taken
from landscape.core.registry import numerics
from landscape.evaluation.grid import setting
from landscape.problem.layout import average
from landscape.results.base import Provenance
from landscape.results.noise import CriticalBatch
from landscape.training.own_loop.flat import read_settings
from landscape.training.recipes.recipe import Recipe, Save, continued, recipe_of
from landscape.training.recipes.schedule import Schedule
from landscape.training.run.loop import Hooks, Trainer

# Batches in units of the run's own, seeds, and the allowed rise of the loss (ours).
FACTORS, SEEDS, LOSS_TOL = (1.0, 2.0, 4.0, 8.0, 16.0), 3, 0.01
# The largest batch takes so many steps by default, and at least so many. The loss of a branch is its mean at
# so many places evenly spread over the last quarter, which takes off most of its fluctuation (ours).
STEPS, LEAST_STEPS, PLACES = 40, 8, 5
# The exponent of the batch in the learning rate: 1 for SGD (Goyal et al. 2017), ½ for optimizers that divide
# by the size of the gradient (Malladi et al. 2022).
ROOT = ("torch:Adam", "torch:AdamW", "torch:RMSprop", "torch:NAdam", "torch:RAdam", "torch:Adamax", "lamb")
SCALING = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}


@analysis(
    shorter="a smaller trained_samples= or seeds=",
    group="Measure noise and learners",
    of_the_run=None,
    options={
        "factors": {"metavar": "k,…"},
        "trained_samples": {"flag": "--samples", "metavar": "N"},
        "seeds": {"flag": "--branches"},
        "scaling": {"flag": "--lr-scaling"},
    },
)
def critical_batch(
    run: Checkpoint,
    factors: Sequence[float] = FACTORS,
    *,
    trained_samples: int | None = None,
    seeds: int = SEEDS,
    loss_tol: float = LOSS_TOL,
    scaling: Literal["linear", "sqrt", "none"] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    data_dir: str | Path | None = None,
    progress: ProgressOption = None,
    **about: Unpack[Provenance],
) -> CriticalBatch:
    """Find the critical batch by branched training.

    It is the largest with which training goes on as well, sample for sample, from a checkpoint.

    From the checkpoint, with the state of its optimizer and update rule, branches train on equally many
    samples in steps of other batches; the learning rate follows the batch. The critical batch is the one
    above which the training loss ends higher than with the smallest batch, by more than the share
    ``loss_tol``: branched training (Merrill et al. 2025, arXiv 2505.23971). It needs no assumption on the
    Hessian, which :func:`landscape.noise_scale` does. Evaluation of the loss at w_a over all training data,
    several seeds and interpolation between batches are ours.

    Args:
        run: a checkpoint of ``landscape train``, which says how the run goes on (a :class:`landscape.Problem`
            does not); its learning rate stays constant within a branch.
        factors: batches of the branches in units of the run's; the smallest is the reference.
        trained_samples: of each branch; default: 40 steps of the largest batch.
        seeds: branches for each batch, with minibatches of their own.
        loss_tol: the allowed rise of the loss, relative to that of the reference.
        scaling: of the learning rate with the batch: "linear", "sqrt" or "none". Default: "linear", for
            optimizers that divide by the size of the gradient "sqrt".
        seed: of the first branch; it draws the minibatches.
        device, data_dir: where the branches train, and the folder of data sets; default: those of the run's
            problem.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result.

    Returns:
        The loss of each branch, and the critical batch with its standard error.

    Raises:
        InputError: no checkpoint, fewer than two factors, a batch that the learners cannot share, or branches
            too short.
        OperationError: a run without a recipe, one whose recipe names code, or a run that diverged.

    Example:
        >>> from landscape.training.recipes.recipe import read
        >>> run = Trainer(read("digits-ssgd", ["steps=5", "decompose.every=0"])).run()
        >>> result = critical_batch(run, [0.5, 1], trained_samples=5000, seeds=1)
        >>> result.batch.tolist(), result.steps.tolist()
        ([250, 500], [20, 10])
    """
    expect("run", run, Checkpoint)
    device, data_dir = device or run.source.get("device") or "cpu", data_dir or run.source.get("data_dir")
    # The run's, without its schedule and what is recorded along the way.
    recipe = continued(run, schedule=Schedule())
    if run.diverged:
        raise OperationError(f"{run.path or 'checkpoint'}: the run diverged, there is nothing to continue")
    chosen = scaling or ("sqrt" if recipe.part("optimizer")[0] in ROOT else "linear")
    choose("scaling", chosen, SCALING)
    for name, value in (("seeds", seeds), ("trained_samples", trained_samples or 1)):
        positive(name, value, least=1)
    positive("loss_tol", loss_tol)
    batches = _batches(recipe, factors)
    total = trained_samples or STEPS * batches[-1]
    rates = [run.lr * (batch / recipe.batch) ** SCALING[chosen] for batch in batches]
    steps = [round(total / batch) for batch in batches]
    if steps[-1] < LEAST_STEPS:
        raise InputError(
            f"trained_samples: {total} is not allowed, it must be at least {LEAST_STEPS * batches[-1]}"
        )
    loss, report = np.empty((len(batches), seeds)), taken(progress)
    for done, (k, s) in enumerate(np.ndindex(loss.shape)):
        branch = dataclasses.replace(
            recipe, batch=batches[k], lr=rates[k], steps=run.step + steps[k], seed=seed + s
        )
        loss[k, s], trainer = _train(branch, run, device, data_dir)
        report((done + 1) / loss.size)
    return CriticalBatch(
        batch=np.array(batches),
        lr=np.array(rates),
        steps=np.array(steps),
        loss=loss,
        own_batch=recipe.batch,
        step=run.step,
        trained_samples=total,
        loss_tol=loss_tol,
        scaling=chosen,
        seed=seed,
        **setting(trainer.train),
        **about,
    )


def _batches(recipe: Recipe, factors: Sequence[float]) -> list[int]:
    """The batches in increasing order, each once."""
    for factor in factors:
        positive("factors", factor)
    exact = sorted({factor * recipe.batch for factor in factors})
    if len(exact) < 2:
        raise InputError(f"factors: {list(factors)} is not allowed, at least two different ones are needed")
    for batch in exact:
        if batch != round(batch) or round(batch) % (recipe.learners * recipe.accumulate):
            raise InputError(
                f"factors: {batch / recipe.batch:g} is not allowed, {recipe.learners} learners cannot share "
                f"a batch of {batch:g}"
            )
    return [round(batch) for batch in exact]


def _train(
    recipe: Recipe, run: Checkpoint, device: torch.device | str, data_dir: str | Path | None
) -> tuple[float, Trainer]:
    """(the mean training loss over the last quarter of a branch, inf if it diverged; its trainer)."""
    length = recipe.steps - run.step
    every = max(1, length // (4 * PLACES))
    losses = []

    def evaluate(state: Checkpoint) -> None:
        if state.step > recipe.steps - length / 4:
            losses.append(trainer.buffers.training_loss(average(state.weights)))

    recipe = dataclasses.replace(recipe, checkpoint=Save(every=every))
    trainer = Trainer(recipe, checkpoint=run, device=device, data_dir=data_dir, hooks=Hooks(save=evaluate))
    end = trainer.run()
    return math.inf if end.diverged or not np.isfinite(losses).all() else float(np.mean(losses)), trainer


# Steps along which the gradient's Lipschitz constant is estimated, and decomposed steps whose median is
# called the run's α_e (ours).
PATH_STEPS = 5
LAST = 10


@numerics(1)
def mean_path(
    run: Checkpoint, steps: int, device: torch.device | str = "cpu", data_dir: str | Path | None = None
) -> Tensor:
    """w_a (S + 1, P) along ``steps`` S further steps of the run, in memory; fewer if it diverges.

    Raises OperationError where the run's recipe names code, which a file cannot bring in.
    """
    recipe = continued(run, steps=run.step + steps, checkpoint=Save(every=1))
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


def operating_point(run: Checkpoint) -> tuple[float, float | None, int]:
    """The learning rate of a run, the limit on ηλ of its update rule if it is known, and its delay."""
    if run.algorithm == IMPORTED:
        return math.nan, None, 0
    if run.algorithm == RECORDED:
        return run.lr, read_settings(run).get("monitor", {}).get("stability_limit"), 0
    recipe = recipe_of(run)
    return run.lr, recipe.stability_limit(), int(recipe.algorithm.get("delay", 0))
