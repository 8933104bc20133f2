"""
Sharpness against the radius
============================

Adaptive sharpness (ASAM): the largest rise of the loss within a radius ρ around the
weights.
"""

import landscape

results = []
for name in ("ssgd", "dpsgd"):
    run = landscape.load(f"runs/{name}-0/last.h5")
    problem = run.problem(split="train")
    results += [landscape.sharpness(problem, rho, **run.about("train")) for rho in (0.1, 0.2, 0.5, 1.0)]
figure = landscape.draw(results, title="Within each radius SSGD's loss rises more than DPSGD's")
