"""
Two runs, aligned and connected
===============================

The barrier between two runs on the straight line, after the hidden units of the second
are permuted to match the first, and along a curve that is trained.
"""

import landscape

runs = [landscape.load(f"runs/dpsgd-{seed}/last.h5") for seed in range(2)]
a, b = (run.weights.mean(0) for run in runs)
paths = landscape.connect(runs[0], a, b, points=31, steps=300)
figure = paths.plot(title="Alignment leaves little of the barrier, a curve none")
