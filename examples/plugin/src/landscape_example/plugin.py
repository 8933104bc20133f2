"""The entry point: the names that this package adds, and where each is defined."""

from landscape.plugins import registry

registry.algorithms.declare("clipped-ssgd", "landscape_example.algorithm:ClippedSSGD")
registry.data_sets.declare("two-moons", "landscape_example.data:two_moons")
registry.figures.declare("clipping", "landscape_example.figure:clipping")
registry.commands.declare(
    "two-moons", "landscape_example.command:two_moons", "Write the data set two-moons as a CSV file."
)
