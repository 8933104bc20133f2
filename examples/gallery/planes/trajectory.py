"""
A trajectory on its PCA plane
=============================

The two principal components of the checkpoints of a run, from its start to its end. The
axes say what share of the variance is along them.
"""

import landscape

steps = range(0, 501, 25)
runs = [landscape.load(f"runs/dpsgd-0/step-{step:07d}.h5") for step in steps]
weights = [run.stacked()["weights"].mean(0) for run in runs]
problem = runs[-1].problem(split="train")
plane = landscape.pca_plane(problem, weights, labels=[f"step {step}" for step in steps])
surface = landscape.contour(problem, plane, grid=31, **runs[-1].about("train"))
figure = surface.plot(title="The run ends near the plane's lowest point")
