"""Train with distributed SGD, decompose every step, and map the loss landscape around what it finds."""

from landscape import data, models, stability
from landscape._version import __version__
from landscape.checkpoint import Checkpoint, load
from landscape.contour import Surface, contour
from landscape.directions import Plane, random_plane
from landscape.eigenvalues import extreme_eigenvalues, top_eigenvalues
from landscape.escape import Escape
from landscape.hessian import HessianOperator
from landscape.hessian_grid import HessianGrid, hessian_grid
from landscape.lanczos import Eigenpairs, Ends
from landscape.line import Line, barrier, line
from landscape.minima import Minima
from landscape.noise import NoiseEstimate, estimate_noise
from landscape.options import FailedError, InputError, PathWarning
from landscape.planes import between, eigen_plane, learners_plane, pca_plane
from landscape.problem import Problem
from landscape.runtime import RunTimes
from landscape.smoothing import Smoothing, smoothing
from landscape.spectrum import Density, Spectrum, Trace, density, spectrum, trace
from landscape.state import import_state
from landscape.store import save
from landscape.sweep import Sweep
from landscape.vtk import save_vts

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
