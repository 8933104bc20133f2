"""Update rules by name; each adds itself to the registry."""

from landscape.core.registry import algorithms
from landscape.training.algorithms.base import Rule

__all__ = ["Rule", "make", "names", "options"]

names, options, make = algorithms.names, algorithms.options, algorithms.make
