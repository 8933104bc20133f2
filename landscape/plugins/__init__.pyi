# ruff: noqa: I001 - a name a line, which __init__.py reads
"""What packages of one's own build on, for type checkers, editors and __init__.py."""

from landscape.core import registry as registry
from landscape.core.registry import Registry as Registry
from landscape.core.options import choose as choose
from landscape.core.options import positive as positive
from landscape.core.errors import InputError as InputError
from landscape.core.errors import OperationError as OperationError
from landscape.training.algorithms import Rule as Rule
from landscape.training.algorithms.central import SSGD as SSGD
from landscape.training.optimizer.base import Optimizer as Optimizer
from landscape.training.instruments import Instrument as Instrument
from landscape.training.topology import Mixing as Mixing
from landscape.data.base import Dataset as Dataset
from landscape.data.base import classification as classification
from landscape.results.base import Result as Result
from landscape.results.base import Sourced as Sourced
from landscape.results.base import Measured as Measured
from landscape.results.base import Measurement as Measurement
from landscape.results.grids import Interpolated as Interpolated
from landscape.results.shown import Row as Row
from landscape.plots import draws as draws
from landscape.plots.picture import panels as panels
from landscape.plots.picture import wrapped_panels as wrapped_panels
from landscape.plots.picture import finish as finish
from landscape.cli.options import command as command
from landscape.cli.output import files as files
from landscape.paper.compared import compare_with_paper as compare_with_paper
from landscape.paper.compared import summary as summary
from landscape.paper.context import Context as Context
from landscape.paper.context import Ended as Ended
from landscape.paper.figure import Drawing as Drawing
from landscape.paper.figure import figure as figure
from landscape.paper.figure import test_error as test_error
from landscape.paper.verdicts import Effect as Effect
from landscape.paper.verdicts import Rows as Rows
from landscape.paper.verdicts import paired_effect as paired_effect
