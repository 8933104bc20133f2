"""
A surface in three dimensions
=============================

The loss as height. ``landscape report`` has surfaces that can be turned.
"""

import landscape

surfaces = landscape.load("runs/contour.h5")  # landscape demo wrote it
figure = landscape.draw([surfaces[0], surfaces[5]], style="surface")
