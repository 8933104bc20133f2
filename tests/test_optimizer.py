"""Optimizers against torch and textbook versions, schedules in closed form, and preconditioners against dense matrices."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import landscape
from landscape import InputError, OperationError
from landscape.core import registry
from landscape.core.options import parse_toml
from landscape.gradients.learners import Stack
from landscape.gradients.minibatches import stream
from landscape.problem.layout import Layout, Slot
from landscape.testing import check_optimizer
from landscape.training import optimizer
from landscape.training.optimizer.base import SGD, Optimizer, role_of
from landscape.training.processes.comm import combine
from landscape.training.recipes import Schedule, recipe
from landscape.training.run import launch
from landscape.training.run.loop import Trainer
from tests import problems
from tests.conftest import Command, slow_but

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "weight_decay": 0.05, "betas": [0.8, 0.95]},
    "sgd": {"name": "torch:SGD", "momentum": 0.8, "weight_decay": 0.001},
    "adagrad": {"name": "torch:Adagrad", "initial_accumulator_value": 0.1},
    "adafactor": {"name": "torch:Adafactor"},
    "nadam": {"name": "torch:NAdam"},
    "rprop": {"name": "torch:Rprop", "step_sizes": [1e-6, 1.0]},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd"},
    "nesterov": {"name": "sgd", "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    "lars": {"name": "lars", "trust": 0.1},
    "lamb": {"name": "lamb"},
    "torch:SGD": KINDS["sgd"],
    **{name: KINDS[name] for name in ("adamw", "adafactor")},
}


def chosen(tiny: Path, **changes: Any) -> recipe.Recipe:
    values = parse_toml(tiny.read_text(), "tiny") | {"name": "tiny", "dtype": "float64", "lr": 0.02}
    return recipe.from_values(values | changes)


def trajectory(chosen: Optimizer, gradients: Tensor, weights: Tensor, lr: float = 0.1) -> Tensor:
    """Weights (n, P) after w ← w − lr u with these gradients (steps, n, P)."""
    chosen.start(problems.conv().layout, weights)
    for t, g in enumerate(gradients, 1):
        weights = weights - lr * chosen.directions(g, weights, lr, t)
    return weights


def random_run(seed: int, steps: int = 7) -> tuple[Tensor, Tensor]:
    """(gradients (steps, 3, P), weights (3, P)) for the layout of :func:`problems.conv`, float64."""
    torch.manual_seed(seed)
    size = problems.conv().layout.size
    return torch.randn(steps, 3, size, dtype=torch.float64), torch.randn(3, size, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.8}, {"weight_decay": 0.3}])
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    """Nesterov's form is in tests/test_conformance.py."""
    reference = functools.partial(torch.optim.SGD, lr=0.01, **options)
    check_optimizer("sgd", options, reference=reference, only="same_as_reference")


@pytest.mark.parametrize("name", ["adafactor", "rprop"])
def test_torchs_states_are_restored(name: str) -> None:
    options = {key: value for key, value in KINDS[name].items() if key != "name"}
    check_optimizer(KINDS[name]["name"], options, only="restored")


def textbook(step: Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]) -> Callable[..., Tensor]:
    """Run ``step(w, g, memory, t) -> update`` for each learner and named parameter by itself."""

    def run(gradients: Tensor, weights: Tensor, lr: float = 0.1) -> Tensor:
        layout, learners = problems.conv().layout, []
        for j, theta in enumerate(weights):
            named = {k: v.clone() for k, v in layout.views(theta).items()}
            memory: dict[str, dict[str, Any]] = {k: {} for k in named}
            for t, g in enumerate(gradients[:, j], 1):
                for k, grad in layout.views(g).items():
                    named[k] -= lr * step(named[k], grad, memory[k], t)
            learners.append(layout.flatten(named))
        return torch.stack(learners)

    return run


@textbook
def textbook_lamb(w: Tensor, g: Tensor, memory: dict[str, Any], t: int) -> Tensor:
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g**2
    r = (memory["m"] / (1 - 0.9**t)) / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * w
    return r if w.norm() == 0 or r.norm() == 0 else r * w.norm() / r.norm()


@textbook
def textbook_lars(w: Tensor, g: Tensor, memory: dict[str, Any], t: int) -> Tensor:
    rate: Tensor | float = 1.0
    if w.norm() > 0 and g.norm() > 0:
        rate = 0.001 * w.norm() / (g.norm() + 0.0005 * w.norm())
    memory["v"] = 0.9 * memory.get("v", 0) + rate * (g + 0.0005 * w)
    found: Tensor = memory["v"]
    return found.clone()


@pytest.mark.parametrize("name", ["lamb", "lars"])
@pytest.mark.parametrize("zero", ["", "weights", "gradients"])
def test_layerwise_optimizers_are_the_textbooks(name: str, zero: str) -> None:
    gradients, start = random_run(0)
    slot = problems.conv().layout.slots[3]  # a bias, as of BatchNorm, starts at zero or is never used
    part = slice(slot.offset, slot.offset + slot.size)
    if zero == "weights":
        start[:, part] = 0
    elif zero == "gradients":
        gradients[:, :, part] = 0
    expected = {"lamb": textbook_lamb, "lars": textbook_lars}[name](gradients, start)
    found = trajectory(optimizer.make(name, {}), gradients, start)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("name", slow_but(["nesterov", "lars", "adamw"], OPTIMIZERS))
@pytest.mark.parametrize("n", slow_but([4], [1, 4]))
def test_ssgd_and_atc_with_a_complete_graph_are_large_batch_sgd(tiny: Path, name: str, n: int) -> None:
    """As one learner on the joint minibatch; what is not linear in the gradient under SSGD only."""
    options = OPTIMIZERS[name]
    linear = optimizer.make(options["name"], {k: v for k, v in options.items() if k != "name"}).linear
    big = Trainer(chosen(tiny, learners=1, algorithm={"name": "ssgd"}, optimizer=options)).run()
    rules: list[dict[str, Any]] = [{"name": "ssgd"}]
    if n == 1 or linear:
        rules.append({"name": "dpsgd", "mixing": "full", "order": "atc"})
    near = 1e-12 if linear else 1e-9  # LAMB divides by √v, LARS by ‖g‖: rounding grows where they are small
    for rule in rules:
        end = Trainer(chosen(tiny, learners=n, algorithm=rule, optimizer=options)).run()
        torch.testing.assert_close(end.mean, big.mean, rtol=near, atol=near)


RULES: dict[str, dict[str, Any]] = {
    "ssgd": {"name": "ssgd"},
    "ssgd*": {"name": "ssgd*", "sigma": 0.01},
    "dpsgd": {"name": "dpsgd", "mixing": "ring(1)"},
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [("sgd", "ssgd"), ("sgd", "ssgd*"), ("sgd", "dpsgd"), ("nesterov", "ssgd*"), ("lamb", "dpsgd")],
)
def test_the_decomposition_holds_for_every_optimizer(tiny: Path, name: str, rule: str) -> None:
    given = {"algorithm": RULES[rule], "optimizer": OPTIMIZERS[name], "decompose": {"every": 1}}
    trainer = Trainer(chosen(tiny, **given))
    for t in range(1, 13):
        before = trainer.weights.mean(0)
        g = trainer.train_problem.gradient(before)
        trainer._step(t)
        d, row = trainer.weights.mean(0) - before, trainer.history.rows[-1]
        assert row["displacement2"] == pytest.approx(float(d @ d), rel=1e-9)
        assert row["alpha_e"] == pytest.approx(-float(d @ g) / float(g @ g), rel=1e-9, abs=1e-9)
        parts = row["alpha_e"] ** 2 * row["grad_norm2"] + row["delta"]
        assert parts == pytest.approx(row["displacement2"], rel=1e-9)
        split = [row[k] for k in ("delta_s", "delta_2", "delta_cross")]
        if name != "sgd":  # Eq. 4 is for plain steps: nothing is claimed for others
            assert np.isnan([*split, row["delta_2_full"]]).all()
        elif rule != "ssgd*":
            assert sum(split) == pytest.approx(row["delta"], rel=1e-9, abs=1e-15)


def test_linear_scaling_warm_up_and_annealing_of_the_papers_speech_recipe() -> None:
    """lr 0.1 at batch 256, to 0.8 at 2,048 over 10 epochs, then × 1/√2 an epoch; 100 steps an epoch."""
    s = Schedule(unit="epochs", base_batch=256, warmup=10, anneal=1 / math.sqrt(2))
    rate = [s.at(0.1, t, 2048, 204_800) for t in range(1, 2001)]
    np.testing.assert_allclose(rate[:1000], 0.8 * np.arange(1, 1001) / 1000, rtol=1e-12)
    expected = 0.8 * 2.0 ** (-np.repeat(np.arange(1, 11), 100) / 2)
    np.testing.assert_allclose(rate[1000:], expected, rtol=1e-12)
    assert s.peak_lr(0.1, 2048) == pytest.approx(0.8)


@given(st.integers(0, 20), st.integers(1, 50), st.integers(1, 120), st.booleans())
def test_cosine_in_closed_form(warmup: int, length: int, step: int, epochs: bool) -> None:
    per_epoch = 8 if epochs else 1
    s = Schedule(unit="epochs" if epochs else "steps", warmup=warmup, cosine=length)
    found = s.at(0.5, step, 25, 25 * per_epoch)
    first, last = warmup * per_epoch, (warmup + length) * per_epoch
    if step <= first:
        assert found == pytest.approx(0.5 * step / first)
    else:
        x = min(1.0, (step - 1 - first) / (last - first))
        assert found == pytest.approx(0.25 * (1 + math.cos(math.pi * x)), abs=1e-15)


@pytest.mark.parametrize("make", [problems.mlp, problems.conv], ids=["chain", "loop"])
def test_microbatches_give_the_gradient_of_the_whole_and_bfloat16_is_near(
    make: Callable[..., landscape.Problem],
) -> None:
    problem = make()
    assert problem.tensors is not None
    weights = problem.weights + 0.1 * torch.randn(3, problem.layout.size, dtype=torch.float64)
    indices = torch.randint(problem.samples, (3, 12))
    x, y = (t[indices] for t in problem.tensors)
    whole, parts = torch.empty_like(weights), torch.full_like(weights, torch.nan)
    losses = Stack(problem).gradients(weights, x, y, out=whole)
    for k in (2, 3, 12):
        split = Stack(problem, accumulate=k).gradients(weights, x, y, out=parts)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(split, losses, rtol=1e-12, atol=1e-14)
    single = landscape.Problem(problem.model, problem.criterion, problem.tensors, dtype=torch.float32)
    x, half = x.float(), torch.empty_like(weights, dtype=torch.float32)
    b = Stack(single, autocast="bfloat16").gradients(weights.float(), x, y, out=half)
    assert half.dtype == b.dtype == torch.float32  # they come out in full
    assert 0 < float((whole - half).norm() / whole.norm()) < 0.03  # 8 bits of mantissa, a few layers
    torch.testing.assert_close(losses.float(), b, rtol=0.01, atol=0)


def test_runs_with_microbatches_are_runs_without(tiny: Path) -> None:
    one, two = (Trainer(chosen(tiny, accumulate=k, steps=8)).run() for k in (1, 5))
    torch.testing.assert_close(one.weights, two.weights, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(one.history["delta_2"], two.history["delta_2"], rtol=1e-6)


def test_a_run_in_bfloat16_is_near_that_in_float32(tiny: Path) -> None:
    end = Trainer(chosen(tiny, dtype="float32", autocast="bfloat16")).run()
    exact = Trainer(chosen(tiny, dtype="float32")).run()
    assert end.weights.dtype == torch.float32
    assert not torch.equal(end.weights, exact.weights)
    assert end.history["test_loss"][-1] == pytest.approx(exact.history["test_loss"][-1], rel=0.05)


def test_info_names_the_state_of_the_optimizer(command: Command, tiny: Path, tmp_path: Path) -> None:
    settings = ("--set", "optimizer.momentum=0.9", "--set", "steps=2")
    assert command("train", tiny, *settings, "-o", tmp_path / "a", "-q")[0] == 0
    assert "optimizer state: momentum (4, 83)" in command("info", tmp_path / "a" / "last.h5")[1]


def each_by_torch(trainer: Trainer, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Tensor:
    """(n, P): each learner a module under an optimizer of torch's own; then w_j ← Σ_k M_jk w_k + (step_j)."""
    r = trainer.recipe
    modules = [landscape.models.build("mlp", widths=[6, 8, 3], activation="tanh").double() for _ in range(4)]
    for module in modules:
        torch.nn.utils.vector_to_parameters(trainer.train_problem.weights.clone(), module.parameters())
    optimizers = [kind(m.parameters(), lr=r.lr, **options) for m in modules]  # type: ignore[call-arg]

    def vectors() -> Tensor:
        return torch.stack([torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in modules])

    for t in range(1, r.steps + 1):
        x, y = trainer._minibatches(t)
        before = vectors()
        for j, (module, each) in enumerate(zip(modules, optimizers, strict=True)):
            for group in each.param_groups:
                group["lr"] = r.rate(t, trainer.train_problem.samples)
            each.zero_grad()
            torch.nn.functional.cross_entropy(module(x[j]), y[j]).backward()
            each.step()
        mixed = combine(before, trainer.rule.mixing.matrix(t))  # type: ignore[attr-defined]
        for module, row in zip(modules, mixed + vectors() - before, strict=True):
            torch.nn.utils.vector_to_parameters(row, module.parameters())
    return vectors()


@pytest.mark.parametrize("name", KINDS)
def test_learners_follow_torchs_own_optimizers(tiny: Path, name: str) -> None:
    """DPSGD in AWC order on a ring, 12 steps in float64, with a schedule."""
    trainer = Trainer(chosen(tiny, optimizer=KINDS[name], steps=12, schedule={"cosine": 40.0}))
    options = {k: v for k, v in KINDS[name].items() if k != "name"}
    kind = getattr(torch.optim, trainer.recipe.part("optimizer")[0].removeprefix("torch:"))
    expected = each_by_torch(trainer, kind, options)
    torch.testing.assert_close(trainer.run().weights, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("buffers", ["keep", "reset", "average"])
def test_states_are_kept_reset_or_averaged_where_learners_are(tiny: Path, buffers: str) -> None:
    rule = {"name": "local-sgd", "period": 5, "buffers": buffers}
    end = Trainer(chosen(tiny, optimizer=KINDS["adamw"], algorithm=rule, steps=10)).run()
    moment = end.optimizer["exp_avg"]
    assert (end.optimizer["step"] == (0 if buffers == "reset" else 10)).all()
    assert bool((moment == moment[0]).all()) == (buffers != "keep")
    assert bool(moment.any()) == (buffers != "reset")
    again = Trainer(chosen(tiny, optimizer=KINDS["adamw"], algorithm=rule, steps=12), checkpoint=end).run()
    assert (again.optimizer["updates"] == (2 if buffers == "reset" else 12)).all()


GPT: dict[str, Any] = {
    "name": "adamw",
    "groups": {
        "matrix": {"name": "muon", "lr_factor": 5.0, "weight_decay": 0.1}, "norm": {"weight_decay": 0.0},
        "*bias": {"name": "sgd", "momentum": 0.5}, "embedding": {"frozen": True}},
}  # fmt: skip


class TwoLayers(torch.nn.Module):
    """A causal language model of two blocks: an embedding, attention, norms and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 6)
        layers = [torch.nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True) for _ in range(2)]
        self.blocks = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x))).transpose(1, 2)


def test_parameters_have_roles() -> None:
    torch.manual_seed(0)
    found = {s.name: role_of(s) for s in Layout.of(TwoLayers()).slots}
    assert found.pop("embedding.weight") == "embedding"
    assert found.pop("head.weight") == "head"
    assert {name: role for name, role in found.items() if role == "matrix"}.keys() == {
        f"blocks.{i}.{name}" for i in (0, 1)
        for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    }  # fmt: skip
    assert {role for name, role in found.items() if ".norm" in name} == {"norm"}
    tied = TwoLayers()
    tied.head.weight = tied.embedding.weight
    assert role_of(Layout.of(tied).slots[0]) == "embedding"
    assert {role_of(s) for s in Layout.of(tied).slots} == {"embedding", "matrix", "norm", "bias"}


def test_each_group_follows_its_own_optimizer() -> None:
    """On a small GPT in float64: AdamW, Muon by hand, SGD and nothing, each with its rate, by modules of torch."""
    torch.manual_seed(0)
    model = TwoLayers().double()
    layout, lr = Layout.of(model), 0.02
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    grouped = optimizer.make(GPT["name"], {"groups": GPT["groups"]})
    grouped.start(layout, start.repeat(2, 1))
    weights, rows = start.repeat(2, 1), []
    roles = {s.name: role_of(s) for s in layout.slots}
    gradients = torch.randn(6, 2, layout.size, dtype=torch.float64)
    for t, g in enumerate(gradients, 1):
        weights = weights - lr * grouped.directions(g, weights, lr, t)
    for j in range(2):
        torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
        named = dict(model.named_parameters())

        def of(*chosen: str, named: dict[str, Any] = named) -> list[Any]:
            return [p for n, p in named.items() if roles[n] in chosen]

        others = [
            torch.optim.AdamW([{"params": of("head")}, {"params": of("norm"), "weight_decay": 0.0}], lr=lr),
            torch.optim.SGD(of("bias"), lr=lr, momentum=0.5),
        ]
        memory = {n: torch.zeros_like(p) for n, p in named.items()}
        for g in gradients[:, j]:
            for n, part in layout.views(g).items():
                named[n].grad = part
                if roles[n] != "matrix":
                    continue
                memory[n] = 0.95 * memory[n] + 0.05 * part
                update = newton_schulz(0.05 * part + 0.95 * memory[n])
                scale = max(1, part.shape[0] / part.shape[1]) ** 0.5
                with torch.no_grad():
                    named[n].sub_(5 * lr * (scale * update + 0.1 * named[n]))
            for each in others:
                each.step()
        rows.append(torch.nn.utils.parameters_to_vector(named.values()).detach())
    torch.testing.assert_close(weights, torch.stack(rows), rtol=1e-9, atol=1e-9)
    assert torch.equal(layout.views(weights)["embedding.weight"][0], layout.views(start)["embedding.weight"])


def newton_schulz(x: Tensor) -> Tensor:
    """Five iterations of Jordan's quintic of one matrix, with its own singular values."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / x.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has none")
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_is_torchs_up_to_bfloat16(scale: str) -> None:
    torch.manual_seed(0)
    layout = Layout((Slot("a", (6, 4), 0, 24, "weight"), Slot("b", (3, 8), 24, 24, "weight")))
    start, gradients = torch.randn(1, 48, dtype=torch.float64), torch.randn(5, 1, 48, dtype=torch.float64)
    made = optimizer.make("muon", {"scale": scale, "weight_decay": 0.1})
    made.start(layout, start)
    weights = start
    parameters = [torch.nn.Parameter(v[0].clone()) for v in layout.views(start).values()]
    torchs = torch.optim.Muon(parameters, 0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn=scale)
    for t, g in enumerate(gradients, 1):
        weights = weights - 0.1 * made.directions(g, weights, 0.1, t)
        for p, part in zip(parameters, layout.views(g[0]).values(), strict=True):
            p.grad = part
        torchs.step()
    moved, expected = (weights - start)[0], torch.cat([p.detach().flatten() for p in parameters]) - start[0]
    assert float((moved - expected).norm() / expected.norm()) < 0.02


@pytest.mark.slow
def test_muon_with_adamw_on_a_two_layer_gpt(tmp_path: Path) -> None:
    """The example: less loss than AdamW alone for each seed; the decomposition holds."""
    example = Path(__file__).parents[1] / "examples" / "muon_gpt.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", example, tmp_path], capture_output=True, text=True, check=True
    )
    assert re.findall(r"^(\w+): training loss \d", done.stdout, re.MULTILINE) == ["adamw", "muon"]
    found: dict[str, list[float]] = {"adamw": [], "muon": []}
    for name, losses in found.items():
        for seed in range(3):
            history = landscape.load(tmp_path / f"{name}-{seed}").history
            problems.assert_identity(history, rtol=1e-4)  # in float32
            names = "alpha_e", "grad_norm2", "displacement2", "delta"
            columns = np.array([history[name][49::50] for name in names])
            assert columns.shape == (4, 6)
            assert np.isfinite(columns).all()
            losses.append(float(history["loss"][-50:].mean()))
    assert (np.array(found["muon"]) < np.array(found["adamw"])).all()


def test_the_preconditioner_is_that_of_each_group() -> None:
    problem = problems.mlp()
    slots = problem.layout.slots
    groups = {"bias": {"betas": [0.9, 0.99], "lr_factor": 2.0}, "head": {"name": "adamw"}}
    made, plain = (optimizer.make("adam", given) for given in ({"groups": groups}, {}))
    theta = problem.weights[None]
    for each in (made, plain):
        each.start(problem.layout, theta)
    g = torch.randn(2, 1, problem.layout.size, dtype=torch.float64)
    for t in (1, 2):
        made.directions(g[t - 1], theta, 0.1, t)
        plain.directions(g[t - 1], theta, 0.1, t)
    assert made.preconditioned == plain.preconditioned
    p, q = (each.preconditioner(theta, g[0], 2) for each in (made, plain))
    assert p is not None
    assert q is not None
    for s in slots:
        if s.role == "bias":
            second = 0.99 * 0.01 * g[0] ** 2 + 0.01 * g[1] ** 2
            expected = ((second / (1 - 0.99**2)).sqrt() + 1e-8) * (1 - 0.9**2) / 2
        else:
            expected = q
        torch.testing.assert_close(p[:, s.place], expected[:, s.place], rtol=1e-9, atol=0)
    for other in ({"bias": {"frozen": True}}, {"bias": {"name": "sgd"}}, {"bias": {"betas": [0.5, 0.99]}}):
        assert optimizer.make("adam", {"groups": other}).preconditioned is None
    sgd = optimizer.make("sgd", {"momentum": 0.5, "groups": {"bias": {"weight_decay": 0.1}}})
    assert sgd.heavy_ball == (0.5, "ordinary")
    assert optimizer.make("sgd", {"groups": {"bias": {"lr_factor": 0.5}}}).heavy_ball is None
    assert not optimizer.make("sgd", {"groups": {"bias": {"frozen": True}}}).direction_is_gradient


def test_groups_go_into_a_recipe_and_back(tiny: Path) -> None:
    """Their run is resumed in tests/test_processes.py."""
    options = {"name": "adamw", "groups": {"matrix": {"name": "muon"}, "*.bias": {"weight_decay": 0.0}}}
    made = chosen(tiny, optimizer=options, steps=2)
    back = recipe.from_values(parse_toml(made.to_toml(), "recipe"))
    assert back.to_toml() == made.to_toml()
    state = {*Trainer(back).run().optimizer}
    assert {"matrix.momentum", "*.bias.exp_avg", "others.exp_avg_sq"} <= state


def test_short_names_are_torchs_classes(tiny: Path) -> None:
    """By --set and in a file, in whatever case: the same recipe as the full name gives."""
    more = ["optimizer.eps=1e-7", "optimizer.betas=[0.8, 0.9]"]
    names = ("torch:AdamW", "AdamW", "adamw")
    long, *short = (recipe.read(str(tiny), [f"optimizer.name={each}", *more]).to_toml() for each in names)
    assert short == [long, long]
    assert recipe.from_values(parse_toml(long, "recipe")).to_toml() == long


def test_sgd_and_a_plugins_name_stay_theirs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(optimizer.make("sgd", {}), SGD)
    assert {"adam", "adamw", "lamb", "sgd"} <= set(optimizer.names())
    torchs = optimizer.make("torch:SGD", {"momentum": 0.9, "nesterov": True})
    assert (torchs.heavy_ball, torchs.linear) == ((0.9, "nesterov"), True)

    class Mine(SGD):
        pass

    monkeypatch.setattr(registry.optimizers, "_entries", dict(registry.optimizers._entries))
    registry.optimizers.add("adam")(Mine)
    assert isinstance(optimizer.make("adam", {}), Mine)


def test_a_state_that_is_no_tensor_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["note"] = "text"

    monkeypatch.setattr(optimizer, "_classes", lambda: {"torch:Odd": Odd})
    with pytest.raises(InputError, match=r"'torch:Odd'.*'note'.*str"):
        chosen(tiny, optimizer={"name": "torch:Odd"})


def diagonal(size: int) -> torch.Tensor:
    """A positive diagonal over two orders of magnitude."""
    return torch.logspace(-1, 1, size, dtype=torch.float64)


@pytest.mark.parametrize(
    "name",
    slow_but(["saddle", "mlp tanh", "structured"], [*problems.ALL, *problems.STRUCTURED]),
)
def test_eigenvalues_and_all_else_are_those_of_the_dense_matrix(name: str) -> None:
    problem = {**problems.ALL, **problems.STRUCTURED}[name]()
    p = diagonal(problem.layout.size)
    root = p.rsqrt()
    dense = root[:, None] * problems.textbook_hessian(problem) * root
    truth = torch.linalg.eigvalsh(dense).flip(0)
    pairs = landscape.top_eigenvalues(problem, 2, 1e-6, precondition=p)
    np.testing.assert_allclose(pairs.values, truth[:2], rtol=1e-5, atol=1e-9)
    for value, v in zip(pairs.values, torch.from_numpy(pairs.vectors), strict=True):
        assert float((dense @ v - value * v).norm()) < 1e-4 * float(truth.abs().max())
    given = landscape.Preconditioner(p, name="mine", lr=0.5, limit=2.0)
    options = {"precondition": given, "residual_tol": 1e-6, "products": 3 * len(p)}
    result = landscape.spectrum(problem, quantities=("extremes", "trace", "density"), **options)
    np.testing.assert_allclose(result.values, truth[[0, -1]], rtol=1e-5, atol=1e-9)
    assert result.trace == pytest.approx(float(dense.trace()), rel=1e-6)
    assert result.density is not None
    assert (result.precondition, result.lr, result.limit) == ("mine", 0.5, 2.0)


def test_a_part_takes_its_part_of_the_diagonal() -> None:
    problem = problems.mlp()
    p = diagonal(problem.layout.size)
    (slot,) = problem.layout.select("1.weight")
    rows = slice(slot.offset, slot.offset + slot.size)
    root = p[rows].rsqrt()
    dense = root[:, None] * problems.textbook_hessian(problem)[rows, rows] * root
    found = landscape.top_eigenvalues(problem, residual_tol=1e-6, part="1.weight", precondition=p)
    assert float(found.values[0]) == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-5)


SMALL = [
    "steps=12", "learners=3", "batch=30", "model.widths=[64,8,10]", "decompose.every=0", "evaluate.every=0",
    "checkpoint.every=0",
]  # fmt: skip


PRECONDITIONED: dict[str, dict[str, Any]] = {
    "torch:Adam": {},
    "torch:AdamW": {"amsgrad": True, "betas": [0.8, 0.99]},
    "torch:RMSprop": {"momentum": 0.5, "centered": True},
    "lars": {"momentum": 0.5},
    "lamb": {"beta1": 0.5},
}


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_a_momentum_of_one_gradient_moves_by_the_inverse_of_p(name: str) -> None:
    """The directions of two gradients that differ by a little differ by P⁻¹ times that, but for P's own change.

    For Adam and RMSprop P belongs to the state after the step, as the direction does.
    """
    problem = problems.mlp()
    size = problem.layout.size
    made = optimizer.make(name, PRECONDITIONED[name])
    theta = problem.weights[None]
    made.start(problem.layout, theta)
    draws = torch.randn(30, 1, size, dtype=torch.float64, generator=stream(0, 0)) + 0.5
    momentum = torch.zeros_like(theta)
    assert made.preconditioned is not None
    m, _, c = made.preconditioned
    ratios = []
    for t, g in enumerate(draws, 1):
        direction = made.directions(g, theta, 0.1, t)
        decay = getattr(made, "weight_decay", 0) or 0
        p = made.preconditioner(theta, g, t)
        if name == "lars":  # the ratio is inside the momentum
            momentum = m * momentum + (g + decay * theta) / p
            np.testing.assert_allclose(direction, momentum, rtol=1e-9, atol=1e-12)
            continue
        if name == "torch:RMSprop":
            momentum = m * momentum + g / p
            np.testing.assert_allclose(direction, momentum, rtol=1e-6, atol=1e-9)
            continue
        momentum = m * momentum + c * g
        expected = momentum / p
        if name == "lamb":  # whose weight decay has the same ratio ‖w‖/‖s‖
            ratio = made._root(t) / p  # type: ignore[attr-defined]
            expected = expected + decay * ratio * theta
        if name == "torch:AdamW":
            expected = expected + 0.01 * theta  # torch's default, decoupled
        ratios.append(float((direction - expected).norm() / direction.norm()))
    assert all(ratio < 1e-6 for ratio in ratios)


@pytest.mark.parametrize(
    ("name", "limit"), [("torch:Adam", 38.0), ("torch:AdamW", 18.0), ("torch:RMSprop", 3.0), ("lars", 3.0), ("lamb", 6.0)]
)  # fmt: skip
def test_a_run_gives_its_preconditioner_and_limit(name: str, limit: float) -> None:
    options = [
        f"optimizer.{k}={str(v).lower() if isinstance(v, bool) else v}"
        for k, v in PRECONDITIONED[name].items()
    ]
    run = Trainer(recipe.read("digits-ssgd", [*SMALL, "lr=0.01", f"optimizer.name={name}", *options])).run()
    problem = run.problem()
    p = landscape.preconditioner(run, problem)
    assert p.diagonal.shape == (problem.layout.size,)
    assert (p.name, p.lr) == (name, 0.01)
    assert p.limit == pytest.approx(limit)
    own = landscape.preconditioner(run, problem, 1)
    if name != "lars":  # under SSGD all learners have one state
        np.testing.assert_allclose(own.diagonal, p.diagonal, rtol=1e-6)
    with pytest.raises(InputError, match="learner: 3"):
        landscape.preconditioner(run, problem, 3)


def test_the_preconditioner_by_command_and_refusals(tiny: Path, tmp_path: Path, command: Command) -> None:
    launch.launch(recipe.read(str(tiny), ["optimizer.name=adam", "lr=0.01"]), tmp_path / "adam")
    picture = tmp_path / "s.png"
    code, out, err = command("stability", tmp_path / "adam", "--precondition", "-o", tmp_path / "limits.h5")
    assert code == 0, err
    assert "preconditioned by torch:Adam" in out
    code, out, err = command("spectrum", tmp_path / "adam", "--precondition", "--plot", picture)
    assert code == 0, err
    result = landscape.load(tmp_path / "adam" / "last-spectrum-preconditioned.h5")
    assert (result.precondition, result.lr) == ("torch:Adam", 0.01)
    assert 0 < result.limit < 38  # of the ring
    assert "preconditioned by torch:Adam; lr · λ_max" in " ".join(result.plot().get_caption().split())
    run = landscape.load(tmp_path / "adam" / "step-0000000.h5")
    with pytest.raises(OperationError, match="step 0"):
        landscape.preconditioner(run, run.problem())
    theirs = dataclasses.replace(run, algorithm="recorded", recipe="")
    with pytest.raises(OperationError, match=r"no run of landscape train; give a landscape.Preconditioner"):
        landscape.preconditioner(theirs, run.problem())
