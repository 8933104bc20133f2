"""
A report
========

One page about runs and results, which opens without a network: pictures, tables,
surfaces that can be turned. The curves below are one of its pictures: of SSGD
(synchronous SGD) and DPSGD (decentralized SGD), with the effective learning rate
α_e, the noise Δ of a step, and its share Δ(2) that comes from the learners'
spread. Some values lie above the first and the seventh panel.
"""

import landscape

runs = [f"runs/{name}-{seed}" for name in ("ssgd", "dpsgd") for seed in range(2)]
files = [*runs, "runs/contour.h5", "runs/noise.h5"]
landscape.report(files, "runs/page.html", title="SSGD and DPSGD")
figure = landscape.draw(runs)
