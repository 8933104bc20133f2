"""What the callbacks share, and what is said where a trainer's package is missing; no package is needed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import landscape
from landscape.core.errors import InputError
from landscape.integrations import Recorded, batch_size, in_order, problem_data, shallow_copy
from landscape.problem.ranks import is_sharded

X, Y = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2


def session(folder: Path, test: Any = None, **settings: Any) -> Recorded:
    return Recorded(folder, F.cross_entropy, test=test, **settings)


def begin(made: Recorded, model: nn.Module, resume: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made._begin(model, (X, Y), made._test, optimizer, batch=4, resume=resume)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, made: Recorded) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    made._before()
    optimizer.step()
    made._after()


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("lightning", "lightning.pytorch", "lightning"), ("huggingface", "transformers", "huggingface")],
)
def test_a_missing_package_is_one_line_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, extra: str
) -> None:
    for name in (package, "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"landscape.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'sgd-landscape\[{extra}\]'") as error:
        importlib.import_module(f"landscape.integrations.{module}")
    assert "\n" not in str(error.value)


def test_a_module_that_knows_of_meshes_is_not_sharded_for_that() -> None:
    class Module(nn.Linear):  # as Lightning's modules are
        device_mesh = None

    assert not is_sharded(Module(3, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"evry": 5}, "evry.*every"), ({"samples": "all"}, "samples: 'all'"), ({"contour": True}, "contour")],
)
def test_options_are_checked_before_the_training(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        session(tmp_path, **options)
    assert "\n" not in str(error.value)


def test_a_session_records_and_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    made = session(tmp_path, test=(X[:4], Y[:4]), every=2)
    optimizer = begin(made, model)
    for _ in range(5):
        step(model, optimizer, made)
    made._end()
    optimizer = begin(made, model, resume=made._steps)
    step(model, optimizer, made)
    made._end()
    run = landscape.load(tmp_path / "last.h5")
    assert run.history["step"].tolist() == [0, 2, 4, 5, 6]
    assert run.local_batch == 4
    assert run.model["name"] == "torch.nn.modules.linear:Linear"


def test_a_step_without_an_end_counts_and_one_that_fails_is_not_written(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    made = session(tmp_path, every=1)
    optimizer = begin(made, model)
    made._before()  # skipped by a GradScaler
    step(model, optimizer, made)
    assert made._steps == 2
    made._before()
    with torch.no_grad():
        model.weight.fill_(7.0)
    made._abort()
    made._end()
    run = landscape.load(tmp_path / "step-0000000.h5")
    assert run.step == 0
    assert not (tmp_path / "step-0000003.h5").exists()
    assert landscape.load(tmp_path / "last.h5").step == 0


def test_the_data_of_a_loader_is_read_in_order(tmp_path: Path) -> None:
    data = TensorDataset(X, Y)
    shuffled = DataLoader(data, 4, shuffle=True, drop_last=True)
    batches = list(problem_data("data", None, shuffled, whole=False))
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in batches]), X)
    whole = problem_data("data", None, shuffled, whole=True)
    assert torch.equal(whole[0], X)
    assert torch.equal(whole[1], Y)
    assert batch_size(shuffled) == 4
    assert [len(x) for x, _ in problem_data("test", data, shuffled, whole=False)] == [4, 4, 2]
    assert problem_data("data", (X, Y), shuffled, whole=False) == (X, Y)
    before = torch.get_rng_state()
    list(problem_data("data", None, shuffled, whole=False))
    assert torch.equal(torch.get_rng_state(), before)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(("loader", "words"), [
    ({"a": DataLoader(TensorDataset(X, Y))}, "data: .*dict"),
    (DataLoader(Endless(), 2), "data: a Endless has no length"),
    (DataLoader(TensorDataset(X, Y), 2, sampler=WeightedRandomSampler([1.0] * 10, 10)), "data: a WeightedRandom"),
], ids=["several", "endless", "weighted"])  # fmt: skip
def test_loaders_whose_loss_is_not_known_are_refused(loader: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        problem_data("data", None, loader, whole=False)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="no samples can be drawn"):
        in_order("data", DataLoader(TensorDataset(X, Y), None), whole=True)


def test_a_shallow_copy_shares_parameters_and_nothing_else() -> None:
    model = nn.Linear(3, 2)
    model.forward = type(model).forward.__get__(model)  # type: ignore[method-assign]
    own = shallow_copy(model)
    assert own.weight is model.weight
    assert own.forward.__self__ is own  # type: ignore[attr-defined]
    model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    assert "extra" in dict(own.named_parameters())
