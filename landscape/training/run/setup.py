"""The parts of a run: its history, the test for divergence, initial weights, buffers, minibatches, checks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint, set_tensors
from landscape.checkpoint.user_code import UserData
from landscape.core import hdf5
from landscape.core.devices import double, inner
from landscape.core.errors import InputError, OperationError
from landscape.data.base import IID, Dataset, Parts, cached
from landscape.gradients.learners import Stack, Training
from landscape.problem.batches import call, fixed_randomness, named_tensors
from landscape.problem.batchnorm import buffer_names, has_batchnorm, sample_parts
from landscape.problem.problem import Problem
from landscape.training.instruments import MeasuredRun, Monitoring
from landscape.training.optimizer.base import Optimizer
from landscape.training.processes.comm import Comm
from landscape.training.recipes import GROUPS, Diverge
from landscape.training.recipes.recipe import Recipe
from landscape.training.recipes.settings import refuse_without_effect
from landscape.training.run import Row, generator

# The number of consecutive steps in which the spread must exceed its bound (our choice: a burst, for example
# after one huge gradient, is shorter, and under SSGD the learners are equal again after one step).
PERSISTENT = 10


class DivergedError(OperationError):
    """A run diverged: its files are complete, and end with the last finite state."""

    exit_code = 3


@dataclass(frozen=True)
class DivergenceTest:
    """The bounds on loss and spread that :class:`landscape.training.recipes.Diverge` describes.

    ``start_norm2`` is ‖w_a‖² at the start of the run.
    """

    bounds: Diverge
    start_norm2: float

    def needs_spread(self, rows: Sequence[Row]) -> bool:
        """Return whether the last measured spread exceeds its bound: the next one must be measured."""
        return bool(rows) and rows[-1]["consensus"] > self.bounds.consensus * self.start_norm2

    def loss_is_bounded(self, loss: float) -> bool:
        """Return whether ``loss`` is within its bound; NaN is not."""
        return loss <= self.bounds.loss

    def spread_exceeds_bound(self, rows: Sequence[Row], mean: Tensor | None) -> bool:
        """Return whether the spread exceeded its bound in all of the last steps.

        Args:
            rows: the history, the newest step included.
            mean: w_a (P,) after the newest step, None where it is not known.
        """
        recent = [row["consensus"] for row in rows[-PERSISTENT:]]
        if mean is None or len(recent) < PERSISTENT:
            return False

        def exceed(norm2: float) -> bool:
            return all(spread > self.bounds.consensus * norm2 for spread in recent)

        # ‖w_a‖² costs a pass over memory, which is rarely needed.
        return exceed(self.start_norm2) and exceed(float(inner(mean, mean)))


def divergence_message(end: Checkpoint) -> str:
    """Return one line about a run that diverged."""
    reasons = {
        "mean": "the mean's loss exceeded its bound",
        "learners": "the learners' spread exceeded its bound, while the mean's loss stays within its own",
    }
    return f"diverged at step {end.diverged_at}: {reasons[end.diverged]}; the last finite state is kept"


class Buffers:
    """The BatchNorm statistics of this process's learners, and those with which their mean is evaluated.

    Args:
        train, test: the problems, which receive the statistics of the mean.
        comm: the exchange with other processes.
        seed: the run's seed, for dropout.
        samples: the number of training samples from which the statistics of the mean are estimated.

    Attributes:
        local: name -> (n_local, ...); empty for a network without BatchNorm.
    """

    def __init__(self, train: Problem, test: Problem, comm: Comm, seed: int, samples: int) -> None:
        self._train, self._test, self._comm = train, test, comm
        self._seed, self._samples = seed, samples
        state = dict([*train.model.named_parameters(), *train.model.named_buffers()])
        names = train.model.state_dict().keys() - {slot.name for slot in train.layout.slots}
        #: Frozen parameters and constants, the same for all learners.
        self._fixed = {name: t.detach() for name, t in state.items() if name in names}
        statistics = [name for name in buffer_names(train.model) if name in names]
        self.local = {name: _rows(self._fixed.pop(name), comm.n_local).clone() for name in statistics}
        # The statistics that the problems have, and the step of the mean that they belong to.
        self._step, self._statistics = -1, dict[str, Tensor]()

    def check(self, model: nn.Module, samples: int) -> None:
        """Raise InputError if ``model``, in training mode, cannot train on ``samples`` samples at a time.

        BatchNorm may have only one number per channel, or the model may change another buffer.
        """
        x, _ = self._train.gather(torch.zeros(min(2, samples), dtype=torch.long))
        try:
            with torch.no_grad(), fixed_randomness(self._train.device, 0, self._train.draws_elsewhere):
                call(model, self._train.layout.views(self._train.weights), x)
        except ValueError as error:
            words = f"a learner at a time cannot be trained on ({' '.join(str(error).split())[:120]})"
            raise InputError(f"batch: {samples} sample{'s' * (samples > 1)} {words}") from error
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in self._fixed.items():
            if not torch.equal(tensors[name], tensor):
                words = "changes in training, only the statistics of BatchNorm may"
                raise InputError(f"model: its buffer '{name}' {words}")

    def training(self, step: int) -> Training:
        """Return the options of a training pass of this process's learners at ``step``: buffers and seeds."""

        def seed(learner: int, micro: int) -> int:
            index = self._comm.local.start + learner
            return generator(self._seed, "dropout", step, index, micro).initial_seed()

        return Training(self.local, seed)

    def at_mean(self, weights: Tensor) -> dict[str, Tensor]:
        """Set the statistics of both problems at ``weights`` = w_a, and return them by name.

        They are averages over batches of 250 samples, which the processes share.
        """
        if not self.local:
            return {}
        parts = sample_parts(self._train.samples, self._samples)
        share = parts[self._comm.share(len(parts))]
        batches = (self._train.gather(part)[0] for part in share)
        weight = len(share) / len(parts)
        statistics = {
            name: self._comm.totals(double(value) * weight).to(value.dtype)
            for name, value in self._train.batchnorm_statistics(weights, batches).items()
            if value.is_floating_point()
        }
        self._set(statistics)
        return statistics

    def _set(self, values: Mapping[str, Tensor]) -> None:
        for problem in (self._train, self._test):
            set_tensors(problem.model, values)

    def statistics(self, weights: Tensor, step: int) -> dict[str, Tensor]:
        """Return :meth:`at_mean` for ``weights`` (n_local, P) after ``step``, computed once per step."""
        if self.local and self._step != step:
            self._step, self._statistics = step, self.at_mean(self._comm.mean(weights))
        return self._statistics

    def test_columns(self, weights: Tensor, step: int) -> Row:
        """Return the history's columns of w_a on the test set; arguments as of :meth:`statistics`."""
        self.statistics(weights, step)
        mean = self._comm.mean(weights)
        if self._test.indexed:
            loss, accuracy = self._comm.evaluate(self._test, mean)
        else:  # batches cannot be shared: all processes evaluate all of them
            loss, accuracy = self._test.evaluate(mean)
        return {"test_loss": loss, "test_accuracy": accuracy}

    def training_loss(self, mean: Tensor) -> float:
        """Return the loss of any weights ``mean`` (P,) on the training set, with their statistics."""
        self._step, self._statistics = -1, self.at_mean(mean)
        return self._comm.evaluate(self._train, mean)[0]

    def rows(self) -> dict[str, Tensor]:
        """Return the buffers for a checkpoint, name -> (n_local, ...)."""
        local = {name: t.clone() for name, t in self.local.items()}  # the next step changes them in place
        return {**local, **{name: _rows(t.clone(), self._comm.n_local) for name, t in self._fixed.items()}}

    def restore(self, rows: Mapping[str, Tensor]) -> None:
        """Set the buffers to a checkpoint's; raise OperationError if it lacks a learner's statistics."""
        for name in self.local:
            if name not in rows:
                raise OperationError(f"checkpoint: holds no buffer '{name}'; use the model of the run")
            self.local[name] = rows[name].to(self.local[name], copy=True)
        self._set({name: rows[name][0] for name in self._fixed if name in rows})


def _rows(tensor: Tensor, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape)


def read_initial(recipe: Recipe) -> tuple[Recipe, Checkpoint | None]:
    """Return ``recipe`` with ``init.sha256``, the digest of its ``init.checkpoint``, and this checkpoint.

    Without an initial checkpoint the recipe stays as it is, and the checkpoint is None. Raises OperationError
    where the file cannot be read, or the recipe has the digest of another file.
    """
    path, expected = recipe.init.checkpoint, recipe.init.sha256
    if not path:
        return recipe, None
    start, digest = Checkpoint.load(path), hdf5.sha256(path)
    if expected and digest != expected:
        words = f"has SHA-256 {digest[:12]}…, init.sha256 is {expected[:12]}…"
        raise OperationError(f"init.checkpoint: {path} {words}")
    return dataclasses.replace(recipe, init=dataclasses.replace(recipe.init, sha256=digest)), start


def default_folder(recipe: Recipe) -> str:
    """Return the folder of a run for which the user names none."""
    return f"runs/{recipe.name.replace('/', '-')}-seed{recipe.seed}"


def chosen_recipe(
    recipe: Recipe | str | Path | None, settings: Mapping[str, Any], allow_code: bool
) -> Recipe | None:
    """Return the recipe that the user names, changed by ``settings``; None for None."""
    if isinstance(recipe, Recipe):
        return recipe.replace(**settings) if settings else refuse_without_effect(recipe)
    if recipe is None and settings:
        raise InputError("settings: not allowed without the recipe that they change; give its name or file")
    return None if recipe is None else Recipe.read(recipe, allow_code=allow_code, **settings)


def network(recipe: Recipe, data: Dataset | user_code.UserData, start: Checkpoint | None) -> nn.Module:
    """Return the recipe's model at w_a of ``start``, with statistics of w_a; a new model for None.

    Raises OperationError where the weights of ``start`` are not finite or do not fit the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(recipe.seed, "init").initial_seed())
        model = user_code.build_model("model", recipe.spec("model"))
    if start is None:
        return model
    problem = start.problem("train", model=model, data=data, dtype=getattr(torch, recipe.dtype))
    set_tensors(problem.model, problem.layout.views(problem.weights))
    return problem.model


STATE = "stack.batched"


class BatchingChoice:
    """The choice of ``stack.batched``, with its ``state`` in checkpoints, empty before the first step."""

    def __init__(self, stack: Stack, comm: Comm) -> None:
        self._stack, self._comm = stack, comm
        self.state: dict[str, Tensor] = {}

    def restore(self, shared: Mapping[str, Tensor]) -> None:
        """Restore the choice of a checkpoint, which has no choice if each process had one learner."""
        if STATE in shared:
            self._choose(bool(shared[STATE]))

    def _choose(self, batched: bool) -> None:
        self._stack.batched = batched
        self.state = {STATE: torch.tensor([batched], dtype=torch.uint8)}
        if batched:  # faster, also where torch.vmap has no rule for an operation
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)

    def decide(self, weights: Tensor, x: Any, y: Any, training: Training, model: dict[str, Any]) -> None:
        """Choose once, on the CPU by a trial with these arguments of :meth:`Stack.gradients`.

        Rank 0 decides for all. Chains, and processes with one learner each, need no choice.
        """
        stack, comm = self._stack, self._comm
        if self.state or stack.layers is not None or comm.learners == comm.size:
            return
        pays = 0.0
        if comm.rank == 0:
            tensors = [t for tree in (weights, x, y) for _, t in named_tensors(tree)]
            shapes = [[list(t.shape), str(t.dtype)] for t in tensors]
            machine = [f"{os.cpu_count()} cores", torch.get_num_threads(), str(torch.__version__)]
            key = json.dumps([model, shapes, stack.accumulate, stack.autocast, *machine])

            def trial() -> dict[str, np.ndarray[Any, Any]]:
                return {"batched": np.array([stack.batching_pays(weights, x, y, training)])}

            on_cpu = weights.device.type == "cpu"  # elsewhere a rule decides, not a clock
            pays = float((cached("trial", Path(), [], key, trial) if on_cpu else trial())["batched"][0])
        self._choose(bool(comm.total(pays)[0]))


def check_compatibility(recipe: Recipe, dataset: Dataset | UserData, stack: Stack, buffers: Buffers) -> None:
    """Raise InputError if the stack's model, training set and device are not compatible."""
    train = stack.problem
    samples, micro = recipe.decompose.samples, recipe.local_batch // recipe.accumulate
    if has_batchnorm(train.model) and 0 < samples < GROUPS * micro:
        raise InputError("decompose.samples", samples, allowed=f"≥ {GROUPS} × {micro} with BatchNorm")
    if recipe.autocast and train.device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise InputError("autocast: 'bfloat16' is not allowed, this GPU does not compute in it; use ''")
    x, y = train.gather(torch.zeros(1, dtype=torch.long))  # refuses data from which no samples can be drawn
    if isinstance(dataset, Dataset) and dataset.classes:
        shape = tuple(train.outputs(train.weights, x).shape[1:])
        if shape != (dataset.classes, *y.shape[1:]):
            words = f"'{recipe.part('data')[0]}' needs {(dataset.classes, *y.shape[1:])}"
            model = f"'{recipe.spec('model').name}'"
            raise InputError(f"model: {model} has outputs of shape {shape}, data {words}")
    if stack.layers is None:
        buffers.check(stack.training_model, micro)
    if recipe.sampling == "all" and recipe.batch != train.samples:
        words = f"it must be {train.samples} samples"
        raise InputError(f"sampling: 'all' is not allowed with batch {recipe.batch}, {words}")


# The prefix of the purposes of random draws for second gradients.
OTHER = "second "


def data_parts_of_learners(
    recipe: Recipe, dataset: Dataset | UserData, train: Problem, checkpoint: Checkpoint | None
) -> Parts | None:
    """Return the learners' parts of the training set, as in ``checkpoint``, if given; None: all share it."""
    split = recipe.split
    if split.kind == IID:
        return None
    if recipe.rule().measured:
        words = "is not allowed with measured delays, whose workers share the data"
        raise InputError(f"data.split: '{split.text}' {words}")
    if checkpoint:
        return Parts.restored(split, checkpoint.shared, recipe.learners, train.samples)
    seed = generator(recipe.seed, "split").initial_seed()
    parts = Parts.drawn(split, train, dataset.columns, recipe.learners, recipe.local_batch, seed)
    if recipe.sampling == "all" and {len(part) for part in parts.indices} != {recipe.local_batch}:
        words = f"with data.split '{split.text}', whose parts differ in size"
        raise InputError(f"sampling: 'all' is not allowed {words}")
    return parts


class Sampler:
    """Draws minibatches from the training set as :class:`.Recipe` says (``sampling``, ``seed``).

    Args:
        recipe: the run's.
        train: the training set, as a problem.
        augment: the data set's random changes of inputs (B, …), given a generator; None: no changes.
        parts: the learners' parts of the training set; None: all learners draw from the whole set.
    """

    def __init__(
        self, recipe: Recipe, train: Problem, augment: Callable[..., Tensor] | None, parts: Parts | None
    ) -> None:
        self._recipe, self._train, self.augment, self._parts = recipe, train, augment, parts

    def draw(self, step: int, learners: int, local: slice, purpose: str = "") -> tuple[Any, Any]:
        """Return x (n_local, B, …) and y (n_local, B, …) of ``step`` for the learners ``local``.

        The draws and the augmentation of a learner do not depend on the number of processes. ``purpose``
        names a further, independent draw at this step.
        """
        size, seed, samples = self._recipe.local_batch, self._recipe.seed, self._train.samples
        parts, random_numbers = self._parts, generator(seed, f"{purpose}batch", step)
        if self._recipe.sampling == "all":
            whole = torch.arange(samples).view(-1, size).expand(learners, size)
            indices = whole if parts is None else torch.stack(parts.indices)
        elif parts is None:
            indices = torch.randint(samples, (learners, size), generator=random_numbers)
        else:
            places = [torch.randint(len(part), (size,), generator=random_numbers) for part in parts.indices]
            indices = torch.stack([part[rows] for part, rows in zip(parts.indices, places, strict=True)])
        x, y = self._train.gather(indices[local])
        if self.augment is not None:
            numbers = range(local.start, local.stop)
            generators = [generator(seed, f"{purpose}augment", step, j) for j in numbers]
            x = torch.stack([self.augment(rows, source) for rows, source in zip(x, generators, strict=True)])
        return x, y

    def second_gradient(self, stack: Stack, step: int, learner: int, point: Tensor) -> Tensor:
        """Return a gradient (P,) of ``learner`` at ``point`` (P,), independent of its gradient in ``step``.

        ``stack`` computes the gradient on a further minibatch of equal size, with other draws of augmentation
        and dropout. As in a step, BatchNorm uses the minibatch's statistics; the learner's running statistics
        do not change.
        """
        recipe = self._recipe
        x, y = self.draw(step, recipe.learners, slice(learner, learner + 1), OTHER)

        def seed(_: int, micro: int) -> int:
            return generator(recipe.seed, f"{OTHER}dropout", step, learner, micro).initial_seed()

        out = torch.empty_like(point)[None]
        stack.gradients(point[None], x, y, out=out, training=Training({}, seed))
        return out[0]


def make_monitoring(
    recipe: Recipe, problem: Problem, comm: Comm, optimizer: Optimizer, sampler: Sampler, stack: Stack
) -> Monitoring:
    """Return the instruments that the recipe's table "monitor" asks for.

    Args:
        recipe: the run's recipe.
        problem: the training loss that the run's steps descend.
        comm: the run's processes.
        optimizer: makes the run's steps; instruments read the optimizer's state.
        sampler: draws a second, independent minibatch of a step, for unbiased products of two gradients.
        stack: computes the gradient on that second minibatch. (A Stack takes the weights and the minibatches
            of several learners, stacked in tensors.)

    Raises:
        InputError: for an instrument that cannot measure this run.
    """
    rule = recipe.rule()
    # The largest stable ηλ of the rule, with the momentum of the recipe's optimizer, and without momentum.
    # None: not known.
    limit, plain_limit = recipe.stability_limit(), rule.stability_limit()
    run = MeasuredRun(
        monitor=recipe.monitor,
        problem=problem,
        comm=comm,
        seed=recipe.seed,
        batch=recipe.batch,
        limit=math.nan if limit is None else limit,
        optimizer=optimizer,
        recipe=recipe,
        learners=recipe.learners,
        at_mean=rule.at_mean,
        synchronous=rule.synchronous,
        second_gradient=functools.partial(sampler.second_gradient, stack),
        geometry=optimizer.geometry,
        plain_limit=math.nan if plain_limit is None else plain_limit,
    )
    return Monitoring(run, reserved=rule.columns)  # instruments may not use names of the rule's columns
