"""
Sharpness by layer
==================

The largest eigenvalue of each layer's block of the Hessian, for both algorithms, in a
bar chart of pandas.
"""

import pandas as pd

import landscape

table = {}
for name in ("ssgd", "dpsgd"):
    problem = landscape.load(f"runs/{name}-0/last.h5").problem(split="train")
    layers = [name for name, _ in problem.model.named_parameters()]
    table[name.upper()] = [
        landscape.extreme_eigenvalues(problem, part=layer).max for layer in layers
    ]
axes = pd.DataFrame(table, index=layers).plot.barh(
    xlabel="largest eigenvalue of the block"
)
axes.invert_yaxis()
figure = axes.figure
