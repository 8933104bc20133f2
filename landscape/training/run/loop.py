"""The one training loop, for every update rule; a server and workers at their own speed."""

from __future__ import annotations

import functools
import math
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.devices import double, inner
from landscape.core.errors import InputError
from landscape.core.registry import numerics
from landscape.data.base import Dataset
from landscape.gradients.learners import Ready, Stack, Training
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.problem import Problem
from landscape.training import optimizer
from landscape.training.algorithms.central import SSGD, AsyncSGD
from landscape.training.decomposition import ColumnsOfStep, Decomposer, GradientEstimator
from landscape.training.optimizer.base import SGD
from landscape.training.processes.comm import Comm, PiecewiseMean
from landscape.training.processes.process_group import Group
from landscape.training.recipes.recipe import MATRIX, Recipe
from landscape.training.run import History, Row, due, setup
from landscape.training.run.setup import Buffers, DivergenceTest, check_compatibility, make_monitoring

START = "start_norm2"  # the name in a checkpoint of ‖w_a‖² at the start, if that was another run's end


@dataclass
class Hooks:
    """The functions that the loop calls during a run.

    Attributes:
        save: takes a checkpoint when one is due; the checkpoint owns its tensors and does not change later.
        message: takes a line for the user.
        step: takes the number of steps done and the total, after each step.
        row: takes each row of the history, once the row is complete: after the next step, or at the end.
    """

    save: Callable[[Checkpoint], None] = lambda checkpoint: None
    message: Callable[[str], None] = lambda line: None
    step: Callable[[int, int], None] = lambda done, total: None
    row: Callable[[Row], None] = lambda row: None


@numerics(1)
class Trainer:
    """A run in memory: :meth:`run` takes it to its last step, from the start or from a checkpoint.

    The weights of this process's learners are one (n_local, P) tensor; without a ``group`` of processes
    n_local is n. Random draws depend on the seed and the step alone. A run resumed from any of its
    checkpoints therefore has the bits of an unbroken run; with another number of processes, only the
    rounding of sums differs.

    Args:
        recipe: the run's recipe.
        checkpoint: the state to resume from, with this process's learners; None: the start of the run.
        device: the device of weights and data.
        data_dir: the folder of data sets.
        hooks: the functions to call; by default there are none.
        group: the processes that share the learners; None: this process has all of them.
        dataset: the data set; by default that of the recipe.

    Raises:
        InputError: where the parts of the recipe do not fit together.
        OperationError: data that is missing, or differs from the data that the checkpoint was trained on.

    Example:
        >>> from landscape.training.recipes.recipe import read
        >>> end = Trainer(read("saddle-dpsgd", ["steps=3", "decompose.every=1"])).run()
        >>> end.step, end.history["step"].tolist()
        (3, [1.0, 2.0, 3.0])
    """

    def __init__(
        self, recipe: Recipe, *, checkpoint: Checkpoint | None = None, device: torch.device | str = "cpu",
        data_dir: Any = None, hooks: Hooks | None = None, group: Group | None = None,
        dataset: Dataset | None = None,
    ) -> None:  # fmt: skip
        self.comm = Comm(recipe.learners, group)
        initial = None  # the checkpoint with the initial weights of a new run; None: there is none
        if checkpoint is None:
            recipe, initial = setup.read_initial(recipe)
        self.recipe, self.hooks = recipe, hooks or Hooks()
        data = dataset or user_code.load_data("data", recipe.spec("data"), data_dir)
        # Sets, among others, ``train_problem``, ``stack`` (computes the learners' minibatch gradients),
        # ``data_parts`` (the learners' parts of the training set), and ``minibatches`` (draws them).
        self._make_problems(data, initial, checkpoint, torch.device(device))
        self.algorithm, _ = recipe.part("algorithm")  # the name of the update rule
        self.rule = recipe.rule()  # the object that makes the steps
        self.description = recipe.describe()
        self.rule.comm, self.rule.layout = self.comm, self.train_problem.layout
        self.weights = self.train_problem.weights.repeat(self.comm.n_local, 1)
        self.rule.start(self.weights)
        self._gradients = torch.empty_like(self.weights)
        self.optimizer = optimizer.make(*recipe.part("optimizer"))
        self.optimizer.start(self.train_problem.layout, self.weights)
        # ``objective`` is the loss that the steps descend. With BatchNorm this loss depends on the batches.
        objective = self.train_problem
        bn_batch = 0  # the number of samples that share BatchNorm's statistics; 0: no BatchNorm
        if has_batchnorm(self.train_problem.model):
            bn_batch = recipe.local_batch // recipe.accumulate
            objective = self.train_problem.with_batchnorm("train", bn_batch)
        estimator = GradientEstimator(objective, self.comm, recipe.decompose.samples, recipe.seed, bn_batch)
        self.decomposer = Decomposer(self.stack, estimator, self.data_parts)
        self.monitor = make_monitoring(
            recipe, objective, self.comm, self.optimizer, self.minibatches, self.stack
        )
        self.history = History(self.algorithm, {**self.rule.columns, **self.monitor.columns})
        start_norm2 = float(inner(self.train_problem.weights, self.train_problem.weights))
        self.divergence = DivergenceTest(recipe.diverge, start_norm2)
        self.step = 0  # the number of completed steps
        self.diverged, self.diverged_at = "", -1  # "" and -1: the run has not diverged
        self._pending: PendingStep | None = None
        # The last step's row. During the next step the processes may still exchange the row's loss. hooks.row
        # gets the row after the next step.
        self._waiting_row: Row | None = None
        if checkpoint:
            self._restore(checkpoint)

    def _make_problems(
        self, dataset: Any, initial: Checkpoint | None, checkpoint: Checkpoint | None, device: torch.device
    ) -> None:
        """Make the problems for training and test, and the objects that use them.

        Args:
            dataset: the data set.
            initial: the checkpoint with the initial weights; None: new weights.
            checkpoint: the state to resume from; None: the start of the run.
            device: the device of weights and data.
        """
        recipe = self.recipe
        data_spec, self.model_spec = recipe.spec("data"), recipe.spec("model")
        if checkpoint:
            checkpoint.check_data(dataset)
        model, dtype = setup.network(recipe, dataset, initial), getattr(torch, recipe.dtype)
        make_problem = functools.partial(Problem, model, dataset.loss, device=device, dtype=dtype)
        train, test = make_problem(dataset.split("train")), make_problem(dataset.split("test"))
        self.train_problem, self.test_problem = train, test
        # Computes the minibatch gradients of all learners of this process, (n_local, P).
        self.stack = Stack(train, recipe.accumulate, recipe.autocast)
        # Decides whether the stack computes the learners together or one after the other.
        self.batching = setup.BatchingChoice(self.stack, self.comm)
        self.buffers = Buffers(train, test, self.comm, recipe.seed, recipe.evaluate.bn_samples)
        if checkpoint:
            self.buffers.restore(checkpoint.buffers)
        check_compatibility(recipe, dataset, self.stack, self.buffers)
        self.data_parts = setup.data_parts_of_learners(recipe, dataset, train, checkpoint)
        augment = getattr(dataset, "augment", None)
        self.minibatches = setup.Sampler(recipe, train, augment, self.data_parts)
        self.data = {
            "name": data_spec.name,
            "options": data_spec.options,
            "train": train.samples,
            "test": test.samples,
            "fingerprint": dataset.fingerprint,
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.weights = checkpoint.weights.to(self.weights)
        self.optimizer.restore(checkpoint.optimizer)
        self.rule.restore(checkpoint.rule, checkpoint.shared)
        self.monitor.restore(checkpoint.shared)
        self.batching.restore(checkpoint.shared)
        if START in checkpoint.shared:
            self.divergence = DivergenceTest(self.recipe.diverge, float(checkpoint.shared[START]))
        self.step, self.diverged = checkpoint.step, checkpoint.diverged
        self.diverged_at = checkpoint.diverged_at
        self.history.restore(checkpoint.history, checkpoint.units)
        tested = due(self.recipe.evaluate.every, self.step)
        if self.history.rows and self.step < self.recipe.steps and not tested:
            # The run ended here and was evaluated; a longer run is not evaluated at this step.
            self.history.rows[-1] |= {"test_loss": math.nan, "test_accuracy": math.nan}

    def run(self) -> Checkpoint:
        """Train to the last step, or until the run diverges.

        Returns:
            The final state; the hook ``save`` has also taken this state.

        Raises:
            LostProcessError: where another process of the group is lost.
        """
        save_every = self.recipe.checkpoint.every
        if self.description:
            self.hooks.message(self.description)
        if self.step == 0:
            self.hooks.save(self.checkpoint())
        while self.step < self.recipe.steps and not self.diverged:
            self._step(self.step + 1)
            if self.step < self.recipe.steps and due(save_every, self.step) and not self.diverged:
                self.hooks.save(self.checkpoint())
        # There may be no row: a step after which weights are not finite is undone, and its row removed.
        if self.history.rows:
            row = self.history.rows[-1]
            if math.isnan(row["test_loss"]):
                # ``buffers`` evaluates, because the test loss needs BatchNorm's statistics at w_a.
                row |= self.buffers.test_columns(self.weights, self.step)
            if row is self._waiting_row:  # hooks.row has not had this row yet
                self.hooks.row(row)
        final = self.checkpoint()
        if self.step > 0 or self.diverged:  # otherwise this state was saved before the first step
            self.hooks.save(final)
        return final

    def _step(self, t: int) -> None:
        """Make step ``t``, counted from 1, from w(t−1) to w(t)."""
        began, waited_before = time.perf_counter(), self.comm.waited
        if self.comm.group:
            self.comm.group.step = t  # for messages
        recipe, weights, state = self.recipe, self.weights, self._state_besides_weights()
        lr = recipe.rate(t, self.train_problem.samples)
        is_decomposed = due(recipe.decompose.every, t)
        # Exchanges that start here run while gradients are computed. The decomposer waits for the mean w_a.
        self.rule.begin(weights, t)
        if is_decomposed:
            self.comm.start_mean(weights)
        points = self.rule.gradient_points(weights)
        x, y = self._minibatches(t)
        training = self.buffers.training(t)  # buffers and seeds of the training pass
        backward_exchange = self._backward_exchange(points, lr, t)
        # A function that is called with the names of parameters whose gradients are computed.
        on_computed = backward_exchange.mean.send_completed_pieces if backward_exchange else None
        losses = self._compute_gradients(points, x, y, training, on_computed)
        self._complete_previous_step(t, state)
        if self.diverged:  # in the previous step: step t is undone
            if backward_exchange:
                backward_exchange.mean.wait()
            return
        self.monitor.see(t, points, self._gradients)  # instruments that use the gradients of every step
        # A function: (new weights, learning rate) -> the history's columns of the decomposed step.
        finish_decomposition: ColumnsOfStep | None = None
        if is_decomposed:
            # The noise is split into the terms of Eq. 4 (DPSGD-2020) only if the step moves w_a by −lr times
            # the mean gradient.
            follows_mean = self.rule.follows_mean_direction(t)
            split_noise = recipe.decompose.split and self.optimizer.direction_is_gradient and follows_mean
            finish_decomposition = self.decomposer.begin(
                weights, x, y, self._gradients, t,
                split_noise=split_noise, at_mean=self.rule.at_mean, training=training,
            )  # fmt: skip
        new_weights = self._new_weights(points, lr, t, backward_exchange)
        # The spread of the learners' weights needs w_a. In a single process w_a costs no exchange. Several
        # processes measure the spread if w_a is computed anyway, or if the spread may exceed its bound.
        needs_mean = is_decomposed or t == recipe.steps or due(recipe.evaluate.every, t)
        measures_spread = self.comm.size == 1 or needs_mean or self.divergence.needs_spread(self.history.rows)
        if measures_spread or self.rule.at_mean:  # with at_mean, the next step needs this mean
            self.comm.start_mean(new_weights)
        row = self.history.new_row(t, lr)
        if finish_decomposition is not None:
            self.history.write_to_row(row, finish_decomposition(new_weights, lr))
        new_mean = self.comm.mean(new_weights) if measures_spread else None
        results = self._start_results(new_weights, new_mean, losses)
        self._pending = PendingStep(row, weights, state, new_mean, results)
        self.weights, self.step = new_weights, t
        self.history.append(row)
        # Results of the step are completed here if they are needed now, otherwise in the next step.
        if measures_spread or due(recipe.checkpoint.every, t) or self.monitor.due(t):
            self._complete_pending()
        if self.step == t:  # otherwise _complete_pending has undone the step
            seconds, waited = time.perf_counter() - began, self.comm.waited - waited_before
            self._complete_row(row, seconds, waited, weights)

    def _backward_exchange(self, points: Tensor, lr: float, t: int) -> BackwardExchange | None:
        """Return the exchange that runs during the backward pass of step ``t``, or None.

        With several processes, a synchronous rule averages the gradients if directions are not linear in the
        gradients. Otherwise SSGD with the optimizer SGD averages the new weights. Other rules have no such
        exchange.
        """
        comm, layout, gradients, sgd = self.comm, self.train_problem.layout, self._gradients, self.optimizer
        if comm.size > 1 and self.rule.synchronous and not sgd.linear:
            total = comm.buffer("gradients", gradients[0])
            return BackwardExchange(PiecewiseMean(comm, layout, total, lambda piece: gradients[:, piece]))
        if comm.size == 1 or type(self.rule) is not SSGD or type(sgd) is not SGD:
            return None
        # Three buffers in turn: undoing the previous step needs its start weights, too.
        new = comm.buffer(f"weights {t % 3}", gradients)
        state = {name: torch.empty_like(old) for name, old in sgd.state.items()}

        def new_weights(piece: slice) -> Tensor:
            directions = sgd.directions_of(piece, gradients, points, state)
            return torch.sub(points[:, piece], directions, alpha=lr, out=new[:, piece])

        exchange = PiecewiseMean(comm, layout, comm.buffer(f"mean {t % 2}", new[0]), new_weights)
        return BackwardExchange(exchange, new, state)

    def _new_weights(self, points: Tensor, lr: float, t: int, exchange: BackwardExchange | None) -> Tensor:
        """Return the weights after step ``t`` (n_local, P), from the gradients at ``points``."""
        if exchange and exchange.weights is not None:
            new, self.optimizer.state = exchange.weights, exchange.optimizer_state
            self.comm.set_mean(new, exchange.mean.wait)
        else:
            gradients = self._gradients
            if self.rule.synchronous and not self.optimizer.linear:  # u of the mean is not the mean of u
                mean = exchange.mean.wait() if exchange else self.comm.fresh_mean(gradients)
                gradients = mean.expand_as(gradients)
            directions = self.optimizer.directions(gradients, points, lr, t)
            new = self.rule.finish(self.weights, directions, lr, t)
        self.rule.update_optimizer_state(self.optimizer, t)
        return new

    def _start_results(self, new: Tensor, mean: Tensor | None, losses: Tensor) -> Callable[[], list[float]]:
        """Start the exchange of the learners' mean loss, and of the mean of ‖w_j − w_a‖² after the step.

        ``mean`` is w_a. Without w_a the mean of ‖w_j‖² is exchanged, as a test for finite weights.
        """
        differences = new
        if mean is not None:  # written over the gradients, which are not needed any more
            differences = torch.sub(new, mean, out=self._gradients)
        flat = differences.flatten()
        mean_square = float(inner(flat, flat)) / len(new)
        return self.comm.start_learners_mean(float(double(losses).mean()), mean_square)

    def _minibatches(self, t: int) -> tuple[Any, Any]:
        """Return the minibatches of step ``t``, x (n_local, B, ...) and y (n_local, B, ...)."""
        return self.minibatches.draw(t, self.recipe.learners, self.comm.local)

    def _compute_gradients(
        self, points: Tensor, x: Any, y: Any, training: Training, ready: Ready | None = None
    ) -> Tensor:
        """Write the learners' gradients at ``points`` to ``_gradients``, and return the losses."""
        self.batching.decide(points, x, y, training, self.recipe.model)
        return self.stack.gradients(points, x, y, out=self._gradients, training=training, ready=ready)

    def _complete_previous_step(self, t: int, state: State) -> None:
        """Complete the step before ``t``, and undo step ``t`` if the run diverged in the step before.

        Step ``t`` began with ``state``. Before it is undone, its exchanges are finished.
        """
        weights = self.weights
        if self._pending:
            self._complete_pending()
        if self.diverged:
            self.weights = self.weights.clone()
            after = state if self.step == t - 1 else self._state_besides_weights()
            self.rule.finish(weights, self._gradients, 0.0, t)
            self.optimizer.state, self.rule.state, self.rule.shared, self.buffers.local = after

    def _complete_pending(self) -> None:
        """Wait for the pending step's mean loss, and test the run for divergence."""
        pending, self._pending = self._pending, None
        assert pending is not None
        row, (loss, squares) = pending.row, pending.results()
        row["loss"], row["consensus"] = loss, math.nan if pending.mean is None else squares
        bounded = self.divergence.loss_is_bounded(loss) and math.isfinite(squares)
        if bounded and not self.divergence.spread_exceeds_bound(self.history.rows, pending.mean):
            return
        # The training loss of w_a tells whether the mean or the learners diverged. w_a is taken before the
        # step, where the learners' loss was evaluated; after the step if only the spread exceeds its bound.
        mean = self.comm.mean(self.weights)
        if not self.divergence.loss_is_bounded(loss) or not bool(torch.isfinite(mean).all()):
            mean = self.comm.mean(pending.weights)
        mean_is_bounded = self.divergence.loss_is_bounded(self.buffers.training_loss(mean))
        self.diverged_at, self.diverged = self.step, "learners" if mean_is_bounded else "mean"
        if not math.isfinite(squares + loss):
            # The step ended in weights that are not finite: the last finite state stays.
            self.weights, self.step = pending.weights, self.step - 1
            self.history.rows.pop()
            self.optimizer.state, self.rule.state, self.rule.shared, self.buffers.local = pending.state

    def _complete_row(self, row: Row, seconds: float, waited: float, before: Tensor) -> None:
        """Complete the ``row`` of the last step from ``before``, evaluate where due, and call the hooks."""
        t, rows = self.step, self.history.rows
        row["wall_s"] = (rows[-2]["wall_s"] if len(rows) > 1 else 0.0) + seconds
        row["samples_per_s"], row["wait_s"] = self.recipe.batch / seconds, waited
        vectors, row["comm_rounds"] = self.rule.communication_cost(t)
        row["comm_bytes"] = vectors * self.weights[0].nbytes
        row["comm_burst"] = max(row["comm_bytes"], rows[-2]["comm_burst"] if len(rows) > 1 else 0.0)
        self.history.write_to_row(row, self.rule.record(t))
        if due(self.recipe.evaluate.every, t):
            row |= self.buffers.test_columns(self.weights, t)
        if self.monitor.due(t):
            start = before if self.monitor.needs_before(t) else None
            self.history.write_to_row(row, self.monitor.measure(t, row["lr"], self.weights, start))
            if warning := self.monitor.warning(row, self.history.column):
                self.hooks.message(warning)
        if self._waiting_row is not None:
            self.hooks.row(self._waiting_row)
        self._waiting_row = row
        self.hooks.step(t, self.recipe.steps)

    def _state_besides_weights(self) -> State:
        """Return the state that a step changes in addition to the weights."""
        buffers = {name: rows.clone() for name, rows in self.buffers.local.items()}
        return self.optimizer.state, self.rule.state, self.rule.shared, buffers

    def checkpoint(self) -> Checkpoint:
        """Return the present state of the run, in copies, because later steps overwrite the run's memory."""
        recipe = self.recipe
        # The step whose learning rate is saved: the next one, but not above the last one, nor below 1.
        lr_step = min(self.step + 1, max(1, recipe.steps))
        shared = self.rule.shared | self.batching.state | self.monitor.state(self.step)
        # A resumed run needs ‖w_a‖² of the initial weights, whose file may be missing by then.
        if recipe.init.checkpoint:
            shared = shared | {START: torch.tensor(self.divergence.start_norm2, dtype=torch.float64)}
        if self.data_parts:
            shared = shared | self.data_parts.state
        for matrix in recipe.matrices.values():  # a recipe has at most one
            shared = shared | {MATRIX: torch.from_numpy(matrix)}
        return Checkpoint(
            weights=self.weights.clone(),
            layout=self.train_problem.layout,
            step=self.step,
            epoch=self.step * recipe.batch / self.train_problem.samples,
            algorithm=self.algorithm,
            recipe=recipe.to_toml(),
            model={"name": self.model_spec.name, "options": self.model_spec.options},
            data=self.data,
            lr=recipe.rate(lr_step, self.train_problem.samples),
            local_batch=recipe.local_batch,
            seed=recipe.seed,
            history=self.history.columns(),
            units=dict(self.history.units),
            buffers=self.buffers.rows(),
            mean_buffers=_copied(self.buffers.statistics(self.weights, self.step)),
            optimizer=_copied(self.optimizer.state),
            rule=_copied(self.rule.state),
            shared=_copied(shared),
            diverged_at=self.diverged_at,
            diverged=self.diverged,
            description=self.description,
        )


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class BackwardExchange:
    """An exchange during a backward pass.

    Attributes:
        mean: the exchange of the mean over all learners of their gradients, or of their new weights.
        weights: this process's new weights (n_local, P) if new weights are exchanged; else None.
        optimizer_state: the optimizer's new state, where ``weights`` is not None.
    """

    mean: PiecewiseMean
    weights: Tensor | None = None
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)


#: The state that a step changes in addition to the weights: of the optimizer, the rule (two) and the buffers.
State = tuple[dict[str, Tensor], ...]


@dataclass(frozen=True)
class PendingStep:
    """A step that is complete except for the all-reduce of its loss, with the state before, to undo the step.

    Attributes:
        row: the step's row of the history.
        weights, state: before the step; weights (n_local, P).
        mean: w_a (P,) after the step; None: unknown.
        results: waits for the all-reduce, and returns two means over all learners: of the loss, and of
            ‖w_j − w_a‖², or of ‖w_j‖² if w_a is unknown.
    """

    row: Row
    weights: Tensor
    state: State
    mean: Tensor | None
    results: Callable[[], list[float]]


class _Part(Trainer):
    """The common part of server and worker: a loop without a group, and the group for their messages.

    Worker processes deliver gradients at their own speed. Rank 0 is the server: the training loop with the
    rule async-sgd, schedule "measured"; each gradient comes from the worker that delivers next. Rank k + 1
    is worker k: the worker receives the server's weights, computes a gradient at these weights on its
    minibatch, and sends the gradient. The history's column "delay" is the number of updates that the server
    makes meanwhile. Momentum, shifted momentum and staleness-aware rates are those of the rule, as under
    simulated schedules.

    The order of the workers depends on the machine, so that a run cannot be repeated to the bit, except with
    one worker. A resumed run continues from its last checkpoint: workers start from their weights in this
    checkpoint. While the server evaluates, decomposes or saves, the workers wait. α_e and Δ are recorded, the
    terms of Eq. 4 are not.
    """

    def __init__(self, recipe: Recipe, *, group: Group | None = None, **options: Any) -> None:
        super().__init__(recipe, **options)
        assert group is not None
        assert isinstance(self.rule, AsyncSGD)
        self.group, self.async_rule, self.workers = group, self.rule, self.rule.delay + 1
        if self.train_problem.device.type != "cpu":
            raise InputError("device: algorithm.schedule 'measured' is for the CPU", give={"device": "cpu"})
        if self.buffers.local:
            words = "has BatchNorm, whose statistics algorithm.schedule 'measured' does not collect"
            raise InputError(f"model: '{self.model_spec.name}' {words}")

    def _message(self) -> Tensor:
        """Return memory (P + 1,) for a gradient and the minibatch's loss."""
        return torch.empty(self.train_problem.layout.size + 1, dtype=self.weights.dtype)


class Server(_Part):
    """Rank 0: the loop, with gradients from the workers."""

    def __init__(self, recipe: Recipe, **options: Any) -> None:
        super().__init__(recipe, **options)
        self.async_rule.deliver = self._deliver
        # A thread for each worker sends the worker's weights and waits for the gradient, so that a lost
        # worker is noticed at once.
        self._threads = ThreadPoolExecutor(self.workers)
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._under_way: dict[int, Future[Tensor]] = {}
        self._delivered = self._message()

    def run(self) -> Checkpoint:
        end = super().run()
        for k in range(self.workers):
            if k in self._under_way:  # the worker's last gradient is not used
                self._under_way.pop(k).result()
            with self.group.naming():
                self._send(k, self.weights[0], -1 - self.step)
        self._threads.shutdown()
        return end

    def _deliver(self) -> int:
        """Send all waiting workers their weights, and store the first gradient that arrives; its worker."""
        for k in set(range(self.workers)) - self._under_way.keys():
            future = self._threads.submit(self._exchange, k)
            self._under_way[k] = future
            future.add_done_callback(lambda _, k=k: self._arrived.put(k))  # type: ignore[misc]
        self.group.step, clock = self.step + 1, time.perf_counter()
        worker = self._arrived.get()
        with self.group.naming():
            self._delivered = self._under_way.pop(worker).result()
        self.comm.waited += time.perf_counter() - clock
        return worker

    def _exchange(self, k: int) -> Tensor:
        """Return worker ``k``'s gradient and loss (P + 1,), at weights that stay until the delivery."""
        shared = self.async_rule.shared
        self._send(k, shared["copies"][k], int(shared["fetched"][k]))
        message = self._message()
        dist.recv(message, src=k + 1)
        return message

    def _send(self, k: int, weights: Tensor, version: int) -> None:
        dist.send(torch.tensor([version]), dst=k + 1)
        dist.send(weights, dst=k + 1)

    def _minibatches(self, t: int) -> tuple[Any, Any]:
        """Return an empty minibatch: only the worker has the samples."""
        return self.train_problem.gather(torch.zeros(1, 0, dtype=torch.long))

    def _compute_gradients(
        self, points: Tensor, x: Any, y: Any, training: Training, ready: Ready | None = None
    ) -> Tensor:
        self._gradients.copy_(self._delivered[:-1])
        return self._delivered[-1:]


class Worker(_Part):
    """Rank k + 1: gradients at the weights that the server sends."""

    def run(self) -> Checkpoint:
        """Deliver until the server's last step; the end has the server's last weights, and no history."""
        k, message, version = self.group.rank - 1, self._message(), torch.zeros(1, dtype=torch.int64)
        while True:
            with self.group.naming():
                dist.recv(version, src=0)
                dist.recv(self.weights[0], src=0)
            self.step = int(version)
            if self.step < 0:
                self.step = -1 - self.step
                return self.checkpoint()
            t = self.group.step = self.step + 1
            x, y = self.minibatches.draw(t, self.workers, slice(k, k + 1))
            losses = self._compute_gradients(self.weights, x, y, self.buffers.training(t))
            torch.cat((self._gradients[0], losses), out=message)
            with self.group.naming():
                dist.send(message, dst=0)
