"""
How far a metric holds
======================

The F1 score around the weights that SSGD and DPSGD end with. The dashed ring is where it
has lost 5%: its distance from the center says how far the weights may move.
"""

import landscape

surfaces = []
for name in ("ssgd", "dpsgd"):
    run = landscape.load(f"runs/{name}-0/last.h5")
    problem = run.problem(split="test", metrics=["f1"])
    plane = landscape.random_plane(problem, norm="filter", seed=0)
    surfaces.append(landscape.contour(problem, plane, grid=31, span=1.0, **run.about("test")))
rings = [surface.radius("f1", drop="5%") for surface in surfaces]
title = f"F1 falls by 5% at distances of {rings[0].median:.2g} (SSGD), {rings[1].median:.2g} (DPSGD)"
figure = landscape.draw(surfaces, quantity="f1", ring=rings, title=title)
