"""
The difference of two surfaces
==============================

The loss around SSGD's weights minus that around DPSGD's, at the same distances from the
center.
"""

import landscape

surfaces = landscape.load("runs/contour.h5")  # landscape demo wrote it
figure = landscape.draw([surfaces[0], surfaces[5]], style="difference")
