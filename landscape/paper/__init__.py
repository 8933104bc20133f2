"""The papers' recipes by name, and their figures. Nothing but the command line imports this."""

from landscape.paper.figures import (
    abstracts,
    delay,
    edge_of_stability,
    landscapes,
    learning_rates,
    mnist,
    networks,
    noise,
    sixteen_learners,
    systems,
    tables,
)
from landscape.paper.recipes import NETWORKS, SERIES, names, read

# The modules whose import lists the figures.
FIGURES = (
    networks, landscapes, mnist, tables, sixteen_learners, systems, abstracts, learning_rates, delay,
    edge_of_stability, noise,
)  # fmt: skip

__all__ = ["FIGURES", "NETWORKS", "SERIES", "names", "read"]
