"""
Which one is flatter?
=====================

Each quantity of two groups of runs with its 95% interval, and what a test says about
their ratio: λ_max, the Hessian's largest eigenvalue, and its trace, the sum of all.
"""

import landscape

groups = {
    name: [landscape.load(f"runs/{name.lower()}-{seed}/last.h5") for seed in range(5)]
    for name in ("SSGD", "DPSGD")
}
result = landscape.compare(groups, quantities=["lambda-max", "trace"])
figure = result.plot()
result
