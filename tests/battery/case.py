"""What one combination of the battery is, and small parts to build some from."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.battery.reference import one_batch

Parts = tuple[nn.Module, Any, Any]


@dataclass(frozen=True)
class Case:
    """One combination, and how it must end.

    ``build()`` gives (model, loss, data), the same at each call. ``options`` are those of Problem; with
    ``dtype`` None the model's own precision is asked for. ``refused``: a regular expression that the message
    must contain, and then nothing is computed; ``refused_hessian``: the loss, its gradient and the contour are
    right and whatever needs second derivatives is refused. ``differences``: PyTorch's own second derivative
    is missing or wrong, so the reference takes differences of gradients. ``whole``: the data as one
    batch, and ``plain`` the model that the reference takes, where they are not those of ``build()``.
    ``said``: a part of the ProblemWarning that is expected. ``inside``: a coarser precision that the model itself
    goes through, whatever its parameters have, and which tolerances then are of. ``accuracy``: (outputs,
    targets) -> the share that is right, where it is another task than the largest of several outputs, and
    NaN would do, too.
    """

    name: str
    build: Callable[[], Parts]
    refused: str = ""
    refused_hessian: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = torch.float64
    differences: bool = False
    whole: Callable[[Any], tuple[Any, Any]] = one_batch
    plain: Callable[[nn.Module], nn.Module] = lambda model: model
    said: str = ""
    inside: torch.dtype | None = None
    accuracy: Callable[[Any, Any], float] | None = None

    def parts(self) -> Parts:
        """``build()`` with random numbers of its own."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.build()


def net(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with this ``forward(self, x)`` and these attributes in order; tensors that are no parameters are buffers."""
    made = type(forward.__name__, (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        if type(part) is Tensor:
            made.register_buffer(name, part)
        else:
            setattr(made, name, part)
    return made


def module(**parts: Any) -> Callable[[Callable[..., Any]], nn.Module]:
    """:func:`net` as a decorator of ``forward``: ``@module(a=nn.Linear(4, 3))``."""
    return functools.partial(net, **parts)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def chain(inputs: int = 4, hidden: int = 5, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def classes(samples: int = 23, features: int = 4, count: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, features), torch.randint(count, (samples,))


def classifier(name: str, model: Callable[[], nn.Module], **expected: Any) -> Case:
    """``model`` of 4 features to 3 classes, with cross-entropy."""
    return Case(name, lambda: (model(), F.cross_entropy, classes()), **expected)


def images(samples: int = 9, channels: int = 2, size: int = 6, count: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, channels, size, size), torch.randint(count, (samples,))


def warmed(model: nn.Module, x: Tensor) -> nn.Module:
    """``model`` with running statistics that are not the initial ones."""
    with torch.no_grad():
        for _ in range(3):
            model(2 * x + 0.5)
    return model
