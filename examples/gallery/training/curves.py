"""
Curves of training
==================

Loss, test error, consensus distance, effective learning rate and noise of each step, of
runs of two algorithms.
"""

import landscape

runs = [landscape.load(f"runs/{name}-{seed}/last.h5") for name in ("ssgd", "dpsgd") for seed in range(5)]
figure = landscape.draw(runs)
