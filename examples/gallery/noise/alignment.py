"""
Noise along the sharp directions
================================

The variance of gradients along the Hessian's eigenvectors, against their eigenvalues.
The mean curvature along gradients of minibatches, and along their noise, is at most λ_max.
"""

import landscape

run = landscape.load("runs/ssgd-0/last.h5")
result = landscape.noise_alignment(run, k=10, relative_error=0.2)
figure = result.plot(title="Gradients are noisier along sharper directions")
