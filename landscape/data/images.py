"""Images by name: the bundled digits, MNIST and its relatives, CIFAR, and your own in folders."""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torch.utils.data import Dataset as Samples

from landscape.core import registry
from landscape.core.errors import InputError, OperationError
from landscape.core.files import open_regular, read_regular
from landscape.core.hdf5 import Array
from landscape.core.options import Natural, Within
from landscape.data import base
from landscape.data.base import Dataset, Pair
from landscape.data.download import FILES, SOURCES, copies
from landscape.problem.batches import STREAM_BATCH, Stream


def augment(x: Tensor, generator: torch.Generator, padding: int = 4, fill: Tensor | float = 0.0) -> Tensor:
    """Images (B, C, H, W), each padded by ``padding``, cropped to H × W at random, and half of them flipped.

    Crops with 4 pixels of padding and horizontal flips are CIFAR's usual augmentation (He et al. 2016,
    section 4.2). ``fill`` is what the padding holds, a number or one a channel. All is drawn from
    ``generator``, on the CPU, so that a device does not change the draw; ``x`` itself is not changed.
    """
    b, c, h, w = x.shape
    corner = torch.randint(2 * padding + 1, (2, b, 1), generator=generator)
    flip = torch.randint(2, (b, 1), generator=generator).bool()
    rows, columns = corner[0] + torch.arange(h), corner[1] + torch.arange(w)  # (B, H), (B, W)
    columns = torch.where(flip, columns.flip(1), columns).to(x.device)
    padded = x.new_empty(b, c, h + 2 * padding, w + 2 * padding)
    padded[:] = torch.as_tensor(fill, dtype=x.dtype, device=x.device).view(-1, 1, 1)
    padded[:, :, padding : padding + h, padding : padding + w] = x
    sample = torch.arange(b, device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[:, None, None]
    return padded[sample, channel, rows.to(x.device)[:, None, :, None], columns[:, None, None, :]]


# Allowed formats, whatever the name of the file.
FORMATS = ("JPEG", "PNG")
# Largest size of one file in bytes and pixels (our choice: half of Pillow's limit, far above inputs of
# networks). CIFAR-100's largest file has 154 million bytes.
MAX_BYTES, MAX_PIXELS = 1 << 28, 1 << 25


def image_set(train: Pair, test: Pair, classes: int, normalize: bool, augment: bool) -> Dataset:
    """A cross-entropy data set from uint8 images (N, C, H, W) and labels (N,).

    Pixels become float32 in [0, 1].

    Args:
        normalize: Subtract the training set's mean from each channel and divide by its standard deviation.
            Source: DPSGD-2020, section 4.1.
        augment: Crop and flip minibatches in training, see :func:`crops_and_flips`. Source: our choice; off,
            since analyses are of the data as it is.
    """
    channels = train[0].shape[1]
    mean, std = channel_moments(train[0]) if normalize else (np.zeros(channels), np.ones(channels))
    center, scale = ((torch.from_numpy(v).float().view(-1, 1, 1)) for v in (mean, std))

    def tensors(pair: Pair) -> base.Split:
        x = torch.from_numpy(pair[0]).float().div_(255).sub_(center).div_(scale)
        return x, torch.from_numpy(pair[1].astype(np.int64))

    mark, loss = base.fingerprint((*train, *test, mean, std)), torch.nn.functional.cross_entropy
    crops = crops_and_flips(train[0].shape[2], center, scale) if augment else None
    return Dataset(tensors(train), tensors(test), loss, mark, classes, crops)


def channel_moments(images: Array) -> tuple[Array, Array]:
    """(mean, standard deviation) (C,) float64 of pixels / 255; from integer sums, so exact and repeatable."""
    total = np.zeros(images.shape[1], np.uint64)
    squares = np.zeros_like(total)
    for part in np.array_split(images, -(-len(images) // 1000)):
        wide = part.astype(np.uint32)
        total += wide.sum((0, 2, 3), dtype=np.uint64)
        squares += (wide * wide).sum((0, 2, 3), dtype=np.uint64)
    count = images.size // images.shape[1]
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return mean / 255, np.where(std == 0, 1.0, std / 255)


def crops_and_flips(height: int, mean: Tensor, std: Tensor) -> Callable[[Tensor, torch.Generator], Tensor]:
    """:func:`augment` for images normalized so: the padding is black, an eighth of ``height``.

    That is CIFAR's 4 pixels of 32 (He et al. 2016, section 4.2); the same share for other sizes is ours.
    """
    return functools.partial(augment, padding=height // 8, fill=-mean / std)


def decode(path: Path, size: int, border: float) -> Array:
    """uint8 (3, H, W) of one image; ``size`` not 0: its middle, scaled to size × size, see image_folder."""
    try:
        # For some other formats, such as EPS, Pillow would start programs.
        with open_regular(path, MAX_BYTES) as file, Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise OperationError(f"{path}: has {image.size} pixels, at most {MAX_PIXELS:,} are read")
            whole = image.convert("RGB")
            if size and (border or whole.size != (size, size)):
                whole = ImageOps.fit(whole, (size, size), Image.Resampling.BILINEAR, bleed=border)
            return np.asarray(whole).transpose(2, 0, 1)
    except OperationError:
        raise
    except Exception as error:  # PIL's decoders raise errors of many kinds for damaged files
        words = " ".join(str(error).split())
        raise OperationError(f"{path}: cannot be decoded as an image ({words})") from error


class ImageFiles(Samples[tuple[Tensor, int]]):
    """x (3, H, W) float32, normalized per channel, and y, for each of ``files`` (path below root, label)."""

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
            digest.update(f"\0{path}\0{label}\0{base.file_stat(self.root, path).st_size}".encode())
        return digest.hexdigest()


class ImageStream(Stream):
    """Batches (x (B, 3, H, W), y (B,)) of :class:`ImageFiles`, decoded in ``workers`` processes (0: in this).

    New workers start for each pass and each :meth:`gather`; the batches do not depend on their number.
    """

    labels: Tensor

    def __init__(self, files: Samples[tuple[Tensor, int]], labels: Tensor, workers: int) -> None:
        self.files, self.labels, self.samples, self.workers = files, labels, len(labels), workers

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._read(self.files)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        batches = list(self._read(Subset(self.files, indices.tolist())))
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def part(self, rows: slice) -> ImageStream:
        indices = range(self.samples)[rows]
        return ImageStream(Subset(self.files, indices), self.labels[rows], self.workers)

    def _read(self, files: Samples[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        # A separate generator: otherwise the workers' seeds would be drawn from PyTorch's global state.
        loader = DataLoader(files, STREAM_BATCH, num_workers=self.workers, generator=torch.Generator())
        try:
            yield from loader
        except OperationError as error:  # from a worker, its text is the worker's traceback
            raise OperationError(str(error).rsplit("OperationError: ", 1)[-1].strip()) from error


SUFFIXES = (".jpg", ".jpeg", ".png")
# Files that one task decodes: few enough for a smooth progress bar, many enough that tasks cost nothing.
TASK = 200
# Means and standard deviations of ImageNet's channels, the usual values.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def listing(root: Path) -> tuple[list[str], dict[str, list[tuple[str, int]]]]:
    """Return the classes and files of root/train/CLASS/*.jpg|jpeg|png and root/test/CLASS/….

    Classes are sorted by name. The files of a split are pairs (path below root, label), in a fixed random
    order, so that consecutive batches contain all classes. Raises OperationError for a split with fewer than
    two classes, a class without images, or splits with different classes.
    """
    files_of_split: dict[str, list[tuple[str, int]]] = {}
    classes: list[str] = []
    for split in ("train", "test"):
        try:
            names = sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir())
            files_of_class = {name: sorted(os.listdir(root / split / name)) for name in names}
        except OSError as error:
            raise OperationError(f"{error.filename}: cannot be read ({error.strerror})") from error
        if split == "test" and names != classes:
            in_one_split = sorted(set(names) ^ set(classes))
            listed = ", ".join(in_one_split[:5])
            raise OperationError(f"{root}: train and test have different classes ({listed})")
        if len(names) < 2:
            raise OperationError(f"{root / split}: has {len(names)} folders, at least two classes are needed")
        classes = names
        files: list[tuple[str, int]] = []
        for label, name in enumerate(classes):
            images = [file for file in files_of_class[name] if file.lower().endswith(SUFFIXES)]
            if not images:
                kinds = ", ".join(SUFFIXES)
                raise OperationError(f"{root / split / name}: holds no image, a class needs one ({kinds})")
            files += [(f"{split}/{name}/{image}", label) for image in images]
        order = np.random.default_rng(0).permutation(len(files))
        files_of_split[split] = [files[i] for i in order]
    return classes, files_of_split


def folder_arrays(
    name: str, root: Path, size: int, border: float = 0.0
) -> tuple[list[str], dict[str, Array]]:
    """(classes, arrays x_train, y_train, x_test, y_test) of folders of images, decoded once and cached."""
    classes, listed = listing(root)
    paths = [path for split in listed.values() for path, _ in split]

    def make() -> dict[str, Array]:
        shape = decode(root / paths[0], size, border).shape

        def decoded(path: str) -> Array:
            image = decode(root / path, size, border)
            if image.shape != shape:
                size_of, first = (f"{w} × {h} pixels" for _, h, w in (image.shape, shape))
                words = f"is {size_of} where {paths[0]} is {first}; give data.size to scale all to one"
                raise OperationError(f"{root / path}: {words}")
            return image

        images = np.stack(base.in_threads(f"decoding {name}", decoded, paths, TASK))
        cut = len(listed["train"])
        labels = {f"y_{split}": np.array([y for _, y in pairs]) for split, pairs in listed.items()}
        return {"x_train": images[:cut], "x_test": images[cut:], **labels}

    return classes, base.cached(name, root, paths, f"images 1 {size} {border}", make)


@registry.data_sets.add("image-folder")
def image_folder(
    folder: str,
    data_dir: str | Path | None = None,
    size: Natural = 0,
    border: Annotated[float, Within(0, below=0.5)] = 0.0,
    normalize: bool = True,
    augment: bool = False,
    stream: bool = False,
    workers: Natural = 2,
) -> Dataset:
    """Your own images: ``folder``/train/CLASS/*.jpg|jpeg|png and ``folder``/test/CLASS/….

    ``augment`` is explained in :func:`image_set`.

    Args:
        folder: The folder of the images. A relative path begins at ``data_dir``. Classes are numbered in the
            order of their names.
        size: Images are cut to their middle square and scaled to size × size. 0: images stay unchanged, and
            all must have the same size. Unit: pixels. Source: our choice.
        border: The share of an image that is cut off at each side before scaling. With 0.0625, 224 of 256
            pixels remain, as is usual for ImageNet. Source: our choice.
        normalize: Normalize each channel by its mean and standard deviation over the training set; with
            ``stream``, by those of ImageNet, because no pass over all images is made. Source: common
            practice.
        stream: Decode an image each time it is used, and hold none in memory. Otherwise each image is decoded
            once and kept (see :mod:`landscape.data.base`). Source: our choice.
        workers: Processes that decode a stream; 0: this process decodes it. Source: our choice.
    """
    root = base.data_root(data_dir) / folder
    if not stream:
        classes, arrays = folder_arrays(Path(folder).name, root, size, border)
        train, test = (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])
        return image_set(train, test, len(classes), normalize, augment)
    if not size:
        raise InputError("data.size: 0 is not allowed with data.stream, it must be the side in pixels")
    classes, files_of_split = listing(root)
    means, stds = IMAGENET if normalize else ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # by channel
    mean, std = torch.tensor(means).view(3, 1, 1), torch.tensor(stds).view(3, 1, 1)
    streams, fingerprint_text = [], ""
    for split in ("train", "test"):
        images = ImageFiles(root, files_of_split[split], size, border, mean, std)
        labels = torch.tensor([label for _, label in images.files])
        streams.append(ImageStream(images, labels, workers))
        fingerprint_text += images.fingerprint()
    fingerprint = hashlib.sha256(fingerprint_text.encode()).hexdigest()
    crops = crops_and_flips(size, mean, std) if augment else None
    loss = torch.nn.functional.cross_entropy
    return Dataset(streams[0], streams[1], loss, fingerprint, len(classes), crops)


FILE = Path(__file__).with_name("digits.csv.gz")
DIGITS = 1797  # images in the file


@registry.data_sets.add("digits")
def digits(
    data_dir: str | Path | None = None,
    test_samples: Annotated[int, Within(1, DIGITS - 1)] = 360,
    form: Literal["flat", "image", "frames", "tokens"] = "flat",
) -> Dataset:
    """The 1,797 digits that come with the package (UCI, CC BY 4.0), shuffled.

    x (N, 64) in [0, 1] are pixels / 16, y (N,) in 0…9. The last ``test_samples`` digits are the test set.

    Args:
        test_samples: Size of the test set. Unit: samples. Source: our choice; a fifth, because there is
            no official split.
        form: "flat": as above. "image": x (N, 3, 32, 32), each pixel a block of 4 × 4 in three equal
            channels. "frames": x (N, 8, 8) and y (N, 8), each row of the image a frame with the digit's
            label. "tokens": for a GPT of images (Chen et al. 2020), x (N, 63) holds all pixels but the last,
            row by row, as whole numbers from 0 to 16, and y (N, 63) holds the pixel after each of them. The
            column "label" has the digits. Source: our choice.

    Raises:
        InputError: one of the two sets would hold no sample.
    """
    rows = np.loadtxt(FILE, delimiter=",", dtype=np.uint8)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    x, y = rows[:, :-1], rows[:, -1]  # the last column has the digits
    if form == "frames":
        x, y = x.reshape(-1, 8, 8), np.repeat(y[:, None], 8, axis=1)
    if form == "image":  # (N, 3, 32, 32)
        x = x.reshape(-1, 1, 8, 8).repeat(3, axis=1).repeat(4, axis=2).repeat(4, axis=3)
    train_samples = len(y) - test_samples
    if form == "tokens":  # the classes are the pixel values 0…16
        parts = torch.from_numpy(x.astype(np.int64)).tensor_split([train_samples])
        train_set, test_set = ((pixels[:, :-1], pixels[:, 1:]) for pixels in parts)
        digest, loss = base.fingerprint((x, y, np.array(train_samples))), torch.nn.functional.cross_entropy
        return Dataset(train_set, test_set, loss, digest, classes=17, columns={"label": y[:train_samples]})
    train, test = (x[:train_samples], y[:train_samples]), (x[train_samples:], y[train_samples:])
    return base.classification(train, test, scale=16.0, classes=10)


CLASSES = 10


def read_idx(path: Path) -> Array:
    """The uint8 array in an IDX file (gzip if its name ends so). OperationError if damaged or too large.

    Of a compressed file, only the number of bytes in the header is unpacked.
    """
    with open_regular(path, MAX_BYTES) as packed:
        try:
            raw = (gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed).read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise OperationError(f"{path}: cannot be read ({error}); download it again") from error
    head = 4 + 4 * raw[3] if len(raw) > 3 else 4
    shape = [int.from_bytes(raw[k : k + 4]) for k in range(4, head, 4)]
    if not raw.startswith(b"\x00\x00\x08") or len(raw) != head + math.prod(shape):
        raise OperationError(f"{path}: no whole IDX file of at most {MAX_BYTES:,} bytes; download it again")
    return np.frombuffer(raw, np.uint8)[head:].reshape(shape)


def _load(name: str, samples: int, data_dir: str | Path | None) -> Dataset:
    root = base.data_root(data_dir)
    arrays = []
    for file in FILES:
        if not (paths := copies(root, name, name, f"{file}.gz")):
            remedy = f"download the four IDX files ({', '.join(FILES)}) and put them there"
            raise base.missing(name, f"{file}[.gz] is not in {root / name} or {root}; {remedy}")
        arrays.append(read_idx(paths[0]))
    for images, labels, file in ((arrays[0], arrays[1], FILES[0]), (arrays[2], arrays[3], FILES[2])):
        if images.ndim != 3 or not images.size or labels.shape != images.shape[:1] or labels.max() >= CLASSES:
            shapes = f"shape {images.shape} and its labels {labels.shape}, up to {labels.max(initial=0)}"
            needed = f"they must be (N, height, width) and (N,), up to {CLASSES - 1}"
            raise OperationError(f"data {name}: {file} has {shapes}; {needed}; download them again")
    train, test = ((a.reshape(len(a), -1), b) for a, b in (arrays[:2], arrays[2:]))
    if samples > len(train[0]):
        raise InputError(f"data.samples: {samples} is not allowed, it must be 0 (all) to {len(train[0])}")
    if samples:
        train = train[0][:samples], train[1][:samples]
    return base.classification(train, test, scale=255.0, classes=CLASSES)


@registry.data_sets.add("mnist")
def mnist(samples: Natural = 0, data_dir: str | Path | None = None) -> Dataset:
    """MNIST: x (60000 and 10000, 784) in [0, 1] with no further normalization, y in 0…9.

    Args:
        samples: The number of training samples to use, the first ones; 0: all. Unit: samples. Source: our
            choice.
    """
    return _load("mnist", samples, data_dir)


@registry.data_sets.add("fashion-mnist")
def fashion_mnist(samples: Natural = 0, data_dir: str | Path | None = None) -> Dataset:
    """Fashion-MNIST, in MNIST's format: x (60000 and 10000, 784) in [0, 1], y in 0…9.

    Args:
        samples: As for mnist. Unit: samples. Source: our choice.
    """
    return _load("fashion-mnist", samples, data_dir)


# Name -> bytes of labels before an image (the last one counts; CIFAR-100: coarse, fine), classes.
BINARY = {"cifar10": (1, 10), "cifar100": (2, 100)}
PIXELS = 3 * 32 * 32


def read_binary(path: Path, labels: int, classes: int) -> Pair:
    """(images (N, 3, 32, 32) uint8, labels (N,) uint8) of one binary file; OperationError if damaged."""
    raw = np.frombuffer(bytearray(read_regular(path, MAX_BYTES)), np.uint8)
    record = labels + PIXELS
    if not len(raw) or len(raw) % record or raw[labels - 1 :: record].max() >= classes:
        needed = f"images of {record} with labels up to {classes - 1}"
        raise OperationError(f"{path}: holds {len(raw)} bytes, not {needed}; download it again")
    rows = raw.reshape(-1, record)
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].copy()


def _smaller(images: Array, times: int) -> Array:
    """uint8 (N, 3, H, W) -> (N, 3, H/times, W/times): the means of blocks, rounded."""
    n, channels, height, width = images.shape
    blocks = images.reshape(n, channels, height // times, times, width // times, times)
    return images if times == 1 else np.rint(blocks.mean((3, 5), dtype=np.float32)).astype(np.uint8)


def _some(images: Pair, subset: int) -> Pair:
    """``subset`` of 50,000 images, and that share of the 10,000 for testing, in a fixed shuffle; 0: all."""
    if not subset:
        return images
    x, y = images
    chosen = np.random.default_rng(0).permutation(len(y))[: max(1, len(y) * subset // 50_000)]
    return x[chosen], y[chosen]


def _read_cifar(name: str, root: Path) -> tuple[Pair, Pair]:
    """The images (N, 3, 32, 32) and labels of training and test, from binary files or folders of images."""
    (labels, classes), archive = BINARY[name], SOURCES[name].folder
    *train_files, test_file = (file.name for file in SOURCES[name].files)
    images = root / name
    for folder in (path.parent for path in copies(root, name, archive, test_file)):
        missing = [file for file in train_files if not (folder / file).is_file()]
        if missing:
            raise OperationError(f"data {name}: {folder / missing[0]} is missing; download the archive again")
        *parts, test = [read_binary(folder / file, labels, classes) for file in (*train_files, test_file)]
        train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        break
    else:
        if not (images / "train").is_dir():
            absent = f"neither {root / archive / test_file} nor {images / 'train'} exists"
            remedy = f"download the binary version, or put images into {images}/{{train,test}}/CLASS"
            raise base.missing(name, f"{absent}; {remedy}")
        names, a = folder_arrays(name, images, 32)
        if len(names) != classes:
            raise OperationError(f"{images / 'train'}: holds {len(names)} classes, {name} has {classes}")
        train, test = ((a[f"x_{part}"], a[f"y_{part}"]) for part in ("train", "test"))
    return train, test


def cifar(name: str) -> Callable[..., Dataset]:
    """The loader of one of BINARY."""

    def load(
        data_dir: str | Path | None = None,
        normalize: bool = True,
        augment: bool = False,
        subset: Natural = 0,
        size: Literal[32, 16, 8, 4] = 32,
    ) -> Dataset:
        """CIFAR-10, or CIFAR-100 with its fine labels: x (50000 and 10000, 3, 32, 32), y the class.

        Args:
            subset: Number of training images, of 50,000, for reduced runs; the same share of the test images
                is used. 0: all. Unit: samples. Source: our choice.
            size: Height and width of the images: 32, or 16, 8 or 4, for which each pixel is the mean of a
                square of pixels. Unit: pixels. Source: our choice.
        """
        parts = (_some(part, subset) for part in _read_cifar(name, base.data_root(data_dir)))
        train, test = ((_smaller(x, 32 // size), y) for x, y in parts)
        return image_set(train, test, BINARY[name][1], normalize, augment)

    return load


for name in BINARY:
    registry.data_sets.add(name)(cifar(name))
