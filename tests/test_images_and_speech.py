"""Images and speech from files: what is read, kept, augmented and streamed, and what is said of bad files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import landscape
from landscape import InputError, OperationError, Problem
from landscape.core.options import positive
from landscape.data import base, images, speech
from landscape.data.base import Parts, parse
from landscape.data.images import augment
from landscape.problem import data
from landscape.training.processes.process_group import Group
from landscape.training.recipes import recipe
from landscape.training.run import generator
from landscape.training.run.loop import Trainer
from tests.conftest import Command
from tests.groups import together


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("LANDSCAPE_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def refused(name: str, *words: str, **options: Any) -> None:
    """Loading fails with one line that has the ``words``."""
    with pytest.raises((OperationError, InputError)) as caught:
        landscape.data.load(name, **options)
    one_line(caught, *words)


def one_line(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def write_binary(folder: Path, name: str, samples: int = 7) -> dict[str, np.ndarray]:
    """CIFAR's binary files with random images: file -> rows."""
    archive, (labels, classes) = images.SOURCES[name], images.BINARY[name]
    rng = np.random.default_rng(0)
    (folder / archive.folder).mkdir(parents=True)
    rows = {}
    for file in (file.name for file in archive.files):
        rows[file] = rng.integers(0, 256, (samples, labels + images.PIXELS), dtype=np.uint8)
        rows[file][:, :labels] = rng.integers(0, classes, (samples, labels))
        rows[file].tofile(folder / archive.folder / file)
    return rows


def write_images(root: Path, classes: tuple[str, ...] = ("ant", "bee", "cat"), size: int = 32) -> np.ndarray:
    """PNGs under root/train and root/test, 4 and 2 a class: the pixels (18, 3, size, size) in their order."""
    rng = np.random.default_rng(1)
    found = []
    for split, count in (("train", 4), ("test", 2)):
        pixels = []
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for k in range(count):
                pixels.append(rng.integers(0, 256, (size, size, 3), dtype=np.uint8))
                Image.fromarray(pixels[-1]).save(root / split / name / f"{k}.png")
        order = np.random.default_rng(0).permutation(len(pixels))  # classes are mixed, always alike
        found += [pixels[i] for i in order]
    return np.stack(found).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("name", images.BINARY)
def test_cifars_binary_files_read_back(tmp_path: Path, name: str) -> None:
    rows = write_binary(tmp_path, name)
    (labels, classes), (*train, test) = images.BINARY[name], rows
    data = landscape.data.load(name, data_dir=tmp_path, normalize=False)
    whole = np.concatenate([rows[file] for file in train])
    assert data.classes == classes
    np.testing.assert_array_equal(data.train[1], whole[:, labels - 1])
    pixels = rows[test][:, labels:].reshape(-1, 3, 32, 32) / 255
    np.testing.assert_allclose(data.test[0].numpy(), pixels, rtol=1e-6)
    half = landscape.data.load(name, data_dir=tmp_path, normalize=False, subset=25_000)
    chosen = np.random.default_rng(0).permutation(len(whole))[: len(whole) // 2]
    np.testing.assert_array_equal(half.train[1], whole[chosen, labels - 1])
    small = landscape.data.load(name, data_dir=tmp_path, normalize=False, size=16)
    square = rows[test][:, labels:].reshape(-1, 3, 32, 32)[:, :, :2, 2:4]  # of the first row's second pixel
    means = np.rint(square.mean((2, 3))) / 255
    np.testing.assert_allclose(small.test[0][:, :, 0, 1].numpy(), means, rtol=1e-6)
    refused(name, "data.size", "15", "32, 16, 8, 4", data_dir=tmp_path, size=15)
    normal = landscape.data.load(name, data_dir=tmp_path)
    assert normal.fingerprint != data.fingerprint
    pixels = whole[:, labels:].reshape(-1, 3, 1024) / 255
    expected = (pixels - pixels.mean((0, 2))[:, None]) / pixels.std((0, 2))[:, None]
    np.testing.assert_allclose(normal.train[0].flatten(2).numpy(), expected, atol=1e-5)


def test_damaged_or_missing_cifar_files_are_one_line(tmp_path: Path) -> None:
    words = "data cifar10", "test_batch.bin", "download the binary version", "LANDSCAPE_DATA"
    refused("cifar10", *words, data_dir=tmp_path)
    write_binary(tmp_path, "cifar10")
    third = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = third.read_bytes()
    label = b"\xff" + whole[1:]
    for raw, word in ((whole[:-5], "images of 3073"), (b"", "holds 0 bytes"), (label, "labels up to 9")):
        third.write_bytes(raw)
        refused("cifar10", str(third), word, data_dir=tmp_path)
    third.unlink()
    refused("cifar10", f"{third} is missing", data_dir=tmp_path)


def test_folders_are_decoded_once(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = write_images(tmp_path / "mine")
    load = lambda: landscape.data.load("image-folder", data_dir=tmp_path, folder="mine", normalize=False)  # noqa: E731
    data = load()
    np.testing.assert_allclose(data.train[0].numpy(), pixels[:12] / 255, rtol=1e-6)
    np.testing.assert_allclose(data.test[0].numpy(), pixels[12:] / 255, rtol=1e-6)
    assert data.train[1].sort().values.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert set(data.train[1][:6].tolist()) == {0, 1, 2}
    for image, label in zip(data.train[0], data.train[1].tolist(), strict=True):
        files = (tmp_path / "mine" / "train" / ("ant", "bee", "cat")[label]).iterdir()
        pictures = [np.asarray(Image.open(path)) / 255 for path in files]
        assert any(np.allclose(picture, image.permute(1, 2, 0)) for picture in pictures)
    (file,) = kept.iterdir()

    decoded = []
    real = images.decode
    monkeypatch.setattr("landscape.data.images.decode", lambda *args: decoded.append(args) or real(*args))
    assert load().fingerprint == data.fingerprint
    assert load().train[0].stride() == data.train[0].stride()  # a network's rounding depends on it
    assert not decoded
    # Damaged, cut off, or of another kind: made again, and right.
    raw = file.read_bytes()
    flipped = bytearray(raw)
    flipped[raw.index(pixels[5].tobytes()[:64])] ^= 1
    for damaged in (bytes(flipped), raw[: len(raw) // 2], b"not HDF5"):
        decoded.clear()
        file.write_bytes(damaged)
        assert load().fingerprint == data.fingerprint
        assert decoded
    # Another picture under the same name: no stale pixels.
    Image.new("RGB", (32, 32)).save(tmp_path / "mine" / "train" / "ant" / "0.png")
    assert int((load().train[0].flatten(1).abs().amax(1) == 0).sum()) == 1
    assert [p.suffix for p in kept.iterdir()] == [".h5", ".h5"]


@pytest.mark.slow
def test_two_processes_that_start_at_once_decode_once(tmp_path: Path) -> None:
    """Each writes what it decoded to a log; the file of the cache is whole, and only one did the work."""
    write_images(tmp_path / "mine")
    code = (
        "import sys, time, landscape.data.images as f, landscape; real = f.decode\n"
        "def slow(*args): time.sleep(0.05); print('decoded', flush=True); return real(*args)\n"
        "f.decode = slow\n"
        "print(landscape.data.load('image-folder', data_dir=sys.argv[1], folder='mine').fingerprint)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = [run.communicate()[0].split() for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert lines[0][-1] == lines[1][-1]
    assert sorted(len(output) for output in lines)[0] == 1


def other_size(path: Path) -> None:
    Image.new("L", (16, 8)).save(path)


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nothing.png"))


@pytest.mark.parametrize(("harm", "words"), [
    (lambda image: image.write_text("no image"), "2.png: cannot be decoded as an image"),
    (lambda image: image.write_bytes(image.read_bytes()[:-200]), "2.png: cannot be decoded as an image"),
    (other_size, "2.png: is 16 × 8 pixels where train/"),
    (link_to_nothing, "2.png: cannot be read (No such file or directory)"),
    (lambda image: [path.unlink() for path in image.parent.iterdir()], "holds no image"),
    (lambda image: (image.parents[2] / "test/dog").mkdir(), "train and test have different classes (dog)"),
    (lambda image: (image.parents[2] / "test").rename(image.parents[2] / "val"), "test: cannot be read"),
])  # fmt: skip
def test_bad_folders_of_images(tmp_path: Path, kept: Path, harm: Callable[[Path], Any], words: str) -> None:
    write_images(tmp_path)
    harm(tmp_path / "train" / "bee" / "2.png")
    refused("image-folder", words, folder=str(tmp_path))
    assert not list(kept.glob("*"))  # nothing half-written


def test_images_are_scaled_from_their_middle(tmp_path: Path) -> None:
    write_images(tmp_path)
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255  # the middle square is white, all around it black
    for path in (tmp_path / "train" / "ant").iterdir():
        Image.fromarray(wide).save(path)
    data = landscape.data.load("image-folder", folder=str(tmp_path), size=10, normalize=False)
    assert data.train[0].shape == (12, 3, 10, 10)
    # Interpolation takes in a little of what is beside it.
    assert float(data.train[0][data.train[1] == 0].min()) > 0.8
    for options in ({"border": 0.5}, {"size": -1}, {"workers": -1}, {"stream": True}):
        refused("image-folder", "data.", folder=str(tmp_path), **options)


def test_a_cache_that_cannot_be_written_warns_and_stops_nothing(tmp_path: Path, kept: Path) -> None:
    write_images(tmp_path / "mine")
    kept.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="LANDSCAPE_CACHE") as caught:
        found = landscape.data.load("image-folder", data_dir=tmp_path, folder="mine")
    assert str(kept) in str(caught[0].message)
    assert len(found.train[1]) == 12


def test_work_in_threads_keeps_the_order_and_the_first_error() -> None:
    assert base.in_threads("squares", lambda n: n * n, list(range(50))) == [n * n for n in range(50)]
    with pytest.raises(InputError, match="n: 0"):
        base.in_threads("errors", lambda n: positive("n", n), [3, 2, 1, 0, 1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # DataLoader forks, on Python 3.12 and 3.13
@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_streamed_exactly(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path)
    options: dict[str, Any] = {"folder": str(tmp_path), "size": 16, "normalize": False}
    held = landscape.data.load("image-folder", **options)
    stream = landscape.data.load("image-folder", **options, stream=True, workers=workers)
    for part, whole in zip(zip(*stream.train, strict=True), held.train, strict=True):
        torch.testing.assert_close(torch.cat(part), whole)
    if not workers:
        model = landscape.models.build("mlp", widths=[768, 3])
        a, b = (Problem(model, d.loss, d.train, dtype=torch.float64) for d in (held, stream))
        assert (b.samples, b.tensors) == (12, None)
        assert a.evaluate() == pytest.approx(b.evaluate(), rel=1e-12)
        # Samples of unequal weight in several batches, of which each has one class alone.
        monkeypatch.setattr(images, "STREAM_BATCH", 1)
        monkeypatch.setattr(data, "STREAM_BATCH", 1)
        weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 9.0]))
        losses = [Problem(model, weighted, d.train, dtype=torch.float64).loss() for d in (held, stream)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        assert Parts.drawn(parse("labels(1)", 3), b, {}, 3, 4, 0).counts.sum(1).tolist() == [4, 4, 4]
        indices = torch.tensor([11, 0, 0, 5])
        for x, y in zip(a.gather(indices), b.gather(indices), strict=True):
            torch.testing.assert_close(x, y)
        torch.testing.assert_close(a.subset(indices).gradient(), b.subset(indices).gradient())
    (tmp_path / "train" / "bee" / "2.png").write_text("no image")
    with pytest.raises(OperationError) as caught:
        list(stream.train)
    one_line(caught, "2.png: cannot be decoded as an image")


def test_data_that_does_not_fit_the_device_is_moved_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    data = landscape.data.load("digits")
    model = landscape.models.build("mlp", widths=[64, 4, 10])
    whole = Problem(model, data.loss, data.test, dtype=torch.float64)
    monkeypatch.setattr("landscape.problem.data.fits", lambda size, device: size < 1000)
    part = Problem(model, data.loss, data.test, dtype=torch.float64)
    assert whole.resident is not None
    assert part.resident is None
    assert part.indexed
    assert whole.samples == part.samples
    assert whole.evaluate() == pytest.approx(part.evaluate(), rel=1e-12)
    one, other = (Parts.drawn(parse("labels(5)", 4), p, {}, 4, 9, 0) for p in (whole, part))
    assert torch.equal(one.learner, other.learner)
    torch.testing.assert_close(whole.gradient(), part.gradient())
    plane = landscape.random_plane(whole)
    for path in ("auto", "folded", "pointwise"):
        surfaces = [landscape.contour(p, plane, grid=(3, 2), method=path).loss for p in (whole, part)]
        np.testing.assert_allclose(*surfaces, rtol=1e-12)
    indices = torch.tensor([[3, 3], [359, 0]])
    for problem_of in (lambda p: p.subset(indices[1]), lambda p: p.subset(slice(7, 200)).subset(slice(90))):
        torch.testing.assert_close(*(problem_of(p).gradient() for p in (whole, part)))
    for x, y in zip(whole.gather(indices), part.gather(indices), strict=True):
        assert torch.equal(x, y)
    # Targets that the loss leaves out weigh nothing, wherever the data lies.
    x, y = data.test
    masked = y.where(torch.arange(len(y)) % 3 > 0, -100)
    part = Problem(model, data.loss, (x, masked), dtype=torch.float64)
    assert part.resident is None
    kept = Problem(model, data.loss, (x[masked >= 0], y[masked >= 0]), dtype=torch.float64)
    assert part.loss() == pytest.approx(kept.loss(), rel=1e-12)
    assert part.subset(slice(0, 50)).loss() == pytest.approx(kept.subset(slice(0, 33)).loss(), rel=1e-12)


def textbook_augment(
    x: torch.Tensor, corner: torch.Tensor, flip: torch.Tensor, p: int, fill: float
) -> torch.Tensor:
    out = []
    for image, top, left, turn in zip(x, corner[0], corner[1], flip, strict=True):
        padded = torch.nn.functional.pad(image, (p, p, p, p), value=fill)
        crop = padded[:, top : top + x.shape[2], left : left + x.shape[3]]
        out.append(crop.flip(2) if turn else crop)
    return torch.stack(out)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.integers(0, 4))
def test_augmentation_is_pad_crop_and_flip(b: int, c: int, h: int, w: int, padding: int) -> None:
    x = torch.randn(b, c, h, w)
    before = x.clone()
    out = augment(x, torch.Generator().manual_seed(3), padding, fill=0.25)
    draw = torch.Generator().manual_seed(3)
    corner = torch.randint(2 * padding + 1, (2, b, 1), generator=draw)[..., 0]
    flip = torch.randint(2, (b, 1), generator=draw)[..., 0]
    assert torch.equal(out, textbook_augment(x, corner, flip, padding, 0.25))
    assert torch.equal(x, before)


def trainer(
    folder: Path, steps: int, group: Group | None = None, learners: int = 2, batch: int = 8, **data: Any
) -> Trainer:
    values = {
        "name": "tiny", "learners": learners, "batch": batch, "lr": 0.05, "steps": steps,
        "algorithm": {"name": "dpsgd"}, "model": {"name": "lenet-5", "classes": 3},
        "data": {"name": "image-folder", "folder": str(folder), **data}, "evaluate": {"every": 0},
        "checkpoint": {"every": 2},
    }  # fmt: skip
    return Trainer(recipe.from_values(values), group=group)


def test_augmented_runs_resume_to_the_bit_and_learners_draw_their_own(tmp_path: Path) -> None:
    write_images(tmp_path)
    plain, augmented = trainer(tmp_path, 4), trainer(tmp_path, 4, augment=True)
    x, y = augmented._minibatches(3)
    assert torch.equal(x, augmented._minibatches(3)[0])
    raw, same = plain._minibatches(3)
    assert torch.equal(y, same)
    assert not torch.equal(x, raw)
    assert augmented.minibatches.augment is not None
    one = augmented.minibatches.augment(raw[0], torch.Generator().manual_seed(0))
    assert not torch.equal(one, augmented.minibatches.augment(raw[0], torch.Generator().manual_seed(1)))
    # A learner's draw depends on nothing but its number: not on how many others there are.
    more = trainer(tmp_path, 3, augment=True, learners=3, batch=12)
    raw_of_more = trainer(tmp_path, 3, learners=3, batch=12)._minibatches(3)[0]
    expected = augmented.minibatches.augment(raw_of_more[1], generator(0, "augment", 3, 1))
    assert torch.equal(more._minibatches(3)[0][1], expected)
    whole = augmented.run()
    half = trainer(tmp_path, 2, augment=True).run()
    rest = Trainer(augmented.recipe, checkpoint=half).run()
    assert torch.equal(whole.weights, rest.weights)
    assert not torch.equal(whole.weights, plain.run().weights)
    # What is padded is black: the darkest there is, also where pixels are normalized.
    black = augmented.minibatches.augment(torch.full_like(raw[0], 9.0), torch.Generator().manual_seed(0))
    darkest = landscape.data.load("image-folder", folder=str(tmp_path)).train[0].min()
    assert float(black.min()) == pytest.approx(float(darkest), abs=0.02)


def own_minibatches(group: Group, folder: str, cache: str) -> Any:
    """This process's learners of step 3, and its run; the data is there only once a process has decoded it."""
    os.environ["LANDSCAPE_CACHE"] = cache
    alone = trainer(Path(folder), 3, group=group, augment=True)
    x, y = alone._minibatches(3)
    return alone.comm.local, x, y, alone.run().weights


@pytest.mark.slow
def test_processes_share_one_decoded_copy_and_augment_as_one_does(tmp_path: Path) -> None:
    write_images(tmp_path)
    ranks = together(2, own_minibatches, str(tmp_path), str(tmp_path / "kept"))
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".h5"]
    alone = trainer(tmp_path, 3, augment=True)
    x, y = alone._minibatches(3)
    end = alone.run()
    for found in ranks:
        assert isinstance(found, tuple), found
        own, part, labels, weights = found
        assert torch.equal(part, x[own])
        assert torch.equal(labels, y[own])
        torch.testing.assert_close(weights, end.weights[own], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs limits on the size of files")
def test_no_space_for_the_cache_warns_and_leaves_nothing(tmp_path: Path, kept: Path) -> None:
    """Files of this process may hold 16 KiB, as on a disk that is nearly full."""
    write_images(tmp_path / "mine")
    code = (
        "import resource, signal, sys, landscape\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, unlimited[1]))\n"
        "data = landscape.data.load('image-folder', data_dir=sys.argv[1], folder='mine')\n"
        "print(len(data.train[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)"  # coverage of this process is written at its end
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "12\n"
    assert "cannot be written (File too large)" in run.stderr
    assert not list(kept.iterdir())
    assert len(landscape.data.load("image-folder", data_dir=tmp_path, folder="mine").train[1]) == 12


TEXT = """
from pathlib import Path
import torch
from torch import nn

def load(path, length=8):
    text = Path(path).read_text()
    letters = sorted(set(text))
    rows = torch.tensor([letters.index(c) for c in text]).unfold(0, length + 1, length)
    x, y = rows[:, :-1], rows[:, 1:]
    return {"train": (x[8:], y[8:]), "test": (x[:8], y[:8])}

class Next(nn.Module):
    def __init__(self, letters, width=8):
        super().__init__()
        self.letters, self.cell = nn.Embedding(letters, width), nn.GRU(width, width, batch_first=True)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(width, letters)

    def forward(self, x):
        return self.out(self.drop(self.cell(self.letters(x))[0])).transpose(1, 2)
"""
RECIPE = """
learners = 2
batch = 8
lr = 1.0
steps = 30
algorithm = { name = "dpsgd" }
model = { name = "mytext:Next", letters = 28 }
data = { name = "mytext:load", path = "text.txt" }
checkpoint = { every = 10 }
decompose = { every = 10 }
"""


def test_text_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mytext.py").write_text(TEXT)
    Path("text.toml").write_text(RECIPE)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    train = ("train", "text.toml", "--allow-code", "-q", "-o")
    assert command(*train, "run")[0] == 0
    history = landscape.load("run/last.h5").history
    assert history["loss"][-1] < history["loss"][0] - 0.3
    assert 0 < history["test_accuracy"][-1] < 1
    own = ("--model", "mytext:Next(letters=28)", "--data", "mytext:load(path='text.txt')")
    assert command("contour", "run/last.h5", *own, "--grid", "2", "-q")[0] == 0
    # Labels that the model has no output for.
    code, _, err = command(*train, "other", "--set", "model.letters=20")
    assert (code, err.count("\n"), Path("other").exists()) == (2, 1, False)
    Path("text.txt").write_text("abc" * 99)
    code, _, err = command(*train, "run", "--resume", "--set", "steps=40")
    assert (code, "fingerprint" in err) == (1, True)


def test_labels_that_are_no_class_are_found_before_the_first_step() -> None:
    model, x, classes = landscape.models.build("mlp", widths=[6, 3]), torch.randn(9, 6), torch.arange(9) % 3
    for y in (classes, classes.where(torch.arange(9) > 1, -100)):
        Problem(model, torch.nn.functional.cross_entropy, (x, y))
    for y in (torch.arange(9), classes - 1):
        with pytest.raises(InputError) as caught:
            Problem(model, torch.nn.functional.cross_entropy, (x, y))
        one_line(caught, "data:", "they must lie in 0…2")


def write_wav(path: Path, sound: np.ndarray, rate: int = 8000, channels: int = 1, width: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(
            (sound * 2**15).astype("<i2").tobytes() if width == 2 else sound.astype("u1").tobytes()
        )


def write_digits(root: Path) -> None:
    rng = np.random.default_rng(0)
    for digit in range(10):
        for speaker in ("ann", "bob"):
            for index in (0, 4, 5, 6):
                time = np.arange(600 + 400 * digit) / 8000
                tone = 0.3 * np.sin(2 * np.pi * 300 * (digit + 1) * time)
                write_wav(
                    root / "fsdd" / f"{digit}_{speaker}_{index}.wav", tone + 0.01 * rng.normal(size=len(time))
                )


def test_spoken_digits_become_frames_with_states(tmp_path: Path, kept: Path) -> None:
    write_digits(tmp_path)
    options: dict[str, Any] = {"data_dir": tmp_path, "positions": 3, "frames": 5, "mels": 8, "context": 2}
    data = landscape.data.load("spoken-digits", **options)
    assert data.classes == 30
    x, y = data.train
    assert x.shape[1:] == (5, 40)
    assert y.shape == x.shape[:2]
    assert set(y.flatten().tolist()) == set(range(30))
    # The middle of each splice is the frame; over the frames that stand for themselves it is normalized.
    middle = x[:, :, 16:24].flatten(0, 1)
    assert float(middle.mean(0).abs().max()) < 0.2
    assert landscape.data.load("spoken-digits", **options).fingerprint == data.fingerprint
    assert len(list(kept.iterdir())) == 1
    by_speaker = landscape.data.load("spoken-digits", data_dir=tmp_path, test_speakers=["bob"], frames=5)
    assert len(by_speaker.test[1]) == len(by_speaker.train[1])
    assert [*by_speaker.columns["speaker"]] == ["ann"] * len(by_speaker.train[1])
    ann = torch.from_numpy(data.columns["speaker"] == "ann")  # both said the same for as long
    assert torch.equal(torch.bincount(y[ann].flatten()), torch.bincount(y[~ann].flatten()))
    uneven = landscape.data.load("spoken-digits", data_dir=tmp_path, imbalance=4.0, frames=5)
    assert len(uneven.train[1]) < len(by_speaker.train[1])
    counts = torch.bincount(y.flatten())
    assert int(counts.max()) > 3 * int(counts.min())  # digit 9 is the longest here, 0 the shortest
    model = landscape.models.build("lstm", classes=30, inputs=40, layers=1, cells=16, bottleneck=16)
    assert 0 < Problem(model, data.loss, data.test).loss() < 5


def test_log_mel_finds_a_tone_in_its_band_and_is_the_textbooks() -> None:
    rate, mels = 8000, 20
    sound = np.sin(2 * np.pi * 1000 * np.arange(2000) / rate).astype(np.float32)
    found = speech.log_mel(sound, rate, mels)
    assert found.shape == (1 + (2000 - 200) // 80, mels)
    centers = 700 * np.expm1(np.linspace(0, np.log1p(4000 / 700), mels + 2))[1:-1]
    assert abs(centers[found.mean(0).argmax()] - 1000) < 150
    # Frame 3, by sums written out.
    frame = sound[240:440] * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200))
    angle = 2 * np.pi * np.outer(np.arange(129), np.arange(200)) / 256
    power = (np.cos(angle) @ frame) ** 2 + (np.sin(angle) @ frame) ** 2
    edges = 700 * np.expm1(np.linspace(0, np.log1p(4000 / 700), mels + 2))
    for m in range(mels):
        low, mid, high = edges[m : m + 3]
        total = 0.0
        for k, value in enumerate(power):
            f = k * rate / 256
            height = (f - low) / (mid - low) if f < mid else (high - f) / (high - mid)
            total += max(0.0, height) * value
        assert found[3, m] == pytest.approx(np.log(total + speech.FLOOR), abs=1e-4)
    assert speech.log_mel(np.zeros(7, np.float32), rate, mels).shape == (1, mels)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 4), st.integers(1, 9))
def test_windows_hold_all_frames_in_order(frames: int, length: int, label: int, positions: int) -> None:
    chosen = speech.windows(frames, length)
    assert chosen.shape == (-(-frames // length), length)
    assert set(chosen.flatten().tolist()) == set(range(frames))
    if frames >= length:
        assert (np.diff(chosen) == 1).all()
    y = speech.states(frames, label, positions)
    assert (np.diff(y) >= 0).all()
    assert y[0] == label * positions
    assert y.max() < (label + 1) * positions
    counts = np.bincount(y - label * positions, minlength=positions)
    assert counts.max() - counts.min() <= 1


def test_context_repeats_the_edges() -> None:
    frames = np.arange(3, dtype=np.float32)[:, None]
    x, y = speech.frame_set([frames], [1], length=4, context=1, positions=3)
    assert x[0].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 2], [1, 2, 2]]
    assert y[0].tolist() == [3, 4, 5, 5]


def test_lists_of_recordings(tmp_path: Path) -> None:
    sound = np.sin(np.arange(4000) / 9) / 2
    rows = {"train": ["no", "yes", "yes"], "test": ["yes", "no"]}
    for split, words in rows.items():
        lines = ["path,label"]
        for k, word in enumerate(words):
            write_wav(tmp_path / "wav" / f"{split}{k}.wav", sound, rate=16000)
            lines.append(f"wav/{split}{k}.wav,{word}")
        (tmp_path / f"{split}.csv").write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = {"folder": str(tmp_path), "frames": 4, "positions": 2}
    data = landscape.data.load("speech-list", **options)
    assert data.classes == 4
    counts = torch.bincount(data.train[1].flatten())
    assert int(counts[:2].sum()) == 2 * int(counts[2:].sum())  # "yes", the commonest, is class 0

    listed = (tmp_path / "train.csv").read_text()
    for text, words in (
        (listed.replace("path,label", "file,word"), ["train.csv: needs a first line 'path,label'"]),
        ("path,label\n", ["needs a first line 'path,label' and one line a recording"]),
        (listed + "wav/none.wav,no\n", ["line 5: no file", "none.wav"]),
        (listed + "wav/train0.wav\n", ["line 5 has no label"]),
    ):
        (tmp_path / "train.csv").write_text(text)
        refused("speech-list", *words, **options)
    (tmp_path / "train.csv").write_text(listed)
    (tmp_path / "test.csv").write_text("path,label\nwav/test0.wav,maybe\n")
    words = "test.csv: wav/test0.wav has the label 'maybe', missing in train.csv"
    refused("speech-list", words, **options)


def test_bad_recordings_are_one_line(tmp_path: Path, kept: Path) -> None:
    refused("spoken-digits", "holds no DIGIT_SPEAKER_INDEX.wav", data_dir=tmp_path)
    write_digits(tmp_path)
    victim = tmp_path / "fsdd" / "3_ann_5.wav"
    sound = np.zeros(900)

    def truncated() -> None:
        write_wav(victim, sound)
        victim.write_bytes(victim.read_bytes()[:-300])

    for harm, words in (
        (lambda: write_wav(victim, sound, rate=16000), ["16000 Hz, 1 channels", "data.rate"]),
        (lambda: write_wav(victim, sound, channels=2), ["2 channels"]),
        (lambda: write_wav(victim, sound, width=1), ["8 bits"]),
        (lambda: write_wav(victim, sound[:0]), ["holds 0 bytes of sound"]),
        (lambda: victim.write_text("no sound"), ["cannot be read as a wav file"]),
        (lambda: victim.write_bytes(b""), ["cannot be read as a wav file"]),
        (truncated, ["where its header says 1800"]),
    ):
        harm()
        refused("spoken-digits", str(victim), *words, data_dir=tmp_path)
    assert not list(kept.iterdir())
    for speakers, word in (
        (["eve"], "data.test_speakers: 'eve' is not known (allowed: ann, bob)"),
        (["ann", "bob"], "train has no recording"),
    ):
        refused("spoken-digits", word, data_dir=tmp_path, test_speakers=speakers)
    for options in ({"frames": 0}, {"context": -1}, {"imbalance": 0.5}, {"positions": 0}, {"rate": 9}):
        refused("spoken-digits", f"data.{next(iter(options))}", data_dir=tmp_path, **options)
