"""What a first use is, and the loss that it means: written down without the package."""

from __future__ import annotations

import contextlib
import copy
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset, default_collate

from tests.battery.reference import Reference, joined, one_batch

Parts = tuple[nn.Module, Any, Any]
Total = Callable[[nn.Module, Any, Any], Tensor]

# What a :class:`landscape.ProblemWarning` must say: how a loss is read that could be read in several ways.
COUNTED = r"\bterms\b"
TOGETHER = r"at once|together|all samples"
BATCHES = r"mean over the batches|each batch|batches"
EITHER = f"{COUNTED}|{TOGETHER}|{BATCHES}"


def output_of(model: nn.Module, x: Any) -> Any:
    """What the model gives for x: a dict is passed by name, a tuple or list by position."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def once(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """The loss of all data in one call, ``loss(model(x), y)``; batches are joined first."""
    if isinstance(data, list) and isinstance(data[0], Mapping):
        data = joined([dict(batch) for batch in data])
    if isinstance(data, Mapping):
        if loss is None:
            value: Tensor = model(**data).loss
            return value
        x = {key: value for key, value in data.items() if key != "labels"}
        return loss(model(**x), data["labels"])
    x, y = one_batch(data)
    return loss(output_of(model, x), y)


def per_batch(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """The mean over the batches, each of which counts the same."""
    values = [once(model, loss, (x, y)) for x, y in data]
    return torch.stack(values).mean()


def by_size(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """The mean over all samples, of batches that cannot be joined."""
    return sum(len(y) * once(model, loss, (x, y)) for x, y in data) / sum(len(y) for _, y in data)


def by_count(count: Callable[[Any, Any], Any]) -> Total:
    """The mean over all terms, of which a batch (x, y) has ``count(x, y)``; one without any counts nothing."""

    def total(model: nn.Module, loss: Any, data: Any) -> Tensor:
        numbers = [float(count(x, y)) for x, y in data]
        values = [n * once(model, loss, batch) for n, batch in zip(numbers, data, strict=True) if n > 0]
        return torch.stack(values).sum() / sum(numbers)

    return total


def seeded(model: nn.Module, loss: Any, data: Any) -> Tensor:
    """The loss of all data in one call, with the random numbers of seed 0."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        return once(model, loss, data)


@dataclass(frozen=True, eq=False)
class Use:
    """One first use: a model, a loss and data as the documentation of its field writes them.

    ``build()`` gives (model, loss, data), the same at each call. ``expected``: "right", "refused", or
    "refused_hessian" (contours are right, second derivatives are refused); ``why`` then says why that is
    legitimate, and ``words`` is a regular expression that the refusal contains. ``undefined``: it leaves open
    which loss is meant, or has no second derivative, so that no number would be right. ``says``: one that a
    ProblemWarning contains; with "" there must be none, with None anything may be said. ``source``: the public
    repository and the file whose script it follows, "owner/name: path". ``small``: its batches have one to three
    samples. ``other``: another reading of the loss of several batches, which is right, too, where a line says
    how it is read. ``total`` is the loss in float64 of the user's own
    model, of all data, and ``after`` that of what the remedy makes, where it is another. ``names``: what a
    remedy may use beside model, loss and data; ``remedied``: the refusal must name one. ``random``: the loss draws random numbers; float64 is then the
    default precision where numbers are compared, so that both draw the same. ``differences``: PyTorch's own
    second derivative is missing or wrong. ``inside``: a coarser precision that
    the model goes through by itself, whatever its parameters have.
    """

    name: str
    title: str
    theme: str
    build: Callable[[], Parts]
    expected: str = "right"
    undefined: bool = False
    why: str = ""
    words: str = ""
    says: str | None = ""
    source: str = ""
    small: bool = False
    total: Total = once
    other: Total | None = None
    after: Total | None = None
    names: dict[str, Any] = field(default_factory=dict)
    remedied: bool = False
    random: bool = False
    differences: bool = False
    inside: torch.dtype | None = None

    @property
    def id(self) -> str:
        return f"{self.theme.replace(' ', '-')}-{self.name}"

    def parts(self) -> Parts:
        """``build()`` with random numbers of its own."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.build()

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Where a random use is made and evaluated to compare its numbers: float64 by default."""
        with default_dtype(torch.float64) if self.random else contextlib.nullcontext():
            yield


class Theme(list[Use]):
    """A list of uses; ``@theme("title", …)`` adds the function that builds one, which is right.

    Uses of one expression are rows at the end of a theme's file, ``theme("title", name="name")(lambda: …)``.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __call__(
        self, title: str, name: str = "", **expected: Any
    ) -> Callable[[Callable[[], Parts]], Callable[[], Parts]]:
        def add(build: Callable[[], Parts]) -> Callable[[], Parts]:
            self.append(Use(name or build.__name__, title, self.name, build, **expected))
            return build

        return add

    def refused(self, title: str, why: str, words: str, **expected: Any) -> Any:
        return self(title, expected="refused", why=why, words=words, **expected)

    def undefined(self, title: str, why: str, words: str, **expected: Any) -> Any:
        """It leaves open which loss is meant."""
        return self.refused(title, why, words, undefined=True, **expected)

    def random(self, title: str, why: str, **expected: Any) -> Any:
        """The loss draws random numbers, in eval mode, too."""
        return self.undefined(title, why, "random", random=True, remedied=True, total=seeded, **expected)

    def no_hessian(self, title: str, why: str, words: str = "derivative", **expected: Any) -> Any:
        """Gradients are not those of the loss's value, so that there is no second derivative."""
        return self(title, expected="refused_hessian", undefined=True, why=why, words=words, **expected)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_float64(tree: Any) -> Any:
    """``tree`` in double precision; a tensor that is in it twice stays one, and leaves stay leaves."""
    made: dict[int, Tensor] = {}

    def one(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        if id(t) not in made:
            made[id(t)] = t.detach().double().requires_grad_(t.requires_grad)
        return made[id(t)]

    def walk(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return one(tree)
        if isinstance(tree, Mapping):
            return {key: walk(value) for key, value in tree.items()}
        if isinstance(tree, (tuple, list)):
            return type(tree)(walk(value) for value in tree)
        if hasattr(tree, "__dict__") and not isinstance(tree, (type, nn.Module)):  # a graph as an object
            tree = copy.copy(tree)
            vars(tree).update({key: walk(value) for key, value in vars(tree).items()})
        return tree

    return walk(tree)


def in_memory(data: Any) -> Any:
    """``data`` as tensors: a loader as its list of batches, a data set as one batch, arrays as tensors."""
    if isinstance(data, Dataset):
        batch = default_collate([data[i] for i in range(len(data))])  # type: ignore[arg-type]
        return batch if isinstance(batch, Mapping) else tuple(batch)
    if isinstance(data, (tuple, Mapping)) or (isinstance(data, list) and isinstance(data[0], Tensor)):
        return tuple(map(torch.as_tensor, data)) if _arrays(data) else data
    return [batch if isinstance(batch, Mapping) else tuple(batch) for batch in data]


def _arrays(data: Any) -> bool:
    return isinstance(data, tuple) and all(hasattr(part, "__array__") for part in data)


# Step of the differences of the loss along a unit vector: their errors are STEP² times a fourth derivative, and
# rounding, 1e-16 / STEP² (ours). The share by which derivatives may then differ from them.
STEP, SHARE = 1e-5, 1e-3
AWAY = 1e-3


class Truth(Reference):
    """The total loss of a use in float64 as a function of θ: plain autograd in the user's own module."""

    def __init__(self, use: Use, total: Total) -> None:
        with use.precision():
            model, loss, data = use.parts()
            data = in_float64(in_memory(data))
        super().__init__(model, None, None, None)
        of = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
        self.total = lambda: total(self.model, of, data)
        self.differences = use.differences
        self.padding = torch.cat([self._padding_of(p).flatten() for p in self.parameters])

    def _padding_of(self, p: Tensor) -> Tensor:
        """Where an embedding's row of padding is, which training leaves as it is: no direction of θ."""
        mask = torch.zeros_like(p, dtype=torch.bool)
        for m in self.model.modules():
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.weight is p and m.padding_idx is not None:
                mask[m.padding_idx] = True
        return mask

    def _value(self, x: Any = None, y: Any = None) -> Tensor:
        with default_dtype(torch.float64):
            return self.total()

    def loss(self, theta: Tensor) -> float:
        """With gradients recorded: a loss may differentiate by itself."""
        self.load(theta)
        with torch.enable_grad():
            return float(self._value().detach())

    def not_of_the_loss(self) -> str:
        """Whether gradient and Hessian of automatic differentiation are not what the loss differs by.

        They are not where something is detached. A direction may cross a kink, so that some are tried, and at
        weights away from the center, where units may be exactly at theirs.
        """
        generator, found = torch.Generator().manual_seed(0), ""
        for _ in range(3):
            away, v = torch.randn(2, self.size, generator=generator, dtype=torch.float64).masked_fill(
                self.padding, 0.0
            )
            found = self._differs_along(self.center + AWAY * away, v / v.norm())
            if not found:
                break
        return found

    def _differs_along(self, theta: Tensor, v: Tensor) -> str:
        ahead, here, behind = (self.loss(theta + t * v) for t in (STEP, 0.0, -STEP))
        slope, rounding = (ahead - behind) / (2 * STEP), 1e-14 * max(abs(here), 1e-3) / STEP
        got = float(self.gradient(theta) @ v)
        if not abs(got - slope) <= SHARE * max(abs(slope), abs(got)) + rounding:
            return f"the gradient of automatic differentiation is not that of the loss: {got:.6g}, but {slope:.6g}"
        curvature = (ahead - 2 * here + behind) / STEP**2
        product = self._product(theta, v)
        got, scale = float(product @ v), float(product.norm())
        if not abs(got - curvature) <= SHARE * scale + 4 * rounding / STEP:
            return f"the Hessian of automatic differentiation is not that of the loss: {got:.6g}, but {curvature:.6g}"
        return ""

    def _product(self, theta: Tensor, v: Tensor) -> Tensor:
        """∇²L v (P,), by differences of gradients where PyTorch has no second derivative."""
        if self.differences:
            return (self.gradient(theta + STEP * v) - self.gradient(theta - STEP * v)) / (2 * STEP)
        self.load(theta)
        with sdpa_kernel(SDPBackend.MATH):
            parts = torch.autograd.grad(
                self._value(), self.parameters, create_graph=True, materialize_grads=True
            )
            slope = torch.cat([p.flatten() for p in parts]) @ v
            if not slope.requires_grad:
                return torch.zeros_like(theta)
            parts = torch.autograd.grad(slope, self.parameters, materialize_grads=True)
        return torch.cat([p.flatten() for p in parts])
