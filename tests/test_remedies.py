"""Remedies that refusals name, run as they stand; the numbers that come out are those of plain PyTorch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import landscape
from landscape import InputError, Problem
from landscape.problem.batches import Stream
from tests.dense import agrees, remedied

Site = tuple[str, int]  # a file of the package, and a line


@dataclass(frozen=True)
class Case:
    """What is refused: ``refuse(model, loss, data)``, a Problem of these by default.

    ``meant(model, data)``: the loss that the remedy takes, by the user's own module.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Any, Any]]
    meant: Callable[[nn.Module, Any], Tensor]
    refuse: Callable[[Any, Any, Any], Any] = Problem


CASES: list[Case] = []


def case(meant: Callable[[nn.Module, Any], Tensor], **options: Any) -> Callable[[Any], Any]:
    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES.append(Case(build.__name__, build, meant, **options))
        return build

    return add


def net(inputs: int = 5, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def inputs(samples: int = 40, features: int = 5) -> Tensor:
    return torch.randn(samples, features, dtype=torch.float64)


def classes(samples: int = 40) -> Tensor:
    return torch.arange(samples) % 3


def spread(o: Tensor, t: Tensor) -> Tensor:
    """A loss that mixes its samples."""
    return F.cross_entropy(o, t) + o.std(0).sum()


def contrast(o: Tensor, t: Tensor) -> Tensor:
    """One of many samples, an even number."""
    a, b = F.normalize(o, dim=1).chunk(2)
    return F.cross_entropy(a @ b.T, torch.arange(len(a)))


def by_batch(loss: Callable[..., Tensor], size: int) -> Callable[[nn.Module, Any], Tensor]:
    def meant(model: nn.Module, data: Any) -> Tensor:
        x, y = data.tensors if isinstance(data, TensorDataset) else data
        parts = zip(x.split(size), y.split(size), strict=True)
        return torch.stack([loss(model(a), b) for a, b in parts]).mean()

    return meant


@case(by_batch(spread, 64))
def a_data_set_of_a_loss_that_mixes() -> Any:
    return net(), spread, TensorDataset(inputs(150), classes(150))


class Pictures(Stream):
    """Samples that are fetched one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.tensors, self.samples = (x, y), len(x)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.tensors[0][indices], self.tensors[1][indices]

    def part(self, rows: slice) -> Stream:
        return Pictures(*(tensor[rows] for tensor in self.tensors))


@case(lambda model, data: by_batch(contrast, 64)(model, data.tensors))
def a_stream_of_a_loss_that_mixes() -> Any:
    return net(), contrast, Pictures(inputs(192), classes(192))


@case(by_batch(contrast, 1080))
def more_than_the_memory() -> Any:
    return net(), contrast, (inputs(4020), classes(4020))


@case(lambda model, data: groups(model(data[0]), data[1]))
def of_sixteen() -> Any:
    return net(), groups, (inputs(4000), inputs(4000, 1)[:, 0])


def groups(o: Tensor, t: Tensor) -> Tensor:
    means, wanted = o.reshape(-1, 16, o.shape[1]).mean(1), t.reshape(-1, 16).mean(1)
    return (means - wanted[:, None]).square().mean().sqrt()


@case(lambda model, data: F.cross_entropy(model(data[0]), data[1]))
def a_sum() -> Any:
    return net(), nn.CrossEntropyLoss(reduction="sum"), (inputs(), classes())


@case(
    lambda model, data: counted(model(data[0]), data[1]), refuse=lambda *a: Problem(*a, terms=lambda y: y + 1)
)
def terms_of_another_loss() -> Any:
    return net(), counted, (inputs(), classes())


def counted(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t, ignore_index=0)


@case(lambda model, data: torch.stack([spread(model(a), b) for a, b in drawn(data)]).mean())
def batches_that_are_shuffled() -> Any:
    return net(), spread, DataLoader(TensorDataset(inputs(), classes()), 10, shuffle=True)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that is drawn anew."""

    def __init__(self) -> None:
        self.x, self.y = inputs(70), classes(70)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(5), self.y[i]


def drawn(data: Any) -> list[Any]:
    """The batches that a remedy drew: each case is run with one seed."""
    torch.manual_seed(3)
    return list(DataLoader(data, 64) if isinstance(data, Dataset) else data)


def joined(model: nn.Module, data: Any) -> Tensor:
    x, y = (torch.cat(parts) for parts in zip(*drawn(data), strict=True))
    return F.cross_entropy(model(x), y)


@case(joined)
def augmentation() -> Any:
    return net(), F.cross_entropy, DataLoader(Noisy(), 16)


@case(joined)
def a_data_set_with_augmentation() -> Any:
    return net(), F.cross_entropy, Noisy()


@case(lambda model, data: F.cross_entropy(model(X), Y))
def an_iterator() -> Any:
    return net(), F.cross_entropy, iter([(X[:25], Y[:25]), (X[25:], Y[25:])])


X, Y = torch.linspace(-1, 1, 200, dtype=torch.float64).sin().reshape(40, 5), classes()


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h.index_add(0, edges[1], h[edges[0]]).tanh())
        return out


@case(lambda model, data: F.cross_entropy(model(*data[0]), data[1]))
def a_graph() -> Any:
    return Graph().double(), F.cross_entropy, ((inputs(), torch.randint(40, (2, 90))), classes())


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.net(x), 0.3)


def first_draw(model: nn.Module, data: Any) -> Tensor:
    torch.manual_seed(0)
    return F.cross_entropy(model(data[0]), data[1])


@case(first_draw)
def random_numbers() -> Any:
    return Dropping(), F.cross_entropy, (inputs(), classes())


@case(lambda model, data: F.cross_entropy(model(data[0]), data[1]))
def a_loss_of_each_sample() -> Any:
    return net(), nn.CrossEntropyLoss(reduction="none"), (inputs(), classes())


@case(lambda model, data: F.cross_entropy(model(data[0]), data[1]))
def a_loss_in_a_dict() -> Any:
    return net(), lambda o, t: {"loss": F.cross_entropy(o, t), "seen": len(t)}, (inputs(), classes())


@case(lambda model, data: F.cross_entropy(model(data[0]), data[1]))
def a_loss_in_a_tuple() -> Any:
    return net(), lambda o, t: (F.cross_entropy(o, t), len(t)), (inputs(), classes())


@case(lambda model, data: F.mse_loss(model(data[0])[:, 0], data[1]))
def outputs_that_broadcast() -> Any:
    return net(outputs=1), lambda o, t: (o - t).square().mean(), (inputs(), inputs(40, 1)[:, 0])


@case(
    lambda model, data: F.cross_entropy(model(data[0]), data[1]),
    refuse=lambda model, *_: landscape.trace(model),
)
def a_module_in_place_of_a_problem() -> Any:
    return net(), F.cross_entropy, (inputs(), classes())


def test_a_single_result_is_saved_as_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        save_one()
    eval(caught.value.remedy, {"result": result(), "path": tmp_path / "x.h5"})
    assert landscape.load(tmp_path / "x.h5").t.tolist() == [0, 1]


def result() -> landscape.Line:
    return landscape.line(plain(), weights=torch.zeros(2, 39).double(), points=2)


def save_one() -> None:
    landscape.save(result(), "x.h5")  # type: ignore[arg-type]


def contour_into_a_name() -> None:
    problem = plain()
    landscape.contour(problem, landscape.random_plane(problem), into="x.h5")  # type: ignore[arg-type]


def sites() -> Iterator[tuple[Site, int]]:
    """Where the package makes an InputError with a remedy, and the last line of that."""
    package = Path(landscape.__file__).parent
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            made = isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "InputError",
                "OperationError",
            )
            if made and len(node.args) + len(node.keywords) > 1:  # type: ignore[attr-defined]
                yield (str(file), node.lineno), node.end_lineno  # type: ignore[attr-defined]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    """The places where errors with a remedy were made."""
    found: list[Site] = []
    init = InputError.__init__

    def noted(self: InputError, message: str, remedy: str = "") -> None:
        frame = sys._getframe(1)
        if remedy:
            found.append((frame.f_code.co_filename, frame.f_lineno))
        init(self, message, remedy)

    monkeypatch.setattr(InputError, "__init__", noted)
    monkeypatch.setattr(
        "landscape.problem.mean_check.available_memory", lambda device: 2**25
    )  # less than pairs of 4,020 samples need, more than all others do
    return found


@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_remedy_gives_what_is_meant(case: Case, made: list[Site]) -> None:
    torch.manual_seed(0)
    model, loss, data = case.build()
    with pytest.raises(InputError) as caught:
        case.refuse(model, loss, data)
    error = caught.value
    assert "\n" not in str(error)
    assert str(error).endswith(f"; use {error.remedy}")
    torch.manual_seed(3)
    problem = remedied(error, model, loss, data)
    agrees(problem, model, lambda: case.meant(model, data))


@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")
def test_each_remedy_of_the_package_is_run(made: list[Site]) -> None:
    """A refusal with a remedy, anywhere in the package, needs a case above."""
    for case in CASES:
        torch.manual_seed(0)
        with pytest.raises(InputError):
            case.refuse(*case.build())
    with pytest.raises(InputError):
        save_one()
    with pytest.raises(InputError) as caught:
        contour_into_a_name()
    assert caught.value.remedy == "landscape.open('x.h5', 'a')"
    places = list(sites())
    assert len(places) >= 13
    missing = [
        f"{file}:{first}"
        for (file, first), last in places
        if not any(file == where and first <= line <= last for where, line in made)
    ]
    assert missing == []


def plain(**options: Any) -> Problem:
    torch.manual_seed(0)
    return Problem(net(), F.cross_entropy, (inputs(), classes()), **options)
