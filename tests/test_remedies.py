"""Remedies that refusals name, run as they stand; the numbers that come out are those of plain PyTorch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
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
from tests.battery.case import module
from tests.battery.case import net as network
from tests.dense import agrees, remedied
from tests.nets import Augmented

Site = tuple[str, int]  # a file of the package, and a line


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


class Pictures(Stream):
    """Samples that are fetched one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.tensors, self.samples = (x, y), len(x)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.tensors[0][indices], self.tensors[1][indices]

    def part(self, rows: slice) -> Stream:
        return Pictures(*(tensor[rows] for tensor in self.tensors))


def groups(o: Tensor, t: Tensor) -> Tensor:
    means, wanted = o.reshape(-1, 16, o.shape[1]).mean(1), t.reshape(-1, 16).mean(1)
    return (means - wanted[:, None]).square().mean().sqrt()


def counted(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t, ignore_index=0)


def noisy() -> Augmented:
    return Augmented(inputs(70), classes(70))


def drawn(data: Any) -> list[Any]:
    """The batches that a remedy drew: each case is run with one seed."""
    torch.manual_seed(3)
    return list(DataLoader(data, 64) if isinstance(data, Dataset) else data)


def joined(model: nn.Module, data: Any) -> Tensor:
    x, y = (torch.cat(parts) for parts in zip(*drawn(data), strict=True))
    return F.cross_entropy(model(x), y)


def graph() -> nn.Module:
    @module(a=nn.Linear(5, 4), b=nn.Linear(4, 3))
    def forward(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(h.index_add(0, edges[1], h[edges[0]]).tanh())

    return forward.double()


def dropping() -> nn.Module:
    return network(lambda m, x: F.dropout(m.net(x), 0.3), net=net())


def first_draw(model: nn.Module, data: Any) -> Tensor:
    torch.manual_seed(0)
    return entropy(model, data)


def entropy(model: nn.Module, data: Any) -> Tensor:
    """The mean cross-entropy, by the user's own module."""
    return F.cross_entropy(model(data[0]), data[1])


def of_batches(model: nn.Module, data: Any) -> Tensor:
    return torch.stack([spread(model(a), b) for a, b in drawn(data)]).mean()


def labeled(samples: int = 40) -> tuple[Tensor, Tensor]:
    return inputs(samples), classes(samples)


def valued(samples: int = 40) -> tuple[Tensor, Tensor]:
    return inputs(samples), inputs(samples, 1)[:, 0]


X, Y = torch.linspace(-1, 1, 200, dtype=torch.float64).sin().reshape(40, 5), classes()
SUMMED, EACH = nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="none")
#: Name -> model, loss and data, made anew; the loss that the remedy takes; and what is refused, a Problem of these
#: by default.
CASES: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], Callable[[Any, Any], Tensor], Callable[..., Any]]] = {
    "a data set of a loss that mixes": (
        lambda: (net(), spread, TensorDataset(*labeled(150))), by_batch(spread, 64), Problem),
    "a stream of a loss that mixes": (
        lambda: (net(), contrast, Pictures(*labeled(192))), lambda m, d: by_batch(contrast, 64)(m, d.tensors), Problem),
    "more than the memory": (lambda: (net(), contrast, labeled(4020)), by_batch(contrast, 1080), Problem),
    "of sixteen": (lambda: (net(), groups, valued(4000)), lambda m, d: groups(m(d[0]), d[1]), Problem),
    "a sum": (lambda: (net(), SUMMED, labeled()), entropy, Problem),
    "terms of another loss": (
        lambda: (net(), counted, labeled()), lambda m, d: counted(m(d[0]), d[1]),
        lambda *given: Problem(*given, terms=lambda y: y + 1)),
    "batches that are shuffled": (
        lambda: (net(), spread, DataLoader(TensorDataset(*labeled()), 10, shuffle=True)), of_batches, Problem),
    "augmentation": (lambda: (net(), F.cross_entropy, DataLoader(noisy(), 16)), joined, Problem),
    "a data set with augmentation": (lambda: (net(), F.cross_entropy, noisy()), joined, Problem),
    "an iterator": (
        lambda: (net(), F.cross_entropy, iter([(X[:25], Y[:25]), (X[25:], Y[25:])])),
        lambda m, d: entropy(m, (X, Y)), Problem),
    "a graph": (
        lambda: (graph(), F.cross_entropy, ((inputs(), torch.randint(40, (2, 90))), classes())),
        lambda m, d: F.cross_entropy(m(*d[0]), d[1]), Problem),
    "random numbers": (lambda: (dropping(), F.cross_entropy, labeled()), first_draw, Problem),
    "a loss of each sample": (lambda: (net(), EACH, labeled()), entropy, Problem),
    "a loss in a dict": (
        lambda: (net(), lambda o, t: {"loss": F.cross_entropy(o, t), "seen": len(t)}, labeled()), entropy, Problem),
    "a loss in a tuple": (lambda: (net(), lambda o, t: (F.cross_entropy(o, t), len(t)), labeled()), entropy, Problem),
    "outputs that broadcast": (
        lambda: (net(outputs=1), lambda o, t: (o - t).square().mean(), valued()),
        lambda m, d: F.mse_loss(m(d[0])[:, 0], d[1]), Problem),
    "a module in place of a problem": (
        lambda: (net(), F.cross_entropy, labeled()), entropy, lambda model, *_: landscape.trace(model)),
}  # fmt: skip


def test_a_single_result_is_saved_as_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        save_one()
    eval(caught.value.remedy, {"result": result(), "path": tmp_path / "x.h5"})
    assert landscape.load(tmp_path / "x.h5").t.tolist() == [0, 1]


def result() -> landscape.Line:
    problem = Problem(net(), F.cross_entropy, labeled())
    return landscape.line(problem, *torch.zeros(2, 39).double(), points=2)


def save_one() -> None:
    landscape.save(result(), "x.h5")  # type: ignore[arg-type]


def contour_into_a_name() -> None:
    problem = Problem(net(), F.cross_entropy, labeled())
    landscape.contour(problem, landscape.random_plane(problem), into="x.h5")  # type: ignore[arg-type]


def sites() -> Iterator[tuple[Site, int]]:
    """Where the package makes an InputError with a remedy, and the last line of that."""
    package = Path(landscape.__file__).parent
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = ("InputError", "OperationError")
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") in names
                and any(keyword.arg == "remedy" for keyword in node.keywords)
            ):
                yield (str(file), node.lineno), node.end_lineno or 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    """The places where errors with a remedy were made."""
    found: list[Site] = []
    init = InputError.__init__

    def noted(self: InputError, *args: Any, **options: Any) -> None:
        frame = sys._getframe(1)
        if options.get("remedy"):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        init(self, *args, **options)

    monkeypatch.setattr(InputError, "__init__", noted)
    # Less than pairs of 4,020 samples need, more than all others do.
    monkeypatch.setattr("landscape.problem.mean_check.available_memory", lambda device: 2**25)
    return found


@pytest.mark.filterwarnings("ignore::landscape.ProblemWarning")
def test_each_remedy_gives_what_is_meant_and_no_other_is_named(made: list[Site]) -> None:
    """A refusal with a remedy, anywhere in the package, needs a case above."""
    for name, (build, meant, refuse) in CASES.items():
        torch.manual_seed(0)
        model, loss, data = build()
        with pytest.raises(InputError) as caught:
            refuse(model, loss, data)
        error = caught.value
        assert "\n" not in str(error), name
        assert str(error).endswith(f"; use {error.remedy}"), name
        torch.manual_seed(3)
        agrees(remedied(error, model, loss, data), model, lambda: meant(model, data))  # noqa: B023
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
