"""Local SGD, outer momentum, delay, pairs, push-sum and adaptive consensus: by hand, by identity, by limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import landscape
from landscape import Checkpoint, FailedError, InputError
from landscape.checkpoint.history import UNITS
from landscape.problem.layout import Layout
from landscape.stability import max_stable_step
from landscape.train import algorithms
from landscape.train.algorithms.async_sgd import AsyncSGD
from landscape.train.algorithms.dpsgd import SGP
from landscape.train.optimizer import SGD
from landscape.train.processes.process_group import Group
from landscape.train.recipes import recipe
from landscape.train.run import launch
from landscape.train.run.loop import Trainer
from landscape.train.run.randomness import generator
from landscape.train.topology.mixing import Mixing
from tests.conftest import slow_but
from tests.groups import together

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


def test_synchronous_steps_by_hand() -> None:
    g, w = slopes(), start()
    plain, noisy = [w], [w]
    for t in range(1, 13):
        plain.append(mean(plain[-1]) - LR * mean(g(plain[-1])))
        noise = torch.randn(3, generator=generator(3, "noise", t)).double()
        noisy.append(mean(noisy[-1] - LR * g(mean(noisy[-1]))) + 0.01 * noise)
    path = drive("ssgd", {}, g, 12, start()).mean(1)
    torch.testing.assert_close(path, torch.stack(plain)[:, 0])
    path = drive("ssgd*", {"sigma": 0.01}, g, 12, start()).mean(1)
    torch.testing.assert_close(path, torch.stack(noisy)[:, 0])


@pytest.mark.parametrize("mixing", ["full", "ring(1)", "random-matching"])
def test_decentralised_steps_by_hand(mixing: str) -> None:
    g, awc, atc = slopes(), [start()], [start()]
    for t in range(1, 13):
        m = torch.from_numpy(Mixing(mixing, 4, 3).matrix(t))
        awc.append(m @ awc[-1] - LR * g(awc[-1]))
        atc.append(m @ (atc[-1] - LR * g(atc[-1])))
    torch.testing.assert_close(drive("dpsgd", {"mixing": mixing}, g, 12, start()), torch.stack(awc))
    path = drive("dpsgd", {"mixing": mixing, "order": "atc"}, g, 12, start())
    torch.testing.assert_close(path, torch.stack(atc))


@pytest.mark.parametrize("mixing", ["full", "ring(1)", "random-matching", "lazy(0.4, ring(1))"])
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("buffers", ["keep", "mix"])
def test_decentralised_momentum_by_hand(mixing: str, order: str, buffers: str) -> None:
    g, w, path = slopes(), start(), [start()]
    v = torch.zeros_like(w)
    for t in range(1, 16):
        m = torch.from_numpy(Mixing(mixing, 4, 3).matrix(t))
        v = 0.9 * v + g(w)
        w = m @ w - 0.02 * v if order == "awc" else m @ (w - 0.02 * v)
        v = m @ v if buffers == "mix" else v
        path.append(w)
    options = {"mixing": mixing, "order": order, "buffers": buffers}
    torch.testing.assert_close(drive("dpsgd", options, g, 15, start(), 0.02, 0.9), torch.stack(path))


@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("buffers", ["keep", "mix"])
@pytest.mark.parametrize("mixing", slow_but(["random-matching"], ["full", "ring(1)", "random-matching"]))
def test_momentum_is_stable_up_to_the_limit_of_the_rule(mixing: str, order: str, buffers: str) -> None:
    options = {"mixing": mixing, "order": order, "buffers": buffers}
    rule = algorithms.make("dpsgd", options, learners=4, seed=3)
    limit = rule.stability_limit(0.5)
    assert limit is not None
    apart = torch.tensor([1.0, -2.0, 0.5, 0.5], dtype=torch.float64)[:, None]
    path = drive("dpsgd", options, lambda w: w, 600, apart, 0.97 * limit, 0.5)
    assert float(path[-1].norm()) < 1e-3
    if mixing != "random-matching":  # whose limit is one in mean square
        grown = drive("dpsgd", options, lambda w: w, 600, apart + 1e-3, 1.03 * limit, 0.5)
        assert float(grown[-1].norm()) > 1e3 or not torch.isfinite(grown[-1]).all()


def test_mixed_buffers_are_sent() -> None:
    rule = algorithms.make("dpsgd", {"mixing": "ring(1)", "buffers": "mix"}, learners=4, seed=0)
    optimizer = SGD(0.9)
    optimizer.start(Layout(()), start())
    rule.update_optimizer_state(optimizer, 1)
    assert rule.communication_cost(1) == (4.0, 1)


def test_local_sgd_by_hand() -> None:
    g, w = slopes(), start()
    expected = [w]
    for t in range(1, 13):
        w = w - LR * g(w)
        if t <= 3 or t in (7, 11):  # three synchronous steps, then periods of four
            w = mean(w)
        expected.append(w)
    path = drive("local-sgd", {"period": 4, "start": 3}, g, 12, start())
    torch.testing.assert_close(path, torch.stack(expected))


def test_hierarchical_averaging_by_hand() -> None:
    g, w = slopes(), start()
    expected = [w]
    for t in range(1, 13):
        w = w - LR * g(w)
        if t % 6 == 0:
            w = mean(w)
        elif t % 2 == 0:
            w = torch.cat([mean(w[:2]), mean(w[2:])])
        expected.append(w)
    path = drive("local-sgd", {"period": 6, "nodes": 2, "node_period": 2}, g, 12, start())
    torch.testing.assert_close(path, torch.stack(expected))


@pytest.mark.parametrize("mixing", ["none", "ring(1)"])
@pytest.mark.parametrize("buffers", ["keep", "reset", "average"])
def test_slowmo_by_hand(mixing: str, buffers: str) -> None:
    g, w, a, beta, m = slopes(), start(), 0.8, 0.6, 0.5
    matrix = torch.from_numpy(Mixing("ring(1)" if mixing != "none" else "nodes(4)", 4, 0).matrix(1))
    old, u, v, expected = w[0], torch.zeros(3).double(), torch.zeros_like(w), [w]

    def lr(t: int) -> float:
        return LR if t < 7 else LR / 3

    for t in range(1, 16):
        v = m * v + g(w)
        w = matrix @ w - lr(t) * v
        if t % 3 == 0:
            u = beta * u + (old - w.mean(0)) / lr(t)
            old = old - a * lr(t) * u
            w = old.expand_as(w)
            v = {"keep": v, "reset": 0 * v, "average": mean(v)}[buffers]
        expected.append(w)
    options = {"period": 3, "slow_lr": a, "slow_momentum": beta, "mixing": mixing, "buffers": buffers}
    path = drive("slowmo", options, g, 15, start(), lr, m)
    torch.testing.assert_close(path, torch.stack(expected))


def test_diloco_is_torchs_nesterov_outside() -> None:
    g, w = slopes(), start()
    outer = torch.nn.Parameter(w[0].clone())
    sgd = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    expected = [w]
    for t in range(1, 16):
        w = w - LR * g(w)
        if t % 5 == 0:
            outer.grad = outer.detach() - w.mean(0)
            sgd.step()
            w = outer.detach().expand_as(w).clone()
        expected.append(w)
    torch.testing.assert_close(drive("diloco", {"period": 5}, g, 15, start()), torch.stack(expected))


def test_delayed_gradients_by_the_recursion() -> None:
    g, tau, m = slopes(), 3, 0.7
    xs = [start()[0]] * (tau + 1)
    for _ in range(20):
        xs.append(xs[-1] - LR * g(xs[-1 - tau].expand(4, -1)).mean(0))
    path = drive("async-sgd", {"delay": tau}, g, 20, start()).mean(1)
    torch.testing.assert_close(path, torch.stack(xs[tau:]))
    aware = drive("async-sgd", {"delay": tau, "staleness_aware": True}, g, 20, start(), 0.3).mean(1)
    # The first τ gradients are of the start, 0, 1, 2 steps old: rates α, α, α/2, then α/3.
    xs = [start()[0]] * (tau + 1)
    for t in range(20):
        rate = 0.3 / max(1, min(t, tau))
        xs.append(xs[-1] - rate * g(xs[-1 - tau].expand(4, -1)).mean(0))
    torch.testing.assert_close(aware, torch.stack(xs[tau:]))
    # DESIGN: v_{t+1} = m v_{t−τ} − ηg(x_{t−τ}).
    xs, vs = [start()[0]] * (tau + 1), [torch.zeros(3).double()] * (tau + 1)
    for _ in range(30):
        vs.append(m * vs[-1 - tau] - LR * g(xs[-1 - tau].expand(4, -1)).mean(0))
        xs.append(xs[-1] + vs[-1])
    shifted = drive("async-sgd", {"delay": tau, "shifted": m}, g, 30, start()).mean(1)
    torch.testing.assert_close(shifted, torch.stack(xs[tau:]))


def test_a_random_schedule_by_hand() -> None:
    g, rule = slopes(), AsyncSGD(4, 3, 2, "random")
    x, copies, expected = start()[0], {k: start()[0] for k in range(3)}, [start()[0]]
    workers = [rule.worker(t) for t in range(1, 41)]
    assert set(workers) == {0, 1, 2}
    for k in workers:
        x = x - LR * g(copies[k].expand(4, -1)).mean(0)
        copies[k] = x
        expected.append(x)
    path = drive("async-sgd", {"delay": 2, "schedule": "random"}, g, 40, start()).mean(1)
    torch.testing.assert_close(path, torch.stack(expected))


def test_pairs_with_stale_gradients_by_hand() -> None:
    g, mixing, ws = slopes(), Mixing("random-matching", 4, 3), [start()]
    for t in range(1, 21):
        old = torch.stack([ws[max(0, t - 3)]])[0]
        ws.append(torch.from_numpy(mixing.matrix(t)) @ ws[-1] - LR * g(old))
    torch.testing.assert_close(drive("ad-psgd", {"delay": 2}, g, 20, start()), torch.stack(ws))
    ws = [start()]
    for t in range(1, 21):
        most = min(2, t - 1)
        delays = torch.randint(most + 1, (4,), generator=generator(3, "delay", t)).tolist()
        old = torch.stack([ws[t - 1 - d][j] for j, d in enumerate(delays)])
        ws.append(torch.from_numpy(mixing.matrix(t)) @ ws[-1] - LR * g(old))
    path = drive("ad-psgd", {"delay": 2, "schedule": "random"}, g, 20, start())
    torch.testing.assert_close(path, torch.stack(ws))


def test_push_sum_refuses_a_graph_that_is_not_strongly_connected(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "p.csv", [[1, 0.5, 0], [0, 0.5, 0.5], [0, 0, 0.5]], delimiter=",")
    with pytest.raises(InputError, match=r"algorithm.graph: .*p.csv is not strongly connected \(3 comp"):
        SGP(3, 0, str(tmp_path / "p.csv"))


@pytest.mark.parametrize("graph", ["random", "one-peer-exponential", "file"])
def test_push_sum_by_algorithm_1(graph: str, tmp_path: Path) -> None:
    g, x, w = slopes(), start(), torch.ones(4).double()
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
        x, w = p @ (x - LR * g(z)), p @ w
        z = x / w[:, None]
        expected.append(z)
    path = drive("sgp", {"graph": graph}, g, 30, start())
    torch.testing.assert_close(path, torch.stack(expected))
    assert (float((w - 1).abs().max()) > 0.1) == (graph != "one-peer-exponential")


def test_adaptive_consensus_by_hand() -> None:
    g, w, ws = slopes(), start(), [start()]
    matrix = torch.from_numpy(Mixing("ring(1)", 4, 3).matrix(1))

    def lr(t: int) -> float:
        return LR * 0.9 ** (t - 1)

    for t in range(1, 21):
        gamma = (lr(t) / LR) ** 2
        w = (1 - gamma) * w + gamma * matrix @ w - lr(t) * g(w)
        ws.append(w)
    path = drive("dsgd-ac", {"mixing": "ring(1)", "power": 2.0}, g, 20, start(), lr)
    torch.testing.assert_close(path, torch.stack(ws))


SMALL: dict[str, Any] = {
    "name": "small",
    "learners": 4,
    "batch": 40,
    "lr": 0.1,
    "steps": 24,
    "dtype": "float64",
    "model": {"name": "mlp", "widths": [6, 8, 3], "activation": "tanh"},
    "data": {"name": "synthetic", "samples": 200, "dimension": 6, "classes": 3},
    "decompose": {"every": 3},
}


def train(algorithm: dict[str, Any], **changes: Any) -> Checkpoint:
    return Trainer(recipe.from_values(SMALL | {"algorithm": algorithm} | changes)).run()


@pytest.mark.parametrize(
    ("one", "other", "momentum"),
    [
        ({"name": "slowmo", "period": 4, "slow_momentum": 0.0}, {"name": "local-sgd", "period": 4}, 0.8),
        ({"name": "local-sgd", "period": 1}, {"name": "ssgd"}, 0.0),
        ({"name": "local-sgd", "period": 1}, {"name": "ssgd"}, 0.8),
        ({"name": "local-sgd", "period": 9, "start": 30}, {"name": "ssgd"}, 0.8),
        ({"name": "local-sgd", "period": 4, "mixing": "full", "order": "atc"}, {"name": "ssgd"}, 0.0),
        ({"name": "slowmo", "period": 30, "mixing": "ring(1)"}, {"name": "dpsgd", "mixing": "ring(1)"}, 0.8),
        ({"name": "diloco", "period": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
         {"name": "local-sgd", "period": 4}, 0.8),
        ({"name": "local-sgd", "period": 4, "nodes": 4}, {"name": "local-sgd", "period": 4}, 0.0),
        ({"name": "async-sgd", "delay": 0}, {"name": "ssgd"}, 0.8),
        ({"name": "ad-psgd", "delay": 0}, {"name": "dpsgd", "mixing": "random-matching"}, 0.8),
        ({"name": "sgp", "graph": "ring(1)"}, {"name": "dpsgd", "mixing": "ring(1)", "order": "atc"}, 0.8),
        ({"name": "dsgd-ac", "mixing": "ring(1)"}, {"name": "dpsgd", "mixing": "ring(1)"}, 0.8),
    ],
)  # fmt: skip
def test_rules_that_are_the_same(one: dict[str, Any], other: dict[str, Any], momentum: float) -> None:
    a, b = (train(rule, optimizer={"name": "sgd", "momentum": momentum}) for rule in (one, other))
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-11, atol=1e-12)
    for column in ("alpha_e", "delta"):  # the whole path, not its end alone
        np.testing.assert_allclose(a.history[column], b.history[column], rtol=1e-8, atol=1e-14)


def test_one_step_periods_with_reset_buffers_are_ssgd_without_momentum() -> None:
    reset = {"name": "local-sgd", "period": 1, "buffers": "reset"}
    with_momentum = train(reset, optimizer={"name": "sgd", "momentum": 0.9})
    torch.testing.assert_close(with_momentum.mean, train({"name": "ssgd"}).mean, rtol=1e-11, atol=1e-12)


RULES: dict[str, dict[str, Any]] = {
    "synchronous": {"name": "ssgd"},
    "injected noise": {"name": "ssgd*", "sigma": 0.01},
    "mixing": {"name": "dpsgd", "mixing": "ring(1)"},
    "adapt, then combine": {"name": "dpsgd", "mixing": "random-matching", "order": "atc"},
    "local": {"name": "local-sgd", "period": 4, "start": 6},
    "nodes": {"name": "local-sgd", "period": 4, "nodes": 2, "node_period": 2},
    "slowmo": {"name": "slowmo", "period": 4},
    "diloco": {"name": "diloco", "period": 6},
    "async": {"name": "async-sgd", "delay": 3},
    "random": {"name": "async-sgd", "delay": 3, "schedule": "random"},
    "aware": {"name": "async-sgd", "delay": 3, "staleness_aware": True},
    "shifted": {"name": "async-sgd", "delay": 3, "shifted": 0.5},
    "pairs": {"name": "ad-psgd", "delay": 2},
    "push": {"name": "sgp", "graph": "random"},
    "one-peer": {"name": "sgp"},
    "adaptive": {"name": "dsgd-ac", "mixing": "ring(1)"},
}


@pytest.mark.parametrize("name", RULES)
def test_the_decompositions_identities_hold_for_every_rule(name: str) -> None:
    h = train(RULES[name], schedule={"cosine": 40.0}).history
    due = np.isfinite(h["alpha_e"])
    assert due.sum() == 8
    r = {column: values[due] for column, values in h.items()}
    np.testing.assert_allclose(
        r["alpha_e"] ** 2 * r["grad_norm2"] + r["delta"], r["displacement2"], rtol=1e-9
    )
    plain = np.isfinite(r["delta_s"])
    split = r["delta_s"] + r["delta_2"] + r["delta_cross"]
    if name == "injected noise":  # which is in delta alone
        assert (r["delta"] > split).all()
    else:
        np.testing.assert_allclose(split[plain], r["delta"][plain], rtol=1e-9)
    # Eq. 4 splits steps −α × gradient: not an outer step, shifted momentum, or unequal push-sum weights.
    steps = {"slowmo": r["step"] % 4 != 0, "diloco": r["step"] % 6 != 0}
    expected = steps.get(name, np.full(8, name not in ("shifted", "aware", "push")))
    np.testing.assert_array_equal(plain, expected)


def test_communication_is_counted() -> None:
    vector = 8 * (6 * 8 + 8 + 8 * 3 + 3)  # float64
    reduce = 2 * 3 / 4 * vector

    def counted(algorithm: dict[str, Any]) -> tuple[list[float], list[float]]:
        h = train(algorithm, steps=6, decompose={"every": 0}).history
        return h["comm_bytes"].tolist(), h["comm_rounds"].tolist()

    assert counted({"name": "ssgd"}) == ([reduce] * 6, [1] * 6)
    assert counted({"name": "dpsgd", "mixing": "ring(1)"}) == ([2 * vector] * 6, [1] * 6)
    local = {"name": "local-sgd", "period": 3}
    assert counted(local) == ([0, 0, reduce] * 2, [0, 0, 1] * 2)
    assert counted(local | {"name": "slowmo"}) == counted(local)
    post = local | {"start": 1, "period": 5}
    assert counted(post) == ([reduce, 0, 0, 0, 0, reduce], [1, 0, 0, 0, 0, 1])
    nodes = {"name": "local-sgd", "period": 6, "nodes": 2, "node_period": 2}
    assert counted(nodes) == ([0, vector, 0, vector, 0, reduce], [0, 1, 0, 1, 0, 1])
    assert counted({"name": "ad-psgd"}) == ([vector] * 6, [1] * 6)
    assert counted({"name": "sgp", "graph": "random"}) == ([vector] * 6, [1] * 6)
    assert counted({"name": "async-sgd", "delay": 2}) == ([2 * vector] * 6, [0] * 6)
    assert {"comm_bytes", "comm_rounds"} <= UNITS.keys()


def growth(name: str, options: dict[str, Any], lr: float, n: int, momentum: float, steps: int) -> float:
    """How much larger the learners' farthest weight gets, from early on to the end, on the quadratic ½w²."""
    weights = torch.ones(n, 1, dtype=torch.float64)
    kick = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None] * (n > 1)
    first = [True]

    def gradient(w: Tensor) -> Tensor:  # the first gradients tell the learners apart
        kicked, first[0] = w + first[0] * kick, False
        return kicked

    size = drive(name, options, gradient, steps, weights, lr, momentum).abs().amax((1, 2))
    size = torch.where(torch.isfinite(size), size, torch.inf)
    quarter = steps // 4
    return float(size[-quarter:].max() / size[quarter : 2 * quarter].max())


LIMITS: list[tuple[str, dict[str, Any], int, float, int]] = [
    *(("async-sgd", {"delay": tau}, 1, m, 3000) for tau, m in ((0, 0.9), (1, 0.0), (3, 0.9))),
    ("async-sgd", {"delay": 3, "shifted": 0.9}, 1, 0.0, 3000),
    ("async-sgd", {"delay": 3, "staleness_aware": True}, 1, 0.0, 3000),
    ("ad-psgd", {"delay": 2, "mixing": "ring(1)"}, 5, 0.0, 2000),
    ("dpsgd", {"mixing": "ring(1)"}, 5, 0.8, 2000),
    ("dpsgd", {"mixing": "ring(1)", "order": "atc"}, 5, 0.8, 2000),
    ("sgp", {"graph": "one-peer-exponential"}, 4, 0.0, 2000),
    ("sgp", {"graph": "ring(1)"}, 5, 0.8, 2000),
    ("local-sgd", {"period": 4}, 4, 0.8, 2000),
    ("local-sgd", {"period": 4, "nodes": 2, "node_period": 2}, 4, 0.8, 2000),
    ("slowmo", {"period": 3, "slow_momentum": 0.7}, 4, 0.0, 2000),
    ("slowmo", {"period": 3, "mixing": "ring(1)", "buffers": "average"}, 4, 0.5, 2000),
    ("diloco", {"period": 3}, 4, 0.0, 2000),
    ("dsgd-ac", {"mixing": "ring(1)"}, 5, 0.0, 2000),
]  # fmt: skip
SLOW = [
    ("local-sgd", {"period": 4}, 4, 0.0, 2000),
    ("local-sgd", {"period": 4, "buffers": "reset"}, 4, 0.8, 2000),
    *(("async-sgd", {"delay": tau}, 1, m, 3000) for tau, m in ((0, 0.0), (1, 0.9), (3, 0.0))),
    *(("async-sgd", {"delay": tau, "shifted": 0.9}, 1, 0.0, 3000) for tau in (0, 1)),
    *(("async-sgd", {"delay": tau}, 1, m, steps) for tau, steps in ((7, 8000), (31, 40_000)) for m in (0.0, 0.9)),
    *(("async-sgd", {"delay": tau, "shifted": 0.9}, 1, 0.0, steps) for tau, steps in ((7, 8000), (31, 40_000))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "n", "momentum", "steps"),
    [*LIMITS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_runs_blow_up_two_percent_above_the_stated_limit_and_not_below(
    name: str, options: dict[str, Any], n: int, momentum: float, steps: int
) -> None:
    limit = algorithms.make(name, options, learners=n, seed=3).stability_limit(momentum)
    assert limit is not None
    assert growth(name, options, 0.98 * limit, n, momentum, steps) < 1
    assert growth(name, options, 1.02 * limit, n, momentum, steps) > 1


def test_push_sum_with_unequal_weights_has_a_limit_of_its_own(tmp_path: Path) -> None:
    p = np.eye(4) * 0.3
    p[0, 1:] += 0.7
    p[:, 0] = [0.4, 0.2, 0.2, 0.2]
    np.savetxt(tmp_path / "p.txt", p)
    options = {"graph": str(tmp_path / "p.txt")}
    limit = algorithms.make("sgp", options, learners=4, seed=3).stability_limit()
    assert limit == pytest.approx(2.3866, abs=1e-4)  # the hub has most of the weight, and small steps
    assert growth("sgp", options, 0.98 * limit, 4, 0.0, 2000) < 1
    assert growth("sgp", options, 1.02 * limit, 4, 0.0, 2000) > 1


def test_limits_that_are_not_known_are_none() -> None:
    def limit(name: str, options: dict[str, Any], momentum: float = 0.0) -> float | None:
        return algorithms.make(name, options, learners=4, seed=0).stability_limit(momentum)

    assert limit("dpsgd", {"mixing": "one-peer-exponential"}, 0.9) is None
    assert limit("ad-psgd", {"schedule": "random"}) is None
    assert limit("sgp", {"graph": "random"}) is None
    assert limit("async-sgd", {"delay": 3, "schedule": "random"}, 0.9) is None
    assert limit("async-sgd", {"delay": 3, "shifted": 0.5}, 0.9) is None
    assert limit("async-sgd", {"delay": 31}) == max_stable_step(31)
    chosen = recipe.from_values(SMALL | {"algorithm": {"name": "ssgd"}, "optimizer": {"name": "lamb"}})
    assert (chosen.stability_limit(), chosen.describe()) == (None, "")
    mixed = recipe.from_values(
        SMALL | {"algorithm": {"name": "dpsgd", "mixing": "ring(1)"}, "optimizer": {"name": "lamb"}}
    )
    assert mixed.describe().endswith("ω_min -0.3333; the limit with this optimizer is not known")
    heavy = recipe.from_values(
        SMALL | {"algorithm": {"name": "ssgd"}, "optimizer": {"name": "sgd", "momentum": 0.9}}
    )
    assert heavy.describe() == "steps with momentum 0.9 are stable while lr·λ_max < 3.8"


def against_post_local(group: Group) -> list[float]:
    """The largest difference of our learner from torch's after 24 steps, for two settings of torch's warm-up.

    Six synchronous steps, then periods of four, momentum 0.8.
    """
    # Here, not above: the second warns when imported, of torch.jit.
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    values = SMALL | {"learners": 2, "optimizer": {"name": "sgd", "momentum": 0.8}}
    chosen = recipe.from_values(values | {"algorithm": {"name": "local-sgd", "period": 4, "start": 6}})
    trainer = Trainer(chosen, group=group)
    assert trainer.train.tensors is not None
    x, y = trainer.train.tensors
    ends = []
    for warmup in (6 + 4 - 1, 6):
        model = landscape.models.build("mlp", widths=[6, 8, 3], activation="tanh").double()
        torch.nn.utils.vector_to_parameters(trainer.train.theta.clone(), model.parameters())
        local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
        optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=4, warmup_steps=warmup))
        for t in range(1, 25):
            rows = torch.randint(len(y), (2, 20), generator=generator(0, "batch", t))[group.rank]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            if t <= 6:  # what torch's communication hook does for the first start_localSGD_iter steps
                for p in model.parameters():
                    assert p.grad is not None
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= 2
            optimizer.step()
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    ours = trainer.run().weights[0]
    return [float((ours - theirs).abs().max()) for theirs in ends]


@pytest.mark.slow
def test_post_local_sgd_is_torchs_but_for_when_it_first_averages() -> None:
    for same, documented in together(2, against_post_local):
        assert same < 1e-12
        assert documented > 1e-6  # as torch documents it: averages after *one* local step, then every four


def test_another_rules_state_is_refused(tmp_path: Path) -> None:
    values = SMALL | {"algorithm": RULES["slowmo"], "steps": 5}
    launch.launch(recipe.from_values(values), tmp_path / "run")
    end = landscape.load(tmp_path / "run" / "last.h5")
    assert {name: tuple(t.shape) for name, t in end.shared.items()} == {
        "anchor": (83,),
        "slow_momentum": (83,),
    }
    end.shared.pop("anchor")
    with pytest.raises(FailedError, match="/shared/anchor holds nothing, its run needs \\(83,\\)"):
        Trainer(recipe.from_values(values), checkpoint=end)


@pytest.mark.parametrize(
    ("algorithm", "match"),
    [
        ({"name": "local-sgd"}, "algorithm.period: missing"),
        ({"name": "local-sgd", "period": 0}, "algorithm.period: 0 is not allowed"),
        (
            {"name": "local-sgd", "period": 4, "nodes": 3},
            "algorithm.nodes: 3 is not allowed, it must divide 4",
        ),
        ({"name": "local-sgd", "period": 4, "nodes": 2, "node_period": 3}, "algorithm.node_period: 3"),
        ({"name": "local-sgd", "period": 4, "nodes": 2, "mixing": "full"}, "not allowed together"),
        (
            {"name": "slowmo", "period": 4, "slow_momentum": 1.0},
            "algorithm.slow_momentum: 1.0 is not allowed",
        ),
        ({"name": "slowmo", "period": 4, "buffers": "rest"}, "algorithm.buffers: 'rest' is not allowed"),
        ({"name": "async-sgd", "delay": -1}, "algorithm.delay: -1 is not allowed"),
        (
            {"name": "async-sgd", "delay": 1, "schedule": "robin"},
            "algorithm.schedule: 'robin' is not allowed",
        ),
        ({"name": "sgp", "graph": "rnig(1)"}, "algorithm.graph: 'rnig\\(1\\)' is not known"),
        ({"name": "dsgd-ac", "power": -1.0}, "algorithm.power: -1.0 is not allowed"),
    ],
)
def test_bad_options(algorithm: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        recipe.from_values(SMALL | {"algorithm": algorithm})


def test_a_cosine_that_ends_at_zero_leaves_slow_momentum_finite() -> None:
    end = train(RULES["slowmo"], schedule={"cosine": 23.0})
    assert end.lr == 0
    assert bool(torch.isfinite(end.weights).all())
    assert math.isfinite(float(end.shared["slow_momentum"].norm()))
