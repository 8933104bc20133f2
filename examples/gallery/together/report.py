"""
A report
========

One page about runs and results, which opens without a network: findings, pictures,
surfaces that can be turned, tables.
"""

import landscape

runs = [f"runs/{name}-{seed}" for name in ("ssgd", "dpsgd") for seed in range(3)]
landscape.report(
    [*runs, "runs/contour.h5", "runs/noise.h5"],
    "runs/page.html",
    title="SSGD and DPSGD",
)
