"""
Smoothing by the learners' spread
=================================

The loss averaged over Gaussian noise of the size of the learners' spread: its sharpness
beside that of the loss. Isotropic: noise of the same size, equal in all directions.
"""

import landscape

runs = [landscape.load(f"runs/dpsgd-0/step-{step:07d}.h5") for step in (50, 500)]
results = [landscape.smoothing(run, draws=4, k=2) for run in runs]
figure = landscape.draw(results, title="Smoothing by the spread does not make the loss flatter")
