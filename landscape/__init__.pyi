# ruff: noqa: I001 - a name a line, which __init__.py reads
"""The public names, for type checkers, editors and __init__.py, which imports each when it is used."""

from landscape._version import __version__ as __version__
from landscape import data as data
from landscape import models as models
from landscape import limits as limits
from landscape import plugins as plugins
from landscape.analysis.average import average as average
from landscape.analysis.sharpness import batch_sharpness as batch_sharpness
from landscape.analysis.compare import compare as compare
from landscape.analysis.connection import connect as connect
from landscape.analysis.grids import contour as contour
from landscape.analysis.spectrum import curvature_table as curvature_table

# command: Measure noise and learners
from landscape.analysis.spread import disagreement as disagreement
from landscape.analysis.grids import hessian_grid as hessian_grid

# command: Measure noise and learners
from landscape.analysis.label_counts import label_counts as label_counts

# command: Measure curvature
from landscape.analysis.learning_coefficient import learning_coefficient as learning_coefficient
from landscape.analysis.grids import line as line
from landscape.analysis.loss_change import loss_change as loss_change

# command: Measure noise and learners
from landscape.analysis.noise import noise as noise

# command: Measure noise and learners
from landscape.analysis.noise import noise_alignment as noise_alignment
from landscape.analysis.noise import noise_scale as noise_scale
from landscape.analysis.planes import between as between
from landscape.analysis.planes import eigen_plane as eigen_plane
from landscape.analysis.planes import learners_plane as learners_plane
from landscape.analysis.planes import pca_plane as pca_plane
from landscape.analysis.planes import random_plane as random_plane

# command: Measure curvature
from landscape.analysis.sharpness import sharpness as sharpness
from landscape.analysis.spread import smoothing as smoothing
from landscape.analysis.spectrum import spectrum as spectrum
from landscape.checkpoint.checkpoint import Checkpoint as Checkpoint
from landscape.checkpoint.result_file import ResultFile as ResultFile
from landscape.checkpoint.result_file import open as open
from landscape.checkpoint.run_folder import load as load
from landscape.checkpoint.foreign_weights import import_state as import_state
from landscape.core.errors import InputError as InputError
from landscape.core.errors import LandscapeError as LandscapeError
from landscape.core.errors import OperationError as OperationError
from landscape.core.errors import PathWarning as PathWarning
from landscape.core.errors import ProblemWarning as ProblemWarning
from landscape.core.memory import forecast as forecast
from landscape.curvature.trace import density as density
from landscape.curvature.eigenvalues import extreme_eigenvalues as extreme_eigenvalues
from landscape.curvature.eigenvalues import top_eigenvalues as top_eigenvalues
from landscape.curvature.hessian import HessianOperator as HessianOperator
from landscape.curvature.hessian import Preconditioner as Preconditioner
from landscape.curvature.trace import trace as trace
from landscape.evaluation.grid import Execution as Execution
from landscape.geometry.vtk import save_vts as save_vts
from landscape.plots import draw as draw
from landscape.problem.problem import Problem as Problem
from landscape.problem.sharded import ShardedProblem as ShardedProblem
from landscape.reports.page import report as report
from landscape.results.base import save as save
from landscape.results.averages import WeightAverage as WeightAverage
from landscape.results.comparison import Comparison as Comparison
from landscape.results.curvature import BatchSharpness as BatchSharpness
from landscape.results.connection import Connection as Connection
from landscape.results.spectrum import CurvatureTable as CurvatureTable
from landscape.results.spectrum import LossChange as LossChange
from landscape.results.spectrum import Density as Density
from landscape.results.curvature import Disagreement as Disagreement
from landscape.results.spectrum import Eigenpairs as Eigenpairs
from landscape.results.spectrum import ExtremeEigenvalues as ExtremeEigenvalues
from landscape.results.spectrum import Spectrum as Spectrum
from landscape.results.spectrum import Trace as Trace
from landscape.results.flatness import LearningCoefficient as LearningCoefficient
from landscape.results.flatness import Sharpness as Sharpness
from landscape.results.flatness import Smoothing as Smoothing
from landscape.results.flatness import Basins as Basins
from landscape.results.grids import HessianGrid as HessianGrid
from landscape.results.grids import Line as Line
from landscape.results.grids import Plane as Plane
from landscape.results.grids import Surface as Surface
from landscape.geometry.surfaces import barrier as barrier
from landscape.geometry.surfaces import basins as basins
from landscape.results.noise import CriticalBatch as CriticalBatch
from landscape.results.noise import NoiseAlignment as NoiseAlignment
from landscape.results.noise import Noise as Noise
from landscape.results.noise import NoiseScale as NoiseScale
from landscape.results.training import LabelCounts as LabelCounts
from landscape.results.training import Stability as Stability
from landscape.results.training import Sweep as Sweep
from landscape.training.recipes.recipe import Recipe as Recipe
from landscape.training.recipes.recipe import recipes as recipes
from landscape.training.topology.mixing import topologies as topologies
from landscape.training.run.launch import train as train

from landscape.training.experiments.sweep import sweep as sweep
from landscape.training.experiments.stability import stability as stability

# command: Measure noise and learners
from landscape.training.experiments.continued import critical_batch as critical_batch
from landscape.training.own_loop.module import DecentralizedDataParallel as DecentralizedDataParallel
from landscape.training.own_loop.recorder import Recorder as Recorder
from landscape.training.optimizer.preconditioning import preconditioner as preconditioner
