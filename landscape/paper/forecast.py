"""How long runs take here, from a short measurement of a gradient of each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from landscape.core.memory import pick_device
from landscape.paper.context import Context, digest
from landscape.problem.batches import Stream
from landscape.train.planning.calibration import calibrate
from landscape.train.recipes.recipe import Recipe

# Samples of a learner in the steps that are timed, which take time as proportional to samples; a step of the
# fewer ones that takes longer than so many seconds is enough (ours).
TIMED_SAMPLES, BUSY_SECONDS = (16, 512), 0.02
# A measurement of λ_max along a run takes as long as so many gradients of its samples (ours; Figure 2(b)).
SHARPNESS_PASSES = 30


def seconds_of(context: Context, recipes: Iterable[Recipe]) -> float:
    """Seconds that ``recipes`` take here, one after another, from a short measurement of each kind.

    Includes steps, evaluations, decompositions and λ_max (as passes over their samples), but no checkpoints
    and no instruments.
    """
    total, known = 0.0, dict[str, float]()
    for recipe in recipes:
        most = min(max(TIMED_SAMPLES), recipe.local_batch)
        kind = digest(recipe.model, recipe.data, recipe.precision, recipe.dtype, most)
        if kind not in known:
            known[kind] = seconds_a_sample(context, recipe)
        passes = 0.0
        spec = recipe.spec("data")
        whole = context.dataset(spec.name, spec.options)
        train, test = (_samples(split) for split in (whole.train, whole.test))
        if recipe.decompose.every:
            passes += (recipe.decompose.samples or train) / recipe.decompose.every
        if recipe.evaluate.every:
            passes += test / 3 / recipe.evaluate.every  # without a backward pass
        if recipe.monitor.sharpness:
            passes += SHARPNESS_PASSES * (recipe.monitor.samples or train) / recipe.monitor.sharpness
        total += recipe.steps * (recipe.batch + passes) * known[kind]
    return total


def seconds_a_sample(context: Context, recipe: Recipe) -> float:
    """Of a gradient, from steps of few samples, or of more where such steps take next to no time."""
    timed = dataclasses.replace(  # also of a run whose steps are of all samples
        recipe, accumulate=1, sampling="replacement", monitor=type(recipe.monitor)()
    )
    place = pick_device(context.device)
    for samples in TIMED_SAMPLES:
        local = min(samples, recipe.local_batch)
        seconds = calibrate(timed, 1, local, device=place, data_dir=context.data_dir).gradient
        if seconds > BUSY_SECONDS or local == recipe.local_batch:
            break
    return seconds / local


def _samples(split: Any) -> int:
    return split.samples if isinstance(split, Stream) else len(split[1])
