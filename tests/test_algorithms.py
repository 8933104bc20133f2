"""Update rules and the decomposition of their steps: by hand, by identity, by limit; rules of one's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import landscape
from landscape import Checkpoint, InputError, LandscapeError, OperationError, Problem, testing
from landscape.core import registry
from landscape.core.registry import algorithms
from landscape.gradients.learners import Stack
from landscape.limits import max_stable_step
from landscape.problem.layout import Layout, Slot
from landscape.testing.checks import RECIPE, registered
from landscape.training import decomposition
from landscape.training import optimizer as optimizers
from landscape.training.algorithms.central import SSGD, AsyncSGD
from landscape.training.algorithms.dpsgd import SGP
from landscape.training.algorithms.partial import Sparta, StreamingDiLoCo
from landscape.training.decomposition import Decomposer, GradientEstimator
from landscape.training.optimizer.base import SGD
from landscape.training.processes.comm import Comm
from landscape.training.recipes import recipe
from landscape.training.run import _NUMBERED, RESERVED, _stream, generator, launch
from landscape.training.run.loop import Trainer
from landscape.training.topology import Mixing
from tests.problems import assert_identity
from tests.test_conformance import RULES

Gradient = Callable[[Tensor], Tensor]
LR = 0.1


def start(n: int = 4, size: int = 3) -> Tensor:
    """(n, size), all equal, as a run starts."""
    return torch.arange(1.0, size + 1, dtype=torch.float64).repeat(n, 1)


def slopes(n: int = 4, size: int = 3) -> Gradient:
    """Learner j's gradient of ½ Σ_i i (w_i − b_ji)²: each has a minimum of its own."""
    b = torch.randn(n, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return lambda w: torch.arange(1.0, size + 1, dtype=torch.float64) * (w - b)


def drive(
    name: str,
    options: dict[str, Any],
    gradient: Gradient,
    steps: int,
    weights: Tensor,
    lr: float | Callable[[int], float] = LR,
    momentum: float = 0.0,
) -> Tensor:
    """(steps + 1, n, P): the weights of a rule run without model and data."""
    rule = algorithms.make(name, options, learners=len(weights), seed=3)
    rule.peak_lr = lr if isinstance(lr, float) else lr(1)
    rule.start(weights)
    optimizer = SGD(momentum)
    optimizer.start(Layout(()), weights)
    path = [weights.clone()]
    for t in range(1, steps + 1):
        rule.begin(weights, t)
        points = rule.gradient_points(weights)
        rate = lr if isinstance(lr, float) else lr(t)
        directions = optimizer.directions(gradient(points), points, rate, t)
        weights = rule.finish(weights, directions, rate, t)
        rule.update_optimizer_state(optimizer, t)
        path.append(weights.clone())
    return torch.stack(path)


def mean(w: Tensor) -> Tensor:
    return w.mean(0).expand_as(w)


G = slopes()
Trajectory = list[Tensor]
Step = Callable[[Trajectory, int], Tensor]


def by_hand(step: Step, steps: int) -> Tensor:
    """(steps + 1, n, P): the path that ``step`` continues, given it and t."""
    path = [start()]
    for t in range(1, steps + 1):
        path.append(step(path, t))
    return torch.stack(path)


def mixed_by(mixing: str, t: int) -> Tensor:
    return torch.from_numpy(Mixing(mixing, 4, 3).matrix(t))


def noisy(path: Trajectory, t: int) -> Tensor:
    noise = torch.randn(3, generator=generator(3, "noise", t)).double()
    return mean(path[-1]) - LR * G(mean(path[-1])) + 0.01 * noise


def post_local(path: Trajectory, t: int) -> Tensor:
    w = path[-1] - LR * G(path[-1])
    return mean(w) if t <= 3 or t % 4 == 3 else w  # three synchronous steps, then periods of four


def hierarchical(path: Trajectory, t: int) -> Tensor:
    w = path[-1] - LR * G(path[-1])
    if t % 6 == 0:
        return mean(w)
    return torch.cat([mean(w[:2]), mean(w[2:])]) if t % 2 == 0 else w


def torchs_nesterov_outside() -> Step:
    outer = torch.nn.Parameter(start()[0])
    sgd = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)

    def step(path: Trajectory, t: int) -> Tensor:
        w = path[-1] - LR * G(path[-1])
        if t % 5:
            return w
        outer.grad = outer.detach() - w.mean(0)
        sgd.step()
        return outer.detach().expand_as(w).clone()

    return step


def merged(path: Trajectory, t: int) -> Tensor:
    w = mixed_by("ring(1)", t) @ path[-1] - LR * G(path[-1])
    return mean(w) if t == 9 else w


def sparse(path: Trajectory, t: int) -> Tensor:
    """The mean of two of three numbers."""
    w = path[-1] - LR * G(path[-1])
    rng = np.random.default_rng(generator(3, "part", t).initial_seed())
    for i in rng.choice(3, 2, replace=False, shuffle=False):
        w[:, i] = w[:, i].mean()
    return w


def streamed(momentum: float = 0.0) -> Step:
    """Three fragments of one number each, each with torch's Nesterov, every 5 steps; taken 2 steps later."""
    outer = [torch.nn.Parameter(x.clone()) for x in start()[0]]
    sgd = [torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True) for x in outer]
    v = torch.zeros(4, 3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal v
        v = momentum * v + G(path[-1])
        w = path[-1] - LR * v
        for i, offset in enumerate((1, 3, 5)):
            if t >= offset and (t - offset) % 5 == 0:
                outer[i].grad = outer[i].detach() - w[:, i].mean()
                sgd[i].step()
            if t - 2 >= offset and (t - 2 - offset) % 5 == 0:
                w[:, i] = 0.25 * w[:, i] + 0.75 * outer[i].detach()
        return w

    return step


STREAMED = {"period": 5, "fragments": 3, "delay": 2, "own_share": 0.25}


def radial_directional(moved: Tensor, counts: Tensor) -> Tensor:
    """The average of vectors (m, d): the mean of their lengths along the mean of their directions, φ(0) = 0."""
    norms = moved.norm(dim=1)
    direction = counts @ (moved / norms[:, None])
    norm = direction.norm()
    return (counts @ norms) / counts.sum() * (direction / norm if norm > 1e-12 else direction)


@pytest.mark.parametrize(("quorum", "availability"), [(1, 1.0), (2, 0.6), (4, 0.1)])
def test_decoupled_diloco_by_hand(quorum: int, availability: float) -> None:
    """Two fragments, an embedding and two layers, every four steps, taken a step later by those reached."""
    slots = (
        Slot("e.weight", (2, 1), 0, 2, "weight", "embedding"), Slot("a.weight", (1, 3), 2, 3, "weight"),
        Slot("b.weight", (1, 2), 5, 2, "weight"), Slot("b.bias", (1,), 7, 1, "bias"),
    )  # fmt: skip
    fragments = {2: [slice(0, 2), slice(5, 7), slice(7, 8)], 4: [slice(2, 5)]}  # by the step that ends them
    options = {"period": 4, "fragments": 2, "delay": 1, "quorum": quorum, "availability": availability}
    rule = algorithms.make("decoupled-diloco", options, learners=4, seed=3)
    rule.layout, gradient = Layout(slots), slopes(4, 8)
    w, by_rule = start(4, 8), start(4, 8)
    rule.start(by_rule)
    outer = [torch.nn.Parameter(w[0].clone()) for _ in range(2)]
    sgd = [torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True) for x in outer]
    counts, seen = torch.zeros(2, 4).double(), set[int]()
    for t in range(1, 60):
        w, counts = w - LR * gradient(w), counts + 1
        for i, (offset, tensors) in enumerate(fragments.items()):
            draw = torch.rand(4, generator=generator(3, "reached", t - 1 if t % 4 != offset % 4 else t))
            reached = draw <= max(availability, float(draw.sort().values[quorum - 1]))
            if t % 4 == offset % 4:
                seen.add(int(reached.sum()))
                grad = torch.zeros(8).double()
                for place in tensors:
                    moved, c = (outer[i].detach() - w)[reached, place], counts[i, reached]
                    mean_of = (c / c.sum()) @ moved
                    grad[place] = mean_of if place.start == 0 else radial_directional(moved, c)
                outer[i].grad = grad
                sgd[i].step()
            if t > 1 and (t - 1) % 4 == offset % 4:
                counts[i, reached] = 0
                for place in tensors:
                    w[reached, place] = outer[i].detach()[place]
        by_rule = rule.finish(by_rule, gradient(by_rule), LR, t).clone()
        torch.testing.assert_close(by_rule, w, rtol=1e-9, atol=1e-9)
    assert min(seen) >= quorum
    assert (len(seen) > 1) == (quorum == 2)


def test_decoupled_diloco_with_all_learners_and_the_mean_is_streaming_diloco() -> None:
    options = {"period": 5, "fragments": 3, "delay": 2}
    one = drive("decoupled-diloco", options | {"merge": "mean"}, G, 30, start(), momentum=0.5)
    torch.testing.assert_close(one, drive("streaming-diloco", options, G, 30, start(), momentum=0.5))


def test_parts_of_a_network_are_drawn_alike_and_fragments_are_its_layers() -> None:
    """Of 1,000 numbers 5 are averaged in a step, each equally often; fragments hold each number once."""
    rule = Sparta(4, 0)
    drawn = torch.stack([rule.part(t, 1000) for t in range(1, 2001)])
    assert drawn.shape == (2000, 5)
    assert (drawn.diff(dim=1) > 0).all()
    often = torch.bincount(drawn.flatten(), minlength=1000).double()  # binomial, mean 10, variance 10
    assert 8.5 < float(often.var()) < 11.5
    changes = {"algorithm": {"name": "streaming-diloco", "period": 4, "fragments": 2}}
    values = SMALL | changes | {"model": {"name": "mlp", "widths": [6, 8, 8, 3]}}
    trainer = Trainer(recipe.from_values(values))
    assert isinstance(trainer.rule, StreamingDiLoCo)
    layout, fragments = trainer.train_problem.layout, trainer.rule.fragments
    layers = {s.name.split(".")[0]: s for s in layout.slots if s.role == "bias"}
    found = [[name for name, slot in layers.items() if slot.offset in part] for part in fragments]
    assert found == [[*layers][::2], [*layers][1::2]]
    assert sorted(torch.cat(fragments).tolist()) == [*range(layout.size)]
    with pytest.raises(
        InputError, match=r"algorithm\.fragments: 4 is not allowed, it must be ≤ 3, the number"
    ):
        Trainer(recipe.from_values(values | {"algorithm": changes["algorithm"] | {"fragments": 4}}))


def delayed(tau: int, aware: bool = False) -> Step:
    def step(path: Trajectory, t: int) -> Tensor:
        # The first τ gradients are of the start, 0, 1, 2 steps old: rates α, α, α/2, then α/3.
        rate = LR / max(1, min(t - 1, tau)) if aware else LR
        return mean(path[-1]) - rate * G(mean(path[max(0, t - 1 - tau)]))

    return step


def shifted(tau: int, m: float) -> Step:
    """v_{t+1} = m v_{t−τ} − ηg(x_{t−τ}), which is of the learners' mean gradient."""
    vs = [torch.zeros(4, 3).double()] * (tau + 1)

    def step(path: Trajectory, t: int) -> Tensor:
        vs.append(m * vs[-1 - tau] - LR * mean(G(path[max(0, t - 1 - tau)])))
        return path[-1] + vs[-1]

    return step


def drawn_workers(path: Trajectory, t: int) -> Tensor:
    """The copy of the worker of step t is of the step that follows its last delivery."""
    worker = AsyncSGD(4, 3, 2, "random").worker
    fetched = next((s for s in range(t - 1, 0, -1) if worker(s) == worker(t)), 0)
    return mean(path[-1]) - LR * G(mean(path[fetched]))


def drawn_delays(path: Trajectory, t: int) -> Tensor:
    delays = torch.randint(min(2, t - 1) + 1, (4,), generator=generator(3, "delay", t)).tolist()
    old = torch.stack([path[t - 1 - d][j] for j, d in enumerate(delays)])
    return mixed_by("random-matching", t) @ path[-1] - LR * G(old)


def noloco(mixing: str, momentum: float) -> Step:
    """The outer step of the authors' program (jkolehm/noloco, sparse_optimizer_c.py), every third step."""
    phi, delta, v = start(), torch.zeros(4, 3).double(), torch.zeros(4, 3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal phi, delta, v
        v = momentum * v + G(path[-1])
        w = path[-1] - LR * v
        if t % 3:
            return w
        m = mixed_by(mixing, t // 3)
        delta = delta + (0.4 - 1) * delta + 0.8 * m @ (w - phi) + 0.8 * (m @ phi - phi)
        phi = phi + delta
        return phi

    return step


def lookahead(momentum: float) -> Step:
    """SNOO's loop for the mean gradient of all learners (arXiv 2510.15830), K = 3."""
    slow, b, v = start()[0], torch.zeros(3).double(), torch.zeros(3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal slow, b, v
        v = momentum * v + G(path[-1]).mean(0)
        w = path[-1] - LR * v
        if t % 3 == 0:
            s = slow - w[0]
            b = 0.6 * b + s
            slow = slow - 0.8 * (0.6 * b + s)
            w = slow.expand(4, 3)
        return w

    return step


def averaged(momentum: float) -> Step:
    """The three sequences of the authors' program (facebookresearch/optimizers, gpa) around SGD."""
    z, v = start()[0], torch.zeros(3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal z, v
        y = 0.7 * path[-1] + 0.3 * z
        v = momentum * v + G(y).mean(0)
        z = z - LR * v
        return 0.9 * path[-1] + 0.1 * z

    return step


#: Rule, options, optimizer, steps, the learners' minima b: the end of the authors' program in float32, recorded.
AUTHORS: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]], int, Callable[[Tensor], Tensor], list[list[float]]]] = {
    # facebookresearch/optimizers, gpa/gpa_adamw.py in its mode "eval"
    "gpa": (
        {"mu_x": 0.9, "mu_y": 0.7}, ("torch:AdamW", {"betas": [0.9, 0.99], "weight_decay": 0.0}), 20,
        lambda x: x.sin()[None],
        [[0.0237043, 0.0399825, 0.0523095, 0.0611734, 0.0705514, 0.226602, 0.5057626, 0.5129421, 0.5001521]],
    ),
    # jkolehm/noloco, sparse_optimizer_c.py, two processes
    "noloco": (
        {"period": 4, "mixing": "full"}, ("torch:Adam", {}), 18, lambda x: torch.stack([x.sin(), x.cos()]),
        [[0.2222338, 0.2505747, 0.260912, 0.5976931, 0.6208643], [0.3020498, 0.3305014, 0.3407282, 0.6335022, 0.6056075]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AUTHORS)
def test_rules_give_the_numbers_of_the_authors_programs(name: str) -> None:
    """Of the gradients of ½ Σ_i s_i (w_i − b_ji)², at the learning rate 0.02."""
    options, (optimizer, given), steps, minima, recorded = AUTHORS[name]
    expected = torch.tensor(recorded)
    n, size = expected.shape
    b, scale = minima(torch.linspace(-1, 1, size)), torch.linspace(0.5, 1.5, size)
    w = torch.linspace(-0.5, 0.5, size).cos().mul(0.3).repeat(n, 1)
    rule, inner = algorithms.make(name, options, learners=n, seed=0), optimizers.make(optimizer, given)
    rule.start(w)
    inner.start(Layout((Slot("w", (size,), 0, size, "weight"),)), w)
    for t in range(1, steps + 1):
        points = rule.gradient_points(w)
        directions = inner.directions(scale * (points - b), points, 0.02, t)
        w = rule.finish(w, directions, 0.02, t).clone()
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-6)


def sent_by_size() -> Step:
    """SparseLoCo's equations for one block of three numbers, of which two are sent, every third step."""
    error = torch.zeros(4, 3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal error
        w = path[-1] - LR * G(path[-1])
        if t % 3:
            return w
        error = 0.8 * error + path[t - 3] - w
        sent = error.clone()
        for row in sent:
            row[row.abs().argmin()] = 0
        error = error - sent
        return path[t - 3] - 0.7 * mean(sent)

    return step


#: Rule, options, learning rate, what is kept for later; the end of the authors' program for three learners in float32:
#: the weights, and what the second keeps.
SENT: dict[str, tuple[dict[str, Any], float, str, list[float], list[float]]] = {
    # github.com/bloc97/DeMo, demo.py
    "demo": (
        {"decay": 0.9, "k": 2, "chunk": 3, "weight_decay": 0.1}, 0.01, "momentum",
        [0.1607706, 0.165679, 0.1502694, 0.174476, 0.1583733, 0.1618965, 0.1650609, 0.1678626, 0.170298, 0.1723641,
         0.1940181, 0.1753778, 0.1763217, 0.1968686, 0.1770776, 0.1968286, 0.1763217, 0.1953578, 0.174058, 0.1923041,
         0.2102581, 0.2277827, 0.3042638, 0.3408998, 0.3570977, 0.3931804, 0.3889538, 0.3843834, 0.3794749],
        [-0.0003652, 0.0002681, -0.0001281, 6.7e-06, -0.000148, 0.000342, -5.15e-05, 5.15e-05, -9.44e-05, -2.6e-06,
         0.0002564, -0.0001349, -0.0003359, 0.000151, 0.000107, 0.0005356, 0.0005914, -0.0002216, -0.0001764, -0.0011089,
         0.0009628, -0.0011477, 0.000779, -0.0001364, 0.0, 0.0, 0.0, 0.0, 0.0],
    ),
    # github.com/tplr-ai/SparseLoCo, sparseloco.py, with top_k = 3
    "sparseloco": (
        {"period": 2, "decay": 0.9, "share": 1 / 3, "chunk": 3, "average": "senders"}, 0.05, "error",
        [-0.0488362, -0.0106749, -0.081269, -0.0183233, 0.1390232, 0.1136848, -0.0072351, -0.0409123, -0.0430138,
         -0.0767645, -0.0870757, 0.1674168, 0.0813471, 0.1166286, 0.0223516, -0.0115156, 0.2111122, 0.2098268, 0.2700964,
         0.2003817, 0.5660557, 0.3432105, 0.3325136, 0.1986702, 0.3291918, 0.3535805, 0.3793938, 0.4066288, 0.4352787],
        [0.0, 0.0, 0.0, 0.015655, 0.0219942, 0.0239185, 0.0279291, 0.0373791, 0.0484432, 0.0437632, 0.0241398, 0.0, 0.0,
         0.0, 0.0, 0.027998, -0.005772, 0.0105272, -0.0204228, 0.0044142, 0.0088348, 0.0118717, 0.0, -0.022972, 0.0, 0.0,
         0.0, 0.0, 0.0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_rules_that_send_a_part_give_the_numbers_of_the_authors_programs(name: str) -> None:
    """Twelve steps of a matrix, of which blocks of six send two numbers, and a bias that sends all five."""
    options, lr, keeps, weights, second = SENT[name]
    n, size = 3, 29
    b = torch.linspace(-1, 1, n * size).reshape(n, size).sin() * torch.linspace(1, 2, size)
    rule = algorithms.make(name, options, learners=n, seed=0)
    rule.layout = Layout((Slot("w", (6, 4), 0, 24, "weight"), Slot("b", (5,), 24, 5, "bias")))
    w = torch.linspace(-0.5, 0.5, size).cos().mul(0.3).repeat(n, 1)
    rule.start(w)
    for t in range(1, 13):
        w = rule.finish(w, torch.linspace(0.5, 1.5, size) * (w - b), lr, t).clone()
    torch.testing.assert_close(w, torch.tensor(weights).expand(n, size), rtol=0, atol=1e-6)
    torch.testing.assert_close(rule.state[keeps][1], torch.tensor(second), rtol=0, atol=1e-6)
    assert rule.communication_cost(12) == (pytest.approx(2 * 2 * (8 + 5) / size), 1)


@pytest.mark.parametrize(("name", "options"), [("demo", {}), ("sparseloco", {"period": 2})])
def test_rules_that_send_a_part_refuse_what_is_no_matrix(name: str, options: dict[str, Any]) -> None:
    rule = algorithms.make(name, options, learners=2, seed=0)
    rule.layout = Layout((Slot("conv", (2, 2, 3, 3), 0, 36, "weight"),))
    with pytest.raises(
        InputError, match=r"algorithm\.name: \w+ needs vectors or matrices, not \(2, 2, 3, 3\)"
    ):
        rule.start(torch.zeros(2, 36))


def falling(t: int) -> float:
    return 0.05 * 0.95 ** (t - 1)


def decentralized(mixing: str, order: str, buffers: str, momentum: float) -> Step:
    v = torch.zeros(4, 3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal v
        m, w = mixed_by(mixing, t), path[-1]
        v = momentum * v + G(w)
        new = m @ w - falling(t) * v if order == "awc" else m @ (w - falling(t) * v)
        v = m @ v if buffers == "mix" else v
        return new

    return step


def slow(mixing: str, buffers: str) -> Step:
    """SlowMo with α = 0.8, β = 0.6, and momentum 0.5."""
    matrix = mixed_by("ring(1)" if mixing != "none" else "nodes(4)", 1)
    old, u, v = start()[0], torch.zeros(3).double(), torch.zeros(4, 3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal old, u, v
        v = 0.5 * v + G(path[-1])
        w = matrix @ path[-1] - falling(t) * v
        if t % 3:
            return w
        u = 0.6 * u + (old - w.mean(0)) / falling(t)
        old = old - 0.8 * falling(t) * u
        v = {"keep": v, "reset": 0 * v, "average": mean(v)}[buffers]
        return old.expand_as(w)

    return step


def consensus(path: Trajectory, t: int) -> Tensor:
    """DSGD-AC with power 2 from step 7 on."""
    gamma = (falling(t) / falling(1)) ** 2 if t > 6 else 1.0
    return (1 - gamma) * path[-1] + gamma * mixed_by("ring(1)", 1) @ path[-1] - falling(t) * G(path[-1])


def tracked(mixing: str, order: str, momentum: float) -> Step:
    """GT-DSGDm: the gradient is tracked, and the momentum is that of the tracked gradient."""
    s, last, v = torch.zeros(3, 4, 3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal s, last, v
        m, w = mixed_by(mixing, t), path[-1]
        s = m @ s + G(w) - last if order == "awc" else m @ (s + G(w) - last)
        last, v = G(w), momentum * v + s
        return m @ w - falling(t) * v if order == "awc" else m @ (w - falling(t) * v)

    return step


def corrected(momentum: float) -> Step:
    """D², algorithm 1."""
    m, v, moved = mixed_by("lazy(0.9, ring(1))", 1), torch.zeros(4, 3).double(), torch.zeros(4, 3).double()

    def step(path: Trajectory, t: int) -> Tensor:
        nonlocal v, moved
        v = momentum * v + G(path[-1])
        before, moved = moved, falling(t) * v
        return m @ (2 * path[-1] - path[-2] - moved + before if t > 1 else path[-1] - moved)

    return step


RING, TAIL = {"mixing": "ring(1)"}, {"outer_lr": 0.8, "outer_momentum": 0.6}
#: Rule, options, what makes a step, and what :func:`drive` needs beside them.
BY_HAND: list[tuple[str, dict[str, Any], Callable[[], Step], dict[str, Any]]] = [
    ("ssgd", {}, lambda: lambda path, t: mean(path[-1]) - LR * G(mean(path[-1])), {}),
    ("ssgd*", {"sigma": 0.01}, lambda: noisy, {}),
    ("local-sgd", {"period": 4, "start": 3}, lambda: post_local, {}),
    ("local-sgd", {"period": 6, "nodes": 2, "node_period": 2}, lambda: hierarchical, {}),
    ("diloco", {"period": 5}, torchs_nesterov_outside, {}),
    ("sparta", {"share": 0.5}, lambda: sparse, {}),
    ("single-merge", {"at": 9} | RING, lambda: merged, {}),
    ("async-sgd", {"delay": 3}, lambda: delayed(3), {}),
    ("async-sgd", {"delay": 3, "staleness_aware": True}, lambda: delayed(3, aware=True), {}),
    ("async-sgd", {"delay": 3, "shifted": 0.7}, lambda: shifted(3, 0.7), {}),
    ("async-sgd", {"delay": 2, "schedule": "random"}, lambda: drawn_workers, {}),
    ("ad-psgd", {"delay": 2},
     lambda: lambda path, t: mixed_by("random-matching", t) @ path[-1] - LR * G(path[max(0, t - 3)]), {}),
    ("ad-psgd", {"delay": 2, "schedule": "random"}, lambda: drawn_delays, {}),
    ("sparseloco", {"period": 3, "share": 0.7, "decay": 0.8, "outer_lr": 0.7}, sent_by_size, {}),
    ("dsgd-ac", RING | {"power": 2.0, "start": 6}, lambda: consensus, {"lr": falling}),
    *(("dpsgd", {"mixing": mixing, "order": order, "buffers": buffers},
       functools.partial(decentralized, mixing, order, buffers, m), {"lr": falling, "momentum": m})
      for mixing in ("full", "ring(1)", "random-matching", "lazy(0.4, ring(1))") for order in ("awc", "atc")
      for m, buffers in ((0.0, "keep"), (0.9, "keep"), (0.9, "mix"))),
    *(("slowmo", {"period": 3, "slow_lr": 0.8, "slow_momentum": 0.6, "mixing": mixing, "buffers": buffers},
       functools.partial(slow, mixing, buffers), {"lr": falling, "momentum": 0.5})
      for mixing in ("none", "ring(1)") for buffers in ("keep", "reset", "average")),
    *(("gradient-tracking", {"mixing": mixing, "order": order}, functools.partial(tracked, mixing, order, m),
       {"lr": falling, "momentum": m})
      for mixing, m in (("ring(1)", 0.0), ("ring(1)", 0.8), ("random-matching", 0.0), ("full", 0.8)) for order in ("awc", "atc")),
    *(("noloco", {"period": 3, "outer_lr": 0.8, "outer_momentum": 0.4, "mixing": mixing}, functools.partial(noloco, mixing, m),
       {"momentum": m}) for mixing in ("random-matching", "ring(1)", "base") for m in (0.0, 0.8)),
    *((name, options, functools.partial(step, m), {"lr": lr, "momentum": m}) for m in (0.0, 0.8) for name, options, step, lr in (
        ("streaming-diloco", STREAMED, streamed, LR), ("snoo", {"period": 3} | TAIL, lookahead, LR),
        ("gpa", {"mu_x": 0.9, "mu_y": 0.7}, averaged, LR), ("d2", {"mixing": "lazy(0.9, ring(1))"}, corrected, falling))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BY_HAND)), ids=lambda i: " ".join(map(str, BY_HAND[i][:2])))
def test_steps_by_hand(number: int) -> None:
    name, options, make, more = BY_HAND[number]
    path = drive(name, options, G, 40, start(), **more)
    torch.testing.assert_close(path, by_hand(make(), 40), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "mixing", "exact"),
    [("gradient-tracking", "ring(1)", True), ("d2", "lazy(0.9, ring(1))", True), ("dpsgd", "ring(1)", False)],
)
def test_rules_that_end_at_the_minimum_of_the_mean_loss(name: str, mixing: str, exact: bool) -> None:
    """However far apart the learners' own minima are; DPSGD's learners stay apart."""
    pulled: Gradient = lambda w: (1 + torch.arange(4.0)[:, None].double()) * G(w)  # noqa: E731
    w = drive(name, {"mixing": mixing}, pulled, 2000, start(), 0.01)[-1]
    assert bool(pulled(mean(w)).mean(0).abs().max() < 1e-9) == exact
    assert bool((w - w.mean(0)).abs().max() < 1e-9) == exact


@pytest.mark.parametrize("graph", ["random", "one-peer-exponential", "file"])
def test_push_sum_by_algorithm_1(graph: str, tmp_path: Path) -> None:
    x, w = start(), torch.ones(4).double()
    if graph == "file":  # a directed ring with a chord: columns sum to 1, rows do not
        p = np.roll(np.eye(4), 1, 0) * 0.5 + np.eye(4) * 0.5
        p[:, 0] = [0.25, 0.5, 0.25, 0]
        graph = str(tmp_path / "p.csv")
        np.savetxt(graph, p, delimiter=",")
    rule, z = SGP(4, 3, graph), start()
    expected = [z]
    for t in range(1, 31):
        p = torch.from_numpy(rule.matrix(t))
        torch.testing.assert_close(p.sum(0), torch.ones(4).double())
        x, w = p @ (x - LR * G(z)), p @ w
        z = x / w[:, None]
        expected.append(z)
    path = drive("sgp", {"graph": graph}, G, 30, start())
    torch.testing.assert_close(path, torch.stack(expected))
    assert (float((w - 1).abs().max()) > 0.1) == (graph != "one-peer-exponential")


SMALL = RECIPE | {"lr": 0.1, "steps": 24}


def train(algorithm: dict[str, Any], **changes: Any) -> Checkpoint:
    return Trainer(recipe.from_values(SMALL | {"algorithm": algorithm} | changes)).run()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "local-sgd", "period": 1}, {"name": "ssgd"}),
        ({"name": "local-sgd", "period": 9, "start": 30}, {"name": "ssgd"}),
        ({"name": "diloco", "period": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
         {"name": "local-sgd", "period": 4}),
        ({"name": "async-sgd", "delay": 0}, {"name": "ssgd"}),
        ({"name": "ad-psgd", "delay": 0}, {"name": "dpsgd", "mixing": "random-matching"}),
        ({"name": "sgp", "graph": "ring(1)"}, {"name": "dpsgd", "mixing": "ring(1)", "order": "atc"}),
        ({"name": "dsgd-ac", "mixing": "ring(1)"}, {"name": "dpsgd", "mixing": "ring(1)"}),
        ({"name": "sparseloco", "period": 4, "share": 1.0}, {"name": "local-sgd", "period": 4}),
    ],
)  # fmt: skip
def test_rules_that_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """With momentum, which the steps by hand are without."""
    a, b = (train(rule, optimizer={"name": "sgd", "momentum": 0.8}) for rule in (one, other))
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-11, atol=1e-12)
    for column in ("alpha_e", "delta"):  # the whole path, not its end alone
        np.testing.assert_allclose(a.history[column], b.history[column], rtol=1e-8, atol=1e-14)


DECOMPOSED = [*((name, options) for name, options, _ in RULES.values()), ("sgp", {}),
              ("async-sgd", {"delay": 3, "staleness_aware": True})]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), DECOMPOSED)
def test_the_decompositions_identities_hold_for_every_rule(name: str, options: dict[str, Any]) -> None:
    h = train({"name": name, **options}, schedule={"cosine": 40.0}).history
    r = {column: values[2::3] for column, values in h.items()}
    assert_identity(h)
    # Eq. 4 splits steps −α × gradient: not an outer step, shifted momentum, or unequal push-sum weights.
    rule = algorithms.make(name, options, learners=4, seed=0)
    plain = np.array([rule.follows_mean_direction(int(t)) for t in r["step"]])
    np.testing.assert_array_equal(np.isfinite(r["delta_s"]), plain)
    split = r["delta_s"] + r["delta_2"] + r["delta_cross"]
    np.testing.assert_allclose(split[plain], r["delta"][plain], rtol=1e-9)
    assert name != "ssgd" or r["delta_2_full"].max() == 0
    never = options.get("graph") == "random" or {"shifted", "staleness_aware", "mu_x", "chunk"} & {*options}
    assert plain.any() == (not never)


def test_injected_noise_is_in_delta_alone() -> None:
    h = train({"name": "ssgd*", "sigma": 0.01}).history
    assert (h["delta"] > h["delta_s"] + h["delta_2"] + h["delta_cross"])[2::3].all()


V = 8 * (6 * 8 + 8 + 8 * 3 + 3)  # a vector in float64
REDUCE = 2 * 3 / 4 * V
NODES = {"name": "local-sgd", "period": 6, "nodes": 2, "node_period": 2}


@pytest.mark.parametrize(("algorithm", "sent", "rounds"), [
    ({"name": "ssgd"}, [REDUCE] * 6, [1] * 6),
    ({"name": "dpsgd", "mixing": "ring(1)"}, [2 * V] * 6, [1] * 6),
    ({"name": "dpsgd", "mixing": "ring(1)", "buffers": "mix"}, [4 * V] * 6, [1] * 6),
    ({"name": "local-sgd", "period": 3}, [0, 0, REDUCE] * 2, [0, 0, 1] * 2),
    ({"name": "slowmo", "period": 3}, [0, 0, REDUCE] * 2, [0, 0, 1] * 2),
    ({"name": "local-sgd", "period": 5, "start": 1}, [REDUCE, 0, 0, 0, 0, REDUCE], [1, 0, 0, 0, 0, 1]),
    (NODES, [0, V, 0, V, 0, REDUCE], [0, 1, 0, 1, 0, 1]),
    ({"name": "ad-psgd"}, [V] * 6, [1] * 6),
    ({"name": "sgp", "graph": "random"}, [V] * 6, [1] * 6),
    ({"name": "gradient-tracking", "mixing": "ring(1)"}, [4 * V] * 6, [1] * 6),
    ({"name": "gradient-tracking", "mixing": "ring(1)", "order": "atc"}, [4 * V] * 6, [2] * 6),
    ({"name": "d2", "mixing": "full"}, [REDUCE] * 6, [1] * 6),
    ({"name": "noloco", "period": 3}, [0, 0, V] * 2, [0, 0, 1] * 2),
    ({"name": "single-merge", "at": 3}, [V, V, V + REDUCE, V, V, V], [1, 1, 2, 1, 1, 1]),
    ({"name": "snoo", "period": 3}, [REDUCE] * 6, [1] * 6),
    ({"name": "gpa"}, [REDUCE] * 6, [1] * 6),
    ({"name": "sparta", "share": 0.5}, [42 / 83 * 1.5 * V] * 6, [1] * 6),
    (
        {"name": "streaming-diloco", "period": 3, "fragments": 2}, [56 / 83 * 1.5 * V, 0, 27 / 83 * 1.5 * V] * 2,
        [1, 0, 1] * 2),
    (
        {"name": "decoupled-diloco", "period": 3, "fragments": 2, "quorum": 3, "availability": 0.01},
        [2 * 0.75 * 56 / 83 * V, 0, 2 * 0.75 * 27 / 83 * V] * 2, [0] * 6),
    ({"name": "demo", "k": 1, "chunk": 2}, [3 * 2 * 8 * (12 + 4 + 4 * 3 + 3)] * 6, [1] * 6),
    ({"name": "sparseloco", "period": 3, "share": 0.25}, [0, 0, 3 * 2 * 8 * (12 + 2 + 6 + 1)] * 2, [0, 0, 1] * 2),
    ({"name": "async-sgd", "delay": 2}, [2 * V] * 6, [0] * 6),
])  # fmt: skip
def test_communication_is_counted(algorithm: dict[str, Any], sent: list[float], rounds: list[int]) -> None:
    momentum = {"name": "sgd", "momentum": 0.5}
    h = train(algorithm, steps=6, decompose={"every": 0}, optimizer=momentum).history
    assert (h["comm_bytes"].tolist(), h["comm_rounds"].tolist()) == (pytest.approx(sent), rounds)
    assert h["comm_burst"].tolist() == np.maximum.accumulate(h["comm_bytes"]).tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("async-sgd", {"delay": 3, "shifted": 0.9}),
        ("async-sgd", {"delay": 3, "staleness_aware": True}),
        ("ad-psgd", {"delay": 2, "mixing": "ring(1)"}),
        ("dpsgd", {"mixing": "ring(1)", "order": "atc"}),
        ("dpsgd", {"mixing": "ring(1)", "order": "atc", "buffers": "mix"}),
        ("sgp", {"graph": "ring(1)"}),
        ("gradient-tracking", {"mixing": "exponential"}),
        ("d2", {"mixing": "star"}),
        ("gpa", {}),
        ("noloco", {"period": 1, "mixing": "star"}),
        ("local-sgd", {"period": 4, "buffers": "reset"}),
        ("sparseloco", {"period": 3, "share": 1.0, "outer_lr": 1.3}),
        ("slowmo", {"period": 3, "mixing": "ring(1)", "buffers": "average"}),
        *(
            ("dpsgd", {"mixing": "random-matching", "order": order, "buffers": buffers})
            for order in ("awc", "atc")
            for buffers in ("keep", "mix")
        ),
    ],
)
def test_steps_diverge_above_the_stated_limit_and_not_below(name: str, options: dict[str, Any]) -> None:
    """Of options that are not in tests/test_conformance.py; random pairs have a limit in mean square."""
    testing.check_rule(name, options, sharp="random" not in options.get("mixing", ""), only="limit")


def test_push_sum_with_unequal_weights_has_a_limit_of_its_own(tmp_path: Path) -> None:
    p = np.eye(4) * 0.3
    p[0, 1:] += 0.7
    p[:, 0] = [0.4, 0.2, 0.2, 0.2]
    np.savetxt(tmp_path / "p.txt", p)
    options = {"graph": str(tmp_path / "p.txt")}
    limit = algorithms.make("sgp", options, learners=4, seed=3).stability_limit()
    assert limit == pytest.approx(2.3866, abs=1e-4)  # the hub has most of the weight, and small steps
    testing.check_rule("sgp", options, only="limit")


def test_limits_that_are_not_known_are_none() -> None:
    def limit(name: str, options: dict[str, Any], momentum: float = 0.0) -> float | None:
        return algorithms.make(name, options, learners=4, seed=0).stability_limit(momentum)

    assert limit("dpsgd", {"mixing": "one-peer-exponential"}, 0.9) is None
    assert limit("ad-psgd", {"schedule": "random"}) is None
    assert limit("sgp", {"graph": "random"}) is None
    assert limit("gradient-tracking", {"mixing": "random-matching"}) is None
    assert limit("async-sgd", {"delay": 3, "schedule": "random"}, 0.9) is None
    assert limit("async-sgd", {"delay": 3, "shifted": 0.5}, 0.9) is None
    assert limit("async-sgd", {"delay": 31}) == max_stable_step(31)


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "words"),
    [
        ({"name": "ssgd"}, {"name": "lamb"}, ""),
        ({"name": "dpsgd", "mixing": "ring(1)"}, {"name": "lamb"}, "the limit of stability is not known"),
        ({"name": "ssgd"}, {"name": "sgd", "momentum": 0.9}, "steps with momentum 0.9 are stable while lr·λ_max < 3.8"),
        ({"name": "ad-psgd", "delay": 2, "schedule": "random"}, {"name": "sgd"}, "the limit of stability is not known"),
    ],
)  # fmt: skip
def test_a_run_says_its_limit(algorithm: dict[str, Any], optimizer: dict[str, Any], words: str) -> None:
    said = recipe.from_values(SMALL | {"algorithm": algorithm, "optimizer": optimizer}).describe()
    assert said.endswith(words)
    assert bool(said) == bool(words)


def test_another_rules_state_is_refused() -> None:
    end = train({"name": "slowmo", "period": 4}, steps=5)
    end.shared.pop("anchor")
    with pytest.raises(OperationError, match="/shared/anchor holds nothing, its run needs \\(83,\\)"):
        Trainer(recipe.from_values(end.settings), checkpoint=end)


def test_a_cosine_that_ends_at_zero_leaves_slow_momentum_finite() -> None:
    end = train({"name": "slowmo", "period": 4}, schedule={"cosine": 23.0})
    assert end.lr == 0
    assert bool(torch.isfinite(end.weights).all())
    assert math.isfinite(float(end.shared["slow_momentum"].norm()))


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_identities_hold_in_float32(tiny: Path, order: str) -> None:
    h = Trainer(recipe.read(str(tiny), ["decompose.every=1", f"algorithm.order={order}"])).run().history
    assert_identity(h, 1e-5)
    split = h["delta_s"] + h["delta_2"] + h["delta_cross"]
    assert (np.abs(split - h["delta"]) < 1e-5 * h["displacement2"]).all()
    assert (h["delta_2"] <= h["delta_2_full"] * (1 + 1e-6)).all()


def test_the_decomposition_by_a_sample_is_right_on_average_and_its_errors_are_of_the_right_size() -> None:
    """Against g on all samples; with the square of an estimate, or errors that do not cancel, Δ is lost."""
    torch.manual_seed(0)
    model = landscape.models.build("mlp", widths=[6, 8, 3], activation="tanh")
    data = landscape.data.load("synthetic", samples=3000, dimension=6, classes=3)
    problem = Problem(model, data.loss, data.train, dtype=torch.float64)
    stack, at = Stack(problem), problem.weights + 0.05 * torch.randn(4, problem.layout.size).double()
    drawn = torch.randint(problem.samples, (4, 200))
    x, y = problem.gather(drawn)
    own = torch.empty_like(at)
    stack.gradients(at, x, y, out=own)

    def columns(samples: int, step: int) -> dict[str, float]:
        g = GradientEstimator(stack.problem, Comm(len(at)), samples)
        found = Decomposer(stack, g).begin(at, x, y, own, step)
        return found(at - 0.5 * own, 0.5)

    truth, draws = columns(0, 0), [columns(512, step) for step in range(80)]
    for name in ("alpha_e", "grad_norm2", "delta", "delta_s", "delta_2", "delta_cross"):
        values, errors = (np.array([c[name + end] for c in draws]) for end in ("", "_se"))
        assert truth[f"{name}_se"] == 0
        assert abs(values.mean() - truth[name]) < 3.5 * values.std() / 80**0.5, name
        assert 0.8 < (errors**2).mean() ** 0.5 / values.std() < 1.4, name


def test_pairs_estimate_products_and_their_covariance_without_bias() -> None:
    torch.manual_seed(0)
    a, b = (0.3 + torch.randn(20000, 6, dtype=torch.float64) for _ in range(2))
    h, q = (v[:, :, None] * v[:, None, :] for v in (a, a + b))
    found, other = decomposition.pair_mean(h), decomposition.pair_mean(q)
    assert float(found.mean()) == pytest.approx(0.09, abs=4 * float(found.std()) / 20000**0.5)
    expected = float(torch.cov(torch.stack([found, other]))[0, 1])
    assert float(decomposition.covariance(h, q).mean()) == pytest.approx(expected, rel=0.05)
    assert float(decomposition.covariance(h, h).mean()) == pytest.approx(float(found.var()), rel=0.05)
    assert bool(decomposition.quotient(h, -h)[0][found > 0].isnan().all())


class Jittered(SSGD):
    """SSGD with a rate that is drawn anew each step."""

    columns: ClassVar[Mapping[str, str]] = {"jitter": "1"}
    purposes = ("jitter",)

    def __init__(self, learners: int, seed: int, width: float = 0.1) -> None:
        super().__init__(learners, seed)
        self.width, self._jitter = width, 0.0

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        self._jitter = self.width * float(torch.rand(1, generator=self.generator("jitter", step)))
        return super().finish(weights, directions, lr * (1 + self._jitter), step)

    def record(self, step: int) -> dict[str, float]:
        return {"jitter": self._jitter}


class Undeclared(Jittered):
    columns: ClassVar[Mapping[str, str]] = {}


def test_a_rule_of_ones_own_is_resumed_with_its_column(tiny: Path) -> None:
    testing.check_rule(Jittered, {"width": 0.2}, refused={"width": "wide"}, only="resumes")
    with registered(registry.algorithms, Jittered, "jittered"):
        end = Trainer(recipe.read(str(tiny), ["algorithm={name='jittered', width=0.2}"])).run()
    draws = [0.2 * torch.rand(1, generator=generator(0, "jitter", t)).item() for t in range(1, 31)]
    np.testing.assert_allclose(end.history["jitter"], draws)
    assert end.units["jitter"] == "1"


def test_what_a_rule_declares_is_its_own_and_nothing_else_is_recorded(tiny: Path) -> None:
    with (
        registered(registry.algorithms, Undeclared, "undeclared"),
        pytest.raises(OperationError, match="'undeclared'.*'jitter'"),
    ):
        Trainer(recipe.read(str(tiny), ["algorithm={name='undeclared'}"])).run()
    for declared, words in (
        ({"columns": {"loss": "1"}}, "'loss' is the training loop"),
        ({"purposes": ("batch",)}, "'batch' is the training loop"),
    ):
        with pytest.raises(LandscapeError, match=words):
            type("Bad", (SSGD,), declared)
    with pytest.raises(OperationError, match=r"SSGD.*'jitter'"):
        SSGD(2, 0).generator("jitter", 1)


def test_files_with_columns_that_nobody_knows_are_read_kept_and_resumed(tiny: Path, tmp_path: Path) -> None:
    chosen = recipe.read(str(tiny), ["steps=20"])
    launch.launch(chosen, tmp_path)
    for name in ("last.h5", "step-0000020.h5"):
        with h5py.File(tmp_path / name, "r+") as file:
            column = file.create_dataset("history/foreign", data=np.arange(20.0))
            column.attrs["unit"] = "furlong"
    run = landscape.load(tmp_path / "last.h5")
    assert run.units["foreign"] == "furlong"
    np.testing.assert_array_equal(run.history["foreign"], np.arange(20.0))
    run.save(tmp_path / "copy.h5")
    assert landscape.load(tmp_path / "copy.h5").units == run.units
    longer = launch.launch(recipe.read(str(tiny), ["steps=25"]), tmp_path, resume=True)
    np.testing.assert_array_equal(longer.history["foreign"][:20], np.arange(20.0))
    assert np.isnan(longer.history["foreign"][20:]).all()
    assert landscape.load(tmp_path / "last.h5").units["foreign"] == "furlong"
    run.history["nameless"] = np.zeros(20)
    with pytest.raises(OperationError, match="'nameless'"):
        run.save(tmp_path / "bad.h5")


def test_streams_keep_their_numbers_and_those_by_name_collide_with_none() -> None:
    assert [_NUMBERED[name] for name in ("init", "batch", "noise", "mixing", "decompose")] == [0, 1, 2, 3, 4]
    assert [_NUMBERED[name] for name in ("delay", "push", "augment", "dropout", "monitor")] == [5, 6, 7, 8, 9]
    assert set(RESERVED) < {*_NUMBERED, "split", "heterogeneity"}
    for name in ("jitter", "another", "é", ""):
        words = _stream(name)
        assert len(words) == 4
        assert all(2**31 <= word < 2**32 for word in words)  # no seed and no number is so large
    assert len({generator(0, name, 1).initial_seed() for name in ("jitter", "another", *_NUMBERED)}) == 12
