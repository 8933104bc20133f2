"""The samples behind a trainer's DataLoader, each once and always in the same order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from landscape.core.errors import InputError

# Under these, and no others that are known, each sample is as likely as any other.
EVEN = (SequentialSampler, RandomSampler, DistributedSampler)


def given_or_own(name: str, given: Any, loader: Any, *, whole: bool, even: Iterable[str] = ()) -> Any:
    """Data as :class:`landscape.Problem` takes it: ``given``, or, where that is None, those of ``loader``.

    A loader of the trainer's is shuffled, cut into shares of processes, and busy with its own epoch: its data
    set is read by another one, in order. So is a DataLoader among what was given, and a Dataset with the
    trainer's collate function and batches.

    Args:
        name: "data" or "test", for messages.
        whole: as one batch, from which samples can be drawn, and not in batches.
        even: names of classes of samplers that give each sample as often as any other.

    Raises:
        InputError: for what is no DataLoader, or one whose data set has no length, or whose sampler may weigh
            samples.
    """
    if given is None:
        if not isinstance(loader, DataLoader):
            kind = type(loader).__name__
            raise InputError(
                f"{name}: the trainer's {kind} is not known, it must be one DataLoader; give {name}=…"
            )
        return in_order(name, loader, whole=whole, even=even)
    if isinstance(given, DataLoader):
        return in_order(name, given, whole=whole, even=even)
    if isinstance(given, Dataset) or type(given).__module__.partition(".")[0] == "datasets":
        known = isinstance(loader, DataLoader)
        size = _batch_sampler(loader).batch_size if known and loader.batch_sampler is not None else 1
        collate = loader.collate_fn if known else None
        own = DataLoader(given, batch_size=size, collate_fn=collate)
        return in_order(name, own, whole=whole)
    return given


def batch_size(loader: Any) -> int:
    """Samples in a batch of a process; 0 where that is not known."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return 0
    return int(getattr(_batch_sampler(loader), "batch_size", None) or 0)


def in_order(name: str, loader: DataLoader[Any], *, whole: bool, even: Iterable[str] = ()) -> Any:
    """The data of ``loader`` in order: batches of its size, or, if ``whole``, one batch of all of it."""
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"{name}: a {type(dataset).__name__} has no length, the samples cannot be read again in order; "
            f"give {name}=…, such as a list of batches"
        )
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", batches)
    if not isinstance(sampler, EVEN) and type(sampler).__name__ not in even:
        raise InputError(
            f"{name}: a {type(sampler).__name__} may weigh samples or leave some out, so that the loss that "
            f"is trained is not known; give {name}=…, the samples that it is the mean over"
        )
    size = batch_size(loader) or None
    if whole and size is None:
        raise InputError(f"{name}: its data set gives batches, from which no samples can be drawn; samples=0")
    if whole:
        return collate([dataset[i] for i in range(len(dataset))])
    return DataLoader(
        dataset,
        size,
        collate_fn=collate,
        num_workers=loader.num_workers,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # or the seeds of its workers would be drawn from the loop's
    )


def _batch_sampler(loader: DataLoader[Any]) -> Any:
    """The innermost batch sampler of a loader, or its sampler where there is none."""
    part: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while hasattr(part, "batch_sampler"):  # accelerate's, a process's share of another
        part = part.batch_sampler
    return part
