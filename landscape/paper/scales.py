"""What the figures run at each scale: MNIST's runs, and cells of DPSGD-2020's tables, made smaller.

Scale ``paper`` is the paper's setting; ``laptop`` what two cores do in half an hour a figure, on real data;
``smoke`` some steps on the bundled digits, which only show that a figure can be made. All that is changed is
ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from landscape.paper.context import Runs, Scale
from landscape.train import recipe
from landscape.train import table_recipes as recipes
from landscape.train.recipe import Recipe

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


def cifar_note(epochs: int = EPOCHS) -> str:
    """What laptop scale changes of the CIFAR-10 cells."""
    return (
        f"{SUBSET:,} of CIFAR-10's images and 1,000 to test, {epochs} epochs, batches / {SHRINK} at the "
        f"paper's rates, networks of 1/8 or 1/16 the width, {LEARNERS} learners"
    )


def seeds(scale: Scale, laptop: int) -> range:
    """0, 1, …: two at smoke scale, else as many as ``laptop`` has."""
    return range(2 if scale == "smoke" else laptop)


def mnist(scale: Scale, name: str, seed: int, *settings: str, steps: int = 0) -> Recipe:
    """The built-in recipe mnist-NAME, with ``steps`` steps if given; smoke scale takes a fiftieth."""
    full = recipe.read(f"mnist-{name}", [*settings, f"seed={seed}"])
    steps = steps or full.steps
    changes = [f"steps={steps}", f"checkpoint.every={min(500, steps // 10)}"]
    if scale == "smoke":
        steps = max(20, steps // 50)
        changes = [
            f"steps={steps}", "evaluate.every=10", "checkpoint.every=10",
            f"batch={min(full.batch, 60 * full.learners)}",
            "model={name='mlp', widths=[64, 50, 50, 10]}", "data={name='digits'}", "monitor.samples=200",
        ]  # fmt: skip
        if full.decompose.every:
            changes.append("decompose.every=5")
        if full.monitor.sharpness:
            changes.append("monitor.sharpness=10")
        if full.monitor.instruments:
            changes += ["monitor.every=10", "monitor.draws=2"]
    # The settings of a run apply, except for its size.
    rest = [
        s
        for s in settings
        if scale != "smoke" or not s.startswith(("decompose.e", "monitor.sh", "monitor.e", "monitor.d"))
    ]
    return recipe.read(f"mnist-{name}", [*rest, *changes, f"seed={seed}"])


def cell(scale: Scale, name: str, seed: int = 0, *settings: str, epochs: int = EPOCHS) -> Recipe:
    """The cell ``name`` of the tables, such as cifar10/resnet-18-b8192-dpsgd, at ``scale``.

    ``epochs``: those of a CIFAR-10 cell at laptop scale.
    """
    base = recipes.read(name)
    speech = name.startswith("speech/")
    changes: list[str] = []
    if scale == "smoke":
        changes = [
            "data={name='digits', form='frames'}" if speech else "data={name='digits', form='image'}",
            f"learners={min(2, base.learners)}", "batch=16", "steps=4", "evaluate.every=2",
            "checkpoint.every=1", "evaluate.bn_samples=64", "schedule.base_batch=0", "lr=0.05",
        ]  # fmt: skip
        small = "inputs=8, layers=1, cells=8, bottleneck=8, classes=10"
        model = base.model["name"]
        changes.append(f"model={{name='{model}', {small if speech else f'width={SMOKE_WIDTH}'}}}")
    elif speech and scale != "paper":
        changes = ["model.layers=2", "model.cells=64", "model.bottleneck=64"]
    elif scale == "laptop":
        batch = base.batch // SHRINK
        steps = round(epochs * SUBSET / batch)
        changes = [
            f"learners={min(base.learners, LEARNERS)}", f"epochs={epochs}", f"data.subset={SUBSET}",
            f"batch={batch}",
            f"model.width={WIDTHS.get(base.model['name'], WIDTH)}",
            f"schedule.base_batch={base.schedule.base_batch // SHRINK}",
            "evaluate.bn_samples=1000", f"evaluate.every={-(-steps // epochs)}",
        ]  # fmt: skip
    elif not speech:  # a checkpoint after the paper's 16th epoch, for Figure 4
        changes = [f"checkpoint.every={-(-base.steps // 20)}"]
    return recipes.read(name, [*changes, *settings, f"seed={seed}"])


def cells(scale: Scale, names: Sequence[str], many: int = 1, epochs: int = EPOCHS) -> Runs:
    """Cells of the tables by "NAME/SEED", with ``many`` seeds; one at smoke scale."""
    return {
        f"{name}/{seed}": cell(scale, name, seed, epochs=epochs)
        for name in names
        for seed in range(1 if scale == "smoke" else many)
    }
