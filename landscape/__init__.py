"""Train with distributed SGD, decompose every step, and map the loss landscape around what it finds.

A name is imported when it is first used: ``import landscape`` alone takes milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from landscape._version import __version__

if TYPE_CHECKING:  # what editors and type checkers see
    from landscape import data as data
    from landscape import models as models
    from landscape import stability as stability
    from landscape.analysis.batch_sharpness import batch_sharpness as batch_sharpness
    from landscape.analysis.compare import compare as compare
    from landscape.analysis.contour import contour as contour
    from landscape.analysis.disagreement import disagreement as disagreement
    from landscape.analysis.hessian_grid import hessian_grid as hessian_grid
    from landscape.analysis.learning_coefficient import learning_coefficient as learning_coefficient
    from landscape.analysis.line import line as line
    from landscape.analysis.noise import estimate_noise as estimate_noise
    from landscape.analysis.noise_alignment import noise_alignment as noise_alignment
    from landscape.analysis.noise_scale import noise_scale as noise_scale
    from landscape.analysis.planes import (
        between as between,
    )
    from landscape.analysis.planes import (
        eigen_plane as eigen_plane,
    )
    from landscape.analysis.planes import (
        learners_plane as learners_plane,
    )
    from landscape.analysis.planes import (
        pca_plane as pca_plane,
    )
    from landscape.analysis.planes import (
        random_plane as random_plane,
    )
    from landscape.analysis.sharpness import sharpness as sharpness
    from landscape.analysis.smoothing import smoothing as smoothing
    from landscape.analysis.spectrum import spectrum as spectrum
    from landscape.checkpoint.checkpoint import Checkpoint as Checkpoint
    from landscape.checkpoint.files import load as load
    from landscape.checkpoint.foreign_weights import import_state as import_state
    from landscape.core.errors import (
        FailedError as FailedError,
    )
    from landscape.core.errors import (
        InputError as InputError,
    )
    from landscape.core.errors import (
        PathWarning as PathWarning,
    )
    from landscape.core.errors import (
        ProblemWarning as ProblemWarning,
    )
    from landscape.curvature.density import density as density
    from landscape.curvature.eigenvalues import (
        extreme_eigenvalues as extreme_eigenvalues,
    )
    from landscape.curvature.eigenvalues import (
        top_eigenvalues as top_eigenvalues,
    )
    from landscape.curvature.hessian import HessianOperator as HessianOperator
    from landscape.curvature.lanczos import Eigenpairs as Eigenpairs
    from landscape.curvature.lanczos import Ends as Ends
    from landscape.curvature.preconditioner import Preconditioner as Preconditioner
    from landscape.curvature.trace import trace as trace
    from landscape.geometry.vtk import save_vts as save_vts
    from landscape.problem.problem import Problem as Problem
    from landscape.results.base import save as save
    from landscape.results.comparison import Comparison as Comparison
    from landscape.results.curvature import BatchSharpness as BatchSharpness
    from landscape.results.curvature import Density as Density
    from landscape.results.curvature import Disagreement as Disagreement
    from landscape.results.curvature import Spectrum as Spectrum
    from landscape.results.curvature import Trace as Trace
    from landscape.results.flatness import LearningCoefficient as LearningCoefficient
    from landscape.results.flatness import Sharpness as Sharpness
    from landscape.results.flatness import Smoothing as Smoothing
    from landscape.results.grids import Basins as Basins
    from landscape.results.grids import HessianGrid as HessianGrid
    from landscape.results.grids import Line as Line
    from landscape.results.grids import Plane as Plane
    from landscape.results.grids import Surface as Surface
    from landscape.results.grids import barrier as barrier
    from landscape.results.noise import CriticalBatch as CriticalBatch
    from landscape.results.noise import NoiseAlignment as NoiseAlignment
    from landscape.results.noise import NoiseEstimate as NoiseEstimate
    from landscape.results.noise import NoiseScale as NoiseScale
    from landscape.results.stability import Escape as Escape
    from landscape.results.stability import Minima as Minima
    from landscape.results.tables import RunTimes as RunTimes
    from landscape.results.tables import Sweep as Sweep
    from landscape.train.experiments.critical_batch import critical_batch as critical_batch
    from landscape.train.own_loop.module import DecentralizedDataParallel as DecentralizedDataParallel
    from landscape.train.own_loop.recorder import Recorder as Recorder
    from landscape.train.processes.cluster import Cluster as Cluster
    from landscape.train.run.preconditioner import preconditioner as preconditioner

#: Public name -> the module that defines it.
_MODULES = {
    "BatchSharpness": "results.curvature",
    "Basins": "results.grids",
    "Checkpoint": "checkpoint.checkpoint",
    "Cluster": "train.processes.cluster",
    "Comparison": "results.comparison",
    "DecentralizedDataParallel": "train.own_loop.module",
    "Density": "results.curvature",
    "CriticalBatch": "results.noise",
    "Disagreement": "results.curvature",
    "Eigenpairs": "curvature.lanczos",
    "Ends": "curvature.lanczos",
    "Escape": "results.stability",
    "FailedError": "core.errors",
    "HessianGrid": "results.grids",
    "HessianOperator": "curvature.hessian",
    "InputError": "core.errors",
    "LearningCoefficient": "results.flatness",
    "Line": "results.grids",
    "Minima": "results.stability",
    "NoiseAlignment": "results.noise",
    "NoiseEstimate": "results.noise",
    "NoiseScale": "results.noise",
    "PathWarning": "core.errors",
    "ProblemWarning": "core.errors",
    "Plane": "results.grids",
    "Preconditioner": "curvature.preconditioner",
    "Problem": "problem.problem",
    "Recorder": "train.own_loop.recorder",
    "RunTimes": "results.tables",
    "Sharpness": "results.flatness",
    "Smoothing": "results.flatness",
    "Spectrum": "results.curvature",
    "Surface": "results.grids",
    "Sweep": "results.tables",
    "Trace": "results.curvature",
    "barrier": "results.grids",
    "batch_sharpness": "analysis.batch_sharpness",
    "between": "analysis.planes",
    "compare": "analysis.compare",
    "contour": "analysis.contour",
    "critical_batch": "train.experiments.critical_batch",
    "density": "curvature.density",
    "disagreement": "analysis.disagreement",
    "eigen_plane": "analysis.planes",
    "estimate_noise": "analysis.noise",
    "extreme_eigenvalues": "curvature.eigenvalues",
    "hessian_grid": "analysis.hessian_grid",
    "import_state": "checkpoint.foreign_weights",
    "learners_plane": "analysis.planes",
    "learning_coefficient": "analysis.learning_coefficient",
    "line": "analysis.line",
    "load": "checkpoint.files",
    "noise_scale": "analysis.noise_scale",
    "noise_alignment": "analysis.noise_alignment",
    "pca_plane": "analysis.planes",
    "preconditioner": "train.run.preconditioner",
    "random_plane": "analysis.planes",
    "save": "results.base",
    "save_vts": "geometry.vtk",
    "sharpness": "analysis.sharpness",
    "smoothing": "analysis.smoothing",
    "spectrum": "analysis.spectrum",
    "top_eigenvalues": "curvature.eigenvalues",
    "trace": "curvature.trace",
}
#: Public names that are packages themselves.
_PACKAGES = ("data", "models", "stability")

__all__ = [
    "__version__",
    *_PACKAGES,
    *_MODULES,
]


def __getattr__(name: str) -> Any:
    """The public name ``name``, imported (PEP 562)."""
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found  # the next use finds it at once
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
