"""The checkpoint of a training run: every learner's weights, the history, and the run's settings."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from landscape import data as datasets
from landscape import models
from landscape.checkpoint import history, user_code
from landscape.checkpoint.history import IMPORTED as IMPORTED
from landscape.checkpoint.history import RECORDED as RECORDED
from landscape.checkpoint.history import SCHEMA as SCHEMA
from landscape.checkpoint.user_code import UserData, as_data, is_user_defined, text_of
from landscape.core import hdf5
from landscape.core.devices import Device, Dtype
from landscape.core.errors import InputError, OperationError
from landscape.core.options import SPLIT, Count, checked
from landscape.data.base import Dataset
from landscape.evaluation.part import drawn
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.layout import Layout, Slot, average
from landscape.problem.metrics import Metrics
from landscape.problem.problem import Loss, Problem
from landscape.results.base import Provenance
from landscape.results.shown import Row, Shown

if TYPE_CHECKING:
    import pandas as pd


def unknown_data() -> dict[str, Any]:
    """The facts on data of which nothing is known."""
    return {key: kind() for key, kind in history.DATA.items()}


@dataclass(repr=False)
class Checkpoint(Shown):
    """The state of a run after some steps; in a run over several processes, one process's part of it.

    With imported weights ``buffers`` also has frozen parameters; there is no step, no learning rate (NaN) and
    no local batch (0), and ``recipe`` names the files. From a recorded loop ``recipe`` has the known
    settings, ``epoch`` and ``lr`` may be NaN, and ``local_batch`` may be 0. Names "module:factory" of model
    and data are the user's own code: they are shown, never imported (see :meth:`problem`).

    Attributes:
        weights: (n, P), one row for each learner of this process.
        layout: the places of the parameters in a row.
        step, epoch: the number of steps, and of passes over the training set.
        algorithm: the name of the update rule.
        recipe: all settings, as TOML text.
        model: {"name", "options"}.
        data: {"name", "options", "train", "test", "fingerprint"}; train and test are numbers of samples.
        lr, local_batch: the values for the next step; at the end of a run, for the last one.
        seed: it fixes all randomness, with the step (see ``landscape.training.run``).
        history, units: column -> (T,) float64, and column -> unit.
        buffers: name -> (n, …), each learner's BatchNorm statistics from its own minibatches.
        mean_buffers: name -> (…), the statistics of w_a, estimated on a sample of the training set; empty if
            they were not estimated.
        optimizer: name -> (n, …), the state of the optimizer.
        rule, shared: name -> (n, …) and name -> (…), the state of the update rule for each learner, and the
            state for all learners.
        diverged_at: the step at which the run diverged, or −1.
        diverged: "mean" or "learners" diverged, or "" for none.
        path: the file; None if it was not saved.
        source: arguments of :meth:`problem` for calls without them (:meth:`using`).
        description: the update rule's line, such as its mixing and its limit of stability; "": none.

    Example:
        >>> run.weights.shape
        torch.Size([1, 8])
    """

    weights: Tensor
    layout: Layout
    step: int
    algorithm: str
    recipe: str
    model: dict[str, Any]
    epoch: float = math.nan
    data: dict[str, Any] = field(default_factory=unknown_data)
    lr: float = math.nan
    local_batch: int = 0
    seed: int = 0
    history: dict[str, hdf5.Array] = field(default_factory=lambda: dict.fromkeys(history.UNITS, np.zeros(0)))
    buffers: dict[str, Tensor] = field(default_factory=dict)
    mean_buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    rule: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=lambda: dict(history.UNITS))
    diverged_at: int = -1
    diverged: str = ""
    path: Path | None = None
    source: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    description: str = ""

    def describe(self) -> list[Row]:
        n, size = self.weights.shape
        title = f"{self.model['name']} on {self.data['name'] or 'unknown data'}"
        rows = [Row("model", title, note=f"{n} × {size:,} weights, {self.path or 'not saved'}")]
        if self.diverged:
            rows.append(Row("diverged", f"at step {self.diverged_at}: the {self.diverged}"))
        return [*rows, *history.describe(self.history)]

    def to_dataframe(self) -> pd.DataFrame:
        """Return the history as a table of pandas.

        Returns:
            A DataFrame with a row for each step, NaN where nothing was recorded; units are in ``attrs``.

        Example:
            >>> "test_loss" in run.to_dataframe()
            True
        """
        import pandas as pd  # only here: a checkpoint is read without it

        frame = pd.DataFrame(self.history)
        frame.attrs = {"label": self.label, "units": self.units}
        return frame

    @property
    def has_recipe(self) -> bool:
        """Return whether ``landscape train`` made the run, so that ``recipe`` can resume it."""
        return self.algorithm not in (IMPORTED, RECORDED)

    @property
    def settings(self) -> dict[str, Any]:
        """The values in ``recipe``; none for imported weights. OperationError where they cannot be read."""
        return history.settings(self.algorithm, self.recipe, self.path or "checkpoint")

    @property
    def learners(self) -> int:
        """The number n of learners."""
        return len(self.weights)

    @property
    def batch(self) -> int:
        """The total batch nB of a step; 0 if it is unknown."""
        return self.local_batch * self.learners

    @property
    def mean(self) -> Tensor:
        """The mean w_a of the learners' weights (P,)."""
        return average(self.weights)

    @property
    def label(self) -> str:
        """The name of this run by ``using(name=…)``; else algorithm, seed and step, or file and model."""
        if name := self.source.get("name"):
            return str(name)
        if self.algorithm == IMPORTED:
            return f"{self.path.stem if self.path else IMPORTED} ({self.model['name']})"
        if self.algorithm == RECORDED and self.path:
            return f"{self.path.resolve().parent.name}, step {self.step:,}"
        return f"{self.algorithm}, seed {self.seed}, step {self.step:,}"

    def about(self, split: str | None = None) -> Provenance:
        """Return the origin for results of this run: split, label, file and its SHA-256.

        Args:
            split: "train" or "test"; default: the split of :meth:`problem`.

        Returns:
            A dict with ``split``, ``label``, ``source`` and ``source_sha256``; without a file the first two.

        Example:
            >>> run.about()
            {'split': 'train', 'label': 'import (torch.nn.modules.linear:Linear)'}
        """
        origin = Provenance(split=split or self.source.get("split", SPLIT), label=self.label)
        path = self.path
        if path is not None and path.exists():
            digest = hashlib.sha256(self.recipe.encode()).hexdigest()
            # Weights from several files of another program have their digests in the recipe.
            if path.is_file() and (path.suffix == ".h5" or self.recipe.count("[[import]]") == 1):
                digest = hdf5.sha256(path)
            origin |= {"source": path.name, "source_sha256": digest}
        return origin

    @checked(unchecked=("model", "loss"))
    def problem(
        self,
        split: str | None = None,
        learner: str | int = "mean",
        *,
        model: nn.Module | Callable[[], nn.Module] | str | None = None,
        data: Any = None,
        loss: Loss | str | None = "data",
        data_dir: str | Path | None = None,
        device: Device | None = None,
        dtype: Dtype | None = None,
        randomness: str | int | None = None,
        metrics: Metrics | None = None,
        samples: Count | None = None,
    ) -> Problem:
        """Return the run's model and data as a :class:`landscape.Problem`, at w_a or at a learner's weights.

        w_a is the mean of the learners' weights. At w_a, floating-point buffers are averaged over the
        learners, and integer buffers are those of learner 0. BatchNorm's statistics at w_a are read from the
        run. If the run did not record them, they are estimated on the training set. Model, data and loss may
        also be names "MODULE:NAME".

        Args:
            split: "train" (the default) or "test".
            learner: "mean" for w_a, or a learner's number.
            model: a model in place of the run's model. It gets the run's weights and buffers.
            data: data in place of the run's data set: a :class:`landscape.data.Dataset`, a dict of the splits
                "train" and "test", or one split for both. A split is data as for :class:`landscape.Problem`.
            loss: "data" for the data set's loss, or another loss as for :class:`landscape.Problem`.
            data_dir: the folder with the data sets that are not bundled.
            device, dtype, randomness, metrics: as for :class:`landscape.Problem`.
            samples: the number of samples to use, the same samples in each call; default: all of the split.

        Returns:
            The problem; it shares no memory with the checkpoint.

        Raises:
            InputError: a split or a learner that does not exist, or more samples than the split has.
            OperationError: the model or the data is missing, the data set's fingerprint is not the recorded
                one, or the weights are NaN, infinite or do not fit the model.

        Example:
            >>> data, loss = (torch.randn(9, 3), torch.randint(2, (9,))), torch.nn.functional.cross_entropy
            >>> run.problem(model=linear, data=data, loss=loss).samples
            9
        """
        options = {
            "split": split, "model": model, "data": data, "data_dir": data_dir, "device": device,
            "dtype": dtype, "randomness": randomness, "metrics": metrics, "samples": samples,
        }  # fmt: skip
        options = {name: value for name, value in options.items() if value is not None}
        # "data", the default, does not replace a loss of using(). None does: it means the model's own loss.
        if not isinstance(loss, str) or loss != "data":
            options["loss"] = loss
        defaults = {"split": SPLIT, "loss": "data", "randomness": "refuse"}
        # Arguments of this call replace those of using(), which replace the defaults.
        return self._problem(learner, **defaults | self.source | user_code.resolved(options))

    def using(self, **source: Any) -> Checkpoint:
        """Return the run with a model, data or loss that its file does not contain.

        Args:
            source: default arguments of :meth:`problem`; and ``name``, the run's name in titles, legends and
                tables.

        Returns:
            A run that shares its arrays with this one.

        Raises:
            InputError: a named model, data set or loss that does not exist.

        Example:
            >>> data = torch.randn(9, 3), torch.randint(2, (9,))
            >>> landscape.spectrum(run.using(model=linear, data=data), k=2).values.shape
            (2,)
        """
        return dataclasses.replace(self, source=self.source | user_code.resolved(source))

    def _problem(
        self, learner: str | int, split: str, loss: Any, *, model: Any = None, data: Any = None,
        data_dir: Any = None, samples: int | None = None, **options: Any,
    ) -> Problem:  # fmt: skip
        """Return the problem. :meth:`problem` calls this method after it has filled in all defaults.

        ``options`` are passed on to :class:`landscape.Problem`.
        """
        check_learner(learner, self.learners)
        where = str(self.path or "checkpoint")
        # The only string that check_learner accepts is "mean".
        center = self.mean if isinstance(learner, str) else self.weights[learner]
        if not bool(torch.isfinite(center).all()):
            raise OperationError(f"{where}: its weights are NaN or infinite, all must be finite")
        data_name = self.data["name"]
        if data is None and not data_name:
            raise OperationError(f"{where}: its data is not known", give={"data": "MODULE:NAME"})
        if data is None and is_user_defined(data_name):
            words = f"{where}: its data is '{data_name}', which a file cannot bring along"
            raise OperationError(words, give={"data": text_of(data_name, self.data["options"])})
        dataset = as_data(data) if data is not None else self.load_data(data_dir)
        # A stored buffer has a row for each learner. Take the mean of the rows, or the learner's row.
        take = mean_buffer if isinstance(learner, str) else operator.itemgetter(learner)
        network = self._network(where, model)
        set_tensors(network, {name: take(rows) for name, rows in self.buffers.items()}, where)
        # The caller has replaced a name "MODULE:NAME" by an object. A ``loss`` that is a string is "data". It
        # stands for the data set's loss.
        criterion = dataset.loss if isinstance(loss, str) else loss

        def problem_on(split: str) -> Problem:
            return Problem(network, criterion, dataset.split(split), weights=center, **options)

        if learner == "mean" and self.mean_buffers:  # BatchNorm's recorded statistics at w_a
            set_tensors(network, self.mean_buffers, where)
        elif learner == "mean" and self.learners > 1 and has_batchnorm(network):
            # The learners' statistics belong to their own weights, not to w_a, the mean weights.
            set_tensors(network, problem_on("train").batchnorm_statistics())
        problem = problem_on(split)
        if samples is not None and samples > problem.samples:
            raise InputError("samples", samples, allowed=f"at most {problem.samples:,}, those of the split")
        return problem if samples is None else drawn(problem, samples)

    def _network(self, where: str, model: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
        """Return the model of the run, or a copy of ``model``.

        Raises OperationError if the run's model is user code and ``model`` is None, or if it does not fit.
        """
        name, options = self.model["name"], self.model["options"]
        if model is None and is_user_defined(name):
            words = f"{where}: its model is '{name}', code that a file cannot bring along"
            raise OperationError(words, give={"model": text_of(name, options)})
        if model is None:
            network = models.build(name, **options)
        else:
            network = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        check_fit(where, self.layout, Layout.of(network))
        return network

    def load_data(self, data_dir: str | Path | None = None) -> Dataset:
        """Return the data set that the run was trained on.

        Args:
            data_dir: the folder with the data sets that are not bundled.

        Returns:
            The data set, its fingerprint checked.

        Raises:
            OperationError: data that is missing or has another fingerprint.

        Example:
            >>> known = {"name": "digits", "fingerprint": landscape.data.load("digits").fingerprint}
            >>> dataclasses.replace(run, data=run.data | known).load_data().classes
            10
        """
        dataset = datasets.load(self.data["name"], data_dir=data_dir, **self.data["options"])
        self.check_data(dataset)
        return dataset

    def check_data(self, dataset: Dataset | UserData) -> None:
        """Check that the run was trained on this data.

        Args:
            dataset: the data.

        Raises:
            OperationError: the data has another fingerprint.

        Example:
            >>> run.check_data(landscape.data.load("digits"))
            Traceback (most recent call last):
            landscape.core.errors.OperationError: checkpoint: trained on data ...
        """
        if dataset.fingerprint != self.data["fingerprint"]:
            old, new = self.data["fingerprint"][:12], dataset.fingerprint[:12]
            words = f"trained on data '{self.data['name']}' with fingerprint {old}…, this data has {new}…"
            raise OperationError(f"{self.path or 'checkpoint'}: {words}")

    def stacked(self) -> dict[str, Tensor]:
        """Return the tensors with a row for each learner.

        Returns:
            The tensors (n, …), by their names in the file.

        Example:
            >>> list(run.stacked())
            ['weights']
        """
        named = {f"{key}/{name}": t for key in history.STACKED for name, t in getattr(self, key).items()}
        return {"weights": self.weights, **named}

    def save(
        self, path: str | Path, learners: int | None = None, rows: Callable[[Tensor], Iterable[Tensor]] = iter
    ) -> None:
        """Write the checkpoint; an existing file is replaced only after the new one is complete.

        Args:
            path: the file.
            learners: the number of learners in the run, if this process has only some of them; default: the
                learners of this checkpoint.
            rows: takes a tensor of :meth:`stacked`, and returns an iterator over its rows for all learners in
                the run.

        Raises:
            OperationError: the file cannot be written.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     run.save(f"{folder}/net.h5")
            ...     landscape.load(f"{folder}/net.h5").learners
            1
        """
        with hdf5.writing(path, SCHEMA) as file:
            self._write(file, learners, rows)

    def _write(
        self, file: h5py.File, learners: int | None, rows: Callable[[Tensor], Iterable[Tensor]]
    ) -> None:
        """Write the checkpoint to an open file.

        Args:
            file: the open file.
            learners, rows: as for :meth:`save`.
        """
        n = self.learners if learners is None else learners
        for group in history.STACKED + history.COMMON:
            file.create_group(group)
        for group in history.COMMON:
            for name, tensor in getattr(self, group).items():
                file[group][name] = tensor.detach().cpu().numpy()
        for name, tensor in self.stacked().items():
            numpy_dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            row_shape = tensor.shape[1:]
            dataset = file.create_dataset(name, (n, *row_shape), numpy_dtype, chunks=(1, *row_shape))
            for j, row in enumerate(rows(tensor)):
                dataset[j] = row.detach().cpu().numpy()
        slots = self.layout.slots
        slot_rows = [(s.name, "x".join(map(str, s.shape)), s.offset, s.size, s.role) for s in slots]
        file["layout"] = np.array(slot_rows, dtype=history.SLOT)
        file["rng/seed"] = np.uint64(self.seed)
        history.write(file, self.history, self.units)
        for key in history.ATTRIBUTES:
            file.attrs[key] = getattr(self, key)
        file.attrs["description"] = self.description
        file.attrs["model"] = json.dumps(self.model)
        file.attrs["data"] = json.dumps(self.data)

    @classmethod
    def load(
        cls, path: str | Path, learners: Callable[[int], slice] | None = None, *, whole_history: bool = True
    ) -> Checkpoint:
        """Read and validate a checkpoint.

        Args:
            path: the file.
            learners: a function that takes n, the number of learners in the file, and returns the slice of
                learners to read; default: all.
            whole_history: whether to read earlier rows of the history from the other files in the folder, if
                the file is one that was saved during training and has only the latest rows.

        Returns:
            The checkpoint.

        Raises:
            OperationError: the file is missing, damaged, of a newer version, or no checkpoint.

        Example:
            >>> Checkpoint.load("missing.h5")
            Traceback (most recent call last):
            landscape.core.errors.OperationError: missing.h5: no such file; ...
        """
        # The module ``history`` reads all fields of a checkpoint, not only the history.
        fields = history.read_fields(path, learners, whole_history=whole_history)
        for group in (*history.STACKED, *history.COMMON):
            fields[group] = {name: torch.from_numpy(array) for name, array in fields[group].items()}
        fields["weights"] = torch.from_numpy(fields["weights"])
        fields["layout"] = Layout(tuple(Slot(*slot) for slot in fields["layout"]))
        return cls(**fields, path=Path(path))


def storable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in a precision for files: float32 in place of bfloat16 and float16."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def check_learner(learner: str | int, learners: int) -> None:
    """Raise InputError unless ``learner`` is "mean", or the number of a learner."""
    if learner != "mean" and (not isinstance(learner, int) or not 0 <= learner < learners):
        raise InputError(f"learner: {learner!r} is not allowed, it must be 'mean' or 0…{learners - 1}")


def check_fit(where: str | Path, file: Layout, model: Layout) -> None:
    """Raise OperationError, with the first difference, unless the two layouts are the same."""
    if file == model:
        return
    in_file = {slot.name: slot.shape for slot in file.slots}
    in_model = {slot.name: slot.shape for slot in model.slots}
    reason = "the order of the parameters differs"
    for name in {**in_file, **in_model}:
        shape, needed = in_file.get(name, "missing"), in_model.get(name, "missing or frozen")
        if shape != needed:
            reason = f"'{name}' is {shape} in the file, {needed} in the model"
            break
    raise OperationError(f"{where}: its weights do not fit the model: {reason}")


def mean_buffer(rows: Tensor) -> Tensor:
    """Return the mean of a buffer over the learners (n, …); row 0 if all rows are equal, or integers."""
    are_equal = bool((rows == rows[0]).all())
    return rows[0] if are_equal or not rows.is_floating_point() else rows.mean(0)


@torch.no_grad()
def set_tensors(model: nn.Module, values: Mapping[str, Tensor], where: str = "checkpoint") -> None:
    """Set parameters and buffers of ``model`` by name; raise OperationError for one that does not fit."""
    tensors_of_model = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        if name not in tensors_of_model or tensors_of_model[name].shape != value.shape:
            raise OperationError(f"{where}: its buffer '{name}' {tuple(value.shape)} does not fit the model")
    for name, value in values.items():
        tensors_of_model[name].copy_(value)
