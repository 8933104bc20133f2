"""Record a user's training loop: steps as effective rate and noise, in files like those of a run."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from landscape.checkpoint import storage
from landscape.checkpoint.checkpoint import RECORDED, Checkpoint, check_fit
from landscape.checkpoint.user_code import UserData
from landscape.core import files
from landscape.core.errors import InputError, LandscapeError, OperationError, warn_caller
from landscape.core.files import Lock
from landscape.core.options import Natural, Seed, checked, toml_text
from landscape.core.progress import DELAY
from landscape.problem.batches import as_tensors
from landscape.problem.layout import Layout, unwrapped
from landscape.problem.metrics import Metrics, names_of
from landscape.problem.problem import Loss
from landscape.problem.ranks import is_sharded
from landscape.training import own_loop as loop
from landscape.training.own_loop.observer import Observer, ShardedObserver
from landscape.training.recipes import GroupedSamples
from landscape.training.run import History, due, open_writer, writer_names

# Columns of a run's history that a user may fill by Recorder.log; other names of such columns are refused.
USER_COLUMNS = ("loss", "consensus", "samples_per_s", "wait_s", "test_loss", "test_accuracy")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
NEVER = 2**63  # a step that no loop reaches
# A warning is shown where measurements take more than this share of a loop's time, and more than these
# seconds (our choice).
LARGE_SHARE, LONG = 0.5, 10.0


class Recorder:
    """Records any training loop: decomposed steps, losses and weights.

    Every ``every``-th step is decomposed, for any optimizer (DPSGD-2020, Eq. 3): d is the change of the
    weights w, g = ∇L(w) the gradient before the step, α_e = −⟨d, g⟩/‖g‖² and Δ = ‖d + α_e g‖², so that
    α_e²‖g‖² + Δ = ‖d‖². This costs a gradient over the data; other steps only advance a counter. The files
    step-NNNNNNN.h5 and last.h5 in ``folder`` are checkpoints with one learner, which name the model's class
    and run no code. Every command takes them, with ``--model MODULE:NAME --data MODULE:NAME``.

    The recorder does not change the loop's random numbers, gradients or training mode. Under
    DistributedDataParallel rank 0 records, and the other ranks wait for it at their next exchange. If a model
    is divided among ranks (:class:`landscape.ShardedProblem`), all ranks measure, make the same calls, and
    close the recorder; rank 0 gathers the weights in CPU memory and writes them.

    Args:
        folder: where the files go; a missing folder is made.
        model: the trained module, also inside DistributedDataParallel, DataParallel or torch.compile. θ are
            its P trainable parameters; files also have its frozen parameters and buffers.
        loss, terms, randomness: as for :class:`landscape.Problem`: ``loss(outputs, targets)``, a mean, or
            None; ``terms(targets)``, if samples count unequally; how to treat random numbers in eval mode.
        data: the training set, as for :class:`landscape.Problem`. g is the gradient of its mean loss in eval
            mode (but see ``batch``), so that dropout and augmentation count as noise.
        every: decompose a step every this many steps (50 is our choice); 0: never. On MNIST in minibatches of
            128, exact g takes the time of 360 steps of a small network; with ``samples=1024``, that of 15.
        test: test data in the form of ``data``. Their loss, and accuracy if they have classes, are computed
            at the start, after each decomposed step, and at the end.
        optimizer: the optimizer that makes the steps, for the columns lr and lr·λ_max and for ``landscape
            stability``; lr is NaN if its parameter groups have different rates.
        samples: estimate g, with standard errors, from this many samples, drawn anew each time (a multiple of
            16); 0: g is exact, from all samples.
        sharpness: measure λ_max every this many steps; 0: never. It is that of 2,000 fixed training samples,
            or of all if the data come in batches or the model is divided among ranks.
        monitor: further measurements, as a recipe's table "monitor": {"instruments": ["noise-scale"]}.
        save_every: write step-NNNNNNN.h5 every this many steps (500 as in the trainer); 0: only at the end.
        batch: samples in a minibatch of one process, for most instruments and for BatchNorm: g then has the
            statistics of such batches, cut once at random. Data in batches keep their own batches.
        resume: resume the run in ``folder``, or begin one in an empty folder. True: from the run's last file.
            A number: from this step, of the loop's own checkpoint; later records are deleted. The loop itself
            loads its weights.
        scalars: "tensorboard", "wandb" or "trackio", or a list of such names: further places for the numbers.
        seed: the seed of the samples.
        metrics: as for :class:`landscape.Problem`, of ``test``: columns test_NAME beside test_loss.

    Attributes:
        steps: how many steps have been made.

    Raises:
        InputError: an argument that is not allowed, or a model, loss or data that :class:`landscape.Problem`
            refuses; in :meth:`step`, parameters that are no longer those of the start.
        OperationError: a folder that has a run, that another process writes or that cannot be written; a
            package for ``scalars`` that is not installed.

    Example:
        >>> import tempfile, torch, landscape
        >>> model, folder = torch.nn.Linear(3, 2), tempfile.mkdtemp()
        >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
        >>> loss, optimizer = torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with landscape.Recorder(folder, model, loss, (x, y), every=2) as recorder:
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         loss(model(x), y).backward()
        ...         with recorder.step():
        ...             optimizer.step()
        >>> landscape.load(f"{folder}/last.h5").history["alpha_e"][1:].round(4).tolist()  # row 0: the start
        [0.1, 0.1]
    """

    @checked(unchecked=("loss",))
    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        loss: Loss | None,
        data: Any,
        *,
        every: Natural = 50,
        test: Any = None,
        optimizer: Any = None,
        samples: GroupedSamples = 0,
        sharpness: Natural = 0,
        monitor: Mapping[str, Any] | None = None,
        save_every: Natural = 500,
        batch: Natural = 0,
        resume: bool | Natural = False,
        scalars: str | Sequence[str] | None = None,
        seed: Seed = 0,
        terms: Callable[[Any], Tensor] | None = None,
        randomness: str | int = "refuse",
        metrics: Metrics | None = None,
    ) -> None:
        self.folder, self.steps = Path(folder), 0
        self._every, self._save_every = every, save_every
        self._samples, self._batch, self._seed = samples, batch, seed
        self._optimizer, self._resume, self._scalars = optimizer, resume, scalars
        self._check_options(model)
        self._phase = IDLE
        self._next_due = 1  # the next step at which something is measured or written
        self._broken = False  # whether a step failed midway, so that the weights must not be written
        self._process_id = os.getpid()  # a forked process must not write
        self._rank, self._world_size = loop.rank_and_size()
        module = unwrapped(model)
        self._sharded = is_sharded(module)
        # Under DistributedDataParallel only rank 0 records; with shards all ranks do.
        self._records_nothing = self._rank > 0 and not self._sharded
        self._closed = self._records_nothing
        if self._records_nothing:
            return
        self._resumes = resume is not False  # also if resume is 0, the number of a step
        # With shards, rank 0 checks the folder in _open_folder, so that all ranks raise its error.
        if not self._sharded:
            storage.check_folder(self.folder, resume=self._resumes)
        elif self._resumes:
            raise InputError("resume: not allowed in a recorder of a sharded model; give another folder")
        observer_class = ShardedObserver if self._sharded else Observer
        self._observer = observer_class(
            module,
            loss,
            data,
            test,
            samples=samples,
            monitor={"sharpness": sharpness, **(monitor or {})},
            batch=batch,
            ranks=self._world_size,
            seed=seed,
            optimizer=optimizer,
            terms=terms,
            randomness=randomness,
            metrics=metrics,
        )
        splits = {"train": data} if test is None else {"train": data, "test": test}
        with contextlib.ExitStack() as resources:  # closes the lock and the writers after an error
            self._open_folder(splits, resources)
            self._resources = resources.pop_all()  # without an error close() closes them
        self._own_seconds = 0.0  # the time of the recorder's own work
        self._loop_began, self._loop_first_step = time.perf_counter(), self.steps
        # Rank 0 shows once which share of the time is spent on measurements; the other ranks never do.
        self._has_shown_share = self._rank > 0
        atexit.register(self._close_at_exit)

    def _check_options(self, model: nn.Module) -> None:
        """Raise InputError unless the optimizer trains the model and the writers are known."""
        if self._optimizer is not None and not hasattr(self._optimizer, "param_groups"):
            raise InputError("optimizer", self._optimizer, allowed="a torch.optim.Optimizer")
        trained = {id(p) for group in getattr(self._optimizer, "param_groups", ()) for p in group["params"]}
        if trained and trained.isdisjoint(map(id, model.parameters())):
            raise InputError("optimizer: it has no parameter of the model; give the one that trains it")
        writer_names(self._scalars)

    def _open_folder(self, splits: dict[str, Any], resources: contextlib.ExitStack) -> None:
        """Lock the folder. Resume the folder's run, or write the first file of a new run.

        Args:
            splits: the user's data by name: "train" and, if there are test data, "test".
            resources: receives what :meth:`close` must close: the lock and the writers.
        """
        observer = self._observer
        train, test = observer.train, observer.test
        run: Checkpoint | None = None  # the run to resume
        with observer.raising_on_all_ranks():
            if self._rank == 0:
                run = self._lock_folder(resources)
        # The unit "1" is that of numbers without a unit.
        metric_units = {f"test_{name}": "1" for name in names_of(test)} if test else {}
        self._history = History(RECORDED, observer.monitoring.columns | metric_units)
        self._recorder_columns = frozenset(self._history.units)  # the columns that the recorder itself fills
        if run is not None:
            self._restore(run)  # the history; the user's loop loads the weights
        rows = self._history.rows
        seconds_before = rows[-1]["wall_s"] if rows else 0.0  # the time that a resumed run has taken
        self._wall_start = time.perf_counter() - seconds_before
        self._lr = loop.learning_rate(self._optimizer)
        self._saved_step = self.steps  # the step of the last file
        self._has_new_rows = False  # whether the history has rows that the last file lacks
        # class_path() may need the file of __main__, which Python forgets before close() runs at exit.
        self._model_class = loop.class_path(observer.parameters.module)
        tensors = {name: as_tensors(split) for name, split in splits.items()}
        self._data_facts = {
            "name": "",
            "options": {},
            "train": train.samples,
            "test": test.samples if test else 0,
            "fingerprint": UserData(tensors, loss=None).fingerprint,
        }
        names = writer_names(self._scalars) if self._rank == 0 else []
        with observer.raising_on_all_ranks():
            self._writers = [open_writer(name, self.folder, self.steps, resources) for name in names]
        self._run_to_resume = run
        # All ranks take the same branch. Several ranks record only sharded models, which cannot resume:
        # ``run`` is then None on rank 0, too.
        if run is None:  # a new history begins with a row for the initial weights
            self._record(0, observer.test_columns())
            self._write_checkpoint()
            self._next_due = self._due_after(self.steps)
        else:
            # Before the next step, _check_resumed() tests whether the loop has loaded the run's weights.
            self._next_due = self.steps + 1

    def _restore(self, run: Checkpoint) -> None:
        """Restore the history of ``run`` up to the step to resume at, and delete files of later steps."""
        self.steps = run.step if isinstance(self._resume, bool) else self._resume
        for path in storage.named_like_a_run(self.folder):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > self.steps:
                path.unlink()
        self._observer.monitoring.restore(run.shared)
        rows = run.history["step"] <= self.steps
        self._history.restore({name: column[rows] for name, column in run.history.items()}, run.units)

    def _lock_folder(self, resources: contextlib.ExitStack) -> Checkpoint | None:
        """Lock the folder, and return the last state of the run to resume, or None for a new run."""
        files.make_folder(self.folder)
        resources.enter_context(Lock(self.folder)).acquire()
        files.remove_stale(self.folder)
        storage.check_folder(self.folder, resume=self._resumes)
        return run_before(self.folder, self._resume, self._observer.train.layout)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the optimizer's step: ``with recorder.step(): optimizer.step()``.

        All changes of the weights inside this context are one step. Steps are counted from 1. A step that a
        GradScaler skips counts as well, as a step without a change.

        Returns:
            The context, for a ``with`` statement.

        Raises:
            InputError: the last call was made without ``with``; the last step has not ended; or the recorder
                is closed. The context raises this error if parameters were added or frozen, or have another
                shape or precision.

        Example:
            >>> import tempfile, torch, landscape
            >>> model, folder, loss = torch.nn.Linear(3, 2), tempfile.mkdtemp(), torch.nn.functional.mse_loss
            >>> recorder = landscape.Recorder(folder, model, loss, (torch.ones(9, 3), torch.ones(9, 2)))
            >>> with recorder.step():
            ...     _ = model.weight.data.mul_(0.9)  # any change of the weights is a step
            >>> recorder.steps
            1
            >>> recorder.close()
        """
        if self._records_nothing:
            return contextlib.nullcontext()
        if self._closed:
            raise InputError("step: the recorder is closed; call step() before close()")
        if self._phase != IDLE:
            raise InputError("step: the last step is open; write 'with recorder.step(): optimizer.step()'")
        self._phase = CALLED  # until the ``with`` block is entered
        return self._step_context()

    @contextlib.contextmanager
    def _step_context(self) -> Iterator[None]:
        """Record the step that is made inside the block, if the step is due."""
        if self.steps + 1 >= self._next_due:
            with self._timed():
                self._before_step()
        self._phase = INSIDE
        try:
            yield
        except BaseException:
            self._broken = True
            self._observer.forget_step()
            raise
        finally:
            self._phase = IDLE
        self._broken = False
        self.steps += 1
        if self.steps >= self._next_due:
            with self._timed():
                self._after_step()
            self._show_share()

    def _due_after(self, step: int) -> int:
        """Return the next step after ``step`` with a measurement or a file, or NEVER."""
        periods = self._every, *self._observer.monitoring.turns, self._save_every
        return min(((step // period + 1) * period for period in periods if period), default=NEVER)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the seconds of the recorder's own work."""
        began = time.perf_counter()
        yield
        self._own_seconds += time.perf_counter() - began

    def _show_share(self) -> None:
        """Show the measurements' share of the time, once, after measurements of all periods."""
        periods = sorted({self._every, *self._observer.monitoring.turns} - {0})
        if self._has_shown_share or self.steps - self._loop_first_step < max(periods, default=NEVER):
            return
        self._has_shown_share = True
        share = self._own_seconds / (time.perf_counter() - self._loop_began)
        steps = " and ".join(f"{period:,}" for period in periods)
        line = f"{self.folder}: measurements every {steps} steps take {share:.0%} of the time"
        if share > LARGE_SHARE and self._own_seconds > LONG:
            warn_caller(f"{line}; a larger every= or sharpness=, or samples=, takes less", RecorderWarning)
        elif self._own_seconds > DELAY and os.environ.get("LANDSCAPE_PROGRESS") != "0":
            print(line, file=sys.stderr)

    def _before_step(self) -> None:
        """Measure before a due step is made."""
        self._phase, self._broken = IDLE, True  # broken: if the check raises, nothing may be written
        self._observer.parameters.check()
        self._broken = False
        self._lr = loop.learning_rate(self._optimizer)
        if self._run_to_resume is not None:
            self._check_resumed(self._run_to_resume)
        self._observer.keep_weights(self.steps + 1)
        if due(self._every, self.steps + 1):
            self._observer.begin_step(self.steps + 1)

    def _check_resumed(self, run: Checkpoint) -> None:
        """Warn, before the first step of a resumed run, if the weights are not those of ``run``'s file."""
        self._run_to_resume = None
        if run.step != self.steps:  # no file has the weights of this step
            self._write_checkpoint()
            return
        theta, recorded = self._observer.parameters.flat(), run.weights[0]
        if not torch.equal(theta.cpu().to(recorded.dtype), recorded):
            text = f"{self.folder}: the weights are not those recorded at step {self.steps}"
            warn_caller(f"{text}; load those, or give resume=STEP, that of these weights", RecorderWarning)

    def _after_step(self) -> None:
        """Record a due step after it is made."""
        step = self.steps
        self._next_due = self._due_after(step)
        row = self._observer.finish()
        if self._observer.monitoring.due(step):
            row |= self._observer.instrument_columns(step, self._lr)
        if row:
            self._record(step, row | {"lr": self._lr})
        if due(self._save_every, step):
            self._write_checkpoint()

    def _row(self, step: int) -> dict[str, float] | None:
        """Return the history's row of ``step``, or None."""
        return next((row for row in reversed(self._history.rows) if row["step"] == step), None)

    def _record(self, step: int, values: dict[str, float]) -> None:
        """Add ``values`` (name -> number, no NaN) to the row of ``step``, and give them to the writers."""
        numbers = {name: value for name, value in values.items() if not math.isnan(value)}
        row = self._row(step)
        if row is None:
            row = self._history.new_row(step, math.nan) | {"wall_s": time.perf_counter() - self._wall_start}
            self._history.append(row)
        row |= numbers
        self._has_new_rows = True
        for write in self._writers:
            write(step, {name: value for name, value in numbers.items() if math.isfinite(value)})

    def log(self, /, unit: str | None = None, **values: Any) -> None:
        """Record your own numbers for the latest step: ``recorder.log(loss=loss)``.

        Args:
            unit: the unit of all values; default: the column's unit, or "1" for a new column.
            values: numbers by name. A tensor is read immediately, so the call waits for the GPU.

        Raises:
            InputError: for a name that is not allowed, such as that of a column that only the recorder fills;
                for a unit other than the column's; for a value that is not one number.

        Example:
            >>> import tempfile, torch, landscape
            >>> model, folder, loss = torch.nn.Linear(3, 2), tempfile.mkdtemp(), torch.nn.functional.mse_loss
            >>> recorder = landscape.Recorder(folder, model, loss, (torch.ones(9, 3), torch.ones(9, 2)))
            >>> recorder.log(unit="s", data_time=0.1)
            >>> recorder.close()
            >>> landscape.load(f"{folder}/last.h5").history["data_time"].tolist()
            [0.1]
        """
        if self._records_nothing:
            return
        if self._closed:
            raise InputError("log: the recorder is closed; call log() before close()")
        numbers = {name: as_float(name, value) for name, value in values.items()}
        units = self._history.units
        for name in numbers:
            if not _NAME.fullmatch(name):
                raise InputError("log", name, allowed="letters, digits, _, . and -, a letter first")
            if name in self._recorder_columns and name not in USER_COLUMNS:
                raise InputError(f"log: '{name}' is a column of the recorder's own, choose another name")
            if not units.get(name):  # a new column, or one of a resumed file without units
                units[name] = unit or "1"
            if unit is not None and unit != units[name]:
                raise InputError(f"log: '{unit}' is not allowed, the unit of '{name}' is '{units[name]}'")
        # Within the context of step(), ``self.steps`` does not yet count the present step.
        step = self.steps + 1 if self._phase == INSIDE else self.steps
        self._record(step, numbers)

    def checkpoint(self) -> Path | None:
        """Write step-NNNNNNN.h5 and last.h5 of the weights now.

        Returns:
            The path of step-NNNNNNN.h5; None on other ranks than 0.

        Raises:
            InputError: for parameters other than at the start, within a step, and after :meth:`close`.
            OperationError: where the files cannot be written.

        Example:
            >>> import tempfile, torch, landscape
            >>> model, folder, loss = torch.nn.Linear(3, 2), tempfile.mkdtemp(), torch.nn.functional.mse_loss
            >>> recorder = landscape.Recorder(folder, model, loss, (torch.ones(9, 3), torch.ones(9, 2)))
            >>> recorder.checkpoint().name
            'step-0000000.h5'
            >>> recorder.close()
        """
        if self._records_nothing:
            return None
        if self._closed or self._phase != IDLE:
            raise InputError("checkpoint: the recorder is closed, or within a step; call this between steps")
        return self._write_checkpoint()

    def _write_checkpoint(self) -> Path | None:
        """Write a checkpoint; return the path of step-NNNNNNN.h5 on rank 0, and None on other ranks."""
        observer = self._observer
        observer.parameters.check()
        step_samples = self._batch * self._world_size  # samples in a step of all ranks; 0: not known
        epoch = self.steps * step_samples / observer.train.samples if step_samples else math.nan
        monitor_table = dataclasses.asdict(observer.monitor_table)
        limit = loop.stability_limit(self._optimizer)
        if limit is not None:
            monitor_table["stability_limit"] = limit
        # A recorded run has no recipe. Its file has these settings instead, under the keys of a recipe.
        settings: dict[str, Any] = {
            "name": self.folder.resolve().name,
            "seed": self._seed,
            "decompose": {"every": self._every, "samples": self._samples},
            "checkpoint": {"every": self._save_every},
            "monitor": monitor_table,
        }
        if self._optimizer is not None:
            settings["optimizer"] = loop.optimizer_table(self._optimizer)
        checkpoint = Checkpoint(
            weights=observer.parameters.recorded(),
            layout=observer.train.layout,
            step=self.steps,
            epoch=epoch,
            algorithm=RECORDED,
            recipe=toml_text(settings),
            model={"name": self._model_class, "options": {}},
            data=self._data_facts,
            lr=self._lr,
            local_batch=self._batch,
            seed=self._seed,
            history=self._history.columns(),
            units=self._history.units,
            # Frozen parameters and buffers, each with one row for the one learner.
            buffers=observer.parameters.untrained_rows(),
            shared=observer.state(self.steps),
        )
        with observer.raising_on_all_ranks():
            # For write() to leave out of step-NNNNNNN.h5 the rows that earlier such files have.
            path = storage.write(checkpoint, self.folder, self._save_every) if self._rank == 0 else None
        self._saved_step, self._has_new_rows = self.steps, False
        return path

    def close(self) -> None:
        """Write a last checkpoint with the test loss, unless it is already written; unlock the folder.

        The recorder is also closed at the end of its ``with`` statement and at the end of the process. After
        an exception within a step nothing is written, because some weights may already have changed.

        Raises:
            OperationError: where the files cannot be written.

        Example:
            >>> import tempfile, torch, landscape
            >>> model, folder, loss = torch.nn.Linear(3, 2), tempfile.mkdtemp(), torch.nn.functional.mse_loss
            >>> recorder = landscape.Recorder(folder, model, loss, (torch.ones(9, 3), torch.ones(9, 2)))
            >>> recorder.close()
            >>> recorder
            Recorder('...', step 0)
        """
        if self._closed or os.getpid() != self._process_id:  # a forked process writes nothing
            return
        atexit.unregister(self._close_at_exit)
        try:
            if not self._broken and self._phase != INSIDE:  # the weights are those after a whole step
                observer = self._observer
                row = self._row(self.steps)
                has_test_loss = row is not None and math.isfinite(row.get("test_loss", math.nan))
                # With a sharded model, all ranks take part as soon as one has something to measure or write.
                if observer.test is not None and observer.any_rank(not has_test_loss):
                    self._record(self.steps, observer.test_columns())
                if observer.any_rank(self.steps != self._saved_step or self._has_new_rows):
                    self._write_checkpoint()
        finally:
            self._closed = True
            self._resources.close()

    def abort(self) -> None:
        """Close after an error; with a sharded model nothing is written, because other ranks may have ended.

        Example:
            >>> recorder.abort()  # doctest: +SKIP
        """
        self._broken |= self._sharded
        self.close()

    def _close_at_exit(self) -> None:
        try:
            self.abort()
        except LandscapeError as error:
            print(f"landscape: {error}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        (self.close if kind is None else self.abort)()

    def __repr__(self) -> str:
        state = (
            f"rank {self._rank}, which does not record" if self._records_nothing else f"step {self.steps:,}"
        )
        return f"Recorder({str(self.folder)!r}, {state})"


# Phases of the context that step() gives: no step, step() was called, the with block was entered.
IDLE, CALLED, INSIDE = 0, 1, 2


class RecorderWarning(UserWarning):
    """A warning that the recorded numbers may not be those that the user expects."""


def as_float(name: str, value: Any) -> float:
    """Return ``value`` as a float; InputError unless it is a single number."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        raise InputError(f"log: {name}: {kind} is not allowed, it must be one number") from error


def run_before(folder: Path, resume: bool | int, layout: Layout) -> Checkpoint | None:
    """Return the last state of the recorded run in ``folder``; None for a folder without a run.

    Raises OperationError for a run of another kind or model, and for a step ``resume`` in a folder without a
    run.
    """
    if not storage.named_like_a_run(folder):
        if resume and not isinstance(resume, bool):
            raise OperationError(f"resume: {resume} is not allowed, {folder} has no run to resume")
        return None
    run = storage.last_sound(folder, learners=lambda n: slice(0, n))
    if run.algorithm != RECORDED:
        raise OperationError(f"{folder}: its run is of '{run.algorithm}', no recorder's; give another folder")
    check_fit(folder, run.layout, layout)
    return run
