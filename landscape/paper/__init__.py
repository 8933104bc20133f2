"""The papers' recipes by name, and their figures. Nothing but the command line imports this."""

from landscape.paper import (
    beside,
    delay,
    edge,
    microscope,
    mnist,
    networks,
    others,
    rates,
    shapes,
    sixteen,
    systems,
)
from landscape.paper.tables import NETWORKS, SERIES, names, read

# The modules whose import lists the figures.
FIGURES = (networks, shapes, mnist, beside, sixteen, systems, others, rates, delay, edge, microscope)

__all__ = ["FIGURES", "NETWORKS", "SERIES", "names", "read"]
