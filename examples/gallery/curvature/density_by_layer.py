"""
Densities by layer
==================

The spectrum of the block of the Hessian that belongs to each of three layers' weights.
Each eigenvalue is broadened to a peak.
"""

import landscape

problem = landscape.load("runs/ssgd-0/last.h5").problem(split="train")
layers = [name for name in dict(problem.model.named_parameters()) if name.endswith("weight")]
about = {"k": 3, "quantities": ["density"], "draws": 4, "split": "train"}
results = [
    landscape.spectrum(problem, part=name, label=place, **about)
    for name, place in zip(layers, ("first", "second", "third"), strict=True)
]
figure = landscape.draw(results, title="The first layer has the largest eigenvalues")
