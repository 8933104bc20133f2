"""landscape import"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.foreign_weights import import_state as compute_import_state
from landscape.cli import common
from landscape.cli.analysis import SOURCE, Source, open_problem
from landscape.cli.options import SHARED, command
from landscape.core.errors import FailedError, InputError
from landscape.data.base import SPLITS


@command(
    "import",
    states=SHARED["files"] | {"metavar": "STATE…"},
    output={"help": "Checkpoint. [default: the first STATE's name, .h5]"},
    source=SOURCE,
)
def import_state(states: tuple[str, ...], output: str | None, source: Source) -> None:
    """Weights from STATE (.pt, .pth, .bin, .ckpt or .safetensors) as a checkpoint.

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
    model, data = source.model_spec, source.data_spec
    if model is None:
        raise InputError("--model: missing; give MODULE:NAME, called to make the model, or a built-in name")
    path = Path(output) if output else Path(states[0]).with_suffix(".h5")
    if path.suffix != ".h5":
        raise InputError(f"-o: '{path}' is not allowed, a checkpoint's name must end in .h5")
    if path.exists():
        raise FailedError(f"-o: {path} exists already, it is not overwritten; give another name")
    checkpoint = compute_import_state(
        states,
        source.build_model(),
        name=model.name,
        options=model.options,
        message=common.message,
    )
    checkpoint.path = path
    if data:
        checkpoint.data = _evaluated(checkpoint, source, data)
    common.make_folder(path.parent)
    checkpoint.save(path)
    common.files(path)


def _evaluated(checkpoint: Checkpoint, source: Source, spec: user_code.Spec) -> dict[str, Any]:
    """What the checkpoint keeps of the data; loss and accuracy on each split are printed."""
    data, sizes = source.user_data, dict.fromkeys(SPLITS, 0)
    held = [name for name in sizes if not isinstance(data, user_code.UserData) or name in data.splits]
    found: dict[str, tuple[float, float, int]] = {}
    with common.progress_bar("evaluation") as bar:
        for k, split in enumerate(held):
            problem = open_problem(checkpoint, split, source, "cpu")
            sizes[split] = problem.samples
            found[split] = (*problem.evaluate(), problem.samples)
            bar((k + 1) / len(held))
    for split, numbers in found.items():
        common.values(describe(split, *numbers))
    names = ("loss", "accuracy", "samples")
    common.values("", splits={split: dict(zip(names, each, strict=True)) for split, each in found.items()})
    mark = data.fingerprint if data else ""
    return {"name": spec.name, "options": spec.options, **sizes, "fingerprint": mark}


def describe(split: str, loss: float, accuracy: float, samples: int) -> str:
    """One line with loss and accuracy of the imported weights, so that a user sees whether they are right."""
    right = "" if accuracy != accuracy else f", accuracy {100 * accuracy:.2f}%"
    return f"{split}: loss {loss:.6g}{right} ({samples:,} samples)"
