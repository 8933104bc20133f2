"""The curvature along minibatch gradients on average, along a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from landscape.core import registry, statistics
from landscape.gradients.minibatches import Minibatches
from landscape.train.instruments.base import Instrument, Moment, Setting, on_all


@registry.instruments.add("noise-alignment")
class NoiseAlignment(Instrument):
    """tr(HS)/tr S at w_a, S the second moment of minibatch gradients: the interaction-aware sharpness.

    From ``monitor.draws`` fresh minibatches of the total batch, H on the sample of ``monitor.samples``; see
    :func:`landscape.noise_alignment`. A draw takes a gradient over its minibatch and a product over the
    sample.
    """

    name = "noise-alignment"
    columns: ClassVar[Mapping[str, str]] = {"noise_alignment": "nat", "noise_alignment_se": "nat"}

    def __init__(self, run: Setting) -> None:
        super().__init__(run)
        self.needs_batch()
        self._sample = run.sample

    def measure(self, now: Moment) -> dict[str, float]:
        comm, draws = self.run.comm, self.run.monitor.draws
        along, turns = self._sample.curvature(now.mean), range(draws)[comm.share(draws)]
        minibatches = Minibatches(self.run.problem, self.run.batch, self.generator(now))
        rows = np.zeros((draws, 2))
        for k, (drawn,) in zip(range(draws), minibatches, strict=False):
            gradient = on_all(comm, drawn.gradient(now.mean) if k in turns else None, now.mean)
            rows[k] = along(gradient), float(gradient.double().square().sum())
        value, error = statistics.ratio(rows[:, 0], rows[:, 1])
        return {"noise_alignment": value, "noise_alignment_se": error}
