"""
Filter-normalized directions
============================

Each filter of a direction has the norm of the filter of the weights (Li et al. 2018),
so that networks of other scales can be compared. The loss is interpolated between the
points, within 1%.
"""

import landscape

run = landscape.load("runs/dpsgd-0/last.h5")
problem = run.problem(split="train")
plane = landscape.random_plane(problem, norm="filter", seed=1)
surface = landscape.contour(problem, plane, grid=51, span=1.0, interpolation_tol="1%", **run.about("train"))
figure = surface.plot()
