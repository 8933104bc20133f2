"""Images that do not fit into memory: worker processes decode them during use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from landscape.core.errors import FailedError
from landscape.data.cache import file_stat
from landscape.data.images import decode
from landscape.problem.batches import STREAM_BATCH, Stream


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """x (3, H, W) float32, normalised per channel, and y, for each of ``files`` (path below root, label)."""

    def __init__(
        self, root: Path, files: list[tuple[str, int]], size: int, border: float, mean: Tensor, std: Tensor
    ) -> None:
        self.root, self.files, self.size, self.border = root, files, size, border
        self.mean, self.std = mean, std

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        pixels = torch.tensor(decode(self.root / path, self.size, self.border))
        return pixels.float().div_(255).sub_(self.mean).div_(self.std), label

    def fingerprint(self) -> str:
        """SHA-256 (hex) of names, labels and sizes of the files, and of the settings; not of the pixels."""
        digest = hashlib.sha256(repr((self.size, self.border, self.mean, self.std)).encode())
        for path, label in self.files:
            digest.update(f"\0{path}\0{label}\0{file_stat(self.root, path).st_size}".encode())
        return digest.hexdigest()


class ImageStream(Stream):
    """Batches (x (B, 3, H, W), y (B,)) of :class:`ImageFiles`, decoded in ``workers`` processes (0: in this).

    New workers start for each pass and each :meth:`gather`; the batches do not depend on their number.
    """

    def __init__(self, files: Dataset[tuple[Tensor, int]], samples: int, workers: int) -> None:
        self.files, self.samples, self.workers = files, samples, workers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._read(self.files)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        batches = list(self._read(Subset(self.files, indices.tolist())))
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def part(self, rows: slice) -> ImageStream:
        indices = range(self.samples)[rows]
        return ImageStream(Subset(self.files, indices), len(indices), self.workers)

    def _read(self, files: Dataset[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        # A separate generator: otherwise the workers' seeds would be drawn from PyTorch's global state.
        loader = DataLoader(files, STREAM_BATCH, num_workers=self.workers, generator=torch.Generator())
        try:
            yield from loader
        except FailedError as error:  # from a worker, its text is the worker's traceback
            raise FailedError(str(error).rsplit("FailedError: ", 1)[-1].strip()) from error
