"""Speech as frames with states: log-mel features and flat-start labels, for a hybrid acoustic model."""

from __future__ import annotations

import csv
import io
import os
import re
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from landscape.core import registry
from landscape.core.errors import InputError, LandscapeError, OperationError
from landscape.core.files import open_regular
from landscape.core.hdf5 import Array
from landscape.core.options import AtLeastOne, Count, Natural, Within
from landscape.data.base import Dataset, cached, data_root, fingerprint, in_threads, missing

# A window of 25 ms every 10 ms, as in nearly all speech recognizers (Young et al., The HTK Book).
WINDOW, SHIFT = 0.025, 0.010
# What is added to a filter's energy before the logarithm, for samples in [−1, 1] (our choice: below the last
# bit).
FLOOR = 1e-10
TASK = 50
# Bytes of one recording: half an hour at 16 kHz (our choice).
LONGEST = 1 << 26
LIST = 1 << 26  # bytes of a list of recordings (our choice)


Rate = Annotated[int, Within(1000)]  # below, a window holds next to nothing
# A recording, by its path below the data set's folder, and the number of its class.
Utterance = tuple[str, int]


def read_wav(path: Path, rate: int) -> Array:
    """(samples,) float32 in [−1, 1) of a mono 16-bit PCM file; OperationError for any other."""
    try:
        with open_regular(path, LONGEST) as bytes_, wave.open(bytes_) as file:
            form = file.getframerate(), file.getnchannels(), 8 * file.getsampwidth()
            raw = file.readframes(file.getnframes())
            promised = file.getnframes() * file.getnchannels() * file.getsampwidth()
    except LandscapeError:
        raise
    except Exception as error:  # wave lets through whatever it stumbles over in a damaged chunk
        why = str(error) or "it ends too soon"  # EOFError comes without a word
        raise OperationError(f"{path}: cannot be read as a wav file ({why})") from error
    if form != (rate, 1, 16):
        actual = f"has {form[0]} Hz, {form[1]} channels, {form[2]} bits"
        raise OperationError(f"{path}: {actual}; {rate} Hz (data.rate), 1 channel, 16 bits are needed")
    if not raw or len(raw) != promised:
        raise OperationError(f"{path}: holds {len(raw)} bytes of sound where its header says {promised}")
    return np.frombuffer(raw, "<i2").astype(np.float32) / 2**15


def mel_filters(mels: int, bins: int, rate: int) -> Array:
    """(mels, bins): triangles of height 1, evenly spaced in mel(f) = 1127 ln(1 + f/700) from 0 to rate/2.

    ``bins`` are those of a real FFT. Source: Young et al., The HTK Book, section 5.6.
    """
    edges = 700 * np.expm1(np.linspace(0, np.log1p(rate / 2 / 700), mels + 2))
    rising = (np.linspace(0, rate / 2, bins) - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - np.linspace(0, rate / 2, bins)) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rising, falling))


def log_mel(sound: Array, rate: int, mels: int) -> Array:
    """(frames, mels) float32: log energies of the mel filters in Hann windows of 25 ms every 10 ms.

    A sound shorter than a window is padded with zeros to one.
    """
    window, shift = round(WINDOW * rate), round(SHIFT * rate)
    sound = np.pad(sound, (0, max(0, window - len(sound))))
    frames = np.lib.stride_tricks.sliding_window_view(sound, window)[::shift]
    size = 2 ** int(np.ceil(np.log2(window)))
    power = np.abs(np.fft.rfft(frames * np.hanning(window + 1)[:-1], size)) ** 2
    energies: Array = power @ mel_filters(mels, size // 2 + 1, rate).T
    return np.log(energies + FLOOR).astype(np.float32)


def states(frames: int, label: int, positions: int) -> Array:
    """Return (frames,) labels: label·positions + k for the frames in part k of ``positions`` equal parts."""
    return label * positions + np.arange(frames) * positions // frames


def windows(frames: int, length: int) -> Array:
    """(windows, length) indices of frames: the fewest windows that hold every frame, evenly spread.

    Frames in an overlap occur twice; a shorter utterance repeats its last frame.
    """
    count = -(-frames // length)
    starts = np.round(np.linspace(0, max(0, frames - length), count)).astype(np.int64)
    return np.minimum(starts[:, None] + np.arange(length), frames - 1)


def frame_set(
    features: list[Array], labels: list[int], length: int, context: int, positions: int
) -> tuple[Array, Array]:
    """x (N, length, mels · (2·context + 1)) float32, y (N, length) int64 of utterances (frames, mels).

    A frame comes with ``context`` frames on either side, the first and last of an utterance repeated.
    """
    xs, ys = [], []
    for frames, label in zip(features, labels, strict=True):
        where = np.arange(len(frames))[:, None] + np.arange(-context, context + 1)
        spliced = frames[where.clip(0, len(frames) - 1)].reshape(len(frames), -1)
        chosen = windows(len(frames), length)
        xs.append(spliced[chosen])
        ys.append(states(len(frames), label, positions)[chosen])
    return np.concatenate(xs), np.concatenate(ys)


@dataclass(frozen=True)
class Features:
    """The way from recordings to inputs and labels: the options of :func:`spoken_digits` with these names.

    Attributes:
        rate: Sampling rate of the recordings; others are refused. Unit: Hz. Source: that of the data set.
        mels: Number of mel bands. Source: our choice; with ``context`` it makes DPSGD-2020's 260 inputs.
        context: Frames before and after each frame that are part of its input. Unit: frames. Source: our
            choice.
        positions: Number of positions in a word, each a class of its own. Source: our choice.
        frames: Length of a sample. Unit: frames. Source: our choice.
        imbalance: The share of a word's recordings that are used, in both splits, falls by a constant factor
            from word to word, from 1 for the first word to 1/``imbalance`` for the last. Source: our choice.
    """

    rate: int
    mels: int
    context: int
    positions: int
    frames: int
    imbalance: float


def _speech_data(
    name: str,
    root: Path,
    train: list[Utterance],
    test: list[Utterance],
    word_count: int,
    features: Features,
    speaker_of_file: dict[str, str] | None = None,
) -> Dataset:
    """Return the data set of recordings of ``word_count`` different words.

    Each mel band is normalized over the frames of ``train``. With ``speaker_of_file``, the training set gets
    the column "speaker".
    """
    for split, utterances in (("train", train), ("test", test)):
        if not utterances:
            raise OperationError(f"data {name}: {split} has no recording, each split needs one")
    log_mels = _log_mels(name, root, [file for file, _ in (*train, *test)], features)
    train = thinned(train, word_count, features.imbalance)
    test = thinned(test, word_count, features.imbalance)
    train_frames = np.concatenate([log_mels[file] for file, _ in train]).astype(np.float64)
    # The maximum, because a band that is silent in all frames has the standard deviation 0.
    mean, std = train_frames.mean(0), np.maximum(train_frames.std(0), 1e-6)

    def arrays_of(utterances: list[Utterance]) -> tuple[Array, Array, Array]:
        """Return x, y and the index of each sample's utterance (N,)."""
        normalized_frames = [((log_mels[file] - mean) / std).astype(np.float32) for file, _ in utterances]
        labels = [label for _, label in utterances]
        x, y = frame_set(normalized_frames, labels, features.frames, features.context, features.positions)
        order = np.random.default_rng(0).permutation(len(y))  # so that each batch contains all classes
        window_counts = [len(windows(len(frames), features.frames)) for frames in normalized_frames]
        utterance_index = np.repeat(np.arange(len(utterances)), window_counts)
        return x[order], y[order], utterance_index[order]

    x_train, y_train, train_index = arrays_of(train)
    x_test, y_test, _ = arrays_of(test)
    columns = {}
    if speaker_of_file:
        columns["speaker"] = np.array([speaker_of_file[file] for file, _ in train])[train_index]
    train_set = torch.from_numpy(x_train), torch.from_numpy(y_train)
    test_set = torch.from_numpy(x_test), torch.from_numpy(y_test)
    digest, loss = fingerprint((x_train, y_train, x_test, y_test)), torch.nn.functional.cross_entropy
    # Each position in each word is a class.
    return Dataset(train_set, test_set, loss, digest, word_count * features.positions, columns=columns)


def _log_mels(name: str, root: Path, files: list[str], features: Features) -> dict[str, Array]:
    """File -> (frames, mels), read once and cached."""
    rate, mels = features.rate, features.mels

    def make() -> dict[str, Array]:
        def read(file: str) -> Array:
            return log_mel(read_wav(root / file, rate), rate, mels)

        arrays = in_threads(f"reading {name}", read, files, TASK)
        return {"frames": np.concatenate(arrays), "lengths": np.array([len(array) for array in arrays])}

    stored = cached(name, root, files, f"log-mel 1 {rate} {mels}", make)
    ends = np.cumsum(stored["lengths"])[:-1]
    return dict(zip(files, np.split(stored["frames"], ends), strict=True))


def thinned(utterances: list[Utterance], classes: int, imbalance: float) -> list[Utterance]:
    """All utterances of class 0; the share of others falls geometrically to 1/``imbalance``."""
    chosen = []
    for label in range(classes):
        of_class = [u for u in utterances if u[1] == label]
        share = imbalance ** (-label / max(1, classes - 1))
        chosen += of_class[: max(1, round(share * len(of_class)))]
    return chosen


@registry.data_sets.add("spoken-digits")
def spoken_digits(
    data_dir: str | Path | None = None,
    test_speakers: list[str] | None = None,
    rate: Rate = 8000,
    mels: Count = 20,
    context: Natural = 6,
    positions: Count = 10,
    frames: Count = 21,
    imbalance: AtLeastOne = 1.0,
) -> Dataset:
    """Recordings fsdd/DIGIT_SPEAKER_INDEX.wav of the Free Spoken Digit Dataset.

    A sample is a window of frames, x (N, frames, mels·(2·context + 1)). Each recording is divided into
    ``positions`` equal parts, with the numbers 0, 1, … The class of a frame, in y (N, frames), is
    digit·positions + the number of the frame's part. There are 10·positions classes. Every mel band is
    normalized by its mean and standard deviation over the training frames. With ``split = "by(speaker)"``
    learners get different speakers. The defaults give mels·(2·context + 1) = 20·13 = 260 inputs, as many as
    DPSGD-2020's acoustic model has. The options from ``rate`` to ``imbalance`` are those of
    :class:`Features`.

    Args:
        test_speakers: Speakers whose recordings are the test set; by default the test set is INDEX 0…4 of all
            digits and speakers. Source: the data set's official split.
    """
    root = data_root(data_dir) / "fsdd"
    files = [path.name for path in sorted(root.glob("*.wav"))]
    matches = [re.fullmatch(r"(\d)_(\w+)_(\d+)\.wav", file) for file in files]
    recordings = [(match[0], int(match[1]), match[2], int(match[3])) for match in matches if match]
    if not recordings:
        raise missing("spoken-digits", f"{root} holds no DIGIT_SPEAKER_INDEX.wav; put the recordings there")
    speakers = sorted({speaker for _, _, speaker, _ in recordings})
    unknown_speakers = sorted(set(test_speakers or []) - set(speakers))
    if unknown_speakers:
        allowed = ", ".join(speakers)
        raise InputError(f"data.test_speakers: '{unknown_speakers[0]}' is not known (allowed: {allowed})")
    train, test = list[Utterance](), list[Utterance]()
    for file, digit, speaker, index in recordings:
        is_in_test_set = speaker in test_speakers if test_speakers else index < 5
        utterances = test if is_in_test_set else train
        utterances.append((file, digit))
    features = Features(rate, mels, context, positions, frames, imbalance)
    speaker_of_file = {file: speaker for file, _, speaker, _ in recordings}
    return _speech_data("spoken-digits", root, train, test, 10, features, speaker_of_file)  # 10 words


@registry.data_sets.add("speech-list")
def speech_list(
    folder: str,
    data_dir: str | Path | None = None,
    rate: Rate = 16000,
    mels: Count = 20,
    context: Natural = 6,
    positions: Count = 10,
    frames: Count = 21,
    imbalance: AtLeastOne = 1.0,
) -> Dataset:
    """Your own recordings: ``folder``/train.csv and test.csv list them in the columns path and label.

    The first line of a list has the names of the columns. Labels are any words. The commonest word in
    train.csv is class 0, the next one class 1, and so on. Everything else is as in :func:`spoken_digits`.

    Args:
        folder: The folder of train.csv and test.csv. Paths in these files are relative to ``folder``.
            ``folder`` may be relative to ``data_dir``.
    """
    root = data_root(data_dir) / folder
    train_rows, test_rows = _read_list(root / "train.csv"), _read_list(root / "test.csv")
    labels = [label for _, label in train_rows]
    words = sorted(set(labels), key=lambda word: (-labels.count(word), word))
    for file, label in test_rows:
        if label not in words:
            raise OperationError(f"{root}/test.csv: {file} has the label '{label}', missing in train.csv")
    train = [(file, words.index(label)) for file, label in train_rows]
    test = [(file, words.index(label)) for file, label in test_rows]
    features = Features(rate, mels, context, positions, frames, imbalance)
    return _speech_data(root.name, root, train, test, len(words), features)


def _read_list(path: Path) -> list[tuple[str, str]]:
    try:
        with open_regular(path, LIST) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            rows = list(csv.DictReader(text))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise OperationError(f"{path}: cannot be read ({error})") from error
    if not rows or not {"path", "label"} <= set(rows[0]):
        raise OperationError(f"{path}: needs a first line 'path,label' and one line a recording")
    for number, row in enumerate(rows, start=2):
        if not row["path"] or not row["label"]:
            raise OperationError(f"{path}: line {number} has no {'label' if row['path'] else 'path'}")
        if not os.path.isfile(path.parent / row["path"]):  # False also for texts that cannot be a name
            raise OperationError(f"{path}: line {number}: no file {path.parent / row['path']}")
    return [(row["path"], row["label"]) for row in rows]
