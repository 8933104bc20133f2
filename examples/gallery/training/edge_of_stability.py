"""
The edge of stability
=====================

ηλ, the learning rate times the sharpness, along five runs of each algorithm. Dotted
lines: the limits of stability, 2 of SSGD and 1 of DPSGD with full averaging.
"""

import matplotlib.pyplot as plt
import numpy as np

import landscape
from landscape.plugins import registry

figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for name, limit in (("ssgd", 2), ("dpsgd", 1)):
    color = registry.algorithms[name].color
    ax.axhline(limit, color=color, linestyle=":")
    for seed in range(5):
        history = landscape.load(f"runs/{name}-{seed}/last.h5").history
        measured = np.isfinite(history["lambda_max"])  # every 20th step
        ax.plot(
            history["step"][measured],
            0.5 * history["lambda_max"][measured],
            color=color,
            alpha=0.6,
        )
    ax.plot([], [], color=color, label=name.upper())
ax.set(xlabel="step", ylabel="ηλ$_{max}$")
ax.legend()
