"""The common form of data sets, synthetic ones, their division among learners, and a cache of slow arrays.

The cache is one HDF5 file each, checked when read, in the folder LANDSCAPE_CACHE, else landscape/ under
XDG_CACHE_HOME or ~/.cache. It can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from landscape.core import hdf5, registry
from landscape.core.errors import DataWarning, InputError, OperationError, warn_caller
from landscape.core.files import folder_lock
from landscape.core.hdf5 import Array
from landscape.core.options import SPLITS, AtLeastOne, AtLeastTwo, Count, choose
from landscape.core.progress import progress_bar
from landscape.problem.batches import HostStream, Stream
from landscape.problem.problem import Problem

Split = tuple[Tensor, Tensor] | Stream
Pair = tuple[Array, Array]  # inputs and targets


def samples_of(split: Split) -> int:
    """Return the number of samples of a split."""
    return split.samples if isinstance(split, Stream) else len(split[1])


@dataclass(frozen=True)
class Dataset:
    """A training set, a test set, and their loss.

    Attributes:
        train, test: (x, y) with the samples first; or a stream, which is read during use.
        loss: ``loss(outputs, targets)``, a mean over the samples, in nats for a cross-entropy.
        fingerprint: SHA-256 of the source arrays; an analysis compares it with that of the training data.
        classes: number of classes; 0 if the targets are no classes.
        augment: ``augment(x, generator)`` augments the inputs of a minibatch in training, and only there;
            None: no augmentation.
        columns: further values of the training samples by name, (N,) each, such as the speaker; the recipe's
            ``data.split = "by(NAME)"`` divides the samples by them.

    Example:
        >>> from landscape import data
        >>> digits = data.load("digits")
        >>> digits.classes, len(digits.test[1])
        (10, 360)
    """

    train: Split
    test: Split
    loss: Callable[[Tensor, Tensor], Tensor]
    fingerprint: str
    classes: int = 0
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        sizes = [f"{samples_of(self.split(name)):,} {name}" for name in SPLITS]
        classes = f"; {self.classes} classes" if self.classes else ""
        return f"Dataset({', '.join(sizes)}{classes})"

    def split(self, name: str) -> Split:
        """Return one of the two splits.

        Args:
            name: "train" or "test".

        Returns:
            (x, y), or a stream.

        Raises:
            InputError: for another name.

        Example:
            >>> from landscape import data
            >>> len(data.load("digits").split("test")[1])
            360
        """
        return getattr(self, choose("split", name, SPLITS))


def data_root(data_dir: str | Path | None) -> Path:
    """The folder with the data sets that are not bundled: ``data_dir``, else LANDSCAPE_DATA, else "data"."""
    return Path(data_dir or os.environ.get("LANDSCAPE_DATA") or "data")


def fingerprint(arrays: Iterable[Array]) -> str:
    """SHA-256 (hex) over dtype, shape and bytes of each array, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def missing(name: str, words: str) -> OperationError:
    """Return the error for a data set without its files; ``words`` name them and the remedy."""
    return OperationError(f"data {name}: {words}", give={"data_dir": ...}, otherwise="set LANDSCAPE_DATA")


def classification(train: Pair, test: Pair, scale: float, classes: int) -> Dataset:
    """Return a cross-entropy data set from arrays: x as float32 divided by ``scale``, y as int64."""

    def tensors(pair: Pair) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(np.ascontiguousarray(pair[0], dtype=np.float32)).div_(scale)
        return x, torch.from_numpy(np.ascontiguousarray(pair[1], dtype=np.int64))

    mark = fingerprint((*train, *test, np.array(scale)))
    return Dataset(tensors(train), tensors(test), torch.nn.functional.cross_entropy, mark, classes)


SCHEMA = "landscape.cache"
Arrays = dict[str, Array]
T = TypeVar("T")
R = TypeVar("R")


def cached(name: str, root: Path, files: Sequence[str], settings: str, make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of ``make()``. The cache keeps them for calls with the same files and settings.

    The name of the cache's file begins with ``name``. ``files`` are paths below ``root``; they count as the
    same if their paths, sizes and modification times are equal. ``settings`` is a text with all options of
    ``make``. If several processes start together, one computes the arrays and the others wait. A damaged
    cache file is replaced. If the cache cannot be written, there is a warning and nothing is cached.
    """
    digest = hashlib.sha256(settings.encode())
    for path in files:
        stat = file_stat(root, path)
        digest.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    with contextlib.ExitStack() as stack:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(folder_lock(folder))
        except (OSError, OperationError) as error:
            # The message of cache_folder()'s OperationError names LANDSCAPE_CACHE already.
            remedy = "; LANDSCAPE_CACHE may name another folder" if isinstance(error, OSError) else ""
            warn_caller(f"{error}{remedy}; nothing is cached", DataWarning)
            return _contiguous_arrays(make)
        cache_file = folder / f"{name}-{digest.hexdigest()[:24]}.h5"
        arrays = _read_cached(cache_file)
        if arrays is None:
            arrays = _contiguous_arrays(make)
            try:
                with hdf5.writing(cache_file, SCHEMA) as file:
                    for key, array in arrays.items():
                        file[key] = array
            except OperationError as error:
                warn_caller(f"{error}; LANDSCAPE_CACHE may name another folder", DataWarning)
    return arrays


def _contiguous_arrays(make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays contiguous, as a file has them: the order in memory changes a network's rounding."""
    return {key: np.ascontiguousarray(array) for key, array in make().items()}


def cache_folder() -> Path:
    """Return the folder of the cache; raise OperationError without a home folder and LANDSCAPE_CACHE."""
    folder = os.environ.get("LANDSCAPE_CACHE")
    if folder:
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "landscape")
    except RuntimeError as error:  # neither HOME nor an entry in the list of users, as in some containers
        raise OperationError("there is no home folder for the cache; set LANDSCAPE_CACHE") from error


def file_stat(root: Path, path: str) -> os.stat_result:
    """Return size and times of root/path; raise OperationError if it has none, such as a link to nothing."""
    try:
        return os.stat(os.path.join(root, path))
    except OSError as error:
        raise OperationError(f"{root / path}: cannot be read ({error.strerror})") from error


def _read_cached(path: Path) -> Arrays | None:
    """Return the arrays in ``path``; None if the file is missing or damaged."""
    try:
        with hdf5.reading(path, SCHEMA, warn=False) as file:
            return {key: np.asarray(file[key]) for key in file} if hdf5.has_checksum(path) else None
    except OperationError:
        return None


def in_threads(title: str, work: Callable[[T], R], items: Sequence[T], task: int = 1) -> list[R]:
    """Return ``work(item)`` for every item, in order, from one thread a core, under a progress bar.

    A thread receives ``task`` items at once. Threads, because most decoding releases the interpreter; that of
    32×32 JPEGs does not, so that 2 threads on 2 cores need 1.2 times the time of one, and 2 processes half of
    it (20,000 images: 2.5, 2.0 and 1.1 s). But processes would need a guard in every script that loads data.
    """
    results: list[R] = []
    groups = [items[i : i + task] for i in range(0, len(items), task)]
    with progress_bar(title) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for group in pool.map(lambda group: [work(item) for item in group], groups):
                results += group
                bar(len(results) / len(items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


@registry.data_sets.add("synthetic")
def synthetic(
    data_dir: str | Path | None = None,
    samples: AtLeastTwo = 2000,
    dimension: AtLeastTwo = 20,
    classes: AtLeastTwo = 4,
    separation: float = 2.0,
    imbalance: AtLeastOne = 1.0,
    seed: int = 0,
) -> Dataset:
    """Gaussian mixture: class c is N(``separation``·m_c, I), with a vector m_c drawn from N(0, I/dimension).

    There are half as many test samples as training samples. ``samples``, ``dimension`` and ``classes`` are at
    least 2. ``data_dir`` is not used: every data set takes this parameter.

    Args:
        samples: Size of the training set. Unit: samples. Source: our choice; trains in seconds.
        dimension: Number of inputs. Source: our choice.
        classes: Number of classes. Source: our choice.
        separation: The factor of the vectors m_c in the means of the classes. Source: our choice.
        imbalance: The frequency of class 0 divided by the frequency of the last class; frequencies fall by a
            constant factor from class to class. Source: our choice.
        seed: Seed of the draws of the vectors m_c, labels and inputs. Source: our choice.
    """
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(classes, dimension)) * separation / np.sqrt(dimension)
    frequencies = imbalance ** -(np.arange(classes) / (classes - 1))  # relative to class 0
    sample_count = samples + samples // 2
    labels = rng.choice(classes, size=sample_count, p=frequencies / frequencies.sum())
    x = means[labels] + rng.normal(size=(sample_count, dimension))
    train, test = (x[:samples], labels[:samples]), (x[samples:], labels[samples:])
    return classification(train, test, scale=1.0, classes=classes)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of outputs that are losses themselves; ``targets`` are ignored."""
    return outputs.mean()


@registry.data_sets.add("quadratic")
def quadratic(
    data_dir: str | Path | None = None,
    dimension: Count = 4,
    samples: AtLeastTwo = 1000,
    curvature_std: float = 0.0,
    gradient_std: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Samples x_i = (s_i, b_i) for the model "quadratic"; the training set and the test set are equal.

    The number s_i multiplies the model's Hessian, and the vector b_i (P,) is added to its gradient. Over the
    samples, s_i has the mean 1, and b_i the mean 0. Means and standard deviations are exact, up to rounding.

    Args:
        dimension: Number P of weights. Source: our choice.
        samples: Size of the set. Unit: samples. Source: our choice.
        curvature_std: Standard deviation of s_i over all samples. Source: our choice.
        gradient_std: Standard deviation of b_i over all samples, in each coordinate. Source: our choice.
        seed: Seed of the draws of the samples. Source: our choice.
    """
    rng = np.random.default_rng(seed)
    draws = rng.normal(size=(samples, 1 + dimension))
    standardized = (draws - draws.mean(0)) / draws.std(0)
    means = [1.0] + [0.0] * dimension  # of s_i, then of the entries of b_i
    stds = [curvature_std] + [gradient_std] * dimension
    array = standardized * stds + means
    x, y = torch.from_numpy(array), torch.zeros(samples)
    return Dataset((x, y), (x, y), mean_output, fingerprint((array,)))


IID = "iid"
FORMS = "iid, dirichlet(ALPHA), labels(COUNT), sizes(SHARE, …) with the sum 1, by(COLUMN)"
LABEL = "label"
# Draws of dirichlet(…) before it is given up (our choice): each takes some milliseconds.
TRIES = 1000
#: Names in a checkpoint of the tensors of :class:`Parts`.
NAMES = "split.learner", "split.counts", "split.labels"


@dataclass(frozen=True)
class Division:
    """A way to divide the training set.

    Attributes:
        text: the text in the recipe.
        kind: "iid", "dirichlet", "labels", "sizes" or "by".
        numbers: the numbers in brackets.
        column: the name in the brackets of "by".
    """

    text: str
    kind: str
    numbers: tuple[float, ...] = ()
    column: str = ""

    def refused(self, reason: str) -> InputError:
        """Return the error for a division that the data does not allow."""
        return InputError(f"data.split: '{self.text}' is not allowed, {reason}")


def parse(text: str, learners: int) -> Division:
    """Return the division that ``text`` describes; only checks that need no data are made.

    Args:
        text: the key ``data.split`` of a recipe, such as "iid"; FORMS lists what is allowed.
        learners: the number of learners.

    Raises:
        InputError: the text has another form, or numbers that are not allowed.

    Example:
        >>> parse("sizes(0.5, 0.5)", 2).numbers
        (0.5, 0.5)
    """
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text.strip())
    kind, argument = match.groups() if match else ("", None)
    if kind == IID and argument is None:
        return Division(text, IID)
    if kind == "by" and argument and argument.strip():
        return Division(text, kind, column=argument.strip())
    try:
        numbers = tuple(float(number) for number in (argument or "").split(","))
    except ValueError:
        numbers = ()
    needed_count = learners if kind == "sizes" else 1
    is_allowed = kind in ("dirichlet", "labels", "sizes") and len(numbers) == needed_count
    is_allowed = is_allowed and all(0 < number < math.inf for number in numbers)
    if is_allowed and kind == "sizes":
        is_allowed = abs(sum(numbers) - 1) <= 1e-6  # our choice: shares may be rounded, as 0.333333 is
    elif is_allowed and kind == "labels":
        is_allowed = numbers[0].is_integer()
    if not is_allowed:
        raise InputError(f"data.split: '{text}' is not allowed (allowed: {FORMS}; n = {learners})")
    return Division(text, kind, numbers)


@dataclass(frozen=True)
class Parts:
    """The division of a training set of N samples among n learners.

    Attributes:
        division: the description of the division.
        learner: (N,) int32, the learner of each sample.
        counts: (n, labels) int64, the number of samples by learner and label.
        labels: (labels,) int64, the labels in the set; [0] for samples without labels.
    """

    division: Division
    learner: Tensor
    counts: Tensor
    labels: Tensor

    @cached_property
    def indices(self) -> list[Tensor]:
        """The indices of each learner's samples, in increasing order."""
        return [torch.nonzero(self.learner == j).flatten() for j in range(len(self.counts))]

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint, by name."""
        return dict(zip(NAMES, (self.learner, self.counts, self.labels), strict=True))

    @classmethod
    def restored(cls, division: Division, shared: Mapping[str, Tensor], learners: int, samples: int) -> Parts:
        """Return the parts in a checkpoint; raise OperationError if they do not fit the run."""
        parts = cls(division, *(shared[name].cpu() for name in NAMES)) if {*NAMES} <= {*shared} else None
        if parts is None or parts.learner.shape != (samples,) or len(parts.counts) != learners:
            words = f"it lacks the parts of data.split '{division.text}' ({NAMES[0]})"
            raise OperationError(f"checkpoint: {words}")
        sizes = torch.tensor([len(part) for part in parts.indices])
        if int(sizes.sum()) != samples or not torch.equal(sizes, parts.counts.sum(1)) or not sizes.all():
            raise OperationError(f"checkpoint: /shared/{NAMES[0]} is no division of the training set")
        return parts

    @classmethod
    def drawn(
        cls, division: Division, problem: Problem, columns: Mapping[str, Any], learners: int, batch: int,
        seed: int,
    ) -> Parts:  # fmt: skip
        """Divide the training set of ``problem`` into parts of at least ``batch`` samples.

        Args:
            division: the description of the division; not "iid".
            problem: the problem on the training set.
            columns: name -> further values of the samples (N,), such as their speakers.
            learners: the number of learners.
            batch: the number of samples in a learner's minibatch.
            seed: the seed of all draws.

        Raises:
            InputError: the samples lack the column or labels, or a part is smaller than ``batch``.
        """
        all_columns = _columns(problem) | {name: np.asarray(values) for name, values in columns.items()}
        labels = all_columns.get(LABEL)
        samples, rng = problem.samples, np.random.default_rng(seed)
        # ``owners`` (N,): the learner that gets each sample.
        if division.kind == "sizes":
            boundaries = np.rint(np.cumsum(division.numbers) * samples).astype(int)[:-1]
            indices_of_learner = np.split(rng.permutation(samples), boundaries)
            owners = _learner_of_sample(enumerate(indices_of_learner), samples)
        elif division.kind == "by":
            owners = _by_value(division, _column(division, all_columns, samples), learners)
        elif labels is None:
            reason = "each target must be one whole number, the label; sizes(…) needs no labels"
            raise division.refused(reason)
        elif division.kind == "labels":
            owners = _learner_of_sample(_by_labels(division, labels, learners, rng), samples)
        else:
            owners = _dirichlet(division, labels, learners, batch, rng)
        sizes = np.bincount(owners, minlength=learners)
        if sizes.min() < batch:
            words = f"learner {sizes.argmin()} gets {sizes.min()} of {samples} samples"
            raise division.refused(f"{words}, fewer than its minibatch of {batch}; use a smaller batch")
        if labels is None:  # all samples then count as one class
            labels = np.zeros(samples, int)
        different_labels, label_index = np.unique(labels, return_inverse=True)
        counts = np.zeros((learners, len(different_labels)), np.int64)
        np.add.at(counts, (owners, label_index), 1)
        owners_32 = torch.from_numpy(owners.astype(np.int32))
        return cls(division, owners_32, torch.from_numpy(counts), torch.from_numpy(different_labels))


def _columns(problem: Problem) -> dict[str, Array]:
    """Return the columns (N,) of whole numbers: the label, and inputs or targets by name."""
    data, trees = problem.data, dict[str, Any]()
    x, y = data.resident or (None, getattr(data.batches, "labels", None))
    if isinstance(data.batches, HostStream):
        x, y = data.batches.x, data.batches.y
    for tree in (x, y):
        trees |= tree if isinstance(tree, Mapping) else {}
    trees[LABEL] = y
    vectors = {n: t for n, t in trees.items() if isinstance(t, Tensor) and t.shape == (problem.samples,)}
    return {name: t.cpu().numpy() for name, t in vectors.items() if not t.is_floating_point()}


def _column(division: Division, columns: Mapping[str, Array], samples: int) -> Array:
    """Return the values (N,) of the column by which the samples are divided."""
    values = columns.get(division.column)
    if values is None or values.shape != (samples,):
        why = "no such column" if values is None else f"one of shape {values.shape}, not ({samples},)"
        allowed = ", ".join(columns) or "none, it has no column"
        raise division.refused(f"the data has {why} (allowed: {allowed})")
    return values


def _learner_of_sample(parts: Iterable[tuple[int, Array]], samples: int) -> Array:
    """Return (N,), the learner of each sample, from pairs of a learner and the indices of its samples."""
    learner_of_sample = np.empty(samples, int)
    for learner, indices in parts:
        learner_of_sample[indices] = learner
    return learner_of_sample


def _by_value(division: Division, column: Array, learners: int) -> Array:
    """Return (N,), the learner of each sample, by the values of a column.

    The values, the most frequent first, go to the learner with the fewest samples so far.
    """
    values, value_index, sizes = np.unique(column, return_inverse=True, return_counts=True)
    if len(values) < learners:
        raise division.refused(f"the column has {len(values)} different values for {learners} learners")
    owner, samples_of_learner = np.empty(len(values), int), np.zeros(learners, int)
    for k in np.argsort(-sizes, kind="stable"):
        owner[k] = samples_of_learner.argmin()
        samples_of_learner[owner[k]] += sizes[k]
    return owner[value_index]


def _by_labels(
    division: Division, labels: Array, learners: int, rng: np.random.Generator
) -> Iterator[tuple[int, Array]]:
    """Yield (learner, indices of samples): COUNT labels for each learner, each label divided equally."""
    values, count = np.unique(labels), int(division.numbers[0])
    if not len(values) / learners <= count <= len(values):
        minimum = math.ceil(len(values) / learners)
        raise division.refused(f"{learners} learners can have from {minimum} to {len(values)} labels each")
    for position, label in enumerate(rng.permutation(values)):
        label_learners = [j for j in range(learners) if (position - j * count) % len(values) < count]
        members = rng.permutation(np.flatnonzero(labels == label))
        yield from zip(label_learners, np.array_split(members, len(label_learners)), strict=True)


def _dirichlet(
    division: Division, labels: Array, learners: int, batch: int, rng: np.random.Generator
) -> Array:
    """Return (N,), the learner of each sample, with shares ~ Dirichlet(α, …, α) of each label.

    The shares are drawn again until no part has fewer than ``batch`` samples.

    Hsu et al. 2019 (arXiv 1909.06335) draw the labels' shares of a learner, whose part has a fixed size; this
    form, by label, is that of Yurochkin et al. 2019 and Li et al. 2022 (arXiv 2102.02079), in which each
    sample is used and sizes differ.
    """
    members = [np.flatnonzero(labels == kind) for kind in np.unique(labels)]
    alphas = np.full(learners, division.numbers[0])

    def draw() -> Iterator[tuple[int, Array]]:
        for members_of_label in members:
            ends = np.cumsum(rng.dirichlet(alphas))[:-1] * len(members_of_label)
            yield from enumerate(np.split(rng.permutation(members_of_label), ends.astype(int)))

    for _ in range(TRIES):
        owner = _learner_of_sample(draw(), len(labels))
        if np.bincount(owner, minlength=learners).min() >= batch:
            return owner
    raise division.refused(f"a learner gets fewer than {batch} samples; use a smaller batch")
