"""
Metrics on the line between two runs
====================================

F1 score and calibration error, from the same forward passes as the loss. In the middle
the network is wrong more often, and its confidence is wrong by up to 0.4.
"""

import landscape

runs = [landscape.load(f"runs/dpsgd-{seed}/last.h5") for seed in range(2)]
problem = runs[0].problem(split="test", metrics=["f1", "calibration"])
line = landscape.line(problem, *runs, labels=["seed 0", "seed 1"], split="test")
figure = line.plot(title="Between two runs error and calibration error rise")
