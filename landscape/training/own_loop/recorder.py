"""Record a training loop of the user's own: every step as effective rate and noise, in files as a run's."""

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

# Columns of the history that a user may fill; the recorder, or nobody, fills the others.
OPEN = ("loss", "consensus", "samples_per_s", "wait_s", "test_loss", "test_accuracy")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
NEVER = 2**63  # a step that no loop reaches
# A warning says so where measurements take more than this share of a loop's time, and these seconds (our
# choice).
LARGE_SHARE, LONG = 0.5, 10.0


class Recorder:
    """Records a training loop of any kind: its steps decomposed, its loss, its weights along the way.

    Every ``every``-th step is decomposed whatever made it (DPSGD-2020, Eq. 3): d is what the step did to the
    weights w, g = ∇L(w) before it, α_e = −⟨d, g⟩/‖g‖² and Δ = ‖d + α_e g‖², so that α_e²‖g‖² + Δ = ‖d‖². The
    files step-NNNNNNN.h5 and last.h5 in ``folder`` are checkpoints with one learner, which every command
    takes: ``landscape contour FOLDER --model MODULE:NAME --data MODULE:NAME``. They name the model's class
    and never run it. A step that is not due costs a counter; one that is costs a gradient over the data.

    The loop is left as it is: its random numbers, the gradients and the training mode of its model. Under
    DistributedDataParallel rank 0 records, while the other ranks wait for it at their next exchange. Of a
    model divided among ranks (:class:`landscape.ShardedProblem`) all ranks measure, make the same calls, and
    close the recorder; rank 0 writes, for which it gathers the weights in its CPU's memory.

    Args:
        folder: where the files go; made where it is missing.
        model: the module that is trained; of DistributedDataParallel, DataParallel and torch.compile the
            one inside. θ are its trainable parameters, P in all; frozen ones and buffers go with each file.
        loss, terms, randomness: ``loss(outputs, targets)``, a mean, or None; where samples contribute to it
            unequally, ``terms(targets)``; and what to do with random numbers in eval mode; as
            :class:`landscape.Problem` takes them.
        data: the training set, as :class:`landscape.Problem` takes it: g is the gradient of its mean loss,
            in eval mode (but see ``batch``), so that dropout and augmentation count as noise.
        every: steps from one that is decomposed to the next; 0: none. Ours; for a large training set give
            ``samples``, too: on MNIST in minibatches of 128, exact g takes as long as 360 steps of a small
            network, g from 1,024 samples as 15.
        test: data of the same kind; its loss, and accuracy where there is one, are evaluated after each step
            that is decomposed, at the start and at the end.
        optimizer: the one that makes the steps, for the columns lr and lr·λ_max and ``landscape stability``;
            lr is NaN where its parameter groups have several.
        samples: the number of samples from which g is estimated, drawn anew each time, with standard errors;
            a multiple of 16. 0: all, exactly.
        sharpness: steps from one λ_max to the next, on 2,000 samples of the training set, always the same
            (all, where data comes in batches, or the model is divided among ranks); 0: none.
        monitor: what else is measured, as a recipe's table "monitor": {"instruments": ["noise-scale"]}.
        save_every: steps from one step-NNNNNNN.h5 to the next; 0: only at the end. As the trainer's (500).
        batch: samples in a minibatch of one process. Needed by most instruments, and by BatchNorm: g has the
            statistics of such batches, cut once at random; data in batches, which needs none, keeps its own.
        resume: resume the run in ``folder``; begin one in an empty folder. True: from its last
            file. A number: from that step, which the loop's own checkpoint is of; what was recorded of later
            steps is deleted. The loop itself loads its weights.
        scalars: "tensorboard", "wandb" or "trackio", or a list of them: where the numbers go, too.
        seed: draws the samples.
        metrics: as :class:`landscape.Problem` takes them, of ``test``: columns test_NAME beside test_loss.

    Attributes:
        steps: how many steps have been made.

    Raises:
        InputError: for an argument that is not allowed, and for a model, a loss or data that
            :class:`landscape.Problem` refuses, in one line; in :meth:`step`, for parameters that are no
            longer those of the start.
        OperationError: for a folder that has a run, that another process writes or that cannot be written;
            for a package for ``scalars`` that is not installed.

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

    @checked("loss")
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
        self.folder, self.steps, self._every, self._samples = Path(folder), 0, every, samples
        self._save_every, self._batch, self._seed = save_every, batch, seed
        self._optimizer, self._resume, self._scalars = optimizer, resume, scalars
        self._check_options(model)
        self._phase, self._broken, self._next = IDLE, False, 1
        self._process = os.getpid()
        self._rank, self._world = loop.rank_and_size()
        module = unwrapped(model)
        self._sharded = is_sharded(module)
        self._idle = self._closed = self._rank > 0 and not self._sharded
        if self._idle:
            return
        if not self._sharded:  # whose ranks see it together
            storage.check_folder(self.folder, resume=resume is not False)
        elif resume is not False:
            raise InputError("resume: not allowed in a recorder of a sharded model; give another folder")
        how: dict[str, Any] = {"optimizer": optimizer, "terms": terms, "randomness": randomness, "seed": seed}
        how["metrics"] = metrics
        kind = ShardedObserver if self._sharded else Observer
        table = {"sharpness": sharpness, **(monitor or {})}
        self._observer = kind(
            module, loss, data, test, samples=samples, monitor=table, batch=batch, ranks=self._world, **how
        )
        with contextlib.ExitStack() as opened:
            self._open({"train": data} | ({} if test is None else {"test": test}), opened)
            self._opened = opened.pop_all()
        # The seconds of the recorder's own work, and the beginning of the loop.
        self._spent, self._began, self._first = 0.0, time.perf_counter(), self.steps
        self._share_shown = self._rank > 0
        atexit.register(self._close_at_exit)

    def _check_options(self, model: nn.Module) -> None:
        if self._optimizer is not None and not hasattr(self._optimizer, "param_groups"):
            raise InputError("optimizer", self._optimizer, allowed="a torch.optim.Optimizer")
        trained = {id(p) for group in getattr(self._optimizer, "param_groups", ()) for p in group["params"]}
        if trained and trained.isdisjoint(map(id, model.parameters())):
            raise InputError("optimizer: it has no parameter of the model; give the one that trains it")
        writer_names(self._scalars)

    def _open(self, splits: dict[str, Any], opened: contextlib.ExitStack) -> None:
        """Take the folder, resume its run, if there is one, and write the first file."""
        observer, train, test = self._observer, self._observer.train, self._observer.test
        with observer.together():
            before = None if self._rank else self._take(opened)
        measured = {f"test_{name}": "1" for name in (names_of(test) if test else ())}
        self._history = History(RECORDED, observer.monitor.columns | measured)
        self._columns = frozenset(self._history.units)
        if before is not None:
            self.steps = before.step if isinstance(self._resume, bool) else self._resume
            for path in storage.named_like_a_run(self.folder):
                if path.stem[5:].isdecimal() and int(path.stem[5:]) > self.steps:
                    path.unlink()
            observer.monitor.restore(before.shared)
            rows = before.history["step"] <= self.steps
            self._history.restore({name: c[rows] for name, c in before.history.items()}, before.units)
        last = self._history.rows[-1:]
        self._clock = time.perf_counter() - (last[0]["wall_s"] if last else 0.0)
        self._lr, self._saved, self._logged = loop.rate(self._optimizer), self.steps, False
        self._model = loop.class_path(observer.parameters.module)  # later __main__ has no file
        self._facts = {
            "name": "",
            "options": {},
            "train": train.samples,
            "test": test.samples if test else 0,
            "fingerprint": UserData({k: as_tensors(v) for k, v in splits.items()}, None).fingerprint,
        }
        names = [] if self._rank else writer_names(self._scalars)
        with observer.together():
            self._writers = [open_writer(name, self.folder, self.steps, opened) for name in names]
        self._resumed = before
        if before is None:  # a history begins with its first step, or before
            self._add(0, observer.tested())
            self._write()
        self._next = self._due_after(self.steps) if before is None else self.steps + 1

    def _take(self, opened: contextlib.ExitStack) -> Checkpoint | None:
        """Take the folder for this process alone: the last state of the run to resume, if any."""
        files.make_folder(self.folder)
        opened.enter_context(Lock(self.folder)).acquire()
        files.remove_stale(self.folder)
        storage.check_folder(self.folder, resume=self._resume is not False)
        return run_before(self.folder, self._resume, self._observer.train.layout)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """The context of the optimizer's step: ``with recorder.step(): optimizer.step()``.

        Whatever happens inside is one step, counted from 1; one that a GradScaler skips has d = 0.

        Returns:
            The context, for a ``with`` statement.

        Raises:
            InputError: where it is called without ``with``, within another step or after :meth:`close`, and
                for parameters that were added, frozen, or changed in shape or precision.

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
        if self._closed and not self._idle:
            raise InputError("step: the recorder is closed; call this before")
        if self._phase != IDLE:
            raise InputError("step: it needs its own with statement, with recorder.step(): optimizer.step()")
        if self._idle:
            return contextlib.nullcontext()
        self._phase = ASKED
        return self._recorded()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the step that is made inside, if it is due."""
        if self.steps + 1 >= self._next:
            with self._timed():
                self._before()
        self._phase = INSIDE
        try:
            yield
        except BaseException:
            self._broken = True
            self._observer.forget()
            raise
        finally:
            self._phase = IDLE
        self._broken = False
        self.steps += 1
        if self.steps >= self._next:
            with self._timed():
                self._after()
            self._show_share()

    def _due_after(self, step: int) -> int:
        """The next step after ``step`` at which there is something to do."""
        turns = self._every, *self._observer.monitor.turns, self._save_every
        return min(((step // every + 1) * every for every in turns if every), default=NEVER)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the seconds of the recorder's own work."""
        began = time.perf_counter()
        yield
        self._spent += time.perf_counter() - began

    def _show_share(self) -> None:
        """Show once the share of the time that measurements take, after each of them was made."""
        turns = sorted({self._every, *self._observer.monitor.turns} - {0})
        if self._share_shown or self.steps - self._first < max(turns, default=NEVER):
            return
        self._share_shown = True
        share = self._spent / (time.perf_counter() - self._began)
        steps = " and ".join(f"{turn:,}" for turn in turns)
        line = f"{self.folder}: what is measured every {steps} steps takes {share:.0%} of the time"
        if share > LARGE_SHARE and self._spent > LONG:
            warn_caller(f"{line}; a larger every= or sharpness=, or samples=, takes less", RecorderWarning)
        elif self._spent > DELAY and os.environ.get("LANDSCAPE_PROGRESS") != "0":
            print(line, file=sys.stderr)

    def _before(self) -> None:
        """Measure what a due step needs before it is made."""
        self._phase, self._broken = IDLE, True  # if this fails
        self._observer.parameters.check()
        self._broken = False
        self._lr = loop.rate(self._optimizer)
        if self._resumed is not None:
            self._check_resumed(self._resumed)
        self._observer.keep_weights(self.steps + 1)
        if due(self._every, self.steps + 1):
            self._observer.start(self.steps + 1)

    def _check_resumed(self, run: Checkpoint) -> None:
        """At the first step after a resumption: warn of weights that are not the file's, or write a file."""
        self._resumed = None
        if run.step != self.steps:
            self._write()
            return
        theta, recorded = self._observer.parameters.flat(), run.weights[0]
        if not torch.equal(theta.cpu().to(recorded.dtype), recorded):
            text = f"{self.folder}: the weights are not those recorded at step {self.steps}"
            warn_caller(f"{text}; load those, or give resume=STEP, that of these weights", RecorderWarning)

    def _after(self) -> None:
        """Record a due step after it is made."""
        step = self.steps
        self._next = self._due_after(step)
        row = self._observer.finish()
        if self._observer.monitor.due(step):
            row |= self._observer.measured(step, self._lr)
        if row:
            self._add(step, row | {"lr": self._lr})
        if due(self._save_every, step):
            self._write()

    def _row(self, step: int) -> dict[str, float] | None:
        """The row of a late ``step``; None where it has none yet."""
        return next((row for row in reversed(self._history.rows) if row["step"] == step), None)

    def _add(self, step: int, values: dict[str, float]) -> None:
        numbers = {name: value for name, value in values.items() if not math.isnan(value)}
        row = self._row(step)
        if row is None:
            row = self._history.new_row(step, math.nan) | {"wall_s": time.perf_counter() - self._clock}
            self._history.append(row)
        row |= numbers
        self._logged = True
        for write in self._writers:
            write(step, {name: value for name, value in numbers.items() if math.isfinite(value)})

    def log(self, /, unit: str | None = None, **values: Any) -> None:
        """Record your own numbers for the latest step: ``recorder.log(loss=loss)``.

        Args:
            unit: of all of them; default: the column's unit ("nat" for loss), or "1" for a new column.
            values: by name; one number each. A tensor is read immediately, and the host waits for its GPU.

        Raises:
            InputError: for a name of the recorder's own columns, a unit other than the column's, or a value
                that is not one number.

        Example:
            >>> import tempfile, torch, landscape
            >>> model, folder, loss = torch.nn.Linear(3, 2), tempfile.mkdtemp(), torch.nn.functional.mse_loss
            >>> recorder = landscape.Recorder(folder, model, loss, (torch.ones(9, 3), torch.ones(9, 2)))
            >>> recorder.log(unit="s", data_time=0.1)
            >>> recorder.close()
            >>> landscape.load(f"{folder}/last.h5").history["data_time"].tolist()
            [0.1]
        """
        if self._idle:
            return
        if self._closed:
            raise InputError("log: the recorder is closed; call this before")
        numbers = {name: number(name, value) for name, value in values.items()}
        units = self._history.units
        for name in numbers:
            if not _NAME.fullmatch(name):
                raise InputError("log", name, allowed="letters, digits, _, . and -, a letter first")
            if name in self._columns and name not in OPEN:
                raise InputError(f"log: '{name}' is a column of the recorder's own, choose another name")
            units[name] = units.get(name) or unit or "1"  # a resumed file may have "" for an unknown unit
            if unit is not None and unit != units[name]:
                raise InputError(f"log: '{unit}' is not allowed, the unit of '{name}' is '{units[name]}'")
        step = self.steps + 1 if self._phase == INSIDE else self.steps
        self._add(step, numbers)

    def checkpoint(self) -> Path | None:
        """Write step-NNNNNNN.h5 and last.h5 of the weights now.

        Returns:
            The path of the former; None on other ranks than 0.

        Raises:
            InputError: for parameters that are no longer those of the start, and within a step.
            OperationError: where the files cannot be written.

        Example:
            >>> import tempfile, torch, landscape
            >>> model, folder, loss = torch.nn.Linear(3, 2), tempfile.mkdtemp(), torch.nn.functional.mse_loss
            >>> recorder = landscape.Recorder(folder, model, loss, (torch.ones(9, 3), torch.ones(9, 2)))
            >>> recorder.checkpoint().name
            'step-0000000.h5'
            >>> recorder.close()
        """
        if self._idle:
            return None
        if self._closed or self._phase != IDLE:
            raise InputError("checkpoint: the recorder is closed, or within a step; call this between steps")
        return self._write()

    def _write(self) -> Path | None:
        observer = self._observer
        observer.parameters.check()
        batch, limit = self._batch * self._world, loop.stability_limit(self._optimizer)
        monitor = dataclasses.asdict(observer.monitor.run.monitor)
        settings: dict[str, Any] = {  # with the keys of a recipe, whose place they take
            "name": self.folder.resolve().name,
            "seed": self._seed,
            "decompose": {"every": self._every, "samples": self._samples},
            "checkpoint": {"every": self._save_every},
            "monitor": monitor | ({} if limit is None else {"stability_limit": limit}),
        }
        if self._optimizer is not None:
            settings["optimizer"] = loop.optimizer_table(self._optimizer)
        state = Checkpoint(
            weights=observer.parameters.recorded(),
            layout=observer.train.layout,
            step=self.steps,
            epoch=self.steps * batch / observer.train.samples if batch else math.nan,
            algorithm=RECORDED,
            recipe=toml_text(settings),
            model={"name": self._model, "options": {}},
            data=self._facts,
            lr=self._lr,
            local_batch=self._batch,
            seed=self._seed,
            history=self._history.columns(),
            units=self._history.units,
            buffers=observer.parameters.untrained_rows(),
            shared=observer.state(self.steps),
        )
        with observer.together():
            path = None if self._rank else storage.write(state, self.folder, self._save_every)
        self._saved, self._logged = self.steps, False
        return path

    def close(self) -> None:
        """Write what is not written yet, with the loss on the test data, and give the folder back.

        The end of a with statement on the recorder, or of the process, does so, too. After an exception
        within a step nothing is written: the weights may be half changed.

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
        if self._closed or os.getpid() != self._process:
            return
        atexit.unregister(self._close_at_exit)
        try:
            if not self._broken and self._phase != INSIDE:
                observer = self._observer
                tested = math.isfinite((self._row(self.steps) or {}).get("test_loss", math.nan))
                if observer.test is not None and observer.agreed(not tested):
                    self._add(self.steps, observer.tested())
                if observer.agreed(self.steps != self._saved or self._logged):
                    self._write()
        finally:
            self._closed = True
            self._opened.close()

    def abort(self) -> None:
        """Close after an error: of a sharded model nothing is written, as other ranks may not be there.

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
        state = f"rank {self._rank}, which does not record" if self._idle else f"step {self.steps:,}"
        return f"Recorder({str(self.folder)!r}, {state})"


# What a with statement around a step is at: not asked for, asked for, entered.
IDLE, ASKED, INSIDE = 0, 1, 2


class RecorderWarning(UserWarning):
    """The recorded numbers may not be those that the user means."""


def number(name: str, value: Any) -> float:
    """``value`` as a float; InputError where it is not one number."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        raise InputError(f"log: {name}: {kind} is not allowed, it must be one number") from error


def run_before(folder: Path, resume: bool | int, layout: Layout) -> Checkpoint | None:
    """The last state of the recorded run in ``folder``; None for a folder without a run.

    Raises OperationError for a run of another kind or model, and for a step to resume at in such a folder.
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
