"""Measurements of one step of a training loop of the user's own, which leave that loop as it is."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from landscape.checkpoint.checkpoint import storable
from landscape.core.devices import kept_randomness
from landscape.core.errors import InputError, LandscapeError
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.metrics import names_of
from landscape.problem.problem import Loss, Problem
from landscape.problem.ranks import whole
from landscape.training import own_loop as loop
from landscape.training.decomposition import Gradient, GradientEstimator, fixed_batches, step_columns
from landscape.training.instruments import MeasuredRun, Monitoring
from landscape.training.processes.comm import Comm
from landscape.training.recipes import Monitor, table_of


class Observer:
    """The loss, its gradient and its sharpness at the weights that a module has, from copies of that module.

    Args:
        module: the user's, whose weights are read.
        loss, data, test: as :class:`landscape.Problem` takes them; ``test`` None: no test data.
        samples: the number of samples from which g is estimated; 0: all.
        monitor: the table ``monitor`` of a recipe: the further measurements.
        batch, ranks: a step has ``ranks`` minibatches of ``batch`` samples; 0: an unknown number.
        seed: draws the samples.
        optimizer: what makes the steps: one of torch's, or something else.
        how: ``terms``, ``randomness`` and ``metrics`` (of ``test``) as :class:`landscape.Problem` takes them.

    Raises InputError for what :class:`landscape.Problem` refuses, and for choices that do not fit the data.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        data: Any,
        test: Any,
        *,
        samples: int,
        monitor: Mapping[str, Any],
        batch: int,
        ranks: int,
        seed: int,
        optimizer: Any,
        **how: Any,
    ) -> None:
        loop.check_module(module)
        for name, split in (("data", data), ("test", test)):
            _check_data(name, split)
        first = next((p for p in module.parameters() if p.requires_grad and p.numel()), None)
        half = first is not None and first.is_floating_point() and first.dtype.itemsize < 4
        how["dtype"] = torch.float32 if half else None
        device, metrics = first.device if first is not None else torch.device("cpu"), how.pop("metrics", None)
        if metrics is not None and test is None:
            raise InputError("metrics: they are of the test data, which is missing; give test, too")
        self._undisturbed = functools.partial(undisturbed, device, data, test)
        self._start: tuple[Tensor, Gradient] | None = None
        self._before: Tensor | None = None
        norm = has_batchnorm(module)
        if norm and isinstance(data, Dataset):
            data = _in_batches(data, batch, seed)
        with self._undisturbed():
            self.train = Problem(module, loss, data, **how)
            try:
                self.test = None if test is None else Problem(module, loss, test, metrics=metrics, **how)
            except LandscapeError as error:
                raise InputError(f"test: {error}") from error
            self.parameters = Parameters(module, self.train)
            # With BatchNorm, what the steps are compared with depends on the batches.
            self._objective = self.train
            _check_drawn("samples", samples, self.train)
            if norm and self.train.indexed:
                _check_batch(batch)
            if norm:
                self._objective = self.train.with_batchnorm("train", max(2, batch))
            values = {"samples": Monitor.samples if self.train.indexed else 0, **monitor}
            table = table_of(Monitor, values, "monitor.")
            _check_drawn("monitor.samples", table.samples, self.train)
            self.monitor = self._monitoring(table, seed, batch * ranks, optimizer)
        cut = batch if norm and self.train.indexed else 0
        self._gradient = GradientEstimator(self._objective, Comm(1), samples, seed, cut)

    def _monitoring(self, table: Monitor, seed: int, batch: int, optimizer: Any) -> Monitoring:
        """The instruments; a step has ``batch`` samples."""
        limit = loop.stability_limit(optimizer) or math.nan
        parameters = self.parameters.trained
        return Monitoring(
            MeasuredRun(table, self._objective, Comm(1), seed, batch, limit, optimizer, parameters=parameters)
        )

    def start(self, step: int) -> None:
        """Take w and g = ∇L(w) before ``step`` is made."""
        with self._undisturbed():
            self.parameters.show(self._objective.model)
            theta = self.parameters.flat()
            self._start = theta, self._gradient.at(theta, step)

    def keep_weights(self, step: int) -> None:
        """Take w before ``step`` is made, if an instrument that is due after it needs that."""
        self._before = self.parameters.flat()[None] if self.monitor.needs_before(step) else None

    def forget(self) -> None:
        """Forget the step that was started."""
        self._start = None

    def finish(self) -> dict[str, float]:
        """The history's columns of the step that was started, if any, and of the test data after it."""
        if self._start is None:
            return {}
        (theta, g), self._start = self._start, None
        projection = g.project([self.parameters.flat() - theta])
        return step_columns(g.loss, projection) | self.tested()

    def tested(self) -> dict[str, float]:
        """Loss, accuracy and metrics on the test data now, under the module's own statistics; {} without."""
        if self.test is None:
            return {}
        with self._undisturbed():
            self.parameters.show(self.test.model)
            values = (self.test.totals(self.parameters.flat()).cpu() / self.test.samples).tolist()
        names = ("test_loss", "test_accuracy", *(f"test_{name}" for name in names_of(self.test)))
        return dict(zip(names, values, strict=True))

    def measured(self, step: int, lr: float) -> dict[str, float]:
        """The columns of the instruments that are due after ``step``."""
        with self._undisturbed():
            self.parameters.show(self._objective.model)
            return self.monitor.measure(step, lr, self.parameters.flat()[None], self._before)

    def state(self, step: int) -> dict[str, Tensor]:
        """The memory of the instruments after ``step``, for files."""
        return self.monitor.state(step)

    def agreed(self, due: bool) -> bool:
        """Return whether something is ``due`` on any of the processes that measure."""
        return due

    def together(self) -> contextlib.AbstractContextManager[None]:
        """A block whose error is raised by all processes that measure."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def undisturbed(device: torch.device, *data: Any) -> Iterator[None]:
    """Allow gradients inside; afterwards all random generators are as they were before.

    Those of torch, NumPy and Python, and those that a DataLoader among ``data`` was given.
    """
    generators = {id(g): g for split in data for g in _generators(split)}.values()
    states = [(g, g.get_state()) for g in generators]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the user's data may draw there)
    try:
        with (
            kept_randomness(device),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for generator, state in states:
            generator.set_state(state)


def _generators(data: Any) -> Iterator[torch.Generator]:
    parts = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    for part in (*parts, *(getattr(part, "sampler", None) for part in parts)):
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            yield generator


def _check_batch(batch: int) -> None:
    """Raise InputError unless BatchNorm can have the statistics of ``batch`` samples."""
    if batch < 2:
        raise InputError("batch", batch, allowed="that of the loop's minibatches, ≥ 2, with BatchNorm")


def _check_drawn(name: str, samples: int, problem: Problem) -> None:
    """Raise InputError where samples are to be drawn of data that gives batches."""
    if samples and not problem.indexed:
        raise InputError(f"{name}: {samples} is not allowed with data in batches; give (x, y), or {name} 0")


def _in_batches(data: Dataset[Any], batch: int, seed: int) -> DataLoader[Any]:
    """The samples of ``data`` in the batches that :class:`.GradientEstimator` cuts tensors into.

    Their statistics are those of batches drawn at random, as in training, in whatever order the samples are
    stored. A data set that gives its samples one after another keeps its order.
    """
    _check_batch(batch)
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch)
    batches = fixed_batches(len(data), batch, seed)  # type: ignore[arg-type]
    return DataLoader(data, batch_sampler=[part.tolist() for part in batches])


def _check_data(name: str, data: Any) -> None:
    """Raise InputError for a DataLoader with workers that last: a pass over it would end the user's own."""
    if isinstance(data, DataLoader) and data.persistent_workers:
        raise InputError(f"{name}: a DataLoader with persistent_workers=True is not allowed")


class Parameters(loop.Tracked):
    """The trainable parameters of the user's module, as one vector, with its frozen ones and buffers.

    They have the names that they have in the model of ``problem``, a copy of the module in which nothing is
    wrapped by torch.compile and its like. Its layout must not change.
    """

    def __init__(self, module: nn.Module, problem: Problem) -> None:
        kinds = (nn.Module.named_parameters, nn.Module.named_buffers)
        pairs = [zip(named(module), named(problem.model), strict=True) for named in kinds]
        names = {theirs: ours for pair in pairs for (theirs, _), (ours, _) in pair}
        super().__init__(module, problem.layout, lambda name: names.get(name, name))
        self._device, self._dtype = problem.device, problem.dtype
        self._kinds = {name: loop.kind(p) for name, p in self.named().items()}

    def check(self) -> None:
        """Raise InputError that names a parameter which is not what it was."""
        now = {name: loop.kind(p) for name, p in self.named().items()}
        for name in {**self._kinds, **now}:
            before, after = (kinds.get(name, "missing") for kinds in (self._kinds, now))
            if before != after:
                remedy = "close the recorder, and make a new one in another folder"
                raise loop.refusal(name, f"was {before}, now {after}", remedy)
        if [*self._kinds] != [*now]:
            raise InputError("model: the order of its parameters has changed, a recorder needs the first one")

    @torch.no_grad()
    def flat(self) -> Tensor:
        """θ (P,) now, in memory of its own."""
        theta = torch.empty(self.layout.size, device=self._device, dtype=self._dtype)
        for view, p in zip(self.layout.views(theta).values(), self.trained(), strict=True):
            view.copy_(p)
        return theta

    def recorded(self) -> Tensor:
        """θ (1, P) now, for files."""
        return self.flat()[None]

    def trained(self) -> list[nn.Parameter]:
        """The trainable parameters, in the order of θ."""
        now = self.named()
        return [now[slot.name] for slot in self.layout.slots]

    @torch.no_grad()
    def show(self, copy: nn.Module) -> None:
        """Give ``copy``, a copy of the module, the frozen parameters and buffers that the module has now."""
        theirs = {**dict(copy.named_parameters()), **dict(copy.named_buffers())}
        for name, tensor in self.untrained().items():
            if name in theirs:  # of BatchNorm under its batch's own statistics there are none
                if theirs[name].shape != tensor.shape:
                    raise InputError(f"model: buffer '{name}' must keep its shape, now {tuple(tensor.shape)}")
                theirs[name].copy_(tensor)


class ShardedObserver(Observer):
    """It measures a module whose parameters are DTensors, itself and no copy as :class:`.Observer` does.

    Args and errors as there; all ranks make the same calls. Refused in one line is what would need the whole
    model in one process: samples drawn anew, BatchNorm's own batches, and other instruments than λ_max.
    """

    def __init__(
        self, module: nn.Module, loss: Loss | None, data: Any, test: Any, *, samples: int,
        monitor: Mapping[str, Any], batch: int, ranks: int, seed: int, optimizer: Any, **how: Any,
    ) -> None:  # fmt: skip
        table = table_of(Monitor, {"samples": 0, **monitor}, "monitor.")
        refused = {
            "samples": samples,
            "monitor.samples": table.samples,
            "monitor.instruments": table.instruments,
            "randomness": how.pop("randomness") != "refuse",
            "metrics": how.pop("metrics") is not None,
            "model: BatchNorm": has_batchnorm(module),
        }
        for name, value in refused.items():
            if value:
                raise InputError(f"{name}: not allowed in a recorder of a sharded model")
        device = next(module.parameters()).device
        self._undisturbed = functools.partial(undisturbed, device, data, test)
        self._start = None
        with self._undisturbed():
            self._shards: Any = Problem(module, loss, data, **how)
            self.train = self._objective = self._shards
            self.test = None if test is None else Problem(module, loss, test, **how)
            self.parameters = ShardedParameters(module, self.train)
            self.monitor = self._monitoring(table, seed, 0, optimizer)
        self._group = loop.DefaultGroup(*loop.rank_and_size(), device)

    def start(self, step: int) -> None:
        with self._undisturbed():
            loss, g = self.train.loss_and_gradient()
        comm: Any = SimpleNamespace(totals=self._shards.total)
        self._start = self.parameters.flat(), Gradient(loss, g[None], comm)

    def state(self, step: int) -> dict[str, Tensor]:
        self._group.step = step  # which an error of the exchange that follows names
        return {}  # vectors of this rank

    def agreed(self, due: bool) -> bool:
        return bool(self._shards.gathered(torch.tensor(float(due))).any())

    def together(self) -> contextlib.AbstractContextManager[None]:
        return self._group.together()


class ShardedParameters(Parameters):
    """The module's trainable parameters, as the vector (n,) of this rank."""

    def __init__(self, module: nn.Module, problem: Problem) -> None:
        super().__init__(module, problem)
        self.problem = problem

    def flat(self) -> Tensor:
        return self.problem.weights

    def show(self, copy: nn.Module) -> None:
        """Change nothing, as there is no copy."""

    @torch.no_grad()
    def recorded(self) -> Tensor:
        """θ (1, P) in the CPU's memory of rank 0, gathered parameter by parameter; (1, 0) on the others."""
        first = dist.get_rank() == 0
        theta = torch.empty(1, self.layout.size if first else 0, dtype=self._dtype)
        views = list(self.layout.views(theta[0]).values()) if first else []
        for k, parameter in enumerate(self.trained()):
            part = whole(parameter)
            if first:
                views[k].copy_(part)
        return theta

    def untrained_rows(self) -> dict[str, Tensor]:
        rows = {}
        for name, tensor in self.untrained(saved=True).items():
            gathered = whole(tensor)
            if dist.get_rank() == 0:
                rows[name] = storable(gathered)[None].to("cpu", copy=True)
        return rows
