"""Checks of what a run is made of: update rules, optimizers, topologies and instruments."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.problem.layout import Layout, Slot
from landscape.testing.checks import lent, refuses, register, require, run, same_bits
from landscape.testing.interface import RECIPE
from landscape.train import algorithms, optimizer
from landscape.train.algorithms.base import Rule
from landscape.train.instruments.base import Instrument
from landscape.train.optimizer.base import Optimizer
from landscape.train.optimizer.sgd import SGD
from landscape.train.recipes import recipe
from landscape.train.run.loop import Hooks, Trainer
from landscape.train.topology.mixing import Mixing

#: Of the checks without a model.
LAYOUT = Layout((Slot("w", (3, 4), 0, 12, "weight"), Slot("b", (3,), 12, 3, "bias")))


@dataclass(frozen=True)
class _Run:
    """A run with the recipe RECIPE and some changes."""

    changes: Mapping[str, Any]
    device: str

    def recipe(self, **more: Any) -> recipe.Recipe:
        return recipe.from_values({**RECIPE, **self.changes, **more})

    def end(self, **more: Any) -> Checkpoint:
        return Trainer(self.recipe(**more), device=self.device).run()

    def resumes(self) -> Checkpoint:
        """The end of a run that gives the same bits again, and from each of its checkpoints, one of them a file."""
        saved: list[Checkpoint] = []
        whole = Trainer(self.recipe(), device=self.device, hooks=Hooks(save=saved.append)).run()
        same_bits(whole, self.end())
        with tempfile.TemporaryDirectory() as folder:
            saved[1].save(Path(folder) / "last.h5")
            for state in (Checkpoint.load(Path(folder) / "last.h5"), *saved[2:-1]):
                same_bits(whole, Trainer(self.recipe(), device=self.device, checkpoint=state).run())
        return whole


@dataclass(frozen=True)
class _Rule:
    name: str
    options: Mapping[str, Any]
    refused: Mapping[str, Any]
    sharp: bool
    device: str

    def make(self, learners: int = 4, **changes: Any) -> Rule:
        return algorithms.make(self.name, {**self.options, **changes}, learners=learners, seed=3)

    @property
    def run(self) -> _Run:
        return _Run({"algorithm": {"name": self.name, **self.options}}, self.device)

    def drive(
        self, gradient: Callable[[Tensor], Tensor], weights: Tensor, lr: float, momentum: float, steps: int
    ) -> Tensor:
        """The weights after ``steps`` steps without model and data."""
        rule, memory = self.make(len(weights)), SGD(momentum)
        rule.peak_lr = lr
        rule.start(weights)
        memory.start(Layout(()), weights)
        for t in range(1, steps + 1):
            rule.begin(weights, t)
            points = rule.gradient_points(weights)
            directions = memory.directions(gradient(points), points, lr, t)
            weights = rule.finish(weights, directions, lr, t).clone()
            rule.update_optimizer_state(memory, t)
        return weights


def check_rule(
    rule: type[Rule] | str,
    options: Mapping[str, Any] | None = None,
    *,
    refused: Mapping[str, Any] | None = None,
    sharp: bool = True,
    device: str = "cpu",
    only: str | None = None,
) -> None:
    """Check an update rule: resumed at every step, its columns, its stability limit, its cost, refusals.

    Args:
        rule: the class; or its name.
        options: of the recipe.
        refused: option -> a value of it that must be refused in one line.
        sharp: whether steps diverge above its stability limit; not where the limit holds on average only.
        device: where it runs.
        only: the check that is run, of ``CHECKS["rule"]``; all by default.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> from landscape.train.algorithms.dpsgd import DPSGD
        >>> check_rule(DPSGD, {"mixing": "ring(1)"}, refused={"order": "act"})
    """
    with lent(registry.algorithms, rule, "rule-under-test") as name:
        run("rule", _Rule(name, options or {}, refused or {}, sharp, device), only)


@register("rule")
def resumes(case: _Rule) -> None:
    """A run gives the same bits again and from its checkpoints, in the recipe's precision."""
    end = case.run.resumes()
    require(
        end.weights.shape[0] == 4 and end.weights.dtype == torch.float64, "weights (n, P) changed their form"
    )
    require(torch.isfinite(end.weights).all(), "the weights are not finite")
    low = case.run.end(dtype="float32", steps=3)
    require(low.weights.dtype == torch.float32, "float32 weights change their type")


@register("rule")
def columns(case: _Rule) -> None:
    """The history has the rule's columns with their units, and numbers in each of them."""
    rule, end = case.make(), case.run.end()
    for name, unit in rule.columns.items():
        require(end.units[name] == unit, f"the unit of {name} is {end.units[name]!r}, not {unit!r}")
        require(np.isfinite(end.history[name]).any(), f"{name} has no number in any step")


@register("rule")
def step(case: _Rule) -> None:
    """A step writes to no tensor that it is given, so that it can be undone, and repeated."""
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64, device=case.device).reshape(4, 3)
    rule, kept = case.make(), weights.clone()
    rule.start(weights)
    before = {**rule.state}, {**rule.shared}
    values = copy.deepcopy(before)
    rule.begin(weights, 1)
    points = rule.gradient_points(weights)
    require(points.shape == weights.shape, f"gradient_points has shape {tuple(points.shape)}, not (n, P)")
    first = rule.finish(weights, points.clone(), 0.1, 1).clone()
    require(first.shape == weights.shape, f"finish has shape {tuple(first.shape)}, not (n, P)")
    require(torch.equal(weights, kept), "a step writes to the weights that it is given")
    for mine, then in zip(before, values, strict=True):
        for name, tensor in mine.items():
            require(torch.equal(tensor, then[name]), f"a step writes to the state '{name}' in place")
    rule.state, rule.shared = {**before[0]}, {**before[1]}
    rule.begin(weights, 1)
    again = rule.finish(weights, rule.gradient_points(weights).clone(), 0.1, 1)
    require(torch.equal(first, again), "a step that is undone and repeated gives other weights")


@register("rule")
def limit(case: _Rule) -> None:
    """On a quadratic, steps without and with momentum shrink 3% below the stated limit and grow above."""
    apart = torch.tensor([[1.0], [-2.0], [0.5], [0.8]], dtype=torch.float64, device=case.device)
    for momentum in (0.0, 0.5):
        bound = case.make().stability_limit(momentum)
        if bound is None:
            continue
        low = float(case.drive(lambda w: w, apart, 0.97 * bound, momentum, 600).norm())
        require(
            low < 0.1, f"with momentum {momentum} and ηλ 3% below {bound:.4g} the weights end at {low:.2g}"
        )
        high = case.drive(lambda w: w, apart, 1.03 * bound, momentum, 600)
        grown = not high.isfinite().all() or float(high.norm()) > 100
        require(grown or not case.sharp, f"with momentum {momentum} steps are stable above {bound:.4g}")


@register("rule")
def cost(case: _Rule) -> None:
    """What a step sends is a number of vectors and of rounds, for one learner none."""
    for t in range(1, 9):
        vectors, rounds = case.make().communication_cost(t)
        require(
            vectors >= 0 and rounds == int(rounds) >= 0,
            f"step {t} sends {vectors} vectors in {rounds} rounds",
        )
        require(bool(vectors) == bool(rounds), f"step {t} sends {vectors} vectors in {rounds} rounds")


@register("rule")
def refusals(case: _Rule) -> None:
    """Options and values that are not allowed are refused in one line."""
    refuses("algorithm", "no_such_option", lambda: case.make(no_such_option=1))
    for option, value in case.refused.items():
        refuses(f"algorithm.{option}", value, lambda option=option, value=value: case.make(**{option: value}))  # type: ignore[misc]


@dataclass(frozen=True)
class _Optimizer:
    name: str
    options: Mapping[str, Any]
    refused: Mapping[str, Any]
    reference: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    device: str

    def make(self, learners: int = 3) -> tuple[Optimizer, Tensor]:
        """It, started, and the weights of its learners."""
        made = optimizer.make(self.name, dict(self.options))
        weights = torch.linspace(-1, 1, learners * LAYOUT.size, dtype=torch.float64, device=self.device)
        made.start(LAYOUT, weights.reshape(learners, -1))
        return made, weights.reshape(learners, -1)

    def path(self, of: Optimizer, weights: Tensor, steps: range, lr: float = 0.01) -> Tensor:
        """The weights after steps on ½‖w − 2‖² of which learner j's is scaled by 1 + j."""
        scale = torch.arange(1.0, len(weights) + 1, dtype=weights.dtype, device=weights.device)[:, None]
        for t in steps:
            gradients = scale * (weights - 2)
            kept, state = gradients.clone(), {**of.state}
            values = copy.deepcopy(state)
            weights = weights - lr * of.directions(gradients, weights, lr, t)
            require(torch.equal(gradients, kept), "a step writes to the gradients that it is given")
            for name, tensor in state.items():
                require(torch.equal(tensor, values[name]), f"a step writes to the state '{name}' in place")
        return weights


def check_optimizer(
    optimizer: type[Optimizer] | str,
    options: Mapping[str, Any] | None = None,
    *,
    refused: Mapping[str, Any] | None = None,
    reference: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    device: str = "cpu",
    only: str | None = None,
) -> None:
    """Check an optimizer: each learner by itself, restored, against another one, in a run, refusals.

    Args:
        optimizer: the class; or a name that recipes know.
        options: of the recipe.
        refused: option -> a value of it that must be refused in one line.
        reference: parameters -> an optimizer of PyTorch with lr 0.01 that takes the same steps.
        device: where it is computed.
        only: the check that is run, of ``CHECKS["optimizer"]``; all by default.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_optimizer("sgd", reference=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    """
    with lent(registry.optimizers, optimizer, "optimizer-under-test") as name:
        run("optimizer", _Optimizer(name, options or {}, refused or {}, reference, device), only)


@register("optimizer")
def learners(case: _Optimizer) -> None:
    """A learner's steps do not depend on the others, and a step writes to no tensor that it is given."""
    made, weights = case.make()
    together = case.path(made, weights, range(1, 6))
    alone, _ = case.make(1)
    torch.testing.assert_close(case.path(alone, weights[:1], range(1, 6)), together[:1])
    require(together.isfinite().all() and not torch.equal(together, weights), "the steps go nowhere")


@register("optimizer")
def restored(case: _Optimizer) -> None:
    """With the state of a checkpoint it goes on to the bit, and after a reset as at the start."""
    made, weights = case.make()
    half = case.path(made, weights, range(1, 4))
    other, _ = case.make()
    other.restore(copy.deepcopy(made.state))
    rest = case.path(other, half, range(4, 8))
    require(torch.equal(rest, case.path(made, half, range(4, 8))), "restored it takes other steps")
    made.reset()
    fresh, _ = case.make()
    first = case.path(fresh, weights, range(1, 3))
    require(torch.equal(case.path(made, weights, range(1, 3)), first), "after a reset it takes other steps")
    case_run = _Run({"optimizer": {"name": case.name, **case.options}, "lr": 0.01}, case.device)
    case_run.resumes()


@register("optimizer")
def same_as_reference(case: _Optimizer) -> None:
    """Its steps are those of the reference."""
    if case.reference is None:
        return
    made, weights = case.make(1)
    parameters = [nn.Parameter(view.clone()) for view in LAYOUT.views(weights[0]).values()]
    torchs = case.reference(parameters)
    for _ in range(5):
        for p in parameters:
            p.grad = p.detach() - 2
        torchs.step()
    expected = torch.cat([p.detach().flatten() for p in parameters])
    torch.testing.assert_close(case.path(made, weights, range(1, 6))[0], expected)


@register("optimizer")
def refused_options(case: _Optimizer) -> None:
    """Options and values that are not allowed are refused in one line."""
    unknown = {**case.options, "no_such_option": 1}
    refuses("optimizer", "no_such_option", lambda: optimizer.make(case.name, unknown))
    for option, value in case.refused.items():
        given = {**case.options, option: value}
        refuses(f"optimizer.{option}", value, lambda given=given: optimizer.make(case.name, given))  # type: ignore[misc]


def check_topology(spec: str, learners: int = 6, *, device: str = "cpu", only: str | None = None) -> None:
    """Check who mixes with whom: doubly stochastic matrices, the mean kept, gap, ω_min and stability limit.

    Args:
        spec: as in ``algorithm.mixing``.
        learners: n.
        device: where the weights are.
        only: the check that is run, of ``CHECKS["topology"]``; all by default.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_topology("ring(1)", 5)
    """
    run("topology", (Mixing(spec, learners, 3), learners, device), only)


@register("topology")
def matrices(case: tuple[Mixing, int, str]) -> None:
    """Every matrix is doubly stochastic; applied to weights it is their product and keeps the mean."""
    mixing, n, device = case
    weights = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    for t in range(1, 9):
        m = mixing.matrix(t)
        require(
            m.shape == (n, n) and m.min() >= 0, f"the matrix of step {t} is no (n, n) matrix of shares ≥ 0"
        )
        for axis in (0, 1):
            np.testing.assert_allclose(m.sum(axis), 1, atol=1e-12)
        mixed = mixing.apply(weights, t)
        torch.testing.assert_close(mixed, torch.from_numpy(m).to(device) @ weights)
        torch.testing.assert_close(mixed.mean(0), weights.mean(0))
        np.testing.assert_array_equal(m, Mixing(mixing.spec, n, mixing.seed).matrix(t))
        require(0 <= mixing.degree(t) <= n - 1 + 1e-12, f"a learner sends {mixing.degree(t)} vectors")


@register("topology")
def spectrum(case: tuple[Mixing, int, str]) -> None:
    """The gap, the smallest eigenvalue and the limit 1 + ω_min are those of the matrices."""
    mixing, n, _ = case
    cycle = mixing.cycle or [mixing.matrix(t) for t in range(1, 5)]
    smallest = min(np.linalg.eigvals(m).real.min() for m in cycle)
    np.testing.assert_allclose(mixing.omega_min, smallest, atol=1e-9)
    if mixing.cycle:
        product = np.linalg.multi_dot([np.eye(n), *cycle, np.eye(n)]) - np.full((n, n), 1 / n)
        left = np.abs(np.linalg.eigvals(product)).max()
        np.testing.assert_allclose((1 - mixing.gap) ** len(cycle), left, atol=1e-7)
    if len(cycle) == 1 and np.array_equal(cycle[0], cycle[0].T):
        np.testing.assert_allclose(mixing.stability_limit, 1 + smallest, atol=1e-9)
    require("\n" not in mixing.describe(), "its description has several lines")


@dataclass(frozen=True)
class _Instrument:
    name: str
    monitor: Mapping[str, Any]
    refused: Mapping[str, Any]
    run: _Run

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "instruments": [self.name],
            "every": 4,
            "draws": 3,
            "samples": 90,
            "rho": 0.05,
            **self.monitor,
        }


def check_instrument(
    instrument: type[Instrument] | str,
    monitor: Mapping[str, Any] | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    refused: Mapping[str, Any] | None = None,
    device: str = "cpu",
    only: str | None = None,
) -> None:
    """Check an instrument: its columns, a run that it leaves as it is, resumed within a window, refusals.

    Args:
        instrument: the class; or its name.
        monitor: of the recipe's table "monitor".
        changes: of the recipe, such as an optimizer that the instrument needs.
        refused: key of the recipe -> a value with which the instrument must be refused in one line.
        device: where the run is.
        only: the check that is run, of ``CHECKS["instrument"]``; all by default.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_instrument("lambda-max")
    """
    with lent(registry.instruments, instrument, "instrument-under-test") as name:
        run("instrument", _Instrument(name, monitor or {}, refused or {}, _Run(changes or {}, device)), only)


@register("instrument")
def measured(case: _Instrument) -> None:
    """Each of its columns has a unit, and numbers at steps where it is due, and at no other."""
    end = case.run.end(monitor=case.settings)
    names = registry.instruments[case.name].columns
    require(names, "it declares no column")
    due = np.arange(1, 13) % 4 == 0
    for name, unit in names.items():
        require(end.units[name] == unit, f"the unit of {name} is {end.units[name]!r}, not {unit!r}")
        require(np.isnan(end.history[name][~due]).all(), f"{name} has numbers at steps where it is not due")
    require(any(np.isfinite(end.history[name][due]).any() for name in names), "it measures nothing")


@register("instrument")
def unseen(case: _Instrument) -> None:
    """The run is to the bit the one that is not measured, and measures the same when it is resumed."""
    moved = _Run({**case.run.changes, "monitor": case.settings}, case.run.device)
    require(torch.equal(moved.resumes().weights, case.run.end().weights), "measuring changes the run")


@register("instrument")
def refused_runs(case: _Instrument) -> None:
    """Runs that it cannot measure are refused in one line."""
    for key, value in case.refused.items():
        table, _, option = key.partition(".")
        settings = {"monitor": case.settings}
        settings |= {table: {**settings.get(table, {}), option: value} if option else value}
        refuses(option or table, value, lambda settings=settings: case.run.end(**settings))  # type: ignore[misc]
