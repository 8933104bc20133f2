"""Which labels each learner trains on."""

from __future__ import annotations

from typing import Unpack

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.analysis import analysis
from landscape.core.errors import OperationError
from landscape.core.options import expect
from landscape.data.parts import IID, NAMES
from landscape.results.base import Provenance
from landscape.results.training import LabelCounts


@analysis(group="Measure noise and learners", of_the_run=None)
def label_counts(run: Checkpoint, **about: Unpack[Provenance]) -> LabelCounts:
    """Count the training samples of each label that each learner of a run has.

    Args:
        run: a checkpoint of ``landscape train`` with the recipe's key ``data.split``.
        about: ``split``, ``label``, ``source`` and ``source_sha256``, kept with the result; by default those
            of the run.

    Returns:
        The counts (n, K), which the checkpoint recorded: no data is read.

    Raises:
        OperationError: for a run whose learners all draw from the whole training set.

    Example:
        >>> import landscape
        >>> from landscape.training.run.loop import Trainer
        >>> divided = landscape.Recipe.read("digits-dpsgd", steps=0, **{"data.split": "labels(4)"})
        >>> counts = label_counts(Trainer(divided).run())
        >>> counts.counts.shape, int((counts.counts[0] > 0).sum())
        ((5, 10), 4)
    """
    expect("run", run, Checkpoint)
    if not {*NAMES} <= {*run.shared}:
        raise OperationError(
            f"{run.path or 'run'}: its learners have no parts of their own, all draw from the whole training "
            "set; the recipe's key data.split divides it"
        )
    _, counts, classes = (run.shared[name].cpu().numpy() for name in NAMES)
    division = str(run.settings.get("data", {}).get("split", IID))
    return LabelCounts(counts.astype(float), classes.astype(float), division, **about | {"split": "train"})
