"""Texts that several drawings share: which split, whose loss, which statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def splits(results: Sequence[Any]) -> str:
    """The splits of the data that ``results`` were computed on.

    Args:
        results: objects with an attribute ``split``.

    Returns:
        "train", "train and test", or "data" where no split is known.

    Example:
        >>> from types import SimpleNamespace as Result
        >>> splits([Result(split="train"), Result(split="test")])
        'train and test'
        >>> splits([Result(split="")])
        'data'
    """
    return " and ".join(dict.fromkeys(r.split for r in results if r.split)) or "data"


def loss_of(results: Sequence[Any]) -> str:
    """The name of the loss that ``results`` are about: "train loss", or "loss" where no split is known.

    Example:
        >>> from types import SimpleNamespace as Result
        >>> loss_of([Result(split="train")]), loss_of([Result(split="")])
        ('train loss', 'loss')
    """
    return f"{splits(results)} loss" if any(r.split for r in results) else "loss"


def split_names(results: Sequence[Any]) -> str:
    """The split of the losses in ``results``, or "mean" where it is unknown; several in the order of panels.

    Example:
        >>> from types import SimpleNamespace as Result
        >>> split_names([Result(split="train"), Result(split="")])
        'train, ?'
    """
    if len({r.split for r in results}) > 1:
        return ", ".join(r.split or "?" for r in results)
    return results[0].split or "mean"


def shared_note(notes: Sequence[str]) -> tuple[str, list[str]]:
    """Split notes, one for each result, into a note for the whole figure and notes for its panels.

    Returns:
        (note of the figure, notes of the panels): a note that all results share belongs to the figure, notes
        that differ belong to the panels.

    Example:
        >>> shared_note(["a", "a"]), shared_note(["a", "b"])
        (('a', ['', '']), ('', ['a', 'b']))
    """
    if len(set(notes)) == 1:
        return notes[0], [""] * len(notes)
    return "", list(notes)


def batchnorm_note(result: Any) -> str:
    """A line that says which statistics BatchNorm used; "" for a model without BatchNorm.

    Args:
        result: a surface, a line, a Hessian grid or a spectrum (``batchnorm``, ``bn``, ``bn_samples``).

    Example:
        >>> from types import SimpleNamespace as Result
        >>> batchnorm_note(Result(batchnorm=True, bn="recalibrate", bn_samples=1000))
        '\\nBatchNorm: from 1,000 samples a point'
    """
    if not result.batchnorm:
        return ""
    samples = result.bn_samples
    notes = {
        "center": "the centre's statistics",
        "recalibrate": f"from {samples:,} samples a point",
        "train": f"statistics of batches of {samples:,}" if samples else "statistics of each batch",
    }
    return f"\nBatchNorm: {notes.get(result.bn, result.bn)}"
