"""
The critical batch
==================

The loss after training goes on with other batches, on equally many samples, from the
weights of a run (Merrill et al. 2025).
"""

import landscape

run = landscape.load("runs/dpsgd-0/last.h5")
figure = landscape.critical_batch(run, [0.25, 0.5, 1]).plot()
