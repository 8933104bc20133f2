"""Texts that several drawings share: which split, whose loss, which statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from landscape.plots.style import short_names

MOST = 6  # results that a title names (ours)


def splits(results: Sequence[Any]) -> str:
    """The splits of the data that ``results`` were computed on.

    Args:
        results: objects with an attribute ``split``.

    Returns:
        "train", "train and test", or "data" where no split is known.
    """
    return " and ".join(dict.fromkeys(r.split for r in results if r.split)) or "data"


def loss_of(results: Sequence[Any]) -> str:
    """The name of the loss that ``results`` are about: "train loss", or "loss" where no split is known."""
    return f"{splits(results)} loss" if any(r.split for r in results) else "loss"


def split_names(results: Sequence[Any]) -> str:
    """The split of the losses in ``results``, or "mean" where it is unknown; several by panels."""
    if len({r.split for r in results}) > 1:
        return ", ".join(r.split or "?" for r in results)
    return results[0].split or "mean"


def interpolation_note(results: Sequence[Any]) -> str:
    """From how many exact points ``results`` are interpolated, and how well, after "; "; "" if none is."""
    notes = [r.interpolation() for r in results]
    return f"; {' / '.join(dict.fromkeys(n or 'all points exact' for n in notes))}" if any(notes) else ""


def shared_note(notes: Sequence[str]) -> tuple[str, list[str]]:
    """Split notes, one for each result, into a note for the whole figure and notes for its panels.

    Returns:
        (note of the figure, notes of the panels): a note that all results share belongs to the figure, notes
        that differ belong to the panels.
    """
    if len(set(notes)) == 1:
        return notes[0], [""] * len(notes)
    return "", list(notes)


def between(counts: Sequence[int]) -> str:
    """The smallest and the largest of ``counts`` as text."""
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def headline(results: Sequence[Any]) -> str:
    """The first row of each result's description: the title of a picture that has no other."""
    rows = [r.describe()[0] for r in results]
    labels = short_names([r.label for r in results]) if any(r.label for r in results) else [""] * len(rows)
    named: dict[str, list[str]] = {}
    for label, row in list(zip(labels, rows, strict=True))[:MOST]:
        named.setdefault(row.name, []).append(f"{label} {row.number}".strip())
    said = "; ".join(f"{name}: {', '.join(numbers)}" for name, numbers in named.items())
    more = f", … ({len(results)} in all)" if len(results) > MOST else ""
    notes = {row.note for row in rows}
    note = notes.pop() if len(notes) == 1 else ""
    first = said[0].upper() if said.split()[0].rstrip(":").isalpha() else said[0]  # no formula
    return f"{first}{said[1:]}{more}{f' ({note})' if note else ''}"


def samples_of(results: Sequence[Any]) -> str:
    """How many samples of which data, and which statistics of BatchNorm, if the model has it."""
    note = batchnorm_note(results[0]).strip() if hasattr(results[0], "batchnorm") else ""
    return f"{results[0].samples:,} samples of {splits(results)}{f', {note}' if note else ''}"


def batchnorm_note(result: Any) -> str:
    """A line that says which statistics BatchNorm used; "" for a model without BatchNorm.

    Args:
        result: a surface, a line, a Hessian grid or a spectrum (``batchnorm``, ``bn``, ``bn_samples``).
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
