"""
The noise that the spread adds
==============================

Δ(2), what the learners' spread adds to the noise of a step, early and at the end: by
its definition, on the full batch, by Eq. 4 of DPSGD-2020, and to first order. α is the learning rate,
H the Hessian, and C the covariance of the learners, divided by their number.
"""

import landscape

results = []
for step in (50, 500):
    run = landscape.load(f"runs/dpsgd-0/step-{step:07d}.h5")
    results.append(landscape.noise(run, draws=16))
figure = landscape.draw(results, title="The spread adds far more noise early than at the end")
