"""
A report
========

One page about runs and results, which opens without a network: pictures, tables,
surfaces that can be turned. The curves below are one of its pictures.
"""

import landscape

runs = [f"runs/{name}-{seed}" for name in ("ssgd", "dpsgd") for seed in range(2)]
files = [*runs, "runs/contour.h5", "runs/noise.h5"]
landscape.report(files, "runs/page.html", title="SSGD and DPSGD")
figure = landscape.draw(runs)
