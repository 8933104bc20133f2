"""
Noise along the sharp directions
================================

The variance of gradients along the Hessian's eigenvectors, against their eigenvalues.
"""

import landscape

run = landscape.load("runs/ssgd-0/last.h5")
figure = landscape.noise_alignment(run, k=10, relative_error=0.2).plot()
