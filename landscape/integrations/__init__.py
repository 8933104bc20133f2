"""Callbacks for other trainers, a module for each, and what they share: a recorder between a trainer's hooks.

The trainer's package is imported with the module, ``landscape.integrations.lightning`` or
``landscape.integrations.huggingface``, and nowhere else.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import data as torch_data

from landscape.core.errors import InputError
from landscape.core.options import check_keywords
from landscape.problem.problem import Loss
from landscape.training.own_loop.recorder import Recorder
from landscape.training.run import due


class Recorded:
    """The common base of callbacks: a recorder that a trainer's hooks open, step and close.

    Args:
        folder, loss, data, test, settings: as :class:`landscape.Recorder` takes them. What the trainer knows
            takes the place of a loss, data, ``batch`` and ``resume`` that are not given.

    Raises:
        InputError: for a setting that is not the recorder's, or not allowed.
    """

    def __init__(
        self,
        folder: str | Path,
        loss: Loss | None = None,
        data: Any = None,
        *,
        test: Any = None,
        **settings: Any,
    ) -> None:
        self._folder, self._loss, self._data, self._test = Path(folder), loss, data, test
        of_callback = ("folder", "model", "loss", "data", "test", "optimizer")
        self._settings = check_keywords("LandscapeCallback", settings, Recorder, given=of_callback)
        self._recorder: Recorder | None = None
        self._steps = 0
        self._within = False  # a step
        self._step = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()  # of the trainer's, until the recorder is closed

    def _splits(self, loader: Any) -> tuple[Any, Any]:
        """The training set and the test data, as :func:`data_of` gives them; no test data: None."""
        whole = self._settings["samples"] > 0
        test = None if self._test is None else data_of("test", self._test, loader, whole=whole)
        return data_of("data", self._data, loader, whole=whole), test

    def _begin(
        self, model: nn.Module, data: Any, test: Any, optimizer: Any, *, batch: int, resume: int,
        terms: Callable[[Any], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Open the recorder.

        Args:
            model: evaluated with the loss that was given, or its own; its weights are recorded.
            data, test: as the recorder takes them.
            batch: the trainer's; 0: unknown.
            resume: the step from which the trainer resumes; 0: none.
            terms: in place of the user's.
        """
        self._abort()
        settings = {**self._settings, "test": test, "optimizer": optimizer}
        settings["batch"] = settings["batch"] or batch
        settings["terms"] = terms or settings["terms"]
        if resume and isinstance(settings["resume"], bool):
            settings["resume"] = resume
        self._recorder = Recorder(self._folder, model, self._loss, data, **settings)
        self._steps = self._recorder.steps

    def _before(self) -> None:
        """Begin a step, right before the optimizer's."""
        self._after()  # of a step that was skipped, so that no hook came after it
        if self._recorder is not None:
            self._step.enter_context(self._recorder.step())
            self._within = True

    def _after(self) -> None:
        """End the step, right after the optimizer's; without a step nothing happens."""
        self._step.close()
        self._within = False
        if self._recorder is not None:
            self._steps = self._recorder.steps

    def _log(self, loss: Any) -> None:
        """Record the loss of the step that was made last, if that is one that is decomposed."""
        if self._recorder is not None and due(self._settings["every"], self._steps):
            self._recorder.log(loss=loss)

    def _abort(self) -> None:
        """Close the recorder as it is; of a step that has begun nothing is written."""
        recorder, self._recorder = self._recorder, None
        self._step.pop_all()
        self._within = False
        self._hooks.close()
        if recorder is not None:
            recorder.abort()

    def _end(self) -> None:
        """Close the recorder after the last step."""
        self._after()
        if self._recorder is not None:
            self._recorder.close()
        self._abort()


def shallow_copy(module: nn.Module) -> nn.Module:
    """Another module with the same parameters, buffers and parts, and attributes of its own.

    Methods that were put into the module, such as a ``forward`` of another trainer, are its own. So are its
    lists, as they are now, without what steps gathered there: tensors with a graph, which cannot be copied.
    """
    module_copy = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(module_copy)[name] = MethodType(value.__func__, module_copy)
        elif type(value) is list:
            vars(module_copy)[name] = [item for item in value if not isinstance(item, Tensor) or item.is_leaf]
    return module_copy


# Under these samplers, of torch and, by name, of Hugging Face, each sample is as likely as any other.
EVEN = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)
BY_LENGTH = ("LengthGroupedSampler", "DistributedLengthGroupedSampler", "BatchRebalanceSampler")


def data_of(name: str, of_user: Any, loader: Any, *, whole: bool) -> Any:
    """Data as :class:`landscape.Problem` takes it: ``of_user``, or, where that is None, those of ``loader``.

    A loader of the trainer's is shuffled, cut into shares of processes, and busy with its own epoch: its data
    set is read by another one, in order. So is a DataLoader of the user's, and a Dataset with the trainer's
    collate function and batches.

    Args:
        name: "data" or "test", for messages.
        whole: as one batch, from which samples can be drawn, and not in batches.

    Raises:
        InputError: for what is no DataLoader, or one whose data set has no length, or whose sampler may weigh
            samples.
    """
    data = loader if of_user is None else of_user
    if isinstance(of_user, torch_data.Dataset) or type(of_user).__module__.partition(".")[0] == "datasets":
        collate = getattr(loader, "collate_fn", None)
        data = torch_data.DataLoader(of_user, batch_size(loader) or 1, collate_fn=collate)
    if isinstance(data, torch_data.DataLoader):
        return in_order(name, data, whole=whole)
    if of_user is None:
        kind = type(loader).__name__
        raise InputError(f"{name}: the trainer's {kind} is not one DataLoader; give {name}=…")
    return of_user


def batch_size(loader: Any) -> int:
    """Samples in a batch of a process; 0 for an unknown number."""
    if not isinstance(loader, torch_data.DataLoader) or loader.batch_sampler is None:
        return 0
    return int(getattr(_batch_sampler(loader), "batch_size", None) or 0)


def in_order(name: str, loader: torch_data.DataLoader[Any], *, whole: bool) -> Any:
    """The data of ``loader`` in order: batches of its size, or, if ``whole``, one batch of all of it."""
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, torch_data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(f"{name}: a {type(dataset).__name__} has no length; give {name}=…, as batches")
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", batches)
    if not isinstance(sampler, EVEN) and type(sampler).__name__ not in BY_LENGTH:
        kind = type(sampler).__name__
        raise InputError(f"{name}: a {kind} may weigh samples or leave some out; give {name}=…")
    size = batch_size(loader) or None
    if whole and size is None:
        raise InputError(f"{name}: its data set gives batches, from which no samples can be drawn; samples=0")
    if whole:
        return collate([dataset[i] for i in range(len(dataset))])
    return torch_data.DataLoader(
        dataset,
        size,
        collate_fn=collate,
        num_workers=loader.num_workers,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # or the seeds of its workers would be drawn from the loop's
    )


def _batch_sampler(loader: torch_data.DataLoader[Any]) -> Any:
    """The innermost batch sampler of a loader, or its sampler where there is none."""
    part: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while hasattr(part, "batch_sampler"):  # accelerate's, a process's share of another
        part = part.batch_sampler
    return part
