"""What all checks share: how they are run, refusals, equality of results and checkpoints, a tiny problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

#: What is checked -> the name of a check, which ``only`` takes -> the check, a function of the case.
CHECKS: dict[str, dict[str, Callable[[Any], None]]] = {}
#: Columns of the history that a clock gives.
CLOCK = ("wall_s", "samples_per_s", "wait_s")
#: Samples of the batches; they are not equal, as the last one of a loader is not.
SIZES = [9, 8, 7]


def run(kind: str, case: Any, only: str | None) -> None:
    """All checks of ``kind``, or that called ``only``; a failure says which check it was."""
    for name in CHECKS[kind] if only is None else [choose("only", only, CHECKS[kind])]:
        try:
            CHECKS[kind][name](case)
        except AssertionError as error:
            error.add_note(f"in the check '{name}' of landscape.testing.check_{kind}")
            raise


def require(condition: object, message: str) -> None:
    """AssertionError with ``message`` unless ``condition`` holds, with python -O, too."""
    if not condition:
        raise AssertionError(message)


def refuses(call: Callable[[Any], object], values: Mapping[str, Any], prefix: str = "") -> None:
    """``call({option: value})`` raises an InputError of one line that names both, for each of ``values``."""
    for option, value in values.items():
        try:
            call({option: value})
        except InputError as error:
            text, shown = str(error), str(value.get("name") if isinstance(value, dict) else value)
            named = prefix + option in text and shown in text and "\n" not in text
            require(named, f"{option} = {value!r} is not refused in one line with both: {text}")
        else:
            raise AssertionError(f"{option} = {value!r} is not refused")


@contextmanager
def lent(kind: registry.Registry, entry: Any, name: str) -> Iterator[str]:
    """The name of ``entry`` in a registry: itself if it is a name, or ``name`` while the block lasts."""
    kind.names()  # loads the room, which would otherwise add its entries to the copy
    own = kind._entries
    kind._entries = own if isinstance(entry, str) else {**own, name: entry}
    try:
        yield entry if isinstance(entry, str) else name
    finally:
        kind._entries = own


def same_result(one: Any, other: Any, rtol: float = 0.0, leave: tuple[str, ...] = ()) -> None:
    """All fields of two results but some are equal, numbers up to ``rtol``."""
    require(type(one) is type(other), f"{type(one).__name__} and {type(other).__name__}")
    for name in vars(one).keys() - {*leave}:
        a, b = getattr(one, name), getattr(other, name)
        if rtol and isinstance(a, np.ndarray | float):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, err_msg=name)
        else:
            np.testing.assert_equal(a, b, err_msg=name)


def same_bits(one: Checkpoint, other: Checkpoint) -> None:
    """Two checkpoints are equal to the bit in all but the clock's columns."""

    def values(of: Checkpoint) -> dict[str, Any]:
        tensors = {
            "": {"weights": of.weights},
            "optimizer/": of.optimizer,
            "rule/": of.rule,
            "shared/": of.shared,
        }
        found = {kind + name: t.cpu().numpy() for kind, group in tensors.items() for name, t in group.items()}
        return {**found, **{k: v for k, v in of.history.items() if k not in CLOCK}, "step": of.step}

    np.testing.assert_equal(values(one), values(other))


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
        form: "tensors"; "batches", a list of unequal ones; "dict" and "dict batches", with a model that
            computes its own loss. The loss is the same in all of them.
        norm: whether the network has BatchNorm, with statistics that are not the initial ones.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        x, y = torch.randn(24, 4).double(), torch.randint(3, (24,))
        layers = [nn.Linear(4, 3), *([nn.BatchNorm1d(3)] if norm else []), nn.Tanh(), nn.Linear(3, 3)]
        net = nn.Sequential(*layers).double()
        net(x)
    batches = list(zip(torch.split(x, SIZES), torch.split(y, SIZES), strict=True))
    if form.startswith("dict"):
        dicts = [{"x": a, "labels": b} for a, b in batches]
        return Problem(
            OwnLoss(net.eval()), None, dicts if "batches" in form else {"x": x, "labels": y}, device=device
        )
    data: Any = batches if form == "batches" else (x, y)
    return Problem(net.eval(), nn.functional.cross_entropy, data, device=device)
