"""Checks of what a run is made of: update rules, optimizers, topologies and instruments."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.core.options import described
from landscape.core.registry import algorithms
from landscape.problem.layout import Layout, Slot
from landscape.testing.checks import CHECKS, RECIPE, refuses, registered, require, run_checks, same_bits
from landscape.training import optimizer as optimizers
from landscape.training.algorithms import Rule
from landscape.training.instruments import Instrument
from landscape.training.optimizer.base import SGD, Optimizer
from landscape.training.processes.comm import combine
from landscape.training.recipes import recipe
from landscape.training.run.loop import Hooks, Trainer
from landscape.training.topology import Mixing

#: The layout of the weights in checks without a model.
LAYOUT = Layout((Slot("w", (3, 4), 0, 12, "weight"), Slot("b", (3,), 12, 3, "bias")))


def end_of(changes: Mapping[str, Any], device: str, **more: Any) -> Checkpoint:
    """The end of a run of RECIPE with ``changes``; ``more`` are arguments of the Trainer."""
    return Trainer(recipe.from_values({**RECIPE, **changes}), device=device, **more).run()


def resumed(changes: Mapping[str, Any], device: str) -> Checkpoint:
    """The end of a run, after checks that a repeated run and resumed runs give equal bits."""
    checkpoints: list[Checkpoint] = []
    end = end_of(changes, device, hooks=Hooks(save=checkpoints.append))
    same_bits(end, end_of(changes, device))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.h5"
        checkpoints[1].save(path)
        for checkpoint in (Checkpoint.load(path), *checkpoints[2:-1]):
            same_bits(end, end_of(changes, device, checkpoint=checkpoint))
    return end


def check_rule(
    rule: type[Rule] | str, options: Mapping[str, Any] | None = None, *,
    refused: Mapping[str, Any] | None = None, sharp: bool = True, device: str = "cpu",
    only: str | None = None,
) -> None:  # fmt: skip
    """Check an update rule: resumption at every step, columns, stability limit, cost, docstring, refusals.

    Args:
        rule: the class, or its name.
        options: the rule's options in a recipe.
        refused: option -> a value of the option that the rule must refuse, with a message of one line.
        sharp: whether the stability limit is strict, so that steps must diverge above this limit. False: the
            limit holds only on average.
        device: the device of the weights.
        only: the name of one check of ``CHECKS["rule"]`` to run; default: all checks.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> from landscape.training.algorithms.dpsgd import DPSGD
        >>> check_rule(DPSGD, {"mixing": "ring(1)"}, refused={"order": "unknown"})
    """
    with registered(registry.algorithms, rule, "rule-under-test") as name:

        def make(other_options: Mapping[str, Any] | None = None) -> Rule:
            all_options = {**(options or {}), **(other_options or {})}
            new_rule: Rule = algorithms.make(name, all_options, learners=4, seed=3)
            new_rule.peak_lr = 0.1
            return new_rule

        # The recipe of the runs is RECIPE with these changes.
        changes = {"algorithm": {"name": name, **(options or {})}}
        case = SimpleNamespace(
            name=name, make=make, changes=changes, refused=refused or {}, sharp=sharp, device=device
        )
        run_checks("rule", case, only)


def resumes(case: Any) -> None:
    """A run gives the same bits again and from its checkpoints, and has the rule's columns."""
    end = resumed(case.changes, case.device)
    require(len(end.weights) == 4 and end.weights.dtype == torch.float64, "weights (n, P) changed their form")
    require(end.weights.isfinite().all(), "the weights are not finite")
    for name, unit in case.make().columns.items():
        has_numbers = end.units[name] == unit and np.isfinite(end.history[name]).any()
        require(has_numbers, f"{name} has no number in any step, or not the unit {unit!r}")


def rule_step(rule: Rule, weights: Tensor, lr: float, t: int, memory: SGD | None = None) -> Tensor:
    """The weights after a step on ½‖w‖² of each learner."""
    rule.begin(weights, t)
    points = rule.gradient_points(weights)
    directions = memory.directions(points, points, lr, t) if memory else points.clone()
    weights = rule.finish(weights, directions, lr, t).clone()
    if memory:
        rule.update_optimizer_state(memory, t)
    return weights


def step(case: Any) -> None:
    """A step writes to no tensor that it is given, so that it can be undone, and repeated."""
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64, device=case.device).reshape(4, 3)
    rule, weights_before = case.make(), weights.clone()
    rule.start(weights)
    states = {**rule.state}, {**rule.shared}  # the tensors themselves, which a step may replace only
    copies = copy.deepcopy(states)
    result = rule_step(rule, weights, 0.1, 1)
    require(result.shape == weights.shape, f"finish has shape {tuple(result.shape)}, not (n, P)")
    require(torch.equal(weights, weights_before), "a step writes to the weights that it is given")
    for tensors, tensors_before in zip(states, copies, strict=True):
        changed = [name for name in tensors if not torch.equal(tensors[name], tensors_before[name])]
        require(not changed, f"a step writes to the state {changed} in place")
    rule.state, rule.shared = states
    repeated = rule_step(rule, weights, 0.1, 1)
    require(torch.equal(result, repeated), "a step that is repeated gives other weights")
    vectors, rounds = rule.communication_cost(1)
    require(vectors >= 0 and rounds == int(rounds) >= 0, f"a step sends {vectors} vectors in {rounds} rounds")


def growth(rule: Rule, lr: float, momentum: float, device: str) -> float:
    """The largest weight in the last quarter of 1200 steps on ½‖w‖², over the largest in the second quarter.

    The divisor is 1e-13 at least: where a rule adds differences, the rounding of its start stays.
    """
    weights = torch.tensor([[1.0], [-2.0], [0.5], [0.8]], dtype=torch.float64, device=device)
    memory, largest = SGD(momentum), []
    rule.peak_lr = lr
    rule.start(weights)
    memory.start(Layout(()), weights)
    for t in range(1, 1201):
        weights = rule_step(rule, weights, lr, t, memory)
        largest.append(weights.abs().max())
    _, second, _, last = torch.stack(largest).nan_to_num(torch.inf).reshape(4, -1).amax(1).tolist()
    return float("inf") if last == float("inf") else last / max(second, 1e-13)


def limit(case: Any) -> None:
    """On a quadratic, steps without and with momentum shrink 3% below the stated limit and grow above."""
    for momentum in (0.0, 0.5):
        if (bound := case.make().stability_limit(momentum)) is None:
            continue
        low = growth(case.make(), 0.97 * bound, momentum, case.device)
        require(low < 1, f"with momentum {momentum} the weights grow 3% below ηλ = {bound:.4g}")
        high = growth(case.make(), 1.03 * bound, momentum, case.device) if case.sharp else 2.0
        require(high > 1, f"with momentum {momentum} the weights shrink 3% above ηλ = {bound:.4g}")


def documented(case: Any) -> None:
    """The docstring describes each option, and says where its default comes from."""
    rule, texts = registry.algorithms[case.name], dict[str, str]()
    for base in reversed(inspect.getmro(rule)):
        texts |= described(base)
    for name, option in [*inspect.signature(rule).parameters.items()][2:]:  # without learners and seed
        enough = name in texts and (option.default is option.empty or "Source: " in texts[name])
        line = f"{name}: what it is. Source: where its default comes from."
        require(enough, f"the docstring of {rule.__qualname__} needs, below Args, '{line}'")


def rule_refusals(case: Any) -> None:
    """Values that are not allowed are refused in one line."""
    refuses(case.make, case.refused, "algorithm.")


def check_optimizer(
    optimizer: type[Optimizer] | str, options: Mapping[str, Any] | None = None, *,
    refused: Mapping[str, Any] | None = None, device: str = "cpu", only: str | None = None,
    reference: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> None:  # fmt: skip
    """Check an optimizer.

    The steps of a learner must not depend on the other learners. A restored optimizer must continue exactly.
    The steps must be those of ``reference``. A run must work, and wrong options must be refused.

    Args:
        optimizer: the class, or a name that recipes know.
        options: the optimizer's options in a recipe.
        refused: option -> a value of the option that the optimizer must refuse, with a message of one line.
        reference: a function that takes parameters and returns PyTorch's optimizer for them, with lr 0.01;
            both optimizers must make the same steps.
        device: the device of the weights.
        only: the name of one check of ``CHECKS["optimizer"]`` to run; default: all checks.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_optimizer("sgd", reference=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    """
    with registered(registry.optimizers, optimizer, "optimizer-under-test") as name:
        # Three learners with the 15 weights of LAYOUT each.
        weights = torch.linspace(-1, 1, 45, dtype=torch.float64).reshape(3, 15).to(device)

        def make(other_options: Mapping[str, Any] | None = None, learners: int = 3) -> Optimizer:
            all_options = {**(options or {}), **(other_options or {})}
            new_optimizer = optimizers.make(name, all_options)
            new_optimizer.start(LAYOUT, weights[:learners])
            return new_optimizer

        # The recipe of the runs is RECIPE with these changes.
        changes = {"optimizer": {"name": name, **(options or {})}, "lr": 0.01}
        case = SimpleNamespace(
            make=make, changes=changes, refused=refused or {}, reference=reference, device=device,
            weights=weights,
        )  # fmt: skip
        run_checks("optimizer", case, only)


def path(of: Optimizer, weights: Tensor, first: int, last: int) -> Tensor:
    """The weights after steps on ½(1 + j)‖w − 2‖² of learner j, which write to nothing that is given."""
    scale = torch.arange(1.0, len(weights) + 1).to(weights)[:, None]
    for t in range(first, last + 1):
        gradients = scale * (weights - 2)
        tensors = {**of.state, "gradients": gradients}
        before = copy.deepcopy(tensors)
        weights = weights - 0.01 * of.directions(gradients, weights, 0.01, t)
        changed = [name for name in tensors if not torch.equal(tensors[name], before[name])]
        require(not changed, f"a step writes to {changed} in place")
    return weights


def learners(case: Any) -> None:
    """A learner's steps do not depend on the others, and go somewhere."""
    together = path(case.make(), case.weights, 1, 5)
    torch.testing.assert_close(path(case.make(learners=1), case.weights[:1], 1, 5), together[:1])
    require(together.isfinite().all() and not torch.equal(together, case.weights), "the steps go nowhere")


def restored(case: Any) -> None:
    """It resumes from a checkpoint to the bit, in a run, too; after a reset it begins as at the start."""
    original, copied = case.make(), case.make()
    half = path(original, case.weights, 1, 3)
    copied.restore(copy.deepcopy(original.state))
    require(torch.equal(path(copied, half, 4, 7), path(original, half, 4, 7)), "restored its steps differ")
    original.reset()
    first = path(case.make(), case.weights, 1, 2)
    require(torch.equal(path(original, case.weights, 1, 2), first), "after a reset it takes other steps")
    resumed(case.changes, case.device)


def same_as_reference(case: Any) -> None:
    """Its steps are those of the reference."""
    if case.reference is None:
        return
    parameters = [nn.Parameter(view.clone()) for view in LAYOUT.views(case.weights[0]).values()]
    torchs = case.reference(parameters)
    for _ in range(5):
        for p in parameters:
            p.grad = p.detach() - 2
        torchs.step()
    expected = torch.cat([p.detach().flatten() for p in parameters])
    torch.testing.assert_close(path(case.make(learners=1), case.weights[:1], 1, 5)[0], expected)


def optimizer_refusals(case: Any) -> None:
    """Values that are not allowed are refused in one line."""
    refuses(case.make, case.refused, "optimizer.")


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
    run_checks("topology", (Mixing(spec, learners, 3), device), only)


def matrices(case: tuple[Mixing, str]) -> None:
    """Every matrix is doubly stochastic; applied to weights it is their product and keeps the mean."""
    mixing, device = case
    n = mixing.learners
    weights = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    for t in range(1, 9):
        m = mixing.matrix(t)
        shares = m.shape == (n, n) and m.min() >= 0
        require(shares, f"the matrix of step {t} is no (n, n) matrix of shares ≥ 0")
        np.testing.assert_allclose([m.sum(0), m.sum(1)], 1, atol=1e-12)
        mixed = combine(weights, m)
        torch.testing.assert_close(mixed, torch.from_numpy(m).to(device) @ weights)
        torch.testing.assert_close(mixed.mean(0), weights.mean(0))
        np.testing.assert_array_equal(m, Mixing(mixing.spec, n, mixing.seed).matrix(t))
        require(0 <= mixing.degree(t) <= n - 1 + 1e-12, f"a learner sends {mixing.degree(t)} vectors")


def spectrum(case: tuple[Mixing, str]) -> None:
    """The gap, the smallest eigenvalue and the limit 1 + ω_min are those of the matrices."""
    mixing, n = case[0], case[0].learners
    cycle = mixing.cycle or [mixing.matrix(t) for t in range(1, 5)]
    smallest = min(np.linalg.eigvals(m).real.min() for m in cycle)
    np.testing.assert_allclose(mixing.omega_min, smallest, atol=1e-9)
    if mixing.cycle:
        product = np.linalg.multi_dot([np.eye(n), *cycle, np.eye(n)]) - np.full((n, n), 1 / n)
        radius = np.abs(np.linalg.eigvals(product)).max()
        np.testing.assert_allclose((1 - mixing.gap) ** len(cycle), radius, atol=1e-7)
    if len(cycle) == 1 and np.array_equal(cycle[0], cycle[0].T):
        np.testing.assert_allclose(mixing.stability_limit, 1 + smallest, atol=1e-9)


def check_instrument(
    instrument: type[Instrument] | str, monitor: Mapping[str, Any] | None = None, *,
    changes: Mapping[str, Any] | None = None, refused: Mapping[str, Any] | None = None, device: str = "cpu",
    only: str | None = None,
) -> None:  # fmt: skip
    """Check an instrument: its columns, no influence on the run, resumption between measurements, refusals.

    Args:
        instrument: the class, or its name.
        monitor: changes of the recipe's table "monitor".
        changes: other changes of the recipe, such as an optimizer that the instrument needs.
        refused: a key of the table "monitor" -> a value that the instrument must refuse; or the name of
            another table of the recipe -> a table that the instrument must refuse.
        device: the device of the run.
        only: the name of one check of ``CHECKS["instrument"]`` to run; default: all checks.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> check_instrument("lambda-max")
    """
    with registered(registry.instruments, instrument, "instrument-under-test") as name:
        defaults = {"instruments": [name], "every": 4, "draws": 3, "samples": 90, "rho": 0.05}
        table = {**defaults, **(monitor or {})}
        case = SimpleNamespace(
            name=name, changes=changes or {}, monitor=table, refused=refused or {}, device=device
        )
        run_checks("instrument", case, only)


def measured(case: Any) -> None:
    """Its columns have numbers where it is due, and nowhere else; the run is the same, resumed, too."""
    end = resumed({**case.changes, "monitor": case.monitor}, case.device)
    require(torch.equal(end.weights, end_of(case.changes, case.device).weights), "measuring changes the run")
    names, due = registry.instruments[case.name].columns, np.arange(1, 13) % 4 == 0
    for name, unit in names.items():
        require(end.units[name] == unit, f"the unit of {name} is {end.units[name]!r}, not {unit!r}")
        require(np.isnan(end.history[name][~due]).all(), f"{name} has numbers at steps where it is not due")
    require(any(np.isfinite(end.history[name][due]).any() for name in names), "it measures nothing")


def instrument_refusals(case: Any) -> None:
    """Runs that it cannot measure are refused in one line."""

    def call(change: Mapping[str, Any]) -> Checkpoint:
        ((key, value),) = change.items()
        more = {key: value} if isinstance(value, dict) else {"monitor": {**case.monitor, key: value}}
        return end_of({**case.changes, "monitor": case.monitor, **more}, case.device)

    refuses(call, case.refused)


CHECKS["rule"] = {check.__name__: check for check in (resumes, step, limit, documented, rule_refusals)}
CHECKS["optimizer"] = {c.__name__: c for c in (learners, restored, same_as_reference, optimizer_refusals)}
CHECKS["topology"] = {check.__name__: check for check in (matrices, spectrum)}
CHECKS["instrument"] = {check.__name__: check for check in (measured, instrument_refusals)}
