"""
The plane of the Hessian's ends
===============================

The directions of the largest and the smallest eigenvalue of the Hessian: the sharpest
plane through the weights.
"""

import landscape

run = landscape.load("runs/ssgd-0/last.h5")
problem = run.problem(split="train")
plane = landscape.eigen_plane(problem)
surface = landscape.contour(problem, plane, grid=31, span=1.0, **run.about("train"))
figure = surface.plot(title="The Hessian's ends: steep and flat")
