"""
A heatmap of Hessian ratios
===========================

The ratio of the smallest to the largest eigenvalue along two random directions x and y: near
0 the loss is convex there, near 1 it is a saddle.
"""

import landscape

results = []
for name in ("ssgd", "dpsgd"):
    run = landscape.load(f"runs/{name}-0/last.h5")
    problem = run.problem(split="test")
    plane = landscape.random_plane(problem, seed=0)
    results.append(landscape.hessian_grid(problem, plane, grid=4, span=0.1, **run.about("test")))
figure = landscape.draw(results, title="Around both ends the loss is nearly convex")
