"""
Basins of a surface
===================

The regions of a surface that belong to each of its minima, on the plane through the
weights of three runs. White lines are the borders; below, the axes of the region around
the lowest point.
"""

import landscape

runs = [landscape.load(f"runs/dpsgd-{seed}/last.h5") for seed in range(3)]
problem = runs[0].problem(split="train")
plane = landscape.between(problem, [run.weights.mean(0) for run in runs])
surface = landscape.contour(problem, plane, grid=41, split="train", label="DPSGD, three seeds")
figure = landscape.basins(surface).plot()
