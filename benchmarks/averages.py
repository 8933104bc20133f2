"""Thirty averages of weights: is the exact loss inside the 90% interval of ``landscape.average``?

``python -m benchmarks.averages`` trains the members (five minutes on one core, with MNIST and CIFAR-10 in LANDSCAPE_DATA), and
writes the table of docs/explanation/averages.md. None of these sets was used to build the prediction, whose length
scales were chosen on other seeds, networks and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape.training.recipes.recipe import read
from landscape.training.run.loop import Trainer

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "averages.md"
BEGIN, END = "<!-- averages: python -m benchmarks.averages -->\n", "<!-- end of averages -->"
SEED = 1000


@dataclass
class Members:
    """Weights (n, P) of a problem, and the averages of them that are predicted, as coefficients (K, n)."""

    name: str
    problem: landscape.Problem
    weights: Tensor
    averages: list[list[float]]


def window(n: int, first: int, last: int) -> list[float]:
    """Equal coefficients of the members first, …, last − 1."""
    return [float(first <= j < last) for j in range(n)]


def images(name: str, samples: int) -> tuple[Tensor, Tensor]:
    x, y = landscape.data.load(name).train  # type: ignore[misc]
    return x[:samples], y[:samples]


def steps(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    count: int,
    lr: float,
    *,
    batch: int = 50,
    seed: int,
    save: int = 0,
    **sgd: Any,
) -> list[Tensor]:
    """Train in place, and return the weights after every ``save`` steps, or at the end."""
    draws = torch.Generator().manual_seed(seed)
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer, saved = torch.optim.SGD(parameters, lr=lr, **sgd), []
    net.train()
    for step in range(1, count + 1):
        drawn = torch.randint(len(x), (batch,), generator=draws)
        optimizer.zero_grad()
        F.cross_entropy(net(x[drawn]), y[drawn]).backward()
        optimizer.step()
        if step % (save or count) == 0:
            saved.append(nn.utils.parameters_to_vector(parameters).detach().clone())
    return saved


def network(name: str, seed: int, x: Tensor, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    net = landscape.models.build(name, **options)
    net(x[:2])
    return net


def problem_of(net: nn.Module, x: Tensor, y: Tensor) -> landscape.Problem:
    return landscape.Problem(net, F.cross_entropy, (x, y))


def checkpoints() -> Iterator[Members]:
    """SWA and LAWA windows, and the decayed averages of WSM, along runs of three networks."""
    for name, data, samples, options, lr, seed in (
        ("mlp", "digits", 1437, {"widths": [64, 40, 10]}, 0.4, 1), ("mlp", "mnist", 5000, {"widths": [784, 50, 50, 10]}, 0.3, 2),
        ("lenet-5", "cifar10", 4000, {}, 0.1, 3),
    ):  # fmt: skip
        x, y = images(data, samples)
        net = network(name, SEED + seed, x, **options)
        early = torch.stack(steps(net, x, y, 300, lr, seed=SEED + seed, save=50))
        yield Members(
            f"LAWA, {name}, {data}", problem_of(net, x, y), early, [window(6, 0, 6), window(6, 2, 6)]
        )
        late = torch.stack(steps(net, x, y, 600, lr, seed=SEED + 10 + seed, save=100, momentum=0.5))
        decayed = [float(k) for k in range(1, 7)]
        yield Members(
            f"SWA, {name}, {data}",
            problem_of(net, x, y),
            late,
            [window(6, 0, 6), window(6, 3, 6), decayed],
        )


def learners() -> Iterator[Members]:
    """The learners of five rules."""
    for rule, options in (
        ("dpsgd", ["algorithm.mixing=ring(1)"]), ("local-sgd", ["algorithm.period=25"]), ("sgp", []),
        ("noloco", ["algorithm.period=25"]), ("d2", ["algorithm.mixing=lazy(0.9, ring(1))"]),
    ):  # fmt: skip
        common = f"algorithm.name={rule} learners=6 batch=240 lr=0.3 steps=220 seed={SEED} decompose.every=0"
        run = Trainer(read("digits-ssgd", [*common.split(), *options])).run()
        yield Members(f"learners of {rule}, digits", run.problem(), run.weights, [window(6, 0, 6)])


class Adapted(nn.Module):
    """A fixed linear layer W with LoRA: W + BA, A (rank, inputs), B (outputs, rank) zero at the start."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def fine_tuned() -> Iterator[Members]:
    """Fine-tunings of one network on halves of the data, of all weights and of adapters."""
    for name, data, options, seed in (
        ("mlp", "digits", {"widths": [64, 40, 10]}, 4),
        ("lenet-5", "cifar10", {}, 5),
    ):
        x, y = images(data, 4000)
        net = network(name, SEED + seed, x, **options)
        steps(net, x, y, 250, 0.1, seed=SEED + seed)
        start, found = {k: v.clone() for k, v in net.state_dict().items()}, []
        for half in (0, 1):
            net.load_state_dict(start)
            found += steps(net, x[half::2], y[half::2], 200, 0.1, seed=SEED + half)
        yield Members(
            f"two fine-tunings, {name}, {data}", problem_of(net, x, y), torch.stack(found), [[1, 1], [3, 1]]
        )
    x, y = images("mnist", 4000)
    net = network("mlp", SEED + 6, x, widths=[784, 50, 50, 10])
    steps(net, x, y, 150, 0.2, seed=SEED + 6)
    layers = [Adapted(m) if isinstance(m, nn.Linear) else m for m in net.modules() if not list(m.children())]
    adapted = nn.Sequential(*layers)
    start, found = {k: v.clone() for k, v in adapted.state_dict().items()}, []
    for third in range(3):
        adapted.load_state_dict(start)
        found += steps(adapted, x[third::3], y[third::3], 150, 0.1, seed=SEED + third)
    yield Members(
        "three LoRA adapters, mlp, mnist",
        problem_of(adapted, x, y),
        torch.stack(found),
        [[1, 1, 1], [1, 1, 0]],
    )


def independent() -> Iterator[Members]:
    """Networks from different initial weights."""
    for name, data, options in (("mlp", "mnist", {"widths": [784, 50, 50, 10]}), ("lenet-5", "cifar10", {})):
        x, y = images(data, 4000)
        found = []
        for k in range(2):
            net = network(name, SEED + 20 + k, x, **options)
            found += steps(net, x, y, 400, 0.1, seed=SEED + 20 + k)
        yield Members(
            f"independent networks, {name}, {data}", problem_of(net, x, y), torch.stack(found), [[1, 1]]
        )


def with_batchnorm() -> Iterator[Members]:
    """SWA windows of a network with BatchNorm."""
    x, y = images("digits", 1437)
    torch.manual_seed(SEED + 7)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 10))
    steps(net, x, y, 100, 0.5, seed=SEED)
    late = torch.stack(steps(net, x, y, 300, 0.5, seed=SEED + 8, save=50))
    yield Members(
        "SWA with BatchNorm, digits", problem_of(net, x, y), late, [window(6, 0, 6), window(6, 3, 6)]
    )


SETS: list[Callable[[], Iterator[Members]]] = [checkpoints, learners, fine_tuned, independent, with_batchnorm]


@dataclass
class Outcome:
    """An average: its members' mean loss, the prediction with its interval, and the exact loss."""

    name: str
    mean: float
    loss: float
    low: float
    high: float
    exact: float

    @property
    def inside(self) -> bool:
        return self.low <= self.exact <= self.high

    @property
    def decided(self) -> bool:
        """Whether the interval of the change leaves out zero."""
        return not self.low <= self.mean <= self.high

    @property
    def right_sign(self) -> bool:
        return (self.loss - self.mean) * (self.exact - self.mean) > 0


def outcomes(members: Members) -> Iterator[Outcome]:
    """Those of the averages that were asked for, without the chosen one."""
    r = landscape.average(members.problem, members.weights, np.array(members.averages))
    assert r.products <= 2 * len(members.weights)
    for k, row in enumerate(r.coefficients[:-1]):
        kind = f"{members.name}, {np.count_nonzero(row)}/{len(row)}" + (
            "" if len({*row} - {0.0}) == 1 else ", weighted"
        )
        yield Outcome(kind, row @ r.members_loss, r.loss[k], r.low[k], r.high[k], r.exact[k])


def table(found: list[Outcome]) -> str:
    """The page's table, and the counts above it."""
    ended = [o for o in found if np.isfinite(o.high)]
    decided = [o for o in ended if o.decided]
    lines = [
        f"Of {len(found)} averages, {len(ended)} have a prediction. {sum(o.inside for o in ended)} of the intervals "
        f"contain the exact loss, and {len(decided)} leave out the members' mean loss. In {sum(o.right_sign for o in decided)} "
        "of these, the predicted and the exact loss lie on the same side of the mean loss.",
        "",
        "| averages | number | exact loss inside | largest error | mean half width |",
        "| --- | --- | --- | --- | --- |",
    ]
    groups: dict[str, list[Outcome]] = {}
    for o in found:
        groups.setdefault(o.name.split(",")[0].split(" of ")[0], []).append(o)
    for name, several in groups.items():
        ended = [o for o in several if np.isfinite(o.high)]
        error = max((abs(o.loss / o.exact - 1) for o in ended), default=np.nan)
        width = np.mean([(o.high - o.low) / 2 / o.exact for o in ended]) if ended else np.nan
        said = (
            f"{sum(o.inside for o in ended)} | {error:.2%} | {width:.2%}"
            if ended
            else "no prediction | – | –"
        )
        lines.append(f"| {name} | {len(several)} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    found = []
    for make in SETS:
        for members in make():
            found += outcomes(members)
            print(*found[-len(members.averages) :], sep="\n", flush=True)
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
