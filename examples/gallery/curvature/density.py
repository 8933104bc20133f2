"""
The density of the Hessian's eigenvalues
========================================

Stochastic Lanczos quadrature gives the density of all eigenvalues, Lanczos the largest
of them, drawn as ticks. Each eigenvalue is broadened to a peak.
"""

import landscape

results = []
for name in ("ssgd", "dpsgd"):
    run = landscape.load(f"runs/{name}-0/last.h5")
    problem = run.problem(split="train")
    results.append(landscape.spectrum(problem, k=5, quantities=["density"], draws=4, **run.about("train")))
figure = landscape.draw(results, title="SSGD ends with larger top eigenvalues than DPSGD")
