"""What the figures run at each scale, and how long it takes: MNIST's runs, and cells of DPSGD-2020's tables.

Scale ``paper`` is the paper's setting; ``laptop`` what two cores do in half an hour a figure, on real data;
``smoke`` some steps on the bundled digits, which only show that a figure can be made. All that is changed is
ours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from landscape.core.devices import pick_device
from landscape.paper.context import Axes, Context, Runs, Scale, digest, runs_of
from landscape.problem.batches import Stream
from landscape.training.planning.calibration import calibrate
from landscape.training.recipes import recipe
from landscape.training.recipes.recipe import Recipe
from landscape.training.recipes.table_recipes import SAMPLES

# CIFAR-10 at laptop scale, by trial (ours): images of so many pixels a side, passes over them, and the width
# of the networks; minutes a run on one core. Learners, batches and rates are the paper's.
SIZE, EPOCHS = 16, 30
WIDTHS, WIDTH, SMOKE_WIDTH = {"efficientnet-b0": 0.25}, 0.125, 0.0625
SPEECH_NOTE = "spoken digits for Switchboard, batches / 16, LSTM of 2 layers × 64 cells, 16 learners"
CIFAR_NOTE = (
    f"CIFAR-10 at {SIZE} × {SIZE} pixels, {EPOCHS} epochs for the paper's 320, networks of 1/8 the width "
    "(EfficientNet-B0: 1/4), 16 learners, the paper's batches and rates"
)
PAPER_CIFAR = "16 learners, as the paper gives them"
PAPER_SPEECH = "spoken digits for Switchboard, batches / 16; else the paper's LSTM and schedule"
MNIST_NOTE = "the paper's size; steps, ReLU and initialisation are ours"
OURS = "only the abstract is at hand: all settings are ours"

# Samples of a learner in the steps that are timed, which take time as proportional to samples; a step of the
# fewer ones that takes longer than so many seconds is enough (ours).
TIMED_SAMPLES, BUSY_SECONDS = (16, 512), 0.02
# A measurement of λ_max along a run takes as long as so many gradients of its samples (ours; Figure 2(b)).
SHARPNESS_PASSES = 30


def mnist(scale: Scale, name: str, seed: int, *settings: str) -> Recipe:
    """The built-in recipe mnist-NAME; smoke scale takes a fiftieth of its steps, on the digits."""
    full = recipe.read(f"mnist-{name}", settings)
    changes = [f"checkpoint.every={min(500, full.steps // 10)}"]
    if scale == "smoke":
        changes = [
            f"steps={max(20, full.steps // 50)}", "evaluate.every=10", "checkpoint.every=10",
            f"batch={min(full.batch, 60 * full.learners)}",
            "model={name='mlp', widths=[64, 50, 50, 10]}", "data={name='digits'}", "monitor.samples=200",
            f"decompose.every={5 * bool(full.decompose.every)}",
            f"monitor.sharpness={10 * bool(full.monitor.sharpness)}",
        ]  # fmt: skip
        if full.monitor.instruments:
            changes += ["monitor.every=10", "monitor.draws=2"]
    return recipe.read(f"mnist-{name}", [*settings, *changes, f"seed={seed}"])


def mnist_runs(
    form: str,
    axes: Axes,
    many: int,
    name: str,
    changes: Callable[..., Sequence[str]] = lambda **values: (),
    smoke: int = 2,
) -> Callable[[Scale], Runs]:
    """What gives the runs of all combinations of ``axes`` at a scale, with ``many`` seeds, or ``smoke``.

    Args:
        form, axes: as of :func:`.runs_of`.
        many, smoke: numbers of seeds.
        name: of the recipes, a form of the values of ``axes``.
        changes: takes these values, and gives settings.
    """

    def runs(scale: Scale) -> Runs:
        def make(seed: int, **values: Any) -> Recipe:
            return mnist(scale, name.format(**values), seed, *changes(**values))

        return runs_of(form, axes, range(smoke if scale == "smoke" else many), make)

    return runs


def cell(scale: Scale, name: str, seed: int = 0) -> Recipe:
    """The cell ``name`` of the tables, such as cifar10/resnet-18-b8192-dpsgd, at ``scale``.

    Settings may follow, as in NAME+lr=0.2+algorithm.order='atc'.
    """
    name, *settings = name.split("+")
    base = recipe.read(name)
    speech, model = name.startswith("speech/"), base.model["name"]
    changes: list[str] = []
    if scale == "smoke":
        small = "inputs=8, layers=1, cells=8, bottleneck=8, classes=10" if speech else f"width={SMOKE_WIDTH}"
        changes = [
            f"data={{name='digits', form='{'frames' if speech else 'image'}'}}",
            f"learners={min(2, base.learners)}", "batch=16", "steps=4", "evaluate.every=2",
            "checkpoint.every=1", "evaluate.bn_samples=64", "schedule.base_batch=0", "lr=0.05",
            f"model={{name='{model}', {small}}}",
        ]  # fmt: skip
    elif speech and scale != "paper":
        changes = ["model.layers=2", "model.cells=64", "model.bottleneck=64"]
    elif scale == "laptop":
        every = -(-SAMPLES["cifar10"] // base.batch)  # an epoch
        changes = [
            f"epochs={EPOCHS}", f"data.size={SIZE}", f"model.width={WIDTHS.get(model, WIDTH)}",
            "evaluate.bn_samples=2000", f"evaluate.every={every}",
        ]  # fmt: skip
    elif not speech:  # a checkpoint after the paper's 16th epoch, for Figure 4
        changes = [f"checkpoint.every={-(-base.steps // 20)}"]
    return recipe.read(name, [*changes, *settings, f"seed={seed}"])


def cells(scale: Scale, names: Iterable[str]) -> Runs:
    """Cells of the tables by "NAME/SEED", with three seeds; one at smoke scale."""
    make = functools.partial(cell, scale)
    return runs_of("{name}", {"name": names}, range(1 if scale == "smoke" else 3), make)


def seconds_of(context: Context, runs: Iterable[Recipe]) -> float:
    """Seconds that ``runs`` take here, one after another, from a short measurement of each kind.

    Includes steps, evaluations, decompositions and λ_max (as passes over their samples), but no checkpoints
    and no instruments.
    """
    total, known = 0.0, dict[str, float]()
    for run in runs:
        most = min(max(TIMED_SAMPLES), run.local_batch)
        kind = digest(run.model, run.data, run.autocast, run.dtype, most)
        if kind not in known:
            known[kind] = seconds_a_sample(context, run)
        spec = run.spec("data")
        whole = context.dataset(spec.name, spec.options)
        train, test = (
            split.samples if isinstance(split, Stream) else len(split[1])
            for split in (whole.train, whole.test)
        )
        passes = (  # samples, and every how many steps; without a backward pass a third
            (run.decompose.samples or train, run.decompose.every),
            (test / 3, run.evaluate.every),
            (SHARPNESS_PASSES * (run.monitor.samples or train), run.monitor.sharpness),
        )
        step = run.batch + sum(samples / every for samples, every in passes if every)
        total += run.steps * step * known[kind]
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
