"""What a result was computed from: an earlier result is resumed only if this is the same."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from landscape.problem.batches import strided
from landscape.problem.batchnorm import has_batchnorm
from landscape.problem.layout import as_array
from landscape.problem.losses import describe_loss
from landscape.problem.problem import Problem


class Setting(TypedDict):
    """The fields of a result that say what the numbers of a problem were computed with."""

    samples: int
    dtype: str
    batchnorm: bool
    bn: str
    bn_samples: int


def setting(problem: Problem) -> Setting:
    """The number of samples, the precision and BatchNorm's policy of a problem, as results keep them."""
    return {
        "samples": problem.samples,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "batchnorm": has_batchnorm(problem.model),
        "bn": problem.batchnorm.name,
        "bn_samples": problem.batchnorm.samples,
    }


def provenance(problem: Problem) -> tuple[str, ...]:
    """Lines such as "loss=…" on everything that L(θ) depends on besides θ: model, loss, data, penalty.

    Parts without a name, such as a lambda or the code of a model, show in "probe": the loss of a few samples
    at the centre and away from it.
    """
    model = problem.model
    trainable = {slot.name for slot in problem.layout.slots}
    state = model.state_dict(keep_vars=True).items()
    fixed = {name: t for name, t in state if name not in trainable and isinstance(t, Tensor)}
    digest = 0
    for name, tensor in sorted(fixed.items()):
        digest = zlib.crc32(name.encode(), digest)
        digest = zlib.crc32(as_array(strided(tensor)).tobytes(), digest)
    penalty = "" if problem.penalty is None else describe_loss(problem.penalty)
    return (
        f"model={type(model).__module__}.{type(model).__qualname__}, {problem.layout.size} parameters",
        f"buffers={digest:08x}",
        f"loss={describe_loss(problem.criterion)}{f', {problem.draws} draws' if problem.draws else ''}",
        f"penalty={penalty}, weight_decay={problem.weight_decay!r}",
        f"data={problem.data.fingerprint()}",
        f"terms={problem.data.terms!r}",
        f"probe={' '.join(f'{value:.17g}' for value in _probe_losses(problem))}",
    )


@torch.no_grad()
def _probe_losses(problem: Problem) -> list[float]:
    few = problem.on(problem.data.few())
    generator = torch.Generator().manual_seed(0)
    theta = problem.theta
    moved = theta + 0.1 * theta.abs().mean() * torch.randn(len(theta), generator=generator).to(theta)
    return [few.loss(at) for at in (theta, moved)]


def changed(old: Sequence[str], new: Sequence[str], dtype: torch.dtype) -> str:
    """The first difference between the lines ``old`` and ``new``, in words; "" for rounding of probes."""
    if len(old) != len(new):
        return "it does not say what it was computed from"
    for before, now in zip(old, new, strict=True):
        name, _, value = before.partition("=")
        other = now.partition("=")[2]
        if value == other:
            continue
        if name not in ("probe", "data"):
            return f"its {name} is {value} and not {other}"
        pairs = list(zip(value.split(), other.split(), strict=False))
        numbers = len(value.split()) == len(other.split()) and (name == "probe" or len(pairs) > 1)
        allowed = 1e-9 if name == "data" else 1000 * torch.finfo(dtype).eps
        if not numbers or not all(_near(float(a), float(b), allowed) for a, b in pairs):
            return "it is of other data" if name == "data" else "its loss at the same weights is another"
    return ""


def _near(a: float, b: float, allowed: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= allowed * max(abs(a), abs(b))
