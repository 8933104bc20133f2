"""Sound files of every kind, small ones, that the mutations start from."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import struct
import tempfile
import types
import typing
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import landscape
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import UNITS
from landscape.core import registry
from landscape.core.hdf5 import Array
from landscape.paper.context import Context, identity
from landscape.problem.layout import Layout, Slot
from landscape.results import base
from landscape.results.flatness import Smoothing, Stability
from landscape.results.grids import Sweep, texts
from landscape.training.recipes import recipe
from tests.examples import comparison

TOML = """
learners = 4
batch = 40
lr = 0.2
steps = 3
algorithm = { name = "dpsgd", mixing = "ring(1)" }
model = { name = "mlp", widths = [6, 8, 3], activation = "tanh" }
data = { name = "synthetic", samples = 200, dimension = 6, classes = 3 }
"""


def net() -> torch.nn.Module:
    """The network that the states are of."""
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


# The same for every result that has them.
ABOUT = {
    "split": "test", "label": "a label", "source": "last.h5", "source_sha256": "0" * 64, "dtype": "float32",
    "norm": "none",
}  # fmt: skip
GRID = {"x": np.linspace(-1, 1, 4), "y": np.linspace(-1, 1, 3)}


def filled(draw: np.random.Generator, kind: type[Any], /, **own: Any) -> Any:
    """A result with these values; its other arrays are random, 3 along each dimension whose size is not given."""
    hints, sizes = typing.get_type_hints(kind), {d: len(names) for d, names in kind.labels_of.items()}
    own = {f.name: ABOUT[f.name] for f in dataclasses.fields(kind) if f.name in ABOUT} | own
    for name in kind.shapes.keys() & own.keys():
        sizes |= zip(kind.shapes[name].replace("+", "").split(), np.shape(own[name]), strict=True)
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in kind.shapes:
            shape = [sizes.get(d, 3) for d in kind.shapes[field.name].replace("+", "").split()]
            texts = tuple(f"{field.name} {i}" for i in range(shape[0]))
            values[field.name] = draw.random(shape) + 0.1 if hints[field.name] is Array else texts
        elif field.default is field.default_factory is dataclasses.MISSING:
            values[field.name] = {bool: True, int: 9, float: 0.1, str: ""}[hints[field.name]]
    return kind(**values | own)


@functools.cache
def results() -> Mapping[str, Any]:
    """A result of every schema, and a checkpoint, the same ones in every process.

    Those that need no values of their own are not listed.
    """
    draw = np.random.default_rng(0)
    random, made = draw.random, functools.partial(filled, draw)
    two, delay, three = np.array([0.5, 0.6]), np.array([0, 1, 4]), random((3, 3)) + 0.1
    done, table = np.ones((3, 4), bool), random((3, 4))
    none = {
        "columns": (),
        "stated_error": np.zeros(0),
        "largest_error": np.zeros(0),
        "log_columns": (),
    }  # all is exact
    surface = made(
        landscape.Surface, **GRID, **none, done=done, kind="between", span=1.0, bn="center", method="plain", batchnorm=True,
        labels=("one", "two"), explained=two, axes=("a", "b"), own_loss=np.zeros(0), metric_names=(),
        metrics=np.zeros((0, 3, 4)),
    )  # fmt: skip
    found: dict[str, Any] = {
        "surface": surface,
        "basins": landscape.basins(surface),
        "hessian_grid": made(
            landscape.HessianGrid, **GRID, **none, lambda_min=-table, products=np.ones((3, 4), int), converged=table > 0.1,
            done=done, kind="random",
        ),
        "line": made(
            landscape.Line, **none, t=np.linspace(0, 1, 5), done=np.ones(5, bool), kind="interpolation", labels=("a", "b"),
            own_loss=np.zeros(0), metric_names=(), metrics=np.zeros((0, 5)),
        ),
        "noise": made(landscape.Noise),
        "batch_sharpness": made(landscape.BatchSharpness, local_batch=4, converged=True),
        "batch_spectrum": filled(
            np.random.default_rng(6), landscape.BatchSpectrum, values=np.array([[3.0, -1], [5, -2], [4, 0.5], [4.5, 0]]),
            whole=np.array([3.5, -0.5]), converged=True, parameters=20,
        ),
        "noise_scale": made(landscape.NoiseScale, gradient="draws", norm2=1.0, learners=3, local_batch=4, learner_draws=5),
        "spectrum": made(
            landscape.Spectrum, values=np.array([2.0, 1.0, -0.5]), lowest=1, nodes=random((2, 6)),
            masses=np.full((2, 6), 1 / 6), matrix="hessian", engine="landscape", parameters=20,
        ),
        "noise_alignment": made(landscape.NoiseAlignment, values=np.array([2.0, 1.0]), parameters=20),
        "comparison": comparison(),
        "sharpness": made(landscape.Sharpness, kind="worst", parameters=20),
        "critical_batch": made(landscape.CriticalBatch, batch=np.array([4, 8]), steps=np.array([20, 10]), loss=np.ones((2, 3))),
        "learning_coefficient": made(
            landscape.LearningCoefficient, rise=random((3, 8)) + 2, heating=random((3, 8)) / 9, r_hat=1.0, steps=16,
            burn_in=4, parameters=20, nbeta=4.0,
        ),
        "disagreement": made(landscape.Disagreement, values=np.array([2.0, 1.0]), parameters=20),
        "smoothing": made(Smoothing, lambda_max=2.0, draws=4),
        # These have a generator of their own: where they change, the pictures of the others stay.
        "label_counts": filled(np.random.default_rng(1), landscape.LabelCounts, counts=np.array([[40, 0, 3], [0, 25, 9]])),
        "connection": filled(np.random.default_rng(4), landscape.Connection, t=np.linspace(0, 1, 5), curve="bezier", own_loss=np.zeros(0)),
        "weight_average": filled(
            np.random.default_rng(3), landscape.WeightAverage, loss=two, low=two - 0.1, high=two + np.array([0.1, np.inf]),
            ratio=np.array([0.2, 2.0]), chosen=np.array([True, True, False]), level=0.9, bn="recalibrate",
            names=("average", "chosen average"), rank=0, stored_as="bfloat16",
        ),
        "stability": made(Stability, delay=delay, limit=three, lambda_max=2.0, momentum=0.9),
        "sweep": made(
            Sweep, keys=("lr", "batch"), settings=texts([["0.1", "10"], ["0.2", "10"]]), seeds=texts(["0 1", "0"]),
        ),
        "checkpoint": checkpoint(np.random.default_rng(2)),
    }  # fmt: skip
    known = {type(result) for result in found.values()}
    for name in registry.results:
        kind = registry.results[name]
        if kind not in known and kind.__module__.startswith("landscape.results."):
            found[name.removeprefix("landscape.")] = made(kind)
    return types.MappingProxyType(found)


def checkpoint(draw: np.random.Generator) -> Checkpoint:
    """A small run's."""
    steps = np.arange(1.0, 6.0)
    data = {"name": "synthetic", "options": {}, "train": 200, "test": 40, "fingerprint": "0" * 64}
    return Checkpoint(
        weights=torch.randn(4, 83, generator=torch.Generator().manual_seed(0)),
        layout=Layout((Slot("a.weight", (8, 10), 0, 80, "weight"), Slot("a.bias", (3,), 80, 3, "bias"))),
        step=5,
        epoch=1.0,
        algorithm="dpsgd",
        recipe=TOML,
        model={"name": "mlp", "options": {"widths": [6, 8, 3]}},
        data=data,
        lr=0.2,
        local_batch=10,
        seed=0,
        history={name: steps if name == "step" else draw.random(5) + 0.1 for name in UNITS},
        buffers={"bn.mean": torch.zeros(4, 3)},
        optimizer={"momentum": torch.zeros(4, 83)},
        shared={"start_norm2": torch.ones(())},
    )


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes of an IDX file."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def written(write: Callable[..., object], *args: Any, **options: Any) -> bytes:
    """What ``write(file, …)`` writes."""
    out = io.BytesIO()
    write(out, *args, **options)
    return out.getvalue()


def saved(state: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    return written(lambda out: torch.save(state, out, **options))


def wav() -> bytes:
    """A fifth of a second at 8 kHz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(0).integers(-999, 999, 1600).astype("<i2").tobytes())
    return out.getvalue()


@functools.cache
def idx_files() -> list[bytes]:
    """Six small images and their labels, as they are and packed."""
    images = np.random.default_rng(0).integers(0, 255, (6, 3, 3), dtype=np.uint8)
    plain = [idx(images), idx(np.arange(6, dtype=np.uint8))]
    return [*plain, *map(gzip.compress, plain)]


@functools.cache
def images() -> list[bytes]:
    """12 × 9 pixels, in two forms."""
    pixels = np.random.default_rng(0).integers(0, 255, (9, 12, 3), dtype=np.uint8)
    return [written(Image.fromarray(pixels).save, kind) for kind in ("PNG", "JPEG")]


@functools.cache
def states() -> list[bytes]:
    """The weights of the network, alone, in a checkpoint, and as older versions of torch wrote them."""
    state = net().state_dict()
    return [saved(state), saved({"state_dict": state}), saved(state, _use_new_zipfile_serialization=False)]


@functools.cache
def hdf5() -> list[bytes]:
    """A file of every schema, and one of several results."""
    with tempfile.TemporaryDirectory() as folder:
        path, raws = Path(folder) / "x.h5", []
        for result in [*results().values(), [results()["line"]] * 2]:
            base.save(result, path) if isinstance(result, list) else result.save(path)
            raws.append(path.read_bytes())
    return raws


@functools.cache
def record() -> list[bytes]:
    """The record of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        context = Context(Path(folder))
        run = recipe.read("digits-dpsgd", ["steps=3", "batch=50", "decompose.every=1"])
        context.train([run])
        return [(context.folder / "records" / f"{identity(run)}.json").read_bytes()]


#: What lies in a folder of figures, by suffix.
PAGE = {
    ".json": b'{"where": "Figure 2", "title": "t", "claims": "c", "scale": "laptop", "note": "n", "command": "c",'
    b' "seconds": 1.0, "version": "1", "pictures": ["a.png"], "compared": [], "verdict": "v"}',
    ".csv": b"algorithm,seed,test_error_percent\nSSGD,0,13.3\nDPSGD,0,3.1\nSSGD*,0,5.5\n",
}
