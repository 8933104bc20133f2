"""A training loop of the user's own, recorded: the numbers by hand, the loop undisturbed, every command on it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import landscape
import landscape.plots
from landscape import InputError, OperationError, Recorder
from landscape.checkpoint.history import UNITS
from landscape.training.own_loop import recorder as recorder_module
from landscape.training.own_loop.observer import Observer
from landscape.training.own_loop.recorder import RecorderWarning
from landscape.training.processes.process_group import Group
from landscape.training.recipes.recipe import Recipe
from landscape.training.run import generator
from landscape.training.run.launch import launch
from landscape.training.run.loop import Hooks
from tests.conftest import Command
from tests.groups import together
from tests.nets import Tied
from tests.problems import assert_identity
from tests.test_cli import one_line

ROOT = Path(__file__).parents[1]
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """A small convolutional network for digits; a frozen scale, a buffer, and perhaps BatchNorm and dropout."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(36, 10)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x.view(-1, 1, 8, 8))).tanh() * self.scale + self.shift
        out: Tensor = self.head(self.dropout(hidden.flatten(1)))
        return out


def digits(samples: int = 120, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x, y = landscape.data.load("digits").train
    return x[:samples].to(dtype), y[:samples]


def splits() -> dict[str, Any]:
    """What --data tests.test_recorder:splits gives."""
    return {"train": digits(dtype=torch.float32), "test": digits(50, torch.float32)}


def net(**options: Any) -> Net:
    torch.manual_seed(1)
    return Net(**options).double()


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """∇L by hand, of the trainable parameters."""
    own = copy.deepcopy(model)
    own.zero_grad()
    F.cross_entropy(own(x), y).backward()
    return torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def loop(
    recorder: Recorder | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    cosine: bool = False,
    first: int = 0,
    whole: bool = False,
    each: Callable[[int], None] = lambda step: None,
) -> None:
    """A usual training loop; minibatches are those of the step's number, or the ``whole`` data."""
    x, y = digits()
    x = x.to(next(model.parameters()).dtype)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12) if cosine else None
    for t in range(first, first + steps):
        rows = torch.randint(len(y), (16,), generator=torch.Generator().manual_seed(t))
        rows = torch.arange(len(y)) if whole else rows
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        if recorder is None:
            optimizer.step()
        else:
            with recorder.step():
                optimizer.step()
        if scheduler:
            scheduler.step()
        each(t + 1)


def record(
    folder: Path,
    steps: int,
    make: Optimizers | None = None,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    loops: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[landscape.Checkpoint, nn.Module]:
    """A recorded loop: what is in the folder then, and the model; ``loops``: options of :func:`loop`."""
    model = net() if model is None else model
    optimizer = (make or plain)(model.parameters())
    data = digits() if data is None else data
    with Recorder(folder, model, F.cross_entropy, data, optimizer=optimizer, **options) as recorder:
        loop(recorder, model, optimizer, steps, **(loops or {}))
    run = landscape.load(folder / "last.h5")
    assert isinstance(run, landscape.Checkpoint)
    return run, model


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Stream(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """Samples one after another, of which none can be asked for by its number."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Any:
        return iter(zip(self.x, self.y, strict=True))


# The numbers.


@pytest.mark.parametrize("form", ["momentum", "adamw", "tensors", "data set", "stream", "loader"])
def test_steps_are_decomposed_as_by_hand(tmp_path: Path, form: str) -> None:
    """In float64. With BatchNorm, g is that of fixed batches: drawn at random, or the data's own."""
    (x, y), seed, norm = digits(110), 5, form not in ("momentum", "adamw")
    by_class = y.argsort(stable=True)  # as folders of images come: their order is not that of training
    x, y = x[by_class], y[by_class]
    batches: tuple[Tensor, ...] = (torch.arange(110),)
    if norm:
        drawn = torch.randperm(110, generator=generator(seed, "decompose")).tensor_split(5)
        batches = drawn if form in ("tensors", "data set") else torch.arange(110).split(25)
    samples = torch.utils.data.TensorDataset(x, y)
    data = {
        "data set": samples, "stream": Stream(x, y), "loader": torch.utils.data.DataLoader(samples, 25),
    }.get(form, (x, y))  # fmt: skip
    rates, weights, gradients = list[float](), list[Tensor](), list[Tensor]()
    model = net(norm=norm)

    def each(step: int) -> None:
        rates.append(0.1 * (1 + math.cos(math.pi * step / 12)) / 2)
        weights.append(flat(model))
        gradients.append(sum(gradient(model, x[rows], y[rows]) * len(rows) / 110 for rows in batches))  # type: ignore[arg-type]

    each(0)
    run, _ = record(
        tmp_path, 6, adamw if form == "adamw" else momentum, model=model, data=data, every=2, seed=seed,
        batch=25 if norm and form != "loader" else 0, loops={"each": each, "cosine": form == "momentum"},
    )  # fmt: skip
    assert run.history["step"].tolist() == [0, 2, 4, 6]
    rows = {name: column[1:] for name, column in run.history.items()}
    for i, t in enumerate((2, 4, 6)):
        d, g = weights[t] - weights[t - 1], gradients[t - 1]
        alpha_e = float(-(d @ g) / (g @ g))
        if form == "momentum":
            assert rows["lr"][i] == pytest.approx(rates[t - 1])
        assert rows["displacement2"][i] == pytest.approx(float(d @ d), rel=1e-10)
        assert rows["grad_norm2"][i] == pytest.approx(float(g @ g), rel=1e-10)
        assert rows["alpha_e"][i] == pytest.approx(alpha_e, rel=1e-9)
        assert rows["delta"][i] == pytest.approx(float((d + alpha_e * g).square().sum()), rel=1e-9)
    assert_identity(run.history, 1e-12)
    assert torch.equal(run.weights[0], flat(model))


def test_files_have_the_statistics_of_batchnorm_under_which_they_are_tested(tmp_path: Path) -> None:
    x, y = digits()
    run, model = record(
        tmp_path, 3, model=net(norm=True), every=1, batch=len(y), test=digits(40), loops={"whole": True}
    )
    np.testing.assert_allclose(run.history["alpha_e"][1:], 0.1, rtol=1e-10)
    assert (run.lr, run.epoch) == (0.1, 3)
    assert {"norm.running_mean", "norm.running_var", "scale", "shift"} <= run.buffers.keys()
    x, y = digits(40)
    truth = float(F.cross_entropy(model.eval()(x), y).detach())
    problem = run.problem("train", model=net(norm=True), data=(x, y), dtype=torch.float64)
    assert (run.history["test_loss"][-1], problem.loss()) == pytest.approx((truth, truth), rel=1e-12)


@pytest.mark.parametrize("given", [True, False])
def test_samples_weigh_as_their_terms_say(tmp_path: Path, given: bool) -> None:
    """A loss of one's own over sequences with padding, whose numbers of terms are given, or found."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), torch.randn(10, 5, 3).double()
    y = torch.randint(4, (10, 5)).masked_fill(torch.arange(5) >= torch.randint(1, 6, (10, 1)), -1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)

    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    optimizer = plain(model.parameters())
    counts: dict[str, Any] = {"terms": lambda y: (y >= 0).sum(1)} if given else {}
    said = contextlib.nullcontext() if given else pytest.warns(landscape.ProblemWarning, match="terms=")
    with said:
        recorder = Recorder(tmp_path / "b", model, loss, batches, every=1, test=(x, y), **counts)
    with recorder:
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            with recorder.step():
                optimizer.step()
    rows = landscape.load(tmp_path / "b" / "last.h5").history
    np.testing.assert_allclose(rows["alpha_e"][1:], 0.1, rtol=1e-10)
    assert rows["test_loss"][-1] == pytest.approx(loss(model(x), y).item(), rel=1e-12)


def test_sharpness_is_that_of_the_hessian(tmp_path: Path) -> None:
    run, model = record(tmp_path, 4, momentum, every=0, sharpness=4)
    truth = landscape.top_eigenvalues(landscape.Problem(model, F.cross_entropy, digits()), 1).values[0]
    assert run.history["lambda_max"][-1] == pytest.approx(float(truth), rel=0.02)
    assert run.history["lr_lambda_limit"][-1] == pytest.approx(3.8, abs=1e-3)
    assert run.history["lr_lambda_max"][-1] == pytest.approx(0.1 * run.history["lambda_max"][-1])


# The loop is left as it is.


@pytest.mark.parametrize(
    ("measuring", "words"), [(20.0, "91% of the time; a larger"), (3.0, "60% of the time\n")]
)
def test_the_share_of_the_measurements_is_said_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    measuring: float,
    words: str,
) -> None:
    """On a clock of the test's: a step takes a second."""
    seconds = [0.0]

    def measured(self: Observer, step: int, lr: float) -> dict[str, float]:
        seconds[0] += measuring
        return {}

    monkeypatch.setattr(Observer, "instrument_columns", measured)
    monkeypatch.setattr(recorder_module, "time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))
    model = nn.Linear(3, 2)
    data = torch.ones(9, 3), torch.ones(9, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Recorder(tmp_path / "r", model, F.mse_loss, data, every=0, sharpness=2) as recorder:
            for _ in range(6):
                seconds[0] += 1.0
                with recorder.step():
                    pass
    told = [str(each.message) for each in caught] + capsys.readouterr().err.splitlines(keepends=True)
    assert len(told) == 1
    assert f"measurements every 2 steps take {words}" in told[0]
    assert not caught or caught[0].filename == __file__


def test_the_loop_is_undisturbed(tmp_path: Path) -> None:
    """Its random numbers, gradients, modes and weights."""

    def end(recorded: bool) -> list[Any]:
        model = net(norm=True, dropout=0.3).train()
        model.head.eval()  # a mode of one's own
        optimizer, (x, y) = adamw(model.parameters()), digits(48)
        generator, data = torch.Generator().manual_seed(4), torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=generator)
        torch.manual_seed(7)
        np.random.seed(7)  # noqa: NPY002
        options: dict[str, Any] = {"every": 2, "test": (x, y), "sharpness": 3, "save_every": 4}
        recorder = Recorder(tmp_path, model, F.cross_entropy, loader, **options) if recorded else None
        with recorder or contextlib.nullcontext():
            for inputs, targets in itertools.chain(loader, loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                before = [(p.grad, copy.deepcopy(p.grad)) for p in model.parameters()]
                with recorder.step() if recorder else contextlib.nullcontext():
                    optimizer.step()
                for p, (same, equal) in zip(model.parameters(), before, strict=True):
                    assert p.grad is same
                    assert same is None or torch.equal(same, equal)
        draws = torch.rand(3), torch.from_numpy(np.random.rand(3)), generator.get_state()  # noqa: NPY002
        return [*model.state_dict().values(), *draws, torch.tensor([m.training for m in model.modules()])]

    assert all(torch.equal(a, b) for a, b in zip(end(False), end(True), strict=True))


def test_steps_inside_no_grad_and_autocast_are_recorded_alike(tmp_path: Path) -> None:
    found = []
    for around in (torch.enable_grad, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        model, folder = net(), tmp_path / str(len(found))
        recorder = Recorder(folder, model, F.cross_entropy, digits(), every=1)
        with recorder, around(), recorder.step():
            pass
        history = landscape.load(folder / "last.h5").history
        found.append({name: column[-1] for name, column in history.items()})
    assert found[0]["grad_norm2"] == found[1]["grad_norm2"] == found[2]["grad_norm2"] > 0
    for name in ("displacement2", "delta", "alpha_e"):  # of a step that a GradScaler skips
        assert found[0][name] == 0


# Files.


def test_resume_equals_unbroken(tmp_path: Path) -> None:
    options = {"every": 4, "save_every": 8, "samples": 160, "sharpness": 8, "test": digits(30)}

    def run(folder: Path, parts: list[int]) -> landscape.Checkpoint:
        model = net()
        optimizer = momentum(model.parameters())
        done = 0
        for steps in parts:
            with Recorder(folder, model, F.cross_entropy, digits(), resume=bool(done), **options) as recorder:
                loop(recorder, model, optimizer, steps, first=done)
                done += steps
                recorder.log(loss=1 / done, mine=done, unit="nat")
                assert recorder.steps == done
        found = landscape.load(folder / "last.h5")
        assert isinstance(found, landscape.Checkpoint)
        return found

    whole, parted = run(tmp_path / "a", [24]), run(tmp_path / "b", [8, 16])
    assert whole.step == parted.step == 24
    assert torch.equal(whole.weights, parted.weights)
    for name, column in whole.history.items():
        if name not in ("wall_s", "loss", "mine"):
            np.testing.assert_array_equal(column, parted.history[name], err_msg=name)
    assert (whole.history["grad_norm2_se"][1:] > 0).all()  # of sampled gradients
    assert parted.units["mine"] == "nat"
    assert parted.history["mine"][[2, 6]].tolist() == [8, 24]
    assert (np.diff(parted.history["wall_s"]) > 0).all()
    names = sorted(path.name for path in (tmp_path / "b").glob("*.h5"))
    assert names == ["last.h5", *(f"step-{t:07d}.h5" for t in (0, 8, 16, 24))]
    (tmp_path / "b" / "last.h5").unlink()
    step = landscape.load(tmp_path / "b" / "step-0000024.h5")
    np.testing.assert_array_equal(step.history["delta"], parted.history["delta"])


def test_resume_at_an_earlier_step_drops_what_came_later(tmp_path: Path) -> None:
    record(tmp_path, 12, every=2, save_every=4)
    again = net()
    loop(None, again, plain(again.parameters()), 6)
    run, _ = record(tmp_path, 4, model=again, every=2, save_every=4, resume=6, loops={"first": 6})
    assert run.step == 10
    assert run.history["step"].tolist() == [0, 2, 4, 6, 8, 10]
    assert sorted(p.stem for p in tmp_path.glob("step-*.h5")) == [f"step-{t:07d}" for t in (0, 4, 6, 8, 10)]


def test_resume_with_other_weights_warns_and_another_model_is_refused(tmp_path: Path) -> None:
    record(tmp_path, 3, resume=True)
    with pytest.raises(OperationError, match=r"holds a run already.*resume=True or another"):
        Recorder(tmp_path, net(), F.cross_entropy, digits())
    with pytest.raises(OperationError, match=r"norm\.weight"):
        Recorder(tmp_path, net(norm=True), F.cross_entropy, digits(), batch=16, resume=True)
    with pytest.warns(RecorderWarning, match="step 3"):
        record(tmp_path, 1, resume=True)
    with pytest.raises(OperationError, match="resume: 5"):
        Recorder(tmp_path / "none", net(), F.cross_entropy, digits(), resume=5)
    assert not (tmp_path / "none" / "last.h5").exists()


def test_own_numbers_have_columns_and_units(tmp_path: Path) -> None:
    model = net()
    optimizer = plain(model.parameters())
    with Recorder(tmp_path, model, F.cross_entropy, digits(), every=5) as recorder:
        loop(
            recorder, model, optimizer, 6,
            each=lambda t: recorder.log(loss=torch.tensor(float(t), requires_grad=True)),
        )  # fmt: skip
        recorder.log(temperature=3, unit="K")
        recorder.log(temperature=4)
        with pytest.raises(InputError, match="'K'"):
            recorder.log(temperature=1, unit="m")
        for name, value in (("delta", 1.0), ("a/b", 1), ("loss", "high"), ("loss", torch.zeros(2))):
            with pytest.raises(InputError, match=name):
                recorder.log(**{name: value})
    run = landscape.load(tmp_path / "last.h5")
    assert run.history["step"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert run.history["loss"][1:].tolist() == [1, 2, 3, 4, 5, 6]
    assert run.history["temperature"][-1] == 4
    assert (run.units["loss"], run.units["temperature"]) == ("nat", "K")
    assert set(UNITS) < set(run.history)


def test_half_precision_frozen_tied_and_unused_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = Tied().bfloat16(), torch.randn(60, 4).bfloat16(), torch.arange(60) % 4
    optimizer = plain(model.parameters())
    with Recorder(tmp_path, model, F.cross_entropy, (x, y), every=1) as recorder:
        F.cross_entropy(model(x), y).backward()
        with recorder.step():
            optimizer.step()
    run = landscape.load(tmp_path / "last.h5")
    names = ["first.weight", "first.bias", "second.bias", "rare.weight", "rare.bias"]
    assert [slot.name for slot in run.layout.slots] == names
    assert run.weights.dtype == run.buffers["scale"].dtype == torch.float32
    assert run.history["alpha_e"][-1] == pytest.approx(0.1, rel=0.05)
    problem = run.problem("train", model=Tied(), data=(x.float(), y))
    assert torch.equal(problem.weights, flat(model).float())
    truth = float(F.cross_entropy(model.float()(x.float()), y).detach())
    assert problem.loss() == pytest.approx(truth, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch about its compiler
def test_parts_that_are_compiled_are_recorded_by_their_own_names(tmp_path: Path) -> None:
    model = net(norm=True)
    model.norm = torch.compile(model.norm, backend="eager")  # type: ignore[assignment]
    whole = torch.compile(model, backend="eager")
    run, _ = record(tmp_path, 2, momentum, model=whole, every=1, batch=16)  # type: ignore[arg-type]
    assert "norm.weight" in {slot.name for slot in run.layout.slots}
    assert "norm.running_mean" in run.buffers
    assert torch.equal(run.problem("train", model=net(norm=True), data=digits()).weights, flat(model))


@pytest.mark.slow
def test_a_process_that_ends_without_close_writes_its_end(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(f"""
import torch, landscape
class Net(torch.nn.Linear): pass
recorder = landscape.Recorder({str(tmp_path / "run")!r}, Net(64, 10), torch.nn.functional.cross_entropy, landscape.data.load("digits").train, every=2)
for _ in range(3):
    with recorder.step():
        pass
""")
    subprocess.run([sys.executable, str(script)], check=True, env=environment())
    run = landscape.load(tmp_path / "run" / "last.h5")
    assert (run.step, run.model["name"], run.history["displacement2"][-1]) == (3, "mine:Net", 0)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


# Right, or refused with one line.


def shrink(model: Net) -> None:
    model.head.bias = None  # type: ignore[assignment]


@pytest.mark.parametrize(("change", "words"), [
    (
        lambda model: model.register_module("extra", nn.Linear(2, 2).double()),
        "'extra.weight' was missing, now float64"),
    (
        lambda model: model.register_module("head", nn.Linear(36, 11).double()),
        r"'head.weight' was float64 of shape \(10, 36\), now float64 of shape \(11, 36\)"),
    (lambda model: model.float(), "was float64 of shape .*, now float32 of"),
    (
        lambda model: model.head.bias.requires_grad_(False),
        r"'head.bias' was .*, now float64 of shape \(10,\), not trained"),
    (lambda model: model.scale.requires_grad_(), "'scale' was .*, not trained, now float64 of shape"),
    (shrink, "'head.bias' was .*, now missing"),
])  # fmt: skip
def test_parameters_that_change_are_refused(tmp_path: Path, change: Callable[[Net], Any], words: str) -> None:
    model = net()
    with Recorder(tmp_path, model, F.cross_entropy, digits(), every=2) as recorder:
        with recorder.step():
            pass
        change(model)
        with pytest.raises(InputError, match=words) as error, recorder.step():
            pass
        assert "\n" not in str(error.value)
    assert landscape.load(tmp_path / "last.h5").step == 0  # written while it was sound


def test_a_step_that_fails_is_none(tmp_path: Path) -> None:
    model = net()
    with Recorder(tmp_path, model, F.cross_entropy, digits(), every=1) as recorder:
        with pytest.raises(RuntimeError), recorder.step():
            raise RuntimeError
        assert recorder.steps == 0
        loop(recorder, model, plain(model.parameters()), 2)
        with pytest.raises(InputError, match="step"), recorder.step(), recorder.step():
            pass
        recorder.step()
        with pytest.raises(InputError, match=r"with recorder\.step"):
            recorder.step()
        with pytest.raises(InputError, match="checkpoint"):
            recorder.checkpoint()
    with pytest.raises(InputError, match="closed"):
        recorder.step()
    with pytest.raises(InputError, match="closed"):
        recorder.log(loss=1.0)


def loader() -> torch.utils.data.DataLoader[Any]:
    data = torch.utils.data.TensorDataset(*digits(8))
    return torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(("options", "words"), [
    ({"samples": 5}, "samples: 5.*16"),
    ({"samples": 16, "data": [digits(8)]}, "samples: 16"),
    ({"optimizer": 3}, "optimizer: 3"),
    ({"scalars": "tensorbord"}, "scalars: 'tensorbord'.*tensorboard"),
    ({"model": Net}, "model: the class Net"),
    ({"model": nn.LazyLinear(10)}, "model: parameter 'weight'"),
    ({"model": net(norm=True)}, "batch: 0.*BatchNorm"),
    (
        {"model": net(norm=True), "data": torch.utils.data.TensorDataset(*digits(24)), "batch": 1},
        "batch: 1.*BatchNorm"),
    ({"model": net(norm=True), "data": Stream(*digits(24))}, "batch: 0.*BatchNorm"),
    ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "loss: .*sum"),
    ({"data": iter([digits(8)])}, "data: .*iterator"),
    ({"data": loader()}, "data: .*persistent_workers"),
    ({"test": iter([digits(8)])}, "test: .*iterator"),
], ids=lambda value: str(value) if isinstance(value, str) else "")  # fmt: skip
def test_bad_input_is_one_line_without_a_trace(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    given = {"model": net(), "loss": F.cross_entropy, "data": digits(24)} | options
    folder = tmp_path / "run"
    with pytest.raises(InputError, match=words) as error:
        Recorder(folder, given.pop("model"), given.pop("loss"), given.pop("data"), **given)
    assert "\n" not in str(error.value)
    assert not folder.exists()


def test_folders_of_others_are_refused(tmp_path: Path, tiny: Path, command: Command) -> None:
    run = tmp_path / "run"
    assert command("train", tiny, "--set", "steps=2", "-o", run, "-q")[0] == 0
    with pytest.raises(OperationError, match="holds a run already"):
        Recorder(run, net(), F.cross_entropy, digits())
    with pytest.raises(OperationError, match="'dpsgd'"):
        Recorder(run, net(), F.cross_entropy, digits(), resume=True)
    mine = tmp_path / "mine"
    with Recorder(mine, net(), F.cross_entropy, digits()), pytest.raises(OperationError, match="in use"):
        Recorder(mine, net(), F.cross_entropy, digits(), resume=True)
    one_line(command("train", "--resume", "-o", mine), 1, "recorded")
    (tmp_path / "file").touch()
    with pytest.raises(OperationError, match="file"):
        Recorder(tmp_path / "file", net(), F.cross_entropy, digits())


# Every command, and other places for the numbers.


def test_every_command_works_on_its_folder(tmp_path: Path, command: Command) -> None:
    torch.manual_seed(1)
    given, recorded = splits(), tmp_path / "mine"
    network = Net()  # in single precision
    optimizer = momentum(network.parameters())
    with Recorder(
        recorded, network, F.cross_entropy, given["train"], every=2, test=given["test"], optimizer=optimizer,
        save_every=2, sharpness=4,
    ) as recorder:  # fmt: skip
        loop(recorder, network, optimizer, 8)
    model, data = ["--model", "tests.test_recorder:Net"], ["--data", "tests.test_recorder:splits"]
    # The model is asked for, and never imported.
    one_line(command("contour", recorded, "--grid", "3", *data), 1, *model)
    for words in (
        ("contour", recorded, "--grid", "2", "--plane", "pca"),
        ("stability", recorded, "--delay", "0"),
    ):
        code, _, err = command(*words, *model, *data, "-q")
        assert code == 0, (words, err)
    code, _, err = command("plot", recorded, "-o", recorded / "training.png", "-q")
    assert code == 0, err
    _, out, _ = command("info", recorded)
    assert "recorded, seed 0, step 8" in out
    assert 'name = "SGD"' in out
    stable = landscape.load(recorded / "last-stability.h5")
    assert (stable.lr, stable.own_limit) == (0.1, pytest.approx(3.8, abs=1e-3))


class Tracker(types.ModuleType):
    """A stand-in for wandb and trackio, which share init, log and finish."""

    run = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []

    def init(self, **options: Any) -> Tracker:
        self.calls.append(options)
        return self

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_numbers_go_to_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    record(tmp_path / "mine", 1, every=1, scalars=name)
    assert tracker.calls[0] == {"project": "landscape", "name": "mine"}
    assert any(call[0] == 1 and "alpha_e" in call[1] for call in tracker.calls[1:-1])
    assert tracker.calls[-1] == "finish"
    if name == "wandb":  # the loop's own run is written to, and left open
        tracker.run, tracker.calls = tracker, []
        with Recorder(tmp_path / "two", net(), F.cross_entropy, digits(), scalars=[name]) as recorder:
            recorder.log(loss=3.0)
        assert tracker.calls[-1] == (None, {"landscape/loss": 3.0, "landscape/step": 0})


def test_a_missing_or_failing_tracker_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, *names: str) -> None:
        with pytest.raises(OperationError, match=words):
            Recorder(tmp_path, net(), F.cross_entropy, digits(), scalars=names)

    for name in ("tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        refused(f"scalars: {name} is not installed; pip install {name}", name)
    first, second = Tracker("trackio"), Tracker("wandb")
    monkeypatch.setattr(second, "init", {}.__getitem__)
    monkeypatch.setitem(sys.modules, "trackio", first)
    monkeypatch.setitem(sys.modules, "wandb", second)
    refused(r"scalars: 'wandb' cannot be used \(TypeError: ", "trackio", "wandb")
    assert first.calls[-1] == "finish"
    record(tmp_path, 0)  # nothing was left there, and the folder was given back


SMALL: dict[str, Any] = {"steps": 6, "checkpoint.every": 3, "evaluate.every": 0, "model.widths": [64, 4, 10]}


def test_a_run_with_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    tracker, folder = Tracker("trackio"), tmp_path / "run"
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setitem(sys.modules, "wandb", None)
    plain_end = landscape.train("digits-dpsgd", tmp_path / "plain", **SMALL)
    with pytest.raises(OperationError, match="scalars: wandb is not installed"):
        landscape.train("digits-dpsgd", folder, scalars="wandb", **SMALL)
    assert not folder.exists()
    landscape.train("digits-dpsgd", folder, **SMALL | {"steps": 3})
    settings = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    settings += ["--resume", "--scalars", "trackio"]
    code, _, err = command("train", "digits-dpsgd", *settings, "-o", folder)
    assert code == 0, err
    rows = dict(tracker.calls[1:-1])
    assert (tracker.calls[0], tracker.calls[-1]) == ({"project": "landscape", "name": "run"}, "finish")
    assert [*rows] == [4, 5, 6]
    history = landscape.load(folder).history
    for step, row in rows.items():
        numbers = {name: column[step - 1] for name, column in history.items() if name != "step"}
        assert row == {name: number for name, number in numbers.items() if math.isfinite(number)}
    assert "test_loss" in rows[6]  # of the end
    assert torch.equal(landscape.load(folder).weights, plain_end.weights)
    again = command("train", "-o", folder, "--resume", "--scalars", "trackio")
    one_line(again, 2, "--scalars: not allowed without")
    one_line(command("train", "digits-dpsgd", "--scalars", "trackyo"), 2, "--scalars", "'trackio'")


def rows_of(group: Group, folder: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    recipe = Recipe.read("digits-dpsgd", **SMALL, **{"decompose.every": 4})
    launch(recipe, folder, hooks=Hooks(row=found.append), group=group)
    return found


def test_rows_are_complete_when_processes_learn_the_loss_a_step_later(tmp_path: Path) -> None:
    first, second = together(2, rows_of, str(tmp_path))
    history = landscape.load(tmp_path / "last.h5").history
    for rows in (first, second):
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["loss"] for row in rows] == history["loss"].tolist()


def ddp(group: Group, folder: str) -> tuple[Any, ...]:
    model = nn.parallel.DistributedDataParallel(net())
    optimizer, (x, y) = plain(model.parameters()), digits()
    half = slice(group.rank * 60, group.rank * 60 + 60)
    with Recorder(folder, model, F.cross_entropy, (x, y), every=2, batch=60, optimizer=optimizer) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x[half]), y[half]).backward()
            with recorder.step():
                optimizer.step()
        recorder.log(loss=1.0)
        path = recorder.checkpoint()
    return flat(model), path, repr(recorder)


def test_under_ddp_rank_0_records(tmp_path: Path) -> None:
    first, second = together(2, ddp, str(tmp_path))
    assert isinstance(first, tuple), first
    assert isinstance(second, tuple), second
    assert torch.equal(first[0], second[0])
    assert (first[1], second[1]) == (tmp_path / "step-0000004.h5", None)
    assert "rank 1" in second[2]
    run = landscape.load(tmp_path / "last.h5")
    assert torch.equal(run.weights[0], first[0])
    assert run.history["step"].tolist() == [0, 2, 4]
    np.testing.assert_allclose(run.history["alpha_e"][1:], 0.1, rtol=1e-12)
    assert run.epoch == 4
    assert run.layout.slots[0].name == "conv.weight"


# Examples.


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words", "pictures"), [
    ("own_loop.py", "test accuracy 0.9", ["contour.png"]),
    ("two_optimizers.py", "λ_max", ["two.png", "training.png"]),
])  # fmt: skip
def test_the_examples(name: str, words: str, pictures: list[str], tmp_path: Path) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), "out"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert all((tmp_path / "out" / picture).stat().st_size > 10_000 for picture in pictures)
