"""
The noise scale of gradients
============================

The batch at which the noise of the gradient is as large as the gradient itself
(McCandlish et al. 2018), along a run: tr Σ/‖g‖², with the covariance Σ and the
mean g of the gradients of samples, at the mean w_a of the learners' weights.
"""

import landscape

runs = [landscape.load(f"runs/dpsgd-0/step-{step:07d}.h5") for step in (25, 100, 250, 500)]
results = [landscape.noise_scale(run, label=f"step {run.step}") for run in runs]
figure = landscape.draw(results)
