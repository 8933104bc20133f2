"""landscape import"""

from __future__ import annotations

from pathlib import Path

import click

from landscape.checkpoint import user_code
from landscape.checkpoint.foreign_weights import import_state as compute_import_state
from landscape.cli import common, options
from landscape.cli.analysis import open_problem
from landscape.cli.source import Source
from landscape.cli.source import source as source_options
from landscape.core.errors import FailedError, InputError
from landscape.core.files import printable
from landscape.problem.problem import Problem


@click.command(
    "import", epilog="Example: landscape import net.pt --model nets:resnet20 --data nets:cifar -o net.h5"
)
@click.argument("states", metavar="STATE…", nargs=-1, required=True)
@click.option("-o", "--output", metavar="OUT.h5", help="Checkpoint. [default: the first STATE's name, .h5]")
@source_options
@options.quiet
def import_state(states: tuple[str, ...], output: str | None, source: Source, quiet: bool) -> None:
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
    """
    if source.model is None:
        raise InputError("--model: missing; give MODULE:NAME, called to make the model, or a built-in name")
    path = Path(output) if output else Path(states[0]).with_suffix(".h5")
    if path.suffix != ".h5":
        raise InputError(f"-o: '{path}' is not allowed, a checkpoint's name must end in .h5")
    if path.exists():
        raise FailedError(f"-o: {path} exists already, it is not overwritten; give another name")
    checkpoint = compute_import_state(
        states,
        source.build_model(),
        name=source.model.name,
        options=source.model.options,
        message=lambda line: common.message(line, quiet),
    )
    checkpoint.path = path
    if source.data:
        data, sizes = source.user_data, {"train": 0, "test": 0}
        for split in sizes:
            if isinstance(data, user_code.UserData) and split not in data.splits:
                continue
            problem = open_problem(checkpoint, split, source, "cpu")
            sizes[split] = problem.samples
            common.message(describe(split, problem), quiet)
        mark = data.fingerprint if data else ""
        checkpoint.data = {
            "name": source.data.name,
            "options": source.data.options,
            **sizes,
            "fingerprint": mark,
        }
    common.make_folder(path.parent)
    checkpoint.save(path)
    click.echo(printable(path))


def describe(split: str, problem: Problem) -> str:
    """One line with loss and accuracy of the imported weights, so that a user sees whether they are right."""
    loss, accuracy = problem.evaluate()
    right = "" if accuracy != accuracy else f", accuracy {100 * accuracy:.2f}%"
    return f"{split}: loss {loss:.6g}{right} ({problem.samples:,} samples)"
