"""
Densities by layer
==================

The spectrum of the block of the Hessian that belongs to each layer's weights.
"""

import landscape

problem = landscape.load("runs/ssgd-0/last.h5").problem(split="train")
layers = [name for name in dict(problem.model.named_parameters()) if name.endswith("weight")]
results = [
    landscape.spectrum(problem, k=3, quantities=["density"], part=name, draws=4, label=name)
    for name in layers
]
figure = landscape.draw(results)
