"""
Contours around two minima
==========================

The training loss around the weights that SSGD and DPSGD end with, on the same random
plane, with the same levels.
"""

import landscape

surfaces = []
for name in ("ssgd", "dpsgd"):
    run = landscape.load(f"runs/{name}-0/last.h5")
    problem = run.problem(split="train")
    plane = landscape.random_plane(problem, seed=0)
    surfaces.append(landscape.contour(problem, plane, grid=31, **run.about("train")))
figure = landscape.draw(surfaces)
