"""What all checks share: their list, refusals, equality of results and checkpoints, and the tiny problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.options import choose
from landscape.problem.problem import Problem

#: What is checked -> the names of its checks, which ``only`` takes.
CHECKS: dict[str, list[str]] = {}
#: Columns of the history that a clock gives.
CLOCK = ("wall_s", "samples_per_s", "wait_s")

Check = Callable[[Any], None]


def register(kind: str) -> Callable[[Check], Check]:
    """A decorator that adds a check, a function of the case, to those of ``kind``."""

    def add(check: Check) -> Check:
        _FUNCTIONS[kind, check.__name__] = check
        CHECKS.setdefault(kind, []).append(check.__name__)
        return check

    return add


_FUNCTIONS: dict[tuple[str, str], Check] = {}


def run(kind: str, case: Any, only: str | None) -> None:
    """All checks of ``kind``, or that called ``only``; a failure says which check it was."""
    for name in CHECKS[kind] if only is None else [choose("only", only, CHECKS[kind])]:
        try:
            _FUNCTIONS[kind, name](case)
        except AssertionError as error:
            error.add_note(f"in the check '{name}' of landscape.testing.check_{kind}")
            raise


def require(condition: object, message: str) -> None:
    """AssertionError with ``message`` unless ``condition`` holds, with python -O, too."""
    if not condition:
        raise AssertionError(message)


def refuses(option: str, value: object, call: Callable[[], object]) -> None:
    """``call`` raises an InputError of one line that names the option and the value."""
    try:
        call()
    except InputError as error:
        text = str(error)
        require("\n" not in text, f"the refusal of {option} = {value!r} has several lines: {text}")
        shown = str(value) in text or repr(value) in text
        require(option in text and shown, f"the refusal of {option} = {value!r} does not name them: {text}")
    else:
        raise AssertionError(f"{option} = {value!r} is not refused")


@contextmanager
def lent(kind: registry.Registry, entry: Any, name: str) -> Iterator[str]:
    """The name of ``entry`` in a registry: itself if it is a name, or ``name`` while the block lasts."""
    if isinstance(entry, str):
        yield entry
        return
    kind.names()  # loads the room, which would otherwise add its entries to the copy
    own, kind._entries = kind._entries, {**kind._entries, name: entry}
    try:
        yield name
    finally:
        kind._entries = own


def same_result(one: Any, other: Any, rtol: float = 0.0) -> None:
    """All fields of two results are equal, numbers up to ``rtol``."""
    require(type(one) is type(other), f"{type(one).__name__} and {type(other).__name__}")
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray | float) and rtol:
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=field.name)
        else:
            np.testing.assert_equal(a, b, err_msg=field.name)


def same_bits(a: Checkpoint, b: Checkpoint) -> None:
    """Two checkpoints are equal to the bit in all but the clock's columns."""
    np.testing.assert_equal((a.step, a.seed, a.diverged_at), (b.step, b.seed, b.diverged_at))
    for kind in ("optimizer", "rule", "shared", "buffers"):
        mine, theirs = getattr(a, kind), getattr(b, kind)
        require(mine.keys() == theirs.keys(), f"{kind}: {sorted(mine)} and {sorted(theirs)}")
        for name in mine:
            require(torch.equal(mine[name], theirs[name]), f"{kind}/{name} differs")
    require(torch.equal(a.weights, b.weights), "weights differ")
    require(a.history.keys() == b.history.keys(), "the columns differ")
    for name in a.history.keys() - set(CLOCK):
        np.testing.assert_array_equal(a.history[name], b.history[name], err_msg=name)


class OwnLoss(nn.Module):
    """A classifier that computes its loss itself, from keyword inputs with labels, as Hugging Face's do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def classification(device: str, form: str = "tensors", norm: bool = False) -> Problem:
    """24 samples of 3 classes and a network of 27 parameters, float64; the data as tensors or in other forms.

    Args:
        device: where it is.
        form: "tensors"; "batches", a list of 8 samples each; "dict" and "dict batches", with a model that
            computes its own loss. The loss is the same in all of them.
        norm: whether the network has BatchNorm.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        net = nn.Sequential(
            nn.Linear(4, 3), *([nn.BatchNorm1d(3)] if norm else []), nn.Tanh(), nn.Linear(3, 3)
        ).double()
    x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (24,), generator=generator)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.7)
        if norm:
            net(x)  # statistics that are not the initial ones
    net.eval()
    if form.startswith("dict"):
        data: Any = {"x": x, "labels": y}
        if form == "dict batches":
            data = [{"x": a, "labels": b} for a, b in zip(x.split(8), y.split(8), strict=True)]
        return Problem(OwnLoss(net), None, data, device=device)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    return Problem(net, nn.functional.cross_entropy, batches if form == "batches" else (x, y), device=device)
