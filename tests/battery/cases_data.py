"""Forms of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.battery.case import Case, Parts, chain, classes, net, warmed
from tests.battery.reference import joined, one_batch


def _data(name: str, wrap: Callable[[Tensor, Tensor], Any], **expected: Any) -> Case:
    """A chain with cross-entropy, on 23 samples as ``wrap`` makes data of them."""
    return Case(name, lambda: (chain(), F.cross_entropy, wrap(*classes())), **expected)


def parts_of(x: Tensor, y: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Ragged."""
    return parts_of(x, y, 10, 10, 3)


class Rows(Dataset[Any]):
    """Samples that ``make`` makes of (x, y)."""

    def __init__(
        self, x: Tensor, y: Tensor, make: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)
    ) -> None:
        self.x, self.y, self.make = x, y, make

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.make(self.x[i], self.y[i])


class Flow(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x, self.y, strict=True)


class Batches:
    """An iterable of one's own, no list."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.parts = batches(x, y)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self.parts


def dict_batches(loader: bool) -> Callable[[], Parts]:
    """Dicts with "labels", and a model that takes its input by name."""

    def build() -> Parts:
        model = net(lambda m, features: m.a(features), a=nn.Linear(4, 3))
        x, y = classes()
        if loader:
            rows = Rows(x, y, lambda a, b: {"features": a, "labels": b})
            return model, F.cross_entropy, DataLoader(rows, batch_size=10)
        return model, F.cross_entropy, {"features": x, "labels": y}

    return build


def _labeled(data: Any) -> tuple[Any, Any]:
    whole = dict(data) if isinstance(data, dict) else joined([dict(b) for b in data])
    return {k: v for k, v in whole.items() if k != "labels"}, whole["labels"]


def batchnorm_in_batches() -> Parts:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    x, y = torch.randn(11, 2, 6, 6), torch.randint(3, (11,))
    return warmed(model, x), F.cross_entropy, DataLoader(TensorDataset(x, y), batch_size=4)


def images_as_bytes() -> Parts:
    """uint8 images, which the model scales."""
    model = net(lambda m, x: m.a(x.flatten(1).to(m.a.weight) / 255), a=nn.Linear(16, 3))
    return model, F.cross_entropy, (torch.randint(256, (9, 4, 4), dtype=torch.uint8), torch.randint(3, (9,)))


def images_without_flatten() -> Parts:
    """A chain that acts on rows of pixels: outputs (N, H, 3), targets alike."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, F.mse_loss, (torch.randn(9, 2, 5), torch.randn(9, 2, 3))


def _drop_last(x: Tensor, y: Tensor) -> Any:
    return DataLoader(TensorDataset(x, y), batch_size=10, drop_last=True)


def _of_arrays(data: Any) -> tuple[Any, Any]:
    x, y = (torch.as_tensor(np.asarray(part)) for part in data)
    return x, y


def _of_dataset(data: Any) -> tuple[Any, Any]:
    samples = [data[i] for i in range(len(data))]
    return torch.stack([s[0] for s in samples]), torch.stack([torch.as_tensor(s[1]) for s in samples])


def _of_two_batches(data: Any) -> tuple[Any, Any]:
    return one_batch(list(data))


CASES = [
    _data("pair of tensors", lambda x, y: (x, y)),
    _data("list of two tensors", lambda x, y: [x, y], whole=lambda data: (data[0], data[1])),
    _data("pair, not contiguous", lambda x, y: (x.T.contiguous().T, y.repeat_interleave(2)[::2])),
    _data("tuple of three batches", lambda x, y: tuple(batches(x, y)), whole=_of_two_batches),
    _data("tuple of two batches", lambda x, y: tuple(parts_of(x, y, 20, 3)), refused="two batches"),
    _data("list of batches, ragged", batches),
    _data("list of one batch", lambda x, y: [(x, y)]),
    _data("lists as batches", lambda x, y: [[a, b] for a, b in batches(x, y)]),
    _data("iterable of one's own", Batches),
    _data("DataLoader, shuffled", lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)),
    _data("DataLoader, drop_last", _drop_last, whole=one_batch),
    _data("DataLoader without batches", lambda x, y: DataLoader(TensorDataset(x, y), batch_size=None), refused="batch"),
    _data("DataLoader of an iterable dataset", lambda x, y: DataLoader(Flow(x, y), batch_size=10)),
    _data("list of samples", lambda x, y: [(a, 1) for a in x], refused="DataLoader"),
    _data("list of dicts of numbers", lambda x, y: [{"x": [1.0, 2.0], "y": 1}], refused="DataLoader"),
    _data("generator", lambda x, y: (part for part in batches(x, y)), refused="iterator|once"),
    _data("one sample", lambda x, y: (x[:1], y[:1])),
    _data("no samples", lambda x, y: (x[:0], y[:0]), refused="no samples"),
    _data("tensors of unequal length", lambda x, y: (x, y[:-1]), refused="samples"),
    _data("numpy arrays", lambda x, y: (x.numpy(), y.numpy()), whole=_of_arrays),
    _data("numpy arrays in batches", lambda x, y: [(a.numpy(), b.numpy()) for a, b in batches(x, y)], whole=lambda data: joined([_of_arrays(b) for b in data])),
    _data("a Dataset", TensorDataset, whole=_of_dataset),
    _data("a Dataset of one's own", Rows, whole=_of_dataset),
    _data("int32 targets", lambda x, y: (x, y.int()), refused="(?i)int32|long|int64"),
    _data("one-hot integer targets", lambda x, y: (x, F.one_hot(y, 3)), refused="floating|probabilities|float|fit"),
    Case("dict of tensors", dict_batches(False), whole=_labeled),
    Case("DataLoader of dicts", dict_batches(True), whole=_labeled),
    Case("convolution with BatchNorm in batches", batchnorm_in_batches),
    Case("uint8 images", images_as_bytes),
    Case("chain on rows of images", images_without_flatten),
]  # fmt: skip
