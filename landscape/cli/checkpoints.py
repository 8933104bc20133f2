"""landscape import, and what landscape info says of a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint
from landscape.checkpoint.history import latest
from landscape.checkpoint.state_files import files_of, place
from landscape.cli import common, run_summary
from landscape.cli.analysis import SOURCE, Source, imported
from landscape.cli.options import SHARED, command
from landscape.cli.output import values
from landscape.core.errors import OperationError
from landscape.core.options import SPLITS, ends_in
from landscape.training.recipes.recipe import recipe_of


@command(
    "import",
    states=SHARED["files"] | {"metavar": "STATE…"},
    output={"help": "Checkpoint. [default: the first STATE's name, .h5]"},
    source=SOURCE,
)
def import_state(states: tuple[str, ...], output: str | None, source: Source) -> None:
    """Import weights of other programs as a checkpoint.

    A STATE is a .pt, .pth, .bin, .ckpt or .safetensors file, the index of its parts (.index.json), or a
    folder of save_pretrained.

    Several STATEs of one model become its learners. Only weights are read, never code: a file with anything
    else than weights is refused. With --data, loss and accuracy on each split are printed.

    MODULE:NAME is found in the current folder or among the installed packages, and called with the options
    in brackets, if any: nets:resnet(depth=20). A model must be an nn.Module. Data is a dict of splits such as
    {"train": …, "test": …, "loss": …}, an object with such attributes, or one split for both; a split is
    (x, y), one dict of tensors, or batches of these. Checkpoints name such code but never run it: name it
    again at each analysis:

    \b
      landscape contour net.h5 --model nets:resnet20 --data nets:cifar

    Example:
        landscape import net.pt --model nets:resnet20 --data nets:cifar -o net.h5
    """
    given, data = [Path(state) for state in states], source.data_spec
    for state in given:
        files_of(state)
    path = Path(output) if output else place(given[0]).with_suffix(".h5")
    ends_in("-o", path, [".h5"])
    if path.exists():
        raise OperationError(f"-o: {path} exists already, it is not overwritten; give another name")
    checkpoint = imported(given, source)
    checkpoint.path = path
    if data:
        checkpoint.data = _evaluated(checkpoint, source, data)
    common.make_folder(path.parent)
    checkpoint.save(path)
    common.files(path)


def _evaluated(checkpoint: Checkpoint, source: Source, spec: user_code.Spec) -> dict[str, Any]:
    """The entry of the data in the checkpoint; loss and accuracy on each split are printed."""
    data, sizes = source.user_data, dict.fromkeys(SPLITS, 0)
    splits = [name for name in sizes if not isinstance(data, user_code.UserData) or name in data.splits]
    found: dict[str, dict[str, float]] = {}
    with common.progress_bar("evaluation") as bar:
        for k, split in enumerate(splits):
            problem = source.of(checkpoint, "cpu", split).problem()
            loss, accuracy = problem.evaluate()
            sizes[split] = problem.samples
            found[split] = {"loss": loss, "accuracy": accuracy, "samples": problem.samples}
            bar((k + 1) / len(splits))
    for split, of in found.items():  # so that a user sees whether the weights are right
        right = "" if math.isnan(of["accuracy"]) else f", accuracy {100 * of['accuracy']:.2f}%"
        common.values(f"{split}: loss {of['loss']:.6g}{right} ({of['samples']:,} samples)")
    common.values("", splits=found)
    mark = data.fingerprint if data else ""
    return {"name": spec.name, "options": spec.options, **sizes, "fingerprint": mark}


MOST = 8  # tensors of the optimizer's state that are listed (ours)


def _contents(c: Checkpoint) -> dict[str, Any]:
    """The contents of a checkpoint for --json."""
    history = {
        name: {"rows": int(np.isfinite(column).sum()), "last": latest(c.history, name)}
        for name, column in c.history.items()
    }
    finite = bool(np.isfinite(c.weights.numpy()).all())
    same = ("learners", "model", "data", "algorithm", "seed", "step", "epoch", "diverged_at", "recipe")
    found = {"parameters": c.layout.size, "finite": finite, "history": history}
    return {**{name: getattr(c, name) for name in same}, **found}


def _rule(c: Checkpoint) -> str:
    """The update rule in its own words, such as its mixing; a matrix file may be gone by now."""
    try:
        return recipe_of(c).describe()
    except OperationError as error:
        return str(error)


def show(c: Checkpoint) -> None:
    """Print what a checkpoint contains, for ``landscape info``."""
    contents = _contents(c)
    values("", checkpoint=contents)
    n, size = c.weights.shape
    finite = "finite" if contents["finite"] else "NOT FINITE"
    values(f"weights: {n} learners × {size:,} {c.weights.numpy().dtype}, {finite}")
    values(f"model: {c.model['name']} {c.model['options']}")
    if c.buffers:
        names = list(c.buffers)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        values(f"buffers and frozen parameters: {', '.join(names[:4])}{more}")
        if c.mean_buffers:
            values("BatchNorm statistics of the mean: re-estimated at its weights")
    mark = f", fingerprint {c.data['fingerprint'][:12]}…" if c.data["fingerprint"] else ""
    sizes = f"{c.data['train']:,} train, {c.data['test']:,} test{mark}"
    if c.data["name"]:
        values(f"data: {c.data['name']} {c.data['options']}, {sizes}")
    else:
        values(f"data: the loop's own, {sizes}" if c.data["train"] else "data: not known")
    if c.algorithm == IMPORTED:
        values(f"imported from:\n{c.recipe}".rstrip("\n"))
        return
    epoch = f" (epoch {c.epoch:.3g})" if math.isfinite(c.epoch) else ""
    values(f"algorithm: {c.algorithm}, seed {c.seed}, step {c.step:,}{epoch}")
    if c.has_recipe and (about := _rule(c)):
        values(about)
    for name, state in [*c.optimizer.items()][:MOST]:
        values(f"optimizer state: {name} {tuple(state.shape)}")
    if len(c.optimizer) > MOST:
        values(f"optimizer state: {len(c.optimizer) - MOST} more tensors")
    for name, state in {**c.rule, **c.shared}.items():
        values(f"state: {name} {tuple(state.shape)}")
    if c.has_recipe:
        values(run_summary.closing(c))
    for name, column in c.history.items():
        recorded = column[np.isfinite(column)]
        last = f"last {recorded[-1]:.6g}" if len(recorded) else "never recorded"
        values(f"  {name}: {len(recorded)} of {len(column)} rows, {last}")
    title = "recipe:" if c.has_recipe else "recorded:"
    values("\n".join([title, *(f"  {line}" for line in c.recipe.splitlines())]))
