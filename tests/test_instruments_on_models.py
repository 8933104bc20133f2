"""All instruments on data that is read in parts, and with BatchNorm after DPSGD by hand."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import landscape
from landscape import Problem
from landscape.analysis.learning_coefficient import Langevin
from landscape.gradients.minibatches import draws, stream
from landscape.problem.batches import take
from tests import problems


class Fresh:
    """The batches of a loader in memory of their own; ``most`` is how many were alive at one time."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.most = loader, 0
        self._alive: list[weakref.ref[Any]] = []

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for batch in self.loader:
            # A tensor of it keeps it alive.
            arrays = {key: rows.numpy().copy() for key, rows in batch.items()}
            self._alive = [each for each in self._alive if each() is not None]
            self._alive.append(weakref.ref(arrays["input_ids"]))
            self.most = max(self.most, len(self._alive))
            yield arrays


def chains(problem: Problem) -> Any:
    return Langevin(problem, 4, 2, step_size=1e-3, nbeta=2.0, localization=1.0, seed=3).run(5)


# Of each way through the data one: the conformance suite has every analysis on batches.
INSTRUMENTS: dict[str, Callable[[Problem], Any]] = {
    "batch sharpness": lambda p: (
        landscape.batch_sharpness(
            p, 4, weights=problems.around(p, 3, 0.03), local_batch=3, max_draws=16
        ).learner_curvature
    ),
    "noise scale": lambda p: landscape.noise_scale(p, 4, max_draws=16).value,
    "worst": lambda p: landscape.sharpness(p, 0.05, steps=3).value,
    "average, m": lambda p: landscape.sharpness(p, 0.05, "average", m=4, min_draws=3, max_draws=3).values,
    "disagreement": lambda p: landscape.disagreement(p, problems.around(p, 3, 0.03), 2).cost,
    "chains": chains,
}


@functools.cache
def in_memory(name: str) -> Any:
    return INSTRUMENTS[name](problems.language_model())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["loader", "streamed"])
def test_data_in_parts_give_the_numbers_of_all_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dict batches of unequal weight; a loader has no numbered samples, a stream fetches each by its own."""
    expected = {name: in_memory(name) for name in INSTRUMENTS}
    whole, data = problems.language_model(), problems.tokens()
    if form == "streamed":
        monkeypatch.setattr("landscape.problem.data.fits", lambda size, device: False)
    fresh = Fresh(DataLoader([take(data, i) for i in range(11)], batch_size=2))  # type: ignore[arg-type]
    parts = Problem(whole.model, None, fresh if form == "loader" else data, dtype=torch.float64)
    assert parts.resident is None
    assert parts.indexed == (form == "streamed")
    for name, measure in INSTRUMENTS.items():
        fresh.most = 0
        np.testing.assert_allclose(measure(parts), expected[name], rtol=1e-5, atol=1e-12, err_msg=name)
        if name in ("worst", "average, m", "chains"):  # products keep graphs within their budget
            assert fresh.most <= 3, f"{name} keeps {fresh.most} of 6 batches in memory"


def test_passes_hold_a_bounded_part_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer draws a pass where samples are large, and the same numbers."""
    reads = []

    class Counted(list[Any]):
        def __iter__(self) -> Any:
            reads.append(1)
            return super().__iter__()

    x = torch.arange(20.0, dtype=torch.float64)[:, None]
    problem = Problem(nn.Linear(1, 1).double(), nn.MSELoss(), Counted([(x[:12], x[:12]), (x[12:], x[12:])]))

    def drawn(bound: int) -> tuple[Tensor, int]:
        monkeypatch.setattr("landscape.gradients.minibatches.PASS_BYTES", bound)
        reads.clear()
        found = itertools.islice(draws(problem.data, 2, 3, stream(0, 0)), 32)
        return torch.stack([inputs for inputs, _ in found]), len(reads)

    (many, few_passes), (same, more_passes) = drawn(2**20), drawn(4 * 2 * 3 * 16)
    assert torch.equal(many, same)
    assert more_passes - few_passes >= 32 // 4 - 32 // 16  # of 4 draws each, in place of 16
