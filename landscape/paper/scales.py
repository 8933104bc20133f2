"""What the figures run at each scale, and how long it takes: MNIST's runs, and cells of DPSGD-2020's tables.

Scale ``paper`` is the paper's setting; ``laptop`` what two cores do in half an hour a figure, on real data;
``smoke`` some steps on the bundled digits, which only show that a figure can be made. All that is changed is
ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from landscape.core.memory import pick_device
from landscape.paper.context import Axes, Context, Runs, Scale, digest, runs_of
from landscape.problem.batches import Stream
from landscape.training.planning.calibration import calibrate
from landscape.training.recipes import recipe
from landscape.training.recipes.recipe import Recipe

# Of CIFAR-10, at laptop scale: images to train on, passes over them, and how many times smaller the batches
# are, so that the largest (8192) leaves 10 steps a pass. Rates are those of the paper's batch.
SUBSET, EPOCHS, SHRINK = 5_000, 12, 16
# Learners at laptop scale: batches shrink, so that with the paper's 16 a learner's own batch would be a
# sixteenth of the paper's, and its noise at the same rate four times as large in every direction.
LEARNERS = 4
# Width of the networks at laptop scale: about a minute a run on one core, save DenseNet-121.
WIDTHS = {"efficientnet-b0": 0.125, "vgg-19": 0.125, "mobilenet": 0.125, "shufflenet-v2": 0.125}
WIDTH, SMOKE_WIDTH = 0.0625, 0.0625
SPEECH_NOTE = "spoken digits for Switchboard, batches / 16, LSTM of 2 layers × 64 cells, 16 learners"
PAPER_CIFAR = "16 learners, as the paper gives them"
PAPER_SPEECH = "spoken digits for Switchboard, batches / 16; else the paper's LSTM and schedule"
MNIST_NOTE = "the paper's size; steps, ReLU and initialisation are ours"
OURS = "only the abstract is at hand: all settings are ours"

# Samples of a learner in the steps that are timed, which take time as proportional to samples; a step of the
# fewer ones that takes longer than so many seconds is enough (ours).
TIMED_SAMPLES, BUSY_SECONDS = (16, 512), 0.02
# A measurement of λ_max along a run takes as long as so many gradients of its samples (ours; Figure 2(b)).
SHARPNESS_PASSES = 30


def cifar_note(epochs: int = EPOCHS) -> str:
    """What laptop scale changes of the CIFAR-10 cells."""
    return (
        f"{SUBSET:,} of CIFAR-10's images and 1,000 to test, {epochs} epochs, batches / {SHRINK} at the "
        f"paper's rates, networks of 1/8 or 1/16 the width, {LEARNERS} learners"
    )


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


def cell(scale: Scale, name: str, seed: int = 0, *settings: str, epochs: int = EPOCHS) -> Recipe:
    """The cell ``name`` of the tables, such as cifar10/resnet-18-b8192-dpsgd, at ``scale``.

    ``epochs``: those of a CIFAR-10 cell at laptop scale.
    """
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
        batch = base.batch // SHRINK
        steps = round(epochs * SUBSET / batch)
        changes = [
            f"learners={min(base.learners, LEARNERS)}", f"epochs={epochs}", f"data.subset={SUBSET}",
            f"batch={batch}", f"model.width={WIDTHS.get(model, WIDTH)}",
            f"schedule.base_batch={base.schedule.base_batch // SHRINK}",
            "evaluate.bn_samples=1000", f"evaluate.every={-(-steps // epochs)}",
        ]  # fmt: skip
    elif not speech:  # a checkpoint after the paper's 16th epoch, for Figure 4
        changes = [f"checkpoint.every={-(-base.steps // 20)}"]
    return recipe.read(name, [*changes, *settings, f"seed={seed}"])


def cells(scale: Scale, names: Iterable[str], many: int = 1, epochs: int = EPOCHS) -> Runs:
    """Cells of the tables by "NAME/SEED", with ``many`` seeds; one at smoke scale."""
    seeds = range(1 if scale == "smoke" else many)
    return runs_of(
        "{name}", {"name": names}, seeds, lambda name, seed: cell(scale, name, seed, epochs=epochs)
    )


def seconds_of(context: Context, runs: Iterable[Recipe]) -> float:
    """Seconds that ``runs`` take here, one after another, from a short measurement of each kind.

    Includes steps, evaluations, decompositions and λ_max (as passes over their samples), but no checkpoints
    and no instruments.
    """
    total, known = 0.0, dict[str, float]()
    for run in runs:
        most = min(max(TIMED_SAMPLES), run.local_batch)
        kind = digest(run.model, run.data, run.precision, run.dtype, most)
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
