"""
The line between two minima
===========================

Loss and accuracy on the straight line between the weights of two runs; the barrier is
in the legend.
"""

import torch

import landscape

runs = [landscape.load(f"runs/dpsgd-{seed}/last.h5") for seed in range(2)]
problem = runs[0].problem(split="test")
weights = torch.stack([run.weights.mean(0) for run in runs])
line = landscape.line(problem, weights=weights, points=41, labels=("seed 0", "seed 1"), split="test")
figure = line.plot(title="A barrier lies between the minima of two seeds")
