"""Mistakes of users: the call, and what its one line must say. Nothing is computed, and no file is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import landscape
from landscape import Checkpoint, HessianOperator, InputError, LandscapeError, OperationError, Problem, Recipe
from landscape.core.memory import parse_size
from landscape.core.registry import algorithms
from landscape.data.base import mean_output
from landscape.testing.checks import RECIPE
from landscape.training.algorithms.dpsgd import SGP
from landscape.training.experiments import critical_batch
from landscape.training.recipes import recipe
from landscape.training.run import launch
from landscape.training.run.loop import Trainer
from landscape.training.topology import Mixing
from tests import problems
from tests.conftest import TINY

NORMED: dict[str, Any] = {
    "learners": 3, "batch": 36, "model": {"name": "tests.nets:norm_net"}, "decompose": {"every": 4},
    "evaluate": {"every": 6, "bn_samples": 100},
}  # fmt: skip
DPSGD, LOCAL = {"name": "dpsgd"}, {"name": "local-sgd", "period": 4}
DRAWN = torch.randn(4, 107, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
A, B, C, D = DRAWN


def trained(**changes: Any) -> Checkpoint:
    """A run of the recipe of the checks."""
    return Trainer(recipe.from_values(RECIPE | changes)).run()


def read(**changes: Any) -> object:
    """The recipe alone: what is refused before data is read."""
    return recipe.from_values(RECIPE | changes)


def normed(**changes: Any) -> object:
    """A run of a network with BatchNorm."""
    return trained(**NORMED | changes)


def tiny(*settings: str) -> object:
    """A run of the tests' recipe with ``settings``, as by --set."""
    Path("tiny.toml").write_text(TINY)
    return Trainer(recipe.read("tiny.toml", settings)).run()


def launched(*settings: str) -> object:
    """The same, into the folder "run"."""
    Path("tiny.toml").write_text(TINY)
    return launch.launch(recipe.read("tiny.toml", settings), Path("run"), data_dir=Path())


def optimized(name: str = "sgd", **options: Any) -> object:
    return trained(optimizer={"name": name, **options})


def grouped(**groups: Any) -> object:
    return optimized(groups=groups)


def monitored(**monitor: Any) -> object:
    return trained(monitor={"instruments": ["lambda-max"], "every": 4, **monitor})


def split(name: Any, **changes: Any) -> object:
    """A run of 4 learners whose 200 samples with 3 labels are divided."""
    return tiny(*(f"{key}={value}" for key, value in ({"data.split": name} | changes).items()))


def mixed(text: str, n: int = 2) -> object:
    """A mixing matrix from a file."""
    Path("m.csv").write_text(text)
    return Mixing("m.csv", n, 0)


def unconnected() -> object:
    np.savetxt("p.csv", [[1, 0.5, 0], [0, 0.5, 0.5], [0, 0, 0.5]], delimiter=",")
    return SGP(3, 0, "p.csv")


def pickled() -> object:
    np.save("p.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return Mixing("p.npy", 1, 0)


def build(name: str, **options: Any) -> object:
    return landscape.models.build(name, **options)


#: About runs and their recipes.
RUNS: list[tuple[Callable[[], object], str]] = [
    (lambda: read(algorithm=LOCAL | {"nodes": 3}), "algorithm.nodes: 'nodes.3.' is not allowed with 4 learners"),
    (lambda: read(algorithm=LOCAL | {"nodes": 2, "node_period": 3}), "algorithm.node_period: 3"),
    (lambda: read(algorithm=LOCAL | {"nodes": 2, "mixing": "full"}), "algorithm.nodes, algorithm.mixing: only one"),
    (lambda: read(algorithm={"name": "slowmo", "period": 4, "slow_momentum": 1.0}), "algorithm.slow_momentum: 1.0 is not allow"),
    (lambda: read(algorithm={"name": "async-sgd", "delay": 1, "schedule": "robin"}), "algorithm.schedule: 'robin' is not known"),
    (lambda: read(algorithm={"name": "dsgd-ac", "power": -1.0}), "algorithm.power: -1.0 is not allowed"),
    *((lambda mixing=mixing: algorithms.make("d2", {"mixing": mixing}, learners=8, seed=0), f"algorithm.mixing: '{mixing}' is not allowed with d2.*{why}")
      for mixing, why in (("hypercube", "smallest eigenvalue -0.5 "), ("exponential", "symmetric"), ("random-matching", "same"))),
    (unconnected, r"algorithm.graph: .*p.csv. is not allowed, it must be connected, it has 3 comp"),
    (lambda: normed(batch=3), "batch: 1 sample a learner at a time cannot be trained on .Expected more than 1 value"),
    (lambda: normed(accumulate=12), "batch: 1 sample a learner at a time"),
    (lambda: normed(model={"name": "tests.nets:Counting"}), "model: its buffer 'calls' changes in training"),
    (lambda: normed(decompose={"samples": 32}), "it must be ≥ 16 × 12"),
    (lambda: normed(evaluate={"bn_samples": 1}), "evaluate.bn_samples: 1 is not allowed"),
    (lambda: normed(model={"name": "tests.nets:none"}), "has no 'none'"),
    (lambda: normed(data={"name": "digits"}), "model and data do not fit"),
    (lambda: launched("model.widths=[5, 3]"), r"model and data do not fit.*inputs \(12, 6\)"),
    (lambda: launched("model.widths=[6, 4]"), r"outputs of shape \(4,\), data 'synthetic' needs \(3,\)"),
    (lambda: launched("model.widths=[6]"), r"model.widths: \[6\] is not allowed"),
    (lambda: launched("model.activation=rleu"), "did you mean 'relu'"),
    (lambda: launched("decompose.samples=100"), "decompose.samples: 100 is not allowed, it must be a multiple of 16"),
    (lambda: launched("init.sha256='00ff'"), "init.sha256: not allowed without init.checkpoint"),
    (lambda: launched("sampling=all"), "sampling: 'all' is not allowed with batch 40, it must be 200"),
    (lambda: launched("sampling=some"), "sampling: 'some' is not known"),
    (lambda: split("dirichlet"), "data.split: 'dirichlet' is not allowed .allowed: iid, dirichlet"),
    (lambda: split("labels(x)"), "data.split: 'labels.x.' is not allowed .allowed: iid"),
    (lambda: split("dirichlet(-1)"), "data.split: 'dirichlet.-1.' is not allowed"),
    (lambda: split(3), "data.split: 3 is not allowed, it must be a str"),
    (lambda: split("labels(1.5)"), "labels.COUNT., sizes.SHARE, …. with the sum 1"),
    (lambda: split("labels(4)"), "4 learners can have from 1 to 3 labels each"),
    (lambda: split("sizes(0.5, 0.5)"), "with the sum 1, by.COLUMN.; n = 4"),
    (lambda: split("sizes(0.97, 0.01, 0.01, 0.01)"), "learner 1 gets 2 of 200 samples, fewer than its"),
    (lambda: split("dirichlet(0.1)", batch=180), "a learner gets fewer than 45 samples"),
    (lambda: split("by(site)"), "the data has no such column .allowed: label"),
    (lambda: split("by(label)"), "the column has 3 different values for 4 learners"),
    (lambda: split("labels(2)", sampling="all", batch=200), "samples|sampling: 'all' is not"),
    (lambda: read(optimizer={"name": "torch:AdamV"}), r"optimizer\.name: 'torch:AdamV'.*torch:AdamW"),
    (lambda: read(optimizer={"name": "torch:AdamW", "lr": 0.1}), r"optimizer\.lr"),
    (lambda: read(optimizer={"name": "torch:AdamW", "weight_decay": "x"}), r"optimizer\.weight_decay: 'x'"),
    (lambda: read(optimizer={"name": "torch:AdamW", "eps": -1.0}), r"optimizer: 'torch:AdamW'.*epsilon"),
    (lambda: read(optimizer={"name": "torch:load"}), "'torch:load'"),
    (lambda: read(optimizer={"name": "lbfgs"}), "'torch:LBFGS'.*closure"),
    (lambda: read(optimizer={"name": "sparseadam"}), "'torch:SparseAdam'.*dense gradients"),
    (lambda: read(optimizer={"name": "adam", "weight_decy": 0.1}), "optimizer: 'weight_decy'.*'weight_decay'"),
    (lambda: read(optimizer={"name": "optimizer"}), r"optimizer\.name: 'optimizer' is not known"),
    (lambda: optimized("muon"), r"optimizer\.name: 'muon' .* takes matrices, .*optimizer\.groups\.matrix\.name=muon"),
    (lambda: optimized("torch:Muon"), r"'torch:Muon' .* takes matrices, and 1\.bias has shape .*give groups"),
    (lambda: grouped(bias={"name": "muon"}), r"optimizer\.groups\.bias\.name: 'muon' .* takes matrices"),
    (lambda: grouped(embedding={}), r"optimizer\.groups\.embedding: fits no parameter .*matrix, bias, head"),
    (lambda: grouped(**{"2.biass": {}}), r"optimizer\.groups\.2\.biass: fits no parameter that is left; did you mean"),
    (lambda: grouped(bias={"name": "adan"}), r"optimizer\.groups\.bias\.name: 'adan' is not known"),
    (lambda: grouped(bias={"momentun": 1}), r"optimizer\.groups\.bias: 'momentun' is not known"),
    (lambda: grouped(bias={"momentum": 2.0}), r"optimizer\.groups\.bias\.momentum: 2\.0 is not allowed"),
    (lambda: grouped(bias={"lr": 0.1}), r"optimizer\.groups\.bias\.lr: not allowed, give lr_factor"),
    (lambda: grouped(bias={"lr_factor": -1.0}), r"optimizer\.groups\.bias\.lr_factor: -1\.0"),
    (lambda: grouped(bias={"frozen": True, "momentum": 0.1}), "frozen: true is not allowed with .*momentum"),
    (lambda: optimized(groups=["bias"]), r"optimizer\.groups: \['bias'\] is not allowed, it must be a dict"),
    (lambda: grouped(bias=3), r"optimizer\.groups\.bias: 3 is not allowed, it must be a dict"),
    (lambda: read(dtype="float64", autocast="bfloat16"), "autocast: 'bfloat16' is not allowed with dtype 'float64'"),
    (lambda: monitored(instruments=["batch-sharpnes"]), "did you mean 'batch-sharpness'.*allowed: average, average-sharpness, batch-"),
    (lambda: monitored(instruments=["worst-sharpness"]), "monitor.rho: missing"),
    (lambda: monitored(instruments=["preconditioned-lambda-max"]), "'sgd' has no preconditioner"),
    (lambda: monitored(instruments=["generalized-sharpness"]), "'generalized-sharpness' is not allowed.*steepest"),
    (lambda: monitored(instruments="noise-scale"), r"monitor.instruments: 'noise-scale' is not allowed, it must be a list"),
    (lambda: monitored(sharpness=-1), "monitor.sharpness: -1 is not allowed"),
    (lambda: monitored(samples=-1), "monitor.samples: -1 is not allowed"),
    (lambda: monitored(k=0), "monitor.k: 0 is not allowed"),
    (lambda: monitored(sharp=1), "did you mean 'sharpness'"),
    (lambda: landscape.train("digits-dpsdg"), "^recipe: 'digits-dpsdg' is not known; did you mean"),
    (lambda: landscape.train("digits-dpsgd", lrr=1), "recipe key lrr: 'lrr' is not known; did you mean"),
    (lambda: landscape.train("digits-dpsgd", lr="fast"), "^lr: 'fast' is not allowed, it must be a finite number"),
    (lambda: landscape.train("digits-dpsgd", lr=None), "^lr: None is not allowed"),
    (lambda: landscape.train(None, "x", lr=1), "^settings: "),
    (lambda: landscape.train(None), "^recipe: missing"),
    (lambda: landscape.train("digits-dpsgd", resume=True, force=True), "^resume, force: only one"),
    (lambda: Recipe.read("digits-dpsgd").replace(batch=7), "^batch: 7 is not allowed, it must be divisible by 5 learners"),
    (lambda: Mixing("torus", 7, 0), "'torus' is not allowed with 7 learners, 7 is not R × C"),
    (lambda: Mixing("torus(1x7)", 7, 0), "both must be at least 2"),
    (lambda: Mixing("hypercube", 6, 0), "a power of two, such as 4 or 8"),
    (lambda: Mixing("ring", 6, 0), r"'ring' is not known \(allowed: full, ring\(k\)"),
    (lambda: Mixing("torus(4)", 4, 0), "rows and columns"),
    (lambda: Mixing("lazy(0, full)", 4, 0), "a: 0.0 is not allowed, it must be a finite number > 0 and ≤ 1"),
    (lambda: Mixing("lazy(x, full)", 4, 0), "a: 'x' is not allowed, it must be a finite number > 0 and ≤ 1"),
    (lambda: Mixing("ring(1, 2)", 9, 0), "k: '1,2' is not allowed, it must be a whole number ≥ 1"),
    (lambda: Mixing("lazy(0.5, random-matching)", 4, 0), "a named mixing, not drawn and not lazy"),
    (lambda: Mixing("lazy(0.5, m.csv)", 4, 0), "FORM: 'm.csv' is not known"),
    (lambda: Mixing("lazy(0.5, rung(1))", 4, 0), "'rung.1.' is not known"),
    (lambda: Mixing("full", 1 << 40, 0), "'full' is not allowed with 1099511627776 learners, > 4,096"),
    (lambda: mixed("0.5,0.5\n0.5,0.6\n"), "row 2 sums to 1.1"),
    (lambda: mixed("0.5,0.5\n0.4,0.6\n"), "column 2 sums to 1.1"),
    (lambda: mixed("1.5,-0.5\n-0.5,1.5\n"), "every entry must be finite and ≥ 0"),
    (lambda: mixed("1,0\n0,nan\n"), "finite"),
    (lambda: mixed("1,0,0\n0,1,0\n"), r"\(2, 3\) matrix, 2 learners need \(2, 2\)"),
    (lambda: build("resnet18"), "model.name: 'resnet18' is not known; did you mean 'resnet-18'?"),
    (lambda: build("resnet-18", widht=0.5), "model: 'widht' is not known; did you mean 'width'?"),
    (lambda: build("vgg-19", width=0.0), "model.width: 0.0 is not allowed"),
    (lambda: build("googlenet", classes=1), "model.classes: 1 is not allowed"),
    (lambda: build("lenet-5", size=12), "model.size: 12 is not allowed"),
    (lambda: build("gpt", heads=5), "model.heads: 5 is not allowed, it must divide 768 features"),
    (lambda: build("lstm", classes=10.5), "model.classes: 10.5 is not allowed, it must be a whole number"),
    *((lambda text=text: parse_size("--max-memory", text), "--max-memory: '.*' is not allowed, .* with its unit .B, KB")
      for text in ("", "0", "-1GiB", "2.5XiB", "GiB", "nan", "1 2", "0.0MB")),
]  # fmt: skip


def noisy(**std: float) -> Problem:
    """½ Σ λ_i w_i² with samples whose gradients or curvatures differ."""
    model = landscape.models.build("quadratic", eigenvalues=[4.0, 3.0, 2.0, 1.0])
    data = landscape.data.load("quadratic", dimension=4, samples=500, **std)
    return Problem(model, mean_output, data.train)


def other(of: Problem, weights: Tensor | None = None, batches: bool = False, check: str = "full") -> Problem:
    """The same at other weights, or in batches."""
    data: Any = [of.tensors] if batches else of.tensors
    return Problem(of.model, mean_output, data, weights=weights, check=check)


class Failing:
    shape = (3, 3)

    def __matmul__(self, block: Any) -> Any:
        raise RuntimeError("no such product")


def uneven() -> Problem:
    """Two batches whose sequences have different lengths."""
    ids = [torch.randint(7, (3, length)) for length in (4, 5)]
    return Problem(problems.LanguageModel(True), None, [{"input_ids": each, "labels": each} for each in ids])


P, ends, mlp = 107, landscape.extreme_eigenvalues, problems.mlp
top, trace, spectrum = landscape.top_eigenvalues, landscape.trace, landscape.spectrum
between, pca, learners_plane = landscape.between, landscape.pca_plane, landscape.learners_plane
average, line, disagreement, smoothing = (
    landscape.average, landscape.line, landscape.disagreement, landscape.smoothing,
)  # fmt: skip
FOUR, NAN = torch.ones(2, 4, dtype=torch.float64), torch.full((1, P), torch.nan, dtype=torch.float64)


def around(n: int) -> Tensor:
    """(n, P), weights near those of the small network."""
    return mlp().weights + 0.1 * torch.randn(n, P, dtype=torch.float64)


#: About analyses of the small network of the tests, P = 107.
ANALYSES: list[tuple[Callable[[], object], str]] = [
    (lambda: average(mlp(), [around(1)[0]]), "weights: those of 1 network"),
    (lambda: average(mlp(), [A, A[:5]]), r"weights\[1\]: shape \(5,\)"),
    (lambda: average(mlp(), around(33)), "33 members .* 2 to 32"),
    (lambda: average(mlp(), A), "weights: a vector is not allowed, it must be a list"),
    (lambda: average(mlp(), DRAWN[:3], [1, 1]), r"^coefficients: .*shape \(2,\)"),
    (lambda: average(mlp(), DRAWN[:3], [0, 0, 0]), "^coefficients: .*they must be finite and sum to more than 0"),
    (lambda: average(mlp(), DRAWN[:3], np.full(3, np.nan), base=A), "^coefficients: .*they must be finite$"),
    (lambda: average(mlp(), around(3), last=2), "last: not allowed without plan='windows'"),
    (lambda: average(mlp(), around(3), plan="grid"), "plan: 'grid' is allowed with a base and without coefficients"),
    (lambda: average(mlp(), around(3), [1, 1, 1], plan="windows"), "plan: 'windows' is allowed without a base"),
    (lambda: average(mlp(), DRAWN[:3], [1, np.nan, 1]), r"^coefficients\[1\]: nan"),
    (lambda: landscape.batch_sharpness(problems.conv(), 1), "batch: 1 .*≥ 2"),
    (lambda: landscape.batch_sharpness(noisy(gradient_std=0.1), 4, weights=torch.ones(2, 3)), "weights: shape"),
    (lambda: landscape.batch_sharpness(noisy(gradient_std=0.1), 5, weights=FOUR), "batch: 5 is no multiple of the 2 learners"),
    (lambda: landscape.batch_sharpness(noisy(gradient_std=0.1), 4, local_batch=3), "local_batch: 3 .*without weights"),
    (lambda: landscape.batch_sharpness(noisy(gradient_std=0.1), 4, weights=FOUR, local_batch=0), "local_batch: 0"),
    (lambda: landscape.batch_sharpness(uneven(), 4), r"shapes \(4,\) and \(5,\).*pad"),
    (lambda: landscape.noise(noisy(gradient_std=0.1), torch.ones(1, 4), 1.0, 5), "of 1 network"),
    (lambda: landscape.noise(other(noisy(gradient_std=0.1), batches=True), FOUR, 1.0, 5), "tensors"),
    (lambda: landscape.noise_scale(noisy(gradient_std=0.1), 4, weights=torch.ones(1, 4)), "weights: those of 1 learner"),
    (lambda: landscape.noise_scale(noisy(gradient_std=0.1), 4, weights=torch.ones(2, 5)), "weights: shape"),
    (lambda: landscape.noise_scale(noisy(gradient_std=0.1), 4, weights=torch.ones(3, 4)), "no multiple of the 3 learners"),
    (lambda: disagreement(mlp(), torch.eye(3, P), k=999), "k: 999"),
    (lambda: disagreement(mlp(), torch.zeros(1, P)), "of 1 network"),
    (lambda: disagreement(mlp(), torch.zeros(3, 5)), r"weights: shape \(3, 5\)"),
    (lambda: disagreement(mlp(), None), "weights: missing"),
    (lambda: smoothing(mlp(), torch.zeros(1, P)), "of 1 network are not allowed"),
    (lambda: smoothing(mlp(), torch.zeros(3, 5)), r"weights: shape \(3, 5\)"),
    *((lambda v=v: mlp().hessian() @ v, words) for v, words in (
        (torch.ones(2), r"v: shape \(2,\) of float32, it must be \(\d+,\) or \(\d+, m\)"), (torch.ones(2, 3), r"v: shape \(2, 3\)"),
        (torch.ones(3, 2, 2), r"v: shape \(3, 2, 2\)"), (torch.ones(P, dtype=torch.int64), "v: shape .* of int64"),
        (np.ones(5), r"v: shape \(5,\) of float64"), ([1.0], r"v: \[1.0\] is not allowed"))),
    *((lambda of=of, given=given, options=options: of(given, **options), words) for of in (trace, ends) for given, options, words in (
        (np.ones((2, 3)), {}, r"problem: a ndarray of shape \(2, 3\), it must be square"),
        (np.ones(3), {}, r"problem: a ndarray of shape \(3,\)"),
        (np.triu(np.ones((9, 9))), {}, "problem: a ndarray is not symmetric, it must be: .* differ by"),
        (torch.eye(3, dtype=torch.int64), {}, "problem: a Tensor of torch.int64, it must be of floating-point"),
        (np.eye(3, dtype=complex), {}, "problem: a ndarray of complex128"),
        (Failing(), {}, r"problem: a Failing fails \(no such product\), .* must take a block"),
        (np.eye(3), {"matrix": "gauss-newton"}, "matrix: it is an option of a Problem"),
        (np.eye(3), {"weights": torch.ones(3)}, "weights: it is an option of a Problem"),
        (np.eye(3), {"part": "1"}, "part: it is an option of a Problem"),
        (np.eye(3), {"max_memory": 10**9}, "max_memory: it is an option of a Problem"))),
    *((lambda of=of, p=p, options=options: of(mlp(), 1, precondition=p, **options), words) for of in (top, spectrum) for p, options, words in (
        (torch.ones(3), {}, r"precondition: shape \(3,\)"),
        (torch.zeros(P), {}, f"precondition: {P} of {P} numbers are not positive"),
        (torch.full((P,), torch.nan), {}, "not positive and finite"), (torch.ones(P, 1), {}, "diagonal"),
        (torch.ones(P), {"engine": "pyhessian"}, "pyhessian"), (torch.ones(P), {"search": "no"}, "no"))),
    (lambda: top(mlp(), 2, engine="pyhessian"), "k: 2 .*, it must be 1"),
    (lambda: trace(mlp(), engine="pyhessian", part="1"), "part: '1' is not allowed with engine 'pyhessian'"),
    (lambda: trace(mlp(), engine="pyhessian", matrix="gauss-newton"), "matrix: 'gauss-newton' is not allowed with"),
    (lambda: spectrum(mlp(), quantities=["density"], engine="pyhessian"), "engine: 'pyhessian' is not .* density"),
    (lambda: trace(problems.linear_regression(), engine="pyhessian"), "engine: 'pyhessian' fails"),  # an unused parameter
    (lambda: top(mlp(), 10**6), f"k: 1000000 is not allowed, there are only {P} parameters"),
    (lambda: HessianOperator(mlp())(torch.ones(2)), r"v: shape \(2,\)"),
    (lambda: top(mlp(), initial=torch.ones(2)), r"initial: shape \(2,\), it must be \(107,\)"),
    (lambda: top(mlp(), initial=torch.zeros(P)), "initial: norm: 0.0 is not"),
    (lambda: landscape.density(mlp()).broadened(np.zeros(1), 0.0), "width: 0.0"),
    (lambda: trace(mlp(), part="1.wieght"), "part: '1.wieght' .*did you mean '1.weight'.*allowed"),
    (lambda: trace(mlp(), part=[]), "part: an empty list"),
    (lambda: trace(problems.linear_regression(), part="frozen"), "part: 'frozen' is no trainable parameter"),
    (lambda: landscape.loss_change(mlp(), A, A), "^after: it is equal to before"),
    (lambda: landscape.loss_change(mlp(), A, torch.ones(3)), r"^after: shape \(3,\), it must be"),
    (lambda: between(mlp(), [A]), "between: 1 weight vectors are not allowed, it takes two or three"),
    (lambda: between(mlp(), [A, B, C, D]), "between: 4 weight vectors"),
    (lambda: between(mlp(), A), "weights: a vector is not allowed, it must be a list"),
    (lambda: between(mlp(), [A, A[:3], B]), r"weights\[1\]: shape \(3,\), it must be \(107,\)"),
    (lambda: pca(mlp(), [A, B]), "2 checkpoints are too few, at least 3"),
    (lambda: pca(mlp(), [A, B, C], ["one"]), "labels: 1 for 3"),
    (lambda: learners_plane(mlp(), torch.stack((A, B))), "2 learners span no plane"),
    *((lambda given=given: line(mlp(), **given), words) for given, words in (
        ({"a": A, "b": B, "span": 1.0}, "runs from 0 to 1"),
        ({}, "a, direction: give two networks, a and b, or one direction"), ({"direction": A, "a": B}, "a, direction: "),
        ({"direction": A, "b": B}, "a, direction: "), ({"weights": []}, "weights: for a line it must be two networks"),
        ({"weights": 5}, "weights: 5 is not allowed, it must be a list"), ({"weights": [A, B], "direction": A}, "a, direction: "),
        ({"weights": [A, B], "a": A}, "weights: for a line it must be two networks"), ({"a": DRAWN}, r"direction: shape \(4, "),
        ({"weights": [A, B], "span": 1.0}, "runs from 0 to 1"), ({"a": A[:4], "b": B}, r"a: shape \(4,\)"))),
    *((lambda given=given: critical_batch(trained(steps=3), **given), words) for given, words in (  # type: ignore[arg-type]
        ({"factors": [1]}, r"factors: \[1.0\]"), ({"factors": [0.33, 1]}, "factors: 0.33"),
        ({"factors": [1, 2], "trained_samples": 16}, "trained_samples: 16"))),
]  # fmt: skip

#: What is allowed, and cannot be done with the numbers or files that there are.
FAILURES: list[tuple[Callable[[], object], str]] = [
    (lambda: launched("data={name='mnist'}"), "download the four IDX files"),
    (lambda: launched("init.checkpoint=none.h5"), "none.h5"),
    (lambda: mixed("a,b\n"), "cannot be read as a matrix"),
    (lambda: Mixing("none.csv", 1, 0), "none.csv cannot be read"),
    (pickled, "p.npy cannot be read"),
    (lambda: average(mlp(), [A, A]), "all 2 members are equal; give members that differ"),
    (lambda: average(mlp(), [A, A, A]), "all 3 members are equal"),  # whose mean is not, by its rounding
    (lambda: average(mlp(), torch.cat([DRAWN, NAN])), "NaN or infinite"),
    (lambda: landscape.batch_sharpness(other(noisy(curvature_std=0.1), torch.zeros(4)), 4), "gradient of a minibatch of 4 samples is zero"),
    (lambda: landscape.noise_scale(other(noisy(gradient_std=0.1), torch.full((4,), 1e308, dtype=torch.float64), check="off"), 4), "the loss there is inf"),
    (lambda: disagreement(mlp(), torch.zeros(3, P)), "consensus distance is 0"),
    (lambda: disagreement(mlp(), torch.full((3, P), torch.nan)), "consensus distance is nan"),
    (lambda: smoothing(mlp(), torch.zeros(3, P)), "consensus distance is 0, there is no spread"),
    (lambda: between(mlp(), [A, A, B]), "equal"),
    (lambda: between(mlp(), [A, B, A + 0.3 * (B - A)]), "one line"),
    (lambda: between(mlp(), [A, B, C * torch.nan]), r"weights\[2\]: its weights are NaN or infinite"),
    (lambda: pca(mlp(), [A, B, (A + B) / 2]), "checkpoints: all 3 lie on one line"),
    (lambda: learners_plane(mlp(), A.expand(4, -1)), "learners: all 4 are equal"),
    (lambda: landscape.eigen_plane(mlp(), residual_tol=1e-12, max_products=3), "a residual is above 1e-12"),
    (lambda: critical_batch(dataclasses.replace(trained(steps=3), diverged="mean")), "diverged"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*input contained no data")  # numpy, of a matrix without numbers
@pytest.mark.parametrize(
    ("kind", "call", "line"),
    [(InputError, *row) for row in RUNS + ANALYSES] + [(OperationError, *row) for row in FAILURES],
)
def test_a_mistake_is_one_line(
    kind: type[LandscapeError],
    call: Callable[[], object],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=line) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
