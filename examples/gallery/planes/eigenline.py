"""
A line along an eigenvector
===========================

The loss along the sharpest direction of each of two runs; t is the distance.
"""

import torch

import landscape

lines = []
for name in ("ssgd", "dpsgd"):
    problem = landscape.load(f"runs/{name}-0/last.h5").problem(split="train")
    sharpest = torch.from_numpy(landscape.top_eigenvalues(problem, k=1).vectors[0])
    lines.append(landscape.line(problem, sharpest, span=1.0, split="train", label=name.upper()))
figure = landscape.draw(lines, title="SSGD's sharpest direction is steeper than DPSGD's")
