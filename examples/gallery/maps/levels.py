"""
Levels, labels and colors
=========================

Twelve levels at equal distances, with the loss written on some lines, in another color
map.
"""

import landscape

surface = landscape.load("runs/contour.h5")[5]
figure = surface.plot(log=False, levels=12, labels=True, cmap="cividis")
