"""
The plane through three minima
==============================

Three runs from other seeds, and the one plane on which all three lie. The unit of
the axes is the distance between the first two runs.
"""

import landscape

runs = [landscape.load(f"runs/dpsgd-{seed}/last.h5") for seed in range(3)]
problem = runs[0].problem(split="train")
weights = [run.weights.mean(0) for run in runs]
plane = landscape.between(problem, weights, labels=["seed 0", "seed 1", "seed 2"])
surface = landscape.contour(problem, plane, grid=41, split="train", label="DPSGD, three seeds")
figure = surface.plot(title="Barriers lie between the minima of three seeds")
