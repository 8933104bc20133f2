"""The one training loop, for every update rule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import HISTORY_UNITS, IMPORTED, Checkpoint
from landscape.core.errors import FailedError
from landscape.evaluation.stack import Stack, Training
from landscape.problem.batchnorm import has_batchnorm, with_policy
from landscape.problem.problem import Problem
from landscape.train import initial, optimizer
from landscape.train.buffers import Buffers
from landscape.train.compatibility import check_fit
from landscape.train.decomposition import StepDecomposition
from landscape.train.distributed.comm import Comm
from landscape.train.distributed.process_group import Group
from landscape.train.randomness import generator
from landscape.train.recipe import Recipe, from_values, parse
from landscape.train.sharpness import Sharpness
from landscape.train.trial import Trial

MATRIX = "matrix"  # what a checkpoint calls the mixing matrix that a file held when the run began
START = "start_norm2"  # what a checkpoint calls ‖w_a‖² at the start of a run from another one's weights
# Steps in a row that the spread must exceed its bound by: a burst, such as one huge gradient, is over sooner,
# and under SSGD the learners are together again after one step (ours).
PERSISTENT = 10


@dataclass
class Hooks:
    """What the loop tells the outside: checkpoints when due, messages, and (steps done, steps in all)."""

    save: Callable[[Checkpoint], None] = lambda checkpoint: None
    message: Callable[[str], None] = lambda line: None
    step: Callable[[int, int], None] = lambda done, total: None


class Diverged(FailedError):
    """A run that diverged: its files are whole, and end with the last finite state."""

    exit_code = 3


def verdict(end: Checkpoint) -> str:
    """One line about a run that diverged."""
    what = {
        "mean": "the mean's loss left all bounds",
        "learners": "the learners drifted apart without bound while the mean's loss stays within its own",
    }
    return f"diverged at step {end.diverged_at}: {what[end.diverged]}; the last finite state is kept"


@dataclass
class _Open:
    """A step whose mean loss over all learners is on its way to every process, and what it began with."""

    row: dict[str, float]
    weights: Tensor
    state: tuple[dict[str, Tensor], ...]
    mean: Tensor | None
    news: Callable[[], list[float]]


class Trainer:
    """A run in memory: :meth:`run` takes it to its last step, from the start or from a checkpoint.

    All learners of this process live in one (n_own, P) buffer: all n without a ``group`` of processes. Every
    draw depends on the seed and the step alone, so that a run resumed from any of its checkpoints gives the
    bits of one that never stopped; with another number of processes, only the rounding of sums differs.
    ``checkpoint`` holds this process's learners.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        checkpoint: Checkpoint | None = None,
        device: torch.device | str = "cpu",
        data_dir: Any = None,
        hooks: Hooks | None = None,
        group: Group | None = None,
    ) -> None:
        self.comm = Comm(recipe.learners, group)
        recipe, start = (recipe, None) if checkpoint else initial.read(recipe)
        self.recipe, self.hooks = recipe, hooks or Hooks()
        source, self.model = recipe.spec("data"), recipe.spec("model")
        dataset = user_code.load_data("data", source, data_dir)
        if checkpoint:
            checkpoint.check_data(dataset)
        dtype = getattr(torch, recipe.dtype)
        model = initial.network(recipe, dataset, start)
        self.train, self.test = (
            Problem(model, dataset.loss, dataset.split(split), device=device, dtype=dtype)
            for split in ("train", "test")
        )
        self.stack = Stack(self.train, recipe.accumulate, recipe.precision)
        self.trial = Trial(self.stack, self.comm)
        self.buffers = Buffers(self.train, self.test, self.comm, recipe.seed, recipe.evaluate.bn_samples)
        if checkpoint:
            self.buffers.restore(checkpoint.buffers)
        check_fit(recipe, self.model, dataset, (self.train, self.test), self.stack, self.buffers)
        self.augment = getattr(dataset, "augment", None)
        self.data = {
            "name": source.name,
            "options": source.options,
            "train": self.train.samples,
            "test": self.test.samples,
            "fingerprint": dataset.fingerprint,
        }
        # With BatchNorm, what the steps are compared with depends on the batches, too.
        self._batch, self._objective = 0, self.train
        if has_batchnorm(model):
            self._batch = recipe.local_batch // recipe.accumulate
            self._objective = with_policy(self.train, "train", self._batch)
        self.algorithm, self.rule = recipe.part("algorithm")[0], recipe.rule()
        self.rule.comm = self.comm
        self.weights = self.train.theta.repeat(self.comm.held, 1)
        self._start_norm2 = float(self.train.theta @ self.train.theta)
        self.rule.start(self.weights)
        self._gradients = torch.empty_like(self.weights)
        self.optimizer = optimizer.make(*recipe.part("optimizer"))
        self.optimizer.start(self.train.layout, self.weights)
        self.monitor = Sharpness(recipe.monitor, self._objective, self.comm, recipe.seed, recipe.limit())
        self.step, self.rows, self.diverged, self.diverged_at = 0, list[dict[str, float]](), "", -1
        self._open: _Open | None = None
        self._settled: tuple[int, dict[str, Tensor]] = -1, {}
        if checkpoint:
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.weights = checkpoint.weights.to(self.weights)
        self.optimizer.restore(checkpoint.optimizer)
        self.rule.restore(checkpoint.rule, checkpoint.shared)
        self.monitor.restore(checkpoint.shared)
        self.trial.restore(checkpoint.shared)
        if START in checkpoint.shared:
            self._start_norm2 = float(checkpoint.shared[START])
        self.step, self.diverged, self.diverged_at = (
            checkpoint.step,
            checkpoint.diverged,
            checkpoint.diverged_at,
        )
        columns = list(checkpoint.history)
        table = zip(*(checkpoint.history[c].tolist() for c in columns), strict=True)
        self.rows = [dict(zip(columns, row, strict=True)) for row in table]
        every = self.recipe.evaluate.every
        if self.rows and self.step < self.recipe.steps and not (every and self.step % every == 0):
            # The last row of a run that ended here; one that goes on does not test at this step.
            self.rows[-1] |= {"test_loss": math.nan, "test_accuracy": math.nan}

    def run(self) -> Checkpoint:
        """Train to the last step, or until the run diverges, and return the final state."""
        every = self.recipe.checkpoint.every
        if about := self.recipe.about():
            self.hooks.message(about)
        if self.step == 0:
            self.hooks.save(self.checkpoint())
        while self.step < self.recipe.steps and not self.diverged:
            self._step(self.step + 1)
            if self.step < self.recipe.steps and every and self.step % every == 0 and not self.diverged:
                self.hooks.save(self.checkpoint())
        if self.rows and math.isnan(self.rows[-1]["test_loss"]):
            self._evaluate(self.rows[-1])
        final = self.checkpoint()
        if self.step > 0 or self.diverged:
            self.hooks.save(final)
        return final

    def _step(self, t: int) -> None:
        """Step ``t``, counted from 1: w(t−1) -> w(t)."""
        clock, waited = time.perf_counter(), self.comm.waited
        recipe, weights, comm, before = self.recipe, self.weights, self.comm, self._state()
        if comm.group:
            comm.group.step = t
        lr = recipe.rate(t, self.train.samples)
        self.rule.begin(weights, t)
        due = bool(recipe.decompose.every) and t % recipe.decompose.every == 0
        if due:
            comm.start_mean(weights)
        points = self.rule.points(weights)
        x, y = self._minibatches(t)
        gradients, training = self._gradients, self.buffers.training(t)
        losses = self._compute(points, x, y, training)
        if self._open is not None:
            self._close()
            if self.diverged:  # this step is none any more; only what it has sent must arrive
                self.weights, after = self.weights.clone(), before if self.step == t - 1 else self._state()
                self.rule.finish(weights, gradients, 0.0, t)
                self._go_back(after)
                return
        row = dict.fromkeys(HISTORY_UNITS, math.nan)
        row |= {"step": t, "lr": lr}
        part = None
        if due:
            part = StepDecomposition(
                self.stack, weights, x, y, gradients, recipe.decompose.samples, recipe.seed, t,
                split=recipe.decompose.split and self.optimizer.plain and self.rule.plain(t), comm=comm,
                at_mean=self.rule.at_mean, training=training, problem=self._objective, batch=self._batch,
            )  # fmt: skip
        if self.rule.synchronous and not self.optimizer.linear:
            gradients = comm.fresh_mean(gradients).expand_as(gradients)
        directions = self.optimizer.directions(gradients, points, t)
        new = self.rule.finish(weights, directions, lr, t)
        self.optimizer.state = self.rule.carry(self.optimizer.state, t)
        tested = bool(recipe.evaluate.every) and t % recipe.evaluate.every == 0
        measure = comm.size == 1 or due or tested or t == recipe.steps or self._suspicious()
        if measure or self.rule.at_mean:  # the next step's gradients are taken there
            comm.start_mean(new)
        if part is not None:
            row |= part.columns(new, lr)
        # The spread, where w_a is known anyway or cheap to know; else only whether all weights are finite.
        mean = comm.mean(new) if measure else None
        # The gradients are used up: their memory serves the differences.
        spread = (new if mean is None else torch.sub(new, mean, out=self._gradients)).flatten()
        news = comm.start_learners_mean(float(losses.double().mean()), float(spread @ spread) / len(new))
        self._open = _Open(row, weights, before, mean, news)
        self.weights, self.step = new, t
        self.rows.append(row)
        # Over several processes nobody waits for the others' losses, but for those of the step before.
        saved = recipe.checkpoint.every and t % recipe.checkpoint.every == 0
        monitored = bool(self.monitor.every) and t % self.monitor.every == 0
        if measure or saved or monitored:
            self._close()
        if self.step != t:
            return
        seconds = time.perf_counter() - clock
        row["wall_s"] = (self.rows[-2]["wall_s"] if len(self.rows) > 1 else 0.0) + seconds
        row["samples_per_s"], row["wait_s"] = recipe.batch / seconds, comm.waited - waited
        vectors, row["comm_rounds"] = self.rule.traffic(t)
        row["comm_bytes"] = vectors * weights[0].nbytes
        row |= self.rule.columns(t)
        if tested:
            self._evaluate(row)
        if monitored:
            row |= self.monitor.columns(new, lr)
            if warning := self.monitor.warning(row, self.rows[:-1]):
                self.hooks.message(warning)
        self.hooks.step(t, recipe.steps)

    def _compute(self, points: Tensor, x: Any, y: Any, training: Training) -> Tensor:
        """Write the learners' gradients at ``points`` to ``_gradients``; gives their losses (n_own,)."""
        self.trial.decide(points, x, y, training, self.recipe.model)
        return self.stack.gradients(points, x, y, out=self._gradients, training=training)

    def _state(self) -> tuple[dict[str, Tensor], ...]:
        """What a step changes beside the weights."""
        buffers = {name: rows.clone() for name, rows in self.buffers.own.items()}
        return self.optimizer.state, self.rule.state, self.rule.shared, buffers

    def _go_back(self, state: tuple[dict[str, Tensor], ...]) -> None:
        self.optimizer.state, self.rule.state, self.rule.shared, self.buffers.own = state

    def _close(self) -> None:
        """Take the last step's mean loss and judge by it."""
        last, self._open = self._open, None
        assert last is not None
        last.row["loss"], squares = last.news()
        last.row["consensus"] = math.nan if last.mean is None else squares
        self._judge(last, math.isfinite(squares))
        if self.diverged and not math.isfinite(squares + last.row["loss"]):
            # That step has no finite state to end in: the last one that has stays.
            self.weights, self.step = last.weights, self.step - 1
            self.rows.pop()
            self._go_back(last.state)

    def part(self) -> str:
        """For logs: what this process holds."""
        return f"learners {self.comm.own.start} to {self.comm.own.stop - 1}"

    def pace(self) -> str:
        """For logs: the speed of the last steps and how much of it was waiting; "" before the first."""
        last = self.rows[-100:]
        if not last:
            return ""
        seconds = sum(self.recipe.batch / row["samples_per_s"] for row in last)
        waited = sum(row["wait_s"] for row in last)
        speed = len(last) * self.recipe.batch / seconds
        return f"; {speed:.0f} samples/s, {100 * waited / seconds:.0f}% of the time waiting"

    def _minibatches(self, t: int) -> tuple[Any, Any]:
        """(x (n_own, B, ...), y (n_own, B, ...)) of step ``t``, as ``Recipe.sampling`` says."""
        return self._draw(t, self.recipe.learners, self.comm.own)

    def _draw(self, t: int, learners: int, own: slice) -> tuple[Any, Any]:
        """Minibatches ``t`` of those of ``learners`` that are ``own``.

        What a learner draws, and how its inputs are augmented, does not depend on the number of processes.
        """
        size, seed = self.recipe.local_batch, self.recipe.seed
        if self.recipe.sampling == "all":
            drawn = torch.arange(self.train.samples).view(-1, size).expand(learners, size)
        else:
            drawn = torch.randint(self.train.samples, (learners, size), generator=generator(seed, "batch", t))
        x, y = self.train.gather(drawn[own])
        if self.augment is not None:
            draws = [generator(seed, "augment", t, j) for j in range(own.start, own.stop)]
            x = torch.stack([self.augment(rows, draw) for rows, draw in zip(x, draws, strict=True)])
        return x, y

    def _statistics(self) -> dict[str, Tensor]:
        """BatchNorm's statistics at w_a now, which both problems are given."""
        if self.buffers.own and self._settled[0] != self.step:
            self._settled = self.step, self.buffers.at_mean(self.comm.mean(self.weights))
        return self._settled[1]

    def _evaluate(self, row: dict[str, float]) -> None:
        self._statistics()
        mean, comm = self.comm.mean(self.weights), self.comm
        if self.test.indexed or comm.size == 1:
            found = comm.evaluate(self.test, mean)
        else:  # batches cannot be shared: all go through them, so that none waits, and one is believed
            found = self.test.evaluate(mean)
            loss, accuracy = comm.total(*(found if comm.rank == 0 else (0.0, 0.0)))
            found = loss, accuracy
        row["test_loss"], row["test_accuracy"] = found

    def _suspicious(self) -> bool:
        """Whether the spread last measured may be beyond its bound, so that the next is worth measuring."""
        bound = self.recipe.diverge.consensus * self._start_norm2
        return bool(self.rows) and self.rows[-1]["consensus"] > bound

    def _judge(self, last: _Open, finite: bool) -> None:
        """Set ``diverged`` if the last step's losses or spread say so, telling the mean from the learners.

        ``last.mean`` is that of the weights after the step, if it is known.
        """
        bounds, apart, row, new_mean = self.recipe.diverge, False, last.row, last.mean
        recent = [r["consensus"] for r in self.rows[-PERSISTENT:]]
        if new_mean is not None and len(recent) == PERSISTENT:
            bound = bounds.consensus * max(float(new_mean @ new_mean), self._start_norm2)
            apart = all(spread > bound for spread in recent)
        if row["loss"] <= bounds.loss and finite and not apart:
            return  # the first is false for NaN, too
        new_mean = self.comm.mean(self.weights)
        # Judge the mean where the trouble was seen: before the step, or after it if only the spread is bad.
        before = not row["loss"] <= bounds.loss or not bool(torch.isfinite(new_mean).all())
        judged, self._settled = self.comm.mean(last.weights) if before else new_mean, (-1, {})
        self.buffers.at_mean(judged)
        loss, _ = self.comm.evaluate(self.train, judged)
        self.diverged = "learners" if loss <= bounds.loss else "mean"
        self.diverged_at = self.step

    def checkpoint(self) -> Checkpoint:
        """The run's state now, in tensors of its own: later steps use the run's memory again."""
        columns = {c: np.array([row[c] for row in self.rows], dtype=np.float64) for c in HISTORY_UNITS}
        recipe, shared = self.recipe, self.rule.shared | self.monitor.state | self.trial.state
        if recipe.init.checkpoint:  # the file may be gone when this one is resumed
            shared = shared | {START: torch.tensor(self._start_norm2, dtype=torch.float64)}
        for matrix in recipe.matrices.values():
            shared = shared | {MATRIX: torch.from_numpy(matrix)}
        return Checkpoint(
            weights=self.weights.clone(),
            layout=self.train.layout,
            step=self.step,
            epoch=self.step * recipe.batch / self.train.samples,
            algorithm=self.algorithm,
            recipe=recipe.to_toml(),
            model={"name": self.model.name, "options": self.model.options},
            data=self.data,
            lr=recipe.rate(min(self.step + 1, max(1, recipe.steps)), self.train.samples),
            local_batch=recipe.local_batch,
            seed=recipe.seed,
            history=columns,
            buffers=self.buffers.rows(),
            mean_buffers=_copied(self._statistics()),
            optimizer=_copied(self.optimizer.state),
            rule=_copied(self.rule.state),
            shared=_copied(shared),
            diverged_at=self.diverged_at,
            diverged=self.diverged,
        )


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """The recipe that a checkpoint's run followed, with the mixing matrix that it began with.

    Raises FailedError for one that ``landscape train`` did not make.
    """
    if not checkpoint.has_recipe:
        how = "imported" if checkpoint.algorithm == IMPORTED else "recorded in a loop of the user's own"
        raise FailedError(
            f"{checkpoint.path or 'checkpoint'}: it was {how}, there is no recipe to go on with"
        )
    matrix = checkpoint.shared.get(MATRIX)
    values = parse(checkpoint.recipe, str(checkpoint.path or "checkpoint"))
    return from_values(values, None if matrix is None else matrix.cpu().numpy())
