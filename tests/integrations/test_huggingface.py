"""The callback for Hugging Face's Trainer, with the real packages: make test-integrations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler

import landscape
from landscape import InputError, OperationError, Recorder
from tests import notebooks
from tests.problems import assert_identity

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; make test-integrations", exc_type=ImportError
)
pytest.importorskip("accelerate", reason="accelerate is not installed; make test-integrations")
from landscape.integrations.huggingface import LandscapeCallback  # noqa: E402

# The packages' own.
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
WORDS, BATCH = 11, 8
COLUMNS = ("step", "lr", "train_loss", "alpha_e", "grad_norm2", "displacement2", "delta", "test_loss")


class Texts(Dataset[Any]):
    """Sequences of 3 to 9 words, or of ``least`` to 9."""

    def __init__(self, samples: int = 48, least: int = 3) -> None:
        g = torch.Generator().manual_seed(0)
        lengths = torch.randint(least, 10, (samples,), generator=g).tolist()
        self.rows = [torch.randint(1, WORDS, (n,), generator=g) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.rows[index]}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded batches; the labels of padding are -100, and so is the first, which the Trainer would count."""
    ids = nn.utils.rnn.pad_sequence([each["ids"] for each in samples], batch_first=True)
    mask = ids > 0
    labels = ids.masked_fill(~mask, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def batches(texts: Dataset[Any], size: int = BATCH) -> list[dict[str, Tensor]]:
    rows = [texts[i] for i in range(len(texts))]  # type: ignore[arg-type]
    return [collate(rows[i : i + size]) for i in range(0, len(rows), size)]


def gpt2(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=10, n_embd=8, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


class InOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
    """The Trainer with the samples in their order."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def train(
    model: Any, *callbacks: Any, folder: Path, kind: Any = InOrder, resume: Any = None, data: Any = None,
    compute_loss_func: Any = None, collator: Any = collate, **options: Any,
) -> Any:  # fmt: skip
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder / "hf"),
            "per_device_train_batch_size": BATCH,
            "num_train_epochs": 2,
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "remove_unused_columns": False,
            **options,
        }
    )
    data = Texts() if data is None else data
    trainer = kind(
        model, arguments, train_dataset=data, eval_dataset=Texts(16), data_collator=collator,
        callbacks=[*callbacks], compute_loss_func=compute_loss_func,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def loop(recorder: Recorder, model: Any, optimizer: Any, accumulate: int) -> None:
    """The same training by hand: the mean over all tokens of a step, clipped as by default."""
    every = batches(Texts())
    for _ in range(2):
        for i in range(0, len(every), accumulate):
            part = every[i : i + accumulate]
            total, count = torch.zeros(()), 0
            for batch in part:
                logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                targets = batch["labels"][:, 1:]
                total = total + F.cross_entropy(
                    logits.flatten(0, 1).double(), targets.flatten(), reduction="sum"
                )
                count += int((targets != -100).sum())
            optimizer.zero_grad()
            (total / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with recorder.step():
                optimizer.step()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_numbers_are_those_of_a_plain_loop(tmp_path: Path, accumulate: int) -> None:
    plain = gpt2()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    with Recorder(
        tmp_path / "a", plain, None, batches(Texts()), every=2, test=batches(Texts(16)), optimizer=optimizer
    ) as recorder:
        loop(recorder, plain, optimizer, accumulate)
    callback = LandscapeCallback(tmp_path / "b", every=2, test=Texts(16))
    model = gpt2()
    train(model, callback, folder=tmp_path, gradient_accumulation_steps=accumulate, logging_steps=4)
    a, b = (landscape.load(tmp_path / name / "last.h5") for name in "ab")
    at = [int(np.flatnonzero(b.history["step"] == t)[0]) for t in a.history["step"]]
    for name in COLUMNS:  # Hugging Face takes the loss of float32 logits
        np.testing.assert_allclose(a.history[name], b.history[name][at], rtol=2e-4, atol=1e-9, err_msg=name)
    torch.testing.assert_close(a.weights, b.weights, rtol=1e-5, atol=1e-7)
    assert_identity(b.history)
    assert b.history["step"][-1] == 12 // accumulate
    assert np.isfinite(b.history["loss"][b.history["step"] == 4])
    torch.testing.assert_close(b.weights[0], torch.cat([p.detach().flatten() for p in model.parameters()]))
    if accumulate == 1:
        assert b.epoch == 2


def test_samples_have_errors(tmp_path: Path) -> None:
    train(gpt2(), LandscapeCallback(tmp_path / "a", every=4, samples=160), folder=tmp_path)
    assert (landscape.load(tmp_path / "a" / "last.h5").history["alpha_e_se"][1:] > 0).all()


def test_mixed_precision_is_recorded_in_full_and_without_dropout(tmp_path: Path) -> None:
    model = gpt2(dropout=0.3).float()  # which the loss that is recorded is without
    train(model, LandscapeCallback(tmp_path / "a", every=1), folder=tmp_path, max_steps=3, bf16=True)
    history = landscape.load(tmp_path / "a" / "last.h5").history
    own = landscape.Problem(gpt2().float(), None, batches(Texts()))
    assert history["train_loss"][1] == pytest.approx(own.loss(), rel=1e-6)
    assert_identity(history, 1e-6)


def test_the_training_is_undisturbed(tmp_path: Path) -> None:
    ends = []
    for recorded in (False, True):
        callback = LandscapeCallback(tmp_path / "a", every=2, test=Texts(16), sharpness=5)
        model = gpt2(dropout=0.2)
        train(model, *[callback] * recorded, folder=tmp_path, kind=transformers.Trainer)
        ends.append((model.state_dict(), torch.rand(2)))
        assert not model._forward_hooks
    for name, tensor in ends[0][0].items():
        assert torch.equal(tensor, ends[1][0][name]), name
    assert torch.equal(ends[0][1], ends[1][1])


def test_a_run_goes_on_from_a_checkpoint_of_the_trainers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 2, "save_every": 4}
    train(gpt2(), LandscapeCallback(tmp_path / "a", **options), folder=tmp_path)
    train(
        gpt2(), LandscapeCallback(tmp_path / "b", **options), folder=tmp_path, max_steps=10,
        save_strategy="steps", save_steps=6,
    )  # fmt: skip
    path = str(tmp_path / "hf" / "checkpoint-6")
    train(gpt2(), LandscapeCallback(tmp_path / "b", **options), folder=tmp_path, resume=path)
    a, b = (landscape.load(tmp_path / name / "last.h5") for name in "ab")
    assert b.history["step"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    for name in COLUMNS[:-1]:
        np.testing.assert_allclose(a.history[name], b.history[name], rtol=1e-6, atol=1e-12, err_msg=name)
    assert sorted(p.stem[-2:] for p in (tmp_path / "b").glob("step-*.h5")) == ["00", "04", "06", "08", "12"]
    with pytest.raises(OperationError, match="holds a run already"):
        train(gpt2(), LandscapeCallback(tmp_path / "b", **options), folder=tmp_path)
    with pytest.raises(OperationError, match="resume: 6"):
        train(gpt2(), LandscapeCallback(tmp_path / "c", **options), folder=tmp_path, resume=path)


def test_the_best_model_at_the_end_is_not_the_last_step(tmp_path: Path) -> None:
    model = gpt2()
    train(
        model, LandscapeCallback(tmp_path / "a", every=2, save_every=6, test=Texts(16)),
        folder=tmp_path, num_train_epochs=3, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    run = landscape.load(tmp_path / "a" / "last.h5")
    best = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights = [landscape.load(tmp_path / "a" / f"step-{t:07d}.h5").weights[0] for t in (6, 12, 18)]
    assert torch.equal(run.weights[0], weights[2])
    assert [torch.equal(best, each) for each in weights].count(True) == 1
    assert not torch.equal(best, weights[2]), "the first is the largest loss"
    problem = run.problem(
        "train", model=gpt2(), data={"train": batches(Texts(16))}, loss=None, dtype=torch.float64
    )
    assert run.history["test_loss"][-1] == pytest.approx(problem.loss(), rel=1e-5)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets) * 0.5


class Own(InOrder):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        outputs = model(**inputs)
        loss = own_loss(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Logged(InOrder):
    """As in other packages' trainers: the model's own loss, looked at."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        found = super().compute_loss(*args, **options)
        self.last = float(found[0] if isinstance(found, tuple) else found)
        return found


def masked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = collate(samples)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)
    return batch


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield {"ids": torch.tensor([1, 2, 3])}


@pytest.mark.parametrize(("options", "words"), [
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*loss="),
    ({"compute_loss_func": own_loss}, "loss: the Trainer trains another.*loss="),
    ({"kind": Own}, "loss: the Trainer trains another.*loss="),
    ({"collator": masked}, "data: two passes.*list"),
    ({"data": Endless(), "kind": transformers.Trainer, "max_steps": 2}, "Endless has no length.*data="),
], ids=["smoothing", "function", "subclass", "random", "endless"])  # fmt: skip
def test_a_loss_that_was_not_recorded_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    model = gpt2()
    with pytest.raises(InputError, match=words) as error:
        train(model, LandscapeCallback(tmp_path / "a"), folder=tmp_path, **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a").exists()
    assert not model._forward_hooks


def smoothed(outputs: Any, labels: Tensor) -> Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, label_smoothing=0.1)


@pytest.mark.parametrize(("loss", "least", "given", "options"), [
    (lambda outputs, labels: own_loss(outputs, labels), 9, {}, {"compute_loss_func": own_loss}),
    (smoothed, 3, {"terms": lambda y: (y[:, 1:] != -100).sum(1)}, {"label_smoothing_factor": 0.1}),
], ids=["own", "smoothed"])  # fmt: skip
def test_a_trainers_own_loss_is_recorded_where_it_is_given(
    tmp_path: Path, loss: Any, least: int, given: dict[str, Any], options: dict[str, Any]
) -> None:
    train(
        gpt2(), LandscapeCallback(tmp_path / "a", loss, every=1, save_every=1, **given), folder=tmp_path,
        data=Texts(least=least), per_device_train_batch_size=48, max_grad_norm=0.0, max_steps=3, **options,
    )  # fmt: skip
    rows = landscape.load(tmp_path / "a" / "last.h5").history
    np.testing.assert_allclose(rows["alpha_e"][1:], 0.05, rtol=1e-6)  # full-batch steps


def test_a_trainer_may_look_at_the_models_own_loss(tmp_path: Path) -> None:
    train(gpt2(), LandscapeCallback(tmp_path / "b", every=1), folder=tmp_path, kind=Logged, max_steps=2)
    assert landscape.load(tmp_path / "b" / "last.h5").step == 2


@pytest.mark.parametrize("optim", ["lomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_in_the_backward_pass_are_refused(tmp_path: Path, optim: str) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, optim=optim)
    with pytest.raises(InputError, match=optim):
        LandscapeCallback(tmp_path / "a").on_train_begin(arguments, None, None, model=gpt2())


def test_after_an_exception_the_next_training_begins_anew(tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("own")

    callback = LandscapeCallback(tmp_path / "a", every=1)
    with pytest.raises(RuntimeError, match="own"):
        train(gpt2(), callback, Failing(), folder=tmp_path)
    with pytest.raises(OperationError, match="holds a run already"):
        train(gpt2(), callback, folder=tmp_path)
    assert landscape.load(tmp_path / "a" / "last.h5").step == 3


@pytest.mark.slow
def test_under_ddp_rank_0_records(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "from tests.integrations.test_huggingface import *\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "train(gpt2(), LandscapeCallback(folder / 'a', every=1), folder=folder, kind=transformers.Trainer,\n"
        "      per_device_train_batch_size=24, max_grad_norm=0.0, max_steps=3, ddp_backend='gloo')\n"
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
            "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
            str(script), str(tmp_path),
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = landscape.load(tmp_path / "a" / "last.h5").history
    # Two processes with half of the data each make full-batch steps.
    np.testing.assert_allclose(rows["alpha_e"][1:], 0.05, rtol=1e-5)


@pytest.mark.slow
def test_the_example_of_gpt2(tmp_path: Path) -> None:
    path = ROOT / "examples" / "huggingface.py"
    assert len(path.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, str(path), "out"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "λ_max" in done.stdout
    assert (tmp_path / "out" / "contour.png").stat().st_size > 10_000
    rows = landscape.load(tmp_path / "out" / "last.h5").history
    assert rows["train_loss"][-1] < 0.7 * np.nanmax(rows["train_loss"])


def test_the_notebook_of_lora_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="peft is not installed; make test-integrations")
    monkeypatch.chdir(tmp_path)
    assert len(list(notebooks.run(notebooks.NOTEBOOKS / "hugging_face_lora.ipynb"))) == 5
