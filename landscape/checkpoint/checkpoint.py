"""The checkpoint of a training run: every learner's weights, the history, and the run's settings."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from landscape import data as datasets
from landscape import models
from landscape.checkpoint import history
from landscape.checkpoint import parts as parts
from landscape.checkpoint.user_code import UserData, as_data, command_text, is_user_defined
from landscape.core import hdf5
from landscape.core.errors import FailedError, InputError
from landscape.core.options import SPLIT
from landscape.data.base import Dataset
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.layout import Layout, average
from landscape.problem.problem import Loss, Problem
from landscape.results import base

SCHEMA = "landscape.checkpoint"
IMPORTED = "import"  # the algorithm of imported weights (landscape.checkpoint.foreign_weights)
RECORDED = "recorded"  # that of a loop of the user's own (landscape.train.recorder)

DIVERGED = ("", "mean", "learners")
_ATTRIBUTES: dict[str, type] = {
    "step": int, "epoch": float, "algorithm": str, "recipe": str, "lr": float, "local_batch": int,
    "diverged_at": int, "diverged": str,
}  # fmt: skip
_DATA: dict[str, type] = {"name": str, "options": dict, "train": int, "test": int, "fingerprint": str}


@dataclass
class Checkpoint:
    """State of a run after ``step`` steps; in a run over several processes, one process's part of it.

    ``weights`` (n, P), one row a learner (that this process holds); ``buffers`` name -> (n, …), BatchNorm's
    statistics of each learner, from its own minibatches; ``mean_buffers`` name -> (…), those of w_a,
    re-estimated on a sample of the training set (empty if they were not re-estimated); ``optimizer`` name ->
    (n, …): the optimizer's state; ``rule`` name -> (n, …) and ``shared`` name -> (…): the state of the update
    rule, a row for each learner or the same for all; ``seed`` fixes all randomness with the step (see
    ``landscape.train.randomness``); ``history`` column -> (T,) float64 and ``units`` column -> unit, of
    the columns that every run has and of those that its update rule adds; ``recipe`` the TOML text;
    ``model`` {"name", "options"}; ``data`` {"name", "options", "train", "test", "fingerprint"};
    ``lr`` and ``local_batch`` those of the next step (at the end of a run, of the last); ``diverged_at`` the
    step at which the run diverged or −1, and ``diverged`` what did: "", "mean" or "learners".

    Of imported weights ``buffers`` holds the frozen parameters, too; there is no step, no learning rate (NaN)
    and no local batch (0), and ``recipe`` names the files. Of a recorded loop ``recipe`` has what is known of
    it, ``epoch`` and ``lr`` may be NaN, ``local_batch`` 0. Names "module:factory" of model and data are the
    user's own code: they are shown, never imported (see :meth:`problem`).
    """

    weights: Tensor
    layout: Layout
    step: int
    epoch: float
    algorithm: str
    recipe: str
    model: dict[str, Any]
    data: dict[str, Any]
    lr: float
    local_batch: int
    seed: int
    history: dict[str, hdf5.Array]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    mean_buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    rule: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=lambda: dict(history.UNITS))
    diverged_at: int = -1
    diverged: str = ""
    path: Path | None = None

    def __repr__(self) -> str:
        n, size = self.weights.shape
        of = f"{self.model['name']} on {self.data['name'] or 'unknown data'}"
        return f"Checkpoint({self.label}; {n} × {size:,} weights; {of}; {self.path or 'not saved'})"

    @property
    def has_recipe(self) -> bool:
        """Whether ``landscape train`` made it: ``recipe`` then says how the run goes on."""
        return self.algorithm not in (IMPORTED, RECORDED)

    @property
    def learners(self) -> int:
        """n."""
        return len(self.weights)

    @property
    def mean(self) -> Tensor:
        """w_a (P,)."""
        return average(self.weights)

    @property
    def label(self) -> str:
        """The name of this run: algorithm, seed and step; of imported weights, the file and the model."""
        if self.algorithm == IMPORTED:
            return f"{self.path.stem if self.path else IMPORTED} ({self.model['name']})"
        if self.algorithm == RECORDED and self.path:
            return f"{self.path.resolve().parent.name}, step {self.step:,}"
        return f"{self.algorithm}, seed {self.seed}, step {self.step:,}"

    def problem(
        self,
        split: str = SPLIT,
        learner: str | int = "mean",
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        data: Any = None,
        loss: Loss | Literal["data"] | None = "data",
        data_dir: str | Path | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Problem:
        """The run's model and data as a :class:`landscape.Problem`, centred on w_a or on one learner.

        Args:
            model: replaces the built-in model; needed if the checkpoint's model is the user's code. Its
                weights and buffers are replaced by the checkpoint's.
            data: replaces the built-in data set: a :class:`landscape.data.Dataset`, a dict of the splits
                "train" and "test", or one split for both, each as :class:`landscape.Problem` takes it.
            loss: replaces the loss of the data ("data"); as in :class:`landscape.Problem`.

        One learner is evaluated with its own buffers. The mean of several learners has the mean of their
        buffers (of integers: those of learner 0), and BatchNorm statistics re-estimated at its weights, since
        those of the learners belong to other weights. The re-estimated statistics are those that the run
        recorded; without any, they are computed on the whole training set.

        Raises FailedError if the data is missing or differs from the run's data, if the weights are not
        finite or do not fit the model; InputError for a split or learner that does not exist.
        """
        if learner != "mean" and (not isinstance(learner, int) or not 0 <= learner < self.learners):
            raise InputError(
                f"learner: {learner!r} is not allowed, it must be 'mean' or 0…{self.learners - 1}"
            )
        where = self.path or "checkpoint"
        theta = self.mean if isinstance(learner, str) else self.weights[learner]
        if not bool(torch.isfinite(theta).all()):
            raise FailedError(f"{where}: its weights are NaN or infinite, all must be finite")
        name = self.data["name"]
        if data is None and (is_user_defined(name) or not name):
            of = f"data is '{name}', which a file cannot bring along" if name else "data is not known"
            hint = command_text(name, self.data["options"]) if name else "MODULE:NAME"
            raise FailedError(f"{where}: its {of}; give --data {hint} (from Python, data=…)")
        dataset = as_data(data) if data is not None else self.load_data(data_dir)
        network = self._network(model, None if isinstance(learner, str) else learner)
        criterion = dataset.loss if isinstance(loss, str) else loss

        def on(split: str) -> Problem:
            return Problem(network, criterion, dataset.split(split), theta=theta, device=device, dtype=dtype)

        if learner == "mean" and self.mean_buffers:
            self._check_buffers(network, self.mean_buffers)
            set_tensors(network, self.mean_buffers)
        elif learner == "mean" and self.learners > 1 and has_batchnorm(network):
            set_tensors(network, on("train").batchnorm_statistics())
        return on(split)

    def _network(
        self, user_model: nn.Module | Callable[[], nn.Module] | None, learner: int | None
    ) -> nn.Module:
        """The built-in model, or a copy of ``user_model``, with the buffers of one learner or their mean."""
        where, name = self.path or "checkpoint", self.model["name"]
        if user_model is None and is_user_defined(name):
            raise FailedError(
                f"{where}: its model is '{name}', code that a file cannot bring along; give --model "
                f"{command_text(name, self.model['options'])} (from Python, model=…)"
            )
        if user_model is None:
            network = models.build(name, **self.model["options"])
        else:
            network = copy.deepcopy(user_model) if isinstance(user_model, nn.Module) else user_model()
        if Layout.of(network) != self.layout:
            why = misfit(self.layout, Layout.of(network))
            raise FailedError(f"{where}: its weights do not fit the model: {why}")
        rows = {
            key: _mean(value) if learner is None else value[learner] for key, value in self.buffers.items()
        }
        self._check_buffers(network, rows)
        set_tensors(network, rows)
        return network

    def _check_buffers(self, network: nn.Module, values: Mapping[str, Tensor]) -> None:
        known = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        where = self.path or "checkpoint"
        for key, value in values.items():
            if key not in known or known[key].shape != value.shape:
                raise FailedError(f"{where}: its buffer '{key}' {tuple(value.shape)} does not fit the model")

    def load_data(self, data_dir: str | Path | None = None) -> Dataset:
        """The data set the run was trained on, its fingerprint checked (FailedError if it differs)."""
        dataset = datasets.load(self.data["name"], data_dir=data_dir, **self.data["options"])
        self.check_data(dataset)
        return dataset

    def check_data(self, dataset: Dataset | UserData) -> None:
        """FailedError unless ``dataset`` has the fingerprint of what the run was trained on."""
        if dataset.fingerprint != self.data["fingerprint"]:
            raise FailedError(
                f"{self.path or 'checkpoint'}: trained on data '{self.data['name']}' with fingerprint "
                f"{self.data['fingerprint'][:12]}…, but this data has {dataset.fingerprint[:12]}…"
            )

    def stacked(self) -> dict[str, Tensor]:
        """The tensors with a row for each learner, by their names in the file."""
        parts = {"buffers": self.buffers, "optimizer": self.optimizer, "rule": self.rule}
        named = {f"{group}/{name}": t for group, tensors in parts.items() for name, t in tensors.items()}
        return {"weights": self.weights, **named}

    def save(
        self, path: str | Path, learners: int | None = None, rows: Callable[[Tensor], Iterable[Tensor]] = iter
    ) -> None:
        """Write to ``path``, atomically. Raises FailedError where it cannot be written.

        Where several processes hold the learners, ``learners`` is n and ``rows(tensor)`` goes through all n
        rows of a tensor of :meth:`stacked`, one at a time.
        """
        n = self.learners if learners is None else learners
        with hdf5.writing(path, SCHEMA) as file:
            for name in ("buffers", "optimizer", "rule", "shared", "mean_buffers"):
                file.create_group(name)
            for group, tensors in (("shared", self.shared), ("mean_buffers", self.mean_buffers)):
                for name, tensor in tensors.items():
                    file[group][name] = tensor.detach().cpu().numpy()
            for name, tensor in self.stacked().items():
                dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
                dataset = file.create_dataset(
                    name, (n, *tensor.shape[1:]), dtype, chunks=(1, *tensor.shape[1:])
                )
                for j, row in enumerate(rows(tensor)):
                    dataset[j] = row.detach().cpu().numpy()
            layout = [
                (s.name, "x".join(map(str, s.shape)), s.offset, s.size, s.role) for s in self.layout.slots
            ]
            file["layout"] = np.array(layout, dtype=parts.SLOT)
            file["rng/seed"] = np.uint64(self.seed)
            history.write(file, self.history, self.units)
            for key in _ATTRIBUTES:
                file.attrs[key] = getattr(self, key)
            file.attrs["model"] = json.dumps(self.model)
            file.attrs["data"] = json.dumps(self.data)

    @classmethod
    def load(
        cls, path: str | Path, learners: Callable[[int], slice] | None = None, *, whole_history: bool = True
    ) -> Checkpoint:
        """Read and validate ``path``. Raises FailedError for anything that is not a whole checkpoint.

        Args:
            path: the file.
            learners: gives, for n learners, the slice of those to be read, such as the part of one process;
                None: all of them.
            whole_history: read the rows of the history that a step file lacks from the other files of its
                folder.
        """
        with hdf5.reading(path, SCHEMA) as file:
            weights = hdf5.dataset(file, "weights", "f", 2)
            attributes: dict[str, Any] = {
                key: hdf5.attribute(file, key, kind) for key, kind in _ATTRIBUTES.items()
            }
            rows = learners(len(weights)) if learners else slice(None)
            seed = hdf5.dataset(hdf5.group(file, "rng"), "seed", "ui", 0)
            columns, units = history.read(hdf5.group(file, "history"))
            checkpoint = cls(
                weights=torch.from_numpy(weights[rows]),
                layout=parts.layout(hdf5.dataset(file, "layout", "V", 1)),
                **attributes,
                model=parts.facts(file, "model", {"name": str, "options": dict}),
                data=parts.facts(file, "data", _DATA),
                seed=int(seed[()]),
                history=columns,
                units=units,
                buffers=parts.tensors(hdf5.group(file, "buffers"), rows, len(weights)),
                mean_buffers=parts.tensors(parts.later(file, "mean_buffers"), ...),
                optimizer=parts.tensors(hdf5.group(file, "optimizer"), rows, len(weights)),
                rule=parts.tensors(parts.later(file, "rule"), rows, len(weights)),
                shared=parts.tensors(parts.later(file, "shared"), ...),
                path=Path(path),
            )
            checkpoint._validate()
        if whole_history:
            checkpoint.history = history.completed(checkpoint.history, Path(path))
            checkpoint.units = {name: units.get(name, "") for name in checkpoint.history}
        return checkpoint

    def _validate(self) -> None:
        """Raise ValueError where the parts do not fit together."""
        if self.weights.dim() != 2 or self.weights.shape[1] != self.layout.size:
            raise ValueError(
                f"weights {tuple(self.weights.shape)} for a layout of {self.layout.size} numbers"
            )
        if self.diverged not in DIVERGED:
            raise ValueError(
                f"diverged is '{self.diverged}', it must be one of {', '.join(DIVERGED[1:])} or empty"
            )
        if min(self.step, self.local_batch, self.data["train"], self.data["test"], self.diverged_at + 1) < 0:
            raise ValueError("step, local_batch, sizes of the data and diverged_at must not be negative")
        if len({slot.name for slot in self.layout.slots}) < len(self.layout.slots) or not self.layout.slots:
            raise ValueError("layout must hold names, each once")
        offset = 0
        for slot in self.layout.slots:
            if min(slot.shape, default=1) < 0:
                raise ValueError(f"layout of {slot.name} has a negative size")
            if slot.offset != offset or slot.size != math.prod(slot.shape):
                raise ValueError(f"layout of {slot.name} does not add up")
            offset += slot.size
        missing = [name for name in history.UNITS if name not in self.history]
        if missing:
            raise ValueError(f"/history/{missing[0]} is missing")
        lengths = {len(column) for column in self.history.values()}
        if len(lengths) > 1:
            raise ValueError("history columns are of unequal length")
        steps = self.history["step"]
        if not np.isfinite(steps).all() or not (np.diff(steps) > 0).all():
            raise ValueError("/history/step must be finite and increasing")


def misfit(file: Layout, model: Layout) -> str:
    """Where two layouts first differ."""
    shapes, needed = ({slot.name: slot.shape for slot in layout.slots} for layout in (file, model))
    for name in {**shapes, **needed}:
        if shapes.get(name) != needed.get(name):
            here, there = shapes.get(name, "missing"), needed.get(name, "missing or frozen")
            return f"'{name}' is {here} in the file, {there} in the model"
    return "the order of the parameters differs"


def _mean(rows: Tensor) -> Tensor:
    """The mean of a buffer over the learners (n, …); row 0 where all are equal, or counts."""
    equal = bool((rows == rows[0]).all())
    return rows[0] if equal or not rows.is_floating_point() else rows.mean(0)


@torch.no_grad()
def set_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers of ``model`` by name."""
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        known[name].copy_(value)


def load(path: str | Path) -> Checkpoint | base.Result | list[base.Result]:
    """Read any file of this project: a :class:`Checkpoint`, a result, or a list of several results.

    Raises FailedError for a file that is missing, truncated, foreign or of a newer version.
    """
    with hdf5.reading(path, warn=False) as file:
        schema = file.attrs["schema"]
    if schema == SCHEMA:
        return Checkpoint.load(path)
    results = base.load_results(path)
    return results[0] if len(results) == 1 else results
