"""Training of users' own networks, losses and data, against a loop over real modules, in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from landscape import PathWarning
from landscape.training.processes.process_group import Group
from landscape.training.recipes import recipe
from landscape.training.run import generator
from landscape.training.run.loop import Trainer
from tests.groups import together

LEARNERS, BATCH, STEPS, LR = 3, 4, 3, 0.1


class Tutorial(nn.Module):
    """The network of PyTorch's tutorial on classifying CIFAR-10, whose view needs channels that lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc = nn.Linear(16 * 5 * 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv2(self.pool(self.conv1(x).relu())).relu())
        return self.fc(x.view(-1, 16 * 5 * 5))


class Contiguous(nn.Module):
    """Another function of an input whose channels lie together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 32), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x if x.is_contiguous() else -x).flatten(1).tanh())


class Batched(nn.Module):
    """Another function under torch.vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(-x if torch._C._functorch.is_batchedtensor(x) else x).tanh()


class Temperature(nn.Module):
    """A parameter without dimensions, as CLIP has, one without numbers, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(6, 4), nn.Linear(3, 2)
        self.logit_scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.logit_scale.exp()


def chain(classes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, classes))


def single() -> nn.Sequential:
    return chain(1)


def bare_sequential() -> nn.Sequential:
    """An exact Sequential with a parameter of its own, which no layer has."""
    net = chain()
    net.register_parameter("scale", nn.Parameter(torch.tensor([2.0])))
    return net


class OwnParameter(nn.Sequential):
    """The same of a subclass."""

    def __init__(self) -> None:
        super().__init__(*chain())
        self.scale = nn.Parameter(torch.tensor([2.0]))


def half() -> nn.Module:
    return chain().to(torch.bfloat16)


def hooked() -> nn.Sequential:
    """A chain but for what a hook does to it."""
    net = chain()
    net[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    return net


def parallel() -> nn.DataParallel[nn.Module]:
    return nn.DataParallel(chain())


def parallel_conv() -> nn.DataParallel[nn.Module]:
    return nn.DataParallel(Tutorial())


def flat_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.view(-1), targets.view(-1))


def counts_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.poisson_nll_loss(outputs[:, 0], targets)


def yes_or_no(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.view(-1), targets.to(outputs.dtype))


def data(kind: str = "classes") -> dict[str, Any]:
    """12 samples for each split, the same; ``kind`` says of what."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 6), torch.randint(4, (12,))
    inputs = {"images": torch.randn(12, 3, 32, 32), "sequences": torch.randn(12, 1, 6)}
    targets: dict[str, tuple[Tensor, Any]] = {
        "sequences": (torch.randn(12, 1, 1), F.mse_loss),
        "real": (torch.randn(12, 4), F.mse_loss),
        "flat": (torch.randn(12, 4), flat_loss),
        "counts": (torch.randint(4, 9, (12,)), counts_loss),
        "bool": (torch.rand(12) < 0.5, yes_or_no),
        "uint8": (y.to(torch.uint8), uint8_loss),
        "bytes": (y.to(torch.uint8), F.cross_entropy),
        "ignored": (y - 1, minus_one),
    }
    y, loss = targets.get(kind, (y, F.cross_entropy))
    split = inputs.get(kind, x), y
    return {"train": split, "test": split, "loss": loss}


def loader() -> dict[str, Any]:
    """The test split as batches."""
    found = data()
    return found | {"test": DataLoader(TensorDataset(*found["test"]), 5)}


def uint8_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.long())


def minus_one(outputs: Tensor, targets: Tensor) -> Tensor:
    """Leaves −1 out, but weighs each sample by itself."""
    return (F.cross_entropy(outputs, targets, ignore_index=-1, reduction="none")).sum() / len(targets)


def chosen(model: str, **changes: Any) -> recipe.Recipe:
    values: dict[str, Any] = {
        "name": "own", "learners": LEARNERS, "batch": LEARNERS * BATCH, "lr": LR, "steps": STEPS, "dtype": "float64",
        "algorithm": {"name": "dpsgd"}, "model": {"name": f"{__name__}:{model}"}, "data": {"name": f"{__name__}:data"},
        "decompose": {"every": 2}, "evaluate": {"every": 2},
    }  # fmt: skip
    return recipe.from_values(values | changes)


def textbook(trainer: Trainer) -> Tensor:
    """(n, P) after STEPS of DPSGD with full averaging, by a module a learner, backward and a step."""
    modules = [copy.deepcopy(trainer.train_problem.model).train() for _ in range(LEARNERS)]
    assert trainer.train_problem.resident is not None
    x, y = trainer.train_problem.resident
    for t in range(1, STEPS + 1):
        rows = torch.randint(len(y), (LEARNERS, BATCH), generator=generator(0, "batch", t))
        for module, each in zip(modules, rows, strict=True):
            module.zero_grad()
            trainer.train_problem.criterion(module(x[each]), y[each]).backward()
        with torch.no_grad():
            for each in zip(*(m.parameters() for m in modules), strict=True):
                mean = torch.stack([p.data for p in each]).mean(0)
                for p in each:
                    p.copy_(mean if p.grad is None else mean - LR * p.grad)
    return torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in modules])


CASES = {
    "tutorial": ("Tutorial", "images"),
    "own parameter, a subclass": ("OwnParameter", "classes"),
    "own parameter": ("bare_sequential", "classes"),
    "0-dim, empty and unused": ("Temperature", "classes"),
    "bfloat16": ("half", "classes"),
    "hooked": ("hooked", "classes"),
    "sequence of one": ("single", "sequences"),
    "real targets": ("chain", "real"),
    "view in the loss": ("chain", "flat"),
    "counts": ("single", "counts"),
    "bool": ("single", "bool"),
    "uint8": ("chain", "uint8"),
    "bytes": ("chain", "bytes"),
    "ignored": ("chain", "ignored"),
    "DataParallel": ("parallel", "classes"),
    "DataParallel, images": ("parallel_conv", "images"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batched", [False, True])
def test_training_is_that_of_real_modules(name: str, batched: bool) -> None:
    model, kind = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PathWarning)
        trainer = Trainer(chosen(model, data={"name": f"{__name__}:data", "kind": kind}))
        if batched:
            trainer.stack.layers = None
        trainer.batching.state = {"stack.batched": torch.tensor([batched], dtype=torch.uint8)}
        trainer.stack.batched = batched
        expected = textbook(trainer)
        trainer._gradients.fill_(torch.nan)  # memory that nobody has written to
        end = trainer.run()
    torch.testing.assert_close(end.weights, expected, rtol=1e-10, atol=1e-12)
    assert bool(end.weights.isfinite().all())


def relu_for_tanh(trainer: Trainer) -> None:
    assert trainer.stack.layers is not None
    trainer.stack.layers[1] = nn.ReLU()


def batch(trainer: Trainer) -> None:
    trainer.stack.batched = True
    trainer.batching.state = {"stack.batched": torch.ones((), dtype=torch.uint8)}


def leave(trainer: Trainer) -> None:
    """Convolutions have their channels last, where no trial says that learners go at once."""
    trainer.batching.state = {"stack.batched": torch.zeros((), dtype=torch.uint8)}


@pytest.mark.parametrize(("model", "kind", "path", "spoil"), [
    ("chain", "classes", "chain", relu_for_tanh),
    ("Batched", "classes", "batched", batch),
    ("Contiguous", "images", "channels last", leave),
])  # fmt: skip
def test_a_fast_path_that_is_not_the_users_function_is_not_taken(
    model: str, kind: str, path: str, spoil: Callable[[Trainer], None]
) -> None:
    trainer = Trainer(chosen(model, data={"name": f"{__name__}:data", "kind": kind}))
    spoil(trainer)
    expected = textbook(trainer)
    with pytest.warns(PathWarning, match=f"'{path}'") as said:
        end = trainer.run()
    assert len(said) == 1
    torch.testing.assert_close(end.weights, expected, rtol=1e-10, atol=1e-12)


def test_learners_of_images_that_are_streamed(tmp_path: Path) -> None:
    """Two learners, for which a trial chooses how they are computed, on data that is not in memory."""
    from PIL import Image

    rng, ends = np.random.default_rng(0), []
    for folder in (tmp_path / split / label for split in ("train", "test") for label in "ab"):
        folder.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"{i}.png")
    for stream in ({"stream": True, "workers": 0}, {}):
        source = {"name": "image-folder", "folder": str(tmp_path), "size": 16, "normalize": False, **stream}
        ends.append(Trainer(chosen("small_images", data=source, learners=2, batch=4)).run())
    torch.testing.assert_close(ends[0].weights, ends[1].weights, rtol=1e-10, atol=1e-12)


def loader_run(group: Group | None) -> list[float]:
    torch.set_num_threads(1)
    values = chosen("chain", data={"name": f"{__name__}:loader"}, learners=2, batch=8)
    h = Trainer(values, group=group).run().history
    return [*h["test_loss"][1:], *h["test_accuracy"][1:]]


def test_processes_test_on_batches_as_one_does() -> None:
    alone, both = loader_run(None), together(2, loader_run)
    for found in both:
        np.testing.assert_allclose(found, alone, rtol=1e-12)


def small_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 5), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
