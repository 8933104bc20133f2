"""Weights that others trained, as checkpoints: only weights are read, and only a user's own words import code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo

import landscape
from landscape import InputError, OperationError, Problem
from landscape.checkpoint import user_code
from landscape.checkpoint.states import MAX_BYTES, read_state
from landscape.checkpoint.user_code import as_data, load_loss, parse
from tests import problems
from tests.conftest import Command
from tests.nets import flat
from tests.test_cli import one_line

MODULE = """
import pathlib
import torch
from torch import nn
from tests import problems

pathlib.Path(__file__).with_name("imported").touch()  # running this code leaves a trace

def net(extra=0):
    model = problems.SmallConv()
    model.conv.bias.requires_grad_(False)
    if extra:
        model.more = nn.Linear(extra, 1)
    return model

def images(seed=3, both=True):
    generator = torch.Generator().manual_seed(seed)
    def split(n):
        return torch.randn(n, 1, 6, 6, generator=generator), torch.randint(2, (n,), generator=generator)
    made = {"train": split(30), "test": split(12)}
    return made if both else {"test": made["test"]}

def loader():
    x, y = images()["test"]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)

def unseeded():
    return torch.randn(9, 1, 6, 6), torch.zeros(9, dtype=torch.long)

def smooth():
    return nn.CrossEntropyLoss(label_smoothing=0.1)

def broken():
    raise ValueError("first line\\nsecond")

def language():
    return problems.LanguageModel(causal=True)

def text():
    return {"train": problems.tokens(), "test": [problems.tokens(4)]}

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, the current one, with a module ``mine``."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def trained(seed: int = 0, steps: int = 20) -> problems.SmallConv:
    """A network whose BatchNorm has seen data like that of ``mine.images``."""
    torch.manual_seed(seed)
    model = problems.SmallConv()
    for _ in range(steps):
        model(torch.randn(8, 1, 6, 6))
    return model


def unseen() -> tuple[Tensor, Tensor]:
    """The test split of ``mine.images``."""
    generator = torch.Generator().manual_seed(3)
    for size in (30, 12):
        x, y = torch.randn(size, 1, 6, 6, generator=generator), torch.randint(2, (size,), generator=generator)
    return x, y


@torch.no_grad()
def true_loss(model: nn.Module) -> float:
    """The model's own loss on that split."""
    x, y = unseen()
    return float(F.cross_entropy(model.eval()(x), y))


OWN = ("--model", "mine:net", "--data", "mine:images")
State = dict[str, Tensor]
#: How training scripts save a state, and torch's wrappers name it; and what is told of it.
WRAPPINGS: dict[str, tuple[Callable[[State], Any], set[str]]] = {
    "plain": (lambda state: state, set()),
    "state_dict": (lambda state: {"state_dict": state, "epoch": 3}, {"under 'state_dict'"}),
    "model": (lambda state: {"model": state, "optimizer": {"lr": 0.1}}, {"under 'model'"}),
    "model_state_dict": (lambda state: {"model_state_dict": state, "loss": 0.3}, {"under 'model_state_dict'"}),
    "DataParallel": (lambda state: {f"module.{k}": v for k, v in state.items()}, {"dropped 'module.'"}),
    "compiled": (lambda state: {f"_orig_mod.{k}": v for k, v in state.items()}, {"dropped '_orig_mod.'"}),
    "compiled inside": (
        lambda state: {k.replace(".", "._orig_mod.", 1): v for k, v in state.items()}, {"dropped '_orig_mod.'"}),
    "all": (
        lambda state: {"state_dict": {f"module._orig_mod.{k}": v for k, v in state.items()}},
        {"under 'state_dict'", "dropped 'module.'", "dropped '_orig_mod.'"}),
    "half": (lambda state: {k: v.half() if v.is_floating_point() else v for k, v in state.items()}, set()),
    "safetensors": (lambda state: state, set()),
}  # fmt: skip


@pytest.mark.parametrize("how", WRAPPINGS)
def test_common_wrappings_are_taken_off_and_told(how: str, folder: Path, command: Command) -> None:
    model, (wrap, told) = trained(), WRAPPINGS[how]
    path = "net.safetensors" if how == "safetensors" else "net.pth"
    save = safetensors.torch.save_file if how == "safetensors" else torch.save
    save(wrap(model.state_dict()), path)
    code, out, err = command("import", path, *OWN)
    assert (code, out.splitlines()[-1]) == (0, "net.h5")
    assert {words for _, every in WRAPPINGS.values() for words in every if words in err} == told
    run = landscape.load("net.h5")
    assert (run.weights.dtype, run.label) == (torch.float32, "net (mine:net)")
    statistics = {f"norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    assert {*run.buffers} == {"conv.bias"} | statistics
    rtol = 1e-3 if how == "half" else 0
    for name, value in run.buffers.items():
        torch.testing.assert_close(value[0], model.state_dict()[name], rtol=rtol, atol=rtol)
    model.conv.bias.requires_grad_(False)
    problem = run.problem("test", model=model, data=unseen())
    assert problem.loss() == pytest.approx(true_loss(model), rel=1e-2 if how == "half" else 1e-6)
    assert f"test: loss {problem.loss():.4g}"[:16] in out
    assert "accuracy" in out


def test_analyses_take_an_import(folder: Path, command: Command) -> None:
    model = trained()
    torch.save(model.state_dict(), "net.pt")
    assert command("import", "net.pt", *OWN)[0] == 0
    for words in (
        "contour --grid 1",
        "hessian-grid --grid 1 --loss mine:smooth() --randomness seed --residual-tol 0.1",
        "line --points 2 --bn recalibrate",
    ):
        name, *options = words.split()
        code, _, err = command(name, "net.h5", *options, *OWN, "--split", "test")
        assert code == 0, err
    surface = landscape.load("net-contour-test.h5")
    assert surface.loss[0, 0] == pytest.approx(true_loss(model), rel=1e-5)
    out = command("info", "net.h5")[1]
    for words in ("model: mine:net {}", "30 train, 12 test", "norm.running_var", 'file = "net.pt"', "sha256"):
        assert words in out
    one_line(command("plot", "net.h5"), 2, "net.h5", "imported weights")
    one_line(command("noise", "net.h5", *OWN), 2, "--lr, --local-batch", "give both")
    noise = command("noise", "net.h5", *OWN, "--lr", "1", "--local-batch", "4")
    one_line(noise, 2, "weights: those of 1 network are not allowed", "at least 2")


def test_several_states_are_learners_whose_mean_has_own_statistics(folder: Path, command: Command) -> None:
    models = [trained(seed) for seed in range(3)]
    for j, model in enumerate(models):
        model.conv.bias.data.copy_(models[0].conv.bias)
        torch.save(model.state_dict(), f"w{j}.pt")
    assert command("import", "w0.pt", "w1.pt", "w2.pt", *OWN, "-o", "all.h5")[0] == 0
    code, out, _ = command("noise", "all.h5", *OWN, "--lr", "0.1", "--local-batch", "5", "--draws", "2")
    assert (code, "Eq. 4" in out) == (0, True)
    assert command("contour", "all.h5", *OWN, "--plane", "learners", "--grid", "2")[0] == 0
    run = landscape.load("all.h5")
    import mine  # type: ignore[import-not-found]  # now the command has imported it

    data = mine.images()
    for j, model in enumerate(models):  # each learner with its own statistics
        problem = run.problem("test", learner=j, model=mine.net, data=data)
        assert problem.loss() == pytest.approx(true_loss(model), rel=1e-5)
    # The mean: averaged weights, statistics of one pass over the training set in train mode (30 samples are
    # one batch), as torch.optim.swa_utils.update_bn gives them.
    mean = mine.net()
    for name, parameter in mean.named_parameters():
        parameter.data.copy_(sum(dict(m.named_parameters())[name] for m in models) / 3)
    torch.optim.swa_utils.update_bn([data["train"][0]], mean)
    problem = run.problem("test", model=mine.net, data=data)
    for name, buffer in mean.named_buffers():
        torch.testing.assert_close(problem.model.get_buffer(name), buffer)
    assert problem.loss() == pytest.approx(true_loss(mean), rel=1e-5)
    test_alone = ("--model", "mine:net", "--data", "mine:images(both=false)", "--grid", "2")
    one_line(command("contour", "all.h5", *test_alone), 2, "split: 'train'", "test")


def test_a_language_model_with_tied_frozen_and_unused_parameters(folder: Path, command: Command) -> None:
    torch.manual_seed(1)
    model = problems.LanguageModel(causal=True)
    state = model.state_dict()
    torch.save(state, "whole.pt")
    lean = {k: v for k, v in state.items() if k != "head.weight"}  # as safetensors leaves out what is tied
    safetensors.torch.save_file(lean, "lean.safetensors")
    own = ("--model", "mine:language", "--data", "mine:text")
    for name in ("whole.pt", "lean.safetensors"):
        code, out, err = command("import", name, *own)
        assert code == 0, err
    a, b = landscape.load("whole.h5"), landscape.load("lean.h5")
    assert torch.equal(a.weights, b.weights)
    assert set(a.buffers) == {"position"}
    assert a.weights.shape[1] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    fresh = problems.LanguageModel(causal=True)  # its frozen positions are other ones
    problem = a.problem("train", model=fresh, data={"train": problems.tokens()})
    assert problem.loss() == pytest.approx(Problem(model, None, problems.tokens()).loss(), rel=1e-6)
    assert f"train: loss {problem.loss():.6g}, accuracy {problem.accuracy():.2%} (11 samples)" in out
    assert command("contour", "whole.h5", *own, "--grid", "2")[0] == 0
    assert command("spectrum", "whole.h5", *own, "--split", "train", "--residual-tol", "0.1")[0] == 0
    torch.save(state | {"head.weight": state["head.weight"] + 1}, "untied.pt")
    one_line(command("import", "untied.pt", *own), 1, "'embedding.weight' and 'head.weight' differ")


def test_a_built_in_model_needs_no_option_later(folder: Path, command: Command) -> None:
    torch.save(landscape.models.build("mlp", widths=[64, 5, 10]).state_dict(), "mlp.pt")
    code, out, _ = command("import", "mlp.pt", "--model", "mlp(widths=[64, 5, 10])", "--data", "digits")
    assert (code, "accuracy" in out) == (0, True)
    assert command("contour", "mlp.h5", "--grid", "2")[0] == 0
    run = landscape.load("mlp.h5")
    assert run.model == {"name": "mlp", "options": {"widths": [64, 5, 10], "activation": "relu"}}
    assert run.data["fingerprint"] == landscape.data.load("digits").fingerprint


class Danger:
    """Unpickling it would write a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("pickle-ran"),)


def test_code_is_neither_unpickled_nor_imported_by_reading(folder: Path, command: Command) -> None:
    torch.save(trained(), "whole.pt")
    torch.save({"state_dict": trained().state_dict(), "danger": Danger()}, "danger.pt")
    for name in ("whole.pt", "danger.pt"):
        words = f"{name}: not a file of weights alone", "never run"
        one_line(command("import", name, "--model", "mine:net"), 1, *words)
    assert not (folder / "pickle-ran").exists()
    torch.save(trained().state_dict(), "net.pt")
    assert command("import", "net.pt", *OWN)[0] == 0
    (folder / "imported").unlink()
    sys.modules.pop("mine")
    run = landscape.load("net.h5")
    assert command("info", "net.h5")[0] == 0
    for call in (run.problem, lambda: run.problem(data=(torch.zeros(2, 1, 6, 6), torch.zeros(2)))):
        with pytest.raises(OperationError, match="give data='mine:images'|give model='mine:net'"):
            call()
    for given, words in (
        ((), ("net.h5: its data is 'mine:images'", "give --data mine:images")),
        (("--data", "digits"), ("its model is 'mine:net'", "give --model mine:net")),
        (("--model", "mlp(widths=[4, 2])", "--data", "digits"), ("do not fit the model", "'conv.weight'")),
    ):
        one_line(command("contour", "net.h5", *given), 1, *words)
    assert not (folder / "imported").exists()
    assert "mine" not in sys.modules


def test_states_that_do_not_fit_name_the_parameter(folder: Path, command: Command) -> None:
    state = trained().state_dict()
    nan = state["conv.weight"] * torch.nan
    own = ("--model", "mine:net")
    for name, content, model, *words in (
        ("shape", state | {"head.weight": torch.zeros(2, 4)}, "net", "'head.weight' has shape (2, 4)"),
        ("missing", {k: v for k, v in state.items() if k != "head.bias"}, "net", "lacks 'head.bias'"),
        ("extra", state | {"heat.bias": nan}, "net", "'heat.bias' is not in the", "did you mean 'head.bias'"),
        ("other", state, "net(extra=2)", "lacks 'more.weight' of the model mine:net"),
        ("buffer", state | {"norm.running_var": torch.ones(4)}, "net", "'norm.running_var' has shape (4,)"),
        ("nan", state | {"conv.weight": nan}, "net", "'conv.weight' holds NaN"),
        ("text", state | {"conv.bias": "x"}, "net", "'conv.bias' is no tensor"),
        ("list", [1, 2], "net", "holds no tensors by name"),
    ):
        torch.save(content, f"{name}.pt")
        one_line(command("import", f"{name}.pt", "--model", f"mine:{model}"), 1, f"{name}.pt: ", *words)
    del state["norm.num_batches_tracked"]  # as before PyTorch 0.4.1
    torch.save(state, "old.pt")
    assert command("import", "old.pt", *own)[0] == 0
    Path("junk.pt").write_bytes(b"junk")
    Path("junk.safetensors").write_bytes(b"junk")
    Path("cut.pt").write_bytes(Path("old.pt").read_bytes()[:500])
    for name in ("junk.pt", "junk.safetensors", "cut.pt", "none.pt"):
        one_line(command("import", name, *own, "-o", "x.h5"), 1, f"{name}: ")
    Path("net.onnx").write_bytes(b"junk")
    one_line(command("import", "net.onnx", *own), 2, "net.onnx", ".safetensors")
    one_line(command("import", "old.pt", "-o", "x.h5"), 2, "--model: missing", "MODULE:NAME")
    said = "old.h5: complete already, nothing is imported\n"
    assert command("import", "old.pt", *own) == (0, "old.h5\n", said)
    one_line(command("import", "old.pt", *own, "-o", "x.pt"), 2, "x.pt", ".h5")
    assert sorted(p.name for p in folder.glob("*.h5")) == ["old.h5"]


def test_bad_names_and_factories_are_one_line(folder: Path, command: Command) -> None:
    torch.save(trained().state_dict(), "net.pt")
    (folder / "wrong.py").write_text("import nowhere_at_all\n")
    for model, code, *words in (
        ("mien:net", 2, "--model: there is no module 'mien'"),
        ("mine:nte", 2, "--model: mine (", "has no 'nte'; did you mean 'net'?"),
        ("mine:broken", 1, "mine:broken failed: ValueError: first line second (mine.py, line "),
        ("mine:number", 2, "gives a int, it must give an nn.Module"),
        ("mine:net(depth=2)", 1, "mine:net failed: TypeError", "depth"),
        ("mine:net(depth=2026-01-01)", 2, "'(depth=2026-01-01)' is not allowed"),
        ("mine:net(depth=)", 2, "'(depth=)' is not allowed"),
        ("mlq", 2, "--model: 'mlq' is not known; did you mean 'mlp'?", "MODULE:NAME"),
        ("mlp(width=[3])", 2, "did you mean 'widths'"),
        ("a b", 2, "--model: 'a b' is not allowed"),
        ("wrong:net", 1, "importing wrong failed", "wrong.py, line 1"),
    ):
        one_line(command("import", "net.pt", "--model", model), code, *words)
    own = ("import", "net.pt", "--model", "mine:net")
    one_line(command(*own, "--data", "mine:broken"), 1, "--data: mine:broken failed")
    one_line(command(*own, "--data", "digits"), 2, "model and data do not fit", "inputs (12, 64)")
    for loss, *words in (
        ("cross_entropy", "--loss", "MODULE:NAME or output"),
        ("mine:number", "--loss", "gives a int"),
        ("output", "--loss: missing, and this Tensor has no .loss"),
    ):
        one_line(command(*own, "--data", "mine:images", "--loss", loss), 2, *words)
    assert list(folder.glob("*.h5")) == []
    assert command(*own, "--data", "mine:unseeded")[0] == 0
    again = ("contour", "net.h5", "--model", "mine:net", "--grid", "2", "--data")
    one_line(command(*again, "mine:unseeded"), 1, "mine:unseeded", "without a seed")
    assert command(*again, "mine:loader")[0] == 0
    sys.modules.pop("wrong", None)


class Samples(torch.utils.data.Subset[Any]):
    """One at a time, without being an iterable."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(samples, range(len(samples)))  # type: ignore[arg-type]


def test_what_data_may_be() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    for made in ((x, y), [(x, y)], {"train": (x, y), "test": (x, y)}, as_data((x, y))):
        data = as_data(made)
        assert data.loss is F.cross_entropy
        assert data.split("test") is not None
    assert as_data({"input_ids": x, "labels": y}).loss is None
    assert as_data([{"input_ids": x}]).loss is None
    assert as_data(Samples([{"input_ids": x[0]}])).loss is None
    assert as_data(Samples([(x[0], y[0])])).loss is F.cross_entropy
    assert as_data({"test": (x, y), "loss": F.mse_loss}).loss is F.mse_loss
    assert as_data({"test": (x, y), "loss": None}).loss is None
    with pytest.raises(InputError, match="split: 'validation' is not known"):
        as_data({"train": (x, y), "valid": (x, y)}).split("validation")
    digits = landscape.data.load("digits")
    assert as_data(digits) is digits
    assert as_data((x, y)).fingerprint == as_data((x.clone(), y)).fingerprint
    assert as_data((x, y)).fingerprint != as_data((x + 1, y)).fingerprint
    assert as_data((x.bfloat16(), y)).fingerprint != as_data((x, y)).fingerprint
    assert as_data([(x, y)]).fingerprint == ""


def test_specs_and_losses() -> None:
    spec = parse("--model", "my.nets:Net.small(depth=2, widths=[1, 2])")
    assert (spec.name, spec.options, spec.called) == (
        "my.nets:Net.small", {"depth": 2, "widths": [1, 2]}, True,
    )  # fmt: skip
    assert not parse("--model", "digits").called
    for text in ("", "a:", ":b", "a:b:c", "a(", "a(b", "a b", "a(b=1)c"):
        with pytest.raises(InputError, match="--model"):
            parse("--model", text)
    assert load_loss("--loss", "output") is None
    assert load_loss("--loss", "torch.nn.functional:mse_loss") is F.mse_loss
    assert isinstance(load_loss("--loss", "torch.nn:MSELoss"), nn.MSELoss)
    made = load_loss("--loss", "torch.nn:CrossEntropyLoss(label_smoothing=0.1)")
    assert isinstance(made, nn.CrossEntropyLoss)
    assert made.label_smoothing == 0.1


def test_from_python_the_model_names_itself(tmp_path: Path) -> None:
    model = trained()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "net.pt")
    said: list[str] = []
    run = landscape.import_state(tmp_path / "net.pt", problems.SmallConv(), message=said.append)
    assert said == [f"{tmp_path}/net.pt: took the state under 'state_dict'"]
    assert run.model["name"] == "tests.problems:SmallConv"
    run.save(tmp_path / "net.h5")
    back = landscape.load(tmp_path / "net.h5")
    assert torch.equal(back.weights, run.weights)
    assert np.isnan(back.lr)
    with pytest.raises(OperationError, match="its data is not known; give data='MODULE:NAME'"):
        back.problem(model=model)
    with pytest.raises(
        OperationError, match=r"do not fit the model: 'conv.weight' is \(3, 1, 3, 3\) in the file, missing"
    ):
        back.problem(model=nn.Linear(3, 2), data=unseen())
    wider = problems.SmallConv()
    wider.norm = nn.BatchNorm2d(3, track_running_stats=False)
    with pytest.raises(OperationError, match="its buffer 'norm.running_mean'|its buffer 'norm.num_batches"):
        back.problem(model=wider, data=unseen())


@pytest.mark.skipif(sys.platform != "linux", reason="only there can the current folder be deleted")
def test_a_current_folder_that_was_deleted_is_one_line(tmp_path: Path) -> None:
    command = f"mkdir here; cd here; rmdir ../here; {sys.executable} -m landscape recipes"
    path = str(Path(user_code.__file__).parents[2])
    ended = subprocess.run(
        command, shell=True, cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    assert "the current folder has been deleted" in ended.stderr


# ---- Files as other programs store them


def optimizer_of(model: nn.Module) -> dict[str, Any]:
    """The state of an optimizer after a step, which has a tensor for each parameter."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 1, 6, 6)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


#: What training scripts save beside the model, without weights of another one.
BESIDE: dict[str, Callable[[nn.Module], Any]] = {
    "epoch": lambda model: 3,
    "args": lambda model: argparse.Namespace(lr=0.1, data="x"),
    "best": lambda model: torch.tensor(0.3),
    "opt": optimizer_of,
    "optimizers": lambda model: [optimizer_of(model)],
    "both": lambda model: {"g": optimizer_of(model)},
    "rng": lambda model: {"cpu": torch.get_rng_state()},
    "callbacks": lambda model: {"checkpoint": {"best": torch.tensor(0.1), "files": {"a": torch.tensor(0.2)}}},
}


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.lists(st.text(min_size=1).filter(lambda word: word not in BESIDE), max_size=3),
    st.sets(st.sampled_from(sorted(BESIDE))),
    st.booleans(),
)
def test_the_one_state_is_taken_under_any_name(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], beside: set[str], first: bool
) -> None:
    model, path = trained(), tmp_path_factory.getbasetemp() / "any.pt"
    others = {name: BESIDE[name](model) for name in sorted(beside)} if keys else {}
    whole: Any = dict(model.state_dict())
    for key in reversed(keys):
        whole = {key: whole, **others} if first else {**others, key: whole}
    torch.save(whole, path)
    run = landscape.import_state(path, problems.SmallConv())
    assert torch.equal(run.weights[0], flat(model))


def test_several_states_are_refused_by_name(folder: Path) -> None:
    model = trained()
    state, average = model.state_dict(), {f"module.{k}": v * 0.9 for k, v in trained(1).state_dict().items()}
    torch.save({"net": state, "ema": average, "opt": optimizer_of(model)}, "100%.pt")
    for call in (lambda: read_state("100%.pt"), lambda: landscape.import_state("100%.pt", model)):
        with pytest.raises(OperationError, match="100%.pt: holds several states, 'net', 'ema'; ") as error:
            call()
    exec(re.search(r"torch\.save\(.*\)", str(error.value))[0], {"torch": torch})  # type: ignore[index]
    assert torch.equal(landscape.import_state("one.pt", model).weights[0], flat(model))
    state = model.state_dict()
    other = nn.Conv3d(1, 2, 1, bias=False).state_dict()
    torch.save({"g": state, "d": other, "losses": torch.ones(3)}, "gan.pt")
    assert torch.equal(landscape.import_state("gan.pt", model).weights[0], flat(model))
    torch.save(optimizer_of(model), "opt.pt")
    with pytest.raises(OperationError, match="opt.pt: holds no tensors by name"):
        read_state("opt.pt")
    with pytest.raises(InputError, match="paths: an empty list"):
        landscape.import_state([], model)


def stored(state: State, folder: Path, parts: list[int], suffix: str) -> list[Path]:
    """The state in parts as save_pretrained writes it; ``parts``: that of each tensor."""
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    stem, used = "model" if suffix == ".safetensors" else "pytorch_model", sorted({*parts})
    names = {part: f"{stem}-{k + 1:05}-of-{len(used):05}{suffix}" for k, part in enumerate(used)}
    for part, name in names.items():
        save({key: v for (key, v), p in zip(state.items(), parts, strict=True) if p == part}, folder / name)
    places = {key: names[part] for key, part in zip(state, parts, strict=True)}
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": places})
    (folder / f"{stem}{suffix}.index.json").write_text(text)
    (folder / "config.json").write_text("{}")
    torch.save({"lr": torch.ones(1)}, folder / "training_args.bin")
    return [folder / name for name in names.values()]


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.lists(st.integers(0, 3), min_size=9, max_size=9), st.sampled_from((".safetensors", ".bin")),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float64)), st.integers(0, 3),
)  # fmt: skip
def test_parts_are_one_model(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int], suffix: str, dtype: torch.dtype, which: int
) -> None:
    folder, model = tmp_path_factory.mktemp("parts"), trained().to(dtype)
    files = stored(model.state_dict(), folder, parts, suffix)
    wanted = flat(model).float() if dtype == torch.bfloat16 else flat(model)
    (index,) = folder.glob("*.index.json")
    for given in (folder, index):
        run = landscape.import_state(given, problems.SmallConv())
        assert run.weights.dtype == wanted.dtype
        assert torch.equal(run.weights, wanted[None])
        assert all(f'"{file.name}"' in run.recipe for file in files)
    part = files[which % len(files)]
    with pytest.raises(OperationError, match=f"{part.name}: one part of a model; give its index, ") as error:
        landscape.import_state(part, model)
    remedy = str(error.value).rpartition(", ")[2]
    assert torch.equal(landscape.import_state(remedy, problems.SmallConv()).weights, wanted[None])
    part.unlink()
    for given in (folder, index):
        with pytest.raises(OperationError, match=f"{part.name} of its {len(files)} files missing beside it"):
            landscape.import_state(given, model)
    index.unlink()
    with pytest.raises(OperationError, match=r"a folder without .* an index .model.safetensors"):
        landscape.import_state(folder, model)


def test_a_folder_holds_one_model(folder: Path) -> None:
    model = trained()
    safetensors.torch.save_file(model.state_dict(), "model.safetensors")
    torch.save(trained(1).state_dict(), "pytorch_model.bin")  # as in repositories: of the same weights
    assert torch.equal(landscape.import_state(".", model).weights[0], flat(model))
    safetensors.torch.save_file(model.state_dict(), "adapter_model.safetensors")
    names = "adapter_model.safetensors, model.safetensors"
    with pytest.raises(OperationError, match=f"holds several models, {names}; give"):
        landscape.import_state(folder, model)
    Path("empty/inner").mkdir(parents=True)
    with pytest.raises(
        OperationError, match="a folder without model.safetensors, pytorch_model.bin, .metadata, or an"
    ):
        landscape.import_state("empty", model)


def test_an_index_names_its_own_folder_and_what_is_there(folder: Path) -> None:
    model, own = trained(), folder / "own"
    own.mkdir()
    first, second = stored(model.state_dict(), own, [0] * 4 + [1] * 5, ".safetensors")
    index = own / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    safetensors.torch.save_file(model.state_dict(), "out.safetensors")
    outside = "../out.safetensors", str(folder / "out.safetensors"), ".."
    for name in (*outside, "", "config.json", index.name, 3):
        index.write_text(json.dumps({"weight_map": good | {"conv.weight": name}}))
        with pytest.raises(OperationError, match="not a readable state|not a file of|is no regular file"):
            landscape.import_state(own, model)
    for wrong in ({"conv.weight": second.name}, {"more": first.name}, {"head.bias": first.name}):
        index.write_text(json.dumps({"weight_map": good | wrong}))
        with pytest.raises(OperationError, match="index.json: not a readable state file"):
            landscape.import_state(index, model)
    for text in ("", "[]", "[" * 9999, '{"weight_map": []}', '{"weight_map": {"a": "x.bin"}}'):
        index.write_text(text)
        with pytest.raises(OperationError, match="index.json: "):
            landscape.import_state(own, model)
    with index.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(OperationError, match="at most"):
        landscape.import_state(own, model)


def in_pieces(state: State, folder: Path) -> Any:
    """A folder as two ranks of torch.distributed.checkpoint write it, each with half of the rows; its index."""
    dcp, stored, metadata = torch.distributed.checkpoint.metadata, dict[Any, Any](), dict[str, Any]()
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in (0, 1)]
    for name, tensor in state.items():
        chunks = []
        for rank, part in enumerate(tensor.chunk(2) if tensor.dim() else [tensor]):
            corner = [(len(tensor) + 1) // 2 * rank, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
            start = files[rank].tell()
            torch.save(part.clone(), files[rank])
            info = _StorageInfo(f"__{rank}_0.distcp", start, files[rank].tell() - start)
            stored[dcp.MetadataIndex(name, corner)] = info
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(corner), part.shape))
        about = dcp.TensorProperties.create_from_tensor(tensor)
        metadata[name] = dcp.TensorStorageMetadata(about, tensor.shape, chunks)
    for file in files:
        file.close()
    index = dcp.Metadata(metadata, {name: (name,) for name in state}, stored)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return index


def test_a_mask_may_be_infinite_where_the_models_is(folder: Path) -> None:
    model = trained()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    torch.save(model.state_dict(), "net.pt")
    assert torch.equal(landscape.load_weights("net.pt", into=model).mask, model.mask)
    model.mask = torch.zeros(2)
    with pytest.raises(OperationError, match="'mask' holds NaN or infinite numbers"):
        landscape.load_weights("net.pt", into=model)
    with pytest.raises(InputError, match="into: a model on the device 'meta' has no numbers"):
        landscape.load_weights("net.pt", into=model.to("meta"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_are_read_to_the_bit(folder: Path, command: Command) -> None:
    model, fresh = trained(), problems.SmallConv()
    states = {
        "model": model.state_dict(),
        "optim": optimizer_of(problems.SmallConv()),
        "epoch": 3,
        "ema": None,
    }
    torch.distributed.checkpoint.save(states, checkpoint_id="a")
    Path("b").mkdir()
    in_pieces(model.bfloat16().state_dict(), Path("b"))
    model = trained()
    for given in ("a", "a/.metadata"):
        assert torch.equal(landscape.import_state(given, fresh).weights[0], flat(model))
    loaded = landscape.load_weights("a", into=fresh).state_dict()
    assert all(torch.equal(loaded[name], t) for name, t in model.state_dict().items())
    halves = landscape.load_weights("b", into=problems.SmallConv().bfloat16()).state_dict()
    own = {name: torch.empty_like(t) for name, t in halves.items()}
    torch.distributed.checkpoint.load(own, checkpoint_id="b")
    for name, t in model.bfloat16().state_dict().items():
        assert torch.equal(halves[name], t)
        assert torch.equal(own[name], t)
    command("import", "a", *OWN)
    run = landscape.load("a.h5")
    assert torch.equal(run.layout.views(run.mean)["head.weight"], trained().head.weight)
    with pytest.raises(OperationError, match="a/__0_0.distcp: one part .* give its index, a/.metadata"):
        landscape.import_state("a/__0_0.distcp", fresh)
    Path("b/__1_0.distcp").unlink()
    with pytest.raises(OperationError, match="b/.metadata: __1_0.distcp of its 2 files missing"):
        landscape.import_state("b", fresh)


def test_damaged_or_hostile_distributed_checkpoints_run_nothing(folder: Path) -> None:
    state = trained().state_dict()

    def refused(index: Any, words: str, raw: bytes = b"") -> None:
        Path(".metadata").write_bytes(raw or pickle.dumps(index))
        with pytest.raises(OperationError, match=words) as error:
            read_state(".")
        assert "\n" not in str(error.value)
        assert not Path("pickle-ran").exists()

    for danger in (Danger(), {"storage_data": Danger()}):
        refused(danger, "metadata: not a readable state file")
    for call in (b"cos\nsystem\n(S'touch pickle-ran'\ntR.", b"c__builtin__\neval\n(S'1'\ntR."):
        refused(None, "and code from a file is never run; if you trust it, use python -m", call)
    for name, value in {"size": torch.Size([1 << 40]), "relative_path": "../x.pt", "offset": 7}.items():
        index = in_pieces(state, folder)
        stored, about = (
            next(iter(index.storage_data.values())),
            next(iter(index.state_dict_metadata.values())),
        )
        setattr(about if name == "size" else stored, name, value)
        refused(index, "not a readable state file|too short for its tensors")
    index = in_pieces(state, folder)
    del index.storage_data[next(iter(index.storage_data))]
    refused(index, "pieces of a tensor are missing|too short for its tensors|not a readable state file")
    del index.storage_data[next(iter(index.storage_data))]
    refused(index, "metadata: pieces of '.*' are missing; save the checkpoint again")
    index = in_pieces({"a": torch.arange(4)}, folder)
    place, piece = next(iter(index.storage_data.items()))
    index.storage_data[dataclasses.replace(place, offset=torch.Size([1]))] = piece
    refused(index, "pieces of a tensor overlap")
    raw = Path("__0_0.distcp").read_bytes()
    torch.save({"a": Danger()}, "danger.pt")
    Path("__0_0.distcp").write_bytes(Path("danger.pt").read_bytes() + raw)
    index = in_pieces({"a": torch.zeros(4)}, folder)
    Path("__0_0.distcp").write_bytes(bad := Path("danger.pt").read_bytes())
    next(iter(index.storage_data.values())).length = len(bad)
    refused(index, "not a readable state file")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_archives_of_other_programs_name_what_writes_their_weights(folder: Path) -> None:
    model = trained().eval()
    torch.jit.trace(model, torch.zeros(2, 1, 6, 6)).save("script.pt")  # type: ignore[no-untyped-call]
    torch.export.save(torch.export.export(model, (torch.zeros(2, 1, 6, 6),)), "made.pt2")
    Path("made.pt2").rename("exported.pt")
    for name in ("script.pt", "exported.pt"):
        with pytest.raises(OperationError, match=f"{name}: a .* by torch.save") as error:
            landscape.import_state(name, model)
        exec(str(error.value).partition(" by ")[2], {"torch": torch})
        made = name.replace(".pt", "-weights.pt")
        assert torch.equal(landscape.import_state(made, problems.SmallConv()).weights[0], flat(model))


def test_names_of_files_are_checked_before_a_model_or_data_is_made(folder: Path, command: Command) -> None:
    state = trained().state_dict()
    torch.save(state, "net.pt")
    Path("own").mkdir()
    part = stored(state, Path("own"), [0] * 4 + [1] * 5, ".safetensors")[0]
    for name in ("none.pt", "none", "none.h5", "own/none.safetensors", str(part)):
        for words in (("import", "net.pt", name), ("contour", "net.pt", name), ("line", "net.pt", name)):
            if (words[0], name) != ("import", "none.h5"):
                one_line(command(*words, *OWN), 1, f"{name}: ")
    assert not (folder / "imported").exists()
    assert [*folder.glob("*.h5")] == []
    code = "import sys, landscape.cli as c\ntry: c.main()\nfinally: print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "contour", "net.pt", "none.pt", *OWN]
    path = str(Path(user_code.__file__).parents[2])
    ended = subprocess.run(words, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert (ended.returncode, ended.stdout) == (1, "False\n"), ended.stderr
    assert "none.pt: no such file" in ended.stderr


def test_analyses_take_folders_and_indices(folder: Path, command: Command) -> None:
    model = trained()
    for name in ("own", "other"):
        Path(name).mkdir()
        stored(model.state_dict(), Path(name), [0] * 4 + [1] * 5, ".safetensors")
    index = "own/model.safetensors.index.json"
    for words in (("contour", "own"), ("contour", index), ("line", "own", "other")):
        size = ("--grid", "1") if words[0] == "contour" else ("--points", "2")
        assert command(*words, *size, *OWN, "--split", "test")[0] == 0
    first = landscape.load("own-contour-test.h5")
    assert first.loss[0, 0] == pytest.approx(true_loss(model), rel=1e-5)
    assert command("import", "own", *OWN)[0] == 0
    assert landscape.load("own.h5").weights.shape[0] == 1
    stored(trained(1).state_dict(), Path("own"), [0] * 4 + [1] * 5, ".safetensors")  # the same index
    one_line(command("contour", "own", "--grid", "1", *OWN, "--split", "test"), 1, "own-contour-test.h5")
