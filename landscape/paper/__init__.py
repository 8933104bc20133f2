"""The papers' recipes by name; their figures are in ``figures/``, one file a paper and theme."""

from landscape.paper.recipes import NETWORKS, SERIES, names, read

__all__ = ["NETWORKS", "SERIES", "names", "read"]
