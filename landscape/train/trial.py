"""A short trial of whether learners whose network is no chain are faster in a loop or batched.

Its result is stored with the cached data, so that the same run on the same machine gives the same bits again,
and in the run's checkpoints, so that a resumed run gives the bits of one that never stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.data.cache import cached
from landscape.evaluation.stack import Stack, Training
from landscape.problem.batches import named_tensors
from landscape.train.distributed.comm import Comm

STATE = "stack.batched"


class Trial:
    """The choice for ``stack``; ``state`` is its form in checkpoints, empty before the first step."""

    def __init__(self, stack: Stack, comm: Comm) -> None:
        self._stack, self._comm = stack, comm
        self.state: dict[str, Tensor] = {}

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """The choice of a checkpoint; one written before there was any, or by more processes, has none."""
        if STATE in shared:
            self.state = {STATE: shared[STATE]}
            self._stack.batched = bool(shared[STATE])

    def decide(self, weights: Tensor, x: Any, y: Any, training: Training, model: dict[str, Any]) -> None:
        """Choose, unless that is done, by a trial with these arguments of :meth:`Stack.gradients`.

        Rank 0 decides for all. There is nothing to choose for a chain, or where a process has one learner.
        """
        stack, comm = self._stack, self._comm
        if self.state or stack.steps is not None or comm.learners == comm.size:
            return
        pays = 0.0
        if comm.rank == 0:
            shapes = [
                [list(t.shape), str(t.dtype)] for tree in (weights, x, y) for _, t in named_tensors(tree)
            ]
            place = (
                torch.cuda.get_device_name(weights.device) if weights.is_cuda else f"{os.cpu_count()} cores"
            )
            what = [model, shapes, stack.accumulate, stack.precision, place, torch.get_num_threads()]

            def trial() -> dict[str, np.ndarray[Any, Any]]:
                return {"batched": np.array([stack.batching_pays(weights, x, y, training)])}

            result = cached("trial", Path(), [], json.dumps([*what, str(torch.__version__)]), trial)
            pays = float(result["batched"][0])
        stack.batched = bool(comm.total(pays)[0])
        self.state = {STATE: torch.tensor([stack.batched], dtype=torch.uint8)}
