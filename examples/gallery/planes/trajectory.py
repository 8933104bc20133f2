"""
A trajectory on its PCA plane
=============================

The two principal components of the checkpoints of a run, from its start to its end. The
caption says what share of the path lies in the plane.
"""

import landscape

steps = range(0, 501, 25)
runs = [landscape.load(f"runs/dpsgd-0/step-{step:07d}.h5") for step in steps]
weights = [run.stacked()["weights"].mean(0) for run in runs]
problem = runs[-1].problem(split="train")
plane = landscape.pca_plane(problem, weights, labels=[f"step {step}" for step in steps])
figure = landscape.contour(problem, plane, grid=31, **runs[-1].about("train")).plot()
