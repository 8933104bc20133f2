"""The papers' recipes by name, and their figures. Nothing but the command line imports this."""

from landscape.paper import beside, edge, microscope, mnist, networks, others, systems
from landscape.paper.tables import NETWORKS, SERIES, names, read

# The modules that list figures, in the order of the gallery.
FIGURES = (networks, mnist, beside, systems, others, edge, microscope)

__all__ = ["FIGURES", "NETWORKS", "SERIES", "names", "read"]
