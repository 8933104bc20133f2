"""
Curvature by layer
==================

The ends of the spectrum of each layer's block of the Hessian, and the block's share of
the trace, for both algorithms. The layers 1, 3 and 5 have their places in the network as names.
"""

import landscape

tables = [
    landscape.curvature_table(landscape.load(f"runs/{name}-0/last.h5"), by="layer")
    for name in ("ssgd", "dpsgd")
]
figure = landscape.draw(tables, title="Most of the curvature is in the first layer")
