"""Each combination of the battery is right, or refused with a message that names the cause and the remedy."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from tests.battery import (
    cases_activations,
    cases_data,
    cases_layers,
    cases_losses,
    cases_models,
    cases_sequences,
    cases_structures,
)
from tests.battery.case import Case, chain, classifier
from tests.battery.checks import run

THEMES = (
    cases_activations, cases_layers, cases_sequences, cases_models, cases_structures, cases_losses, cases_data,
)  # fmt: skip
CASES: list[Case] = [case for theme in THEMES for case in theme.CASES]


# Every so manieth case has its Hessian's ends in the fast part, too, and every so manieth all quantities.
ENDS, SHARE = 4, 16


def _check(case: Case, **how: bool) -> None:
    found = run(case, **how)
    assert not found.wrong, f"{case.name}:\n" + "\n".join(found.wrong)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: CASES[i].name)
def test_right_or_refused(number: int) -> None:
    _check(CASES[number], thorough=number % SHARE == 0, ends=number % ENDS == 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: CASES[i].name)
def test_all_quantities_are_right_or_refused(number: int) -> None:
    _check(CASES[number])


def test_a_distributed_wrapper_is_taken_off() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = lambda: nn.parallel.DistributedDataParallel(chain())  # noqa: E731
        _check(classifier("DistributedDataParallel", wrapped, plain=lambda m: m.module))
    finally:
        dist.destroy_process_group()


def test_there_are_at_least_120_combinations_of_different_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 120
