"""
λ_max over minibatches
======================

The largest eigenvalue of the Hessian of each of 16 minibatches, at the ends of two runs.
"""

import landscape

runs = [landscape.load(f"runs/{name}-0/last.h5") for name in ("ssgd", "dpsgd")]
results = [landscape.batch_spectrum(run, 100, draws=16) for run in runs]
figure = landscape.draw(results, title="On average a minibatch has a larger λ_max than all samples")
