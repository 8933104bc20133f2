"""
A line along an eigenvector
===========================

The loss along the sharpest direction of each of two runs.
"""

import torch

import landscape

lines = []
for name in ("ssgd", "dpsgd"):
    problem = landscape.load(f"runs/{name}-0/last.h5").problem(split="train")
    pairs = landscape.top_eigenvalues(problem, k=1)
    lines.append(landscape.line(problem, torch.from_numpy(pairs.vectors[0]), span=1.0, label=name.upper()))
figure = landscape.draw(lines)
