"""
Curvature by layer
==================

The ends of the spectrum of each layer's block of the Hessian, and the block's share of
the trace, for both algorithms.
"""

import landscape

tables = [
    landscape.curvature_table(landscape.load(f"runs/{name}-0/last.h5"), by="layer")
    for name in ("ssgd", "dpsgd")
]
figure = landscape.draw(tables)
