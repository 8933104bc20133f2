"""Sound files of every kind, small ones, that the mutations start from."""

from __future__ import annotations

import gzip
import io
import struct
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image

import landscape
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import UNITS
from landscape.data.images import FILES
from landscape.paper.context import Context, identity
from landscape.problem.layout import Layout, Slot
from landscape.results import base
from landscape.results.flatness import Smoothing
from landscape.results.stability import Escape, Minima, Stability
from landscape.results.tables import COLUMNS, RunTimes, Sweep, texts
from landscape.train.recipes import recipe
from tests.examples import comparison

RNG = np.random.default_rng(0)
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


def results() -> dict[str, Any]:
    """A result of every schema, and a checkpoint."""
    grid = {"x": np.linspace(-1, 1, 4), "y": np.linspace(-1, 1, 3)}
    table = RNG.random((3, 4))
    about = {"split": "test", "label": "a label", "source": "last.h5", "source_sha256": "0" * 64}
    rows = ("gradient_s", "update_s", "exchange_s", "step_s", "step_error", "steps", "run_s", "waiting",
            "samples_per_s", "speedup", "efficiency")  # fmt: skip
    two = np.array([0.5, 0.6])
    surface = landscape.Surface(
        **grid, loss=table, accuracy=table, done=np.ones((3, 4), bool), directions=RNG.random((2, 5)),
        center=RNG.random(5), kind="between", norm="none", seed=0, span=1.0, samples=9, dtype="float32",
        bn="center", path="plain", batchnorm=True, labels=("one", "two"), markers=RNG.random((2, 2)),
        marker_loss=two, explained=two, **about,
    )  # fmt: skip
    hessians = landscape.HessianGrid(
        **grid, lambda_min=-table, lambda_max=table, ratio=table, residual_min=table, residual_max=table,
        hvps=np.ones((3, 4), int), converged=table > 0.1, kind="random", norm="none", seed=0, span=1.0,
        tol=0.01, samples=9, dtype="float32", **about,
    )  # fmt: skip
    line = landscape.Line(
        t=np.linspace(0, 1, 5), loss=RNG.random(5), accuracy=RNG.random(5), start=two, direction=two,
        kind="interpolation", barrier=0.1, samples=9, dtype="float32", bn="center", batchnorm=False,
        bn_samples=0, path="plain", ends=("a", "b"), **about,
    )  # fmt: skip
    noise = landscape.NoiseEstimate(
        **dict.fromkeys(("direct", "first_order", "delta_s", "delta_2", "delta_cross"), RNG.random(4)),
        full_batch=0.1, eq4=0.2, consensus=0.3, lr=0.1, learners=3, local_batch=4, samples=9, seed=0, **about,
    )  # fmt: skip
    spectrum = landscape.Spectrum(
        values=np.array([2.0, 1.0, -0.5]), residuals=np.zeros(3), lowest=1, converged=True, trace=3.0,
        trace_error=0.1, nodes=RNG.random((2, 6)), weights=np.full((2, 6), 1 / 6), parameters=20, hvps=12,
        kind="hessian", part="", engine="lanczos", tol=0.01, seed=0, samples=9, dtype="float32", **about,
    )  # fmt: skip
    batch_sharpness = landscape.BatchSharpness(
        curvature=RNG.random(4), norm2=RNG.random(4), batch=12, lambda_max=2.0, residual=0.01, lr=0.1, limit=1.2,
        tol=0.05, converged=True, samples=9, seed=0, dtype="float32", local_batch=4,
        learner_curvature=RNG.random((5, 3)), learner_norm2=RNG.random((5, 3)), **about,
    )  # fmt: skip
    noise_scale = landscape.NoiseScale(
        estimates=RNG.random(4) + 1, trace=2.0, trace_error=0.1, norm2=1.0, norm2_error=0.1, batch=12, draws=4,
        gradient="draws", tol=0.05, converged=False, samples=9, seed=0, dtype="float32", learners=3, local_batch=4,
        learner_draws=5, learner_estimates=RNG.random(5) + 1, learner_trace=2.0, learner_trace_error=0.1,
        learner_norm2=1.0, learner_norm2_error=0.1, round_trace=2.0, round_trace_error=0.1, round_norm2=-1.0,
        round_norm2_error=0.1, **about,
    )  # fmt: skip
    smoothing = Smoothing(
        loss=0.5, loss_smooth=two, loss_smooth_se=two / 9, lambda_max=2.0, residual=0.1, lambda_smooth=two,
        lambda_smooth_residual=two, lambda_smooth_se=two, lambda_smooth_bias=two, eigenvalues=two, share=two,
        trace_hs=0.1, consensus=0.1, lipschitz=two, lipschitz_smooth=np.stack([two, two]),
        lipschitz_smooth_se=np.stack([two, two]), lr=0.1, alpha_e=0.1, parameters=9, learners=3, pairs=4,
        samples=9, seed=0, converged=True, **about,
    )  # fmt: skip
    disagreement = landscape.Disagreement(
        values=np.array([2.0, 1.0]), residuals=two, spread_share=two / 2, spread_error=two / 9,
        gradient_share=two / 3, consensus=0.3, cost=0.1, cost_error=0.01, cost_top=0.05, loss=0.5,
        learners_loss=0.61, gradient_in_span=0.1, dominant_in_span=0.2, rank=2, grad_norm2=0.1, parameters=20,
        learners=3, hvps=12, converged=True, tol=0.01, seed=0, samples=9, dtype="float32", **about,
    )  # fmt: skip
    sharpness = landscape.Sharpness(
        values=two, standard_error=0.05, loss=0.5, kind="worst", rho=0.05, adaptive=True, m=4, reached=True,
        residual=0.01, gradients=60, steps=20, starts=1, fixed=2, parameters=20, seed=0, samples=9,
        dtype="float32", **about,
    )  # fmt: skip
    alignment = landscape.NoiseAlignment(
        values=two, residuals=two / 99, covariance=two, covariance_error=two / 9, ias=0.55, ias_error=0.02,
        noise_curvature=0.5, noise_curvature_error=0.02, trace_s=2.0, trace_c=1.5, grad_norm2=0.5, gamma=1.1,
        gamma_error=0.1, gamma_scatter=0.2, batch=4, draws=32, reached=True, parameters=20, hvps=50,
        converged=True, tol=0.05, seed=0, samples=9, dtype="float32", **about,
    )  # fmt: skip
    critical = landscape.CriticalBatch(
        batch=np.array([4, 8]), lr=two, steps=np.array([20, 10]), loss=np.ones((2, 3)), own_batch=4, step=5,
        trained_samples=80, tol=0.01, scaling="linear", samples=9, seed=0, dtype="float32", **about,
    )  # fmt: skip
    coefficient = landscape.LearningCoefficient(
        rise=RNG.random((3, 8)) + 2, heating=RNG.random((3, 8)) / 9, distance2=RNG.random((3, 8)), standard_error=0.1, r_hat=1.0,
        r_hat_distance=1.0, ess=400.0, nbeta=4.0, localization=100.0, step_size=1e-3, batch=4, steps=16, burn_in=4,
        loss=0.5, weights_norm2=2.0, lambda_max=1.5, parameters=20, max_rhat=1.01, tol=0.05, converged=True, seed=0,
        samples=9, dtype="float32", **about,
    )  # fmt: skip
    delay = np.array([0, 1, 4])
    three = RNG.random((3, 3)) + 0.1
    found: dict[str, Any] = {
        "surface": surface,
        "basins": surface.basins(),
        "hessian_grid": hessians,
        "line": line,
        "noise": noise,
        "batch_sharpness": batch_sharpness,
        "noise_scale": noise_scale,
        "spectrum": spectrum,
        "noise_alignment": alignment,
        "comparison": comparison(),
        "sharpness": sharpness,
        "critical_batch": critical,
        "learning_coefficient": coefficient,
        "disagreement": disagreement,
        "smoothing": smoothing,
        "stability": Stability(delay, three, 0.9, 2.0, 0.1, True, 0.1, 1.2, 1, 9, **about),
        "minima": Minima(
            delay, three, three, three * 1.1, np.full((3, 3), 50), three, 0.9, 1e-4, 2.0, 0.1, 0.5, 0.1, 0.1,
            4.0, 9, **about,
        ),
        "escape": Escape(np.ceil(99 * RNG.random((2, 3, 9))), np.array([2.0, 4.0, 8.0]), "dimension",
                         ("ssgd", "dpsgd"), 0.1, 100),
        "plan": RunTimes(
            workers=np.array([2, 4, 8]), algorithm=("ssgd", "dpsgd awc", "dpsgd atc"), mixing=("", "ring(1)", "full"),
            **dict.fromkeys(rows, np.array([1.0, 2.0, 3.0])), recipe="r", parameters=9, held=1, bandwidth=1e9,
            latency=1e-5, straggler=0.1, slow=1.0, all_reduce="ring", news=True, seed=0,
        ),
        "sweep": Sweep(
            keys=("lr", "batch"), settings=texts([["0.1", "10"], ["0.2", "10"]]), seeds=texts(["0 1", "0"]),
            **dict.fromkeys(COLUMNS, two),
        ),
        "checkpoint": checkpoint(),
    }  # fmt: skip
    return found


def checkpoint() -> Checkpoint:
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
        history={name: steps if name == "step" else RNG.random(5) + 0.1 for name in UNITS},
        buffers={"bn.mean": torch.zeros(4, 3)},
        optimizer={"momentum": torch.zeros(4, 83)},
        shared={"start_norm2": torch.ones(())},
    )


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes of an IDX file."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def wav() -> bytes:
    """A fifth of a second at 8 kHz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(RNG.integers(-999, 999, 1600).astype("<i2").tobytes())
    return out.getvalue()


def image(kind: str) -> bytes:
    """12 × 9 pixels."""
    out = io.BytesIO()
    Image.fromarray(RNG.integers(0, 255, (9, 12, 3), dtype=np.uint8)).save(out, kind)
    return out.getvalue()


def saved(state: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    out = io.BytesIO()
    torch.save(state, out, **options)
    return out.getvalue()


def numpy_file(array: np.ndarray[Any, Any]) -> bytes:
    """What np.save writes."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


PAGE = {
    "page": b'{"where": "Figure 2", "title": "t", "claims": "c", "scale": "laptop", "note": "n", "command": "c",'
    b' "seconds": 1.0, "version": "1", "pictures": ["a.png"], "compared": [], "verdict": "v"}',
    "rows": b"algorithm,seed,test_error_percent\nSSGD,0,13.3\nDPSGD,0,3.1\nSSGD*,0,5.5\n",
}


def record() -> bytes:
    """The record of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        context = Context(Path(folder))
        run = recipe.read("digits-dpsgd", ["steps=3", "batch=50", "decompose.every=1"])
        context.train([run])
        return (context.folder / "records" / f"{identity(run)}.json").read_bytes()


def all_samples(folder: Path) -> dict[str, list[bytes]]:
    """Kind of reader -> the bytes of sound files for it; HDF5 files without their checksum."""
    hdf5 = []
    for name, result in results().items():
        path = folder / f"{name}.h5"
        result.save(path)
        hdf5.append(path.read_bytes())
    several = folder / "several.h5"
    base.save([results()["line"], results()["line"]], several)
    hdf5.append(several.read_bytes())
    images, labels = RNG.integers(0, 255, (6, 3, 3), dtype=np.uint8), np.arange(6, dtype=np.uint8)
    state = net().state_dict()
    matrix = np.full((4, 4), 0.25)
    return {
        "hdf5": hdf5,
        "forged": hdf5,
        "drawing": hdf5,
        "idx": [idx(images), gzip.compress(idx(images)), idx(labels), gzip.compress(idx(labels))],
        "cifar": [RNG.integers(0, 9, 2 * 3073, dtype=np.uint8).tobytes()],
        "image": [image("PNG"), image("JPEG")],
        "wav": [wav()],
        "state": [saved(state), saved({"state_dict": state}), saved(state, _use_new_zipfile_serialization=False)],
        "safetensors": [safetensors.torch.save(state)],
        "matrix.npy": [numpy_file(matrix), numpy_file(matrix.astype("<f4"))],
        "matrix.csv": ["\n".join(",".join(map(str, row)) for row in matrix).encode()],
        "list.csv": [b"path,label\na.wav,yes\nb.wav,no\n"],
        "recipe": [TOML.encode()],
        **{kind: [raw] for kind, raw in PAGE.items()},
        "record": [record()],
        "environment": [b"x", b"-1", b"1e9", b"\xb2", b"", b"99999999999999999999", b"0x1"],
    }  # fmt: skip


assert len(FILES) == 4  # readers.py puts the mutated one among three sound ones
