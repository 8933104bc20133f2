"""
The edge of stability
=====================

η λ_max, the learning rate times the sharpness (the Hessian's largest eigenvalue), along five runs
of each algorithm, and its limit, above which training is unstable.
"""

import matplotlib.pyplot as plt
import numpy as np

import landscape
from landscape.plugins import registry

figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for name, limit in (("ssgd", 2), ("dpsgd", 1)):
    color = registry.algorithms[name].color
    ax.axhline(limit, color=color, linestyle=":", label=f"limit of {name.upper()}: {limit}")
    for seed in range(5):
        history = landscape.load(f"runs/{name}-{seed}/last.h5").history
        measured = np.isfinite(history["lambda_max"])  # every 20th step
        ax.plot(
            history["step"][measured],
            0.5 * history["lambda_max"][measured],
            color=color,
            alpha=0.6,
        )
    ax.plot([], [], color=color, label=f"{name.upper()}, five seeds")
ax.set(
    title="The sharpness falls below each limit",
    xlabel="step",
    ylabel=r"$\eta\,\lambda_{max}$ (learning rate × sharpness)",
)
ax.legend()
