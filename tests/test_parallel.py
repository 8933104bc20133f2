"""DecentralizedDataParallel: the trainer's numbers, what torch's loops do, saving, and what is refused."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
from landscape import DecentralizedDataParallel, InputError, LandscapeError
from landscape.checkpoint import user_code
from landscape.testing.checks import RECIPE
from landscape.training.processes.children import loopback
from landscape.training.processes.comm import LostProcessError
from landscape.training.processes.process_group import Group
from landscape.training.recipes import recipe
from landscape.training.run import generator, setup
from landscape.training.run.loop import Trainer
from tests.conftest import Command
from tests.groups import free_port, together
from tests.nets import Tied, flat, norm_net

pytestmark = pytest.mark.xdist_group("processes")  # the scenarios of a pair are run once
ROOT = Path(__file__).parents[1]
STEPS, BATCH = 7, 4
SGD, MOMENTUM = {"name": "sgd"}, {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "torch:AdamW", "weight_decay": 0.1}
# By the number of learners.
RULES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"name": "ssgd"},
        {"name": "ssgd*", "sigma": 0.01},
        {"name": "dpsgd", "order": "atc"},
        {"name": "local-sgd", "period": 2, "start": 3, "buffers": "average"},
        {"name": "local-sgd", "period": 3, "buffers": "reset", "mixing": "random-matching"},
        {"name": "slowmo", "period": 3},
        {"name": "diloco", "period": 2, "start": 2},
        {"name": "sparta", "share": 0.2},
        {"name": "streaming-diloco", "period": 3, "fragments": 2, "delay": 1},
        {"name": "decoupled-diloco", "period": 3, "fragments": 2, "delay": 1, "availability": 0.5},
        {"name": "sgp", "graph": "random"},
        {"name": "dsgd-ac", "power": 0.5},
        {"name": "single-merge", "at": 4},
        {"name": "gradient-tracking"},
        {"name": "d2"},
        {"name": "noloco", "period": 3},
        {"name": "snoo", "period": 3},
        {"name": "gpa", "mu_x": 0.5},
        {"name": "demo", "k": 2, "chunk": 4},
        {"name": "sparseloco", "period": 3, "share": 0.2},
        {"name": "ad-psgd", "delay": 2},
        {"name": "async-sgd", "delay": 2, "shifted": 0.5, "staleness_aware": True, "schedule": "random"},
    ],
    3: [
        {"name": "ssgd"},
        {"name": "dpsgd", "mixing": "ring(1)", "order": "atc"},
        {"name": "dpsgd", "mixing": "random-matching"},
        {"name": "slowmo", "period": 2, "mixing": "one-peer-exponential"},
    ],
}


def recipe_of(learners: int, rule: dict[str, Any], optimizer: dict[str, Any]) -> recipe.Recipe:
    never = {"every": 0}
    changes = {"learners": learners, "batch": learners * BATCH, "lr": 0.1, "steps": STEPS, "algorithm": rule}
    changes |= {"optimizer": optimizer, "schedule": {"cosine": 10.0}, "decompose": never, "evaluate": never}
    return recipe.from_values(RECIPE | changes)


def torch_optimizer(given: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    options = {key: value for key, value in given.items() if key != "name"}
    kind = torch.optim.SGD if given["name"] == "sgd" else torch.optim.AdamW
    return kind(parameters, lr=0.1, **options)


def own_loop(group: Group, rule: dict[str, Any], given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(w_j, w_a) after STEPS steps with the trainer's minibatches and its cosine schedule."""
    run = recipe_of(group.size, rule, given)
    data = user_code.load_data("data", run.spec("data"), None)
    model = setup.network(run, data, None).double()
    optimizer = torch_optimizer(given, model.parameters())
    options = dict(rule)
    model = DecentralizedDataParallel(model, optimizer, options.pop("name"), **options)
    x, y = data.train
    for t in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = run.rate(t, len(y))
        rows = torch.randint(len(y), (group.size, BATCH), generator=generator(0, "batch", t))[group.rank]
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows].double()), y[rows]).backward()
        optimizer.step()
    return flat(model.module), flat(model.average_model())


def all_loops(group: Group, cases: list[Any]) -> list[tuple[Tensor, Tensor]]:
    return [own_loop(group, *case) for case in cases]


@pytest.mark.parametrize("learners", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_numbers_are_the_trainers(learners: int) -> None:
    cases = [*zip(RULES[learners], itertools.cycle((ADAMW, MOMENTUM))), ({"name": "dpsgd"}, SGD)]
    found = together(learners, all_loops, cases, deadline=120.0)
    runs = [Trainer(recipe_of(learners, rule, given)).run() for rule, given in cases]
    for rank, ends in enumerate(found):
        assert isinstance(ends, list), ends
        for (rule, given), end, (own, mean) in zip(cases, runs, ends, strict=True):
            # SSGD's learners are at their mean after a step here, and at the next one there.
            expected = end.mean if rule["name"].startswith("ssgd") else end.weights[rank]
            torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14, msg=f"{rule} {given}")
            torch.testing.assert_close(mean, end.mean, rtol=1e-12, atol=1e-14, msg=f"{rule} {given}")


# What loops of torch do: all of these run in one pair of processes.

Found = dict[str, Any]


def scenarios(group: Group, folder: str) -> Found:
    """What each scenario gave on this rank."""
    return {
        "unused": unused(group),
        "scaled": scaled(group, fused=True),
        "skipped ssgd": scaled(group, algorithm="ssgd"),
        "skipped local-sgd": scaled(group, algorithm="local-sgd", period=9, start=9),
        "accumulated 1": accumulated(group, 1),
        "accumulated 2": accumulated(group, 2),
        "inside": accumulated(group, 1, inside=True),
        "normed False": normed(group, False),
        "normed True": normed(group, True),
        "told": told(group),
        "state_dict at 3": restart(group, folder, "state_dict", 3),
        "state_dict at 6": restart(group, folder, "state_dict", 6),
        "file at 3": restart(group, folder, "file", 3),
        "file at 6": restart(group, folder, "file", 6),
        "refused": refused_files(group, folder),
    }


@pytest.fixture(scope="module")
def pair_found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Scenario -> what it gave on rank 0 and on rank 1."""
    folder = str(tmp_path_factory.mktemp("pair"))
    first, second = together(2, scenarios, folder, deadline=120.0)
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    return {"folder": folder} | {name: (first[name], second[name]) for name in first}


def tied(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().double()


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def unused(group: Group) -> list[Tensor]:
    model = tied(group.rank)  # the wrapper takes that of rank 0
    optimizer = adamw(model)
    wrapper = DecentralizedDataParallel(model, optimizer, "dpsgd")
    for t in range(4):
        optimizer.zero_grad()
        wrapper(inputs(group.rank, t), rare=t > 1 and group.rank == 1).square().mean().backward()
        optimizer.step()
    return state(model)


def test_an_unused_parameter_is_mixed_and_not_moved(pair_found: Found) -> None:
    """By hand: two learners, each its own optimizer, whose displacements are added to the mean."""
    found = pair_found["unused"]
    models = [tied(), tied()]
    optimizers = [adamw(model) for model in models]
    for t in range(4):
        before = [state(model) for model in models]
        for rank in range(2):
            optimizers[rank].zero_grad()
            models[rank](inputs(rank, t), rare=t > 1 and rank == 1).square().mean().backward()
            optimizers[rank].step()
        with torch.no_grad():
            for rank in range(2):
                for p, a, b, own in zip(models[rank].parameters(), *before, before[rank], strict=True):
                    p.copy_((a + b) / 2 + p - own)
    for rank in range(2):
        for a, p in zip(found[rank], models[rank].parameters(), strict=True):
            torch.testing.assert_close(a, p.detach(), rtol=1e-12, atol=1e-14)
    assert not torch.equal(found[0][3], tied().rare.weight)


def scaled(group: Group, fused: bool = False, **options: Any) -> tuple[list[Tensor], list[float], list[bool]]:
    """Three steps under a GradScaler: parameters, scales, and which steps moved; the second overflows on rank 1.

    ``fused``: in half precision, clipped, by an optimizer that takes the scale itself.
    """
    model: nn.Module = tied().float() if fused else tied()
    optimizer = adamw(model, fused=True) if fused else sgd(model)
    wrapper = DecentralizedDataParallel(model, optimizer, **options)
    scaler, scales, moved = torch.amp.GradScaler("cpu", init_scale=8.0), [], []
    for t in range(3):
        before = flat(model)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=fused):
            value = wrapper(inputs(group.rank, t).to(before)).float().square().mean()
        scaler.scale(value * (math.inf if t == 1 and group.rank == 1 else 1)).backward()
        if fused:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        grads = [p.grad for p in model.parameters()]
        scaler.step(optimizer)
        assert all(a is p.grad for a, p in zip(grads, model.parameters(), strict=True) if a is not None)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, flat(model)))
    return state(model), scales, moved


def test_a_step_that_one_rank_skips_exchanges(pair_found: Found) -> None:
    found = pair_found["scaled"]
    assert [scales[1] for _, scales, _ in found] == [8.0, 4.0]
    # After an exchange of two the learners differ by their displacements, at most 0.1 in a step of AdamW.
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert float((a - b).abs().max()) <= 0.21


@pytest.mark.parametrize("kind", ["ssgd", "local-sgd"])
def test_a_synchronous_step_is_skipped_by_all(pair_found: Found, kind: str) -> None:
    first, second = pair_found[f"skipped {kind}"]
    assert first[2] == second[2] == [True, False, True]
    for a, b in zip(first[0], second[0], strict=True):
        assert torch.equal(a, b)


def accumulated(group: Group, parts: int, inside: bool = False) -> list[Tensor]:
    """``inside``: by passes of the module itself, which begin no exchange: the optimizer's step does."""
    model = tied()
    optimizer = sgd(model, momentum=0.9)
    model = DecentralizedDataParallel(model, optimizer, "dpsgd")
    for t in range(3):
        x = torch.cat([inputs(group.rank, t), inputs(group.rank, t + 10)])
        optimizer.zero_grad()
        for part in x.chunk(parts):
            with model.no_sync():
                ((model.module if inside else model)(part).square().mean() / parts).backward()
        optimizer.step()
    return state(model.module)


def test_gradients_accumulate(pair_found: Found) -> None:
    whole, parts = (pair_found[f"accumulated {k}"][0] for k in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(whole, pair_found["inside"][0], strict=True))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def normed(group: Group, average: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = norm_net().double()
    optimizer = sgd(model)
    wrapper = DecentralizedDataParallel(model, optimizer, "dpsgd", average_buffers=average)
    for t in range(3):
        optimizer.zero_grad()
        x = torch.cat([inputs(group.rank, t), inputs(group.rank, t + 50)], 1)[:, :6]
        wrapper(x + group.rank).square().mean().backward()
        optimizer.step()
    mean = wrapper.average_model()
    assert mean is not model
    own = {name: b.clone() for name, b in model.named_buffers()}
    return own, {name: b.clone() for name, b in mean.named_buffers()}, flat(model), flat(mean)


def test_buffers_are_the_learners_own_or_averaged(pair_found: Found) -> None:
    for average in (False, True):
        first, second = pair_found[f"normed {average}"]
        name = "1.running_mean"
        assert torch.equal(first[0][name], second[0][name]) is average
        for found in (first, second):
            torch.testing.assert_close(found[1][name], (first[0][name] + second[0][name]) / 2)
            torch.testing.assert_close(found[3], (first[2] + second[2]) / 2)
        assert int(first[1]["1.num_batches_tracked"]) == 3


def told(group: Group) -> list[str]:
    """What each rank says where the ranks differ."""
    return refusals(
        lambda: DecentralizedDataParallel(*pair(nn.Linear(3, 2 + group.rank)), "dpsgd"),
        lambda: DecentralizedDataParallel(*pair(nn.Linear(3, 2)), "local-sgd", period=2 + group.rank),
        lambda: DecentralizedDataParallel(*pair(nn.Linear(3, 2)), "dpsgd", mixing="ring(1)"),
    )


def refusals(*calls: Callable[[], object]) -> list[str]:
    """What each of ``calls`` says, a line."""
    said = []
    for call in calls:
        with pytest.raises(LandscapeError) as caught:
            call()
        said.append(str(caught.value))
        assert "\n" not in said[-1]
    return said


def pair(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, sgd(model)


def test_processes_that_differ_are_told(pair_found: Found) -> None:
    first, second = pair_found["told"]
    assert first == second
    assert (
        "model: 'weight': float32 of shape (3, 3) on rank 1, but float32 of shape (2, 3) on rank 0"
        in first[0]
    )
    assert "algorithm.period: 3 on rank 1, but 2 on rank 0" in first[1]
    assert "algorithm.mixing: 'ring(1)' is not allowed with 2 learners" in first[2]


def leaves(group: Group, hangs: bool) -> None:
    """Rank 1 is gone, or answers no more, after its first step."""
    model, optimizer = pair(nn.Linear(3, 2))
    wrapper = DecentralizedDataParallel(model, optimizer)
    for t in range(50):
        if t == 1 and group.rank == 1:
            time.sleep(60) if hangs else os._exit(9)
        wrapper(torch.ones(4, 3)).sum().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_a_lost_process_ends_the_others_with_a_line(hangs: bool) -> None:
    first, _ = together(2, leaves, hangs, timeout=3.0 if hangs else 20.0, deadline=45.0, lost=(1,))
    assert isinstance(first, LostProcessError), first
    assert str(first).startswith("rank 0 of 2: an exchange of step 2 failed" if hangs else "rank 0 of 2: an ")
    assert "\n" not in str(first)


# State and files.


def restart(group: Group, folder: str, way: str, break_at: int) -> tuple[Tensor, Any]:
    """Six steps, with everything made anew after ``break_at`` of them."""
    path, done, saved = Path(folder) / "state.h5", 0, None
    for until in (break_at, 6):
        torch.manual_seed(done)
        model = norm_net().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        wrapper = DecentralizedDataParallel(model, optimizer, "slowmo", period=4, slow_momentum=0.5)
        if done and way == "file":
            assert wrapper.load_checkpoint(path) == done
        elif saved:
            wrapper.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for t in range(done, until):
            optimizer.zero_grad()
            x = torch.cat([inputs(group.rank, t), inputs(group.rank, t + 50)], 1)[:, :6]
            wrapper(x).square().mean().backward()
            optimizer.step()
        done = wrapper.steps
        if way == "file":
            wrapper.save_checkpoint(path)
        saved = pickle.loads(pickle.dumps((wrapper.state_dict(), optimizer.state_dict())))
    return flat(model), wrapper.state_dict()


@pytest.mark.parametrize("way", ["file", "state_dict"])
def test_resumed_equals_unbroken(pair_found: Found, way: str) -> None:
    broken, unbroken = (pair_found[f"{way} at {at}"] for at in (3, 6))
    for rank in range(2):
        assert torch.equal(broken[rank][0], unbroken[rank][0])
        keys = broken[rank][1].keys()
        assert {"_extra_state", "module.0.weight", "module.1.running_mean"} <= keys
        for key in keys - {"_extra_state"}:
            assert torch.equal(broken[rank][1][key], unbroken[rank][1][key])
    assert not torch.equal(broken[0][0], broken[1][0])


def splits() -> dict[str, Any]:
    """What --data tests.test_parallel:splits gives."""
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    return {"train": (x, torch.arange(30) % 3)}


def test_commands_take_a_checkpoint(pair_found: Found, tmp_path: Path, command: Command) -> None:
    first, _ = pair_found["file at 6"]
    path = Path(pair_found["folder"]) / "state.h5"
    run = landscape.load(path)
    assert isinstance(run, landscape.Checkpoint)
    assert (run.learners, run.step) == (2, 6)
    trained = norm_net().double()
    assert torch.equal(
        run.weights[0],
        torch.cat(
            [first[1][f"module.{n}"].flatten() for n, p in trained.named_parameters() if p.requires_grad]
        ),
    )
    expected = float((run.weights - run.mean).square().sum(1).mean())
    assert run.history["step"].tolist() == [0, 6]
    assert run.history["consensus"].tolist() == [0, pytest.approx(expected, rel=1e-12)]
    model = ("--model", "tests.nets:norm_net", "--data", "tests.test_parallel:splits")
    code, _, err = command("contour", path, "--grid", "3", "-o", tmp_path / "c.h5", *model)
    assert code == 0, err
    assert math.isfinite(float(landscape.load(tmp_path / "c.h5").loss.max()))


def refused_files(group: Group, folder: str) -> list[str]:
    path = Path(folder) / "a.h5"
    model, optimizer = pair(nn.Linear(3, 2))
    wrapper = DecentralizedDataParallel(model, optimizer, "local-sgd", period=2)
    wrapper.save_checkpoint(path)
    (Path(folder) / "folder.h5").mkdir(exist_ok=True)
    other = DecentralizedDataParallel(*pair(nn.Linear(3, 2)), "local-sgd", period=3)
    larger = DecentralizedDataParallel(*pair(nn.Linear(3, 3)), "local-sgd", period=2)
    return refusals(
        lambda: other.load_checkpoint(path),
        lambda: larger.load_checkpoint(path),
        lambda: wrapper.load_checkpoint(Path(folder) / f"{'b' * (1 + group.rank)}.h5"),
        lambda: wrapper.save_checkpoint(Path(folder) / "folder.h5"),
        lambda: wrapper.save_checkpoint(Path(folder) / "a.pt"),
    )


def test_files_that_do_not_fit_are_refused_by_all(pair_found: Found) -> None:
    expected = (
        "algorithm.period: 3 is not allowed", "do not fit the model", "no such file", "folder.h5",
        "must end in .h5",
    )  # fmt: skip
    for lines in pair_found["refused"]:
        assert all(words in line for words, line in zip(expected, lines, strict=True)), lines


# One process.

ONES = torch.ones(2, 4, dtype=torch.float64)


def wrapped(algorithm: str = "dpsgd", **options: Any) -> tuple[Tied, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and both as one learner."""
    model = tied()
    optimizer = sgd(model)
    return model, optimizer, DecentralizedDataParallel(model, optimizer, algorithm, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(ONES).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), lambda p: torch.optim.Rprop(p, lr=0.1)]
)
def test_one_learner_is_the_optimizer_itself(make: Any, tmp_path: Path) -> None:
    ends = []
    for wrap in (False, True):
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False)).double()
        optimizer = make(plain.parameters())
        model: Any = DecentralizedDataParallel(plain, optimizer, "dpsgd") if wrap else plain
        for _ in range(3):
            step(model, optimizer)
        if wrap:
            model.save_checkpoint(tmp_path / "one.h5")
            step(model, optimizer)
            later = flat(plain)
            model.load_checkpoint(tmp_path / "one.h5")
        ends.append(flat(plain))
        step(model, optimizer)
        assert not wrap or torch.equal(later, flat(plain))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)


def test_parameters_stay_the_same_objects_in_one_memory() -> None:
    """Memory that the user replaces is taken over; the wrapper itself is neither copied nor pickled."""
    model = tied()
    before, values = [*model.parameters()], flat(model)
    optimizer = sgd(model)
    wrapper = DecentralizedDataParallel(model, optimizer, "local-sgd", period=2)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(values, flat(model))
    assert "local-sgd, learner 0 of 1" in repr(wrapper)
    model.rare.weight.data = torch.full((4, 4), 2.0, dtype=torch.float64)
    expected = copy.deepcopy(model)
    step(wrapper, optimizer)
    step(expected, sgd(expected))
    torch.testing.assert_close(flat(model), flat(expected))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len({p.untyped_storage().data_ptr() for p in trained}) == 1
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(InputError, match=r"cannot be copied or pickled.*use its .module"):
            way(wrapper)


def test_a_closure_is_called_in_the_step() -> None:
    model, optimizer, wrapper = wrapped()
    before = flat(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = wrapper(ONES).square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    assert wrapper.steps == 1
    assert not torch.equal(before, flat(model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model, _: setattr(model, "rare", nn.Linear(4, 4).double()), "parameter 'rare.weight' was added, replaced or removed"),
        (lambda model, _: setattr(model.rare.weight, "data", torch.zeros(4, 5, dtype=torch.float64)),
         r"parameter 'rare.weight' had shape \(4, 4\), now \(4, 5\); make the change first"),
        (lambda model, _: model.scale.requires_grad_(True), "parameter 'scale' was frozen, now it is trained"),
        (lambda model, _: model.float(), "'first.weight' was float64 on cpu, now float32 on cpu; make the change"),
        (lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
         "optimizer: its parameters have changed"),
    ],
)  # fmt: skip
def test_changes_after_wrapping_are_refused(change: Callable[..., Any], words: str) -> None:
    model, optimizer, wrapper = wrapped()
    change(model, optimizer)
    with pytest.raises(InputError, match=words):
        wrapper(ONES)


def mixed_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


def shared_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (None, None), "model: None is not allowed"),
        (lambda: (nn.Linear(2, 2), None), "optimizer: None is not allowed"),
        (lambda: (nn.Linear(2, 2).requires_grad_(False), sgd(nn.Linear(2, 2))), "model: it has no trainable parameter"),
        (lambda: (nn.Linear(2, 2), sgd(nn.Linear(2, 2))), r"optimizer: its parameter of shape \(2, 2\) must be one of the model"),
        (lambda: ((m := nn.Linear(2, 2)), torch.optim.SGD([m.bias], lr=1)), "'weight' is not in it; add it, or freeze"),
        (lambda: pair(mixed_model()), "'1.weight' is float64 on cpu, '0.weight' is float32 on cpu"),
        (lambda: pair(shared_model()), "'1.weight' shares the memory of '0.weight'"),
        (lambda: ((m := nn.Linear(2, 2)), torch.optim.LBFGS(m.parameters())), "LBFGS is not allowed, it needs a closure"),
        (lambda: (DecentralizedDataParallel(*pair(m := nn.Linear(2, 2))), sgd(m)), "give the module inside it"),
        (lambda: pair(nn.LazyLinear(2)), "'weight' has no shape yet"),
        (lambda: wrapped()[:2], "belongs to another DecentralizedDataParallel"),
        ({"algorithm": "dpsdg"}, "algorithm.name: 'dpsdg' is not.*dpsgd"),
        ({"learners": 2}, "learners"),
        ({"seed": -1}, "seed: -1 is not allowed"),
        ({"average_buffers": "no"}, "average_buffers: 'no' is not allowed"),
        ({"algorithm": "async-sgd", "delay": 1, "schedule": "measured"}, "'measured' is not allowed here"),
        ({"peak_lr": 0.1}, "peak_lr: 0.1 is not allowed, algorithm 'dpsgd' does not use it"),
        ({"algorithm": "dsgd-ac", "peak_lr": 0.0}, "peak_lr: 0.0 is not allowed"),
    ],
)  # fmt: skip
def test_what_cannot_be_wrapped_is_refused(make: Any, words: str) -> None:
    """``make``: a model and an optimizer, or options."""
    options = make if isinstance(make, dict) else {}
    given = pair(nn.Linear(2, 2)) if options else make()
    with pytest.raises(InputError, match=words):
        DecentralizedDataParallel(*given, **options)


def test_rules_that_need_the_learning_rate_need_one() -> None:
    def with_rates() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tied()
        groups = [
            {"params": [p], "lr": lr} for p, lr in zip(model.rare.parameters(), (0.2, 0.3), strict=True)
        ]
        return model, torch.optim.SGD([*groups, {"params": [*model.first.parameters(), model.second.bias]}])

    with pytest.raises(InputError, match="needs one learning rate for all parameter groups"):
        DecentralizedDataParallel(*with_rates(), "slowmo", period=2)
    model, optimizer = with_rates()
    step(DecentralizedDataParallel(model, optimizer, "local-sgd", period=2), optimizer)


def test_calls_within_a_step_are_refused(tmp_path: Path) -> None:
    _, optimizer, wrapper = wrapped()
    saved = wrapper.state_dict()
    wrapper.eval()
    wrapper(ONES)  # begins no step
    wrapper.average_model()
    wrapper.train()
    wrapper(ONES).sum().backward()
    for name, call in (
        ("average_model", wrapper.average_model),
        ("save_checkpoint", lambda: wrapper.save_checkpoint(tmp_path / "a.h5")),
        ("load_checkpoint", lambda: wrapper.load_checkpoint(tmp_path / "a.h5")),
        ("load_state_dict", lambda: wrapper.load_state_dict(saved)),
    ):
        with pytest.raises(InputError, match=f"{name}: not allowed between a forward pass"):
            call()
    optimizer.step()
    wrapper.save_checkpoint(tmp_path / "a.h5")


def test_older_weights_need_the_wrappers_forward() -> None:
    model, optimizer, wrapper = wrapped("ad-psgd", mixing="full")
    step(wrapper, optimizer)
    model(ONES).sum().backward()
    with pytest.raises(InputError, match="older weights; call the wrapper itself"):
        optimizer.step()


def test_the_state_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    saved = DecentralizedDataParallel(*pair(nn.Linear(2, 2)), "slowmo", period=2)
    other = DecentralizedDataParallel(*pair(nn.Linear(2, 2)), "dpsgd")
    with pytest.raises(InputError, match="the state is of 'slowmo', here is 'dpsgd'"):
        other.load_state_dict(saved.state_dict())
    saved.save_checkpoint(tmp_path / "a.h5")
    model = nn.Linear(2, 2)
    third = DecentralizedDataParallel(model, adamw(model), "slowmo", period=2)
    with pytest.raises(InputError, match="optimizer: AdamW is not allowed, .*a.h5 has the state of SGD"):
        third.load_checkpoint(tmp_path / "a.h5")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it compiles
def test_a_wrapped_and_compiled_model_is_recorded_and_analyzed(tmp_path: Path, command: Command) -> None:
    torch.manual_seed(0)
    x, y = splits()["train"]
    model = norm_net()
    optimizer = sgd(model)
    wrapper = DecentralizedDataParallel(torch.compile(model, backend="eager"), optimizer, "dpsgd")
    with landscape.Recorder(
        tmp_path / "run", wrapper, F.cross_entropy, (x, y), every=1, batch=30
    ) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(wrapper(x), y).backward()
            with recorder.step():
                optimizer.step()
    run = landscape.load(tmp_path / "run" / "last.h5")
    assert run.history["alpha_e"][1:] == pytest.approx(0.1, rel=1e-3)
    wrapper.save_checkpoint(tmp_path / "own.h5")
    saved = landscape.load(tmp_path / "own.h5")
    assert torch.equal(saved.weights, run.weights)
    assert saved.layout == run.layout
    assert saved.model["name"] == run.model["name"] == "torch.nn.modules.container:Sequential"
    problem = saved.problem(learner=0, model=norm_net(), data=splits(), loss=F.cross_entropy)
    wrapper.eval()
    assert problem.loss() == pytest.approx(float(F.cross_entropy(wrapper(x), y).detach()), rel=1e-5)


def test_a_launcher_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="DecentralizedDataParallel: WORLD_SIZE is 2.*init_process_group"):
        DecentralizedDataParallel(*pair(nn.Linear(2, 2)))


# Under torchrun.

LOOP = """
import os, signal, sys
import torch, torch.distributed as dist
from pathlib import Path
from torch import nn
import landscape

folder, kill = Path(sys.argv[1]), sys.argv[2] == "kill"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model = landscape.DecentralizedDataParallel(net, optimizer, "local-sgd", period=5, mixing="random-matching")
last = folder / "last.h5"
if last.exists():
    print("from", model.load_checkpoint(last), flush=True)
while model.steps < 12:
    if kill and rank == 1 and model.steps == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    draw = torch.Generator().manual_seed(10 * model.steps + rank)
    optimizer.zero_grad()
    model(torch.randn(6, 4, generator=draw, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    if model.steps % 3 == 0:
        model.save_checkpoint(last)
dist.destroy_process_group()
"""


def torchrun(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """``torchrun WORDS`` with two processes on this machine."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": loopback()}
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # otherwise gloo finds the addresses of before a restart
    )
    options = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--monitor-interval=0.1"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *map(str, words)],
        cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_learner_is_started_again_and_the_end_is_the_same(tmp_path: Path) -> None:
    script, ends = tmp_path / "loop.py", []
    script.write_text(LOOP)
    for kind in ("kill", "unbroken"):
        (tmp_path / kind).mkdir()
        done = torchrun(script, tmp_path / kind, kind, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("from 6") == 2 * (kind == "kill")
        if "LostProcessError" in done.stderr:  # of rank 0, unless torchrun ended it first
            assert "rank 0 of 2: an exchange of step 8 failed" in done.stderr
        ends.append(landscape.load(tmp_path / kind / "last.h5"))
    broken, unbroken = ends
    assert (broken.step, broken.learners) == (12, 2)
    assert torch.equal(broken.weights, unbroken.weights)
    for name in ("buffers", "optimizer"):
        for key, rows in getattr(unbroken, name).items():
            assert torch.equal(getattr(broken, name)[key], rows), key


@pytest.mark.slow
def test_the_example_of_decentralized_training(tmp_path: Path, command: Command, monkeypatch: Any) -> None:
    example = ROOT / "examples" / "torchrun_dpsgd.py"
    assert len(example.read_text().splitlines()) < 60
    done = torchrun(example, "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test accuracy of the mean of 2 learners 0.9" in done.stdout
    monkeypatch.syspath_prepend(str(example.parent))
    model = ("--model", "own_loop:Net", "--data", "own_loop:digits", "--grid", "3")
    code, _, err = command("contour", tmp_path / "out" / "last.h5", "-o", tmp_path / "c.h5", *model)
    assert code == 0, err
