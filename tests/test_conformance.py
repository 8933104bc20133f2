"""Everything that is registered, and the analyses, through the checks that landscape.testing has for plugins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import landscape
from landscape import Problem, testing
from landscape.core import registry
from landscape.core.devices import accelerator
from landscape.testing import CHECKS, Truth
from tests import problems
from tests.harm.samples import results
from tests.test_batch_sharpness import along_gradient
from tests.test_batch_sharpness import noisy as noisy_curvature
from tests.test_learning_coefficient import coefficient_of_a_quadratic, regression
from tests.test_noise import aligned, norm2
from tests.test_noise import noisy as noisy_gradients
from tests.test_sharpness import noisy as least_squares

DEVICES = ["cpu", *([str(found)] if (found := accelerator()) else [])]
SPECTRUM = [4.0, 1.0, 0.5, -0.2]


def of_learners(function: Callable[..., Any]) -> Callable[..., Any]:
    """An analysis of a problem and its learners."""
    return lambda problem, **options: function(problem, problems.around(problem, 3), **options)


def disagreement(problem: Problem, *, seed: int = 0, drawn: Any = None, **options: Any) -> Any:
    """Of learners that are drawn from ``seed`` where their distribution is ``drawn``."""
    weights = problems.around(problem, 3) if drawn is None else drawn(problem, seed)
    return landscape.disagreement(problem, weights, seed=seed, **options)


def independent(problem: Problem, seed: int) -> Tensor:
    """16 learners with standard deviation 2 in the first three coordinates and 0.5 in the others."""
    sizes = np.where(np.arange(len(problem.weights)) < 3, 2.0, 0.5)
    drawn = np.random.default_rng(seed).normal(size=(16, len(sizes))) * sizes
    return problem.weights + torch.from_numpy(drawn).to(problem.weights)


def at_minimum(function: Callable[..., Any]) -> Callable[..., Any]:
    """An analysis of a problem after 200 steps of gradient descent, which are made once for a network."""
    minima: dict[int, Tensor] = {}

    def analysis(problem: Problem, **options: Any) -> Any:
        size = problem.layout.size
        for _ in range(0 if size in minima else 200):
            problem.weights.sub_(problem.gradient(), alpha=0.5)
        problem.weights.copy_(minima.setdefault(size, problem.weights.clone()))
        return function(problem, **options)

    return analysis


def numbered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A table whose groups have numbers for names: those of parameters differ with the form of the data."""

    def analysis(problem: Problem, **options: Any) -> Any:
        found = function(problem, **options)
        return dataclasses.replace(found, groups=tuple(map(str, range(len(found.groups)))))

    return analysis


def traces_of_blocks(problem: Problem) -> np.ndarray[Any, Any]:
    """The traces of the Hessian and of its blocks."""
    diagonal = problems.textbook_hessian(problem).diag().numpy()
    blocks = problem.layout.groups("block").values()
    parts = [sum(diagonal[s.offset : s.offset + s.size].sum() for s in block) for block in blocks]
    return np.array([diagonal.sum(), *parts])


def of_plane(function: Callable[..., Any]) -> Callable[..., Any]:
    """An analysis of a problem and a plane."""
    return lambda problem, seed=0, **options: function(
        problem, landscape.random_plane(problem, seed=seed), **options
    )


def up_to_sign(function: Callable[..., Any]) -> Callable[..., Any]:
    """Eigenvectors times ±1, so that the largest component is positive: the sign is no result."""

    def analysis(problem: Problem, **options: Any) -> Any:
        found = function(problem, **options)
        largest = np.take_along_axis(found.vectors, np.abs(found.vectors).argmax(1)[:, None], 1)
        return dataclasses.replace(found, vectors=found.vectors * np.sign(largest))

    return analysis


def on(make: Callable[[], Problem]) -> Callable[[str], Problem]:
    """A problem of the tests on a device."""

    def made(device: str) -> Problem:
        there = make()
        if device == "cpu":
            return there
        options = {"penalty": there.penalty, "weight_decay": there.weight_decay}
        return Problem(there.model, there.criterion, there.tensors, device=device, **options)

    return made


H, GAMMA = np.array([8.0, 4.0, 2.0, 1.0, 0.5]), 1.2
C = H**GAMMA / 10
COVERED = problems.quadratic([5.0, 4.0, 3.0, *np.linspace(0.1, 1, 37)], rotate=False)

BLOCK_TRACES = traces_of_blocks(problems.mlp(samples=20))

ANALYSES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "batch-sharpness": (
        landscape.batch_sharpness, {"batch": 6, "max_draws": 16},
        {"memory": "landscape.batch_sharpness, (problem, 20), dict(min_draws=2, max_draws=2)",
         "refused": {"batch": 0, "relative_error": 0, "min_draws": 1, "max_draws": 5, "seed": -1},
         "command": ("batch-sharpness", "--max-draws", "16"),
         "truth": Truth(on(lambda: noisy_curvature(0.4)), {"value": along_gradient(noisy_curvature(0.4))},
                        {"value": "standard_error"}, {"batch": 5, "max_draws": 4000, "quantities": ()})},
    ),
    "batch-spectrum": (
        landscape.batch_spectrum, {"batch": 6, "draws": 3, "residual_tol": 1e-6},
        {"memory": "landscape.batch_spectrum, (problem, 20), dict(draws=2, max_products=20)",
         "refused": {"batch": 0, "k": 0, "draws": 1, "weight_decay": -1.0, "residual_tol": 0.0, "seed": -1, "matrix": "no"}, "rtol": 1e-3,
         "command": ("batch-spectrum", "--draws", "3"),
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM)), {"whole": np.array([4.0, -0.2])}, rtol=1e-4)},
    ),
    "noise-scale": (
        landscape.noise_scale, {"batch": 6, "max_draws": 16},
        {"memory": "landscape.noise_scale, (problem, 20), dict(min_draws=2, max_draws=2)",
         "refused": {"batch": 0, "relative_error": 0, "min_draws": 1, "max_draws": 5, "seed": -1, "gradient": "no"},
         "command": ("noise-scale", "--max-draws", "16"),
         "truth": Truth(on(lambda: noisy_gradients(2.0)), {"value": 16 / norm2(noisy_gradients(2.0)), "trace": 16},
                        {"value": "standard_error", "trace": "trace_error"}, {"batch": 4, "max_draws": 2000})},
    ),
    "disagreement": (
        disagreement, {"k": 2},
        {"memory": "landscape.disagreement, (problem, weights, 1), dict(max_products=20)",
         "refused": {"k": 0, "residual_tol": 0.0, "seed": -1, "search": "fast"}, "rtol": 1e-3,
         "command": ("disagreement", "--k", "3"), "seeded": False},
    ),
    "disagreement of drawn learners": (
        disagreement, {"k": 3, "residual_tol": 1e-4, "drawn": independent},
        {"truth": Truth(on(lambda: COVERED), {
             "value": 12 / (12 + 37 / 4), "cost": 15 / 32 * float(4 * 12 + np.linspace(0.1, 1, 37).sum() / 4)},
             {"value": "standard_error", "cost": "cost_error"})},
    ),
    "noise-alignment": (
        landscape.noise_alignment, {"batch": 6, "k": 2, "min_draws": 9, "max_draws": 9},
        {"memory": "landscape.noise_alignment, (problem, 20, 1), dict(min_draws=8, max_draws=8)",
         "refused": {"batch": 0, "k": 0, "max_draws": 1, "relative_error": 0.0, "seed": -1, "search": "fast"}, "rtol": 1e-3,
         "command": ("noise-alignment", "--k", "3"),
         "truth": Truth(on(lambda: aligned([*H], GAMMA)), {
             "ias": (H * (C + H**2)).sum() / (C + H**2).sum(), "noise_curvature": (H * C).sum() / C.sum(), "gamma": GAMMA},
             {"ias": "ias_error", "noise_curvature": "noise_curvature_error", "gamma": "gamma_error"},
             {"batch": 10, "k": 5, "relative_error": 1e-9, "max_draws": 64})},
    ),
    "worst sharpness": (
        landscape.sharpness, {"rho": 0.1, "m": 10, "min_draws": 4, "max_draws": 4, "steps": 5},
        {"memory": "landscape.sharpness, (problem, 0.05), dict(steps=2, starts=1)",
         "refused": {"rho": 0.0, "kind": "mean", "m": 0, "steps": 0, "starts": -1, "max_draws": 1, "relative_error": 0.0, "seed": -1},
         "command": ("sharpness", "--rho", "0.1"),
         "truth": Truth(on(lambda: problems.quadratic([4.0, 1.0, 0.5], start=1e-9)), {"value": 0.02 * (1 + 1e-7)},
                        options={"rho": 0.1, "m": None, "adaptive": False, "steps": 60}, rtol=1e-5)},
    ),
    "average sharpness": (
        landscape.sharpness, {"rho": 0.3, "kind": "average", "min_draws": 8, "max_draws": 8},
        {"command": ("sharpness", "--rho", "0.1", "--kind", "average", "--min-draws", "8", "--max-draws", "8"),
         "truth": Truth(on(least_squares), {"value": 0.09 * float(
             (least_squares().tensors[0].square().mean(0) * least_squares().weights**2).sum())},  # type: ignore[index]
             {"value": "standard_error"}, {"m": 4, "relative_error": 1e-9, "max_draws": 60}, draws=15)},
    ),
    "learning-coefficient": (
        at_minimum(landscape.learning_coefficient),
        {"batch": 20, "max_steps": 1000, "max_rhat": 9.0, "localization": 100.0, "nbeta": 1.0},
        {"refused": {"batch": 0, "localization": 0.0, "step_size": -1.0, "nbeta": math.nan, "chains": 1, "relative_error": 0.0,
                     "max_rhat": math.inf, "max_steps": 10, "seed": -1}, "rtol": 1e-4,
         "command": ("learning-coefficient", "--batch", "20", "--nbeta", "5", "--max-steps", "1000", "--max-rhat", "2"),
         "truth": Truth(on(lambda: regression(samples=200, spread=0.2)),
                        {"value": coefficient_of_a_quadratic(regression(samples=200, spread=0.2), 1.0)},
                        {"value": "standard_error"},
                        {"batch": 100, "localization": 1.0, "max_rhat": 1.05, "max_steps": 20000, "nbeta": None}, 20)},
    ),
    "noise": (
        of_learners(landscape.noise), {"lr": 0.1, "local_batch": 4, "draws": 4},
        {"memory": "landscape.noise, (problem, weights, 0.1, 20), dict(draws=2)",
         "refused": {"local_batch": 0, "draws": 1, "seed": -1}, "forms": ("dict",), "command": ("noise", "--draws", "2")},
    ),
    "smoothing": (
        of_learners(landscape.smoothing), {"draws": 2, "k": 2},
        {"memory": "landscape.smoothing, (problem, weights), dict(draws=2, k=1, residual_tol=0.3)",
         "refused": {"draws": 1, "k": 0, "seed": -1}, "rtol": 1e-3},
    ),
    "extreme-eigenvalues": (
        up_to_sign(landscape.extreme_eigenvalues), {"residual_tol": 1e-7},
        {"refused": {"residual_tol": 0.0, "max_products": 0, "seed": -1, "matrix": "no", "search": "no"}, "rtol": 1e-3, "seeded": False,
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM)), {"values": np.array([max(SPECTRUM), min(SPECTRUM)])}, rtol=1e-4)},
    ),
    "top-eigenvalues": (
        up_to_sign(landscape.top_eigenvalues), {"k": 2, "residual_tol": 1e-7},
        {"refused": {"k": 0, "residual_tol": 0.0, "seed": -1, "engine": "no", "part": "no"}, "rtol": 1e-3, "seeded": False,
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM)), {"values": np.array([4.0, 1.0])}, rtol=1e-4)},
    ),
    "trace": (
        landscape.trace, {"products": 12},
        {"refused": {"products": 5, "seed": -1, "matrix": "no", "engine": "no", "derivatives": "no"}, "rtol": 1e-3,
         "truth": Truth(on(lambda: problems.quadratic(list(np.linspace(-1, 3, 40)))), {"value": 40.0}, {"value": "standard_error"}, {"products": 30})},
    ),
    "density": (
        landscape.density, {"draws": 2, "steps": 5},
        {"refused": {"draws": 0, "steps": 0, "seed": -1, "matrix": "no", "part": "no"}, "rtol": 1e-3},
    ),
    "spectrum": (
        landscape.spectrum, {"k": 2, "quantities": ("trace",)},
        {"memory": "landscape.spectrum, (problem, 1), dict(quantities=['trace'], products=12, max_products=20)",
         "refused": {"k": -1, "residual_tol": 0.0, "seed": -1, "matrix": "no", "quantities": "x"}, "rtol": 1e-3, "seeded": False,
         "command": ("spectrum", "--k", "2", "--quantities", "trace"),
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM)), {"values": np.array([4.0, 1.0]), "trace": 5.3}, rtol=1e-4)},
    ),
    "curvature-table": (
        numbered(landscape.curvature_table), {"draws": 3, "residual_tol": 1e-6},
        {"memory": "landscape.curvature_table, (problem, 'layer'), dict(draws=8, max_products=20)",
         "refused": {"by": "no", "residual_tol": 0.0, "draws": 1, "max_products": 0, "seed": -1, "matrix": "no"}, "rtol": 1e-3,
         "command": ("spectrum", "--by", "layer", "--residual-tol", "0.5"),
         "truth": Truth(on(lambda: problems.mlp(samples=20)), {"trace": BLOCK_TRACES},
                        {"trace": "trace_error"}, {"draws": 20, "residual_tol": 0.5}, draws=20)},
    ),
    "loss-change": (
        numbered(lambda problem, **options: landscape.loss_change(problem, problem.weights, 0.5 * problem.weights, **options)), {"lr": 0.1},
        {"memory": "landscape.loss_change, (problem, problem.weights, 0.5 * problem.weights)",
         "refused": {"by": "no", "lr": 0.0, "derivatives": "no"}, "rtol": 1e-3, "seeded": False,
         # L = ½ Σ λ_i at 1, and the step goes half of the way to 0.
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM, rotate=False)),
                        {"gradient": -0.5 * sum(SPECTRUM), "curvature": sum(SPECTRUM) / 8})},
    ),
    "average": (
        of_learners(landscape.average), {},
        {"memory": "landscape.average, (problem, weights)",
         "refused": {"coefficients": [1.0, -1.0, 0.0], "bn_samples": 1}, "rtol": 1e-3, "seeded": False,
         "command": ("average", "--coefficients", "1,2,3,4")},
    ),
    "line": (
        lambda problem, **options: landscape.line(problem, torch.ones_like(problem.weights), **options),
        {"points": 5, "span": 0.5},
        {"memory": "landscape.line, (problem, plane.directions[0], 3)",
         "refused": {"points": 1, "bn": "no", "method": "no"}, "seeded": False,
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM, rotate=False)),
                        {"loss": 0.5 * sum(SPECTRUM) * (1 + np.linspace(-0.5, 0.5, 5)) ** 2})},
    ),
    "connect": (
        numbered(lambda problem, **options: landscape.connect(problem, problem.weights, 0.5 * problem.weights, **options)),
        {"points": 5, "steps": 3, "batch": 8, "bn_samples": 20},
        {"memory": "landscape.connect, (problem, problem.weights, 0.5 * problem.weights), dict(points=3, steps=2)",
         "refused": {"points": 2, "steps": -1, "curve": "no", "align": "no", "lr": 0.0, "batch": 0, "bn_samples": 1, "seed": -1}, "rtol": 1e-3,
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM, rotate=False)),
                        {"loss": 0.5 * sum(SPECTRUM) * np.stack([np.linspace(1, 0.5, 5) ** 2] * 3)}, options={"steps": 0})},
    ),
    "contour": (
        of_plane(landscape.contour), {"grid": (3, 4), "span": 0.5},
        {"memory": "landscape.contour, (problem, plane, (3, 3))",
         "refused": {"grid": 0, "span": 0.0, "bn": "no", "method": "no", "autocast": "no"}, "command": ("contour", "--grid", "3")},
    ),
    "hessian-grid": (
        of_plane(landscape.hessian_grid), {"grid": (2, 3), "span": 0.5},
        {"memory": "landscape.hessian_grid, (problem, plane, (2, 1)), dict(max_products=20)",
         "refused": {"grid": 0, "span": 0.0, "residual_tol": 0.0, "search": "no"}, "rtol": 1e-2, "command": ("hessian-grid", "--grid", "2"),
         "truth": Truth(on(lambda: problems.quadratic(SPECTRUM)), {"lambda_max": np.full((3, 2), 4.0)}, rtol=1e-3)},
    ),
}  # fmt: skip
#: Function -> a call of it, whose peak of memory tests/test_needs.py compares with the forecast.
MEMORY = {
    call.partition(",")[0].removeprefix("landscape."): call
    for _, _, more in ANALYSES.values()
    if (call := more.pop("memory", ""))
}

RULES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ssgd": ("ssgd", {}, {}),
    "ssgd*": ("ssgd*", {"sigma": 0.0}, {"refused": {"sigma": -1.0}}),
    "dpsgd awc": ("dpsgd", {"mixing": "ring(1)"}, {"refused": {"order": "act", "mixing": "torsu", "buffers": "no"}}),
    "dpsgd atc": ("dpsgd", {"mixing": "random-matching", "order": "atc"}, {"sharp": False}),
    "dpsgd mixed": ("dpsgd", {"mixing": "ring(1)", "buffers": "mix"}, {}),
    "local-sgd": ("local-sgd", {"period": 4, "nodes": 2, "node_period": 2}, {"refused": {"period": 0}}),
    "slowmo": ("slowmo", {"period": 4, "mixing": "ring(1)"}, {"refused": {"period": 0}}),
    "diloco": ("diloco", {"period": 4, "start": 3}, {"refused": {"period": 0}}),
    "sparta": ("sparta", {"share": 0.3}, {"refused": {"share": 1.5}}),
    "streaming-diloco": (
        "streaming-diloco", {"period": 4, "fragments": 2, "delay": 1, "own_share": 0.5},
        {"refused": {"fragments": 5, "delay": 4, "own_share": 1.0}}),
    "decoupled-diloco": (
        "decoupled-diloco", {"period": 4, "fragments": 2, "delay": 1, "quorum": 2, "availability": 0.4},
        {"refused": {"quorum": 9, "availability": 1.5, "merge": "no"}}),
    "async-sgd": ("async-sgd", {"delay": 3, "shifted": 0.5, "schedule": "random"}, {"refused": {"delay": -1}}),
    "async-sgd round": ("async-sgd", {"delay": 3}, {}),
    "ad-psgd": ("ad-psgd", {"delay": 2, "schedule": "random"}, {"refused": {"delay": -1}}),
    "sgp": ("sgp", {"graph": "random"}, {"refused": {"graph": "no"}}),
    "dsgd-ac": ("dsgd-ac", {"mixing": "ring(1)"}, {"refused": {"start": -1}}),
    "single-merge": ("single-merge", {"at": 5, "mixing": "ring(1)"}, {"sharp": False, "refused": {"at": 0}}),
    "noloco": ("noloco", {"period": 4}, {"sharp": False, "refused": {"period": 0}}),
    "noloco ring": ("noloco", {"period": 5, "mixing": "ring(1)"}, {"refused": {"outer_momentum": 1.0}}),
    "snoo": ("snoo", {"period": 4}, {"refused": {"period": 0}}),
    "gpa": ("gpa", {"mu_x": 0.9}, {"refused": {"mu_x": 1.0, "mu_y": 1.5}}),
    "demo": ("demo", {"k": 2, "chunk": 4}, {"refused": {"k": 0, "decay": 1.0}}),
    "sparseloco": ("sparseloco", {"period": 4, "share": 0.3}, {"refused": {"period": 0, "share": 1.5, "average": "no"}}),
    "gradient-tracking": ("gradient-tracking", {"mixing": "ring(1)"}, {"refused": {"order": "act"}}),
    "gradient-tracking atc": ("gradient-tracking", {"mixing": "ring(1)", "order": "atc"}, {}),
    "d2": ("d2", {"mixing": "lazy(0.9, ring(1))"}, {"refused": {"mixing": "random-matching"}}),
}  # fmt: skip

OPTIMIZERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {
        "refused": {"momentum": -1.0},
        "reference": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1)}),
    "lars": ({"groups": {"bias": {"name": "adamw", "lr_factor": 2.0}}}, {"refused": {"momentum": -1.0}}),
    "lamb": ({}, {"refused": {"epsilon": -1.0}}),
    "muon": (
        {"scale": "match_rms_adamw", "groups": {"bias": {"name": "sgd", "momentum": 0.5}}},
        {"refused": {"momentum": -1.0, "iterations": 0}}),
    "adamw": ({}, {"reference": lambda p: torch.optim.AdamW(p, 0.01)}),
    "steepest": ({"norm": "spectral"}, {"refused": {"norm": "nuclear"}}),
}  # fmt: skip

INSTRUMENTS: dict[str, dict[str, Any]] = {
    "lambda-max": {},
    "preconditioned-lambda-max": {
        "changes": {"optimizer": {"name": "adamw"}, "lr": 0.01}, "refused": {"optimizer": {"name": "sgd"}}},
    "batch-sharpness": {"refused": {"draws": 1}},
    "noise-scale": {"refused": {"every": 0}},
    "disagreement": {"refused": {"k": 0}},
    "noise-alignment": {},
    "noise-share": {"refused": {"draws": 1}},
    "path": {},
    "generalized-sharpness": {
        "changes": {"optimizer": {"name": "steepest", "norm": "spectral"}, "lr": 0.01}, "refused": {"optimizer": {"name": "sgd"}}},
    "worst-sharpness": {"refused": {"rho": -1.0}},
    "average-sharpness": {},
    "loss-change": {},
    "average": {"monitor": {"window": 2}, "refused": {"window": 1}},
}  # fmt: skip

TOPOLOGIES = [
    "full", "ring(2)", "torus", "torus(2x4)", "exponential", "one-peer-exponential", "hypercube", "random-matching", "star",
    "nodes(2)", "lazy(0.4, ring(1))", "base", "hyper-hypercube(3)", "k-peer-exponential(2)", "d-equistatic(3)",
    "u-equistatic(3)",
]  # fmt: skip

COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "connect": (
        ["{run}/step-0000005.h5", "{run}/last.h5", "--points", "3", "--steps", "2", "-o", "{folder}/c.h5"],
        {"must be two": ["{run}"], "--curve": ["{run}", "{run}", "--curve", "no"]}),
    "info": (["{run}/last.h5"], {"none.h5": ["none.h5"]}),
    "plot": (["{run}", "-o", "{folder}/p.png"], {"none.h5": ["none.h5"], "p.gif": ["{run}", "-o", "{folder}/p.gif"]}),
    "recipes": (["digits-ssgd"], {"digits-sgd": ["digits-sgd"]}),
    "topologies": (["--learners", "6", "base", "ring(2)", "--plot", "{folder}/t.png"], {"6 learners": ["--learners", "6", "hypercube"], "learners": ["--learners", "0"]}),
    "stability": (["--delay", "0,1", "{run}/last.h5", "-o", "{folder}/s.h5"], {"delay": ["--delay", "x"]}),
    "compare": (["{run}/step-0000005.h5", "{run}/last.h5", "--quantities", "loss", "-o", "{folder}/c.h5"], {"no": ["{run}", "--quantities", "no"]}),
    "critical-batch": (
        ["{run}", "--factors", "1,2", "--branches", "2", "--samples", "640", "-o", "{folder}/c.h5", "--plot", "{folder}/c.png"],
        {"--factors: 'x'": ["{run}", "--factors", "1,x"]}),
    "smoothing": (
        ["{run}/step-0000005.h5", "{run}/last.h5", "--draws", "3", "--steps", "2", "-o", "{folder}/s.h5"],
        {"there is no spread": ["{run}/step-0000000.h5", "--steps", "0", "-o", "{folder}/s.h5"],
         "--steps: -1": ["{run}/last.h5", "--steps", "-1", "-o", "{folder}/s.h5"]}),
}  # fmt: skip


def is_checked(name: str, check: str) -> bool:
    """The drawings have a test of their own, and some rows are there for their truth and command alone."""
    if name in ("disagreement of drawn learners", "average sharpness"):
        return check in ("truth", "command")
    if name == "connect":  # it estimates BatchNorm's statistics itself, at each point
        return check not in ("batchnorm", "picture")
    return check != "picture" or name == "line"


def is_slow(name: str, check: str) -> bool:
    """The learning coefficient takes 1,000 steps at least, and many draws make some truths slow."""
    if name == "learning-coefficient":
        return check != "refusals"
    return check == "truth" and name in ("noise-scale", "noise-alignment", "batch-sharpness")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, marks=[pytest.mark.slow] * is_slow(name, check))
        for name in ANALYSES
        for check in CHECKS["analysis"]
        if is_checked(name, check)
    ],
)
def test_an_analysis(name: str, check: str, device: str) -> None:
    analysis, options, more = ANALYSES[name]
    testing.check_analysis(analysis, options, **more, device=device, only=check)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS["rule"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule(name: str, check: str, device: str) -> None:
    rule, options, more = RULES[name]
    testing.check_rule(rule, options, **more, device=device, only=check)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS["optimizer"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(name: str, check: str, device: str) -> None:
    options, more = OPTIMIZERS[name]
    testing.check_optimizer(name, options, **more, device=device, only=check)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS["instrument"])
@pytest.mark.parametrize("name", INSTRUMENTS)
def test_an_instrument(name: str, check: str, device: str) -> None:
    testing.check_instrument(name, **INSTRUMENTS[name], device=device, only=check)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", CHECKS["topology"])
@pytest.mark.parametrize("spec", TOPOLOGIES)
def test_a_topology(spec: str, check: str, device: str) -> None:
    testing.check_topology(spec, 8, device=device, only=check)


DRAWN = sorted({*results()} - {"checkpoint"})


@pytest.mark.parametrize(
    ("name", "check"),
    [
        # The baseline of tests/test_plots.py has all that 'axes' asks for but the title, which one function writes.
        pytest.param(name, check, marks=[pytest.mark.slow] * (check == "axes" and name not in DRAWN[::6]))
        for name in DRAWN
        for check in CHECKS["drawing"]
    ],
)
def test_a_drawing(name: str, check: str) -> None:
    testing.check_drawing([results()[name]], only=check)


@pytest.mark.parametrize("check", CHECKS["command"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command(name: str, check: str) -> None:
    words, refused = COMMANDS[name]
    testing.check_command(name, words, refused=refused, only=check)


def test_everything_that_is_registered_is_checked() -> None:
    assert {name for name, _, _ in RULES.values()} == {*registry.algorithms.names()}
    assert {*registry.optimizers.names()} <= {*OPTIMIZERS}
    assert {*registry.instruments.names()} == {*INSTRUMENTS}
