"""Measure one step of a user's training loop without a change of the loop."""

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
    """Measures the loss, its gradient and its sharpness at the weights of a module, on copies of the module.

    Args:
        module: the user's module, whose weights are read.
        loss, data, test: as :class:`landscape.Problem` takes them; ``test`` None: no test data.
        samples: the number of samples from which g is estimated; 0: all.
        monitor: further measurements: the table ``monitor`` of a recipe.
        batch, ranks: a step has ``ranks`` minibatches of ``batch`` samples each. ``batch`` 0: the number is
            unknown.
        seed: the seed of the samples.
        optimizer: makes the steps: an optimizer of torch, or another object.
        problem_options: ``terms``, ``randomness`` and ``metrics`` as :class:`landscape.Problem` takes them;
            ``metrics`` are those of ``test``.

    Raises InputError for what :class:`landscape.Problem` refuses, and for choices that do not fit the data.
    """

    def __init__(
        self, module: nn.Module, loss: Loss | None, data: Any, test: Any, *, samples: int,
        monitor: Mapping[str, Any], batch: int, ranks: int, seed: int, optimizer: Any, **problem_options: Any,
    ) -> None:  # fmt: skip
        loop.check_module(module)
        for name, split in (("data", data), ("test", test)):
            if isinstance(split, DataLoader) and split.persistent_workers:  # a pass here would end the user's
                raise InputError(f"{name}: a DataLoader with persistent_workers=True is not allowed")
        metrics = problem_options.pop("metrics", None)
        if metrics is not None and test is None:
            raise InputError("metrics: they are of the test data, which is missing; give test, too")
        trained = [p for p in module.parameters() if p.requires_grad and p.numel()]
        device = trained[0].device if trained else torch.device("cpu")
        is_half = bool(trained) and trained[0].is_floating_point() and trained[0].dtype.itemsize < 4
        # Measurements need at least single precision (4 bytes). None: the precision of the module.
        problem_options["dtype"] = torch.float32 if is_half else None
        self._without_side_effects = functools.partial(undisturbed, device, data, test)
        # θ (P,) and g from before the present step, for the step's columns of the history. None if this step
        # gets no such columns.
        self._decomposed_step: tuple[Tensor, Gradient] | None = None
        # θ (1, P) from before the present step; None if no instrument needs these weights.
        self._kept_weights: Tensor | None = None
        uses_batchnorm = has_batchnorm(module)
        if uses_batchnorm and isinstance(data, Dataset):  # Problem would choose another size of batches
            data = _in_batches(data, batch, seed)
        with self._without_side_effects():
            self.train = Problem(module, loss, data, **problem_options)
            self.test = None
            if test is not None:
                try:
                    self.test = Problem(module, loss, test, metrics=metrics, **problem_options)
                except LandscapeError as error:
                    raise InputError(f"test: {error}") from error
            self.parameters = Parameters(module, self.train)
            # ``_objective`` is the loss that the steps descend. BatchNorm makes this loss depend on batches.
            self._objective = self.train
            _check_can_be_drawn("samples", samples, self.train)
            if uses_batchnorm and self.train.indexed:
                _check_batch_for_batchnorm(batch)
            if uses_batchnorm:
                # If the data come in batches, these batches are kept. ``batch`` may then be below 2, which
                # with_batchnorm() would refuse.
                self._objective = self.train.with_batchnorm("train", max(2, batch))
            # No samples can be drawn from data that come in batches: instruments then take all samples (0).
            default_samples = Monitor.samples if self.train.indexed else 0
            self.monitor_table = table_of(Monitor, {"samples": default_samples, **monitor}, "monitor.")
            _check_can_be_drawn("monitor.samples", self.monitor_table.samples, self.train)
            self.monitoring = self._make_monitoring(self.monitor_table, seed, batch * ranks, optimizer)
        # With BatchNorm, the loss of a sample depends on the sample's batch. The estimator then cuts the
        # samples into batches of this size. 0: there is no BatchNorm, or the data come in batches.
        batch_to_cut = batch if uses_batchnorm and self.train.indexed else 0
        self._gradient = GradientEstimator(self._objective, Comm(learners=1), samples, seed, batch_to_cut)

    def _make_monitoring(self, table: Monitor, seed: int, batch: int, optimizer: Any) -> Monitoring:
        """Return the instruments of ``table``; a step has ``batch`` samples, 0: an unknown number."""
        limit = loop.stability_limit(optimizer) or math.nan
        parameters = self.parameters.trained
        return Monitoring(
            MeasuredRun(table, self._objective, Comm(1), seed, batch, limit, optimizer, parameters=parameters)
        )

    def begin_step(self, step: int) -> None:
        """Store θ and g = ∇L(θ) before ``step`` is made."""
        with self._without_side_effects():
            self.parameters.show(self._objective.model)
            theta = self.parameters.flat()
            self._decomposed_step = theta, self._gradient.at(theta, step)

    def keep_weights(self, step: int) -> None:
        """Store θ before ``step`` is made, if an instrument that is due after the step needs θ."""
        self._kept_weights = self.parameters.flat()[None] if self.monitoring.needs_before(step) else None

    def forget_step(self) -> None:
        """Forget the step that was started."""
        self._decomposed_step = None

    def finish(self) -> dict[str, float]:
        """Return the history's columns of the started step and of the test data; {} if no step started."""
        if self._decomposed_step is None:
            return {}
        (theta, g), self._decomposed_step = self._decomposed_step, None
        projection = g.project([self.parameters.flat() - theta])
        return step_columns(g.loss, projection) | self.test_columns()

    def test_columns(self) -> dict[str, float]:
        """Return test loss, accuracy and metrics, with the module's own statistics; {} without test data."""
        if self.test is None:
            return {}
        with self._without_side_effects():
            self.parameters.show(self.test.model)
            values = (self.test.totals(self.parameters.flat()).cpu() / self.test.samples).tolist()
        names = ("test_loss", "test_accuracy", *(f"test_{name}" for name in names_of(self.test)))
        return dict(zip(names, values, strict=True))

    def instrument_columns(self, step: int, lr: float) -> dict[str, float]:
        """Return the columns of the instruments that are due after ``step``."""
        with self._without_side_effects():
            self.parameters.show(self._objective.model)
            return self.monitoring.measure(step, lr, self.parameters.flat()[None], self._kept_weights)

    def state(self, step: int) -> dict[str, Tensor]:
        """Return the memory of the instruments after ``step``, for files."""
        return self.monitoring.state(step)

    def any_rank(self, due: bool) -> bool:
        """Return whether ``due`` is true on any of the processes that measure."""
        return due

    def raising_on_all_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context; an error inside, on any process that measures, is raised on all of them."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def undisturbed(device: torch.device, *data: Any) -> Iterator[None]:
    """Allow gradients inside the block, and restore the states of all random generators after it.

    These are the generators of torch, NumPy and Python, and the generators of any DataLoader among ``data``.
    """
    generators = {id(g): g for split in data for g in _generators(split)}.values()  # without repetition
    states = [(g, g.get_state()) for g in generators]
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (the user's data may draw there)
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
    """Yield the generators of a DataLoader and its samplers; none for other data."""
    parts = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    parts += [getattr(part, "sampler", None) for part in parts]
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _check_batch_for_batchnorm(batch: int) -> None:
    """Raise InputError unless BatchNorm can have the statistics of ``batch`` samples."""
    if batch < 2:
        raise InputError("batch", batch, allowed="that of the loop's minibatches, ≥ 2, with BatchNorm")


def _check_can_be_drawn(name: str, samples: int, problem: Problem) -> None:
    """Raise InputError where ``samples`` are to be drawn from data that come in batches."""
    if samples and not problem.indexed:
        raise InputError(f"{name}: {samples} is not allowed with data in batches; give (x, y), or {name} 0")


def _in_batches(data: Dataset[Any], batch: int, seed: int) -> DataLoader[Any]:
    """Return the samples of ``data`` in batches, cut as :class:`.GradientEstimator` cuts tensors.

    The batches are drawn at random, as in training, so that their statistics do not depend on the order of
    the stored samples. An IterableDataset keeps its order.
    """
    _check_batch_for_batchnorm(batch)
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch)
    batches = fixed_batches(len(data), batch, seed)  # type: ignore[arg-type]
    return DataLoader(data, batch_sampler=[part.tolist() for part in batches])


class Parameters(loop.Tracked):
    """The trainable parameters of the user's module as one vector, its frozen parameters, and its buffers.

    Their names are those in the model of ``problem``, a copy of the module without wrappers such as
    torch.compile's. The module's layout must not change.
    """

    def __init__(self, module: nn.Module, problem: Problem) -> None:
        names: dict[str, str] = {}  # in the module -> in the problem's model
        for named in (nn.Module.named_parameters, nn.Module.named_buffers):
            for (module_name, _), (name, _) in zip(named(module), named(problem.model), strict=True):
                names[module_name] = name
        super().__init__(module, problem.layout, lambda name: names.get(name, name))
        self._device, self._dtype = problem.device, problem.dtype
        self._kinds = {name: loop.kind(p) for name, p in self.named().items()}

    def check(self) -> None:
        """Raise InputError where a parameter has changed its kind, or the order has changed."""
        kinds = {name: loop.kind(p) for name, p in self.named().items()}
        for name in {**self._kinds, **kinds}:
            before, now = self._kinds.get(name, "missing"), kinds.get(name, "missing")
            if before != now:
                remedy = "close the recorder, and make a new one in another folder"
                raise loop.refusal(name, f"was {before}, now {now}", remedy)
        if [*self._kinds] != [*kinds]:
            raise InputError("model: the order of its parameters has changed, a recorder needs the first one")

    @torch.no_grad()
    def flat(self) -> Tensor:
        """Return θ (P,) now, a copy."""
        theta = torch.empty(self.layout.size, device=self._device, dtype=self._dtype)
        for view, p in zip(self.layout.views(theta).values(), self.trained(), strict=True):
            view.copy_(p)
        return theta

    def recorded(self) -> Tensor:
        """Return θ (1, P) now, for files."""
        return self.flat()[None]

    def trained(self) -> list[nn.Parameter]:
        """Return the trainable parameters, in the order of θ."""
        parameters = self.named()
        return [parameters[slot.name] for slot in self.layout.slots]

    @torch.no_grad()
    def show(self, copy: nn.Module) -> None:
        """Copy the module's present frozen parameters and buffers to ``copy``, a copy of the module."""
        targets = {**dict(copy.named_parameters()), **dict(copy.named_buffers())}
        for name, tensor in self.untrained().items():
            if name in targets:  # a BatchNorm with the batch's statistics has no buffers
                if targets[name].shape != tensor.shape:
                    raise InputError(f"model: buffer '{name}' must keep its shape, now {tuple(tensor.shape)}")
                targets[name].copy_(tensor)


class ShardedObserver(Observer):
    """Measures a module whose parameters are DTensors: the module itself, without a copy.

    Args and errors are those of :class:`.Observer`, except that ``batch`` and ``ranks`` have no effect. All
    ranks make the same calls. Measurements that need the whole model in one process are refused: samples
    drawn anew, BatchNorm's own batches, and other instruments than λ_max.
    """

    def __init__(
        self, module: nn.Module, loss: Loss | None, data: Any, test: Any, *, samples: int,
        monitor: Mapping[str, Any], batch: int, ranks: int, seed: int, optimizer: Any, **problem_options: Any,
    ) -> None:  # fmt: skip
        self.monitor_table = table_of(Monitor, {"samples": 0, **monitor}, "monitor.")
        randomness, metrics = problem_options.pop("randomness"), problem_options.pop("metrics")
        # Option -> a value that must be 0, empty or False.
        refused = {
            "samples": samples,
            "monitor.samples": self.monitor_table.samples,
            "monitor.instruments": self.monitor_table.instruments,
            "randomness": randomness != "refuse",
            "metrics": metrics is not None,
            "model: BatchNorm": has_batchnorm(module),
        }
        for name, value in refused.items():
            if value:
                raise InputError(f"{name}: not allowed in a recorder of a sharded model")
        device = next(module.parameters()).device
        self._without_side_effects = functools.partial(undisturbed, device, data, test)
        self._decomposed_step = None
        with self._without_side_effects():
            # For parameters that are DTensors, Problem() returns a ShardedProblem, which has further methods.
            self._sharded_problem: Any = Problem(module, loss, data, **problem_options)
            # The same object under the names that the methods of Observer use.
            self.train = self._objective = self._sharded_problem
            self.test = None if test is None else Problem(module, loss, test, **problem_options)
            self.parameters = ShardedParameters(module, self.train)
            # λ_max, the only measurement that is not refused, does not depend on the steps' batch.
            self.monitoring = self._make_monitoring(self.monitor_table, seed, batch=0, optimizer=optimizer)
        self._group = loop.DefaultGroup(*loop.rank_and_size(), device)

    def begin_step(self, step: int) -> None:
        with self._without_side_effects():
            loss, g = self.train.loss_and_gradient()
        comm: Any = SimpleNamespace(totals=self._sharded_problem.total)
        self._decomposed_step = self.parameters.flat(), Gradient(loss, g[None], comm)

    def state(self, step: int) -> dict[str, Tensor]:
        self._group.step = step  # for the message of an error in the exchange that follows
        return {}  # the instruments' memory is a part of a vector: this rank's shard

    def any_rank(self, due: bool) -> bool:
        return bool(self._sharded_problem.gathered(torch.tensor(float(due))).any())

    def raising_on_all_ranks(self) -> contextlib.AbstractContextManager[None]:
        return self._group.raising_on_all_ranks()


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
        """Return θ (1, P) in rank 0's CPU memory, gathered by parameter, and (1, 0) on the other ranks."""
        writes = dist.get_rank() == 0
        theta = torch.empty(1, self.layout.size if writes else 0, dtype=self._dtype)
        views = list(self.layout.views(theta[0]).values()) if writes else []
        for k, parameter in enumerate(self.trained()):
            tensor = whole(parameter)  # an exchange, which all ranks make
            if writes:
                views[k].copy_(tensor)
        return theta

    def untrained_rows(self) -> dict[str, Tensor]:
        rows = {}
        for name, tensor in self.untrained(saved=True).items():
            gathered = whole(tensor)  # an exchange, which all ranks make
            if dist.get_rank() == 0:
                rows[name] = storable(gathered)[None].to("cpu", copy=True)
        return rows
