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
        folder, loss, data, test, settings: as :class:`landscape.Recorder` takes them. For a missing loss,
            data, ``batch`` or ``resume`` the trainer's is taken.

    Raises:
        InputError: for a setting that is not the recorder's, or not allowed.
    """

    def __init__(
        self, folder: str | Path, loss: Loss | None = None, data: Any = None, *, test: Any = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        self._folder, self._loss, self._data, self._test = Path(folder), loss, data, test
        of_callback = ("folder", "model", "loss", "data", "test", "optimizer")
        self._settings = check_keywords("LandscapeCallback", settings, Recorder, given=of_callback)
        self._recorder: Recorder | None = None
        self._steps = 0
        self._within = False  # a step
        self._step = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()  # of the trainer's, until the recorder is closed

    def _splits(self, loader: Any) -> tuple[Any, Any]:
        """Return the training set and the test data, as :func:`problem_data` does; None for no test data."""
        whole = self._settings["samples"] > 0
        test = None if self._test is None else problem_data("test", self._test, loader, whole=whole)
        return problem_data("data", self._data, loader, whole=whole), test

    def _begin(
        self, model: nn.Module, data: Any, test: Any, optimizer: Any, *, batch: int, resume: int,
        terms: Callable[[Any], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Open the recorder.

        Args:
            model: the model whose weights are recorded; evaluated with the user's loss, or its own.
            data, test: arguments of the recorder.
            optimizer: the trainer's optimizer.
            batch: samples in a step of the trainer; 0 if unknown.
            resume: the step from which the trainer resumes; 0: none.
            terms: the recorder's ``terms``, in place of the user's.
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
        """Begin a step of the recorder, right before the optimizer's step."""
        self._after()  # ends a step that the trainer skipped, after which it called no hook
        if self._recorder is not None:
            self._step.enter_context(self._recorder.step())
            self._within = True

    def _after(self) -> None:
        """End the step of the recorder, if there is one, right after the optimizer's step."""
        self._step.close()
        self._within = False
        if self._recorder is not None:
            self._steps = self._recorder.steps

    def _log(self, loss: Any) -> None:
        """Record the loss of the latest step, if this step is decomposed."""
        if self._recorder is not None and due(self._settings["every"], self._steps):
            self._recorder.log(loss=loss)

    def _abort(self) -> None:
        """Close the recorder at once; write nothing of a step that has begun."""
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
    """Return another module with the same parameters, buffers and submodules, but its own attributes.

    Methods that were set on the instance, such as a trainer's ``forward``, are bound to the copy. Lists are
    copied without tensors that have a graph, which steps collected there and which cannot be copied deeply.
    """
    module_copy = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(module_copy)[name] = MethodType(value.__func__, module_copy)
        elif type(value) is list:
            vars(module_copy)[name] = [item for item in value if not isinstance(item, Tensor) or item.is_leaf]
    return module_copy


# Samplers of torch, and names of samplers of Hugging Face, that draw all samples with equal probability.
EVEN = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)
BY_LENGTH = ("LengthGroupedSampler", "DistributedLengthGroupedSampler", "BatchRebalanceSampler")


def problem_data(name: str, user_data: Any, loader: Any, *, whole: bool) -> Any:
    """Return the user's data, or else the trainer's, in a form that :class:`landscape.Problem` takes.

    A trainer's DataLoader shuffles, gives each process a share, and may be in the middle of an epoch. So the
    data set of a DataLoader, the trainer's or the user's, is read anew and in order. A Dataset of the user is
    read with the collate function and the batch size of ``loader``. Other data of the user are returned as
    they are.

    Args:
        name: "data" or "test", for messages.
        user_data: the user's data; None: the data of ``loader`` are returned.
        loader: the trainer's loader; usually a DataLoader.
        whole: whether to return all samples in one batch, from which the recorder can draw samples by index;
            otherwise the data stay in batches.

    Raises:
        InputError: ``user_data`` is None and ``loader`` is no DataLoader; or a DataLoader has a data set
            without a length, or a sampler that may weigh samples.
    """
    data = loader if user_data is None else user_data
    package = type(user_data).__module__.partition(".")[0]
    if isinstance(user_data, torch_data.Dataset) or package == "datasets":  # PyTorch's or Hugging Face's
        collate = getattr(loader, "collate_fn", None)
        data = torch_data.DataLoader(user_data, batch_size(loader) or 1, collate_fn=collate)
    if isinstance(data, torch_data.DataLoader):
        return in_order(name, data, whole=whole)
    if user_data is None:
        kind = type(loader).__name__
        raise InputError(f"{name}: the trainer's {kind} is not a single DataLoader; give {name}=…")
    return user_data


def batch_size(loader: Any) -> int:
    """Return samples in a batch of a process; 0 for an unknown number."""
    if not isinstance(loader, torch_data.DataLoader) or loader.batch_sampler is None:
        return 0
    return int(getattr(_batch_sampler(loader), "batch_size", None) or 0)


def in_order(name: str, loader: torch_data.DataLoader[Any], *, whole: bool) -> Any:
    """Return the data of ``loader`` in order: in batches of its size; if ``whole``, all in one batch."""
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
        generator=torch.Generator(),  # otherwise the seeds of workers would be drawn from the loop's numbers
    )


def _batch_sampler(loader: torch_data.DataLoader[Any]) -> Any:
    """Return the innermost batch sampler of a loader, or its sampler where there is none."""
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while hasattr(sampler, "batch_sampler"):  # accelerate wraps it, for the share of a process
        sampler = sampler.batch_sampler
    return sampler
