"""Train with distributed SGD, decompose every step, and map the loss landscape around what it finds."""

from landscape import data, models
from landscape._version import __version__
from landscape.analysis.contour import contour
from landscape.analysis.hessian_grid import hessian_grid
from landscape.analysis.line import line
from landscape.analysis.noise import estimate_noise
from landscape.analysis.planes import between, eigen_plane, learners_plane, pca_plane, random_plane
from landscape.analysis.smoothing import smoothing
from landscape.analysis.spectrum import spectrum
from landscape.checkpoint.checkpoint import Checkpoint, load
from landscape.checkpoint.foreign_weights import import_state
from landscape.core.errors import FailedError, InputError, PathWarning
from landscape.curvature.density import density
from landscape.curvature.eigenvalues import extreme_eigenvalues, top_eigenvalues
from landscape.curvature.hessian import HessianOperator
from landscape.curvature.lanczos import Eigenpairs, Ends
from landscape.curvature.trace import trace
from landscape.problem.problem import Problem
from landscape.results.base import save
from landscape.results.escape import Escape
from landscape.results.hessian_grid import HessianGrid
from landscape.results.line import Line, barrier
from landscape.results.minima import Minima
from landscape.results.noise import NoiseEstimate
from landscape.results.plane import Plane
from landscape.results.run_times import RunTimes
from landscape.results.smoothing import Smoothing
from landscape.results.spectrum import Density, Spectrum, Trace
from landscape.results.surface import Surface
from landscape.results.sweep import Sweep
from landscape.results.vtk import save_vts
from landscape.train.recorder import Recorder

__all__ = [
    "Checkpoint",
    "Density",
    "Eigenpairs",
    "Ends",
    "Escape",
    "FailedError",
    "HessianGrid",
    "HessianOperator",
    "InputError",
    "Line",
    "Minima",
    "NoiseEstimate",
    "PathWarning",
    "Plane",
    "Problem",
    "Recorder",
    "RunTimes",
    "Smoothing",
    "Spectrum",
    "Surface",
    "Sweep",
    "Trace",
    "__version__",
    "barrier",
    "between",
    "contour",
    "data",
    "density",
    "eigen_plane",
    "estimate_noise",
    "extreme_eigenvalues",
    "hessian_grid",
    "import_state",
    "learners_plane",
    "line",
    "load",
    "models",
    "pca_plane",
    "random_plane",
    "save",
    "save_vts",
    "smoothing",
    "spectrum",
    "stability",
    "top_eigenvalues",
    "trace",
]
