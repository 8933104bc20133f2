"""The callback for Lightning, with the real package: make test-integrations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import landscape
from landscape import InputError, OperationError, Recorder
from tests.problems import assert_identity
from tests.test_recorder import Net, digits

L = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed; make test-integrations", exc_type=ImportError
)
from landscape.integrations.lightning import LandscapeCallback, step_model  # noqa: E402

# Lightning's own, about the packages that it stands on and the size of these runs.
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, EPOCHS = 30, 3  # of 120 samples: 4 batches an epoch
COLUMNS = ("step", "lr", "train_loss", "alpha_e", "grad_norm2", "displacement2", "delta", "test_loss")


def data() -> TensorDataset:
    return TensorDataset(*digits())


class Module(L.LightningModule):  # type: ignore[misc, name-defined]
    """Digits in float64, with what usual modules do in a step."""

    def __init__(self, make: Callable[..., Any] | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net(**options).double()
        self.make = make or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        self.seen.append(loss.detach())
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def fit(
    module: Any, *callbacks: Any, folder: Path, loader: Any = None, ckpt: Any = None, **options: Any
) -> Any:
    off = "logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"
    usual = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    trainer = L.Trainer(**dict.fromkeys(off, False) | usual | options, callbacks=[*callbacks])
    trainer.fit(module, DataLoader(data(), BATCH) if loader is None else loader, ckpt_path=ckpt)
    return trainer


def loop(
    recorder: Recorder, model: nn.Module, optimizer: Any, accumulate: int = 1, clip: float = 0.0
) -> None:
    """The same training as a plain loop."""
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(DataLoader(data(), BATCH)):
            if i % accumulate == 0:
                optimizer.zero_grad()
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                with recorder.step():
                    optimizer.step()


def same(first: Path, second: Path, columns: tuple[str, ...] = COLUMNS) -> dict[str, Any]:
    a, b = (landscape.load(folder / "last.h5") for folder in (first, second))
    for name in columns:
        np.testing.assert_allclose(a.history[name], b.history[name], rtol=1e-9, atol=1e-14, err_msg=name)
    torch.testing.assert_close(a.weights, b.weights, rtol=1e-12, atol=0)
    assert_identity(b.history)
    return dict(b.history)


@pytest.mark.parametrize(("accumulate", "clip", "own"), [(1, 0.0, True), (2, 0.5, True), (1, 0.5, False)])
def test_the_numbers_of_a_plain_loop(tmp_path: Path, accumulate: int, clip: float, own: bool) -> None:
    x, y = digits(50)
    plain = Module()
    optimizer = plain.configure_optimizers()
    batches = list(DataLoader(data(), BATCH))
    options: dict[str, Any] = {"every": 2, "test": (x, y), "sharpness": 4}
    with Recorder(
        tmp_path / "a", plain, F.cross_entropy, batches, optimizer=optimizer, **options
    ) as recorder:
        loop(recorder, plain, optimizer, accumulate, clip)
    given = {} if own else {"loss": F.cross_entropy, "data": batches}
    callback, module = LandscapeCallback(tmp_path / "b", **options, **given), Module()
    steps: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip or None}
    fit(module, callback, folder=tmp_path, **steps)
    history = same(tmp_path / "a", tmp_path / "b", (*COLUMNS, "lambda_max", "lr_lambda_limit"))
    assert history["step"].tolist() == list(range(0, 12 // accumulate + 1, 2))
    if accumulate == 1:
        expected = [float(module.seen[t - 1]) for t in range(2, 13, 2)]
        assert history["loss"][1:].tolist() == pytest.approx(expected, rel=1e-12)
    assert not module.net.conv.weight.requires_grad or module.training


def test_a_step_is_the_optimizers_whatever_it_does(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    plain = Module(make)
    optimizer = plain.configure_optimizers()
    with Recorder(
        tmp_path / "a", plain, F.cross_entropy, list(DataLoader(data(), BATCH)), every=1
    ) as recorder:
        for _ in range(EPOCHS):
            for x, y in DataLoader(data(), BATCH):

                def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(plain(x), y)
                    loss.backward()
                    return loss

                with recorder.step():
                    optimizer.step(closure)
    fit(Module(make), LandscapeCallback(tmp_path / "b", every=1), folder=tmp_path)
    same(tmp_path / "a", tmp_path / "b", ("step", "alpha_e", "displacement2", "delta"))


def test_manual_optimization_is_recorded_with_a_loss(tmp_path: Path) -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):  # two steps a batch
                optimizer.zero_grad()
                self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
                optimizer.step()

    with pytest.raises(InputError, match="loss: .*manual optimization.*data="):
        fit(Manual(), LandscapeCallback(tmp_path / "a"), folder=tmp_path)
    fit(Manual(), LandscapeCallback(tmp_path / "b", F.cross_entropy, every=1), folder=tmp_path)
    assert landscape.load(tmp_path / "b" / "last.h5").history["step"].tolist() == list(range(25))

    class Raw(Manual):
        def optimizers(self) -> Any:
            return super().optimizers().optimizer

    with pytest.raises(InputError, match=r"self\.optimizers"):
        fit(Raw(), LandscapeCallback(tmp_path / "c", F.cross_entropy, every=1), folder=tmp_path)


def test_mixed_precision_is_recorded_in_full(tmp_path: Path) -> None:
    single = TensorDataset(*digits(dtype=torch.float32))
    module = Module().float()
    fit(
        module, LandscapeCallback(tmp_path / "a", every=1, save_every=1), folder=tmp_path,
        loader=DataLoader(single, BATCH), precision="bf16-mixed", max_epochs=1,
    )  # fmt: skip
    history = landscape.load(tmp_path / "a" / "last.h5").history
    assert_identity(history, 1e-6)
    step3 = landscape.load(tmp_path / "a" / "step-0000003.h5")
    problem = step3.problem("train", model=Module().float(), data=single.tensors)
    assert history["train_loss"][4] == pytest.approx(problem.loss(), rel=1e-6)


def test_the_training_is_undisturbed(tmp_path: Path) -> None:
    ends = []
    for recorded in (False, True):
        module = Module(norm=True, dropout=0.2)
        torch.manual_seed(5)
        loader = DataLoader(data(), BATCH, shuffle=True)
        callback = LandscapeCallback(tmp_path / "a", every=2, test=digits(30), sharpness=5)
        fit(module, *[callback] * recorded, folder=tmp_path, loader=loader)
        ends.append((module.state_dict(), torch.rand(2), len(module.seen), module.training))
        assert type(module) is Module
    for name, tensor in ends[0][0].items():
        assert torch.equal(tensor, ends[1][0][name]), name
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2:] == ends[1][2:]


def test_a_run_goes_on_from_a_checkpoint_of_lightnings(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    options: dict[str, Any] = {"every": 2, "save_every": 4, "test": digits(30)}
    fit(Module(), LandscapeCallback(tmp_path / "a", **options), folder=tmp_path)
    keep = ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1, every_n_train_steps=8)  # the end of an epoch
    fit(
        Module(), LandscapeCallback(tmp_path / "b", **options), keep, folder=tmp_path,
        enable_checkpointing=True, max_steps=11, max_epochs=-1,
    )  # fmt: skip
    (path,) = (tmp_path / "ckpt").glob("*.ckpt")
    assert "step=8" in path.name
    callback = LandscapeCallback(tmp_path / "b", **options)
    trainer = fit(Module(), callback, folder=tmp_path, ckpt=path)
    same(tmp_path / "a", tmp_path / "b")
    assert 11 not in landscape.load(tmp_path / "b" / "last.h5").history["step"]
    names = sorted(p.name for p in (tmp_path / "b").glob("step-*.h5"))
    assert names == [f"step-{t:07d}.h5" for t in (0, 4, 8, 12)]
    trainer.fit_loop.max_epochs = EPOCHS + 1  # and a second fit of the same trainer
    trainer.fit(trainer.lightning_module, DataLoader(data(), BATCH))
    assert landscape.load(tmp_path / "b" / "last.h5").history["step"].tolist() == list(range(0, 17, 2))
    for again in (callback, LandscapeCallback(tmp_path / "b", **options)):
        with pytest.raises(OperationError, match="holds a run already"):
            fit(Module(), again, folder=tmp_path)


def test_the_record_of_samples(tmp_path: Path) -> None:
    module = Module()
    callback = LandscapeCallback(tmp_path / "a", every=3, samples=96)
    fit(module, callback, folder=tmp_path)
    problem = landscape.Problem(module, F.cross_entropy, digits())
    run = landscape.load(tmp_path / "a" / "last.h5")
    assert (run.history["alpha_e_se"][1:] > 0).all()
    assert run.epoch == EPOCHS
    assert run.model["name"] == "tests.integrations.test_lightning:Module"
    again = run.problem("train", model=Module(), data=digits(), dtype=torch.float64)
    assert again.loss() == pytest.approx(problem.loss())


def test_the_loss_of_a_step_follows_the_epoch_and_keeps_nothing(tmp_path: Path) -> None:
    metrics = pytest.importorskip("torchmetrics")

    class Annealed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = metrics.CatMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            weight = 1.0 + self.current_epoch
            self.log_dict({"a": weight, "b": 1.0})
            self.metric.update(x)
            self.seen.append(F.cross_entropy(self(x), y) * weight)
            return self.seen[-1]

    module = Annealed()
    fit(module, LandscapeCallback(tmp_path / "a", every=4), folder=tmp_path)
    losses = landscape.load(tmp_path / "a" / "last.h5").history["train_loss"][1:]
    # At steps 4, 8 and 12 of epochs 0, 1 and 2: a plain mean, times the weight of the epoch.
    assert losses[1] / losses[0] > 1.5
    assert len(module.seen) == 12  # with graphs, which no copy can hold
    module.seen.clear()
    model = copy.deepcopy(step_model(module))
    assert type(model).__qualname__ == Annealed.__qualname__
    model(landscape_batch=digits(8))
    assert model.metric.update_count == 0
    assert module.metric.update_count == 12
    assert not model.seen


def test_a_step_of_tokens_has_its_terms(tmp_path: Path) -> None:
    class Tokens(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 4).double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-1)

    torch.manual_seed(0)
    x = torch.randn(8, 5, 3).double()
    y = torch.randint(4, (8, 5)).masked_fill(torch.arange(5) >= torch.randint(1, 6, (8, 1)), -1)
    loader = DataLoader([{"x": x, "y": y}], None)  # one batch, whose samples have unequal numbers of tokens
    batches = [{"x": x[:3], "y": y[:3]}, {"x": x[3:], "y": y[3:]}]
    given: dict[str, Any] = {"data": batches, "test": batches}
    other, callback = Tokens(), LandscapeCallback(tmp_path / "a", **given)
    with pytest.warns(landscape.ProblemWarning, match="terms of its mean are counted"):
        fit(other, callback, folder=tmp_path, loader=loader)
    tokens = float(other.training_step({"x": x, "y": y}, 0))
    assert landscape.load(tmp_path / "a" / "last.h5").history["test_loss"][-1] == pytest.approx(tokens)
    given |= {"terms": lambda batch: (batch["y"] >= 0).sum(1), "every": 1}
    module = Tokens()
    module.make = lambda p: torch.optim.SGD(p, lr=0.1)
    fit(module, LandscapeCallback(tmp_path / "b", **given), folder=tmp_path, loader=loader)
    rows = landscape.load(tmp_path / "b" / "last.h5").history
    np.testing.assert_allclose(rows["alpha_e"][1:], 0.1, rtol=1e-10)  # full-batch steps
    truth = float(module.training_step({"x": x, "y": y}, 0))
    assert rows["test_loss"][-1] == pytest.approx(truth)


def test_an_exception_closes_the_recorder(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer_step() == 5:
                raise RuntimeError("own")
            return super().training_step(batch, batch_idx)

        def trainer_step(self) -> int:
            return int(self.global_step)

    with pytest.raises(RuntimeError, match="own"):
        fit(Failing(), LandscapeCallback(tmp_path / "a", every=2), folder=tmp_path)
    assert landscape.load(tmp_path / "a" / "last.h5").step == 5
    with Recorder(tmp_path / "a", Failing(), F.cross_entropy, digits(), resume=True) as recorder:
        assert recorder.steps == 5  # the folder is free


class Transferred(Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Trained(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.max_epochs
        return super().training_step(batch, batch_idx)


class Two(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]


class Summed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn_like(x), y


@pytest.mark.parametrize(("module", "options", "words"), [
    (Transferred, {}, "on_after_batch_transfer.*loss="),
    (Trained, {}, "loss: training_step uses the trainer.*loss="),
    (Two, {}, "2 optimizers"),
    (Summed, {}, "loss: .*sum"),
    (Module, {"loader": DataLoader(Noisy(*digits()), BATCH)}, "data: two passes"),
    (
        Module, {"loader": DataLoader(data(), BATCH, sampler=WeightedRandomSampler([1.0] * 120, 120))},
        "WeightedRandomSampler.*data="),
    (Module, {"loader": {"a": DataLoader(data(), BATCH)}}, "data: .*dict"),
], ids=["transfer", "trainer", "optimizers", "sum", "augmented", "weighted", "several"])  # fmt: skip
def test_what_is_not_known_is_refused_before_the_first_step(
    tmp_path: Path, module: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words) as error:
        fit(module(), LandscapeCallback(tmp_path / "a"), folder=tmp_path, **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a").exists()


def test_it_comes_before_weight_averaging(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    callback, averaging = LandscapeCallback(tmp_path / "a", every=2), StochasticWeightAveraging(0.1)
    with pytest.raises(InputError, match="before StochasticWeightAveraging"):
        fit(Module(), averaging, callback, folder=tmp_path)
    module = Module()
    fit(module, callback, StochasticWeightAveraging(0.1, swa_epoch_start=1), folder=tmp_path)
    end = torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])
    assert not torch.equal(landscape.load(tmp_path / "a" / "last.h5").weights[0], end)


def test_the_older_package_works_as_well(tmp_path: Path) -> None:
    older = pytest.importorskip(
        "pytorch_lightning", reason="pytorch_lightning is not installed", exc_type=ImportError
    )

    class Older(older.LightningModule):  # type: ignore[misc, name-defined]
        __init__, forward = Module.__init__, Module.forward
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

    Older.__init__ = lambda self: _older_init(self, older)  # type: ignore[method-assign]
    trainer = older.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[LandscapeCallback(tmp_path / "b", every=2)],
    )  # fmt: skip
    trainer.fit(Older(), DataLoader(data(), BATCH))
    fit(Module(), LandscapeCallback(tmp_path / "a", every=2), folder=tmp_path)
    same(tmp_path / "a", tmp_path / "b", ("step", "alpha_e", "delta"))


def _older_init(module: Any, older: Any) -> None:
    older.LightningModule.__init__(module)
    torch.manual_seed(1)
    module.net, module.seen = Net().double(), []
    module.make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3)


@pytest.mark.slow
def test_under_ddp_rank_0_records(tmp_path: Path) -> None:
    fit(
        Module(lambda p: torch.optim.SGD(p, lr=0.1)), LandscapeCallback(tmp_path / "a", every=2),
        folder=tmp_path, loader=DataLoader(data(), 60), strategy="ddp_fork", devices=2,
    )  # fmt: skip
    run = landscape.load(tmp_path / "a" / "last.h5")
    assert run.history["step"].tolist() == [0, 2]
    # Two processes with half of the data each make full-batch steps.
    assert run.history["alpha_e"][1] == pytest.approx(0.1, rel=1e-9)
