"""
A relief
========

The same numbers as a relief that is lit from the upper left.
"""

import landscape

surfaces = landscape.load("runs/contour.h5")  # landscape demo wrote it
figure = landscape.draw([surfaces[0], surfaces[5]], style="hillshade")
